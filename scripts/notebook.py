"""Make docs/notebooks/ppo.ipynb from cleanrl/ppo.py: python scripts/notebook.py [--check]

The notebook is the text of the file, cut into cells at its definitions and at the headings of its main block, with
words in between. What differs: flags are set in a cell, not read from a command line, and the cells write the script
that a run keeps a copy of. --check says whether the notebook is up to date, and writes nothing.

Exit codes: 0 it is up to date, or has been written; 1 with --check: it is stale.
"""

import argparse
import ast
import json
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "docs/notebooks/ppo.ipynb"
MARK, MAIN = "# What a run needs besides its algorithm", 'if __name__ == "__main__":'

INTRODUCTION = """# PPO, cell by cell

{about}

This is the text of `cleanrl/ppo.py` in CleanRL, cut into cells: flags, environments, networks, equations, then the
training. Run them in order, change what you like and run on from there: all variables are those of the file. It trains
on CartPole-v1, on a CPU or a GPU."""

SCRIPT = '''import ast

__file__ = "ppo_notebook.py"  # runs are named after it


def write_script(cells):
    """The imports and definitions of these cells as a script; of those of the same name, the last."""
    parts = {}
    for cell in cells:
        lines = [line for line in cell.split("\\n") if not line.startswith(("%", "!"))]
        for node in ast.parse("\\n".join(lines)).body:
            if isinstance(node, (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)):
                first = min(part.lineno for part in [node, *getattr(node, "decorator_list", [])])
                name = getattr(node, "name", lines[first - 1])
                parts[name] = "\\n".join(lines[first - 1 : node.end_lineno])
    parts.pop("write_script", None)
    Path(__file__).write_text('"""PPO, from a notebook."""\\n\\n' + "\\n\\n\\n".join(parts.values()) + "\\n")'''

FLAGS = """args = Args(
    env_id="CartPole-v1",
    total_timesteps=50_000,
    seed=1,
    save_model=True,  # evaluate what has been learned, at the end
)
write_script(globals().get("In", [])[:-1])  # In: the cells that have run"""

LOOK = """print("rollouts", obs.shape, rewards.shape, values.shape, advantages.shape)
print("the batch on the device", b_obs.shape, b_returns.shape)
print("all weights", weights.shape, "and the norm of their gradient", weights.grad.norm())
print("values of the first observations", agent.get_value(b_obs[:3]))
print("mean return of the last episodes", np.mean(run.recent_returns))"""

CURVES = """%load_ext tensorboard
%tensorboard --logdir runs"""

WORDS = {  # before a cell
    "install": "## Install\n\nWhat the file declares in its header. In Colab it may ask for a restart of the session.",
    "imports": "## Imports",
    "Args": "## Flags\n\nOn the command line these are `--env-id`, `--total-timesteps` and so on.",
    "make_env": "## Environments",
    "layer_init": "## Networks\n\nAn actor and a critic that share nothing.",
    "load_policy": "The saved actor as a function from observations to actions, for the evaluation at the end.",
    "gae": "## Equations\n\nGeneralised advantages, from the last step back:",
    "ppo_loss": "The loss of a minibatch:",
    "block": "## What a run needs besides its algorithm\n\nThe folder of a run with metrics, checkpoints and progress."
    " Run this cell; reading it can wait.",
    "script": "A run keeps a copy of its script, so that it can be evaluated and repeated. A notebook has none: this"
    " writes one from the cells that have run, your changes included.",
    "flags": "## The run\n\nSet any flag here.",
    "Seeding": "## Seeding",
    "Environments, agent and optimizer": "## Environments, agent and optimizer",
    "Storage": "## Storage\n\nArrays for a rollout, and the three functions that work on them.",
    "Training loop": "## Training loop\n\nOne iteration is a rollout, its targets, and some epochs of gradient steps."
    " Interrupt it when you like: everything is still there. To start afresh, go back to"
    " *The run* and set the flags.",
    "look": "## Look around",
    "Save and close": "## Save and evaluate\n\nThe weights go into the run's folder, and play ten episodes on seeds"
    " that training has not seen.",
    "curves": "## Curves\n\nTensorBoard in the notebook. In a shell it is `tensorboard --logdir runs`.",
}


def formulas(page):
    """The formulas of a page, as a notebook writes them."""
    found = re.findall(r"(?m)^```math\n((?:.*\n)*?)```$", page.read_text(encoding="utf-8"))
    return [f"$$\n{tex}$$" for tex in found]


def cells(source, equations):
    """(kind, text) of each cell."""
    lines, tree = source.split("\n"), ast.parse(source)
    loss, advantages = equations
    packages = re.search(r"(?s)# dependencies = \[(.*?)\]\n# ///", source)[1]
    packages = " ".join(f'"{name}"' for name in re.findall(r'"([^"]+)"', packages))
    words = WORDS | {"gae": f"{WORDS['gae']}\n\n{advantages}", "ppo_loss": f"{WORDS['ppo_loss']}\n\n{loss}"}

    def cell(name, text):
        return ([("markdown", words[name])] if name in words else []) + [("code", text.strip("\n"))]

    yield "markdown", INTRODUCTION.format(about=ast.get_docstring(tree).split("\n\nRun:")[0].replace("\n1.", "\n\n1."))
    yield from cell("install", f"%pip install -q {packages}")
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    yield from cell("imports", "\n".join(lines[imports[0].lineno - 1 : imports[-1].end_lineno]))
    yield from cell("script", SCRIPT)
    before, block = source[: source.index(MAIN)].split(MARK)
    marked = before.count("\n")
    starts = {}  # first lines of definitions, and what begins there
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.lineno <= marked:
            starts[min(part.lineno for part in [node, *node.decorator_list])] = node.name
    ends = [*list(starts)[1:], marked + 1]
    for (first, name), end in zip(starts.items(), ends):
        yield from cell(name, "\n".join(lines[first - 1 : end - 1]))
    yield from cell("block", MARK + block)
    yield from cell("flags", FLAGS)
    main = textwrap.dedent(source[source.index(MAIN) + len(MAIN) :])
    for part in re.split(r"(?m)\n(?=^# )", main):
        heading = part.split("\n")[0].removeprefix("# ").split(":")[0]
        if heading == "Save and close":
            yield from cell("look", LOOK)
        if part.strip():
            yield from cell(heading, part.replace("args = parse_args()\n", ""))
    yield from cell("curves", CURVES)


def notebook(root=ROOT):
    """The notebook, as text."""
    source = (root / "cleanrl/ppo.py").read_text(encoding="utf-8")
    entries = []
    for number, (kind, text) in enumerate(cells(source, formulas(root / "docs/rl-algorithms/ppo.md")[:2])):
        entry = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
        entries.append(entry | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": entries, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def main(argv=None):
    style = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(**style)
    parser.add_argument("--check", action="store_true", help="only say whether the notebook is up to date")
    options, text, name = parser.parse_args(argv), notebook(), NOTEBOOK.relative_to(ROOT).as_posix()
    if not options.check:
        NOTEBOOK.write_text(text, encoding="utf-8", newline="\n")
        print(f"{name}: written")
    elif not NOTEBOOK.exists() or NOTEBOOK.read_text(encoding="utf-8") != text:
        print(f"{name}: stale: run python scripts/notebook.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
