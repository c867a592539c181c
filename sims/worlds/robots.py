"""Facts of the arm, as numbers: joints, servo gains and link frames. Needs numpy only.

The geometry is that of the SO-101 (github.com/TheRobotStudio/SO-ARM100, Simulation/SO101/so101_new_calib.xml);
gripper force and damping are chosen so that a 3 cm cube is held without creep at a 5 ms physics step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sims.worlds.arrays import library, like


@dataclass(frozen=True)
class Joint:
    """One servo. Angles in rad, speeds in rad/s, torques in Nm.

    Attributes:
        low, high: hard range of the joint and of its target.
        home: start pose of every episode, before a small random offset.
        max_delta: largest change of the target in one control step of 50 ms.
        max_speed: no-load speed of the servo.
        kp, damping, max_torque: position gain (Nm/rad), joint damping (Nm s/rad) and torque limit in simulation.
    """

    name: str
    low: float
    high: float
    home: float
    max_delta: float
    max_speed: float = 4.7
    kp: float = 17.8
    damping: float = 1.2
    max_torque: float = 3.35


@dataclass(frozen=True)
class Link:
    """Frame of a joint in its parent link at zero angle: position (m) and quaternion (w, x, y, z); axis is local z."""

    position: tuple[float, float, float]
    quaternion: tuple[float, float, float, float]


@dataclass(frozen=True)
class Arm:
    """A serial arm. Where the hand can be computed from encoders the last joint is the jaw.

    Attributes:
        lead: rad, how far the target may run ahead of each measured angle: limits the push of a blocked arm.
        links: frames of the joints, for forward kinematics; empty: unknown.
        tip, grasp: points (m) in the frame of the last link before the jaw; ``jaw_tip`` in that of the jaw.
    """

    name: str
    joints: tuple[Joint, ...]
    lead: tuple[float, ...]
    links: tuple[Link, ...] = ()
    tip: tuple[float, float, float] = (0.0, 0.0, 0.0)
    grasp: tuple[float, float, float] = (0.0, 0.0, 0.0)
    jaw_tip: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(j.name for j in self.joints)

    def column(self, field: str) -> np.ndarray:
        """(J,) float64 values of one numeric field of :class:`Joint`, in joint order; read-only."""
        return self._columns[field]

    @cached_property
    def _columns(self) -> dict[str, np.ndarray]:
        fields = [f for f in Joint.__dataclass_fields__ if f != "name"]
        columns = {f: np.array([getattr(j, f) for j in self.joints], dtype=np.float64) for f in fields}
        for values in columns.values():
            values.flags.writeable = False
        return columns


SO101 = Arm(
    name="so101",
    joints=(
        Joint("shoulder_pan", -1.91986, 1.91986, 0.0, 0.1),
        Joint("shoulder_lift", -1.74533, 1.74533, -0.6, 0.1),
        Joint("elbow_flex", -1.69, 1.69, 0.55, 0.1),
        Joint("wrist_flex", -1.65806, 1.65806, 1.55, 0.1),
        Joint("wrist_roll", -2.74385, 2.84121, 0.0, 0.15),
        Joint("gripper", -0.17453, 1.74533, 0.6, 0.2, damping=0.2, max_torque=0.6),
    ),
    links=(
        Link((0.0388353, 0.0, 0.0624), (0.0, 0.0, -1.0, 0.0)),
        Link((-0.0303992, -0.0182778, -0.0542), (0.5, -0.5, -0.5, -0.5)),
        Link((-0.11257, -0.028, 0.0), (0.70710678, 0.0, 0.0, 0.70710678)),
        Link((-0.1349, 0.0052, 0.0), (0.70710678, 0.0, 0.0, -0.70710678)),
        Link((0.0, -0.0611, 0.0181), (0.0172091, -0.0172091, 0.706897, 0.706897)),
        Link((0.0202, 0.0188, -0.0234), (0.70710678, 0.70710678, 0.0, 0.0)),
    ),
    tip=(-0.0079, 0.0, -0.1045),
    grasp=(0.006, 0.0, -0.092),
    jaw_tip=(-0.0115, -0.083, 0.0189),
    lead=(0.25, 0.25, 0.25, 0.25, 0.25, 0.5),
)


ACTION_KINDS = ("joint_position_delta", "joint_position", "torque")


def action_range(arm: Arm, kind: str) -> tuple[np.ndarray, np.ndarray, str]:
    """(J,) least and greatest action, and its unit."""
    if kind == "joint_position_delta":
        limit = arm.column("max_delta")
        return -limit, limit, "rad"
    if kind == "joint_position":
        return arm.column("low"), arm.column("high"), "rad"
    limit = arm.column("max_torque")
    return -limit, limit, "Nm"


def next_target(arm: Arm, target: Any, q: Any, action: Any) -> Any:
    """The joint target after one action of kind ``joint_position_delta``: (..., J) rad in, (..., J) rad out.

    The action is clipped to ``max_delta``; the target stays within ``lead`` of the measured angle and in range. The
    simulator, the emulator and a real arm all use this function, so an action means the same everywhere. Takes numpy
    arrays or torch tensors.
    """
    xp, limit = library(q), like(arm.column("max_delta"), q)
    return within_reach(arm, target + xp.clip(action, -limit, limit), q)


def within_reach(arm: Arm, wanted: Any, q: Any) -> Any:
    """(..., J) rad: ``wanted`` held within ``lead`` of the measured angle and in the joints' range."""
    xp, lead = library(q), like(arm.lead, q)
    wanted = xp.clip(wanted, q - lead, q + lead)
    return xp.clip(wanted, like(arm.column("low"), q), like(arm.column("high"), q))
