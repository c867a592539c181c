"""Frames and registers of Feetech STS/SMS serial-bus servos (protocol 0, little endian).

Instruction ``FF FF ID LEN INS P.. CHK`` and status ``FF FF ID LEN ERR P.. CHK`` with LEN = number of P + 2 and
CHK = ~(ID + LEN + INS/ERR + P..) & 0xFF. Source: Feetech memory table of the STS3215 and the vendor's
`feetech-servo-sdk` 1.0.0, against which the tests check every byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PING, READ, WRITE, REG_WRITE, ACTION, SYNC_READ, SYNC_WRITE = 0x01, 0x02, 0x03, 0x04, 0x05, 0x82, 0x83
WRITING = (WRITE, REG_WRITE, ACTION, SYNC_WRITE)  # instructions that change something in a motor
BROADCAST = 0xFE
MAX_ID = 0xFD

# register: (address, bytes)
MODEL_NUMBER = (3, 2)
ID = (5, 1)
STATUS_LEVEL = (8, 1)
MIN_POSITION = (9, 2)
MAX_POSITION = (11, 2)
EEPROM_END = 40  # addresses below are EEPROM
TORQUE_ENABLE = (40, 1)
ACCELERATION = (41, 1)
GOAL_POSITION = (42, 2)
GOAL_TIME = (44, 2)
GOAL_VELOCITY = (46, 2)
TORQUE_LIMIT = (48, 2)
LOCK = (55, 1)
PRESENT_POSITION = (56, 2)
PRESENT_VELOCITY = (58, 2)
PRESENT_LOAD = (60, 2)
PRESENT_VOLTAGE = (62, 1)
PRESENT_TEMPERATURE = (63, 1)
HARDWARE_STATUS = (65, 1)
MOVING = (66, 1)
TABLE_SIZE = 71

ERROR_BITS = {0x01: "voltage", 0x02: "angle sensor", 0x04: "over-temperature", 0x08: "over-current", 0x20: "overload"}


@dataclass(frozen=True)
class Status:
    """One valid answer: motor id, error byte, parameters."""

    id: int
    error: int
    params: bytes


def checksum(body: bytes | bytearray) -> int:
    """Inverted sum of everything between the header and the checksum."""
    return ~sum(body) & 0xFF


def frame(motor: int, instruction: int, params: Iterable[int] = ()) -> bytes:
    """A complete instruction (or, with an error byte for the instruction, status) frame."""
    data = bytes(params)
    body = bytes((motor, len(data) + 2, instruction)) + data
    return b"\xff\xff" + body + bytes((checksum(body),))


def read_frame(motor: int, address: int, size: int) -> bytes:
    return frame(motor, READ, (address, size))


def write_frame(motor: int, address: int, data: bytes) -> bytes:
    return frame(motor, WRITE, bytes((address,)) + data)


def sync_read_frame(motors: Sequence[int], address: int, size: int) -> bytes:
    return frame(BROADCAST, SYNC_READ, (address, size, *motors))


def sync_write_frame(values: dict[int, bytes], address: int) -> bytes:
    """Write the same registers of several motors at once; motors do not answer."""
    size = len(next(iter(values.values())))
    return frame(BROADCAST, SYNC_WRITE, bytes((address, size)) + b"".join(bytes((i,)) + v for i, v in values.items()))


def word(value: int) -> bytes:
    """Two bytes, low first."""
    return bytes((value & 0xFF, (value >> 8) & 0xFF))


def signed(value: int, sign_bit: int = 15) -> int:
    """Feetech sign-magnitude: bit ``sign_bit`` is the sign, the bits below are the magnitude."""
    magnitude = value & ((1 << sign_bit) - 1)
    return -magnitude if value >> sign_bit & 1 else magnitude


def unsigned(value: int, sign_bit: int = 15) -> int:
    """Inverse of :func:`signed`; magnitudes that do not fit are saturated."""
    magnitude = min(abs(value), (1 << sign_bit) - 1)
    return magnitude | (1 << sign_bit) if value < 0 else magnitude


def describe_error(error: int) -> str:
    """Names of the bits set in an error byte, ``""`` if none."""
    names = [name for bit, name in ERROR_BITS.items() if error & bit]
    rest = error & ~sum(ERROR_BITS)
    return ", ".join(names + ([f"unknown bits 0x{rest:02x}"] if rest else []))


class Parser:
    """Cuts a byte stream into valid frames; skips stray bytes, counts what it threw away.

    Works for both directions: the byte after LEN is the instruction or the error byte. A header inside a broken frame
    is found again because only one byte is dropped at a time.
    """

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.stray_bytes = 0
        self.bad_checksums = 0

    def clear(self) -> None:
        self.buffer.clear()

    def feed(self, data: bytes) -> list[Status]:
        """Add bytes; return every complete valid frame as (id, instruction or error byte, params)."""
        self.buffer += data
        found: list[Status] = []
        while (frame_ := self._next()) is not None:
            found.append(frame_)
        return found

    def _next(self) -> Status | None:
        while len(self.buffer) >= 4:
            length = self.buffer[3]
            if self.buffer[:2] != b"\xff\xff" or self.buffer[2] == 0xFF or not 2 <= length <= 250:
                self._drop()
                continue
            end = length + 4
            if len(self.buffer) < end:
                return None
            if self.buffer[end - 1] != checksum(self.buffer[2 : end - 1]):
                self.bad_checksums += 1
                self._drop()
                continue
            status = Status(self.buffer[2], self.buffer[4], bytes(self.buffer[5 : end - 1]))
            del self.buffer[:end]
            return status
        return None

    def _drop(self) -> None:
        del self.buffer[0]
        self.stray_bytes += 1
