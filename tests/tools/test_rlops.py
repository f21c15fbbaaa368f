"""The command of the release post, on a stand-in for W&B that has two tags of six environments."""

import subprocess
import sys

import numpy as np
import pytest

from cleanrl_utils.runs.results import load
from helpers.files import ROOT, require
from helpers.processes import environment
from helpers.synthetic_runs import write_run

WANDB = """
import random
ENVS = "HalfCheetah-v2 Walker2d-v2 Hopper-v2 InvertedPendulum-v2 Humanoid-v2 Pusher-v2".split()

class Run:
    state, commit = "finished", "c" * 40
    def __init__(self, tag, env_id, seed, exp_name="ddpg_continuous_action"):
        self.config = {"exp_name": exp_name, "env_id": env_id, "seed": seed, "total_timesteps": 1000}
        self.url = f"https://example.invalid/runs/{tag}-{env_id}-{seed}"
        self.level = 100 if tag == "rlops-pilot" or env_id != "Hopper-v2" else 50
    def rows(self, keys, n):
        assert keys == ["charts/episodic_return", "global_step", "_runtime"]
        noise = random.Random(str(self.config))
        level = self.level * noise.uniform(0.97, 1.03)
        return [dict(zip(keys, (level * min(1, i / n * 4), 1000 * i // n, i * 0.1))) for i in range(1, n + 1)]
    def scan_history(self, keys):
        return iter(self.rows(keys, 2000))
    def history(self, keys, pandas=True):
        assert not pandas
        return self.rows(keys, 500)

class Api:
    def runs(self, path, filters):
        assert path == "openrlbenchmark/cleanrl", path
        (tag,) = filters["tags"]["$in"]
        if tag == "unreachable":
            raise ConnectionError("cannot resolve\\nthe host")
        runs = [Run(tag, env, seed) for env in ENVS for seed in range(1, 5)] if tag != "none" else []
        trial = Run(tag, "Walker2d-v2", 2)  # of another length, which blocks nothing
        trial.config["total_timesteps"] = 100
        return [*runs, *[trial] * bool(runs), Run(tag, "HalfCheetah-v2", 9, "another")]
"""
COMMAND = """-m cleanrl_utils.rlops --exp-name ddpg_continuous_action --wandb-project-name cleanrl
--wandb-entity openrlbenchmark --tags pr-299 rlops-pilot
--env-ids HalfCheetah-v2 Walker2d-v2 Hopper-v2 InvertedPendulum-v2 Humanoid-v2 Pusher-v2 --output-filename compare.png
--scan-history --metric-last-n-average-window 100"""


@pytest.fixture
def rlops(tmp_path):
    require("matplotlib")
    (tmp_path / "stand_in").mkdir()
    (tmp_path / "stand_in/wandb.py").write_text(WANDB)

    def call(command, wandb=True):
        path = [str(tmp_path / "stand_in")] * wandb + [str(ROOT)]
        env = environment() | {"PYTHONPATH": ":".join(path), "MPLCONFIGDIR": str(tmp_path)}
        return subprocess.run([sys.executable, *command.split()], cwd=tmp_path, env=env, capture_output=True, text=True)

    return call


def test_the_command_of_the_release_post(rlops, tmp_path):
    done = rlops(COMMAND + " --report")
    assert done.returncode == 1, done.stderr
    assert (
        "## Comparison: worse" in done.stdout and "- base: ddpg_continuous_action at cccccccccc, 1,000" in done.stdout
    )
    lines = [line for line in done.stdout.split("\n") if line.startswith("| ") and "4 / 4" in line]
    assert "- new: left out 1 run of another length (100 steps)" in done.stdout
    assert len(lines) == 6 and ["**worse**" in line for line in lines] == ["Hopper" in line for line in lines]
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "compare/results/curves").glob("*.csv"))) == 2 * 6 * 4
    assert "pr-299" in (tmp_path / "compare/page/index.html").read_text()


def test_wrong_usage(rlops):
    for old, new, message in (
        ("pr-299", "unreachable", "cannot read openrlbenchmark/cleanrl from W&B: cannot resolve the host"),
        ("pr-299", "none", "no environment has finished runs on both sides (25 of rlops-pilot, 0 of none)"),
        ("--tags pr-299", "--steps 0 --tags pr-299", "--steps must be at least 1"),
    ):
        done = rlops(COMMAND.replace(old, new).replace("--scan-history", ""))
        assert done.returncode == 2 and done.stderr == f"rlops: {message}\n" and not done.stdout
    done = rlops(COMMAND.replace("rlops-pilot", "pr-299"))
    told = "both sides have ddpg_continuous_action in HalfCheetah-v2 (seeds 1, 2, 3, 4), "
    assert done.returncode == 2 and done.stderr.startswith(f"rlops: {told}") and not done.stdout
    assert done.stderr.endswith("folder, pattern, commit, tag or name (25 of pr-299, 25 of pr-299)\n")


def test_without_wandb(rlops, tmp_path):
    """One line where it is missing; and the runs of a folder need none of it, by commits."""
    (tmp_path / "stand_in/wandb.py").write_text("raise ImportError")
    done = rlops(COMMAND)
    assert done.returncode == 2 and done.stderr.startswith(
        "rlops: the runs are on W&B, and wandb is not installed: pip"
    )
    for seed in range(1, 6):
        for commit, level in (("a" * 40, 10), ("b" * 40, 10.1)):
            folder = write_run(tmp_path / "runs", "A-v1", seed, np.full(100, level + seed / 100), "td3", commit=commit)
            (folder / "command.txt").write_text(f"python x.py --exp-name td3 --seed {seed}\n")
    flags = "--exp-name td3 --tags bbbbbbb aaaaaaa --env-ids A-v1 --runs runs --report --output-filename"
    done = rlops(f"-m cleanrl_utils.rlops {flags} x.svg")
    assert done.returncode == 0 and "Comparison: same" in done.stdout, done.stderr
    assert "<svg" in (tmp_path / "x.svg").read_text()[:1000]
    names = [run.exp_name for run in load(tmp_path / "x/results")]
    assert sorted(names) == ["td3-aaaaaaa"] * 5 + ["td3-bbbbbbb"] * 5, "two curves"
    for name in ("x.jpeg.doc", "none/x.png"):
        done = rlops(f"-m cleanrl_utils.rlops {flags} {name}")
        assert done.returncode == 2 and done.stderr.startswith(f"rlops: --output-filename {name} is no .png")
