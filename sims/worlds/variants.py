"""The jobs of the tabletop: which task, on which object. Plain data, no imports."""

from __future__ import annotations

from dataclasses import dataclass

SLOTS = ("marker", "red_cube", "blue_cube", "green_button", "yellow_button")
CUBES = ("red_cube", "blue_cube")
BUTTONS = ("green_button", "yellow_button")


@dataclass(frozen=True)
class Variant:
    """One job: a task applied to the object in one slot."""

    task: str
    goal: str

    @property
    def slot(self) -> int:
        return SLOTS.index(self.goal)


VARIANTS = {
    "reach": Variant("reach", "marker"),
    "press_green": Variant("press", "green_button"),
    "press_yellow": Variant("press", "yellow_button"),
    "move_red": Variant("move", "red_cube"),
    "move_blue": Variant("move", "blue_cube"),
    "lift_red": Variant("lift", "red_cube"),
    "lift_blue": Variant("lift", "blue_cube"),
}

# actions at 20 Hz; about twice what the scripted demonstrators need
EPISODE_STEPS = {"reach": 50, "press": 50, "move": 100, "lift": 80}
HOLD_STEPS = 5


def variants_of(task: str) -> tuple[str, ...]:
    """Names of all variants of one task, in the order of :data:`VARIANTS`."""
    return tuple(name for name, variant in VARIANTS.items() if variant.task == task)
