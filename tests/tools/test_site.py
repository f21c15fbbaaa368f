"""The site: what is generated is up to date, the pages are whole, and a browser shows them without a complaint."""

import csv
import filecmp
import functools
import http.server
import re
import shutil
import socket
import subprocess
import threading
from dataclasses import fields
from pathlib import Path

import pytest

from cleanrl_utils import site
from cleanrl_utils.pages import facts
from cleanrl_utils.runs import results
from helpers import browser
from helpers.browser import chromium  # noqa: F401
from helpers.files import COMMON_METRICS, FILES, LINEAGE, METRICS, ROOT, each, family, require, script


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The whole site, built strictly."""
    require("material", "latex2mathml")
    output = tmp_path_factory.mktemp("built") / "site"
    assert site.build(ROOT, output) == []
    return output


@pytest.fixture(scope="module")
def address(built):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(built)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A small repository, in a folder with a name that it uses itself: two files, two pages, some results."""
    monkeypatch.setattr(site, "add_report", lambda root, made: [])  # it has tests of its own
    tmp_path = tmp_path / "docs/clone"
    for folder in ("cleanrl", "docs/rl-algorithms", "benchmark/results"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("ppo", "ppo_atari"):
        shutil.copy(script(name), tmp_path / "cleanrl")
    (tmp_path / "cleanrl/lineage.toml").write_text('[ppo]\n[ppo_atari]\nparent = "ppo"\n')
    for name in ("ppo.csv", "ppo_atari.csv"):
        shutil.copy(ROOT / "benchmark/results" / name, tmp_path / "benchmark/results")
    shutil.copy(ROOT / "benchmark/reference_scores.csv", tmp_path / "benchmark")
    page = "| [page](ppo.md) |\n"
    rows = [f"| [`{name}.py`](../../cleanrl/{name}.py) | PPO | all | | {page}" for name in ("ppo", "ppo_atari")]
    (tmp_path / "docs/rl-algorithms/overview.md").write_text("# Which\n\n" + "".join(rows))
    (tmp_path / "README.md").write_text("# Small\n")
    (tmp_path / "CONTRIBUTING.md").write_text("# How\n")
    (tmp_path / "docs/index.md").write_text(
        "# Home\n\n[PPO](rl-algorithms/ppo.md#overview), [how](../CONTRIBUTING.md)\n"
    )
    tags = ", ".join(f"`{tag}`" for tag in facts.metrics(ROOT, "ppo"))
    (tmp_path / "docs/rl-algorithms/ppo.md").write_text(
        "# PPO\n\n## Overview\n\n"
        'The [agent](../../cleanrl/ppo.py#L1 "class Agent(nn.Module)"), [diff](../../cleanrl/ppo_atari.py#diff).\n\n'
        f"## Explanation of the logged metrics\n\n| Metric | Meaning |\n|---|---|\n| {tags} | what it says |\n\n"
        "<!-- results: ppo.py -->\n<!-- /results -->\n"
    )
    (tmp_path / "mkdocs.yml").write_text(
        "site_name: Small\ntheme: {name: material, font: false}\nplugins: []\n"
        "markdown_extensions: [attr_list, md_in_html, tables]\nnav: [index.md, rl-algorithms/ppo.md]\n"
    )
    assert site.check(tmp_path, fix=True) == 0
    return tmp_path


def test_nothing_is_stale(capsys):
    assert site.check(ROOT) == 0, capsys.readouterr().out


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "message", "fixable"),
    [
        ("ppo.py#L", "ppo.py#L9", "stale", True),
        ("| 500.0 [500.0, 500.0]", "| 501.0 [500.0, 500.0]", "stale", True),
        ("490.0 ± 6.1", "300.0 ± 6.1", "stale", True),
        (' "class Agent(nn.Module)"', "", "no title", False),
        ("class Agent(nn.Module)", "self.", "longer piece", False),
        ("class Agent(nn.Module)", "class Nobody", "no line", False),
        ("cleanrl/ppo.py#L", "cleanrl/nobody.py#L", "no such file", False),
        ("<!-- results: ppo.py", "<!-- results: nobody.py", "no cleanrl/nobody.py", False),
        ("`losses/entropy`", "entropy", "ppo.py logs what is not explained: losses/entropy", False),
    ],
)
def test_check_finds_what_is_stale_or_wrong(small, capsys, old, new, message, fixable):
    page = small / "docs/rl-algorithms/ppo.md"
    right = page.read_text()
    replace(page, old, new)
    assert site.main(["check", "--root", str(small)]) == 1
    out = capsys.readouterr().out
    assert "docs/rl-algorithms/ppo.md:" in out and message in out
    assert site.main(["fix", "--root", str(small)]) == (0 if fixable else 1)
    assert (page.read_text() == right) == fixable


def test_a_moved_line_moves_the_link(small):
    number = re.search(r"ppo\.py#L(\d+)", (small / "docs/rl-algorithms/ppo.md").read_text())[1]
    lines = (small / "cleanrl/ppo.py").read_text().split("\n")
    assert "class Agent(nn.Module)" in lines[int(number) - 1]
    (small / "cleanrl/ppo.py").write_text("\n".join(["#", *lines]))
    assert site.check(small) == 1 and site.check(small, fix=True) == 0
    assert f"ppo.py#L{int(number) + 1} " in (small / "docs/rl-algorithms/ppo.md").read_text()


def test_commands_and_links_in_code_are_left_alone(small):
    page = small / "docs/rl-algorithms/ppo.md"
    block = "<!-- results: dqn.py -->\n<!-- /results -->"
    page.write_text(page.read_text() + f"\n```\n[x](../../cleanrl/ppo.py#L7)\n{block}\n```\n")
    assert site.check(small) == 0


def build(root):
    require("material", "latex2mathml")
    for cached in (facts.lineage, facts.algorithms, facts.source, facts.flags, facts.metrics):
        cached.cache_clear()
    return site.build(root, root / "site")


def test_a_build_follows_links_and_repeats_itself(small):
    page = small / "docs/rl-algorithms/ppo.md"
    assert build(small) == []
    (small / "site").rename(small / "first")
    assert build(small) == []
    names = [path.relative_to(small / "first") for path in (small / "first").rglob("*") if path.is_file()]
    same, different, missing = filecmp.cmpfiles(small / "first", small / "site", names, shallow=False)
    assert len(same) == len(names) and not different and not missing
    html = (small / "site/rl-algorithms/ppo/index.html").read_text()
    number = re.search(r"ppo\.py#L(\d+)", page.read_text())[1]
    assert f'href="../../source/ppo/#L{number}"' in html and 'href="../../source/diff-ppo_atari/"' in html
    assert f'id="L{number}"' in (small / "site/source/ppo/index.html").read_text()
    page.write_text(page.read_text() + "\n[gone](#nowhere) [gone](../../cleanrl/ppo.py#L9999999)\n")
    problems = "\n".join(build(small))
    assert "#nowhere" in problems and "#L9999999" in problems


def test_a_build_is_strict(small):
    replace(small / "mkdocs.yml", "index.md,", "index.md, missing.md,")
    assert "missing.md" in "\n".join(build(small))


def test_a_written_page_is_not_replaced(small):
    (small / "docs/rl-algorithms/files.md").write_text("# Mine\n")
    with pytest.raises(FileExistsError, match="rl-algorithms/files.md"):
        build(small)


def test_formulas_are_mathml(small):
    """A block and words in a sentence; what is code stays as it is, and what cannot be read is named with its line."""
    page = small / "docs/rl-algorithms/ppo.md"
    right = page.read_text()
    lines = ["", "```math", r"\begin{split}", r"L &= \operatorname{clip}(\rho_t, -1, 1) \\", r"x &< \frac{1}{2}"]
    lines += [r"\end{split}", "```", "", r"With $`\rho_t`$ here.", "", "```bash", "echo $`date`$", "```", ""]
    page.write_text(right + "\n".join(lines))
    assert build(small) == []
    html = (small / "site/rl-algorithms/ppo/index.html").read_text()
    (block,) = re.findall(r'<div class="formula">(.*?)</div>', html, re.S)
    assert block.startswith('<math display="block">') and block.count("<mtr>") == 2 and "<mi>clip</mi>" in block
    assert "&#x0003C;" in block and "<mfrac>" in block and "\\" not in block and "http" not in block
    assert re.search(r"With <math[^>]*><mrow><msub>.*?</math> here\.", html)
    assert "$`" not in re.sub(r"<pre.*?</pre>", "", html, flags=re.S) and "date" in html
    wrong = [r"\nosuch{x}", r"a &= b", r"\frac{1", r"\begin{nothing} x", r"a \\ b"]
    page.write_text(right + "".join(f"Not $`{tex}`$ here.\n" for tex in wrong))
    lines = range(right.count("\n") + 1, right.count("\n") + 1 + len(wrong))
    problems = build(small)
    for line, problem in zip(lines, problems, strict=True):
        assert problem.startswith(f"docs/rl-algorithms/ppo.md:{line}: formula: "), problem
    assert "nosuch is not known" in problems[0] and "braces" in problems[2]


def test_a_report_that_fails_is_heard_of(tmp_path):
    assert "not found" in "\n".join(site.add_report(tmp_path, tmp_path / "site"))


def test_foreign_requests_are_found(tmp_path):
    (tmp_path / "index.html").write_text(
        '<a href="https://a.example">x</a><script src="https://b.example/x.js"></script>'
    )
    assert [what for _, what in site.broken_links(tmp_path)] == ["asks another host for https://b.example/x.js"]


@pytest.mark.parametrize(
    "argv",
    [
        ["check", "--root", "/nowhere"],
        ["build", "-o", str(ROOT / "docs")],
        ["build", "-o", str(ROOT / "README.md")],
        ["serve", "--port", "BUSY"],
        ["nothing"],
    ],
)
def test_wrong_usage(argv, capsys):
    require("material", "latex2mathml")
    with socket.socket() as busy, pytest.raises(SystemExit) as error:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        site.main([word.replace("BUSY", str(busy.getsockname()[1])) for word in argv])
    assert error.value.code == 2 and capsys.readouterr().err


# What is generated is true


@each()
def test_metrics_are_those_that_a_run_logs(name):
    expected = METRICS[family(name)] | COMMON_METRICS
    if name == "ppo_pettingzoo_ma_atari":
        expected = {tag for tag in expected if "episodic" not in tag} | {"charts/episodic_return-player1"}
    if name == "tqc_continuous_action_jax":  # as many critics as a flag says
        expected = {re.sub(r"qf\d", "qf{i}", tag) for tag in expected}
    found, text = set(facts.metrics(ROOT, name)), script(name).read_text()
    assert expected <= found
    for tag in found - expected:  # what it logs besides is in its text, but for what is put in there
        assert all(word in text for word in re.split(r"\{\w+\}|\d", tag.split("/")[-1])), tag


def test_flags_are_those_of_the_file():
    from cleanrl.dqn import Args

    flags = facts.flags(ROOT, "dqn")
    assert list(flags) == [field.name for field in fields(Args)]
    assert flags["learning_rate"] == ("float", "2.5e-4", "step size of the optimizer")
    table = facts.flags_table(ROOT, "c51")
    assert "| `--n-atoms` | `int` | `101` |" in table and "| not there |" in table
    assert "Of `dqn.py` it has not: `--tau`." in table


@each(lambda name: "parent" in LINEAGE[name])
def test_a_diff_holds_both_files(name):
    parent = LINEAGE[name]["parent"]
    rows = facts.diff(ROOT, parent, name)
    texts = [script(stem).read_text().split("\n")[:-1] for stem in (parent, name)]
    for side, text in ((1, texts[0]), (2, texts[1])):
        assert [row[side] for row in rows if row[side]] == [*range(1, len(text) + 1)]
    assert all(texts[0][old - 1] == texts[1][new - 1] for kind, old, new in rows if kind == "=")
    command = ["git", "diff", "--no-index", "--minimal", "--numstat", script(parent), script(name)]
    numbers = subprocess.run(command, capture_output=True, text=True).stdout.split()[:2]
    assert [*facts.changed(ROOT, name)] == [*map(int, numbers)]


def test_words_that_differ_are_marked():
    old, new = facts.word_marks(["x = f(a, b)", "y = 1"], ["x = f(a, c, d)", "y = 1"])
    assert old == [[(9, 10)], []] and new == [[(9, 13)], []]
    line = facts.colours("x = '<a>'", "python")[0]
    assert facts.line_html(line, [(5, 7)]).count("<mark>") == 1
    assert "&lt;" in facts.line_html(line) and "<a>" not in facts.line_html(line)


def test_the_benchmark_page_says_what_the_files_say():
    page = (ROOT / "docs/benchmark.md").read_text().split("<!-- results: all -->")[1]
    shown = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.split("\n") if line.startswith("| [`")]
    rows = [row for rows in facts.recorded(ROOT).values() for row in rows]
    files = Path(ROOT, "benchmark/results").glob("*.csv")
    assert len(shown) == len(rows) == sum(len(path.read_text().splitlines()) - 1 for path in files)
    for row in rows:
        assert f"\n{row['command']}  # seed" in page
        file, seeds = f"`{Path(row['file']).name}`", row["seeds"].split()
        steps = facts.short(row["steps"])
        if row["steps"] < (planned := results.planned_steps(row)):
            steps += f" of {facts.short(planned)}"
        place = [row["env_id"].split(":")[-1], steps]
        (cells,) = (cells for cells in shown if file in cells[0] and cells[1:3] == place)
        assert cells[3] == str(len(seeds))
        mean, *interval = cells[4].split(" ", 1)
        assert abs(float(mean) - float(row["score_mean"])) < 0.1 and bool(interval) == (len(seeds) > 2)
        if row["reference_mean"]:
            assert abs(float(cells[5].split()[0]) - float(row["reference_mean"])) < 0.1 and " after " not in cells[5]
        else:  # nothing is published for these steps: for others, and it says so, or not at all
            assert not cells[5] or " after " in cells[5]
    for name in FILES:
        assert f"`{name}.py`" in page


def test_curves_are_of_the_steps_of_their_row():
    for env_id, group in facts.curve_groups(ROOT, FILES).items():
        for name, row, grid, values in group:
            assert row["env_id"] == env_id and 0 < grid[-1] <= row["steps"] * 1.01
            assert len(values) <= len(row["seeds"].split())
    svg = facts.curves(ROOT, ["ppo_atari"], str)
    assert "1 seed<" in svg and "<polygon" not in svg  # one seed has no band
    assert ">episodic return</text>" in svg and ">environment steps</text>" in svg


def test_the_report_has_the_references_of_the_page(built):
    with (built / "benchmark/report/scores.csv").open() as file:
        shown = {(row["env_id"], row["algorithm"], int(row["steps"])): row["reference"] for row in csv.DictReader(file)}
    for row in (row for rows in facts.recorded(ROOT).values() for row in rows):
        planned, said = results.planned_steps(row), facts.reference(ROOT, row)
        own = said and "(" not in said and (" after " not in said or said.endswith(f" {facts.short(planned)}"))
        told = shown[row["env_id"], Path(row["file"]).stem, planned]
        assert bool(told) == bool(own), (row["file"], row["env_id"], said, told)
        assert not own or abs(float(told) - float(said.split()[0])) < 0.1


PARTS = "overview implemented-variants usage explanation-of-the-logged-metrics implementation-details".split()
ADDRESSES = {  # that others link to
    "": [],
    "get-started/installation": [],
    "get-started/basic-usage": [],
    "get-started/experiment-tracking": [],
    "get-started/examples": [],
    "get-started/benchmark-utility": [],
    "get-started/zoo": [],
    "get-started/from-cleanrl": ["what-is-kept", "flags", "metrics", "scores"],
    "get-started/related-projects": [],
    "advanced/hyperparameter-tuning": [],
    "advanced/resume-training": [],
    "cloud/installation": [],
    "cloud/submit-experiments": [],
    "contribution": [],
    "rl-algorithms/overview": ["which-algorithm-for-which-problem"],
    **{f"rl-algorithms/{page}": [*PARTS, "experiment-results"] for page in facts.by_page(ROOT)},
    **{f"source/{name}": ["flags", "source", "L1"] for name in FILES},
    **{f"source/diff-{name}": [] for name in FILES if "parent" in LINEAGE[name]},
}


def test_every_algorithm_has_formulas(built):
    for name in facts.by_page(ROOT):
        html = (built / f"rl-algorithms/{name}/index.html").read_text()
        assert '<div class="formula"><math display="block">' in html, name
        assert "```math" not in html and "$<code>" not in html and "data-part" not in html, name


def test_published_addresses(built):
    """Pages and parts that others link to keep their addresses."""
    for page, anchors in ADDRESSES.items():
        text = (built / page / "index.html").read_text()
        assert all(f'id="{anchor}"' in text for anchor in anchors), page
    for name, (_, _, page) in facts.algorithms(ROOT).items():
        assert f'id="{name}py"' in (built / f"rl-algorithms/{page}/index.html").read_text(), name
    ids = [re.findall(r'\sid="([^"]+)"', path.read_text()) for path in built.rglob("index.html")]
    assert all(len(found) == len(set(found)) for found in ids)


def test_the_changes_of_a_file():
    """All of the code's, in their order, none of the docstring's."""
    fence, *lines, end = facts.changes(ROOT, "rpo_continuous_action").split("\n")
    assert fence == "```diff" and end == "```" and "" in lines and all(line[:1] in "+-" for line in lines)
    names = "ppo_continuous_action", "rpo_continuous_action"
    parent, child = (script(name).read_text().split("\n") for name in names)
    for sign, text, other in (("-", parent, child), ("+", child, parent)):
        own = [line[1:] for line in lines if line.startswith(sign)]
        assert own == [line for line in text if line in own] and not any(line in other for line in own)
        code = "\n".join(text).split('"""', 2)[2].split("\n")
        assert own == [line for line in code if line not in other]


# In a browser

PAGES = ["", "rl-algorithms/ppo/", "source/diff-c51/", "source/ppo/#L100", "benchmark/", "rl-algorithms/metrics/"]
# What can be seen of the content only in part: it reaches beyond the window, or beyond a table of results that scrolls
# (but for the space at the end of a line that is broken)
BEYOND = """[...document.querySelectorAll(".md-content :not(.headerlink, .diff pre *)")].filter((element) => {
  for (let parent = element.parentElement; parent; parent = parent.parentElement) {
    if (getComputedStyle(parent).overflowX === "auto" && !parent.closest(".results")) return false;
  }
  const box = element.getBoundingClientRect(), table = element.matches(".results table");
  return box.width && (box.right > innerWidth + 1 || table && box.width > element.closest(".results").offsetWidth + 1);
}).map((element) => element.outerHTML.slice(0, 100))"""
# The lowest contrast of a word or a number of a line with what is behind it
CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const light = (colours) => {
    for (canvas.fillStyle of ["#fff", ...colours]) canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((v) =>
      v < 11 ? v / 3294 : ((v / 255 + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b + .05;
  };
  return Math.min(...[...document.querySelectorAll(".diff .line span, .diff .line > a")].slice(0, 900).map((word) => {
    const behind = [];
    for (let at = word; at; at = at.parentElement) behind.unshift(getComputedStyle(at).backgroundColor);
    const [a, b] = [light(behind), light([...behind, getComputedStyle(word).color])];
    return Math.max(a, b) / Math.min(a, b);
  }));
})()"""


def errors(page):
    """What went wrong but for pictures that the next page did not wait for."""
    return [error for error in page.errors if "ERR_ABORTED" not in error]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_in_a_browser(chromium, address, scheme, width):  # noqa: F811
    with browser.open_page(chromium, width=width, color_scheme=scheme) as page:
        for path in PAGES:
            page.goto(address + path)
            assert page.evaluate(BEYOND) == [], path
            shown = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", shown)[:3])) < 200) == (scheme == "dark"), path
        page.goto(address + "source/diff-c51/")
        columns = page.evaluate("[...document.querySelectorAll('.changed pre')].slice(0, 2).map(e => e.offsetLeft)")
        assert (columns[0] == columns[1]) == (width == 390)  # one below the other, or side by side
        assert page.evaluate(CONTRAST) >= 4.3
        page.locator(".diff summary").first.click()
        assert page.locator(".diff details pre").first.is_visible()
        assert errors(page) == []


def test_formulas_in_a_browser(chromium, address):  # noqa: F811
    """They are drawn, with equal signs below each other, asking nobody, and a phone scrolls those that are too wide."""
    with browser.open_page(chromium, width=390) as page:
        for name in ("ppo", "c51", "tqc"):
            page.goto(f"{address}rl-algorithms/{name}/")
            drawn = page.evaluate("[...document.querySelectorAll('.formula math')].map(e => e.clientHeight)")
            assert drawn and min(drawn) > 15, name
            assert page.evaluate(BEYOND) == [], name
        page.goto(f"{address}rl-algorithms/ppo/")
        signs = "[...document.querySelectorAll('.formula mtable')].map(table => [...table.children].map("
        signs += "row => row.children[1].querySelector('mo').getBoundingClientRect()))"
        for table in page.evaluate(f"{signs}.map(boxes => boxes.map(box => [box.left, box.top]))"):
            lefts, tops = zip(*table)
            assert max(lefts) - min(lefts) < 1 and list(tops) == sorted(tops) and len(set(tops)) == len(tops)
        assert page.evaluate("document.querySelector('.formula').scrollWidth") > 390
        assert errors(page) == []


def test_a_line_can_be_linked_to(chromium, address):  # noqa: F811
    with browser.open_page(chromium) as page:
        page.goto(address + "source/ppo/#L300")
        line = page.locator("#L300")
        page.wait_for_function("document.querySelector('#L300').getBoundingClientRect().top < innerHeight")
        assert script("ppo").read_text().split("\n")[299].strip() in line.inner_text()
        assert page.evaluate("document.querySelector('#L300').getBoundingClientRect().top") > 50  # not under the header


def test_colours_can_be_switched(chromium, address):  # noqa: F811
    with browser.open_page(chromium, color_scheme="light") as page:
        page.goto(address)
        page.locator("label[title='Dark colours']").click()
        assert page.evaluate("document.body.dataset.mdColorScheme") == "slate"


def test_search(chromium, address):  # noqa: F811
    """The page of an algorithm comes first, flags are found, and diffs are not in the way."""
    with browser.open_page(chromium) as page:
        page.goto(address)
        page.wait_for_load_state("networkidle")
        for words, first in (("ppo", "rl-algorithms/ppo/"), ("rpo-alpha", "rl-algorithms/rpo/")):
            page.locator(".md-search__input").first.fill(words[:-1])  # all but a key: "rpo-" alone would be no query
            page.locator(".md-search__input").first.press(words[-1])
            links = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
            page.wait_for_function(f"{links}[0]?.startsWith('{address}{first}')")
            assert not any("/source/diff-" in link for link in page.evaluate(links))
        assert errors(page) == []
