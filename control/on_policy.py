"""The on-policy loop: collect, score, learn, log, evaluate, save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from control.checkpoint import explained_writes, save_checkpoint
from control.config import ResolvedConfig
from control.episodes import Watch, marked, merge_groups, segment_of
from control.evaluate import EvalResult
from control.export import action_scale
from control.ppo import PPO
from control.rollout import ReturnScale, Rollout
from control.running import drive
from control.types import Segment
from sims.types import VecEnv

Features = Callable[[Mapping[str, Tensor]], Tensor]


class OnPolicyLoop:
    """One training run; the arguments are those of :class:`control.off_policy.OffPolicyLoop`, without prior data."""

    def __init__(
        self, cfg: ResolvedConfig, env: VecEnv, eval_env: VecEnv, features: Features, out: Path,
        score: Callable[[Segment], Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.cfg, self.env, self.eval_env, self.features, self.score = cfg, env, eval_env, features, score
        self.checkpoint_path = out / "checkpoint"
        self.watch = Watch(cfg, env, eval_env, out / "metrics.jsonl")
        self.centre, self.half_range = action_scale(env.spec, env.device)
        self.obs = env.reset(cfg.seed)
        obs_dim, act_dim = features(self.obs).shape[-1], self.centre.numel()
        self.learner = PPO(obs_dim, act_dim, cfg.algo, cfg.device, cfg.seed)
        self.scale = ReturnScale(env.num_envs, self.learner.cfg.gamma, cfg.algo.normalize_reward, cfg.device)
        self.metrics: Mapping[str, Tensor] = {}

    def run(self) -> EvalResult | None:
        """Train until ``steps`` or until solved; returns the last evaluation on the way, if any."""
        return drive(self)

    def advance(self) -> None:
        """One rollout, and the update from it."""
        self.learn(*self.collect())

    @torch.no_grad()
    def collect(self) -> tuple[Segment, Tensor, Tensor]:
        """``rollout_steps`` vector steps: a (T, B) segment with actions as drawn, log densities, and features."""
        obs, actions, steps, log_probs, rows = [], [], [], [], []
        for _ in range(self.learner.cfg.rollout_steps):
            raw = self.features(self.obs).to(self.cfg.device)
            rows.append(raw)
            action, log_prob = self.learner.sample(self.learner.normalizer(raw.nan_to_num(0.0, 0.0, 0.0)))
            unit = action.clamp(-1, 1).nan_to_num(0.0).to(self.centre)  # finite whatever was observed
            step = self.env.step(self.centre + self.half_range * unit)
            obs.append(self.obs)
            actions.append(action)
            log_probs.append(log_prob)
            steps.append(step)
            self.obs = step.obs
        return segment_of(obs, actions, steps), torch.stack(log_probs), torch.stack(rows)

    @torch.no_grad()
    def rollout(self, segment: Segment, log_prob: Tensor, raw: Tensor) -> Rollout:
        """Score, scale and value a segment; ``raw`` (T, B, F) are its features."""
        reward = segment.reward if self.score is None else self._score(segment)
        reward = marked(reward.float(), segment.metrics)
        shape, device = segment.reward.shape, self.cfg.device
        next_raw = self.features(merge_groups(segment.next_obs)).view(*shape, -1).to(device)
        reward, terminated, truncated = (x.to(device) for x in (reward, segment.terminated, segment.truncated))
        valid = raw.isfinite().all(-1) & next_raw.isfinite().all(-1) & reward.isfinite() & log_prob.isfinite()
        reward = torch.where(valid, reward, 0.0)
        reward = self.scale(reward, terminated | truncated, valid)
        obs, next_obs = (self.learner.normalizer(x.nan_to_num(0.0, 0.0, 0.0)) for x in (raw, next_raw))
        values = self.learner.value(obs), self.learner.value(next_obs)
        log_prob, action = (
            torch.where(m, x, 0.0) for m, x in ((valid, log_prob), (valid.unsqueeze(-1), segment.action))
        )
        return Rollout(obs, next_obs, action, log_prob, *values, reward, terminated, truncated, valid)

    def learn(self, segment: Segment, log_prob: Tensor, raw: Tensor) -> None:
        """One update from one rollout; the normaliser moves afterwards, so that the first ratio is 1."""
        self.learner.anneal(min(1.0, self.step / self.cfg.steps))
        rollout = self.rollout(segment, log_prob, raw)
        self.watch.count(segment, rollout.valid)
        self.watch.exclusions.report()  # an update needs something to learn from
        self.metrics = self.learner.update(rollout)
        self.learner.normalizer.update(raw, rollout.valid)

    def _score(self, segment: Segment) -> Tensor:
        assert self.score is not None
        return self.score(replace(segment, action=self.centre + self.half_range * segment.action.clamp(-1, 1)))

    def act_greedily(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Deterministic physical action (B, A)."""
        unit = self.learner.act(self.features(obs).to(self.cfg.device), explore=False)
        return self.centre + self.half_range * unit.to(self.centre)

    def save(self) -> None:
        """Write everything that the rest of the run depends on."""
        state = {
            "watch": self.watch.state_dict(), "env": self.env.state_dict(), "learner": self.learner.state_dict(),
            "scale": self.scale.state_dict(), "metrics": dict(self.metrics),
        }  # fmt: skip
        with explained_writes(self.checkpoint_path):
            save_checkpoint(self.checkpoint_path, state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`save` wrote."""
        self.watch.load_state_dict(state["watch"])
        self.obs = self.env.load_state_dict(state["env"])
        self.learner.load_state_dict(state["learner"])
        self.scale.load_state_dict(state["scale"])
        self.metrics = {name: value.to(self.cfg.device) for name, value in state["metrics"].items()}

    @property
    def step(self) -> int:
        return self.watch.step

    @property
    def excluded(self) -> int:
        return self.watch.excluded
