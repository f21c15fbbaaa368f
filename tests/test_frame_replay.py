"""Replay that stores each frame once, against a plain one that stores whole observations, bit by bit."""

import shutil

import numpy as np
import pytest
from conftest import each, inspect_run, load, require_for, script, smoke, uses

stores_frames = each(lambda name: "class FrameReplay" in script(name).read_text() and uses(name, "torch"))
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


def start(module, size, num_envs, extra, seed=0):
    games = [Game(np.random.default_rng(seed + i)) for i in range(num_envs)]
    replay = module.FrameReplay(size, num_envs, (STACK, *FRAME), 3 + extra, "cpu")
    stacks = replay.frames.add(np.concatenate([game.obs for game in games])).reshape(num_envs, STACK)
    return games, replay, stacks


def assert_rows_equal(replay, plain):
    """Every transition that can be sampled is the plain one of its number; they are the newest, and nearly `size`."""
    first, count = replay.window.tolist()
    assert first + count == len(plain)
    for number in range(first, first + count):
        row = replay.rows[np.array(number)]
        frames = replay.frames[row[: STACK + 1]].numpy()
        obs, next_obs, columns = plain[number]
        np.testing.assert_array_equal(frames[:-1], obs)
        np.testing.assert_array_equal(frames[1:], next_obs)
        assert tuple(row[STACK + 1 :].tolist()) == columns


@stores_frames
@pytest.mark.parametrize("num_envs, steps", [(1, 4), (3, 1), (3, 5)])
def test_against_whole_observations(name, num_envs, steps):
    size = 120
    (games, replay, stacks), plain = start(load(name), size, num_envs, extra=0), []
    for _ in range(300 // (steps * num_envs)):
        play(replay, games, steps, stacks, plain)
        replay.flush()
        assert_rows_equal(replay, plain)
    assert len(plain) > 2 * size, "the ring has not wrapped"
    assert replay.window[1] > size / 2, "frames of resets take less room than this"


@stores_frames
def test_samples_are_uniform_over_what_is_stored(name):
    import torch

    torch.manual_seed(0)
    (games, replay, stacks), plain = start(load(name), 60, 2, extra=0), []
    play(replay, games, 100, stacks, plain)
    replay.flush()
    rows, frames = load(name).FrameReplay.sample(replay, 20_000)
    first, count = replay.window.tolist()
    keys = {plain[n][0].tobytes() + plain[n][1].tobytes(): 0 for n in range(first, first + count)}
    for stack in frames.numpy():
        keys[stack[:-1].tobytes() + stack[1:].tobytes()] += 1
    expected = 20_000 / count
    chi_square = sum((times - expected) ** 2 / expected for times in keys.values())
    assert len(keys) == count and chi_square < count + 4 * (2 * count) ** 0.5


@stores_frames
def test_files_hold_what_the_memory_holds(name, tmp_path):
    """Each call writes what is new; what a later call has written is ignored; old files go."""
    module, size = load(name), 100
    (games, replay, stacks), plain = start(module, size, 2, extra=0), []
    written = 0
    for call in range(12):
        play(replay, games, 7 + 5 * call, stacks, plain)  # the last calls are further apart than the ring is long
        ends = replay.save(tmp_path)
        (newest,) = tmp_path.glob(f"replay-*{ends[0]}.gz")
        written += newest.stat().st_size
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path, copy)
        (copy / f"replay-{ends[0] + 1:012}.gz").write_bytes(b"half a fi")  # a kill left this behind
        again = module.FrameReplay(size, 2, (STACK, *FRAME), 3, "cpu")
        again.load(copy, ends)
        assert not (copy / f"replay-{ends[0] + 1:012}.gz").exists()
        assert_rows_equal(again, plain)
        assert type(again.frames.end) is type(again.rows.end) is int, "a NumPy integer makes a checkpoint unreadable"
        assert again.window.tolist() == replay.window.tolist() and again.saved == tuple(ends)
        assert {type(end) for end in again.save(copy)} == {int}, "a checkpoint cannot hold NumPy's integers"
        np.testing.assert_array_equal(again.frames.slots, replay.frames.slots)
        shutil.rmtree(copy)
    total = sum(path.stat().st_size for path in tmp_path.glob("replay-*"))
    assert len(list(tmp_path.glob("replay-*"))) < 12 and total < written, "files are kept that nothing needs"


FOLLOW = """
import numpy as np
from ale_py.vector_env import AtariVectorEnv

result["seen"], last = [], None
init, step, reset = AtariVectorEnv.__init__, AtariVectorEnv.step, AtariVectorEnv.reset


def short(self, *args, **options):
    init(self, *args, **options | {"max_num_frames_per_episode": 150})


def follow_reset(self, **options):
    global last
    out = reset(self, **options)
    last = np.array(out[0])
    return out


def follow_step(self, actions):
    global last
    out = step(self, actions)
    lives = out[4]["lives"]
    for i in range(self.num_envs):
        over = out[3][i] or (out[2][i] and out[4]["episode_frame_number"][i] < 150 and lives[i] == 5)
        after = out[4]["final_obs"][i] if over else out[0][i]
        ends = (bool(out[2][i]), bool(out[3][i]))
        result["seen"].append((last[i], np.array(after), int(actions[i]), int(np.sign(out[1][i])), *ends))
    last = np.array(out[0])
    return out


AtariVectorEnv.__init__, AtariVectorEnv.step, AtariVectorEnv.reset = short, follow_step, follow_reset
"""
TRANSITIONS = """
first, count = replay.window.tolist()
numbers = torch.arange(first, first + count)
rows = replay.rows[numbers]
result["rows"] = rows[:, 5:].numpy()
result["frames"] = replay.frames[rows[:, :5]].numpy()
result["first"] = first
"""


@each(lambda name: "class FrameReplay" in script(name).read_text() and "    num_envs: int" in script(name).read_text())
def test_replay_of_a_run(name, tmp_path):
    """The rows of a run on two games that lose lives and are cut off are the transitions that happened."""
    require_for(name)
    argv = smoke(name, total_timesteps=400, buffer_size=300, learning_starts=1000, num_envs=2, train_frequency=20)
    argv += ["--env-id", "BreakoutNoFrameskip-v4"]
    got = inspect_run(script(name), *argv, cwd=tmp_path, before=FOLLOW, after=TRANSITIONS)
    seen = got["seen"][got["first"] : 400]
    assert len(seen) == len(got["rows"]) > 200
    assert any(s[5] for s in seen) and any(s[4] for s in seen), "no truncation or no lost life: the case does not tell"
    for (obs, next_obs, *numbers), row, frames in zip(seen, got["rows"], got["frames"]):
        np.testing.assert_array_equal(frames[:-1], obs)
        np.testing.assert_array_equal(frames[1:], next_obs)
        assert numbers[:3] == row[:3].tolist()
