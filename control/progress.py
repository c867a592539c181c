"""What a person sees of a run: one line per logged row, one per evaluation."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO


class Progress:
    """Lines on ``stream``; on a terminal a row replaces the one before it, and evaluations stay.

    Args:
        total: environment steps of the run.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self.total, self.stream = total, stream or sys.stdout
        self.live = self.stream.isatty()
        self.width = 0

    def show(self, row: Mapping[str, Any]) -> None:
        """A row of the metrics log."""
        text = describe(row, self.total)
        if "eval/success" in row:
            self._print(text, stays=True)
        else:
            self._print(text, stays=not self.live)

    def close(self) -> None:
        if self.live and self.width:
            self._print("", stays=False)

    def _print(self, text: str, stays: bool) -> None:
        padding = " " * max(0, self.width - len(text)) if self.live else ""
        self.stream.write(("\r" if self.live else "") + text + padding + ("\n" if stays else ""))
        self.stream.flush()
        self.width = 0 if stays else len(text)


def describe(row: Mapping[str, Any], total: int) -> str:
    """``step 8,000 / 150,000  812 steps/s  2:55 left  return -3.1  success 45 %``, or the evaluation's figures."""
    step, rate = row.get("step", 0), row.get("steps_per_s") or 0
    parts = [f"step {step:,} / {total:,}"]
    if "eval/success" in row:
        low, high = row.get("eval/success_low"), row.get("eval/success_high")
        interval = f" [{100 * low:.0f}, {100 * high:.0f}]" if low is not None and high is not None else ""
        parts.append(f"evaluation: return {row['eval/return']:.4g} +- {1.96 * (row.get('eval/return_error') or 0):.2g}")
        parts.append(f"success {100 * row['eval/success']:.0f} %{interval}")
        return "  ".join(parts)
    if rate:
        left = max(0, total - step) / rate
        parts += [f"{rate:,.0f} steps/s", f"{int(left // 60)}:{int(left % 60):02d} left"]
    if row.get("return") is not None:
        parts.append(f"return {row['return']:.4g}")
    if row.get("success"):
        parts.append(f"success {100 * row['success']:.0f} %")
    if row.get("excluded"):
        parts.append(f"{row['excluded']} rows excluded")
    return "  ".join(parts)
