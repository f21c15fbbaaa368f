"""Scores of finished runs, as data: `python -m benchmark.record runs/CartPole-v1__ppo__* -o benchmark/results/ppo.csv`.

A run's score is the mean return of its last 100 episodes (fewer if it has fewer); a row has the mean and the standard
deviation over the seeds of one script and environment. `--curves DIR` adds, per run, returns averaged over 100 bins and
the seconds of training until the last of each. A run of many seeds at once (curves.npz) counts as one run of each.
Seeds that were stopped together, within 2 % of the steps of the shortest, are one row, of that many steps.
"""

import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from cleanrl_utils.runs.results import full_commit, load, of_commit
from cleanrl_utils.runs.scores import write_curve, write_rows


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


def stopped_with(run, groups):
    """The steps of a run that was stopped, or of the shortest of the other seeds that were stopped with it."""
    for (script, env_id, steps), runs in groups.items():
        other = script == f"cleanrl/{run.script}" and env_id == run.env_id and run.seed not in {x.seed for x in runs}
        if other and not any(x.ended for x in runs) and steps <= run.last_step <= 1.02 * steps:
            return steps
    return run.last_step


def main(options):
    groups = defaultdict(list)
    try:
        loaded, commit = load(options.runs), full_commit(options.commit) if options.commit else ""
    except ValueError as error:
        sys.exit(f"{error}")
    for run in sorted(loaded, key=lambda run: run.last_step):
        if commit and not of_commit(run, commit):
            continue
        if run.source != "run" or np.isnan(run.score):
            sys.exit(f"{run.folder or run.script} is not a run folder with episodes")
        if not run.ended and not options.partial:
            told = f"{run.folder} stopped at step {run.last_step} of {run.total_timesteps}"
            sys.exit(f"{told}: resume it, or say --partial")
        steps = run.total_timesteps if run.ended else stopped_with(run, groups)
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
    main(tyro.cli(Options, prog="python -m benchmark.record", description=__doc__))
