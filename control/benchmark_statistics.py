"""What a handful of seeds or blocks allows to say: intervals, and verdicts that may be "undecided"."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

DRAWS = 10_000
MARGIN = 0.15  # of the reference's mean: what counts as "not inferior" and as "within" across reward scales

Interval = tuple[float, float]
Statistic = Callable[..., np.ndarray]  # takes (..., n) and ``axis``


def iqm(values: Sequence[float]) -> float:
    """Interquartile mean (arXiv 2108.13264): mean without the lowest and the highest quarter, whole points only."""
    ordered = np.sort(np.asarray(values, dtype=float))
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def bootstrap(values: Sequence[float], statistic: Statistic = np.mean) -> Interval:
    """95 % percentile interval of a statistic of independent points; seeded, so that a page can be made again."""
    low, high = np.quantile(statistic(_resample(values, np.random.default_rng(0)), axis=-1), (0.025, 0.975))
    return float(low), float(high)


def difference(own: Sequence[float], reference: Sequence[float]) -> Interval:
    """95 % interval of mean(own) - mean(reference), both drawn again."""
    rng = np.random.default_rng(0)
    means = _resample(own, rng).mean(-1) - _resample(reference, rng).mean(-1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def spread(groups: Sequence[Sequence[float]]) -> float:
    """By how much the lowest of the groups' means lies below the highest: 1 - min / max of positive means."""
    means = [float(np.mean(group)) for group in groups]
    return 1 - min(means) / max(means)


def spread_interval(groups: Sequence[Sequence[float]]) -> Interval:
    """95 % interval of :func:`spread`, every group drawn again."""
    rng = np.random.default_rng(0)
    means = np.stack([_resample(group, rng).mean(-1) for group in groups])  # (groups, draws)
    low, high = np.quantile(1 - means.min(0) / means.max(0), (0.025, 0.975))
    return float(low), float(high)


def verdict(interval: Interval, margin: float) -> str:
    """Of a difference to a reference: "not inferior" if all of it lies above -margin, "inferior" if all below."""
    if interval[0] > -margin:
        return "not inferior"
    return "inferior" if interval[1] < -margin else "undecided"


def _resample(values: Sequence[float], rng: np.random.Generator) -> np.ndarray:
    """(draws, n)"""
    points = np.asarray(values, dtype=float)
    return rng.choice(points, (DRAWS, len(points)))
