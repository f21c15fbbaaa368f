"""Simulators on tensors, as `module:function` makes them: a point mass in torch, JAX-like ones of Brax's interface."""

import gymnasium as gym
import torch


class PointMass:
    """A mass on a line, pushed to 0: episodes terminate far out, or are cut off after 20 steps."""

    single_observation_space = gym.spaces.Box(-10, 10, (2,))
    single_action_space = gym.spaces.Box(-1, 1, (1,))

    def __init__(self, num_envs, seed, device):
        self.num_envs, self.device = num_envs, device
        self.generator = torch.Generator(device)

    def first(self):
        return 2 * torch.rand((self.num_envs, 2), generator=self.generator, device=self.device) - 1

    def reset(self, seed):
        self.generator.manual_seed(seed)
        self.state = self.first()
        self.age = torch.zeros(self.num_envs, device=self.device)
        return self.state

    def step(self, actions):
        speed = self.state[:, 1] + 0.2 * actions[:, 0].clamp(-1, 1)
        final_obs = torch.stack([self.state[:, 0] + 0.2 * speed, speed], 1)
        self.age += 1
        terminated, truncated = final_obs[:, 0].abs() > 2, self.age >= 20
        done = terminated | truncated
        self.state = torch.where(done[:, None], self.first(), final_obs)
        self.age = self.age.masked_fill(done, 0)
        return self.state, 1 - final_obs[:, 0] ** 2, terminated, truncated, final_obs

    def render(self):
        import numpy as np

        image = np.zeros((64, 64, 3), dtype=np.uint8)
        image[28:36, int(32 + 12 * self.state[0, 0].clamp(-2, 2))] = 255
        return image
