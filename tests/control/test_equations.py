"""Arithmetic worked by hand."""

import math

import pytest
import torch
from torch import tensor

from control.config import DSACTConfig, SACConfig, dsact_paper
from control.distributions import sample_squashed, squashed_log_prob
from control.dsact import DSACT, running, smaller_mean
from control.dsact import critic_grad as dsact_critic_grad
from control.dsact import critic_loss as dsact_critic_loss
from control.normalizer import RunningNormalizer
from control.sac import SAC, alpha_grad, alpha_loss, soft_target
from control.types import Transition


def test_expected_value_substitution_uses_the_mean_target_for_q_and_the_clipped_sample_for_sigma():
    # one transition, critics identical: Q=1, sigma=2, y_q=3, y_z=20, bound=6, omega=4, epsilon=0
    q, sigma = tensor([[1.0], [1.0]]), tensor([[2.0], [2.0]])
    bound, omega = torch.full((2, 1), 6.0), torch.full((2, 1), 4.0)
    grad_q, grad_sigma = dsact_critic_grad(q, sigma, tensor([3.0]), tensor([20.0]), bound, omega, 0.0)
    # dQ: omega (Q - y_q) / sigma^2 = 4 * (1-3) / 4 = -2: the sample 20 does not enter
    assert grad_q.flatten().tolist() == pytest.approx([-2.0, -2.0])
    # dsigma: y_z clipped to 1+6=7, omega (sigma^2 - 36) / sigma^3 = 4 * (4-36) / 8 = -16
    assert grad_sigma.flatten().tolist() == pytest.approx([-16.0, -16.0])


def test_epsilon_enters_scale_and_divisors():
    one = torch.ones(2, 1)
    grad_q, grad_sigma = dsact_critic_grad(one, one, tensor([2.0]), tensor([2.0]), 9 * one, one, 0.1)
    assert grad_q[0].item() == pytest.approx(1.1 * -1 / 1.1)
    assert grad_sigma[0].item() == pytest.approx(0.0)  # sigma^2 = 1 = (Q - y_z)^2


def test_the_surrogate_has_the_gradient_of_the_objective_averaged_over_the_batch():
    q, sigma = torch.randn(2, 4, requires_grad=True), torch.rand(2, 4).add(0.5).requires_grad_()
    grad_q, grad_sigma = torch.randn(2, 4), torch.randn(2, 4)
    dsact_critic_loss(q, sigma, grad_q, grad_sigma).backward()
    assert torch.allclose(q.grad, grad_q / 4)
    assert torch.allclose(sigma.grad, grad_sigma / 4)


def test_twin_value_distribution_picks_per_transition():
    q, sigma = tensor([[1.0, 5.0], [2.0, 4.0]]), tensor([[10.0, 11.0], [20.0, 21.0]])
    mean, deviation = smaller_mean(q, sigma)
    assert mean.tolist() == [1.0, 4.0]
    assert deviation.tolist() == [10.0, 21.0]


def test_running_average_starts_at_the_first_value_and_needs_no_flag():
    first = running(tensor([math.nan]), tensor([8.0]), 0.25)
    assert first.item() == 8.0
    assert running(first, tensor([4.0]), 0.25).item() == pytest.approx(7.0)


@pytest.mark.parametrize("omega", ["paper", "code"])
def test_sigma_of_a_fixed_gaussian_is_learned_within_5_percent(omega):
    """The public code's half Huber learns sigma / sqrt 2 here: 3.5 for a true 5."""
    torch.manual_seed(0)
    cfg = DSACTConfig(gamma=0.9, lr=3e-3, width=16, omega=omega)
    learner = DSACT(1, 1, cfg)
    noise = torch.Generator().manual_seed(1)
    obs, action, done = torch.zeros(256, 1), torch.zeros(256, 1), torch.zeros(256)
    sigmas, means = [], []
    for i in range(1200):
        reward = 2 + 5 * torch.randn(256, generator=noise)
        metrics = learner.update(Transition(obs, action, reward, done, obs))
        if i >= 900:
            sigmas.append(metrics["sigma"].item())
            means.append(metrics["q"].item())
    # the target is clipped at 3 sigma, which takes 2.5 % off the variance: 1.3 % off sigma
    assert sum(sigmas) / len(sigmas) == pytest.approx(5.0, rel=0.05)
    assert sum(means) / len(means) == pytest.approx(2.0, abs=0.25)


def test_running_statistics_are_e_sigma_and_e_sigma_squared_and_are_saved():
    learner = DSACT(2, 1, DSACTConfig(gamma=0.9, width=8))
    batch = _batch(2, 1)
    _, sigma = learner._value(learner.theta_critic, batch.obs, batch.action)
    learner.update(batch)
    assert torch.allclose(learner.sigma_mean, sigma.detach().mean(-1, keepdim=True))
    assert torch.allclose(learner.sigma_square, sigma.detach().square().mean(-1, keepdim=True))
    other = DSACT(2, 1, DSACTConfig(gamma=0.9, width=8), seed=9)
    other.load_state_dict(learner.state_dict())
    assert torch.equal(other.sigma_mean, learner.sigma_mean)
    assert torch.equal(other.sigma_square, learner.sigma_square)


def test_soft_target_bootstraps_truncation_and_not_termination():
    # r=1, q'=10, log pi'=-2, alpha=0.5: 1 + 0.9 (10 + 1) = 10.9, or 1 at a termination (discount 0)
    y = soft_target(tensor([1.0, 1.0]), tensor([0.9, 0.0]), tensor([10.0, 10.0]), tensor([-2.0, -2.0]), tensor(0.5))
    assert y.tolist() == pytest.approx([10.9, 1.0])


def test_log_prob_is_stable_at_the_edge_of_the_box():
    # u=20: tanh(u)=1 in float32; log(1-tanh^2) = 2 (log 2 - 20 - ~0) = -38.6137
    value = squashed_log_prob(tensor([20.0]), tensor([20.0]), tensor([0.0]))
    assert value.item() == pytest.approx(-0.5 * math.log(2 * math.pi) + 38.613706, rel=1e-6)
    u = tensor([-30.0, 30.0], requires_grad=True)
    squashed_log_prob(u, torch.zeros(2), torch.zeros(2)).backward()
    assert torch.isfinite(u.grad).all()


def test_log_prob_agrees_with_the_naive_formula_and_has_the_affine_term():
    u, mean, log_std = tensor([0.3, -0.7]), tensor([0.1, 0.2]), tensor([-0.5, 0.4])
    normal = torch.distributions.Normal(mean, log_std.exp()).log_prob(u)
    want = (normal - torch.log(1 - u.tanh() ** 2)).sum().item()
    assert squashed_log_prob(u, mean, log_std).item() == pytest.approx(want, rel=1e-5)
    half = tensor([0.1, 0.2])  # a narrower physical box has a higher density: minus log 0.1 minus log 0.2
    assert squashed_log_prob(u, mean, log_std, half).item() == pytest.approx(want - math.log(0.02), rel=1e-5)


def test_sample_and_its_density_agree_with_log_prob():
    mean, log_std, noise = torch.randn(5, 3), torch.randn(5, 3) * 0.3, torch.randn(5, 3)
    action, log_prob = sample_squashed(mean, log_std, noise)
    u = mean + log_std.exp() * noise
    assert torch.allclose(action, u.tanh())
    assert torch.allclose(log_prob, squashed_log_prob(u, mean, log_std), atol=1e-5)


def test_alpha_rises_when_entropy_is_below_its_target():
    log_alpha = tensor([0.0], requires_grad=True)
    alpha_loss(log_alpha, tensor([5.0]), target_entropy=-3.0).backward()  # entropy -5 < -3
    assert log_alpha.grad.item() == pytest.approx(-2.0)  # descent raises log alpha
    assert alpha_grad(tensor(-5.0), -3.0).tolist() == log_alpha.grad.tolist()


@pytest.mark.parametrize(("learner", "cfg"), [(SAC, SACConfig(gamma=0.9)), (DSACT, DSACTConfig(gamma=0.9))])
def test_target_entropy_is_minus_the_action_dimension(learner, cfg):
    assert learner(3, 4, cfg).target_entropy == -4.0


@pytest.mark.parametrize(
    ("make", "cfg"), [(SAC, SACConfig(gamma=0.9, width=8)), (DSACT, DSACTConfig(gamma=0.9, width=8))]
)
def test_actor_steps_every_second_update_and_initial_policy_is_not_saturated(make, cfg):
    learner = make(2, 1, cfg)
    before = learner.theta_actor.detach().clone()
    learner.update(_batch(2, 1))
    assert torch.equal(before, learner.theta_actor)
    learner.update(_batch(2, 1))
    assert not torch.equal(before, learner.theta_actor)
    _, log_std = learner._policy(learner.theta_actor, torch.randn(64, 2))
    assert 0.3 < log_std.exp().mean() < 2.0


def test_dsact_targets_move_only_with_the_actor():
    learner = DSACT(2, 1, DSACTConfig(gamma=0.9, width=8, tau=0.5))
    start = learner.theta_critic_target.clone()
    learner.update(_batch(2, 1))
    assert torch.equal(start, learner.theta_critic_target)
    learner.update(_batch(2, 1))
    want = start + 0.5 * (learner.theta_critic.detach() - start)
    assert torch.allclose(learner.theta_critic_target, want, atol=1e-6)


@pytest.mark.parametrize(("make", "cfg"), [(SAC, SACConfig(width=8)), (DSACT, DSACTConfig(width=8))])
def test_greedy_actions_come_from_the_averaged_actor(make, cfg):
    learner, obs = make(2, 1, cfg), torch.randn(4, 2)
    start = learner.theta_actor_average.clone()
    for _ in range(2):
        learner.update(_batch(2, 1))
    assert torch.allclose(learner.theta_actor_average, start + 0.005 * (learner.theta_actor.detach() - start))
    greedy = learner.act(obs, explore=False)
    with torch.no_grad():
        learner.theta_actor += 1
    assert torch.equal(learner.act(obs, explore=False), greedy)


def test_paper_preset():
    cfg = dsact_paper()
    assert (cfg.lr, cfg.lr_alpha, cfg.gamma, cfg.tau, cfg.policy_delay) == (1e-4, 3e-4, 0.99, 0.005, 2)
    assert math.log(cfg.alpha) == pytest.approx(1.0)
    assert (cfg.xi, cfg.epsilon, cfg.width, cfg.depth, cfg.activation) == (3.0, 0.1, 256, 3, "gelu")


def test_normalizer_merges_exactly_and_leaves_out_non_finite_rows():
    whole = torch.randn(100, 3) * 4 + 7
    norm = RunningNormalizer(3)
    for part in whole.split(13):
        norm.update(part)
    norm.update(torch.tensor([[math.nan, 0.0, 0.0]]))
    assert norm.count.item() == 100
    assert torch.allclose(norm.mean, whole.double().mean(0))
    assert torch.allclose(norm(whole).std(0, correction=0), torch.ones(3), atol=1e-4)


def _batch(obs_dim, act_dim, n=32):
    g = torch.Generator().manual_seed(3)
    obs, action = torch.randn(n, obs_dim, generator=g), torch.rand(n, act_dim, generator=g) * 2 - 1
    return Transition(obs, action, torch.randn(n, generator=g), torch.full((n,), 0.9), obs + 0.1)
