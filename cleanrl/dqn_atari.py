# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "ale-py>=0.12", "gymnasium>=1.2", "numpy>=2", "safetensors>=0.5", "tensorboard>=2.19", "torch>=2.8", "tyro>=0.9",
# ]
# ///
"""Deep Q-learning (DQN, Mnih et al. 2015, doi:10.1038/nature14236): Atari games.

Differs from dqn.py:
1. ale_py's vector environment: up to 30 no-ops and FIRE on reset, frame skip 4 with the maximum
   of the last two, 84x84 grey, 4 frames stacked;
2. a lost life ends the episode, but not the game, in which the agent then has to FIRE;
3. rewards are clipped to their sign for learning; logged returns are of whole games, unclipped;
4. the convolutional network of the paper;
5. the replay buffer stores each frame once, on the GPU if it fits; checkpoints write what is new;
6. videos are games of their own;
7. the emulators step during the gradient steps, which use the transitions so far.

Differs from the paper:
1. Adam in place of RMSProp, and no clipping of the TD error;
2. an episode cut off by a time limit is bootstrapped from its final observation;
3. `--tau` below 1 moves the target network a step towards the online network, where the paper copies it;
4. a copy every 1,000 steps, exploration down to 0.01, and learning after 80,000 steps, where
   the paper has 10,000 updates, 0.1 and 50,000.

Run: python dqn_atari.py --env-id BreakoutNoFrameskip-v4 --total-timesteps 10000000
"""

import gzip
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
from ale_py.vector_env import AtariVectorEnv
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    env_id: str = "BreakoutNoFrameskip-v4"  # environment
    total_timesteps: int = 10_000_000  # environment steps in total
    learning_rate: float = 1e-4  # step size of the optimizer
    num_envs: int = 1  # parallel environments
    buffer_size: int = 1_000_000  # transitions that the replay buffer holds
    buffer_device: Literal["auto", "cuda", "cpu"] = "auto"  # where the replay buffer is: the GPU if it fits, or named
    gamma: float = 0.99  # discount
    tau: float = 1.0  # step of the target network towards the online network (1 copies it)
    target_network_frequency: int = 1000  # steps between updates of the target network
    batch_size: int = 32  # transitions per gradient step
    start_e: float = 1.0  # exploration rate at the start
    end_e: float = 0.01  # exploration rate at the end
    exploration_fraction: float = 0.1  # share of the steps over which the exploration rate falls
    learning_starts: int = 80_000  # environment steps before the first gradient step
    train_frequency: int = 4  # environment steps between gradient steps

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


def make_envs(env_id, num_envs, life_loss=True, **options):
    flags = gym.spec(env_id).kwargs
    if "game" not in flags:
        raise gym.error.Error(f"{env_id} is not an Atari game: dqn.py for vectors as observations")
    options = {"reward_clipping": False, "autoreset_mode": "SameStep"} | options
    options |= {"repeat_action_probability": flags["repeat_action_probability"]}
    envs = AtariVectorEnv(flags["game"], num_envs, life_loss_info=life_loss, **options)
    envs.metadata = {"render_modes": ["rgb_array"]}  # by record_video
    return envs


class QNetwork(nn.Module):
    def __init__(self, envs):
        super().__init__()
        convs = (4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)  # channels in and out, size, stride
        layers = [layer for conv in convs for layer in (nn.Conv2d(*conv), nn.ReLU())]
        layers += [nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU()]
        self.network = nn.Sequential(*layers, nn.Linear(512, envs.single_action_space.n))

    def forward(self, obs):
        obs = obs.contiguous(memory_format=torch.channels_last)  # convolutions are faster so
        return self.network(obs / 255)


def epsilon_greedy(q_network, num_actions, epsilon, device):
    """A function from observations to actions."""
    rng = np.random.default_rng(0)

    @torch.no_grad()
    def policy(obs):
        greedy = q_network(torch.tensor(obs, device=device)).argmax(1).cpu().numpy()
        explore = rng.random(len(obs)) < epsilon
        return np.where(explore, rng.integers(num_actions, size=len(obs)), greedy)

    return policy


def load_policy(run_dir, envs, device, deterministic=False):
    """The saved network of a run, as a function from observations to actions."""
    q_network = QNetwork(envs).to(device)
    q_network.load_state_dict(load_file(Path(run_dir, "model.safetensors"), str(device)))
    flags = json.loads(Path(run_dir, "args.json").read_text())
    epsilon = 0 if deterministic else flags["end_e"]
    return epsilon_greedy(q_network, envs.single_action_space.n, epsilon, device)


class Ring:
    """The last items that were added, on a device: item number n is in slot n % size."""

    def __init__(self, size, shape, dtype, device):
        self.slots = torch.zeros((size, *shape), dtype=dtype, device=device)
        self.end, self.new = 0, []  # the number of the next item, and the items still on the host

    def __getitem__(self, numbers):
        return self.slots[numbers % len(self.slots)]

    def add(self, items):
        self.new.append(items.copy())
        self.end += len(items)
        return np.arange(self.end - len(items), self.end)

    def flush(self):
        """Write the items that wait in place of the oldest."""
        if self.new:
            items = np.concatenate(self.new) if len(self.new) > 1 else self.new[0]
            items = torch.from_numpy(items[-len(self.slots) :])
            slots = torch.arange(self.end - len(items), self.end) % len(self.slots)
            for block, places in zip(items.split(10_000), slots.split(10_000)):  # a resume brings many
                self.slots[places.to(self.slots.device)] = block.to(self.slots.device)
            self.new = []


class FrameReplay:
    """The last transitions. Frames are stored once, however many observations they are part of.

    A transition is a row of integers: the numbers of the frames of its observation and of the
    frame that followed, then action, reward, terminated. New ones wait on the host, as in dqn.py.
    """

    def __init__(self, size, num_envs, obs_shape, device, folder):
        self.size, self.num_envs, self.stack_num = size // num_envs * num_envs, num_envs, obs_shape[0]
        self.frames = Ring(self.size, obs_shape[1:], torch.uint8, device)
        self.rows = Ring(self.size, [self.stack_num + 1 + 3], torch.long, device)
        self.first_frames = deque()  # the oldest frame of each step that can be sampled
        self.window = torch.zeros(2, dtype=torch.long, device=device)  # first row and count: a graph can read it
        self.folder, self.saved = folder, (0, 0)

    def add(self, *columns):
        rows = np.column_stack(columns)
        self.rows.add(rows)
        self.first_frames.append(rows[:, 0].min())

    def flush(self):
        self.frames.flush()
        self.rows.flush()
        while self.first_frames and self.first_frames[0] < self.frames.end - self.size:
            self.first_frames.popleft()  # a newer frame took its slot
        count = len(self.first_frames) * self.num_envs
        self.window.copy_(torch.tensor([self.rows.end - count, count]))

    def sample(self, batch_size):
        """Rows, and the frames (batch_size, stack_num + 1, height, width) of both observations."""
        first, count = self.window
        # a graph keeps the range it was captured with: one so large that the remainder is as good as uniform
        numbers = first + torch.randint(2**62, (batch_size,), device=self.window.device) % count
        rows = self.rows[numbers]
        return rows, self.frames[rows[:, : self.stack_num + 1]]

    def split(self, rows, frames):
        """A sample as in dqn.py: obs, next_obs, action, reward, terminated."""
        action, reward, terminated = rows[:, self.stack_num + 1 :].split(1, dim=1)
        return frames[:, :-1], frames[:, 1:], action, reward.squeeze(1), terminated.squeeze(1)

    def state_dict(self):
        """Write what is new since the last call to a file of its own: each frame is written once."""
        self.flush()
        ends = self.frames.end, self.rows.end
        if ends == self.saved:  # nothing: the file of this name has what came before
            return ends
        for path in self.folder.glob("replay-*.gz"):
            if int(path.stem[7:]) <= self.saved[0] - self.size:
                path.unlink()  # of no use to the checkpoint that is there now
        path = self.folder / f"replay-{ends[0]:012}.gz"
        with gzip.open(path, "wb", compresslevel=1) as file:
            np.save(file, ends)
            for ring, start, end in zip((self.frames, self.rows), self.saved, ends):
                numbers = torch.arange(max(start, end - self.size), end)
                blocks = [ring[block].cpu() for block in numbers.split(10_000)]  # not all at once on the device
                np.save(file, torch.cat(blocks).numpy())
        with open(path) as file:
            os.fsync(file.fileno())
        self.saved = ends
        return ends

    def load_state_dict(self, ends):
        """Read the files of a checkpoint, and remove any that is newer."""
        for path in sorted(self.folder.glob("replay-*.gz")):
            if int(path.stem[7:]) > ends[0]:
                path.unlink()
                continue
            with gzip.open(path) as file:
                self.frames.end, self.rows.end = np.load(file).tolist()
                self.frames.new, self.rows.new = [np.load(file)], [np.load(file)]
            first_frames = self.rows.new[0][:, 0].reshape(-1, self.num_envs).min(1)
            self.first_frames.extend(first_frames)
            self.flush()
        self.saved = ends


def td_target(reward, terminated, next_q_values, gamma):
    """The reward and the discounted value of the best next action; none after the end of an episode."""
    return reward + gamma * (1 - terminated) * torch.amax(next_q_values, dim=1)


def linear_schedule(start, end, duration, step):
    return start + (end - start) * min(step / max(duration, 1), 1)


def dqn_loss(q_values, action, target):
    """The loss of a minibatch, and what is logged of it under losses/."""
    q_value = q_values.gather(1, action.long()).squeeze(1)
    td_loss = nn.functional.mse_loss(q_value, target)
    return td_loss, {"td_loss": td_loss, "q_values": q_value.mean()}


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


def record_video(policy, env_id, seed, path):
    """A game of the policy, filmed by a twin in colour that gets the same seed and the same actions."""
    from moviepy import ImageSequenceClip

    twin = make_envs(env_id, 1, False, grayscale=False, img_height=210, img_width=160, stack_num=1)
    frames = [twin.reset(seed=seed)[0][0, 0]]

    def film(obs):
        action = policy(obs)
        frames.append(twin.step(action)[0][0, 0])
        del frames[4500:]  # five minutes are enough
        return action

    evaluate(film, make_envs(env_id, 1, False), seed)
    path.parent.mkdir(exist_ok=True)
    ImageSequenceClip(frames, fps=15).write_videofile(path, logger=None)


if __name__ == "__main__":
    # Checks
    args = parse_args()
    if args.buffer_size < 10 * args.num_envs:
        fail("--buffer-size must be at least 10 times --num-envs, for the frames of a reset")
    if args.buffer_device == "cuda" and not (torch.cuda.is_available() and args.cuda):
        fail("--buffer-device cuda needs a GPU and --cuda")
    try_envs(args, args.env_id, 1)
    run = Run(args)

    # Seeding
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cuda.matmul.allow_tf32 = True  # as convolutions have it
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured

    # Environments, agent and optimizer
    envs = make_envs(args.env_id, args.num_envs)
    num_actions, obs_shape = envs.single_action_space.n, envs.single_observation_space.shape
    q_network, target_network = QNetwork(envs).to(device), QNetwork(envs).to(device)
    weights, target_weights = flatten(q_network), flatten(target_network).requires_grad_(False)
    target_weights.copy_(weights.detach())
    lr = torch.tensor(args.learning_rate, device=device)
    optimizer = torch.optim.Adam([weights], lr, fused=True, capturable=device.type == "cuda")

    # Storage
    buffer_bytes, buffer_device = args.buffer_size * int(np.prod(obs_shape[1:])), args.buffer_device
    if buffer_device == "auto":
        fits = device.type == "cuda" and buffer_bytes + 2**32 < torch.cuda.mem_get_info()[0]
        buffer_device = "cuda" if fits else "cpu"
    replay = FrameReplay(args.buffer_size, args.num_envs, obs_shape, buffer_device, run.dir)
    losses = Means()

    @torch.no_grad()
    def act(obs):
        return q_network(obs.to(device)).argmax(1)

    def draw():  # a graph cannot read the host's memory: what is drawn there is an argument of it
        return () if buffer_device == device.type else replay.sample(args.batch_size)

    def update(*drawn):
        drawn = [x.to(device) for x in drawn or replay.sample(args.batch_size)]
        b_obs, b_next_obs, b_actions, b_rewards, b_terminated = replay.split(*drawn)
        with torch.no_grad():
            target = td_target(b_rewards, b_terminated, target_network(b_next_obs), args.gamma)
        td_loss, logged = dqn_loss(q_network(b_obs), b_actions, target)
        weights.grad.zero_()
        td_loss.backward()
        optimizer.step()
        losses.add(logged)
        return logged

    if device.type == "cuda" and args.cuda_graphs:
        act, update = cuda_graph(act), cuda_graph(update)

    # Training loop
    parts = {"q_network": q_network, "target_network": target_network, "optimizer": optimizer}
    global_step = run.restore(parts | {"replay": replay, "rng": rng})
    exploration_steps = args.exploration_fraction * args.total_timesteps
    obs, infos = envs.reset(seed=args.seed + global_step)
    stacks = replay.frames.add(np.concatenate(obs)).reshape(len(obs), -1)  # frames of each observation
    actions = np.zeros(args.num_envs, dtype=np.int64)
    while global_step < args.total_timesteps:
        # Act
        epsilon = linear_schedule(args.start_e, args.end_e, exploration_steps, global_step)
        explore = rng.random(args.num_envs) < epsilon
        if explore.any():
            actions = rng.integers(num_actions, size=args.num_envs)
        if not explore.all():
            actions = np.where(explore, actions, act(torch.from_numpy(obs)).cpu().numpy())
        envs.send(actions)

        # Learn: while the environments step; there is nothing to draw at step 0
        ready, last_step = global_step > max(args.learning_starts, 0), global_step - args.num_envs
        due = global_step // args.train_frequency - last_step // args.train_frequency
        if due:
            replay.flush()
        for _ in range(due if ready else 0):
            td_loss, q_values = update(*draw()).values()
        due = global_step // args.target_network_frequency - last_step // args.target_network_frequency
        for _ in range(due if ready else 0):
            target_weights.lerp_(weights.detach(), args.tau)

        # Step
        lives = infos["lives"]
        next_obs, reward, terminated, truncated, infos = envs.recv()
        done = truncated | terminated & (infos["lives"] >= lives)  # a lost life leaves fewer, a new game as many
        run.log_episodes(global_step, reward, done)
        final_obs = next_obs
        if done.any():
            final_obs = next_obs.copy()
            final_obs[done] = np.stack(infos["final_obs"][done])
        followed = replay.frames.add(final_obs[:, -1])
        replay.add(stacks, followed, actions, np.sign(reward), terminated)
        stacks = np.column_stack((stacks[:, 1:], followed))
        for i in done.nonzero()[0]:
            stacks[i] = replay.frames.add(next_obs[i])
        obs = next_obs
        global_step += args.num_envs

        # Log
        log_due = global_step % 100 < args.num_envs or global_step >= args.total_timesteps
        if log_due:
            run.log(global_step, losses.take())
        film_due = global_step % (args.total_timesteps // 10 + 1) < max(100, args.num_envs)
        if log_due and film_due and args.capture_video:
            policy = epsilon_greedy(q_network, num_actions, args.end_e, device)
            path = run.dir / f"videos/step-{global_step}.mp4"
            record_video(policy, args.env_id, args.seed, path)

        # Checkpoint: when the means have just been taken
        if log_due:
            run.checkpoint(global_step, last=global_step >= args.total_timesteps)

    # Save and close
    envs.close()
    eval_returns = []
    if args.save_model:
        save_file(q_network.state_dict(), run.dir / "model.safetensors")
        eval_envs = make_envs(args.env_id, 10, life_loss=False)
        policy = load_policy(run.dir, eval_envs, device)
        eval_returns = evaluate(policy, eval_envs, seed=args.seed + 2**30)
    run.close(eval_returns)
