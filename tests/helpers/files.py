"""What is known of the files of cleanrl/: the tables of lineage.toml, their text, metrics and smoke arguments.

CLEANRL_REQUIRE_ALL=1 turns the skip of a test whose optional package is missing into a failure.
"""

import ast
import atexit
import functools
import importlib
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import pytest

HELPERS = Path(__file__).parent
ROOT = HELPERS.parent.parent
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


posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL, SIGTERM handlers or pty")


def family(name):
    """The first part of a file's name, or of its parent's, and so on, whichever first has metrics."""
    while name.split("_")[0] not in METRICS:
        name = LINEAGE[name]["parent"]
    return name.split("_")[0]


def continuous_control(name):
    """Whether a file is of the actors and critics that learn bounded continuous actions from replay."""
    return family(name) in ("ddpg", "td3", "sac") and LINEAGE[name].get("probes") == "continuous"


def learns_first(name):
    """Whether the gradient steps that are due at a step come before, or while, the environments make the next one."""
    return "\n        # Step\n" in script(name).read_text().partition("\n        # Learn")[2]


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
    command = f'"{ROOT}/tests/godot/reach.x86_64" "$@" {shlex.join(arguments)}'
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
    return over([name for name in FILES if which(name)])


def over(names):
    assert names, "a test of no file"  # pytest would skip it
    return pytest.mark.parametrize("name", names)


@functools.cache
def definitions_of(name):
    """The text of each function and class of a file, by its name, and the lines of its main block."""
    source = script(name).read_text()
    lines, nodes = source.splitlines(), [node for node in ast.parse(source).body if hasattr(node, "name")]
    texts = {node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes}
    return texts, lines[lines.index('if __name__ == "__main__":') :]


def each_text(*definitions, lines=None, which=lambda name: True):
    """Parametrise a test over one file for each text that these definitions have, and each backend.

    With `lines`, what matches it in the main block is part of the text, and networks with memory are apart.

    The style gate holds the texts of siblings equal, so what they do alone needs no test in every file.
    """
    first = {}
    for name in filter(which, FILES):
        texts, main = definitions_of(name)
        key = uses(name, "torch"), *(text for word, text in texts.items() if word in definitions)
        if lines:
            key += "lstm" in name, *(line.strip() for line in main if re.search(lines, line))
        first.setdefault(key, name)
    return over(list(first.values()))


def load(name):
    """Import a file of cleanrl/ as a module."""
    require_for(name)
    return importlib.import_module(f"cleanrl.{name}")


def defines(name, *words):
    """Whether a file's text has all of these."""
    text = script(name).read_text()
    return all(word in text for word in words)


def discrete_envs(num_actions=3, obs_dim=4):
    spaces = {"single_observation_space": gym.spaces.Box(-1, 1, (obs_dim,)), "num_envs": 1}
    return SimpleNamespace(**spaces, single_action_space=gym.spaces.Discrete(num_actions))


def continuous_envs(action_dim=3, obs_dim=4):
    spaces = {"single_observation_space": gym.spaces.Box(-1, 1, (obs_dim,)), "num_envs": 1}
    return SimpleNamespace(**spaces, single_action_space=gym.spaces.Box(-1, 1, (action_dim,)))
