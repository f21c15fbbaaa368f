"""Replay that stores each frame once, against a plain one that stores whole observations, bit by bit."""

import re
import shutil

import numpy as np
import pytest

from helpers.files import FILES, each, each_text, family, load, require_for, script, smoke, uses
from helpers.oracles import FRAME, IN_HALVES, REWARD, STACK, Game, convolutional, play, slow_projection
from helpers.processes import inspect_run

torch = pytest.importorskip("torch")


def has_frames(name):
    return "class FrameReplay" in script(name).read_text()


replay_text = each_text("Ring", "FrameReplay", "write", which=has_frames)
ATARI = [name for name in FILES if re.fullmatch("(dqn|c51)_atari(_jax)?", name)]


def make_replay(module, size, num_envs, folder=None):
    device = ["cpu"] if hasattr(module, "torch") else []
    return module.FrameReplay(size, num_envs, (STACK, *FRAME), *device, folder)


def start(module, size, num_envs, seed=0, folder=None):
    games = [Game(np.random.default_rng(seed + i)) for i in range(num_envs)]
    replay = make_replay(module, size, num_envs, folder)
    stacks = replay.frames.add(np.concatenate([game.obs for game in games])).reshape(num_envs, STACK)
    return games, replay, stacks


def assert_rows_equal(replay, plain):
    """Every transition that can be sampled is the plain one of its number; they are the newest, and nearly `size`."""
    first, count = replay.window.tolist()
    assert first + count == len(plain)
    rows = np.asarray(replay.rows[np.arange(first + count - replay.size, first + count)])[-count:]
    stored = np.asarray(replay.frames[np.arange(replay.size)])  # in the order of the slots
    for (obs, next_obs, columns), row in zip(plain[first:], rows, strict=True):
        frames = stored[row[: STACK + 1] % replay.size]
        np.testing.assert_array_equal(frames[:-1], obs)
        np.testing.assert_array_equal(frames[1:], next_obs)
        assert tuple(row[STACK + 1 :].tolist()) == columns


@replay_text
@pytest.mark.parametrize("num_envs, steps", [(1, 4), (3, 1), (3, 5)])
def test_against_whole_observations(name, num_envs, steps):
    size = 120
    (games, replay, stacks), plain = start(load(name), size, num_envs), []
    for _ in range(300 // (steps * num_envs)):
        play(replay, games, steps, stacks, plain)
        replay.flush()
        assert_rows_equal(replay, plain)
    assert len(plain) > 2 * size, "the ring has not wrapped"
    assert replay.window[1] > size / 2, "frames of resets take less room than this"


@replay_text
def test_samples_are_uniform_over_what_is_stored(name):
    module = load(name)
    (games, replay, stacks), plain = start(module, 60, 2), []
    play(replay, games, 100, stacks, plain)
    replay.flush()
    if uses(name, "torch"):
        module.torch.manual_seed(0)
        rows, frames = replay.sample(20_000)
    else:
        draw = module.jax.jit(replay.sample, static_argnums=2)
        rows, frames = draw(module.jax.random.key(0), replay.stored(), 20_000)
    first, count = replay.window.tolist()
    keys = {plain[n][0].tobytes() + plain[n][1].tobytes(): 0 for n in range(first, first + count)}
    for stack in np.asarray(frames):
        keys[stack[:-1].tobytes() + stack[1:].tobytes()] += 1
    expected = 20_000 / count
    chi_square = sum((times - expected) ** 2 / expected for times in keys.values())
    assert len(keys) == count and chi_square < count + 4 * (2 * count) ** 0.5


@replay_text
def test_files_hold_what_the_memory_holds(name, tmp_path):
    """Each call writes what is new; what a later call has written is ignored; old files go."""
    module, size = load(name), 100
    (games, replay, stacks), plain = start(module, size, 2, folder=tmp_path), []
    written = 0
    for call in range(12):
        play(replay, games, 7 + 5 * call, stacks, plain)  # the last calls are further apart than the ring is long
        ends = tuple(map(int, replay.state_dict()))
        assert tuple(replay.state_dict()) == ends  # with nothing new, and without harm to what is there
        (newest,) = tmp_path.glob(f"replay-*{ends[0]}.gz")
        written += newest.stat().st_size
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path, copy)
        (copy / f"replay-{ends[0] + 1:012}.gz").write_bytes(b"half a fi")  # a kill left this behind
        again = make_replay(module, size, 2, copy)
        again.load_state_dict(ends)
        assert not (copy / f"replay-{ends[0] + 1:012}.gz").exists()
        assert_rows_equal(again, plain)
        assert type(again.frames.end) is type(again.rows.end) is int, "a NumPy integer makes a checkpoint unreadable"
        assert again.window.tolist() == replay.window.tolist() and tuple(again.saved) == ends
        if uses(name, "torch"):
            assert {type(end) for end in again.state_dict()} == {int}, "a checkpoint cannot hold NumPy's integers"
        np.testing.assert_array_equal(again.frames.slots, replay.frames.slots)
        shutil.rmtree(copy)
    total = sum(path.stat().st_size for path in tmp_path.glob("replay-*"))
    assert len(list(tmp_path.glob("replay-*"))) < 12 and total < written, "files are kept that nothing needs"


FOLLOW = (
    IN_HALVES
    + """
import numpy as np

result["seen"], last = [], None
init, reset = AtariVectorEnv.__init__, AtariVectorEnv.reset


def short(self, *args, **options):
    init(self, *args, **options | {"max_num_frames_per_episode": 150})
    self.trains = options["life_loss_info"]  # unlike those of an evaluation


def follow_reset(self, **options):
    global last
    out = reset(self, **options)
    if self.trains:
        last = np.array(out[0])
    return out


def follow_recv(self):
    global last
    out = recv(self)
    if not self.trains:
        return out
    lives = out[4]["lives"]
    for i in range(self.num_envs):
        over = out[3][i] or (out[2][i] and out[4]["episode_frame_number"][i] < 150 and lives[i] == 5)
        after = out[4]["final_obs"][i] if over else out[0][i]
        ends = (bool(out[2][i]), bool(out[3][i]))
        result["seen"].append((last[i], np.array(after), int(self.sent[i]), int(np.sign(out[1][i])), *ends))
    last = np.array(out[0])
    return out


AtariVectorEnv.__init__, AtariVectorEnv.recv, AtariVectorEnv.reset = short, follow_recv, follow_reset
"""
)
TRANSITIONS = """
first, count = replay.window.tolist()
rows = replay.rows[np.arange(first, first + count)]
result["rows"] = np.asarray(rows[:, 5:])
result["frames"] = np.asarray(replay.frames[rows[:, :5]])
result["first"] = first
"""


@each(lambda name: has_frames(name) and "    num_envs: int" in script(name).read_text())
def test_replay_of_a_run(name, tmp_path):
    """The rows of a run on two games that lose lives and are cut off are the transitions that happened."""
    require_for(name)
    argv = smoke(name, total_timesteps=400, buffer_size=300, learning_starts=1000, num_envs=2)
    argv += ["--env-id", "BreakoutNoFrameskip-v4", "--seed", 3]  # an untrained Rainbow has to serve the ball
    argv += ["--end-e", 1] * ("    end_e: float" in script(name).read_text())  # random actions serve it and lose it
    got = inspect_run(script(name), *argv, cwd=tmp_path, before=FOLLOW, after=TRANSITIONS)
    seen = got["seen"][-400:][got["first"] :]
    assert len(seen) == len(got["rows"]) > 200
    assert any(s[5] for s in seen) and any(s[4] for s in seen), "no truncation or no lost life: the case does not tell"
    for (obs, next_obs, *numbers), row, frames in zip(seen, got["rows"], got["frames"]):
        np.testing.assert_array_equal(frames[:-1], obs)
        np.testing.assert_array_equal(frames[1:], next_obs)
        assert numbers[:3] == row[:3].tolist()


UPDATE_ONCE_MORE = """
def tensors(tree):  # in the order and the layout of the PyTorch files
    layers = [tree["params"][layer] for layer in ("Conv_0", "Conv_1", "Conv_2", "Dense_0", "Dense_1")]
    kernels = [np.asarray(layer["kernel"]) for layer in layers]
    kernels[3] = kernels[3].reshape(7, 7, 64, 512).transpose(2, 0, 1, 3).reshape(-1, 512)
    kernels = [kernel.T if kernel.ndim == 2 else kernel.transpose(3, 2, 0, 1) for kernel in kernels]
    return [np.array(x) for kernel, layer in zip(kernels, layers) for x in (kernel, layer["bias"])]


if "learner" in globals():
    sample_key = jax.random.split(jax.random.wrap_key_data(learner["key"]))[1]
    drawn = replay.sample(sample_key, replay.stored(), args.batch_size)
    online, target, sums = tensors(learner["params"]), tensors(learner["target_params"]), np.array(learner["losses"])
    mean = tensors(learner["opt_state"][0].mu)
    learner = update(learner, replay.stored())
    sums = np.asarray(learner["losses"]) - sums
    adam = learner["opt_state"][0]
    means = mean, tensors(adam.mu)
    gradients = [(after - 0.9 * before) / 0.1 for before, after in zip(*means)]
    stepped, moments, count = tensors(learner["params"]), (means[1], tensors(adam.nu)), int(adam.count)
else:
    state = torch.get_rng_state()
    drawn = replay.sample(args.batch_size)
    torch.set_rng_state(state)
    lists = lambda network: [param.detach().clone().numpy() for param in network.parameters()]
    parts = lambda vector: [x.numpy() for x in vector.split([param.numel() for param in q_network.parameters()])]
    online, target = lists(q_network), lists(target_network)
    sums = np.array([value.item() for value in update().values()])
    stepped = lists(q_network)
    gradients = [param.grad.numpy() for param in q_network.parameters()]
    adam = optimizer.state_dict()["state"][0]
    moments, count = (parts(adam["exp_avg"]), parts(adam["exp_avg_sq"])), int(adam["step"])
result |= {"rows": np.asarray(drawn[0]), "frames": np.asarray(drawn[1])}
result |= {"online": online, "target": target, "sums": sums}
result |= {"gradients": gradients, "stepped": stepped, "moments": moments, "count": count, "args": vars(args)}
"""


@pytest.mark.parametrize("name", ATARI)
def test_update_of_a_run(name, tmp_path):
    """One more update of a run: its loss, its gradient and its step, against loops over the samples and autograd."""
    require_for(name)
    flags = {"learning_starts": 500, "target_network_frequency": 70, "gamma": 0.9, "batch_size": 128}
    c51 = {"n_atoms": 11, "v_min": -2, "v_max": 3} if family(name) == "c51" else {}
    got = inspect_run(script(name), *smoke(name, **flags, **c51), cwd=tmp_path, before=REWARD, after=UPDATE_ONCE_MORE)
    frames = torch.tensor(got["frames"]).float()
    actions, rewards, terminated = got["rows"][:, 5:].T
    assert terminated.any() and not terminated.all() and set(rewards.tolist()) == {-1, 0, 1}
    online = [torch.tensor(x).requires_grad_() for x in got["online"]]
    outputs = convolutional(online, frames[:, :-1])
    with torch.no_grad():
        next_outputs = convolutional([torch.tensor(x) for x in got["target"]], frames[:, 1:])
    losses, values = [], []
    for i in range(128):
        if c51:
            support = np.linspace(-2, 3, 11)
            logits = outputs[i].reshape(-1, 11)[actions[i]]
            best = max(next_outputs[i].reshape(-1, 11).double().softmax(1).numpy(), key=lambda pmf: sum(pmf * support))
            target = torch.tensor(slow_projection(best, rewards[i], terminated[i], support, 0.9))
            losses.append(-(target * logits.log_softmax(0)).sum())
            values.append(sum(logits.softmax(0).tolist() * support))
        else:
            target = rewards[i] + (0 if terminated[i] else 0.9 * max(next_outputs[i].tolist()))
            losses.append((outputs[i, actions[i]] - target) ** 2)
            values.append(outputs[i, actions[i]].item())
    loss = torch.stack(losses).mean()
    loss.backward()
    np.testing.assert_allclose(got["sums"], [loss.item(), np.mean(values)], rtol=1e-3, atol=1e-5)
    epsilon = 0.01 / 128 if c51 else 1e-8
    parts = zip(online, got["gradients"], got["stepped"], *got["moments"], strict=True)
    for weight, gradient, stepped, first, second in parts:
        expected = weight.grad.numpy()
        np.testing.assert_allclose(
            gradient.reshape(expected.shape), expected, rtol=1e-2, atol=1e-3 * abs(expected).max()
        )
        step = first / (1 - 0.9 ** got["count"]) / (np.sqrt(second / (1 - 0.999 ** got["count"])) + epsilon)
        step = -got["args"]["learning_rate"] * step.reshape(expected.shape)
        np.testing.assert_allclose(stepped - weight.detach().numpy(), step, rtol=0.02, atol=1e-7)
