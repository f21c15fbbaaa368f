"""What is installed, under which names, and how commands call themselves."""

import ast
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from helpers.files import ROOT, imports, require
from helpers.processes import environment, run_module

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMMANDS = [
    path
    for folder in ("cleanrl_utils", "benchmark")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if re.search(r"ArgumentParser\(|tyro\.cli\(", path.read_text())
]


@pytest.mark.parametrize("path", COMMANDS, ids=[str(path.relative_to(ROOT)) for path in COMMANDS])
def test_usage_lines(path):
    """A command of a package calls itself what was typed: python -m cleanrl_utils.compare, not compare.py."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    makers = [call for call in calls if ast.unparse(call.func) in ("argparse.ArgumentParser", "tyro.cli")]
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    named = [word.value.value for call in makers for word in call.keywords if word.arg == "prog"]
    assert named == [f"python -m {module}"] * len(makers)


def test_every_tool_answers():
    """What is at the top of cleanrl_utils is a command, or says which one is; none ends in silence."""
    for path in set((ROOT / "cleanrl_utils").glob("*.py")) - {ROOT / "cleanrl_utils/__init__.py"}:
        assert path in COMMANDS or '__name__ == "__main__":\n    fail(' in path.read_text(), path.name
    require("optuna")
    assert "python -m cleanrl_utils.tune --help" in run_module("cleanrl_utils.tuner", "--help", cwd=ROOT, code=2).stderr


def packages():
    require("setuptools")
    from setuptools import find_namespace_packages

    return find_namespace_packages(str(ROOT), include=PROJECT["tool"]["setuptools"]["packages"]["find"]["include"])


def test_names_that_are_installed():
    """Nothing that another project may be called, and nothing that needs what stays in a clone."""
    names = packages()
    assert {name.split(".")[0] for name in names} == {"cleanrl", "cleanrl_utils"}
    folders = {path.parent for top in ("cleanrl", "cleanrl_utils") for path in (ROOT / top).rglob("*.py")}
    assert {str(folder.relative_to(ROOT)).replace("/", ".") for folder in folders} <= set(names)
    for name in names:
        for path in (ROOT / name.replace(".", "/")).glob("*.py"):
            assert not imports(path.read_text()) & {"benchmark", "tests"}, path


def test_tools_without_a_clone(tmp_path):
    """They start, and published scores are none where benchmark/ is not."""
    for name in {name.split(".")[0] for name in packages()}:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    env = environment(PYTHONPATH=str(tmp_path))
    for tool in "rlops", "compare", "report":
        done = run_module(f"cleanrl_utils.{tool}", "--help", cwd=tmp_path, env=env)
        assert done.stdout.startswith(f"usage: python -m cleanrl_utils.{tool} ")
    (tmp_path / "ask.py").write_text("from cleanrl_utils.runs import results\nprint(results.__file__)\n")
    with (tmp_path / "ask.py").open("a") as file:
        file.write("print(results.references('ppo.py', 'CartPole-v1'))\n")
    path, found = run_module("ask", cwd=tmp_path, env=env).stdout.splitlines()
    assert Path(path).is_relative_to(tmp_path) and found == "[]"
