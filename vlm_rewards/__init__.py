"""Reward models: rewards from sentences and pictures, their fitting and their report cards."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlm_rewards.config import ClipReward, EnvReward
    from vlm_rewards.types import RewardModel


def build_reward(cfg: ClipReward | EnvReward, instruction: str = "") -> RewardModel | None:
    """See :func:`vlm_rewards.reward.build_reward`; imports torch and open_clip only for a CLIP reward."""
    if cfg.kind == "env":
        return None
    from vlm_rewards import reward

    return reward.build_reward(cfg, instruction)
