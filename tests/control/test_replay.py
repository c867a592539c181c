"""Replay: ring order, n-step windows, boundaries, write pointer, prior share."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from control.replay import Replay, sample_mixed


def _fill(replay, rewards, terminated=None, truncated=None, start=0):
    """One environment; obs of step t is start+t and its true successor 100+start+t."""
    t = len(rewards)
    obs = torch.arange(start, start + t).float().view(t, 1, 1)
    flags = [torch.tensor(x or [False] * t).view(t, 1) for x in (terminated, truncated)]
    return replay.add(obs, torch.zeros(t, 1, 1), torch.tensor(rewards).float().view(t, 1), *flags, obs + 100)


def _at(replay, age, n_step, gamma=0.5):
    return replay.gather(torch.tensor([age]), gamma, n_step)


def test_n_step_sums_discounted_rewards_and_bootstraps_with_gamma_to_the_k():
    replay = Replay(8, 1, 1, 1)
    _fill(replay, [1, 2, 4, 8])
    t = _at(replay, 0, 3)
    assert t.reward.item() == 1 + 0.5 * 2 + 0.25 * 4
    assert t.discount.item() == 0.125
    assert t.next_obs.item() == 102


def test_window_stops_at_a_termination_without_bootstrap():
    replay = Replay(8, 1, 1, 1)
    _fill(replay, [1, 2, 4, 8], terminated=[False, True, False, False])
    t = _at(replay, 0, 3)
    assert (t.reward.item(), t.discount.item(), t.next_obs.item()) == (2.0, 0.0, 101.0)
    assert _at(replay, 1, 3).reward.item() == 2.0


def test_window_stops_at_a_truncation_with_bootstrap_from_the_true_successor():
    replay = Replay(8, 1, 1, 1)
    _fill(replay, [1, 2, 4, 8], truncated=[False, True, False, False])
    t = _at(replay, 0, 3)
    assert (t.reward.item(), t.discount.item(), t.next_obs.item()) == (2.0, 0.25, 101.0)


def test_window_stops_at_the_write_pointer_of_a_full_ring():
    replay = Replay(4, 1, 1, 1)
    _fill(replay, [1, 2, 4, 8])
    _fill(replay, [16, 32], start=4)  # ring now holds steps 2, 3, 4, 5
    assert _at(replay, 0, 1).obs.item() == 2
    last = _at(replay, 3, 3)  # nothing after it: one reward only
    assert (last.obs.item(), last.reward.item(), last.discount.item()) == (5.0, 32.0, 0.5)
    assert _at(replay, 2, 3).reward.item() == 16 + 0.5 * 32


def test_block_longer_than_the_ring_keeps_its_end():
    replay = Replay(3, 1, 1, 1)
    _fill(replay, [0, 1, 2, 3, 4, 5, 6])
    assert [_at(replay, i, 1).reward.item() for i in range(3)] == [4.0, 5.0, 6.0]


def test_environments_are_not_mixed():
    replay = Replay(4, 2, 1, 1)
    reward = torch.tensor([[1.0, 10.0], [2.0, 20.0]])
    zero = torch.zeros(2, 2)
    replay.add(torch.zeros(2, 2, 1), torch.zeros(2, 2, 1), reward, zero, zero, torch.zeros(2, 2, 1))
    assert replay.gather(torch.tensor([0, 1]), 0.5, 2).reward.tolist() == [2.0, 20.0]


def test_non_finite_transition_is_replaced_reported_and_never_crossed():
    replay = Replay(8, 1, 1, 1)
    good = _fill(replay, [1, math.nan, 4, 8])
    assert good.flatten().tolist() == [True, False, True, True]
    batch = replay.gather(torch.arange(4), 0.5, 3)
    assert torch.isfinite(torch.cat([batch.reward, batch.next_obs.flatten(), batch.discount])).all()
    assert batch.reward.tolist() == [
        1,
        1,
        4 + 0.5 * 8,
        8,
    ]  # row 0 stands in for row 1; no window goes into or out of it
    assert batch.discount.tolist() == [0.5, 0.5, 0.25, 0.5]


def test_a_window_stops_before_a_bad_row_of_a_later_block():
    """And the row before it stays as it was written: it may be on disk already."""
    replay = Replay(8, 1, 1, 1)
    _fill(replay, [1, 2])
    before = replay.rows[:2].clone()
    assert not _fill(replay, [math.inf], start=2).any()
    _fill(replay, [4], start=3)
    assert torch.equal(replay.rows[:2], before)
    t = _at(replay, 0, 4)
    assert (t.reward.item(), t.discount.item(), t.next_obs.item()) == (1 + 0.5 * 2, 0.25, 101.0)
    assert torch.isfinite(replay.rows[: replay.total]).all()


def test_nothing_but_bad_rows_leaves_nothing_bad_behind():
    replay = Replay(8, 1, 1, 1)
    assert not _fill(replay, [math.nan, math.inf]).any()
    assert torch.isfinite(replay.rows[: replay.total]).all()


@settings(max_examples=150, deadline=None)
@given(
    capacity=st.integers(1, 7),
    n_step=st.integers(1, 5),
    envs=st.integers(1, 3),
    blocks=st.lists(
        st.lists(st.tuples(st.integers(0, 9), st.sampled_from("...Ttx")), min_size=1, max_size=9), max_size=9
    ),
)
def test_n_step_equals_the_plain_definition(capacity, n_step, envs, blocks):
    """T terminated, t truncated, x a reward that is not finite; one block per call of ``add``, of ``envs`` worlds."""
    blocks = [block[: len(block) // envs * envs] for block in blocks if len(block) >= envs]
    if not blocks:
        return
    replay, history = Replay(capacity, envs, 1, 1), []  # history: per time step, per environment
    for block in blocks:
        rows = [block[i : i + envs] for i in range(0, len(block), envs)]
        start, t = len(history), len(rows)
        obs = (
            torch.arange(start, start + t).float().view(t, 1, 1).expand(t, envs, 1)
            + torch.arange(envs).view(envs, 1) / 8
        )
        rewards = torch.tensor([[math.nan if k == "x" else float(r) for r, k in row] for row in rows])
        flags = [torch.tensor([[k == kind for _, k in row] for row in rows]) for kind in "Tt"]
        replay.add(obs, torch.zeros(t, envs, 1), rewards, *flags, obs + 100)
        history += rows
    kept = list(enumerate(history))[-capacity:]
    assert len(replay) == len(kept) * envs
    for age, b in [(a, b) for a in range(len(kept)) for b in range(envs)]:
        t = _at(replay, age * envs + b, n_step)
        if kept[age][1][b][1] == "x":
            assert torch.isfinite(torch.stack([t.reward, t.discount, t.next_obs[:, 0], t.obs[:, 0]])).all()
            continue
        total, k = 0.0, 0
        while True:
            index, row = kept[age + k]
            total, kind, k = total + 0.5**k * row[b][0], row[b][1], k + 1
            if kind in "Tt" or k == n_step or age + k == len(kept) or kept[age + k][1][b][1] == "x":
                break
        assert t.obs.item() == kept[age][0] + b / 8
        assert t.reward.item() == pytest.approx(total)
        assert t.discount.item() == (0.0 if kind == "T" else 0.5**k)
        assert t.next_obs.item() == index + b / 8 + 100


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 300), share=st.sampled_from([0.0, 0.25, 0.5, 0.9]), n_step=st.integers(1, 3))
def test_the_share_of_prior_data_is_exact(n, share, n_step):
    online, prior = Replay(16, 1, 1, 1), Replay(4, 1, 1, 1)
    _fill(online, [1.0] * 10, truncated=[True] * 10)
    _fill(prior, [2.0] * 4, truncated=[True] * 4)
    batch = sample_mixed(online, prior, share, n, 0.9, n_step, torch.Generator().manual_seed(n))
    assert len(batch.reward) == n
    assert (batch.reward == 2).sum().item() == round(n * share)  # half of an even batch to the row, as RLPD has it


def test_prior_data_and_experience_are_each_drawn_uniformly():
    online, prior = Replay(8, 1, 1, 1), Replay(4, 1, 1, 1)
    _fill(online, [0.0] * 8)
    _fill(prior, [0.0] * 4, start=50)
    g = torch.Generator().manual_seed(0)
    drawn = torch.cat([sample_mixed(online, prior, 0.5, 256, 0.9, 1, g).obs.flatten() for _ in range(100)])
    for first, count in ((0, 8), (50, 4)):
        share = torch.stack([(drawn == first + i).float().mean() for i in range(count)])
        assert share.tolist() == pytest.approx([0.5 / count] * count, abs=0.006)  # four deviations of 25,600 draws


def test_prior_share_and_state_round_trip():
    online, prior = Replay(16, 1, 1, 1), Replay(4, 1, 1, 1)
    _fill(online, [1.0] * 10)
    _fill(prior, [2.0] * 4)
    g = torch.Generator().manual_seed(0)
    batch = sample_mixed(online, prior, 0.25, 64, 0.9, 1, g)
    assert (batch.reward == 2).sum().item() == 16
    assert len(sample_mixed(online, None, 0.25, 64, 0.9, 1, g).reward) == 64
    copy = Replay(16, 1, 1, 1)
    copy.fill([(0, online.slice(0, 10))], online.total, online.filled)
    index = torch.arange(10)
    assert torch.equal(copy.gather(index, 0.9, 3).next_obs, online.gather(index, 0.9, 3).next_obs)
