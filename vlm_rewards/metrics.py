"""How good a score is: ranking statistics in numpy, each checkable by hand."""

from __future__ import annotations

import numpy as np


def ranks(x: np.ndarray) -> np.ndarray:
    """(N,) ranks from 1, ties get their mean."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2.0)[inverse]


def auroc(score: np.ndarray, label: np.ndarray) -> float:
    """Chance that a positive scores above a negative, ties half. NaN without both classes. ``label``: (N,) bool."""
    positives = int(label.sum())
    negatives = len(label) - positives
    if not positives or not negatives:
        return float("nan")
    total = ranks(score)[label].sum() - positives * (positives + 1) / 2.0
    return float(total / (positives * negatives))


def threshold_at_recall(score: np.ndarray, label: np.ndarray, recall: float = 0.95) -> float:
    """Largest threshold that at least ``recall`` of the positives reach (score >= threshold)."""
    found = np.sort(score[label])[::-1]
    if not len(found):
        return float("nan")
    return float(found[int(np.ceil(recall * len(found))) - 1])


def false_positive_rate(score: np.ndarray, negative: np.ndarray, threshold: float) -> float:
    """Share of the (N,) bool ``negative`` frames at or above the threshold."""
    return float((score[negative] >= threshold).mean()) if negative.any() else float("nan")


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation; NaN if either is constant."""
    x, y = ranks(a) - (len(a) + 1) / 2.0, ranks(b) - (len(b) + 1) / 2.0
    scale = np.sqrt((x * x).sum() * (y * y).sum())
    return float((x * y).sum() / scale) if scale > 0 else float("nan")
