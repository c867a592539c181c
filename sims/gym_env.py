"""Any Gymnasium environment with Box spaces (or a Dict of Boxes to observe) as a :class:`sims.types.VecEnv`.

The environments are stepped one after another and reset here, so the true successor of the last action is never lost
and a time limit is never mistaken for an end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from sims.errors import UserError, unknown_choice
from sims.types import ArraySpec, EnvSpec, TimeStep

BAD_STARTS = 5  # resets in a row that may give nothing finite
UNBOUNDED = 1e9  # bounds from here on are stand-ins for infinity: no machine has them, and float32 cannot span them
_RESERVED = ("pixels/", "instruction")  # groups with a meaning of their own, which features leave out


class GymVecEnv:
    """B copies of ``gym.make(name)``. Observations are flattened to float32.

    A Box is the group ``proprio``; each Box of a Dict is a group of its own name (``privileged`` reaches critics only).
    A copy that is given or returns a number that is not finite is reset: its step counts as ``diverged``, with reward 0
    and the last good observation as successor.

    Args:
        name: Gymnasium id, e.g. ``"HalfCheetah-v5"``.
        num_envs, seed: batch size; episode ``k`` of copy ``i`` is seeded from ``(seed, i, k)``.
        time_limit: actions per episode, default the environment's own; where it has none, 1000 are enforced here.
        render: make the copies drawable with :meth:`render`.
        env_options: further keyword arguments for ``gym.make``.

    Raises:
        UserError: unknown id, a missing extra, other spaces, an action that is whole-numbered, unbounded or empty.
    """

    def __init__(
        self,
        name: str,
        num_envs: int,
        seed: int = 0,
        *,
        time_limit: int | None = None,
        render: bool = False,
        env_options: Mapping[str, Any] | None = None,
    ):
        options: dict[str, Any] = dict(env_options or {})
        if time_limit is not None:
            options["max_episode_steps"] = time_limit
        if render:
            options["render_mode"] = "rgb_array"
        self._envs = [_make(name, options) for _ in range(num_envs)]
        self.num_envs, self.device, self.diverged = num_envs, torch.device("cpu"), 0
        self._datas = [_mujoco_data(env) for env in self._envs]
        self._boxes = _observed(name, self._envs[0].observation_space)
        ends = np.cumsum([0, *(int(np.prod(box.shape)) for box in self._boxes.values())])
        self._parts = {name: slice(a, b) for name, a, b in zip(self._boxes, ends[:-1], ends[1:])}
        self.spec = _spec(name, self._envs[0], self._boxes)
        space = self._envs[0].action_space
        self._can_render, self._shape, self._dtype = render, space.shape or (), space.dtype
        self._low, self._high = np.array(self.spec.action.low), np.array(self.spec.action.high)
        self.reset(seed)

    def reset(self, seed: int) -> dict[str, Tensor]:
        """New episodes everywhere. Returns ``obs``."""
        self._seed, self._episode = int(seed), np.full(self.num_envs, -1)
        self._actions: list[list[np.ndarray]] = [[] for _ in self._envs]
        self._obs = np.stack([self._begin(i) for i in range(self.num_envs)])
        return self._groups(self._obs)

    def _begin(self, i: int) -> np.ndarray:
        for _ in range(BAD_STARTS):
            self._episode[i] += 1
            self._actions[i] = []
            row = self._start(i)
            if np.isfinite(row).all():
                return row
            self.diverged += 1
        raise UserError(
            f"{self.spec.task}: {BAD_STARTS} resets in a row gave an observation that is not finite; the last was "
            f"{row.tolist()}. Check the environment's reset()."
        )

    def _start(self, i: int) -> np.ndarray:
        stream = np.random.SeedSequence([self._seed, i, int(self._episode[i])])
        return self._row(self._envs[i].reset(seed=int(stream.generate_state(1)[0]))[0])

    def _row(self, seen: Any) -> np.ndarray:
        """One observation -> (F,) float32, the groups one after another."""
        if not isinstance(seen, Mapping):
            return _flat(seen)
        return np.concatenate([_flat(seen[name]) for name in self._boxes])

    def _apply(self, i: int, action: np.ndarray) -> tuple[Any, ...]:
        return self._envs[i].step(action.reshape(self._shape).astype(self._dtype))

    def _clock(self, i: int) -> float:
        """Simulated seconds; nan, which compares with nothing, where MuJoCo does not run the world."""
        return math.nan if self._datas[i] is None else self._datas[i].time

    def _advance(self, i: int, action: np.ndarray) -> tuple[np.ndarray, float, tuple[bool, ...]] | None:
        """Observation, reward and (terminated, truncated, success); None where one is not finite."""
        self._actions[i].append(action.copy())
        before = self._clock(i)
        seen, reward, terminated, truncated, info = self._apply(i, action)
        if self._clock(i) <= before and np.any(self._datas[i].warning.number):
            return None  # MuJoCo met a state that is none, put its world back to the start and went on in silence
        row, value = self._row(seen), float(np.float32(reward))
        if not (math.isfinite(value) and np.isfinite(row).all()):
            return None
        truncated = (truncated or len(self._actions[i]) >= self.spec.episode_steps) and not terminated
        return row, value, (bool(terminated), truncated, bool(info.get("success", info.get("is_success"))))

    def step(self, action: Tensor) -> TimeStep:
        """One step of every copy with (B, A) actions, clipped to the bounds."""
        wanted = np.clip(action.detach().cpu().numpy(), self._low, self._high)
        sound: Any = np.isfinite(wanted).all(axis=1)
        successor, obs = self._obs.copy(), self._obs.copy()
        reward = np.zeros(self.num_envs, np.float32)
        flags = np.zeros((4, self.num_envs), dtype=bool)  # terminated, truncated, diverged, success
        for i in range(self.num_envs):
            moved = self._advance(i, wanted[i]) if sound[i] else None
            if moved is None:  # the last good observation stands in for a state that is none
                flags[1:3, i] = True
            else:
                successor[i], reward[i], (flags[0, i], flags[1, i], flags[3, i]) = moved
            obs[i] = self._begin(i) if flags[0, i] or flags[1, i] else successor[i]
        self.diverged += int(flags[2].sum())
        self._obs = obs
        return self._time_step(obs, successor, reward, flags)

    def _time_step(self, obs: np.ndarray, successor: np.ndarray, reward: np.ndarray, flags: np.ndarray) -> TimeStep:
        numbers = torch.from_numpy(flags[2:].astype(np.float32))
        return TimeStep(
            obs=self._groups(obs),
            next_obs=self._groups(successor),
            reward=torch.from_numpy(reward),
            terminated=torch.from_numpy(flags[0].copy()),
            truncated=torch.from_numpy(flags[1].copy()),
            metrics={"reward/env": torch.from_numpy(reward.copy()), "diverged": numbers[0], "success": numbers[1]},
        )

    def _groups(self, rows: np.ndarray) -> dict[str, Tensor]:
        return {name: torch.from_numpy(rows[:, part].copy()) for name, part in self._parts.items()}

    def render(self, ids: Sequence[int], camera: str = "") -> Tensor:
        """(N, H, W, 3) uint8 of the named copies; Gymnasium has one camera, so ``camera`` is ignored."""
        if not self._can_render:
            raise UserError(f"{self.spec.task} was made without pictures; make it with render=True")
        return torch.from_numpy(np.stack([np.asarray(self._envs[i].render()) for i in ids]))

    def state_dict(self) -> dict[str, Any]:
        """Seeds and the actions of the running episodes, from which they are replayed (for deterministic worlds)."""
        size = len(self._low)
        history = [np.array(a, dtype=np.float64).reshape(-1, size) for a in self._actions]
        return {
            "seed": self._seed,
            "diverged": self.diverged,
            "episode": self._episode.copy(),
            "lengths": np.array([len(a) for a in history]),
            "actions": np.concatenate(history),
            "obs": self._obs.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Replay the running episodes; returns the ``obs`` that was current."""
        if len(state["lengths"]) != self.num_envs:
            raise UserError(f"the saved state has {len(state['lengths'])} worlds, this environment {self.num_envs}")
        self._seed, self.diverged = int(state["seed"]), int(state["diverged"])
        self._episode, self._obs = np.array(state["episode"]), np.array(state["obs"], dtype=np.float32)
        parts = np.split(np.asarray(state["actions"]), np.cumsum(np.asarray(state["lengths"]))[:-1])
        self._actions = [list(part) for part in parts]
        for i, actions in enumerate(self._actions):
            self._start(i)
            for action in actions:
                self._apply(i, action)
        return self._groups(self._obs)

    def close(self) -> None:
        for env in self._envs:
            env.close()


def _make(name: str, options: Mapping[str, Any]) -> gym.Env:
    if name not in gym.registry:
        raise unknown_choice("Gymnasium environment", name, gym.registry)
    try:
        return gym.make(name, **options)
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        raise UserError(f"gym/{name} needs a package that is not installed: {error}") from error


def _mujoco_data(env: gym.Env) -> Any:
    """The simulator's state of an environment on MuJoCo's own bindings, else None."""
    data = getattr(env.unwrapped, "data", None)
    return data if hasattr(data, "time") and hasattr(data, "warning") else None


def _observed(name: str, space: gym.Space) -> dict[str, gym.spaces.Box]:
    """Group -> box: one group, or those of a Dict."""
    boxes = dict(space.spaces) if isinstance(space, gym.spaces.Dict) else {"proprio": space}
    for group, box in boxes.items():
        if not isinstance(box, gym.spaces.Box) or group.startswith(_RESERVED):
            where = f" '{group}'" if isinstance(space, gym.spaces.Dict) else ""
            raise UserError(
                f"gym/{name} has a {type(box).__name__} observation space{where}; only a Box, or a flat Dict of Boxes "
                f"with names other than {', '.join(_RESERVED)}, is supported. Register the environment wrapped in "
                "gymnasium.wrappers.FlattenObservation."
            )
    return boxes  # type: ignore[return-value]


def _bounds(name: str, space: gym.Space) -> tuple[np.ndarray, np.ndarray]:
    """Finite bounds (A,) of an action, float64."""
    advice = "Register the environment wrapped in gymnasium.wrappers.TransformAction with "
    if not isinstance(space, gym.spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        kind = f"{space.dtype} Box" if isinstance(space, gym.spaces.Box) else type(space).__name__
        raise UserError(f"gym/{name} has a {kind} action space; only Boxes of real numbers are supported. "
                        f"{advice}a float32 Box, rounded in its function.")  # fmt: skip
    low, high = space.low.astype(np.float64).ravel(), space.high.astype(np.float64).ravel()
    found = f"({low.tolist()} .. {high.tolist()})"
    if not ((np.abs(low) < UNBOUNDED) & (np.abs(high) < UNBOUNDED)).all():  # also false for nan
        raise UserError(f"gym/{name} has an action without finite bounds {found}. {advice}a Box of the bounds "
                        "that the machine has; exploration covers all of it.")  # fmt: skip
    if not (low < high).all() or not len(low):
        raise UserError(f"gym/{name} has an empty action range {found}. {advice}a Box of the elements "
                        "that can move.")  # fmt: skip
    return low, high


def _spec(name: str, env: gym.Env, boxes: Mapping[str, gym.spaces.Box]) -> EnvSpec:
    low, high = _bounds(name, env.action_space)
    limit = env.spec.max_episode_steps if env.spec else None
    step = getattr(env.unwrapped, "dt", None)
    rate = 1.0 / step if isinstance(step, float) and step > 0 else float(env.metadata.get("render_fps") or 1)
    return EnvSpec(
        task=f"gym/{name}",
        observation={group: ArraySpec((int(np.prod(box.shape)),)) for group, box in boxes.items()},
        action=ArraySpec((len(low),), low=tuple(low.tolist()), high=tuple(high.tolist())),
        control_hz=rate,
        episode_steps=int(limit or 1000),
    )


def _flat(row: Any) -> np.ndarray:
    return np.asarray(row, dtype=np.float32).reshape(-1)
