"""Soft actor-critic (Haarnoja et al., arXiv 1812.05905), with LayerNorm twin critics as in RLPD (arXiv 2302.02948).

Works on flat features (N, F) and unit-box actions (N, A). In the order of the paper: networks, act, update, losses.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from control.config import SACConfig, with_defaults
from control.distributions import sample_squashed
from control.networks import (
    actor_mlp,
    adam,
    adam_state,
    descend,
    load_adam_state,
    mean_log_std,
    twin_critic_mlp,
)
from control.normalizer import RunningNormalizer
from control.types import Transition


class SAC:
    """Learner (see :class:`control.types.Learner`)."""

    def __init__(self, obs_dim: int, act_dim: int, cfg: SACConfig, device: str = "cpu", seed: int = 0) -> None:
        self.cfg, self.act_dim = with_defaults(cfg), act_dim
        self.target_entropy = -float(act_dim) if cfg.target_entropy is None else cfg.target_entropy
        weights = torch.Generator().manual_seed(seed)
        self.actor = actor_mlp(obs_dim, act_dim, cfg.width, cfg.depth, cfg.activation)
        self.critic = twin_critic_mlp(
            obs_dim, act_dim, 1, cfg.width, cfg.depth, cfg.activation, cfg.critic_layer_norm
        )  # (2, N, 1)
        self.theta_actor = self.actor.init(weights).to(device).requires_grad_()
        self.theta_critic = self.critic.init(weights).to(device).requires_grad_()
        self.theta_target = self.theta_critic.detach().clone()
        self.theta_actor_average = self.theta_actor.detach().clone()  # acts greedily, is exported
        self.log_alpha = torch.tensor([cfg.alpha], device=device).log().requires_grad_()
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
        return sample_squashed(mean, log_std, self._noise(obs.shape[0]))[0] if explore else mean.tanh()

    def update(self, batch: Transition) -> dict[str, Tensor]:
        """One critic step; every ``policy_delay``-th call also the actor and alpha."""
        batch = normalized(batch, self.normalizer)
        target = self._target(batch)  # (N,)
        q = self.critic(self.theta_critic, torch.cat([batch.obs, batch.action], -1)).squeeze(-1)  # (2, N)
        loss = critic_loss(q, target)
        descend(self.optimizers["critic"], self.theta_critic, loss)
        self.updates += 1
        if self.updates % self.cfg.policy_delay == 0:
            self._actor_metrics = self._update_actor(batch.obs)
        self.theta_target.lerp_(self.theta_critic.detach(), self.cfg.tau)
        return {"critic_loss": loss.detach(), "q": q.detach().mean(), **self._actor_metrics}

    @torch.no_grad()
    def _target(self, batch: Transition) -> Tensor:
        action, log_prob = sample_squashed(
            *self._policy(self.theta_actor, batch.next_obs), self._noise(batch.obs.shape[0])
        )
        q = self.critic(self.theta_target, torch.cat([batch.next_obs, action], -1)).squeeze(-1)  # (2, N)
        return soft_target(batch.reward, batch.discount, q.amin(0), log_prob, self.log_alpha.exp())

    def _update_actor(self, obs: Tensor) -> dict[str, Tensor]:
        action, log_prob = sample_squashed(*self._policy(self.theta_actor, obs), self._noise(obs.shape[0]))
        q = self.critic(self.theta_critic.detach(), torch.cat([obs, action], -1)).squeeze(-1)  # (2, N)
        loss = actor_loss(q.amin(0), log_prob, self.log_alpha.detach().exp())
        descend(self.optimizers["actor"], self.theta_actor, loss)
        self.theta_actor_average.lerp_(self.theta_actor.detach(), self.cfg.actor_average)
        log_prob = log_prob.detach()
        descend(self.optimizers["alpha"], self.log_alpha, alpha_loss(self.log_alpha, log_prob, self.target_entropy))
        return {"actor_loss": loss.detach(), "entropy": -log_prob.mean(), "alpha": self.log_alpha.detach().exp()[0]}

    def _policy(self, theta: Tensor, obs: Tensor) -> tuple[Tensor, Tensor]:
        return mean_log_std(self.actor(theta, obs), self.cfg.log_std_min, self.cfg.log_std_max)

    def _noise(self, n: int) -> Tensor:
        return torch.randn(n, self.act_dim, generator=self.generator, device=self.generator.device)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on; copies."""
        state = {
            "theta_actor": self.theta_actor.detach(),
            "theta_critic": self.theta_critic.detach(),
            "theta_actor_average": self.theta_actor_average,
            "theta_target": self.theta_target,
            "log_alpha": self.log_alpha.detach(),
            "optimizers": {name: adam_state(opt) for name, opt in self.optimizers.items()},
            "normalizer": self.normalizer.state_dict(),
            "generator": self.generator.get_state(),
            "updates": self.updates,
        }
        return copy.deepcopy(state)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state_dict`; the sizes must agree."""
        for name in ("theta_actor", "theta_actor_average", "theta_critic", "theta_target", "log_alpha"):
            getattr(self, name).copy_(state[name])
        for name, opt in self.optimizers.items():
            load_adam_state(opt, state["optimizers"][name])
        self.normalizer.load_state_dict(state["normalizer"])
        self.generator.set_state(state["generator"])
        self.updates = state["updates"]


def normalized(batch: Transition, normalizer: RunningNormalizer) -> Transition:
    """The batch with normalised features (the same object when the normaliser is off)."""
    if not normalizer.enabled:
        return batch
    obs, next_obs = normalizer(batch.obs), normalizer(batch.next_obs)
    return Transition(obs, batch.action, batch.reward, batch.discount, next_obs)


def soft_target(reward: Tensor, discount: Tensor, q_next: Tensor, log_prob_next: Tensor, alpha: Tensor) -> Tensor:
    """(N,) r + discount (q' - alpha log pi'), eqs. 3 and 6 of 1812.05905; ``discount`` holds the termination."""
    return reward + discount * (q_next - alpha * log_prob_next)


def critic_loss(q: Tensor, target: Tensor) -> Tensor:
    """Half squared error, mean over the batch, summed over the (2, N) critics: eq. 5."""
    return 0.5 * (q - target).square().mean(-1).sum()


def actor_loss(q: Tensor, log_prob: Tensor, alpha: Tensor) -> Tensor:
    """Mean of alpha log pi - min Q: eq. 9."""
    return (alpha * log_prob - q).mean()


def alpha_loss(log_alpha: Tensor, log_prob: Tensor, target_entropy: float) -> Tensor:
    """-log alpha (log pi + target entropy): eq. 18 with log alpha for alpha, so alpha stays positive."""
    return -(log_alpha * (log_prob + target_entropy).mean()).sum()
