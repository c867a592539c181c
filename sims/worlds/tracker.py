"""What an object tracker on the robot reports: the ``objects`` observation, with its noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sims.worlds.arrays import library, like
from sims.worlds.variants import BUTTONS, CUBES

POSITION_NOISE = 0.001  # m
ANGLE_NOISE = np.pi / 180  # rad
VELOCITY_NOISE = 0.01  # m/s, of a filtered difference
OBJECTS_DIM = 25

OBJECTS_NAMES = tuple(
    [f"marker/{a}" for a in "xyz"]
    + [
        f"{cube}/{part}"
        for cube in CUBES
        for part in ("x", "y", "z", "velocity_x", "velocity_y", "velocity_z", "cos4yaw", "sin4yaw")
    ]
    + [f"{button}/{a}" for button in BUTTONS for a in "xyz"]
)

_UNSEEN = ("touch/fixed", "touch/moving", *(f"{button}/travel" for button in BUTTONS))  # N on the fingers, m
TRUTH_NAMES = (*OBJECTS_NAMES, *_UNSEEN)

NOISE_DIM = OBJECTS_DIM
# per column; the heading's noise sits in the column of its cosine
_CUBE_SCALE = 3 * [POSITION_NOISE] + 3 * [VELOCITY_NOISE] + [ANGLE_NOISE, 0.0]
_SCALE = np.array(3 * [POSITION_NOISE] + 2 * _CUBE_SCALE + 6 * [POSITION_NOISE])
_COSINES = (9, 17)


def yaw_of(quaternion: Any) -> Any:
    """(...,) rad, heading of a cube up to quarter turns, whichever face is up; from (..., 4) (w, x, y, z)."""
    xp = library(quaternion)
    w, x, y, z = (quaternion[..., i] for i in range(4))
    upright = xp.abs(x * z - w * y) < 0.35  # body x is within 45 degrees of level; else body y is level
    east = xp.where(upright, 1 - 2 * (y * y + z * z), 2 * (x * y - w * z))
    north = xp.where(upright, 2 * (x * y + w * z), 1 - 2 * (x * x + z * z))
    return xp.arctan2(north, east)


def measure(sensors: Mapping[str, Any], noise: Any = None) -> Any:
    """(B, 25) float32 in the order of :data:`OBJECTS_NAMES`, numpy or torch as the sensors are.

    Args:
        sensors: named sensors, each (B, d).
        noise: (B, 25) standard normal draws, or None for a perfect tracker.
    """
    xp = library(sensors["marker/pos"])
    yaw = xp.stack([yaw_of(sensors[f"{cube}/quat"]) for cube in CUBES], 1)  # (B, 2)
    blank = xp.zeros_like(yaw)
    parts = [sensors["marker/pos"]]
    for cube in CUBES:
        parts += [sensors[f"{cube}/pos"], sensors[f"{cube}/vel"], blank]
    out = xp.concatenate(parts + [sensors[f"{button}/pos"] for button in BUTTONS], 1)
    if noise is not None:
        out = out + noise * like(_SCALE, out)
    for column, angle in zip(_COSINES, (yaw[:, 0], yaw[:, 1])):
        four = 4 * (angle + out[:, column])
        out[:, column], out[:, column + 1] = xp.cos(four), xp.sin(four)
    return out.astype(np.float32) if xp is np else out.float()


def truth(sensors: Mapping[str, Any], noise: Any = None) -> Any:
    """(N, 29) float32 in the order of :data:`TRUTH_NAMES`.

    What a perfect tracker without delay would report, and what no tracker sees: touch and the travel of the buttons.
    """
    seen = measure(sensors, noise)
    xp = library(seen)
    unseen = xp.concatenate([sensors[name] for name in _UNSEEN], 1)
    return xp.concatenate([seen, like(unseen, seen)], 1)
