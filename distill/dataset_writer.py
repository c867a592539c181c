"""Write a LeRobot v3.0 dataset so that a kill -9 loses at most the episode being written.

Every episode is committed alone: written to a temporary file in ``.staging``, then renamed. :meth:`finalize` folds the
staged episodes into ``data/`` and ``meta/`` and writes the counts in ``info.json`` last, so that a reader sees either
the old dataset or the new one. Opening a writer again resumes after the last committed episode.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from distill.dataset import (
    CODEBASE_VERSION,
    DATA_PATH,
    EPISODES_PATH,
    INFO,
    MANDATORY,
    NUMERIC,
    QUANTILES,
    STAGING,
    STATS,
    TASKS,
    Dataset,
    Episode,
    Feature,
    from_arrow,
    read_parquet,
    read_tasks,
    to_arrow,  # fmt: skip
)
from sims.errors import UserError

CHUNKS_SIZE = 1000  # files per chunk folder
DATA_FILE_MB = 100  # a new data file starts near this size
PANDAS_TASKS = {
    "index_columns": ["task"],
    "column_indexes": [],
    "columns": [
        {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64",
         "metadata": None},
        {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object", "metadata": None},
    ],
    "creator": {"library": "pyarrow", "version": pa.__version__},
    "pandas_version": "2.2.0",
}  # fmt: skip


class DatasetWriter:
    """Adds episodes to the dataset at ``root``; creates it, or resumes it when the columns agree.

    Args:
        root: dataset directory.
        features: column -> Feature, without the five mandatory columns.
        fps: frames per second; timestamps are ``frame_index / fps`` exactly.
        robot_type: free text for ``info.json``.
        meta: further keys for ``info.json`` (LeRobot ignores unknown keys).
    """

    def __init__(self, root: str | Path, features: Mapping[str, Feature], fps: float, robot_type: str,
                 meta: Mapping[str, Any] | None = None):  # fmt: skip
        self.root, self.fps, self.robot_type, self.meta = Path(root), fps, robot_type, dict(meta or {})
        self.features = {**features, **MANDATORY}
        _check_features(features, fps)
        self.staging = self.root / STAGING
        self.staging.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.root / ".lock")
        self._base: Dataset | None = self._open_base()
        self.tasks: list[str] = read_tasks(self.root)[: self._base.info["total_tasks"]] if self._base else []
        self.extras: list[dict[str, Any]] = [dict(r) for r in self._base.rows] if self._base else []
        self.num_frames = self._base.num_frames if self._base else 0
        self._resume_staged()

    @property
    def num_episodes(self) -> int:
        return len(self.extras)

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.finalize()
        self.close()

    def close(self) -> None:
        """Give up the lock; staged episodes stay and are resumed by the next writer."""
        self._lock.close()

    def _open_base(self) -> Dataset | None:
        if not (self.root / INFO).exists():
            return None
        base = Dataset(self.root)
        _same_columns(self.root, base.features, self.features)
        if base.fps != self.fps:
            raise UserError(f"{self.root}: has {base.fps} frames/s, cannot add episodes at {self.fps}.")
        return base

    def _resume_staged(self) -> None:
        for leftover in self.staging.glob("*.tmp"):
            leftover.unlink()
        for path in sorted(self.staging.glob("episode-*.parquet")):
            index = int(path.stem.split("-")[1])
            if index < self.num_episodes:
                path.unlink()  # already folded in: the writer died between the counts and the clean-up
            elif index > self.num_episodes:
                raise UserError(f"{path}: episode {self.num_episodes} is missing before it. Delete it to go on.")
            else:
                self._register(*_staged_head(path, self.features))

    def _register(self, head: Mapping[str, Any], length: int) -> None:
        if head["task"] not in self.tasks:
            self.tasks.append(head["task"])
        self.extras.append({**head["extra"], "length": length})
        self.num_frames += length

    def add_episode(self, episode: Episode) -> int:
        """Commit one episode atomically; returns its index. UserError when columns, shapes or values do not fit."""
        _check_episode(episode, self.features)
        index, length = self.num_episodes, episode.length
        task_index = self.tasks.index(episode.task) if episode.task in self.tasks else len(self.tasks)
        frames = np.arange(length, dtype=np.int64)
        data = {
            **episode.data,
            "timestamp": (frames / self.fps).astype(np.float32),
            "frame_index": frames,
            "episode_index": np.full(length, index, np.int64),
            "index": frames + self.num_frames,
            "task_index": np.full(length, task_index, np.int64),
        }
        head = {"task": episode.task, "extra": {k: _plain(v) for k, v in episode.extra.items()}}
        columns = {k: to_arrow(np.asarray(data[k]).astype(_storage(f)), f) for k, f in self.features.items()}
        table = pa.table(columns).replace_schema_metadata({"episode": json.dumps(head)})
        _write_table(self.staging / f"episode-{index:06d}.parquet", [table])
        self._register(head, length)
        return index

    def finalize(self) -> None:
        """Fold staged episodes into ``data/`` and ``meta/``; counts last. Safe to repeat after a crash at any point."""
        staged = sorted(self.staging.glob("episode-*.parquet"))
        if not staged and self._base is not None:
            return
        if not staged:
            raise UserError(f"{self.root}: no episode to write; a dataset needs at least one.")
        self._remove_orphans()
        data_files = _group_by_size(staged, DATA_FILE_MB * 1e6)
        first = self._next_file(DATA_PATH)
        rows: list[dict[str, Any]] = []
        for number, group in enumerate(data_files, start=first):
            tables = [read_parquet(path) for path in group]
            place = _place(number)
            _write_table(self.root / DATA_PATH.format(**place), [t.replace_schema_metadata(None) for t in tables])
            rows += [self._episode_row(path, table, place) for path, table in zip(group, tables)]
        place = _place(self._next_file(EPISODES_PATH))
        for row in rows:
            row |= {"meta/episodes/chunk_index": place["chunk_index"], "meta/episodes/file_index": place["file_index"]}
        _write_table(self.root / EPISODES_PATH.format(**place), [pa.Table.from_pylist(rows)])
        self._write_tasks()
        self._write_stats()
        _write_json(self.root / INFO, self._info())
        for path in staged:
            path.unlink()
        self._base = Dataset(self.root)

    def _next_file(self, pattern: str) -> int:
        if self._base is None:
            return 0
        prefix = "data" if pattern == DATA_PATH else "meta/episodes"
        return max(r[f"{prefix}/chunk_index"] * CHUNKS_SIZE + r[f"{prefix}/file_index"] for r in self._base.rows) + 1

    def _remove_orphans(self) -> None:
        """Files of an earlier finalize that died before it wrote the counts."""
        for folder, pattern in (("data", DATA_PATH), ("meta/episodes", EPISODES_PATH)):
            kept = {self.root / pattern.format(**_place(i)) for i in range(self._next_file(pattern))}
            for path in (self.root / folder).glob("chunk-*/*"):
                if path not in kept:
                    path.unlink()

    def _episode_row(self, path: Path, table: pa.Table, place: Mapping[str, int]) -> dict[str, Any]:
        head, length = _staged_head(path, self.features)
        start = table["index"][0].as_py()
        row = {"episode_index": table["episode_index"][0].as_py(), "tasks": [head["task"]], "length": length,
               "data/chunk_index": place["chunk_index"], "data/file_index": place["file_index"],
               "dataset_from_index": start, "dataset_to_index": start + length, **head["extra"]}  # fmt: skip
        for name, feature in self.features.items():
            for key, value in feature_stats(from_arrow(table[name], feature), feature).items():
                row[f"stats/{name}/{key}"] = value
        return row

    def _write_tasks(self) -> None:
        table = pa.table({"task_index": pa.array(range(len(self.tasks)), pa.int64()), "task": pa.array(self.tasks)})
        table = table.replace_schema_metadata({"pandas": json.dumps(PANDAS_TASKS)})
        _write_table(self.root / TASKS, [table])

    def _write_stats(self) -> None:
        files = sorted((self.root / "data").glob("chunk-*/file-*.parquet"))
        stats: dict[str, Any] = {}
        for name, feature in self.features.items():
            column = pa.concat_tables([read_parquet(path, [name]) for path in files])[name]
            stats[name] = feature_stats(from_arrow(column, feature), feature)
        _write_json(self.root / STATS, stats)

    def _info(self) -> dict[str, Any]:
        total = self.num_episodes
        return {**self.meta, "codebase_version": CODEBASE_VERSION, "robot_type": self.robot_type, "fps": self.fps,
                "total_episodes": total, "total_frames": self.num_frames, "total_tasks": len(self.tasks),
                "chunks_size": CHUNKS_SIZE, "data_files_size_in_mb": DATA_FILE_MB, "video_files_size_in_mb": 200,
                "data_path": DATA_PATH, "video_path": None, "splits": {"train": f"0:{total}"},
                "features": {k: f.to_json() for k, f in self.features.items()}}  # fmt: skip


def feature_stats(values: np.ndarray, feature: Feature) -> dict[str, Any]:
    """Exact statistics of one column: nested lists as LeRobot shapes them; images per channel (3, 1, 1) in [0, 1]."""
    if feature.dtype == "image":
        flat = values.reshape(-1, values.shape[-1]).astype(np.float64) / 255.0  # (T*H*W, 3)
    else:
        flat = values.reshape(len(values), -1).astype(np.float64)  # (T, n)
    flat.sort(axis=0)
    result = {"min": flat[0], "max": flat[-1], "mean": flat.mean(0), "std": flat.std(0)}
    for name, share in QUANTILES.items():  # linear interpolation, as numpy.quantile does, with one sort for all
        at = share * (len(flat) - 1)
        low, high = flat[int(at)], flat[min(int(at) + 1, len(flat) - 1)]
        result[name] = low + (high - low) * (at - int(at))
    shape = (-1, 1, 1) if feature.dtype == "image" else (-1,)
    return {"count": [len(values)], **{k: v.reshape(shape).tolist() for k, v in result.items()}}


def _check_features(features: Mapping[str, Feature], fps: float) -> None:
    if not fps > 0:
        raise UserError(f"fps must be positive, found {fps}.")
    for name, feature in features.items():
        if "/" in name or name in MANDATORY:
            raise UserError(f"column '{name}' is not allowed: '/' and the names {sorted(MANDATORY)} are reserved.")
        if feature.dtype not in (*NUMERIC, "image"):
            raise UserError(f"column '{name}': dtype '{feature.dtype}' is not one of {(*NUMERIC, 'image')}.")
        if len(feature.shape) != (3 if feature.dtype == "image" else 1):
            raise UserError(f"column '{name}': shape {feature.shape} must be (n,), or (H, W, 3) for images.")
        if feature.names is not None and feature.dtype != "image" and len(feature.names) != feature.shape[0]:
            raise UserError(f"column '{name}': {len(feature.names)} names for {feature.shape[0]} elements.")


def _check_episode(episode: Episode, features: Mapping[str, Feature]) -> None:
    expected = set(features) - set(MANDATORY)
    if set(episode.data) != expected:
        raise UserError(f"episode columns differ: missing {sorted(expected - set(episode.data))}, "
                        f"not declared {sorted(set(episode.data) - expected)}.")  # fmt: skip
    if episode.length == 0 or not episode.task:
        raise UserError("an episode needs at least one frame and a task sentence.")
    for name, values in episode.data.items():
        wanted = (episode.length, *features[name].shape)
        values = np.asarray(values)
        if values.shape != wanted and not (features[name].shape == (1,) and values.shape == wanted[:1]):
            raise UserError(f"column '{name}': episode has shape {values.shape}, expected {wanted}.")
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise UserError(f"column '{name}': not finite at frame {int(np.argwhere(~np.isfinite(values))[0][0])}.")


def _same_columns(root: Path, old: Mapping[str, Feature], new: Mapping[str, Feature]) -> None:
    if dict(old) != dict(new):
        differ = sorted(k for k in {*old, *new} if old.get(k) != new.get(k))
        raise UserError(f"{root}: its columns differ from the new episodes' in {differ}. Choose another directory.")


def _staged_head(path: Path, features: Mapping[str, Feature]) -> tuple[dict[str, Any], int]:
    try:
        meta = pq.ParquetFile(path)
        head = json.loads((meta.schema_arrow.metadata or {})[b"episode"])
    except (pa.ArrowException, OSError, KeyError) as error:
        raise UserError(f"{path}: damaged staged episode ({error}). Delete it to go on.") from None
    if meta.schema_arrow.names != list(features):
        raise UserError(f"{path}: its columns differ from the new episodes'. Choose another directory.")
    return head, meta.metadata.num_rows


def _lock(path: Path):
    handle = path.open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        raise UserError(f"{path.parent}: another process is writing this dataset. Wait for it or stop it.") from None
    return handle


def _place(number: int) -> dict[str, int]:
    return {"chunk_index": number // CHUNKS_SIZE, "file_index": number % CHUNKS_SIZE}


def _group_by_size(paths: Sequence[Path], limit: float) -> list[list[Path]]:
    groups: list[list[Path]] = [[]]
    size = 0
    for path in paths:
        size += path.stat().st_size
        if groups[-1] and size > limit:
            groups.append([])
            size = path.stat().st_size
        groups[-1].append(path)
    return groups


def _storage(feature: Feature) -> str:
    return "uint8" if feature.dtype == "image" else feature.dtype


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _write_table(path: Path, row_groups: Sequence[pa.Table]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with pq.ParquetWriter(temporary, row_groups[0].schema, compression="snappy", write_page_checksum=True) as writer:
        for table in row_groups:
            writer.write_table(table, row_group_size=max(1, table.num_rows))
    os.replace(temporary, path)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(data, indent=2))
    with temporary.open() as handle:
        os.fsync(handle.fileno())
    os.replace(temporary, path)


def remove_dataset(root: Path) -> None:
    """Delete a dataset's own files (``data``, ``meta``, staging), nothing else in the directory."""
    for name in ("data", "meta", STAGING):
        shutil.rmtree(root / name, ignore_errors=True)
