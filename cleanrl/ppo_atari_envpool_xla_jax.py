# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "envpool>=1.2; sys_platform == 'linux'", "flax>=0.11", "gymnasium>=1.2", "jax>=0.7", "numpy>=2", "optax>=0.2.5",
#     "safetensors>=0.5", "tensorboard>=2.19", "tyro>=0.9",
# ]
# ///
"""Proximal Policy Optimization (PPO, Schulman et al. 2017, arXiv:1707.06347): Atari games of EnvPool.

Differs from ppo_atari_envpool.py:
1. JAX, Flax and Optax in place of torch; convolutions are products of patches and matrices;
2. EnvPool's XLA interface: one compiled function chooses actions and steps the games, whose observations stay on the
   device; games that end are read from there once per rollout;
3. that interface restarts a finished game on the step after its end, whose action is ignored: such dummy rows are kept
   out of advantages, losses and statistics, but they count as environment steps;
4. values and log-probabilities are those of the rollout's own forward passes;
5. random numbers are a function of the seed, the iteration and the step, so a checkpoint need not keep a generator;
6. the total loss, the mean of the last 20 lengths and the speed of each iteration are logged too.

Differs from the paper:
1. advantages are standardised per minibatch, value losses clipped like ratios, gradients clipped to a global norm;
2. orthogonal weights at first; 4 epochs, not 3; the clip range is not annealed, and the value loss weighs a quarter;
3. an episode cut off by a time limit is bootstrapped from its final observation.

Run: python ppo_atari_envpool_xla_jax.py --env-id Breakout-v5 --total-timesteps 10000000
"""

import difflib
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
    clip_vloss: bool = True  # clip the value loss
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # ceiling of the global gradient norm
    target_kl: float | None = None  # end an update's epochs once the approximate KL exceeds this


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


class SameStepEnvPool:
    """EnvPool, but a finished game restarts within its last step, where EnvPool would spend the next step on that.

    `starts` tells where the observations are the first ones of a game or of a life: networks with memory need it.
    """

    def __init__(self, env_id, num_envs, life_loss, **options):
        self.make = partial(envpool.make, env_id, env_type="gymnasium", num_envs=num_envs, **options)
        spec = envpool.make_spec(env_id, num_envs=num_envs, **options)
        self.single_observation_space, self.single_action_space = spec.observation_space, spec.action_space
        self.num_envs, self.life_loss = num_envs, life_loss

    def reset(self, seed):
        self.pool = self.make(seed=seed % 2**31)  # EnvPool takes a seed only when it is made
        obs, infos = self.pool.reset()
        self.lives, self.starts = infos["lives"], np.ones(self.num_envs, dtype=bool)
        return obs, infos

    def step(self, actions):
        obs, reward, terminated, truncated, infos = self.pool.step(actions)
        game_over, lives, final_obs = terminated | truncated, infos["lives"], obs
        life_lost = (0 < lives) & (lives < self.lives)  # some games go on for a moment with no life left
        self.starts = game_over | life_lost
        if self.life_loss:
            terminated = terminated | life_lost
        if game_over.any():
            first_obs, infos = self.pool.reset(np.flatnonzero(game_over).astype(np.int32))
            obs, lives = obs.copy(), lives.copy()
            obs[infos["env_id"]], lives[infos["env_id"]] = first_obs, infos["lives"]
        self.lives = lives
        return obs, reward, terminated, truncated, {"final_obs": final_obs, "game_over": game_over}

    def close(self):
        self.pool.close()


def make_envs(env_id, num_envs, life_loss=True, **options):
    if envpool is None:
        raise ImportError("EnvPool is missing: pip install envpool (Linux only, ppo_atari.py runs elsewhere)")
    env_id = env_id.replace("NoFrameskip-v4", "-v5")  # EnvPool's name of the same game
    if env_id not in envpool.list_all_envs():
        near = difflib.get_close_matches(env_id, envpool.list_all_envs())
        raise gym.error.Error(f"EnvPool has no {env_id}; its names are like {', '.join(near) or 'Breakout-v5'}")
    spec = envpool.make_spec(env_id)
    if "episodic_life" not in spec.config._fields:
        file = "ppo.py" if isinstance(spec.action_space, gym.spaces.Discrete) else "ppo_continuous_action.py"
        raise gym.error.Error(f"{env_id} is not an Atari game; {file} handles vector observations")
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
        raise gym.error.Error(f"EnvPool's XLA interface fails on {device}: {way} ({reason})") from error
    envs.close()


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
        stride, cells, shape = self.stride, self.size // self.stride, (self.size, self.size, channels, self.features)
        kernel = self.param("kernel", nn.initializers.orthogonal(2**0.5), shape)
        bias = self.param("bias", nn.initializers.zeros, self.features)

        # cells of stride x stride pixels become pixels, over which a smaller kernel has stride 1
        x = x.reshape(num, height // stride, stride, width // stride, stride, channels).swapaxes(2, 3)
        x = x.reshape(num, height // stride, width // stride, -1)
        kernel = kernel.reshape(cells, stride, cells, stride, channels, -1).swapaxes(1, 2)
        rows, columns = x.shape[1] - cells + 1, x.shape[2] - cells + 1
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
        return logits, nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0))(hidden).squeeze(-1)


def logprob_of(logits, action):
    return jnp.take_along_axis(nn.log_softmax(logits), action[:, None], axis=1).squeeze(1)


def gae(rewards, values, next_value, dones, final_values, gamma, gae_lambda):
    """Generalised advantages (Schulman et al. 2016, eq. 16) of (num_steps, num_envs) arrays.

    What follows the end of an episode is worth `final_values`: V(final observation) if it was truncated, else zero.
    """

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


def ppo_loss(newlogprob, entropy, newvalue, mb, args):
    """The loss of a minibatch over its valid rows, and all that is logged of it."""
    mean, mb_advantages = partial(masked_mean, valid=mb["valid"]), mb["advantages"]
    if args.norm_adv:
        centred, count = mb_advantages - mean(mb_advantages), mb["valid"].sum()
        std = jnp.sqrt(mean(centred**2) * count / jnp.maximum(count - 1, 1))
        mb_advantages = centred / (std + 1e-8)

    logratio = newlogprob - mb["logprobs"]
    ratio = jnp.exp(logratio)
    clipped_ratio = ratio.clip(1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = -mean(jnp.minimum(mb_advantages * ratio, mb_advantages * clipped_ratio))  # eq. 7
    v_error = (newvalue - mb["returns"]) ** 2
    if args.clip_vloss:
        clipped_value = mb["values"] + (newvalue - mb["values"]).clip(-args.clip_coef, args.clip_coef)
        v_error = jnp.maximum(v_error, (clipped_value - mb["returns"]) ** 2)
    v_loss = 0.5 * mean(v_error)
    entropy_loss = mean(entropy)
    loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss  # eq. 9
    approx_kl = mean((ratio - 1) - logratio)  # estimator k3 of http://joschu.net/blog/kl-approx.html
    logged = [v_loss, pg_loss, entropy_loss, -mean(logratio), approx_kl, mean(ratio != clipped_ratio), loss]
    return loss, jnp.stack(logged)


def evaluate(policy, envs, seed):
    """The undiscounted return of one episode in each environment."""
    obs, _ = envs.reset(seed=seed)
    returns, running = np.zeros(envs.num_envs), np.ones(envs.num_envs, dtype=bool)
    while running.any():
        obs, reward, terminated, truncated, _ = envs.step(policy(obs))
        returns += running * reward
        running &= ~(terminated | truncated)
    return returns


def softmax_policy(forward, params, deterministic=False):
    """A function from a batch of observations to a batch of actions: Gumbel-max draws from the softmax of logits."""
    rng = np.random.default_rng(0)

    def policy(obs):
        logits = np.asarray(forward(params, obs)[0])
        return (logits if deterministic else logits + rng.gumbel(size=logits.shape)).argmax(1)

    return policy


def load_policy(run_dir, envs, device, deterministic=False):
    """The saved agent of a run, as a function from a batch of observations to a batch of actions."""
    agent = Agent(envs.single_action_space.n)
    params = jax.device_put(unflatten_dict(load_file(Path(run_dir, "model.safetensors")), sep="."), device)
    return softmax_policy(jax.jit(agent.apply), params, deterministic)


if __name__ == "__main__":
    # Run directory and logger
    stop_signals = []
    signal.signal(signal.SIGTERM, lambda *received: stop_signals.append(received))
    args = parse_args()
    if min(args.num_envs, args.num_steps, args.num_minibatches, args.update_epochs, args.checkpoint_freq) < 1:
        fail("--num-envs, --num-steps, --num-minibatches, --update-epochs and --checkpoint-freq must be at least 1")
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = args.total_timesteps // batch_size
    if batch_size % args.num_minibatches or minibatch_size < 2:
        fail(f"--num-minibatches must divide the rollout of {batch_size} steps into minibatches of two steps or more")
    if num_iterations == 0:
        fail(f"--total-timesteps must be at least one rollout of {batch_size} steps")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave the rest of the GPU to other runs
    if not args.cuda:
        jax.config.update("jax_platforms", "cpu")
    try:
        check_xla(make_envs(args.env_id, 1))  # a first look, before anything is written
    except (gym.error.Error, ImportError) as error:
        fail(error)
    checkpoint = msgpack_restore(Path(args.resume, "checkpoint.msgpack").read_bytes()) if args.resume else {}
    run_dir, writer = open_run(args, checkpoint.get("events", {}))

    # Seeding
    device = jax.devices()[0]
    key, init_key = jax.random.split(jax.random.key(args.seed))

    # Environments
    envs = make_envs(args.env_id, args.num_envs)

    # Agent and optimizer
    agent = Agent(envs.single_action_space.n)
    obs_shape = envs.single_observation_space.shape
    params = jax.jit(agent.init)(init_key, jnp.zeros((1, *obs_shape)))
    forward = jax.jit(agent.apply)
    optimizer = optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optax.scale_by_adam(eps=1e-5))

    # Storage: it stays on the device; a donated array is changed in place
    loss_names = ["value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "loss"]
    learner = {
        "params": params,
        "opt_state": optimizer.init(params),
        "losses": jnp.zeros(len(loss_names)),  # sums over an update
    }
    kinds = dict.fromkeys(("dones", "terminated", "valid", "game_over"), bool) | {"actions": jnp.int32}
    kinds |= dict.fromkeys(("logprobs", "values", "rewards", "game_returns", "game_lengths"), jnp.float32)
    rollout = {name: jnp.zeros((args.num_steps, args.num_envs), kind) for name, kind in kinds.items()}
    rollout["obs"] = jnp.zeros((args.num_steps, args.num_envs, *obs_shape), jnp.uint8)
    recent_returns, recent_lengths = deque(maxlen=20), deque(maxlen=20)

    def play(params, games, key):
        """One step of all games, and the row of the rollout that it makes."""
        logits, value = agent.apply(params, games["obs"])
        action = jax.random.categorical(key, logits)
        # the handle goes in and comes out, so that XLA keeps the steps of the games in their order
        handle, (obs, reward, terminated, truncated, infos) = env_step(games["handle"], action.astype(jnp.int32))
        game_over, lives = terminated | truncated, infos["lives"]
        life_lost = (0 < lives) & (lives < games["lives"])  # some games go on for a moment with no life left
        game_return, game_length = games["return"] + reward, games["length"] + ~games["over"]
        row = {"obs": games["obs"], "actions": action, "logprobs": logprob_of(logits, action), "values": value}
        row |= {"rewards": jnp.sign(reward), "terminated": terminated | life_lost, "dones": game_over | life_lost}
        row |= {"valid": ~games["over"], "game_over": game_over}  # after the end of a game: a dummy row
        row |= {"game_returns": game_return, "game_lengths": game_length}
        games = {"handle": handle, "obs": obs, "lives": lives, "over": game_over}
        return games | {"return": game_return * ~game_over, "length": game_length * ~game_over}, row

    @partial(jax.jit, donate_argnums=(1, 2))
    def act(params, games, rollout, key, step):
        games, row = play(params, games, jax.random.fold_in(key, step))
        return games, jax.tree.map(lambda rows, row: rows.at[step].set(row), rollout, row)

    @jax.jit
    def targets(params, rollout, next_obs):
        """The rollout as a flat batch with advantages and returns, and how much of the returns the values explain."""
        values, next_value = rollout["values"], agent.apply(params, next_obs)[1]
        # what follows the last row of a game is its final observation, on a dummy row
        final_values = jnp.where(rollout["terminated"], 0, jnp.concatenate((values[1:], next_value[None])))
        inputs = rollout["rewards"], values, next_value, rollout["dones"], final_values
        advantages = gae(*inputs, args.gamma, args.gae_lambda)
        batch = {name: rollout[name] for name in ("obs", "actions", "logprobs", "values", "valid")}
        batch |= {"advantages": advantages, "returns": advantages + values}
        unexplained = advantages.var(where=batch["valid"]) / batch["returns"].var(where=batch["valid"])
        return {name: x.reshape(batch_size, *x.shape[2:]) for name, x in batch.items()}, 1 - unexplained

    @partial(jax.jit, donate_argnums=0)
    def update(learner, mb_inds, batch, lr):
        mb = {name: x[mb_inds] for name, x in batch.items()}

        def loss_of(params):
            logits, newvalue = agent.apply(params, mb["obs"])
            entropy = -(nn.softmax(logits) * nn.log_softmax(logits)).sum(-1)
            return ppo_loss(logprob_of(logits, mb["actions"]), entropy, newvalue, mb, args)

        gradients, losses = jax.grad(loss_of, has_aux=True)(learner["params"])
        updates, opt_state = optimizer.update(gradients, learner["opt_state"])
        params = jax.tree.map(lambda param, change: param - lr * change, learner["params"], updates)
        approx_kl = losses[loss_names.index("approx_kl")]
        return {"params": params, "opt_state": opt_state, "losses": learner["losses"] + losses}, approx_kl

    # Resume
    def save_checkpoint():
        writer.flush()
        state = {"global_step": global_step, "learner": to_state_dict(jax.device_get(learner))}
        state["recent_returns"] = [float(episodic_return) for episodic_return in recent_returns]
        state["recent_lengths"] = [float(episodic_length) for episodic_length in recent_lengths]
        state["events"] = {file.name: file.stat().st_size for file in run_dir.glob("events*")}
        (run_dir / "unfinished.tmp").write_bytes(msgpack_serialize(state))
        os.replace(run_dir / "unfinished.tmp", run_dir / "checkpoint.msgpack")

    global_step = 0
    if args.resume:
        global_step = checkpoint["global_step"]
        learner = jax.device_put(from_state_dict(learner, checkpoint["learner"]))
        recent_returns.extend(checkpoint["recent_returns"])
        recent_lengths.extend(checkpoint["recent_lengths"])
    else:
        save_checkpoint()

    # Training loop
    start_time, start_step = time.perf_counter(), global_step
    next_obs, infos = envs.reset(seed=args.seed + global_step)
    handle, _, _, env_step = envs.pool.xla()
    games = {"handle": handle, "obs": next_obs, "lives": infos["lives"], "over": np.zeros(args.num_envs, bool)}
    games = jax.device_put(games | dict.fromkeys(("return", "length"), np.zeros(args.num_envs, np.float32)))
    for iteration in range(global_step // batch_size, num_iterations):
        iteration_start = time.perf_counter()
        lr = (1 - iteration / num_iterations if args.anneal_lr else 1) * args.learning_rate
        iteration_key = jax.random.fold_in(key, iteration)

        # Act
        for step in range(args.num_steps):
            games, rollout = act(learner["params"], games, rollout, iteration_key, step)

        # Targets
        batch, explained_variance = targets(learner["params"], rollout, games["obs"])

        # Learn
        learner["losses"] = jnp.zeros(len(loss_names))
        for epoch in range(args.update_epochs):
            epoch_key = jax.random.fold_in(iteration_key, args.num_steps + epoch)
            for mb_inds in jax.random.permutation(epoch_key, batch_size).reshape(args.num_minibatches, -1):
                learner, approx_kl = update(learner, mb_inds, batch, lr)
            if args.target_kl is not None and approx_kl > args.target_kl:
                break

        # Log
        game_over, game_returns, game_lengths = (
            np.asarray(rollout[name]) for name in ("game_over", "game_returns", "game_lengths")
        )
        for step, i in np.argwhere(game_over):  # the step of environment i has the number `at`
            at = global_step + step * args.num_envs + i + 1
            recent_returns.append(game_returns[step, i])
            recent_lengths.append(game_lengths[step, i])
            writer.add_scalar("charts/episodic_return", recent_returns[-1], at)
            writer.add_scalar("charts/episodic_length", recent_lengths[-1], at)
            writer.add_scalar("charts/avg_episodic_return", np.mean(recent_returns), at)
            writer.add_scalar("charts/avg_episodic_length", np.mean(recent_lengths), at)
        global_step += batch_size
        means = (np.asarray(learner["losses"]) / ((epoch + 1) * args.num_minibatches)).tolist()
        if not np.isfinite([*means, jax.jit(optax.global_norm)(learner["params"])]).all():
            sys.exit(f"\nLosses are not finite at step {global_step}: {means}. Last good checkpoint: {run_dir}")
        for name, mean in zip(loss_names, means):
            writer.add_scalar(f"losses/{name}", mean, global_step)
        writer.add_scalar("losses/explained_variance", float(explained_variance), global_step)
        writer.add_scalar("charts/learning_rate", lr, global_step)
        now = time.perf_counter()
        sps = (global_step - start_step) / (now - start_time)
        writer.add_scalar("charts/SPS", int(sps), global_step)
        writer.add_scalar("charts/SPS_update", int(batch_size / (now - iteration_start)), global_step)
        if sys.stdout.isatty() or iteration % (num_iterations // 100 + 1) == 0:
            report(global_step, args.total_timesteps, sps, recent_returns)

        # Checkpoint
        if args.capture_video and iteration % (num_iterations // 10 + 1) == 0:
            policy = softmax_policy(forward, learner["params"])
            game = make_envs(args.env_id, 1, life_loss=False)
            record_game(policy, game, args.env_id, args.seed, run_dir / f"videos/step-{global_step}.mp4")
        if stop_signals or global_step % args.checkpoint_freq < batch_size or iteration == num_iterations - 1:
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
