# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "ale-py>=0.12", "gymnasium>=1.2", "numpy>=2", "ray>=2.50", "safetensors>=0.5", "tensorboard>=2.19", "torch>=2.8",
#     "tyro>=0.9",
# ]
# ///
"""Ape-X DQN (Horgan et al. 2018, arXiv:1803.00933): many actors, one prioritised replay, one learner; Atari games.

Differs from dqn_atari.py:
1. this process learns; the games are played by Ray actors, on a Ray of its own or, with `--ray-address`, on a cluster.
   An actor sends batches of transitions with all their frames, each once, as bytes; the learner publishes its weights
   at intervals, and an actor takes the newest when it begins a batch;
2. each game has an exploration rate of its own, from `--base-epsilon` down to its power 1 + `--epsilon-exponent`;
3. replay is prioritised: actors send the first priorities, from the Q-values that they acted by, the learner new ones;
4. double Q-learning from returns of `--n-step` steps, which the actors sum up; they stop at an episode's end;
5. dueling network, centred RMSProp, clipped gradients;
6. batches come in whatever order: two runs with one seed are the same with one actor, and without `--free-running`.

An actor that dies, alone or with its node, is replaced; meanwhile the learner goes on with what the others send.
`global_step` counts the transitions that the learner has received.

Differs from the paper:
1. the learner makes a gradient step every `--train-frequency` environment steps, and whichever is faster waits;
   `--free-running` lets neither wait, as in the paper, where 650 steps came in per gradient step of 19 a second;
2. replay is in the learner's process, on the GPU if it fits; the oldest batches make room, one by one;
3. an actor plays several games at a time;
4. an episode cut off by a time limit is bootstrapped from its final observation;
5. the target network is updated by the count of environment steps, with `--free-running` too.

Run: python apex_atari.py --env-id BreakoutNoFrameskip-v4 --num-actors 8
"""

import gzip
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, fields
from datetime import timedelta
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from ale_py.vector_env import AtariVectorEnv
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.tensorboard import SummaryWriter

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # under `uv run`, actors need our packages too
import ray  # noqa: E402


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run's name
    seed: int = 1  # random seed
    torch_deterministic: bool = True  # make cuDNN use deterministic algorithms
    cuda: bool = True  # use the GPU if there is one
    cuda_graphs: bool = True  # on the GPU, capture act and update once and replay them
    track: bool = False  # mirror the run to Weights & Biases
    wandb_project_name: str = "cleanRL"  # W&B project
    wandb_entity: str | None = None  # W&B user or team
    capture_video: bool = False  # record episodes at several stages of training
    save_model: bool = False  # write model.safetensors at the end and evaluate it on held-out seeds
    upload_model: bool = False  # push the finished run folder to the Hugging Face hub (implies --save-model)
    hf_entity: str = ""  # hub user or organisation, if not the owner of the token
    resume: str = ""  # continue the run in this folder
    checkpoint_freq: int = 100_000  # environment steps between checkpoints
    ray_address: str = ""  # Ray cluster to run the actors on; none starts a Ray of its own on this machine

    env_id: str = "BreakoutNoFrameskip-v4"  # environment
    total_timesteps: int = 10_000_000  # environment steps in total
    learning_rate: float = 6.25e-5  # step size of the optimizer
    num_actors: int = 4  # processes that play, each with a CPU of the Ray cluster
    envs_per_actor: int = 8  # games that an actor plays in parallel
    steps_per_batch: int = 100  # steps of each game in a batch that an actor sends
    publish_frequency: int = 1000  # environment steps between publications of the weights to the actors
    buffer_size: int = 2_000_000  # transitions that the replay buffer holds
    buffer_device: Literal["auto", "cuda", "cpu"] = "auto"  # where the replay buffer is: the GPU if it fits, or named
    prioritized_replay_alpha: float = 0.6  # power of the priorities: 0 draws uniformly
    importance_exponent: float = 0.4  # power of the weights that correct for drawing by priority: 1 corrects in full
    n_step: int = 3  # steps of reward in a target, unless the episode ends before
    gamma: float = 0.99  # discount
    tau: float = 1.0  # step of the target network towards the online network (1 copies it)
    target_network_frequency: int = 160_000  # environment steps (continuous SAC: gradient steps) between target updates
    batch_size: int = 512  # transitions per gradient step
    base_epsilon: float = 0.4  # exploration rate of the first game
    epsilon_exponent: float = 7.0  # what the exponent of the exploration rate grows by up to the last game
    eval_epsilon: float = 0.001  # exploration rate of evaluation and videos
    max_grad_norm: float = 40.0  # ceiling of the global gradient norm
    learning_starts: int = 50_000  # environment steps before the first gradient step
    train_frequency: int = 64  # environment steps between gradient steps
    free_running: bool = False  # neither the learner nor the actors wait for each other


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
        raise gym.error.Error(f"{env_id} is not an Atari game; dqn.py handles vector observations")
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
    def __init__(self, envs):
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(4, 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.value = nn.Sequential(nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, 1))
        self.advantage = nn.Sequential(
            nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, envs.single_action_space.n)
        )

    def forward(self, obs):
        hidden = self.network(obs / 255)
        advantage = self.advantage(hidden)
        return self.value(hidden) + advantage - advantage.mean(1, keepdim=True)


class Ring:
    """The last items that were added, on a device: item number n is in slot n % size."""

    def __init__(self, size, shape, dtype, device):
        self.slots = torch.zeros((size, *shape), dtype=dtype, device=device)
        self.end, self.new = 0, []  # the number of the next item, and the items that are still on the host

    def __getitem__(self, numbers):
        return self.slots[numbers % len(self.slots)]

    def add(self, items):
        self.new.append(items.copy())
        self.end += len(items)
        return np.arange(self.end - len(items), self.end)

    def flush(self):
        if self.new:
            items = torch.from_numpy(np.concatenate(self.new) if len(self.new) > 1 else self.new[0])
            slots = torch.arange(self.end - len(items), self.end) % len(self.slots)
            for block, places in zip(items.split(10_000), slots.split(10_000)):  # a resumed run brings many
                self.slots[places.to(self.slots.device)] = block.to(self.slots.device)
            self.new = []


class FrameReplay:
    """The last transitions, over frames that are stored once, however many observations they are part of.

    A transition is a row of integers: the numbers of the frames of its observation and of the frame that followed, then
    action, reward and whatever else it has. Additions wait on the host for `flush`: one copy then serves many steps.
    """

    def __init__(self, size, num_envs, obs_shape, columns, device):
        self.size, self.num_envs, self.stack_num = size // num_envs * num_envs, num_envs, obs_shape[0]
        self.frames = Ring(self.size, obs_shape[1:], torch.uint8, device)
        self.rows = Ring(self.size, [self.stack_num + 1 + columns], torch.long, device)
        self.first_frames, self.saved = deque(), (0, 0)  # the oldest frame of each step that can be sampled
        self.window = torch.zeros(2, dtype=torch.long, device=device)  # first row and count, for a graph to read

    def add(self, rows):
        self.rows.add(rows)
        self.first_frames.append(rows[:, 0].min())

    def flush(self):
        self.frames.flush()
        self.rows.flush()
        while self.first_frames and self.first_frames[0] < self.frames.end - self.size:  # a newer one took its slot
            self.first_frames.popleft()
        count = len(self.first_frames) * self.num_envs
        self.window.copy_(torch.tensor([self.rows.end - count, count]))

    def sample(self, batch_size):
        """Rows, and the frames (batch_size, stack_num + 1, height, width) of their two observations."""
        first, count = self.window
        rows = self.rows[first + torch.randint(2**62, (batch_size,), device=self.window.device) % count]
        return rows, self.frames[rows[:, : self.stack_num + 1]]

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
                blocks = torch.arange(max(start, end - self.size), end).split(10_000)  # not all at once on the device
                np.save(file, torch.cat([ring[block].cpu() for block in blocks]).numpy())
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


def find(values, rest):
    """Where the running sum of each row of values exceeds `rest`, and what is left of `rest` there.

    Sums are rounded, and not all in the same way; whatever they are, a value of zero is not found.
    """
    sums = values.cumsum(1)
    largest = torch.where(values > 0, sums, 0).amax(1, keepdim=True)
    found = (values > 0) & ((sums > rest[:, None]) | (sums >= largest))
    places = found.to(torch.uint8).argmax(1, keepdim=True)  # the first of them
    return places.squeeze(1), rest - (sums - values).gather(1, places).squeeze(1)


class SumTree:
    """Values from which to draw in proportion to them: leaves in blocks, and the sum of each block.

    Two levels with many branches take a fraction of the operations of twenty levels with two.
    """

    def __init__(self, size, device, width=1024):
        self.leaves = torch.zeros((-(-size // width), width), dtype=torch.float64, device=device)
        self.sums = torch.zeros(len(self.leaves), dtype=torch.float64, device=device)

    def __getitem__(self, indices):
        return self.leaves.view(-1)[indices]

    def set(self, indices, values):
        """Of several values for one leaf the largest counts, on any device and in any order."""
        self.leaves.view(-1).scatter_reduce_(0, indices, values, "amax", include_self=False)
        blocks = indices // self.leaves.shape[1] if len(indices) < len(self.leaves) else slice(None)
        self.sums[blocks] = self.leaves[blocks].sum(1)

    def sample(self, batch_size):
        """Indices, one from each of `batch_size` equal parts of the total."""
        places = torch.rand(batch_size, dtype=torch.float64, device=self.sums.device)
        places += torch.arange(batch_size, device=self.sums.device)
        blocks, rest = find(self.sums.expand(batch_size, -1), places / batch_size * self.sums.sum())
        return blocks * self.leaves.shape[1] + find(self.leaves[blocks], rest)[0]


class BatchReplay(FrameReplay):
    """Replay of batches of rows that come with their frames, and with priorities in proportion to which they are drawn.

    A row has the numbers of the frames of two observations, then action, return and discount, the last two as the bits
    of a double. The priority of a row is the leaf of its slot; it is zero unless all its frames are there.
    """

    def __init__(self, size, batch_rows, obs_shape, device):
        stack_num, *frame_shape = obs_shape
        super().__init__(size, batch_rows, (2 * stack_num - 1, *frame_shape), 3, device)
        self.tree, self.oldest, self.new_priorities = SumTree(self.size, device), 0, []

    def add(self, frames, rows, priorities):
        first = self.frames.add(frames)[0]
        super().add(np.column_stack((rows[:, :-3] + first, rows[:, -3:])))
        self.new_priorities.append(priorities)

    def flush(self):
        super().flush()
        new = np.concatenate([np.zeros(0), *self.new_priorities])
        first, self.oldest = self.oldest, self.rows.end - len(self.first_frames) * self.num_envs
        gone = np.arange(max(first, self.oldest - self.size), self.oldest)
        slots = np.concatenate((gone, np.arange(self.rows.end - len(new), self.rows.end))) % self.size
        priorities = np.concatenate((np.zeros(len(gone)), new))
        self.tree.set(*(torch.from_numpy(array).to(self.window.device) for array in (slots, priorities)))
        self.new_priorities = []

    def sample(self, batch_size, beta):
        """Slots; weight, action, return and discount of each; frames of its two observations."""
        slots = self.tree.sample(batch_size)
        priorities, rows = self.tree[slots], self.rows[slots]
        weights = (priorities / priorities.min()) ** -beta
        columns = torch.column_stack((weights, rows[:, -3], rows[:, -2:].view(torch.float64)))
        return slots, columns, self.frames[rows[:, :-3]]

    def save(self, folder):
        return *super().save(folder), self.tree.leaves.cpu()

    def load(self, folder, saved):
        *ends, leaves = saved
        super().load(folder, tuple(ends))
        leaves = leaves.view(-1).to(self.window.device)
        self.tree.set(torch.arange(len(leaves), device=leaves.device), leaves)


def n_step_returns(rewards, terminated, truncated, gamma, n_step):
    """Of each step but the last n: the return of the n steps from it on, its discount, and the last step in it.

    A return ends with its episode; `discount` is then that of the steps it has, and 0 if the episode has terminated.
    """
    steps = len(rewards) - n_step
    returns, discounts = np.zeros((2, steps, *rewards.shape[1:]))
    last, running = np.zeros(returns.shape, dtype=int), np.ones(returns.shape, dtype=bool)
    for k in range(n_step):
        window = slice(k, k + steps)
        returns += running * gamma**k * rewards[window]
        discounts = np.where(running, gamma ** (k + 1) * (1 - terminated[window]), discounts)
        last += running & (k > 0)
        running &= ~(terminated[window] | truncated[window])
    return returns, discounts, last + np.arange(steps).reshape(-1, *[1] * (rewards.ndim - 1))


def double_q_target(returns, discounts, next_q_values, target_next_q_values):
    """The return and the discounted value, in the target network's eyes, of the action that the online one prefers."""
    best = next_q_values.argmax(1, keepdim=True)
    return returns + discounts * target_next_q_values.gather(1, best).squeeze(1)


def priority(td_errors, alpha):
    return (abs(td_errors) + 1e-6) ** alpha


def exploration_rates(base, exponent, count):
    """base, ..., base ** (1 + exponent): a rate for each game, in equal steps of the exponent."""
    return base ** (1 + exponent * np.arange(count) / max(count - 1, 1))


class RMSProp(torch.optim.Optimizer):
    """Centred RMSProp with epsilon under the root; torch's has it outside, and takes roots of rounded differences."""

    def __init__(self, params, lr, decay=0.95, eps=1.5e-7):
        super().__init__(params, {"lr": lr, "decay": decay, "eps": eps})
        for param in self.param_groups[0]["params"]:
            self.state[param] = {"mean": torch.zeros_like(param), "square": torch.zeros_like(param)}

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        for param in group["params"]:
            mean, square = self.state[param].values()
            mean.lerp_(param.grad, 1 - group["decay"])
            square.mul_(group["decay"]).addcmul_(param.grad, param.grad, value=1 - group["decay"])
            variance = square.addcmul(mean, mean, value=-1).clamp_(min=0)
            param.addcdiv_(param.grad, variance.add_(group["eps"]).sqrt_(), value=-group["lr"])


def flatten(module):
    """Make all parameters and gradients views of one vector: clipping and Adam then take one call, not one a layer."""
    params = list(module.parameters())
    vector = nn.Parameter(nn.utils.parameters_to_vector(params).detach())
    vector.grad = torch.zeros_like(vector)
    sizes = [param.numel() for param in params]
    for param, data, grad in zip(params, vector.detach().split(sizes), vector.grad.split(sizes)):
        param.data, param.grad = data.view_as(param), grad.view_as(param)
    return vector


def cuda_graph(function, warmup=3):
    """Replay `function` as a CUDA graph; its first calls run eagerly, so that the warm-up does real work too."""
    graph, calls = torch.cuda.CUDAGraph(), 0

    def call():
        nonlocal calls
        calls += 1
        if calls <= warmup:
            return function()
        if calls == warmup + 1:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                function()
        graph.replay()

    return call


def evaluate(policy, envs, seed):
    """The undiscounted return of one episode in each environment."""
    obs, _ = envs.reset(seed=seed)
    returns, running = np.zeros(envs.num_envs), np.ones(envs.num_envs, dtype=bool)
    while running.any():
        obs, reward, terminated, truncated, _ = envs.step(policy(obs))
        returns += running * reward
        running &= ~(terminated | truncated)
    return returns


def epsilon_greedy(q_network, num_actions, epsilon, device):
    """A function from a batch of observations to a batch of actions."""
    rng = np.random.default_rng(0)

    @torch.no_grad()
    def policy(obs):
        greedy = q_network(torch.tensor(obs, device=device)).argmax(1).cpu().numpy()
        return np.where(rng.random(len(obs)) < epsilon, rng.integers(num_actions, size=len(obs)), greedy)

    return policy


def load_policy(run_dir, envs, device, deterministic=False):
    """The saved network of a run, as a function from a batch of observations to a batch of actions."""
    q_network = QNetwork(envs).to(device)
    q_network.load_state_dict(load_file(Path(run_dir, "model.safetensors"), str(device)))
    epsilon = 0 if deterministic else json.loads(Path(run_dir, "args.json").read_text())["eval_epsilon"]
    return epsilon_greedy(q_network, envs.single_action_space.n, epsilon, device)


class Actor:
    """Plays games with the weights that it is given; each of its batches can be read without those before it."""

    def __init__(self, env_id, seed, epsilons, n_step, gamma, alpha):
        torch.set_num_threads(1)
        self.epsilons, self.n_step, self.gamma, self.alpha = epsilons, n_step, gamma, alpha
        self.rng, self.envs = np.random.default_rng(seed), make_envs(env_id, len(epsilons), num_threads=1)
        self.q_network = QNetwork(self.envs)
        self.weights = flatten(self.q_network).detach().numpy()
        self.obs, self.infos = self.envs.reset(seed=seed)
        self.frames, self.first_frame, self.steps = [], 0, []  # those that transitions yet to be sent need
        self.stacks = np.stack([self.add_frames(stack) for stack in self.obs])  # frames of each observation
        self.episode_returns, self.episode_lengths = np.zeros((2, len(epsilons)))

    def add_frames(self, frames):
        self.frames.extend(frames.copy())
        end = self.first_frame + len(self.frames)
        return np.arange(end - len(frames), end)

    @torch.no_grad()
    def step(self):
        """A step of each game: frames of its two observations, what happened, Q-values, and the episodes it ended."""
        q_values = self.q_network(torch.from_numpy(self.obs)).numpy()
        num_envs, num_actions = q_values.shape
        explore = self.rng.random(num_envs) < self.epsilons
        actions = np.where(explore, self.rng.integers(num_actions, size=num_envs), q_values.argmax(1))
        lives = self.infos["lives"]
        next_obs, reward, terminated, truncated, self.infos = self.envs.step(actions)
        self.episode_returns += reward
        self.episode_lengths += 1
        game_over, final_obs = truncated | terminated & (self.infos["lives"] >= lives), next_obs
        final_values, episodes = np.zeros(num_envs, dtype=np.float32), []
        if game_over.any():
            final_obs = next_obs.copy()
            final_obs[game_over] = np.stack(self.infos["final_obs"][game_over])
            final_values[game_over] = self.q_network(torch.from_numpy(final_obs[game_over])).amax(1).numpy()
            for i in np.flatnonzero(game_over):
                episodes.append((i, self.episode_returns[i], self.episode_lengths[i]))
                self.episode_returns[i] = self.episode_lengths[i] = 0
        stacks, next_stacks = self.stacks, np.column_stack((self.stacks[:, 1:], self.add_frames(final_obs[:, -1])))
        self.obs, self.stacks = next_obs, next_stacks.copy()
        for i in np.flatnonzero(game_over):
            self.stacks[i] = self.add_frames(next_obs[i])
        taken, best = q_values[np.arange(num_envs), actions], q_values.max(1)
        return stacks, next_stacks, actions, np.sign(reward), terminated, truncated, taken, best, final_values, episodes

    def collect(self, weights, num_steps):
        """Frames, the rows of the transitions of `num_steps` steps, their priorities, and the episodes that ended."""
        self.weights[:] = weights
        while len(self.steps) < num_steps + self.n_step:  # a step waits here until its return is known
            self.steps.append(self.step())
        *columns, episodes = zip(*self.steps)
        stacks, next_stacks, actions, reward, terminated, truncated, taken, best, final_values = map(np.stack, columns)
        returns, discounts, last = n_step_returns(reward, terminated, truncated, self.gamma, self.n_step)
        games = np.arange(len(self.epsilons))
        next_values = np.where(truncated[:-1], final_values[:-1], best[1:])
        td_errors = returns + discounts * next_values[last, games] - taken[:num_steps]
        numbers = actions[:num_steps], returns.view(np.int64), discounts.view(np.int64)
        rows = np.concatenate((stacks[:num_steps], next_stacks[last, games], np.stack(numbers, 2)), 2)
        rows = rows.reshape(-1, rows.shape[2])
        first, end = rows[:, 0].min(), rows[:, : -len(numbers)].max() + 1
        rows[:, : -len(numbers)] -= first
        frames = np.stack(self.frames[first - self.first_frame : end - self.first_frame])
        ended = [
            (step * len(games) + game + 1, *episode) for step in range(num_steps) for game, *episode in episodes[step]
        ]
        self.steps = self.steps[num_steps:]
        oldest = self.steps[0][0].min()
        self.frames, self.first_frame = self.frames[oldest - self.first_frame :], oldest
        return frames, rows, priority(td_errors, self.alpha).ravel(), ended


if __name__ == "__main__":
    # Run directory and logger
    stop_signals = []
    signal.signal(signal.SIGTERM, lambda *received: stop_signals.append(received))
    args = parse_args()
    rows_per_batch = args.steps_per_batch * args.envs_per_actor
    if min(rows_per_batch, args.num_actors, args.batch_size, args.train_frequency, args.n_step) < 1:
        fail("--num-actors, --envs-per-actor, --steps-per-batch, --batch-size, --train-frequency, --n-step: at least 1")
    if min(args.checkpoint_freq, args.publish_frequency, args.target_network_frequency, args.total_timesteps) < 1:
        fail("--checkpoint-freq, --publish-frequency, --target-network-frequency, --total-timesteps: at least 1")
    if args.buffer_size < 20 * rows_per_batch:
        fail("--buffer-size must be at least 20 times --envs-per-actor times --steps-per-batch")
    if args.buffer_device == "cuda" and not (torch.cuda.is_available() and args.cuda):
        fail("--buffer-device cuda needs a GPU and --cuda")
    try:
        envs = make_envs(args.env_id, 1)  # a first look, before anything is written
    except (gym.error.Error, ImportError) as error:
        fail(error)
    local = {"_node_ip_address": "127.0.0.1", "num_cpus": args.num_actors, "include_dashboard": False}
    try:
        if ":" in args.ray_address:  # a look first, as Ray tries for minutes
            socket.create_connection(args.ray_address.split("/")[-1].rsplit(":", 1), timeout=10).close()
        ray.init(args.ray_address or "local", **({} if args.ray_address else local), logging_level="error")
    except SystemExit:  # Ray's own answer to SIGTERM
        sys.exit(75)
    except (OSError, RuntimeError, ValueError) as error:
        fail(f"--ray-address {args.ray_address}: {error}")
    signal.signal(signal.SIGTERM, lambda *received: stop_signals.append(received))
    checkpoint = torch.load(Path(args.resume, "checkpoint.pt"), map_location="cpu") if args.resume else {}
    run_dir, writer = open_run(args, checkpoint.get("events", {}))

    # Seeding
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    torch.set_num_threads(max(1, os.cpu_count() - args.num_actors))  # the other cores are for the actors
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured

    # Agent and optimizer
    q_network, target_network = QNetwork(envs).to(device), QNetwork(envs).to(device)
    weights, target_weights = flatten(q_network), flatten(target_network).requires_grad_(False)
    target_weights.copy_(weights.detach())
    optimizer = RMSProp([weights], lr=args.learning_rate)

    # Storage: a transition has the frames of two observations, and three columns: action, return, discount
    num_actions, obs_shape = envs.single_action_space.n, envs.single_observation_space.shape
    buffer_bytes, buffer_device = args.buffer_size * int(np.prod(obs_shape[1:])), args.buffer_device
    if buffer_device == "auto":
        fits = device.type == "cuda" and buffer_bytes + 2**32 < torch.cuda.mem_get_info()[0]
        buffer_device = "cuda" if fits else "cpu"
    replay = BatchReplay(args.buffer_size, rows_per_batch, obs_shape, buffer_device)
    b_slots = torch.zeros(args.batch_size, dtype=torch.long, device=device)
    b_columns = torch.zeros((args.batch_size, 4), device=device)
    b_frames = torch.zeros((args.batch_size, 2 * obs_shape[0], *obs_shape[1:]), dtype=torch.uint8, device=device)
    loss_names = ["td_loss", "q_values"]
    losses, num_updates = torch.zeros(len(loss_names), device=device), 0  # sums since they were last logged
    recent_returns = deque(maxlen=20)

    def draw():
        drawn = replay.sample(args.batch_size, args.importance_exponent)
        for batch, values in zip((b_slots, b_columns, b_frames), drawn):
            batch.copy_(values)

    def prioritize():
        priorities = priority(td_errors.detach().double(), args.prioritized_replay_alpha)
        replay.tree.set(b_slots.to(buffer_device), priorities.to(buffer_device))

    def update():
        global q_values, td_errors, td_loss
        if buffer_device == device.type:  # else the loop draws, as a graph cannot read the host's memory
            draw()
        b_obs, b_next_obs = b_frames.chunk(2, 1)
        b_weights, b_actions, b_returns, b_discounts = b_columns.unbind(1)
        with torch.no_grad():
            target = double_q_target(b_returns, b_discounts, q_network(b_next_obs), target_network(b_next_obs))
        q_values = q_network(b_obs).gather(1, b_actions.long().unsqueeze(1)).squeeze(1)
        td_errors = target - q_values
        td_loss = (b_weights * td_errors.square()).mean() / 2

        weights.grad.zero_()
        td_loss.backward()
        nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
        optimizer.step()
        with torch.no_grad():
            losses.add_(torch.stack([td_loss, q_values.mean()]))
        if buffer_device == device.type:
            prioritize()

    if device.type == "cuda" and args.cuda_graphs:
        update = cuda_graph(update)

    # Resume
    def save_checkpoint():
        writer.flush()
        state = {"global_step": global_step, "optimizer": optimizer.state_dict()["state"]}
        state |= {"q_network": q_network.state_dict(), "target_network": target_network.state_dict()}
        state["replay"] = replay.save(run_dir)
        state |= {"gradient_steps": gradient_steps, "actor_restarts": actor_restarts}
        state["rng"] = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if device.type == "cuda" else [])
        state["numpy_rng"] = rng.bit_generator.state
        state["events"] = {file.name: file.stat().st_size for file in run_dir.glob("events*")}
        torch.save(state, run_dir / "unfinished.tmp")
        os.replace(run_dir / "unfinished.tmp", run_dir / "checkpoint.pt")

    global_step = gradient_steps = actor_restarts = 0
    if args.resume:
        global_step = checkpoint["global_step"]
        q_network.load_state_dict(checkpoint["q_network"])
        target_network.load_state_dict(checkpoint["target_network"])
        optimizer.load_state_dict(optimizer.state_dict() | {"state": checkpoint["optimizer"]})
        replay.load(run_dir, checkpoint["replay"])
        gradient_steps, actor_restarts = checkpoint["gradient_steps"], checkpoint["actor_restarts"]
        rng.bit_generator.state = checkpoint["numpy_rng"]
        torch.set_rng_state(checkpoint["rng"][0])
        if device.type == "cuda" and len(checkpoint["rng"]) == 2:
            torch.cuda.set_rng_state(checkpoint["rng"][1])
    else:
        save_checkpoint()

    # Training loop
    epsilons = exploration_rates(args.base_epsilon, args.epsilon_exponent, args.num_actors * args.envs_per_actor)
    actors, pending = [None] * args.num_actors, {}  # what the actors work on: a future, and the actor's index
    published = ray.put(weights.detach().cpu().numpy())

    def start_actor(i):
        options = epsilons.reshape(args.num_actors, -1)[i], args.n_step, args.gamma, args.prioritized_replay_alpha
        actors[i] = ray.remote(num_cpus=1)(Actor).remote(args.env_id, int(rng.integers(2**30)), *options)

    def passed(period):
        """How many multiples of the period the last batch has brought."""
        return global_step // period - last_step // period

    for i in range(args.num_actors if global_step < args.total_timesteps else 0):
        start_actor(i)
        pending[actors[i].collect.remote(published, args.steps_per_batch)] = i
    start_time, start_step = time.perf_counter(), global_step
    last_heard = start_time
    while global_step < args.total_timesteps and not stop_signals:
        # Act: take a batch, if one has come
        last_step = global_step
        arrived, _ = ray.wait(list(pending), timeout=0 if args.free_running and gradient_steps else 1)
        for future in arrived:
            i = pending.pop(future)
            try:
                *batch, episodes = ray.get(future)
                replay.add(*batch)
                for position, episodic_return, length in episodes:
                    writer.add_scalar("charts/episodic_return", episodic_return, global_step + position)
                    writer.add_scalar("charts/episodic_length", length, global_step + position)
                    recent_returns.append(episodic_return)
                global_step, last_heard = global_step + rows_per_batch, time.perf_counter()
            except ray.exceptions.RayError as error:
                if isinstance(error, ray.exceptions.RayTaskError) or getattr(error, "actor_init_failed", False):
                    raise  # a mistake in its code, which another would make too
                print(f"\nActor {i} is gone and is replaced: {str(error).splitlines()[0]}")
                actor_restarts += 1
                start_actor(i)
            pending[actors[i].collect.remote(published, args.steps_per_batch)] = i
        if time.perf_counter() - last_heard > 30:
            print(f"\nNo actor has sent anything for 30 s: does the cluster have {args.num_actors} CPUs to spare?")
            last_heard = time.perf_counter()

        # Learn
        if global_step > last_step:
            replay.flush()
        updates = 1 if args.free_running else passed(args.train_frequency)
        for _ in range(updates if global_step > args.learning_starts else 0):
            if buffer_device != device.type:
                draw()
            update()
            if buffer_device != device.type:
                prioritize()
            num_updates += 1
            gradient_steps += 1
        for _ in range(passed(args.target_network_frequency) if global_step > args.learning_starts else 0):
            target_weights.lerp_(weights.detach(), args.tau)
        if passed(args.publish_frequency):
            published = ray.put(weights.detach().cpu().numpy())

        # Log
        due = passed(100) or passed(args.checkpoint_freq) or passed(args.total_timesteps // 10 + 1)
        if not due and global_step < args.total_timesteps:
            continue
        if num_updates:
            means = (losses / num_updates).tolist()
            if not np.isfinite([*means, weights.sum().item()]).all():
                sys.exit(f"\nLosses are not finite at step {global_step}: {means}. Last good checkpoint: {run_dir}")
            for name, mean in zip(loss_names, means):
                writer.add_scalar(f"losses/{name}", mean, global_step)
            losses.zero_()
            num_updates = 0
        sps = (global_step - start_step) / (time.perf_counter() - start_time)
        writer.add_scalar("charts/SPS", int(sps), global_step)
        writer.add_scalar("charts/gradient_steps", gradient_steps, global_step)
        writer.add_scalar("charts/actor_restarts", actor_restarts, global_step)
        if sys.stdout.isatty() or passed(args.total_timesteps // 100 + 1):
            report(global_step, args.total_timesteps, sps, recent_returns)

        # Checkpoint
        if args.capture_video and passed(args.total_timesteps // 10 + 1):
            policy = epsilon_greedy(q_network, num_actions, args.eval_epsilon, device)
            record_video(policy, args.env_id, args.seed, run_dir / f"videos/step-{global_step}.mp4")
        if passed(args.checkpoint_freq) or global_step >= args.total_timesteps:
            save_checkpoint()

    if stop_signals:
        if weights.isfinite().all():
            save_checkpoint()
        print(f"\nStopped at step {global_step}. To continue: python {sys.argv[0]} --resume {run_dir}")
        sys.exit(75)  # schedulers start such a job again

    # Save and close
    signal.signal(signal.SIGTERM, lambda *received: sys.exit(75))
    ray.shutdown()
    envs.close()
    if args.save_model:
        save_file(q_network.state_dict(), run_dir / "model.safetensors")
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
