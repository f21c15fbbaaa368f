# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "gymnasium>=1.3", "memory-gym>=1.0.2", "minigrid>=3", "numpy>=2", "safetensors>=0.5", "tensorboard>=2.19",
#     "torch>=2.8", "tyro>=0.9",
# ]
# [tool.uv]
# override-dependencies = ["gymnasium>=1.3", "pygame; sys_platform == 'never'"]  # memory-gym's pins; pygame-ce serves
# ///
"""Proximal Policy Optimization (PPO, Schulman et al. 2017, arXiv:1707.06347) with an episodic Transformer-XL memory.

The memory is that of Memory Gym's baseline (Pleines et al. 2023, arXiv:2309.17207) after Transformer-XL (Dai et al.
2019, arXiv:1901.02860): each layer keeps what it got at each step, and a step attends to the last
--trxl-memory-length steps of its own episode. What is kept gets no gradient and stays as it was computed, also when
the episode goes on in the next rollout, under newer weights.

Differs from ppo.py:
1. images of 84 x 84 x 3 go through a convolutional network, vectors through one layer, and both through Transformer-XL
   layers, with one policy branch for each dimension of the action and a value head behind them;
2. a decoder may learn to reconstruct the images (--reconstruction-coef), which helps the layers to see;
3. AdamW; step size and weight of the entropy bonus decay over --anneal-steps; the value loss is not halved;
4. the means of the last 100 episodes are logged, of all numbers that the environment reports at an episode's end.

Differs from the paper of Memory Gym and its code:
1. scores are divided by the root of a head's dimension, not of the whole, and heads have projections of their own;
2. the first step of an episode, which has nothing to attend to, gets zeros for it rather than a mean of empty slots;
3. layers are normalised before positions are added, without gains and biases: the weights that follow have these;
4. learned positional codes belong to distances in time, not to time steps: episodes may have any length;
5. the ratio is that of the whole action, not of each of its dimensions;
6. an episode cut off by a time limit is bootstrapped from its final observation, with the memory of that episode.

Run: python ppo_trxl.py --env-id MortarMayhem-Grid-v0 --total-timesteps 200000000
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, fields
from datetime import timedelta
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

try:
    import memory_gym  # registers its environments
    import minigrid.wrappers
except ImportError:  # make_env says what to do
    memory_gym = minigrid = None


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

    env_id: str = "MortarMayhem-Grid-v0"  # environment
    total_timesteps: int = 200_000_000  # environment steps in total
    init_lr: float = 2.75e-4  # step size of the optimizer at the start
    final_lr: float = 1e-5  # step size of the optimizer after the decay
    num_envs: int = 32  # parallel environments
    num_steps: int = 512  # rollout length per environment
    anneal_steps: int = 163_840_000  # environment steps over which step size and entropy bonus decay linearly
    gamma: float = 0.995  # discount
    gae_lambda: float = 0.95  # trace parameter of the advantage estimate
    num_minibatches: int = 8  # minibatches per epoch
    update_epochs: int = 3  # passes over each rollout
    norm_adv: bool = False  # standardise advantages per minibatch
    clip_coef: float = 0.1  # clip range of ratios and values
    clip_vloss: bool = True  # clip the value loss
    init_ent_coef: float = 1e-4  # weight of the entropy bonus at the start
    final_ent_coef: float = 1e-6  # weight of the entropy bonus after the decay
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.25  # ceiling of the global gradient norm
    target_kl: float | None = None  # end an update's epochs once the approximate KL exceeds this
    trxl_num_layers: int = 3  # Transformer-XL layers
    trxl_num_heads: int = 4  # attention heads of a layer
    trxl_dim: int = 384  # width of the layers
    trxl_memory_length: int = 119  # past steps of the episode that a step attends to
    trxl_positional_encoding: Literal["none", "absolute", "learned"] = "absolute"  # of the steps in the memory
    reconstruction_coef: float = 0.0  # weight of the loss of reconstructing the images; 0: no decoder


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


class SyncWithStarts(gym.vector.SyncVectorEnv):
    """`starts` tells where the observations are the first ones of an episode: networks with memory need it."""

    def reset(self, **options):
        self.starts = np.ones(self.num_envs, dtype=bool)
        return super().reset(**options)

    def step(self, actions):
        obs, reward, terminated, truncated, infos = super().step(actions)
        self.starts = terminated | truncated
        return obs, reward, terminated, truncated, infos


def make_env(env_id, seed, idx, capture_video, run_name):
    def thunk():
        if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
            os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
        in_minigrid = env_id.startswith("MiniGrid-")
        if memory_gym is None and (in_minigrid or env_id not in gym.registry and ":" not in env_id):
            needs = "pip install pygame-ce minigrid && pip install --no-deps memory-gym==1.0.2"
            raise ImportError(f"{env_id} is not known without Memory Gym and MiniGrid: {needs}")
        video = capture_video and idx == 0
        view = {"agent_view_size": 3} if in_minigrid else {}
        env = gym.make(env_id, render_mode="rgb_array" if video else None, **view)
        if in_minigrid:  # what the agent sees of the grid, 3 x 3 tiles, as an image
            env = minigrid.wrappers.RGBImgPartialObsWrapper(env, tile_size=28)
            env = gym.wrappers.TimeLimit(minigrid.wrappers.ImgObsWrapper(env), 96)
        if video:
            env = gym.wrappers.RecordVideo(env, str(Path("runs", run_name, "videos")), name_prefix=f"{time.time():.0f}")
        env.action_space.seed(seed + idx)
        return env

    return thunk


def make_envs(env_id, num_envs, seed, capture_video=False, run_name=""):
    thunks = [make_env(env_id, seed, i, capture_video, run_name) for i in range(num_envs)]
    return SyncWithStarts(thunks, copy=False, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


def layer_init(layer, std=2**0.5):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Scale(nn.Module):
    def forward(self, images):  # (batch, height, width, channels) of bytes -> (batch, channels, height, width) in 0..1
        return images.permute(0, 3, 1, 2) / 255


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017) of one query to a window of memory.

    The window is not projected to keys and values, but the query to where the window is, and the mean of the window to
    a value: the same numbers for a fraction of the work.
    """

    def __init__(self, dim, num_heads):
        super().__init__()
        self.queries, self.out = layer_init(nn.Linear(dim, dim), std=1.0), layer_init(nn.Linear(dim, dim), std=1.0)
        keys, values = (nn.init.orthogonal_(torch.empty(dim, dim)).view(num_heads, -1, dim) for _ in range(2))
        self.keys, self.values = nn.Parameter(keys), nn.Parameter(values)  # each (heads, dim of a head, dim)

    def forward(self, x, window, mask):
        """x (batch, dim), window (batch, length, dim), mask (batch, length) of what is there."""
        queries = self.queries(x).unflatten(-1, self.keys.shape[:2])
        looks = torch.einsum("bhd,hdi->bhi", queries, self.keys)
        scores = torch.einsum("bhi,bli->bhl", looks, window) / self.keys.shape[1] ** 0.5
        mask = mask.unsqueeze(1)
        shares = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1) * mask
        means = torch.einsum("bhl,bli->bhi", shares, window)
        return self.out(torch.einsum("bhi,hdi->bhd", means, self.values).flatten(1))


class Agent(nn.Module):
    def __init__(self, envs, args):
        super().__init__()
        dim, shape, actions = args.trxl_dim, envs.single_observation_space.shape, envs.single_action_space
        if len(shape) == 1:
            self.encoder = layer_init(nn.Linear(*shape, dim))
        else:
            self.encoder = nn.Sequential(
                Scale(),
                layer_init(nn.Conv2d(3, 32, 8, stride=4)),
                nn.ReLU(),
                layer_init(nn.Conv2d(32, 64, 4, stride=2)),
                nn.ReLU(),
                layer_init(nn.Conv2d(64, 64, 3, stride=1)),
                nn.ReLU(),
                nn.Flatten(),
                layer_init(nn.Linear(64 * 7 * 7, dim)),
                nn.ReLU(),
            )
        self.length, self.positions = args.trxl_memory_length, args.trxl_positional_encoding
        if self.positions == "learned":
            self.codes = nn.Parameter(0.1 * torch.randn(self.length, 1, dim))  # by distance, the furthest first
        self.attentions = nn.ModuleList(Attention(dim, args.trxl_num_heads) for _ in range(args.trxl_num_layers))
        self.projections = nn.ModuleList(layer_init(nn.Linear(dim, dim)) for _ in range(args.trxl_num_layers))
        self.network = nn.Sequential(layer_init(nn.Linear(dim, dim)), nn.ReLU())
        self.action_shape, choices = actions.shape, actions.nvec if hasattr(actions, "nvec") else actions.n
        self.actor = nn.ModuleList(layer_init(nn.Linear(dim, n), std=0.1) for n in np.ravel(choices))
        self.critic = layer_init(nn.Linear(dim, 1), std=1.0)
        if args.reconstruction_coef:
            self.decoder = nn.Sequential(
                layer_init(nn.Linear(dim, 64 * 7 * 7)),
                nn.ReLU(),
                nn.Unflatten(1, (64, 7, 7)),
                layer_init(nn.ConvTranspose2d(64, 64, 3, stride=1)),
                nn.ReLU(),
                layer_init(nn.ConvTranspose2d(64, 32, 4, stride=2)),
                nn.ReLU(),
                layer_init(nn.ConvTranspose2d(32, 3, 8, stride=4)),
            )

    def forward(self, obs, windows, elapsed):
        """Outputs for a batch of steps, and what the memory keeps of each: (batch, layers, dim).

        `windows` (batch, length, layers, dim) is what it kept of the steps before, the last one last; `elapsed` counts
        the steps before in the same episode, those that may be attended to.
        """
        x, kept = self.encoder(obs), []
        mask = torch.arange(self.length, 0, -1, device=x.device) <= elapsed.unsqueeze(1)
        if self.positions == "learned":
            windows = windows + self.codes
        code = sinusoid(elapsed, x.shape[1]) if self.positions == "absolute" else 0
        for i, (attention, projection) in enumerate(zip(self.attentions, self.projections)):
            normalized = nn.functional.layer_norm(x, x.shape[1:])
            kept.append(normalized.detach() + code)
            x = x + attention(normalized, windows[:, :, i], mask)
            x = x + projection(nn.functional.layer_norm(x, x.shape[1:])).relu()
        return self.network(x), torch.stack(kept, dim=1)

    def get_value(self, obs, windows, elapsed):
        hidden, _ = self(obs, windows, elapsed)
        return self.critic(hidden).squeeze(-1)

    def get_action(self, obs, windows, elapsed, deterministic=False):
        hidden, kept = self(obs, windows, elapsed)
        logits = [branch(hidden) for branch in self.actor]
        if not deterministic:  # Gumbel-max draws
            logits = [x - torch.empty_like(x).exponential_().log() for x in logits]
        return torch.stack([x.argmax(-1) for x in logits], dim=1).view(-1, *self.action_shape), kept

    def evaluate(self, obs, action, windows, elapsed):
        hidden, _ = self(obs, windows, elapsed)
        logprobs = [branch(hidden).log_softmax(-1) for branch in self.actor]
        entropy = -sum((x.exp() * x).sum(-1) for x in logprobs)
        chosen = zip(logprobs, action.view(len(obs), -1).T)
        logprob = -sum(nn.functional.nll_loss(x, choice, reduction="none") for x, choice in chosen)
        return logprob, entropy, self.critic(hidden).squeeze(-1), hidden


def numbers(infos, i):
    """What environment i reports at the end of an episode, as far as it is numbers."""
    final = infos["final_info"]
    given = [key for key in final if not isinstance(final[key], dict) and f"_{key}" in final and final[f"_{key}"][i]]
    return {key: final[key][i] for key in given if isinstance(final[key][i], (int, float, np.number, np.bool_))}


def sinusoid(steps, dim):
    """Positional codes (batch, dim) of time steps, as of Vaswani et al. 2017: a step of any episode, however long."""
    frequencies = 10_000 ** (-torch.arange(0, dim, 2, device=steps.device) / dim)
    angles = steps.unsqueeze(1) * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


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
    """The saved agent of a run, as a function from the observations of `envs` to a batch of actions."""
    args = Args(**json.loads(Path(run_dir, "args.json").read_text()))
    agent = Agent(envs, args).to(device)
    agent.load_state_dict(load_file(Path(run_dir, "model.safetensors"), str(device)))
    shape = (envs.num_envs, args.trxl_memory_length, args.trxl_num_layers, args.trxl_dim)
    windows, elapsed = torch.zeros(shape, device=device), np.zeros(envs.num_envs, dtype=np.int64)

    @torch.no_grad()
    def policy(obs):
        nonlocal windows, elapsed
        elapsed = np.where(envs.starts, 0, elapsed + 1)
        obs = torch.tensor(obs, dtype=torch.float32, device=device)
        action, kept = agent.get_action(obs, windows, torch.tensor(elapsed, device=device), deterministic)
        windows = torch.cat([windows[:, 1:], kept.unsqueeze(1)], dim=1)
        return action.cpu().numpy()

    return policy


if __name__ == "__main__":
    # Run directory and logger
    stop_signals = []
    signal.signal(signal.SIGTERM, lambda *received: stop_signals.append(received))
    args = parse_args()
    if min(args.num_envs, args.num_steps, args.num_minibatches, args.update_epochs, args.checkpoint_freq) < 1:
        fail("--num-envs, --num-steps, --num-minibatches, --update-epochs and --checkpoint-freq must be at least 1")
    if min(args.trxl_num_layers, args.trxl_num_heads, args.trxl_memory_length, args.anneal_steps) < 1:
        fail("--trxl-num-layers, --trxl-num-heads, --trxl-memory-length and --anneal-steps must be at least 1")
    if args.trxl_dim < 2 or args.trxl_dim % 2 or args.trxl_dim % args.trxl_num_heads:
        fail(f"--trxl-dim must be even, and a multiple of --trxl-num-heads {args.trxl_num_heads}")
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = args.total_timesteps // batch_size
    if batch_size % args.num_minibatches or minibatch_size < 2:
        fail(f"--num-minibatches must divide the rollout of {batch_size} steps into minibatches of two steps or more")
    if num_iterations == 0:
        fail(f"--total-timesteps must be at least one rollout of {batch_size} steps")
    try:
        envs = make_envs(args.env_id, 1, args.seed)  # a first look, before anything is written
    except (gym.error.Error, ImportError) as error:
        fail(error)
    space, shape = envs.single_action_space, envs.single_observation_space.shape or ()
    if not isinstance(space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)) or np.any(space.start != 0):
        fail(f"{args.env_id} needs discrete actions from 0 on; ppo_continuous_action.py handles continuous ones")
    if len(shape) != 1 and shape != (84, 84, 3):
        fail(f"{args.env_id} needs vectors or images of 84 x 84 x 3; ppo_atari.py handles those of Atari games")
    if args.reconstruction_coef and len(shape) == 1:
        fail(f"{args.env_id} has no images to reconstruct: leave --reconstruction-coef out")
    if args.capture_video and "rgb_array" not in envs.metadata.get("render_modes", []):
        fail(f"{args.env_id} cannot render images: leave --capture-video out")
    envs.close()  # now: Memory Gym ends pygame with it, for the environments that are made next too
    checkpoint = torch.load(Path(args.resume, "checkpoint.pt"), map_location="cpu") if args.resume else {}
    run_dir, writer = open_run(args, checkpoint.get("events", {}))

    # Seeding
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
    elif len(shape) == 1:
        torch.set_num_threads(1)  # a thread pool slows networks without images down

    # Environments
    envs = make_envs(args.env_id, args.num_envs, args.seed, args.capture_video, run_dir.resolve())

    # Agent and optimizer
    agent = Agent(envs, args).to(device)
    weights = flatten(agent)
    lr, ent_coef = torch.tensor([args.init_lr, args.init_ent_coef], device=device).unbind()
    optimizer = torch.optim.AdamW([weights], lr=lr, fused=True, capturable=device.type == "cuda")

    # Storage: environments fill NumPy arrays, networks read tensors on the device; a graph needs both to stay in place
    obs_shape = (args.num_steps, args.num_envs, *envs.single_observation_space.shape)
    obs_dtype = torch.float32 if len(shape) == 1 else torch.uint8
    obs = torch.zeros(obs_shape, dtype=obs_dtype, pin_memory=device.type == "cuda").numpy()
    actions = np.zeros((args.num_steps, args.num_envs, *envs.single_action_space.shape), dtype=np.int64)
    rewards, dones, final_values = np.zeros((3, args.num_steps, args.num_envs), dtype=np.float32)
    elapsed = np.zeros((args.num_steps, args.num_envs), dtype=np.int64)  # steps before in the same episode
    act_obs, act_action = torch.tensor(obs[0], device=device), torch.tensor(actions[0], device=device)
    act_elapsed = torch.tensor(elapsed[0], device=device)
    b_obs, b_actions, b_elapsed = (torch.tensor(x, device=device).flatten(0, 1) for x in (obs, actions, elapsed))
    b_logprobs, b_values, b_advantages, b_returns = torch.zeros((4, batch_size), device=device)
    mb_inds = torch.zeros(minibatch_size, dtype=torch.long, device=device)
    # The memory has one row for each environment and step: those of the rollout, and before them as many steps as a
    # window is long. The window of row b of the batch is then the rows b, b + num_envs, ... up to the step before.
    before = args.trxl_memory_length * args.num_envs
    memory = torch.zeros((before + batch_size, args.trxl_num_layers, args.trxl_dim), device=device)
    offsets = torch.arange(0, before, args.num_envs, device=device)
    step_inds = torch.arange(batch_size + args.num_envs, device=device).view(-1, args.num_envs)
    act_inds = step_inds[0].clone()
    loss_names = ["value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac"]
    loss_names += ["reconstruction_loss", "loss"]
    losses = torch.zeros(len(loss_names), device=device)  # sums over an update
    episode_returns, episode_lengths = np.zeros((2, args.num_envs))
    recent_returns, recent_episodes = deque(maxlen=20), deque(maxlen=100)

    def windows(inds):
        return memory[inds.unsqueeze(1) + offsets]

    @torch.no_grad()
    def act():
        action, kept = agent.get_action(act_obs, windows(act_inds), act_elapsed)
        act_action.copy_(action)
        memory[act_inds + before] = kept

    @torch.no_grad()
    def value(x, inds, elapsed):
        x, elapsed = torch.as_tensor(x, dtype=b_obs.dtype, device=device), torch.as_tensor(elapsed, device=device)
        return agent.get_value(x, windows(inds), elapsed).cpu().numpy()

    def update():
        global ratio, pg_loss, v_loss, entropy_loss, reconstruction_loss, approx_kl, loss
        mb_memory = windows(mb_inds), b_elapsed[mb_inds]
        newlogprob, entropy, newvalue, hidden = agent.evaluate(b_obs[mb_inds], b_actions[mb_inds], *mb_memory)
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
        v_loss = v_error.mean()
        entropy_loss = entropy.mean()
        loss = pg_loss - ent_coef * entropy_loss + args.vf_coef * v_loss  # eq. 9
        reconstruction_loss = torch.zeros_like(loss)
        if args.reconstruction_coef:
            images = agent.encoder[0](b_obs[mb_inds])
            reconstruction_loss = nn.functional.binary_cross_entropy_with_logits(agent.decoder(hidden), images)
            loss = loss + args.reconstruction_coef * reconstruction_loss

        weights.grad.zero_()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
        optimizer.step()
        with torch.no_grad():
            old_approx_kl = -logratio.mean()
            approx_kl = ((ratio - 1) - logratio).mean()  # estimator k3 of http://joschu.net/blog/kl-approx.html
            clipfrac = (ratio != clipped_ratio).float().mean()
            terms = [v_loss, pg_loss, entropy_loss, old_approx_kl, approx_kl, clipfrac, reconstruction_loss, loss]
            losses.add_(torch.stack(terms))

    if device.type == "cuda" and args.cuda_graphs:
        act, update = cuda_graph(act), cuda_graph(update)

    # Resume
    def save_checkpoint():
        writer.flush()
        state = {"global_step": global_step, "agent": agent.state_dict(), "optimizer": optimizer.state_dict()["state"]}
        state["rng"] = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if device.type == "cuda" else [])
        state["recent_episodes"] = [{key: float(x) for key, x in episode.items()} for episode in recent_episodes]
        state["events"] = {file.name: file.stat().st_size for file in run_dir.glob("events*")}
        torch.save(state, run_dir / "unfinished.tmp")
        os.replace(run_dir / "unfinished.tmp", run_dir / "checkpoint.pt")

    global_step = 0
    if args.resume:
        global_step = checkpoint["global_step"]
        agent.load_state_dict(checkpoint["agent"])
        recent_episodes.extend(checkpoint["recent_episodes"])
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
        decayed = min(global_step / args.anneal_steps, 1)
        optimizer.param_groups[0]["lr"].fill_(args.init_lr + decayed * (args.final_lr - args.init_lr))
        ent_coef.fill_(args.init_ent_coef + decayed * (args.final_ent_coef - args.init_ent_coef))

        # Act
        final_values[:] = 0
        memory[:before] = memory[-before:].clone()
        for step in range(args.num_steps):
            obs[step], elapsed[step] = next_obs, episode_lengths
            act_obs.copy_(torch.from_numpy(obs[step]), non_blocking=True)
            act_elapsed.copy_(torch.from_numpy(elapsed[step]))
            act_inds.copy_(step_inds[step])
            act()
            actions[step] = act_action.cpu().numpy()
            next_obs, reward, terminated, truncated, infos = envs.step(actions[step])
            rewards[step], dones[step] = reward, terminated | truncated
            episode_returns += reward
            episode_lengths += 1
            cut = truncated & ~terminated
            if cut.any():
                final_memory = step_inds[step + 1][cut], episode_lengths[cut]
                final_values[step, cut] = value(np.stack(infos["final_obs"][cut]), *final_memory)
            for i in np.flatnonzero(dones[step]):  # environment i has made step number global_step + i + 1
                writer.add_scalar("charts/episodic_return", episode_returns[i], global_step + i + 1)
                writer.add_scalar("charts/episodic_length", episode_lengths[i], global_step + i + 1)
                recent_returns.append(episode_returns[i])
                recent_episodes.append({"r": episode_returns[i], "l": episode_lengths[i]} | numbers(infos, i))
                episode_returns[i] = episode_lengths[i] = 0
            global_step += args.num_envs

        # Targets: the weights have not changed during the rollout, so large batches serve all its steps
        b_obs.copy_(torch.from_numpy(obs).flatten(0, 1))
        b_actions.copy_(torch.from_numpy(actions).flatten(0, 1))
        b_elapsed.copy_(torch.from_numpy(elapsed).flatten())
        with torch.no_grad():
            for inds in step_inds[:-1].flatten().split(minibatch_size):  # all windows at once would be too large
                outputs = agent.evaluate(b_obs[inds], b_actions[inds], windows(inds), b_elapsed[inds])
                b_logprobs[inds], _, b_values[inds], _ = outputs
        values = b_values.cpu().numpy().reshape(rewards.shape)
        next_value = value(next_obs, step_inds[-1], episode_lengths)
        advantages = gae(rewards, values, next_value, dones, final_values, args.gamma, args.gae_lambda)
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
        writer.add_scalar("charts/entropy_coefficient", ent_coef.item(), global_step)
        writer.add_scalar("episode/value_mean", values.mean(), global_step)
        writer.add_scalar("episode/advantage_mean", advantages.mean(), global_step)
        for key in dict.fromkeys(key for episode in recent_episodes for key in episode):
            mean = np.mean([episode[key] for episode in recent_episodes if key in episode])
            writer.add_scalar(f"episode/{key}_mean", mean, global_step)
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
        eval_envs = make_envs(args.env_id, 10, args.seed)
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
