"""cleanrl_utils.compare raises few false alarms, finds drops, and says so in words, Markdown and exit codes."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmark.record import Options
from benchmark.record import main as record
from cleanrl_utils.compare import area, judge, main, verdict
from cleanrl_utils.runs.results import Run, load
from helpers.files import ROOT
from helpers.synthetic_runs import write_run

SHAPES = {
    "normal": lambda rng, size: rng.normal(size=size),
    "skewed": lambda rng, size: (1.38 - rng.lognormal(0, 0.8, size=size)) / 1.32,  # some seeds fail
    "heavy tails": lambda rng, size: rng.standard_t(3, size=size) / 3**0.5,
}


def verdicts(shape, environments, seeds, spread=10.0, drop=0.0, pairs=100, change=slice(None)):
    """The overall verdicts of pairs of synthetic benchmarks, base at 100, with this spread over seeds."""
    rng, found = np.random.default_rng(7), []
    for _ in range(pairs):
        base, new = (100 + spread * SHAPES[shape](rng, (environments, n)) for n in seeds)
        new[change] -= drop
        found.append(verdict(*judge(base, new, reps=1000)))
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_no_false_alarm(shape):
    """At most 5 of 100 equal pairs of each kind, and at most 5 % of all are called better or worse."""
    kinds = [(1, (5, 5)), (4, (5, 5)), (4, (3, 3)), (2, (10, 4))]
    found = [verdicts(shape, environments, seeds) for environments, seeds in kinds]
    assert max(pairs.count("worse") for pairs in found) <= 5
    assert sum(pairs.count("worse") + pairs.count("better") for pairs in found) <= 20


@pytest.mark.parametrize("shape", SHAPES)
def test_finds_a_drop(shape):
    """Of 20 % with five seeds, in one environment or in all; and an equal rise is better."""
    assert verdicts(shape, 1, (5, 5), 8.0, 20.0).count("worse") > 75
    assert verdicts(shape, 1, (5, 5), 10.0, 20.0).count("worse") > 50
    assert verdicts(shape, 3, (5, 5), 10.0, 20.0).count("worse") > 90
    assert verdicts(shape, 3, (5, 5), 8.0, 20.0, change=0).count("worse") > 50
    assert verdicts(shape, 1, (5, 5), 8.0, -20.0).count("better") > 75


def test_few_seeds_and_no_spread():
    for seeds in (1, 2):
        lines, overall = judge([np.full(seeds, 100.0)], [np.full(5, 10.0)])
        assert [lines[0]["verdict"], overall["verdict"]] == ["not enough seeds"] * 2
    five, noisy = np.full(5, 100.0), np.array([100.0, 100, 100, 100, 83])
    for new, told in (
        (five, "same"),
        (five - 10, "worse"),
        (five + 10, "better"),
        (five - 0.5, "same"),
        (noisy, "same"),
    ):
        lines, overall = judge([five, five], [new, five])
        assert [lines[0]["verdict"], lines[1]["verdict"]] == [told, "same"] and overall["verdict"] == told
        assert all(np.isfinite(list(line.values())[0]) for line in lines) and np.isfinite(lines[0]["low"])
    assert judge([five], [np.array([100.0, 100, 100, 0, 0])])[0][0]["verdict"] == "not enough seeds"
    lines, overall = judge([five, five], [five, five[:2]])
    assert [line["verdict"] for line in lines] == ["same", "not enough seeds"]
    assert overall["verdict"] == "not enough seeds"


def test_the_verdict_of_all():
    """Worse if any line is; no doubt about one is forgotten, and better is not said of what fell on average."""
    unknown = "not enough seeds"
    for lines, mean, effect, of_all in (
        (("same", "worse", "better"), "better", 9, "worse"),
        (("same", "same"), "worse", -9, "worse"),
        (("same", unknown), "same", 0, unknown),
        (("better", unknown), "same", 5, unknown),
        (("better", unknown), "better", 9, "better"),
        (("better", "same"), "same", 5, "better"),
        (("better", "same"), "same", -5, "same"),
        (("same", "same"), "same", 1, "same"),
    ):
        assert verdict([{"verdict": v} for v in lines], {"verdict": mean, "effect": effect}) == of_all
    found = verdicts("normal", 12, (3, 3), drop=50.0, change=0, pairs=30)
    assert "same" not in found and unknown in found


def test_lines_say_what_they_mean():
    """The interval holds where nothing was found and not where something was; more seeds find less; error counts."""
    rng = np.random.default_rng(0)
    base, new = 100 + 5 * rng.normal(size=(2, 10)), 100 + 5 * rng.normal(size=(2, 10)) - [[0], [15]]
    (same, worse), overall = judge(base, new)
    assert same["low"] < 0 < same["high"] and worse["low"] < worse["effect"] < worse["high"] < 0
    assert overall["effect"] == pytest.approx((new - base).mean()) and overall["verdict"] == "worse"
    assert (
        judge(base[:, :4], new[:, :4])[0][0]["findable"]
        > same["findable"]
        > judge(base, new, error=0.2)[0][0]["findable"]
    )
    assert judge(base, new) == judge(base, new)
    drops = [judge(base[:1], base[:1] - d)[0][0]["verdict"] for d in (0, same["findable"] * 2)]
    assert drops == ["same", "worse"]


def benchmark(root, scores, name="ppo", **flags):
    """Runs with constant returns: {environment: scores of seeds 1, 2, ...}."""
    for env_id, values in scores.items():
        for seed, value in enumerate(values, 1):
            write_run(root, env_id, seed, [value / 10] * 5 + [value] * 100, name, **flags)
    return str(root)


GOOD = {"A-v1": [100, 101, 99, 102, 98], "B-v1": [-50, -51, -49, -52, -48]}
BAD = {"A-v1": [80, 81, 79, 82, 78], "B-v1": [-50, -51, -49, -52, -48]}


def test_command_line(tmp_path, capsys):
    """Verdicts, exit codes, Markdown and JSON; by folder, by commit, by name, by pattern and from recorded results."""
    good, bad = benchmark(tmp_path / "good", GOOD), benchmark(tmp_path / "bad", BAD, commit="b" * 40)
    assert main([good, benchmark(tmp_path.parent / "again", GOOD)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("## Comparison: same\n") and "Warning" not in text
    assert main([good, bad, "-o", str(tmp_path / "c.md"), "--json", str(tmp_path / "c.json")]) == 1
    assert capsys.readouterr().out == f"worse: {tmp_path / 'c.md'}\n"
    text, data = (tmp_path / "c.md").read_text(), json.loads((tmp_path / "c.json").read_text())
    table = [line for line in text.split("\n") if line.startswith("|")]
    assert len(table) == 2 + 2 + 1 and len({line.count("|") for line in table}) == 1
    assert table[2].startswith("| A-v1 | 100.0 ± 1.581 | 80.00 ± 1.581 | 5 / 5 | -20.0 % |") and "**worse**" in table[2]
    assert table[3].endswith("| **same** |") and "at most 5 %" in text
    assert [line["verdict"] for line in data["lines"]] == ["worse", "same"] and data["verdict"] == "worse"
    # B-v1 came from -5: 45 is less than its score of 50, so per cent are of 50.
    assert [line["scale"] for line in data["lines"]] == [100, 50] and data["lines"][0]["base"]["seeds"] == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert main([bad, good]) == 0 and "Comparison: better" in capsys.readouterr().out
    assert main([str(tmp_path), "--commits", "a" * 12, "bbbbbbb"]) == 1
    assert main(["--base", good, "--new", bad, "--env-ids", "B-v1"]) == 0
    assert main([f"{good}/A*", f"{bad}/A*"]) == 1
    results = [str(tmp_path / f"results/{name}.csv") for name in ("good", "bad")]
    for runs, result in zip((good, bad), results):
        record(Options([runs], tmp_path / result))
    capsys.readouterr()
    assert main(results) == 1 and main([results[0], bad]) == 1 and main([good, results[1]]) == 1
    text = capsys.readouterr().out
    assert "| A-v1 | 100.0 ± 1.581 | 80.00 ± 1.581 | 5 / 5 | -20.0 % |" in text


def test_algorithms(tmp_path, capsys):
    """Two names within one folder; and folders with several algorithms are paired by both."""
    runs = benchmark(tmp_path / "runs", GOOD)
    benchmark(tmp_path / "runs", BAD, "rpo")
    assert main([runs, "--base-name", "ppo", "--new-name", "rpo"]) == 1
    assert "base: ppo at aaaaaaaaaa, 1,000 steps" in capsys.readouterr().out
    again = benchmark(tmp_path / "again", GOOD)
    benchmark(tmp_path / "again", BAD, "rpo")
    assert main([runs, again, "--score", "auc"]) == 0
    assert "| rpo | B-v1 |" in capsys.readouterr().out


def test_not_enough_seeds(tmp_path, capsys):
    two, five = (benchmark(tmp_path / str(n), {"A-v1": GOOD["A-v1"][:n]}) for n in (2, 5))
    assert main([two, five]) == 0 and main([two, five, "--fail-on-unknown"]) == 1
    assert "Comparison: not enough seeds" in capsys.readouterr().out
    assert main([five, benchmark(tmp_path / "again", {"A-v1": GOOD["A-v1"]}), "--fail-on-unknown"]) == 0
    one, other = (benchmark(tmp_path / name, {"A-v1": [3]}) for name in ("one", "other"))
    assert main([one, other]) == 0 and "| 3.000 | 3.000 | 1 / 1 | +0.0 % |  |  |" in capsys.readouterr().out


def test_differences_are_told(tmp_path, capsys):
    good = benchmark(tmp_path / "good", GOOD)
    other = benchmark(
        tmp_path / "other", GOOD | {"C|v1": [1] * 3}, learning_rate=0.2, torch="3.0", seed_of="x", track=True
    )
    assert main([good, other]) == 0
    text, warning = capsys.readouterr()
    assert (
        "Warning" in text and "- flag learning_rate: 0.1 -> 0.2 (everywhere)" in text and "torch: 2.13 -> 3.0" in text
    )
    assert "only in new (C|v1)" in text and "track" not in text and "differ: flag learning_rate" in warning
    refuse(capsys, [good, other, "--strict"], "the sides differ in")
    assert main([good, other, "--strict", "--allow", "learning_rate", "torch", "seed_of", "new"]) == 0
    assert "Warning" not in (text := capsys.readouterr().out) and "allowed to differ: flag learning_rate" in text
    more = benchmark(tmp_path / "more", GOOD, clip="yes", learning_rate="1e-1")
    assert main([good, more]) == 0 and "- flag clip: only in new" in (text := capsys.readouterr().out)
    assert "learning_rate" not in text
    refuse(capsys, [good, more, "--strict"], "the sides differ in flag clip: only in new (A-v1, B-v1): --allow clip")
    many = benchmark(tmp_path / "many", GOOD, clip="yes", tau=1, rho=2)  # as of another algorithm: one line, not three
    assert main([good, many, "--allow", "tau"]) == 0
    text, warning = capsys.readouterr()
    assert "- flags only in new: clip, rho (everywhere)" in text and warning.count("the sides differ") == 1
    mixed = benchmark(tmp_path / "mixed", GOOD | {"A-v1": GOOD["A-v1"][:3]})
    write_run(tmp_path / "mixed", "A-v1", 4, [99.0], commit="b" * 40)
    refuse(capsys, [mixed, good, "--strict"], "base mixes commits: aaaaaaaaaa, bbbbbbbbbb (A-v1): --allow commits")


def test_runs_of_other_length(tmp_path, capsys):
    """A trial run blocks nothing; --steps names the length, and longer runs count as far as that."""
    good, new = (benchmark(tmp_path / name, GOOD) for name in ("good", "new"))
    write_run(Path(new), "A-v1", 6, [1.0] * 9, total=100)
    write_run(Path(good), "B-v1", 2, [1.0] * 9, total=5000)
    assert main([good, new]) == 0
    text = capsys.readouterr().out
    assert "Comparison: same" in text and text.count("| 5 / 5 |") == 2 and text.count(", 1,000 steps\n") == 2
    assert "- base: left out 1 run of another length (5,000 steps)" in text
    assert "- new: left out 1 run of another length (100 steps)" in text
    longer = benchmark(tmp_path / "longer", GOOD, total=2000)
    refuse(capsys, [good, longer], "seed 2, that differ in total_timesteps, 5000 and 1000: leave one kind, by folder")
    good = benchmark(tmp_path / "again", GOOD)
    told = "differ in total_timesteps: 1000 -> 2000 (A-v1, B-v1): --allow total_timesteps compares them, --steps N"
    refuse(capsys, [good, longer], told)
    assert main([good, longer, "--allow", "total_timesteps"]) == 0
    for seed in 1, 2, 3:  # 50 until step 1000, 200 thereafter
        write_run(tmp_path / "rising", "A-v1", seed, [50.0] * 200 + [200.0] * 200, total=2000)
    capsys.readouterr()
    assert main([good, str(tmp_path / "rising"), "--steps", "1000"]) == 1
    text = capsys.readouterr().out
    assert "| A-v1 | 100.0 ± 1.581 | 50.00 ± 0.000 | 5 / 3 |" in text and "new: 3 runs of 2,000 steps, cut at" in text
    benchmark(tmp_path / "rising", {"A-v1": GOOD["A-v1"]})
    assert main([good, str(tmp_path / "rising"), "--steps", "1000"]) == 0, "runs of that length come first"
    refuse(capsys, [good, new, "--steps", "7000"], "no environment has finished runs on both sides")
    refuse(capsys, [good, new, "--steps", "0"], "--steps must be at least 1")


def test_sides_that_share_runs(tmp_path, capsys):
    """The same folder, row, copy or record on both sides is refused, by name; what does not count is not."""
    good, other = benchmark(tmp_path / "good", GOOD), benchmark(tmp_path / "other", BAD, commit="b" * 40)
    told = "both sides have ppo in A-v1 (seeds 1, 2, 3, 4, 5), ppo in B-v1 (seeds 1, 2, 3, 4, 5): no run can"
    for sides in ([good, good], [f"{good}/*", good], ["--base", good, "--new", good, other]):
        refuse(capsys, sides, told)
    refuse(capsys, [f"{good}/A*__1__*", good], "both sides have ppo in A-v1 (seeds 1): ")
    rows = tmp_path / "results/good.csv"
    record(Options([good], rows))
    for sides in ([str(rows), str(rows)], [str(rows), good], [good, str(rows)]):
        refuse(capsys, sides, told)
    rows.write_text(rows.read_text().replace("a" * 10, f"{'a' * 10} {'c' * 10}"))
    capsys.readouterr()
    refuse(capsys, [str(rows), "--commits", "aaaaaaa", "ccccccc"], "at several commits at once (aaaaaaaaaa cccccccccc)")
    capsys.readouterr()
    assert main([str(rows), other]) == 1
    for folder in Path(good).iterdir():  # as a run names its events, which a copy keeps
        second = 1_700_000_000 + int(folder.name.rsplit("__", 1)[1])
        (folder / "events.out.tfevents.1").rename(folder / f"events.out.tfevents.{second}.host.1.0")
    shutil.copytree(good, tmp_path / "copy")
    refuse(capsys, [good, str(tmp_path / "copy")], told)


def test_records_of_both_commits(tmp_path, capsys):
    """Rows of several commits, which once were compared with themselves."""
    rows = (ROOT / "benchmark/results/ppo.csv").read_text().splitlines()
    recorded = [re.sub(r",[0-9a-f]{10}( [0-9a-f]{10})*,", ",166d65d81a f0b2484d02,", row) for row in rows]
    (tmp_path / "ppo.csv").write_text("\n".join(recorded) + "\n")
    commits = ["--commits", "166d65d81a", "f0b2484d02", "--base-name", "ppo", "--new-name", "ppo"]
    refuse(capsys, [str(tmp_path), *commits], "several commits at once (166d65d81a f0b2484d02)")


def test_runs_that_do_not_count(tmp_path, capsys):
    """Unfinished ones, those without episodes, and all but the last of a seed."""
    good = benchmark(tmp_path / "good", {"A-v1": GOOD["A-v1"]})
    new = tmp_path / "new"
    write_run(new, "A-v1", 1, [1.0], ended=False)
    write_run(new, "A-v1", 2, [])
    write_run(new, "A-v1", 3, [1.0])
    benchmark(new, {"A-v1": GOOD["A-v1"]})
    assert main([good, str(new)]) == 0
    text = capsys.readouterr().out
    assert "Comparison: same" in text and "| 5 / 5 |" in text
    for note in ("1 run unfinished", "1 run without a score", "1 run of a seed that ran again"):
        assert f"- new: left out {note}" in text
    kinds = {"learning_rate": {"learning_rate": 0.5}, "commit": {"commit": "b" * 40}}
    for name, other in kinds.items():  # not the same run again
        both = benchmark(tmp_path / name, {"A-v1": GOOD["A-v1"]})
        write_run(Path(both), "A-v1", 2, [1.0], **other)
        refuse(capsys, [good, both], f"new has two runs of ppo in A-v1, seed 2, that differ in {name}, ")


def refuse(capsys, argv, message):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and message in err and not out and "Traceback" not in err


def test_wrong_usage(tmp_path, capsys):
    good, other = benchmark(tmp_path / "good", GOOD), benchmark(tmp_path / "other", {"C-v1": [1, 2, 3]})
    again = benchmark(tmp_path / "again", GOOD)
    several = [benchmark(tmp_path / "several", GOOD, name) for name in ("rpo", "sac")][0]
    for argv, message in (
        ([], "two sides are needed"),
        ([good], "two sides are needed"),
        ([good, "--base", good], "either BASE NEW, or both --base and --new"),
        ([good, str(tmp_path / "none")], "none: not found"),
        ([good, other], "no environment has finished runs on both sides"),
        ([good, other, "--env-ids", "D-v1"], "no run of base is left"),
        ([good, "--commits", "aaaaaaa", "no-such-branch"], "neither a commit's hash"),
        ([good, other, "--error", "0"], "--error is a share"),
        ([good, other, "-o", str(tmp_path / "none/c.md")], "no folder"),
        ([good, again, "--json", str(tmp_path)], "Is a directory"),
        ([good, several], "(base: ppo; new: rpo, sac): name one of each with --base-name and --new-name"),
    ):
        refuse(capsys, argv, message)


def test_area_under_the_curve(tmp_path):
    """The mean over steps, whatever the density of episodes; of a recorded curve the same."""
    run = load(write_run(tmp_path, "A-v1", 1, [0.0] * 50 + [10.0] * 50))[0]
    assert area(run) == pytest.approx(5, abs=0.2)
    run.steps, run.returns = np.array([100, 500, *range(501, 601)]), np.array([0.0, 10.0, *[10.0] * 100])
    assert area(run) == pytest.approx(5, abs=0.2)
    steps = np.arange(10, 1001, 10)
    recorded = Run(*("A", "ppo", "ppo.py", 1, 1000, steps, np.where(steps > 500, 10.0, 0), None, 10.0, True, "record"))
    assert area(recorded) == 5
