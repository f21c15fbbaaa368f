"""How close ppo_atari.py comes to the emulator's own speed: `python -m benchmark.speed.atari --num-envs 8 --rounds 3`.

Each round trains, then steps the environment alone with random actions, with the same environments and threads; the
ratio of the two rates is what the network, the copies and the updates leave of the emulator's speed.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from benchmark.speed.__main__ import ROOT, rate_of_run


@dataclass
class Options:
    env_id: str = "BreakoutNoFrameskip-v4"  # game
    num_envs: int = 8  # parallel environments
    steps: int = 60_000  # environment steps per measurement
    skip: int = 10_000  # steps that do not count: imports, graph capture
    rounds: int = 3  # how often the pair runs


def environment_alone(options):
    from cleanrl.ppo_atari import make_envs

    envs, rng = make_envs(options.env_id, options.num_envs), np.random.default_rng(0)
    envs.reset(seed=1)
    for step in range(options.steps // options.num_envs):
        if step * options.num_envs <= options.skip:
            start_step, start = step, time.perf_counter()
        envs.step(rng.integers(envs.single_action_space.n, size=options.num_envs))
    return (step - start_step) * options.num_envs / (time.perf_counter() - start)


def training(options):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / "cleanrl/ppo_atari.py", "--env-id", options.env_id]
        command += ["--num-envs", str(options.num_envs), "--total-timesteps", str(options.steps)]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return rate_of_run(next(Path(folder, "runs").iterdir()), options.skip)


def main(options):
    pairs = [(training(options), environment_alone(options)) for _ in range(options.rounds)]
    ratios = [round(ours / alone, 3) for ours, alone in pairs]
    ours, alone = (statistics.median(column) for column in zip(*pairs))
    print(f"training {ours:.0f}, environment alone {alone:.0f} steps/s, {options.num_envs} environments")
    print(f"ratio {statistics.median(ratios):.2f}, all {json.dumps(ratios)}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
