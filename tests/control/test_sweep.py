"""A tiny search through hydra's Optuna sweeper, in a process of its own as hydra changes globals."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml

from control import sweep as sweep_module
from control.config import TrainConfig
from control.sweep import main, run_trial

ARGS = ["experiment=parallel_sac", "env=gym/Pendulum-v1", "env_options.time_limit=20", "num_envs=2", "steps=96",
        "algo.batch_size=16", "algo.width=8", "algo.warmup_steps=32", "eval_every=0", "final_episodes=1"]  # fmt: skip


def sweep(*args: str, path: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "control.sweep", *args]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([path, *sys.path])}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def test_two_trials_with_other_rates_and_the_best_of_them(tmp_path):
    done = sweep(*ARGS, "algo.lr=tag(log,interval(1e-4,1e-2))", "hydra.sweeper.n_trials=2", "hydra.sweeper.sampler.seed=1",
                 f"out={tmp_path}")  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    results, rates = [], []
    for trial in (0, 1):
        run = tmp_path / str(trial) / "run"
        results.append(json.loads((run / "result.json").read_text())["return"])
        algo = yaml.safe_load((run / "config.yaml").read_text())["algo"]
        assert (algo["name"], algo["gamma"], algo["width"]) == ("sac", 0.97, 8)  # the experiment's, and what was given
        rates.append(algo["lr"])
    assert rates[0] != rates[1]
    best = yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())
    assert best["best_value"] == max(results)
    assert best["best_params"]["algo.lr"] == rates[results.index(max(results))]


@pytest.mark.parametrize(
    ("env", "objective", "want"),
    [("tabletop/reach", "", 0.0), ("tabletop/reach", "return", 300.0), ("gym/X", "", 300.0), ("gym/X", "success", 0.0)],
)
def test_every_trial_is_judged_by_the_same_number(env, objective, want, tmp_path, monkeypatch):
    """A trial without a success does not win by its return."""
    (tmp_path / "result.json").write_text(
        json.dumps({"success": 0.0, "has_success": "tabletop" in env, "return": 300.0})
    )
    monkeypatch.setattr(sweep_module, "train", lambda cfg: tmp_path)
    assert run_trial(TrainConfig(env=env), tmp_path, objective) == want


def test_an_option_that_does_not_exist_is_one_message(tmp_path):
    done = sweep(*ARGS, "algo.lrr=1", "hydra.sweeper.n_trials=1", f"out={tmp_path}")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert "lrr" in last


def test_an_objective_that_does_not_exist_names_the_closest(capsys):
    assert main([*ARGS, "objective=succes"]) == 2
    assert "Did you mean 'success'?" in capsys.readouterr().err


def test_a_missing_sweeper_is_named_with_its_extra(tmp_path):
    """A package that fails to import stands in for one that is not there."""
    (tmp_path / "optuna").mkdir()
    (tmp_path / "optuna" / "__init__.py").write_text("raise ModuleNotFoundError('no optuna here')")
    done = sweep(*ARGS, "algo.lr=interval(1e-4,1e-2)", f"out={tmp_path / 'out'}", path=str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert "robot-distillery[sweep]" in done.stderr
    assert "Traceback" not in done.stderr
