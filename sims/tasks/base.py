"""What a task is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sims.worlds.predicates import norm
from sims.worlds.variants import SLOTS, VARIANTS


class Scene(NamedTuple):
    """The true state that rewards and success read, for N worlds. Positions (N, 3) m, velocity (N, 3) m/s.

    ``goal`` is the object of the job; ``travel`` (N,) m of a goal button (0 at rest, negative down); ``touch``
    (N, 2) N, force on the fixed and the moving jaw.
    """

    tip: Tensor
    grasp: Tensor
    marker: Tensor
    goal: Tensor
    goal_velocity: Tensor
    travel: Tensor
    touch: Tensor

    def rows(self, index: Tensor) -> Scene:
        return Scene(*(x[index] for x in self))


def scene_of(sensors: Mapping[str, Tensor], slots: Tensor) -> Scene:
    """Pick each world's goal object. ``slots``: (B,) index into ``SLOTS``."""
    zero = torch.zeros_like(sensors["marker/pos"])
    velocity = (zero, sensors["red_cube/vel"], sensors["blue_cube/vel"], zero, zero)
    travel = (sensors["green_button/travel"], sensors["yellow_button/travel"])
    position = torch.stack([sensors[f"{name}/pos"] for name in SLOTS], 1)  # (B, slot, 3)
    rows = torch.arange(len(slots), device=slots.device)
    # the buttons are the last two slots
    pressed = torch.cat([zero, *travel], 1)[rows, slots]
    return Scene(
        tip=sensors["tip/pos"],
        grasp=sensors["grasp/pos"],
        marker=sensors["marker/pos"],
        goal=position[rows, slots],
        goal_velocity=torch.stack(velocity, 1)[rows, slots],
        travel=pressed,
        touch=torch.cat([sensors["touch/fixed"], sensors["touch/moving"]], 1),
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
    terms: Callable[[Scene], dict[str, Tensor]]
    ok: Callable[[Scene], Tensor]
    demonstrator: Callable[[Any], Any]

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(name for name, variant in VARIANTS.items() if variant.task == self.name)


def distance(a: Tensor, b: Tensor) -> Tensor:
    """(N,) Euclidean distance (m)."""
    return norm(a - b)
