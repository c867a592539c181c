"""Start an emulator as its own process and talk to it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from real_robot.clock import Clock, LockstepClock, MonotonicClock
from real_robot.emulators.channel import ChannelClient, ChannelError
from sims.errors import UserError

EMULATORS = {"feetech": "real_robot.emulators.feetech"}
START_S = 60.0


class EmulatorProcess:
    """A running emulator. Use as a context manager; it ends with its parent even after kill -9.

    Attributes:
        port: pseudo-terminal for the driver. control: the control channel. pid: of the process.
    """

    def __init__(
        self,
        robot: str,
        emulator: str = "feetech",
        world: str = "tabletop",
        lockstep: bool = True,
        faults: list[dict[str, Any]] | None = None,
    ) -> None:
        self.lockstep = lockstep
        self._folder = Path(tempfile.mkdtemp(prefix="robot-"))
        self.socket = self._folder / "control.sock"
        command = [sys.executable, "-m", EMULATORS[emulator], "--robot", robot, "--world", world, "--parent-pipe"]
        command += ["--socket", str(self.socket), "--faults", json.dumps(faults or [])]
        command += ["--lockstep"] if lockstep else []
        root = str(Path(__file__).resolve().parents[2])
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=env)
        self.pid = self._process.pid
        try:
            self.port: str = self._ready()["port"]
            self.control = ChannelClient(self.socket, timeout_s=30.0)
        except BaseException:
            self.close()
            raise

    def _ready(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if select.select([self._process.stdout], [], [], START_S)[0]:
            line = self._process.stdout.readline()
            if line:
                return json.loads(line)
            message = self._process.stderr.read().decode(errors="replace").strip()
            raise UserError(f"the emulator ended at start: {message.removeprefix('error: ') or 'no message'}")
        raise UserError(f"the emulator was not ready within {START_S:.0f} s.")

    def clock(self, sent_bytes: Callable[[], int]) -> Clock:
        """The clock for a host of this emulator.

        Args:
            sent_bytes: bytes the host's bus has sent so far; call :meth:`clock` before the bus sends anything.
        """
        if not self.lockstep:
            return MonotonicClock()
        stats = self.control.request("stats")
        base = stats["rx_bytes"] - sent_bytes()

        def tick(ns: int) -> int:
            return self.control.request("tick", ns=ns, after_bytes=base + sent_bytes())["now_ns"]

        return LockstepClock(tick, stats["now_ns"])

    def close(self) -> None:
        """Ask it to end, then make it; idempotent."""
        if hasattr(self, "control"):
            with contextlib.suppress(ChannelError):
                self.control.request("quit")
            self.control.close()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream:
                stream.close()
        deadline = time.monotonic() + 3
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> EmulatorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
