"""scripts/plant_defects.py: its table fits the files of today, and a text that has changed is said to have."""

import runpy
import subprocess
import sys
import tomllib

import pytest
from _pytest.mark.expression import Expression

from helpers.files import ROOT

SCRIPT = ROOT / "scripts/plant_defects.py"


def test_the_table_fits():
    listed = subprocess.run([sys.executable, SCRIPT, "--list"], capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    assert len(listed.stdout.splitlines()) >= 54


def test_each_defect_has_tests():
    """Those that its row names are there still, and none of them is slow."""
    defects = tomllib.loads(SCRIPT.with_name("defects.toml").read_text())["defect"]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not slow"]
    files = sorted({defect["tests"] for defect in defects})
    listed = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for defect in defects:
        tests = [line.removeprefix(defect["tests"]) for line in listed if line.startswith(defect["tests"] + "::")]
        wanted = Expression.compile(defect["k"])
        matching = [
            test for test in tests if wanted.evaluate(lambda word, test=test, **_: word.lower() in test.lower())
        ]
        assert matching, defect["name"]


@pytest.mark.parametrize(
    ("text", "nth", "becomes"), [("a b", 0, "a c"), ("a b b", 2, "a b c"), ("a b b", 0, ""), ("a", 0, "")]
)
def test_a_defect_goes_where_its_text_is(tmp_path, text, nth, becomes):
    (tmp_path / "file.py").write_text(text)
    planted = runpy.run_path(str(SCRIPT))["planted"]
    defect = {"name": "it", "file": "file.py", "old": "b", "new": "c"} | ({"nth": nth} if nth else {})
    if becomes:
        assert planted(defect, ["file.py"], tmp_path) == ("file.py", becomes)
    else:
        with pytest.raises(ValueError, match=f"it: file.py has this text {text.count('b')} times, not once"):
            planted(defect, ["file.py"], tmp_path)
