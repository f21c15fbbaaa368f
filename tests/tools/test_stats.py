"""cleanrl_utils.runs.stats against slow oracles that draw every resample there is, and against tables."""

from itertools import product

import numpy as np
import pytest

from cleanrl_utils.runs.stats import (
    bootstrap,
    bootstrap_curves,
    draws,
    iqm,
    mean_of_means,
    performance_profile,
    probability_of_improvement,
    t_quantile,
)

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    "p, df, table", [(0.975, 1, 12.7062), (0.975, 2, 4.3027), (0.95, 4, 2.1318), (0.995, 8, 3.3554)]
)
def test_students_quantiles(p, df, table):
    assert t_quantile(p, df) == pytest.approx(table, rel=1e-4)
    assert t_quantile(1 - p, df) == pytest.approx(-table, rel=1e-4)
    assert t_quantile(0.5, df) == 0 and t_quantile(p, 10**4) < table


def test_iqm():
    def slow(values):
        values, cut = sorted(values), len(values) // 4
        kept = values[cut : len(values) - cut]
        return sum(kept) / len(kept)

    for n in range(1, 14):
        x = RNG.normal(size=n)
        assert iqm(x) == pytest.approx(slow(x)) and iqm(x.tolist()) == pytest.approx(slow(x))
    groups = [RNG.normal(size=5), RNG.normal(size=3)]
    assert iqm(groups) == pytest.approx(slow(np.concatenate(groups)))
    np.testing.assert_allclose(iqm(np.arange(12.0).reshape(3, 4)), [1.5, 5.5, 9.5])
    assert iqm([0, 1, 2, 1000]) == 1.5


def every_resample(groups):
    """Each way to draw the seeds of each group anew, all equally likely."""
    for picks in product(*(product(group, repeat=len(group)) for group in groups)):
        yield [np.array(pick) for pick in picks]


@pytest.mark.parametrize("statistic", [iqm, mean_of_means])
def test_bootstrap_as_every_resample(statistic):
    groups = [RNG.normal(size=4), RNG.normal(3, 2, size=3)]
    samples = [statistic(drawn) for drawn in every_resample(groups)]
    point, low, high = bootstrap(groups, statistic, reps=100_000, widen=False)
    assert point == pytest.approx(statistic(groups)) and len(samples) == 4**4 * 3**3
    np.testing.assert_allclose([low, high], np.quantile(samples, [0.025, 0.975]), atol=0.05)
    assert bootstrap(groups, statistic) == bootstrap(groups, statistic) != bootstrap(groups, statistic, seed=1)


def test_every_draw_is_counted_once():
    for n in range(1, 6):
        counts, weights = draws(n, 1000, 0)
        found = {tuple(row): weight for row, weight in zip(counts.tolist(), weights)}
        oracle = {}
        for pick in product(range(n), repeat=n):
            key = tuple(np.bincount(pick, minlength=n).tolist())
            oracle[key] = oracle.get(key, 0) + n**-n
        assert found == pytest.approx(oracle)


@pytest.mark.parametrize("seeds", [3, 4, 30])
def test_curves(seeds):
    """Point by point what the bootstrap of a single value gives, with all resamples counted where they are few."""
    values = RNG.normal(size=(seeds, 3)) * [1, 10, 0] + [0, 5, 7]
    mean, low, high = bootstrap_curves(values, reps=5000, widen=False)
    np.testing.assert_allclose(mean, values.mean(axis=0))
    for i in range(3):
        if seeds < 30:
            samples = [np.mean(drawn) for drawn in every_resample([values[:, i]])]
            oracle = np.quantile(samples, [0.025, 0.975], method="inverted_cdf")
        else:
            oracle = bootstrap([values[:, i]], iqm if i == 2 else mean_of_means, reps=20_000, widen=False)[1:]
        np.testing.assert_allclose([low[i], high[i]], oracle, atol=1e-9 if seeds < 30 else 0.25)
    assert low[2] == mean[2] == high[2] == 7


def test_curves_with_gaps():
    """A point counts the seeds that have a value there; where they are fewer than three there is no interval."""
    values = np.array([[np.nan, 1, 1, 4], [np.nan, np.nan, 2, 6], [np.nan, np.nan, np.nan, 8.0]])
    mean, low, high = bootstrap_curves(values)
    np.testing.assert_allclose(mean, [np.nan, 1, 1.5, 6])
    assert np.isnan(low[:3]).all() and np.isnan(high[:3]).all() and low[3] < mean[3] < high[3]
    np.testing.assert_allclose([low[3], high[3]], [column[0] for column in bootstrap_curves(values[:, 3:])[1:]])


@pytest.mark.parametrize("widen", [True, False])
@pytest.mark.parametrize("seeds", [1, 2])
def test_one_seed_or_two_have_no_interval(seeds, widen):
    assert np.isnan(bootstrap([[3.0, 5.0][:seeds], [4.0]], iqm, widen=widen)[1:]).all()
    mean, low, high = bootstrap_curves([[1.0, 2.0], [1.0, 4.0]][:seeds], widen=widen)
    assert list(mean) == [1, 1 + seeds] and np.isnan(low).all() and np.isnan(high).all()
    assert np.isnan(probability_of_improvement([[1.0, 3.0][:seeds]], [[2.0]], widen=widen)[1:]).all()
    assert np.isnan(performance_profile([[1.0, 2.0][:seeds]], [0.5], widen=widen)[1:]).all()
    assert np.isfinite(bootstrap([[3.0, 5.0], [4.0, 5.0]], iqm, widen=widen)).all()


def test_intervals_cover_what_they_say():
    """The plain interval of three seeds covers the mean in far fewer than 95 of 100 cases, the widened one does not."""
    values = np.random.default_rng(1).normal(size=(3, 4000))
    for widen, least, most in ((False, 0.6, 0.85), (True, 0.93, 0.97)):
        _, low, high = bootstrap_curves(values, widen=widen)
        assert least < ((low <= 0) & (0 <= high)).mean() < most
    groups = np.random.default_rng(2).normal(size=(300, 4, 3))
    covered = [low <= 0 <= high for _, low, high in (bootstrap(g, mean_of_means, reps=500) for g in groups)]
    assert np.mean(covered) > 0.9


def test_profile_and_improvement():
    x, y = [np.array([1.0, 2, 3, 4]), np.array([10.0, 10])], [np.array([2.0, 2]), np.array([10.0, 0, 20])]
    point, low, high = performance_profile(x, [0, 2, 3.5, 10])
    np.testing.assert_allclose(point, [1, (0.5 + 1) / 2, (0.25 + 1) / 2, 0])
    assert (low <= point).all() and (point <= high).all() and low.min() >= 0 and high.max() <= 1
    wins = [np.mean([(a > b) + (a == b) / 2 for a in p for b in q]) for p, q in zip(x, y)]
    point, low, high = probability_of_improvement(x, y)
    assert point == pytest.approx(np.mean(wins)) and 0 <= low < point < high <= 1
    assert probability_of_improvement(y, x)[0] == pytest.approx(1 - point)
    assert performance_profile([[1.0, 2, 3]], [0.5])[1] == pytest.approx(3 / (3 + 1.96**2), abs=1e-3)  # Wilson's


def test_all_won_is_not_certain():
    """Three wins of three happen often at 9 in 10; the bootstrap of them alone would be [1, 1]."""
    point, low, high = probability_of_improvement([[2.0, 3, 4]], [[0.0, 1, 1]])
    assert (point, high) == (1, 1) and 0.4 < low < 0.6
    x = np.random.default_rng(3).normal(size=(100, 2, 1, 3)) + [[[1.812]], [[0]]]  # P(x > y) is 0.9
    intervals = [probability_of_improvement(*pair, reps=200) for pair in x]
    assert np.mean([low <= 0.9 <= high for _, low, high in intervals]) > 0.9
