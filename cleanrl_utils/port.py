"""Carry an edit of a file into its children of the lineage, and on into theirs, by three-way merge.

For a child of PARENT the base is PARENT as of REV, one side the child and the other PARENT, both as they are in the
working tree. One generation further down, the edit is what the merge changed in the child. Clean merges are written.
A conflict is written with markers, its own children are left alone: resolve it, then run this again on that child.
Exit codes: 0 all merged or unchanged, 1 conflicts, 2 wrong usage.
"""

import argparse
import difflib
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

MARKER = b"\n<<<<<<< "


def merge(ours, base, theirs, labels):
    """The merged text and whether it has conflicts."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("ours", "base", "theirs")]
        for file, text in zip(files, (ours, base, theirs)):
            file.write_bytes(text)
        labels = [part for label in labels for part in ("-L", label)]
        done = subprocess.run(["git", "merge-file", "-p", "--diff3", *labels, *files], capture_output=True)
    if done.returncode > 127:  # up to there it is the number of conflicts
        raise RuntimeError(f"git merge-file: {done.stderr.decode().strip()}")
    return done.stdout, done.returncode > 0


def changed_lines(old, new):
    diff = difflib.unified_diff(old.decode().splitlines(), new.decode().splitlines(), n=0, lineterm="")
    return sum(line[0] in "+-" for line in list(diff)[2:])


def port(folder, tables, parent, base, theirs, rev, written):
    """Merge the edit base -> theirs of `parent` into its children; `written` collects path -> text. Returns success."""
    clean = True
    if MARKER in theirs:
        raise ValueError(f"{parent}.py has conflict markers; resolve them first")
    for child in (name for name, table in tables.items() if table.get("parent") == parent):
        path = folder / f"{child}.py"
        if path in written:
            raise ValueError(f"lineage.toml: {child} descends from itself")
        ours = path.read_bytes()
        if MARKER in ours:
            print(f"{child}: CONFLICT left over from an earlier merge; resolve it first")
            clean = False
            continue
        merged, conflict = merge(ours, base, theirs, (f"{child}.py", f"{parent}.py before ({rev})", f"{parent}.py"))
        if conflict:
            print(f"{child}: CONFLICT; resolve the markers in {path.name}, then port {child}")
            clean, written[path] = False, merged
        else:
            lines = changed_lines(ours, merged)
            print(f"{child}: merged {lines} lines" if lines else f"{child}: unchanged")
            written[path] = merged
            clean &= port(folder, tables, child, ours, merged, "working tree", written)
    return clean


def main(argv=None):
    style = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="python -m cleanrl_utils.port", **style)
    parser.add_argument("parent", metavar="PARENT", help="the edited file: ppo, ppo.py or cleanrl/ppo.py")
    parser.add_argument("--base", metavar="REV", default="HEAD", help="the edit began at this revision (default: HEAD)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be merged, write nothing")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the repository (default: this)")
    args = parser.parse_args(argv)
    root, parent = args.root.resolve(), Path(args.parent).stem
    if not (root / "cleanrl/lineage.toml").is_file():
        parser.error(f"{root} has no cleanrl/lineage.toml; name the repository with --root")
    tables = tomllib.loads((root / "cleanrl/lineage.toml").read_text(encoding="utf-8"))
    parents = sorted({table["parent"] for table in tables.values() if "parent" in table})
    if parent not in parents:
        what = "has no children" if parent in tables else "is unknown"
        parser.error(f"{args.parent} {what} in cleanrl/lineage.toml; the parents there are {', '.join(parents)}")
    show = ["git", "-C", str(root), "show", f"{args.base}:./cleanrl/{parent}.py"]
    base = subprocess.run(show, capture_output=True)
    if base.returncode:
        parser.error(f"no base to merge from; name one with --base. git: {base.stderr.decode().strip()}")
    try:
        written = {root / f"cleanrl/{parent}.py": (root / f"cleanrl/{parent}.py").read_bytes()}
        clean = port(root / "cleanrl", tables, parent, base.stdout, *written.values(), args.base, written)
    except (OSError, ValueError, RuntimeError) as error:
        parser.error(f"{error}; nothing was written")
    for path, text in written.items():
        if not args.dry_run and text != path.read_bytes():
            path.write_bytes(text)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
