# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "brax>=0.14", "gymnasium>=1.2", "jax>=0.7", "mujoco>=3.6", "numpy>=2", "playground>=0.2", "safetensors>=0.5",
#     "tensorboard>=2.19", "torch>=2.8", "tyro>=0.9",
# ]
# ///
"""Proximal Policy Optimization (PPO, Schulman et al. 2017, arXiv:1707.06347): thousands of robots on one GPU.

Isaac Gym, for which this file is named, is no longer offered. `--env-id` names an environment of MuJoCo Playground or
Brax, whose arrays torch reads where JAX left them, or a function `module:function` that makes any other simulator.

Differs from ppo_continuous_action.py:
1. observations, rollouts, advantages and statistics of episodes never leave the device of the simulator, and the host
   waits for the GPU once per iteration, to log; an entry is the mean over all episodes that ended in an iteration;
2. networks of 256 units, observations and rewards as they come but for `--reward-scaler`;
3. episodes of Playground and Brax restart in states from a pool that is drawn anew from time to time; a simulation that
   is no longer finite is a terminated episode, with reward 0;
4. videos are clips of environment 0, by the number of the simulator's steps.

Differs from the paper:
1. advantages are standardised per minibatch, and gradients are clipped to a global norm;
2. networks have orthogonal initialisation;
3. an episode cut off by a time limit is bootstrapped from its final observation.

Run: python ppo_continuous_action_isaacgym.py --env-id Ant --total-timesteps 30000000
"""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run's name
    seed: int = 1  # random seed
    torch_deterministic: bool = True  # make cuDNN use deterministic algorithms
    cuda: bool = True  # use the GPU if there is one
    cuda_graphs: bool = True  # on the GPU, capture act and update once and replay them
    track: bool = False  # mirror the run to Weights & Biases
    wandb_project_name: str = "cleanRL"  # W&B project
    wandb_entity: str | None = None  # W&B user or team
    capture_video: bool = False  # record episodes at several stages of training
    save_model: bool = False  # write model.safetensors at the end and evaluate it on held-out seeds
    upload_model: bool = False  # push the finished run folder to the Hugging Face hub (implies --save-model)
    hf_entity: str = ""  # hub user or organisation, if not the owner of the token
    resume: str = ""  # continue the run in this folder
    checkpoint_freq: int = 5_000_000  # environment steps between checkpoints

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
    vf_coef: float = 2  # weight of the value loss
    max_grad_norm: float = 1  # ceiling of the global gradient norm
    target_kl: float | None = None  # end an update's epochs once the approximate KL exceeds this
    reward_scaler: float = 1  # factor of the rewards that are learned from
    record_video_step_frequency: int = 1464  # steps of the simulator from the start of one clip to that of the next


def fail(message):
    print(f"{Path(__file__).name}: {message}", file=sys.stderr)
    sys.exit(2)


def parse_args():
    """The command line, over the flags of the run to resume; `--x True` and `--x False` mean `--x` and `--no-x`."""
    booleans = "|".join(field.name.replace("_", "[-_]") for field in fields(Args) if field.type is bool)
    argv = re.sub(rf"^--({booleans})[\n=]True$", r"--\1", "\n".join(sys.argv[1:]), flags=re.M)
    argv = re.sub(rf"^--({booleans})[\n=]False$", r"--no-\1", argv, flags=re.M)
    argv = argv.split("\n") if argv else []
    args = tyro.cli(Args, args=argv)
    if args.resume:
        for name in ("args.json", "checkpoint.*", Path(__file__).name):
            if not any(Path(args.resume).glob(name)):
                fail(f"--resume {args.resume} is not a run of this script with a checkpoint: {name} is missing")
        saved = json.loads(Path(args.resume, "args.json").read_text())
        if saved.keys() != vars(args).keys():
            fail(f"--resume {args.resume} was begun by a version of this script with other flags: use its own copy")
        args = tyro.cli(Args, args=argv, default=Args(**saved))
        for flag in list(saved)[list(saved).index("env_id") :]:
            if saved[flag] != getattr(args, flag) and flag != "total_timesteps":
                fail(f"--resume continues the run as it began, with --{flag.replace('_', '-')} {saved[flag]}")
    for package in ["wandb"] * args.track + ["moviepy"] * args.capture_video:
        if find_spec(package) is None:
            fail(f"--track needs wandb and --capture-video moviepy: pip install {package}")
    args.save_model |= args.upload_model
    return args


def open_run(args, event_sizes):
    """Open the folder and the logger of the run, and write down all that it takes to repeat it."""
    run_dir = Path(args.resume)
    while not args.resume:
        run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
        run_dir = Path("runs", re.sub("[/:]", "-", run_name))
        try:
            run_dir.mkdir(parents=True)
            break
        except FileExistsError:
            time.sleep(1)  # another run took this name within the same second
    git = subprocess.run("git rev-parse HEAD", shell=True, cwd=Path(__file__).parent, capture_output=True, text=True)
    packages = sorted({"{Name}=={Version}\n".format_map(package.metadata) for package in distributions()})
    (run_dir / "commit.txt").write_text(git.stdout)
    (run_dir / "packages.txt").write_text("".join(packages))
    (run_dir / Path(__file__).name).write_bytes(Path(__file__).read_bytes())
    (run_dir / "command.txt").open("a").write(shlex.join(sys.orig_argv) + "\n")
    (run_dir / "args.tmp").write_text(json.dumps(vars(args), indent=2))
    os.replace(run_dir / "args.tmp", run_dir / "args.json")
    for file in run_dir.glob("events*"):  # a resumed run logs again what is newer than its checkpoint
        os.truncate(file, event_sizes.get(file.name, 0))
    if args.track:
        import wandb

        names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": run_dir.resolve().name}
        wandb.init(**names, id=names["name"], resume="allow", config=vars(args), sync_tensorboard=True, save_code=True)
    writer = SummaryWriter(run_dir)
    if not args.resume:
        table = "\n".join(f"|{flag}|{value}|" for flag, value in vars(args).items())
        writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}", 0)
    return run_dir, writer


def report(step, total, sps, returns):
    """One line on progress: a bar that is drawn over itself on a terminal, a plain line in a log."""
    bar = f"[{'#' * (20 * step // total):20}] step {step}/{total}"
    left = timedelta(seconds=int((total - step) / sps))
    line = f"{bar}  SPS {sps:.0f}  return {np.mean(returns or [np.nan]):.1f}  left {left}"
    print(f"{line:100}", end="\r" if sys.stdout.isatty() else "\n", flush=True)


def load_environment(env_id):
    """An environment of MuJoCo Playground or Brax and the length of its episodes; physics/name chooses the physics."""
    try:
        import brax.envs
        from mujoco_playground import registry
    except ImportError as error:
        raise ImportError(f"{env_id} needs: pip install playground brax ({error})") from error
    *physics, name = env_id.split("/")
    # inverted_pendulum is called InvertedPendulum
    ours = {"".join(map(str.capitalize, key.split("_"))): key for key in brax.envs._envs}
    engines = ["jax", "warp"] if name in registry.ALL_ENVS else ["spring", "positional", "generalized", "mjx"]
    physics = "/".join(physics) or engines[0]
    if physics not in engines:
        raise ValueError(f"the physics of {name} are one of {', '.join(engines)}, not {physics}")
    if name in registry.ALL_ENVS:
        length = registry.get_default_config(name).episode_length
        return registry.load(name, config_overrides={"impl": physics}), length
    if name in ours:
        return brax.envs.get_environment(ours[name], backend=physics), 1000
    near = get_close_matches(name, [*ours, *registry.ALL_ENVS], 3, 0.4)
    raise ValueError(f"no environment {name} in MuJoCo Playground or Brax; near: {', '.join(near) or 'none'}")


class JaxSimulator:
    """An environment of MuJoCo Playground or Brax, many times, in tensors that share the memory of JAX's arrays.

    The wrappers of these packages lose the final observation of an episode, so it ends and restarts here: in a state of
    a pool, as to draw states takes about as long as a step. The pool has one for each environment and is drawn again
    after every `episode_length` steps.
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
            raise ImportError("torch has a GPU, but JAX has not: pip install 'jax[cuda12]', or say --no-cuda")
        jax.config.update("jax_default_matmul_precision", "highest")  # physics in full float32
        self.jax, self.num_envs, self.device = jax, num_envs, device
        self.env, self.episode_length = load_environment(env_id)
        states = jax.eval_shape(self.env.reset, jax.random.PRNGKey(0))
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, self.observe(states).shape)
        self.single_action_space = gym.spaces.Box(-1, 1, (self.env.action_size,))
        self.draw, self.advance = jax.jit(self.draw), jax.jit(self.advance)

    def observe(self, states):
        if isinstance(states.obs, Mapping) and "state" not in states.obs:
            raise ValueError(f"the observations have no part called state, but {', '.join(states.obs)}")
        return states.obs["state"] if isinstance(states.obs, Mapping) else states.obs

    def draw(self, key):
        """First states, without JAX's weak types, which would have `advance` compiled twice."""
        states = self.jax.vmap(self.env.reset)(self.jax.random.split(key, self.num_envs))
        return self.jax.tree.map(lambda x: x.astype(x.dtype), states)

    def advance(self, states, ages, pool, key, actions):
        """A step of all environments; those whose episode ends are in a state of the pool afterwards."""
        jnp = self.jax.numpy
        key, draw_key = self.jax.random.split(key)
        states = self.jax.vmap(self.env.step)(states, actions.clip(-1, 1))
        ages, final_obs = ages + 1, self.observe(states)
        finite = jnp.isfinite(final_obs).all(1) & jnp.isfinite(states.reward)
        terminated, truncated = (states.done > 0) | ~finite, ages >= self.episode_length
        reward, done = jnp.where(finite, states.reward, 0), terminated | truncated
        drawn = (jnp.arange(self.num_envs) + self.jax.random.randint(draw_key, (), 0, self.num_envs)) % self.num_envs

        def restart(first, now):
            where = done.reshape(-1, *(1,) * (now.ndim - 1))
            return jnp.where(where, first[drawn], now).astype(first.dtype)

        states = self.jax.tree.map(restart, pool, states)
        outputs = self.observe(states), reward, terminated, truncated, final_obs
        return states, jnp.where(done, 0, ages), key, outputs

    def reset(self, seed):
        jax, idle = self.jax, torch.zeros((self.num_envs, *self.single_action_space.shape), device=self.device)
        seed = jax.device_put(jax.random.PRNGKey(seed), jax.devices()[0])  # what follows is bound to the device like it
        self.key, first_key, self.pool_key = jax.random.split(seed, 3)
        self.states, self.pool = self.draw(first_key), self.draw(jax.random.fold_in(self.pool_key, 0))
        self.ages = jax.device_put(np.zeros(self.num_envs, np.int32), jax.devices()[0])
        self.outputs = (self.observe(self.states),)
        now = self.states, self.ages, self.key, self.outputs
        self.steps = 0
        self.step(idle)  # compiles it
        self.states, self.ages, self.key, self.outputs = jax.block_until_ready(now)
        self.steps = 0
        return torch.from_dlpack(self.outputs[0])

    def step(self, actions):
        """Each side waits for the other's work on its own stream; the host does not wait.

        JAX may use the memory of an array again as soon as nobody holds it, while torch has yet to read it. So the last
        outputs are kept until JAX has been given the step that follows, which waits for the actions and so for torch.
        """
        self.steps += 1
        if self.steps % self.episode_length == 0:
            self.pool = self.draw(self.jax.random.fold_in(self.pool_key, self.steps))
        actions = self.jax.dlpack.from_dlpack(actions)
        self.states, self.ages, self.key, outputs = self.advance(self.states, self.ages, self.pool, self.key, actions)
        self.outputs = outputs
        return tuple(map(torch.from_dlpack, outputs))

    def render(self):
        """An image of environment 0."""
        import mujoco

        if not hasattr(self, "renderer"):
            model = self.env.mj_model if hasattr(self.env, "mj_model") else self.env.sys.mj_model
            self.data, self.renderer = mujoco.MjData(model), mujoco.Renderer(model)
        state = getattr(self.states, "data", None) or self.states.pipeline_state
        self.data.qpos = getattr(state, "qpos", getattr(state, "q", None))[0]
        if self.renderer.model.nmocap:
            self.data.mocap_pos, self.data.mocap_quat = state.mocap_pos[0], state.mocap_quat[0]
        mujoco.mj_forward(self.renderer.model, self.data)
        self.renderer.update_scene(self.data, camera=min(0, self.renderer.model.ncam - 1))
        return self.renderer.render()


class SimulatorEnvs:
    """A simulator with tensors for training (`step_tensors`), NumPy arrays for evaluation, and videos of both."""

    def __init__(self, simulator, device, video_folder=None, video_frequency=1464):
        self.simulator, self.device, self.num_envs = simulator, device, simulator.num_envs
        self.single_observation_space = simulator.single_observation_space
        self.single_action_space = simulator.single_action_space
        self.video_folder, self.video_frequency = video_folder, video_frequency
        self.simulator_steps, self.frames = 0, []

    def reset(self, seed):
        return self.simulator.reset(seed).cpu().numpy(), {}

    def step(self, actions):
        *arrays, _ = self.step_tensors(torch.as_tensor(actions, device=self.device))
        return *(array.cpu().numpy() for array in arrays), {}

    def step_tensors(self, actions):
        self.simulator_steps += 1
        if self.video_folder:
            self.film()
        return self.simulator.step(actions)

    def film(self):
        """A frame, if a clip is being made; clips are of 100 steps or, if that is less, the frequency."""
        start = (self.simulator_steps - 1) // self.video_frequency * self.video_frequency
        if len(self.frames) != self.simulator_steps - 1 - start:  # a resumed run waits for the next clip
            return
        self.frames.append(self.simulator.render())
        if len(self.frames) == min(100, self.video_frequency):
            from moviepy import ImageSequenceClip

            self.video_folder.mkdir(parents=True, exist_ok=True)
            path = self.video_folder / f"step-{start * self.num_envs}.mp4"
            ImageSequenceClip(self.frames, fps=30).write_videofile(path, logger=None)
            self.frames = []

    def close(self):
        getattr(self.simulator, "close", lambda: None)()


def make_envs(env_id, num_envs, seed, capture_video=False, run_name="", cuda=True):
    """`module:function` is called as function(num_envs, seed, device) and returns a simulator.

    That has `num_envs`, `single_observation_space`, `single_action_space`, `reset(seed)`, which returns observations,
    and `step(actions)`, which returns observations, rewards, terminated, truncated and final observations: tensors on
    the device, one row for each environment. An episode that ends restarts within the step: observations are then the
    first ones of the next episode, final observations the last ones of this (other rows do not matter). Actions have no
    bounds but those that the simulator sets. Optional are `render()`, an image of environment 0, and `close()`.
    """
    device = torch.device("cuda" if torch.cuda.is_available() and cuda else "cpu")
    if ":" in env_id:
        module, function = env_id.split(":")
        if not hasattr(import_module(module), function):
            raise ImportError(f"{module} has no function {function} that makes a simulator")
        simulator = getattr(import_module(module), function)(num_envs, seed, device)
    else:
        simulator = JaxSimulator(env_id, num_envs, device)
    return SimulatorEnvs(simulator, device, Path("runs", run_name, "videos") if capture_video else None)


def layer_init(layer, std=2**0.5):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Layers(nn.Sequential):
    def forward(self, x):  # without nn.Module.__call__ and its hooks, which take as long as such a layer
        for layer in self:
            x = layer.forward(x)
        return x


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()

        def mlp(outputs, std):
            hidden = [layer_init(nn.Linear(inputs, 256)), nn.Tanh(), layer_init(nn.Linear(256, 256)), nn.Tanh()]
            return Layers(*hidden, layer_init(nn.Linear(256, outputs), std))

        inputs = int(np.prod(envs.single_observation_space.shape))
        outputs = int(np.prod(envs.single_action_space.shape))
        self.actor_mean = mlp(outputs, std=0.01)
        self.actor_logstd = nn.Parameter(torch.zeros(outputs))
        self.critic = mlp(1, std=1.0)

    def get_value(self, obs):
        return self.critic(obs).squeeze(-1)

    def get_action(self, obs, deterministic=False):
        mean = self.actor_mean(obs)
        return mean if deterministic else mean + self.actor_logstd.exp() * torch.randn_like(mean)

    def evaluate(self, obs, action):
        mean = self.actor_mean(obs)
        z = (action - mean) / self.actor_logstd.exp()
        logprob = -0.5 * (z**2).sum(-1) - (self.actor_logstd + 0.5 * math.log(2 * math.pi)).sum()
        entropy = (self.actor_logstd + 0.5 * math.log(2 * math.pi * math.e)).sum().expand(len(obs))
        return logprob, entropy, self.critic(obs).squeeze(-1)


def gae_on_device(rewards, values, next_value, dones, final_values, gamma, gae_lambda):
    """Generalised advantages (Schulman et al. 2016, eq. 16) of (num_steps, num_envs) tensors.

    What follows the end of an episode is worth `final_values`: V(final observation) if it was truncated, else zero.
    """
    advantages, advantage = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * torch.where(dones[t], final_values[t], next_value) - values[t]
        advantages[t] = advantage = delta + gamma * gae_lambda * ~dones[t] * advantage
        next_value = values[t]
    return advantages


def finish_episodes(rewards, dones, episode_returns, episode_lengths):
    """The number of episodes that ended in a rollout, and the sums of their returns and lengths.

    Returns and lengths so far are updated in place.
    """
    ended, returns, lengths = torch.zeros((3, *rewards.shape), device=rewards.device)
    for t in range(len(rewards)):
        episode_returns += rewards[t]
        episode_lengths += 1
        ended[t] = dones[t]
        returns[t], lengths[t] = (torch.where(dones[t], x, 0) for x in (episode_returns, episode_lengths))
        episode_returns.masked_fill_(dones[t], 0)
        episode_lengths.masked_fill_(dones[t], 0)
    return ended.sum(), returns.sum(), lengths.sum()


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
    """Replay `function` as a CUDA graph; its first calls run eagerly, so that the warm-up does real work too."""
    graph, calls = torch.cuda.CUDAGraph(), 0

    def call():
        nonlocal calls
        calls += 1
        if calls <= warmup:
            return function()
        if calls == warmup + 1:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                function()
        graph.replay()

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


def load_policy(run_dir, envs, device, deterministic=False):
    """The saved agent of a run, as a function from a batch of observations to a batch of actions."""
    agent = Agent(envs).to(device)
    agent.load_state_dict(load_file(Path(run_dir, "model.safetensors"), str(device)))
    return torch.no_grad()(
        lambda obs: agent.get_action(torch.tensor(obs, dtype=torch.float32, device=device), deterministic).cpu().numpy()
    )


if __name__ == "__main__":
    # Run directory and logger
    stop_signals = []
    signal.signal(signal.SIGTERM, lambda *received: stop_signals.append(received))
    args = parse_args()
    if min(args.num_envs, args.num_steps, args.num_minibatches, args.update_epochs, args.checkpoint_freq) < 1:
        fail("--num-envs, --num-steps, --num-minibatches, --update-epochs and --checkpoint-freq must be at least 1")
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = args.total_timesteps // batch_size
    if batch_size % args.num_minibatches or minibatch_size < 2:
        fail(f"--num-minibatches must divide the rollout of {batch_size} steps into minibatches of two steps or more")
    if num_iterations == 0:
        fail(f"--total-timesteps must be at least one rollout of {batch_size} steps")
    if args.record_video_step_frequency < 1:
        fail("--record-video-step-frequency must be at least 1")
    if args.capture_video and sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")  # renders without a screen, if set before MuJoCo is imported
    try:
        envs = make_envs(args.env_id, args.num_envs, args.seed, cuda=args.cuda)  # before anything is written
    except (ImportError, ValueError) as error:
        fail(error)
    if not isinstance(envs.single_action_space, gym.spaces.Box) or len(envs.single_action_space.shape) != 1:
        fail(f"{args.env_id} needs a vector of continuous actions; ppo.py handles discrete ones")
    if len(envs.single_observation_space.shape or ()) != 1:
        fail(f"{args.env_id} needs vector observations; ppo_atari.py handles the images of Atari games")
    if args.capture_video and not hasattr(envs.simulator, "render"):
        fail(f"{args.env_id} cannot render images: leave --capture-video out")
    checkpoint = torch.load(Path(args.resume, "checkpoint.pt"), map_location="cpu") if args.resume else {}
    run_dir, writer = open_run(args, checkpoint.get("events", {}))
    envs.video_folder = run_dir / "videos" if args.capture_video else None
    envs.video_frequency = args.record_video_step_frequency

    # Seeding
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
    else:
        torch.set_num_threads(1)  # a thread pool slows networks of this size down

    # Agent and optimizer
    agent = Agent(envs).to(device)
    weights = flatten(agent)
    lr = torch.tensor(args.learning_rate, device=device)
    optimizer = torch.optim.Adam([weights], lr=lr, eps=1e-5, fused=True, capturable=device.type == "cuda")

    # Storage: all of it on the device, where a graph needs it to stay in place
    shape = args.num_steps, args.num_envs
    obs, final_obs = torch.zeros((2, *shape, *envs.single_observation_space.shape), device=device)
    actions = torch.zeros((*shape, *envs.single_action_space.shape), device=device)
    rewards, (terminated, truncated) = torch.zeros(shape, device=device), torch.zeros((2, *shape), device=device).bool()
    act_obs, act_action = torch.zeros_like(obs[0]), torch.zeros_like(actions[0])
    b_obs, b_actions = obs.flatten(0, 1), actions.flatten(0, 1)
    b_logprobs, b_values, b_advantages, b_returns = torch.zeros((4, batch_size), device=device)
    mb_inds = torch.zeros(minibatch_size, dtype=torch.long, device=device)
    loss_names = ["value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac"]
    losses = torch.zeros(len(loss_names), device=device)  # sums over an update
    episode_returns, episode_lengths = torch.zeros((2, args.num_envs), device=device)
    statistics = torch.zeros(4, device=device)  # of a rollout: explained variance, then finished episodes
    recent_returns = deque(maxlen=20)

    @torch.no_grad()
    def act():
        act_action.copy_(agent.get_action(act_obs))

    @torch.no_grad()
    def targets():
        global advantages
        b_logprobs[:], _, b_values[:] = agent.evaluate(b_obs, b_actions)
        dones, values = terminated | truncated, b_values.view(shape)
        final_values = torch.where(truncated & ~terminated, agent.get_value(final_obs), 0)
        after = agent.get_value(act_obs), dones, final_values
        advantages = gae_on_device(args.reward_scaler * rewards, values, *after, args.gamma, args.gae_lambda)
        b_advantages.copy_(advantages.flatten())
        b_returns.copy_(b_advantages + b_values)
        episodes = finish_episodes(rewards, dones, episode_returns, episode_lengths)
        statistics.copy_(torch.stack([1 - b_advantages.var() / b_returns.var(), *episodes]))

    def update():
        global ratio, pg_loss, v_loss, entropy_loss, approx_kl, loss
        newlogprob, entropy, newvalue = agent.evaluate(b_obs[mb_inds], b_actions[mb_inds])
        mb_values, mb_returns, mb_advantages = b_values[mb_inds], b_returns[mb_inds], b_advantages[mb_inds]
        if args.norm_adv:
            mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)

        logratio = newlogprob - b_logprobs[mb_inds]
        ratio = logratio.exp()
        clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
        pg_loss = -torch.min(mb_advantages * ratio, mb_advantages * clipped_ratio).mean()  # eq. 7
        v_error = (newvalue - mb_returns) ** 2
        if args.clip_vloss:
            clipped_value = mb_values + (newvalue - mb_values).clamp(-args.clip_coef, args.clip_coef)
            v_error = torch.max(v_error, (clipped_value - mb_returns) ** 2)
        v_loss = 0.5 * v_error.mean()
        entropy_loss = entropy.mean()
        loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss  # eq. 9

        weights.grad.zero_()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
        optimizer.step()
        with torch.no_grad():
            old_approx_kl = -logratio.mean()
            approx_kl = ((ratio - 1) - logratio).mean()  # estimator k3 of http://joschu.net/blog/kl-approx.html
            clipfrac = (ratio != clipped_ratio).float().mean()
            losses.add_(torch.stack([v_loss, pg_loss, entropy_loss, old_approx_kl, approx_kl, clipfrac]))

    if device.type == "cuda" and args.cuda_graphs:
        act, targets, update = cuda_graph(act), cuda_graph(targets), cuda_graph(update)

    # Resume
    def save_checkpoint():
        writer.flush()
        state = {"global_step": global_step, "agent": agent.state_dict(), "optimizer": optimizer.state_dict()["state"]}
        state["rng"] = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if device.type == "cuda" else [])
        state["events"] = {file.name: file.stat().st_size for file in run_dir.glob("events*")}
        torch.save(state, run_dir / "unfinished.tmp")
        os.replace(run_dir / "unfinished.tmp", run_dir / "checkpoint.pt")

    global_step = 0
    if args.resume:
        global_step = checkpoint["global_step"]
        agent.load_state_dict(checkpoint["agent"])
        optimizer.load_state_dict(optimizer.state_dict() | {"state": checkpoint["optimizer"]})
        torch.set_rng_state(checkpoint["rng"][0])
        if device.type == "cuda" and len(checkpoint["rng"]) == 2:
            torch.cuda.set_rng_state(checkpoint["rng"][1])
    else:
        save_checkpoint()

    # Training loop
    envs.simulator_steps = global_step // args.num_envs
    next_obs = envs.simulator.reset(args.seed + global_step)
    start_time, start_step = time.perf_counter(), global_step  # the simulator has been compiled
    for iteration in range(global_step // batch_size, num_iterations):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"].fill_((1 - iteration / num_iterations) * args.learning_rate)

        # Act: the host only puts work into the queue of the device
        for step in range(args.num_steps):
            act_obs.copy_(next_obs)
            act()
            obs[step], actions[step] = act_obs, act_action
            next_obs, rewards[step], terminated[step], truncated[step], final_obs[step] = envs.step_tensors(act_action)
            global_step += args.num_envs

        # Targets: the weights have not changed during the rollout, so one batch serves all its steps
        act_obs.copy_(next_obs)
        targets()

        # Learn
        losses.zero_()
        for epoch in range(args.update_epochs):
            for inds in torch.randperm(batch_size, device=device).split(minibatch_size):
                mb_inds.copy_(inds)
                update()
            if args.target_kl is not None and approx_kl > args.target_kl:
                break

        # Log: the one transfer to the host
        means = losses / ((epoch + 1) * args.num_minibatches)
        lr = optimizer.param_groups[0]["lr"]  # a state that was loaded has brought its own
        numbers = torch.cat([means, statistics, torch.stack([lr, weights.detach().sum()])]).tolist()
        *means, explained_variance, episodes, returns, lengths, learning_rate, weight_sum = numbers
        if not np.isfinite([*means, weight_sum]).all():
            sys.exit(f"\nLosses are not finite at step {global_step}: {means}. Last good checkpoint: {run_dir}")
        for name, mean in zip(loss_names, means):
            writer.add_scalar(f"losses/{name}", mean, global_step)
        writer.add_scalar("losses/explained_variance", explained_variance, global_step)
        writer.add_scalar("charts/learning_rate", learning_rate, global_step)
        if episodes:
            writer.add_scalar("charts/episodic_return", returns / episodes, global_step)
            writer.add_scalar("charts/episodic_length", lengths / episodes, global_step)
            writer.add_scalar("charts/episodes", episodes, global_step)
            recent_returns.append(returns / episodes)
        sps = (global_step - start_step) / (time.perf_counter() - start_time)
        writer.add_scalar("charts/SPS", int(sps), global_step)
        if sys.stdout.isatty() or iteration % (num_iterations // 100 + 1) == 0:
            report(global_step, args.total_timesteps, sps, recent_returns)

        # Checkpoint
        if stop_signals or global_step % args.checkpoint_freq < batch_size or iteration == num_iterations - 1:
            save_checkpoint()
        if stop_signals:
            print(f"\nStopped at step {global_step}. To continue: python {sys.argv[0]} --resume {run_dir}")
            sys.exit(75)  # schedulers start such a job again

    # Save and close
    signal.signal(signal.SIGTERM, lambda *received: sys.exit(75))
    envs.close()
    if args.save_model:
        save_file(agent.state_dict(), run_dir / "model.safetensors")
        eval_envs = make_envs(args.env_id, 10, args.seed, cuda=args.cuda)
        eval_returns = evaluate(load_policy(run_dir, eval_envs, device), eval_envs, seed=args.seed + 2**30)
        for i, episodic_return in enumerate(eval_returns):
            writer.add_scalar("eval/episodic_return", episodic_return, i)
        print(f"\nEvaluation on held-out seeds: {eval_returns.mean():.2f} +- {eval_returns.std():.2f}")
    writer.close()
    if args.upload_model:
        push = ["-m", "cleanrl_utils.hub", "push", str(run_dir)] + ["--entity", args.hf_entity] * bool(args.hf_entity)
        if subprocess.run([sys.executable, *push]).returncode != 0:
            print(f"\nNot on the hub yet. To push it, where cleanrl_utils is installed: python {shlex.join(push)}")
    print(f"\nThe run is in {run_dir}. To look at it: tensorboard --logdir {run_dir}")
