"""What every training loop shares: segments, sums over episodes, the cadence of logging and evaluation."""

from __future__ import annotations

import signal
import sys
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from control.checkpoint import load_checkpoint
from control.config import TrainConfig
from control.evaluate import Act, EvalResult, evaluate, wilson
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

    def __init__(self, cfg: TrainConfig, env: VecEnv, eval_env: VecEnv, file: Path) -> None:
        self.cfg, self.env, self.eval_env = cfg, env, eval_env
        self.log = MetricLog(file, f"train {cfg.env}", cfg.steps, tensorboard=cfg.tensorboard)
        self.progress = Progress(cfg.steps) if cfg.progress else None
        self.episodes = EpisodeStats(env.num_envs)
        self.step, self.wall, self.solved_in_a_row, self.last_log, self.last_eval = 0, 0.0, 0, 0, 0
        self.excluded, self.warned = 0, False  # rows left out because they were not finite

    @property
    def done(self) -> bool:
        return self.step >= self.cfg.steps or self.solved_in_a_row >= 2

    def log_if_due(self, updates: int, metrics: Mapping[str, Any]) -> None:
        if self.step - self.last_log < self.cfg.log_every and self.step < self.cfg.steps:
            return
        self.last_log = self.step
        if self.excluded and not self.warned:
            self.warned = True
            print(f"{self.cfg.env}: {self.excluded} steps with a number that is not finite, or in a world that broke "
                  "down, were left out. The count goes on as excluded.", file=sys.stderr)  # fmt: skip
        self._write({**self._row(updates), **self.episodes.means(), **metrics, "excluded": self.excluded})

    def evaluate_if_due(self, updates: int, act: Act) -> EvalResult | None:
        cfg = self.cfg
        if not cfg.eval_every or self.step - self.last_eval < self._eval_interval():
            return None
        self.last_eval = self.step
        result = evaluate(self.eval_env, act, cfg.eval_episodes, EVAL_SEED)
        solved = bool(cfg.stop_success) and result.success >= (cfg.stop_success or 0)
        self.solved_in_a_row = self.solved_in_a_row + 1 if solved else 0
        low, high = wilson(result.successes, result.episodes)
        self._write({
            **self._row(updates), "eval/success": result.success, "eval/success_low": low, "eval/success_high": high,
            "eval/return": result.mean_return, "eval/return_error": result.return_error,
        })  # fmt: skip
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
        return {**{name: getattr(self, name) for name in _COUNTERS}, "episodes": self.episodes.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self.episodes.load_state_dict(state["episodes"])


def read_state(path: Path) -> dict[str, Any]:
    """A loop's checkpoint.

    Raises:
        UserError: none, damaged, or of an earlier version of the loop.
    """
    state = load_checkpoint(path)
    if "watch" not in state:
        raise UserError(f"{path} was written by an earlier version and cannot go on. Delete {path.parent}, or finish "
                        "the run with the version that began it.")  # fmt: skip
    return state


class Interruptible:
    """Ctrl-C, SIGTERM and SIGHUP wait for the end of an iteration, so that what is saved is consistent.

    ``with Interruptible() as stop: ... if stop.asked: save and raise KeyboardInterrupt``. A second signal acts at once.
    """

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Interruptible:
        self.before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGINT", "SIGTERM", "SIGHUP"):
                if hasattr(signal, name):
                    number = getattr(signal, name)
                    self.before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


_COUNTERS = ("step", "wall", "solved_in_a_row", "last_log", "last_eval", "excluded")


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

    def __init__(self, num_envs: int) -> None:
        self.total = torch.zeros(num_envs)
        self.returns: deque[float] = deque(maxlen=RECENT_EPISODES)
        self.successes: deque[float] = deque(maxlen=RECENT_EPISODES)
        self.terms: dict[str, Tensor] = {}
        self.count = 0

    def add(self, step: TimeStep) -> None:
        self.total += step.reward.cpu().nan_to_num(0.0, 0.0, 0.0)
        self.count += 1
        for name, value in step.metrics.items():
            if name.startswith("reward/"):
                self.terms[name] = self.terms.get(name, torch.zeros(())) + value.nan_to_num(0.0, 0.0, 0.0).mean()
        done = step.terminated | step.truncated
        if done.any():
            done = done.cpu()
            self.returns.extend(self.total[done].tolist())
            self.successes.extend(step.metrics.get("success", torch.zeros(len(done))).cpu()[done].tolist())
            self.total[done] = 0

    def means(self) -> dict[str, float]:
        """Mean reward terms per step since the last call."""
        terms = {name: float(value) / max(1, self.count) for name, value in self.terms.items()}
        self.terms, self.count = {}, 0
        return terms

    def last(self) -> dict[str, float | None]:
        """Mean over the recent episodes; None before the first one ends."""
        n = len(self.returns)
        return {"return": sum(self.returns) / n if n else None, "success": sum(self.successes) / n if n else None}

    def state_dict(self) -> dict[str, Any]:
        return {
            "total": self.total.clone(), "returns": list(self.returns), "successes": list(self.successes),
            "terms": self.terms, "count": self.count,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total, self.terms, self.count = state["total"].clone(), dict(state["terms"]), state["count"]
        self.returns = deque(state["returns"], RECENT_EPISODES)
        self.successes = deque(state["successes"], RECENT_EPISODES)
