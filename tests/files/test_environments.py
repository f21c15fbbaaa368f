"""The environments of the continuous files: MuJoCo's, dm_control's, those without MuJoCo, and unusual spaces."""

import re
import tomllib
from importlib.util import find_spec
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import probe_envs
import pytest
from packaging.requirements import Requirement

from helpers.files import HELPERS, LINEAGE, ROOT, each_text, load, require_for, script, smoke, uses
from helpers.processes import environment, inspect_run, run, run_dir
from helpers.refusals import refuse, without
from helpers.scalars import raw_scalars


def continuous(name):
    """Gymnasium's; simulators on tensors: test_isaacgym.py."""
    return LINEAGE[name].get("probes") == "continuous" and "tensor_sims:" not in LINEAGE[name]["smoke"]


each_make_env = each_text("make_env", which=continuous)
each_actor = each_text("make_env", "Actor", which=continuous)


@each_make_env
def test_dict_observations_are_flattened(name):
    """Keys in the order of the space, numbers of a discrete space as one of three, float64 throughout."""
    envs = load(name).make_envs("probe_envs:Spaces-v0", 2)
    obs, _ = envs.reset(seed=3)
    assert envs.single_observation_space.shape == (3 + 4 + 3,)
    alone = probe_envs.Spaces()
    for i in range(2):
        parts = alone.reset(seed=3 + i)[0]
        parts |= {"inner": parts["inner"]["vector"], "level": np.eye(3)[parts["level"]]}
        expected = np.concatenate([parts[key].flatten() for key in alone.observation_space])
        np.testing.assert_array_equal(obs[i], expected)


@each_make_env
def test_images_are_not_flattened(name):
    """A file refuses what is not a vector, also as a part of a dictionary."""
    for env_id in ("Camera-v0", "ImageContinuous-v0"):
        with pytest.raises(gym.error.Error, match="observations"):
            load(name).make_envs(f"probe_envs:{env_id}", 1)


class WithoutModes(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-1, 1, (1,))

    def __init__(self):  # takes no render_mode
        pass


@each_make_env
def test_a_constructor_without_render_mode(name):
    """It is passed only when a file films."""
    gym.register("WithoutModes-v0", WithoutModes)
    assert load(name).make_envs("WithoutModes-v0", 2).single_observation_space.shape == (3,)


ACTIONS = """
import probe_envs

result |= {"actions": np.array(probe_envs.Spaces.actions), "obs_dim": envs.single_observation_space.shape}
"""


@each_actor
def test_unequal_bounds_and_dict_observations(name, tmp_path):
    """The environment rejects an action outside of the bounds of its dimension, also in the evaluation at the end."""
    require_for(name)
    argv = smoke(name, env_id="probe_envs:Spaces-v0", num_envs=2)
    got = inspect_run(script(name), *argv, "--save-model", cwd=tmp_path, after=ACTIONS)
    assert got["obs_dim"] == (10,)
    low, high = np.array([[-2, 0, -0.1], [1, 50, 0.3]])
    if "--learning-starts" in argv:  # before that, actions are uniform between the bounds
        start = int(argv[argv.index("--learning-starts") + 1])
        shares = (got["actions"][:start] - low) / (high - low)
        np.testing.assert_allclose(shares.mean(0), 0.5, atol=0.1)
        np.testing.assert_allclose(shares.std(0), 12**-0.5, atol=0.03)
        shares = (got["actions"][start:] - low) / (high - low)
        assert (np.ptp(shares, axis=0) > 0.3).all(), "later actions cover little of the range of a dimension"


@each_text("Actor", which=lambda name: continuous(name) and "class Actor(nn.Module)" in script(name).read_text())
def test_rounding_leaves_saturated_actions_within_the_bounds(name):
    """In float32, -0.8 and twice half the way to 1.1 are more than 1.1."""
    low, high = np.array([[-0.8, -2, 0.1], [1.1, 1, 0.7]], dtype=np.float32)
    assert low[0] + 2 * ((high[0] - low[0]) / 2) > high[0], "the case does not tell"
    spaces = {"single_observation_space": gym.spaces.Box(-1, 1, (4,)), "single_action_space": gym.spaces.Box(low, high)}
    x, module = np.linspace(-20, 20, 401, dtype=np.float32)[:, None].repeat(3, axis=1), load(name)
    if uses(name, "torch"):
        actor, tensor = module.Actor(SimpleNamespace(**spaces)), module.torch.from_numpy(x)
        if hasattr(actor, "squash"):
            actions = actor.squash(tensor)
        else:
            del actor.layers
            actor.layers = lambda obs: tensor.tanh()
            actions = actor(None)
    else:
        actor = module.Actor(low, high)

        def saturate(bias):  # the last layer has nothing else
            params = actor.init(module.jax.random.key(0), np.zeros((1, 4)))["params"]
            last = {"kernel": 0 * params["Dense_2"]["kernel"], "bias": bias}
            return actor.apply({"params": params | {"Dense_2": last}}, np.zeros((1, 4)))[0]

        actions = actor.squash(x) if hasattr(actor, "squash") else module.jax.vmap(saturate)(x)
    actions = np.asarray(actions)
    assert (actions >= low).all() and (actions <= high).all()
    np.testing.assert_array_equal(actions[[0, -1]], [low, high])
    np.testing.assert_allclose(actions, low + (np.tanh(x) + 1) * (high - low) / 2, rtol=1e-5, atol=1e-6)


ROBOTS = "Ant HalfCheetah Hopper Humanoid HumanoidStandup InvertedDoublePendulum InvertedPendulum Reacher Swimmer"


@each_make_env
@pytest.mark.parametrize("version", ["v4", "v5"])
def test_mujoco(name, version):
    for robot in [*ROBOTS.split(), "Walker2d", *["Pusher"] * (version == "v5")]:
        envs = load(name).make_envs(f"{robot}-{version}", 1)
        obs, _ = envs.reset(seed=1)
        obs, reward, *_ = envs.step(np.zeros((1, *envs.single_action_space.shape), dtype=np.float32))
        assert obs.ndim == 2 and np.isfinite(obs).all() and np.isfinite(reward).all()
        envs.close()


@each_actor
def test_pendulum_needs_no_mujoco(name, tmp_path):
    """And no transition before the first gradient step but one, where --learning-starts asks for it."""
    require_for(name)
    argv = smoke(name, env_id="Pendulum-v1")
    if "--learning-starts" in argv:
        argv = smoke(name, env_id="Pendulum-v1", learning_starts=-1, total_timesteps=100)
    run(script(name), *argv, cwd=tmp_path, driver=without("mujoco"))
    (tmp_path / "other").mkdir()
    assert "mujoco" in refuse(name, "--env-id", "Hopper-v5", cwd=tmp_path / "other", driver=without("mujoco"))


@each_make_env
def test_missing_dm_control_names_the_packages(name, monkeypatch):
    module = load(name)
    for missing in ("shimmy", "dm_control"):
        monkeypatch.setattr(module, "find_spec", {"shimmy": True, "dm_control": True, missing: None}.get)
        with pytest.raises(ImportError, match="pip install shimmy dm_control==.* mujoco=="):
            module.make_envs("dm_control/cheetah-run-v0", 1)


@each_make_env
def test_the_packages_for_dm_control_are_those_of_the_extra(name):
    (line,) = re.findall(r"pip install (shimmy .*)\"\)", script(name).read_text())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dm-control"]
    ranges = {requirement.name: requirement.specifier for requirement in map(Requirement, extras)}
    for requirement in map(Requirement, line.split()):
        for pin in requirement.specifier:
            assert pin.version in ranges[requirement.name]
        assert requirement.name in ranges


needs_dm_control = pytest.mark.skipif(
    not (find_spec("shimmy") and find_spec("dm_control")),
    reason="dm_control needs an older mujoco than the other tests have: pip install -e .[dm-control,test] elsewhere",
)


@needs_dm_control
@each_actor
def test_dm_control(name, tmp_path):
    """The published ids, as they are; an episode is cut off after 1000 steps."""
    require_for(name)
    total = {"total_timesteps": 1100, "learning_starts": 1000} if "--learning-starts" in smoke(name) else {}
    argv = smoke(name, env_id="dm_control/cheetah-run-v0", num_envs=1, **total)
    run(script(name), *argv, cwd=tmp_path)
    assert run_dir(tmp_path).name.startswith("dm_control-cheetah-run-v0__")
    scalars = raw_scalars(run_dir(tmp_path))
    assert any(tag.startswith("losses/") for tag, _, _ in scalars)
    if total:
        assert [value for tag, _, value in scalars if tag == "charts/episodic_length"] == [1000]


@needs_dm_control
@each_make_env
def test_dm_control_is_seeded_and_truncates(name):
    returns = []
    for _ in range(2):
        envs = load(name).make_envs("dm_control/cheetah-run-v0", 1)
        assert envs.single_observation_space.shape == (17,)
        envs.reset(seed=5)
        rewards = []
        for step in range(1000):
            _, reward, terminated, truncated, _ = envs.step(np.full((1, 6), 0.3, dtype=np.float32))
            rewards.append(reward[0])
            assert not terminated.any() and truncated.any() == (step == 999)
        returns.append(rewards)
    assert returns[0] == returns[1]


@needs_dm_control
@each_make_env
def test_dm_control_names_a_near_match(name, tmp_path):
    env = environment(PYTHONPATH=str(HELPERS), PYTHONWARNINGS="ignore", MUJOCO_GL="disabled")
    assert "`cheetah-run`" in refuse(name, "--env-id", "dm_control/cheetah-ru-v0", cwd=tmp_path, env=env)
