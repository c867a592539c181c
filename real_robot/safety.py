"""The only way to a driver. Every target passes: whole and finite -> speed and acceleration against what was last sent
-> workspace -> hard limits. A fault holds the arm where it is commanded and never travels; leaving it needs `reset`.

The limiter refers to the previous *sent* command: referring to the measurement makes a lagging arm crawl
(ros-controls/ros2_control pull request 2183). Hard limits come last, so that no earlier step can undo them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from real_robot.clock import Clock
from real_robot.drivers.feetech_bus import BusError
from real_robot.types import Driver, JointState
from sims.errors import UserError

Workspace = Callable[[np.ndarray], str]  # (J,) target -> "" if allowed, else what is wrong

ABSURD = 100.0  # rad: numbers beyond are no joint angles, but a broken policy
IDLE, ACTIVE, FAULT = "idle", "active", "fault"


@dataclass(frozen=True)
class Decision:
    """What became of one target.

    Attributes:
        command: (J,) rad that the robot now holds or moves to, before encoder rounding.
        outcome: "sent", "held" (nothing wrong with the target, but the robot cannot take it now), "rejected" (bad
            target) or "fault"; except for "sent" the previous command stays.
        limited: names of the limiters that changed it: "velocity", "acceleration", "limits".
    """

    command: np.ndarray
    outcome: str
    limited: tuple[str, ...] = ()
    reason: str = ""


class SafetyGate:
    """Owns the driver of one robot.

    Args:
        driver: connected and driven only from here.
        clock: the loop's clock; one ``submit`` per servo period.
        estop_file: the arm stops as soon as this file exists (checked at each ``observe``).
        workspace: optional check of the limited target, e.g. a box around the gripper.

    Attributes:
        state: "idle" (no torque), "active" or "fault" (latched). reason: of the fault.
        counters: how often each thing happened.
    """

    def __init__(
        self, driver: Driver, clock: Clock, estop_file: Path | None = None, workspace: Workspace | None = None
    ) -> None:
        self._driver, self.spec, self.clock = driver, driver.spec, clock
        self.estop_file, self.workspace = estop_file, workspace
        self.low, self.high = self.spec.array("low"), self.spec.array("high")
        self.max_speed, self.max_acceleration = self.spec.array("velocity"), self.spec.array("acceleration")
        self.dt = 1.0 / self.spec.servo_hz
        self.state, self.reason, self.estopped = IDLE, "", False
        self.counters: Counter[str] = Counter()
        self.command = self.spec.array("home")
        self.speed = np.zeros(len(self.command))
        self.measured: JointState | None = None
        self._bad_actions = self._bad_reads = 0
        self._stamps: dict[str, int] = {}

    # -- life cycle ---------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect the driver, torque off. Raises UserError."""
        self._driver.connect()

    def engage(self) -> np.ndarray:
        """Torque on at the measured pose; nothing moves. Returns that pose (J,) rad, which is the command now.

        Raises UserError if a fault is latched, a joint stands outside its range, or the bus does not answer.
        """
        if self.state == FAULT:
            raise UserError(f"the robot is in a fault ({self.reason}); reset it first.")
        try:
            measured = self._driver.read()
            self._driver.enable()
        except BusError as error:
            raise UserError(f"cannot enable '{self.spec.name}': {error}.") from None
        self.measured = measured
        self.command = np.clip(measured.position, self.low, self.high)
        self.speed = np.zeros(len(self.command))
        self._bad_actions = self._bad_reads = 0
        self._stamps.clear()
        self.state = ACTIVE
        return self.command.copy()

    def release(self) -> None:
        """Torque off on every motor; a latched fault stays latched."""
        self._driver.stop()
        if self.state == ACTIVE:
            self.state = IDLE

    def shutdown(self) -> None:
        """Torque off everywhere and close, whatever happened before; never raises, idempotent, bounded in time."""
        try:
            self._driver.stop()
        finally:
            try:
                self._driver.disconnect()
            except Exception as error:
                self.counters["disconnect_errors"] += 1
                self.reason = self.reason or str(error)
            if self.state == ACTIVE:
                self.state = IDLE

    # -- stopping -----------------------------------------------------------------------------------------------------

    def fault(self, reason: str) -> None:
        """Latch: the last command is held, every later target is refused until :meth:`reset`."""
        if self.state != FAULT:
            self.state, self.reason = FAULT, reason
            self.counters["faults"] += 1
            self.speed = np.zeros(len(self.command))

    def estop(self, reason: str = "emergency stop") -> None:
        """Latched emergency stop: hold at once. Safe to call from any thread."""
        if not self.estopped:
            self.counters["estops"] += 1
        self.estopped = True
        self.fault(reason)

    def reset(self) -> None:
        """Acknowledge a fault. The arm stays without a new command until :meth:`engage` (goal := present).

        Raises UserError while the e-stop file still exists.
        """
        if self.estop_file is not None and self.estop_file.exists():
            raise UserError(f"the emergency stop file {self.estop_file} still exists. Remove it, then reset.")
        self.state, self.reason, self.estopped = IDLE, "", False

    # -- measuring ----------------------------------------------------------------------------------------------------

    def observe(self) -> JointState | None:
        """Read the joints and check them; None when this read failed (counted; several in a row are a fault)."""
        if self.estop_file is not None and not self.estopped and self.estop_file.exists():
            self.estop(f"emergency stop file {self.estop_file}")
        try:
            state = self._driver.read()
        except BusError as error:
            self.counters["bad_reads"] += 1
            self._bad_reads += 1
            if self._bad_reads >= self.spec.bad_reads_to_fault:
                self.fault(f"{self._bad_reads} reads failed in a row: {error}")
            return None
        self._bad_reads = 0
        self.measured = state
        if state.faults:
            self.fault("motor reports " + ", ".join(f"{n}: {f}" for n, f in state.faults.items()))
        margin = self.spec.measured_tolerance
        outside = (state.position < self.low - margin) | (state.position > self.high + margin)
        if outside.any():
            names = [n for n, bad in zip(self.spec.names, outside) if bad]
            self.fault(f"measured outside the limits: {', '.join(names)} at {state.position[outside].round(3)}")
        return state

    def fresh(self, source: str, stamp_ns: int, max_age_s: float) -> bool:
        """May a policy act on this measurement? Its stamp must be recent and must have advanced since the last one.

        A repeated stamp is a frozen source. Stale ones are counted; beyond ``bad_reads_to_fault`` in a row: fault.
        """
        age = (self.clock.now_ns() - stamp_ns) * 1e-9
        frozen = stamp_ns <= self._stamps.get(source, -1)
        self._stamps[source] = max(stamp_ns, self._stamps.get(source, -1))
        key = f"stale/{source}"
        if age <= max_age_s and not frozen:
            self._stamps[key] = 0
            return True
        self.counters["stale"] += 1
        self._stamps[key] = self._stamps.get(key, 0) + 1
        if self._stamps[key] >= self.spec.bad_reads_to_fault:
            self.fault(f"{source} {'is frozen' if frozen else f'is {age:.3f} s old'}")
        return False

    # -- commanding ---------------------------------------------------------------------------------------------------

    def submit(self, target: np.ndarray, names: Sequence[str] | None = None) -> Decision:
        """Limit one (J,) rad target and send it. Call once per servo period. Never raises for a bad target.

        Args:
            target: where the joints should go. names: joint names in the order of ``target``, checked if given.
        """
        if self.state != ACTIVE:
            self.counters["refused"] += 1
            return Decision(self.command.copy(), "fault" if self.state == FAULT else "held", (), self.reason)
        bad = self._malformed(target, names)
        if bad:
            return self._reject(bad)
        if self._bad_reads:  # blind: wait for the next measurement
            return self.hold("the last read failed")
        command, limited = self._limit(np.asarray(target, dtype=np.float64))
        if self.workspace is not None and (bad := self.workspace(command)):
            return self._reject(bad)
        self._bad_actions = 0
        try:
            self._driver.write(command)
        except BusError as error:
            self.fault(f"command could not be sent: {error}")
            return Decision(self.command.copy(), "fault", (), self.reason)
        self.speed = (command - self.command) / self.dt
        self.command = command
        self.counters["sent"] += 1
        for name in limited:
            self.counters[f"limited_{name}"] += 1
        return Decision(command.copy(), "sent", limited)

    def hold(self, reason: str) -> Decision:
        """Keep the previous command for this servo period, e.g. because no fresh observation came."""
        self.counters["held"] += 1
        self.speed = np.zeros(len(self.command))
        return Decision(self.command.copy(), "fault" if self.state == FAULT else "held", (), reason)

    def _malformed(self, target: np.ndarray, names: Sequence[str] | None) -> str:
        if names is not None and tuple(names) != self.spec.names:
            return f"joint names {list(names)} are not {list(self.spec.names)}"
        try:
            array = np.asarray(target, dtype=np.float64)
        except (TypeError, ValueError):
            return f"target is not numeric: {target!r}"
        if array.shape != self.command.shape:
            return f"target has shape {array.shape}, the robot {self.command.shape}"
        if not np.isfinite(array).all():
            return f"target is not finite: {array}"
        return "" if np.abs(array).max() <= ABSURD else f"target is no joint angle: {array}"

    def _reject(self, reason: str) -> Decision:
        """The whole action is dropped: a valid part of a broken action is not trustworthy either."""
        self.counters["rejected"] += 1
        self._bad_actions += 1
        if self._bad_actions >= self.spec.bad_actions_to_fault:
            self.fault(f"{self._bad_actions} bad actions in a row: {reason}")
        self.speed = np.zeros(len(self.command))
        return Decision(self.command.copy(), "fault" if self.state == FAULT else "rejected", (), reason)

    def _limit(self, target: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
        """Speed, then change of speed, then the range of each joint."""
        limited = []
        wanted = (target - self.command) / self.dt
        speed = np.clip(wanted, -self.max_speed, self.max_speed)
        if (speed != wanted).any():
            limited.append("velocity")
        reach = self.max_acceleration * self.dt
        # the largest speed from which steps of `reach` can still stop at the target, so that braking does not overshoot
        brake = np.sqrt(reach**2 / 4 + 2 * self.max_acceleration * np.abs(target - self.command)) - reach / 2
        eased = np.clip(np.clip(speed, -brake, brake), self.speed - reach, self.speed + reach)
        eased = np.clip(eased, -self.max_speed, self.max_speed)
        if (np.abs(eased - speed) > 1e-12).any():
            limited.append("acceleration")
        moved = target if not limited else self.command + eased * self.dt
        command = np.clip(moved, self.low, self.high)
        if (command != moved).any():
            limited.append("limits")
        return command, tuple(limited)
