"""Every figure of the report as plain JSON, read from the files of a run. The page is rendered from this alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from distill.report_deploy import deployment
from distill.report_read import (
    CONFIDENCE,
    Row,
    counts,
    damaged,
    epoch,
    number,
    pick,
    pool,
    read_list,
    read_object,
    read_rows,
)

CONTROL_HZ = 20.0  # used for cycle times where no artefact says otherwise
CURVE_POINTS = 80  # points a curve is averaged down to: one per 4 px of its panel
AXES = ("seen", "unseen_start", "unseen_phrasing", "swapped", "switched")
TARGETS = {  # success rates the quickstart is held to, as fractions
    "specialist": 0.95,
    "specialist_from_sentence": 0.90,
    "generalist_seen": 0.90,
    "generalist_unseen_phrasing": 0.80,
    "generalist_swapped": 0.85,
    "deployed": 0.80,
}


def summarise(run: Path) -> dict[str, Any]:
    """Read a run directory; parts that were not run are ``None`` or empty.

    Raises:
        UserError: a file of the run is damaged.
    """
    control_hz = _control_hz(run)
    summary: dict[str, Any] = {
        "run": run.resolve().name,
        "confidence": CONFIDENCE,
        "control_hz": control_hz,
        "specialists": _specialists(run, control_hz),
        **_reward(run),
        "dataset": _dataset(run),
        "generalist": _generalist(run, control_hz),
        "deployment": deployment(run / "deploy" / "results.jsonl", control_hz),
        "stages": _stages(run),
        "provenance": read_object(run / "provenance.json") or None,
    }
    summary["targets"] = _targets(summary)
    summary["totals"] = _totals(summary)
    summary["wall_s"] = _wall(summary["stages"])
    return summary


def _control_hz(run: Path) -> float:
    for spec in (run / "generalist" / "policy" / "spec.json", *sorted(run.glob("specialists/*/policy/spec.json"))):
        rate = number(read_object(spec), "env.control_hz", "control_hz")
        if rate:
            return rate
    return CONTROL_HZ


def _specialists(run: Path, control_hz: float) -> list[dict[str, Any]]:
    root = run / "specialists"
    baselines = _baselines(run / "baselines.json", control_hz)
    names = [p.name for p in sorted(root.iterdir()) if p.is_dir()] if root.is_dir() else []
    names += sorted(baselines.keys() - set(names))
    return sorted((_specialist(root / n, baselines.get(n, {}), control_hz) for n in names), key=_task_order)


def _task_order(row: Row) -> tuple[int, str]:
    order = ("reach", "press", "move", "lift")
    stem = re.split(r"[_/-]", row["task"])[0]
    return (order.index(stem) if stem in order else len(order), row["task"])


def _specialist(path: Path, baseline: Row, control_hz: float) -> dict[str, Any]:
    result, rows = read_object(path / "result.json"), read_rows(path / "metrics.jsonl")
    config, last = _config(path / "config.yaml"), rows[-1] if rows else {}
    reward = str(_name(pick(result, "reward", default=config.get("reward"))) or "task")
    reward = "task" if reward in ("env", "true") else reward
    spec = read_object(path / "policy" / "spec.json")
    sentences = pick(spec, "env.instructions", default=[""])
    return {
        "task": path.name,
        "algorithm": _name(pick(result, "algo", "algorithm", default=config.get("algo"))),
        "reward": reward,
        "from_sentence": "clip" in reward.lower(),
        "instruction": pick(config, "reward.instruction") or pick(result, "instruction") or sentences[0] or None,
        "success": counts(result, path / "result.json", control_hz),
        "demonstrator": baseline.get("demonstrator"),
        "clone": baseline.get("clone"),
        "demonstrations": number(result, "demos"),
        "steps": number(result, "steps", "step") or number(last, "step"),
        "seconds": number(result, "wall_s", "seconds") or number(last, "wall_s", "time"),
        "steps_per_s": _mean(rows, "steps_per_s"),
        "curve": curve(rows),
    }


def _config(path: Path) -> dict[str, Any]:
    """A saved ``config.yaml``; empty when there is none."""
    if not path.is_file():
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise damaged(path, str(error)) from error
    return content if isinstance(content, dict) else {}


def _name(node: Any) -> str | None:
    """Name of a config group's choice: the group may be saved as a mapping or as a plain name."""
    return pick(node, "kind", "name") if isinstance(node, Mapping) else node


def _baselines(path: Path, control_hz: float) -> dict[str, dict[str, Any]]:
    """Task -> ``{"demonstrator": counts, "clone": counts}``, from {task: {kind: row}}, {kind: {task: row}} or rows."""
    content: dict[str, dict[str, Any]] = {}
    for row in read_list(path, "rows", "baselines"):
        outer = str(pick(row, "name", "task", "variant", default="?"))
        if "episodes" in row or "kind" in row:
            content.setdefault(outer, {})[str(pick(row, "kind", "policy", default="demonstrator"))] = row
            continue
        for inner, value in row.items():
            if isinstance(value, Mapping):
                task, kind = (inner, outer) if outer in ("demonstrator", "clone") else (outer, inner)
                content.setdefault(task, {})[kind] = value
    return {task: {k: counts(v, path, control_hz) for k, v in kinds.items()} for task, kinds in content.items()}


def curve(rows: list[dict[str, Any]]) -> dict[str, list[float]] | None:
    """Learning curve averaged into at most ``CURVE_POINTS`` bins: ``step`` with ``success``, ``return``, ``loss``."""
    rows = [row for row in rows if number(row, "step") is not None]
    rows = [row for row in rows if any(number(row, *names) is not None for names in _SERIES.values())]
    if not rows:
        return None
    size = -(-len(rows) // CURVE_POINTS)
    bins = [rows[i : i + size] for i in range(0, len(rows), size)]
    out: dict[str, list[float]] = {"step": [number(block[-1], "step") or 0 for block in bins]}
    for name, keys in _SERIES.items():
        means = [_mean(block, *keys) for block in bins]
        if any(value is not None for value in means):
            out[name] = means  # type: ignore[assignment]  # None marks a bin without this series
    return out


_SERIES = {
    "success": ("eval/success", "success"),
    "return": ("eval/return", "return"),
    "loss": ("loss", "loss/total", "train/loss"),
}


def _mean(rows: list[dict[str, Any]], *names: str) -> float | None:
    values = [value for row in rows if (value := number(row, *names)) is not None]
    return sum(values) / len(values) if values else None


def _reward(run: Path) -> dict[str, Any]:
    """The report card as it is, and its AUROC averaged over tasks: on known pairs, and on the pair never shown."""
    card = read_object(run / "reward" / "card.json")
    sets: Row = pick(card, "sets", default={})
    areas = {name: _mean(list(sets[name].values()), "auroc") for name in ("seen", "unseen") if name in sets}
    return {"reward_model": card or None, "reward_auroc": {k: v for k, v in areas.items() if v is not None} or None}


def _dataset(run: Path) -> dict[str, Any] | None:
    info = read_object(run / "dataset" / "meta" / "info.json")
    if not info:
        return None
    keys = ("total_episodes", "total_frames", "total_tasks", "fps", "codebase_version", "robot_type")
    return {key: info[key] for key in keys if info.get(key) is not None}


def _generalist(run: Path, control_hz: float) -> dict[str, Any] | None:
    root, path = run / "generalist", run / "evaluation.json"
    cells = [_cell(row, path, control_hz) for row in read_list(path, "cells", "rows")]
    cells = [cell for cell in cells if cell["success"]]
    if not cells and not root.is_dir():
        return None
    spec, rows = read_object(root / "policy" / "spec.json"), read_rows(root / "metrics.jsonl")
    weights = root / "policy" / "weights.safetensors"
    return {
        "parameters": number(spec, "extra.parameters", "parameters", "extra.num_parameters"),
        "weights_bytes": weights.stat().st_size if weights.is_file() else None,
        "chunk": number(spec, "chunk"),
        "execute": number(spec, "execute"),
        "encoder": pick(spec, "language.encoder", "language.model", "language.name"),
        "curve": curve(rows),
        "cells": cells,
        "tasks": sorted({cell["task"] for cell in cells}, key=lambda task: _task_order({"task": task})),
        "axes": [_axis(axis, cells) for axis in _axes(cells)],
    }


def _axes(cells: list[dict[str, Any]]) -> list[str]:
    """Names of the measured axes, the known ones first."""
    found = {cell["axis"] for cell in cells}
    return [axis for axis in AXES if axis in found] + sorted(found - set(AXES))


def _cell(row: Row, path: Path, control_hz: float) -> dict[str, Any]:
    variant = str(pick(row, "variant", "task", default="?"))
    return {
        "axis": str(pick(row, "axis", "name", default="seen")),
        "variant": variant,
        "task": re.split(r"[_/]", variant)[0],
        "sentence": row.get("sentence"),
        "success": counts(row, path, control_hz),
    }


def _axis(axis: str, cells: list[dict[str, Any]]) -> dict[str, Any]:
    mine = [cell for cell in cells if cell["axis"] == axis]
    tasks = {task: pool(c["success"] for c in mine if c["task"] == task) for task in {c["task"] for c in mine}}
    return {"axis": axis, "all": pool(cell["success"] for cell in mine), "tasks": tasks}


def _stages(run: Path) -> list[dict[str, Any]]:
    """When each stage ran on the run's own clock, which stands still between calls of the pipeline."""
    rows = []
    for row in read_list(run / "stages.json", "stages"):
        started, seconds = epoch(pick(row, "started", "start")), number(row, "seconds", "wall_s")
        names = {key: str(pick(row, key, default="?")) for key in ("name", "status")}
        rows.append({**names, "started": started, "seconds": seconds})
    rows.sort(key=lambda row: row["started"] or 0.0)
    end = skipped = 0.0
    for row in rows:
        start = end if row["started"] is None else row["started"]
        skipped += max(0.0, start - end)  # pauses, and all time before the first stage
        row["begin_s"] = round(start - skipped, 3)
        end = max(end, start + (row["seconds"] or 0.0))
    return rows


def _wall(stages: list[dict[str, Any]]) -> float | None:
    """Seconds during which at least one stage ran."""
    ends = [row["begin_s"] + row["seconds"] for row in stages if row["seconds"] is not None]
    return max(ends, default=None)


def _totals(summary: Row) -> dict[str, Any]:
    rows, targets = summary["specialists"], summary["targets"]
    steps = [row["steps"] for row in rows if row["steps"]]
    judged = [row["met"] for row in targets if row["met"] is not None]
    return {
        "specialists": sum(1 for row in rows if row["success"] or row["curve"]),
        "from_sentence": sum(1 for row in rows if row["from_sentence"]),
        "env_steps": sum(steps) if steps else None,
        "steps_per_s": _mean(rows, "steps_per_s"),
        "targets_open": len(targets) - len(judged),
        "targets_judged": len(judged),
        "targets_met": sum(judged),
    }


def _targets(summary: Row) -> list[dict[str, Any]]:
    """What the run is held to, and what it reached: ``met`` is None where that part was not run."""
    specialists = [row for row in summary["specialists"] if row["success"]]
    axes = {row["axis"]: row for row in (summary["generalist"] or {}).get("axes", [])}
    deployed = summary["deployment"] or {}
    worst = {kind: _worst(row["success"] for row in specialists if row["from_sentence"] == kind) for kind in (0, 1)}
    seen = _worst(axes.get("seen", {}).get("tasks", {}).values())
    phrased, swapped = (axes.get(axis, {}).get("all") for axis in ("unseen_phrasing", "swapped"))
    rows = [
        _target("Weakest specialist", worst[0], "specialist"),
        _target("Specialist taught by a sentence", worst[1], "specialist_from_sentence"),
        _target("Generalist, weakest task on seen starts", seen, "generalist_seen"),
        _target("Generalist, unseen phrasings", phrased, "generalist_unseen_phrasing"),
        _target("Generalist, sentence swapped", swapped, "generalist_swapped"),
        _target("Sentences obeyed once deployed", deployed.get("success"), "deployed"),
    ]
    violations = deployed.get("violations")
    met = None if violations is None else violations == 0
    return [
        *rows,
        {"name": "Commands outside limits, seen by the device", "at_most": 0, "value": violations, "met": met},
    ]


def _target(name: str, measured: Row | None, key: str) -> dict[str, Any]:
    rate = measured["rate"] if measured else None
    return {
        "name": name,
        "at_least": TARGETS[key],
        "value": rate,
        "met": None if rate is None else rate >= TARGETS[key],
    }


def _worst(parts: Any) -> Row | None:
    return min((part for part in parts if part), key=lambda part: part["rate"], default=None)
