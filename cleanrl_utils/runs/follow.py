"""Evaluate the checkpoints of runs as they appear, which is `python -m cleanrl_utils.evaluate --follow`.

RUN/eval/ has the curve, as events: the mean and the standard deviation of the returns, at the step of each checkpoint
and at the time when that was written. It is a folder of its own because a run that is resumed cuts all event files that
lie beside its own. RUN/best/ is a run folder with the best model so far, and with the returns that made it that.
What was evaluated is known from these folders alone, so that following can be stopped and begun again at any time.
"""

import os
import shutil
import time
from contextlib import ExitStack, closing
from glob import glob, has_magic
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from cleanrl_utils.engines.cells import read_json
from cleanrl_utils.runs.checkpoint import checkpoint_of, write_model
from cleanrl_utils.runs.events import read_scalars, read_series
from cleanrl_utils.runs.folder import find_runs, load_args, newest_run
from cleanrl_utils.runs.results import SPEED, has_ended

try:
    import fcntl
except ImportError:  # Windows: two that follow one run are not kept apart
    fcntl = None

MEAN, STD, EPISODE = "eval/mean_return", "eval/std_return", "eval/episodic_return"


class Scalars:
    """An event file in a folder, begun with the first values that are added."""

    def __init__(self, folder):
        self.folder, self.writer = folder, None

    def add(self, step, wall, values):
        """Write tag -> value at a step and a time, all of it or nothing."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.writer = self.writer or EventFileWriter(str(self.folder))
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self.writer.add_event(Event(summary=summary, step=step, wall_time=wall))
        self.writer.flush()

    def close(self):
        if self.writer:
            self.writer.close()


def replace(source, folder):
    """Put a copy of a file into a folder, whole or not at all."""
    temporary = folder / f"{source.name}.tmp"
    shutil.copyfile(source, temporary)
    os.replace(temporary, folder / source.name)


class Followed:
    """A run whose checkpoints are evaluated, each step once."""

    def __init__(self, run_dir, kind=""):
        self.dir, self.seen, self.ended, self.lock = run_dir, None, False, None
        self.curve, self.best_dir = run_dir / f"eval{kind}", run_dir / f"best{kind}"
        self.steps, self.best, self.scalars = set(), -np.inf, Scalars(self.curve)

    def read_best(self):
        """The mean return of the model in best/; if a kill has left it without, that of the curve, which it beat."""
        nothing = np.full((1, 2), -np.inf)
        if not (self.best_dir / "model.safetensors").is_file():
            return -np.inf
        if EPISODE in (kept := read_scalars(self.best_dir)):
            return float(kept[EPISODE][:, 1].mean())
        return float(read_scalars(self.curve).get(MEAN, nothing)[:, 1].max())

    def look(self, score, say):
        """Evaluate the checkpoint if it is new; returns whether it was."""
        path = checkpoint_of(self.dir)
        try:
            stat = path.stat() if path else None
        except FileNotFoundError:  # the run was deleted
            stat = None
        if stat is None:
            self.ended |= not self.dir.is_dir()
            return False
        if self.ended or self.seen == (stat.st_ino, stat.st_mtime_ns):
            return False
        if not self.take():
            say(f"{self.dir.name}: another process follows this run")
            self.ended = True
            return False
        self.seen = stat.st_ino, stat.st_mtime_ns
        with TemporaryDirectory() as folder:
            step = write_model(self.dir, folder)
            if step not in self.steps:
                self.log(step, np.ravel(score(self.dir, Path(folder))), stat.st_mtime, Path(folder), say)
        self.ended = self.was_last(step)
        return True

    def take(self):
        """Whether no other process follows this run; what was evaluated before is read when that is sure."""
        if self.lock is None:
            self.curve.mkdir(exist_ok=True)
            self.lock = (self.curve / "lock").open("a")
            try:
                fcntl and fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self.steps = set(read_scalars(self.curve).get(MEAN, np.zeros((0, 2)))[:, 0].astype(int).tolist())
            self.best = self.read_best()
        return True

    def close(self):
        """Let others follow this run."""
        self.scalars.close()
        if self.lock:
            self.lock.close()

    def was_last(self, step):
        """Whether the checkpoint of a step is that of the end of training."""
        args, logged = load_args(self.dir), read_series(self.dir, [SPEED])[SPEED][0].tolist()
        return step >= args["total_timesteps"] or (has_ended(args, logged) and step >= max(logged))

    def log(self, step, returns, wall, folder, say):
        """Keep the model if it is the best, and write the returns down."""
        mean, std, better = float(returns.mean()), float(returns.std()), returns.mean() > self.best
        if better:
            self.keep(returns, folder, wall)
        self.scalars.add(step, wall, {MEAN: mean, STD: std})
        self.steps.add(step)
        total = load_args(self.dir)["total_timesteps"]
        told = f"{self.dir.name}: step {step} of {total}: mean return {mean:.2f} +- {std:.2f}"
        say(f"{told}, {len(returns)} episodes{', the best so far' if better else ''}")

    def keep(self, returns, folder, wall):
        """Make best/ a run folder of this model: its flags, its script and what else tells where it is from."""
        self.best_dir.mkdir(exist_ok=True)
        earlier = list(self.best_dir.glob("events*"))
        texts = [path for pattern in ("*.py", "*.txt") for path in self.dir.glob(pattern)]
        for source in (*texts, folder / "args.json", folder / "model.safetensors"):
            replace(source, self.best_dir)
        for file in earlier:
            file.unlink()
        with closing(Scalars(self.best_dir)) as scalars:
            for i, episodic_return in enumerate(returns):
                scalars.add(i, wall, {EPISODE: float(episodic_return)})
        self.best = float(returns.mean())


def runs_at(path):
    """The run folders that a word names: one, those in a folder, or those that a pattern matches."""
    places = glob(str(path)) if has_magic(str(path)) and not Path(path).exists() else [path]
    return [run for place in sorted(places) for run in sorted(find_runs(place))]


def state_of_runner(path):
    """Of the benchmark runner as it was last started in a folder of runs: whether cells are left, and what has failed.

    The latter are the names of run folders: their runs have not ended, and will not.
    """
    lists = sorted(Path(path).glob(".benchmark/matrix-*.json"), key=lambda file: file.stat().st_mtime_ns)
    left, failed = False, set()
    for cell in (read_json(lists[-1]) or {}).get("cells", []) if lists else []:
        folder = lists[-1].parent / cell["id"]
        failure = read_json(folder / "failed.json")
        left |= failure is None and not (folder / "done.json").exists()
        failed |= {Path(failure["run_dir"]).name} if failure and failure["run_dir"] else set()
    return left, failed


def follow(paths, score, say, poll=1.0, kind=""):
    """Evaluate the checkpoints of runs until all have ended; returns the runs that could not be evaluated.

    `score` returns the returns of some episodes, given a run folder and a folder with the model that is to be played;
    `kind` ends the names of the folders of the curve and of the best model.
    """
    runs, failed = {}, []
    paths = [newest_run() if str(path) == "latest" else path for path in paths]
    with ExitStack() as stack:
        if not any(map(runs_at, paths)):
            say(f"No run yet in {', '.join(map(str, paths))}: waiting for one")
        while True:
            for folder in dict.fromkeys(run for path in paths for run in runs_at(path)):
                if folder not in runs:
                    runs[folder] = Followed(folder, kind)
                    stack.callback(runs[folder].close)
            news = False
            for run in list(runs.values()):
                try:
                    news |= run.look(score, say)
                except ValueError as error:
                    say(f"{run.dir.name}: {error}")
                    failed.append(run.dir)
                    run.ended = True
            left, lost = zip(*map(state_of_runner, paths))
            if runs and not any(left) and all(run.ended or run.dir.name in set().union(*lost) for run in runs.values()):
                return failed
            if not news:
                time.sleep(poll)
