"""What a figure of speed depends on, and how to hold it still: one pinned thread, alternated blocks."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "mujoco", "gymnasium", "stable-baselines3", "sbx-rl", "jax", "robot-distillery")


def machine() -> dict[str, Any]:
    """Processor, threads and versions."""
    versions = {name: version for name in PACKAGES if (version := _version(name))}
    return {"cpu": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), **versions}


@contextmanager
def pinned() -> Iterator[None]:
    """One thread on one core; threads that libraries start meanwhile stay on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as the product trains
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if cores:
        os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    for line in file.read_text().splitlines() if file.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


Contestants = dict[str, Callable[[], float]]  # name -> one block; returns milliseconds per unit of work


def alternate(contestants: Contestants, blocks: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Blocks of all contestants in turn, after one each that does not count: what slows the machine slows all.

    The order is turned by one place every round, so that nobody always follows the same neighbour.
    """
    names = list(contestants)
    for name in names:
        contestants[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    for block in range(blocks):
        for name in names[block % len(names) :] + names[: block % len(names)]:
            times[name].append(round(contestants[name](), 5))
        say(f"  block {block + 1}/{blocks}: " + ", ".join(f"{n} {times[n][-1]:.3f} ms" for n in names))
    return {"blocks_ms": times, "machine": machine()}


def timed(
    work: Callable[[], Any], calls: int = 1, units: int = 1, clock: Callable[[], float] = time.process_time
) -> Callable[[], float]:
    """A block: ``work``, which does ``units`` units, called ``calls`` times; milliseconds of one unit.

    The clock counts what the process spent on the processor: on one pinned thread that is the time of an idle machine,
    and other processes, which would make wall times jump by a factor of two, hardly touch it.
    """

    def block() -> float:
        start = clock()
        for _ in range(calls):
            work()
        return (clock() - start) / (calls * units) * 1e3

    return block
