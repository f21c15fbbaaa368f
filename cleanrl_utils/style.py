"""Keep the files of cleanrl/ one text: report where they drift apart. Silent with exit code 0 when there is nothing.

Rules, by the name that a finding carries:
  lineage  every file has a table in cleanrl/lineage.toml and every table a file; parents exist and form no cycle
  order    from top to bottom: imports, Args, environments, networks, equations, the marked block, a function that films
           (film_... or record_..., with a `path`), a class derived from Run, the main block; in Args hyperparameters
           come first, then the flags of every run, from exp_name on
  block    the marked block of what a run needs besides its algorithm, from its comment to the end of `evaluate`, is the
           same text in all files of a backend; its methods that use no backend are the same in both
  budget   all that a reader reads, that is all but the block and what films, has at most `lines` lines, and at most
           `changed` lines added + deleted against that of the `parent`; the main block has at most 170, or `main`
  import   nothing is imported from the repository (cleanrl, cleanrl_utils, benchmark, tests, a neighbouring file)
  drift    outside the block, too, a top-level function or class has the same text in every file; exempt are Args,
           make_env, make_envs, load_policy and networks (Agent, QNetwork, Actor, SoftQNetwork, subclasses of Module);
           between a torch and a JAX file (one with `_jax` in its name) the texts may differ if one of them uses torch,
           jax, flax or optax
  heading  the main block has the headings of the design, in its order; `# Log: why` counts as the heading `# Log`
  text     the lines under `# Seeding` and `# Save and close` are those of the parent, unless backends differ or the
           file's table says so: differs = ["Seeding"]
  flag     a flag is one line `name: type = default  # help`, is read as args.name, and has the same type and help in
           every file; a literal default has the type of the flag; where a flag means something else, the file's table
           says so: helps = ["num_envs"]
  global   a top-level function or class reads no variable of the main block
  header   the packages of the PEP 723 header, each with a lower bound, are those imported at the top of the file, also
           in a `try` there (packages imported inside a function or an `if` are optional and not listed, except those
           that the file's table names: late = ["jax"])
  width    a line has at most 120 characters; of the lines to read at most 7 % are longer than 100
  length   a function has at most 45 lines, in the block at most 60
Exit codes: 0 nothing found, 1 findings (path:line: rule: what to do), 2 wrong usage.
"""

import argparse
import ast
import builtins
import gc
import os
import re
import shutil
import subprocess
import symtable
import sys
import tempfile
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

WIDTH, LENGTH, BLOCK_LENGTH, MAIN_LENGTH = 120, 45, 60, 170
WIDE, SHARE = 100, 0.07  # so many of the lines to read may be wider
REPOSITORY = {"cleanrl", "cleanrl_utils", "benchmark", "tests"}
EXEMPT = {"Args", "make_env", "make_envs", "load_policy", "Agent", "QNetwork", "Actor", "SoftQNetwork"}
BACKENDS = {"torch", "jax", "flax", "optax"}
PACKAGES = {"torch.utils.tensorboard": "tensorboard", "cv2": "opencv-python", "PIL": "pillow", "yaml": "pyyaml"}
PACKAGES |= {"PyQt5": "pyqt5-qt5"}  # the libraries, without their Python bindings
MARK, END, FIRST_RUN_FLAG = "# What a run needs besides its algorithm", "evaluate", "exp_name"
FILM = re.compile(r"(film|record)_\w+")
HEADINGS = "Checks|Seeding|Environments, agent and optimizer|Storage|Training loop|Save and close".split("|")
LOOP_HEADINGS, OPTIONAL = ["Act", "Targets", "Learn", "Log", "Checkpoint"], {"Targets"}
SHARED_TEXT = ("Seeding", "Save and close")


class Finding(NamedTuple):
    path: Path
    line: int
    rule: str
    message: str
    edit: tuple | None = None  # (first line, last line, new lines): the mechanical repair


class File:
    """One algorithm: its text, its syntax tree and the parts that the rules compare."""

    def __init__(self, path, table):
        self.path, self.name, self.table = path, path.stem, table
        self.backend = "jax" if "jax" in self.name.split("_") else "torch"
        source = path.read_text(encoding="utf-8")
        self.lines, self.tree = source.removesuffix("\n").split("\n"), ast.parse(source)
        self.nodes = list(ast.walk(self.tree))
        self.defs = {node.name: node for node in self.tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        fields = getattr(self.defs.get("Args"), "body", [])
        self.flags = {field.target.id: field for field in fields if isinstance(field, ast.AnnAssign)}
        self.imports = []  # (name in the file, dotted path, node)
        for node in self.nodes:
            if isinstance(node, ast.Import):
                self.imports += [(alias.asname or alias.name.split(".")[0], alias.name, node) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                self.imports += [(alias.asname or alias.name, f"{module}.{alias.name}", node) for alias in node.names]
        blocks = [node for node in self.tree.body if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)]
        self.main = (blocks[-1].lineno, blocks[-1].end_lineno) if blocks else (len(self.lines), 0)
        marks = [i for i, line in enumerate(self.lines, 1) if line.startswith(MARK)]
        self.block = (marks[0], self.defs[END].end_lineno) if marks and END in self.defs else (1, 0)
        self.methods = {
            f"{name}.{node.name}": node
            for name, owner in self.defs.items()
            if isinstance(owner, ast.ClassDef) and self.in_block(owner)
            for node in owner.body
            if isinstance(node, ast.FunctionDef)
        }
        self.headings, self.sections = self.find_headings(4, HEADINGS, self.main[0], len(self.lines))
        self.loop_headings, _ = self.find_headings(8, LOOP_HEADINGS, *self.sections.get("Training loop", (1, 0)))

    def find_headings(self, indent, names, first, last):
        """[(heading, line)], and heading -> (first, last) line of the text below it, without blank lines at its end."""
        pattern = re.compile(rf" {{{indent}}}# ({'|'.join(names)})(?=:| and |$)")
        found = [(match[1], i) for i in range(first, last + 1) if (match := pattern.match(self.lines[i - 1]))]
        sections = {}
        for (name, start), (_, end) in zip(found, [*found[1:], ("", last + 1)]):
            while not self.lines[end - 2].strip():
                end -= 1
            sections[name] = start + 1, end - 1
        return found, sections

    def in_block(self, node):
        return self.block[0] <= node.lineno <= self.block[1]

    def to_read(self):
        """The lines that a reader reads: all but the block, what films, and the empty lines before each."""
        films = [self.span(name) for name in self.defs if self.is_film(name)]
        left_out = {i for first, last in (self.block, *films) for i in range(first - 2, last + 1)}
        return [line for i, line in enumerate(self.lines, 1) if i not in left_out]

    def is_film(self, name):
        """Whether a definition is a function that films, into the path that is its last argument."""
        node = self.defs[name]
        args = [arg.arg for arg in node.args.args] if isinstance(node, ast.FunctionDef) else []
        return FILM.fullmatch(name) is not None and args[-1:] == ["path"]

    def span(self, name):
        """First and last line of a top-level definition or of a method of the block, decorators included."""
        node = self.methods.get(name) or self.defs[name]
        return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]), node.end_lineno

    def text(self, span):
        return self.lines[span[0] - 1 : span[1]]

    def is_exempt(self, name):
        """Whether a definition may differ: listed, or a class derived from Module, directly or within the file."""
        bases = [ast.unparse(base).split(".")[-1] for base in getattr(self.defs.get(name), "bases", [])]
        derived = any(base in self.defs and base != name and self.is_exempt(base) for base in bases)
        return name in EXEMPT or "Module" in bases or derived

    def uses_backend(self, name):
        nodes = ast.walk(self.methods.get(name) or self.defs[name])
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        paths = [path.split(".") for local, path, _ in self.imports if local in names]
        return any(BACKENDS & {*path} for path in paths if path[-1] != "SummaryWriter")  # it is the same for all

    def help(self, field):
        """The comment behind a flag, or None."""
        rest = self.lines[field.end_lineno - 1].encode()[field.end_col_offset :].decode()
        return rest.strip().removeprefix("#").strip() or None


def depth(tables, name):
    """Number of ancestors; in a cycle, more than there are tables."""
    count = 0
    while (name := tables.get(name, {}).get("parent")) and count <= len(tables):
        count += 1
    return count


def check_lineage(root, tables):
    path = root / "cleanrl/lineage.toml"
    lines = path.read_text(encoding="utf-8").splitlines()
    for name, table in tables.items():
        line = lines.index(f"[{name}]") + 1 if f"[{name}]" in lines else 1
        if not (root / f"cleanrl/{name}.py").exists():
            yield Finding(path, line, "lineage", f"[{name}] has no file cleanrl/{name}.py; rename or remove the table")
        for key in ["lines"] + ["changed"] * ("parent" in table):
            if not isinstance(table.get(key), int):
                yield Finding(path, line, "lineage", f"[{name}] has no budget `{key}`; add it, a number of lines")
        if table.get("parent", name) not in tables or depth(tables, name) > len(tables):
            message = f"[{name}] has the parent {table['parent']}, which is unknown or its own descendant; correct it"
            yield Finding(path, line, "lineage", message)


def check_budgets(file, changed):
    lines, main = len(file.to_read()), file.main[1] - file.main[0] + 1
    if lines > (budget := file.table.get("lines", lines)):
        yield 1, "budget", f"{lines} lines to read, budget {budget}; shorten it or raise `lines` in lineage.toml"
    if main > (most := file.table.get("main", MAIN_LENGTH)):
        yield file.main[0], "budget", f"the main block has {main} lines, at most {most}; make a step a function"
    if changed is not None and changed > (budget := file.table.get("changed", changed)):
        parent = file.table["parent"]
        yield 1, "budget", f"{changed} lines changed against {parent}.py, budget {budget}; stay closer to the parent"


def check_imports(file, names):
    """Imports of the repository, and the PEP 723 header against the imports at the top of the file."""
    imported, tries = {}, [node for node in file.tree.body if isinstance(node, ast.Try)]
    at_top = [*file.tree.body, *(node for block in tries for node in block.body)]
    for _, path, node in file.imports:
        if (top := path.split(".")[0]) in REPOSITORY | names or not top:
            yield node.lineno, "import", f"{path} is of the repository; copy what is needed, a file stands alone"
        elif node in at_top and top not in sys.stdlib_module_names:
            special = [package for module, package in PACKAGES.items() if f"{path}.".startswith(f"{module}.")]
            imported |= {package: node for package in special or [normal(top)]}
    header = re.search(r"^# /// script\n((?:#(?: .*)?\n)+?)# ///$", "\n".join(file.lines), re.M)
    try:
        header = tomllib.loads(re.sub("^# ?", "", header[1] if header else "", flags=re.M))
        listed, python = header["dependencies"], header["requires-python"]
    except (KeyError, tomllib.TOMLDecodeError) as error:
        yield 1, "header", f"the PEP 723 header is wrong ({error}); write requires-python and dependencies as in ppo.py"
        return
    for requirement in [f"Python {python}", *listed]:
        if ">=" not in requirement:
            yield 1, "header", f"{requirement} has no lower bound; write >= and the oldest version that works"
    packages = {normal(re.match(r"[\w.-]*", requirement)[0]) for requirement in listed}
    for package in imported.keys() - packages:
        yield imported[package].lineno, "header", f"{package} is imported but not in the PEP 723 header; add it there"
    for package in packages - imported.keys() - {*file.table.get("late", [])}:
        yield 1, "header", f"{package} is in the PEP 723 header but not imported at the top of the file; remove it"


def normal(package):
    return re.sub("[._-]+", "-", package).lower()


def check_order(file):
    """Args, then what the algorithm is, then the block, then the main block."""
    if not file.block[1]:
        yield 1, "block", f"there is no marked block, from `{MARK}` to the end of `{END}`; copy that of ppo.py"
    elif len([line for line in file.lines if line.startswith(MARK)]) > 1:
        yield file.block[0], "block", "the marked block is there twice; remove one"
    names = [name for name, node in file.defs.items() if not file.in_block(node)]
    if names and names[0] != "Args":
        yield file.span(names[0])[0], "order", f"Args comes before {names[0]}; a reader begins with it"
    for name in names:
        bases = {ast.unparse(base) for base in getattr(file.defs[name], "bases", [])}
        behind, films = file.defs[name].lineno > file.block[1] > 0, file.is_film(name)
        if behind != films and not (behind and bases & {*file.defs}):  # a class derived from Run may
            where = (
                "behind the block; move it before" if behind else "before the block, named as a film; move it behind"
            )
            yield file.span(name)[0], "order", f"{name} stands {where} the block"
    if [*file.flags][:1] == [FIRST_RUN_FLAG]:
        yield file.flags[FIRST_RUN_FLAG].lineno, "order", f"{FIRST_RUN_FLAG} comes behind the hyperparameters; move it"


def check_layout(file):
    for found, names, where in (
        (file.headings, HEADINGS, "main block has, 4"),
        (file.loop_headings, LOOP_HEADINGS, "training loop has, 8"),
    ):
        headings = [name for name, _ in found]
        wanted = [name for name in names if name not in OPTIONAL or name in headings]
        if headings != wanted:
            right = len(os.path.commonprefix([headings, wanted]))
            line = [*(line for _, line in found), len(file.lines)][right]
            here = [*wanted, "no other heading"][right]
            yield line, "heading", f"# {here} belongs here; the {where} spaces in, # {', # '.join(wanted)}"
    for line, text in enumerate(file.lines, 1):
        if len(text) > WIDTH:
            yield line, "width", f"{len(text)} characters, at most {WIDTH}; break the line"
    code = [text for text in file.to_read() if text.strip()]
    wide = [text for text in code if len(text) > WIDE]
    if len(wide) > SHARE * len(code):
        message = f"{len(wide)} of {len(code)} lines to read have more than {WIDE} characters, at most {SHARE:.0%}"
        yield file.lines.index(wide[0]) + 1, "width", f"{message}; break some"
    for node in file.nodes:
        most = BLOCK_LENGTH if isinstance(node, ast.FunctionDef) and file.in_block(node) else LENGTH
        if isinstance(node, ast.FunctionDef) and (length := node.end_lineno - node.lineno + 1) > most:
            yield node.lineno, "length", f"{node.name} has {length} lines, at most {most}; split it"


def check_globals(file):
    """Names in top-level definitions that only the main block could define."""

    def outer_names(table):
        names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
        return names.union(*map(outer_names, table.get_children()))

    first, last = file.main
    source = "\n".join(text for line, text in enumerate(file.lines, 1) if not first <= line <= last)
    module = symtable.symtable(source, str(file.path), "exec")
    known = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    for table in module.get_children():
        for name in sorted(outer_names(table) - known - {*dir(builtins), "__file__", "__name__"}):
            nodes = ast.walk(file.defs.get(table.get_name(), file.tree))
            line = min((node.lineno for node in nodes if getattr(node, "id", "") == name), default=table.get_lineno())
            message = f"{table.get_name()} uses {name}, which is neither its own nor defined at the top; pass it in"
            yield line, "global", message


def check_flags(file):
    if "Args" not in file.defs:
        yield 1, "flag", "there is no class Args; the flags of a file are its fields"
    loads = (node for node in file.nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load))
    read = {node.attr for node in loads if ast.unparse(node.value) in ("args", "self.args")}
    for name, field in file.flags.items():
        if file.help(field) is None or field.lineno != field.end_lineno:
            yield field.lineno, "flag", f"{name} has no help; write it on one line, `{name}: type = default  # help`"
        if name not in read:
            yield field.lineno, "flag", f"{name} has no effect: args.{name} is never read; use it or remove it"
        kind, value = ast.unparse(field.annotation), getattr(field.value, "value", None)
        if isinstance(field.value, ast.Constant) and kind in ("int", "bool", "str") and type(value).__name__ != kind:
            yield field.lineno, "flag", f"{name} is declared {kind} but defaults to {value!r}; correct one of them"


def is_own(name, file, first, files):
    """Whether `file` has a text of its own where the other backend has `first`: methods of tensors need no `torch`."""
    others = [other for other in files if name in other.defs | other.methods and other not in (file, first)]
    known = {(other.backend, *other.text(other.span(name))) for other in others}
    ours, wanted = file.text(file.span(name)), first.text(first.span(name))
    copied = ("torch", *ours) in known or ("jax", *ours) in known or (file.backend, *wanted) in known
    return file.backend != first.backend and not copied


def compare(files):
    """Rules between files; in `files` those nearer to a root come first, and the first to have a name is right."""
    for i, file in enumerate(files):
        for name, field in file.flags.items():
            if first := next((other for other in files[:i] if name in other.flags), None):
                kind, wanted = (ast.unparse(flag.annotation) for flag in (field, first.flags[name]))
                if kind != wanted:
                    message = f"{name} is of type {kind}, but {wanted} in {first.name}.py; make them the same"
                    yield Finding(file.path, field.lineno, "flag", message)
                wanted, own = first.help(first.flags[name]), name in file.table.get("helps", [])
                if own and file.help(field) == wanted:
                    message = f"{name} has the help of {first.name}.py; remove it from `helps`"
                    yield Finding(file.path, field.lineno, "flag", message)
                elif wanted and not own and file.help(field) != wanted:
                    code = file.lines[field.end_lineno - 1].encode()[: field.end_col_offset].decode()
                    edit = field.end_lineno, field.end_lineno, [f"{code}  # {wanted}"]
                    message = f"{name} has another help in {first.name}.py, `{wanted}`; --fix copies it from there"
                    yield Finding(file.path, field.lineno, "flag", message, edit)
        if first := next((other for other in files[:i] if other.backend == file.backend and other.block[1]), None):
            if file.block[1] and file.text(file.block) != (wanted := first.text(first.block)):
                message = f"the marked block differs from {first.name}.py; --fix copies it"
                yield Finding(file.path, file.block[0], "block", message, (*file.block, wanted))
        shared = [name for name, node in file.defs.items() if not file.is_exempt(name) and not file.in_block(node)]
        first_of_backend = not any(other.backend == file.backend for other in files[:i])  # its block stands for all
        shared += [
            name
            for name, node in (file.defs | file.methods).items()
            if file.in_block(node) and first_of_backend and not isinstance(node, ast.ClassDef)
        ]
        for name in shared:
            for first in (
                other for other in files[:i] if name in other.defs | other.methods and not other.is_exempt(name)
            ):
                if file.backend == first.backend or not (file.uses_backend(name) or first.uses_backend(name)):
                    if file.text(file.span(name)) != (wanted := first.text(first.span(name))):
                        edit = None if is_own(name, file, first, files) else (*file.span(name), wanted)
                        way = "--fix copies it" if edit else "make it the same, call torch or jax by name in it"
                        message = f"{name} differs from {first.name}.py; {way}, or rename it"
                        yield Finding(file.path, file.span(name)[0], "drift", message, edit)
                    break
        parent = next((other for other in files[:i] if other.name == file.table.get("parent")), None)
        for part in SHARED_TEXT if parent and parent.backend == file.backend else ():
            if part in file.sections and part in parent.sections:
                same = file.text(file.sections[part]) == parent.text(parent.sections[part])
                if same == (part in file.table.get("differs", [])):
                    fixes = "copy it from there, or add it to `differs`", "remove it from `differs`"
                    message = f"# {part} {('differs from', 'is now that of')[same]} {parent.name}.py; {fixes[same]}"
                    yield Finding(file.path, file.sections[part][0] - 1, "text", message)


def count_changes(files):
    """Lines added and deleted against the parent's, of what a reader reads: name -> number."""
    with tempfile.TemporaryDirectory() as folder:
        for name, file in files.items():
            Path(folder, f"{name}.py").write_text("\n".join([*file.to_read(), ""]), encoding="utf-8", newline="\n")
        diffs = {}
        for name, parent in ((name, file.table.get("parent")) for name, file in files.items()):
            if parent in files:
                diff = [
                    "git",
                    "diff",
                    "--no-index",
                    "--no-ext-diff",
                    "--minimal",
                    "--numstat",
                    f"{parent}.py",
                    f"{name}.py",
                ]
                diffs[name] = subprocess.Popen(diff, stdout=subprocess.PIPE, text=True, cwd=folder)
        return {name: sum(map(int, diff.communicate()[0].split()[:2])) for name, diff in diffs.items()}


def inspect(root):
    """All findings, and a row (name, lines, budget, main, mean, changed, budget, parent) per file."""
    findings, files, rows = [], {}, []
    try:
        tables = tomllib.loads((root / "cleanrl/lineage.toml").read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        return [Finding(root / "cleanrl/lineage.toml", 1, "lineage", f"{error}; correct the TOML")], rows
    for path in sorted(path for path in (root / "cleanrl").glob("*.py") if path.name != "__init__.py"):
        table = tables.get(path.stem, {})
        if not table:
            findings.append(Finding(path, 1, "lineage", f"no table [{path.stem}] in cleanrl/lineage.toml; add it"))
        try:
            files[path.stem] = File(path, table)
        except SyntaxError as error:
            findings.append(Finding(path, error.lineno or 1, "syntax", f"{error.msg}; Python cannot read this file"))
    changed = count_changes(files)
    order = sorted(files, key=lambda name: (depth(tables, name), [*tables, name].index(name)))
    findings += [*check_lineage(root, tables), *compare([files[name] for name in order])]
    for name, file in ((name, files[name]) for name in order):
        checks = check_budgets(file, changed.get(name)), check_imports(file, {*files}), check_order(file)
        for check in (*checks, check_layout(file), check_globals(file), check_flags(file)):
            findings += [Finding(file.path, *found) for found in check]
        lines, budget, parent = map(file.table.get, ("lines", "changed", "parent"))
        main, code = file.main[1] - file.main[0] + 1, [len(text) for text in file.to_read() if text.strip()]
        mean = round(sum(code) / len(code), 1)
        rows.append((name, len(file.to_read()), lines, main, mean, changed.get(name), budget, parent))
    return sorted(findings, key=lambda found: found[:3]), rows


def repair(root, paths):
    """Apply the mechanical repairs, then let ruff sort imports and format."""
    for _ in range(2):  # a block that is mended in one file is then copied to the others
        edits = [found for found in inspect(root)[0] if found.edit and found.path in paths]
        for found in reversed(edits):  # from the bottom up, so that line numbers stay right
            first, last, wanted = found.edit
            lines = found.path.read_text(encoding="utf-8").split("\n")
            lines[first - 1 : last] = wanted
            found.path.write_text("\n".join(lines), encoding="utf-8", newline="\n")
            print(f"{found.path.relative_to(root).as_posix()}:{found.line}: fixed: {found.message}")
    ruff = [sys.executable, "-m", "ruff"] if find_spec("ruff") else [shutil.which("ruff")]
    for command in (["check", "--select=I", "--fix"], ["format"]) if ruff[0] and paths else ():
        subprocess.run([*ruff, *command, "--quiet", f"--line-length={WIDTH}", *paths])


def main(argv=None):
    style = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="python -m cleanrl_utils.style", **style)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILES", help="report and fix only these of cleanrl/")
    fix = "copy drifted definitions and helps of flags from the file nearest to the root of the lineage (from torch to "
    fix += "JAX files what uses neither, unless one file alone has the other text), then run ruff, if installed"
    parser.add_argument("--fix", action="store_true", help=f"{fix}, to sort imports and format")
    parser.add_argument("--list", action="store_true", help="print lines and changed lines per file, with the budgets")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the repository (default: this)")
    args = parser.parse_args(argv)
    root, chosen = args.root.resolve(), {path.resolve() for path in args.files}
    if not (root / "cleanrl/lineage.toml").is_file():
        parser.error(f"{root} has no cleanrl/lineage.toml; name the repository with --root")
    for path in chosen:
        if path.parent != root / "cleanrl" or not path.is_file():
            parser.error(f"{path} is not a file of {root / 'cleanrl'}")
    if args.fix:
        repair(root, {path for path in chosen or (root / "cleanrl").glob("*.py") if path.suffix == ".py"})
    findings, rows = inspect(root)
    if args.list:
        for row in [("file", "lines", "budget", "main", "mean", "changed", "budget", "parent"), *rows]:
            name, *numbers, parent = ("-" if cell is None else str(cell) for cell in row)
            print(f"{name:32}" + "".join(f"{number:>9}" for number in numbers) + f"  {parent}")
        return 0
    findings = [found for found in findings if not chosen or found.path in chosen]
    for found in findings:
        print(f"{found.path.relative_to(root).as_posix()}:{found.line}: {found.rule}: {found.message}")
    return 1 if findings else 0


if __name__ == "__main__":
    gc.disable()  # it would walk over the growing syntax trees again and again: half of the time
    sys.exit(main())
