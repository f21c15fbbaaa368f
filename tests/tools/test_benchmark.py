"""python -m cleanrl_utils.benchmark: every cell once, whatever is killed, and nothing twice at once."""

import csv
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from cleanrl_utils.engines import cells, local
from cleanrl_utils.engines.board import Board
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
parser.add_argument("--teacher", default="")
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
print("threads", os.environ.get("OMP_NUM_THREADS"), "gpus", os.environ.get("CUDA_VISIBLE_DEVICES"),
      "preallocate", os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"))
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
    for name in [name for name, value in ({"CUDA_VISIBLE_DEVICES": None} | changes).items() if value is None]:
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
    assert "1 cell, 0 done before" in finish(start(folder, *module))
    (folder / "trainer.py").write_text(TRAINER + "# edited again\n")
    assert "1 cell, 0 done before" in finish(start(folder, *module))


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


def test_stop_after_and_go_on_elsewhere(folder, tmp_path_factory):
    """The runs write checkpoints, no other is begun; a copy of the folder goes on from there."""
    (folder / "hold").touch()
    command = ["--num-seeds", 2, "--workers", 2]
    out = finish(start(folder, *command, "--stop-after", 5, steps=40), code=75)
    assert "0 of 4 done" in out and "goes on from here" in out and len(journal(folder)) == 2
    other = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(folder, other)
    shutil.rmtree(folder / "runs")
    (other / "hold").unlink()
    finish(start(other, *command, "--stop-after", 400, steps=40))
    check(other, CELLS)
    begun = {cell: [int(step) for _, word, step in lines if word == "start"] for cell, lines in journal(other).items()}
    assert sorted(map(len, begun.values())) == [1, 1, 2, 2] and all(
        steps[-1] > 0 for steps in begun.values() if steps[1:]
    )
    assert "4 done before" in finish(start(other, *command, steps=40))


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


def test_records_that_cannot_be_read(tmp_path, monkeypatch):
    """The cell is done all the same, and its worker takes the next one."""
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    monkeypatch.setattr(local, "command_of", lambda *arguments: ["true"])
    board = Board({"cells": [{"id": name, "command": [name]} for name in "abc"]}, tmp_path, 1)
    for name in "abc":
        for record in ("begun.json", "done.json"):
            (tmp_path / name / record).mkdir(parents=True)
    options = SimpleNamespace(workers=1, gpus_per_cell=0, retries=0, stop_after=0, mps=False)
    assert not local.run(tmp_path / "matrix.json", board, options)
    assert board.states == ["done"] * 3


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


def test_an_environment_that_is_not_activated(folder):
    """`python` is the one that the tool was started with, though another one is found first."""
    if sys.prefix == sys.base_prefix:
        pytest.skip("not in a virtual environment")
    path = programs(folder, python="#!/bin/sh\nexit 3\n")
    finish(
        start(folder, "--command", "python trainer.py", "--env-ids", "a", "--num-seeds", 1, "--workers", 1, PATH=path)
    )
    check(folder, [("a", 1)])


MPS = """#!/bin/sh
test "$1" = -d || set -- "$(cat)"
echo "$1 ${CUDA_VISIBLE_DEVICES-all}" >> mps
exit $(cat mps-code 2> /dev/null || echo 0)
"""
PACKED = """
num_seeds = 2
commands = ["python trainer.py --steps 12"]

[[run]]
env_ids = ["a", "b"]
cells_per_gpu = 2
threads = 3

[[run]]
env_ids = ["c"]
cells_per_gpu = 0
"""


def programs(folder, **texts):
    """A PATH with these programs in front."""
    (folder / "tools").mkdir(exist_ok=True)
    for name, text in texts.items():
        path = folder / "tools" / name.replace("_", "-")
        path.write_text(text)
        path.chmod(0o755)
    return f"{folder / 'tools'}:{Path(sys.executable).parent}:{os.environ['PATH']}"


def test_cells_that_share_a_gpu(folder):
    """No more than the suite says, each with its threads; MPS is there meanwhile, if it is installed and wanted."""
    smi = "#!/bin/sh\nprintf 'GPU 0: A\\n'\n"
    path = programs(folder, nvidia_smi=smi, nvidia_cuda_mps_control=MPS)
    (folder / "suite.toml").write_text(PACKED)
    argv = ["--suite", "suite.toml", "--workers", 4]
    assert "MPS is started" in finish(start(folder, *argv, PATH=path, OMP_NUM_THREADS=None))
    assert (folder / "mps").read_text().splitlines() == ["-d all", "quit all"]
    running, most = set(), 0
    for line in (folder / "journal").read_text().splitlines():
        env_id, seed, _, word, _ = line.split()
        (running.add if word == "start" else running.discard)((env_id, seed))
        most = max(most, len([cell for cell in running if cell[0] != "c"]))
    assert most == 2
    logs = {log.parent.name[0]: log.read_text() for log in folder.glob("runs/.benchmark/*/log.txt")}
    assert "threads 3 gpus 0 preallocate false" in logs["a"] and "threads 3 gpus 0" in logs["b"]
    assert "gpus  preallocate None" in logs["c"]
    (folder / "mps-code").write_text("1")  # as if it were running: not ours to end
    other = [*argv, "--num-seeds", 1, "--state", "other"]
    assert "MPS was not started" in finish(start(folder, *other, PATH=path, CUDA_VISIBLE_DEVICES="5"))
    assert (folder / "mps").read_text().splitlines()[2:] == ["-d all"]  # and it sees what the cells do not
    assert all("gpus 5" in log.read_text() for log in folder.glob("other/[ab]*/log.txt"))
    finish(start(folder, *argv, "--num-seeds", 1, "--state", "third", "--no-mps", PATH=path))
    assert len((folder / "mps").read_text().splitlines()) == 3


def test_rooms():
    """A cell gets the emptiest GPU, and one that needs all of a GPU is not overtaken."""
    rooms, stopping, entered = local.Rooms(["4", "7"]), threading.Event(), []

    def enter(number):
        with rooms.enter(number, stopping) as variables:
            entered.append(number)
            return variables["CUDA_VISIBLE_DEVICES"]

    with rooms.enter(3, stopping) as first, rooms.enter(3, stopping) as second, rooms.enter(2, stopping):
        assert [first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]] == ["4", "7"]
        assert enter(3) in ("4", "7") and entered == [3]
        large = threading.Thread(target=enter, args=[1])
        large.start()
        wait_for(rooms.turn.locked)
        small = threading.Thread(target=enter, args=[3])
        small.start()
        small.join(0.3)
        assert entered == [3]
    large.join(60), small.join(60)
    assert entered == [3, 1, 3] and set(rooms.free.values()) == {1}
    with rooms.enter(1, stopping), rooms.enter(1, stopping):
        waiting = threading.Thread(target=enter, args=[1])
        waiting.start()
        stopping.set()
        waiting.join(60)
        assert not waiting.is_alive()


def test_a_run_that_needs_another(folder):
    """`runs/...*` is the folder that another cell has made, of several one with a model; also after a stop."""
    for name in ("1", "2", "3"):
        (folder / f"runs/a__teacher__1__{name}").mkdir(parents=True)
    (folder / "runs/a__teacher__1__2/model.safetensors").touch()
    (folder / "hold").touch()
    command = f"{sys.executable} trainer.py --steps 40 --teacher runs/a__teacher__1__*"
    argv = ["--command", command, "--env-ids", "b", "--num-seeds", 1, "--workers", 1]
    process = start(folder, *argv)
    wait_for(lambda: list(folder.glob("runs/*/checkpoint.pt")))
    process.terminate()
    finish(process, code=75)
    (folder / "hold").unlink()
    finish(start(folder, *argv))
    (log,) = folder.glob("runs/.benchmark/*/log.txt")
    commands = [line for line in log.read_text().splitlines() if line.startswith("$ ")]
    assert len(commands) == 2 and all("--teacher runs/a__teacher__1__2 " in line for line in commands)
    assert "--resume runs/b__trainer__1__" in commands[1]


def test_skips_what_is_recorded():
    out = finish(start(ROOT, "--suite", "benchmark/suites/proof.toml", "--skip-recorded"))
    assert " cleanrl/ppo.py " not in out
    rows = csv.DictReader((ROOT / "benchmark/results/ppo.csv").open())
    (new,) = (len(row["seeds"].split()) + 1 for row in rows if row["env_id"] == "CartPole-v1")  # 1, 2, 3, ... are there
    argv = ["--command", "python cleanrl/ppo.py", "--env-ids", "CartPole-v1", "--num-seeds", new, "--skip-recorded"]
    assert finish(start(ROOT, *argv)).splitlines() == [f"python cleanrl/ppo.py --env-id CartPole-v1 --seed {new}"]
    argv[1] += " --gamma 0.9"
    assert len(finish(start(ROOT, *argv)).splitlines()) == new


def test_wrong_usage(folder):
    for argv, words in [
        (["--command", "python trainer.py"], "--env-ids"),
        (["--command", "python no.py", "--env-ids", "a"], "no.py"),
        (["--command", "no-such-program x", "--env-ids", "a"], "no-such-program"),
        (["--command", "python trainer.py --seed 3", "--env-ids", "a"], "--num-seeds"),
        (["--suite", "no.toml"], "no.toml"),
        (["--workers", -1], "--workers"),
        (["--stop-after", 0], "--stop-after"),
        (["--stop-after", 9, "--engine", "slurm"], "--engine local"),
        (["--status"], "proof.toml"),
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
    for line in ("threads = 0", 'cells_per_gpu = "2"', "reference = 3"):
        (folder / "suite.toml").write_text(f'{line}\n[[run]]\ncommands = ["python trainer.py"]\nenv_ids = ["a"]\n')
        assert f": {line.split()[0]} must" in finish(start(folder, "--suite", "suite.toml"), code=2)
    assert "--state" in finish(start(folder, "--state", "suite.toml", "--workers", 1), code=2)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "benchmark/suites").glob("*.toml")), ids=lambda path: path.stem)
def test_suites(path):
    """Every command of a suite names a file of ours and flags that it has."""
    commands = finish(start(ROOT, "--suite", path)).splitlines()
    assert commands
    for command in set(re.sub(r" --(env-id|seed) \S+", "", command) for command in commands):
        words = shlex.split(command)
        at, file = cells.script_of(words)
        assert "python" in words[:at] and os.path.basename(file).removesuffix(".py") in FILES
        for flag in (flag.removeprefix("--no-") for flag in words[at + 1 :] if flag.startswith("--")):
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
