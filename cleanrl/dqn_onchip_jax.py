# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "flax>=0.11", "gymnasium[classic-control]>=1.2", "gymnax>=1.0.1", "jax>=0.7", "numpy>=2", "optax>=0.2.5",
#     "safetensors>=0.5", "tensorboard>=2.19", "tyro>=0.9",
# ]
# ///
"""Deep Q-learning (DQN, Mnih et al. 2015, doi:10.1038/nature14236): vector observations, discrete actions.

Differs from dqn_jax.py:
1. the environments are those of gymnax, so that training never leaves the accelerator;
2. `--num-seeds` runs with the seeds `--seed`, `--seed` + 1, ... train side by side, each as it would alone; a step is a
   step of each of them, TensorBoard shows their mean, curves.npz has the curve of each;
3. a round collects `--train-frequency` transitions (at least one of each environment), takes the gradient steps that
   are due and then the steps of the target network; about 500 environment steps are logged together, with the mean
   return and length of the episodes that ended in them, and with their number;
4. a resumed run goes on with the episodes that were under way.

Differs from the paper:
1. a network of two hidden layers for vector observations, Adam in place of RMSProp, and no clipping of the TD error;
2. an episode cut off by a time limit is bootstrapped from its final observation;
3. `--tau` below 1 moves the target network a step towards the online network, where the paper copies it.

Run: python dqn_onchip_jax.py --env-id CartPole-v1 --total-timesteps 500000 --num-seeds 10
"""

import difflib
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
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
    cuda: bool = True  # use the GPU if there is one
    track: bool = False  # mirror the run to Weights & Biases
    wandb_project_name: str = "cleanRL"  # W&B project
    wandb_entity: str | None = None  # W&B user or team
    capture_video: bool = False  # record episodes at several stages of training
    save_model: bool = False  # write model.safetensors at the end and evaluate it on held-out seeds
    upload_model: bool = False  # push the finished run folder to the Hugging Face hub (implies --save-model)
    hf_entity: str = ""  # hub user or organisation, if not the owner of the token
    resume: str = ""  # continue the run in this folder
    checkpoint_freq: int = 100_000  # environment steps between checkpoints

    env_id: str = "CartPole-v1"  # environment
    num_seeds: int = 1  # runs that train side by side, with the seeds --seed, --seed + 1, ...
    total_timesteps: int = 500_000  # environment steps in total
    learning_rate: float = 2.5e-4  # step size of the optimizer
    num_envs: int = 1  # parallel environments
    buffer_size: int = 10_000  # transitions that the replay buffer holds
    gamma: float = 0.99  # discount
    tau: float = 1.0  # step of the target network towards the online network (1 copies it)
    target_network_frequency: int = 500  # environment steps (continuous SAC: gradient steps) between target updates
    batch_size: int = 128  # transitions per gradient step
    start_e: float = 1.0  # exploration rate at the start
    end_e: float = 0.05  # exploration rate at the end
    exploration_fraction: float = 0.5  # share of the steps over which the exploration rate falls
    learning_starts: int = 10_000  # environment steps before the first gradient step
    train_frequency: int = 10  # environment steps between gradient steps


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


def make_gymnax(env_id):
    """An environment of gymnax and its parameters; an id such as module:Name-v0 imports the module first."""
    try:
        import gymnax  # here: it starts JAX's devices, after which --no-cuda would come too late
    except ImportError as error:
        how = "pip install matplotlib seaborn six && pip install --no-deps gymnax==1.0.1"
        raise gym.error.Error(f"gymnax is missing or not complete ({error}): {how}") from error
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    if name not in gymnax.registered_envs:
        near = difflib.get_close_matches(name, gymnax.registered_envs)
        raise gym.error.Error(f"gymnax has no {env_id}; its names are like {', '.join(near) or 'CartPole-v1'}")
    return gymnax.make(name)


def step_envs(env, env_params, keys, states, actions, fresh_obs, fresh_states):
    """One step in each environment; where it ends an episode, the next one starts from the fresh state at once."""
    final_obs, states, reward, terminated, _ = jax.vmap(env.step_env, (0, 0, 0, None))(
        keys, states, actions, env_params
    )
    truncated = jax.vmap(env.is_truncated, (0, None))(states, env_params)

    def restart(fresh, old):
        done = (terminated | truncated).reshape(-1, *[1] * (old.ndim - 1))
        return jnp.where(done, fresh, old).astype(old.dtype)

    obs, states = jax.tree.map(restart, (fresh_obs, fresh_states), (final_obs, states))
    return obs, states, reward.astype(jnp.float32), terminated, truncated, final_obs


class GymnaxEnvs:
    """Environments of gymnax with Gymnasium's interface, for the evaluation of a policy on the host."""

    def __init__(self, env_id, num_envs):
        self.env, self.env_params = make_gymnax(env_id)
        self.num_envs, self.step_all = num_envs, jax.jit(partial(step_envs, self.env, self.env_params))
        self.reset_all = jax.jit(jax.vmap(self.env.reset_env, (0, None)))
        self.single_observation_space = self.env.observation_space(self.env_params)
        self.single_action_space = self.env.action_space(self.env_params)

    def reset(self, seed):
        self.key = jax.random.key(seed)
        obs, self.states = self.fresh()
        return np.asarray(obs), {}

    def fresh(self):
        self.key, self.step_key, key = jax.random.split(self.key, 3)
        return self.reset_all(jax.random.split(key, self.num_envs), self.env_params)

    def step(self, actions):
        fresh_obs, fresh_states = self.fresh()
        keys = jax.random.split(self.step_key, self.num_envs)
        step = self.step_all(keys, self.states, jnp.asarray(actions), fresh_obs, fresh_states)
        self.states = step[1]
        obs, reward, terminated, truncated, final_obs = map(np.asarray, (step[0], *step[2:]))
        return obs, reward, terminated, truncated, {"final_obs": final_obs}

    def close(self):
        pass


def make_envs(env_id, num_envs, seed=0, capture_video=False, run_name=""):
    return GymnaxEnvs(env_id, num_envs)  # reset takes the seed, and film_episode makes films


def film_episode(policy, env_id, seed, path):
    """An episode of the policy in Gymnasium's environment of that name, which can render what gymnax's cannot."""
    env = gym.wrappers.RecordVideo(gym.make(env_id, render_mode="rgb_array"), str(path.parent), name_prefix=path.name)
    obs, done = env.reset(seed=seed)[0], False
    while not done:
        obs, _, terminated, truncated, _ = env.step(policy(obs[None])[0])
        done = terminated or truncated
    env.close()


class QNetwork(nn.Module):
    num_actions: int

    @nn.compact
    def __call__(self, obs):
        hidden = nn.relu(nn.Dense(120)(obs))
        hidden = nn.relu(nn.Dense(84)(hidden))
        return nn.Dense(self.num_actions)(hidden)


def sample(key, rows, filled, batch_size, obs_dim):
    """A batch of transitions from the first `filled` rows of the replay buffer."""
    batch = rows.reshape(-1, rows.shape[-1])[jax.random.randint(key, (batch_size,), 0, filled)]
    obs, next_obs, rest = jnp.split(batch, [obs_dim, 2 * obs_dim], axis=1)
    return obs, next_obs, rest[:, :-2], rest[:, -2], rest[:, -1]


def td_target(reward, terminated, next_q_values, gamma):
    """The reward and the discounted value of the best next action; an episode that has terminated has none."""
    return reward + gamma * (1 - terminated) * jnp.max(next_q_values, axis=1)


def evaluate(policy, envs, seed):
    """The undiscounted return of one episode in each environment."""
    obs, _ = envs.reset(seed=seed)
    returns, running = np.zeros(envs.num_envs), np.ones(envs.num_envs, dtype=bool)
    while running.any():
        obs, reward, terminated, truncated, _ = envs.step(policy(obs))
        returns += running * reward
        running &= ~(terminated | truncated)
    return returns


def greedy_policy(apply, params, epsilon, num_actions):
    """A function from a batch of observations to a batch of actions: the best, or with probability epsilon any."""
    rng = np.random.default_rng(0)

    def policy(obs):
        greedy = np.asarray(apply(params, obs).argmax(-1))
        return np.where(rng.random(len(obs)) < epsilon, rng.integers(num_actions, size=len(obs)), greedy)

    return policy


def load_policy(run_dir, envs, device, deterministic=False, index=0):
    """The saved network of a run's first seed, or another, as a function from a batch of observations to actions."""
    q_network = QNetwork(envs.single_action_space.n)
    params = unflatten_dict(load_file(Path(run_dir, "model.safetensors")), sep=".")
    params = jax.device_put(jax.tree.map(lambda param: param[index], params), device)
    epsilon = 0 if deterministic else json.loads(Path(run_dir, "args.json").read_text())["end_e"]
    return greedy_policy(jax.jit(q_network.apply), params, epsilon, q_network.num_actions)


if __name__ == "__main__":
    # Run directory and logger
    stop_signals = []
    signal.signal(signal.SIGTERM, lambda *received: stop_signals.append(received))
    args = parse_args()
    if min(args.num_envs, args.batch_size, args.train_frequency, args.checkpoint_freq, args.total_timesteps) < 1:
        fail("--num-envs, --batch-size, --train-frequency, --checkpoint-freq and --total-timesteps must be at least 1")
    if args.buffer_size < max(args.num_envs, args.train_frequency) or args.target_network_frequency < 1:
        fail("--buffer-size must be at least --num-envs and --train-frequency, --target-network-frequency at least 1")
    if args.num_seeds < 1:
        fail("--num-seeds must be at least 1")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave the rest of the GPU to other runs
    if not args.cuda:
        jax.config.update("jax_platforms", "cpu")
    try:
        envs = make_envs(args.env_id, args.num_envs)
    except (gym.error.Error, ImportError) as error:
        fail(error)
    if not hasattr(envs.single_action_space, "n"):
        fail(f"{args.env_id} needs discrete actions; ppo_continuous_action.py handles continuous ones")
    if len(getattr(envs.single_observation_space, "shape", ())) != 1:
        fail(f"{args.env_id} needs vector observations; dqn_atari_jax.py handles the images of Atari games")
    if args.capture_video and args.env_id not in gym.registry:
        fail(f"Gymnasium cannot render {args.env_id}: leave --capture-video out")
    checkpoint = msgpack_restore(Path(args.resume, "checkpoint.msgpack").read_bytes()) if args.resume else {}
    if args.resume and checkpoint["seed"] != args.seed:  # all random numbers depend on it
        fail(f"--resume continues the run as it began, with --seed {checkpoint['seed']}")
    run_dir, writer = open_run(args, checkpoint.get("events", {}))

    # Seeding
    device = jax.devices()[0]
    seeds = np.arange(args.seed, args.seed + args.num_seeds)
    keys, init_keys = jax.vmap(lambda seed: jax.random.split(jax.random.key(seed)))(seeds.astype(np.uint32)).T

    # Agent and optimizer
    env, env_params = envs.env, envs.env_params
    num_actions, obs_dim = envs.single_action_space.n, envs.single_observation_space.shape[0]
    q_network = QNetwork(num_actions)
    optimizer = optax.adam(args.learning_rate)

    # Storage: all that training changes, each array with the seeds as its first axis
    chunk_steps = max(1, args.train_frequency // args.num_envs)  # steps of each environment between gradient steps
    round_size = chunk_steps * args.num_envs
    num_chunks = args.buffer_size // round_size
    num_rounds = -(-args.total_timesteps // round_size)
    rounds_per_row = max(1, 500 // round_size)  # rounds that are logged together
    row_size = rounds_per_row * round_size
    max_chunk = 64  # logged rows between two looks of the host

    def init(key):
        init_key, reset_key = jax.random.split(key)
        params = q_network.init(init_key, jnp.zeros((1, obs_dim)))
        obs, states = envs.reset_all(jax.random.split(reset_key, args.num_envs), env_params)
        games = {"obs": obs, "states": states, "returns": jnp.zeros(args.num_envs), "lengths": jnp.zeros(args.num_envs)}
        learner = {"params": params, "target_params": params, "opt_state": optimizer.init(params), "games": games}
        learner["replay"] = jnp.zeros((num_chunks, chunk_steps, args.num_envs, 2 * obs_dim + 3))
        return jax.tree.map(lambda x: jnp.asarray(x, x.dtype), learner)  # no weak types, which would change

    learner = jax.jit(jax.vmap(init))(init_keys)
    loss_names = ["td_loss", "q_values"]
    names = [f"losses/{name}" for name in loss_names]
    names += ["charts/episodic_return", "charts/episodic_length", "charts/episodes"]
    curves, curve_steps = [np.zeros((0, args.num_seeds, len(names)), np.float32)], []
    recent_returns = []

    def play(params, games, row):
        """One step of all environments of one seed, and the transitions and finished episodes of it."""
        explore, random_action, keys, (fresh_obs, fresh_states) = row
        action = jnp.where(explore, random_action, q_network.apply(params, games["obs"]).argmax(1))
        step = step_envs(env, env_params, keys, games["states"], action, fresh_obs, fresh_states)
        obs, states, reward, terminated, truncated, final_obs = step
        done, returns, lengths = terminated | truncated, games["returns"] + reward, games["lengths"] + 1
        columns = games["obs"], final_obs, action[:, None], reward[:, None], terminated[:, None]
        ended = jnp.where(done, jnp.stack([returns, lengths, jnp.ones_like(returns)]), 0).sum(1)
        games = {"obs": obs, "states": states, "returns": returns * ~done, "lengths": lengths * ~done}
        return games, (jnp.concatenate(columns, axis=1), ended)

    def update(key, replay, filled, learner):
        """One gradient step of one seed."""
        obs, next_obs, action, reward, terminated = sample(key, replay, filled, args.batch_size, obs_dim)
        target = td_target(reward, terminated, q_network.apply(learner["target_params"], next_obs), args.gamma)

        def td_loss(params):
            q_values = jnp.take_along_axis(q_network.apply(params, obs), action.astype(int), axis=1).squeeze(1)
            return jnp.mean((q_values - target) ** 2), q_values.mean()

        (loss, q_value), gradients = jax.value_and_grad(td_loss, has_aux=True)(learner["params"])
        updates, opt_state = optimizer.update(gradients, learner["opt_state"])
        losses = learner["losses"] + jnp.stack([loss, q_value])
        params = optax.apply_updates(learner["params"], updates)
        return learner | {"params": params, "opt_state": opt_state, "losses": losses}

    # Resume
    def save_checkpoint():
        writer.flush()
        curves[:] = [np.concatenate(curves)]
        with (run_dir / "unfinished.tmp").open("wb") as file:
            np.savez(file, seeds=seeds, steps=curve_steps, **dict(zip(names, np.moveaxis(curves[0], 2, 0))))
        os.replace(run_dir / "unfinished.tmp", run_dir / "curves.npz")
        state = {"global_step": global_step, "seed": args.seed, "learner": to_state_dict(jax.device_get(learner))}
        state["events"] = {file.name: file.stat().st_size for file in run_dir.glob("events*")}
        (run_dir / "unfinished.tmp").write_bytes(msgpack_serialize(state))
        os.replace(run_dir / "unfinished.tmp", run_dir / "checkpoint.msgpack")

    global_step = 0
    if args.resume:
        global_step = checkpoint["global_step"]
        learner = jax.device_put(from_state_dict(learner, checkpoint["learner"]))
        with np.load(run_dir / "curves.npz") as saved:  # which may be newer than the checkpoint
            curve_steps = [step for step in saved["steps"].tolist() if step <= global_step]
            curves = [np.stack([saved[name] for name in names], axis=2)[: len(curve_steps)]]
    else:
        save_checkpoint()

    # Training loop
    def iterate(learner, key, number):
        """One round of one seed, and what its episodes and gradient steps add to the log."""
        # Act
        start, size = number * round_size, (chunk_steps, args.num_envs)
        explore_key, action_key, step_key, reset_key, sample_key = jax.random.split(jax.random.fold_in(key, number), 5)
        steps = start + args.num_envs * jnp.arange(chunk_steps)
        progress = jnp.minimum(steps / max(args.exploration_fraction * args.total_timesteps, 1), 1)
        epsilon = args.start_e + (args.end_e - args.start_e) * progress
        explore = jax.random.uniform(explore_key, size) < epsilon[:, None]
        random_actions = jax.random.randint(action_key, size, 0, num_actions)
        fresh = jax.vmap(envs.reset_all, (0, None))(jax.random.split(reset_key, size), env_params)
        rows = explore, random_actions, jax.random.split(step_key, size), fresh
        games, (chunk, ended) = jax.lax.scan(partial(play, learner["params"]), learner["games"], rows, unroll=5)

        # Learn
        end = start + round_size
        replay = learner["replay"].at[number % num_chunks].set(chunk)
        filled = jnp.minimum(number + 1, num_chunks) * round_size
        num_updates, num_copies = (
            jnp.where(end > args.learning_starts, end // frequency - start // frequency, 0)
            for frequency in (args.train_frequency, args.target_network_frequency)
        )
        changing = {name: learner[name] for name in ("params", "target_params", "opt_state")} | {"losses": jnp.zeros(2)}
        changing = jax.lax.fori_loop(
            *(0, num_updates),
            lambda i, changing: update(jax.random.fold_in(sample_key, i), replay, filled, changing),
            changing,
        )
        losses, step_size = changing.pop("losses"), 1 - (1 - args.tau) ** num_copies
        changing["target_params"] = optax.incremental_update(changing["params"], changing["target_params"], step_size)
        added = jnp.concatenate([losses, ended.sum(0), jnp.full(1, num_updates)])
        return changing | {"games": games, "replay": replay}, added

    def train(learner, keys, first, count):
        """`count` rows of the log, at most `max_chunk`, with the rounds of all seeds that they are about."""

        def play_row(i, carry):
            learner, logged = carry
            start = first + i * rounds_per_row

            def play_round(number, carry):
                learner, added = jax.vmap(iterate, (0, 0, None))(carry[0], keys, number)
                return learner, carry[1] + added

            end = jnp.minimum(start + rounds_per_row, num_rounds)
            learner, sums = jax.lax.fori_loop(start, end, play_round, (learner, jnp.zeros((args.num_seeds, 6))))
            losses, episodes = sums[:, :2] / sums[:, 5:], sums[:, 2:4] / sums[:, 4:5]
            finite = jnp.stack(
                [jnp.isfinite(x.reshape(args.num_seeds, -1)).all(1) for x in jax.tree.leaves(learner["params"])]
            )
            losses = jnp.where(finite.all(0)[:, None], losses, jnp.inf)
            return learner, logged.at[i].set(jnp.concatenate([losses, episodes, sums[:, 4:5]], axis=1))

        return jax.lax.fori_loop(0, count, play_row, (learner, jnp.zeros((max_chunk, args.num_seeds, len(names)))))

    start_time, start_step, chunk, next_film = time.perf_counter(), global_step, 1, global_step
    train = jax.jit(train, donate_argnums=0).lower(learner, keys, 0, 0).compile()
    compile_time = time.perf_counter() - start_time
    print(f"Compiled in {compile_time:.1f} s")
    if global_step == 0:
        writer.add_scalar("charts/compile_time", compile_time, 0)
    start_time += compile_time
    last_step = num_rounds * round_size
    while global_step < last_step:
        chunk_start, first = time.perf_counter(), global_step // round_size
        until_checkpoint = -(-(args.checkpoint_freq - global_step % args.checkpoint_freq) // row_size)
        num_rows = -(-num_rounds // rounds_per_row)
        until_film = num_rows // 10 + 1 if args.capture_video else max_chunk
        count = min(chunk, until_checkpoint, until_film, -(-(num_rounds - first) // rounds_per_row))
        learner, logged = train(learner, keys, first, count)
        logged = np.asarray(logged)[:count]  # (rows, seeds, names)
        now = time.perf_counter()
        chunk = int(np.clip(count / (now - chunk_start), 1, max_chunk))  # of about a second

        # Log
        bad = ~np.isfinite(logged[:, :, : len(loss_names)]).all(2) & ~np.isnan(logged[:, :, 0])
        if bad.any():
            at = global_step + row_size * (bad.any(1).argmax() + 1)
            which = f"Losses are not finite at step {at} with seed {seeds[bad.any(0)].tolist()}"
            sys.exit(f"\n{which}. Last good checkpoint: {run_dir}")
        curves.append(logged)
        chunk_end = min(global_step + count * row_size, last_step)
        sps = args.num_seeds * (chunk_end - start_step) / (now - start_time)
        for row in logged:
            global_step = min(global_step + row_size, last_step)
            curve_steps.append(global_step)
            means, ended = {"charts/SPS": int(sps)}, row[:, -1] > 0  # seeds with episodes that ended
            if not np.isnan(row[0, 0]):
                means |= dict(zip(names[:-3], row[:, :-3].mean(0)))
            if ended.any():
                recent_returns = [row[ended, -3].mean()]
                means |= dict(zip(names[-3:], [*row[ended, -3:-1].mean(0), row[:, -1].sum()]))
            writer.add(Summary(value=[Summary.Value(tag=tag, simple_value=x) for tag, x in means.items()]), global_step)
        report(args.num_seeds * global_step, args.num_seeds * last_step, sps, recent_returns)

        # Checkpoint
        if args.capture_video and global_step >= next_film:
            params = jax.tree.map(lambda param: param[0], learner["params"])
            policy = greedy_policy(jax.jit(q_network.apply), params, args.end_e, num_actions)
            film_episode(policy, args.env_id, args.seed, run_dir / f"videos/step-{global_step}")
            next_film = global_step + args.total_timesteps // 10
        if stop_signals or global_step % args.checkpoint_freq < row_size or global_step == last_step:
            save_checkpoint()
        if stop_signals:
            print(f"\nStopped at step {global_step}. To continue: python {sys.argv[0]} --resume {run_dir}")
            sys.exit(75)  # schedulers start such a job again

    # Save and close
    signal.signal(signal.SIGTERM, lambda *received: sys.exit(75))
    envs.close()
    if args.save_model:
        save_file(flatten_dict(learner["params"], sep="."), run_dir / "model.safetensors")
        eval_envs = make_envs(args.env_id, 10 * args.num_seeds)  # ten for each seed

        @jax.jit
        def forward(params, obs):
            return jax.vmap(q_network.apply)(params, obs.reshape(args.num_seeds, 10, -1)).reshape(len(obs), -1)

        policy = greedy_policy(forward, learner["params"], args.end_e, num_actions)
        eval_returns = evaluate(policy, eval_envs, seed=args.seed + 2**30).reshape(args.num_seeds, 10)
        np.save(run_dir / "eval_returns.npy", eval_returns)
        for i, episodic_return in enumerate(eval_returns.mean(0)):
            writer.add_scalar("eval/episodic_return", episodic_return, i)
        print(f"\nEvaluation on held-out seeds: {eval_returns.mean():.2f} +- {eval_returns.std():.2f}")
    writer.close()
    if args.upload_model:
        push = ["-m", "cleanrl_utils.hub", "push", str(run_dir)] + ["--entity", args.hf_entity] * bool(args.hf_entity)
        if subprocess.run([sys.executable, *push]).returncode != 0:
            print(f"\nNot on the hub yet. To push it, where cleanrl_utils is installed: python {shlex.join(push)}")
    print(f"\nThe run is in {run_dir}. To look at it: tensorboard --logdir {run_dir}")
