"""A page that shows the learning curves of runs: python -m cleanrl_utils.report runs benchmark/results -o report

Writes report/index.html, which needs no server, no network and no other file but the videos beside it: learning curves
by environment over steps and over wall time with their intervals, zoom, filters, the trace of every curve to its runs
(hyperparameters, command, commit, packages, videos), aggregates over environments and tables of scores, which are also
in report/scores.md and report/scores.csv. Paths are run folders, folders with run folders in them, or recorded results.

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
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np

from cleanrl_utils import fail
from cleanrl_utils.runs import events, results, stats

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


# Runs


def without_duplicates(runs):
    """The runs without those that are there twice: same seed, flags and commit, or a record of a run that is there.

    The same seed again tells nothing new about the spread. Of two, the one that has ended, or else the later, is kept.
    """
    kept, alike = {}, defaultdict(list)
    for run in runs:
        flags = run.args if run.source == "run" else run.command
        key = (
            run.source,
            run.env_id,
            run.exp_name,
            run.seed,
            run.total_timesteps,
            run.commit,
            json.dumps(flags, default=str),
        )
        if key not in kept or (run.ended, run.last_step) >= (kept[key].ended, kept[key].last_step):
            kept[key] = run
    for run in kept.values():
        if run.source == "run":
            alike[run.env_id, run.exp_name, run.seed, run.total_timesteps].append(run)

    def recorded(record):
        """Whether a record is of a run that is there; its score is rounded."""
        runs = alike[record.env_id, record.exp_name, record.seed, record.total_timesteps]
        scores = [run.score for run in runs if results.of_commit(record, run.commit)]
        return any(math.isclose(score, record.score, rel_tol=1e-4, abs_tol=0.006) for score in scores)

    return [run for run in kept.values() if run.source == "run" or not recorded(run)]


def repeated_seeds(runs):
    """Whether a seed was run at several commits: then a mean over all runs would hide what changed between these."""
    commits = defaultdict(set)
    for run in runs:
        commits[run.env_id, run.exp_name, run.total_timesteps, run.seed].add(short_commit(run))
    return any(len(several) > 1 for several in commits.values())


def short_commit(run):
    return " ".join(word[:10] for word in run.commit.split())


def group_name(run, by):
    return run.exp_name if by == "algorithm" else f"{run.exp_name} @ {short_commit(run) or '?'}"


def name_runs(runs):
    """A name for each run that nothing else has, for links: that of its folder, or what a record says of it."""
    names, seen = [], Counter()
    folders = Counter(run.folder for run in runs)
    for run in runs:
        name = run.folder.name if run.folder else f"{run.env_id}__{run.exp_name}__{run.seed}"
        name += f"__seed{run.seed}" if run.folder and folders[run.folder] > 1 else ""  # many seeds trained side by side
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names


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


def group_runs(runs, by):
    """The indices of the runs of each environment and name; runs with other numbers of steps are kept apart."""
    groups = defaultdict(list)
    for i, run in enumerate(runs):
        groups[run.env_id, group_name(run, by), run.total_timesteps].append(i)
    return groups


def has_score(run):
    return run.ended and math.isfinite(run.score)


def score_interval(scores):
    return stats.bootstrap([np.array(scores)], stats.mean_of_means)


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


def comparable(runs, limits, by):
    """name -> environment -> indices of its ended runs with the most steps, of environments with a scale."""
    names = defaultdict(lambda: defaultdict(list))
    for i, run in enumerate(runs):
        if has_score(run) and run.env_id in limits:
            names[group_name(run, by)][run.env_id].append(i)
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


def aggregates(runs, curves, limits, by):
    """The statistics over environments of the first suite, and the end of the axis of the profiles."""

    def normalised(i):
        low, high = limits[runs[i].env_id]
        return (runs[i].score - low) / (high - low)

    names, numbers = comparable(runs, limits, by), {}
    envs, chosen = first_suite(names)
    own = {name: [names[name][env] for env in envs] for name in chosen}
    scores = {name: [np.array([normalised(i) for i in group]) for group in own[name]] for name in chosen}
    keys = {name: ";".join(",".join(map(str, group)) for group in own[name]) for name in chosen}
    every = [normalised(i) for groups in names.values() for group in groups.values() for i in group]
    end = max([1.0, *every])
    for name in chosen:
        numbers[f"iqm {keys[name]}"] = stats.bootstrap(scores[name], stats.iqm)
        profile = stats.performance_profile(scores[name], np.linspace(0, end, TAUS))
        numbers[f"profile {keys[name]}"] = np.stack(profile, axis=1)
        of_returns = {i: curves[i].get(RETURN, {}).get("steps") for group in own[name] for i in group}
        courses = [course([runs[i] for i in group], [of_returns[i] for i in group], limits) for group in own[name]]
        if all(len(group) for group in courses):
            triple = stats.bootstrap(courses, iqm_of_courses, reps=300)
            numbers[f"course {SMOOTH} {keys[name]}"] = np.stack(triple, axis=1)
    if chosen:
        best = max(chosen, key=lambda name: numbers[f"iqm {keys[name]}"][0])
        for name in chosen:
            if name != best:
                better = stats.probability_of_improvement(scores[name], scores[best])
                numbers[f"better {keys[name]}>{keys[best]}"] = better
    return {key: [digits(row) for row in np.atleast_2d(value)] for key, value in numbers.items()}, end


def statistics(runs, curves, tags, by):
    """The intervals of scores, and of the curves of groups that have three or more."""
    numbers = {}
    for group in group_runs(runs, by).values():
        if scored := [i for i in group if has_score(runs[i])]:
            numbers[f"score {','.join(map(str, scored))}"] = digits(score_interval([runs[i].score for i in scored]), 7)
        for tag in tags:
            for axis in ("steps", "time"):
                found = [curves[i][tag][axis] for i in group if axis in curves[i].get(tag, {})]
                if len(found) > 2:
                    _, low, high = stats.bootstrap_curves(on_grid(found))
                    numbers[f"band {tag} {axis} {SMOOTH} {','.join(map(str, group))}"] = [digits(low), digits(high)]
    return numbers


# Tables


def reference_of(run):
    return results.reference(run.script, run.env_id, run.total_timesteps, run.args)


def score_rows(runs, by):
    rows = []
    for (env_id, name, steps), group in sorted(group_runs(runs, by).items()):
        going = sum(not runs[i].ended for i in group)
        scores = [runs[i].score for i in group if has_score(runs[i])]
        mean, low, high = score_interval(scores) if scores else (math.nan,) * 3
        published, deviation = reference_of(runs[group[0]]) or (math.nan, math.nan)
        row = {"env_id": env_id, "algorithm": name, "steps": steps, "runs": len(scores), "not_ended": going}
        row |= {"without_score": len(group) - len(scores) - going, "score": mean, "low": low, "high": high}
        row |= {"score_std": np.std(scores, ddof=1) if len(scores) > 1 else math.nan}
        row |= {"reference": published, "reference_std": deviation}
        row |= {"seeds": " ".join(str(seed) for seed in sorted(runs[i].seed for i in group if has_score(runs[i])))}
        row |= {"commits": " ".join(sorted({word[:10] for i in group for word in runs[i].commit.split()}))}
        rows.append(row)
    return rows


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
    curves = [curves_of(run, tags) for run in runs]
    limits, text = scales(runs, options.normalise)
    without = sorted({run.env_id for run in runs} - limits.keys())
    left = f" Left out, without such a scale: {', '.join(without)}." if without else ""
    numbers, end = aggregates(runs, curves, limits, options.by)
    for key, rows in numbers.items():
        numbers[key] = rows if key.startswith(("profile", "course")) else rows[0]
    bases, packages = most_common_args(runs), {}
    totals = defaultdict(set)
    for run in runs:
        totals[run.env_id, run.exp_name].add(run.total_timesteps)
    listed = []
    for run, name, own in zip(runs, names, curves):
        place = packages.setdefault(json.dumps(run.packages, default=str), len(packages))
        apart = len(totals[run.env_id, run.exp_name]) > 1
        listed.append(run_data(run, name, own, bases[run.exp_name], place, options.output, options.videos, apart))
    envs, algorithms = len({run.env_id for run in runs}), len({run.exp_name for run in runs})
    now = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())), UTC)
    counts = zip((len(runs), algorithms, envs), ("run", "algorithm", "environment"))
    summary = ", ".join(f"{n:,} {word}{'' if n == 1 else 's'}" for n, word in counts)
    left_out = f"; {options.duplicates} duplicates left out" if options.duplicates else ""
    return {
        "summary": f"{summary}; made {now:%Y-%m-%d %H:%M} UTC{left_out}",
        "metrics": tags,
        "by": options.by,
        "smooth": SMOOTH,
        "runs": listed,
        "bases": bases,
        "packages": [json.loads(text) for text in packages],
        "numbers": numbers | statistics(runs, curves, tags, options.by),
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


def build(options):
    """Read the runs and write the page; returns its path and the number of runs."""
    tags = list(dict.fromkeys([RETURN, *options.metrics]))
    try:
        if sys.stderr.isatty():
            print("Reading runs ...", file=sys.stderr, flush=True)
        found = results.load(options.paths, tags=tuple(tags[1:]))
    except ValueError as error:
        fail(error)
    if not found:
        fail(f"no runs in {' '.join(map(str, options.paths))}")
    runs, tags = without_duplicates(found), with_values(tags, found)
    for run in runs:
        if run.source == "record":
            run.args = {name: as_value(text) for name, text in run.args.items()}
        run.args = finite(run.args)
        run.env_id, run.exp_name = str(run.env_id), str(run.exp_name)
    runs.sort(key=lambda run: (run.env_id, run.exp_name, run.total_timesteps, run.seed))
    options.duplicates = len(found) - len(runs)
    options.by = "commit" if repeated_seeds(runs) else "algorithm"
    check_output(options.output)
    page = options.output / "index.html"
    earlier, data = data_of(page), page_data(runs, name_runs(runs), tags, options)
    write_page(page, options.title, data)
    for video in videos_of(earlier) - videos_of(data):
        (options.output / video).unlink(missing_ok=True)
    rows = score_rows(runs, options.by)
    write_csv(options.output / "scores.csv", rows)
    write_markdown(options.output / "scores.md", rows, options.title)
    return page, len(runs)


def main():
    style = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="python -m cleanrl_utils.report", **style)
    parser.add_argument("paths", type=Path, nargs="+", help="run folders, folders of these, or recorded results")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report"), help="folder of the page (default: report)"
    )
    parser.add_argument("--title", default="Open RL Benchmark", help="title of the page (default: Open RL Benchmark)")
    parser.add_argument(
        "--metrics", nargs="+", default=[], metavar="TAG", help="other scalars, such as charts/SPS losses/td_loss"
    )
    parser.add_argument(
        "--normalise", default="start", help="start, minmax, reference or a CSV, see above (default: start)"
    )
    parser.add_argument(
        "--videos", type=int, default=6, metavar="N", help="videos of each run, evenly spaced (default: 6)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    options = parser.parse_args()
    if options.videos < 0:
        fail("--videos must be 0 or more")
    if options.normalise not in MODES:
        read_limits(Path(options.normalise))
    page, n = build(options)
    size = page.stat().st_size / 1e6
    print(f"{n} run{'' if n == 1 else 's'}, {size:.1f} MB. Open {page} in a browser, or serve it: ", end="")
    print(f"python -m http.server -d {shlex.quote(str(options.output))}")
    if options.open:
        webbrowser.open(page.resolve().as_uri())


if __name__ == "__main__":
    main()
