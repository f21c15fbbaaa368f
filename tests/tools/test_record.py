"""python -m benchmark.record takes runs that have come to their end, and says where the others stopped."""

import csv
import json

import pytest

from benchmark.record import Options, main
from cleanrl_utils.runs.results import has_ended
from helpers.files import script, smoke
from helpers.processes import run, run_dir
from helpers.synthetic_runs import write_run


@pytest.mark.parametrize("name, total, last, next_stop", [("ppo", 300, 256, 320), ("dqn", 250, 250, 251)])
def test_takes_what_has_ended(name, total, last, next_stop, tmp_path):
    """PPO stops at the last whole rollout, of 64 steps here."""
    run(script(name), *smoke(name, total_timesteps=total), cwd=tmp_path)
    folder, scores = run_dir(tmp_path), tmp_path / "scores.csv"
    main(Options([folder], scores))
    (row,) = csv.DictReader(scores.open())
    assert row["steps"] == str(total) and float(row["score_mean"]) > 0
    args = json.loads((folder / "args.json").read_text())
    (folder / "args.json").write_text(json.dumps(args | {"total_timesteps": next_stop}))
    with pytest.raises(SystemExit, match=f"stopped at step {last} of {next_stop}: resume it"):
        main(Options([folder], scores))
    main(Options([folder], scores, partial=True))
    assert {int(row["steps"]) for row in csv.DictReader(scores.open())} == {total, last}


def test_where_runs_end():
    """PPG stops at the last whole phase, whichever rollout it was interrupted in; what has no rollouts at the total."""
    flags = {"num_steps": 50, "num_envs": 2, "n_iteration": 4, "total_timesteps": 1000}
    assert [has_ended(flags, range(100, last + 1, 100)) for last in (100, 400, 700, 800)] == [False] * 3 + [True]
    assert [has_ended({"total_timesteps": 250}, [100, 200, last]) for last in (200, 249, 250, 252)] == [False] * 2 + [
        True
    ] * 2


def test_what_is_written(tmp_path, capsys):
    """Small scores keep their digits, one seed has no spread, and an episode at the last step is in the curve."""
    scores, curves = tmp_path / "scores.csv", tmp_path / "curves"
    write_run(tmp_path / "runs", "A-v1", 1, [0.0012345, 0.0012345])
    main(Options([tmp_path / "runs"], scores, curves))
    (row,) = csv.DictReader(scores.open())
    assert (row["score_mean"], row["score_std"], row["scores"]) == ("0.001234", "", "0.001234")
    assert capsys.readouterr().out == "cleanrl/ppo.py A-v1 1000 steps, seeds 1: 0.001234\n"
    (curve,) = curves.iterdir()
    assert [row["step"] for row in csv.DictReader(curve.open())] == ["500", "1000"]
    write_run(tmp_path / "runs", "B-v1", 1, [1.0], ended=False)
    with pytest.raises(SystemExit, match="stopped at step"):
        main(Options([tmp_path / "runs"], tmp_path / "other.csv", tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_commands_can_be_repeated(tmp_path):
    """Without the seed, of which a row has several, and with the path to environments that the tests bring."""
    for env_id in ("A-v1", "no_such_module:A-v1", "proof_of_memory:ProofofMemory-v0"):
        write_run(tmp_path / "runs", env_id, 1, [1.0] * 3)
    main(Options([tmp_path / "runs"], tmp_path / "scores.csv"))
    commands = {row["env_id"]: row["command"] for row in csv.DictReader((tmp_path / "scores.csv").open())}
    assert commands["A-v1"].startswith("python cleanrl/ppo.py") and "--seed" not in commands["A-v1"]
    assert commands["no_such_module:A-v1"].startswith("python ")
    assert commands["proof_of_memory:ProofofMemory-v0"].startswith("PYTHONPATH=tests/helpers python cleanrl/ppo.py")


def test_one_run_of_a_seed(tmp_path):
    """Two versions in one folder are told apart by their commits, and not mixed."""
    for commit, level in (("a" * 40, 1.0), ("b" * 40, 2.0)):
        for seed in (1, 2):
            write_run(tmp_path / "runs", "A-v1", seed, [level] * 10, commit=commit)
    scores = tmp_path / "scores.csv"
    with pytest.raises(SystemExit, match="are runs of one seed"):
        main(Options([tmp_path / "runs"], scores))
    main(Options([tmp_path / "runs"], scores, commit="bbbbbbb"))
    (row,) = csv.DictReader(scores.open())
    assert (row["scores"], row["seeds"], row["commit"]) == ("2.00 2.00", "1 2", "b" * 10)
    with pytest.raises(SystemExit, match="neither a commit's hash"):
        main(Options([tmp_path / "runs"], scores, commit="no such name"))


def test_seeds_that_were_stopped_together_are_one_row(tmp_path):
    """Those that ended or stopped elsewhere, and a second run of a seed, have rows of their own."""
    for seed, total, ended in ((1, 2000, False), (2, 2020, False), (2, 2010, False), (3, 3000, False), (4, 990, True)):
        write_run(tmp_path / "runs", "A-v1", seed, [float(seed)], total=total, ended=ended)
    main(Options([tmp_path / "runs"], tmp_path / "scores.csv", partial=True))
    rows = {row["steps"]: row["seeds"] for row in csv.DictReader((tmp_path / "scores.csv").open())}
    assert rows == {"1000": "1 2", "1010": "2", "1500": "3", "990": "4"}  # they stop in the middle
