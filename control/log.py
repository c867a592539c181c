"""A run's numbers three ways: ``metrics.jsonl`` (exact, what a resumed run goes on from), ``metrics.csv`` (for a
spreadsheet) and ``tensorboard/`` (event files). A resumed run drops what lies after its checkpoint from all of them."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MetricLog:
    """Rows with the keys that the pipeline shows: stage, step, total, steps_per_s, return, success, time.

    Args:
        path: ``metrics.jsonl``; the other two lie beside it.
        stage, total: what every row begins with.
        tensorboard: write event files, too; importing their writer takes about a second.
    """

    def __init__(self, path: Path, stage: str, total: int, tensorboard: bool = False) -> None:
        self.path, self.stage, self.total, self.tensorboard = path, stage, total, tensorboard
        self.csv, self.header, self._events = path.with_suffix(".csv"), list[str](), None
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Append one row; 0-d tensors become numbers here and nowhere else, non-finite numbers become null.

        Returns:
            The row as written.
        """
        full = {"stage": self.stage, "total": self.total, **{k: _plain(v) for k, v in row.items()}}
        with self.path.open("a") as stream:
            stream.write(json.dumps(full) + "\n")
        self._write_csv(full)
        if self.tensorboard:
            self._write_events(full)
        return full

    def truncate_after(self, step: int) -> None:
        """Keep the rows up to ``step``; a torn last line is dropped."""
        rows = [row for row in read_rows(self.path) if row.get("step", 0) <= step]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in rows))
        self._rewrite_csv(rows)
        if self.tensorboard:
            self._open_events(step)

    def close(self) -> None:
        """Flush the event files."""
        if self._events is not None:
            self._events.close()

    def _write_csv(self, row: Mapping[str, Any]) -> None:
        """Append, or write the file anew when the row has a column that the header has not."""
        if not self.header or not row.keys() <= set(self.header):
            self._rewrite_csv(read_rows(self.path))
            return
        with self.csv.open("a") as stream:
            stream.write(_csv_lines(self.header, [row]))

    def _rewrite_csv(self, rows: list[dict[str, Any]]) -> None:
        self.header = list(dict.fromkeys(key for row in rows for key in row))
        title = _csv_lines(self.header, [dict(zip(self.header, self.header))]) if self.header else ""
        write_text(self.csv, title + _csv_lines(self.header, rows))

    def _open_events(self, step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        # rows of a run that was killed after its checkpoint are hidden, not deleted: that is how the format resumes
        self._events = SummaryWriter(str(self.path.parent / "tensorboard"), purge_step=step + 1 if step else None)

    def _write_events(self, row: Mapping[str, Any]) -> None:
        if self._events is None:
            self._open_events(0)
        assert self._events is not None
        for key, value in row.items():
            if isinstance(value, (int, float)) and key not in ("step", "total"):
                self._events.add_scalar(key, value, row.get("step", 0))
        self._events.flush()


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


def _csv_lines(header: list[str], rows: list[Any]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, header, restval="", lineterminator="\n")
    writer.writerows(rows)
    return stream.getvalue()


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
