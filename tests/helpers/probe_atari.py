"""A stand-in for ale_py's AtariVectorEnv, with two games that are solved in some hundred updates.

- choice: the first frame is bright on the left or on the right, the second one dark; the action at the second step is
  right (reward 1) if it names that side, and the game is over: values gamma and 1. Who sees one frame at a time has to
  remember the side.
- constant: every frame is grey and every step gives 1; the game is cut off after two steps: value 1 / (1 - gamma), less
  for an agent that takes the cut for an end.
"""

import gymnasium as gym
import numpy as np

SIDES = np.zeros((2, 4, 84, 84), dtype=np.uint8)
SIDES[0, -1, :, :42] = SIDES[1, -1, :, 42:] = 255
CHOICE = np.roll(SIDES, -1, axis=1)  # one step later
CONSTANT = np.full((1, 4, 84, 84), 128, dtype=np.uint8)


class AtariVectorEnv:
    def __init__(self, game, num_envs, stack_num=4, **options):
        self.num_envs, self.stack_num, self.metadata = num_envs, stack_num, {}
        self.single_observation_space = gym.spaces.Box(0, 255, (stack_num, 84, 84), np.uint8)
        self.single_action_space = gym.spaces.Discrete(2)

    def begin(self, i):
        self.age[i], self.game[i] = 0, self.rng.integers(3)  # two sides, and the constant game
        return CONSTANT[0] if self.game[i] == 2 else SIDES[self.game[i]]

    def reset(self, seed=None):
        self.rng = np.random.default_rng(seed)
        self.age, self.game = np.zeros((2, self.num_envs), dtype=int)
        obs = np.stack([self.begin(i) for i in range(self.num_envs)])
        return obs[:, -self.stack_num :], {"lives": np.zeros(self.num_envs, dtype=int)}

    def step(self, actions):
        self.age += 1
        constant, over = self.game == 2, self.age == 2
        reward = np.where(constant, 1, over & (np.asarray(actions) == self.game)).astype(np.int32)
        obs = np.stack([CONSTANT[0] if game == 2 else CHOICE[game] for game in self.game])
        infos = {"lives": np.zeros(self.num_envs, dtype=int), "final_obs": np.full(self.num_envs, None)}
        terminated, truncated = over & ~constant, over & constant
        for i in np.flatnonzero(over):
            infos["final_obs"][i] = obs[i, -self.stack_num :].copy()
            obs[i] = self.begin(i)
        return obs[:, -self.stack_num :], reward, terminated, truncated, infos

    def close(self):
        pass
