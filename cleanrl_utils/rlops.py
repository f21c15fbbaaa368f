"""The effect of a change on tracked experiments: compare two tags of a Weights & Biases project.

    python -m cleanrl_utils.rlops --exp-name ddpg_continuous_action --wandb-project-name cleanrl \\
        --wandb-entity openrlbenchmark --tags pr-299 rlops-pilot --env-ids HalfCheetah-v2 Walker2d-v2 \\
        --output-filename compare.png --scan-history --metric-last-n-average-window 100 --report

The first tag is the new version, the second the base. Prints the verdict of cleanrl_utils.compare, draws the learning
curves, and with --report writes a page (cleanrl_utils.report) beside the picture. Runs that have both tags are refused,
those of another length than most are left out. Without --scan-history W&B sends a sample of 500 points of each run.
With --runs FOLDER the runs of a folder are taken instead, and tags are commits.
Exit codes: 0 no regression, 1 worse, 2 wrong usage, or W&B is not installed or cannot be reached.
"""

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from cleanrl_utils import fail
from cleanrl_utils.compare import compare, markdown, pair, select
from cleanrl_utils.runs import figure
from cleanrl_utils.runs.results import Run, curve_edges, full_commit, load, of_commit
from cleanrl_utils.runs.scores import write_curve, write_rows
from cleanrl_utils.runs.stats import bootstrap_curves, within


def fetch_run(tracked, options):
    """A run of W&B as a `Run`."""
    keys = [options.metric, "global_step", "_runtime"]
    rows = tracked.scan_history(keys=keys) if options.scan_history else tracked.history(keys=keys, pandas=False)
    table = np.array([[row[key] for key in keys] for row in rows], dtype=float).reshape(-1, 3)
    table = table[~np.isnan(table).any(axis=1)]
    returns, steps, seconds = table[np.argsort(table[:, 1], kind="stable")].T
    config, name = dict(tracked.config), options.exp_name
    return Run(
        env_id=config["env_id"],
        exp_name=name,
        script=f"{name}.py",
        seed=int(config.get("seed", 0)),
        total_timesteps=int(config.get("total_timesteps", steps.max(initial=0))),
        steps=steps.astype(np.int64),
        returns=returns,
        seconds=seconds,
        score=float(returns[-options.metric_last_n_average_window :].mean()) if len(returns) else float("nan"),
        ended=tracked.state == "finished",
        source="run",
        args=config,
        command=tracked.url,
        commit=getattr(tracked, "commit", None) or "",
        last_step=int(steps.max(initial=0)),
        origin=tracked.url,
    )


def fetch(tag, options):
    """The runs of a tag: those of the experiment, in the environments asked for."""
    if options.runs:
        try:
            runs, commit = load(options.runs), full_commit(tag)
        except ValueError as error:
            fail(error)
        runs = [run for run in runs if of_commit(run, commit) and run.exp_name == options.exp_name]
        return [run for run in runs if run.env_id in options.env_ids]
    try:
        import wandb
    except ImportError:
        fail('the runs are on W&B, and wandb is not installed: pip install "wandb>=0.26,<1", or take --runs FOLDER')
    project = f"{options.wandb_entity}/{options.wandb_project_name}".removeprefix("None/")
    try:
        tracked = wandb.Api().runs(project, filters={"tags": {"$in": [tag]}})
        wanted = [run for run in tracked if run.config.get("exp_name") == options.exp_name]
        return [fetch_run(run, options) for run in wanted if run.config.get("env_id") in options.env_ids]
    except Exception as error:  # no network, no key, no such project: as many kinds as W&B has
        fail(f"cannot read {project} from W&B: {' '.join(str(error).split())[:300] or type(error).__name__}")


def on_grid(run, edges):
    """The returns of a run in 100 parts of its steps, nan where it has none."""
    parts = np.digitize(run.steps, edges[1:], right=True).clip(0, len(edges) - 2)
    counts = np.bincount(parts, minlength=len(edges) - 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.bincount(parts, weights=run.returns, minlength=len(edges) - 1) / counts


def draw(pairs, names, filename):
    """The learning curves of both sides, a panel for each environment, with 95 % intervals over seeds."""
    panels = []
    for (_, env_id), sides in pairs.items():
        returns = np.concatenate([run.returns[np.isfinite(run.returns)] for runs in sides for run in runs])
        panel = figure.Panel(env_id, [], end=max(run.total_timesteps for runs in sides for run in runs))
        for name, runs in zip(names, sides):
            if runs:
                edges = curve_edges(max(run.total_timesteps for run in runs))
                curves = bootstrap_curves([on_grid(run, edges) for run in runs])
                panel.lines.append(figure.Line(name, edges[1:], *within(curves, returns.min(), returns.max())))
        panels.append(panel)
    figure.draw(panels, [filename])


def write_page(sides, names, folder):
    """The runs as recorded results in `folder`, and the page of cleanrl_utils.report on them."""
    groups = defaultdict(list)
    for name, runs in zip(names, sides):
        for run in runs:
            script = f"{run.script.removesuffix('.py')}-{re.sub('[^A-Za-z0-9_.-]', '-', name)}.py"
            # A record takes its name from its command, if that has one.
            command = re.sub(r" --exp[-_]name[ =]\S+", "", run.command)
            run = replace(run, script=script, command=command)
            groups[f"cleanrl/{script}", run.env_id, run.total_timesteps].append(run)
    for runs in groups.values():
        for run in runs:
            write_curve(run, run.total_timesteps, folder / "results/curves")
    write_rows(groups, folder / "results/rlops.csv")
    command = [sys.executable, "-m", "cleanrl_utils.report", folder / "results", "-o", folder / "page"]
    return subprocess.run(command).returncode


def main(argv=None):
    style = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="python -m cleanrl_utils.rlops", **style)
    parser.add_argument("--exp-name", required=True, help="name of the experiment, such as ddpg_continuous_action")
    parser.add_argument("--wandb-project-name", default="cleanRL")
    parser.add_argument("--wandb-entity")
    parser.add_argument("--tags", nargs=2, required=True, metavar=("NEW", "BASE"))
    parser.add_argument("--env-ids", nargs="+", required=True)
    parser.add_argument(
        "--steps", type=int, metavar="N", help="runs of N steps; where a side has none, longer ones as far as N"
    )
    parser.add_argument("--metric", default="charts/episodic_return")
    parser.add_argument("--metric-last-n-average-window", type=int, default=100, help="episodes of a score")
    parser.add_argument("--scan-history", action="store_true", help="every point of each run, not a sample")
    parser.add_argument("--output-filename", type=Path, default=Path("compare.png"), help=".png, .svg or .pdf")
    parser.add_argument("--report", action="store_true", help="also write a page")
    parser.add_argument("--runs", nargs="+", help="folders to read instead of W&B; tags are commits then")
    options = parser.parse_args(argv)
    if find_spec("matplotlib") is None:
        fail("the picture needs matplotlib: pip install matplotlib")
    if options.steps is not None and options.steps < 1:
        fail("--steps must be at least 1")
    if options.output_filename.suffix not in (".png", ".svg", ".pdf") or not options.output_filename.parent.is_dir():
        fail(f"--output-filename {options.output_filename} is no .png, .svg or .pdf in a folder that is there")
    new, base = (fetch(tag, options) for tag in options.tags)
    try:
        result = compare(base, new, steps=options.steps)
    except ValueError as error:
        fail(f"{error} ({len(base)} of {options.tags[1]}, {len(new)} of {options.tags[0]})")
    sides, names = select(base, new, "last", options.steps, []), options.tags[::-1]
    print(markdown(result), end="")
    draw(pair(*sides), names, options.output_filename)
    print(f"\npicture: {options.output_filename}")
    if options.report and write_page(sides, names, options.output_filename.with_suffix("")):
        fail("cleanrl_utils.report could not write the page")
    return int(result["verdict"] == "worse")


if __name__ == "__main__":
    sys.exit(main())
