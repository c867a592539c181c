"""The verb ``report``: one self-contained ``report.html`` of a run, and ``summary.json`` with every figure it shows."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distill.report_page import Film, render
from distill.report_read import number, pick, read_object
from distill.report_summary import summarise
from distill.report_video import poster
from sims.errors import UserError
from sims.verbs import Verb, run_verb

PARTS = ("specialists", "generalist", "evaluation.json", "deploy", "reward", "stages.json", "videos", "baselines.json")


@dataclass
class ReportConfig:
    """Options of the verb."""

    run: str = field(default="runs/quickstart", metadata={"help": "run directory to report on; it may be unfinished"})
    embed_mb: float = field(default=16.0, metadata={"help": "most megabytes of video carried inside the page"})

    def __post_init__(self) -> None:
        if self.embed_mb < 0:
            raise ValueError(f"embed_mb={self.embed_mb}: must be 0 or more megabytes.")


def report(config: ReportConfig) -> Path:
    """Write ``report.html`` and ``summary.json`` into the run directory; returns the path of the page.

    Parts of the run that are missing are shown as not run.

    Raises:
        UserError: no such run, nothing of a run in it, or a damaged file in it.
    """
    run = Path(config.run)
    if not run.is_dir():
        raise UserError(f"run={config.run}: no such directory. Known runs: {_known_runs(run)}.")
    if not any((run / part).exists() for part in PARTS):
        raise UserError(f"run={config.run}: none of {', '.join(PARTS)} is in it, so it is not a run. "
                        f"Known runs: {_known_runs(run)}.")  # fmt: skip
    summary = summarise(run)
    videos, films = collect_films(run / "videos", config.embed_mb * 1e6)
    # the page is rendered from what was written, so that it can show nothing else
    text = json.dumps(finite({**summary, "videos": videos}), indent=1, ensure_ascii=False, allow_nan=False)
    page = render(json.loads(text), films)
    write_text(run / "summary.json", text)
    return write_text(run / "report.html", page)


def finite(node: Any) -> Any:
    """The same JSON with ``None`` for numbers that JSON does not have (nan, infinity)."""
    if isinstance(node, dict):
        return {str(key): finite(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [finite(value) for value in node]
    return None if isinstance(node, float) and not math.isfinite(node) else node


def _known_runs(run: Path) -> str:
    siblings = run.parent.iterdir() if run.parent.is_dir() else []
    names = sorted(str(p) for p in siblings if p.is_dir() and any((p / part).exists() for part in PARTS))
    return ", ".join(names) or f"none in {run.parent}"


def collect_films(folder: Path, budget: float) -> tuple[list[dict[str, Any]], dict[str, Film]]:
    """Captions of all videos of a folder, and the content of those that fit into ``budget`` bytes, smallest first."""
    paths = sorted(folder.glob("*.mp4"), key=lambda path: path.stat().st_size) if folder.is_dir() else []
    captions, films = [], {}
    for path in paths:
        budget -= path.stat().st_size
        if budget >= 0:
            films[path.name] = (path.read_bytes(), poster(path))
        captions.append({**_caption(path), "embedded": path.name in films})
    return sorted(captions, key=lambda row: (row["order"], row["file"])), films


def _caption(path: Path) -> dict[str, Any]:
    row = read_object(path.with_suffix(".json"))
    success = pick(row, "success")
    return {
        "file": path.name,
        "title": str(pick(row, "title", default=path.stem.replace("_", " ").replace("-", " "))),
        "sentence": pick(row, "sentence", "instruction"),
        "success": None if success is None else bool(success),
        "bytes": path.stat().st_size,
        "order": number(row, "order") or 0,
    }


def write_text(path: Path, text: str) -> Path:
    """Replace a file as a whole."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
    return path


def _run(config: ReportConfig) -> None:
    print(f"report: {report(config)}")


VERB = Verb(
    name="report",
    schema=ReportConfig,
    run=_run,
    sentence="Write the self-contained HTML report of a run, and summary.json with every figure it shows.",
    examples=(
        "distillery report run=runs/quickstart",
        "distillery report run=runs/mine embed_mb=4   # a page small enough to mail",
        "python -m distill.report run=runs/quickstart",
    ),
)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_verb(VERB, argv)


if __name__ == "__main__":
    sys.exit(main())
