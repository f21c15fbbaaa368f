# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "flax>=0.11", "gymnasium[classic-control]>=1.2", "gymnax>=1.0.1", "jax>=0.7", "numpy>=2", "optax>=0.2.5",
#     "safetensors>=0.5", "tensorboard>=2.19", "tyro>=0.9",
# ]
# ///
"""Proximal Policy Optimization (PPO, Schulman et al. 2017, arXiv:1707.06347): vector observations, discrete actions.

Differs from ppo.py:
1. JAX, Flax and Optax; the environments are those of gymnax, so that training never leaves the accelerator;
2. `--num-seeds` runs with the seeds `--seed`, `--seed` + 1, ... train side by side, each as it would alone; a step is a
   step of each of them, TensorBoard shows their mean, curves.npz has the curve of each;
3. an iteration is logged with the mean return and length of the episodes that ended in it, and with their number;
4. a resumed run goes on with the episodes that were under way;
5. few large operations: an iteration's random numbers are drawn at once, the hidden layers of both networks lie in
   common arrays, and advantages take log2(--num-steps) rounds in place of a loop.

Differs from the paper:
1. advantages are standardised per minibatch, value losses clipped like ratios, gradients clipped to a global norm;
2. networks have orthogonal initialisation, and the learning rate decays linearly, in the paper on Atari games only;
3. an episode cut off by a time limit is bootstrapped from its final observation.

Run: python ppo_jax.py --env-id CartPole-v1 --total-timesteps 500000 --num-seeds 10
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
    num_envs: int = 4  # parallel environments
    num_steps: int = 128  # rollout length per environment
    anneal_lr: bool = True  # decay the learning rate linearly to zero
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # trace parameter of the advantage estimate
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # standardise advantages per minibatch
    clip_coef: float = 0.2  # clip range of ratios and values
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


def orthogonal_pair(key, shape, dtype=jnp.float32):
    """Two orthogonal matrices of one shape, one for the actor and one for the critic."""
    return jax.vmap(lambda key: nn.initializers.orthogonal(2**0.5)(key, shape[1:], dtype))(jax.random.split(key))


class Agent(nn.Module):
    """The hidden layers of actor and critic lie side by side in one array each: half as many calls on the device."""

    num_actions: int

    @nn.compact
    def __call__(self, obs, actor=True, critic=True):
        """Logits and values; None in place of those that are not asked for."""
        used = slice(1 - actor, 1 + critic)
        hidden = jnp.broadcast_to(obs, (actor + critic, *obs.shape))  # a batch of products needs no transposition
        for i in range(2):
            kernel = self.param(f"kernel_{i}", orthogonal_pair, (2, hidden.shape[-1], 64))
            bias = self.param(f"bias_{i}", nn.initializers.zeros, (2, 1, 64))
            hidden = nn.tanh(hidden @ kernel[used] + bias[used])
        actor_head = nn.Dense(self.num_actions, kernel_init=nn.initializers.orthogonal(0.01), name="actor")
        critic_head = nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0), name="critic")
        return actor_head(hidden[0]) if actor else None, critic_head(hidden[-1]).squeeze(-1) if critic else None


def logprob_of(logits, action):
    return jnp.take_along_axis(nn.log_softmax(logits), action[:, None], axis=1).squeeze(1)


def gae_at_once(rewards, values, next_value, dones, final_values, gamma, gae_lambda):
    """Generalised advantages (Schulman et al. 2016, eq. 16) of (num_steps, num_envs) arrays.

    What follows the end of an episode is worth `final_values`: V(final observation) if it was truncated, else zero.
    The recursion A[t] = delta[t] + decay[t] A[t + 1] joins neighbours in log2(num_steps) rounds, not step by step.
    """
    next_values = jnp.where(dones, final_values, jnp.concatenate((values[1:], next_value[None])))
    deltas, decays = rewards + gamma * next_values - values, gamma * gae_lambda * (1 - dones)

    def join(later, earlier):
        return earlier[0] + earlier[1] * later[0], earlier[1] * later[1]

    return jax.lax.associative_scan(join, (deltas, decays), reverse=True)[0]


def shuffle(key, num_rows, times):
    """`times` random orders of the numbers below `num_rows`: random bits are sorted, with it in the lowest ones."""
    low = (1 << (num_rows - 1).bit_length()) - 1
    bits = jax.random.bits(key, (times, num_rows), jnp.uint32) & ~jnp.uint32(low)
    return (jnp.sort(bits | jnp.arange(num_rows, dtype=jnp.uint32), axis=1) & low).astype(jnp.int32)


def minibatch_loss(newlogprob, entropy, newvalue, mb, args):
    """The loss of a minibatch, and all that is logged of it."""
    mb_advantages = mb["advantages"]
    if args.norm_adv:
        mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std(ddof=1) + 1e-8)

    logratio = newlogprob - mb["logprobs"]
    ratio = jnp.exp(logratio)
    clipped_ratio = ratio.clip(1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = -jnp.minimum(mb_advantages * ratio, mb_advantages * clipped_ratio).mean()  # eq. 7
    v_error = (newvalue - mb["returns"]) ** 2
    if args.clip_vloss:
        clipped_value = mb["values"] + (newvalue - mb["values"]).clip(-args.clip_coef, args.clip_coef)
        v_error = jnp.maximum(v_error, (clipped_value - mb["returns"]) ** 2)
    v_loss = 0.5 * v_error.mean()
    entropy_loss = entropy.mean()
    loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss  # eq. 9
    approx_kl = ((ratio - 1) - logratio).mean()  # estimator k3 of http://joschu.net/blog/kl-approx.html
    logged = [v_loss, pg_loss, entropy_loss, -logratio.mean(), approx_kl, (ratio != clipped_ratio).mean()]
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


def load_policy(run_dir, envs, device, deterministic=False, index=0):
    """The saved agent of a run's first seed, or another, as a function from a batch of observations to actions."""
    agent = Agent(envs.single_action_space.n)
    params = unflatten_dict(load_file(Path(run_dir, "model.safetensors")), sep=".")
    params = jax.device_put(jax.tree.map(lambda param: param[index], params), device)
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
    if num_iterations == 0 or args.num_seeds < 1:
        fail(f"--total-timesteps must be at least one rollout of {batch_size} steps, --num-seeds at least 1")
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
        fail(f"{args.env_id} needs vector observations; ppo_atari.py handles the images of Atari games")
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
    agent = Agent(envs.single_action_space.n)
    obs_shape = envs.single_observation_space.shape
    optimizer = optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optax.scale_by_adam(eps=1e-5))

    # Storage: all that training changes, each array with the seeds as its first axis
    def init(key):
        init_key, reset_key = jax.random.split(key)
        params = agent.init(init_key, jnp.zeros((1, *obs_shape)))
        obs, states = envs.reset_all(jax.random.split(reset_key, args.num_envs), env_params)
        games = {"obs": obs, "states": states, "returns": jnp.zeros(args.num_envs), "lengths": jnp.zeros(args.num_envs)}
        learner = {"params": params, "opt_state": optimizer.init(params), "games": games}
        return jax.tree.map(lambda x: jnp.asarray(x, x.dtype), learner)  # no weak types, which would change

    learner = jax.jit(jax.vmap(init))(init_keys)
    loss_names = ["value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac"]
    names = [f"losses/{name}" for name in [*loss_names, "explained_variance"]]
    names += ["charts/episodic_return", "charts/episodic_length", "charts/episodes"]
    after_obs = ["actions", "logprobs", "values", "advantages", "returns"]  # the other columns of a batch
    max_chunk = 64  # iterations between two looks of the host
    curves, curve_steps = [np.zeros((0, args.num_seeds, len(names)), np.float32)], []
    recent_returns = []

    def play(params, games, row):
        """One step of all environments of one seed, and the row of the rollout that it makes."""
        noise, keys, (fresh_obs, fresh_states) = row
        logits, _ = agent.apply(params, games["obs"], critic=False)
        action = (logits + noise).argmax(-1)  # Gumbel-max draw from the softmax
        step = step_envs(env, env_params, keys, games["states"], action, fresh_obs, fresh_states)
        obs, states, reward, terminated, truncated, final_obs = step
        done, returns, lengths = terminated | truncated, games["returns"] + reward, games["lengths"] + 1
        row = {"obs": games["obs"], "actions": action, "rewards": reward, "terminated": terminated, "dones": done}
        row |= {"logits": logits, "final_obs": final_obs, "episode_returns": returns, "episode_lengths": lengths}
        return {"obs": obs, "states": states, "returns": returns * ~done, "lengths": lengths * ~done}, row

    def update(lr, carry, row):
        """One gradient step of one seed, unless its epochs have been ended by the KL divergence."""
        (learner, running), (columns, ends_epoch) = carry, row
        mb_obs, mb = columns[:, : -len(after_obs)], dict(zip(after_obs, columns[:, -len(after_obs) :].T))

        def loss_of(params):
            logits, newvalue = agent.apply(params, mb_obs)
            entropy = -(nn.softmax(logits) * nn.log_softmax(logits)).sum(-1)
            return minibatch_loss(logprob_of(logits, mb["actions"].astype(int)), entropy, newvalue, mb, args)

        gradients, losses = jax.grad(loss_of, has_aux=True)(learner["params"])
        directions, opt_state = optimizer.update(gradients, learner["opt_state"])
        params = jax.tree.map(lambda param, direction: param - lr * direction, learner["params"], directions)
        changed = {"params": params, "opt_state": opt_state}
        if args.target_kl is None:
            return (changed, running), losses
        learner = jax.tree.map(lambda new, old: jnp.where(running, new, old), changed, learner)
        stop = ends_epoch & (losses[loss_names.index("approx_kl")] > args.target_kl)
        return (learner, running & ~stop), jnp.where(running, losses, jnp.nan)

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
    def iterate(learner, key, iteration):
        """One iteration of one seed; all its random numbers are drawn first, in few large operations."""
        # Act
        params, size = learner["params"], (args.num_steps, args.num_envs)
        act_key, step_key, reset_key, shuffle_key = jax.random.split(jax.random.fold_in(key, iteration), 4)
        noise = jax.random.gumbel(act_key, (*size, agent.num_actions))
        step_keys, reset_keys = jax.random.split(step_key, size), jax.random.split(reset_key, size)
        fresh = jax.vmap(envs.reset_all, (0, None))(reset_keys, env_params)
        games, rollout = jax.lax.scan(partial(play, params), learner["games"], (noise, step_keys, fresh), unroll=4)

        # Targets: the weights have not changed during the rollout, so one batch serves all its steps
        both = jnp.concatenate((rollout["obs"], rollout["final_obs"], games["obs"][None])).reshape(-1, *obs_shape)
        _, value = agent.apply(params, both, actor=False)
        values, final_values = value[: 2 * batch_size].reshape(2, *size)
        final_values = jnp.where(rollout["terminated"], 0, final_values)
        inputs = rollout["rewards"], values, value[2 * batch_size :], rollout["dones"], final_values
        advantages = gae_at_once(*inputs, args.gamma, args.gae_lambda)
        actions, logits = rollout["actions"].reshape(-1), rollout["logits"].reshape(batch_size, -1)
        batch = {"obs": both[:batch_size], "actions": actions, "logprobs": logprob_of(logits, actions)}
        batch |= {"values": values, "advantages": advantages, "returns": advantages + values}
        explained_variance = 1 - advantages.var() / batch["returns"].var()

        # Learn
        columns = jnp.concatenate([x.astype(jnp.float32).reshape(batch_size, -1) for x in batch.values()], axis=1)
        inds = shuffle(shuffle_key, batch_size, args.update_epochs)
        minibatches = columns[inds].reshape(args.update_epochs * args.num_minibatches, minibatch_size, -1)
        ends_epoch = (jnp.arange(len(minibatches)) + 1) % args.num_minibatches == 0
        lr = (1 - iteration / num_iterations if args.anneal_lr else 1) * args.learning_rate
        learner = {"params": learner["params"], "opt_state": learner["opt_state"]}
        (learner, _), losses = jax.lax.scan(partial(update, lr), (learner, True), (minibatches, ends_epoch))
        losses = losses.mean(0) if args.target_kl is None else jnp.nanmean(losses, 0)
        finite = jnp.isfinite(sum(param.sum() for param in jax.tree.leaves(learner["params"])))
        dones = rollout["dones"]
        means = [jnp.where(dones, rollout[f"episode_{name}"], 0).sum() / dones.sum() for name in ("returns", "lengths")]
        logged = [*jnp.where(finite, losses, jnp.nan), explained_variance, *means, dones.sum()]
        return learner | {"games": games}, jnp.stack(logged)

    def train(learner, keys, first, count):
        """`count` iterations of all seeds, at most `max_chunk`, and what is logged of them."""

        def body(i, carry):
            learner, logged = carry
            learner, row = jax.vmap(iterate, (0, 0, None))(learner, keys, first + i)
            return learner, logged.at[i].set(row)

        return jax.lax.fori_loop(0, count, body, (learner, jnp.zeros((max_chunk, args.num_seeds, len(names)))))

    start_time, start_step, chunk, next_film = time.perf_counter(), global_step, 1, global_step
    train = jax.jit(train, donate_argnums=0).lower(learner, keys, 0, 0).compile()
    compile_time = time.perf_counter() - start_time
    print(f"Compiled in {compile_time:.1f} s")
    if global_step == 0:
        writer.add_scalar("charts/compile_time", compile_time, 0)
    start_time += compile_time
    last_step = num_iterations * batch_size
    while global_step < last_step:
        chunk_start, iteration = time.perf_counter(), global_step // batch_size
        until_checkpoint = -(-(args.checkpoint_freq - global_step % args.checkpoint_freq) // batch_size)
        until_film = num_iterations // 10 + 1 if args.capture_video else max_chunk
        count = min(chunk, until_checkpoint, until_film, num_iterations - iteration)
        learner, logged = train(learner, keys, iteration, count)
        logged = np.asarray(logged)[:count]  # (iterations, seeds, names)
        now = time.perf_counter()
        chunk = int(np.clip(count / (now - chunk_start), 1, max_chunk))  # of about a second

        # Log
        bad = ~np.isfinite(logged[:, :, : len(loss_names)]).all(2)
        if bad.any():
            at = global_step + batch_size * (bad.any(1).argmax() + 1)
            which = f"Losses are not finite at step {at} with seed {seeds[bad.any(0)].tolist()}"
            sys.exit(f"\n{which}. Last good checkpoint: {run_dir}")
        curves.append(logged)
        sps = args.num_seeds * (global_step + count * batch_size - start_step) / (now - start_time)
        for row in logged:
            lr = (1 - global_step / batch_size / num_iterations if args.anneal_lr else 1) * args.learning_rate
            global_step += batch_size
            curve_steps.append(global_step)
            ended = row[:, -1] > 0  # seeds with episodes that ended
            means = dict(zip(names[:-3], row[:, :-3].mean(0))) | {"charts/learning_rate": lr, "charts/SPS": int(sps)}
            if ended.any():
                recent_returns = [row[ended, -3].mean()]
                means |= dict(zip(names[-3:], [*row[ended, -3:-1].mean(0), row[:, -1].sum()]))
            writer.add(Summary(value=[Summary.Value(tag=tag, simple_value=x) for tag, x in means.items()]), global_step)
        total = args.num_seeds * args.total_timesteps
        report(args.num_seeds * global_step, total, sps, recent_returns)

        # Checkpoint
        if args.capture_video and global_step >= next_film:
            policy = softmax_policy(jax.jit(agent.apply), jax.tree.map(lambda param: param[0], learner["params"]))
            film_episode(policy, args.env_id, args.seed, run_dir / f"videos/step-{global_step}")
            next_film = global_step + args.total_timesteps // 10
        if stop_signals or global_step % args.checkpoint_freq < batch_size or global_step == last_step:
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
            logits, _ = jax.vmap(partial(agent.apply, critic=False))(params, obs.reshape(args.num_seeds, 10, -1))
            return logits.reshape(len(obs), -1), None

        policy = softmax_policy(forward, learner["params"])
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
