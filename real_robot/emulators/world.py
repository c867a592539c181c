"""What stands behind the servo bank: a world that moves joints. `ServoWorld` is the smallest one, without physics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from real_robot.config import RobotSpec

TIMESTEP_NS = 5_000_000


class World(Protocol):
    """Joints in robot-file order; one ``step`` is ``TIMESTEP_NS`` of simulated time."""

    def reset(self, options: Mapping[str, Any]) -> dict[str, Any]: ...

    def step(self, goal: np.ndarray, torque: np.ndarray) -> None: ...

    def joints(self) -> tuple[np.ndarray, np.ndarray]:
        """(J,) rad and (J,) rad/s, the truth."""
        ...

    def objects(self) -> tuple[int, np.ndarray]:
        """Age (ns) and values (25,) of what the tracker reports now."""
        ...

    def judge(self) -> dict[str, Any]:
        """Success of the current job; empty if there is none."""
        ...

    def truth(self) -> dict[str, Any]: ...

    def trajectory(self) -> dict[str, Any]: ...


class ServoWorld:
    """First-order servos: the angle follows the goal with a time constant of 60 ms. Nothing else exists."""

    TIME_CONSTANT_S = 0.06

    def __init__(self, spec: RobotSpec) -> None:
        self.spec = spec
        self.reset({})

    def reset(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """``options["position"]``: (J,) rad, default home."""
        self.position = np.array(options.get("position", self.spec.array("home")), dtype=np.float64)
        self.velocity = np.zeros_like(self.position)
        self.time_ns = 0
        return {}

    def step(self, goal: np.ndarray, torque: np.ndarray) -> None:
        dt = TIMESTEP_NS * 1e-9
        self.velocity = np.where(torque, (goal - self.position) / self.TIME_CONSTANT_S, 0.0)
        self.position = self.position + dt * self.velocity
        self.time_ns += TIMESTEP_NS

    def joints(self) -> tuple[np.ndarray, np.ndarray]:
        return self.position, self.velocity

    def objects(self) -> tuple[int, np.ndarray]:
        return 0, np.zeros(25, dtype=np.float32)

    def judge(self) -> dict[str, Any]:
        return {}

    def truth(self) -> dict[str, Any]:
        return {"position": self.position.tolist(), "velocity": self.velocity.tolist(), "time_ns": self.time_ns}

    def trajectory(self) -> dict[str, Any]:
        return {}
