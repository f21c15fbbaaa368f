# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "ale-py>=0.12", "flax>=0.11", "gymnasium>=1.2", "jax>=0.7", "numpy>=2", "optax>=0.2.5", "safetensors>=0.5",
#     "tensorboard>=2.19", "tyro>=0.9",
# ]
# ///
"""Deep Q-learning (DQN, Mnih et al. 2015, doi:10.1038/nature14236): Atari games.

Differs from dqn_jax.py as dqn_atari.py does from dqn.py:
1. ale_py's vector environment: up to 30 no-ops and FIRE on reset, frame skip 4 with the maximum
   of the last two, 84x84 grey, 4 frames stacked;
2. a lost life ends the episode, but not the game, in which the agent then has to FIRE;
3. rewards are clipped to their sign for learning; logged returns are of whole games, unclipped;
4. the convolutional network of the paper;
5. the replay buffer stores each frame once, on the device; checkpoints write what is new;
6. videos are games of their own;
7. the emulators step during the gradient steps, which use the transitions so far.

Differs from the paper:
1. Adam in place of RMSProp, and no clipping of the TD error;
2. an episode cut off by a time limit is bootstrapped from its final observation;
3. `--tau` below 1 moves the target network a step towards the online network, where the paper copies it;
4. a copy every 1,000 steps, exploration down to 0.01, and learning after 80,000 steps, where
   the paper has 10,000 updates, 0.1 and 50,000.

Run: python dqn_atari_jax.py --env-id BreakoutNoFrameskip-v4 --total-timesteps 10000000
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
from functools import partial
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from ale_py.vector_env import AtariVectorEnv
from flax.serialization import from_state_dict, msgpack_restore, msgpack_serialize, to_state_dict
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.flax import load_file, save_file
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer import event_file_writer


@dataclass
class Args:
    env_id: str = "BreakoutNoFrameskip-v4"  # environment
    total_timesteps: int = 10_000_000  # environment steps in total
    learning_rate: float = 1e-4  # step size of the optimizer
    num_envs: int = 1  # parallel environments
    buffer_size: int = 1_000_000  # transitions that the replay buffer holds
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
        raise gym.error.Error(f"{env_id} is not an Atari game: dqn_jax.py for vectors as observations")
    options = {"reward_clipping": False, "autoreset_mode": "SameStep"} | options
    options |= {"repeat_action_probability": flags["repeat_action_probability"]}
    envs = AtariVectorEnv(flags["game"], num_envs, life_loss_info=life_loss, **options)
    envs.metadata = {"render_modes": ["rgb_array"]}  # by record_video
    return envs


class QNetwork(nn.Module):
    num_actions: int

    @nn.compact
    def __call__(self, obs):
        hidden = jnp.transpose(obs, (0, 2, 3, 1)) / 255  # Flax has the channels last
        hidden = nn.relu(nn.Conv(32, (8, 8), strides=4, padding="VALID")(hidden))
        hidden = nn.relu(nn.Conv(64, (4, 4), strides=2, padding="VALID")(hidden))
        hidden = nn.relu(nn.Conv(64, (3, 3), strides=1, padding="VALID")(hidden))
        hidden = nn.relu(nn.Dense(512)(hidden.reshape(len(hidden), -1)))
        return nn.Dense(self.num_actions)(hidden)


def epsilon_greedy(greedy, num_actions, epsilon):
    """A function from observations to actions."""
    rng = np.random.default_rng(0)

    def policy(obs):
        explore = rng.random(len(obs)) < epsilon
        return np.where(explore, rng.integers(num_actions, size=len(obs)), np.asarray(greedy(obs)))

    return policy


def load_policy(run_dir, envs, device, deterministic=False):
    """The saved network of a run, as a function from observations to actions."""
    q_network = QNetwork(envs.single_action_space.n)
    params = jax.device_put(unflatten_dict(load_file(Path(run_dir, "model.safetensors")), sep="."), device)
    flags = json.loads(Path(run_dir, "args.json").read_text())
    epsilon = 0 if deterministic else flags["end_e"]
    greedy = jax.jit(lambda obs: q_network.apply(params, obs).argmax(1))
    return epsilon_greedy(greedy, envs.single_action_space.n, epsilon)


@partial(jax.jit, donate_argnums=0)
def write(array, indices, items):
    """Assign items in place: a donated array is not copied."""
    return array.at[indices].set(items)


class Ring:
    """The last items that were added, on the device: item number n is in slot n % size."""

    def __init__(self, size, shape, dtype):
        self.slots = jnp.zeros((size, *shape), dtype=dtype)
        self.end, self.new = 0, []  # the number of the next item, and the items still on the host

    def __getitem__(self, numbers):
        return self.slots.at[numbers % len(self.slots)].get(mode="promise_in_bounds")

    def add(self, items):
        self.new.append(items.copy())
        self.end += len(items)
        return np.arange(self.end - len(items), self.end)

    def flush(self):
        """Write the items that wait in place of the oldest."""
        if self.new:
            items = np.concatenate(self.new, dtype=self.slots.dtype)[-len(self.slots) :]
            slots = np.arange(self.end - len(items), self.end) % len(self.slots)
            while len(items):  # each length is compiled anew, so there are only powers of two
                count = min(1024, 1 << len(items).bit_length() - 1)
                self.slots = write(self.slots, slots[:count], items[:count])
                items, slots = items[count:], slots[count:]
            self.new = []


class FrameReplay:
    """The last transitions. Frames are stored once, however many observations they are part of.

    A transition is a row of integers: the numbers of the frames of its observation and of the
    frame that followed, then action, reward, terminated. New ones wait on the host, as in dqn.py.
    """

    def __init__(self, size, num_envs, obs_shape, folder):
        self.size, self.num_envs, self.stack_num = size // num_envs * num_envs, num_envs, obs_shape[0]
        self.frames = Ring(self.size, obs_shape[1:], jnp.uint8)
        self.rows = Ring(self.size, [self.stack_num + 1 + 3], jnp.int32)
        self.first_frames = deque()  # the oldest frame of each step that can be sampled
        self.window = np.zeros(2, dtype=np.int32)  # first row and count
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
        self.window = np.array([self.rows.end - count, count], dtype=np.int32)

    def stored(self):
        """What `sample` draws from: an argument of compiled functions, in which it would be a constant."""
        return self.frames.slots, self.rows.slots, self.window

    def sample(self, key, stored, batch_size):
        """Rows, and the frames (batch_size, stack_num + 1, height, width) of both observations."""
        frames, rows, (first, count) = stored
        numbers = first + jax.random.randint(key, (batch_size,), 0, count)
        rows = rows[numbers % self.size]
        return rows, frames[rows[:, : self.stack_num + 1] % self.size]

    def split(self, rows, frames):
        """A sample as in dqn.py: obs, next_obs, action, reward, terminated."""
        action, reward, terminated = jnp.split(rows[:, self.stack_num + 1 :], 3, axis=1)
        return frames[:, :-1], frames[:, 1:], action, reward.squeeze(1), terminated.squeeze(1)

    def state_dict(self):
        """Write what is new since the last call to a file of its own: each frame is written once."""
        self.flush()
        ends = np.array([self.frames.end, self.rows.end])
        if (ends == self.saved).all():  # nothing: the file of this name has what came before
            return ends
        for path in self.folder.glob("replay-*.gz"):
            if int(path.stem[7:]) <= self.saved[0] - self.size:
                path.unlink()  # of no use to the checkpoint that is there now
        path = self.folder / f"replay-{ends[0]:012}.gz"
        with gzip.open(path, "wb", compresslevel=1) as file:
            np.save(file, ends)
            for ring, start, end in zip((self.frames, self.rows), self.saved, ends):
                numbers = np.arange(max(start, end - self.size), end)
                blocks = np.array_split(numbers, len(numbers) // 10_000 + 1)  # not all at once on the device
                np.save(file, np.concatenate([np.asarray(ring[block]) for block in blocks]))
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
    return reward + gamma * (1 - terminated) * jnp.max(next_q_values, axis=1)


def linear_schedule(start, end, duration, step):
    return start + (end - start) * min(step / max(duration, 1), 1)


def dqn_loss(q_values, action, target):
    """The loss of a minibatch, and what is logged of it under losses/."""
    q_value = jnp.take_along_axis(q_values, action.astype(int), axis=1).squeeze(1)
    td_loss = jnp.mean((q_value - target) ** 2)
    return td_loss, jnp.stack([td_loss, q_value.mean()])


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


class SummaryWriter:
    """The part of torch's SummaryWriter that we use."""

    def __init__(self, folder):
        self.file = event_file_writer.EventFileWriter(str(folder))  # looked up here, where W&B may have replaced it
        self.flush, self.close = self.file.flush, self.file.close

    def add_scalar(self, tag, value, step):
        self.add(Summary(value=[Summary.Value(tag=tag, simple_value=value)]), step)

    def add_text(self, tag, text, step):
        self.add(text_pb(tag, text), step)

    def add(self, summary, step):
        self.file.add_event(Event(summary=summary, step=int(step), wall_time=time.time()))


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
            self.saved = msgpack_restore((self.dir / "checkpoint.msgpack").read_bytes())
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

    def begin(self, state):
        """Go on from the checkpoint to resume, or write the first one; `state` returns what a checkpoint holds."""
        self.parts, self.step = state, self.saved.get("global_step", 0)
        self.start_time, self.start_step = time.perf_counter(), self.step
        self.marks = deque([(self.start_time, self.step)])
        self.recent_returns.extend(self.saved.get("recent_returns", []))
        if not self.saved:
            self.save(self.state(0))

    def state(self, global_step, **counters):
        """What a checkpoint holds."""
        self.writer.flush()
        state = {"global_step": global_step, "recent_returns": np.array(self.recent_returns, float)} | counters
        events = {file.name: file.stat().st_size for file in self.dir.glob("events*")}
        return state | self.parts() | {"events": events}

    def save(self, state):
        """Write a checkpoint; a kill leaves the last one or this one, never half of it."""
        (self.dir / "unfinished.tmp").write_bytes(msgpack_serialize(to_state_dict(jax.device_get(state))))
        with open(self.dir / "unfinished.tmp") as file:
            os.fsync(file.fileno())  # a power cut, too, leaves one of them
        os.replace(self.dir / "unfinished.tmp", self.dir / "checkpoint.msgpack")
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

    def log(self, global_step, losses, others=(), weights=()):
        """Log the losses, which have to be finite as the weights have, and other metrics; show progress."""
        if not np.isfinite([*losses.values(), jax.jit(optax.global_norm)(weights)]).all():
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


def refill(tree, saved):
    """What was saved of a pytree, on the device; of a replay buffer only the rows that were filled are saved."""

    def fill(array, rows):
        return rows if np.shape(rows) == np.shape(array) else array.at[: len(rows)].set(rows)

    return jax.device_put(jax.tree.map(fill, tree, from_state_dict(tree, saved)))


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
    if args.total_timesteps > 10**9:
        fail("--total-timesteps must be at most 1000000000: frames are counted in 32 bits")
    try_envs(args, args.env_id, 1)
    run = Run(args)

    # Seeding
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave the rest to other runs
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # a thread costs more than it hides
    device = jax.devices()[0]
    key, init_key = jax.random.split(jax.random.key(args.seed))
    rng = np.random.default_rng(args.seed)

    # Environments, agent and optimizer
    envs = make_envs(args.env_id, args.num_envs)
    num_actions, obs_shape = envs.single_action_space.n, envs.single_observation_space.shape
    q_network = QNetwork(num_actions)
    params = jax.jit(q_network.init)(init_key, jnp.zeros((1, *obs_shape)))
    optimizer = optax.adam(args.learning_rate)

    # Storage
    replay, num_updates = FrameReplay(args.buffer_size, args.num_envs, obs_shape, run.dir), 0
    loss_names = ["losses/td_loss", "losses/q_values"]
    learner = {
        "params": params,
        "target_params": jax.tree.map(jnp.copy, params),
        "opt_state": optimizer.init(params),
        "key": jax.random.key_data(key),
        "losses": jnp.zeros(len(loss_names)),  # sums since they were last logged
    }

    @jax.jit
    def act(params, obs):
        return q_network.apply(params, obs).argmax(1)

    @partial(jax.jit, donate_argnums=0)
    def update(learner, stored):
        key, sample_key = jax.random.split(jax.random.wrap_key_data(learner["key"]))
        batch = replay.split(*replay.sample(sample_key, stored, args.batch_size))
        b_obs, b_next_obs, b_actions, b_rewards, b_terminated = batch
        next_q_values = q_network.apply(learner["target_params"], b_next_obs)
        target = td_target(b_rewards, b_terminated, next_q_values, args.gamma)

        def loss(params):
            return dqn_loss(q_network.apply(params, b_obs), b_actions, target)

        (_, logged), gradients = jax.value_and_grad(loss, has_aux=True)(learner["params"])
        updates, opt_state = optimizer.update(gradients, learner["opt_state"])
        return learner | {
            "params": optax.apply_updates(learner["params"], updates),
            "opt_state": opt_state,
            "key": jax.random.key_data(key),
            "losses": learner["losses"] + logged,
        }

    # Training loop
    def state():
        generator = json.dumps(rng.bit_generator.state)
        return {"learner": learner, "replay": replay.state_dict(), "rng": generator}

    global_step = run.saved.get("global_step", 0)
    if args.resume:
        learner = refill(learner, run.saved["learner"])
        replay.load_state_dict(run.saved["replay"])
        rng.bit_generator.state = json.loads(run.saved["rng"])
    run.begin(state)
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
            actions = np.where(explore, actions, np.asarray(act(learner["params"], obs)))
        envs.send(actions)

        # Learn: while the environments step; there is nothing to draw at step 0
        ready, last_step = global_step > max(args.learning_starts, 0), global_step - args.num_envs
        due = global_step // args.train_frequency - last_step // args.train_frequency
        if due:
            replay.flush()
        for _ in range(due if ready else 0):
            learner, num_updates = update(learner, replay.stored()), num_updates + 1
        due = global_step // args.target_network_frequency - last_step // args.target_network_frequency
        for _ in range(due if ready else 0):
            both = learner["params"], learner["target_params"]
            learner["target_params"] = optax.incremental_update(*both, args.tau)

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
            means = {}
            if num_updates:
                means = dict(zip(loss_names, (np.asarray(learner["losses"]) / num_updates).tolist()))
                learner["losses"], num_updates = jnp.zeros(len(loss_names)), 0
            run.log(global_step, means, weights=learner["params"])
        film_due = global_step % (args.total_timesteps // 10 + 1) < max(100, args.num_envs)
        if log_due and film_due and args.capture_video:
            policy = epsilon_greedy(partial(act, learner["params"]), num_actions, args.end_e)
            path = run.dir / f"videos/step-{global_step}.mp4"
            record_video(policy, args.env_id, args.seed, path)

        # Checkpoint: when the means have just been taken
        if log_due:
            run.checkpoint(global_step, last=global_step >= args.total_timesteps)

    # Save and close
    envs.close()
    eval_returns = []
    if args.save_model:
        save_file(flatten_dict(learner["params"], sep="."), run.dir / "model.safetensors")
        eval_envs = make_envs(args.env_id, 10, life_loss=False)
        policy = load_policy(run.dir, eval_envs, device)
        eval_returns = evaluate(policy, eval_envs, seed=args.seed + 2**30)
    run.close(eval_returns)
