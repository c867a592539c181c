"""Emergency stop from the keyboard: space, escape or q in the terminal."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator

STOP_KEYS = (b" ", b"\x1b", b"q")


@contextlib.contextmanager
def stop_key(stop: Callable[[str], None], descriptor: int | None = None) -> Iterator[bool]:
    """Call ``stop(reason)`` when a stop key is pressed while the body runs. Yields whether keys are read at all.

    Args:
        descriptor: terminal to read, default standard input; anything that is no terminal is left alone.
    """
    fd = _terminal(descriptor)
    if fd is None:
        yield False
        return
    settings = termios.tcgetattr(fd)
    wake_read, wake_write = os.pipe()

    def listen() -> None:
        while wake_read not in (ready := select.select([fd, wake_read], [], [])[0]):
            if fd in ready and os.read(fd, 1) in STOP_KEYS:
                stop("emergency stop key")

    thread = threading.Thread(target=listen, name="stop-key", daemon=True)
    tty.setcbreak(fd)  # keys arrive without Enter; Ctrl-C still raises SIGINT
    thread.start()
    try:
        yield True
    finally:
        os.write(wake_write, b"x")
        thread.join(timeout=1)
        termios.tcsetattr(fd, termios.TCSADRAIN, settings)
        os.close(wake_read)
        os.close(wake_write)


def _terminal(descriptor: int | None) -> int | None:
    try:
        fd = sys.stdin.fileno() if descriptor is None else descriptor
        return fd if os.isatty(fd) else None
    except (OSError, ValueError, AttributeError):
        return None
