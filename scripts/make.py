"""What the Makefile does, for every platform: python scripts/make.py {train,test,test-all,wheels} [arguments].

They make .venv in the repository if it is not there and install what they need into it with pip. An existing
.venv is used as it is; what it holds is remembered in .venv/installed.json, so that a second call starts at once.
The tests need packages of the system, too: `test` installs those that are missing if it is root, and so does `system`,
which does nothing else. `wheels` collects packages for a machine without a network, and `wheels --help` says how.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    version = ".".join(map(str, sys.version_info[:2]))
    sys.exit(f"Python 3.11 or newer is needed, this is {version}. To name another: make train PYTHON=python3.12")

import ctypes.util
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
FOLDERS = ["cleanrl", "cleanrl_utils", "benchmark", "cloud", "docs", "scripts", "tests"]
TEST_EXTRAS = {"atari", "mujoco", "envpool", "pettingzoo", "jax", "ray", "video", "track", "hub", "test", "dev"}
TEST_EXTRAS |= {"procgen", "memory-gym", "godot", "playground", "gymnax", "plot", "tune", "cloud", "docs"}
SYSTEM = {  # a program, or a library by its name with "lib": the packages of Debian that bring it
    "bash": "bash",
    "chromium|chromium-browser|google-chrome": "chromium fonts-dejavu-core",  # shows the benchmark page and the site
    "git": "git",
    "godot3-server": "godot3-server",  # plays the game in tests/godot
    "ip": "iproute2",  # a cluster of Slurm has a network of its own
    "libEGL": "libegl1 libgl1-mesa-dri",  # with which MuJoCo draws where there is no screen
    "libGL": "libgl1",
    "libatomic": "libatomic1",  # of the Node.js that drives the browser
    "libgthread-2.0": "libglib2.0-0",  # of Qt, with which Procgen draws
    "mmdebstrap": "mmdebstrap",  # makes the Debian on which the container image stands
    "munged": "munge",
    "podman": "podman",
    "runc": "runc",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "unshare": "util-linux",
}
SLURM = {"munged", "slurmctld", "slurmd"}


def call(*command, **environment):
    print("+", *command, flush=True)
    code = subprocess.run(command, cwd=ROOT, env=os.environ | environment).returncode
    if code:
        sys.exit(code)


def python(*arguments, **environment):
    call(str(BIN / "python"), *arguments, **environment)


def install(extras):
    """Bring .venv to the state that pyproject.toml and the extras ask for, on top of the extras it has already."""
    stamp = VENV / "installed.json"
    pyproject = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    state = json.loads(stamp.read_text()) if stamp.exists() else {"pyproject": "", "extras": []}
    if state["pyproject"] == pyproject and extras <= set(state["extras"]):
        return
    extras = sorted(extras | set(state["extras"]))
    stamp.unlink(missing_ok=True)
    if not (VENV / "pyvenv.cfg").exists():
        if subprocess.run([sys.executable, "-m", "venv", str(VENV)]).returncode:
            shutil.rmtree(VENV, ignore_errors=True)
            sys.exit("Python's venv module does not work here; on Debian and Ubuntu: apt-get install python3-venv")
    python("-m", "pip", "install", "--quiet", "--editable", f".[{','.join(extras)}]" if extras else ".")
    stamp.write_text(json.dumps({"pyproject": pyproject, "extras": extras}))


def missing(name):
    """Whether the system has no such program or library; of "a|b" one is enough."""
    if name.startswith("lib"):
        return not ctypes.util.find_library(name[3:])
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return not any(shutil.which(program, path=path) for program in name.split("|"))


def system(arguments):
    """Install the packages of the system that the tests need, or say how."""
    words = " ".join(arguments)
    needed = {name for name in SYSTEM if name not in SLURM or "--ignore" not in words or "test_engines.py" not in words}
    packages = sorted({package for name in filter(missing, needed) for package in SYSTEM[name].split()})
    command = ["apt-get", "install", "-qy", "--no-install-recommends", *packages]
    if not packages or not sys.platform.startswith("linux"):
        return
    if not shutil.which("apt-get") or os.geteuid() != 0:
        sys.exit(f"The tests need more of the system; on Debian and Ubuntu: sudo {' '.join(command)}")
    call("apt-get", "update", "-q")
    call(*command, DEBIAN_FRONTEND="noninteractive")


def install_checkov():
    """Policies for cloud/, with a hundred packages of its own: in an environment of its own."""
    folder = VENV / "checkov"
    if not (folder / "done").exists():
        call(sys.executable, "-m", "venv", "--clear", str(folder))
        call(str(folder / BIN.name / "python"), "-m", "pip", "install", "--quiet", "checkov>=3.2,<4")
        (folder / "done").touch()


def train(arguments):
    install(set())
    python("cleanrl/ppo.py", "--env-id", "CartPole-v1", *arguments, "--save-model")


def test(arguments, which=("-m", "not slow")):
    system(arguments)
    install(TEST_EXTRAS)
    python("-m", "pip", "install", "--quiet", "--no-deps", "--requirement", "requirements/no-deps.txt")
    install_checkov()
    folders = [name for name in FOLDERS if (ROOT / name).exists()]
    python("-m", "cleanrl_utils.style")
    python("-m", "ruff", "check", *folders)
    python("-m", "ruff", "format", "--check", *folders)
    call(str(BIN / "codespell"), *folders, "README.md", "CONTRIBUTING.md", "pyproject.toml")
    # a missing optional part is a failure
    workers = str((os.cpu_count() or 1) + 2)  # more than cores: some tests wait
    options = ["-n", workers, "--dist", "loadgroup", "--max-worker-restart", "0"]  # a crash ends it, or it may hang
    options += ["--cpu-times", "--durations", "10", *which]
    python("-m", "pytest", *options, *arguments, CLEANRL_REQUIRE_ALL="1")


def test_all(arguments):
    test(arguments, which=())


def wheels(arguments):
    import wheels

    wheels.main(arguments)


if __name__ == "__main__":
    commands = {"train": train, "test": test, "test-all": test_all, "system": system, "wheels": wheels}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](sys.argv[2:])
