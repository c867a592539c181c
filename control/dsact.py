"""DSAC-T (Duan et al., "Distributional soft actor-critic with three refinements", arXiv 2310.05858).

The return of a state-action pair is a Gaussian Z ~ N(Q, sigma^2). Three refinements of DSAC:
1. expected value substitution: the mean moves towards the target's *mean*, not towards a random sample of it;
2. twin value distribution learning: per transition, the target is the critic with the smaller mean;
3. variance-based gradient adjustment: the clipping bound follows E[sigma], the step follows E[sigma^2].
Works on flat features (N, F) and unit-box actions (N, A). Critic tensors are (2, N), one row per critic.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from control.config import DSACTConfig, with_defaults
from control.distributions import sample_squashed
from control.fused import FusedActorCritic, Weights
from control.graphs import Graphed
from control.networks import Adam, GreedyActor, actor_mlp, critic_mlp, mean_log_std, not_finite
from control.normalizer import RunningNormalizer
from control.sac import actor_loss, alpha_grad, normalized, soft_target
from control.types import Transition


class DSACT:
    """Learner (see :class:`control.types.Learner`).

    Args:
        obs_dim: F, features that the critics see.
        act_dim: A.
        actor_dim: the actor sees the first ``actor_dim`` features; None: all.
    """

    def __init__(
        self, obs_dim: int, act_dim: int, config: DSACTConfig, device: str = "cpu", seed: int = 0,
        actor_dim: int | None = None,
    ) -> None:  # fmt: skip
        cfg: Any = with_defaults(config)
        self.cfg = cfg
        self.act_dim, self.actor_dim = act_dim, actor_dim or obs_dim
        self.target_entropy = -float(act_dim) if cfg.target_entropy is None else cfg.target_entropy
        weights = torch.Generator().manual_seed(seed)
        self.actor = actor_mlp(self.actor_dim, act_dim, cfg.width, cfg.depth, cfg.activation)
        self.critic = critic_mlp(
            obs_dim, act_dim, 2, cfg.width, cfg.depth, cfg.activation, cfg.critic_layer_norm
        )  # (2, N, [Q, raw sigma])
        # one vector for all that has a target, so that one lerp moves every target
        self.theta = torch.cat([self.actor.init(weights), self.critic.init(weights)]).to(device)
        self.theta_target = self.theta.clone()
        sizes = [self.actor.num_parameters, self.critic.num_parameters]
        self.theta_actor, self.theta_critic = (part.requires_grad_() for part in self.theta.detach().split(sizes))
        self.theta_actor_target, self.theta_critic_target = self.theta_target.split(sizes)
        self.theta_actor_average = self.theta_actor.detach().clone()  # acts greedily, is exported
        self.log_alpha = torch.tensor([cfg.alpha], device=device).log().requires_grad_()
        self.sigma_mean = torch.full((2, 1), torch.nan, device=device)  # running E[sigma]; nan before the first batch
        self.sigma_square = torch.full((2, 1), torch.nan, device=device)  # running E[sigma^2]
        self.skipped = torch.zeros((), device=device)  # steps left out because a gradient was not finite
        self.optimizers = {
            "actor": Adam(self.theta_actor, cfg.lr, skipped=self.skipped),
            "critic": Adam(self.theta_critic, cfg.lr, skipped=self.skipped),
            "alpha": Adam(self.log_alpha, cfg.lr_alpha, skipped=self.skipped),
        }
        self.normalizer = RunningNormalizer(obs_dim, device, cfg.normalize)
        self.generator = torch.Generator(device).manual_seed(seed + 1)
        self.updates = 0
        self._metrics: Mapping[str, Tensor] = {}
        self._gradients = _Passes(self, device) if cfg.update == "fused" else self
        self._run = Graphed(self._update, self, device, cfg.update == "fused")

    @torch.no_grad()
    def act(self, obs: Tensor, explore: bool) -> Tensor:
        """(B, F) -> (B, A) in [-1, 1]: a sample, or tanh of the averaged actor's mean."""
        theta = self.theta_actor if explore else self.theta_actor_average
        mean, log_std = self._policy(theta, self.normalizer(obs))
        return sample_squashed(mean, log_std, self._noise(*mean.shape))[0] if explore else mean.tanh()

    def update(self, batch: Transition) -> dict[str, Tensor]:
        """One critic step; every ``policy_delay``-th call also the actor, alpha and all targets."""
        self.updates += 1
        with torch.inference_mode(self._gradients is not self):  # by hand: operations keep no books for autograd
            metrics = self._run(normalized(batch, self.normalizer), self.updates % self.cfg.policy_delay == 0)
        self._metrics = {**self._metrics, **metrics}  # those of the actor's last step stay in sight
        return dict(self._metrics)

    def _update(self, batch: Transition, with_actor: bool) -> dict[str, Tensor]:
        loss, q, sigma = self._gradients.critic_gradient(batch)
        self.optimizers["critic"].step()
        metrics = {"critic_loss": loss, "q": q.mean(), "sigma": sigma.mean()}
        if with_actor:
            metrics |= self._update_actor(batch.obs)
            self.theta_target.lerp_(self.theta, self.cfg.tau)
        return metrics | {"skipped": self.skipped}

    def _update_actor(self, obs: Tensor) -> dict[str, Tensor]:
        loss, log_prob = self._gradients.actor_gradient(obs)
        alpha = self.log_alpha.detach().exp()[0]  # the one that the actor's loss used
        entropy = -log_prob.mean()
        self.log_alpha.grad = alpha_grad(entropy, self.target_entropy)
        assert self.theta_actor.grad is not None
        found = not_finite(self.theta_actor.grad, entropy)  # alpha's step and the actor's are made together
        self.skipped += found
        self.optimizers["actor"].step(found)
        self.optimizers["alpha"].step(found)
        self.theta_actor_average.lerp_(self.optimizers["actor"].data, self.cfg.actor_average)
        return {"actor_loss": loss, "entropy": entropy, "alpha": alpha}

    def critic_gradient(self, batch: Transition) -> tuple[Tensor, Tensor, Tensor]:
        """Writes ``theta_critic.grad``; returns the surrogate loss, and mean and deviation, (2, N) each."""
        with torch.no_grad():
            mean, log_std = self._policy(self.theta_actor_target, batch.next_obs)
            action, log_prob = sample_squashed(mean, log_std, self._noise(*mean.shape))
            y_q, y_z = self.targets(batch, *self._value(self.theta_critic_target, batch.next_obs, action), log_prob)
        q, sigma = self._value(self.theta_critic, batch.obs, batch.action)  # (2, N) each
        loss = critic_loss(q, sigma, *critic_grad(q.detach(), sigma.detach(), y_q, y_z, *self.statistics(sigma)))
        (self.theta_critic.grad,) = torch.autograd.grad(loss, self.theta_critic)
        return loss.detach(), q.detach(), sigma.detach()

    def actor_gradient(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Writes ``theta_actor.grad``; returns the loss and (N,) log densities."""
        mean, log_std = self._policy(self.theta_actor, obs)
        action, log_prob = sample_squashed(mean, log_std, self._noise(*mean.shape))
        q, _ = self._value(self.theta_critic.detach(), obs, action)  # (2, N)
        loss = actor_loss(q.amin(0), log_prob, self.log_alpha.detach().exp())
        (self.theta_actor.grad,) = torch.autograd.grad(loss, self.theta_actor)
        return loss.detach(), log_prob.detach()

    @torch.no_grad()
    def targets(self, batch: Transition, q: Tensor, sigma: Tensor, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        """Targets (N,) of the mean and of the sample, from the critic with the smaller mean, per transition.

        Args:
            q, sigma: (2, N) of the target critics at the successors; ``log_prob`` (N,) of the action there.
        """
        q, sigma = smaller_mean(q, sigma)  # (N,)
        z = q + sigma * self._noise(q.shape[0]).clamp(-3, 3)
        alpha = self.log_alpha.exp()
        y_q = soft_target(batch.reward, batch.discount, q, log_prob, alpha)
        return y_q, soft_target(batch.reward, batch.discount, z, log_prob, alpha)

    @torch.no_grad()
    def statistics(self, sigma: Tensor) -> tuple[Tensor, Tensor, float]:
        """Moves the running statistics by a (2, N) batch; returns bound (2, 1), omega (2, 1) and epsilon."""
        cfg = self.cfg
        self.sigma_mean.copy_(running(self.sigma_mean, sigma.mean(-1, keepdim=True), cfg.tau_b))
        self.sigma_square.copy_(running(self.sigma_square, sigma.square().mean(-1, keepdim=True), cfg.tau_b))
        omega = self.sigma_square if cfg.omega == "paper" else self.sigma_mean.square()
        return cfg.xi * self.sigma_mean, omega, cfg.epsilon

    def _policy(self, theta: Tensor, obs: Tensor) -> tuple[Tensor, Tensor]:
        output = self.actor(theta, obs[:, : self.actor_dim])
        return mean_log_std(output, self.cfg.log_std_min, self.cfg.log_std_max)

    def _value(self, theta: Tensor, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        q, raw = self.critic(theta, torch.cat([obs, action], -1)).unbind(-1)
        return q, F.softplus(raw)

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.generator.device)

    def export(self) -> nn.Module:
        """Raw features (B, actor_dim) -> greedy unit actions (B, A), on the CPU."""
        return GreedyActor(self.actor, self.theta_actor_average, self.normalizer)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on; copies."""
        state: dict[str, Any] = {name: getattr(self, name).detach() for name in _TENSORS}
        state["optimizers"] = {name: adam.state_dict() for name, adam in self.optimizers.items()}
        state["normalizer"] = self.normalizer.state_dict()
        state["generator"] = self.generator.get_state()
        state["updates"] = self.updates
        return copy.deepcopy(state)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state_dict`, in place; the sizes must agree."""
        for name in _TENSORS:
            getattr(self, name).copy_(state[name])
        for name, adam in self.optimizers.items():
            adam.load_state_dict(state["optimizers"][name])
        self.normalizer.load_state_dict(state["normalizer"])
        self.generator.set_state(state["generator"])
        self.updates = state["updates"]


_TENSORS = (
    "theta_actor", "theta_actor_average", "theta_actor_target", "theta_critic", "theta_critic_target", "log_alpha",
    "sigma_mean", "sigma_square",
)  # fmt: skip


class _Passes:
    """:meth:`DSACT.critic_gradient` and :meth:`DSACT.actor_gradient` with the backward pass by hand."""

    def __init__(self, learner: DSACT, device: torch.device | str) -> None:
        cfg, self.learner = learner.cfg, learner
        dtype, log_std = getattr(torch, cfg.precision), (cfg.log_std_min, cfg.log_std_max)
        self.nets = FusedActorCritic(learner.actor, learner.critic, learner.actor_dim, log_std, device, dtype)
        self.w_actor = Weights(learner.actor, learner.theta_actor, dtype, trained=True)
        self.w_critic = Weights(learner.critic, learner.theta_critic, dtype, trained=True)
        self.w_actor_target = Weights(learner.actor, learner.theta_actor_target, dtype, trained=False)
        self.w_critic_target = Weights(learner.critic, learner.theta_critic_target, dtype, trained=False)

    @torch.no_grad()
    def critic_gradient(self, batch: Transition) -> tuple[Tensor, Tensor, Tensor]:
        learner, nets, n = self.learner, self.nets, batch.obs.shape[0]
        nets.prepare(n, (self.w_actor, self.w_critic, self.w_actor_target, self.w_critic_target))
        nets.load(batch.obs, batch.next_obs)
        nets.sample(self.w_actor_target, nets.next, learner._noise(n, learner.act_dim))
        q, raw = nets.value(self.w_critic_target, nets.next, nets.next.action).unbind(-1)  # (2, N) each
        y_q, y_z = learner.targets(batch, q, F.softplus(raw), nets.next.log_prob)
        q, raw = nets.value(self.w_critic, nets.now, batch.action).unbind(-1)
        sigma = F.softplus(raw)
        grad_q, grad_sigma = critic_grad(q, sigma, y_q, y_z, *learner.statistics(sigma))
        loss = critic_loss(q, sigma, grad_q, grad_sigma)
        grad_raw = grad_sigma.mul_(raw.sigmoid())  # the slope of softplus
        nets.critic.grad_output.copy_(torch.stack([grad_q, grad_raw], -1).div_(n))
        nets.critic_backward(self.w_critic)
        return loss, q, sigma

    @torch.no_grad()
    def actor_gradient(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """At the observations that :meth:`critic_gradient` read."""
        learner, nets, now, n = self.learner, self.nets, self.nets.now, obs.shape[0]
        nets.prepare(n, (self.w_critic,))
        nets.sample(self.w_actor, now, learner._noise(n, learner.act_dim))
        q = nets.value(self.w_critic, now, now.action)[..., 0]  # (2, N)
        alpha, least = learner.log_alpha.exp(), q.amin(0)
        nets.actor_backward(self.w_actor, self.w_critic, q, least, alpha)
        return actor_loss(least, now.log_prob, alpha), now.log_prob


def smaller_mean(q: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """(2, N) -> (N,): mean and deviation of the critic with the smaller mean (refinement 2)."""
    first = q[0] <= q[1]
    return torch.where(first, q[0], q[1]), torch.where(first, sigma[0], sigma[1])


def running(average: Tensor, value: Tensor, rate: float) -> Tensor:
    """Moving average that starts at the first value; nan marks the start, so no flag crosses to the host.

    A value that is not finite leaves the average where it was.
    """
    moved = torch.where(average.isnan(), value, average.lerp(value, rate))
    return torch.where(value.isfinite(), moved, average)


def critic_grad(
    q: Tensor, sigma: Tensor, y_q: Tensor, y_z: Tensor, bound: Tensor, omega: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """(2, N) derivatives per transition of the paper's critic objective, eq. 26, with respect to Q and sigma.

    Args:
        q, sigma: (2, N), without gradient.
        y_q, y_z: (N,) targets of the mean (expected value substitution) and of the sample.
        bound: (2, 1) clipping bound xi E[sigma] of the sample's target around Q.
        omega: (2, 1) gradient scale E[sigma^2].
        epsilon: keeps the divisions by sigma^2 and sigma^3 and the scale away from 0.
    """
    deviation = torch.clamp(y_z - q, -bound, bound)  # of the clipped sample from Q
    scale, variance = omega + epsilon, sigma.square()
    grad_q = scale * (q - y_q) / (variance + epsilon)
    grad_sigma = scale * (variance - deviation.square()) / (variance * sigma + epsilon)
    return grad_q, grad_sigma


def critic_loss(q: Tensor, sigma: Tensor, grad_q: Tensor, grad_sigma: Tensor) -> Tensor:
    """Surrogate of (2, N) values whose gradient is :func:`critic_grad`: mean over the batch, sum over critics."""
    return (grad_q * q + grad_sigma * sigma).mean(-1).sum()
