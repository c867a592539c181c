"""Readers for the files of a run: a missing file reads as nothing, a damaged one is a UserError that names it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from sims.errors import UserError

CONFIDENCE = 0.95  # of every interval in the report
_Z = 1.959963984540054  # standard normal quantile of (1 + CONFIDENCE) / 2

Row = Mapping[str, Any]


def read_json(path: Path) -> Any:
    """Content of a JSON file, or ``None`` when there is no such file.

    Raises:
        UserError: the file is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise damaged(path, str(error)) from error


def read_object(path: Path) -> dict[str, Any]:
    """Content of a JSON file that holds an object; empty when there is no such file.

    Raises:
        UserError: the file is not JSON, or not an object.
    """
    content = read_json(path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise damaged(path, f"an object {{...}} was expected, found {type(content).__name__}")
    return content


def read_list(path: Path, *keys: str) -> list[dict[str, Any]]:
    """Rows of a JSON file: a list of objects, or an object that holds such a list under one of ``keys``."""
    content = read_json(path)
    if isinstance(content, dict):
        content = next((content[k] for k in keys if k in content), content)
    if isinstance(content, dict):  # {name: row}
        content = [{"name": name, **row} for name, row in content.items() if isinstance(row, dict)]
    if content is None:
        return []
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise damaged(path, "a list of objects was expected")
    return content


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file; empty when there is no such file.

    A torn *last* line is dropped, because a killed process leaves one; damage anywhere else is an error.

    Raises:
        UserError: a line before the last is not a JSON object.
    """
    if not path.is_file():
        return []
    lines = path.read_bytes().decode("utf-8", errors="replace").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise damaged(path, f"line {number}: {error}") from error
        if not isinstance(row, dict):
            raise damaged(path, f"line {number}: an object was expected, found {type(row).__name__}")
        rows.append(row)
    return rows


def pick(row: Row, *names: str, default: Any = None) -> Any:
    """First of ``names`` that the row has; a dot descends (``"gate.rejected"``)."""
    for name in names:
        value: Any = row.get(name)
        if value is None and "." in name:
            value = row
            for part in name.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return default


def number(row: Row, *names: str) -> float | None:
    """First finite number among ``names``, or ``None``."""
    for name in names:
        value = pick(row, name)
        if isinstance(value, bool):
            return float(value)
        if isinstance(value, (int, float)) and math.isfinite(value):
            return value
    return None


def counts(row: Row, where: Path, control_hz: float) -> dict[str, Any] | None:
    """Successes of a number of episodes, with the Wilson interval and the cycle time; ``None`` where not measured.

    Returns:
        ``successes``, ``episodes``, ``rate``, ``low``, ``high`` (fractions), ``cycle_steps`` and ``cycle_s`` (or None).

    Raises:
        UserError: more successes than episodes, or a negative number.
    """
    episodes = number(row, "episodes", "n")
    successes = number(row, "successes", "k")
    if successes is None and episodes and (rate := number(row, "success", "success_rate", "rate")) is not None:
        successes = rate * episodes
    if not episodes or successes is None:
        return None
    k, n = round(successes), round(episodes)
    if not 0 <= k <= n:
        raise damaged(where, f"{k} successes of {n} episodes")
    low, high = wilson(k, n)
    steps = number(row, "cycle_steps", "cycle_steps_mean", "cycle")
    seconds = steps / control_hz if steps is not None else number(row, "cycle_s", "cycle_seconds")
    return {"successes": k, "episodes": n, "rate": k / n, "low": low, "high": high,
            "cycle_steps": steps, "cycle_s": seconds}  # fmt: skip


def pool(parts: Iterable[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Several counts as one: sums, with the cycle time weighted by successes (it is measured on those only)."""
    rows = [part for part in parts if part]
    n = sum(row["episodes"] for row in rows)
    if not n:
        return None
    k = sum(row["successes"] for row in rows)
    low, high = wilson(k, n)
    timed = [row for row in rows if row["cycle_s"] is not None and row["successes"]]
    weight = sum(row["successes"] for row in timed)
    mean = {key: sum(row[key] * row["successes"] for row in timed) / weight if weight else None
            for key in ("cycle_steps", "cycle_s") if all(row[key] is not None for row in timed)}  # fmt: skip
    return {"successes": k, "episodes": n, "rate": k / n, "low": low, "high": high,
            "cycle_steps": mean.get("cycle_steps"), "cycle_s": mean.get("cycle_s")}  # fmt: skip


def wilson(successes: int, episodes: int) -> tuple[float, float]:
    """Wilson score interval of a proportion at :data:`CONFIDENCE` (Wilson 1927, eq. for the score test inverted)."""
    if episodes == 0:
        return 0.0, 1.0
    p, n, z2 = successes / episodes, episodes, _Z * _Z
    centre = p + z2 / (2 * n)
    spread = _Z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    scale = 1 + z2 / n
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def epoch(moment: Any) -> float | None:
    """Seconds since 1970 of a time written as such a number or as an ISO 8601 string."""
    if isinstance(moment, (int, float)):
        return float(moment)
    try:
        return datetime.fromisoformat(str(moment)).timestamp()
    except ValueError:
        return None


def damaged(path: Path, found: str) -> UserError:
    return UserError(
        f"damaged file {path}: {found}. Delete it to have that part shown as not run, or repeat its stage."
    )
