"""The README and the pages name every file as it is."""

import re
import shlex
import sys
import tomllib

from cleanrl_utils import report
from helpers.files import LINEAGE, ROOT, default, each, require


@each()
def test_the_row_of_a_file(name):
    """Its environment is the default, its parent that of the lineage, and its page exists and names it."""
    overview = (ROOT / "docs/rl-algorithms/overview.md").read_text()
    (row,) = re.findall(rf"(?m)^\| \[`{name}\.py`\]\(../../cleanrl/{name}\.py\) \|.*\[page\].*$", overview)
    *_, environments, parent, page, _ = (cell.strip() for cell in row.split("|"))
    assert parent == (f"`{LINEAGE[name]['parent']}.py`" if "parent" in LINEAGE[name] else "")
    assert environments.endswith(f": {default(name, 'env_id')}")
    (path,) = re.findall(r"\(([\w-]+\.md)\)", page)
    assert f"`{name}.py`" in (ROOT / "docs/rl-algorithms" / path).read_text()
    assert f"[`{name}.py`](cleanrl/{name}.py)" in (ROOT / "README.md").read_text()


def test_extras():
    """Every extra is in the commands and in the table of the page on installation; a requirements file is its extra."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs/get-started/installation.md").read_text()
    table = re.search(r"(?s)\| Extra \| For \|\n(.*?)\n\n", page)[1]
    named = [name for row in table.splitlines()[1:] for name in re.findall(r"`([\w-]+)`", row.split("|")[1])]
    assert sorted(named) == sorted(extras)
    for extra in extras:
        assert re.search(rf"[\[,]{extra}[\],]|\b{extra} is the same", page), f"installation.md does not install {extra}"
    for path in (ROOT / "requirements").glob("requirements-*.txt"):
        extra = path.stem.removeprefix("requirements-").replace("_", "-")
        assert extra in extras and path.read_text() == f"-e .[{extra}]\n"
        assert f"`{extra}`" in page or path.name in page, f"installation.md does not name {path.name}"
    for name in "memory_gym", "dm_control", "optuna":
        assert (ROOT / f"requirements/requirements-{name}.txt").is_file(), "as the original has it"
    assert (ROOT / "requirements/requirements.txt").read_text() == "-e .\n"


@each()
def test_every_file_has_an_example(name):
    page = (ROOT / "docs/get-started/examples.md").read_text()
    assert re.search(rf"(?m)^(?:python|   ) cleanrl/{name}\.py ", page)


def test_first_screen():
    """The idea, a picture, the diff and the first command come first, and the page stays short."""
    lines = (ROOT / "README.md").read_text().splitlines()
    (path, *_) = [match[1] for line in lines[:10] if (match := re.match(r"!\[.+\]\((.+)\)$", line))]
    assert (ROOT / path).stat().st_size < 500_000
    assert lines.index("```diff") < 25 and lines.index("```bash") < 50
    text = re.sub("(?s)<!-- files -->.*<!-- /files -->", "", "\n".join(lines))
    assert len(text.splitlines()) < 200 and len(text.split()) < 1300


def test_the_picture_is_of_the_records(tmp_path, monkeypatch, capsys):
    """What its caption says of runs, seeds and ends is what the command of docs/report.md says of them now."""
    require("matplotlib")
    page = (ROOT / "docs/report.md").read_text()
    block = re.search(r"(?s)### The picture of the README\n\n```bash\n(.*?)```", page)[1]
    words = shlex.split(block.replace("\\\n", " "))[3:]
    picture = ROOT / words[words.index("--figure") + 1]
    words[words.index("--figure") + 1] = str(tmp_path / "again.svg")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["report", *words])
    report.main()
    caption = capsys.readouterr().out.split("Caption:\n  ")[1].strip()
    assert caption.encode() in picture.read_bytes(), "make it anew"
