"""What counts as success, as arithmetic on named sensors. Works on numpy arrays and torch tensors alike.

All positions are metres in the base frame, batched (..., 3); distances are (...,).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sims.worlds.variants import VARIANTS

HOVER = 0.008  # m above the marker that the fingertip should reach
CUBE_REST = 0.015  # m, centre of a 3 cm cube that lies on the table
REACH_TOLERANCE = 0.015
PRESS_DEPTH = 0.005
MOVE_TOLERANCE = 0.020
MOVE_SPEED = 0.05  # m/s: the cube has come to rest
MOVE_RISE = 0.010  # m: the cube lies on the table
LIFT_HEIGHT = 0.08


def norm(v: Any) -> Any:
    """Length along the last axis."""
    return (v * v).sum(-1) ** 0.5


def reach_distance(tip: Any, marker: Any) -> Any:
    """Fingertip to the point :data:`HOVER` above the marker (m)."""
    d = tip - marker
    return (d[..., 0] ** 2 + d[..., 1] ** 2 + (d[..., 2] - HOVER) ** 2) ** 0.5


def move_distance(cube: Any, marker: Any) -> Any:
    """Horizontal distance of the cube's centre from the marker's (m)."""
    d = cube - marker
    return (d[..., 0] ** 2 + d[..., 1] ** 2) ** 0.5


def rise(cube: Any) -> Any:
    """Height of the cube's centre above its place on the table (m)."""
    return cube[..., 2] - CUBE_REST


def reach_ok(tip: Any, marker: Any) -> Any:
    return reach_distance(tip, marker) < REACH_TOLERANCE


def press_ok(travel: Any) -> Any:
    """``travel``: (...,) displacement of the cap, 0 at rest, -0.008 m at the stop."""
    return -travel > PRESS_DEPTH


def move_ok(cube: Any, velocity: Any, marker: Any) -> Any:
    near = move_distance(cube, marker) < MOVE_TOLERANCE
    return near & (norm(velocity) < MOVE_SPEED) & (rise(cube) < MOVE_RISE)


def lift_ok(cube: Any) -> Any:
    return rise(cube) > LIFT_HEIGHT


def holds(variant: str, sensors: Mapping[str, Any]) -> Any:
    """(...,) bool: is the job's condition true in this state? Success also needs it for ``HOLD_STEPS`` steps.

    Args:
        variant: a name in ``VARIANTS``.
        sensors: named sensors as in ``tabletop.sensor_slices`` (``tip/pos``, ``red_cube/pos``, ...).
    """
    job = VARIANTS[variant]
    if job.task == "reach":
        return reach_ok(sensors["tip/pos"], sensors["marker/pos"])
    if job.task == "press":
        return press_ok(sensors[f"{job.goal}/travel"][..., 0])
    cube = sensors[f"{job.goal}/pos"]
    if job.task == "move":
        return move_ok(cube, sensors[f"{job.goal}/vel"], sensors["marker/pos"])
    return lift_ok(cube)
