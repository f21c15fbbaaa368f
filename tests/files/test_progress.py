"""What a person at the keyboard sees of a run: on a terminal a line that fits it, in a log a line for each per cent."""

import re
import sys

import pytest

from helpers.files import each_text, posix, require_for, script, smoke, smoke_total
from helpers.processes import environment, run

BLOCKS = each_text("Run")  # one file of each backend


@BLOCKS
def test_lines_of_a_log(name, tmp_path):
    require_for(name)
    lines = run(script(name), *smoke(name), cwd=tmp_path).stdout.splitlines()
    progress = [line for line in lines if "SPS" in line]
    assert 2 <= len(progress) <= 101
    assert lines == [line.rstrip() for line in lines], "blanks at the end of a line"
    total = smoke_total(name)
    assert re.match(rf"100 %  step {total}/{total}  SPS \d+  return [-\d.]+  left 0:00:00$", progress[-1])


@posix
@BLOCKS
@pytest.mark.parametrize("columns", [80, 40])
def test_the_bar_fits_the_terminal(name, columns, tmp_path):
    import pexpect

    require_for(name)
    command = [str(script(name)), *smoke(name, total_timesteps=2 * smoke_total(name))]
    options = {
        "cwd": str(tmp_path),
        "env": environment(TERM="xterm", COLUMNS=None),
        "encoding": "utf-8",
        "dimensions": (24, columns),
    }
    child = pexpect.spawn(sys.executable, command, timeout=120, **options)
    child.expect(pexpect.EOF)
    drawn = [line for line in re.split(r"[\r\n]+", child.before) if "step" in line]
    assert len(drawn) >= 2 and all(len(line) < columns for line in drawn)
    total = 2 * smoke_total(name)
    assert f"step {total}/{total}" in drawn[-1], "the last line is not of the last step"
    if columns >= 80:
        assert re.match(r"\[#+\] ", drawn[-1]), "the bar is not full"


@BLOCKS
def test_help_has_what_the_file_is_and_two_groups(name, tmp_path):
    require_for(name)
    text = run(script(name), "--help", cwd=tmp_path).stdout
    about = script(name).read_text().split('"""')[1].split("\n")[0]
    words = re.sub(r"\s+", " ", text)
    assert " ".join(about.split()[:6]) in words
    algorithm, run_options = text.index("algorithm options"), text.index("run options")
    assert algorithm < text.index("--total-timesteps") < run_options < text.index("--exp-name")
    assert not (tmp_path / "runs").exists()
