"""Frames of a batch of worlds: which steps draw, and the renderer, opened when first needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mujoco
import numpy as np
from torch import Tensor

from sims.errors import UserError


class Pictures:
    """Draws worlds of one model.

    Args:
        cameras: of the model.  observed: those drawn into the observation.
        size: pixels of a side.  every: only every so many steps draw, from the first on; between, frames stand.

    Attributes:
        ticks: observations since the reset, from -1 on.
    """

    def __init__(
        self, model: mujoco.MjModel, cameras: Sequence[str], observed: tuple[str, ...], size: int, every: int
    ) -> None:
        if every < 1:
            raise UserError(f"draw_every={every}: must be at least 1.")
        self.model, self.cameras, self.observed, self.size, self.every = model, cameras, observed, size, every
        self._renderer: Any = None
        self._opened = 0
        self.restart()

    def restart(self) -> None:
        self.ticks = -2  # the reset is tick -1, the first step is tick 0 and draws

    def look(self, last: Mapping[str, Tensor], draw: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The pixel groups of the next observation: drawn by ``draw(camera)``, or those of ``last``."""
        self.ticks += 1
        groups = {f"pixels/{camera}": camera for camera in self.observed}
        if self.ticks % self.every and all(group in last for group in groups):
            return {group: last[group] for group in groups}
        return {group: draw(camera) for group, camera in groups.items()}

    def draw(self, qpos: np.ndarray, mocap: np.ndarray, camera: str, size: int | None = None) -> np.ndarray:
        """(N, H, W, 3) uint8 of (N, nq) positions and (N, 3 nmocap) mocap positions."""
        renderer = self._open(size or self.size)
        return np.stack([renderer.render_state(q, m, (camera,))[0] for q, m in zip(qpos, mocap)])

    def _open(self, size: int) -> Any:
        if self._renderer is None or self._opened != size:
            from sims.rendering import SceneRenderer

            self.close()
            self._renderer, self._opened = SceneRenderer(self.model, self.cameras, size), size
        return self._renderer

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
