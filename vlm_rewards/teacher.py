"""Hints from the simulator that only ``fit`` uses: where the fingertip is, and per object its kind, colour and light.

Kind and colour are taught by separate classifiers, so the features stay factorised: a pair that never occurs is still
one known kind and one known colour. Nothing here is part of the saved model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sims.worlds.predicates import PRESS_DEPTH
from vlm_rewards.captions import COLOURS, KINDS, SLOT_KIND
from vlm_rewards.frames import Frames
from vlm_rewards.small_clip import GRID, Trunk

NOTHING = len(KINDS)  # class of an empty place


class Teacher(nn.Module):
    """Linear read-outs of the trunk's features and the losses that they carry.

    Args:
        frames: the training frames; positions, colours and cap depths are read from them.
        channels: of the trunk's features.
    """

    def __init__(self, frames: Frames, channels: int) -> None:
        super().__init__()
        self.kind = nn.Linear(channels, len(KINDS) + 1)
        self.colour = nn.Linear(channels, len(COLOURS))
        self.lit = nn.Linear(channels, 1)
        where = torch.from_numpy(frames.where).float()  # (N, V, 6, 2)
        self._inside = ((where >= 0) & (where < 1)).all(-1)  # (N, V, 6)
        cell = (where.clamp(0, 0.999) * GRID).long()
        self._cell = cell[..., 1] * GRID + cell[..., 0]  # (N, V, 6) index into G*G
        self._colours = torch.from_numpy(frames.facts.colour)  # (N, 5)
        self._kinds = torch.tensor([KINDS.index(k) for k in SLOT_KIND])
        self._down = torch.from_numpy(frames.facts.depth > PRESS_DEPTH).float()  # (N, 2)

    def losses(self, features: Tensor, keypoints: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """Cross-entropies of (N, V, C, G, G) features and (N, V, K, G*G) keypoint logits of the frames ``rows``."""
        inside, cell = self._inside[rows], self._cell[rows]
        tip = F.cross_entropy(keypoints[:, :, 0].flatten(0, 1), cell[..., 0].flatten(), reduction="none")
        weight = inside[..., 0].flatten().float()
        out = {"tip": (tip * weight).sum() / weight.sum().clamp(min=1)}
        n, views = rows.shape[0], features.shape[1]
        flat = features.flatten(3).transpose(2, 3)  # (N, V, G*G, C)
        at = flat.gather(2, cell[..., 1:, None].expand(-1, -1, -1, flat.shape[-1]))  # (N, V, 5, C)
        seen = inside[..., 1:]
        anywhere = flat[:, :, torch.randint(GRID * GRID, (8,))]  # mostly empty places
        kinds = self._kinds.expand(n, views, -1)
        colours = self._colours[rows][:, None].expand(-1, views, -1)
        out["kind"] = F.cross_entropy(self.kind(at)[seen], kinds[seen]) + 0.3 * F.cross_entropy(
            self.kind(anywhere).flatten(0, 2), torch.full((n * views * 8,), NOTHING)
        )
        out["colour"] = F.cross_entropy(self.colour(at)[seen], colours[seen])
        down = self._down[rows][:, None].expand(-1, views, -1)
        out["lit"] = F.binary_cross_entropy_with_logits(
            self.lit(at[:, :, 3:])[..., 0][seen[..., 3:]], down[seen[..., 3:]]
        )
        return out


def trunk_of(model: nn.Module) -> Trunk:
    """The small CLIP's trunk inside an open_clip model."""
    trunk = model.visual.trunk  # type: ignore[union-attr]
    assert isinstance(trunk, Trunk)
    return trunk
