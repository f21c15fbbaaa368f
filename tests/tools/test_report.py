"""The report as its readers meet it: a page from run folders, in a real Chromium, opened as a file and offline."""

import csv
import json
import os
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from cleanrl_utils import report
from cleanrl_utils.runs import results, stats
from helpers import browser
from helpers.browser import chromium  # noqa: F401
from helpers.files import ROOT, require

RETURN = "charts/episodic_return"


def write_events(folder, series, begun=1_700_000_000.0):
    """An event file of scalars, tag -> (steps, values, seconds): records of one size, so that NumPy writes them."""
    parts = []
    for tag, (steps, values, seconds) in series.items():
        name = tag.encode()
        head = (
            bytes([0x2A, len(name) + 9, 0x0A, len(name) + 7, 0x0A, len(name)]) + name + b"\x15"
        )  # summary, value, tag
        kinds = [("wall_key", "u1"), ("wall", "<f8"), ("step_key", "u1"), ("step", "u1", 5), ("head", f"V{len(head)}")]
        event = np.dtype([*kinds, ("value", "<f4")])
        record = np.dtype([("length", "<u8"), ("check", "<u4"), ("event", event), ("check_too", "<u4")])
        rows = np.zeros(len(steps), record)
        rows["length"] = event.itemsize
        rows["event"]["wall_key"], rows["event"]["step_key"] = 0x09, 0x10
        rows["event"]["wall"], rows["event"]["value"] = begun + np.asarray(seconds), values
        for byte in range(5):  # a varint may have more bytes than it needs
            rows["event"]["step"][:, byte] = (np.asarray(steps) >> (7 * byte) & 0x7F) | (0x80 if byte < 4 else 0)
        rows["event"]["head"] = np.void(head)
        parts.append(rows.tobytes())
    first = b"\x09" + struct.pack("<d", begun) + b"\x1a\x0dbrain.Event:2"
    record = struct.pack("<Q", len(first)) + bytes(4) + first + bytes(4)
    (folder / "events.out.tfevents.1").write_bytes(record + b"".join(parts))


def write_run(
    root,
    env_id,
    name,
    seed,
    level,
    total=10_000,
    episodes=100,
    ended=True,
    sps=1000,
    noise=0.1,
    flat=False,
    losses=0,
    commit="0123456789abcdef",
    **flags,
):
    """A run folder as the files of cleanrl/ make it, with a curve that rises to about `level`, or is level."""
    folder = root / f"{env_id.replace('/', '-')}__{name}__{seed}__{1_700_000_000 + hash_of([flags, total, commit])}"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    last = total if ended else total // 2
    steps = np.linspace(last / max(episodes, 1), last, episodes).astype(int)
    values = level * (1 - np.exp(-5 * steps / total)) + level * noise * rng.normal(size=episodes)
    values = np.full(episodes, level) if flat else values
    speed = np.linspace(last / 20, last, 20).astype(int)
    series = {f"losses/loss_{i}": (steps, values, steps / sps) for i in range(losses)}
    series |= {RETURN: (steps, values, steps / sps), "charts/SPS": (speed, np.full(20, sps), speed / sps)}
    write_events(folder, series)
    args = {"exp_name": name, "seed": seed, "env_id": env_id, "total_timesteps": total, "learning_rate": 0.00025}
    (folder / "args.json").write_text(json.dumps(args | flags))
    (folder / "command.txt").write_text(f"python cleanrl/{name}.py --env-id {env_id} --seed {seed}\n")
    (folder / "commit.txt").write_text(f"{commit}\n")
    (folder / "packages.txt").write_text("numpy==2.0.0\ntorch==2.8.0\n")
    (folder / f"{name}.py").write_text("")
    return folder


def hash_of(flags):
    return sum(json.dumps(flags, default=str).encode())


def write_video(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = ["-f", "lavfi", "-i", "testsrc=duration=1:size=64x64:rate=10"]
    code = ["-c:v", "libx264", "-pix_fmt", "yuv420p"]
    require("imageio_ffmpeg")  # comes with MoviePy, and brings an ffmpeg
    import imageio_ffmpeg

    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", *picture, *code, "-y", str(path)]
    subprocess.run(command, check=True)


def build(*paths, output, code=0, flags=(), cwd=None):
    command = [sys.executable, "-m", "cleanrl_utils.report", *map(str, paths), "-o", str(output), *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, check=False)
    assert done.returncode == code, done.stderr[-3000:]
    return done


EVIL = "</script><img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Runs of two algorithms in two environments, one of them with videos, and the report of them."""
    folder = tmp_path_factory.mktemp("report")
    runs = folder / "runs"
    for seed in (1, 2, 3, 4):
        for env_id, level in ("CartPole-v1", 400), ("ALE/Odd:Game-v5", 40):
            write_run(runs, env_id, "ppo", seed, level * (1 + seed / 10), sps=1000 + seed)
            write_run(runs, env_id, "dqn", seed, level / 2, sps=300, learning_rate=0.001 if seed > 2 else 0.00025)
    write_run(runs, "Lonely-v0", "ppo", 1, 10, note=EVIL)
    write_run(runs, "CartPole-v1", "dqn", 9, 100, ended=False)
    write_run(runs, "CartPole-v1", "dqn", 10, 100, episodes=0)
    broken = write_run(runs, "CartPole-v1", "nan", 1, float("nan"))
    (broken / "commit.txt").unlink()
    (broken / "packages.txt").unlink()
    (film,) = runs.glob("CartPole-v1__ppo__1__*")
    for step in (1000, 5000, 9000):
        write_video(film / "videos" / f"step-{step}.mp4")
    done = build(
        runs,
        output=folder / "page",
        flags=["--title", "A <b>class</b>", "--metrics", "charts/SPS", "--normalise", "minmax"],
    )
    assert "page/index.html" in done.stdout.splitlines()[-1]
    return folder / "page"


def embedded(page):
    """The data of a page, and what is drawn by `code` in it."""
    text = (page / "index.html").read_text()
    start = text.index('id="data">') + len('id="data">')
    return json.loads(text[start : text.index("</script>", start)])


def view(page, site, hash=""):
    page.set_default_timeout(60_000)
    page.goto((site / "index.html").as_uri() + hash)
    page.wait_for_selector("#charts svg")


def x_range(page, title):
    svg = page.locator(f'figure[data-title="{title}"] svg[data-x]')
    return [float(word) for word in svg.get_attribute("data-x").split()]


def test_page_opens_as_a_file(site, chromium):  # noqa: F811
    with browser.open_page(chromium) as page:
        view(page, site)
        assert page.title() == "A <b>class</b>" == page.inner_text("h1")
        assert page.locator("#charts figure").count() == 3
        assert "20 runs" in page.inner_text("#summary") and "All 20 runs" in page.inner_text("#shown")
        chart = page.locator('figure[data-title="CartPole-v1"]')
        assert chart.locator("path.curve").count() == 2, "a run of nan only has no curve"
        assert chart.locator("path.band").count() == 2
        assert "6 runs, 1 not ended" in chart.inner_text()
        assert "One or two runs have no interval" in page.inner_text('figure[data-title="Lonely-v0"]')
        assert page.locator('figure[data-title="Lonely-v0"] path.band').count() == 0
        nameless = "[...document.querySelectorAll('button, svg[role], input, select, video')].filter((node) => !("
        nameless += "node.textContent.trim() || node.ariaLabel || node.labels?.length || node.controls)).length"
        assert page.evaluate(nameless) == 0, "what can be used has a name that can be read aloud"
        page.select_option("#x", "time")
        assert "seconds of training" in page.inner_text('figure[data-title="CartPole-v1"]')
        page.select_option("#metric", "charts/SPS")
        assert page.locator('figure[data-title="CartPole-v1"] path.curve').count() == 3
        assert page.errors == []


def test_zoom(site, chromium):  # noqa: F811
    with browser.open_page(chromium) as page:
        view(page, site)
        assert x_range(page, "CartPole-v1") == [0, 10_000]
        svg = page.locator('figure[data-title="CartPole-v1"] svg[data-x]')
        svg.scroll_into_view_if_needed()
        box = svg.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 100)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 104, steps=4)
        page.mouse.up()
        low, high = x_range(page, "CartPole-v1")
        assert 2000 < low < 4500 < 5000 < high < 7000
        svg.dblclick()
        assert x_range(page, "CartPole-v1") == [0, 10_000]
        page.keyboard.down("Control")
        page.mouse.wheel(0, -200)
        page.keyboard.up("Control")
        page.wait_for_function("() => document.querySelectorAll('svg[data-x]')[1].dataset.x !== '0 10000'")
        svg.press("0")
        assert x_range(page, "CartPole-v1") == [0, 10_000]
        svg.press("+")
        assert x_range(page, "CartPole-v1") == [2000, 8000]
        svg.press("ArrowRight")
        assert x_range(page, "CartPole-v1")[0] == pytest.approx(3200)
        page.locator('figure[data-title="CartPole-v1"]').get_by_label("show all").click()
        assert x_range(page, "CartPole-v1") == [0, 10_000]
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 100)
        assert "4 of 4 runs" in page.inner_text('figure[data-title="CartPole-v1"] .readout')
        assert page.errors == []


def test_filter_group_sort_search(site, chromium):  # noqa: F811
    with browser.open_page(chromium) as page:
        view(page, site)
        page.fill("#q", "learning_rate=1e-3")
        assert page.inner_text("#shown").startswith("4 of 20 runs")
        page.fill("#q", "dqn seed<=2 learning_rate!=0.001")
        assert page.inner_text("#shown").startswith("4 of 20 runs")
        page.fill("#q", "nothing-has-this-name")
        assert page.inner_text("#shown").startswith("0 of 20 runs") and page.locator("#charts figure").count() == 0
        page.fill("#q", "")
        page.locator("#env summary").click()
        page.get_by_label("ALE/Odd:Game-v5", exact=True).check()
        assert page.locator("#charts figure").count() == 1
        page.select_option("#by", "learning_rate")
        names = page.locator("#charts .legend button").all_inner_texts()
        assert [name.split(" 1")[0].split(" 2")[0].split(" 4")[0] for name in names] == [
            "dqn · learning_rate=0.00025", "dqn · learning_rate=0.001", "ppo · learning_rate=0.00025"
        ]  # fmt: skip
        assert "by=learning_rate" in page.url
        page.reload()
        page.wait_for_selector("#charts svg")
        assert page.locator("#charts .legend button").count() == 3, "the address holds the view"
        page.click("#clear")
        page.select_option("#sort", "score")
        assert page.locator("#charts h3").first.inner_text() == "CartPole-v1"
        page.locator("#run-table th", has_text="Score").get_by_role("button").click()
        scores = [
            float(text) for text in page.locator("#run-table tbody td:nth-child(5)").all_inner_texts() if text != "–"
        ]
        assert scores == sorted(scores, reverse=True)
        page.evaluate("scrollTo(0, 0)")  # charts are drawn when they come near the screen
        before = page.get_attribute('figure[data-title="CartPole-v1"] path.curve', "d")
        page.evaluate("() => { const knob = $('smooth'); knob.value = 20; knob.dispatchEvent(new Event('input')); }")
        page.wait_for_function("() => location.hash.includes('smooth=20')")
        assert page.get_attribute('figure[data-title="CartPole-v1"] path.curve', "d") != before
        page.check("#seeds")
        assert page.locator('figure[data-title="CartPole-v1"] path.curve').count() == 2 + 9
        assert page.errors == []


def test_trace_and_back(site, chromium):  # noqa: F811
    with browser.open_page(chromium) as page:
        view(page, site)
        chart = page.locator('figure[data-title="CartPole-v1"] svg[data-x]')
        chart.scroll_into_view_if_needed()
        x, y = chart.evaluate(  # a place on the second curve, in pixels of the screen
            """svg => { const path = svg.querySelectorAll("path.curve")[1];
            const there = path.getPointAtLength(path.getTotalLength() * 0.7).matrixTransform(svg.getScreenCTM());
            return [there.x, there.y]; }"""
        )
        page.mouse.click(x, y)
        panel = page.locator("#trace")
        assert panel.locator("h2").inner_text() == "ppo" and "group=CartPole-v1" in page.url
        panel.get_by_role("link", name="seed 2").click()
        page.wait_for_selector("#trace h2:has-text('CartPole-v1__ppo__2')")
        text = panel.inner_text()
        for part in (
            "python cleanrl/ppo.py --env-id CartPole-v1 --seed 2",
            "0123456789abcdef",
            "learning_rate",
            "0.00025",
        ):
            assert part in text
        panel.get_by_text("2 packages").click()
        assert "torch==2.8.0" in panel.inner_text()
        folder = panel.locator("dd a").get_attribute("href")
        assert (site / folder).resolve().is_dir() and (site / folder / "args.json").is_file()
        page.go_back()
        page.wait_for_selector("#trace h2:text-is('ppo')")
        page.go_back()
        page.wait_for_selector("#trace", state="hidden")
        page.go_forward()
        page.wait_for_selector("#trace h2:text-is('ppo')")
        page.keyboard.press("Escape")
        page.wait_for_selector("#trace", state="hidden")
        view(page, site, "#run=gone")
        assert "no run of that name" in panel.inner_text()
        (name,) = (run["id"] for run in embedded(site)["runs"] if run["env"] == "Lonely-v0")
        view(page, site, f"#run={name}")
        assert EVIL in panel.inner_text() and page.title() == "A <b>class</b>" and page.locator("img").count() == 0
        assert page.errors == []


def test_videos_play_at_stages(site, chromium):  # noqa: F811
    with browser.open_page(chromium) as page:
        (name,) = (run["id"] for run in embedded(site)["runs"] if run["videos"])
        view(page, site)
        markers = page.locator('figure[data-title="CartPole-v1"] path.marker')
        assert markers.count() == 3
        markers.nth(1).click()
        page.wait_for_selector(f"#trace h2:has-text('{name}')")
        pressed = page.locator('#trace .stages button[aria-pressed="true"]')
        assert pressed.all_inner_texts() == ["step 5000"]
        page.locator("#trace .stages button").first.click()
        assert pressed.all_inner_texts() == ["step 1000"] and "step-1000" in page.get_attribute("#trace video", "src")
        page.wait_for_function("() => document.querySelector('#trace video').currentTime > 0.2")
        assert page.evaluate("document.querySelector('#trace video').videoWidth") == 64
        assert [error for error in page.errors if "ERR_ABORTED" not in error] == []  # a player drops what it has read


def test_plots_are_exported(site, chromium):  # noqa: F811
    with browser.open_page(chromium, color_scheme="dark") as page:
        view(page, site)
        page.wait_for_selector("#aggregate-charts figure")
        for title, name in ("ALE/Odd:Game-v5", "ALE-Odd-Game-v5"), ("Interquartile mean", "Interquartile-mean"):
            figure = page.locator(f'figure[data-title="{title}"]')
            with page.expect_download() as download:
                figure.get_by_label("save as SVG").click()
            assert download.value.suggested_filename == f"{name}.svg"
            tree = ElementTree.fromstring(Path(download.value.path()).read_text())
            words = "".join(tree.itertext())
            assert (
                tree.tag == "{http://www.w3.org/2000/svg}svg" and title in words and "ppo" in words and "dqn" in words
            )
            assert "var(" not in Path(download.value.path()).read_text()
            with page.expect_download() as download:
                figure.get_by_label("save as PNG").click()
            data = Path(download.value.path()).read_bytes()
            assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", data[16:24])[0] == 3 * 480
        assert page.errors == []


def test_small_and_dark_screens(site, chromium):  # noqa: F811
    (name,) = (run["id"] for run in embedded(site)["runs"] if run["videos"])
    with browser.open_page(
        chromium, width=390, height=844, color_scheme="dark", is_mobile=True, has_touch=True
    ) as page:
        for hash in "", f"#run={name}":
            view(page, site, hash)
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.locator("#trace").bounding_box()["width"] == 390
        page.get_by_label("close").click()
        colour = "getComputedStyle(document.body).backgroundColor"
        dark = page.evaluate(colour)
        page.get_by_label("Switch between light and dark").click()
        assert page.evaluate(colour) != dark
        page.locator('figure[data-title="CartPole-v1"]').scroll_into_view_if_needed()
        box = page.locator('figure[data-title="CartPole-v1"] svg[data-x]').bounding_box()
        session = page.context.new_cdp_session(page)

        def fingers(kind, *places):
            points = [{"x": box["x"] + x, "y": box["y"] + 100, "id": i} for i, x in enumerate(places)]
            session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        fingers("touchStart", 140, 220)
        for spread in range(0, 60, 10):
            fingers("touchMove", 140 - spread, 220 + spread)
        fingers("touchEnd")
        low, high = x_range(page, "CartPole-v1")
        assert 0 < low < high < 10_000, "a pinch zooms"
        assert page.errors == []


def test_statistics_are_those_of_python(site, chromium):  # noqa: F811
    runs = results.load([site.parent / "runs"])

    def of(env_id, name):
        return sorted(
            (r for r in runs if (r.env_id, r.exp_name) == (env_id, name) and r.ended and len(r.returns)),
            key=lambda r: r.seed,
        )

    envs = ["ALE/Odd:Game-v5", "CartPole-v1"]
    scores = {name: [np.array([run.score for run in of(env, name)]) for env in envs] for name in ("ppo", "dqn")}
    with browser.open_page(chromium) as page:
        view(page, site)
        rows = page.locator("#score-table tbody tr").all_inner_texts()
        for env, own in zip(envs, scores["ppo"]):
            mean, low, high = stats.bootstrap([own], stats.mean_of_means)
            (row,) = (row.split("\t") for row in rows if row.startswith(f"{env}\tppo\t"))
            assert row[2:4] == page.evaluate("([m, l, h]) => [show(m), `[${show(l)}, ${show(h)}]`]", [mean, low, high])
        limits = [(min(map(min, pair)), max(map(max, pair))) for pair in zip(*scores.values())]
        normal = {n: [(x - low) / (high - low) for x, (low, high) in zip(scores[n], limits)] for n in scores}
        point, low, high = stats.bootstrap(normal["ppo"], stats.iqm)
        drawn = page.evaluate("[...cache].filter(([key]) => key.startsWith('iqm')).map(([, value]) => value)")
        assert any(value == pytest.approx([point, low, high], rel=1e-4) for value in drawn)
        better = stats.probability_of_improvement(normal["dqn"], normal["ppo"])
        (found,) = page.evaluate("[...cache].filter(([key]) => key.startsWith('better')).map(([, value]) => value)")
        assert found == pytest.approx(better, rel=1e-4)
        assert "P(a run scores" in page.inner_text("#aggregate-charts")
        python, own = page.evaluate(
            """() => { const key = [...cache.keys()].find((k) => k.startsWith("course 2")), given = cache.get(key);
            cache.delete(key);
            renderAggregates(shownRuns());
            return [given, cache.get(key)]; }"""
        )
        assert len(python) == 50 and np.ptp(np.array(python)[:, 0]) > 0.3
        np.testing.assert_allclose(np.array(python)[:, 0], np.array(own)[:, 0], rtol=2e-4, atol=1e-4)
        np.testing.assert_allclose(python, own, atol=0.15)

        # The mean that is drawn, against one computed from the episodes; and the browser's own intervals.
        bins = np.arange(201) * 50
        curves = []
        for run in of("CartPole-v1", "ppo"):
            at = np.digitize(run.steps, bins, right=True) - 1
            there = np.unique(at)
            curves.append(np.interp(np.arange(200), there, [run.returns[at == b].mean() for b in there], left=np.nan))
        code = """() => { const group = groupsOf(D.runs).find((g) => g.env === "CartPole-v1" && g.label === "ppo");
        return groupCurve(group.runs, { ...state, smooth: 0 }); }"""
        curve = page.evaluate(code)
        returns = np.concatenate([run.returns for run in runs if run.env_id == "CartPole-v1" and run.exp_name != "nan"])
        mean, low, high = stats.within(stats.bootstrap_curves(curves), returns.min(), returns.max())
        for ours, theirs in (curve["y"], mean), (curve["low"], low), (curve["high"], high):
            ours = np.array(ours, dtype=float)
            assert (np.isnan(ours) == np.isnan(theirs)).all()
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-3)
        python, own = page.evaluate(
            """() => { const key = [...cache.keys()].find((k) => k.startsWith("band charts/episodic_return steps 2"));
            const given = cache.get(key);
            cache.delete(key);
            groupsOf(D.runs).forEach((group) => groupCurve(group.runs, state));
            return [given, cache.get(key)]; }"""
        )
        for a, b in zip(python, own):
            np.testing.assert_allclose(np.array(a, dtype=float), np.array(b, dtype=float), rtol=2e-3, atol=1e-3)


def test_intervals_are_those_of_python(site, chromium):  # noqa: F811
    """What the browser computes for another view, in units of the width of Python's interval."""
    rng = np.random.default_rng(0)

    def near(ours, theirs):
        point, low, high = theirs
        assert ours[0] == pytest.approx(point)
        assert ours == pytest.approx(theirs, abs=0.06 * (high - low)), f"{ours} is not {theirs}"

    with browser.open_page(chromium) as page:
        view(page, site)
        for sizes in [3] * 20, [4, 5, 6, 8, 10]:
            for x in (rng.normal(size=size) for size in sizes):
                ours = page.evaluate("(x) => bootstrap([x], (groups) => mean(groups[0]))", x.tolist())
                near(ours, stats.bootstrap([x], stats.mean_of_means, reps=20_000))
        for seeds in 3, 5:
            x, y = rng.normal(size=(2, 4, seeds))
            near(page.evaluate("(x) => bootstrap(x, iqm)", x.tolist()), stats.bootstrap(x, stats.iqm, reps=20_000))
            for shift in 0, 9:  # at 9 every run wins
                code = "([x, y, trials]) => share(bootstrap([...x, ...y], improvement), trials)"
                trials = page.evaluate("([x, y]) => 4 * trialsOf(x[0], y[0])", [x.tolist(), y.tolist()])
                ours = page.evaluate(code, [(x + shift).tolist(), y.tolist(), trials])
                near(ours, stats.probability_of_improvement(x + shift, y))
            for tau in -9, 0:
                code = "([x, tau]) => share(bootstrap(x, above(tau)), x.flat().length)"
                near(
                    page.evaluate(code, [x.tolist(), tau]),
                    [column[0] for column in stats.performance_profile(list(x), [tau])],
                )
        two = page.evaluate("[bootstrap([[1, 2]], (x) => mean(x[0])), bootstrap([[1, 2], [3, 4]], iqm)]")
        assert np.isnan(two[0][1]) and np.isfinite(two[1]).all(), "two seeds: no interval"
        assert page.evaluate("meanInterval([1, null, 2])") == [None, None]


@pytest.fixture(scope="module")
def awkward(tmp_path_factory):
    """A value that never changes, the same seeds at two commits, other numbers of steps, and a misspelt tag."""
    folder = tmp_path_factory.mktemp("awkward")
    for seed in (1, 2, 3):
        for commit in "a" * 40, "b" * 40:
            write_run(folder / "runs", "Two-v0", "ppo", seed, 100 if commit[0] == "a" else 50, commit=commit)
        write_run(folder / "runs", "Two-v0", "sac", seed, 80, total=6000, commit="b" * 40)
        write_run(folder / "runs", "Same-v0", "ppo", seed, 0.1, flat=True, commit="b" * 40)
        write_run(folder / "runs", "Two-v0", "td3", seed, 60, commit="ab"[seed > 1] * 40)
    done = build(folder / "runs", output=folder / "page", flags=["--metrics", "chart/SPS", "charts/SPS"])
    assert done.stderr.splitlines() == ["left out: --metrics chart/SPS: no run has it, near it: charts/SPS"]
    assert embedded(folder / "page")["metrics"] == [RETURN, "charts/SPS"]
    return folder / "page"


def test_one_value_only(awkward, chromium):  # noqa: F811
    with browser.open_page(chromium) as page:
        view(page, awkward)
        for title in "Same-v0", "Two-v0":
            figure = page.locator(f'figure[data-title="{title}"]')
            words = figure.locator("svg[data-x] text").all_text_contents()
            assert 6 < len(words) < 20 and (title != "Same-v0" or len(set(words)) == len(words))
            assert figure.locator("path.curve").count() == (1 if title == "Same-v0" else 4)
        assert len(page.evaluate("ticks(0.1, 0.1 + 1e-17, 5)")) < 16 and page.evaluate("ticks(0.1, 0.1, 5)") == []
        assert page.evaluate("ticks(-3, 7, 5)") == [-2, 0, 2, 4, 6]
        assert page.errors == []
        page.evaluate(
            """() => { const usual = plot;
            plot = (spec, ...rest) => {
                if (spec.title === "Same-v0") throw Error("why");
                return usual(spec, ...rest);
            }; }"""
        )
        page.select_option("#x", "time")
        assert "could not be drawn: why" in page.inner_text('figure[data-title="Same-v0"]')
        assert page.locator('figure[data-title="Two-v0"] path.curve').count() == 4, "others are drawn"


def test_commits_are_kept_apart(awkward, chromium):  # noqa: F811
    rows = [row for row in csv.DictReader((awkward / "scores.csv").open()) if row["env_id"] == "Two-v0"]
    assert [(row["algorithm"], row["runs"]) for row in rows] == [
        ("ppo @ aaaaaaa", "3"), ("ppo @ bbbbbbb", "3"), ("sac", "3"), ("td3", "3")
    ]  # fmt: skip
    with browser.open_page(chromium) as page:
        view(page, awkward)
        legend = page.locator('figure[data-title="Two-v0"] .legend button')
        assert page.input_value("#by") == "algorithm" and legend.count() == 4
        assert legend.all_inner_texts()[0].startswith("ppo @ aaaaaaa ") and legend.all_inner_texts()[3].endswith("≠")
        assert "Runs of several commits are in one curve: td3." in page.inner_text('figure[data-title="Two-v0"]')
        assert "td3 ≠" in page.inner_text("#score-table") and "ppo ≠" not in page.inner_text("#score-table")
        page.select_option("#by", "commit")
        assert legend.count() == 5 and "≠" not in page.inner_text("#charts")
        page.reload()
        page.wait_for_selector("#charts svg")
        assert legend.count() == 5, "the address holds the view"


def test_other_numbers_of_steps_are_named(awkward, site, chromium):  # noqa: F811
    with browser.open_page(chromium) as page:
        view(page, awkward)
        words = page.inner_text("#budgets")
        assert "Not after the same number of steps" in words and "sac (6000)" in words
        assert "sac (6000)" in page.inner_text('figure[data-title="Interquartile mean"]')
        page.fill("#q", "Same-v0")
        assert page.locator("#suite").is_hidden() and page.locator("#budgets").is_hidden()
        view(page, site)
        assert page.locator("#suite").is_visible() and page.locator("#budgets").is_hidden()


def test_addresses_and_going_back(site, chromium):  # noqa: F811
    with browser.open_page(chromium) as page:
        view(page, site, "#sort=size&commit=none&env=Gone-v0&by=track&x=time")
        for knob, value in ("sort", "name"), ("commit", ""), ("by", "algorithm"), ("x", "time"):
            assert page.input_value(f"#{knob}") == value
        assert page.locator("#charts figure").count() == 3
        page.locator(".skip").press("Enter")
        assert "x=time" in page.url and page.evaluate("document.activeElement.id") == "curves"
        page.click("#clear")
        page.locator('figure[data-title="CartPole-v1"] svg[data-x]').press("+")
        assert x_range(page, "CartPole-v1") == [2000, 8000]
        page.click("#clear")
        assert x_range(page, "CartPole-v1") == [0, 10_000], "show all again"
        page.fill("#q", "dqn")
        page.locator("#score-table a").first.click()
        page.wait_for_selector("#trace h2")
        page.locator("#q").press("End")
        page.keyboard.type("xyz")
        assert page.input_value("#q") == "dqnxyz", "a trace leaves the focus where one types"
        page.go_back()
        page.wait_for_function("() => $('q').value === 'dqn'")
        with page.expect_download() as download:
            page.click("#save-csv")
        rows = list(csv.DictReader(Path(download.value.path()).open()))
        assert len(rows) == 2 and all(float(row["low"]) < float(row["score"]) < float(row["high"]) for row in rows)
        assert page.errors == []


def test_tables_beside_the_page(site):
    rows = list(csv.DictReader((site / "scores.csv").open()))
    runs = [
        run for run in results.load([site.parent / "runs"]) if run.env_id == "CartPole-v1" and run.exp_name == "dqn"
    ]
    (row,) = (row for row in rows if (row["env_id"], row["algorithm"]) == ("CartPole-v1", "dqn"))
    scores = [run.score for run in runs if run.ended and np.isfinite(run.score)]
    assert (
        row["score"] == f"{np.mean(scores):.2f}" and row["runs"] == str(len(scores)) == "4" and row["not_ended"] == "1"
    )
    text = (site / "scores.md").read_text()
    assert f"| CartPole-v1 | dqn | {np.mean(scores):.2f} |" in text and "one run" in text


def names_of(path, **options):
    """The names of the groups of runs, as they are sorted in a report."""
    runs = sorted(results.load([path]), key=lambda run: (run.total_timesteps, run.seed, json.dumps(run.args)))
    return runs, report.group_names(runs, **options)


def test_settings_are_labelled_by_what_differs(tmp_path):
    for seed in (1, 2):
        for rate in (0.00025, 0.001):
            write_run(tmp_path / "sweep", "CartPole-v1", "ppo", seed, 400, learning_rate=rate, track=rate > 0.0005)
        write_run(tmp_path / "sweep", "CartPole-v1", "dqn", seed, 400, learning_rate=seed / 1000)
        for n in range(3):
            many = {"gamma": 0.9 + n / 100, "clip_coef": n, "ent_coef": n, "target_kl": (None, 0.02, 0.03)[n]}
            write_run(tmp_path / "search", "CartPole-v1", "ppo", seed, 400, **many)
    runs, names = names_of(tmp_path / "sweep")
    assert {(run.exp_name, name) for run, name in zip(runs, names)} == {
        ("dqn", "dqn"), ("ppo", "ppo · learning_rate=0.00025"), ("ppo", "ppo · learning_rate=0.001")
    }  # fmt: skip
    runs, names = names_of(tmp_path / "search", labels={"ppo": "PPO"})
    assert sorted(set(names)) == [f"PPO · setting {n}" for n in (1, 2, 3)]
    assert len({(name, run.args["gamma"]) for run, name in zip(runs, names)}) == 3
    for flag, values, words in ("target_kl", (None, 0.02), "None 0.02"), ("anneal_lr", (True, False), "True False"):
        for seed in (1, 2):
            for value in values:
                write_run(tmp_path / flag, "CartPole-v1", "ppo", seed, 400, **{flag: value})
        _, names = names_of(tmp_path / flag)
        assert set(names) == {f"ppo · {flag}={word}" for word in words.split()}


def test_what_no_label_says_is_told(tmp_path, chromium):  # noqa: F811
    """As of one that was trained for longer and at another rate."""
    for seed in (1, 2, 3):
        write_run(tmp_path / "runs", "Long-v1", "sac", seed, 400, total=40_000_000, gamma=0.9)
        write_run(tmp_path / "runs", "Long-v1", "sac", seed, 900, total=1_100_000, learning_rate=0.003, gamma=0.9)
        write_run(tmp_path / "runs", "Long-v1", "td3", seed, 400, learning_rate=seed)
    runs, names = names_of(tmp_path / "runs")
    assert set(names) == {"sac", "td3"}
    assert report.differences_in_words(runs, names, {"sac": "SAC"}) == [
        "Lines of SAC in Long-v1 also differ in learning_rate."
    ]
    build(tmp_path / "runs", output=tmp_path / "page")
    with browser.open_page(chromium) as page:
        view(page, tmp_path / "page")
        words = page.inner_text("#charts")
        assert "sac · 1.1M steps" in words and "sac · 40M steps" in words
        assert "Curves of sac also differ in learning_rate." in words and page.locator("#charts .warn").count() == 1
        page.fill("#q", "learning_rate=0.003")
        page.wait_for_function("() => !document.querySelector('#charts .warn')")


def test_a_record_lacks_no_flag_that_is_a_default(tmp_path):
    """It has the flags of its command only: those of the script count for the rest."""
    write_run(tmp_path / "runs", "CartPole-v1", "ppo", 1, 400, gamma=0.99, gae_lambda=0.9, note="own")
    columns = "file,env_id,steps,seeds,score_mean,score_std,scores,reference_mean,reference_std,command,commit,packages"
    command = "python cleanrl/ppo.py --total-timesteps 10000"
    row = f"cleanrl/ppo.py,CartPole-v1,10000,1,7,0,7.00,,,{command},0123456789,torch=2.8.0"
    (tmp_path / "ppo.csv").write_text(f"{columns}\n{row}\n")
    _, names = names_of(tmp_path)
    assert sorted(names) == ["ppo · gae_lambda=0.9 @ 0123456", "ppo · gae_lambda=0.95 @ 0123456"]


@pytest.fixture(scope="module")
def bounded(tmp_path_factory):
    """Runs that stand at 9 or at 500, between which the widened intervals of three seeds are too wide."""
    folder = tmp_path_factory.mktemp("bounded")
    for name, levels in ("ppo", (500, 500, 300)), ("dqn", (9, 9, 200)):
        for seed, level in enumerate(levels, 1):
            for env_id in "CartPole-v1", "Other-v1":
                write_run(folder / "runs", env_id, name, seed, level, flat=True)
    build(folder / "runs", output=folder / "page", flags=["--normalise", "minmax"])
    return folder


def test_intervals_stay_within_what_was_seen(bounded, chromium):  # noqa: F811
    page_data = embedded(bounded / "page")
    bands = [pair for key, pair in page_data["numbers"].items() if key.startswith("band")]
    values = [value for pair in bands for side in pair for value in side if value is not None]
    assert (min(values), max(values)) == (9, 500)
    assert page_data["seen"] == {RETURN: {"CartPole-v1": [9, 500], "Other-v1": [9, 500]}}
    rows = list(csv.DictReader((bounded / "page/scores.csv").open()))
    assert {(row["low"], row["high"]) for row in rows if row["algorithm"] == "ppo"} != {("500.00", "500.00")}
    assert all(9 <= float(row["low"]) <= float(row["score"]) <= float(row["high"]) <= 500 for row in rows)
    code = """() => [...cache].filter(([key]) => /^(band|score|iqm|course)/.test(key))
    .map(([key, value]) => [key.split(" ")[0], value.flat().filter(known)])"""
    with browser.open_page(chromium) as page:
        view(page, bounded / "page")
        for choose in False, True:
            if choose:
                page.evaluate("cache.clear()")  # now the browser computes
                page.evaluate("() => { before = {}; render(); }")
            ends = {}
            for kind, numbers in page.evaluate(code):
                low, high = ends.get(kind, (np.inf, -np.inf))
                ends[kind] = min(low, *numbers), max(high, *numbers)
            assert ends == {"band": (9, 500), "score": (9, 500), "iqm": (0, 1), "course": (0, 1)}
        assert page.errors == []


def test_title_is_the_users(bounded):
    assert "<h1>Report of " in (bounded / "page/index.html").read_text()
    assert (bounded / "page/scores.md").read_text().startswith("# Report of ")


def test_published_scores_are_named(tmp_path, chromium):  # noqa: F811
    for name, seed in [("ppo", 1), ("dqn", 1), ("mine", 1)]:
        write_run(tmp_path / "runs", "CartPole-v1", name, seed, 400, total=500_000)
    build(tmp_path / "runs", output=tmp_path / "page")
    with browser.open_page(chromium) as page:
        view(page, tmp_path / "page", "#refs=1")
        labels = page.locator("#charts svg[data-x] text", has_text="published: ")
        assert labels.all_text_contents() == ["published: dqn and 1 more"], "two of three, on each other"


@pytest.mark.parametrize("mode", ["start", "reference", "file"])
def test_normalisation(mode, tmp_path):
    for seed in (1, 2, 3):
        write_run(tmp_path / "runs", "CartPole-v1", "ppo", seed, 490.04, total=500_000, noise=0)
        write_run(tmp_path / "runs", "CartPole-v1", "dqn", seed, 245.02, total=500_000, noise=0)
    (tmp_path / "limits.csv").write_text("env_id,low,high\nCartPole-v1,-510,490.04\n")
    runs = results.load([tmp_path / "runs"])
    limits, text = report.scales(runs, str(tmp_path / "limits.csv") if mode == "file" else mode)
    if mode == "file":
        assert limits == {"CartPole-v1": (-510, 490.04)} and "limits.csv" in text
    else:
        start = np.mean([run.returns[:5].mean() for run in runs])
        best = 490.04 if mode == "reference" else max(run.score for run in runs)
        assert limits["CartPole-v1"] == pytest.approx((start, best)) and ("published" in text) == (mode == "reference")


def test_duplicates_and_records_of_runs(tmp_path):
    folder = write_run(tmp_path / "runs", "CartPole-v1", "ppo", 1, 400)
    again = tmp_path / "again" / "CartPole-v1__ppo__1__1800000000"
    again.parent.mkdir()
    again.symlink_to(folder)
    (run,) = results.load([folder])
    columns = "file,env_id,steps,seeds,score_mean,score_std,scores,reference_mean,reference_std,command,commit,packages"
    row = (
        f"cleanrl/ppo.py,CartPole-v1,10000,1 2,1,0,{run.score:.2f} 7.00,,,"
        "python cleanrl/ppo.py --total-timesteps 10000,0123456789,torch=2.8.0"
    )
    other = row.replace("0123456789,", "9876543210,")  # by chance, the same score at another commit
    (tmp_path / "ppo.csv").write_text(f"{columns}\n{row}\n{other.replace(' 7.00', '').replace(',1 2,', ',1,')}\n")
    build(tmp_path / "runs", again, tmp_path / "ppo.csv", output=tmp_path / "page")
    data = embedded(tmp_path / "page")
    assert sorted((run["seed"], run["source"]) for run in data["runs"]) == [(1, "record"), (1, "run"), (2, "record")]
    assert "2 duplicates left out" in data["summary"]


def test_same_page_of_the_same_runs(tmp_path, monkeypatch):
    """Byte by byte, with a time that is given."""
    for name in "ppo", "dqn", "sac":
        write_run(tmp_path / "runs", "CartPole-v1", name, 1, 400)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    for place, seed in ("one", "1"), ("two", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        build(tmp_path / "runs", output=tmp_path / place)
    one, two = (tmp_path / place / "index.html" for place in ("one", "two"))
    assert one.read_bytes() == two.read_bytes() and "made 1970-01-02 00:00 UTC" in one.read_text()


def test_videos_of_an_earlier_page_go(tmp_path):
    folder = write_run(tmp_path / "runs", "CartPole-v1", "ppo", 1, 400)
    for step in (100, 500, 900):
        (folder / "videos").mkdir(exist_ok=True)
        (folder / "videos" / f"step-{step}.mp4").write_bytes(b"film")
    mine = tmp_path / "page/videos/mine.mp4"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"film")
    for n, names in ("3", {"step-100", "step-500", "step-900", "mine"}), ("1", {"step-900", "mine"}), ("0", {"mine"}):
        build(tmp_path / "runs", output=tmp_path / "page", flags=["--videos", n])
        assert {path.stem for path in (tmp_path / "page/videos").rglob("*.mp4")} == names


@pytest.mark.parametrize("case", ["nothing", "missing", "normalise", "foreign", "videos"])
def test_wrong_usage(case, tmp_path):
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "runs", "CartPole-v1", "ppo", 1, 400)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/index.html").write_text("<h1>mine</h1>")
    flags = {"normalise": ["--normalise", "human"], "videos": ["--videos", "-1"]}.get(case, [])
    path = {"nothing": "empty", "missing": "gone"}.get(case, "runs")
    output = tmp_path / ("site" if case == "foreign" else "page")
    done = build(tmp_path / path, output=output, flags=flags, code=2)
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("report: ")
    assert not (tmp_path / "page").exists() and (tmp_path / "site/index.html").read_text() == "<h1>mine</h1>"


@pytest.mark.parametrize("seeds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_thousand_runs(seeds, tmp_path, chromium):  # noqa: F811
    """1000 runs with 0.8 MB of events each, as runs of the benchmark have, in under 10 s on two cores: counted is the
    time of the processors, as a machine may have other work. With one seed: a tenth of it, and the start of Python."""
    for seed in range(seeds):
        model = write_run(tmp_path / "models", "Env-v0", "algo", seed, 100, 1_000_000, episodes=1000, losses=14)
        args = json.loads((model / "args.json").read_text())
        for env_id, name in [(f"Env{env}-v0", f"algo{name}") for env in range(20) for name in range(5)]:
            folder = tmp_path / "runs" / f"{env_id}__{name}__{seed}__1700000000"
            folder.mkdir(parents=True)
            (folder / "args.json").write_text(json.dumps(args | {"env_id": env_id, "exp_name": name}))
            os.link(model / "events.out.tfevents.1", folder / "events.out.tfevents.1")
    assert 0.7e6 < (folder / "events.out.tfevents.1").stat().st_size < 1e6
    before = os.times()
    build(tmp_path / "runs", output=tmp_path / "page")
    after, size = os.times(), (tmp_path / "page/index.html").stat().st_size
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    most = 20 if seeds == 10 else 4
    assert seconds < most and size < 1e6 * seeds, f"{seeds}00 runs: {seconds:.1f} s of two cores, {size / 1e6:.1f} MB"
    with browser.open_page(chromium) as page:
        view(page, tmp_path / "page")
        assert page.locator("#charts figure").count() == 20 and page.errors == []


def test_open_names_the_page(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "runs", "CartPole-v1", "ppo", 1, 400)
    opened = []
    monkeypatch.setattr(report.webbrowser, "open", opened.append)
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path / "runs"), "-o", str(tmp_path / "page"), "--open"])
    report.main()
    assert opened == [(tmp_path / "page/index.html").as_uri()]
    assert "1 run, " in capsys.readouterr().out
