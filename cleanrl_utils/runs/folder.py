"""Which run folder is meant, and what stands in it besides its events: flags, script and command line."""

import ast
import json
import os
import shlex
from pathlib import Path, PureWindowsPath

from cleanrl_utils import fail


def find_runs(root="runs"):
    """The run folders at or below a folder; what is in one of them is no other run."""
    found = []
    for folder, names, files in os.walk(root):
        if "args.json" in files:
            found.append(Path(folder))
            names.clear()
    return found


def newest_run(root="runs"):
    """The run that was begun or resumed last, of those below a folder."""
    runs = find_runs(root)
    if not runs:
        raise ValueError(f"latest is the newest run in {root}/, and there is none: name a run folder")
    return max(runs, key=lambda folder: ((folder / "args.json").stat().st_mtime_ns, folder.name))


def run_folder(name):
    """The run folder that a word of a command line names: a path, or `latest` for the newest in runs/."""
    if str(name) != "latest":
        return Path(name)
    try:
        return newest_run()
    except ValueError as error:
        fail(error)


def load_args(run_dir):
    try:
        args = json.loads(Path(run_dir, "args.json").read_text())
    except ValueError:
        args = None
    if not isinstance(args, dict) or not {"env_id", "exp_name", "seed"} <= args.keys():
        fail(f"{run_dir}: args.json does not hold the flags of a run")
    return args


def script_of(run_dir):
    scripts = list(Path(run_dir).glob("*.py"))
    if len(scripts) != 1:
        fail(f"{run_dir} should hold one script, the copy that a run makes, and holds {len(scripts)}")
    return scripts[0]


def script_flags(script):
    """The flags of a script and their types, from the text of its class Args: {"learning_rate": "float"}."""
    for node in ast.parse(Path(script).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            return {field.target.id: ast.unparse(field.annotation) for field in fields}
    return {}


def arguments(run_dir):
    """The command line of a run after the name of its script, as it began; from args.json if it was run otherwise."""
    script, file = script_of(run_dir), Path(run_dir, "command.txt")
    try:
        command = shlex.split(file.read_text().splitlines()[0])
    except (OSError, IndexError, ValueError):
        command = []
    for i, word in enumerate(command):
        if PureWindowsPath(word).name == script.name or word == f"cleanrl.{script.stem}":
            return command[i + 1 :]
    words = []
    for name, value in load_args(run_dir).items():
        if isinstance(value, bool):
            words.append(("--" if value else "--no-") + name.replace("_", "-"))
        elif value is not None and value != "":
            words += ["--" + name.replace("_", "-"), *map(str, value if isinstance(value, list) else [value])]
    return words
