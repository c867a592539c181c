"""Check every rule of the LeRobot v3.0 format: one function per rule, one clear UserError per broken rule."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from distill.config import DatasetConfig
from distill.dataset import (
    CODEBASE_VERSION,
    INFO,
    MANDATORY,
    NUMERIC,
    QUANTILES,
    STAGING,
    STATS,
    TASKS,
    Dataset,
    read_json,  # fmt: skip
    read_parquet,
)
from distill.dataset_writer import DatasetWriter, feature_stats
from sims.errors import UserError
from sims.verbs import Verb, run_verb

INFO_KEYS = ("codebase_version", "fps", "features", "total_episodes", "total_frames", "total_tasks", "chunks_size",
             "data_path", "splits")  # fmt: skip
STAT_KEYS = ("min", "max", "mean", "std", "count", *QUANTILES)
TIMESTAMP_TOLERANCE = 1e-4  # s, what LeRobot allows between a query and a frame


def problems(root: str | Path) -> list[str]:
    """Every broken rule as one message; an empty list for a sound dataset. Never raises for a damaged dataset."""
    root = Path(root)
    try:
        check_info(root)
        check_features(root)
        check_tasks(root)
        dataset = Dataset(root)
    except UserError as error:  # the later rules need these
        return [str(error)]
    found: list[str] = []
    for rule in RULES:
        try:
            rule(dataset)
        except UserError as error:
            found.append(str(error))
        except (KeyError, TypeError, ValueError) as error:  # a table without the columns the rule reads
            found.append(f"{root}: {rule.__name__} could not finish: {type(error).__name__} {error}.")
    return found


def validate(root: str | Path) -> Dataset:
    """The opened dataset when every rule holds; otherwise UserError with one line per broken rule."""
    found = problems(root)
    if found:
        raise UserError("\n".join(found))
    return Dataset(root)


def check_info(root: Path) -> None:
    """``info.json`` has its keys, the version, a positive rate and a split over all episodes."""
    info, where = read_json(root / INFO), root / INFO
    missing = [key for key in INFO_KEYS if key not in info]
    if missing:
        raise UserError(f"{where}: missing key(s) {missing}.")
    if info["codebase_version"] != CODEBASE_VERSION:
        raise UserError(f"{where}: codebase_version is {info['codebase_version']!r}, expected {CODEBASE_VERSION!r}.")
    if not isinstance(info["fps"], int | float) or not info["fps"] > 0:
        raise UserError(f"{where}: fps must be a positive number, found {info['fps']!r}.")
    if info["splits"].get("train") != f"0:{info['total_episodes']}":
        raise UserError(f"{where}: splits are {info['splits']}, expected train '0:{info['total_episodes']}'.")


def check_features(root: Path) -> None:
    """Feature entries are complete, names carry no slash, the mandatory columns have their types."""
    features, where = read_json(root / INFO)["features"], root / INFO
    for name, entry in features.items():
        if "/" in name:
            raise UserError(f"{where}: feature '{name}' has a '/' in its name.")
        if not {"dtype", "shape", "names"} <= set(entry):
            raise UserError(f"{where}: feature '{name}' needs dtype, shape and names, found {sorted(entry)}.")
        if entry["dtype"] not in (*NUMERIC, "image", "video", "string", "language"):
            raise UserError(f"{where}: feature '{name}' has unknown dtype '{entry['dtype']}'.")
        names = entry["names"]
        if isinstance(names, list) and entry["dtype"] in NUMERIC and len(names) != entry["shape"][0]:
            raise UserError(f"{where}: feature '{name}' has {len(names)} names for shape {entry['shape']}.")
    for name, wanted in MANDATORY.items():
        if features.get(name) != wanted.to_json():
            raise UserError(
                f"{where}: mandatory feature '{name}' is {features.get(name)}, expected {wanted.to_json()}."
            )


def check_tasks(root: Path) -> None:
    """``tasks.parquet`` carries the pandas index 'task', one unique sentence per row, in order of task_index."""
    where = root / TASKS
    table = read_parquet(where)
    pandas = json.loads((table.schema.metadata or {}).get(b"pandas", b"{}"))
    if pandas.get("index_columns") != ["task"]:
        found = pandas.get("index_columns")
        raise UserError(f"{where}: pandas metadata must name 'task' as the index, found {found}; LeRobot reads it so.")
    indices, tasks = table["task_index"].to_pylist(), table["task"].to_pylist()
    if indices != list(range(len(tasks))):
        raise UserError(f"{where}: row i must have task_index i, found {indices[:8]}.")
    if len(set(tasks)) != len(tasks):
        raise UserError(f"{where}: the same sentence stands in several rows.")


def check_staging(dataset: Dataset) -> None:
    """No committed episode waits outside the dataset."""
    waiting = list((dataset.root / STAGING).glob("episode-*.parquet"))
    if waiting:
        raise UserError(
            f"{dataset.root}: {len(waiting)} committed episode(s) are not folded in; resume the collection."
        )


def check_episodes(dataset: Dataset) -> None:
    """Episode rows are contiguous from 0 and cover the frames without gap or overlap."""
    where, start = dataset.root / "meta/episodes", 0
    for i, row in enumerate(dataset.rows):
        if row["episode_index"] != i:
            raise UserError(f"{where}: row {i} is episode {row['episode_index']}; rows must be contiguous from 0.")
        if row["dataset_from_index"] != start or row["dataset_to_index"] != start + row["length"]:
            span = (row["dataset_from_index"], row["dataset_to_index"])
            raise UserError(f"{where}: episode {i} covers frames {span}, expected {(start, start + row['length'])}.")
        unknown = [t for t in row["tasks"] if t not in dataset.tasks]
        if unknown:
            raise UserError(f"{where}: episode {i} has sentence {unknown[0]!r}, which is not in {TASKS}.")
        start += row["length"]


def check_totals(dataset: Dataset) -> None:
    """The counts in ``info.json`` agree with what is there."""
    info, where = dataset.info, dataset.root / INFO
    found = {
        "total_episodes": len(dataset.rows),
        "total_frames": sum(r["length"] for r in dataset.rows),
        "total_tasks": len(dataset.tasks),
    }
    for key, value in found.items():
        if info[key] != value:
            raise UserError(f"{where}: {key} is {info[key]}, but the dataset holds {value}.")


def check_files(dataset: Dataset) -> None:
    """Data files can be read with their checksums, have the declared columns, and no file is left over."""
    for path in dataset.data_files():
        table = read_parquet(path)
        stored = {n: f for n, f in dataset.features.items() if f.dtype != "video"}
        if set(table.column_names) != set(stored):
            differ = sorted(set(table.column_names) ^ set(stored))
            raise UserError(f"{path}: columns differ from info.json in {differ}.")
        for name, feature in stored.items():
            _check_column(path, name, feature, table[name])
    present = set((dataset.root / "data").glob("chunk-*/*.parquet"))
    extra = sorted(str(p) for p in present - set(dataset.data_files()))
    if extra:
        raise UserError(f"{extra[0]}: belongs to no episode; an interrupted write left it. Resume the collection.")


def _check_column(path: Path, name: str, feature: Any, column: Any) -> None:
    if column.null_count:
        raise UserError(f"{path}: column '{name}' has {column.null_count} empty rows.")
    if feature.dtype == "image":
        return
    kind = str(column.type)
    inner = kind.split(":")[-1].strip(" >") if "list" in kind else kind
    numpy_name = {"float": "float32", "double": "float64"}.get(inner, inner)
    if numpy_name != feature.dtype or ("list" in kind) != (feature.shape not in ((), (1,))):
        raise UserError(f"{path}: column '{name}' is stored as {kind}, info.json says {feature.dtype}{feature.shape}.")
    if "list" in kind:
        lengths = column.combine_chunks().value_lengths().to_numpy(zero_copy_only=False)
        if (lengths != feature.shape[0]).any():
            row = int(np.argmax(lengths != feature.shape[0]))
            raise UserError(f"{path}: column '{name}' row {row} has {lengths[row]} elements, not {feature.shape[0]}.")


def check_frames(dataset: Dataset) -> None:
    """Rows are ordered, indices count from 0, timestamps are frame_index / fps, sentences agree with the episode."""
    data = dataset.columns(list(MANDATORY))
    bounds = dataset.episode_bounds()
    length = bounds[:, 1] - bounds[:, 0]
    episode = np.repeat(np.arange(len(bounds)), length)
    frame = np.arange(len(episode)) - np.repeat(bounds[:, 0], length)
    task = np.asarray([dataset.tasks.index(row["tasks"][0]) for row in dataset.rows])[episode]
    expected = {"index": np.arange(len(episode)), "episode_index": episode, "frame_index": frame, "task_index": task}
    for name, wanted in expected.items():
        if len(data[name]) != len(wanted):
            raise UserError(f"{dataset.root}: data has {len(data[name])} rows, the episodes have {len(wanted)}.")
        if (data[name] != wanted).any():
            row = int(np.argmax(data[name] != wanted))
            raise UserError(f"{dataset.root}: {name} at row {row} is {data[name][row]}, expected {wanted[row]}.")
    error = np.abs(data["timestamp"].astype(np.float64) - frame / dataset.fps)
    if (error > TIMESTAMP_TOLERANCE).any():
        row = int(np.argmax(error))
        raise UserError(f"{dataset.root}: timestamp at row {row} is {data['timestamp'][row]}, expected "
                        f"frame_index / fps = {frame[row] / dataset.fps} (+- {TIMESTAMP_TOLERANCE} s).")  # fmt: skip


def check_values(dataset: Dataset) -> None:
    """No NaN or infinity in any numeric column."""
    for name, feature in dataset.features.items():
        if feature.dtype not in ("float32", "float64"):
            continue
        bad = np.argwhere(~np.isfinite(dataset.columns([name])[name]))
        if len(bad):
            raise UserError(f"{dataset.root}: column '{name}' is not finite at row {int(bad[0][0])}.")


def check_stats(dataset: Dataset) -> None:
    """Every column has finite, exact statistics; a missing one would silently turn normalisation off."""
    stats, where = read_json(dataset.root / STATS), dataset.root / STATS
    for name, feature in dataset.features.items():
        entry = stats.get(name, {})
        missing = [key for key in STAT_KEYS if key not in entry]
        if missing:
            raise UserError(f"{where}: column '{name}' has no {', '.join(missing)}.")
        if feature.dtype in ("image", "video"):
            continue
        exact = feature_stats(dataset.columns([name])[name], feature)
        for key in STAT_KEYS:
            found = np.asarray(entry[key], float).reshape(-1)
            wanted = np.asarray(exact[key], float)
            if found.shape != wanted.shape or not np.allclose(found, wanted, rtol=1e-6, atol=1e-9):
                raise UserError(f"{where}: {key} of '{name}' is {entry[key]}, the data gives {exact[key]}.")


def check_episode_stats(dataset: Dataset) -> None:
    """Episode rows carry statistics for every column."""
    for path in sorted((dataset.root / "meta/episodes").glob("chunk-*/file-*.parquet")):
        names = set(pq.read_schema(path).names)
        for name in dataset.features:
            missing = [key for key in STAT_KEYS if f"stats/{name}/{key}" not in names]
            if missing:
                raise UserError(f"{path}: no per-episode {missing[0]} of '{name}'.")


RULES: tuple[Callable[[Dataset], None], ...] = (
    check_staging, check_episodes, check_totals, check_files, check_frames, check_values, check_stats,
    check_episode_stats,
)  # fmt: skip


def describe(dataset: Dataset) -> str:
    """Counts, columns and episodes per sentence, for a person."""
    info = dataset.info
    counts = f"{len(dataset)} episodes, {dataset.num_frames} frames, {len(dataset.tasks)} sentences"
    lines = [f"{dataset.root}: LeRobot {info['codebase_version']}, {counts}, {dataset.fps:g} frames/s"]
    lines += [f"  {name:34}{f.dtype:10}{f.shape}" for name, f in dataset.features.items()]
    jobs = [str(row.get("job", row["tasks"][0])) for row in dataset.rows]
    for job in dict.fromkeys(jobs):
        mine = [row for row, j in zip(dataset.rows, jobs) if j == job]
        cycle = [row["cycle_steps"] for row in mine if "cycle_steps" in row]
        mean = f", success after {np.mean(cycle):.1f} steps" if cycle else ""
        lines.append(f"  {job:34}{len(mine)} episodes{mean}")
    return "\n".join(lines)


def recover(root: Path) -> Dataset:
    """Finish a dataset whose writer died: fold its committed episodes in."""
    staged = sorted((root / STAGING).glob("episode-*.parquet"))
    if not staged and not (root / INFO).exists():
        raise UserError(f"{root}: neither a dataset nor committed episodes of one.")
    if staged and (root / INFO).exists():
        dataset = Dataset(root)
        features = {k: f for k, f in dataset.features.items() if k not in MANDATORY}
        known = (
            "codebase_version",
            "robot_type",
            "fps",
            "features",
            "splits",
            "data_path",
            "video_path",
            "chunks_size",
        )
        meta = {k: v for k, v in dataset.info.items() if k not in known and not k.startswith("total_")}
        with DatasetWriter(root, features, dataset.fps, dataset.info["robot_type"], meta):
            pass
    elif staged:
        raise UserError(f"{root}: its first episodes are committed, but not what they are. Run the same collect again.")
    return validate(root)


def run(cfg: DatasetConfig) -> None:
    """Entry of the verb."""
    root = Path(cfg.root)
    if cfg.do == "recover":
        recover(root)
    print(describe(validate(root) if cfg.do != "info" else Dataset(root)))


VERB = Verb(
    name="dataset",
    schema=DatasetConfig,
    run=run,
    sentence="validate, describe or recover a LeRobot v3.0 dataset",
    examples=("distillery dataset root=runs/quickstart/dataset", "distillery dataset root=runs/dataset do=recover"),
)


def main(argv: list[str] | None = None) -> int:
    return run_verb(VERB, argv)


if __name__ == "__main__":
    sys.exit(main())
