"""Learning curves as one SVG, written by hand: every seed as a thin line, their mean as a thick one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from control.benchmark_report import NAMES, Runs, finals, label

PANEL, HEIGHT, LEFT, TOP, GAP = 300, 200, 56, 34, 76  # px: width and height of a panel's field, and margins around it
# told apart by the colour-blind, one per name
COLOURS = dict(
    zip(NAMES.values(), ("#0072b2", "#56b4e9", "#009e73", "#d55e00", "#e69f00", "#7a7a7a", "#cc79a7"), strict=True)
)
Seeds = Mapping[int, Mapping[str, Any]]
Panel = tuple[str, dict[str, Seeds]]  # title, name of a line -> its seeds


def learning_svg(runs: Runs) -> str:
    """One panel per world with the unscaled learners, and one of final returns over reward scales."""
    plain: dict[str, dict[str, Seeds]] = {}
    scaled: dict[str, dict[str, Seeds]] = {}
    for (env, group), seeds in sorted(runs.items()):
        if not env.startswith("gym/") or "bfloat16" in group:
            continue
        scale = next(iter(seeds.values()))["scale"]
        name = label(group).partition(",")[0]
        scaled.setdefault(f"{env}: final return", {})[f"{name} x {scale:g}"] = seeds
        if scale == 1:
            plain.setdefault(env, {})[name] = seeds
    drawn = [_curves(title, lines, i) for i, (title, lines) in enumerate(plain.items())]
    strips = [(title, lines) for title, lines in scaled.items() if len(lines) > 3]
    drawn += [_strip(title, lines, len(drawn)) for title, lines in strips]
    width = len(drawn) * (PANEL + GAP) + 20
    style = "text{font:11px sans-serif;fill:#777} .axis{stroke:#999;fill:none} .title{font-size:13px}"
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {TOP + HEIGHT + 90}" role="img">'
            f"<style>{style}</style>\n" + "\n".join(drawn) + "\n</svg>\n")  # fmt: skip


def _curves(title: str, lines: Mapping[str, Seeds], column: int) -> str:
    curves = {name: [run["curve"] for run in seeds.values()] for name, seeds in lines.items()}
    top = max(row["return"] for seeds in curves.values() for curve in seeds for row in curve)
    last = max(row["step"] for seeds in curves.values() for curve in seeds for row in curve)
    parts = [_frame(title, top), _text(PANEL, HEIGHT + 16, f"{last:,} steps", "end"), _text(0, HEIGHT + 16, "0")]
    for name, seeds in curves.items():
        colour = COLOURS[name]
        for curve in seeds:
            parts.append(_line([(row["step"] / last, row["return"] / top) for row in curve], colour, 1, 0.35))
        steps = [row["step"] / last for row in seeds[0]]
        mean = np.mean([[row["return"] for row in curve] for curve in seeds], 0) / top
        parts.append(_line(list(zip(steps, mean.tolist())), colour, 2.5, 1.0))
    return _group([*parts, *_legend(list(curves))], column)


def _strip(title: str, lines: Mapping[str, Seeds], column: int) -> str:
    """Every seed's final return as a dot, one place per learner and scale."""
    top = max(max(finals(seeds)) for seeds in lines.values())
    parts = [_frame(title, top)]
    learners = list(dict.fromkeys(name.partition(" x ")[0] for name in sorted(lines)))
    for index, (name, seeds) in enumerate(sorted(lines.items())):
        learner, _, scale = name.partition(" x ")
        x, values = (index + 0.5) / len(lines) * PANEL, finals(seeds)
        for place, value in enumerate(values):
            side = (place - (len(values) - 1) / 2) * 4  # px apart, so that equal points stay visible
            y, colour = HEIGHT * (1 - value / top), COLOURS[learner]
            parts.append(f'<circle cx="{x + side:.1f}" cy="{y:.1f}" r="3" fill="{colour}" opacity="0.7"/>')
        parts.append(_text(x, HEIGHT + 16, f"\u00d7{scale}", "middle"))
    return _group([*parts, *_legend(learners)], column)


def _legend(names: Sequence[str]) -> list[str]:
    """One line per name below the field, in the colours of their order."""
    return [_text(0, HEIGHT + 34 + 14 * i, name, colour=COLOURS[name]) for i, name in enumerate(names)]


def _frame(title: str, top: float) -> str:
    axis = f'<path class="axis" d="M0 0V{HEIGHT}H{PANEL}"/>'
    ticks = "".join(_text(-6, HEIGHT * (1 - part) + 4, f"{top * part:.0f}", "end") for part in (0, 0.5, 1))
    return f'<text class="title" x="0" y="-14">{escape(title.partition("/")[2])}</text>{axis}{ticks}'


def _line(points: Sequence[tuple[float, float]], colour: str, width: float, opacity: float) -> str:
    way = " ".join(f"{x * PANEL:.1f},{HEIGHT * (1 - y):.1f}" for x, y in points)
    return f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="{width}" opacity="{opacity}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "") -> str:
    style = f' style="fill:{colour};font-weight:bold"' if colour else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _group(parts: Sequence[str], column: int) -> str:
    return f'<g transform="translate({LEFT + column * (PANEL + GAP)} {TOP})">{"".join(parts)}</g>'
