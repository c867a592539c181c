"""Push a button's cap down by at least 5 mm."""

from __future__ import annotations

from torch import Tensor

from sims.reward_terms import fraction, near
from sims.tasks.base import Scene, Task, distance
from sims.tasks.scripted import PressScript
from sims.worlds.predicates import press_ok


def terms(scene: Scene) -> dict[str, Tensor]:
    d = distance(scene.tip, scene.goal)
    return {
        "near": 0.5 * near(d, 6.0),
        "precise": 0.25 * near(d, 25.0),
        "depth": 0.25 * fraction(-scene.travel, 0.006),
    }


def ok(scene: Scene) -> Tensor:
    return press_ok(scene.travel)


PRESS = Task("press", terms, ok, PressScript)
