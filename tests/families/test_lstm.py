"""The files with an LSTM: the cell against torch's, what it forgets at an episode's start, and whole runs of PPO.

A run is followed from outside: what it hands to the environments, and the weights that it acts with. Each episode is
then played again from a state of zero, one observation at a time, and has to give the values, probabilities and
advantages that the update learns from.
"""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

from helpers.files import continuous_envs, defines, discrete_envs, each, family, load, require_for, script, uses
from helpers.oracles import FOLLOW, advantages_of_episode
from helpers.processes import inspect_run
from helpers.refusals import refuse

torch = pytest.importorskip("torch")

has_lstm = each(lambda name: defines(name, "self.hidden_gates"))
ppo_with_lstm = each(lambda name: defines(name, "self.hidden_gates") and family(name) == "ppo")


def lstm_case(name, steps=12, envs=3):
    torch.manual_seed(0)
    module = load(name)
    network = (module.QNetwork if hasattr(module, "QNetwork") else module.Agent)(
        continuous_envs() if defines(name, "actor_logstd") else discrete_envs()
    )
    if defines(name, "Conv2d"):
        obs = torch.randint(256, (steps, envs, 1, 84, 84), dtype=torch.uint8)
    else:
        obs = torch.randn(steps, envs, 4)
    starts = (torch.rand(steps, envs) < 0.25).float()
    starts[:, 0], starts[0, 1], starts[-1, -1] = 0, 1, 1
    return network, obs, torch.randn(2, envs, 128), starts


@has_lstm
@torch.no_grad()
def test_a_sequence_equals_its_steps(name):
    network, obs, state, starts = lstm_case(name)
    outputs, last = network(obs, state, starts)
    for t in range(len(obs)):
        state = state * (1 - starts[t])[None, :, None]  # forget by hand
        step_outputs, state = network(obs[t : t + 1], state, torch.zeros(1, 3))
        torch.testing.assert_close(step_outputs[0], outputs[t], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, state, rtol=1e-4, atol=1e-5)


@has_lstm
@torch.no_grad()
def test_the_cell_is_that_of_torch(name):
    """torch orders the gates write, forget, candidate, read."""
    network, obs, state, _ = lstm_case(name)
    if hasattr(network, "normalize"):
        features = network.network(network.normalize(obs))
    else:
        features = network.network(obs.flatten(0, 1) / 255).unflatten(0, obs.shape[:2])
    lstm = torch.nn.LSTM(features.shape[2], 128)
    ours = {"ih": network.input_gates, "hh": network.hidden_gates}
    for kind, gates in ours.items():
        for part in ("weight", "bias"):
            forget, write, read, candidate = getattr(gates, part).normal_(std=0.1).chunk(4)
            getattr(lstm, f"{part}_{kind}_l0").copy_(torch.cat([write, forget, candidate, read]))
    hidden, (h, c) = lstm(features, (state[:1], state[1:]))
    outputs, last = network(obs, state, torch.zeros(obs.shape[:2]))
    expected = network.head(hidden) if hasattr(network, "head") else hidden
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, torch.cat([h, c]), rtol=1e-4, atol=1e-5)


@has_lstm
def test_nothing_leaks_across_a_start(name):
    network, obs, state, starts = lstm_case(name, steps=8, envs=2)
    starts.zero_()
    starts[5, 0] = 1
    state.requires_grad_()
    outputs, _ = network(obs, state, starts)
    early = torch.arange(8).view(-1, *[1] * (obs.ndim - 1)) < 5
    changed, _ = network(torch.where(early, 255 - obs, obs), state + 1, starts)
    torch.testing.assert_close(changed[5:, 0], outputs[5:, 0])
    assert not torch.allclose(changed[5:, 1], outputs[5:, 1]), "the other environment remembers"
    (gradient,) = torch.autograd.grad(outputs[5:, 0].sum() + outputs[5:, 1].sum(), state)
    assert not gradient[:, 0].any() and gradient[:, 1].any()


@has_lstm
def test_initialisation_of_the_lstm(name):
    network, *_ = lstm_case(name)
    for gates in (network.input_gates, network.hidden_gates):
        weight = gates.weight.T @ gates.weight
        torch.testing.assert_close(weight, torch.eye(len(weight)), atol=1e-4, rtol=0)
        assert not gates.bias.any()


@has_lstm
def test_minibatches_are_whole_environments(name, tmp_path):
    argv = ["--num-envs", 6, "--num-minibatches", 4, "--num-steps", 64]
    line = refuse(name, *argv, cwd=tmp_path)
    assert "--num-minibatches" in line and "--num-envs" in line


# PPO


def distribution(agent, hidden):
    if hasattr(agent, "actor_mean"):
        gaussian = torch.distributions.Normal(agent.actor_mean(hidden), agent.actor_logstd.exp())
        return torch.distributions.Independent(gaussian, 1)
    return torch.distributions.Categorical(logits=agent.actor(hidden))


@ppo_with_lstm
@torch.no_grad()
def test_log_probabilities_and_entropy_of_a_sequence(name):
    agent, obs, state, starts = lstm_case(name)
    for head in (agent.actor_mean, agent.critic) if hasattr(agent, "actor_mean") else (agent.actor, agent.critic):
        for param in head.parameters():
            param.add_(0.3 * torch.randn_like(param))  # away from the uniform start
    if hasattr(agent, "actor_logstd"):
        agent.actor_logstd.copy_(torch.tensor([0.3, -0.7, 0.1]))
        agent.obs_rms.update(torch.randn(100, 4) * 3 + 1)
    hidden, last = agent(obs, state, starts)
    policy = distribution(agent, hidden)
    actions = policy.sample()
    logprob, entropy, value = agent.evaluate(obs, actions, state, starts)
    torch.testing.assert_close(logprob, policy.log_prob(actions), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy, policy.entropy().expand(12, 3))
    torch.testing.assert_close(value, agent.critic(hidden).squeeze(-1))
    torch.testing.assert_close(agent.get_value(obs[0], state, starts[0]), value[0], rtol=1e-4, atol=1e-5)
    for t in range(12):
        _, state = agent.get_action(obs[t], state, starts[t])
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)


@ppo_with_lstm
@torch.no_grad()
def test_drawn_actions_follow_the_policy(name):
    """Many environments in the same state draw for themselves."""
    agent, obs, state, _ = lstm_case(name)
    if defines(name, "Conv2d"):  # fast, as only the head is looked at
        agent.network, agent.input_gates = torch.nn.Flatten(), torch.nn.Linear(84 * 84, 4 * 128)
        agent.actor.bias.copy_(torch.tensor([0.5, -1.0, 1.5]))
    else:
        agent.actor_logstd.copy_(torch.tensor([0.5, -1.0, 0.0]))
    draws, obs, state = 10_000, obs[0, :1], state[:, :1]
    policy = distribution(agent, agent(obs[None], state, torch.zeros(1, 1))[0][0, 0])
    same = obs.expand(draws, *obs.shape[1:]), state.expand(2, draws, 128), torch.zeros(draws)
    drawn, after = agent.get_action(*same)
    likeliest, after_likeliest = agent.get_action(*same, deterministic=True)
    mode = policy.probs.argmax() if defines(name, "Conv2d") else policy.mean
    torch.testing.assert_close(likeliest, mode.expand(likeliest.shape))
    torch.testing.assert_close(after_likeliest, after)
    if defines(name, "Conv2d"):
        expected = draws * policy.probs.double()
        chi_square = ((drawn.bincount(minlength=3) - expected) ** 2 / expected).sum()
        assert chi_square < 13.8  # the 99.9 % quantile with 2 degrees of freedom
    else:
        torch.testing.assert_close(drawn.mean(0), policy.mean, rtol=0, atol=0.06)
        torch.testing.assert_close(drawn.std(0), policy.stddev, rtol=0.04, atol=0)
        assert (torch.corrcoef(drawn.T) - torch.eye(3)).abs().max() < 0.05, "dimensions share their noise"


@ppo_with_lstm
@torch.no_grad()
def test_a_policy_forgets_where_the_environments_start(name):
    agent, obs, _, starts = lstm_case(name)
    starts[0] = 1
    envs = SimpleNamespace(num_envs=3)
    policy, state = load(name).policy_with_memory(agent, envs, "cpu"), None
    for t in range(12):
        envs.starts = starts[t].bool().numpy()
        torch.manual_seed(t)
        action = policy(obs[t].numpy())
        torch.manual_seed(t)
        state = torch.zeros(2, 3, 128) if t == 0 else state * (1 - starts[t])[None, :, None]
        expected, state = agent.get_action(obs[t].float(), state, torch.zeros(3))
        np.testing.assert_allclose(action, expected, rtol=1e-4, atol=1e-5)


@each(lambda name: defines(name, "class AtariWithStarts"))
def test_lives_start_afresh_in_whole_games_too(name):
    """Where an evaluation plays on, training ends an episode: both hand out the same starts."""
    training, whole = (load(name).make_envs("BreakoutNoFrameskip-v4", 3, life_loss) for life_loss in (True, False))
    assert training.single_observation_space.shape == (1, 84, 84)
    rng, lost = np.random.default_rng(0), 0
    for envs in (training, whole):
        envs.reset(seed=1)
        assert envs.starts.all()
    for _ in range(300):
        actions = rng.integers(4, size=3)
        (_, _, terminated, truncated, _), (_, _, over, _, _) = (envs.step(actions) for envs in (training, whole))
        np.testing.assert_array_equal(training.starts, terminated | truncated)
        np.testing.assert_array_equal(whole.starts, training.starts)
        lost += (whole.starts & ~over).sum()
    assert lost >= 3


def test_episodes_start_afresh_in_vector_environments():
    envs = load("ppo_continuous_action_lstm").make_envs("probe_envs:OwnBounds-v0", 3)
    assert isinstance(envs, gym.vector.SyncVectorEnv)
    envs.reset(seed=1)
    assert envs.starts.all()
    for _ in range(30):
        _, _, terminated, truncated, _ = envs.step(np.ones((3, 2), dtype=np.float32))
        np.testing.assert_array_equal(envs.starts, terminated | truncated)


REPLAY = """
stream, agents = result.pop("stream"), result.pop("agents")


def listen(agent, frame, state):
    with torch.no_grad():
        x = torch.as_tensor(np.array(frame)).to(b_obs.dtype)[None, None]
        hidden, state = agent(x, state, torch.zeros((1, 1)))
        return hidden[0], state, agent.critic(hidden).item()


states, rows = [torch.zeros((2, 1, 128)) for _ in range(args.num_envs)], []
for before, (action, reward, terminated, truncated, final, version), after in zip(
    stream[::2], stream[1::2], stream[2::2]
):
    row = []
    for i in range(args.num_envs):
        agent_then = agents[version]
        hidden, states[i], v = listen(agent_then, before[i], states[i])
        if hasattr(agent, "actor_mean"):
            policy = torch.distributions.Normal(agent_then.actor_mean(hidden), agent_then.actor_logstd.exp())
            logprob = policy.log_prob(torch.from_numpy(action[i])).sum().item()
        else:
            logprob = torch.distributions.Categorical(logits=agent_then.actor(hidden)).log_prob(torch.tensor(action[i]))
            logprob = logprob.item()
        end = "terminated" if terminated[i] else "truncated" if truncated[i] else "no"
        _, _, final_value = listen(agent_then, final[i], states[i])
        row.append((v, logprob, reward[i], end, final_value))
        if end != "no":
            states[i] = torch.zeros((2, 1, 128))
    rows.append(row)
result |= {"rows": rows, "args": vars(args), "final_values": final_values, "starts": starts, "dones": dones}
result |= {"values": b_values.numpy(), "logprobs": b_logprobs.numpy(), "advantages": advantages}
result["scale"] = agent.return_rms.std.item() if hasattr(agent, "return_rms") else None
result["states"] = [act_state.numpy()[:, i : i + 1] for i in range(args.num_envs)], [state.numpy() for state in states]
"""


@ppo_with_lstm
def test_a_run_learns_from_what_it_acted_on(name, tmp_path):
    """Episodes are cut off early; the second rollout goes on with the states of the first, under other weights."""
    require_for(name)
    if uses(name, "ale_py"):
        follow = FOLLOW.replace("CLASS_MODULE", "ale_py.vector_env").replace("CLASS", "AtariVectorEnv")
        follow, flags = follow.replace("OPTIONS", "{'max_num_frames_per_episode': 100}"), []
    else:
        follow = FOLLOW.replace("CLASS_MODULE", "gymnasium.vector").replace("CLASS", "SyncVectorEnv")
        follow, flags = follow.replace("OPTIONS", "{}"), ["--env-id", "probe_envs:OwnBounds-v0"]
    argv = "--num-envs 4 --num-steps 27 --num-minibatches 2 --update-epochs 2 --total-timesteps 216".split()
    got = inspect_run(script(name), *argv, *flags, cwd=tmp_path, before=follow, after=REPLAY)
    assert len(got["rows"]) == 54
    columns = [np.array([[row[i][k] for i in range(4)] for row in got["rows"][27:]]) for k in range(5)]
    values, logprobs, rewards, end, following = columns
    assert (end == "truncated").any() and (end[-1] == "no").any()
    close = {"rtol": 1e-3, "atol": 1e-4}
    np.testing.assert_allclose(got["values"].reshape(27, 4), values, **close)
    np.testing.assert_allclose(got["logprobs"].reshape(27, 4), logprobs, **close)
    cut = end == "truncated"
    np.testing.assert_allclose(got["final_values"], np.where(cut, following, 0), **close)
    previous = [got["rows"][26][i][3] != "no" for i in range(4)]
    np.testing.assert_array_equal(got["starts"], np.vstack([previous, (end != "no")[:-1]]))

    rewards = np.sign(rewards) if got["scale"] is None else (rewards / got["scale"]).clip(-10, 10)
    expected = np.zeros((27, 4))
    for i in range(4):
        start = 0
        for t in range(27):
            if end[t, i] != "no" or t == 26:
                last, part = 0.0 if end[t, i] == "terminated" else following[t, i], slice(start, t + 1)
                rest = last, got["args"]["gamma"], got["args"]["gae_lambda"]
                expected[part, i] = advantages_of_episode(rewards[part, i], values[part, i], *rest)
                start = t + 1
    np.testing.assert_allclose(got["advantages"], expected, **close)

    for i, (kept, played) in enumerate(zip(*got["states"], strict=True)):
        if end[-1, i] == "no":
            np.testing.assert_allclose(kept, played, **close)


@pytest.mark.parametrize("robot", ["HalfCheetah", "Hopper", "InvertedPendulum", "Walker2d"])
def test_robots_without_velocities(robot):
    """What is left of an observation are the positions, which the simulator has without velocities."""
    require_for("ppo_continuous_action")
    env = gym.make(f"no_velocities:{robot}NoVelocities-v4")
    env.reset(seed=1)
    for _ in range(3):
        obs = env.step(env.action_space.sample())[0]
    assert env.observation_space.contains(obs)
    hidden = int(robot != "InvertedPendulum")  # how far a walker has come
    np.testing.assert_array_equal(obs, env.unwrapped.data.qpos[hidden:])
