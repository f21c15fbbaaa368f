# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "flax>=0.11", "gymnasium[classic-control]>=1.2", "gymnax>=1.0.1", "jax>=0.7", "numpy>=2", "optax>=0.2.5",
#     "safetensors>=0.5", "tensorboard>=2.19", "tyro>=0.9",
# ]
# ///
"""Proximal Policy Optimization (PPO, Schulman et al. 2017, arXiv:1707.06347): vector observations, discrete actions.

Differs from ppo.py:
1. JAX, Flax and Optax; the environments are those of gymnax: training never leaves the accelerator;
2. `--num-seeds` runs with the seeds `--seed`, `--seed` + 1, ... train side by side, each as it would
   alone; a step is a step of each, TensorBoard shows their mean, curves.npz the curve of each;
3. an iteration is logged with the mean return and length of the episodes that ended in it, and their number;
4. a resumed run goes on with the episodes that were under way;
5. few large operations: an iteration's random numbers are drawn at once, the hidden layers of both
   networks lie in common arrays, and advantages take log2(--num-steps) rounds in place of a loop.

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
    env_id: str = "CartPole-v1"  # environment
    num_seeds: int = 1  # runs side by side, each of all steps, with seeds --seed, --seed + 1, ...
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
    resume: str = ""  # continue the run in this folder, or the newest in runs: latest
    checkpoint_freq: int = 100_000  # environment steps between checkpoints


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
        raise gym.error.Error(f"gymnax has no {env_id}, but {', '.join(near) or 'CartPole-v1'}")
    return gymnax.make(name)


def step_envs(env, env_params, keys, states, actions, fresh_obs, fresh_states):
    """One step in each environment; an episode that it ends is followed by one from the fresh state."""
    step = jax.vmap(env.step_env, (0, 0, 0, None))(keys, states, actions, env_params)
    final_obs, states, reward, terminated, _ = step
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
        self.metadata = {"render_modes": ["rgb_array"] * (env_id in gym.registry)}  # by film_episode

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


def make_envs(env_id, num_envs):
    envs = GymnaxEnvs(env_id, num_envs)
    if not hasattr(envs.single_action_space, "n"):
        raise gym.error.Error(f"{env_id} has no discrete actions: ppo_continuous_action.py")
    if len(getattr(envs.single_observation_space, "shape", ())) != 1:
        raise gym.error.Error(f"{env_id} has no vectors as observations: ppo_atari.py for Atari games")
    return envs


def begin_games(envs, key):
    """The first states of the games, and the return and length of each so far."""
    obs, states = envs.reset_all(jax.random.split(key, envs.num_envs), envs.env_params)
    zeros = jnp.zeros(envs.num_envs)
    return {"obs": obs, "states": states, "returns": zeros, "lengths": zeros}


def play(agent, envs, params, games, row):
    """One step of all environments of one seed, and the row of the rollout that it makes."""
    noise, keys, fresh = row
    logits, _ = agent.apply(params, games["obs"], critic=False)
    action = (logits + noise).argmax(-1)  # Gumbel-max draw from the softmax
    step = step_envs(envs.env, envs.env_params, keys, games["states"], action, *fresh)
    obs, states, reward, terminated, truncated, final_obs = step
    done = terminated | truncated
    row = {"obs": games["obs"], "actions": action, "logits": logits, "rewards": reward}
    row |= {"terminated": terminated, "dones": done, "final_obs": final_obs}
    row |= {"returns": games["returns"] + reward, "lengths": games["lengths"] + 1}
    counts = {name: row[name] * ~done for name in ("returns", "lengths")}
    return {"obs": obs, "states": states} | counts, row


def orthogonal_pair(key, shape, dtype=jnp.float32):
    """Two orthogonal matrices of one shape, one for the actor and one for the critic."""
    return jax.vmap(lambda key: nn.initializers.orthogonal(2**0.5)(key, shape[1:], dtype))(jax.random.split(key))


class Agent(nn.Module):
    """The hidden layers of actor and critic lie side by side in one array each: half as many calls on the device."""

    num_actions: int

    @nn.compact
    def __call__(self, obs, actor=True, critic=True):
        """Logits and values; None in place of those that are not asked for."""
        used = slice(1 - actor, 1 + critic)  # actor 0, critic 1
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


def softmax_policy(forward, params, deterministic=False):
    """A function from observations to actions: Gumbel-max draws from the softmax of logits."""
    rng = np.random.default_rng(0)

    def policy(obs):
        logits = np.asarray(forward(params, obs)[0])
        return (logits if deterministic else logits + rng.gumbel(size=logits.shape)).argmax(1)

    return policy


def load_policy(run_dir, envs, device, deterministic=False, index=0):
    """The saved agent of one seed of a run, as a function from observations to actions."""
    agent = Agent(envs.single_action_space.n)
    params = unflatten_dict(load_file(Path(run_dir, "model.safetensors")), sep=".")
    params = jax.device_put(jax.tree.map(lambda param: param[index], params), device)
    return softmax_policy(jax.jit(agent.apply), params, deterministic)


def side_by_side(apply, num_seeds):
    """A network's function for the weights of all seeds; each has its share of the observations."""

    def forward(params, obs):
        outputs = jax.vmap(apply)(params, obs.reshape(num_seeds, -1, *obs.shape[1:]))
        return jax.tree.map(lambda x: x.reshape(len(obs), *x.shape[2:]), outputs)

    return jax.jit(forward)


def gae_at_once(rewards, values, next_value, dones, final_values, gamma, gae_lambda):
    """Generalised advantages (Schulman et al. 2016, eq. 16) of (num_steps, num_envs) arrays; what follows
    the end of an episode is worth `final_values`: V(final observation) if it was truncated, else zero.

    A[t] = delta[t] + decay[t] A[t + 1] joins neighbours in log2(num_steps) rounds, not step by step.
    """
    next_values = jnp.where(dones, final_values, jnp.concatenate((values[1:], next_value[None])))
    deltas, decays = rewards + gamma * next_values - values, gamma * gae_lambda * (1 - dones)

    def join(later, earlier):
        return earlier[0] + earlier[1] * later[0], earlier[1] * later[1]

    return jax.lax.associative_scan(join, (deltas, decays), reverse=True)[0]


def shuffle(key, num_rows, times):
    """`times` random orders of the numbers below `num_rows`: bits are sorted, with these in the lowest."""
    low = (1 << (num_rows - 1).bit_length()) - 1
    bits = jax.random.bits(key, (times, num_rows), jnp.uint32) & ~jnp.uint32(low)
    return (jnp.sort(bits | jnp.arange(num_rows, dtype=jnp.uint32), axis=1) & low).astype(jnp.int32)


def ppo_loss(newlogprob, entropy, newvalue, logprob, value, advantage, target, args):
    """The loss of a minibatch, and what is logged of it under losses/."""
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
    logratio = newlogprob - logprob
    ratio = jnp.exp(logratio)
    clipped_ratio = ratio.clip(1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = -jnp.minimum(advantage * ratio, advantage * clipped_ratio).mean()  # eq. 7
    v_error = (newvalue - target) ** 2
    if args.clip_vloss:
        clipped_value = value + (newvalue - value).clip(-args.clip_coef, args.clip_coef)
        v_error = jnp.maximum(v_error, (clipped_value - target) ** 2)
    v_loss = 0.5 * v_error.mean()
    entropy_loss = entropy.mean()
    loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss  # eq. 9
    old_approx_kl = -logratio.mean()
    approx_kl = ((ratio - 1) - logratio).mean()  # estimator k3 of http://joschu.net/blog/kl-approx.html
    clipfrac = (ratio != clipped_ratio).mean()
    return loss, jnp.stack([v_loss, pg_loss, entropy_loss, old_approx_kl, approx_kl, clipfrac])


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


def film_episode(policy, env_id, seed, path):
    """An episode of the policy in Gymnasium's environment of that name: gymnax's cannot be rendered."""
    env = gym.make(env_id, render_mode="rgb_array")
    env = gym.wrappers.RecordVideo(env, str(path.parent), name_prefix=path.name)
    obs, done = env.reset(seed=seed)[0], False
    while not done:
        obs, _, terminated, truncated, _ = env.step(policy(obs[None])[0])
        done = terminated or truncated
    env.close()


class SeedsRun(Run):
    """A run of several seeds side by side.

    A row of its log has a value for each seed and each of `names`: losses, the first of them infinite
    if weights are not finite, then mean return, mean length and number of the episodes that ended.
    """

    max_rows = 64  # between two looks of the host

    def __init__(self, args, total_steps, names):
        if args.resume:
            seed = json.loads(Path(args.resume, "args.json").read_text())["seed"]
            if seed != args.seed:  # all random numbers depend on it
                fail(f"--resume continues the run as it began, with --seed {seed}")
        super().__init__(args, args.num_seeds * total_steps)
        self.seeds = np.arange(args.seed, args.seed + args.num_seeds)
        self.names, self.last_step, self.rows_per_second = names, total_steps, 1
        self.curves, self.curve_steps = np.zeros((0, args.num_seeds, len(names)), np.float32), []
        if self.saved:
            with np.load(self.dir / "curves.npz") as saved:  # may be newer than the checkpoint
                steps = saved["steps"].tolist()
                curves = np.stack([saved[name] for name in names], axis=2)
            self.curve_steps = [step for step in steps if step <= self.saved["global_step"]]
            self.curves = curves[: len(self.curve_steps)]

    def save(self, state):
        curves = dict(zip(self.names, np.moveaxis(self.curves, 2, 0)))
        with (self.dir / "unfinished.tmp").open("wb") as file:
            np.savez(file, seeds=self.seeds, steps=self.curve_steps, **curves)
        os.replace(self.dir / "unfinished.tmp", self.dir / "curves.npz")
        super().save(state)

    def begin_training(self, compile_time):
        self.say(f"Compiled in {compile_time:.1f} s")
        if self.step == 0:
            self.writer.add_scalar("charts/compile_time", compile_time, 0)
        self.start_time = time.perf_counter()
        self.marks = deque([(self.start_time, len(self.seeds) * self.step)])

    def next_rows(self, global_step, row_size):
        """How many rows take about a second, and end where a checkpoint or a film is due."""
        until_checkpoint = self.args.checkpoint_freq - global_step % self.args.checkpoint_freq
        until = [until_checkpoint, self.last_step - global_step]
        count = min(self.rows_per_second, self.max_rows, *(-(-steps // row_size) for steps in until))
        if self.args.capture_video:
            count = min(count, -(-self.last_step // row_size) // 10 + 1)
        self.began = time.perf_counter()
        return count

    def log_rows(self, rows, steps, others):
        """Log the means over the seeds of rows (len(steps), num_seeds, names), and other metrics."""
        now = time.perf_counter()
        self.rows_per_second = max(1, int(len(rows) / (now - self.began)))
        bad = np.isinf(rows[:, :, 0])
        if bad.any():
            at, which = steps[bad.any(1).argmax()], self.seeds[bad.any(0)].tolist()
            at = f"at step {at} with seed {which}"
            sys.exit(f"\nLosses are not finite {at}. Last good checkpoint: {self.dir}")
        self.curves = np.concatenate((self.curves, rows))
        self.curve_steps += steps
        sps = len(self.seeds) * (steps[-1] - self.start_step) / (now - self.start_time)
        for row, step, *other in zip(rows, steps, *others.values()):
            means = dict(zip(others, other)) | {"charts/SPS": int(sps)}
            if not np.isnan(row[0, 0]):  # else there was no update
                means |= dict(zip(self.names[:-3], row[:, :-3].mean(0)))
            ended = row[row[:, -1] > 0]  # seeds with episodes that ended
            if len(ended):
                self.recent_returns.append(ended[:, -3].mean())
                episodes = [*ended[:, -3:-1].mean(0), row[:, -1].sum()]
                means |= dict(zip(self.names[-3:], episodes))
            values = [Summary.Value(tag=tag, simple_value=x) for tag, x in means.items()]
            self.writer.add(Summary(value=values), step)
        self.show(len(self.seeds) * steps[-1])


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
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave the rest to other runs
    try_envs(args, args.env_id, 1)
    loss_names = ["value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac"]
    names = [f"losses/{name}" for name in [*loss_names, "explained_variance"]]
    names += ["charts/episodic_return", "charts/episodic_length", "charts/episodes"]
    run = SeedsRun(args, num_iterations * batch_size, names)

    # Seeding
    device = jax.devices()[0]
    seeds = jax.vmap(jax.random.key)(run.seeds.astype(np.uint32))
    keys, init_keys = jax.vmap(jax.random.split)(seeds).T

    # Environments, agent and optimizer
    envs = make_envs(args.env_id, args.num_envs)
    obs_dim = envs.single_observation_space.shape[0]
    agent = Agent(envs.single_action_space.n)
    clip = optax.clip_by_global_norm(args.max_grad_norm)
    optimizer = optax.chain(clip, optax.scale_by_adam(eps=1e-5))

    # Storage: all that training changes, each array with the seeds as its first axis
    def init(key):
        init_key, reset_key = jax.random.split(key)
        params = agent.init(init_key, jnp.zeros((1, obs_dim)))
        learner = {"params": params, "opt_state": optimizer.init(params)}
        learner["games"] = begin_games(envs, reset_key)
        return jax.tree.map(lambda x: jnp.asarray(x, x.dtype), learner)  # without weak types

    learner = jax.jit(jax.vmap(init))(init_keys)

    def update(lr, carry, row):
        """One gradient step of one seed, unless its epochs have been ended by the KL divergence."""
        (learner, running), (columns, ends_epoch) = carry, row
        obs, *others = jnp.split(columns, obs_dim + np.arange(5), axis=1)
        action, logprob, value, advantage, target = (x.squeeze(1) for x in others)

        def loss(params):
            logits, newvalue = agent.apply(params, obs)
            entropy = -(nn.softmax(logits) * nn.log_softmax(logits)).sum(-1)
            new = logprob_of(logits, action.astype(int)), entropy, newvalue
            return ppo_loss(*new, logprob, value, advantage, target, args)

        gradients, logged = jax.grad(loss, has_aux=True)(learner["params"])
        directions, opt_state = optimizer.update(gradients, learner["opt_state"])
        params = jax.tree.map(lambda x, change: x - lr * change, learner["params"], directions)
        changed = {"params": params, "opt_state": opt_state}
        if args.target_kl is None:
            return (changed, running), logged
        learner = jax.tree.map(lambda new, old: jnp.where(running, new, old), changed, learner)
        stop = ends_epoch & (logged[loss_names.index("approx_kl")] > args.target_kl)
        return (learner, running & ~stop), jnp.where(running, logged, jnp.nan)

    # Training loop
    def iterate(learner, key, iteration):
        """One iteration of one seed; all its random numbers are drawn first, in few large operations."""
        # Act
        params, size = learner["params"], (args.num_steps, args.num_envs)
        iteration_key = jax.random.fold_in(key, iteration)
        act_key, step_key, reset_key, shuffle_key = jax.random.split(iteration_key, 4)
        noise = jax.random.gumbel(act_key, (*size, agent.num_actions))
        step_keys, reset_keys = jax.random.split(step_key, size), jax.random.split(reset_key, size)
        rows = noise, step_keys, jax.vmap(envs.reset_all, (0, None))(reset_keys, envs.env_params)
        step = partial(play, agent, envs, params)
        games, rollout = jax.lax.scan(step, learner["games"], rows, unroll=4)

        # Targets: the weights have not changed since, so one batch serves all steps
        dones, terminated = rollout["dones"], rollout["terminated"]
        b_obs = jnp.concatenate((rollout["obs"], rollout["final_obs"], games["obs"][None]))
        b_obs = b_obs.reshape(-1, obs_dim)
        _, b_values = agent.apply(params, b_obs, actor=False)
        values, final_values = b_values[: 2 * batch_size].reshape(2, *size)
        following = b_values[2 * batch_size :], dones, jnp.where(terminated, 0, final_values)
        advantages = gae_at_once(rollout["rewards"], values, *following, args.gamma, args.gae_lambda)
        b_actions, b_logits = rollout["actions"].reshape(-1), rollout["logits"].reshape(batch_size, -1)
        b_logprobs, returns = logprob_of(b_logits, b_actions), advantages + values
        explained_variance = 1 - advantages.var() / returns.var()

        # Learn: minibatches of columns, which `update` takes apart
        batch = b_obs[:batch_size], b_actions, b_logprobs, values, advantages, returns
        batch = [x.astype(jnp.float32).reshape(batch_size, -1) for x in batch]
        inds = shuffle(shuffle_key, batch_size, args.update_epochs)
        minibatches = jnp.concatenate(batch, axis=1)[inds]
        minibatches = minibatches.reshape(-1, minibatch_size, minibatches.shape[-1])
        ends_epoch = (jnp.arange(len(minibatches)) + 1) % args.num_minibatches == 0
        lr = (1 - iteration / num_iterations if args.anneal_lr else 1) * args.learning_rate
        carry = {"params": params, "opt_state": learner["opt_state"]}, True
        (learner, _), losses = jax.lax.scan(partial(update, lr), carry, (minibatches, ends_epoch))
        losses = losses.mean(0) if args.target_kl is None else jnp.nanmean(losses, 0)
        finite = jnp.isfinite(sum(x.sum() for x in jax.tree.leaves(learner["params"])))
        ended = [jnp.where(dones, rollout[name], 0).sum() / dones.sum() for name in ("returns", "lengths")]
        logged = *jnp.where(finite, losses, jnp.inf), explained_variance, *ended, dones.sum()
        return learner | {"games": games}, jnp.stack(logged)

    def train(learner, keys, first, count):
        """`count` iterations of all seeds, at most `run.max_rows`, and the rows of the log."""

        def body(i, carry):
            learner, rows = carry
            learner, row = jax.vmap(iterate, (0, 0, None))(learner, keys, first + i)
            return learner, rows.at[i].set(row)

        rows = jnp.zeros((run.max_rows, args.num_seeds, len(names)))
        return jax.lax.fori_loop(0, count, body, (learner, rows))

    global_step = run.saved.get("global_step", 0)
    if args.resume:
        learner = refill(learner, run.saved["learner"])
    run.begin(lambda: {"learner": learner})
    start = time.perf_counter()
    train = jax.jit(train, donate_argnums=0).lower(learner, keys, 0, 0).compile()
    run.begin_training(time.perf_counter() - start)
    next_film = global_step
    while global_step < num_iterations * batch_size:
        iteration, count = global_step // batch_size, run.next_rows(global_step, batch_size)
        learner, rows = train(learner, keys, iteration, count)

        # Log
        iterations = range(iteration, iteration + count)
        left = [1 - i / num_iterations if args.anneal_lr else 1 for i in iterations]
        lrs = {"charts/learning_rate": [share * args.learning_rate for share in left]}
        steps = [batch_size * (i + 1) for i in iterations]
        run.log_rows(np.asarray(rows)[:count], steps, lrs)
        global_step = steps[-1]
        if args.capture_video and global_step >= next_film:
            params = jax.tree.map(lambda x: x[0], learner["params"])
            path = run.dir / f"videos/step-{global_step}"
            film_episode(softmax_policy(jax.jit(agent.apply), params), args.env_id, args.seed, path)
            next_film = global_step + args.total_timesteps // 10

        # Checkpoint
        run.checkpoint(global_step, last=global_step == num_iterations * batch_size)

    # Save and close
    envs.close()
    eval_returns = []
    if args.save_model:
        save_file(flatten_dict(learner["params"], sep="."), run.dir / "model.safetensors")
        eval_envs = make_envs(args.env_id, 10 * args.num_seeds)  # ten for each seed
        forward = side_by_side(partial(agent.apply, critic=False), args.num_seeds)
        policy = softmax_policy(forward, learner["params"])
        eval_returns = evaluate(policy, eval_envs, seed=args.seed + 2**30)
        eval_returns = eval_returns.reshape(args.num_seeds, 10)
        np.save(run.dir / "eval_returns.npy", eval_returns)
        run.say(f"Evaluation of each seed: {eval_returns.mean(1).round(2).tolist()}")
        eval_returns = eval_returns.mean(0)
    run.close(eval_returns)
