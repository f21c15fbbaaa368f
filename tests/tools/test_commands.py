"""Every command in the README, in CONTRIBUTING.md and in the pages is parsed by what it starts, some are executed.

Executed, in a temporary folder: runs of ppo.py and dqn.py, with fewer steps, and what the pages do with their folders;
commands of the benchmark runner, with --workers 0; and sessions of `python -i cleanrl/ppo.py`.
"""

import ast
import glob
import json
import re
import shutil
import subprocess
import tomllib
from textwrap import dedent

import pytest

from helpers import forks
from helpers.commands import CONSOLE, SHELL, Reader, blocks, check_text, pages, shell
from helpers.files import FILES, ROOT, require, require_for, require_program, script
from helpers.processes import fork_server, inspect_run, run_dir

PAGES = [str(page.relative_to(ROOT)) for page in pages()]
NOT_ALL = re.compile("arguments are required|refuses it: Required options")  # a command in the text may be a part
FIRST = r"(?:python|pip|make|uv run) "


@pytest.mark.parametrize("page", PAGES)
def test_commands(page):
    """Commands of blocks, and those in the text that are written out in full."""
    text, wrong = (ROOT / page).read_text(), []
    for block in blocks(text, page):
        if block.language not in SHELL + CONSOLE:
            continue
        if block.language == "" and re.match(FIRST, block.text):
            wrong.append(f"{page}:{block.line}: a block of commands needs its language: ```bash")
        for line, command, reason in check_text(shell(block)):
            wrong.append(f"{page}:{block.line + line - 1}: {command}\n    {reason}")
    history = page == "docs/log.md" or page.startswith("docs/decisions/")
    for number, line in enumerate(outside(text).splitlines() if not history else [], 1):
        for command in re.findall(rf"(?<!`)`({FIRST}[^`]+)`(?!`)", line):
            if not re.search(r"\.\.\.|…|<|\{", command):
                mention = re.fullmatch(r"python -m [\w.]+( [a-z]+)?", command)
                found = check_text(f"{command} --help" if mention else command)
                wrong += [f"{page}:{number}: {command}\n    {why}" for _, _, why in found if not NOT_ALL.search(why)]
    assert not wrong, "\n" + "\n".join(wrong)


def outside(text):
    """A page with its fenced blocks blanked; a command in backticks that goes on in the next line is on the first."""
    lines = text.splitlines()
    for block in blocks(text):
        end = block.line - 1 + block.text.count("\n")
        lines[block.line - 1 : end] = [""] * (end - block.line + 1)
    return "\n".join(lines)


def test_bash_reads_every_block():
    require_program("bash")
    for page in PAGES:
        for block in blocks((ROOT / page).read_text(), page):
            if block.language in SHELL + ("console",):
                done = subprocess.run(["bash", "-n"], input=shell(block), text=True, capture_output=True)
                assert done.returncode == 0, f"{page}:{block.line}: {done.stderr}"


def test_commands_in_files_and_suites():
    """The line "Run:" of a file, and the commands of the suites."""
    wrong = []
    for name in FILES:
        (command,) = re.findall(r"(?m)^Run: (.*)$", ast.get_docstring(ast.parse(script(name).read_text())))
        wrong += [(name, *found) for found in check_text(command, made=[f"{name}.py"])]
    for path in sorted((ROOT / "benchmark/suites").glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["run"]:
            wrong += [(path.name, *found) for command in entry["commands"] for found in check_text(command)]
    assert not wrong


def test_other_blocks_are_what_they_say():
    readers = {"python": lambda text: ast.parse(dedent(text)), "toml": tomllib.loads, "json": json.loads}
    readers["pycon"] = lambda text: [ast.parse(line) for line, _ in session(text)]
    for page in PAGES:
        for block in blocks((ROOT / page).read_text(), page):
            if block.language in readers:
                try:
                    readers[block.language](block.text)
                except (SyntaxError, ValueError) as error:
                    pytest.fail(f"{page}:{block.line}: not {block.language}: {error}")


def session(text):
    """What is typed at Python's prompt, and what it answers."""
    pairs = []
    for line in text.splitlines():
        if line.startswith(">>> "):
            pairs.append([line[4:], ""])
        elif pairs:
            pairs[-1][1] += line + "\n"
    return pairs


def test_a_session_in_the_interactive_shell(tmp_path):
    """What is shown of `python -i cleanrl/ppo.py` after 20480 steps is what there is, but for numbers with a point.

    After 1024 steps, that is: of the others only their own number is shown.
    """
    require_for("ppo")
    pairs = [(page, *pair) for page in PAGES for block in blocks((ROOT / page).read_text()) if block.language == "pycon"
             for pair in session(block.text)]  # fmt: skip
    after = f"result['answers'] = [repr(eval(line)) for line in {[line for _, line, _ in pairs]!r}]"
    answers = inspect_run(script("ppo"), "--total-timesteps", "1024", cwd=tmp_path, after=after)["answers"]
    assert "20480\n" in [shown for _, _, shown in pairs]
    for (page, line, shown), answer in zip(pairs, answers):
        shown = shown.replace("20480", "1024")
        shown, answer = (re.sub(r"\s*-?\d+\.\d+(e[-+]\d+)?", "x.x", text.strip()) for text in (shown, answer))
        assert not shown or answer == shown, f"{page}: {line}"


def test_imports_in_the_pages():
    """What a page imports from this repository is there."""
    for page in PAGES:
        for block in blocks((ROOT / page).read_text(), page):
            for node in ast.walk(ast.parse(dedent(block.text))) if block.language == "python" else ():
                if not isinstance(node, ast.ImportFrom) or node.module.split(".")[0] not in (
                    "cleanrl",
                    "cleanrl_utils",
                ):
                    continue
                path = ROOT / f"{node.module.replace('.', '/')}.py"
                assert path.is_file(), f"{page}:{block.line}: there is no {node.module}"
                for alias in node.names:
                    defined = re.search(rf"(?m)^(?:def|class) {alias.name}\b|^{alias.name} =", path.read_text())
                    assert defined, f"{page}:{block.line}: {node.module} has no {alias.name}"


def all_commands():
    """(page and line, words) of every command in a block of shell."""
    for page in PAGES:
        for block in blocks((ROOT / page).read_text(), page):
            if block.language in SHELL + CONSOLE:
                for line, words, _ in Reader(shell(block)):
                    yield f"{page}:{block.line + line - 1}", words


IN_A_FORK = """
import runpy, sys

what = sys.argv[0] = sys.argv.pop(1)
sys.path[0] = "{root}"
runpy.run_path(what, run_name="__main__") if what.endswith(".py") else runpy.run_module(what, run_name="__main__")
"""


def execute(what, arguments, cwd, where="", codes=(0,)):
    """Run a tool of ours, or a script, to its end in a fork that has torch imported; returns what it has printed."""
    code = IN_A_FORK.replace("{root}", str(ROOT))
    process = forks.Fork(fork_server("torch"), ["-c", what, *arguments], cwd, code)
    try:
        stdout, stderr = process.communicate(timeout=300)
    finally:
        process.kill()
    command = f"{where}: {what} {' '.join(arguments)}"
    assert process.returncode in codes, f"{command}: exit code {process.returncode}\n{stdout[-2000:]}{stderr[-2000:]}"
    return stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone, as far as commands see it, with the two run folders that the pages name."""
    require_for("ppo")
    clone = tmp_path_factory.mktemp("clone")
    for name in ("benchmark", "cleanrl", "cleanrl_utils"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    (clone / "sleep5.py").write_text("")
    (clone.parent / "change").symlink_to(clone)  # the worktree of CONTRIBUTING.md
    for name in ("ppo", "dqn"):
        where = tmp_path_factory.mktemp("run")
        execute(str(script(name)), [*FEWER[name], "--save-model"], where)
        (clone / "runs").mkdir(exist_ok=True)
        run_dir(where).rename(clone / f"runs/CartPole-v1__{name}__1__1700000000")
    return clone


FEWER = {
    "ppo": ["--total-timesteps", "1024"],
    "dqn": ["--total-timesteps", "600", "--learning-starts", "100", "--buffer-size", "500"],
}
EXAMPLE = r"runs/CartPole-v1__(ppo|dqn)__1__1700000000"


def test_benchmarks_print_what_they_would_run(clone):
    found = 0
    for where, words in all_commands():
        if words[:3] == ["python", "-m", "cleanrl_utils.benchmark"]:
            assert execute(words[2], [*words[3:], "--workers", "0"], clone, where).strip(), where
            found += 1
    assert found > 5


def test_runs_and_what_is_done_with_them(clone):
    """As printed, with fewer steps; a command that differs only in those is executed once."""
    commands = {}
    for where, words in all_commands():
        words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
        text = " ".join(words)
        program = re.match(rf"python (?:cleanrl|{EXAMPLE})/(ppo|dqn)\.py\b(?!.*(--track|--help|--upload-model))", text)
        tool = re.match(r"python -m (cleanrl_utils\.(?:evaluate|reproduce|runs\.card|report)|benchmark\.record) ", text)
        if program and not re.search(r"--env-id (?!CartPole|Acrobot)", text):
            name = program[1] or program[2]
            words = [word for word in cut(words[2:], "--total-timesteps") if word != "--capture-video"]
            more = FEWER[name] if "--resume" not in words else ["--total-timesteps", "1536"] if name == "ppo" else []
            commands[tuple([name, *words, *more])] = where
        elif tool and "--commit" not in words and re.search(rf"{EXAMPLE}|RUN_A|__ppo__\*|report runs\b", text):
            words = [re.sub("RUN_[AB]", "runs/CartPole-v1__ppo__1__1700000000", word) for word in words[3:]]
            words = [path for word in words for path in glob.glob(word, root_dir=clone) or [word]]
            words = [word for word in cut(words, "--steps") if word != "--capture-video"]
            commands[tuple([tool[1], *words])] = where
    for (name, *arguments), where in sorted(
        commands.items(), key=lambda item: "latest" in item[0]
    ):  # not yet the first
        execute(f"cleanrl/{name}.py" if name in FEWER else name, arguments, clone, where)
    assert {"ppo", "dqn", "cleanrl_utils.evaluate", "cleanrl_utils.reproduce"} <= {name for name, *_ in commands}


def test_the_readme_alone(tmp_path):
    """What a stranger does with the README, in its order: train, evaluate, resume, two algorithms, figure, compare.

    With fewer steps and three seeds; packages are there, and nothing is looked at.
    """
    require_for("ppo")
    require("matplotlib")
    (tmp_path / "cleanrl").symlink_to(ROOT / "cleanrl")
    done = []
    for where, words in all_commands():
        what = " ".join(words[:3] if words[:2] == ["python", "-m"] else words[:2]).removeprefix("python ")
        if not where.startswith("README.md") or "--track" in words or re.search("Hopper|Cheetah|NoFrame", str(words)):
            continue
        for steps, fewer in (("50000", "512"), ("100000", "1024"), ("1000000", "2048")):
            words = [re.sub(rf"\b{steps}\b", fewer, word) for word in words]
        words = ["3" if before == "--num-seeds" else word for before, word in zip(["", *words], words)]
        if what == "make train":
            done.append(what)
            execute("cleanrl/ppo.py", ["--save-model", "--total-timesteps", "1536"], tmp_path, where)
        elif what == "cleanrl/ppo.py":
            done.append("resume" if "--resume" in words else what)
            execute(what, words[2:], tmp_path, where)
        elif re.fullmatch("-m cleanrl_utils.(evaluate|benchmark|report|compare)", what):
            done.append(what.split(".")[1])
            said = execute(what[3:], words[3:], tmp_path, where, codes=(0, 1) if "compare" in what else (0,))
            assert "compare" not in what or re.search(r"\| CartPole-v1 \|.*\| 3 / 3 \|", said), said
    order = ["make train", "evaluate", "resume", "cleanrl/ppo.py", "benchmark", "benchmark", "report", "compare"]
    assert done == order and (tmp_path / "curves.png").stat().st_size > 10_000
    (row,) = re.findall(r"(?m)^\| CartPole.*", (tmp_path / "scores.md").read_text())
    assert re.fullmatch(r"\| CartPole-v1 \| .*\[.*\] \| .*\[.*\] \|", row), row


def cut(words, option):
    """Without an option and its value."""
    return words[: words.index(option)] + words[words.index(option) + 2 :] if option in words else words


@pytest.mark.parametrize(
    "command, reason",
    [
        ("python cleanrl/ppo.py --totl-timesteps 5", "totl-timesteps"),
        ("python cleanrl/ppo.py --seed one", "ppo.py refuses it"),
        ("WANDB_MODE=offline nice -n 10 python -i cleanrl/ppo.py --sed 1", "--sed"),
        ("python cleanrl/pppo.py", "cleanrl/pppo.py does not exist"),
        ("python ppo.py", "ppo.py does not exist"),
        ("python -j cleanrl/ppo.py", "no option -j"),
        ("python -m cleanrl_utils.evaluat RUN", "no tool cleanrl_utils.evaluat"),
        ("python -m cleanrl_utils.evaluate RUN --episode-count 3", "unrecognized arguments: --episode-count"),
        ("python -m cleanrl_utils.hub publish RUN", "invalid choice: 'publish'"),
        ('python -m cleanrl_utils.benchmark --env-ids A --command "python cleanrl/dqn.py --no-gpu"', "--no-gpu"),
        ("python -m benchmark.record runs/x", "--output"),
        ("python -m nosuchmodule", "no module nosuchmodule"),
        ("python -c 'print('", "never closed"),
        ("torchrun --nprocs 2 cleanrl/ppo_atari_multigpu.py", "nprocs"),
        ("torchrun --standalone --nproc-per-node 2 cleanrl/ppo_atari_multigpu.py --num-env 3", "--num-env"),
        ("uv run cleanrl/ppo.py --enviroment x", "--enviroment"),
        ('pip install -e ".[atary]"', "no extra atary"),
        ("pip install -r requirements/requirements-mujoco_py.txt", "requirements-mujoco_py.txt does not exist"),
        ("pip install 'gymnasium>>1'", "cannot read"),
        ("make tests", "make of what?"),
        ('make train ARGS="--sed 2"', "--sed"),
        ("make train ARG=1", "no variable ARG"),
        ("pytest -m fast", "no marker fast"),
        ('pytest -k "a and"', "not an expression"),
        ("pytest tests/test_nothing.py", "tests/test_nothing.py does not exist"),
        ("git difff a b", "git difff"),
        ("poetry run python cleanrl/ppo.py", "poetry is not known"),
        ("ls && poetry shell | cat", "poetry is not known"),
        ("for seed in 1 2; do python cleanrl/ppo.py --seed $seed --x; done", "--x"),
        ("echo $(poetry shell)", "poetry is not known"),
        ("docker run --rm cleanrl python cleanrl/ppo.py --x 1", "--x"),
        ("bash -c 'ls && poetry shell'", "poetry is not known"),
        ("bash nothing.sh", "nothing.sh does not exist"),
        ("./nothing.sh 1", "./nothing.sh does not exist"),
        ('ray exec cloud/ray.yaml "poetry shell" --tmux', "poetry is not known"),
        ("python cleanrl/ppo.py --env-id proof_of_memory:ProofofMemory-v0", "PYTHONPATH"),
        ("PYTHONPATH=tests/helpers python cleanrl/ppo.py --env-id nowhere:Env-v0", "no module nowhere"),
        ("cat docs/nothing.md", "docs/nothing.md does not exist"),
        ("python cleanrl/ppo.py \\\n    --seed 1 \\\n    --nothing 1", "--nothing"),
        ("echo 'never ends", "cannot be read"),
    ],
)
def test_a_wrong_command_is_found(command, reason):
    (found,) = check_text(command)
    assert reason in found[2], found


def test_commands_are_read_as_a_shell_reads_them():
    text = r"""
# a comment that isn't one command
python a.py --x "one two" 'th$ree' se\ ven   # the learner's machine
A=1 B="2 3" python b.py \
    --y=$(seq 3) > out.txt 2>&1 && echo page#anchor; ls | wc -l &
for s in 7 8; do
    python c.py --seed $s ${HERE}
done
cat > d.py << 'EOF'
import this; "
EOF
"""
    assert [(line, words, written) for line, words, written in Reader(text.replace("\\\\", "\\"))] == [
        (3, ["python", "a.py", "--x", "one two", "th$ree", "se ven"], []),
        (4, ["A=1", "B=2 3", "python", "b.py", "--y=1"], ["out.txt"]),
        (5, ["echo", "page#anchor"], []),
        (5, ["ls"], []),
        (5, ["wc", "-l"], []),
        (7, ["python", "c.py", "--seed", "7", "1"], []),
        (9, ["cat"], ["d.py"]),
    ]


def test_blocks_of_a_page():
    text = """
1. In a list:

    ```bash title="x"
    python a.py \\
        --x
    ```

``` { .console .copy }
$ ls
README.md
$ cat \\
> README.md
```

````markdown
```bash
not a command
```
````
"""
    found = blocks(text.replace("\\\\", "\\"), "page")
    assert [(block.line, block.language) for block in found] == [(5, "bash"), (10, "console"), (17, "markdown")]
    assert found[0].text == "python a.py \\\n    --x\n"
    assert shell(found[1]) == "ls\n\ncat \\\nREADME.md\n"
