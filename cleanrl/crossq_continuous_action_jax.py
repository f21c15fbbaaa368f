# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "flax>=0.11", "gymnasium[mujoco]>=1.2", "jax>=0.7", "numpy>=2", "optax>=0.2.5", "safetensors>=0.5",
#     "tensorboard>=2.19", "tyro>=0.9",
# ]
# ///
"""CrossQ (Bhatt et al. 2024, arXiv:1902.05605): vector observations, continuous actions.

Differs from sac_continuous_action_jax.py:
1. there are no target networks: the critics that learn also value what comes next;
2. batch renormalisation (Ioffe 2017, arXiv:1702.03275) before each layer of the critics and of the actor;
3. one pass of the critics takes replayed and next transitions, so that both are scaled by statistics of the same batch;
4. critics of `--q-hidden` units per layer; Adam averages gradients over fewer steps (b1 = 0.5), at a step size of 1e-3;
5. one gradient step of the actor, not several, every `--policy-frequency` gradient steps.

Differs from the paper: tanh keeps the policy's deviations between exp(-5) and exp(2).

Run: python crossq_continuous_action_jax.py --env-id HalfCheetah-v4 --total-timesteps 1000000
"""

import json
import math
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

    env_id: str = "Hopper-v4"  # environment
    total_timesteps: int = 1_000_000  # environment steps in total
    num_envs: int = 1  # parallel environments
    buffer_size: int = 1_000_000  # transitions that the replay buffer holds
    gamma: float = 0.99  # discount
    batch_size: int = 256  # transitions per gradient step
    learning_starts: int = 5_000  # environment steps before the first gradient step
    policy_lr: float = 1e-3  # step size of the actor's optimizer
    q_lr: float = 1e-3  # step size of the optimizers of the critics and of alpha
    utd: float = 1.0  # gradient steps per environment step
    q_hidden: int = 2048  # units in each hidden layer of a critic
    policy_frequency: int = 3  # gradient steps of the critic per gradient step of the actor
    alpha: float = 0.2  # price of entropy, where it is not tuned
    autotune: bool = True  # tune the price of entropy


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


def make_env(env_id, seed, idx, capture_video, run_name):
    def thunk():
        video = capture_video and idx == 0
        if env_id.startswith("dm_control/") and not (find_spec("shimmy") and find_spec("dm_control")):
            raise ImportError("dm_control needs: pip install shimmy dm_control==1.0.50 mujoco==3.17.0")
        env = gym.make(re.sub("^dm_control/", "shimmy:dm_control/", env_id), render_mode="rgb_array" if video else None)
        if video:
            env = gym.wrappers.RecordVideo(env, str(Path("runs", run_name, "videos")), name_prefix=f"{time.time():.0f}")
        if not re.search(r"\(\d+, \d+, \d", str(env.observation_space)):  # images stay as they are, to be refused
            env = gym.wrappers.FlattenObservation(env)
        env.action_space.seed(seed + idx)
        return env

    return thunk


def make_envs(env_id, num_envs, seed, capture_video=False, run_name=""):
    thunks = [make_env(env_id, seed, i, capture_video, run_name) for i in range(num_envs)]
    return gym.vector.SyncVectorEnv(thunks, copy=False, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


class BatchRenorm(nn.Module):
    """Calls that may change "batch_stats" train its running statistics, all others take them as they are."""

    @nn.compact
    def __call__(self, x):
        mean = self.variable("batch_stats", "mean", jnp.zeros, x.shape[1])
        var = self.variable("batch_stats", "var", jnp.ones, x.shape[1])
        steps = self.variable("batch_stats", "steps", jnp.zeros, ())
        if self.is_mutable_collection("batch_stats") and not self.is_initializing():
            x, mean.value, var.value = renormalize(x, mean.value, var.value, steps.value)
            steps.value += 1
        else:
            x = (x - mean.value) / jnp.sqrt(var.value + 1e-3)
        scale = self.param("scale", nn.initializers.ones, x.shape[1])
        bias = self.param("bias", nn.initializers.zeros, x.shape[1])
        return x * scale + bias


class Actor(nn.Module):
    low: np.ndarray
    high: np.ndarray

    @property
    def scale(self):
        return (self.high - self.low) / 2

    @nn.compact
    def __call__(self, obs):
        """Mean and logarithm of the deviation of the Gaussian before it is squashed."""
        hidden = BatchRenorm()(obs)
        hidden = BatchRenorm()(nn.relu(nn.Dense(256)(hidden)))
        hidden = BatchRenorm()(nn.relu(nn.Dense(256)(hidden)))
        mean, log_std = jnp.split(nn.Dense(2 * len(self.low))(hidden), 2, axis=1)
        return mean, -5 + 3.5 * (nn.tanh(log_std) + 1)

    def squash(self, x):
        action = self.low + (nn.tanh(x) + 1) * self.scale
        return jnp.clip(action, self.low, self.high)  # rounding does not take it out of the bounds

    def sample(self, mean, log_std, key):
        x = mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)
        return self.squash(x), squashed_logprob(x, mean, log_std, self.scale)


class SoftQNetwork(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, obs, action):
        hidden = BatchRenorm()(jnp.concatenate([obs, action], axis=1))
        hidden = BatchRenorm()(nn.relu(nn.Dense(self.hidden)(hidden)))
        hidden = BatchRenorm()(nn.relu(nn.Dense(self.hidden)(hidden)))
        return nn.Dense(1)(hidden).squeeze(1)


# Both critics as one: their weights are stacked, their values are (2, batch)
STACKED = {"variable_axes": {"params": 0, "batch_stats": 0}, "split_rngs": {"params": True}}
Critics = nn.vmap(SoftQNetwork, in_axes=None, axis_size=2, **STACKED)


def sample(key, rows, filled, batch_size, obs_dim):
    """A batch of transitions from the first `filled` rows of the replay buffer."""
    batch = rows.reshape(-1, rows.shape[-1])[jax.random.randint(key, (batch_size,), 0, filled)]
    obs, next_obs, rest = jnp.split(batch, [obs_dim, 2 * obs_dim], axis=1)
    return obs, next_obs, rest[:, :-2], rest[:, -2], rest[:, -1]


def renormalize(x, mean, var, steps):
    """A batch scaled by its own statistics, and the running ones after it; from step 100,000 on as if by those."""
    std, batch_mean, batch_var = jnp.sqrt(var + 1e-3), x.mean(0), x.var(0)
    batch_std = jnp.sqrt(batch_var + 1e-3)
    r = jnp.where(steps < 100_000, 1, jnp.clip(batch_std / std, 1 / 3, 3))
    d = jnp.where(steps < 100_000, 0, jnp.clip((batch_mean - mean) / std, -5, 5))
    x = (x - batch_mean) / batch_std * jax.lax.stop_gradient(r) + jax.lax.stop_gradient(d)
    return x, 0.99 * mean + 0.01 * batch_mean, 0.99 * var + 0.01 * batch_var


def bellman_target(reward, terminated, next_value, gamma):
    """The reward and the discounted value of what comes next; an episode that has terminated has none."""
    return reward + gamma * (1 - terminated) * next_value


def squashed_logprob(x, mean, log_std, scale):
    """The log-density of the action scale * tanh(x) plus any constant, for x from a Gaussian; sums over dimensions."""
    gaussian = -0.5 * ((x - mean) / jnp.exp(log_std)) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
    log_slope = 2 * (math.log(2) - x - nn.softplus(-2 * x))  # log(1 - tanh(x)**2), exact also far from 0
    return (gaussian - log_slope - jnp.log(scale)).sum(1)


def evaluate(policy, envs, seed):
    """The undiscounted return of one episode in each environment."""
    obs, _ = envs.reset(seed=seed)
    returns, running = np.zeros(envs.num_envs), np.ones(envs.num_envs, dtype=bool)
    while running.any():
        obs, reward, terminated, truncated, _ = envs.step(policy(obs))
        returns += running * reward
        running &= ~(terminated | truncated)
    return returns


def load_policy(run_dir, envs, device, deterministic=True):
    """The saved network of a run, as a function from a batch of observations to a batch of actions."""
    actor = Actor(envs.single_action_space.low, envs.single_action_space.high)
    model = unflatten_dict(load_file(Path(run_dir, "model.safetensors")), sep=".")
    params, apply = jax.device_put(model["actor"], device), jax.jit(actor.apply)
    rng = np.random.default_rng(0)

    def policy(obs):
        mean, log_std = apply(params, obs)
        x = mean if deterministic else mean + jnp.exp(log_std) * rng.standard_normal(mean.shape, dtype=np.float32)
        return np.asarray(actor.squash(x))

    return policy


if __name__ == "__main__":
    # Run directory and logger
    stop_signals = []
    signal.signal(signal.SIGTERM, lambda *received: stop_signals.append(received))
    args = parse_args()
    if min(args.num_envs, args.batch_size, args.policy_frequency, args.checkpoint_freq, args.total_timesteps) < 1:
        fail("--num-envs, --batch-size, --policy-frequency, --checkpoint-freq and --total-timesteps must be at least 1")
    if args.buffer_size < args.num_envs or args.q_hidden < 1 or not 0 < args.utd < np.inf:
        fail("--buffer-size must be at least --num-envs, --q-hidden at least 1, --utd above 0")
    if args.capture_video and sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")  # renders without a screen, if set before MuJoCo is imported
    try:
        envs = make_envs(args.env_id, 1, args.seed)  # a first look, before anything is written
    except (gym.error.Error, ImportError) as error:
        fail(error)
    if not isinstance(envs.single_action_space, gym.spaces.Box) or len(envs.single_action_space.shape) != 1:
        fail(f"{args.env_id} needs a vector of continuous actions; dqn_jax.py handles discrete ones")
    if not envs.single_action_space.is_bounded():
        fail(f"{args.env_id} needs bounded actions; ppo_continuous_action.py handles unbounded ones")
    if len(envs.single_observation_space.shape or ()) != 1:
        fail(f"{args.env_id} needs vector observations; dqn_atari_jax.py handles the images of Atari games")
    if args.capture_video and "rgb_array" not in envs.metadata.get("render_modes", []):
        fail(f"{args.env_id} cannot render images: leave --capture-video out")
    checkpoint = msgpack_restore(Path(args.resume, "checkpoint.msgpack").read_bytes()) if args.resume else {}
    run_dir, writer = open_run(args, checkpoint.get("events", {}))

    # Seeding
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave the rest of the GPU to other runs
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # handing over to a thread costs more than it hides here
    device = jax.devices()[0]
    key, init_key = jax.random.split(jax.random.key(args.seed))
    rng = np.random.default_rng(args.seed)

    # Environments
    envs = make_envs(args.env_id, args.num_envs, args.seed, args.capture_video, run_dir.resolve())

    # Agent and optimizer
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    low, high = envs.single_action_space.low, envs.single_action_space.high
    actor, qf = Actor(low, high), Critics(args.q_hidden)
    actor_key, qf_key = jax.random.split(init_key)
    # With the running statistics, which have no gradient: optimizers leave them alone, passes in training move them
    actor_params = jax.jit(actor.init)(actor_key, jnp.zeros((1, obs_dim)))
    qf_params = jax.jit(qf.init)(qf_key, jnp.zeros((1, obs_dim)), jnp.zeros((1, action_dim)))
    target_entropy = -float(action_dim)
    log_alpha = jnp.log(jnp.float32(1 if args.autotune else args.alpha))
    adam = partial(optax.adam, b1=0.5)
    actor_optimizer, qf_optimizer, alpha_optimizer = map(adam, (args.policy_lr, args.q_lr, args.q_lr))

    # Storage: the chunk holds the last transition of each environment until it goes to the replay buffer
    chunk, staged = np.zeros((1, args.num_envs, 2 * obs_dim + action_dim + 2), dtype=np.float32), False
    num_chunks, chunks_added = args.buffer_size // args.num_envs, 0
    loss_names = ["qf1_loss", "qf2_loss", "qf_loss", "qf1_values", "qf2_values"]
    loss_names += ["actor_loss", "alpha_loss", "alpha"]
    learner = {
        "actor_params": actor_params,
        "qf_params": qf_params,
        "log_alpha": log_alpha,
        "actor_opt_state": actor_optimizer.init(actor_params),
        "qf_opt_state": qf_optimizer.init(qf_params),
        "alpha_opt_state": alpha_optimizer.init(log_alpha),
        "replay": jnp.zeros((num_chunks, *chunk.shape)),
        "key": jax.random.key_data(key),
        "losses": jnp.zeros(len(loss_names)),  # sums since they were last logged
        "gradient_steps": jnp.zeros((), dtype=int),
    }
    episode_returns, episode_lengths = np.zeros((2, args.num_envs))
    recent_returns = deque(maxlen=20)

    @jax.jit
    def act(params, obs, noise):
        mean, log_std = actor.apply(params, obs)
        return actor.squash(mean + jnp.exp(log_std) * noise)

    def update_qf(learner, key, obs, next_obs, action, reward, terminated):
        next_action, next_logprob = actor.sample(*actor.apply(learner["actor_params"], next_obs), key)
        both = jnp.concatenate([obs, next_obs]), jnp.concatenate([action, next_action])

        def qf_loss(params):
            values, stats = qf.apply(params, *both, mutable="batch_stats")
            q_values, next_values = jnp.split(values, 2, axis=1)
            next_value = jax.lax.stop_gradient(next_values.min(0))
            next_value -= jnp.exp(learner["log_alpha"]) * next_logprob
            target = bellman_target(reward, terminated, next_value, args.gamma)
            losses = jnp.mean((q_values - target) ** 2, axis=1)
            return losses.sum(), (jnp.concatenate([losses, losses.mean(keepdims=True), q_values.mean(1)]), stats)

        (_, (losses, stats)), gradients = jax.value_and_grad(qf_loss, has_aux=True)(learner["qf_params"])
        updates, opt_state = qf_optimizer.update(gradients, learner["qf_opt_state"])
        params, losses = optax.apply_updates(learner["qf_params"], updates), learner["losses"].at[:5].add(losses)
        return learner | {"qf_params": params | stats, "qf_opt_state": opt_state, "losses": losses}

    def update_actor(learner, key, obs):
        def actor_loss(params):
            outputs, stats = actor.apply(params, obs, mutable="batch_stats")
            new_action, logprob = actor.sample(*outputs, key)
            value = qf.apply(learner["qf_params"], obs, new_action).min(0)
            return (jnp.exp(learner["log_alpha"]) * logprob - value).mean(), (logprob, stats)

        def alpha_loss(log_alpha):
            return -(jnp.exp(log_alpha) * (logprob + target_entropy)).mean()

        (loss, (logprob, stats)), gradients = jax.value_and_grad(actor_loss, has_aux=True)(learner["actor_params"])
        updates, opt_state = actor_optimizer.update(gradients, learner["actor_opt_state"])
        params = optax.apply_updates(learner["actor_params"], updates)
        learner |= {"actor_params": params | stats, "actor_opt_state": opt_state}
        losses = [loss, alpha_loss(learner["log_alpha"])]
        if args.autotune:
            gradient = jax.grad(alpha_loss)(learner["log_alpha"])
            updates, opt_state = alpha_optimizer.update(gradient, learner["alpha_opt_state"])
            learner |= {"log_alpha": learner["log_alpha"] + updates, "alpha_opt_state": opt_state}
        losses = jnp.stack([*losses, jnp.exp(learner["log_alpha"])])
        return learner | {"losses": learner["losses"].at[5:].add(losses)}

    @partial(jax.jit, donate_argnums=0, static_argnums=3)
    def learn(learner, chunk, chunks_added, updates):
        replay = learner.pop("replay").at[chunks_added % num_chunks].set(chunk)
        filled = jnp.minimum(chunks_added + 1, num_chunks) * args.num_envs

        def update(learner, _):
            key, sample_key, next_key, actor_key = jax.random.split(jax.random.wrap_key_data(learner["key"]), 4)
            steps = learner["gradient_steps"] + 1
            learner |= {"key": jax.random.key_data(key), "gradient_steps": steps}
            obs, *rest = sample(sample_key, replay, filled, args.batch_size, obs_dim)
            learner = update_qf(learner, next_key, obs, *rest)
            due = steps % args.policy_frequency == 0
            return jax.lax.cond(due, update_actor, lambda learner, *_: learner, learner, actor_key, obs), None

        return jax.lax.scan(update, learner, length=updates)[0] | {"replay": replay}

    # Resume
    def save_checkpoint():
        writer.flush()
        state = {"global_step": global_step, "learner": to_state_dict(jax.device_get(learner))}
        state["learner"]["replay"] = state["learner"]["replay"][:chunks_added]
        state |= {"chunk": chunk, "staged": staged, "chunks_added": chunks_added}
        state["numpy_rng"] = json.dumps(rng.bit_generator.state)
        state["events"] = {file.name: file.stat().st_size for file in run_dir.glob("events*")}
        (run_dir / "unfinished.tmp").write_bytes(msgpack_serialize(state))
        os.replace(run_dir / "unfinished.tmp", run_dir / "checkpoint.msgpack")

    global_step = 0
    if args.resume:
        global_step = checkpoint["global_step"]
        rows = checkpoint["learner"]["replay"]
        checkpoint["learner"]["replay"] = learner["replay"].at[: len(rows)].set(rows)
        learner = jax.device_put(from_state_dict(learner, checkpoint["learner"]))
        chunk[:], staged, chunks_added = checkpoint["chunk"], checkpoint["staged"], checkpoint["chunks_added"]
        rng.bit_generator.state = json.loads(checkpoint["numpy_rng"])
    else:
        save_checkpoint()

    # Training loop
    start_time, start_step = time.perf_counter(), global_step
    log_period = max(100, args.num_envs)  # environment steps
    logged_steps = int(learner["gradient_steps"])
    obs = envs.reset(seed=args.seed + global_step)[0].copy()
    while global_step < args.total_timesteps:
        # Act
        if global_step < args.learning_starts:
            actions = rng.uniform(low, high, size=(args.num_envs, action_dim)).astype(np.float32)
        else:
            noise = rng.standard_normal((args.num_envs, action_dim), dtype=np.float32)
            actions = np.array(act(learner["actor_params"], obs, noise))

        # Learn: before the environments step, so that a GPU works on it while they do
        if staged:
            due = int(global_step * args.utd) - int((global_step - args.num_envs) * args.utd)
            due = due if global_step > args.learning_starts else 0
            learner, chunks_added = learn(learner, chunk.copy(), chunks_added, due), chunks_added + 1

        # Step
        next_obs, reward, terminated, truncated, infos = envs.step(actions)
        episode_returns += reward
        episode_lengths += 1
        done, final_obs = terminated | truncated, next_obs
        if done.any():
            final_obs = next_obs.copy()
            final_obs[done] = np.stack(infos["final_obs"][done])
            for i in np.flatnonzero(done):  # environment i has made step number global_step + i + 1
                writer.add_scalar("charts/episodic_return", episode_returns[i], global_step + i + 1)
                writer.add_scalar("charts/episodic_length", episode_lengths[i], global_step + i + 1)
                recent_returns.append(episode_returns[i])
                episode_returns[i] = episode_lengths[i] = 0
        np.concatenate((obs, final_obs, actions, reward[:, None], terminated[:, None]), axis=1, out=chunk[0])
        staged = True
        obs[:] = next_obs
        global_step += args.num_envs

        # Log
        if global_step % 100 >= args.num_envs and global_step < args.total_timesteps:
            continue
        steps = int(learner["gradient_steps"])
        if steps > logged_steps:
            actor_steps = steps // args.policy_frequency - logged_steps // args.policy_frequency
            sums, counts = learner["losses"].tolist(), [steps - logged_steps] * 5 + [actor_steps] * 3
            norm = jax.jit(optax.global_norm)((learner["actor_params"], learner["qf_params"]))
            if not np.isfinite([*sums, norm]).all():
                sys.exit(f"\nLosses are not finite at step {global_step}: {sums}. Last good checkpoint: {run_dir}")
            for name, total, count in zip(loss_names, sums, counts):
                if count:
                    writer.add_scalar(f"losses/{name}", total / count, global_step)
            learner["losses"], logged_steps = jnp.zeros(len(loss_names)), steps
        sps = (global_step - start_step) / (time.perf_counter() - start_time)
        writer.add_scalar("charts/SPS", int(sps), global_step)
        if sys.stdout.isatty() or global_step % (args.total_timesteps // 100 + 1) < log_period:
            report(global_step, args.total_timesteps, sps, recent_returns)

        # Checkpoint
        if stop_signals or global_step % args.checkpoint_freq < log_period or global_step >= args.total_timesteps:
            save_checkpoint()
        if stop_signals:
            print(f"\nStopped at step {global_step}. To continue: python {sys.argv[0]} --resume {run_dir}")
            sys.exit(75)  # schedulers start such a job again

    # Save and close
    signal.signal(signal.SIGTERM, lambda *received: sys.exit(75))
    envs.close()
    if args.save_model:
        model = {"actor": learner["actor_params"], "qf": learner["qf_params"]}
        save_file(flatten_dict(model, sep="."), run_dir / "model.safetensors")
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
