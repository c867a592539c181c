"""What a task is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sims.worlds.predicates import norm
from sims.worlds.variants import SLOTS, VARIANTS


class Scene(NamedTuple):
    """The true state that rewards and success read, for N worlds. Positions (N, 3) m, velocity (N, 3) m/s.

    ``goal`` is the object of the job; ``travel`` (N,) m of a goal button (0 at rest, negative down); ``touch``
    (N, 2) N, force on the fixed and the moving jaw.
    """

    tip: np.ndarray
    grasp: np.ndarray
    marker: np.ndarray
    goal: np.ndarray
    goal_velocity: np.ndarray
    travel: np.ndarray
    touch: np.ndarray

    def rows(self, index: np.ndarray) -> Scene:
        return Scene(*(x[index] for x in self))


def scene_of(sensors: Mapping[str, np.ndarray], slots: np.ndarray) -> Scene:
    """Pick each world's goal object. ``slots``: (B,) index into ``SLOTS``."""
    rows = np.arange(len(slots))
    zero = np.zeros((len(slots), 3))
    velocity = (zero, sensors["red_cube/vel"], sensors["blue_cube/vel"], zero, zero)
    travel = (sensors["green_button/travel"], sensors["yellow_button/travel"])
    position = [sensors[f"{name}/pos"] for name in SLOTS]
    table = np.concatenate([*position, *velocity], axis=1).reshape(len(slots), 2, len(SLOTS), 3)
    goal = table[rows, :, slots]  # (N, 2, 3)
    # the buttons are the last two slots
    pressed = np.concatenate([zero, *travel], axis=1)[rows, slots]
    return Scene(
        tip=sensors["tip/pos"],
        grasp=sensors["grasp/pos"],
        marker=sensors["marker/pos"],
        goal=goal[:, 0],
        goal_velocity=goal[:, 1],
        travel=pressed,
        touch=np.concatenate([sensors["touch/fixed"], sensors["touch/moving"]], axis=1),
    )


@dataclass(frozen=True)
class Task:
    """One skill. All functions are batched over N worlds of a :class:`Scene`.

    Attributes:
        terms: reward terms by name, each (N,); success and effort are added by the environment.
        ok: (N,) bool, the success condition of ``sims.worlds.predicates`` at this instant.
        demonstrator: ``demonstrator(env)`` makes an object whose ``act(obs) -> (B, A)`` solves the task.
    """

    name: str
    terms: Callable[[Scene], dict[str, np.ndarray]]
    ok: Callable[[Scene], np.ndarray]
    demonstrator: Callable[[Any], Any]

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(name for name, variant in VARIANTS.items() if variant.task == self.name)


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(N,) Euclidean distance (m)."""
    return norm(a - b)
