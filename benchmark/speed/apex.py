"""How apex_atari.py scales with its actors: `python -m benchmark.speed.apex --actors 1 2 4`.

Each run lets learner and actors run freely (`--free-running`) and counts, from the first gradient steps on, the
environment steps that arrive and the gradient steps that are made per second of wall time.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmark.speed.__main__ import ROOT


@dataclass
class Options:
    env_id: str = "BreakoutNoFrameskip-v4"  # game
    actors: list[int] = field(default_factory=lambda: [1, 2, 4])  # numbers of actors, a run for each
    envs_per_actor: int = 8  # games that an actor plays in parallel
    batch_size: int = 512  # transitions per gradient step
    steps: int = 40_000  # environment steps of a run
    skip: int = 10_000  # steps that do not count: start of the actors, first gradient steps, graph capture
    ray_address: str = ""  # Ray cluster to run the actors on; none starts a Ray of its own on this machine


def rates(options, num_actors):
    """Environment steps and gradient steps per second."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / "cleanrl/apex_atari.py", "--free-running", "--num-actors", str(num_actors)]
        for flag in ("env_id", "envs_per_actor", "batch_size", "ray_address"):
            command += [f"--{flag.replace('_', '-')}", str(getattr(options, flag))]
        command += ["--total-timesteps", str(options.steps), "--learning-starts", str(options.skip // 2)]
        command += ["--buffer-size", "100000"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        events = EventAccumulator(str(next(Path(folder, "runs").iterdir())), size_guidance={"scalars": 0}).Reload()
        points = [event for event in events.Scalars("charts/gradient_steps") if event.step >= options.skip]
    seconds = points[-1].wall_time - points[0].wall_time
    return (points[-1].step - points[0].step) / seconds, (points[-1].value - points[0].value) / seconds


def main(options):
    print("| actors | environment steps/s | gradient steps/s | transitions replayed/s |\n|--:|--:|--:|--:|")
    for num_actors in options.actors:
        steps, updates = rates(options, num_actors)
        print(f"| {num_actors} | {steps:.0f} | {updates:.1f} | {updates * options.batch_size:.0f} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m benchmark.speed.apex", description=__doc__))
