"""Robots of MuJoCo that show where they are but not how they move: --env-id no_velocities:HopperNoVelocities-v4.

Two positions tell a velocity, so an agent with memory can make up for it, and one without has to do without.
"""

import gymnasium as gym


class NoVelocities(gym.ObservationWrapper):
    """Observations end with a velocity for each of the robot's degrees of freedom."""

    def __init__(self, env):
        super().__init__(env)
        self.shown = slice(env.observation_space.shape[0] - env.unwrapped.model.nv)
        space = env.observation_space
        self.observation_space = gym.spaces.Box(space.low[self.shown], space.high[self.shown], dtype=space.dtype)

    def observation(self, obs):
        return obs[self.shown]


def make(robot, **options):
    return NoVelocities(gym.make(robot, **options))


for robot in ("HalfCheetah", "Hopper", "InvertedPendulum", "Walker2d"):
    gym.register(f"{robot}NoVelocities-v4", make, kwargs={"robot": f"{robot}-v4"})
