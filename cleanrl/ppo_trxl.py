# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "gymnasium>=1.3", "memory-gym>=1.0.2", "minigrid>=3", "numpy>=2", "safetensors>=0.5",
#     "tensorboard>=2.19", "torch>=2.8", "tyro>=0.9",
# ]
# [tool.uv]
# override-dependencies = ["gymnasium>=1.3", "pygame; sys_platform == 'never'"]  # pygame-ce serves
# ///
"""Proximal Policy Optimization (PPO, Schulman et al. 2017, arXiv:1707.06347) with an episodic Transformer-XL memory.

The memory is that of Memory Gym's baseline (Pleines et al. 2023, arXiv:2309.17207) after
Transformer-XL (Dai et al. 2019, arXiv:1901.02860): each layer keeps what it got at each step, and
a step attends to the last --trxl-memory-length steps of its episode. What is kept gets no gradient
and stays as it was computed, also when the episode goes on in the next rollout, under newer weights.

Differs from ppo.py:
1. images of 84 x 84 x 3 go through convolutions, vectors through one layer, both then through
   Transformer-XL layers to a policy branch for each dimension of the action and a value head;
2. a decoder may learn to reconstruct the images (--reconstruction-coef): the layers see more;
3. AdamW; step size and entropy bonus decay over --anneal-steps; the value loss is not halved;
4. the means of the last 100 episodes are logged, of all numbers that environments report.

Differs from the paper of Memory Gym and its code:
1. scores are divided by the root of a head's dimension; heads have projections of their own;
2. the first step of an episode, with nothing to attend to, gets zeros, no mean of empty slots;
3. layers are normalised before positions are added; the weights that follow have gain and bias;
4. learned positional codes belong to distances in time: episodes may have any length;
5. the ratio is that of the whole action, not of each of its dimensions;
6. an episode cut off by a time limit is bootstrapped from its final observation and memory.

Run: python ppo_trxl.py --env-id MortarMayhem-Grid-v0 --total-timesteps 200000000
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
from dataclasses import dataclass, fields, make_dataclass
from datetime import timedelta
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

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
    env_id: str = "MortarMayhem-Grid-v0"  # environment
    total_timesteps: int = 200_000_000  # environment steps in total
    init_lr: float = 2.75e-4  # step size of the optimizer at the start
    final_lr: float = 1e-5  # step size of the optimizer after the decay
    num_envs: int = 32  # parallel environments
    num_steps: int = 512  # rollout length per environment
    anneal_steps: int = 163_840_000  # environment steps over which step size and entropy bonus decay
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
    trxl_positional_encoding: Literal["", "none", "absolute", "learned"] = "absolute"  # of past steps
    reconstruction_coef: float = 0.0  # weight of reconstructing the images; 0: no decoder

    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run's name
    seed: int = 1  # random seed
    torch_deterministic: bool = True  # ask for deterministic operations on the GPU
    cuda: bool = True  # use the GPU if there is one
    cuda_graphs: bool = True  # on the GPU, capture act and update once and replay them
    track: bool = False  # mirror the run to Weights & Biases
    wandb_project_name: str = "cleanRL"  # W&B project
    wandb_entity: str | None = None  # W&B user or team
    capture_video: bool = False  # record episodes at several stages of training
    save_model: bool = False  # write model.safetensors at the end and evaluate it on held-out seeds
    upload_model: bool = False  # push the finished run folder to the Hugging Face hub (implies --save-model)
    hf_entity: str = ""  # hub user or organisation, if not the owner of the token
    resume: str = ""  # continue the run in this folder, or the newest in runs: latest
    checkpoint_freq: int = 100_000  # environment steps between checkpoints


class SyncWithStarts(gym.vector.SyncVectorEnv):
    """`starts` tells which observations begin an episode: networks with memory need it."""

    def reset(self, **options):
        self.starts = np.ones(self.num_envs, dtype=bool)
        return super().reset(**options)

    def step(self, actions):
        obs, reward, terminated, truncated, infos = super().step(actions)
        self.starts = terminated | truncated
        return obs, reward, terminated, truncated, infos


def make_env(env_id, idx, video_dir):
    def thunk():
        if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
            os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
        in_minigrid = env_id.startswith("MiniGrid-")
        if memory_gym is None and (in_minigrid or env_id not in gym.registry and ":" not in env_id):
            needs = "pip install pygame-ce minigrid && pip install --no-deps memory-gym==1.0.2"
            raise ImportError(f"{env_id} is not known without Memory Gym and MiniGrid: {needs}")
        filmed = {"render_mode": "rgb_array"} if video_dir is not None and idx == 0 else {}
        view = {"agent_view_size": 3} if in_minigrid else {}
        env = gym.make(env_id, **filmed, **view)
        if in_minigrid:  # what the agent sees of the grid, 3 x 3 tiles, as an image
            env = minigrid.wrappers.RGBImgPartialObsWrapper(env, tile_size=28)
            env = gym.wrappers.TimeLimit(minigrid.wrappers.ImgObsWrapper(env), 96)
        if filmed:
            env = gym.wrappers.RecordVideo(env, str(video_dir), name_prefix=f"{time.time():.0f}")
        return env

    return thunk


def make_envs(env_id, num_envs, video_dir=None, reconstruction_coef=0.0):
    thunks = [make_env(env_id, i, video_dir) for i in range(num_envs)]
    envs = SyncWithStarts(thunks, copy=False, autoreset_mode="SameStep")
    actions, shape = envs.single_action_space, envs.single_observation_space.shape or ()
    discrete = gym.spaces.Discrete, gym.spaces.MultiDiscrete
    if not isinstance(actions, discrete) or np.any(actions.start):
        raise gym.error.Error(f"{env_id} has no discrete actions: ppo_continuous_action.py")
    if len(shape) != 1 and shape != (84, 84, 3):
        raise gym.error.Error(f"{env_id} has no vectors or images of 84 x 84 x 3: ppo_atari.py")
    if reconstruction_coef and len(shape) == 1:
        raise gym.error.Error(f"{env_id} has no images for --reconstruction-coef")
    return envs


def layer_init(layer, std=2**0.5):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def sinusoid(steps, dim):
    """Positional codes (batch, dim) of time steps (Vaswani et al. 2017), however late."""
    frequencies = 10_000 ** (-torch.arange(0, dim, 2, device=steps.device) / dim)
    angles = steps.unsqueeze(1) * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Scale(nn.Module):
    def forward(self, images):  # (n, height, width, 3) of bytes -> (n, 3, height, width) in 0..1
        return images.permute(0, 3, 1, 2) / 255


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017) of one query to a window of memory.

    The window is not projected to keys and values, but the query to where the window is, and
    the mean of the window to a value: the same numbers for a fraction of the work.
    """

    def __init__(self, dim, num_heads):
        super().__init__()
        self.queries = layer_init(nn.Linear(dim, dim), std=1.0)
        self.out = layer_init(nn.Linear(dim, dim), std=1.0)
        shape = num_heads, dim // num_heads, dim
        self.keys = nn.Parameter(nn.init.orthogonal_(torch.empty(dim, dim)).view(shape))
        self.values = nn.Parameter(nn.init.orthogonal_(torch.empty(dim, dim)).view(shape))

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

        def conv(inputs, outputs, size, stride, kind=nn.Conv2d):
            return layer_init(kind(inputs, outputs, size, stride)), nn.ReLU()

        dim, shape = args.trxl_dim, envs.single_observation_space.shape
        if len(shape) == 1:
            self.encoder = layer_init(nn.Linear(*shape, dim))
        else:
            layers = *conv(3, 32, 8, 4), *conv(32, 64, 4, 2), *conv(64, 64, 3, 1)
            hidden = nn.Flatten(), layer_init(nn.Linear(64 * 7 * 7, dim)), nn.ReLU()
            self.encoder = nn.Sequential(Scale(), *layers, *hidden)
        self.length, self.positions = args.trxl_memory_length, args.trxl_positional_encoding
        if self.positions == "learned":
            self.codes = nn.Parameter(0.1 * torch.randn(self.length, 1, dim))  # the furthest first
        layers = range(args.trxl_num_layers)
        self.attentions = nn.ModuleList(Attention(dim, args.trxl_num_heads) for _ in layers)
        self.projections = nn.ModuleList(layer_init(nn.Linear(dim, dim)) for _ in layers)
        self.network = nn.Sequential(layer_init(nn.Linear(dim, dim)), nn.ReLU())
        actions = envs.single_action_space
        nvec = np.ravel(actions.nvec if hasattr(actions, "nvec") else actions.n)
        self.actor = nn.ModuleList(layer_init(nn.Linear(dim, n), std=0.1) for n in nvec)
        self.action_shape = actions.shape
        self.critic = layer_init(nn.Linear(dim, 1), std=1.0)
        if args.reconstruction_coef:
            up = nn.ConvTranspose2d
            hidden = layer_init(nn.Linear(dim, 64 * 7 * 7)), nn.ReLU(), nn.Unflatten(1, (64, 7, 7))
            layers = *conv(64, 64, 3, 1, up), *conv(64, 32, 4, 2, up), layer_init(up(32, 3, 8, 4))
            self.decoder = nn.Sequential(*hidden, *layers)

    def forward(self, obs, windows, elapsed):
        """Outputs for a batch of steps, and what the memory keeps of each: (batch, layers, dim).

        `windows` (batch, length, layers, dim) is what it kept of the steps before, the last one
        last; `elapsed` counts those in the same episode, which may be attended to.
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

    @torch.no_grad()
    def get_action(self, obs, windows, elapsed, deterministic=False):
        hidden, kept = self(obs, windows, elapsed)
        logits = [branch(hidden) for branch in self.actor]
        if not deterministic:  # Gumbel-max draws
            logits = [x - torch.empty_like(x).exponential_().log() for x in logits]
        return torch.stack([x.argmax(-1) for x in logits], dim=1).view(-1, *self.action_shape), kept

    def reconstruction_loss(self, hidden, obs):
        if not hasattr(self, "decoder"):
            return hidden.new_zeros(())
        images = self.encoder[0](obs)
        return nn.functional.binary_cross_entropy_with_logits(self.decoder(hidden), images)

    def evaluate(self, obs, action, windows, elapsed):
        hidden, _ = self(obs, windows, elapsed)
        logprobs = [branch(hidden).log_softmax(-1) for branch in self.actor]
        entropy = -sum((x.exp() * x).sum(-1) for x in logprobs)
        chosen = zip(logprobs, action.view(len(obs), -1).T)
        logprob = -sum(nn.functional.nll_loss(x, choice, reduction="none") for x, choice in chosen)
        return logprob, entropy, self.critic(hidden).squeeze(-1), hidden


def load_policy(run_dir, envs, device, deterministic=False):
    """The saved agent of a run, as a function from observations of `envs` to actions."""
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
        inputs = obs, windows, torch.tensor(elapsed, device=device)
        action, kept = agent.get_action(*inputs, deterministic)
        windows = torch.cat([windows[:, 1:], kept.unsqueeze(1)], dim=1)
        return action.cpu().numpy()

    return policy


def numbers(infos, i):
    """The numbers that environment i reports at the end of an episode."""
    final, kinds = infos["final_info"], (int, float, np.number, np.bool_)
    given = [key for key in final if f"_{key}" in final and not isinstance(final[key], dict)]
    given = [key for key in given if final[f"_{key}"][i]]
    return {key: final[key][i] for key in given if isinstance(final[key][i], kinds)}


class LastEpisodes:
    """Return, length and what else is known in numbers of the last 100 episodes."""

    def __init__(self, num_envs):
        self.last, (self.returns, self.lengths) = deque(maxlen=100), np.zeros((2, num_envs))

    def add(self, reward, done, infos):
        self.returns += reward
        self.lengths += 1
        for i in done.nonzero()[0]:
            self.last.append({"r": self.returns[i], "l": self.lengths[i]} | numbers(infos, i))
            self.returns[i] = self.lengths[i] = 0

    def means(self):
        keys = dict.fromkeys(key for episode in self.last for key in episode)
        values = {key: [episode[key] for episode in self.last if key in episode] for key in keys}
        return {f"episode/{key}_mean": np.mean(values[key]) for key in keys}

    def state_dict(self):
        return {"last": [{key: float(x) for key, x in episode.items()} for episode in self.last]}

    def load_state_dict(self, state):
        self.last.extend(state["last"])


def gae(rewards, values, next_value, dones, final_values, gamma, gae_lambda):
    """Generalised advantages (Schulman et al. 2016, eq. 16) of (num_steps, num_envs) arrays; what follows
    the end of an episode is worth `final_values`: V(final observation) if it was truncated, else zero."""
    advantages, advantage = np.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * np.where(dones[t], final_values[t], next_value) - values[t]
        advantages[t] = advantage = delta + gamma * gae_lambda * (1 - dones[t]) * advantage
        next_value = values[t]
    return advantages


def trxl_loss(newlogprob, entropy, newvalue, logprob, value, advantage, target, ent_coef, args):
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
    v_loss = v_error.mean()
    entropy_loss = entropy.mean()
    loss = pg_loss - ent_coef * entropy_loss + args.vf_coef * v_loss  # eq. 9
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
    if args.trxl_dim < 2 or args.trxl_dim % 2 or args.trxl_dim % args.trxl_num_heads:
        fail(f"--trxl-dim must be even, and a multiple of --trxl-num-heads {args.trxl_num_heads}")
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = args.total_timesteps // batch_size
    if batch_size % args.num_minibatches or minibatch_size < 2:
        fail(f"--num-minibatches must divide {batch_size} steps into parts of two steps or more")
    if num_iterations == 0:
        fail(f"--total-timesteps must be at least one rollout of {batch_size} steps")
    try_envs(args, args.env_id, 1, None, args.reconstruction_coef)
    run = Run(args, num_iterations * batch_size)

    # Seeding
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cuda.matmul.allow_tf32 = True  # as convolutions have it
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured

    # Environments, agent and optimizer
    envs = make_envs(args.env_id, args.num_envs, run.dir / "videos" if args.capture_video else None)
    if device.type == "cpu" and len(envs.single_observation_space.shape) == 1:
        torch.set_num_threads(1)  # a thread pool slows networks without images down
    agent = Agent(envs, args).to(device)
    weights = flatten(agent)
    lr, ent_coef = torch.tensor([args.init_lr, args.init_ent_coef], device=device).unbind()
    optimizer = torch.optim.AdamW([weights], lr, fused=True, capturable=device.type == "cuda")

    # Storage: environments fill NumPy arrays, networks read tensors, which a graph needs in place
    steps_envs, obs_shape = (args.num_steps, args.num_envs), envs.single_observation_space.shape
    dtype = torch.float32 if len(obs_shape) == 1 else torch.uint8
    obs = torch.zeros(*steps_envs, *obs_shape, dtype=dtype, pin_memory=device.type == "cuda").numpy()
    actions = np.zeros((*steps_envs, *envs.single_action_space.shape), dtype=np.int64)
    rewards, dones, final_values = np.zeros((3, *steps_envs), dtype=np.float32)
    elapsed = np.zeros(steps_envs, dtype=np.int64)  # steps before in the same episode
    b_obs, b_actions = (torch.tensor(x, device=device).flatten(0, 1) for x in (obs, actions))
    b_elapsed = torch.zeros(batch_size, dtype=torch.long, device=device)
    b_logprobs, b_values, b_advantages, b_returns = torch.zeros((4, batch_size), device=device)
    losses = Means()
    episodes = LastEpisodes(args.num_envs)
    # The memory has a row for each environment and step: those of the rollout, and before them as
    # many steps as a window is long. With 2 environments and windows of 3 steps:
    #   row of the memory    0  1 | 2  3 | 4  5 | 6  7 | 8  9 | ...
    #   step                -3 -3 |-2 -2 |-1 -1 | 0  0 | 1  1 | ...
    #   row of the batch          |      |      | 0  1 | 2  3 | ...
    #   window of 3               |    x |    x |    x |        3 + offsets: 3, 5, 7; it writes row 9
    before = args.trxl_memory_length * args.num_envs
    memory = torch.zeros((before + batch_size, args.trxl_num_layers, args.trxl_dim), device=device)
    offsets = torch.arange(0, before, args.num_envs, device=device)
    step_inds = torch.arange(batch_size + args.num_envs, device=device).view(-1, args.num_envs)

    def windows(inds):
        return memory[inds.unsqueeze(1) + offsets]

    @torch.no_grad()
    def act(obs, inds, elapsed):
        action, kept = agent.get_action(obs.to(device), windows(inds), elapsed.to(device))
        memory[inds + before] = kept
        return action

    @torch.no_grad()
    def value(obs, inds, elapsed):
        obs = torch.as_tensor(obs, dtype=b_obs.dtype, device=device)
        elapsed = torch.as_tensor(elapsed, device=device)
        return agent.get_value(obs, windows(inds), elapsed).cpu().numpy()

    def update(inds):
        inputs = b_obs[inds], b_actions[inds], windows(inds), b_elapsed[inds]
        *new, hidden = agent.evaluate(*inputs)
        rows = [x[inds] for x in (b_logprobs, b_values, b_advantages, b_returns)]
        loss, logged = trxl_loss(*new, *rows, ent_coef, args)
        reconstruction_loss = agent.reconstruction_loss(hidden, b_obs[inds])
        loss = loss + args.reconstruction_coef * reconstruction_loss
        logged |= {"reconstruction_loss": reconstruction_loss, "loss": loss}
        weights.grad.zero_()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
        optimizer.step()
        losses.add(logged)
        return logged

    if device.type == "cuda" and args.cuda_graphs:
        act, update = cuda_graph(act), cuda_graph(update)

    # Training loop
    global_step = run.restore({"agent": agent, "optimizer": optimizer, "episodes": episodes})
    next_obs, infos = envs.reset(seed=args.seed + global_step)
    for iteration in range(global_step // batch_size, num_iterations):
        decayed = min(global_step / args.anneal_steps, 1)
        lr.fill_(args.init_lr + decayed * (args.final_lr - args.init_lr))
        ent_coef.fill_(args.init_ent_coef + decayed * (args.final_ent_coef - args.init_ent_coef))

        # Act
        final_values[:] = 0
        memory[:before] = memory[-before:].clone()
        for step in range(args.num_steps):
            obs[step] = next_obs
            elapsed[step] = np.where(envs.starts, 0, elapsed[step - 1] + 1)
            inputs = torch.from_numpy(obs[step]), step_inds[step], torch.from_numpy(elapsed[step])
            actions[step] = act(*inputs).cpu().numpy()
            next_obs, reward, terminated, truncated, infos = envs.step(actions[step])
            rewards[step], dones[step] = reward, terminated | truncated
            run.log_episodes(global_step, reward, terminated | truncated)
            episodes.add(reward, terminated | truncated, infos)
            cut = truncated & ~terminated
            if cut.any():
                final_memory = step_inds[step + 1][cut], elapsed[step, cut] + 1
                final_values[step, cut] = value(np.stack(infos["final_obs"][cut]), *final_memory)
            global_step += args.num_envs

        # Targets: the weights have not changed since, so large batches serve all steps
        b_obs.copy_(torch.from_numpy(obs).flatten(0, 1))
        b_actions.copy_(torch.from_numpy(actions).flatten(0, 1))
        b_elapsed.copy_(torch.from_numpy(elapsed).flatten())
        with torch.no_grad():
            for inds in step_inds[:-1].flatten().split(minibatch_size):  # as windows are large
                inputs = b_obs[inds], b_actions[inds], windows(inds), b_elapsed[inds]
                b_logprobs[inds], _, b_values[inds], _ = agent.evaluate(*inputs)
        values = b_values.cpu().numpy().reshape(rewards.shape)
        next_elapsed = np.where(envs.starts, 0, elapsed[-1] + 1)
        following = value(next_obs, step_inds[-1], next_elapsed), dones, final_values
        advantages = gae(rewards, values, *following, args.gamma, args.gae_lambda)
        b_advantages.copy_(torch.from_numpy(advantages).flatten())
        b_returns.copy_(b_advantages + b_values)

        # Learn
        for epoch in range(args.update_epochs):
            for inds in torch.randperm(batch_size, device=device).split(minibatch_size):
                v_loss, pg_loss, entropy_loss, old_approx_kl, approx_kl, clipfrac, *others = update(inds).values()
            if args.target_kl is not None and approx_kl > args.target_kl:
                break

        # Log
        metrics = {"losses/explained_variance": 1 - advantages.var() / (advantages + values).var()}
        metrics["charts/learning_rate"] = lr.item()
        metrics["charts/entropy_coefficient"] = ent_coef.item()
        metrics["episode/value_mean"] = values.mean()
        metrics["episode/advantage_mean"] = advantages.mean()
        run.log(global_step, losses.take(), metrics | episodes.means())

        # Checkpoint
        run.checkpoint(global_step, last=iteration == num_iterations - 1)

    # Save and close
    envs.close()
    eval_returns = []
    if args.save_model:
        save_file(agent.state_dict(), run.dir / "model.safetensors")
        eval_envs = make_envs(args.env_id, 10)
        policy = load_policy(run.dir, eval_envs, device)
        eval_returns = evaluate(policy, eval_envs, seed=args.seed + 2**30)
    run.close(eval_returns)
