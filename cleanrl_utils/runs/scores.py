"""Scores of runs as rows of a CSV, and their learning curves: what `python -m benchmark.record` writes."""

import csv
import re

import numpy as np

from cleanrl_utils.runs.results import ROOT, curve_edges, curve_name, references

COLUMNS = "file,env_id,steps,seeds,score_mean,score_std,scores,reference_mean,reference_std,command,commit,packages"
PACKAGES = ("gymnasium", "gymnax", "ale-py", "envpool", "mujoco", "godot_rl", "torch", "jax")


def digits(value):
    """A score as text: two decimals, but four digits of what is small."""
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.4g}"


def packages_of(run):
    """The packages that a score may depend on, with their versions."""
    return " ".join(f"{name}={run.packages[name]}" for name in PACKAGES if name in run.packages)


def command_of(run):
    """The command of a run without its seed; if its environment is in the tests' helpers, with the path to them."""
    module, helpers = run.env_id.rpartition(":")[0], "tests/helpers"
    where = f"PYTHONPATH={helpers} " if module and (ROOT / helpers / f"{module}.py").exists() else ""
    return where + re.sub(r" --seed \d+", "", run.command)


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
        rows[group] = {
            **dict(zip(("file", "env_id", "steps"), group)),
            "seeds": " ".join(str(run.seed) for run in runs),
            "score_mean": digits(np.mean(scores)),
            "score_std": digits(np.std(scores, ddof=1)) if len(scores) > 1 else "",
            "scores": " ".join(map(digits, scores)),
            "reference_mean": mean,
            "reference_std": std,
            "command": command_of(runs[0]),
            "commit": " ".join(sorted({run.commit[:10] for run in runs})),
            "packages": packages_of(runs[0]),
        }
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS.split(","), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[group] for group in sorted(rows))
    return rows
