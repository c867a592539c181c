"""The group ``experiment``: whole settings by one name."""

from __future__ import annotations

import json

import pytest

from control.config import resolve
from control.train import VERB, main
from sims.verbs import compose, config_dir

EXPERIMENTS = sorted(p.stem for p in (config_dir() / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_composes_and_a_users_value_wins(name):
    cfg = resolve(compose(VERB, [f"experiment={name}"]))
    assert cfg.num_envs == 64
    assert cfg.algo.gamma == 0.97
    assert cfg.algo.name == name.removeprefix("parallel_")
    changed = compose(VERB, [f"experiment={name}", "algo.gamma=0.9", "num_envs=8", "env=tabletop/press"])
    assert (changed.algo.gamma, changed.num_envs, changed.env) == (0.9, 8, "tabletop/press")


def test_none_is_chosen_by_default():
    assert compose(VERB, []).algo.gamma is None


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_runs_a_few_vector_steps(name, tmp_path):
    args = [
        f"experiment={name}",
        "steps=3072",
        "eval_every=0",
        "final_episodes=4",
        "log_every=512",
        f"out={tmp_path}/x",
    ]
    if name != "parallel_ppo":
        args += ["algo.batch_size=64", "algo.warmup_steps=512"]
    assert main(args) == 0
    result = json.loads((tmp_path / "x" / "result.json").read_text())
    assert result["steps"] >= 3072
    assert result["updates"] > 0


def test_an_unknown_one_names_the_closest(capsys):
    assert main(["experiment=paralel_sac"]) == 2
    assert "Did you mean 'parallel_sac'?" in capsys.readouterr().err
