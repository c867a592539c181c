"""The protocol every reward model follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class HasFrames(Protocol):
    """The part of ``control.types.Segment`` that a reward model reads."""

    @property
    def next_obs(self) -> Mapping[str, Tensor]: ...


class RewardModel(Protocol):
    """Scores a collected segment; never sees the task's own reward or success.

    ``cameras`` names the ``pixels/<camera>`` groups it needs, ``image_size`` their side in pixels.
    """

    cameras: tuple[str, ...]
    image_size: int

    def score(self, segment: HasFrames) -> Tensor:
        """(T, B) float32 rewards for the state each action led to (``segment.next_obs``)."""
        ...
