"""Scores of finished runs, as data: `python -m benchmark.record runs/CartPole-v1__ppo__* -o benchmark/results/ppo.csv`.

A run's score is the mean return of its last 100 episodes (fewer if it has fewer); a row has the mean and the standard
deviation over the seeds of one script and environment. `--curves DIR` adds, per run, returns averaged over 100 bins and
the seconds of training until the last of each. A run of many seeds at once (curves.npz) counts as one run of each.
"""

import csv
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from cleanrl_utils.runs.results import curve_edges, curve_name, full_commit, load, of_commit, references

COLUMNS = "file,env_id,steps,seeds,score_mean,score_std,scores,reference_mean,reference_std,command,commit,packages"
PACKAGES = ("gymnasium", "gymnax", "ale-py", "envpool", "mujoco", "godot_rl", "torch", "jax")


@dataclass
class Options:
    runs: tyro.conf.Positional[list[Path]]  # finished run folders, or folders of them
    output: Annotated[
        Path, tyro.conf.arg(aliases=["-o"])
    ]  # CSV to write; rows of the same file and environment are replaced
    curves: Path | None = None  # folder for one CSV with the learning curve of each run
    commit: str = ""  # only runs made at this commit, of folders that hold several
    partial: bool = False  # also take runs that stopped early, as runs of the steps they made
    reference: Path | None = None  # CSV of published scores (file, env_id, score_mean, score_std, steps)


def digits(value):
    """A score as text: two decimals, but four digits of what is small."""
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.4g}"


def reference_score(reference, group, args):
    file, env_id, steps = group
    rows = references(file, env_id, args, reference) if reference else ()
    return next(((row["score_mean"], row["score_std"]) for row in rows if int(row["steps"]) == steps), ("", ""))


def write_curve(run, steps, folder):
    """The learning curve of a run in 100 bins, each named by its upper edge."""
    folder.mkdir(parents=True, exist_ok=True)
    edges = curve_edges(steps)
    bins = np.digitize(run.steps, edges, right=True).clip(1, 100)  # some files end a few steps later than they are told
    with (folder / curve_name(run.env_id, run.script, run.seed)).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("step", "episodic_return", "seconds"))
        for i in np.unique(bins):
            seconds = run.seconds[bins == i][-1]
            writer.writerow((int(edges[i]), f"{run.returns[bins == i].mean():.6g}", f"{seconds:.1f}"))


def write_rows(groups, output, reference=None):
    """Add groups of runs, by file, environment and steps, to a CSV; all of its rows."""
    rows = {}
    if output.exists():
        rows = {(row["file"], row["env_id"], int(row["steps"])): row for row in csv.DictReader(output.open())}
    for group, runs in groups.items():
        runs.sort(key=lambda run: run.seed)
        scores = [run.score for run in runs]
        mean, std = reference_score(reference, group, runs[0].args)
        packages = runs[0].packages
        rows[group] = {
            **dict(zip(("file", "env_id", "steps"), group)),
            "seeds": " ".join(str(run.seed) for run in runs),
            "score_mean": digits(np.mean(scores)),
            "score_std": digits(np.std(scores, ddof=1)) if len(scores) > 1 else "",
            "scores": " ".join(map(digits, scores)),
            "reference_mean": mean,
            "reference_std": std,
            "command": re.sub(r" --seed \d+", "", runs[0].command),
            "commit": " ".join(sorted({run.commit[:10] for run in runs})),
            "packages": " ".join(f"{name}={packages[name]}" for name in PACKAGES if name in packages),
        }
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS.split(","), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[group] for group in sorted(rows))
    return rows


def main(options):
    groups = defaultdict(list)
    try:
        loaded, commit = load(options.runs), full_commit(options.commit) if options.commit else ""
    except ValueError as error:
        sys.exit(f"{error}")
    for run in loaded:
        if commit and not of_commit(run, commit):
            continue
        if run.source != "run" or np.isnan(run.score):
            sys.exit(f"{run.folder or run.script} is not a run folder with episodes")
        if not run.ended and not options.partial:
            told = f"{run.folder} stopped at step {run.last_step} of {run.total_timesteps}"
            sys.exit(f"{told}: resume it, or say --partial")
        steps = run.total_timesteps if run.ended else run.last_step
        group = groups[f"cleanrl/{run.script}", run.env_id, steps]
        if twin := next((other for other in group if other.seed == run.seed), None):
            sys.exit(f"{run.folder} and {twin.folder} are runs of one seed: name one of them, or a --commit")
        group.append(run)
    for (_, _, steps), runs in groups.items():
        for run in runs if options.curves else ():
            write_curve(run, steps, options.curves)
    rows = write_rows(groups, options.output, options.reference)
    for group in sorted(groups):
        row = rows[group]
        ours, theirs = (
            " +- ".join(filter(None, (row[f"{kind}_mean"], row[f"{kind}_std"]))) for kind in ("score", "reference")
        )
        told = f"{row['file']} {row['env_id']} {row['steps']} steps, seeds {row['seeds']}: {ours}"
        print(told + (f" (reference {theirs})" if theirs else ""))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
