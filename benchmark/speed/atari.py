"""How close a file comes to the emulator's own speed: `python -m benchmark.speed.atari --file ppo_atari --num-envs 8`.

Each round trains, then steps the environment alone with random actions, with the same environments and threads; the
ratio of the two rates is what the network, the copies and the updates leave of the emulator's speed. For the files on
EnvPool the environment alone is EnvPool as it comes, without the restarts in the same step.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import tyro

from benchmark.speed.__main__ import ROOT, rate_of_run


@dataclass
class Options:
    file: str = "ppo_atari"  # file of cleanrl/
    env_id: str | None = None  # game; that of the file if left out
    num_envs: int = 8  # parallel environments
    steps: int = 60_000  # environment steps per measurement
    skip: int = 10_000  # steps that do not count: imports, graph capture
    rounds: int = 3  # how often the pair runs


def environment_alone(options):
    rng = np.random.default_rng(0)
    if "envpool" in options.file:
        import envpool

        envs = envpool.make(options.env_id, env_type="gymnasium", num_envs=options.num_envs, seed=1)
        envs.reset()
        num_actions = envs.action_space.n
    else:
        envs = import_module(f"cleanrl.{options.file}").make_envs(options.env_id, options.num_envs)
        envs.reset(seed=1)
        num_actions = envs.single_action_space.n
    for step in range(options.steps // options.num_envs):
        if step * options.num_envs <= options.skip:
            start_step, start = step, time.perf_counter()
        envs.step(rng.integers(num_actions, size=options.num_envs))
    return (step - start_step) * options.num_envs / (time.perf_counter() - start)


def training(options):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / f"cleanrl/{options.file}.py", "--env-id", options.env_id]
        command += ["--num-envs", str(options.num_envs), "--total-timesteps", str(options.steps)]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return rate_of_run(next(Path(folder, "runs").iterdir()), options.skip)


def main(options):
    options.env_id = options.env_id or import_module(f"cleanrl.{options.file}").Args.env_id
    pairs = [(training(options), environment_alone(options)) for _ in range(options.rounds)]
    ratios = [round(ours / alone, 3) for ours, alone in pairs]
    ours, alone = (statistics.median(column) for column in zip(*pairs))
    print(f"training {ours:.0f}, environment alone {alone:.0f} steps/s, {options.num_envs} environments")
    print(f"ratio {statistics.median(ratios):.2f}, all {json.dumps(ratios)}")


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m benchmark.speed.atari", description=__doc__))
