"""Search hyperparameters as a file describes it: python -m cleanrl_utils.tune benchmark/tune/cartpole.toml

The file (paths are relative to where the command is called):

    script = "cleanrl/ppo.py"
    metric = "charts/episodic_return"
    num_trials = 20
    num_seeds = 2
    # optional: metric_last_n_average_window, direction, aggregation_type, workers, engine, ray_address, storage, and
    # study_name, which is the name of the file unless it says otherwise

    [target_scores]             # [low, high] of each environment, or "raw" for a single one
    CartPole-v1 = [0, 500]

    [params]                    # a range, choices, or a value that stays
    learning-rate = { low = 3e-4, high = 3e-3, log = true }
    num-steps = { choices = [32, 64, 128] }
    total-timesteps = 25000

    [sampler]                   # optional: a class of optuna.samplers and its arguments; [pruner] and [wandb] likewise
    name = "TPESampler"
    seed = 1

The same command goes on with a study that was stopped or killed. A range is of whole numbers where the script's flag
is. Exit codes: 0 done, 1 no trial completed, 2 wrong usage, 130 stopped by Ctrl+C. The same in Python: tuner.py.
"""

import argparse
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

from cleanrl_utils import fail

KEYS = {"script": str, "metric": str, "num_trials": int, "num_seeds": int, "target_scores": dict, "params": dict}
OPTIONAL = {"metric_last_n_average_window": int, "direction": str, "aggregation_type": str, "study_name": str}
OPTIONAL |= {"workers": int, "engine": str, "ray_address": str, "storage": str}
OPTIONAL |= {"sampler": dict, "pruner": dict, "wandb": dict}


def read_config(path, overrides):
    """The file with what the command line changes, every key known and of the right type."""
    from cleanrl_utils.tuner import near

    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        fail(f"{path} cannot be read: {error.strerror}")
    except ValueError as error:
        fail(f"{path} is not TOML: {error}")
    config |= {name: value for name, value in overrides.items() if value is not None}
    known = KEYS | OPTIONAL
    for name, value in config.items():
        if name not in known:
            fail(f"{path}: unknown key {name}: {near(name, known)}")
        if not isinstance(value, known[name]) or isinstance(value, bool):
            kind = {str: "a text", int: "a whole number", dict: "a table"}[known[name]]
            fail(f"{path}: {name} must be {kind}, not {value!r}")
    for name in KEYS:
        if name not in config:
            fail(f"{path}: {name} is missing")
    return config


def whole(name, spec, flags):
    """Whether a range is of whole numbers: by the type of the script's flag, or else by how its ends are written."""
    return flags.get(name.replace("-", "_"), type(spec["low"] + spec["high"]).__name__) == "int"


def check_params(params, flags):
    """What a value of [params] may be; whether its flag exists is the tuner's to say."""
    from optuna.distributions import FloatDistribution, IntDistribution

    from cleanrl_utils.tuner import near

    keys = ["low", "high", "log", "step", "choices"]
    for name, spec in params.items():
        if not isinstance(spec, dict):
            continue
        for key in spec:
            if key not in keys:
                fail(f"params: {name}: unknown key {key}: {near(key, keys)}")
        if set(spec) != {"choices"} and ("choices" in spec or not {"low", "high"} <= set(spec)):
            fail(f"params: {name} needs either low and high (and log or step), or choices")
        if "choices" in spec:
            if not isinstance(spec["choices"], list) or not spec["choices"]:
                fail(f"params: {name}: choices must be a list")
            continue
        numbers = [spec[key] for key in ("low", "high", "step") if key in spec]
        if any(not isinstance(number, (int, float)) or isinstance(number, bool) for number in numbers):
            fail(f"params: {name}: low, high and step must be numbers")
        if whole(name, spec, flags) and any(isinstance(number, float) for number in numbers):
            fail(f"params: {name} is a flag of whole numbers, and {numbers} are not all whole")
        try:
            (IntDistribution if whole(name, spec, flags) else FloatDistribution)(**spec)
        except ValueError as error:
            fail(f"params: {name}: {error}")


def suggest(trial, name, spec, flags):
    if not isinstance(spec, dict):
        return spec
    if "choices" in spec:
        return trial.suggest_categorical(name, spec["choices"])
    return (trial.suggest_int if whole(name, spec, flags) else trial.suggest_float)(name, **spec)


def build(module, table, kind):
    """An object of optuna.samplers or optuna.pruners from a table with its name and arguments."""
    from cleanrl_utils.tuner import near

    if table is None:
        return None
    names = [name for name in module.__all__ if name.endswith(kind)]
    if table.get("name") not in names:
        fail(f"{kind.lower()}: unknown name {table.get('name')}: {near(str(table.get('name')), names)}")
    try:
        return getattr(module, table["name"])(**{key: value for key, value in table.items() if key != "name"})
    except (TypeError, ValueError) as error:
        fail(f"{kind.lower()}: {error}")


def make_tuner(config):
    import optuna

    from cleanrl_utils.runs.folder import script_flags
    from cleanrl_utils.tuner import Tuner

    flags = script_flags(config["script"]) if Path(config["script"]).is_file() else {}
    params = config["params"]
    check_params(params, flags)
    raw = {env_id: None if target == "raw" else target for env_id, target in config["target_scores"].items()}
    same = {name: value for name, value in config.items() if name not in ("num_trials", "num_seeds", "wandb", "params")}
    tuner = Tuner(
        **same
        | {
            "target_scores": raw,
            "params_fn": lambda trial: {name: suggest(trial, name, spec, flags) for name, spec in params.items()},
            "sampler": build(optuna.samplers, config.get("sampler"), "Sampler"),
            "pruner": build(optuna.pruners, config.get("pruner"), "Pruner"),
            "wandb_kwargs": config.get("wandb"),
        }
    )
    tuner.arguments(params)  # are these flags of the script?
    return tuner


def main():
    parser = argparse.ArgumentParser(
        prog="python -m cleanrl_utils.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", type=Path, help="the file that describes the search")
    parser.add_argument("--num-trials", type=int, help="trials in all, those of former calls included")
    parser.add_argument("--num-seeds", type=int, help="seeds of each trial, from 1 on")
    parser.add_argument("--workers", type=int, help="processes at a time (default: 1)")
    parser.add_argument("--storage", help="journal file or URL (default: runs/STUDY_NAME/study.journal)")
    parser.add_argument("--study-name", help="name of the study and of its folder in runs/")
    args = vars(parser.parse_args())
    if sys.platform == "win32":
        fail("the tuner needs process groups: Linux, macOS, or WSL on Windows")
    if find_spec("optuna") is None:
        fail('this needs optuna: pip install -e ".[tune]", or pip install "optuna>=4,<6"')
    path = args.pop("config")
    config = {"study_name": path.stem} | read_config(path, args)

    from cleanrl_utils.tuner import NoTrialCompleted

    try:
        make_tuner(config).tune(config["num_trials"], config["num_seeds"])
    except ValueError as error:
        fail(error)
    except NoTrialCompleted as error:
        fail(error, 1)
    except KeyboardInterrupt:
        print("\nStopped: the same command goes on.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
