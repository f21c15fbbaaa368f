"""Helpers of the tests of the algorithm files. What is tested is every table of cleanrl/lineage.toml.

CLEANRL_REQUIRE_ALL=1 turns the skip of a test whose optional package is missing into a failure.
"""

import ast
import atexit
import ctypes
import functools
import importlib
import json
import os
import pickle
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import tomllib
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import forks
import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
sys.path.insert(0, str(ROOT))  # for `from cleanrl.ppo import gae`

LINEAGE = tomllib.loads((ROOT / "cleanrl/lineage.toml").read_text())
FILES = list(LINEAGE)

PPO_METRICS = "value_loss policy_loss entropy old_approx_kl approx_kl clipfrac explained_variance".split()
PPG_METRICS = "aux/kl_loss aux/aux_value_loss aux/real_value_loss".split()
TD3_METRICS = "qf1_loss qf2_loss qf_loss qf1_values qf2_values actor_loss".split()
METRICS = {  # by family
    "ppo": {f"losses/{name}" for name in PPO_METRICS} | {"charts/learning_rate"},
    "ppg": {f"losses/{name}" for name in [*PPO_METRICS, *PPG_METRICS]} | {"charts/learning_rate"},
    "c51": {"losses/loss", "losses/q_values"},
    "dqn": {"losses/td_loss", "losses/q_values"},
    "rainbow": {"losses/td_loss", "losses/q_values", "charts/beta"},
    "pqn": {"losses/td_loss", "losses/q_values", "charts/learning_rate"},
    "qdagger": {f"losses/{name}" for name in ("loss", "td_loss", "distill_loss", "q_values")},
    "apex": {"losses/td_loss", "losses/q_values", "charts/gradient_steps", "charts/actor_restarts"},
    "ddpg": {"losses/qf1_loss", "losses/qf1_values", "losses/actor_loss"},
    "td3": {f"losses/{name}" for name in TD3_METRICS},
    "sac": {f"losses/{name}" for name in [*TD3_METRICS, "alpha_loss", "alpha"]},
}
COMMON_METRICS = {"charts/episodic_return", "charts/episodic_length", "charts/SPS"}


try:  # Procgen needs Qt before anything imports EnvPool, and tests share a process: as in ppo_procgen.py
    import PyQt5

    for library in ("Core", "Gui") if find_library("Qt5Gui") is None else ():
        ctypes.CDLL(f"{PyQt5.__path__[0]}/Qt5/lib/libQt5{library}.so.5")
except (ImportError, OSError):
    pass


posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL, SIGTERM handlers or pty")


def family(name):
    """The first part of a file's name, or of its parent's, and so on, whichever first has metrics."""
    while name.split("_")[0] not in METRICS:
        name = LINEAGE[name]["parent"]
    return name.split("_")[0]


def continuous_control(name):
    """Whether a file is of the actors and critics that learn bounded continuous actions from replay."""
    return family(name) in ("ddpg", "td3", "sac") and LINEAGE[name].get("probes") == "continuous"


def script(name):
    return ROOT / "cleanrl" / f"{name}.py"


def uses(name, module):
    return module in imports(script(name).read_text())


@functools.cache  # also because Python 3.11 cannot parse in two threads at once
def imports(source):
    """The top-level modules that a source text imports anywhere; a relative import counts as "."."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module.split(".")[0] if node.level == 0 else ".")
    return modules


def header(source):
    """The PEP 723 block of a script."""
    (block,) = re.findall(r"(?m)^# /// script$\n((?:^#(?: .*)?$\n)+?)^# ///$", source)
    return tomllib.loads("".join(line[2:] for line in block.splitlines(keepends=True)))


def default(name, flag):
    """A flag's default, read from the text of a file."""
    (value,) = re.findall(rf"(?m)^    {flag}: [^=]+ = (.+?)(?:  #.*)?$", script(name).read_text())
    return ast.literal_eval(value)


def smoke(name, **flags):
    """The smoke arguments of a file, changed by `flags`; None removes one."""
    argv = shlex.split(LINEAGE[name]["smoke"])
    if "{teacher}" in argv:
        argv[argv.index("{teacher}")] = make_teacher(default(name, "teacher_model_exp_name"))
    if "{godot}" in argv:
        argv[argv.index("{godot}")] = make_game()
    for flag, value in flags.items():
        flag = "--" + flag.replace("_", "-")
        if flag in argv:
            del argv[argv.index(flag) : argv.index(flag) + 2]
        argv += [] if value is None else [flag, str(value)]
    return argv


def step_sizes(name, value):
    """The flags of a file for the step sizes of its optimizers, at one value."""
    text = script(name).read_text()
    flags = ("learning_rate", "policy_lr", "q_lr", "init_lr")
    return {flag: value for flag in flags if f"    {flag}: float" in text}


@functools.cache
def make_teacher(name, env_id="BreakoutNoFrameskip-v4", num_actions=4):
    """A run folder with the model of an untrained network of a file, kept until the tests end."""
    require_for(name)
    import gymnasium as gym

    module, folder = load(name), Path(tempfile.mkdtemp(prefix="teacher-"))
    atexit.register(shutil.rmtree, folder)
    if uses(name, "torch"):
        import torch

        torch.manual_seed(0)
        envs = SimpleNamespace(single_action_space=gym.spaces.Discrete(num_actions))
        module.save_file(module.QNetwork(envs).state_dict(), folder / "model.safetensors")
    else:
        import jax

        params = module.QNetwork(num_actions).init(jax.random.key(0), jax.numpy.zeros((1, 4, 84, 84)))
        module.save_file(module.flatten_dict(params, sep="."), folder / "model.safetensors")
    (folder / "args.json").write_text(json.dumps({"env_id": env_id}))
    return str(folder)


@functools.cache
def make_game(*arguments):
    """A launcher of the game in tests/godot, with these arguments more, kept until the tests end."""
    require_program("godot3-server")
    folder = Path(tempfile.mkdtemp(prefix="godot-"))
    atexit.register(shutil.rmtree, folder)
    launcher = folder / "a game.x86_64"
    command = f'"{TESTS}/godot/reach.x86_64" "$@" {shlex.join(arguments)}'
    launcher.write_text(f"#!/bin/sh\nexport HOME={folder}\nexec {command} 2> /dev/null\n")
    launcher.chmod(0o755)
    return str(launcher)


def smoke_total(name):
    argv = smoke(name)
    return int(argv[argv.index("--total-timesteps") + 1])


def require(*modules):
    """Skip, or with CLEANRL_REQUIRE_ALL=1 fail, unless the modules can be imported."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        message = f"not installed: {', '.join(missing)}"
        pytest.fail(message) if os.environ.get("CLEANRL_REQUIRE_ALL") == "1" else pytest.skip(message)


def require_program(name):
    """As `require`, for a program of the system."""
    if shutil.which(name) is None:
        message = f"not installed: {name}"
        pytest.fail(message) if os.environ.get("CLEANRL_REQUIRE_ALL") == "1" else pytest.skip(message)


def require_for(name):
    """What a file needs to run: its imports, and the extras of its header; some flags need more."""
    source = script(name).read_text()
    modules = imports(source) - {"wandb", "moviepy", "huggingface_hub"} - set(sys.stdlib_module_names)
    if "gymnasium[mujoco]" in source:
        modules.add("mujoco")
    require(*sorted(modules))


def each(which=lambda name: True):
    """Parametrise a test over the files for which `which(name)` holds."""
    return pytest.mark.parametrize("name", [name for name in FILES if which(name)])


def each_text(*definitions, lines=None, which=lambda name: True):
    """Parametrise a test over one file for each text that these definitions have, and each backend.

    With `lines`, what matches it in the main block is part of the text, and networks with memory are apart.

    The style gate holds the texts of siblings equal, so what they do alone needs no test in every file.
    """
    first = {}
    for name in filter(which, FILES):
        source = script(name).read_text()
        nodes = [node for node in ast.parse(source).body if getattr(node, "name", None) in definitions]
        key = uses(name, "torch"), *(ast.get_source_segment(source, node) for node in nodes)
        if lines:
            main = source[source.index('if __name__ == "__main__"') :].splitlines()
            key += "lstm" in name, *(line.strip() for line in main if re.search(lines, line))
        first.setdefault(key, name)
    return pytest.mark.parametrize("name", list(first.values()))


def load(name):
    """Import a file of cleanrl/ as a module."""
    require_for(name)
    return importlib.import_module(f"cleanrl.{name}")


def environment(gpu=False, **changes):
    """The environment of a script: on the CPU unless asked, with the probe environments importable, W&B offline."""
    env = os.environ | {"PYTHONPATH": str(TESTS), "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    env.pop("WANDB_SERVICE", None)  # of a test that ran W&B in this process: a run in it stays open after its end
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


def start(path, *argv, cwd, env=None, driver=None):
    """Start a script, or the code `driver` for it; in the usual environment as a fork, where that is possible."""
    argv, modules = [str(path), *map(str, argv)], imports(Path(path).read_text())
    if env is None and hasattr(os, "fork") and "ray" not in modules:
        server = fork_server("torch" if "torch" in modules else "jax")
        return forks.Fork(server, ["-c", *argv] if driver else argv, cwd, driver)
    command = [*python(path), *(["-c", driver] if driver else []), *argv]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=env or environment(), **pipes)


def run(path, *argv, cwd, env=None, driver=None, code=0, timeout=300):
    """Run a script to its end in the folder `cwd`, expecting an exit code; returns the finished process."""
    process = start(path, *argv, cwd=cwd, env=env, driver=driver)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == code, (
        f"exit code {process.returncode}, not {code}:\n{stdout[-2000:]}\n{stderr[-4000:]}"
    )
    return subprocess.CompletedProcess(process.args, code, stdout, stderr)


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


def raw_scalars(folder, partial_tail=False):
    """Every scalar in a run's event files as (tag, step, value), in the order of writing.

    TensorBoard's own reader drops what a restart makes obsolete; this one hides nothing.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.util.tensor_util import make_ndarray

    scalars = []

    def begun(data):
        (length,) = struct.unpack_from("<Q", data.ljust(8, b"\0"))
        return Event.FromString(data[12 : 12 + length]).wall_time if len(data) >= 12 + length else 0

    for data in sorted((file.read_bytes() for file in folder.glob("events*")), key=begun):
        position = 0
        while position < len(data):
            (length,) = struct.unpack_from("<Q", data.ljust(position + 8, b"\0"), position)
            end = position + 12 + length + 4
            if end > len(data):
                assert partial_tail, f"a file in {folder} ends in the middle of a record"
                break
            event = Event.FromString(data[position + 12 : end - 4])
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "text":
                    continue
                number = value.simple_value if value.HasField("simple_value") else make_ndarray(value.tensor).item()
                scalars.append((value.tag, event.step, number))
            position = end
    return scalars


def tensorboard_scalars(folder):
    """The scalars that TensorBoard shows: tag -> [(step, value)]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def steps(scalars, prefix=""):
    """tag -> its steps in the order of writing, from raw scalars."""
    by_tag = {}
    for tag, step, _ in scalars:
        if tag.startswith(prefix):
            by_tag.setdefault(tag, []).append(step)
    return by_tag


def untimed(scalars):
    return [scalar for scalar in scalars if "SPS" not in scalar[0] and scalar[0] != "charts/compile_time"]


def pytest_collection_modifyitems(items):
    if any(item.get_closest_marker("cuda") for item in items):
        import torch

        if not torch.cuda.is_available():  # hardware, unlike a package, cannot be installed: a skip in any case
            for item in items:
                if item.get_closest_marker("cuda"):
                    item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
