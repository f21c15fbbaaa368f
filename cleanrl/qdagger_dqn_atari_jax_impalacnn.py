# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "ale-py>=0.12", "flax>=0.11", "gymnasium>=1.2", "jax>=0.7", "numpy>=2", "optax>=0.2.5", "safetensors>=0.5",
#     "tensorboard>=2.19", "tyro>=0.9",
# ]
# ///
"""QDagger (Agarwal et al. 2022, arXiv:2206.01626): a new student for an Atari game learns from a trained teacher.

Differs from dqn_atari_jax.py as qdagger_dqn_atari_impalacnn.py does from dqn_atari.py:
1. the teacher is a run of dqn_atari_jax.py with --save-model, or a repository on the Hugging Face hub
   with its two files; a copy stays with the run;
2. the student is the residual network of IMPALA (Espeholt et al. 2018, arXiv:1802.01561);
   convolutions and pooling are padded as Flax's "SAME" does;
3. four phases: the teacher is scored; it plays --teacher-steps into the replay, exploring less
   and less; the student makes --offline-steps gradient steps on these games; then it plays itself,
   with an empty replay, like dqn_atari_jax.py;
4. each phase has its own counter. `global_step` counts the student's own steps; offline, the
   target network is updated by the count of gradient steps;
5. the loss adds the divergence of the student's policy from the teacher's, the softmax of their
   values; offline its weight is 1, later it falls with the distance from the teacher's score;
6. gradient steps are launched, then the emulators step: only a GPU works while they do.

Differs from the paper:
1. one-step targets, where the paper has n-step returns;
2. the weight is (teacher - student) / |teacher| within 0 and 1: right for returns below 0, too;
3. temperature 1 and a weight of 1, where the paper's code has 0.1, 3 and an end; the weight may rise again;
4. the teacher plays new games, where the paper reads its replay; squared error, constant step size.

Run: python qdagger_dqn_atari_jax_impalacnn.py --teacher-policy-hf-repo RUN_FOLDER_OF_THE_TEACHER
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
from safetensors import SafetensorError
from safetensors.flax import load_file, save_file
from safetensors.numpy import load_file as load_arrays
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
    teacher_policy_hf_repo: str | None = None  # the teacher: a run folder or a repository on the Hugging Face hub
    teacher_model_exp_name: str = "dqn_atari_jax"  # script of the teacher, part of the name of the default repository
    teacher_eval_episodes: int = 10  # games that the teacher, and the student offline, are scored over
    teacher_steps: int = 500_000  # environment steps of the teacher
    offline_steps: int = 500_000  # gradient steps on the teacher's games
    temperature: float = 1.0  # divides the values in the softmax of the distillation

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


class TeacherNetwork(nn.Module):
    num_actions: int

    @nn.compact
    def __call__(self, obs):
        hidden = jnp.transpose(obs, (0, 2, 3, 1)) / 255  # Flax has the channels last
        hidden = nn.relu(nn.Conv(32, (8, 8), strides=4, padding="VALID")(hidden))
        hidden = nn.relu(nn.Conv(64, (4, 4), strides=2, padding="VALID")(hidden))
        hidden = nn.relu(nn.Conv(64, (3, 3), strides=1, padding="VALID")(hidden))
        hidden = nn.relu(nn.Dense(512)(hidden.reshape(len(hidden), -1)))
        return nn.Dense(self.num_actions)(hidden)


class ResidualBlock(nn.Module):
    channels: int

    @nn.compact
    def __call__(self, x):
        hidden = nn.Conv(self.channels, (3, 3))(nn.relu(x))
        return x + nn.Conv(self.channels, (3, 3))(nn.relu(hidden))


class QNetwork(nn.Module):
    num_actions: int

    @nn.compact
    def __call__(self, obs):
        hidden = jnp.transpose(obs, (0, 2, 3, 1)) / 255  # Flax has the channels last
        for channels in (16, 32, 32):
            hidden = nn.Conv(channels, (3, 3))(hidden)
            hidden = nn.max_pool(hidden, (3, 3), strides=(2, 2), padding="SAME")
            hidden = ResidualBlock(channels)(ResidualBlock(channels)(hidden))
        hidden = nn.relu(hidden.reshape(len(hidden), -1))
        return nn.Dense(self.num_actions)(nn.relu(nn.Dense(256)(hidden)))


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


def find_teacher(place):
    """The folder with a teacher's model.safetensors and args.json; from the hub, if it is not one of this machine."""
    if Path(place).is_dir():
        if not all(Path(place, name).exists() for name in ("model.safetensors", "args.json")):
            fail(f"--teacher-policy-hf-repo {place} is not a run with a model: train the teacher with --save-model")
        return Path(place)
    if find_spec("huggingface_hub") is None:
        fail(f"{place} is no folder; to get such a teacher from the hub: pip install huggingface_hub")
    from huggingface_hub import hf_hub_download

    try:
        return [Path(hf_hub_download(place, name)) for name in ("model.safetensors", "args.json")][0].parent
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        need = "a run folder (train the teacher with --save-model) or a hub repository with a model"
        fail(f"--teacher-policy-hf-repo {place} is not {need}: {reason}")


def load_teacher(folder, env_id, envs):
    """The weights of the teacher in a folder, if it plays this game."""
    network, obs_shape = TeacherNetwork(envs.single_action_space.n), envs.single_observation_space.shape
    wanted = jax.eval_shape(lambda: network.init(jax.random.key(0), jnp.zeros((1, *obs_shape))))
    wanted = {name: array.shape for name, array in flatten_dict(wanted, sep=".").items()}
    try:
        weights = load_arrays(folder / "model.safetensors")
        teacher_env_id = json.loads((folder / "args.json").read_text())["env_id"]
        games = [gym.spec(name).kwargs.get("game") for name in (env_id, teacher_env_id)]
    except (OSError, ValueError, LookupError, TypeError, SafetensorError, gym.error.Error) as error:
        fail(f"the teacher in {folder} cannot be read: {error!r}")
    if games[0] != games[1]:
        fail(f"the teacher in {folder} plays {teacher_env_id}: name one that plays {env_id}")
    if {name: array.shape for name, array in weights.items()} != wanted:
        fail(f"the model in {folder} is not one of dqn_atari_jax.py: its arrays have other names or shapes")
    return unflatten_dict(weights, sep=".")


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


def explore(act, obs, epsilon, num_actions, rng):
    """The actions of a policy, or random ones at the rate epsilon."""
    random, actions = rng.random(len(obs)) < epsilon, rng.integers(num_actions, size=len(obs))
    if not random.all():
        actions = np.where(random, actions, np.asarray(act(obs)))
    return actions


def begin(envs, replay, seed):
    """New games, into the replay: observations, the frames of each, lives."""
    obs, infos = envs.reset(seed=seed)
    stacks = replay.frames.add(np.concatenate(obs)).reshape(len(obs), -1)
    return obs, stacks, infos["lives"]


def play_step(envs, replay, actions, stacks, lives):
    """A step of all games, into the replay: what `begin` returns, reward, and where a game is over."""
    next_obs, reward, terminated, truncated, infos = envs.step(actions)
    done = truncated | terminated & (infos["lives"] >= lives)  # a lost life leaves fewer, a new game as many
    final_obs = next_obs
    if done.any():
        final_obs = next_obs.copy()
        final_obs[done] = np.stack(infos["final_obs"][done])
    followed = replay.frames.add(final_obs[:, -1])
    replay.add(stacks, followed, actions, np.sign(reward), terminated)
    stacks = np.column_stack((stacks[:, 1:], followed))
    for i in done.nonzero()[0]:
        stacks[i] = replay.frames.add(next_obs[i])
    return (next_obs, stacks, infos["lives"]), reward, done


def teacher_phase(run, envs, replay, act, rng):
    """Score the teacher, and let it play into the replay, less and less at random."""
    args, step = run.args, run.saved.get("teacher_step", 0)
    teacher_return = run.saved.get("teacher_return", 0.0)
    if step == 0:
        teacher_return = run.score(act, "Teacher", 0)
    counters = {"teacher_return": teacher_return}
    if step < args.teacher_steps:
        obs, *games = begin(envs, replay, args.seed + step)
    run.enter(step, args.teacher_steps)
    while step < args.teacher_steps:
        epsilon = linear_schedule(args.start_e, args.end_e, args.teacher_steps, step)
        actions = explore(act, obs, epsilon, envs.single_action_space.n, rng)
        (obs, *games), reward, done = play_step(envs, replay, actions, *games)
        step += args.num_envs
        if step % args.train_frequency < args.num_envs:
            replay.flush()
        last = step >= args.teacher_steps
        if step % 100 < args.num_envs or last:
            run.checkpoint_phase(step, last, teacher_step=step, **counters)
    return counters | {"teacher_step": step}


def empty(replay, folder):
    """Begin anew, in place."""
    replay.frames.end = replay.rows.end = 0
    replay.first_frames.clear()
    replay.saved, replay.folder = (0, 0), folder


def td_target(reward, terminated, next_q_values, gamma):
    """The reward and the discounted value of the best next action; none after the end of an episode."""
    return reward + gamma * (1 - terminated) * jnp.max(next_q_values, axis=1)


def distillation_loss(q_values, teacher_q_values, temperature):
    """KL divergence of the student's softmax policy from the teacher's, mean over the batch."""
    log_policy = jax.nn.log_softmax(q_values / temperature, axis=1)
    teacher_log_policy = jax.nn.log_softmax(teacher_q_values / temperature, axis=1)
    return (jnp.exp(teacher_log_policy) * (teacher_log_policy - log_policy)).sum(axis=1).mean()


def distillation_weight(returns, teacher_return):
    """1 until there are ten returns; then how far the mean of the last ten is below the teacher's, as a share of it."""
    if len(returns) < 10:
        return 1.0
    student_return = np.mean([*returns][-10:])
    return float(np.clip((teacher_return - student_return) / max(abs(teacher_return), 1e-8), 0, 1))


def linear_schedule(start, end, duration, step):
    return start + (end - start) * min(step / max(duration, 1), 1)


def dqn_loss(q_values, action, target):
    """The loss of a minibatch, and what is logged of it under losses/."""
    q_value = jnp.take_along_axis(q_values, action.astype(int), axis=1).squeeze(1)
    td_loss = jnp.mean((q_value - target) ** 2)
    return td_loss, jnp.stack([td_loss, q_value.mean()])


def qdagger_loss(q_values, teacher_q_values, action, target, coefficient, temperature):
    td_loss, logged = dqn_loss(q_values, action, target)
    distill_loss = distillation_loss(q_values, teacher_q_values, temperature)
    loss = td_loss + coefficient * distill_loss
    return loss, jnp.concatenate([logged, jnp.stack([loss, distill_loss])])


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


class PhasedRun(Run):
    """A run with phases before the student's first step, each with a counter of its own."""

    def enter(self, step, total):
        self.step, self.shown, self.start_step, self.total = step, step, step, total
        self.start_time = time.perf_counter()
        self.marks = deque([(self.start_time, step)])

    def checkpoint_phase(self, step, last, **counters):
        """As `checkpoint`, with the counter of a phase in place of that of the student's steps."""
        due = step // self.args.checkpoint_freq > self.step // self.args.checkpoint_freq
        self.step = step
        if due or last or self.signals:
            self.save(self.state(0, **counters))
        self.show(step)
        self.end_if_asked(f"0 of the student, {step} of a phase before it")

    def log_offline(self, step, losses, weights):
        if not np.isfinite([*losses.values(), jax.jit(optax.global_norm)(weights)]).all():
            sys.exit(f"\nLosses are not finite at offline step {step}: {losses}. Last good checkpoint: {self.dir}")
        for name, tag in {"loss": "loss", "td_loss": "q_loss", "distill_loss": "distill_loss"}.items():
            self.writer.add_scalar(f"charts/offline/{tag}", losses[f"losses/{name}"], step)

    def keep(self, teacher_dir):
        """Copy the teacher: a resumed run then needs neither that folder nor the hub."""
        if not self.args.resume:
            (self.dir / "teacher").mkdir()
            for name in ("model.safetensors", "args.json"):
                shutil.copyfile(teacher_dir / name, self.dir / "teacher" / name)

    def score(self, greedy, name, step):
        """The mean return of a network; a signal ends the games at once, as there is a fresh checkpoint."""
        envs = make_envs(self.args.env_id, self.args.teacher_eval_episodes, life_loss=False)
        policy = epsilon_greedy(greedy, envs.single_action_space.n, self.args.end_e)
        ending = lambda obs: self.end_if_asked(self.step) or policy(obs)  # noqa: E731
        returns = evaluate(ending, envs, seed=self.args.seed + 2**30)
        self.say(f"{name} on held-out seeds: {returns.mean():.2f} +- {returns.std():.2f}")
        phase = "teacher" if name == "Teacher" else "offline"
        self.writer.add_scalar(f"charts/{phase}/avg_episodic_return", returns.mean(), step)
        return float(returns.mean())


if __name__ == "__main__":
    # Checks
    args = parse_args()
    if args.buffer_size < 10 * args.num_envs:
        fail("--buffer-size must be at least 10 times --num-envs, for the frames of a reset")
    if args.total_timesteps > 10**9:
        fail("--total-timesteps must be at most 1000000000: frames are counted in 32 bits")
    if args.temperature <= 0:
        fail("--temperature must be above 0")
    try_envs(args, args.env_id, 1)
    place = args.teacher_policy_hf_repo or f"cleanrl/{args.env_id}-{args.teacher_model_exp_name}-seed1"
    teacher_dir = Path(args.resume, "teacher") if args.resume else find_teacher(place)
    teacher_params = load_teacher(teacher_dir, args.env_id, make_envs(args.env_id, 1))
    run = PhasedRun(args)
    run.keep(teacher_dir)

    # Seeding
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave the rest to other runs
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # a thread costs more than it hides
    device = jax.devices()[0]
    key, init_key = jax.random.split(jax.random.key(args.seed))
    rng = np.random.default_rng(args.seed)

    # Environments, agent and optimizer
    envs = make_envs(args.env_id, args.num_envs)
    num_actions, obs_shape = envs.single_action_space.n, envs.single_observation_space.shape
    q_network, teacher_network = QNetwork(num_actions), TeacherNetwork(num_actions)
    teacher_params = jax.device_put(teacher_params, device)
    params = jax.jit(q_network.init)(init_key, jnp.zeros((1, *obs_shape)))
    optimizer = optax.adam(args.learning_rate)

    # Storage
    offline_step = run.saved.get("offline_step", 0)
    folder = run.dir if offline_step == args.offline_steps else run.dir / "teacher"  # with its games
    replay, num_updates = FrameReplay(args.buffer_size, args.num_envs, obs_shape, folder), 0
    loss_names = ["losses/td_loss", "losses/q_values", "losses/loss", "losses/distill_loss"]
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

    @jax.jit
    def teacher_act(params, obs):
        return teacher_network.apply(params, obs).argmax(1)

    @partial(jax.jit, donate_argnums=0)
    def update(learner, teacher_params, stored, distill_coeff):
        key, sample_key = jax.random.split(jax.random.wrap_key_data(learner["key"]))
        batch = replay.split(*replay.sample(sample_key, stored, args.batch_size))
        b_obs, b_next_obs, b_actions, b_rewards, b_terminated = batch
        next_q_values = q_network.apply(learner["target_params"], b_next_obs)
        target = td_target(b_rewards, b_terminated, next_q_values, args.gamma)
        teacher_q_values = teacher_network.apply(teacher_params, b_obs)

        def loss(params):
            values = q_network.apply(params, b_obs), teacher_q_values, b_actions, target
            return qdagger_loss(*values, distill_coeff, args.temperature)

        (_, logged), gradients = jax.value_and_grad(loss, has_aux=True)(learner["params"])
        updates, opt_state = optimizer.update(gradients, learner["opt_state"])
        return learner | {
            "params": optax.apply_updates(learner["params"], updates),
            "opt_state": opt_state,
            "key": jax.random.key_data(key),
            "losses": learner["losses"] + logged,
        }

    def take_losses():
        """The means since they were last taken."""
        global num_updates
        means = dict(zip(loss_names, (np.asarray(learner["losses"]) / num_updates).tolist()))
        learner["losses"], num_updates = jnp.zeros(len(loss_names)), 0
        return means

    # Teacher phase
    def state():
        generator = json.dumps(rng.bit_generator.state)
        return {"learner": learner, "replay": replay.state_dict(), "rng": generator}

    global_step, distill_coeff = run.saved.get("global_step", 0), 1.0
    if args.resume:
        learner = refill(learner, run.saved["learner"])
        replay.load_state_dict(run.saved["replay"])
        rng.bit_generator.state = json.loads(run.saved["rng"])
    run.begin(state)
    counters = teacher_phase(run, envs, replay, partial(teacher_act, teacher_params), rng)

    # Offline phase
    run.enter(offline_step, args.offline_steps)
    while offline_step < args.offline_steps:
        if offline_step % 100_000 == 0 and offline_step > 0:
            run.score(partial(act, learner["params"]), "Student", offline_step)
        learner = update(learner, teacher_params, replay.stored(), 1.0)
        num_updates, offline_step = num_updates + 1, offline_step + 1
        if offline_step % args.target_network_frequency == 0:
            both = learner["params"], learner["target_params"]
            learner["target_params"] = optax.incremental_update(*both, args.tau)
        if offline_step % 100 == 0 or offline_step == args.offline_steps:
            run.log_offline(offline_step, take_losses(), learner["params"])
            if offline_step < args.offline_steps:  # else the replay is emptied first
                run.checkpoint_phase(offline_step, offline_step % 100_000 == 0, offline_step=offline_step, **counters)
    counters["offline_step"] = offline_step
    if global_step == 0:
        empty(replay, run.dir)
        learner["target_params"] = jax.tree.map(jnp.copy, learner["params"])
        run.save(run.state(0, **counters))
        for path in (run.dir / "teacher").glob("replay-*.gz"):
            path.unlink()
        run.score(partial(act, learner["params"]), "Student", offline_step)

    # Training loop
    run.enter(global_step, args.total_timesteps)
    obs, *games = begin(envs, replay, args.seed + global_step)
    exploration_steps = args.exploration_fraction * args.total_timesteps
    while global_step < args.total_timesteps:
        # Act
        epsilon = linear_schedule(args.start_e, args.end_e, exploration_steps, global_step)
        actions = explore(partial(act, learner["params"]), obs, epsilon, num_actions, rng)

        # Learn: before the environments step, so that a GPU works on it while they do
        ready, last_step = global_step > max(args.learning_starts, 0), global_step - args.num_envs
        due = global_step // args.train_frequency - last_step // args.train_frequency
        if due:
            replay.flush()
            distill_coeff = distillation_weight(run.recent_returns, counters["teacher_return"])
        for _ in range(due if ready else 0):
            learner = update(learner, teacher_params, replay.stored(), distill_coeff)
        num_updates += due if ready else 0
        due = global_step // args.target_network_frequency - last_step // args.target_network_frequency
        for _ in range(due if ready else 0):
            both = learner["params"], learner["target_params"]
            learner["target_params"] = optax.incremental_update(*both, args.tau)

        # Step
        (obs, *games), reward, done = play_step(envs, replay, actions, *games)
        run.log_episodes(global_step, reward, done)
        global_step += args.num_envs

        # Log
        log_due = global_step % 100 < args.num_envs or global_step >= args.total_timesteps
        if log_due:
            others = {"charts/epsilon": epsilon, "charts/distill_coeff": distill_coeff}
            means = take_losses() if num_updates else {}
            run.log(global_step, means, others, learner["params"])
        film_due = global_step % (args.total_timesteps // 10 + 1) < max(100, args.num_envs)
        if log_due and film_due and args.capture_video:
            policy = epsilon_greedy(partial(act, learner["params"]), num_actions, args.end_e)
            path = run.dir / f"videos/step-{global_step}.mp4"
            record_video(policy, args.env_id, args.seed, path)

        # Checkpoint: when the means have just been taken
        if log_due:
            run.checkpoint(global_step, last=global_step >= args.total_timesteps, **counters)

    # Save and close
    envs.close()
    eval_returns = []
    if args.save_model:
        save_file(flatten_dict(learner["params"], sep="."), run.dir / "model.safetensors")
        eval_envs = make_envs(args.env_id, 10, life_loss=False)
        policy = load_policy(run.dir, eval_envs, device)
        eval_returns = evaluate(policy, eval_envs, seed=args.seed + 2**30)
    run.close(eval_returns)
