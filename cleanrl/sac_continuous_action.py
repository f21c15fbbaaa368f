# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "gymnasium[mujoco]>=1.2", "numpy>=2", "safetensors>=0.5", "tensorboard>=2.19", "torch>=2.8", "tyro>=0.9",
# ]
# ///
"""Soft Actor-Critic (SAC, Haarnoja et al. 2018, arXiv:1812.05905): vector observations, continuous actions.

Differs from td3_continuous_action.py:
1. the actor draws from a Gaussian that tanh squashes into the bounds, its deviation depending on the observation;
2. the entropy of the policy is rewarded, at a price (alpha) that follows the entropy asked for, -1 per dimension;
3. the actor has no copy, and follows the smaller value of both critics; so does the target;
4. `--utd` gradient steps per environment step; the actor catches up on `--policy-frequency` steps at once.

Differs from the paper:
1. the step size of the critics and of alpha is 1e-3; tanh keeps deviations between exp(-5) and exp(2);
2. an episode cut off by a time limit is bootstrapped from its final observation.

Run: python sac_continuous_action.py --env-id HalfCheetah-v4 --total-timesteps 1000000
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
from itertools import product
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

    env_id: str = "Hopper-v4"  # environment
    total_timesteps: int = 1_000_000  # environment steps in total
    num_envs: int = 1  # parallel environments
    buffer_size: int = 1_000_000  # transitions that the replay buffer holds
    gamma: float = 0.99  # discount
    tau: float = 0.005  # step of the target network towards the online network (1 copies it)
    batch_size: int = 256  # transitions per gradient step
    learning_starts: int = 5_000  # environment steps before the first gradient step
    policy_lr: float = 3e-4  # step size of the actor's optimizer
    q_lr: float = 1e-3  # step size of the optimizers of the critics and of alpha
    utd: float = 1.0  # gradient steps per environment step
    policy_frequency: int = 2  # gradient steps of the critic per gradient step of the actor
    target_network_frequency: int = 1  # environment steps (continuous SAC: gradient steps) between target updates
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


class Layers(nn.Sequential):
    def forward(self, x):  # without nn.Module.__call__ and its hooks, which take as long as such a layer
        for layer in self:
            x = layer.forward(x)
        return x


class Actor(nn.Module):
    def __init__(self, envs):
        super().__init__()
        space, inputs = envs.single_action_space, envs.single_observation_space.shape[0]
        hidden = [nn.Linear(inputs, 256), nn.ReLU(inplace=True), nn.Linear(256, 256), nn.ReLU(inplace=True)]
        self.layers = Layers(*hidden, nn.Linear(256, 2 * space.shape[0]))
        low, high = torch.tensor(np.stack([space.low, space.high]), dtype=torch.float32)
        self.register_buffer("low", low)
        self.register_buffer("high", high)
        self.register_buffer("scale", (high - low) / 2)

    def forward(self, obs):
        """Mean and logarithm of the deviation of the Gaussian before it is squashed."""
        mean, log_std = self.layers(obs).chunk(2, dim=1)
        return mean, -5 + 3.5 * (log_std.tanh() + 1)

    def squash(self, x):
        return self.low.lerp(self.high, (x.tanh() + 1) / 2)  # rounding does not take it out of the bounds

    def sample(self, obs):
        mean, log_std = self(obs)
        x = mean + log_std.exp() * torch.randn_like(mean)
        return self.squash(x), squashed_logprob(x, mean, log_std, self.scale)


class Linears(nn.Module):
    """Linear layers side by side, for inputs of shape (layers, batch, features)."""

    def __init__(self, layers, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(layers, inputs, outputs).uniform_(-(inputs**-0.5), inputs**-0.5))
        self.bias = nn.Parameter(torch.empty(layers, 1, outputs).uniform_(-(inputs**-0.5), inputs**-0.5))

    def forward(self, x):
        weight, bias = self.weight, self.bias
        if weight.shape[2] == 1:  # a matrix product of one column takes five times as long
            return (x * weight.mT).sum(2, keepdim=True) + bias
        return torch.baddbmm(bias, x, weight)


class SoftQNetwork(Layers):
    def __init__(self, envs):
        inputs = envs.single_observation_space.shape[0] + envs.single_action_space.shape[0]
        hidden = [Linears(2, inputs, 256), nn.ReLU(inplace=True), Linears(2, 256, 256), nn.ReLU(inplace=True)]
        super().__init__(*hidden, Linears(2, 256, 1))

    def forward(self, obs, action):
        """The values of both critics: (2, batch)."""
        return super().forward(torch.cat([obs, action], dim=1).expand(2, -1, -1)).squeeze(2)


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


def squashed_logprob(x, mean, log_std, scale):
    """The log-density of the action scale * tanh(x) plus any constant, for x from a Gaussian; sums over dimensions."""
    gaussian = -0.5 * ((x - mean) / log_std.exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
    log_slope = 2 * (math.log(2) - x - nn.functional.softplus(-2 * x))  # log(1 - tanh(x)**2), exact also far from 0
    return (gaussian - log_slope - scale.log()).sum(1)


def bellman_target(reward, terminated, next_value, gamma):
    """The reward and the discounted value of what comes next; an episode that has terminated has none."""
    return reward + gamma * (1 - terminated) * next_value


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


def load_policy(run_dir, envs, device, deterministic=True):
    """The saved network of a run, as a function from a batch of observations to a batch of actions."""
    actor, model = Actor(envs).to(device), load_file(Path(run_dir, "model.safetensors"), str(device))
    actor.load_state_dict({name.removeprefix("actor."): model[name] for name in model if name.startswith("actor.")})

    @torch.no_grad()
    def policy(obs):
        mean, log_std = actor(torch.tensor(obs, dtype=torch.float32, device=device))
        x = mean if deterministic else mean + log_std.exp() * torch.randn_like(mean)
        return actor.squash(x).cpu().numpy()

    return policy


if __name__ == "__main__":
    # Run directory and logger
    stop_signals = []
    signal.signal(signal.SIGTERM, lambda *received: stop_signals.append(received))
    args = parse_args()
    if min(args.num_envs, args.batch_size, args.policy_frequency, args.checkpoint_freq, args.total_timesteps) < 1:
        fail("--num-envs, --batch-size, --policy-frequency, --checkpoint-freq and --total-timesteps must be at least 1")
    if args.buffer_size < args.num_envs or args.target_network_frequency < 1 or not 0 < args.utd < np.inf:
        fail("--buffer-size must be at least --num-envs, --target-network-frequency at least 1, --utd above 0")
    if args.capture_video and sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")  # renders without a screen, if set before MuJoCo is imported
    try:
        envs = make_envs(args.env_id, 1, args.seed)  # a first look, before anything is written
    except (gym.error.Error, ImportError) as error:
        fail(error)
    if not isinstance(envs.single_action_space, gym.spaces.Box) or len(envs.single_action_space.shape) != 1:
        fail(f"{args.env_id} needs a vector of continuous actions; dqn.py handles discrete ones")
    if not envs.single_action_space.is_bounded():
        fail(f"{args.env_id} needs bounded actions; ppo_continuous_action.py handles unbounded ones")
    if len(envs.single_observation_space.shape or ()) != 1:
        fail(f"{args.env_id} needs vector observations; dqn_atari.py handles the images of Atari games")
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
    elif "OMP_NUM_THREADS" not in os.environ:  # SAC ran 1.4 to 1.6 times as fast with two as with one
        torch.set_num_threads(min(2, torch.get_num_threads()))

    # Environments
    envs = make_envs(args.env_id, args.num_envs, args.seed, args.capture_video, run_dir.resolve())

    # Agent and optimizer
    actor = Actor(envs).to(device)
    qf, target_qf = SoftQNetwork(envs).to(device), SoftQNetwork(envs).to(device)
    agent = nn.ModuleDict({"actor": actor, "qf": qf})
    actor_weights = flatten(actor)
    qf_weights, target_qf_weights = flatten(qf), flatten(target_qf).requires_grad_(False)
    target_qf_weights.copy_(qf_weights.detach())
    target_entropy = -float(envs.single_action_space.shape[0])
    log_alpha = nn.Parameter(torch.tensor(1.0 if args.autotune else args.alpha, device=device).log())
    log_alpha.grad = torch.zeros_like(log_alpha)
    policy_lr, q_lr = torch.tensor([args.policy_lr, args.q_lr], device=device)
    actor_optimizer = torch.optim.Adam([actor_weights], lr=policy_lr, fused=True, capturable=device.type == "cuda")
    qf_optimizer = torch.optim.Adam([qf_weights], lr=q_lr, fused=True, capturable=device.type == "cuda")
    alpha_optimizer = torch.optim.Adam([log_alpha], lr=q_lr, fused=True, capturable=device.type == "cuda")

    # Storage: the chunk holds the last transition of each environment until it goes to the replay buffer
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    chunk, staged = np.zeros((1, args.num_envs, 2 * obs_dim + action_dim + 2), dtype=np.float32), False
    replay = ReplayBuffer(args.buffer_size, chunk, device)
    act_obs = torch.zeros((args.num_envs, obs_dim), device=device)
    act_action = torch.zeros((args.num_envs, action_dim), device=device)
    loss_names = ["qf1_loss", "qf2_loss", "qf_loss", "qf1_values", "qf2_values"]
    loss_names += ["actor_loss", "alpha_loss", "alpha"]
    losses, num_losses = torch.zeros(len(loss_names), device=device), np.zeros(len(loss_names))  # since the last log
    episode_returns, episode_lengths = np.zeros((2, args.num_envs))
    recent_returns = deque(maxlen=20)

    @torch.no_grad()
    def act():
        mean, log_std = actor(act_obs)
        act_action.copy_(actor.squash(mean + log_std.exp() * torch.randn_like(mean)))

    def update(with_actor, with_target):
        global q_values, qf_losses, actor_loss, alpha_loss
        b_obs, b_next_obs, b_actions, b_rewards, b_terminated = replay.sample(args.batch_size, obs_dim)
        with torch.no_grad():
            next_actions, next_logprob = actor.sample(b_next_obs)
            next_value = target_qf(b_next_obs, next_actions).amin(0) - log_alpha.exp() * next_logprob
            target = bellman_target(b_rewards, b_terminated, next_value, args.gamma)
        q_values = qf(b_obs, b_actions)
        qf_losses = ((q_values - target) ** 2).mean(1)
        qf_loss = qf_losses.sum()

        qf_weights.grad.zero_()
        qf_loss.backward()
        qf_optimizer.step()
        with torch.no_grad():
            losses[:5].add_(torch.cat([qf_losses, qf_losses.mean(0, keepdim=True), q_values.mean(1)]))
        for _ in range(args.policy_frequency if with_actor else 0):
            new_actions, logprob = actor.sample(b_obs)
            actor_loss = (log_alpha.exp().detach() * logprob - qf(b_obs, new_actions).amin(0)).mean()
            actor_weights.grad.zero_()
            actor_loss.backward(inputs=list(actor.parameters()))  # no gradient of the critics' weights
            actor_optimizer.step()
            alpha_loss = -(log_alpha.exp() * (logprob.detach() + target_entropy)).mean()
            if args.autotune:
                log_alpha.grad.zero_()
                alpha_loss.backward()
                alpha_optimizer.step()
            with torch.no_grad():
                losses[5:].add_(torch.stack([actor_loss, alpha_loss, log_alpha.exp()]))
        if with_target:
            with torch.no_grad():
                target_qf_weights.lerp_(qf_weights, args.tau)

    updates = {case: partial(update, *case) for case in product((False, True), repeat=2)}
    if device.type == "cuda" and args.cuda_graphs:
        act, updates = cuda_graph(act), {case: cuda_graph(function) for case, function in updates.items()}

    # Resume
    def save_checkpoint():
        writer.flush()
        state = {"global_step": global_step, "gradient_steps": gradient_steps, "agent": agent.state_dict()}
        state |= {"target_qf": target_qf.state_dict(), "log_alpha": log_alpha.detach()}
        state["actor_optimizer"] = actor_optimizer.state_dict()["state"]
        state["qf_optimizer"] = qf_optimizer.state_dict()["state"]
        state["alpha_optimizer"] = alpha_optimizer.state_dict()["state"]
        state |= {"replay": replay.rows[: replay.added].clone(), "added": replay.added}
        state |= {"chunk": torch.from_numpy(chunk), "staged": staged}
        state["rng"] = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if device.type == "cuda" else [])
        state["numpy_rng"] = rng.bit_generator.state
        state["events"] = {file.name: file.stat().st_size for file in run_dir.glob("events*")}
        torch.save(state, run_dir / "unfinished.tmp")
        os.replace(run_dir / "unfinished.tmp", run_dir / "checkpoint.pt")

    global_step, gradient_steps = 0, 0
    if args.resume:
        global_step, gradient_steps = checkpoint["global_step"], checkpoint["gradient_steps"]
        agent.load_state_dict(checkpoint["agent"])
        target_qf.load_state_dict(checkpoint["target_qf"])
        log_alpha.data.copy_(checkpoint["log_alpha"])
        actor_optimizer.load_state_dict(actor_optimizer.state_dict() | {"state": checkpoint["actor_optimizer"]})
        qf_optimizer.load_state_dict(qf_optimizer.state_dict() | {"state": checkpoint["qf_optimizer"]})
        alpha_optimizer.load_state_dict(alpha_optimizer.state_dict() | {"state": checkpoint["alpha_optimizer"]})
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
    low, high = envs.single_action_space.low, envs.single_action_space.high
    obs = envs.reset(seed=args.seed + global_step)[0].copy()
    while global_step < args.total_timesteps:
        # Act
        if global_step < args.learning_starts:
            actions = rng.uniform(low, high, size=(args.num_envs, action_dim)).astype(np.float32)
        else:
            act_obs.copy_(torch.from_numpy(obs))
            act()
            actions = act_action.cpu().numpy()

        # Learn: before the environments step, so that a GPU works on it while they do
        if staged:
            replay.add(chunk)
        due = int(global_step * args.utd) - int((global_step - args.num_envs) * args.utd)
        for _ in range(due if staged and global_step > args.learning_starts else 0):
            gradient_steps += 1
            with_actor = gradient_steps % args.policy_frequency == 0
            updates[with_actor, gradient_steps % args.target_network_frequency == 0]()
            num_losses[:5] += 1
            num_losses[5:] += with_actor * args.policy_frequency

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
        if num_losses.any():
            sums, counts = losses.tolist(), num_losses.tolist()
            if not np.isfinite([*sums, actor_weights.sum().item(), qf_weights.sum().item()]).all():
                sys.exit(f"\nLosses are not finite at step {global_step}: {sums}. Last good checkpoint: {run_dir}")
            for name, total, count in zip(loss_names, sums, counts):
                if count:
                    writer.add_scalar(f"losses/{name}", total / count, global_step)
            losses.zero_()
            num_losses[:] = 0
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
        save_file(agent.state_dict(), run_dir / "model.safetensors")
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
