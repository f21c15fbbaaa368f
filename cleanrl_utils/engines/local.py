"""This machine: a pool of processes that share its cores and GPUs."""

import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import threading
import time
from datetime import timedelta
from fractions import Fraction

from cleanrl_utils import counted
from cleanrl_utils.engines import cells
from cleanrl_utils.engines.matrix import command_of


def thread_limits(workers, threads=None):
    """Variables that keep the threads of `workers` processes from outnumbering the cores; the user's own stay."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = str(threads or max(1, cores // max(1, workers)))
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
    return see(mine, -(-workers * per_cell // len(gpus)))


def see(gpus, sharing):
    """Variables that show a run these GPUs, which so many share; the user's own for JAX stay."""
    jax = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / sharing:.3f}", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    own = {name: value for name, value in jax.items() if sharing > 1 and name not in os.environ}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} | own


class Rooms:
    """The GPUs of this machine, for cells that say how many of their kind one has room for (`cells_per_gpu`)."""

    def __init__(self, gpus):
        self.free, self.turn, self.lock = dict.fromkeys(gpus, Fraction(1)), threading.Lock(), threading.Lock()

    def move(self, gpu, part):
        with self.lock:
            self.free[gpu] += part

    @contextlib.contextmanager
    def enter(self, number, stopping):
        """Wait for a place on the emptiest GPU, in the order of coming, and hold it; the variables that show it."""
        if number == 0 or not self.free:
            yield {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"} if number == 0 else {}
            return
        part = Fraction(1, number)
        with self.turn:
            while max(self.free.values()) < part and not stopping.is_set():
                time.sleep(0.1)
            gpu = max(self.free, key=self.free.get)
            self.move(gpu, -part)
        try:
            yield see([gpu], number)
        finally:
            self.move(gpu, part)


@contextlib.contextmanager
def mps(wanted):
    """NVIDIA's Multi-Process Service, where it is installed: without it, cells that share a GPU take turns on it."""
    program, started = shutil.which("nvidia-cuda-mps-control") if wanted else None, False
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # a pipe would stay open in the daemon
    # The daemon has to see all GPUs: cells name theirs as the machine does.
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    if program:
        started = subprocess.run([program, "-d"], env=env, check=False, **quiet).returncode == 0
        print("MPS is started" if started else "MPS was not started: it runs already, or cannot", flush=True)
    try:
        yield
    finally:
        if started:
            subprocess.run([program], input=b"quit\n", env=env, check=False, **quiet)


def run(matrix_path, board, options):
    """A pool of processes on this machine. A run that was killed or told to stop by somebody else is started again."""
    waiting = queue.SimpleQueue()
    for index in sorted(board.todo(), key=board.is_locked):  # what still runs from an earlier start comes last
        waiting.put((index, 0))
    workers = min(options.workers, len(board.todo()))
    gpus = visible_gpus()
    rooms, todo = Rooms(gpus), [board.cells[index] for index in board.todo()]
    packed = bool(gpus) and any(cell.get("cells_per_gpu", 0) > 1 for cell in todo)
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

    def place(cell, slot):
        """Where a cell runs, for as long as it does: the variables that say so."""
        if "cells_per_gpu" in cell:
            return rooms.enter(cell["cells_per_gpu"], stopping)
        return contextlib.nullcontext(gpu_share(slot, workers, gpus, options.gpus_per_cell))

    def work(slot):
        while not stopping.is_set():
            try:
                index, attempts = waiting.get_nowait()
            except queue.Empty:
                return
            cell = board.cells[index]
            with place(cell, slot) as shown:
                if stopping.is_set():
                    return
                board.set(index, "running")
                began = time.time()
                try:
                    env = os.environ | thread_limits(workers, cell.get("threads")) | shown
                    code, errors = start(index, slot, env)
                except Exception as error:  # such as too many open files: a cell that was not run has failed
                    code, errors = 1, repr(error)
            record = {}
            with contextlib.suppress(OSError):  # as above; what is lost is only how busy the workers were
                record = cells.read_json(board.folder / cell["id"] / "begun.json") or {}
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
    with mps(packed and options.mps):
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            next((thread for thread in threads if thread.is_alive()), threads[0]).join(0.2)
            if signals or (options.stop_after and time.time() - begun > options.stop_after and not stopping.is_set()):
                signals.clear()
                stop()
            board.draw()
    board.clear()
    wall = time.time() - begun
    print(f"{counted(workers, 'worker')}, busy {sum(alive) / (workers * wall):.1%} of {timedelta(seconds=int(wall))}")
    return stopping.is_set()
