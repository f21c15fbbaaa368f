"""Publish a run on the Hugging Face hub, and get one from there.

    hf auth login    # once, or set HF_TOKEN: the token is on no command line and in no file of ours
    python -m cleanrl_utils.hub push runs/CartPole-v1__dqn__1__1700000000 --entity me
    python -m cleanrl_utils.hub pull me/CartPole-v1-dqn-seed1

A push is one commit: the model, the flags, the script, the command, packages and commit of the run, its events and
videos, and a model card; `push latest` takes the newest run in runs/. A second push of the same folder changes nothing.
Checkpoints stay at home; of a run that goes on or was stopped, the weights in its checkpoint are pushed as its model. A
pull takes only the files that a push writes: weights are safetensors, and nothing that is pickled travels in either
direction. A repository in the original's format (dqn.cleanrl_model) becomes a run folder with our script.
Exit codes: 0 done, 1 the hub refused or cannot be reached, 2 wrong usage.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from cleanrl_utils import fail
from cleanrl_utils.runs.card import card, repository_name
from cleanrl_utils.runs.checkpoint import goes_on, with_model
from cleanrl_utils.runs.folder import load_args, run_folder, script_of
from cleanrl_utils.runs.published import BESIDE, NotMapped, find_model, make_run

SCRIPTS = Path(__file__).resolve().parents[1] / "cleanrl"  # our own copies of the files
TRAVELS = re.compile(  # the files of a run that a repository holds; anything else is neither pushed nor pulled
    r"model\.safetensors|args\.json|[\w.-]+\.py|(command|packages|commit)\.txt|events\.out\.tfevents\.[\w.-]+"
    r"|curves\.npz|eval_returns\.npy|videos/[\w.-]+\.mp4|replay\.mp4|README\.md",
    re.ASCII,
)
KEYS = re.compile(rb"\bhf_[A-Za-z0-9]{20,}|\bwandb_v\d_\w{20,}")  # what keys of the hub and of W&B look like
OLD_KEYS = re.compile(rb"(?<!\w)[0-9a-f]{40}(?!\w)")  # older ones of W&B look like a commit


def library():
    """huggingface_hub, without progress bars in logs, over plain HTTP: its other way of sending hangs for minutes."""
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        fail('the hub needs a package: pip install -e ".[hub]", or pip install huggingface_hub')
    huggingface_hub.utils.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        huggingface_hub.utils.disable_progress_bars()
    return huggingface_hub


def failure(error):
    """What an error of huggingface_hub is about: an HTTP status, 0 for a broken connection, None for anything else."""
    while error is not None:
        if getattr(error, "response", None) is not None:
            return error.response.status_code
        network = type(error).__module__.split(".")[0] in ("httpx", "httpx2", "requests")
        if network or isinstance(error, (ConnectionError, TimeoutError)):
            return 0
        error = error.__cause__ or error.__context__
    return None


def explain(hf, error, status):
    """One line on an error that no further try will mend, without the token; None if it is not one of the hub's."""
    login = "log in with `hf auth login`, or set HF_TOKEN"
    if isinstance(error, hf.errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so the hub is not asked"
    if isinstance(error, hf.errors.RevisionNotFoundError):
        return "there is no such revision"
    if isinstance(error, hf.errors.RepositoryNotFoundError) or status == 404:
        return f"there is no such repository, or it is private: {login}"
    if status == 401 or isinstance(error, hf.errors.LocalTokenNotFoundError):
        return f"there is no valid token: {login} to a token that may write"
    if status == 403:
        return f"the token does not allow it: name your own --entity, or {login} to a token that may"
    if status == 0:
        return "the hub cannot be reached; check the network (and HF_ENDPOINT, if it is set)"
    if status is None and not isinstance(error, (OSError, ValueError)):
        return None
    message = " ".join(str(error).split()).replace(hf.get_token() or "\0", "...")
    return f"the hub answers {status}: {message}" if status else message


def patiently(action, what, retries):
    """The result of `action`, tried again where that can help: a broken connection, a busy or a broken hub."""
    hf = library()
    for attempt in range(retries + 1):
        try:
            return action()
        except Exception as error:
            status = failure(error)
            passing = status is not None and (status in (0, 429) or status >= 500)
            if passing and attempt < retries:
                reason = f"answers {status}" if status else "cannot be reached"
                print(f"The hub {reason}, another try in {2**attempt} s ({attempt + 1} of {retries})", file=sys.stderr)
                time.sleep(2**attempt)
            elif line := explain(hf, error, status):
                fail(f"{what}: {line}", 2 if isinstance(error, hf.errors.HFValidationError) else 1)
            else:
                raise


def check_run(run_dir):
    """A clear end if a folder is no run with a model or a checkpoint."""
    if not (run_dir / "args.json").is_file():
        fail(f"{run_dir} is not a run with a model, args.json is missing")
    if not (run_dir / "model.safetensors").is_file() and not goes_on(run_dir):
        hint = "model.safetensors and a checkpoint are missing: train with --save-model"
        fail(f"{run_dir} is not a run with a model, {hint}")
    script_of(run_dir)


def collect(run_dir, model):
    """What a run folder gives to its repository: path there -> file, or a clear end if it is not to be published."""
    paths = sorted([*run_dir.glob("*"), *run_dir.glob("videos/*")])
    files = {path.relative_to(run_dir).as_posix(): path for path in paths if path.is_file()}
    files["model.safetensors"] = model
    for name in files:
        if name.endswith(".py") or name.startswith("events"):
            if not TRAVELS.fullmatch(name):
                fail(f"{run_dir} has {name!r}, which would not travel: rename it, to letters, digits, '.', '_' and '-'")
    files = {name: path for name, path in files.items() if TRAVELS.fullmatch(name)}
    videos = [path for name, path in files.items() if name.startswith("videos/")]
    if videos:  # a film of an evaluation is eval-SEED.mp4, those of training are named by time and episode
        numbers = {path: [int(number) for number in re.findall(r"\d+", path.name)] for path in videos}
        files["replay.mp4"] = max(videos, key=lambda path: (path.name.startswith("eval-"), numbers[path]))
    own = [key.encode() for key in (library().get_token(), os.environ.get("WANDB_API_KEY")) if key]
    for name, path in files.items():
        data = path.read_bytes()
        if any(key in data for key in own) or (not name.endswith((".mp4", ".safetensors")) and KEYS.search(data)):
            fail(f"{path} holds what looks like a key of the hub or of W&B: nothing was pushed. Take it out, revoke it")
        if name in ("args.json", "command.txt") and OLD_KEYS.search(data):
            fail(f"{path} holds 40 hexadecimal digits, as a key of W&B has: nothing was pushed. Take them out")
    return files


def push(run_dir, entity=None, repo_id=None, private=False, retries=4):
    """Push a run; returns the name of its repository and whether anything changed there."""
    hf, run_dir = library(), Path(run_dir)
    check_run(run_dir)
    with ExitStack() as stack:
        try:
            folder, step = stack.enter_context(with_model(run_dir))
        except ValueError as error:
            fail(error)
        files, args, api = collect(run_dir, folder / "model.safetensors"), load_args(run_dir), hf.HfApi()
        named = {flag: args[flag] for flag in ("env_id", "exp_name", "seed")}
        name = repository_name(**named)

        def attempt():
            target = repo_id or f"{entity or api.whoami()['name']}/{name}"
            sources = files | {"README.md": card(run_dir, target, step).encode()}
            return target, send(hf, api, target, sources, private, f"Push {run_dir.resolve().name}")

        return patiently(attempt, f"push {run_dir}", retries)


def send(hf, api, name, sources, private, message):
    """Make one commit of path -> file, without what another run has left there; returns whether it changed anything."""
    api.create_repo(name, private=private or None, exist_ok=True)
    before = api.model_info(name)
    if private and not before.private:
        fail(f"{name} exists and is public: make it private on the hub, or leave --private out")
    there = {sibling.rfilename for sibling in before.siblings}
    changes = [hf.CommitOperationAdd(path, source) for path, source in sources.items()]
    # of an earlier run with this name, whose events would mix with these
    stale = sorted(path for path in there - sources.keys() if TRAVELS.fullmatch(path))
    changes += [hf.CommitOperationDelete(path) for path in stale]
    return api.create_commit(name, changes, commit_message=message).oid != before.sha


def find(repo_id, revision=None, retries=4):
    """The commit that a revision of a repository is, and the paths there."""
    info = patiently(lambda: library().HfApi().model_info(repo_id, revision=revision), repo_id, retries)
    return info.sha, [sibling.rfilename for sibling in info.siblings]


def download(repo_id, commit, paths, retries=4, travels=TRAVELS):
    """A folder of the hub's cache with some files of a commit; only those that a push writes."""
    wanted = [path for path in paths if travels.fullmatch(path)]
    get = lambda: library().snapshot_download(repo_id, revision=commit, allow_patterns=wanted)  # noqa: E731
    return Path(patiently(get, repo_id, retries))


def convert(repo_id, commit, paths, folder, env_id=None, exp_name=None, retries=4):
    """Make a run folder of a repository in the original's format; the script in it is ours."""
    model = find_model(paths, exp_name)
    wanted = re.compile("|".join(map(re.escape, (model, *BESIDE))))
    source = download(repo_id, commit, paths, retries, wanted)
    try:
        script = make_run(source, folder, model, repo_id.split("/")[-1], env_id, exp_name)
    except NotMapped as error:
        fail(f"{repo_id}: {error}")
    print(f"{repo_id} holds {model}, a model in the original's format, which our {script}.py plays")


def need_model(repo_id, paths):
    """The scripts that a repository holds, at most one; a clear end unless it holds a model as data."""
    if {"model.safetensors", "args.json"} <= set(paths):
        scripts = [path for path in paths if path.endswith(".py") and TRAVELS.fullmatch(path)]
        if len(scripts) > 1:
            fail(f"{repo_id} should hold one script, the copy that a run makes, and holds {len(scripts)}")
        return scripts
    pickles = [path for path in paths if path.endswith((".pth", ".pt", ".pkl", ".cleanrl_model", ".bin", ".msgpack"))]
    why = (
        f" To load a pickle, as {pickles[0]!r} may be, is to run the code in it: it is not touched." if pickles else ""
    )
    fail(f"{repo_id} holds no model.safetensors with args.json, as `hub push` writes them.{why}")


def copy(repo_id, commit, paths, folder, retries=4):
    """Copy what a push writes from a repository into a folder."""
    paths = [path for path in paths if TRAVELS.fullmatch(path)]
    source = download(repo_id, commit, paths, retries)
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, folder / path)


def foreign(script):
    """What to say of a downloaded script: None if it is the same as ours."""
    ours = SCRIPTS / script.name
    if ours.is_file() and ours.read_bytes() == script.read_bytes():
        return None
    return f"differs from cleanrl/{script.name} here" if ours.is_file() else "is not one of ours"


def pull(repo_id, revision=None, output=None, retries=4):
    """Copy a repository into a run folder, or make one of it; the folder appears when it is complete."""
    folder = Path(output or Path("runs", repo_id.split("/")[-1]))
    if folder.exists():
        fail(f"{folder} is there already: name another folder with --output")
    commit, paths = find(repo_id, revision, retries)
    take = convert if find_model(paths) else copy
    if take is copy:
        need_model(repo_id, paths)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        unfinished = Path(temporary, "run")
        take(repo_id, commit, paths, unfinished, retries=retries)
        os.replace(unfinished, folder)
    return folder, commit


def main(argv=None):
    style = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="python -m cleanrl_utils.hub", **style)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("push", help="publish a run", description="Publish a run with a model or a checkpoint.")
    one.add_argument("run_dir", help="run folder, such as runs/CartPole-v1__ppo__1__1700000000, or latest")
    one.add_argument("--entity", help="user or organisation (default: the owner of the token)")
    one.add_argument("--repo-id", help="repository (default: ENTITY/<env_id>-<exp_name>-seed<seed>)")
    one.add_argument("--private", action="store_true", help="make a new repository private")
    two = commands.add_parser("pull", help="get a run", description="Download a run into a run folder.")
    two.add_argument("repo_id", help="repository, such as me/CartPole-v1-dqn-seed1")
    two.add_argument("--revision", help="branch, tag or commit (default: main)")
    two.add_argument("--output", type=Path, help="folder to make (default: runs/<name of the repository>)")
    for command in (one, two):
        command.add_argument("--retries", type=int, default=4, help="further tries, after 1, 2, 4, ... s (default: 4)")
    args = parser.parse_args(argv)
    if args.retries < 0:
        fail("--retries must be at least 0")
    if args.command == "push":
        args.run_dir = run_folder(args.run_dir)
        name, changed = push(args.run_dir, args.entity, args.repo_id, args.private, args.retries)
        print(f"{args.run_dir} is in {name}" + ("" if changed else ": nothing has changed"))
        return
    folder, commit = pull(args.repo_id, args.revision, args.output, args.retries)
    print(f"{args.repo_id} (commit {commit}) is in {folder}")
    for script in filter(foreign, folder.glob("*.py")):
        print(
            f"Beware: {script.name} in it {foreign(script)}. It is code of whoever pushed it; evaluate and reproduce"
            " run it: read it first, or play the model with our own script (python -m cleanrl_utils.enjoy)."
        )


if __name__ == "__main__":
    main()
