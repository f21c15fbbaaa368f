"""Fixed-seed thresholds on small tasks: the mean return of the last 20 episodes of training."""

import numpy as np
import pytest

from helpers.files import FILES, require_for, script
from helpers.processes import LONG, run, run_dir
from helpers.scalars import raw_scalars

DQN = "--env-id CartPole-v1 --total-timesteps 60000 --learning-starts 2000 --exploration-fraction 0.3"
PENDULUM = "--env-id Pendulum-v1 --total-timesteps 7000 --learning-starts 500 --batch-size 64 --policy-frequency 1"
TASKS = {
    "ppo": ("--env-id CartPole-v1 --total-timesteps 100000 --learning-rate 1e-3", 150),  # seeds end at 250 to 490
    "ppo_continuous_action": ("--env-id InvertedPendulum-v4 --total-timesteps 100000", 700),
    "rpo_continuous_action": ("--env-id InvertedPendulum-v4 --total-timesteps 50000", 700),
    "pqn": ("--env-id CartPole-v1 --total-timesteps 100000 --learning-rate 1e-3", 150),
    "dqn": (DQN, 150),
    "dqn_jax": (DQN, 150),
    "c51": (f"{DQN} --learning-rate 1e-3", 120),
    "c51_jax": (f"{DQN} --learning-rate 1e-3", 120),
    "td3_continuous_action": (f"{PENDULUM} --learning-rate 1e-3", -350),
    "sac_continuous_action": (f"{PENDULUM} --policy-lr 1e-3", -350),
    "sac_continuous_action_jax": (f"{PENDULUM} --policy-lr 1e-3", -350),
}
FAST = "ppo", "pqn", "dqn", "rpo_continuous_action"  # the others solve the probe environments


def task(name):
    return pytest.param(name, marks=() if name in FAST else pytest.mark.slow)


@pytest.mark.parametrize("name", [task(name) for name in TASKS if name in FILES])
def test_learns(name, tmp_path):
    require_for(name)
    flags, threshold = TASKS[name]
    run(script(name), *flags.split(), "--seed", 1, cwd=tmp_path, timeout=600, variables=LONG)
    returns = [value for tag, _, value in raw_scalars(run_dir(tmp_path)) if tag == "charts/episodic_return"]
    assert np.mean(returns[:20]) < threshold - 0.5 * abs(threshold), "solved from the start: the threshold says nothing"
    assert np.mean(returns[-20:]) >= threshold
