# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "envpool>=1.2; sys_platform == 'linux'", "flax>=0.11", "gymnasium>=1.2", "jax>=0.7", "numpy>=2", "optax>=0.2.5",
#     "safetensors>=0.5", "tensorboard>=2.19", "tyro>=0.9",
# ]
# ///
"""Proximal Policy Optimization (PPO, Schulman et al. 2017, arXiv:1707.06347): Atari games of EnvPool.

Differs from ppo_atari_envpool_xla_jax.py:
1. an iteration is one compiled function: `lax.scan` goes through the steps of the rollout and the
   minibatches, `lax.while_loop` through the epochs; the time of its compilation is logged.

Differs from the paper:
1. advantages are standardised per minibatch, gradients clipped to a global norm;
2. orthogonal initialisation; 4 epochs, not 3; a fixed clip range; the value loss weighs a quarter;
3. an episode cut off by a time limit is bootstrapped from its final observation.

Run: python ppo_atari_envpool_xla_jax_scan.py --env-id Breakout-v5 --total-timesteps 10000000
"""

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

try:
    import envpool
except ImportError:  # make_envs says what to do
    envpool = None


@dataclass
class Args:
    env_id: str = "Breakout-v5"  # environment
    total_timesteps: int = 10_000_000  # environment steps in total
    learning_rate: float = 2.5e-4  # step size of the optimizer
    num_envs: int = 8  # parallel environments
    num_steps: int = 128  # rollout length per environment
    anneal_lr: bool = True  # decay the learning rate linearly to zero
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # trace parameter of the advantage estimate
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # standardise advantages per minibatch
    clip_coef: float = 0.1  # clip range of ratios and values
    clip_vloss: bool = False  # clip the value loss
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # ceiling of the global gradient norm
    target_kl: float | None = None  # end an update's epochs once the approximate KL exceeds this

    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run's name
    seed: int = 1  # random seed
    torch_deterministic: bool = True  # ask for deterministic operations on the GPU
    cuda: bool = True  # use the GPU if there is one
    track: bool = False  # mirror the run to Weights & Biases
    wandb_project_name: str = "cleanRL"  # W&B project
    wandb_entity: str | None = None  # W&B user or team
    capture_video: bool = False  # record episodes at several stages of training
    save_model: bool = False  # write model.safetensors at the end and evaluate it on held-out seeds
    upload_model: bool = False  # push the finished run folder to the Hugging Face hub (implies --save-model)
    hf_entity: str = ""  # hub user or organisation, if not the owner of the token
    resume: str = ""  # continue the run in this folder, or the newest in runs: latest
    checkpoint_freq: int = 100_000  # environment steps between checkpoints


class SameStepEnvPool:
    """EnvPool, but a game restarts within the last step of the one before, not in a step of its own.

    `starts` tells where a game or a life begins: networks with memory need it.
    """

    metadata = {"render_modes": ["rgb_array"]}  # by record_game

    def __init__(self, env_id, num_envs, life_loss, **options):
        self.make = partial(envpool.make, env_id, env_type="gymnasium", num_envs=num_envs, **options)
        spec = envpool.make_spec(env_id, num_envs=num_envs, **options)
        self.single_observation_space = spec.observation_space
        self.single_action_space = spec.action_space
        self.num_envs, self.life_loss = num_envs, life_loss

    def reset(self, seed):
        self.pool = self.make(seed=seed % 2**31)  # EnvPool takes a seed only when it is made
        obs, infos = self.pool.reset()
        self.lives, self.starts = infos["lives"], np.ones(self.num_envs, dtype=bool)
        return obs, infos

    def step(self, actions):
        obs, reward, terminated, truncated, infos = self.pool.step(actions)
        game_over, lives, final_obs = terminated | truncated, infos["lives"], obs
        life_lost = (0 < lives) & (lives < self.lives)  # some games go on a little with no life left
        self.starts = game_over | life_lost
        if self.life_loss:
            terminated = terminated | life_lost
        if game_over.any():
            first_obs, infos = self.pool.reset(np.flatnonzero(game_over).astype(np.int32))
            obs, lives = obs.copy(), lives.copy()
            obs[infos["env_id"]], lives[infos["env_id"]] = first_obs, infos["lives"]
        self.lives = lives
        infos = {"final_obs": final_obs, "game_over": game_over}
        return obs, reward, terminated, truncated, infos

    def close(self):
        self.pool.close()


def make_envs(env_id, num_envs, life_loss=True, **options):
    if envpool is None:
        raise ImportError("EnvPool is missing: pip install envpool (Linux; elsewhere: ppo_atari.py)")
    env_id = env_id.replace("NoFrameskip-v4", "-v5")  # EnvPool's name of the same game
    if env_id not in envpool.list_all_envs():
        near = difflib.get_close_matches(env_id, envpool.list_all_envs())
        raise gym.error.Error(f"EnvPool has no {env_id}, but {', '.join(near) or 'Breakout-v5'}")
    spec = envpool.make_spec(env_id)
    if "episodic_life" not in spec.config._fields:
        discrete = isinstance(spec.action_space, gym.spaces.Discrete)
        file = "ppo.py" if discrete else "ppo_continuous_action.py"
        raise gym.error.Error(f"{env_id} is not an Atari game: {file} for vectors as observations")
    return SameStepEnvPool(env_id, num_envs, life_loss, **options)


def check_xla(envs):
    """Step a game inside a compiled function, on the device that JAX has chosen."""
    envs.reset(seed=0)
    try:
        handle, _, _, env_step = envs.pool.xla()
        jax.block_until_ready(jax.jit(env_step)(handle, jnp.zeros(envs.num_envs, jnp.int32)))
    except (RuntimeError, ValueError) as error:
        device, reason = jax.devices()[0].device_kind, str(error).partition("\n")[0]
        way = "JAX_PLATFORMS=cpu uses the CPU, ppo_atari_envpool.py needs no XLA"
        fail(f"EnvPool's XLA interface fails on {device}: {way} ({reason})")
    envs.close()


class Conv(nn.Module):
    """A convolution without padding, as the product of patches and a matrix.

    XLA's own convolutions have gradients that are very slow on a CPU within `lax.scan`.
    """

    features: int
    size: int  # a multiple of the stride, as are height and width
    stride: int

    @nn.compact
    def __call__(self, x):
        num, height, width, channels = x.shape
        stride, cells = self.stride, self.size // self.stride
        shape = self.size, self.size, channels, self.features
        kernel = self.param("kernel", nn.initializers.orthogonal(2**0.5), shape)
        bias = self.param("bias", nn.initializers.zeros, self.features)

        # cells of stride x stride pixels become pixels, over which a smaller kernel has stride 1
        height, width = height // stride, width // stride
        x = x.reshape(num, height, stride, width, stride, channels).swapaxes(2, 3)
        x = x.reshape(num, height, width, -1)
        kernel = kernel.reshape(cells, stride, cells, stride, channels, -1).swapaxes(1, 2)
        rows, columns = height - cells + 1, width - cells + 1
        patches = [x[:, i : i + rows, j : j + columns] for i in range(cells) for j in range(cells)]
        return jnp.concatenate(patches, axis=-1) @ kernel.reshape(-1, self.features) + bias


class Agent(nn.Module):
    num_actions: int

    @nn.compact
    def __call__(self, obs):
        hidden = jnp.transpose(obs, (0, 2, 3, 1)) / 255  # the channels come last
        hidden = nn.relu(Conv(32, 8, stride=4)(hidden))
        hidden = nn.relu(Conv(64, 4, stride=2)(hidden))
        hidden = nn.relu(Conv(64, 3, stride=1)(hidden))
        hidden = hidden.reshape(len(hidden), -1)
        hidden = nn.relu(nn.Dense(512, kernel_init=nn.initializers.orthogonal(2**0.5))(hidden))
        logits = nn.Dense(self.num_actions, kernel_init=nn.initializers.orthogonal(0.01))(hidden)
        value = nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0))(hidden)
        return logits, value.squeeze(-1)


def logprob_of(logits, action):
    return jnp.take_along_axis(nn.log_softmax(logits), action[:, None], axis=1).squeeze(1)


def softmax_policy(forward, params, deterministic=False):
    """A function from observations to actions: Gumbel-max draws from the softmax of logits."""
    rng = np.random.default_rng(0)

    def policy(obs):
        logits = np.asarray(forward(params, obs)[0])
        return (logits if deterministic else logits + rng.gumbel(size=logits.shape)).argmax(1)

    return policy


def load_policy(run_dir, envs, device, deterministic=False):
    """The saved agent of a run, as a function from observations to actions."""
    agent = Agent(envs.single_action_space.n)
    params = jax.device_put(unflatten_dict(load_file(Path(run_dir, "model.safetensors")), sep="."), device)
    return softmax_policy(jax.jit(agent.apply), params, deterministic)


def gae(rewards, values, next_value, dones, final_values, gamma, gae_lambda):
    """Generalised advantages (Schulman et al. 2016, eq. 16) of (num_steps, num_envs) arrays; what follows
    the end of an episode is worth `final_values`: V(final observation) if it was truncated, else zero."""

    def backward(carry, row):
        (advantage, next_value), (reward, value, done, final_value) = carry, row
        delta = reward + gamma * jnp.where(done, final_value, next_value) - value
        advantage = delta + gamma * gae_lambda * (1 - done) * advantage
        return (advantage, value), advantage

    last, rows = (jnp.zeros_like(next_value), next_value), (rewards, values, dones, final_values)
    return jax.lax.scan(backward, last, rows, reverse=True)[1]


def masked_mean(x, valid):
    """The mean over the valid rows; zero if there are none."""
    return jnp.where(valid, x, 0).sum() / jnp.maximum(valid.sum(), 1)


def masked_ppo_loss(newlogprob, entropy, newvalue, logprob, value, advantage, target, valid, args):
    """The loss of the valid rows of a minibatch, and what is logged of it under losses/."""
    mean = partial(masked_mean, valid=valid)
    if args.norm_adv:
        centred, count = advantage - mean(advantage), valid.sum()
        std = jnp.sqrt(mean(centred**2) * count / jnp.maximum(count - 1, 1))
        advantage = centred / (std + 1e-8)
    logratio = newlogprob - logprob
    ratio = jnp.exp(logratio)
    clipped_ratio = ratio.clip(1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = -mean(jnp.minimum(advantage * ratio, advantage * clipped_ratio))  # eq. 7
    v_error = (newvalue - target) ** 2
    if args.clip_vloss:
        clipped_value = value + (newvalue - value).clip(-args.clip_coef, args.clip_coef)
        v_error = jnp.maximum(v_error, (clipped_value - target) ** 2)
    v_loss = 0.5 * mean(v_error)
    entropy_loss = mean(entropy)
    loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss  # eq. 9
    old_approx_kl = -mean(logratio)
    approx_kl = mean((ratio - 1) - logratio)  # estimator k3 of http://joschu.net/blog/kl-approx.html
    clipfrac = mean(ratio != clipped_ratio)
    logged = [v_loss, pg_loss, entropy_loss, old_approx_kl, approx_kl, clipfrac, loss]
    return loss, jnp.stack(logged)


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


def record_game(policy, envs, env_id, seed, path):
    """A game of the policy, filmed by a twin in colour that gets the same seed and the same actions."""
    from moviepy import ImageSequenceClip

    twin = make_envs(env_id, 1, False, gray_scale=False, img_height=210, img_width=160, stack_num=1)
    frames = [twin.reset(seed=seed)[0][0].transpose(1, 2, 0)]

    def film(obs):
        action = policy(obs)
        frames.append(twin.step(action)[0][0].transpose(1, 2, 0))
        del frames[4500:]  # five minutes are enough
        return action

    evaluate(film, envs, seed)
    envs.close()
    twin.close()
    path.parent.mkdir(exist_ok=True)
    ImageSequenceClip(frames, fps=15).write_videofile(path, logger=None)


class RunWithMeans(Run):
    def begin(self, state):
        self.recent_lengths = deque(self.saved.get("recent_lengths", []), maxlen=20)
        super().begin(state)

    def state(self, global_step):
        return super().state(global_step, recent_lengths=np.array(self.recent_lengths, float))

    def log_games(self, global_step, game_over, returns, lengths):
        """Log the games of a rollout that ended, and the means of the last 20."""
        for step, i in np.argwhere(game_over):
            at = global_step + step * game_over.shape[1] + i + 1  # the number of this step
            self.recent_returns.append(returns[step, i])
            self.recent_lengths.append(lengths[step, i])
            self.writer.add_scalar("charts/episodic_return", returns[step, i], at)
            self.writer.add_scalar("charts/avg_episodic_return", np.mean(self.recent_returns), at)
            self.writer.add_scalar("charts/episodic_length", lengths[step, i], at)
            self.writer.add_scalar("charts/avg_episodic_length", np.mean(self.recent_lengths), at)


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
    if not args.cuda:
        jax.config.update("jax_platforms", "cpu")
    if args.torch_deterministic:  # read when JAX starts its devices
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave the rest to other runs
    try_envs(args, args.env_id, 1)
    check_xla(make_envs(args.env_id, 1))
    run = RunWithMeans(args, num_iterations * batch_size)

    # Seeding
    device = jax.devices()[0]
    key, init_key = jax.random.split(jax.random.key(args.seed))

    # Environments, agent and optimizer
    envs = make_envs(args.env_id, args.num_envs)
    agent = Agent(envs.single_action_space.n)
    obs_shape = envs.single_observation_space.shape
    params = jax.jit(agent.init)(init_key, jnp.zeros((1, *obs_shape)))
    forward = jax.jit(agent.apply)
    clip = optax.clip_by_global_norm(args.max_grad_norm)
    optimizer = optax.chain(clip, optax.scale_by_adam(eps=1e-5))

    # Storage: it stays on the device; a donated array is changed in place
    loss_names = ["value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "loss"]
    loss_names = [f"losses/{name}" for name in loss_names]
    learner = {
        "params": params,
        "opt_state": optimizer.init(params),
        "losses": jnp.zeros(len(loss_names)),  # sums over an update
    }

    def play(params, games, key):
        """One step of all games, and the row of the rollout that it makes."""
        logits, value = agent.apply(params, games["obs"])
        action = jax.random.categorical(key, logits)
        # the handle goes in and comes out, so that XLA keeps the steps of the games in their order
        handle, step = env_step(games["handle"], action.astype(jnp.int32))
        obs, reward, terminated, truncated, infos = step
        game_over, lives = terminated | truncated, infos["lives"]
        life_lost = (0 < lives) & (lives < games["lives"])  # some games go on a little with no life left
        row = {"obs": games["obs"], "actions": action, "values": value}
        row |= {"logprobs": logprob_of(logits, action), "rewards": jnp.sign(reward)}
        row |= {"terminated": terminated | life_lost, "dones": game_over | life_lost}
        row |= {"valid": ~games["over"], "game_over": game_over}  # after the end of a game: a dummy row
        row |= {"returns": games["returns"] + reward, "lengths": games["lengths"] + ~games["over"]}
        games = {"handle": handle, "obs": obs, "lives": lives, "over": game_over}
        return games | {name: row[name] * ~game_over for name in ("returns", "lengths")}, row

    def targets(params, rollout, next_obs):
        """The rollout as a flat batch with advantages and returns, and the explained variance."""
        values, next_value = rollout["values"], agent.apply(params, next_obs)[1]
        # what follows the last row of a game is its final observation, on a dummy row
        final_values = jnp.concatenate((values[1:], next_value[None]))
        final_values = jnp.where(rollout["terminated"], 0, final_values)
        following = next_value, rollout["dones"], final_values
        advantages = gae(rollout["rewards"], values, *following, args.gamma, args.gae_lambda)
        batch = {name: rollout[name] for name in ("obs", "actions", "logprobs", "values", "valid")}
        batch |= {"advantages": advantages, "returns": advantages + values}
        valid = batch["valid"]
        unexplained = advantages.var(where=valid) / batch["returns"].var(where=valid)
        batch = {name: x.reshape(batch_size, *x.shape[2:]) for name, x in batch.items()}
        return batch, 1 - unexplained

    def update(learner, inds, batch, lr):
        rows = {name: x[inds] for name, x in batch.items()}
        old = [rows[name] for name in ("logprobs", "values", "advantages", "returns", "valid")]

        def loss(params):
            logits, newvalue = agent.apply(params, rows["obs"])
            entropy = -(nn.softmax(logits) * nn.log_softmax(logits)).sum(-1)
            new = logprob_of(logits, rows["actions"]), entropy, newvalue
            return masked_ppo_loss(*new, *old, args)

        gradients, logged = jax.grad(loss, has_aux=True)(learner["params"])
        updates, opt_state = optimizer.update(gradients, learner["opt_state"])
        params = jax.tree.map(lambda x, change: x - lr * change, learner["params"], updates)
        approx_kl = logged[loss_names.index("losses/approx_kl")]
        losses = learner["losses"] + logged
        return {"params": params, "opt_state": opt_state, "losses": losses}, approx_kl

    # Training loop: an iteration is one compiled function
    def iterate(learner, games, key, lr):
        # Act
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(args.num_steps))
        games, rollout = jax.lax.scan(partial(play, learner["params"]), games, keys)

        # Targets
        batch, explained_variance = targets(learner["params"], rollout, games["obs"])

        # Learn
        def learn_epoch(carry):
            learner, epoch, _ = carry
            epoch_key = jax.random.fold_in(key, args.num_steps + epoch)
            inds = jax.random.permutation(epoch_key, batch_size).reshape(args.num_minibatches, -1)
            learner, approx_kls = jax.lax.scan(lambda *carry: update(*carry, batch, lr), learner, inds)
            return learner, epoch + 1, approx_kls[-1]

        def goes_on(carry):
            _, epoch, approx_kl = carry
            return (epoch < args.update_epochs) & (args.target_kl is None or approx_kl <= args.target_kl)

        learner["losses"] = jnp.zeros(len(loss_names))
        learner, epochs, _ = jax.lax.while_loop(goes_on, learn_epoch, (learner, 0, -jnp.inf))
        return learner, games, rollout, explained_variance, epochs

    global_step = run.saved.get("global_step", 0)
    if args.resume:
        learner = refill(learner, run.saved["learner"])
    run.begin(lambda: {"learner": learner})
    next_obs, infos = envs.reset(seed=args.seed + global_step)
    handle, _, _, env_step = envs.pool.xla()
    games = {"handle": handle, "obs": next_obs, "lives": infos["lives"]}
    games |= {"over": np.zeros(args.num_envs, bool)}
    games |= dict.fromkeys(("returns", "lengths"), np.zeros(args.num_envs, np.float32))
    games, start = jax.device_put(games), time.perf_counter()
    iterate = jax.jit(iterate, donate_argnums=(0, 1)).lower(learner, games, key, np.float32(0)).compile()
    compile_time = time.perf_counter() - start
    run.say(f"Compiled in {compile_time:.1f} s")
    if global_step == 0:
        run.writer.add_scalar("charts/compile_time", compile_time, 0)
    for iteration in range(global_step // batch_size, num_iterations):
        start, iteration_key = time.perf_counter(), jax.random.fold_in(key, iteration)
        lr = np.float32((1 - iteration / num_iterations if args.anneal_lr else 1) * args.learning_rate)
        learner, games, rollout, explained_variance, epochs = iterate(learner, games, iteration_key, lr)

        # Log
        ended = (np.asarray(rollout[name]) for name in ("game_over", "returns", "lengths"))
        run.log_games(global_step, *ended)
        global_step += batch_size
        means = (np.asarray(learner["losses"]) / (epochs * args.num_minibatches)).tolist()
        metrics = {"losses/explained_variance": float(explained_variance), "charts/learning_rate": lr}
        metrics["charts/SPS_update"] = int(batch_size / (time.perf_counter() - start))
        run.log(global_step, dict(zip(loss_names, means)), metrics, learner["params"])

        # Checkpoint
        if args.capture_video and iteration % (num_iterations // 10 + 1) == 0:
            film = run.dir / f"videos/step-{global_step}.mp4"
            game = make_envs(args.env_id, 1, life_loss=False)
            policy = softmax_policy(forward, learner["params"])
            record_game(policy, game, args.env_id, args.seed, film)
        run.checkpoint(global_step, last=iteration == num_iterations - 1)

    # Save and close
    envs.close()
    eval_returns = []
    if args.save_model:
        save_file(flatten_dict(learner["params"], sep="."), run.dir / "model.safetensors")
        eval_envs = make_envs(args.env_id, 10, life_loss=False)
        policy = load_policy(run.dir, eval_envs, device)
        eval_returns = evaluate(policy, eval_envs, seed=args.seed + 2**30)
    run.close(eval_returns)
