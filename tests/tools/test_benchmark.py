"""python -m cleanrl_utils.benchmark: every cell once, whatever is killed, and nothing twice at once."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from helpers.files import FILES, ROOT, script
from helpers.processes import environment
from helpers.scalars import raw_scalars

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

# Behaves as the files do (run folder, checkpoint, SIGTERM, --resume) without training; notes when it starts and ends,
# and whether another process of the same environment and seed is alive.
TRAINER = """
import argparse, fcntl, os, shlex, signal, sys, time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--env-id")
parser.add_argument("--seed")
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--resume", default="")
args = parser.parse_args()
stopped = []
signal.signal(signal.SIGTERM, lambda *received: stopped.append(received))

def note(*words):
    with open("journal", "a") as file:
        file.write(" ".join(map(str, [args.env_id, args.seed, os.getpid(), *words])) + "\\n")

alone = open(f"alone-{args.env_id}-{args.seed}", "w")
try:
    fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    note("TWICE")
    sys.exit(1)
if Path("stubborn").exists():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if Path("broken").exists() and args.seed == "2":
    sys.exit("it broke")
run_dir = Path(args.resume)
while not args.resume:
    run_dir = Path(f"runs/{args.env_id}__trainer__{args.seed}__{int(time.time())}")
    try:
        run_dir.mkdir(parents=True)
        break
    except FileExistsError:
        time.sleep(0.1)
(run_dir / "trainer.py").write_bytes(Path(__file__).read_bytes())
(run_dir / "command.txt").open("a").write(shlex.join(sys.orig_argv) + "\\n")
checkpoint = run_dir / "checkpoint.pt"
first = int(checkpoint.read_text()) if args.resume else 0
note("start", first)
for step in range(first, args.steps):
    time.sleep(0.05)
    (run_dir / "unfinished.tmp").write_text(str(step + 1))
    os.replace(run_dir / "unfinished.tmp", checkpoint)
    while step == 2 and Path("hold").exists() and not stopped:
        time.sleep(0.05)
    if stopped:
        time.sleep(0.5)  # a large checkpoint
        sys.exit(75)
note("end", args.steps)
print("threads", os.environ.get("OMP_NUM_THREADS"), "gpus", os.environ.get("CUDA_VISIBLE_DEVICES"))
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "trainer.py").write_text(TRAINER)
    return tmp_path


def start(folder, *argv, steps=3, **changes):
    command = [sys.executable, "-m", "cleanrl_utils.benchmark", *map(str, argv)]
    if "--command" not in argv and "--suite" not in argv:
        command += ["--command", f"{sys.executable} trainer.py --steps {steps}", "--env-ids", "a", "b"]
    env = environment(PYTHONPATH=str(ROOT), **changes)
    for name in [name for name, value in changes.items() if value is None] + ["CUDA_VISIBLE_DEVICES"]:
        env.pop(name, None)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=folder, env=env, text=True, **pipes)


def finish(process, code=0):
    out, _ = process.communicate(timeout=400)
    assert process.returncode == code, out
    return out


def journal(folder):
    """What the trainers noted: {(env_id, seed): [(pid, word, step), ...]}."""
    notes = {}
    for line in (folder / "journal").read_text().splitlines() if (folder / "journal").exists() else []:
        env_id, seed, pid, *words = line.split()
        notes.setdefault((env_id, int(seed)), []).append((int(pid), *words))
    return notes


def check(folder, cells):
    """Each cell was begun, came to its end once and was never run twice at once."""
    notes = journal(folder)
    assert set(notes) == set(cells)
    for cell, lines in notes.items():
        words = [word for _, word, *_ in lines]
        assert "TWICE" not in words and words.count("end") == 1, (cell, lines)


def processes(folder):
    """The processes whose current folder this is: (pid, words of the command)."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(path / "cwd") == str(folder):
                yield int(path.name), (path / "cmdline").read_text().split("\0")
        except OSError:  # it has ended
            pass


def wait_for(condition, seconds=180):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "waited in vain"
        time.sleep(0.02)


CELLS = [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


def test_prints_the_commands(folder):
    out = finish(start(folder, "--num-seeds", 2, "--start-seed", 3, "--workers", 0))
    words = [line.split()[-4:] for line in out.splitlines()]
    assert words == [["--env-id", env_id, "--seed", str(seed)] for env_id in "ab" for seed in (3, 4)]
    out = finish(start(folder, "--command", "nice ./ / python trainer.py", "--env-ids", "a", "--num-seeds", 1))
    assert out == "nice ./ / python trainer.py --env-id a --seed 1\n"
    assert not (folder / "runs").exists()


def test_runs_what_is_missing(folder):
    (folder / "broken").touch()
    out = finish(start(folder, "--num-seeds", 2, "--workers", 3), code=1)
    assert out.count("it broke") == 1 and "2 of 4 done, 0 running, 2 failed" in out and "and 1 more" in out
    (folder / "broken").unlink()
    out = finish(start(folder, "--num-seeds", 2, "--workers", 3))
    assert "4 cells, 2 done before" in out and "4 of 4 done, 0 running, 0 failed" in out
    check(folder, CELLS)
    out = finish(start(folder, "--num-seeds", 3, "--workers", 3))
    assert "6 cells, 4 done before" in out
    check(folder, [*CELLS, ("a", 3), ("b", 3)])
    records = [json.loads(path.read_text()) for path in (folder / "runs/.benchmark").glob("*/done.json")]
    assert {folder / record["run_dir"] for record in records} == set((folder / "runs").glob("*__trainer__*"))
    # a run folder that is gone is missing, and another text of the script is another experiment
    (next((folder / "runs").glob("a__trainer__1__*"))).rename(folder / "elsewhere")
    assert "3 cells, 2 done before" in finish(start(folder, "--env-ids", "a", "--num-seeds", 3, "--workers", 1,
        "--command", f"{sys.executable} trainer.py --steps 3"))  # fmt: skip
    (folder / "trainer.py").write_text(TRAINER + "# edited\n")
    assert "2 cells, 0 done before" in finish(start(folder, "--num-seeds", 1, "--workers", 2))
    module = ["--command", f"{sys.executable} -m trainer", "--env-ids", "m", "--num-seeds", 1, "--workers", 1]
    assert "1 cells, 0 done before" in finish(start(folder, *module))
    (folder / "trainer.py").write_text(TRAINER + "# edited again\n")
    assert "1 cells, 0 done before" in finish(start(folder, *module))


@pytest.mark.parametrize("victim", ["runner", "cell", "trainer"])
def test_kill(victim, folder):
    seeds = 2 if victim == "runner" else 1  # no other cell waits: what was killed is started again at once
    (folder / "hold").touch()
    process = start(folder, "--num-seeds", seeds, "--workers", 2, steps=40)
    wait_for(lambda: len(list(folder.glob("runs/*/checkpoint.pt"))) == 2)
    pid, _, _ = journal(folder)["a", 1][0]
    if victim == "runner":
        process.kill()
        process.communicate()
        process = start(folder, "--num-seeds", 2, "--workers", 2, steps=40)
    else:
        parent = int(re.search(r"PPid:\s+(\d+)", open(f"/proc/{pid}/status").read())[1])
        os.kill(parent if victim == "cell" else pid, signal.SIGKILL)
    (folder / "hold").unlink()
    finish(process)
    check(folder, [cell for cell in CELLS if cell[1] <= seeds])
    notes = journal(folder)
    starts = {cell: [int(step) for _, word, step in notes[cell] if word == "start"] for cell in notes}
    if victim == "runner":  # its cells have gone on without it
        assert set(map(len, starts.values())) == {1}
    else:
        assert len(starts["a", 1]) == 2 and starts["a", 1][1] > 0, "not resumed from its checkpoint"
        assert len(list(folder.glob("runs/a__trainer__1__*"))) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt(number, folder):
    (folder / "hold").touch()
    process = start(folder, "--num-seeds", 2, "--workers", 2, steps=40)
    wait_for(lambda: len(list(folder.glob("runs/*/checkpoint.pt"))) == 2)
    process.send_signal(number)
    assert "The same command goes on from here" in finish(process, code=75)
    assert len(journal(folder)) == 2
    (folder / "hold").unlink()
    out = finish(start(folder, "--num-seeds", 2, "--workers", 2, steps=40))
    assert 0 < float(re.search(r"busy ([\d.]+)%", out)[1]) <= 100
    check(folder, CELLS)
    again = [lines[1] for lines in journal(folder).values() if [word for _, word, *_ in lines][1] == "start"]
    assert len(again) == 2 and all(int(step) > 0 for _, _, step in again)


def test_interrupt_twice(folder):
    """The second time kills runs that do not listen."""
    (folder / "stubborn").touch()
    process = start(folder, "--num-seeds", 1, "--workers", 2, steps=4000)
    wait_for(lambda: len(list(folder.glob("runs/*/checkpoint.pt"))) == 2)
    process.send_signal(signal.SIGINT)
    assert any("Once more to kill them" in line for line in process.stdout)
    assert process.poll() is None and list(processes(folder))
    process.send_signal(signal.SIGINT)
    finish(process, code=75)
    wait_for(lambda: not list(processes(folder)))


def test_a_script_that_goes_away(folder):
    (folder / "hold").touch()
    process = start(folder, "--num-seeds", 1, "--workers", 1, steps=40)
    wait_for(lambda: list(folder.glob("runs/*/checkpoint.pt")))
    (folder / "trainer.py").rename(folder / "elsewhere.py")
    (folder / "hold").unlink()
    out = finish(process, code=1)
    assert "1 of 2 done" in out and out.count("trainer.py has changed since this list was made") == 2


def test_a_reader_that_goes_away(folder):
    process = start(folder, "--num-seeds", 2, "--workers", 1)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(180) == 0
    check(folder, CELLS)


def test_whose_run_it_is(folder):
    """An interrupted cell does not take the run folder of another text of its script, or of another command."""
    (folder / "broken").touch()
    finish(start(folder, "--num-seeds", 2, "--workers", 1), code=1)
    (folder / "broken").unlink()
    (folder / "trainer.py").write_text(TRAINER + "# edited\n")
    finish(start(folder, "--num-seeds", 2, "--workers", 1))
    edited = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/checkpoint.pt")}
    (folder / "trainer.py").write_text(TRAINER)
    finish(start(folder, "--num-seeds", 2, "--workers", 1))
    assert {path: path.stat().st_mtime_ns for path in edited} == edited
    records = [json.loads(path.read_text())["run_dir"] for path in folder.glob("runs/.benchmark/*/done.json")]
    assert len(records) == len(set(records)) == 8
    suite = """[[run]]\ncommands = ["python trainer.py", "nice python trainer.py"]\nenv_ids = ["a"]\n"""
    (folder / "suite.toml").write_text(suite)
    assert "--exp-name" in finish(start(folder, "--suite", "suite.toml", "--workers", 1), code=2)


def test_a_launcher_with_its_own_exit_code(folder):
    """torchrun makes 1 of 75; the run was interrupted nevertheless, and goes on."""
    launcher = "import signal, subprocess, sys\nrun = subprocess.Popen(sys.argv[1:])\n"
    launcher += "signal.signal(signal.SIGTERM, lambda *received: run.terminate())\nsys.exit(run.wait() != 0)\n"
    (folder / "launcher").write_text(launcher)
    command = f"{sys.executable} launcher {sys.executable} trainer.py --steps 40"
    argv = ["--command", command, "--env-ids", "a", "--num-seeds", 1]
    (folder / "hold").touch()
    process = start(folder, *argv, "--workers", 1)
    wait_for(lambda: list(folder.glob("runs/*/checkpoint.pt")))
    process.send_signal(signal.SIGTERM)
    finish(process, code=75)
    (folder / "hold").unlink()
    assert not list(folder.glob("runs/.benchmark/*/failed.json"))
    finish(start(folder, *argv, "--workers", 1))
    check(folder, [("a", 1)])
    assert int(journal(folder)["a", 1][1][2]) > 0, "not resumed from its checkpoint"


def test_a_cell_that_cannot_be_started(folder):
    """Nothing is swallowed: out of file descriptors, the cells that were not run have failed."""
    argv = ["--env-ids", "a", "b", "c", "d", "--num-seeds", "4", "--command", f"{sys.executable} trainer.py"]
    command = [sys.executable, "-m", "cleanrl_utils.benchmark", *argv, "--workers", "14"]
    limited = ["bash", "-c", f"ulimit -n 24; exec {shlex.join(command)}"]
    done = subprocess.run(limited, cwd=folder, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, check=False)
    assert done.returncode == 1 and b"Too many open files" in done.stdout, done.stdout
    path = next(folder.glob("runs/.benchmark/*/done.json"))
    path.write_text("")  # as a power cut may leave it: not done
    finish(start(folder, *argv, "--workers", 2))


def test_ppo(tmp_path):
    """The real thing: training is killed after a checkpoint; its metrics are whole and none is there twice."""
    argv = ["--command", f"{sys.executable} {script('ppo')} --no-cuda --total-timesteps 10240 --checkpoint-freq 2048"]
    argv += ["--env-ids", "CartPole-v1", "--num-seeds", 1, "--workers", 1]
    process = start(tmp_path, *argv)
    wait_for(lambda: list(tmp_path.glob("runs/*/checkpoint.pt")))
    checkpoint = next(tmp_path.glob("runs/*/checkpoint.pt"))
    first = checkpoint.stat().st_mtime_ns
    wait_for(lambda: checkpoint.stat().st_mtime_ns != first)
    (pid,) = [pid for pid, words in processes(tmp_path) if words[1:2] == [str(script("ppo"))]]
    os.kill(pid, signal.SIGKILL)
    finish(process)
    (folder,) = tmp_path.glob("runs/CartPole*")
    lines = (folder / "command.txt").read_text().splitlines()
    assert len(lines) == 2 and "--resume" in lines[1]
    times = Counter((tag, step) for tag, step, _ in raw_scalars(folder) if tag.startswith("losses/"))
    assert set(times.values()) == {1} and {step for _, step in times} == set(range(512, 10241, 512))


def test_cores_and_gpus(folder):
    """Workers share the cores, unless told otherwise, and take turns with the GPUs that nvidia-smi lists."""
    tools = folder / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\nprintf 'GPU 0: A\\nGPU 1: B\\n'\n")
    (tools / "nvidia-smi").chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    finish(start(folder, "--num-seeds", 2, "--workers", 4, PATH=path, OMP_NUM_THREADS=None))
    logs = [path.read_text() for path in folder.glob("runs/.benchmark/*/log.txt")]
    assert sorted(re.search(r"gpus (\w+)", log)[1] for log in logs) == ["0", "0", "1", "1"]
    threads = max(1, len(os.sched_getaffinity(0)) // 4)
    assert all(f"threads {threads} " in log for log in logs)
    finish(start(folder, "--num-seeds", 1, "--workers", 1, "--state", "other", PATH=path, OMP_NUM_THREADS="7"))
    assert all("threads 7 gpus 0" in path.read_text() for path in folder.glob("other/*/log.txt"))


def test_wrong_usage(folder):
    for argv, words in [
        (["--command", "python trainer.py"], "--env-ids"),
        (["--command", "python no.py", "--env-ids", "a"], "no.py"),
        (["--command", "no-such-program x", "--env-ids", "a"], "no-such-program"),
        (["--command", "python trainer.py --seed 3", "--env-ids", "a"], "--num-seeds"),
        (["--suite", "no.toml"], "no.toml"),
        (["--workers", -1], "--workers"),
        (["--command", "python 'trainer.py", "--env-ids", "a"], "No closing quotation"),
        (["--command", "python trainer.py --env_id=b", "--env-ids", "a"], "--env-ids"),
    ]:
        assert words in finish(start(folder, *argv), code=2)
    (folder / "suite.toml").write_text('[[run]]\ncommand = "python trainer.py"\nenv_ids = ["a"]\n')
    assert "commands" in finish(start(folder, "--suite", "suite.toml"), code=2)
    (folder / "suite.toml").write_text('[run]\ncommands = ["python trainer.py"]\nenv_ids = ["a"]\n')
    assert "[[run]]" in finish(start(folder, "--suite", "suite.toml"), code=2)
    (folder / "suite.toml").write_text('[[run]]\ncommands = ["python trainer.py"]\nenv_ids = "ab"\n')
    assert "env_ids = [...]" in finish(start(folder, "--suite", "suite.toml"), code=2)
    (folder / "suite.toml").write_text('num_seeds = 0\n[[run]]\ncommands = ["python trainer.py"]\nenv_ids = ["a"]\n')
    assert "num_seeds" in finish(start(folder, "--suite", "suite.toml"), code=2)
    assert "--state" in finish(start(folder, "--state", "suite.toml", "--workers", 1), code=2)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "benchmark/suites").glob("*.toml")), ids=lambda path: path.stem)
def test_suites(path):
    """Every command of a suite names a file of ours and flags that it has."""
    commands = finish(start(ROOT, "--suite", path)).splitlines()
    assert commands
    for command in set(re.sub(r" --(env-id|seed) \S+", "", command) for command in commands):
        program, file, *flags = shlex.split(command)
        assert program == "python" and os.path.basename(file).removesuffix(".py") in FILES
        for flag in (flag.removeprefix("--no-") for flag in flags if flag.startswith("--")):
            assert re.search(rf"^    {flag.removeprefix('--').replace('-', '_')}: ", (ROOT / file).read_text(), re.M)


def test_shows_progress(folder):
    import pexpect

    argv = ["-m", "cleanrl_utils.benchmark", "--env-ids", "a", "b", "--num-seeds", "1", "--workers", "1"]
    argv += ["--command", f"{sys.executable} trainer.py --steps 30"]
    child = pexpect.spawn(sys.executable, argv, cwd=folder, env=environment(PYTHONPATH=str(ROOT)), dimensions=(24, 150))
    child.expect(r"0 of 2 done, 1 running, 0 failed", timeout=180)
    child.expect(r"1 of 2 done, 1 running, 0 failed, about 0:0\d:\d\d left", timeout=180)
    child.expect(r"2 of 2 done, 0 running, 0 failed", timeout=180)
    child.expect(pexpect.EOF)
