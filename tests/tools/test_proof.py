"""What is proven: the runs of a suite beside those that were made (cleanrl_utils/pages/proof.py)."""

import re
import subprocess
import sys

import pytest

from cleanrl_utils.pages import facts, proof
from cleanrl_utils.runs import results
from helpers.files import FILES, ROOT
from helpers.processes import environment
from helpers.synthetic_runs import write_run

SUITE = """
[[run]]
commands = ["python cleanrl/dqn.py --gamma 0.9 --total-timesteps 2000 --no-cuda --save-model"]
env_ids = ["CartPole-v1"]
start_seed = 2
num_seeds = 1

[[run]]  # the same once more: its other seed
commands = ["python cleanrl/dqn.py --gamma 0.9 --total-timesteps 2000 --no-cuda --save-model"]
env_ids = ["CartPole-v1"]
num_seeds = 1

[[run]]
commands = ["python cleanrl/ppo_jax.py --num-seeds 2"]
env_ids = ["CartPole-v1"]
num_seeds = 1
reference = "ppo.py"
"""
FLAGS = {"total": 2000, "exp_name": "dqn", "gamma": 0.90, "learning_rate": 2.5e-4}


@pytest.fixture
def suite(tmp_path):
    (tmp_path / "suite.toml").write_text(SUITE)
    return tmp_path / "suite.toml"


def rows_of(suite, runs, name):
    return [row[1:] for row in proof.table(ROOT, suite, runs)[0] if row[0] == name]


def row_of(suite, name="dqn"):
    """The row of a file with the run folders beside a suite."""
    runs = results.load([suite.parent / "runs"])
    (row,) = rows_of(suite, runs, name)
    return row


def test_states(suite):
    assert rows_of(suite, [], "dqn") == [["CartPole-v1", "2k", "0 of 2", "", "488.7 ± 16.1 after 500k", "nothing"]]
    assert rows_of(suite, [], "ppo") == [["", "", "", "", "", "nothing"]]  # the suite has nothing for it
    runs = suite.parent / "runs"
    write_run(runs, "CartPole-v1", 1, [3.0], ended=False, **FLAGS)  # stopped after half of the steps
    assert row_of(suite)[1:4] + row_of(suite)[-1:] == ["1k of 2k", "0 of 2", "3.00", "partly"]
    for change in ({"gamma": 0.99}, {"learning_rate": 1e-3}, {"total": 3000}, {"num_envs": 2}):  # other experiments
        write_run(runs, "CartPole-v1", 1, [4.0], **FLAGS | change)
    write_run(runs, "CartPole-v1", 3, [4.0], **FLAGS)  # another seed
    assert row_of(suite)[2:4] == ["0 of 2", "4.00"] and row_of(suite)[-1] == "partly"
    write_run(runs, "CartPole-v1", 1, [20.0], **FLAGS, cuda=False, checkpoint_freq=7)  # what is learned is the same
    assert row_of(suite)[1:4] + row_of(suite)[-1:] == ["2k", "1 of 2", "20.0", "partly"]
    write_run(runs, "CartPole-v1", 1, [20.0], **FLAGS)  # the same seed again
    assert row_of(suite)[2] == "1 of 2"
    write_run(runs, "CartPole-v1", 2, [40.0], **FLAGS)
    assert row_of(suite)[1:4] + row_of(suite)[-1:] == ["2k", "2 of 2", "30.0", "proven"]
    assert proof.table(ROOT, suite, results.load([runs]))[1].startswith(f"1 of {len(FILES)} proven, 0 partly, ")


def test_seeds_side_by_side_and_a_reference(suite):
    runs = [run for run in results.load([ROOT / "benchmark/results"]) if run.script == "ppo_jax.py" and run.seed == 1]
    (row,) = rows_of(suite, runs, "ppo_jax")
    assert row[2] == "1 of 2" and row[4] == "490.0 ± 6.1 (`ppo.py`)"


def test_a_value_has_many_forms():
    args = {"no_cuda": "True", "learning_rate": "2.5e-4", "no_anneal_lr": "True", "total_timesteps": "500_000"}
    same = {"learning_rate": 0.00025, "anneal_lr": False, "target_kl": None, "cuda": True}
    assert proof.flags_of("ppo", args) == proof.flags_of("ppo", same) != proof.flags_of("ppo", {"anneal_lr": True})


def test_the_queue_has_every_file():
    """Each with its steps and seeds, and a published score where one was published for its game."""
    goals = proof.goals(ROOT / proof.SUITE)
    assert set(goals) == set(FILES) and all(goals.values())
    for goal in (goal for own in goals.values() for goal in own):
        assert goal.steps > 0 and goal.seeds
        published = results.references(f"{goal.name}.py", goal.env_id)
        assert bool(proof.published(ROOT, goal)) or not published
        if goal.reference:
            assert proof.published(ROOT, goal), f"{goal.reference} has no published score in {goal.env_id}"


def test_the_command(suite):
    """It reads the run folders, too, and prints what the page has."""
    write_run(suite.parent / "runs", "CartPole-v1", 1, [20.0], **FLAGS)
    command = [sys.executable, "-m", "cleanrl_utils.benchmark", "--status", "--suite"]
    options = {"cwd": suite.parent, "env": environment(PYTHONPATH=str(ROOT)), "capture_output": True, "text": True}
    out = subprocess.run([*command, suite], **options, check=True).stdout
    assert re.search(r"(?m)^partly +dqn\.py +CartPole-v1 +2k +1 of 2 +20\.0 +488\.7 ± 16\.1 after 500k$", out)
    out = subprocess.run([*command, ROOT / proof.SUITE], **options, check=True).stdout
    page = (ROOT / "docs/benchmark.md").read_text()
    count = re.search(r"(\d+) of (\d+) proven, \d+ partly, \d+ not begun\.", page)
    assert count[0] == out.splitlines()[-1] and int(count[2]) == len(FILES)
    assert len(re.findall(r"(?m)^proven +ppo\.py ", out)) == 3


def test_the_table_of_the_readme():
    """A row for each file, with its first goal of which there is any run; the page and README have the same scores."""
    table = proof.front(ROOT, "cleanrl/{}.py".format, "docs/{}".format)
    assert table in (ROOT / "README.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert sorted(re.search(r"`(\w+)\.py`", row[0])[1] for row in rows) == sorted(FILES)
    asked, _ = proof.table(ROOT, ROOT / proof.SUITE, results.load([ROOT / "benchmark/results"]))
    for cell, domain, recorded, score, published, page in rows:
        own = [row for row in asked if f"`{row[0]}.py`" in cell]
        first = next((row for row in own if row[4]), own[0])
        assert (score, published) == tuple(first[4:6]) and domain and page.startswith("[")
        assert ("stopped early" in recorded) == (" of " in first[2]) and bool(recorded) == bool(score)


def test_the_page_counts_files():
    rows, count = proof.table(ROOT, ROOT / proof.SUITE, results.load([ROOT / "benchmark/results"]))
    proven = {name for name, *_, state in rows if state == "proven"}
    assert count.startswith(f"{len(proven)} of {len(FILES)} proven")
    for name, *_, seeds, _, _, state in rows:
        assert state != "proven" or len(set(seeds.split(" of "))) == 1, name
    order = [name for names in facts.by_page(ROOT).values() for name in names]
    assert list(dict.fromkeys(row[0] for row in rows)) == order
