"""Play the saved model of a run: python -m cleanrl_utils.evaluate runs/CartPole-v1__ppo__1__1700000000 --episodes 10

`latest` is the newest run in runs/. The folder holds all that this takes: the copy of the script that made it, its
flags (args.json) and its weights (model.safetensors, written by --save-model; of a run that goes on or was stopped
those of its checkpoint). The script's copy is run, the weights are data. Each episode is played in an environment of
its own, with the seeds from --seed on; training began with those from the run's own seed on, one for each environment,
and the default is far from them. --deterministic takes the likeliest action, the mean or the best, --stochastic draws
actions or adds the noise of training; without either the file's own choice is kept. In games of two players the policy
plays both sides, or one in turn --against another run or random actions.

    python -m cleanrl_utils.evaluate --follow RUN [RUN ...]

evaluates each checkpoint as it appears, with the greedy policy: the mean return of --eval-episodes becomes a curve in
RUN/eval, the best model is kept in RUN/best; with --against in eval-against-OPPONENT and best-against-OPPONENT. RUN can
be a run folder, latest, or a folder of runs in which more may begin, as with the benchmark runner. It ends when all
runs have, or with Ctrl+C; the same command goes on where it was.

    from cleanrl_utils.evaluate import evaluate, evaluate_run
    returns = evaluate_run("runs/CartPole-v1__ppo__1__1700000000", episodes=10, deterministic=True)

plays a run as well, or raises CannotPlay, a ValueError; `evaluate` plays a model of which only the weights are there.
Exit codes: 0 played, 1 some of the runs that are followed cannot be, 2 wrong usage, such as a folder whose model cannot
be played, 130 Ctrl+C while following.
"""

import argparse
import inspect
import json
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack, closing, contextmanager
from glob import has_magic
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np

from cleanrl_utils import fail
from cleanrl_utils.runs.checkpoint import goes_on, with_model
from cleanrl_utils.runs.folder import run_folder
from cleanrl_utils.runs.follow import follow
from cleanrl_utils.runs.published import as_run, of_published
from cleanrl_utils.runs.window import Closed, NoWindow, Window

HELD_OUT = 2**30  # what the files add to a seed of training for their own evaluation
CHOOSING = 2**29  # what --follow adds: the best model is chosen on these seeds, so that others can judge it
FILMING = ("record_video", "record_game", "film_game", "film_match", "film_level", "film_episode")


class CannotPlay(ValueError):
    """Why a run cannot be played, in one line."""


def one_line(error):
    return " ".join(str(error).split())[:300]


def load_args(run_dir):
    try:
        args = json.loads(Path(as_run(run_dir, CannotPlay), "args.json").read_text())
    except ValueError:
        args = None
    if not isinstance(args, dict) or not isinstance(args.get("env_id"), str) or not isinstance(args.get("seed"), int):
        raise CannotPlay(f"{run_dir}: args.json does not hold the flags of a run")
    return args


def load_run(run_dir):
    """The script of a run folder as a module, and its flags."""
    run_dir = Path(run_dir)
    if not (run_dir / "args.json").is_file():
        raise CannotPlay(f"{run_dir} is not a run with a model, args.json is missing")
    if not (run_dir / "model.safetensors").is_file() and not goes_on(run_dir):
        hint = "model.safetensors and a checkpoint are missing: train with --save-model"
        raise CannotPlay(f"{run_dir} is not a run with a model, {hint}")
    scripts = list(run_dir.glob("*.py"))
    if len(scripts) != 1:
        raise CannotPlay(f"{run_dir} should hold one script, the copy that a run makes, and holds {len(scripts)}")
    args = load_args(run_dir)
    spec = spec_from_file_location(scripts[0].stem, scripts[0])
    module = sys.modules[spec.name] = module_from_spec(spec)
    try:
        import gymnasium

        if not hasattr(gymnasium.vector, "AutoresetMode"):
            version = gymnasium.__version__
            raise CannotPlay(f"gymnasium {version} is too old for {scripts[0].name}: pip install 'gymnasium>=1.2'")
        spec.loader.exec_module(module)
    except ImportError as error:
        raise CannotPlay(f"{scripts[0].name} needs a package that is not installed: {error}") from error
    if missing := [name for name in ("make_envs", "load_policy", "evaluate") if not hasattr(module, name)]:
        raise CannotPlay(f"{scripts[0].name} has no {missing[0]}, which it takes to play its model")
    return module, args


def default_device(module, cpu=False):
    """The device of a script's framework: the GPU if there is one, unless `cpu`."""
    if hasattr(module, "torch"):
        module.torch.set_num_threads(1)
        return module.torch.device("cuda" if module.torch.cuda.is_available() and not cpu else "cpu")
    return module.jax.devices("cpu" if cpu else None)[0]


def open_envs(module, args, **options):
    """The environments of a run; what they take beyond `options` is a flag (levels, ...) or has a default."""
    options = args | {"life_loss": False, "capture_video": False, "run_name": "", "video_dir": None} | options
    known = inspect.signature(module.make_envs).parameters
    try:
        return module.make_envs(**{name: options[name] for name in known if name in options})
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, module.gym.error.Error) as error:
        raise CannotPlay(one_line(error)) from error


def fitting(function):
    """A function of a model, with one error for all those of weights that do not fit; Flax has them at first use."""

    def call(*args, **options):
        try:
            return function(*args, **options)
        except Exception as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise CannotPlay(f"the model does not fit the script: {reason}") from error

    return call


def load_mode(module, run_dir, envs, device, deterministic=None):
    """The policy of a run in one of its modes, by default in the one that the file evaluates itself."""
    mode = {} if deterministic is None else {"deterministic": deterministic}
    if mode.keys() - inspect.signature(module.load_policy).parameters.keys():
        raise CannotPlay(f"{run_dir} was made by a version of {module.__name__}.py that has one mode only: name none")
    return fitting(fitting(module.load_policy)(Path(run_dir), envs, device, **mode))


@contextmanager
def filmed_episodes(module, args, run_dir, device, seed, deterministic, watched=lambda policy: policy):
    """A function that plays an episode and films it, and the folder of its films.

    Films are made by the means that the file has: a function of its own, or its environments.
    """
    if hasattr(module, "torch"):
        module.torch.manual_seed(seed)
    players = 2 if hasattr(module, "pettingzoo") else 1
    by_file = next((getattr(module, name) for name in FILMING if hasattr(module, name)), None)

    def opening(folder):  # files of older runs have capture_video and run_name
        options = {"num_envs": players, "seed": seed, "capture_video": not by_file, "run_name": folder}
        return options | {"video_dir": None if by_file else Path(folder, "videos")}

    with (  # the environments end first: what they are filming by then goes to the folder, too
        tempfile.TemporaryDirectory() as folder,
        closing(open_envs(module, args, **opening(folder))) as envs,
    ):
        if hasattr(module, "film_level"):  # Procgen's begin with a reset: before it there is nothing to close
            envs.reset(seed=seed)
        policy = watched(load_mode(module, run_dir, envs, device, deterministic))
        films = Path(folder, "videos")

        def episode():
            if by_file is None:
                module.evaluate(policy, envs, seed=seed)
                return
            options = {"policy": policy, "envs": envs, "env_id": args["env_id"], "seed": seed}
            options |= {"path": films / "film.mp4", "levels": {"distribution_mode": args.get("distribution_mode")}}
            by_file(**{name: options[name] for name in inspect.signature(by_file).parameters})

        yield episode, films


def film(module, args, run_dir, device, seed, deterministic, path):
    """Film an episode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with filmed_episodes(module, args, run_dir, device, seed, deterministic) as (episode, films):
        for _ in range(100):  # a file that makes clips of many steps may need several episodes for one
            episode()
            if made := sorted(films.glob("*.mp4")):
                shutil.move(made[0], path)
                return
    raise CannotPlay("100 episodes were too short for a clip: leave --capture-video out")


@contextmanager
def stand_in(name, module):
    """A module in place of another. What is imported meanwhile stays, as it would not with patch.dict."""
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


def watch(module, args, run_dir, device, seed, deterministic, window):
    """Show an episode in a window and return its return: what would film it shows each image instead."""
    returns, rewards, evaluate = [], [], module.evaluate

    class Shown(module.gym.Wrapper):  # in place of the wrapper that films
        def __init__(self, env, *_, **__):
            super().__init__(env)

        def reset(self, **options):
            result = super().reset(**options)
            window.show(self.env.render(), self.env.metadata.get("render_fps", 30))
            return result

        def step(self, action):
            result = super().step(action)
            rewards.append(result[1])
            window.show(self.env.render(), self.env.metadata.get("render_fps", 30))
            return result

    def watched(policy):  # the function of a file that films a game calls it where the images are
        def act(obs):
            if frames := sys._getframe(1).f_locals.get("frames"):
                window.show(np.ascontiguousarray(frames[-1]), 15)
                del frames[:-1]
            return policy(obs)

        return act

    def noted(*arguments, **options):
        returns.append(evaluate(*arguments, **options))
        return returns[-1]

    no_film = SimpleNamespace(ImageSequenceClip=lambda *_, **__: SimpleNamespace(write_videofile=lambda *_, **__: None))
    with (
        stand_in("moviepy", no_film),
        patch.object(module.gym.wrappers, "RecordVideo", Shown),
        patch.object(module, "evaluate", noted),
        filmed_episodes(module, args, run_dir, device, seed, deterministic, watched) as (episode, _),
    ):
        episode()
    players = 2 if hasattr(module, "pettingzoo") else 1
    return np.asarray(returns[0][:players] if returns else [sum(rewards)], dtype=float)


def check_filming(module, args, flag="--capture-video"):
    """End with one line what cannot be filmed, or shown in a window."""
    if flag == "--capture-video" and find_spec("moviepy") is None:
        raise CannotPlay("--capture-video needs moviepy: pip install moviepy")
    if "capture_video" not in args:
        raise CannotPlay(f"{module.__name__}.py cannot film: leave {flag} out")
    if any(hasattr(module, name) for name in FILMING):
        return
    if flag == "--render" and "RecordVideo" not in Path(module.__file__).read_text():
        raise CannotPlay(f"{module.__name__}.py shows no single images: film it with --capture-video")
    envs = open_envs(module, args, num_envs=1)
    if "rgb_array" not in getattr(envs, "metadata", {}).get("render_modes", []):
        if not hasattr(getattr(envs, "simulator", None), "render"):
            raise CannotPlay(f"{args['env_id']} cannot render images: leave {flag} out")
    envs.close()


@of_published(CannotPlay)
def evaluate_run(
    run_dir, episodes=10, seed=None, cpu=False, deterministic=None, capture_video=False, video_folder=None, against=None
):
    """The undiscounted returns of some episodes of the saved policy of a run; in games of two players, (episodes, 2).

    Such a policy plays both sides, or one in turn `against` another run of that game, or against "random" actions: its
    own returns are in the first column then.

    Where there is no model, or an older one, the policy is that of the checkpoint, which is said. `capture_video` films
    one more episode, with the seed of the first, as eval-SEED.mp4 in `video_folder` or the run's. What cannot be played
    raises CannotPlay.
    """
    if capture_video and sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")  # renders without a screen, if set before MuJoCo is imported
    module, args = load_run(run_dir)
    seed = args["seed"] + HELD_OUT if seed is None else seed
    first, last = args["seed"], args["seed"] + args.get("num_envs", args.get("local_num_envs", 1)) - 1
    if first - episodes < seed <= last:
        print(f"evaluate: seed {seed}: not held out, training began with seeds {first} to {last}", file=sys.stderr)
    device = default_device(module, cpu)
    args["cuda"] = args.get("cuda", True) and not cpu
    if capture_video:
        check_filming(module, args)
    with newest_model(run_dir) as (model_dir, step):
        if step is not None:
            print(f"Playing the checkpoint of step {step} of {args['total_timesteps']}")
        if capture_video:
            path = Path(video_folder or Path(run_dir, "videos"), f"eval-{seed}.mp4")
            try:
                film(module, args, model_dir, device, seed, deterministic, path)
            except (ImportError, OSError, module.gym.error.Error) as error:
                raise CannotPlay(f"--capture-video: {one_line(error)}") from error
            print(f"Film: {path}")
        return play(module, args, model_dir, device, seed, deterministic, episodes, against)


@contextmanager
def newest_model(run_dir):
    """As `with_model`, with one error for all checkpoints that cannot be played."""
    with ExitStack() as stack:
        try:
            found = stack.enter_context(with_model(run_dir))
        except ValueError as error:
            raise CannotPlay(one_line(error)) from error
        yield found


def play(module, args, model_dir, device, seed, deterministic, episodes, against=None):
    """The returns of some episodes, each in an environment of its own."""
    if hasattr(module, "torch"):
        module.torch.manual_seed(seed)
    players = 2 if hasattr(module, "pettingzoo") else 1
    if against and players == 1:
        raise CannotPlay(f"{module.__name__}.py plays alone: leave --against out")
    with closing(open_envs(module, args, num_envs=episodes * players, seed=seed)) as envs, ExitStack() as stack:
        policy = load_mode(module, model_dir, envs, device, deterministic)
        if against:
            opponent = load_opponent(against, args, envs, device, seed, deterministic, stack)
            seats = np.arange(episodes) % 2  # the side of the policy, game by game
            own = np.repeat(seats, 2) == np.arange(2 * episodes) % 2
            returns = module.evaluate(lambda obs: np.where(own, policy(obs), opponent(obs)), envs, seed=seed)
            return np.column_stack((returns[own], returns[~own]))
        returns = np.asarray(module.evaluate(policy, envs, seed=seed))
    return returns.reshape(-1, players) if players > 1 else returns


def load_opponent(against, args, envs, device, seed, deterministic, stack):
    """Who plays the other side: another run of the same game, or random actions."""
    if against == "random":
        rng = np.random.default_rng(seed)
        return lambda obs: rng.integers(envs.single_action_space.n, size=len(obs))
    module, other = load_run(against)
    if other["env_id"] != args["env_id"]:
        raise CannotPlay(f"--against {against} plays {other['env_id']}, not {args['env_id']}")
    model_dir, step = stack.enter_context(newest_model(against))
    if step is not None:
        print(f"Against the checkpoint of step {step} of {other['total_timesteps']}")
    return load_mode(module, model_dir, envs, device, deterministic)


def watch_run(run_dir, episodes=10, cpu=False, deterministic=None):
    """Show episodes of a run in a window, one after the other, as `evaluate_run` plays them; returns their returns.

    Fewer if the window is closed. Where there is no screen, or nothing to show, CannotPlay is raised.
    """
    if sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        with Window(str(run_dir)) as window:
            return np.array(list(watched_returns(as_run(run_dir, CannotPlay), episodes, cpu, deterministic, window)))
    except NoWindow as error:
        raise CannotPlay(f"--render: {error}, --capture-video films instead") from None


def watched_returns(run_dir, episodes, cpu, deterministic, window):
    """The return of each episode that is shown in a window until it is closed."""
    module, args = load_run(run_dir)
    args["cuda"] = args.get("cuda", True) and not cpu
    check_filming(module, args, "--render")
    with newest_model(run_dir) as (model_dir, step):
        if step is not None:
            print(f"Playing the checkpoint of step {step} of {args['total_timesteps']}")
        first = args["seed"] + HELD_OUT
        for seed in range(first, first + episodes):
            try:
                returns = watch(module, args, model_dir, default_device(module, cpu), seed, deterministic, window)
            except Closed:
                return
            yield returns[0] if len(returns) == 1 else returns


def follow_runs(paths, episodes, seed=None, cpu=False, deterministic=True, against=None):
    """Evaluate the checkpoints of runs as they appear, until all have ended; returns the exit code."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave the rest of the GPU to the runs
    loaded = {}

    def score(run_dir, model_dir):
        if run_dir not in loaded:
            loaded[run_dir] = load_run(run_dir)
        module, args = loaded[run_dir]
        first = args["seed"] + CHOOSING if seed is None else seed
        both = "deterministic" in inspect.signature(module.load_policy).parameters
        options = args | {"cuda": args.get("cuda", True) and not cpu}
        mode = deterministic if both else None
        returns = play(module, options, model_dir, default_device(module, cpu), first, mode, episodes, against)
        return returns[:, 0] if returns.ndim > 1 else returns  # of two players the first

    try:
        kind = f"-against-{Path(against).name}" if against else ""
        failed = follow(paths, score, say=lambda text: print(text, flush=True), kind=kind)
        print(f"All runs have ended{f', {len(failed)} could not be evaluated' if failed else ''}")
        return int(bool(failed))
    except ValueError as error:
        fail(error)
    except KeyboardInterrupt:
        print("Stopped. The same command goes on from here.")
        return 130


def evaluate(model_path, make_env, env_id, eval_episodes, run_name, Model, device, epsilon=0.05, capture_video=True):
    """The returns of some episodes of a model of which only the weights are there, such as one from a hub:

    from cleanrl.dqn import QNetwork, make_env
    evaluate("model.safetensors", make_env, "CartPole-v1", 10, "eval", QNetwork, device="cpu", epsilon=0.05)

    Works with the Q-networks of dqn.py and pqn.py, which then act at random at the rate `epsilon`, and with agents that
    have `get_action(obs)`, such as those of ppo.py and ppo_continuous_action.py, which draw their actions. Any other
    model: `evaluate_run`. Films go to runs/`run_name`/videos. Weights are read from safetensors only, nothing is
    unpickled.
    """
    import gymnasium as gym
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(model_path, str(device))
    except SafetensorError as error:
        raise ValueError(f"{model_path} is not a safetensors file, and nothing else is loaded: {error}") from None
    by_hand = gym.vector.AutoresetMode.DISABLED
    if "video_dir" in inspect.signature(make_env).parameters:
        thunk = make_env(env_id, 0, Path("runs", run_name, "videos") if capture_video else None)
    else:  # as published
        thunk = make_env(env_id, HELD_OUT, 0, capture_video, run_name)
    envs = gym.vector.SyncVectorEnv([thunk], autoreset_mode=by_hand)
    model = Model(envs).to(device)
    model.load_state_dict(weights)
    model.eval()
    rng = np.random.default_rng(HELD_OUT)

    @torch.no_grad()
    def act(obs):
        obs = torch.tensor(obs, dtype=torch.float32, device=device)
        if hasattr(model, "get_action"):
            return model.get_action(obs).cpu().numpy()
        q_values = model(obs)
        if q_values.shape != (1, getattr(envs.single_action_space, "n", None)):
            raise ValueError(f"{Model.__name__} does not return one value for each action: use evaluate_run")
        return rng.integers(q_values.shape[1], size=1) if rng.random() < epsilon else q_values.argmax(1).cpu().numpy()

    episodic_returns = []
    with torch.random.fork_rng([device] if "cuda" in str(device) else []):
        torch.manual_seed(HELD_OUT)
        for episode in range(eval_episodes):
            (obs, _), episodic_return, done = envs.reset(seed=HELD_OUT + episode), 0.0, False
            while not done:
                obs, (reward,), (terminated,), (truncated,), _ = envs.step(act(obs))
                episodic_return += float(reward)
                done = terminated or truncated
            print(f"eval_episode={episode}, episodic_return={episodic_return}")
            episodic_returns.append(episodic_return)
    envs.close()
    return episodic_returns


def check_output(path):
    """End now what could not be written after the episodes."""
    new = not os.path.exists(path)
    try:
        path.open("a").close()
    except OSError as error:
        fail(f"--output {path}: {error.strerror}")
    if new:
        path.unlink()


def main():
    style = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="python -m cleanrl_utils.evaluate", **style)
    parser.add_argument(
        "run_dir", nargs="?", metavar="RUN", help="run folder, such as runs/CartPole-v1__ppo__1__1700000000, or latest"
    )
    parser.add_argument("--follow", nargs="+", metavar="RUN", help="evaluate the checkpoints of runs as they appear")
    about = "episodes, one per environment (default: 10; in Godot one per agent)"
    parser.add_argument("--episodes", "--eval-episodes", type=int, default=10, help=about)
    about = "first seed, not used to train (default: that of the run plus 2**30, with --follow plus 2**29)"
    parser.add_argument("--seed", type=int, help=about)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--deterministic", action="store_true", help="take the likeliest action, the mean or the best")
    modes.add_argument("--stochastic", action="store_true", help="draw actions, or act with the noise of training")
    about = "of two players: random, or another run of the game, plays one side, in turn (default: both are the run's)"
    parser.add_argument("--against", metavar="OPPONENT", help=about)
    parser.add_argument("--capture-video", action="store_true", help="film an episode more, with the seed of the first")
    parser.add_argument("--video-folder", type=Path, help="folder of the film (default: videos/ of the run)")
    parser.add_argument("--output", type=Path, help="write the returns to this JSON file, too")
    parser.add_argument("--cpu", action="store_true", help="do not use the GPU")
    args = parser.parse_args()
    if args.episodes < 1:
        fail("--episodes must be at least 1")
    if (args.run_dir is None) == (args.follow is None):
        fail("evaluate what? A run folder, latest, or --follow with the runs whose checkpoints are to be evaluated")
    if args.against and (args.capture_video or args.video_folder):
        fail("--capture-video films the policy on both sides: leave --against out")
    if args.against not in (None, "random"):
        args.against = run_folder(args.against)
        try:
            load_run(args.against)
        except CannotPlay as error:
            fail(f"--against: {error}")
    if args.follow:
        if args.capture_video or args.video_folder or args.output:
            fail("--follow writes to RUN/eval and RUN/best: leave --capture-video, --video-folder and --output out")
        for path in args.follow:
            if path != "latest" and not has_magic(path) and not Path(path).is_dir():
                fail(f"--follow {path}: there is no such folder")
        mode = not args.stochastic
        sys.exit(follow_runs(args.follow, args.episodes, args.seed, args.cpu, mode, args.against))
    args.run_dir = run_folder(args.run_dir)
    if args.output:
        check_output(args.output)
    deterministic = args.deterministic if args.deterministic or args.stochastic else None
    others = {"capture_video": args.capture_video or bool(args.video_folder), "video_folder": args.video_folder}
    others["against"] = args.against
    try:
        returns = evaluate_run(args.run_dir, args.episodes, args.seed, args.cpu, deterministic, **others)
    except CannotPlay as error:
        fail(error)
    flags = load_args(args.run_dir)
    if flags.get("num_seeds", 1) > 1:
        print("Of the seeds that this run trained side by side, the first:")
    for i, episode in enumerate(returns):
        print(f"episode {i}: return {np.round(episode, 2)}")
    print(f"Mean return of {len(returns)} episodes: {np.round(returns.mean(0), 2)} +- {np.round(returns.std(0), 2)}")
    if args.against:
        won, lost = (int(ahead.sum()) for ahead in (returns[:, 0] > returns[:, 1], returns[:, 0] < returns[:, 1]))
        print(f"Against {args.against}: {won} won, {lost} lost, {len(returns) - won - lost} drawn")
    if args.output:
        seed = flags["seed"] + HELD_OUT if args.seed is None else args.seed
        result = {"run_dir": str(args.run_dir), "seed": seed, "deterministic": deterministic}
        result |= {"against": str(args.against)} if args.against else {}
        result |= {"returns": returns.tolist(), "mean": returns.mean(0).tolist(), "std": returns.std(0).tolist()}
        args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
