"""Types that flow between the loop, replay and the learners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """A (T, B) block of experience as collected, before a reward model or replay sees it.

    Attributes:
        obs, next_obs: group -> (T, B, ...); ``next_obs`` is the true successor (before auto-reset).
        action: (T, B, A) in the units of the environment.
        reward: (T, B) the reward the learner will see.
        terminated, truncated: (T, B) bool.
        metrics: name -> (T, B); ``reward/true`` keeps the task's reward when a reward model replaced ``reward``.
    """

    obs: Mapping[str, Tensor]
    action: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    next_obs: Mapping[str, Tensor]
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Transition:
    """A batch drawn from replay; features are already flat.

    Attributes:
        obs, next_obs: (N, F) float32.
        action: (N, A) in the unit box [-1, 1].
        reward: (N,) n-step sum.
        discount: (N,) ``gamma**k * (1 - terminated)``: no loss ever sees a done flag.
    """

    obs: Tensor
    action: Tensor
    reward: Tensor
    discount: Tensor
    next_obs: Tensor


class Learner(Protocol):
    """An off-policy learner over flat features and unit-box actions."""

    def act(self, obs: Tensor, explore: bool) -> Tensor:
        """(B, F) -> (B, A) in [-1, 1]."""
        ...

    def update(self, batch: Transition) -> Mapping[str, Tensor]:
        """One gradient step; returns detached 0-d tensors, still on the device."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
