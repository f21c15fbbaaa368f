"""Ape-X: what actors send, its replay, optimizer and update against slow texts; and that losing a part ends nothing.

Runs with Ray are few and do several things each, as a Ray takes seconds to start.
"""

import math
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from helpers.files import ROOT, each, load, posix, require, require_for, script, smoke
from helpers.processes import environment, inspect_run, private_network, run, run_dir, start
from helpers.scalars import assert_clean, raw_scalars, steps

require("torch")
import torch  # noqa: E402

apex = each(lambda name: name.startswith("apex"))
linux = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
STACK, FRAME = 4, (3, 2)


# Equations


@apex
def test_exploration_rates(name):
    rates = load(name).exploration_rates(0.4, 7.0, 5)
    assert rates == pytest.approx([0.4 ** (1 + 7 * i / 4) for i in range(5)])
    assert rates[0] == 0.4 and rates[-1] == pytest.approx(0.4**8)
    assert load(name).exploration_rates(0.4, 7.0, 1) == pytest.approx([0.4])


def slow_return(rewards, terminated, truncated, t, n, gamma):
    """Return, discount and last step of one game from step t on."""
    total = 0.0
    for k in range(n):
        total += gamma**k * rewards[t + k]
        if terminated[t + k]:
            return total, 0.0, t + k
        if truncated[t + k]:
            break
    return total, gamma ** (k + 1), t + k


@apex
@pytest.mark.parametrize("n", [1, 3, 5])
def test_n_step_returns(name, n):
    rng = np.random.default_rng(n)
    rewards = rng.integers(-1, 2, size=(60, 4))
    terminated, truncated = rng.random((2, 60, 4)) < 0.15
    got = load(name).n_step_returns(rewards, terminated, truncated, 0.9, n)
    assert got[0].shape == (60 - n, 4)
    for t in range(60 - n):
        for game in range(4):
            expected = slow_return(*(x[:, game] for x in (rewards, terminated, truncated)), t, n, 0.9)
            assert [float(x[t, game]) for x in got] == pytest.approx(expected)


@apex
def test_double_q_target(name):
    rng = np.random.default_rng(0)
    returns, discounts = rng.normal(size=(2, 30))
    online, target = rng.normal(size=(2, 30, 4))
    got = load(name).double_q_target(*map(torch.tensor, (returns, discounts, online, target)))
    expected = [r + d * t[list(o).index(max(o))] for r, d, o, t in zip(returns, discounts, online, target, strict=True)]
    assert got.numpy() == pytest.approx(expected)


@apex
def test_rmsprop(name):
    """Against the formula number by number; a gradient that stays the same has no variance, which is no trouble."""
    lr, decay, eps = 0.01, 0.95, 1.5e-7
    gradients = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = load(name).RMSProp([param], lr=lr)
    expected, mean, square = [0.0] * 3, [0.0] * 3, [0.0] * 3
    for gradient in gradients:
        param.grad = torch.tensor(gradient)
        optimizer.step()
        for i, g in enumerate(gradient.tolist()):
            mean[i] = decay * mean[i] + (1 - decay) * g
            square[i] = decay * square[i] + (1 - decay) * g * g
            expected[i] -= lr * g / math.sqrt(square[i] - mean[i] ** 2 + eps)
    assert param.tolist() == pytest.approx(expected, rel=1e-4)
    constant = torch.nn.Parameter(torch.zeros(1000))
    optimizer, gradient = load(name).RMSProp([constant], lr=lr), torch.randn(1000)
    for _ in range(1000):
        constant.grad = gradient.clone()
        optimizer.step()
    assert constant.isfinite().all(), "torch's RMSprop gives NaN for a quarter of these"


# Replay of batches


def random_batch(rng, rows, number):
    """Frames, rows and priorities as an actor sends them, and the same as plain transitions."""
    frames = rng.integers(256, size=(rows + 9, *FRAME), dtype=np.uint8)
    first = np.arange(rows)
    numbers = np.concatenate((first[:, None] + np.arange(STACK), first[:, None] + 3 + np.arange(STACK)), 1)
    actions, returns, discounts = rng.integers(6, size=rows), rng.normal(size=rows), rng.random(rows)
    priorities = rng.random(rows) + 0.1
    packed = np.column_stack((numbers, actions, returns.view(np.int64), discounts.view(np.int64)))
    plain = [
        (number + i, frames[numbers[i, :STACK]], frames[numbers[i, STACK:]], actions[i], returns[i], discounts[i], p)
        for i, p in enumerate(priorities)
    ]
    return (frames, packed, priorities), plain


def assert_replay(replay, plain):
    """Every transition that can be drawn is the plain one of its number, and no other can be drawn."""
    first, count = replay.window.tolist()
    assert first + count == len(plain) and replay.tree.leaves.sum() == pytest.approx(replay.tree.sums.sum())
    priorities = torch.zeros(replay.tree.leaves.numel(), dtype=torch.float64)
    for number, obs, next_obs, action, total, discount, priority in plain[first:]:
        row = replay.rows[np.array(number)]
        np.testing.assert_array_equal(replay.frames[row[: 2 * STACK]].numpy(), np.concatenate((obs, next_obs)))
        assert row[-3] == action and row[-2:].view(torch.float64).tolist() == [total, discount]
        priorities[number % replay.size] = priority
    np.testing.assert_array_equal(replay.tree.leaves.view(-1), priorities)


@apex
def test_replay_of_batches(name, tmp_path):
    module, rng, plain, rows, size = load(name), np.random.default_rng(0), [], 7, 150
    replay = module.BatchReplay(size, rows, (STACK, *FRAME), "cpu", tmp_path)
    for call in range(60):
        batch, transitions = random_batch(rng, rows, len(plain))
        replay.add(*batch)
        plain += transitions
        if call % 3 == 1:
            replay.flush()
            assert_replay(replay, plain)
        if call % 20 == 10:
            saved = replay.state_dict()
            again = module.BatchReplay(size, rows, (STACK, *FRAME), "cpu", tmp_path)
            again.load_state_dict(saved)
            assert_replay(again, plain)
            assert again.oldest == replay.oldest
    assert len(plain) > 2 * size and replay.window[1] > size / 3

    torch.manual_seed(0)
    replay.flush()
    slots, columns, frames = replay.sample(20_000, 0.7)
    first = replay.window[0].item()
    total = sum(transition[-1] for transition in plain[first:])
    smallest = min(transition[-1] for transition in plain[first:])
    for number, obs, next_obs, action, value, discount, priority in plain[first:]:
        drawn = (slots == number % replay.size).nonzero().squeeze(1)
        assert len(drawn) == pytest.approx(20_000 * priority / total, abs=2), "one draw from each equal part"
        weight, *rest = columns[drawn[0]].tolist()
        assert weight == pytest.approx((priority / smallest) ** -0.7)
        assert rest == pytest.approx([action, value, discount])
        np.testing.assert_array_equal(frames[drawn[0]], np.concatenate((obs, next_obs)))


# What an actor sends


class Follower:
    """Stands between an actor and its games and writes down what happens."""

    def __init__(self, envs):
        self.envs, self.log = envs, []

    def __getattr__(self, name):
        return getattr(self.envs, name)

    def reset(self, **options):
        obs, infos = self.envs.reset(**options)
        self.obs, self.clock = np.array(obs), infos["episode_frame_number"].copy()
        return obs, infos

    def step(self, actions):
        next_obs, reward, terminated, truncated, infos = result = self.envs.step(actions)
        restarted = infos["episode_frame_number"] < self.clock
        after = [infos["final_obs"][i] if over else next_obs[i] for i, over in enumerate(restarted)]
        entry = self.obs, np.array(after), np.array(actions), np.array(reward), np.array(terminated)
        self.log.append((*entry, np.array(truncated), restarted))
        self.obs, self.clock = np.array(next_obs), infos["episode_frame_number"].copy()
        return result


@apex
def test_batches_of_an_actor(name, monkeypatch):
    """Rows, frames, priorities and episodes of two games that lose lives and are cut off, batch by batch."""
    module, gamma, n, alpha, per_batch = load(name), 0.9, 3, 0.6, 30
    make_envs = module.make_envs
    monkeypatch.setattr(
        module, "make_envs", lambda *a, **o: Follower(make_envs(*a, **o, max_num_frames_per_episode=300))
    )
    threads = torch.get_num_threads()
    actor = module.Actor("BreakoutNoFrameskip-v4", 5, np.array([0.9, 0.6]), n, gamma, alpha)
    torch.set_num_threads(threads)
    weights = [np.random.default_rng(i).normal(scale=0.03, size=len(actor.weights)) for i in range(8)]
    batches, played_by = [], []
    for vector in weights:
        batches.append(actor.collect(vector.astype(np.float32), per_batch))
        played_by += [len(batches) - 1] * (len(actor.envs.log) - len(played_by))
    log = list(zip(*actor.envs.log))
    obs, after, actions, rewards, terminated, truncated, restarted = map(np.array, log)
    assert truncated.any() and (terminated & ~restarted).any(), "no time limit or no lost life: the case does not tell"
    assert len(batches) * per_batch <= len(obs) <= len(batches) * per_batch + n

    network = module.QNetwork(actor.envs)
    vector, played_by = module.flatten(network), np.array(played_by)
    values = np.zeros((2, *actions.shape, 4))  # of the observations before and after each step, by who played it
    for number in range(len(weights)):
        vector.data.copy_(torch.from_numpy(weights[number]))
        for i, observations in enumerate((obs, after)):
            chosen = torch.from_numpy(observations[played_by == number]).flatten(0, 1)
            values[i, played_by == number] = network(chosen).detach().view(-1, 2, 4)

    def slow_priority(t, game, last, total, discount):
        following = values[1, last, game] if truncated[last, game] or discount == 0 else values[0, last + 1, game]
        error = total + discount * max(following) - values[0, t, game, actions[t, game]]
        return (abs(error) + 1e-6) ** alpha

    sums, lengths, episodes = np.zeros(2), np.zeros(2), []
    for t in range(len(batches) * per_batch):
        frames, rows, priorities, ended = batches[t // per_batch]
        assert rows.shape == (2 * per_batch, 2 * STACK + 3) and rows[:, : 2 * STACK].min() == 0
        assert rows[:, : 2 * STACK].max() == len(frames) - 1 and frames.dtype == np.uint8
        assert len(frames) < 2 * (per_batch + n + STACK) + 2 * 4 * len(ended) + 8, "frames are sent more than once"
        for game in range(2):
            at = t % per_batch * 2 + game
            row = rows[at]
            columns = (x[:, game] for x in (np.sign(rewards), terminated, truncated))
            total, discount, last = slow_return(*columns, t, n, gamma)
            np.testing.assert_array_equal(frames[row[:STACK]], obs[t, game])
            np.testing.assert_array_equal(frames[row[STACK : 2 * STACK]], after[last, game])
            assert row[-3] == actions[t, game]
            assert row[-2:].view(np.float64).tolist() == pytest.approx([total, discount])
            assert priorities[at] == pytest.approx(slow_priority(t, game, last, total, discount), rel=1e-3)
            sums[game] += rewards[t, game]
            lengths[game] += 1
            if restarted[t, game]:
                episodes.append((t // per_batch, at + 1, sums[game], lengths[game]))
                sums[game] = lengths[game] = 0
    assert [(i, *episode) for i, batch in enumerate(batches) for episode in batch[3]] == episodes
    assert len(episodes) > 2


@apex
def test_actors_explore_at_their_rates(name):
    module = load(name)
    threads = torch.get_num_threads()
    actor = module.Actor("BreakoutNoFrameskip-v4", 5, np.array([0.0, 0.5, 1.0]), 1, 0.9, 0.6)
    torch.set_num_threads(threads)
    vector = np.zeros(len(actor.weights), dtype=np.float32)
    vector[-2] = 1.0  # the bias of the last action but one: without it all would be equal
    actions = actor.collect(vector, 400)[1][:, -3].reshape(400, 3)
    shares = [float((actions[:, game] == 2).mean()) for game in range(3)]
    assert shares == pytest.approx([1.0, 0.5 + 0.5 / 4, 1 / 4], abs=0.08)


# Runs

UPDATE_ONCE_MORE = """
result |= {"gradient_steps": gradient_steps, "restarts": actor_restarts, "epsilons": epsilons, "args": vars(args)}
result["apart"] = bool((weights != target_weights).any())
leaves = replay.tree.leaves.view(-1)
result["leaves"] = leaves.numpy().copy()
with torch.no_grad():  # a target network that dislikes most what the online one likes best
    target_weights.copy_(weights)
    for param in target_network.advantage[-1].parameters():
        param.data.neg_()
state = torch.get_rng_state()
slots, columns, frames = replay.sample(args.batch_size, args.importance_exponent)
with torch.no_grad():
    result["choosing"], result["valuing"] = q_network(frames[:, 4:]).numpy(), target_network(frames[:, 4:]).numpy()
    result["q_values"] = q_network(frames[:, :4]).numpy()
    hidden = q_network.network(frames[:, :4] / 255)
    result["streams"] = [q_network.value(hidden).numpy(), q_network.advantage(hidden).numpy()]
torch.set_rng_state(state)
args.max_grad_norm = 0.001
sums = [value.item() for value in update()[0].values()]
result |= {"slots": slots.numpy(), "columns": columns.numpy(), "sums": sums}
result |= {"after": leaves.numpy().copy(), "norm": weights.grad.norm().item()}
"""


def compare_update(got, total, restarts):
    """Counts and rates of a run with two actors that send batches at the same time, and one more update by hand."""
    args = got["args"]
    due = [step for step in range(20, total + 1, 20) if 40 * math.ceil(step / 40) > args["learning_starts"]]
    assert got["gradient_steps"] == len(due) and got["restarts"] == restarts
    assert got["epsilons"] == pytest.approx([0.95 ** (1 + 7 * i / 3) for i in range(4)])
    errors, swaps = [], 0
    for i, (_, action, total, discount) in enumerate(got["columns"]):
        best = int(np.argmax(got["choosing"][i]))
        swaps += best != int(np.argmax(got["valuing"][i]))
        errors.append(total + discount * got["valuing"][i][best] - got["q_values"][i][int(action)])
    assert swaps > 3, "the two networks choose alike: the case does not tell"
    assert got["apart"], "the target network is the online one"
    weights = got["columns"][:, 0]
    assert weights.max() == 1 and weights.min() < 1
    taken = [q[int(action)] for q, action in zip(got["q_values"], got["columns"][:, 1], strict=True)]
    expected = [np.mean(weights * np.square(errors)) / 2, np.mean(taken)]
    np.testing.assert_allclose(got["sums"], expected, rtol=1e-3, atol=1e-4)
    assert got["norm"] == pytest.approx(0.001, rel=1e-2), "gradients are not clipped"
    leaves = got["leaves"].copy()
    leaves[got["slots"]] = (np.abs(errors) + 1e-6) ** 0.6
    np.testing.assert_allclose(got["after"], leaves, rtol=1e-3)
    value, advantage = got["streams"]
    np.testing.assert_allclose(got["q_values"], value + advantage - advantage.mean(1, keepdims=True), atol=1e-5)


def processes(mark):
    """The processes whose environment has the mark: pid -> command line."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:  # it has just ended
            pass
    return found


def actor_pids(mark):
    return [pid for pid, command in processes(mark).items() if command.startswith("ray::Actor")]


def wait_for(condition, what, seconds=240):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"no {what} after {seconds} s"
        time.sleep(0.05)
    return value


def last_step(cwd):
    """The last step of which a run has written something."""
    folders = list(cwd.glob("runs/*"))
    return max([0, *(step for _, step, _ in raw_scalars(folders[0], partial_tail=True))]) if folders else 0


class Run:
    """A run with a mark on all its processes; ends them all, whatever happens."""

    def __init__(self, name, *argv, cwd):
        self.mark, self.cwd = f"MARK={uuid.uuid4().hex}", cwd
        self.log = (cwd / f"{self.mark}.log").open("w+")
        command = start.__globals__["python"](script(name))
        key, value = self.mark.split("=")
        self.process = subprocess.Popen(
            [*command, str(script(name)), *map(str, argv)],
            cwd=cwd,
            env=environment(**{key: value}),
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in processes(self.mark):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()

    def output(self):
        return Path(self.log.name).read_text()

    def until(self, condition, what):
        def happened():
            assert self.process.poll() is None, self.output()[-4000:]
            return condition()

        return wait_for(happened, what)

    def reach(self, step):
        self.until(lambda: last_step(self.cwd) >= step, f"step {step}")

    def gone(self):
        wait_for(lambda: not processes(self.mark), "end of all processes", 180)


@posix
@linux
@apex
def test_losing_an_actor_then_a_resume(name, tmp_path):
    """An actor is killed, then SIGTERM; then the rest, and one more update. No process is left behind by either."""
    require_for(name)
    flags = {"batch_size": 32, "learning_rate": 0.001, "target_network_frequency": 70, "gamma": 0.9}
    argv = smoke(name, num_actors=2, total_timesteps=10**6, checkpoint_freq=300, **flags)
    with Run(name, *argv, cwd=tmp_path) as first:
        first.reach(200)
        victim = actor_pids(first.mark)[0]
        os.kill(victim, signal.SIGKILL)
        first.until(lambda: "is gone and is replaced" in first.output(), "notice of the loss")
        first.until(lambda: len(set(actor_pids(first.mark)) - {victim}) == 2, "second actor")
        first.reach(last_step(tmp_path) + 1)
        first.process.terminate()
        assert first.process.wait(180) == 75, first.output()[-4000:]
        first.gone()
    folder = run_dir(tmp_path)
    stopped, stop = raw_scalars(folder), torch.load(folder / "checkpoint.pt")["global_step"]
    assert_clean(stopped)
    assert max(value for tag, _, value in stopped if tag == "charts/actor_restarts") == 1
    assert f"--resume {folder.relative_to(tmp_path)}" in first.output() and f"Stopped at step {stop}" in first.output()

    total, mark = stop + 400, uuid.uuid4().hex
    while total // 70 > (total - 40) // 70:  # the last batch would end with a copy of the target network
        total += 40
    argv = ["--resume", folder, "--total-timesteps", total]
    got = inspect_run(script(name), *argv, cwd=tmp_path, after=UPDATE_ONCE_MORE, env=environment(CLEANRL_MARK=mark))
    wait_for(lambda: not processes(mark), "end of all processes", 180)
    compare_update(got, total, restarts=1)
    scalars = raw_scalars(folder)
    assert_clean(scalars)
    assert scalars[: len(stopped)] == stopped
    expected = logged(0, stop, 10**6) + logged(stop, total, total)
    assert steps(scalars)["charts/SPS"] == steps(scalars)["charts/actor_restarts"] == expected
    assert steps(scalars)["losses/td_loss"] == [step for step in expected if step > 200]


def logged(start, end, total):
    """The steps at which a run of `total` steps logs: with the log, checkpoints and videos, and at its end."""
    periods, batches = (100, 300, total // 10 + 1), range(start + 40, end + 1, 40)
    return [
        step for step in batches if step == total or any(step // period > (step - 40) // period for period in periods)
    ]


@pytest.mark.slow
@posix
@linux
@apex
def test_losing_an_actor_then_the_driver(name, tmp_path):
    """One run: an actor is killed, then SIGTERM, kill -9, Ctrl+C and the end. No process is left behind by any."""
    require_for(name)
    argv = smoke(name, num_actors=2, total_timesteps=6_000, checkpoint_freq=300)
    with Run(name, *argv, cwd=tmp_path) as first:
        first.reach(200)
        victim = actor_pids(first.mark)[0]
        os.kill(victim, signal.SIGKILL)
        first.until(lambda: "is gone and is replaced" in first.output(), "notice of the loss")
        first.reach(last_step(tmp_path) + 200)
        first.until(lambda: len(set(actor_pids(first.mark)) - {victim}) == 2, "second actor")
        first.process.terminate()
        assert first.process.wait(180) == 75, first.output()[-4000:]
        first.gone()
    folder = run_dir(tmp_path)
    stopped = raw_scalars(folder)
    assert_clean(stopped)
    assert max(value for tag, _, value in stopped if tag == "charts/actor_restarts") == 1
    assert f"--resume {folder.relative_to(tmp_path)}" in first.output()

    for how in (signal.SIGKILL, signal.SIGINT):
        with Run(name, "--resume", folder, cwd=tmp_path) as again:
            again.reach(last_step(tmp_path) + 200)
            os.killpg(again.process.pid, how) if how == signal.SIGINT else again.process.send_signal(how)
            assert again.process.wait(180) != 0
            again.gone()
            assert ("Stopped at step" in again.output()) == (how == signal.SIGINT), again.output()[-4000:]

    with Run(name, "--resume", folder, "--save-model", cwd=tmp_path) as last:
        assert last.process.wait(400) == 0, last.output()[-4000:]
        last.gone()
    scalars = raw_scalars(folder)
    assert_clean(scalars)
    assert scalars[: len(stopped)] == stopped
    expected = logged(0, 6_000, 6_000)
    assert steps(scalars)["charts/SPS"] == steps(scalars)["charts/actor_restarts"] == expected
    assert steps(scalars)["losses/td_loss"] == [step for step in expected if step > 200]
    assert [value for tag, _, value in scalars if tag == "charts/actor_restarts"][-1] == 1


CLUSTER = """
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
node = cluster.add_node(num_cpus=1)
run = subprocess.Popen([sys.executable, *sys.argv[1:], "--ray-address", cluster.address])


def steps():
    sys.path.insert(0, os.environ["TESTS"])
    from families.test_apex import last_step

    return last_step(Path.cwd())


def reach(step):
    end = time.monotonic() + 240
    while steps() < step:
        assert run.poll() is None and time.monotonic() < end, (run.poll(), steps())
        time.sleep(0.2)


reach(200)
cluster.remove_node(node, allow_graceful=False)
reach(steps() + 400)
cluster.add_node(num_cpus=1)
code = run.wait(200)
cluster.shutdown()
sys.exit(code)
"""


@pytest.mark.slow
@posix
@linux
@apex
def test_losing_a_node_of_a_cluster(name, tmp_path):
    """On a cluster with an actor on each of two nodes, one goes down and another comes."""
    require_for(name)
    if not private_network():
        pytest.skip("a cluster listens on all addresses, and there is no network of its own for it here")
    mark = uuid.uuid4().hex
    argv = smoke(name, num_actors=2, total_timesteps=4000)
    command = [*private_network(), sys.executable, "-c", CLUSTER, str(script(name)), *argv]
    env = environment(CLEANRL_MARK=mark, TESTS=str(ROOT / "tests"))
    try:
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
        wait_for(lambda: not processes(mark), "end of all processes", 180)
    finally:
        for pid in processes(mark):
            os.kill(pid, signal.SIGKILL)
    scalars = raw_scalars(run_dir(tmp_path))
    assert_clean(scalars)
    assert steps(scalars)["charts/SPS"][-1] == 4000
    assert [value for tag, _, value in scalars if tag == "charts/actor_restarts"][-1] == 1


@apex
def test_no_cluster_at_the_address(name, tmp_path):
    require_for(name)
    done = run(script(name), *smoke(name), "--ray-address", "127.0.0.1:9", cwd=tmp_path, code=2)
    assert "--ray-address 127.0.0.1:9" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
