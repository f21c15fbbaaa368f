# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "flax>=0.11", "gymnasium[mujoco]>=1.2", "jax>=0.7", "numpy>=2", "optax>=0.2.5", "safetensors>=0.5",
#     "tensorboard>=2.19", "tyro>=0.9",
# ]
# ///
"""Dropout Q-functions (DroQ, Hiraoka et al. 2021, arXiv:2110.02034): vector observations, continuous actions.

Differs from sac_continuous_action_jax.py:
1. dropout and layer normalisation follow each hidden linear layer of the critics, also where they give the targets;
2. 20 gradient steps of the critics per environment step, then one of the actor, at one step size;
3. the actor follows the mean of both critics.

Differs from the paper:
1. one dropout rate and -1 of entropy per dimension for all environments, where the paper chose them for each;
2. tanh keeps deviations between exp(-5) and exp(2);
3. an episode cut off by a time limit is bootstrapped from its final observation.

Run: python droq_continuous_action_jax.py --env-id HalfCheetah-v4 --total-timesteps 100000
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

import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax.serialization import from_state_dict, msgpack_restore, msgpack_serialize, to_state_dict
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.flax import load_file, save_file
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer import event_file_writer


@dataclass
class Args:
    env_id: str = "Hopper-v4"  # environment
    total_timesteps: int = 100_000  # environment steps in total
    num_envs: int = 1  # parallel environments
    buffer_size: int = 1_000_000  # transitions that the replay buffer holds
    gamma: float = 0.99  # discount
    tau: float = 0.005  # step of the target network towards the online network (1 copies it)
    batch_size: int = 256  # transitions per gradient step
    learning_starts: int = 5_000  # environment steps before the first gradient step
    policy_lr: float = 3e-4  # step size of the actor's optimizer
    q_lr: float = 3e-4  # step size of the optimizers of the critics and of alpha
    utd: float = 20.0  # gradient steps per environment step
    policy_frequency: int = 20  # gradient steps of the critic from one turn of the actor to the next
    target_network_frequency: int = 1  # steps between updates of the target network
    alpha: float = 0.2  # price of entropy, where it is not tuned
    autotune: bool = True  # tune the price of entropy
    dropout_rate: float = 0.01  # share of the critics' hidden units that dropout silences

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
    checkpoint_freq: int = 10_000  # environment steps between checkpoints


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
        raise gym.error.Error(f"{env_id} has no vectors as continuous actions: dqn_jax.py for discrete ones")
    if not actions.is_bounded():
        raise gym.error.Error(f"{env_id} has actions without bounds: ppo_continuous_action.py")
    if len(obs.shape or ()) != 1:
        raise gym.error.Error(f"{env_id} has no vectors as observations: dqn_atari_jax.py for Atari games")
    return envs


class Actor(nn.Module):
    low: np.ndarray
    high: np.ndarray

    @property
    def scale(self):
        return (self.high - self.low) / 2

    @nn.compact
    def __call__(self, obs):
        """Mean and logarithm of the deviation of the Gaussian before it is squashed."""
        hidden = nn.relu(nn.Dense(256)(obs))
        hidden = nn.relu(nn.Dense(256)(hidden))
        mean, log_std = jnp.split(nn.Dense(2 * len(self.low))(hidden), 2, axis=1)
        return mean, -5 + 3.5 * (nn.tanh(log_std) + 1)

    def squash(self, x):
        action = self.low + (nn.tanh(x) + 1) * self.scale
        return jnp.clip(action, self.low, self.high)  # rounding does not take it out of the bounds

    def sample(self, params, obs, key):
        mean, log_std = self.apply(params, obs)
        x = mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)
        return self.squash(x), squashed_logprob(x, mean, log_std, self.scale)


class SoftQNetwork(nn.Module):
    dropout_rate: float

    @nn.compact
    def __call__(self, obs, action):
        """The value; units drop out where a key for them is given."""
        hidden = jnp.concatenate([obs, action], axis=1)
        for _ in range(2):
            dropout = nn.Dropout(self.dropout_rate, deterministic=not self.has_rng("dropout"))
            hidden = dropout(nn.Dense(256)(hidden))
            hidden = nn.relu(nn.LayerNorm()(hidden))
        return nn.Dense(1)(hidden).squeeze(1)


# Both critics as one: their weights are stacked, their values are (2, batch)
STACKED = {"variable_axes": {"params": 0}, "split_rngs": {"params": True, "dropout": True}}
Critics = nn.vmap(SoftQNetwork, in_axes=None, axis_size=2, **STACKED)


def load_policy(run_dir, envs, device, deterministic=True):
    """The saved actor of a run, as a function from observations to actions."""
    actor = Actor(envs.single_action_space.low, envs.single_action_space.high)
    model = unflatten_dict(load_file(Path(run_dir, "model.safetensors")), sep=".")
    params, apply = jax.device_put(model["actor"], device), jax.jit(actor.apply)
    rng = np.random.default_rng(0)

    def policy(obs):
        mean, log_std = apply(params, obs)
        noise = 0 if deterministic else rng.standard_normal(mean.shape, dtype=np.float32)
        return np.asarray(actor.squash(mean + jnp.exp(log_std) * noise))

    return policy


@partial(jax.jit, donate_argnums=0)
def write(array, indices, items):
    """Assign items in place: a donated array is not copied."""
    return array.at[indices].set(items)


class ReplayBuffer:
    """The last transitions, one row each. New ones wait on the host, so that one copy serves many steps."""

    def __init__(self, size, obs_dim, action_dim):
        self.rows = jnp.zeros((size, 2 * obs_dim + action_dim + 2))
        self.columns = obs_dim, obs_dim, action_dim, 1, 1  # obs, next_obs, action, reward, terminated
        self.added, self.new = 0, []

    def add(self, obs, next_obs, action, reward, terminated):
        columns = obs, next_obs, action.reshape(len(obs), -1), reward[:, None], terminated[:, None]
        self.new.append(np.concatenate(columns, axis=1, dtype=np.float32))

    def flush(self):
        """Write the rows that wait in place of the oldest."""
        self.added += sum(map(len, self.new))
        new = np.concatenate([*self.new, np.zeros((0, self.rows.shape[1]), np.float32)])
        new = new[-len(self.rows) :]
        slots = np.arange(self.added - len(new), self.added) % len(self.rows)
        self.rows = write(self.rows, slots, new)
        self.new = []

    def stored(self):
        """What `sample` draws from: an argument of compiled functions, in which it would be a constant."""
        return self.rows, min(self.added, len(self.rows))

    def sample(self, key, stored, batch_size):
        rows, filled = stored
        batch = rows[jax.random.randint(key, (batch_size,), 0, filled)]
        ends = np.cumsum(self.columns)[:-1]
        obs, next_obs, action, reward, terminated = jnp.split(batch, ends, axis=1)
        return obs, next_obs, action, reward.squeeze(1), terminated.squeeze(1)

    def state_dict(self):
        self.flush()
        return {"rows": np.asarray(self.rows)[: self.added], "added": self.added}

    def load_state_dict(self, state):
        self.rows, self.added = refill(self.rows, state["rows"]), state["added"]


def squashed_logprob(x, mean, log_std, scale):
    """The log-density of the action offset + scale * tanh(x), for x from a Gaussian; sums over dimensions."""
    gaussian = -0.5 * ((x - mean) / jnp.exp(log_std)) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
    log_slope = 2 * (math.log(2) - x - nn.softplus(-2 * x))  # log(1 - tanh(x)**2), exact also far from 0
    return (gaussian - log_slope - jnp.log(scale)).sum(1)


def bellman_target(reward, terminated, next_value, gamma):
    """The reward and the discounted next value; none after the end of an episode."""
    return reward + gamma * (1 - terminated) * next_value


def twin_q_loss(q_values, target):
    """The loss of a minibatch, of both critics' values, and what is logged of it under losses/."""
    qf_losses = jnp.mean((q_values - target) ** 2, axis=1)
    logged = [qf_losses, qf_losses.mean(keepdims=True), q_values.mean(1)]
    return qf_losses.sum(), jnp.concatenate(logged)


def soft_policy_loss(logprob, q_value, alpha):
    """The actor's loss (eq. 9): the price of a lack of entropy, less the value of the action."""
    return (alpha * logprob - q_value).mean()


def price_loss(log_alpha, logprob, target_entropy):
    """The price of entropy rises as long as the policy has less than asked for (eq. 18)."""
    return -(jnp.exp(log_alpha) * (logprob + target_entropy)).mean()


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


if __name__ == "__main__":
    # Checks
    args = parse_args()
    if not (0 < args.utd < np.inf and 0 <= args.dropout_rate < 1):
        fail("--utd must be above 0, --dropout-rate at least 0 and below 1")
    try_envs(args, args.env_id, 1)
    run = Run(args)

    # Seeding
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave the rest to other runs
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # a thread costs more than it hides
    device = jax.devices()[0]
    key, init_key = jax.random.split(jax.random.key(args.seed))
    rng = np.random.default_rng(args.seed)

    # Environments, agent and optimizer
    envs = make_envs(args.env_id, args.num_envs, run.dir / "videos" if args.capture_video else None)
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    low, high = envs.single_action_space.low, envs.single_action_space.high
    actor, qf = Actor(low, high), Critics(args.dropout_rate)
    actor_key, qf_key = jax.random.split(init_key)
    actor_params = jax.jit(actor.init)(actor_key, jnp.zeros((1, obs_dim)))
    qf_params = jax.jit(qf.init)(qf_key, jnp.zeros((1, obs_dim)), jnp.zeros((1, action_dim)))
    log_alpha = jnp.log(jnp.float32(1 if args.autotune else args.alpha))
    actor_optimizer, qf_optimizer, alpha_optimizer = map(optax.adam, (args.policy_lr, args.q_lr, args.q_lr))

    # Storage
    replay = ReplayBuffer(args.buffer_size, obs_dim, action_dim)
    loss_names = ["qf1_loss", "qf2_loss", "qf_loss", "qf1_values", "qf2_values"]
    loss_names += ["actor_loss", "alpha_loss", "alpha"]
    learner = {
        "actor_params": actor_params,
        "qf_params": qf_params,
        "target_qf_params": jax.tree.map(jnp.copy, qf_params),
        "log_alpha": log_alpha,
        "actor_opt_state": actor_optimizer.init(actor_params),
        "qf_opt_state": qf_optimizer.init(qf_params),
        "alpha_opt_state": alpha_optimizer.init(log_alpha),
        "key": jax.random.key_data(key),
        "losses": jnp.zeros((2, len(loss_names))),  # sums and counts since they were last logged
        "gradient_steps": jnp.zeros((), dtype=int),
    }

    @jax.jit
    def act(params, obs, noise):
        mean, log_std = actor.apply(params, obs)
        return actor.squash(mean + jnp.exp(log_std) * noise)

    def update_qf(learner, batch, key):
        key, target_key, dropout_key = jax.random.split(key, 3)
        b_obs, b_next_obs, b_actions, b_rewards, b_terminated = batch
        next_actions, next_logprob = actor.sample(learner["actor_params"], b_next_obs, key)
        rngs, target_params = {"dropout": target_key}, learner["target_qf_params"]
        next_value = qf.apply(target_params, b_next_obs, next_actions, rngs=rngs).min(0)
        next_value -= jnp.exp(learner["log_alpha"]) * next_logprob
        target = bellman_target(b_rewards, b_terminated, next_value, args.gamma)

        def loss(params):
            return twin_q_loss(qf.apply(params, b_obs, b_actions, rngs={"dropout": dropout_key}), target)

        (_, logged), gradients = jax.value_and_grad(loss, has_aux=True)(learner["qf_params"])
        updates, opt_state = qf_optimizer.update(gradients, learner["qf_opt_state"])
        return learner | {
            "qf_params": optax.apply_updates(learner["qf_params"], updates),
            "qf_opt_state": opt_state,
            "losses": learner["losses"].at[0, :-3].add(logged).at[1, :-3].add(1),
        }

    def update_actor(learner, b_obs, key):
        key, dropout_key = jax.random.split(key)

        def loss(params):
            new_actions, logprob = actor.sample(params, b_obs, key)
            rngs = {"dropout": dropout_key}
            q_values = qf.apply(learner["qf_params"], b_obs, new_actions, rngs=rngs)
            return soft_policy_loss(logprob, q_values.mean(0), jnp.exp(learner["log_alpha"])), logprob

        (actor_loss, logprob), gradients = jax.value_and_grad(loss, has_aux=True)(learner["actor_params"])
        updates, opt_state = actor_optimizer.update(gradients, learner["actor_opt_state"])
        params = optax.apply_updates(learner["actor_params"], updates)
        learner |= {"actor_params": params, "actor_opt_state": opt_state}
        alpha_loss, gradient = jax.value_and_grad(price_loss)(learner["log_alpha"], logprob, -action_dim)
        if args.autotune:
            update, opt_state = alpha_optimizer.update(gradient, learner["alpha_opt_state"])
            learner |= {"log_alpha": learner["log_alpha"] + update, "alpha_opt_state": opt_state}
        logged = jnp.stack([actor_loss, alpha_loss, jnp.exp(learner["log_alpha"])])
        return learner | {"losses": learner["losses"].at[0, -3:].add(logged).at[1, -3:].add(1)}

    @partial(jax.jit, donate_argnums=0, static_argnums=(2, 3))
    def learn(learner, stored, updates, actor_updates):
        def update(learner, _):
            keys = jax.random.split(jax.random.wrap_key_data(learner["key"]), 4)
            key, sample_key, next_key, actor_key = keys
            steps = learner["gradient_steps"] + 1
            learner |= {"key": jax.random.key_data(key), "gradient_steps": steps}
            batch = replay.sample(sample_key, stored, args.batch_size)
            learner = update_qf(learner, batch, next_key)
            tau = jnp.where(steps % args.target_network_frequency == 0, args.tau, 0.0)
            both = learner["qf_params"], learner["target_qf_params"]
            target_params = optax.incremental_update(*both, tau)
            return learner | {"target_qf_params": target_params}, (batch[0], actor_key)

        learner, batches = jax.lax.scan(update, learner, length=updates)
        last = [column[updates - actor_updates :] for column in batches]  # the actor learns from these
        return jax.lax.scan(lambda learner, batch: (update_actor(learner, *batch), None), learner, last)[0]

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
    gradient_steps = int(learner["gradient_steps"])
    obs = envs.reset(seed=args.seed + global_step)[0].astype(np.float32)
    while global_step < args.total_timesteps:
        # Act
        if global_step < args.learning_starts:
            actions = rng.uniform(low, high, size=(args.num_envs, action_dim)).astype(np.float32)
        else:
            noise = rng.standard_normal((args.num_envs, action_dim), dtype=np.float32)
            actions = np.array(act(learner["actor_params"], obs, noise))

        # Learn: before the environments step, so that a GPU works on it while they do
        replay.flush()
        due = int(global_step * args.utd) - int((global_step - args.num_envs) * args.utd)
        if due and global_step > max(args.learning_starts, 0):
            actor_due = (gradient_steps % args.policy_frequency + due) // args.policy_frequency
            learner = learn(learner, replay.stored(), due, actor_due)
            gradient_steps += due

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
            sums_counts = zip(loss_names, *learner["losses"].tolist())
            means = {f"losses/{name}": total / count for name, total, count in sums_counts if count}
            learner["losses"] = jnp.zeros((2, len(loss_names)))
            run.log(global_step, means, weights=(learner["actor_params"], learner["qf_params"]))

        # Checkpoint: when the means have just been taken
        if log_due:
            run.checkpoint(global_step, last=global_step >= args.total_timesteps)

    # Save and close
    envs.close()
    eval_returns = []
    if args.save_model:
        model = {"actor": learner["actor_params"], "qf": learner["qf_params"]}
        save_file(flatten_dict(model, sep="."), run.dir / "model.safetensors")
        eval_envs = make_envs(args.env_id, 10)
        policy = load_policy(run.dir, eval_envs, device)
        eval_returns = evaluate(policy, eval_envs, seed=args.seed + 2**30)
    run.close(eval_returns)
