"""Runs one training in forked children and kills them with SIGKILL at random moments, until one of them finishes.

A fork saves the seconds of importing torch; everything after the fork is a process of its own, with its own signals.
usage: kill_driver.py KILLS SEED LONGEST_SECONDS -- <command line of control.train>
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time

from control.checkpoint import load_checkpoint  # imports torch, once
from control.train import main
from sims.registry import make

make("gym/Pendulum-v1", 1).close()


def child(args: list[str]) -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(main(args))
    return pid


def drive(kills: int, seed: int, longest: float, args: list[str]) -> dict[str, int]:
    rng = random.Random(seed)
    landed = inside = 0
    out = next(a.split("=", 1)[1] for a in args if a.startswith("out="))
    for _ in range(kills):
        pid = child(args)
        time.sleep(rng.uniform(0.05, longest))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        landed += os.WIFSIGNALED(status)
        inside += os.path.isdir(f"{out}/checkpoint.new") or not os.path.isdir(f"{out}/checkpoint")
        from pathlib import Path

        from control.checkpoint import has_checkpoint

        if has_checkpoint(Path(out) / "checkpoint"):
            load_checkpoint(Path(out) / "checkpoint")  # raises where it is not readable
    _, status = os.waitpid(child(args), 0)
    return {"landed": landed, "inside": inside, "status": os.waitstatus_to_exitcode(status)}


if __name__ == "__main__":
    split = sys.argv.index("--")
    numbers = sys.argv[1:split]
    print(json.dumps(drive(int(numbers[0]), int(numbers[1]), float(numbers[2]), sys.argv[split + 1 :])))
