"""Replay on disk: append-only chunks, so that a checkpoint writes what is new and not a million transitions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from control.checkpoint import fsync, sha256
from control.replay import Replay
from sims.errors import UserError

_ADVICE = "Restore it from a copy, or delete {} to start this run again."


class ReplayStore:
    """The chunks of one replay in a folder.

    A chunk holds consecutive time steps, is written once, and is deleted only after a checkpoint that does not name it
    is complete: whatever a process is killed at, the last checkpoint finds its chunks. The newest time step stays in
    the checkpoint itself, because a bad successor may still cut it (see ``Replay.add``).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.chunks: list[dict[str, Any]] = []  # file, sha256, start, end: absolute time steps, oldest first

    def save(self, replay: Replay) -> dict[str, Any]:
        """Write the new time steps; returns what a checkpoint must hold."""
        oldest, newest = replay.total - replay.filled, replay.total - 1
        start = max(self.chunks[-1]["end"] if self.chunks else 0, oldest)
        if start < newest:
            self._write(replay, start, newest)
        self.chunks = [c for c in self.chunks if c["end"] > oldest]
        tail = replay.slice(newest, replay.total) if replay.filled else torch.empty(0)
        return {"total": replay.total, "filled": replay.filled, "excluded": replay.excluded, "tail": tail,
                "chunks": list(self.chunks)}  # fmt: skip

    def _write(self, replay: Replay, start: int, end: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{start:012d}-{end:012d}.safetensors"
        fresh = file.with_suffix(".new")
        save_file({"rows": replay.slice(start, end).cpu().contiguous()}, fresh)
        fsync(fresh)
        os.replace(fresh, file)
        fsync(self.folder)
        self.chunks.append({"file": file.name, "sha256": sha256(file), "start": start, "end": end})

    def load(self, state: Mapping[str, Any], replay: Replay) -> None:
        """Fill an empty replay.

        Raises:
            UserError: a chunk is missing or differs from its checksum, named.
        """
        self.chunks = [dict(c) for c in state["chunks"]]
        parts, oldest = [], state["total"] - state["filled"]
        for chunk in self.chunks:
            rows = self._read(chunk)
            parts.append(rows[max(0, oldest - chunk["start"]) :])
        if state["filled"]:
            parts.append(state["tail"])
            replay.fill(torch.cat(parts), state["total"])
        replay.excluded = state["excluded"]

    def _read(self, chunk: Mapping[str, Any]) -> torch.Tensor:
        file = self.folder / chunk["file"]
        if not file.is_file():
            raise UserError(f"the checkpoint names {file}, which is missing. {_ADVICE.format(self.folder.parent)}")
        if sha256(file) != chunk["sha256"]:
            raise UserError(f"{file} is damaged: its checksum differs. {_ADVICE.format(self.folder.parent)}")
        return load_file(file)["rows"]

    def collect_garbage(self) -> None:
        """Delete what the checkpoint that was just completed does not name."""
        named = {c["file"] for c in self.chunks}
        for file in self.folder.glob("*") if self.folder.is_dir() else ():
            if file.name not in named:
                file.unlink()
