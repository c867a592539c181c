"""The off-policy loop: collect, score, store, learn, log, evaluate, save."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from control.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint
from control.config import TrainConfig
from control.dsact import DSACT
from control.evaluate import EvalResult, evaluate
from control.export import action_scale
from control.log import MetricLog
from control.replay import Replay, sample_mixed
from control.sac import SAC
from control.types import Segment, Transition
from sims.types import TimeStep, VecEnv

Features = Callable[[Mapping[str, Tensor]], Tensor]
LEARNERS: dict[str, Callable[..., SAC | DSACT]] = {"sac": SAC, "dsact": DSACT}
SEGMENT_STEPS = 8  # vector steps per segment: long enough to score frames in one batch, short enough to stay on-policy
EVAL_SEED = 1_000_003  # start states of the evaluations on the way; the last evaluation has its own
RECENT_EPISODES = 64


class OffPolicyLoop:
    """One training run.

    Args:
        cfg: resolved settings (see :func:`control.config.resolve`).
        env: world to learn in; ``eval_env`` another instance, which training never touches.
        features: obs groups (B, ...) -> (B, F), see ``sims.features``.
        out: folder of the run.
        score: reward model applied to a segment, or None for the task's own reward.
        prior: segments of demonstrations, (T, 1) each.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        env: VecEnv,
        eval_env: VecEnv,
        features: Features,
        out: Path,
        score: Callable[[Segment], Tensor] | None = None,
        prior: list[Segment] | None = None,
    ) -> None:
        self.cfg, self.env, self.eval_env, self.features, self.score = cfg, env, eval_env, features, score
        self.checkpoint_path = out / "checkpoint"
        self.log = MetricLog(out / "metrics.jsonl", f"train {cfg.env}", cfg.steps)
        self.centre, self.half_range = action_scale(env.spec, env.device)
        self.obs = env.reset(cfg.seed)
        obs_dim, act_dim = features(self.obs).shape[-1], self.centre.numel()
        self.learner = LEARNERS[cfg.algo.name](obs_dim, act_dim, cfg.algo, cfg.device, cfg.seed)
        capacity = -(-min(cfg.algo.buffer_size, cfg.steps + SEGMENT_STEPS * env.num_envs) // env.num_envs)
        self.replay = Replay(capacity, env.num_envs, obs_dim, act_dim, cfg.device)
        self.prior = self._store_prior(prior or [], obs_dim, act_dim)
        self.generator = torch.Generator(cfg.device).manual_seed(cfg.seed + 2)
        self.step, self.wall, self.solved_in_a_row, self.last_log, self.last_eval = 0, 0.0, 0, 0, 0
        self.episodes = EpisodeStats(env.num_envs)
        self.metrics: Mapping[str, Tensor] = {}

    def run(self) -> EvalResult | None:
        """Train until ``steps`` or until solved; returns the last evaluation on the way, if any."""
        self._resume()
        result, started, saved = None, time.monotonic() - self.wall, time.monotonic()
        while self.step < self.cfg.steps and self.solved_in_a_row < 2:
            self.store(self.collect())
            self.learn()
            self.wall = time.monotonic() - started
            self._log_if_due()
            result = self._evaluate_if_due() or result
            if time.monotonic() - saved > self.cfg.checkpoint_seconds:
                self.save()
                saved = time.monotonic()
        self.wall = time.monotonic() - started
        self.save()
        return result

    @torch.no_grad()
    def collect(self) -> Segment:
        """Act for :data:`SEGMENT_STEPS` vector steps: a (T, B) segment."""
        obs, actions, steps = [], [], []
        for _ in range(SEGMENT_STEPS):
            action = self._unit_action()
            step = self.env.step(self.centre + self.half_range * action)
            self.episodes.add(step)
            obs.append(self.obs)
            actions.append(action)
            steps.append(step)
            self.obs = step.obs
        self.step += SEGMENT_STEPS * self.env.num_envs
        return segment_of(obs, actions, steps)

    def store(self, segment: Segment) -> None:
        """Score a segment whose actions are in the unit box, then add its features to replay."""
        self._add(self.replay, self.rescore(segment))

    def rescore(self, segment: Segment) -> Segment:
        """The segment with the reward model's reward; the task's own goes to ``metrics["reward/true"]``."""
        if self.score is None:
            return segment
        physical = replace(segment, action=self.centre + self.half_range * segment.action)
        metrics = {**segment.metrics, "reward/true": segment.reward}
        return replace(segment, reward=self.score(physical), metrics=metrics)

    def learn(self) -> None:
        """Update until there are ``utd`` updates per environment step after warm-up."""
        cfg = self.cfg.algo
        due = int((self.step - cfg.warmup_steps) * self.cfg.utd)
        while self.learner.updates < due:
            self.metrics = self.learner.update(self.sample())

    def sample(self) -> Transition:
        """A batch, ``prior_share`` of it from the demonstrations."""
        cfg, share = self.cfg.algo, self.cfg.prior_share
        return sample_mixed(self.replay, self.prior, share, cfg.batch_size, cfg.gamma, cfg.n_step, self.generator)

    def act_greedily(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Deterministic physical action (B, A)."""
        unit = self.learner.act(self.features(obs).to(self.cfg.device), explore=False)
        return self.centre + self.half_range * unit.to(self.centre)

    def save(self) -> None:
        """Write everything that the rest of the run depends on."""
        state = {
            "step": self.step, "wall": self.wall, "solved_in_a_row": self.solved_in_a_row,
            "last_log": self.last_log, "last_eval": self.last_eval, "env": self.env.state_dict(),
            "learner": self.learner.state_dict(), "replay": self.replay.state_dict(),
            "prior": self.prior.state_dict() if self.prior else None,
            "generator": self.generator.get_state(), "episodes": self.episodes.state_dict(),
        }  # fmt: skip
        save_checkpoint(self.checkpoint_path, state)

    def _resume(self) -> None:
        if not has_checkpoint(self.checkpoint_path):
            self.log.truncate_after(0)
            return
        state = load_checkpoint(self.checkpoint_path)
        for name in ("step", "wall", "solved_in_a_row", "last_log", "last_eval"):
            setattr(self, name, state[name])
        self.obs = self.env.load_state_dict(state["env"])
        self.learner.load_state_dict(state["learner"])
        self.replay.load_state_dict(state["replay"])
        if state["prior"]:
            self.prior = _replay_from(state["prior"], self.replay)
        self.generator.set_state(state["generator"])
        self.episodes.load_state_dict(state["episodes"])
        self.log.truncate_after(self.step)

    def _store_prior(self, segments: list[Segment], obs_dim: int, act_dim: int) -> Replay | None:
        if not segments:
            return None
        prior = Replay(sum(s.reward.shape[0] for s in segments), 1, obs_dim, act_dim, self.cfg.device)
        for segment in segments:
            self._add(prior, self.rescore(segment))
        return prior

    def _add(self, replay: Replay, segment: Segment) -> None:
        shape = segment.reward.shape  # (T, B)
        obs, next_obs = (self.features(_merge(groups)).view(*shape, -1) for groups in (segment.obs, segment.next_obs))
        self.learner.normalizer.update(obs)
        replay.add(obs, segment.action, segment.reward, segment.terminated, segment.truncated, next_obs)

    def _unit_action(self) -> Tensor:
        if self.step < self.cfg.algo.warmup_steps and self.cfg.algo.random_warmup:
            shape = (self.env.num_envs, self.centre.numel())
            return torch.rand(shape, generator=self.generator, device=self.generator.device) * 2 - 1
        return self.learner.act(self.features(self.obs).to(self.cfg.device), explore=True)

    def _log_if_due(self) -> None:
        if self.step - self.last_log < self.cfg.log_every and self.step < self.cfg.steps:
            return
        self.last_log = self.step
        self.log.write({**self._row(), **self.episodes.means(), **self.metrics})

    def _evaluate_if_due(self) -> EvalResult | None:
        cfg = self.cfg
        if not cfg.eval_every or self.step - self.last_eval < self._eval_interval():
            return None
        self.last_eval = self.step
        result = evaluate(self.eval_env, self.act_greedily, cfg.eval_episodes, EVAL_SEED)
        solved = bool(cfg.stop_success) and result.success >= (cfg.stop_success or 0)
        self.solved_in_a_row = self.solved_in_a_row + 1 if solved else 0
        self.log.write({**self._row(), "eval/success": result.success, "eval/return": result.mean_return})
        return result

    def _eval_interval(self) -> int:
        """``eval_every`` steps, half of it while a run that may stop early looks close to solved."""
        near = self.cfg.stop_success and (self.episodes.last()["success"] or 0) >= 0.9 * self.cfg.stop_success
        return self.cfg.eval_every // 2 if near else self.cfg.eval_every

    def _row(self) -> dict[str, Any]:
        return {
            "step": self.step, "time": self.wall, "steps_per_s": self.step / max(self.wall, 1e-9),
            "updates": self.learner.updates, **self.episodes.last(),
        }  # fmt: skip


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


def _merge(groups: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """(T, B, ...) -> (T B, ...); frames stay behind, no feature reads them."""
    return {k: v.flatten(0, 1) for k, v in groups.items() if not k.startswith("pixels/")}


def _replay_from(state: Mapping[str, Any], like: Replay) -> Replay:
    prior = Replay(state["rows"].shape[0], 1, like.obs_dim, like.act_dim, like.rows.device)
    prior.load_state_dict(state)
    return prior


class EpisodeStats:
    """Return and final success of the last episodes that the exploring policy finished."""

    def __init__(self, num_envs: int) -> None:
        self.total = torch.zeros(num_envs)
        self.returns: deque[float] = deque(maxlen=RECENT_EPISODES)
        self.successes: deque[float] = deque(maxlen=RECENT_EPISODES)
        self.terms: dict[str, Tensor] = {}
        self.count = 0

    def add(self, step: TimeStep) -> None:
        self.total += step.reward.cpu()
        self.count += 1
        for name, value in step.metrics.items():
            if name.startswith("reward/"):
                self.terms[name] = self.terms.get(name, torch.zeros(())) + value.mean()
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
