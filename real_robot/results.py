"""Results of a deployment on disk: results.jsonl (one durable line per sentence), trajectories, deploy.json."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Request:
    """One sentence to execute.

    Attributes:
        index: its number. sentence: as said. seed: of the virtual table's layout.
        variant: the job it really asks for, judged by the emulator; "" = what the sentence gate understands.
        realtime: wall-clock time instead of lock step.
    """

    index: int
    sentence: str
    seed: int
    variant: str = ""
    realtime: bool = False


def key_of(request: Request) -> tuple[Any, ...]:
    """What makes two requests the same."""
    return (request.index, request.sentence, request.seed, request.realtime)


class ResultBook:
    """The rows of one output folder. Rows of other policies or settings are dropped when the first new one comes."""

    def __init__(self, out: Path, identity: str) -> None:
        self.out, self.identity = out, identity
        self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.total, self._clean = 0, False

    def load(self, requests: Sequence[Request]) -> set[tuple[Any, ...]]:
        """Keys of the requests that are done already. Changes nothing on disk."""
        self.total = len(requests)
        wanted = {key_of(r) for r in requests}
        try:
            lines = (self.out / "results.jsonl").read_text().splitlines()
        except FileNotFoundError:
            lines = []
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # a line cut off by kill -9
                continue
            key = tuple(row.get(k) for k in ("index", "sentence", "seed", "realtime"))
            if row.get("identity") == self.identity and key in wanted:
                self.rows[key] = row
        return set(self.rows)

    def add(self, request: Request, row: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Store the trajectory, then the row."""
        row["identity"] = self.identity
        if arrays:
            row["trajectory"] = f"trajectories/{request.index:04d}{'-realtime' if request.realtime else ''}.npz"
            _save_arrays(self.out / row["trajectory"], arrays)
        self._start_clean()
        self.rows[key_of(request)] = row
        _append(self.out / "results.jsonl", row)
        success = sum(bool(r["success"]) for r in self.rows.values()) / len(self.rows)
        progress = {"stage": "deploy", "step": len(self.rows), "total": self.total, "success": success}
        _append(self.out / "metrics.jsonl", {**progress, "time": time.time()})

    def _start_clean(self) -> None:
        if not self._clean:
            self.out.mkdir(parents=True, exist_ok=True)
            _replace(self.out / "results.jsonl", "".join(json.dumps(r) + "\n" for r in self.rows.values()))
            (self.out / "deploy.json").unlink(missing_ok=True)
            self._clean = True

    def finish(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """The rows there are, in the order of the requests; writes deploy.json if none is missing."""
        rows = [self.rows[key_of(r)] for r in requests if key_of(r) in self.rows]
        if len(rows) == len(requests):
            _replace(self.out / "deploy.json", json.dumps(summarise(rows), indent=1) + "\n")
        return rows


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts over rows: sentences, successes, refusals, violations, faults; lateness of the real-time ones (us)."""
    late = [r["lateness_us"] for r in rows if r["realtime"] and r["lateness_us"]]
    return {
        "sentences": len(rows),
        "successes": sum(bool(r["success"]) for r in rows),
        "refused": sum(bool(r["refused"]) for r in rows),
        "violations": sum(r["violations"] for r in rows),
        "faults": sum(str(r["ended"]).startswith("fault") for r in rows),
        "lateness_us": {"p50": float(np.median([x["p50"] for x in late])), "p99": max(x["p99"] for x in late)}
        if late
        else {},
        "wall_s": round(sum(r["wall_s"] for r in rows), 3),
    }


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _save_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp.npz")
    np.savez_compressed(temporary, **arrays)  # type: ignore[arg-type]
    os.replace(temporary, path)
