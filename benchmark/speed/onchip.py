"""Training on the accelerator beside PureJaxRL's: `python -m benchmark.speed.onchip --purejaxrl PATH --seeds 1 64`.

PATH is a checkout of luchris429/purejaxrl whose `purejaxrl.ppo.make_train` runs with the installed gymnax; gymnax 1.0
asks for changes there (a step returns six values). Both train CartPole-v1 with the same sizes. Rates are environment
steps of all seeds per second, without compilation; ours include logging and checkpoints, which the peer has not.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]
CONFIG = {"LR": 2.5e-4, "NUM_ENVS": 4, "NUM_STEPS": 128, "UPDATE_EPOCHS": 4, "NUM_MINIBATCHES": 4, "GAMMA": 0.99}
CONFIG |= {"GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2, "ENT_COEF": 0.01, "VF_COEF": 0.5, "MAX_GRAD_NORM": 0.5}
CONFIG |= {"ACTIVATION": "tanh", "ENV_NAME": "CartPole-v1", "ANNEAL_LR": True, "DEBUG": False}


@dataclass
class Options:
    purejaxrl: Path  # folder that holds the package purejaxrl
    seeds: tuple[int, ...] = (1,)  # numbers of seeds to train at once
    steps: int = 500_000  # environment steps of each seed
    rounds: int = 3  # how often each pair runs
    peer_only: bool = False  # run the peer once, in this process


def our_rate(seeds, steps):
    """The rate and the compile time that the file itself has logged last."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / "cleanrl/ppo_jax.py", "--num-seeds", seeds, "--total-timesteps", steps]
        subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, check=True)
        events = EventAccumulator(str(next(Path(folder, "runs").iterdir()))).Reload()
        return events.Scalars("charts/SPS")[-1].value, events.Scalars("charts/compile_time")[0].value


def peer_rate(options, seeds):
    command = [
        sys.executable,
        "-m",
        "benchmark.speed.onchip",
        "--purejaxrl",
        options.purejaxrl.resolve(),
        "--peer-only",
    ]
    command += ["--seeds", seeds, "--steps", options.steps]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(map(float, done.stdout.split()[-2:]))


def run_peer(options):
    sys.path.insert(0, str(options.purejaxrl))
    import jax
    from purejaxrl.ppo import make_train

    (seeds,) = options.seeds
    train = make_train(CONFIG | {"TOTAL_TIMESTEPS": options.steps})
    key = jax.random.key(1)
    keys, train = (jax.random.split(key, seeds), jax.vmap(train)) if seeds > 1 else (key, train)
    start = time.perf_counter()
    train = jax.jit(train).lower(keys).compile()
    compiled = time.perf_counter()
    jax.block_until_ready(train(keys))
    steps = seeds * (options.steps // 512) * 512
    print(steps / (time.perf_counter() - compiled), compiled - start)


def main(options: Options):
    if options.peer_only:
        return run_peer(options)
    for seeds in options.seeds:
        pairs = []
        for _ in range(options.rounds):
            pairs.append((our_rate(seeds, options.steps), peer_rate(options, seeds)))
            (ours, our_compile), (peer, peer_compile) = pairs[-1]
            compiled = f"compiled in {our_compile:.1f} s and {peer_compile:.1f} s"
            print(f"{seeds} seeds: ours {ours:.0f}, PureJaxRL {peer:.0f} steps/s; {compiled}", flush=True)
        ratio = statistics.median(ours[0] / peer[0] for ours, peer in pairs)
        print(f"{seeds} seeds: {ratio:.2f} times as fast (median of {options.rounds} rounds)", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m benchmark.speed.onchip"))
