"""Replay on disk: append-only chunks, so that a checkpoint writes what is new and not a million transitions."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from control.checkpoint import append_durably, fsync
from control.replay import Replay
from sims.errors import UserError

CHUNK_BYTES = 16 * 2**20  # a chunk is begun when the last one holds this much: few files, and early ones can be dropped


class ReplayStore:
    """The chunks of one replay in a folder.

    A chunk ``<first time step>.rows`` holds consecutive time steps as raw float32, (steps, B, W). It only ever grows,
    and what a checkpoint has named of it, so many steps with that checksum, is never written again; what follows was
    appended by a process that died before its checkpoint was complete, and is cut off. A chunk that the ring has passed
    is deleted when a checkpoint that does not name it is complete. So the last checkpoint always finds its rows.
    Written with ``write`` and mapped for reading: a full disk is an error of ``write``, but kills a process that writes
    to a mapping.
    """

    def __init__(self, folder: Path, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.folder, self.chunk_bytes = folder, chunk_bytes
        self.chunks: list[dict[str, Any]] = []  # start, steps, crc32: oldest first, without gaps

    def save(self, replay: Replay) -> dict[str, Any]:
        """Write the new time steps; returns what a checkpoint must hold."""
        oldest = replay.total - replay.filled
        self.chunks = [c for c in self.chunks if c["start"] + c["steps"] > oldest]
        at = max(self._end(), oldest)
        while at < replay.total:
            at = self._append(replay, at)
        shape = [replay.obs_dim, replay.act_dim, replay.num_envs]
        return {
            "total": replay.total,
            "filled": replay.filled,
            "shape": shape,
            "chunks": [dict(c) for c in self.chunks],
        }

    def _end(self) -> int:
        return self.chunks[-1]["start"] + self.chunks[-1]["steps"] if self.chunks else 0

    def _append(self, replay: Replay, start: int) -> int:
        """Write steps from ``start`` on into one chunk; returns the first step that is left."""
        size = replay.rows[0].nbytes
        room = max(1, self.chunk_bytes // size)  # time steps of a whole chunk
        old = self.chunks[-1] if self.chunks and self.chunks[-1]["steps"] < room else None
        chunk = dict(old or {"start": start, "steps": 0, "crc32": 0})
        end = min(replay.total, start + room - chunk["steps"])
        data = replay.slice(start, end).cpu().numpy().data  # its bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        append_durably(self._file(chunk), chunk["steps"] * size, data)
        chunk |= {"steps": chunk["steps"] + end - start, "crc32": zlib.crc32(data, chunk["crc32"])}
        if old:
            self.chunks[-1] = chunk
        else:
            fsync(self.folder)  # the name of a new file
            self.chunks.append(chunk)
        return end

    def load(self, state: Mapping[str, Any], replay: Replay) -> None:
        """Fill an empty replay.

        Raises:
            UserError: a chunk is missing or differs from its checksum, named; or rows of another shape.
        """
        shape = [replay.obs_dim, replay.act_dim, replay.num_envs]
        if state["shape"] != shape:
            raise UserError(
                f"the replay in {self.folder} has {state['shape']} features, actions and environments; not {shape}. "
                f"Finish it with the version that began it, or delete {self.folder.parent} to start again."
            )
        self.chunks = [dict(c) for c in state["chunks"]]
        replay.fill(self._read(replay), state["total"], state["filled"])

    def _read(self, replay: Replay) -> Iterator[tuple[int, Tensor]]:
        for chunk in self.chunks:
            file, shape = self._file(chunk), (chunk["steps"], *replay.rows.shape[1:])
            size = chunk["steps"] * replay.rows[0].nbytes
            if not file.is_file():
                raise UserError(f"the checkpoint names {file}, which is missing. {self._advice()}")
            if file.stat().st_size < size:
                raise UserError(f"{file} is damaged: {file.stat().st_size} bytes of {size}. {self._advice()}")
            rows = torch.from_file(str(file), shared=False, size=size // 4, dtype=torch.float32).view(shape)
            if zlib.crc32(rows.numpy().data) != chunk["crc32"]:
                raise UserError(f"{file} is damaged: its checksum differs. {self._advice()}")
            yield chunk["start"], rows

    def _advice(self) -> str:
        return f"Restore it from a copy, or delete {self.folder.parent} to start this run again."

    def _file(self, chunk: Mapping[str, Any]) -> Path:
        return self.folder / f"{chunk['start']:012d}.rows"

    def collect_garbage(self) -> None:
        """Delete what the checkpoint that was just completed does not name."""
        named = {self._file(c).name for c in self.chunks}
        for file in os.scandir(self.folder) if self.folder.is_dir() else ():
            if file.name not in named:
                os.unlink(file.path)
