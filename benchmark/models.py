"""The best model of each file and environment, to play without a network: `python -m benchmark.models runs`.

Of the finished runs of one script and environment, it keeps the one whose model plays best on seeds that are there
for choosing. Weights and flags go to benchmark/models/<env_id>-<exp_name>-seed<seed>, in place of an older model of the
same file and environment. scores.csv there has command, commit and packages of the run, and its return on other seeds,
on which it was neither trained nor chosen. Runs with models of more than --max-size bytes are left out.
`python -m cleanrl_utils.enjoy --exp-name ppo --env-id CartPole-v1` plays what is kept.
"""

import csv
import shutil
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from cleanrl_utils.evaluate import CHOOSING, CannotPlay, evaluate_run
from cleanrl_utils.runs.card import repository_name
from cleanrl_utils.runs.folder import find_runs, load_args, script_of
from cleanrl_utils.runs.results import load
from cleanrl_utils.runs.scores import digits, packages_of
from cleanrl_utils.runs.zoo import FILES, MODELS, SCORES, kept

COLUMNS = "file,env_id,steps,model,of_seeds,chosen_with,episodes,score_mean,score_std,command,commit,packages"


@dataclass
class Options:
    runs: tyro.conf.Positional[list[Path]]  # run folders with models, or folders of them
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = field(default=MODELS)  # folder of the models
    choosing: int = 30  # episodes on which models are compared
    episodes: int = 100  # episodes on held-out seeds, for the score that is written down
    max_size: int = 1_000_000  # bytes of a model


def candidates(options):
    """Script and environment -> the finished runs whose model is small enough, by seed."""
    groups = defaultdict(dict)
    for folder in dict.fromkeys(run for path in options.runs for run in sorted(find_runs(path))):
        model, args, script = folder / "model.safetensors", load_args(folder), script_of(folder).stem
        if not model.is_file() or model.stat().st_size > options.max_size:
            why = (
                f"is larger than {options.max_size} bytes" if model.is_file() else "is missing: train with --save-model"
            )
            print(f"left out: {folder}: its model {why}", file=sys.stderr)
        elif args["seed"] in groups[script, args["env_id"]]:
            other = groups[script, args["env_id"]][args["seed"]]
            sys.exit(f"{folder} and {other} are runs of one seed: name one of them")
        else:
            groups[script, args["env_id"]][args["seed"]] = folder
    return {group: runs for group, runs in groups.items() if runs}


def choose(runs, options):
    """The seed of the model that plays best on the seeds for choosing, and its mean return there."""
    means = {}
    for seed, folder in runs.items():
        returns = evaluate_run(folder, options.choosing, seed=seed + CHOOSING, cpu=True)
        means[seed] = float(np.mean(returns))
        print(f"{folder.name}: {means[seed]:.2f} over {len(returns)} episodes", flush=True)
    best = max(sorted(means), key=means.get)
    return best, means[best]


def keep(folder, args, script, output):
    """Copy what is kept of a run in place of an older model of its file and environment; the name of its folder."""
    name = repository_name(args["env_id"], script, args["seed"])
    for older in kept(args["env_id"], script, folder=output):
        shutil.rmtree(older)
    (output / name).mkdir(parents=True)
    for file in FILES:
        shutil.copyfile(folder / file, output / name / file)
    return name


def main(options):
    rows, groups = {}, candidates(options)
    scores = options.output / SCORES
    if scores.exists():
        rows = {(row["file"], row["env_id"]): row for row in csv.DictReader(scores.open())}
    if not groups:
        sys.exit("No run with a model here: train with --save-model")
    for (script, env_id), runs in groups.items():
        try:
            seed, chosen_with = choose(runs, options)
            (run, *_) = load([runs[seed]])
            if not run.ended:
                sys.exit(f"{runs[seed]} stopped at step {run.last_step} of {run.total_timesteps}: resume it")
            returns = evaluate_run(runs[seed], options.episodes, cpu=True)
        except (CannotPlay, ValueError) as error:
            sys.exit(f"{error}")
        mean, std = float(np.mean(returns)), float(np.std(returns))
        name = keep(runs[seed], load_args(runs[seed]), script, options.output)
        values = [f"cleanrl/{script}.py", env_id, run.total_timesteps, name, " ".join(map(str, sorted(runs)))]
        values += [digits(chosen_with), len(returns), digits(mean), digits(std), run.command, run.commit[:10]]
        values.append(packages_of(run))
        rows[f"cleanrl/{script}.py", env_id] = dict(zip(COLUMNS.split(","), values, strict=True))
        print(f"{name}: {mean:.2f} +- {std:.2f} over {len(returns)} episodes on held-out seeds", flush=True)
        with scores.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS.split(","), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows[key] for key in sorted(rows))


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m benchmark.models", description=__doc__))
