"""A tiny search through hydra's Optuna sweeper, in a process of its own as hydra changes globals."""

from __future__ import annotations

import json
import subprocess
import sys

import yaml

ARGS = ["env=gym/Pendulum-v1", "algo=sac", "algo.width=8", "algo.warmup_steps=32", "steps=96", "eval_every=0",
        "final_episodes=1", "+env_options.time_limit=20"]  # fmt: skip


def sweep(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "control.sweep", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_two_trials_with_other_rates_and_the_best_of_them(tmp_path):
    done = sweep(*ARGS, "algo.lr=tag(log,interval(1e-4,1e-2))", "hydra.sweeper.n_trials=2", "hydra.sweeper.sampler.seed=1",
                 f"out={tmp_path}")  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    results, rates = [], []
    for trial in (0, 1):
        run = tmp_path / str(trial) / "run"
        results.append(json.loads((run / "result.json").read_text())["return"])
        rates.append(yaml.safe_load((run / "config.yaml").read_text())["algo"]["lr"])
    assert rates[0] != rates[1]
    best = yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())
    assert best["best_value"] == max(results)
    assert best["best_params"]["algo.lr"] == rates[results.index(max(results))]


def test_a_mistake_is_one_message(tmp_path):
    done = sweep(*ARGS, "algo.lrr=1", "hydra.sweeper.n_trials=1", f"out={tmp_path}")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "lrr" in done.stderr.splitlines()[-1]
