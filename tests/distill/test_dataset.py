"""Datasets: exact round trip, crash safety, and one clear error per kind of damage."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distill.dataset import INFO, STATS, TASKS, Dataset, Episode, Feature, rollout_features
from distill.dataset_check import describe, main, problems, recover, validate
from distill.dataset_writer import DatasetWriter
from sims.errors import UserError
from sims.types import ArraySpec, EnvSpec

FEATURES = {
    "observation.state": Feature("float32", (3,), ("a", "b", "c")),
    "action": Feature("float32", (2,)),
    "next.reward": Feature("float32", (1,)),
    "next.success": Feature("bool", (1,)),
}


def make_episode(seed: int, length: int = 5, task: str = "lift the red cube") -> Episode:
    rng = np.random.default_rng(seed)
    data = {
        "observation.state": rng.normal(size=(length, 3)).astype(np.float32),
        "action": rng.normal(size=(length, 2)).astype(np.float32),
        "next.reward": rng.normal(size=length).astype(np.float32),
        "next.success": rng.random(length) < 0.5,
    }
    return Episode(data, task, {"success": True, "specialist": "abc", "env_seed": seed})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with DatasetWriter(tmp_path / "d", FEATURES, 20, "test_arm") as writer:
        for i in range(4):
            writer.add_episode(make_episode(i, 5 + i, ["lift", "press"][i % 2]))
    return tmp_path / "d"


def test_round_trip_is_exact(root):
    dataset = validate(root)
    assert (len(dataset), dataset.num_frames, dataset.tasks) == (4, 5 + 6 + 7 + 8, ["lift", "press"])
    for i, episode in enumerate(dataset):
        wanted = make_episode(i, 5 + i)
        for name, values in wanted.data.items():
            assert episode.data[name].dtype == values.dtype
            np.testing.assert_array_equal(episode.data[name], values)
        assert episode.task == ["lift", "press"][i % 2]
        assert episode.extra == {"success": True, "specialist": "abc", "env_seed": i}
    # episode 2 starts after 5 + 6 frames; its timestamps are frame / 20 in float32
    third = dataset.episode(2)
    np.testing.assert_array_equal(third.data["index"], np.arange(11, 18))
    np.testing.assert_array_equal(third.data["timestamp"], (np.arange(7) / 20).astype(np.float32))
    assert dataset.episode_bounds().tolist() == [[0, 5], [5, 11], [11, 18], [18, 26]]


def test_statistics_are_exact_over_all_frames(root):
    values = np.concatenate([make_episode(i, 5 + i).data["action"] for i in range(4)]).astype(np.float64)
    stats = json.loads((root / STATS).read_text())["action"]
    assert stats["count"] == [26]
    np.testing.assert_allclose(stats["q01"], np.quantile(values, 0.01, axis=0), rtol=1e-12)
    np.testing.assert_allclose(stats["q99"], np.quantile(values, 0.99, axis=0), rtol=1e-12)
    np.testing.assert_allclose(stats["std"], values.std(0), rtol=1e-12)


def test_tasks_table_has_the_pandas_index_lerobot_reads(root):
    meta = json.loads(pq.read_schema(root / TASKS).metadata[b"pandas"])
    assert meta["index_columns"] == ["task"]
    assert {c["name"]: c["pandas_type"] for c in meta["columns"]} == {"task_index": "int64", "task": "unicode"}


def test_tasks_table_opens_in_pandas(root):
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(root / TASKS)
    assert frame.index.name == "task"
    assert frame.iloc[1].name == "press"


def test_each_episode_is_one_row_group(root):
    meta = pq.ParquetFile(root / "data/chunk-000/file-000.parquet").metadata
    assert [meta.row_group(i).num_rows for i in range(meta.num_row_groups)] == [5, 6, 7, 8]


def test_appending_keeps_what_was_there(root):
    with DatasetWriter(root, FEATURES, 20, "test_arm") as writer:
        assert writer.num_episodes == 4
        writer.add_episode(make_episode(9, 3, "reach"))
    dataset = validate(root)
    assert dataset.tasks == ["lift", "press", "reach"]
    np.testing.assert_array_equal(dataset.episode(0).data["action"], make_episode(0, 5).data["action"])
    np.testing.assert_array_equal(dataset.episode(4).data["action"], make_episode(9, 3).data["action"])


def test_images_are_kept_exactly(tmp_path):
    features = {"observation.images.front": Feature("image", (8, 6, 3), ("height", "width", "channels"))}
    frames = np.random.default_rng(0).integers(0, 256, (3, 8, 6, 3), dtype=np.uint8)
    with DatasetWriter(tmp_path, features, 20, "arm") as writer:
        writer.add_episode(Episode({"observation.images.front": frames}, "look"))
    np.testing.assert_array_equal(validate(tmp_path).episode(0).data["observation.images.front"], frames)
    stats = json.loads((tmp_path / STATS).read_text())["observation.images.front"]
    np.testing.assert_allclose(np.reshape(stats["mean"], 3), (frames / 255.0).mean((0, 1, 2)))
    assert np.shape(stats["q50"]) == (3, 1, 1)


def test_kill_in_mid_write_loses_no_committed_episode(tmp_path):
    script = textwrap.dedent(
        """
        import sys
        from distill.dataset_writer import DatasetWriter
        from tests.distill.test_dataset import FEATURES, make_episode
        writer = DatasetWriter(sys.argv[1], FEATURES, 20, "arm")
        for i in range(10_000):
            writer.add_episode(make_episode(i))
            print(i, flush=True)
        """
    )
    root = tmp_path / "d"
    process = subprocess.Popen([sys.executable, "-c", script, str(root)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(25):
        committed = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (root / ".staging" / "episode-999999.parquet.tmp").write_bytes(b"half an episode")
    with DatasetWriter(root, FEATURES, 20, "arm") as writer:
        count = writer.num_episodes
        assert count >= committed + 1
        writer.add_episode(make_episode(count))
    dataset = validate(root)
    assert len(dataset) == count + 1
    for i in range(0, count + 1, 5):
        np.testing.assert_array_equal(dataset.episode(i).data["action"], make_episode(i).data["action"])


@pytest.mark.parametrize("stage", ["data", "tasks", "info"])
def test_finalize_can_die_anywhere(tmp_path, monkeypatch, stage):
    root = tmp_path / "d"
    with DatasetWriter(root, FEATURES, 20, "arm") as writer:
        writer.add_episode(make_episode(0))
    writer = DatasetWriter(root, FEATURES, 20, "arm")
    writer.add_episode(make_episode(1, task="press"))

    def die(*args):
        raise KeyboardInterrupt

    name = {"data": "_episode_row", "tasks": "_write_stats", "info": "_info"}[stage]
    with monkeypatch.context() as patch:
        patch.setattr(DatasetWriter, name, die)
        with pytest.raises(KeyboardInterrupt):
            writer.finalize()
    writer.close()
    assert len(Dataset(root)) == 1  # the old dataset is still what a reader sees
    np.testing.assert_array_equal(Dataset(root).episode(0).data["action"], make_episode(0).data["action"])
    with DatasetWriter(root, FEATURES, 20, "arm") as writer:
        assert writer.num_episodes == 2
    assert len(validate(root)) == 2


def test_death_between_counts_and_cleanup(root):
    staged = root / ".staging" / "episode-000003.parquet"
    pq.write_table(pa.table({"x": [1]}), staged)  # stands for the already folded episode 3
    with DatasetWriter(root, FEATURES, 20, "arm") as writer:
        assert writer.num_episodes == 4
    assert not staged.exists()


def test_two_writers_are_refused(tmp_path):
    writer = DatasetWriter(tmp_path, FEATURES, 20, "arm")
    with pytest.raises(UserError, match="another process"):
        DatasetWriter(tmp_path, FEATURES, 20, "arm")
    writer.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("action"), "missing \\['action'\\]"),
        (lambda d: d.update(action=d["action"][:, :1]), "shape \\(5, 1\\), expected \\(5, 2\\)"),
        (lambda d: d.update(action=np.full((5, 2), np.nan, np.float32)), "not finite at frame 0"),
    ],
)
def test_bad_episode_is_refused_before_it_is_written(tmp_path, change, message):
    episode = make_episode(0)
    data = dict(episode.data)
    change(data)
    writer = DatasetWriter(tmp_path, FEATURES, 20, "arm")
    with pytest.raises(UserError, match=message):
        writer.add_episode(Episode(data, episode.task))
    assert writer.num_episodes == 0
    writer.close()


def edit_info(root: Path, **changes) -> None:
    info = json.loads((root / INFO).read_text())
    (root / INFO).write_text(json.dumps({**info, **changes}))


def edit_data(root: Path, name: str, row: int, value) -> None:
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    values = table[name].to_pylist()
    values[row] = value
    column = pa.array(values, table.schema.field(name).type)
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, column), path)


def truncate(path: Path, size: int = 100) -> None:
    path.write_bytes(path.read_bytes()[:-size])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[60] ^= 0xFF  # inside the first data page
    path.write_bytes(bytes(data))


def rewrite_tasks(root: Path, indices: list[int], metadata: bool = True) -> None:
    meta = pq.read_schema(root / TASKS).metadata if metadata else None
    table = pa.table({"task_index": indices, "task": ["lift", "press"]}).replace_schema_metadata(meta)
    pq.write_table(table, root / TASKS)


def edit_stats(root: Path, change) -> None:
    stats = json.loads((root / STATS).read_text())
    change(stats)
    (root / STATS).write_text(json.dumps(stats))


DAMAGE = {
    "no info": (lambda r: (r / INFO).unlink(), "info.json: not found"),
    "info cut": (lambda r: truncate(r / INFO), "damaged JSON"),
    "old version": (lambda r: edit_info(r, codebase_version="v2.1"), "codebase_version is 'v2.1'"),
    "no rate": (lambda r: edit_info(r, fps=0), "fps must be a positive"),
    "count": (lambda r: edit_info(r, total_frames=99), "total_frames is 99"),
    "slash": (lambda r: edit_info(r, features={"a/b": FEATURES["action"].to_json()}), "'/' in its name"),
    "mandatory": (lambda r: edit_info(r, features={}), "mandatory feature 'timestamp'"),
    "task order": (lambda r: rewrite_tasks(r, [1, 0]), "row i must have task_index i"),
    "task metadata": (lambda r: rewrite_tasks(r, [0, 1], metadata=False), "must name 'task' as the index"),
    "data cut": (lambda r: truncate(r / "data/chunk-000/file-000.parquet"), "not readable as parquet"),
    "data bit": (lambda r: flip(r / "data/chunk-000/file-000.parquet"), "not readable as parquet"),
    "data gone": (lambda r: (r / "data/chunk-000/file-000.parquet").unlink(), "not found"),
    "timestamp": (lambda r: edit_data(r, "timestamp", 3, 0.1512), "timestamp at row 3"),
    "frame order": (lambda r: edit_data(r, "frame_index", 2, 7), "frame_index at row 2 is 7, expected 2"),
    "wrong task": (lambda r: edit_data(r, "task_index", 0, 1), "task_index at row 0 is 1, expected 0"),
    "nan": (lambda r: edit_data(r, "action", 1, [float("nan"), 0.0]), "'action' is not finite at row 1"),
    "width": (lambda r: edit_data(r, "action", 1, [0.0]), "row 1 has 1 elements, not 2"),
    "stale stats": (lambda r: edit_data(r, "next.reward", 1, 77.0), "of 'next.reward' is"),
    "stats missing": (lambda r: edit_stats(r, lambda s: s["action"].pop("q01")), "'action' has no q01"),
    "leftover": (lambda r: pq.write_table(pa.table({"x": [1]}), r / "data/chunk-000/file-007.parquet"), "no episode"),
    "staged": (lambda r: (r / ".staging/episode-000004.parquet").write_bytes(b""), "not folded in"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_validator_names_each_damage(root, kind):
    assert problems(root) == []
    damage, message = DAMAGE[kind]
    damage(root)
    found = problems(root)
    assert any(message in line for line in found), found
    with pytest.raises(UserError):
        validate(root)


def test_any_truncation_of_the_data_is_reported(root):
    path = root / "data/chunk-000/file-000.parquet"
    whole = path.read_bytes()
    for size in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:size])
        assert problems(root), f"truncated to {size} of {len(whole)} bytes"


def test_columns_of_a_world():
    spec = EnvSpec(
        "t",
        {
            "proprio": ArraySpec((30,)),
            "objects": ArraySpec((25,)),
            "goal": ArraySpec((5,)),
            "privileged": ArraySpec((2,)),
            "pixels/front": ArraySpec((64, 64, 3), "uint8"),
            "instruction": ArraySpec((), "int64"),
        },
        ArraySpec((6,)),
        20.0,
        50,
    )
    names = set(rollout_features(spec, images=True))
    inputs = {n for n in names if n.startswith("observation")}
    assert inputs == {"observation.state", "observation.environment_state", "observation.images.front"}
    assert {n for n in names if n.startswith("action")} == {"action"}
    assert {"privileged.goal", "privileged.privileged", "executed.action"} <= names


def test_recover_folds_in_what_was_committed(root):
    writer = DatasetWriter(root, FEATURES, 20, "test_arm")
    writer.add_episode(make_episode(7, 4, "reach"))
    writer.close()
    assert any("not folded in" in line for line in problems(root))
    dataset = recover(root)
    assert len(dataset) == 5
    assert "5 episodes, 30 frames, 3 sentences" in describe(dataset)


def test_verb_prints_one_message_for_damage(root, capsys):
    assert main([f"root={root}"]) == 0
    truncate(root / "data/chunk-000/file-000.parquet")
    assert main([f"root={root}"]) == 2
    out = capsys.readouterr()
    assert "4 episodes" in out.out
    assert "damaged or truncated" in out.err
    assert "Traceback" not in out.err
