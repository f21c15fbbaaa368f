"""Runs that are refused, packages that seem to be missing, losses that are not finite."""

import os
import pickle

import numpy as np

from helpers.files import HELPERS, require_for, script, uses
from helpers.processes import environment, run, run_dir

HIDE = """
import importlib.machinery

HIDDEN = {hidden!r}
find_spec = importlib.machinery.PathFinder.find_spec


class Finder:
    def find_spec(name, path=None, target=None):
        return None if name.split(".")[0] in HIDDEN else find_spec(name, path, target)


importlib.machinery.PathFinder.find_spec = Finder.find_spec
"""


def hiding(folder, *packages):
    """An environment in which these packages seem not to be installed."""
    (folder / "sitecustomize.py").write_text(HIDE.format(hidden=packages))
    return environment(PYTHONPATH=os.pathsep.join([str(folder), str(HELPERS)]))


WITHOUT = """
import runpy, sys

assert not {{*HIDDEN}} & {{module.split(".")[0] for module in sys.modules}}, "imported before it could be hidden"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def without(*packages):
    """As `hiding`, the code of a `driver`, which runs in a fork: for packages that no server imports for files on their
    own."""
    return (HIDE + WITHOUT).format(hidden=packages)


def refuse(name, *argv, cwd, env=None, driver=None):
    """Run a file on bad input; returns the line in which it says why it refuses."""
    require_for(name)
    done = run(script(name), *argv, cwd=cwd, env=env, driver=driver, code=2, alone=driver is not None)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(f"{name}.py: "), lines[0]
    assert not (cwd / "runs").exists()
    return lines[0]


REFUSE = """
import contextlib, io, pickle, runpy, sys

path, out = sys.argv[1:]
with open(out, "rb") as file:
    cases = pickle.load(file)
results = []
for argv in cases:
    sys.argv, stderr, code = [path, *argv], io.StringIO(), 0
    try:
        with contextlib.redirect_stderr(stderr):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as error:
        code = error.code
    results.append((code, stderr.getvalue()))
with open(out, "wb") as file:
    pickle.dump(results, file)
"""


def refuse_all(name, cases, cwd, hidden=()):
    """As `refuse`, for a list of command lines in one process, in which these packages seem not to be installed."""
    require_for(name)
    out = cwd / "refusals.pickle"
    out.write_bytes(pickle.dumps([list(map(str, argv)) for argv in cases]))
    run(script(name), out, cwd=cwd, driver=HIDE.format(hidden=hidden) + REFUSE)
    lines = []
    for argv, (code, stderr) in zip(cases, pickle.loads(out.read_bytes()), strict=True):
        assert code == 2, f"{argv}: exit code {code}"
        (line,) = (line for line in stderr.splitlines() if line.strip())
        assert line.startswith(f"{name}.py: "), line
        lines.append(line)
    assert not (cwd / "runs").exists()
    return lines


def weights_of_checkpoint(name, folder):
    """All floating-point arrays of a checkpoint but the replay buffer's, where a bad reward waits to be sampled."""

    def walk(tree):
        if isinstance(tree, dict):
            tree = [branch for key, branch in tree.items() if key not in ("replay", "chunk")]
        if isinstance(tree, (list, tuple)):
            return [leaf for branch in tree for leaf in walk(branch)]
        return [np.asarray(tree)] if hasattr(tree, "shape") else []

    if uses(name, "torch"):
        import torch

        tree = torch.load(folder / "checkpoint.pt", map_location="cpu")
    else:
        from flax.serialization import msgpack_restore

        tree = msgpack_restore((folder / "checkpoint.msgpack").read_bytes())
    return [leaf for leaf in walk(tree) if np.issubdtype(leaf.dtype, np.floating)]


def assert_stops_on_non_finite_loss(name, argv, cwd):
    require_for(name)
    done = run(script(name), *argv, cwd=cwd, code=1)
    assert "not finite" in done.stderr and "Traceback" not in done.stderr
    folder = run_dir(cwd)
    assert str(folder.relative_to(cwd)) in done.stderr
    arrays = weights_of_checkpoint(name, folder)
    assert len(arrays) >= 2
    for array in arrays:
        assert np.isfinite(array).all()
