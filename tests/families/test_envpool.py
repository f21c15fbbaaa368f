"""EnvPool with restarts in the same step: against EnvPool itself, and what a whole run makes of its games."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.files import defines, each, each_text, load, require_for, script, smoke, uses
from helpers.processes import inspect_run, run_dir
from helpers.refusals import refuse, without
from helpers.scalars import raw_scalars

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="EnvPool is for Linux only")

on_envpool = each(lambda name: uses(name, "envpool"))
has_class = each(lambda name: defines(name, "class SameStepEnvPool"))
one_class = each_text("SameStepEnvPool", which=lambda name: defines(name, "class SameStepEnvPool"))


def raw_games(game, actions, seed, steps, **options):
    """What EnvPool itself says, per environment: [obs, reward, terminated, truncated, lives, first obs of a next game].

    The step after the end of a game ignores its action and returns the first observation of the next one.
    """
    import envpool

    num_envs = len(actions)
    pool = envpool.make(game, env_type="gymnasium", num_envs=num_envs, seed=seed, **options)
    pool.reset()
    rows, over = [[] for _ in range(num_envs)], np.zeros(num_envs, dtype=bool)
    while min(map(len, rows)) <= steps:
        at = [min(len(row), steps) for row in rows]
        obs, reward, terminated, truncated, infos = pool.step(np.array([actions[i][at[i]] for i in range(num_envs)]))
        for i in range(num_envs):
            if over[i]:
                rows[i][-1][-1] = obs[i]
                assert reward[i] == 0 and infos["elapsed_step"][i] == 0
            else:
                rows[i].append([obs[i], reward[i], terminated[i], truncated[i], infos["lives"][i], None])
        over = ~over & (terminated | truncated)
    return rows


@one_class
@pytest.mark.parametrize("game, limit", [("Breakout-v5", 27000), ("Pong-v5", 60), ("Breakout-v5", 90)])
@pytest.mark.parametrize("life_loss", [True, False])
def test_same_step_restarts(name, game, limit, life_loss):
    module, steps, seed = load(name), 330, 3
    options = {"max_episode_steps": limit, "stack_num": 4, "num_threads": 1}
    envs = module.make_envs(game, 2, life_loss, **options)
    actions = np.random.default_rng(0).integers(envs.single_action_space.n, size=(2, steps + 1))
    expected = raw_games(game, actions, seed, steps, **options)
    first, _ = envs.reset(seed=seed)
    assert first.shape == (2, *envs.single_observation_space.shape)
    lives, kinds = [5, 5] if game == "Breakout-v5" else [0, 0], set()
    kept = []
    for t in range(steps):
        out = envs.step(actions[:, t])
        kept.append((out, [np.copy(part) for part in (*out[:4], *out[4].values())]))
        for i in range(2):
            obs, reward, terminated, truncated, lives_left, next_first = expected[i][t]
            assert out[1][i] == reward and out[3][i] == truncated
            assert out[4]["game_over"][i] == (terminated or truncated)
            np.testing.assert_array_equal(out[4]["final_obs"][i], obs)
            np.testing.assert_array_equal(out[0][i], next_first if terminated or truncated else obs)
            lost = life_loss and 0 < lives_left < lives[i]
            assert out[2][i] == (terminated or lost)
            kinds |= {kind for kind, there in zip(("over", "cut", "lost"), (terminated, truncated, lost)) if there}
            lives[i] = (5 if game == "Breakout-v5" else 0) if terminated or truncated else lives_left
    for out, copies in kept:  # EnvPool hands out arrays that it does not write to again
        for part, copy in zip((*out[:4], *out[4].values()), copies, strict=True):
            np.testing.assert_array_equal(part, copy)
    assert kinds == {"cut" if limit < 100 else "over"} | ({"lost"} if life_loss and game == "Breakout-v5" else set())
    envs.close()


@one_class
def test_odd_lives(name):
    """A life gained is not one lost, and the moment with no life left before the end is not an end of its own."""
    module = load(name)
    envs = module.make_envs("Breakout-v5", 1)
    script = iter([(3, False), (4, False), (3, False), (0, False), (0, True), (2, False), (1, False)])

    def step(actions):
        lives, terminated = next(script)
        infos = {"lives": np.array([lives]), "env_id": np.array([0])}
        return np.zeros((1, 4)), np.zeros(1), np.array([terminated]), np.array([False]), infos

    reset = lambda ids: (np.ones((1, 4)), {"lives": np.array([3]), "env_id": ids})  # noqa: E731
    envs.pool, envs.lives = SimpleNamespace(step=step, reset=reset), np.array([3])
    outs = [envs.step(None) for _ in range(7)]
    assert [bool(out[2][0]) for out in outs] == [False, False, True, False, True, True, True]
    assert [bool(out[4]["game_over"][0]) for out in outs] == [False] * 4 + [True] + [False] * 2


@has_class
def test_the_twin_that_films_plays_the_same_game(name):
    module = load(name)
    sizes = {"img_height": 210, "img_width": 160, "stack_num": 1}
    twin = module.make_envs("Breakout-v5", 1, False, gray_scale=False, **sizes)
    grey = module.make_envs("Breakout-v5", 1, False, **sizes)
    played = module.make_envs("Breakout-v5", 1, False)
    envs = (twin, grey, played)
    for env in envs:
        env.reset(seed=7)
    rng, games = np.random.default_rng(0), 0
    for _ in range(450):
        action = rng.integers(4, size=1)
        colour, shades, ours = (env.step(action) for env in envs)
        luminance = np.tensordot([0.2989, 0.587, 0.114], colour[0][0], axes=1)
        np.testing.assert_allclose(shades[0][0, 0], luminance, atol=2)
        assert colour[1:3] == ours[1:3] and colour[4]["game_over"] == ours[4]["game_over"]
        games += ours[4]["game_over"][0]
    assert games >= 1


@on_envpool
def test_another_family_of_envpool_names_the_file(name, tmp_path):
    line = refuse(name, "--env-id", "HalfCheetah-v4", cwd=tmp_path)
    assert "ppo_continuous_action.py" in line


@has_class
def test_ids_of_ale_mean_the_same_game(name):
    module, played = load(name), []
    for env_id in ("BreakoutNoFrameskip-v4", "Breakout-v5"):
        envs = module.make_envs(env_id, 2)
        played.append([envs.reset(seed=3)[0], *(envs.step(np.array([1, 2]))[0] for _ in range(5))])
    np.testing.assert_array_equal(*played)


@on_envpool
def test_missing_envpool(name, tmp_path):
    line = refuse(name, cwd=tmp_path, driver=without("envpool"))
    assert "pip install envpool" in line and "Linux" in line and "ppo_atari.py" in line


SHORT_GAMES = """
import envpool
import numpy as np

make = envpool.make
result |= {"rows": [], "pools": 0}


class Follow:
    def __init__(self, pool):
        self.pool, self.reset, self.close = pool, pool.reset, pool.close

    def step(self, actions):
        out = self.pool.step(actions)
        result["rows"].append([np.array(x) for x in (*out[1:4], out[4]["lives"], out[4]["elapsed_step"])])
        return out


def make_short(*args, **options):
    result["pools"] += 1
    pool = make(*args, **options, max_episode_steps=70)
    return Follow(pool) if result["pools"] == FOLLOWED else pool


envpool.make = make_short
"""
STORED = """
result |= {key: np.array(globals()[key]) for key in ("rewards", "dones", "final_values")}
"""


@each(lambda name: defines(name, "class SameStepEnvPool") and not defines(name, ".xla()"))  # those: test_xla.py
def test_games_of_a_run(name, tmp_path):
    """Whole games in the log, unclipped; no dummy row; ends at lost lives; values of final observations where cut."""
    require_for(name)
    before = SHORT_GAMES.replace("FOLLOWED", "2" if defines(name, "Random play") else "1")  # training's own games
    argv = smoke(name, num_steps=64, total_timesteps=512 if defines(name, "Random play") else 1024)
    got = inspect_run(script(name), *argv, cwd=tmp_path, before=before, after=STORED)
    rewards, terminated, truncated, lives, elapsed = (np.array(column) for column in zip(*got["rows"], strict=True))
    assert (elapsed > 0).all(), "a step was spent on a restart"
    total = np.prod(rewards.shape)
    assert total == int(argv[argv.index("--total-timesteps") + 1])

    num_envs, games, lost = rewards.shape[1], [], np.zeros(rewards.shape, dtype=bool)
    for i in range(num_envs):
        begin, before = 0, 5
        for t in range(len(rewards)):
            lost[t, i] = 0 < lives[t, i] < before
            before = lives[t, i]
            if terminated[t, i] or truncated[t, i]:
                games.append((t * num_envs + i + 1, rewards[begin : t + 1, i].sum(), t + 1 - begin))
                begin, before = t + 1, 5
    games.sort()
    assert len(games) >= 4 and truncated.any() and lost.any() and rewards.any()
    logged = {}
    for tag, step, value in raw_scalars(run_dir(tmp_path)):
        logged.setdefault(tag, []).append((step, value))
    assert logged["charts/episodic_return"] == [(step, episodic_return) for step, episodic_return, _ in games]
    assert logged["charts/episodic_length"] == [(step, length) for step, _, length in games]
    means = [np.mean([game[1] for game in games[: k + 1]][-20:]) for k in range(len(games))]
    assert [value for _, value in logged["charts/avg_episodic_return"]] == pytest.approx(means)

    last = len(got["rewards"])
    np.testing.assert_array_equal(got["rewards"], np.sign(rewards)[-last:])
    np.testing.assert_array_equal(got["dones"], (terminated | truncated | lost)[-last:])
    cut = (truncated & ~terminated & ~lost)[-last:]
    assert cut.any()
    np.testing.assert_array_equal(got["final_values"] != 0, cut)
