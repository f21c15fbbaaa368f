"""A track that only an agent with memory can solve: --env-id proof_of_memory:ProofofMemory-v0.

The agent starts in the middle of [-1, 1] and moves by 0.2 to the left (0) or to the right (1). One end is good, the
other bad: which, it is shown in the first two steps only, in which it cannot move. A step costs 0.1, an end gives 1.6
or -1.6, and the best return is 1. Whoever has forgotten the goals goes to the wrong end half of the time: -0.6 at best.

Where the last step with goals is remembered, the first move already tells them. ProofofMemoryDelayed-v0 asks for more:
four steps without goals and without moves follow those with goals. The best return is 1 again, without memory -1.
"""

import gymnasium as gym
import numpy as np


class ProofOfMemory(gym.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}
    observation_space = gym.spaces.Box(-1, 1, (3,), dtype=np.float32)  # left goal, position, right goal
    action_space = gym.spaces.Discrete(2)

    def __init__(self, frozen=2, render_mode=None):
        self.frozen, self.render_mode = frozen, render_mode
        self.prize = 1 + 0.1 * (frozen + 4)

    def observe(self):
        goal = self.goal if self.time < 2 else 0
        return np.array([-goal, self.place / 5, goal], dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.place, self.goal = 0, 0, int(self.np_random.choice([-1, 1]))
        return self.observe(), {}

    def step(self, action):
        if self.time >= self.frozen:
            self.place += 1 if action == 1 else -1  # fifths of the way, so that the ends are met exactly
        self.time += 1
        end = abs(self.place) == 5
        right = end and self.place * self.goal > 0
        reward = (self.prize if right else -self.prize) if end else -0.1
        return self.observe(), reward, end, False, {"success": float(right)} if end else {}

    def render(self):
        """The track in grey, its ends in the colours of the goals while they are shown, the agent in white."""
        left, _, right = self.observe()
        image = np.zeros((32, 11 * 16, 3), dtype=np.uint8)
        image[12:20] = 64
        for end, goal in ((slice(0, 16), left), (slice(-16, None), right)):
            image[:, end] = [0, 255, 0] if goal > 0 else [255, 0, 0] if goal < 0 else [64, 64, 64]
        middle = 88 + 16 * self.place
        image[8:24, middle - 6 : middle + 6] = 255
        return image


gym.register("ProofofMemory-v0", ProofOfMemory, max_episode_steps=16)
gym.register("ProofofMemoryDelayed-v0", ProofOfMemory, max_episode_steps=16, kwargs={"frozen": 6})
