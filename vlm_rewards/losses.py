"""Losses of ``fit`` as pure functions of cosines and truths."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def contrastive(logits: Tensor, truth: Tensor) -> Tensor:
    """Multi-positive contrastive loss of (B, C) logits, both directions averaged.

    Each true (image, sentence) pair competes with the false pairs of its row (and of its column); other true pairs do
    not count against it, borderline ones (-1) not at all. After Khosla et al. 2020 (arXiv 2004.11362), with the other
    positives left out of the denominator.
    """
    return 0.5 * (_one_way(logits, truth) + _one_way(logits.T, truth.T))


def _one_way(logits: Tensor, truth: Tensor) -> Tensor:
    positive, negative = truth == 1, truth == 0
    against = logits.masked_fill(~negative, -1e4).logsumexp(1, keepdim=True)  # (B, 1)
    each = F.softplus(against - logits) * positive  # (B, C)
    count = positive.sum(1)
    rows = each.sum(1) / count.clamp(min=1)
    return rows.sum() / (count > 0).sum().clamp(min=1)


def rank_pairs(a: Tensor, b: Tensor, progress_a: Tensor, progress_b: Tensor, margin: float = 0.08) -> Tensor:
    """Pairwise logistic loss: the cosine of the further-progressed member must be higher.

    Args:
        a, b: (...) cosines. progress_a, progress_b: (...) progress in 0..1, NaN where undefined.
        margin: pairs closer than this say nothing.
    """
    gap = torch.nan_to_num(progress_a - progress_b)
    told = (gap.abs() > margin).float()
    each = F.softplus(-15.0 * gap.sign() * (a - b))
    return (each * told).sum() / told.sum().clamp(min=1.0)


def rank(cosine: Tensor, progress: Tensor, pairings: int = 4) -> Tensor:
    """Random pairs of frames, the same sentence. (B, G) cosines and progress."""
    total = cosine.new_zeros(())
    for _ in range(pairings):
        other = torch.randperm(len(cosine))
        total = total + rank_pairs(cosine, cosine[other], progress, progress[other])
    return total / pairings
