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
from torch import Tensor

from control.config import DSACTConfig, with_defaults
from control.distributions import sample_squashed
from control.networks import actor_mlp, adam, adam_state, descend, load_adam_state, mean_log_std, twin_critic_mlp
from control.normalizer import RunningNormalizer
from control.sac import actor_loss, alpha_loss, normalized, soft_target
from control.types import Transition


class DSACT:
    """Learner (see :class:`control.types.Learner`)."""

    def __init__(self, obs_dim: int, act_dim: int, cfg: DSACTConfig, device: str = "cpu", seed: int = 0) -> None:
        self.cfg, self.act_dim = with_defaults(cfg), act_dim
        self.target_entropy = -float(act_dim) if cfg.target_entropy is None else cfg.target_entropy
        weights = torch.Generator().manual_seed(seed)
        self.actor = actor_mlp(obs_dim, act_dim, cfg.width, cfg.depth, cfg.activation)
        self.critic = twin_critic_mlp(
            obs_dim, act_dim, 2, cfg.width, cfg.depth, cfg.activation, cfg.critic_layer_norm
        )  # (2, N, [Q, raw sigma])
        self.theta_actor = self.actor.init(weights).to(device).requires_grad_()
        self.theta_critic = self.critic.init(weights).to(device).requires_grad_()
        self.theta_actor_target = self.theta_actor.detach().clone()
        self.theta_critic_target = self.theta_critic.detach().clone()
        self.theta_actor_average = self.theta_actor.detach().clone()  # acts greedily, is exported
        self.log_alpha = torch.tensor([cfg.alpha], device=device).log().requires_grad_()
        self.sigma_mean = torch.full((2, 1), torch.nan, device=device)  # running E[sigma]; nan before the first batch
        self.sigma_square = torch.full((2, 1), torch.nan, device=device)  # running E[sigma^2]
        self.optimizers = {
            "actor": adam(self.theta_actor, self.cfg.lr),
            "critic": adam(self.theta_critic, self.cfg.lr),
            "alpha": adam(self.log_alpha, cfg.lr_alpha),
        }
        self.normalizer = RunningNormalizer(obs_dim, device, cfg.normalize)
        self.generator = torch.Generator(device).manual_seed(seed + 1)
        self.updates = 0
        self._actor_metrics: dict[str, Tensor] = {}

    @torch.no_grad()
    def act(self, obs: Tensor, explore: bool) -> Tensor:
        """(B, F) -> (B, A) in [-1, 1]: a sample, or tanh of the averaged actor's mean."""
        theta = self.theta_actor if explore else self.theta_actor_average
        mean, log_std = self._policy(theta, self.normalizer(obs))
        return sample_squashed(mean, log_std, self._noise(*mean.shape))[0] if explore else mean.tanh()

    def update(self, batch: Transition) -> dict[str, Tensor]:
        """One critic step; every ``policy_delay``-th call also the actor, alpha and all targets."""
        cfg, batch = self.cfg, normalized(batch, self.normalizer)
        y_q, y_z = self._targets(batch)  # (N,) each
        q, sigma = self._value(self.theta_critic, batch.obs, batch.action)  # (2, N) each
        with torch.no_grad():
            self.sigma_mean = running(self.sigma_mean, sigma.mean(-1, keepdim=True), cfg.tau_b)
            self.sigma_square = running(self.sigma_square, sigma.square().mean(-1, keepdim=True), cfg.tau_b)
            omega = self.sigma_square if cfg.omega == "paper" else self.sigma_mean.square()
        loss = critic_loss(q, sigma, y_q, y_z, cfg.xi * self.sigma_mean, omega, cfg.epsilon)
        descend(self.optimizers["critic"], self.theta_critic, loss)
        self.updates += 1
        if self.updates % cfg.policy_delay == 0:
            self._actor_metrics = self._update_actor(batch.obs)
            self.theta_critic_target.lerp_(self.theta_critic.detach(), cfg.tau)
            self.theta_actor_target.lerp_(self.theta_actor.detach(), cfg.tau)
        metrics = {"critic_loss": loss, "q": q.mean(), "sigma": sigma.mean()}
        return {**{k: v.detach() for k, v in metrics.items()}, **self._actor_metrics}

    @torch.no_grad()
    def _targets(self, batch: Transition) -> tuple[Tensor, Tensor]:
        """Targets of the mean and of the sample, from the critic with the smaller mean, per transition."""
        mean, log_std = self._policy(self.theta_actor_target, batch.next_obs)
        action, log_prob = sample_squashed(mean, log_std, self._noise(*mean.shape))
        q, sigma = self._value(self.theta_critic_target, batch.next_obs, action)  # (2, N)
        q, sigma = smaller_mean(q, sigma)  # (N,)
        z = q + sigma * self._noise(q.shape[0]).clamp(-3, 3)
        alpha = self.log_alpha.exp()
        y_q = soft_target(batch.reward, batch.discount, q, log_prob, alpha)
        return y_q, soft_target(batch.reward, batch.discount, z, log_prob, alpha)

    def _update_actor(self, obs: Tensor) -> dict[str, Tensor]:
        mean, log_std = self._policy(self.theta_actor, obs)
        action, log_prob = sample_squashed(mean, log_std, self._noise(*mean.shape))
        q, _ = self._value(self.theta_critic.detach(), obs, action)  # (2, N)
        loss = actor_loss(q.amin(0), log_prob, self.log_alpha.detach().exp())
        descend(self.optimizers["actor"], self.theta_actor, loss)
        self.theta_actor_average.lerp_(self.theta_actor.detach(), self.cfg.actor_average)
        log_prob = log_prob.detach()
        descend(self.optimizers["alpha"], self.log_alpha, alpha_loss(self.log_alpha, log_prob, self.target_entropy))
        return {"actor_loss": loss.detach(), "entropy": -log_prob.mean(), "alpha": self.log_alpha.detach().exp()[0]}

    def _policy(self, theta: Tensor, obs: Tensor) -> tuple[Tensor, Tensor]:
        return mean_log_std(self.actor(theta, obs), self.cfg.log_std_min, self.cfg.log_std_max)

    def _value(self, theta: Tensor, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        q, raw = self.critic(theta, torch.cat([obs, action], -1)).unbind(-1)
        return q, F.softplus(raw)

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.generator.device)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on; copies."""
        state = {name: getattr(self, name).detach() for name in _TENSORS}
        state["optimizers"] = {name: adam_state(opt) for name, opt in self.optimizers.items()}
        state["normalizer"] = self.normalizer.state_dict()
        state["generator"] = self.generator.get_state()
        state["updates"] = self.updates
        return copy.deepcopy(state)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state_dict`; the sizes must agree."""
        for name in _TENSORS:
            getattr(self, name).copy_(state[name])
        for name, opt in self.optimizers.items():
            load_adam_state(opt, state["optimizers"][name])
        self.normalizer.load_state_dict(state["normalizer"])
        self.generator.set_state(state["generator"])
        self.updates = state["updates"]


_TENSORS = (
    "theta_actor", "theta_actor_average", "theta_actor_target", "theta_critic", "theta_critic_target", "log_alpha",
    "sigma_mean", "sigma_square",
)  # fmt: skip


def smaller_mean(q: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """(2, N) -> (N,): mean and deviation of the critic with the smaller mean (refinement 2)."""
    first = q[0] <= q[1]
    return torch.where(first, q[0], q[1]), torch.where(first, sigma[0], sigma[1])


def running(average: Tensor, value: Tensor, rate: float) -> Tensor:
    """Moving average that starts at the first value; nan marks the start, so no flag crosses to the host."""
    return torch.where(average.isnan(), value, average.lerp(value, rate))


def critic_loss(
    q: Tensor, sigma: Tensor, y_q: Tensor, y_z: Tensor, bound: Tensor, omega: Tensor, epsilon: float
) -> Tensor:
    """Surrogate whose gradient is that of the paper's critic objective, eq. 26.

    Args:
        q, sigma: (2, N) with gradient.
        y_q, y_z: (N,) targets of the mean (expected value substitution) and of the sample.
        bound: (2, 1) clipping bound xi E[sigma] of the sample's target around Q.
        omega: (2, 1) gradient scale E[sigma^2].
        epsilon: keeps the divisions by sigma^2 and sigma^3 and the scale away from 0.
    """
    with torch.no_grad():
        y_clipped = q + torch.clamp(y_z - q, -bound, bound)
        scale = omega + epsilon  # (2, 1)
        grad_q = scale * (q - y_q) / (sigma.square() + epsilon)
        grad_sigma = scale * (sigma.square() - (q - y_clipped).square()) / (sigma.pow(3) + epsilon)
    return (grad_q * q + grad_sigma * sigma).mean(-1).sum()
