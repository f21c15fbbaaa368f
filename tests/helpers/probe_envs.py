"""Tiny environments that isolate one ability each, registered as <Name>Discrete-v0 and <Name>Continuous-v0.

Discrete: two actions, of which 1 is right where one is. Continuous: Box(-1, 1), with the right action at +-0.5.
"""

import gymnasium as gym
import numpy as np


class Probe(gym.Env):
    """One observation in [-1, 1]; subclasses say how an episode starts (`start`) and what a step does (`respond`)."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    observation_space = gym.spaces.Box(-1, 1, (1,), dtype=np.float32)

    def __init__(self, continuous, render_mode=None):
        self.continuous, self.render_mode = continuous, render_mode
        self.action_space = gym.spaces.Box(-1, 1, (1,), dtype=np.float32) if continuous else gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.state = 0, self.start()
        return np.array([self.state], dtype=np.float32), {}

    def step(self, action):
        self.time += 1
        reward, self.state, terminated, truncated = self.respond(action)
        return np.array([self.state], dtype=np.float32), reward, terminated, truncated, {}

    def render(self):
        return np.full((64, 64, 3), 127 + int(100 * self.state), dtype=np.uint8)

    def start(self):
        return 0.0

    def sign(self):
        return float(self.np_random.choice([-1, 1]))

    def score(self, action, side):
        """1 for the right action on a side (-1 or 1), less for others."""
        if self.continuous:
            return 1.0 - 4.0 * (float(action[0]) - 0.5 * side) ** 2
        return 1.0 if action == (side > 0) else -1.0


class ConstantReward(Probe):
    """One step, reward 1: V = 1."""

    def respond(self, action):
        return 1.0, 0.0, True, False


class Discounting(Probe):
    """Two steps, observations 0 and 1, reward 1 at the end: V(1) = 1, V(0) = gamma."""

    def respond(self, action):
        return float(self.time == 2), 1.0, self.time == 2, False


class TruncationState(Probe):
    """The reward is the observation, which an episode keeps for 3 steps until it is cut off: V(o) = o / (1 - gamma).

    An agent that bootstraps from the next episode's first observation, of a random sign, is as wrong as one that stops.
    """

    def start(self):
        return self.sign()

    def respond(self, action):
        return self.state, self.state, False, self.time == 3


class Cases(Probe):
    """One of these per episode, each with an observation of its own (one-hot), so that each is learned by itself:

    0 and 1: one step, reward 1 or -1; 2, then 3: two steps, reward 1 at the end; 4 and 5: reward 1 or -1 for ever, seen
    through episodes that are cut off after 2 steps; 6 and 7: one step, with another right action.

    An agent that bootstraps from the next episode's first observation is as wrong in 4 and 5 as one that stops.
    """

    observation_space = gym.spaces.Box(0, 1, (8,), dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.look(), {}

    def step(self, action):
        _, *rest = super().step(action)
        return self.look(), *rest

    def look(self):
        return np.eye(8, dtype=np.float32)[self.state]

    def start(self):
        return int(self.np_random.choice([0, 1, 2, 4, 5, 6, 6, 6, 7, 7, 7]))  # actions take longer to learn

    def respond(self, action):
        reward = (
            self.score(action, {6: 1, 7: -1}[self.state])
            if self.state > 5
            else [1.0, -1.0, 0.0, 1.0, 1.0, -1.0][self.state]
        )
        endless = self.state in (4, 5)
        return reward, 3 if self.state == 2 else self.state, not endless and self.state != 2, endless and self.time == 2


class Memory(Probe):
    """Three steps: the first observation is a sign, the others are zero, and the right last action is that of the sign.

    Without memory no action is better than 0, whose mean reward is 0.
    """

    def start(self):
        self.cue = self.sign()
        return self.cue

    def respond(self, action):
        return self.score(action, self.cue) if self.time == 3 else 0.0, 0.0, self.time == 3, False


class NanReward(Probe):
    """Rewards are good for 200 steps over all episodes of this instance, then NaN."""

    count = 0

    def respond(self, action):
        self.count += 1
        return float("nan") if self.count > 200 else 1.0, 0.0, self.time == 4, False


class Image(ConstantReward):
    """Observations that are not vectors."""

    observation_space = gym.spaces.Box(0, 255, (8, 8, 3), dtype=np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros((8, 8, 3), dtype=np.uint8), {}

    def step(self, action):
        return np.zeros((8, 8, 3), dtype=np.uint8), 1.0, True, False, {}


class Unbounded(ConstantReward):
    """Actions without bounds, where they are continuous."""

    def __init__(self, continuous, render_mode=None):
        super().__init__(continuous, render_mode)
        if continuous:
            self.action_space = gym.spaces.Box(-np.inf, np.inf, (1,), dtype=np.float32)


class OwnBounds(gym.Env):
    """Two actions with bounds of their own; episodes terminate at random, or are cut off after 4 steps."""

    observation_space = gym.spaces.Box(-1, 1, (3,), dtype=np.float32)
    action_space = gym.spaces.Box(np.array([-2, 0.5], np.float32), np.array([1, 4], np.float32))

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def look(self):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.look(), {}

    def step(self, action):
        self.time += 1
        terminated = bool(self.np_random.random() < 0.2)
        return self.look(), float(action[0] * action[1]) - 1, terminated, self.time == 4, {}


class OwnChoices(OwnBounds):
    """The same with an action of two choices, in episodes of up to 12 steps."""

    action_space = gym.spaces.MultiDiscrete([3, 2])

    def step(self, action):
        assert self.action_space.contains(action), action
        self.time += 1
        terminated = bool(self.np_random.random() < 0.1)
        return self.look(), float(action[0] * action[1]) - 1, terminated, self.time == 12, {"time": self.time}


gym.register("OwnBounds-v0", OwnBounds)
gym.register("OwnChoices-v0", OwnChoices)
for kind in [ConstantReward, Discounting, TruncationState, Cases, Memory, NanReward, Image, Unbounded]:
    for suffix in ("Discrete", "Continuous"):
        gym.register(f"{kind.__name__}{suffix}-v0", kind, kwargs={"continuous": suffix == "Continuous"})


class Spaces(gym.Env):
    """Observations of several kinds in a Dict, float64 among them; actions whose bounds differ by dimension.

    An action outside of its bounds is an error. `actions` keeps all that this class has been given.
    """

    observation_space = gym.spaces.Dict(
        matrix=gym.spaces.Box(-1, 1, (2, 2), dtype=np.float32),
        level=gym.spaces.Discrete(3),
        inner=gym.spaces.Dict(vector=gym.spaces.Box(-np.inf, np.inf, (3,), dtype=np.float64)),
    )
    action_space = gym.spaces.Box(*np.array([[-2, 0, -0.1], [1, 50, 0.3]], dtype=np.float32))
    actions = []

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def observe(self):
        matrix, vector = self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32), self.np_random.normal(size=3)
        return {"matrix": matrix, "level": self.np_random.integers(3), "inner": {"vector": vector}}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.actions.append(np.array(action))
        self.time += 1
        terminated = self.time == 5 and bool(action[0] > 0)
        return self.observe(), -float(np.sum(action**2)), terminated, self.time == 5, {}


class Camera(Spaces):
    """An image among the observations."""

    camera = gym.spaces.Box(0, 255, (8, 8, 3), dtype=np.uint8)
    observation_space = gym.spaces.Dict(Spaces.observation_space.spaces | {"inner": gym.spaces.Dict(camera=camera)})

    def observe(self):
        return super().observe() | {"inner": {"camera": self.camera.sample()}}


gym.register("Spaces-v0", Spaces)
gym.register("Camera-v0", Camera)


class Masked(gym.Env):
    """Four steps, each with other valid choices in every dimension of the action; an invalid one is an error.

    Right is the first valid choice of a dimension if `sign` is -1, the last if it is 1: reward 1 for each. At the end
    nothing is valid any more.
    """

    def __init__(self, action_space, in_info=False, render_mode=None):
        self.action_space, self.in_info, self.render_mode = action_space, in_info, render_mode
        self.nvec = action_space.nvec if hasattr(action_space, "nvec") else [action_space.n]
        self.observation_space = gym.spaces.Dict(
            sign=gym.spaces.Box(-1, 1, (1, 1), dtype=np.float64),
            noise=gym.spaces.Discrete(3),
            **({} if in_info else {"action_mask": gym.spaces.MultiBinary(int(sum(self.nvec)))}),
        )

    def look(self):
        self.sign = self.np_random.choice([-1, 1])
        self.valid = [self.np_random.permutation(np.arange(n) < self.np_random.integers(2, n)) for n in self.nvec]
        if self.time == 4:
            self.valid = [np.zeros(n, dtype=bool) for n in self.nvec]
        mask = {"action_mask": np.concatenate(self.valid).astype(np.int8)}
        obs = {"sign": np.full((1, 1), float(self.sign)), "noise": self.np_random.integers(3)}
        if self.in_info and len(self.nvec) > 1:  # by dimension, as in Gymnasium's MultiDiscrete.sample
            mask["action_mask"] = tuple(valid.astype(np.int8) for valid in self.valid)
        return (obs, mask) if self.in_info else (obs | mask, {})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.look()

    def step(self, action):
        assert self.action_space.contains(action), action
        choices = np.ravel(action - self.action_space.start)
        assert all(valid[choice] for valid, choice in zip(self.valid, choices, strict=True)), (choices, self.valid)
        right = [np.flatnonzero(valid)[-1 if self.sign > 0 else 0] for valid in self.valid]
        self.time += 1
        reward = float(np.sum(choices == right))
        obs, info = self.look()
        return obs, reward, self.time == 4 and self.sign > 0, self.time == 4, info


MULTI = gym.spaces.MultiDiscrete([3, 5], start=[0, 10])
gym.register("MaskedMulti-v0", Masked, kwargs={"action_space": MULTI})
gym.register("MaskedTuple-v0", Masked, kwargs={"action_space": MULTI, "in_info": True})
gym.register("MaskedDiscrete-v0", Masked, kwargs={"action_space": gym.spaces.Discrete(4, start=2), "in_info": True})


def __getattr__(name):
    """`probe_envs:<id>` as a simulator on tensors, for the file that asks a module for a function of that name."""
    if name not in gym.registry:
        raise AttributeError(name)
    return lambda num_envs, seed, device: OnTensors(name, num_envs, device)


class OnTensors:
    def __init__(self, env_id, num_envs, device):
        make = lambda: gym.make(env_id)  # noqa: E731
        self.envs = gym.vector.SyncVectorEnv([make] * num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
        self.num_envs, self.device = num_envs, device
        self.single_observation_space = self.envs.single_observation_space
        self.single_action_space = self.envs.single_action_space

    def reset(self, seed):
        return self.tensor(self.envs.reset(seed=seed)[0])

    def step(self, actions):
        actions = np.clip(actions.cpu().numpy(), self.single_action_space.low, self.single_action_space.high)
        obs, reward, terminated, truncated, infos = self.envs.step(actions)
        final_obs = np.array(obs)
        for i in np.flatnonzero(terminated | truncated):
            final_obs[i] = infos["final_obs"][i]
        return tuple(map(self.tensor, (obs, reward.astype(np.float32), terminated, truncated, final_obs)))

    def tensor(self, array):
        import torch

        return torch.tensor(array, device=self.device)
