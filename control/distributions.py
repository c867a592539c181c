"""The squashed Gaussian: u ~ N(mean, std), unit action a = tanh(u), physical action = centre + half_range * a."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def gaussian_log_prob(u: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log density of ``u`` per element, same shape."""
    return -0.5 * ((u - mean) * torch.exp(-log_std)).square() - log_std - LOG_SQRT_2PI


def log_one_minus_tanh_squared(u: Tensor) -> Tensor:
    """log(1 - tanh(u)^2) without cancellation at any u: 2 (log 2 - u - softplus(-2 u))."""
    return 2 * (math.log(2) - u - F.softplus(-2 * u))


def squashed_log_prob(u: Tensor, mean: Tensor, log_std: Tensor, half_range: Tensor | None = None) -> Tensor:
    """(..., A) -> (...,) log density of the action ``centre + half_range * tanh(u)``.

    Change of variables: log p(action) = sum over A of [log N(u) - log(1 - tanh(u)^2) - log(half_range)]. Learners work
    in the unit box (``half_range=None``, the last term is 0), so that the target entropy -|A| and alpha do not depend
    on the units of a robot's actions.
    """
    log_prob = gaussian_log_prob(u, mean, log_std) - log_one_minus_tanh_squared(u)
    if half_range is not None:
        log_prob = log_prob - half_range.log()
    return log_prob.sum(-1)


def sample_squashed(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Reparametrised sample: (N, A) each -> unit action (N, A) and its log density in the unit box (N,)."""
    u = torch.addcmul(mean, log_std.exp(), noise)
    log_prob = -0.5 * noise.square() - log_std - LOG_SQRT_2PI - log_one_minus_tanh_squared(u)
    return torch.tanh(u), log_prob.sum(-1)
