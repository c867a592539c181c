"""Any Gymnasium environment with Box spaces as a :class:`sims.types.VecEnv`.

The environments are stepped one after another and reset here, so the true successor of the last action is never lost
and a time limit is never mistaken for an end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from sims.errors import UserError, unknown_choice
from sims.types import ArraySpec, EnvSpec, TimeStep


class GymVecEnv:
    """B copies of ``gym.make(name)``. Observations are flattened to float32 in the group ``proprio``.

    Args:
        name: Gymnasium id, e.g. ``"HalfCheetah-v5"``.
        num_envs, seed: batch size; episode ``k`` of copy ``i`` is seeded from ``(seed, i, k)``.
        time_limit: actions per episode, default the environment's own (1000 where it has none).
        render: make the copies drawable with :meth:`render`.
        env_options: further keyword arguments for ``gym.make``.

    Raises:
        UserError: unknown id, a missing extra, spaces other than Box, an action without finite bounds.
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
        self.spec = _spec(name, self._envs[0])
        self._can_render = render
        self._low, self._high = np.array(self.spec.action.low), np.array(self.spec.action.high)
        self.reset(seed)

    def reset(self, seed: int) -> dict[str, Tensor]:
        """New episodes everywhere. Returns ``obs``."""
        self._seed, self._episode = int(seed), np.full(self.num_envs, -1)
        self._actions: list[list[np.ndarray]] = [[] for _ in self._envs]
        self._obs = np.stack([self._begin(i) for i in range(self.num_envs)])
        return self._groups(self._obs)

    def _begin(self, i: int) -> np.ndarray:
        self._episode[i] += 1
        self._actions[i] = []
        return self._start(i)

    def _start(self, i: int) -> np.ndarray:
        stream = np.random.SeedSequence([self._seed, i, int(self._episode[i])])
        return _flat(self._envs[i].reset(seed=int(stream.generate_state(1)[0]))[0])

    def _apply(self, i: int, action: np.ndarray) -> tuple[Any, ...]:
        space = self._envs[i].action_space
        return self._envs[i].step(action.reshape(space.shape or ()).astype(space.dtype))

    def step(self, action: Tensor) -> TimeStep:
        """One step of every copy with (B, A) actions, clipped to the bounds."""
        wanted = np.clip(action.detach().cpu().numpy(), self._low, self._high)
        successor, obs = self._obs.copy(), self._obs.copy()
        reward = np.zeros(self.num_envs, np.float32)
        flags = np.zeros((4, self.num_envs), dtype=bool)  # terminated, truncated, diverged, success
        for i in range(self.num_envs):
            self._actions[i].append(wanted[i].copy())
            row, value, terminated, truncated, info = self._apply(i, wanted[i])
            row = _flat(row)
            broken = not (np.isfinite(row).all() and np.isfinite(value))
            if broken:  # the last good observation stands in for a state that is none
                terminated, truncated, value = False, True, 0.0
            else:
                successor[i] = row
            reward[i] = value
            flags[:, i] = terminated, truncated and not terminated, broken, info.get("success", info.get("is_success"))
            obs[i] = self._begin(i) if terminated or truncated else successor[i]
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
        return {"proprio": torch.from_numpy(rows.copy())}

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


def _spec(name: str, env: gym.Env) -> EnvSpec:
    for kind, space in (("observation", env.observation_space), ("action", env.action_space)):
        if not isinstance(space, gym.spaces.Box):
            raise UserError(f"gym/{name} has a {type(space).__name__} {kind} space; only Box spaces are supported")
    seen, act = env.observation_space, env.action_space
    assert isinstance(seen, gym.spaces.Box)
    assert isinstance(act, gym.spaces.Box)
    low, high = act.low.astype(np.float64).ravel(), act.high.astype(np.float64).ravel()
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise UserError(
            f"gym/{name} has an action without finite bounds ({low.tolist()} .. {high.tolist()}); "
            "wrap it with gymnasium.wrappers.RescaleAction or register bounded limits"
        )
    limit = env.spec.max_episode_steps if env.spec else None
    step = getattr(env.unwrapped, "dt", None)
    rate = 1.0 / step if isinstance(step, float) and step > 0 else float(env.metadata.get("render_fps") or 1)
    return EnvSpec(
        task=f"gym/{name}",
        observation={"proprio": ArraySpec((int(np.prod(seen.shape)),))},
        action=ArraySpec((len(low),), low=tuple(low.tolist()), high=tuple(high.tolist())),
        control_hz=rate,
        episode_steps=int(limit or 1000),
    )


def _flat(row: Any) -> np.ndarray:
    return np.asarray(row, dtype=np.float32).reshape(-1)
