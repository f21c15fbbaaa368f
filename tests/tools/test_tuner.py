"""cleanrl_utils.tuner and .tune: what reaches the scripts, scores, pruning, failures, kills and resumes."""

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cleanrl_utils.runs.events import read_scalars
from helpers.files import ROOT, posix, require
from helpers.processes import environment, private_network

pytestmark = [posix]

# Trains nothing: logs x at each tenth of its steps, at most 16383, and writes down how it was started.
SCRIPT = """
import json, os, signal, struct, subprocess, sys, time
from pathlib import Path

class Args:
    env_id: str = ""
    seed: int = 1
    total_timesteps: int = 100
    x: float = 0
    n: int = 0
    name: str | None = ""
    flag: bool = True
    sleep: float = 0
    crash: int = 0
    crash_seed: int = 0
    crowd: int = 0

args = {"x": "0", "sleep": "0", "total_timesteps": "100", "crash": "0", "crash_seed": "0", "crowd": "0"}
for i, word in enumerate(sys.argv):
    if word.startswith("--"):
        value = "".join(sys.argv[i + 1 : i + 2])
        args[word[2:].replace("-", "_")] = True if value.startswith("--") else value
run = Path("runs", f"{args['env_id']}__{args['seed']}")
run.mkdir(parents=True)
(run / "args.json").write_text(json.dumps(args | {"total_timesteps": int(args["total_timesteps"])}))
stubborn = ["sh", "-c", "trap '' TERM; exec sleep 100"]
child = subprocess.Popen(stubborn) if float(args["sleep"]) > 1 else None
names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION", "WANDB_SERVICE")
info = {"begun": time.time(), "env": {name: os.environ.get(name) for name in names}}
info |= {"pids": [os.getpid()] + ([child.pid] if child else []), "argv": sys.argv[1:]}
Path("info.tmp").write_text(json.dumps(info))
os.replace("info.tmp", "info.json")
while len(list(Path("../..").rglob("info.json"))) < int(args["crowd"]):
    time.sleep(0.05)
if int(args["crash"]) and args["crash_seed"] in ("0", args["seed"]):
    print("something broke")
    sys.exit(int(args["crash"]))
with open(run / "events", "wb", buffering=0) as file:
    for tenth in range(1, 11):
        time.sleep(float(args["sleep"]) / 10)
        step = tenth * int(args["total_timesteps"]) // 10
        score = struct.pack("<f", float(args["x"]) * int(args["seed"]) * tenth)
        # an event of TensorBoard, whose packages take a second to import: step, summary, value, tag, simple_value
        data = bytes([16, step & 127 | 128, step >> 7, 42, 14, 10, 12, 10, 5]) + b"score" + bytes([21]) + score
        file.write(struct.pack("<QI", len(data), 0) + data + bytes(4))
Path("info.tmp").write_text(json.dumps(info | {"ended": time.time()}))
os.replace("info.tmp", "info.json")
"""


@pytest.fixture
def tune(tmp_path, monkeypatch):
    """Tune the script above in a folder of its own; keyword arguments change the search."""
    require("optuna")
    from cleanrl_utils.tuner import Tuner

    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SCRIPT)

    def call(params_fn, num_trials=1, num_seeds=1, **options):
        default = {"script": "script.py", "metric": "score", "metric_last_n_average_window": 1, "study_name": "s"}
        default |= {"target_scores": {"A": [0, 10]}, "params_fn": params_fn}
        return Tuner(**default | options).tune(num_trials, num_seeds)

    return call


def states(study):
    return [trial.state.name for trial in study.trials]


def infos(folder="runs"):
    return [json.loads(file.read_text()) for file in sorted(Path(folder).rglob("info.json"))]


def alive(pid):
    """Whether a process runs; one that has ended and waits for its parent does not."""
    status = Path(f"/proc/{pid}/stat")
    if status.parent.parent.is_dir() and not status.exists():
        return False
    try:
        return status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, seconds=180):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def test_the_example_of_the_release_post(tmp_path, monkeypatch):
    """As printed, with smaller numbers; every parameter is in its runs' args.json, the first too."""
    require("optuna")
    import optuna

    from cleanrl_utils.tuner import Tuner

    monkeypatch.chdir(tmp_path)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    Path("cleanrl").symlink_to(ROOT / "cleanrl")
    tuner = Tuner(
        script="cleanrl/ppo.py",
        metric="charts/episodic_return",
        metric_last_n_average_window=50,
        direction="maximize",
        aggregation_type="average",
        target_scores={
            "CartPole-v1": [0, 500],
            "Acrobot-v1": [-500, 0],
        },
        params_fn=lambda trial: {
            "learning-rate": trial.suggest_loguniform("learning-rate", 0.0003, 0.003),
            "num-minibatches": trial.suggest_categorical("num-minibatches", [1, 2, 4]),
            "update-epochs": trial.suggest_categorical("update-epochs", [1, 2, 4, 8]),
            "num-steps": trial.suggest_categorical("num-steps", [5, 16, 32, 64, 128]),
            "vf-coef": trial.suggest_uniform("vf-coef", 0, 5),
            "max-grad-norm": trial.suggest_uniform("max-grad-norm", 0, 5),
            "total-timesteps": 2400,
            "num-envs": 4,
        },
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5),
        sampler=optuna.samplers.TPESampler(),
    )
    study = tuner.tune(
        num_trials=1,
        num_seeds=1,
    )
    (trial,) = study.trials
    assert trial.state.name == "COMPLETE" and len(trial.params) == 6
    run_dirs = [file.parent for file in Path("runs").rglob("args.json")]
    assert len(run_dirs) == 2
    scores = []
    for run_dir in run_dirs:
        args = json.loads((run_dir / "args.json").read_text())
        for name, value in (trial.params | {"total-timesteps": 2400, "num-envs": 4}).items():
            assert args[name.replace("-", "_")] == pytest.approx(value, abs=1e-3), name
        low = {"CartPole-v1": 0, "Acrobot-v1": -500}[args["env_id"]]
        scores.append((read_scalars(run_dir)["charts/episodic_return"][-50:, 1].mean() - low) / 500)
    assert trial.value == pytest.approx(np.mean(scores))


def test_suggested_values_are_readable(tune, capsys):
    """Rounded to less than a thousandth of the range, and within it; what was not suggested stays."""
    Path("digits.py").write_text(SCRIPT.replace("class Args", "class Flags"))  # takes any flag
    study = tune(
        lambda trial: {
            "x": trial.suggest_float("x", 1, 2),
            "learning_rate": trial.suggest_float("learning_rate", 3e-4, 3e-3, log=True),
            "gamma": trial.suggest_float("gamma", 0.9, 0.99995, log=True),
            "half": trial.suggest_float("half", 0, 2, step=0.1),
            "own": 1 / 3,
            "which": trial.suggest_categorical("which", [1 / 7, 0.25]),
        },
        script="digits.py",
    )
    (trial,) = study.trials
    argv = infos()[0]["argv"]
    values = {name.removeprefix("--"): float(value) for name, value in zip(argv[::2], argv[1::2]) if name != "--env-id"}
    assert values["own"] == 1 / 3 and values["which"] == trial.params["which"]
    for name, digits in ("x", 4), ("learning_rate", 4), ("half", 2):
        assert values[name] == pytest.approx(trial.params[name], rel=2e-3)
        assert len(f"{values[name]!r}".replace(".", "").lstrip("0")) <= digits, name
    assert abs(values["gamma"] - trial.params["gamma"]) <= 1e-5 and 0.9 <= values["gamma"] <= 0.99995
    output = capsys.readouterr().out
    assert (
        f"  learning_rate: {values['learning_rate']}\n" in output and str(trial.params["learning_rate"]) not in output
    )


def test_flags_as_the_script_reads_them(tune):
    tune(
        lambda trial: {"x": 1e-5, "n": trial.suggest_int("n", 3, 3), "flag": False, "name": None, "total_timesteps": 50}
    )
    (info,) = infos()
    assert shlex.join(info["argv"]) == (
        "--x 1e-05 --n 3 --no-flag --name None --total_timesteps 50 --env-id A --seed 1"
    )
    plain = SCRIPT.replace(
        "class Args", "class Other"
    )  # nothing is known about its flags: values for all, None is none
    Path("plain.py").write_text(plain)
    tune(lambda trial: {"--flag": True, "name": None, "n": [1, 2]}, script="plain.py", study_name="plain")
    assert shlex.join(infos("runs/plain")[0]["argv"]) == "--flag True --n 1 2 --env-id A --seed 1"


@pytest.mark.parametrize("aggregation", ["average", "median", "max", "min"])
def test_score(tune, aggregation):
    """The script's metric is x * seed * tenth: the window takes the last two, targets scale, environments aggregate."""
    targets = {"A": [0, 10], "B/x": [-10, 10], "C": [0, -1]}
    study = tune(
        lambda trial: {"x": 2},
        num_seeds=2,
        aggregation_type=aggregation,
        target_scores=targets,
        metric_last_n_average_window=2,
        workers=3,
    )
    by_seed = []
    for seed in 1, 2:
        last = 2 * seed * np.array([9, 10])
        by_env = [(last.mean() - low) / (high - low) for low, high in targets.values()]
        by_seed.append({"average": np.mean, "median": np.median, "max": max, "min": min}[aggregation](by_env))
    assert study.best_value == pytest.approx(sum(by_seed) / 2)
    steps = study.best_trial.intermediate_values
    assert list(steps) == list(range(1, 21)) and steps[20] == pytest.approx(study.best_value)


def test_raw_score(tune):
    study = tune(lambda trial: {"x": 2 + trial.number}, 2, target_scores={"A": None}, direction="minimize")
    assert study.best_value == 20


def test_a_rejected_combination(tune):
    import optuna

    def params_fn(trial):
        if trial.number == 0:
            raise optuna.TrialPruned
        return {"x": 1}

    assert states(tune(params_fn, 2)) == ["PRUNED", "COMPLETE"] and len(infos()) == 1


def test_workers_share_the_machine(tune, monkeypatch):
    """Four at a time, over environments, seeds and trials; each has its share of threads and half of a GPU."""
    for name in ("OMP_NUM_THREADS", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    tune(lambda trial: {"crowd": 4}, num_trials=3, num_seeds=2, workers=4)
    runs = infos()
    changes = sorted([(run["begun"], 1) for run in runs] + [(run["ended"], -1) for run in runs])
    running = list(itertools.accumulate(change for _, change in changes))
    assert len(runs) == 6 and max(running) == 4
    assert {run["env"]["CUDA_VISIBLE_DEVICES"] for run in runs} == {"5", "7"}
    assert {run["env"]["XLA_PYTHON_CLIENT_MEM_FRACTION"] for run in runs} == {"0.450"}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert {run["env"]["OMP_NUM_THREADS"] for run in runs} == {str(max(1, cores // 4))}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    tune(lambda trial: {}, study_name="again")
    assert infos("runs/again")[0]["env"]["OMP_NUM_THREADS"] == "3"


def test_a_seeded_sampler_repeats_itself(tune):
    import optuna

    def params(name):
        sampler = optuna.samplers.TPESampler(seed=1, n_startup_trials=2)
        study = tune(lambda trial: {"x": trial.suggest_float("x", 0, 1)}, 4, study_name=name, sampler=sampler)
        return [trial.params["x"] for trial in study.trials]

    first = params("a")
    assert params("b") == first

    sampler = optuna.samplers.TPESampler(seed=1, n_startup_trials=9)  # when a study goes on, with other suggestions
    study = tune(lambda trial: {"x": trial.suggest_float("x", 0, 1)}, 6, study_name="b", sampler=sampler)
    assert len({trial.params["x"] for trial in study.trials}) == 6


def test_a_hopeless_trial_is_pruned(tune):
    """It stops at the same step however late one looks, and its processes end with it, with what they had started."""
    import optuna

    def params_fn(trial):
        return {"x": [10, 9, 1, 20][trial.number], "sleep": 20 * (trial.number == 2), "total-timesteps": 1000}

    pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=2)
    study = tune(params_fn, 4, num_seeds=2, pruner=pruner, workers=2)
    assert states(study) == ["COMPLETE", "COMPLETE", "PRUNED", "COMPLETE"]
    assert study.trials[2].intermediate_values == {1: pytest.approx(0.1), 2: pytest.approx(0.2)}
    pruned = infos("runs/s/trial-0002")
    pids = [pid for info in pruned for pid in info["pids"]]
    wait_until(lambda: not any(map(alive, pids)))
    assert len(pids) == 4 and not any("ended" in info for info in pruned)


def test_failures_do_not_end_a_study(tune, capfd):
    """One crashed seed of two fails the trial, since a mean over survivors would flatter it."""
    from cleanrl_utils.tuner import NoTrialCompleted

    crashes = [{"crash": 3}, {"crash": 1, "crash-seed": 2}, {}, {"crash": 2}]
    study = tune(lambda trial: {"x": 1, **crashes[trial.number]}, 4, num_seeds=2)
    assert states(study) == ["FAIL", "FAIL", "COMPLETE", "FAIL"]
    printed = capfd.readouterr().out
    assert "A, seed 1 ended with exit code 3" in printed and "    something broke" in printed
    assert "A, seed 2 ended with exit code 1" in printed and "refused its flags" in printed
    with pytest.raises(NoTrialCompleted, match="no trial of study b completed: 3 fail"):
        tune(lambda trial: {"crash": 2}, 3, study_name="b")
    assert "refused the flags of the first three trials" in capfd.readouterr().out
    with pytest.raises(NoTrialCompleted):
        tune(lambda trial: {}, metric="scores", study_name="c")
    assert "logged no value of the metric scores: did you mean score?" in capfd.readouterr().out


def test_a_grid_ends_by_itself(tune):
    import optuna

    sampler = optuna.samplers.GridSampler({"x": [1, 2, 3]}, seed=0)
    study = tune(lambda trial: {"x": trial.suggest_float("x", 0, 5)}, 10, sampler=sampler)
    assert states(study) == ["COMPLETE"] * 3 and study.best_params == {"x": 3}
    assert len(tune(lambda trial: {"x": trial.suggest_float("x", 0, 5)}, 10, sampler=sampler).trials) == 3


@pytest.mark.parametrize("kind", ["GridSampler", "BruteForceSampler"])
def test_a_grid_loses_no_point(tune, kind):
    """Points that were interrupted come again, even twice, and the last one of all may be rejected."""
    import optuna

    asked, grid = [], {"search_space": {"x": [1, 2, 3]}} if kind == "GridSampler" else {}

    def params_fn(trial):
        asked.append(trial.suggest_int("x", 1, 3))
        if len(asked) in (2, 3, 5):
            raise KeyboardInterrupt
        if len(asked) == 6:
            raise optuna.TrialPruned
        return {"x": asked[-1]}

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            tune(params_fn, 10, sampler=getattr(optuna.samplers, kind)(seed=0, **grid))
    study = tune(params_fn, 10, sampler=getattr(optuna.samplers, kind)(seed=0, **grid))
    first, second, third = asked[0], asked[1], asked[4]
    assert asked == [first, second, second, second, third, third] and {first, second, third} == {1, 2, 3}
    assert states(study) == ["COMPLETE", "FAIL", "FAIL", "COMPLETE", "FAIL", "PRUNED"]


DRIVER = """
from cleanrl_utils.tuner import Tuner

params = lambda trial: {"x": trial.suggest_float("x", 1, 2), "sleep": 100 * (trial.number == 1)}
options = {"params_fn": params, "study_name": "s", "workers": 2}
tuner = Tuner(script="script.py", metric="score", target_scores={"A": [0, 10]}, **options)
print(len(tuner.tune(num_trials=3, num_seeds=2).trials))
"""


def test_kill_and_resume(tune, tmp_path):
    """kill -9: the scripts end by themselves, the same call goes on to the same total, and finished trials stay."""
    Path("driver.py").write_text(DRIVER)
    command = [sys.executable, "driver.py"]
    env = environment(PYTHONPATH=str(ROOT))
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: len(list(Path("runs/s/trial-0001").rglob("info.json"))) == 2)
        refused = subprocess.run(command, env=env, capture_output=True, text=True)
        assert "study s is being tuned by another process" in refused.stderr
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    pids = [pid for info in infos("runs/s/trial-0001") for pid in info["pids"]]
    wait_until(lambda: not any(map(alive, pids)))
    first = infos("runs/s/trial-0000")

    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert "1 of 3 trials done" in done and "trial 1 was interrupted and does not count" in done
    study = tune(lambda trial: {}, 3, num_seeds=2, metric_last_n_average_window=50)
    assert states(study) == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    assert study.trials[1].params == study.trials[2].params != study.trials[3].params
    assert infos("runs/s/trial-0000") == first
    with pytest.raises(ValueError, match="was begun with num_seeds = 2, not 1"):
        tune(lambda trial: {}, 3, num_seeds=1, metric_last_n_average_window=50)


def test_interrupt_stops_the_scripts(tune):
    """Ctrl+C, here from the params_fn of a second trial: the first one's processes end, and it does not count."""

    def params_fn(trial):
        if trial.number == 1:
            wait_until(lambda: len(infos()) == 1 and len(infos()[0]["pids"]) == 2)
            raise KeyboardInterrupt
        return {"sleep": 100}

    with pytest.raises(KeyboardInterrupt):
        tune(params_fn, 2, workers=2)
    wait_until(lambda: not any(map(alive, infos()[0]["pids"])))  # a process lives for a moment after its SIGKILL
    study = tune(lambda trial: {"x": 1}, 2)
    assert states(study) == ["FAIL", "FAIL", "COMPLETE", "COMPLETE"]


def test_scores_that_would_not_compare(tune):
    """Another budget or another text of the script; settings of a study in which no trial counts are replaced."""
    with pytest.raises(RuntimeError):
        tune(lambda trial: 1 / 0 if trial.number else {}, metric="none", num_seeds=2)
    Path("runs").rename("failed")
    tune(lambda trial: {"total-timesteps": 10})
    with pytest.raises(ValueError, match="begun with total-timesteps 10, not 20"):
        tune(lambda trial: {"total-timesteps": 20}, 2)
    Path("script.py").write_text(SCRIPT + "# edited\n")
    with pytest.raises(ValueError, match="begun with text of the script"):
        tune(lambda trial: {"total-timesteps": 10}, 2)


def test_other_storages(tune):
    assert tune(lambda trial: {}, storage="sqlite:///study.db").trials and Path("study.db").exists()
    assert len(tune(lambda trial: {}, 2, storage="sqlite:///study.db").trials) == 2
    assert tune(lambda trial: {}, study_name="t", storage="a/b.journal").trials and Path("a/b.journal").exists()


@pytest.mark.parametrize("storage", ["{}/a.journal", "sqlite:///{}/a.db"])
def test_a_tuner_in_another_folder(tune, tmp_path, monkeypatch, storage):
    shared = {"script": tmp_path / "script.py", "storage": storage.format(tmp_path)}

    def params_fn(trial):
        (tmp_path / "other").mkdir()
        with monkeypatch.context() as context, pytest.raises(ValueError, match="being tuned by another process"):
            context.chdir(tmp_path / "other")
            tune(lambda trial: {}, **shared)
        return {}

    assert states(tune(params_fn, **shared)) == ["COMPLETE"]


def test_a_tuner_on_another_machine(tune):
    """The same database and no lock in common: refused, its trials are left alone, unless it was killed or let go."""
    import optuna

    storage = optuna.storages.RDBStorage("sqlite:///study.db")
    study = optuna.create_study(storage=storage, study_name="s", direction="maximize")
    study.ask()
    here, ended = os.uname().nodename, subprocess.Popen(["true"])
    ended.wait()
    for tuner in [here, os.getppid()], ["elsewhere", ended.pid]:
        study.set_user_attr("tuner", tuner)
        with pytest.raises(ValueError, match=f"being tuned by process {tuner[1]} of {tuner[0]}") as refused:
            tune(lambda trial: {}, storage=storage)
        assert states(study) == ["RUNNING"]
    command = str(refused.value).split("was killed: ")[1].replace("URL", "sqlite:///study.db")
    program, *words = shlex.split(command)
    subprocess.run([Path(sys.executable).with_name(program), *words], check=True)
    assert states(tune(lambda trial: {}, storage=storage)) == ["FAIL", "COMPLETE"]
    assert study.user_attrs["tuner"] is None
    study.set_user_attr("tuner", [here, ended.pid])
    assert len(tune(lambda trial: {}, 2, storage=storage).trials) == 3


@pytest.mark.parametrize(
    "options, message",
    [
        ({"script": "nowhere.py"}, "nowhere.py does not exist"),
        ({"direction": "up"}, "direction must be one of maximize, minimize, not 'up'"),
        ({"aggregation_type": "mean"}, "aggregation_type must be one of average"),
        ({"target_scores": {}}, "needs an environment"),
        ({"target_scores": {"A": None, "B": [0, 1]}}, "several environments, A needs"),
        ({"target_scores": {"A": [1, 1]}}, r"A needs \[low, high\]"),
        ({"target_scores": {"A": ["a", "b"]}}, r"A needs \[low, high\]"),
        ({"storage": "nowhere://x"}, "storage nowhere://x: "),
        ({"storage": "script.py"}, "storage script.py: "),
        ({"workers": 0}, "workers"),
        ({"engine": "slurm"}, "engine must be one of local, ray"),
        ({"study_name": "a/b"}, "no slashes"),
        ({"study_name": ".."}, "no slashes"),
        ({"params_fn": lambda trial: {"total-timestep": 1}}, "no flag --total-timestep: did you mean total-timesteps"),
        ({"params_fn": lambda trial: {"seed": 1}}, "--seed is set by the tuner"),
    ],
)
def test_wrong_arguments(tune, options, message):
    with pytest.raises(ValueError, match=message):
        tune(**{"params_fn": lambda trial: {}} | options)
    assert not infos()


CONFIG = """
script = "script.py"
metric = "score"
metric_last_n_average_window = 1
num_trials = 3
num_seeds = 1

[target_scores]
A = "raw"

[params]
x = { low = 1, high = 2 }
n = { low = 1, high = 8, log = true }
name = { choices = ["a", "b"] }
total-timesteps = 20

[sampler]
name = "RandomSampler"
seed = 3

[pruner]
name = "MedianPruner"
"""


def test_command_line(tune):
    Path("search.toml").write_text(CONFIG)
    command = [sys.executable, "-m", "cleanrl_utils.tune", "search.toml"]
    options = {"env": environment(PYTHONPATH=str(ROOT)), "capture_output": True, "text": True}
    done = subprocess.run([*command, "--num-trials", "2", "--workers", "2"], **options, check=True).stdout
    assert len(infos("runs/search")) == 2
    for args in [json.loads(file.read_text()) for file in Path("runs").rglob("args.json")]:
        assert 1 < float(args["x"]) < 2 and 1 <= int(args["n"]) <= 8 and args["name"] in "ab"
        assert not float(args["x"]).is_integer() and args["total_timesteps"] == 20
    train = re.search(r"To train with it:\n  python (.*)", done)[1]
    assert train.startswith("script.py --env-id A --seed 1 --x 1.")
    subprocess.run([sys.executable, *shlex.split(train)], check=True)
    done = subprocess.run(command, **options, check=True).stdout
    assert "2 of 3 trials done" in done and len(infos("runs/search")) == 3
    assert "optuna-dashboard runs/search/study.journal" in done
    Path("search.toml").write_text(CONFIG.replace("total-timesteps = 20", "crash = 1"))
    failed = subprocess.run([*command, "--study-name", "g", "--storage", "g.journal"], **options)
    assert failed.returncode == 1 and failed.stderr.endswith("tune: no trial of study g completed: 3 fail\n")
    assert Path("g.journal").stat().st_size


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("metric_last_n", "metric_lst_n", "unknown key metric_lst_n_average_window: did you mean metric_last_n"),
        ("num_trials = 3", "", "num_trials is missing"),
        ("num_trials = 3", "num_trials = '3'", "num_trials must be a whole number, not '3'"),
        ("num_trials = 3", "num_trials = ", "is not TOML"),
        ("[params]\nx", "[params]\nxx", "script.py has no flag --xx: did you mean x"),
        ("low = 1, high = 8", "lo = 1, high = 8", "n: unknown key lo: did you mean low"),
        ("low = 1, high = 8", "low = 1", "n needs either low and high"),
        ("low = 1, high = 8", "low = 1, high = 8.5", "n is a flag of whole numbers"),
        ("low = 1, high = 8", "low = 1, high = 'x'", "must be numbers"),
        ("low = 1, high = 8", "low = 8, high = 1", "params: n: "),
        ("{ low = 1, high = 2 }", "{ low = 1, high = 2, choices = [1] }", "x needs either low and high"),
        ('A = "raw"', "A = 5", "A needs [low, high], two numbers, not 5"),
        ("RandomSampler", "RandmSampler", "unknown name RandmSampler: did you mean RandomSampler"),
        ("seed = 3", "sed = 3", "unexpected keyword argument 'sed'"),
        ("script.py", "nowhere.py", "nowhere.py does not exist"),
    ],
)
def test_wrong_files(tune, monkeypatch, capfd, old, new, message):
    from cleanrl_utils import tune as command

    assert old in CONFIG
    Path("search.toml").write_text(CONFIG.replace(old, new))
    monkeypatch.setattr(sys, "argv", ["tune", "search.toml"])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    error = capfd.readouterr().err
    assert stopped.value.code == 2 and message in error and error.startswith("tune: ") and error.count("\n") == 1
    assert not Path("runs").exists()


def test_configurations_of_the_repository(monkeypatch):
    """Their flags exist, their samplers and pruners can be made."""
    require("optuna")
    from cleanrl_utils.tune import make_tuner, read_config

    monkeypatch.chdir(ROOT)
    files = list((ROOT / "benchmark/tune").glob("*.toml"))
    assert files
    for file in files:
        make_tuner(read_config(file, {}))


def test_ray(tune, tmp_path):
    """Trials inside Ray tasks, on a Ray of their own: the same scores, and a pruned one ends its processes.

    The first run of all kills its worker, as the loss of a node does: it is run again and spends no trial.
    """
    require("ray")
    lost = """
if args["seed"] == "1" and "trial-0000" in os.getcwd() and "again" not in os.getcwd():
    worker = Path(f"/proc/{os.getsid(0)}/stat").read_text().rsplit(")", 1)[1].split()[1]
    os.kill(int(worker), signal.SIGKILL)
    time.sleep(100)
"""
    Path("script.py").write_text(SCRIPT.replace("stubborn =", f"{lost}stubborn ="))
    Path("driver.py").write_text(
        """
import optuna
from cleanrl_utils.tuner import Tuner

params = lambda trial: {"x": 3 - trial.number, "sleep": 0 if trial.number < 2 else 40, "crash": int(trial.number == 1)}
pruner = optuna.pruners.MedianPruner(n_startup_trials=1)
options = {"metric_last_n_average_window": 1, "pruner": pruner, "study_name": "s", "workers": 2, "engine": "ray"}
tuner = Tuner(script="script.py", metric="score", target_scores={"A": [0, 10]}, params_fn=params, **options)
study = tuner.tune(num_trials=3, num_seeds=2)
print([trial.state.name for trial in study.trials], study.best_value)
"""
    )
    env = environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [*private_network(), sys.executable, "driver.py"], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "['COMPLETE', 'FAIL', 'PRUNED'] 4.5" in done.stdout, done.stdout
    assert "    something broke" in done.stdout
    assert "trial-0000/A__1, it begins again (1 of 3)" in done.stdout and done.stdout.count("begins again") == 1
    pids = [pid for info in infos("runs/s/trial-0002") for pid in info["pids"]]
    assert len(pids) >= 2
    wait_until(lambda: not any(map(alive, pids)))


def test_wandb(tune, monkeypatch):
    """Each trial is a run of W&B, here offline, with parameters, score and state; scripts have a W&B of their own."""
    require("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tune(
        lambda trial: {"x": trial.suggest_float("x", 1, 2), "crash": trial.number},
        2,
        wandb_kwargs={"project": "a-project"},
    )
    files = sorted(Path("wandb").glob("offline-run-*/*.wandb"))
    data = [file.read_bytes() for file in files]
    assert len(files) == 2 and all(b"a-project" in text for text in data)
    assert any(b"COMPLETE" in text and b"s_0" in text for text in data)
    assert any(b"FAIL" in text and b"s_1" in text for text in data)
    assert os.environ["WANDB_SERVICE"] and {info["env"]["WANDB_SERVICE"] for info in infos()} == {""}
