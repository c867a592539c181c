"""What every training loop shares: segments, sums over episodes, the cadence of logging and evaluation.

Sums stay on the environments' device, and are read only when a row is logged or a checkpoint is written.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from control.config import ResolvedConfig
from control.evaluate import Act, EvalResult, evaluate
from control.log import MetricLog
from control.progress import Progress
from control.types import Segment
from sims.errors import UserError
from sims.types import TimeStep, VecEnv

EVAL_SEED = 1_000_003  # start states of the evaluations on the way; the last evaluation has its own
RECENT_EPISODES = 64


class Watch:
    """What a run counts, logs and evaluates, the same for every loop.

    Args:
        cfg: resolved settings.
        env: the world that is trained in; ``eval_env`` another instance, which training never touches.
        file: ``metrics.jsonl``.
    """

    def __init__(self, cfg: ResolvedConfig, env: VecEnv, eval_env: VecEnv, file: Path) -> None:
        self.cfg, self.env, self.eval_env = cfg, env, eval_env
        self.log = MetricLog(file, f"train {cfg.env}", cfg.steps, tensorboard=cfg.tensorboard)
        title = f"{cfg.env} {cfg.algo.name}"
        self.progress = None
        if cfg.progress:
            self.progress = Progress(title, cfg.steps, cfg.eval_every, self, has_success=env.spec.has_success)
        self.episodes = EpisodeStats(env.num_envs, env.device)
        self.exclusions = Exclusions(cfg.env, env.device)
        self.step, self.wall, self.solved_in_a_row, self.last_log, self.last_eval = 0, 0.0, 0, 0, 0

    @property
    def done(self) -> bool:
        return self.step >= self.cfg.steps or self.solved_in_a_row >= 2

    def count(self, segment: Segment, good: Tensor) -> None:
        """Add a (T, B) segment as the world gave it; ``good`` (T, B) bool: rows that are learned from."""
        self.episodes.add(segment)
        self.exclusions.add(good, self.step // self.env.num_envs)
        self.step += good.numel()

    @property
    def excluded(self) -> int:
        """Rows left out because a number in them was not finite, or because their world broke down."""
        return int(self.exclusions.count)

    def log_if_due(self, updates: int, metrics: Mapping[str, Any]) -> None:
        if self.progress:
            self.progress.tick()
        if self.step - self.last_log < self.cfg.log_every and self.step < self.cfg.steps:
            return
        self.last_log = self.step
        self.exclusions.report()
        self._write({**self._row(updates), **self.episodes.means(), **metrics, "excluded": self.excluded})

    def evaluate_if_due(self, updates: int, act: Act) -> EvalResult | None:
        cfg = self.cfg
        since = self.step - self.last_eval
        if not cfg.eval_every or since < cfg.eval_every // 2 or since < self._eval_interval():
            return None
        result = evaluate(self.eval_env, act, cfg.eval_episodes, EVAL_SEED)
        self.last_eval = self.step  # only now: an evaluation that is cut short is due again
        solved = bool(cfg.stop_success) and result.success >= (cfg.stop_success or 0)
        self.solved_in_a_row = self.solved_in_a_row + 1 if solved else 0
        self._write({**self._row(updates), **result.row()})
        return result

    def _write(self, row: Mapping[str, Any]) -> None:
        written = self.log.write(row)
        if self.progress:
            self.progress.show(written)

    def close(self) -> None:
        self.log.close()
        if self.progress:
            self.progress.close()

    def _eval_interval(self) -> int:
        """``eval_every`` steps, half of it while a run that may stop early looks close to solved."""
        near = self.cfg.stop_success and (self.episodes.last()["success"] or 0) >= 0.9 * self.cfg.stop_success
        return self.cfg.eval_every // 2 if near else self.cfg.eval_every

    def _row(self, updates: int) -> dict[str, Any]:
        return {
            "step": self.step, "time": self.wall, "steps_per_s": self.step / max(self.wall, 1e-9), "updates": updates,
            **self.episodes.last(),
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        parts = {"episodes": self.episodes.state_dict(), "exclusions": self.exclusions.state_dict()}
        return {**{name: getattr(self, name) for name in _COUNTERS}, **parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self.episodes.load_state_dict(state["episodes"])
        self.exclusions.load_state_dict(state["exclusions"])


_COUNTERS = ("step", "wall", "solved_in_a_row", "last_log", "last_eval")


def segment_of(obs: list[Mapping[str, Tensor]], actions: list[Tensor], steps: list[TimeStep]) -> Segment:
    """Stack T steps of B environments into a (T, B) segment."""
    metrics = steps[0].metrics
    return Segment(
        obs=_stack(obs),
        action=torch.stack(actions),
        reward=torch.stack([s.reward for s in steps]),
        terminated=torch.stack([s.terminated for s in steps]),
        truncated=torch.stack([s.truncated for s in steps]),
        next_obs=_stack([s.next_obs for s in steps]),
        metrics={k: torch.stack([s.metrics[k] for s in steps]) for k in metrics},
    )


def _stack(rows: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {k: torch.stack([row[k] for row in rows]) for k in rows[0]}


def marked(reward: Tensor, metrics: Mapping[str, Tensor]) -> Tensor:
    """The reward, nan where the world broke down and was reset (``diverged``): no such row is learned from."""
    return reward.masked_fill(metrics["diverged"] > 0, torch.nan) if "diverged" in metrics else reward


def merge_groups(groups: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """(T, B, ...) -> (T B, ...); frames stay behind, no feature reads them."""
    return {k: v.flatten(0, 1) for k, v in groups.items() if not k.startswith("pixels/")}


class EpisodeStats:
    """Return and final success of the last episodes that the exploring policy finished."""

    def __init__(self, num_envs: int, device: torch.device | str = "cpu") -> None:
        self.total = torch.zeros(num_envs, device=device)  # of the running episodes
        # a ring of returns and successes; the last column takes what is not kept
        self.recent = torch.zeros(2, RECENT_EPISODES + 1, device=device)
        self.finished = torch.zeros((), dtype=torch.int64, device=device)
        self.terms: dict[str, Tensor] = {}
        self.steps = 0

    def add(self, segment: Segment) -> None:
        """A (T, B) segment; numbers that are not finite count as 0."""
        done = segment.terminated | segment.truncated  # (T, B)
        returns = []
        for reward, over in zip(segment.reward.nan_to_num(0.0, 0.0, 0.0).to(self.total).unbind(), done.unbind()):
            total = self.total + reward
            returns.append(total)
            self.total = total.masked_fill(over, 0.0)
        success = segment.metrics.get("success", torch.zeros_like(segment.reward)).to(self.total)
        self._keep(done.flatten(), torch.stack([torch.stack(returns).flatten(), success.flatten()]))
        for name, value in segment.metrics.items():
            if name.startswith("reward/"):
                total = value.nan_to_num(0.0, 0.0, 0.0).mean(-1).sum()
                self.terms[name] = self.terms[name] + total if name in self.terms else total
        self.steps += done.shape[0]

    def _keep(self, done: Tensor, values: Tensor) -> None:
        """Put the columns of (2, N) ``values`` where ``done`` (N,) into the ring: the last ones, if too many."""
        rank = done.cumsum(0)  # of those that are done: 1, 2, ...
        wanted = done & (rank > rank[-1:] - RECENT_EPISODES)
        slot = torch.where(wanted, (self.finished + rank - 1) % RECENT_EPISODES, RECENT_EPISODES)
        self.recent[:, slot] = values
        self.finished = self.finished + rank[-1]

    @property
    def returns(self) -> list[float]:
        """Of the recent episodes, in no order."""
        return self._recent()[0].tolist()

    def _recent(self) -> Tensor:
        return self.recent[:, : min(int(self.finished), RECENT_EPISODES)].cpu()

    def means(self) -> dict[str, float]:
        """Mean reward terms per step since the last call."""
        terms = {name: float(value) / max(1, self.steps) for name, value in self.terms.items()}
        self.terms, self.steps = {}, 0
        return terms

    def last(self) -> dict[str, float | None]:
        """Mean over the recent episodes; None before the first one ends."""
        recent = self._recent().double()
        values = recent.mean(1).tolist() if recent.numel() else (None, None)
        return dict(zip(("return", "success"), values))

    def state_dict(self) -> dict[str, Any]:
        tensors = {name: getattr(self, name).clone() for name in ("total", "recent", "finished")}
        return {**tensors, "terms": dict(self.terms), "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        device = self.total.device
        for name in ("total", "recent", "finished"):
            setattr(self, name, state[name].to(device).clone())
        self.terms = {name: value.to(device) for name, value in state["terms"].items()}
        self.steps = state["steps"]


class Exclusions:
    """Rows left out of learning.

    Args:
        world: named in what is said.
    """

    def __init__(self, world: str, device: torch.device | str = "cpu") -> None:
        self.world, self.said = world, False
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.first = torch.full((2,), -1, dtype=torch.int64, device=device)  # vector step and environment, -1: none yet
        self.dead = torch.zeros((), dtype=torch.bool, device=device)  # a whole segment was left out

    def add(self, good: Tensor, at: int) -> None:
        """(T, B) rows that are good, the first of them at vector step ``at``."""
        bad = ~good.to(self.count.device)
        place = bad.flatten().int().argmax()
        here = torch.stack([at + place // bad.shape[1], place % bad.shape[1]])
        self.first = torch.where((self.count == 0) & bad.any(), here, self.first)
        self.count = self.count + bad.sum()
        self.dead = self.dead | bad.all()

    def report(self) -> None:
        """Say once on stderr that there are such rows.

        Raises:
            UserError: there was nothing to learn from.
        """
        if self.dead:
            raise UserError(
                f"{self.world}: in every environment the observation or the reward was not finite, or the world broke "
                "down. Check the world's physics and options, or the reward model."
            )
        if not self.said and self.count > 0:
            self.said = True
            step, env = self.first.tolist()
            print(
                f"warning: {self.world}: environment {env} gave a number that is not finite, or broke down, at step "
                f"{step}. Such steps are left out of learning and counted as 'excluded'.",
                file=sys.stderr,
            )

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count.clone(), "first": self.first.clone(), "said": self.said}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        device = self.count.device
        self.count, self.first = state["count"].to(device).clone(), state["first"].to(device).clone()
        self.said = state["said"]
