"""Evaluation on the true reward and success: fixed start states, deterministic policy, whole episodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sims.types import VecEnv

Act = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class EvalResult:
    """Outcome of whole episodes.

    Attributes:
        episodes: number of episodes.
        successes: episodes whose success held at their last step; 0 where the world has no success.
        held: episodes whose success was true at some step.
        mean_return: mean over episodes of the summed true reward; ``return_error`` its standard error.
        cycle_steps: median, over successful episodes, of the steps until success was first true; nan without one.
        per_variant: variant name -> (successes, episodes).
    """

    episodes: int
    successes: int
    held: int
    mean_return: float
    cycle_steps: float
    per_variant: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    return_error: float = 0.0

    @property
    def success(self) -> float:
        return self.successes / max(1, self.episodes)

    @property
    def return_interval(self) -> tuple[float, float] | None:
        """95 % interval of the mean return, by Student's t; None with fewer than two episodes."""
        if self.episodes < 2:
            return None
        half = student(self.episodes - 1) * self.return_error
        return self.mean_return - half, self.mean_return + half

    def row(self) -> dict[str, Any]:
        """Figures and their 95 % intervals as columns of the metrics log."""
        low, high = wilson(self.successes, self.episodes)
        least, most = self.return_interval or (None, None)
        return {
            "eval/success": self.success, "eval/success_low": low, "eval/success_high": high,
            "eval/return": self.mean_return, "eval/return_low": least, "eval/return_high": most,
        }  # fmt: skip

    def to_json(self, control_hz: float) -> dict[str, Any]:
        """Figures with their 95 % intervals, Wilson's for the success; ``cycle_s`` in s, null without a success."""
        cycle = None if math.isnan(self.cycle_steps) else self.cycle_steps / control_hz
        return {
            "episodes": self.episodes, "successes": self.successes, "success": self.success,
            "interval": list(wilson(self.successes, self.episodes)), "held": self.held / max(1, self.episodes),
            "return": self.mean_return, "return_error": self.return_error,
            "return_interval": self.return_interval and list(self.return_interval), "cycle_s": cycle,
            "per_variant": {k: list(v) for k, v in self.per_variant.items()},
        }  # fmt: skip


def wilson(successes: int, episodes: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson score interval of a proportion, 95 % by default; (0, 1) without episodes."""
    if episodes == 0:
        return 0.0, 1.0
    p, n = successes / episodes, episodes
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def student(freedom: int) -> float:
    """Student's 97.5 % quantile, within 0.3 %: exact for one and two degrees, else Abramowitz and Stegun 26.7.5."""
    if freedom <= 2:
        return math.tan(0.475 * math.pi) if freedom == 1 else 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z, n = 1.959964, freedom
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + first / n + second / n**2 + third / n**3 + fourth / n**4


def evaluate(env: VecEnv, act: Act, episodes: int, seed: int) -> EvalResult:
    """Run ``episodes`` episodes from the start states of ``seed``.

    Every environment runs the same number of episodes (the first ones, so that short episodes are not over-counted),
    and the first ``episodes`` of them in the order (round, environment) count.

    Args:
        act: obs groups (B, ...) -> (B, A) actions in the units of the environment.
    """
    obs = env.reset(seed)
    rounds = -(-episodes // env.num_envs)
    tracker = _Tracker(env)
    with torch.no_grad():
        while tracker.least() < rounds:
            variants = _variants(env)
            step = env.step(act(obs))
            tracker.add(step, variants, rounds)
            obs = step.obs
    rows = sorted(tracker.finished)[:episodes]
    return _summary([row[2] for row in rows], getattr(env, "variants", ()))


@dataclass(frozen=True)
class _Episode:
    total: float
    final: bool
    first: int  # steps until success was first true, 0 when never
    variant: int


class _Tracker:
    """Sums per running episode; ``finished`` holds (round, environment, episode)."""

    def __init__(self, env: VecEnv) -> None:
        b = env.num_envs
        self.total, self.length, self.first = torch.zeros(b), torch.zeros(b), torch.zeros(b)
        self.count = torch.zeros(b, dtype=torch.int64)
        self.finished: list[tuple[int, int, _Episode]] = []

    def least(self) -> int:
        return int(self.count.min())

    def add(self, step: Any, variants: Tensor, rounds: int) -> None:
        success = step.metrics.get("success", torch.zeros_like(step.reward)).cpu() > 0.5
        self.total += step.metrics.get("reward/true", step.reward).cpu()
        self.length += 1
        self.first = torch.where(success & (self.first == 0), self.length, self.first)
        done = (step.terminated | step.truncated).cpu()
        for i in torch.nonzero(done).flatten().tolist():
            if self.count[i] < rounds:
                row = _Episode(float(self.total[i]), bool(success[i]), int(self.first[i]), int(variants[i]))
                self.finished.append((int(self.count[i]), i, row))
        self.count += done
        for sums in (self.total, self.length, self.first):
            sums[done] = 0


def _variants(env: VecEnv) -> Tensor:
    """(B,) index of each environment's variant, read before a step because an auto-reset redraws it."""
    return torch.as_tensor(getattr(env, "variant_ids", torch.zeros(env.num_envs))).long().clone()


def _summary(rows: list[_Episode], names: Any) -> EvalResult:
    cycles = torch.tensor([float(r.first) for r in rows if r.final])
    totals = torch.tensor([r.total for r in rows], dtype=torch.float64)
    per_variant = {}
    for index, name in enumerate(names):
        own = [r.final for r in rows if r.variant == index]
        if own:
            per_variant[str(name)] = (sum(own), len(own))
    return EvalResult(
        episodes=len(rows),
        successes=sum(r.final for r in rows),
        held=sum(r.first > 0 for r in rows),
        mean_return=float(totals.mean()) if rows else 0.0,
        return_error=float(totals.std() / math.sqrt(len(rows))) if len(rows) > 1 else 0.0,
        cycle_steps=float(cycles.median()) if len(cycles) else math.nan,
        per_variant=per_variant,
    )
