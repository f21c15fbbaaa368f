# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "envpool>=1.2; sys_platform == 'linux'", "pyqt5-qt5>=5.15; sys_platform == 'linux'", "gymnasium>=1.2",
#     "numpy>=2", "safetensors>=0.5", "tensorboard>=2.19", "torch>=2.8", "tyro>=0.9",
# ]
# ///
"""Proximal Policy Optimization (PPO, Schulman et al. 2017, arXiv:1707.06347): Procgen games of EnvPool.

Differs from ppo_atari_envpool.py:
1. Procgen (Cobbe et al. 2020, arXiv:1912.01588): each episode is a level of its own, of all or of
   --num-levels; one colour image of 64x64, no lives; the evaluation draws from all levels;
2. the residual network of IMPALA (Espeholt et al. 2018, arXiv:1802.01561), with torch's own
   initialisation below the heads;
3. rewards are divided by the deviation of the discounted return and clipped to +-10;
4. values and log-probabilities of a rollout are computed by minibatches, which saves 4 GB.

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
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from ctypes.util import find_library
from dataclasses import dataclass, fields, make_dataclass
from datetime import timedelta
from functools import partial
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

try:  # Procgen needs Qt 5 when EnvPool is imported: the system's, or that of PyQt5-Qt5
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


class SameStepProcgen:
    """EnvPool, but a game restarts within the last step of the one before, not in a step of its own."""

    metadata = {"render_modes": ["rgb_array"]}  # by film_level

    def __init__(self, env_id, num_envs, **options):
        self.make = partial(envpool.make, env_id, env_type="gymnasium", num_envs=num_envs, **options)
        spec = envpool.make_spec(env_id, num_envs=num_envs, **options)
        self.single_observation_space = spec.observation_space
        self.single_action_space = spec.action_space
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
        needed = "pip install envpool PyQt5-Qt5"
        raise ImportError(f"EnvPool is missing: {needed} (Linux; elsewhere: ppo_atari.py)")
    names = re.findall(r"(\w+)Easy-v0", "\n".join(envpool.list_all_envs()))
    games = [name.lower() for name in names]
    if env_id not in games:
        near = ", ".join(difflib.get_close_matches(env_id, games) or games)
        others = "others: ppo.py, ppo_continuous_action.py or ppo_atari_envpool.py"
        raise gym.error.Error(f"Procgen has no {env_id}; its names are like {near} ({others})")
    name = f"{env_id.capitalize()}{distribution_mode.capitalize()}-v0"
    try:
        return SameStepProcgen(name, num_envs, **options)
    except ImportError as error:
        needed = "pip install PyQt5-Qt5; apt-get install libgl1"
        raise ImportError(f"Procgen needs Qt 5 and OpenGL: {needed}") from error


def read_levels(args):
    """Options of the environments for training; an evaluation plays all levels."""
    if not 0 <= args.start_level <= args.start_level + args.num_levels <= 2**31:
        fail("--num-levels and --start-level count levels from 0 to 2147483647")
    if args.start_level and not args.num_levels:
        fail("--start-level needs --num-levels: without it, all levels are played")
    levels = {"num_levels": args.num_levels, "start_level": args.start_level}
    return levels | {"distribution_mode": args.distribution_mode}


def layer_init(layer, std=2**0.5):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class RunningMeanStd(nn.Module):
    """Mean and deviation of all rows so far (Chan et al. 1979), saved with the model."""

    def __init__(self, *shape):
        super().__init__()
        self.count = nn.Buffer(torch.tensor(1e-4))
        self.mean = nn.Buffer(torch.zeros(shape))
        self.std = nn.Buffer(torch.ones(shape))

    def update(self, x):
        delta, total = x.mean(0) - self.mean, self.count + len(x)
        squares = self.count * self.std**2 + len(x) * x.var(0, correction=0)
        squares = squares + delta**2 * self.count * len(x) / total
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
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.MaxPool2d(3, 2, padding=1)]
            layers += [ResidualBlock(width), ResidualBlock(width)]
            channels = width
        layers += [nn.Flatten(), nn.ReLU(), nn.Linear(32 * 8 * 8, 256), nn.ReLU()]
        self.network = nn.Sequential(*layers)
        self.actor = layer_init(nn.Linear(256, envs.single_action_space.n), std=0.01)
        self.critic = layer_init(nn.Linear(256, 1), std=1.0)
        self.return_rms = RunningMeanStd()

    def features(self, obs):
        obs = obs.contiguous(memory_format=torch.channels_last)  # twice as fast
        return self.network(obs / 255)

    def get_value(self, obs):
        return self.critic(self.features(obs)).squeeze(-1)

    @torch.no_grad()
    def get_action(self, obs, deterministic=False):
        logits = self.actor(self.features(obs))
        if not deterministic:  # Gumbel-max draw from the softmax
            logits = logits - torch.empty_like(logits).exponential_().log()
        return logits.argmax(-1)

    def evaluate(self, obs, action):
        hidden = self.features(obs)
        logprobs = self.actor(hidden).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        logprob = -nn.functional.nll_loss(logprobs, action, reduction="none")
        return logprob, entropy, self.critic(hidden).squeeze(-1)


def load_policy(run_dir, envs, device, deterministic=False):
    """The saved agent of a run, as a function from observations to actions."""
    agent = Agent(envs).to(device)
    agent.load_state_dict(load_file(Path(run_dir, "model.safetensors"), str(device)))

    def policy(obs):
        obs = torch.tensor(obs, dtype=torch.float32, device=device)
        return agent.get_action(obs, deterministic).cpu().numpy()

    return policy


def gae(rewards, values, next_value, dones, final_values, gamma, gae_lambda):
    """Generalised advantages (Schulman et al. 2016, eq. 16) of (num_steps, num_envs) arrays; what follows
    the end of an episode is worth `final_values`: V(final observation) if it was truncated, else zero."""
    advantages, advantage = np.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * np.where(dones[t], final_values[t], next_value) - values[t]
        advantages[t] = advantage = delta + gamma * gae_lambda * (1 - dones[t]) * advantage
        next_value = values[t]
    return advantages


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


def film_level(policy, env_id, levels, seed, path):
    """An episode of the policy, with the images that it sees, enlarged."""
    from moviepy import ImageSequenceClip

    images = {"render_mode": "rgb_array", "render_width": 256, "render_height": 256}
    envs, frames = make_envs(env_id, 1, **levels, **images), []

    def film(obs):
        frames.append(envs.pool.render()[0])
        del frames[4500:]  # five minutes are enough
        return policy(obs)

    evaluate(film, envs, seed)
    envs.close()
    path.parent.mkdir(exist_ok=True)
    ImageSequenceClip(frames, fps=15).write_videofile(path, logger=None)


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
    levels = read_levels(args)
    try_envs(args, args.env_id, 1, args.distribution_mode)
    run = Run(args, num_iterations * batch_size)

    # Seeding
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cuda.matmul.allow_tf32 = True  # as convolutions have it
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured

    # Environments, agent and optimizer
    envs = make_envs(args.env_id, args.num_envs, **levels)
    agent = Agent(envs).to(device)
    weights = flatten(agent)
    lr = torch.tensor(args.learning_rate, device=device)
    optimizer = torch.optim.Adam([weights], lr, eps=1e-5, fused=True, capturable=device.type == "cuda")

    # Storage: environments fill NumPy arrays, networks read tensors, which a graph needs in place
    steps_envs, obs_shape = (args.num_steps, args.num_envs), envs.single_observation_space.shape
    obs = torch.zeros(*steps_envs, *obs_shape, dtype=torch.uint8, pin_memory=device.type == "cuda").numpy()
    actions = np.zeros((*steps_envs, *envs.single_action_space.shape), dtype=np.int64)
    rewards, dones, final_values = np.zeros((3, *steps_envs), dtype=np.float32)
    discounted = np.zeros(steps_envs)  # returns so far; the last row goes on in the next rollout
    b_obs, b_actions = (torch.tensor(x, device=device).flatten(0, 1) for x in (obs, actions))
    b_logprobs, b_values, b_advantages, b_returns = torch.zeros((4, batch_size), device=device)
    losses = Means()

    def act(obs):
        return agent.get_action(obs.to(device))

    def policy(obs):  # not a graph: videos have one game
        return agent.get_action(torch.tensor(obs, device=device)).cpu().numpy()

    @torch.no_grad()
    def value(obs):
        return agent.get_value(torch.as_tensor(obs, dtype=b_obs.dtype, device=device)).cpu().numpy()

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
        act, update = cuda_graph(act), cuda_graph(update)

    # Training loop
    global_step = run.restore({"agent": agent, "optimizer": optimizer})
    next_obs, infos = envs.reset(seed=args.seed + global_step)
    for iteration in range(global_step // batch_size, num_iterations):
        if args.anneal_lr:
            lr.fill_((1 - iteration / num_iterations) * args.learning_rate)

        # Act
        final_values[:] = 0
        for step in range(args.num_steps):
            obs[step] = next_obs
            actions[step] = act(torch.from_numpy(obs[step])).cpu().numpy()
            next_obs, reward, terminated, truncated, infos = envs.step(actions[step])
            discounted[step] = args.gamma * discounted[step - 1] * (1 - dones[step - 1]) + reward
            rewards[step], dones[step] = reward, terminated | truncated
            run.log_episodes(global_step, reward, terminated | truncated)
            cut = truncated & ~terminated
            if cut.any():
                final_values[step, cut] = value(np.stack(infos["final_obs"][cut]))
            global_step += args.num_envs

        # Targets: the weights have not changed since, so one batch serves all steps
        b_obs.copy_(torch.from_numpy(obs).flatten(0, 1))
        b_actions.copy_(torch.from_numpy(actions).flatten(0, 1))
        with torch.no_grad():
            for i in range(0, batch_size, minibatch_size):  # all frames at once would need 4 GB
                rows = slice(i, i + minibatch_size)
                b_logprobs[rows], _, b_values[rows] = agent.evaluate(b_obs[rows], b_actions[rows])
        agent.return_rms.update(torch.from_numpy(discounted).flatten().float().to(device))
        scaled_rewards = (rewards / agent.return_rms.std.item()).clip(-10, 10)
        values = b_values.cpu().numpy().reshape(rewards.shape)
        following = value(next_obs), dones, final_values
        advantages = gae(scaled_rewards, values, *following, args.gamma, args.gae_lambda)
        b_advantages.copy_(torch.from_numpy(advantages).flatten())
        b_returns.copy_(b_advantages + b_values)

        # Learn
        for epoch in range(args.update_epochs):
            for inds in torch.randperm(batch_size, device=device).split(minibatch_size):
                v_loss, pg_loss, entropy_loss, old_approx_kl, approx_kl, clipfrac = update(inds).values()
            if args.target_kl is not None and approx_kl > args.target_kl:
                break

        # Log
        metrics = {"losses/explained_variance": 1 - advantages.var() / (advantages + values).var()}
        metrics["charts/learning_rate"] = lr.item()
        run.log(global_step, losses.take(), metrics)

        # Checkpoint
        if args.capture_video and iteration % (num_iterations // 10 + 1) == 0:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                film = run.dir / f"videos/step-{global_step}.mp4"
                film_level(policy, args.env_id, levels, args.seed, film)
        run.checkpoint(global_step, last=iteration == num_iterations - 1)

    # Save and close
    envs.close()
    eval_returns = []
    if args.save_model:
        save_file(agent.state_dict(), run.dir / "model.safetensors")
        eval_envs = make_envs(args.env_id, 10, args.distribution_mode)
        policy = load_policy(run.dir, eval_envs, device)
        eval_returns = evaluate(policy, eval_envs, seed=args.seed + 2**30)
    run.close(eval_returns)
