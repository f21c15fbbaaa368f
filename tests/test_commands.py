"""Every command in the README, in CONTRIBUTING.md and in the pages is parsed by what it starts, some are executed."""

import json
import re
import subprocess
import tomllib

import pytest
from commands import CONSOLE, SHELL, Reader, blocks, check_text, pages, shell
from conftest import ROOT, require_program

PAGES = [str(page.relative_to(ROOT)) for page in pages()]
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
                wrong += [f"{page}:{number}: {command}\n    {reason}" for _, _, reason in found]
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


def test_other_blocks_are_what_they_say():
    readers = {"python": lambda text: compile(text, "block", "exec"), "toml": tomllib.loads, "json": json.loads}
    for page in PAGES:
        for block in blocks((ROOT / page).read_text(), page):
            if block.language in readers:
                try:
                    readers[block.language](block.text)
                except (SyntaxError, ValueError) as error:
                    pytest.fail(f"{page}:{block.line}: not {block.language}: {error}")


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
python a.py --x "one two" 'th$ree' fo\ ur   # the learner's machine
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
        (3, ["python", "a.py", "--x", "one two", "th$ree", "fo ur"], []),
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
