"""One peer on one task, in a process of its own: `python -m benchmark.speed.peers sb3_ppo --steps 60000 --skip 20000`.

The settings equal those of our file; the rate counts from `--skip` steps on, so that imports, compilation and the
collection of random data before learning do not count. Prints environment steps per second.
"""

import time

import gymnasium as gym
import tyro


def sb3_ppo(seed):
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    envs = make_vec_env("CartPole-v1", n_envs=4, seed=seed)
    settings = dict(n_steps=128, batch_size=128, n_epochs=4, ent_coef=0.01, clip_range=0.2, clip_range_vf=0.2)
    return PPO("MlpPolicy", envs, learning_rate=lambda left: 2.5e-4 * left, seed=seed, device="cpu", **settings)


def sb3_ppo_continuous_action(seed):
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    envs = VecNormalize(make_vec_env("HalfCheetah-v4", n_envs=1, seed=seed))
    settings = dict(n_steps=2048, batch_size=64, n_epochs=10, clip_range=0.2, clip_range_vf=0.2)
    return PPO("MlpPolicy", envs, learning_rate=lambda left: 3e-4 * left, seed=seed, device="cpu", **settings)


DQN_SETTINGS = dict(
    learning_rate=2.5e-4,
    buffer_size=10_000,
    learning_starts=10_000,
    batch_size=128,
    train_freq=10,
    gradient_steps=1,
    target_update_interval=500,
    exploration_fraction=0.5,
    policy_kwargs={"net_arch": [120, 84]},
)


def sb3_dqn(seed):
    from stable_baselines3 import DQN

    return DQN("MlpPolicy", gym.make("CartPole-v1"), seed=seed, device="cpu", max_grad_norm=1e9, **DQN_SETTINGS)


def sbx_dqn(seed):
    from sbx import DQN

    return DQN("MlpPolicy", gym.make("CartPole-v1"), seed=seed, **DQN_SETTINGS)


CONTINUOUS_SETTINGS = dict(
    buffer_size=1_000_000,
    learning_starts=1_000,
    batch_size=256,
    train_freq=1,
    gradient_steps=1,
    policy_kwargs={"net_arch": [256, 256]},
)


def sb3_sac(seed):
    from stable_baselines3 import SAC

    return SAC("MlpPolicy", gym.make("HalfCheetah-v4"), seed=seed, device="cpu", **CONTINUOUS_SETTINGS)


def sbx_sac(seed):
    from sbx import SAC

    return SAC("MlpPolicy", gym.make("HalfCheetah-v4"), seed=seed, qf_learning_rate=1e-3, **CONTINUOUS_SETTINGS)


def td3_settings():
    import numpy as np
    from stable_baselines3.common.noise import NormalActionNoise

    noise = NormalActionNoise(np.zeros(6), 0.1 * np.ones(6))
    return CONTINUOUS_SETTINGS | {"learning_rate": 3e-4, "action_noise": noise}


def sb3_td3(seed):
    from stable_baselines3 import TD3

    return TD3("MlpPolicy", gym.make("HalfCheetah-v4"), seed=seed, device="cpu", **td3_settings())


def sbx_td3(seed):
    from sbx import TD3

    return TD3("MlpPolicy", gym.make("HalfCheetah-v4"), seed=seed, **td3_settings())


def main(peer: str, steps: int, skip: int, seed: int = 1):
    import torch
    from stable_baselines3.common.callbacks import BaseCallback

    torch.set_num_threads(1)

    class Clock(BaseCallback):
        first = last = None

        def _on_step(self):
            if self.num_timesteps >= skip:
                self.last = (self.num_timesteps, time.perf_counter())
                self.first = self.first or self.last
            return True

    clock = Clock()
    globals()[peer](seed).learn(steps, callback=clock)
    (first_step, first_time), (last_step, _) = clock.first, clock.last
    print((last_step - first_step) / (time.perf_counter() - first_time))


if __name__ == "__main__":
    tyro.cli(main, prog="python -m benchmark.speed.peers")
