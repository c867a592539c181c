"""The tabletop as a :class:`sims.task_env.TaskEnv`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sims.task_env import TaskEnv
from sims.tasks import TASKS, scene_of
from sims.worlds import language, tracker
from sims.worlds.arrays import library
from sims.worlds.base import Group, World
from sims.worlds.kinematics import PROPRIO_NAMES
from sims.worlds.robots import SO101
from sims.worlds.tabletop import CAMERAS, CONTROL_HZ, SPLITS, SUBSTEPS, load_model, sample_layout
from sims.worlds.variants import EPISODE_STEPS, HOLD_STEPS, SLOTS, VARIANTS


def hand_points(sensors: Mapping[str, Any]) -> Any:
    """(B, 12): fingertip and grasp point (m), unit vectors along the fingers and in which the jaw closes."""
    parts = [sensors["tip/pos"], sensors["grasp/pos"], -sensors["hand/z"], sensors["hand/x"]]
    return library(parts[0]).concatenate(parts, 1)


TABLETOP = World(
    name="tabletop",
    arm=SO101,
    load_model=load_model,
    jobs=VARIANTS,
    tasks=TASKS,
    episode_steps=EPISODE_STEPS,
    slots=SLOTS,
    sample_start=sample_layout,
    scene=scene_of,
    sentences=language.sentences,
    point_names=PROPRIO_NAMES[3 * len(SO101.joints) :],
    points=hand_points,
    objects=Group(tracker.OBJECTS_NAMES, tracker.measure, tracker.NOISE_DIM),
    truth=Group(tracker.TRUTH_NAMES, tracker.truth),
    features=("tabletop_goal", "tabletop_all"),
    splits=SPLITS,
    control_hz=CONTROL_HZ,
    substeps=SUBSTEPS,
    hold_steps=HOLD_STEPS,
    cameras=CAMERAS,
)


class TabletopEnv(TaskEnv):
    """B worlds of the tabletop; options as those of :class:`TaskEnv`."""

    def __init__(
        self, variants: Sequence[str], num_envs: int, seed: int = 0, *, task: str = "tabletop", **options: Any
    ):
        super().__init__(TABLETOP, variants, num_envs, seed, task=task, **options)
