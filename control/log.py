"""``metrics.jsonl``: one JSON object per line, appended; a resumed run drops the rows after its checkpoint."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MetricLog:
    """Rows with the keys that the pipeline shows: stage, step, total, steps_per_s, return, success, time."""

    def __init__(self, path: Path, stage: str, total: int) -> None:
        self.path, self.stage, self.total = path, stage, total
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row; 0-d tensors become numbers here and nowhere else, non-finite numbers become null."""
        full = {"stage": self.stage, "total": self.total, **{k: _plain(v) for k, v in row.items()}}
        with self.path.open("a") as stream:
            stream.write(json.dumps(full) + "\n")

    def truncate_after(self, step: int) -> None:
        """Keep the rows up to ``step``; a torn last line is dropped."""
        rows = [row for row in read_rows(self.path) if row.get("step", 0) <= step]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in rows))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics file, empty when there is none; lines that are not JSON are skipped."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:  # the line that was being written when the run was killed
            continue
    return rows


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
