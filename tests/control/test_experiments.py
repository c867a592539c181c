"""The group ``experiment``: whole settings by one name."""

from __future__ import annotations

import json
import re

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


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_what_its_comment_adds_for_a_gpu_composes(name):
    """A vector step of 4096 environments must not be followed by an evaluation each time."""
    text = (config_dir() / "experiment" / f"{name}.yaml").read_text()
    added = [word for line in re.findall(r"^#   (\S.*)", text, re.MULTILINE) for word in line.split()]
    cfg = resolve(compose(VERB, [f"experiment={name}", *added]))
    assert (cfg.num_envs, cfg.device, cfg.algo.gamma) == (4096, "cuda", 0.97)
    assert cfg.eval_every >= 50 * cfg.num_envs
    assert cfg.log_every >= 10 * cfg.num_envs
    if name == "parallel_ppo":
        assert cfg.algo.minibatch_size * 4 == cfg.num_envs * cfg.algo.rollout_steps
    else:
        assert cfg.utd * cfg.num_envs == pytest.approx(8, abs=0.5)


def test_the_help_lists_them(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert f"experiment={' | '.join(EXPERIMENTS)}" in " ".join(text.split())


def test_none_is_chosen_by_default():
    assert compose(VERB, []).algo.gamma is None


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_runs_a_few_vector_steps(name, tmp_path):
    args = [
        f"experiment={name}",
        "steps=1536",
        "eval_every=0",
        "final_episodes=4",
        "log_every=512",
        f"out={tmp_path}/x",
    ]
    if name != "parallel_ppo":
        args += ["algo.batch_size=64", "algo.warmup_steps=512"]
    assert main(args) == 0
    result = json.loads((tmp_path / "x" / "result.json").read_text())
    assert result["steps"] >= 1536
    assert result["updates"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_learns_to_reach(name, tmp_path):
    """About 35,000 steps off-policy, 65,000 with PPO: one seed each, all 100 fresh starts solved."""
    assert main([f"experiment={name}", "steps=120_000", f"out={tmp_path}/x"]) == 0
    result = json.loads((tmp_path / "x" / "result.json").read_text())
    assert result["solved"]
    assert result["success"] >= 0.95


def test_an_unknown_one_names_the_closest(capsys):
    assert main(["experiment=paralel_sac"]) == 2
    assert "Did you mean 'parallel_sac'?" in capsys.readouterr().err
