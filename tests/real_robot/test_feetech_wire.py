"""Frames against bytes worked out by hand, and the parser against broken streams."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from real_robot.drivers import feetech_wire as wire


@pytest.mark.parametrize(
    ("made", "golden"),
    [
        # 1 + 2 + 1 = 4 -> ~4 = FB
        (wire.frame(1, wire.PING), "ff ff 01 02 01 fb"),
        # 1 + 4 + 2 + 38 + 2 = 41h -> BE
        (wire.read_frame(1, 56, 2), "ff ff 01 04 02 38 02 be"),
        # 1 + 5 + 3 + 2a + 00 + 08 = 3b -> C4; 2048 = 0800h, low byte first
        (wire.write_frame(1, 42, wire.word(2048)), "ff ff 01 05 03 2a 00 08 c4"),
        # fe + 06 + 82 + 38 + 04 + 01 + 02 = 1c5h -> ~c5 = 3A
        (wire.sync_read_frame([1, 2], 56, 4), "ff ff fe 06 82 38 04 01 02 3a"),
        # 1000 = 03e8h; fe+0a+83+2a+02 + 01+00+08 + 02+e8+03 = 2adh -> ~ad = 52
        (wire.sync_write_frame({1: wire.word(2048), 2: wire.word(1000)}, 42),
         "ff ff fe 0a 83 2a 02 01 00 08 02 e8 03 52"),
    ],
)  # fmt: skip
def test_golden_bytes(made: bytes, golden: str) -> None:
    assert made.hex(" ") == golden


def test_sign_magnitude_by_hand() -> None:
    """-5 = bit 15 + 5 = 8005h; it is not two's complement."""
    assert wire.unsigned(-5) == 0x8005
    assert wire.signed(0x8005) == -5
    assert wire.signed(0x0005) == 5
    assert wire.signed(0x0405, sign_bit=10) == -5


def test_error_byte_in_words() -> None:
    assert wire.describe_error(0) == ""
    assert wire.describe_error(0x24) == "over-temperature, overload"
    assert wire.describe_error(0x40) == "unknown bits 0x40"


GOOD = wire.frame(3, 0, [0x12, 0x34])


@pytest.mark.parametrize("noise", [b"\x00", b"\xff", b"\xff\xff", b"\xff\xff\x03", b"\x01\xff\xff\x05\x02"])
def test_resync_after_stray_bytes(noise: bytes) -> None:
    parser = wire.Parser()
    found = parser.feed(noise + GOOD + GOOD)
    assert wire.Status(3, 0, b"\x12\x34") in found
    assert parser.stray_bytes > 0


def test_a_flipped_bit_is_never_accepted() -> None:
    """Every single-bit error in id, length, error, parameters or checksum."""
    for position in range(2, len(GOOD)):
        for bit in range(8):
            bad = bytearray(GOOD)
            bad[position] ^= 1 << bit
            assert wire.Parser().feed(bytes(bad)) == [], (position, bit)


def test_bytes_may_arrive_one_at_a_time() -> None:
    parser = wire.Parser()
    found = [s for byte in GOOD + GOOD for s in parser.feed(bytes([byte]))]
    assert len(found) == 2
    assert parser.stray_bytes == 0


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 253), st.binary(max_size=20))
def test_parser_survives_anything_and_only_returns_valid_frames(noise: bytes, motor: int, params: bytes) -> None:
    parser = wire.Parser()
    parser.feed(noise)
    parser.feed(b"\x00" * 256)  # flush whatever header the noise ended in
    assert parser.feed(wire.frame(motor, 0, params)) == [wire.Status(motor, 0, params)]


def test_many_mutated_frames() -> None:
    """A frame is accepted only if its bytes form a valid one: re-encoding gives bytes that were in the stream."""
    rng = random.Random(0)
    for _ in range(5000):
        data = bytearray(GOOD * 3)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        for status in wire.Parser().feed(bytes(data)):
            assert wire.frame(status.id, status.error, status.params) in bytes(data)
