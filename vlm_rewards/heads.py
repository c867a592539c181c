"""From cosines to rewards: pure functions, batched over the last axis of embeddings. No gradient is needed."""

from __future__ import annotations

import torch
from torch import Tensor


def goal_baseline(x: Tensor, goal: Tensor, baseline: Tensor, alpha: float) -> Tensor:
    """Goal-baseline regularised reward of VLM-RM (Rocamonde et al. 2024, arXiv 2310.12921) without the D x D matrix.

    R = 1 - 0.5 * ||(x - g) P||^2 with P = alpha * d d^T / ||d||^2 + (1 - alpha) I and d = g - b. P stretches by 1 along
    d and by 1 - alpha across it, so with e = x - g and p = e.d / ||d||: ||e P||^2 = (1-alpha)^2 (||e||^2 - p^2) + p^2.

    Args:
        x: (..., D) unit image embeddings. goal, baseline: (D,) mean of unit sentence embeddings, not re-normalised.
        alpha: 0 gives the cosine (for one goal sentence), 1 only the position along the line.

    Returns:
        (...) rewards, at most 1.
    """
    direction = goal - baseline
    error = x - goal
    along = error @ (direction / direction.norm().clamp(min=1e-8))  # (...)
    across = error.square().sum(-1) - along.square()
    return 1.0 - 0.5 * ((1.0 - alpha) ** 2 * across + along.square())


def softmax_probability(goal: Tensor, negatives: Tensor, temperature: float) -> Tensor:
    """Probability of the goal sentence against its negatives (Baumli et al. 2023, arXiv 2312.09187).

    Args:
        goal: (...) cosine with the goal. negatives: (..., K) cosines with the negatives.
    """
    logits = torch.cat([goal[..., None], negatives], dim=-1) / temperature
    return logits.softmax(-1)[..., 0]


def gated(
    cosine: Tensor,
    probability: Tensor,
    low: float,
    high: float,
    threshold: float,
    dense_scale: float = 0.5,
    gate_scale: float = 1.0,
) -> Tensor:
    """Dense term plus success gate: ``dense_scale * clip((cos - low) / (high - low), 0, 1) + gate_scale * [p >= t]``.

    Args:
        cosine, probability: (...). low, high: cosines that count as no progress and as done (calibration).
        threshold: of the probability, calibrated for few false positives.
    """
    dense = ((cosine - low) / (high - low)).clamp(0.0, 1.0)
    return dense_scale * dense + gate_scale * (probability >= threshold).float()
