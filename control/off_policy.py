"""The off-policy loop: collect, score, store, learn, log, evaluate, save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from control.checkpoint import explained_writes, save_checkpoint
from control.config import ResolvedConfig
from control.dsact import DSACT
from control.episodes import Watch, marked, merge_groups, segment_of
from control.evaluate import EvalResult
from control.export import action_scale
from control.replay import Replay, sample_mixed
from control.replay_store import ReplayStore
from control.running import drive
from control.sac import SAC
from control.types import Segment, Transition
from sims.errors import UserError
from sims.types import VecEnv

Features = Callable[[Mapping[str, Tensor]], Tensor]
LEARNERS: dict[str, Callable[..., SAC | DSACT]] = {"sac": SAC, "dsact": DSACT}
SEGMENT_STEPS = 8  # vector steps per segment: long enough to score frames in one batch, short enough to stay on-policy


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
        cfg: ResolvedConfig,
        env: VecEnv,
        eval_env: VecEnv,
        features: Features,
        out: Path,
        score: Callable[[Segment], Tensor] | None = None,
        prior: list[Segment] | None = None,
    ) -> None:
        self.cfg, self.env, self.eval_env, self.features, self.score = cfg, env, eval_env, features, score
        self.checkpoint_path = out / "checkpoint"
        self.watch = Watch(cfg, env, eval_env, out / "metrics.jsonl")
        self.centre, self.half_range = action_scale(env.spec, env.device)
        self.obs = env.reset(cfg.seed)
        self.privileged = _privileged_groups(self.obs, env.spec.task) if cfg.algo.privileged else []
        actor_dim, obs_dim, act_dim = features(self.obs).shape[-1], self._seen(self.obs).shape[-1], self.centre.numel()
        self.learner = LEARNERS[cfg.algo.name](obs_dim, act_dim, cfg.algo, cfg.device, cfg.seed, actor_dim)
        capacity = -(-min(cfg.algo.buffer_size, cfg.steps + SEGMENT_STEPS * env.num_envs) // env.num_envs)
        self.replay = Replay(capacity, env.num_envs, obs_dim, act_dim, cfg.device)
        self.replay_store, self.prior_store = ReplayStore(out / "replay"), ReplayStore(out / "prior")
        self.prior = self._store_prior(prior or [], obs_dim, act_dim)
        self.generator = torch.Generator(cfg.device).manual_seed(cfg.seed + 2)
        self.metrics: Mapping[str, Tensor] = {}

    def run(self) -> EvalResult | None:
        """Train until ``steps`` or until solved; returns the last evaluation on the way, if any."""
        return drive(self)

    def advance(self) -> None:
        """One segment, and the updates that it is due."""
        self.store(self.collect())
        self.learn()

    @torch.no_grad()
    def collect(self) -> Segment:
        """Act for :data:`SEGMENT_STEPS` vector steps: a (T, B) segment."""
        obs, actions, steps = [], [], []
        for _ in range(SEGMENT_STEPS):
            action = self._unit_action()
            step = self.env.step(self.centre + self.half_range * action)
            obs.append(self.obs)
            actions.append(action)
            steps.append(step)
            self.obs = step.obs
        return segment_of(obs, actions, steps)

    def store(self, segment: Segment) -> None:
        """Score a segment whose actions are in the unit box, then add its features to replay."""
        self.watch.count(segment, self._add(self.replay, self.rescore(segment)))

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
            # merged, for a learner that was just resumed has not yet measured what it measures now and then
            self.metrics = {**self.metrics, **self.learner.update(self.sample())}

    def sample(self) -> Transition:
        """A batch, ``prior_share`` of it from the demonstrations."""
        cfg, share = self.cfg.algo, self.cfg.prior_share
        return sample_mixed(self.replay, self.prior, share, cfg.batch_size, cfg.gamma, cfg.n_step, self.generator)

    def act_greedily(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Deterministic physical action (B, A)."""
        unit = self.learner.act(self.features(obs).to(self.cfg.device), explore=False)
        return self.centre + self.half_range * unit.to(self.centre)

    def save(self) -> None:
        """Write everything that the rest of the run depends on; of replay, what is new."""
        self.watch.exclusions.report()
        with explained_writes(self.checkpoint_path):
            state = {
                "watch": self.watch.state_dict(), "env": self.env.state_dict(), "learner": self.learner.state_dict(),
                "replay": self.replay_store.save(self.replay), "generator": self.generator.get_state(),
                "prior": self.prior_store.save(self.prior) if self.prior else None, "metrics": dict(self.metrics),
            }  # fmt: skip
            save_checkpoint(self.checkpoint_path, state)
            self.replay_store.collect_garbage()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`save` wrote."""
        self.watch.load_state_dict(state["watch"])
        self.obs = self.env.load_state_dict(state["env"])
        self.learner.load_state_dict(state["learner"])
        self.replay_store.load(state["replay"], self.replay)
        if state["prior"]:
            self.prior = Replay(state["prior"]["filled"], 1, self.replay.obs_dim, self.replay.act_dim, self.cfg.device)
            self.prior_store.load(state["prior"], self.prior)
        self.generator.set_state(state["generator"])
        self.metrics = {name: value.to(self.cfg.device) for name, value in state["metrics"].items()}

    def _store_prior(self, segments: list[Segment], obs_dim: int, act_dim: int) -> Replay | None:
        if not segments:
            return None
        prior = Replay(sum(s.reward.shape[0] for s in segments), 1, obs_dim, act_dim, self.cfg.device)
        for segment in segments:
            self._add(prior, self.rescore(segment))
        return prior

    def _add(self, replay: Replay, segment: Segment) -> Tensor:
        """Store a (T, B) segment and let the normaliser see it; returns (T, B) bool: what could be stored."""
        shape = segment.reward.shape
        obs, next_obs = (self._seen(merge_groups(g)).view(*shape, -1) for g in (segment.obs, segment.next_obs))
        reward = marked(segment.reward, segment.metrics)
        good = replay.add(obs, segment.action, reward, segment.terminated, segment.truncated, next_obs)
        self.learner.normalizer.update(obs.to(good.device), good)
        return good

    def _seen(self, obs: Mapping[str, Tensor]) -> Tensor:
        """(B, F) what critics see: the policy's features, then the privileged groups."""
        return torch.cat([self.features(obs), *[obs[name].flatten(1).float() for name in self.privileged]], dim=-1)

    def _unit_action(self) -> Tensor:
        """(B, A), finite whatever was observed."""
        if self.step < self.cfg.algo.warmup_steps and self.cfg.algo.random_warmup:
            shape = (self.env.num_envs, self.centre.numel())
            unit = torch.rand(shape, generator=self.generator, device=self.generator.device) * 2 - 1
        else:
            features = self.features(self.obs).to(self.cfg.device).nan_to_num(0.0, 0.0, 0.0)
            unit = self.learner.act(features, explore=True).nan_to_num(0.0)
        return unit.to(self.centre)

    @property
    def step(self) -> int:
        return self.watch.step

    @property
    def excluded(self) -> int:
        return self.watch.excluded


def _privileged_groups(obs: Mapping[str, Tensor], world: str) -> list[str]:
    groups = sorted(name for name in obs if name.startswith("privileged"))
    if not groups:
        raise UserError(f"algo.privileged=true: {world} has no group 'privileged', only {', '.join(sorted(obs))}. "
                        "Leave algo.privileged out, or choose a world that has it, such as tabletop.")  # fmt: skip
    return groups
