"""How fast our files are beside their peers: `python -m benchmark.speed [--tasks ppo dqn] [--rounds 3]`.

Machines are noisy, so absolute rates mean little: each round runs ours and the peer one after the other on the same
task with the same hyperparameters, one torch thread each, and the ratios are what counts. The peers come with the
extra `speed`: pip install -e .[speed]
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmark.speed import looped

ROOT = Path(__file__).parents[2]


@dataclass
class Task:
    script: str
    peer: str
    steps: int
    skip: int
    bar: float  # ratio to reach
    flags: str = ""  # of our file, where the task is not its default


TD3 = "--env-id HalfCheetah-v4 --learning-starts 1000"
SAC = f"{TD3} --policy-frequency 1"  # the peers update the actor once with each step of the critics
TASKS = {
    "ppo": Task("ppo", "sb3_ppo", steps=100_000, skip=20_000, bar=2.0),
    "ppo_continuous_action": Task("ppo_continuous_action", "sb3_ppo_continuous_action", 40_000, skip=8_000, bar=2.0),
    "dqn": Task("dqn", "sb3_dqn", steps=60_000, skip=12_000, bar=1.8),
    "dqn_jax": Task("dqn_jax", "sbx_dqn", steps=60_000, skip=12_000, bar=2.5),
    "sac_continuous_action": Task("sac_continuous_action", "sb3_sac", 4_000, skip=2_000, bar=1.3, flags=SAC),
    "td3_continuous_action": Task("td3_continuous_action", "sb3_td3", 4_000, skip=2_000, bar=1.3, flags=TD3),
    "sac_continuous_action_jax": Task("sac_continuous_action_jax", "sbx_sac", 4_000, skip=2_000, bar=1.1, flags=SAC),
    "td3_continuous_action_jax": Task("td3_continuous_action_jax", "sbx_td3", 4_000, skip=2_000, bar=1.1, flags=TD3),
    "c51": Task("c51", "c51_looped", steps=30_000, skip=12_000, bar=3.0),
    "c51_sums": Task("c51", "c51_looped_sums", steps=30_000, skip=12_000, bar=1.0),
}


@dataclass
class Options:
    tasks: list[str] = field(default_factory=lambda: list(TASKS))  # which tasks to run
    rounds: int = 3  # how often each pair runs
    output: str = ""  # also write the table to this Markdown file


def rate_of_run(run_dir, skip):
    """Steps over wall time between the first and the last metric after `skip` steps, by the events' own time stamps."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    points = [(event.step, event.wall_time) for event in events.Scalars("charts/SPS") if event.step >= skip]
    if len(points) < 2:
        sys.exit(f"{len(points)} metrics behind step {skip}, which is no stretch to time: more steps, or skip fewer")
    return (points[-1][0] - points[0][0]) / (points[-1][1] - points[0][1])


def our_rate(task, seed, change=lambda text: text):
    """The rate of a file of ours, or of a changed text of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{task.script}.py")
        path.write_text(change((ROOT / "cleanrl" / path.name).read_text()))
        env = os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, path, "--total-timesteps", str(task.steps), "--seed", str(seed), *task.flags.split()]
        subprocess.run(command, cwd=folder, env=env, capture_output=True, check=True)
        return rate_of_run(next(Path(folder, "runs").iterdir()), task.skip)


def peer_rate(task, seed):
    if hasattr(looped, task.peer):
        return our_rate(task, seed, getattr(looped, task.peer))
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmark.speed.peers", "--peer", task.peer, "--steps", str(task.steps)]
    command += ["--skip", str(task.skip), "--seed", str(seed)]
    output = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    return float(output.split()[-1])


def main(options: Options):
    lines = ["| ours | peer | ours, steps/s | peer, steps/s | ratio (median of rounds) | all ratios | bar |"]
    lines += ["|---|---|--:|--:|--:|---|--:|"]
    for name in options.tasks:
        task = TASKS[name]
        pairs = []
        for seed in range(1, options.rounds + 1):
            pairs.append((our_rate(task, seed), peer_rate(task, seed)))
            print(f"{name}: ours {pairs[-1][0]:.0f}, {task.peer} {pairs[-1][1]:.0f} steps/s", flush=True)
        ratios = [ours / peer for ours, peer in pairs]
        ours, peer = (statistics.median(column) for column in zip(*pairs))
        numbers = (
            f"{ours:.0f} | {peer:.0f} | {statistics.median(ratios):.2f} | {json.dumps([round(r, 2) for r in ratios])}"
        )
        lines.append(f"| {task.script}.py | {task.peer} | {numbers} | {task.bar} |")
    print("\n".join(lines))
    if options.output:
        Path(options.output).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m benchmark.speed"))
