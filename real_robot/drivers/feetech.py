"""Feetech STS3215 bus: the driver of SO-101-class arms. Speaks the wire protocol itself, see `feetech_wire`."""

from __future__ import annotations

import time

import numpy as np

from real_robot.clock import Clock, MonotonicClock
from real_robot.config import RobotSpec
from real_robot.drivers import feetech_wire as wire
from real_robot.drivers.feetech_bus import BusError, SerialBus
from real_robot.types import JointState
from sims.errors import UserError

READ_SIZE = 10  # present position .. hardware status, registers 56 to 65
STOP_TIMEOUT_S = 0.02
STOP_TRIES = 3
EDGE_TICKS = 20  # 0.03 rad: a joint resting at its stop reads a little beyond its range and is drawn back by so much


class FeetechDriver:
    """Joints on one Feetech bus. With ``dry_run`` reads reach the motors and writes never do.

    Args:
        spec: the robot file; ``spec.port`` is opened by :meth:`connect`.
        clock: source of the stamps in :meth:`read`.
    """

    def __init__(self, spec: RobotSpec, clock: Clock | None = None, dry_run: bool = False) -> None:
        self.spec = spec
        self.clock = clock or MonotonicClock()
        self.bus = SerialBus(spec.port, spec.baudrate, dry_run)
        self.stop_report: dict[str, str] = {}
        self._low, self._high = spec.tick_limits()
        self._torque_on = False

    # -- life cycle ---------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Open exclusively, check model numbers and position ranges of all motors, switch torque off.

        Raises UserError: port missing or in use, dead motor, wrong model, range of the motor narrower than the file's.
        """
        if not self.spec.port:
            raise UserError(f"robot '{self.spec.name}' has no serial port. Set robot.port=/dev/...")
        self.bus.open()
        try:
            self._check_motors()
            self._set_torque(0)
        except BaseException:
            self.bus.close()
            raise

    def disconnect(self) -> None:
        """Torque off if it is on, then close; idempotent."""
        if self._torque_on:
            self.stop()
        self.bus.close()

    def _check_motors(self) -> None:
        silent, wrong = [], []
        for joint in self.spec.joints:
            label = f"{joint.name} (id {joint.id})"
            try:
                model = int.from_bytes(self._read(joint.id, wire.MODEL_NUMBER), "little")
            except BusError:
                silent.append(label)
                continue
            if model != self.spec.model_number:
                wrong.append(f"{label} reports model {model}")
        if silent:
            raise UserError(
                f"no answer on {self.spec.port} from {', '.join(silent)}. Check power, the cable to that motor and its "
                f"id; the others answered."
            )
        if wrong:
            raise UserError(f"wrong motor on {self.spec.port}: {'; '.join(wrong)}, expected {self.spec.model_number}.")
        self._check_ranges()

    def _check_ranges(self) -> None:
        """The firmware silently clamps goals to its own range, so a narrower one must not go unnoticed."""
        for joint, low, high in zip(self.spec.joints, self._low, self._high):
            data = self._read(joint.id, (wire.MIN_POSITION[0], 4))
            least, most = int.from_bytes(data[:2], "little"), int.from_bytes(data[2:], "little")
            if (least, most) != (0, 0) and (least > low or most < high):
                raise UserError(
                    f"motor {joint.name} (id {joint.id}) on {self.spec.port} accepts ticks [{least}, {most}], the "
                    f"robot file allows [{low}, {high}]. Calibrate the arm or narrow 'low'/'high' in the robot file."
                )

    # -- Driver -------------------------------------------------------------------------------------------------------

    def read(self) -> JointState:
        """All joints by sync read; motors that did not answer are asked again within ``spec.read_budget_s``.

        Raises BusError naming the motors that stayed silent or whose position is no encoder value.
        """
        answers = self._sync_read(wire.PRESENT_POSITION[0], READ_SIZE)
        ticks, speed, faults = [], [], {}
        for joint in self.spec.joints:
            status = answers[joint.id]
            position = int.from_bytes(status.params[0:2], "little")
            if position > 4095:  # 0xFFFF is what a resetting motor returns
                raise BusError(f"motor {joint.name} returned position {position}, no encoder value", (joint.id,))
            ticks.append(position)
            speed.append(wire.signed(int.from_bytes(status.params[2:4], "little")))
            if status.error or status.params[9]:
                faults[joint.name] = wire.describe_error(status.error | status.params[9])
        rate = self.spec.array("sign") * np.array(speed) / self.spec.array("ticks_per_rad")
        return JointState(self.clock.now_ns(), self.spec.to_rad(np.array(ticks)), rate, faults)

    def write(self, target: np.ndarray) -> np.ndarray:
        """Send (J,) rad in one sync write. Returns what the wire carried (rad).

        Raises ValueError for a goal that is not finite or outside the limits: the gate must never let one through.
        """
        target = np.asarray(target, dtype=np.float64)
        if target.shape != (len(self.spec.joints),) or not np.isfinite(target).all():
            raise ValueError(f"goal must be {len(self.spec.joints)} finite numbers, found {target}")
        ticks = self.spec.to_ticks(target)
        outside = (ticks < self._low) | (ticks > self._high)
        if outside.any():
            names = [n for n, bad in zip(self.spec.names, outside) if bad]
            raise ValueError(f"goal outside the range of {', '.join(names)}: {target}")
        self._sync_write_goals(ticks)
        return self.spec.to_rad(ticks)

    def enable(self) -> None:
        """Goal := present on every motor, verified by reading back, then torque on: nothing moves.

        Raises UserError if a joint stands clearly outside its range (the firmware would drive it to the edge).
        """
        present = self.spec.to_ticks(self.read().position)
        ticks = np.clip(present, self._low, self._high)
        outside = [
            f"{j.name} at {float(self.spec.to_rad(present)[i]):.3f} rad, range [{j.low}, {j.high}]"
            for i, j in enumerate(self.spec.joints)
            if abs(present[i] - ticks[i]) > EDGE_TICKS
        ]
        if outside:
            raise UserError(f"joint outside its range: {'; '.join(outside)}. Move it inside by hand, then try again.")
        self._torque_on = not self.bus.dry_run  # a goal write alone switches torque on (firmware)
        self._sync_write_goals(ticks)
        for motor, goal in zip(self.spec.ids, ticks):
            self._write(motor, wire.ACCELERATION, bytes((self.spec.device_acceleration,)))
            self._write(motor, wire.GOAL_VELOCITY, wire.word(self.spec.device_velocity))
            if not self.bus.dry_run and int.from_bytes(self._read(motor, wire.GOAL_POSITION), "little") != goal:
                self._write(motor, wire.GOAL_POSITION, wire.word(int(goal)))
        self._set_torque(1)

    def stop(self) -> None:
        """Torque off everywhere: one broadcast frame, then each motor until it confirms. Never raises.

        Takes at most J * STOP_TRIES * STOP_TIMEOUT_S; ``stop_report`` says per joint "off" or what was found.
        """
        self.stop_report = {}
        off = wire.sync_write_frame(dict.fromkeys(self.spec.ids, b"\x00"), wire.TORQUE_ENABLE[0])
        self._quietly(off)
        for joint in self.spec.joints:
            try:
                frame = wire.write_frame(joint.id, wire.TORQUE_ENABLE[0], b"\x00")
                status = self.bus.request(joint.id, frame, 0, STOP_TIMEOUT_S, STOP_TRIES - 1)
                error = wire.describe_error(status.error) if status else ""
                self.stop_report[joint.name] = "off" + (f" ({error})" if error else "")
            except Exception as error:  # the others must still be reached
                self.stop_report[joint.name] = f"not confirmed: {error}"
        self._quietly(off)
        self._torque_on = False

    def _quietly(self, frame: bytes) -> None:
        try:
            self.bus.send(frame)
        except Exception as error:
            self.stop_report["bus"] = str(error)

    # -- registers ----------------------------------------------------------------------------------------------------

    def _sync_write_goals(self, ticks: np.ndarray) -> None:
        goals = {i: wire.word(int(t)) for i, t in zip(self.spec.ids, ticks)}
        self.bus.send(wire.sync_write_frame(goals, wire.GOAL_POSITION[0]))

    def _sync_read(self, address: int, size: int) -> dict[int, wire.Status]:
        found: dict[int, wire.Status] = {}
        start = time.monotonic()
        for attempt in range(self.spec.retries + 1):
            missing = [i for i in self.spec.ids if i not in found]
            left = start + self.spec.read_budget_s - time.monotonic()
            if not missing or left <= 0:
                break
            self.bus.retries += attempt > 0
            self.bus.send(wire.sync_read_frame(missing, address, size))
            found |= self._collect(missing, size, time.monotonic() + min(left, self.spec.reply_timeout_s))
        silent = tuple(i for i in self.spec.ids if i not in found)
        if silent:
            names = [j.name for j in self.spec.joints if j.id in silent]
            raise BusError(f"no valid answer on {self.spec.port} from {', '.join(names)}", silent)
        return found

    def _collect(self, motors: list[int], size: int, deadline: float) -> dict[int, wire.Status]:
        """Answers of the motors asked; one that answers twice and differently is not believed at all."""
        found: dict[int, wire.Status] = {}
        doubtful: set[int] = set()

        def accept(status: wire.Status) -> bool:
            wanted = status.id in motors and len(status.params) == size
            if wanted and found.setdefault(status.id, status) != status:
                doubtful.add(status.id)
            return len(found) == len(motors)

        self.bus.collect(accept, deadline)
        return {motor: status for motor, status in found.items() if motor not in doubtful}

    def _read(self, motor: int, register: tuple[int, int]) -> bytes:
        frame = wire.read_frame(motor, *register)
        status = self.bus.request(motor, frame, register[1], self._timeout, self.spec.retries)
        assert status is not None  # reads are never held back
        return status.params

    def _write(self, motor: int, register: tuple[int, int], data: bytes) -> None:
        self.bus.request(motor, wire.write_frame(motor, register[0], data), 0, self._timeout, self.spec.retries)

    @property
    def _timeout(self) -> float:
        return max(self.spec.reply_timeout_s, 0.02)  # outside the servo loop there is time to wait

    def _set_torque(self, value: int) -> None:
        for motor in self.spec.ids:
            self._write(motor, wire.TORQUE_ENABLE, bytes((value,)))
