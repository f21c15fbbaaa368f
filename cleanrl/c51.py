# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "gymnasium[classic-control]>=1.2", "numpy>=2", "safetensors>=0.5", "tensorboard>=2.19", "torch>=2.8", "tyro>=0.9",
# ]
# ///
"""Categorical deep Q-learning (C51, Bellemare et al. 2017, arXiv:1707.06887): vector observations, discrete actions.

Differs from dqn.py:
1. the network predicts the distribution of the return, as logits of `--n-atoms` atoms from `--v-min` to `--v-max`;
2. actions are ranked by expected return; the target is the distribution of the best one, projected onto the atoms;
3. the loss is the cross-entropy to it, of probabilities clamped to [1e-5, 1 - 1e-5], Adam's epsilon is
   0.01 / `--batch-size`, and the target network is only copied.

Differs from the paper:
1. a network of two hidden layers for vector observations, and 101 atoms from -100 to 100;
2. an episode cut off by a time limit is bootstrapped from its final observation.

Run: python c51.py --env-id CartPole-v1 --total-timesteps 500000
"""

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
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.tensorboard import SummaryWriter


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

    env_id: str = "CartPole-v1"  # environment
    total_timesteps: int = 500_000  # environment steps in total
    learning_rate: float = 2.5e-4  # step size of the optimizer
    num_envs: int = 1  # parallel environments
    n_atoms: int = 101  # atoms of the distribution of returns
    v_min: float = -100.0  # lowest atom
    v_max: float = 100.0  # highest atom
    buffer_size: int = 10_000  # transitions that the replay buffer holds
    gamma: float = 0.99  # discount
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
        env = gym.make(env_id, render_mode="rgb_array" if video else None)
        if video:
            env = gym.wrappers.RecordVideo(env, str(Path("runs", run_name, "videos")), name_prefix=f"{time.time():.0f}")
        env.action_space.seed(seed + idx)
        return env

    return thunk


def make_envs(env_id, num_envs, seed, capture_video=False, run_name=""):
    thunks = [make_env(env_id, seed, i, capture_video, run_name) for i in range(num_envs)]
    return gym.vector.SyncVectorEnv(thunks, copy=False, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


class Layers(nn.Sequential):
    def forward(self, x):  # without nn.Module.__call__ and its hooks, which take as long as such a layer
        for layer in self:
            x = layer.forward(x)
        return x


class QNetwork(Layers):
    def __init__(self, envs, n_atoms):
        inputs = int(np.prod(envs.single_observation_space.shape))
        hidden = [nn.Linear(inputs, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()]
        super().__init__(*hidden, nn.Linear(84, envs.single_action_space.n * n_atoms), nn.Unflatten(1, (-1, n_atoms)))


class ReplayBuffer:
    """The last transitions, one row each. They come in chunks of equal size, so that one copy writes many steps."""

    def __init__(self, size, chunk, device):
        self.rows = torch.zeros((size // (chunk.size // chunk.shape[-1]), *chunk.shape), device=device)
        self.filled = torch.zeros((), dtype=torch.long, device=device)  # on the device, where a graph can read it
        self.added = 0

    def add(self, chunk):
        self.rows[self.added % len(self.rows)] = torch.from_numpy(chunk)
        self.added += 1
        self.filled.fill_(min(self.added, len(self.rows)) * (chunk.size // chunk.shape[-1]))

    def sample(self, batch_size, obs_dim):
        indices = torch.randint(2**62, (batch_size,), device=self.rows.device) % self.filled
        obs, next_obs, rest = self.rows.flatten(0, 2)[indices].tensor_split([obs_dim, 2 * obs_dim], dim=1)
        return obs, next_obs, rest[:, :-2], rest[:, -2], rest[:, -1]


def project(pmfs, rewards, terminated, support, gamma):
    """The distribution of reward + gamma * return: each value's mass goes to its neighbours on the support (eq. 7)."""
    last = len(support) - 1
    values = rewards[:, None] + gamma * (1 - terminated)[:, None] * support
    positions = ((values - support[0]) * (last / (support[-1] - support[0]))).clamp(0, last)
    lower = positions.long().clamp(0, last - 1)  # so that a value on the last atom has an upper neighbour
    upper_mass = pmfs * (positions - lower)
    return torch.zeros_like(pmfs).scatter_add_(1, lower, pmfs - upper_mass).scatter_add_(1, lower + 1, upper_mass)


def linear_schedule(start, end, duration, step):
    return start + (end - start) * min(step / max(duration, 1), 1)


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


def load_policy(run_dir, envs, device, deterministic=False):
    """The saved network of a run, as a function from a batch of observations to a batch of actions."""
    flags = json.loads(Path(run_dir, "args.json").read_text())
    q_network = QNetwork(envs, flags["n_atoms"]).to(device)
    q_network.load_state_dict(load_file(Path(run_dir, "model.safetensors"), str(device)))
    support = torch.linspace(flags["v_min"], flags["v_max"], flags["n_atoms"], device=device)
    epsilon = 0 if deterministic else flags["end_e"]
    rng = np.random.default_rng(0)

    @torch.no_grad()
    def policy(obs):
        logits = q_network(torch.tensor(obs, dtype=torch.float32, device=device))
        greedy = (logits.softmax(2) @ support).argmax(1).cpu().numpy()
        return np.where(rng.random(len(obs)) < epsilon, rng.integers(envs.single_action_space.n, size=len(obs)), greedy)

    return policy


if __name__ == "__main__":
    # Run directory and logger
    stop_signals = []
    signal.signal(signal.SIGTERM, lambda *received: stop_signals.append(received))
    args = parse_args()
    if min(args.num_envs, args.batch_size, args.train_frequency, args.checkpoint_freq, args.total_timesteps) < 1:
        fail("--num-envs, --batch-size, --train-frequency, --checkpoint-freq and --total-timesteps must be at least 1")
    if args.buffer_size < max(args.num_envs, args.train_frequency) or args.target_network_frequency < 1:
        fail("--buffer-size must be at least --num-envs and --train-frequency, --target-network-frequency at least 1")
    if args.n_atoms < 2 or not args.v_min < args.v_max:
        fail("--n-atoms must be at least 2, and --v-min less than --v-max")
    try:
        envs = make_envs(args.env_id, 1, args.seed)  # a first look, before anything is written
    except (gym.error.Error, ImportError) as error:
        fail(error)
    if not isinstance(envs.single_action_space, gym.spaces.Discrete) or envs.single_action_space.start != 0:
        fail(f"{args.env_id} needs discrete actions from 0 on; ppo_continuous_action.py handles continuous ones")
    if len(envs.single_observation_space.shape or ()) != 1:
        fail(f"{args.env_id} needs vector observations; c51_atari.py handles the images of Atari games")
    if args.capture_video and "rgb_array" not in envs.metadata.get("render_modes", []):
        fail(f"{args.env_id} cannot render images: leave --capture-video out")
    checkpoint = torch.load(Path(args.resume, "checkpoint.pt"), map_location="cpu") if args.resume else {}
    run_dir, writer = open_run(args, checkpoint.get("events", {}))

    # Seeding
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
    else:
        torch.set_num_threads(1)  # a thread pool slows networks of this size down

    # Environments
    envs = make_envs(args.env_id, args.num_envs, args.seed, args.capture_video, run_dir.resolve())

    # Agent and optimizer
    q_network, target_network = QNetwork(envs, args.n_atoms).to(device), QNetwork(envs, args.n_atoms).to(device)
    weights, target_weights = flatten(q_network), flatten(target_network).requires_grad_(False)
    target_weights.copy_(weights.detach())
    support = torch.linspace(args.v_min, args.v_max, args.n_atoms, device=device)
    lr = torch.tensor(args.learning_rate, device=device)
    eps = 0.01 / args.batch_size
    optimizer = torch.optim.Adam([weights], lr=lr, eps=eps, fused=True, capturable=device.type == "cuda")

    # Storage: the chunk collects transitions on the host until the next gradient step is due
    num_actions, obs_dim = envs.single_action_space.n, envs.single_observation_space.shape[0]
    chunk_steps = max(1, args.train_frequency // args.num_envs)
    chunk, staged = np.zeros((chunk_steps, args.num_envs, 2 * obs_dim + 3), dtype=np.float32), 0
    replay = ReplayBuffer(args.buffer_size, chunk, device)
    act_obs = torch.zeros((args.num_envs, obs_dim), device=device)
    act_action = torch.zeros(args.num_envs, dtype=torch.long, device=device)
    rows = torch.arange(args.batch_size, device=device)
    loss_names = ["loss", "q_values"]
    losses, num_updates = torch.zeros(len(loss_names), device=device), 0  # sums since they were last logged
    episode_returns, episode_lengths = np.zeros((2, args.num_envs))
    recent_returns = deque(maxlen=20)

    @torch.no_grad()
    def act():
        act_action.copy_((q_network(act_obs).softmax(2) @ support).argmax(1))

    def update():
        global q_values, loss
        b_obs, b_next_obs, b_actions, b_rewards, b_terminated = replay.sample(args.batch_size, obs_dim)
        with torch.no_grad():
            next_pmfs = target_network(b_next_obs).softmax(2)
            next_actions = (next_pmfs @ support).argmax(1)
            target = project(next_pmfs[rows, next_actions], b_rewards, b_terminated, support, args.gamma)
        logits = q_network(b_obs)[rows, b_actions.long().squeeze(1)]
        loss = -(target * logits.softmax(1).clamp(1e-5, 1 - 1e-5).log()).sum(1).mean()

        weights.grad.zero_()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            q_values = logits.softmax(1) @ support
            losses.add_(torch.stack([loss, q_values.mean()]))

    if device.type == "cuda" and args.cuda_graphs:
        act, update = cuda_graph(act), cuda_graph(update)

    # Resume
    def save_checkpoint():
        writer.flush()
        state = {"global_step": global_step, "optimizer": optimizer.state_dict()["state"]}
        state |= {"q_network": q_network.state_dict(), "target_network": target_network.state_dict()}
        state |= {"replay": replay.rows[: replay.added].clone(), "added": replay.added}
        state |= {"chunk": torch.from_numpy(chunk), "staged": staged}
        state["rng"] = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if device.type == "cuda" else [])
        state["numpy_rng"] = rng.bit_generator.state
        state["events"] = {file.name: file.stat().st_size for file in run_dir.glob("events*")}
        torch.save(state, run_dir / "unfinished.tmp")
        os.replace(run_dir / "unfinished.tmp", run_dir / "checkpoint.pt")

    global_step = 0
    if args.resume:
        global_step = checkpoint["global_step"]
        q_network.load_state_dict(checkpoint["q_network"])
        target_network.load_state_dict(checkpoint["target_network"])
        optimizer.load_state_dict(optimizer.state_dict() | {"state": checkpoint["optimizer"]})
        replay.rows[: len(checkpoint["replay"])] = checkpoint["replay"]
        replay.added = checkpoint["added"]
        replay.filled.fill_(checkpoint["replay"].shape[:3].numel())
        chunk[:], staged = checkpoint["chunk"], checkpoint["staged"]
        rng.bit_generator.state = checkpoint["numpy_rng"]
        torch.set_rng_state(checkpoint["rng"][0])
        if device.type == "cuda" and len(checkpoint["rng"]) == 2:
            torch.cuda.set_rng_state(checkpoint["rng"][1])
    else:
        save_checkpoint()

    # Training loop
    start_time, start_step = time.perf_counter(), global_step
    log_period = max(100, args.num_envs)  # environment steps
    obs, actions = envs.reset(seed=args.seed + global_step)[0].copy(), np.zeros(args.num_envs, dtype=np.int64)
    while global_step < args.total_timesteps:
        # Act
        exploration_steps = args.exploration_fraction * args.total_timesteps
        epsilon = linear_schedule(args.start_e, args.end_e, exploration_steps, global_step)
        explore = rng.random(args.num_envs) < epsilon
        if explore.any():
            actions = rng.integers(num_actions, size=args.num_envs)
        if not explore.all():
            act_obs.copy_(torch.from_numpy(obs))
            act()
            actions = np.where(explore, actions, act_action.cpu().numpy())
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
        columns = (obs, final_obs, actions[:, None], reward[:, None], terminated[:, None])
        np.concatenate(columns, axis=1, out=chunk[staged])
        staged += 1
        obs[:] = next_obs
        last_step, global_step = global_step, global_step + args.num_envs

        # Learn
        if staged == chunk_steps:
            replay.add(chunk)
            chunk_start = global_step - staged * args.num_envs
            updates = global_step // args.train_frequency - chunk_start // args.train_frequency
            for _ in range(updates if global_step > args.learning_starts else 0):
                update()
                num_updates += 1
            staged = 0
        target_updates = global_step // args.target_network_frequency - last_step // args.target_network_frequency
        if target_updates and global_step > args.learning_starts:
            target_weights.copy_(weights.detach())

        # Log
        if global_step % 100 >= args.num_envs and global_step < args.total_timesteps:
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
        save_file(q_network.state_dict(), run_dir / "model.safetensors")
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
