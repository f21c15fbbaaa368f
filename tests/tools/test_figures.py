"""Figures and tables for papers: what the command writes, with the page's numbers, and that nothing overlaps."""

import csv
import json
import re
import struct
import sys
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from cleanrl_utils import report
from cleanrl_utils.runs import figure, tables
from helpers.files import ROOT, require
from helpers.synthetic_runs import write_run

RETURN = "charts/episodic_return"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two algorithms with four seeds in two environments, and a third with one."""
    require("matplotlib")
    folder, rng = tmp_path_factory.mktemp("figures") / "runs", np.random.default_rng(0)
    for seed in (1, 2, 3, 4):
        for env_id, most in ("CartPole-v1", 500), ("Other_Env-v0", 20):
            for name, part in ("ppo", 1.0), ("dqn", 0.5):
                rise = np.linspace(0.1, part, 80) * most * rng.uniform(0.7, 1.3)
                write_run(folder, env_id, seed, np.minimum(most, rise + rng.normal(size=80)), name)
    write_run(folder, "CartPole-v1", 1, np.full(80, 100.0), "c51")
    write_run(folder, "CartPole-v1", 2, np.full(80, 100.0), "c51", ended=False)
    return folder


def call(monkeypatch, capsys, *words, code=0):
    """Run the command in this process; returns what it has printed, and said of errors."""
    monkeypatch.setattr(sys, "argv", ["report", *map(str, words)])
    try:
        report.main()
    except SystemExit as end:
        assert end.code == code, capsys.readouterr().err
    else:
        assert code == 0
    return capsys.readouterr()


def test_files_of_every_kind(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = [word for kind in ("pdf", "svg", "png") for word in ("--figure", f"curves.{kind}")]
    both = ["--labels", "ppo=PPO", "--title", "My <b>title", "--width", "5", "--caption"]
    before = {}
    for _ in range(2):
        said = call(monkeypatch, capsys, runs, *files, "--table", "a.tex", "--table", "a.md", "--table", "a.csv", *both)
        data = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        assert data == (before or data), "the same runs give the same bytes"
        before = data
    assert sorted(data) == ["a.csv", "a.md", "a.tex", "curves.pdf", "curves.png", "curves.svg"], "and no page"
    assert data["curves.pdf"].startswith(b"%PDF") and b"/Type3" not in data["curves.pdf"]
    tree = ElementTree.fromstring(data["curves.svg"])
    assert tree.tag.endswith("svg") and "My <b>title" in "".join(tree.itertext())
    assert struct.unpack(">I", data["curves.png"][16:20])[0] == 5 * 300
    assert "curves.pdf, curves.svg, curves.png: 2 panels, 3 lines. Caption:" in said.out
    for words in (
        "over 2 to 4 runs of each line",
        "95 % interval",
        "One or two runs have no",
        "1 of the runs had not ended",
    ):
        assert words in said.out and words.encode() in data["curves.png"]


def test_numbers_are_those_of_the_page(runs, tmp_path, monkeypatch, capsys):
    drawn = []
    monkeypatch.setattr(figure, "draw", lambda panels, paths, *rest: drawn.append(panels))
    call(monkeypatch, capsys, runs, "--figure", "x.pdf", "-o", tmp_path / "page", "--exp-names", "ppo", "dqn")
    text = (tmp_path / "page/index.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    bands = [data["numbers"][key] for key in data["numbers"] if key.startswith(f"band {RETURN} steps ")]
    (panels,) = drawn
    assert [(panel.title, panel.end) for panel in panels] == [("CartPole-v1", 1000), ("Other_Env-v0", 1000)]
    lines = [line for panel in panels for line in panel.lines]
    assert [line.name for line in lines] == ["dqn", "ppo"] * 2 and len(bands) == 4
    for line, band in zip(lines, bands):
        for ours, theirs in zip((line.low, line.high), np.array(band, dtype=float)):
            there = ~np.isnan(ours)
            assert there.sum() > 150
            np.testing.assert_allclose(ours[there], theirs[there], rtol=1e-4, atol=1e-4)
    assert max(np.nanmax(line.high) for line in panels[0].lines) <= 500, "CartPole gives no more"
    assert np.nanmax(panels[0].lines[1].y) > 400


def test_settings_metrics_and_time(tmp_path, monkeypatch, capsys):
    drawn = []
    monkeypatch.setattr(figure, "draw", lambda panels, paths, *rest: drawn.append(panels))
    for total in 1000, 40_000_000:
        for seed in (1, 2, 3):
            write_run(tmp_path, "CartPole-v1", seed, np.arange(50.0), "ppo", total=total)
    flags = ["--metrics", "charts/SPS", "--figure", "x.svg"]
    said = call(monkeypatch, capsys, tmp_path, *flags)
    write_run(tmp_path, "CartPole-v1", 4, [], "ppo", ended=False)
    assert "Left out: 1 run without a curve." in call(monkeypatch, capsys, tmp_path, "--figure", "x.svg").out
    assert "Left out" not in said.out and drawn.pop()
    call(monkeypatch, capsys, tmp_path, *flags, "--over", "time")
    call(monkeypatch, capsys, tmp_path, "--figure", "x.svg", "--smooth", "20")
    call(monkeypatch, capsys, tmp_path, "--figure", "x.svg", "--steps", "1000")
    assert [[line.name for line in part.lines] for part in drawn.pop()] == [["ppo"]], (
        "no other steps, no need to name them"
    )
    assert "over 3 runs (seeds 1 to 3) of each line" in said.out
    steps, times, smooth = drawn
    assert np.nanmax(smooth[0].lines[0].y) < 47 < 48 < np.nanmax(steps[0].lines[0].y) <= 49
    assert [panel.y_label for panel in steps] == ["Episodic return", "charts/SPS"]
    assert [line.name for line in steps[0].lines] == ["ppo · 1000 steps", "ppo · 40M steps"]
    assert times[0].x_label == "Training time (seconds)" and times[0].end == pytest.approx(100)


def test_aggregates_are_those_of_the_page(runs, tmp_path, monkeypatch, capsys):
    drawn = []
    monkeypatch.setattr(figure, "draw", lambda panels, paths, *rest: drawn.append(panels))
    only = ["--exp-names", "ppo", "dqn", "--labels", "ppo=PPO"]
    said = call(monkeypatch, capsys, runs, "--aggregates", "x.pdf", "-o", tmp_path / "page", *only)
    data = json.loads(re.search(r'id="data">(.*?)</script>', (tmp_path / "page/index.html").read_text())[1])
    numbers = {key.split()[0]: value for key, value in data["numbers"].items() if key.startswith(("better", "iqm"))}
    middle, courses, profiles, better = drawn[0]
    assert [row.name for row in middle.lines] == [line.name for line in profiles.lines] == ["PPO", "dqn"]
    (row,) = better.lines
    assert row.name == "dqn" and better.x_label == "P(better than PPO)" and row.point < 0.5
    assert [row.point, row.low, row.high] == pytest.approx(numbers["better"], rel=1e-4)
    assert any([row.point, row.low, row.high] == pytest.approx(numbers["iqm"], rel=1e-4) for row in middle.lines)
    assert courses.lines[0].y[-1] > courses.lines[0].y[0] and courses.end == 100
    for words in (
        "2 algorithms over 2 environments (CartPole-v1, Other_Env-v0), 4 runs each",
        "one of PPO",
        "0 is the return",
    ):
        assert words in said.out


def test_order_and_labels(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    call(monkeypatch, capsys, runs, "--labels", "ppo=PPO", "dqn=DQN_&", "--table", "a.tex", "--table", "a.md")
    text, rows = Path("a.tex").read_text(), Path("a.md").read_text().splitlines()
    assert rows[0] == "| Environment | PPO | DQN_& | c51 |" and len({row.count("|") for row in rows[:4]}) == 1
    assert re.fullmatch(r"\| CartPole-v1 \| \*\*\d+\.\d\*\* \[[\d.]+, [\d.]+\] \| [^|]* \| 100\.0 n=1 \|", rows[2]), (
        rows[2]
    )
    assert (
        rows[3].endswith("| – |") and "4 runs if not said otherwise" in rows[-1] and "1 that had not ended" in rows[-1]
    )
    assert r"Environment & PPO & DQN\_\& & c51 \\" in text and r"Other\_Env-v0 & $\mathbf{" in text and "95 \\%" in text
    body = text[text.index("toprule") : text.index("bottomrule")]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in body.splitlines() if line.endswith(r"\\")} == {3}
    assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")
    (begin,) = re.findall(r"\\begin\{tabular\}\{(\w+)\}", text)
    assert begin == "lrrr"


def row(env_id, algorithm, score, runs=3, steps=1000):
    return {
        "env_id": env_id,
        "algorithm": algorithm,
        "steps": steps,
        "runs": runs,
        "score": score,
        "low": score,
        "high": 9,
    }


def test_tables():
    many = [row("A", f"algo{i}", 1.0 * i) for i in range(7)]
    lines = tables.markdown(many, "x").splitlines()
    assert lines[0] == "| Environment | Algorithm | Score | Runs | Steps |" and len(lines) == 11
    assert lines[8] == "| A | algo6 | **6.00** [6.00, 9.00] | 3 | 1,000 |"
    two = [row("A", "x", 1.0, steps=1_100_000), row("A", "x", 2.0, steps=40_000_000), row("B|C", "x", 7.001)]
    text = tables.markdown([*two, row("B|C", "y", 7.0, 5)], "x")
    for line in (
        "| A (1.1M steps) | 1.00 [1.00, 9.00] | – |",
        "| B\\|C | **7.00** [7.00, 9.00] | **7.00** [7.00, 9.00] n=5 |",
    ):
        assert line in text.splitlines(), "as they are written, they are equal"
    assert tables.tex("50 % of a_b\\{~^}·") == r"50 \% of a\_b\textbackslash{}\{\textasciitilde{}\^{}\}$\cdot$"
    assert [tables.score_texts(row("A", "x", score))[0] for score in (12345.6, -92.66, 0.1234)] == [
        "12346",
        "-92.66",
        "0.12",
    ]


def panel(title, names, end=1_000_000):
    x = np.linspace(0, end, 50)
    curve = [figure.Line(name, x, x * i, x * i - end, x * i + end) for i, name in enumerate(names, 1)]
    return figure.Panel(title, curve, end=end)


def shown_ticks(axis):
    """The numbers of an axis that are within its range."""
    low, high = sorted(axis.get_view_interval())
    return [text for place, text in zip(axis.get_ticklocs(), axis.get_ticklabels()) if low <= place <= high]


LONG = "ppo_continuous_action_isaacgym · 40M steps"


@pytest.mark.parametrize(
    "panels",
    [
        [panel("CartPole-v1", ["PPO", "DQN"])],
        [
            figure.Intervals("Interquartile mean", [figure.Row("PPO", 0.5, 0.2, 0.9)], "Normalised score"),
            *[panel("Performance profiles", ["PPO", LONG])] * 2,
            figure.Intervals(
                "Probability of improvement", [figure.Row("DQN", 0.5, 0.2, 0.9)], "P(better)", (0, 1), 0.5
            ),
        ],
        [panel(f"Env{i}-v1", ["ppo", LONG, "x" * 30, "rpo_continuous_action"]) for i in range(5)],
        [panel(f"proof_of_memory:A{'b' * i}-v1", [f"{LONG} {n}" for n in range(1, 2 * i + 4)]) for i in range(4)],
    ],
)
def test_nothing_overlaps(panels, tmp_path):
    """All letters are within the figure, and no title, label, legend or caption lies on another."""
    require("matplotlib")
    drawn = figure.draw(panels, [tmp_path / "x.png"], title="Some title", caption="A caption of some words. " * 12)
    drawn.canvas.draw()
    boxes = {}
    for i, axis in enumerate(drawn.axes):
        texts = [axis.title, axis.xaxis.label, axis.yaxis.label, *shown_ticks(axis.xaxis), *shown_ticks(axis.yaxis)]
        boxes |= {(i, n, text.get_text()): text.get_window_extent() for n, text in enumerate(texts) if text.get_text()}
        boxes |= {(i, "plot"): axis.get_window_extent()}
        if axis.get_legend():
            boxes[i, "legend"] = axis.get_legend().get_window_extent()
    boxes |= {text.get_text(): text.get_window_extent() for text in drawn.texts}
    boxes |= {f"legend {i}": legend.get_window_extent() for i, legend in enumerate(drawn.legends)}
    assert len(boxes) > 12 and (len(drawn.legends) == 1 or (0, "legend") in boxes)
    for name, box in boxes.items():
        inside = box.x0 >= -2 and box.y0 >= -2 and box.x1 <= drawn.bbox.x1 + 2 and box.y1 <= drawn.bbox.y1 + 2
        assert inside, f"{name} is cut off"
    for (one, a), (two, b) in combinations(boxes.items(), 2):
        wide, high = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert wide < 2 or high < 2, f"{one} lies on {two}"


def test_colours_are_those_of_the_page():
    text = (ROOT / "cleanrl_utils/pages/report/plot.js").read_text()
    assert list(figure.COLOURS) == json.loads(re.search(r"light: (\[.*?\])", text)[1])
    look = figure.looks([panel("A", ["ppo", "dqn"]), panel("B", ["sac"])])
    assert len({own["color"] for own in look.values()}) == 3, "one legend for all: each its own colour"
    look = figure.looks([panel(f"E{i}", [f"a{i}", f"b{i}"]) for i in range(9)] + [panel("X", list("abcdefghi"))])
    assert len({tuple(look[name].items()) for name in "abcdefghi"}) == 9 and look["a0"] != look["b0"]
    assert [figure.tick(value) for value in (0, 950, 20_000, 1.5e6, -200)] == ["0", "950", "20k", "1.5M", "\u2212200"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--figure", "x.jpg"], "--figure x.jpg: is no .pdf, .svg or .png"),
        (["--figure", "gone/x.pdf"], "--figure gone/x.pdf: there is no folder gone"),
        (["--table", "x.doc"], "--table x.doc: is no .tex, .md or .csv"),
        (["--figure", "x.pdf", "--env-ids", "CartPol-v1"], "--env-ids: no run has CartPol-v1, there are: CartPole-v1"),
        (["--table", "x.md", "--labels", "pop=PPO"], "--labels: no run has pop, there are: ppo"),
        (["--table", "x.md", "--labels", "dqn=ppo"], "--labels: ppo would be the name of several algorithms"),
        (["--figure", "x.pdf", "--env-ids", "Other_Env-v0", "--exp-names", "c51"], "no run has all that --env-ids"),
        (["--table", "x.md", "--steps", "1000", "900"], "--steps: no run has 900, there are: 1000"),
        (["--figure", "x.pdf", "--width", "-1"], "--columns, --smooth and --width"),
    ],
)
def test_wrong_usage(words, message, runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = call(monkeypatch, capsys, runs, *words, code=2)
    assert said.err.startswith(f"report: {message}") and len(said.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_nothing_to_draw(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "runs", "CartPole-v1", 1, np.zeros(0), ended=False)
    for flag, message in (
        ("--figure", "no run has a curve"),
        ("--table", "no run has ended with a score"),
        ("--aggregates", "no two algorithms have ended runs in the same environments"),
    ):
        said = call(
            monkeypatch, capsys, tmp_path / "runs", flag, tmp_path / ("x.md" if flag == "--table" else "x.pdf"), code=2
        )
        assert said.err.startswith(f"report: {flag}: {message}")
    (tmp_path / "folder.md").mkdir()
    write_run(tmp_path / "runs", "CartPole-v1", 2, np.zeros(9))
    said = call(monkeypatch, capsys, tmp_path / "runs", "--table", tmp_path / "folder.md", code=2)
    assert said.err == f"report: cannot write {tmp_path}/folder.md: Is a directory\n"
    monkeypatch.setattr(figure, "find_spec", lambda name: None)
    said = call(monkeypatch, capsys, tmp_path / "runs", "--figure", tmp_path / "x.pdf", code=2)
    assert said.err == 'report: --figure needs matplotlib: pip install -e ".[plot]"\n'


def test_csv_has_every_column(runs, tmp_path, monkeypatch, capsys):
    call(monkeypatch, capsys, runs, "--table", tmp_path / "a.csv", "--exp-names", "ppo")
    rows = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert [(row["env_id"], row["runs"], row["seeds"]) for row in rows] == [
        ("CartPole-v1", "4", "1 2 3 4"), ("Other_Env-v0", "4", "1 2 3 4")
    ]  # fmt: skip
