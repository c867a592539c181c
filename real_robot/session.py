"""One robot from connect to shutdown: emulator if it is virtual, driver, gate, clock, sensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from real_robot.clock import Clock, MonotonicClock
from real_robot.config import RobotSpec, load_robot
from real_robot.contract import arm_of
from real_robot.drivers.feetech import FeetechDriver
from real_robot.emulators.process import EmulatorProcess
from real_robot.safety import SafetyGate, Workspace
from real_robot.sensors.tracker import SocketTracker
from real_robot.shutdown import guarded
from sims.errors import UserError, unknown_choice
from sims.worlds.kinematics import forward

DRIVERS: dict[str, Callable[..., FeetechDriver]] = {"feetech": FeetechDriver}
LOCKSTEP_TIMEOUT_S = 0.5  # wall time means nothing in lock step, so a busy machine must not look like a bad bus


class Session:
    """Opens a robot; leaving the block reaches every motor, whatever ended it.

    Args:
        robot: robot file, name or path. port, tracker: replace those of the file.
        lockstep: simulated time (emulators only). live: False keeps every write off the wire.
        faults: fault plan of the emulator. world: what the emulator simulates.

    Attributes:
        spec, gate, clock, sensors; emulator is None on real hardware.
    """

    def __init__(
        self,
        robot: str,
        *,
        lockstep: bool = False,
        live: bool = False,
        port: str = "",
        tracker: str = "",
        estop_file: Path | None = None,
        faults: list[dict[str, Any]] | None = None,
        world: str = "tabletop",
    ) -> None:
        self.robot, self.lockstep, self.live, self.estop_file = robot, lockstep, live, estop_file
        self.faults, self.world = faults, world
        self.spec = load_robot(robot, **{k: v for k, v in (("port", port), ("tracker", tracker)) if v})
        if self.spec.driver not in DRIVERS:
            raise unknown_choice("driver", self.spec.driver, DRIVERS, where=f"robot '{self.spec.name}'")
        self.virtual = bool(self.spec.emulator) and not self.spec.port
        if lockstep and not self.virtual:
            raise UserError(f"robot '{self.spec.name}' is real hardware: lock-step time needs an emulated robot.")
        self.emulator: EmulatorProcess | None = None
        self.clock: Clock = MonotonicClock()
        self.sensors: list[SocketTracker] = []

    def __enter__(self) -> Session:
        with contextlib.ExitStack() as stack:
            spec = self.spec
            if self.virtual:
                self.emulator = stack.enter_context(self._start_emulator())
                spec = replace(spec, port=self.emulator.port, tracker=str(self.emulator.socket))
            if self.lockstep:
                spec = replace(spec, reply_timeout_s=LOCKSTEP_TIMEOUT_S, read_budget_s=4 * LOCKSTEP_TIMEOUT_S)
            self.spec = spec
            driver = DRIVERS[spec.driver](spec, dry_run=not self.live)
            if self.emulator is not None:
                self.clock = self.emulator.clock(lambda: driver.bus.tx_bytes)
            driver.clock = self.clock
            self.gate = SafetyGate(driver, self.clock, self.estop_file, tip_box(spec))
            self._connect_sensors(stack)
            stack.enter_context(guarded(self.gate))
            self.gate.connect()
            self._stack = stack.pop_all()
        return self

    def _start_emulator(self) -> EmulatorProcess:
        return EmulatorProcess(self.robot, self.spec.emulator, self.world, self.lockstep, self.faults)

    def _connect_sensors(self, stack: contextlib.ExitStack) -> None:
        if self.spec.tracker:
            sensor = SocketTracker(self.spec.tracker)
            sensor.connect()
            stack.callback(sensor.disconnect)
            self.sensors = [sensor]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def reset_world(self, **options: Any) -> dict[str, Any]:
        """Virtual robots only: torque off, new layout. Returns the emulator's answer."""
        assert self.emulator is not None
        self.gate.release()
        return self.emulator.control.request("reset", **options)

    def device_stats(self) -> dict[str, Any]:
        """What the device side counted; empty on real hardware."""
        return self.emulator.control.request("stats") if self.emulator is not None else {}


def tip_box(spec: RobotSpec) -> Workspace | None:
    """A check that the commanded fingertip lies in ``spec.workspace``; None if the robot file names no box."""
    if not spec.workspace:
        return None
    arm, low, high = arm_of(spec), np.array(spec.workspace[:3]), np.array(spec.workspace[3:])
    order = np.array([spec.names.index(n) for n in arm.names])

    def check(target: np.ndarray) -> str:
        tip = forward(target[order][None], arm).tip[0]
        inside = (tip >= low).all() and (tip <= high).all()
        return "" if inside else f"fingertip at {tip.round(3)} m lies outside the workspace"

    return check
