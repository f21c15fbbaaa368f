"""PPO on EnvPool's XLA interface: against EnvPool stepped in Python, without its dummy rows; loop against scan."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.files import defines, each_text, load, require_for, script
from helpers.oracles import advantages_of_episode
from helpers.processes import environment, inspect_run, run_dir
from helpers.refusals import refuse
from helpers.scalars import raw_scalars

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="EnvPool is for Linux only")

LOOP, SCAN = "ppo_atari_envpool_xla_jax", "ppo_atari_envpool_xla_jax_scan"
LIMIT, STEPS, SEED = 50, 32, 3  # steps of a game, of a rollout
on_xla = {"which": lambda name: defines(name, ".xla()")}


@each_text("Conv", "Agent", **on_xla)
def test_convolution_and_initial_weights(name):
    module = load(name)
    import jax

    x = np.random.default_rng(0).normal(size=(3, 24, 24, 5)).astype(np.float32)
    for size, stride in [(8, 4), (4, 2), (3, 1)]:
        ours, theirs = module.Conv(7, size, stride), module.nn.Conv(7, (size, size), strides=stride, padding="VALID")
        params = theirs.init(jax.random.key(0), x)
        params["params"]["bias"] += np.arange(7)
        assert jax.tree.map(np.shape, ours.init(jax.random.key(0), x)) == jax.tree.map(np.shape, params)
        np.testing.assert_allclose(ours.apply(params, x), theirs.apply(params, x), rtol=1e-4, atol=1e-4)

    params = jax.jit(module.Agent(4).init)(jax.random.key(0), np.zeros((1, 4, 84, 84), np.uint8))["params"]
    gains = {"Conv_0": 2, "Conv_1": 2, "Conv_2": 2, "Dense_0": 2, "Dense_1": 1e-4, "Dense_2": 1}
    assert params.keys() == gains.keys()
    for layer, gain in gains.items():
        kernel = np.asarray(params[layer]["kernel"]).reshape(-1, params[layer]["kernel"].shape[-1])
        np.testing.assert_allclose(kernel.T @ kernel, gain * np.eye(kernel.shape[1]), atol=1e-5 * max(gain, 1))
        assert not params[layer]["bias"].any()


@each_text("masked_ppo_loss", "masked_mean", **on_xla)
@pytest.mark.parametrize("clip_vloss", [True, False])
@pytest.mark.parametrize("norm_adv", [True, False])
def test_loss_and_gradients_are_those_of_the_valid_rows_alone(name, clip_vloss, norm_adv):
    """The formulas of ppo_atari.py in torch, on the rows that are left when the dummy rows are taken away."""
    import jax
    import torch

    module, rng, count = load(name), np.random.default_rng(0), 64
    flags = {"clip_coef": 0.2, "ent_coef": 0.03, "vf_coef": 0.7, "norm_adv": norm_adv, "clip_vloss": clip_vloss}
    columns = ("logprobs", "values", "advantages", "returns")
    mb = {column: rng.normal(size=count).astype(np.float32) for column in columns} | {"valid": rng.random(count) < 0.7}
    new = [
        mb["logprobs"] + rng.normal(size=count) * 0.3,
        rng.random(count),
        mb["values"] + rng.normal(size=count) * 0.3,
    ]
    for column in (*new, *(mb[column] for column in columns)):
        column[~mb["valid"]] *= 30
    new, args = [column.astype(np.float32) for column in new], SimpleNamespace(**flags)
    loss_of = lambda *new: module.masked_ppo_loss(*new, *mb.values(), args)  # noqa: E731
    (loss, logged), gradients = jax.value_and_grad(loss_of, argnums=(0, 1, 2), has_aux=True)(*new)

    newlogprob, entropy, newvalue = (torch.tensor(column[mb["valid"]], requires_grad=True) for column in new)
    logprobs, values, advantages, returns = (torch.tensor(mb[column][mb["valid"]]) for column in columns)
    if norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    logratio = newlogprob - logprobs
    ratio = logratio.exp()
    pg_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
    v_error = (newvalue - returns) ** 2
    if clip_vloss:
        held = values + torch.clamp(newvalue - values, -0.2, 0.2)
        v_error = torch.max(v_error, (held - returns) ** 2)
    v_loss = 0.5 * v_error.mean()
    expected = pg_loss - 0.03 * entropy.mean() + 0.7 * v_loss
    expected.backward()
    kls, clipped = (-logratio.mean(), (ratio - 1 - logratio).mean()), (abs(ratio - 1) > 0.2).float().mean()
    assert 0.1 < clipped < 0.9
    assert float(loss) == pytest.approx(expected.item(), rel=1e-4)
    right = [x.item() for x in (v_loss, pg_loss, entropy.mean(), *kls, clipped, expected)]
    np.testing.assert_allclose(logged, right, rtol=1e-4, atol=1e-6)
    for ours, theirs in zip(gradients, (newlogprob, entropy, newvalue), strict=True):
        assert not ours[~mb["valid"]].any()
        np.testing.assert_allclose(ours[mb["valid"]], theirs.grad, rtol=1e-3, atol=1e-6)


@each_text("masked_ppo_loss", "masked_mean", **on_xla)
def test_a_minibatch_of_dummy_rows_alone_teaches_nothing(name):
    module = load(name)
    new, old, valid = np.ones((3, 4), np.float32) / 2, np.ones((4, 4), np.float32), np.zeros(4, bool)
    loss, logged = module.masked_ppo_loss(*new, *old, valid, module.Args())
    assert loss == 0 and not np.asarray(logged).any()


RECORD = f"""
import sys

import envpool
import jax
import optax

make, jit, global_norm = envpool.make, jax.jit, optax.global_norm
result |= {{"rollouts": [], "epochs": [], "params": []}}


def record(tree):
    live = sys._getframe(1).f_globals
    if "rollout" in live:
        result["rollouts"].append(jax.device_get(live["rollout"]))
        result["epochs"].append(int(live["epochs"]) if "epochs" in live else live["epoch"] + 1)
        result["params"] = [*result["params"], jax.device_get(tree)][-2:]  # before and after the last update
    return global_norm(tree)


envpool.make = lambda *args, **options: make(*args, **options, max_episode_steps={LIMIT})
# of the parameters after each iteration; what is jitted is traced once
jax.jit = lambda function, *args, **options: record if function is global_norm else jit(function, *args, **options)
"""
ONCE_MORE = """
params = result.pop("params")[0]
batch, explained_variance = targets(params, rollout, games["obs"])
logits, values = agent.apply(params, batch["obs"])
entropy = -(nn.softmax(logits) * nn.log_softmax(logits)).sum(-1)
old = [batch[name] for name in ("logprobs", "values", "advantages", "returns", "valid")]
_, first = masked_ppo_loss(logprob_of(logits, batch["actions"]), entropy, values, *old, args)
observations = np.concatenate((rollout["obs"], np.asarray(games["obs"])[None]))
result["values"] = np.stack([agent.apply(params, x)[1] for x in observations])
result |= {"batch": jax.device_get(batch), "explained_variance": float(explained_variance)}
names = [name.removeprefix("losses/") for name in loss_names]
result |= {"first": dict(zip(names, first.tolist())), "num_envs": args.num_envs}
result["compiled"] = [globals()[key]._cache_size() for key in ("act", "update") if "act" in globals()]
"""
ARGV = f"--num-envs 4 --num-steps {STEPS} --total-timesteps {4 * 4 * STEPS} --update-epochs 3".split()
ARGV += "--learning-rate 1e-3 --no-anneal-lr".split()
ARGV += ["--seed", SEED, "--target-kl", 0.002]


def python_games(actions):
    """The same actions, stepped in Python: per step and environment, with lost lives; `elapsed` is 0 on dummy rows."""
    import envpool

    pool = envpool.make("Breakout-v5", env_type="gymnasium", num_envs=4, seed=SEED, max_episode_steps=LIMIT)
    obs, infos = pool.reset()
    rows, before = [], infos["lives"]
    for action in actions:
        next_obs, reward, terminated, truncated, infos = pool.step(action)
        lost = (infos["lives"] < before) & (infos["lives"] > 0) & (infos["elapsed_step"] > 0)
        rows.append((obs, reward, terminated, truncated, lost, infos["elapsed_step"]))
        obs, before = next_obs, infos["lives"]
    return [np.stack(column) for column in zip(*rows, strict=True)]


def check_rollouts(got, folder):
    """What was stored in all iterations, and what was logged, against stepping in Python."""
    stored = {column: np.concatenate([r[column] for r in got["rollouts"]]) for column in got["rollouts"][0]}
    obs, rewards, terminated, truncated, lost, elapsed = python_games(stored["actions"])
    valid = elapsed > 0
    np.testing.assert_array_equal(stored["obs"], obs)
    np.testing.assert_array_equal(stored["valid"], valid)
    np.testing.assert_array_equal(stored["rewards"], np.sign(rewards))
    np.testing.assert_array_equal(stored["game_over"], terminated | truncated)
    np.testing.assert_array_equal(stored["dones"][valid], (terminated | truncated | lost)[valid])
    np.testing.assert_array_equal(stored["terminated"][valid], (terminated | lost)[valid])
    assert truncated.any() and lost.any() and rewards.any() and 3 < (~valid).sum() < 40

    games = []
    for i in range(4):
        game = []
        for t in range(len(rewards)):
            if valid[t, i]:
                game.append(rewards[t, i])
            if terminated[t, i] or truncated[t, i]:
                games.append((t * 4 + i + 1, sum(game), len(game)))
                game = []
    games.sort()
    assert max(length for _, _, length in games) == LIMIT
    logged = {}
    for tag, step, value in raw_scalars(folder):
        logged.setdefault(tag, []).append((step, value))
    for column, key in (1, "return"), (2, "length"):
        assert logged[f"charts/episodic_{key}"] == [(game[0], game[column]) for game in games]
        means = [np.mean([game[column] for game in games[: k + 1]][-20:]) for k in range(len(games))]
        assert [value for _, value in logged[f"charts/avg_episodic_{key}"]] == pytest.approx(means)
    assert {"losses/loss", "charts/SPS_update"} <= logged.keys()
    return logged, terminated[-STEPS:] | lost[-STEPS:], truncated[-STEPS:]


def check_targets(got, terminated, truncated, gamma=0.99, gae_lambda=0.95):
    """Advantages of the last rollout, of each stretch between ends, without its dummy rows; the first ratio is one."""
    rollout, batch, values = got["rollouts"][-1], got["batch"], got["values"]
    np.testing.assert_allclose(rollout["values"], values[:-1], rtol=1e-3, atol=1e-4)
    expected = np.zeros_like(rollout["values"])
    for i in range(4):
        stretch = []
        for t in range(STEPS):
            stretch += [t] if rollout["valid"][t, i] else []
            if stretch and (terminated[t, i] or truncated[t, i] or t == STEPS - 1):
                last = 0 if terminated[t, i] else values[t + 1, i]  # of the final observation
                columns = rollout["rewards"][stretch, i], values[stretch, i], last
                expected[stretch, i] = advantages_of_episode(*columns, gamma, gae_lambda)
            if terminated[t, i] or truncated[t, i]:
                stretch = []
    valid = rollout["valid"].reshape(-1)
    assert not valid.all() and (truncated & ~terminated).any()
    advantages, returns = batch["advantages"][valid], batch["returns"][valid]
    np.testing.assert_allclose(advantages, expected.reshape(-1)[valid], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(returns, advantages + values[:-1].reshape(-1)[valid], rtol=1e-3, atol=1e-3)
    assert got["explained_variance"] == pytest.approx(1 - advantages.var() / returns.var(), abs=1e-3)
    first = got["first"]
    assert first["clipfrac"] == 0 and abs(first["approx_kl"]) < 1e-5 and abs(first["policy_loss"]) < 1e-5


def test_runs_of_both_files(tmp_path):
    """Loop and scan take the same random numbers, so they play and learn the same, early ends of epochs included."""
    results, logs = [], []
    for name in (LOOP, SCAN):
        require_for(name)
        (tmp_path / name).mkdir()
        got = inspect_run(script(name), *ARGV, cwd=tmp_path / name, before=RECORD, after=ONCE_MORE)
        log, *ends = check_rollouts(got, run_dir(tmp_path / name))
        check_targets(got, *ends)
        results.append(got)
        logs.append(log)
    loop, scan = results
    assert loop["compiled"] == [1, 1], "something is compiled more than once"
    assert [step for step, _ in logs[1]["charts/compile_time"]] == [0] and "Compiled in" in scan["stdout"]
    assert loop["epochs"] == scan["epochs"] and min(loop["epochs"]) < max(loop["epochs"]) == 3, loop["epochs"]
    for tag in (tag for tag in logs[0] if "SPS" not in tag):
        steps = [[step for step, _ in log[tag]] for log in logs]
        values = [[value for _, value in log[tag]] for log in logs]
        assert steps[0] == steps[1]
        np.testing.assert_allclose(values[1], values[0], rtol=1e-3, atol=1e-4, err_msg=tag)


@each_text("check_xla", **on_xla)
def test_a_device_without_the_interface(name, tmp_path):
    """As on a system whose JAX has no such call: one line that names a way out, and no folder."""
    package = "import envpool.python.lax as lax\n\n\ndef xla(self):\n    raise RuntimeError('no such call')\n\n\n"
    (tmp_path / "sitecustomize.py").write_text(package + "lax.XlaMixin.xla = xla\n")
    line = refuse(name, cwd=tmp_path, env=environment(PYTHONPATH=str(tmp_path)))
    assert "JAX_PLATFORMS=cpu" in line and "ppo_atari_envpool.py" in line and "no such call" in line
