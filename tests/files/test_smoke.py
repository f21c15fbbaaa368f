"""Every file, alone in an empty folder, runs with its smoke arguments, learns, logs and leaves a complete folder.

The same seed gives the same metrics, bit by bit; another seed gives others.
"""

import json
import math
import shutil

import numpy as np
import pytest

from helpers.files import (
    COMMON_METRICS,
    HELPERS,
    LINEAGE,
    METRICS,
    each,
    family,
    require_for,
    script,
    smoke,
    smoke_total,
    uses,
)
from helpers.processes import environment, inspect_run, inspect_runs, run_dir
from helpers.scalars import raw_scalars, tensorboard_scalars, untimed

LOSSES = {  # the name of a loss in the main block, and in the log; others: td_loss
    **dict.fromkeys(("ppo", "ppg"), ("v_loss", "losses/value_loss")),
    "c51": ("loss", "losses/loss"),
    "qdagger": ("distill_loss", "losses/distill_loss"),
    **dict.fromkeys(("ddpg", "td3", "sac"), ("actor_loss", "losses/actor_loss")),
}
RECORD = """
import sys

from torch.optim.optimizer import register_optimizer_step_post_hook

result["recorded"] = []


def record(optimizer, *_):
    frame = sys._getframe()
    while "open_run" not in frame.f_globals:
        frame = frame.f_back
    names = frame.f_globals
    if optimizer is names.get("actor_optimizer", optimizer) and frame.f_code.co_name != "aux_step":
        # where learning comes before the environments step, it belongs to the step that they are about to make
        step = names["global_step"] + (names["args"].num_envs if {"actor_optimizer", "staged"} <= names.keys() else 0)
        result["recorded"].append((step, names["LOSS"].item()))


register_optimizer_step_post_hook(record)
"""
STATE = """
result |= {"args": vars(args), "global_step": global_step, "globals": sorted(globals())}
observation, _ = eval_envs.reset(seed=3)
result["actions"] = load_policy(run_dir, eval_envs, globals().get("device"))(observation)
for mode in "deterministic", "stochastic":
    policy = load_policy(run_dir, eval_envs, globals().get("device"), deterministic=mode == "deterministic")
    first = policy(observation).copy()
    result[mode] = any((policy(observation) != first).any() for _ in range(50))
columns = act_action.shape[1:] if isinstance(eval_envs.single_action_space, gym.spaces.Tuple) else None
result["action_shape"] = (10, *(columns or eval_envs.single_action_space.shape))
result["compiled"] = getattr(globals().get("learn"), "_cache_size", int)()
"""


@each()
def test_smoke(name, tmp_path):
    require_for(name)
    argv = [*smoke(name), "--upload-model", "--hf-entity", "someone"]
    torch = uses(name, "torch")
    loss, loss_tag = LOSSES.get(family(name), ("td_loss", "losses/td_loss"))
    before = RECORD.replace("LOSS", loss) if torch else ""
    copy, alone = shutil.copy(script(name), tmp_path), environment(PYTHONPATH=str(tmp_path / "path"))
    (tmp_path / "path").mkdir()
    (tmp_path / "path/sitecustomize.py").write_text("import sys; sys.modules['cleanrl_utils'] = None")  # not installed
    if "--env-id tensor_sims:" in LINEAGE[name]["smoke"]:  # a simulator of the user's own lies beside the file
        shutil.copy(HELPERS / "tensor_sims.py", tmp_path)
    result = inspect_run(copy, *argv, cwd=tmp_path, before=before, after=STATE, env=alone)
    folder = run_dir(tmp_path)
    assert not torch or len(result["recorded"]) >= 2
    if "static_argnums" in script(name).read_text():  # once without and once with gradient steps
        assert result["compiled"] == 2, "what `learn` takes and what it returns are not of the same types"
    assert result["global_step"] == smoke_total(name)
    assert result["actions"].shape == result["action_shape"]
    assert not result["deterministic"], "one observation, two actions"
    assert result["stochastic"], "always the same action"
    assert {"args", "envs", "writer"} <= set(result["globals"])
    assert not torch or any(key.endswith("optimizer") for key in result["globals"])

    last = result["stdout"].strip().splitlines()[-1]
    assert str(folder.relative_to(tmp_path)) in last and "tensorboard --logdir" in last

    push = f"python -m cleanrl_utils.hub push {folder.relative_to(tmp_path)} --entity someone\n"
    assert push in result["stdout"] and "Traceback" not in result["stderr"], "what is left to do without the tools"

    scalars = raw_scalars(folder)
    tags = {tag for tag, _, _ in scalars}
    expected = COMMON_METRICS | METRICS[family(name)] | {"eval/episodic_return"}
    players = [0, 1] if uses(name, "pettingzoo") else []
    if players:
        expected = {f"{tag}-player{i}" if "/episodic" in tag else tag for tag in expected for i in players}
    assert tags >= expected
    for tag in METRICS[family(name)]:
        values = [value for other, _, value in scalars if other == tag]
        assert len(values) >= 2 and all(map(math.isfinite, values)), f"{tag}: {values}"
    logged = {step: value for tag, step, value in scalars if tag == loss_tag}
    for last, (step, mean) in zip([0, *logged], logged.items() if torch else ()):
        values = [value for at, value in result["recorded"] if last < at <= step]
        assert len(values) > 1 and mean == pytest.approx(np.mean(values), rel=1e-4), "not the mean over the updates"
    if result["args"].get("anneal_lr"):
        rates = [value for tag, _, value in scalars if tag == "charts/learning_rate"]
        falling = [result["args"]["learning_rate"] * (1 - i / len(rates)) for i in range(len(rates))]
        assert rates == pytest.approx(falling, rel=1e-4), "not annealed from rollout to rollout"
    evaluated = [step for tag, step, _ in scalars if tag.startswith("eval/episodic_return")]
    assert evaluated == [i // max(1, len(players)) for i in range(10)]
    shown = tensorboard_scalars(folder)
    assert {(tag, *pair) for tag, pairs in shown.items() for pair in pairs} == set(scalars)

    assert (folder / script(name).name).read_bytes() == script(name).read_bytes()
    assert json.loads((folder / "args.json").read_text()) == json.loads(json.dumps(result["args"]))
    command = (folder / "command.txt").read_text()
    assert all(flag in command for flag in argv)
    assert "numpy==" in (folder / "packages.txt").read_text()
    assert (folder / "commit.txt").exists()
    assert (folder / "model.safetensors").stat().st_size > 0
    assert len(list(folder.glob("checkpoint.*"))) == 1 and not list(folder.glob("*.tmp"))
    assert_reproducible(name, [scalar for scalar in scalars if scalar[0].split("/")[0] != "eval"], tmp_path / "again")


def assert_reproducible(name, scalars, cwd):
    cwd.mkdir()
    inspect_runs(script(name), [smoke(name, seed=seed) for seed in (1, 8)], cwd=cwd)  # forks of one process
    folders = sorted((cwd / "runs").iterdir(), key=lambda folder: folder.name.split("__")[2])
    first, again, other = untimed(scalars), *(untimed(raw_scalars(folder)) for folder in folders)
    assert len(first) > 10
    assert first == again, "the same seed, other metrics"
    losses = [[scalar for scalar in scalars if scalar[0].startswith("losses/")] for scalars in (first, other)]
    assert losses[0] != losses[1], "another seed, the same losses"
