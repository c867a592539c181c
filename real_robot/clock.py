"""Time for the loop: the machine's monotonic clock, or an emulator's clock advanced in lock step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Nanoseconds of one monotonic time line; nothing else in the loop reads the time."""

    def now_ns(self) -> int: ...

    def sleep_until(self, deadline_ns: int) -> None: ...


class MonotonicClock:
    """CLOCK_MONOTONIC; sleeps to absolute deadlines so that errors do not add up."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def sleep_until(self, deadline_ns: int) -> None:
        remaining = deadline_ns - time.monotonic_ns()
        if remaining > 0:
            time.sleep(remaining * 1e-9)


class LockstepClock:
    """Virtual time: sleeping *is* simulating. The same loop then runs as fast as the physics allows.

    Args:
        tick: advances the emulator by so many nanoseconds and returns its new time (ns).
        start_ns: the emulator's time now.
    """

    def __init__(self, tick: Callable[[int], int], start_ns: int = 0) -> None:
        self._tick = tick
        self._now = start_ns

    def now_ns(self) -> int:
        return self._now

    def sleep_until(self, deadline_ns: int) -> None:
        if deadline_ns > self._now:
            self._now = self._tick(deadline_ns - self._now)

    def set(self, now_ns: int) -> None:
        """Take over the emulator's time after it was changed by something else, e.g. a reset."""
        self._now = now_ns
