"""RND: curiosity, its filter, both returns and the losses against slow oracles, alone and over whole runs."""

import signal
from pathlib import Path

import numpy as np
import pytest

from helpers.files import defines, discrete_envs, each, load, posix, require_for, script, smoke
from helpers.oracles import UPDATE_ONCE_MORE, advantages_of_episode, compare_losses, first_ratio_then
from helpers.processes import environment, inspect_run, inspect_runs, run_dir, start
from helpers.scalars import raw_scalars

torch = pytest.importorskip("torch")

has_curiosity = each(lambda name: defines(name, "int_coef"))


def slow_sums(rewards, gamma):
    """Environment by environment, each term of each sum: (num_steps, num_envs)."""
    return np.array(
        [
            [sum(gamma ** (t - k) * rewards[k][env] for k in range(t + 1)) for env in range(len(rewards[0]))]
            for t in range(len(rewards))
        ]
    )


@has_curiosity
def test_sums_run_over_time(name):
    """As many steps as environments, so that a filter over environments would not show by its shape."""
    rewards = np.random.default_rng(0).random((12, 12)).astype(np.float32)
    expected, sums = slow_sums(rewards, 0.9), load(name).discounted_sums
    np.testing.assert_allclose(sums(rewards, np.zeros(12), 0.9), expected, rtol=1e-5)
    first = sums(rewards[:5], np.zeros(12), 0.9)
    np.testing.assert_allclose(sums(rewards[5:], first[-1], 0.9), expected[5:], rtol=1e-5)


@has_curiosity
def test_mean_of_a_random_share(name):
    mean_of_share, shares = load(name).mean_of_share, []
    for seed in range(50):
        x = torch.randn(100, requires_grad=True)
        torch.manual_seed(seed)
        mean = mean_of_share(x, 0.25)
        mean.backward()
        chosen = x.grad != 0
        shares.append(chosen.float().mean().item())
        torch.testing.assert_close(mean, x[chosen].mean())
    assert np.mean(shares) == pytest.approx(0.25, abs=0.02) and len(set(shares)) > 5
    assert mean_of_share(torch.ones(5), 0.0) == 0, "nobody chosen"
    assert mean_of_share(torch.ones(5), 1.0) == 1


@has_curiosity
def test_familiar_frames_lose_their_reward_and_new_ones_keep_it(name):
    module = load(name)
    torch.manual_seed(0)
    agent = module.Agent(discrete_envs())
    frames = torch.randint(256, (2, 4, 1, 12, 12)).repeat_interleave(7, -2).repeat_interleave(7, -1).byte()
    agent.obs_rms.update(frames.flatten(0, 1).float())
    familiar, new = frames
    target = [param.clone() for param in agent.target.parameters()]
    trained = [param for param in agent.parameters() if param.requires_grad]
    assert not {*map(id, trained)} & {*map(id, agent.target.parameters())}
    optimizer = torch.optim.Adam(trained, 1e-3)
    with torch.no_grad():
        before = agent.prediction_error(new).mean()
    for _ in range(40):
        optimizer.zero_grad()
        agent.prediction_error(familiar).mean().backward()
        optimizer.step()
    with torch.no_grad():
        error, other = agent.prediction_error(familiar).mean(), agent.prediction_error(new).mean()
    assert error < 0.01 * before and other > 0.2 * before, (before, error, other)
    for now, then in zip(agent.target.parameters(), target, strict=True):
        assert torch.equal(now, then)


@has_curiosity
@torch.no_grad()
def test_inputs_and_values(name):
    """The networks of curiosity see standardised frames within +-5; values are those of the layer with the residual."""
    torch.manual_seed(0)
    agent, seen = load(name).Agent(discrete_envs()), []
    frames = torch.randint(256, (30, 1, 84, 84), dtype=torch.uint8)
    frames[:, :, 0] = 7
    agent.obs_rms.update(frames.float())
    agent.target.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0]))
    other = torch.randint(256, (30, 1, 84, 84), dtype=torch.uint8)
    agent.prediction_error(other)
    deviation = np.maximum(frames.numpy().std(0, dtype=float), 1e-4)
    expected = (other.numpy() - frames.numpy().mean(0)) / deviation
    np.testing.assert_allclose(seen[0], expected.clip(-5, 5), atol=5e-3)
    assert (abs(expected) > 5).any()

    obs = torch.randint(256, (5, 4, 84, 84), dtype=torch.uint8)
    hidden = agent.network(obs / 255)
    both = agent.critic(hidden + agent.extra(hidden)).T
    for values in (agent.get_value(obs), agent.evaluate(obs, torch.zeros(5, dtype=torch.long))[2:]):
        torch.testing.assert_close(torch.stack(list(values)), both)


FOLLOW = """
import envpool
import numpy as np

make = getattr(envpool.make, "plain", envpool.make)
result["pools"] = []


class Follow:
    def __init__(self, pool):
        self.pool, self.close, self.stream = pool, pool.close, []
        result["pools"].append(self.stream)

    def reset(self, ids=None):
        out = self.pool.reset(*([] if ids is None else [ids]))
        self.stream.append(("reset", out[1]["env_id"].copy(), out[0].copy()))
        return out

    def step(self, actions):
        out = self.pool.step(actions)
        self.stream.append(("step", *(np.array(x) for x in (*out[:4], out[4]["lives"]))))
        return out


def make_short(*args, **options):
    return Follow(make(*args, **options, max_episode_steps=40))


make_short.plain = make
envpool.make = make_short
"""
CURIOSITY = """
prime, play = ([record for record in pool if record[0] == "step"] for pool in result["pools"])
frames = [np.array([record[1][:, -1:] for record in steps], dtype=float) for steps in (prime, play)]
rollouts = np.split(frames[1], num_iterations)  # the frame that each step has led to
curious, seen = [], [frames[0]]
for rollout in rollouts:
    past = np.concatenate(seen).reshape(-1, 1, 84, 84)
    x = (rollout.reshape(-1, 1, 84, 84) - past.mean(0)) / np.maximum(past.std(0), 1e-4)
    x = torch.from_numpy(x.clip(-5, 5)).float()
    with torch.no_grad():
        distance = agent.predictor(x) - agent.target(x)
    curious.append(0.5 * (distance.double() ** 2).sum(1).numpy().reshape(-1, args.num_envs))
    seen.append(rollout)

observations = []  # that the agent has acted on, the last one after the end
for record in result["pools"][1]:
    if record[0] == "step":
        observations.append(record[1].copy())
    elif len(record[1]) == args.num_envs and not observations:
        observations.append(record[2].copy())
    else:
        observations[-1][record[1]] = record[2]
observations = np.array(observations)[-args.num_steps - 1 :]


def both_values(x):
    with torch.no_grad():
        return [v.numpy().reshape(x.shape[:2]) for v in agent.get_value(torch.from_numpy(x).flatten(0, 1))]


final = np.array([record[1] for record in play])[-args.num_steps :]
result |= {"expected_curiosity": np.concatenate(curious), "observations": observations, "args": vars(args)}
result |= {"values": both_values(observations), "final_values": both_values(final)[0], "lr_0_curiosity": curiosity}
result |= {"rows": [np.array(column) for column in zip(*(record[2:] for record in play))]}
names = ["obs", "int_rewards", "b_advantages", "b_returns", "b_int_returns", "int_return"]
result |= {name: np.array(globals()[name]) for name in names} | {"folder": str(run.dir.resolve())}
del result["pools"]
"""


def ends_of_games(terminated, truncated, lives):
    """ "no", "terminated" (a lost life too) or "truncated", and where whole games end."""
    ends, before = np.full(terminated.shape, "no", dtype="<U10"), lives[0].copy()
    for t, env in np.ndindex(terminated.shape):
        lost = 0 < lives[t, env] < before[env]
        if terminated[t, env] or lost:
            ends[t, env] = "terminated"
        elif truncated[t, env]:
            ends[t, env] = "truncated"
        before[env] = lives[0, env] if terminated[t, env] or truncated[t, env] else lives[t, env]
    return ends, terminated.astype(bool) | truncated.astype(bool)


@has_curiosity
def test_whole_runs(name, tmp_path):
    """Of two rollouts and of one, with games of 40 steps. A step size of zero keeps the networks as they began.

    What the agent saw, what was new to it, both returns and the loss of the predictor follow from the games alone.
    """
    require_for(name)
    flags = {"num_envs": 3, "num_steps": 64, "learning_rate": 0, "update_proportion": 1, "num_minibatches": 2}
    flags |= {"int_coef": 1.5, "ext_coef": 0.7, "int_gamma": 0.8, "gamma": 0.9, "gae_lambda": 0.6}
    lines = [smoke(name, **flags, total_timesteps=2 * 64 * 3)]
    lines.append(smoke(name, **flags, total_timesteps=64 * 3, env_id=None))
    runs = inspect_runs(script(name), lines, cwd=tmp_path, before=FOLLOW, after=CURIOSITY)
    assert runs[1]["args"]["env_id"] == "MontezumaRevenge-v5"
    for got, count in zip(runs, (2, 1), strict=True):
        compare_run(got, count)
    assert runs[0]["stdout"].count("Random play") == 2


def compare_run(got, count):
    rewards, terminated, truncated, lives = got["rows"]
    ends, over = ends_of_games(terminated, truncated, lives)
    assert over.any() and (ends == "truncated").any()
    np.testing.assert_array_equal(got["obs"], got["observations"][:-1])

    expected = got["expected_curiosity"]
    np.testing.assert_allclose(got["lr_0_curiosity"], expected[-64:], rtol=1e-3)
    sums = slow_sums(expected, 0.8)
    np.testing.assert_allclose(got["int_return"], sums[-1], rtol=1e-3)
    int_rewards = expected[-64:] / sums.std()
    np.testing.assert_allclose(got["int_rewards"], int_rewards, rtol=2e-3)

    values, int_values = got["values"]
    ends, advantages, int_advantages = ends[-64:], np.zeros((64, 3)), np.zeros((64, 3))
    for env in range(3):
        int_advantages[:, env] = advantages_of_episode(
            int_rewards[:, env], int_values[:-1, env], int_values[-1, env], 0.8, 0.6
        )
        start = 0
        for t in range(64):
            if ends[t, env] != "no" or t == 63:
                last = {"terminated": 0, "truncated": got["final_values"][t, env], "no": values[64, env]}[ends[t, env]]
                part = slice(start, t + 1)
                stretch = np.sign(rewards[-64:])[part, env], values[:-1][part, env], last, 0.9, 0.6
                advantages[part, env] = advantages_of_episode(*stretch)
                start = t + 1
    close = {"rtol": 5e-3, "atol": 1e-4}
    np.testing.assert_allclose(got["b_returns"], (advantages + values[:-1]).flatten(), **close)
    np.testing.assert_allclose(got["b_int_returns"], (int_advantages + int_values[:-1]).flatten(), **close)
    np.testing.assert_allclose(got["b_advantages"], (0.7 * advantages + 1.5 * int_advantages).flatten(), **close)
    compare_log(got, expected, over, count)


def compare_log(got, curiosity, over, count):
    """The predictor is trained on the frames that have given the reward, and a game has the sum of its rewards."""
    logged = {}
    for tag, step, value in raw_scalars(Path(got["folder"])):
        logged.setdefault(tag, []).append((step, value))
    for k, (_, fwd_loss) in enumerate(logged["losses/fwd_loss"]):
        assert fwd_loss == pytest.approx(curiosity[64 * k : 64 * (k + 1)].mean() * 2 / 512, rel=1e-3)
    assert len(logged["losses/fwd_loss"]) == count
    games, begin = [], np.zeros(3, dtype=int)
    for t, env in np.argwhere(over):
        games.append((t * 3 + env + 1, curiosity[begin[env] : t + 1, env].sum()))
        begin[env] = t + 1
    assert [step for step, _ in logged["charts/episode_curiosity_reward"]] == [step for step, _ in games]
    sums = [value for _, value in logged["charts/episode_curiosity_reward"]]
    assert sums == pytest.approx([value for _, value in games], rel=1e-3)


BOTH_VALUES = """
with torch.no_grad():
    result["int_v_loss"] = 0.5 * ((int_value[0] - b_int_returns[inds]) ** 2).double().mean().item()
    error = agent.prediction_error(b_next_frames[inds]).double().mean(1)
torch.manual_seed(5)
result["fwd_loss"] = error[torch.rand(len(error)) < args.update_proportion].mean().item()
target = agent.target[0].weight.clone()
result |= {"weights": weights.numel()}
torch.manual_seed(5)
"""


@has_curiosity
def test_losses(name, tmp_path):
    """As in test_math.py, with the loss of the second value, never clipped, and that of the predictor."""
    require_for(name)
    flags = {"learning_rate": 0.003, "ent_coef": 0.03, "vf_coef": 0.7, "max_grad_norm": 0.01, "num_minibatches": 1}
    argv = [*smoke(name, num_steps=32, total_timesteps=128, **flags), "--no-anneal-lr"]
    update = UPDATE_ONCE_MORE.replace("before = weights", BOTH_VALUES + "before = weights")
    update += "\nresult |= {'fwd': logged['fwd_loss'].item(), 'kept': torch.equal(target, agent.target[0].weight)}"
    result = inspect_run(script(name), *argv, cwd=tmp_path, after=first_ratio_then(update))
    for switches, got in zip(([], ["--no-clip-vloss", "--no-norm-adv"]), result["cases"], strict=True):
        compare_losses(got, switches)
        assert got["fwd"] == pytest.approx(got["fwd_loss"], rel=1e-3)
        assert got["kept"], "the target network has moved"
    assert result["approx_kl"] == pytest.approx(0, abs=1e-6)
    agent = load(name).Agent(discrete_envs(num_actions=4))
    trained = sum(param.numel() for part in agent.children() if part is not agent.target for param in part.parameters())
    assert result["cases"][0]["weights"] == trained


@posix
@has_curiosity
def test_sigterm_during_random_play(name, tmp_path):
    """It ends soon, and leaves the checkpoint of step 0, from which a resumed run plays at random again."""
    require_for(name)
    process = start(script(name), *smoke(name, num_iterations_obs_norm_init=1000), cwd=tmp_path, env=environment())
    try:
        assert process.stdout.readline() == "Random play to standardise frames: 64000 steps\n"
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75, stderr
    assert "Stopped at step 0" in stdout and f"--resume {run_dir(tmp_path).relative_to(tmp_path)}" in stdout
    checkpoint = torch.load(run_dir(tmp_path) / "checkpoint.pt")
    assert checkpoint["global_step"] == 0 and checkpoint["agent"]["obs_rms.count"] < 1
