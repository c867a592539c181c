"""``distillery benchmark``: speed and learning beside Stable-Baselines3 and SBX, as text files and one page."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sims.errors import UserError, unknown_choice
from sims.verbs import Verb, run_verb

RESULTS = "tests/benchmarks/results"
SPEED = ("update", "loop", "ppo", "processes")  # suite speed is all of them
LEARNING = ("gym", "precision", "brax")
WIDTHS = {"update": (256, 128), "loop": (256,), "processes": (256,)}


@dataclass
class BenchmarkConfig:
    """What to measure."""

    suite: str = field(
        default="speed",
        metadata={"help": "speed (update, loop, ppo, processes: minutes), or one of gym, precision, brax (hours)"},
    )
    report: bool = field(default=False, metadata={"help": "measure nothing, only write and print the page"})
    blocks: int = field(default=15, metadata={"help": "speed: blocks per contestant, at least 7 for a claim"})
    repeats: int = field(default=64, metadata={"help": "speed: updates a block; twice as many steps of the loop"})
    width: int | None = field(default=None, metadata={"help": "units per hidden layer; null: the suite's own"})
    only: str = field(default="", metadata={"help": "gym, precision, brax: only runs whose file name contains this"})
    seeds: int | None = field(default=None, metadata={"help": "gym, precision, brax: the first so many; null: all"})
    steps: int | None = field(default=None, metadata={"help": "gym, precision, brax: another budget; needs out="})
    jobs: int = field(default=1, metadata={"help": "gym, precision, brax: trainings side by side, one thread each"})
    out: str = field(default=RESULTS, metadata={"help": "folder of the result files; what is there is kept"})
    page: str | None = field(
        default=None,
        metadata={"help": "Markdown to write; null: docs/benchmarks.md, or beside the files of another out"},
    )

    def __post_init__(self) -> None:
        if self.suite not in ("speed", *SPEED, *LEARNING):
            raise unknown_choice("suite", self.suite, ("speed", *SPEED, *LEARNING), "option suite")
        for name in ("blocks", "repeats", "jobs", "width", "seeds", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"option {name}={value}: must be at least 1.")
        if self.steps is not None and self.out == RESULTS:
            raise UserError(f"option steps={self.steps}: runs of another budget would mix with those in {RESULTS}. "
                            "Give another out=.")  # fmt: skip


def benchmark(cfg: BenchmarkConfig) -> None:
    """Measure what is missing, then write the page and print the part that the suite belongs to."""
    root = Path(cfg.out)
    if not cfg.report:
        if cfg.suite in LEARNING:
            _learn(cfg, root)
        else:
            for suite in SPEED if cfg.suite == "speed" else (cfg.suite,):
                _time(suite, cfg, root)
    print(write_page(cfg, root))


def _learn(cfg: BenchmarkConfig, root: Path) -> None:
    from dataclasses import replace

    from control import benchmark_learning as learning

    suites: dict[str, Callable[..., Any]] = {
        "gym": learning.gym_suite, "precision": learning.precision_suite, "brax": learning.brax_suite
    }  # fmt: skip
    width = {} if cfg.width is None or cfg.suite == "brax" else {"width": cfg.width}
    runs = [run if cfg.steps is None else replace(run, steps=cfg.steps) for run in suites[cfg.suite](**width)]
    runs = [run for run in runs if cfg.seeds is None or run.seed < cfg.seeds]
    folder = root / "learning"
    chosen = [run for run in runs if cfg.only in str(run.file(folder).relative_to(folder))]
    if not chosen:
        names = sorted({str(run.file(folder).relative_to(folder)) for run in runs})
        raise unknown_choice("run", cfg.only, names, "option only")
    learning.run_suite(chosen, folder, cfg.jobs)


def _time(suite: str, cfg: BenchmarkConfig, root: Path) -> None:
    if suite == "ppo":
        from control.benchmark_ppo import ppo_speed

        for part, result in ppo_speed(cfg.blocks, 64, 64, print).items():
            _write(root, f"ppo_{part}", result)
        return
    from control import benchmark_speed as speed

    measures: dict[str, Callable[..., Any]] = {
        "update": speed.update_speed, "loop": speed.loop_speed, "processes": speed.processes_speed
    }  # fmt: skip
    repeats = {"update": cfg.repeats, "loop": 2 * cfg.repeats, "processes": 2 * cfg.repeats}[suite]
    for width in WIDTHS[suite] if cfg.width is None else (cfg.width,):
        result = measures[suite](width, cfg.blocks, repeats, print)
        _write(root, f"{suite}_w{width}", result)


def _write(root: Path, name: str, result: dict[str, Any]) -> None:
    from control.log import write_text

    file = root / "speed" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(result) + "\n")


def write_page(cfg: BenchmarkConfig, root: Path) -> str:
    """Write page and plot from the files below ``root``; returns the part of the page about the suite.

    Raises:
        UserError: there is nothing to report.
    """
    from control import benchmark_report as report
    from control.benchmark_plots import learning_svg
    from control.log import write_text

    runs = report.read_runs(root)
    speed, learning = list(report.speed_sections(root)), list(report.learning_sections(root))
    if not speed and not learning:
        raise UserError(f"no results below {root}. Run 'distillery benchmark' without report=true first.")
    page = Path(cfg.page or ("docs/benchmarks.md" if cfg.out == RESULTS else root / "benchmarks.md"))
    page.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, report.page(root))
    if any(env.startswith("gym/") for env, _ in runs):
        write_text(page.with_name("benchmarks_gym.svg"), learning_svg(runs))
    return "\n\n".join(learning if cfg.suite in LEARNING else speed) + f"\n\n-> {page}"


VERB = Verb(
    name="benchmark",
    schema=BenchmarkConfig,
    run=benchmark,
    sentence="measure speed and learning beside Stable-Baselines3 and SBX, and write the page of all figures",
    examples=(
        "distillery benchmark",
        "distillery benchmark suite=update width=256 blocks=21",
        "distillery benchmark suite=gym jobs=2",
        "distillery benchmark suite=gym report=true",
    ),
)


def main(argv: list[str] | None = None) -> int:
    return run_verb(VERB, argv)


if __name__ == "__main__":
    sys.exit(main())
