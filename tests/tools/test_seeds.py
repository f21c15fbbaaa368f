"""The commands that existing users know, as printed in the published README, without `poetry run`.

With the few steps of a smoke run; with as many as are printed, in processes of their own, they are slow.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest

from helpers.files import FILES, ROOT, require, require_for, script, smoke
from helpers.processes import environment, run, run_dir
from helpers.scalars import raw_scalars

COMMANDS = [
    ("ppo", "--seed 1 --env-id CartPole-v0 --total-timesteps 50000", ()),
    (
        "ppo",
        "--seed 1 --env-id CartPole-v0 --total-timesteps 50000 --track --wandb-project-name cleanrltest",
        ("wandb",),
    ),
    ("ppo", "--cuda False --track --capture-video --total-timesteps 5000", ("wandb", "moviepy")),
    ("ppo", "--env-id CartPole-v1 --total-timesteps 5000", ()),
    ("dqn", "--env-id CartPole-v1 --total-timesteps 12000", ()),
    ("ppo_atari", "--env-id BreakoutNoFrameskip-v4 --total-timesteps 1024", ()),
    ("ppo_procgen", "--env-id starpilot --total-timesteps 100", ()),
    ("ppg_procgen", "--env-id starpilot --total-timesteps 200", ()),
    ("ppo_atari_envpool", "--env-id BreakoutNoFrameskip-v4 --total-timesteps 1024", ()),
]

COMMANDS = [command for command in COMMANDS if command[0] in FILES]
PRINTED = [command for command in COMMANDS if "procgen" not in command[0]]  # which is printed without a number of steps


@pytest.mark.parametrize("name, flags, packages", COMMANDS)
def test_command(name, flags, packages, tmp_path):
    steps = int(re.search(r"--total-timesteps (\d+)", flags)[1])
    few = smoke(name, total_timesteps=min(steps, 1000 if name == "dqn" else 256))
    check_command(name, re.sub(r"--total-timesteps \d+", " ".join(few), flags), packages, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name, flags, packages", PRINTED)
def test_command_as_printed(name, flags, packages, tmp_path):
    check_command(name, flags, packages, tmp_path, env=environment())


def check_command(name, flags, packages, tmp_path, env=None):
    require(*packages)
    require_for(name)
    (tmp_path / "cleanrl").mkdir()
    shutil.copy(script(name), tmp_path / "cleanrl")
    run(tmp_path / f"cleanrl/{name}.py", *flags.split(), cwd=tmp_path, env=env)
    folder = run_dir(tmp_path)
    env_id = flags.split("--env-id ")[-1].split()[0] if "--env-id" in flags else "CartPole-v1"
    assert folder.name.startswith(f"{env_id}__{name}__1__")
    assert any(tag.startswith("losses/") for tag, _, _ in raw_scalars(folder))
    if "--capture-video" in flags:
        assert list(folder.glob("videos/*.mp4"))


def test_imports_of_the_published_evaluation_example():
    """`make_env` returns a thunk, `QNetwork(envs)` a network."""
    require_for("dqn")
    code = """
import gymnasium as gym
import torch
from cleanrl.dqn import QNetwork, make_env

envs = gym.vector.SyncVectorEnv([make_env("CartPole-v1", 0, None)])
obs, _ = envs.reset()
q_values = QNetwork(envs)(torch.Tensor(obs))
assert q_values.shape == (1, 2), q_values.shape
"""
    env = environment(PYTHONPATH=os.pathsep.join([str(ROOT)]))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
