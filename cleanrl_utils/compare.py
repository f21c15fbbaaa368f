"""Is the new version worse? python -m cleanrl_utils.compare BASE NEW -o compare.md

BASE and NEW are each a run folder, a folder of run folders, or recorded results, in quotes also a pattern such as
"runs/*__ppo__*". Runs are paired by environment (and by algorithm, where a side has several). Of each pair and of their
mean it says better, same, worse or not enough seeds:

- worse (better): the mean score fell (rose), more than chance would have it. Of comparisons of equal versions, at most
  --error (5 %) have any such line.
- same: neither, and a difference of --drop (20 %) or more is ruled out, at 95 % for each line.
- not enough seeds: neither, and such a difference is not ruled out, or there are fewer than three seeds on a side.

The whole is worse if any line is, same only if every line is, and better if the mean is or all lines are that or same.

    python -m cleanrl_utils.compare runs --commits 1a2b3c4 HEAD
    python -m cleanrl_utils.compare runs --base-name ppo --new-name rpo
    python -m cleanrl_utils.compare --base old/runs/*__ppo__* --new new/runs/*__ppo__*

Scores are means over the last 100 episodes, with --score auc over the whole of training. Per cent are of the score of
BASE, or of the way that it has come since the start of training, if that is more. Flags and packages in which the sides
differ are listed. Runs of another length than most are left out, with --steps N longer ones count as far as N steps.
Sides that share runs are refused, a run cannot be compared with itself, and so are sides without a common length.
Exit codes: 0 no regression, 1 worse (with --fail-on-unknown also not enough seeds), 2 wrong usage.
"""

import argparse
import glob
import json
import math
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from cleanrl_utils import fail
from cleanrl_utils.runs.results import curve_edges, full_commit, load, of_commit, plain, score_of
from cleanrl_utils.runs.stats import t_quantile

MIN_SEEDS = 3
TOLERANCE = 1.0  # per cent: a smaller difference is none, however sure
# Flags that do not change what is learned, or are meant to differ.
FREE = "seed exp_name env_id total_timesteps track wandb_project_name wandb_entity capture_video save_model resume"
FREE += " checkpoint_freq upload_model hf_entity video_freq"
PACKAGES = ("gymnasium", "gymnax", "ale-py", "envpool", "mujoco", "godot_rl", "numpy", "torch", "jax", "flax", "optax")


def standard_error(x, y):
    """The squared standard error of mean(x) - mean(y) over the last axis, and its degrees of freedom.

    The larger of two estimates: with one spread for both sides, and with one for each (Welch).
    """
    n, m = x.shape[-1], y.shape[-1]
    a, b = x.var(axis=-1, ddof=1), y.var(axis=-1, ddof=1)
    pooled = ((n - 1) * a + (m - 1) * b) / (n + m - 2) * (1 / n + 1 / m)
    with np.errstate(invalid="ignore", divide="ignore"):
        df = (a / n + b / m) ** 2 / ((a / n) ** 2 / (n - 1) + (b / m) ** 2 / (m - 1))
    return np.maximum(pooled, a / n + b / m), np.where(np.isnan(df), n + m - 2, df)


def studentised(differences, squared_errors):
    """Differences in standard errors; none is 0 and one without any spread is infinite."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(differences == 0, 0.0, differences / np.sqrt(squared_errors))


def judge(base, new, error=0.05, drop=20.0, reps=10_000, seed=0):
    """Compare groups of scores, one array of each side per environment, in per cent: a dict for each and for the mean.

    A difference counts if it is larger, in standard errors, than the bound of its line. Resamples, in which both sides
    of an environment are drawn from the residuals of both, set the bounds: each line exceeds its own as often as any
    other does, and a share `error` of resamples has a line that does. Few seeds tell little of the tails, so a bound is
    at least Student's for as many lines (Bonferroni), and at most half as much again.
    """
    sides = [(np.asarray(x, dtype=float), np.asarray(y, dtype=float)) for x, y in zip(base, new, strict=True)]
    enough = [i for i, (x, y) in enumerate(sides) if min(len(x), len(y)) >= MIN_SEEDS]
    lines = [{"effect": float(y.mean() - x.mean()), "verdict": "not enough seeds"} for x, y in sides]
    overall = {"effect": float(np.mean([line["effect"] for line in lines])), "verdict": "not enough seeds"}
    if not enough:
        return lines, overall
    rng = np.random.default_rng(seed)
    differences, squares, freedoms, drawn, drawn_squares = [], [], [], [], []
    for x, y in (sides[i] for i in enough):
        square, freedom = standard_error(y, x)
        differences.append(y.mean() - x.mean())
        squares.append(square)
        freedoms.append(float(freedom))
        residuals = np.concatenate([np.sqrt(len(side) / (len(side) - 1)) * (side - side.mean()) for side in (x, y)])
        residuals[np.abs(residuals) < 1e-9 * np.abs(x).max()] = 0  # all seeds alike, but for rounding
        draws = residuals[rng.integers(len(residuals), size=(reps, len(residuals)))]
        drawn.append(draws[:, len(x) :].mean(axis=1) - draws[:, : len(x)].mean(axis=1))
        drawn_squares.append(standard_error(draws[:, len(x) :], draws[:, : len(x)])[0])
    judged = [lines[i] for i in enough]
    if len(enough) > 1:  # the mean over environments is one line more
        judged.append(overall)
        n = len(enough)
        freedoms.append(sum(squares) ** 2 / s if (s := sum(q * q / f for q, f in zip(squares, freedoms))) else 2.0 * n)
        differences.append(np.mean(differences))
        squares.append(sum(squares) / n**2)
        drawn.append(np.mean(drawn, axis=0))
        drawn_squares.append(np.sum(drawn_squares, axis=0) / n**2)
    drawn = np.abs([studentised(d, s) for d, s in zip(drawn, drawn_squares)])
    ranks = drawn.argsort(axis=1).argsort(axis=1)
    cut = np.sort(ranks.max(axis=0))[int(np.ceil((1 - error) * (reps - 1)))]
    bounds = np.sort(drawn, axis=1)[:, cut]
    for line, difference, square, freedom, bound in zip(judged, differences, squares, freedoms, bounds):
        student = t_quantile(1 - error / 2 / len(judged), round(freedom, 2))
        bound = min(max(bound, student), 1.5 * student)
        margin = bound * np.sqrt(square) if square else 0.0
        ruled_out = abs(difference) + t_quantile(0.95, round(freedom, 2)) * np.sqrt(square)
        line |= {"effect": float(difference), "low": float(difference - margin), "high": float(difference + margin)}
        findable = margin + t_quantile(0.8, round(freedom, 2)) * np.sqrt(square)
        line |= {"findable": float(max(findable, TOLERANCE)), "ruled_out": float(ruled_out)}
        if abs(studentised(difference, square)) > bound and abs(difference) >= TOLERANCE:
            line["verdict"] = "better" if difference > 0 else "worse"
        elif ruled_out < drop:
            line["verdict"] = "same"
    if len(enough) == 1:
        overall |= judged[0]
    if len(enough) < len(lines) and overall["verdict"] == "same":
        overall["verdict"] = "not enough seeds"
    return lines, overall


def verdict(lines, overall):
    """The verdict of a whole comparison: no loss in one environment is outweighed, and no doubt forgotten."""
    verdicts = {line["verdict"] for line in lines}
    if "worse" in (overall["verdict"], *verdicts):
        return "worse"
    if overall["verdict"] == "better":
        return "better"
    if "not enough seeds" in verdicts:
        return "not enough seeds"
    return "better" if "better" in verdicts and overall["effect"] > 0 else "same"


def expand(path):
    """A path, or those that match a pattern."""
    if Path(path).exists() or not glob.has_magic(str(path)):
        return [path]
    return sorted(glob.glob(str(path))) or [path]


def area(run):
    """The mean return over the whole of training: of 100 parts by steps, each part's mean, the last one's if empty."""
    edges = curve_edges(max(run.total_timesteps, 1))
    bins = np.digitize(run.steps, edges, right=True).clip(1, 100) - 1
    counts = np.bincount(bins, minlength=100)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.bincount(bins, weights=run.returns, minlength=100) / counts
    first = np.flatnonzero(counts)[0]
    filled = np.maximum.accumulate(np.where(counts > 0, np.arange(100), first))
    return float(means[filled].mean())


def score(run, kind):
    if kind == "last":
        return run.score
    return area(run) if len(run.returns) else float("nan")


def start_of(run):
    """The mean return at the start of training, or nan: of the first hundredth, or of the first episodes."""
    if not len(run.returns):
        return float("nan")
    return float(
        run.returns[: max(5 if run.source == "run" else 1, np.sum(run.steps <= run.total_timesteps / 100))].mean()
    )


def pair(base, new):
    """(algorithm, environment) -> runs of base and of new; the algorithm counts where a side has several."""
    several = any(len({run.exp_name for run in side}) > 1 for side in (base, new))
    pairs = defaultdict(lambda: ([], []))
    for i, side in enumerate((base, new)):
        for run in side:
            pairs[run.exp_name if several else "", run.env_id][i].append(run)
    return dict(sorted(pairs.items()))


def unlike(a, b):
    """What two runs of one seed differ in, "" if nothing: then one repeats the other."""
    if a.total_timesteps != b.total_timesteps:
        return f"total_timesteps, {a.total_timesteps} and {b.total_timesteps}"
    for flag in sorted({*a.args} & {*b.args} - {*FREE.split()}):
        if plain(a.args[flag]) != plain(b.args[flag]):
            return f"{flag}, {a.args[flag]} and {b.args[flag]}"
    if a.commit and b.commit and not any(of_commit(a, commit) for commit in b.commit.split()):
        return f"commit, {a.commit[:10]} and {b.commit[:10]}"
    return ""


def clean(runs, side, kind, notes):
    """The runs that can be compared: ended, with a score, and one per seed (the last, of those that were repeated)."""
    kept, unfinished, unscored, repeated = {}, 0, 0, 0
    for run in runs:
        key = run.exp_name, run.env_id, run.seed
        if not run.ended:
            unfinished += 1
        elif not np.isfinite(score(run, kind)):
            unscored += 1
        else:
            if key in kept and (difference := unlike(kept[key], run)):
                where = f"{run.exp_name} in {run.env_id}, seed {run.seed}"
                told = f"{side} has two runs of {where}, that differ in {difference}"
                or_steps = " or --steps" if difference.startswith("total_timesteps") else ""
                raise ValueError(f"{told}: leave one kind, by folder, pattern, commit or tag{or_steps}")
            repeated += key in kept
            kept[key] = run
    for count, why in (
        (unfinished, "unfinished"),
        (unscored, "without a score"),
        (repeated, "of a seed that ran again"),
    ):
        if count:
            notes.append(f"{side}: left out {counted(count)} {why}")
    return list(kept.values())


def counted(count):
    return f"{count} {'run' if count == 1 else 'runs'}"


def cut(run, steps):
    """The beginning of a run, as if it had ended after so many steps."""
    there = run.steps <= steps
    seconds = None if run.seconds is None else run.seconds[there]
    told = {"steps": run.steps[there], "returns": run.returns[there], "seconds": seconds}
    told |= {"score": score_of(run.returns[there]), "total_timesteps": steps, "last_step": steps, "ended": True}
    return replace(run, **told)


def common_length(sides):
    """The length that runs of both sides have, that of most if there are several; None if there is none."""
    one, other = (Counter(run.total_timesteps for run in side if run.ended) for side in sides)
    one, other = one or other, other or one  # what only one side has is not compared, and is no obstacle either
    return max(one.keys() & other.keys(), key=lambda steps: (min(one[steps], other[steps]), steps), default=None)


def at_length(run, steps, may_cut):
    """A run if it trained for so many steps, the beginning of a longer one if that is allowed, or None."""
    if run.total_timesteps == steps:
        return run
    return cut(run, steps) if may_cut and run.source == "run" and run.last_step >= steps else None


def alike(base, new, steps, notes):
    """The runs of both sides that trained equally long: for `steps`, or for the length that they have in common."""
    kept, others, longer = ([], []), ([], []), ([], [])
    for sides in pair(base, new).values():
        length = steps or common_length(sides)
        for i, side in enumerate(sides):
            may_cut = bool(steps) and not any(run.ended and run.total_timesteps == steps for run in side)
            for run in side:
                fitting = run if length is None else at_length(run, length, may_cut)
                if fitting is not None:
                    kept[i].append(fitting)
                    longer[i].extend([run.total_timesteps] * (fitting is not run))
                elif run.ended:
                    others[i].append(run.total_timesteps)
    for name, lengths, cuts in zip(("base", "new"), others, longer):
        if lengths:
            notes.append(f"{name}: left out {counted(len(lengths))} of another length ({listed(lengths)} steps)")
        if cuts:
            told = f"{name}: {counted(len(cuts))} of {listed(cuts)} steps, cut at {steps:,}"
            notes.append(f"{told}: schedules such as that of the learning rate were those of the whole")
    return kept


def listed(lengths):
    return " or ".join(f"{steps:,}" for steps in sorted(set(lengths)))


def shared(base, new):
    """The runs of `new` that `base` has, too: of the same folder or row, copied, or recorded."""
    ours, similar = {run.origin or id(run) for run in base}, defaultdict(list)
    for run in base:
        similar[run.exp_name, run.env_id, run.seed, run.total_timesteps].append(run)

    def recorded(run, other):
        """Whether one is the record of the other, with its score rounded."""
        record, run = (run, other) if run.source == "record" else (other, run)
        if (record.source, run.source) != ("record", "run") or not run.commit:
            return False
        return of_commit(record, run.commit) and math.isclose(run.score, record.score, rel_tol=1e-4, abs_tol=0.006)

    def known(run):
        others = similar[run.exp_name, run.env_id, run.seed, run.total_timesteps]
        return (run.origin or id(run)) in ours or any(recorded(run, other) for other in others)

    return [run for run in new if known(run)]


def refuse_shared(base, new):
    """An error that names the runs of both sides, if there are any."""
    if not (both := shared(base, new)):
        return
    seeds = defaultdict(set)
    for run in both:
        seeds[f"{run.exp_name} in {run.env_id}"].add(run.seed)
    told = [f"{what} (seeds {', '.join(map(str, sorted(which)))})" for what, which in list(seeds.items())[:3]]
    told += ["others"] if len(seeds) > 3 else []
    mixed = sorted({run.commit for run in both if run.source == "record" and len(run.commit.split()) > 1})
    help = "name sides without a run in common, by folder, pattern, commit, tag or name"
    if mixed and all(run.commit in mixed for run in both):
        help = f"their rows were recorded at several commits at once ({mixed[0]}), name other commits, or run folders"
    raise ValueError(f"both sides have {', '.join(told)}: no run can be compared with itself, {help}")


def select(base, new, kind, steps, notes):
    """The runs of both sides that are to be compared."""
    base, new = alike(base, new, steps, notes)
    refuse_shared(*([run for run in side if run.ended] for side in (base, new)))
    return clean(base, "base", kind, notes), clean(new, "new", kind, notes)


def values(runs, of):
    return sorted({str(of(run)) for run in runs})


def differences(pairs):
    """What the two sides of each pair differ in besides their seeds: {"flag learning_rate: 0.1 -> 0.2": [where]}."""
    found = defaultdict(list)
    for (algorithm, env_id), (base, new) in pairs.items():
        where = f"{algorithm} {env_id}".strip()
        if not base or not new:
            found[f"only in {'base' if base else 'new'}"].append(where)
            continue
        sides = base, new
        checks = {"total_timesteps": lambda run: run.total_timesteps}
        flags = [set.intersection(*({*run.args} for run in side)) for side in sides]
        if all(run.source == "run" for run in (*base, *new)):  # records know the flags of their command only
            for flag in sorted((flags[0] ^ flags[1]) - {*FREE.split()}):
                found[f"flag {flag}: only in {'base' if flag in flags[0] else 'new'}"].append(where)
        for flag in sorted(set.intersection(*flags) - {*FREE.split()}):
            checks[f"flag {flag}"] = lambda run, flag=flag: plain(run.args[flag])
        known = [set.intersection(*({*run.packages} for run in side)) for side in sides]
        for name in sorted(set.intersection(*known) & {*PACKAGES}):
            checks[f"package {name}"] = lambda run, name=name: run.packages[name]
        for what, of in checks.items():
            ours, theirs = (values(side, of) for side in sides)
            if ours != theirs or len(ours) > 1:
                found[f"{what}: {' or '.join(ours)} -> {' or '.join(theirs)}"].append(where)
        for name, side in zip(("base", "new"), sides):
            if len(hidden := values(side, lambda run: run.commit[:10])) > 1:
                found[f"{name} mixes commits: {', '.join(hidden)}"].append(where)
    return dict(found)


def in_lines(found):
    """What `differences` has found, what -> where, with the flags that one side alone has in one line."""
    alone, lines = defaultdict(list), {}
    for what, where in found.items():
        if what.startswith("flag ") and ": only in " in what:
            flag, side = what.removeprefix("flag ").split(": only in ")
            alone[side, tuple(where)].append(flag)
        else:
            lines[what] = where
    for (side, where), flags in alone.items():
        one = f"flag {flags[0]}: only in {side}"
        lines[f"flags only in {side}: {', '.join(flags)}" if len(flags) > 1 else one] = list(where)
    return lines


def compare(base, new, kind="last", error=0.05, drop=20.0, steps=None):
    """The comparison of two lists of runs as a dict: lines, overall, differences, notes."""
    notes = []
    base, new = select(base, new, kind, steps, notes)
    pairs = pair(base, new)
    both = {key: sides for key, sides in pairs.items() if all(sides)}
    if not both:
        told = "no environment has finished runs on both sides"
        if any(algorithm for algorithm, _ in pairs):
            ours, theirs = (", ".join(values(side, lambda run: run.exp_name)) for side in (base, new))
            told += f" (base: {ours}; new: {theirs}): name one of each with --base-name and --new-name"
        raise ValueError(told)
    rows, groups = [], ([], [])
    for (algorithm, env_id), sides in both.items():
        scores = [np.array([score(run, kind) for run in sorted(side, key=lambda run: run.seed)]) for side in sides]
        starts = [start for run in sides[0] if not np.isnan(start := start_of(run))]
        mean = scores[0].mean()
        scale = max(abs(mean), abs(mean - np.mean(starts)) if starts else 0.0) or max(abs(scores[1].mean()), 1e-9)
        for group, side in zip(groups, scores):
            group.append(100 * side / scale)
        row = {"algorithm": algorithm, "env_id": env_id, "scale": float(scale)}
        for name, side, made in zip(("base", "new"), scores, sides):
            spread = float(side.std(ddof=1)) if len(side) > 1 else None
            row[name] = {"mean": float(side.mean()), "std": spread, "seeds": sorted(run.seed for run in made)}
            row[name]["scores"] = side.tolist()
        rows.append(row)
    lines, overall = judge(*groups, error=error, drop=drop)
    told = {
        side: {
            "algorithms": values(runs, lambda run: run.exp_name),
            "commits": values(runs, lambda run: run.commit[:10] or "unknown"),
            "steps": values(runs, lambda run: run.total_timesteps),
        }
        for side, runs in (("base", base), ("new", new))
    }
    return {
        "verdict": verdict(lines, overall),
        "overall": overall,
        "lines": [a | b for a, b in zip(rows, lines)],
        **told,
        "differences": differences(pairs),
        "notes": notes,
        "error": error,
        "drop": drop,
        "score": kind,
    }


def number(value, digits=4):
    return f"{value:.{max(0, digits - len(str(int(abs(value)))))}f}"


def per_cent(line):
    effect = f"{line['effect']:+.1f} %"
    if "low" not in line:
        return effect, "", ""
    if line["low"] == line["high"]:
        return effect, "no spread", ""
    return effect, f"{line['low']:+.1f} to {line['high']:+.1f}", f"{line['findable']:.1f} %"


def cell(text):
    return str(text).replace("|", "\\|").replace("\n", " ")


def markdown(result):
    """The comparison as a table for a pull request."""
    several = any(line["algorithm"] for line in result["lines"])
    heads = ["algorithm"] * several + ["environment", "base", "new", "seeds", "effect", "interval, %", "would find"]
    table = [[*heads, "verdict"], ["---"] * len(heads) + ["---"]]
    for line in result["lines"]:
        sides = [line[side] for side in ("base", "new")]
        means = [number(s["mean"]) + (f" ± {number(s['std'])}" if s["std"] is not None else "") for s in sides]
        seeds = " / ".join(str(len(s["seeds"])) for s in sides)
        name = [line["algorithm"]] * several + [line["env_id"]]
        table.append([*name, *means, seeds, *per_cent(line), f"**{line['verdict']}**"])
    overall = result["overall"]
    if len(result["lines"]) > 1:
        table.append(["all, mean", *[""] * several, "", "", "", *per_cent(overall), f"**{overall['verdict']}**"])
    sides = []
    for side in ("base", "new"):
        told = result[side]
        steps = " or ".join(f"{int(steps):,}" for steps in told["steps"])
        sides.append(f"- {side}: {', '.join(told['algorithms'])} at {', '.join(told['commits'])}, {steps} steps")
    undecided = sum(line["verdict"] == "not enough seeds" for line in result["lines"])
    headline = f"## Comparison: {result['verdict']}"
    if undecided and len(result["lines"]) > 1:
        headline += f" ({overall['verdict']} on average, " if overall["verdict"] == "same" else " ("
        headline += f"{undecided} of {len(result['lines'])} undecided)"
    text = [headline, "", *sides, ""]
    text += ["| " + " | ".join(map(cell, row)) + " |" for row in table]
    kind = "the mean return of the last 100 episodes" if result["score"] == "last" else "the mean return over training"
    error, drop = f"{100 * result['error']:g} %", f"{result['drop']:g} %"
    text += [
        "",
        f"Score of a run: {kind}; ± is the standard deviation over seeds. Per cent are of the base's score, or of",
    ]
    text += ["its way from the start of training if that is longer. Stratified bootstrap over seeds: of comparisons of"]
    text += [
        f"equal versions at most {error} have a line that says better or worse. Same: a difference of {drop} or more is"
    ]
    text += ["ruled out (95 %). Would find: the drop that these seeds would show as worse in 4 of 5 cases."]
    if result["differences"]:
        text += ["", "**Warning: the two sides differ in more than their seeds.**", ""]
        for what, where in in_lines(result["differences"]).items():
            everywhere = len(where) == len(result["lines"]) > 1
            text.append(f"- {what} ({'everywhere' if everywhere else ', '.join(where)})")
    text += ["", *(f"- {note}" for note in result["notes"])] if result["notes"] else []
    return "\n".join(text) + "\n"


def choose(options):
    """The runs of both sides."""
    if options.base or options.new:
        if options.paths or not (options.base and options.new):
            fail("give either BASE NEW, or both --base and --new")
        base, new = options.base, options.new
    elif len(options.paths) == 2:
        base, new = [options.paths[0]], [options.paths[1]]
    elif options.paths and (options.commits or (options.base_name and options.new_name)):
        base = new = options.paths
    else:
        fail("two sides are needed: BASE NEW, or --base and --new, or one folder with --commits, or with two names")
    if options.commits and not (options.base or options.new):
        base = new = options.paths
    try:
        commits = [full_commit(name) for name in options.commits or ()]
        base, new = (load([place for path in side for place in expand(path)]) for side in (base, new))
    except ValueError as error:
        fail(error)
    if options.commits:
        base, new = ([run for run in side if of_commit(run, c)] for side, c in zip((base, new), commits))
    names = options.base_name, options.new_name
    base, new = ([run for run in side if name in (None, run.exp_name)] for side, name in zip((base, new), names))
    if options.env_ids:
        base, new = ([run for run in side if run.env_id in options.env_ids] for side in (base, new))
    for name, side in (("base", base), ("new", new)):
        if not side:
            fail(f"no run of {name} is left: see --commits, --base-name, --new-name and --env-ids")
    return base, new


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        prog="python -m cleanrl_utils.compare",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="BASE and NEW")
    parser.add_argument("--base", nargs="+", metavar="PATH", help="run folders or results of the base")
    parser.add_argument("--new", nargs="+", metavar="PATH", help="those of the new version")
    parser.add_argument("--commits", nargs=2, metavar=("A", "B"), help="base: runs made at commit A, new: at B")
    parser.add_argument("--base-name", metavar="NAME", help="base: runs of this --exp-name only")
    parser.add_argument("--new-name", metavar="NAME", help="new: runs of this --exp-name only")
    parser.add_argument("--env-ids", nargs="+", metavar="ENV", help="these environments only")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="runs of N steps; where a side has none, longer ones as far as N"
    )
    parser.add_argument(
        "--score", choices=("last", "auc"), default="last", help="last 100 episodes, or all of training"
    )
    parser.add_argument("--error", type=float, default=0.05, help="rate of false alarms of a whole comparison")
    parser.add_argument("--drop", type=float, default=20.0, help="per cent: a smaller difference may go unnoticed")
    parser.add_argument("--fail-on-unknown", action="store_true", help="exit 1 also where there are not enough seeds")
    parser.add_argument("--strict", action="store_true", help="refuse sides that differ in more than seeds and commit")
    parser.add_argument("--allow", nargs="+", default=[], metavar="NAME", help="flags and packages that may differ")
    parser.add_argument("-o", "--output", type=Path, help="Markdown file to write instead of printing it")
    parser.add_argument("--json", type=Path, help="file for the same as data")
    options = parser.parse_args(argv)
    if not 0 < options.error < 0.5 or not options.drop > 0:
        fail("--error is a share between 0 and 0.5, --drop a number of per cent above 0")
    if options.steps is not None and options.steps < 1:
        fail("--steps must be at least 1")
    for path in (options.output, options.json):
        if path and not path.parent.is_dir():
            fail(f"{path}: no folder {path.parent} to write it to")
    base, new = choose(options)
    try:
        result = compare(base, new, options.score, options.error, options.drop, options.steps)
    except ValueError as error:
        fail(error)
    for what in list(result["differences"]):
        name = what.split(":")[0].split()[-1]
        if name in options.allow:
            result["notes"].append(f"allowed to differ: {what}")
            del result["differences"][what]
        elif name == "total_timesteps" or options.strict:
            where = ", ".join(result["differences"][what][:3])
            cutting = ", --steps N what they were after N steps" if name == "total_timesteps" else ""
            fail(f"the sides differ in {what} ({where}): --allow {name} compares them{cutting}")
    text = markdown(result)
    try:
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")
        if options.output:
            options.output.write_text(text)
    except OSError as error:
        fail(error)
    print(f"{result['verdict']}: {options.output}\n" if options.output else text, end="")
    for what in in_lines(result["differences"]):
        print(f"compare: warning: the sides differ: {what}", file=sys.stderr)
    unknown = any(line["verdict"] == "not enough seeds" for line in (*result["lines"], result["overall"]))
    return int(result["verdict"] == "worse" or (options.fail_on_unknown and unknown))


if __name__ == "__main__":
    sys.exit(main())
