"""Tags of W&B for the runs of a benchmark."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from cleanrl_utils.engines.tags import variables_of
from helpers.files import ROOT, posix, require_program
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
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    env = environment(PYTHONPATH=str(ROOT), PATH=path, **variables)
    done = run_module("cleanrl_utils.benchmark", *argv, cwd=clone, env=env, code=code)
    return done.stderr if code == 2 else done.stdout


def test_tags(clone, monkeypatch, capsys):
    """The version as git knows it, the user's own, those of WANDB_TAGS; none where nothing is tracked."""
    monkeypatch.chdir(clone)
    monkeypatch.delenv("WANDB_TAGS", raising=False)
    own = ["pr-299", "rlops-pilot"]

    def tags(*own, auto=True, command="python cleanrl/ppo.py --track"):
        options = SimpleNamespace(wandb_tags=[*own], auto_tag=auto)
        found = variables_of([{"command": command.split()}], options)
        return found["WANDB_TAGS"].split(",") if found else []

    assert tags() == ["v3.2.1"], "there is no git repository"
    git(clone, "init", "--initial-branch=main")
    git(clone, "add", ".")
    git(clone, "commit", "-m", "one")
    (version,) = tags()
    assert re.fullmatch(r"v3\.2\.1-g[0-9a-f]{10}", version)
    git(clone, "tag", "v1.0.0")
    assert tags() == ["v1.0.0"]
    git(clone, "commit", "--allow-empty", "-m", "two")
    (clone / "pyproject.toml").write_text("")
    (version,) = tags()
    assert re.fullmatch(r"v1\.0\.0-1-g[0-9a-f]{10}-dirty", version)
    assert tags(*own, auto=False) == own and tags(command="python cleanrl/ppo.py") == []
    assert tags(auto=False) == tags(command="python cleanrl/ppo.py --no-track") == []
    monkeypatch.setenv("WANDB_TAGS", "mine, pr-299")
    assert tags(*own) == ["mine", "pr-299", "rlops-pilot", version]
    for wrong in "a,b", "", "x" * 65:
        with pytest.raises(SystemExit):
            tags(wrong)
        assert "1 to 64 characters and no comma" in capsys.readouterr().err


TELL = """
import os
from pathlib import Path

Path("told").write_text(os.environ.get("WANDB_TAGS", "none"))
"""


def test_runs_get_their_tags(clone):
    """Through the runner, which also prints them with the commands; tests/files/test_wandb.py reads what W&B keeps."""
    (clone / "tell.py").write_text(TELL)
    told = ["--command", "python tell.py --track", *RUN, "--wandb-tags", "pr-299"]
    line = "WANDB_TAGS=pr-299,v3.2.1 python tell.py --track --env-id CartPole-v1 --seed 1\n"
    assert bench(clone, *told) == line
    assert "1 of 1 done" in bench(clone, *told, "--workers", 1) and (clone / "told").read_text() == "pr-299,v3.2.1"
    plain = ["--command", "python tell.py", *RUN, "--wandb-tags", "pr-299"]
    assert "--wandb-tags is for commands with --track" in bench(clone, *plain, code=2)
    assert bench(clone, *plain[:-2]) == "python tell.py --env-id CartPole-v1 --seed 1\n"


def test_tags_travel_to_aws(clone):
    """As a variable of the job; one that was given with --env is the user's own."""
    where = "--bucket", "bucket", "--queue", "q", "--definition", "d", "--dry-run"
    argv = [*TRACKED, *where, "--wandb-tags", "pr-299", "--hours-per-cell", 1, "--price-per-hour", 1]
    for given, expected in ([], "pr-299,v3.2.1"), (["--env", "WANDB_TAGS=a"], "a"):
        done = run_module("cleanrl_utils.submit_exp", *argv, *given, cwd=clone)
        variables = json.loads(done.stdout)["containerOverrides"]["environment"]
        assert {"name": "WANDB_TAGS", "value": expected} in variables
