"""Bring the fixed fingertip 8 mm above the marker."""

from __future__ import annotations

from torch import Tensor

from sims.reward_terms import near
from sims.tasks.base import Scene, Task
from sims.tasks.scripted import ReachScript
from sims.worlds.predicates import reach_distance, reach_ok


def terms(scene: Scene) -> dict[str, Tensor]:
    d = reach_distance(scene.tip, scene.goal)
    return {"near": 0.5 * near(d, 6.0), "precise": 0.5 * near(d, 25.0)}


def ok(scene: Scene) -> Tensor:
    return reach_ok(scene.tip, scene.goal)


REACH = Task("reach", terms, ok, ReachScript)
