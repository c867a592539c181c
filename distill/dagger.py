"""One round of DAgger (Ross et al., 1011.0686): the generalist drives, the specialists say what they would have done.

For part of the time a specialist drives, so that its own way out of the generalist's mistakes is seen as well; in some
episodes the sentence changes midway. Worlds are given to the jobs that fail most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.config import DistillConfig
from distill.generalist import ChunkActor, commanded, corrected_targets
from distill.samples import Samples, Sentences, featurise
from distill.teachers import Teachers
from sims.registry import make

BLOCK_STEPS = 8  # a specialist or the generalist drives for so long at a time
TAIL_STEPS = 12  # steps recorded after success
HOLD_SHARE = 0.3  # of the steps after those: standing still needs fewer samples
SWITCH_STEPS = (8, 30)  # when a sentence changes, half-open
BASE_SHARE = 0.15  # weight of a job that never fails, beside its failure rate


@dataclass(frozen=True)
class Round:
    """What a round brought: samples, and per job successes and episodes of the generalist alone."""

    samples: Samples
    successes: np.ndarray
    episodes: np.ndarray
    total_return: float


def share_worlds(failure: np.ndarray, worlds: int) -> np.ndarray:
    """(J,) failure rates -> (W,) job of each world: more worlds where more fails, at least one each."""
    weight = BASE_SHARE + failure
    exact = np.cumsum(weight / weight.sum()) * (worlds - len(weight))
    counts = 1 + np.diff(np.round(np.concatenate([[0.0], exact])).astype(int))
    return np.repeat(np.arange(len(weight)), counts)


def dagger_round(
    cfg: DistillConfig, policy: Any, teachers: Teachers, sentences: Sentences, jobs: Sequence[str], features: str,
    failure: np.ndarray, seed: int,
) -> Round:  # fmt: skip
    """Drive ``cfg.round_worlds`` worlds for ``cfg.round_env_steps`` steps and label every state seen."""
    fixed = share_worlds(failure, cfg.round_worlds)
    env = make("tabletop", len(fixed), seed, variants=list(jobs), fixed_variants=fixed, threads=cfg.threads)
    rng = np.random.default_rng([seed, 5])
    driver = _Driver(cfg, env, policy, teachers, sentences, rng)
    try:
        for _ in range(cfg.round_env_steps):
            driver.step()
    finally:
        env.close()
    return driver.finish(features)


class _Driver:
    """Runs the worlds and keeps what happened, (T, B) rows in lists."""

    def __init__(self, cfg: DistillConfig, env: Any, policy: Any, teachers: Teachers, sentences: Sentences,
                 rng: np.random.Generator):  # fmt: skip
        self.cfg, self.env, self.teachers, self.sentences, self.rng = cfg, env, teachers, sentences, rng
        self.words = torch.Generator().manual_seed(int(rng.integers(2**31)))
        self.limits = torch.tensor(env.spec.action.high)
        self.actor = ChunkActor(policy, cfg.execute, self.limits)
        self.obs: Mapping[str, Tensor] = env.reset(int(rng.integers(2**31)))
        b, j = env.num_envs, len(env.variants)
        self.rows: list[dict[str, Tensor]] = []
        self.successes, self.episodes, self.total = np.zeros(j), np.zeros(j), 0.0
        self.embedding = torch.zeros(b, sentences.table.shape[1])
        self.age, self.first = np.zeros(b, int), np.full(b, -1)
        self.helped, self.switch_at = np.zeros(b, bool), np.zeros(b, int)
        self.segment = np.zeros(b, int)
        self._begin(np.ones(b, bool))

    def _begin(self, worlds: np.ndarray) -> None:
        """New episodes: draw who gets help, who switches, and the sentences."""
        count = int(worlds.sum())
        self.age[worlds], self.first[worlds] = 0, -1
        self.helped[worlds] = self.rng.random(count) < min(1.0, 2 * self.cfg.takeover)
        switching = self.rng.random(count) < self.cfg.switch
        self.switch_at[worlds] = np.where(switching, self.rng.integers(*SWITCH_STEPS, count), -1)
        self._speak(worlds)

    def _speak(self, worlds: np.ndarray) -> None:
        rows = torch.from_numpy(worlds)
        job = torch.from_numpy(self.env.variant_ids)[rows]
        self.embedding[rows] = self.sentences.draw(job, self.words)
        self.segment[worlds] += 1
        self.actor.restart(rows)

    def _switch(self) -> None:
        """Another job, another sentence, same state."""
        now = self.age == self.switch_at
        if now.any() and len(self.env.variants) > 1:
            ids = self.env.variant_ids.copy()
            ids[now] = (ids[now] + self.rng.integers(1, len(self.env.variants), now.sum())) % len(self.env.variants)
            self.obs = self.env.set_variants(ids)
            self.first[now] = -1
            self._speak(now)

    def step(self) -> None:
        self._switch()
        jobs = [self.env.variants[i] for i in self.env.variant_ids]
        label = self.teachers(self.obs, jobs).clamp(-self.limits, self.limits)
        own = self.actor({**self.obs, "embedding": self.embedding})
        teaching = torch.from_numpy(self.helped & (self.age // BLOCK_STEPS % 2 == 1))
        self.actor.restart(teaching)  # its plan is void once somebody else drives
        recorded = (self.first < 0) | (self.age <= self.first + TAIL_STEPS) | (self.rng.random(len(label)) < HOLD_SHARE)
        self.rows.append({
            "proprio": self.obs["proprio"], "objects": self.obs["objects"], "label": label,
            "job": torch.from_numpy(self.env.variant_ids.copy()), "segment": torch.from_numpy(self.segment.copy()),
            "recorded": torch.from_numpy(recorded),
        })  # fmt: skip
        result = self.env.step(torch.where(teaching[:, None], label, own))
        self._account(result)
        self.obs = result.obs

    def _account(self, result: Any) -> None:
        success = result.metrics["success"].numpy() > 0.5
        self.total += float(result.reward.sum())
        self.first = np.where((self.first < 0) & success, self.age, self.first)
        done = (result.terminated | result.truncated).numpy()
        alone = done & ~self.helped & (self.switch_at < 0)
        job = self.rows[-1]["job"].numpy()
        np.add.at(self.episodes, job[alone], 1)
        np.add.at(self.successes, job[alone & success], 1)
        self.age += 1
        if done.any():
            self._begin(done)

    def finish(self, features: str) -> Round:
        """Cut the worlds' histories at every new episode or sentence, and turn the pieces into samples."""
        stacked = {k: torch.stack([row[k] for row in self.rows], dim=1) for k in self.rows[0]}  # (B, T, ...)
        parts = []
        for world in range(self.env.num_envs):
            mine = {k: v[world] for k, v in stacked.items()}
            for number in mine["segment"].unique():
                piece = {k: v[mine["segment"] == number] for k, v in mine.items()}
                parts.append(self._samples(piece, features))
        mean = self.total / max(1.0, float(self.env.num_envs * len(self.rows)))
        return Round(Samples.join(parts), self.successes, self.episodes, mean)

    def _samples(self, rows: Mapping[str, Tensor], features: str) -> Samples:
        target, valid = corrected_targets(commanded(rows["proprio"]), rows["label"], self.cfg.chunk)
        flat = featurise(features, {"proprio": rows["proprio"], "objects": rows["objects"]})
        keep = rows["recorded"]
        return Samples(flat[keep], rows["job"][keep], target[keep], valid[keep])
