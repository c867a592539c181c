"""LeRobot v3.0 datasets on disk: names, features and reading. A leaf: numpy and pyarrow only.

The format is that of huggingface/lerobot (``lerobot/datasets``, codebase version v3.0); see ``dataset_writer`` and
``dataset_check`` for the other two halves. Layout::

    meta/info.json  meta/stats.json  meta/tasks.parquet  meta/episodes/chunk-000/file-000.parquet
    data/chunk-000/file-000.parquet                       one row group per episode

Column names decide what a LeRobot policy sees: keys that start with ``observation`` are inputs, keys that start with
``action`` are outputs. Everything a policy must not see is stored under ``executed.``, ``teacher.``, ``privileged.``.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sims.errors import UserError, unknown_choice
from sims.types import EnvSpec

CODEBASE_VERSION = "v3.0"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
STAGING = ".staging"  # episodes committed one by one, folded into data/ by DatasetWriter.finalize
NUMERIC = ("float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


@dataclass(frozen=True)
class Feature:
    """One column. ``shape`` is one row's shape: (1,) is stored as a scalar, (n,) as a list, (H, W, 3) as PNG.

    Attributes:
        dtype: numpy name or ``"image"``.
        shape: without the time axis.
        names: one name per element, or None.
    """

    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        names = list(self.names) if self.names else None
        return {"dtype": self.dtype, "shape": list(self.shape), "names": names}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Feature:
        names = data.get("names")
        return cls(data["dtype"], tuple(data["shape"]), tuple(names) if isinstance(names, list) else None)


MANDATORY: dict[str, Feature] = {
    "timestamp": Feature("float32", (1,)),
    "frame_index": Feature("int64", (1,)),
    "episode_index": Feature("int64", (1,)),
    "index": Feature("int64", (1,)),
    "task_index": Feature("int64", (1,)),
}


@dataclass(frozen=True)
class Episode:
    """One trajectory of T frames.

    Attributes:
        data: feature name -> (T, *shape), without the mandatory columns on writing; with them after reading.
        task: the sentence.
        extra: scalar columns kept per episode, such as ``success``, ``specialist``, ``env_seed``.
    """

    data: Mapping[str, np.ndarray]
    task: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return len(next(iter(self.data.values())))


def feature_name(group: str) -> str:
    """Dataset column of an observation group: ``proprio`` -> ``observation.state`` and so on."""
    fixed = {"proprio": "observation.state", "objects": "observation.environment_state", "action": "action"}
    if group in fixed:
        return fixed[group]
    if group.startswith("pixels/"):
        return "observation.images." + group.removeprefix("pixels/")
    return "privileged." + group.replace("/", ".")


def rollout_features(spec: EnvSpec, images: bool = False) -> dict[str, Feature]:
    """Columns of recorded rollouts of ``spec``.

    ``action`` is what a policy should imitate (the teacher's clean action), ``executed.action`` what moved the robot.
    """
    columns: dict[str, Feature] = {}
    for group, array in spec.observation.items():
        if group.startswith("pixels/"):
            if images:
                columns[feature_name(group)] = Feature("image", tuple(array.shape), ("height", "width", "channels"))
        elif group != "instruction":
            names = tuple(array.names) or None
            columns[feature_name(group)] = Feature(array.dtype, tuple(array.shape), names)
    action = Feature("float32", tuple(spec.action.shape), tuple(spec.action.names) or None)
    columns |= {"action": action, "executed.action": action}
    return columns | {"next.reward": Feature("float32", (1,)), "next.done": Feature("bool", (1,)),
                      "next.success": Feature("bool", (1,))}  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or UserError naming the file."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: not found. Is {path.parent.parent} a finished LeRobot v3.0 dataset?") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: damaged JSON ({error}). Rebuild it by collecting again with resume.") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(data).__name__}.")
    return data


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """A table with page checksums verified, or UserError naming the file."""
    try:
        return pq.ParquetFile(path, page_checksum_verification=True).read(columns=columns)
    except FileNotFoundError:
        raise UserError(f"{path}: not found, although the dataset refers to it.") from None
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not readable as parquet ({reason}). The file is damaged or truncated.") from None


def to_arrow(values: np.ndarray, feature: Feature) -> pa.Array:
    """(T, *shape) -> one arrow column of T rows."""
    if feature.dtype == "image":
        return pa.array([{"bytes": _png(frame), "path": None} for frame in values],
                        pa.struct([("bytes", pa.binary()), ("path", pa.string())]))  # fmt: skip
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    if feature.shape in ((), (1,)):
        return flat
    width = feature.shape[0]
    offsets = np.arange(0, len(flat) + 1, width, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), flat)


def from_arrow(column: pa.ChunkedArray, feature: Feature) -> np.ndarray:
    """Inverse of :func:`to_arrow`; scalars come back as (T,)."""
    if feature.dtype == "image":
        frames = [_unpng(row["bytes"]) for row in column.to_pylist()]
        return np.stack(frames) if frames else np.zeros((0, *feature.shape), np.uint8)
    array = column.combine_chunks()
    if feature.shape in ((), (1,)):
        return np.asarray(array.to_numpy(zero_copy_only=False), dtype=feature.dtype)
    values = array.flatten().to_numpy(zero_copy_only=False)
    if len(values) != len(array) * feature.shape[0]:
        raise UserError(f"a column of shape {feature.shape} has rows of another length.")
    return np.asarray(values, dtype=feature.dtype).reshape(-1, feature.shape[0])


def _png(frame: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def _unpng(data: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)))


def read_tasks(root: Path) -> list[str]:
    """Sentences by ``task_index``; row i must hold task i, because LeRobot reads the table by position."""
    table = read_parquet(root / TASKS)
    missing = {"task", "task_index"} - set(table.column_names)
    if missing:
        raise UserError(f"{root / TASKS}: column(s) {sorted(missing)} missing, found {table.column_names}.")
    indices = table["task_index"].to_pylist()
    if indices != list(range(len(indices))):
        raise UserError(f"{root / TASKS}: row i must have task_index i, found {indices[:8]}.")
    return table["task"].to_pylist()


def read_episodes(root: Path) -> list[dict[str, Any]]:
    """Rows of every ``meta/episodes`` file in order, without the per-episode statistics."""
    rows: list[dict[str, Any]] = []
    for path in sorted((root / "meta/episodes").glob("chunk-*/file-*.parquet")):
        table = read_parquet(path)
        rows += table.select([n for n in table.column_names if not n.startswith("stats/")]).to_pylist()
    return rows


class Dataset:
    """A finished dataset opened for reading.

    Attributes:
        root: its directory.  info: the content of ``meta/info.json``.
        features: column -> Feature.  tasks: sentences by task_index.
        rows: one dict per episode (length, data file, frame range, extra columns).
    """

    def __init__(self, root: str | Path):
        self.root = Path(root)
        self.info = read_json(self.root / INFO)
        if self.info.get("codebase_version") != CODEBASE_VERSION:
            found = self.info.get("codebase_version")
            raise UserError(f"{self.root / INFO}: codebase_version is {found!r}, this reader needs 'v3.0'.")
        self.features = {k: Feature.from_json(v) for k, v in self.info["features"].items()}
        self.tasks = read_tasks(self.root)
        self.rows = read_episodes(self.root)[: self.info["total_episodes"]]

    @property
    def fps(self) -> float:
        return self.info["fps"]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_frames(self) -> int:
        return int(self.info["total_frames"])

    def columns(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """name -> (N, *shape) over all frames, episodes one after the other."""
        for name in names:
            if name not in self.features:
                raise unknown_choice("column", name, self.features, str(self.root))
        tables = [read_parquet(path, list(names)) for path in self.data_files()]
        table = pa.concat_tables(tables)
        return {name: from_arrow(table[name], self.features[name]) for name in names}

    def episode_bounds(self) -> np.ndarray:
        """(E, 2) int64: first and one-past-last frame of every episode."""
        pairs = [(r["dataset_from_index"], r["dataset_to_index"]) for r in self.rows]
        return np.asarray(pairs, np.int64).reshape(-1, 2)

    def data_files(self) -> list[Path]:
        """Data files in order of their episodes."""
        found = {self._data_file(row): None for row in self.rows}  # keeps the order
        return list(found)

    def _data_file(self, row: Mapping[str, Any]) -> Path:
        place = {"chunk_index": row["data/chunk_index"], "file_index": row["data/file_index"]}
        return self.root / self.info["data_path"].format(**place)

    def episode(self, index: int) -> Episode:
        """Read one episode (its own row group when the file was written here)."""
        if not 0 <= index < len(self):
            raise UserError(f"{self.root}: no episode {index}; it has episodes 0 to {len(self) - 1}.")
        row = self.rows[index]
        table = read_parquet(self._data_file(row))
        first = table["index"][0].as_py()
        table = table.slice(row["dataset_from_index"] - first, row["length"])
        data = {name: from_arrow(table[name], f) for name, f in self.features.items() if f.dtype != "video"}
        known = ("episode_index", "tasks", "length", "dataset_from_index", "dataset_to_index")
        extra = {k: v for k, v in row.items() if k not in known and "/" not in k}
        return Episode(data, self.tasks[int(data["task_index"][0])], extra)

    def __iter__(self) -> Iterator[Episode]:
        return (self.episode(i) for i in range(len(self)))
