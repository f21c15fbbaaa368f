"""The same seed on the same machine gives the same metrics, bit by bit; another seed gives others."""

from conftest import each, environment, inspect_runs, raw_scalars, require_for, run, run_dir, script, smoke, untimed


@each()
def test_same_seed_same_metrics(name, tmp_path):
    require_for(name)
    run(script(name), *smoke(name, seed=7), cwd=tmp_path, env=environment())  # a process of its own, not a fork
    first = untimed(raw_scalars(run_dir(tmp_path)))
    (tmp_path / "again").mkdir()
    inspect_runs(script(name), [smoke(name, seed=seed) for seed in (7, 8)], cwd=tmp_path / "again")
    folders = sorted((tmp_path / "again/runs").iterdir(), key=lambda folder: folder.name.split("__")[2])
    again, other = (untimed(raw_scalars(folder)) for folder in folders)
    assert len(first) > 10
    assert first == again
    losses = [[scalar for scalar in scalars if scalar[0].startswith("losses/")] for scalars in (first, other)]
    assert losses[0] != losses[1]
