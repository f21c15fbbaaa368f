"""The tools of benchmark/speed that need no peer, each in its shortest run: they read names of main blocks."""

import subprocess
import sys

import pytest

from helpers.files import ROOT, require
from helpers.processes import environment


def speed(tool, *flags):
    """The standard output of a tool, and the end of its errors."""
    command = [sys.executable, "-m", f"benchmark.speed{tool}", *map(str, flags)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize("name", ["sac_continuous_action", "td3_continuous_action_jax"])
def test_products(name):
    require("mujoco", "jax")
    code, table, errors = speed(".products", "--rounds", 1, "--names", name)
    assert code == 0, errors
    file, flops, rate, *_ = [cell.strip() for cell in table.splitlines()[-1].strip("|").split("|")]
    # batches of 256, layers of 256: forward twice (target and critic), backward twice as much; and the actor's
    assert file == f"{name}.py" and 200 < int(flops) < 1000 and int(rate) > 0


@pytest.mark.parametrize("name, flags", [("ppo", []), ("c51_atari", ["--total-timesteps", 420])])
def test_kernels(name, flags):
    require("ale_py")
    code, table, errors = speed(".kernels", name, "--steps", 2, "--rows", 4, *flags)
    assert code == 0, errors
    first, *rows = table.splitlines()
    assert first.startswith(f"{name}.py: ") and "operators of" in first and "captured" not in first
    assert len(rows) == 4 and all("% " in row and " x aten::" in row for row in rows)


def test_kernels_of_what_has_no_gradient_step_in_torch():
    assert speed(".kernels", "ppo_jax")[::2] == (1, "ppo_jax is not a torch file of cleanrl/, such as dqn_atari\n")


def test_atari():
    require("ale_py")
    flags = "--file", "dqn_atari", "--num-envs", 4, "--rounds", 1, "--steps", 400, "--skip", 100
    code, told, errors = speed(".atari", *flags)
    assert code == 0, errors
    assert "environment alone" in told and "ratio " in told


@pytest.mark.parametrize(
    "name, head, flags", [("ppo", "update(inds)", ["--update-epochs", 1]), ("dqn", "update()", [])]
)
def test_versions(name, head, flags, tmp_path):
    slower = tmp_path / "slower.py"
    text = (ROOT / f"cleanrl/{name}.py").read_text()
    slower.write_text(text.replace(f"    def {head}:\n", f"    def {head}:\n        time.sleep(0.05)\n"))
    flags = "--steps", 3000, "--skip", 1000, "--rounds", 1, "--turns", 1, *flags
    code, told, errors = speed(".versions", name, "--before", slower, *flags)
    assert code == 0, errors
    ratios = [float(line.split(" times")[0].split()[-1]) for line in told.splitlines() if " times" in line]
    assert len(ratios) == 2 and all(ratio > 2 for ratio in ratios), told


@pytest.mark.parametrize(
    "name, before, told",
    [
        ("ppo", "no-commit", "--before no-commit is neither a file nor a commit that has cleanrl/ppo.py"),
        ("ppo", ROOT / "cleanrl/ppo.py", f"cleanrl/ppo.py is the same as at {ROOT / 'cleanrl/ppo.py'}"),
        ("no_file", "HEAD", "no_file is not a file of cleanrl/, such as dqn_atari"),
        (
            "c51_jax --rounds 0",
            ROOT / "cleanrl/dqn.py",
            "--rounds 0 leaves gradient steps alone, and those of JAX files",
        ),
        ("ppo --env-id Nope-v0", ROOT / "cleanrl/dqn.py", "ppo.py ended with 2: "),
    ],
)
def test_versions_that_cannot_be_compared(name, before, told):
    code, output, errors = speed(".versions", *name.split(), "--before", before)
    assert (code, output) == (1, "") and errors.startswith(told) and len(errors.splitlines()) == 1


def test_a_rate_needs_two_metrics(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    from benchmark.speed.__main__ import rate_of_run

    with SummaryWriter(tmp_path) as writer:
        for step in (100, 200, 300):
            writer.add_scalar("charts/SPS", 1, step, walltime=step / 10)
    assert rate_of_run(tmp_path, skip=200) == 10
    with pytest.raises(SystemExit, match="1 metrics behind step 300, which is no stretch to time"):
        rate_of_run(tmp_path, skip=300)
