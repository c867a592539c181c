"""Bring a cube to rest on the marker; dragging counts, as does carrying."""

from __future__ import annotations

from torch import Tensor

from sims.reward_terms import near
from sims.tasks.base import Scene, Task, distance
from sims.tasks.scripted import MoveScript
from sims.worlds.predicates import move_distance, move_ok


def terms(scene: Scene) -> dict[str, Tensor]:
    hand, rest = distance(scene.grasp, scene.goal), move_distance(scene.goal, scene.marker)
    return {
        "near": 0.25 * near(hand, 8.0),
        "rest": 0.75 * near(rest, 7.0),
        "precise": 0.25 * near(rest, 30.0),
    }


def ok(scene: Scene) -> Tensor:
    return move_ok(scene.goal, scene.goal_velocity, scene.marker)


MOVE = Task("move", terms, ok, MoveScript)
