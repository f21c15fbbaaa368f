# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "brax>=0.14", "gymnasium>=1.2", "jax>=0.7", "mujoco>=3.6", "numpy>=2", "playground>=0.2", "safetensors>=0.5",
#     "tensorboard>=2.19", "torch>=2.8", "tyro>=0.9",
# ]
# ///
"""Proximal Policy Optimization (PPO, Schulman et al. 2017, arXiv:1707.06347): thousands of robots on one GPU.

Isaac Gym, which gave the name, is no longer offered. `--env-id` names an environment of MuJoCo
Playground or Brax, or a `module:function` that makes any other simulator.

Differs from ppo_continuous_action.py:
1. nothing leaves the device of the simulator; the host waits for it once per iteration, to log
   means over the episodes that have ended;
2. networks of 256 units; observations and rewards as they come but for `--reward-scaler`;
3. episodes of Playground and Brax restart in states of a pool, which is drawn anew now and then;
   a simulation that is not finite is a terminated episode, with reward 0;
4. videos are clips of environment 0.

Differs from the paper:
1. advantages are standardised per minibatch, and gradients are clipped to a global norm;
2. networks have orthogonal initialisation;
3. an episode cut off by a time limit is bootstrapped from its final observation.

Run: python ppo_continuous_action_isaacgym.py --env-id Ant --total-timesteps 30000000
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields, make_dataclass
from datetime import timedelta
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import gymnasium as gym
import numpy as np
import torch
import tyro
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    env_id: str = "Ant"  # environment
    total_timesteps: int = 30_000_000  # environment steps in total
    learning_rate: float = 0.0026  # step size of the optimizer
    num_envs: int = 4096  # parallel environments
    num_steps: int = 16  # rollout length per environment
    anneal_lr: bool = False  # decay the learning rate linearly to zero
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # trace parameter of the advantage estimate
    num_minibatches: int = 2  # minibatches per epoch
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # standardise advantages per minibatch
    clip_coef: float = 0.2  # clip range of ratios and values
    clip_vloss: bool = False  # clip the value loss
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 2.0  # weight of the value loss
    max_grad_norm: float = 1.0  # ceiling of the global gradient norm
    target_kl: float | None = None  # end an update's epochs once the approximate KL exceeds this
    reward_scaler: float = 1.0  # factor of the rewards that are learned from
    record_video_step_frequency: int = 1464  # steps of the simulator from clip to clip

    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run's name
    seed: int = 1  # random seed
    torch_deterministic: bool = True  # ask for deterministic operations on the GPU
    cuda: bool = True  # use the GPU if there is one
    cuda_graphs: bool = True  # on the GPU, capture act and update once and replay them
    track: bool = False  # mirror the run to Weights & Biases
    wandb_project_name: str = "cleanRL"  # W&B project
    wandb_entity: str | None = None  # W&B user or team
    capture_video: bool = False  # record clips of one robot, --record-video-step-frequency steps apart
    save_model: bool = False  # write model.safetensors at the end and evaluate it on held-out seeds
    upload_model: bool = False  # push the finished run folder to the Hugging Face hub (implies --save-model)
    hf_entity: str = ""  # hub user or organisation, if not the owner of the token
    resume: str = ""  # continue the run in this folder, or the newest in runs: latest
    checkpoint_freq: int = 5_000_000  # environment steps between checkpoints


def load_environment(env_id):
    """An environment of MuJoCo Playground or Brax and the length of its episodes; the name may
    begin with that of its physics: mjx/Ant."""
    try:
        import brax.envs
        from mujoco_playground import registry
    except ImportError as error:
        raise ImportError(f"{env_id} needs: pip install playground brax ({error})") from error
    *physics, name = env_id.split("/")
    # inverted_pendulum is called InvertedPendulum
    ours = {"".join(map(str.capitalize, key.split("_"))): key for key in brax.envs._envs}
    engines = ["spring", "positional", "generalized", "mjx"]
    if name in registry.ALL_ENVS:
        engines = ["jax", "warp"]
    physics = "/".join(physics) or engines[0]
    if physics not in engines:
        raise gym.error.Error(f"physics of {name}: {', '.join(engines)}, not {physics}")
    if name in registry.ALL_ENVS:
        length = registry.get_default_config(name).episode_length
        return registry.load(name, config_overrides={"impl": physics}), length
    if name in ours:
        return brax.envs.get_environment(ours[name], backend=physics), 1000
    near = ", ".join(get_close_matches(name, [*ours, *registry.ALL_ENVS], 3, 0.4)) or "none"
    raise gym.error.Error(f"no environment {name} in MuJoCo Playground or Brax; near: {near}")


class JaxSimulator:
    """An environment of MuJoCo Playground or Brax, many times, in tensors that share JAX's memory.

    The wrappers of these packages lose the final observation of an episode, so it restarts here: in
    a state of a pool, as to draw states takes about as long as a step. The pool has one for each
    environment and is drawn again after every `episode_length` steps.
    """

    def __init__(self, env_id, num_envs, device):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPU's memory is torch's too
        try:
            import jax
        except ImportError as error:
            raise ImportError(f"{env_id} needs: pip install playground brax ({error})") from error
        if device.type == "cpu":
            jax.config.update("jax_platforms", "cpu")
        elif jax.default_backend() != "gpu":
            needed = "pip install 'jax[cuda12]', or say --no-cuda"
            raise ImportError(f"torch has a GPU, but JAX has not: {needed}")
        jax.config.update("jax_default_matmul_precision", "highest")  # physics in full float32
        self.jax, self.num_envs, self.device = jax, num_envs, device
        self.env, self.episode_length = load_environment(env_id)
        states = jax.eval_shape(self.env.reset, jax.random.PRNGKey(0))
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, self.observe(states).shape)
        self.single_action_space = gym.spaces.Box(-1, 1, (self.env.action_size,))
        self.draw, self.advance = jax.jit(self.draw), jax.jit(self.advance)

    def observe(self, states):
        if not isinstance(states.obs, Mapping):
            return states.obs
        if "state" not in states.obs:
            raise gym.error.Error(f"no observations called state, but {', '.join(states.obs)}")
        return states.obs["state"]

    def draw(self, key):
        """First states, without JAX's weak types, which would have `advance` compiled twice."""
        states = self.jax.vmap(self.env.reset)(self.jax.random.split(key, self.num_envs))
        return self.jax.tree.map(lambda x: x.astype(x.dtype), states)

    def advance(self, states, ages, pool, key, actions):
        """A step of all environments; episodes that end restart in a state of the pool."""
        jax, jnp, num_envs = self.jax, self.jax.numpy, self.num_envs
        key, draw_key = jax.random.split(key)
        states = jax.vmap(self.env.step)(states, actions.clip(-1, 1))
        ages, final_obs = ages + 1, self.observe(states)
        finite = jnp.isfinite(final_obs).all(1) & jnp.isfinite(states.reward)
        terminated, truncated = (states.done > 0) | ~finite, ages >= self.episode_length
        reward, done = jnp.where(finite, states.reward, 0), terminated | truncated
        drawn = (jnp.arange(num_envs) + jax.random.randint(draw_key, (), 0, num_envs)) % num_envs

        def restart(first, now):
            where = done.reshape(-1, *(1,) * (now.ndim - 1))
            return jnp.where(where, first[drawn], now).astype(first.dtype)

        states = jax.tree.map(restart, pool, states)
        outputs = self.observe(states), reward, terminated, truncated, final_obs
        return states, jnp.where(done, 0, ages), key, outputs

    def reset(self, seed):
        jax, device = self.jax, self.jax.devices()[0]
        seed = jax.device_put(jax.random.PRNGKey(seed), device)  # what follows is there too
        self.key, first_key, self.pool_key = jax.random.split(seed, 3)
        self.states = self.draw(first_key)
        self.pool = self.draw(jax.random.fold_in(self.pool_key, 0))
        self.ages = jax.device_put(np.zeros(self.num_envs, np.int32), device)
        self.outputs = (self.observe(self.states),)
        now = self.states, self.ages, self.key, self.outputs
        self.steps = 0
        shape = self.num_envs, *self.single_action_space.shape
        self.step(torch.zeros(shape, device=self.device))  # compiles it
        self.states, self.ages, self.key, self.outputs = jax.block_until_ready(now)
        self.steps = 0
        return torch.from_dlpack(self.outputs[0])

    def step(self, actions):
        """Each side waits for the other's work on its own stream; the host does not wait.

        The memory of an array may be used again as soon as nobody holds it, while the other side
        has yet to read it. So actions and outputs are kept until JAX has been given the next
        step, which waits for its actions and so for torch.
        """
        self.steps += 1
        if self.steps % self.episode_length == 0:
            self.pool = self.draw(self.jax.random.fold_in(self.pool_key, self.steps))
        actions = self.jax.dlpack.from_dlpack(actions)
        now = self.states, self.ages, self.pool, self.key
        self.states, self.ages, self.key, outputs = self.advance(*now, actions)
        self.actions, self.outputs = actions, outputs
        return tuple(map(torch.from_dlpack, outputs))

    def render(self):
        """An image of environment 0."""
        import mujoco

        if not hasattr(self, "renderer"):
            owner = self.env if hasattr(self.env, "mj_model") else self.env.sys
            model = owner.mj_model
            self.data, self.renderer = mujoco.MjData(model), mujoco.Renderer(model)
        state = getattr(self.states, "data", None) or self.states.pipeline_state
        self.data.qpos = getattr(state, "qpos", getattr(state, "q", None))[0]
        model = self.renderer.model
        if model.nmocap:
            self.data.mocap_pos, self.data.mocap_quat = state.mocap_pos[0], state.mocap_quat[0]
        mujoco.mj_forward(model, self.data)
        self.renderer.update_scene(self.data, camera=min(0, model.ncam - 1))
        return self.renderer.render()


class SimulatorEnvs:
    """A simulator: tensors for training (`step_tensors`), arrays for evaluation, videos of both."""

    def __init__(self, simulator, device, video_dir=None, video_frequency=1464):
        self.simulator, self.device, self.num_envs = simulator, device, simulator.num_envs
        self.single_observation_space = simulator.single_observation_space
        self.single_action_space = simulator.single_action_space
        self.video_dir, self.video_frequency = video_dir, video_frequency
        self.simulator_steps, self.frames = 0, []

    def reset(self, seed):
        return self.simulator.reset(seed).cpu().numpy(), {}

    def step(self, actions):
        *arrays, _ = self.step_tensors(torch.as_tensor(actions, device=self.device))
        return *(array.cpu().numpy() for array in arrays), {}

    def step_tensors(self, actions):
        self.simulator_steps += 1
        if self.video_dir:
            self.film()
        return self.simulator.step(actions)

    def film(self):
        """A frame, if a clip is being made; clips are of up to 100 steps."""
        age = (self.simulator_steps - 1) % self.video_frequency  # of the clip
        if len(self.frames) != age:  # a resumed run waits for the next clip
            return
        self.frames.append(self.simulator.render())
        if len(self.frames) == min(100, self.video_frequency):
            from moviepy import ImageSequenceClip

            self.video_dir.mkdir(parents=True, exist_ok=True)
            start = self.simulator_steps - 1 - age
            path = self.video_dir / f"step-{start * self.num_envs}.mp4"
            ImageSequenceClip(self.frames, fps=30).write_videofile(path, logger=None)
            self.frames = []

    def close(self):
        getattr(self.simulator, "close", lambda: None)()


def make_envs(env_id, num_envs, seed, video_dir=None, cuda=True):
    """`module:function` is called as function(num_envs, seed, device) and returns a simulator.

    That has `num_envs`, `single_observation_space`, `single_action_space`, `reset(seed)`, which
    returns observations, and `step(actions)`, which returns observations, rewards, terminated,
    truncated and final observations: tensors on the device, a row for each environment. An
    episode that ends restarts within the step: observations are then of the next episode, final
    observations of this (other rows do not matter). Actions have no bounds but the simulator's.
    Optional: `render()`, an image of environment 0, and `close()`.
    """
    device = torch.device("cuda" if torch.cuda.is_available() and cuda else "cpu")
    if ":" in env_id:
        module, _, function = env_id.partition(":")
        if not hasattr(import_module(module), function):
            raise ImportError(f"{module} has no function {function} that makes a simulator")
        simulator = getattr(import_module(module), function)(num_envs, seed, device)
    else:
        simulator = JaxSimulator(env_id, num_envs, device)
    actions, obs = simulator.single_action_space, simulator.single_observation_space
    if not isinstance(actions, gym.spaces.Box) or len(actions.shape) != 1:
        raise gym.error.Error(f"{env_id} has no vectors as continuous actions: ppo.py for discrete ones")
    if len(obs.shape or ()) != 1:
        raise gym.error.Error(f"{env_id} has no vectors as observations: ppo_atari.py for Atari games")
    return SimulatorEnvs(simulator, device, video_dir)


def layer_init(layer, std=2**0.5):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Layers(nn.Sequential):
    def forward(self, x):  # without hooks, which take as long as such a layer
        for layer in self:
            x = layer.forward(x)
        return x


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()

        def mlp(outputs, std):
            first, second = layer_init(nn.Linear(inputs, 256)), layer_init(nn.Linear(256, 256))
            last = layer_init(nn.Linear(256, outputs), std)
            return Layers(first, nn.Tanh(), second, nn.Tanh(), last)

        inputs = int(np.prod(envs.single_observation_space.shape))
        self.actor_mean = mlp(envs.single_action_space.shape[0], std=0.01)
        self.actor_logstd = nn.Parameter(torch.zeros(envs.single_action_space.shape))
        self.critic = mlp(1, std=1.0)

    def get_value(self, obs):
        return self.critic(obs).squeeze(-1)

    @torch.no_grad()
    def get_action(self, obs, deterministic=False):
        mean = self.actor_mean(obs)
        return mean if deterministic else mean + self.actor_logstd.exp() * torch.randn_like(mean)

    def evaluate(self, obs, action):
        mean = self.actor_mean(obs)
        z = (action - mean) / self.actor_logstd.exp()
        logprob = -0.5 * (z**2).sum(-1) - (self.actor_logstd + 0.5 * np.log(2 * np.pi)).sum()
        entropy = (self.actor_logstd + 0.5 * np.log(2 * np.pi * np.e)).sum().expand(len(obs))
        return logprob, entropy, self.critic(obs).squeeze(-1)


def load_policy(run_dir, envs, device, deterministic=False):
    """The saved agent of a run, as a function from observations to actions."""
    agent = Agent(envs).to(device)
    agent.load_state_dict(load_file(Path(run_dir, "model.safetensors"), str(device)))

    def policy(obs):
        obs = torch.tensor(obs, dtype=torch.float32, device=device)
        return agent.get_action(obs, deterministic).cpu().numpy()

    return policy


def gae_on_device(rewards, values, next_value, dones, final_values, gamma, gae_lambda):
    """Generalised advantages (Schulman et al. 2016, eq. 16) of (num_steps, num_envs) tensors; what follows
    the end of an episode is worth `final_values`: V(final observation) if it was truncated, else zero."""
    advantages, advantage = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * torch.where(dones[t], final_values[t], next_value) - values[t]
        advantages[t] = advantage = delta + gamma * gae_lambda * ~dones[t] * advantage
        next_value = values[t]
    return advantages


def finish_episodes(rewards, dones, episode_returns, episode_lengths):
    """The number of episodes that ended in a rollout, and the sums of their returns and lengths;
    returns and lengths so far are updated in place."""
    ended, returns, lengths = torch.zeros((3, *rewards.shape), device=rewards.device)
    for t in range(len(rewards)):
        episode_returns += rewards[t]
        episode_lengths += 1
        ended[t] = dones[t]
        returns[t] = torch.where(dones[t], episode_returns, 0)
        lengths[t] = torch.where(dones[t], episode_lengths, 0)
        episode_returns.masked_fill_(dones[t], 0)
        episode_lengths.masked_fill_(dones[t], 0)
    return ended.sum(), returns.sum(), lengths.sum()


def ppo_loss(newlogprob, entropy, newvalue, logprob, value, advantage, target, args):
    """The loss of a minibatch, and what is logged of it under losses/."""
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    logratio = newlogprob - logprob
    ratio = logratio.exp()
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = -torch.min(advantage * ratio, advantage * clipped_ratio).mean()  # eq. 7
    v_error = (newvalue - target) ** 2
    if args.clip_vloss:
        clipped_value = value + (newvalue - value).clamp(-args.clip_coef, args.clip_coef)
        v_error = torch.max(v_error, (clipped_value - target) ** 2)
    v_loss = 0.5 * v_error.mean()
    entropy_loss = entropy.mean()
    loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss  # eq. 9
    with torch.no_grad():
        old_approx_kl = -logratio.mean()
        approx_kl = ((ratio - 1) - logratio).mean()  # estimator k3 of http://joschu.net/blog/kl-approx.html
        clipfrac = (ratio != clipped_ratio).float().mean()
    logged = {"value_loss": v_loss, "policy_loss": pg_loss, "entropy": entropy_loss}
    return loss, logged | {"old_approx_kl": old_approx_kl, "approx_kl": approx_kl, "clipfrac": clipfrac}


# What a run needs besides its algorithm: the same text in every file, skip it at first reading


def fail(message):
    print(f"{Path(__file__).name}: {message}", file=sys.stderr)
    sys.exit(2)


def read_flags(argv, default):
    """The command line over the flags `default`; its help has those of the algorithm first, then those of every run."""
    helps = dict(re.findall(r"(?m)^    (\w+): .+?  # (.+)$", Path(__file__).read_text()))
    flags = [
        (flag.name, Annotated[flag.type, tyro.conf.arg(help=helps.get(flag.name, ""))], getattr(default, flag.name))
        for flag in fields(Args)
    ]
    at = [name for name, *_ in flags].index("exp_name")
    groups = [(name, make_dataclass(name, part)) for name, part in (("algorithm", flags[:at]), ("run", flags[at:]))]
    about = {"description": __doc__.split("\n")[0], "config": (tyro.conf.OmitArgPrefixes,)}
    both = tyro.cli(make_dataclass("Flags", groups), args=argv, **about)
    return Args(**vars(both.algorithm), **vars(both.run))


def parse_args():
    """The flags of this run, over those of the run to resume, which may be called `latest`; `--x no` means `--no-x`."""
    booleans = "|".join(flag.name.replace("_", "[-_]") for flag in fields(Args) if flag.type is bool)
    argv = re.sub(rf"(?m)^--({booleans})[\n=](?i:true|yes|1)$", r"--\1", "\n".join(sys.argv))
    argv = re.sub(rf"(?m)^--({booleans})[\n=](?i:false|no|0)$", r"--no-\1", argv)
    newest = max(Path("runs").glob(f"*/{Path(__file__).name}"), key=os.path.getmtime, default=Path("latest", "none"))
    argv = re.sub(r"(?m)^--resume[\n=]latest$", lambda _: f"--resume\n{newest.parent}", argv).split("\n")[1:]
    args = read_flags(argv, Args())
    if args.resume:
        for name in ("args.json", "checkpoint.*", Path(__file__).name):
            if not any(Path(args.resume).glob(name)):
                fail(f"--resume {args.resume} is not a run of this script with a checkpoint: {name} is missing")
        saved = json.loads(Path(args.resume, "args.json").read_text())
        if saved.keys() != vars(args).keys():
            fail(f"--resume {args.resume} was begun by a version of this script with other flags: use its own copy")
        args = read_flags(argv, Args(**saved))
        for flag in list(saved)[: list(saved).index("exp_name")]:
            if saved[flag] != getattr(args, flag) and flag != "total_timesteps":
                fail(f"--resume continues the run as it began, with --{flag.replace('_', '-')} {saved[flag]}")
    for flag in fields(Args):  # counts, sizes and periods
        from_zero = flag.name in ("seed", "learning_starts", "top_quantiles_to_drop_per_net")
        counts = flag.type is int and flag.default > 0 and not from_zero
        if counts and getattr(args, flag.name) < 1:
            fail(f"--{flag.name.replace('_', '-')} must be at least 1")
    if not 0 <= args.seed < 2**30:
        fail("--seed must be at least 0 and below 2**30: those above are for evaluation")
    for package in ["wandb"] * args.track + ["moviepy"] * args.capture_video:
        if find_spec(package) is None:
            fail(f"--track needs wandb and --capture-video moviepy: pip install {package}")
    if not hasattr(gym.vector, "AutoresetMode"):
        fail(f"gymnasium {gym.__version__} is too old for this: pip install 'gymnasium>=1.2'")
    if args.capture_video and sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")  # robots are drawn without a screen; before MuJoCo is imported
    args.save_model |= args.upload_model
    return args


def unknown(env_id, error):
    """Of an environment that Gymnasium does not know: which file plays Atari games, or the names that are nearly it."""
    import difflib

    atari, family = "ale_py" in sys.modules, Path(__file__).stem.split("_")[0]
    if re.match("ALE/|.+NoFrameskip-v|.+-ram", env_id) and not atari:
        return f"{env_id} is an Atari game: {family if family in ('dqn', 'c51', 'sac') else 'ppo'}_atari.py for those"
    known = [name for name, spec in gym.registry.items() if str(spec.entry_point).startswith("ale_py") == atari]
    near = difflib.get_close_matches(env_id, known, 3, 0.8)
    return str(error).partition(" Did you mean")[0] + f" Did you mean {' or '.join(near)}?" * bool(near)


def try_envs(args, *options):
    """A first look at the environment, before anything is written."""
    try:
        envs = make_envs(*options)
    except gym.error.UnregisteredEnv as error:
        fail(unknown(args.env_id, error))
    except (gym.error.Error, ImportError) as error:
        fail(error)
    if args.capture_video and "rgb_array" not in envs.metadata.get("render_modes", []):
        fail(f"{args.env_id} cannot render images: leave --capture-video out")


class Run:
    """The folder of a run: metrics, checkpoints and progress. It ends early where SIGTERM or Ctrl+C asks for it."""

    def __init__(self, args, total_steps=None):
        """Open the folder, and write down all that it takes to repeat the run."""
        self.args, self.dir, self.total = args, Path(args.resume), total_steps or args.total_timesteps
        self.saved, self.signals, self.over, self.shown = {}, [], False, 0
        self.recent_returns, self.returns = deque(maxlen=20), None
        signal.signal(signal.SIGTERM, self.stop)
        if not sys.flags.interactive and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self.stop)  # under `python -i`, Ctrl+C leaves everything at hand
        if args.resume:
            self.saved = torch.load(self.dir / "checkpoint.pt", map_location="cpu")
        while not args.resume:
            name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
            self.dir = Path("runs", re.sub("[/:]", "-", name))
            try:
                self.dir.mkdir(parents=True)
                break
            except FileExistsError:
                time.sleep(1)  # another run took this name within the same second
        if args.track:
            self.open_wandb()
        git = subprocess.run("git rev-parse HEAD", shell=True, cwd=Path(__file__).parent, capture_output=True)
        packages = sorted({"{Name}=={Version}\n".format_map(package.metadata) for package in distributions()})
        (self.dir / "commit.txt").write_bytes(git.stdout)
        (self.dir / "packages.txt").write_text("".join(packages))
        (self.dir / Path(__file__).name).write_bytes(Path(__file__).read_bytes())
        (self.dir / "command.txt").open("a").write(shlex.join(sys.orig_argv) + "\n")
        (self.dir / "args.tmp").write_text(json.dumps(vars(args), indent=2))
        os.replace(self.dir / "args.tmp", self.dir / "args.json")
        for file in self.dir.glob("events*"):  # a resumed run logs again what is newer than its checkpoint
            os.truncate(file, min(self.saved["events"].get(file.name, 0), file.stat().st_size))
        self.writer = SummaryWriter(self.dir)
        if not args.resume:
            table = "\n".join(f"|{flag}|{value}|" for flag, value in vars(args).items())
            self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}", 0)

    def open_wandb(self):
        import wandb

        names = {"project": self.args.wandb_project_name, "entity": self.args.wandb_entity}
        names |= {"name": self.dir.resolve().name, "id": self.dir.resolve().name}
        try:
            wandb.init(**names, resume="allow", config=vars(self.args), sync_tensorboard=True, save_code=True)
        except Exception as error:
            if not self.args.resume:
                os.removedirs(self.dir)
            fail(f"--track: {' '.join(str(error).split())}; to go on without: WANDB_MODE=offline")

    def stop(self, number, frame):
        """Handle a signal: end after the next checkpoint, or at once when asked twice or when training is over."""
        if self.over or (number == signal.SIGINT and number in self.signals):
            sys.exit(130 if number == signal.SIGINT else 75)
        self.signals.append(number)

    def restore(self, parts):
        """Bring the parts to the state of the checkpoint to resume, or write the first one; returns the global step."""
        self.parts, modules = parts, [part for part in parts.values() if isinstance(part, nn.Module)]
        self.tensors = [x for module in modules for x in module.state_dict().values() if x.is_floating_point()]
        self.step = self.start_step = self.saved.get("global_step", 0)
        self.start_time = time.perf_counter()
        self.marks = deque([(self.start_time, self.step)])
        if not self.saved:
            self.save(self.state(0))
            return 0
        for name, part in parts.items():
            if isinstance(part, np.random.Generator):
                part.bit_generator.state = self.saved[name]
            elif isinstance(part, torch.optim.Optimizer):  # its groups, with the step size, stay as the flags say
                groups = [dict(group) for group in part.param_groups]
                part.load_state_dict(part.state_dict() | {"state": self.saved[name]})
                part.param_groups[:] = groups
            else:
                part.load_state_dict(self.saved[name])
        self.recent_returns.extend(self.saved["recent_returns"])
        torch.set_rng_state(self.saved["torch_rng"][0])
        if torch.cuda.is_initialized() and len(self.saved["torch_rng"]) == 2:
            torch.cuda.set_rng_state(self.saved["torch_rng"][1])
        return self.step

    def state(self, global_step, **counters):
        """What a checkpoint holds."""
        self.writer.flush()
        state = {"global_step": global_step, "recent_returns": [float(x) for x in self.recent_returns]} | counters
        for name, part in self.parts.items():
            if isinstance(part, np.random.Generator):
                state[name] = part.bit_generator.state
            else:
                state[name] = part.state_dict()
                state[name] = state[name]["state"] if isinstance(part, torch.optim.Optimizer) else state[name]
        cuda_rng = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
        state["torch_rng"] = [torch.get_rng_state(), *cuda_rng]
        return state | {"events": {file.name: file.stat().st_size for file in self.dir.glob("events*")}}

    def save(self, state):
        """Write a checkpoint; a kill leaves the last one or this one, never half of it."""
        torch.save(state, self.dir / "unfinished.tmp")
        with open(self.dir / "unfinished.tmp") as file:
            os.fsync(file.fileno())  # a power cut, too, leaves one of them
        os.replace(self.dir / "unfinished.tmp", self.dir / "checkpoint.pt")
        self.send_films()

    def send_films(self):
        """Send to W&B what has been filmed since the last time; a resumed run, too, knows what that is."""
        films, sent = sorted(self.dir.glob("videos/*.mp4")) if self.args.track else (), self.dir / "videos/sent.txt"
        for film in films:
            if not sent.exists() or film.name not in sent.read_text().split("\n"):
                import wandb

                wandb.log({"videos": wandb.Video(str(film), format="mp4")})
                sent.open("a").write(film.name + "\n")

    def log_episodes(self, global_step, reward, done):
        """Count what the environments' episodes have brought, and log those that end with this step."""
        if self.returns is None:
            self.returns, self.lengths = np.zeros((2, len(reward)))
        self.returns += reward
        self.lengths += 1
        for i in done.nonzero()[0]:  # environment i has made step number global_step + i + 1
            self.writer.add_scalar("charts/episodic_return", self.returns[i], global_step + i + 1)
            self.writer.add_scalar("charts/episodic_length", self.lengths[i], global_step + i + 1)
            self.recent_returns.append(self.returns[i])
            self.returns[i] = self.lengths[i] = 0

    def log(self, global_step, losses, others=()):
        """Log the losses, which have to be finite as the parts have, and other metrics; show progress."""
        finite = torch.stack([x.sum() for x in self.tensors]).isfinite().all().item()
        if not finite or not np.isfinite([*losses.values()]).all():
            sys.exit(f"\nLosses are not finite at step {global_step}: {losses}. Last good checkpoint: {self.dir}")
        sps = (global_step - self.start_step) / (time.perf_counter() - self.start_time)
        for tag, value in (losses | dict(others) | {"charts/SPS": int(sps)}).items():
            self.writer.add_scalar(tag, value, global_step)
        self.show(global_step)

    def show(self, step):
        """Progress, with the speed of the last ten seconds: a bar on a terminal, else a line for each per cent."""
        self.marks.append((time.perf_counter(), step))
        while len(self.marks) > 2 and self.marks[-1][0] - self.marks[0][0] > 10:
            self.marks.popleft()
        (began, first), (now, _), total = self.marks[0], self.marks[-1], self.total
        sps, mean = (step - first) / (now - began), np.mean(self.recent_returns or [np.nan])
        left = timedelta(seconds=int(max(0, total - step) / sps))
        text = f"step {step}/{total}  SPS {sps:.0f}  return {mean:.1f}  left {left}"
        if sys.stdout.isatty():
            columns = shutil.get_terminal_size().columns - 1
            width = max(0, min(20, columns - len(text) - 3))
            text = f"[{'#' * min(width, width * step // total):{width}}] {text}"
            print(f"\r{text[:columns]:{columns}}", end="", flush=True)
        elif 100 * step // total > 100 * self.shown // total:
            self.shown = step
            print(f"{min(100, 100 * step // total):3} %  {text}", flush=True)

    def say(self, text):
        print(f"\n{text}" if sys.stdout.isatty() else text, flush=True)  # below the bar

    def checkpoint(self, global_step, last, **counters):
        """Save what it takes to continue, if it is time to; end here if a signal has asked for it."""
        due = global_step // self.args.checkpoint_freq > self.step // self.args.checkpoint_freq
        self.step, self.over = global_step, last
        if due or last or self.signals:
            self.save(self.state(global_step, **counters))
        self.end_if_asked(global_step)

    def end_if_asked(self, step):
        if self.signals:
            self.say(f"Stopped at step {step}. To continue: python {sys.argv[0]} --resume {self.dir}")
            sys.exit(75 if signal.SIGTERM in self.signals else 130)  # after 75, schedulers start a job again

    def close(self, eval_returns=()):
        for model in self.dir.glob("model.safetensors"):  # which safetensors makes for its owner alone
            model.chmod((self.dir / "args.json").stat().st_mode)
        for i, episodic_return in enumerate(eval_returns):
            self.writer.add_scalar("eval/episodic_return", episodic_return, i)
        if len(eval_returns):
            self.say(f"Evaluation on held-out seeds: {np.mean(eval_returns):.2f} +- {np.std(eval_returns):.2f}")
        self.writer.close()
        self.send_films()
        if self.args.upload_model:
            push = ["-m", "cleanrl_utils.hub", "push", str(self.dir)]
            push += ["--entity", self.args.hf_entity] * bool(self.args.hf_entity)
            if subprocess.run([sys.executable, *push]).returncode != 0:
                print(f"Not on the hub yet. To push it, where cleanrl_utils is installed: python {shlex.join(push)}")
        self.say(f"The run is in {self.dir}. To look at it: tensorboard --logdir {self.dir}")


class Means:
    """The means of what is logged of each update, kept on the device until they are asked for: nothing has to wait."""

    def __init__(self):
        self.names, self.sums = [], None

    @torch.no_grad()
    def add(self, logged):
        values = torch.stack([*logged.values(), torch.ones_like(next(iter(logged.values())))])
        if self.sums is None:
            self.names, self.sums = [*logged], torch.zeros_like(values)
        self.sums += values

    def take(self):
        """The means since the last call."""
        *sums, count = [0.0] if self.sums is None else self.sums.tolist()
        if count:
            self.sums.zero_()
        return {f"losses/{name}": total / count for name, total in zip(self.names, sums) if count}


def flatten(module):
    """Make all parameters and gradients views of one vector: clipping and Adam then take one call, not one a layer."""
    params = list(module.parameters())
    vector = nn.Parameter(nn.utils.parameters_to_vector(params).detach())
    vector.grad = torch.zeros_like(vector)
    sizes = [param.numel() for param in params]
    for param, data, grad in zip(params, vector.detach().split(sizes), vector.grad.split(sizes)):
        param.data, param.grad = data.view_as(param), grad.view_as(param)
    return vector


def cuda_graph(function, warmup=3):
    """Replay `function` as a CUDA graph over copies of its arguments; its first calls run eagerly, as real work too."""
    graph, calls, inputs, outputs = torch.cuda.CUDAGraph(), 0, [], None

    def call(*args):
        nonlocal calls, inputs, outputs
        calls += 1
        if calls <= warmup:
            return function(*args)
        if calls == warmup + 1:
            inputs = [torch.empty_like(arg, device="cuda") for arg in args]
        for place, arg in zip(inputs, args):
            place.copy_(arg, non_blocking=True)
        if calls == warmup + 1:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                outputs = function(*inputs)
        graph.replay()
        return outputs

    return call


def evaluate(policy, envs, seed):
    """The undiscounted return of one episode in each environment."""
    obs, _ = envs.reset(seed=seed)
    returns, running = np.zeros(envs.num_envs), np.ones(envs.num_envs, dtype=bool)
    while running.any():
        obs, reward, terminated, truncated, _ = envs.step(policy(obs))
        returns += running * reward
        running &= ~(terminated | truncated)
    return returns


if __name__ == "__main__":
    # Checks
    args = parse_args()
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = args.total_timesteps // batch_size
    if batch_size % args.num_minibatches or minibatch_size < 2:
        fail(f"--num-minibatches must divide {batch_size} steps into parts of two steps or more")
    if num_iterations == 0:
        fail(f"--total-timesteps must be at least one rollout of {batch_size} steps")
    try:  # before anything is written
        envs = make_envs(args.env_id, args.num_envs, args.seed, cuda=args.cuda)
    except (gym.error.Error, ImportError, ValueError) as error:
        fail(error)
    if args.capture_video and not hasattr(envs.simulator, "render"):
        fail(f"{args.env_id} cannot render images: leave --capture-video out")
    run = Run(args, num_iterations * batch_size)

    # Seeding
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
    else:
        torch.set_num_threads(1)  # a thread pool slows networks of this size down

    # Environments, agent and optimizer
    envs.video_dir = run.dir / "videos" if args.capture_video else None
    envs.video_frequency = args.record_video_step_frequency
    agent = Agent(envs).to(device)
    weights = flatten(agent)
    lr = torch.tensor(args.learning_rate, device=device)
    optimizer = torch.optim.Adam([weights], lr, eps=1e-5, fused=True, capturable=device.type == "cuda")

    # Storage: all of it on the device, where a graph needs it in place
    steps_envs, obs_shape = (args.num_steps, args.num_envs), envs.single_observation_space.shape
    obs, final_obs = torch.zeros((2, *steps_envs, *obs_shape), device=device)
    actions = torch.zeros(*steps_envs, *envs.single_action_space.shape, device=device)
    rewards = torch.zeros(steps_envs, device=device)
    terminated, truncated = torch.zeros((2, *steps_envs), dtype=torch.bool, device=device)
    b_obs, b_actions = obs.flatten(0, 1), actions.flatten(0, 1)
    b_logprobs, b_values, b_advantages, b_returns = torch.zeros((4, batch_size), device=device)
    episode_returns, episode_lengths = torch.zeros((2, args.num_envs), device=device)
    losses = Means()

    def act(obs):
        return agent.get_action(obs.to(device))

    @torch.no_grad()
    def targets(next_obs):
        b_logprobs[:], _, b_values[:] = agent.evaluate(b_obs, b_actions)
        dones, values = terminated | truncated, b_values.view(steps_envs)
        final_values = torch.where(truncated & ~terminated, agent.get_value(final_obs), 0)
        following = agent.get_value(next_obs), dones, final_values
        scaled_rewards = args.reward_scaler * rewards
        advantages = gae_on_device(scaled_rewards, values, *following, args.gamma, args.gae_lambda)
        b_advantages.copy_(advantages.flatten())
        b_returns.copy_(b_advantages + b_values)
        episodes = finish_episodes(rewards, dones, episode_returns, episode_lengths)
        return torch.stack([1 - b_advantages.var() / b_returns.var(), *episodes])

    def update(inds):
        new = agent.evaluate(b_obs[inds], b_actions[inds])
        rows = [x[inds] for x in (b_logprobs, b_values, b_advantages, b_returns)]
        loss, logged = ppo_loss(*new, *rows, args)
        weights.grad.zero_()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
        optimizer.step()
        losses.add(logged)
        return logged

    if device.type == "cuda" and args.cuda_graphs:
        act, targets, update = cuda_graph(act), cuda_graph(targets), cuda_graph(update)

    # Training loop
    global_step = run.restore({"agent": agent, "optimizer": optimizer})
    envs.simulator_steps = global_step // args.num_envs
    next_obs = envs.simulator.reset(args.seed + global_step)
    now = time.perf_counter()  # the simulator has been compiled
    run.start_time, run.marks[0] = now, (now, global_step)
    for iteration in range(global_step // batch_size, num_iterations):
        if args.anneal_lr:
            lr.fill_((1 - iteration / num_iterations) * args.learning_rate)

        # Act: the host only puts work into the queue of the device
        for step in range(args.num_steps):
            action = act(next_obs)
            obs[step], actions[step] = next_obs, action
            next_obs, *outputs = envs.step_tensors(action)
            rewards[step], terminated[step], truncated[step], final_obs[step] = outputs
            global_step += args.num_envs

        # Targets: the weights have not changed since, so one batch serves all steps
        statistics = targets(next_obs)

        # Learn
        for epoch in range(args.update_epochs):
            for inds in torch.randperm(batch_size, device=device).split(minibatch_size):
                v_loss, pg_loss, entropy_loss, old_approx_kl, approx_kl, clipfrac = update(inds).values()
            if args.target_kl is not None and approx_kl > args.target_kl:
                break

        # Log: here the host waits for the device
        explained_variance, episodes, returns, lengths = statistics.tolist()
        metrics = {"losses/explained_variance": explained_variance}
        metrics["charts/learning_rate"] = lr.item()
        if episodes:
            run.recent_returns.append(returns / episodes)
            metrics["charts/episodic_return"] = returns / episodes
            metrics["charts/episodic_length"] = lengths / episodes
            metrics["charts/episodes"] = episodes
        run.log(global_step, losses.take(), metrics)

        # Checkpoint
        run.checkpoint(global_step, last=iteration == num_iterations - 1)

    # Save and close
    envs.close()
    eval_returns = []
    if args.save_model:
        save_file(agent.state_dict(), run.dir / "model.safetensors")
        eval_envs = make_envs(args.env_id, 10, args.seed, cuda=args.cuda)
        policy = load_policy(run.dir, eval_envs, device)
        eval_returns = evaluate(policy, eval_envs, seed=args.seed + 2**30)
    run.close(eval_returns)
