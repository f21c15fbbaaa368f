"""Play the saved model of a run: python -m cleanrl_utils.evaluate runs/CartPole-v1__ppo__1__1700000000 --episodes 10

The run folder holds all that this takes: the copy of the script that made it, its flags (args.json) and its weights
(model.safetensors, written by --save-model). The script's copy is run, the weights are data. Each episode is played in
an environment of its own, with seeds that training did not use. Exit codes: 0 played, 2 wrong usage.
"""

import argparse
import inspect
import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np

HELD_OUT = 2**30  # what the files add to a seed of training for their own evaluation


def fail(message):
    print(f"evaluate: {message}", file=sys.stderr)
    sys.exit(2)


def load_args(run_dir):
    return json.loads(Path(run_dir, "args.json").read_text())


def load_run(run_dir):
    """The script of a run folder as a module, and its flags."""
    run_dir = Path(run_dir)
    for name in ("args.json", "model.safetensors"):
        if not (run_dir / name).is_file():
            hint = ": train with --save-model" if name == "model.safetensors" and run_dir.is_dir() else ""
            fail(f"{run_dir} is not a run with a model, {name} is missing{hint}")
    scripts = list(run_dir.glob("*.py"))
    if len(scripts) != 1:
        fail(f"{run_dir} should hold one script, the copy that a run makes, and holds {len(scripts)}")
    spec = spec_from_file_location(scripts[0].stem, scripts[0])
    module = sys.modules[spec.name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        fail(f"{scripts[0].name} needs a package that is not installed: {error}")
    return module, load_args(run_dir)


def default_device(module, cpu=False):
    """The device of a script's framework: the GPU if there is one, unless `cpu`."""
    if hasattr(module, "torch"):
        module.torch.set_num_threads(1)
        return module.torch.device("cuda" if module.torch.cuda.is_available() and not cpu else "cpu")
    return module.jax.devices("cpu" if cpu else None)[0]


def evaluate_run(run_dir, episodes=10, seed=None, cpu=False):
    """The undiscounted returns of some episodes of the saved policy of a run."""
    module, args = load_run(run_dir)
    seed = args["seed"] + HELD_OUT if seed is None else seed
    device = default_device(module, cpu)
    if hasattr(module, "torch"):
        module.torch.manual_seed(seed)
    # what a file's environments take beyond their number is a flag of its own (levels, lives, ...) or has a default
    options = args | {"num_envs": episodes, "seed": seed, "life_loss": False, "capture_video": False}
    options |= {"run_name": "", "cuda": args.get("cuda", True) and not cpu}
    known = inspect.signature(module.make_envs).parameters
    try:
        envs = module.make_envs(**{name: options[name] for name in known if name in options})
    except (ImportError, OSError, RuntimeError, ValueError, module.gym.error.Error) as error:
        fail(error)
    returns = module.evaluate(module.load_policy(Path(run_dir), envs, device), envs, seed=seed)
    envs.close()
    return np.asarray(returns)


def main():
    parser = argparse.ArgumentParser(
        prog="python -m cleanrl_utils.evaluate", description="Play the saved model of a run (--save-model)."
    )
    parser.add_argument("run_dir", type=Path, help="folder of the run, such as runs/CartPole-v1__ppo__1__1700000000")
    parser.add_argument(
        "--episodes", type=int, default=10, help="episodes, one per environment (default: 10; in Godot one per agent)"
    )
    parser.add_argument("--seed", type=int, help="seed (default: that of the run plus 2**30, never used to train)")
    parser.add_argument("--cpu", action="store_true", help="do not use the GPU")
    args = parser.parse_args()
    if args.episodes < 1:
        fail("--episodes must be at least 1")
    returns = evaluate_run(args.run_dir, args.episodes, args.seed, args.cpu)
    if load_args(args.run_dir).get("num_seeds", 1) > 1:
        print("Of the seeds that this run trained side by side, the first:")
    for i, episode in enumerate(returns):
        print(f"episode {i}: return {np.round(episode, 2)}")
    print(f"Mean return of {len(returns)} episodes: {np.round(returns.mean(0), 2)} +- {np.round(returns.std(0), 2)}")


if __name__ == "__main__":
    main()
