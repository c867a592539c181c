"""What the checks of :mod:`sims.check` share: an environment under test, made and rolled with random actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sims.errors import UserError
from sims.types import TimeStep, VecEnv

Build = Callable[..., VecEnv]  # (num_envs, seed, **options) -> environment

LIMIT = 6  # actions per episode where the environment takes ``time_limit``


class Fault(Exception):
    """A broken promise: what was found, and what to do."""

    def __init__(self, found: str, advice: str):
        super().__init__(found)
        self.found, self.advice = found, advice


class Skip(Exception):
    """Nothing to look at; says why."""


def demand(kept: Any, found: str, advice: str) -> None:
    if not bool(kept):
        raise Fault(found, advice)


@dataclass
class Probe:
    """The environment under test: three worlds, short episodes where it takes ``time_limit``.

    Attributes:
        steps: actions that a check may take.  tolerance: largest difference of two runs that should be the same.
    """

    build: Build
    steps: int = 4 * LIMIT
    tolerance: float = 0.0
    num_envs: int = 3
    limited: bool = True
    _envs: list[VecEnv] = field(default_factory=list)

    def open(self, num_envs: int | None = None, seed: int = 4, **options: Any) -> VecEnv:
        """Another environment like the one under test; closed at the end."""
        if self.limited:
            options = {"time_limit": LIMIT, **options}
        env = self.build(num_envs or self.num_envs, seed, **options)
        self._envs.append(env)
        return env

    @property
    def env(self) -> VecEnv:
        if not self._envs:
            try:
                self.open()
            except (TypeError, UserError):
                self.limited = False  # perhaps it takes no ``time_limit``; what is wrong otherwise is wrong again
                self.open()
        return self._envs[0]

    def actions(self, env: VecEnv, steps: int, seed: int = 0) -> Tensor:
        """(steps, B, A) in the bounds; those of world ``i`` do not depend on how many there are."""
        low, high = (torch.tensor(x, dtype=torch.float32) for x in (env.spec.action.low, env.spec.action.high))
        streams = [torch.Generator().manual_seed(1000 * seed + i) for i in range(env.num_envs)]
        rows = [torch.rand((steps, len(low)), generator=stream) for stream in streams]
        return (low + (high - low) * torch.stack(rows, 1)).to(env.device)

    def roll(self, env: VecEnv, steps: int = 0, seed: int = 0) -> list[TimeStep]:
        return [env.step(action) for action in self.actions(env, steps or self.steps, seed)]

    def same(self, a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and a.dtype == b.dtype and self.gap(a, b) <= self.tolerance

    def gap(self, a: Tensor, b: Tensor) -> float:
        """Largest difference; nan counts as a difference from everything but nan."""
        if torch.equal(a, b):
            return 0.0
        gap = torch.where(a.isnan() & b.isnan(), 0.0, (a.double() - b.double()).abs()).max()
        return math.inf if gap.isnan() else float(gap)

    def differing(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
        """Names whose tensors are not the same, with the largest difference."""
        return [f"{k} (by {self.gap(a[k], b[k]):.2g})" for k in a if not self.same(a[k], b[k])]

    def close(self) -> None:
        for env in self._envs:
            env.close()


def flat(step: TimeStep) -> dict[str, Tensor]:
    """Everything a step returns, by name."""
    groups = {**{f"obs/{k}": v for k, v in step.obs.items()}, **{f"next_obs/{k}": v for k, v in step.next_obs.items()}}
    return {**groups, "reward": step.reward, "terminated": step.terminated, "truncated": step.truncated,
            **{f"metrics/{k}": v for k, v in step.metrics.items()}}  # fmt: skip


def done_of(step: TimeStep) -> Tensor:
    return step.terminated | step.truncated
