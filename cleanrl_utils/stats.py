"""Statistics over seeds and environments, in NumPy: means that few outliers move, and how far to trust them.

Scores come in groups, one array per environment with a value per seed; seeds are drawn anew within each environment
(a stratified bootstrap). Everything is seeded: the same scores give the same intervals. A single seed tells nothing
about the spread, so its intervals are nan.

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
    if not sizes:
        return np.nan
    p, df, n = (1 + level) / 2, sum(size - 1 for size in sizes), np.mean(sizes)
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
    """The percentiles of resampled statistics around their point, nan if no group has two seeds."""
    low, high = np.quantile(samples, [(1 - level) / 2, (1 + level) / 2], axis=0)
    factor = widening(sizes, level) if widen or max(sizes) < 2 else 1.0
    return point, point - (point - low) * factor, point + (high - point) * factor


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

    A value may be nan where a seed has none (before its first episode, say). Up to 6 seeds, every draw is counted.
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
    factors = np.array([widening([n], level) if widen or n < 2 else 1.0 for n in range(len(values) + 1)])[seeds]
    return mean, mean + low * factors, mean + high * factors


def performance_profile(groups, taus, reps=2000, seed=0, level=0.95, widen=True):
    """The share of runs with a score above each tau, the mean over environments: (point, low, high), each [taus]."""

    def above(groups):
        shares = []
        for group in groups:
            ranks = np.sort(group, axis=-1)
            shares.append(np.stack([(ranks > tau).mean(axis=-1) for tau in taus], axis=-1))
        return np.mean(shares, axis=0)

    point, low, high = bootstrap(groups, above, reps, seed, level, widen)
    return point, np.clip(low, 0, 1), np.clip(high, 0, 1)


def probability_of_improvement(groups_x, groups_y, reps=2000, seed=0, level=0.95, widen=True):
    """The probability that a run of x beats one of y, mean over environments; ties count half: (point, low, high)."""

    def wins(groups):
        pairs = zip(groups[: len(groups_x)], groups[len(groups_x) :], strict=True)
        signs = [np.sign(x[..., :, None] - y[..., None, :]).mean(axis=(-2, -1)) for x, y in pairs]
        return (1 + np.mean(signs, axis=0)) / 2

    point, low, high = bootstrap([*groups_x, *groups_y], wins, reps, seed, level, widen)
    return point, np.clip(low, 0, 1), np.clip(high, 0, 1)
