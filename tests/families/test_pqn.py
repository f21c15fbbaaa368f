"""PQN: Q(lambda) returns against their definition, alone and over a whole run; exploration, loss and network."""

import numpy as np
import pytest

from helpers.files import defines, discrete_envs, each, family, load, require_for, script, uses
from helpers.processes import inspect_run, run_dir
from helpers.scalars import raw_scalars

torch = pytest.importorskip("torch")

has_returns = each(lambda name: defines(name, "def lambda_returns("))
on_vectors = each(lambda name: defines(name, "def lambda_returns(") and not defines(name, "Conv2d"))


def returns_of_episode(rewards, values, last_value, gamma, q_lambda):
    """As their definition: a mean of n-step returns, n from 1 to the end of one stretch without an end inside.

    n < all has the weight (1 - lambda) lambda^(n - 1), the longest one what is left: lambda^(n - 1).
    """
    length, returns = len(rewards), []
    for t in range(length):
        total = 0.0
        for n in range(1, length - t + 1):
            after = last_value if t + n == length else values[t + n]
            n_step = sum(gamma**k * rewards[t + k] for k in range(n)) + gamma**n * after
            total += (1 if t + n == length else 1 - q_lambda) * q_lambda ** (n - 1) * n_step
        returns.append(total)
    return returns


def expected_returns(rewards, values, next_value, end, final, gamma, q_lambda):
    """Stretch by stretch over (num_steps, num_envs) arrays; `end` has "no", "terminated" or "truncated"."""
    expected = np.zeros(rewards.shape)
    for env in range(rewards.shape[1]):
        start = 0
        for t in range(len(rewards)):
            if end[t, env] != "no" or t == len(rewards) - 1:
                last = {"terminated": 0.0, "truncated": final[t, env], "no": next_value[env]}[end[t, env]]
                part = slice(start, t + 1)
                expected[part, env] = returns_of_episode(rewards[part, env], values[part, env], last, gamma, q_lambda)
                start = t + 1
    return expected


def test_the_oracle_by_hand():
    """Rewards 1 and 2, values 10 and 20, then 40, all at 1/2: 1-step 1 + 10, 2-step 1 + 1 + 10; the last 2 + 20."""
    assert returns_of_episode([1, 2], [10, 20], 40, 0.5, 0.5) == [0.5 * 11 + 0.5 * 12, 22]


@has_returns
@pytest.mark.parametrize("q_lambda", [0.0, 0.65, 1.0])
def test_lambda_returns(name, q_lambda):
    rng = np.random.default_rng(0)
    num_steps, num_envs, gamma = 30, 6, 0.97
    rewards, values, final = rng.normal(size=(3, num_steps, num_envs)).astype(np.float32)
    next_value = rng.normal(size=num_envs).astype(np.float32)
    end = rng.choice(["no", "terminated", "truncated"], p=[0.7, 0.15, 0.15], size=(num_steps, num_envs))
    end[-2:, :3] = [["no", "no", "no"], ["no", "terminated", "truncated"]]  # every way in which a rollout can end
    end[-2:, 3:] = [["terminated", "truncated", "no"], ["no", "no", "terminated"]]
    final = np.where(end == "truncated", final, 0).astype(np.float32)
    dones = (end != "no").astype(np.float32)
    result = load(name).lambda_returns(rewards.copy(), values, next_value, dones, final, gamma, q_lambda)
    expected = expected_returns(rewards, values, next_value, end, final, gamma, q_lambda)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


FOLLOW = """
import numpy as np
import gymnasium as gym

result |= {"stream": [], "observations": []}
step, reset = gym.vector.SyncVectorEnv.step, gym.vector.SyncVectorEnv.reset


def follow_reset(self, **options):
    out = reset(self, **options)
    result["observations"].append(np.array(out[0]))
    return out


def follow_step(self, actions):
    out = step(self, actions)
    final = np.array(out[0])
    over = out[2] | out[3]
    if over.any():
        final[over] = np.stack(out[4]["final_obs"][over])
    result["stream"].append((np.array(actions), np.array(out[1]), np.array(out[2]), np.array(out[3]), final))
    result["observations"].append(np.array(out[0]))
    return out


gym.vector.SyncVectorEnv.step, gym.vector.SyncVectorEnv.reset = follow_step, follow_reset
"""
VALUES = """
def q(x):
    return q_network(torch.from_numpy(np.array(x, dtype=np.float32))).detach().numpy()


result |= {"returns": returns, "b_returns": b_returns.numpy(), "b_actions": b_actions.numpy(), "args": vars(args)}
result["epsilon"] = epsilon
result["q"] = q(np.array(result["observations"]))
result["final_q"] = q(np.array([row[-1] for row in result["stream"]]))
"""


@on_vectors
@pytest.mark.parametrize("env_id", ["CartPole-v1", "probe_envs:TruncationStateDiscrete-v0"])
def test_returns_of_a_run(name, env_id, tmp_path):
    """With a step size of zero the network at the end is the one that acted; every state is valued by itself."""
    require_for(name)
    argv = ["--num-envs", 3, "--num-steps", 40, "--total-timesteps", 240, "--learning-rate", 0, "--gamma", 0.9]
    got = inspect_run(script(name), *argv, "--env-id", env_id, cwd=tmp_path, before=FOLLOW, after=VALUES)
    actions, rewards, terminated, truncated, _ = (np.array(column) for column in zip(*got["stream"][-40:]))
    values, final_values = got["q"].max(-1), got["final_q"].max(-1)
    end = np.where(terminated, "terminated", np.where(truncated, "truncated", "no"))
    assert (end != "no").any()
    last = values[-41:-1], values[-1], end, final_values[-40:]
    expected = expected_returns(rewards, *last, 0.9, got["args"]["q_lambda"])
    np.testing.assert_allclose(got["returns"], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(got["b_returns"], got["returns"].flatten())
    np.testing.assert_array_equal(got["b_actions"], actions.flatten())


@on_vectors
def test_exploration_of_a_run(name, tmp_path):
    """With two actions half of the random ones are greedy; the rate falls from 1 to 0 over half of the steps."""
    require_for(name)
    argv = ["--num-envs", 4, "--num-steps", 50, "--total-timesteps", 4000, "--learning-rate", 0]
    argv += ["--start-e", 1, "--end-e", 0, "--exploration-fraction", 0.5]
    got = inspect_run(script(name), *argv, cwd=tmp_path, before=FOLLOW, after=VALUES)
    greedy = got["q"][:-1].argmax(-1) == np.array([row[0] for row in got["stream"]])
    assert got["epsilon"] == 0
    assert greedy[:100].mean() == pytest.approx(0.5 + 0.5 * 0.1, abs=0.1)
    assert all(0.35 < column.mean() < 0.8 for column in greedy[:100].T), "environments do not draw for themselves"
    assert greedy[400:500].mean() == pytest.approx(0.5 + 0.5 * 0.9, abs=0.06)
    assert greedy[500:].all(), "the schedule counts environment steps: it ends after half of them"


@each(lambda name: defines(name, "def pqn_loss("))
def test_loss_of_an_update(name):
    """The squared distance of the taken actions' values to their targets; time is a dimension of those with memory."""
    torch.manual_seed(0)
    for shape in [(50,), (10, 5)] if defines(name, "hidden_gates") else [(50,)]:
        q_values, actions, targets = torch.randn(*shape, 3), torch.randint(3, shape), torch.randn(shape)
        td_loss, logged = load(name).pqn_loss(q_values, actions, targets)
        pairs = zip(q_values.reshape(-1, 3).tolist(), actions.flatten().tolist(), strict=True)
        taken = np.array([row[action] for row, action in pairs])
        expected = [np.mean((taken - targets.flatten().numpy()) ** 2), taken.mean()]
        got = [td_loss, logged["td_loss"], logged["q_values"]]
        np.testing.assert_allclose(got, [expected[0], *expected], rtol=1e-4)


UPDATE_ONCE_MORE = """
before = weights.detach().clone()
logged = update(torch.randperm(batch_size)[:minibatch_size])
result |= {"logged": {key: x.item() for key, x in logged.items()}, "grad_norm": weights.grad.norm().item()}
result |= {"moved": (weights - before).abs().max().item(), "losses": losses.take()}
"""


@on_vectors
def test_clipped_gradient_of_a_run(name, tmp_path):
    require_for(name)
    argv = ["--num-envs", 2, "--num-steps", 32, "--total-timesteps", 256, "--max-grad-norm", 0.01]
    got = inspect_run(script(name), *argv, cwd=tmp_path, after=UPDATE_ONCE_MORE)
    expected = {f"losses/{key}": pytest.approx(value) for key, value in got["logged"].items()}
    assert got["losses"] == expected
    assert got["grad_norm"] <= 0.01 * 1.001 and got["moved"] > 0


@on_vectors
def test_network(name):
    """Every linear layer is orthogonal with gain sqrt(2), every hidden one is normalised before its ReLU."""
    layers = list(load(name).QNetwork(discrete_envs()))
    assert [type(layer).__name__ for layer in layers] == ["Linear", "LayerNorm", "ReLU"] * 2 + ["Linear"]
    for layer in layers[::3]:
        weight = layer.weight if layer.out_features < layer.in_features else layer.weight.T
        torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(len(weight)), atol=1e-5, rtol=0)
        assert not layer.bias.any()


# Atari games

FOLLOW_GAMES = """
import envpool
import numpy as np

make = envpool.make
result |= {"stream": [], "pools": 0}


class Follow:
    def __init__(self, pool):
        self.pool, self.close = pool, pool.close

    def reset(self, ids=None):
        out = self.pool.reset(*([] if ids is None else [ids]))
        result["stream"].append(("reset", out[1]["env_id"].copy(), out[0].copy()))
        return out

    def step(self, actions):
        out = self.pool.step(actions)
        result["stream"].append(("step", actions.copy(), *(x.copy() for x in out[:4]), out[4]["lives"].copy()))
        return out


def make_short(*args, **options):
    result["pools"] += 1
    pool = make(*args, **options, max_episode_steps=30)
    return Follow(pool) if result["pools"] == 1 else pool


envpool.make = make_short
"""
EPISODES = """
def values_of(observations):
    x = torch.from_numpy(np.array(observations))
    with torch.no_grad():
        if not hasattr(q_network, "hidden_gates"):
            return q_network(x).numpy()
        state, rows = torch.zeros((2, 1, 128)), []
        for frame in x:  # one at a time from the first of an episode
            q, state = q_network(frame[None, None], state, torch.zeros((1, 1)))
            rows.append(q[0, 0].numpy())
        return np.array(rows)


result["rows"] = []  # per environment, per step: q, action, clipped reward, end, q of what follows
for i in range(args.num_envs):
    rows, episode, first, lives = [], [], None, 5
    for kind, *record in result["stream"]:
        if kind == "reset":
            if i in record[0]:
                first, lives = record[1][list(record[0]).index(i)], 5
            continue
        if first is not None:
            begin, first = first, None
            seen, episode = [begin], []
        actions_, next_, reward_, terminated_, truncated_, lives_ = (column[i] for column in record)
        lost = 0 < lives_ < lives
        lives = lives_
        seen.append(next_)
        end = "terminated" if terminated_ or lost else "truncated" if truncated_ else "no"
        episode.append((actions_, np.sign(reward_), end))
        if end != "no":
            q = values_of(seen)
            rows += [(q[t], *row, q[t + 1]) for t, row in enumerate(episode)]
            seen, episode = [next_], []
    q = values_of(seen)
    rows += [(q[t], *row, q[t + 1]) for t, row in enumerate(episode)]
    result["rows"].append(rows)
result |= {"returns": returns, "args": vars(args)}
del result["stream"]
"""


@each(lambda name: family(name) == "pqn" and uses(name, "envpool"))
def test_returns_and_loss_of_a_run_on_atari(name, tmp_path):
    """Games are cut off after 30 steps. Each episode is valued again from its first observation to its final one.

    A step size of zero keeps the network, so the loss of all minibatches is that of the rollout under these values.
    """
    require_for(name)
    argv = "--num-envs 2 --num-steps 64 --num-minibatches 2 --total-timesteps 256 --learning-rate 0".split()
    got = inspect_run(script(name), *argv, cwd=tmp_path, before=FOLLOW_GAMES, after=EPISODES)
    rows = [env[-64:] for env in got["rows"]]
    assert [len(env) for env in got["rows"]] == [128, 128]
    q, actions, rewards, end, after = (
        np.array(column).swapaxes(0, 1) for column in ([[row[k] for row in env] for env in rows] for k in range(5))
    )
    assert (end == "truncated").any() and (end[-1] == "no").any() and (end[0] == "no").any()
    values, following = q.max(-1), after.max(-1)
    gamma, q_lambda = got["args"]["gamma"], got["args"]["q_lambda"]
    expected = expected_returns(rewards, values, following[-1], end, following, gamma, q_lambda)
    np.testing.assert_allclose(got["returns"], expected, rtol=1e-3, atol=1e-4)
    taken = np.take_along_axis(q, actions[..., None].astype(int), axis=-1)[..., 0]
    scalars = raw_scalars(run_dir(tmp_path))
    (td_loss,) = [value for tag, step, value in scalars if tag == "losses/td_loss" and step == 256]
    (q_values,) = [value for tag, step, value in scalars if tag == "losses/q_values" and step == 256]
    assert td_loss == pytest.approx(np.mean((taken - expected) ** 2), rel=1e-3)
    assert q_values == pytest.approx(taken.mean(), rel=1e-3, abs=1e-4)
