# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "ale-py>=0.12", "flax>=0.11", "gymnasium>=1.2", "jax>=0.7", "numpy>=2", "optax>=0.2.5", "safetensors>=0.5",
#     "tensorboard>=2.19", "tyro>=0.9",
# ]
# ///
"""Deep Q-learning (DQN, Mnih et al. 2015, doi:10.1038/nature14236): Atari games.

Differs from dqn_jax.py as dqn_atari.py does from dqn.py:
1. ale_py's vector environment (C++ threads): up to 30 no-ops and FIRE on reset, frame skip 4 with the maximum of the
   last two frames, 84x84 grey, 4 frames stacked; a lost life ends the episode for the agent, but the game goes on, and
   it is the agent that presses FIRE then;
2. rewards are clipped to their sign for learning; logged returns are of whole games, unclipped;
3. the convolutional network of the paper;
4. the replay buffer stores each frame once, in the memory of the device, beside the pytree that learning changes, and
   puts observations together when it samples; with a checkpoint it writes what is new since the last one;
5. videos are separate episodes of the current policy.

Differs from the paper:
1. Adam in place of RMSProp, and no clipping of the TD error;
2. an episode cut off by a time limit is bootstrapped from its final observation;
3. `--tau` below 1 moves the target network a step towards the online network, where the paper copies it;
4. a copy every 1,000 steps, exploration down to 0.01, and learning after 80,000 steps, where the paper has 10,000
   updates, 0.1 and 50,000.

Run: python dqn_atari_jax.py --env-id BreakoutNoFrameskip-v4 --total-timesteps 10000000
"""

import gzip
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
from functools import partial
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

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
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run's name
    seed: int = 1  # random seed
    track: bool = False  # mirror the run to Weights & Biases
    wandb_project_name: str = "cleanRL"  # W&B project
    wandb_entity: str | None = None  # W&B user or team
    capture_video: bool = False  # record episodes at several stages of training
    save_model: bool = False  # write model.safetensors at the end and evaluate it on held-out seeds
    upload_model: bool = False  # push the finished run folder to the Hugging Face hub (implies --save-model)
    hf_entity: str = ""  # hub user or organisation, if not the owner of the token
    resume: str = ""  # continue the run in this folder
    checkpoint_freq: int = 100_000  # environment steps between checkpoints

    env_id: str = "BreakoutNoFrameskip-v4"  # environment
    total_timesteps: int = 10_000_000  # environment steps in total
    learning_rate: float = 1e-4  # step size of the optimizer
    num_envs: int = 1  # parallel environments
    buffer_size: int = 1_000_000  # transitions that the replay buffer holds
    gamma: float = 0.99  # discount
    tau: float = 1.0  # step of the target network towards the online network (1 copies it)
    target_network_frequency: int = 1000  # environment steps (continuous SAC: gradient steps) between target updates
    batch_size: int = 32  # transitions per gradient step
    start_e: float = 1.0  # exploration rate at the start
    end_e: float = 0.01  # exploration rate at the end
    exploration_fraction: float = 0.1  # share of the steps over which the exploration rate falls
    learning_starts: int = 80_000  # environment steps before the first gradient step
    train_frequency: int = 4  # environment steps between gradient steps


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


def make_envs(env_id, num_envs, life_loss=True, **options):
    game, sticky = (gym.spec(env_id).kwargs.get(key) for key in ("game", "repeat_action_probability"))
    if game is None:
        raise gym.error.Error(f"{env_id} is not an Atari game; dqn_jax.py handles vector observations")
    options = {"reward_clipping": False, "autoreset_mode": gym.vector.AutoresetMode.SAME_STEP} | options
    return AtariVectorEnv(game, num_envs, repeat_action_probability=sticky, life_loss_info=life_loss, **options)


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


@partial(jax.jit, donate_argnums=0)
def write(array, indices, items):
    """Assign items in place: a donated array is not copied."""
    return array.at[indices].set(items)


class Ring:
    """The last items that were added, on the device: item number n is in slot n % size."""

    def __init__(self, size, shape, dtype):
        self.slots = jnp.zeros((size, *shape), dtype=dtype)
        self.end, self.new = 0, []  # the number of the next item, and the items that are still on the host

    def __getitem__(self, numbers):
        return self.slots.at[numbers % len(self.slots)].get(mode="promise_in_bounds")

    def add(self, items):
        self.new.append(items.copy())
        self.end += len(items)
        return np.arange(self.end - len(items), self.end)

    def flush(self):
        if self.new:
            items = np.concatenate(self.new, dtype=self.slots.dtype)
            slots = np.arange(self.end - len(items), self.end) % len(self.slots)
            while len(items):  # each length is compiled anew, so there are only powers of two
                count = min(1024, 1 << len(items).bit_length() - 1)
                self.slots = write(self.slots, slots[:count], items[:count])
                items, slots = items[count:], slots[count:]
            self.new = []


class FrameReplay:
    """The last transitions, over frames that are stored once, however many observations they are part of.

    A transition is a row of integers: the numbers of the frames of its observation and of the frame that followed, then
    action, reward and whatever else it has. Additions wait on the host for `flush`: one copy then serves many steps.
    """

    def __init__(self, size, num_envs, obs_shape, columns):
        self.size, self.num_envs, self.stack_num = size // num_envs * num_envs, num_envs, obs_shape[0]
        self.frames = Ring(self.size, obs_shape[1:], jnp.uint8)
        self.rows = Ring(self.size, [self.stack_num + 1 + columns], jnp.int32)
        self.first_frames, self.saved = deque(), (0, 0)  # the oldest frame of each step that can be sampled
        self.window = np.zeros(2, dtype=np.int32)  # first row and count

    def add(self, rows):
        self.rows.add(rows)
        self.first_frames.append(rows[:, 0].min())

    def flush(self):
        self.frames.flush()
        self.rows.flush()
        while self.first_frames and self.first_frames[0] < self.frames.end - self.size:  # a newer one took its slot
            self.first_frames.popleft()
        count = len(self.first_frames) * self.num_envs
        self.window = np.array([self.rows.end - count, count], dtype=np.int32)

    def stored(self):
        """What `sample` draws from: an argument of a compiled function, in which it would be a constant otherwise."""
        return self.frames.slots, self.rows.slots, self.window

    def sample(self, key, stored, batch_size):
        """Rows, and the frames (batch_size, stack_num + 1, height, width) of their two observations."""
        frames, rows, (first, count) = stored
        rows = rows[(first + jax.random.randint(key, (batch_size,), 0, count)) % self.size]
        return rows, frames[rows[:, : self.stack_num + 1] % self.size]

    def save(self, folder):
        """Write what is new since the last call to a file of its own: each frame is written once."""
        self.flush()
        ends = self.frames.end, self.rows.end
        if ends == tuple(self.saved):  # nothing: the file of this name has what came before
            return ends
        for path in folder.glob("replay-*.gz"):
            if int(path.stem[7:]) <= self.saved[0] - self.size:  # of no use to the checkpoint that is there now
                path.unlink()
        with gzip.open(folder / f"replay-{ends[0]:012}.gz", "wb", compresslevel=1) as file:
            np.save(file, ends)
            for ring, start, end in zip((self.frames, self.rows), self.saved, ends):
                blocks = np.array_split(np.arange(max(start, end - self.size), end), (end - start) // 10_000 + 1)
                np.save(file, np.concatenate([np.asarray(ring[block]) for block in blocks]))
        self.saved = ends
        return ends

    def load(self, folder, ends):
        """Read the files of a checkpoint, and remove any that is newer."""
        for path in sorted(folder.glob("replay-*.gz")):
            if int(path.stem[7:]) > ends[0]:
                path.unlink()
                continue
            with gzip.open(path) as file:
                (self.frames.end, self.rows.end), frames, rows = np.load(file).tolist(), np.load(file), np.load(file)
            self.frames.new, self.rows.new = [frames], [rows]
            self.first_frames.extend(rows[:, 0].reshape(-1, self.num_envs).min(1))
            self.flush()
        self.saved = ends


def td_target(reward, terminated, next_q_values, gamma):
    """The reward and the discounted value of the best next action; an episode that has terminated has none."""
    return reward + gamma * (1 - terminated) * jnp.max(next_q_values, axis=1)


def linear_schedule(start, end, duration, step):
    return start + (end - start) * min(step / max(duration, 1), 1)


def evaluate(policy, envs, seed):
    """The undiscounted return of one episode in each environment."""
    obs, _ = envs.reset(seed=seed)
    returns, running = np.zeros(envs.num_envs), np.ones(envs.num_envs, dtype=bool)
    while running.any():
        obs, reward, terminated, truncated, _ = envs.step(policy(obs))
        returns += running * reward
        running &= ~(terminated | truncated)
    return returns


def epsilon_greedy(greedy, num_actions, epsilon):
    """A function from a batch of observations to a batch of actions."""
    rng = np.random.default_rng(0)

    def policy(obs):
        explore = rng.random(len(obs)) < epsilon
        return np.where(explore, rng.integers(num_actions, size=len(obs)), np.asarray(greedy(obs)))

    return policy


def load_policy(run_dir, envs, device, deterministic=False):
    """The saved network of a run, as a function from a batch of observations to a batch of actions."""
    q_network = QNetwork(envs.single_action_space.n)
    params = jax.device_put(unflatten_dict(load_file(Path(run_dir, "model.safetensors")), sep="."), device)
    epsilon = 0 if deterministic else json.loads(Path(run_dir, "args.json").read_text())["end_e"]
    greedy = jax.jit(lambda obs: q_network.apply(params, obs).argmax(1))
    return epsilon_greedy(greedy, envs.single_action_space.n, epsilon)


if __name__ == "__main__":
    # Run directory and logger
    stop_signals = []
    signal.signal(signal.SIGTERM, lambda *received: stop_signals.append(received))
    args = parse_args()
    if min(args.num_envs, args.batch_size, args.train_frequency, args.checkpoint_freq, args.total_timesteps) < 1:
        fail("--num-envs, --batch-size, --train-frequency, --checkpoint-freq and --total-timesteps must be at least 1")
    if args.buffer_size < 10 * max(args.num_envs, args.train_frequency) or args.target_network_frequency < 1:
        fail("--buffer-size must be at least 10 times --num-envs and --train-frequency, --target-network-frequency 1")
    if args.total_timesteps > 10**9:
        fail("--total-timesteps must be at most 1000000000, as the replay buffer counts frames in 32 bits")
    try:
        envs = make_envs(args.env_id, 1)  # a first look, before anything is written
    except (gym.error.Error, ImportError) as error:
        fail(error)
    checkpoint = msgpack_restore(Path(args.resume, "checkpoint.msgpack").read_bytes()) if args.resume else {}
    run_dir, writer = open_run(args, checkpoint.get("events", {}))

    # Seeding
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave the rest of the GPU to other runs
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # handing over to a thread costs more than it hides here
    device = jax.devices()[0]
    key, init_key = jax.random.split(jax.random.key(args.seed))
    rng = np.random.default_rng(args.seed)

    # Environments
    envs = make_envs(args.env_id, args.num_envs)

    # Agent and optimizer
    num_actions, obs_shape = envs.single_action_space.n, envs.single_observation_space.shape
    q_network = QNetwork(num_actions)
    params = jax.jit(q_network.init)(init_key, jnp.zeros((1, *obs_shape)))
    optimizer = optax.adam(args.learning_rate)

    # Storage: a transition has three columns besides its frames: action, reward, terminated
    replay = FrameReplay(args.buffer_size, args.num_envs, obs_shape, 3)
    loss_names = ["td_loss", "q_values"]
    learner = {
        "params": params,
        "target_params": jax.tree.map(jnp.copy, params),
        "opt_state": optimizer.init(params),
        "key": jax.random.key_data(key),
        "losses": jnp.zeros(len(loss_names)),  # sums since they were last logged
    }
    num_updates = 0
    episode_returns, episode_lengths = np.zeros((2, args.num_envs))
    recent_returns = deque(maxlen=20)

    @jax.jit
    def act(params, obs):
        return q_network.apply(params, obs).argmax(1)

    @partial(jax.jit, donate_argnums=0)
    def learn(learner, stored):
        key, sample_key = jax.random.split(jax.random.wrap_key_data(learner["key"]))
        b_rows, b_frames = replay.sample(sample_key, stored, args.batch_size)
        obs, next_obs = b_frames[:, :-1], b_frames[:, 1:]
        action, reward, terminated = b_rows[:, -3:].T
        target = td_target(reward, terminated, q_network.apply(learner["target_params"], next_obs), args.gamma)

        def td_loss(params):
            q_values = jnp.take_along_axis(q_network.apply(params, obs), action[:, None], axis=1).squeeze(1)
            return jnp.mean((q_values - target) ** 2), q_values.mean()

        (loss, q_value), gradients = jax.value_and_grad(td_loss, has_aux=True)(learner["params"])
        updates, opt_state = optimizer.update(gradients, learner["opt_state"])
        return learner | {
            "params": optax.apply_updates(learner["params"], updates),
            "opt_state": opt_state,
            "key": jax.random.key_data(key),
            "losses": learner["losses"] + jnp.stack([loss, q_value]),
        }

    # Resume
    def save_checkpoint():
        writer.flush()
        state = {"global_step": global_step, "learner": to_state_dict(jax.device_get(learner))}
        state["replay"] = list(replay.save(run_dir))
        state["numpy_rng"] = json.dumps(rng.bit_generator.state)
        state["events"] = {file.name: file.stat().st_size for file in run_dir.glob("events*")}
        (run_dir / "unfinished.tmp").write_bytes(msgpack_serialize(state))
        os.replace(run_dir / "unfinished.tmp", run_dir / "checkpoint.msgpack")

    global_step = 0
    if args.resume:
        global_step = checkpoint["global_step"]
        learner = jax.device_put(from_state_dict(learner, checkpoint["learner"]))
        replay.load(run_dir, checkpoint["replay"])
        rng.bit_generator.state = json.loads(checkpoint["numpy_rng"])
    else:
        save_checkpoint()

    # Training loop
    start_time, start_step = time.perf_counter(), global_step
    log_period = max(100, args.num_envs)  # environment steps
    obs, infos = envs.reset(seed=args.seed + global_step)
    stacks = replay.frames.add(obs.reshape(-1, *obs_shape[1:])).reshape(args.num_envs, -1)  # frames of each observation
    actions = np.zeros(args.num_envs, dtype=np.int64)
    while global_step < args.total_timesteps:
        # Act
        exploration_steps = args.exploration_fraction * args.total_timesteps
        epsilon = linear_schedule(args.start_e, args.end_e, exploration_steps, global_step)
        explore = rng.random(args.num_envs) < epsilon
        if explore.any():
            actions = rng.integers(num_actions, size=args.num_envs)
        if not explore.all():
            actions = np.where(explore, actions, np.asarray(act(learner["params"], obs)))
        lives = infos["lives"]
        next_obs, reward, terminated, truncated, infos = envs.step(actions)
        episode_returns += reward
        episode_lengths += 1
        game_over, final_obs = truncated | terminated & (infos["lives"] >= lives), next_obs  # not where a life was lost
        if game_over.any():
            final_obs = next_obs.copy()
            final_obs[game_over] = np.stack(infos["final_obs"][game_over])
            for i in np.flatnonzero(game_over):  # environment i has made step number global_step + i + 1
                writer.add_scalar("charts/episodic_return", episode_returns[i], global_step + i + 1)
                writer.add_scalar("charts/episodic_length", episode_lengths[i], global_step + i + 1)
                recent_returns.append(episode_returns[i])
                episode_returns[i] = episode_lengths[i] = 0
        followed = replay.frames.add(final_obs[:, -1])
        replay.add(np.column_stack((stacks, followed, actions, np.sign(reward), terminated)))
        stacks = np.column_stack((stacks[:, 1:], followed))
        for i in np.flatnonzero(game_over):
            stacks[i] = replay.frames.add(next_obs[i])
        obs = next_obs
        last_step, global_step = global_step, global_step + args.num_envs

        # Learn
        updates = global_step // args.train_frequency - last_step // args.train_frequency
        if updates:
            replay.flush()
        for _ in range(updates if global_step > args.learning_starts else 0):
            learner = learn(learner, replay.stored())
            num_updates += 1
        target_updates = global_step // args.target_network_frequency - last_step // args.target_network_frequency
        for _ in range(target_updates if global_step > args.learning_starts else 0):
            learner["target_params"] = optax.incremental_update(learner["params"], learner["target_params"], args.tau)

        # Log
        if global_step % 100 >= args.num_envs and global_step < args.total_timesteps:
            continue
        if num_updates:
            means = (np.asarray(learner["losses"]) / num_updates).tolist()
            if not np.isfinite([*means, jax.jit(optax.global_norm)(learner["params"])]).all():
                sys.exit(f"\nLosses are not finite at step {global_step}: {means}. Last good checkpoint: {run_dir}")
            for name, mean in zip(loss_names, means):
                writer.add_scalar(f"losses/{name}", mean, global_step)
            learner["losses"], num_updates = jnp.zeros(len(loss_names)), 0
        sps = (global_step - start_step) / (time.perf_counter() - start_time)
        writer.add_scalar("charts/SPS", int(sps), global_step)
        if sys.stdout.isatty() or global_step % (args.total_timesteps // 100 + 1) < log_period:
            report(global_step, args.total_timesteps, sps, recent_returns)

        # Checkpoint
        if args.capture_video and global_step % (args.total_timesteps // 10 + 1) < log_period:
            policy = epsilon_greedy(partial(act, learner["params"]), num_actions, args.end_e)
            record_video(policy, args.env_id, args.seed, run_dir / f"videos/step-{global_step}.mp4")
        if stop_signals or global_step % args.checkpoint_freq < log_period or global_step >= args.total_timesteps:
            save_checkpoint()
        if stop_signals:
            print(f"\nStopped at step {global_step}. To continue: python {sys.argv[0]} --resume {run_dir}")
            sys.exit(75)  # schedulers start such a job again

    # Save and close
    signal.signal(signal.SIGTERM, lambda *received: sys.exit(75))
    envs.close()
    if args.save_model:
        save_file(flatten_dict(learner["params"], sep="."), run_dir / "model.safetensors")
        eval_envs = make_envs(args.env_id, 10, life_loss=False)
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
