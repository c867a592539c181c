"""Search for the settings of a training: ``distillery sweep env=... 'algo.lr=interval(1e-4,1e-2)'``, through hydra."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from control.config import TrainConfig
from control.train import VERB, train
from sims.errors import UserError, unknown_choice
from sims.verbs import run_sweep

USAGE = """distillery sweep - search for settings of a training with Optuna, through hydra's sweeper

usage: distillery sweep [option=value ...] [out=folder]

Every option of 'distillery train' (see its --help) with a value or a range:
  algo.lr=interval(1e-4,1e-2)               a number between the two
  algo.lr=tag(log,interval(1e-4,1e-2))      the same, on a log scale
  algo.width=choice(64,128,256)             one of them
  hydra.sweeper.n_trials=20                 how many trainings
  hydra.sweeper.sampler.seed=0              the search is repeatable and reuses its trials
  objective=return                          maximise the last evaluation's return, or success;
                                            left out: success on the tabletop, else return
Each trial is a run folder out/<number>/run; the best settings are in out/optimization_results.yaml.

examples:
  distillery sweep env=gym/Pendulum-v1 algo=sac steps=8000 \\
      'algo.lr=tag(log,interval(1e-4,1e-2))' hydra.sweeper.n_trials=10 out=runs/sweep
  distillery sweep experiment=parallel_ppo 'algo.clip=choice(0.1,0.2,0.3)' hydra.sweeper.n_trials=3"""

OWN = {"out": "runs/sweep", "objective": ""}  # options of the sweep itself, with their defaults
OBJECTIVES = ("success", "return")


def run_trial(cfg: TrainConfig, folder: Path, objective: str = "") -> float:
    """Train in the trial's folder; the number to be maximised."""
    out = train(dataclasses.replace(cfg, out=str(folder / "run"), progress=False))
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    # one and the same number for every trial: a return of -500 is not below a success of 0
    return float(result[objective or ("success" if result["has_success"] else "return")])


def own_options(args: list[str]) -> tuple[dict[str, str], list[str]]:
    """The options of the sweep, and what is left for the trainings."""
    mine = [arg for arg in args if arg.split("=", 1)[0] in OWN and "=" in arg]
    options = OWN | dict(arg.split("=", 1) for arg in mine)
    if options["objective"] and options["objective"] not in OBJECTIVES:
        raise unknown_choice("objective", options["objective"], OBJECTIVES, "objective=")
    return options, [arg for arg in args if arg not in mine]


def main(argv: list[str] | None = None) -> int:
    """Entry point of the verb; returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(args):
        print(USAGE)
        return 0
    try:
        own, rest = own_options(args)
        run_sweep(VERB, rest, partial(run_trial, objective=own["objective"]), Path(own["out"]))
    except KeyboardInterrupt:
        print("interrupted; finished trials are kept", file=sys.stderr)
        return 130
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if not type(error).__module__.startswith(("hydra", "omegaconf", "antlr4")):
            raise
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
