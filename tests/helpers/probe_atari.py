"""Stand-ins for ale_py's AtariVectorEnv, with games that are solved in some hundred updates. The first has two:

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

    def send(self, actions):
        self.played = self.step(actions)

    def recv(self):
        played, self.played = self.played, None
        return played

    def close(self):
        pass


class Corridor(AtariVectorEnv):
    """Ten steps with a bar that moves to the right; at three of them the wrong action ends the game, and only the last
    step gives 1. Who acts at random gets there in one game of eight, and what the first frame is worth, gamma to the
    power of 9, comes to it through all others."""

    length = 10
    turns = {1: 0, 4: 1, 7: 0}  # step -> the right action
    frames = np.zeros((length + 4, 84, 84), dtype=np.uint8)  # three black ones, then one of each age
    for age in range(length + 1):
        frames[age + 3, :, 7 * age : 7 * age + 14] = 255

    def look(self, ages):
        return self.frames[np.asarray(ages)[:, None] + np.arange(4 - self.stack_num, 4)]

    def reset(self, seed=None):
        self.age = np.zeros(self.num_envs, dtype=int)
        return self.look(self.age), {"lives": np.zeros(self.num_envs, dtype=int)}

    def step(self, actions):
        lost = np.array([self.turns.get(*pair) != pair[1] for pair in zip(self.age.tolist(), actions.tolist())])
        self.age += 1
        over = lost | (self.age == self.length)
        infos = {"lives": np.zeros(self.num_envs, dtype=int), "final_obs": np.full(self.num_envs, None)}
        for i in np.flatnonzero(over):
            infos["final_obs"][i] = self.look(self.age[i : i + 1])[0]
        self.age[over] = 0
        return self.look(self.age), (over & ~lost).astype(np.int32), over, np.zeros_like(over), infos
