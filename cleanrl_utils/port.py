"""Carry an edit of a file into its children of the lineage, and on into theirs, by three-way merge.

For a child of PARENT the base is PARENT as of REV, one side the child and the other PARENT, both as they are in the
working tree. One generation further down, the edit is what the merge changed in the child. Imports, flags and top-level
definitions are looked up by name: a child with the old text gets the new one whatever stands beside it, a child without
them stays without. Clean merges are written. A conflict is written with markers, its descendants are left alone:
resolve it, then run this again on that child.
Printed is a line per descendant, in this order: merged, unchanged, CONFLICT (where, and what to do), NOT REACHED (below
which conflict); then how many there are of each.
Exit codes: 0 all merged or unchanged, 1 some were not reached, 2 wrong usage.
"""

import argparse
import ast
import difflib
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from cleanrl_utils.style import depth

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


def split(text):
    """A file as [(key, lines)]: its head (""), imports, definitions, flags ("Args.name"); None for all else."""
    lines, starts = text.splitlines(keepends=True), {1: ""}
    for node in ast.parse(text).body:
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        key, end = getattr(node, "name", None), node.end_lineno + 1
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            key = ast.unparse(node).split(" import ")[0]
        elif key:  # the blank lines behind a definition go with it
            end = next((i for i in range(end, len(lines) + 1) if lines[i - 1].strip()), len(lines) + 1)
        else:
            continue
        starts |= {first: None if key in starts.values() else key, end: None}
        if key == "Args":
            for field in (field for field in node.body if isinstance(field, ast.AnnAssign)):
                starts |= {field.lineno: f"Args.{field.target.id}", field.end_lineno + 1: None}
            starts[node.end_lineno + 1] = "Args."  # where a definition behind it is added
    firsts = [*sorted(starts), len(lines) + 1]
    return [(starts[first], b"".join(lines[first - 1 : end - 1])) for first, end in zip(firsts, firsts[1:])]


def put(parts, key, new):
    """`parts` with what `new` has under `key`: replaced, removed, or added next to its neighbour in `new`."""
    text, keys, have = dict(new).get(key), [key for key, _ in new], [key for key, _ in parts]
    if key in have:
        return [(other, text if other == key else old) for other, old in parts if other != key or text is not None]
    i = keys.index(key)
    after = [*keys, None][i + 1]
    if keys[i - 1] is None and after is not None and after in have:  # the first behind a gap
        i = have.index(after)
    else:
        i = have.index(next(other for other in keys[i - 1 :: -1] if other is not None and other in have)) + 1
    return [*parts[:i], (key, text), *parts[i:]]


def settle(ours, base, theirs):
    """Take edits of imports, flags and definitions out of the merge, where the child has the old text or none at all.

    Returns child and base with the new text in them, and the names of what was edited and the child does not have.
    """
    try:
        child, before, after = split(ours), split(base), split(theirs)
    except SyntaxError:
        return ours, base, []
    (own, old, new), lacking = map(dict, (child, before, after)), []
    renamed = any(key not in new and key not in own for key in old)  # then what is new is perhaps not for this child
    for key in [key for key in {**new, **old} if key is not None and old.get(key) != new.get(key)]:
        if own.get(key) in (None, old.get(key), new.get(key)) and (key in old and key in new or not renamed):
            before = put(before, key, after)
            if key in own or key not in old:
                child = put(child, key, after)
            else:
                lacking.append(key)
    return b"".join(text for _, text in child), b"".join(text for _, text in before), lacking


def changed_lines(old, new):
    diff = difflib.unified_diff(old.decode().splitlines(), new.decode().splitlines(), n=0, lineterm="")
    return sum(line[0] in "+-" for line in list(diff)[2:])


def port(folder, tables, parent, base, theirs, rev, found):
    """Merge the edit base -> theirs of `parent` into its descendants; `found` collects name -> (state, note, text)."""
    if MARKER in theirs:
        raise ValueError(f"{parent}.py has conflict markers; resolve them first")
    for child in children(tables, parent):
        path = folder / f"{child}.py"
        ours = merged = path.read_bytes()
        conflict, why, lacking = True, "the markers of an earlier merge are in it", []
        if MARKER not in ours:
            settled, settled_base, lacking = settle(ours, base, theirs)
            labels = f"{child}.py", f"{parent}.py before ({rev})", f"{parent}.py"
            merged, conflict = merge(settled, settled_base, theirs, labels)
            marks = [str(i) for i, line in enumerate(merged.split(b"\n"), 1) if line.startswith(MARKER[1:])]
            why = f"both changed line {', '.join(marks)}"
        if conflict:
            on = f", then: python -m cleanrl_utils.port {child}" if children(tables, child) else ""
            found[child] = "CONFLICT", f"{why}; resolve the markers in {path.name}{on}", merged
            found |= {name: ("NOT REACHED", f"below {child}", None) for name in descendants(tables, child)}
        else:
            lines, note = changed_lines(ours, merged), f"has no {', '.join(lacking)}" if lacking else ""
            found[child] = f"merged {lines} lines" if lines else "unchanged", note, merged
            port(folder, tables, child, ours, merged, "working tree", found)


def children(tables, name):
    return [child for child, table in tables.items() if table.get("parent") == name]


def descendants(tables, name):
    return [below for child in children(tables, name) for below in (child, *descendants(tables, child))]


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
    path, found = root / f"cleanrl/{parent}.py", {}
    try:
        if loop := [name for name in tables if depth(tables, name) > len(tables)]:
            raise ValueError(f"lineage.toml: {loop[0]} descends from itself")
        port(path.parent, tables, parent, base.stdout, path.read_bytes(), args.base, found)
    except (OSError, ValueError, RuntimeError) as error:
        parser.error(f"{error}; nothing was written")
    order = ["merged", "unchanged", "CONFLICT", "NOT"]
    for name, (state, note, text) in sorted(found.items(), key=lambda item: order.index(item[1][0].split()[0])):
        print(f"{name}: {state}" + f": {note}" * bool(note))
        path = root / f"cleanrl/{name}.py"
        if not args.dry_run and text is not None and text != path.read_bytes():
            path.write_bytes(text)
    counts = [sum(state.startswith(start) for state, _, _ in found.values()) for start in order]
    print("{} merged, {} unchanged, {} in conflict, {} not reached".format(*counts))
    return 1 if any(counts[2:]) else 0


if __name__ == "__main__":
    sys.exit(main())
