"""Search for the settings of a training: ``distillery sweep env=... 'algo.lr=interval(1e-4,1e-2)'``, through hydra."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from control.config import TrainConfig
from control.train import VERB, train
from sims.errors import UserError
from sims.verbs import run_sweep

USAGE = """distillery sweep - search for settings of a training with Optuna, through hydra's sweeper

usage: distillery sweep [option=value ...] [out=folder]

Every option of 'distillery train' (see its --help) with a value or a range:
  algo.lr=interval(1e-4,1e-2)               a number between the two
  algo.lr=tag(log,interval(1e-4,1e-2))      the same, on a log scale
  algo.width=choice(64,128,256)             one of them
  hydra.sweeper.n_trials=20                 how many trainings
  hydra.sweeper.sampler.seed=0              the search is repeatable
Each trial is a run folder out/<number>; the best settings are in out/optimization_results.yaml.
What is maximised is the success of the last evaluation, or its return in a world without success.

examples:
  distillery sweep env=gym/Pendulum-v1 algo=sac steps=8000 \\
      'algo.lr=tag(log,interval(1e-4,1e-2))' hydra.sweeper.n_trials=10 out=runs/sweep
  distillery sweep experiment=parallel_ppo 'algo.clip=choice(0.1,0.2,0.3)' hydra.sweeper.n_trials=3"""


def objective(cfg: TrainConfig, folder: Path) -> float:
    """Train in the trial's folder; the number to be maximised."""
    out = train(dataclasses.replace(cfg, out=str(folder / "run"), progress=False))
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return float(result["success"] if result["successes"] else result["return"])


def main(argv: list[str] | None = None) -> int:
    """Entry point of the verb; returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(args):
        print(USAGE)
        return 0
    out = next((a.split("=", 1)[1] for a in args if a.startswith("out=")), "runs/sweep")
    try:
        run_sweep(VERB, [a for a in args if not a.startswith("out=")], objective, Path(out))
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
