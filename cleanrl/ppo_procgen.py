# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "envpool>=1.2; sys_platform == 'linux'", "gymnasium>=1.2", "numpy>=2", "pyqt5-qt5>=5.15; sys_platform == 'linux'",
#     "safetensors>=0.5", "tensorboard>=2.19", "torch>=2.8", "tyro>=0.9",
# ]
# ///
"""Proximal Policy Optimization (PPO, Schulman et al. 2017, arXiv:1707.06347): Procgen games of EnvPool.

Differs from ppo_atari_envpool.py:
1. Procgen (Cobbe et al. 2020, arXiv:1912.01588): each episode is a level of its own, drawn from all levels or from
   --num-levels of them; colour images of 64x64 without a stack, no lives; the evaluation at the end draws from all;
2. the residual network of IMPALA (Espeholt et al. 2018, arXiv:1802.01561), with torch's own initialisation below the
   heads;
3. rewards are divided by the deviation of the discounted return and clipped to +-10, not reduced to their signs;
4. values and log-probabilities of a rollout are computed by minibatches: whole, its feature maps would take 4 GB.

Differs from the paper:
1. advantages are standardised per minibatch, value losses clipped like ratios, gradients clipped to a global norm;
2. an episode cut off by a time limit is bootstrapped from its final observation.

Run: python ppo_procgen.py --env-id starpilot --total-timesteps 25000000
"""

import ctypes
import difflib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from ctypes.util import find_library
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.tensorboard import SummaryWriter

try:  # Procgen draws with Qt 5, which has to be there when EnvPool is imported: the system's, or that of PyQt5-Qt5
    import PyQt5

    for library in ("Core", "Gui") if find_library("Qt5Gui") is None else ():
        ctypes.CDLL(f"{PyQt5.__path__[0]}/Qt5/lib/libQt5{library}.so.5")
except (ImportError, OSError):  # make_envs says what to do
    pass
try:
    import envpool
except ImportError:  # make_envs says what to do
    envpool = None


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
    checkpoint_freq: int = 100_000  # environment steps between checkpoints

    env_id: str = "starpilot"  # environment
    distribution_mode: Literal["easy", "hard"] = "easy"  # difficulty of the levels
    num_levels: int = 0  # levels to train on (0: all)
    start_level: int = 0  # first of the --num-levels levels
    total_timesteps: int = 25_000_000  # environment steps in total
    learning_rate: float = 5e-4  # step size of the optimizer
    num_envs: int = 64  # parallel environments
    num_steps: int = 256  # rollout length per environment
    anneal_lr: bool = False  # decay the learning rate linearly to zero
    gamma: float = 0.999  # discount
    gae_lambda: float = 0.95  # trace parameter of the advantage estimate
    num_minibatches: int = 8  # minibatches per epoch
    update_epochs: int = 3  # passes over each rollout
    norm_adv: bool = True  # standardise advantages per minibatch
    clip_coef: float = 0.2  # clip range of ratios and values
    clip_vloss: bool = True  # clip the value loss
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # ceiling of the global gradient norm
    target_kl: float | None = None  # end an update's epochs once the approximate KL exceeds this


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


class SameStepProcgen:
    """EnvPool, but a finished game restarts within its last step, where EnvPool would spend the next step on that."""

    def __init__(self, env_id, num_envs, **options):
        self.make = partial(envpool.make, env_id, env_type="gymnasium", num_envs=num_envs, **options)
        spec = envpool.make_spec(env_id, num_envs=num_envs, **options)
        self.single_observation_space, self.single_action_space = spec.observation_space, spec.action_space
        self.num_envs = num_envs

    def reset(self, seed):
        self.pool = self.make(seed=seed % 2**31)  # EnvPool takes a seed only when it is made
        return self.pool.reset()

    def step(self, actions):
        obs, reward, terminated, truncated, infos = self.pool.step(actions)
        game_over, final_obs = terminated | truncated, obs
        if game_over.any():
            first_obs, infos = self.pool.reset(np.flatnonzero(game_over).astype(np.int32))
            obs = obs.copy()
            obs[infos["env_id"]] = first_obs
        return obs, reward, terminated, truncated, {"final_obs": final_obs}

    def close(self):
        self.pool.close()


def make_envs(env_id, num_envs, distribution_mode="easy", **options):
    if envpool is None:
        raise ImportError("EnvPool is missing: pip install envpool PyQt5-Qt5 (Linux only, ppo_atari.py runs elsewhere)")
    games = [name.removesuffix("Easy-v0").lower() for name in envpool.list_all_envs() if name.endswith("Easy-v0")]
    if env_id not in games:
        near = ", ".join(difflib.get_close_matches(env_id, games) or games)
        others = "ppo.py, ppo_continuous_action.py or ppo_atari_envpool.py"
        raise gym.error.Error(f"Procgen has no {env_id}; its names are like {near} (other environments: {others})")
    try:
        return SameStepProcgen(f"{env_id.capitalize()}{distribution_mode.capitalize()}-v0", num_envs, **options)
    except ImportError as error:
        raise ImportError("Procgen needs Qt 5 and OpenGL: pip install PyQt5-Qt5; apt-get install libgl1") from error


def film_level(policy, env_id, levels, seed, path):
    """An episode of the policy, with the images that it sees, enlarged."""
    from moviepy import ImageSequenceClip

    envs = make_envs(env_id, 1, **levels, render_mode="rgb_array", render_width=256, render_height=256)
    frames = []

    def film(obs):
        frames.append(envs.pool.render()[0])
        del frames[4500:]  # five minutes are enough
        return policy(obs)

    evaluate(film, envs, seed)
    envs.close()
    path.parent.mkdir(exist_ok=True)
    ImageSequenceClip(frames, fps=15).write_videofile(path, logger=None)


def layer_init(layer, std=2**0.5):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class RunningMeanStd(nn.Module):
    """Mean and standard deviation of all rows seen so far (Chan et al. 1979); part of the model, saved with it."""

    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("count", torch.tensor(1e-4))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("std", torch.ones(shape))

    def update(self, x):
        delta, total = x.mean(0) - self.mean, self.count + len(x)
        squares = self.count * self.std**2 + len(x) * x.var(0, correction=0) + delta**2 * self.count * len(x) / total
        self.std.copy_((squares / total).clamp(min=1e-8).sqrt())
        self.mean.add_(delta * len(x) / total)
        self.count.copy_(total)


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        convolutions = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)]
        self.layers = nn.Sequential(nn.ReLU(), convolutions[0], nn.ReLU(), convolutions[1])

    def forward(self, x):
        return x + self.layers(x)


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        layers, channels = [], 3
        for width in (16, 32, 32):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
            layers += [ResidualBlock(width), ResidualBlock(width)]
            channels = width
        self.network = nn.Sequential(*layers, nn.Flatten(), nn.ReLU(), nn.Linear(32 * 8 * 8, 256), nn.ReLU())
        self.actor = layer_init(nn.Linear(256, envs.single_action_space.n), std=0.01)
        self.critic = layer_init(nn.Linear(256, 1), std=1.0)
        self.return_rms = RunningMeanStd()

    def features(self, obs):
        return self.network(obs.contiguous(memory_format=torch.channels_last) / 255)  # a layout of twice the speed

    def get_value(self, obs):
        return self.critic(self.features(obs)).squeeze(-1)

    def get_action(self, obs, deterministic=False):
        logits = self.actor(self.features(obs))
        if not deterministic:  # Gumbel-max draw from the softmax
            logits = logits - torch.empty_like(logits).exponential_().log()
        return logits.argmax(-1)

    def evaluate(self, obs, action):
        hidden = self.features(obs)
        logprobs = self.actor(hidden).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return -nn.functional.nll_loss(logprobs, action, reduction="none"), entropy, self.critic(hidden).squeeze(-1)


def gae(rewards, values, next_value, dones, final_values, gamma, gae_lambda):
    """Generalised advantages (Schulman et al. 2016, eq. 16) of (num_steps, num_envs) arrays.

    What follows the end of an episode is worth `final_values`: V(final observation) if it was truncated, else zero.
    """
    advantages, advantage = np.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * np.where(dones[t], final_values[t], next_value) - values[t]
        advantages[t] = advantage = delta + gamma * gae_lambda * (1 - dones[t]) * advantage
        next_value = values[t]
    return advantages


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
    if min(args.num_levels, args.start_level) < 0 or args.num_levels + args.start_level > 2**31:
        fail("--num-levels and --start-level count levels from 0 to 2147483647")
    if args.start_level and not args.num_levels:
        fail("--start-level needs --num-levels: without it, all levels are played")
    levels = {key: getattr(args, key) for key in ("distribution_mode", "num_levels", "start_level")}
    try:
        envs = make_envs(args.env_id, 1, **levels)  # a first look, before anything is written
    except (gym.error.Error, ImportError) as error:
        fail(error)
    checkpoint = torch.load(Path(args.resume, "checkpoint.pt"), map_location="cpu") if args.resume else {}
    run_dir, writer = open_run(args, checkpoint.get("events", {}))

    # Seeding
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured

    # Environments
    envs = make_envs(args.env_id, args.num_envs, **levels)

    # Agent and optimizer
    agent = Agent(envs).to(device)
    weights = flatten(agent)
    lr = torch.tensor(args.learning_rate, device=device)
    optimizer = torch.optim.Adam([weights], lr=lr, eps=1e-5, fused=True, capturable=device.type == "cuda")

    # Storage: environments fill NumPy arrays, networks read tensors on the device; a graph needs both to stay in place
    obs_shape = (args.num_steps, args.num_envs, *envs.single_observation_space.shape)
    obs = torch.zeros(obs_shape, dtype=torch.uint8, pin_memory=device.type == "cuda").numpy()
    actions = np.zeros((args.num_steps, args.num_envs, *envs.single_action_space.shape), dtype=np.int64)
    rewards, dones, final_values, discounted_returns = np.zeros((4, args.num_steps, args.num_envs), dtype=np.float32)
    act_obs, act_action = torch.tensor(obs[0], device=device), torch.tensor(actions[0], device=device)
    b_obs, b_actions = (torch.tensor(x, device=device).flatten(0, 1) for x in (obs, actions))
    b_logprobs, b_values, b_advantages, b_returns = torch.zeros((4, batch_size), device=device)
    mb_inds = torch.zeros(minibatch_size, dtype=torch.long, device=device)
    loss_names = ["value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac"]
    losses = torch.zeros(len(loss_names), device=device)  # sums over an update
    episode_returns, episode_lengths, discounted_return = np.zeros((3, args.num_envs))
    recent_returns = deque(maxlen=20)

    @torch.no_grad()
    def act():
        act_action.copy_(agent.get_action(act_obs))

    @torch.no_grad()
    def value(x):
        return agent.get_value(torch.as_tensor(x, dtype=b_obs.dtype, device=device)).cpu().numpy()

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
        act, update = cuda_graph(act), cuda_graph(update)

    # Resume
    def save_checkpoint():
        writer.flush()
        state = {"global_step": global_step, "agent": agent.state_dict(), "optimizer": optimizer.state_dict()["state"]}
        state["rng"] = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if device.type == "cuda" else [])
        state["recent_returns"] = [float(episodic_return) for episodic_return in recent_returns]
        state["events"] = {file.name: file.stat().st_size for file in run_dir.glob("events*")}
        torch.save(state, run_dir / "unfinished.tmp")
        os.replace(run_dir / "unfinished.tmp", run_dir / "checkpoint.pt")

    global_step = 0
    if args.resume:
        global_step = checkpoint["global_step"]
        agent.load_state_dict(checkpoint["agent"])
        recent_returns.extend(checkpoint["recent_returns"])
        optimizer.load_state_dict(optimizer.state_dict() | {"state": checkpoint["optimizer"]})
        torch.set_rng_state(checkpoint["rng"][0])
        if device.type == "cuda" and len(checkpoint["rng"]) == 2:
            torch.cuda.set_rng_state(checkpoint["rng"][1])
    else:
        save_checkpoint()

    # Training loop
    start_time, start_step = time.perf_counter(), global_step
    next_obs, infos = envs.reset(seed=args.seed + global_step)
    for iteration in range(global_step // batch_size, num_iterations):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"].fill_((1 - iteration / num_iterations) * args.learning_rate)

        # Act
        final_values[:] = 0
        for step in range(args.num_steps):
            obs[step] = next_obs
            act_obs.copy_(torch.from_numpy(obs[step]), non_blocking=True)
            act()
            actions[step] = act_action.cpu().numpy()
            next_obs, reward, terminated, truncated, infos = envs.step(actions[step])
            rewards[step], dones[step] = reward, terminated | truncated
            discounted_returns[step] = discounted_return = args.gamma * discounted_return + reward
            episode_returns += reward
            episode_lengths += 1
            cut = truncated & ~terminated
            if cut.any():
                final_values[step, cut] = value(np.stack(infos["final_obs"][cut]))
            for i in np.flatnonzero(dones[step]):  # environment i has made step number global_step + i + 1
                writer.add_scalar("charts/episodic_return", episode_returns[i], global_step + i + 1)
                writer.add_scalar("charts/episodic_length", episode_lengths[i], global_step + i + 1)
                recent_returns.append(episode_returns[i])
                episode_returns[i] = episode_lengths[i] = discounted_return[i] = 0
            global_step += args.num_envs

        # Targets: the weights have not changed during the rollout, so one batch serves all its steps
        b_obs.copy_(torch.from_numpy(obs).flatten(0, 1))
        b_actions.copy_(torch.from_numpy(actions).flatten(0, 1))
        with torch.no_grad():
            for inds in torch.arange(batch_size, device=device).split(minibatch_size):
                b_logprobs[inds], _, b_values[inds] = agent.evaluate(b_obs[inds], b_actions[inds])
        agent.return_rms.update(torch.from_numpy(discounted_returns).flatten().to(device))
        scaled_rewards = (rewards / agent.return_rms.std.item()).clip(-10, 10)
        values = b_values.cpu().numpy().reshape(rewards.shape)
        advantages = gae(scaled_rewards, values, value(next_obs), dones, final_values, args.gamma, args.gae_lambda)
        b_advantages.copy_(torch.from_numpy(advantages).flatten())
        b_returns.copy_(b_advantages + b_values)

        # Learn
        losses.zero_()
        for epoch in range(args.update_epochs):
            for inds in torch.randperm(batch_size, device=device).split(minibatch_size):
                mb_inds.copy_(inds)
                update()
            if args.target_kl is not None and approx_kl > args.target_kl:
                break

        # Log
        means = (losses / ((epoch + 1) * args.num_minibatches)).tolist()
        if not np.isfinite([*means, weights.sum().item()]).all():
            sys.exit(f"\nLosses are not finite at step {global_step}: {means}. Last good checkpoint: {run_dir}")
        for name, mean in zip(loss_names, means):
            writer.add_scalar(f"losses/{name}", mean, global_step)
        writer.add_scalar("losses/explained_variance", 1 - advantages.var() / (advantages + values).var(), global_step)
        writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"].item(), global_step)
        sps = (global_step - start_step) / (time.perf_counter() - start_time)
        writer.add_scalar("charts/SPS", int(sps), global_step)
        if sys.stdout.isatty() or iteration % (num_iterations // 100 + 1) == 0:
            report(global_step, args.total_timesteps, sps, recent_returns)

        # Checkpoint
        if args.capture_video and iteration % (num_iterations // 10 + 1) == 0:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                policy = torch.no_grad()(lambda obs: agent.get_action(torch.tensor(obs, device=device)).cpu().numpy())
                film_level(policy, args.env_id, levels, args.seed, run_dir / f"videos/step-{global_step}.mp4")
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
        eval_envs = make_envs(args.env_id, 10, args.distribution_mode)
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
