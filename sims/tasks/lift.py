"""Raise a cube by at least 8 cm."""

from __future__ import annotations

from torch import Tensor

from sims.reward_terms import fraction, near
from sims.tasks.base import Scene, Task, distance
from sims.tasks.scripted import LiftScript
from sims.worlds.predicates import LIFT_HEIGHT, lift_ok, rise

GRASP_RANGE = 0.03  # m: jaw contacts count as a grasp of this cube only when the hand is so near


def terms(scene: Scene) -> dict[str, Tensor]:
    d = distance(scene.grasp, scene.goal)
    held = (scene.touch > 0.0).all(-1) & (d < GRASP_RANGE)
    return {
        "near": 0.2 * near(d, 8.0),
        "precise": 0.1 * near(d, 30.0),
        "touch": 0.2 * held,
        "height": 0.5 * fraction(rise(scene.goal), LIFT_HEIGHT),
    }


def ok(scene: Scene) -> Tensor:
    return lift_ok(scene.goal)


LIFT = Task("lift", terms, ok, LiftScript)
