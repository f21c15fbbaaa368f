"""--track mirrors a run to Weights & Biases, here in offline mode, also when it is resumed; or says why it cannot."""

from helpers.files import METRICS, each_text, family, require, require_for, script, smoke
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
    run(script(name), *smoke(name), *flags, *films, cwd=tmp_path)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    data = file.read_bytes()
    assert b"a-project" in data and run_dir(tmp_path).name.encode() in data
    for tag in METRICS[family(name)] | {"charts/episodic_return"}:
        assert tag.encode() in data, tag
    if not films:
        return
    sent = {film.stat().st_size for film in tmp_path.glob("wandb/*/files/media/videos/*.mp4")}
    assert sent == {film.stat().st_size for film in run_dir(tmp_path).glob("videos/*.mp4")} and sent
    run(script(name), "--resume", run_dir(tmp_path), *flags, cwd=tmp_path)
    (again,) = {*(tmp_path / "wandb").glob("offline-run-*/*.wandb")} - {file}
    assert run_dir(tmp_path).name.encode() in again.read_bytes(), "the resumed run has another id"


def test_without_a_login(tmp_path):
    """One line, before there is a run; nothing listens at that address."""
    require("wandb")
    env = environment(WANDB_MODE=None, WANDB_API_KEY=None, WANDB_BASE_URL="http://127.0.0.1:9", HOME=str(tmp_path))
    line = refuse(BLOCKS.args[1][0], "--total-timesteps", 1024, "--track", cwd=tmp_path, env=env)
    assert "wandb login" in line and "WANDB_MODE=offline" in line
