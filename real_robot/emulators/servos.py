"""The firmware of a bus of STS3215 servos: registers in, answers out. No I/O and no physics in here.

Behaves as the device does where it matters to safety: writing a goal switches torque on and clamps the goal to
[min, max] (seen on hardware, huggingface/lerobot issue 3585); EEPROM written while locked is lost at power-off; a
broadcast is never answered; an overloaded motor drops torque and sets an error bit in every answer.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np

from real_robot.config import RobotSpec
from real_robot.drivers import feetech_wire as wire

VELOCITY_SLACK_TICKS = 2  # rounding of two goals
OVERLOAD = 0x20


class Servo:
    """One motor: its control table and what happens when a register is written."""

    def __init__(self, motor: int, model: int, low: int, high: int) -> None:
        self.id = motor
        self.table = bytearray(wire.TABLE_SIZE)
        self.error = 0
        self.dead = False
        self.pending: bytes | None = None
        self.goal_writes: list[int] = []
        for register, value in (
            (wire.MODEL_NUMBER, model),
            (wire.ID, motor),
            (wire.STATUS_LEVEL, 1),
            (wire.MIN_POSITION, low),
            (wire.MAX_POSITION, high),
            (wire.TORQUE_LIMIT, 1000),
            (wire.LOCK, 1),
            (wire.PRESENT_VOLTAGE, 120),
            (wire.PRESENT_TEMPERATURE, 30),
        ):
            self.set(register, value)
        self.stored = bytes(self.table[: wire.EEPROM_END])

    def get(self, register: tuple[int, int]) -> int:
        address, size = register
        return int.from_bytes(self.table[address : address + size], "little")

    def set(self, register: tuple[int, int], value: int) -> None:
        address, size = register
        self.table[address : address + size] = value.to_bytes(size, "little")

    @property
    def torque(self) -> bool:
        return bool(self.get(wire.TORQUE_ENABLE)) and not self.error & OVERLOAD

    def write(self, address: int, data: bytes) -> None:
        """Apply a write; read-only registers (present values) are left alone."""
        end = min(address + len(data), wire.PRESENT_POSITION[0])
        if end <= address:
            return
        self.table[address:end] = data[: end - address]
        if not self.get(wire.LOCK):
            self.stored = bytes(self.table[: wire.EEPROM_END])
        if address <= wire.TORQUE_ENABLE[0] < end:
            self.error &= ~OVERLOAD  # a torque command clears the latch
        if address <= wire.GOAL_POSITION[0] and wire.GOAL_POSITION[0] + 2 <= end:
            self._new_goal()

    def _new_goal(self) -> None:
        goal = wire.signed(self.get(wire.GOAL_POSITION))
        self.goal_writes.append(goal)
        low, high = self.get(wire.MIN_POSITION), self.get(wire.MAX_POSITION)
        if (low, high) != (0, 0):
            goal = min(max(goal, low), high)
        self.set(wire.GOAL_POSITION, wire.unsigned(goal))
        self.set(wire.TORQUE_ENABLE, 1)

    def power_cycle(self) -> None:
        """RAM is lost, EEPROM comes back as last stored unlocked."""
        fresh = Servo(self.id, 0, 0, 0)
        self.table[:] = fresh.table
        self.table[: wire.EEPROM_END] = self.stored
        self.error, self.pending = 0, None


@dataclass
class LimitMonitor:
    """Counts goals that a safe driver would never send, as received at the device (before the firmware's clamp).

    A goal may differ from an earlier one by speed * elapsed time; ``slack_s`` allows for bunching on a real-time wire.
    """

    low: np.ndarray
    high: np.ndarray
    speed: np.ndarray
    period_s: float
    slack_s: float = 0.0
    out_of_range: int = 0
    too_fast: int = 0
    goals: int = 0
    worst_speed: float = 0.0
    last: dict[int, tuple[int, float]] = field(default_factory=dict)

    def goal(self, joint: int, goal: int, present: int, now_s: float) -> None:
        """``present`` (ticks) is the reference for the first goal after torque was off."""
        self.goals += 1
        self.out_of_range += int(not self.low[joint] <= goal <= self.high[joint])
        # at rest without torque: as if the present position had been commanded one servo period ago
        before, then = self.last.get(joint, (present, now_s - self.period_s))
        elapsed = now_s - then + self.slack_s
        distance = max(0, abs(goal - before) - VELOCITY_SLACK_TICKS)
        if elapsed > 0:
            self.worst_speed = max(self.worst_speed, distance / elapsed / float(self.speed[joint]))
        self.too_fast += int(distance > float(self.speed[joint]) * elapsed * (1 + 1e-6))
        # goal := present, sent when torque comes on, starts no motion: the next goal may follow at once
        self.last[joint] = (goal, now_s if joint in self.last else then)


class ServoBank:
    """All servos of one bus behind a byte-level frame handler."""

    def __init__(self, spec: RobotSpec, slack_s: float = 0.0) -> None:
        low, high = spec.tick_limits()
        self.spec = spec
        self.servos = {j.id: Servo(j.id, spec.model_number, int(a), int(b)) for j, a, b in zip(spec.joints, low, high)}
        speed = spec.array("velocity") * spec.array("ticks_per_rad")
        self.monitor = LimitMonitor(low, high, speed, 1 / spec.servo_hz, slack_s)
        self.instructions: dict[str, int] = {"read": 0, "write": 0}

    def handle(self, packet: wire.Status, now_s: float) -> list[bytes]:
        """Answer one instruction (``packet.error`` holds the instruction byte) with zero or more status frames."""
        instruction, params = packet.error, packet.params
        self.instructions["write" if instruction in wire.WRITING else "read"] += 1
        if instruction == wire.SYNC_READ and packet.id == wire.BROADCAST and len(params) >= 3:
            return [r for i in params[2:] for r in self._read(i, params[0], params[1])]
        if instruction == wire.SYNC_WRITE and packet.id == wire.BROADCAST and len(params) >= 3:
            self._sync_write(params, now_s)
            return []
        if packet.id == wire.BROADCAST:
            targets = list(self.servos)
        else:
            targets = [packet.id] if packet.id in self.servos else []
        replies = [r for i in targets for r in self._one(i, instruction, params, now_s)]
        return [] if packet.id == wire.BROADCAST else replies

    def _one(self, motor: int, instruction: int, params: bytes, now_s: float) -> list[bytes]:
        servo = self.servos[motor]
        if servo.dead:
            return []
        if instruction == wire.PING:
            return [wire.frame(motor, servo.error)]
        if instruction == wire.READ and len(params) == 2:
            return self._read(motor, params[0], params[1])
        if instruction == wire.WRITE and len(params) >= 2:
            self._write(servo, params[0], params[1:], now_s)
        elif instruction == wire.REG_WRITE and len(params) >= 2:
            servo.pending = params
        elif instruction == wire.ACTION:
            if servo.pending is not None:
                self._write(servo, servo.pending[0], servo.pending[1:], now_s)
                servo.pending = None
        else:
            return []
        return [wire.frame(motor, servo.error)] if servo.get(wire.STATUS_LEVEL) else []

    def _read(self, motor: int, address: int, size: int) -> list[bytes]:
        servo = self.servos.get(motor)
        if servo is None or servo.dead or address + size > wire.TABLE_SIZE:
            return []
        return [wire.frame(motor, servo.error, servo.table[address : address + size])]

    def _sync_write(self, params: bytes, now_s: float) -> None:
        address, size = params[0], params[1]
        for start in range(2, len(params) - size, size + 1):
            servo = self.servos.get(params[start])
            if servo is not None and not servo.dead:
                self._write(servo, address, params[start + 1 : start + 1 + size], now_s)

    def _write(self, servo: Servo, address: int, data: bytes, now_s: float) -> None:
        joint = self.spec.ids.index(servo.id)
        if not servo.torque:
            self.monitor.last.pop(joint, None)
        servo.write(address, data)
        for goal in servo.goal_writes:
            self.monitor.goal(joint, goal, servo.get(wire.PRESENT_POSITION), now_s)
        servo.goal_writes.clear()

    # -- towards the physics ------------------------------------------------------------------------------------------

    def goals(self) -> tuple[np.ndarray, np.ndarray]:
        """(J,) goal in rad and (J,) bool torque on, in robot-file order; a dead motor has no torque."""
        servos = [self.servos[i] for i in self.spec.ids]
        ticks = np.array([wire.signed(s.get(wire.GOAL_POSITION)) for s in servos])
        return self.spec.to_rad(ticks), np.array([s.torque and not s.dead for s in servos])

    def measure(self, position: np.ndarray, velocity: np.ndarray) -> None:
        """Write (J,) rad and rad/s into the present-value registers, as the encoder would."""
        ticks = np.rint(
            self.spec.array("zero_ticks") + self.spec.array("sign") * position * self.spec.array("ticks_per_rad")
        ).astype(int)
        speed = np.rint(self.spec.array("sign") * velocity * self.spec.array("ticks_per_rad")).astype(int)
        for motor, p, v in zip(self.spec.ids, ticks, speed):
            servo = self.servos[motor]
            servo.set(wire.PRESENT_POSITION, int(p) % 4096)
            servo.set(wire.PRESENT_VELOCITY, wire.unsigned(int(v)))
            servo.set(wire.HARDWARE_STATUS, servo.error)

    def snapshot(self) -> dict[int, bytes]:
        """Copies of all control tables, for tests."""
        return {i: copy.copy(bytes(s.table)) for i, s in self.servos.items()}
