"""Running mean and variance of features, for worlds whose features are not scaled by hand."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class RunningNormalizer:
    """Float64 Welford merge; float32 sums drift and do not reproduce.

    ``update`` is called by the training loop alone, once per new row; evaluation never moves it.
    """

    def __init__(self, dim: int, device: torch.device | str = "cpu", enabled: bool = True) -> None:
        self.enabled = enabled
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.mean = torch.zeros(dim, dtype=torch.float64, device=device)
        self.m2 = torch.zeros(dim, dtype=torch.float64, device=device)  # sum of squared deviations
        self._refresh()

    def update(self, rows: Tensor, good: Tensor | None = None) -> None:
        """Add (..., F) rows; those with a non-finite element, or where ``good`` (...) is False, are left out."""
        if not self.enabled:
            return
        rows = rows.reshape(-1, rows.shape[-1]).double()  # (N, F)
        kept = torch.isfinite(rows).all(-1)
        kept = kept if good is None else kept & good.reshape(-1)
        kept, n = kept.unsqueeze(-1), kept.sum()
        mean = torch.where(kept, rows, 0.0).sum(0) / n.clamp(min=1)
        total, delta = self.count + n, mean - self.mean
        share = n / total.clamp(min=1)
        self.m2 += torch.where(kept, rows - mean, 0.0).square().sum(0) + delta.square() * self.count * share
        self.mean += delta * share
        self.count = total
        self._refresh()

    def __call__(self, rows: Tensor) -> Tensor:
        """(..., F) -> (..., F) float32, clipped to +-10; fewer columns than F are taken for the first ones."""
        if not self.enabled:
            return rows
        size = rows.shape[-1]
        return ((rows - self.shift[:size]) * self.scale[:size]).clamp(-10, 10)

    def _refresh(self) -> None:
        variance = torch.where(self.count > 1, self.m2 / self.count.clamp(min=1), torch.ones_like(self.m2))
        self.shift = self.mean.float()
        self.scale = (variance + 1e-8).rsqrt().clamp(max=1e3).float()  # a constant feature stays near 0

    def state_dict(self) -> dict[str, Tensor]:
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.count, self.mean, self.m2 = (state[k].to(self.mean.device).clone() for k in ("count", "mean", "m2"))
        self._refresh()
