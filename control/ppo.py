"""Proximal policy optimisation (Schulman et al., arXiv 1707.06347) with generalised advantages (arXiv 1506.02438).

The policy is a Gaussian with a standard deviation that does not depend on the state; the loop clips its sample to the
unit box. In the order of the paper: networks, act, update, losses. ``algo.update=autograd`` runs the plain formulas
below; ``fused`` runs the same update with its backward pass by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from control.config import PPOConfig, with_defaults
from control.distributions import LOG_SQRT_2PI, gaussian_log_prob
from control.fused import Backprop, Weights
from control.networks import MLP, Adam, orthogonal
from control.normalizer import RunningNormalizer
from control.rollout import Rollout, advantages


class Rows(NamedTuple):
    """N rows to learn from, in no order of time.

    Attributes:
        obs: (N, F) normalised features.
        action: (N, A) as drawn.
        numbers: (4, N) log density and value when it was drawn, advantage, target of the value.
    """

    obs: Tensor
    action: Tensor
    numbers: Tensor

    old = property(lambda self: self.numbers[OLD])
    value = property(lambda self: self.numbers[VALUE])
    advantage = property(lambda self: self.numbers[ADVANTAGE])
    target = property(lambda self: self.numbers[TARGET])


OLD, VALUE, ADVANTAGE, TARGET = range(4)
Terms = tuple[Tensor, Tensor, Tensor]  # (N,) each: objective, squared error of the value, log ratio


def rows_of(rollout: Rollout, advantage: Tensor) -> Rows:
    """The valid rows of a (T, B) rollout."""
    index = rollout.valid.flatten().nonzero().squeeze(-1)
    numbers = torch.stack([rollout.log_prob, rollout.value, advantage, advantage + rollout.value]).flatten(1)
    obs, action = (x.flatten(0, 1).index_select(0, index) for x in (rollout.obs, rollout.action))
    return Rows(obs, action, numbers.index_select(1, index))


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
        self._math: _Passes | PPO = _Passes(self, device) if cfg.update == "fused" else self

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

    def anneal(self, progress: float) -> None:
        """Set the learning rate of a run of which ``progress`` (0 to 1) is over: a straight line to ``lr_final``."""
        self.optimizer.lr = self.cfg.lr * (1 - (1 - self.cfg.lr_final) * progress)

    def update(self, rollout: Rollout) -> dict[str, Tensor]:
        """``epochs`` passes over the rollout in fresh random minibatches; returns means over the gradient steps."""
        with torch.inference_mode(self._math is not self):  # by hand: operations keep no books for autograd
            return self._update(rollout)

    def _update(self, rollout: Rollout) -> dict[str, Tensor]:
        cfg = self.cfg
        rows = rows_of(rollout, advantages(rollout, cfg.gamma, cfg.gae_lambda))
        passes: list[dict[str, Tensor]] = []
        for epoch in range(cfg.epochs):
            order, batches = self._minibatches(rows)
            if epoch == 0:
                self._remember(rows, order, batches)
            passes.append(self._pass(batches))
            if cfg.target_kl is not None and float(passes[-1]["kl"]) > 1.5 * cfg.target_kl:
                break
        log_std = self.split()[-1]
        return {
            **{name: torch.stack([means[name] for means in passes]).mean() for name in passes[0]},
            "entropy": entropy(log_std),
            "std": log_std.exp().mean(),
            "explained_variance": explained_variance(rows.value, rows.target),
            "skipped": self.optimizer.skipped,
        }

    def _minibatches(self, rows: Rows) -> tuple[Tensor, list[Rows]]:
        """A random order of the rows, cut into minibatches; what is left over waits for another pass."""
        n = min(self.cfg.minibatch_size, rows.numbers.shape[1])
        count = rows.numbers.shape[1] // n
        order = torch.randperm(rows.numbers.shape[1], generator=self.generator, device=rows.numbers.device)[: count * n]
        obs, action = (x.index_select(0, order).split(n) for x in (rows.obs, rows.action))
        numbers = rows.numbers.index_select(1, order).view(4, count, n)
        numbers[ADVANTAGE] = standardized(numbers[ADVANTAGE])  # each minibatch by itself
        return order, [Rows(*parts) for parts in zip(obs, action, numbers.unbind(1))]

    @torch.no_grad()
    def _remember(self, rows: Rows, order: Tensor, batches: list[Rows]) -> None:
        """Give the rows the densities that the first pass finds: the same products in the same shapes.

        Products over another number of rows, or in float32 while the update runs in bfloat16, are rounded otherwise:
        the first ratio would not be 1.
        """
        for batch in batches:
            batch.old.copy_(self._math.log_prob(batch.obs, batch.action))
        rows.old[order] = torch.cat([batch.old for batch in batches])

    def _pass(self, batches: list[Rows]) -> dict[str, Tensor]:
        """A gradient step on each minibatch; means over all."""
        terms = [self._step(batch) for batch in batches]
        gain, error, change = (torch.stack(parts) for parts in zip(*terms))  # (M, N)
        ratio = change.exp()
        return {
            "policy_loss": -gain.mean(), "value_loss": 0.5 * error.mean(),
            # never negative, unlike the mean of -log r (Schulman, 2020, "Approximating KL")
            "kl": (ratio - 1 - change).mean(), "clip_fraction": ((ratio - 1).abs() > self.cfg.clip).float().mean(),
        }  # fmt: skip

    def _step(self, batch: Rows) -> Terms:
        terms = self._math.gradient(batch)
        clip_norm(self.theta.grad, self.cfg.max_grad_norm)
        self.optimizer.step()
        self.updates += 1
        return terms

    def log_prob(self, obs: Tensor, action: Tensor) -> Tensor:
        """(N, F) normalised features and (N, A) actions as drawn -> (N,) log densities."""
        theta_actor, _, log_std = self.theta.split(self.sizes)
        return gaussian_log_prob(action, self.actor(theta_actor, obs)[0], log_std).sum(-1)

    def gradient(self, batch: Rows) -> Terms:
        """Writes ``theta.grad`` for a minibatch of N rows."""
        cfg = self.cfg
        _, theta_critic, log_std = self.theta.split(self.sizes)
        change = self.log_prob(batch.obs, batch.action) - batch.old
        gain = surrogate(change.exp(), batch.advantage, cfg.clip)
        error = value_errors(self.critic(theta_critic, batch.obs)[0, :, 0], batch.value, batch.target, cfg.clip_value)
        loss = -gain.mean() + cfg.value_weight * 0.5 * error.mean() - cfg.entropy * entropy(log_std)
        (self.theta.grad,) = torch.autograd.grad(loss, self.theta)
        return gain.detach(), error.detach(), change.detach()

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
    """:meth:`PPO.log_prob` and :meth:`PPO.gradient` with the backward pass by hand."""

    def __init__(self, learner: PPO, device: torch.device | str) -> None:
        self.learner, self.device = learner, device
        self.dtype = getattr(torch, learner.cfg.precision)
        learner.theta.grad = torch.zeros_like(learner.theta)
        grads = learner.theta.grad.split(learner.sizes)
        theta_actor, theta_critic, self.log_std = learner.split()
        self.actor = Weights(learner.actor, theta_actor, self.dtype, grad=grads[0])
        self.critic = Weights(learner.critic, theta_critic, self.dtype, grad=grads[1])
        self.grad_log_std, self.rows = grads[2], 0
        self.offset = learner.act_dim * LOG_SQRT_2PI

    def log_prob(self, obs: Tensor, action: Tensor) -> Tensor:
        """Keeps what :meth:`gradient` needs."""
        self._prepare(obs.shape[0])
        self.obs.copy_(obs)
        mean = self.net_actor.forward(self.actor)[0].float()
        self.inverse = (-self.log_std).exp()  # (A,)
        self.z = (action - mean).mul_(self.inverse)  # (N, A)
        return self.z.square().sum(-1).mul_(-0.5).sub_(self.log_std.sum().add_(self.offset))

    @torch.no_grad()
    def gradient(self, batch: Rows) -> Terms:
        cfg, n = self.learner.cfg, batch.obs.shape[0]
        change = self.log_prob(batch.obs, batch.action).sub_(batch.old)
        ratio, advantage = change.exp(), batch.advantage
        gain, clipped = ratio * advantage, ratio.clamp_(1 - cfg.clip, 1 + cfg.clip).mul_(advantage)
        # the gradient of min(gain, clipped): the clipped branch is flat unless the two are equal
        slope = gain.masked_fill(gain > clipped, 0.0).div_(-n).unsqueeze(-1)  # d loss / d log pi (N, 1)
        z_slope = self.z * slope
        self.net_actor.grad_output[0].copy_(z_slope * self.inverse)
        self.grad_log_std.copy_(z_slope.mul_(self.z).sum(0).sub_(slope.sum()).sub_(cfg.entropy))
        new = self.net_critic.forward(self.critic)[0, :, 0].float()
        error, grad_value = value_errors_and_grad(new, batch.value, batch.target, cfg.clip_value)
        self.net_critic.grad_output[0, :, 0].copy_(grad_value.mul_(cfg.value_weight / n))
        for net, weights in ((self.net_actor, self.actor), (self.net_critic, self.critic)):
            net.backward(weights)
            weights.publish()
        return torch.minimum(gain, clipped), error, change

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


def value_errors(new: Tensor, old: Tensor, target: Tensor, clip: float | None) -> Tensor:
    """(N,) squared errors; with ``clip`` the worse of it and that of a value held near the old one."""
    return value_errors_and_grad(new, old, target, clip)[0]


def value_errors_and_grad(new: Tensor, old: Tensor, target: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """(N,) squared errors, and half their derivative with respect to ``new``."""
    error = new - target
    if clip is None:
        return error.square(), error
    held = old + (new - old).clamp(-clip, clip) - target
    plain = error.square() >= held.square()
    inside = (new - old).abs() <= clip  # outside, the held value does not follow
    grad = torch.where(plain, error, torch.where(inside, held, 0.0))
    return torch.maximum(error.square(), held.square()), grad


def entropy(log_std: Tensor) -> Tensor:
    """() nats of a diagonal Gaussian: sum of log std + (1 + log 2 pi) / 2."""
    return (log_std + 0.5 + LOG_SQRT_2PI).sum()


def standardized(advantage: Tensor) -> Tensor:
    """(..., N) with mean 0 and deviation 1 over the last axis; a single row is left as it is."""
    if advantage.shape[-1] < 2:
        return advantage
    deviation, mean = torch.std_mean(advantage, -1, keepdim=True)
    return (advantage - mean) / (deviation + 1e-8)


def clip_norm(grad: Tensor | None, limit: float) -> None:
    """Scale a gradient down to the norm ``limit``, in place and without asking the host; nan if it is infinite."""
    assert grad is not None
    norm = grad.dot(grad).sqrt_()
    scale = (limit / (norm + 1e-6)).clamp_(max=1.0)
    grad.mul_(scale.add_(norm.sub_(norm)))  # plus 0, or nan: else a lost gradient would count as zero


def explained_variance(value: Tensor, target: Tensor) -> Tensor:
    """() 1 - Var(target - value) / Var(target): 1 is a perfect critic, 0 one that knows the mean."""
    return 1 - (target - value).var() / target.var().clamp(min=1e-12)
