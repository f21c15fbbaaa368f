"""What a gradient step spends, operation by operation: `python -m benchmark.speed.kernels dqn_atari`.

A short run of the file, whose last gradient step is then repeated under torch's profiler: the kernels of a GPU, or on a
CPU the operators, with their calls and microseconds per step and their share; and the time of a whole step, on a GPU of
the captured graph, where nothing waits for Python. Of DDPG, TD3 and SAC it is the step of the critics. Run it beside
others, and only the shares mean something.

    python -m benchmark.speed.kernels rainbow_atari --batch-size 64  # flags of the file come behind its name
"""

import contextlib
import io
import math
import os
import re
import runpy
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

ROOT = Path(__file__).parents[2]
SHORT = {"buffer_size": 20_000, "learning_starts": 400, "total_timesteps": 800}  # of files with a replay


@dataclass
class Options:
    file: Annotated[str, tyro.conf.Positional]  # torch file of cleanrl/, whose gradient step is one function
    steps: int = 50  # gradient steps to look at
    rows: int = 15  # operations to show


def short_flags(path):
    """Flags of a run that ends soon, with the sizes of the defaults."""
    flags = dict(re.findall(r"(?m)^    (\w+): int = ([\d_]+)", path.read_text()))
    if "learning_starts" not in flags:
        rollout = math.prod(int(flags[name]) for name in ("num_steps", "num_envs", "local_num_envs") if name in flags)
        return ["--total-timesteps", str(2 * rollout)]
    return [word for name, value in SHORT.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def gradient_step(path, flags):
    """One more gradient step of a run that is over, as a function, and whether it is on a GPU, and in a graph."""
    sys.argv = [str(path), *flags]
    with contextlib.redirect_stdout(io.StringIO()):
        after = runpy.run_path(str(path), run_name="__main__")
    step = after.get("update") or after.get("update_qf")
    if step is None:
        sys.exit(f"{path.name} has no function `update` or `update_qf`: its gradient step is not a function of torch")
    on_gpu = after["device"].type == "cuda"
    drawn = after.get("draw", lambda: [after["inds"]] if "inds" in after else [])
    return lambda: step(*drawn()), on_gpu, on_gpu and after["args"].cuda_graphs


def seconds_per_call(function, calls, wait):
    for _ in range(10):  # a graph is captured within the first of them
        function()
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    wait()
    return (time.perf_counter() - start) / calls


def operations(step, calls, wait, on_gpu):
    """Name -> [calls, microseconds] of a call of `step`: kernels, on a CPU operators without those that they call."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
    with profile(activities=kinds, acc_events=True) as profiled:
        for _ in range(calls):
            step()
        wait()
    found = defaultdict(lambda: [0.0, 0.0])
    for event in profiled.events():
        kernel = event.device_type.name == "CUDA" and not event.is_user_annotation
        if kernel if on_gpu else event.name.startswith("aten::"):
            entry = found[re.sub(r"^void |\(.*", "", event.name)[:90]]
            entry[0] += 1 / calls
            entry[1] += (event.device_time if on_gpu else event.self_cpu_time_total) / calls
    return found


def main(options, given):
    path = ROOT / f"cleanrl/{options.file.removesuffix('.py')}.py"
    if not path.exists() or "_jax" in path.stem:
        sys.exit(f"{options.file} is not a torch file of cleanrl/, such as dqn_atari")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        flags = [*short_flags(path), *given]
        step, on_gpu, captured = gradient_step(path, flags)
        import torch

        wait = torch.cuda.synchronize if on_gpu else lambda: None
        whole = seconds_per_call(step, options.steps, wait)
        if captured:  # kernels of a graph are of one operator
            step, *_ = gradient_step(path, [*flags, "--no-cuda-graphs"])
        found = operations(step, options.steps, wait, on_gpu)
        os.chdir(ROOT)
    total = sum(spent for _, spent in found.values())
    what = "kernels" if on_gpu else "operators"
    print(f"{path.name}: {1e6 * whole:.0f} us a step{', captured' * captured}; ", end="")
    print(f"{sum(number for number, _ in found.values()):.0f} {what} of {total:.0f} us together")
    for name, (number, spent) in sorted(found.items(), key=lambda item: -item[1][1])[: options.rows]:
        print(f"{spent:9.1f} us {spent / total:5.1%} {number:6.1f} x {name}")


if __name__ == "__main__":
    main(*tyro.cli(Options, prog="python -m benchmark.speed.kernels", description=__doc__, return_unknown_args=True))
