"""python -m cleanrl_utils.evaluate plays the saved model of a run folder, whichever file made it."""

import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import FILES, ROOT, environment, raw_scalars, require_for, run, run_dir, script, smoke

# for each backend; with memory; with a game that has lives; whose policy is deterministic
PLAYED = ["ppo", "ppo_continuous_action_lstm", "ppo_atari_envpool", "sac_continuous_action_jax", "ppo_trxl", "ppo_jax"]


def play(*argv, cwd, code=0):
    env = environment(PYTHONPATH=str(ROOT))
    command = [sys.executable, "-m", "cleanrl_utils.evaluate", *map(str, argv)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.mark.parametrize("name", [name for name in PLAYED if name in FILES])
def test_plays(name, tmp_path):
    require_for(name)
    run(script(name), *smoke(name), "--save-model", cwd=tmp_path)
    folder = run_dir(tmp_path).relative_to(tmp_path)
    first = play(folder, cwd=tmp_path)
    returns = [float(value) for value in re.findall(r"episode \d+: return (.+)", first)]
    assert len(returns) == 10 and f"Mean return of 10 episodes: {np.mean(returns):.1f}"[:-2] in first
    assert play(folder, cwd=tmp_path) == first, "the same seed, another result"
    if name == "sac_continuous_action_jax":
        logged = [value for tag, _, value in raw_scalars(run_dir(tmp_path)) if tag == "eval/episodic_return"]
        assert returns == pytest.approx(logged, abs=0.01), "not the policy that the file evaluated"


def test_wrong_usage(tmp_path):
    assert "no-such-run is not a run with a model" in play("no-such-run", cwd=tmp_path, code=2)
    run(script("ppo"), *smoke("ppo"), cwd=tmp_path)
    assert "--save-model" in play(run_dir(tmp_path), cwd=tmp_path, code=2)
    assert "--episodes" in play(run_dir(tmp_path), "--episodes", 0, cwd=tmp_path, code=2)
