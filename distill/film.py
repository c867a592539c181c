"""The verb ``film``: one episode of each job by its specialist, and some of the deployed sentences, for the report."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distill.config import Specialists
from distill.report_read import read_rows
from sims.errors import UserError
from sims.verbs import Verb, run_verb
from sims.worlds.tabletop import CONTROL_HZ
from sims.worlds.variants import VARIANTS


@dataclass
class FilmConfig:
    """What to film, and where to put it."""

    specialists: Specialists = field(default_factory=Specialists)
    deploy: str = field(default="", metadata={"help": "folder of a deployment whose sentences to film; empty: none"})
    sentences: int = field(default=6, metadata={"help": "how many of them: different jobs first, one failure if any"})
    seed: int = field(default=4_000_003, metadata={"help": "start state of the specialists' films"})
    out: str = field(default="runs/videos", metadata={"help": "folder of the films and their captions"})

    def __post_init__(self) -> None:
        if self.sentences < 0 or self.seed < 0:
            raise UserError(f"options sentences={self.sentences} and seed={self.seed}: must not be negative.")
        if not self.deploy and not self.specialists.paths():
            raise UserError("nothing to film: give deploy=<folder of a deployment> or specialists.<job>=<run folder>.")


def film(cfg: FilmConfig) -> Path:
    """Write ``<out>/*.mp4``, each with a .json caption beside it; films that exist are kept.

    Raises:
        UserError: a missing or damaged policy or deployment, or no way to draw on this machine.
    """
    from distill.report_film import FilmRenderer

    out, paths = Path(cfg.out), cfg.specialists.paths()
    rows = choose(read_rows(Path(cfg.deploy) / "results.jsonl"), cfg.sentences) if cfg.deploy else []
    if cfg.deploy and not rows:
        raise UserError(
            f"deploy={cfg.deploy}: no trajectory in its results.jsonl. Run a deployment on a virtual robot."
        )
    out.mkdir(parents=True, exist_ok=True)
    renderer = FilmRenderer()
    try:
        for order, row in enumerate(rows):
            _film_sentence(row, Path(cfg.deploy), out / f"deployed-{row['index']:04d}.mp4", order, renderer)
        for order, (job, path) in enumerate(paths.items(), start=len(rows)):
            _film_specialist(job, path, out / f"specialist-{job}.mp4", order, cfg.seed, renderer)
    finally:
        renderer.close()
    return out


def choose(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """At most ``count`` rows that can be filmed: a success of each job in turn, but the first failure always."""
    rows = [row for row in rows if row.get("trajectory") and not row.get("realtime")]
    failures = [row for row in rows if row.get("success") is False][:1]
    seen: dict[str, int] = {}
    ranked = []
    for row in rows:
        if row not in failures:
            turn = seen[row["variant"]] = seen.get(row["variant"], 0) + 1
            ranked.append((not row.get("success"), turn, row["index"], row))
    best = [row for *_, row in sorted(ranked, key=lambda item: item[:3])]
    return (best[: max(count - len(failures), 0)] + failures)[:count]


def _film_sentence(row: dict[str, Any], folder: Path, path: Path, order: int, renderer: Any) -> None:
    import numpy as np

    from distill.report_film import Recording
    from distill.report_film import film as draw
    from distill.report_video import save_recording

    if path.exists():
        return
    file = folder / row["trajectory"]
    try:
        with np.load(file, allow_pickle=False) as arrays:
            qpos, mocap = arrays["qpos"], arrays["mocap"]
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"damaged trajectory {file}: {error}. Delete {folder} and deploy again.") from error
    recording = Recording(draw(qpos, mocap, CONTROL_HZ, renderer), CONTROL_HZ, row["sentence"], bool(row["success"]))
    save_recording(recording, path, f"deployed, {row['variant'].replace('_', ' ')}", order=order)


def _film_specialist(job: str, path: str, file: Path, order: int, seed: int, renderer: Any) -> None:
    from distill.report_film import record_episode
    from distill.report_video import save_recording
    from distill.teachers import Teachers
    from sims.registry import make

    if file.exists():
        return
    teachers = Teachers({job: path})
    env: Any = make(f"tabletop/{job}", 1)
    try:
        recording = record_episode(env, lambda obs: teachers(obs, [job]), job, seed, renderer)
    finally:
        env.close()
    save_recording(recording, file, f"specialist, {VARIANTS[job].task}", order=order)


def _run(cfg: FilmConfig) -> None:
    print(f"films: {film(cfg)}")


VERB = Verb(
    name="film",
    schema=FilmConfig,
    run=_run,
    sentence="film one episode of each specialist, and some deployed sentences, for the report.",
    examples=(
        "distillery film specialists.lift=runs/quickstart/specialists/lift out=runs/quickstart/videos",
        "distillery film deploy=runs/quickstart/deploy sentences=6 out=runs/quickstart/videos",
        "distillery film specialists.all=scripted out=runs/scripted/videos",
    ),
)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_verb(VERB, argv)


if __name__ == "__main__":
    sys.exit(main())
