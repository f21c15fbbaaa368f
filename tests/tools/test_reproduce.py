"""python -m cleanrl_utils.reproduce says what it takes to repeat a run, repeats it, and finds the first difference."""

import shutil
import subprocess
from importlib.metadata import version

import numpy as np
import pytest

from cleanrl_utils.reproduce import first_difference, harmless
from cleanrl_utils.runs.folder import script_flags
from helpers.files import ROOT, posix, require_for, script
from helpers.processes import environment, run, run_dir, run_module
from helpers.scalars import raw_scalars, untimed

FLAGS = ["--num-envs", "2", "--num-steps", "32", "--total-timesteps", "1024", "--no-cuda"]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    require_for("ppo")
    cwd = tmp_path_factory.mktemp("original")
    run(script("ppo"), *FLAGS, cwd=cwd, env=environment())
    return run_dir(cwd)


def reproduce(*argv, cwd, code=0):
    done = run_module("cleanrl_utils.reproduce", *argv, cwd=cwd, code=code)
    return done.stdout if code in (0, 3) else done.stderr


def test_identical(original, tmp_path):
    """Every scalar but timings, bit by bit; without W&B, and without a trace in the folder of the first run."""
    folder = tmp_path / "first"
    shutil.copytree(original, folder)
    command = folder / "command.txt"
    command.write_text(command.read_text().rstrip() + " --track\n")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    output = reproduce(folder, "--run", cwd=tmp_path)
    scalars = untimed(raw_scalars(original))
    assert f"\nidentical: {len(scalars)} values of {len({tag for tag, *_ in scalars})} curves\n" in output
    assert untimed(raw_scalars(run_dir(tmp_path))) == scalars and run_dir(tmp_path).name.startswith(
        "CartPole-v1__ppo__1"
    )
    assert {path: path.read_bytes() for path in folder.iterdir()} == before and not (tmp_path / "wandb").exists()


@posix
def test_the_first_steps(original, tmp_path):
    """Up to --steps, on the schedule of the whole run; of a run without its command, from its flags."""
    folder = tmp_path / "first"
    shutil.copytree(original, folder)
    (folder / "command.txt").write_text("python -c 'half a command\npython ppo.py --resume x\n")
    output = reproduce(folder, "--run", "--steps", 300, cwd=tmp_path)
    scalars = [scalar for scalar in untimed(raw_scalars(original)) if scalar[1] <= 300]
    assert f"\nidentical: {len(scalars)} values" in output and "up to step 300" in output
    assert "Warning: this run was resumed (1x)" in output
    assert max(step for _, step, _ in raw_scalars(run_dir(tmp_path))) < 1024, "it was not stopped"


def test_the_first_difference(original, tmp_path):
    run(script("ppo"), *FLAGS, "--learning-rate", "1e-3", "--exp-name", "other", cwd=tmp_path)
    other = run_dir(tmp_path)
    pairs = zip(untimed(raw_scalars(original)), untimed(raw_scalars(other)))
    differing = [(step, tag, value, changed) for (tag, step, value), (_, _, changed) in pairs if value != changed]
    step = differing[0][0]
    output = reproduce("--compare", original, other, cwd=tmp_path, code=3)
    lines = [
        f"first {tag} at step {step}: {value:.9g}, {changed:.9g}\n"
        for at, tag, value, changed in differing
        if at == step
    ]
    assert any(line in output for line in lines), (output, lines)
    assert output.count("mean of the last") == 2
    assert "\nidentical: " in reproduce("--compare", other, other, cwd=tmp_path)


def test_difference_of_two_curves():
    one = np.array([[1, 2.0], [3, np.nan], [4, 5.0]])
    assert first_difference(one, one.copy()) is None
    changed = one.copy()
    changed[2, 1] = np.nextafter(5.0, 6.0)
    step, *rows = first_difference(one, changed)
    assert step == 4 and [row[1] for row in rows] == [5.0, np.nextafter(5.0, 6.0)]
    for pair in ((one, one[:2]), (one[:2], one)):
        step, *rows = first_difference(*pair)
        assert step == 4 and [row is None for row in rows] == [len(pair[0]) == 2, len(pair[1]) == 2]
    moved = one.copy()
    moved[1, 0] = 2
    assert first_difference(one, moved)[0] == 2


@pytest.mark.parametrize(
    "exp_name, fine, refused",
    [
        (
            "ppo",
            "--env-id ALE/Pong-v5 --exp_name=x --no-cuda --anneal-lr False --ent-coef -.5 --num-steps=8 --track",
            "--tyro-write-completion --tyro_print_completion --resume --resume=x --res --no-resume -h -- --env-path=x "
            "evil:E-v0 --env-id=evil:E-v0 a\n--resume --no-such",
        ),
        ("ppo_continuous_action_godot", "--seed 1", "--env-path --env_path=sh --onnx-export-path"),
        ("qdagger_dqn_atari_impalacnn", "--teacher-model-exp-name dqn_atari", "--teacher-policy-hf-repo"),
        ("apex_atari", "--seed 1", "--ray-address"),
    ],
)
def test_flags_of_strangers(exp_name, fine, refused):
    flags = script_flags(script(exp_name))
    assert [word for word in fine.split(" ") if not harmless(word, flags)] == []
    assert [word for word in refused.split(" ") if harmless(word, flags)] == []


@posix
def test_what_it_takes(original, tmp_path):
    folder = tmp_path / "a run"
    shutil.copytree(original, folder)
    commit = (folder / "commit.txt").read_text().strip()
    show = ["git", "-C", str(ROOT), "show", f"{commit}:cleanrl/ppo.py"]
    (folder / "ppo.py").write_bytes(subprocess.run(show, capture_output=True, check=True).stdout)
    output = reproduce(folder, cwd=tmp_path)
    assert f"\ngit checkout {commit}\n" in output and "packages are the same here" in output
    assert f"\npython cleanrl/ppo.py {' '.join(FLAGS)}\n" in output and "Warning" not in output
    assert f"it ran with gymnasium {version('gymnasium')}, numpy {np.__version__}, " in output
    install = [line for line in output.splitlines() if line.startswith("grep ")][0].split(" && ")[0]
    subprocess.run(install, shell=True, cwd=tmp_path, check=True)
    packages = (folder / "packages.txt").read_text().splitlines()
    assert (tmp_path / "requirements.txt").read_text().splitlines() == [
        p for p in packages if not p.startswith("cleanrl==")
    ]
    assert not (tmp_path / "runs").exists()

    (folder / "ppo.py").open("a").write("# edited\n")
    (folder / "packages.txt").write_text(f"absent==1\nnumpy==0.1\ntyro=={version('tyro')}\n")
    output = reproduce(folder, cwd=tmp_path)
    assert "Warning: the script that ran is not that of its commit" in output
    assert f"differs here: numpy 0.1 then, {np.__version__} now\n" in output
    assert "differs here: absent 1 then, not installed now\n" in output and output.count("differs here") == 2
    (folder / "commit.txt").write_text("")
    (folder / "packages.txt").unlink()
    output = reproduce(folder, cwd=tmp_path)
    assert "Warning: no commit was recorded" in output and "Warning: the packages were not recorded" in output
    (folder / "commit.txt").write_text("0" * 40)
    assert "is not in this clone" in reproduce(folder, cwd=tmp_path)


def test_wrong_usage(original, tmp_path):
    for argv in ([], [original, "--compare", original, original], [original, "--steps", 10]):
        assert "error:" in reproduce(*argv, cwd=tmp_path, code=2)
    assert "is not a run folder" in reproduce(tmp_path, cwd=tmp_path, code=2)
    for place in ("runs/misspelt", "misspelt", tmp_path / "runs/misspelt"):
        assert "there is no folder" in reproduce(place, cwd=tmp_path, code=2)
    assert "has no events" in reproduce("--compare", original, tmp_path, cwd=tmp_path, code=2)
    folder = tmp_path / "broken"
    shutil.copytree(original, folder)
    (folder / "command.txt").write_text("python ppo.py --no-such-flag\n")
    assert "exit code 2" in reproduce(folder, "--run", cwd=tmp_path, code=1)
