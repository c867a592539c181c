"""The vocabulary every package shares. A leaf: imports no sibling and no torch at import time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class ArraySpec:
    """One array of an observation or action, without the batch axis.

    Attributes:
        shape: shape of one environment's row, e.g. ``(6,)`` or ``(64, 64, 3)``.
        dtype: numpy name, e.g. ``"float32"``, ``"uint8"``, ``"int64"``.
        names: one name per element for vectors (joint names for actions), may be empty.
        unit: unit of the elements, e.g. ``"rad"``; ``""`` where mixed or dimensionless.
        low, high: bounds per element (flattened), empty where unbounded.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    names: tuple[str, ...] = ()
    unit: str = ""
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True)
class EnvSpec:
    """What a policy must know of a world.

    Attributes:
        task: name of the world or task, e.g. ``"tabletop/lift"``.
        observation: group name -> array. Groups: ``proprio`` (what encoders measure), ``objects`` (what a tracker on
            the robot measures), ``goal`` (which object; specialists only), ``privileged`` (simulator only: critics and
            rewards, never exported), ``pixels/<camera>`` uint8 (H, W, 3), ``instruction`` int64 () index into
            ``instructions``.
        action: shape (A,), physical units, finite bounds, joint names in order.
        action_kind: meaning of an action: ``"joint_position_delta"`` (change of the joint position *target* per step,
            relative to the previous target), or ``"native"`` for other people's worlds.
        control_hz: actions per second.
        episode_steps: time limit in actions.
        instructions: the sentences that ``instruction`` indexes.
        features: name in ``sims.features.FEATURES`` of the function that turns the groups into one flat input.
        has_success: whether ``metrics["success"]`` means something; else only the return tells how good a policy is.
    """

    task: str
    observation: Mapping[str, ArraySpec]
    action: ArraySpec
    control_hz: float
    episode_steps: int
    action_kind: str = "native"
    instructions: tuple[str, ...] = ()
    features: str = "concat"
    has_success: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, full precision; inverse of :meth:`from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EnvSpec:
        """Rebuild a spec written by :meth:`to_json` (JSON turns tuples into lists)."""
        fields = dict(data)
        fields["observation"] = {k: _array_spec(v) for k, v in data["observation"].items()}
        fields["action"] = _array_spec(data["action"])
        fields["instructions"] = tuple(data.get("instructions", ()))
        return cls(**fields)


def _array_spec(data: Mapping[str, Any]) -> ArraySpec:
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    return ArraySpec(**fields)


@dataclass(frozen=True)
class TimeStep:
    """What one ``step`` returns for B environments.

    Attributes:
        obs: (B, ...) per group: what the policy acts on next, *after* any auto-reset.
        next_obs: (B, ...) per group: the true successor of the action, *before* any auto-reset.
        reward: (B,) float32.
        terminated: (B,) bool: the task ended, do not bootstrap.
        truncated: (B,) bool: time limit, bootstrap from ``next_obs``.
        metrics: (B,) tensors for logging: ``success`` (bool as float), ``reward/<term>``.
    """

    obs: Mapping[str, Tensor]
    next_obs: Mapping[str, Tensor]
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class VecEnv(Protocol):
    """A batch of worlds that step together. Torch tensors on ``device``; auto-reset inside the same step."""

    spec: EnvSpec
    num_envs: int
    device: torch.device

    def reset(self, seed: int) -> Mapping[str, Tensor]:
        """Start a new episode everywhere; environment ``i`` draws from the stream ``(seed, i)``. Returns ``obs``."""
        ...

    def step(self, action: Tensor) -> TimeStep:
        """Apply (B, A) actions in the units of ``spec.action``; values outside the bounds are clipped."""
        ...

    def render(self, ids: Sequence[int], camera: str) -> Tensor:
        """(N, H, W, 3) uint8 frames of the named environments."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on bit-exactly; tensors, numpy arrays, numbers, strings, dicts and lists only."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Restore :meth:`state_dict`; returns the ``obs`` that was current."""
        ...

    def close(self) -> None: ...
