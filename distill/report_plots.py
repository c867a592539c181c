"""Plots as inline SVG, drawn by hand so that they stay sharp and follow the page's light or dark colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distill.report_html import Html, duration, el, percent_text, short

WIDTH, LEFT, RIGHT = 340, 34, 14  # px of a curve's view box: whole width, and margins for tick labels


Span = tuple[float, float]  # smallest and largest value, or top and bottom in px


def interval(success: dict[str, Any] | None, target: float | None = None) -> Html | None:
    """A rate on a track from nothing to all: a dot, the interval as a band, the target as a tick."""
    if not success:
        return None
    rate, low = (f"{100 * success[key]:.2f}%" for key in ("rate", "low"))
    width = f"{100 * (success['high'] - success['low']):.2f}%"
    missed = target is not None and success["rate"] < target
    bounds = " to ".join(percent_text(success[key]) for key in ("low", "high"))
    label = f"{percent_text(success['rate'])}, interval {bounds}"
    marks = [
        el("line", x1="0", x2="100%", y1="7", y2="7", cls="track"),
        el("rect", x=low, width=width, y="4", height="6", rx="3", cls="band"),
        target is not None and el("line", x1=f"{100 * target}%", x2=f"{100 * target}%", y1="0", y2="14", cls="goal"),
        el("circle", cx=rate, cy="7", r="3.5", cls="dot"),
    ]
    return el("svg", marks, cls="interval missed" if missed else "interval", role="img", aria_label=label, height="14")


def learning_curve(curve: dict[str, Any], row: dict[str, Any] | None = None) -> Html:
    """Success over steps, the demonstrator as a dashed line, the final evaluation as a dot with its interval.

    Below it, in half the height, the return that the learner saw (or the loss, where there is no return).
    """
    row = row or {}
    top, middle, bottom = 10, 118, 178
    lower = "return" if "return" in curve else "loss" if "loss" in curve else None
    has_success = "success" in curve
    height = bottom + 24 if lower and has_success else middle + 24
    floor = bottom if lower and has_success else middle
    parts: list[Any] = [_x_axis(curve["step"], floor)]
    if has_success:
        parts += [_percent_axis(top, middle), _baseline(row.get("demonstrator"), top, middle)]
        parts += [_line(curve["step"], curve["success"], (0.0, 1.0), (top, middle), "curve")]
        parts += [_final(row.get("success"), top, middle)]
    if lower:
        span = (middle + 16, bottom) if has_success else (top, middle)
        bounds = _bounds(curve[lower])
        parts += [_line(curve["step"], curve[lower], bounds, span, "curve second"), _range_axis(bounds, span)]
        parts += [_series_name(lower, curve[lower][-1], bounds, span)]
    label = f"learning curve over {short(curve['step'][-1])} steps"
    return el("svg", parts, viewBox=f"0 0 {WIDTH} {height}", cls="plot", role="img", aria_label=label)


def _x(step: float, last: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (step / last if last else 0)


def _y(value: float, bounds: Span, span: Span) -> float:
    low, high = bounds
    share = (value - low) / (high - low) if high > low else 0.5
    return span[1] - (span[1] - span[0]) * share


def _line(steps: Sequence[float], values: Sequence[float | None], bounds: Span, span: Span, cls: str = "curve") -> Html:
    points = [(_x(s, steps[-1]), _y(v, bounds, span)) for s, v in zip(steps, values) if v is not None]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    if cls != "curve":
        return el("path", d=path, cls=cls)
    area = f"{path}L{points[-1][0]:.1f} {span[1]}L{points[0][0]:.1f} {span[1]}Z"
    return el("g", el("path", d=area, cls="area"), el("path", d=path, cls=cls))


def _percent_axis(top: float, bottom: float) -> Html:
    marks = []
    for share in (0.0, 0.5, 1.0):
        y = _y(share, (0, 1), (top, bottom))
        marks += [el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, cls="grid"),
                  el("text", f"{100 * share:.0f}", x=LEFT - 6, y=y + 3.5, text_anchor="end")]  # fmt: skip
    return el("g", marks, cls="axis")


def _range_axis(bounds: Span, span: Span) -> Html:
    marks = [el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=span[1], y2=span[1], cls="grid")]
    for value, y in zip(bounds, (span[1], span[0] + 4)):
        marks.append(
            el(
                "text",
                (f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}").replace("-", "−"),
                x=LEFT - 6,
                y=y + 2,
                text_anchor="end",
            )
        )
    return el("g", marks, cls="axis")


def _series_name(name: str, last: float | None, bounds: Span, span: Span) -> Html:
    """Name of the lower series, on the side of its end where the line is not."""
    low = last is not None and _y(last, bounds, span) > sum(span) / 2
    return el("text", name, x=WIDTH - RIGHT, y=span[0] + 7 if low else span[1] - 5, text_anchor="end")


def _x_axis(steps: Sequence[float], floor: float) -> Html:
    last = steps[-1]
    marks = [
        el("text", short(tick), x=f"{_x(tick, last):.1f}", y=floor + 15, text_anchor="middle") for tick in ticks(last)
    ]
    return el("g", marks, cls="axis")


def ticks(last: float) -> list[float]:
    """Round numbers from 0 to ``last``: 3 to 5 of them, 1, 2 or 5 times a power of ten apart."""
    if last <= 0:
        return [0]
    base = 10 ** math.floor(math.log10(last / 2))
    size = next(base * m for m in (1, 2, 5, 10) if last / (base * m) < 5)
    return [size * i for i in range(int(last / size) + 1)]


def _baseline(success: dict[str, Any] | None, top: float, bottom: float) -> Html | None:
    if not success:
        return None
    y = _y(success["rate"], (0, 1), (top, bottom))
    return el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, cls="baseline")


def _final(success: dict[str, Any] | None, top: float, bottom: float) -> Html | None:
    if not success:
        return None
    x, (low, rate, high) = WIDTH - RIGHT, (_y(success[k], (0, 1), (top, bottom)) for k in ("low", "rate", "high"))
    return el(
        "g", el("line", x1=x, x2=x, y1=low, y2=high, cls="whisker"), el("circle", cx=x, cy=rate, r="3.5", cls="dot")
    )


def _bounds(values: Sequence[float | None]) -> Span:
    known = [value for value in values if value is not None]
    return (min(0.0, min(known)), max(known))


def timeline(stages: Sequence[dict[str, Any]]) -> Html:
    """When each stage ran, as bars over the wall time of the whole run."""
    ends = [row["begin_s"] + (row["seconds"] or 0.0) for row in stages]
    whole = max(ends, default=0.0) or 1.0
    return el("div", [_bar(row, row["begin_s"] / whole, end / whole) for row, end in zip(stages, ends)], cls="timeline")


def _bar(stage: dict[str, Any], begin: float, end: float) -> Html:
    time = stage["status"] if stage["seconds"] is None else duration(stage["seconds"])
    style = f"left:{100 * begin:.2f}%;width:{max(100 * (end - begin), 0.4):.2f}%"
    bar = el("i", style=style, cls=f"is-{slug(stage['status'])}")
    return el("div", el("span", stage["name"], cls="stage"), el("span", bar, cls="lane"), el("span", time, cls="time"))


def slug(text: str) -> str:
    """Letters, digits and hyphens only."""
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in text.lower())
