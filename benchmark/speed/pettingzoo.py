"""How fast two-player games are beside SuperSuit's chain of wrappers: `python -m benchmark.speed.pettingzoo`.

Each round steps the same number of games of ours and of the chain, one after the other, with random actions; what
counts is the ratio. The chain is the usual one for these games and needs: pip install supersuit
"""

import json
import statistics
import time
import warnings
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import tyro


@dataclass
class Options:
    env_id: str = "pong_v3"  # game
    num_envs: int = 16  # players in all games together
    steps: int = 8_000  # steps of players per measurement
    skip: int = 800  # steps that do not count
    rounds: int = 3  # how often the pair runs


def ours(options):
    return import_module("cleanrl.ppo_pettingzoo_ma_atari").make_envs(options.env_id, options.num_envs)


def chain(options):
    import ale_py
    import supersuit

    make = import_module(f"pettingzoo.atari.{options.env_id}").parallel_env
    env = make(auto_rom_install_path=str(Path(ale_py.__file__).parent / "roms"))
    env = supersuit.max_observation_v0(env, 2)
    env = supersuit.frame_skip_v0(env, 4)
    env = supersuit.clip_reward_v0(env, lower_bound=-1, upper_bound=1)
    env = supersuit.color_reduction_v0(env, mode="B")
    env = supersuit.resize_v1(env, x_size=84, y_size=84)
    env = supersuit.frame_stack_v1(env, 4)
    env = supersuit.agent_indicator_v0(env, type_only=False)
    env = supersuit.pettingzoo_env_to_vec_env_v1(env)
    envs = supersuit.concat_vec_envs_v1(env, options.num_envs // 2, num_cpus=0, base_class="gymnasium")
    envs.single_action_space = envs.action_space
    return envs


def rate(envs, options):
    rng, num_actions = np.random.default_rng(0), envs.single_action_space.n
    envs.reset(seed=1)
    for step in range(options.steps // options.num_envs):
        if step * options.num_envs <= options.skip:
            start_step, start = step, time.perf_counter()
        envs.step(rng.integers(num_actions, size=options.num_envs))
    elapsed = time.perf_counter() - start
    envs.close()
    return (step + 1 - start_step) * options.num_envs / elapsed


def main(options: Options):
    warnings.filterwarnings("ignore")
    pairs = []
    for _ in range(options.rounds):
        pairs.append((rate(ours(options), options), rate(chain(options), options)))
        print(f"ours {pairs[-1][0]:.0f}, SuperSuit {pairs[-1][1]:.0f} steps of players per second", flush=True)
    ratios = [ours / chain for ours, chain in pairs]
    print(f"ratio {statistics.median(ratios):.2f}, all: {json.dumps([round(ratio, 2) for ratio in ratios])}")


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m benchmark.speed.pettingzoo"))
