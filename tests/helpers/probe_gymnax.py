"""Probe environments, as in probe_envs.py, in the interface of gymnax, which importing this module tells of them."""

import gymnax
import jax
import jax.numpy as jnp
from flax import struct
from gymnax.environments import environment, spaces


@struct.dataclass
class State(environment.EnvState):
    side: jax.Array
    time: jax.Array


@struct.dataclass
class Params(environment.EnvParams):
    max_steps_in_episode: int = 1000


class Probe(environment.Environment):
    """One observation, by default the side, which is -1 or 1 through an episode."""

    limit = 1000

    @property
    def default_params(self):
        return Params(max_steps_in_episode=self.limit)

    def reset_env(self, key, params):
        side = 2 * jax.random.bernoulli(key).astype(jnp.float32) - 1
        state = State(side=side, time=jnp.int32(0))
        return self.look(state), state

    def step_env(self, key, state, action, params):
        state = State(side=state.side, time=state.time + 1)
        reward, terminated = self.respond(state, action)
        return self.look(state), state, jnp.float32(reward), jnp.bool_(terminated), {}

    def look(self, state):
        return state.side[None]

    def action_space(self, params=None):
        return spaces.Discrete(2)

    def observation_space(self, params):
        return spaces.Box(-1, 1, (1,))


class Discounting(Probe):
    """Two steps, observations 0 and 1, reward 1 at the end: V(1) = 1, V(0) = gamma."""

    def look(self, state):
        return jnp.minimum(state.time, 1).astype(jnp.float32)[None]

    def respond(self, state, action):
        return state.time == 2, state.time == 2


class TruncationState(Probe):
    """The reward is the side, and the only end a time limit of three steps: V(o) = o / (1 - gamma)."""

    limit = 3

    def respond(self, state, action):
        return state.side, False


class ObservationAction(Probe):
    """One step, reward 1 for the action that the side asks for, else -1."""

    def respond(self, state, action):
        return jnp.where((action == 1) == (state.side > 0), 1, -1), True


@struct.dataclass
class StateOfKind(State):
    kind: jax.Array


class Together(Probe):
    """The three above as one, which is compiled once: the observation says which of them an episode is of."""

    probes = Discounting(), TruncationState(), ObservationAction()

    def reset_env(self, key, params):
        _, state = self.probes[0].reset_env(key, params)
        kind = jax.random.randint(jax.random.fold_in(key, 1), (), 0, 3)
        state = StateOfKind(side=state.side, time=state.time, kind=kind)
        return self.look(state), state

    def step_env(self, key, state, action, params):
        state = state.replace(time=state.time + 1)
        responses = [jnp.stack([jnp.float32(x) for x in probe.respond(state, action)]) for probe in self.probes]
        reward, terminated = jnp.stack(responses)[state.kind]
        return self.look(state), state, reward, terminated > 0, {}

    def look(self, state):
        seen = jnp.stack([probe.look(state) for probe in self.probes])[state.kind]
        return jnp.concatenate([seen, jnp.arange(3) == state.kind])

    def is_truncated(self, state, params):
        return state.time >= jnp.array([probe.limit for probe in self.probes])[state.kind]

    def observation_space(self, params):
        return spaces.Box(-1, 1, (4,))


class Counter(Probe):
    """Counts steps and never ends: what is seen at step t is t, and the reward for it -t."""

    limit = 1_000_000

    def look(self, state):
        return state.time.astype(jnp.float32)[None]

    def respond(self, state, action):
        return 1 - state.time, False


class NanReward(Probe):
    def respond(self, state, action):
        return jnp.nan, state.time == 5


for probe in (Together, Counter, NanReward):
    gymnax.register(f"{probe.__name__}-v0", probe)
