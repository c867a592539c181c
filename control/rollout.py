"""One on-policy rollout and its advantages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rollout:
    """(T, B) steps with what the policy that took them thought.

    Attributes:
        obs, next_obs: (T, B, F) features; ``next_obs`` is the true successor, before any auto-reset.
        action: (T, B, A) the sample as drawn, before it was clipped to the unit box.
        log_prob, value: (T, B) of the policy and the critic at ``obs``.
        next_value: (T, B) of the critic at ``next_obs``.
        reward: (T, B).
        terminated, truncated: (T, B) bool.
        valid: (T, B) bool; False where a number was not finite: such rows are never learned from.
    """

    obs: Tensor
    next_obs: Tensor
    action: Tensor
    log_prob: Tensor
    value: Tensor
    next_value: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor


def advantages(rollout: Rollout, gamma: float, lam: float) -> Tensor:
    """(T, B) generalised advantage estimates (Schulman et al., arXiv 1506.02438, eq. 16).

    delta = r + gamma (1 - terminated) V(next_obs) - V(obs). A time limit is not an end: V(next_obs) counts there,
    and it is the successor's own value, not that of the next episode's start. The sum over lambda stops at both.
    """
    going = (~(rollout.terminated | rollout.truncated) & rollout.valid).float()
    delta = rollout.reward + gamma * rollout.next_value * (~rollout.terminated).float() - rollout.value
    delta = torch.where(rollout.valid, delta, 0.0)
    result, running = torch.empty_like(delta), torch.zeros_like(delta[0])
    for t in reversed(range(delta.shape[0])):
        running = delta[t] + gamma * lam * going[t] * running
        result[t] = running
    return result


class ReturnScale:
    """Divides rewards by the running standard deviation of the discounted return, so that values are of order one.

    Args:
        num_envs: B.
        enabled: False leaves rewards as they are.
    """

    def __init__(self, num_envs: int, gamma: float, enabled: bool, device: torch.device | str = "cpu") -> None:
        self.gamma, self.enabled = gamma, enabled
        self.total = torch.zeros(num_envs, dtype=torch.float64, device=device)
        self.count, self.mean, self.m2 = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(3))

    def __call__(self, reward: Tensor, done: Tensor, valid: Tensor) -> Tensor:
        """(T, B) rewards, ends of episodes and finite rows -> scaled rewards, clipped to +-10; moves the statistics."""
        if not self.enabled:
            return reward
        sums = []
        for r, end, good in zip(reward, done, valid):
            self.total = torch.where(good, self.gamma * self.total + r, 0.0)
            sums.append(torch.where(good, self.total, torch.nan))
            self.total = torch.where(end, 0.0, self.total)
        self._merge(torch.stack(sums).flatten())
        variance = torch.where(self.count > 1, self.m2 / self.count.clamp(min=1), 1.0)
        return (reward * (variance + 1e-8).rsqrt().float()).clamp(-10, 10)

    def _merge(self, values: Tensor) -> None:
        """Welford's merge of the values that are not nan."""
        good = ~values.isnan()
        n = good.sum()
        values = torch.where(good, values, 0.0)
        mean = values.sum() / n.clamp(min=1)
        m2 = torch.where(good, (values - mean).square(), 0.0).sum()
        total, delta = (self.count + n).clamp(min=1), mean - self.mean
        self.m2 = self.m2 + m2 + delta.square() * self.count * n / total
        self.mean = self.mean + delta * n / total
        self.count = self.count + n

    def state_dict(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone() for name in ("total", "count", "mean", "m2")}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, value in state.items():
            setattr(self, name, value.to(self.total.device).clone())
