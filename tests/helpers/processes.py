"""Runs of scripts: to their end, interrupted, killed at a checkpoint, or looked into when they are over."""

import atexit
import functools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers import contract, forks
from helpers.files import HELPERS, ROOT, imports, script, uses


def environment(gpu=False, **changes):
    """The environment of a script: on the CPU unless asked, with the probe environments importable, W&B offline."""
    env = os.environ | {"PYTHONPATH": str(HELPERS), "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    env.pop("WANDB_SERVICE", None)  # of a test that ran W&B in this process: a run in it stays open after its end
    env |= {"OMP_NUM_THREADS": "1"}  # tests run side by side
    env |= {"RAY_AUTH_MODE": "disabled"}  # else Ray writes a token into the home folder
    env |= {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache/jax")}  # a run takes what another has compiled
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    # compiles in half the time, for runs that are short; others take `variables=LONG`
    env |= SHORT
    if not gpu:
        env |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    return {key: value for key, value in (env | changes).items() if value is not None}


SHORT = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"}
LONG = {"XLA_FLAGS": "--xla_backend_optimization_level=1"}  # for runs of many steps, and less rounding


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
def environment_alone():
    """The environment of a script that was copied elsewhere: nothing of the repository, and another seed of hashes."""
    folder = Path(tempfile.mkdtemp(prefix="alone-"))
    atexit.register(shutil.rmtree, folder)
    (folder / "sitecustomize.py").write_text("import sys; sys.modules['cleanrl_utils'] = None")  # not installed
    return environment(PYTHONPATH=str(folder), PYTHONHASHSEED="8")


def begin_forks():
    """The servers of forks, for this process and the workers that it starts."""
    folder = tempfile.mkdtemp(prefix="forks-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    forks.begin(folder, {False: environment(), True: environment_alone()})
    os.environ["CLEANRL_FORKS"] = folder


@functools.cache
def fork_server(kind, alone=False):
    return forks.connect(os.environ["CLEANRL_FORKS"], kind, alone)


def start(path, *argv, cwd, env=None, driver=None, variables=None, alone=False):
    """Start a script, or the code `driver` for it; as a fork in the usual environment, which `variables` may change, or
    in that of a script on its own."""
    argv, modules = [str(path), *map(str, argv)], imports(Path(path).read_text())
    ray = "ray" in modules
    forked = env is None and hasattr(os, "fork")
    if forked and (not ray or private_network()[:3] == ["unshare", "--net", sys.executable]):
        server = fork_server("torch" if "torch" in modules else "jax", alone)
        env = variables and environment(**variables)
        return forks.Fork(server, ["-c", *argv] if driver else argv, cwd, driver, env, ray)
    command = [*python(path), *(["-c", driver] if driver else []), *argv]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = env or (environment_alone() if alone else environment(**variables or {}))
    return subprocess.Popen(command, cwd=cwd, env=env, **pipes)


def run(path, *argv, cwd, code=0, timeout=300, **options):
    """Run a script to its end in the folder `cwd`, expecting an exit code; returns the finished process."""
    return finish(start(path, *argv, cwd=cwd, **options), code, timeout)


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


def inspect_runs(path, command_lines, cwd, before="", after="", **options):
    """As `inspect_run`, for several command lines one after the other in one process, which starts and imports once."""
    contract.check(path, after)
    argvs = json.dumps([list(map(str, argv)) for argv in command_lines])
    arguments = cwd / "result.pickle", before, after, argvs
    done = run(path, *arguments, cwd=cwd, driver=DRIVER, **options)
    with open(cwd / "result.pickle", "rb") as file:
        return [result | {"stdout": done.stdout, "stderr": done.stderr} for result in pickle.load(file)]


def run_dir(cwd):
    (folder,) = (cwd / "runs").iterdir()
    return folder


# run before a file: games end after some ten steps, so that a short run sees episodes end, and so does an evaluation,
# for which ALE plays 2 of them: starting a game takes longer than to play it
SHORT_GAMES = """
import functools


def shorten(owner, name, **limits):
    original = getattr(owner, name)

    @functools.wraps(original)
    def short(*args, **options):
        if name == "__init__":  # 10 are those of an evaluation
            args = [2 if arg == 10 else arg for arg in args]
        return original(*args, **limits | options)

    if not hasattr(original, "__wrapped__"):
        setattr(owner, name, short)


if GAMES == "ale_py":
    import ale_py.vector_env

    shorten(ale_py.vector_env.AtariVectorEnv, "__init__", max_num_frames_per_episode=FRAMES, noop_max=1)
elif GAMES == "envpool":
    import envpool

    shorten(envpool, "make", max_episode_steps=30, noop_max=1)
elif GAMES == "pettingzoo":
    import pettingzoo.atari.base_atari_env

    shorten(pettingzoo.atari.base_atari_env.ParallelAtariEnv, "__init__", max_cycles=60)
"""


def short_games(name, frames=160):
    """The code that shortens the games of a file, those of ALE to so many frames; none for other files, and where
    actors are processes of their own."""
    games = [module for module in ("pettingzoo", "envpool", "ale_py") if uses(name, module)]
    short = games and "procgen" not in name  # whose games take no limit
    return f"GAMES, FRAMES = {games[0]!r}, {frames}\n{SHORT_GAMES}" if short else ""


RUN = """
import runpy, sys

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def in_short(name, frames=160):
    """The option of `start` and `run` with which the games of a file are short."""
    return {"driver": short_games(name, frames) + RUN} if short_games(name) else {}


KILL = """
import os
import runpy
import signal
import sys
from pathlib import Path

replace, checkpoints = os.replace, 0


def kill(source, target):
    global checkpoints
    ours = Path(target).name.startswith("checkpoint.")
    checkpoints += ours
    due = ours and checkpoints >= {number} and sys._getframe(1).f_globals["global_step"] >= {step}
    if {before} and due:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
    if due:
        os.kill(os.getpid(), signal.SIGKILL)


os.replace = kill
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def kill_at_checkpoint(name, argv, cwd, number, before, step=0):
    """Run until the first checkpoint that has this number and this step, or is later, and kill the process just before,
    or just after, it takes the place of the last."""
    driver = short_games(name) + KILL.format(number=number, before=before, step=step)
    run(script(name), *argv, cwd=cwd, driver=driver, code=-signal.SIGKILL)
