"""--track mirrors a run to Weights & Biases, here in offline mode, also when it is resumed."""

from helpers.files import METRICS, each_text, family, require, require_for, script, smoke
from helpers.processes import run, run_dir


@each_text("Run")
def test_offline_run(name, tmp_path):
    require("wandb")
    require_for(name)
    flags = ["--track", "--wandb-project-name", "a-project"]
    run(script(name), *smoke(name), *flags, cwd=tmp_path)
    run(script(name), "--resume", run_dir(tmp_path), *flags, cwd=tmp_path)
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2, "one for the run, one for the resumed one"
    data = files[0].read_bytes()
    assert b"a-project" in data and run_dir(tmp_path).name.encode() in data
    for tag in METRICS[family(name)] | {"charts/episodic_return"}:
        assert tag.encode() in data, tag
    assert run_dir(tmp_path).name.encode() in files[1].read_bytes(), "the resumed run has another id"
