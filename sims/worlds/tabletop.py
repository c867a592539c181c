"""The tabletop scene: model, start layouts, named sensors and what an object tracker reports. numpy and MuJoCo only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np

from sims.errors import unknown_choice
from sims.worlds.base import read_sensors, sensor_slices
from sims.worlds.kinematics import forward, proprio
from sims.worlds.robots import SO101
from sims.worlds.variants import BUTTONS, CUBES, SLOTS, VARIANTS

__all__ = ["BUTTONS", "CUBES", "SLOTS", "VARIANTS", "forward", "proprio", "read_sensors", "sensor_slices"]

CONTROL_HZ = 20
TIMESTEP = 0.005
SUBSTEPS = 10
XML = Path(__file__).with_name("tabletop.xml")
CAMERAS = ("front", "side")

PAN_AXIS = np.array([SO101.links[0].position[0], 0.0])  # m, around which radii and angles are measured
CUBE_REST = 0.015
MIN_GAP = 0.05  # m between the centres of any two of marker and cubes
CORRIDOR = 0.055  # m: nothing may lie this close to the straight path of a cube to the marker
PATH = (0.06, 0.20)  # m: shortest and longest way of a cube to the marker


@dataclass(frozen=True)
class Ranges:
    """Polar ranges about the pan axis: radius (m) and absolute angle (rad)."""

    radius: tuple[float, float]
    angle: tuple[float, float]


OBJECT_RANGES = {"train": Ranges((0.14, 0.24), (0.0, 0.80)), "heldout": Ranges((0.128, 0.25), (0.0, 0.88))}
BUTTON_RANGES = {"train": Ranges((0.17, 0.23), (0.995, 1.31)), "heldout": Ranges((0.158, 0.242), (1.02, 1.37))}
HOME_NOISE = {"train": (0.0, 0.10), "heldout": (0.10, 0.15)}  # rad, absolute offset of each joint from home
SPLITS = tuple(OBJECT_RANGES)


@dataclass(frozen=True)
class Layout:
    """One start.

    ``q`` (6,) rad; ``marker``, ``green_button``, ``yellow_button`` (3,) m; cubes (7,) position and quaternion.
    """

    q: np.ndarray
    marker: np.ndarray
    red_cube: np.ndarray
    blue_cube: np.ndarray
    green_button: np.ndarray
    yellow_button: np.ndarray

    @property
    def qpos(self) -> np.ndarray:
        """(22,) generalised position: arm, red cube, blue cube, two caps."""
        return np.concatenate([self.q, self.red_cube, self.blue_cube, np.zeros(2)])

    @property
    def mocap(self) -> np.ndarray:
        """(9,) positions of the mocap bodies in model order: marker, green button, yellow button."""
        return np.concatenate([self.marker, self.green_button, self.yellow_button])


def load_model() -> mujoco.MjModel:
    """A fresh model of the scene; callers may edit it (looks, physics) without touching anybody else's."""
    return mujoco.MjModel.from_xml_path(str(XML))


def _outside(radius: np.ndarray, angle: np.ndarray, inner: Ranges) -> np.ndarray:
    return (radius < inner.radius[0]) | (radius > inner.radius[1]) | (np.abs(angle) > inner.angle[1])


def _sector(rng: np.random.Generator, shape: tuple[int, ...], ranges: Ranges) -> tuple[np.ndarray, np.ndarray]:
    """Radius and angle of points uniform in area, both signs of the angle."""
    low, high = ranges.radius
    radius = np.sqrt(rng.uniform(low * low, high * high, shape))
    return radius, rng.uniform(*ranges.angle, shape) * np.where(rng.random(shape) < 0.5, -1.0, 1.0)


def _candidates(rng: np.random.Generator, count: int, split: str) -> np.ndarray:
    """(N, 3, 2) points for marker, red and blue; for "heldout" every point lies outside the training range."""
    radius, angle = _sector(rng, (count, 3, 6), OBJECT_RANGES[split])
    pick = np.zeros((count, 3), dtype=int)
    keep = np.ones((count, 3), dtype=bool)
    if split == "heldout":
        outside = _outside(radius, angle, OBJECT_RANGES["train"])
        pick, keep = outside.argmax(-1), outside.any(-1)
    radius, angle = (np.take_along_axis(x, pick[..., None], -1)[..., 0] for x in (radius, angle))
    points = PAN_AXIS + np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1)
    return points[keep.all(-1)]


def _segment_distance(point: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """(N,) distance of (N, 2) points from the segments start-end."""
    along = end - start
    t = np.clip(((point - start) * along).sum(-1) / (along * along).sum(-1), 0.0, 1.0)
    return np.linalg.norm(start + t[:, None] * along - point, axis=-1)


def _clear(points: np.ndarray) -> np.ndarray:
    """(N,) bool: both cubes have a free path of allowed length to the marker, so every job is possible."""
    marker, red, blue = points[:, 0], points[:, 1], points[:, 2]
    to_red, to_blue = (np.linalg.norm(cube - marker, axis=-1) for cube in (red, blue))
    ok = (np.minimum(to_red, to_blue) > PATH[0]) & (np.maximum(to_red, to_blue) < PATH[1])
    ok &= np.linalg.norm(red - blue, axis=-1) > MIN_GAP
    ok &= _segment_distance(blue, red, marker) > CORRIDOR
    return ok & (_segment_distance(red, blue, marker) > CORRIDOR)


def _place_objects(rng: np.random.Generator, split: str) -> np.ndarray:
    for _ in range(100):
        points = _candidates(rng, 48, split)
        good = np.flatnonzero(_clear(points))
        if len(good):
            return points[good[0]]
    raise RuntimeError(f"no free layout in 4800 draws of split '{split}': the ranges are too tight")


def _place_buttons(rng: np.random.Generator, split: str) -> np.ndarray:
    """(2, 3) green and yellow, one on each side, sides drawn."""
    radius, angle = _sector(rng, (2,), BUTTON_RANGES[split])
    side = np.array([1.0, -1.0]) * (1.0 if rng.random() < 0.5 else -1.0)
    angle = np.abs(angle) * side
    return np.stack([PAN_AXIS[0] + radius * np.cos(angle), radius * np.sin(angle), np.zeros(2)], -1)


def _cube_pose(point: np.ndarray, yaw: float) -> np.ndarray:
    return np.array([*point, CUBE_REST, np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)])


def sample_layout(rng: np.random.Generator, split: str = "train") -> Layout:
    """Draw a start. The same for every job, so that no start gives away what to do and jobs can be swapped.

    Args:
        rng: the only source of randomness.
        split: ``"train"``, or ``"heldout"``: objects and joints outside the training ranges.
    """
    if split not in OBJECT_RANGES:
        raise unknown_choice("split", split, SPLITS)
    marker, red, blue = _place_objects(rng, split)
    buttons = _place_buttons(rng, split)
    yaws = rng.uniform(-np.pi, np.pi, 2)
    offset = rng.uniform(*HOME_NOISE[split], 6) * np.where(rng.random(6) < 0.5, -1.0, 1.0)
    return Layout(
        q=np.clip(SO101.column("home") + offset, SO101.column("low"), SO101.column("high")),
        marker=np.array([*marker, 0.0]),
        red_cube=_cube_pose(red, yaws[0]),
        blue_cube=_cube_pose(blue, yaws[1]),
        green_button=buttons[0],
        yellow_button=buttons[1],
    )


def apply_layout(model: mujoco.MjModel, data: mujoco.MjData, layout: Layout) -> None:
    """Reset ``data`` to the start at rest, targets at the joint angles; runs ``mj_forward``."""
    mujoco.mj_resetData(model, data)
    data.qpos[:] = layout.qpos
    data.mocap_pos[:] = layout.mocap.reshape(3, 3)
    data.ctrl[:] = layout.q
    mujoco.mj_forward(model, data)
