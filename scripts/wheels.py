"""Collect the wheels of this repository for a machine without a network, whose Python and platform may be others.

    python scripts/make.py wheels --python 3.12 --extras atari,mujoco --without torch -o wheels

What is left out with --without takes with it what only it needs. Nothing is built: a package without a wheel for that
machine is an error. There, `pip install --no-index --find-links wheels PACKAGE`, or without pip
`python3 -m zipfile -e WHEEL SITE` for each and PYTHONPATH=SITE. See docs/cloud/no-network.md.

Exit codes: 0 all are there, 1 one cannot be had, 2 wrong usage.
"""

import argparse
import base64
import email
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = {"jax": ["jaxlib"]}  # what others ask for by name and is nothing without it
ATARI = re.compile(r"envpool(_assets)?/(\w+\.py$|atari/|python/)|envpool(_assets)?-[^/]+\.dist-info/(?!licenses/qt6/)")
OTHERS = re.compile(rb"(?mi)^Requires-Dist: (envpool[-_]assets[-_]|matplotlib|glfw).*\n")  # of other games
SYSTEMS = {"linux": ("linux", "Linux"), "macosx": ("darwin", "Darwin"), "win": ("win32", "Windows")}


def fail(message, code=2):
    print(f"make.py wheels: {message}", file=sys.stderr)
    sys.exit(code)


def names(text):
    """The words of "atari,mujoco", as packages are compared."""
    return [re.sub(r"[-_.]+", "-", word).lower() for word in re.split(r"[\s,]+", text) if word]


def parse_args(arguments):
    parser = argparse.ArgumentParser(
        prog="make.py wheels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    version = ".".join(map(str, sys.version_info[:2]))
    parser.add_argument("--python", default=version, metavar="X.Y", help="Python of the other machine (default: this)")
    parser.add_argument("--extras", type=names, default=[], metavar="A,B", help="extras of pyproject.toml")
    parser.add_argument("--without", type=names, default=[], metavar="A,B", help="packages that are there already")
    parser.add_argument("--platform", default="manylinux_2_28_x86_64", metavar="P", help="default: %(default)s")
    parser.add_argument("--small", action="store_true", help="of EnvPool its Atari games alone: 7 MB, not 155")
    parser.add_argument("-o", "--output", type=Path, default=Path("wheels"), metavar="DIR", help="default: wheels")
    return parser.parse_args(arguments)


def requirements(extras):
    """What pyproject.toml asks for, with these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = {names(extra)[0]: lines for extra, lines in project["optional-dependencies"].items()}
    if unknown := [extra for extra in extras if extra not in known]:
        fail(f"there is no extra {unknown[0]}: {', '.join(known)}")
    lines = [*project["dependencies"], *(line for extra in extras for line in known[extra])]
    own = re.compile(rf"{project['name']}\[(.+)\]")
    inner = [match[1] for match in map(own.fullmatch, lines) if match and match[1] not in extras]
    return requirements([*extras, *inner]) if inner else [line for line in lines if not own.fullmatch(line)]


def target(python, platform):
    """The options that make pip choose for another machine, and what conditions are to be read with."""
    platforms = [platform]
    if newest := re.fullmatch(r"manylinux_2_(\d+)_(\w+)", platform):
        platforms = [f"manylinux_2_{minor}_{newest[2]}" for minor in range(int(newest[1]), 4, -1)]
        platforms += [f"manylinux{old}_{newest[2]}" for old in ("2014", "2010", "1")]
    options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    options += [word for name in platforms for word in ("--platform", name)]
    system = next(value for start, value in SYSTEMS.items() if start in platform)
    machine = re.search(r"x86_64|aarch64|arm64|amd64|\w+$", platform)[0].replace("amd64", "AMD64")
    conditions = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": machine}
    conditions |= {"sys_platform": system[0], "platform_system": system[1]}
    return options, conditions | {"os_name": "nt" if system[0] == "win32" else "posix"}


def pip(*words):
    code = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *words]).returncode
    if code:
        fail("pip could not get them: its reason is above", 1)


def collect(lines, options, small, folder):
    """name -> (wheel, what it asks for) of everything that pip would install."""
    pip("download", "--quiet", "--dest", folder, *options, *lines)
    found = {}
    for path in sorted(Path(folder).glob("*.whl")):
        if small and path.name.startswith(("envpool-", "envpool_assets-")):
            shrink(path)
        with zipfile.ZipFile(path) as wheel:
            data = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            data = email.message_from_bytes(wheel.read(data))
        found[names(data["Name"])[0]] = path, data.get_all("Requires-Dist", [])
    return found


def asked(line, extras, conditions):
    """The package that a requirement names and the extras of it, or None if its condition does not hold."""
    from pip._vendor.packaging.requirements import Requirement

    wanted = Requirement(line)
    if wanted.marker and not any(wanted.marker.evaluate(conditions | {"extra": extra}) for extra in extras):
        return None
    return names(wanted.name)[0], {"", *wanted.extras, *names(",".join(wanted.extras))}


def needed(lines, found, without, conditions):
    """The names that these requirements lead to, but not through those to be left out."""
    seen, todo = {}, [(line, {""}) for line in lines]
    while todo:
        name, extras = asked(*todo.pop(), conditions) or (None, set())
        if name and name not in without and not extras <= seen.get(name, set()):
            seen[name] = seen.get(name, set()) | extras
            todo += [(line, seen[name]) for line in found[name][1]] if name in found else []
    return sorted(seen)


def shrink(wheel):
    """Rewrite a wheel of EnvPool, or of its assets, with nothing but the Atari games."""
    with zipfile.ZipFile(wheel) as full:
        files = {name: full.read(name) for name in full.namelist() if ATARI.match(name)}
    if "envpool/entry.py" in files:
        files["envpool/entry.py"] = b"import envpool.atari.registration  # noqa: F401\n"
    record, data = (next(x for x in files if x.endswith(f".dist-info/{name}")) for name in ("RECORD", "METADATA"))
    files[data] = re.sub(OTHERS, b"", files[data])
    del files[record]
    lines = [f"{record},,"]
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as small:
        for name, data in (files | {record: "\n".join(lines).encode() + b"\n"}).items():
            small.writestr(name, data)


def main(arguments):
    options = parse_args(arguments)
    if not re.fullmatch(r"3\.\d+", options.python):
        fail(f"--python {options.python}: the version of a Python, such as 3.12")
    if not any(start in options.platform for start in SYSTEMS):
        fail(f"--platform {options.platform}: such as manylinux_2_28_x86_64, macosx_14_0_arm64 or win_amd64")
    if options.small and ("envpool" not in options.extras or "procgen" in options.extras):
        fail("--small is for --extras envpool, and not for procgen, which it leaves out")
    without = {*options.without, *(part for name in options.without for part in PARTS.get(name, []))}
    lines = [line for line in requirements(options.extras) if names(re.match(r"[\w.-]+", line)[0])[0] not in without]
    pinned = (ROOT / "requirements/no-deps.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line for line in pinned if options.extras and line.startswith(tuple(options.extras))]
    chosen, conditions = target(options.python, options.platform)
    lines = [line.partition(";")[0] for line in lines if asked(line, {""}, conditions)]
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        found = collect(lines, chosen, options.small, folder)
        wanted = needed(lines, found, without, conditions)
        if missing := [name for name in wanted if name not in found]:  # pip reads conditions for the Python it runs in
            fail(f"Python {options.python} there needs {', '.join(missing)}, too: run this with that Python", 1)
        for name in wanted:
            shutil.copy(found[name][0], options.output)
    if pinned:
        pip("download", "--quiet", "--no-deps", "--dest", str(options.output), *chosen, *pinned)
    wheels = list(options.output.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels) / 1e6
    print(f"{len(wanted) + len(pinned)} packages; {options.output} holds {len(wheels)} wheels, {size:.0f} MB")
