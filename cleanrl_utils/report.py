"""Learning curves of runs, as a page or for a paper: python -m cleanrl_utils.report runs benchmark/results -o report

Writes report/index.html, which needs no server, no network and no other file but the videos beside it: learning curves
by environment over steps and over wall time with their intervals, zoom, filters, the trace of every curve to its runs
(hyperparameters, command, commit, packages, videos), aggregates over environments and tables of scores, which are also
in report/scores.md and report/scores.csv. Paths are run folders, folders with run folders in them, or recorded results.

    python -m cleanrl_utils.report runs --labels ppo=PPO dqn=DQN --figure curves.pdf --table scores.tex

draws the same curves and intervals as a figure, and writes the scores as a table, without a page. --aggregates FILE
draws the statistics over environments.

--normalise says what 0 and 1 are in the aggregates over environments:
  start      the return at the beginning of training and the highest score of any ended run (the default)
  minmax     the lowest and the highest score of any ended run
  reference  the return at the beginning of training and the best published score of the algorithms shown
  FILE.csv   columns env_id,low,high, such as the scores of a random player and of a human
Exit codes: 0 written, 2 wrong usage, such as a path without runs.
"""

import argparse
import csv
import difflib
import html
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
import webbrowser
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np

from cleanrl_utils import counted, fail
from cleanrl_utils.runs import events, figure, results, stats, tables
from cleanrl_utils.runs.groups import (
    ASIDE,
    differences_in_words,
    group_names,
    group_runs,
    name_runs,
    unnamed_differences,
    without_duplicates,
)
from cleanrl_utils.runs.tables import plain, write_csv

PAGE = Path(__file__).parent / "pages/report"
RETURN = results.RETURN
BINS, RECORDED_BINS = 200, 100
SMOOTH = 2  # points on either side over which the page first averages a run
GENERATOR = '<meta name="generator" content="cleanrl_utils.report">'
MODES = {
    "start": "0 is the return with which training begins (the mean over the first twentieth of the episodes, or of the "
    "points of a recorded curve, of all runs) and 1 the highest score of any ended run of this report in the "
    "environment",
    "minmax": "0 is the lowest and 1 the highest score of any ended run of this report in the environment",
    "reference": "0 is the return with which training begins (the mean over the first twentieth of the episodes, or of "
    "the points of a recorded curve, of all runs) and 1 the best published score of the algorithms shown",
}
TAUS, PARTS = 101, 50  # points of performance profiles, and of the course of the interquartile mean


# Curves


def digits(values, n=5):
    """Numbers rounded to n significant digits, None where they are not finite."""
    values = np.asarray(values, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        decimals = n - 1 - np.floor(np.log10(np.abs(values)))
        scale = 10.0 ** np.clip(decimals, -300, 300)
        rounded = np.where(values == 0, 0.0, np.round(values * scale) / scale)
        rounded = np.where(decimals < 0, np.round(values), rounded)
    return [value if math.isfinite(value) else None for value in rounded.tolist()]


def binned(x, y, end, bins):
    """The means of y in equal bins of x from 0 to its end, nan where a bin is empty. A bin holds its upper edge."""
    good = np.isfinite(x) & np.isfinite(y)
    x, y = x[good], y[good]
    at = np.clip(np.ceil(x / end * bins - 1e-9).astype(int) - 1, 0, bins - 1)
    n = np.bincount(at, minlength=bins)
    with np.errstate(invalid="ignore"):
        return np.bincount(at, weights=y, minlength=bins) / np.where(n, n, np.nan)


def curve(x, y, end, bins):
    """[end, means of the bins], or None without a value."""
    if x is None or not len(x) or not np.isfinite(end) or end <= 0:
        return None
    values = digits(binned(np.asarray(x, dtype=float), np.asarray(y, dtype=float), end, bins))
    return [digits([end], 7)[0], values] if any(value is not None for value in values) else None


def series_of(run, tag):
    if tag == RETURN:
        return run.steps, run.returns, run.seconds
    return run.metrics.get(tag, (np.zeros(0), np.zeros(0), None))


def curves_of(run, tags):
    """The curves of a run: tag -> {"steps": curve, "time": curve}, without those that are not there."""
    found, bins = {}, BINS if run.source == "run" else RECORDED_BINS
    last = run.total_timesteps if run.ended else run.last_step
    for tag in tags:
        steps, values, seconds = series_of(run, tag)
        if not len(steps):
            continue
        both = {"steps": curve(steps, values, max(last, int(np.max(steps))), bins)}
        if seconds is not None and np.isfinite(seconds).any():
            both["time"] = curve(seconds, values, float(np.nanmax(seconds)), bins)
        found[tag] = {axis: points for axis, points in both.items() if points}
    return {tag: both for tag, both in found.items() if both}


def smoothed(values, reach):
    """A moving average over so many points on either side, of those that are known."""
    there = ~np.isnan(values)
    window = np.ones(2 * reach + 1)
    n = np.convolve(there, window)[reach:-reach] if reach else there
    total = np.convolve(np.where(there, values, 0), window)[reach:-reach] if reach else values
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(there, total / n, np.nan)


def on_grid(curves, reach=SMOOTH):
    """Smoothed curves at common places, [curves, points]: straight lines between their points, nan beyond them."""
    end, bins = max(curve[0] for curve in curves), max(len(curve[1]) for curve in curves)
    places, rows = (np.arange(bins) + 0.5) / bins * end, []
    for own_end, values in curves:
        values = smoothed(np.array(values, dtype=float), reach)
        x, there = (np.arange(len(values)) + 0.5) / len(values) * own_end, ~np.isnan(values)
        slack = 1e-9 * x[-1]
        row = np.interp(places, x[there], values[there])
        rows.append(np.where((places < x[there][0] - slack) | (places > x[there][-1] + slack), np.nan, row))
    return np.array(rows)


# Statistics of the view that the page opens with, under the names by which the page looks for them


def ranges(runs, tags):
    """tag -> environment -> the least and the most that any run has seen: no interval goes beyond."""
    found = {tag: {} for tag in tags}
    for tag, run in ((tag, run) for tag in tags for run in runs):
        values = np.asarray(series_of(run, tag)[1], dtype=float)
        values = np.append(values, run.score if tag == RETURN else [])
        if (values := values[np.isfinite(values)]).size:
            low, high = found[tag].get(run.env_id, (np.inf, -np.inf))
            found[tag][run.env_id] = min(low, float(values.min())), max(high, float(values.max()))
    return found


def mean_curve(curves, limits, reach=SMOOTH):
    """The mean of several curves as far as more than half of them go: places, mean and interval within the limits."""
    end, rows = max(curve[0] for curve in curves), on_grid(curves, reach)
    drawn = 2 * (~np.isnan(rows)).sum(axis=0) > len(rows)
    triple = stats.within(stats.bootstrap_curves(rows), *limits)
    places = (np.arange(rows.shape[1]) + 0.5) / rows.shape[1] * end
    return places, *(np.where(drawn, values, np.nan) for values in triple)


def has_score(run):
    return run.ended and math.isfinite(run.score)


def score_interval(scores, limits):
    return stats.within(stats.bootstrap([np.array(scores)], stats.mean_of_means), *limits)


def scales(runs, mode):
    """What counts as 0 and as 1 in each environment, and a sentence about it."""
    by_env, limits = defaultdict(list), {}
    for run in runs:
        by_env[run.env_id].append(run)
    for env_id, group in by_env.items():
        scores = [run.score for run in group if has_score(run)]
        starts = [float(np.mean(run.returns[: max(1, len(run.returns) // 20)])) for run in group if len(run.returns)]
        starts = [start for start in starts if math.isfinite(start)]
        published = [found[0] for run in group if (found := reference_of(run))]
        low = min(scores, default=0.0) if mode == "minmax" or not starts else float(np.mean(starts))
        high = max(published if mode == "reference" else scores, default=low)
        limits[env_id] = low, high
    if mode not in MODES:
        limits = read_limits(Path(mode))
    limits = {env: limits[env] for env in by_env if env in limits and limits[env][1] > limits[env][0]}
    return limits, MODES.get(mode, f"0 and 1 are the columns low and high of {Path(mode).name}")


def read_limits(path):
    try:
        rows = csv.DictReader(path.read_text().splitlines())
        return {row["env_id"]: (float(row["low"]), float(row["high"])) for row in rows}
    except (OSError, KeyError, ValueError, TypeError) as error:
        fail(f"--normalise {path}: needs start, minmax, reference, or a CSV with the columns env_id,low,high ({error})")


def comparable(runs, limits, run_names):
    """name -> environment -> indices of its ended runs with the most steps, of environments with a scale."""
    names = defaultdict(lambda: defaultdict(list))
    for i, run in enumerate(runs):
        if has_score(run) and run.env_id in limits:
            names[run_names[i]][run.env_id].append(i)
    for envs in names.values():
        for env_id, own in envs.items():
            most = max(runs[i].total_timesteps for i in own)
            envs[env_id] = [i for i in own if runs[i].total_timesteps == most]
    return names


def first_suite(names):
    """The environments that the aggregates open with: those in which most can be compared, as the page chooses."""
    sets = {tuple(sorted(envs)) for envs in names.values()}
    suites = [(envs, [name for name in names if set(envs) <= names[name].keys()]) for envs in sets]
    suites = [suite for suite in suites if len(suite[1]) > 1]
    return min(suites, key=lambda suite: (-len(suite[0]) * len(suite[1]), suite[0]), default=((), []))


def course(group, curves, limits):
    """Normalised returns of the runs of an environment at equal parts of their training, [runs, parts]."""
    rows = []
    for run, curve in ((run, curve) for run, curve in zip(group, curves) if curve):
        values = smoothed(np.array(curve[1], dtype=float), SMOOTH)
        there, (low, high) = np.flatnonzero(~np.isnan(values)), limits[run.env_id]
        at = (np.arange(PARTS) + 0.5) / PARTS * len(values) - 0.5
        rows.append((np.interp(at, there, values[there]) - low) / (high - low))
    return np.array(rows)


def iqm_of_courses(groups):
    return stats.iqm([np.moveaxis(group, -2, -1) for group in groups])


def normalised(value, limits):
    low, high = limits
    return (value - low) / (high - low)


def normal_range(envs, limits, seen):
    """The range of normalised values in some environments."""
    ends = [[normalised(value, limits[env]) for value in seen[env]] for env in envs]
    return min(low for low, _ in ends), max(high for _, high in ends)


@dataclass
class Compared:
    """A group in the aggregates: its statistics, each with an interval, and the key under which the page knows it."""

    name: str
    key: str
    scores: list  # normalised, an array for each environment
    iqm: tuple
    profile: tuple
    course: tuple | None  # without curves there is none
    better: tuple | None = None  # the probability to score more than the best; the best itself has none


def compare_groups(runs, curves, limits, seen, run_names):
    """The environments of the first suite, its groups by their interquartile means, and the end of the profiles."""

    def score(i):
        return normalised(runs[i].score, limits[runs[i].env_id])

    names, found = comparable(runs, limits, run_names), []
    envs, chosen = first_suite(names)
    span = normal_range(envs, limits, seen) if envs else None
    every = [score(i) for groups in names.values() for group in groups.values() for i in group]
    end = max([1.0, *every])
    for name in chosen:
        own = [names[name][env] for env in envs]
        scores, course_of_iqm = [np.array([score(i) for i in group]) for group in own], None
        of_returns = {i: curves[i].get(RETURN, {}).get("steps") for group in own for i in group}
        courses = [course([runs[i] for i in group], [of_returns[i] for i in group], limits) for group in own]
        if all(len(group) for group in courses):
            course_of_iqm = stats.within(stats.bootstrap(courses, iqm_of_courses, reps=300), *span)
        key = ";".join(",".join(map(str, group)) for group in own)
        middle = stats.within(stats.bootstrap(scores, stats.iqm), *span)
        profile = stats.performance_profile(scores, np.linspace(0, end, TAUS))
        found.append(Compared(name, key, scores, middle, profile, course_of_iqm))
    best = max(found, key=lambda group: group.iqm[0], default=None)
    for group in found:
        if group is not best:
            group.better = stats.probability_of_improvement(group.scores, best.scores)
    return envs, found, end


def aggregates(found):
    """The statistics over environments under the names by which the page looks for them."""
    numbers, best = {}, next((group for group in found if not group.better), None)
    for group in found:
        numbers[f"iqm {group.key}"] = digits(group.iqm)
        numbers[f"profile {group.key}"] = [digits(row) for row in np.stack(group.profile, axis=1)]
        if group.course:
            numbers[f"course {SMOOTH} {group.key}"] = [digits(row) for row in np.stack(group.course, axis=1)]
        if group.better:
            numbers[f"better {group.key}>{best.key}"] = digits(group.better)
    return numbers


def statistics(runs, curves, seen, names):
    """The intervals of scores, and of the curves of groups that have three or more."""
    numbers = {}
    for (env_id, *_), group in group_runs(runs, names).items():
        if scored := [i for i in group if has_score(runs[i])]:
            triple = score_interval([runs[i].score for i in scored], seen[RETURN][env_id])
            numbers[f"score {','.join(map(str, scored))}"] = digits(triple, 7)
        for tag in seen:
            for axis in ("steps", "time"):
                found = [curves[i][tag][axis] for i in group if axis in curves[i].get(tag, {})]
                if len(found) > 2:
                    _, low, high = stats.within(stats.bootstrap_curves(on_grid(found)), *seen[tag][env_id])
                    numbers[f"band {tag} {axis} {SMOOTH} {','.join(map(str, group))}"] = [digits(low), digits(high)]
    return numbers


# Tables


def reference_of(run):
    return results.reference(run.script, run.env_id, run.total_timesteps, run.args)


def score_rows(runs, names, seen):
    rows = []
    for (env_id, name, steps), group in sorted(group_runs(runs, names).items()):
        going = sum(not runs[i].ended for i in group)
        scores = [runs[i].score for i in group if has_score(runs[i])]
        mean, low, high = score_interval(scores, seen[env_id]) if scores else (math.nan,) * 3
        published, deviation = reference_of(runs[group[0]]) or (math.nan, math.nan)
        row = {"env_id": env_id, "algorithm": name, "steps": steps, "runs": len(scores), "not_ended": going}
        row |= {"without_score": len(group) - len(scores) - going, "score": mean, "low": low, "high": high}
        row |= {"score_std": np.std(scores, ddof=1) if len(scores) > 1 else math.nan}
        row |= {"reference": published, "reference_std": deviation}
        row |= {"seeds": " ".join(str(seed) for seed in sorted(runs[i].seed for i in group if has_score(runs[i])))}
        row |= {"commits": " ".join(sorted({word[:10] for i in group for word in runs[i].commit.split()}))}
        rows.append(row)
    return rows


def write_markdown(path, rows, title):
    lines = [
        f"# {title}: scores",
        "",
        "A score is the mean return of the last 100 episodes of a run; shown is the mean over runs with its 95 %",
        "interval, which one or two runs do not have. The sign ≠ stands beside the runs of several commits.",
        "",
        "| Environment | Algorithm | Score | 95 % interval | Runs | Steps | Published |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        interval = {1: "one run", 2: "two runs"}.get(row["runs"], "–")
        if math.isfinite(row["low"]):
            interval = f"[{plain(row['low'])}, {plain(row['high'])}]"
        mixed = " ≠" if " " in row["commits"] else ""
        deviation = f" ± {plain(row['reference_std'])}" if math.isfinite(row["reference_std"]) else ""
        cells = [
            row["env_id"],
            row["algorithm"],
            plain(row["score"]) or "–",
            interval,
            f"{row['runs']}{mixed}",
            f"{row['steps']:,}",
        ]
        cells += [f"{plain(row['reference'])}{deviation}" or "–"]
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |")
    path.write_text("\n".join(lines) + "\n")


# The page


def stages(videos, most):
    """At most so many videos of a run, evenly spaced, with the last and the first."""
    if len(videos) <= most:
        return videos
    return [videos[i] for i in np.unique(np.linspace(len(videos) - 1, 0, most).round().astype(int))]


def copy_videos(run, name, output, most):
    """Copy videos of a run beside the page: [[step, seconds, path from the page]]."""
    copied = []
    for step, path in stages(run.videos, most):
        folder = output / "videos" / re.sub(r"[^\w.-]+", "-", name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            target = folder / path.name
            if not target.exists() or target.stat().st_mtime < path.stat().st_mtime:
                shutil.copyfile(path, target)
        except OSError as error:
            print(f"left out: {path}: {error.strerror}", file=sys.stderr)
            continue
        seconds = None
        if run.seconds is not None and len(run.steps):
            (seconds,) = digits([np.interp(step, run.steps, run.seconds)])
        copied.append([step, seconds, quote(target.relative_to(output).as_posix())])
    return copied


def videos_of(data):
    """The paths of the videos that a page with these data shows."""
    return {unquote(path) for run in data["runs"] for _, _, path in run["videos"]}


def data_of(page):
    """The data of a page that is there already, without a run if there is none."""
    found = re.search(r'id="data">(.*?)</script>', page.read_text()) if page.is_file() else None
    return json.loads(found[1]) if found else {"runs": []}


def most_common_args(runs):
    """For each algorithm the flags that all its runs have, with their most common values."""
    bases = {}
    for name in sorted({run.exp_name for run in runs}):
        dicts = [run.args for run in runs if run.exp_name == name]
        base = {}
        for key in set.intersection(*(set(args) for args in dicts)):
            texts = Counter(json.dumps(args[key], default=str) for args in dicts)
            base[key] = json.loads(texts.most_common(1)[0][0])
        bases[name] = {key: base[key] for key in dicts[0] if key in base}
    return bases


def run_data(run, name, curves, base, packages, output, videos, apart):
    """A run as the page has it. The flags are those that differ from the base of its algorithm."""
    folder = None
    if run.folder:
        link = os.path.relpath(run.folder.resolve(), output.resolve()) if run.folder.exists() else ""
        folder = [str(run.folder), quote(Path(link).as_posix()) + "/"]
    seconds = float(np.nanmax(run.seconds)) if run.seconds is not None and np.isfinite(run.seconds).any() else math.nan
    reference = reference_of(run)
    return {
        "id": name,
        "env": run.env_id,
        "algo": run.exp_name,
        "seed": run.seed,
        "total": run.total_timesteps,
        "last": run.last_step,
        "ended": bool(run.ended),
        "score": digits([run.score], 7)[0],
        "source": run.source,
        "episodes": len(run.returns) if run.source == "run" else None,
        "seconds": digits([seconds])[0],
        "commit": run.commit,
        "command": run.command,
        "packages": packages,
        "folder": folder,
        "curves": curves,
        "args": {key: value for key, value in run.args.items() if key not in base or base[key] != value},
        "reference": digits(reference, 7) if reference else None,
        "videos": copy_videos(run, name, output, videos),
        "budget": apart,
    }


def page_data(runs, names, tags, options):
    """Everything that the page knows, for JSON."""
    ids, curves, seen = name_runs(runs), [curves_of(run, tags) for run in runs], ranges(runs, tags)
    limits, text = scales(runs, options.normalise)
    without = sorted({run.env_id for run in runs} - limits.keys())
    left = f" Left out, without such a scale: {', '.join(without)}." if without else ""
    _, compared, end = compare_groups(runs, curves, limits, seen[RETURN], names)
    bases, packages = most_common_args(runs), {}
    totals = defaultdict(set)
    for run in runs:
        totals[run.env_id, run.exp_name].add(run.total_timesteps)
    listed = []
    for run, id, name, own in zip(runs, ids, names, curves):
        place = packages.setdefault(json.dumps(run.packages, default=str), len(packages))
        apart = len(totals[run.env_id, run.exp_name]) > 1
        listed.append(run_data(run, id, own, bases[run.exp_name], place, options.output, options.videos, apart))
        listed[-1]["name"] = name
    envs, algorithms = len({run.env_id for run in runs}), len({run.exp_name for run in runs})
    now = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())), UTC)
    counts = zip((len(runs), algorithms, envs), ("run", "algorithm", "environment"))
    summary = ", ".join(f"{n:,} {word}{'' if n == 1 else 's'}" for n, word in counts)
    left_out = f"; {options.duplicates} duplicates left out" if options.duplicates else ""
    return {
        "summary": f"{summary}; made {now:%Y-%m-%d %H:%M} UTC{left_out}",
        "metrics": tags,
        "aside": sorted(ASIDE),
        "smooth": SMOOTH,
        "runs": listed,
        "bases": bases,
        "packages": [json.loads(text) for text in packages],
        "numbers": aggregates(compared) | statistics(runs, curves, seen, names),
        "unnamed": unnamed_differences(runs, names),
        "seen": {tag: {env: digits(pair, 7) for env, pair in envs.items()} for tag, envs in seen.items()},
        "norm": {env: digits(pair, 7) for env, pair in limits.items()},
        "norm_text": f"Normalised scores: {text}.{left}",
        "taus": digits([end])[0],
    }


def write_page(path, title, data):
    """Put the parts of the page into one file, and that in place at once."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, default=str)
    parts = {"title": html.escape(title), "data": text.replace("<", "\\u003c")}
    parts |= {"css": (PAGE / "page.css").read_text()}
    parts["js"] = "\n".join((PAGE / f"{name}.js").read_text() for name in ("stats", "plot", "page"))
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], (PAGE / "page.html").read_text())
    draft = path.with_suffix(".tmp")
    draft.write_text(page, encoding="utf-8", errors="backslashreplace")
    draft.replace(path)


def check_output(folder):
    """End what could not be written, or would overwrite a page that is not a report."""
    page = folder / "index.html"
    if page.is_file() and GENERATOR not in page.read_text(errors="replace")[:2000]:
        fail(f"-o {folder}: its index.html is not a report and would be overwritten, name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.tmp").touch()
    except OSError as error:
        fail(f"-o {folder}: {error.strerror}")


def finite(value):
    """A value from args.json without what JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list) else value


def as_value(text):
    """A flag of a recorded command as args.json would have it."""
    words = {"True": True, "False": False, "None": None}
    try:
        return words[text] if text in words else json.loads(text)
    except ValueError:
        return text


def with_values(tags, runs):
    """The tags that some run has a value of; the others are named, with what may have been meant."""
    there = {RETURN} | {tag for run in runs for tag in run.metrics}
    if missing := [tag for tag in tags if tag not in there]:
        folder = next((run.folder for run in runs if run.folder), None)
        names = list(events.read_scalars(folder)) if folder else []
        for tag in missing:
            near = difflib.get_close_matches(tag, names, n=3, cutoff=0.5)
            meant = f", near it: {' '.join(near)}" if near else ""
            print(f"left out: --metrics {tag}: no run has it{meant}", file=sys.stderr)
    return [tag for tag in tags if tag in there]


def named(wanted, there, flag):
    """The names that a flag lists, or all if it lists none; one that no run has ends with those near it."""
    for name in wanted:
        if name not in there:
            near = difflib.get_close_matches(name, there, n=3, cutoff=0.5) or sorted(there)[:8]
            fail(f"{flag}: no run has {name}, there are: {' '.join(near)}")
    return wanted or there


def read(options):
    """The runs that the options ask for, in order, and the tags that they have."""
    tags = list(dict.fromkeys([RETURN, *options.metrics]))
    try:
        if sys.stderr.isatty():
            print("Reading runs ...", file=sys.stderr, flush=True)
        found = results.load(options.paths, tags=tuple(tags[1:]))
    except ValueError as error:
        fail(error)
    if not found:
        fail(f"no runs in {' '.join(map(str, options.paths))}")
    for run in found:
        run.env_id, run.exp_name = str(run.env_id), str(run.exp_name)
    envs = named(options.env_ids, {run.env_id for run in found}, "--env-ids")
    names = named(options.exp_names, {run.exp_name for run in found}, "--exp-names")
    steps = named(list(map(str, options.steps)), {str(run.total_timesteps) for run in found}, "--steps")
    named(list(options.labels), {run.exp_name for run in found}, "--labels")
    shown = Counter(options.labels.get(name, name) for name in {run.exp_name for run in found})
    if twice := [label for label, n in shown.items() if n > 1]:
        fail(f"--labels: {twice[0]} would be the name of several algorithms")
    found = [run for run in found if run.env_id in envs and run.exp_name in names and str(run.total_timesteps) in steps]
    if not found:
        fail("no run has all that --env-ids, --exp-names and --steps ask for")
    runs, tags = without_duplicates(found), with_values(tags, found)
    for run in runs:
        if run.source == "record":
            run.args = {name: as_value(text) for name, text in run.args.items()}
        run.args = finite(run.args)
    runs.sort(key=lambda run: (run.env_id, run.exp_name, run.total_timesteps, run.seed))
    options.duplicates = len(found) - len(runs)
    return runs, tags


def title_of(options):
    """The user's title, or what the report is of."""
    names = [str(path) for path in options.paths[:3]] + ["..."] * (len(options.paths) > 3)
    return options.title or f"Report of {', '.join(names)}"


def write_report(runs, tags, options):
    """Write the page and the tables beside it; returns the path of the page."""
    names = group_names(runs, options.labels)
    check_output(options.output)
    page = options.output / "index.html"
    earlier, data = data_of(page), page_data(runs, names, tags, options)
    write_page(page, title_of(options), data)
    for video in videos_of(earlier) - videos_of(data):
        (options.output / video).unlink(missing_ok=True)
    rows = score_rows(runs, names, ranges(runs, [RETURN])[RETURN])
    write_csv(options.output / "scores.csv", rows)
    write_markdown(options.output / "scores.md", rows, title_of(options))
    return page


# Figures and tables for papers


def in_order(groups, runs, labels):
    """The groups as they are drawn: in the order of --labels, then by name."""
    order = {name: i for i, name in enumerate(labels)}
    rank = lambda item: (item[0][0], order.get(runs[item[1][0]].exp_name, len(order)), *item[0][1:])  # noqa: E731
    return sorted(groups.items(), key=rank)


def panels_of(runs, tags, options):
    """A panel for each environment and scalar, with a line for each group; and the runs behind each line."""
    names, seen, behind = group_names(runs, options.labels), ranges(runs, tags), defaultdict(list)
    curves, panels = [curves_of(run, tags) for run in runs], defaultdict(list)
    steps = defaultdict(set)
    for run, name in zip(runs, names):
        steps[run.env_id, name].add(run.total_timesteps)
    for (env_id, name, total), group in in_order(group_runs(runs, names), runs, options.labels):
        label = f"{name} · {figure.tick(total)} steps" if len(steps[env_id, name]) > 1 else name
        for tag in tags:
            drawn = [i for i in group if options.over in curves[i].get(tag, {})]
            if drawn:
                found = [curves[i][tag][options.over] for i in drawn]
                line = figure.Line(label, *mean_curve(found, seen[tag][env_id], options.smooth))
                panels[env_id, tag].append((line, max(end for end, _ in found)))
                behind[label] += [[runs[i] for i in drawn]]
    return [make_panel(env_id, tag, lines, options.over) for (env_id, tag), lines in panels.items()], behind


def make_panel(env_id, tag, lines, over):
    """A panel of figure.draw, with time in a unit that suits it."""
    end, y_label = max(end for _, end in lines), "Episodic return" if tag == RETURN else tag
    if over == "steps":
        return figure.Panel(env_id, [line for line, _ in lines], "Environment steps", y_label, end)
    unit, size = ("hours", 3600) if end > 7200 else ("minutes", 60) if end > 120 else ("seconds", 1)
    lines = [replace(line, x=line.x / size) for line, _ in lines]
    return figure.Panel(env_id, lines, f"Training time ({unit})", y_label, end / size)


def seeds_in_words(groups):
    """How many runs are behind each line, and which seeds, if these are the same everywhere."""
    sizes = sorted({len(group) for group in groups})
    seeds = {tuple(sorted(run.seed for run in group)) for group in groups}
    runs = f"{sizes[0]} run" + "s" * (sizes[0] > 1) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} runs"
    if len(seeds) == 1 and len(own := seeds.pop()) > 1 and own == tuple(range(own[0], own[-1] + 1)):
        runs += f" (seeds {own[0]} to {own[-1]})"
    return runs, sizes


def caption_of(behind, tags, smooth, missing=0):
    """What a figure shows, in words for its caption; `missing` runs have no curve."""
    groups = [group for own in behind.values() for group in own]
    runs, sizes = seeds_in_words(groups)
    what = "episodic return" if tags == [RETURN] else "value"
    text = [f"Learning curves: the mean {what} over {runs} of each line."]
    if sizes[-1] > 2:
        text.append(
            "Shaded: its 95 % interval at each point, from a bootstrap over runs, within the range of values seen."
        )
    if sizes[0] < 3:
        text.append("One or two runs have no interval.")
    if len(sizes) > 1 and all(len({len(group) for group in own}) == 1 for own in behind.values()):
        text.append(f"Runs: {', '.join(f'{name} {len(own[0])}' for name, own in behind.items())}.")
    going = sum(not run.ended for group in groups for run in group)
    if going:
        text.append(f"{going} of the runs had not ended.")
    if missing:
        text.append(f"Left out: {counted(missing, 'run')} without a curve.")
    smoothing = f" and smoothed over {2 * smooth + 1} of them" if smooth else ""
    text.append(f"Each run is averaged in equal bins{smoothing}.")
    return " ".join(text)


def write_figure(runs, tags, options):
    panels, behind = panels_of(runs, tags, options)
    if not panels:
        fail(f"--figure: no run has a curve over {'steps' if options.over == 'steps' else 'wall time'}")
    drawn = {id(run) for own in behind.values() for group in own for run in group}
    caption = caption_of(behind, tags, options.smooth, len(runs) - len(drawn))
    pairs = [(run, name) for run, name in zip(runs, group_names(runs, options.labels)) if id(run) in drawn]
    caption = " ".join([caption, *differences_in_words(*zip(*pairs), options.labels)])
    below = caption if options.caption else ""
    figure.draw(panels, options.figure, options.columns, options.width, options.title or "", below, caption)
    shown = f"{len(panels)} panel{'s' * (len(panels) > 1)}, {len(behind)} line{'s' * (len(behind) > 1)}"
    print(f"{', '.join(map(str, options.figure))}: {shown}. Caption:\n  {caption}")


def aggregate_panels(found, end):
    """The statistics over environments as panels."""
    best = next(group.name for group in found if not group.better)
    parts, taus = (np.arange(PARTS) + 0.5) / PARTS * 100, np.linspace(0, end, TAUS)
    rows = [figure.Row(group.name, *group.iqm) for group in found]
    better = [figure.Row(group.name, *group.better) for group in found if group.better]
    courses = [figure.Line(group.name, parts, *group.course) for group in found if group.course]
    profiles = [figure.Line(group.name, taus, *group.profile) for group in found]
    panels = [
        figure.Intervals("Interquartile mean", rows, "Normalised score"),
        figure.Panel("Over training", courses, "% of the steps of training", "Normalised return", 100),
        figure.Panel("Performance profiles", profiles, "Normalised score τ", "Share of runs > τ", end),
        figure.Intervals("Probability of improvement", better, f"P(better than {best})", (0, 1), 0.5),
    ]
    return [panel for panel in panels if panel.lines]


def write_aggregates(runs, options):
    seen, names = ranges(runs, [RETURN])[RETURN], group_names(runs, options.labels)
    limits, scale = scales(runs, options.normalise)
    envs, found, end = compare_groups(runs, [curves_of(run, [RETURN]) for run in runs], limits, seen, names)
    if not found:
        fail("--aggregates: no two algorithms have ended runs in the same environments")
    sizes = sorted({len(scores) for group in found for scores in group.scores})
    each = f"{sizes[0]} to {sizes[-1]} runs" if len(sizes) > 1 else f"{sizes[0]} run{'s' * (sizes[0] > 1)}"
    order = {name: i for i, name in enumerate(options.labels.values())}
    found.sort(key=lambda group: (order.get(group.name, len(order)), group.name))
    best = next(group.name for group in found if not group.better)
    text = [
        f"{len(found)} algorithms over {len(envs)} environment{'s' * (len(envs) > 1)} ({', '.join(envs)}), {each} each:"
    ]
    text.append("interquartile mean of the scores, and of the returns over training, performance profiles, and the")
    text.append(
        f"probability that a run scores more than one of {best}, with 95 % intervals from a bootstrap over runs,"
    )
    text.append(f"stratified by environment. In each environment {scale}.")
    caption = " ".join(text)
    below, columns = caption if options.caption else "", options.columns or 4
    panels = aggregate_panels(found, end)
    figure.draw(
        panels, options.aggregates, columns, options.width or 1.9 * columns, options.title or "", below, caption
    )
    print(f"{', '.join(map(str, options.aggregates))}: {len(found)} algorithms. Caption:\n  {caption}")


def write_tables(runs, options):
    names, seen = group_names(runs, options.labels), ranges(runs, [RETURN])[RETURN]
    order = {name: i for i, name in enumerate(options.labels.values())}
    rows = [row for row in score_rows(runs, names, seen) if row["runs"]]
    if not rows:
        fail("--table: no run has ended with a score")
    rows.sort(key=lambda row: (row["env_id"], row["steps"], order.get(row["algorithm"], len(order))))
    n, going = tables.usual_runs(rows), sum(not run.ended for run in runs)
    mean_over = f"{n} run{'s' * (n != 1)}" + " if not said otherwise" * (len({row["runs"] for row in rows}) > 1)
    text = [f"{options.title}." if options.title else "Scores."]
    text.append(f"The mean return of the last {results.EPISODES} episodes, averaged over {mean_over},")
    text.append("and in brackets its 95 % interval from a bootstrap over runs, which one or two runs do not have.")
    text += ["Bold: the highest mean."] * bool(tables.best_rows(rows))
    text += [f"Left out: {going} that had not ended."] * bool(going)
    pairs = [(run, name) for run, name in zip(runs, names) if has_score(run)]
    text += [words.replace("Lines", "Scores", 1) for words in differences_in_words(*zip(*pairs), options.labels)]
    for path in options.table:
        tables.write(rows, path, " ".join(text))
    print(f"{', '.join(map(str, options.table))}: {len(rows)} score{'s' * (len(rows) > 1)}")


# The command line


def pair(text):
    name, equals, label = text.partition("=")
    if not name or not equals or not label:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=TEXT, such as ppo=PPO")
    return name, label


def add_page_options(parser):
    parser.add_argument("-o", "--output", type=Path, help="folder of the page (default: report)")
    parser.add_argument(
        "--normalise", default="start", help="start, minmax, reference or a CSV, see above (default: start)"
    )
    parser.add_argument(
        "--videos", type=int, default=6, metavar="N", help="videos of each run, evenly spaced (default: 6)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def add_paper_options(parser):
    paper = parser.add_argument_group("for papers", "without -o, no page is written then")
    paper.add_argument(
        "--figure", type=Path, action="append", default=[], metavar="FILE", help="learning curves: .pdf, .svg or .png"
    )
    paper.add_argument(
        "--aggregates",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="over environments: .pdf, .svg, .png",
    )
    paper.add_argument(
        "--table", type=Path, action="append", default=[], metavar="FILE", help="scores: .tex, .md or .csv"
    )
    paper.add_argument(
        "--columns", type=int, default=0, metavar="N", help="panels beside each other (default: by number)"
    )
    paper.add_argument(
        "--width",
        type=float,
        default=0.0,
        metavar="INCHES",
        help="of the figure (default: 2.4 per column, 3.5 for one)",
    )
    paper.add_argument("--over", choices=("steps", "time"), default="steps", help="the axis of x (default: steps)")
    paper.add_argument(
        "--smooth", type=int, default=SMOOTH, metavar="N", help=f"points on either side to average (default: {SMOOTH})"
    )
    paper.add_argument("--caption", action="store_true", help="set the caption below the figure, and not only print it")


def parse_args():
    style = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="python -m cleanrl_utils.report", **style)
    parser.add_argument("paths", type=Path, nargs="+", help="run folders, folders of these, or recorded results")
    parser.add_argument("--title", help="title of page, figure and table (default: of a page, the paths)")
    parser.add_argument("--env-ids", nargs="+", default=[], metavar="ID", help="only these environments")
    parser.add_argument("--exp-names", nargs="+", default=[], metavar="NAME", help="only these algorithms")
    parser.add_argument("--steps", type=int, nargs="+", default=[], metavar="N", help="only runs of so many steps")
    parser.add_argument(
        "--labels", nargs="+", type=pair, default=[], metavar="NAME=TEXT", help="what to call algorithms: ppo=PPO"
    )
    parser.add_argument(
        "--metrics", nargs="+", default=[], metavar="TAG", help="other scalars, such as charts/SPS losses/td_loss"
    )
    add_page_options(parser)
    add_paper_options(parser)
    options = parser.parse_args()
    options.labels = dict(options.labels)
    if options.videos < 0:
        fail("--videos must be 0 or more")
    if min(options.columns, options.smooth) < 0 or not 0 <= options.width < 100:
        fail("--columns, --smooth and --width must not be below 0, and a width is in inches")
    if options.normalise not in MODES:
        read_limits(Path(options.normalise))
    for path in options.figure:
        figure.check(path, "--figure")
    for path in options.aggregates:
        figure.check(path, "--aggregates")
    for path in options.table:
        tables.check(path, "--table")
    if options.open or not (options.figure or options.aggregates or options.table):
        options.output = options.output or Path("report")
    return options


def main():
    options = parse_args()
    runs, tags = read(options)
    try:
        if options.figure:
            write_figure(runs, tags, options)
        if options.aggregates:
            write_aggregates(runs, options)
        if options.table:
            write_tables(runs, options)
    except OSError as error:
        fail(f"cannot write {error.filename}: {error.strerror}")
    if not options.output:
        return
    page, n = write_report(runs, tags, options), len(runs)
    size = page.stat().st_size / 1e6
    print(f"{n} run{'' if n == 1 else 's'}, {size:.1f} MB. Open {page} in a browser, or serve it: ", end="")
    print(f"python -m http.server -d {shlex.quote(str(options.output))}")
    if options.open:
        webbrowser.open(page.resolve().as_uri())


if __name__ == "__main__":
    main()
