"""The site: python -m cleanrl_utils.site check | fix | build [-o site] | serve [--port 8000]

`check` says what is stale in the pages (docs, README.md, CONTRIBUTING.md), `fix` brings it up to date:

- Links to lines of the code, `[words](../../cleanrl/ppo.py#L120 "text of that line")`. The title is a piece of the line
  that occurs on no other line of the file, and sets the number; before the first `fix` it may be left out (`#L`).
- What stands between `<!-- results: ppo.py ppo_atari.py -->` and `<!-- /results -->`: the scores of these files in
  benchmark/results, the published ones and the commands. `<!-- results: all -->` takes all files.
- What stands between `<!-- proof -->` and `<!-- /proof -->`: which files the runs of benchmark/suites/proof.toml prove.
- What stands between `<!-- models -->` and `<!-- /models -->`: the models of benchmark/models and their scores.
- What stands between `<!-- algorithms -->` and `<!-- /algorithms -->`: the pages of the algorithms and their files.
- On the site alone, `<!-- curves: ppo.py dqn.py CartPole-v1 -->` shows recorded curves of files, in the environments
  that it names or in all, and `<!-- diff: c51.py -->` the code that a file changes of its parent.
- Formulas are TeX, as a code host shows them: a block ```` ```math ```` at the margin, or $`words in a sentence`$. On
  the site they are MathML, which a browser shows without a script. `build` names those that it cannot read.
- Metrics that a file logs and the page of its algorithm does not explain are named; nobody but you can fix those.

`build` puts the pages together with those made from the code (source, flags, diffs, metrics, descent, curves), turns
links into the repository into links to them, lets MkDocs make HTML of it (pip install -e ".[docs]") and follows every
link between the pages. `serve` builds, shows the site at http://127.0.0.1:8000 and builds again after a change.

Exit codes: 0 all is well, 1 something is stale or broken, 2 wrong usage, such as a missing package.
"""

import argparse
import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from html import unescape
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote

from cleanrl_utils.pages import facts, proof

FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2[`~]* *$", re.M | re.S)
LINE_LINK = re.compile(r"""\]\(([^()\s#]+)\#L(\d*)(?:-L(\d+))?(?:\s+(?:"((?:\\.|[^"\\])*)"|'((?:\\.|[^'\\])*)'))?\)""")
LINK = re.compile(r"""(\]\()([^()\s]+)((?:\s+(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'))?\))""")
KINDS = "results|algorithms|proof|files|changes|models"  # of generated blocks
BLOCK = re.compile(rf"(<!-- ({KINDS})(?:: ([^>]*?))? -->\n).*?(<!-- /\2 -->)", re.S)
ASKED = re.compile(r"<!-- (curves|diff): ([^>]*?) -->")
METRICS = "explanation-of-the-logged-metrics"
WIDE, UNSEARCHED = "hide: [navigation, toc]", "search: {exclude: true}"
MATH = re.compile(r"^```math\n(?P<block>.*?)^```$|\$`(?P<words>[^`\n]+)`\$", re.M | re.S)
SPACE = '<mspace width="0.167em" />'
MATH_STYLE = (  # what browsers draw otherwise than TeX
    (' xmlns="[^"]*"', ""),
    (r"<mo>([A-Za-z]+)</mo>", r"<mi>\1</mi>"),  # names of functions: no space around them, but beside other names
    (r"(</m(?:i|n|sub|sup)>)(?=<mi>[A-Za-z]{2,}<)", rf"\1{SPACE}"),
    (r"(?<!b>|p>|r>)(<mi>[A-Za-z]{2,}</mi>)(?=<m(?:i|n|sub|sup|over|frac)>)", rf"\1{SPACE}"),
    (r"<msup>(<mi>[^<]+</mi>)<mi>&#x02032;</mi></msup>", r'<mrow>\1<mo lspace="0" rspace="0">&#x02032;</mo></mrow>'),
    ('<mo stretchy="true">&#x000AF;</mo>', '<mo stretchy="false">&#x0203E;</mo>'),  # a bar
    (r"((?:&#x0003D;|&#x0002C;|&#x00028;|\[)</mo>)<mo>(?=&#x02212;)", r'\1<mo form="prefix">'),  # the sign of a number
)
PART = '<div data-part="{}"></div>'  # what HTML is put in the place of once MkDocs is done
CARDS = '<div class="{}" markdown>\n\n{}\n\n</div>'  # on a phone a row of the table in it becomes a card
NOT_FOUND = '<h1>There is no such page</h1><p>Search for it above, or begin <a href="/">at home</a>.</p>'
LEXERS = {".py": "python", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".sh": "bash", ".tf": "terraform"}


class Finding(NamedTuple):
    path: Path
    line: int
    message: str


# Check and fix


def pages(root):
    """What people read: the pages of the site and those that a code host shows."""
    return [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]


def line_of(text, place):
    return text.count("\n", 0, place) + 1


def in_code(text):
    """A function that tells whether a place in a page is in a block of code."""
    fences = [match.span() for match in FENCE.finditer(text)]
    return lambda place: any(start <= place < stop for start, stop in fences)


def set_lines(path, text):
    """The text of a page with the numbers that the titles of its links ask for, and what is wrong with them."""
    findings, parts, end, code = [], [], 0, in_code(text)
    for match in LINE_LINK.finditer(text):
        target, first, last, *titles = match.groups()
        if "://" in target or code(match.start()):
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


def relative(target, start):
    """The path from a folder to a target, with slashes."""
    return Path(os.path.relpath(target, start)).as_posix()


def fill_blocks(root, path, text):
    """The text of a page with its generated blocks as they should be, and what is wrong with their markers."""
    findings, code = [], in_code(text)

    def link(name):
        return relative(root / f"cleanrl/{name}.py", path.parent)

    def fill(match):
        if code(match.start()):
            return match[0]
        start, kind, words, end = match.groups()
        names = [word.removesuffix(".py") for word in (words or "").split()]
        if kind == "algorithms":
            body = facts.algorithms_table(root, lambda page: relative(root / f"docs/{page}", path.parent))
        elif kind == "proof":
            body = proof.page(root, link)
        elif kind == "files":
            body = proof.front(root, link, lambda page: relative(root / f"docs/{page}", path.parent))
        elif kind == "models":
            body = facts.models_table(root, link)
        elif kind == "changes":
            body = facts.changes(root, *names)
        elif names == ["all"]:
            body = facts.all_results(root, link, lambda page: relative(root / f"docs/{page}", path.parent))
        else:
            if unknown := [name for name in names if name not in facts.lineage(root)]:
                message = f"there is no cleanrl/{unknown[0]}.py to show results of"
                findings.append(Finding(path, line_of(text, match.start()), message))
            body = facts.results_table(root, names, link)
        return f"{start}\n{body}\n\n{end}"

    return BLOCK.sub(fill, text), findings


def check_metrics(root):
    """Metrics that a page does not explain, itself or by a link to the explanations of another page."""
    for name, (_, _, page) in facts.algorithms(root).items():
        path = root / f"docs/rl-algorithms/{page}.md"
        text = path.read_text(encoding="utf-8")
        others = [path.with_name(other) for other in re.findall(rf"\]\(([\w-]+\.md)#{METRICS}\)", text)]
        known = "\n".join([text, *(other.read_text(encoding="utf-8") for other in others if other.exists())])
        if missing := facts.unexplained(root, name, known):
            line = next((n for n, line in enumerate(text.split("\n"), 1) if "metrics" in line and line[:1] == "#"), 1)
            yield Finding(path, line, f"{name}.py logs what is not explained: {', '.join(missing)}")


def check(root, fix=False):
    findings = []
    for path in pages(root):
        text = path.read_text(encoding="utf-8")
        wanted, broken = set_lines(path, text)
        wanted, wrong = fill_blocks(root, path, wanted)
        findings += broken + wrong
        if wanted == text:
            continue
        if fix:
            path.write_text(wanted, encoding="utf-8", newline="\n")
            print(f"{path.relative_to(root).as_posix()}: fixed")
        else:
            changed = [n for n, (a, b) in enumerate(zip(text.split("\n"), wanted.split("\n")), 1) if a != b]
            findings.append(Finding(path, *(changed or [1])[:1], "stale: run python -m cleanrl_utils.site fix"))
    findings += check_metrics(root)
    for found in findings:
        print(f"{found.path.relative_to(root).as_posix()}:{found.line}: {found.message}")
    return 1 if findings else 0


# Build


class Site:
    """The pages on their way to MkDocs: where each thing of the repository is shown, and the HTML to put in later."""

    def __init__(self, root, folder):
        self.root, self.folder = root, folder
        self.parts, self.todo, self.done, self.problems = {}, [], set(), []

    def write(self, page, text, front=""):
        """A page; `front` is what MkDocs is told about it."""
        path = self.folder / page
        if path.exists():
            raise FileExistsError(f"two pages are called {page}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"---\n{front}\n---\n\n{text}" if front else text, encoding="utf-8", newline="\n")
        self.done.add(page)

    def part(self, name, content):
        self.parts[name] = content
        return PART.format(name)

    def page_of(self, path, anchor=""):
        """The page that shows a path of the repository, or None if there is nothing to show."""
        name = path.relative_to(self.root).as_posix()
        if name.startswith("docs/"):
            return name.removeprefix("docs/")
        if path.parent == self.root / "cleanrl" and path.stem in facts.lineage(self.root):
            has_parent = "parent" in facts.lineage(self.root)[path.stem]
            return f"source/{'diff-' if anchor == 'diff' and has_parent else ''}{path.stem}.md"
        if path.suffix == ".md" and path.parent == self.root:
            page = f"{path.stem.lower()}.md"
        elif path.is_dir():
            page = f"source/{name}/index.md"
        elif path.is_file():
            page = f"source/{name}.md"
        else:
            return None
        if page not in self.done:
            self.done.add(page)
            self.todo.append((page, path))
        return page

    def rewrite(self, page, path, text):
        """A text that stands at `path` in the repository, as `page` of the site."""
        code = in_code(text)

        def link(match):
            before, target, after = match.groups()
            place, _, anchor = target.partition("#")
            if code(match.start()) or not place or re.match(r"[a-z+]+:|/", place):
                return match[0]
            goal = Path(os.path.normpath(path.parent / unquote(place)))
            if not goal.is_relative_to(self.root):
                return match[0]
            shown = self.page_of(goal, anchor)
            if shown is None:
                return match[0]
            anchor = re.sub(r"^(L\d+)-L\d+$", r"\1", "" if anchor == "diff" else anchor)
            after = ")" if anchor.startswith("L") else after  # the title was for the number
            return f"{before}{relative(shown, PurePosixPath(page).parent)}{'#' * bool(anchor)}{anchor}{after}"

        return LINK.sub(link, text)


def from_page(page):
    """Functions that link from HTML of a page to the pages of files; MkDocs makes a folder of each page."""
    here = PurePosixPath(page).with_suffix("") if PurePosixPath(page).name != "index.md" else PurePosixPath(page).parent
    return lambda name: relative(f"source/{name}", here) + "/"


def add_parts(site, page, text):
    """A page with curves behind its tables of results, and what its comments ask for."""
    link = from_page(page)

    def figures(names, envs=()):
        content = facts.curves(site.root, names, link, envs)
        return site.part(f"curves {page} {' '.join([*names, *envs])}", content) if content else ""

    def around_table(section):
        def around(match):  # a score may be broken in front of its interval only, a long name between its words
            rows = re.sub(r"(?<=,) (?=[-\d.]+\])| (?=±)|(?<=±) |(?<=of) |(?<=after) ", "\u00a0", match[0])
            rows = re.sub(r"\b[A-Za-z]{24,}-v\d+ \|", lambda name: re.sub(r"\B(?=[A-Z])", "<wbr>", name[0]), rows)
            return CARDS.format("results", rows)

        return re.sub(r"(?ms)^\| File .*?(?=\n\n)", around, section, count=1)

    def behind_table(section, names):
        section = around_table(section)
        return section.replace("<details markdown>", f"{figures(names)}\n\n<details markdown>", 1)

    def block(match):
        names = [word.removesuffix(".py") for word in (match[3] or "").split()]
        if match[2] in ("proof", "models"):
            return around_table(match[0])
        if match[2] != "results":
            return match[0]
        if names != ["all"]:
            return behind_table(match[0], names)
        first, *sections = re.split(r"(?m)^(?=## )", match[0])
        where = relative("benchmark/report/index.html", PurePosixPath(page).with_suffix(""))
        button = f'<p><a class="md-button" href="{where}">All recorded runs, interactively</a></p>'
        first += site.part("report", button) + "\n\n"
        return first + "".join(map(behind_table, sections, facts.by_page(site.root).values()))

    def comment(match):
        words = match[2].split()
        names = [word.removesuffix(".py") for word in words if word.endswith(".py")]
        if match[1] == "curves":
            return figures(names, [word for word in words if not word.endswith(".py")])
        parent = facts.lineage(site.root)[names[0]]["parent"]
        return site.part(f"excerpt {names[0]}", facts.diff_html(site.root, parent, names[0], link, excerpt=True))

    return ASKED.sub(comment, BLOCK.sub(block, text))


def mathml(tex, display="inline"):
    """A formula as MathML, which browsers show by themselves; what cannot be read is a ValueError."""
    from latex2mathml.converter import convert

    plain = re.sub(r"\\[{}]", "", tex)
    if plain.count("{") != plain.count("}"):
        raise ValueError("braces do not match")
    try:
        html = convert(" ".join(tex.split()), display=display)
    except Exception as error:  # of many kinds, some of them with nothing to say
        raise ValueError(type(error).__name__) from error
    if unknown := re.search(r'<mi>(\\\w+|&(?!#))|linebreak="(newline)"', html):  # it takes such things for names
        raise ValueError(f"{unknown[1] or unknown[2]} is not known, or not in this place")
    for old, new in MATH_STYLE:
        html = re.sub(old, new, html)
    return html


def set_formulas(site, page, path, text):
    """A page with places for its formulas in MathML."""
    code = in_code(text)

    def formula(match):
        block, words = match["block"], match["words"]
        if words and code(match.start()):
            return match[0]
        try:
            html = mathml(words or block, "block" if block else "inline")
        except ValueError as error:
            name = path.relative_to(site.root).as_posix()
            site.problems.append(f"{name}:{line_of(text, match.start())}: formula: {error}")
            return match[0]
        place = site.part(f"formula {page} {match.start()}", f'<div class="formula">{html}</div>' if block else html)
        return place if block else place.replace("div", "span")

    return MATH.sub(formula, text)


def write_source(site, name):
    """The pages of one file of cleanrl/: its text under a table of its flags, and the diff to its parent."""
    root, parent = site.root, facts.lineage(site.root)[name].get("parent")
    what, where, page = facts.algorithms(root)[name]
    children = [other for other, entry in facts.lineage(root).items() if entry.get("parent") == name]
    head = [
        f"[{facts.page_title(root, page)}](../rl-algorithms/{page}.md)",
        "[all files](../rl-algorithms/files.md)",
    ]
    if parent:
        plus, minus = facts.changed(root, name)
        head.append(f"[diff to `{parent}.py`: +{plus} −{minus}](diff-{name}.md)")
    lines = [f"# `{name}.py`", " · ".join(head), f"{what}; {where}."]
    if children:
        lines.append("Variants: " + ", ".join(f"[`{child}.py`](diff-{child}.md)" for child in children) + ".")
    lines += ["## Flags", CARDS.format("flags", facts.flags_table(root, name)), "## Source"]
    lines.append(site.part(f"source {name}", facts.source_html(facts.source(root, name), "python")))
    site.write(f"source/{name}.md", "\n\n".join(lines) + "\n", WIDE)
    if parent:
        content = facts.diff_html(root, parent, name, from_page(f"source/diff-{name}.md"))
        lines = [f"# `{name}.py` against `{parent}.py`"]
        lines.append(f"{head[0]}: [`{name}.py`]({name}.md) adds {plus} lines to [`{parent}.py`]({parent}.md) and takes "
                     f"{minus} away. What both have is folded.")  # fmt: skip
        lines.append(site.part(f"diff {name}", content))
        site.write(f"source/diff-{name}.md", "\n\n".join(lines) + "\n", f"{WIDE}\n{UNSEARCHED}")


def write_other(site, page, path):
    """The page of any other file or folder that a page links to."""
    name = path.relative_to(site.root).as_posix()
    if path.suffix == ".md":
        text = set_formulas(site, page, path, path.read_text(encoding="utf-8"))
        text = site.rewrite(page, path, text)
        site.write(page, add_parts(site, page, text), UNSEARCHED if page == "readme.md" else "")
    elif path.is_dir():
        items = []
        for child in sorted(path.iterdir()):
            if child.name.startswith((".", "__")):
                continue
            target = None if child.is_dir() else site.page_of(child)
            shown = (
                f"[`{child.name}`]({relative(target, PurePosixPath(page).parent)})" if target else f"`{child.name}/`"
            )
            items.append(f"- {shown}")
        site.write(page, f"# `{name}`\n\n" + "\n".join(items) + "\n", UNSEARCHED)
    else:
        text = path.read_text(encoding="utf-8", errors="replace")
        content = site.part(f"source {name}", facts.source_html(text, LEXERS.get(path.suffix, "text")))
        site.write(page, f"# `{name}`\n\n{content}\n", f"{WIDE}\n{UNSEARCHED}")


def write_lists(site):
    """The pages of all files and of all metrics."""

    def link(name):
        return f"../source/{name}.md"

    root = site.root
    head = ["File", "Algorithm", "Environments", "Page"]
    rows = [
        [f"[`{name}.py`]({link(name)})", what, where, f"[{page}]({page}.md)"]
        for name, (what, where, page) in facts.algorithms(root).items()
    ]
    tree = facts.tree(root, link, lambda name: f"../source/diff-{name}.md")
    site.write(
        "rl-algorithms/files.md",
        "# All files\n\nOne file is one variant of one algorithm. A variant begins as a copy of its parent and changes "
        "what the algorithm changes, so the diff between the two is the difference between the algorithms.\n\n"
        f"## Descent\n\nBehind each variant: the lines that it adds to its parent and takes away.\n\n{tree}\n\n"
        f"## What each is for\n\n{facts.table(head, rows)}\n",
    )
    metrics = facts.metrics_page(root, lambda page: f"{page}.md", link)
    site.write(
        "rl-algorithms/metrics.md",
        "# All metrics\n\nEverything that the files log, read from their text, and where it is explained: the same "
        f"name can mean something else in another algorithm.\n\n{CARDS.format('metrics', metrics)}\n",
        "hide: [toc]",
    )


def search_boost(root, page):
    """A search finds guides first, those of many files before those of one, and what was tried or decided once last."""
    boost = 0.5 if page.startswith(("log", "decisions")) else 2
    return f"search: {{boost: {boost + len(facts.by_page(root).get(PurePosixPath(page).stem, [])) / 5}}}"


def assemble(root, folder):
    """Everything MkDocs needs, in a folder; returns the HTML to put in afterwards, and what is wrong."""
    site = Site(root, folder)
    for path in sorted(path for path in (root / "docs").rglob("*") if path.is_file()):
        page = path.relative_to(root / "docs").as_posix()
        if path.suffix == ".md":
            text = set_formulas(site, page, path, path.read_text(encoding="utf-8"))
            text = site.rewrite(page, path, text)
            site.write(page, add_parts(site, page, text), "" if text.startswith("---") else search_boost(root, page))
        else:
            (folder / page).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / page)
    for name in facts.lineage(root):
        write_source(site, name)
    write_lists(site)
    while site.todo:
        write_other(site, *site.todo.pop())
    return site.parts, site.problems


def navigation(nav, folder):
    """The navigation with folder/* written out."""
    kept = []
    for entry in nav:
        ((title, value),) = entry.items() if isinstance(entry, dict) else (("", entry),)
        if isinstance(value, list):
            value = navigation(value, folder)
        elif value.endswith("/*"):
            pages = sorted(path.relative_to(folder).as_posix() for path in folder.glob(f"{value[:-1]}*.md"))
            value = [page for page in pages if not PurePosixPath(page).name.startswith("000")]
        kept.append({title: value} if title else value)
    return kept


def finish(output, parts):
    """The pages that MkDocs made with the parts put in, and with names that may break where their words end."""

    def breakable(match):
        return re.sub(r"((?<=\w)[_/](?=\w)| )", r"\1<wbr>", match[0])

    for path in sorted(output.rglob("*.html")):
        text = path.read_text(encoding="utf-8")
        filled = re.sub(r"(?<!</span>)<code>[^<]*</code>", breakable, text)  # in a sentence or a table, not in a block
        filled = filled.replace("<h1>404 - Not found</h1>", NOT_FOUND)
        filled = re.sub(r'<(div|span) data-part="([^"]*)">\s*</\1>', lambda match: parts[unescape(match[2])], filled)
        if filled != text:
            path.write_text(filled, encoding="utf-8", newline="\n")


def broken_links(output):
    """What the pages of a built site refer to and is not there, and what they would ask other hosts for."""
    texts = {
        path: path.read_text(encoding="utf-8") for path in sorted(output.rglob("*.html")) if path.name != "404.html"
    }
    anchors = {
        path: {unescape(found) for found in re.findall(r'\s(?:id|name)="([^"]+)"', text)}
        for path, text in texts.items()
    }
    for path, text in texts.items():
        for tag, name, value in set(re.findall(r'<(\w+)\b[^>]*?\s(href|src)="([^"]*)"', text)):
            place, _, anchor = unescape(value).partition("#")
            if re.match(r"[a-z+]+:|//", place):
                if tag != "a" and not place.startswith("data:"):
                    yield path, f"asks another host for {value}"
                continue
            goal = Path(os.path.normpath(path.parent / unquote(place.split("?")[0]))) if place else path
            goal = goal / "index.html" if goal.is_dir() else goal
            if not goal.exists():
                yield path, f"links to {value}, which does not exist"
            elif anchor and goal in anchors and unquote(anchor) not in anchors[goal]:
                yield path, f"links to {value}, but there is no such place in that page"


def build(root, output):
    """The site in a folder; returns what is wrong with it."""
    import yaml

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "docs")
        parts, wrong = assemble(root, folder)
        config = yaml.safe_load((root / "mkdocs.yml").read_text(encoding="utf-8"))
        config["nav"] = navigation(config["nav"], folder)
        config |= {"docs_dir": str(folder), "site_dir": str(Path(temporary, "site"))}
        Path(temporary, "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
        environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "SOURCE_DATE_EPOCH": "0"}
        command += ["--config-file", str(Path(temporary, "mkdocs.yml"))]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True)
        if ran.returncode:
            return (ran.stdout + ran.stderr).strip().replace(f"{temporary}{os.sep}", "").split("\n")
        made = Path(temporary, "site")
        for name in ("sitemap.xml", "sitemap.xml.gz"):  # they want an address, and say when
            (made / name).unlink(missing_ok=True)
        finish(made, parts)
        problems = wrong + add_report(root, made)
        problems += [f"{path.relative_to(made).as_posix()}: {what}" for path, what in broken_links(made)]
        if output.exists():
            shutil.rmtree(output)
        shutil.copytree(made, output)
        return problems


def add_report(root, made):
    """The interactive page of all recorded results; returns what is wrong with it."""
    command = [sys.executable, "-m", "cleanrl_utils.report", str(root / "benchmark/results")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command += ["-o", str(made / "benchmark/report")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ran.returncode:
        return ran.stderr.strip().split("\n")
    page = made / "benchmark/report/index.html"
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("<h1>", '<a href="../">← Results</a><h1>', 1), encoding="utf-8", newline="\n")
    return []


def stamps(root):
    places = [root / name for name in ("docs", "cleanrl", "cleanrl_utils", "benchmark", "cloud")]
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    files += [*root.glob("*.md"), root / "mkdocs.yml"]
    return {path: path.stat().st_mtime_ns for path in files if "__pycache__" not in path.parts}


def serve(root, output, server):
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    seen = stamps(root)
    while True:
        time.sleep(1)
        if (now := stamps(root)) != seen:  # in a process of its own: this one has read the files already
            seen = now
            command = [sys.executable, "-m", "cleanrl_utils.site", "build", "--root", root, "-o", output]
            subprocess.run([*map(str, command)])


def main(argv=None):
    style = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="python -m cleanrl_utils.site", **style)
    parser.add_argument("command", choices=("check", "fix", "build", "serve"))
    parser.add_argument("-o", "--output", type=Path, default=None, help="folder of the site, replaced (default: site)")
    parser.add_argument("--port", type=int, default=8000, help="where to serve (default: 8000)")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the repository (default: this)")
    args = parser.parse_args(argv)
    root = args.root.resolve()
    if not (root / "docs").is_dir():
        parser.error(f"{root} has no docs; name the repository with --root")
    if args.command in ("check", "fix"):
        return check(root, fix=args.command == "fix")
    for module, package in (("material", "mkdocs-material"), ("latex2mathml", "latex2mathml")):
        if not find_spec(module):
            parser.error(f'the package {package} is missing: pip install -e ".[docs]"')
    output = (args.output or root / "site").resolve()
    if output.is_file() or output.exists() and not (output / "404.html").exists() and any(output.iterdir()):
        parser.error(f"{output} is something else than a site; name another folder with -o")
    if args.command == "serve":
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(output))
        try:
            server = http.server.ThreadingHTTPServer(("127.0.0.1", args.port), handler)
        except (OSError, OverflowError) as error:
            parser.error(f"cannot serve at port {args.port} ({error}); name another with --port")
    problems = build(root, output)
    for problem in problems:
        print(problem)
    if args.command == "serve" and (output / "index.html").exists():
        try:
            serve(root, output, server)
        except KeyboardInterrupt:
            return 0
    if not problems:
        print(f"{output / 'index.html'}: to look at it, python -m http.server --directory {output}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
