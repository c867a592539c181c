"""Physics for many worlds of one model, in torch tensors: ``make_engine(name, model, num_worlds, substeps)``.

Every engine has the same face, so that one task code runs on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import mujoco
import torch
from torch import Tensor

from sims.errors import unknown_choice


class Engine(Protocol):
    """B worlds that step together. State and sensors always describe the same instant.

    Attributes:
        model: the nominal model; worlds may differ from it by :meth:`set_fields`.
        substeps: physics steps in one control step.
        device, dtype: of every tensor below.
        qpos, qvel: (B, nq), (B, nv).  sensors: (B, S).  mocap_pos: (B, 3 nmocap).  Views that follow every step.
    """

    model: mujoco.MjModel
    num_worlds: int
    substeps: int
    device: torch.device
    dtype: torch.dtype
    sensors: Tensor

    @property
    def qpos(self) -> Tensor: ...

    @property
    def qvel(self) -> Tensor: ...

    @property
    def mocap_pos(self) -> Tensor: ...

    def reset(self, ids: Tensor, qpos: Tensor, mocap_pos: Tensor, control: Tensor) -> None:
        """Put worlds ``ids`` (N,) int64 at rest in (N, nq) with (N, 3 nmocap) mocap positions and (N, nu) controls."""
        ...

    def step(self, control: Tensor) -> Tensor:
        """Advance by one control step with (B, nu) controls; returns (B,) bool, True where the physics failed.

        A failed world holds finite but meaningless numbers and must be reset; the others are not touched by it.
        """
        ...

    def set_fields(self, ids: Tensor, fields: Mapping[str, Tensor]) -> None:
        """Give worlds ``ids`` (N,) their own values (N, *shape) of fields of ``MjModel``, e.g. ``body_mass``."""
        ...

    def push(self, wrench: Tensor) -> None:
        """(B, nbody, 6) force (N) and torque (Nm) at each body's centre of mass, world frame, until the next call."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


ENGINES = ("mujoco", "warp")


def make_engine(
    name: str, model: mujoco.MjModel, num_worlds: int, substeps: int, threads: int = 1, device: str = "cpu"
) -> Engine:
    """``mujoco``: C threads, float64, on the CPU. ``warp``: MuJoCo Warp, float32, on ``device``."""
    if name == "mujoco":
        from sims.engines.mujoco import MujocoEngine

        return MujocoEngine(model, num_worlds, substeps, threads)
    if name == "warp":
        from sims.engines.warp import WarpEngine  # pyright: ignore[reportMissingImports]

        return WarpEngine(model, num_worlds, substeps, device)
    raise unknown_choice("engine", name, ENGINES)
