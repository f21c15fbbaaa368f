"""The tools around the algorithms of cleanrl/: `python -m cleanrl_utils.X --help`, where X is a file of this folder."""

import os
import sys


def counted(number, word):
    """A number of things in words: 1 cell, 2 cells."""
    return f"{number} {word}" + ("" if number == 1 else "s")


def fail(message, code=2):
    """End a tool with one line, in the name of the command that was typed."""
    print(f"{os.path.basename(sys.argv[0]).removesuffix('.py')}: {message}", file=sys.stderr)
    sys.exit(code)
