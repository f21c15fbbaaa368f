"""A run survives kill -9 and SIGTERM: --resume continues it with no metric step missing, doubled or changed."""

import random
import re
import shutil
import signal
import sys
import time

import numpy as np

from helpers.files import LINEAGE, METRICS, each, each_text, family, posix, require_for, script, smoke, smoke_total
from helpers.processes import inspect_runs, kill_at_checkpoint, run, run_dir, start
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
    process = start(script(name), *argv, cwd=cwd)
    try:
        wait_until_training(process, cwd, event_files)
        time.sleep(after)
        process.send_signal(how)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, stdout + stderr


@posix
@each_text("ReplayBuffer", "FrameReplay", "gae")
def test_kill_at_random_moments(name, tmp_path):
    require_for(name)
    argv = [*long_run(name), "--save-model"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir(), whole.mkdir()
    started = time.time()
    run(script(name), *argv, cwd=whole)
    duration = time.time() - started

    resume = []
    for _ in range(3):
        delay = random.uniform(0, duration / 3)
        code, output = interrupt(name, argv + resume, killed, signal.SIGKILL, delay)
        assert code in (-signal.SIGKILL, 0), f"killed after {delay} s: {output}"
        resume = ["--resume", run_dir(killed)]
    run(script(name), *resume, cwd=killed)  # the flags come from the run's folder

    scalars = raw_scalars(run_dir(killed))
    assert_clean(scalars)
    assert grid(scalars) == grid(raw_scalars(run_dir(whole)))
    assert len(steps(scalars)["eval/episodic_return"]) == 10
    shown = {(tag, *pair) for tag, pairs in tensorboard_scalars(run_dir(killed)).items() for pair in pairs}
    assert shown == set(scalars)
    assert (run_dir(killed) / "model.safetensors").exists()


SIGTERM = each_text("ReplayBuffer", "FrameReplay", "BatchReplay", "find_teacher", "gae")


@each(lambda name: name not in [*SIGTERM.args[1], "ppo_atari_multigpu", "ppg_procgen"])  # with tests of their own
def test_the_text_that_handles_sigterm(name):
    """One text in all files: a flag that the loop looks at after each checkpoint that is due, and exit code 75."""
    text = script(name).read_text()
    assert text.count("signal.signal(signal.SIGTERM, lambda *received: stop_signals.append(received))") == 1
    stop = r"(?m)^ {8}if stop_signals or .*\n {12}save_checkpoint\(.*\n {8}if stop_signals:\n {12}print\(.*\n"
    assert len(re.findall(stop + r" {12}sys\.exit\(75\)  # schedulers start such a job again", text)) == 1


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
        run(script(name), "--resume", folder.relative_to(first), "--total-timesteps", total, cwd=cwd)
    scalars = raw_scalars(folder)
    assert_clean(scalars)
    assert scalars[: len(stopped)] == stopped, "a checkpoint was written at the signal, so nothing is redone"
    assert len(scalars) > len(stopped) + 10
    assert untimed(scalars) == untimed(raw_scalars(run_dir(second)))


@each_text("ReplayBuffer", "FrameReplay", "BatchReplay", "find_teacher", "gae")
def test_resume_of_a_finished_run_changes_nothing(name, tmp_path):
    require_for(name)
    run(script(name), *smoke(name), "--save-model", cwd=tmp_path)
    folder = run_dir(tmp_path)
    before = [scalar for scalar in raw_scalars(folder) if not scalar[0].startswith("eval/")]
    run(script(name), "--resume", folder, cwd=tmp_path)
    after = raw_scalars(folder)
    assert_clean(after)
    assert [scalar for scalar in after if not scalar[0].startswith("eval/")] == before
    assert len(after) == len(before) + 10


STATE = """
import numpy as np

kept = {"global_step": global_step}
if "learner" in globals():
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(learner))
    kept["learner"] = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
else:
    optimizers = {key: value for key, value in globals().items() if isinstance(value, torch.optim.Optimizer)}
    modules = {key: value for key, value in globals().items() if isinstance(value, nn.Module)}
    assert optimizers and modules
    kept |= {key: value.state_dict()["state"] for key, value in optimizers.items()} | {"torch": torch.get_rng_state()}
    kept |= {key: value.state_dict() for key, value in modules.items()}
for key in ("chunk", "staged", "chunks_added", "gradient_steps", "log_alpha", "act_state", "int_return"):
    # PQN starts anew; a chunk of iterations is as long as the machine is fast
    state = not (key == "act_state" and "q_network" in globals()) and not (key == "chunk" and "max_chunk" in globals())
    if key in globals() and state:
        kept[key] = globals()[key]
if "rng" in globals():
    kept["numpy"] = [str(rng.bit_generator.state)]
if "replay" in globals() and hasattr(replay, "window"):  # frames stored once
    kept["replay"] = [replay.frames.slots, replay.rows.slots, replay.window, list(replay.first_frames), replay.saved]
    if hasattr(replay, "tree"):
        kept["priorities"] = [replay.tree.leaves, replay.tree.sums]
        kept["drawn"] = [getattr(replay, key) for key in ("largest", "ready", "oldest") if hasattr(replay, key)]
elif "replay" in globals() and hasattr(replay, "rows"):
    kept["replay"] = [replay.rows, replay.filled, replay.added]


def flat(tree, path=""):
    if isinstance(tree, dict):
        return {k: v for key, branch in tree.items() for k, v in flat(branch, f"{path}/{key}").items()}
    if isinstance(tree, (list, tuple)):
        return flat(dict(enumerate(tree)), path)
    return {path: np.array(tree.detach() if hasattr(tree, "detach") else tree)}


result |= flat(kept)
"""


@each()
def test_kill_while_a_checkpoint_is_written_and_restore_all_that_learning_needs(name, tmp_path):
    """The killed run is resumed to its end, and then once more, with nothing left to do, to look at what is restored:
    weights, optimizers, normalisers, replay, generators and counters."""
    require_for(name)
    if sys.platform == "win32":  # no SIGKILL
        run(script(name), *smoke(name, checkpoint_freq=1), cwd=tmp_path)
        unfinished = tmp_path / "none"
    else:
        kill_at_checkpoint(name, smoke(name, checkpoint_freq=1), tmp_path, number=3, before=True)
        (unfinished,) = run_dir(tmp_path).glob("*.tmp")
    resume = ["--resume", run_dir(tmp_path)]
    before, after = inspect_runs(script(name), [resume, resume], cwd=tmp_path, after=STATE)
    assert not unfinished.exists()
    scalars = raw_scalars(run_dir(tmp_path))
    assert_clean(scalars)
    for tag in METRICS[family(name)]:
        assert steps(scalars)[tag][-1] == smoke_total(name)

    for result in (before, after):
        del result["stdout"], result["stderr"]
    assert before.keys() == after.keys() and len(before) > 8
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value, err_msg=key)


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
