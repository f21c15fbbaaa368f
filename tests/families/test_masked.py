"""Masks of invalid actions: the vector that begins with the mask, the policy over the valid choices, whole runs."""

import gymnasium as gym
import numpy as np
import probe_envs
import pytest

from helpers.files import defines, each, load, script
from helpers.processes import inspect_runs
from helpers.refusals import refuse_all
from helpers.scalars import raw_scalars

torch = pytest.importorskip("torch")
masks = each(lambda name: defines(name, "class MaskFirst"))
ENVS = {"MaskedMulti-v0": [3, 5], "MaskedDiscrete-v0": [4]}


@masks
def test_the_vector_begins_with_the_padded_mask(name):
    for env_id, nvec in (ENVS | {"MaskedTuple-v0": [3, 5]}).items():
        envs = load(name).make_envs(f"probe_envs:{env_id}", 2)
        obs, _ = envs.reset(seed=3)
        assert envs.single_action_space.nvec.tolist() == nvec
        for i in range(2):
            alone = gym.make(f"probe_envs:{env_id}").unwrapped
            parts, _ = alone.reset(seed=3 + i)
            padded = [list(valid) + [0] * (max(nvec) - len(valid)) for valid in alone.valid]
            rest = gym.spaces.flatten(alone.observation_space, parts)
            np.testing.assert_array_equal(obs[i], np.concatenate([*padded, rest]))


def agent_and_observations(name, env_id, rows):
    """An agent far from the uniform policy, and rows with masks of all kinds: (agent, obs, list of valid by row)."""
    torch.manual_seed(0)
    envs, nvec = load(name).make_envs(f"probe_envs:{env_id}", 1), ENVS[env_id]
    agent = load(name).Agent(envs)
    list(agent.actor)[-1].weight.data.mul_(300)
    obs = torch.randn(rows, *envs.single_observation_space.shape)
    valid = [[torch.rand(n) < min(row / 10, 0.6) for n in nvec] for row in range(rows)]
    for row, dimensions in enumerate(valid):
        for dimension in dimensions:
            dimension[torch.randint(len(dimension), ())] = True
        pads = [torch.cat([dimension, torch.zeros(max(nvec) - len(dimension))]) for dimension in dimensions]
        obs[row, : len(nvec) * max(nvec)] = torch.cat(pads)
    return agent, obs, valid


@masks
@pytest.mark.parametrize("env_id", ENVS)
def test_probabilities_are_those_of_the_valid_choices_alone(name, env_id):
    agent, obs, valid = agent_and_observations(name, env_id, rows=60)
    width, actions, logprobs, entropies = max(ENVS[env_id]), [], [], []
    logits = agent.actor(obs)
    for row, dimensions in zip(logits, valid, strict=True):
        action, logprob, entropy = [], 0, 0
        for i, dimension in enumerate(dimensions):
            (choices,) = dimension.nonzero(as_tuple=True)
            policy = torch.distributions.Categorical(logits=row[i * width :][choices])
            drawn = policy.sample()
            action.append(choices[drawn])
            logprob, entropy = logprob + policy.log_prob(drawn), entropy + policy.entropy()
        actions.append(torch.stack(action)), logprobs.append(logprob), entropies.append(entropy)
    expected = torch.stack(logprobs), torch.stack(entropies)
    assert expected[1].min() == 0 and expected[1].max() > 0.5, "some rows leave one choice only, others several"
    result = agent.evaluate(obs, torch.stack(actions))
    torch.testing.assert_close(result[:2], expected)
    torch.testing.assert_close(result[2], agent.get_value(obs))

    # through the loss, an invalid choice's logit gets no gradient, not even a small one
    kept = {}
    agent.actor.forward = lambda x: kept.setdefault("logits", logits.detach().requires_grad_())
    logprob, entropy, _ = agent.evaluate(obs, torch.stack(actions))
    (logprob.exp() + 0.3 * entropy).sum().backward()
    gradient, several = kept["logits"].grad, expected[1] > 0
    invalid = obs[:, : gradient.shape[1]] == 0
    assert (gradient[invalid] == 0).all() and torch.isfinite(gradient).all()
    assert (gradient[several].abs().sum(1) > 0).all()


@masks
@pytest.mark.parametrize("env_id", ENVS)
def test_draws(name, env_id):
    """Each dimension by itself follows the softmax over its valid choices."""
    agent, obs, valid = agent_and_observations(name, env_id, rows=20)
    row = next(i for i, dimensions in enumerate(valid) if all(1 < x.sum() < len(x) for x in dimensions))
    obs, valid = obs[row : row + 1], valid[row]
    agent.actor[-1].weight.data.zero_()
    agent.actor[-1].bias.data.copy_(torch.linspace(-1, 1, len(agent.actor[-1].bias)))
    width, draws = max(ENVS[env_id]), 40_000
    actions = agent.get_action(obs.expand(draws, -1))
    assert actions.shape == (draws, len(valid))
    for i, dimension in enumerate(valid):
        logits = agent.actor[-1].bias.detach()[i * width : i * width + len(dimension)]
        expected = torch.where(dimension, logits, -torch.inf).softmax(0)
        shares = actions[:, i].bincount(minlength=len(dimension)) / draws
        assert (shares[~dimension] == 0).all()
        torch.testing.assert_close(shares, expected, rtol=0, atol=0.012)
        likeliest = agent.get_action(obs.expand(100, -1), deterministic=True)[:, i]
        assert (likeliest == expected.argmax()).all(), "not the likeliest of the valid choices"


@masks
def test_learns_without_an_invalid_action(name, tmp_path):
    """The environments fail at an invalid action, also in the evaluation; the updates at one that they think so."""
    flags = "--num-envs 4 --num-steps 32 --total-timesteps 12800 --learning-rate 0.005 --gamma 0.5 --save-model"
    argvs = [[*flags.split(), "--env-id", f"probe_envs:{env_id}"] for env_id in ENVS]
    inspect_runs(script(name), argvs, cwd=tmp_path)
    for env_id, nvec in ENVS.items():
        (folder,) = (tmp_path / "runs").glob(f"*{env_id}*")
        scalars = raw_scalars(folder)
        returns = [value for tag, _, value in scalars if tag == "charts/episodic_return"]
        assert len(returns) == 12800 / 4
        assert np.mean(returns[:50]) < 0.75 * 4 * len(nvec)
        assert np.mean(returns[-50:]) > 0.95 * 4 * len(nvec)
        evaluated = [value for tag, _, value in scalars if tag == "eval/episodic_return"]
        assert np.mean(evaluated) > 0.9 * 4 * len(nvec)


class WrongMask(probe_envs.Masked):
    def look(self):
        obs, info = super().look()
        return obs, {"action_mask": info["action_mask"][1:]}


@masks
def test_masks_that_are_missing_or_too_short(name, tmp_path):
    cases = [
        ["--env-id", "probe_envs:ConstantRewardDiscrete-v0"],
        ["--env-id", "probe_envs:ConstantRewardContinuous-v0"],
    ]
    missing, continuous = refuse_all(name, cases, tmp_path)
    assert "action_mask of 2" in missing and "ppo.py, ppo_trxl.py need none" in missing
    assert "ppo_continuous_action.py" in continuous
    gym.register("WrongMask-v0", WrongMask, kwargs={"action_space": gym.spaces.Discrete(4), "in_info": True})
    with pytest.raises(gym.error.Error, match="WrongMask-v0 has no action_mask of 4 numbers"):
        load(name).make_envs("WrongMask-v0", 1)
