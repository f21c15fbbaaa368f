"""This machine: a pool of processes that share its cores and GPUs."""

import os
import queue
import re
import shutil
import signal
import subprocess
import threading
import time
from datetime import timedelta

from cleanrl_utils.engines import cells
from cleanrl_utils.engines.matrix import command_of


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


def run(matrix_path, board, options):
    """A pool of processes on this machine. A run that was killed or told to stop by somebody else is started again."""
    waiting = queue.SimpleQueue()
    for index in sorted(board.todo(), key=board.is_locked):  # what still runs from an earlier start comes last
        waiting.put((index, 0))
    workers = min(options.workers, len(board.todo()))
    gpus, limits = visible_gpus(), thread_limits(workers)
    stopping, processes, signals, alive = threading.Event(), {}, [], []

    def start(index, slot, env):
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
                code, errors = start(index, slot, env)
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
    begun = time.time()
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
    wall = time.time() - begun
    print(f"{workers} workers, busy {sum(alive) / (workers * wall):.1%} of {timedelta(seconds=int(wall))}")
    return stopping.is_set()
