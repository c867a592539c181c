"""The update by hand against plain autograd, and what an update may not do."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from control.config import DSACTConfig, SACConfig
from control.dsact import DSACT
from control.fused import Backprop, Weights
from control.networks import MLP
from control.sac import SAC
from control.types import Transition

LEARNERS = {"sac": (SAC, SACConfig), "dsact": (DSACT, DSACTConfig)}
SHAPES = [
    {"activation": "relu", "critic_layer_norm": False},
    {"activation": "relu", "critic_layer_norm": True},
    {"activation": "gelu", "critic_layer_norm": True, "depth": 3},
    {"activation": "gelu", "critic_layer_norm": False, "depth": 1},
    {"activation": "tanh", "critic_layer_norm": False, "policy_delay": 1, "normalize": True},
]


def batches(count, n=32, f=5, a=3):
    g = torch.Generator().manual_seed(7)
    for _ in range(count):
        obs, action = torch.randn(n, f, generator=g), torch.rand(n, a, generator=g) * 2 - 1
        discount = 0.9 * (torch.rand(n, generator=g) > 0.1)
        yield Transition(obs, action, torch.randn(n, generator=g), discount, obs + 0.1)


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_both_ways_back_through_the_critics_agree(name, shape):
    chosen, masked = (pair(name, **shape)[0] for _ in range(2))
    masked._gradients.nets.choose = False
    assert chosen._gradients.nets.choose
    for batch in batches(6):
        chosen.update(batch)
        masked.update(batch)
    assert torch.allclose(chosen.theta_actor, masked.theta_actor, atol=1e-6)


def pair(name, **changes):
    make, config = LEARNERS[name]
    cfg = config(**{"lr": 1e-3, "width": 24, "gamma": 0.9, **changes})
    return make(5, 3, cfg), make(5, 3, dataclasses.replace(cfg, update="autograd"))


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_ten_updates_by_hand_equal_autograd(name, shape):
    ours, oracle = pair(name, **shape)
    before = oracle.theta_critic.detach().clone()
    for batch in batches(10):
        left, right = ours.update(batch), oracle.update(batch)
    for key, value in oracle.state_dict().items():
        if torch.is_tensor(value) and value.is_floating_point():
            assert torch.allclose(ours.state_dict()[key], value, atol=1e-5), key
    assert (oracle.theta_critic - before).abs().max() > 1e-3  # the equality is of things that moved
    assert left.keys() == right.keys()
    for key in right:
        assert left[key].item() == pytest.approx(right[key].item(), rel=1e-3, abs=1e-4), key


def test_an_ensemble_with_random_target_subsets_equals_autograd():
    ours, oracle = pair("sac", critics=5, target_critics=2, critic_layer_norm=True)
    for batch in batches(10):
        ours.update(batch)
        oracle.update(batch)
    assert torch.allclose(ours.theta_critic, oracle.theta_critic, atol=1e-5)
    assert torch.allclose(ours.theta_actor, oracle.theta_actor, atol=1e-5)


def test_the_target_of_an_ensemble_is_the_least_of_a_fresh_random_subset():
    learner = SAC(5, 3, SACConfig(critics=4, target_critics=2, width=8))
    q = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    least = [learner._least(q).item() for _ in range(200)]
    # pairs of 4: the least is 1 in 3 of 6, 2 in 2 of 6, 3 in 1 of 6, never 4
    share = [least.count(v) / 200 for v in (1.0, 2.0, 3.0, 4.0)]
    assert share[0] == pytest.approx(1 / 2, abs=0.12)
    assert share[1] == pytest.approx(1 / 3, abs=0.12)
    assert share[3] == 0


@pytest.mark.parametrize("name", LEARNERS)
def test_privileged_features_reach_the_critics_and_not_the_actor(name):
    make, config = LEARNERS[name]
    for update in ("fused", "autograd"):
        learner = make(7, 3, config(width=16, update=update, normalize=True), actor_dim=5)
        for batch in batches(4, f=7):
            learner.normalizer.update(batch.obs)
            learner.update(batch)
        assert learner.export()(torch.randn(6, 5)).shape == (6, 3)
        obs = torch.randn(6, 7)
        assert torch.equal(learner.act(obs, explore=False), learner.act(obs[:, :5], explore=False))
        grad = learner.critic.split(learner.theta_critic.grad)[0]
        assert grad[:, 5:7].abs().sum() > 0


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("layer_norm", [False, True])
def test_bfloat16_moves_the_same_way(name, layer_norm):
    oracle = pair(name, critic_layer_norm=layer_norm)[1]
    half, _ = pair(name, critic_layer_norm=layer_norm, precision="bfloat16")
    batch = next(batches(1, n=256))
    for learner in (half, oracle):
        learner.update(batch)
    a, b = half.theta_critic.grad, oracle.theta_critic.grad
    assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.99
    assert a.norm() == pytest.approx(b.norm().item(), rel=0.05)
    half.update(batch)  # the actor too
    oracle.update(batch)
    a, b = half.theta_actor.grad, oracle.theta_actor.grad
    assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.97
    assert half.theta_actor.dtype == torch.float32


class NoHost(TorchDispatchMode):
    """Fails on operations that wait for a device: a number read by the host, a shape that depends on values."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "equal.default", "masked_select", "unique", "is_nonzero")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        assert not any(word in name for word in self.FORBIDDEN), f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("update", ["fused", "autograd"])
def test_an_update_never_asks_the_host(name, update):
    learner = pair(name)[update == "autograd"]
    if update == "fused":
        learner._gradients.nets.choose = False  # as on CUDA; gathering by value is for the CPU
    data = list(batches(4))
    learner.update(data[0])
    with NoHost():
        for batch in data[1:]:
            learner.update(batch)
    with pytest.raises(AssertionError, match="waits"), NoHost():
        learner.log_alpha.sum().item()


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("update", ["fused", "autograd"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_poisoned_batch_changes_no_weight_and_is_counted(name, update, bad):
    learner = pair(name)[update == "autograd"]
    data = list(batches(6))
    for batch in data[:2]:
        learner.update(batch)
    before = learner.state_dict()
    reward = data[2].reward.clone()
    reward[3] = bad
    metrics = learner.update(dataclasses.replace(data[2], reward=reward))
    assert metrics["skipped"] == 1
    assert torch.equal(learner.theta_critic, before["theta_critic"])
    obs = data[3].obs.clone()
    obs[0, 0] = bad
    metrics = learner.update(dataclasses.replace(data[3], obs=obs, next_obs=obs))
    assert metrics["skipped"] == 3  # the critic's, and the actor's with alpha
    for batch in data[4:]:
        learner.update(batch)
    for key, value in learner.state_dict().items():
        assert not torch.is_tensor(value) or torch.isfinite(value.float()).all(), key
    assert not torch.equal(learner.theta_critic, before["theta_critic"])


@pytest.mark.parametrize("name", LEARNERS)
def test_an_infinite_entropy_beside_a_finite_gradient_stops_the_actor_and_alpha(name, monkeypatch):
    learner = pair(name, policy_delay=1)[0]
    real = learner._gradients.actor_gradient
    monkeypatch.setattr(
        learner._gradients, "actor_gradient", lambda *args: (real(*args)[0], torch.full((32,), -torch.inf))
    )
    before = learner.state_dict()
    assert learner.update(next(batches(1)))["skipped"] == 1
    assert torch.equal(learner.log_alpha, before["log_alpha"])
    assert torch.equal(learner.theta_actor, before["theta_actor"])
    assert not torch.equal(learner.theta_critic, before["theta_critic"])


@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh"])
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_backprop_against_autograd(activation, layer_norm, outputs):
    mlp = MLP(3, (4, 8, 8, outputs), layer_norm, activation)
    theta = (mlp.init(torch.Generator().manual_seed(0)) + 0.1).requires_grad_()
    x = torch.randn(16, 4, requires_grad=True)
    output_grad = torch.randn(3, 16, outputs)
    (mlp(theta, x) * output_grad).sum().backward()
    with torch.no_grad():
        net, weights = Backprop(mlp, 16), Weights(mlp, theta.detach().clone().requires_grad_())
        net.set_input(x.detach())
        assert torch.allclose(net.forward(weights), mlp(theta, x), atol=1e-5)
        net.grad_output.copy_(output_grad)
        net.backward(weights)
        assert torch.allclose(weights.grad, theta.grad, atol=1e-5)
        assert torch.allclose(net.input_grad(weights, 1), x.grad[:, 1:], atol=1e-5)
