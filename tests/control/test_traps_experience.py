"""What every learner learns from: whole episodes, true successors, ends told from limits, one unit of action.

The kinds of fault are those of public bug reports; docs/traps.md says which report belongs to which test.
"""

from __future__ import annotations

import math

import pytest
import torch
from learner_tools import LEARNERS, experience, iterate, loop_of, same, weights_of
from toy_worlds import Ledger, Point

from control.log import read_rows
from control.on_policy import OnPolicyLoop

pytestmark = pytest.mark.parametrize("name", LEARNERS)


def test_a_transition_stays_within_its_episode_and_none_is_added_or_lost(name, tmp_path):
    world = Ledger(limit=3, end=2)  # environment 0 ends at 2, 1 ends at its limit of 3, 2 only meets the limit
    loop = loop_of(name, tmp_path, world)
    rows = experience(loop, 8)
    assert torch.equal(rows.next_obs[:, [0, 1, 3]], rows.obs[:, [0, 1, 3]])  # same environment, episode and start
    assert torch.equal(rows.next_obs[:, 2], rows.obs[:, 2] + 1)
    assert (rows.obs[:, 4] == 0).all()
    # the rows are exactly the steps taken: no reset row beside them, no last step missing
    taken = torch.stack(world.seen).flatten(0, 1)
    assert torch.equal(rows.obs, taken)
    assert len(rows.obs) == loop.step


def test_only_a_termination_stops_the_bootstrap(name, tmp_path):
    rows = experience(loop_of(name, tmp_path, Ledger(limit=3, end=2)), 8)
    over = rows.next_obs[:, 4] == 1
    limit = (rows.next_obs[:, 2] == 3) & ~over
    assert over.any()
    assert limit.any()
    assert (rows.discount[over] == 0).all()
    assert (rows.discount[~over] == 0.5).all()  # a limit too
    both = (rows.obs[:, 0] == 1) & (rows.next_obs[:, 2] == 3)
    assert both.any()
    assert over[both].all()  # an end at the very limit is an end


@pytest.mark.parametrize(
    ("world", "n_step", "value"),
    [
        # reward 1 and gamma 1/2: 1 + 1/2 + 1/4 + ... = 2 if the limit is no end, 1 if the end is one
        ({"limit": 1}, 1, 2.0),
        ({"end": 1, "limit": 9}, 1, 1.0),
        # two steps: windows of 3 stop at both. Limit: V = mean(1 + 1/2 + V/4, 1 + V/2) = 2; end: mean(1 + 1/2, 1)
        ({"limit": 2}, 3, 2.0),
        ({"end": 2, "limit": 9}, 3, 1.25),
    ],
    ids=["limit", "end", "limit-3-step", "end-3-step"],
)
def test_a_world_of_short_episodes_is_worth_what_its_kind_of_end_says(name, world, n_step, value, tmp_path):
    if name == "ppo" and n_step > 1:
        pytest.skip("its advantages have no n")
    constant = lambda obs: torch.ones(len(obs["proprio"]), 1)  # noqa: E731
    small = {"alpha": 1e-6, "lr": 1e-2, "epochs": 8, "rollout_steps": 32, "n_step": n_step}
    loop = loop_of(name, tmp_path, Ledger(1, **world), constant, {"utd": 2.0} if name != "ppo" else {}, **small)
    iterate(loop, 8 if name == "ppo" else 24)
    if name == "ppo":
        got = loop.learner.value(torch.ones(1, 1)).item()
    else:
        got = loop.metrics["q"].item()
    assert got == pytest.approx(value, abs=0.12)


def test_the_policy_acts_on_the_observation_after_a_reset(name, tmp_path):
    world = Ledger(limit=2)
    loop = loop_of(name, tmp_path, world)
    method = "sample" if isinstance(loop, OnPolicyLoop) else "act"
    act, seen = getattr(loop.learner, method), []

    def spy(obs, *args, **kwargs):
        seen.append(torch.equal(obs, world.current))
        return act(obs, *args, **kwargs)

    setattr(loop.learner, method, spy)
    iterate(loop, 3)
    assert len(seen) >= 16
    assert all(seen)
    assert world.episode.min() >= 10


@pytest.mark.parametrize("warmup", [True, False], ids=["random-warmup", "policy-warmup"])
def test_stored_actions_are_those_sent_in_the_unit_box_before_and_after_warmup(name, warmup, tmp_path):
    low, high = torch.tensor([-2.0, -0.25]), torch.tensor([1.0, 3.0])
    world = Ledger(box=(tuple(low.tolist()), tuple(high.tolist())))
    loop = loop_of(name, tmp_path, world, warmup_steps=96, random_warmup=warmup)
    rows = experience(loop, 8)
    sent = torch.stack(world.actions).flatten(0, 1)
    assert ((sent >= low) & (sent <= high)).all()
    assert torch.allclose((low + high) / 2 + (high - low) / 2 * rows.action, sent, atol=1e-6)
    for part in (rows.action[:96], rows.action[96:]):
        assert part.abs().max() <= 1
        assert (part.amax(0) > 0.5).all()  # exploration reaches both sides of each range
        assert (part.amin(0) < -0.5).all()


class InOtherUnits(Point):
    """Point, its actions in units four times as small: an exact scaling in binary."""

    def __init__(self, num_envs: int = 4, seed: int = 0) -> None:
        super().__init__(num_envs, seed)
        action = self.spec.action
        times = lambda bounds: tuple(4 * float(torch.tensor(b)) for b in bounds)  # noqa: E731
        self.inner = self.spec
        changed = type(action)(action.shape, names=action.names, low=times(action.low), high=times(action.high))
        self.spec = type(self.spec)(**{**self.spec.__dict__, "action": changed})

    def step(self, action):
        outer, self.spec = self.spec, self.inner
        step = super().step(action / 4)
        self.spec = outer
        return step


def test_the_unit_of_an_action_does_not_change_learning(name, tmp_path):
    """Entropy, its target and every density are those of the unit box: the Jacobian of a unit cancels."""
    loops = [loop_of(name, tmp_path / kind.__name__, kind()) for kind in (Point, InOtherUnits)]
    for loop in loops:
        iterate(loop, 6)
        assert loop.learner.updates > 0
    assert same(*(weights_of(loop) for loop in loops))


def test_float64_worlds_train_in_float32(name, tmp_path):
    loop = loop_of(name, tmp_path, Ledger(dtype=torch.float64))
    rows = experience(loop, 4)
    assert rows.obs.dtype == rows.reward.dtype == rows.action.dtype == torch.float32
    statistics = ("normalizer",)
    for where, value in weights_of(loop).items():
        assert value.dtype == torch.float32 or where.split(".")[1] in statistics, where


@pytest.mark.parametrize("what", ["obs", "reward", "diverged"])
def test_a_bad_step_of_one_environment_is_left_out_counted_and_harms_nobody(name, what, tmp_path, capsys):
    world, bad = Ledger(limit=6), [(1, 5), (1, 20), (2, 33), (0, 34), (1, 34)]
    world.bad = dict.fromkeys(bad, what)
    loop = loop_of(name, tmp_path, world, normalize=True, lr=1e-2)
    rows, count = _steps_learned_from(loop, world, 8)
    # a bad observation spoils the step that gave it and the one that acts on it, but the first bad one met a limit
    assert loop.excluded == (9 if what == "obs" else 5)
    assert count == loop.step - loop.excluded
    for place in bad:
        assert place not in rows
    for where, value in weights_of(loop).items():
        assert torch.isfinite(value).all() or "sigma" in where, where
    assert all(math.isfinite(float(v)) for v in loop.metrics.values())
    assert float(loop.metrics["skipped"]) == 0
    assert all(math.isfinite(r) for r in loop.watch.episodes.returns)
    for _ in range(2):
        loop.watch.step += loop.cfg.log_every
        loop.watch.log_if_due(loop.learner.updates, loop.metrics)
    assert capsys.readouterr().err.count("left out") == 1  # said once, counted in every row
    assert read_rows(tmp_path / "metrics.jsonl")[-1]["excluded"] == loop.excluded


def _steps_learned_from(loop, world, iterations):
    """The (environment, step of the world) of each row that was learned from, and how many there are.

    The normaliser is on, so rows are told by what the loop gives replay or the learner, in the order of ``seen``.
    """
    good: list[torch.Tensor] = []
    if isinstance(loop, OnPolicyLoop):
        learn = loop.learner.update
        loop.learner.update = lambda rollout: good.append(rollout.valid) or learn(rollout)
        iterate(loop, iterations)
        flags = torch.cat(good)
    else:
        iterate(loop, iterations)
        stored = {tuple(row) for row in loop.replay.gather(torch.arange(len(loop.replay)), 0.5, 1).obs.tolist()}
        flags = torch.stack([torch.tensor([tuple(row) in stored for row in rows.tolist()]) for rows in world.seen])
    return {(int(b), int(t)) for t, b in flags.nonzero()}, int(flags.sum())


def test_the_normaliser_counts_each_step_once_whatever_the_number_of_updates(name, tmp_path):
    counts = []
    for run, algo in (({"utd": 0.25}, {"epochs": 1}), ({"utd": 2.0}, {"epochs": 4})):
        loop = loop_of(name, tmp_path / str(run["utd"]), Ledger(limit=3), None, run if name != "ppo" else {},
                       normalize=True, **algo)  # fmt: skip
        iterate(loop, 5)
        counts.append((loop.learner.normalizer.count.item(), loop.learner.normalizer.mean.clone(), loop.step))
    assert counts[0][0] == counts[0][2] == counts[1][0]
    assert torch.equal(counts[0][1], counts[1][1])
    # of the observations acted on: ages 0, 1, 2 in turn, never the last one of an episode
    taken = torch.stack(loop.env.seen).flatten(0, 1)
    assert torch.allclose(counts[0][1].float(), taken.mean(0), atol=1e-5)
    assert taken[:, 2].max() == 2
