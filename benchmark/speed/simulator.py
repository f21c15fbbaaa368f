"""How close training comes to the simulator's own speed: `python -m benchmark.speed.simulator --env-id Ant`.

Each round trains with ppo_continuous_action_isaacgym.py, then steps the simulator alone, with random actions that are
on the device already, as many environments at a time. The ratio of the two rates is what acting, learning and logging
leave of the simulator's speed. Neither rate counts compilation.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from benchmark.speed.__main__ import ROOT, rate_of_run

NAME = "ppo_continuous_action_isaacgym"


@dataclass
class Options:
    env_id: str = "Ant"  # environment
    num_envs: int = 4096  # parallel environments
    num_steps: int = 16  # rollout length per environment
    iterations: int = 30  # rollouts per measurement
    skip: int = 5  # rollouts that do not count: graph capture
    rounds: int = 2  # how often the pair runs
    flags: str = ""  # more flags of the file
    alone: bool = False  # step the simulator alone in this process, and print its rate


def simulator_alone(options):
    sys.path.insert(0, str(ROOT / "cleanrl"))
    envs = __import__(NAME).make_envs(options.env_id, options.num_envs, 1)
    obs = envs.simulator.reset(1)
    actions = 2 * torch.rand((64, options.num_envs, *envs.single_action_space.shape), device=envs.device) - 1
    for step in range(options.iterations * options.num_steps):
        if step == options.skip * options.num_steps:
            obs.sum().item()  # waits for the steps so far
            start = time.perf_counter()
        obs, *_ = envs.simulator.step(actions[step % 64])
    obs.sum().item()
    return (step + 1 - options.skip * options.num_steps) * options.num_envs / (time.perf_counter() - start)


def alone(options):
    """In a process of its own, so that the memory is free for training."""
    command = [sys.executable, "-m", "benchmark.speed.simulator", "--alone", "--env-id", options.env_id]
    for flag in ("num_envs", "num_steps", "iterations", "skip"):
        command += [f"--{flag.replace('_', '-')}", str(getattr(options, flag))]
    return float(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()[-1])


def training(options):
    batch = options.num_envs * options.num_steps
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / f"cleanrl/{NAME}.py", "--env-id", options.env_id, *options.flags.split()]
        command += ["--num-envs", str(options.num_envs), "--num-steps", str(options.num_steps)]
        command += ["--total-timesteps", str(options.iterations * batch)]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return rate_of_run(next(Path(folder, "runs").iterdir()), options.skip * batch)


def main(options):
    if options.alone:
        print(simulator_alone(options))
        return
    pairs = []
    for _ in range(options.rounds):
        pairs.append((training(options), alone(options)))
        print(f"training {pairs[-1][0]:.0f}, simulator alone {pairs[-1][1]:.0f} steps/s", flush=True)
    ratios = [round(ours / theirs, 3) for ours, theirs in pairs]
    median = statistics.median(ratios)
    print(f"{options.env_id}, {options.num_envs} environments: ratio {median:.2f}, all {json.dumps(ratios)}")


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m benchmark.speed.simulator", description=__doc__))
