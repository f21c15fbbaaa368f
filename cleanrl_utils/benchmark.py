"""Run a command for every environment and seed, on this machine or on a cluster, and start it again to finish the rest.

    python -m cleanrl_utils.benchmark --env-ids CartPole-v1 Acrobot-v1 MountainCar-v0 \\
        --command "python cleanrl/ppo.py --no-cuda" --num-seeds 3 --workers 5
    python -m cleanrl_utils.benchmark --suite benchmark/suites/classic_control.toml --workers 2

A cell of the matrix is one command with one environment and one seed. Its record (log, lock, done marker) is a folder
in runs/.benchmark; see cleanrl_utils/cells.py. Whatever was killed, the same command started again does the rest: cells
that are done are skipped, interrupted ones go on from their checkpoints, those that still run are waited for. An edited
script is another experiment: its cells are run anew.

Exit codes: 0 every cell is done, 1 some failed, 2 wrong usage, 75 interrupted (Ctrl+C, SIGTERM): start it again.
"""

import argparse
import hashlib
import json
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from datetime import timedelta
from pathlib import Path

from cleanrl_utils import cells, fail

ENGINES = ("local", "slurm", "ray", "aws-batch")
SUITE_KEYS = {"commands", "env_ids", "num_seeds", "start_seed"}


def read_suite(path):
    """The tables [[run]] of a suite, with the keys at its top as their defaults."""
    try:
        suite = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        fail(f"--suite {path}: {error}")
    runs = suite.pop("run", [])
    if not isinstance(runs, list):
        fail(f"{path} has [run]: write [[run]], of which there may be several")
    for table in [suite, *runs]:
        if unknown := table.keys() - SUITE_KEYS:
            fail(f"{path} has {', '.join(sorted(unknown))}; a suite knows {', '.join(sorted(SUITE_KEYS))} and [[run]]")
    runs = [suite | run for run in runs]
    for run in runs or [{}]:
        if not all(isinstance(run.get(key), list) and run[key] for key in ("commands", "env_ids")):
            fail(f"{path} needs tables [[run]] with commands = [...] and env_ids = [...]")
        for key, least in (("num_seeds", 1), ("start_seed", 0)):
            if not isinstance(run.get(key, 1), int) or run.get(key, 1) < least:
                fail(f"{path}: {key} must be a number, at least {least}")
    return runs


def check_command(command):
    try:
        words = shlex.split(command)
    except ValueError as error:
        fail(f"the command {command} cannot be read: {error}")
    script = cells.script_of(words)[1]
    if not words or shutil.which(words[0]) is None:
        fail(f"there is no program {' '.join(words[:1]) or '(empty)'!r} to start --command with")
    if script and not Path(script).is_file():
        fail(f"there is no {script} in {Path.cwd()}: start this in the root of the repository")
    for flag in ("--env-id", "--seed", "--resume"):
        if any(word.split("=")[0].replace("_", "-") == flag for word in words):
            fail(f"the command has {flag}, which is added for each cell: --env-ids, --num-seeds, --start-seed")


def make_cells(options):
    """The matrix: every command with every environment and seed, each once."""
    runs = [{"commands": [options.command], "env_ids": options.env_ids}] if options.command else []
    runs += read_suite(options.suite) if options.suite else []
    found = {}
    for run in runs:
        first = options.start_seed if options.start_seed is not None else run.get("start_seed", 1)
        number = options.num_seeds if options.num_seeds is not None else run.get("num_seeds", 3)
        for command in run["commands"]:
            check_command(command)
            for env_id in run["env_ids"]:
                for seed in range(first, first + number):
                    cell = cells.make_cell(command, env_id, seed)
                    other = found.setdefault(cells.same_words(cell["command"]), cell)
                    if other["id"] != cell["id"]:
                        ours, theirs = shlex.join(cell["command"]), shlex.join(other["command"])
                        fail(f"tell these two apart with --exp-name, or their runs are mistaken: {ours} | {theirs}")
    return list(found.values())


def write_matrix(matrix, folder):
    """The list for cleanrl_utils.cells, under a name that is the same for the same list."""
    text = json.dumps(matrix, indent=1)
    path = folder / f"matrix-{hashlib.sha256(text.encode()).hexdigest()[:10]}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        cells.write_json(path, matrix)
    except OSError as error:
        fail(f"--state {folder}: {error}")
    return path


def command_of(matrix_path, index):
    """What runs one cell, on any machine with this folder. Without site-packages, to start in a few milliseconds."""
    return [sys.executable, "-I", "-S", str(Path(cells.__file__).resolve()), str(matrix_path.resolve()), str(index)]


class Board:
    """What is known of each cell, and the line that shows it: waiting, running, done, failed or interrupted."""

    def __init__(self, matrix, folder, workers):
        self.cells, self.folder, self.workers = matrix["cells"], folder, workers
        self.states = ["done" if cells.is_done(folder / cell["id"]) else "waiting" for cell in self.cells]
        self.seconds = []  # of the cells that are done, for the estimate
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


def thread_limits(workers):
    """Variables that keep the threads of `workers` processes from outnumbering the cores; the user's own stay."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = str(max(1, cores // max(1, workers)))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    names += ("NPROC",)  # what XLA takes as the number of cores
    return {name: threads for name in names if name not in os.environ}


def visible_gpus():
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return [str(index) for index in range(len(re.findall(r"^GPU \d+:", listed, flags=re.M)))]


def gpu_share(slot, workers, gpus, per_cell):
    """The GPUs of one of the workers, taken in turn, and the part of their memory that JAX may take."""
    if not gpus or per_cell < 1:
        return {}
    mine = [gpus[(slot * per_cell + i) % len(gpus)] for i in range(min(per_cell, len(gpus)))]
    share = {"CUDA_VISIBLE_DEVICES": ",".join(mine)}
    sharing = -(-workers * per_cell // len(gpus))
    if sharing > 1 and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        share["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.9 / sharing:.3f}"
    return share


def run_local(matrix_path, board, options):
    """A pool of processes on this machine. A run that was killed or told to stop by somebody else is started again."""
    waiting = queue.SimpleQueue()
    for index in sorted(board.todo(), key=board.is_locked):  # what still runs from an earlier start comes last
        waiting.put((index, 0))
    workers = min(options.workers, len(board.todo()))
    gpus, limits = visible_gpus(), thread_limits(workers)
    stopping, processes, signals, alive = threading.Event(), {}, [], []

    def run(index, slot, env):
        """One start of a cell: its exit code, and what it complained of."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        command = command_of(matrix_path, index)
        process = subprocess.Popen(command, env=env, start_new_session=True, text=True, **pipes)
        processes[slot] = process
        if stopping.is_set():
            process.terminate()
        _, errors = process.communicate()
        return 128 - process.returncode if process.returncode < 0 else process.returncode, errors.strip()

    def work(slot):
        env = os.environ | limits | gpu_share(slot, workers, gpus, options.gpus_per_cell)
        while not stopping.is_set():
            try:
                index, attempts = waiting.get_nowait()
            except queue.Empty:
                return
            board.set(index, "running")
            began = time.time()
            try:
                code, errors = run(index, slot, env)
            except Exception as error:  # such as too many open files: a cell that was not run has failed
                code, errors = 1, repr(error)
            record = cells.read_json(board.folder / board.cells[index]["id"] / "begun.json") or {}
            if record.get("ended", 0) >= began:
                alive.append(min(record["last_seconds"], time.time() - began))
            again = code == cells.INTERRUPTED or code > 128
            if code == 0:
                board.set(index, "done")
            elif stopping.is_set():
                board.set(index, "interrupted")
            elif again and attempts < options.retries:
                board.set(index, "waiting")
                waiting.put((index, attempts + 1))
            else:
                board.set(index, "failed", errors or f"exit code {code}")

    def stop():
        """Ask the cells to stop; the second time, kill them and their runs."""
        kill = stopping.is_set()
        stopping.set()  # before the processes are looked at: one that starts now looks at this
        if not kill:
            board.clear()
            print("Stopping: the runs write their checkpoints. Once more to kill them.", flush=True)
        for process in list(processes.values()):
            if process.returncode is None and kill:
                os.killpg(process.pid, signal.SIGKILL)
            elif process.returncode is None:
                process.terminate()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *received: signals.append(received))
    start = time.time()
    threads = [threading.Thread(target=work, args=[slot], daemon=True) for slot in range(workers)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        next((thread for thread in threads if thread.is_alive()), threads[0]).join(0.2)
        if signals:
            signals.clear()
            stop()
        board.draw()
    board.clear()
    wall = time.time() - start
    print(f"{workers} workers, busy {sum(alive) / (workers * wall):.1%} of {timedelta(seconds=int(wall))}")
    return stopping.is_set()


def show_failures(board):
    """The end of the log of each cell that failed; the same words are shown once."""
    ends = {}
    for cell, state in zip(board.cells, board.states):
        if state == "failed":
            log = board.folder / cell["id"] / "log.txt"
            lines = log.read_text(errors="replace").replace("\r", "\n").splitlines() if log.exists() else []
            last = max((i for i, line in enumerate(lines) if line.startswith("$ ")), default=-1)
            end = "\n".join(f"    {line}" for line in lines[last + 1 :][-12:])
            ends.setdefault(end, []).append((cell, log))
    for end, failed in ends.items():
        cell, log = failed[0]
        more = f" and {len(failed) - 1} more with the same words" if len(failed) > 1 else ""
        print(f"\nFailed: {shlex.join(cell['command'])}{more}\n{end}\n    (all of it: {log})")


def parse_args(engines):
    parser = argparse.ArgumentParser(
        prog="python -m cleanrl_utils.benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--env-ids", nargs="+", default=[], metavar="ID", help="environments to run --command in")
    parser.add_argument("--command", default="", help='what to run, such as "python cleanrl/ppo.py --no-cuda"')
    parser.add_argument("--num-seeds", type=int, metavar="N", help="seeds per environment (default: 3)")
    parser.add_argument("--start-seed", type=int, metavar="N", help="the first seed (default: 1)")
    parser.add_argument("--suite", metavar="FILE", help="a TOML file of commands and environments: benchmark/suites")
    parser.add_argument(
        "--workers", type=int, default=0, metavar="N", help="cells at a time; 0, the default, prints the commands only"
    )
    parser.add_argument("--engine", choices=ENGINES, default="local", help="where cells run (default: local)")
    parser.add_argument(
        "--gpus-per-cell", type=int, default=1, metavar="N", help="GPUs that a cell sees (default: 1; 0: all of them)"
    )
    parser.add_argument(
        "--retries", type=int, default=3, metavar="N", help="times that a killed cell is started again (default: 3)"
    )
    parser.add_argument(
        "--state", type=Path, default=Path("runs/.benchmark"), metavar="DIR", help="records (default: runs/.benchmark)"
    )
    engines.add_arguments(parser)
    return parser.parse_args()


def main():
    from cleanrl_utils import engines  # which imports this file

    options = parse_args(engines)
    if cells.fcntl is None:
        fail("file locks of this kind do not exist on Windows: use WSL, or --workers 0 and a loop of your own")
    if bool(options.command) != bool(options.env_ids) or not (options.command or options.suite):
        fail("what to run? --command and --env-ids, or --suite")
    if options.workers < 0 or (options.num_seeds is not None and options.num_seeds < 1):
        fail("--workers must be at least 0 and --num-seeds at least 1")
    if min(options.retries, options.gpus_per_cell) < 0:
        fail("--retries and --gpus-per-cell must be at least 0")
    matrix = {"cwd": str(Path.cwd()), "cells": make_cells(options)}
    if options.workers == 0 and options.engine in ("local", "ray"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for `| head`
        for cell in matrix["cells"]:
            print(shlex.join(cell["command"]))
        return
    board = Board(matrix, options.state, options.workers)
    matrix_path = write_matrix(matrix, options.state)
    run = {"slurm": engines.run_slurm, "ray": engines.run_ray, "aws-batch": engines.run_aws_batch}
    run = run.get(options.engine, run_local)
    if options.workers == 0:  # what would be submitted
        run(matrix_path, board, options)
        return
    print(f"{len(board.cells)} cells, {board.count('done')} done before; records are in {options.state}", flush=True)
    interrupted = run(matrix_path, board, options) if board.todo() else False
    board.clear()
    print(board.line())
    show_failures(board)
    if interrupted:
        print("\nInterrupted. The same command goes on from here.")
    elif board.count("failed"):
        print("\nThe same command tries those that failed again.")
    detached = options.engine == "slurm" and options.slurm_detach
    missing = board.count("failed") if detached else len(board.todo())
    sys.exit(cells.INTERRUPTED if interrupted else 1 if missing else 0)


if __name__ == "__main__":
    main()
