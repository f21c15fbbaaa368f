"""Ray: one task per cell, on a cluster or on a new one here."""

import math
import os
import shlex
import socket
import subprocess
import sys
import time

from cleanrl_utils import counted, fail
from cleanrl_utils.engines import cells
from cleanrl_utils.engines.board import stop_signals
from cleanrl_utils.engines.matrix import command_of


def add_arguments(parser):
    group = parser.add_argument_group("--engine ray", "tasks on a Ray cluster")
    group.add_argument(
        "--ray-address", default="", metavar="A", help="default: $RAY_ADDRESS, else a new one on this machine"
    )
    group.add_argument("--ray-cpus-per-cell", type=float, default=1, metavar="N", help="may be a fraction (default: 1)")
    group.add_argument(
        "--ray-gpus-per-cell", type=float, metavar="N", help="may be a fraction (default: 1 where the cluster has GPUs)"
    )


def run_task(command, limits):
    """In a worker of Ray: one cell as a process that ends with the worker; its exit code and what it complained of.

    In a session of its own, as Ray kills what is in that of a dead worker before a checkpoint can be written.
    """
    options = {"env": limits | os.environ, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    done = subprocess.run([*command, str(os.getpid())], stdin=subprocess.DEVNULL, check=False, **options)
    return 128 - done.returncode if done.returncode < 0 else done.returncode, done.stderr.strip()


def start(options):
    """Connect to a cluster, or start one here; Ray, and its remote function for a cell."""
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # under `uv run`, workers need our packages too
    try:
        import ray
    except ImportError:
        fail('--engine ray needs Ray: pip install -e ".[ray]" or pip install ray')
    address = options.ray_address or os.environ.get("RAY_ADDRESS", "")
    local = {"_node_ip_address": "127.0.0.1", "include_dashboard": False, "object_store_memory": 10**8}
    try:
        if ":" in address:  # a look first, as Ray tries for minutes
            host, port = address.split("://")[-1].rsplit(":", 1)
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address or "local", **({} if address else local), logging_level="error", log_to_driver=False)
    except (SystemExit, KeyboardInterrupt):  # the first is Ray's own answer to SIGTERM
        sys.exit(cells.INTERRUPTED)
    except (OSError, RuntimeError, ValueError) as error:
        fail(f"--ray-address {address}: {error}")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker does not have to find this package
    has, cpus, gpus = ray.cluster_resources(), options.ray_cpus_per_cell, options.ray_gpus_per_cell
    if gpus is None:
        gpus = options.gpus_per_cell if has.get("GPU") else 0
    room = min(has.get("CPU", 0) / cpus if cpus else math.inf, has.get("GPU", 0) / gpus if gpus else math.inf)
    if room < min(options.workers, 1e9):
        print(f"The cluster has room for {counted(int(room), 'cell')} at a time now; the others wait", flush=True)
    threads = str(max(1, int(cpus)))
    limits = dict.fromkeys(("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "NPROC"), threads)
    if 0 < gpus < 1:
        limits["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.9 * gpus:.3f}"
    return ray, limits, ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(run_task)


def run(matrix_path, board, options):
    """One task of Ray per cell. A cell whose worker or node is lost is started again, here and not by Ray, to count."""
    ray, limits, task = start(options)
    stopping = stop_signals()
    waiting, pending, attempts = list(board.todo()), {}, {}
    while (waiting or pending) and not stopping.is_set():
        while waiting and len(pending) < options.workers:
            index = waiting.pop(0)
            pending[task.remote(command_of(matrix_path, index), limits)] = index
        ended, _ = ray.wait(list(pending), timeout=0.5)
        for future in ended:
            index = pending.pop(future)
            try:
                code, errors = ray.get(future)
            except ray.exceptions.RayError as error:
                code, errors = cells.INTERRUPTED, f"{type(error).__name__} of Ray"
            attempts[index] = attempts.get(index, 0) + 1
            if code == 0:
                board.set(index, "done")
            elif (code == cells.INTERRUPTED or code > 128) and attempts[index] <= options.retries:
                board.clear()
                print(
                    f"again       {shlex.join(board.cells[index]['command'])} ({errors or f'exit code {code}'})",
                    flush=True,
                )
                board.set(index, "waiting")
                waiting.append(index)
            else:
                board.set(index, "failed", errors or f"exit code {code}")
        for index in pending.values():
            board.set(index, "running" if board.is_locked(index) else "waiting")
    if pending:
        board.clear()
        print("Stopping: the runs write their checkpoints.", flush=True)
    stopping.clear()
    ray.shutdown()  # ends the workers, and with them the runs
    begun = time.monotonic()
    for index in pending.values():
        while board.states[index] == "running" and board.is_locked(index):
            if stopping.wait(0.1) or time.monotonic() - begun > 60:  # a second signal does not wait
                break
        board.set(index, "interrupted")
    return bool(waiting or pending)
