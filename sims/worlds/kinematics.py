"""Forward kinematics of a serial arm, batched in numpy, and the ``proprio`` observation made from encoders alone."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sims.worlds.robots import SO101, Arm


class Pose(NamedTuple):
    """Where the hand is, for B joint vectors. Metres, base frame.

    ``tip``: fixed fingertip, ``grasp``: centre of a held 3 cm cube, ``jaw_tip``: moving fingertip, each (B, 3).
    ``approach``: unit vector along the fingers, ``closing``: unit vector in which the jaw closes, each (B, 3).
    ``origins``, ``axes``: (B, J, 3) joint positions and unit axes, for Jacobians.
    """

    tip: np.ndarray
    grasp: np.ndarray
    jaw_tip: np.ndarray
    approach: np.ndarray
    closing: np.ndarray
    origins: np.ndarray
    axes: np.ndarray


def matrix_of(quaternion: tuple[float, ...] | np.ndarray) -> np.ndarray:
    """(3, 3) rotation of one quaternion (w, x, y, z), normalised first."""
    w, x, y, z = np.asarray(quaternion, dtype=np.float64) / np.linalg.norm(quaternion)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


@lru_cache(maxsize=4)
def _frames(arm: Arm) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    return tuple((np.array(link.position), matrix_of(link.quaternion)) for link in arm.links)


def _spin(rotation: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """(B, 3, 3) times a rotation by (B,) rad about local z."""
    c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
    x, y = rotation[..., 0], rotation[..., 1]
    return np.stack([x * c + y * s, y * c - x * s, rotation[..., 2]], axis=-1)


def forward(q: np.ndarray, arm: Arm = SO101) -> Pose:
    """Hand pose of (B, J) joint angles (rad)."""
    q = np.asarray(q, dtype=np.float64)
    position, rotation = np.zeros((len(q), 3)), np.broadcast_to(np.eye(3), (len(q), 3, 3))
    origins, axes, hand = [], [], (position, rotation)
    for index, (offset, frame) in enumerate(_frames(arm)):
        hand = (position, rotation)
        position = position + rotation @ offset
        rotation = _spin(rotation @ frame, q[:, index])
        origins.append(position)
        axes.append(rotation[..., 2])
    at, turn = hand
    return Pose(
        tip=at + turn @ np.array(arm.tip),
        grasp=at + turn @ np.array(arm.grasp),
        jaw_tip=position + rotation @ np.array(arm.jaw_tip),
        approach=-turn[..., 2],
        closing=turn[..., 0],
        origins=np.stack(origins, axis=1),
        axes=np.stack(axes, axis=1),
    )


def proprio(q: np.ndarray, velocity: np.ndarray, target: np.ndarray, arm: Arm = SO101) -> np.ndarray:
    """(B, 30) float32: q, velocity, target - q (6 each), tip, grasp point, approach and closing axis (3 each).

    Args:
        q, velocity, target: (B, 6) measured angle (rad), measured speed (rad/s), commanded angle (rad).
    """
    pose = forward(q, arm)
    parts = [q, velocity, np.asarray(target) - q, pose.tip, pose.grasp, pose.approach, pose.closing]
    return np.concatenate(parts, axis=-1, dtype=np.float32, casting="same_kind")


PROPRIO_NAMES = tuple(
    [f"q/{n}" for n in SO101.names]
    + [f"velocity/{n}" for n in SO101.names]
    + [f"lead/{n}" for n in SO101.names]
    + [f"{point}/{axis}" for point in ("tip", "grasp", "approach", "closing") for axis in "xyz"]
)
