"""What DroQ and TQC add to SAC, against slow and obvious versions of it."""

import numpy as np
import pytest

from helpers.files import load, require_for, script
from helpers.processes import inspect_run, run_dir
from helpers.scalars import tensorboard_scalars

DROQ, TQC = "droq_continuous_action_jax", "tqc_continuous_action_jax"
SHORT = "--env-id Pendulum-v1 --num-envs 3 --utd 2 --learning-starts 60 --total-timesteps 120 --buffer-size 120".split()
CALLS = (120 - 60) // 3 - 1  # learning begins after step 60; nothing is left to learn for at step 120

LEARNER = """
def ignorant(params, seed):
    # critics that give the same values for any input, but for dropout; those of the second are larger by 100
    params = jax.tree.map(jnp.copy, params)
    layers, (key, last_key) = params["params"], jax.random.split(jax.random.key(seed))
    layers["Dense_0"]["kernel"] = jnp.zeros_like(layers["Dense_0"]["kernel"])
    layers["Dense_0"]["bias"] = jax.random.normal(key, layers["Dense_0"]["bias"].shape)
    shift = 100.0 * jnp.arange(len(layers["Dense_2"]["bias"]))[:, None]
    layers["Dense_2"]["bias"] = shift + jax.random.normal(last_key, layers["Dense_2"]["bias"].shape)
    return params


def constant(params, value):
    # critics of one value, with dropout or without
    params = jax.tree.map(jnp.copy, params)
    params["params"]["Dense_2"]["kernel"] *= 0
    params["params"]["Dense_2"]["bias"] = jnp.full_like(params["params"]["Dense_2"]["bias"], value)
    return params


def crafted(row, **changes):
    # the learner with entropy for free, and a replay buffer with one transition in all places
    base = learner | {"losses": jnp.zeros((2, len(loss_names))), "log_alpha": jnp.full((), -30.0)} | changes
    return jax.tree.map(jnp.copy, base), (jnp.broadcast_to(row, replay.rows.shape), len(replay.rows))


def counts(learner):
    steps = [int(learner[f"{name}_opt_state"][0].count) for name in ("qf", "actor", "alpha")]
    return [int(learner["gradient_steps"]), *steps]


row = np.array([0.6, 0.8, 0.1, 0.8, 0.6, -0.2, 1.5, 2.0, 0.0], dtype=np.float32)
obs, next_obs, action = row[None, :3], row[None, 3:6], row[None, 6:7]  # then the reward, and whether it terminated
result |= {"counts": counts(learner), "names": loss_names, "gamma": args.gamma}
"""


# DroQ


def droq_critics(rate):
    require_for(DROQ)
    import jax

    module = load(DROQ)
    keys = jax.random.split(jax.random.key(0), 4)
    obs, action = jax.random.normal(keys[0], (6, 4)), jax.random.normal(keys[1], (6, 2))
    alone = module.SoftQNetwork(rate)
    params = alone.init(keys[2], obs, action)
    params = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(keys[3], leaf.shape), params)  # scales, biases
    return alone, module.Critics(rate), params, obs, action


@pytest.mark.parametrize("dropout", [False, True])
def test_layers_of_the_critics_in_the_order_of_the_paper(dropout):
    """Linear, dropout, layer normalisation, rectifier; twice; and then one linear layer."""
    import jax

    network, _, params, obs, action = droq_critics(0.25)
    rngs = {"dropout": jax.random.key(5)} if dropout else {}
    value, state = network.apply(params, obs, action, rngs=rngs, capture_intermediates=True)
    state["intermediates"].pop("__call__")  # the value once more
    outputs = {name: np.asarray(layer["__call__"][0]) for name, layer in state["intermediates"].items()}
    layers = jax.tree.map(np.asarray, params["params"])
    hidden = np.concatenate([obs, action], axis=1)
    for i in range(2):
        hidden = hidden @ layers[f"Dense_{i}"]["kernel"] + layers[f"Dense_{i}"]["bias"]
        np.testing.assert_allclose(outputs[f"Dense_{i}"], hidden, rtol=1e-4, atol=1e-5)
        if dropout:
            kept = outputs[f"Dropout_{i}"] != 0
            assert 0.65 < kept.mean() < 0.85 and len(np.unique(kept, axis=0)) == len(obs)
            hidden = np.where(kept, hidden / 0.75, 0)
        hidden = (hidden - hidden.mean(1, keepdims=True)) / np.sqrt(hidden.var(1, keepdims=True) + 1e-6)
        hidden = hidden * layers[f"LayerNorm_{i}"]["scale"] + layers[f"LayerNorm_{i}"]["bias"]
        np.testing.assert_allclose(outputs[f"LayerNorm_{i}"], hidden, rtol=1e-3, atol=1e-4)
        hidden = np.maximum(hidden, 0)
    hidden = hidden @ layers["Dense_2"]["kernel"] + layers["Dense_2"]["bias"]
    np.testing.assert_allclose(value, hidden[:, 0], rtol=1e-3, atol=1e-4)


def test_each_critic_and_sample_has_its_own_dropout():
    import jax

    _, both, params, obs, action = droq_critics(0.5)
    params = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), params)
    same = np.tile(obs[:1], (6, 1)), np.tile(action[:1], (6, 1))
    without = np.asarray(both.apply(params, *same))
    assert without.shape == (2, 6) and np.ptp(without) == pytest.approx(0, abs=1e-5)
    values = [np.asarray(both.apply(params, *same, rngs={"dropout": jax.random.key(i)})) for i in range(2)]
    assert len(np.unique(values)) == 2 * 2 * 6


DROQ_STEPS = """
target = ignorant(learner["qf_params"], 1)
parts = crafted(row, qf_params=constant(learner["qf_params"], 0.0), target_qf_params=target)
together = [jax.device_get(learn(*jax.tree.map(jnp.copy, parts), 6, 1))]
state, stored = parts
for actor_updates in (0, 0, 0, 0, 0, 1):
    state = learn(state, stored, 1, actor_updates)
apart = [jax.device_get(state)]
paths = lambda tree: {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
result |= {"together": paths(together), "apart": paths(apart)}


def series(parts, steps):
    (state, stored), losses = parts, []
    for _ in range(steps):
        state = learn(state | {"losses": jnp.zeros((2, len(loss_names)))}, stored, 1, 1)
        losses.append(np.asarray(state["losses"])[0])
    return np.array(losses)


def draws(params, *inputs):
    inputs = [np.repeat(column, 20_000, axis=0) for column in inputs]
    return np.asarray(qf.apply(params, *inputs, rngs={"dropout": jax.random.key(7)}))


zero = constant(learner["qf_params"], 0.0)
result["target_losses"] = series(crafted(row, qf_params=zero, target_qf_params=target), 40)
result["target_draws"] = draws(target, next_obs, action)
result["actor_losses"] = series(crafted(row, qf_params=target), 40)
"""


def test_droq_counts_and_dropout_of_a_run(tmp_path):
    """No step size here is above 0, so that from one update to the next only what is drawn changes."""
    require_for(DROQ)
    argv = [*SHORT, "--policy-frequency", 4, "--batch-size", 32, "--dropout-rate", 0.5, "--q-lr", 0, "--policy-lr", 0]
    got = inspect_run(script(DROQ), *argv, "--tau", 0, cwd=tmp_path, after=LEARNER + DROQ_STEPS)
    assert got["counts"] == [6 * CALLS, 6 * CALLS, 6 * CALLS // 4, 6 * CALLS // 4]
    assert 6 * CALLS % 4, "the case does not tell whether a rest is carried over"

    assert got["together"].keys() == got["apart"].keys()  # the same steps, in one call and in six
    for path, leaf in got["together"].items():
        np.testing.assert_allclose(leaf, got["apart"][path], rtol=1e-4, atol=1e-5, err_msg=path)

    losses, (smaller, larger) = got["target_losses"], got["target_draws"]
    assert smaller.max() < larger.min()
    assert len(np.unique(losses[:, 0])) == len(losses), "dropout was not drawn anew for each target"
    target = 2 + got["gamma"] * smaller
    noise = (target**2).std() / np.sqrt(32 * len(losses))
    assert losses[:, 0].mean() == pytest.approx((target**2).mean(), abs=5 * noise)

    actor_loss, values = got["actor_losses"][:, got["names"].index("actor_loss")], got["target_draws"].mean(0)
    assert len(np.unique(actor_loss)) == len(actor_loss), "dropout was not drawn anew for each step of the actor"
    assert actor_loss.mean() == pytest.approx(-values.mean(), abs=5 * values.std() / np.sqrt(32 * len(actor_loss)))


# TQC


def slow_quantile_huber_loss(quantiles, target):
    losses = []
    for critic in quantiles:
        terms = []
        for row, atoms in zip(critic, target, strict=True):
            for i, quantile in enumerate(row):
                for atom in atoms:
                    error = atom - quantile
                    huber = error**2 / 2 if abs(error) <= 1 else abs(error) - 1 / 2
                    fraction = (2 * i + 1) / (2 * len(row))
                    terms.append(huber * (1 - fraction if error < 0 else fraction))
        losses.append(sum(terms) / len(terms))
    return losses


def slow_truncated_mixture(quantiles, drop):
    rows = []
    for sample in range(len(quantiles[0])):
        pool = [value for critic in quantiles for value in critic[sample]]
        for _ in range(drop * len(quantiles)):
            pool.remove(max(pool))
        rows.append(sorted(pool))
    return rows


def test_quantile_huber_loss():
    module, rng = load(TQC), np.random.default_rng(0)
    quantiles, target = rng.normal(0, 2, (3, 4, 5)), rng.normal(1, 2, (4, 7))
    got = module.quantile_huber_loss(quantiles, target)
    np.testing.assert_allclose(got, slow_quantile_huber_loss(quantiles, target), rtol=1e-4)


def test_the_quantile_loss_is_least_at_the_quantiles():
    """Of the atoms 0, 10, ..., 990 the median is 495, the quantile at 1/6 about 165, that at 5/6 about 825."""
    module, atoms = load(TQC), np.arange(0, 1000, 10.0)[None]

    def at(*quantiles):
        return module.quantile_huber_loss(np.array([[quantiles]], dtype=float), atoms).item()

    best = at(165, 495, 825)
    for other in [(165, 495, 725), (165, 495, 925), (65, 495, 825), (265, 495, 825), (165, 395, 825), (825, 495, 165)]:
        assert at(*other) > best


@pytest.mark.parametrize("critics, drop", [(1, 0), (1, 2), (3, 0), (3, 1), (3, 4)])
def test_truncated_mixture(critics, drop):
    module, rng = load(TQC), np.random.default_rng(0)
    quantiles = rng.normal(size=(critics, 6, 5)).astype(np.float32)
    got = np.asarray(module.truncated_mixture(quantiles, drop))
    assert got.shape == (6, critics * (5 - drop))
    np.testing.assert_array_equal(got, slow_truncated_mixture(quantiles.tolist(), drop))


TQC_STEPS = """
target = ignorant(learner["qf_params"], 1)
result["target_quantiles"] = np.asarray(qf.apply(target, next_obs, action))
result["quantiles"] = np.asarray(qf.apply(learner["qf_params"], obs, action))
for terminated in (0, 1):
    row[-1] = terminated
    parts = crafted(row, target_qf_params=target, gradient_steps=jnp.zeros((), int))
    result[f"losses {terminated}"] = np.asarray(learn(*parts, 1)["losses"])[0]
parts = crafted(row, qf_params=target, gradient_steps=jnp.ones((), int))
total, count = learn(*parts, 1)["losses"][:, loss_names.index("actor_loss")]
result["actor_loss"] = total / count

# all values are 0 and so is the reward: what is left of the target is the price of the next action
row[-2:] = 0
zero = constant(learner["qf_params"], 0.0)
fresh = {"log_alpha": jnp.zeros(()), "qf_opt_state": qf_optimizer.init(zero)}
parts = crafted(row, qf_params=zero, target_qf_params=zero, **fresh)
result["raised"] = np.asarray(learn(*parts, 1)["qf_params"]["params"]["Dense_2"]["bias"])
"""


def test_tqc_update_of_a_run(tmp_path):
    require_for(TQC)
    argv = "--n-critics 3 --n-quantiles 5 --top-quantiles-to-drop-per-net 2 --batch-size 32 --q-lr 1e-6".split()
    got = inspect_run(script(TQC), *SHORT, *argv, cwd=tmp_path, after=LEARNER + TQC_STEPS)
    assert got["counts"] == [6 * CALLS, 6 * CALLS, 6 * CALLS, 6 * CALLS]
    shown = tensorboard_scalars(run_dir(tmp_path))
    assert {f"losses/qf{i}_{kind}" for i in (1, 2, 3) for kind in ("loss", "values")} <= shown.keys()

    assert got["quantiles"].shape == got["target_quantiles"].shape == (3, 1, 5)
    kept = np.array(slow_truncated_mixture(got["target_quantiles"].tolist(), 2))
    for terminated, target in (0, 2 + got["gamma"] * kept), (1, 2 + 0 * kept):
        losses = slow_quantile_huber_loss(got["quantiles"], target)
        expected = [*losses, np.mean(losses), *got["quantiles"].mean((1, 2))]
        np.testing.assert_allclose(got[f"losses {terminated}"][:7], expected, rtol=1e-3)
    assert got["actor_loss"] == pytest.approx(-got["target_quantiles"].mean(), rel=1e-3)
    assert (got["raised"] > 0).all(), "entropy is rewarded"


def test_no_quantile_has_to_be_dropped(monkeypatch):
    """As in the paper for HalfCheetah."""
    monkeypatch.setattr("sys.argv", [f"{TQC}.py", "--top-quantiles-to-drop-per-net", "0"])
    assert load(TQC).parse_args().top_quantiles_to_drop_per_net == 0
