"""A plan of faults on the wire. Every fault counts how often it fired, so that a test can tell that it did."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from real_robot.drivers import feetech_wire as wire
from sims.errors import UserError, unknown_choice

# on each status frame / on the motor / on the tracker
WIRE_FAULTS = ("drop", "corrupt", "truncate", "delay", "stray", "wrong_id", "duplicate")
MOTOR_FAULTS = ("dead", "stuck", "overload", "wrong_model", "garbage_position")
TRACKER_FAULTS = ("freeze_tracker",)
KINDS = WIRE_FAULTS + MOTOR_FAULTS + TRACKER_FAULTS


@dataclass
class Fault:
    """One fault.

    Attributes:
        kind: a name in ``KINDS``.
        id: motor it hits, 0 = any.
        after: matching events that pass unharmed first (status frames, or physics steps of 5 ms for motors).
        count: how many events it hits, -1 = all that follow.
        every: of the events in range, hit one in ``every``.
        ms: wall-clock delay of ``delay``.
        fired: events hit so far.
    """

    kind: str
    id: int = 0
    after: int = 0
    count: int = -1
    every: int = 1
    ms: float = 0.0
    fired: int = 0
    seen: int = 0

    def hits(self, motor: int) -> bool:
        """Count one event of ``motor``; True if the fault applies to it."""
        if self.id not in (0, motor):
            return False
        index = self.seen - self.after
        self.seen += 1
        if index < 0 or index % self.every or (self.count >= 0 and self.fired >= self.count):
            return False
        self.fired += 1
        return True


def parse(plan: list[dict[str, Any]]) -> list[Fault]:
    """Build a plan from plain data; raises UserError for an unknown kind or field."""
    names = [f.name for f in fields(Fault) if f.name not in ("fired", "seen")]
    for item in plan:
        if item.get("kind") not in KINDS:
            raise unknown_choice("fault", str(item.get("kind")), KINDS)
        unknown = set(item) - set(names)
        if unknown:
            raise unknown_choice("fault field", sorted(unknown)[0], names)
        if item.get("every", 1) < 1:
            raise UserError(f"fault {item['kind']}: 'every' must be at least 1, found {item['every']}.")
    return [Fault(**item) for item in plan]


def damage(faults: list[Fault], reply: bytes) -> tuple[bytes, float]:
    """Pass one status frame through the wire faults: bytes that arrive, and how late (s)."""
    delay, motor = 0.0, reply[2]
    for fault in faults:
        if fault.kind not in WIRE_FAULTS or not reply or not fault.hits(motor):
            continue
        if fault.kind == "drop":
            reply = b""
        elif fault.kind == "corrupt":
            reply = reply[:-2] + bytes((reply[-2] ^ 0x01, reply[-1]))
        elif fault.kind == "truncate":
            reply = reply[:-3]
        elif fault.kind == "stray":
            reply = b"\x00\xff" + reply
        elif fault.kind == "wrong_id":
            reply = wire.frame(motor % wire.MAX_ID + 1, reply[4], reply[5:-1])
        elif fault.kind == "duplicate":
            reply = reply + reply
        else:
            delay += fault.ms / 1000
    return reply, delay
