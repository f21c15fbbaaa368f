# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "gymnasium[mujoco]>=1.2", "numpy>=2", "safetensors>=0.5", "tensorboard>=2.19", "torch>=2.8", "tyro>=0.9",
# ]
# ///
"""Soft Actor-Critic (SAC, Haarnoja et al. 2018, arXiv:1812.05905): vector observations, continuous actions.

Differs from td3_continuous_action.py:
1. the actor draws from a Gaussian that tanh squashes into the bounds, its deviation depending on the observation;
2. the entropy of the policy is rewarded, at a price (alpha) that follows the entropy asked for, -1 per dimension;
3. the actor has no copy, and follows the smaller value of both critics; so does the target;
4. `--utd` gradient steps per environment step; the actor catches up on `--policy-frequency` steps at once.

Differs from the paper:
1. the step size of the critics and of alpha is 1e-3, and the actor takes two steps at each second one of the critics';
2. tanh keeps deviations between exp(-5) and exp(2);
3. an episode cut off by a time limit is bootstrapped from its final observation.

Run: python sac_continuous_action.py --env-id HalfCheetah-v4 --total-timesteps 1000000
"""

import json
import math
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
from functools import partial
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
    env_id: str = "Hopper-v4"  # environment
    total_timesteps: int = 1_000_000  # environment steps in total
    num_envs: int = 1  # parallel environments
    buffer_size: int = 1_000_000  # transitions that the replay buffer holds
    gamma: float = 0.99  # discount
    tau: float = 0.005  # step of the target network towards the online network (1 copies it)
    batch_size: int = 256  # transitions per gradient step
    learning_starts: int = 5_000  # environment steps before the first gradient step
    policy_lr: float = 3e-4  # step size of the actor's optimizer
    q_lr: float = 1e-3  # step size of the optimizers of the critics and of alpha
    utd: float = 1.0  # gradient steps per environment step
    policy_frequency: int = 2  # gradient steps of the critic from one turn of the actor to the next
    target_network_frequency: int = 1  # steps between updates of the target network
    alpha: float = 0.2  # price of entropy, where it is not tuned
    autotune: bool = True  # tune the price of entropy

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


def make_env(env_id, idx, video_dir):
    def thunk():
        name = re.sub("^dm_control/", "shimmy:dm_control/", env_id)
        if name != env_id and not (find_spec("shimmy") and find_spec("dm_control")):
            raise ImportError("dm_control: pip install shimmy dm_control==1.0.50 mujoco==3.17.0")
        filmed = {"render_mode": "rgb_array"} if video_dir is not None and idx == 0 else {}
        env = gym.make(name, **filmed)
        if filmed:
            env = gym.wrappers.RecordVideo(env, str(video_dir), name_prefix=f"{time.time():.0f}")
        if not re.search(r"\(\d+, \d+, \d", str(env.observation_space)):  # images are refused below
            env = gym.wrappers.FlattenObservation(env)
        return env

    return thunk


def make_envs(env_id, num_envs, video_dir=None):
    thunks = [make_env(env_id, i, video_dir) for i in range(num_envs)]
    envs = gym.vector.SyncVectorEnv(thunks, copy=False, autoreset_mode="SameStep")
    actions, obs = envs.single_action_space, envs.single_observation_space
    if not isinstance(actions, gym.spaces.Box) or len(actions.shape) != 1:
        raise gym.error.Error(f"{env_id} has no vectors as continuous actions: dqn.py for discrete ones")
    if not actions.is_bounded():
        raise gym.error.Error(f"{env_id} has actions without bounds: ppo_continuous_action.py")
    if len(obs.shape or ()) != 1:
        raise gym.error.Error(f"{env_id} has no vectors as observations: dqn_atari.py for Atari games")
    return envs


class Actor(nn.Module):
    def __init__(self, envs):
        super().__init__()
        space, inputs = envs.single_action_space, envs.single_observation_space.shape[0]
        hidden = [nn.Linear(inputs, 256), nn.ReLU(inplace=True)]
        hidden += [nn.Linear(256, 256), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*hidden, nn.Linear(256, 2 * len(space.low)))
        self.low = nn.Buffer(torch.tensor(space.low, dtype=torch.float32))
        self.high = nn.Buffer(torch.tensor(space.high, dtype=torch.float32))
        self.scale = nn.Buffer((self.high - self.low) / 2)

    def forward(self, obs):
        """Mean and logarithm of the deviation of the Gaussian before it is squashed."""
        mean, log_std = self.layers(obs).chunk(2, dim=1)
        return mean, -5 + 3.5 * (log_std.tanh() + 1)

    def squash(self, x):  # rounding does not take the action out of the bounds
        return self.low.lerp(self.high, (x.tanh() + 1) / 2)

    def sample(self, obs):
        mean, log_std = self(obs)
        x = mean + log_std.exp() * torch.randn_like(mean)
        return self.squash(x), squashed_logprob(x, mean, log_std, self.scale)

    @torch.no_grad()
    def get_action(self, obs, deterministic=False):
        mean, log_std = self(obs)
        noise = 0 if deterministic else torch.randn_like(mean)
        return self.squash(mean + log_std.exp() * noise)


class Linears(nn.Module):
    """Linear layers side by side for (layers, batch, features)."""

    def __init__(self, layers, inputs, outputs):
        super().__init__()
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(layers, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(layers, 1, outputs).uniform_(-bound, bound))

    def forward(self, x):
        if self.weight.shape[2] == 1:  # a matrix product of one column takes five times as long
            return (x * self.weight.mT).sum(2, keepdim=True) + self.bias
        return torch.baddbmm(self.bias, x, self.weight)


class SoftQNetwork(nn.Sequential):
    def __init__(self, envs):
        inputs = envs.single_observation_space.shape[0] + envs.single_action_space.shape[0]
        hidden = [Linears(2, inputs, 256), nn.ReLU(inplace=True)]
        hidden += [Linears(2, 256, 256), nn.ReLU(inplace=True)]
        super().__init__(*hidden, Linears(2, 256, 1))

    def forward(self, obs, action):
        """The values of both critics: (2, batch)."""
        inputs = torch.cat([obs, action], dim=1).expand(2, -1, -1)
        return super().forward(inputs).squeeze(2)


def load_policy(run_dir, envs, device, deterministic=True):
    """The saved actor of a run, as a function from observations to actions."""
    actor = Actor(envs).to(device)
    model = load_file(Path(run_dir, "model.safetensors"), str(device))
    names = [name for name in model if name.startswith("actor.")]
    actor.load_state_dict({name.removeprefix("actor."): model[name] for name in names})

    def policy(obs):
        obs = torch.tensor(obs, dtype=torch.float32, device=device)
        return actor.get_action(obs, deterministic).cpu().numpy()

    return policy


class ReplayBuffer:
    """The last transitions, one row each. New ones wait on the host, so that one copy serves many steps."""

    def __init__(self, size, obs_dim, action_dim, device):
        self.rows = torch.zeros((size, 2 * obs_dim + action_dim + 2), device=device)
        self.columns = obs_dim, obs_dim, action_dim, 1, 1  # obs, next_obs, action, reward, terminated
        self.filled = torch.zeros((), dtype=torch.long, device=device)  # here a graph can read it
        self.added, self.new = 0, []

    def add(self, obs, next_obs, action, reward, terminated):
        columns = obs, next_obs, action.reshape(len(obs), -1), reward[:, None], terminated[:, None]
        self.new.append(np.concatenate(columns, axis=1, dtype=np.float32))

    def flush(self):
        """Write the rows that wait in place of the oldest."""
        self.added += sum(map(len, self.new))
        new = np.concatenate([*self.new, np.zeros((0, self.rows.shape[1]), np.float32)])
        new = torch.from_numpy(new[-len(self.rows) :])
        start = (self.added - len(new)) % len(self.rows)
        before, after = new.tensor_split([len(self.rows) - start])  # the end of the buffer
        self.rows[start : start + len(before)], self.rows[: len(after)] = before, after
        self.filled.fill_(min(self.added, len(self.rows)))
        self.new = []

    def sample(self, batch_size):
        # a graph keeps the range it was captured with: one so large that the remainder is as good as uniform
        indices = torch.randint(2**62, (batch_size,), device=self.rows.device) % self.filled
        obs, next_obs, action, reward, terminated = self.rows[indices].split(self.columns, dim=1)
        return obs, next_obs, action, reward.squeeze(1), terminated.squeeze(1)

    def state_dict(self):
        self.flush()
        return {"rows": self.rows[: self.added].to("cpu", copy=True), "added": self.added}

    def load_state_dict(self, state):
        self.rows[: len(state["rows"])], self.added = state["rows"], state["added"]
        self.filled.fill_(len(state["rows"]))


def squashed_logprob(x, mean, log_std, scale):
    """The log-density of the action offset + scale * tanh(x), for x from a Gaussian; sums over dimensions."""
    gaussian = -0.5 * ((x - mean) / log_std.exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
    log_slope = 2 * (math.log(2) - x - nn.functional.softplus(-2 * x))  # log(1 - tanh(x)**2), exact also far from 0
    return (gaussian - log_slope - scale.log()).sum(1)


def bellman_target(reward, terminated, next_value, gamma):
    """The reward and the discounted next value; none after the end of an episode."""
    return reward + gamma * (1 - terminated) * next_value


def twin_q_loss(q_values, target):
    """The loss of a minibatch, of both critics' values, and what is logged of it under losses/."""
    qf_losses = ((q_values - target) ** 2).mean(1)
    (qf1_loss, qf2_loss), (qf1_values, qf2_values) = qf_losses, q_values.mean(1)
    logged = {"qf1_loss": qf1_loss, "qf2_loss": qf2_loss, "qf_loss": qf_losses.mean()}
    return qf_losses.sum(), logged | {"qf1_values": qf1_values, "qf2_values": qf2_values}


def soft_policy_loss(logprob, q_value, alpha):
    """The actor's loss (eq. 9): the price of a lack of entropy, less the value of the action."""
    return (alpha * logprob - q_value).mean()


def price_loss(log_alpha, logprob, target_entropy):
    """The price of entropy rises as long as the policy has less than asked for (eq. 18)."""
    return -(log_alpha.exp() * (logprob + target_entropy)).mean()


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
    if not 0 < args.utd < np.inf:
        fail("--utd must be above 0")
    try_envs(args, args.env_id, 1)
    run = Run(args)

    # Seeding
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
    elif "OMP_NUM_THREADS" not in os.environ:  # SAC ran 1.4 to 1.6 times as fast with two as with one
        torch.set_num_threads(min(2, torch.get_num_threads()))

    # Environments, agent and optimizer
    envs = make_envs(args.env_id, args.num_envs, run.dir / "videos" if args.capture_video else None)
    actor = Actor(envs).to(device)
    qf, target_qf = SoftQNetwork(envs).to(device), SoftQNetwork(envs).to(device)
    agent = nn.ModuleDict({"actor": actor, "qf": qf})
    actor_weights, qf_weights = flatten(actor), flatten(qf)
    target_qf_weights = flatten(target_qf).requires_grad_(False)
    target_qf_weights.copy_(qf_weights.detach())
    log_alpha = torch.tensor(1.0 if args.autotune else args.alpha, device=device).log()
    log_alpha.requires_grad_().grad = torch.zeros_like(log_alpha)
    policy_lr, q_lr = torch.tensor([args.policy_lr, args.q_lr], device=device)
    adam = partial(torch.optim.Adam, fused=True, capturable=device.type == "cuda")
    actor_optimizer, qf_optimizer = adam([actor_weights], policy_lr), adam([qf_weights], q_lr)
    alpha_optimizer = adam([log_alpha], q_lr)

    # Storage
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    replay = ReplayBuffer(args.buffer_size, obs_dim, action_dim, device)
    qf_means, actor_means = Means(), Means()

    def act(obs):
        return actor.get_action(obs.to(device))

    def update_qf():
        b_obs, b_next_obs, b_actions, b_rewards, b_terminated = replay.sample(args.batch_size)
        with torch.no_grad():
            next_actions, next_logprob = actor.sample(b_next_obs)
            next_value = target_qf(b_next_obs, next_actions).amin(0)
            next_value -= log_alpha.exp() * next_logprob
            target = bellman_target(b_rewards, b_terminated, next_value, args.gamma)
        loss, logged = twin_q_loss(qf(b_obs, b_actions), target)
        qf_weights.grad.zero_()
        loss.backward()
        qf_optimizer.step()
        qf_means.add(logged)
        return b_obs, logged

    def update_actor(b_obs):
        new_actions, logprob = actor.sample(b_obs)
        q_value = qf(b_obs, new_actions).amin(0)
        actor_loss = soft_policy_loss(logprob, q_value, log_alpha.exp().detach())
        actor_weights.grad.zero_()
        actor_loss.backward(inputs=list(actor.parameters()))  # no gradient of the critics' weights
        actor_optimizer.step()
        alpha_loss = price_loss(log_alpha, logprob.detach(), -action_dim)
        if args.autotune:
            log_alpha.grad.zero_()
            alpha_loss.backward()
            alpha_optimizer.step()
        logged = {"actor_loss": actor_loss, "alpha_loss": alpha_loss, "alpha": log_alpha.exp()}
        actor_means.add(logged)
        return logged

    if device.type == "cuda" and args.cuda_graphs:
        act, update_qf, update_actor = map(cuda_graph, (act, update_qf, update_actor))

    # Training loop
    parts = {"agent": agent, "target_qf": target_qf, "alpha_optimizer": alpha_optimizer}
    parts |= {"actor_optimizer": actor_optimizer, "qf_optimizer": qf_optimizer}
    global_step = run.restore(parts | {"replay": replay, "rng": rng})
    gradient_steps = run.saved.get("gradient_steps", 0)
    log_alpha.data.copy_(run.saved.get("log_alpha", log_alpha.data))
    obs = envs.reset(seed=args.seed + global_step)[0].astype(np.float32)
    while global_step < args.total_timesteps:
        # Act
        if global_step < args.learning_starts:
            actions = rng.uniform(envs.action_space.low, envs.action_space.high).astype(np.float32)
        else:
            actions = act(torch.from_numpy(obs)).cpu().numpy()

        # Learn: before the environments step, so that a GPU works on it while they do
        replay.flush()
        due = int(global_step * args.utd) - int((global_step - args.num_envs) * args.utd)
        for _ in range(due if global_step > max(args.learning_starts, 0) else 0):
            gradient_steps += 1
            b_obs, logged = update_qf()
            for _ in range(args.policy_frequency if gradient_steps % args.policy_frequency == 0 else 0):
                actor_loss, alpha_loss, alpha = update_actor(b_obs).values()
            if gradient_steps % args.target_network_frequency == 0:
                target_qf_weights.lerp_(qf_weights.detach(), args.tau)

        # Step
        next_obs, reward, terminated, truncated, infos = envs.step(actions)
        run.log_episodes(global_step, reward, terminated | truncated)
        final_obs = next_obs
        if (done := terminated | truncated).any():
            final_obs = next_obs.copy()
            final_obs[done] = np.stack(infos["final_obs"][done])
        replay.add(obs, final_obs, actions, reward, terminated)
        obs[:] = next_obs
        global_step += args.num_envs

        # Log
        log_due = global_step % 100 < args.num_envs or global_step >= args.total_timesteps
        if log_due:
            run.log(global_step, qf_means.take() | actor_means.take())

        # Checkpoint: when the means have just been taken
        if log_due:
            counters = {"gradient_steps": gradient_steps, "log_alpha": log_alpha.data}
            run.checkpoint(global_step, last=global_step >= args.total_timesteps, **counters)

    # Save and close
    envs.close()
    eval_returns = []
    if args.save_model:
        save_file(agent.state_dict(), run.dir / "model.safetensors")
        eval_envs = make_envs(args.env_id, 10)
        policy = load_policy(run.dir, eval_envs, device)
        eval_returns = evaluate(policy, eval_envs, seed=args.seed + 2**30)
    run.close(eval_returns)
