"""Training that never leaves the accelerator: ppo_jax.py and dqn_onchip_jax.py with the environments of gymnax."""

import os
import subprocess
import sys

import numpy as np
import pytest

from cleanrl_utils.runs.results import read_folder
from helpers.files import HELPERS, load, posix, require_for, script, smoke, smoke_total
from helpers.processes import environment, inspect_run, inspect_runs, kill_at_checkpoint, run, run_dir
from helpers.refusals import assert_stops_on_non_finite_loss, refuse

NAMES = ["ppo_jax", "dqn_onchip_jax"]
GAMMA = 0.5
PROBES = {  # of Together, in their order: observation -> value, or -> best action
    "Discounting": ({0: GAMMA, 1: 1}, {}),
    "TruncationState": ({-1: -1 / (1 - GAMMA), 1: 1 / (1 - GAMMA)}, {}),
    "ObservationAction": ({}, {-1: 0, 1: 1}),
}
FLAGS = {
    "ppo_jax": "--num-envs 8 --num-steps 32 --total-timesteps 30720 --learning-rate 0.005 --ent-coef 0 --no-clip-vloss "
    "--max-grad-norm 5",
    "dqn_onchip_jax": "--total-timesteps 8000 --learning-starts 200 --train-frequency 2 --target-network-frequency 20 "
    "--learning-rate 0.002 --buffer-size 2000 --batch-size 64",
}
LOOK = """
observations = np.array([[x, *np.eye(3)[kind]] for kind in range(3) for x in (-1, 0, 1)], dtype=np.float32)
if "agent" in globals():
    logits, values = agent.apply(jax.tree.map(lambda x: x[0], learner["params"]), observations)
else:
    logits = q_network.apply(jax.tree.map(lambda x: x[0], learner["params"]), observations)
    values = logits.max(1)
result |= {"values": np.asarray(values).reshape(3, 3), "actions": np.asarray(logits.argmax(1)).reshape(3, 3)}
"""


@pytest.mark.parametrize("name", NAMES)
def test_probes(name, tmp_path):
    require_for(name)
    argv = ["--env-id", "probe_gymnax:Together-v0", "--gamma", GAMMA, *FLAGS[name].split()]
    got = inspect_run(script(name), *argv, cwd=tmp_path, after=LOOK)
    for (probe, (values, actions)), found, chosen in zip(PROBES.items(), got["values"], got["actions"], strict=True):
        assert {x: found[x + 1] for x in values} == pytest.approx(values, rel=0.1), probe
        assert {x: chosen[x + 1] for x in actions} == actions, probe


def slow_gae(rewards, values, next_value, dones, final_values, gamma, gae_lambda):
    """By the definition: the sum of discounted TD errors until the end of the episode or of the rollout."""
    steps, envs = rewards.shape
    following = np.concatenate([values[1:], next_value[None]])
    advantages = np.zeros((steps, envs))
    for env in range(envs):
        for start in range(steps):
            weight = 1.0
            for t in range(start, steps):
                after = final_values[t, env] if dones[t, env] else following[t, env]
                advantages[start, env] += weight * (rewards[t, env] + gamma * after - values[t, env])
                if dones[t, env]:
                    break
                weight *= gamma * gae_lambda
    return advantages


@pytest.mark.parametrize("steps", [1, 5, 37])
def test_advantages(steps):
    rng = np.random.default_rng(steps)
    rewards, values, final_values = rng.normal(size=(3, steps, 3)).astype(np.float32)
    dones, next_value = rng.random((steps, 3)) < 0.2, rng.normal(size=3).astype(np.float32)
    inputs = rewards, values, next_value, dones, final_values, 0.9, 0.8
    np.testing.assert_allclose(load("ppo_jax").gae_at_once(*inputs), slow_gae(*inputs), atol=1e-5)


@pytest.mark.parametrize("rows", [2, 6, 512])
def test_orders_of_minibatches(rows):
    import jax

    orders = np.asarray(load("ppo_jax").shuffle(jax.random.key(1), rows, 200))
    assert (np.sort(orders, axis=1) == np.arange(rows)).all()
    assert len(np.unique(orders, axis=0)) > 1
    assert np.abs(orders.mean(0) - (rows - 1) / 2).max() < 5 * rows / np.sqrt(12 * 200), "a place prefers some rows"


def oracle_loss(logits, newvalue, mb, args):
    """Row by row, with plain Python numbers."""
    advantages = mb["advantages"]
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    total = 0.0
    for i, action in enumerate(mb["actions"]):
        p = np.exp(logits[i]) / np.exp(logits[i]).sum()
        ratio = p[action] / np.exp(mb["logprobs"][i])
        surrogate = min(ratio * advantages[i], np.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef) * advantages[i])
        error = (newvalue[i] - mb["returns"][i]) ** 2
        if args.clip_vloss:
            near = mb["values"][i] + np.clip(newvalue[i] - mb["values"][i], -args.clip_coef, args.clip_coef)
            error = max(error, (near - mb["returns"][i]) ** 2)
        total += -surrogate - args.ent_coef * -(p * np.log(p)).sum() + args.vf_coef * 0.5 * error
    return total / len(logits)


@pytest.mark.parametrize("on", [True, False])
def test_loss(on):
    import jax

    module, rng = load("ppo_jax"), np.random.default_rng(0)
    args = module.Args(norm_adv=on, clip_vloss=on)
    logits = rng.normal(size=(8, 3)).astype(np.float32)
    names = ["logprobs", "values", "advantages", "returns"]
    mb = dict(zip(names, rng.normal(size=(4, 8)).astype(np.float32)))
    mb["logprobs"] = mb["logprobs"] / 5 - 1
    old, mb = mb.values(), mb | {"actions": rng.integers(3, size=8)}
    newvalue = rng.normal(size=8).astype(np.float32)
    logprobs = jax.nn.log_softmax(logits)
    entropy = -(np.exp(logprobs) * logprobs).sum(-1)
    loss, _ = module.ppo_loss(module.logprob_of(logits, mb["actions"]), entropy, newvalue, *old, args)
    assert float(loss) == pytest.approx(oracle_loss(logits, newvalue, mb, args), rel=1e-5)


def test_the_time_limit_of_cartpole_is_no_failure():
    """The last step before the limit truncates, a fallen pole terminates, and both keep the final observation."""
    import jax
    import jax.numpy as jnp

    envs = load("ppo_jax").make_envs("CartPole-v1", 3)
    first_obs, _ = envs.reset(seed=1)
    states = envs.states.replace(time=jnp.array([499, 7, 8]), theta=jnp.array([0.0, 0.0, 0.5]))
    envs.states = jax.tree.map(jnp.asarray, states)
    obs, reward, terminated, truncated, infos = envs.step(np.array([0, 0, 0]))
    assert terminated.tolist() == [False, False, True] and truncated.tolist() == [True, False, False]
    assert envs.states.time.tolist() == [0, 8, 0]
    assert np.abs(obs[[0, 2]]).max() <= 0.05, "a first observation"
    assert np.abs(infos["final_obs"][:, 1]).min() > 0.1, "pushed: no first observation"
    np.testing.assert_array_equal(obs[1], infos["final_obs"][1])


SEEDS = """
result |= {"curves": run.curves, "steps": run.curve_steps, "seeds": run.seeds.tolist()}
leaves = [np.asarray(x).reshape(len(run.seeds), -1) for x in jax.tree.leaves(learner["params"])]
result |= {"weights": np.concatenate(leaves, 1), "eval": np.load(run.dir / "eval_returns.npy")}
result["run_dir"] = str(run.dir.resolve())
"""


@pytest.mark.parametrize("name", NAMES)
def test_seeds_side_by_side_learn_what_each_learns_alone(name, tmp_path):
    """Up to rounding, as products of batches of matrices may add in another order; and every seed can be read."""
    require_for(name)
    argv = [*smoke(name), "--save-model"]
    argvs = [[*argv, "--num-seeds", 3], *([*argv, "--seed", seed] for seed in (2, 3))]
    together, *alone = inspect_runs(script(name), argvs, cwd=tmp_path, after=SEEDS)
    assert together["seeds"] == [1, 2, 3] and together["eval"].shape == (3, 10)
    assert together["steps"][-1] == smoke_total(name)
    for i, one in enumerate(alone, 1):
        np.testing.assert_allclose(together["curves"][:, i], one["curves"][:, 0], rtol=1e-2, atol=1e-2)
        np.testing.assert_allclose(together["weights"][i], one["weights"][0], rtol=1e-2, atol=1e-2)
    assert np.abs(together["weights"][0] - together["weights"][1]).max() > 0.1

    runs = read_folder(together["run_dir"])
    assert [one.seed for one in runs] == [1, 2, 3]
    for i, one in enumerate(runs):
        assert len(one.returns) == len(one.seconds) == together["curves"][:, i, -1].sum() > 0
        assert one.seconds[-1] > 0 and (np.diff(one.seconds) >= 0).all()


@posix
@pytest.mark.parametrize("name", NAMES)
def test_a_killed_run_is_the_same_bit_by_bit(name, tmp_path):
    """Weights, replay, the episodes under way and all metrics; a checkpoint or the curves may be the newer file."""
    require_for(name)
    argv = [*smoke(name, checkpoint_freq=smoke_total(name) // 3), "--num-seeds", "2"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir(), whole.mkdir()
    kill_at_checkpoint(name, argv, killed, number=3, before=True)
    refused = run(script(name), "--resume", run_dir(killed), "--seed", 7, cwd=killed, code=2)
    assert "with --seed 1" in refused.stderr
    run(script(name), "--resume", run_dir(killed), cwd=killed)
    run(script(name), *argv, cwd=whole)
    from flax.serialization import msgpack_restore

    def flat(tree, path=""):
        if isinstance(tree, dict):
            return {k: v for key, branch in tree.items() for k, v in flat(branch, f"{path}/{key}").items()}
        return {path: tree}

    states = [msgpack_restore((run_dir(cwd) / "checkpoint.msgpack").read_bytes()) for cwd in (killed, whole)]
    first, second = (flat(state["learner"]) for state in states)
    assert first.keys() == second.keys() and len(first) > 8
    for path, value in first.items():
        np.testing.assert_array_equal(value, second[path], err_msg=path)
    curves = [np.load(run_dir(cwd) / "curves.npz") for cwd in (killed, whole)]
    assert set(curves[0].files) == set(curves[1].files)
    for key in curves[0].files:
        np.testing.assert_array_equal(curves[0][key], curves[1][key], err_msg=key)


RING = """
result |= {"replay": np.asarray(learner["replay"])[0]}
"""


def test_the_ring_holds_the_newest_rounds(tmp_path):
    """The environments count: of round r, the row for step t has observation t, next observation t + 1, reward -t."""
    name = "dqn_onchip_jax"
    require_for(name)
    argv = ["--env-id", "probe_gymnax:Counter-v0", "--num-envs", 2, "--train-frequency", 6, "--buffer-size", 50]
    argv += ["--total-timesteps", 100, "--learning-starts", 1000]  # 17 rounds of 3 steps in 8 slots
    (result,) = inspect_runs(script(name), [argv], cwd=tmp_path, after=RING)
    replay = result["replay"]
    assert replay.shape == (8, 3, 2, 5)
    for number in range(17 - 8, 17):
        for step in range(3):
            t = 3 * number + step
            for obs, next_obs, action, reward, terminated in replay[number % 8, step]:
                assert (obs, next_obs, reward, terminated) == (t, t + 1, -t, 0) and action in (0, 1)


@pytest.mark.parametrize("name", NAMES)
def test_bad_input(name, tmp_path):
    assert "CartPole-v1" in refuse(name, "--env-id", "CartPol-v1", cwd=tmp_path)
    assert "--num-seeds" in refuse(name, "--num-seeds", "0", cwd=tmp_path)
    (tmp_path / "gymnax.py").write_text("raise ImportError('no gymnax here')")
    env = environment(PYTHONPATH=os.pathsep.join([str(tmp_path), str(HELPERS)]))
    done = subprocess.run([sys.executable, script(name)], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "pip install --no-deps gymnax" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_nan_rewards(name, tmp_path):
    argv = smoke(name, env_id="probe_gymnax:NanReward-v0", checkpoint_freq=1)
    assert_stops_on_non_finite_loss(name, argv, tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_no_device_is_chosen_before_the_flags_are_read(name, tmp_path):
    """gymnax starts JAX's devices when it is imported; --no-cuda and the memory that JAX takes come before that."""
    require_for(name)
    code = "import runpy, sys; from jax._src import xla_bridge; runpy.run_path(sys.argv[1], run_name='module')\n"
    code += "sys.exit(xla_bridge.backends_are_initialized())"
    subprocess.run([sys.executable, "-c", code, script(name)], cwd=tmp_path, env=environment(), check=True)


def test_the_first_ratio_is_one(tmp_path):
    """With one gradient step per rollout, that step sees the policy that acted."""
    require_for("ppo_jax")
    argv = smoke("ppo_jax", num_seeds=2, num_minibatches=1, update_epochs=1, learning_rate=0.01)
    run(script("ppo_jax"), *argv, cwd=tmp_path)
    with np.load(run_dir(tmp_path) / "curves.npz") as curves:
        for name in ("old_approx_kl", "approx_kl", "clipfrac"):
            assert abs(curves[f"losses/{name}"]).max() < 1e-5, name
