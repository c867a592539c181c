"""PPO through the verb: on every family of worlds, from the command line and from Python, up to learned skills."""

from __future__ import annotations

import json

import numpy as np
import pytest

from control.config import PPOConfig, TrainConfig
from control.policy import load_policy
from control.train import main, train

WORLDS = ["tabletop/reach", "gym/HalfCheetah-v5", pytest.param("brax/inverted_pendulum", marks=pytest.mark.slow)]


@pytest.mark.parametrize("env", WORLDS)  # Brax takes half a minute to compile
def test_the_command_line_trains_and_exports(env, tmp_path):
    if env.startswith("brax"):
        pytest.importorskip("brax")
    out = tmp_path / "run"
    limit = [] if env.startswith("tabletop") else ["+env_options.time_limit=50"]
    args = [f"env={env}", "algo=ppo", "num_envs=4", "steps=400", "eval_every=200", "eval_episodes=4",
            "final_episodes=4", "log_every=100", "algo.rollout_steps=25", "algo.minibatch_size=30", "algo.epochs=2",
            f"out={out}"]  # fmt: skip
    assert main([*args, *limit]) == 0
    result = json.loads((out / "result.json").read_text())
    assert (result["algo"], result["steps"], result["updates"]) == ("ppo", 400, 4 * 2 * 3)  # 100 rows: 3 x 30
    assert (result["excluded"], result["solved"]) == (0, False)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    learned = [row for row in rows if "policy_loss" in row]
    assert [row["step"] for row in learned] == [100, 200, 300, 400]
    assert all(np.isfinite(row[name]) for row in learned for name in ("kl", "value_loss", "entropy", "std"))
    evaluated = [row for row in rows if "eval/success" in row]
    assert [row["step"] for row in evaluated] == [200, 400]
    assert all(row["eval/success_low"] <= row["eval/success"] <= row["eval/success_high"] for row in evaluated)
    spec = load_policy(out / "policy").spec  # golden vectors are checked on loading
    obs = {g: np.zeros((3, *spec.env.observation[g].shape), np.float32) for g in spec.inputs}
    action, _ = load_policy(out / "policy")(obs)
    assert action.shape == (3, 1, *spec.env.action.shape)
    assert (np.abs(action) <= np.maximum(np.abs(spec.env.action.low), np.abs(spec.env.action.high)) + 1e-6).all()


@pytest.mark.parametrize(
    "option", ["utd=0.5", "demos=3", "prior_share=0.5", "algo.tau=0.1", "algo.alpha=0.1", "algo.batch_size=3"]
)
def test_the_command_line_refuses_what_ppo_would_ignore(option, tmp_path, capsys):
    assert main(["algo=ppo", option, f"out={tmp_path}/x"]) == 2
    assert option.partition("=")[0].removeprefix("algo.") in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_swings_a_pendulum_up(tmp_path):
    """Random actions have a return of about -1200, a pendulum that is held up all the time 0, a good policy -150."""
    algo = PPOConfig()
    cfg = TrainConfig(env="gym/Pendulum-v1", algo=algo, steps=32_000, eval_every=0, final_episodes=24,
                      tensorboard=False, out=str(tmp_path / "run"))  # fmt: skip
    assert json.loads((train(cfg) / "result.json").read_text())["return"] > -700


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_learns_to_reach_with_its_own_settings(seed, tmp_path):
    result = train(TrainConfig(env="tabletop/reach", algo=PPOConfig(), seed=seed, out=str(tmp_path / "run")))
    figures = json.loads((result / "result.json").read_text())
    assert figures["solved"]
    assert figures["success"] >= 0.95
    assert figures["steps"] <= 80_000


@pytest.mark.slow
def test_balances_the_pendulum_of_brax_for_the_whole_episode(tmp_path):
    pytest.importorskip("brax")
    cfg = TrainConfig(
        env="brax/inverted_pendulum", algo=PPOConfig(), steps=200_000, eval_every=0, out=str(tmp_path / "run")
    )
    assert json.loads((train(cfg) / "result.json").read_text())["return"] >= 990  # 1000 steps of reward 1
