"""Evaluation: who is judged on what, cycle times, resumable cells."""

import json

import numpy as np
import pytest
import torch

from distill.config import EvaluateConfig, Specialists
from distill.evaluate import Outcome, describe, evaluate, other_jobs, run_episodes
from sims.errors import UserError
from sims.types import TimeStep


class FakeEnv:
    """Two jobs; a world succeeds as soon as its job's number equals the action, from step ``delay`` on."""

    num_envs = 4

    def __init__(self, delay: int = 2):
        self.delay, self.jobs = delay, np.zeros(4, int)

    def reset(self, seed):
        self.step_count, self.variant_ids = 0, np.zeros(4, int)
        return {"x": torch.zeros(4, 1)}

    def set_variants(self, ids):
        self.variant_ids = np.asarray(ids)
        return {"x": torch.from_numpy(self.variant_ids)[:, None].float()}

    def step(self, action):
        self.step_count += 1
        good = (action[:, 0].numpy() == self.variant_ids) & (self.step_count > self.delay)
        zero = torch.zeros(4)
        obs = {"x": torch.from_numpy(self.variant_ids)[:, None].float()}
        return TimeStep(obs, obs, zero, zero > 1, zero > 1, {"success": torch.from_numpy(good).float()})


class Obedient:
    def restart(self):
        pass

    def __call__(self, obs, env):
        return obs["x"]


class Deaf(Obedient):
    def __call__(self, obs, env):
        return torch.zeros(4, 1)


STEPS = np.array([5, 5, 3, 2])


def test_success_counts_at_each_worlds_own_last_step():
    found = run_episodes(FakeEnv(2), Obedient(), 0, STEPS)
    # success from the third step on: worlds of 5, 5 and 3 steps see it, the one of 2 steps does not
    assert found.success.tolist() == [True, True, True, False]
    assert found.first.tolist() == [3, 3, 3, -1]


def test_swapped_sentences_are_judged_on_the_new_job():
    ones = np.ones(4, int)
    assert run_episodes(FakeEnv(0), Obedient(), 0, STEPS, begin=ones).success.all()
    assert not run_episodes(FakeEnv(0), Deaf(), 0, STEPS, begin=ones).success.any()


def test_switched_sentences_count_from_the_switch():
    ones = np.ones(4, int)
    found = run_episodes(FakeEnv(0), Obedient(), 0, STEPS, switch=(3, ones))
    assert found.success.all()
    assert found.first.tolist() == [1, 1, 1, 1]
    assert found.job.tolist() == [1, 1, 1, 1]
    assert not run_episodes(FakeEnv(0), Deaf(), 0, STEPS, switch=(3, ones)).success.any()


def test_rows_by_hand():
    outcome = Outcome(np.array([True, True, False, True]), np.array([10, 20, 5, 7]), np.array([0, 0, 0, 1]))
    row = outcome.row(0)
    # 2 of 3; cycle time over successes: (10 + 20) / 2; Wilson 95 % of 2/3 is [0.208, 0.939]
    assert (row["successes"], row["episodes"], row["cycle_steps"]) == (2, 3, 15.0)
    np.testing.assert_allclose(row["interval"], [0.2077, 0.9385], atol=1e-4)
    assert Outcome(np.array([False]), np.array([4]), np.array([0])).row(0)["cycle_steps"] is None


def test_other_jobs_are_never_the_same_and_evenly_many():
    found = other_jobs(2, 4, 90)
    assert np.bincount(found).tolist() == [30, 30, 0, 30]


def test_scripted_reach_reaches_and_cells_are_kept(tmp_path, monkeypatch):
    out = tmp_path / "e.json"
    cfg = EvaluateConfig(specialists=Specialists(reach="scripted"), episodes=10, num_envs=5, out=str(out))
    evaluate(cfg)
    cells = json.loads(out.read_text())["cells"]
    assert [(c["axis"], c["variant"], c["episodes"]) for c in cells] == [
        ("seen", "reach", 10),
        ("unseen_start", "reach", 10),
    ]
    assert min(c["rate"] for c in cells) > 0.6
    assert 5 < cells[0]["cycle_steps"] < 45
    assert "reach" in describe(cells)
    before = out.stat().st_mtime_ns
    evaluate(cfg)
    assert out.stat().st_mtime_ns == before
    with pytest.raises(UserError, match="other settings"):
        evaluate(EvaluateConfig(specialists=Specialists(reach="scripted"), episodes=11, out=str(out)))
    assert out.stat().st_mtime_ns == before


def test_bad_requests(tmp_path):
    with pytest.raises(UserError, match="unknown axis 'sen'"):
        EvaluateConfig(policy="x", axes=["sen"])
    with pytest.raises(UserError, match="either 'policy'"):
        EvaluateConfig()
    with pytest.raises(UserError, match="does not exist"):
        evaluate(EvaluateConfig(policy=str(tmp_path / "none"), out=str(tmp_path / "e.json")))
    (tmp_path / "e.json").write_text("{}")
    with pytest.raises(UserError, match="not an evaluation"):
        evaluate(EvaluateConfig(policy="scripted", jobs=["reach"], out=str(tmp_path / "e.json")))
    assert (tmp_path / "e.json").read_text() == "{}"
