"""python scripts/make.py wheels: what another machine needs, of an index of tiny wheels; of pip's, marked slow."""

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from helpers.files import ROOT

THIS = ".".join(map(str, sys.version_info[:2]))
NEXT = f"3.{sys.version_info[1] + 1}"
PYPROJECT = """
[project]
name = "cleanrl"
dependencies = ["base>=1,<2", "torch"]

[project.optional-dependencies]
atari = ["native"]
jax = ["jax", "flax"]
all = ["cleanrl[atari]", "here; sys_platform == 'linux'", "nowhere; sys_platform == 'darwin'"]
mac = ["here; sys_platform == 'darwin'"]
gymnax = []
envpool = ["envpool"]
procgen = ["envpool"]
new = ["conditional[fast]"]
late = ["late"]
"""


def make_wheel(index, name, version="1.0", requires=(), tag="py3-none-any", files=None):
    """A wheel as small as pip takes it."""
    info = f"{name}-{version}.dist-info"
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    extras = sorted(set(re.findall(r'extra == "(\w+)"', " ".join(requires))))
    head += "".join(f"Requires-Dist: {line}\n" for line in requires) + "".join(f"Provides-Extra: {x}\n" for x in extras)
    with zipfile.ZipFile(index / f"{name}-{version}-{tag}.whl", "w") as wheel:
        for path, text in (files or {f"{name}.py": f"version = {version!r}\n"}).items():
            wheel.writestr(path, text)
        wheel.writestr(f"{info}/METADATA", head)
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "")


ENVPOOL = {
    "envpool/__init__.py": "import envpool.entry\n",
    "envpool/entry.py": "import envpool.atari.registration, envpool.box2d.registration\n",
    "envpool/registration.py": "games = []\n",
    "envpool/python/api.py": "",
    "envpool/atari/__init__.py": "",
    "envpool/atari/atari_envpool.so": "x" * 1000,
    "envpool/atari/registration.py": "from envpool.registration import games\ngames.append('Pong-v5')\n",
    "envpool/box2d/__init__.py": "",
    "envpool/box2d/box2d_envpool.so": "x" * 1000,
    "envpool/box2d/registration.py": "from envpool.registration import games\ngames.append('LunarLander-v3')\n",
    "envpool.libs/libQt6Core.so": "x" * 1000,
    "envpool-1.0.dist-info/licenses/LICENSE": "free",
}


@pytest.fixture
def repository(tmp_path):
    """A repository with the two scripts and a pyproject.toml of its own, and an index of wheels beside it."""
    index = tmp_path / "index"
    for folder in (index, tmp_path / "scripts", tmp_path / "requirements"):
        folder.mkdir()
    for name in ("make.py", "wheels.py"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "requirements/no-deps.txt").write_text("# old\ngodot-rl==0.8.2\ngymnax==1.0.1\n")
    make_wheel(index, "base", "1.0", ["Shared_Part"])
    make_wheel(index, "base", "2.0")
    make_wheel(index, "torch", requires=["shared.part", "nvidia-thing"])
    make_wheel(index, "jax", requires=["jaxlib"])
    make_wheel(index, "flax", requires=["jax", "jaxlib", 'torch; extra == "all"'])
    make_wheel(index, "jaxlib", requires=["opt-einsum"])
    for name in ("shared_part", "nvidia_thing", "opt_einsum", "here", "more", "gym_assets"):
        make_wheel(index, name)
    make_wheel(index, "gymnax", "1.0.1", ["gym<0.1"])  # what it asks for is too old to be had
    for tag in ("cp{0}-cp{0}-manylinux_2_17_x86_64", "cp{0}-cp{0}-win_amd64"):
        for version in (THIS, NEXT):
            make_wheel(index, "native", tag=tag.format(version.replace(".", "")))
    make_wheel(index, "conditional", requires=[
        f'opt-einsum; python_version < "{NEXT}"', 'more; extra == "fast"', 'nowhere; extra == "slow"'])  # fmt: skip
    make_wheel(index, "late", requires=[f'more; python_version >= "{NEXT}"'])
    make_wheel(index, "envpool", files=ENVPOOL, requires=["envpool-assets", "envpool-assets-large", "more"])
    assets = {
        "envpool_assets/__init__.py": "",
        "envpool_assets/atari/pong.bin": "",
        "envpool_assets/doom/wad": "x" * 99,
    }
    make_wheel(index, "envpool_assets", files=assets)
    make_wheel(index, "envpool_assets_large", files={"envpool_assets_large/robot": "x" * 1000})
    return tmp_path


def run(repository, *arguments, code=0):
    command = [sys.executable, "scripts/make.py", "wheels", *arguments]
    env = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(repository / "index"), "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(command, cwd=repository, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def names(folder):
    return {path.name.split("-")[0] for path in folder.glob("*.whl")}


CORE = {"base", "shared_part", "torch", "nvidia_thing"}


def test_extras(repository):
    out = run(repository, "-o", "core")
    assert names(repository / "core") == CORE and (repository / "core/base-1.0-py3-none-any.whl").exists()
    assert "4 packages; core holds 4 wheels" in out
    run(repository, "--extras", "all,gymnax", "-o", "all")
    assert names(repository / "all") == CORE | {"native", "here", "gymnax"}


@pytest.mark.parametrize("without, left", [
    ("torch", {"base", "shared_part", "jax", "flax", "jaxlib", "opt_einsum"}),
    ("torch,jax", {"base", "shared_part", "flax"}),
    ("Torch,opt.einsum", {"base", "shared_part", "jax", "flax", "jaxlib"}),
])  # fmt: skip
def test_what_is_there_already(repository, without, left):
    """With a package goes what only it needs, and no more."""
    run(repository, "--extras", "jax", "--without", without)
    assert names(repository / "wheels") == left


def test_another_python_and_platform(repository):
    """Wheels and conditions are those of the other machine; what pip does not find for its own Python is named."""
    argv = ["--extras", "atari,new", "--without", "torch"]
    run(repository, *argv, "--python", NEXT)
    assert names(repository / "wheels") == {"base", "shared_part", "native", "conditional", "more"}
    tag = f"cp{NEXT.replace('.', '')}"
    assert (repository / f"wheels/native-1.0-{tag}-{tag}-manylinux_2_17_x86_64.whl").exists()
    run(repository, *argv, "--platform", "win_amd64", "-o", "windows")
    assert names(repository / "windows") == {"base", "shared_part", "native", "conditional", "more", "opt_einsum"}
    assert [path.name for path in (repository / "windows").glob("native*win_amd64.whl")]
    run(repository, "--extras", "mac", "--without", "torch", "--platform", "macosx_14_0_arm64", "-o", "mac")
    assert names(repository / "mac") == {"base", "shared_part", "here"}
    out = run(repository, "--extras", "late", "--without", "torch", "--python", NEXT, code=1)
    assert f"Python {NEXT} there needs more, too" in out


def test_the_small_envpool(repository):
    """It is a wheel that pip and zipfile take, with the Atari games alone."""
    run(repository, "--extras", "envpool", "--without", "torch,base", "--small")
    wheels = repository / "wheels"
    assert names(wheels) == {"envpool", "envpool_assets", "more"}
    (wheel,) = wheels.glob("envpool-*")
    with zipfile.ZipFile(wheel) as file:
        record = file.read("envpool-1.0.dist-info/RECORD").decode().splitlines()
        assert {line.split(",")[0] for line in record} == set(file.namelist())
        for name, digest, size in (line.split(",") for line in record if ",sha256=" in line):
            data = file.read(name)
            made = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert (digest, size) == (f"sha256={made}", str(len(data)))
        assert not [name for name in file.namelist() if "box2d" in name or "Qt" in name]
        assert "envpool-1.0.dist-info/licenses/LICENSE" in file.namelist()
    for path in wheels.glob("*.whl"):
        subprocess.run([sys.executable, "-m", "zipfile", "-e", path, repository / "site"], check=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", wheels]
    subprocess.run([*pip, "--target", repository / "target", "envpool"], check=True)
    for site in ("site", "target"):
        code = "import envpool, envpool.registration; print(envpool.registration.games)"
        env = os.environ | {"PYTHONPATH": str(repository / site)}
        out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
        assert out == "['Pong-v5']\n"
        assert os.listdir(repository / site / "envpool_assets/atari") == ["pong.bin"]


@pytest.mark.parametrize("argv, code, words", [
    (["--extras", "atarri"], 2, "there is no extra atarri: atari, "),
    (["--python", "3"], 2, "such as 3.12"),
    (["--platform", "amiga"], 2, "such as manylinux_2_28_x86_64"),
    (["--small"], 2, "--extras envpool"),
    (["--small", "--extras", "envpool,procgen"], 2, "procgen"),
    (["--platform", "macosx_14_0_arm64", "--extras", "atari"], 1, "pip could not get them"),
])  # fmt: skip
def test_wrong_usage(repository, argv, code, words):
    out = run(repository, *argv, "-o", "wheels", code=code)
    assert words in out.splitlines()[-1] and "Traceback" not in out
    assert not list(repository.glob("wheels/*"))


@pytest.mark.slow
def test_the_real_index(tmp_path):
    """What MuJoCo's robots import is there, also what they draw with; it takes an index that pip is configured with."""
    command = [sys.executable, "scripts/make.py", "wheels", "--python", "3.12", "--extras", "mujoco,atari"]
    subprocess.run([*command, "--without", "torch", "-o", tmp_path], cwd=ROOT, check=True)
    assert {"ale_py", "gymnasium", "mujoco", "glfw", "imageio", "tyro", "numpy"} <= names(tmp_path)
    assert not {name for name in names(tmp_path) if re.match("torch|nvidia|triton", name)}
    (wheel,) = tmp_path.glob("ale_py-*")
    assert "cp312" in wheel.name and "x86_64" in wheel.name
