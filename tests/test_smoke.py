"""Every file, alone in an empty folder, runs with its smoke arguments, learns, logs and leaves a complete folder."""

import json
import math
import shutil

from conftest import (
    COMMON_METRICS,
    METRICS,
    each,
    environment,
    family,
    inspect_run,
    raw_scalars,
    require_for,
    run_dir,
    script,
    smoke,
    smoke_total,
    tensorboard_scalars,
    uses,
)

COUNT_UPDATES = """
from torch.optim.optimizer import register_optimizer_step_post_hook

result["updates"] = 0


def count(*_):
    result["updates"] += 1


register_optimizer_step_post_hook(count)
"""
STATE = """
result |= {"args": vars(args), "global_step": global_step, "globals": sorted(globals())}
observation, _ = eval_envs.reset(seed=3)
result["actions"] = load_policy(run_dir, eval_envs, globals().get("device"))(observation)
result["action_shape"] = (10, *eval_envs.single_action_space.shape)
result["compiled"] = getattr(globals().get("learn"), "_cache_size", int)()
"""


@each()
def test_smoke(name, tmp_path):
    require_for(name)
    argv = [*smoke(name), "--save-model"]
    torch = uses(name, "torch")
    copy, alone = shutil.copy(script(name), tmp_path), environment(PYTHONPATH=None)
    result = inspect_run(copy, *argv, cwd=tmp_path, before=COUNT_UPDATES if torch else "", after=STATE, env=alone)
    folder = run_dir(tmp_path)
    assert not torch or result["updates"] >= 2
    if "static_argnums" in script(name).read_text():  # once without and once with gradient steps
        assert result["compiled"] == 2, "what `learn` takes and what it returns are not of the same types"
    assert result["global_step"] == smoke_total(name)
    assert result["actions"].shape == result["action_shape"]
    assert {"args", "envs", "writer"} <= set(result["globals"])
    assert not torch or any(key.endswith("optimizer") for key in result["globals"])

    last = result["stdout"].strip().splitlines()[-1]
    assert str(folder.relative_to(tmp_path)) in last and "tensorboard --logdir" in last

    scalars = raw_scalars(folder)
    tags = {tag for tag, _, _ in scalars}
    assert tags >= COMMON_METRICS | METRICS[family(name)] | {"eval/episodic_return"}
    for tag in METRICS[family(name)]:
        values = [value for other, _, value in scalars if other == tag]
        assert len(values) >= 2 and all(map(math.isfinite, values)), f"{tag}: {values}"
    assert [step for tag, step, _ in scalars if tag == "eval/episodic_return"] == list(range(10))
    shown = tensorboard_scalars(folder)
    assert {(tag, *pair) for tag, pairs in shown.items() for pair in pairs} == set(scalars)

    assert (folder / script(name).name).read_bytes() == script(name).read_bytes()
    assert json.loads((folder / "args.json").read_text()) == result["args"]
    command = (folder / "command.txt").read_text()
    assert all(flag in command for flag in argv)
    assert "numpy==" in (folder / "packages.txt").read_text()
    assert (folder / "commit.txt").exists()
    assert (folder / "model.safetensors").stat().st_size > 0
    assert len(list(folder.glob("checkpoint.*"))) == 1 and not list(folder.glob("*.tmp"))
