"""DDPG, TD3, SAC and their kin: equations and networks by themselves, and whole runs against a second, slow text.

A run is followed from outside: what it hands to the environments, the random numbers that it draws and, before each
step of the environments, all that learning has changed. Between two steps the same updates in double precision, written
down again here, must lead from what was there before to what is there after.
"""

import functools
import math
import re
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

from helpers.files import continuous_control, defines, each, each_text, family, load, require_for, script, uses
from helpers.oracles import FOLLOW_TRANSITIONS
from helpers.processes import LONG, inspect_run

torch = pytest.importorskip("torch")

LOW, HIGH = np.array([-2, 0.5], dtype=np.float32), np.array([1, 4], dtype=np.float32)  # of probe_envs:OwnBounds-v0
HALF = (HIGH - LOW).astype(float) / 2


def array_of(name):
    if uses(name, "torch"):
        return torch.tensor
    import jax.numpy as jnp

    return jnp.array


def own_bounds(obs_dim=3):
    spaces = {"single_observation_space": gym.spaces.Box(-1, 1, (obs_dim,)), "num_envs": 1}
    return SimpleNamespace(**spaces, single_action_space=gym.spaces.Box(LOW, HIGH))


# Equations

squashes = each_text("squashed_logprob", which=lambda name: defines(name, "def squashed_logprob("))


def call_logprob(name, x, mean, log_std, scale):
    array = array_of(name)
    arguments = (array(np.asarray(value, dtype=np.float32)) for value in (x, mean, log_std, scale))
    return np.asarray(load(name).squashed_logprob(*arguments), dtype=np.float64)


def slow_logprob(xs, means, log_stds, scales):
    """One sample, dimension by dimension: log N(x) - log |d action / dx|, where log cosh stays exact far out."""
    total = 0.0
    for x, mean, log_std, scale in zip(xs, means, log_stds, scales, strict=True):
        total -= 0.5 * ((x - mean) / math.exp(log_std)) ** 2 + log_std + 0.5 * math.log(2 * math.pi)
        log_cosh = abs(x) + math.log1p(math.exp(-2 * abs(x))) - math.log(2)
        total -= math.log(scale) - 2 * log_cosh
    return total


def test_the_slow_density_by_hand():
    """At x = mean = 0 and deviation 1 the slope of tanh is 1: the density is that of the Gaussian over the scale."""
    assert slow_logprob([0], [0], [0], [2]) == pytest.approx(math.log(1 / math.sqrt(2 * math.pi) / 2))


@squashes
def test_density_integrates_to_one_over_the_bounds_of_each_dimension(name):
    """Sums over a fine grid of actions, whose x comes from the inverse of the squashing."""
    for low, high, mean, log_std in [(-2, 1, 0.3, -0.5), (0.5, 4, -0.8, -1.5), (-0.4, 0.4, 0.0, 0.4)]:
        scale = (high - low) / 2
        edges = np.linspace(low, high, 200_001)
        action = (edges[1:] + edges[:-1]) / 2
        x = np.arctanh((action - low) / scale - 1)[:, None]
        density = np.exp(call_logprob(name, x, np.full_like(x, mean), np.full_like(x, log_std), [scale]))
        assert (density * np.diff(edges)).sum() == pytest.approx(1, abs=2e-3)


@squashes
def test_density_is_that_of_a_change_of_variables(name):
    """Three dimensions: their densities multiply, each divided by the slope of the squashing, a finite difference."""
    rng = np.random.default_rng(0)
    x, mean = rng.normal(size=(2, 200, 3))
    log_std, scale, step = rng.uniform(-2, 1, size=(200, 3)), np.array([1.5, 1.75, 0.4]), 1e-5
    slope = scale * (np.tanh(x + step) - np.tanh(x - step)) / (2 * step)
    gaussian = np.exp(-0.5 * ((x - mean) / np.exp(log_std)) ** 2) / np.exp(log_std) / math.sqrt(2 * math.pi)
    with np.errstate(divide="ignore"):
        expected = np.log(gaussian / slope).sum(1)
    finite = np.isfinite(expected) & (expected > -200)
    assert finite.sum() > 150
    got = call_logprob(name, x, mean, log_std, scale)
    assert got.shape == (200,)
    np.testing.assert_allclose(got[finite], expected[finite], rtol=1e-4, atol=1e-4)


@squashes
def test_density_is_exact_where_tanh_saturates(name):
    x = np.array([[-60, 0.1], [-12, 9], [20, -20], [9, 45], [60, 60]], dtype=np.float32)
    mean, log_std, scale = x - np.float32(0.25), np.full_like(x, -1), HALF
    expected = [slow_logprob(*row, scale) for row in zip(x, mean, log_std, strict=True)]
    np.testing.assert_allclose(call_logprob(name, x, mean, log_std, scale), expected, rtol=1e-5)


@each_text("bellman_target", which=lambda name: defines(name, "def bellman_target("))
def test_bellman_target(name):
    rng = np.random.default_rng(0)
    reward, terminated, value = rng.normal(size=50), rng.random(50) < 0.5, rng.normal(size=50)
    as_floats = (array_of(name)(x.astype(np.float32)) for x in (reward, terminated, value))
    expected = [r if end else r + 0.9 * v for r, end, v in zip(reward, terminated, value, strict=True)]
    np.testing.assert_allclose(np.asarray(load(name).bellman_target(*as_floats, 0.9)), expected, rtol=1e-5, atol=1e-6)


# Networks


def actor_at(name, bias, seed=0):
    """The outputs of an actor for 50 observations, its last layer's bias being `bias`, with these bounds."""
    module, obs = load(name), np.random.default_rng(seed).normal(size=(50, 3)).astype(np.float32)
    if uses(name, "torch"):
        torch.manual_seed(seed)
        actor = module.Actor(own_bounds())
        last = [layer for layer in actor.modules() if isinstance(layer, torch.nn.Linear)][-1]
        last.bias.data[:] = torch.tensor(bias)
        with torch.no_grad():
            out = actor(torch.from_numpy(obs))
            out = (actor.squash(out[0]), out[1]) if isinstance(out, tuple) else (out,)
    else:
        import jax

        actor = module.Actor(LOW, HIGH)
        params = actor.init(jax.random.key(seed), obs)
        last = max(params["params"], key=lambda layer: (layer.startswith("Dense"), layer))
        params["params"][last]["bias"] = jax.numpy.array(bias, dtype=jax.numpy.float32)
        out = actor.apply(params, obs)
        out = (actor.squash(out[0]), out[1]) if isinstance(out, tuple) else (out,)
    return [np.asarray(x, dtype=np.float64) for x in out]


@each_text("Actor", which=continuous_control)
def test_actions_reach_the_bounds_of_each_dimension(name):
    gaussian = defines(name, "def squashed_logprob(")
    rest = [0.0, 0.0] * gaussian
    for bias, expected in [([-60, 60], (LOW[0], HIGH[1])), ([60, -60], (HIGH[0], LOW[1]))]:
        np.testing.assert_allclose(actor_at(name, bias + rest)[0], [expected] * 50, rtol=1e-6)
    middle = actor_at(name, [0.0, 0.0] + rest)[0]
    assert (middle > LOW).all() and (middle < HIGH).all()
    assert (middle.std(0) > 0.01 * HALF).all(), "the action does not depend on the observation"
    np.testing.assert_allclose(middle.mean(0), (LOW + HIGH) / 2, atol=0.5 * HALF.min())


@each_text("Actor", which=lambda name: continuous_control(name) and defines(name, "def squashed_logprob("))
def test_deviations_keep_within_their_range(name):
    np.testing.assert_allclose(actor_at(name, [0.0, 0, 60, -60])[1], [[2, -5]] * 50, atol=1e-5)
    assert (abs(actor_at(name, [0.0, 0, 0, 0])[1] + 1.5) < 3.5).all()


@each_text("Actor", "load_policy", which=continuous_control)
def test_modes_of_a_loaded_policy(name, tmp_path):
    """Without noise the mean, squashed where the file squashes; with it the noise of training, within the bounds."""
    module, rng = load(name), np.random.default_rng(0)
    obs, z = rng.normal(size=(1, 3)).astype(np.float32).repeat(20_000, axis=0), rng.normal(size=(20_000, 2))
    if uses(name, "torch"):
        torch.manual_seed(0)
        actor, device = module.Actor(own_bounds()), "cpu"
        saved = {f"actor.{key}": value for key, value in actor.state_dict().items()}
        with torch.no_grad():
            out = actor(torch.from_numpy(obs[:1]))
    else:
        import jax

        actor, device = module.Actor(LOW, HIGH), jax.devices("cpu")[0]
        params = actor.init(jax.random.key(0), obs[:1])
        saved, out = module.flatten_dict({"actor": params}, sep="."), actor.apply(params, obs[:1])
    module.save_file(saved, tmp_path / "model.safetensors")
    (tmp_path / "args.json").write_text('{"exploration_noise": 0.5}')

    def play(**mode):
        return module.load_policy(tmp_path, own_bounds(), device, **mode)(obs)

    if defines(name, "def squashed_logprob("):
        mean, log_std = (np.asarray(x, dtype=float) for x in out)
        likeliest, expected = (LOW + (np.tanh(x) + 1) * HALF for x in (mean, mean + np.exp(log_std) * z))
    else:
        likeliest = np.asarray(out, dtype=float)
        expected = np.clip(likeliest + 0.5 * HALF * z, LOW, HIGH)
    np.testing.assert_allclose(play(deterministic=True), likeliest.repeat(len(obs), axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(play(), play(deterministic=True))
    drawn, shares = play(deterministic=False), [0.1, 0.25, 0.5, 0.75, 0.9]
    assert drawn.dtype == np.float32 and (drawn >= LOW).all() and (drawn <= HIGH).all()
    difference = np.quantile(drawn, shares, axis=0) - np.quantile(expected, shares, axis=0)
    assert (np.abs(difference) < 0.04 * HALF).all()
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.03, "dimensions share their noise"


@each_text("Linears", which=lambda name: defines(name, "class Linears("))
def test_layers_side_by_side_are_layers(name):
    module = load(name)
    torch.manual_seed(0)
    for inputs, outputs in [(5, 7), (7, 1)]:
        plain = [torch.nn.Linear(inputs, outputs) for _ in range(3)]
        both = module.Linears(3, inputs, outputs)
        both.weight.data[:] = torch.stack([layer.weight.T for layer in plain])
        both.bias.data[:] = torch.stack([layer.bias[None] for layer in plain])
        x = torch.randn(3, 11, inputs)
        expected = torch.stack([layer(part) for layer, part in zip(plain, x, strict=True)])
        torch.testing.assert_close(both(x), expected)
        both(x).square().sum().backward()
        expected.square().sum().backward()
        for i, layer in enumerate(plain):
            torch.testing.assert_close(both.weight.grad[i], layer.weight.grad.T)
            torch.testing.assert_close(both.bias.grad[i, 0], layer.bias.grad)
        if "critics=1" in script(name).read_text():
            torch.testing.assert_close(both(x[:1]), expected[:1])


@each_text("Linears", which=lambda name: defines(name, "class Linears("))
def test_layers_side_by_side_start_as_layers_do(name):
    """Uniform between the bounds of nn.Linear, and no two alike."""
    torch.manual_seed(0)
    layers = load(name).Linears(2, 100, 800)
    for parameter in (layers.weight, layers.bias):
        values = parameter.detach().double()
        assert values.abs().max() <= 0.1 and values.min() < -0.095 and values.max() > 0.095
        assert values.std().item() == pytest.approx(0.2 / math.sqrt(12), rel=0.1)
        assert abs(np.corrcoef(values[0].flatten(), values[1].flatten())[0, 1]) < 0.15


# Runs

FOLLOW = (
    FOLLOW_TRANSITIONS
    + """
import sys

result |= {"steps": [], "actions": [], "low": [], "high": []}
uses_jax, draws = "import jax" in open(path).read(), []


class Recorder(np.random.Generator):
    def standard_normal(self, *arguments, **options):
        out = super().standard_normal(*arguments, **options)
        draws.append(("normal", np.array(out)))
        return out


def record(kind, function):
    def recorded(*arguments, **options):
        out = function(*arguments, **options)
        if uses_jax:
            jax.debug.callback(lambda x: draws.append((kind, np.array(x))), out, ordered=True)
        else:
            draws.append((kind, np.array(out)))
        return out

    return recorded


np.random.default_rng = lambda seed: Recorder(np.random.PCG64(seed))
if uses_jax:
    import jax

    jax.random.normal, jax.random.randint = record("normal", jax.random.normal), record("randint", jax.random.randint)
else:
    import torch

    torch.randn_like, torch.randint = record("normal", torch.randn_like), record("randint", torch.randint)


def kernels(tree):
    # [kernel, bias, ...] by the names of the layers; two critics' biases as columns of rows
    if "kernel" in tree:
        bias = np.array(tree["bias"])
        return [np.array(tree["kernel"]), bias[:, None] if bias.ndim == 2 else bias]
    return [x for key in sorted(tree) if hasattr(tree[key], "keys") for x in kernels(tree[key])]


def state_of_learner(learner, at):
    nets = {key: kernels(learner[f"{key}_params"]["params"]) for key in names if f"{key}_params" in learner}
    adam = {}
    for key in (key for key in ("actor", "qf", "alpha") if f"{key}_opt_state" in learner):
        (found,) = [part for part in learner[f"{key}_opt_state"] if hasattr(part, "mu")]
        parts = [[np.array(x)] if key == "alpha" else kernels(x["params"]) for x in (found.mu, found.nu)]
        adam[key] = (*parts, int(found.count))
    other = {"log_alpha": np.array(learner["log_alpha"])} if "log_alpha" in learner else {}
    other |= {"losses": dict(zip(at["loss_names"], learner["losses"][0])), "replay": np.array(at["replay"].rows)}
    return {"nets": nets, "adam": adam, **other, "gradient_steps": int(learner["gradient_steps"])}


def split(module, vector):
    # the part of each parameter in a flat vector, laid out as (inputs, outputs)
    shapes = [param.shape for param in module.parameters()]
    parts = vector.detach().split([shape.numel() for shape in shapes])
    arrays = [part.view(shape).numpy().copy() for part, shape in zip(parts, shapes)]
    return [x.T if x.ndim == 2 else x for x in arrays]


def state_of_globals(at):
    nets = {key: split(at[key], torch.cat([p.flatten() for p in at[key].parameters()])) for key in names if key in at}
    adam = {}
    for key in (key for key in ("actor", "qf", "alpha") if f"{key}_optimizer" in at):
        for found in at[f"{key}_optimizer"].state_dict()["state"].values():
            parts = [found["exp_avg"], found["exp_avg_sq"]]
            parts = [[x.numpy().copy()] if key == "alpha" else split(at[key], x) for x in parts]
            adam[key] = (*parts, int(found["step"]))
    other = {"log_alpha": at["log_alpha"].item()} if "log_alpha" in at else {}
    means = [means for means in (at["qf_means"], at["actor_means"]) if means.sums is not None]
    other["losses"] = {name: total for part in means for name, total in zip(part.names, part.sums.tolist())}
    other |= {"replay": at["replay"].rows.numpy().copy(), "qf_grad": split(at["qf"], at["qf_weights"].grad)}
    return {"nets": nets, "adam": adam, **other, "gradient_steps": at["gradient_steps"]}


names = ["actor", "qf", "target_actor", "target_qf"]
plain_step = gym.vector.SyncVectorEnv.step


def follow_learning(self, actions):
    at = sys._getframe(1).f_globals
    seen = {"global_step": at["global_step"], "actions": np.array(actions), "obs": np.array(last)}
    if at["global_step"] >= at["args"].learning_starts - self.num_envs:
        seen |= state_of_learner(jax.device_get(at["learner"]), at) if uses_jax else state_of_globals(at)
    else:
        seen["gradient_steps"] = int(at["learner"]["gradient_steps"]) if uses_jax else at["gradient_steps"]
    if uses_jax:
        jax.effects_barrier()
    seen["draws"] = draws[:]
    draws.clear()
    result["steps"].append(seen)
    if at["global_step"] == 57 and not uses_jax and "utd" in vars(at["args"]):  # JAX would compile once more
        at["args"].utd = 2.0
    return plain_step(self, actions)


gym.vector.SyncVectorEnv.step = follow_learning
"""
)
ROWS = """
result |= {"rows": np.array(replay.rows)[: replay.added], "args": vars(args)}
"""
FLAGS = """--env-id probe_envs:OwnBounds-v0 --num-envs 3 --buffer-size 32 --learning-starts 31 --total-timesteps 69
    --batch-size 16 --gamma 0.9 --policy-frequency 3"""
RATES = {"learning_rate": 0.01, "policy_lr": 0.003, "q_lr": 0.01}  # large, so that a few steps move what they should
MORE = {"tau": 0.3, "target_network_frequency": 2, "utd": 0.5, "q_hidden": 64}
MORE |= {"exploration_noise": 0.7, "policy_noise": 0.5, "noise_clip": 0.6}


@functools.cache
def flags_of(name):
    text = script(name).read_text()
    return {flag: value for flag, value in (RATES | MORE).items() if f"    {flag}: " in text}


def layered(layers, x):
    """A network of rectified layers; those beyond the third are heads beside the third."""
    pairs = list(zip(layers[::2], layers[1::2]))
    for kernel, bias in pairs[:2]:
        x = torch.relu(x @ kernel + bias)
    return torch.cat([x @ kernel + bias for kernel, bias in pairs[2:]], -1)


class Oracle:
    """The updates of DDPG, TD3 and SAC in double precision, one sample's formula at a time where that is short."""

    def __init__(self, name, state, flags):
        self.family, self.flags = family(name), flags
        self.rates = {"qf": flags.get("q_lr", 0.01), "actor": flags.get("policy_lr", 0.01), "alpha": flags.get("q_lr")}
        self.nets = {key: [torch.tensor(x).double() for x in layers] for key, layers in state["nets"].items()}
        self.log_alpha = torch.tensor(float(state.get("log_alpha", 0)), dtype=torch.float64)
        self.adam = {}
        for key in ("actor", "qf", "alpha"):
            first, second, count = state["adam"].get(key, ([0.0] * 6, [0.0] * 6, 0))
            self.adam[key] = [[torch.as_tensor(x).double() for x in part] for part in (first, second)] + [count]
        self.gradient_steps = state["gradient_steps"]
        self.losses = 0

    def q(self, net, obs, action):
        """A list of the values of each critic."""
        values = layered(self.nets[net], torch.cat([obs, action], 1))
        return [values[:, 0]] if self.family == "ddpg" else [values[0, :, 0], values[1, :, 0]]

    def policy(self, net, obs, noise=None):
        """Actions in the bounds, and for SAC their log-probability."""
        out = layered(self.nets[net], obs)
        if self.family != "sac":
            return torch.tensor(LOW) + (torch.tanh(out) + 1) * torch.tensor(HALF), None
        mean, log_std = out[:, :2], -5 + 7 * (torch.tanh(out[:, 2:]) + 1) / 2
        normal = torch.distributions.Normal(mean, log_std.exp())
        x = mean + log_std.exp() * noise
        slope = torch.tensor(HALF) * (1 - torch.tanh(x) ** 2)
        action = torch.tensor(LOW) + (torch.tanh(x) + 1) * torch.tensor(HALF)
        return action, (normal.log_prob(x) - slope.log()).sum(1)

    def act(self, obs, noise):
        noise = torch.tensor(noise).double()
        action, _ = self.policy("actor", torch.tensor(obs).double(), noise)
        if self.family == "sac":
            return action.numpy()
        action = action.numpy() + self.flags["exploration_noise"] * HALF * noise.numpy()
        return np.minimum(np.maximum(action, LOW), HIGH)

    def descend(self, key, params, loss):
        gradients = torch.autograd.grad(loss, params)
        first, second, count = self.adam[key]
        count += 1
        moved = []
        for i, (param, gradient) in enumerate(zip(params, gradients, strict=True)):
            first[i] = 0.9 * first[i] + 0.1 * gradient
            second[i] = 0.999 * second[i] + 0.001 * gradient**2
            step = first[i] / (1 - 0.9**count) / (torch.sqrt(second[i] / (1 - 0.999**count)) + 1e-8)
            moved.append((param - self.rates[key] * step).detach())
        self.adam[key] = [first[: len(moved)], second[: len(moved)], count]
        return moved, gradients

    def tracked(self, net):
        self.nets[net] = [x.detach().requires_grad_() for x in self.nets[net]]
        return self.nets[net]

    def update(self, rows, noises):
        flags, noises = self.flags, [torch.tensor(noise).double() for noise in noises]
        self.gradient_steps += 1
        rows = torch.tensor(rows).double()
        obs, next_obs, action, reward, terminated = rows[:, :3], rows[:, 3:6], rows[:, 6:8], rows[:, 8], rows[:, 9]
        alpha = math.exp(self.log_alpha)
        if self.family == "ddpg":
            next_action, _ = self.policy("target_actor", next_obs)
        elif self.family == "td3":
            next_action, _ = self.policy("target_actor", next_obs)
            noise = (noises.pop(0) * flags["policy_noise"]).numpy()
            noise = np.minimum(np.maximum(noise, -flags["noise_clip"]), flags["noise_clip"]) * HALF
            next_action = torch.tensor(np.minimum(np.maximum(next_action.numpy() + noise, LOW), HIGH))
        else:
            next_action, next_logprob = self.policy("actor", next_obs, noises.pop(0))
        values = self.q("target_qf", next_obs, next_action)
        target = []
        for i in range(len(rows)):
            value = min(critic[i].item() for critic in values)
            if self.family == "sac":
                value -= alpha * next_logprob[i].item()
            target.append(reward[i].item() + (0 if terminated[i] else 0.9 * value))
        params = self.tracked("qf")
        values = self.q("qf", obs, action)
        losses = [((value - torch.tensor(target)) ** 2).mean() for value in values]
        self.nets["qf"], self.qf_gradient = self.descend("qf", params, sum(losses))
        numbers = [loss.item() for loss in losses]
        numbers += [np.mean(numbers)] * (len(losses) > 1) + [value.mean().item() for value in values]
        with_actor = self.gradient_steps % 3 == 0
        extra = np.zeros(3 if self.family == "sac" else 1)
        for _ in range(with_actor * (3 if self.family == "sac" else 1)):
            params = self.tracked("actor")
            new_action, logprob = self.policy("actor", obs, noises.pop(0) if self.family == "sac" else None)
            values = self.q("qf", obs, new_action)
            if self.family == "sac":
                loss = (math.exp(self.log_alpha) * logprob - torch.minimum(*values)).mean()
            else:
                loss = -values[0].mean()
            self.nets["actor"], _ = self.descend("actor", params, loss)
            extra[0] += loss.item()
            if self.family == "sac":
                log_alpha = self.log_alpha.requires_grad_()
                alpha_loss = -(log_alpha.exp() * (logprob.detach() - 2)).mean()  # the entropy asked for is -2
                (self.log_alpha,), _ = self.descend("alpha", [log_alpha], alpha_loss)
                extra[1:] += alpha_loss.item(), math.exp(self.log_alpha)
        if self.gradient_steps % 2 == 0 if self.family == "sac" else with_actor:
            for key in (key for key in ("actor", "qf") if f"target_{key}" in self.nets):
                pairs = zip(self.nets[f"target_{key}"], self.nets[key], strict=True)
                self.nets[f"target_{key}"] = [0.7 * old + 0.3 * new for old, new in pairs]
        self.losses += np.array([*numbers, *extra])
        assert not noises, "more random numbers were drawn than this update needs"


def assert_close(got, expected, atol, rtol, what):
    """Nearly all elements: where a gradient is all rounding, Adam's step has any sign, and a unit may be on or off."""
    got, expected = np.asarray(got, dtype=np.float64), np.asarray(expected.detach())
    assert got.shape == expected.shape, what
    wrong = abs(got - expected) > atol + rtol * abs(expected)
    assert wrong.mean() < 0.01, f"{what}: {wrong.mean():.1%} differ, by {abs(got - expected).max()}"


def compare(state, oracle):
    assert state["nets"].keys() == oracle.nets.keys()
    for key, layers in state["nets"].items():
        for i, (got, expected) in enumerate(zip(layers, oracle.nets[key], strict=True)):
            step = oracle.rates[key.removeprefix("target_")]
            assert_close(got, expected, 0.005 * step, 1e-5, f"{key}, layer {i // 2}")
    for key, (*moments, count) in state["adam"].items():
        assert count == oracle.adam[key][2], f"gradient steps of {key}"
        for order, (got, expected) in enumerate(zip(moments, oracle.adam[key])):
            for i, (x, y) in enumerate(zip(got, expected, strict=True)):
                assert_close(x, y, 5e-4 * y.abs().max().item(), 1e-3, f"moment {order + 1} of {key}, layer {i // 2}")
    if "log_alpha" in state:
        assert float(state["log_alpha"]) == pytest.approx(float(oracle.log_alpha), rel=1e-4, abs=1e-6)
    for got, expected in zip(state.get("qf_grad", []), oracle.qf_gradient):
        assert_close(got, expected, 5e-4 * expected.abs().max().item(), 1e-3, "the critic's gradient after the actor's")


@each(continuous_control)
def test_a_run_step_by_step(name, tmp_path):
    require_for(name)
    flags = flags_of(name)
    argv = FLAGS.split() + [part for flag, value in flags.items() for part in (f"--{flag.replace('_', '-')}", value)]
    got = inspect_run(script(name), *argv, cwd=tmp_path, before=FOLLOW, after=ROWS, variables=LONG)
    steps = got["steps"]
    assert [step["global_step"] for step in steps] == list(range(0, 69, 3))
    for kernel in steps[-1]["nets"]["qf"][::2]:
        assert kernel.ndim == 2 or all((first != kernel[0]).mean() > 0.5 for first in kernel[1:]), "critics are alike"
    check_clock(name, steps, flags)
    check_transitions(got)
    check_actions(name, steps, flags)
    if re.fullmatch(r"(ddpg|td3|sac)_continuous_action(_jax)?", name):
        check_updates(name, steps, flags)


def check_clock(name, steps, flags):
    """Gradient steps follow environment steps, of which 31 must have been made; at 57 `--utd` becomes 2 in PyTorch."""
    total, later = 0, 2 if uses(name, "torch") else 0.5
    for step in steps:
        now, last = step["global_step"], step["global_step"] - 3
        ratio = (0.5 if now <= 57 else later) if "utd" in flags else 1
        total += math.floor(now * ratio) - math.floor(last * ratio) if now > 31 else 0
        assert step["gradient_steps"] == total, f"at step {now}"
    assert total == (36 if "utd" not in flags else 31 if uses(name, "torch") else 18)


def check_transitions(got):
    """What the replay buffer holds after a checkpoint are the last transitions that happened."""
    seen = np.array(got["seen"])
    assert len(seen) == 69 and seen[:, 9].any(), "nothing terminates"
    rows = sorted(row.tobytes() for row in got["rows"])
    assert rows == sorted(row.tobytes() for row in seen[-32:])


def check_actions(name, steps, flags):
    early = np.concatenate([step["actions"] for step in steps if step["global_step"] < 31])
    assert (early >= LOW).all() and (early <= HIGH).all() and len(np.unique(early)) == early.size == 66
    for i in range(2):  # uniform: reaching to both bounds of each dimension
        assert early[:, i].min() < LOW[i] + 0.3 * HALF[i] and early[:, i].max() > HIGH[i] - 0.3 * HALF[i]
    late, noises = [], []
    for last, step in zip(steps, steps[1:]):
        if step["global_step"] >= 31:
            kind, noise = step["draws"][0]
            assert kind == "normal" and noise.shape == (3, 2), "not one number per environment and dimension"
            noises.append(noise)
            late.append(step["actions"])
            if re.fullmatch(r"(ddpg|td3|sac)_continuous_action(_jax)?", name):
                expected = Oracle(name, last, flags).act(step["obs"], noise)
                np.testing.assert_allclose(step["actions"], expected, rtol=1e-4, atol=1e-5)
    late, noises = np.concatenate(late), np.concatenate(noises)
    assert len(np.unique(noises)) == noises.size == 72, "noise is shared or repeated"
    assert (late >= LOW - 1e-6).all() and (late <= HIGH + 1e-6).all()
    if "exploration_noise" in flags:
        assert (late == LOW).any() and (late == HIGH).any(), "the noise is not large enough to tell"


def check_updates(name, steps, flags):
    with_actor, clipped = 0, []
    for last, step in zip(steps, steps[1:]):
        if step["global_step"] <= 31:
            continue
        draws = step["draws"][1:]  # without the one of the action
        starts = [i for i, (kind, _) in enumerate(draws) if kind == "randint"]
        assert len(starts) == step["gradient_steps"] - last["gradient_steps"]
        filled = min(step["global_step"], 32)
        rows = step["replay"][:filled]
        assert rows[:, 9].any() and not rows[:, 9].all()
        oracle = Oracle(name, last, flags)
        for start, end in zip(starts, [*starts[1:], None]):
            indices, noises = draws[start][1] % filled, [noise for _, noise in draws[start + 1 : end]]
            clipped += [
                abs(noise) * flags["policy_noise"] > flags["noise_clip"] for noise in noises if "policy_noise" in flags
            ]
            oracle.update(rows[indices], noises)
            with_actor += oracle.gradient_steps % 3 == 0
        compare(step, oracle)
        losses = [total - last["losses"].get(name, 0) for name, total in step["losses"].items()]
        losses += [0] * (len(oracle.losses) - len(losses))  # of an actor that has not learned yet
        np.testing.assert_allclose(losses, oracle.losses, rtol=2e-3, atol=1e-4)
    assert with_actor > 4
    assert not clipped or 0 < np.mean(clipped) < 1, "the case does not tell clipped noise"
