"""Training on other people's worlds, through the same verb."""

import json

import numpy as np
import pytest

from control.config import DSACTConfig, SACConfig, TrainConfig
from control.policy import load_policy
from control.train import train


def _short(env, algo, out, **changes):
    base = {
        "num_envs": 8,
        "steps": 2_000,
        "utd": 0.02,
        "eval_every": 0,
        "final_episodes": 2,
        "log_every": 400,
        "env_options": {"time_limit": 100},
    }
    return train(TrainConfig(env=env, algo=algo, out=str(out), **(base | changes)))


@pytest.mark.parametrize(("env", "groups"), [("gym/Pendulum-v1", 1), ("brax/inverted_pendulum", 1)])
def test_trains_a_few_thousand_steps_and_exports(env, groups, tmp_path):
    if env.startswith("brax"):
        pytest.importorskip("brax")
    out = _short(env, DSACTConfig(warmup_steps=400, width=32, batch_size=64, normalize=True), tmp_path / "x")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] >= 2_000
    assert all(row["q"] is not None and np.isfinite(row["q"]) for row in rows if row["updates"])
    assert rows[-1]["updates"] == int(0.02 * (rows[-1]["step"] - 400))
    policy = load_policy(out / "policy")
    assert len(policy.spec.inputs) == groups
    obs = {g: np.zeros((3, *policy.spec.env.observation[g].shape), np.float32) for g in policy.spec.inputs}
    action, _ = policy(obs)
    low, high = np.array(policy.spec.env.action.low), np.array(policy.spec.env.action.high)
    assert ((action >= low) & (action <= high)).all()


@pytest.mark.slow
def test_sac_solves_pendulum(tmp_path):
    algo = SACConfig(warmup_steps=1_000, width=64, lr=1e-3)
    out = _short("gym/Pendulum-v1", algo, tmp_path / "x", steps=16_000, utd=0.5, final_episodes=16, env_options={})
    assert json.loads((out / "result.json").read_text())["return"] > -250
