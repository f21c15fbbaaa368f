"""Is my change faster? `python -m benchmark.speed.versions dqn_atari --before HEAD`.

Two versions of a file in turns: the one in cleanrl/ and the one of a commit, or of a path where there is no git. Each
round runs both whole, steps over wall time behind `--skip`; of torch files also a gradient step of each, captured on a
GPU, the best of many short turns in one process. Flags of the file come behind its name; what has a replay learns after
half of the steps that are skipped.

    python -m benchmark.speed.versions ppo --before main --num-envs 8
    python -m benchmark.speed.versions rainbow_atari --before old/rainbow_atari.py --rounds 0  # gradient steps alone
"""

import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from benchmark.speed.__main__ import ROOT, Task, our_rate
from benchmark.speed.kernels import gradient_step, seconds_per_call, short_flags


@dataclass
class Options:
    file: Annotated[str, tyro.conf.Positional]  # file of cleanrl/
    before: str = "HEAD"  # what to compare with: a commit, or the path of the other version
    steps: int = 20_000  # environment steps of a run
    skip: int = 5_000  # steps that do not count: imports, graph capture, steps before the first gradient step
    rounds: int = 3  # how often the pair runs; 0: gradient steps alone
    turns: int = 20  # turns of ten gradient steps; 0: runs alone


def version(name, before):
    """The text of a file at a commit, or at a path."""
    if Path(before).is_file():
        return Path(before).read_text()
    command = f"git show {shlex.quote(f'{before}:cleanrl/{name}')}"
    shown = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    if shown.returncode:  # or there is no git
        sys.exit(f"--before {before} is neither a file nor a commit that has cleanrl/{name}")
    return shown.stdout


def runs(path, old, options, flags):
    """The rates of both versions, round by round."""
    early = ["--learning-starts", str(options.skip // 2)] * ("    learning_starts: int" in old)
    task = Task(path.stem, "", options.steps, options.skip, 1, " ".join([*early, *flags]))
    for seed in range(1, options.rounds + 1):
        try:
            rates = our_rate(task, seed, lambda text: old), our_rate(task, seed)
        except subprocess.CalledProcessError as error:
            sys.exit(f"{path.name} ended with {error.returncode}: {error.stderr.decode().strip()[-500:]}")
        print(f"round {seed}: before {rates[0]:.0f}, now {rates[1]:.0f} steps/s", flush=True)
        yield rates


def gradient_steps(path, old, turns, flags):
    """The least seconds of a gradient step of both versions."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        before = Path(folder, path.name)
        before.write_text(old)
        steps = [gradient_step(each, [*short_flags(each), *flags]) for each in (before, path)]
        wait = torch.cuda.synchronize if steps[0][1] else lambda: None
        taken = [[seconds_per_call(step, 10, wait) for step, *_ in steps] for _ in range(turns)]
        os.chdir(ROOT)
    return [min(column) for column in zip(*taken)]


def main(options, flags):
    path = ROOT / f"cleanrl/{options.file.removesuffix('.py')}.py"
    if not path.exists():
        sys.exit(f"{options.file} is not a file of cleanrl/, such as dqn_atari")
    old = version(path.name, options.before)
    if old == path.read_text():
        sys.exit(f"cleanrl/{path.name} is the same as at {options.before}")
    if not options.rounds and "_jax" in path.stem:
        sys.exit("--rounds 0 leaves gradient steps alone, and those of JAX files are not timed: --rounds 1 at least")
    rates = list(runs(path, old, options, flags))
    if rates:
        ratios = [now / before for before, now in rates]
        before, now = (statistics.median(column) for column in zip(*rates))
        print(f"whole runs: before {before:.0f}, now {now:.0f} steps/s, ", end="")
        print(f"{statistics.median(ratios):.2f} times ({', '.join(f'{ratio:.2f}' for ratio in ratios)})")
    if options.turns and "_jax" not in path.stem:
        before, now = gradient_steps(path, old, options.turns, flags)
        print(f"gradient step: before {1e6 * before:.0f}, now {1e6 * now:.0f} us, {before / now:.2f} times")


if __name__ == "__main__":
    main(*tyro.cli(Options, prog="python -m benchmark.speed.versions", description=__doc__, return_unknown_args=True))
