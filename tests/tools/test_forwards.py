"""Published paths of files that are elsewhere here: they run the file itself."""

import importlib
import runpy
import shutil
import subprocess
import sys

import pytest

from helpers.files import ROOT, require_for

FORWARDS = ["ppo_trxl", "ppo_continuous_action_isaacgym"]


@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_is_the_file(name, monkeypatch, capsys):
    require_for(name)
    shown = []
    for path in (f"cleanrl/{name}/{name}.py", f"cleanrl/{name}.py"):
        monkeypatch.setattr(sys, "argv", [path, "--help"])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / path), run_name="__main__")
        assert not end.value.code
        shown.append(capsys.readouterr().out.split("\n", 1)[1])  # but for the name of the program
    assert shown[0] == shown[1] and f"(default: {name})" in shown[0]
    assert importlib.import_module(f"cleanrl.{name}").__file__ == str(ROOT / f"cleanrl/{name}.py")  # not the folder


def test_a_forward_runs_where_it_is_copied(tmp_path):
    require_for("ppo_trxl")
    for path in ("cleanrl/ppo_trxl.py", "cleanrl/ppo_trxl/ppo_trxl.py"):
        (tmp_path / "clone" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / "clone" / path)
    command = [sys.executable, "clone/cleanrl/ppo_trxl/ppo_trxl.py", "--env-id", "NoSuch-v0"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stderr.startswith("ppo_trxl.py: "), ran.stderr
    assert not (tmp_path / "runs").exists()
