r"""Tables of scores for papers: `write(rows, "scores.tex", caption)`, or .md, or .csv with every column.

Up to six algorithms stand side by side, a line for each environment; more of them have a line each. LaTeX needs
\usepackage{booktabs}.
"""

import csv
import math
from collections import Counter, defaultdict

from cleanrl_utils import fail
from cleanrl_utils.runs.figure import tick

FORMATS = (".tex", ".md", ".csv")
SIDE_BY_SIDE = 6
TEX = {c: f"\\{c}" for c in "&%$#_{}"} | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\^{}"}
TEX |= {"·": r"$\cdot$", "–": "--", "≠": r"$\neq$", "\u2212": "$-$", "<": "$<$", ">": "$>$"}


def check(path, flag):
    """End with one line what could not be written."""
    if path.suffix not in FORMATS:
        fail(f"{flag} {path}: is no .tex, .md or .csv")
    if not path.parent.is_dir():
        fail(f"{flag} {path}: there is no folder {path.parent}")


def plain(value):
    """A value for people: numbers with two decimals, small ones with four digits, nothing for what is not known."""
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return ""
    return f"{value:.2f}" if value == 0 or abs(value) >= 1 else f"{value:.4g}"


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: plain(value) for key, value in row.items()} for row in rows)


def score_texts(row):
    """A score and its interval as text, with as many decimals as the largest of them bears: ("482.1", "[470, 493]")."""
    values = [value for value in (row["score"], row["low"], row["high"]) if math.isfinite(value)]
    size = max(map(abs, values), default=0)
    decimals = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 else 3
    texts = [f"{value:.{decimals}f}" for value in values] or ["–"]
    return texts[0], f"[{texts[1]}, {texts[2]}]" if len(texts) == 3 else ""


def best_rows(rows):
    """The rows whose means are, as they are written, the highest of their environment and number of steps."""
    groups, best = defaultdict(list), []
    for row in rows:
        if math.isfinite(row["score"]):
            groups[row["env_id"], row["steps"]].append(row)
    for group in (group for group in groups.values() if len(group) > 1):
        highest = score_texts(max(group, key=lambda row: row["score"]))[0]
        best += [row for row in group if score_texts(row)[0] == highest]
    return best


def grid(rows, cell, text):
    """The lines of a table, the first with its headings. `cell(row)` is a score, `text` makes any other text fit."""
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    if len(names) > SIDE_BY_SIDE:
        head = ["Environment", "Algorithm", "Score", "Runs", "Steps"]
        cells = [(text(row["env_id"]), text(row["algorithm"]), cell(row), row["runs"], row["steps"]) for row in rows]
        return [head, *([*words, f"{n}", f"{steps:,}"] for *words, n, steps in cells)]
    lines, several = defaultdict(dict), defaultdict(set)
    for row in rows:
        lines[row["env_id"], row["steps"]][row["algorithm"]] = row
        several[row["env_id"]].add(row["steps"])
    table = [["Environment", *map(text, names)]]
    for (env_id, steps), own in lines.items():
        name = f"{env_id} ({tick(steps)} steps)" if len(several[env_id]) > 1 else env_id
        table.append([text(name), *(cell(own[name]) if name in own else text("–") for name in names)])
    return table


def usual_runs(rows):
    """The number of runs that most scores have."""
    return Counter(row["runs"] for row in rows).most_common(1)[0][0]


def runs_note(row, rows):
    """How many runs a score has, where that is another number than usual and has no column."""
    own_column = len({row["algorithm"] for row in rows}) > SIDE_BY_SIDE
    return "" if own_column or row["runs"] == usual_runs(rows) else f"n={row['runs']}"


def markdown(rows, caption):
    best = best_rows(rows)

    def text(words):
        return words.replace("|", "\\|").replace("<", "&lt;")

    def cell(row):
        score, interval = score_texts(row)
        score = f"**{score}**" if row in best else score
        return " ".join(filter(None, [score, interval, runs_note(row, rows)]))

    head, *lines = grid(rows, cell, text)
    marks = ["---"] + ["---:" if name != "Algorithm" else "---" for name in head[1:]]
    table = "\n".join(f"| {' | '.join(line)} |" for line in (head, marks, *lines))
    return f"{table}\n\n{caption}\n"


def tex(words):
    """Text as LaTeX has it."""
    return "".join(TEX.get(letter, letter) for letter in words)


def latex(rows, caption):
    best = best_rows(rows)

    def cell(row):
        score, interval = score_texts(row)
        score = rf"$\mathbf{{{score}}}$" if row in best else "--" if score == "–" else f"${score}$"
        interval = rf"{{\footnotesize ${interval}$}}" if interval else ""
        note = rf"{{\footnotesize {note}}}" if (note := runs_note(row, rows)) else ""
        return " ".join(filter(None, [score, interval, note]))

    head, *lines = grid(rows, cell, tex)
    columns = "".join("l" if name in ("Environment", "Algorithm") else "r" for name in head)
    body = "\n".join(f"    {' & '.join(line)} \\\\" for line in lines)
    return rf"""% \usepackage{{booktabs}}
\begin{{table}}
  \centering
  \caption{{{tex(caption)}}}
  \label{{tab:scores}}
  \begin{{tabular}}{{{columns}}}
    \toprule
    {" & ".join(head)} \\
    \midrule
{body}
    \bottomrule
  \end{{tabular}}
\end{{table}}
"""


def write(rows, path, caption):
    """Rows of scores as a table for a paper, in the format that the name of the file ends with."""
    if path.suffix == ".csv":
        return write_csv(path, rows)
    path.write_text((latex if path.suffix == ".tex" else markdown)(rows, caption), encoding="utf-8")
