"""Tags of W&B for the runs of a benchmark, and what W&B keeps of a run: read from what it wrote in offline mode."""

import json
import os
import re
import subprocess
import sys

import pytest

from helpers import wandb_files
from helpers.files import ROOT, posix, require, require_for, require_program
from helpers.processes import environment, run_module

pytestmark = posix

RUN = ["--env-ids", "CartPole-v1", "--num-seeds", 1]
TRACKED = ["--command", "python cleanrl/ppo.py --track", *RUN]


@pytest.fixture
def clone(tmp_path):
    """A folder with the files and a history of its own."""
    require_program("git")
    for name in ("cleanrl", "cleanrl_utils"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "3.2.1"\n')
    (tmp_path / ".gitignore").write_text("runs\nwandb\n")
    return tmp_path


def git(clone, *words):
    who = {f"GIT_{role}_{what}": "me@here" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = os.environ | who | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    subprocess.run(["git", *words], cwd=clone, env=env, check=True, capture_output=True)


def bench(clone, *argv, code=0, **variables):
    env = environment(PYTHONPATH=str(ROOT), PATH=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}", **variables)
    done = run_module("cleanrl_utils.benchmark", *argv, cwd=clone, env=env, code=code)
    return done.stderr if code == 2 else done.stdout


def shown(clone, *argv, **variables):
    """The tags in front of the command that is printed without --workers."""
    (line,) = bench(clone, *argv, **variables).splitlines()
    assert line.endswith("--env-id CartPole-v1 --seed 1")
    found = re.match(r"WANDB_TAGS=(\S+) python ", line)
    return found[1].strip("'").split(",") if found else []


def test_tags(clone):
    """The version as git knows it, the user's own, those of WANDB_TAGS; none where nothing is tracked."""
    assert shown(clone, *TRACKED) == ["v3.2.1"], "there is no git repository"
    git(clone, "init", "--initial-branch=main")
    git(clone, "add", ".")
    git(clone, "commit", "-m", "one")
    (version,) = shown(clone, *TRACKED)
    assert re.fullmatch(r"v3\.2\.1-g[0-9a-f]{10}", version)
    git(clone, "tag", "v1.0.0")
    assert shown(clone, *TRACKED) == ["v1.0.0"]
    git(clone, "commit", "--allow-empty", "-m", "two")
    (clone / "pyproject.toml").write_text("")
    (version,) = shown(clone, *TRACKED)
    assert re.fullmatch(r"v1\.0\.0-1-g[0-9a-f]{10}-dirty", version)
    own = ["--wandb-tags", "pr-299", "rlops-pilot"]
    assert shown(clone, *TRACKED, *own, WANDB_TAGS="mine, pr-299") == ["mine", "pr-299", "rlops-pilot", version]
    assert shown(clone, *TRACKED, *own, "--no-auto-tag") == ["pr-299", "rlops-pilot"]
    plain = ["--command", "python cleanrl/ppo.py", *RUN]
    assert shown(clone, *plain) == []
    assert "--wandb-tags is for commands with --track" in bench(clone, *plain, *own, code=2)
    for wrong in "a,b", "", "x" * 65:
        assert "1 to 64 characters and no comma" in bench(clone, *TRACKED, "--wandb-tags", wrong, code=2)


def test_tags_travel_to_aws(clone):
    """As a variable of the job; one that was given with --env is the user's own."""
    where = "--bucket", "bucket", "--queue", "q", "--definition", "d", "--dry-run"
    argv = [*TRACKED, *where, "--wandb-tags", "pr-299", "--hours-per-cell", 1, "--price-per-hour", 1]
    for given, expected in ([], "pr-299,v3.2.1"), (["--env", "WANDB_TAGS=a"], "a"):
        done = run_module("cleanrl_utils.submit_exp", *argv, *given, cwd=clone)
        variables = json.loads(done.stdout)["containerOverrides"]["environment"]
        assert {"name": "WANDB_TAGS", "value": expected} in variables


def test_what_wandb_keeps(clone):
    """The eight items that the paper names, of a run of the benchmark runner, and its tags."""
    require("wandb", "moviepy")
    require_for("ppo")
    flags = "--no-cuda --track --capture-video --total-timesteps 512 --wandb-project-name a-project"
    argv = ["--command", f"python cleanrl/ppo.py {flags}", *RUN, "--workers", 1, "--wandb-tags", "pr-299"]
    assert "1 of 1 done" in bench(clone, *argv)
    (folder,) = clone.glob("wandb/offline-run-*")
    (file,) = folder.glob("*.wandb")
    records = wandb_files.read(file)
    run = records["run"][0]
    assert list(run.tags) == ["pr-299", "v3.2.1"] and run.project == "a-project"
    files = {item.path for record in records["files"] for item in record.files}
    assert (folder / "files/code/cleanrl/ppo.py").read_bytes() == (ROOT / "cleanrl/ppo.py").read_bytes()
    assert {"code/cleanrl/ppo.py", "requirements.txt"} <= files  # 1 source code, 2 dependencies
    assert re.search(r"(?m)^torch==", (folder / "files/requirements.txt").read_text())
    config = {item.key: item.value_json for item in run.config.update}
    assert config["learning_rate"] == "0.00025" and config["seed"] == "1"  # 3 hyperparameters
    command = [*flags.split(), "--env-id", "CartPole-v1", "--seed", "1"]
    assert list(records["environment"][0].args) == command  # 4 the command
    logged = {item.key or item.nested_key[0] for record in records["history"] for item in record.item}
    assert {"charts/episodic_return", "losses/value_loss", "charts/SPS", "global_step", "videos"} <= logged  # 5 metrics
    films = {film.stat().st_size for film in folder.glob("files/media/videos/*.mp4")}  # 6 videos
    assert films == {film.stat().st_size for film in clone.glob("runs/*/videos/*.mp4")} and films
    use = {item.key for record in records["stats"] for item in record.item}
    assert {"proc.memory.rssMB", "proc.cpu.threads"} <= use  # 7 use of the machine
    printed = "".join(record.line for record in records["output_raw"])
    assert "The run is in runs/" in printed and "The run is in runs/" in (folder / "files/output.log").read_text()  # 8
