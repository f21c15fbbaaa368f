"""Scores of finished runs, as data: `python -m benchmark.record runs/CartPole-v1__ppo__* -o benchmark/results/ppo.csv`.

A run's score is the mean return of its last 100 episodes (fewer if it has fewer); a row has the mean and the standard
deviation over the seeds of one script and environment. `--curves DIR` adds, per run, returns averaged over 100 bins.
A run of many seeds at once (curves.npz) counts as one run of each; of its episodes only means are known, and how many.
"""

import csv
import json
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

COLUMNS = "file,env_id,steps,seeds,score_mean,score_std,scores,reference_mean,reference_std,command,commit,packages"
PACKAGES = ("gymnasium", "gymnax", "ale-py", "envpool", "mujoco", "godot_rl", "torch", "jax")


@dataclass
class Options:
    runs: tyro.conf.Positional[list[Path]]  # finished run folders
    output: Annotated[
        Path, tyro.conf.arg(aliases=["-o"])
    ]  # CSV to write; rows of the same file and environment are replaced
    curves: Path | None = None  # folder for one CSV with the learning curve of each run
    partial: bool = False  # also take runs that stopped early, as runs of the steps they made
    reference: Path | None = None  # CSV of published scores (file, env_id, score_mean, score_std, steps)


def read_runs(run_dir):
    """The run in a folder, or each of the runs that trained side by side in it."""
    run = read_run(run_dir)
    if not (run_dir / "curves.npz").exists():
        return [run]
    runs = []
    with np.load(run_dir / "curves.npz") as curves:
        for i, seed in enumerate(curves["seeds"]):
            episodes = curves["charts/episodes"][:, i].astype(int)
            returns = np.stack([curves["steps"], curves["charts/episodic_return"][:, i]], axis=1)
            runs.append(run | {"seed": int(seed), "returns": np.repeat(returns, episodes, axis=0)})
    return runs


def has_ended(args, steps):
    """Whether a run with these flags that has logged its speed at these steps has come to its end.

    That is --total-timesteps; files with rollouts (--num-steps) log once after each and make no part of one, PPG no
    part of a phase of --n-iteration rollouts. The steps tell the size of a rollout, which not all files have as flags.
    """
    steps = sorted({0, *steps})
    unit = (steps[-1] - steps[-2]) * args.get("n_iteration", 1) if "num_steps" in args else 1
    return steps[-1] >= args["total_timesteps"] // unit * unit


def read_run(run_dir):
    args = json.loads((run_dir / "args.json").read_text())
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    returns = events.Scalars("charts/episodic_return")
    if "charts/episodes" in events.Tags()["scalars"]:  # an entry is the mean of as many episodes
        returns = [event for event, n in zip(returns, events.Scalars("charts/episodes")) for _ in range(int(n.value))]
    steps = [event.step for event in events.Scalars("charts/SPS")]
    script = next(path.name for path in run_dir.glob("*.py"))
    packages = dict(line.split("==") for line in (run_dir / "packages.txt").read_text().split())
    return {
        "folder": run_dir,
        "file": f"cleanrl/{script}",
        "env_id": args["env_id"],
        "seed": args["seed"],
        "steps": args["total_timesteps"],
        "last_step": max(steps),
        "ended": has_ended(args, steps),
        "returns": np.array([(event.step, event.value) for event in returns]),
        "commit": (run_dir / "commit.txt").read_text()[:10],
        "command": re.sub(r" --seed \d+", "", (run_dir / "command.txt").read_text().split("\n")[0]),  # as it began
        "packages": " ".join(f"{name}={packages[name]}" for name in PACKAGES if name in packages),
    }


def reference_score(reference, run):
    if reference:
        for row in csv.DictReader(reference.open()):
            if (row["file"], row["env_id"], int(row["steps"])) == (run["file"], run["env_id"], run["steps"]):
                return row["score_mean"], row["score_std"]
    return "", ""


def main(options):
    groups = defaultdict(list)
    for run in (run for run_dir in options.runs for run in read_runs(run_dir)):
        if not run["ended"]:
            if not options.partial:
                sys.exit(
                    f"{run['folder']} stopped at step {run['last_step']} of {run['steps']}: resume it, or say --partial"
                )
            run["steps"] = run["last_step"]
        groups[run["file"], run["env_id"], run["steps"]].append(run)
        if options.curves:
            options.curves.mkdir(parents=True, exist_ok=True)
            edges = np.linspace(0, run["steps"], 101)
            bins = np.digitize(run["returns"][:, 0], edges)
            name = f"{re.sub('[/:]', '-', run['env_id'])}__{Path(run['file']).stem}__{run['seed']}.csv"
            with (options.curves / name).open("w", newline="") as file:
                rows = [
                    (int(edges[b]), f"{run['returns'][bins == b, 1].mean():.3f}") for b in np.unique(bins) if b < 101
                ]
                csv.writer(file).writerows([("step", "episodic_return"), *rows])
    rows = {}
    if options.output.exists():
        rows = {(row["file"], row["env_id"], int(row["steps"])): row for row in csv.DictReader(options.output.open())}
    for group, runs in groups.items():
        runs.sort(key=lambda run: run["seed"])
        scores = [run["returns"][-100:, 1].mean() for run in runs]
        spread = np.std(scores, ddof=1) if len(scores) > 1 else 0.0
        mean, std = reference_score(options.reference, runs[0])
        rows[group] = {
            **{key: runs[0][key] for key in ("file", "env_id", "steps", "command", "packages")},
            "commit": " ".join(sorted({run["commit"] for run in runs})),
            "seeds": " ".join(str(run["seed"]) for run in runs),
            **{"score_mean": f"{np.mean(scores):.2f}", "score_std": f"{spread:.2f}"},
            "scores": " ".join(f"{score:.2f}" for score in scores),
            **{"reference_mean": mean, "reference_std": std},
        }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS.split(","), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[group] for group in sorted(rows))
    for group in sorted(groups):
        row = rows[group]
        ours, theirs = (f"{row[f'{kind}_mean']} +- {row[f'{kind}_std']}" for kind in ("score", "reference"))
        print(f"{row['file']} {row['env_id']} {row['steps']} steps, seeds {row['seeds']}: {ours} (reference {theirs})")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
