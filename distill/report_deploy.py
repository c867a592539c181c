"""What happened on the robot: outcome of each sentence, what the safety gate did, how punctual the servo loop was."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distill.report_read import Row, counts, number, pick, read_rows

GATE_ALWAYS = ("sent", "rejected", "held", "stale", "faults")  # a gate writes only what happened: these show as 0
GATE_WORDS = ("rejected", "refused", "limited", "clipped", "held", "stale", "fault", "estop", "nonfinite")


def deployment(path: Path, control_hz: float) -> dict[str, Any] | None:
    """Summary of ``deploy/results.jsonl`` (one row a sentence); ``None`` when there is none.

    Raises:
        UserError: the file is damaged.
    """
    rows = read_rows(path)
    if not rows:
        return None
    sentences = [_sentence(row, index, control_hz) for index, row in enumerate(rows)]
    executed = [row for row in sentences if row["success"] is not None]
    return {
        # sentences may be repeated in real time: they are counted apart, not twice
        "success": _outcome([row for row in executed if not row["realtime"]] or executed, path, control_hz),
        "realtime": _outcome([row for row in executed if row["realtime"]], path, control_hz),
        "violations": _total(sentences, "violations"),
        "overruns": _total([row for row in sentences if row["realtime"]], "overruns"),
        "skipped": _total([row for row in sentences if row["realtime"]], "skipped"),
        "gate": _gate_totals(sentences),
        "device": _device(rows),
        "lateness_us": _lateness(sentences),
        "robot": next((str(r) for row in rows if (r := pick(row, "robot", "driver"))), None),
        "runs": len(sentences),
        "sentences": sentences,
    }


def _sentence(row: Row, position: int, control_hz: float) -> dict[str, Any]:
    gate = _gate(row)
    steps = number(row, "steps", "cycle_steps")
    success = pick(row, "success", "succeeded")
    return {
        "index": int(number(row, "index", "id") or position),
        "sentence": str(pick(row, "sentence", "instruction", default="")),
        "variant": pick(row, "variant", "task"),
        "success": None if success is None else bool(success),
        "refused": pick(row, "refused", "refusal", "error"),
        "steps": steps,
        "seconds": None if steps is None else steps / control_hz,
        "realtime": bool(pick(row, "realtime", "real_time", default=False)),
        "violations": _count(pick(row, "violations", "device_violations", "device.violations")),
        "overruns": _count(pick(row, "overruns", "timing.overruns", "lateness_us.overruns")),
        "skipped": _count(row.get("skipped")),
        "gate": gate,
        "gate_acted": sum(count for name, count in gate.items() if name != "sent") if gate else None,
        "lateness_us": {key: number(row, f"lateness_us.{key}", f"lateness_{key}_us") for key in ("p50", "p99", "max")},
        "video": row.get("video"),
    }


def _count(value: Any) -> int | None:
    """A count given as a number, a list of events, or a mapping of counts."""
    if isinstance(value, Mapping):
        return sum(int(v) for v in value.values() if isinstance(v, (int, float)))
    if isinstance(value, list):
        return len(value)
    return int(value) if isinstance(value, (int, float)) else None


def _gate(row: Row) -> dict[str, int]:
    """Counters of the safety gate, from a mapping under ``gate`` or from keys that name what a gate does."""
    nested = pick(row, "gate", "gate_counters", "counters", "safety")
    source = (
        nested if isinstance(nested, Mapping) else {k: v for k, v in row.items() if any(w in k for w in GATE_WORDS)}
    )
    return {str(k): int(v) for k, v in source.items() if isinstance(v, (int, float))}


def _gate_totals(sentences: list[dict[str, Any]]) -> dict[str, int]:
    started = GATE_ALWAYS if any(row["gate"] for row in sentences) else ()
    totals: dict[str, int] = dict.fromkeys(started, 0)
    for row in sentences:
        for name, value in row["gate"].items():
            totals[name] = totals.get(name, 0) + value
    return totals


def _device(rows: list[dict[str, Any]]) -> dict[str, int]:
    """What the device counted on its side of the wire, over all sentences."""
    totals: dict[str, int] = {}
    for row in rows:
        for name, value in (row.get("device") or {}).items():
            totals[name] = totals.get(name, 0) + int(value)
    return totals


def _outcome(rows: list[dict[str, Any]], path: Path, control_hz: float) -> dict[str, Any] | None:
    done = [row for row in rows if row["success"]]
    steps = [row["steps"] for row in done if row["steps"] is not None]
    mean = sum(steps) / len(steps) if steps else None
    return counts({"successes": len(done), "episodes": len(rows), "cycle_steps": mean}, path, control_hz)


def _total(sentences: list[dict[str, Any]], key: str) -> int | None:
    values = [row[key] for row in sentences if row[key] is not None]
    return sum(values) if values else None


def _lateness(sentences: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Over real-time sentences (all, where none was): median of the medians, worst p99 and worst of all, in us."""
    realtime = [row for row in sentences if row["realtime"]]
    rows = [row["lateness_us"] for row in (realtime or sentences)]
    p50, p99, top = ([r[key] for r in rows if r[key] is not None] for key in ("p50", "p99", "max"))
    if not p99:
        return None
    return {"p50": statistics.median(p50) if p50 else None, "p99": max(p99), "max": max(top) if top else None,
            "sentences": len(rows), "realtime": bool(realtime)}  # fmt: skip
