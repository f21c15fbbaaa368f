"""The same seed on the same machine gives the same metrics, bit by bit; another seed gives others."""

from conftest import each, raw_scalars, require_for, run, run_dir, script, smoke, untimed


@each()
def test_same_seed_same_metrics(name, tmp_path):
    require_for(name)
    runs = []
    for folder, seed in (("a", 7), ("b", 7), ("c", 8)):
        (tmp_path / folder).mkdir()
        run(script(name), *smoke(name, seed=seed), cwd=tmp_path / folder)
        runs.append(untimed(raw_scalars(run_dir(tmp_path / folder))))
    first, again, other = runs
    assert len(first) > 10
    assert first == again
    losses = [[scalar for scalar in scalars if scalar[0].startswith("losses/")] for scalars in (first, other)]
    assert losses[0] != losses[1]
