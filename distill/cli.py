"""``distillery <verb>``: finds the verb's module and hands over; imports nothing heavy before it must."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata

from sims.errors import UserError, unknown_choice

# verb -> (module with a ``main(argv) -> int``, what it does)
VERBS: dict[str, tuple[str, str]] = {
    "train": ("control.train", "train a specialist with DSAC-T, SAC or PPO on one task"),
    "sweep": ("control.sweep", "search for settings of a training with Optuna"),
    "convert": ("control.convert", "turn a Stable-Baselines3 model into a policy artefact"),
    "fit": ("vlm_rewards.fit", "train the small CLIP that turns sentences into rewards"),
    "collect": ("distill.collect", "roll specialists out into a LeRobot v3.0 dataset"),
    "dataset": ("distill.dataset_check", "validate or describe a dataset"),
    "distill": ("distill.train", "distil a dataset and its specialists into one generalist that follows sentences"),
    "evaluate": ("distill.evaluate", "measure a policy on seen and held-out starts and phrasings"),
    "deploy": ("real_robot.deploy", "let a policy obey a sentence on a robot, real or virtual (dry run by default)"),
    "film": ("distill.film", "film specialists and deployed sentences"),
    "report": ("distill.report", "write the self-contained HTML report of a run"),
    "pipeline": ("distill.pipeline", "run the whole chain: train, distil, evaluate, deploy, report"),
    "benchmark": ("control.benchmark", "measure speed and learning beside Stable-Baselines3 and SBX"),
    "list": ("distill.inventory", "list worlds, algorithms, rewards and robots"),
    "doctor": ("distill.doctor", "check this machine: versions, rendering, sentence encoder, serial ports"),
}

USAGE = """distillery - train specialists in simulation, distil one generalist that follows language, run it on a robot.

usage: distillery <verb> [option=value ...]
       distillery <verb> --help

verbs:
{verbs}

The whole chain on a laptop:   distillery pipeline run=runs/quickstart
"""


def usage() -> str:
    """The text of ``distillery --help``."""
    return USAGE.format(verbs="\n".join(f"  {name:<10}{does}" for name, (_, does) in VERBS.items()))


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if args else 2
    if args[0] == "--version":
        print(f"robot-distillery {metadata.version('robot-distillery')}")
        return 0
    verb, rest = args[0], args[1:]
    try:
        if verb not in VERBS:
            raise unknown_choice("verb", verb, VERBS, "distillery <verb>")
        module = importlib.import_module(VERBS[verb][0])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return module.main(rest)


if __name__ == "__main__":
    sys.exit(main())
