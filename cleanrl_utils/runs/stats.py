"""Statistics over seeds and environments, in NumPy: means that few outliers move, and how far to trust them.

Scores come in groups, one array per environment with a value per seed; seeds are drawn anew within each environment
(a stratified bootstrap). Everything is seeded: the same scores give the same intervals. One seed tells nothing about
the spread and two next to nothing, so there the bounds are nan: an interval takes two degrees of freedom (seeds less
one, summed over the groups), a point of a curve three seeds.

An interval of the plain percentile bootstrap is too short with few seeds: at 3 seeds one that says 95 % covers the mean
in 3 of 4 cases. Intervals here are widened by sqrt(n / (n - 1)) and by Student's t over the normal quantile;
`widen=False` gives the plain ones, as rliable has them. docs/decisions/016 has the measurements.
"""

from functools import lru_cache
from itertools import combinations_with_replacement
from math import factorial, prod
from statistics import NormalDist

import numpy as np


@lru_cache(4096)
def t_quantile(p, df):
    """The quantile of Student's t: with t = sqrt(df) tan(a), the density of a is proportional to cos(a)^(df - 1)."""
    angles = np.linspace(0, np.pi / 2, 20_001)
    density = np.cos(angles) ** (df - 1)
    mass = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return float(np.copysign(np.sqrt(df) * np.tan(np.interp(abs(2 * p - 1), mass / mass[-1], angles)), p - 0.5))


def widening(sizes, level=0.95):
    """What a plain interval is too short by, given the seeds of each group."""
    sizes = [size for size in sizes if size > 1]
    p, df = (1 + level) / 2, sum(size - 1 for size in sizes)
    if df < 2:
        return np.nan
    n = np.mean(sizes)
    return np.sqrt(n / (n - 1)) * t_quantile(p, df) / NormalDist().inv_cdf(p)


def iqm(x):
    """The interquartile mean: the mean of the values without the lowest and the highest quarter (rounded down).

    Of an array over its last axis, or of the values of several groups side by side.
    """
    if isinstance(x, (list, tuple)):
        x = np.concatenate([np.atleast_1d(group) for group in x], axis=-1)
    x = np.sort(x, axis=-1)
    cut = x.shape[-1] // 4
    return x[..., cut : x.shape[-1] - cut].mean(axis=-1)


def mean_of_means(groups):
    """The mean over the environments of the mean over their seeds."""
    return np.mean([np.mean(group, axis=-1) for group in groups], axis=0)


def resample(groups, reps, rng):
    """Seeds drawn anew within each group: arrays of [reps, seeds]."""
    return [group[rng.integers(len(group), size=(reps, len(group)))] for group in groups]


def interval(point, samples, sizes, level, widen):
    """The percentiles of resampled statistics around their point, nan where the seeds are too few."""
    low, high = np.quantile(samples, [(1 - level) / 2, (1 + level) / 2], axis=0)
    factor = widening(sizes, level)
    factor = factor if widen else factor / factor
    return point, point - (point - low) * factor, point + (high - point) * factor


def within(triple, lowest, highest):
    """A mean and its interval, of which only what lies in a range is kept: widened, it may leave what scores can be."""
    point, low, high = triple
    return point, np.clip(low, lowest, highest), np.clip(high, lowest, highest)


def bootstrap(groups, statistic, reps=2000, seed=0, level=0.95, widen=True):
    """A statistic of groups of scores and its interval: (point, low, high).

    `statistic(groups)` gets a list of arrays [..., seeds] and takes their last axis: `iqm`, `mean_of_means` or such.
    """
    groups = [np.asarray(group, dtype=float) for group in groups]
    samples = statistic(resample(groups, reps, np.random.default_rng(seed)))
    return interval(statistic(groups), samples, [len(group) for group in groups], level, widen)


@lru_cache
def draws(n, reps, seed):
    """How often each of n seeds is drawn, [draws, n], and the probability of each draw: all that there are, if few."""
    if n <= 6:  # 462 of them
        picks = combinations_with_replacement(range(n), n)
        counts = np.array([np.bincount(pick, minlength=n) for pick in picks])
        ways = np.array([factorial(n) / prod(factorial(c) for c in row) for row in counts.tolist()])
        return counts, ways / ways.sum()
    counts = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=reps)
    return counts, np.full(reps, 1 / reps)


def bootstrap_curves(values, reps=1000, seed=0, level=0.95, widen=True):
    """The mean over seeds of curves [seeds, points] with its interval at each point: (mean, low, high).

    A value may be nan where a seed has none (before its first episode, say). Up to 6 seeds, every draw is counted. The
    bounds are nan where fewer than 3 seeds have a value.
    """
    values = np.asarray(values, dtype=float)
    known = ~np.isnan(values)
    counts, weights = draws(len(values), reps, seed)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(known, values, 0).sum(axis=0) / known.sum(axis=0)
        # Without the mean first: sums of large numbers would differ by rounding where all seeds agree.
        samples = counts @ np.where(known, values - mean, 0) / (counts @ known)
    order = np.argsort(samples, axis=0)  # nan last
    samples = np.take_along_axis(samples, order, axis=0)
    mass = np.cumsum(np.where(np.isnan(samples), 0, weights[order]), axis=0)
    at = [(mass < q * mass[-1]).sum(axis=0) for q in ((1 - level) / 2, (1 + level) / 2)]
    low, high = (np.take_along_axis(samples, np.minimum(i, len(samples) - 1)[None], axis=0)[0] for i in at)
    seeds = known.sum(axis=0)
    factors = np.array([widening([n], level) for n in range(len(values) + 1)])[seeds]
    factors = factors if widen else factors / factors
    return mean, mean + low * factors, mean + high * factors


def share(point, low, high, n, level):
    """The interval of a share, at least as wide as Wilson's of n trials: a bootstrap of all won knows no loss."""
    z2 = NormalDist().inv_cdf((1 + level) / 2) ** 2
    centre = (point + z2 / 2 / n) / (1 + z2 / n)
    margin = np.sqrt(z2 / n * (point * (1 - point) + z2 / 4 / n)) / (1 + z2 / n)
    return point, np.clip(np.minimum(low, centre - margin), 0, 1), np.clip(np.maximum(high, centre + margin), 0, 1)


def performance_profile(groups, taus, reps=2000, seed=0, level=0.95, widen=True):
    """The share of runs with a score above each tau, the mean over environments: (point, low, high), each [taus]."""

    def above(groups):
        return np.mean([np.stack([(x > tau).mean(axis=-1) for tau in taus], axis=-1) for x in groups], axis=0)

    runs = sum(len(group) for group in groups)
    return share(*bootstrap(groups, above, reps, seed, level, widen), runs, level)


def probability_of_improvement(groups_x, groups_y, reps=2000, seed=0, level=0.95, widen=True):
    """The probability that a run of x beats one of y, mean over environments; ties count half: (point, low, high)."""

    def wins(groups):
        pairs = zip(groups[: len(groups_x)], groups[len(groups_x) :], strict=True)
        signs = [np.sign(x[..., :, None] - y[..., None, :]).mean(axis=(-2, -1)) for x, y in pairs]
        return (1 + np.mean(signs, axis=0)) / 2

    sizes = [(len(x), len(y)) for x, y in zip(groups_x, groups_y, strict=True)]
    trials = sum(3 * n * m / (n + m + 1) for n, m in sizes)  # with the variance of Mann and Whitney's U
    return share(*bootstrap([*groups_x, *groups_y], wins, reps, seed, level, widen), trials, level)
