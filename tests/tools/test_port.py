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
    merged = [f"{name}: merged 2 lines" for name in ("child", "grandchild", "sibling")]
    assert lines == [*merged, "3 merged, 0 unchanged, 0 in conflict, 0 not reached"]
    assert texts(repo) == {
        "root": variant(_25="new"),
        "child": variant(_10="child", _25="new"),
        "grandchild": variant(_10="child", _20="grandchild", _25="new"),
        "sibling": variant(_5="sibling", _25="new"),
        "other": TEXTS["other"],
    }
    code, lines = run(repo, capsys, name)  # a second time there is nothing left to do
    assert code == 0 and lines[:3] == ["child: unchanged", "grandchild: unchanged", "sibling: unchanged"]


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
    assert lines == [
        "sibling: merged 2 lines",
        "child: CONFLICT: both changed line 11; "
        "resolve the markers in child.py, then: python -m cleanrl_utils.port child",
        "grandchild: NOT REACHED: below child",
        "1 merged, 0 unchanged, 1 in conflict, 1 not reached",
    ]
    after = texts(repo)
    assert (
        "<<<<<<< child.py\nchild\n||||||| root.py before (HEAD)\nline 10\n=======\nnew\n>>>>>>> root.py\n"
        in after["child"]
    )
    assert after["grandchild"] == TEXTS["grandchild"]
    assert after["sibling"] == variant(_5="sibling", _10="new")

    code, lines = run(repo, capsys, "root")  # markers are not merged over
    assert code == 1 and texts(repo) == after
    assert lines[0] == "sibling: unchanged" and "earlier merge" in lines[1]
    assert lines[2:] == ["grandchild: NOT REACHED: below child", "0 merged, 1 unchanged, 1 in conflict, 1 not reached"]
    with pytest.raises(SystemExit) as exit:
        run(repo, capsys, "child")
    assert exit.value.code == 2 and "child.py has conflict markers" in capsys.readouterr().err

    write(repo, "child", variant(_10="new child"))  # resolved: the edit goes on from there
    code, lines = run(repo, capsys, "child")
    assert code == 0 and lines[0] == "grandchild: merged 2 lines"
    assert texts(repo)["grandchild"] == variant(_10="new child", _20="grandchild")


def test_conflict_further_down(repo, capsys):
    write(repo, "root", variant(_20="new"))
    code, lines = run(repo, capsys, "root")
    assert code == 1 and lines[:2] == ["child: merged 2 lines", "sibling: merged 2 lines"]
    assert lines[2] == "grandchild: CONFLICT: both changed line 21; resolve the markers in grandchild.py"


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


ROOT = '''\
"""A root."""

import json
import os

import torch


@dataclass
class Args:
    seed: int = 1  # random seed
    cuda: bool = True  # use the GPU
    track: bool = False  # mirror the run

    gamma: float = 0.99  # discount


def fail(message):
    sys.exit(message)


@torch.no_grad()
def graph(function):
    return function


def evaluate(policy):
    return policy


if __name__ == "__main__":
    print(fail, evaluate)
'''
NEIGHBOURS = [  # of what is edited below: the child deletes, adds or changes them
    ("import os\n", "import os\nimport sys\n"),
    ("import torch\n", "import jax\n"),
    ("    cuda: bool = True  # use the GPU\n", ""),
    ("discount\n", "discount\n    tau: float = 1.0  # rate\n"),
    ("@torch.no_grad()\ndef graph(function):\n    return function\n\n\n", ""),
    ("def evaluate", "def sample(x):\n    return x\n\n\ndef evaluate"),
]


@pytest.fixture
def family(repo):
    child = ROOT
    for old, new in NEIGHBOURS:
        assert old in child
        child = child.replace(old, new)
    (repo / "cleanrl/sibling.py").unlink()
    (repo / "cleanrl/lineage.toml").write_text(LINEAGE.replace('[sibling]\nparent = "root"\n', ""))
    for name, text in {"root": ROOT, "child": child, "grandchild": child.replace("A root", "A grandchild")}.items():
        write(repo, name, text)
    commit(repo)
    return repo


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import os\n", "import os\nimport re\n"),
        ("import json\nimport os\n", "import json\n"),
        ("seed: int = 1  # random seed\n", "env: str = ''  # environment\n    seed: int = 1  # random seed\n"),
        ("    seed: int = 1  # random seed\n", ""),
        ("    track", "    quiet: bool = False  # no bar\n    track"),
        ("    track: bool = False  # mirror the run\n", "    track: bool = True  # mirror it\n"),
        ("    gamma", "    env_id: str = ''  # environment\n    gamma"),
        ("discount\n", "discount\n    last: int = 1  # last\n"),
        ("    sys.exit(message)\n", "    print(message)\n    sys.exit(2)\n"),
        ("def fail", "def first(x):\n    return x\n\n\ndef fail"),
        ("    sys.exit(message)\n", "    sys.exit(message)\n\n\ndef second(x):\n    return x\n"),
        ("def evaluate(policy):\n    return policy\n\n\n", ""),
    ],
)
def test_neighbours_of_what_has_a_name_make_no_conflict(family, capsys, old, new):
    child = texts(family)["child"]
    write(family, "root", ROOT.replace(old, new))
    code, lines = run(family, capsys, "root")
    assert code == 0 and lines[-1] == "2 merged, 0 unchanged, 0 in conflict, 0 not reached"
    after = texts(family)
    assert after["child"] == child.replace(old, new) != child
    assert after["grandchild"] == after["child"].replace("A root", "A grandchild")


def test_what_a_child_lacks_is_named(family, capsys):
    before = texts(family)
    write(family, "root", ROOT.replace("    return function\n", "    return function()\n").replace("use the", "use a"))
    code, lines = run(family, capsys, "root")
    assert code == 0 and lines[:2] == ["child: unchanged: has no Args.cuda, graph", "grandchild: unchanged"]
    assert texts(family) | {"root": ROOT} == before


def test_a_new_name_of_what_a_child_lacks_conflicts(family, capsys):
    write(family, "root", ROOT.replace("def graph", "def capture"))
    assert run(family, capsys, "root")[1][0].startswith("child: CONFLICT")


def test_a_definition_of_its_own_conflicts(family, capsys):
    write(family, "child", texts(family)["child"].replace("sys.exit(message)", "sys.exit(3)"))
    write(family, "root", ROOT.replace("sys.exit(message)", "sys.exit(2)"))
    code, lines = run(family, capsys, "root")
    assert code == 1 and lines[0].startswith("child: CONFLICT") and "NOT REACHED" in lines[1]


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
