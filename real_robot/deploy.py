"""The verb `deploy`: a policy obeys sentences on a robot. Dry run unless `live=true`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from real_robot.batch import draw_requests, run_requests, run_sentences
from real_robot.estop import stop_key
from real_robot.results import Request, summarise
from sims.errors import UserError, unknown_choice
from sims.verbs import Verb, run_verb

__all__ = ["Request", "draw_requests", "run_requests", "run_sentences", "summarise"]

TIMES = ("auto", "real", "lockstep")


@dataclass
class RobotConfig:
    """Which robot, and what differs from its file."""

    file: str = field(default="so101_virtual", metadata={"help": "robot file: a shipped name or a path to a YAML"})
    port: str = field(default="", metadata={"help": "serial port instead of the file's"})
    tracker: str = field(default="", metadata={"help": "Unix socket of the object tracker instead of the file's"})


@dataclass
class DeployConfig:
    """Run a policy on a robot."""

    policy: str = field(default="", metadata={"help": "folder of the policy artefact"})
    robot: RobotConfig = field(default_factory=RobotConfig)
    sentence: str = field(default="", metadata={"help": "what the robot should do"})
    live: bool = field(default=False, metadata={"help": "false: dry run, nothing is written to the motors"})
    sentences: int = field(default=0, metadata={"help": "draw this many held-out sentences by seed (virtual robots)"})
    realtime: int = field(default=0, metadata={"help": "of those, execute so many again in real time"})
    time: str = field(
        default="auto", metadata={"help": "real, lockstep (virtual robots), auto: lockstep for drawn ones"}
    )
    seed: int = field(default=0, metadata={"help": "draws sentences and the layouts of a virtual table"})
    split: str = field(default="heldout", metadata={"help": "start ranges of a virtual table: train or heldout"})
    steps: int = field(default=0, metadata={"help": "actions per sentence, 0 = the time limit of the task"})
    out: str = field(default="runs/deploy", metadata={"help": "folder for results.jsonl and trajectories"})
    estop_file: str = field(default="", metadata={"help": "the arm stops when this file appears (space bar: same)"})

    def __post_init__(self) -> None:
        if self.time not in TIMES:
            raise unknown_choice("time", self.time, TIMES, "time=")
        if self.split not in ("train", "heldout"):
            raise unknown_choice("split", self.split, ("train", "heldout"), "split=")
        for name in ("sentences", "realtime", "seed", "steps"):
            if getattr(self, name) < 0:
                raise UserError(f"option {name}={getattr(self, name)}: must not be negative.")


def deploy(cfg: DeployConfig) -> int:
    """Run one sentence, or a batch drawn by seed. Exit status 0, or 1 if a fault ended a live sentence."""
    if not cfg.policy:
        raise UserError("no policy given. Say which: policy=runs/quickstart/generalist/policy")
    if not cfg.sentence and not cfg.sentences:
        raise UserError('nothing to do: give sentence="press the green button", or sentences=50 on a virtual robot.')
    requests = _requests(cfg)
    rows = run_requests(
        cfg.policy,
        requests,
        robot=cfg.robot.file,
        port=cfg.robot.port,
        tracker=cfg.robot.tracker,
        out=Path(cfg.out),
        live=cfg.live,
        split=cfg.split,
        steps=cfg.steps,
        estop_file=Path(cfg.estop_file) if cfg.estop_file else None,
        guard=stop_key,
        strict=bool(cfg.sentence),
    )
    for row in rows:
        print(_line(row, cfg.live))
    if not cfg.live:
        print("dry run: no motor was written to. Add live=true to move.")
    left = len(requests) - len(rows)
    if left:
        print(f"{left} sentences were left undone after a fault; the same command goes on with them.")
    return int(bool(left) or (bool(cfg.sentence) and rows[0]["ended"].startswith("fault")))


def _requests(cfg: DeployConfig) -> list[Request]:
    if cfg.sentence:
        return [Request(0, cfg.sentence, cfg.seed, realtime=cfg.time != "lockstep")]
    drawn = draw_requests(cfg.sentences, cfg.seed, realtime=cfg.time == "real")
    again = [Request(r.index, r.sentence, r.seed, r.variant, True) for r in drawn[: cfg.realtime]]
    return drawn + (again if cfg.time != "real" else [])


def _line(row: dict[str, object], live: bool) -> str:
    if row["refused"]:
        return f"refused   {row['refused']}"
    outcome = {True: "done", False: "not done", None: "executed"}[row["success"]] if live else "dry run"  # type: ignore[index]
    late = row["lateness_us"]
    p99 = f", servo lateness p99 {late['p99']:.0f} us" if row["realtime"] and isinstance(late, dict) and late else ""
    return f'{outcome:<9} "{row["sentence"]}" ({row["steps"]} actions, ended by {row["ended"]}{p99})'


VERB = Verb(
    name="deploy",
    schema=DeployConfig,
    run=deploy,
    sentence="let a policy obey a sentence on a robot, real or virtual; a dry run unless live=true.",
    examples=(
        'distillery deploy policy=runs/quickstart/generalist/policy sentence="press the green button" live=true',
        'distillery deploy policy=my/policy robot=so101 robot.port=/dev/ttyACM0 sentence="lift the red cube"',
        "distillery deploy policy=runs/quickstart/generalist/policy sentences=50 realtime=5 live=true out=runs/deploy",
    ),
    groups={"robot": {"so101": RobotConfig, "so101_virtual": RobotConfig}},
)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    return run_verb(VERB, argv)


if __name__ == "__main__":
    sys.exit(main())
