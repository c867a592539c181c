"""The :class:`EnvSpec` of a tabletop environment. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from sims.errors import UserError, unknown_choice
from sims.types import ArraySpec, EnvSpec
from sims.worlds.kinematics import PROPRIO_NAMES
from sims.worlds.robots import SO101
from sims.worlds.tabletop import CAMERAS, CONTROL_HZ, SPLITS
from sims.worlds.tracker import OBJECTS_NAMES, TRUTH_NAMES
from sims.worlds.variants import SLOTS, VARIANTS

PHRASINGS = ("train", "heldout")


def make_spec(
    task: str,
    variants: Sequence[str],
    instructions: tuple[str, ...],
    episode_steps: int,
    cameras: Sequence[str] = (),
    image_size: int = 64,
    features: str | None = None,
    privileged: bool = False,
) -> EnvSpec:
    """Spec of an environment with these jobs, sentences and cameras."""
    one_task = len({VARIANTS[name].task for name in variants}) == 1
    limit = tuple(float(x) for x in SO101.column("max_delta"))
    observation = {
        "proprio": ArraySpec((len(PROPRIO_NAMES),), names=PROPRIO_NAMES),
        "objects": ArraySpec((len(OBJECTS_NAMES),), names=OBJECTS_NAMES),
        "goal": ArraySpec((len(SLOTS),), names=SLOTS),
        "instruction": ArraySpec((), dtype="int64"),
    }
    if privileged:
        observation["privileged"] = ArraySpec((len(TRUTH_NAMES),), names=TRUTH_NAMES)
    observation |= {f"pixels/{c}": ArraySpec((image_size, image_size, 3), dtype="uint8") for c in cameras}
    return EnvSpec(
        task=task,
        observation=observation,
        action=ArraySpec((len(limit),), names=SO101.names, unit="rad", low=tuple(-x for x in limit), high=limit),
        control_hz=float(CONTROL_HZ),
        episode_steps=episode_steps,
        action_kind="joint_position_delta",
        instructions=instructions,
        features=features or ("tabletop_goal" if one_task else "tabletop_all"),
    )


def check_names(variants: Sequence[str], split: str, phrasings: str, pixels: Sequence[str]) -> None:
    """Raises UserError for a name that is in no registry."""
    checks = [("variant", variants, VARIANTS), ("split", [split], SPLITS), ("phrasings", [phrasings], PHRASINGS)]
    for kind, found, known in [*checks, ("camera", pixels, CAMERAS)]:
        for name in found:
            if name not in known:
                raise unknown_choice(kind, name, known)
    if not variants:
        raise UserError(f"variants is empty; choose from {', '.join(VARIANTS)}")
