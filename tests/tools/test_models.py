"""python -m benchmark.models keeps the best model of a file in an environment; enjoy plays what is kept, offline."""

import csv
import json

import numpy as np
import pytest

from benchmark import models
from benchmark.models import Options, main
from cleanrl_utils import enjoy
from cleanrl_utils.runs import zoo
from helpers.files import require_for, script, smoke
from helpers.processes import run, run_dir

SCORES = zoo.MODELS / zoo.SCORES


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two seeds of a short run, one run that was stopped, and one without a model."""
    folder = tmp_path_factory.mktemp("models")
    for seed, more in (1, ["--save-model"]), (2, ["--save-model"]), (3, []):
        (folder / f"{seed}").mkdir()
        run(script("ppo"), *smoke("ppo", seed=seed), "--no-cuda", *more, cwd=folder / f"{seed}")
    return {seed: run_dir(folder / f"{seed}") for seed in (1, 2, 3)}


@pytest.mark.parametrize("better", [1, 2])
def test_the_best_is_kept(trained, better, tmp_path, monkeypatch, capsys):
    """Chosen on seeds of their own, judged on others; what was kept before gives way."""
    played = []

    def evaluate_run(folder, episodes, seed=None, cpu=False):
        trained_with = json.loads((folder / "args.json").read_text())["seed"]
        played.append((trained_with, episodes, seed))
        return np.full(episodes, 10.0 * (trained_with == better) + (seed is None))

    monkeypatch.setattr(models, "evaluate_run", evaluate_run)
    other = 3 - better
    main(Options([trained[other]], tmp_path))
    assert zoo.kept("CartPole-v1", "ppo", folder=tmp_path) == [tmp_path / f"CartPole-v1-ppo-seed{other}"]
    played.clear()
    main(Options([*trained.values()], tmp_path, choosing=3, episodes=5))
    assert played == [(1, 3, 1 + 2**29), (2, 3, 2 + 2**29), (better, 5, None)]
    assert "its model is missing: train with --save-model" in capsys.readouterr().err
    (kept,) = zoo.kept("CartPole-v1", "ppo", folder=tmp_path)
    assert kept.name == f"CartPole-v1-ppo-seed{better}"
    assert sorted(path.name for path in kept.iterdir()) == ["args.json", "model.safetensors"]
    for name in zoo.FILES:
        assert (kept / name).read_bytes() == (trained[better] / name).read_bytes()
    (row,) = csv.DictReader((tmp_path / "scores.csv").open())
    assert [row[key] for key in ("model", "of_seeds", "chosen_with", "score_mean")] == [
        kept.name,
        "1 2",
        "10.00",
        "11.00",
    ]
    assert "cleanrl/ppo.py" in row["command"] and row["command"].endswith(f"--seed {better} --no-cuda --save-model")


def test_what_is_refused(trained, tmp_path):
    with pytest.raises(SystemExit, match="No run with a model here"):
        main(Options([trained[1]], tmp_path, max_size=100))
    with pytest.raises(SystemExit, match="are runs of one seed"):
        copy = tmp_path / "copy"
        copy.mkdir()
        for file in trained[1].iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        main(Options([trained[1], copy], tmp_path / "models"))
    assert not (tmp_path / "models").exists()


ROWS = list(csv.DictReader(SCORES.open())) if SCORES.exists() else []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["model"])
def test_a_kept_model_plays(row, tmp_path, monkeypatch, capsys):
    """As the page says, without a network: three episodes within the range that a hundred had."""
    require_for(row["file"].removeprefix("cleanrl/").removesuffix(".py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody is there
    name = row["file"].removeprefix("cleanrl/").removesuffix(".py")
    enjoy.main(["--exp-name", name, "--env-id", row["env_id"], "--episodes", "3", "--cpu"])
    told = capsys.readouterr().out
    assert told.startswith(f"Playing benchmark/models/{row['model']};")
    mean = float(told.split("Mean return of 3 episodes: ")[1].split()[0])
    assert abs(mean - float(row["score_mean"])) <= 4 * float(row["score_std"]) + 1
    assert (zoo.MODELS / row["model"] / "model.safetensors").stat().st_size <= 1_000_000


def test_each_model_has_a_score():
    folders = {path.name for path in zoo.MODELS.iterdir() if path.is_dir()}
    assert folders == {row["model"] for row in ROWS} and len(ROWS) == len(
        {(row["file"], row["env_id"]) for row in ROWS}
    )
