"""The life of a run, for every file: alone in an empty folder it learns, logs and leaves a complete folder.

Resumed when it is over, it has all that learning needs, and logs nothing twice. Begun again with the same seed, it logs
the same, bit by bit, until it is killed while a checkpoint is written; resumed, it goes on as if nothing had happened.
With another seed it logs something else.
"""

import json
import math
import shutil
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from cleanrl_utils.runs.checkpoint import write_model
from helpers.files import (
    COMMON_METRICS,
    HELPERS,
    LINEAGE,
    METRICS,
    continuous_control,
    each,
    each_text,
    family,
    learns_first,
    require_for,
    script,
    smoke,
    smoke_total,
    uses,
)
from helpers.processes import inspect_run, inspect_runs, kill_at_checkpoint, run_dir, short_games
from helpers.scalars import assert_clean, grid, raw_scalars, tensorboard_scalars, untimed

LOSSES = {"ppo": "value_loss", "ppg": "value_loss", "c51": "loss", "qdagger": "distill_loss"}  # others: td_loss
LOSSES |= dict.fromkeys(("ddpg", "td3", "sac"), "actor_loss")
RECORD = """
import sys

from torch.optim.optimizer import register_optimizer_step_post_hook

result["recorded"] = []


def record(optimizer, *_):
    frame, value = sys._getframe(), None
    while value is None:  # a local variable of an update, or what it logs
        frame = frame.f_back
        if frame.f_code.co_name == "<module>":  # the step of another optimizer
            return
        logged = frame.f_locals.get("logged")
        value = frame.f_locals.get("LOSS", (logged if isinstance(logged, dict) else {}).get("LOSS"))
    names = frame.f_globals
    # where learning comes before the environments step, or meanwhile, it belongs to the step that they make; at 0 there
    # is none but that of an offline phase
    step = names["global_step"]
    step += names["args"].num_envs if BEFORE and step else 0
    result["recorded"].append((step, value.item()))


register_optimizer_step_post_hook(record)
"""


def arguments(name):
    """The smoke arguments, with a checkpoint at each chance, and with two updates before the first line of the log."""
    earlier = {"learning_starts": 40} if learns_first(name) and not continuous_control(name) else {}
    return smoke(name, checkpoint_freq=1, **earlier)


LOOK = """
result |= {"args": vars(args), "global_step": global_step, "globals": sorted(globals())}
observation, _ = eval_envs.reset(seed=3)
result["actions"] = load_policy(run.dir, eval_envs, globals().get("device"))(observation)
for mode in "deterministic", "stochastic":
    policy = load_policy(run.dir, eval_envs, globals().get("device"), deterministic=mode == "deterministic")
    first = policy(observation).copy()
    result[mode] = any((policy(observation) != first).any() for _ in range(20))
space = eval_envs.single_action_space
columns = actions.shape[2:] if isinstance(space, gym.spaces.Tuple) else space.shape
result["action_shape"] = (eval_envs.num_envs, *columns)
result["compiled"] = getattr(globals().get("learn"), "_cache_size", int)()
"""


KEPT = """
import numpy as np

kept = {"global_step": global_step}
if "learner" in globals():
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(learner))
    kept["learner"] = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
else:
    optimizers = {key: value for key, value in globals().items() if isinstance(value, torch.optim.Optimizer)}
    modules = {key: value for key, value in globals().items() if isinstance(value, nn.Module)}
    assert optimizers and modules
    kept |= {key: value.state_dict()["state"] for key, value in optimizers.items()} | {"torch": torch.get_rng_state()}
    kept |= {key: value.state_dict() for key, value in modules.items()}
for key in ("chunk", "staged", "chunks_added", "gradient_steps", "log_alpha", "int_return"):
    state = not (key == "chunk" and "max_chunk" in globals())  # as many iterations as the machine is fast
    state &= not (key == "log_alpha" and "learner" in globals())  # where it began, and what has become of it
    if key in globals() and state:
        kept[key] = globals()[key]
if "rng" in globals():
    kept["numpy"] = [str(rng.bit_generator.state)]
if "replay" in globals() and hasattr(replay, "window"):  # frames stored once
    kept["replay"] = [replay.frames.slots, replay.rows.slots, replay.window, list(replay.first_frames), replay.saved]
    if hasattr(replay, "tree"):
        kept["priorities"] = [replay.tree.leaves, replay.tree.sums]
        kept["drawn"] = [getattr(replay, key) for key in ("largest", "ready", "oldest") if hasattr(replay, key)]
elif "replay" in globals() and hasattr(replay, "rows"):
    kept["replay"] = [replay.rows, getattr(replay, "filled", 0), replay.added]


def flat(tree, path=""):
    if isinstance(tree, dict):
        return {k: v for key, branch in tree.items() for k, v in flat(branch, f"{path}/{key}").items()}
    if isinstance(tree, (list, tuple)):
        return flat(dict(enumerate(tree)), path)
    return {path: np.array(tree.detach() if hasattr(tree, "detach") else tree)}


result["kept"] = flat(kept)
"""


@each()
def test_life_of_a_run(name, tmp_path):
    require_for(name)
    argv = [*arguments(name), "--upload-model", "--hf-entity", "someone"]
    torch = uses(name, "torch")
    loss = LOSSES.get(family(name), "td_loss")
    record = RECORD.replace("LOSS", loss).replace("BEFORE", str(learns_first(name))) if torch else ""
    before = short_games(name) + record
    copy = shutil.copy(script(name), tmp_path)
    if "--env-id tensor_sims:" in LINEAGE[name]["smoke"]:  # a simulator of the user's own lies beside the file
        shutil.copy(HELPERS / "tensor_sims.py", tmp_path)
    result = inspect_run(copy, *argv, cwd=tmp_path, before=before, after=KEPT + LOOK, alone=True)
    folder = run_dir(tmp_path)
    assert not torch or len(result["recorded"]) >= 2
    if "static_argnums" in script(name).read_text():
        assert result["compiled"] == 1, "what `learn` takes and what it returns are not of the same types"
    assert result["global_step"] == smoke_total(name)
    assert result["actions"].shape == result["action_shape"]
    assert not result["deterministic"], "one observation, two actions"
    assert result["stochastic"], "always the same action"
    assert {"args", "envs", "run"} <= set(result["globals"])
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
    logged = {step: value for tag, step, value in scalars if tag == f"losses/{loss}"}
    for last, (step, mean) in zip([0, *logged], logged.items() if torch else ()):
        values = [value for at, value in result["recorded"] if last < at <= step]
        assert len(values) > 1 and mean == pytest.approx(np.mean(values), rel=1e-4), "not the mean over the updates"
    if result["args"].get("anneal_lr"):
        rates = [value for tag, _, value in scalars if tag == "charts/learning_rate"]
        falling = [result["args"]["learning_rate"] * (1 - i / len(rates)) for i in range(len(rates))]
        assert rates == pytest.approx(falling, rel=1e-4), "not annealed from rollout to rollout"
    evaluated = [step for tag, step, _ in scalars if tag.startswith("eval/episodic_return")]
    assert uses(name, "godot_rl") or "eval_envs = make_envs(args.env_id, 10" in script(name).read_text()
    assert evaluated == [i // max(1, len(players)) for i in range(result["action_shape"][0])]
    shown = tensorboard_scalars(folder)
    assert {(tag, *pair) for tag, pairs in shown.items() for pair in pairs} == set(scalars)

    assert (folder / script(name).name).read_bytes() == script(name).read_bytes()
    assert json.loads((folder / "args.json").read_text()) == json.loads(json.dumps(result["args"]))
    command = (folder / "command.txt").read_text()
    assert all(flag in command for flag in argv)
    assert "numpy==" in (folder / "packages.txt").read_text()
    assert (folder / "commit.txt").exists()
    assert (folder / "model.safetensors").stat().st_mode == (folder / "args.json").stat().st_mode
    assert_model_in_checkpoint(folder, tmp_path, result["global_step"])
    assert len(list(folder.glob("checkpoint.*"))) == 1 and not list(folder.glob("*.tmp"))
    assert_goes_on(name, folder, result["kept"], tmp_path)


def assert_model_in_checkpoint(folder, cwd, global_step):
    """The tools find in a checkpoint what the file saves as its model at the end."""
    (cwd / "of-checkpoint").mkdir()
    assert write_model(folder, cwd / "of-checkpoint") == global_step
    model, found = (load_file(place / "model.safetensors") for place in (folder, cwd / "of-checkpoint"))
    assert model.keys() == found.keys() and len(model)
    for key in model:
        np.testing.assert_array_equal(found[key], model[key], err_msg=key)


# one file for each text of what is only done again
EVALUATED = each_text("evaluate").args[1]
SEEDED = each_text(lines=r"seed\(|key\(|default_rng|reset\(seed").args[1]


def assert_goes_on(name, whole, kept, cwd):
    """What comes after the first run: a run that is killed, then up to three in one process."""
    scalars = raw_scalars(whole)
    first = [scalar for scalar in scalars if not scalar[0].startswith("eval/")]
    evaluated = name in EVALUATED
    argvs = [["--resume", whole, "--no-upload-model", "--save-model" if evaluated else "--no-save-model"]]
    if sys.platform != "win32":  # no SIGKILL
        (cwd / "killed").mkdir()
        early = {"number": 3, "before": True, "step": 0.8 * smoke_total(name)}
        kill_at_checkpoint(name, arguments(name), cwd / "killed", **early)
        killed = run_dir(cwd / "killed")
        (unfinished,) = killed.glob("*.tmp")
        again = untimed(raw_scalars(killed, partial_tail=True))
        assert any(tag.startswith("losses/") for tag, _, _ in again) and len(again) >= 6
        assert again == untimed(first)[: len(again)], "the same seed, other metrics"
        argvs.append(["--resume", killed])
    argvs += [smoke(name, seed=8)] * (name in SEEDED)
    restored, *_ = inspect_runs(script(name), argvs, cwd=cwd, before=short_games(name), after=KEPT)

    assert restored["kept"].keys() == kept.keys() and len(kept) > 8
    if not evaluated and uses(name, "torch"):  # the evaluation of the first run has drawn random numbers since
        import torch

        kept["/torch"] = np.ravel(torch.load(whole / "checkpoint.pt")["torch_rng"][0])
    for key, value in kept.items():
        np.testing.assert_array_equal(restored["kept"][key], value, err_msg=key)
    assert raw_scalars(whole) == (scalars if evaluated else first), "a finished run went on"

    if sys.platform != "win32":
        assert not unfinished.exists()
        resumed = raw_scalars(killed)
        assert_clean(resumed)
        assert grid(resumed) == grid(first), "steps are missing"
    if name in SEEDED:
        (folder,) = (folder for folder in (cwd / "runs").iterdir() if folder != whole)
        both = first, raw_scalars(folder)
        ours, others = ({scalar for scalar in scalars if scalar[0].startswith("losses/")} for scalars in both)
        assert ours and ours != others, "another seed, the same losses"
