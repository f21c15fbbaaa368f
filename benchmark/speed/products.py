"""The share of the machine's rate of matrix products that gradient steps reach: `python -m benchmark.speed.products`.

The updates of DDPG, TD3 and SAC are bound by products of matrices of about 256 rows. For each file: the floating-point
operations of the matrix products in a gradient step (those of the torch file also for its JAX sibling, which computes
the same), times gradient steps per second, over the rate of plain products of 256 x 256 matrices on as many cores.
Rates are the best of many short rounds; the plain products are timed right before and after.
"""

import contextlib
import inspect
import io
import os
import runpy
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import tyro

ROOT = Path(__file__).parents[2]
NAMES = [f"{algorithm}_continuous_action" for algorithm in ("ddpg", "td3", "sac")]


@dataclass
class Options:
    names: list[str] = field(default_factory=lambda: [*NAMES, *(f"{name}_jax" for name in NAMES)])  # files
    env_id: str = "HalfCheetah-v4"  # environment, for the sizes of observations and actions
    cores: int = 1  # cores and threads
    rounds: int = 30  # rounds of 20 gradient steps


def run(name, env_id):
    """The live globals of a file after a short run of it."""
    path = str(ROOT / f"cleanrl/{name}.py")
    sys.argv = [path, "--env-id", env_id, *"--learning-starts 300 --total-timesteps 400".split()]
    with contextlib.redirect_stdout(io.StringIO()):
        after = runpy.run_path(path, run_name="__main__")
    return next(f for f in after.values() if inspect.isfunction(f) and f.__code__.co_filename == path).__globals__


def torch_steps(scope, number):
    frequency = scope["args"].policy_frequency
    turns = frequency if "log_alpha" in scope else 1  # SAC's actor catches up
    for i in range(number):
        b_obs, _ = scope["update_qf"]()
        for _ in range(turns if i % frequency == 0 else 0):
            scope["update_actor"](b_obs)


def jax_steps(scope, number):
    for _ in range(number):
        scope["learner"] = scope["learn"](scope["learner"], scope["replay"].stored(), 1)
    scope["learner"]["losses"].block_until_ready()


def operations(name, env_id):
    from torch.utils.flop_counter import FlopCounterMode

    scope = run(name.removesuffix("_jax"), env_id)
    with FlopCounterMode(display=False) as counter:
        torch_steps(scope, 2 * scope["args"].policy_frequency)
    return counter.get_total_flops() / (2 * scope["args"].policy_frequency)


def best_rate(function, rounds, calls):
    """Calls per second of `function(calls)`."""
    rates = []
    for _ in range(rounds):
        start = time.perf_counter()
        function(calls)
        rates.append(calls / (time.perf_counter() - start))
    return max(rates)


def main(options: Options):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    os.environ |= {"OMP_NUM_THREADS": str(options.cores), "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    os.chdir(tempfile.mkdtemp())
    import torch

    left, right = torch.randn(2, 256, 256)

    def multiply(calls):
        for _ in range(calls):
            left @ right

    print("| file | MFLOP per gradient step | gradient steps/s | GFLOP/s | plain products, GFLOP/s | share |")
    print("|---|--:|--:|--:|--:|--:|")
    for name in options.names:
        work, scope = operations(name, options.env_id), run(name, options.env_id)
        steps = partial(jax_steps if "learner" in scope else torch_steps, scope)
        plain = best_rate(multiply, options.rounds, 100)
        rate = best_rate(steps, options.rounds, 20)
        plain = max(plain, best_rate(multiply, options.rounds, 100)) * 2 * 256**3
        numbers = f"{work / 1e6:.0f} | {rate:.0f} | {work * rate / 1e9:.1f} | {plain / 1e9:.1f}"
        print(f"| {name}.py | {numbers} | {work * rate / plain:.0%} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m benchmark.speed.products"))
