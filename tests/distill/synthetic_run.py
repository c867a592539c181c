"""A made-up run directory with every part that the report reads. Its numbers mean nothing."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from distill.report_film import Recording
from distill.report_video import save_recording

NASTY = 'push <script>alert("x")</script> & the "green" button'
TASKS = ("reach", "press", "move", "lift", "press_yellow")
VARIANTS = ("reach", "press_green", "press_yellow", "move_red", "move_blue", "lift_red", "lift_blue")


def build_run(root: Path, without: tuple[str, ...] = ()) -> Path:
    """Write the run to ``root``, then take away the named files and folders."""
    for index, task in enumerate(TASKS):
        _specialist(root / "specialists" / task, task, index)
    _json(
        root / "baselines.json",
        {
            task: {"demonstrator": _row(93 + i, 100, 40 + i), "clone": _row(71 + 3 * i, 100, 47 + i)}
            for i, task in enumerate(TASKS)
        },
    )
    _json(root / "reward" / "card.json", reward_card())
    _json(
        root / "dataset" / "meta" / "info.json",
        {
            "codebase_version": "v3.0",
            "robot_type": "so101",
            "total_episodes": 1260,
            "total_frames": 61234,
            "total_tasks": 84,
            "fps": 20,
        },
    )
    _generalist(root)
    _deploy(root / "deploy" / "results.jsonl")
    for index, title in enumerate(("reach", "press", "move", "lift", "deployed sentence 3", "deployed sentence 9")):
        _video(root / "videos" / f"{title.replace(' ', '_')}.mp4", title, index)
    _stages(root)
    for name in without:
        path = root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return root


def reward_card() -> dict[str, Any]:
    """As ``vlm_rewards.card.grade`` writes it, with a number that JSON does not have."""

    def family(base: float, objects: tuple[str, ...]) -> dict[str, Any]:
        means = {
            "auroc": base,
            "worst_phrasing": base - 0.013,
            "fpr95": 0.112,
            "near_miss": float("nan"),
            "spearman": base - 0.21,
        }
        rows = [
            {"family": "any", "object": o, "sentence": f"touch {o}", "frames": 1203 + i, "positives": 311 + i, **means}
            for i, o in enumerate(objects)
        ]
        return {**means, "concepts": rows}

    sets = {
        "seen": {
            "reach": family(0.981, ("the marker",)),
            "press": family(0.967, ("the green button",)),
            "lift": family(0.975, ("the red cube", "the blue cube")),
        },
        "unseen": {
            "press": {**family(0.951, ("the yellow button",)), "gate": {"recall": 0.873, "false_positives": 0.0042}}
        },
    }
    calibration = {
        name: {"low": 0.1123, "high": 0.3316, "threshold": 0.8125} for name in ("reach", "press", "move", "lift")
    }
    return {
        "sets": sets,
        "calibration": calibration,
        "supervision": {"never_shown": "yellow button", "frames": "rendered scenes"},
        "fit": {"steps": 4100, "seed": 3, "render_s": 41.5},
    }


def _row(successes: int, episodes: int, steps: float) -> dict[str, float]:
    return {"successes": successes, "episodes": episodes, "cycle_steps": steps}


def _json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def _lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _specialist(path: Path, task: str, index: int) -> None:
    rng = np.random.default_rng(index)
    sentence_only = task == "press_yellow"
    rows = []
    for i in range(120):
        level = 1 / (1 + math.exp(-(i - 30 - 9 * index) / 7))
        success = float(np.clip(level * 0.99 + rng.normal(0, 0.035), 0, 1))
        rows.append(
            {
                "stage": f"train/{task}",
                "step": 1000 * (i + 1),
                "wall_s": 1.1 * i,
                "steps_per_s": 1800.0 - 55 * index,
                "success": success,
                "return": 42 * level + rng.normal(0, 1.3),
            }
        )
    _lines(path / "metrics.jsonl", rows)
    result = {
        **_row(99 - index, 100, 21.4 + 7 * index),
        "algo": "dsact",
        "reward": "clip" if sentence_only else "task",
        "steps": 120000,
        "wall_s": 133.7 + index,
    }
    _json(path / "result.json", {**result, "instruction": NASTY} if sentence_only else result)


def _generalist(root: Path) -> None:
    rows = [
        {"stage": "distill", "step": 50 * i, "loss": 0.3 * math.exp(-i / 30) + 0.02, "success": 1 - math.exp(-i / 25)}
        for i in range(1, 90)
    ]
    _lines(root / "generalist" / "metrics.jsonl", rows)
    _json(
        root / "generalist" / "policy" / "spec.json",
        {
            "env": {"control_hz": 20.0},
            "chunk": 8,
            "execute": 4,
            "language": {"encoder": "all-MiniLM-L6-v2"},
            "extra": {"parameters": 391234},
        },
    )
    cells = [
        {"axis": axis, "variant": variant, **_row(100 - 3 * a - v, 100, 30 + v)}
        for a, axis in enumerate(("seen", "unseen_start", "unseen_phrasing", "swapped"))
        for v, variant in enumerate(VARIANTS)
    ]
    _json(root / "evaluation.json", {"cells": cells})


def _deploy(path: Path) -> None:
    words = (
        "touch the marker with your fingers",
        NASTY,
        "could you press the yellow one",
        "bring the red block over to the disc",
        "drag that blue cube onto the mark",
        "raise the red block off the table",
        "get the blue block up in the air",
    )
    rows = []
    for i in range(55):
        realtime = i >= 50  # the first sentences once more
        row = {
            "index": i % 50,
            "sentence": words[i % 7],
            "variant": VARIANTS[i % 7],
            "success": i not in (8, 19, 33, 41),
            "steps": 31 + i,
            "realtime": realtime,
        }
        row |= {
            "violations": 0,
            "gate": {"sent": 500 + i, "rejected": 0, "rate_limited": 3 + i % 5, "limit_clipped": i % 2, "stale": 0},
            "overruns": 0,
        }
        row |= {
            "lateness_us": {"p50": 61.5 + i, "p99": 412.0 + 7 * i, "max": 1830.0 + 11 * i},
            "robot": "virtual SO-101",
        }
        rows.append(row)
    _lines(path, rows)


def _video(path: Path, title: str, index: int) -> None:
    frames = np.full((24, 120, 160, 3), (205, 202, 196), np.uint8)
    for t in range(24):
        frames[t, 40:70, 4 * t : 4 * t + 30] = (176, 60 + 20 * index, 40 + 30 * index)
    deployed = "deployed" in title
    save_recording(
        Recording(frames, 20.0, NASTY if deployed else "", index != 5),
        path,
        title,
        order=index if deployed else 10 + index,
    )


def _stages(root: Path) -> None:
    plan = (
        ("reward model", 0, 95.2),
        ("reach", 95.2, 61),
        ("press", 95.3, 70.5),
        ("move", 160, 140.1),
        ("lift", 168, 170),
        ("press yellow from its sentence", 305, 110),
        ("collect", 420, 48),
        ("distil", 470, 172),
        ("evaluate", 645, 61),
        ("deploy", 706, 95.5),
    )
    _json(
        root / "stages.json",
        [
            {"name": name, "status": "done", "started": 1.78e9 + start, "seconds": seconds}
            for name, start, seconds in plan
        ],
    )
    _json(
        root / "provenance.json",
        {"git_commit": "84ce7cc", "config_hash": "b3c1a2f0", "seed": 0, "machine": {"cpu": "2 cores of a made-up processor", "memory_gb": 8, "system": "Linux 6.1"}, "versions": {"python": "3.11.7", "torch": "2.14.1", "mujoco": "3.11.0", "robot-distillery": "0.1.0"}},
    )  # fmt: skip
