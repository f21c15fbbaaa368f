"""Slow and obvious versions of what the files compute, and code that follows what a file does while it runs."""

from fractions import Fraction

import numpy as np


def advantages_of_episode(rewards, values, last_value, gamma, gae_lambda):
    """GAE as its definition: A_t = sum_k (gamma lambda)^k delta_{t+k} over one stretch without an end inside."""
    following = [*values[1:], last_value]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return [sum((gamma * gae_lambda) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


UPDATE_ONCE_MORE = """
totals = []


def listen(function):  # a loss returns itself and what is logged of it
    def call(*arguments, **options):
        out = function(*arguments, **options)
        totals.append(out[0])
        return out

    call.listens = True
    return call


for key in [key for key in globals() if key.endswith("_loss")]:
    if callable(globals()[key]) and not hasattr(globals()[key], "listens"):
        globals()[key] = listen(globals()[key])
if "b_inds" in globals():  # with memory: whole environments
    inds = b_inds[:, torch.randperm(args.num_envs)[:minibatch_envs]]
    mb_memory = initial_state[:, inds[0]], b_starts[inds]
else:
    inds = torch.randperm(batch_size)[:minibatch_size]
    mb_memory = (windows(inds), b_elapsed[inds]) if "windows" in globals() else ()
with torch.no_grad():
    logprob, entropy, value, *int_value = agent.evaluate(b_obs[inds], b_actions[inds], *mb_memory)
names = ["logprobs", "values", "advantages", "returns"]
result |= {name: globals()["b_" + name][inds].flatten().numpy().astype("float64") for name in names}
outputs = {"newlogprob": logprob, "entropy": entropy, "newvalue": value}
result |= {name: output.flatten().numpy() for name, output in outputs.items()} | {"args": vars(args)}
if "b_standardized" in globals():  # standardised with those of other processes, before the update
    b_standardized[inds] = standardize(b_advantages[inds][None])[0] if args.norm_adv else b_advantages[inds]
args.clip_coef = (logprob - b_logprobs[inds]).expm1().abs().median().item()  # clips about half of them
before = weights.detach().clone()
totals.clear()
logged = update(inds)
names = ("policy_loss", "value_loss", "entropy", "approx_kl")
pg, v, entropy_of_all, kl = (logged[name].item() for name in names)
result |= {"losses": [pg, v, entropy_of_all, totals[-1].item(), kl]}
result |= {"grad_norm": weights.grad.norm().item(), "moved": (weights - before).abs().max().item()}
"""


FIRST_RATIO = """
names = ("pg_loss", "approx_kl", "old_approx_kl", "v_loss")
result |= {key: globals()[key].item() for key in names}
result |= {"b": [x.numpy().copy() for x in (b_advantages, b_returns, b_values)], "iteration": iteration, "cases": []}
for _ in range(3):
    update(inds)
if "b_inds" in globals():  # from now on, half of the rows
    minibatch_envs //= 2
else:
    minibatch_size //= 2
whole = result
for args.norm_adv, args.clip_vloss in ((True, True), (False, False)):
    result = {}
    exec(UPDATE)
    whole["cases"].append(result | {"args": dict(vars(args))})
"""


def first_ratio_then(update):
    """Code for after a run with one minibatch: what its last update had; one more on half the rows, in two cases."""
    return FIRST_RATIO.replace("UPDATE", repr(update))


def compare_losses(got, switches, share=0.5):
    clip, ratio = got["args"]["clip_coef"], np.exp(got["newlogprob"].astype(float) - got["logprobs"])
    assert (abs(ratio - 1) > clip).any() and (abs(ratio - 1) < clip).any()
    advantage = got["advantages"]
    if "--no-norm-adv" not in switches:
        advantage = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
    surrogate = [min(a * r, a * min(max(r, 1 - clip), 1 + clip)) for a, r in zip(advantage, ratio, strict=True)]
    pg_loss = -np.mean(surrogate)
    errors = []
    for new, old, target in zip(got["newvalue"].astype(float), got["values"], got["returns"], strict=True):
        held = min(max(new, old - clip), old + clip)
        plain = (new - target) ** 2
        errors.append(plain if "--no-clip-vloss" in switches else max(plain, (held - target) ** 2))
    v_loss, entropy = share * np.mean(errors) + got.get("int_v_loss", 0), got["entropy"].mean()
    approx_kl = np.mean(ratio - 1 - np.log(ratio))
    loss = pg_loss - 0.03 * entropy + 0.7 * v_loss + got.get("fwd_loss", 0)
    expected = [pg_loss, v_loss, entropy, loss, approx_kl]
    np.testing.assert_allclose(got["losses"], expected, rtol=1e-3, atol=1e-5)
    assert got["grad_norm"] <= 0.01 * 1.001
    assert got["moved"] > 0


FOLLOW_TRANSITIONS = """
import numpy as np
import gymnasium as gym

result["seen"], last = [], None
step, reset = gym.vector.SyncVectorEnv.step, gym.vector.SyncVectorEnv.reset


def follow_reset(self, **options):
    global last
    out = reset(self, **options)
    last = np.array(out[0])
    return out


def follow_step(self, actions):
    global last
    out = step(self, actions)
    for i in range(self.num_envs):
        over = out[2][i] or out[3][i]
        after = out[4]["final_obs"][i] if over else out[0][i]
        row = [*last[i], *after, *np.ravel(actions[i]), out[1][i], out[2][i]]
        result["seen"].append(np.array(row, dtype=np.float32))
    last = np.array(out[0])
    return out


gym.vector.SyncVectorEnv.step, gym.vector.SyncVectorEnv.reset = follow_step, follow_reset
"""


def slow_projection(pmf, reward, terminated, support, gamma):
    """Equation 7 of the paper for one sample, in exact arithmetic but for the inputs: atom by atom."""
    support = [Fraction(float(atom)) for atom in support]
    gap = (support[-1] - support[0]) / (len(support) - 1)
    projected = [Fraction(0)] * len(support)
    for mass, atom in zip(pmf, support, strict=True):
        value = Fraction(float(reward)) + (0 if terminated else Fraction(gamma) * atom)
        value = min(max(value, support[0]), support[-1])
        for i, other in enumerate(support):
            projected[i] += Fraction(float(mass)) * max(0, 1 - abs(value - other) / gap)
    return [float(mass) for mass in projected]


FOLLOW = """
import copy
import sys

import CLASS_MODULE as module
import numpy as np

kind = module.CLASS
step, reset, init = kind.step, kind.reset, kind.__init__
result |= {"stream": [], "agents": {}}


def short(self, *args, **options):
    init(self, *args, **(options | OPTIONS))


def follow_reset(self, **options):
    out = reset(self, **options)
    result["stream"].append(np.array(out[0]))
    return out


def follow_step(self, actions):
    names = sys._getframe()
    while "Run" not in names.f_globals or "iteration" not in names.f_globals:
        names = names.f_back
    names = names.f_globals
    actions, out = np.array(actions), step(self, actions)
    final, over = np.array(out[0]), out[2] | out[3]
    if over.any():
        final[over] = np.stack(out[4]["final_obs"][over])
    result["agents"].setdefault(names["iteration"], copy.deepcopy(names["agent"]))  # changes between rollouts only
    record = actions, np.array(out[1]), np.array(out[2]), np.array(out[3]), final, names["iteration"]
    result["stream"] += [record, np.array(out[0])]
    return out


kind.__init__, kind.reset, kind.step = short, follow_reset, follow_step
"""


STACK, FRAME = 4, (3, 2)


class Game:
    """Random frames; an episode ends by a lost life (the frames go on), by termination or by truncation."""

    def __init__(self, rng):
        self.rng = rng
        self.reset()

    def frame(self):
        return self.rng.integers(256, size=FRAME, dtype=np.uint8)

    def reset(self):
        self.obs = np.zeros((STACK, *FRAME), dtype=np.uint8)
        self.obs[-1] = self.frame()

    def step(self):
        """Action, reward, terminated, whether a reset follows."""
        self.obs = np.concatenate((self.obs[1:], self.frame()[None]))
        event = self.rng.choice(["none", "life", "terminated", "truncated"], p=[0.8, 0.1, 0.06, 0.04])
        ends = event in ("terminated", "truncated")
        return self.rng.integers(6), self.rng.integers(-1, 2), event in ("life", "terminated"), ends


def play(replay, games, steps, stacks, plain):
    """Add `steps` steps of all games to the replay, and to the list `plain` as whole observations."""
    for _ in range(steps):
        before = [game.obs for game in games]
        action, reward, terminated, reset = map(np.array, zip(*(game.step() for game in games)))
        after = [game.obs for game in games]
        followed = replay.frames.add(np.stack(after)[:, -1])
        columns = np.column_stack((action, reward, terminated))
        extra = replay.rows.slots.shape[1] - STACK - 1 - 3
        columns = np.column_stack((columns, *[terminated] * extra))
        replay.add(np.column_stack((stacks, followed, columns)))
        plain += [(b, a, tuple(column)) for b, a, column in zip(before, after, columns)]
        stacks[:] = np.column_stack((stacks[:, 1:], followed))
        for i in np.flatnonzero(reset):
            games[i].reset()
            stacks[i] = replay.frames.add(games[i].obs)


IN_HALVES = """
from ale_py.vector_env import AtariVectorEnv

send, recv = AtariVectorEnv.send, AtariVectorEnv.recv


def keep(self, actions):
    self.sent = actions.copy()
    send(self, actions)


def whole_step(self, actions):  # ale_py's own does not call `recv`
    self.send(actions)
    return self.recv()


AtariVectorEnv.send, AtariVectorEnv.step = keep, whole_step
"""
REWARD = (
    IN_HALVES
    + """

def reward_some_actions(self):
    obs, reward, *rest = recv(self)
    return obs, reward + (3 * (self.sent % 3) - 3).astype(reward.dtype), *rest


AtariVectorEnv.recv = reward_some_actions
"""
)


def convolutional(weights, obs):
    """The network of the paper, layer by layer."""
    import torch

    relu, conv2d = torch.relu, torch.nn.functional.conv2d
    x = relu(conv2d(obs / 255, *weights[0:2], stride=4))
    x = relu(conv2d(x, *weights[2:4], stride=2))
    x = relu(conv2d(x, *weights[4:6]))
    x = relu(x.flatten(1) @ weights[6].T + weights[7])
    return x @ weights[8].T + weights[9]
