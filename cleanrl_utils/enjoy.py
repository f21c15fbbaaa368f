"""Play a trained model: python -m cleanrl_utils.enjoy --exp-name dqn --env-id CartPole-v1

What is kept in benchmark/models is played from there, without a network. `enjoy latest` plays the newest run in runs/,
`enjoy RUN` any run folder of this machine, as evaluate does. Any other model is looked for on the Hugging Face hub, in
<hf-entity>/<env_id>-<exp_name>-seed<seed>, where `python -m cleanrl_utils.hub push` puts it. Only data of that
repository is used, the weights (safetensors) and the flags (args.json): the script that plays them is our own file of
the same name. Where that is not the script that the model came with, this is said, and --trust-remote-code plays it
with the latter, which is code of whoever pushed it. A model in the original's format (dqn.cleanrl_model) is read as
data, too, and our file plays it. Any other that is only there as a pickle is refused: to load a pickle is to run the
code in it.
Exit codes: 0 played, 1 the hub refused or cannot be reached, 2 wrong usage.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from cleanrl_utils import fail
from cleanrl_utils.evaluate import CannotPlay, evaluate_run, watch_run
from cleanrl_utils.hub import SCRIPTS, convert, download, find, need_model
from cleanrl_utils.runs.card import repository_name
from cleanrl_utils.runs.folder import load_args, run_folder
from cleanrl_utils.runs.published import find_model
from cleanrl_utils.runs.zoo import FILES, MODELS, kept


def choose_script(repo_id, downloaded, exp_name, trust):
    """The script that plays a model: our own, or the downloaded one if that is trusted."""
    if downloaded and trust:
        print(f"Playing with the script of {repo_id}, which is code of whoever pushed it")
        return downloaded
    ours = SCRIPTS / (downloaded.name if downloaded else f"{exp_name}.py")
    if not ours.is_file():
        fail(f"{repo_id} needs {ours.name}, which is not one of ours: read it, then --trust-remote-code runs it")
    if downloaded and downloaded.read_bytes() != ours.read_bytes():
        print(f"{ours.name} of {repo_id} differs from ours; ours plays it (--trust-remote-code: the other one)")
    return ours


def check_flags(repo_id, args, env_id, trust):
    """A clear end if the flags of a downloaded run lead elsewhere than the user asked."""
    if args["env_id"] != env_id:
        fail(f"{repo_id} holds a run of {args['env_id']!r}, not of {env_id}: name with --env-id what you want to play")
    if args.get("env_path") and not trust:
        fail(f"{repo_id} would start the program {args['env_path']!r}: --trust-remote-code allows it")


def fetch(repo_id, revision, env_id, exp_name, folder, trust=False):
    """Make a run folder of a repository's data and the script that is to play it."""
    commit, paths = find(repo_id, revision)
    if find_model(paths, exp_name):
        return convert(repo_id, commit, paths, folder, env_id, exp_name)
    scripts = need_model(repo_id, paths)
    source = download(repo_id, commit, ["args.json", "model.safetensors", *scripts])
    check_flags(repo_id, load_args(source), env_id, trust)
    script = choose_script(repo_id, source / scripts[0] if scripts else None, exp_name, trust)
    folder.mkdir(parents=True, exist_ok=True)
    for path in (source / "args.json", source / "model.safetensors", script):
        shutil.copyfile(path, folder / path.name)


def main(argv=None):
    style = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="python -m cleanrl_utils.enjoy", **style)
    parser.add_argument("run_dir", nargs="?", metavar="RUN", help="run folder, or latest, instead of the hub's model")
    parser.add_argument("--exp-name", help="name of the experiment, such as dqn")
    parser.add_argument("--env-id", help="environment, such as CartPole-v1")
    parser.add_argument(
        "--seed",
        type=int,
        help="seed that the model was trained with (default: of the model that is kept here, else 1)",
    )
    parser.add_argument(
        "--hf-entity", help="user or organisation of the hub (default: none where the model is kept here, else cleanrl)"
    )
    parser.add_argument(
        "--repo-id", help="repository, if its name is another one than ENTITY/<env_id>-<exp_name>-seed<seed>"
    )
    parser.add_argument("--revision", help="branch, tag or commit (default: main)")
    parser.add_argument("--episodes", "--eval-episodes", type=int, default=10, help="episodes to play (default: 10)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--deterministic", action="store_true", default=None, help="take the likeliest action, the mean or the best"
    )
    mode.add_argument(
        "--stochastic",
        action="store_false",
        dest="deterministic",
        help="draw actions, or act with the noise of training",
    )
    parser.add_argument("--render", action="store_true", help="show the episodes in a window, where there is a screen")
    parser.add_argument("--capture-video", action="store_true", help="film an episode, into a folder under runs/")
    parser.add_argument("--cpu", action="store_true", help="do not use the GPU")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the script of the repository")
    args = parser.parse_args(argv)
    if args.episodes < 1:
        fail("--episodes must be at least 1")
    if args.run_dir is None and not (args.exp_name and args.env_id):
        fail("play what? A run folder or latest, or --exp-name and --env-id for a model from the hub")
    if args.run_dir is not None and (args.exp_name or args.env_id or args.repo_id):
        fail(f"either the run {args.run_dir}, or --exp-name and --env-id for a model from the hub")
    if args.render and args.capture_video:
        fail("--render shows episodes in a window, --capture-video films one: choose one of them")
    with tempfile.TemporaryDirectory() as temporary:
        returns = enjoy(place(args, temporary), args)
    if not len(returns):
        print("The window was closed before an episode had ended")
        return
    for i, episode in enumerate(returns):
        print(f"episode {i}: return {np.round(episode, 2)}")
    print(f"Mean return of {len(returns)} episodes: {np.round(returns.mean(0), 2)} +- {np.round(returns.std(0), 2)}")


def place(args, temporary):
    """The run folder that is to be played: of this machine, or made of what is on the hub."""
    if args.run_dir is not None:
        return run_folder(args.run_dir)
    of_hub = args.hf_entity or args.repo_id or args.revision
    here = [] if of_hub else kept(args.env_id, args.exp_name, args.seed)
    name = here[0].name if here else repository_name(args.env_id, args.exp_name, 1 if args.seed is None else args.seed)
    # one with a film is kept
    folder = Path("runs", f"{name}__enjoy__{int(time.time())}") if args.capture_video else Path(temporary)
    if here:
        print(f"Playing benchmark/models/{name}; --hf-entity plays one of the hub")
        folder.mkdir(parents=True, exist_ok=True)
        for source in (*(MODELS / name / file for file in FILES), SCRIPTS / f"{args.exp_name}.py"):
            shutil.copyfile(source, folder / source.name)
        return folder
    repo_id = args.repo_id or f"{args.hf_entity or 'cleanrl'}/{name}"
    fetch(repo_id, args.revision, args.env_id, args.exp_name, folder, args.trust_remote_code)
    return folder


def enjoy(folder, args):
    """The returns of the episodes that were asked for, or one line why there are none."""
    options = {} if args.deterministic is None else {"deterministic": args.deterministic}
    options |= {"capture_video": True} if args.capture_video else {}
    try:
        if args.render:
            return watch_run(folder, args.episodes, args.cpu, args.deterministic)
        return evaluate_run(folder, args.episodes, cpu=args.cpu, **options)
    except CannotPlay as error:
        fail(error)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        fail(f"the model does not fit the script: {type(error).__name__}: {reason[:300]}")


if __name__ == "__main__":
    main()
