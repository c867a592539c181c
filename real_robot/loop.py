"""A policy at 20 Hz over a servo loop at 100 Hz, on absolute deadlines. The same code in real and in lock-step time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from real_robot.clock import Clock
from real_robot.contract import CHUNK, JointMap, arm_of
from real_robot.emulators.channel import ChannelError
from real_robot.safety import FAULT, SafetyGate
from real_robot.types import JointState, Sensor
from sims.worlds.kinematics import proprio
from sims.worlds.robots import next_target


@dataclass
class Timing:
    """Servo deadlines: lateness of each (us), overruns (work longer than the period) and periods skipped for them."""

    lateness_us: list[float] = field(default_factory=list)
    overruns: int = 0
    skipped: int = 0

    def summary(self) -> dict[str, float]:
        """p50, p99, max (us) and how many deadlines there were."""
        if not self.lateness_us:
            return {}
        p50, p99 = np.percentile(self.lateness_us, [50, 99])
        return {"p50": float(p50), "p99": float(p99), "max": max(self.lateness_us), "count": len(self.lateness_us)}


class Deadlines:
    """Equally spaced absolute deadlines. Missed ones are skipped, never made up for in a burst."""

    def __init__(self, clock: Clock, period_ns: int, timing: Timing) -> None:
        self.clock, self.period_ns, self.timing = clock, period_ns, timing
        self.next_ns = clock.now_ns()

    def wait(self) -> None:
        """Sleep until the next deadline."""
        self.next_ns += self.period_ns
        behind = self.clock.now_ns() - self.next_ns
        if behind > 0:
            self.timing.overruns += 1
            missed = behind // self.period_ns
            self.timing.skipped += missed
            self.next_ns += missed * self.period_ns
        self.clock.sleep_until(self.next_ns)
        self.timing.lateness_us.append(max(0.0, (self.clock.now_ns() - self.next_ns) * 1e-3))


@dataclass
class EpisodeLog:
    """One row per action: what was measured, wanted and sent. Positions in rad, robot-file order."""

    measured: list[np.ndarray] = field(default_factory=list)
    target: list[np.ndarray] = field(default_factory=list)
    command: list[np.ndarray] = field(default_factory=list)
    objects: list[np.ndarray] = field(default_factory=list)
    stamp_ns: list[int] = field(default_factory=list)
    timing: Timing = field(default_factory=Timing)
    steps: int = 0
    ended: str = "time limit"

    def arrays(self) -> dict[str, np.ndarray]:
        """Name -> (T, ...) arrays."""
        names = ("measured", "target", "command", "objects", "stamp_ns")
        return {n: np.array(getattr(self, n)) for n in names if getattr(self, n)}


class PolicyPlayer:
    """Turns observations into joint targets; plays ``spec.execute`` actions of a chunk before asking again.

    Args:
        policy: a loaded artefact (``control.policy.Policy``). joints: name mapping. extra: constant input groups
        (sentence embedding, goal), without the batch axis.
    """

    def __init__(self, policy: Any, joints: JointMap, robot: Any, extra: Mapping[str, np.ndarray]) -> None:
        self.policy, self.joints, self.arm = policy, joints, arm_of(robot)
        self.extra = {k: np.asarray(v)[None] for k, v in extra.items()}
        self.state: Any = None
        self.queue: list[np.ndarray] = []
        self.base = np.zeros(len(robot.joints))

    def next_target(self, state: JointState, target: np.ndarray, sensed: Mapping[str, np.ndarray]) -> np.ndarray:
        """(J,) rad the robot should reach at the end of this action period; unusable actions come back as they are."""
        q, old = self.joints.to_policy(state.position), self.joints.to_policy(target)
        if not self.queue:
            speed = self.joints.to_policy(state.velocity)
            obs = {"proprio": proprio(q[None], speed[None], old[None], self.arm), **self.extra}
            obs |= {k: v[None] for k, v in sensed.items()}
            actions, self.state = self.policy(obs, self.state)
            self.base, self.queue = old, list(np.asarray(actions)[0][: self.policy.spec.execute])
        action = np.asarray(self.queue.pop(0), dtype=np.float64)
        if action.shape != q.shape or not np.isfinite(action).all():
            self.queue.clear()
            return action  # the gate rejects it whole
        if self.policy.spec.action_meaning == CHUNK:
            action = self.base + action - old
        return self.joints.to_robot(next_target(self.arm, old, q, action))

    def forget(self) -> None:
        """Drop the rest of a chunk, e.g. because an action was not executed."""
        self.queue.clear()


def run_episode(
    gate: SafetyGate, sensors: Sequence[Sensor], player: PolicyPlayer, clock: Clock, steps: int
) -> EpisodeLog:
    """Run at most ``steps`` actions on an engaged gate; ends early on a fault. Leaves the arm holding.

    Without a fresh observation nothing is asked of the policy and the arm holds for that action period.
    """
    spec, log = gate.spec, EpisodeLog()
    deadlines = Deadlines(clock, round(1e9 / spec.servo_hz), log.timing)
    target = gate.command.copy()
    state = gate.observe()
    while log.steps < steps and gate.state != FAULT:
        sensed = _sense(gate, sensors)
        if state is None or sensed is None or not gate.fresh("joints", state.stamp_ns, spec.joint_max_age_s):
            wanted = None
        else:
            wanted = player.next_target(state, target, sensed)
            _record(log, state, wanted, gate.command, sensed)
        sent = _servo(gate, deadlines, wanted)
        if wanted is None or not sent:
            player.forget()
        target = wanted if wanted is not None and sent else gate.command.copy()
        state = gate.observe()
        log.steps += 1
    if gate.state == FAULT:
        log.ended = f"fault: {gate.reason}"
    return log


def _servo(gate: SafetyGate, deadlines: Deadlines, wanted: np.ndarray | None) -> bool:
    """One action period of servo ticks; False if the target was not accepted to its end.

    After a held tick the target is offered again: the ramp has gone on, the gate limits the step.
    """
    ticks, start = gate.spec.ticks_per_action, gate.command.copy()
    ramp, outcome = max(1, round(ticks * gate.spec.ramp_fraction)), "held"
    for tick in range(1, ticks + 1):
        if wanted is None:
            gate.hold("no target")
        else:
            matched = wanted.shape == start.shape
            point = start + (wanted - start) * min(1.0, tick / ramp) if matched else wanted
            outcome = gate.submit(point).outcome
            wanted = wanted if outcome in ("sent", "held") else None
        deadlines.wait()
        if tick < ticks:
            gate.observe()
    return outcome == "sent"


def _sense(gate: SafetyGate, sensors: Sequence[Sensor]) -> dict[str, np.ndarray] | None:
    """Merged values of all sensors, or None if one is missing, old or frozen."""
    values: dict[str, np.ndarray] = {}
    for index, sensor in enumerate(sensors):
        try:
            reading = sensor.read()
        except ChannelError as error:
            gate.fault(f"sensor lost: {error}")
            return None
        if not gate.fresh(
            f"sensor {index} ({', '.join(reading.values)})", reading.stamp_ns, gate.spec.sensor_max_age_s
        ):
            return None
        values.update(reading.values)
    return values


def _record(
    log: EpisodeLog, state: JointState, wanted: np.ndarray, command: np.ndarray, sensed: Mapping[str, np.ndarray]
) -> None:
    log.measured.append(state.position.copy())
    log.target.append(wanted if wanted.shape == state.position.shape else np.full_like(state.position, np.nan))
    log.command.append(command.copy())
    log.stamp_ns.append(state.stamp_ns)
    if "objects" in sensed:
        log.objects.append(np.asarray(sensed["objects"]))


def travel(gate: SafetyGate, clock: Clock, goal: np.ndarray, timeout_s: float = 10.0) -> bool:
    """Move in a straight line in joint space at ``spec.ramp_speed``; False if a fault stopped it."""
    start, distance = gate.command.copy(), float(np.abs(goal - gate.command).max())
    ticks = max(1, round(min(distance / gate.spec.ramp_speed, timeout_s) * gate.spec.servo_hz))
    deadlines = Deadlines(clock, round(1e9 / gate.spec.servo_hz), Timing())
    for tick in range(1, ticks + 1):
        if gate.submit(start + (goal - start) * tick / ticks).outcome == "fault":
            return False
        deadlines.wait()
        gate.observe()
    return gate.state != FAULT
