"""What an object tracker on the robot reports: the ``objects`` observation, with its noise."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sims.worlds.variants import BUTTONS, CUBES

POSITION_NOISE = 0.001  # m
ANGLE_NOISE = np.pi / 180  # rad
VELOCITY_NOISE = 0.01  # m/s, of a filtered difference
OBJECTS_DIM = 25
NOISE_DIM = 3 + 2 * 7 + 2 * 3

OBJECTS_NAMES = tuple(
    [f"marker/{a}" for a in "xyz"]
    + [
        f"{cube}/{part}"
        for cube in CUBES
        for part in ("x", "y", "z", "velocity_x", "velocity_y", "velocity_z", "cos4yaw", "sin4yaw")
    ]
    + [f"{button}/{a}" for button in BUTTONS for a in "xyz"]
)


def yaw_of(quaternion: np.ndarray) -> np.ndarray:
    """(...,) rad, heading of a cube up to quarter turns, whichever face is up; from (..., 4) (w, x, y, z)."""
    w, x, y, z = np.moveaxis(quaternion, -1, 0)
    # the columns of the rotation matrix: the horizontal parts of the body axes, and their heights
    horizontal = np.stack(
        [
            np.stack([1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y)], -1),
            np.stack([2 * (x * y - w * z), 1 - 2 * (x * x + z * z), 2 * (y * z + w * x)], -1),
            np.stack([2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)], -1),
        ],
        -2,
    )  # (..., axis, xyz)
    flattest = np.abs(horizontal[..., 2]).argmin(-1)
    axis = np.take_along_axis(horizontal, flattest[..., None, None], -2)[..., 0, :]
    return np.arctan2(axis[..., 1], axis[..., 0])


def measure(sensors: Mapping[str, np.ndarray], noise: np.ndarray | None = None) -> np.ndarray:
    """(B, 25) float32 in the order of :data:`OBJECTS_NAMES`.

    Args:
        sensors: named sensors, each (B, d).
        noise: (B, 23) standard normal draws, or None for a perfect tracker.
    """
    n = np.zeros((len(sensors["marker/pos"]), NOISE_DIM)) if noise is None else noise
    yaw = yaw_of(np.stack([sensors[f"{cube}/quat"] for cube in CUBES], 1))  # (B, 2)
    out = np.empty((len(n), OBJECTS_DIM), dtype=np.float32)
    out[:, 0:3] = sensors["marker/pos"] + POSITION_NOISE * n[:, 0:3]
    for i, cube in enumerate(CUBES):
        at, draw = 3 + 8 * i, n[:, 3 + 7 * i : 10 + 7 * i]
        angle = 4 * (yaw[:, i] + ANGLE_NOISE * draw[:, 6])
        out[:, at : at + 3] = sensors[f"{cube}/pos"] + POSITION_NOISE * draw[:, 0:3]
        out[:, at + 3 : at + 6] = sensors[f"{cube}/vel"] + VELOCITY_NOISE * draw[:, 3:6]
        out[:, at + 6], out[:, at + 7] = np.cos(angle), np.sin(angle)
    for i, button in enumerate(BUTTONS):
        at = 19 + 3 * i
        out[:, at : at + 3] = sensors[f"{button}/pos"] + POSITION_NOISE * n[:, 17 + 3 * i : 20 + 3 * i]
    return out
