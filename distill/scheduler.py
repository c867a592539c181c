"""Runs a graph of stages as subprocesses, a few at a time, with a live table; finished stages are never run again."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sims.errors import UserError

TAIL_BYTES = 8192
POLL_SECONDS = 0.25
STOP_SECONDS = 20.0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Stage:
    """One step of a chain.

    Attributes:
        name: unique; also the name of its log file.
        argv: arguments after ``python -m``.
        product: the file whose existence says that the stage is finished.
        needs: names of the stages that must be finished first.
        metrics: the ``metrics.jsonl`` that the stage appends its progress to.
        expected_s: seconds it takes on a free core, for the time left.
    """

    name: str
    argv: tuple[str, ...]
    product: Path
    needs: tuple[str, ...] = ()
    metrics: Path | None = None
    expected_s: float = 30.0

    @property
    def key(self) -> str:
        """Hash of the command line: a finished stage counts only while its command is the same."""
        return hashlib.sha256(json.dumps(self.argv).encode()).hexdigest()[:16]


@dataclass
class Job:
    """What happened to a stage in this call."""

    stage: Stage
    state: str = "waiting"
    started: float = 0.0
    seconds: float = 0.0
    process: subprocess.Popen[bytes] | None = None


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold a folder against a second pipeline; the lock dies with the process, so kill -9 leaves none behind."""
    folder.mkdir(parents=True, exist_ok=True)
    handle: IO[str]
    with open(folder / ".lock", "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"{folder} is in use by another pipeline; wait for it or choose another run=") from error
        yield


def run_stages(
    stages: Sequence[Stage], folder: Path, workers: int, display: Any, fresh: tuple[str, ...] = ()
) -> dict[str, Job]:
    """Run every unfinished stage whose needs are met, ``workers`` at a time.

    Args:
        stages: the graph; ``needs`` refer to names in it.
        folder: run folder; ``stages.json`` and ``logs/`` are written there.
        workers: processes side by side.
        display: object with ``update(jobs)``.
        fresh: stages to run even when they are finished.

    Raises:
        UserError: a stage failed; the others that were running are finished first, nothing is deleted.
        KeyboardInterrupt: after asking the running stages to save and stop.
    """
    history = _read_history(folder)
    jobs = {s.name: Job(s) for s in stages}
    for job in jobs.values():
        past = history.get(job.stage.name, {})
        finished = past.get("status") == "done" and past.get("key") == job.stage.key
        if finished and job.stage.product.exists() and job.stage.name not in fresh:
            job.state, job.seconds = "reused", past.get("seconds", 0.0)
    try:
        while not _all_ended(jobs):
            _reap(jobs, history, folder)
            _launch(jobs, workers, folder)
            display.update(jobs)
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        _stop(jobs, history, folder)
        raise
    finally:
        display.update(jobs)
    failed = [j for j in jobs.values() if j.state == "failed"]
    if failed:
        names = ", ".join(j.stage.name for j in failed)
        log = _log(folder, failed[0].stage)
        raise UserError(f"stage {names} failed; its last words:\n{_last_words(log)}\nfull log: {log}")
    return jobs


def _all_ended(jobs: dict[str, Job]) -> bool:
    running = any(j.state == "running" for j in jobs.values())
    ready = any(j.state == "waiting" and _ready(j, jobs) for j in jobs.values())
    blocked = any(j.state == "failed" for j in jobs.values())
    return not running and (blocked or not ready)


def _ready(job: Job, jobs: dict[str, Job]) -> bool:
    return all(jobs[name].state in ("done", "reused") for name in job.stage.needs)


def _launch(jobs: dict[str, Job], workers: int, folder: Path) -> None:
    """Start ready stages, the longest first; none once something failed."""
    if any(j.state == "failed" for j in jobs.values()):
        return
    waiting = [j for j in jobs.values() if j.state == "waiting" and _ready(j, jobs)]
    free = workers - sum(j.state == "running" for j in jobs.values())
    for job in sorted(waiting, key=lambda j: -j.stage.expected_s)[: max(free, 0)]:
        log = _log(folder, job.stage)
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as out:
            job.process = subprocess.Popen(
                [sys.executable, "-m", *job.stage.argv],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                preexec_fn=_die_with_parent,
            )
        job.state, job.started = "running", time.time()


def _die_with_parent() -> None:
    """Own process group, so that Ctrl-C reaches only the pipeline; SIGKILL when the pipeline is killed."""
    os.setpgrp()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _reap(jobs: dict[str, Job], history: dict[str, Any], folder: Path) -> None:
    for job in jobs.values():
        if job.state != "running" or job.process is None:
            continue
        job.seconds = time.time() - job.started
        code = job.process.poll()
        if code is None:
            continue
        job.state = "done" if code == 0 and job.stage.product.exists() else "failed"
        _record(job, history, folder, code)


def _record(job: Job, history: dict[str, Any], folder: Path, code: int | None) -> None:
    earlier = history.get(job.stage.name, {})
    unfinished = earlier.get("status") in ("failed", "stopped") and earlier.get("key") == job.stage.key
    resumed = earlier.get("seconds", 0.0) if unfinished else 0.0
    history[job.stage.name] = {
        "name": job.stage.name,
        "status": job.state,
        "started": job.started,
        "seconds": round(job.seconds + resumed, 2),
        "exit_status": code,
        "key": job.stage.key,
        "command": " ".join(job.stage.argv),
    }
    temporary = folder / "stages.json.tmp"
    temporary.write_text(json.dumps(list(history.values()), indent=1))
    temporary.replace(folder / "stages.json")


def _read_history(folder: Path) -> dict[str, Any]:
    path = folder / "stages.json"
    if not path.exists():
        return {}
    try:
        return {row["name"]: row for row in json.loads(path.read_text())}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); delete it: stages then run again over their folders") from error


def _stop(jobs: dict[str, Job], history: dict[str, Any], folder: Path) -> None:
    """Ask the running stages to save and end; kill those that do not within STOP_SECONDS."""
    running = [j.process for j in jobs.values() if j.state == "running" and j.process is not None]
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + STOP_SECONDS
    for process in running:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    for job in jobs.values():
        if job.state == "running" and job.process is not None:
            job.state = "stopped"
            _record(job, history, folder, job.process.returncode)


def _log(folder: Path, stage: Stage) -> Path:
    return folder / "logs" / f"{stage.name.replace('/', '.')}.log"


def _last_words(log: Path, lines: int = 15) -> str:
    return "\n".join("  " + line for line in log.read_text(errors="replace").splitlines()[-lines:])


def last_row(path: Path | None) -> dict[str, Any]:
    """The newest complete row of a ``metrics.jsonl``, ``{}`` when there is none."""
    if path is None or not path.exists():
        return {}
    with open(path, "rb") as handle:
        handle.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = handle.read().splitlines()
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:  # a row that is being written
            continue
        if isinstance(row, dict):
            return row
    return {}
