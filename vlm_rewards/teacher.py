"""Hints from the simulator that only ``fit`` uses: where fingertip and marker are, and each object's kind and colour.

Kind and colour are taught separately, so the features stay factorised: a pair that never occurs is still one known
kind and one known colour.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sims.worlds.predicates import PRESS_DEPTH
from vlm_rewards.captions import KINDS, SLOT_KIND
from vlm_rewards.frames import Frames
from vlm_rewards.small_clip import GRID, NOTHING, Hints, Trunk

EMPTY = 24  # random places per frame and view that are taught to be empty; few of 256 are not
LIT = KINDS.index("button") + 1  # class of a button whose light is on


class Teacher:
    """Cross-entropies of the trunk's hints against what the simulator knows.

    Args:
        frames: the training frames.
    """

    def __init__(self, frames: Frames) -> None:
        where = torch.from_numpy(frames.where).float()  # (N, V, 6, 2)
        self._inside = ((where >= 0) & (where < 1)).all(-1)  # (N, V, 6)
        cell = (where.clamp(0, 0.999) * GRID).long()
        self._cell = cell[..., 1] * GRID + cell[..., 0]  # (N, V, 6) index into G*G
        self._around, self._share = _corners(where[:, :, :2])
        self._colours = torch.from_numpy(frames.facts.colour)  # (N, 5)
        kinds = torch.tensor([KINDS.index(k) for k in SLOT_KIND]).repeat(len(frames), 1)
        kinds[:, 3:] += torch.from_numpy(frames.facts.depth > PRESS_DEPTH).long()  # lit is the class after button
        self._kinds = kinds  # (N, 5)

    def losses(self, hints: Hints, rows: Tensor) -> dict[str, Tensor]:
        """Mean losses over what lies inside the pictures of the frames ``rows``; hidden things count too."""
        inside, cell = self._inside[rows], self._cell[rows]  # (N, V, 6)
        spots = -(hints.keypoints.log_softmax(-1).gather(-1, self._around[rows]) * self._share[rows]).sum(-1)
        weight = inside[..., :2].float()  # (N, V, 2): fingertip and marker
        seen, at = inside[..., 1:], cell[..., 1:]  # (N, V, 5)
        kinds = self._kinds[rows][:, None].expand_as(at)[seen]
        empty = torch.randint(GRID * GRID, (EMPTY,))
        nothing = hints.kinds[..., empty].movedim(2, -1).flatten(0, 2)  # (N*V*EMPTY, classes)
        return {
            "spots": (spots * weight).sum() / weight.sum().clamp(min=1),
            "kind": F.cross_entropy(_places(hints.kinds, at)[seen], kinds),
            "nothing": F.cross_entropy(nothing, torch.full((len(nothing),), NOTHING)),
        }

    def colour_loss(self, colours: Tensor, rows: Tensor) -> Tensor:
        """Mean cross-entropy of (N, V, S, G*G) colour logits at the objects of the frames ``rows``."""
        at, seen = self._cell[rows][:, :, 1:], self._inside[rows][..., 1:]
        return F.cross_entropy(_places(colours, at)[seen], self._colours[rows][:, None].expand_as(at)[seen])


def _corners(where: Tensor) -> tuple[Tensor, Tensor]:
    """(N, V, K, 2) image positions -> (N, V, K, 4) places around each, and bilinear shares: finer than a place."""
    position = where.clamp(0, 1) * GRID - 0.5
    low = position.floor()
    part = position - low
    indices, shares = [], []
    for right in (0, 1):
        for down in (0, 1):
            x, y = (low[..., 0] + right).clamp(0, GRID - 1).long(), (low[..., 1] + down).clamp(0, GRID - 1).long()
            indices.append(y * GRID + x)
            across, along = (part[..., i] if on else 1 - part[..., i] for i, on in ((0, right), (1, down)))
            shares.append(across * along)
    return torch.stack(indices, dim=-1), torch.stack(shares, dim=-1)


def _places(logits: Tensor, cell: Tensor) -> Tensor:
    """(N, V, C, G*G) at (N, V, 5) -> (N, V, 5, C)."""
    return logits.transpose(2, 3).gather(2, cell[..., None].expand(-1, -1, -1, logits.shape[2]))


def trunk_of(model: nn.Module) -> Trunk:
    """The small CLIP's trunk inside an open_clip model."""
    trunk = model.visual.trunk  # type: ignore[union-attr]
    assert isinstance(trunk, Trunk)
    return trunk
