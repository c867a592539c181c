"""Figures of several quickstart runs, for the README: ``python tests/benchmarks/quickstart.py runs/seed0 runs/seed1 ...``

Reads each run's ``summary.json``, writes ``results/quickstart.json`` and the table between the markers of README.md. Every
seed is shown; nothing is selected. Intervals are Wilson's at 95 % over the pooled episodes of the seeds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "benchmarks" / "results" / "quickstart.json"
BEGIN, END = "<!-- quickstart results: written by tests/benchmarks/quickstart.py -->", "<!-- end of results -->"
AXES = {
    "seen": "generalist, seen starts",
    "unseen_start": "generalist, unseen starts",
    "unseen_phrasing": "generalist, unseen phrasings",
    "swapped": "generalist, swapped sentence (judged on the new one)",
    "switched": "generalist, sentence switched in mid-motion",
}


def figures(run: Path) -> dict[str, Any]:
    """What the table needs of one run: counts per row, cycle times, deployment, wall time."""
    summary = json.loads((run / "summary.json").read_text())
    rows: dict[str, Any] = {}
    for item in summary["specialists"]:
        name = f"specialist {item['task']}" + (" (from its sentence alone)" if item["from_sentence"] else "")
        rows[name] = {**_counts(item["success"]), "demonstrator": _counts(item["demonstrator"]),
                      "clone": _counts(item["clone"]), "train_s": item["seconds"]}  # fmt: skip
    for cell in summary["generalist"]["cells"]:
        if cell["axis"] in AXES:
            rows[f"{AXES[cell['axis']]}: {cell['variant']}"] = _counts(cell["success"])
    deploy = summary["deployment"]
    rows["deployed through the wire protocol"] = _counts(deploy["success"])
    rows["deployed, in real time"] = _counts(deploy["realtime"])
    extra = {
        "violations": deploy["violations"],
        "lateness_us": deploy["lateness_us"],
        "wall_s": summary["wall_s"],
        "dataset": summary["dataset"],
        "parameters": summary["generalist"]["parameters"],
    }
    provenance = summary["provenance"] or {}
    return {"seed": provenance.get("seed"), "provenance": provenance, "rows": rows, **extra}


def _counts(cell: Mapping[str, Any] | None) -> dict[str, Any]:
    if not cell:
        return {}
    return {k: cell[k] for k in ("successes", "episodes", "cycle_s")}


def wilson(successes: int, episodes: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson 1927)."""
    p, n = successes / episodes, episodes
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown: one line per figure with every seed, the pooled rate and its interval, and the cycle time."""
    seeds = " / ".join(str(r["seed"]) for r in runs)
    lines = [f"| specialist | success, seeds {seeds} | pooled [95 %] | cycle | training | demonstrator | pure clone |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    names = list(dict.fromkeys(name for r in runs for name in r["rows"]))
    for name in (n for n in names if n.startswith("specialist ")):
        cells = [r["rows"][name] for r in runs if name in r["rows"]]
        times = " / ".join(f"{c['train_s']:.0f} s" for c in cells)
        others = " | ".join(_baseline([c[kind] for c in cells]) for kind in ("demonstrator", "clone"))
        lines.append(f"| {name.removeprefix('specialist ')} | {_line(cells)} | {times} | {others} |")
    lines += [
        "",
        f"| generalist | success, seeds {seeds} | pooled [95 %] | cycle | worst job |",
        "|---|---|---|---|---|",
    ]
    for axis in AXES.values():
        mine = [n for n in names if n.startswith(f"{axis}: ")]
        if mine:
            cells = [_pool(r["rows"][n] for n in mine if n in r["rows"]) for r in runs]
            lines.append(f"| {axis.removeprefix('generalist, ')} | {_line(cells)} | {_worst(axis, mine, runs)} |")
    for name in ("deployed through the wire protocol", "deployed, in real time"):
        lines.append(f"| {name} | {_line([r['rows'][name] for r in runs])} | |")
    walls = ", ".join(f"{r['wall_s'] / 60:.1f}" for r in runs)
    late = ", ".join(f"{r['lateness_us']['p99'] / 1000:.2f}" for r in runs)
    lines += ["", f"Wall time of the whole quickstart: {walls} minutes. Commands outside limits, counted on the device side: "
              f"{', '.join(str(r['violations']) for r in runs)}. Servo lateness p99 in real time: {late} ms."]  # fmt: skip
    machine = runs[0]["provenance"].get("machine", {})
    lines += ["", f"Machine: {machine.get('processor')}, {machine.get('cores')} cores, no GPU."]
    return "\n".join(lines)


def _line(cells: list[dict[str, Any]]) -> str:
    """Per-seed rates | pooled with interval | cycle."""
    cells = [c for c in cells if c]
    if not cells:
        return "not run | | "
    each = " / ".join(f"{100 * c['successes'] / c['episodes']:.0f}" for c in cells) + " %"
    pooled = _pool(cells)
    low, high = wilson(pooled["successes"], pooled["episodes"])
    cycle = f"{pooled['cycle_s']:.2f} s" if pooled["cycle_s"] is not None else "–"
    return (
        f"{each} | {100 * pooled['successes'] / pooled['episodes']:.1f} % [{100 * low:.1f}, {100 * high:.1f}] | {cycle}"
    )


def _baseline(cells: list[dict[str, Any]]) -> str:
    cells = [c for c in cells if c]
    if not cells:
        return "not run"
    pooled = _pool(cells)
    cycle = f", {pooled['cycle_s']:.2f} s" if pooled["cycle_s"] is not None else ""
    return f"{100 * pooled['successes'] / pooled['episodes']:.1f} %{cycle}"


def _pool(cells: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts add up; the cycle time is the mean weighted by successes."""
    cells = [c for c in cells if c]
    won = sum(c["successes"] for c in cells)
    timed = [c for c in cells if c["cycle_s"] is not None]
    weight = sum(c["successes"] for c in timed)
    cycle = sum(c["successes"] * c["cycle_s"] for c in timed) / weight if weight else None
    return {"successes": won, "episodes": sum(c["episodes"] for c in cells), "cycle_s": cycle}


def _worst(axis: str, names: list[str], runs: list[dict[str, Any]]) -> str:
    """The job with the lowest pooled rate, with its rate in every seed."""
    cells = {n: [r["rows"][n] for r in runs if n in r["rows"]] for n in names}
    name = min(cells, key=lambda n: _pool(cells[n])["successes"] / _pool(cells[n])["episodes"])
    each = " / ".join(f"{100 * c['successes'] / c['episodes']:.0f}" for c in cells[name])
    return f"{name.removeprefix(f'{axis}: ')}: {each} %"


def main(paths: list[str]) -> int:
    """Write the results file and the README table."""
    if not paths:
        print("usage: python tests/benchmarks/quickstart.py runs/seed0 runs/seed1 runs/seed2", file=sys.stderr)
        return 2
    runs = [figures(Path(p)) for p in paths]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(runs, indent=1) + "\n")
    readme = ROOT / "README.md"
    text = readme.read_text()
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    readme.write_text(f"{head}{BEGIN}\n{table(runs)}\n{END}{tail}")
    print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
