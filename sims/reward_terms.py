"""Shapes that task rewards are made of; numpy or torch in, the same out."""

from __future__ import annotations

import numpy as np

EFFORT = 0.01  # per squared unit action; keeps a finished arm still


def near(distance: np.ndarray, sharpness: float) -> np.ndarray:
    """1 at the goal, falling as 1 - tanh(sharpness * d), d in metres. (B,) -> (B,)"""
    return 1.0 - np.tanh(sharpness * distance)


def fraction(value: np.ndarray, full: float) -> np.ndarray:
    """``value / full`` clipped to 0..1. (B,) -> (B,)"""
    return np.clip(value / full, 0.0, 1.0)


def effort(unit_action: np.ndarray) -> np.ndarray:
    """Penalty of (B, A) actions in the unit box. -> (B,)"""
    return -EFFORT * np.square(unit_action).sum(axis=-1)
