"""Runs of scripts: to their end, interrupted, killed at a checkpoint, or looked into when they are over."""

import functools
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

from helpers import forks
from helpers.files import HELPERS, ROOT, imports, script


def environment(gpu=False, **changes):
    """The environment of a script: on the CPU unless asked, with the probe environments importable, W&B offline."""
    env = os.environ | {"PYTHONPATH": str(HELPERS), "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    env |= {"OMP_NUM_THREADS": "1"}  # tests run side by side
    env |= {"RAY_AUTH_MODE": "disabled"}  # else Ray writes a token into the home folder
    env |= {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache/jax")}  # a run takes what another has compiled
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    if not gpu:
        env |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    return {key: value for key, value in (env | changes).items() if value is not None}


LOOPBACK = """
import fcntl, os, socket, struct, sys

with socket.socket() as any_socket:  # SIOCSIFFLAGS: lo is up and running
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14s", b"lo", 0x41, b""))
os.execvp(sys.argv[1], sys.argv[1:])
"""


@functools.cache
def private_network():
    """The beginning of a command line that runs the rest in a network of its own, with nothing but the loopback."""
    for options in ["--net"], ["--net", "--map-root-user"]:
        command = ["unshare", *options, sys.executable, "-c", LOOPBACK]
        try:
            if not subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
                return command
        except OSError:
            pass
    return []


def python(path):
    """The beginning of a command line that runs a script: Ray must not listen where others could reach it."""
    return [*(private_network() if "ray" in imports(Path(path).read_text()) else []), sys.executable]


@functools.cache
def fork_server(kind):
    return forks.start_server(kind, environment())


def start(path, *argv, cwd, env=None, driver=None, variables=None):
    """Start a script, or the code `driver` for it; as a fork in the usual environment, which `variables` may change."""
    argv, modules = [str(path), *map(str, argv)], imports(Path(path).read_text())
    if env is None and hasattr(os, "fork") and "ray" not in modules:
        server = fork_server("torch" if "torch" in modules else "jax")
        env = variables and environment(**variables)
        return forks.Fork(server, ["-c", *argv] if driver else argv, cwd, driver, env)
    command = [*python(path), *(["-c", driver] if driver else []), *argv]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=env or environment(**variables or {}), **pipes)


def run(path, *argv, cwd, env=None, driver=None, variables=None, code=0, timeout=300):
    """Run a script to its end in the folder `cwd`, expecting an exit code; returns the finished process."""
    return finish(start(path, *argv, cwd=cwd, env=env, driver=driver, variables=variables), code, timeout)


def finish(process, code=0, timeout=300):
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == code, (
        f"exit code {process.returncode}, not {code}:\n{stdout[-2000:]}\n{stderr[-4000:]}"
    )
    return subprocess.CompletedProcess(process.args, code, stdout, stderr)


MODULE = """
import os, runpy, sys

name = sys.argv.pop(1)
sys.path[0] = os.getcwd()
runpy.run_module(name, run_name="__main__", alter_sys=True)
"""


def run_module(name, *argv, cwd, env=None, kind="torch", code=0, timeout=300):
    """As `run`, for python -m NAME: a tool of ours, in a fork that has torch or JAX imported already."""
    env = env or environment(PYTHONPATH=str(ROOT))
    if hasattr(os, "fork"):
        process = forks.Fork(fork_server(kind), ["-c", name, *map(str, argv)], cwd, MODULE, env)
    else:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, "-m", name, *map(str, argv)], cwd=cwd, env=env, **pipes)
    return finish(process, code, timeout)


DRIVER = """
import inspect, json, pickle, runpy, sys

path, out, before, after, command_lines = sys.argv[1:]
results = []
for argv in json.loads(command_lines):
    sys.argv = [path, *argv]
    result = {}
    exec(before)
    copy = runpy.run_path(path, run_name="__main__")
    # the live globals, which `update` and the like write to, rather than runpy's copy of them
    live = next(f for f in copy.values() if inspect.isfunction(f) and f.__code__.co_filename == path).__globals__
    live["result"] = result
    exec(after, live)
    results.append(result)
with open(out, "wb") as file:
    pickle.dump(results, file)
"""


def inspect_run(path, *argv, **options):
    """Run a script with runpy, then the code `after` in its globals; returns the dictionary `result` that it filled.

    The code `before` runs first, in a namespace of its own that shares `result`.
    """
    (result,) = inspect_runs(path, [argv], **options)
    return result


def inspect_runs(path, command_lines, cwd, before="", after="", env=None, timeout=300):
    """As `inspect_run`, for several command lines one after the other in one process, which starts and imports once."""
    argvs = json.dumps([list(map(str, argv)) for argv in command_lines])
    arguments = cwd / "result.pickle", before, after, argvs
    done = run(path, *arguments, cwd=cwd, env=env, driver=DRIVER, timeout=timeout)
    with open(cwd / "result.pickle", "rb") as file:
        return [result | {"stdout": done.stdout, "stderr": done.stderr} for result in pickle.load(file)]


def run_dir(cwd):
    (folder,) = (cwd / "runs").iterdir()
    return folder


KILL = """
import os
import runpy
import signal
import sys
from pathlib import Path

replace, checkpoints = os.replace, 0


def kill(source, target):
    global checkpoints
    checkpoints += Path(target).name.startswith("checkpoint.")
    if {before} and checkpoints == {number}:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
    if checkpoints == {number}:
        os.kill(os.getpid(), signal.SIGKILL)


os.replace = kill
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def kill_at_checkpoint(name, argv, cwd, number, before):
    """Run until checkpoint `number` and kill the process just before, or just after, it takes the place of the last."""
    driver = KILL.format(number=number, before=before)
    run(script(name), *argv, cwd=cwd, driver=driver, code=-signal.SIGKILL)
