"""A run that is killed, interrupted or runs out of disk goes on as if nothing had happened."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from control.checkpoint import load_checkpoint
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
            "algo.minibatch_size=16"],
}  # fmt: skip


def drive(kills: int, seed: int, longest: float, args: list[str]) -> dict[str, int]:
    args = [a if not a.startswith("env_options") else f"+{a}" for a in args]
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(kills), str(seed), str(longest), "--", *args], capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(name: str, kills: int, tmp_path: Path, longest: float) -> dict[str, int]:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert drive(0, 0, 1, [*RUNS[name], f"out={whole}"])["status"] == 0
    # a checkpoint after every iteration, so that many kills fall into one
    report = drive(kills, 1, longest, [*RUNS[name], f"out={killed}", "checkpoint_seconds=0"])
    assert report["status"] == 0
    a, b = (load_checkpoint(folder / "checkpoint") for folder in (whole, killed))
    assert_same(a["learner"], b["learner"])
    assert_same(a["env"], b["env"])
    first, second = (json.loads((folder / "result.json").read_text()) for folder in (whole, killed))
    assert first | {"wall_s": 0} == second | {"wall_s": 0}
    return report


def assert_same(a, b, where="") -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif torch.is_tensor(a):
        assert torch.equal(a, b) or (a.isnan() == b.isnan()).all(), where
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for x, y in zip(a, b):
            assert_same(x, y, where)
    else:
        assert (a == b) if not hasattr(a, "shape") else (a == b).all(), where


@pytest.mark.parametrize("name", RUNS)
def test_killed_at_random_moments_ends_in_the_same_weights(name, tmp_path):
    report = check(name, 5, tmp_path, 0.8)
    assert report["landed"] >= 2  # kills that hit a run that was not yet finished


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_killed_twenty_times_and_inside_checkpoints(name, tmp_path):
    report = check(name, 30, tmp_path, 0.7)
    assert report["landed"] >= 20
    assert report["inside"] >= 1


def start(args: list[str], out: Path, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "control.train", *args, f"out={out}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_and_says_how_to_resume(number, tmp_path):
    args = [a if not a.startswith("env_options") else f"+{a}" for a in RUNS["sac"]]
    args = [a if not a.startswith("steps") else "steps=100000" for a in args]
    run = start([*args, "log_every=100"], tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(number)
    _, error = run.communicate(timeout=30)
    assert run.returncode == 130, error
    assert "resumes" in error
    assert load_checkpoint(tmp_path / "run" / "checkpoint")["watch"]["step"] > 0


def limited() -> None:
    """Files of this process may not grow beyond 60 kB: a write fails as on a full disk, by the system itself."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))


def test_a_disk_that_is_full_keeps_the_last_checkpoint_and_says_what_to_do(tmp_path):
    args = [a if not a.startswith("env_options") else f"+{a}" for a in RUNS["dsact"]]
    out = tmp_path / "run"
    small = [a if not a.startswith("steps") else "steps=160" for a in args]
    first = start(small, out)
    first.communicate(timeout=60)
    (out / "result.json").unlink()
    before = load_checkpoint(out / "checkpoint")["watch"]["step"]
    config = (
        (out / "config.yaml")
        .read_text()
        .replace("steps: 160", "steps: 3000")
        .replace("batch_size: 32", "batch_size: 32")
    )
    (out / "config.yaml").write_text(config)
    # one big chunk: the run goes on for a while and saves once at its end
    longer = [a if not a.startswith("steps") else "steps=3000" for a in args]
    run = start([*longer, "checkpoint_seconds=1000"], out, preexec_fn=limited)
    _, error = run.communicate(timeout=60)
    assert run.returncode == 2, error
    assert "cannot write the checkpoint" in error
    assert "The last checkpoint is intact" in error
    assert "Traceback" not in error
    assert load_checkpoint(out / "checkpoint")["watch"]["step"] == before
    again = start(longer, out)
    _, error = again.communicate(timeout=60)
    assert again.returncode == 0, error


def filled(capacity: int, steps: int, replay: Replay | None = None) -> Replay:
    replay = replay or Replay(capacity, 2, 3, 1)
    for _ in range(steps):
        t = float(replay.total)
        flag = torch.zeros(1, 2)
        replay.add(torch.full((1, 2, 3), t), torch.zeros(1, 2, 1), flag + t, flag, flag, torch.full((1, 2, 3), t + 1))
    return replay


def restored(store: ReplayStore, state, capacity: int) -> Replay:
    replay = Replay(capacity, 2, 3, 1)
    ReplayStore(store.folder).load(state, replay)
    return replay


def held(replay: Replay) -> list[float]:
    return replay.slice(replay.total - replay.filled, replay.total)[:, 0, 0].tolist()


def test_a_checkpoint_writes_only_what_is_new_and_the_ring_drops_old_chunks(tmp_path):
    store, replay = ReplayStore(tmp_path), filled(10, 4)
    store.save(replay)
    store.collect_garbage()
    size = {f.name: f.stat().st_mtime_ns for f in tmp_path.iterdir()}
    filled(10, 4, replay)
    state = store.save(replay)
    store.collect_garbage()
    assert {n: (tmp_path / n).stat().st_mtime_ns for n in size} == size  # nothing rewritten
    assert [(c["start"], c["end"]) for c in state["chunks"]] == [(0, 3), (3, 7)]
    assert held(restored(store, state, 10)) == held(replay) == [float(i) for i in range(8)]
    filled(10, 9, replay)  # 17 steps, the ring holds 7..16
    state = store.save(replay)
    store.collect_garbage()
    assert [(c["start"], c["end"]) for c in state["chunks"]] == [(7, 16)]
    assert len(list(tmp_path.iterdir())) == 1
    assert held(restored(store, state, 10)) == held(replay) == [float(i) for i in range(7, 17)]


def test_a_restored_ring_draws_the_same_batches(tmp_path):
    store, replay = ReplayStore(tmp_path), filled(10, 23)
    other = restored(store, store.save(replay), 10)
    a, b = (r.sample(64, 0.9, 3, torch.Generator().manual_seed(1)) for r in (replay, other))
    assert all(torch.equal(getattr(a, k), getattr(b, k)) for k in a.__dataclass_fields__)


def test_a_cut_made_after_the_save_is_kept(tmp_path):
    """A bad successor cuts the n-step window of the row before it, which a checkpoint may have written already."""
    store, replay = ReplayStore(tmp_path), filled(10, 4)
    store.save(replay)
    flag = torch.zeros(1, 2)
    bad = torch.tensor([[[float("nan")] * 3, [4.0] * 3]])
    replay.add(bad, torch.zeros(1, 2, 1), flag, flag, flag, bad)
    other = restored(store, store.save(replay), 10)
    assert torch.equal(other.slice(0, 5), replay.slice(0, 5))
    assert other.excluded == replay.excluded == 1


def test_a_missing_or_damaged_chunk_is_named(tmp_path):
    store = ReplayStore(tmp_path)
    state = store.save(filled(10, 5))
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"{file.name} is damaged"):
        restored(store, state, 10)
    file.unlink()
    with pytest.raises(UserError, match=f"{file.name}, which is missing"):
        restored(store, state, 10)
