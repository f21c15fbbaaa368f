"""The model card of a run, from its folder: python -m cleanrl_utils.runs.card runs/CartPole-v1__dqn__1__1700000000

It says how good the policy is and of which episodes that is known, how to play it, how to train it again and with which
hyperparameters. `python -m cleanrl_utils.hub push` puts it beside the model. Exit codes: 0 printed, 2 wrong usage.
"""

import argparse
import re
import shlex
from pathlib import Path

import numpy as np

from cleanrl_utils import fail
from cleanrl_utils.runs.checkpoint import with_model
from cleanrl_utils.runs.events import read_scalars
from cleanrl_utils.runs.folder import arguments, load_args, run_folder, script_of


def repository_name(env_id, exp_name, seed):
    """The name of a run's repository, of characters that a hub allows."""
    name = re.sub(r"[^\w.-]+", "-", f"{env_id}-{exp_name}-seed{seed}", flags=re.ASCII)
    return re.sub(r"([.-])[.-]+", r"\1", name).strip(".-")


def without_folders(word):
    """A word of a command or a value of a flag without the folders of the machine that it names."""
    return re.sub(r"(^|=)(?:[A-Za-z]:[\\/]|[/~]).*[\\/]", r"\1.../", str(word))


def at_home(words):
    """The words of a command without those that send a run to the accounts of whoever ran it."""
    text = "\n".join(words) + "\n"
    text = re.sub(r"(?m)^--(track|upload[-_]model)(?:[=\n](True|False))?\n", "", text)
    text = re.sub(r"(?m)^--(wandb[-_]entity|wandb[-_]project[-_]name|hf[-_]entity)[=\n].*\n", "", text)
    return text.splitlines()


def returns(run_dir):
    """The returns that a run is judged by, and what they are: tag -> values, description."""
    scalars = read_scalars(run_dir)
    kinds = [("eval/episodic_return", 0, "episodes of the saved model on held-out seeds")]
    kinds += [("charts/episodic_return", 100, "last episodes of training")]
    for prefix, last, what in kinds:
        found = {tag: rows[-last:, 1] for tag, rows in scalars.items() if tag.startswith(prefix)}
        if found:
            return found, what
    return {}, "no episode ended"


def card(run_dir, name, step=None):
    """The model card of a run; `step` is that of the checkpoint that its weights are from, if it has not ended."""
    try:
        import yaml
    except ImportError:
        fail('a model card needs a package: pip install -e ".[hub]", or pip install pyyaml')
    args, script = load_args(run_dir), script_of(run_dir).name
    found, what = returns(run_dir)
    lines, metrics = ["| Metric | Mean | Standard deviation | Over |", "|---|--:|--:|---|"], []
    for tag, values in found.items():
        mean, std, over = f"{np.mean(values):.2f}", f"{np.std(values):.2f}", f"{len(values)} {what}"
        lines.append(f"| `{tag}` | {mean} | {std} | {over} |")
        label = f"mean_reward ({tag}, {over})"
        metrics.append({"type": "mean_reward", "value": f"{mean} +/- {std}", "name": label, "verified": False})
    if args.get("num_seeds", 1) > 1:
        each = f"Each of these episodes is the mean of {args['num_seeds']} seeds that were trained side by side"
        lines += ["", f"{each}; the model holds all of them, and the first one is played."]
    if step is not None:
        lines += ["", f"The weights are those of a checkpoint, at step {step} of {args['total_timesteps']}."]
    tags = [args["env_id"], "deep-reinforcement-learning", "reinforcement-learning", "custom-implementation"]
    meta = {"tags": tags, "library_name": "cleanrl"}
    if metrics:
        task = {"type": "reinforcement-learning", "name": "reinforcement-learning"}
        result = {"task": task, "dataset": {"name": args["env_id"], "type": args["env_id"]}, "metrics": metrics}
        meta["model-index"] = [{"name": args["exp_name"], "results": [result]}]
    entity, _, short = name.partition("/")
    usual = short == repository_name(args["env_id"], args["exp_name"], args["seed"])
    play = ["--exp-name", args["exp_name"], "--env-id", args["env_id"], "--seed", str(args["seed"])]
    play += ["--hf-entity", entity] if usual else ["--repo-id", name]
    command = shlex.join(["python", f"cleanrl/{script}", *map(without_folders, at_home(arguments(run_dir)))])
    commit = Path(run_dir, "commit.txt").read_text().strip() if Path(run_dir, "commit.txt").is_file() else ""
    hyperparameters = "\n".join(f"| `{flag}` | `{without_folders(value)}` |" for flag, value in args.items())
    metrics_table = "\n".join(lines if found else [f"There are no metrics: {what}."])
    return f"""---
{yaml.safe_dump(meta, sort_keys=False)}---

# {args["exp_name"]} on {args["env_id"]}, seed {args["seed"]}

A policy that CleanRL's `{script}` trained. The folder is the whole run: weights (`model.safetensors`), flags
(`args.json`), the script, TensorBoard events.

{metrics_table}

## Play it

In a clone of CleanRL, with its own copy of the script; of this repository only data is used:

```bash
pip install -e ".[hub]"
python -m cleanrl_utils.enjoy {shlex.join(play)}
```

## Train it again

```bash
{command}
```

Commit: `{commit or "not recorded"}`. Packages: `packages.txt`. `python -m cleanrl_utils.reproduce {name}` says
what it takes to repeat the run, and with `--run` repeats it and compares the curves.

## Hyperparameters

| Flag | Value |
|---|---|
{hyperparameters}
"""


def main():
    parser = argparse.ArgumentParser(
        prog="python -m cleanrl_utils.runs.card", description="Print the model card of a run."
    )
    parser.add_argument("run_dir", help="run folder, such as runs/CartPole-v1__ppo__1__1700000000, or latest")
    parser.add_argument("--entity", default="ENTITY", help="user or organisation of the hub that the card names")
    args = parser.parse_args()
    args.run_dir = run_folder(args.run_dir)
    if not (args.run_dir / "args.json").is_file():
        fail(f"{args.run_dir} is not a run folder, args.json is missing")
    flags = load_args(args.run_dir)
    name = repository_name(flags["env_id"], flags["exp_name"], flags["seed"])
    try:
        with with_model(args.run_dir) as (_, step):
            print(card(args.run_dir, f"{args.entity}/{name}", step), end="")
    except ValueError as error:
        fail(error)


if __name__ == "__main__":
    main()
