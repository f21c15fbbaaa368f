"""--track mirrors a run to Weights & Biases, here in offline mode, also when it is resumed; or says why it cannot."""

import json
import re

from helpers import wandb_files
from helpers.files import METRICS, ROOT, each_text, family, require, require_for, script, smoke
from helpers.processes import environment, run, run_dir
from helpers.refusals import refuse

BLOCKS = each_text("Run")  # one file of each backend


@BLOCKS
def test_offline_run(name, tmp_path):
    """What goes there is the same text in both backends: films and a resumed run for the first one."""
    require("wandb", "moviepy")
    require_for(name)
    flags = ["--track", "--wandb-project-name", "a-project"]
    films = ["--capture-video", "--env-id", "CartPole-v1"] * (name == BLOCKS.args[1][0])
    (tmp_path / "cleanrl").symlink_to(ROOT / "cleanrl")  # W&B keeps the source of scripts below the current folder
    env = environment(WANDB_TAGS="pr-299,v1.0.0") if films else None  # a process of its own, whose script W&B finds
    run(tmp_path / f"cleanrl/{name}.py", *smoke(name), *flags, *films, cwd=tmp_path, env=env)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    data = file.read_bytes()
    assert b"a-project" in data and run_dir(tmp_path).name.encode() in data
    for tag in METRICS[family(name)] | {"charts/episodic_return"}:
        assert tag.encode() in data, tag
    if not films:
        return
    check_items(name, file, [*smoke(name), *flags, *films])
    films = {*run_dir(tmp_path).glob("videos/*.mp4")}
    assert sizes(file.parent.glob("files/media/videos/*.mp4")) == sizes(films) and films
    run(script(name), "--resume", run_dir(tmp_path), *flags, cwd=tmp_path)
    (again,) = {*(tmp_path / "wandb").glob("offline-run-*/*.wandb")} - {file}
    assert run_dir(tmp_path).name.encode() in again.read_bytes(), "the resumed run has another id"
    more = {*run_dir(tmp_path).glob("videos/*.mp4")} - films  # of the game that it began
    assert sizes(again.parent.glob("files/media/videos/*.mp4")) == sizes(more), "films were sent twice"


def sizes(files):
    return sorted(file.stat().st_size for file in files)


def check_items(name, path, command):
    """What the paper on CleanRL says that W&B keeps, in eight items; films are counted above."""
    records, files = wandb_files.read(path), path.parent / "files"
    run, listed = records["run"][0], {item.path for record in records["files"] for item in record.files}
    assert list(run.tags) == ["pr-299", "v1.0.0"] and run.project == "a-project"
    (source,) = files.glob(f"code/**/{name}.py")
    assert source.read_bytes() == script(name).read_bytes()  # 1 source code, 2 dependencies
    assert {str(source.relative_to(files)), "requirements.txt"} <= listed
    assert re.search(r"(?m)^gymnasium==", (files / "requirements.txt").read_text())
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["seed"] == 1 and config["exp_name"] == name  # 3 hyperparameters
    assert list(records["environment"][0].args) == [str(word) for word in command]  # 4 command, 5 metrics
    logged = {item.key or item.nested_key[0] for record in records["history"] for item in record.item}
    assert METRICS[family(name)] | {"charts/SPS", "global_step"} <= logged
    assert "videos" in logged  # 6 videos, 7 use of the machine
    assert {"proc.memory.rssMB", "proc.cpu.threads"} <= {item.key for stats in records["stats"] for item in stats.item}
    printed = "".join(record.line for record in records["output_raw"])  # 8 what is printed
    assert "The run is in runs/" in printed and "The run is in runs/" in (files / "output.log").read_text()


def test_without_a_login(tmp_path):
    """One line, before there is a run; nothing listens at that address."""
    require("wandb")
    env = environment(WANDB_MODE=None, WANDB_API_KEY=None, WANDB_BASE_URL="http://127.0.0.1:9", HOME=str(tmp_path))
    line = refuse(BLOCKS.args[1][0], "--total-timesteps", 1024, "--track", cwd=tmp_path, env=env)
    assert "wandb login" in line and "WANDB_MODE=offline" in line
