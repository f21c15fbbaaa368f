"""Runs go to a hub and come back byte by byte, models are played from there, and nothing from there runs code here.

The hub is a real one in a small edition (hub_server.py), on the loopback.
"""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers import hub_server
from helpers.files import ROOT, require, require_for, script
from helpers.hub_server import TOKEN, Repository
from helpers.processes import environment, run, run_dir, run_module
from helpers.refusals import hiding
from helpers.scalars import raw_scalars

NAME = "someone/CartPole-v1-dqn-seed1"
TRAIN = ["--total-timesteps", "600", "--learning-starts", "200", "--save-model", "--no-cuda"]


class Bomb:
    """To unpickle it is to make the file that it names."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def hub():
    require("huggingface_hub", "yaml")
    with hub_server.serve() as server:
        yield server


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of dqn.py with a model, with all that may lie in a run folder."""
    require_for("dqn")
    cwd = tmp_path_factory.mktemp("trained")
    run(script("dqn"), *TRAIN, cwd=cwd)
    folder = run_dir(cwd)
    (folder / "videos").mkdir()
    for i, name in enumerate(("99-episode-8.mp4", "100-episode-0.mp4", "100-episode-27.mp4")):
        (folder / "videos" / name).write_bytes(bytes([i]) * 1000)
    np.savez(folder / "curves.npz", steps=np.arange(3))
    (folder / "unfinished.tmp").write_bytes(b"half")
    (folder / "wandb").mkdir()
    (folder / "wandb/settings.json").write_text("{}")
    (folder / "replay.pkl").write_bytes(b"pickled")
    return folder


def tool(name, *argv, hub, cwd, code=0, token=TOKEN, **changes):
    """Run a tool against a hub; returns its output and, one line where it fails, what it complains about."""
    names = {"HF_ENDPOINT": hub if isinstance(hub, str) else hub.url, "HF_TOKEN": token}
    env = environment(**(names | {"HF_HOME": str(cwd / "hf"), "PYTHONPATH": str(ROOT)} | changes))
    if "PYTHONPATH" in changes:  # something is hidden, which a fork might know already
        command = [sys.executable, "-m", f"cleanrl_utils.{name}", *map(str, argv)]
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == code, done.stdout + done.stderr
    else:
        done = run_module(f"cleanrl_utils.{name}", *argv, cwd=cwd, env=env, code=code)
    assert token is None or token not in done.stdout + done.stderr
    if code:
        (line,) = [line for line in done.stderr.splitlines() if not line.startswith("The hub ")]
        assert line.startswith(f"{name}: ")
        return done.stdout, line
    return done.stdout, done.stderr


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_round_trip(hub, trained, tmp_path):
    """Push, push again, pull: one commit, nothing, the same bytes; what is pickled or unfinished stays at home."""
    import yaml

    output, _ = tool("hub", "push", trained, hub=hub, cwd=tmp_path)
    assert output == f"{trained} is in {NAME}\n"
    output, _ = tool("hub", "push", trained, hub=hub, cwd=tmp_path)
    assert output == f"{trained} is in {NAME}: nothing has changed\n"
    repository = hub.repositories[NAME]
    assert len(repository.commits) == 2, "the creation and one push"

    tool("hub", "pull", NAME, hub=hub, cwd=tmp_path)
    pulled, original = files_of(tmp_path / "runs/CartPole-v1-dqn-seed1"), files_of(trained)
    home = {"checkpoint.pt", "unfinished.tmp", "wandb/settings.json", "replay.pkl"}
    assert original.keys() - pulled.keys() == home
    assert pulled.keys() - original.keys() == {"README.md", "replay.mp4"}
    assert all(pulled[path] == data for path, data in original.items() if path not in home)
    assert pulled["replay.mp4"] == original["videos/100-episode-27.mp4"]
    assert pulled.keys() | {".gitattributes"} == repository.commits[-1][1].keys()

    _, front, card = pulled["README.md"].decode().split("---\n", 2)
    meta = yaml.safe_load(front)
    tags = ["CartPole-v1", "deep-reinforcement-learning", "reinforcement-learning", "custom-implementation"]
    assert meta["library_name"] == "cleanrl" and meta["tags"] == tags
    evaluated = [value for tag, _, value in raw_scalars(trained) if tag == "eval/episodic_return"]
    (metric,) = meta["model-index"][0]["results"][0]["metrics"]
    assert metric["value"] == f"{np.mean(evaluated):.2f} +/- {np.std(evaluated):.2f}"
    assert "10 episodes of the saved model on held-out seeds" in metric["name"]
    assert f"\npython cleanrl/dqn.py {' '.join(TRAIN)}\n" in card
    assert "enjoy --exp-name dqn --env-id CartPole-v1 --seed 1 --hf-entity someone\n" in card
    assert str(ROOT) not in card and str(tmp_path) not in card and "| `learning_starts` | `200` |" in card
    assert not any(
        TOKEN.encode() in data for data in [*files_of(tmp_path).values(), *repository.commits[-1][1].values()]
    )


def test_names_of_files(hub, trained, tmp_path):
    """A script's hyphen travels, and what would not travel is not left behind in silence."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    (folder / "dqn.py").rename(folder / "my-dqn.v2.py")
    tool("hub", "push", folder, hub=hub, cwd=tmp_path)
    tool("hub", "pull", NAME, hub=hub, cwd=tmp_path)
    assert [path.name for path in (tmp_path / "runs/CartPole-v1-dqn-seed1").glob("*.py")] == ["my-dqn.v2.py"]
    (events,) = folder.glob("events*")
    events.rename(folder / "events.out.tfevents.1.a host.1.0")
    _, line = tool("hub", "push", folder, hub=hub, cwd=tmp_path, code=2)
    assert "'events.out.tfevents.1.a host.1.0', which would not travel" in line
    assert len(hub.repositories[NAME].commits) == 2


def test_pull_leaves_other_folders_alone(hub, trained, tmp_path):
    hub.repositories[NAME] = published(trained)
    (tmp_path / "model.tmp").mkdir()
    (tmp_path / "model.tmp/mine").touch()
    tool("hub", "pull", NAME, "--output", "model", hub=hub, cwd=tmp_path)
    assert (tmp_path / "model.tmp/mine").exists() and (tmp_path / "model/args.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "model", "model.tmp"}
    assert (tmp_path / "model").stat().st_mode == (tmp_path / "model.tmp").stat().st_mode


def test_a_file_hands_its_run_over(hub, tmp_path):
    """--upload-model pushes the finished folder; if that fails, the run does not, and says what is left to do."""
    require_for("dqn")
    names = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT)}
    flags = [flag for flag in TRAIN if flag != "--save-model"]
    done = run(script("dqn"), *flags, "--upload-model", cwd=tmp_path, variables=names)
    folder = run_dir(tmp_path)
    assert f"{folder.relative_to(tmp_path)} is in {NAME}\n" in done.stdout and "To push it" not in done.stdout
    pushed = hub.repositories[NAME].commits[-1][1]
    for path in "model.safetensors", "args.json", "dqn.py", next(folder.glob("events*")).name:
        assert pushed[path] == (folder / path).read_bytes(), "what was pushed was not finished"
    assert TOKEN not in done.stdout + done.stderr

    flags = "--resume", folder, "--hf-entity", "someone"
    done = run(script("dqn"), *flags, cwd=tmp_path, variables=names | {"HF_TOKEN": "hf_wrong"})
    assert f"python -m cleanrl_utils.hub push {folder} --entity someone\n" in done.stdout
    assert "Traceback" not in done.stderr


def test_card_of_a_run_without_evaluation(trained, tmp_path):
    """The last 100 episodes of training, and it says so; paths of the machine are cut."""
    require("yaml")
    from torch.utils.tensorboard import SummaryWriter

    from cleanrl_utils.runs.card import card

    for name in ("dqn.py", "args.json"):
        shutil.copy(trained / name, tmp_path)
    command = f"/home/me/venv/bin/python /home/me/dqn.py --exp-name=/home/me/x --env-id '{tmp_path}/a b' --track"
    command += " --wandb-entity=me --upload-model True --hf-entity 'me too' --seed 3"
    (tmp_path / "command.txt").write_text(f"{command}\n/home/me/python dqn.py --resume x\n")
    with SummaryWriter(tmp_path) as writer:
        for i in range(150):
            writer.add_scalar("charts/episodic_return", i, i)
    text = card(tmp_path, "me/other")
    assert "value: 99.50 +/- 28.87" in text and "100 last episodes of training" in text
    assert "python cleanrl/dqn.py --exp-name=.../x --env-id '.../a b' --seed 3\n" in text and "/home/me" not in text
    assert "--repo-id me/other" in text


def test_another_run_of_the_same_name(hub, trained, tmp_path):
    """Its files replace the first one's; events of both in one folder would mix. What else is there stays."""
    again = tmp_path / "again"
    shutil.copytree(trained, again)
    (events,) = again.glob("events*")
    events.rename(again / "events.out.tfevents.1.other.1.0")
    tool("hub", "push", trained, hub=hub, cwd=tmp_path)
    repository = hub.repositories[NAME]
    repository.commit(repository.commits[-1][1] | {"notes.txt": b"mine"})
    tool("hub", "push", again, hub=hub, cwd=tmp_path)
    files = repository.commits[-1][1]
    assert [path for path in files if path.startswith("events")] == ["events.out.tfevents.1.other.1.0"]
    assert files["notes.txt"] == b"mine" and len(repository.commits) == 4


def test_retries(hub, trained, tmp_path):
    hub.failures = [503, 429]
    _, errors = tool("hub", "push", trained, hub=hub, cwd=tmp_path)
    assert "503, another try in 1 s" in errors and "429, another try in 2 s" in errors
    assert len(hub.repositories[NAME].commits) == 2
    hub.failures = [502]
    _, line = tool("hub", "pull", NAME, "--retries", 0, hub=hub, cwd=tmp_path, code=1)
    assert "502" in line and not (tmp_path / "runs").exists()


def test_refused(hub, trained, tmp_path):
    """No token, a wrong one, somebody else's place, a private repository, no hub: one line, one try, nothing shown."""
    wrong = "hf_" + "WrongTokenWrongTokenWrongToken0000"
    for token in (None, wrong):
        hub.requests.clear()
        _, line = tool("hub", "push", trained, hub=hub, cwd=tmp_path, token=token, code=1)
        assert "hf auth login" in line and hub.requests.count("GET /api/whoami-v2") == (token is not None)
    assert not any(wrong.encode() in data for data in files_of(tmp_path).values())
    _, line = tool("hub", "push", trained, "--entity", "another", hub=hub, cwd=tmp_path, code=1)
    assert "--entity" in line and not hub.repositories
    tool("hub", "push", trained, "--private", hub=hub, cwd=tmp_path)
    assert hub.repositories[NAME].private
    _, line = tool("hub", "pull", NAME, hub=hub, cwd=tmp_path, token=None, code=1)
    assert "there is no such repository, or it is private" in line
    hub.repositories[NAME].private = False
    _, line = tool("hub", "push", trained, "--private", hub=hub, cwd=tmp_path, code=2)
    assert "is public" in line
    _, line = tool("hub", "push", trained, "--repo-id", "a/b/c", hub=hub, cwd=tmp_path, code=2)
    assert "a/b/c" in line
    nowhere = ["push", trained, "--retries", 0]
    _, line = tool("hub", *nowhere, hub="http://127.0.0.1:9", cwd=tmp_path, code=1)
    assert "cannot be reached" in line
    _, line = tool("hub", *nowhere, hub=hub, cwd=tmp_path, code=1, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE" in line


@pytest.mark.parametrize("file", ["command.txt", "args.json", "dqn.py", "packages.txt"])
def test_keys_are_not_published(hub, trained, tmp_path, file):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    key = {"command.txt": "0123456789abcdef" * 2 + "01234567", "packages.txt": "a key of W&B of another kind"}
    with (folder / file).open("a") as stream:
        stream.write(key.get(file, "hf_" + "q" * 34))
    done = tool("hub", "push", folder, hub=hub, cwd=tmp_path, code=2, WANDB_API_KEY=key["packages.txt"])
    assert file in done[1] and "nothing was pushed" in done[1] and not hub.requests
    assert key.get(file, "q" * 34) not in "".join(done)


def test_wrong_usage(hub, trained, tmp_path):
    _, line = tool("hub", "push", "nowhere", hub=hub, cwd=tmp_path, code=2)
    assert "nowhere is not a run with a model" in line
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run/model.safetensors").unlink()
    (tmp_path / "run/checkpoint.pt").unlink()
    _, line = tool("hub", "push", "run", hub=hub, cwd=tmp_path, code=2)
    assert "--save-model" in line
    _, line = tool("hub", "pull", NAME, "--output", "run", hub=hub, cwd=tmp_path, code=2)
    assert "--output" in line and not hub.requests
    paths = os.pathsep.join([hiding(tmp_path, "huggingface_hub")["PYTHONPATH"], str(ROOT)])
    _, line = tool("hub", "push", trained, hub=hub, cwd=tmp_path, code=2, PYTHONPATH=paths)
    assert 'pip install -e ".[hub]"' in line and "pip install huggingface_hub" in line


# Enjoy

ENJOY = ["--exp-name", "dqn", "--env-id", "CartPole-v1", "--seed", 1, "--hf-entity", "someone"]


def test_enjoy(hub, trained, tmp_path):
    """The model of the run is played, with the returns that the run logged."""
    tool("hub", "push", trained, hub=hub, cwd=tmp_path)
    output, _ = tool("enjoy", *ENJOY, hub=hub, cwd=tmp_path, token=None)
    returns = [float(value) for value in re.findall(r"episode \d+: return (.+)", output)]
    assert returns == [value for tag, _, value in raw_scalars(trained) if tag == "eval/episodic_return"]
    assert "differs" not in output and not (tmp_path / "runs").exists()
    (first, _), *_ = hub.repositories[NAME].commits
    _, line = tool("enjoy", *ENJOY, "--revision", first, hub=hub, cwd=tmp_path, code=2)
    assert "no model.safetensors" in line
    _, line = tool("enjoy", *ENJOY, "--revision", "no-such", hub=hub, cwd=tmp_path, code=1)
    assert "no such revision" in line


def test_push_a_checkpoint(hub, trained, tmp_path):
    """Of a run that has not ended: the weights that it has by then, as data; the card says so."""
    from safetensors.numpy import load_file

    copy = shutil.copytree(trained, tmp_path / "runs/copy")
    (copy / "model.safetensors").unlink()
    for changed in "", ": nothing has changed":
        output, _ = tool("hub", "push", "latest", hub=hub, cwd=tmp_path)
        assert output == f"runs/copy is in {NAME}{changed}\n"
    (tmp_path / "model").write_bytes(hub.repositories[NAME].commits[-1][1]["model.safetensors"])
    pushed, model = load_file(tmp_path / "model"), load_file(trained / "model.safetensors")
    assert pushed.keys() == model.keys() and all((pushed[key] == model[key]).all() for key in model)
    text = hub.repositories[NAME].commits[-1][1]["README.md"].decode()
    assert "The weights are those of a checkpoint, at step 600 of 600." in text
    (copy / "checkpoint.pt").unlink()
    _, line = tool("hub", "push", copy, hub=hub, cwd=tmp_path, code=2)
    assert "model.safetensors and a checkpoint are missing" in line


def published(trained, **changes):
    """A repository that somebody might offer: a run's files, changed."""
    repository = Repository()
    names = "args.json", "model.safetensors", "dqn.py", "*.txt", "events*"
    files = {path.name: path.read_bytes() for name in names for path in trained.glob(name)} | changes
    repository.commit({path: data for path, data in files.items() if data is not None})
    return repository


def test_enjoy_a_model_that_cannot_be_played(hub, trained, tmp_path):
    cut = (trained / "model.safetensors").read_bytes()[:-9]
    hub.repositories[NAME] = published(trained, **{"model.safetensors": cut})
    _, line = tool("enjoy", *ENJOY, hub=hub, cwd=tmp_path, code=2)
    assert line.startswith("enjoy: the model does not fit the script: SafetensorError")


def test_pickles_are_not_touched(hub, trained, tmp_path):
    """As published before safetensors, or as an attacker would: neither loaded nor even downloaded.

    But for what may be a model in the original's format, which is read as data: test_published_models.py.
    """
    bomb, mark = tmp_path / "bomb", pickle.dumps(Bomb(tmp_path / "exploded"))
    bomb.write_bytes(mark)
    names = "model.pth", "sub/dqn.cleanrl_model", "checkpoint.pt", "pytorch_model.bin", "sub/model.pkl"
    pickles = dict.fromkeys(names, mark)
    hub.repositories[NAME] = published(trained, **pickles, **{"model.safetensors": None})
    for command in (["enjoy", *ENJOY], ["hub", "pull", NAME], ["reproduce", NAME]):
        _, line = tool(*command, hub=hub, cwd=tmp_path, code=2)
        assert "pickle" in line and NAME in line
    pickles |= {"q_network.pth": mark, "dqn.cleanrl_model": mark}
    hub.repositories[NAME] = published(trained, **pickles)
    tool("enjoy", *ENJOY, hub=hub, cwd=tmp_path)
    tool("hub", "pull", NAME, hub=hub, cwd=tmp_path)
    assert not {Path(path).name for path in files_of(tmp_path / "runs")} & {Path(name).name for name in pickles}
    assert not any(name in request for request in hub.requests for name in pickles)
    assert not (tmp_path / "exploded").exists()
    pickle.loads(bomb.read_bytes())
    assert (tmp_path / "exploded").exists(), "the bombs were duds"


def test_foreign_code_runs_only_where_it_is_trusted(hub, trained, tmp_path):
    mark = tmp_path / "executed"
    evil = f"open({str(mark)!r}, 'w')\n".encode() + (trained / "dqn.py").read_bytes()
    hub.repositories[NAME] = published(trained, **{"dqn.py": evil})
    output, _ = tool("enjoy", *ENJOY, hub=hub, cwd=tmp_path)
    assert "dqn.py of someone/CartPole-v1-dqn-seed1 differs from ours" in output and "Mean return of 10" in output
    output, _ = tool("hub", "pull", NAME, hub=hub, cwd=tmp_path)
    assert "Beware: dqn.py in it differs from cleanrl/dqn.py here" in output
    output, _ = tool("reproduce", NAME, "--run", hub=hub, cwd=tmp_path)
    assert "differs from ours, which runs" in output and "\nidentical: " in output
    assert not mark.exists()
    output, _ = tool("enjoy", *ENJOY, "--trust-remote-code", hub=hub, cwd=tmp_path)
    assert mark.exists() and "code of whoever pushed it" in output
    hub.repositories[NAME] = published(trained, **{"dqn.py": None, "other.py": evil})
    _, line = tool("enjoy", *ENJOY, hub=hub, cwd=tmp_path, code=2)
    assert "other.py, which is not one of ours" in line
    hub.repositories[NAME] = published(trained, **{"other.py": evil})
    _, line = tool("hub", "pull", NAME, "--output", "two", hub=hub, cwd=tmp_path, code=2)
    assert "should hold one script" in line and not (tmp_path / "two").exists()


def test_foreign_flags(hub, trained, tmp_path):
    """An environment that names a module would run it: it is played only if the user asked for it by that name."""
    mark, args = tmp_path / "executed", json.loads((trained / "args.json").read_text())
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    hub.repositories[NAME] = published(trained, **{"args.json": json.dumps(args | {"env_id": "evil:E-v0"}).encode()})
    _, line = tool("enjoy", *ENJOY, hub=hub, cwd=tmp_path, code=2)
    assert "'evil:E-v0', not of CartPole-v1" in line
    hub.repositories[NAME] = published(trained, **{"command.txt": b"python dqn.py --env-id evil:E-v0\n"})
    _, line = tool("reproduce", NAME, "--run", hub=hub, cwd=tmp_path, code=2)
    assert "evil:E-v0" in line
    completion = f"python dqn.py --tyro-write-completion bash {mark}\n".encode()
    hub.repositories[NAME] = published(trained, **{"command.txt": completion})
    _, line = tool("reproduce", NAME, "--run", hub=hub, cwd=tmp_path, code=2)
    assert "'--tyro-write-completion' is not a flag of our dqn.py" in line
    hub.repositories[NAME] = published(trained, **{"args.json": json.dumps(args | {"env_path": "/bin/sh"}).encode()})
    _, line = tool("enjoy", *ENJOY, hub=hub, cwd=tmp_path, code=2)
    assert "would start the program" in line
    hub.repositories[NAME] = published(trained, **{"packages.txt": b"--index-url=http://127.0.0.1/\n"})
    _, line = tool("reproduce", NAME, hub=hub, cwd=tmp_path, code=2)
    assert "packages.txt" in line
    for broken in (b"[1]", b"{", b'{"seed": 1}'):
        hub.repositories[NAME] = published(trained, **{"args.json": broken})
        _, line = tool("enjoy", *ENJOY, hub=hub, cwd=tmp_path, code=2)
        assert "does not hold the flags of a run" in line
    assert not mark.exists()
