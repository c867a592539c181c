"""CLIP rewards for collected segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sims.errors import UserError
from vlm_rewards import captions, heads
from vlm_rewards.clip import Clip, load_clip
from vlm_rewards.config import ClipReward, EnvReward
from vlm_rewards.types import HasFrames, RewardModel


@dataclass(frozen=True)
class Calibration:
    """Numbers frozen when the model was fitted: cosines of no and of full progress, and the success threshold."""

    low: float
    high: float
    threshold: float
    temperature: float


class ClipRewardModel:
    """Scores tiled (or averaged) camera frames against one sentence; see :class:`vlm_rewards.types.RewardModel`.

    Args:
        cfg: form, scales, cameras.
        clip: the model, in eval mode.
        instruction: the sentence to reward.

    Raises:
        UserError: a word the model does not know, or a sentence without known negatives where the form needs them.
    """

    def __init__(self, cfg: ClipReward, clip: Clip, instruction: str) -> None:
        self.cfg, self.clip, self.instruction = cfg, clip, instruction
        self.cameras, self.image_size = tuple(cfg.cameras), cfg.image_size
        height, width = clip.size
        self._tiled = width != height and width == height * len(self.cameras)
        if width != height and not self._tiled:
            raise UserError(
                f"model '{cfg.model}' takes {width // height} tiled views; reward.cameras names {self.cameras}."
            )
        self.goal = clip.embed_text([instruction])[0]  # (D,)
        self.calibration = _calibration(cfg, clip, instruction)
        self.negatives = _negatives(cfg, clip, instruction)  # (K, D)
        self.baseline = clip.embed_text([cfg.baseline])[0] if cfg.baseline else None

    @torch.no_grad()
    def score(self, segment: HasFrames) -> Tensor:
        """(T, B) float32. Only every ``stride``-th row of the segment is looked at; rows between hold its value."""
        frames = self._frames(segment.next_obs)
        steps, envs = frames[0].shape[:2]
        chosen = torch.arange(0, steps, self.cfg.stride)
        picked = [f[chosen].flatten(0, 1) for f in frames]  # (S*B, H, W, 3) per camera
        size = self.cfg.batch_size
        rewards = torch.cat(
            [self.reward(self.embed([p[i : i + size] for p in picked])) for i in range(0, len(picked[0]), size)]
        )
        held = rewards.unflatten(0, (len(chosen), envs)).repeat_interleave(self.cfg.stride, dim=0)[:steps]
        return held.to(frames[0].device)

    def embed(self, views: Sequence[Tensor]) -> Tensor:
        """One (N, H, W, 3) uint8 batch per camera -> (N, D) unit embeddings."""
        if self._tiled:
            return self.clip.embed_frames(torch.cat(list(views), dim=2))
        mean = torch.stack([self.clip.embed_frames(v) for v in views]).mean(0)
        return torch.nn.functional.normalize(mean, dim=-1)

    def reward(self, x: Tensor) -> Tensor:
        """(N, D) embeddings -> (N,) rewards in the configured form."""
        cosine = x @ self.goal
        if self.cfg.form == "cosine":
            return cosine
        if self.cfg.form == "projection":
            assert self.baseline is not None  # the config checks it
            return heads.goal_baseline(x, self.goal, self.baseline, self.cfg.alpha)
        c = self.calibration
        probability = heads.softmax_probability(cosine, x @ self.negatives.T, c.temperature)
        if self.cfg.form == "softmax":
            return (probability >= c.threshold).float()
        return heads.gated(cosine, probability, c.low, c.high, c.threshold, self.cfg.dense_scale, self.cfg.gate_scale)

    def _frames(self, obs: Mapping[str, Tensor]) -> list[Tensor]:
        missing = [c for c in self.cameras if f"pixels/{c}" not in obs]
        if missing:
            raise UserError(
                f"the CLIP reward needs pixels of camera(s) {', '.join(missing)}; the segment has {', '.join(obs)}. "
                f"Make the world with pixels={self.cameras}."
            )
        frames = [obs[f"pixels/{c}"] for c in self.cameras]
        if any(f.ndim != 5 for f in frames):
            raise UserError(f"pixels must be (T, B, H, W, 3), found {[tuple(f.shape) for f in frames]}.")
        return frames


def _calibration(cfg: ClipReward, clip: Clip, instruction: str) -> Calibration:
    """The model's own numbers for the sentence's family; the config overrides threshold and temperature."""
    table: Mapping[str, Any] = clip.card.get("calibration", {})
    own = table.get(captions.concept_of(instruction).family) if table and not cfg.negatives else None
    numbers = own or {"low": 0.0, "high": 1.0, "threshold": 0.5}
    return Calibration(
        low=numbers["low"],
        high=numbers["high"],
        threshold=cfg.threshold or numbers["threshold"],
        temperature=cfg.temperature or numbers.get("temperature", clip.temperature),
    )


def _negatives(cfg: ClipReward, clip: Clip, instruction: str) -> Tensor:
    """(K, D); empty for the forms that need none."""
    if cfg.form in ("cosine", "projection"):
        return clip.embed_text([instruction])[:0]
    own = bool(clip.card.get("calibration"))
    if not cfg.negatives and not own:
        raise UserError(
            f"reward.form='{cfg.form}' compares with negatives; give reward.negatives (sentences that are false when "
            f"'{instruction}' holds): this model has no grammar of its own."
        )
    return clip.embed_text(cfg.negatives or captions.negatives(captions.concept_of(instruction)))


def build_reward(cfg: ClipReward | EnvReward, instruction: str = "") -> RewardModel | None:
    """The reward model of a config; None for the task's own reward.

    Args:
        instruction: the training instruction, used where ``cfg.instruction`` is empty.

    Raises:
        UserError: no sentence, unknown words, a model that does not load.
    """
    if isinstance(cfg, EnvReward) or cfg.kind == "env":
        return None
    sentence = cfg.instruction or instruction
    if not sentence:
        raise UserError("a CLIP reward needs a sentence: set reward.instruction, e.g. 'press the yellow button'.")
    return ClipRewardModel(cfg, load_clip(cfg.model, cfg.pretrained, cfg.device), sentence)
