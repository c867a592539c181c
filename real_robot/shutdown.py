"""Reach every motor on the way out: exceptions, SIGINT, SIGTERM and SIGHUP all end in `gate.shutdown()`."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from real_robot.safety import SafetyGate

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal asked the robot to stop."""


@contextlib.contextmanager
def guarded(gate: SafetyGate) -> Iterator[SafetyGate]:
    """Run the body; whatever ends it, hold at once, switch torque off everywhere, close the port.

    While the motors are being stopped further signals are ignored: a second Ctrl-C must not leave one energised.
    """
    main = threading.current_thread() is threading.main_thread()
    previous = {s: signal.signal(s, _interrupt) for s in SIGNALS} if main else {}
    try:
        yield gate
    except BaseException as error:
        gate.fault(f"stopped by {type(error).__name__}: {error}")
        raise
    finally:
        for number in previous:
            signal.signal(number, signal.SIG_IGN)
        try:
            gate.shutdown()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(f"signal {signal.Signals(number).name}")
