"""JSON lines over a Unix socket: one request object per line, one answer object per line. No pickle, no NaN."""

from __future__ import annotations

import json
import os
import selectors
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_LINE = 4 << 20
Handler = Callable[[dict[str, Any]], dict[str, Any]]


def _encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"


class ChannelError(Exception):
    """The other side is gone, silent, or answered with an error."""


class ChannelServer:
    """Accepts connections on a selector that its owner runs; calls ``handle`` for every line."""

    def __init__(self, path: Path, selector: selectors.BaseSelector, handle: Handler) -> None:
        self.path, self.selector, self.handle = path, selector, handle
        self.buffers: dict[socket.socket, bytearray] = {}
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(path))
        os.chmod(path, 0o600)
        self.listener.listen(8)
        selector.register(self.listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        self.buffers[connection] = bytearray()
        self.selector.register(connection, selectors.EVENT_READ, lambda: self._serve(connection))

    def _serve(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 16)
        except OSError:
            data = b""
        buffer = self.buffers[connection]
        buffer += data
        if not data or len(buffer) > MAX_LINE:
            self._drop(connection)
            return
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            try:
                connection.sendall(self._answer(line))
            except OSError:
                self._drop(connection)
                return

    def _answer(self, line: bytes) -> bytes:
        try:
            return _encode(self.handle(json.loads(line)))
        except Exception as error:  # a bad request must not end the process that holds the physics
            return _encode({"error": f"{type(error).__name__}: {error}"})

    def _drop(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        self.buffers.pop(connection, None)
        connection.close()

    def close(self) -> None:
        for connection in list(self.buffers):
            self._drop(connection)
        self.listener.close()
        self.path.unlink(missing_ok=True)


class ChannelClient:
    """Blocking client. ``timeout_s`` bounds every request; after a timeout the connection is closed, never reused."""

    def __init__(self, path: str | Path, timeout_s: float = 5.0) -> None:
        self.path = str(path)
        self._buffer = bytearray()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(self.path)
        except OSError as error:
            self._socket.close()
            raise ChannelError(f"cannot connect to {self.path}: {error.strerror}") from None

    def request(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send ``{"op": op, ...}`` and return the answer; raises ChannelError."""
        line = _encode({"op": op, **fields})
        try:
            self._socket.sendall(line)
            answer = json.loads(self._line())
        except (OSError, ValueError) as error:
            self.close()
            raise ChannelError(f"{self.path}: no answer to '{op}' ({error})") from None
        if "error" in answer:
            raise ChannelError(f"{self.path}: '{op}' failed: {answer['error']}")
        return answer

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0:
            data = self._socket.recv(1 << 16)
            if not data:
                raise OSError("closed by the other side")
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def close(self) -> None:
        self._socket.close()
