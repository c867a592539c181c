"""A serial port held exclusively, and bounded request/answer on it. pyserial is imported when the port is opened."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from real_robot.drivers import feetech_wire as wire
from sims.errors import UserError


class BusError(Exception):
    """The bus did not deliver a valid answer in time. Transient: the gate holds and counts; `missing` names motors."""

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class SerialBus:
    """Half-duplex bus of Feetech servos.

    Args:
        port: device path. baudrate: bits/s.
        dry_run: frames that would change a motor are counted in ``suppressed_frames`` and never reach the port.
    """

    def __init__(self, port: str, baudrate: int, dry_run: bool = False) -> None:
        self.port, self.baudrate, self.dry_run = port, baudrate, dry_run
        self.tx_bytes = self.rx_bytes = self.suppressed_frames = self.retries = 0
        self.parser = wire.Parser()
        self._serial: Any = None
        self._lock_fd: int | None = None

    @property
    def is_open(self) -> bool:
        return self._serial is not None

    def open(self) -> None:
        """Lock file first: two programs that both open a tty shared are not stopped by TIOCEXCL alone."""
        import serial

        self._lock_fd = _take_lock(self.port)
        try:
            self._serial = serial.Serial(self.port, self.baudrate, timeout=0, write_timeout=1.0, exclusive=True)
        except (OSError, ValueError) as error:
            self._release()
            raise _explain(self.port, error) from None

    def close(self) -> None:
        """Idempotent."""
        if self._serial is not None:
            with contextlib.suppress(Exception):
                self._serial.close()
            self._serial = None
        self._release()

    def _release(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def send(self, data: bytes) -> bool:
        """Put one frame on the wire; False if dry-run held it back. Input left from earlier requests is dropped."""
        if self._serial is None:
            raise BusError(f"port {self.port} is not open")
        if self.dry_run and data[4] in wire.WRITING:
            self.suppressed_frames += 1
            return False
        self._drain()
        try:
            self.tx_bytes += self._serial.write(data)
        except OSError as error:
            raise BusError(f"port {self.port} failed while writing: {error}") from None
        return True

    def _drain(self) -> None:
        self._read_available()
        self.parser.clear()

    def _read_available(self) -> bytes:
        try:
            data = os.read(self._serial.fileno(), 4096)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise BusError(f"port {self.port} failed while reading: {error}") from None
        self.rx_bytes += len(data)
        return data

    def collect(self, accept: Callable[[wire.Status], bool], deadline: float) -> None:
        """Feed valid frames to ``accept`` until it returns True or ``deadline`` (``time.monotonic`` seconds) passes."""
        import select

        while True:
            for status in self.parser.feed(self._read_available()):
                if accept(status):
                    return
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            try:
                select.select([self._serial.fileno()], [], [], remaining)
            except OSError as error:
                raise BusError(f"port {self.port} failed while waiting: {error}") from None

    def request(self, motor: int, frame: bytes, size: int, timeout_s: float, retries: int) -> wire.Status | None:
        """Send and wait for the answer of ``motor`` with ``size`` parameters; None in dry-run for a held-back frame.

        Raises BusError after ``retries`` repeats without a valid answer: worst case (retries + 1) * timeout_s.
        """
        answer: list[wire.Status] = []

        def accept(status: wire.Status) -> bool:
            if status.id == motor and len(status.params) == size:
                answer.append(status)
            return bool(answer)

        for attempt in range(retries + 1):
            if not self.send(frame):
                return None
            self.retries += attempt > 0
            self.collect(accept, time.monotonic() + timeout_s)
            if answer:
                return answer[0]
        raise BusError(f"motor {motor} on {self.port} gave no valid answer ({retries + 1} tries)", (motor,))


def _take_lock(port: str) -> int:
    real = os.path.realpath(port)
    path = Path(tempfile.gettempdir()) / f"robot-port-{re.sub(r'[^A-Za-z0-9]+', '-', real).strip('-')}.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise UserError(
            f"serial port {port} is in use by process {holder}. Stop that program, then try again."
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _explain(port: str, error: Exception) -> UserError:
    code = getattr(error, "errno", None)
    if code == errno.ENOENT or not os.path.exists(port):
        found = sorted(
            str(p) for pattern in ("ttyACM*", "ttyUSB*", "serial/by-id/*") for p in Path("/dev").glob(pattern)
        )
        listed = f"Ports found: {', '.join(found)}." if found else "No serial ports were found."
        return UserError(f"serial port '{port}' does not exist. {listed} Plug the robot in or set robot.port=/dev/...")
    if code in (errno.EACCES, errno.EPERM):
        return UserError(f"no permission to open serial port {port}. Add yourself to the group that owns it (dialout).")
    if code in (errno.EBUSY, errno.EAGAIN, errno.EWOULDBLOCK):
        return UserError(f"serial port {port} is in use by another program. Stop that program, then try again.")
    return UserError(f"serial port {port} cannot be opened: {error}")
