# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "gymnasium[toy-text]>=1.3", "numpy>=2", "safetensors>=0.5", "tensorboard>=2.19", "torch>=2.8", "tyro>=0.9",
# ]
# ///
"""Proximal Policy Optimization (PPO, Schulman et al. 2017, arXiv:1707.06347): actions that are not always valid.

Differs from ppo.py:
1. invalid actions get the lowest logit there is (Huang and Ontanon 2022, arXiv:2006.14171), hence no probability, no
   entropy and no gradient; `action_mask`, in the Dict observation or the info, has a 1 for each choice that is valid;
2. an action may have several dimensions, whose log-probabilities and entropies add up;
3. observations of any kind become one vector that begins with the mask, so that it goes wherever they go.

Differs from the paper:
1. advantages are standardised per minibatch, value losses clipped like ratios, gradients clipped to a global norm;
2. networks have orthogonal initialisation, and the learning rate decays linearly, in the paper on Atari games only;
3. an episode cut off by a time limit is bootstrapped from its final observation.

Run: python ppo_masked_multidiscrete.py --env-id Taxi-v4 --total-timesteps 500000
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

    env_id: str = "Taxi-v4"  # environment
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


class MaskFirst(gym.Wrapper):
    """Observations as one vector, the action mask first: as many numbers for each dimension as the largest one has."""

    def __init__(self, env):
        super().__init__(env)
        if not isinstance(env.action_space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
            raise gym.error.Error(f"{self.spec.id} needs discrete actions; ppo_continuous_action.py handles others")
        nvec = np.ravel(env.action_space.nvec if hasattr(env.action_space, "nvec") else env.action_space.n)
        choices = np.arange(nvec.max()) < nvec[:, None]
        self.slots = np.where(choices, np.cumsum(choices).reshape(choices.shape) - 1, -1).ravel()  # -1: no such choice
        self.parts = gym.spaces.Tuple([gym.spaces.MultiBinary(choices.size), env.observation_space])
        self.action_space, self.observation_space = gym.spaces.MultiDiscrete(nvec), gym.spaces.flatten_space(self.parts)

    def join(self, obs, *outcome):
        mask = (outcome[-1] | obs if isinstance(obs, dict) else outcome[-1]).get("action_mask", [])
        mask = np.concatenate(mask) if isinstance(mask, tuple) else mask
        if np.size(mask) != (size := self.action_space.nvec.sum()):
            raise gym.error.Error(f"{self.spec.id} needs an action_mask of {size} numbers; ppo.py needs none")
        return gym.spaces.flatten(self.parts, (np.append(mask, 0)[self.slots], obs)), *outcome

    def reset(self, **options):
        return self.join(*self.env.reset(**options))

    def step(self, action):
        return self.join(*self.env.step(action.reshape(self.env.action_space.shape)[()] + self.env.action_space.start))


def make_env(env_id, seed, idx, capture_video, run_name):
    def thunk():
        video = capture_video and idx == 0
        env = gym.make(env_id, render_mode="rgb_array" if video else None)
        env = MaskFirst(env)
        if video:
            env = gym.wrappers.RecordVideo(env, str(Path("runs", run_name, "videos")), name_prefix=f"{time.time():.0f}")
        env.action_space.seed(seed + idx)
        return env

    return thunk


def make_envs(env_id, num_envs, seed, capture_video=False, run_name=""):
    thunks = [make_env(env_id, seed, i, capture_video, run_name) for i in range(num_envs)]
    return gym.vector.SyncVectorEnv(thunks, copy=False, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


def layer_init(layer, std=2**0.5):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Layers(nn.Sequential):
    def forward(self, x):  # without nn.Module.__call__ and its hooks, which take as long as such a layer
        for layer in self:
            x = layer.forward(x)
        return x


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()

        def mlp(outputs, std):
            hidden = [layer_init(nn.Linear(inputs, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()]
            return Layers(*hidden, layer_init(nn.Linear(64, outputs), std))

        inputs = int(np.prod(envs.single_observation_space.shape))
        self.choices = (len(envs.single_action_space.nvec), int(envs.single_action_space.nvec.max()))
        self.actor = mlp(np.prod(self.choices), std=0.01)
        self.critic = mlp(1, std=1.0)

    def get_value(self, obs):
        return self.critic(obs).squeeze(-1)

    def get_logits(self, obs):
        invalid = obs[:, : np.prod(self.choices)] == 0
        return self.actor(obs).masked_fill(invalid, torch.finfo(obs.dtype).min).unflatten(-1, self.choices)

    def get_action(self, obs, deterministic=False):
        logits = self.get_logits(obs)
        if not deterministic:  # Gumbel-max draw from the softmax
            logits = logits - torch.empty_like(logits).exponential_().log()
        return logits.argmax(-1)

    def evaluate(self, obs, action):
        logprobs = self.get_logits(obs).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum((-2, -1))
        return -nn.functional.nll_loss(logprobs.mT, action, reduction="none").sum(-1), entropy, self.get_value(obs)


def gae(rewards, values, next_value, dones, final_values, gamma, gae_lambda):
    """Generalised advantages (Schulman et al. 2016, eq. 16) of (num_steps, num_envs) arrays.

    What follows the end of an episode is worth `final_values`: V(final observation) if it was truncated, else zero.
    """
    advantages, advantage = np.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * np.where(dones[t], final_values[t], next_value) - values[t]
        advantages[t] = advantage = delta + gamma * gae_lambda * (1 - dones[t]) * advantage
        next_value = values[t]
    return advantages


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
    """The saved agent of a run, as a function from a batch of observations to a batch of actions."""
    agent = Agent(envs).to(device)
    agent.load_state_dict(load_file(Path(run_dir, "model.safetensors"), str(device)))
    return torch.no_grad()(
        lambda obs: agent.get_action(torch.tensor(obs, dtype=torch.float32, device=device), deterministic).cpu().numpy()
    )


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
        envs = make_envs(args.env_id, 1, args.seed)  # a first look, before anything is written
        envs.reset(seed=args.seed)
    except (gym.error.Error, ImportError) as error:
        fail(error)
    if len(envs.single_observation_space.shape or ()) != 1:
        fail(f"{args.env_id} needs vector observations; ppo_atari.py handles the images of Atari games")
    if args.capture_video and "rgb_array" not in envs.metadata.get("render_modes", []):
        fail(f"{args.env_id} cannot render images: leave --capture-video out")
    checkpoint = torch.load(Path(args.resume, "checkpoint.pt"), map_location="cpu") if args.resume else {}
    run_dir, writer = open_run(args, checkpoint.get("events", {}))

    # Seeding
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
    else:
        torch.set_num_threads(1)  # a thread pool slows networks of this size down

    # Environments
    envs = make_envs(args.env_id, args.num_envs, args.seed, args.capture_video, run_dir.resolve())

    # Agent and optimizer
    agent = Agent(envs).to(device)
    weights = flatten(agent)
    lr = torch.tensor(args.learning_rate, device=device)
    optimizer = torch.optim.Adam([weights], lr=lr, eps=1e-5, fused=True, capturable=device.type == "cuda")

    # Storage: environments fill NumPy arrays, networks read tensors on the device; a graph needs both to stay in place
    obs_shape = (args.num_steps, args.num_envs, *envs.single_observation_space.shape)
    obs = torch.zeros(obs_shape, dtype=torch.float32, pin_memory=device.type == "cuda").numpy()
    actions = np.zeros((args.num_steps, args.num_envs, *envs.single_action_space.shape), dtype=np.int64)
    rewards, dones, final_values = np.zeros((3, args.num_steps, args.num_envs), dtype=np.float32)
    act_obs, act_action = torch.tensor(obs[0], device=device), torch.tensor(actions[0], device=device)
    b_obs, b_actions = (torch.tensor(x, device=device).flatten(0, 1) for x in (obs, actions))
    b_logprobs, b_values, b_advantages, b_returns = torch.zeros((4, batch_size), device=device)
    mb_inds = torch.zeros(minibatch_size, dtype=torch.long, device=device)
    loss_names = ["value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac"]
    losses = torch.zeros(len(loss_names), device=device)  # sums over an update
    episode_returns, episode_lengths = np.zeros((2, args.num_envs))
    recent_returns = deque(maxlen=20)

    @torch.no_grad()
    def act():
        act_action.copy_(agent.get_action(act_obs))

    @torch.no_grad()
    def value(x):
        return agent.get_value(torch.as_tensor(x, dtype=b_obs.dtype, device=device)).cpu().numpy()

    def update():
        global ratio, pg_loss, v_loss, entropy_loss, approx_kl, loss
        newlogprob, entropy, newvalue = agent.evaluate(b_obs[mb_inds], b_actions[mb_inds])
        mb_values, mb_returns, mb_advantages = b_values[mb_inds], b_returns[mb_inds], b_advantages[mb_inds]
        if args.norm_adv:
            mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)

        logratio = newlogprob - b_logprobs[mb_inds]
        ratio = logratio.exp()
        clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
        pg_loss = -torch.min(mb_advantages * ratio, mb_advantages * clipped_ratio).mean()  # eq. 7
        v_error = (newvalue - mb_returns) ** 2
        if args.clip_vloss:
            clipped_value = mb_values + (newvalue - mb_values).clamp(-args.clip_coef, args.clip_coef)
            v_error = torch.max(v_error, (clipped_value - mb_returns) ** 2)
        v_loss = 0.5 * v_error.mean()
        entropy_loss = entropy.mean()
        loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss  # eq. 9

        weights.grad.zero_()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
        optimizer.step()
        with torch.no_grad():
            old_approx_kl = -logratio.mean()
            approx_kl = ((ratio - 1) - logratio).mean()  # estimator k3 of http://joschu.net/blog/kl-approx.html
            clipfrac = (ratio != clipped_ratio).float().mean()
            losses.add_(torch.stack([v_loss, pg_loss, entropy_loss, old_approx_kl, approx_kl, clipfrac]))

    if device.type == "cuda" and args.cuda_graphs:
        act, update = cuda_graph(act), cuda_graph(update)

    # Resume
    def save_checkpoint():
        writer.flush()
        state = {"global_step": global_step, "agent": agent.state_dict(), "optimizer": optimizer.state_dict()["state"]}
        state["rng"] = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if device.type == "cuda" else [])
        state["events"] = {file.name: file.stat().st_size for file in run_dir.glob("events*")}
        torch.save(state, run_dir / "unfinished.tmp")
        os.replace(run_dir / "unfinished.tmp", run_dir / "checkpoint.pt")

    global_step = 0
    if args.resume:
        global_step = checkpoint["global_step"]
        agent.load_state_dict(checkpoint["agent"])
        optimizer.load_state_dict(optimizer.state_dict() | {"state": checkpoint["optimizer"]})
        torch.set_rng_state(checkpoint["rng"][0])
        if device.type == "cuda" and len(checkpoint["rng"]) == 2:
            torch.cuda.set_rng_state(checkpoint["rng"][1])
    else:
        save_checkpoint()

    # Training loop
    start_time, start_step = time.perf_counter(), global_step
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
            actions[step] = act_action.cpu().numpy()
            next_obs, reward, terminated, truncated, infos = envs.step(actions[step])
            rewards[step], dones[step] = reward, terminated | truncated
            episode_returns += reward
            episode_lengths += 1
            cut = truncated & ~terminated
            if cut.any():
                final_values[step, cut] = value(np.stack(infos["final_obs"][cut]))
            for i in np.flatnonzero(dones[step]):  # environment i has made step number global_step + i + 1
                writer.add_scalar("charts/episodic_return", episode_returns[i], global_step + i + 1)
                writer.add_scalar("charts/episodic_length", episode_lengths[i], global_step + i + 1)
                recent_returns.append(episode_returns[i])
                episode_returns[i] = episode_lengths[i] = 0
            global_step += args.num_envs

        # Targets: the weights have not changed during the rollout, so one batch serves all its steps
        b_obs.copy_(torch.from_numpy(obs).flatten(0, 1))
        b_actions.copy_(torch.from_numpy(actions).flatten(0, 1))
        with torch.no_grad():
            b_logprobs[:], _, b_values[:] = agent.evaluate(b_obs, b_actions)
        values = b_values.cpu().numpy().reshape(rewards.shape)
        advantages = gae(rewards, values, value(next_obs), dones, final_values, args.gamma, args.gae_lambda)
        b_advantages.copy_(torch.from_numpy(advantages).flatten())
        b_returns.copy_(b_advantages + b_values)

        # Learn
        losses.zero_()
        for epoch in range(args.update_epochs):
            for inds in torch.randperm(batch_size, device=device).split(minibatch_size):
                mb_inds.copy_(inds)
                update()
            if args.target_kl is not None and approx_kl > args.target_kl:
                break

        # Log
        means = (losses / ((epoch + 1) * args.num_minibatches)).tolist()
        if not np.isfinite([*means, weights.sum().item()]).all():
            sys.exit(f"\nLosses are not finite at step {global_step}: {means}. Last good checkpoint: {run_dir}")
        for name, mean in zip(loss_names, means):
            writer.add_scalar(f"losses/{name}", mean, global_step)
        writer.add_scalar("losses/explained_variance", 1 - advantages.var() / (advantages + values).var(), global_step)
        writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"].item(), global_step)
        sps = (global_step - start_step) / (time.perf_counter() - start_time)
        writer.add_scalar("charts/SPS", int(sps), global_step)
        if sys.stdout.isatty() or iteration % (num_iterations // 100 + 1) == 0:
            report(global_step, args.total_timesteps, sps, recent_returns)

        # Checkpoint
        if stop_signals or global_step % args.checkpoint_freq < batch_size or iteration == num_iterations - 1:
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
