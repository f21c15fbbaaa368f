"""What is known of the cells while they run, here or elsewhere."""

import contextlib
import os
import shlex
import signal
import sys
import threading
from datetime import timedelta

from cleanrl_utils.engines import cells


class Board:
    """What is known of each cell, and the line that shows it: waiting, running, done, failed or interrupted."""

    def __init__(self, matrix, folder, workers):
        self.cells, self.folder, self.workers = matrix["cells"], folder, workers
        self.states = ["done" if cells.is_done(folder / cell["id"]) else "waiting" for cell in self.cells]
        self.seconds = []  # of the cells that are done, for the estimate
        self.detached = False  # whether an engine has left the cells to its queue
        self.lock = threading.Lock()

    def todo(self):
        return [index for index, state in enumerate(self.states) if state != "done"]

    def is_locked(self, index):
        folder = self.folder / self.cells[index]["id"]
        return (folder / "lock").exists() and cells.lock(folder, wait=False) is None

    def set(self, index, state, note=""):
        with self.lock:
            if self.states[index] == state:
                return
            self.states[index] = state
            if state == "done":
                with contextlib.suppress(OSError):  # such as too many open files: one cell less for the estimate
                    done = cells.read_json(self.folder / self.cells[index]["id"] / "done.json")
                    self.seconds.append(done["seconds"] if done else 0.0)
            if state in ("done", "failed", "interrupted"):
                self.clear()
                self.say(f"{state:11} {shlex.join(self.cells[index]['command'])}{note and f' ({note})'}\n")
        self.draw()

    def count(self, state):
        return self.states.count(state)

    def line(self):
        total, done = len(self.states), self.count("done")
        left = total - done - self.count("failed")
        parts = [f"{done} of {total} done", f"{self.count('running')} running", f"{self.count('failed')} failed"]
        if self.seconds and left:
            seconds = sum(self.seconds) / len(self.seconds) * left / max(1, min(self.workers or left, left))
            parts.append(f"about {timedelta(seconds=int(seconds))} left")
        return f"[{'#' * (20 * done // max(1, total)):20}] {', '.join(parts)}"

    def say(self, text):
        try:
            print(text, end="", flush=True)
        except BrokenPipeError:  # whoever read this has gone; the cells go on
            sys.stdout = open(os.devnull, "w")

    def clear(self):
        if sys.stdout.isatty():
            self.say("\r\033[K")

    def draw(self):
        with self.lock:
            if sys.stdout.isatty():
                self.say(f"\r\033[K{self.line()}")


def stop_signals():
    """An event that SIGINT and SIGTERM set."""
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *received: stopping.set())
    return stopping
