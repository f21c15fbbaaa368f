"""PPO on simulators whose tensors stay on the device: equations, JAX's arrays as tensors, real simulators."""

import functools
import os
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest

from helpers.files import load, require, script, smoke
from helpers.oracles import advantages_of_episode
from helpers.processes import environment, inspect_run, inspect_runs, kill_at_checkpoint, run, run_dir
from helpers.scalars import raw_scalars

torch = pytest.importorskip("torch")
NAME = "ppo_continuous_action_isaacgym"


@pytest.mark.parametrize("seed", range(3))
def test_gae_on_device(seed):
    rng = np.random.default_rng(seed)
    rewards, values, final = rng.normal(size=(3, 30, 4)).astype(np.float32)
    next_value, end = rng.normal(size=4).astype(np.float32), rng.choice(3, p=[0.7, 0.15, 0.15], size=(30, 4))
    end[-1] = [0, 1, 2, 0]  # goes on, terminated, truncated
    final = np.where(end == 2, final, 0)
    expected = np.zeros_like(rewards)
    for env in range(4):
        start = 0
        for t in range(30):
            if end[t, env] or t == 29:
                last, part = final[t, env] if end[t, env] else next_value[env], slice(start, t + 1)
                expected[part, env] = advantages_of_episode(rewards[part, env], values[part, env], last, 0.97, 0.9)
                start = t + 1
    tensors = map(torch.from_numpy, (rewards, values, next_value, end > 0, final))
    np.testing.assert_allclose(load(NAME).gae_on_device(*tensors, 0.97, 0.9), expected, rtol=1e-4, atol=1e-5)


def test_finished_episodes():
    """Over two rollouts, against a list of episodes; a reward that is not finite spoils its own episode only."""
    rng = np.random.default_rng(0)
    rewards, dones = rng.normal(size=(2, 20, 3)).astype(np.float32), rng.random((2, 20, 3)) < 0.2
    returns, lengths = torch.zeros((2, 3))
    total, length = np.zeros(3), np.zeros(3)
    for r, d in zip(rewards, dones, strict=True):
        ended = []
        for t in range(20):
            total, length = total + r[t], length + 1
            ended += [(total[i], length[i]) for i in np.flatnonzero(d[t])]
            total, length = total * ~d[t], length * ~d[t]
        got = load(NAME).finish_episodes(torch.from_numpy(r), torch.from_numpy(d), returns, lengths)
        assert len(ended) > 3
        np.testing.assert_allclose(got, [len(ended), *np.sum(ended, axis=0)], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(returns, total, rtol=1e-4, atol=1e-4)


class Counter:
    """In the interface of Brax: the observation is the random number of the episode and the steps of it so far.

    Actions above 0.5 terminate, those below -0.5 make the simulation infinite.
    """

    action_size = 1

    @staticmethod
    @functools.cache
    def state_class():
        import jax

        @jax.tree_util.register_dataclass
        @dataclass
        class State:
            obs: object
            reward: object
            done: object
            info: object

        return State

    def reset(self, key):
        import jax

        number = jax.random.uniform(key)
        return self.state_class()({"state": jax.numpy.stack([number, 0.0])}, 0.0 * number, 0.0 * number, {"age": 0})

    def step(self, state, action):
        jnp = __import__("jax").numpy
        steps = jnp.where(action[0] < -0.5, jnp.inf, state.obs["state"][1] + 1)
        obs = {"state": jnp.stack([state.obs["state"][0], steps])}
        return replace(
            state, obs=obs, reward=steps, done=(action[0] > 0.5) * 1.0, info={"age": state.info["age"] + 1.0}
        )


@pytest.fixture
def counters(monkeypatch):
    module = load(NAME)
    monkeypatch.setattr(module, "load_environment", lambda env_id: (Counter(), 3))
    return module.make_envs("Counter", 4, 1, cuda=False)


def test_tensors_are_jax_arrays(counters):
    """No copies either way: a tensor has the address of the array, and the compiled step reads the actions in place."""
    import jax

    counters.simulator.reset(1)
    actions = torch.zeros(4, 1)
    assert jax.dlpack.from_dlpack(actions).unsafe_buffer_pointer() == actions.data_ptr()
    for _ in range(4):
        outputs = counters.simulator.step(actions)
        for tensor, array in zip(outputs, counters.simulator.outputs, strict=True):
            assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    assert [tensor.dtype for tensor in outputs] == [torch.float32] * 2 + [torch.bool] * 2 + [torch.float32]
    assert counters.simulator.advance._cache_size() == 1, "the step was compiled more than once"


def test_episodes_of_jax_environments(counters):
    """Three steps, if not terminated before; the final observation is of the old episode, the next of another one."""
    simulator = counters.simulator
    first = simulator.reset(1).clone()
    assert (first[:, 1] == 0).all() and len(first[:, 0].unique()) == 4
    keep, end, explode = (torch.tensor([[0.0], [0.0], [x], [0.0]]) for x in (0, 1, -1))
    for actions in (keep, end):
        obs, reward, terminated, truncated, final_obs = simulator.step(actions)
    assert terminated.tolist() == [False, False, True, False] and not truncated.any()
    assert reward.tolist() == [2] * 4 and final_obs[:, 1].tolist() == [2] * 4
    assert torch.equal(final_obs[:, 0], first[:, 0]) and obs[:, 1].tolist() == [2, 2, 0, 2]
    assert obs[2, 0] != first[2, 0] and torch.equal(obs[[0, 1, 3]], final_obs[[0, 1, 3]])
    pool = simulator.pool.obs["state"][:, 0].tolist()
    assert obs[2, 0].item() in pool

    obs, reward, terminated, truncated, final_obs = simulator.step(explode)
    assert truncated.tolist() == [True, True, False, True] and terminated.tolist() == [False, False, True, False]
    assert reward.tolist() == [3, 3, 0, 3] and obs.isfinite().all() and (obs[:, 1] == 0).all()
    assert len(obs[:, 0].unique()) == 4, "environments that restart together share a state"
    assert not set(simulator.pool.obs["state"][:, 0].tolist()) & set(pool), "the pool is never renewed"
    again = simulator.reset(1)
    assert torch.equal(again, first) and not torch.equal(simulator.reset(2), first)


LOOK = """
result |= {"advantages": b_advantages.view(steps_envs).numpy(), "rewards": rewards.numpy()}
result["ends"] = (terminated | truncated).numpy()
"""


def test_the_reward_scaler_scales_what_is_learned_from(tmp_path):
    """Advantages are linear in rewards and values, and the values are the same: the difference is that of rewards."""
    argvs = [smoke(NAME, num_steps=40, total_timesteps=160, reward_scaler=scale) for scale in (1, 3)]
    one, three = inspect_runs(script(NAME), argvs, cwd=tmp_path, after=LOOK)
    np.testing.assert_array_equal(one["rewards"], three["rewards"])
    zeros = torch.zeros(40, 4)
    rewards, ends = torch.from_numpy(2 * one["rewards"]), torch.from_numpy(one["ends"])
    expected = load(NAME).gae_on_device(rewards, zeros, zeros[0], ends, zeros, 0.99, 0.95)
    np.testing.assert_allclose(three["advantages"] - one["advantages"], expected, rtol=1e-3, atol=1e-4)
    returns = [[x for x in raw_scalars(folder) if "episodic" in x[0]] for folder in (tmp_path / "runs").iterdir()]
    assert returns[0] == returns[1] != []


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_the_step_size_shrinks_after_a_resume_too(tmp_path):
    """An optimizer that has loaded its state reads a step size of its own."""
    argv = [*smoke(NAME, learning_rate=0.1, checkpoint_freq=1), "--anneal-lr"]
    kill_at_checkpoint(NAME, argv, tmp_path, number=3, before=False)
    look = 'result["lr"] = optimizer.param_groups[0]["lr"].item()'
    result = inspect_run(script(NAME), "--resume", run_dir(tmp_path), cwd=tmp_path, after=look)
    logged = [value for tag, _, value in raw_scalars(run_dir(tmp_path)) if tag == "charts/learning_rate"]
    np.testing.assert_allclose(logged, [0.1, 0.075, 0.05, 0.025], rtol=1e-6)
    assert result["lr"] == pytest.approx(0.025)


COUNT = """
import sys
import torch

result["transfers"] = []
for method in ("tolist", "item", "cpu", "numpy", "__bool__", "__float__"):
    def counting(self, *args, method=method, original=getattr(torch.Tensor, method), **options):
        frame = sys._getframe(1)
        names = frame.f_globals
        if names.get("__name__") == "__main__" and "iteration" in names:
            while frame.f_code.co_name != "<module>":
                frame = frame.f_back
            result["transfers"].append((names["iteration"], names["global_step"], frame.f_lineno))
        return original(self, *args, **options)

    setattr(torch.Tensor, method, counting)
"""


def test_transfers_in_the_log_only(tmp_path):
    """What would wait for a GPU is counted on the CPU too: the rollout, targets and gradient steps never ask."""
    result = inspect_run(script(NAME), *smoke(NAME), cwd=tmp_path, before=COUNT)
    text = script(NAME).read_text().splitlines()
    log, checkpoint = (
        next(i for i, line in enumerate(text, 1) if line.startswith(f"        # {x}")) for x in ("Log", "Check")
    )
    assert {iteration for iteration, *_ in result["transfers"]} == {0, 1, 2, 3}
    assert all(log < line < checkpoint for *_, line in result["transfers"])
    assert all(step == 64 * (iteration + 1) for iteration, step, _ in result["transfers"])
    assert len(result["transfers"]) == 4 * 4  # statistics, step size, losses, whether the weights are finite


SYNC = """
import torch
import tensor_sims

step, tolist = tensor_sims.PointMass.step, torch.Tensor.tolist


def watched(self, actions):
    torch.cuda.set_sync_debug_mode("error")
    return step(self, actions)


def allowed(self):
    torch.cuda.set_sync_debug_mode("default")
    return tolist(self)


tensor_sims.PointMass.step, torch.Tensor.tolist = watched, allowed  # the first transfer of the log is a tolist
"""


@pytest.mark.cuda
def test_nothing_else_waits_for_the_gpu(tmp_path):
    """From the first step of a rollout until the log, torch raises an error where the host would wait."""
    argv = smoke(NAME, total_timesteps=640)
    inspect_run(script(NAME), *argv, cwd=tmp_path, before=SYNC, env=environment(gpu=True))


INFINITE = """
import torch
from tensor_sims import PointMass


def make(num_envs, seed, device):
    simulator, step, steps = PointMass(num_envs, seed, device), PointMass.step, 0

    def infinite(actions):
        nonlocal steps
        steps += 1
        obs, *others = step(simulator, actions)
        return torch.where(torch.tensor(steps == 40), torch.inf, obs), *others

    simulator.step = infinite
    return simulator
"""


def test_an_infinite_observation_ends_the_run_before_its_checkpoint(tmp_path):
    (tmp_path / "infinite.py").write_text(INFINITE)
    argv = smoke(NAME, env_id="infinite:make", checkpoint_freq=1)
    paths = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    done = run(script(NAME), *argv, cwd=tmp_path, env=environment(PYTHONPATH=paths), code=1)
    assert "not finite at step 192" in done.stderr and str(run_dir(tmp_path).relative_to(tmp_path)) in done.stderr
    checkpoint = torch.load(run_dir(tmp_path) / "checkpoint.pt")
    assert checkpoint["global_step"] == 128
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


def test_interface_of_playground():
    """What MuJoCo Playground returns fits into a step, by shapes and types: to compile its physics takes a minute."""
    require("brax", "mujoco_playground")
    import jax

    simulator = load(NAME).JaxSimulator("CartpoleBalance", 2, torch.device("cpu"))
    assert simulator.single_observation_space.shape == (5,) and simulator.single_action_space.shape == (1,)
    assert simulator.episode_length == 1000
    key, ages = jax.random.PRNGKey(0), np.zeros(2, np.int32)
    states = jax.eval_shape(simulator.draw, key)
    after, *_, outputs = jax.eval_shape(simulator.advance, states, ages, states, key, np.zeros((2, 1), np.float32))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), states)
    assert [x.shape for x in outputs] == [(2, 5), (2,), (2,), (2,), (2, 5)]
    assert [x.dtype for x in outputs] == [np.float32] * 2 + [bool] * 2 + [np.float32]


@pytest.mark.parametrize(
    "env_id, films",
    [
        ("InvertedPendulum", True),
        pytest.param("CartpoleBalance", True, marks=pytest.mark.slow),
        pytest.param("Ant", False, marks=pytest.mark.slow),
    ],
)
def test_real_simulators(env_id, films, tmp_path):
    """Brax and MuJoCo Playground, with the few environments that a CPU steps quickly."""
    require("brax", "mujoco_playground", "moviepy")
    argv = smoke(NAME, env_id=env_id, num_steps=8, total_timesteps=96, record_video_step_frequency=5)
    after = "result |= {'obs': obs.numpy(), 'compiled': envs.simulator.advance._cache_size()}"
    argv += ["--capture-video"] * films
    result = inspect_run(script(NAME), *argv, cwd=tmp_path, after=after, timeout=600)
    assert result["compiled"] == 1 and np.isfinite(result["obs"]).all() and result["obs"].std() > 0
    assert sum("losses/value_loss" == tag for tag, _, _ in raw_scalars(run_dir(tmp_path))) == 3
    assert len(list(run_dir(tmp_path).glob("videos/*.mp4"))) == (4 if films else 0)
