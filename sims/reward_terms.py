"""Shapes that task rewards are made of; torch tensors (B,)."""

from __future__ import annotations

import torch
from torch import Tensor

EFFORT = 0.01  # per squared unit action; keeps a finished arm still


def near(distance: Tensor, sharpness: float) -> Tensor:
    """1 at the goal, falling as 1 - tanh(sharpness * d), d in metres. (B,) -> (B,)"""
    return 1.0 - torch.tanh(sharpness * distance)


def fraction(value: Tensor, full: float) -> Tensor:
    """``value / full`` clipped to 0..1. (B,) -> (B,)"""
    return (value / full).clip(0.0, 1.0)


def effort(unit_action: Tensor) -> Tensor:
    """Penalty of (B, A) actions in the unit box. -> (B,)"""
    return -EFFORT * unit_action.square().sum(-1)
