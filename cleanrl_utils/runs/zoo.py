"""The models that are kept in the repository, so that they can be played without a network: benchmark/models."""

from pathlib import Path

from cleanrl_utils.runs.card import repository_name

MODELS = Path(__file__).resolve().parents[2] / "benchmark/models"
SCORES = "scores.csv"
FILES = ("model.safetensors", "args.json")  # what is kept of a run


def kept(env_id, exp_name, seed=None, folder=MODELS):
    """The folders of the models of a file in an environment, of one seed or of any."""
    stem = repository_name(env_id, exp_name, 0).removesuffix("0")
    found = [path for path in sorted(folder.glob(f"{stem}*")) if path.name.removeprefix(stem).isdigit()]
    return [path for path in found if seed is None or path.name == f"{stem}{seed}"]
