"""Search hyperparameters of a script with Optuna: one set that does well on several environments and seeds.

    from cleanrl_utils.tuner import Tuner

    tuner = Tuner(
        script="cleanrl/ppo.py",
        metric="charts/episodic_return",
        target_scores={"CartPole-v1": [0, 500], "Acrobot-v1": [-500, 0]},
        params_fn=lambda trial: {
            "learning-rate": trial.suggest_float("learning-rate", 3e-4, 3e-3, log=True),
            "total-timesteps": 100_000,
        },
        study_name="my-study",
        workers=4,
    )
    study = tuner.tune(num_trials=100, num_seeds=3)

A trial is one process of the script for each environment and seed, each in a folder of its own below runs/my-study. Its
score: the mean of the last values of the metric of each run, scaled by the target scores, aggregated over environments,
averaged over seeds. The study is on disk: the same call goes on where it was stopped or killed, to the same total. From
a file, without Python: python -m cleanrl_utils.tune --help. Linux, macOS. More: docs/advanced/hyperparameter-tuning.md
"""

import difflib
import fcntl
import hashlib
import json
import math
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from cleanrl_utils import fail
from cleanrl_utils.engines.local import gpu_share, thread_limits, visible_gpus
from cleanrl_utils.runs.events import follow
from cleanrl_utils.runs.folder import script_flags

try:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState
except ImportError:
    raise ImportError('the tuner needs optuna: pip install -e ".[tune]", or pip install "optuna>=4,<6"') from None

AGGREGATIONS = {"average": np.mean, "median": np.median, "max": np.max, "min": np.min}
TENTHS = 10  # a run reports this often to the pruner
RETRIES = 3  # how often a run begins again when Ray lost it
POLL, READ = 0.05, 0.5  # seconds between looks at the processes, and at their metrics

# Stands between the tuner and a script, as the leader of the script's process group. When the tuner closes the pipe, or
# is gone for whatever reason, the whole group gets SIGTERM and after ten seconds SIGKILL.
GUARD = """
import os, select, signal, subprocess, sys
script = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
signal.signal(signal.SIGTERM, lambda *received: None)
while script.poll() is None and not select.select([0], [], [], 0.05)[0]:
    pass
code = script.poll()
if code is None:
    os.killpg(0, signal.SIGTERM)
    try:
        script.wait(10)
    except subprocess.TimeoutExpired:
        pass
    os.killpg(0, signal.SIGKILL)
sys.exit(code if code >= 0 else 128 - code)
"""


class NoTrialCompleted(RuntimeError):
    """Every trial of a study failed or was pruned."""


class LocalProcess:
    """A script in a process of this machine; what it prints goes to log.txt."""

    lost = False

    def __init__(self, command, folder, environment):
        with (folder / "log.txt").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", GUARD, *command],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self):
        return self.process.poll()

    def stop(self):
        self.process.stdin.close()


class RayProcess:
    """A script inside a Ray task, `lost` if its worker or node is; the nodes of the cluster must see `folder`."""

    def __init__(self, command, folder, environment, **resources):
        import ray

        def task(guard, command, folder, environment):  # nested, so that nodes get it as a value
            import os
            import subprocess
            import sys

            # Ray kills the children of a worker that it ends; behind a shell the guard lives to see the pipe close
            shell = ["sh", "-c", 'exec 3<&0; "$@" <&3 & wait $!', "sh"]
            with open(f"{folder}/log.txt", "wb") as log:
                process = subprocess.Popen(
                    [*shell, sys.executable, "-I", "-S", "-c", guard, *command],
                    cwd=folder,
                    env=os.environ | environment,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                return process.wait()

        self.ray, self.folder, self.stopped, self.lost = ray, folder, False, False
        remote = ray.remote(max_retries=0, **resources)(task)
        self.ref = remote.remote(GUARD, command, str(folder), environment)

    def poll(self):
        if not self.ray.wait([self.ref], timeout=0)[0]:
            return None
        try:
            return self.ray.get(self.ref)
        except (self.ray.exceptions.RayError, OSError) as error:
            if not self.stopped:
                self.lost = not isinstance(error, self.ray.exceptions.RayTaskError)  # which the task itself raised
                with (self.folder / "log.txt").open("a") as log:
                    log.write(f"\nRay: {error}\n")
            return -1

    def stop(self):
        self.stopped = True
        self.ray.cancel(self.ref, force=True)


class Run:
    """The script on one environment with one seed: its process and the metrics that it has written so far."""

    def __init__(self, env_id, seed, folder, command, total):
        self.env_id, self.seed, self.command, self.total, self.retries = env_id, seed, command, total, 0
        self.prepare(folder)

    def prepare(self, folder):
        """As if nothing had happened yet, in a new folder."""
        folder.mkdir(parents=True)
        self.folder, self.process, self.code, self.slot, self.run_dir = folder, None, None, None, None
        self.positions, self.values, self.tags, self.step = {}, [], set(), 0

    def read(self, metric):
        """Take in what is new in the event files, wherever below runs/ the script put them."""
        if self.run_dir is None:
            file = min((self.folder / "runs").rglob("events*"), default=None)
            if file is None:
                return
            self.run_dir = file.parent
            if (self.run_dir / "args.json").is_file():
                args = json.loads((self.run_dir / "args.json").read_text())
                self.total = args.get("total_timesteps", self.total)
        scalars = follow(self.run_dir, self.positions)
        if scalars is None:  # the script took metrics back
            self.values, self.step = [], 0
            scalars = follow(self.run_dir, self.positions)
        for tag, step, value in scalars:
            self.tags.add(tag)
            self.step = max(self.step, step)
            if tag == metric:
                self.values.append((step, value))

    def reached(self, tenth):
        """Whether this part of the training is over; the last tenth ends with the process."""
        return self.code == 0 or bool(self.total and tenth < TENTHS and self.step > tenth / TENTHS * self.total)

    def mean(self, window, tenth=TENTHS):
        """The mean of the last values of the metric up to a tenth of the training; None if there are none."""
        end = tenth / TENTHS * self.total if self.total and tenth < TENTHS else float("inf")
        values = [value for step, value in self.values if step <= end][-window:]
        return np.mean(values) if values else None

    def log_tail(self, lines=15):
        file = self.folder / "log.txt"
        text = file.read_text(errors="replace") if file.is_file() else ""
        return "".join(f"    {line}\n" for line in text.splitlines()[-lines:])


def near(name, known):
    """A hint to what was meant by an unknown name."""
    matches = difflib.get_close_matches(name, known, 3)
    return f"did you mean {' or '.join(matches)}?" if matches else f"known: {', '.join(sorted(known))}"


def readable(value, distribution):
    """A suggested value as it is passed on: to a thousandth of its range or less, and to four digits of a logarithm."""
    if not isinstance(distribution, optuna.distributions.FloatDistribution) or distribution.single():
        return value
    low, high, step = distribution.low, distribution.high, distribution.step
    places = 3 - math.floor(math.log10(high - low)) if step is None else 12
    if distribution.log:
        places = max(places, 3 - math.floor(math.log10(value)))
    return min(max(round(value, places), low), high)


def with_readable(params, trial):
    """The hyperparameters of `params_fn` with the suggested ones among them made readable."""
    suggested = {
        trial.params[name]: readable(trial.params[name], trial.distributions[name])
        for name in trial.params
        if isinstance(trial.params[name], float)
    }
    return {name: suggested.get(value, value) if isinstance(value, float) else value for name, value in params.items()}


def alive(pid):
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def open_storage(storage):
    """An Optuna storage from a URL such as sqlite:///x.db, or from the path of a journal file."""
    if not isinstance(storage, (str, os.PathLike)):
        return storage
    if "://" in str(storage):
        return str(storage)
    Path(storage).parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(JournalFileBackend(str(storage)))


class Tuner:
    """A search; every argument is explained in docs/advanced/hyperparameter-tuning.md."""

    def __init__(
        self,
        script,
        metric,
        target_scores,
        params_fn,
        direction="maximize",
        aggregation_type="average",
        metric_last_n_average_window=50,
        sampler=None,
        pruner=None,
        storage=None,
        study_name="",
        wandb_kwargs=None,
        workers=1,
        engine="local",
        ray_address=None,
    ):
        self.script, self.metric, self.target_scores, self.params_fn = Path(script), metric, target_scores, params_fn
        self.direction, self.aggregation_type, self.window = direction, aggregation_type, metric_last_n_average_window
        self.sampler, self.pruner = sampler, pruner or optuna.pruners.NopPruner()
        self.study_name = study_name or f"{self.script.stem}__{int(time.time())}"
        self.folder = Path("runs", self.study_name)
        self.storage = storage or self.folder / "study.journal"
        self.wandb_kwargs, self.workers, self.engine, self.ray_address = wandb_kwargs, workers, engine, ray_address
        self.check()
        self.flags = script_flags(self.script)
        # beside the file that holds the study, so that it is the same one from wherever the study is tuned
        file = str(self.storage).removeprefix("sqlite:///")
        self.in_a_file = isinstance(self.storage, (str, os.PathLike)) and "://" not in file
        self.lock = Path(f"{file}.{self.study_name}.lock") if self.in_a_file else self.folder / "lock"

    def check(self):
        if not self.script.is_file():
            raise ValueError(f"script {self.script} does not exist, seen from {Path.cwd()}")
        choices = {
            "direction": (self.direction, ["maximize", "minimize"]),
            "aggregation_type": (self.aggregation_type, list(AGGREGATIONS)),
            "engine": (self.engine, ["local", "ray"]),
        }
        for name, (value, known) in choices.items():
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        if self.workers < 1 or self.window < 1:
            raise ValueError("workers and metric_last_n_average_window must be at least 1")
        if self.wandb_kwargs is not None and find_spec("wandb") is None:
            raise ValueError('wandb_kwargs need wandb: pip install -e ".[track]", or pip install wandb')
        if re.search(r"[/\\\s]", self.study_name) or not self.study_name.strip("."):
            raise ValueError(f"study_name {self.study_name!r} is the name of a folder: no slashes and spaces")
        if not self.target_scores:
            raise ValueError('target_scores needs an environment, such as {"CartPole-v1": [0, 500]}')
        for env_id, target in self.target_scores.items():
            if target is None and len(self.target_scores) > 1:
                raise ValueError(f"target_scores: to compare several environments, {env_id} needs [low, high]")
            pair = isinstance(target, (list, tuple)) and len(target) == 2 and target[0] != target[1]
            pair = pair and all(isinstance(x, (int, float)) and np.isfinite(x) for x in target)
            if target is not None and not pair:
                raise ValueError(f"target_scores: {env_id} needs [low, high], two numbers, not {target}")

    def arguments(self, params):
        """Hyperparameters as a command line; flags that the script does not have are an error."""
        argv = []
        for name, value in params.items():
            name = name.removeprefix("--")
            plain = name.replace("-", "_")
            if plain in ("env_id", "seed"):
                raise ValueError(f"--{name} is set by the tuner, from target_scores and num_seeds: leave it out")
            if self.flags and plain not in self.flags:
                known = [flag.replace("_", "-") for flag in self.flags]
                raise ValueError(f"{self.script.name} has no flag --{name}: {near(name.replace('_', '-'), known)}")
            if isinstance(value, (bool, np.bool_)):  # tyro's spelling, or that of an argparse flag with a value
                argv += [f"--{name}" if value else f"--no-{name}"] if self.flags else [f"--{name}", str(value)]
            elif isinstance(value, (list, tuple)):
                argv += [f"--{name}", *map(str, value)]
            elif value is not None or self.flags:  # tyro reads None; elsewhere None is the flag left out
                argv += [f"--{name}", str(value)]
        return argv

    def environment(self, slot):
        """The environment of a script: its share of the cores, and of the GPUs in turn."""
        path = os.environ.get("PYTHONPATH")
        changes = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))} if path else {}
        changes["WANDB_SERVICE"] = ""  # W&B of our own, in which a run of another process stays open after its end
        if self.engine == "ray":  # which deals out cores and GPUs itself
            return changes
        return os.environ | changes | thread_limits(self.workers) | gpu_share(slot, self.workers, self.gpus, 1)

    def open_study(self, num_seeds):
        """The study, new or as it was left; what was running when the tuner was killed failed."""
        names = {"study_name": self.study_name, "direction": self.direction, "load_if_exists": True}
        try:
            storage = open_storage(self.storage)
            study = optuna.create_study(storage=storage, sampler=self.sampler, pruner=self.pruner, **names)
        except Exception as error:  # of a file system or of a database, whichever it is
            raise ValueError(f"storage {self.storage}: {' '.join(str(error).split())}") from error
        settings = {"script": self.script.name, "metric": self.metric, "metric_last_n_average_window": self.window}
        settings["text of the script"] = hashlib.sha256(self.script.read_bytes()).hexdigest()[:10]
        settings |= {"direction": self.direction, "aggregation_type": self.aggregation_type, "num_seeds": num_seeds}
        settings["target_scores"] = {env_id: target and list(target) for env_id, target in self.target_scores.items()}
        saved = study.user_attrs.get("settings", settings) if self.count(study) else settings
        for name in settings:
            if saved.get(name) != settings[name]:
                raise ValueError(
                    f"study {self.study_name} was begun with {name} = {saved.get(name)}, not {settings[name]}: "
                    "scores would not compare, choose another study_name"
                )
        host, pid = study.user_attrs.get("tuner") or (None, None)
        elsewhere = host is not None and (host != socket.gethostname() or (pid != os.getpid() and alive(pid)))
        if elsewhere and not self.in_a_file:  # a lock in runs/ says nothing about those who share a database
            raise ValueError(
                f"study {self.study_name} is being tuned by process {pid} of {host}. If that was killed: optuna study "
                f"set-user-attr --storage URL --study-name {self.study_name} --key tuner --value ''"
            )
        study.set_user_attr("tuner", [socket.gethostname(), os.getpid()])
        study.set_user_attr("settings", settings)
        for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            print(f"trial {trial.number} was interrupted and does not count; its runs: {self.trial_folder(trial)}")
            self.interrupted(study, trial.number)
        if study.get_trials(deepcopy=False):
            study.sampler.reseed_rng()  # a seeded sampler would begin with the same suggestions again
        return study

    def tell(self, study, trial, outcome, score=None):
        """Tell Optuna how a trial ended; whether its sampler has nothing more to suggest is in `exhausted`."""
        try:
            study.tell(trial, score, outcome)
        except RuntimeError as error:
            if "Study.stop" not in str(error):  # how GridSampler and BruteForceSampler end a study
                raise
            self.exhausted = not study.get_trials(deepcopy=False, states=[TrialState.WAITING])

    def interrupted(self, study, number):
        """A trial without an outcome: it fails, and the same parameters come again under another number."""
        trial = study.get_trials(deepcopy=False)[number]
        point = {name: value for name, value in trial.system_attrs.items() if name in ("grid_id", "search_space")}
        again = optuna.trial.create_trial(state=TrialState.WAITING, system_attrs=point | {"fixed_params": trial.params})
        study.add_trial(again)  # as Study.enqueue_trial does, with what GridSampler asks for
        self.tell(study, number, TrialState.FAIL)

    def trial_folder(self, trial):
        return self.folder / f"trial-{trial.number:04d}"

    def begin(self, study, num_seeds):
        """Ask for hyperparameters and prepare the runs of a trial, seed by seed; None if params_fn rejects them."""
        trial = study.ask()
        try:
            params = with_readable(self.params_fn(trial), trial)
            argv = self.arguments(params)
            total = {name.strip("-").replace("-", "_"): params[name] for name in params}.get("total_timesteps")
            begun_with = study.user_attrs.get("total_timesteps") if self.count(study) else None
            if begun_with not in (None, total) and not any("timesteps" in name for name in trial.params):
                raise ValueError(
                    f"study {self.study_name} was begun with total-timesteps {begun_with}, not {total}: "
                    "scores would not compare, choose another study_name"
                )
            study.set_user_attr("total_timesteps", total)
            trial.set_user_attr("arguments", argv)
            folder, runs = self.trial_folder(trial), []
            if folder.exists():
                raise ValueError(f"{folder} belongs to another study: remove it or choose another study_name")
            for seed in range(1, num_seeds + 1):
                for env_id in self.target_scores:
                    run_folder = folder.resolve() / f"{re.sub('[/:]', '-', env_id)}__{seed}"
                    command = [sys.executable, str(self.script.resolve()), *argv]
                    command += ["--env-id", env_id, "--seed", str(seed)]
                    runs.append(Run(env_id, seed, run_folder, command, total))
        except optuna.TrialPruned:  # how params_fn rejects a combination
            self.tell(study, trial, TrialState.PRUNED)
            return None
        except BaseException:
            self.interrupted(study, trial.number)
            raise
        state = SimpleNamespace(trial=trial, params=params, argv=argv, runs=runs, begun=time.monotonic())
        state.step, state.last_step = 0, num_seeds * TENTHS
        return state

    def start(self, run, slot):
        run.slot = slot
        if self.engine == "ray":
            gpus = min(1.0, int(self.ray.cluster_resources().get("GPU", 0) / self.workers * 1000) / 1000)
            environment = self.environment(slot)
            if 0 < gpus <= 0.5 and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # several tasks on one GPU
                environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.9 / int(1 / gpus):.3f}"
            run.process = RayProcess(run.command, run.folder, environment, num_cpus=1, num_gpus=gpus)
        else:
            run.process = LocalProcess(run.command, run.folder, self.environment(slot))

    def score(self, runs, tenth=TENTHS):
        """The score of the runs of some seeds at a tenth of the training; None if a run has no value of the metric."""
        scores = {}
        for run in runs:
            mean, target = run.mean(self.window, tenth), self.target_scores[run.env_id]
            if mean is None:
                return None
            if target is not None:
                mean = (mean - target[0]) / (target[1] - target[0])
            scores.setdefault(run.seed, []).append(mean)
        return float(np.mean([AGGREGATIONS[self.aggregation_type](by_env) for by_env in scores.values()]))

    def failure(self, run):
        """Why a run that has ended has no score, or nothing."""
        where = f"{run.env_id}, seed {run.seed}"
        if run.code:
            hint = " (exit code 2: the script refused its flags)" if run.code == 2 else ""
            return f"{where} ended with exit code {run.code}{hint}. The end of {run.folder}/log.txt:\n{run.log_tail()}"
        if not run.values:
            hint = near(self.metric, run.tags) if run.tags else "it logged nothing at all"
            return f"{where} logged no value of the metric {self.metric}: {hint}"
        if not np.isfinite(run.mean(self.window)):
            return f"{where} has the score {run.mean(self.window)}"

    def advance(self, state):
        """Look at the runs of a trial: its final state and score once there is one, else None.

        The pruner hears of the trial seed by seed: step 10 * i + t is the score of seeds 1 to i + 1 after t tenths of
        the training. That is the same for every trial, whatever its rollouts and however many workers there are.
        """
        for run in state.runs:
            reason = run.code is not None and self.failure(run)
            if reason:
                state.trial.set_user_attr("failure", reason)
                print(f"trial {state.trial.number} failed: {reason.rstrip()}\n  {shlex.join(state.argv)}", flush=True)
                return TrialState.FAIL, None
        while state.step < state.last_step:
            index, tenth = state.step // TENTHS, state.step % TENTHS + 1
            if not all(run.reached(tenth) for run in state.runs if run.seed == index + 1):
                return None
            state.step += 1
            score = self.score([run for run in state.runs if run.seed <= index + 1], tenth)
            if score is not None:
                state.trial.report(score, state.step)
                if state.step < state.last_step and state.trial.should_prune():
                    return TrialState.PRUNED, score
        return TrialState.COMPLETE, self.score(state.runs)

    def tune(self, num_trials, num_seeds=3):
        """Bring the study to `num_trials` finished trials of `num_seeds` seeds each, and return it."""
        if num_trials < 1 or num_seeds < 1:
            raise ValueError("num_trials and num_seeds must be at least 1")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock.parent.mkdir(parents=True, exist_ok=True)
        with self.lock.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(f"study {self.study_name} is being tuned by another process") from None
            study = self.open_study(num_seeds)
            done, own_ray = self.count(study), False
            print(f"Study {self.study_name} in {self.folder}: {done} of {num_trials} trials done", flush=True)
            try:
                own_ray = self.engine == "ray" and self.connect_ray()
                self.search(study, num_trials, num_seeds)
            finally:
                study.set_user_attr("tuner", None)
                if own_ray:
                    self.ray.shutdown()
        self.summary(study)
        return study

    def count(self, study):
        """How many trials are finished; those that were interrupted, and so failed without a reason, are not."""
        trials = study.get_trials(deepcopy=False)
        done = [trial for trial in trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
        return len(done) + sum(trial.state == TrialState.FAIL and "failure" in trial.user_attrs for trial in trials)

    def connect_ray(self):
        """Join the cluster, or start Ray on this machine; whether it was started here."""
        try:
            import ray
        except ImportError:
            raise ValueError('engine "ray" needs ray: pip install -e ".[ray]", or pip install ray') from None
        self.ray = ray
        if ray.is_initialized():
            return False
        address = self.ray_address or os.environ.get("RAY_ADDRESS")
        new = {"address": "local", "num_cpus": self.workers, "include_dashboard": False}
        ray.init(**({"address": address} if address else new), log_to_driver=False)
        return not address

    def search(self, study, num_trials, num_seeds):
        """Keep the workers busy: runs of the oldest trial come first, a new trial begins when one would be idle."""
        self.gpus = visible_gpus()
        active, running, slots, self.exhausted = [], [], list(range(self.workers)), False
        done, read = self.count(study), 0.0
        if isinstance(study.sampler, optuna.samplers.GridSampler):
            waiting = study.get_trials(deepcopy=False, states=[TrialState.WAITING])
            self.exhausted = study.sampler.is_exhausted(study) and not waiting
        try:
            while active or (done < num_trials and not self.exhausted):
                look = time.monotonic() > read + READ
                read = time.monotonic() if look else read
                for run in list(running):
                    run.code = run.process.poll()
                    if look or run.code is not None:
                        run.read(self.metric)
                    if run.code is not None:
                        running.remove(run)
                        slots.append(run.slot)
                        if run.process.lost and run.retries < RETRIES:
                            run.retries += 1
                            print(f"Ray lost {run.folder}, it begins again ({run.retries} of {RETRIES})", flush=True)
                            # what was lost may still write to its folder
                            run.prepare(run.folder.with_name(f"{run.folder.name}-again"))
                for state in list(active):
                    outcome = self.advance(state)
                    if outcome:
                        active.remove(state)
                        done += 1
                        for run in set(running).intersection(state.runs):  # each keeps its slot until it has ended
                            run.process.stop()
                        self.finish(study, state, *outcome, f"{done}/{num_trials}")
                while slots:
                    waiting = [run for state in active for run in state.runs if run.process is None]
                    if waiting:
                        self.start(waiting[0], slots.pop(0))
                        running.append(waiting[0])
                    elif done + len(active) < num_trials and not self.exhausted:
                        state = self.begin(study, num_seeds)
                        active += [state] if state else []
                        done += state is None
                    else:
                        break
                time.sleep(POLL)
        finally:
            for run in running:
                run.process.stop()
            for state in active:
                self.interrupted(study, state.trial.number)
            while any(run.process.poll() is None for run in running):
                time.sleep(POLL)

    def finish(self, study, state, outcome, score, progress):
        """Tell Optuna and the user how a trial ended."""
        self.tell(study, state.trial, outcome, score if outcome == TrialState.COMPLETE else None)
        trials = study.get_trials(deepcopy=False)
        complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
        best = f", best {study.best_value:.4g} (trial {study.best_trial.number})" if complete else ""
        if outcome != TrialState.FAIL:
            how = f"pruned at step {state.step} of {state.last_step}" if outcome == TrialState.PRUNED else "complete"
            seconds = time.monotonic() - state.begun
            print(f"trial {state.trial.number} {how}: {score:.4g}{best}, {seconds:.0f} s, {progress}")
            print(f"  {shlex.join(state.argv)}", flush=True)
        failures = [trial.user_attrs.get("failure", "") for trial in trials if trial.state == TrialState.FAIL]
        if len(failures) == len(trials) == 3 and all("exit code 2" in failure for failure in failures):
            print("The script refused the flags of the first three trials, see above: are they what it expects?")
        if self.wandb_kwargs is not None:
            self.log_to_wandb(state, outcome, score)

    def log_to_wandb(self, state, outcome, score):
        """One W&B run for a trial: its hyperparameters, what the pruner saw, its score and its state."""
        import wandb

        names = {"name": f"{self.study_name}_{state.trial.number}", "group": self.study_name, "config": state.params}
        steps = state.trial.study.trials[state.trial.number].intermediate_values
        try:
            with wandb.init(**names | self.wandb_kwargs, reinit="finish_previous") as run:
                for step, value in steps.items():
                    run.log({"intermediate score": value}, step=step)
                run.summary.update({"trial": state.trial.number, "state": outcome.name, "score": score})
        except wandb.errors.Error as error:  # no reason to end a search
            print(f"trial {state.trial.number} is not on W&B: {error}", flush=True)

    def summary(self, study):
        trials = study.get_trials(deepcopy=False)
        states = {state: [trial for trial in trials if trial.state == state] for state in TrialState}
        counts = ", ".join(f"{len(states[state])} {state.name.lower()}" for state in states if states[state])
        storage = self.storage if isinstance(self.storage, (str, os.PathLike)) else "URL"
        print(f"\n{len(trials)} trials: {counts}. Their runs: tensorboard --logdir {self.folder}")
        print(f"The study: optuna-dashboard {storage}  (pip install optuna-dashboard)")
        if not states[TrialState.COMPLETE]:
            raise NoTrialCompleted(f"no trial of study {self.study_name} completed: {counts}")
        best = study.best_trial
        print(f"Best score {best.value:.4g}, trial {best.number}, in {self.trial_folder(best)}:")
        for name, value in best.params.items():
            print(f"  {name}: {readable(value, best.distributions[name])}")
        print("To train with it:")
        for env_id in self.target_scores:
            command = ["python", str(self.script), "--env-id", env_id, "--seed", "1", *best.user_attrs["arguments"]]
            print(f"  {shlex.join(command)}")


if __name__ == "__main__":
    fail("for Python, from cleanrl_utils.tuner import Tuner; the command is python -m cleanrl_utils.tune --help")
