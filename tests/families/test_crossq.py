"""CrossQ against a slow oracle in NumPy: batch renormalisation, and whole gradient steps with their statistics."""

import functools

import numpy as np
import pytest

from helpers.files import load, require_for, script
from helpers.processes import inspect_run, run_dir

NAME = "crossq_continuous_action_jax"
EPS, MOMENTUM, R_MAX, D_MAX, WARM_UP = 0.001, 0.99, 3, 5, 100_000


def slow_correction(x, mean, var, steps):
    """r and d of each column."""
    r, d = np.ones(x.shape[1]), np.zeros(x.shape[1])
    for j in range(x.shape[1]) if steps >= WARM_UP else ():
        running = np.sqrt(var[j] + EPS)
        r[j] = min(max(np.sqrt(np.var(x[:, j]) + EPS) / running, 1 / R_MAX), R_MAX)
        d[j] = min(max((np.mean(x[:, j]) - mean[j]) / running, -D_MAX), D_MAX)
    return r, d


def slow_renormalize(x, mean, var, steps, correction=None):
    x, mean, var = (np.array(array, dtype=float) for array in (x, mean, var))
    (r, d), y = correction or slow_correction(x, mean, var, steps), np.zeros_like(x)
    for j in range(x.shape[1]):
        batch_mean, batch_var = np.mean(x[:, j]), np.var(x[:, j])
        for i in range(len(x)):
            y[i, j] = (x[i, j] - batch_mean) / np.sqrt(batch_var + EPS) * r[j] + d[j]
        mean[j] = MOMENTUM * mean[j] + (1 - MOMENTUM) * batch_mean
        var[j] = MOMENTUM * var[j] + (1 - MOMENTUM) * batch_var
    return y, mean, var


def batches(steps):
    """Batches of 6 columns: about the running statistics, shifted within bounds and beyond, too wide, too narrow."""
    rng = np.random.default_rng(steps)
    shift, width = np.array([0, 1, 40, -40, 0, 0]), np.array([1, 1.5, 1, 1, 9, 0.01])
    return [(shift + width * rng.standard_normal((16, 6))).astype(np.float32) for _ in range(4)]


@pytest.mark.parametrize("steps", [0, WARM_UP - 2, WARM_UP])
def test_renormalize_against_the_oracle(steps):
    renormalize, reached = load(NAME).renormalize, set()
    mean, var = np.zeros(6, dtype=np.float32), np.ones(6, dtype=np.float32)
    for step, x in enumerate(batches(steps), steps):
        r, d = slow_correction(x, mean, var, step)
        reached |= {*r[[4, 5]], *d[[2, 3]]}
        got, wanted = renormalize(x, mean, var, step), slow_renormalize(x, mean, var, step)
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)
        if step >= WARM_UP:  # where nothing is clipped, the batch is scaled by the running statistics alone
            np.testing.assert_allclose(got[0][:, :2], ((x - mean) / np.sqrt(var + EPS))[:, :2], atol=1e-4)
        _, mean, var = map(np.asarray, got)
    assert {*({1, 0} if steps < WARM_UP else ()), *({3, 1 / 3, 5, -5} if steps + 3 >= WARM_UP else ())} <= reached


@pytest.mark.parametrize("steps", [0, WARM_UP])
def test_renormalize_differentiates_the_statistics_of_the_batch_but_not_the_corrections(steps):
    renormalize = load(NAME).renormalize
    import jax

    rng = np.random.default_rng(0)
    x, weights, mean, var = rng.standard_normal((5, 3)), rng.standard_normal((5, 3)), np.full(3, 0.3), np.full(3, 2.0)
    correction, wanted = slow_correction(x, mean, var, steps), np.zeros_like(x)
    for i in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[i] = 1e-6
        up, down = (slow_renormalize(x + sign * step, mean, var, steps, correction)[0] for sign in (1, -1))
        wanted[i] = ((up - down) * weights).sum() / 2e-6
    got = jax.grad(lambda x: (renormalize(x, mean, var, steps)[0] * weights).sum())(x.astype(np.float32))
    np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_layer_keeps_statistics_and_takes_them_as_they_are_in_evaluation():
    layer, (first, *rest) = load(NAME).BatchRenorm(), batches(1)
    import jax

    variables = layer.init(jax.random.key(0), first)
    mean, var = np.zeros(6), np.ones(6)
    np.testing.assert_allclose(layer.apply(variables, first), first / np.sqrt(1 + EPS), rtol=1e-5)
    variables["params"] = {"scale": np.arange(6.0), "bias": np.arange(6.0)[::-1]}
    for step, x in enumerate(rest):
        y, changed = layer.apply(variables, x, mutable="batch_stats")
        wanted, mean, var = slow_renormalize(x, mean, var, step)
        np.testing.assert_allclose(y, wanted * np.arange(6) + np.arange(6)[::-1], rtol=1e-3, atol=1e-3)
        variables |= changed
        np.testing.assert_allclose(variables["batch_stats"]["mean"], mean, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(variables["batch_stats"]["var"], var, rtol=1e-4)
        assert variables["batch_stats"]["steps"] == step + 1
        wanted = (x - mean) / np.sqrt(var + EPS) * np.arange(6) + np.arange(6)[::-1]
        np.testing.assert_allclose(layer.apply(variables, x), wanted, rtol=1e-3, atol=1e-3)


RECORD = """
records = []
for _ in range(4):
    old = jax.device_get(learner)
    learner = learn(learner, replay.stored(), 1)
    _, sample_key, next_key, actor_key = jax.random.split(jax.random.wrap_key_data(old["key"]), 4)
    batch = replay.sample(sample_key, replay.stored(), args.batch_size)
    noise = [jax.random.normal(key, (args.batch_size, action_dim)) for key in (next_key, actor_key)]
    records.append(jax.device_get((old, batch, noise, learner)))
observation = eval_envs.reset(seed=3)[0].copy()
result |= {"records": records, "low": low, "high": high, "target_entropy": -action_dim, "obs": observation}
result["actions"] = load_policy(run.dir, eval_envs, device)(observation)
"""


def double(tree):
    return {name: double(part) for name, part in tree.items()} if isinstance(tree, dict) else np.float64(tree)


def forward(variables, x, train=False):
    """The output of a network of this file for a batch, and its statistics after it."""
    params, stats = variables["params"], variables["batch_stats"]
    after = {}
    for i in range(3):
        norm, dense = f"BatchRenorm_{i}", f"Dense_{i}"
        mean, var, steps = (stats[norm][name] for name in ("mean", "var", "steps"))
        if train:
            assert steps < WARM_UP
            y, batch_mean, batch_var = (x - x.mean(0)) / np.sqrt(x.var(0) + EPS), x.mean(0), x.var(0)
            mean, var = (MOMENTUM * old + (1 - MOMENTUM) * new for old, new in ((mean, batch_mean), (var, batch_var)))
            after[norm] = {"mean": mean, "var": var, "steps": steps + 1}
        else:
            y = (x - mean) / np.sqrt(var + EPS)
        x = (y * params[norm]["scale"] + params[norm]["bias"]) @ params[dense]["kernel"] + params[dense]["bias"]
        x = np.maximum(x, 0) if i < 2 else x
    return x, after


def one_of(variables, i):
    """One of the critics, which are stacked."""
    return {name: one_of(part, i) if isinstance(part, dict) else part[i] for name, part in variables.items()}


def draw(variables, obs, noise, low, high, train=False):
    """Actions and their log-densities, and the statistics after the pass."""
    output, stats = forward(variables, obs, train)
    mean, log_std = np.split(output, 2, axis=1)
    log_std = -5 + 3.5 * (np.tanh(log_std) + 1)
    x, scale = mean + np.exp(log_std) * noise, (high - low) / 2
    density = np.exp(-0.5 * noise**2) / np.sqrt(2 * np.pi) / np.exp(log_std) / (1 - np.tanh(x) ** 2) / scale
    return low + (np.tanh(x) + 1) * scale, np.log(density).sum(1), stats


def critic_loss(critic, both, target):
    values, _ = forward(critic, both, train=True)
    return np.mean((values[: len(target), 0] - target) ** 2)


def actor_loss(actor, critics, alpha, obs, noise, low, high):
    action, logprob, _ = draw(actor, obs, noise, low, high, train=True)
    values = [forward(critic, np.concatenate([obs, action], axis=1))[0][:, 0] for critic in critics]
    return np.mean(alpha * logprob - np.minimum(*values))


def paths(tree, *above):
    for name, part in tree.items():
        yield from paths(part, *above, name) if isinstance(part, dict) else [(*above, name)]


def leaf(tree, path):
    for name in path:
        tree = tree[name]
    return tree


def assert_same_statistics(got, wanted):
    assert set(paths(got)) == set(paths(wanted))
    for path in paths(wanted):
        np.testing.assert_allclose(leaf(got, path), leaf(wanted, path), rtol=1e-4, atol=1e-5, err_msg=path)


def assert_adam_step(loss, old, new, old_state, new_state, select=lambda array: array):
    """One step of Adam, with b1 = 0.5, along the gradient of the loss, measured at some entries of each array."""
    rng, old_state, new_state = np.random.default_rng(0), old_state[0], new_state[0]
    for path in paths(old["params"]):
        values, after = leaf(old["params"], path), leaf(new["params"], path)
        before, mu, nu = (
            select(leaf(double(tree)["params"], path)) for tree in (old_state.mu, new_state.mu, new_state.nu)
        )
        for index in rng.integers(0, values.shape, size=(4, values.ndim)):
            index, values = tuple(index), leaf(old["params"], path)
            value = values[index]
            losses = []
            for step in (1e-6, -1e-6):
                values[index] = value + step
                losses.append(loss(old))
            values[index] = value
            gradient = (losses[0] - losses[1]) / 2e-6
            assert mu[index] == pytest.approx(0.5 * before[index] + 0.5 * gradient, rel=2e-3, abs=2e-4), (path, index)
            moments = mu[index] / (1 - 0.5**new_state.count), nu[index] / (1 - 0.999**new_state.count)
            change = -0.001 * moments[0] / (np.sqrt(moments[1]) + 1e-8)
            assert after[index] - value == pytest.approx(change, rel=1e-2, abs=2e-7), (path, index)


@pytest.fixture(scope="module")
def run_of_crossq(tmp_path_factory):
    require_for(NAME)
    folder = tmp_path_factory.mktemp("crossq")
    argv = "--env-id Pendulum-v1 --total-timesteps 250 --learning-starts 200 --buffer-size 500"
    argv += " --batch-size 16 --q-hidden 8 --gamma 0.9 --save-model"
    return inspect_run(script(NAME), *argv.split(), cwd=folder, after=RECORD) | {"folder": run_dir(folder)}


def test_critics_learn_from_one_pass_over_both_batches(run_of_crossq):
    low, high = run_of_crossq["low"], run_of_crossq["high"]
    for old, (obs, next_obs, action, reward, terminated), noise, new in run_of_crossq["records"]:
        next_action, logprob, _ = draw(double(old["actor_params"]), next_obs, noise[0], low, high)
        both = np.concatenate([np.concatenate(pair, axis=1) for pair in ((obs, action), (next_obs, next_action))])
        critics = [one_of(double(old["qf_params"]), i) for i in (0, 1)]
        values, stats = zip(*(forward(critic, both, train=True) for critic in critics), strict=True)
        next_value = np.minimum(values[0], values[1])[16:, 0] - np.exp(old["log_alpha"]) * logprob
        target = reward + 0.9 * (1 - terminated) * next_value  # a constant: the gradient ends here
        for i, critic in enumerate(critics):
            learned = one_of(double(new["qf_params"]), i)
            assert_same_statistics(learned["batch_stats"], stats[i])
            loss = functools.partial(critic_loss, both=both, target=target)
            states = old["qf_opt_state"], new["qf_opt_state"]
            assert_adam_step(loss, critic, learned, *states, select=lambda array, i=i: array[i])
            assert new["losses"][0, i] - old["losses"][0, i] == pytest.approx(loss(critic), rel=1e-3)


def test_actor_learns_every_third_step_from_critics_with_frozen_statistics(run_of_crossq):
    low, high, learned = run_of_crossq["low"], run_of_crossq["high"], 0
    for old, (obs, *_), (_, noise), new in run_of_crossq["records"]:
        assert new["gradient_steps"] == old["gradient_steps"] + 1
        assert (leaf(new["qf_params"], ["batch_stats", "BatchRenorm_2", "steps"]) == new["gradient_steps"]).all()
        actor, after = double(old["actor_params"]), double(new["actor_params"])
        assert after["batch_stats"]["BatchRenorm_2"]["steps"] == new["gradient_steps"] // 3
        if new["gradient_steps"] % 3:
            for path in paths(actor):
                np.testing.assert_array_equal(leaf(actor, path), leaf(after, path))
            assert new["log_alpha"] == old["log_alpha"]
            continue
        learned += 1
        critics = [one_of(double(new["qf_params"]), i) for i in (0, 1)]
        alpha = np.exp(np.float64(old["log_alpha"]))
        loss = functools.partial(actor_loss, critics=critics, alpha=alpha, obs=obs, noise=noise, low=low, high=high)
        _, logprob, stats = draw(actor, obs, noise, low, high, train=True)
        assert_same_statistics(after["batch_stats"], stats)
        assert_adam_step(loss, actor, after, old["actor_opt_state"], new["actor_opt_state"])
        assert new["losses"][0, 5] - old["losses"][0, 5] == pytest.approx(loss(actor), rel=1e-3, abs=1e-4)
        entropy_missing = np.sign(-np.mean(logprob) - run_of_crossq["target_entropy"])
        assert np.sign(old["log_alpha"] - new["log_alpha"]) == entropy_missing
    assert learned in (1, 2)


def test_saved_policy_uses_the_running_statistics(run_of_crossq):
    from safetensors.numpy import load_file

    model, actor = load_file(run_of_crossq["folder"] / "model.safetensors"), {}
    for path, array in model.items():
        network, *above, name = path.split(".")
        if network == "actor":
            part = actor
            for key in above:
                part = part.setdefault(key, {})
            part[name] = np.float64(array)
    assert actor["batch_stats"]["BatchRenorm_0"]["steps"] > 10
    action, *_ = draw(actor, run_of_crossq["obs"], 0, run_of_crossq["low"], run_of_crossq["high"])
    np.testing.assert_allclose(run_of_crossq["actions"], action, rtol=1e-4, atol=1e-4)
