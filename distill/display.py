"""The live table of a pipeline: stage, progress, steps/s, return, success, time left."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from distill.scheduler import Job, last_row

STYLES = {"done": "green", "reused": "green", "running": "bold", "failed": "red", "stopped": "yellow", "waiting": "dim"}
PLAIN_SECONDS = 15.0


class Display:
    """A rich table on a terminal, plain lines elsewhere (a log file must stay readable)."""

    def __init__(self, workers: int, console: Console | None = None) -> None:
        self.workers, self.console = workers, console or Console()
        self.live = Live(console=self.console, refresh_per_second=4) if self.console.is_terminal else None
        self.started = time.monotonic()
        self.shown: dict[str, str] = {}
        self.last_plain = 0.0

    def __enter__(self) -> Display:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.live:
            self.live.stop()

    def update(self, jobs: dict[str, Job]) -> None:
        """Show the current state of all stages."""
        if self.live:
            self.live.update(self._table(jobs))
        else:
            self._plain(jobs)

    def _table(self, jobs: dict[str, Job]) -> Group:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column, justify in (("stage", "left"), ("", "left"), ("progress", "left"), ("steps/s", "right")):
            table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        for column in ("return", "success", "time"):
            table.add_column(column, justify="right", no_wrap=True)
        for job in jobs.values():
            row = last_row(job.stage.metrics) if job.state == "running" else {}
            bar = ProgressBar(total=100, completed=100 * fraction(job, row), width=24)
            style = STYLES[job.state]
            table.add_row(
                Text(job.stage.name, style=style), Text(job.state, style=style), bar, number(row.get("steps_per_s"), 0),
                number(row.get("return"), 1), percent(row.get("success")), clock(job.seconds),
            )  # fmt: skip
        left = time_left(jobs, self.workers)
        return Group(table, Text(f"elapsed {clock(time.monotonic() - self.started)}, about {clock(left)} left", "dim"))

    def _plain(self, jobs: dict[str, Job]) -> None:
        for name, job in jobs.items():
            if self.shown.get(name) != job.state and job.state != "waiting":
                self.console.print(
                    f"{name}: {job.state} {clock(job.seconds) if job.state != 'running' else ''}".rstrip()
                )
            self.shown[name] = job.state
        if time.monotonic() - self.last_plain > PLAIN_SECONDS:
            self.last_plain = time.monotonic()
            for name, job in jobs.items():
                row = last_row(job.stage.metrics) if job.state == "running" else {}
                if row:
                    self.console.print(
                        f"  {name}: {100 * fraction(job, row):.0f}% {number(row.get('steps_per_s'), 0)} steps/s "
                        f"return {number(row.get('return'), 1)} success {percent(row.get('success'))} "
                        f"({clock(time_left(jobs, self.workers))} left in all)"
                    )


def fraction(job: Job, row: dict[str, Any]) -> float:
    """Share of a stage that is done, from its own progress row, or from the clock."""
    if job.state in ("done", "reused"):
        return 1.0
    if job.state == "waiting":
        return 0.0
    if row.get("total"):
        return min(1.0, float(row["step"]) / float(row["total"]))
    return min(0.95, job.seconds / max(job.stage.expected_s, 1.0))


def time_left(jobs: dict[str, Job], workers: int) -> float:
    """Seconds left: the longest chain of unfinished stages, or the work shared over the workers: the longer one."""
    rest = {n: max(2.0, j.stage.expected_s - j.seconds) for n, j in jobs.items() if j.state in ("waiting", "running")}
    finish: dict[str, float] = {}

    def end(name: str) -> float:
        if name not in finish:
            needs = [end(n) for n in jobs[name].stage.needs if n in rest]
            finish[name] = rest.get(name, 0.0) + max(needs, default=0.0)
        return finish[name]

    return max(max((end(n) for n in rest), default=0.0), sum(rest.values()) / max(workers, 1))


def clock(seconds: float) -> str:
    """``m:ss``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def number(value: Any, digits: int) -> str:
    """A number, or an en dash where there is none."""
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else "–"


def percent(value: Any) -> str:
    """A share as a percentage, or an en dash."""
    return f"{100 * value:.0f}%" if isinstance(value, (int, float)) else "–"
