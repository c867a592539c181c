"""A run that is killed, interrupted or runs out of disk goes on as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from control.checkpoint import FULL_DISK, append_durably, explained_writes, load_checkpoint, save_checkpoint
from control.log import read_rows
from control.replay import Replay
from control.replay_store import ReplayStore
from sims.errors import UserError

DRIVER = Path(__file__).with_name("kill_driver.py")
COMMON = ["eval_every=400", "eval_episodes=1", "final_episodes=1", "env_options.time_limit=50", "algo.width=16"]
OFF = [*COMMON, "env=gym/Pendulum-v1", "num_envs=2", "utd=0.25", "algo.batch_size=32", "algo.warmup_steps=64"]
RUNS = {
    "dsact": [*OFF, "algo=dsact", "steps=1200", "algo.normalize=true"],
    "sac": [*OFF, "algo=sac", "steps=1200", "algo.buffer_size=300", "algo.n_step=3"],  # the ring wraps
    "ppo": [*COMMON, "env=gym/Pendulum-v1", "algo=ppo", "num_envs=4", "steps=4800", "algo.rollout_steps=16",
            "algo.minibatch_size=64", "algo.epochs=2"],
}  # fmt: skip


def plus(args: list[str]) -> list[str]:
    """Options below env_options are no fields of the schema."""
    return [f"+{a}" if a.startswith("env_options") else a for a in args]


def longer(args: list[str], times: int) -> list[str]:
    return [f"steps={int(a[6:]) * times}" if a.startswith("steps=") else a for a in args]


def check(name: str, kills: int, inside: int, tmp_path: Path, longest: float, times: int = 1) -> dict[str, int]:
    numbers = [str(x) for x in (kills, inside, longest)]
    done = subprocess.run(
        [sys.executable, str(DRIVER), *numbers, str(tmp_path), "--", *longer(plus(RUNS[name]), times)],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["status"] == [0, 0], done.stderr[-3000:]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    a, b = (load_checkpoint(folder / "checkpoint") for folder in (whole, killed))
    a["watch"]["wall"] = b["watch"]["wall"] = 0.0
    for folder, state in ((whole, a), (killed, b)):
        if "replay" in state:  # the same rows, however they are cut into chunks
            state["replay"] = rows_of(folder / "replay", state["replay"])
    assert_same(a, b)
    first, second = (json.loads((folder / "result.json").read_text()) for folder in (whole, killed))
    assert first | {"wall_s": 0} == second | {"wall_s": 0}
    clock = ("time", "steps_per_s")
    first, second = (read_rows(folder / "metrics.jsonl") for folder in (whole, killed))
    assert [{k: v for k, v in r.items() if k not in clock} for r in first] == [
        {k: v for k, v in r.items() if k not in clock} for r in second
    ]
    return report


def rows_of(folder: Path, state) -> torch.Tensor:
    features, actions, envs = state["shape"]
    replay = Replay(state["filled"], envs, features, actions)
    ReplayStore(folder).load(state, replay)
    return replay.slice(replay.total - replay.filled, replay.total)


def test_a_difference_is_seen():
    """The comparison of this file itself."""
    nan = torch.tensor([1.0, torch.nan])
    assert_same({"a": [nan, "x", None]}, {"a": [nan.clone(), "x", None]})
    for other in (nan + 1e-6, nan[:1], nan.double(), torch.tensor([torch.nan, 1.0])):
        with pytest.raises(AssertionError):
            assert_same({"a": [nan]}, {"a": [other]})


def assert_same(a, b, where="") -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif torch.is_tensor(a):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b) or torch.equal(a.nan_to_num(7.7), b.nan_to_num(7.7)), where
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for x, y in zip(a, b):
            assert_same(x, y, where)
    else:
        assert (a == b) if not hasattr(a, "shape") else (a == b).all(), where


@pytest.mark.parametrize("name", RUNS)
def test_killed_at_random_moments_ends_in_the_same_weights(name, tmp_path):
    report = check(name, 5, 0, tmp_path, 0.8)
    assert report["landed"] >= 2  # kills that hit a run that was not yet finished


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_killed_twenty_times_and_inside_checkpoints(name, tmp_path):
    report = check(name, 30, 3, tmp_path, 0.7, times=4)  # so long that a fast machine does not finish before
    print(name, report)
    assert report["landed"] >= 20
    assert report["inside"] >= 1


def start(args: list[str], out: Path, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "control.train", *args, f"out={out}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_an_interrupted_run_saves_and_says_how_to_resume(tmp_path):
    args = [a if not a.startswith("steps") else "steps=100000" for a in plus(RUNS["sac"])]
    run = start([*args, "log_every=100"], tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    _, error = run.communicate(timeout=30)
    assert run.returncode == 130, error
    assert "resumes" in error
    assert load_checkpoint(tmp_path / "run" / "checkpoint")["watch"]["step"] > 0


def wait_for(ready, run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not ready() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ready(), run.communicate(timeout=5)[1]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, 4 MiB small; None where mounting is not permitted."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        yield None
        return
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill_disk(run: subprocess.Popen[str], out: Path):
    ballast = out.parent / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as stream:
        while stream.write(bytes(4096)):
            pass
    return ballast.unlink


def limit_files(run: subprocess.Popen[str], out: Path):
    """No file of this process may grow beyond what the checkpoint has: the system refuses it as on a full disk."""
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (1000, 1000))
    return lambda: None


def full_disk(out: Path, make_full) -> None:
    args = [a for a in plus(RUNS["dsact"]) if not a.startswith("steps")]
    args += ["steps=1000000", "checkpoint_seconds=0.2", "eval_every=0"]
    run = start(args, out)
    wait_for((out / "checkpoint").exists, run)
    make_room = make_full(run, out)
    _, error = run.communicate(timeout=60)
    assert run.returncode == 2, error
    assert error.count("\n") == 1
    for said in (f"cannot write to {out}", "MiB free there", "The last checkpoint is intact", "repeat the command"):
        assert said in error
    before = load_checkpoint(out / "checkpoint")
    assert before["watch"]["step"] > 0
    make_room()
    again = start(args, out)
    rows = sum(c["steps"] for c in before["replay"]["chunks"])
    wait_for(lambda: load_rows(out) > rows, again)
    again.send_signal(signal.SIGINT)
    assert again.wait(timeout=30) == 130
    assert load_checkpoint(out / "checkpoint")["watch"]["step"] > before["watch"]["step"]


def load_rows(out: Path) -> int:
    """Time steps in the chunks on disk."""
    return sum(f.stat().st_size for f in (out / "replay").glob("*.rows")) // (2 * (2 * 3 + 1 + 3) * 4)


def test_a_full_disk_keeps_the_last_checkpoint_and_says_what_to_do(small_disk, tmp_path):
    if small_disk:
        full_disk(small_disk / "run", fill_disk)
    else:
        full_disk(tmp_path / "run", limit_files)


@pytest.mark.slow
def test_a_limit_on_files_is_a_full_disk(tmp_path):
    full_disk(tmp_path / "run", limit_files)


def test_a_device_without_room_is_explained(tmp_path):
    """/dev/full refuses every byte with ENOSPC; no privilege is needed."""
    save_checkpoint(tmp_path / "checkpoint", {"n": 1})
    kept = pytest.raises(UserError, match=r"No space left on device.*MiB free there.*last checkpoint is intact")
    with kept, explained_writes(tmp_path / "checkpoint", FULL_DISK):
        append_durably(Path("/dev/full"), 0, b"x" * 10)
    none = pytest.raises(UserError, match="no earlier checkpoint")
    with none, explained_writes(tmp_path / "none" / "checkpoint"):
        append_durably(Path("/dev/full"), 0, b"x")
    with pytest.raises(FileNotFoundError), explained_writes(tmp_path / "checkpoint", FULL_DISK):
        Path(tmp_path / "nowhere").read_text()


def filled(capacity: int, steps: int, replay: Replay | None = None) -> Replay:
    replay = Replay(capacity, 2, 3, 1) if replay is None else replay  # an empty one is false
    for _ in range(steps):
        t = float(replay.total)
        flag = torch.zeros(1, 2)
        replay.add(torch.full((1, 2, 3), t), torch.zeros(1, 2, 1), flag + t, flag, flag, torch.full((1, 2, 3), t + 1))
    return replay


def restored(store: ReplayStore, state, capacity: int) -> Replay:
    replay = Replay(capacity, 2, 3, 1)
    ReplayStore(store.folder, store.chunk_bytes).load(state, replay)
    return replay


def held(replay: Replay) -> list[float]:
    return replay.slice(replay.total - replay.filled, replay.total)[:, 0, 0].tolist()


def steps(first: int, end: int) -> list[float]:
    return [float(i) for i in range(first, end)]


STEP_BYTES = 2 * 10 * 4  # two environments, 2 * 3 + 1 + 3 numbers each


def store_of(folder: Path) -> ReplayStore:
    return ReplayStore(folder, 4 * STEP_BYTES)  # four time steps a chunk


def sizes(folder: Path) -> dict[int, int]:
    """First time step -> time steps, of the chunks in a folder."""
    return {int(f.stem): f.stat().st_size // STEP_BYTES for f in sorted(folder.iterdir())}


def test_a_checkpoint_writes_only_what_is_new_and_the_ring_drops_old_chunks(tmp_path):
    store, replay = store_of(tmp_path), filled(10, 6)
    store.save(replay)
    store.collect_garbage()
    assert sizes(tmp_path) == {0: 4, 4: 2}
    whole = (tmp_path / f"{0:012d}.rows").stat().st_mtime_ns
    filled(10, 3, replay)
    state = store.save(replay)
    store.collect_garbage()
    assert sizes(tmp_path) == {0: 4, 4: 4, 8: 1}  # the second grew
    assert (tmp_path / f"{0:012d}.rows").stat().st_mtime_ns == whole  # the first was not touched
    assert held(restored(store, state, 10)) == held(replay) == steps(0, 9)
    filled(10, 6, replay)  # 15 steps, the ring holds 5 .. 14
    state = store.save(replay)
    assert sizes(tmp_path) == {0: 4, 4: 4, 8: 4, 12: 3}  # the last checkpoint still names the first
    store.collect_garbage()
    assert sizes(tmp_path) == {4: 4, 8: 4, 12: 3}
    assert held(restored(store, state, 10)) == held(replay) == steps(5, 15)
    filled(10, 30, replay)  # everything that was saved is gone: a gap
    state = store.save(replay)
    store.collect_garbage()
    assert sizes(tmp_path) == {35: 4, 39: 4, 43: 2}
    assert held(restored(store, state, 10)) == held(replay) == steps(35, 45)


def test_a_resumed_run_cuts_off_what_no_checkpoint_names(tmp_path):
    store, replay = store_of(tmp_path), filled(10, 6)
    state = store.save(replay)
    filled(10, 5, replay)
    store.save(replay)  # killed before the checkpoint was complete
    resumed, again = store_of(tmp_path), Replay(10, 2, 3, 1)
    resumed.load(state, again)
    assert held(again) == steps(0, 6)
    again.add(*[torch.full((1, 2, *shape), 99.0) for shape in ((3,), (1,), (), (), (), (3,))])
    state = resumed.save(again)
    resumed.collect_garbage()
    assert sizes(tmp_path) == {0: 4, 4: 3}
    assert held(restored(store, state, 10)) == [*steps(0, 6), 99.0]


@settings(max_examples=40, deadline=None)
@given(
    capacity=st.integers(1, 12), blocks=st.lists(st.tuples(st.integers(1, 14), st.booleans()), min_size=2, max_size=9)
)
def test_the_last_checkpoint_is_readable_whatever_came_after_it(tmp_path_factory, capacity, blocks):
    """Law: after any saves, complete or cut off before or after garbage was collected, its rows are found."""
    store, replay = store_of(tmp_path_factory.mktemp("replay")), Replay(capacity, 2, 3, 1)
    last = None
    for count, complete in blocks:
        filled(capacity, count, replay)
        state = store.save(replay)
        if complete:
            last = state, held(replay)
            store.collect_garbage()
        if last:
            assert held(restored(store, last[0], capacity)) == last[1]


def test_a_restored_ring_draws_the_same_batches(tmp_path):
    store, replay = store_of(tmp_path), filled(10, 23)
    other = restored(store, store.save(replay), 10)
    a, b = (r.sample(64, 0.9, 3, torch.Generator().manual_seed(1)) for r in (replay, other))
    assert all(torch.equal(getattr(a, k), getattr(b, k)) for k in a.__dataclass_fields__)


@pytest.mark.parametrize("how", ["missing", "cut", "changed"])
def test_a_missing_or_damaged_chunk_is_named(how, tmp_path):
    store = store_of(tmp_path)
    state = store.save(filled(10, 6))
    file = tmp_path / f"{4:012d}.rows"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(content[: len(content) // 2] if how == "cut" else content)
    with pytest.raises(UserError, match=f"{file.name}.*(missing|damaged).*Restore it"):
        restored(store, state, 10)


def test_rows_of_another_shape_are_refused(tmp_path):
    store = store_of(tmp_path)
    state = store.save(filled(10, 6))
    with pytest.raises(UserError, match="features"):
        store.load(state, Replay(10, 2, 4, 1))
