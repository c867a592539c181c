"""Runs a training undisturbed, then the same in children that are killed with SIGKILL at random moments.

Children are forks, which saves the seconds of importing torch; after the fork each is a process of its own, with its
own signals. The last one is left to finish. Prints a JSON object: how many kills landed in a run that was not yet
finished, how many of them inside the writing of a checkpoint, and the exit statuses of the two runs that finished.
usage: kill_driver.py KILLS INSIDE LONGEST_SECONDS FOLDER -- <command line of control.train without out=>

There are more than KILLS if fewer than INSIDE of them fell into the writing of a checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from control.checkpoint import has_checkpoint, load_checkpoint  # imports torch, once
from control.train import main
from sims.registry import make

make("gym/Pendulum-v1", 1).close()


def child(args: list[str]) -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(main(args))
    return pid


def finish(args: list[str]) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child(args), 0)[1])


def drive(kills: int, wanted: int, longest: float, folder: Path, args: list[str]) -> dict[str, object]:
    whole = finish([*args, f"out={folder}/whole"])
    rng, landed, inside = random.Random(1), 0, 0
    out = folder / "killed"
    args = [*args, f"out={out}", "checkpoint_seconds=0"]  # after every iteration, so that many kills fall into one
    tries = 0
    while tries < kills or (inside < wanted and tries < 5 * kills):
        tries += 1
        before, pid = marks(out), child(args)
        if tries % 2:  # at any moment
            time.sleep(rng.uniform(0.05, longest))
        else:  # soon after a checkpoint, when the next ones are being written
            wait_for_change(out / "checkpoint" / "state.json", 2 * longest)
            time.sleep(rng.uniform(0.0, 0.03))
        os.kill(pid, signal.SIGKILL)
        landed += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        inside += half_written(out) and marks(out) != before  # not what an earlier kill left
        if has_checkpoint(out / "checkpoint"):
            load_checkpoint(out / "checkpoint")  # raises where it is not readable
    return {"landed": landed, "inside": inside, "status": [whole, finish(args)]}


def wait_for_change(file: Path, seconds: float) -> None:
    deadline, before = time.monotonic() + seconds, modified(file)
    while modified(file) in (before, None) and time.monotonic() < deadline:
        time.sleep(0.001)


def modified(file: Path) -> int | None:
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:  # there is none yet, or it is being replaced
        return None


def marks(out: Path) -> dict[str, int]:
    return {str(f): f.stat().st_mtime_ns for f in out.glob("*/*") if f.parent.name in ("checkpoint.new", "replay")}


def half_written(out: Path) -> bool:
    """A new checkpoint beside the old one, or rows in replay that no checkpoint names."""
    if (out / "checkpoint.new").is_dir() or (out / "checkpoint.old").is_dir():
        return True
    if not has_checkpoint(out / "checkpoint") or not (out / "replay").is_dir():
        return False
    chunks = load_checkpoint(out / "checkpoint")["replay"]["chunks"]
    size = (2 * 3 + 1 + 3) * 4 * 2  # bytes of a time step: two pendulums
    return sum(f.stat().st_size for f in (out / "replay").iterdir()) > size * sum(c["steps"] for c in chunks)


if __name__ == "__main__":
    split = sys.argv.index("--")
    numbers = sys.argv[1:split]
    report = drive(int(numbers[0]), int(numbers[1]), float(numbers[2]), Path(numbers[3]), sys.argv[split + 1 :])
    print(json.dumps(report))
