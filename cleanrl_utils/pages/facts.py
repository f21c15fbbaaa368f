"""What the site says that the repository knows already: results, flags, metrics, source, diffs and descent of files.

`python -m cleanrl_utils.site` calls these functions: they take paths and return Markdown, or HTML where Markdown has
no word for it.
"""

import ast
import csv
import difflib
import html
import re
import subprocess
import tomllib
from collections import defaultdict
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path

import numpy as np

from cleanrl_utils.runs import results, stats

CONTEXT = 3  # lines around a change that a diff shows
OVERVIEW = "docs/rl-algorithms/overview.md"
FILE_ROW = re.compile(r"^\| \[`(\w+)\.py`\]\(\S+\) \| (.*?) \| (.*?) \|.*\| \[\S+\]\((\S+)\.md\) \|$", re.M)


@cache
def lineage(root):
    return tomllib.loads((root / "cleanrl/lineage.toml").read_text(encoding="utf-8"))


@cache
def algorithms(root):
    """File name -> (algorithm, environments, name of its page), in the order of the table of all files."""
    text = (root / OVERVIEW).read_text(encoding="utf-8")
    return {name: (what, where, page) for name, what, where, page in FILE_ROW.findall(text)}


@cache
def source(root, name):
    return (root / f"cleanrl/{name}.py").read_text(encoding="utf-8")


def table(head, rows, align=""):
    """A Markdown table; `align` has one of l and r per column."""
    rule = [":--" if side == "l" else "--:" for side in align.ljust(len(head), "l")]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


# Results


def short(number):
    """500000 -> 500k, 2457600 -> 2.46M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"


def figures(first, *others):
    """Numbers with as many digits as the first one needs, halves rounded up: 3591.45 -> 3591.5."""
    digit = Decimal("0.01" if abs(first) < 10 else "0.1")
    return [str(Decimal(str(value)).quantize(digit, ROUND_HALF_UP)) for value in (first, *others)]


@cache
def recorded(root):
    """File name -> its rows of benchmark/results, by environment and steps."""
    rows = defaultdict(list)
    for path in sorted((root / "benchmark/results").glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                rows[Path(row["file"]).stem].append(row | {"steps": int(row["steps"])})
    return {name: sorted(rows[name], key=lambda row: (row["env_id"], row["steps"])) for name in rows}


def reference(root, row):
    """The published score beside a recorded one, with its steps or its file where those differ."""
    path = root / "benchmark/reference_scores.csv"
    if own := results.references(row["file"], row["env_id"], results.flags(row["command"]), path):
        by_steps = [(int(ref["steps"]), ref) for ref in own]
        steps, ref = min(by_steps, key=lambda pair: (pair[0] != row["steps"], pair[0] < row["steps"], pair[0]))
        after = "" if steps == row["steps"] else f" after {short(steps)}"
    elif row["reference_mean"]:  # of another file, as recorded
        score = {"score_mean": row["reference_mean"], "score_std": row["reference_std"], "env_id": row["env_id"]}
        ref = next((ref for ref in results.published(path) if score.items() <= ref.items()), score)
        after = f" (`{Path(ref['file']).name}`)" if "file" in ref else ""
    else:
        return ""
    return " ± ".join(figures(*(float(ref[key]) for key in ("score_mean", "score_std") if ref[key]))) + after


@cache
def flags(root, name):
    """The fields of a file's Args, in order: flag -> (type, default, help)."""
    tree, lines = ast.parse(source(root, name)), source(root, name).split("\n")
    found = {}
    for node in next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args").body:
        if isinstance(node, ast.AnnAssign):
            line = lines[node.lineno - 1].encode()  # the style gate keeps a flag on one line
            help = line[node.end_col_offset :].decode().strip().removeprefix("#").strip()
            default = line[node.value.col_offset : node.value.end_col_offset].decode() if node.value else ""
            found[node.target.id] = ast.unparse(node.annotation), default, help
    return found


def score(row):
    """Mean over seeds, with a 95 % interval if there are three seeds or more."""
    scores = np.array(row["scores"].split(), float)
    _, low, high = stats.bootstrap([scores], stats.mean_of_means)
    if np.isnan(low):
        return figures(float(row["score_mean"]))[0]
    return "{} [{}, {}]".format(*figures(float(row["score_mean"]), low, high))


def in_words(seeds):
    if len(seeds) > 2 and [int(seed) for seed in seeds] == [*range(int(seeds[0]), int(seeds[-1]) + 1)]:
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seed{'s' * (len(seeds) > 1)} {' and '.join(seeds)}"


def results_table(root, names, link):
    """Scores of these files beside the published ones, and the commands. `link` turns a file's name into an address."""
    rows = [row for name in names for row in recorded(root).get(name, ())]
    parts, cells, commands = [], [], []
    for row in rows:
        name, planned = Path(row["file"]).stem, results.planned_steps(row)
        steps = short(row["steps"]) + (f" of {short(planned)}" if planned > row["steps"] else "")
        seeds = row["seeds"].split()
        env_id = row["env_id"].split(":")[-1]  # the command has its module
        cells.append([f"[`{name}.py`]({link(name)})", env_id, steps, str(len(seeds)), score(row)])
        cells[-1].append(reference(root, row))
        commands.append(f"{row['command']}  # {in_words(seeds)}")
    if rows:
        head = ["File", "Environment", "Steps", "Seeds", "Score", "Reference"]
        parts += [table(head, cells, "llrrrr"), "<details markdown>", "<summary>Commands of these runs</summary>"]
        parts += ["```bash\n" + "\n".join(commands) + "\n```", "</details>"]
    if missing := [f"`{name}.py`" for name in names if name not in recorded(root)]:
        parts.append(f"No results are recorded yet for {', '.join(missing)}.")
    return "\n\n".join(parts)


@cache
def recorded_curves(root):
    """(file name, environment, steps) -> the curves of its seeds, those that are recorded."""
    found = defaultdict(list)
    for run in results.load([root / "benchmark/results"]):
        if len(run.steps):
            found[Path(run.script).stem, run.env_id, run.last_step].append((run.steps, run.returns))
    return found


def curve_groups(root, names):
    """Environment -> [(name, row, steps, values[seeds, points])]."""
    groups = defaultdict(list)
    for row in (row for name in names for row in recorded(root).get(name, ())):
        name = Path(row["file"]).stem
        if curves := recorded_curves(root).get((name, row["env_id"], row["steps"])):
            first, last = max(steps[0] for steps, _ in curves), min(steps[-1] for steps, _ in curves)
            grid = np.linspace(first, last, 100)
            groups[row["env_id"]].append((name, row, grid, np.stack([np.interp(grid, *curve) for curve in curves])))
    return groups


def ticks(low, high):
    """Some round numbers between two."""
    rough = (high - low or 1) / 4
    power = 10.0 ** np.floor(np.log10(rough))
    step = power * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    return [step * i for i in range(int(np.ceil(low / step)), int(high // step) + 1)]


def curve_figure(env_id, group, link):
    """One environment's learning curves as HTML: an SVG that takes its colours from the page, and a legend."""
    width, height, left, right, top, bottom = 360, 246, 62, 10, 10, 44
    bands = [stats.bootstrap_curves(values) for _, _, _, values in group]
    x_max = max(grid[-1] for _, _, grid, _ in group)
    low, high = min(values.min() for *_, values in group), max(values.max() for *_, values in group)
    pad = 0.05 * (high - low or 1)
    low, high = low - pad, high + pad

    def points(xs, ys):
        xs = left + np.asarray(xs) / x_max * (width - left - right)
        ys = height - bottom - (np.asarray(ys) - low) / (high - low) * (height - top - bottom)
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys))

    def number(value):
        return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:g}"

    shapes, legend = [], []
    middle = top + (height - top - bottom) / 2
    shapes.append(f'<text transform="translate(11 {middle}) rotate(-90)" text-anchor="middle">episodic return</text>')
    x = left + (width - left - right) / 2
    shapes.append(f'<text x="{x}" y="{height - 8}" text-anchor="middle">environment steps</text>')
    for tick in ticks(low, high):
        (x1, y), (x2, _) = (point.split(",") for point in points([0, x_max], [tick, tick]).split())
        shapes.append(f'<line class="grid" x1="{x1}" y1="{y}" x2="{x2}" y2="{y}"/>')
        shapes.append(f'<text x="{left - 5}" y="{float(y) + 3.5:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in ticks(0, x_max):
        x = points([tick], [low]).split(",")[0]
        shapes.append(f'<text x="{x}" y="{height - bottom + 15}" text-anchor="middle">{short(tick)}</text>')
    for i, ((name, row, grid, values), (mean, lower, upper)) in enumerate(zip(group, bands)):
        if len(values) > 2:
            area = points([*grid, *grid[::-1]], np.clip([*lower, *upper[::-1]], low, high))
            shapes.append(f'<polygon class="c{i % 8}" points="{area}"/>')
        title = f"<title>{name}.py: {score(row)} at {short(row['steps'])} steps</title>"
        shapes.append(f'<polyline class="c{i % 8}" points="{points(grid, mean)}">{title}</polyline>')
        seeds = f"{len(values)} seeds" if len(values) > 1 else "1 seed"
        legend.append(f'<li class="c{i % 8}"><a href="{link(name)}">{name}.py</a>, {seeds}</li>')
    label = html.escape(f"Episodic return over environment steps in {env_id}")
    svg = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(shapes)}</svg>'
    title = f"<figcaption>{env_id.split(':')[-1]}</figcaption>"
    return f'<figure class="curve">{title}{svg}<ul>{"".join(legend)}</ul></figure>'


def curves(root, names, link, envs=()):
    groups = sorted(curve_groups(root, names).items())
    figures = [curve_figure(env_id, group, link) for env_id, group in groups if not envs or env_id in envs]
    return f'<div class="curves">{"".join(figures)}</div>' if figures else ""


def page_title(root, page):
    path = root / f"docs/rl-algorithms/{page}.md"
    return path.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ") if path.exists() else page


def by_page(root):
    """Page of an algorithm, in the order of the navigation -> its files, in the order of the table of all files."""
    pages = re.findall(r"rl-algorithms/([\w-]+)\.md", (root / "mkdocs.yml").read_text(encoding="utf-8"))
    names = {page: [name for name, (_, _, own) in algorithms(root).items() if own == page] for page in pages}
    return {page: files for page, files in names.items() if files}


def all_results(root, link, page_link):
    """All recorded results, algorithm by algorithm, and what is missing."""
    rows = [row for rows in recorded(root).values() for row in rows]
    runs, envs = sum(len(row["seeds"].split()) for row in rows), {row["env_id"] for row in rows}
    parts = [f"Recorded so far: {runs} runs of {len(recorded(root))} files in {len(envs)} environments."]
    for page, names in by_page(root).items():
        parts += [f"## {page_title(root, page)}", results_table(root, names, link)]
        parts.append(f"[About the algorithm]({page_link(f'rl-algorithms/{page}.md')})")
    return "\n\n".join(parts)


def models_table(root, link):
    """The models that are kept in the repository, and how well they play on seeds that were used for nothing else."""
    with (root / "benchmark/models/scores.csv").open(encoding="utf-8", newline="") as file:
        found = {(Path(row["file"]).stem, row["env_id"]): row for row in csv.DictReader(file)}
    rows = []
    for name in algorithms(root):
        for row in (row for (file, _), row in found.items() if file == name):
            mean, std = figures(float(row["score_mean"]), float(row["score_std"]))
            seeds = f"{row['model'].rpartition('seed')[2]} of {len(row['of_seeds'].split())}"
            cells = [row["env_id"], short(int(row["steps"])), seeds, f"{mean} ± {std}", row["episodes"]]
            rows.append([f"[`{name}.py`]({link(name)})", *cells])
    return table(["File", "Environment", "Steps", "Seed", "Return", "Episodes"], rows, "llrrrr")


def algorithms_table(root, page_link):
    """The pages of the algorithms, the number of their files, and where they have recorded results."""
    rows = []
    for page, names in by_page(root).items():
        envs = dict.fromkeys(row["env_id"].split(":")[-1] for name in names for row in recorded(root).get(name, ()))
        files = ", ".join(f"`{name}.py`" for name in names)
        rows.append([f"[{page_title(root, page)}]({page_link(f'rl-algorithms/{page}.md')})", files, ", ".join(envs)])
    return table(["Algorithm", "Files", "Recorded results in"], rows)


# Metrics


@cache
def metrics(root, name):
    """The tags that a file logs, read from its text. A part that only a run knows stays in braces."""
    tree = ast.parse(source(root, name))
    strings, returns = defaultdict(list), {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AugAssign)) and isinstance(node.value, ast.List):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                strings[target.id] += constants(node.value)
        elif isinstance(node, ast.FunctionDef):
            returns[node.name] = [part for part in ast.walk(node) if isinstance(part, ast.Return)]

    def values(node):
        """The strings that an expression holds, lists and results of functions that it names included."""
        found = constants(node)
        for name in (part.id for part in ast.walk(node) if isinstance(part, ast.Name)):
            found += strings.get(name, []) or [value for part in returns.get(name, ()) for value in values(part)]
        return found

    def visit(node, scope):
        if isinstance(node, ast.For):
            scope = scope | bind(node.target, node.iter, values)
        elif isinstance(node, (ast.ListComp, ast.DictComp, ast.GeneratorExp)):
            for part in node.generators:
                scope = scope | bind(part.target, part.iter, values)
        if isinstance(node, ast.JoinedStr):
            yield from expand(node, scope)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        else:
            for child in ast.iter_child_nodes(node):
                yield from visit(child, scope)

    names = logged_names(tree) | {name for name in strings["loss_names"] if "/" not in name}
    tags = {*visit(tree, {}), *(f"losses/{name}" for name in names)} - {"losses/{name}"}
    return sorted(tag for tag in tags if re.fullmatch(r"(charts|losses|eval|episode)/[\w/{}-]+", tag))


def logged_names(tree):
    """The keys of what updates log of their losses: of dictionaries called `logged`, or that a loss returns."""
    places = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
            places += [node.value] * ("logged" in names)
        elif isinstance(node, ast.FunctionDef) and node.name.endswith("_loss"):
            places += [part.value for part in ast.walk(node) if isinstance(part, ast.Return) and part.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add":
            places += [part for part in node.args if isinstance(part, (ast.Dict, ast.BinOp))]
    dicts = (part for place in places for part in ast.walk(place) if isinstance(part, ast.Dict))
    return {
        key
        for found in dicts
        for node in found.keys
        if node
        for key in constants(node)
        if not key.startswith("charts/")
    }


def constants(node):
    """The strings in an expression, f-strings as they are written."""
    if isinstance(node, ast.JoinedStr):
        return [ast.unparse(node)[2:-1]]
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    return [value for child in ast.iter_child_nodes(node) for value in constants(child)]


def bind(target, values, strings):
    """What the variables of a loop may be."""
    if isinstance(values, ast.Call) and isinstance(getattr(values.func, "value", None), ast.Dict):  # {...}.items()
        sides = values.func.value.keys, values.func.value.values
        return {
            name.id: [value for part in side for value in constants(part)] for name, side in zip(target.elts, sides)
        }
    names = [part.id for part in ast.walk(target) if isinstance(part, ast.Name)]
    return {name: strings(values) for name in names}


def expand(node, scope):
    """The strings that an f-string may be."""
    texts = [""]
    for part in node.values:
        if isinstance(part, ast.Constant):
            choices = [part.value]
        elif ast.unparse(part.value).endswith("% 2"):
            choices = ["0", "1"]
        else:
            choices = scope.get(ast.unparse(part.value)) or [f"{{{ast.unparse(part.value)}}}"]
        texts = [text + choice for text in texts for choice in choices]
    return texts


def unexplained(root, name, text):
    """Tags of a file that a page does not write out; what only a run knows may be anything there."""
    known = re.findall(r"`([^`\n]+)`", text)
    patterns = {tag: re.sub(r"\\{\w+\\}", r"[\\w<>{}.]+", re.escape(tag)) for tag in metrics(root, name)}
    return [tag for tag, pattern in patterns.items() if not any(re.fullmatch(pattern, word) for word in known)]


def metrics_page(root, page_of, link):
    """Each tag with the pages that explain it, and those files of a page that log it if not all do."""
    rows = []
    for tag in sorted({tag for name in lineage(root) for tag in metrics(root, name)}):
        places = []
        for page, names in by_page(root).items():
            files = [f"[`{name}`]({link(name)})" for name in names if tag in metrics(root, name)]
            if files:
                where = f"[{page}]({page_of(page)}#explanation-of-the-logged-metrics)"
                places.append(where if len(files) == len(names) else f"{where} ({', '.join(files)})")
        rows.append([f"`{tag}`", ", ".join(places)])
    return table(["Metric", "Pages that explain it, and files where not all of the page log it"], rows)


# Source


@cache
def colours(text, lexer):
    """A list of lines, each a list of (class, text)."""
    from pygments.lexers import get_lexer_by_name
    from pygments.token import STANDARD_TYPES

    lines = [[]]
    for kind, value in get_lexer_by_name(lexer, stripnl=False, ensurenl=False).get_tokens(text):
        while kind not in STANDARD_TYPES:
            kind = kind.parent
        for i, part in enumerate(value.split("\n")):
            if i:
                lines.append([])
            if part:
                lines[-1].append((STANDARD_TYPES[kind], part))
    return lines[:-1] if not lines[-1] else lines


def line_html(line, marks=()):
    """A line as HTML; `marks` has the (start, stop) of what is to be stressed."""
    pieces, place = [], 0
    for kind, text in line:
        cuts = sorted({0, len(text), *(min(max(cut - place, 0), len(text)) for mark in marks for cut in mark)})
        for start, stop in zip(cuts, cuts[1:]):
            piece = html.escape(text[start:stop], quote=False)
            piece = f'<span class="{kind}">{piece}</span>' if kind and not text[start:stop].isspace() else piece
            if any(a <= place + start and place + stop <= b for a, b in marks):
                piece = f"<mark>{piece}</mark>"
            pieces.append(piece)
        place += len(text)
    return "".join(pieces)


@cache
def lines_html(text, lexer):
    return [line_html(line) for line in colours(text, lexer)]


def source_html(text, lexer):
    rows = (
        f'<span class="line" id="L{n}"><a href="#L{n}">{n}</a>{line}\n</span>'
        for n, line in enumerate(lines_html(text, lexer), 1)
    )
    return f'<div class="highlight source"><pre><code>{"".join(rows)}</code></pre></div>'


def typed(default):
    """A default as one would type it."""
    return {"": "required", '""': "none"}.get(default) or f"`{default.strip(chr(34))}`"


def flags_table(root, name):
    parent = lineage(root).get(name, {}).get("parent")
    known = flags(root, parent) if parent else {}
    rows = []
    for flag, (kind, default, help) in flags(root, name).items():
        change = "" if not parent else "not there"
        if flag in known:
            change = "" if known[flag][1] == default else typed(known[flag][1])
        default = f"`{name}`" if default == "Path(__file__).stem" else typed(default)
        rows.append([f"`--{flag.replace('_', '-')}`", f"`{kind}`", default, help, change])
    head = ["Flag", "Type", "Default", "Meaning", f"In `{parent}.py`"]
    rows = rows if parent else [row[:-1] for row in rows]
    gone = [f"`--{flag.replace('_', '-')}`" for flag in known if flag not in flags(root, name)]
    return table(head[: len(rows[0])], rows) + (f"\n\nOf `{parent}.py` it has not: {', '.join(gone)}." if gone else "")


# Diffs


@cache
def diff(root, parent, name):
    """The whole of two files as ("=", old, new), ("-", old, None) or ("+", None, new), in line numbers from 1 on."""
    command = ["git", "diff", "--no-index", "--no-ext-diff", "--no-color", "--minimal", "-U1000000"]
    paths = [root / f"cleanrl/{stem}.py" for stem in (parent, name)]
    output = subprocess.run([*command, *paths], capture_output=True, text=True, encoding="utf-8").stdout
    rows, old, new = [], 0, 0
    for line in output.split("\n@@", 1)[-1].split("\n")[1:]:
        if line[:1] in (" ", "-", "+"):
            old, new = old + (line[0] != "+"), new + (line[0] != "-")
            rows.append({" ": ("=", old, new), "-": ("-", old, None), "+": ("+", None, new)}[line[0]])
    return rows


def changed(root, name):
    """How many lines a file adds to its parent and takes away."""
    kinds = [kind for kind, _, _ in diff(root, lineage(root)[name]["parent"], name)]
    return kinds.count("+"), kinds.count("-")


def changes(root, name):
    """The changes of the code of a file to its parent, as `diff` prints them; no docstring, no lines that both have."""
    parent, end = lineage(root)[name]["parent"], ast.parse(source(root, name)).body[0].end_lineno
    texts, lines, reached, last = [source(root, stem).split("\n") for stem in (parent, name)], [], 0, "="
    for kind, old, new in diff(root, parent, name):
        reached = new or reached
        if reached > end and kind != "=":
            lines += [""] if last == "=" and lines else []
            lines.append(f"{kind}{texts[0][old - 1] if kind == '-' else texts[1][new - 1]}")
        last = kind
    return "```diff\n" + "\n".join(lines) + "\n```"


def word_marks(old, new):
    """For two lists of lines, line by line the spans that differ, if there is much that does not."""
    words = [[[match.span() for match in re.finditer(r"\w+|\s+|.", line)] for line in lines] for lines in (old, new)]
    flat = [
        [(i, span, lines[i][slice(*span)]) for i, spans in enumerate(side) for span in spans]
        for side, lines in zip(words, (old, new))
    ]
    matcher = difflib.SequenceMatcher(None, *([word for _, _, word in side] for side in flat), autojunk=False)
    marks = [[[] for _ in lines] for lines in (old, new)]
    if max(map(len, flat)) > 1500 or matcher.ratio() < 0.5:
        return marks
    for kind, *bounds in matcher.get_opcodes():
        for side, (start, stop), lines in zip(flat, (bounds[:2], bounds[2:]), marks):
            for i, span, word in side[start:stop] if kind != "equal" else ():
                if not word.isspace():
                    lines[i].append(span)
    return [[joined(spans, line) for spans, line in zip(side, lines)] for side, lines in zip(marks, (old, new))]


def joined(spans, line):
    """Spans, those made one that only space separates."""
    merged = []
    for start, stop in spans:
        if merged and not line[merged[-1][1] : start].strip():
            start = merged.pop()[0]
        merged.append((start, stop))
    return merged


def diff_html(root, parent, name, link, excerpt=False):
    """Both files side by side, changes in blocks, what they share folded but for some lines around a change.

    An excerpt has the changes of the code alone: no header, no docstring, nothing to unfold.
    """
    rows = diff(root, parent, name)
    if excerpt:
        end = ast.parse(source(root, name)).body[0].end_lineno
        rows = rows[next(i for i, (_, _, new) in enumerate(rows) if new == end) + 1 :]
    texts = [source(root, stem).split("\n") for stem in (parent, name)]
    lines = [colours(source(root, stem), "python") for stem in (parent, name)]
    plain = [lines_html(source(root, stem), "python") for stem in (parent, name)]
    blocks, start = [], 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or (rows[i][0] == "=") != (rows[start][0] == "="):
            blocks.append(rows[start:i])
            start = i

    targets = [link(stem) for stem in (parent, name)]

    def cells(numbers, side, marks=None):
        return "".join(
            f'<span class="line"><a href="{targets[side]}#L{n}">{n}</a>'
            f"{line_html(lines[side][n - 1], marks[i]) if marks and marks[i] else plain[side][n - 1]}\n</span>"
            for i, n in enumerate(numbers)
        )

    def pair(old, new, kind, marks=(None, None)):
        left, right = (cells(numbers, side, marks[side]) for side, numbers in enumerate((old, new)))
        return f'<div class="{kind}"><pre class="old">{left}</pre><pre class="new">{right}</pre></div>'

    parts = []
    for i, block in enumerate(blocks):
        old, new = ([row[side] for row in block if row[side]] for side in (1, 2))
        if block[0][0] != "=":
            marks = word_marks([texts[0][n - 1] for n in old], [texts[1][n - 1] for n in new]) if old and new else None
            parts.append(pair(old, new, "changed", marks or (None, None)))
            continue
        around = 2 if excerpt else CONTEXT
        before, after = (around if i else 0), (around if i + 1 < len(blocks) else 0)
        if len(block) <= before + after + 3:
            parts.append(pair(old, new, "same"))
            continue
        stop = len(block) - after
        parts.append(pair(old[:before], new[:before], "same") if before else "")
        if excerpt:
            parts.append('<div class="gap"></div>' if before and after else "")
        else:
            inner = f"<pre>{cells(new[before:stop], 1)}</pre>"
            parts.append(f"<details><summary>{stop - before} lines that both have</summary>{inner}</details>")
        parts.append(pair(old[stop:], new[stop:], "same") if after else "")
    head = "".join(f'<div><a href="{link(stem)}">{stem}.py</a></div>' for stem in (parent, name))
    kind = "diff excerpt" if excerpt else "diff"
    return f'<div class="highlight {kind}"><div class="head">{head}</div>{"".join(parts)}</div>'


# Descent


def tree(root, link, diff_link):
    """All files as a nested list, a file under its parent."""
    children = defaultdict(list)
    for name, entry in lineage(root).items():
        children[entry.get("parent")].append(name)

    def items(parent, depth):
        for name in children[parent]:
            what = f"[`{name}.py`]({link(name)})"
            if parent:
                plus, minus = changed(root, name)
                what += f" [+{plus} −{minus}]({diff_link(name)})"
            else:
                what += f" {len(source(root, name).splitlines())} lines"
            yield f"{'    ' * depth}- {what}"
            yield from items(name, depth + 1)

    return "\n".join(items(None, 0))
