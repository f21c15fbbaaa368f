"""Tags of W&B for the runs of a benchmark: what `python -m cleanrl_utils.rlops --tags NEW BASE` compares.

W&B itself reads them from the variable WANDB_TAGS, so that no script needs a flag for them.
"""

import os
import re
import subprocess
import tomllib
from pathlib import Path

from cleanrl_utils import fail

LONGEST = 64  # characters of a tag


def add_arguments(parser):
    group = parser.add_argument_group("tags of W&B", "for commands with --track; those in WANDB_TAGS come first")
    group.add_argument("--wandb-tags", nargs="+", default=[], metavar="TAG", help="tags of all runs, such as pr-299")
    group.add_argument(
        "--no-auto-tag", dest="auto_tag", action="store_false", help="no tag with the version, as git describes it"
    )


def git(*words):
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def version():
    """The version of the clone in the current folder: its last tag and the commits since, as v1.0.0-13-g0123abcdef."""
    if described := git("describe", "--tags", "--dirty", "--abbrev=10"):
        return described
    project = Path("pyproject.toml")
    number = tomllib.loads(project.read_text())["project"].get("version") if project.is_file() else None
    commit = git("describe", "--always", "--exclude=*", "--dirty", "--abbrev=10")
    return "-".join([f"v{number}"] * bool(number) + [f"g{commit}"] * bool(commit))


def tags_of(matrix, options):
    """The tags of the cells, none if no cell is tracked."""
    if not any(re.match("--track(=|$)", word) for cell in matrix for word in cell["command"]):
        if options.wandb_tags:
            fail("--wandb-tags is for commands with --track")
        return []
    found = [tag.strip() for tag in os.environ.get("WANDB_TAGS", "").split(",")]
    found += options.wandb_tags + [version()] * options.auto_tag
    for tag in options.wandb_tags:
        if "," in tag or not 0 < len(tag.strip()) <= LONGEST:
            fail(f"--wandb-tags {tag!r}: a tag has 1 to {LONGEST} characters and no comma")
    return list(dict.fromkeys(tag[:LONGEST] for tag in found if tag))


def variables_of(matrix, options):
    """The variables that give the cells their tags."""
    tags = tags_of(matrix, options)
    return {"WANDB_TAGS": ",".join(tags)} if tags else {}
