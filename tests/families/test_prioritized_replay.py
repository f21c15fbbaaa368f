"""Sum tree, prioritised draws, n-step returns, noise and the update of Rainbow against slow, obvious texts."""

import json
import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

from helpers.files import each, load, require, require_for, script, smoke, uses
from helpers.oracles import FRAME, STACK, Game, play, slow_projection
from helpers.processes import inspect_run, run_dir
from helpers.scalars import tensorboard_scalars

require("torch")
import torch  # noqa: E402

prioritizes = each(lambda name: "class PrioritizedReplay" in script(name).read_text() and uses(name, "torch"))
noisy = each(lambda name: "class NoisyLinear" in script(name).read_text() and uses(name, "torch"))
doubles = torch.float64


# Sum tree


@prioritizes
@pytest.mark.parametrize("size, width", [(50, 8), (64, 8), (5, 8), (3000, 1024)])
def test_sum_tree_against_a_list(name, size, width):
    rng = np.random.default_rng(0)
    tree, values = load(name).SumTree(size, "cpu", width), np.zeros(size)
    for count in [1, 3, 7, 30, 2 * size] * 5:
        indices, new = rng.integers(size, size=count), rng.random(count) * (rng.random(count) < 0.7)
        tree.set(torch.from_numpy(indices), torch.from_numpy(new))
        values[indices] = 0
        for index, value in zip(indices, new, strict=True):  # of duplicates the largest counts
            values[index] = max(values[index], value)
        np.testing.assert_array_equal(tree[torch.arange(size)], values)
        padded = np.pad(values, (0, -size % width)).reshape(-1, width)
        np.testing.assert_allclose(tree.sums, padded.sum(1), rtol=1e-12)


@prioritizes
@pytest.mark.parametrize("size, width", [(200, 16), (2500, 1024)])
def test_draws_are_stratified_and_in_proportion(name, size, width):
    """The part of a leaf covers whole strata and pieces of at most two others, so its count is known within two."""
    torch.manual_seed(0)
    values = torch.rand(size, dtype=doubles) ** 3 * (torch.rand(size) < 0.6)
    tree = load(name).SumTree(size, "cpu", width)
    tree.set(torch.arange(size), values)
    batch = 50_000
    counts = tree.sample(batch).bincount(minlength=size)
    assert ((counts - batch * values / values.sum()).abs() < 2).all()

    batch, calls = 10, 2000  # within a stratum too: leaves have a tenth of it and less
    draws = torch.stack([tree.sample(batch) for _ in range(calls)])
    assert (draws[:, 1:] >= draws[:, :-1]).all()
    observed, expected = draws.flatten().bincount(minlength=size), batch * calls * values / values.sum()
    likely = expected > 5
    chi_square = ((observed - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi_square < likely.sum() + 4 * (2 * likely.sum()) ** 0.5
    starts = values.cumsum(0) - values
    for part in (0, 4, 9):  # each draw is from its own part of the total
        low, high = (values.sum() * (part + edge) / batch for edge in (0, 1))
        assert ((starts + values)[draws[:, part]] >= low).all() and (starts[draws[:, part]] <= high).all()


@prioritizes
def test_zero_is_never_drawn(name):
    """Whatever rounding does to sums: here `rest` is at, just beside and far beyond each of them."""
    module, rng = load(name), np.random.default_rng(0)
    for _ in range(30):
        values = 10 ** rng.uniform(-12, 6, size=40) * (rng.random(40) < 0.3)
        values[rng.integers(40)] = 1e-9
        sums = np.cumsum(values)
        rests = np.concatenate((sums, np.nextafter(sums, 0), np.nextafter(sums, 1e9), sums * (1 + 1e-9), [-1, 0, 1e9]))
        rows = torch.from_numpy(values).expand(len(rests), -1)
        places, _ = module.find(rows, torch.from_numpy(rests))
        assert (values[places] > 0).all()

    tree = module.SumTree(100_000, "cpu")
    for leaf in (0, 1023, 1024, 99_999):
        tree.set(torch.arange(100_000), torch.zeros(100_000, dtype=doubles))
        tree.set(torch.tensor([leaf]), torch.tensor([1e-7], dtype=doubles))
        assert (tree.sample(1000) == leaf).all()


@prioritizes
def test_find_against_a_loop(name):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 4, size=(200, 12)).astype(float)  # sums of whole numbers are exact
    values[:, 5] += 1
    rests = rng.random(200) * values.sum(1)
    places, left = load(name).find(torch.from_numpy(values), torch.from_numpy(rests))
    for row, rest, place, remainder in zip(values, rests, places.tolist(), left.tolist(), strict=True):
        for expected, value in enumerate(row):
            if rest < value:
                break
            rest -= value
        assert place == expected and remainder == pytest.approx(rest, abs=1e-9)


# Replay


class Recorded(Game):
    """A game that remembers with which steps it was over, so that a reset followed."""

    def __init__(self, rng):
        super().__init__(rng)
        self.over = []

    def step(self):
        out = super().step()
        self.over.append(out[3])
        return out


class Session:
    """Games, the replay that is filled from them, and a plain list of all transitions with whether they were cut."""

    def __init__(self, module, size, num_envs, n_step, seed=0, folder=None):
        self.make = lambda: module.PrioritizedReplay(size, num_envs, (STACK, *FRAME), "cpu", folder, n_step)
        self.replay, self.plain, self.cut, self.rng = self.make(), [], [], np.random.default_rng(seed)
        self.num_envs, self.n_step = num_envs, n_step
        self.reset()

    def reset(self):
        self.cut[-self.num_envs :] = [True] * len(self.cut[-self.num_envs :])
        self.games = [Recorded(np.random.default_rng(self.rng.integers(2**32))) for _ in range(self.num_envs)]
        frames = self.replay.frames.add(np.concatenate([game.obs for game in self.games]))
        self.stacks = frames.reshape(self.num_envs, STACK)

    def play(self, steps):
        for _ in range(steps):
            play(self.replay, self.games, 1, self.stacks, self.plain)
            self.cut += [game.over[-1] for game in self.games]
        self.replay.flush()

    def drawable(self):
        first, count = self.replay.window.tolist()
        assert first + count == len(self.plain)
        return range(first, max(first, len(self.plain) - (self.n_step - 1) * self.num_envs))

    def target(self, number, gamma):
        """Action, return, terminated, discount, first and last observation of row `number`: one step after another."""
        obs, _, (action, _, _) = self.plain[number]
        total, discount = 0.0, 1.0
        for at in range(number, number + self.n_step * self.num_envs, self.num_envs):
            _, next_obs, (_, reward, terminated) = self.plain[at]
            total += discount * reward
            discount *= gamma
            if terminated or self.cut[at]:
                break
        return (action, total, terminated, discount), obs, next_obs

    def sample(self, numbers, gamma=0.9, beta=1.0):
        """What the replay returns for given rows."""
        draw, self.replay.tree.sample = self.replay.tree.sample, lambda _: numbers % self.replay.size
        out = self.replay.sample(len(numbers), gamma, beta)
        self.replay.tree.sample = draw
        return out


def assert_targets(session):
    numbers = torch.tensor(session.drawable())
    _, columns, frames = session.sample(numbers)
    for number, row, observations in zip(numbers.tolist(), columns.tolist(), frames.numpy(), strict=True):
        expected, obs, next_obs = session.target(number, 0.9)
        assert row[1:] == pytest.approx(expected, abs=1e-6), number
        np.testing.assert_array_equal(observations, np.concatenate((obs, next_obs)))


@prioritizes
@pytest.mark.parametrize("num_envs, n_step", [(1, 3), (3, 3), (2, 1), (2, 6)])
def test_n_step_targets_and_who_can_be_drawn(name, num_envs, n_step):
    """Over many wraps of the ring: a row is drawn from when its steps are there until its frames are overwritten."""
    size = 90
    session = Session(load(name), size, num_envs, n_step)
    rng, expected, largest = np.random.default_rng(1), {}, 1.0
    for _ in range(40):
        session.play(int(rng.integers(1, 8)))
        drawable = session.drawable()
        expected = {number: expected.get(number, largest) for number in drawable}
        leaves = np.zeros(session.replay.size)
        leaves[[number % session.replay.size for number in expected]] = list(expected.values())
        np.testing.assert_array_equal(session.replay.tree[torch.arange(session.replay.size)], leaves)
        if not drawable:
            continue
        assert_targets(session)
        chosen, priorities = rng.choice(drawable, size=5), rng.random(5) * 3
        session.replay.prioritize(torch.from_numpy(chosen % session.replay.size), torch.from_numpy(priorities))
        for number in set(chosen):
            expected[number] = max(p for n, p in zip(chosen, priorities, strict=True) if n == number)
        largest = max(largest, *priorities)
        assert session.replay.largest == largest
    assert len(session.plain) > 1.5 * size and any(session.cut), "the case does not tell"
    assert any(terminated and not cut for (*_, (_, _, terminated)), cut in zip(session.plain, session.cut, strict=True))


@prioritizes
def test_a_return_by_hand(name):
    rewards, ended = torch.tensor([[1, 2, 4]] * 4), torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]]).bool()
    returns, steps = load(name).n_step_return(rewards, ended, 0.5)
    assert returns.tolist() == [1 + 1 + 1, 1, 1 + 1, 1] and steps.tolist() == [3, 1, 2, 1]
    returns, steps = load(name).n_step_return(rewards[:, :1], ended[:, :0], 0.5)
    assert returns.tolist() == [1] * 4 and steps.tolist() == [1] * 4


@prioritizes
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights(name, beta):
    """(N P)^-beta, divided by the largest in the batch."""
    session = Session(load(name), 90, 2, 3)
    session.play(60)
    drawable = session.drawable()
    priorities = np.random.default_rng(0).random(len(drawable)) + 0.01
    slots = torch.tensor(drawable) % session.replay.size
    session.replay.prioritize(slots, torch.from_numpy(priorities))
    for numbers in (torch.tensor(drawable)[:7], torch.tensor(drawable)[20:30]):
        _, columns, _ = session.sample(numbers, beta=torch.tensor(beta, dtype=doubles))
        probabilities = priorities[numbers - drawable[0]] / priorities.sum()
        weights = (len(drawable) * probabilities) ** -beta
        np.testing.assert_allclose(columns[:, 0], weights / weights.max(), rtol=1e-6)


@prioritizes
def test_draws_of_the_replay_are_of_rows_in_proportion(name):
    torch.manual_seed(0)
    session = Session(load(name), 90, 2, 3)
    session.play(100)
    drawable = torch.tensor(session.drawable())
    slots = drawable % session.replay.size
    session.replay.prioritize(slots, torch.rand(len(slots), dtype=doubles))
    priorities = session.replay.tree[slots]
    drawn, columns, _ = session.replay.sample(20_000, 0.9, 0.4)
    counts = drawn.bincount(minlength=session.replay.size)[slots]
    assert counts.sum() == 20_000
    assert ((counts - 20_000 * priorities / priorities.sum()).abs() < 2).all()
    actions = session.replay.rows[drawn][:, -3]
    np.testing.assert_array_equal(columns[:, 1], actions)


@prioritizes
def test_priorities_are_saved_and_returns_end_at_a_resume(name, tmp_path):
    """A loaded replay draws as the saved one does; no return runs from before the checkpoint into the new episodes."""
    session = Session(load(name), 90, 2, 3, folder=tmp_path)
    for _ in range(4):
        session.play(17)
        drawable = np.array(session.drawable())
        priorities = torch.rand(len(drawable), dtype=doubles) * 5
        session.replay.prioritize(torch.from_numpy(drawable % session.replay.size), priorities)
        saved = session.replay.state_dict()
        torch.save(saved, tmp_path / "saved.pt")
        again = session.make()
        again.load_state_dict(torch.load(tmp_path / "saved.pt"))
        for key in ("leaves", "sums"):
            np.testing.assert_array_equal(getattr(again.tree, key), getattr(session.replay.tree, key))
        assert again.largest == session.replay.largest and again.ready == session.replay.ready
        draws = []
        for replay in (session.replay, again):
            torch.manual_seed(0)
            draws.append(replay.sample(50, 0.9, 0.5))
        for one, other in zip(*draws, strict=True):
            np.testing.assert_array_equal(one, other)
        session.replay = again
        session.reset()
        session.play(3)
        assert_targets(session)


# Noise


@noisy
def test_noise_against_explicit_weights(name):
    """Each observation has its own noise, of weight ij f(a_i) f(b_j) with f(x) = sgn(x) sqrt|x|, of bias j f(b_j)."""
    torch.manual_seed(0)
    layer, x = load(name).NoisyLinear(5, 3), torch.randn(4, 5)
    with torch.no_grad():
        layer.weight_sigma.copy_(torch.rand(3, 5))
        layer.bias_sigma.copy_(torch.rand(3))
    state = torch.get_rng_state()
    got = layer(x)
    torch.set_rng_state(state)
    noise = torch.randn(4, 8).numpy()
    for row in range(4):
        f = [math.copysign(math.sqrt(abs(value)), value) for value in noise[row]]
        a, b = f[:5], f[5:]
        for j in range(3):
            total = layer.bias[j].item() + layer.bias_sigma[j].item() * b[j]
            for i in range(5):
                weight = layer.weight[j, i].item() + layer.weight_sigma[j, i].item() * a[i] * b[j]
                total += weight * x[row, i].item()
            assert got[row, j].item() == pytest.approx(total, abs=1e-5)
    assert not torch.equal(layer(x), got), "the noise is not fresh"


@noisy
def test_noise_has_the_moments_of_factorised_noise(name):
    """E f^2 = E|z| = sqrt(2/pi): once for the bias, twice for a weight. Independent noise would have it not at all."""
    torch.manual_seed(0)
    layer, x = load(name).NoisyLinear(6, 4), torch.randn(1, 6)
    with torch.no_grad():
        layer.weight_sigma.copy_(torch.rand(4, 6))
        layer.bias_sigma.copy_(torch.rand(4))
        y = layer(x.expand(400_000, -1))
    moment = (2 / math.pi) ** 0.5
    variance = moment * (moment * (layer.weight_sigma**2 @ x[0] ** 2) + layer.bias_sigma**2)
    np.testing.assert_allclose(y.mean(0), (layer.weight @ x[0] + layer.bias).detach(), atol=0.02)
    np.testing.assert_allclose(y.var(0), variance.detach(), rtol=0.03)


@noisy
def test_a_loaded_policy_without_noise_has_the_means_of_the_weights(name, tmp_path, monkeypatch):
    torch.manual_seed(0)
    module, flags = load(name), {"n_atoms": 5, "v_min": -1, "v_max": 1}
    envs = SimpleNamespace(single_action_space=gym.spaces.Discrete(6))
    module.save_file(module.QNetwork(envs, 5).state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "args.json").write_text(json.dumps(flags))
    obs = np.random.default_rng(0).integers(256, size=(20, 4, 84, 84), dtype=np.uint8)
    policies = [module.load_policy(tmp_path, envs, "cpu", deterministic=mode) for mode in (True, False)]
    greedy, noisy_actions = (policy(obs) for policy in policies)
    monkeypatch.setattr(module.NoisyLinear, "forward", torch.nn.Linear.forward)
    np.testing.assert_array_equal(greedy, policies[1](obs))
    assert (greedy != noisy_actions).any()


@noisy
def test_layers_begin_as_in_the_paper(name):
    torch.manual_seed(0)
    layer = load(name).NoisyLinear(400, 300)
    for mean in (layer.weight, layer.bias):
        assert mean.abs().max() <= 1 / 20 and mean.abs().max() > 0.98 / 20 and abs(mean.mean()) < 0.005
    for sigma in (layer.weight_sigma, layer.bias_sigma):
        assert torch.all(sigma == 0.5 / 20)
    sizes = {layer.weight_sigma: layer.weight, layer.bias_sigma: layer.bias}
    assert all(sigma.shape == mean.shape for sigma, mean in sizes.items())


# The whole update

UPDATE_ONCE_MORE = """
def moments():
    return [replay.tree[torch.arange(replay.size)].numpy().copy(), replay.largest.item()]

result["priorities"] = moments()
state = torch.get_rng_state()
slots, columns, frames = replay.sample(args.batch_size, args.gamma, beta)
first, last = frames[:, :4], frames[:, 4:]
with torch.no_grad():
    choosing, valuing = q_network(last).numpy(), target_network(last).numpy()  # each draws its own noise
    logits = q_network(first).numpy()
torch.set_rng_state(state)
sums = [value.item() for value in update()[0].values()]
result |= {"slots": slots.numpy(), "columns": columns.numpy(), "sums": sums, "after": moments()}
result |= {"choosing": choosing, "valuing": valuing, "logits": logits, "beta": beta.item(), "args": vars(args)}

# without deviations the logits are those of value and advantage; the two streams can be told apart
with torch.no_grad():
    for layer in q_network.modules():
        if hasattr(layer, "weight_sigma"):
            layer.weight_sigma.zero_(), layer.bias_sigma.zero_()
    features = q_network.features(first / 255)
    result["streams"] = [q_network.value(features).numpy(), q_network.advantage(features).numpy()]
    result["dueling"] = q_network(first).numpy()
"""


@noisy
def test_rainbow_update(name, tmp_path):
    """One more update of a run against loops over samples, actions and atoms: its loss, and the new priorities."""
    require_for(name)
    sizes = {"learning_starts": 200, "total_timesteps": 600, "buffer_size": 400, "target_network_frequency": 70}
    argv = smoke(name, n_atoms=11, v_min=-2, v_max=8, gamma=0.9, batch_size=32, **sizes)
    argv += ["--learning-rate", "0.001", "--prioritized-replay-alpha", "0.7", "--prioritized-replay-eps", "0.01"]
    got = inspect_run(script(name), *argv, cwd=tmp_path, after=UPDATE_ONCE_MORE)
    support = np.linspace(-2, 8, 11)
    losses, q_values, swaps = [], [], 0
    for i, (_, action, total, terminated, discount) in enumerate(got["columns"]):
        pmfs = {}
        for key in ("choosing", "valuing"):
            rows = got[key][i].astype(float)
            pmfs[key] = [np.exp(row) / np.exp(row).sum() for row in rows]
        best = max(range(len(rows)), key=lambda a: sum(pmfs["choosing"][a] * support))
        swaps += best != max(range(len(rows)), key=lambda a: sum(pmfs["valuing"][a] * support))
        target = slow_projection(pmfs["valuing"][best], total, terminated, support, discount)
        logits = got["logits"][i, int(action)].astype(float)
        predicted = np.exp(logits) / np.exp(logits).sum()
        losses.append(-sum(t * math.log(p) for t, p in zip(target, predicted, strict=True)))
        q_values.append(sum(predicted * support))
    assert swaps > 3, "the two networks choose alike: the case does not tell"
    weights = got["columns"][:, 0]
    assert weights.max() == 1 and weights.min() < 1
    np.testing.assert_allclose(got["sums"], [np.mean(weights * losses), np.mean(q_values)], rtol=1e-3, atol=1e-4)

    (leaves, largest), (new_leaves, new_largest) = got["priorities"], got["after"]
    expected = leaves.copy()
    for slot in set(got["slots"]):
        at = [(loss + 0.01) ** 0.7 for loss, other in zip(losses, got["slots"], strict=True) if other == slot]
        expected[slot] = max(at)
    np.testing.assert_allclose(new_leaves, expected, rtol=1e-3)
    assert new_largest == pytest.approx(max(largest, *((np.array(losses) + 0.01) ** 0.7)), rel=1e-3)

    value, advantage = got["streams"]
    assert value.shape == (32, 1, 11) and got["dueling"].shape == advantage.shape
    for a in range(advantage.shape[1]):
        dueling = (
            value[:, 0] + advantage[:, a] - sum(advantage[:, b] for b in range(advantage.shape[1])) / advantage.shape[1]
        )
        np.testing.assert_allclose(got["dueling"][:, a], dueling, atol=1e-5)

    total = got["args"]["total_timesteps"]
    assert got["beta"] == pytest.approx(0.4 + 0.6 * (total - 20) / total)  # of the last updates, before the last steps
    betas = tensorboard_scalars(run_dir(tmp_path))["charts/beta"]
    assert dict(betas) == pytest.approx({step: 0.4 + 0.6 * (step - 20) / total for step in range(300, total + 1, 100)})
