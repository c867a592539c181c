"""The loop: learns a toy, resumes bit for bit, applies a reward model, keeps evaluation apart."""

import dataclasses
import json

import pytest
import torch
from toy_worlds import Point, proprio

from control import episodes
from control.config import DSACTConfig, SACConfig, TrainConfig, resolve
from control.demonstrations import collect_demonstrations
from control.evaluate import evaluate, wilson
from control.log import MetricLog, read_rows
from control.off_policy import OffPolicyLoop
from sims.errors import UserError

ALGOS = [SACConfig(warmup_steps=64, batch_size=64, width=32, gamma=0.9, lr=1e-3, actor_average=0.02),
         DSACTConfig(warmup_steps=64, batch_size=64, width=32, gamma=0.9, lr=1e-3, actor_average=0.02)]  # fmt: skip


def _cfg(algo, **changes):
    base = TrainConfig(env="toy/point", algo=algo, num_envs=4, steps=1500, utd=0.5, eval_every=0, log_every=320,
                       checkpoint_seconds=1e9)  # fmt: skip
    return resolve(dataclasses.replace(base, **changes))


def _loop(cfg, out, **kwargs):
    return OffPolicyLoop(cfg, Point(4, cfg.seed), Point(4, 77), proprio, out, **kwargs)


@pytest.mark.parametrize("algo", ALGOS, ids=["sac", "dsact"])
def test_learns_to_reach_the_origin(algo, tmp_path):
    loop = _loop(_cfg(algo, steps=2400), tmp_path)
    before = evaluate(loop.eval_env, loop.act_greedily, 40, seed=5)
    loop.run()
    after = evaluate(loop.eval_env, loop.act_greedily, 40, seed=5)
    assert before.success < 0.5
    assert after.success >= 0.9
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert {
        "stage",
        "step",
        "total",
        "steps_per_s",
        "return",
        "success",
        "time",
        "critic_loss",
        "reward/distance",
    } <= rows[-1].keys()


@pytest.mark.parametrize("algo", [*ALGOS, dataclasses.replace(ALGOS[1], normalize=True, n_step=3)],
                         ids=["sac", "dsact", "dsact-normalized-3-step"])  # fmt: skip
def test_resume_is_bit_exact(algo, tmp_path):
    whole = _loop(_cfg(algo, steps=640, eval_every=160, eval_episodes=4), tmp_path / "whole")
    whole.run()
    _loop(_cfg(algo, steps=320, eval_every=160, eval_episodes=4), tmp_path / "half").run()
    torch.manual_seed(123)  # the global stream must not matter
    half = _loop(_cfg(algo, steps=640, eval_every=160, eval_episodes=4), tmp_path / "half")
    half.run()
    assert half.step == whole.step
    _assert_equal(half.learner.state_dict(), whole.learner.state_dict())
    rows = [loop.replay.slice(0, loop.replay.total) for loop in (half, whole)]
    assert torch.equal(*rows)
    _assert_equal(half.env.state_dict(), whole.env.state_dict())
    clock = ("time", "steps_per_s", "total")
    curves = [
        [{k: v for k, v in r.items() if k not in clock} for r in read_rows(tmp_path / d / "metrics.jsonl")]
        for d in ("whole", "half")
    ]
    assert curves[0] == curves[1]


@pytest.mark.parametrize("utd", [1 / 32, 1 / 64])  # an update per segment, of the actor in every other; in every other
def test_rows_after_a_resume_tell_what_was_measured_before(utd, tmp_path):
    algo = dataclasses.replace(ALGOS[0], warmup_steps=32)
    _loop(_cfg(algo, steps=320, utd=utd, log_every=32), tmp_path).run()
    _loop(_cfg(algo, steps=352, utd=utd, log_every=32), tmp_path).run()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in rows[-2:]] == [320, 352]
    assert rows[-1].keys() == rows[-2].keys()
    assert rows[-1]["actor_loss"] == rows[-2]["actor_loss"] or rows[-1]["updates"] % 2 == 0


def _assert_equal(a, b):
    assert a.keys() == b.keys()
    for key in a:
        if isinstance(a[key], dict):
            _assert_equal(a[key], b[key])
        else:
            assert torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key], key


def test_killed_run_continues_after_its_checkpoint_without_double_rows(tmp_path):
    _loop(_cfg(ALGOS[0], steps=320), tmp_path).run()
    log = MetricLog(tmp_path / "metrics.jsonl", "train", 9)
    log.write({"step": 352})  # written after the checkpoint, lost with the kill
    (tmp_path / "metrics.jsonl").open("a").write('{"step": 3')  # torn line
    _loop(_cfg(ALGOS[0], steps=640), tmp_path).run()
    steps = [r["step"] for r in read_rows(tmp_path / "metrics.jsonl")]
    assert 352 not in steps
    assert steps == sorted(set(steps))


def test_reward_model_replaces_the_reward_and_keeps_the_true_one(tmp_path):
    seen = []

    def score(segment):
        seen.append(segment)
        return torch.full(segment.reward.shape, 7.0)

    loop = _loop(_cfg(ALGOS[0]), tmp_path, score=score)
    segment = loop.collect()
    loop.store(segment)
    assert segment.action.abs().max() <= 1
    assert seen[0].action[..., 1].max() > 0.2  # the model sees physical units: the second axis reaches 0.3
    batch = loop.replay.gather(torch.arange(8), 0.9, 1)
    assert (batch.reward == 7).all()
    assert torch.equal(loop.rescore(segment).metrics["reward/true"], segment.reward)


def test_replay_holds_true_successors_and_bootstraps_time_limits(tmp_path):
    loop = _loop(_cfg(ALGOS[0], steps=640), tmp_path)
    for _ in range(5):
        loop.store(loop.collect())  # 40 steps of 4 environments: at least one time limit each
    batch = loop.replay.gather(torch.arange(len(loop.replay)), 0.9, 1)
    low, high = torch.tensor(loop.env.spec.action.low), torch.tensor(loop.env.spec.action.high)
    moved = batch.obs + (low + high) / 2 + (high - low) / 2 * batch.action
    assert torch.allclose(moved, batch.next_obs, atol=1e-6)  # never a reset observation
    left = batch.next_obs.norm(dim=-1) > 2
    assert torch.equal(batch.discount == 0, left)


def test_evaluation_is_repeatable_and_moves_nothing(tmp_path):
    loop = _loop(_cfg(dataclasses.replace(ALGOS[0], normalize=True)), tmp_path)
    loop.store(loop.collect())
    before = loop.learner.state_dict()
    first = evaluate(loop.eval_env, loop.act_greedily, 10, seed=3)
    assert evaluate(loop.eval_env, loop.act_greedily, 10, seed=3) == first
    assert first.episodes == 10
    _assert_equal(before, loop.learner.state_dict())


def test_evaluation_counts_final_success_and_cycle_steps():
    env = Point(2, limit=4)
    env._start = lambda: torch.tensor([[0.15, 0.0], [0.9, 0.0]])
    env.reset(0)
    # environment 0 is inside after one step of -0.1 and stays; environment 1 never gets there in 4 steps
    result = evaluate(
        env,
        lambda obs: torch.tensor([[-0.1, 0.0], [-0.1, 0.0]]) * (obs["proprio"].norm(dim=-1, keepdim=True) > 0.06),
        4,
        0,
    )
    assert (result.episodes, result.successes, result.held, result.cycle_steps) == (4, 2, 2, 1.0)


def test_wilson_interval():
    # 95/100: centre (0.95 + 3.8415/200) / (1 + 0.038415) = 0.9333, half 0.0450
    low, high = wilson(95, 100)
    assert (low, high) == pytest.approx((0.8882, 0.9785), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def test_early_stop_after_two_good_evaluations(tmp_path, monkeypatch):
    loop = _loop(_cfg(ALGOS[0], steps=3200, eval_every=64, stop_success=0.5), tmp_path)
    good = dataclasses.replace(evaluate(loop.eval_env, loop.act_greedily, 4, 0), successes=4)
    bad = dataclasses.replace(good, successes=0)
    answers = iter([good, bad, good, good])
    monkeypatch.setattr(episodes, "evaluate", lambda *a: next(answers))
    loop.run()
    assert loop.step == 4 * 64


def test_demonstrations_keep_successes_only_in_the_unit_box():
    env = Point(4, limit=20)

    def act(obs):
        x = obs["proprio"]
        return torch.where(x[:, :1] > 0, -x, torch.zeros_like(x)).clamp(-0.2, 0.3)  # half of the starts fail

    demos = collect_demonstrations(env, act, 6, seed=1)
    assert len(demos) == 6
    for d in demos:
        assert d.reward.shape == (20, 1)
        assert d.next_obs["proprio"][-1].norm() < 0.1
        assert d.truncated[-1].all()
        assert d.action.abs().max() <= 1
    with pytest.raises(UserError, match="no success"):
        collect_demonstrations(env, lambda obs: torch.zeros(4, 2), 2, seed=1)


def test_metric_rows_are_plain_json(tmp_path):
    MetricLog(tmp_path / "m.jsonl", "train", 10).write({"step": 1, "q": torch.tensor(0.5), "bad": float("nan")})
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {
        "stage": "train",
        "total": 10,
        "step": 1,
        "q": 0.5,
        "bad": None,
    }
