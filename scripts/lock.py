"""Pin what the container image installs, with hashes: python scripts/lock.py [--index-url URL] [--extras NAME ...]

Needs uv and pip. One resolution of pyproject.toml becomes three files in requirements/, for Linux on x86-64 and the
Python of cloud/Dockerfile:
    lock.txt       what both kinds of image have
    lock-cuda.txt  torch and the CUDA libraries, from the same index
    lock-cpu.txt   the CPU build of the same torch, which is on PyTorch's own index (--index-url, unless pip is
                   configured with it)
Fewer extras make a smaller image.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = "3.11"
EXTRAS = ("atari", "mujoco", "envpool", "jax", "video", "track", "hub", "cloud")
CUDA = re.compile(r"torch$|triton$|nvidia-|cuda-|jax-cuda")  # packages that only the image for GPUs has
HEADER = f"# Made by `python scripts/lock.py`, for Python {PYTHON} on Linux (x86-64); not to be edited.\n"


def resolve(extras):
    """name -> its requirement with hashes, as uv writes it."""
    command = ["uv", "pip", "compile", "pyproject.toml", "--python-version", PYTHON]
    command += ["requirements/cuda.txt"] if "jax" in extras else []
    command += "--python-platform x86_64-manylinux_2_28 --only-binary :all: --generate-hashes".split()
    command += "--upgrade --quiet --no-header --no-emit-index-url --no-emit-find-links".split()
    for extra in extras:
        command += ["--extra", extra]
    text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {entry.split("==")[0]: entry for entry in re.findall(r"(?m)^[a-z].+\n(?:^ .+\n)+", text)}


def cpu_torch(version, index_url):
    """The CPU build of torch as a requirement with the hash of its wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary", ":all:", "--python-version", PYTHON, "--platform", "manylinux_2_28_x86_64"]
    with tempfile.TemporaryDirectory() as folder:
        where = ["--index-url", index_url] if index_url else []
        subprocess.run([*command, *where, "--dest", folder, f"torch=={version}+cpu"], check=True)
        (wheel,) = Path(folder).iterdir()
        return f"torch=={version}+cpu \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index-url", default="", help="of PyTorch's CPU builds")
    parser.add_argument("--extras", nargs="*", default=EXTRAS, metavar="NAME", help=f"default: {' '.join(EXTRAS)}")
    options = parser.parse_args()
    entries = resolve(options.extras)
    version = re.match(r"torch==([\w.]+)", entries["torch"])[1]
    files = {
        "lock.txt": [entry for name, entry in entries.items() if not CUDA.match(name)],
        "lock-cuda.txt": [entry for name, entry in entries.items() if CUDA.match(name)],
        "lock-cpu.txt": [cpu_torch(version, options.index_url)],
    }
    for name, lines in files.items():
        (ROOT / "requirements" / name).write_text(HEADER + "".join(lines))
        print(f"requirements/{name}: {len(lines)} packages")
