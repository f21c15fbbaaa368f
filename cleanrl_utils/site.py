"""The site: python -m cleanrl_utils.site check | fix

`check` says what is stale in the pages (docs, README.md, CONTRIBUTING.md), `fix` brings it up to date:

- Links to lines of the code, `[words](../../cleanrl/ppo.py#L120 "text of that line")`. The title is a piece of the line
  that occurs on no other line of the file, and sets the number; before the first `fix` it may be left out (`#L`).

Exit codes: 0 all is up to date, 1 something is stale, or cannot be brought up to date, 2 wrong usage.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2[`~]* *$", re.M | re.S)
LINE_LINK = re.compile(r"""\]\(([^()\s#]+)\#L(\d*)(?:-L(\d+))?(?:\s+(?:"((?:\\.|[^"\\])*)"|'((?:\\.|[^'\\])*)'))?\)""")


class Finding(NamedTuple):
    path: Path
    line: int
    message: str


def pages(root):
    """What people read: the pages of the site and those that a code host shows."""
    return [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]


def line_of(text, place):
    return text.count("\n", 0, place) + 1


def set_lines(path, text):
    """The text of a page with the numbers that the titles of its links ask for, and what is wrong with them."""
    findings, parts, end = [], [], 0
    fences = [match.span() for match in FENCE.finditer(text)]
    for match in LINE_LINK.finditer(text):
        target, first, last, *titles = match.groups()
        if "://" in target or any(start <= match.start() < stop for start, stop in fences):
            continue
        title = re.sub(r"\\([\"'\\`*_\[\]<>])", r"\1", titles[0] or titles[1] or "")
        number, problem = find_line(path.parent / target, title)
        if number is None:
            findings.append(Finding(path, line_of(text, match.start()), f"{target}#L{first}: {problem}"))
            continue
        span = f"{number}-L{number + int(last) - int(first)}" if last and first else str(number)
        parts += [text[end : match.start(2)], span]
        end = match.end(3) if last else match.end(2)
    return "".join([*parts, text[end:]]), findings


def find_line(path, title):
    """The number of the one line that holds the title, or None and why there is none."""
    if not path.is_file():
        return None, "there is no such file"
    if not title:
        return None, 'no title: write a piece of the line behind the link, (../../cleanrl/ppo.py#L "piece of the line")'
    numbers = [n for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if title in line]
    if len(numbers) != 1:
        where = f"is on lines {', '.join(map(str, numbers))}; take a longer piece" if numbers else "is on no line"
        return None, f"`{title}` {where}"
    return numbers[0], None


def refresh(path, text):
    """A page as it should be, and what cannot be brought up to date."""
    return set_lines(path, text)


def check(root, fix=False):
    findings = []
    for path in pages(root):
        text = path.read_text(encoding="utf-8")
        wanted, broken = refresh(path, text)
        findings += broken
        if wanted == text:
            continue
        if fix:
            path.write_text(wanted, encoding="utf-8", newline="\n")
            print(f"{path.relative_to(root).as_posix()}: fixed")
        else:
            changed = [n for n, (a, b) in enumerate(zip(text.split("\n"), wanted.split("\n")), 1) if a != b]
            findings.append(Finding(path, *(changed or [1])[:1], "stale: run python -m cleanrl_utils.site fix"))
    for found in findings:
        print(f"{found.path.relative_to(root).as_posix()}:{found.line}: {found.message}")
    return 1 if findings else 0


def main(argv=None):
    style = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="python -m cleanrl_utils.site", **style)
    parser.add_argument("command", choices=("check", "fix"))
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the repository (default: this)")
    args = parser.parse_args(argv)
    root = args.root.resolve()
    if not (root / "docs").is_dir():
        parser.error(f"{root} has no docs; name the repository with --root")
    return check(root, fix=args.command == "fix")


if __name__ == "__main__":
    sys.exit(main())
