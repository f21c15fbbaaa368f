"""QDagger: its two equations, its teacher from a folder and from a hub, its phases and what interrupts them."""

import hashlib
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from helpers.files import (
    ROOT,
    default,
    each,
    family,
    load,
    make_teacher,
    posix,
    require,
    require_for,
    script,
    smoke,
    uses,
)
from helpers.processes import environment, in_short, inspect_run, run, run_dir, short_games
from helpers.refusals import refuse, without
from helpers.scalars import assert_clean, raw_scalars, steps, untimed

is_qdagger = each(lambda name: family(name) == "qdagger")


# Equations


def slow_distillation(student, teacher, temperature):
    """Kullback-Leibler divergence from its definition, sample by sample and action by action."""

    def policy(q_values):
        largest = max(q_values)
        exponentials = [math.exp((q - largest) / temperature) for q in q_values]
        return [e / sum(exponentials) for e in exponentials]

    divergences = []
    for student_q, teacher_q in zip(student, teacher, strict=True):
        pairs = zip(policy(teacher_q), policy(student_q), strict=True)
        divergences.append(sum(p * math.log(p / q) for p, q in pairs))
    return sum(divergences) / len(divergences)


def test_the_distillation_oracle_by_hand():
    """Teacher (3/4, 1/4), student (1/2, 1/2): 3/4 log 3/2 + 1/4 log 1/2; half as much with a second, equal pair."""
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert slow_distillation([[0, 0]], [[math.log(3), 0]], 1) == pytest.approx(expected)
    assert slow_distillation([[0, 0], [1, 2]], [[2 * math.log(3), 0], [1, 2]], 2) == pytest.approx(expected / 2)


def call_distillation(name, student, teacher, temperature):
    if uses(name, "torch"):
        from torch import tensor as array
    else:
        from jax.numpy import array
    arrays = (array(np.asarray(x, dtype=np.float32)) for x in (student, teacher))
    return float(load(name).distillation_loss(*arrays, temperature))


@is_qdagger
@pytest.mark.parametrize("temperature", [1.0, 0.25, 7.0])
def test_distillation_loss(name, temperature):
    """Both files against the same oracle, so that they are the same: the mean over the batch, whatever its size."""
    rng = np.random.default_rng(0)
    for batch, actions, scale in ((1, 2, 1), (32, 4, 3), (5, 18, 10)):
        student, teacher = scale * rng.normal(size=(2, batch, actions)).astype(np.float32)
        got = call_distillation(name, student, teacher, temperature)
        assert got == pytest.approx(
            slow_distillation(student.tolist(), teacher.tolist(), temperature), rel=1e-4, abs=1e-6
        )
        assert call_distillation(name, teacher, teacher, temperature) == pytest.approx(0, abs=1e-5)
        twice = np.concatenate((student, student)), np.concatenate((teacher, teacher))
        assert call_distillation(name, *twice, temperature) == pytest.approx(got, rel=1e-4, abs=1e-6)
    assert math.isfinite(call_distillation(name, [[0, 1e4]], [[1e4, 0]], temperature))


@is_qdagger
def test_distillation_weight(name):
    weight = load(name).distillation_weight
    assert weight([], 30.0) == weight([1e9] * 9, 30.0) == 1.0, "ten games come first"
    for student, teacher, expected in (
        (0, 30, 1),
        (15, 30, 0.5),
        (29.7, 30, 0.01),
        (30, 30, 0),
        (300, 30, 0),
        (-10, 30, 1),  # 1 - student / teacher would be 4 / 3
        (-21, -20, 0.05),  # worse than a teacher below zero: 1 - student / teacher would be -0.05
        (-10, -20, 0),  # better than it: 1 - student / teacher would be 0.5
        (-21, 0, 1),
        (1, 0, 0),
        (0, 0, 0),
    ):
        assert weight([student] * 10, teacher) == pytest.approx(expected), (student, teacher)
    assert weight([*range(10)], 9) == pytest.approx(0.5)


UPDATE = """
import numpy as np

if "learner" in globals():
    sample_key = jax.random.split(jax.random.wrap_key_data(learner["key"]))[1]
    rows, frames = replay.sample(sample_key, replay.stored(), args.batch_size)
    obs, next_obs = frames[:, :-1], frames[:, 1:]
    values = jax.jit(q_network.apply)  # as one program each: op by op, compilation takes far longer
    student, taught = values(learner["params"], obs), jax.jit(teacher_network.apply)(teacher_params, obs)
    following = values(learner["target_params"], next_obs)

    def objective(params):
        q = q_network.apply(params, obs)
        chosen = q[jnp.arange(len(q)), rows[:, -3]]
        goal = rows[:, -2] + args.gamma * (1 - rows[:, -1]) * following.max(1)
        policies = jax.nn.softmax(taught), jax.nn.softmax(q)
        divergence = sum((policies[0] * jnp.log(policies[0] / policies[1])).sum(1)) / len(q)
        return ((chosen - goal) ** 2).mean() + 0.3 * divergence

    expected = jax.jit(jax.grad(objective))(learner["params"])
    moments = [jax.device_get(learner["opt_state"][0].mu)]
    learner["losses"] = jnp.zeros(4)
    learner = update(learner, teacher_params, replay.stored(), 0.3)
    moments.append(jax.device_get(learner["opt_state"][0].mu))
    gradients = jax.tree.map(lambda before, after: (after - 0.9 * before) / 0.1, *moments)
    expected, gradients = (np.concatenate([x.ravel() for x in jax.tree.leaves(g)]) for g in (expected, gradients))
    sums = np.asarray(learner["losses"])
else:
    state = torch.get_rng_state()
    rows, frames = replay.sample(args.batch_size)
    torch.set_rng_state(state)
    obs, next_obs = frames[:, :-1], frames[:, 1:]
    student, taught, following = q_network(obs), teacher(obs).detach(), target_network(next_obs).detach()
    chosen = student[torch.arange(len(student)), rows[:, -3]]
    goal = rows[:, -2] + args.gamma * (1 - rows[:, -1]) * following.max(1).values
    divergence = nn.functional.kl_div(student.log_softmax(1), taught.softmax(1), reduction="batchmean")
    objective = ((chosen - goal) ** 2).mean() + 0.3 * divergence
    expected = np.concatenate([x.numpy().ravel() for x in torch.autograd.grad(objective, [*q_network.parameters()])])
    student = student.detach()
    distill_coeff.fill_(0.3)
    sums = [value.item() for value in update().values()]
    gradients = weights.grad.numpy()
    result["adam"] = int(optimizer.state_dict()["state"][0]["step"])
result |= {"rows": np.asarray(rows), "student": np.asarray(student), "teacher": np.asarray(taught)}
result |= {"following": np.asarray(following), "expected": expected, "gradients": gradients, "sums": np.array(sums)}
"""


@is_qdagger
def test_update_and_schedules_of_a_run(name, tmp_path):
    """One more update after a run, and what the run has logged: the online phase begins at the start of everything."""
    require_for(name)
    argv = smoke(name, learning_starts=200, total_timesteps=400)  # else as in a life, whose programs are compiled
    got = inspect_run(script(name), *argv, cwd=tmp_path, before=short_games(name, 400), after=UPDATE)
    actions, rewards, terminated = got["rows"][:, -3:].T
    td_errors, values = [], []
    for i in range(4):
        target = rewards[i] + (0 if terminated[i] else 0.99 * max(got["following"][i]))
        values.append(got["student"][i][actions[i]])
        td_errors.append((values[-1] - target) ** 2)
    distill_loss = slow_distillation(got["student"].tolist(), got["teacher"].tolist(), 1.0)
    expected = [np.mean(td_errors), np.mean(values), np.mean(td_errors) + 0.3 * distill_loss, distill_loss]
    np.testing.assert_allclose(got["sums"], expected, rtol=1e-3, atol=1e-6)
    scale = np.abs(got["expected"]).max()
    np.testing.assert_allclose(got["gradients"], got["expected"], rtol=1e-2, atol=1e-3 * scale)
    if uses(name, "torch"):
        online = len(range(220, 400, 20))  # those due at the last step would come before the next one
        assert got["adam"] == 10 + online + 1, "offline, then online from --learning-starts on, then the extra"

    scalars = raw_scalars(run_dir(tmp_path))
    at = steps(scalars)
    assert at["losses/loss"] == [300, 400], "the student's own replay is warmed up for 200 steps"
    assert at["charts/offline/loss"] == at["charts/offline/q_loss"] == at["charts/offline/distill_loss"] == [10]
    assert at["charts/teacher/avg_episodic_return"] == [0] and at["charts/offline/avg_episodic_return"] == [10]
    epsilons = {step: value for tag, step, value in scalars if tag == "charts/epsilon"}
    assert epsilons == pytest.approx({step: 0.9 for step in range(100, 500, 100)}, abs=1e-6)  # over 10 % of 400 steps
    coefficients = {value for tag, _, value in scalars if tag == "charts/distill_coeff"}
    games = at["charts/episodic_return"]
    assert len(games) < 10 and coefficients == {1.0}


# Teachers


def broken_folder(folder, name, what):
    """A teacher's folder with one thing wrong."""
    teacher = default(name, "teacher_model_exp_name")
    kind = {"another game": {"env_id": "PongNoFrameskip-v4"}, "other actions": {"num_actions": 6}}.get(what, {})
    shutil.copytree(make_teacher(teacher, **kind), folder)
    if what == "no model":
        (folder / "model.safetensors").unlink()
    elif what == "not safetensors":
        (folder / "model.safetensors").write_bytes(b"\x80\x04 a pickle, perhaps")
    elif what == "flags cut off":
        (folder / "args.json").write_text('{"env_id": ')
    elif what == "flags without a game":
        (folder / "args.json").write_text("{}")
    return folder


@is_qdagger
@pytest.mark.parametrize(
    "what, reason",
    {
        "no model": "--save-model",
        "not safetensors": "cannot be read",
        "flags cut off": "cannot be read",
        "flags without a game": "env_id",
        "another game": "plays PongNoFrameskip-v4",
        "other actions": "other names or shapes",
    }.items(),
)
def test_broken_teacher(name, what, reason, tmp_path, capsys):
    module = load(name)
    envs = module.make_envs("BreakoutNoFrameskip-v4", 1)
    with pytest.raises(SystemExit, match="2"):
        module.load_teacher(
            module.find_teacher(broken_folder(tmp_path / "t", name, what)), "BreakoutNoFrameskip-v4", envs
        )
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"{name}.py: ") and str(tmp_path / "t") in line and reason in line


@is_qdagger
def test_a_student_or_a_model_of_the_other_backend_is_no_teacher(name, tmp_path, capsys):
    module = load(name)
    envs = module.make_envs("BreakoutNoFrameskip-v4", 1)
    other = "dqn_atari_jax" if uses(name, "torch") else "dqn_atari"
    with pytest.raises(SystemExit, match="2"):
        module.load_teacher(Path(make_teacher(other)), "BreakoutNoFrameskip-v4", envs)
    assert "other names or shapes" in capsys.readouterr().err


@is_qdagger
def test_a_good_teacher_gives_its_values(name):
    """The same game under another id; the values are those of the file that it comes from."""
    module, teacher = load(name), default(name, "teacher_model_exp_name")
    envs, obs = module.make_envs("ALE/Breakout-v5", 2), np.random.default_rng(0).integers(256, size=(2, 4, 84, 84))
    obs = obs.astype(np.uint8)
    got = module.load_teacher(module.find_teacher(make_teacher(teacher)), "ALE/Breakout-v5", envs)
    if uses(name, "torch"):
        import torch

        original = load(teacher).QNetwork(envs)
        original.load_state_dict(module.load_file(Path(make_teacher(teacher), "model.safetensors")))
        pair = [network(torch.from_numpy(obs)).detach() for network in (got, original)]
    else:
        weights = module.load_file(Path(make_teacher(teacher), "model.safetensors"))
        original = module.unflatten_dict(weights, sep=".")
        pair = [module.TeacherNetwork(4).apply(got, obs), load(teacher).QNetwork(4).apply(original, obs)]
    np.testing.assert_array_equal(*map(np.asarray, pair))


@is_qdagger
def test_no_teacher_no_folder(name, tmp_path):
    argv = smoke(name, teacher_policy_hf_repo="nowhere/teacher")
    line = refuse(name, *argv, cwd=tmp_path, driver=without("huggingface_hub"))
    assert "nowhere/teacher" in line and "pip install huggingface_hub" in line


class Hub(BaseHTTPRequestHandler):
    """What hf_hub_download asks a hub for: the head and the body of /owner/name/resolve/main/file."""

    def do_HEAD(self):
        return self.respond()

    def do_GET(self):
        self.wfile.write(self.respond())

    def respond(self):
        self.server.paths.append(self.path)
        place, _, file = self.path.lstrip("/").partition("/resolve/main/")
        folder = self.server.repositories.get(place)
        data = (folder / file).read_bytes() if folder and (folder / file).exists() else b""
        self.send_response(200 if data else 404)
        if not data:
            self.send_header("X-Error-Code", "EntryNotFound" if folder else "RepoNotFound")
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        return data

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    """A hub on this machine: a server with a dictionary of repositories and a list of the paths asked for."""
    require("huggingface_hub")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.repositories, server.paths = {}, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def hub_names(server, cwd):
    names = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_DISABLE_XET": "1"}
    return names | {"HF_HOME": str(cwd / "hub"), "HF_TOKEN": ""}


FIND = """
import sys
from cleanrl.{name} import find_teacher

for place in sys.argv[1:]:
    try:
        print(find_teacher(place))
    except SystemExit as error:
        print(error.code)
"""


def test_find_teacher_on_a_hub(hub, tmp_path):
    """The text is the same in both files. A repository, one without safetensors, none at all, no such name, no hub."""
    name = "qdagger_dqn_atari_impalacnn"
    require_for(name)
    hub.repositories = {"someone/good": Path(make_teacher("dqn_atari")), "someone/pickles": tmp_path}
    (tmp_path / "dqn_atari.cleanrl_model").write_bytes(b"not for us")
    places = ["someone/good", "someone/pickles", "someone/nothing", "not/a/repository"]
    command = [sys.executable, "-c", FIND.format(name=name)]
    env = environment(**hub_names(hub, tmp_path), PYTHONPATH=str(ROOT))
    done = subprocess.run([*command, *places], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    good, *others = done.stdout.splitlines()
    for file in ("model.safetensors", "args.json"):
        assert Path(good, file).read_bytes() == Path(make_teacher("dqn_atari"), file).read_bytes()
    assert others == ["2", "2", "2"]
    assert not any("cleanrl_model" in path for path in hub.paths)
    lines = [line for line in done.stderr.splitlines() if line.startswith(f"{name}.py: ")]
    assert len(lines) == 3
    for line, place in zip(lines, places[1:], strict=True):
        assert f"--teacher-policy-hf-repo {place} is not a run folder" in line and "--save-model" in line

    hub.shutdown()
    hub.server_close()
    done = subprocess.run(
        [*command, "someone/else"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith(f"{name}.py: ")]
    assert done.stdout.split() == ["2"] and len(lines) == 1 and "Traceback" not in done.stderr


# Phases

AT_CHECKPOINT = """
import os
import signal
from pathlib import Path

replace, checkpoints = os.replace, 0


def send(source, target):
    global checkpoints
    replace(source, target)
    if Path(target).name.startswith("checkpoint."):
        checkpoints += 1
        if checkpoints == {number}:
            os.kill(os.getpid(), signal.{how})


os.replace = send
"""
AT_TARGET_UPDATE = """
import os
import signal

import {module} as module

holder = module.Tensor if hasattr(module, "Tensor") else module
name = "lerp_" if hasattr(module, "Tensor") else "incremental_update"
follow, calls = getattr(holder, name), 0


def send(*arguments):
    global calls
    calls += 1
    if calls == {number}:
        os.kill(os.getpid(), signal.{how})
    return follow(*arguments)


setattr(holder, name, send)
"""


RUN = """
import runpy
import sys

os.environ.update({env})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def interrupt(name, argv, cwd, number, how, env=None, when=AT_CHECKPOINT, path=None):
    """Run until a process does something for the `number`th time and signal it then; returns the counters."""
    module = "torch" if uses(name, "torch") else "optax"
    driver = (
        short_games(name, FRAMES) + when.format(number=number, how=how.name, module=module) + RUN.format(env=env or {})
    )
    run(path or script(name), *argv, cwd=cwd, driver=driver, code=75 if how == signal.SIGTERM else -how)
    return counters(name, run_dir(cwd))


def counters(name, folder):
    if uses(name, "torch"):
        import torch

        state = torch.load(folder / "checkpoint.pt", map_location="cpu")
    else:
        from flax.serialization import msgpack_restore

        state = msgpack_restore((folder / "checkpoint.msgpack").read_bytes())
    return tuple(state.get(f"{phase}_step", 0) for phase in ("teacher", "offline", "global"))


FRAMES = 400  # of a game: 100 steps
PHASES = {"learning_starts": 100, "checkpoint_freq": 100, "batch_size": 1, "end_e": 0.2}


def replayed(name, folder):
    """The observations and the actions in the replay of the teacher."""
    module = load(name)
    replay = module.FrameReplay(400, 1, (4, 84, 84), *["cpu"] * uses(name, "torch"), folder / "teacher")
    ends = max(int(path.stem[7:]) for path in (folder / "teacher").glob("replay-*.gz"))
    replay.load_state_dict((ends, 0))
    first, count = (int(x) for x in replay.window)
    rows = np.asarray(replay.rows[np.arange(first, first + count)])
    return np.asarray(replay.frames[rows[:, :4]]), rows[:, 5]


@posix
@is_qdagger
def test_interrupted_in_every_phase(name, hub, tmp_path):
    """SIGTERM while the teacher is scored, and while it plays; SIGKILL offline; SIGTERM while the student is scored.

    The teacher comes from the hub under its default name, which only the first process can reach.
    """
    require_for(name)
    teacher = default(name, "teacher_model_exp_name")
    hub.repositories[f"cleanrl/BreakoutNoFrameskip-v4-{teacher}-seed1"] = Path(make_teacher(teacher))
    sizes = {"teacher_steps": 300, "offline_steps": 150, "total_timesteps": 300}
    argv = smoke(name, **PHASES, **sizes, teacher_policy_hf_repo=None)
    assert interrupt(name, argv, tmp_path, 1, signal.SIGTERM, hub_names(hub, tmp_path)) == (0, 0, 0)
    hub.shutdown()
    shutil.rmtree(tmp_path / "hub")

    folder = run_dir(tmp_path)
    resume = ["--resume", folder.relative_to(tmp_path)]
    assert interrupt(name, resume, tmp_path, 1, signal.SIGTERM) == (100, 0, 0)
    assert interrupt(name, resume, tmp_path, 3, signal.SIGKILL) == (300, 100, 0)
    obs, actions = replayed(name, folder)
    assert len(actions) == 300
    module = load(name)
    network = module.load_teacher(folder / "teacher", "BreakoutNoFrameskip-v4", module.make_envs("ALE/Breakout-v5", 1))
    if uses(name, "torch"):
        import torch

        values = network(torch.from_numpy(obs)).detach().numpy()
    else:
        values = np.asarray(module.TeacherNetwork(4).apply(network, obs))
    share = (values.argmax(1) == actions).mean()
    assert 0.4 < share < 0.7, "with a rate that falls from 1 to 0.2, 0.55 of the teacher's actions are greedy"

    assert interrupt(name, resume, tmp_path, 1, signal.SIGTERM) == (300, 150, 0)
    assert not list((folder / "teacher").glob("replay-*")), "the teacher's games are no longer needed"
    run(script(name), *resume, cwd=tmp_path, **in_short(name, FRAMES))
    assert counters(name, folder) == (300, 150, 300)

    scalars = raw_scalars(folder)
    assert_clean(scalars)
    at = steps(scalars)
    assert at["charts/teacher/avg_episodic_return"] == [0]
    assert at["charts/offline/loss"] == at["charts/offline/distill_loss"] == [100, 150]
    assert at["charts/offline/avg_episodic_return"] == [150]
    assert at["losses/loss"] == [200, 300] and at["charts/epsilon"] == [100, 200, 300]
    assert json.loads((folder / "args.json").read_text())["teacher_policy_hf_repo"] is None


@posix
@is_qdagger
def test_an_interruption_offline_changes_nothing(name, tmp_path):
    """No game is in progress then, so a run that was stopped goes on bit by bit as if not.

    In this copy the losses are logged and the student is scored every 40 gradient steps, not every 100 and 100,000.
    """
    require_for(name)
    path = tmp_path / f"{name}.py"
    path.write_text(re.sub(r"offline_step % 100(_000)?\b", "offline_step % 40", script(name).read_text()))
    sizes = {"teacher_steps": 100, "offline_steps": 90, "total_timesteps": 200}
    argv = smoke(name, **PHASES, **sizes, target_network_frequency=20)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir(), stopped.mkdir()
    run(path, *argv, cwd=whole, **in_short(name, FRAMES))
    assert interrupt(name, argv, stopped, 3, signal.SIGTERM, when=AT_TARGET_UPDATE, path=path) == (100, 80, 0)
    run(path, "--resume", run_dir(stopped), cwd=stopped, **in_short(name, FRAMES))
    scalars = raw_scalars(run_dir(stopped))
    assert_clean(scalars)
    assert steps(scalars)["charts/offline/avg_episodic_return"] == steps(scalars)["charts/offline/loss"] == [40, 80, 90]
    assert untimed(scalars) == untimed(raw_scalars(run_dir(whole)))
