"""Two-player games: frames and rewards against PettingZoo's own, step by step, and what a run makes of them."""

import functools
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from helpers.files import load, require_for, script, smoke
from helpers.processes import inspect_run, run_dir
from helpers.refusals import refuse, refuse_all, without
from helpers.scalars import raw_scalars

NAME = "ppo_pettingzoo_ma_atari"


@functools.cache
def means(size, new_size=84):
    """The mean over each larger pixel: every pixel is cut into as many as it takes to count whole ones."""
    return np.repeat(np.eye(size), new_size, axis=0).reshape(new_size, size, size).mean(1)


def resize(screen):
    return means(screen.shape[0]) @ screen @ means(screen.shape[1]).T


@pytest.mark.parametrize("height", [210, 250, 256])
def test_area_resize(height):
    module, rng = load(NAME), np.random.default_rng(0)
    weights = module.area_weights(height, 84)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    envs = module.make_envs("pong_v3", 4)
    envs.rows = weights
    screens = rng.integers(256, size=(2, height, 160)).astype(np.uint8)
    resized = envs.resize(screens)
    assert resized.dtype == np.uint8
    for ours, screen in zip(resized, screens, strict=True):
        np.testing.assert_allclose(ours, resize(screen), atol=0.501)
    envs.close()


def play_slowly(env_id, actions, seed, **options):
    """The first observations and, from PettingZoo itself, [(obs, rewards, terminated, truncated, obs of a restart)]."""
    import ale_py

    roms = str(Path(ale_py.__file__).parent / "roms")
    module = import_module(f"pettingzoo.atari.{env_id}")
    env = module.parallel_env(obs_type="grayscale_image", auto_rom_install_path=roms, **options)
    players, rows = env.possible_agents, []

    def observe(stack):
        planes = np.zeros((2, 6, 84, 84))
        planes[:, :4], planes[0, 4], planes[1, 5] = stack, 255, 255
        return planes

    stack = [resize(env.reset(seed=seed)[0][players[0]][:, :, 0])] * 4
    first = observe(stack)
    for pair in actions:
        frames, total = [], np.zeros(2)
        for _ in range(4):
            screens, rewards, terminated, truncated, _ = env.step({player: a for player, a in zip(players, pair)})
            frames.append(screens[players[0]][:, :, 0])
            total += [rewards[player] for player in players]
            over = all(terminated.values()), all(truncated.values())
            if any(over):
                break
        stack = [*stack[1:], resize(np.max(frames[-2:], axis=0))]
        obs, restart = observe(stack), None
        if any(over):
            stack = [resize(env.reset()[0][players[0]][:, :, 0])] * 4
            restart = observe(stack)
        rows.append((obs, total, *over, restart))
    return first, rows


@pytest.mark.parametrize("env_id, steps, limit", [("pong_v3", 170, 320), ("entombed_competitive_v3", 380, 100_000)])
def test_games_against_pettingzoo(env_id, steps, limit):
    envs = load(NAME).make_envs(env_id, 4, max_cycles=limit)
    actions = np.random.default_rng(0).integers(envs.single_action_space.n, size=(steps, 2, 2))
    expected = [play_slowly(env_id, actions[:, i], seed=5 + i, max_cycles=limit) for i in range(2)]
    obs, _ = envs.reset(seed=5)
    np.testing.assert_allclose(obs, np.concatenate([first for first, _ in expected]), atol=0.501)
    ends, points = 0, 0
    for t in range(steps):
        obs, rewards, terminated, truncated, infos = envs.step(actions[t].ravel())
        assert obs.shape == (4, *envs.single_observation_space.shape) and obs.dtype == np.uint8
        for i in range(2):
            players, (last, total, over, cut, restart) = slice(2 * i, 2 * i + 2), expected[i][1][t]
            np.testing.assert_array_equal(rewards[players], total)
            assert terminated[players].tolist() == [over] * 2 and truncated[players].tolist() == [cut] * 2
            np.testing.assert_allclose(obs[players], last if restart is None else restart, atol=0.501)
            if cut:
                np.testing.assert_allclose(np.stack(infos["final_obs"][players]), last, atol=0.501)
            ends, points = ends + (over or cut), points + abs(total).sum()
            assert env_id != "pong_v3" or total.sum() == 0, "one wins what the other loses"
    assert ends >= 2 and points > 0
    envs.close()


SHORT_GAMES = """
from functools import partial

import numpy as np
import pettingzoo.atari.pong_v3 as pong
from pettingzoo.atari.base_atari_env import ParallelAtariEnv

pong.parallel_env = partial(pong.parallel_env, max_cycles=400)
step, result["rewards"] = ParallelAtariEnv.step, {}


def follow(self, actions):
    out = step(self, actions)
    result["rewards"].setdefault(id(self), []).append([float(reward) for reward in out[1].values()])
    return out


ParallelAtariEnv.step = follow
"""
STORED = """
result["stored"] = [rewards, dones, final_values]
result["order"] = [id(game) for game in envs.games]
result["planes"] = obs[:, :, 4:, 0, 0]
"""


def test_games_of_a_run(tmp_path):
    """Returns and lengths by player; both end at once; values of the final observations where the limit cuts a game."""
    require_for(NAME)
    argv = smoke(NAME, env_id="pong_v3", num_steps=64, total_timesteps=1024)
    got = inspect_run(script(NAME), *argv, cwd=tmp_path, before=SHORT_GAMES, after=STORED)
    by_frame = np.array([got["rewards"][game] for game in got["order"]])  # (game, frame, player)
    by_step = by_frame.reshape(2, 256, 4, 2).sum(2).transpose(1, 0, 2).reshape(256, 4)
    assert (by_step != 0).any() and (by_step[:, ::2] == -by_step[:, 1::2]).all()

    logged = {}
    for tag, step, value in raw_scalars(run_dir(tmp_path)):
        logged.setdefault(tag, []).append((step, value))
    for player in (0, 1):
        ends = [n * 4 + i + 1 for n in (99, 199) for i in (player, player + 2)]
        returns = [by_step[n - 99 : n + 1, i].sum() for n in (99, 199) for i in (player, player + 2)]
        assert logged[f"charts/episodic_return-player{player}"] == list(zip(ends, returns, strict=True))
        assert logged[f"charts/episodic_length-player{player}"] == [(step, 100) for step in ends]

    rewards, dones, final_values = got["stored"]  # of steps 192 to 255
    np.testing.assert_array_equal(rewards, np.sign(by_step[192:]))
    assert np.flatnonzero(dones.all(1)).tolist() == [199 - 192] and dones.sum() == 4
    np.testing.assert_array_equal(final_values != 0, dones.astype(bool))
    assert (got["planes"] == [[255, 0], [0, 255]] * 2).all()


SIDES = """
import gymnasium as gym
import numpy as np
import pettingzoo.atari.pong_v3 as pong


class Sides:
    '''One step, of four frames: the screen is bright on one side; player 0 is to name it, player 1 the other one.'''

    def __init__(self, **options):
        self.unwrapped = self.ale = self
        self.possible_agents, self.screen = ["a", "b"], np.zeros((210, 160), dtype=np.uint8)

    def action_space(self, agent):
        return gym.spaces.Discrete(2)

    def getScreenDims(self):
        return 160, 210

    def getScreenGrayscale(self, out):
        out[:] = self.screen

    def reset(self, seed=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents, self.frame, self.side = ["a", "b"], 0, self.rng.integers(2)
        self.screen[:] = (np.arange(160) // 80 == self.side) * 255

    def step(self, actions):
        self.frame += 1
        right = {"a": self.side, "b": 1 - self.side}
        rewards = {player: int(actions[player] == right[player]) for player in right}
        self.agents = ["b"] if self.frame == 4 else ["a", "b"]  # the game ends for both when one is out
        return None, rewards, None, {player: False for player in right}, None


pong.parallel_env = Sides
"""
LOOK = """
screens = (np.arange(160) // 80 == np.arange(2)[:, None, None]) * np.full((210, 1), 255, dtype=np.uint8)
seen = torch.zeros((2, 2, 6, 84, 84))  # side, player
seen[:, :, :4] = torch.from_numpy(envs.resize(screens))[:, None, None]
seen[:, 0, 4] = seen[:, 1, 5] = 255
with torch.no_grad():
    result["chances"] = agent.actor(agent.network(seen.flatten(0, 1) / 255)).softmax(1)[:, 1].reshape(2, 2).numpy()
    result["values"] = agent.get_value(seen.flatten(0, 1)).numpy()
"""


def test_one_policy_learns_both_sides(tmp_path):
    """What is right differs by player, so the policy must make use of the channels that say whose observation it is."""
    require_for(NAME)
    flags = "--num-envs 8 --num-steps 16 --total-timesteps 1920 --learning-rate 0.001 --ent-coef 0.001 --no-clip-vloss"
    argv = [*flags.split(), "--checkpoint-freq", 10**9]
    got = inspect_run(script(NAME), *argv, cwd=tmp_path, before=SIDES, after=LOOK)
    np.testing.assert_allclose(got["chances"], [[0, 1], [1, 0]], atol=0.1)
    np.testing.assert_allclose(got["values"], 1, atol=0.2)
    for player in (0, 1):
        tag = f"charts/episodic_return-player{player}"
        returns = [value for other, _, value in raw_scalars(run_dir(tmp_path)) if other == tag]
        assert len(returns) == 1920 / 2 and np.mean(returns[-100:]) > 0.9 * 4, "logged returns are not clipped"


def test_bad_input(tmp_path):
    cases = [["--num-envs", 3], ["--env-id", "pong_v2"], ["--env-id", "warlords_v3"]]
    odd, unknown, four = refuse_all(NAME, cases, tmp_path)
    assert "--num-envs must be even" in odd
    assert "pong_v3" in unknown
    assert "4 players" in four
    for package in ("multi_agent_ale_py", "pettingzoo"):
        line = refuse(NAME, cwd=tmp_path, driver=without(package))
        assert "pip install ale-py 'pettingzoo[atari]'" in line
