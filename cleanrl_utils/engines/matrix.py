"""What is to be run: the cells of a command or of a suite, and the list of them that machines are given."""

import hashlib
import json
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

from cleanrl_utils import fail
from cleanrl_utils.engines import cells

NUMBERS = {"num_seeds": 1, "start_seed": 0, "cells_per_gpu": 0, "threads": 1}  # keys of a suite and their least values
SUITE_KEYS = {"commands", "env_ids", "reference", *NUMBERS}


def read_suite(path):
    """The tables [[run]] of a suite, with the keys at its top as their defaults."""
    try:
        suite = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        fail(f"--suite {path}: {error}")
    runs = suite.pop("run", [])
    if not isinstance(runs, list):
        fail(f"{path} has [run]: write [[run]], of which there may be several")
    for table in [suite, *runs]:
        if unknown := table.keys() - SUITE_KEYS:
            fail(f"{path} has {', '.join(sorted(unknown))}; a suite knows {', '.join(sorted(SUITE_KEYS))} and [[run]]")
    runs = [suite | run for run in runs]
    for run in runs or [{}]:
        if not all(isinstance(run.get(key), list) and run[key] for key in ("commands", "env_ids")):
            fail(f"{path} needs tables [[run]] with commands = [...] and env_ids = [...]")
        for key, least in NUMBERS.items():
            if not isinstance(run.get(key, 1), int) or run.get(key, 1) < least:
                fail(f"{path}: {key} must be a number, at least {least}")
        if not isinstance(run.get("reference", ""), str):
            fail(f'{path}: reference must name a file, as in reference = "ppo.py"')
    return runs


def check_command(command):
    try:
        words = shlex.split(command)
    except ValueError as error:
        fail(f"the command {command} cannot be read: {error}")
    script = cells.script_of(words)[1]
    if not words or shutil.which(words[0]) is None:
        fail(f"there is no program {' '.join(words[:1]) or '(empty)'!r} to start --command with")
    if script and not Path(script).is_file():
        fail(f"there is no {script} in {Path.cwd()}: start this in the root of the repository")
    for flag in ("--env-id", "--seed", "--resume"):
        if any(word.split("=")[0].replace("_", "-") == flag for word in words):
            fail(f"the command has {flag}, which is added for each cell: --env-ids, --num-seeds, --start-seed")


def make_cells(options):
    """The matrix: every command with every environment and seed, each once."""
    runs = [{"commands": [options.command], "env_ids": options.env_ids}] if options.command else []
    runs += read_suite(options.suite) if options.suite else []
    found = {}
    for run in runs:
        first = options.start_seed if options.start_seed is not None else run.get("start_seed", 1)
        number = options.num_seeds if options.num_seeds is not None else run.get("num_seeds", 3)
        for command in run["commands"]:
            check_command(command)
            for env_id in run["env_ids"]:
                for seed in range(first, first + number):
                    cell = cells.make_cell(command, env_id, seed)
                    cell |= {key: run[key] for key in ("cells_per_gpu", "threads") if key in run}
                    other = found.setdefault(cells.same_words(cell["command"]), cell)
                    if other["id"] != cell["id"]:
                        ours, theirs = shlex.join(cell["command"]), shlex.join(other["command"])
                        fail(f"tell these two apart with --exp-name, or their runs are mistaken: {ours} | {theirs}")
    return list(found.values())


def write_matrix(matrix, folder):
    """The list for cells.py, under a name that is the same for the same list."""
    text = json.dumps(matrix, indent=1)
    path = folder / f"matrix-{hashlib.sha256(text.encode()).hexdigest()[:10]}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        cells.write_json(path, matrix)
    except OSError as error:
        fail(f"--state {folder}: {error}")
    return path


def command_of(matrix_path, index):
    """What runs one cell, on any machine with this folder. Without site-packages, to start in a few milliseconds."""
    return [sys.executable, "-I", "-S", str(Path(cells.__file__).resolve()), str(matrix_path.resolve()), str(index)]
