"""What a person sees of a run: a live bar with a line of figures on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

REFRESH_SECONDS = 0.25
PLAIN_SECONDS = 10.0  # between two lines of a log file, which must stay readable


class Counters(Protocol):
    """What the display reads of a run between two rows."""

    step: int
    last_eval: int


class Progress:
    """Evaluations stay on the screen; what lies between them is a bar that moves, or a line every ten seconds.

    Args:
        world: environment and learner, the title.
        has_success: whether a success of 0 is worth showing.
        total: environment steps of the run.
        eval_every: environment steps between evaluations, 0: none.
    """

    def __init__(
        self, world: str, total: int, eval_every: int, counters: Counters, console: Console | None = None,
        has_success: bool = False,
    ) -> None:  # fmt: skip
        self.world, self.total, self.eval_every, self.counters = world, total, eval_every, counters
        self.console = console or Console(highlight=False)
        self.live: Live | None = None
        self.row: Mapping[str, Any] = {}
        self.evaluated = ""  # figures of the last evaluation
        self.has_success = has_success
        self.begun, self.shown = time.monotonic(), -math.inf
        self.first_step: int | None = None

    def tick(self) -> None:
        """Call it as often as you like, from the loop's own thread; it draws at most four times a second."""
        if self.first_step is None:  # of this process: a resumed run begins later
            self.first_step, self.begun = self.counters.step, time.monotonic()
        if not self.console.is_terminal or time.monotonic() - self.shown < REFRESH_SECONDS:
            return
        self.shown = time.monotonic()
        if self.live is None:
            self.live = Live(console=self.console, auto_refresh=False, transient=True)
            self.live.start()
        self.live.update(self._panel(), refresh=True)

    def show(self, row: Mapping[str, Any]) -> None:
        """A row of the metrics log, as written."""
        self.has_success = self.has_success or bool(row.get("success") or row.get("eval/success"))
        if "eval/return" in row:
            self.evaluated = evaluation(row, self.has_success)
            self.console.print(f"step {row['step']:,} / {self.total:,}  evaluation: {self.evaluated}", style="green")
            return
        self.row = row
        if not self.console.is_terminal and time.monotonic() - self.shown > PLAIN_SECONDS:
            self.shown = time.monotonic()
            self.console.print("  ".join([f"step {row['step']:,} / {self.total:,}", *self._speed(), *self._figures()]))

    def finish(self, row: Mapping[str, Any], out: Path) -> None:
        """The last evaluation, on fresh starts."""
        self.close()
        self.has_success = self.has_success or bool(row.get("eval/success"))
        self.console.print(f"last evaluation: {evaluation(row, self.has_success)}", style="bold green")
        self.console.print(f"wrote {out}: policy/ to run, result.json and metrics.csv to read", style="dim")

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _panel(self) -> Group:
        step = self.counters.step
        table = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self.total, completed=min(step, self.total), width=24)
        table.add_row(Text(self.world, "bold"), bar, f"{step:,} / {self.total:,}", *self._speed())
        last = [f"last evaluation: {self.evaluated}"] if self.evaluated else []
        return Group(table, Text("  ".join([*self._figures(), *last, *self._next()]), "dim"))

    def _speed(self) -> list[str]:
        """``812 steps/s``, ``2:55 left``: of this process, evaluations included."""
        step, seconds = self.counters.step, time.monotonic() - self.begun
        done = step - (self.first_step or 0)
        if not done or seconds <= 0:
            return []
        return [f"{done / seconds:,.0f} steps/s", f"{clock(max(0, self.total - step) * seconds / done)} left"]

    def _figures(self) -> list[str]:
        row = self.row
        parts = [f"{row['updates']:,} updates"] if row.get("updates") else []
        parts += [f"return {row['return']:.4g}"] if row.get("return") is not None else []
        if self.has_success and row.get("success") is not None:
            parts.append(f"success {100 * row['success']:.0f} %")
        return parts + ([f"{row['excluded']} rows excluded"] if row.get("excluded") else [])

    def _next(self) -> list[str]:
        """Half of ``eval_every`` may be enough, near the stop."""
        due = self.counters.last_eval + self.eval_every - self.counters.step
        return [f"evaluation within {max(0, due):,} steps"] if self.eval_every else []


def evaluation(row: Mapping[str, Any], has_success: bool) -> str:
    """``return 84.4 [83.6, 85.2]  success 98 % [89, 100]``: means with their 95 % intervals."""
    low, high = row.get("eval/return_low"), row.get("eval/return_high")
    text = f"return {row['eval/return'] or 0:.4g}"
    text += f" [{low:.4g}, {high:.4g}]" if low is not None and high is not None else ""
    if not has_success:
        return text
    bounds = [100 * row[f"eval/success_{end}"] for end in ("low", "high")]
    return f"{text}  success {100 * row['eval/success']:.0f} % [{bounds[0]:.0f}, {bounds[1]:.0f}]"


def clock(seconds: float) -> str:
    """``m:ss``, with hours where there are any."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
