"""What a run may not do: depend on its evaluations or on anybody's random stream, report what it did not use, export
something other than it evaluated, lose its weights to one bad number.

The kinds of fault are those of public bug reports; docs/traps.md says which report belongs to which test.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_tools import LEARNERS, algo_of, iterate, loop_of, same, weights_of
from torch import nn
from toy_worlds import Ledger, Point

from control import dsact, ppo, sac
from control.config import ALGOS, PPOConfig, TrainConfig
from control.episodes import EVAL_SEED
from control.evaluate import evaluate
from control.export import ActorModule, action_scale, export_policy
from control.normalizer import RunningNormalizer
from control.policy import load_policy
from control.rollout import ReturnScale, Rollout
from control.train import EXAMPLE_SEED, FINAL_SEED
from control.types import Transition
from sims.errors import UserError
from sims.types import ArraySpec

OFF_POLICY = [name for name in LEARNERS if not issubclass(ALGOS[name], PPOConfig)]
every_learner = pytest.mark.parametrize("name", LEARNERS)
every_off_policy_learner = pytest.mark.parametrize("name", OFF_POLICY)


# -- evaluation and seeds -------------------------------------------------------------------------------------------


@every_learner
def test_a_run_with_evaluations_ends_in_the_weights_of_one_without(name, tmp_path):
    runs = []
    for every in (0, 48):
        loop = loop_of(name, tmp_path / str(every), Point(4), None, {"eval_every": every, "eval_episodes": 6},
                       normalize=True)  # fmt: skip
        loop.run()
        runs.append(loop)
    assert runs[1].watch.last_eval > 0
    assert same(*(weights_of(loop) for loop in runs))
    assert torch.equal(runs[0].learner.generator.get_state(), runs[1].learner.generator.get_state())
    for key, value in runs[0].env.state_dict().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(runs[1].env.state_dict()[key])), key


@every_learner
def test_evaluation_repeats_itself_and_leaves_every_random_stream_alone(name, tmp_path):
    loop = loop_of(name, tmp_path, Point(4), normalize=True)
    iterate(loop, 4)
    before = weights_of(loop), loop.learner.generator.get_state(), torch.get_rng_state(), random.getstate()
    numpy_before = np.random.get_state()[1].tolist()
    first = evaluate(loop.eval_env, loop.act_greedily, 9, EVAL_SEED)
    assert evaluate(loop.eval_env, loop.act_greedily, 9, EVAL_SEED) == first
    after = weights_of(loop), loop.learner.generator.get_state(), torch.get_rng_state(), random.getstate()
    assert same(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[2], after[2])
    assert before[3] == after[3]
    assert numpy_before == np.random.get_state()[1].tolist()


@every_learner
def test_a_seed_decides_a_run_and_nothing_else_does(name, tmp_path):
    runs = []
    for i, seed in enumerate((3, 3, 4)):
        torch.manual_seed(i)
        np.random.seed(i)
        random.seed(i)
        loop = loop_of(name, tmp_path / str(i), Point(4, seed), None, {"seed": seed}, normalize=True)
        loop.run()
        runs.append(weights_of(loop))
    assert same(runs[0], runs[1])
    for key in runs[0]:
        if "theta" in key:
            assert not torch.equal(runs[0][key], runs[2][key]), key


@every_learner
def test_networks_and_noise_draw_from_different_streams_of_the_seed(name):
    """Equal streams would make the first exploration a function of the first weights."""
    learner = _learner(name, seed=5)
    weights = torch.Generator().manual_seed(5)
    assert not torch.equal(learner.generator.get_state(), weights.get_state())


def test_starts_of_training_evaluation_and_golden_vectors_never_meet():
    last = TrainConfig(seed=999_999).seed
    training, final = range(0, last + 1), range(FINAL_SEED, FINAL_SEED + last + 1)
    assert EVAL_SEED not in training
    assert EVAL_SEED not in final
    assert not set(range(EVAL_SEED, EVAL_SEED + 2)) & {FINAL_SEED, EXAMPLE_SEED}
    assert EXAMPLE_SEED not in training
    assert EXAMPLE_SEED not in final
    assert final.start > training.stop
    for seed in (1_000_000, -1):
        with pytest.raises(UserError, match=f"seed={seed}"):
            TrainConfig(seed=seed)


# -- updates: how many, from what, with which numbers ---------------------------------------------------------------


@every_off_policy_learner
@pytest.mark.parametrize("utd", [0.0625, 0.3, 1.0, 2.5])
def test_updates_per_step_are_exact_and_stay_so_over_a_resume(name, utd, tmp_path):
    done = 0
    for steps in (120, 240):  # the second run resumes the first
        loop = loop_of(name, tmp_path, run={"utd": utd, "steps": steps}, warmup_steps=24)
        update, calls = loop.learner.update, []
        loop.learner.update = lambda batch, update=update, calls=calls: calls.append(1) or update(batch)
        loop.run()
        assert loop.step == steps
        done += len(calls)
        assert done == loop.learner.updates == int((steps - 24) * utd)


@every_off_policy_learner
def test_each_gradient_step_has_a_batch_of_its_own(name, tmp_path):
    loop = loop_of(name, tmp_path, Point(4), None, {"utd": 2.0})
    update, seen = loop.learner.update, []
    loop.learner.update = lambda batch: seen.append(batch.obs.clone()) or update(batch)
    iterate(loop, 3)
    assert len(seen) > 100
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(seen))
    assert len({round(float(batch.sum()), 5) for batch in seen}) == len(seen)


@every_learner
@pytest.mark.parametrize("update", ["fused", "autograd"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_discount_and_target_are_never_rounded_to_the_precision_of_products(name, update, precision, monkeypatch):
    """0.99 is 0.9883 in bfloat16: a horizon of 85 steps where 100 were asked for."""
    seen: list = []
    for module in (sac, dsact):
        plain = module.soft_target
        monkeypatch.setattr(module, "soft_target", lambda *a, plain=plain: seen.append((*a, plain(*a))) or seen[-1][-1])
    gae = ppo.advantages
    monkeypatch.setattr(
        ppo, "advantages", lambda r, *a: seen.append((r.reward, r.next_value, gae(r, *a), *a)) or gae(r, *a)
    )
    learner = _learner(name, gamma=0.99, update=update, precision=precision)
    _update(learner, reward=1000.25)
    assert seen
    tensors = [x for x in seen[-1] if torch.is_tensor(x)]
    assert all(x.dtype == torch.float32 for x in tensors)
    numbers = {0.99, float(torch.tensor(0.99))}
    assert any(x in numbers if not torch.is_tensor(x) else bool((x == torch.tensor(0.99)).all()) for x in seen[-1])
    assert any(bool((x == 1000.25).all()) for x in tensors)
    if name in OFF_POLICY:
        reward, discount, q, log_prob, alpha = (x.double() for x in seen[-1][:5])
        assert torch.allclose(seen[-1][5].double(), reward + discount * (q - alpha * log_prob), rtol=1e-6)
    assert all(w.dtype != torch.bfloat16 for w in _tensors(learner.state_dict()))


@every_off_policy_learner
def test_the_entropy_weight_that_is_logged_is_the_one_that_was_used(name):
    learner = _learner(name, lr_alpha=0.1, policy_delay=1, alpha=0.25)
    used = 0.25
    for _ in range(3):
        assert _update(learner)["alpha"].item() == pytest.approx(used)
        used = learner.log_alpha.exp().item()
        assert used != pytest.approx(0.25, rel=0.02)


@every_learner
def test_the_rates_of_the_settings_are_those_of_the_optimisers(name, tmp_path):
    loop = loop_of(name, tmp_path, lr=0.0123, lr_alpha=0.0456)
    assert loop.learner.cfg == loop.cfg.algo  # what config.yaml says is what runs
    optimizers = getattr(loop.learner, "optimizers", {"all": getattr(loop.learner, "optimizer", None)})
    assert {key: adam.lr for key, adam in optimizers.items()} == {
        key: 0.0456 if key == "alpha" else 0.0123 for key in optimizers
    }


@every_learner
def test_products_are_float32_in_full_unless_asked_otherwise(name, tmp_path):
    assert ALGOS[name]().precision == "float32"
    loop_of(name, tmp_path).run()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32


@every_learner
def test_the_first_policy_explores_the_box_evenly_whatever_its_seed(name):
    """Standard deviation about 1 before the squash or the clip, centred: neither asleep nor at the bounds."""
    for seed in range(3):
        learner = _learner(name, seed=seed)
        obs = torch.randn(4000, 5, generator=torch.Generator().manual_seed(seed))
        action = learner.act(obs, explore=True)
        assert (action.std(0) > 0.45).all()
        assert (action.std(0) < 0.85).all()  # uniform: 0.58; all of it at the bounds: 1
        assert (action.mean(0).abs() < 0.25).all()


# -- bad numbers ----------------------------------------------------------------------------------------------------


@every_learner
@pytest.mark.parametrize("update", ["fused", "autograd"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38, 1e24])  # the last two square to infinity
def test_a_batch_with_a_bad_number_changes_no_weight_and_is_counted(name, update, bad):
    learner = _learner(name, update=update, minibatch_size=32)
    for _ in range(2):
        metrics = _update(learner)
    assert metrics["skipped"].item() == 0
    before = _weights(learner)
    spoiled = _update(learner, bad=bad)
    assert spoiled["skipped"].item() > 0
    for key, value in _weights(learner).items():
        assert torch.isfinite(value).all(), key
    critics = [k for k in before if "critic" in k and "target" not in k] or ["theta"]
    assert critics
    for key in critics:
        assert torch.equal(before[key], _weights(learner)[key]), key
    for _ in range(2):
        _update(learner)
    for key in critics:
        assert not torch.equal(before[key], _weights(learner)[key]), key
    assert torch.isfinite(learner.act(torch.randn(64, 5), explore=True)).all()


@every_learner
def test_a_deviation_stays_positive_and_finite_under_violent_updates(name):
    """The kind: a standard deviation learned as such goes below zero and the next sample is an error."""
    learner = _learner(name, lr=0.5, update="autograd", max_grad_norm=1e9)
    for i in range(30):
        _update(learner, reward=(-1) ** i * 1e4)
        action = learner.act(torch.randn(64, 5), explore=True)
        assert torch.isfinite(action).all()
        assert action.abs().max() <= 1
        assert action.std() > 0 or action.abs().min() > 0.99


# -- running statistics ---------------------------------------------------------------------------------------------


def test_running_statistics_keep_small_deviations_around_large_means():
    """The kind: float32 sums. 20,000 rows of mean 4096 and deviation 1/4, ten at a time."""
    rows = 4096 + 0.25 * torch.randn(20_000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = rows.float()
    normalizer, scale = RunningNormalizer(2), ReturnScale(1, 0.0, True)
    for part in rows.split(10):
        normalizer.update(part)
        scale(part[:, :1], torch.ones(len(part), 1, dtype=torch.bool), torch.ones(len(part), 1, dtype=torch.bool))
    true = rows.double()
    assert torch.allclose(normalizer.mean, true.mean(0), rtol=1e-12)
    assert torch.allclose(normalizer.m2 / normalizer.count, true.var(0, correction=0), rtol=1e-9)
    assert (scale.m2 / scale.count).item() == pytest.approx(true[:, 0].var(correction=0).item(), rel=1e-9)
    assert normalizer(rows).std(0).sub(1).abs().max() < 1e-3


# -- export ---------------------------------------------------------------------------------------------------------


@every_learner
@pytest.mark.parametrize("normalize", [True, False], ids=["normalised", "raw"])
def test_an_artefact_acts_as_the_policy_that_was_evaluated(name, normalize, tmp_path):
    """Normaliser and action scale are inside: observations in, physical actions out."""
    box = ((-2.0, -0.25), (1.0, 3.0))
    world = Ledger(4, limit=7, box=box)
    loop = loop_of(name, tmp_path, world, normalize=normalize, lr=1e-2, utd=2.0)
    iterate(loop, 6)
    module = ActorModule(loop.features, loop.learner, world.spec)
    example = {"proprio": torch.stack(world.seen).flatten(0, 1)[:16]}
    policy = load_policy(export_policy(module, world.spec, example, tmp_path / "policy"))
    obs = torch.stack(world.seen).flatten(0, 1) + torch.randn(96 * 2, 5, generator=torch.Generator().manual_seed(1))
    want = loop.act_greedily({"proprio": obs})
    got = torch.from_numpy(policy({"proprio": obs.numpy()})[0][:, 0])
    assert torch.allclose(got, want, atol=1e-5)
    centre, half = action_scale(world.spec)
    bare = centre + half * loop.learner.act(obs, explore=False)
    assert torch.allclose(bare, want)
    if normalize:  # the statistics matter here: without them the actions are others
        loop.learner.normalizer.enabled = False
        assert (loop.act_greedily({"proprio": obs}) - want).abs().max() > 1e-2
    assert want.std(0).min() > 1e-3
    assert policy.spec.env.action.low == box[0]


class Moody(nn.Module):
    """Acts otherwise in training: dropout, and batch statistics that it also moves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.out = nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2)
        self.norm.running_mean.fill_(3.0)

    def forward(self, obs):
        return self.out(self.drop(self.norm(obs["proprio"]))).unsqueeze(1)


@pytest.mark.parametrize("training", [True, False])
def test_an_artefact_is_the_module_in_evaluation_mode_and_the_module_stays_in_its_own(training, tmp_path):
    torch.manual_seed(0)
    module, obs = Moody().train(training), torch.randn(6, 5)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    path = export_policy(module, Ledger().spec, {"proprio": obs}, tmp_path / "policy")
    got, _ = load_policy(path)({"proprio": obs.numpy()})
    assert all(part.training == training for part in module.modules())
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    with torch.no_grad():
        assert np.abs(got - module.eval()({"proprio": obs}).numpy()).max() < 1e-5


# -- action bounds --------------------------------------------------------------------------------------------------

inf = float("inf")


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        ((-inf, -1.0), (1.0, 1.0), "finite bounds"),
        ((-1.0, -1.0), (1.0, inf), "finite bounds"),
        ((-1.0, float("nan")), (1.0, 1.0), "finite bounds"),
        ((), (), "finite bounds"),
        ((-1.0,), (1.0,), "finite bounds"),
        ((-3.4e38, -1.0), (3.4e38, 1.0), "finite bounds"),  # finite, and their difference is not
        ((-1.0, 0.5), (1.0, 0.5), "empty action range"),
        ((-1.0, 1.0), (1.0, -1.0), "empty action range"),
    ],
)
def test_bounds_that_make_no_box_are_refused(low, high, message):
    spec = dataclasses.replace(Ledger().spec, action=ArraySpec((2,), low=low, high=high))
    with pytest.raises(UserError, match=message):
        action_scale(spec)


def test_the_ends_of_an_asymmetric_box_are_reached_exactly():
    spec = dataclasses.replace(Ledger().spec, action=ArraySpec((2,), low=(-2.0, 0.5), high=(1.0, 0.75)))
    centre, half = action_scale(spec)
    assert (centre - half).tolist() == [-2.0, 0.5]
    assert (centre + half).tolist() == [1.0, 0.75]


# -- helpers --------------------------------------------------------------------------------------------------------

MAKE = {"sac": sac.SAC, "dsact": dsact.DSACT, "ppo": ppo.PPO}


def test_every_learner_of_the_registry_is_covered():
    assert set(MAKE) == set(ALGOS)


def _learner(name, seed=0, **changes):
    return MAKE[name](5, 2, algo_of(name, **changes), "cpu", seed)


def _update(learner, reward=0.5, bad=None):
    """One update from 32 made-up rows; ``bad`` stands for the reward of one of them."""
    g = torch.Generator().manual_seed(learner.updates)
    obs, action = torch.randn(32, 5, generator=g), torch.rand(32, 2, generator=g) * 2 - 1
    rewards = torch.full((32,), reward)
    if bad is not None:
        rewards[3] = bad
    discount = torch.full((32,), learner.cfg.gamma)
    if not isinstance(learner, ppo.PPO):
        return learner.update(Transition(obs, action, rewards, discount, obs + 0.1))
    action, log_prob = learner.sample(obs)
    shape = lambda x: x.view(8, 4, *x.shape[1:])  # noqa: E731
    no = torch.zeros(8, 4, dtype=torch.bool)
    return learner.update(
        Rollout(shape(obs), shape(obs + 0.1), shape(action), shape(log_prob), shape(learner.value(obs)),
                shape(learner.value(obs + 0.1)), shape(rewards), no, no, ~no)
    )  # fmt: skip


def _weights(learner):
    return {k: v.clone() for k, v in learner.state_dict().items() if torch.is_tensor(v) and v.is_floating_point()}


def _tensors(node):
    for value in node.values() if isinstance(node, dict) else ():
        yield from [value] if torch.is_tensor(value) else _tensors(value)


def test_nothing_of_ours_lowers_the_precision_of_matrix_products():
    root = Path(sac.__file__).resolve().parent.parent
    for package in ("control", "sims", "vlm_rewards", "distill"):
        for file in (root / package).rglob("*.py"):
            if not file.name.startswith("benchmark"):
                assert "set_float32_matmul_precision" not in file.read_text(), file
                assert "allow_tf32 = True" not in file.read_text(), file
