"""PPO and its advantages: arithmetic worked by hand, the update by hand against autograd, learning, resuming."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from torch import tensor
from toy_worlds import Point, proprio

from control.config import PPOConfig, TrainConfig, resolve
from control.evaluate import evaluate
from control.export import ActorModule
from control.on_policy import OnPolicyLoop
from control.ppo import PPO, clip_norm, entropy, explained_variance, standardized, surrogate, value_errors
from control.rollout import ReturnScale, Rollout, advantages
from sims.errors import UserError


def rollout_of(value, next_value, reward, terminated=None, truncated=None, valid=None) -> Rollout:
    """(T,) lists as one environment."""
    t = len(value)
    flag = lambda x: tensor(x or [False] * t).view(t, 1)  # noqa: E731
    number = lambda x: tensor(x).view(t, 1)  # noqa: E731
    rows = torch.zeros(t, 1, 2)
    return Rollout(rows, rows, torch.zeros(t, 1, 1), torch.zeros(t, 1), number(value), number(next_value),
                   number(reward), flag(terminated), flag(truncated), flag(valid or [True] * t))  # fmt: skip


def test_advantages_over_terminated_truncated_and_continuing_rows():
    # gamma=.5, lambda=.5, V = 1, 2, 3, 4; rows: continuing, terminated, truncated, continuing
    got = advantages(
        rollout_of([1.0, 2.0, 3.0, 4.0], [2.0, 99.0, 7.0, 8.0], [1.0, 1.0, 1.0, 1.0],
                   terminated=[False, True, False, False], truncated=[False, False, True, False]),
        0.5, 0.5)  # fmt: skip
    # last: 1 + .5*8 - 4 = 1
    # truncated: 1 + .5*7 - 3 = 1.5: the true successor's 7 counts, nothing of the next episode (.25*1) is added
    # terminated: 1 + 0 - 2 = -1: neither the 99 behind the end nor the next episode (.25*1.5)
    # first: 1 + .5*2 - 1 + .25*(-1) = .75
    assert got.flatten().tolist() == pytest.approx([0.75, -1.0, 1.5, 1.0])


def test_lambda_one_is_the_discounted_return_and_lambda_zero_the_td_error():
    rollout = rollout_of([0.5, 0.25, 0.0], [0.25, 0.0, 2.0], [1.0, 2.0, 3.0])
    # returns with gamma=.5: 3+.5*2=4; 2+.5*4=4; 1+.5*4=3
    assert advantages(rollout, 0.5, 1.0).flatten().tolist() == pytest.approx([2.5, 3.75, 4.0])
    assert advantages(rollout, 0.5, 0.0).flatten().tolist() == pytest.approx([0.625, 1.75, 4.0])


def test_an_invalid_row_has_no_advantage_and_none_leaks_through_it():
    rollout = rollout_of([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 5.0, 1.0], valid=[True, False, True])
    assert advantages(rollout, 1.0, 1.0).flatten().tolist() == pytest.approx([1.0, 0.0, 1.0])


def test_clipped_surrogate():
    # A>0: no gain beyond 1.2; A<0: no relief below 0.8, full loss above
    ratio, advantage = tensor([1.5, 0.5, 0.5, 1.5]), tensor([2.0, 2.0, -2.0, -2.0])
    assert surrogate(ratio, advantage, 0.2).tolist() == pytest.approx([2.4, 1.0, -1.6, -3.0])


def test_value_errors_are_the_worse_of_plain_and_held():
    new, old, target = tensor([3.0, 3.0]), tensor([1.0, 1.0]), tensor([2.0, 4.0])
    assert value_errors(new, old, target, None).tolist() == [1.0, 1.0]
    # held at 1.5: errors .5 and 2.5
    assert value_errors(new, old, target, 0.5).tolist() == pytest.approx([1.0, 6.25])


def test_entropy_of_a_gaussian():
    assert entropy(tensor([0.0])).item() == pytest.approx(0.5 * math.log(2 * math.pi * math.e))
    assert entropy(tensor([1.0, -1.0])).item() == pytest.approx(math.log(2 * math.pi * math.e))


def test_small_parts():
    assert standardized(tensor([1.0, 3.0])).tolist() == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)])
    assert standardized(tensor([5.0])).tolist() == [5.0]
    each = standardized(tensor([[1.0, 3.0], [10.0, 50.0]]))  # every minibatch by itself
    assert each.flatten().tolist() == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)] * 2)
    grad = tensor([3.0, 4.0])
    clip_norm(grad, 0.5)
    assert grad.tolist() == pytest.approx([0.3, 0.4])
    clip_norm(grad, 10.0)
    assert grad.tolist() == pytest.approx([0.3, 0.4])
    assert explained_variance(tensor([1.0, 2.0]), tensor([1.0, 2.0])).item() == 1.0


def test_reward_scale_is_the_deviation_of_the_discounted_return():
    scale = ReturnScale(1, 0.5, True)
    good, end = torch.ones(4, 1, dtype=torch.bool), tensor([[False], [True], [False], [False]])
    reward = tensor([[1.0], [1.0], [3.0], [1.0]])
    # sums: 1, 1.5 | 3, 2.5: the episode's end starts anew; population deviation of (1, 1.5, 3, 2.5)
    deviation = tensor([1.0, 1.5, 3.0, 2.5]).std(correction=0).item()
    assert scale(reward, end, good).flatten().tolist() == pytest.approx([x / deviation for x in (1, 1, 3, 1)], rel=1e-4)
    assert ReturnScale(1, 0.5, False)(reward, end, good) is reward


def test_initial_policy_is_centred_and_of_the_configured_deviation():
    learner = PPO(7, 3, PPOConfig(gamma=0.9, log_std=-0.5))
    obs = torch.randn(2000, 7)
    action, _ = learner.sample(obs)
    assert action.std(0).mean().item() == pytest.approx(math.exp(-0.5), rel=0.05)
    assert learner.act(obs, explore=False).abs().max() < 0.1


@pytest.mark.parametrize(
    ("update", "precision"), [("fused", "float32"), ("autograd", "float32"), ("fused", "bfloat16")]
)
def test_first_ratio_is_one_and_the_normaliser_stands_still_until_after_the_update(update, precision, tmp_path):
    cfg = cfg_of(rollout_steps=15, minibatch_size=16, epochs=2, lr=0.01, update=update, precision=precision)
    loop = loop_of(cfg, tmp_path)
    learner, seen, step = loop.learner, [], loop.learner._step
    learner._step = lambda batch: seen.append((batch.old.clone(), step(batch))) or seen[-1][1]
    for i in range(3):
        segment, log_prob, raw = loop.collect()
        assert learner.normalizer.count.item() == i * 15 * 4
        rollout = loop.rollout(segment, log_prob, raw)
        # what was noted at collection is right: the clipped action's density, or another normaliser's, is not
        again = learner.log_prob(rollout.obs.flatten(0, 1), rollout.action.flatten(0, 1))
        assert torch.allclose(again, log_prob.flatten(), atol=2e-5)
        seen.clear()
        loop.learn(segment, log_prob, raw)
        assert len(seen) == 6  # 60 rows: three minibatches of 16 in each of two passes
        ratios = [change.exp() for _, (_, _, change) in seen]
        assert torch.equal(ratios[0], torch.ones(16))  # bit for bit
        assert all((ratio != 1).all() for ratio in ratios[1:])
        # densities are those of the policy that collected, in every pass
        rounding = 0.1 if precision == "bfloat16" else 2e-5
        for old, _ in seen:
            assert (old.unsqueeze(-1) - log_prob.flatten()).abs().amin(-1).max() < rounding
        # the second pass has those of the first bit for bit, but for rows, at most 12, that the first one left over
        first, second = (torch.cat([old for old, _ in part]) for part in (seen[:3], seen[3:]))
        assert torch.isin(second, first).sum() >= 36


@pytest.mark.parametrize("activation", ["tanh", "relu", "gelu"])
@pytest.mark.parametrize("clip_value", [None, 0.1])
def test_updates_by_hand_equal_autograd(activation, clip_value):
    torch.manual_seed(0)
    base = {"lr": 1e-3, "gamma": 0.9, "width": 16, "epochs": 3, "minibatch_size": 32, "entropy": 0.01}
    cfg = PPOConfig(**base, activation=activation, clip_value=clip_value, clip=0.02)
    ours, oracle = PPO(5, 2, cfg), PPO(5, 2, dataclasses.replace(cfg, update="autograd"))
    before = oracle.theta.detach().clone()
    obs = torch.randn(16, 8, 5)
    action, log_prob = oracle.sample(obs.flatten(0, 1))
    ours.generator.set_state(oracle.generator.get_state())
    done = torch.rand(16, 8) < 0.1
    rollout = Rollout(obs, obs + 0.1, action.view(16, 8, 2), log_prob.view(16, 8), oracle.value(obs),
                      oracle.value(obs + 0.1), torch.randn(16, 8), done, ~done & (torch.rand(16, 8) < 0.1),
                      torch.rand(16, 8) < 0.95)  # fmt: skip
    left, right = ours.update(rollout), oracle.update(rollout)
    assert torch.allclose(ours.theta, oracle.theta, atol=1e-5)
    assert (oracle.theta - before).abs().max() > 3e-3
    assert right["clip_fraction"] > 0
    assert left.keys() == right.keys()
    for key in right:
        assert left[key].item() == pytest.approx(right[key].item(), rel=1e-3, abs=1e-4), key


def test_every_step_follows_a_gradient_clipped_as_a_whole(monkeypatch):
    learner, norms = PPO(5, 2, PPOConfig(gamma=0.9, width=8, epochs=2, minibatch_size=8, max_grad_norm=1e-3)), []
    step, grad = learner.optimizer.step, lambda: torch.as_tensor(learner.theta.grad)
    monkeypatch.setattr(learner.optimizer, "step", lambda: norms.append(grad().norm().item()) or step())
    obs = torch.randn(16, 1, 5)
    rollout = rollout_of([0.0] * 16, [0.0] * 16, list(map(float, range(16))))
    action, log_prob = learner.sample(obs[:, 0])
    learner.update(dataclasses.replace(rollout, obs=obs, action=action.unsqueeze(1), log_prob=log_prob.unsqueeze(1)))
    assert norms == pytest.approx([1e-3] * 4, rel=2e-3)


def test_minibatches_are_drawn_anew_and_cover_the_valid_rows(monkeypatch):
    learner = PPO(2, 1, PPOConfig(gamma=0.9, width=8, epochs=2, minibatch_size=4))
    seen: list[list[float]] = []
    monkeypatch.setattr(learner, "_step", lambda batch: seen.append(batch.obs[:, 0].tolist()) or (torch.zeros(4),) * 3)
    rollout = rollout_of([0.0] * 9, [0.0] * 9, [0.0] * 9, valid=[True] * 8 + [False])
    obs = torch.arange(9.0).view(9, 1, 1).expand(9, 1, 2)
    learner.update(dataclasses.replace(rollout, obs=obs))
    first, second = seen[0] + seen[1], seen[2] + seen[3]
    assert sorted(first) == sorted(second) == [float(i) for i in range(8)]
    assert first != second


def test_target_kl_stops_the_passes():
    cfg = PPOConfig(gamma=0.9, lr=0.1, width=8, epochs=10, minibatch_size=8, target_kl=1e-4)
    learner = PPO(2, 1, cfg)
    rollout = rollout_of([0.0] * 16, [0.0] * 16, list(map(float, range(16))))
    action, log_prob = learner.sample(rollout.obs.flatten(0, 1))
    learner.update(dataclasses.replace(rollout, action=action.unsqueeze(1), log_prob=log_prob.unsqueeze(1)))
    assert learner.updates < 20


def test_the_learning_rate_falls_in_a_straight_line(tmp_path):
    learner = PPO(2, 1, PPOConfig(gamma=0.9, lr=0.4, lr_final=0.25))
    rates = []
    for progress in (0.0, 0.5, 1.0):
        learner.anneal(progress)
        rates.append(learner.optimizer.lr)
    assert rates == pytest.approx([0.4, 0.25, 0.1])
    loop = loop_of(cfg_of(lr=0.4, lr_final=0.0, rollout_steps=32, epochs=1), tmp_path)  # 640 steps in 5 rollouts of 128
    update, seen = loop.learner.update, []
    loop.learner.update = lambda rollout: seen.append(loop.learner.optimizer.lr) or update(rollout)
    loop.run()
    assert seen == pytest.approx([0.4, 0.32, 0.24, 0.16, 0.08])


def test_exported_policy_acts_as_the_learner(tmp_path):
    loop = loop_of(cfg_of(), tmp_path)
    loop.learn(*loop.collect())
    with torch.no_grad():
        loop.learner.split()[0].mul_(30)  # large enough to be clipped
    obs = torch.randn(6, 2)
    unit = loop.learner.export()(obs)
    assert torch.allclose(unit, loop.learner.act(obs, explore=False), atol=1e-6)
    assert 0 < (unit.abs() == 1).float().mean() < 1
    physical = ActorModule(proprio, loop.learner, loop.env.spec)({"proprio": obs})
    assert torch.allclose(physical.squeeze(1), loop.act_greedily({"proprio": obs}), atol=1e-6)


def test_learns_to_reach_the_origin(tmp_path):
    cfg = cfg_of(rollout_steps=32, minibatch_size=64, lr=1e-3, epochs=8)
    loop = loop_of(dataclasses.replace(cfg, steps=20_000), tmp_path, envs=16)
    before = evaluate(loop.eval_env, loop.act_greedily, 40, seed=5)
    loop.run()
    after = evaluate(loop.eval_env, loop.act_greedily, 40, seed=5)
    assert before.success < 0.2
    assert after.success > 0.6
    assert after.mean_return > -3.2 > before.mean_return


def test_resumes_bit_for_bit(tmp_path):
    cfg = cfg_of(rollout_steps=8, minibatch_size=16, epochs=2, normalize=True)
    whole = loop_of(dataclasses.replace(cfg, steps=320), tmp_path / "whole")
    whole.run()
    loop_of(dataclasses.replace(cfg, steps=160), tmp_path / "half").run()
    half = loop_of(dataclasses.replace(cfg, steps=320), tmp_path / "half")
    half.run()
    assert half.step == whole.step
    assert torch.equal(half.learner.theta, whole.learner.theta)
    assert torch.equal(half.scale.mean, whole.scale.mean)


def test_a_reward_model_sees_physical_actions_and_its_reward_is_learned_from(tmp_path):
    seen = []
    score = lambda segment: seen.append(segment) or torch.arange(64.0).view(16, 4)  # noqa: E731
    cfg = cfg_of(rollout_steps=16, normalize_reward=False, log_std=1.0)
    loop = OnPolicyLoop(resolve(cfg), Point(4, 0), Point(4, 77), proprio, tmp_path, score)
    segment, log_prob, raw = loop.collect()
    rollout = loop.rollout(segment, log_prob, raw)
    assert torch.equal(rollout.reward, torch.arange(64.0).view(16, 4))
    assert torch.equal(rollout.action, segment.action)  # as drawn,
    assert (segment.action.abs() > 1).float().mean() > 0.3  # often beyond the box,
    low, high = tensor(loop.env.spec.action.low), tensor(loop.env.spec.action.high)
    (scored,) = seen  # and scored as the world took it
    assert torch.allclose(scored.action, ((low + high) / 2 + (high - low) / 2 * segment.action).clamp(low, high))
    moved = scored.next_obs["proprio"] - scored.obs["proprio"]
    assert torch.allclose(moved, scored.action, atol=1e-6)


class Poisoned(Point):
    """Environment 1 returns a bad number now and then."""

    bad = float("nan")

    def step(self, action):
        step = super().step(action)
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls % 3 == 0:
            step.next_obs["proprio"][1] = self.bad
            step.obs["proprio"][1] = self.bad
            step.reward[1] = self.bad
        return step


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_numbers_of_one_environment_are_left_out_and_counted(tmp_path, bad):
    loop = loop_of(cfg_of(rollout_steps=12, minibatch_size=16, epochs=2), tmp_path)
    loop.env = Poisoned(4)
    loop.env.bad = bad
    loop.obs = loop.env.reset(0)
    for _ in range(4):
        loop.learn(*loop.collect())
    assert loop.excluded >= 4 * 4
    assert torch.isfinite(loop.learner.theta).all()
    assert torch.isfinite(loop.learner.normalizer.mean).all()
    assert loop.metrics["skipped"] == 0
    loop.env.step = lambda action, step=loop.env.step: poison(step(action))
    worst = loop.collect()
    with pytest.raises(UserError, match="not finite"):
        loop.learn(*worst)


def poison(step):
    step.reward.fill_(float("nan"))
    return step


def cfg_of(**algo) -> TrainConfig:
    base = {"gamma": 0.9, "lr": 3e-4, "width": 32, "rollout_steps": 16, "minibatch_size": 32, "epochs": 4}
    return TrainConfig(env="toy/point", algo=PPOConfig(**{**base, **algo}), steps=640, eval_every=0, stop_success=0.0,
                       demos=0, log_every=160, checkpoint_seconds=1e9)  # fmt: skip


def loop_of(cfg: TrainConfig, out, envs: int = 4) -> OnPolicyLoop:
    return OnPolicyLoop(resolve(cfg), Point(envs, cfg.seed), Point(envs, 77), proprio, out)


def test_metrics_are_plain_numbers(tmp_path):
    loop = loop_of(cfg_of(), tmp_path)
    loop.run()
    assert isinstance(loop.metrics, dict)
    assert SimpleNamespace(**{k: float(v) for k, v in loop.metrics.items()}).std > 0
