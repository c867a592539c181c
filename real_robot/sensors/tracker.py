"""An object tracker reached over a Unix socket: fills the observation group `objects`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from real_robot.emulators.channel import ChannelClient, ChannelError
from real_robot.types import SensorReading
from sims.errors import UserError

OBJECTS = 25


class SocketTracker:
    """Asks for the newest measurement; the answer carries the tracker's own monotonic stamp.

    Args:
        path: Unix socket of the tracker. timeout_s: longest wait for an answer.
    """

    def __init__(self, path: str | Path, timeout_s: float = 1.0) -> None:
        self.path, self.timeout_s = path, timeout_s
        self._client: ChannelClient | None = None

    def connect(self) -> None:
        """Raises UserError if nothing listens there."""
        try:
            self._client = ChannelClient(self.path, self.timeout_s)
        except ChannelError as error:
            raise UserError(f"object tracker: {error}. Start the tracker, or give its socket.") from None

    def read(self) -> SensorReading:
        """Newest reading. Raises ChannelError if the tracker is gone or its values are unusable."""
        if self._client is None:
            raise ChannelError("the tracker is not connected")
        answer = self._client.request("objects")
        values = np.asarray(answer["objects"], dtype=np.float32)
        if values.shape != (OBJECTS,) or not np.isfinite(values).all():
            raise ChannelError(f"{self.path}: expected {OBJECTS} finite numbers, found shape {values.shape}")
        return SensorReading(int(answer["stamp_ns"]), {"objects": values})

    def disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
