"""A run that meets bad numbers, signals, or a device it must not wait for: what the loops promise beside learning."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loop import ALGOS
from test_loop import _assert_equal as assert_equal
from test_loop import _cfg as cfg_of
from test_loop import _loop as loop_of
from torch.utils._python_dispatch import TorchDispatchMode
from toy_worlds import Point, proprio

from control import episodes
from control.checkpoint import has_checkpoint
from control.config import PPOConfig
from control.log import read_rows
from control.off_policy import OffPolicyLoop
from control.on_policy import OnPolicyLoop
from control.types import Segment
from sims.errors import UserError

# -- nothing crosses to the host ------------------------------------------------------------------------------------


class Ops(TorchDispatchMode):
    """Names of the operations that were run, beside those methods of a tensor that read it without one."""

    READS = ("tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self, monkeypatch):
        super().__init__()
        self.seen: set[str] = set()
        for name in self.READS:
            method = getattr(torch.Tensor, name)
            monkeypatch.setattr(
                torch.Tensor, name, lambda x, *a, n=name, m=method, **k: self.seen.add(n) or m(x, *a, **k)
            )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put", "index_put_", "_index_put_impl_")
        masked = masked and any(x is not None and x.dtype == torch.bool for x in args[1])
        self.seen.add("mask" if masked else name)
        return func(*args, **(kwargs or {}))

    @property
    def crossings(self):
        reads = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "mask", "unique_dim"}
        return self.seen & {*reads, *self.READS}


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("algo", ALGOS, ids=["sac", "dsact"])
def test_nothing_is_read_back_while_collecting_storing_and_learning(algo, n_step, tmp_path, monkeypatch):
    loop = loop_of(cfg_of(dataclasses.replace(algo, normalize=True, n_step=n_step), log_every=10**9), tmp_path)
    loop.learner._gradients.nets.choose = False  # the path that CUDA takes
    for _ in range(3):
        loop.advance()
    with Ops(monkeypatch) as ops:
        for _ in range(4):
            loop.advance()
            loop.watch.log_if_due(loop.learner.updates, loop.metrics)
    assert loop.learner.updates > 50
    assert "index_select" in ops.seen
    assert not ops.crossings


def test_the_detector_detects(monkeypatch):
    x = torch.ones(3)
    for read in (lambda: float(x.sum()), lambda: x[x > 0], lambda: bool(x.any()), lambda: x.tolist(), lambda: x.cpu()):
        with monkeypatch.context() as patch, Ops(patch) as ops:
            read()
        assert ops.crossings


def test_nothing_is_read_back_during_a_rollout(tmp_path, monkeypatch):
    cfg = cfg_of(PPOConfig(width=16, rollout_steps=8, minibatch_size=16), utd=None)
    loop = OnPolicyLoop(cfg, Point(4, 0), Point(4, 1), proprio, tmp_path)
    loop.advance()
    with Ops(monkeypatch) as ops, torch.no_grad():
        segment, log_prob, raw = loop.collect()
        loop.rollout(segment, log_prob, raw)
    assert not ops.crossings


@settings(max_examples=40, deadline=None)
@given(envs=st.integers(1, 40), lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_episode_sums_equal_plain_ones(envs, lengths, seed):
    g = torch.Generator().manual_seed(seed)
    stats, plain = episodes.EpisodeStats(envs), deque(maxlen=episodes.RECENT_EPISODES)
    total, finished = [0.0] * envs, 0
    for length in lengths:
        shape = (length, envs)
        reward, success = torch.randint(-3, 4, shape, generator=g).float(), torch.rand(shape, generator=g).round()
        ends = torch.rand((2, *shape), generator=g) < 0.2
        stats.add(Segment({}, torch.zeros(*shape, 1), reward, ends[0], ends[1], {}, {"success": success}))
        for t in range(length):
            for b in range(envs):
                total[b] += reward[t, b].item()
                if ends[:, t, b].any():
                    plain.append((total[b], success[t, b].item()))
                    total[b], finished = 0.0, finished + 1
    assert int(stats.finished) == finished
    assert sorted(stats.returns) == sorted(r for r, _ in plain)
    if plain:
        want = [sum(x) / len(plain) for x in zip(*plain)]
        assert list(stats.last().values()) == pytest.approx(want)
    else:
        assert stats.last() == {"return": None, "success": None}


# -- numbers that are not finite ------------------------------------------------------------------------------------


class Faulty(Point):
    """Point that gives numbers that are not finite: ``faults`` maps (vector step, environment) to where."""

    faults: dict[tuple[int, int], str] = {}  # noqa: RUF012
    count = 0

    def step(self, action):
        assert torch.isfinite(action).all()
        step = super().step(action)
        obs, next_obs, reward = step.obs["proprio"].clone(), step.next_obs["proprio"].clone(), step.reward.clone()
        for (t, b), what in self.faults.items():
            if t == self.count:
                {"obs": obs[b], "next_obs": next_obs[b], "reward": reward[b : b + 1]}[what][-1] = (
                    torch.inf if b % 2 else torch.nan
                )
        self.count += 1
        return dataclasses.replace(step, obs={"proprio": obs}, next_obs={"proprio": next_obs}, reward=reward)


def _faulty(tmp_path, faults, algo=ALGOS[0], **kwargs):
    loop = loop_of(cfg_of(algo, steps=32 * 64), tmp_path, **kwargs)
    loop.env = loop.watch.env = Faulty(4, loop.cfg.seed)
    loop.env.faults = faults
    return loop


places = st.tuples(st.integers(0, 31), st.integers(0, 3))


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(places, st.sampled_from(["obs", "next_obs", "reward"]), max_size=12))
def test_bad_numbers_stay_out_of_replay_normaliser_and_weights_and_touch_nobody_else(tmp_path_factory, faults):
    algo = dataclasses.replace(
        ALGOS[0], normalize=True, warmup_steps=4 * 32
    )  # random actions, so that they do not depend on the faults
    good = _faulty(tmp_path_factory.mktemp("good"), {}, algo)
    loop = _faulty(tmp_path_factory.mktemp("bad"), faults, algo)
    for _ in range(4):
        good.advance()
        loop.advance()
    bad = torch.zeros(32, 4, dtype=torch.bool)
    for (t, b), what in faults.items():
        if what != "obs":
            bad[t, b] = True
        elif t < 31:
            bad[t + 1, b] = True  # the step that acts on it
    assert loop.excluded == int(bad.sum())
    rows, clean = loop.replay.slice(0, 32), good.replay.slice(0, 32)
    assert torch.equal(rows[~bad], clean[~bad])
    assert torch.isfinite(rows).all()
    taken = clean[..., :2][~bad].double()
    assert torch.allclose(loop.learner.normalizer.mean, taken.mean(0), atol=1e-12)
    assert int(loop.learner.normalizer.count) == len(taken)
    for _ in range(2):
        loop.advance()  # updates
    assert loop.learner.updates > 0
    assert torch.isfinite(loop.learner.theta_critic).all()
    assert torch.isfinite(loop.learner.theta_actor).all()
    assert float(loop.metrics["skipped"]) == 0


def test_the_first_bad_number_is_said_once_with_its_place(tmp_path, capsys):
    loop = _faulty(tmp_path, {(5, 2): "reward", (5, 3): "next_obs", (21, 0): "reward"})
    loop.cfg.log_every = 32
    for _ in range(3):
        loop.advance()
        loop.watch.log_if_due(0, loop.metrics)
    error = capsys.readouterr().err
    assert error.count("warning") == 1
    assert "environment 2" in error
    assert "step 5" in error
    assert [row["excluded"] for row in read_rows(tmp_path / "metrics.jsonl")] == [2, 2, 3]


@pytest.mark.parametrize("how", ["world", "score"])
def test_a_run_without_one_good_row_ends_before_it_saves(how, tmp_path):
    score = (lambda segment: torch.full(segment.reward.shape, torch.nan)) if how == "score" else None
    loop = _faulty(
        tmp_path, {(t, b): "next_obs" for t in range(99) for b in range(4)} if not score else {}, score=score
    )
    with pytest.raises(UserError, match="in every environment"):
        loop.run()
    assert not has_checkpoint(loop.checkpoint_path)


def test_no_checkpoint_is_written_of_a_run_without_one_good_row(tmp_path):
    loop = _faulty(tmp_path, {(t, b): "reward" for t in range(8) for b in range(4)})
    loop.advance()  # the row of the log, at which it would be said, is not yet due
    with pytest.raises(UserError, match="in every environment"):
        loop.save()
    assert not has_checkpoint(loop.checkpoint_path)


def test_a_score_that_is_not_finite_is_left_out(tmp_path):
    def score(segment):
        return segment.reward.clone().index_fill_(1, torch.tensor([1]), torch.nan)

    loop = loop_of(cfg_of(ALGOS[0], steps=320), tmp_path, score=score)
    loop.run()
    assert loop.excluded == loop.step // 4
    assert torch.isfinite(loop.replay.slice(0, loop.replay.total)).all()


def test_a_world_that_stays_blind_is_sent_finite_actions(tmp_path):
    loop = _faulty(tmp_path, {(t, 1): "obs" for t in range(200)}, dataclasses.replace(ALGOS[1], random_warmup=False))
    for _ in range(6):
        loop.advance()  # Faulty.step checks
    assert loop.excluded == 6 * 8 - 1
    assert torch.isfinite(loop.learner.theta_actor).all()


# -- interrupts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["collect", "evaluation"])
def test_an_interrupt_saves_and_the_resumed_run_is_the_same(where, tmp_path):
    cfg = cfg_of(ALGOS[0], steps=640, eval_every=160, eval_episodes=4)
    whole = loop_of(cfg, tmp_path / "whole")
    whole.run()
    loop = loop_of(cfg, tmp_path / "half")
    name = {"collect": "_unit_action", "evaluation": "act_greedily"}[where]
    method, calls = getattr(loop, name), []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 31:
            os.kill(os.getpid(), signal.SIGTERM)
        return method(*args)

    setattr(loop, name, interrupted)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="the same command resumes"):
        loop.run()
    assert signal.getsignal(signal.SIGTERM) is before
    assert 0 < loop.step < 640
    resumed = loop_of(cfg, tmp_path / "half")
    resumed.run()
    assert_equal(resumed.learner.state_dict(), whole.learner.state_dict())
    rows = [read_rows(tmp_path / d / "metrics.jsonl") for d in ("whole", "half")]
    clock = ("time", "steps_per_s")
    assert [{k: v for k, v in r.items() if k not in clock} for r in rows[0]] == [
        {k: v for k, v in r.items() if k not in clock} for r in rows[1]
    ]


def test_a_second_interrupt_acts_at_once(tmp_path):
    loop = loop_of(cfg_of(ALGOS[0]), tmp_path)
    collect = loop.collect

    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return collect()

    loop.collect = twice
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert loop.step == 0
    assert not has_checkpoint(loop.checkpoint_path)


# -- privileged observations ----------------------------------------------------------------------------------------


class Told(Point):
    """Point whose critics may know how many steps are left."""

    def _told(self, age):
        return (self.limit - age).unsqueeze(-1) / self.limit

    def reset(self, seed):
        return {**super().reset(seed), "privileged": self._told(self.age)}

    def step(self, action):
        before = self.age
        step = super().step(action)
        next_obs = {**step.next_obs, "privileged": self._told(before + 1)}
        return dataclasses.replace(step, obs={**step.obs, "privileged": self._told(self.age)}, next_obs=next_obs)

    def load_state_dict(self, state):
        return {**super().load_state_dict(state), "privileged": self._told(self.age)}


@pytest.mark.parametrize("algo", ALGOS, ids=["sac", "dsact"])
def test_privileged_groups_reach_the_critics_alone(algo, tmp_path):
    cfg = cfg_of(dataclasses.replace(algo, privileged=True), steps=320)
    loop = OffPolicyLoop(cfg, Told(4, 0), Point(4, 77), proprio, tmp_path / "a")  # evaluation needs none of it
    assert (loop.learner.actor_dim, loop.replay.obs_dim) == (2, 3)
    loop.run()
    batch = loop.replay.gather(torch.arange(len(loop.replay)), 0.9, 1)
    assert torch.allclose(batch.obs[:, 2] - batch.next_obs[:, 2], torch.tensor(1 / 20))  # the true successor's
    before = loop.act_greedily({"proprio": torch.ones(4, 2)})
    blind = {"proprio": torch.ones(4, 2), "privileged": torch.full((4, 1), 9.0)}
    assert torch.equal(loop.act_greedily(blind), before)
    resumed = OffPolicyLoop(cfg, Told(4, 0), Point(4, 77), proprio, tmp_path / "a")
    resumed.run()
    assert_equal(resumed.learner.state_dict(), loop.learner.state_dict())


def test_privileged_critics_need_a_world_that_has_such_a_group(tmp_path):
    with pytest.raises(UserError, match="no group 'privileged', only proprio"):
        loop_of(cfg_of(dataclasses.replace(ALGOS[0], privileged=True)), tmp_path)


def test_half_of_a_batch_is_prior_data(tmp_path):
    segment = loop_of(cfg_of(ALGOS[0]), tmp_path / "a").collect()
    cut = {"proprio": segment.obs["proprio"][:, :1] + 50}, {"proprio": segment.next_obs["proprio"][:, :1] + 50}
    parts = {k: getattr(segment, k)[:, :1] for k in ("action", "reward", "terminated", "truncated")}
    demonstration = Segment(obs=cut[0], next_obs=cut[1], **parts)
    loop = loop_of(cfg_of(ALGOS[0], prior_share=0.5), tmp_path / "b", prior=[demonstration])
    loop.store(loop.collect())
    for _ in range(3):
        assert (loop.sample().obs[:, 0] > 25).sum() == 32
