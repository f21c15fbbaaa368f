"""Repeat a run: python -m cleanrl_utils.reproduce runs/CartPole-v1__ppo__1__1700000000

Prints what it takes: the commit, the packages and where those here differ, the command. --run does it with what is
installed here: the script's copy in the run folder with the same arguments makes a new run folder, under runs/ of the
current folder, and every scalar of the two but timings is compared. On the CPU of one machine they are the same bit by
bit. --steps N stops the second run after N steps, on the schedules of the whole run, and compares up to there.
--compare RUN_A RUN_B compares two runs and runs nothing. `latest` is the newest run in runs/.
In place of a folder, a repository of the Hugging Face hub can be named (me/CartPole-v1-ppo-seed1). Then --run takes our
own script of that name, or with --trust-remote-code that of the repository, which is code of whoever pushed it.
Exit codes: 0 printed or identical, 1 the second run or the hub failed, 2 wrong usage, 3 the curves differ.
"""

import argparse
import re
import shlex
import signal
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import numpy as np

from cleanrl_utils import fail
from cleanrl_utils.hub import SCRIPTS, TRAVELS, download, find, need_model
from cleanrl_utils.runs.events import read_scalars
from cleanrl_utils.runs.folder import arguments, load_args, run_folder, script_flags, script_of

TIMINGS = re.compile("SPS|compile_time")
ELSEWHERE = "track", "upload_model"  # flags with which a run leaves the machine
NAMES = {
    "env_id",
    "exp_name",
    "hf_entity",
    "teacher_model_exp_name",
    "wandb_entity",
    "wandb_project_name",
}  # not of files


def read(run_dir, name):
    """A text of a run folder, empty if it is not there."""
    return Path(run_dir, name).read_text(errors="replace") if Path(run_dir, name).is_file() else ""


def same_name(package):
    return re.sub("[-_.]+", "-", package).lower()


def recorded_packages(run_dir):
    """name -> version, of what was installed; nothing else may be in that file, which pip is to read."""
    lines = read(run_dir, "packages.txt").split()
    odd = [line for line in lines if not re.fullmatch(r"[A-Za-z0-9][\w.-]*==[\w.+!-]+", line)]
    if odd:
        fail(f"{run_dir}/packages.txt holds more than packages and versions: {odd[0]!r}")
    return dict(line.split("==") for line in lines)


def compare_packages(run_dir):
    """Lines on the packages of a run beside those of this Python: those that its script names, then all that differ."""
    then = recorded_packages(run_dir)
    now = {same_name(package.name): package.version for package in distributions()}
    header = re.search(r"(?m)^# /// script\n(?:#.*\n)*?# ///$", script_of(run_dir).read_text())
    direct = {same_name(name) for name in re.findall(r'"([A-Za-z][\w.-]*)', header[0] if header else "")}
    named = [f"{name} {version}" for name, version in then.items() if same_name(name) in direct]
    if not then:
        yield "# Warning: the packages were not recorded"
    elif named:
        yield f"# it ran with {', '.join(named)}"
    differing = [name for name in then if now.get(same_name(name)) != then[name] and same_name(name) != "cleanrl"]
    for name in sorted(differing, key=lambda name: (same_name(name) not in direct, name)):
        yield f"#   differs here: {name} {then[name]} then, {now.get(same_name(name), 'not installed')} now"
    if then and not differing:
        yield f"# all {len(then)} packages are the same here"
    local = [name for name, version in then.items() if "+" in version]
    if local:
        yield f"# {', '.join(local)}: of builds that pip finds where its configuration names their index"


def git(*words):
    return subprocess.run(["git", "-C", str(SCRIPTS.parent), *words], capture_output=True)


def source_lines(run_dir):
    """Lines on where the script of a run is to be had: the commit, or the copy in the folder."""
    script, commit = script_of(run_dir), read(run_dir, "commit.txt").strip()
    if not re.fullmatch("[0-9a-f]{40,64}", commit):
        yield f"# Warning: no commit was recorded; the script is {script}"
        return
    then = git("show", f"{commit}:cleanrl/{script.name}")
    if then.returncode:
        yield f"# Warning: commit {commit} or its cleanrl/{script.name} is not in this clone: git fetch"
    elif then.stdout.replace(b"\r\n", b"\n") != script.read_bytes().replace(b"\r\n", b"\n"):
        yield f"# Warning: the script that ran is not that of its commit, it was edited: cp {script} cleanrl/"
    yield f"git checkout {commit}"


def plan(run_dir):
    """Print what it takes to repeat a run."""
    args, script = load_args(run_dir), script_of(run_dir)
    print(f"# {script.name} on {args['env_id']!r}, seed {args['seed']!r}")
    for line in notes(run_dir):
        print(f"# Warning: {line}")
    print("\n# 1. the source, in a clone", *source_lines(run_dir), sep="\n")
    print("\n# 2. the packages", *compare_packages(run_dir), sep="\n")
    packages = shlex.quote(str(Path(run_dir, "packages.txt")))
    print("python -m venv .venv-again && . .venv-again/bin/activate")
    print(f"grep -v '^cleanrl==' {packages} > requirements.txt && pip install -r requirements.txt")
    sent = [f"--{flag.replace('_', '-')}" for flag in ELSEWHERE if args.get(flag)]
    print("\n# 3. the command" + (f", which sends things elsewhere with {' and '.join(sent)}" if sent else ""))
    print(shlex.join(["python", f"cleanrl/{script.name}", *arguments(run_dir)]))


def notes(run_dir):
    """What stands against identical curves."""
    resumes = len(read(run_dir, "command.txt").splitlines()) - 1
    if resumes > 0:
        yield f"this run was resumed ({resumes}x): environments begin new episodes then, so curves differ after that"
    if "WORLD_SIZE" in script_of(run_dir).read_text():
        yield "this script can run in several processes: start it with the same `torchrun --nproc-per-node` as then"


def run_again(run_dir, script, steps):
    """Run a script with the arguments of a run; returns the new run folder."""
    args, words = load_args(run_dir), arguments(run_dir)
    for flag in ELSEWHERE:  # a repetition is nobody else's business
        words += [f"--no-{flag.replace('_', '-')}"] if f"    {flag}: bool" in script.read_text() else []
    words += ["--save-model"] if args.get("save_model") else []  # which --upload-model implies
    command = [sys.executable, str(script), *words]
    print(f"+ {shlex.join(command)}", flush=True)
    process, folder, stopping = subprocess.Popen(command, stdout=subprocess.PIPE, text=True), None, False
    for line in process.stdout:
        print(line, end="", flush=True)
        if found := re.match(r"(?:The run is in|Stopped at .* --resume) (.+?)(?:\. To look at it.*)?$", line):
            folder = Path(found[1])
        progress = re.match(r"(?:\[[# ]+\]| *\d+ %) +step (\d+)/", line)  # older files draw a bar
        if steps and progress and int(progress[1]) >= steps and not stopping:
            stopping = True
            process.terminate()  # it writes what it has and ends with 75
    code = process.wait()
    if code not in ((0, 75) if steps else (0,)) or folder is None:
        fail(f"the second run ended with exit code {code}" + ("" if folder else " and made no run folder"), 1)
    return folder


def first_difference(one, other):
    """Where two curves, rows of (step, value), first differ: (step, value, value), or None; NaN equals NaN."""
    rows = min(len(one), len(other))
    same = (one[:rows] == other[:rows]) | (np.isnan(one[:rows]) & np.isnan(other[:rows]))
    if not same.all():
        row = np.flatnonzero(~same.all(1))[0]
        return min(one[row, 0], other[row, 0]), one[row], other[row]
    if len(one) != len(other):
        row = (one if len(one) > rows else other)[rows]
        return row[0], *((row, None) if len(one) > rows else (None, row))
    return None


def compare(one, other, steps=None):
    """Print whether the scalars of two runs are the same, timings left out; returns whether they are."""
    curves = []
    for folder in (one, other):
        scalars = {tag: rows for tag, rows in read_scalars(folder).items() if not TIMINGS.search(tag)}
        if steps:  # the evaluation comes at the end
            scalars = {tag: rows[rows[:, 0] <= steps] for tag, rows in scalars.items() if not tag.startswith("eval/")}
        curves.append({tag: rows for tag, rows in scalars.items() if len(rows)})
    nothing = np.zeros((0, 2))
    tags = sorted(curves[0].keys() | curves[1].keys())
    differences = {tag: first_difference(*(curve.get(tag, nothing) for curve in curves)) for tag in tags}
    differences = {tag: difference for tag, difference in differences.items() if difference}
    for folder, curve in zip((one, other), curves):
        for tag, rows in curve.items():
            if tag.startswith("charts/episodic_return"):
                print(f"{folder}: {tag} {rows[-100:, 1].mean():.2f}, mean of the last {len(rows[-100:])} episodes")
    total = sum(map(len, curves[0].values()))
    if not total:
        print("different: there is nothing to compare" + (f" up to step {steps}" if steps else ""))
        return False
    if not differences:
        print(f"identical: {total} values of {len(tags)} curves" + (f" up to step {steps}" if steps else ""))
        return True
    tag = min(differences, key=lambda tag: (tag.startswith("eval/"), differences[tag][0]))  # eval counts episodes
    step, *rows = differences[tag]
    values = [f"{row[1]:.9g}" if row is not None else "no value" for row in rows]
    print(
        f"different: {len(differences)} of {len(tags)} curves; first {tag} at step {step:.0f}: {values[0]}, {values[1]}"
    )
    return False


def fetch(repo_id, revision):
    """The folder of a repository's files in the hub's cache."""
    commit, paths = find(repo_id, revision)
    need_model(repo_id, paths)
    folder = download(repo_id, commit, [path for path in paths if TRAVELS.fullmatch(path)])
    if not read(folder, "command.txt").replace("\n", "").isprintable():
        fail(f"{repo_id}: command.txt is not a command")
    print(f"# The script, the packages and the command of {repo_id} are those of whoever pushed it: read them first")
    return folder


def harmless(word, flags):
    """Whether a word of a stranger's command is a flag of our script, or a value, that leads to no file and no code.

    Numbers and switches do not, and of the flags that take text only NAMES. A script splits words at line breaks.
    """
    if ":" in word or not word.isprintable():  # module:Env-v0 imports the module
        return False
    if not word.startswith("-") or re.match(r"-[\d.]", word):
        return True
    name = word.removeprefix("--").split("=")[0].replace("-", "_")
    kind = flags.get(name, flags.get(name.removeprefix("no_"), "str"))
    return "str" not in kind or name in NAMES & flags.keys()


def script_to_run(target, run_dir, local, trust):
    """The script that repeats a run: its own copy; for one from the hub ours, unless its code is trusted."""
    script = script_of(run_dir)
    if local or trust:
        return script
    ours = SCRIPTS / script.name
    if not ours.is_file():
        fail(f"{target} needs {script.name}, which is not one of ours: read it, then --trust-remote-code runs it")
    flags = script_flags(ours)
    for word in arguments(run_dir):
        if not harmless(word, flags):
            fail(
                f"{target}: {word!r} is not a flag of our {script.name}, or may lead to a module, a program or a file:"
                " --trust-remote-code lets it run"
            )
    if ours.read_bytes() != script.read_bytes():
        print(f"Warning: {script.name} of {target} differs from ours, which runs (--trust-remote-code: the other one)")
    return ours


def main(argv=None):
    style = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="python -m cleanrl_utils.reproduce", **style)
    parser.add_argument("run", nargs="?", help="folder of a run, latest, or repository of the hub")
    parser.add_argument("--run", action="store_true", dest="again", help="run it again and compare the curves")
    parser.add_argument("--steps", type=int, help="with --run: stop after these environment steps")
    parser.add_argument("--compare", nargs=2, metavar=("RUN_A", "RUN_B"), help="compare two runs")
    parser.add_argument("--revision", help="branch, tag or commit of the repository (default: main)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the script of the repository")
    args = parser.parse_args(argv)
    if (args.run is None) == (args.compare is None):
        parser.error("name either a run or --compare RUN_A RUN_B")
    if args.steps is not None and (args.steps < 1 or not args.again):
        parser.error("--steps must be at least 1 and goes with --run")
    args.compare = args.compare and [run_folder(name) for name in args.compare]
    args.run = str(run_folder(args.run)) if args.run == "latest" else args.run
    for folder in args.compare or ():
        if not any(folder.glob("events*")):
            fail(f"{folder} is not a run folder, it has no events")
    if args.compare:
        sys.exit(0 if compare(*args.compare) else 3)
    local = Path(args.run).is_dir()
    if not local and (args.run.startswith("runs/") or not re.fullmatch(r"[\w.-]+/[\w.-]+", args.run)):
        fail(f"there is no folder {args.run}, and it is not the name of a repository, such as me/CartPole-v1-ppo-seed1")
    run_dir = Path(args.run) if local else fetch(args.run, args.revision)
    if not (run_dir / "args.json").is_file():
        fail(f"{run_dir} is not a run folder, args.json is missing")
    if not args.again:
        if hasattr(signal, "SIGPIPE"):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for `| head`
        return plan(run_dir)
    for line in notes(run_dir):
        print(f"Warning: {line}")
    script = script_to_run(args.run, run_dir, local, args.trust_remote_code)
    if not compare(run_dir, run_again(run_dir, script, args.steps), args.steps):
        for line in compare_packages(run_dir):
            print(line.lstrip("# "))
        print("Curves are the same only with the same packages, on the same machine, and on its CPU (--no-cuda).")
        sys.exit(3)


if __name__ == "__main__":
    main()
