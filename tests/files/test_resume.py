"""A run survives kill -9 and SIGTERM: --resume continues it with no metric step missing, doubled or changed."""

import os
import random
import re
import shutil
import signal
import time

import pytest

from helpers.files import LINEAGE, each, each_text, family, posix, require_for, script, smoke, smoke_total
from helpers.processes import in_short, kill_at_checkpoint, run, run_dir, start
from helpers.scalars import assert_clean, grid, raw_scalars, steps, tensorboard_scalars, untimed


def long_run(name):
    """Arguments of a run of some seconds, with about ten checkpoints that do not coincide with its other periods."""
    total = LINEAGE[name].get("long", 10 * smoke_total(name))
    return smoke(name, total_timesteps=total, checkpoint_freq=total // 10 + 7)


def wait_until_training(process, cwd, event_files):
    """Until the run has a checkpoint and this process has opened its own event file."""
    while len(list(cwd.glob("runs/*/events*"))) <= event_files or not list(cwd.glob("runs/*/checkpoint.*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def interrupt(name, argv, cwd, how, after):
    """Start a run, send it a signal some seconds after training has begun; returns its exit code and output."""
    event_files = len(list(cwd.glob("runs/*/events*")))
    process = start(script(name), *argv, cwd=cwd, **in_short(name))
    try:
        wait_until_training(process, cwd, event_files)
        time.sleep(after)
        process.send_signal(how)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, stdout + stderr


@pytest.mark.slow  # test_life.py kills every file once
@posix
@each_text("ReplayBuffer", "FrameReplay", "gae")
def test_kill_at_random_moments(name, tmp_path):
    require_for(name)
    argv = [*long_run(name), "--save-model"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir(), whole.mkdir()
    started = time.time()
    run(script(name), *argv, cwd=whole, **in_short(name))
    duration = time.time() - started

    resume = []
    for _ in range(3):
        delay = random.uniform(0, duration / 3)
        code, output = interrupt(name, argv + resume, killed, signal.SIGKILL, delay)
        assert code in (-signal.SIGKILL, 0), f"killed after {delay} s: {output}"
        resume = ["--resume", run_dir(killed)]
    run(script(name), *resume, cwd=killed, **in_short(name))  # the flags come from the run's folder

    scalars, expected = raw_scalars(run_dir(killed)), raw_scalars(run_dir(whole))
    assert_clean(scalars)
    assert grid(scalars) == grid(expected)
    evaluated = steps(expected)["eval/episodic_return"]
    assert steps(scalars)["eval/episodic_return"] == evaluated and len(evaluated) in (2, 10)  # two games in short
    shown = {(tag, *pair) for tag, pairs in tensorboard_scalars(run_dir(killed)).items() for pair in pairs}
    assert shown == set(scalars)
    assert (run_dir(killed) / "model.safetensors").exists()


SIGTERM = each_text("ReplayBuffer", "FrameReplay", "BatchReplay", "find_teacher", "gae")
SIGTERM.args[1][:] = [  # test_apex.py and test_qdagger.py stop these, too
    pytest.param(name, marks=pytest.mark.slow) if family(name) in ("apex", "qdagger") else name
    for name in SIGTERM.args[1]
]


@each(lambda name: name not in ("ppo_atari_multigpu", "ppg_procgen"))  # with tests of their own
def test_the_loop_looks_for_signals(name):
    """What handles them is in the block; the loop of each file comes to it."""
    assert re.search(r"(?m)^ {8,12}run\.checkpoint\(", script(name).read_text())


@posix
@each_text("Run")
def test_ctrl_c_writes_a_checkpoint(name, tmp_path):
    require_for(name)
    code, output = interrupt(name, smoke(name, total_timesteps=1000 * smoke_total(name)), tmp_path, signal.SIGINT, 0.3)
    assert code == 130 and "Traceback" not in output
    step, folder = re.search(r"Stopped at step (\d+)\. To continue: .* --resume (\S+)", output).groups()
    older = shutil.copytree(tmp_path / folder, tmp_path / "runs/older")
    os.utime(older / script(name).name, (0, 0))
    more = run(script(name), "--resume", "latest", "--total-timesteps", int(step) + smoke_total(name), cwd=tmp_path)
    assert f"The run is in {folder}" in more.stdout


@posix
@SIGTERM
def test_sigterm_then_two_resumes(name, tmp_path):
    """The run would go on for long after the signal; the resumed ones only for as long as a smoke run."""
    require_for(name)
    total = smoke_total(name)
    argv = smoke(name, total_timesteps=1000 * total, checkpoint_freq=total // 2 + 7)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    code, output = interrupt(name, argv, first, signal.SIGTERM, after=0.5)
    assert code == 75, output
    folder = run_dir(first)
    assert f"--resume {folder.relative_to(first)}" in output
    stopped = raw_scalars(folder)
    assert_clean(stopped)

    shutil.copytree(first, second)
    total += int(re.search(r"Stopped at step (\d+)", output)[1])
    for cwd in (first, second):
        resume = "--resume", folder.relative_to(first), "--total-timesteps", total
        run(script(name), *resume, cwd=cwd, **in_short(name))
    scalars = raw_scalars(folder)
    assert_clean(scalars)
    assert scalars[: len(stopped)] == stopped, "a checkpoint was written at the signal, so nothing is redone"
    assert len(scalars) > len(stopped) + 10
    assert untimed(scalars) == untimed(raw_scalars(run_dir(second)))


@posix
@each(lambda name: family(name) in ("dqn", "c51") and "probes" in LINEAGE[name])
def test_a_checkpoint_leaves_no_update_out_of_the_means(name, tmp_path):
    """Updates are rarer than log lines are regular, so a checkpoint between two lines must keep the sums so far."""
    require_for(name)
    argv = ["--train-frequency", 30, "--learning-starts", 50, "--total-timesteps", 1000, "--checkpoint-freq", 37]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir(), whole.mkdir()
    run(script(name), *argv, cwd=whole)
    kill_at_checkpoint(name, argv, killed, number=6, before=False)
    run(script(name), "--resume", run_dir(killed), cwd=killed)
    scalars = raw_scalars(run_dir(killed))
    assert_clean(scalars)
    assert grid(scalars) == grid(raw_scalars(run_dir(whole)))
