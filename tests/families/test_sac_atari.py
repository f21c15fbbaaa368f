"""sac_atari.py: its equations and one more update of a run against loops over samples and actions, and its clock."""

import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

from helpers.files import load, script, smoke
from helpers.oracles import REWARD, convolutional
from helpers.processes import inspect_run, run

torch = pytest.importorskip("torch")

NAME = "sac_atari"


def envs(num_actions):
    return SimpleNamespace(single_action_space=gym.spaces.Discrete(num_actions))


def slow_entropy(probabilities):
    return -sum(p * math.log(p) for p in probabilities)


def slow_value(probabilities, q_values, alpha):
    return sum(p * (q - alpha * math.log(p)) for p, q in zip(probabilities, q_values, strict=True))


def test_expectations_are_sums_over_actions():
    rng = np.random.default_rng(0)
    policy, q_values = rng.dirichlet(np.full(5, 0.3), size=40), rng.normal(size=(40, 5))
    logprob = torch.tensor(policy).log()
    entropy = load(NAME).entropy(logprob)
    np.testing.assert_allclose(entropy, [slow_entropy(row) for row in policy], rtol=1e-6)
    value = load(NAME).soft_value(logprob, torch.tensor(q_values), 0.7)
    np.testing.assert_allclose(value, [slow_value(*rows, 0.7) for rows in zip(policy, q_values)], rtol=1e-6)


def test_the_oracles_by_hand():
    """Probabilities 1/2, 1/4, 1/4 have an entropy of 1.5 bits; the values 1, 2, 4 are worth 2 on average."""
    assert slow_entropy([0.5, 0.25, 0.25]) == pytest.approx(1.5 * math.log(2))
    assert slow_value([0.5, 0.25, 0.25], [1, 2, 4], 0.1) == pytest.approx(2 + 0.15 * math.log(2))


def test_a_certain_policy_has_no_entropy():
    logprob = torch.tensor([[0.0, 1000.0, -1000.0]]).log_softmax(1)
    assert load(NAME).entropy(logprob).item() == 0
    assert load(NAME).soft_value(logprob, torch.tensor([[1.0, 2.0, 3.0]]), 0.7).item() == 2


def test_drawn_actions_follow_the_policy():
    policy, draws = torch.tensor([0.1, 0.2, 0.3, 0.4]), 200_000
    logprob = policy.log().expand(draws, 4)
    actions = [load(NAME).draw_action(logprob, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert (actions[0] == actions[1]).all() and (actions[0] != actions[2]).any()
    counts, expected = actions[0].bincount(minlength=4), draws * policy
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # the 99.9 % quantile with 3 degrees of freedom


def test_networks_at_the_start():
    """Kaiming-normal weights, biases of zero; no two of the three networks share any."""
    torch.manual_seed(0)
    actor, qf = load(NAME).Actor(envs(9)), load(NAME).SoftQNetwork(envs(9))
    networks = [list(network.parameters()) for network in (actor, *qf)]
    for params in networks:
        assert [tuple(param.shape) for param in params[::2]] == [
            (32, 4, 8, 8),
            (64, 32, 4, 4),
            (64, 64, 3, 3),
            (512, 3136),
            (9, 512),
        ]
        for weight in params[::2]:
            assert weight.mean().item() == pytest.approx(0, abs=0.01)
            assert weight.std().item() == pytest.approx((2 / weight[0].numel()) ** 0.5, rel=0.05)
        assert not any(bias.any() for bias in params[1::2])
    for first, second, third in zip(*(params[::2] for params in networks)):
        assert (first != second).all() and (second != third).all() and (first != third).all()
    assert len({id(param) for params in networks for param in params}) == 30
    obs = torch.randint(256, (3, 4, 84, 84), dtype=torch.uint8)
    outputs = [convolutional(params, obs) for params in networks]
    torch.testing.assert_close(actor(obs), outputs[0].log_softmax(1))
    torch.testing.assert_close(qf(obs), torch.stack(outputs[1:]))


def test_loaded_policy_is_stochastic_and_repeatable(tmp_path):
    torch.manual_seed(0)
    module = load(NAME)
    agent = torch.nn.ModuleDict({"actor": module.Actor(envs(4)), "qf": module.SoftQNetwork(envs(4))})
    obs = np.random.default_rng(0).integers(256, size=(1, 4, 84, 84), dtype=np.uint8).repeat(50, axis=0)

    def play(**mode):
        module.save_file(agent.state_dict(), tmp_path / "model.safetensors")
        policy = module.load_policy(tmp_path, envs(4), "cpu", **mode)
        return np.stack([policy(obs) for _ in range(2)])

    with torch.no_grad():
        agent["actor"].network[-1].weight.mul_(0.1)
        first, again = play(), play()
        assert (first == again).all() and (first[0] != first[1]).any() and set(first.flat) == {0, 1, 2, 3}
        likeliest = agent["actor"](torch.from_numpy(obs[:1])).argmax().item()
        assert (play(deterministic=True) == likeliest).all(), "not the likeliest action"
        agent["actor"].network[-1].bias[2] = 1000.0
        assert (play() == 2).all(), "these are not the weights that were saved"


CLOCK = """
import sys

import torch
from ale_py.vector_env import AtariVectorEnv
from torch.optim.optimizer import register_optimizer_step_post_hook

result |= {"actions": [], "copies": [], "updates": []}
send, lerp_ = AtariVectorEnv.send, torch.Tensor.lerp_


def now():
    frame = sys._getframe()
    while "global_step" not in frame.f_globals:
        frame = frame.f_back
    return frame.f_globals["global_step"]


def follow_send(self, actions):
    result["actions"].append(actions.copy())
    send(self, actions)


def follow_lerp(self, end, weight):
    result["copies"].append((now(), weight))
    return lerp_(self, end, weight)


def prefer(bias):  # the third of four actions
    return bias.data.copy_(torch.arange(len(bias)) == 2).mul_(50.0 * (len(bias) == 4))


AtariVectorEnv.send, torch.Tensor.lerp_, torch.nn.init.zeros_ = follow_send, follow_lerp, prefer
register_optimizer_step_post_hook(lambda *_: result["updates"].append(now()))
"""


def test_clock_of_a_run(tmp_path):
    """With three environments too: random actions, then the policy's; updates and copies as often as with one.

    Those of a step come before the next one, so none at the last. Entropy may have no price at all.
    """
    clock = {"learning_starts": 150, "update_frequency": 10, "target_network_frequency": 7, "total_timesteps": 300}
    argv = smoke(NAME, **clock, num_envs=3, q_lr=0, policy_lr=0, batch_size=2, tau=0.4, alpha=0) + ["--no-autotune"]
    after = "result['entropy'] = target_entropy"
    got = inspect_run(script(NAME), *argv, cwd=tmp_path, before=CLOCK, after=after)
    random, chosen = np.split(np.array(got["actions"]), [50])
    counts = np.bincount(random.flat, minlength=4)
    assert ((counts - 37.5) ** 2 / 37.5).sum() < 16.3  # the 99.9 % quantile with 3 degrees of freedom
    assert (random != random[:, :1]).any(), "all environments get the same action"
    assert chosen.shape == (50, 3) and (chosen == 2).all()
    reached = [3 * math.ceil(k * 10 / 3) for k in range(31)]
    assert got["updates"] == [step for step in reached if 150 < step < 300 for _ in range(2)]  # of two optimizers
    reached = [3 * math.ceil(k * 7 / 3) for k in range(43)]
    assert got["copies"] == [(step, 0.4) for step in reached if 150 < step < 300]
    assert got["entropy"] == pytest.approx(0.89 * math.log(4))


UPDATE_ONCE_MORE = """
target_qf_weights.copy_(-target_qf_weights.roll(5))  # of another opinion
replay.rows.slots[::3, -1] = 1  # more of the transitions have terminated than did
lists = lambda network: [param.detach().clone().numpy() for param in network.parameters()]
networks = {"actor": actor, "qf1": qf[0], "qf2": qf[1], "target1": target_qf[0], "target2": target_qf[1]}
state = torch.get_rng_state()
drawn = replay.sample(args.batch_size)
torch.set_rng_state(state)
result |= {"rows": drawn[0].numpy(), "frames": drawn[1].numpy()}
result["before"] = {name: lists(network) for name, network in networks.items()} | {"log_alpha": log_alpha.item()}
logged = update()
result["after"] = {name: lists(network) for name, network in networks.items()} | {"log_alpha": log_alpha.item()}
result |= {"sums": [value.item() for value in logged.values()], "loss_names": [*logged]}
result["gradients"] = {name: [p.grad.numpy() for p in networks[name].parameters()] for name in ("actor", "qf1", "qf2")}
result["gradients"]["log_alpha"] = log_alpha.grad.item()
adams = {"actor": actor_optimizer, "qf": qf_optimizer, "log_alpha": alpha_optimizer}
result["moments"] = {}
for name, optimizer in adams.items():
    for moments in optimizer.state_dict()["state"].values():
        result["moments"][name] = [np.array(moments[key]) for key in ("exp_avg", "exp_avg_sq", "step")]
"""


def adam_step(moments, learning_rate):
    first, second, count = moments
    return -learning_rate * first / (1 - 0.9**count) / (np.sqrt(second / (1 - 0.999**count)) + 1e-4)


@pytest.mark.parametrize("switches", [["--autotune"], ["--no-autotune", "--alpha", "0.3"]])
def test_update_of_a_run(switches, tmp_path):
    """One more update of a run: losses, gradients and steps, against loops over samples and actions and autograd."""
    sizes = {"batch_size": 48, "learning_starts": 400, "total_timesteps": 500, "gamma": 0.9}
    argv = smoke(NAME, **sizes, target_entropy_scale=0.4, q_lr=0.002, policy_lr=0.001)
    got = inspect_run(script(NAME), *argv, *switches, cwd=tmp_path, before=REWARD, after=UPDATE_ONCE_MORE)
    frames, (actions, rewards, terminated) = torch.tensor(got["frames"]).float(), got["rows"][:, 5:].T
    assert terminated.any() and not terminated.all() and set(rewards.tolist()) == {-1, 0, 1}
    before = {name: [torch.tensor(x) for x in got["before"][name]] for name in got["before"] if name != "log_alpha"}
    autotune, log_alpha = switches == ["--autotune"], torch.tensor(got["before"]["log_alpha"], dtype=torch.float64)
    alpha = math.exp(log_alpha)
    assert (0.8 < alpha < 0.999) if autotune else alpha == pytest.approx(0.3)

    for param in [*before["qf1"], *before["qf2"], *before["actor"], log_alpha]:
        param.requires_grad_()
    with torch.no_grad():
        next_policy = convolutional(before["actor"], frames[:, 1:]).double().softmax(1).tolist()
        next_q = [convolutional(before[name], frames[:, 1:]).tolist() for name in ("target1", "target2")]
    targets = []
    for i in range(48):
        value = slow_value(next_policy[i], [min(pair) for pair in zip(next_q[0][i], next_q[1][i])], alpha)
        targets.append(rewards[i] + (0 if terminated[i] else 0.9 * value))
    qf_losses, q_values = [], []
    for name in ("qf1", "qf2"):
        outputs = convolutional(before[name], frames[:, :-1])
        chosen = [outputs[i, actions[i]] for i in range(48)]
        qf_losses.append(sum((q - target) ** 2 for q, target in zip(chosen, targets)) / 48)
        q_values.append(sum(q.item() for q in chosen) / 48)
    sum(qf_losses).backward()

    with torch.no_grad():  # the actor follows the critics as they are after their step
        stepped = [[torch.tensor(x) for x in got["after"][name]] for name in ("qf1", "qf2")]
        after = [convolutional(params, frames[:, :-1]) for params in stepped]
    policy = convolutional(before["actor"], frames[:, :-1]).softmax(1)
    actor_loss, alpha_loss = 0, 0
    for i in range(48):
        for a in range(4):
            price = alpha * policy[i, a].log()
            actor_loss = actor_loss + policy[i, a] * (price - min(after[0][i, a], after[1][i, a])) / 48
        entropy = slow_entropy(policy[i].tolist())
        alpha_loss = alpha_loss + log_alpha.exp() * (entropy - 0.4 * math.log(4)) / 48
    actor_loss.backward()
    alpha_loss.backward()
    new_alpha = math.exp(got["after"]["log_alpha"])
    qf_losses = [loss.item() for loss in qf_losses]
    expected = [*qf_losses, np.mean(qf_losses), *q_values, actor_loss.item(), alpha_loss.item(), new_alpha]
    np.testing.assert_allclose(got["sums"], expected, rtol=1e-3, atol=1e-5)
    names = "qf1_loss qf2_loss qf_loss qf1_values qf2_values actor_loss alpha_loss alpha"
    assert got["loss_names"] == names.split()

    for name in ("actor", "qf1", "qf2"):
        for param, gradient in zip(before[name], got["gradients"][name], strict=True):
            largest = param.grad.abs().max().item()
            assert largest > 0
            np.testing.assert_allclose(gradient, param.grad, rtol=1e-2, atol=1e-3 * largest)
    vector = lambda when, *names: np.concatenate([x.ravel() for name in names for x in got[when][name]])  # noqa: E731
    for adam, learning_rate, names in (("actor", 0.001, ["actor"]), ("qf", 0.002, ["qf1", "qf2"])):
        moved = vector("after", *names) - vector("before", *names)
        np.testing.assert_allclose(moved, adam_step(got["moments"][adam], learning_rate), rtol=0.02, atol=3e-7)
    np.testing.assert_array_equal(vector("after", "target1", "target2"), vector("before", "target1", "target2"))
    moved = got["after"]["log_alpha"] - log_alpha.item()
    if autotune:
        assert got["gradients"]["log_alpha"] == pytest.approx(log_alpha.grad.item(), rel=1e-3)
        assert moved == pytest.approx(adam_step(got["moments"]["log_alpha"], 0.002), rel=1e-3) and moved < 0
    else:
        assert moved == 0 and "log_alpha" not in got["moments"]


BAD = [(["--update-frequency", 0], "--update-frequency"), (["--buffer-size", 9], "--buffer-size")]


@pytest.mark.parametrize("flags, named", [*BAD, (["--env-id", "Pendulum-v1"], "sac_continuous_action.py")])
def test_bad_input_of_its_own(flags, named, tmp_path):
    done = run(script(NAME), *smoke(NAME), *flags, cwd=tmp_path, code=2)
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("sac_atari.py: ") and named in line and not (tmp_path / "runs").exists()
