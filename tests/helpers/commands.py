"""The commands in Markdown pages: how to find them, and what is wrong with one.

A command is parsed by what it starts: a file of cleanrl/ by its own `Args` and `parse_args`, a tool of ours by its own
parser, up to the point where its work would begin. Other programs are known by name, and some by what they take.
"""

import ast
import contextlib
import functools
import glob
import io
import re
import runpy
import sys
import tomllib
import types
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import tyro
from packaging.requirements import InvalidRequirement, Requirement

from helpers.files import FILES, ROOT

SHELL = ("bash", "sh", "shell", "zsh")
CONSOLE = ("console", "shell-session", "")  # commands follow a prompt, the rest is what they print

# What is known to exist, for those that take anything, and for those with commands of their own
ANYTHING = set(
    "cat cd chmod cp curl df diff echo editor export grep head id kill ls mkdir mv nproc open read rm rsync".split()
)
ANYTHING |= set("scp sed seq sleep sort source . ssh tail tee true umask unset wait watch which xdg-open".split())
ANYTHING |= set("nvidia-smi optuna-dashboard sacct sbatch scancel scontrol sinfo squeue tensorboard".split())
IMAGES = "build create exec images inspect load login logs ps pull push rm run save stop tag version".split()
COMMANDS = {
    "aws": "batch configure cloudwatch ec2 ecr iam logs s3 s3api secretsmanager ssm sts".split(),
    "apt-get": ["install", "update"],
    "docker": IMAGES,
    "buildah": [*IMAGES, "bud", "from"],
    "podman": IMAGES,
    "git": "add apply branch checkout clone commit config diff fetch init log merge pull push rebase restore rev-parse"
    " revert show stash status switch tag worktree".split(),
    "hf": "auth cache download models repos upload".split(),
    "jupyter": ["lab", "notebook"],
    "mkdocs": ["build", "serve"],
    "pre-commit": ["install", "run"],
    "ray": "attach down exec job start status stop submit up".split(),
    "ruff": ["check", "format"],
    "terraform": "apply destroy fmt import init output plan show validate workspace".split(),
    "wandb": "disabled enabled login offline online sync".split(),
}
# What runs the rest of its line, with those of its options that take a value
BEFORE = {"env": "-u", "exec": "", "nice": "-n", "nohup": "", "sudo": "-u", "time": "", "xvfb-run": "-n -s", "!": ""}
BEFORE |= {"srun": "-n -N -c -p", "timeout": "-k -s", "caffeinate": ""}
KEYWORDS = {"do", "then", "else", "if", "elif", "while", "until", "{", "("}
OUTPUT = {"-o", "--output", "--out", "--curves", "--state", "--report"}  # options that name what is to be written
PYTHON = re.compile(r"python(3(\.\d+)?)?")


@dataclass
class Block:
    page: str
    line: int  # of its first line of text
    language: str
    text: str


class Wrong(Exception):
    """What is wrong with a command."""


class Parsed(BaseException):
    """A parser is through with a command line; not an Exception, so that no tool takes it for an error of its own."""


def pages(root=ROOT):
    return [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]


def blocks(text, page=""):
    """The fenced blocks of a page, also those in lists and tabs, without their indentation."""
    found, fence = [], None
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r"([ >]*)(`{3,}|~{3,})\s*([^`]*)$", line)
        if fence is None and mark:
            fence = mark[2]
            (language,) = re.match(r"\{?\s*\.?([\w+-]*)", mark[3]).groups()
            found.append(Block(page, number + 1, language.lower(), ""))
            indent = len(mark[1])
        elif fence and mark and mark[2].startswith(fence) and not mark[3]:
            fence = None
        elif fence:
            found[-1].text += (line[indent:] if not line[:indent].strip(" >") else line) + "\n"
    return found


def shell(block):
    """The shell text of a block, with as many lines as the block has; what a console prints is blank."""
    if block.language in SHELL:
        return block.text
    lines, more = [], False
    for line in block.text.splitlines():
        command = line.startswith("$ ") or more
        lines.append(line.removeprefix("$ ").removeprefix("> " if more else "$ ") if command else "")
        more = command and line.endswith("\\")
    return "\n".join(lines) + "\n"


TOKEN = re.compile(
    r"""
    (?P<space> (?: [ \t] | \\\n )+ )
  | (?P<comment> \#[^\n]* )
  | (?P<here> <<-? [ ]* ['"]? (?P<mark>\w+) ['"]? (?P<rest>[^\n]*) \n (?P<text>.*?) ^\s*(?P=mark)$ )
  | (?P<redirect> \d* (?: &> | >> | >& | <<< | > | < ) [ \t]* )
  | (?P<end> \n | ;;? | && | \|\|? | & )
  | (?P<word> [()] | (?: '[^']*' | "(?: \\. | [^"\\] )*" | \$\((?: [^()] | \([^()]*\) )*\) | \$\{[^}]*\}
                       | \\. | [^\s;&|<>()'"\\] )+ )
    """,
    re.X | re.S | re.M,
)
PIECE = re.compile(
    r"""
    '(?P<plain>[^']*)' | "(?P<quoted>(?: \\. | [^"\\] )*)" | \\(?P<escaped>.)
  | (?P<bare> \$\((?: [^()] | \([^()]*\) )*\) | [^'"\\]+ )
    """,
    re.X | re.S,
)
VARIABLE = re.compile(r"\$\((?P<command>(?:[^()]|\([^()]*\))*)\)|\$\{(?P<braced>\w+)[^}]*\}|\$(?P<name>\w+|[@*?#])")


class Reader:
    """Reads shell text into simple commands: (line, words, files that it writes)."""

    def __init__(self, text):
        self.text = text
        self.variables = {"EDITOR": "editor", "PWD": ".", "HOME": "~"}
        self.inner = []  # texts of $(...)

    def __iter__(self):
        words, written, line, redirect = [], [], 1, ""
        for token in self.tokens():
            if not words:
                line = self.text.count("\n", 0, token.start()) + 1
            kind = next(kind for kind in ("redirect", "word", "end", "here") if token[kind])
            if kind == "redirect":
                redirect = token[0].strip()
            elif kind == "word" and redirect:
                if ">" in redirect and not redirect.endswith(">&"):
                    written.append(self.expand(token[0]))
                redirect = ""
            elif kind == "word":
                words.append(self.expand(token[0]))
            elif kind in ("end", "here"):
                for rest in re.findall(r">\s*(\S+)", token["rest"] or "") if kind == "here" else ():
                    written.append(rest)
                yield from self.command(line, words, written)
                words, written = [], []
        yield from self.command(line, words, written)

    def tokens(self):
        position = 0
        while position < len(self.text):
            token = TOKEN.match(self.text, position)
            if token is None:
                line = self.text[position:].splitlines()[0]
                raise Wrong(f"cannot be read from here on: {line}")
            position = token.end()
            if token.lastgroup not in ("space", "comment"):
                yield token

    def command(self, line, words, written):
        """Without the keywords of loops and conditions, and with the variables that it sets remembered."""
        while words and words[0] in KEYWORDS:
            words = words[1:]
        if len(words) > 3 and words[0] == "for" and words[2] == "in":
            self.variables[words[1]] = words[3]
        elif words and all(re.match(r"\w+=", word) for word in words):
            self.variables |= dict(word.split("=", 1) for word in words)
        elif words and words[0] not in ("for", "done", "fi", "}", ")"):
            yield line, [word for word in words if word != ")"], written

    def expand(self, word):
        """A word as a program gets it; a variable that the block does not set is 1."""

        def value(match):
            if match["command"] is not None:
                self.inner.append(match["command"])
                return "1"
            return self.variables.get(match["braced"] or match["name"], "1")

        result = ""
        for piece in PIECE.finditer(word):
            if piece["plain"] is not None:
                result += piece["plain"]
            elif piece["quoted"] is not None:
                result += re.sub(r'\\([$`"\\])|\\\n', r"\1", VARIABLE.sub(value, piece["quoted"]))
            else:
                result += piece["escaped"] or VARIABLE.sub(value, piece["bare"])
        return result


def check_text(text, made=(), root=ROOT):
    """What is wrong with the commands of a shell text: [(line, command, reason)]; `made` are files that exist then."""
    wrong, reader, made = [], Reader(text), set(made)
    try:
        for line, words, written in reader:
            made |= set(written)
            made |= set(words[-1:]) if words[0] in ("cp", "mkdir", "curl") else set()
            try:
                check(words, made, root)
            except Wrong as error:
                wrong.append((line, " ".join(words), str(error)))
    except Wrong as error:
        wrong.append((1, text.strip().splitlines()[0], str(error)))
    for inner in reader.inner:
        wrong += check_text(inner, made, root)
    return wrong


def check(words, made=frozenset(), root=ROOT):
    """Raise `Wrong` unless a command, given as its words, can be what it seems to be."""
    check_paths(words, made, root)
    check_environment(words, root)
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    if not words:
        return
    program, arguments = words[0], words[1:]
    if program in BEFORE:
        rest = skip_options(arguments, BEFORE[program].split())
        return check(rest[1:] if program == "timeout" else rest, made, root)
    if PYTHON.fullmatch(program) or program.endswith("/bin/python"):
        return check_python(arguments, made, root)
    if program == "torchrun":
        return check_torchrun(arguments, made, root)
    if program in ("pip", "pip3"):
        return check_pip(arguments, root)
    if program == "make":
        return check_make(arguments, root)
    if program == "pytest":
        return check_pytest(arguments, root)
    if program in ("uv", "uvx"):
        return check_uv(arguments, made, root)
    if program in ("bash", "sh") or program.startswith("./"):
        what = words if program.startswith("./") else skip_options(arguments)
        if not what:
            raise Wrong(f"{program} of what?")
        if "-c" in arguments:
            return check_inner(what[0], made, root)
        if what[0] not in made and not (root / what[0]).is_file():
            raise Wrong(f"{what[0]} does not exist")
        return
    if program in COMMANDS:
        rest = [word for word in arguments if not word.startswith("-")]
        if not rest and not {"--version", "--help"} & set(arguments):
            raise Wrong(f"{program} of what? {' | '.join(COMMANDS[program])}")
        if rest and rest[0] not in COMMANDS[program]:
            raise Wrong(f"{program} {rest[0]} is not in the list of COMMANDS in tests/helpers/commands.py")
        starts = [i for i, word in enumerate(arguments) if PYTHON.fullmatch(word) or word == "torchrun"]
        if program in ("docker", "podman") and starts:  # in a container of the repository
            check(arguments[starts[0] :], made, root)
        if rest[:1] == ["exec"] and program == "ray":
            check_inner(rest[2], made, root)
        return
    if program == "codespell" or program in ANYTHING:
        return
    raise Wrong(f"the program {program} is not known: a typing error, or to be added to tests/helpers/commands.py?")


def check_inner(text, made, root):
    """A command that another one is given as text."""
    for _, command, reason in check_text(text, made, root):
        raise Wrong(f"{command}: {reason}")


def skip_options(words, with_value=()):
    while words and words[0].startswith("-") or words and re.match(r"\w+=", words[0]):
        words = words[2 if words[0] in with_value else 1 :]
    return words


def check_paths(words, made, root):
    """What looks like a path into the repository is there, unless it is to be written."""
    tops = [path.name for path in root.iterdir() if path.is_dir() and path.name not in ("runs", "site", "wandb")]
    inside = re.compile(rf"(?:\./)?(?:{'|'.join(map(re.escape, tops))})/[\w./*?\[\]-]+")
    for before, word in zip(["", *words], words if words[0] != "aws" else []):
        option, equals, value = word.partition("=")
        path = (value if equals and option.startswith("-") else word).split("::")[0]
        if not inside.fullmatch(path) or before in OUTPUT or option in OUTPUT or path in made:
            continue
        if before in ("pull", "--repo-id"):  # a repository of the hub
            continue
        if not glob.glob(str(root / path)):
            raise Wrong(f"{path} does not exist")


def check_environment(words, root):
    """The module in `--env-id module:Name` can be imported, from what is installed or what PYTHONPATH names."""
    folders = [word.removeprefix("PYTHONPATH=") for word in words if word.startswith("PYTHONPATH=")]
    for option, value in zip(words, words[1:]):
        module, colon, _ = value.partition(":")
        if option != "--env-id" or not colon or module.startswith("my_"):  # a module of the reader's
            continue
        spec = find_spec(module)
        installed = spec is not None and not Path(spec.origin).is_relative_to(root / "tests")  # where tests find it
        if not installed and not any((root / folder / f"{module}.py").is_file() for folder in folders):
            raise Wrong(f"there is no module {module}, or PYTHONPATH has to name its folder")


def check_python(words, made, root):
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c", "-"):
        if not re.fullmatch(r"-[bBdEiIOPqsSuvVxXW]+|--version|--help", words[0]):
            raise Wrong(f"python has no option {words[0]}")
        words = words[2 if words[0] in ("-X", "-W") else 1 :]
    if not words or words[0] == "-":
        return
    if words[0] == "-c":
        try:
            compile(words[1], "-c", "exec")
        except (IndexError, SyntaxError) as error:
            raise Wrong(f"python -c: {error}") from None
    elif words[0] == "-m":
        check_module(words[1:], made, root)
    elif words[0] == "scripts/make.py":
        check_make(words[1:], root)
    elif Path(words[0]).stem in FILES and (words[0] in made or re.match(r"cleanrl/|runs/", words[0])):
        check_algorithm(Path(words[0]).stem, words[1:], root)
    elif words[0] not in made and not (root / words[0]).is_file():
        raise Wrong(f"{words[0]} does not exist")


def check_module(words, made, root):
    if not words:
        raise Wrong("python -m of what?")
    name, *arguments = words
    if name in ("pip", "pytest", "ruff", "codespell", "pre_commit", "mkdocs"):
        check([name.replace("_", "-"), *arguments], made, root)
    elif name == "pdb":
        check_python(skip_options(arguments, ["-c"]), made, root)
    elif name == "torch.distributed.run":
        check_torchrun(arguments, made, root)
    elif name.split(".")[0] in ("cleanrl_utils", "benchmark", "cleanrl"):
        check_tool(name, arguments, root)
        for option, value in zip(arguments, arguments[1:]):
            if option == "--command":
                check_inner(value, made, root)
    elif name.split(".")[0] not in sys.stdlib_module_names and find_spec(name.split(".")[0]) is None:
        raise Wrong(f"there is no module {name}")


@contextlib.contextmanager
def stopped_after_parsing(arguments, program):
    """Within it, a parser that accepts the arguments ends the program; one that refuses them is `Wrong`."""
    import argparse

    def stopping(parse):
        def wrapper(*args, **kwargs):
            parse(*args, **kwargs)
            raise Parsed

        return wrapper

    printed = io.StringIO()
    patches = [
        mock.patch.object(tyro, "cli", stopping(tyro.cli)),
        mock.patch.object(sys, "argv", [program, *arguments]),
    ]
    for name in ("parse_args", "parse_intermixed_args"):
        patches.append(
            mock.patch.object(argparse.ArgumentParser, name, stopping(getattr(argparse.ArgumentParser, name)))
        )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                yield
        except Parsed:
            return
        except SystemExit as end:
            if end.code:
                lines = [
                    " ".join(re.findall(r"[^\s╭╮╰╯─│-]\S*|-\S*\w\S*", line)) for line in printed.getvalue().splitlines()
                ]
                lines = [line for line in lines if line and line != "Parsing error"]
                errors = [line for line in lines if "error:" in line] or lines[:3]  # argparse's line, or tyro's first
                raise Wrong(f"{program} refuses it: {' '.join(errors) or end.code}") from None
            return
        except ImportError as error:
            raise Wrong(f"{program} cannot be started: {error}") from None
    raise Wrong(f"{program} has begun its work without a look at its arguments")


@functools.cache
def parser_of(path):
    """`Args` and `parse_args` of a file of cleanrl/, without the import of torch or JAX."""
    tree = ast.parse(path.read_text())
    light = sys.stdlib_module_names | {"tyro"}

    def wanted(node):
        if isinstance(node, ast.Import):
            return all(alias.name.split(".")[0] in light for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            return node.module.split(".")[0] in light
        return getattr(node, "name", None) in ("Args", "fail", "read_flags", "parse_args")

    module = types.ModuleType(f"arguments_of_{path.stem}")
    module.__file__, module.__doc__ = str(path), ast.get_docstring(tree)
    sys.modules[module.__name__] = module  # where dataclasses look their types up
    tree.body = [node for node in tree.body if wanted(node)]
    exec(compile(tree, str(path), "exec"), vars(module))
    return module.parse_args


def check_algorithm(name, arguments, root=ROOT):
    path = root / "cleanrl" / f"{name}.py"
    if not path.is_file():
        raise Wrong(f"cleanrl/{name}.py does not exist")
    with stopped_after_parsing(arguments, f"{name}.py"):
        parser_of(path)()


def check_tool(name, arguments, root=ROOT):
    path = root / name.replace(".", "/")
    if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
        raise Wrong(f"there is no tool {name}")
    with stopped_after_parsing(arguments, f"python -m {name}"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)  # other tests import it, too
        runpy.run_module(name, run_name="__main__", alter_sys=False)


def check_torchrun(words, made, root):
    if find_spec("torch") is None:
        return
    from torch.distributed.run import get_args_parser

    with stopped_after_parsing(words, "torchrun"):
        get_args_parser().parse_args(words)
    options = get_args_parser().parse_known_args(words)[0]
    check_python([options.training_script, *options.training_script_args], made, root)


def check_pip(words, root):
    pyproject = tomllib.loads((root / "pyproject.toml").read_text())
    extras = pyproject["project"]["optional-dependencies"]
    rest = [word for word in words if not word.startswith("-")]
    if not rest or rest[0] not in ("install", "list", "show", "freeze", "--version", "download"):
        raise Wrong("pip of what? install | download | list | show | freeze")
    words = words[words.index(rest[0]) + 1 :]
    while words and rest[0] in ("install", "download"):
        word, words = words[0], words[1:]
        if word in ("-r", "--requirement", "-c", "--constraint"):
            if not words or not (root / words[0]).is_file():
                raise Wrong(f"{words[0] if words else word} does not exist")
            words = words[1:]
        elif word in ("--index-url", "--extra-index-url", "--find-links", "-f", "-i", "-t", "--target", "--python"):
            words = words[1:]
        elif word.startswith("."):
            wanted = re.fullmatch(r"\.(?:\[([\w,\s-]+)\])?", word)
            if not wanted:
                raise Wrong(f"{word} is not this repository with extras")
            for extra in filter(None, re.split(r"[,\s]+", wanted[1] or "")):
                if extra not in extras:
                    raise Wrong(f"there is no extra {extra}: {', '.join(extras)}")
        elif not word.startswith("-"):
            try:
                Requirement(word)
            except InvalidRequirement as error:
                raise Wrong(f"pip cannot read {word}: {error}") from None


def check_make(words, root):
    makefile = (root / "Makefile").read_text()
    targets = " ".join(re.findall(r"(?m)^\.PHONY: (.*)$", makefile)).split()
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z]+=", word))
    goals = [word for word in words if word not in {f"{key}={value}" for key, value in variables.items()}]
    for name in variables:
        if not re.search(rf"(?m)^{name} \?=", makefile):
            raise Wrong(f"the Makefile has no variable {name}")
    if not goals or goals[0] not in targets:
        raise Wrong(f"make of what? {' | '.join(targets)}")
    arguments = [words for _, words, _ in Reader(variables.get("ARGS", ""))]
    arguments = [*goals[1:], *(arguments[0] if arguments else [])]
    if goals[0] == "train":
        check_algorithm("ppo", arguments, root)
    elif goals[0] == "test":
        check_pytest(arguments, root)
    elif goals[0] == "wheels":
        with stopped_after_parsing(arguments, "make.py wheels"):
            runpy.run_path(str(root / "scripts/wheels.py"))["main"](arguments)


def check_pytest(words, root):
    pyproject = tomllib.loads((root / "pyproject.toml").read_text())
    markers = {marker.split(":")[0] for marker in pyproject["tool"]["pytest"]["ini_options"]["markers"]}
    for option, value in zip(words, [*words[1:], ""]):
        if option == "-m":
            for marker in set(re.findall(r"[\w-]+", value)) - {"not", "and", "or"} - markers:
                raise Wrong(f"there is no marker {marker}: {', '.join(sorted(markers))}")
        if option in ("-k", "-m"):
            try:
                compile(value, option, "eval")
            except SyntaxError:
                raise Wrong(f"{option} {value} is not an expression") from None


def check_uv(words, made, root):
    rest = skip_options(words)
    if not rest or rest[0] not in ("run", "pip", "venv", "sync", "tool"):
        raise Wrong("uv of what? run | pip | venv")
    if rest[0] == "pip":
        check_pip(rest[1:], root)
    elif rest[0] == "run":
        command = skip_options(rest[1:], ["--with", "--extra", "--python", "-p", "--group", "--script"])
        check_python(command, made, root) if command and command[0].endswith(".py") else check(command, made, root)
