# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "envpool>=1.2; sys_platform == 'linux'", "gymnasium>=1.2", "numpy>=2", "safetensors>=0.5", "tensorboard>=2.19",
#     "torch>=2.8", "tyro>=0.9",
# ]
# ///
"""Parallelised Q-Network (PQN, Gallici et al. 2024, arXiv:2407.04811): Atari games of EnvPool.

Differs from ppo_atari_envpool.py:
1. one network of action values, with layer normalisation before each ReLU, in place of actor and critic;
2. actions are greedy, or random with a probability that falls over time, drawn for each environment;
3. the loss is the squared distance to Q(lambda) returns; there is no target network and no replay buffer;
4. RAdam in place of Adam, and a higher ceiling of the gradient norm.

Differs from the paper:
1. 8 environments and rollouts of 128 steps, where the paper has many more environments and shorter rollouts;
2. weights are orthogonal, those of the last layer too;
3. an episode cut off by a time limit is bootstrapped from its final observation.

Run: python pqn_atari_envpool.py --env-id Breakout-v5 --total-timesteps 10000000
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

import gymnasium as gym
import numpy as np
import torch
import tyro
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.tensorboard import SummaryWriter

try:
    import envpool
except ImportError:  # make_envs says what to do
    envpool = None


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

    env_id: str = "Breakout-v5"  # environment
    total_timesteps: int = 10_000_000  # environment steps in total
    learning_rate: float = 2.5e-4  # step size of the optimizer
    num_envs: int = 8  # parallel environments
    num_steps: int = 128  # rollout length per environment
    anneal_lr: bool = True  # decay the learning rate linearly to zero
    gamma: float = 0.99  # discount
    q_lambda: float = 0.65  # trace parameter of the return
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # passes over each rollout
    max_grad_norm: float = 10.0  # ceiling of the global gradient norm
    start_e: float = 1.0  # exploration rate at the start
    end_e: float = 0.01  # exploration rate at the end
    exploration_fraction: float = 0.1  # share of the steps over which the exploration rate falls


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
        file = "pqn.py" if isinstance(spec.action_space, gym.spaces.Discrete) else "ppo_continuous_action.py"
        raise gym.error.Error(f"{env_id} is not an Atari game; {file} handles vector observations")
    return SameStepEnvPool(env_id, num_envs, life_loss, **options)


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


def layer_init(layer, std=2**0.5):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class QNetwork(nn.Module):
    def __init__(self, envs):
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),
            nn.LayerNorm((32, 20, 20)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.LayerNorm((64, 9, 9)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            nn.LayerNorm((64, 7, 7)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.LayerNorm(512),
            nn.ReLU(),
            layer_init(nn.Linear(512, envs.single_action_space.n)),
        )

    def forward(self, obs):
        return self.network(obs / 255)


def lambda_returns(rewards, values, next_value, dones, final_values, gamma, q_lambda):
    """Q(lambda) returns (Peng and Williams 1994) of (num_steps, num_envs) arrays; a state's value is max_a Q(s, a).

    What follows the end of an episode is worth `final_values`: that of its final observation if truncated, else zero.
    """
    returns, following = np.zeros_like(rewards), next_value
    for t in reversed(range(len(rewards))):
        following = (1 - q_lambda) * next_value + q_lambda * following
        returns[t] = following = rewards[t] + gamma * np.where(dones[t], final_values[t], following)
        next_value = values[t]
    return returns


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
    epsilon = 0 if deterministic else json.loads(Path(run_dir, "args.json").read_text())["end_e"]
    return epsilon_greedy(q_network, envs.single_action_space.n, epsilon, device)


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
    try:
        envs = make_envs(args.env_id, 1)  # a first look, before anything is written
    except (gym.error.Error, ImportError) as error:
        fail(error)
    checkpoint = torch.load(Path(args.resume, "checkpoint.pt"), map_location="cpu") if args.resume else {}
    run_dir, writer = open_run(args, checkpoint.get("events", {}))

    # Seeding
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured

    # Environments
    envs = make_envs(args.env_id, args.num_envs)

    # Agent and optimizer
    q_network = QNetwork(envs).to(device)
    weights = flatten(q_network)
    lr = torch.tensor(args.learning_rate, device=device)
    optimizer = torch.optim.RAdam([weights], lr=lr, capturable=device.type == "cuda")

    # Storage: environments fill NumPy arrays, networks read tensors on the device; a graph needs both to stay in place
    obs_shape = (args.num_steps, args.num_envs, *envs.single_observation_space.shape)
    obs = torch.zeros(obs_shape, dtype=torch.uint8, pin_memory=device.type == "cuda").numpy()
    actions = np.zeros((args.num_steps, args.num_envs, *envs.single_action_space.shape), dtype=np.int64)
    rewards, dones, final_values = np.zeros((3, args.num_steps, args.num_envs), dtype=np.float32)
    act_obs, act_action = torch.tensor(obs[0], device=device), torch.tensor(actions[0], device=device)
    b_obs, b_actions = (torch.tensor(x, device=device).flatten(0, 1) for x in (obs, actions))
    b_returns = torch.zeros(batch_size, device=device)
    mb_inds = torch.zeros(minibatch_size, dtype=torch.long, device=device)
    loss_names = ["td_loss", "q_values"]
    losses = torch.zeros(len(loss_names), device=device)  # sums over an update
    episode_returns, episode_lengths = np.zeros((2, args.num_envs))
    recent_returns = deque(maxlen=20)

    @torch.no_grad()
    def act():
        act_action.copy_(q_network(act_obs).argmax(1))

    @torch.no_grad()
    def value(x):
        return q_network(torch.as_tensor(x, dtype=b_obs.dtype, device=device)).amax(1).cpu().numpy()

    def update():
        global q_values, td_loss
        q_values = q_network(b_obs[mb_inds]).gather(1, b_actions[mb_inds].unsqueeze(1)).squeeze(1)
        td_loss = nn.functional.mse_loss(q_values, b_returns[mb_inds])

        weights.grad.zero_()
        td_loss.backward()
        nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
        optimizer.step()
        with torch.no_grad():
            losses.add_(torch.stack([td_loss, q_values.mean()]))

    if device.type == "cuda" and args.cuda_graphs:
        act, update = cuda_graph(act), cuda_graph(update)

    # Resume
    def save_checkpoint():
        writer.flush()
        state = {"global_step": global_step, "optimizer": optimizer.state_dict()["state"]}
        state |= {"q_network": q_network.state_dict(), "numpy_rng": rng.bit_generator.state}
        state["rng"] = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if device.type == "cuda" else [])
        state["recent_returns"] = [float(episodic_return) for episodic_return in recent_returns]
        state["events"] = {file.name: file.stat().st_size for file in run_dir.glob("events*")}
        torch.save(state, run_dir / "unfinished.tmp")
        os.replace(run_dir / "unfinished.tmp", run_dir / "checkpoint.pt")

    global_step = 0
    if args.resume:
        global_step = checkpoint["global_step"]
        q_network.load_state_dict(checkpoint["q_network"])
        recent_returns.extend(checkpoint["recent_returns"])
        optimizer.load_state_dict(optimizer.state_dict() | {"state": checkpoint["optimizer"]})
        rng.bit_generator.state = checkpoint["numpy_rng"]
        torch.set_rng_state(checkpoint["rng"][0])
        if device.type == "cuda" and len(checkpoint["rng"]) == 2:
            torch.cuda.set_rng_state(checkpoint["rng"][1])
    else:
        save_checkpoint()

    # Training loop
    start_time, start_step = time.perf_counter(), global_step
    exploration_steps = args.exploration_fraction * args.total_timesteps
    next_obs, infos = envs.reset(seed=args.seed + global_step)
    for iteration in range(global_step // batch_size, num_iterations):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"].fill_((1 - iteration / num_iterations) * args.learning_rate)

        # Act
        final_values[:] = 0
        for step in range(args.num_steps):
            obs[step] = next_obs
            act_obs.copy_(torch.from_numpy(obs[step]), non_blocking=True)
            act()
            epsilon = linear_schedule(args.start_e, args.end_e, exploration_steps, global_step)
            explore = rng.random(args.num_envs) < epsilon
            random_actions = rng.integers(envs.single_action_space.n, size=args.num_envs)
            actions[step] = np.where(explore, random_actions, act_action.cpu().numpy())
            next_obs, reward, terminated, truncated, infos = envs.step(actions[step])
            rewards[step], dones[step] = np.sign(reward), terminated | truncated
            episode_returns += reward
            episode_lengths += 1
            cut = truncated & ~terminated
            if cut.any():
                final_values[step, cut] = value(np.stack(infos["final_obs"][cut]))
            for i in np.flatnonzero(infos["game_over"]):  # environment i has made step number global_step + i + 1
                writer.add_scalar("charts/episodic_return", episode_returns[i], global_step + i + 1)
                writer.add_scalar("charts/episodic_length", episode_lengths[i], global_step + i + 1)
                recent_returns.append(episode_returns[i])
                writer.add_scalar("charts/avg_episodic_return", np.mean(recent_returns), global_step + i + 1)
                episode_returns[i] = episode_lengths[i] = 0
            global_step += args.num_envs

        # Targets: the weights have not changed during the rollout, so one batch serves all its steps
        b_obs.copy_(torch.from_numpy(obs).flatten(0, 1))
        b_actions.copy_(torch.from_numpy(actions).flatten(0, 1))
        values = value(b_obs).reshape(rewards.shape)
        returns = lambda_returns(rewards, values, value(next_obs), dones, final_values, args.gamma, args.q_lambda)
        b_returns.copy_(torch.from_numpy(returns).flatten())

        # Learn
        losses.zero_()
        for epoch in range(args.update_epochs):
            for inds in torch.randperm(batch_size, device=device).split(minibatch_size):
                mb_inds.copy_(inds)
                update()

        # Log
        means = (losses / ((epoch + 1) * args.num_minibatches)).tolist()
        if not np.isfinite([*means, weights.sum().item()]).all():
            sys.exit(f"\nLosses are not finite at step {global_step}: {means}. Last good checkpoint: {run_dir}")
        for name, mean in zip(loss_names, means):
            writer.add_scalar(f"losses/{name}", mean, global_step)
        writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"].item(), global_step)
        sps = (global_step - start_step) / (time.perf_counter() - start_time)
        writer.add_scalar("charts/SPS", int(sps), global_step)
        if sys.stdout.isatty() or iteration % (num_iterations // 100 + 1) == 0:
            report(global_step, args.total_timesteps, sps, recent_returns)

        # Checkpoint
        if args.capture_video and iteration % (num_iterations // 10 + 1) == 0:
            policy = epsilon_greedy(q_network, envs.single_action_space.n, args.end_e, device)
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
