"""Drivers and sensors: the seam to hardware. Torch-free; numpy float64 in SI units (rad, rad/s, s)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from real_robot.config import RobotSpec


@dataclass(frozen=True)
class JointState:
    """One measurement of all joints, in robot-file order.

    Attributes:
        stamp_ns: monotonic time at which the *device* answered (ns, the driver's own clock source).
        position: (J,) rad.  velocity: (J,) rad/s.
        faults: joint name -> what the device reports (overload, over-temperature ...); empty when healthy.
    """

    stamp_ns: int
    position: np.ndarray
    velocity: np.ndarray
    faults: Mapping[str, str]


@dataclass(frozen=True)
class SensorReading:
    """One measurement of a sensor: ``values`` maps an observation group (``objects``, ``pixels/front``) to an array."""

    stamp_ns: int
    values: Mapping[str, np.ndarray]


class Driver(Protocol):
    """A robot's joints. Only ``SafetyGate`` ever holds one. ``spec`` can be read without hardware."""

    spec: RobotSpec  # real_robot.config.RobotSpec

    def connect(self) -> None:
        """Open the bus exclusively, verify models and firmware, leave torque off; raises UserError."""
        ...

    def read(self) -> JointState: ...

    def write(self, target: np.ndarray) -> np.ndarray:
        """Send (J,) position targets (rad); returns what the wire actually carried after quantisation (rad)."""
        ...

    def enable(self) -> None:
        """Torque on *at the measured pose*: goal := present first, so that nothing moves."""
        ...

    def stop(self) -> None:
        """Torque off on every motor, never stopping at the first that fails; idempotent, never raises."""
        ...

    def disconnect(self) -> None: ...


class Sensor(Protocol):
    """A camera or tracker with its own clock stamp."""

    def connect(self) -> None: ...

    def read(self) -> SensorReading: ...

    def disconnect(self) -> None: ...
