"""The verb ``pipeline``: the whole chain as a graph of stages, each of them a verb of its own."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from distill.display import Display
from distill.scheduler import Stage, exclusive, run_stages
from sims.errors import UserError, unknown_choice
from sims.verbs import Verb, run_verb

SHIPPED = Path(__file__).resolve().parent / "artefacts"
CLIP_CARD = SHIPPED.parents[1] / "vlm_rewards" / "weights" / "small_clip" / "card.json"
# specialist -> (options of ``train``, variants it serves, expected seconds on a free core)
SPECIALISTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], float]] = {
    "move": (("env=tabletop/move",), ("move_red", "move_blue"), 180),
    "press_yellow": (
        ("env=tabletop/press_yellow", "reward=clip", "reward.stride=2", "utd=0.25", "steps=56000"),
        ("press_yellow",),
        220,
    ),
    "lift": (("env=tabletop/lift",), ("lift_red", "lift_blue"), 110),
    "press_green": (("env=tabletop/press_green",), ("press_green",), 60),
    "reach": (("env=tabletop/reach",), ("reach",), 40),
}
PACKAGES = ("torch", "mujoco", "gymnasium", "open_clip_torch", "hydra-core", "onnxruntime", "numpy", "pyarrow", "av")


@dataclass
class PipelineConfig:
    """One run of the chain."""

    run: str = field(default="runs/quickstart", metadata={"help": "folder of everything the run makes"})
    chain: str = field(default="quickstart", metadata={"help": "quickstart: train everything; demo: shipped artefacts"})
    seed: int = field(default=0, metadata={"help": "seed of every stage"})
    workers: int = field(default=2, metadata={"help": "stages side by side, one thread each"})
    episodes: int = field(default=100, metadata={"help": "evaluation episodes per variant and axis"})
    sentences: int = field(default=50, metadata={"help": "held-out sentences executed on the virtual robot"})
    realtime: int = field(default=5, metadata={"help": "sentences executed again in real time"})

    def __post_init__(self) -> None:
        if self.chain not in CHAINS:
            raise unknown_choice("chain", self.chain, CHAINS, "chain=")
        for name in ("workers", "episodes", "sentences"):
            if getattr(self, name) < 1:
                raise UserError(f"option {name}={getattr(self, name)}: must be at least 1.")
        if self.realtime < 0 or self.seed < 0:
            raise UserError(f"options realtime={self.realtime} and seed={self.seed}: must not be negative.")


def quickstart(cfg: PipelineConfig) -> list[Stage]:
    """Train every specialist, distil, evaluate, deploy, film, report."""
    run = Path(cfg.run)
    teachers = {job: run / "specialists" / name for name, (_, jobs, _) in SPECIALISTS.items() for job in jobs}
    named = tuple(f"specialists.{job}={path}" for job, path in teachers.items())
    trained = tuple(f"specialist/{name}" for name in SPECIALISTS)
    dataset, generalist = run / "dataset", run / "generalist"
    return [
        *_specialists(cfg, run),
        *_baselines(cfg, run),
        _stage("collect", "distill.collect", dataset, "meta/info.json", trained, 60,
               *named, f"seed={cfg.seed}"),
        _stage("distill", "distill.train", generalist, "result.json", ("collect",), 240,
               f"dataset={dataset}", *named, f"seed={cfg.seed}"),
        _evaluate("evaluate/specialists", run / "specialists.json", trained, cfg, *named, "axes=[seen,unseen_start]"),
        *_judge(cfg, run, generalist, ("distill",), named),
    ]  # fmt: skip


def demo(cfg: PipelineConfig) -> list[Stage]:
    """The shipped generalist: evaluate, deploy, film, report."""
    if not (SHIPPED / "generalist" / "spec.json").exists():
        raise UserError(f"no shipped policy in {SHIPPED}; use chain=quickstart to train one.")
    return _judge(cfg, Path(cfg.run), SHIPPED / "generalist", (), ())


CHAINS = {"quickstart": quickstart, "demo": demo}


def _specialists(cfg: PipelineConfig, run: Path) -> list[Stage]:
    return [
        _stage(f"specialist/{name}", "control.train", run / "specialists" / name, "result.json", (), seconds,
               *options, f"seed={cfg.seed}")
        for name, (options, _, seconds) in SPECIALISTS.items()
    ]  # fmt: skip


def _baselines(cfg: PipelineConfig, run: Path) -> list[Stage]:
    """The scripted demonstrator, and a pure clone of its episodes."""
    folder = run / "baselines"
    return [
        _evaluate("baseline/demonstrator", folder / "demonstrator.json", (), cfg, "policy=scripted", "axes=[seen]"),
        _stage("baseline/episodes", "distill.collect", folder / "dataset", "meta/info.json", (), 40,
               "specialists.all=scripted", "noise=0", "bursts=0", f"seed={cfg.seed}"),
        _stage("baseline/clone", "distill.train", folder / "clone", "result.json", ("baseline/episodes",), 90,
               f"dataset={folder / 'dataset'}", "rounds=0", "clone_steps=6000", f"seed={cfg.seed}"),
        _evaluate("baseline/evaluate", folder / "clone.json", ("baseline/clone",), cfg,
                  f"policy={folder / 'clone'}", "axes=[seen]"),
    ]  # fmt: skip


def _judge(
    cfg: PipelineConfig, run: Path, policy: Path, needs: tuple[str, ...], specialists: tuple[str, ...]
) -> list[Stage]:
    """What is the same for a trained and a shipped generalist: evaluation, deployment, films, report."""
    deployed = run / "deploy"
    artefact = policy if (policy / "spec.json").exists() else policy / "policy"
    # the layouts are fresh ones from the range of training; the second batch has starts from outside of it
    obey = (f"policy={artefact}", "live=true", f"sentences={cfg.sentences}", f"seed={cfg.seed}")
    stages = [
        _evaluate("evaluate/generalist", run / "evaluation.json", needs, cfg, f"policy={policy}"),
        _stage("deploy", "real_robot.deploy", deployed, "deploy.json", needs, 50, *obey, "split=train"),
        _stage("deploy/unseen", "real_robot.deploy", run / "deploy_unseen", "deploy.json", needs, 50, *obey,
               "split=heldout"),
        _stage("film", "distill.film", run / "videos", ".", ("deploy",), 40, f"deploy={deployed}", *specialists),
    ]  # fmt: skip
    if cfg.realtime:
        # alone on the machine: an arm that shares its processors with training is not what a lab runs
        before = tuple(s.name for s in stages)
        stages += [_stage("deploy/realtime", "real_robot.deploy", deployed, "deploy.json", before, 30, *obey,
                          "split=train", f"realtime={cfg.realtime}")]  # fmt: skip
    others = tuple(s.name for s in stages)
    report = Stage("report", ("distill.report", f"run={run}"), run / "report.html", others, None, 10)
    return [*stages, report]


def _stage(
    name: str, module: str, out: Path, product: str, needs: tuple[str, ...], seconds: float, *options: str,
    log: str = "metrics.jsonl",
) -> Stage:  # fmt: skip
    return Stage(name, (module, *options, f"out={out}"), out / product, needs, out / log, seconds)


def _evaluate(name: str, out: Path, needs: tuple[str, ...], cfg: PipelineConfig, *options: str) -> Stage:
    argv = ("distill.evaluate", *options, f"episodes={cfg.episodes}", f"out={out}")
    return Stage(name, argv, out, needs, out.with_suffix(".metrics.jsonl"), 60)


def pipeline(cfg: PipelineConfig) -> int:
    """Run the chain; finished stages are reused, the others resume where they stopped."""
    run = Path(cfg.run)
    stages = CHAINS[cfg.chain](cfg)
    with exclusive(run):
        write_provenance(cfg, run)
        with Display(cfg.workers) as display:
            jobs = run_stages([*stages[:-1]], run, cfg.workers, display)
        gather_for_report(run)
        # always written anew: it is quick, and it shows the stages above
        jobs |= run_stages([replace(stages[-1], needs=())], run, 1, Quiet(), fresh=("report",))
    print(f"report: {run / 'report.html'}\nfigures: {run / 'summary.json'}")
    return 0


def gather_for_report(run: Path) -> None:
    """Put beside the run what the report shows of other places: baselines per specialist, the reward model's card."""
    rows: dict[str, dict[str, object]] = {}
    for kind in ("demonstrator", "clone"):
        file = run / "baselines" / f"{kind}.json"
        cells = json.loads(file.read_text())["cells"] if file.exists() else []
        for name, (_, jobs, _) in SPECIALISTS.items():
            pooled = [c for c in cells if c["variant"] in jobs and c["axis"] == "seen"]
            if pooled:
                rows.setdefault(name, {})[kind] = pool(pooled)
    if rows:
        _replace(run / "baselines.json", json.dumps(rows, indent=1))
    if CLIP_CARD.exists():
        _replace(run / "reward" / "card.json", CLIP_CARD.read_text())


def pool(cells: list[dict[str, Any]]) -> dict[str, object]:
    """One row for several jobs: counts add up, the cycle time is the mean weighted by successes."""
    won = sum(c["successes"] for c in cells)
    timed = [(c["successes"], c["cycle_steps"]) for c in cells if c["cycle_steps"] is not None]
    cycle = sum(n * t for n, t in timed) / max(1, sum(n for n, _ in timed)) if timed else None
    return {"successes": won, "episodes": sum(c["episodes"] for c in cells), "cycle_steps": cycle}


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


class Quiet:
    """A display that shows nothing."""

    def update(self, jobs: object) -> None:
        """Nothing to show."""


def write_provenance(cfg: PipelineConfig, run: Path) -> None:
    """``provenance.json``: versions, machine, seed, configuration and code of the run."""
    root = Path(__file__).resolve().parent.parent
    document = {
        "versions": {"python": platform.python_version(), **{p: metadata.version(p) for p in PACKAGES}},
        "machine": {"system": platform.platform(), "processor": _processor(), "cores": os.cpu_count()},
        "seed": cfg.seed,
        "config": asdict(cfg),
        "config_hash": hashlib.sha256(json.dumps(asdict(cfg), sort_keys=True).encode()).hexdigest()[:16],
        "git_commit": _git(root, "rev-parse", "HEAD"),
        "git_dirty": bool(_git(root, "status", "--porcelain")),
    }
    _replace(run / "provenance.json", json.dumps(document, indent=1))


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), platform.processor())


def _git(root: Path, *args: str) -> str:
    try:
        return subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True).stdout.strip()
    except OSError:  # no git on this machine
        return ""


VERB = Verb(
    name="pipeline",
    schema=PipelineConfig,
    run=pipeline,
    sentence="run the whole chain from nothing to a robot that obeys sentences; a second call reuses finished stages.",
    examples=(
        "distillery pipeline run=runs/quickstart",
        "distillery pipeline run=runs/seed1 seed=1 workers=2",
        "distillery pipeline chain=demo run=runs/demo episodes=20 sentences=10 realtime=2",
    ),
)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_verb(VERB, argv)


if __name__ == "__main__":
    sys.exit(main())
