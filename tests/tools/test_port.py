"""An edit of a parent reaches its children and theirs by three-way merge, in small git repositories."""

import subprocess

import pytest

from cleanrl_utils import port

LINEAGE = """\
[root]
[child]
parent = "root"
[grandchild]
parent = "child"
[sibling]
parent = "root"
[other]
"""
LINES = [f"line {i}\n" for i in range(30)]


def variant(**replaced):
    """The thirty lines of `root`, with some replaced: variant(_3="new") changes line 3."""
    return "".join(replaced.get(f"_{i}", line.strip()) + "\n" for i, line in enumerate(LINES))


TEXTS = {
    "root": variant(),
    "child": variant(_10="child"),
    "grandchild": variant(_10="child", _20="grandchild"),
    "sibling": variant(_5="sibling"),
    "other": variant(),
}


@pytest.fixture
def repo(tmp_path):
    (tmp_path / "cleanrl").mkdir()
    (tmp_path / "cleanrl/lineage.toml").write_text(LINEAGE)
    for name, text in TEXTS.items():
        (tmp_path / f"cleanrl/{name}.py").write_text(text)
    commit(tmp_path)
    return tmp_path


def commit(repo):
    me = ["-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*me, "commit", "-q", "-m", "state"]):
        subprocess.run(["git", *command], cwd=repo, check=True)


def write(repo, name, text):
    (repo / f"cleanrl/{name}.py").write_text(text)


def texts(repo):
    return {path.stem: path.read_text() for path in (repo / "cleanrl").glob("*.py")}


def run(repo, capsys, *argv):
    code = port.main(["--root", str(repo), *argv])
    return code, capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", ["root", "root.py", "cleanrl/root.py"])
def test_edit_reaches_children_and_grandchildren(repo, capsys, name):
    write(repo, "root", variant(_25="new"))
    code, lines = run(repo, capsys, name)
    assert code == 0
    assert lines == ["child: merged 2 lines", "grandchild: merged 2 lines", "sibling: merged 2 lines"]
    assert texts(repo) == {
        "root": variant(_25="new"),
        "child": variant(_10="child", _25="new"),
        "grandchild": variant(_10="child", _20="grandchild", _25="new"),
        "sibling": variant(_5="sibling", _25="new"),
        "other": TEXTS["other"],
    }
    code, lines = run(repo, capsys, name)  # a second time there is nothing left to do
    assert code == 0 and lines == ["child: unchanged", "grandchild: unchanged", "sibling: unchanged"]


def test_dry_run_writes_nothing(repo, capsys):
    write(repo, "root", variant(_25="new"))
    before = texts(repo)
    code, lines = run(repo, capsys, "root", "--dry-run")
    assert code == 0 and lines[0] == "child: merged 2 lines"
    assert texts(repo) == before


def test_conflict_is_written_and_stops_its_branch(repo, capsys):
    write(repo, "root", variant(_10="new"))
    code, lines = run(repo, capsys, "root")
    assert code == 1
    assert lines[0].startswith("child: CONFLICT") and lines[1:] == ["sibling: merged 2 lines"]
    after = texts(repo)
    assert (
        "<<<<<<< child.py\nchild\n||||||| root.py before (HEAD)\nline 10\n=======\nnew\n>>>>>>> root.py\n"
        in after["child"]
    )
    assert after["grandchild"] == TEXTS["grandchild"]
    assert after["sibling"] == variant(_5="sibling", _10="new")

    code, lines = run(repo, capsys, "root")  # markers are not merged over
    assert code == 1 and "earlier merge" in lines[0] and texts(repo) == after
    with pytest.raises(SystemExit) as exit:
        run(repo, capsys, "child")
    assert exit.value.code == 2 and "child.py has conflict markers" in capsys.readouterr().err

    write(repo, "child", variant(_10="new child"))  # resolved: the edit goes on from there
    assert run(repo, capsys, "child") == (0, ["grandchild: merged 2 lines"])
    assert texts(repo)["grandchild"] == variant(_10="new child", _20="grandchild")


def test_conflict_further_down(repo, capsys):
    write(repo, "root", variant(_20="new"))
    code, lines = run(repo, capsys, "root")
    assert code == 1 and lines[0] == "child: merged 2 lines" and lines[1].startswith("grandchild: CONFLICT")


def test_only_the_edit_of_the_named_parent_travels(repo, capsys):
    write(repo, "root", variant(_25="new"))
    write(repo, "child", variant(_10="child", _15="unfinished"))
    assert run(repo, capsys, "root")[0] == 0
    assert texts(repo)["child"] == variant(_10="child", _15="unfinished", _25="new")
    assert texts(repo)["grandchild"] == variant(_10="child", _20="grandchild", _25="new")


def test_base_revision(repo, capsys):
    write(repo, "root", variant(_25="new"))
    commit(repo)
    assert run(repo, capsys, "root")[1][0] == "child: unchanged"
    assert run(repo, capsys, "root", "--base", "HEAD~1")[1][0] == "child: merged 2 lines"
    assert texts(repo)["child"] == variant(_10="child", _25="new")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nothing"], "nothing is unknown in cleanrl/lineage.toml; the parents there are child, root"),
        (["other"], "other has no children in cleanrl/lineage.toml; the parents there are child, root"),
        (["root", "--base", "v0"], "no base to merge from; name one with --base"),
    ],
)
def test_wrong_usage(repo, capsys, argv, message):
    with pytest.raises(SystemExit) as exit:
        run(repo, capsys, *argv)
    assert exit.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[root]\n", '[root]\nparent = "grandchild"\n', "root descends from itself"),
        ("[other]\n", '[other]\n[missing]\nparent = "root"\n', "missing.py"),
    ],
)
def test_broken_lineage_writes_nothing(repo, capsys, old, new, message):
    (repo / "cleanrl/lineage.toml").write_text(LINEAGE.replace(old, new))
    write(repo, "root", variant(_25="new"))
    before = texts(repo)
    with pytest.raises(SystemExit) as exit:
        run(repo, capsys, "root")
    assert exit.value.code == 2 and message in capsys.readouterr().err
    assert texts(repo) == before
