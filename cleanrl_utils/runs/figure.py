"""Learning curves for papers, with matplotlib: `draw(panels, ["curves.pdf"])`, in columns and with one legend for all.

Sizes are those of print: letters of 8 points in a figure that is as many inches wide as the page gives it. The colours
are those of the report's page (after Okabe and Ito, to be told apart with a colour vision deficiency), then dashes.
"""

import math
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from cleanrl_utils import fail

FORMATS = (".pdf", ".svg", ".png")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#C2559A", "#A87900", "#56B4E9", "#6B6B6B")  # as in plot.js
DASHES = ("solid", (0, (5, 1.6)), (0, (1.2, 1.6)), (0, (6, 1.6, 1.2, 1.6)))
TOGETHER = 8  # names that share one legend; of more, each panel has its own
INK, SOFT, GRID, GAP = "#1c2026", "#4a525c", "#e3e7ec", 0.06  # and inches between the parts
STYLE = {
    "font.size": 8,
    "axes.titlesize": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.columnspacing": 1.4,
    "pdf.fonttype": 42,  # letters that can be searched and that publishers accept
    "svg.hashsalt": "cleanrl",  # the same curves give the same file
}


@dataclass
class Line:
    name: str
    x: np.ndarray
    y: np.ndarray  # nan where there is nothing, also in the interval
    low: np.ndarray
    high: np.ndarray


@dataclass
class Panel:
    title: str
    lines: list
    x_label: str = "Environment steps"
    y_label: str = "Episodic return"
    end: float | None = None  # of the axis of x


@dataclass
class Row:
    name: str
    point: float
    low: float
    high: float


@dataclass
class Intervals:
    """Points with their intervals, one below the other."""

    title: str
    lines: list  # of rows
    x_label: str
    range: tuple | None = None
    mark: float | None = None  # where a line stands for no difference
    y_label: str = ""


def check(path, flag):
    """End with one line what could not be drawn."""
    if path.suffix not in FORMATS:
        fail(f"{flag} {path}: is no .pdf, .svg or .png")
    if not path.parent.is_dir():
        fail(f"{flag} {path}: there is no folder {path.parent}")
    if find_spec("matplotlib") is None:
        fail(f'{flag} needs matplotlib: pip install -e ".[plot]"')


def tick(value, _=None):
    """A number of an axis: 1500000 is 1.5M."""
    size = abs(value)
    scale, letter = next((pair for pair in ((1e9, "G"), (1e6, "M"), (1e4, "k")) if size >= pair[0]), (1, ""))
    return f"{value / (1e3 if letter == 'k' else scale):.6g}{letter}".replace("-", "\u2212")


def looks(panels):
    """A colour and a dash for each name: its own if all share a legend, else one that no neighbour has."""
    neighbours, look = defaultdict(set), {}
    for panel in panels:
        for line in panel.lines:
            neighbours[line.name] |= {other.name for other in panel.lines}
    names = set(neighbours) if len(neighbours) <= TOGETHER else None
    for name, near in neighbours.items():
        taken = {look.get(other) for other in names or near}
        free = (i for i in range(len(COLOURS) * len(DASHES)) if i not in taken)
        look[name] = next(free, len(COLOURS) * len(DASHES) - 1)
    return {
        name: {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i // len(COLOURS)]} for name, i in look.items()
    }


def columns_of(n):
    """How many panels beside each other look well."""
    return n if n < 4 else 2 if n == 4 else 3 if n < 13 else 4


def draw_intervals(axis, panel, look):
    for i, row in enumerate(panel.lines):
        own = look[row.name]["color"]
        axis.plot([row.low, row.high], [-i, -i], color=own, linewidth=5, alpha=0.35, solid_capstyle="butt")
        axis.plot(row.point, -i, "o", color=own, markersize=4.5, label=row.name)
    if panel.mark is not None:
        axis.axvline(panel.mark, color=SOFT, linewidth=0.8, linestyle=(0, (3, 3)), zorder=0)
    axis.set_ylim(0.6 - len(panel.lines), 0.6)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    if panel.range:
        axis.set_xlim(panel.range)


def draw_lines(axis, panel, look):
    for line in panel.lines:
        own, known = look[line.name], np.flatnonzero(~np.isnan(line.y))
        dot = {"marker": "o", "markersize": 3} if len(known) == 1 else {}
        band = ~np.isnan(line.low) & ~np.isnan(line.high)
        pale = 0.18 if len(panel.lines) < 5 else 0.1
        axis.fill_between(line.x, line.low, line.high, where=band, color=own["color"], alpha=pale, linewidth=0)
        axis.plot(line.x, line.y, label=line.name, linewidth=1.3, **own, **dot)
    if panel.end:
        axis.set_xlim(0, panel.end)


def draw_panel(axis, panel, look, outer):
    """One panel; `outer` says whether it has its labels, of x and of y."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_title(panel.title)
    axis.set(xlabel=panel.x_label if outer[0] else "", ylabel=panel.y_label if outer[1] else "")
    axis.xaxis.set_major_locator(
        MaxNLocator(5 if axis.bbox.width > 1.5 * axis.figure.dpi else 4, steps=[1, 2, 2.5, 5, 10])
    )
    axis.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    for one in (axis.xaxis, axis.yaxis):
        one.set_major_formatter(FuncFormatter(tick))
    (draw_lines if isinstance(panel, Panel) else draw_intervals)(axis, panel, look)


def draw_panels(axes, panels, columns, look):
    """Each panel in its place, with labels at the left and below, or where its neighbour has others."""
    for i, (axis, panel) in enumerate(zip(axes, panels)):
        below, left = panels[i + columns : i + columns + 1], panels[i - 1 : i] if i % columns else []
        last = len(look) > TOGETHER or [panel.x_label] != [other.x_label for other in below]
        draw_panel(axis, panel, look, (last, [panel.y_label] != [other.y_label for other in left]))
    for axis in axes[len(panels) :]:
        axis.remove()


def shrink_titles(figure):
    """Names that are wider than their panels get smaller letters."""
    renderer = figure.canvas.get_renderer()
    for axis in figure.axes:
        ratio = axis.get_window_extent().width * 1.08 / max(1, axis.title.get_window_extent(renderer).width)
        if ratio < 1:
            axis.title.set_fontsize(max(5, axis.title.get_fontsize() * ratio))


def own_legend(axis, width):
    """A legend below the panel's labels, at most so many inches wide; returns its height."""
    from matplotlib.transforms import ScaledTranslation

    below = axis.transAxes + ScaledTranslation(0, -0.42, axis.figure.dpi_scale_trans)
    style = {"fontsize": 6.5, "borderpad": 0, "borderaxespad": 0, "labelspacing": 0.35}
    legend = axis.legend(loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below, **style)
    ratio = width * axis.figure.dpi / legend.get_window_extent(axis.figure.canvas.get_renderer()).width
    for text in legend.get_texts() if ratio < 1 else []:
        text.set_fontsize(6.5 * max(0.5, ratio))
    return 0.125 * len(legend.get_texts())


def common_legend(figure, look):
    """One legend in as many columns as the figure is wide."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=name, linewidth=1.6, **own) for name, own in look.items()]
    for rows in range(1, len(handles) + 1):
        legend = figure.legend(handles=handles, loc="lower center", ncols=math.ceil(len(handles) / rows), borderpad=0.2)
        legend.set_in_layout(False)
        if legend.get_window_extent(figure.canvas.get_renderer()).width < figure.bbox.width or rows == len(handles):
            return legend
        legend.remove()


def caption_text(figure, words):
    """Words in lines that are as long as the figure is wide."""
    text, renderer = figure.text(0, 0, "", va="top", fontsize=8, linespacing=1.3), figure.canvas.get_renderer()
    for letters in range(int(20 * figure.get_figwidth()), 9, -1):
        text.set_text(textwrap.fill(words, letters))
        if text.get_window_extent(renderer).width < 0.96 * figure.bbox.width:
            break
    return text


def place_around(figure, height, legend, caption, title):
    """Give title, legend and caption their room above and below the panels, which are so many inches high."""
    renderer, parts = figure.canvas.get_renderer(), []
    for part in (caption, legend, title):
        size = part.get_window_extent(renderer).height / figure.dpi + GAP if part else 0
        parts.append(size)
    whole = height + sum(parts)
    figure.set_size_inches(figure.get_figwidth(), whole)
    if caption:
        caption.set_position((0.02, (parts[0] - GAP / 2) / whole))
    if legend:
        legend.set_bbox_to_anchor((0.5, parts[0] / whole))
    if title:
        title.set_position((0.5, 1 - GAP / whole))
    figure.align_ylabels()
    figure.get_layout_engine().set(rect=(0, sum(parts[:2]) / whole, 1, height / whole))


def draw(panels, paths, columns=0, width=0.0, title="", caption="", note=""):
    """Write the panels to files (.pdf, .svg, .png); `caption` is set below them, `note` is what a file says of itself.

    Returns the figure of matplotlib.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(columns or columns_of(len(panels)), len(panels))
    rows, look = -(-len(panels) // columns), looks(panels)
    width = width or (3.5 if columns == 1 else 2.4 * columns)
    height = rows * max(1.7, min(0.78 * width / columns, 2.6))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained", dpi=100)
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        draw_panels(axes, panels, columns, look)
        legend = common_legend(figure, look) if len(look) <= TOGETHER else None
        if not legend:
            heights = [own_legend(axis, 0.95 * width / columns) for axis in figure.axes]
            height += sum(max(heights[i : i + columns]) for i in range(0, len(heights), columns))
        parts = [
            caption_text(figure, caption) if caption else None,
            figure.text(0, 0, title, va="top", ha="center", fontsize=11, weight="bold") if title else None,
        ]
        place_around(figure, height, legend, *parts)
        figure.canvas.draw()
        shrink_titles(figure)
        for path in paths:
            save(figure, Path(path), title, note or caption)
    return figure


def save(figure, path, title, note):
    """Write the file, without the date, so that the same curves give the same bytes."""
    kind = path.suffix
    about = {".pdf": {"Subject": note, "CreationDate": None}, ".svg": {"Description": note, "Date": None}}
    metadata = about.get(kind, {"Description": note}) | ({"Title": title} if title else {})
    figure.savefig(path, dpi=300, metadata=metadata)
