"""A run's numbers three ways: ``metrics.jsonl`` (exact, what a resumed run goes on from), ``metrics.csv`` (for a
spreadsheet) and ``tensorboard/`` (event files). A resumed run drops what lies after its checkpoint from all of them."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MetricLog:
    """Rows with the keys that the pipeline shows: stage, step, total, steps_per_s, return, success, time.

    Args:
        path: ``metrics.jsonl``; the other two lie beside it.
        stage, total: what every row begins with.
        tensorboard: write event files, too.
    """

    def __init__(self, path: Path, stage: str, total: int, tensorboard: bool = False) -> None:
        self.path, self.stage, self.total, self.tensorboard = path, stage, total, tensorboard
        self.csv, self.header = path.with_suffix(".csv"), list[str]()
        self._events: EventFile | None = None
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
            scalars = {k: v for k, v in full.items() if isinstance(v, (int, float)) and k not in ("step", "total")}
            self._event_file().add(full.get("step", 0), scalars)
        return full

    def truncate_after(self, step: int) -> None:
        """Keep the rows up to ``step``; a torn last line is dropped."""
        rows = [row for row in read_rows(self.path) if row.get("step", 0) <= step]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in rows))
        self._rewrite_csv(rows)
        if self.tensorboard and (self.path.parent / "tensorboard").exists():
            self._event_file().hide_after(step)

    def close(self) -> None:
        """Close the event file."""
        if self._events is not None:
            self._events.close()
            self._events = None

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

    def _event_file(self) -> EventFile:
        if self._events is None:
            self._events = EventFile(self.path.parent / "tensorboard")
        return self._events


class EventFile:
    """Scalars for TensorBoard, one record a row.

    The records are TensorBoard's own, written to a plain file: ``torch.utils.tensorboard`` would import TensorFlow
    where that is installed, and writes a record for each number from a thread of its own.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._format = event_pb2
        # readers go through the files of a folder in the order of their names
        name = f"events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}"
        self._file = RecordWriter((folder / name).open("xb"))
        self._write(file_version="brain.Event:2")

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write a row."""
        summary = self._format.Event(step=step).summary
        for tag, value in values.items():
            summary.value.add(tag=tag, simple_value=value)
        self._write(step=step, summary=summary)

    def hide_after(self, step: int) -> None:
        """Readers forget what earlier files hold after ``step``: so the format resumes."""
        log = self._format.SessionLog(status=self._format.SessionLog.START)
        self._write(step=step + 1, session_log=log)

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._file.write(self._format.Event(wall_time=time.time(), **fields).SerializeToString())
        self._file.flush()


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
