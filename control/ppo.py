"""Proximal policy optimisation (Schulman et al., arXiv 1707.06347) with generalised advantages (arXiv 1506.02438).

The policy is a Gaussian with a standard deviation that does not depend on the state; the loop clips its sample to the
unit box. In the order of the paper: networks, act, update, losses. ``algo.update=autograd`` runs the plain formulas
below; ``fused`` runs the same update with its backward pass by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from control.config import PPOConfig, with_defaults
from control.distributions import LOG_SQRT_2PI, gaussian_log_prob
from control.fused import Backprop, Weights
from control.networks import MLP, Adam, orthogonal
from control.normalizer import RunningNormalizer
from control.rollout import Rollout, advantages


class PPO:
    """Learner over flat features and the unit box.

    Args:
        obs_dim: F.
        act_dim: A.
    """

    def __init__(self, obs_dim: int, act_dim: int, config: PPOConfig, device: str = "cpu", seed: int = 0) -> None:
        cfg: Any = with_defaults(config)
        self.cfg = cfg
        self.act_dim = act_dim
        weights = torch.Generator().manual_seed(seed)
        hidden = [cfg.width] * cfg.depth
        self.actor = MLP(1, (obs_dim, *hidden, act_dim), False, cfg.activation)
        self.critic = MLP(1, (obs_dim, *hidden, 1), False, cfg.activation)
        # one vector, so that one step and one norm cover everything; a small last layer makes the first policy centred
        log_std = torch.full((act_dim,), cfg.log_std)
        parts = [orthogonal(self.actor, weights, 0.01), orthogonal(self.critic, weights, 1.0), log_std]
        self.theta = torch.cat(parts).to(device).requires_grad_()
        self.sizes = [part.numel() for part in parts]
        self.optimizer = Adam(self.theta, cfg.lr, eps=1e-5)
        self.normalizer = RunningNormalizer(obs_dim, device, cfg.normalize)
        self.generator = torch.Generator(device).manual_seed(seed + 1)
        self.updates = 0  # gradient steps
        self._gradient = _Passes(self, device).gradient if cfg.update == "fused" else self.gradient

    @torch.no_grad()
    def act(self, obs: Tensor, explore: bool) -> Tensor:
        """(B, F) -> (B, A) in [-1, 1]: a clipped sample, or the clipped mean."""
        if explore:
            return self.sample(self.normalizer(obs))[0].clamp(-1, 1)
        return self.actor(self.split()[0], self.normalizer(obs))[0].clamp(-1, 1)

    @torch.no_grad()
    def sample(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """(B, F) normalised features -> the sample as drawn (B, A), and its log density (B,)."""
        theta_actor, _, log_std = self.split()
        mean = self.actor(theta_actor, features)[0]
        noise = torch.randn(mean.shape, generator=self.generator, device=self.generator.device)
        action = mean + log_std.exp() * noise
        return action, gaussian_log_prob(action, mean, log_std).sum(-1)

    @torch.no_grad()
    def value(self, features: Tensor) -> Tensor:
        """(..., F) normalised features -> (...)."""
        return self.critic(self.split()[1], features.flatten(0, -2))[0].view(features.shape[:-1])

    def update(self, rollout: Rollout) -> dict[str, Tensor]:
        """``epochs`` passes over the rollout in fresh random minibatches; returns means over the gradient steps."""
        cfg = self.cfg
        advantage = advantages(rollout, cfg.gamma, cfg.gae_lambda)  # (T, B)
        flat = [rollout.obs, rollout.action, rollout.log_prob, rollout.value, advantage, advantage + rollout.value]
        obs, action, log_prob, value, advantage, target = (x.flatten(0, 1) for x in flat)
        rows = rollout.valid.flatten().nonzero().squeeze(-1)
        sums: dict[str, Tensor] = {}
        steps = 0
        for _ in range(cfg.epochs):
            order = rows[torch.randperm(len(rows), generator=self.generator, device=rows.device)]
            kl = torch.zeros((), device=rows.device)
            count = max(1, len(rows) // cfg.minibatch_size)
            for index in order[: count * cfg.minibatch_size].split(cfg.minibatch_size):
                batch = [x.index_select(0, index) for x in (obs, action, log_prob, value, advantage, target)]
                metrics = self._step(*batch)
                kl = kl + metrics["kl"]
                sums = {k: sums.get(k, 0) + v for k, v in metrics.items()}
                steps += 1
            if cfg.target_kl is not None and float(kl) / count > 1.5 * cfg.target_kl:
                break
        _, _, log_std = self.split()
        means = {k: v / steps for k, v in sums.items()}
        explained = explained_variance(value[rows], target[rows])
        return {
            **means,
            "std": log_std.exp().mean(),
            "explained_variance": explained,
            "skipped": self.optimizer.skipped,
        }

    def _step(self, obs: Tensor, action: Tensor, old: Tensor, value: Tensor, advantage: Tensor, target: Tensor) -> Any:
        metrics = self._gradient(obs, action, old, value, standardized(advantage), target)
        clip_norm(self.theta.grad, self.cfg.max_grad_norm)
        self.optimizer.step()
        self.updates += 1
        return metrics

    def gradient(
        self, obs: Tensor, action: Tensor, old: Tensor, value: Tensor, advantage: Tensor, target: Tensor
    ) -> dict[str, Tensor]:
        """Writes ``theta.grad`` for a minibatch of N rows; returns the parts of the loss."""
        cfg = self.cfg
        theta_actor, theta_critic, log_std = self.theta.split(self.sizes)
        mean = self.actor(theta_actor, obs)[0]  # (N, A)
        log_prob = gaussian_log_prob(action, mean, log_std).sum(-1)
        ratio = (log_prob - old).exp()
        policy = -surrogate(ratio, advantage, cfg.clip).mean()
        new = self.critic(theta_critic, obs)[0, :, 0]
        fit = value_loss(new, value, target, cfg.clip_value)
        loss = policy + cfg.value_weight * fit - cfg.entropy * entropy(log_std)
        (self.theta.grad,) = torch.autograd.grad(loss, self.theta)
        return _metrics(policy, fit, ratio, log_prob - old, log_std, cfg.clip)

    def split(self) -> list[Tensor]:
        """Actor's weights, critic's weights, log standard deviation (A,): views without gradient."""
        return list(self.theta.detach().split(self.sizes))

    def export(self) -> nn.Module:
        """Raw features (B, F) -> greedy unit actions (B, A), on the CPU."""
        return ClippedMean(self.actor, self.split()[0], self.normalizer)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on; copies."""
        state = {
            "theta": self.theta.detach(), "optimizer": self.optimizer.state_dict(),
            "normalizer": self.normalizer.state_dict(), "generator": self.generator.get_state(),
            "updates": self.updates,
        }  # fmt: skip
        return copy.deepcopy(state)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state_dict`, in place; the sizes must agree."""
        self.theta.copy_(state["theta"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.normalizer.load_state_dict(state["normalizer"])
        self.generator.set_state(state["generator"])
        self.updates = state["updates"]


class _Passes:
    """:meth:`PPO.gradient` with the backward pass by hand."""

    def __init__(self, learner: PPO, device: torch.device | str) -> None:
        self.learner, self.device = learner, device
        self.dtype = getattr(torch, learner.cfg.precision)
        learner.theta.grad = torch.zeros_like(learner.theta)
        grads = learner.theta.grad.split(learner.sizes)
        theta_actor, theta_critic, self.log_std = learner.split()
        self.actor = Weights(learner.actor, theta_actor, self.dtype, grad=grads[0])
        self.critic = Weights(learner.critic, theta_critic, self.dtype, grad=grads[1])
        self.grad_log_std, self.rows = grads[2], 0

    @torch.no_grad()
    def gradient(
        self, obs: Tensor, action: Tensor, old: Tensor, value: Tensor, advantage: Tensor, target: Tensor
    ) -> dict[str, Tensor]:
        cfg, n = self.learner.cfg, obs.shape[0]
        self._prepare(n)
        self.obs.copy_(obs)
        mean, new = self.net_actor.forward(self.actor)[0].float(), self.net_critic.forward(self.critic)[0, :, 0].float()
        inverse = (-self.log_std).exp()  # (A,)
        z = (action - mean).mul_(inverse)  # (N, A)
        log_prob = z.square().sum(-1).mul_(-0.5).sub_(self.log_std.sum() + self.learner.act_dim * LOG_SQRT_2PI)
        change = log_prob - old
        ratio = change.exp()
        gain, clipped = ratio * advantage, ratio.clamp(1 - cfg.clip, 1 + cfg.clip) * advantage
        # the gradient of min(gain, clipped): the clipped branch is flat unless the two are equal
        slope = torch.where(gain <= clipped, gain, 0.0).div_(-n).unsqueeze(-1)  # d loss / d log pi (N, 1)
        self.net_actor.grad_output[0].copy_(z * inverse * slope)
        self.grad_log_std.copy_((z.square().sub_(1).mul_(slope)).sum(0).sub_(cfg.entropy))
        fit, grad_value = _value_loss_and_grad(new, value, target, cfg.clip_value)
        self.net_critic.grad_output[0, :, 0].copy_(grad_value.mul_(cfg.value_weight / n))
        for net, weights in ((self.net_actor, self.actor), (self.net_critic, self.critic)):
            net.backward(weights)
            weights.publish()
        return _metrics(-torch.minimum(gain, clipped).mean(), fit, ratio, change, self.log_std, cfg.clip)

    def _prepare(self, n: int) -> None:
        self.actor.refresh()
        self.critic.refresh()
        if n == self.rows:
            return
        self.rows, learner = n, self.learner
        self.obs = torch.zeros(n, learner.actor.sizes[0], device=self.device, dtype=self.dtype)
        self.net_actor, self.net_critic = (
            Backprop(mlp, n, self.device, self.dtype) for mlp in (learner.actor, learner.critic)
        )
        self.net_actor.set_input(self.obs)
        self.net_critic.set_input(self.obs)


class ClippedMean(nn.Module):
    """Raw features (B, F) -> the mean of the Gaussian, clipped to the unit box (B, A)."""

    shift: Tensor
    scale: Tensor

    def __init__(self, mlp: MLP, theta: Tensor, normalizer: RunningNormalizer) -> None:
        super().__init__()
        self.mlp, self.normalize = mlp, normalizer.enabled
        self.weights = nn.ParameterList(
            [nn.Parameter(p.clone(), requires_grad=False) for p in mlp.split(theta.detach().cpu().clone())]
        )
        self.register_buffer("shift", normalizer.shift.cpu().clone())
        self.register_buffer("scale", normalizer.scale.cpu().clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.normalize:
            x = ((x - self.shift) * self.scale).clamp(-10, 10)
        return self.mlp.forward(list(self.weights), x)[0].clamp(-1, 1)


def surrogate(ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """(N,) min(r A, clip(r, 1 - c, 1 + c) A): eq. 7 of 1707.06347."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def value_loss(new: Tensor, old: Tensor, target: Tensor, clip: float | None) -> Tensor:
    """Half mean squared error; with ``clip`` the worse of it and that of a value held near the old one."""
    return _value_loss_and_grad(new, old, target, clip)[0]


def _value_loss_and_grad(new: Tensor, old: Tensor, target: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """The loss () and, before the mean, its derivative (N,) with respect to ``new``."""
    error = new - target
    if clip is None:
        return 0.5 * error.square().mean(), error
    held = old + (new - old).clamp(-clip, clip) - target
    plain = error.square() >= held.square()
    inside = (new - old).abs() <= clip  # outside, the held value does not follow
    grad = torch.where(plain, error, torch.where(inside, held, 0.0))
    return 0.5 * torch.maximum(error.square(), held.square()).mean(), grad


def entropy(log_std: Tensor) -> Tensor:
    """() nats of a diagonal Gaussian: sum of log std + (1 + log 2 pi) / 2."""
    return (log_std + 0.5 + LOG_SQRT_2PI).sum()


def standardized(advantage: Tensor) -> Tensor:
    """(N,) with mean 0 and deviation 1 within the minibatch; a single row is left as it is."""
    if advantage.shape[0] < 2:
        return advantage
    return (advantage - advantage.mean()) / (advantage.std() + 1e-8)


def clip_norm(grad: Tensor | None, limit: float) -> None:
    """Scale a gradient down to the norm ``limit``, in place and without asking the host; nan if it is infinite."""
    assert grad is not None
    norm = grad.norm()
    grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0) + (norm - norm))  # else a lost gradient would count as zero


def explained_variance(value: Tensor, target: Tensor) -> Tensor:
    """() 1 - Var(target - value) / Var(target): 1 is a perfect critic, 0 one that knows the mean."""
    return 1 - (target - value).var() / target.var().clamp(min=1e-12)


def _metrics(
    policy: Tensor, fit: Tensor, ratio: Tensor, change: Tensor, log_std: Tensor, clip: float
) -> dict[str, Tensor]:
    """``kl``: mean of (r - 1) - log r, an estimate that is never negative (Schulman, 2020, "Approximating KL")."""
    ratio, change = ratio.detach(), change.detach()
    return {
        "policy_loss": policy.detach(), "value_loss": fit.detach(), "entropy": entropy(log_std.detach()),
        "kl": (ratio - 1 - change).mean(), "clip_fraction": ((ratio - 1).abs() > clip).float().mean(),
    }  # fmt: skip
