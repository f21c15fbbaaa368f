"""Procgen through EnvPool: levels, restarts in the same step, and what whole runs of PPO and PPG make of the games."""

import shutil
import sys
from ctypes.util import find_library

import numpy as np
import pytest

from helpers.files import defines, discrete_envs, each, each_text, load, require_for, script, smoke, smoke_total
from helpers.oracles import UPDATE_ONCE_MORE, advantages_of_episode, compare_losses
from helpers.processes import inspect_run, inspect_runs, run, run_dir
from helpers.refusals import refuse, without
from helpers.scalars import assert_clean, grid, raw_scalars, untimed

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="EnvPool is for Linux only")

on_procgen = each(lambda name: defines(name, "class SameStepProcgen"))
one_class = each_text("SameStepProcgen", which=lambda name: defines(name, "class SameStepProcgen"))
is_ppg = each(lambda name: defines(name, "def aux_loss"))


# Games


@one_class
@pytest.mark.parametrize("game, steps, kind", [("starpilot", 330, "terminated"), ("leaper", 520, "truncated")])
def test_same_step_restarts(name, game, steps, kind):
    """Against EnvPool itself, where the step after an end ignores its action and returns the first observation."""
    module, seed = load(name), 3
    envs = module.make_envs(game, 2)
    actions = np.random.default_rng(0).integers(15, size=(steps + 1, 2))
    if kind == "truncated":
        actions[:] = 4  # stand still until the time is up
    pool = module.envpool.make(f"{game.capitalize()}Easy-v0", env_type="gymnasium", num_envs=2, seed=seed)
    first, _ = pool.reset()
    rows, ended = [[], []], np.zeros(2, dtype=bool)
    while min(map(len, rows)) <= steps:
        out = pool.step(np.array([actions[min(len(rows[i]), steps), i] for i in range(2)]))
        for i in range(2):
            if ended[i]:
                rows[i][-1][-1] = out[0][i]
                assert out[1][i] == 0 and out[4]["elapsed_step"][i] == 0
            else:
                rows[i].append([*(part[i] for part in out[:4]), None])
        ended = ~ended & (out[2] | out[3])

    np.testing.assert_array_equal(envs.reset(seed=seed)[0], first)
    assert first.shape == (2, *envs.single_observation_space.shape) == (2, 3, 64, 64)
    ends = {"terminated": 0, "truncated": 0}
    for t in range(steps):
        obs, reward, terminated, truncated, infos = envs.step(actions[t])
        for i in range(2):
            last_obs, *expected, next_first = rows[i][t]
            assert [reward[i], terminated[i], truncated[i]] == expected
            np.testing.assert_array_equal(infos["final_obs"][i], last_obs)
            np.testing.assert_array_equal(obs[i], next_first if terminated[i] or truncated[i] else last_obs)
            ends["terminated"] += terminated[i]
            ends["truncated"] += truncated[i]
    assert [kind for kind, count in ends.items() if count >= 2] == [kind]
    envs.close()


@one_class
def test_levels(name):
    """--num-levels, --start-level and --distribution-mode reach EnvPool; the seed decides which level comes when."""
    module = load(name)

    def play(seed=3, games=4, **levels):
        envs = module.make_envs("bigfish", 2, **levels)
        obs, infos = envs.reset(seed=seed)
        frames, seeds, rng = [*obs], [*infos["level_seed"]], np.random.default_rng(0)
        reset = envs.pool.reset

        def follow(ids):
            out = reset(ids)
            frames.extend(out[0])
            seeds.extend(out[1]["level_seed"])
            return out

        envs.pool.reset = follow
        while len(frames) < 2 + games:
            envs.step(rng.integers(15, size=2))
        return np.array(frames[: 2 + games]), seeds[: 2 + games]

    for seed in (3, 4):
        frames, seeds = play(seed, num_levels=1)
        assert set(seeds) == {0} and (frames == frames[0]).all(), "the same first frame at each restart"
    assert set(play(num_levels=3, start_level=10, games=20)[1]) == {10, 11, 12}
    assert (play(num_levels=1, start_level=7)[0][0] != frames[0]).any()
    assert (play(num_levels=1, distribution_mode="hard")[0][0] != frames[0]).any()
    (frames, seeds), (again, _), (other, _) = play(), play(), play(seed=4)
    assert len(set(seeds)) == 6
    np.testing.assert_array_equal(frames, again)
    assert (frames != other).any()


@one_class
def test_all_games_in_both_modes(name):
    module = load(name)
    with pytest.raises(module.gym.error.Error) as error:
        module.make_envs("pong", 1)
    games = str(error.value).split("like ")[1].split(" (")[0].split(", ")
    assert len(games) == 16
    for game in games:
        for mode in ("easy", "hard"):
            envs = module.make_envs(game, 1, mode)
            assert envs.reset(seed=1)[0].std() > 0 and envs.single_action_space.n == 15
            assert envs.pool.spec.config.env_name == game
            assert envs.pool.spec.config.distribution_mode == ["easy", "hard"].index(mode)


@one_class
def test_missing_qt(name, tmp_path):
    if find_library("Qt5Gui"):
        pytest.skip("the system has Qt 5, so that the package is not needed")
    assert "pip install PyQt5-Qt5" in refuse(name, cwd=tmp_path, driver=without("PyQt5"))


# Networks


def procgen_agent(name):
    torch.manual_seed(0)
    return load(name).Agent(discrete_envs(num_actions=15)), torch.randint(256, (6, 3, 64, 64), dtype=torch.uint8)


@on_procgen
def test_agent(name):
    """The layers of IMPALA, one after the other; log-probabilities and entropies as torch.distributions has them."""
    agent, obs = procgen_agent(name)
    agent.actor.weight.data.mul_(100)  # away from the uniform start
    x, layers = obs.float() / 255, [layer for layer in agent.network.modules() if isinstance(layer, torch.nn.Conv2d)]
    functional, layers = torch.nn.functional, iter(layers)
    for channels in (16, 32, 32):
        x = functional.max_pool2d(next(layers)(x), 3, 2, 1)
        for _ in range(2):
            first, second = next(layers), next(layers)
            x = x + second(first(x.relu()).relu())
        assert x.shape[1] == channels
    (dense,) = (layer for layer in agent.network.modules() if isinstance(layer, torch.nn.Linear))
    hidden = dense(x.relu().flatten(1)).relu()
    policy, actions = torch.distributions.Categorical(logits=agent.actor(hidden)), torch.arange(6)
    logprob, entropy, value = agent.evaluate(obs, actions)
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(logprob, policy.log_prob(actions), **close)
    torch.testing.assert_close(entropy, policy.entropy(), **close)
    torch.testing.assert_close(value, agent.critic(hidden).squeeze(-1), **close)
    torch.testing.assert_close(value, agent.get_value(obs), **close)


@is_ppg
def test_norms_at_the_start(name):
    agent, _ = procgen_agent(name)
    inside = [layer for block in agent.network if hasattr(block, "layers") for layer in block.layers]
    expected = {agent.actor: 0.1, agent.critic: 0.1, agent.aux_critic: 0.1}
    for layer in agent.network.modules():
        if isinstance(layer, torch.nn.Conv2d):
            expected[layer] = (1 / (3**0.5 * 2**0.5)) ** 0.5 if layer in inside else 1.0
        elif isinstance(layer, torch.nn.Linear):
            expected[layer] = 1.4
    assert len(expected) == 3 + 15 + 1
    for layer, norm in expected.items():
        for row in layer.weight.detach():
            assert row.square().sum().sqrt().item() == pytest.approx(norm, rel=1e-4)
        assert not layer.bias.any()


@is_ppg
def test_only_the_policy_and_the_auxiliary_values_shape_the_features(name):
    agent, obs = procgen_agent(name)

    def reached(output):
        agent.zero_grad(set_to_none=True)
        output.sum().backward()
        return {key.split(".")[0] for key, param in agent.named_parameters() if param.grad is not None}

    logprob, entropy, value = agent.evaluate(obs, torch.arange(6))
    assert reached(value) == {"critic"}
    assert reached(logprob + entropy) == {"network", "actor"}
    logprobs, value, aux_value = agent.evaluate_aux(obs)
    assert reached(value) == {"critic"}
    assert reached(aux_value) == {"network", "aux_critic"}
    torch.testing.assert_close(value, agent.evaluate(obs, torch.arange(6))[2])
    assert logprobs[3, 3].item() == pytest.approx(logprob[3].item(), rel=1e-5)


# Whole runs

FOLLOW = """
import numpy as np

envpool = runpy.run_path(path)["envpool"]  # Qt has to be loaded first
make = envpool.make
result |= {"rows": [], "observations": [], "options": []}


class Follow:
    def __init__(self, pool):
        self.pool, self.close = pool, pool.close

    def reset(self, *ids):
        out = self.pool.reset(*ids)
        if ids:
            result["observations"][-1][out[1]["env_id"]] = out[0]
        else:
            result["observations"].append(out[0].copy())
        return out

    def step(self, actions):
        obs, reward, terminated, truncated, infos = self.pool.step(actions)
        truncated = truncated | (infos["elapsed_step"] % 31 == 0) & ~terminated  # short games
        result["rows"].append([np.array(x) for x in (reward, terminated, truncated)])
        result["observations"].append(obs.copy())
        return obs, reward, terminated, truncated, infos


def make_short(*args, **options):
    result["options"].append((args, options))
    pool = make(*args, **options)
    return pool if len(result["options"]) > 1 else Follow(pool)


envpool.make = make_short
"""
STORED = """
names = "rewards dones final_values scaled_rewards values advantages b_advantages b_returns"
result |= {key: np.array(globals()[key]) for key in names.split()}
result |= {"aux_obs": np.array(aux.obs), "aux_returns": np.array(aux.returns)} if "aux" in globals() else {}
result |= {"next_value": value(next_obs), "return_std": agent.return_rms.std.item(), "run_dir": run.dir}
result |= {"obs": obs, "args": vars(args)}
"""
# The loss of the auxiliary phase on some rollouts in a second text, and its gradient
AUX_ORACLE = """
from torch.distributions import Categorical, kl_divergence as kl


def look_at_aux(rollouts):
    fresh = Agent(envs)
    fresh.load_state_dict(agent.state_dict())
    hidden = fresh.features(aux.obs[rollouts].flatten(0, 1))
    old, target, logits = aux.logprobs[rollouts].flatten(0, 1), aux.returns[rollouts].flatten(), fresh.actor(hidden)
    values = {"aux_values": fresh.aux_critic(hidden)[:, 0], "real_values": fresh.critic(hidden.detach())[:, 0]}
    errors = [((value - target) ** 2).mean() / 2 for value in values.values()]
    divergence = kl(Categorical(logits=old), Categorical(logits=logits)).mean()
    (sum(errors) + args.beta_clone * divergence).backward()
    result["gradient"] = torch.cat([param.grad.flatten() for param in fresh.parameters()]).numpy()
    for key, value in {"old": old, "new": logits, "target": target, **values}.items():
        result[key] = value.detach().numpy().astype(float)
"""
# With a step size of zero and one step in an auxiliary phase, the gradient that this step took can be computed again
AUX_GRADIENT = """
if "aux" in globals():
    look_at_aux(torch.arange(aux_batch_rollouts))
    result["taken"] = weights.grad.numpy().copy()
"""


@on_procgen
def test_games_of_a_run(name, tmp_path):
    """Every finished game is logged, with its raw return; no dummy row; scaled rewards; values where a game was cut."""
    require_for(name)
    flags = {"learning_rate": 0, "gamma": 0.9, "gae_lambda": 0.6, "num_levels": 5, "start_level": 20, "seed": 4}
    flags |= {"max_grad_norm": 1e9, "env_id": "fruitbot"}
    if defines(name, "def aux_loss"):
        flags |= {"e_auxiliary": 1, "num_aux_rollouts": 4, "n_aux_grad_accum": 2, "beta_clone": 0.7}
    argv = [*smoke(name, **flags), "--save-model", "--distribution-mode", "hard"]
    after = STORED + AUX_ORACLE + AUX_GRADIENT
    got = inspect_run(script(name), *argv, cwd=tmp_path, before=FOLLOW, after=after)
    levels = {"num_levels": 5, "start_level": 20}
    for (args, options), expected in zip(got["options"], [{"seed": 4} | levels, {"seed": 4 + 2**30}], strict=True):
        assert args == ("FruitbotHard-v0",)
        assert {key: options.get(key) for key in ("seed", *levels)} == dict.fromkeys(levels) | expected

    rewards, terminated, truncated = (np.array(column) for column in zip(*got["rows"], strict=True))
    ends, num_envs = terminated | truncated, rewards.shape[1]
    assert rewards.size == smoke_total(name) and terminated.any() and truncated.any() and rewards.any()
    last = len(got["rewards"])
    np.testing.assert_array_equal(got["obs"], got["observations"][-last - 1 : -1])
    np.testing.assert_array_equal(got["rewards"], rewards[-last:])
    np.testing.assert_array_equal(got["dones"], ends[-last:])
    np.testing.assert_array_equal(got["final_values"] != 0, truncated[-last:])

    games, discounted, begin, running = [], [], np.zeros(num_envs, dtype=int), np.zeros(num_envs)
    for t in range(len(rewards)):
        running = 0.9 * running + rewards[t]
        discounted.append(running)
        running = running * ~ends[t]
        for i in np.flatnonzero(ends[t]):
            games.append((t * num_envs + i + 1, rewards[begin[i] : t + 1, i].sum(), t + 1 - begin[i]))
            begin[i] = t + 1
    logged = {}
    for tag, step, value in raw_scalars(run_dir(tmp_path)):
        logged.setdefault(tag, []).append((step, value))
    assert logged["charts/episodic_return"] == [(step, episodic_return) for step, episodic_return, _ in games]
    assert logged["charts/episodic_length"] == [(step, length) for step, _, length in games]

    assert got["return_std"] == pytest.approx(np.std(discounted), rel=1e-2)
    scaled = (rewards[-last:] / np.std(discounted)).clip(-10, 10)
    np.testing.assert_allclose(got["scaled_rewards"], scaled, rtol=1e-2)
    advantages = np.zeros_like(scaled)
    for i in range(num_envs):
        start = 0
        for t in range(last):
            if got["dones"][t, i] or t == last - 1:
                following = got["final_values"][t, i] if got["dones"][t, i] else got["next_value"][i]
                part = slice(start, t + 1)
                stretch = got["scaled_rewards"][part, i], got["values"][part, i], following, 0.9, 0.6
                advantages[part, i] = advantages_of_episode(*stretch)
                start = t + 1
    np.testing.assert_allclose(got["advantages"], advantages, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(got["b_returns"], (advantages + got["values"]).flatten(), rtol=1e-3, atol=1e-5)
    if defines(name, "def aux_loss"):
        compare_phase(got, advantages, num_envs)


def compare_phase(got, advantages, num_envs):
    """The rollouts of the last phase, stored environment by environment, and the one gradient taken on them."""
    standardized = (advantages - advantages.mean()) / advantages.std(ddof=1)
    np.testing.assert_allclose(got["b_advantages"], standardized.flatten(), rtol=1e-3, atol=1e-4)
    last, observations = len(advantages), np.array(got["observations"][:-1])
    for k in range(2):
        part = slice(k * num_envs, (k + 1) * num_envs)
        begin = len(observations) - (2 - k) * last
        np.testing.assert_array_equal(got["aux_obs"][part], observations[begin : begin + last].swapaxes(0, 1))
    np.testing.assert_array_equal(got["aux_returns"][num_envs:], got["b_returns"].reshape(last, num_envs).T)
    assert np.abs(got["gradient"]).max() > 1e-3
    np.testing.assert_allclose(got["taken"], got["gradient"], rtol=1e-2, atol=1e-5)


# The update of the policy phase once more, then one gradient step of the auxiliary phase on changed weights
AUX_STEP = """
before, ceiling = weights.detach().clone(), args.max_grad_norm
chosen = torch.randperm(aux_batch_rollouts)[:aux_step_rollouts]
look_at_aux(chosen)
aux_losses.take()
args.max_grad_norm = 1e9  # for the gradient as it is; then once more, clipped
aux_update(chosen, aux.images(chosen))
result |= {"taken": weights.grad.numpy().copy(), "aux_losses": [*aux_losses.take().values()]}
result |= {"aux_moved": (weights - before).abs().max().item()}
args.max_grad_norm = ceiling
aux_update(chosen, aux.images(chosen))
result |= {"aux_norm": weights.grad.norm().item()}
result |= {"std": b_advantages.std().item(), "run_dir": run.dir}
"""


@is_ppg
def test_losses_and_annealing(name, tmp_path):
    """Both kinds of updates after large steps against the formulas; the step size falls over all iterations."""
    require_for(name)
    flags = {"learning_rate": 0.003, "ent_coef": 0.03, "vf_coef": 0.7, "max_grad_norm": 0.01, "beta_clone": 3}
    argv = [*smoke(name, **flags), "--anneal-lr"]
    cases = [["--e-policy", 2], ["--no-clip-vloss", "--no-adv-norm-fullbatch"]]
    after = UPDATE_ONCE_MORE + AUX_ORACLE + AUX_STEP
    runs = inspect_runs(script(name), [argv + switches for switches in cases], cwd=tmp_path, after=after)
    for switches, got in zip(cases, runs, strict=True):
        compare_losses(got, [*switches, "--no-norm-adv"])  # which was done before, or not at all
        new = got["new"] - np.log(np.exp(got["new"]).sum(1, keepdims=True))
        divergences = [sum(np.exp(p) * (p - q)) for p, q in zip(got["old"], new, strict=True)]
        halves = [np.mean((got[kind] - got["target"]) ** 2) / 2 for kind in ("aux_values", "real_values")]
        expected = [np.mean(divergences), *halves]
        assert min(expected) > 1e-6
        np.testing.assert_allclose(got["aux_losses"], expected, rtol=2e-3)
        np.testing.assert_allclose(got["taken"], got["gradient"], rtol=1e-2, atol=1e-4 * abs(got["gradient"]).max())
        assert got["aux_norm"] <= 0.01 * 1.001 and got["aux_moved"] > 0
        scalars = raw_scalars(tmp_path / got["run_dir"])
        rates = [value for tag, _, value in scalars if tag == "charts/learning_rate"]
        assert rates == pytest.approx([0.003, 0.00225, 0.0015, 0.00075])
        logged = {tag: step for tag, step, _ in scalars if tag.startswith("losses/aux/")}
        assert set(logged.values()) == {smoke_total(name)} and len(logged) == 3
    assert runs[0]["std"] == pytest.approx(1, abs=1e-4) and runs[1]["std"] != pytest.approx(1, abs=1e-2)


STOP = """
import os, runpy, signal, sys

from torch.optim.optimizer import register_optimizer_step_post_hook


def stop(optimizer, *_):
    frame = sys._getframe()
    while "Run" not in frame.f_globals:
        frame = frame.f_back
    if frame.f_code.co_name == function and frame.f_globals["iteration"] == 3:
        os.kill(os.getpid(), signal.SIGTERM)
        frame.f_globals["agent"].evaluate_aux = None  # images are not to be looked at any more


register_optimizer_step_post_hook(stop)
_, function, *sys.argv = sys.argv
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@is_ppg
def test_sigterm_in_an_auxiliary_phase_then_two_resumes(name, tmp_path):
    """It ends at once, not after the phase; the phase is then repeated from its beginning, twice in the same way.

    Nor does it wait for the pass of the old policy over all images, if it comes right before that.
    """
    require_for(name)
    (tmp_path / "stop.py").write_text(STOP)
    done = run(tmp_path / "stop.py", "aux_update", script(name), *smoke(name), cwd=tmp_path, code=75)
    folder, total = run_dir(tmp_path), smoke_total(name)
    assert f"Stopped at step {total}" in done.stdout and f"--resume {folder.relative_to(tmp_path)}" in done.stdout
    assert torch.load(folder / "checkpoint.pt")["global_step"] == total // 2
    first_phase = [scalar for scalar in raw_scalars(folder) if scalar[1] <= total // 2]
    shutil.copytree(folder, tmp_path / "again")
    run(tmp_path / "stop.py", "update", script(name), "--resume", "again", cwd=tmp_path, code=75)
    inspect_runs(script(name), [["--resume", folder], ["--resume", tmp_path / "again"]], cwd=tmp_path)
    scalars = raw_scalars(folder)
    assert_clean(scalars)
    assert untimed(scalars) == untimed(raw_scalars(tmp_path / "again"))
    assert scalars[: len(first_phase)] == first_phase
    at = [total * k // 4 for k in (1, 2, 3, 4)]
    assert grid(scalars) == {tag: at[1::2] if "/aux/" in tag else at for tag in grid(scalars)}
    assert len(grid(scalars)) == 12
