"""What the Makefile does, for every platform: python scripts/make.py {train,test} [arguments of ppo.py or pytest].

Both commands make .venv in the repository if it is not there and install what they need into it with pip. An existing
.venv is used as it is; what it holds is remembered in .venv/installed.json, so that a second call starts at once.
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
TEST_EXTRAS |= {"procgen", "memory-gym", "godot", "playground", "gymnax", "tune", "cloud", "docs"}


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


def apt(packages, what):
    """Install packages of the system, or say how; an empty list is there already."""
    command = ["apt-get", "install", "-qy", "--no-install-recommends", *packages]
    if not packages or not sys.platform.startswith("linux"):
        return
    if not shutil.which("apt-get") or os.geteuid() != 0:
        sys.exit(f"The tests need {what}; on Debian and Ubuntu: sudo {' '.join(command)}")
    call("apt-get", "update", "-q")
    call(*command, DEBIAN_FRONTEND="noninteractive")


def install_gl():
    """Without a screen MuJoCo renders through EGL and OpenGL, and Qt needs GLib."""
    there = all(map(ctypes.util.find_library, ["EGL", "GL", "gthread-2.0"]))
    apt([] if there else ["libegl1", "libgl1", "libgl1-mesa-dri", "libglib2.0-0"], "EGL, OpenGL and GLib")


def install_godot():
    """The Godot engine without a screen, which plays the game in tests/godot."""
    apt([] if shutil.which("godot3-server") else ["godot3-server"], "Godot")


def install_slurm():
    """The programs of a Slurm cluster, which the tests start in a network of its own, made with `ip`."""
    packages = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "munged": "munge", "ip": "iproute2"}
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    apt(sorted({packages[program] for program in packages if not shutil.which(program, path=path)}), "Slurm")


def install_browser():
    """The browser in which the tests look at the benchmark page and the site, and letters for it."""
    found = any(map(shutil.which, ["chromium", "chromium-browser", "google-chrome"]))
    apt([] if found else ["chromium", "fonts-dejavu-core"], "Chromium")


def install_podman():
    """What builds and runs the container image, and makes the Debian that it stands on."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    apt([name for name in ("podman", "runc", "mmdebstrap") if not shutil.which(name, path=path)], "podman")


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


def test(arguments):
    install(TEST_EXTRAS)
    python("-m", "pip", "install", "--quiet", "--no-deps", "--requirement", "requirements/no-deps.txt")
    install_gl()
    install_godot()
    install_browser()
    install_checkov()
    install_podman()
    if "test_engines.py" not in " ".join(arguments) or "--ignore" not in " ".join(arguments):
        install_slurm()
    folders = [name for name in FOLDERS if (ROOT / name).exists()]
    python("-m", "cleanrl_utils.style")
    python("-m", "ruff", "check", *folders)
    python("-m", "ruff", "format", "--check", *folders)
    call(str(BIN / "codespell"), *folders, "README.md", "CONTRIBUTING.md", "pyproject.toml")
    # a missing optional part is a failure
    python("-m", "pytest", "-n", "2", "--dist", "loadgroup", "--durations", "20", *arguments, CLEANRL_REQUIRE_ALL="1")


if __name__ == "__main__":
    commands = {"train": train, "test": test}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](sys.argv[2:])
