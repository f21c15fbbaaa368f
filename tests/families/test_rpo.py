"""RPO scores the actions of an update under means that uniform noise has moved; without the noise it is PPO."""

import numpy as np
import pytest

from helpers.files import continuous_envs, load, require_for, script, smoke
from helpers.processes import RUN, environment, inspect_run, run, run_dir
from helpers.scalars import raw_scalars, untimed

torch = pytest.importorskip("torch")
NAME, ALPHA = "rpo_continuous_action", 0.3


def shifts(agent, obs, rpo_alpha, deviation=2.0):
    """The noise on each mean, solved from the log-probabilities of two actions that differ in one dimension at a time.

    For the same noise u, log p(a + e) - log p(a) = (2 e (u - a) - e**2) / (2 deviation**2) where the mean is zero.
    """
    with torch.no_grad():
        agent.actor_logstd.fill_(np.log(deviation))
        for param in agent.actor_mean.parameters():
            param.zero_()
    columns = []
    for dimension in range(agent.actor_logstd.numel()):
        step = torch.zeros(len(obs), agent.actor_logstd.numel(), dtype=obs.dtype)
        step[:, dimension] = 1.0
        state, scores = torch.get_rng_state(), []
        for action in (torch.zeros_like(step), step):
            torch.set_rng_state(state)
            scores.append(agent.evaluate(obs, action, rpo_alpha)[0])
        torch.set_rng_state(state)
        columns.append((scores[1] - scores[0]) * deviation**2 + 0.5)
    agent.evaluate(obs, step, rpo_alpha)  # the next call draws other numbers
    return torch.stack(columns, dim=1).detach()


def test_the_noise_is_uniform_and_fresh():
    torch.manual_seed(0)
    agent, obs = load(NAME).Agent(continuous_envs()).double(), torch.randn(20_000, 4).double()
    first, second = shifts(agent, obs, ALPHA), shifts(agent, obs, ALPHA)
    for noise in (first, second):
        assert (
            noise.abs().max() <= ALPHA
            and (noise.amax(0) > 0.99 * ALPHA).all()
            and (noise.amin(0) < -0.99 * ALPHA).all()
        )
        counts = torch.stack([column.histc(10, -ALPHA, ALPHA) for column in noise.T])
        chi_square = ((counts - 2000) ** 2 / 2000).sum(1)
        assert (chi_square < 27.9).all()  # the 99.9 % quantile with 9 degrees of freedom
    both = torch.cat([first, second, first.roll(1, 0)], dim=1)  # dimensions, minibatches and neighbouring samples
    assert (torch.corrcoef(both.T) - torch.eye(9)).abs().max() < 0.04


def test_log_probabilities_are_those_of_the_moved_mean():
    torch.manual_seed(0)
    agent, obs, action = load(NAME).Agent(continuous_envs()), torch.randn(50, 4), torch.randn(50, 3)
    agent.actor_logstd.data.copy_(torch.tensor([0.3, -0.7, 0.1]))
    state = torch.get_rng_state()
    noise = torch.rand(50, 3) * 2 * ALPHA - ALPHA
    policy = torch.distributions.Normal(agent.actor_mean(agent.normalize(obs)) + noise, agent.actor_logstd.exp())
    torch.set_rng_state(state)
    logprob, entropy, value = agent.evaluate(obs, action, ALPHA)
    torch.testing.assert_close(logprob, policy.log_prob(action).sum(1))
    torch.testing.assert_close(entropy, policy.entropy().sum(1))
    torch.testing.assert_close(value, agent.get_value(obs))


SCORE = """
calls = []
evaluate = agent.evaluate
agent.evaluate = lambda *arguments: calls.append(arguments[2:]) or evaluate(*arguments)
inds = torch.arange(minibatch_size, device=device)
lr.zero_()
logged = [[x.item() for x in update(inds).values()] for _ in range(2)]
result |= {"calls": calls, "log_ratios": [-values[3] for values in logged]}
"""


def test_only_the_update_is_noisy(tmp_path):
    """Two updates on one minibatch without a step of the optimizer between them: other noise, other ratios."""
    require_for(NAME)
    got = inspect_run(script(NAME), *smoke(NAME, rpo_alpha=ALPHA), cwd=tmp_path, after=SCORE)
    assert got["calls"] == [(ALPHA,)] * 2
    assert got["log_ratios"][0] != got["log_ratios"][1]


@pytest.mark.cuda
def test_a_captured_update_draws_fresh_noise(tmp_path):
    """A replayed graph runs no Python: the two replays call nothing, but have other ratios."""
    require_for(NAME)
    argv = smoke(NAME, rpo_alpha=ALPHA)
    got = inspect_run(script(NAME), *argv, cwd=tmp_path, after=SCORE, env=environment(gpu=True))
    assert got["calls"] == []
    assert got["log_ratios"][0] != got["log_ratios"][1]


def test_without_noise_it_is_ppo(tmp_path):
    """The same random numbers, metrics and weights, bit by bit."""
    runs = []
    for name, flags in (("ppo_continuous_action", []), (NAME, ["--rpo-alpha", 0]), (NAME, ["--rpo-alpha", 1e-3])):
        require_for(name)
        folder = tmp_path / f"{len(runs)}"
        folder.mkdir()
        run(script(name), *smoke(name), *flags, "--save-model", cwd=folder)
        model = (run_dir(folder) / "model.safetensors").read_bytes()
        runs.append((model, untimed(raw_scalars(run_dir(folder)))))
    ppo, silent, noisy = runs
    assert ppo == silent
    assert ppo[0] != noisy[0]


OVERFLOW = """
import gymnasium as gym
import numpy as np

step, calls = gym.vector.SyncVectorEnv.step, 0


def overflow(self, actions):
    global calls
    calls += 1
    obs, *rest = step(self, actions)
    obs[0, 0] = np.inf if calls == 150 else obs[0, 0]
    return obs, *rest


gym.vector.SyncVectorEnv.step = overflow
"""


@pytest.mark.parametrize("name", ["ppo_continuous_action", NAME, "ppo_continuous_action_lstm"])
def test_an_infinite_observation_leaves_a_good_checkpoint(name, tmp_path):
    """It is clipped for the networks, but not for the statistics, which are saved with them."""
    require_for(name)
    argv = smoke(name, checkpoint_freq=1, env_id="probe_envs:OwnBounds-v0")
    done = run(script(name), *argv, cwd=tmp_path, code=1, driver=OVERFLOW + RUN)
    assert "Last good checkpoint" in done.stderr
    checkpoint = torch.load(run_dir(tmp_path) / "checkpoint.pt")
    assert checkpoint["global_step"] == 256
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())
