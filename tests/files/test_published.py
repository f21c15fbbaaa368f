"""Command lines as in the original's own tests: small sizes, odd buffers, flags of old. They run to their end."""

import shlex

import pytest

from helpers.files import make_teacher, require_for, script
from helpers.processes import in_short, run, run_dir

TINY = "--learning-starts 10 --total-timesteps 16 --buffer-size 10 --batch-size 4"
HOPPER = "--env-id Hopper-v4 --learning-starts 100 --batch-size 32 --total-timesteps 105"
QDAGGER = f"{TINY} --teacher-steps 16 --offline-steps 16 --teacher-eval-episodes 1"
ROLLOUT = "--num-envs 1 --num-steps 64 --total-timesteps 256"
XLA = "--num-envs 8 --num-steps 6 --update-epochs 1 --num-minibatches 1 --total-timesteps 256 --torch-deterministic"
ODD = {  # what no other test runs
    "dqn": "--learning-starts 200 --total-timesteps 205 --buffer-size 10",
    "dqn_jax": "--learning-starts 200 --total-timesteps 205 --buffer-size 10",
    "c51": "--learning-starts 200 --total-timesteps 205 --buffer-size 10",
    "c51_jax": "--learning-starts 200 --total-timesteps 205 --buffer-size 10",
    "dqn_atari": TINY,
    "dqn_atari_jax": TINY,
    "c51_atari": TINY,
    "sac_atari": f"{TINY} --target-network-frequency 8",
    "sac_continuous_action": "--env-id Hopper-v4 --batch-size 128 --total-timesteps 135 --buffer-size 10",
    "td3_continuous_action_jax": f"{HOPPER} --buffer-size 10",
    "qdagger_dqn_atari_impalacnn": QDAGGER,
    "ppo_atari_multigpu": "--num-envs 8 --num-steps 32 --num-minibatches 2 --update-epochs 1 --total-timesteps 256",
    "ppo_trxl": "--env-id CartPole-v1 --num-envs 1 --num-steps 64 --trxl-num-layers 1 --trxl-dim 32 "
    "--trxl-memory-length 8 --total-timesteps 128 --trxl-positional-encoding ''",
    "ppg_procgen": f"{ROLLOUT} --num-minibatches 2 --n-iteration 1 --e-auxiliary 1 --num-aux-rollouts 1",
    "ppo_atari_envpool_xla_jax": XLA,
}
OTHERS = {
    "c51_atari_jax": TINY,
    "ppo_atari_envpool_xla_jax_scan": XLA,
    "qdagger_dqn_atari_jax_impalacnn": QDAGGER,
    "ppo": ROLLOUT,
    "ppo_atari": ROLLOUT,
    "ppo_continuous_action": f"{ROLLOUT} --env-id Hopper-v4",
    "rpo_continuous_action": f"{ROLLOUT} --env-id Hopper-v4",
    "ppo_atari_envpool": ROLLOUT,
    "ppo_atari_lstm": "--num-envs 4 --num-steps 64 --total-timesteps 256",
    "ppo_rnd_envpool": f"{ROLLOUT} --num-iterations-obs-norm-init 1",
    "ppo_procgen": f"{ROLLOUT} --num-minibatches 2",
    "ddpg_continuous_action": HOPPER,
    "ddpg_continuous_action_jax": HOPPER,
    "td3_continuous_action": HOPPER,
}


@pytest.mark.parametrize("name", [*ODD, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_runs_as_published(name, tmp_path):
    require_for(name)
    argv = shlex.split((ODD | OTHERS)[name])
    if name.startswith("qdagger"):
        kind = "dqn_atari_jax" if "jax" in name else "dqn_atari"
        argv += ["--teacher-policy-hf-repo", make_teacher(kind)]
    run(script(name), *argv, cwd=tmp_path, **in_short(name))
    assert list(run_dir(tmp_path).glob("checkpoint.*"))
