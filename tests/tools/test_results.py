"""cleanrl_utils.runs.results finds runs and recorded results and reads of them what was written."""

import csv
import json
import os

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event

from benchmark.record import Options, main
from cleanrl_utils.runs.results import find_videos, flags, load, reference
from helpers.files import ROOT
from helpers.synthetic_runs import scalar, write_events, write_run


def test_a_run(tmp_path):
    folder = write_run(tmp_path, "A-v1", 3, range(150))
    (folder / "videos").mkdir()
    for name in ("step-20.mp4", "step-9.mp4", "notes.txt"):
        (folder / "videos" / name).touch()
    (run,) = load([folder], tags=["charts/SPS", "losses/none"])
    assert (run.env_id, run.exp_name, run.script, run.seed, run.total_timesteps) == ("A-v1", "ppo", "ppo.py", 3, 1000)
    assert run.ended and run.source == "run" and run.folder == folder and run.last_step == 1000
    assert run.returns.tolist() == list(range(150)) and run.score == np.mean(range(50, 150))
    np.testing.assert_allclose(run.seconds, run.steps / 10)
    assert run.commit == "a" * 40 and run.packages == {"gymnasium": "1.4.0", "torch": "2.13"}
    assert run.command == "python cleanrl/ppo.py --env-id A-v1 --seed 3 --total-timesteps 1000"
    assert run.args["learning_rate"] == 0.1
    assert list(run.metrics) == ["charts/SPS"] and [list(a) for a in run.metrics["charts/SPS"]] == [[1000], [10], [100]]
    assert run.videos == [(9, folder / "videos/step-9.mp4"), (20, folder / "videos/step-20.mp4")]


def test_means_of_episodes_and_players(tmp_path):
    """Entries that are means count as many episodes; of two players it is the first one's return."""
    folder = write_run(tmp_path, "A-v1", 1, [])
    at = [(1, 10.0, 2), (2, float("nan"), 0), (3, 40.0, 3)]
    events = [scalar(step, "charts/episodic_return", mean, step) for step, mean, _ in at]
    events += [scalar(step, "charts/episodes", n, step) for step, _, n in at]
    write_events(folder / "events.out.tfevents.1", [*events, scalar(4, "charts/episodic_return", 99, 4)])
    (run,) = load(folder)
    assert run.returns.tolist() == [10, 10, 40, 40, 40] and run.steps.tolist() == [1, 1, 3, 3, 3] and run.score == 28
    write_events(
        folder / "events.out.tfevents.1",
        [scalar(i + 1, f"charts/episodic_return-player{i % 2}", i, i) for i in range(6)],
    )
    (run,) = load(folder)
    assert run.returns.tolist() == [0, 2, 4] and not run.ended
    write_events(folder / "events.out.tfevents.1", [scalar(1, "charts/episodic_return", 7, step) for step in (1, 960)])
    assert load(folder)[0].ended, "which logs no speed"
    write_events(folder / "events.out.tfevents.1", [Event(wall_time=1, file_version="brain.Event:2")])
    (run,) = load(folder)
    assert not len(run.returns) and np.isnan(run.score)


def test_many_seeds_at_once(tmp_path):
    folder = write_run(tmp_path, "A-v1", 5, [1.0, 2.0], total=20)
    tag = "charts/episodic_return"
    curves = {tag: np.array([[1, 2], [3, 4.0]]), "charts/episodes": np.array([[1, 2], [3, 0]])}
    np.savez(folder / "curves.npz", steps=[10, 20], seeds=[5, 6], **curves)
    runs = load(folder, tags=(tag, "charts/SPS"))
    assert [run.seed for run in runs] == [5, 6]
    assert [run.returns.tolist() for run in runs] == [[1, 3, 3, 3], [2, 2]]
    assert [run.seconds.tolist() for run in runs] == [[50, 100, 100, 100], [50, 50]]
    assert [run.metrics[tag][1].tolist() for run in runs] == [[1, 3], [2, 4]] and "charts/SPS" in runs[1].metrics


def test_recorded_and_loaded(tmp_path):
    """What benchmark.record writes is what was there: scores, curves with seconds; older curves have none."""
    for seed in (1, 2):
        write_run(tmp_path / "runs", "ALE/A-v5", seed, np.arange(300) * seed)
    write_run(tmp_path / "runs", "ALE/A-v5", 1, np.arange(300), total=500)  # whose curve is overwritten by the longer
    output = tmp_path / "results/ppo.csv"
    main(Options([tmp_path / "runs"], output, curves=tmp_path / "results/curves"))
    runs = load(tmp_path / "results")
    assert [(run.seed, run.total_timesteps) for run in runs] == [(1, 500), (1, 1000), (2, 1000)]
    assert [run.score for run in runs] == [249.5, 249.5, 499] and all(run.source == "record" for run in runs)
    assert sorted(len(run.steps) for run in runs[:2]) == [0, 100]
    run = runs[2]
    assert run.steps.tolist() == list(range(10, 1001, 10)) and run.returns[1] == pytest.approx(2 * 3.5, abs=1)
    assert run.seconds[-1] == pytest.approx(100, abs=1) and run.args["env_id"] == "ALE/A-v5"
    assert load(output)[2].score == 499 and run.packages["torch"] == "2.13"
    curve = tmp_path / "results/curves/ALE-A-v5__ppo__2.csv"
    rows = list(csv.reader(curve.open()))
    assert rows[0] == ["step", "episodic_return", "seconds"]
    with curve.open("w", newline="") as file:
        csv.writer(file).writerows(row[:2] for row in rows)
    old = load(output)[2]
    assert old.seconds is None and old.returns.tolist() == run.returns.tolist()


def test_a_record_of_a_run_that_was_stopped():
    """It has the steps of its command or of the script's default, and is not taken for one that came to its end."""
    (run,) = load(ROOT / "benchmark/results/ppo_atari.csv")
    assert (run.last_step, run.total_timesteps, run.ended) == (2_457_600, 10_000_000, False) and len(run.steps) == 100
    assert all(run.ended and run.last_step == 500_000 for run in load(ROOT / "benchmark/results/dqn.csv"))


def test_what_cannot_be_read(tmp_path, capsys):
    good, bad = write_run(tmp_path, "A-v1", 1, [1.0]), write_run(tmp_path, "A-v1", 2, [1.0])
    (bad / "args.json").write_text("{")
    assert [run.folder for run in load(tmp_path)] == [good]
    assert "left out" in (err := capsys.readouterr().err) and bad.name in err
    with pytest.raises(ValueError, match="args.json does not hold the flags"):
        load([tmp_path, bad])
    with pytest.raises(ValueError, match="nowhere: not found"):
        load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no run folder or recorded results"):
        load(tmp_path / "empty")
    assert len(load([tmp_path, good, str(good)])) == 1


def test_links(tmp_path, capsys):
    """Runs that lie elsewhere count, once; links that lead nowhere or in circles do no harm."""
    folder = write_run(tmp_path / "elsewhere", "A-v1", 1, [1.0])
    (links := tmp_path / "runs").mkdir()
    for name, target in (("a", folder), ("again", folder), ("circle", links), ("nowhere.csv", tmp_path / "none")):
        (links / name).symlink_to(target)
    assert len(load(links)) == 1 and not capsys.readouterr().err


def test_small_things(tmp_path):
    told = flags("python cleanrl/ppo.py --env-id A --no-cuda --lr=0.1 --num-envs 4")
    assert told == {"env_id": "A", "no_cuda": "True", "lr": "0.1", "num_envs": "4"}
    assert reference("cleanrl/ppo.py", "CartPole-v1", 500_000) == reference("ppo.py", "CartPole-v1", 500_000)
    assert reference("ppo.py", "CartPole-v1", 500_000)[0] > 400 and reference("ppo.py", "CartPole-v1", 7) is None
    rpo = "rpo_continuous_action.py", "HalfCheetah-v4", 8_000_000
    assert reference(*rpo) == reference(*rpo, {"rpo_alpha": 0.50}) == (2163.57, 790.16)  # 0.5 is the default
    assert reference(*rpo, {"rpo_alpha": "1e-2"}) == (2716.51, 1314.93) and reference(*rpo, {"rpo_alpha": 7}) is None
    assert reference("ppo_continuous_action_isaacgym.py", "Ant", 30_000_000) is None  # of another simulator
    assert reference("ppo_pettingzoo_ma_atari.py", "pong_v3", 20_000_000) is None  # lengths, not returns
    assert reference("ppo_procgen.py", "starpilot", 25_000_000) == (32.47, 11.21)
    assert reference("ppo_procgen.py", "starpilot", 25_000_000, {"distribution_mode": "hard"}) is None
    assert reference("ppo_atari_envpool_xla_jax.py", "Alien-v5", 10_000_000) == (1736.39, 68.65)
    (tmp_path / "videos").mkdir()
    for name in ("1000-episode-0", "1000-episode-3", "2000-episode-1", "rl-video-step-8"):
        (tmp_path / f"videos/{name}.mp4").touch()
    steps, walls = np.arange(10, 110, 10), np.array([1001.0] * 8 + [2001] * 2)
    found = [step for step, _ in find_videos(tmp_path, {"num_envs": 2}, steps, walls)]
    assert found == [0, 16, 70, 100]


def test_a_thousand_runs_in_seconds(tmp_path):
    """A quarter of them, of 0.8 MB each as real ones have, in a loose limit on the time of all processes."""
    folder = write_run(tmp_path, "A-v1", 1, np.zeros(3000))
    data = (folder / "events.out.tfevents.1").read_bytes()
    write_events(folder / "other", [scalar(5000, "losses/value_loss", 1.0, i) for i in range(12_000)])
    data += (folder / "other").read_bytes()
    assert len(data) > 800_000
    (folder / "whole").write_bytes(data)
    args = json.loads((folder / "args.json").read_text())
    for i in range(250):
        (copy := tmp_path / f"{i}").mkdir()
        (copy / "args.json").write_text(json.dumps(args | {"seed": i}))
        (copy / "events.out.tfevents.1").hardlink_to(folder / "whole")
    start = sum(os.times()[:4])
    runs = load(tmp_path)
    assert len(runs) == 251 and all(len(run.returns) == 3000 for run in runs)
    assert sum(os.times()[:4]) - start < 4, "seconds of processors, of which there are two or more"
