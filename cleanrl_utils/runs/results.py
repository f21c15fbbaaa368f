"""The runs in run folders and in recorded results, as data: `load(["runs", "benchmark/results"])`.

A path is a run folder, `latest` for the newest in runs/, a recorded CSV (benchmark/record.py), or a folder with any
number of these in it. A folder in which many seeds trained at once gives a `Run` of each. A run that stopped early is
there too, with `ended` false.
"""

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from cleanrl_utils.runs.events import read_series
from cleanrl_utils.runs.folder import newest_run

EPISODES = 100  # a score is the mean return of as many last episodes
RETURN, PLAYER, COUNT, SPEED = (
    f"charts/{name}" for name in ("episodic_return", "episodic_return-player0", "episodes", "SPS")
)
ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "benchmark/reference_scores.csv"


@dataclass
class Run:
    env_id: str
    exp_name: str  # the algorithm; by default the stem of the script
    script: str  # its name, such as ppo.py
    seed: int
    total_timesteps: int
    steps: np.ndarray  # of each episode, or of each bin of a recorded curve
    returns: np.ndarray
    seconds: np.ndarray | None  # of training until then; None if not recorded
    score: float  # mean return of the last 100 episodes, nan without any
    ended: bool
    source: str  # "run" or "record"
    last_step: int = 0
    folder: Path | None = None
    args: dict = field(default_factory=dict)  # a record has those of its command, as text
    command: str = ""
    commit: str = ""
    packages: dict = field(default_factory=dict)
    metrics: dict = field(default_factory=dict)  # tag -> (steps, values, seconds), of the tags asked for
    videos: list = field(default_factory=list)  # (step, path)
    origin: str = ""  # where it was read, which tells it from all other runs; a copy has that of the original


def has_ended(args, steps):
    """Whether a run with these flags that has logged its speed at these steps has come to its end.

    That is --total-timesteps; files with rollouts (--num-steps) log once after each and make no part of one, PPG no
    part of a phase of --n-iteration rollouts. The steps tell the size of a rollout, which not all files have as flags.
    """
    steps = sorted({0, *steps})
    if len(steps) < 2:
        return False
    unit = (steps[-1] - steps[-2]) * args.get("n_iteration", 1) if "num_steps" in args else 1
    return steps[-1] >= args["total_timesteps"] // unit * unit


def score_of(returns):
    return float(returns[-EPISODES:].mean()) if len(returns) else float("nan")


def find_videos(folder, args, steps, walls):
    """The videos of a run by step. Those that the environment takes are numbered by its episodes: their steps are near.

    Their names begin with the second at which the process began, so that a resumed run can count anew.
    """
    videos = []
    for file in folder.glob("videos/*.mp4"):
        if found := re.fullmatch(r"step-(\d+)", file.stem):
            videos.append((int(found[1]), file))
        elif found := re.search(r"(\d+)-episode-(\d+)$", file.stem):
            at = np.searchsorted(walls, int(found[1])) + int(found[2]) * args.get("num_envs", 1)
            videos.append((int(steps[min(at, len(steps) - 1)]) if len(steps) and at else 0, file))
        elif found := re.search(r"step-(\d+)$", file.stem):
            videos.append((int(found[1]) * args.get("num_envs", 1), file))
    return sorted(videos)


def origin_of(folder):
    """What tells the run in a folder from all others: event files have the second, the host and the process in them."""
    names = sorted(file.name for file in folder.glob("events*"))
    unique = names and all(re.match(r"events\.out\.tfevents\.\d{10}\.", name) for name in names)
    return " ".join(names) if unique else str(folder.resolve())


def read_folder(folder, tags=()):
    """The run in a folder, or each of the runs that trained side by side in it."""
    folder = Path(folder)

    def text(name):
        return (folder / name).read_text() if (folder / name).is_file() else ""

    try:
        args = json.loads(text("args.json"))
        env_id, seed, total = args["env_id"], int(args["seed"]), int(args["total_timesteps"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: args.json does not hold the flags of a run") from error
    series = read_series(folder, tuple(dict.fromkeys((RETURN, PLAYER, COUNT, SPEED, *tags))))
    steps, returns, seconds, walls = series[RETURN] if len(series[RETURN][0]) else series[PLAYER]
    if len(counts := series[COUNT][1]):  # an entry is the mean of as many episodes
        n = min(len(counts), len(steps))
        entries = np.repeat(np.arange(n), counts[:n].astype(int))
        steps, returns, seconds, walls = (column[entries] for column in (steps, returns, seconds, walls))
    script = next((path.name for path in folder.glob("*.py")), f"{args.get('exp_name', folder.name)}.py")
    logged = series[SPEED][0].tolist()
    last_step = max(logged or steps.tolist(), default=0)
    # Other libraries may log no speed: then the last episode has to be near the end.
    ended = has_ended(args, logged) if logged else last_step >= 0.95 * total
    run = Run(
        env_id=env_id,
        exp_name=args.get("exp_name") or Path(script).stem,
        script=script,
        seed=seed,
        total_timesteps=total,
        steps=steps,
        returns=returns,
        seconds=seconds,
        score=score_of(returns),
        ended=ended,
        source="run",
        last_step=last_step,
        folder=folder,
        args=args,
        command=text("command.txt").split("\n")[0],
        commit=text("commit.txt").strip(),
        packages=dict(line.split("==", 1) for line in text("packages.txt").split() if "==" in line),
        metrics={tag: series[tag][:3] for tag in tags if len(series[tag][0])},
        videos=find_videos(folder, args, steps, walls),
        origin=f"{origin_of(folder)} {seed}",
    )
    if not (folder / "curves.npz").exists():
        return [run]
    runs = []
    logged_at, _, logged_seconds = series[RETURN][:3]
    with np.load(folder / "curves.npz") as curves:
        at, seeds = curves["steps"].astype(np.int64), curves["seeds"]
        seconds = np.interp(at, logged_at, logged_seconds) if len(logged_at) else np.full(len(at), np.nan)
        table = {tag: curves[tag] for tag in curves.files if tag in (RETURN, COUNT, *tags)}
    for i, seed in enumerate(seeds.tolist()):
        entries = np.repeat(np.arange(len(at)), table[COUNT][:, i].astype(int))
        returns = table[RETURN][entries, i].astype(float)
        own = {tag: (at, table[tag][:, i].astype(float), seconds) for tag in tags if tag in table}
        one = {"steps": at[entries], "returns": returns, "seconds": seconds[entries], "metrics": run.metrics | own}
        runs.append(replace(run, seed=seed, score=score_of(returns), origin=f"{origin_of(folder)} {seed}", **one))
    return runs


def flags(command):
    """The flags of a command line, as text."""
    words, found = shlex.split(command), {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            alone = i + 1 == len(words) or words[i + 1].startswith("--")
            found[name.replace("-", "_")] = value or ("True" if alone else words[i + 1])
    return found


def curve_edges(total_timesteps):
    """The edges of the 100 bins of a recorded curve; a bin is named by its upper edge, rounded down."""
    return np.linspace(0, total_timesteps, 101)


def curve_name(env_id, script, seed):
    return f"{re.sub('[/:]', '-', env_id)}__{Path(script).stem}__{seed}.csv"


def read_curve(path, total_timesteps):
    """The curve of a recorded run, if it is that of a run of as many steps: steps, returns and seconds or None."""
    nothing = np.zeros(0, dtype=np.int64), np.zeros(0), None
    if not path.is_file():
        return nothing
    rows = list(csv.DictReader(path.read_text().splitlines()))
    steps = np.array([int(row["step"]) for row in rows], dtype=np.int64)
    if not set(steps.tolist()) <= set(curve_edges(total_timesteps).astype(int).tolist()):
        return nothing
    timed = bool(rows) and all(row.get("seconds") for row in rows)
    returns = np.array([float(row["episodic_return"]) for row in rows])
    return steps, returns, np.array([float(row["seconds"]) for row in rows]) if timed else None


def is_record(path):
    try:
        with path.open(errors="replace") as file:
            return file.readline().startswith("file,env_id,steps,seeds,score_mean,score_std,scores,")
    except OSError:  # a link that leads nowhere, say
        return False


def planned_steps(row):
    """The steps that the command of a record asks for; it has reached fewer if it was stopped."""
    said = flags(row["command"]).get("total_timesteps") or default(Path(row["file"]).name, "total_timesteps")
    return max(int(said or 0), int(row["steps"]))


def read_record(path):
    """The runs of a CSV of recorded results, with their curves where these lie beside it."""
    runs = []
    for number, row in enumerate(csv.DictReader(path.read_text().splitlines())):
        script, reached, args = Path(row["file"]).name, int(row["steps"]), flags(row["command"])
        total = planned_steps(row)
        for seed, score in zip(row["seeds"].split(), row["scores"].split(), strict=True):
            steps, returns, seconds = read_curve(
                path.parent / "curves" / curve_name(row["env_id"], script, seed), reached
            )
            run = Run(
                env_id=row["env_id"],
                exp_name=args.get("exp_name", Path(script).stem),
                script=script,
                seed=int(seed),
                total_timesteps=total,
                steps=steps,
                returns=returns,
                seconds=seconds,
                score=float(score),
                ended=reached >= total,
                source="record",
                last_step=reached,
                args=args,
                command=row["command"],
                commit=row["commit"],
                packages=dict(word.split("=", 1) for word in row["packages"].split()),
                origin=f"{path.resolve()} {number} {seed}",
            )
            runs.append(run)
    return runs


def find(path):
    """The run folders and the recorded CSV files at a path or anywhere below it, also where links lead to."""
    path = newest_run() if str(path) == "latest" else Path(path)
    if path.suffix == ".csv" and is_record(path):
        return [path]
    found, seen = [], set()
    for folder, names, files in os.walk(path, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:  # links can lead round in circles
            names.clear()
            continue
        seen.add(real)
        if "args.json" in files:
            found.append(Path(folder))
            names.clear()
        else:
            found += [file for name in files if (file := Path(folder, name)).suffix == ".csv" and is_record(file)]
            names.sort()
    if not found:
        raise ValueError(f"{path}: " + ("no run folder or recorded results there" if path.exists() else "not found"))
    return sorted(found)


def read(path, tags=()):
    """The runs of a run folder or a CSV, or the line that says why there are none."""
    try:
        return read_record(path) if path.is_file() else read_folder(path, tags)
    except ValueError as error:
        return str(error) if str(path) in str(error) else f"{path}: {error}"
    except Exception as error:  # files half written or damaged, in as many ways as there are formats
        return f"{path}: cannot be read ({error!r})"


def load(paths, tags=()):
    """Every run at the paths, in their order. What cannot be read is an error if it was named, else a warning."""
    paths = [Path(path) for path in ([paths] if isinstance(paths, (str, Path)) else paths)]
    found = list(dict.fromkeys(place for path in paths for place in find(path)))
    if len(found) < 200:
        read_places = [read(place, tags) for place in found]
    else:
        with ProcessPoolExecutor() as pool:  # a process for each core
            read_places = list(pool.map(partial(read, tags=tuple(tags)), found, chunksize=25))
    runs = []
    for place, result in zip(found, read_places, strict=True):
        if not isinstance(result, str):
            runs += result
        elif place in paths:
            raise ValueError(result)
        else:
            print(f"left out: {result}", file=sys.stderr)
    return runs


def full_commit(name):
    """A commit by its hash, as far as that is known, or by a name that git knows, such as HEAD."""
    if re.fullmatch("[0-9a-f]{7,40}", name):
        return name
    try:
        return subprocess.run(["git", "rev-parse", name], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        raise ValueError(f"{name!r} is neither a commit's hash (7 digits or more) nor a name that git knows") from None


def of_commit(run, commit):
    """Whether a run was made at a commit; records keep ten digits of it or less."""
    return any(made.startswith(commit) or commit.startswith(made) for made in run.commit.split())


@lru_cache
def published(path=REFERENCE):
    """The published scores in a CSV; those that are not returns are left out."""
    if path == REFERENCE and not path.is_file():  # it is of a clone, not of an installed distribution
        return []
    with Path(path).open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["score_mean"] and "not return" not in row["notes"]]


@lru_cache
def default(script, flag):
    """The default of a flag in the text of a script of cleanrl/, None if it has no such flag."""
    path = ROOT / "cleanrl" / script
    found = re.search(rf"^    {flag}: [^=\n]+ = ([^ \n]+)", path.read_text(), re.M) if path.is_file() else None
    return found and found[1].strip('"')


def plain(value):
    """The value of a flag as text, with one way to write a number: 2.5e-4 is 0.00025."""
    try:
        return f"{float(str(value)):.12g}"
    except ValueError:
        return str(value)


def references(script, env_id, args=None, path=REFERENCE):
    """The rows of published scores of a script of cleanrl/ with these flags, the preferred ones first.

    A row is of the file at the same path, and what its notes say of flags (`rpo_alpha=0.5`) agrees with the run's flags
    or the script's defaults. Of several the one with a standard deviation counts, then the first.
    """
    name = Path(script).name

    def agrees(row):
        said = re.findall(r"\b(\w+)=([\w.]+)", row["notes"])
        ours = [(args or {}).get(flag, default(name, flag)) for flag, _ in said]
        return all(value is None or plain(value) == plain(told) for value, (_, told) in zip(ours, said))

    rows = [row for row in published(path) if (row["file"], row["env_id"]) == (f"cleanrl/{name}", env_id)]
    return sorted(filter(agrees, rows), key=lambda row: not row["score_std"])


def reference(script, env_id, steps, args=None):
    """The published score of a script after as many steps: (mean, standard deviation), or None."""
    row = next((row for row in references(script, env_id, args) if int(row["steps"]) == steps), None)
    return (float(row["score_mean"]), float(row["score_std"] or "nan")) if row else None
