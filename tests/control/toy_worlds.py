"""Small torch worlds: a point to be driven to the origin, and a one-step bandit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sims.types import ArraySpec, EnvSpec, TimeStep


class Point:
    """A point in the plane; the action moves it by at most 0.2 (units of the box: low -0.1, high 0.3 on the 2nd axis).

    Success within 0.1 of the origin. Ends by truncation after ``limit`` steps, or terminates outside radius 2.
    """

    def __init__(self, num_envs: int = 4, seed: int = 0, limit: int = 20) -> None:
        self.num_envs, self.limit, self.device = num_envs, limit, torch.device("cpu")
        self.spec = EnvSpec(
            task="toy/point",
            observation={"proprio": ArraySpec((2,))},
            action=ArraySpec((2,), names=("x", "y"), low=(-0.2, -0.1), high=(0.2, 0.3)),
            control_hz=10.0,
            episode_steps=limit,
        )
        self.reset(seed)

    def reset(self, seed: int) -> Mapping[str, Tensor]:
        self.generator = torch.Generator().manual_seed(seed)
        self.where, self.age = self._start(), torch.zeros(self.num_envs)
        return {"proprio": self.where.clone()}

    def _start(self) -> Tensor:
        return torch.rand(self.num_envs, 2, generator=self.generator) * 2 - 1

    def step(self, action: Tensor) -> TimeStep:
        low, high = torch.tensor(self.spec.action.low), torch.tensor(self.spec.action.high)
        self.where = self.where + action.clamp(low, high)
        self.age = self.age + 1
        distance = self.where.norm(dim=-1)
        terminated, truncated = distance > 2, self.age >= self.limit
        next_obs = {"proprio": self.where.clone()}
        done = terminated | truncated
        self.where = torch.where(done.unsqueeze(-1), self._start(), self.where)
        self.age = torch.where(done, 0.0, self.age)
        metrics = {"success": (distance < 0.1).float(), "reward/distance": -distance}
        obs = {"proprio": self.where.clone()}
        return TimeStep(obs, next_obs, -distance, terminated, truncated & ~terminated, metrics)

    def render(self, ids: Sequence[int], camera: str) -> Tensor:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {"where": self.where.clone(), "age": self.age.clone(), "rng": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        self.where, self.age = state["where"].clone(), state["age"].clone()
        self.generator.set_state(state["rng"])
        return {"proprio": self.where.clone()}

    def close(self) -> None:
        pass


def proprio(obs: Mapping[str, Tensor]) -> Tensor:
    return obs["proprio"]


class Ledger:
    """Every number of an observation says where it is from: [environment, episode, step within it, start, 0 or 1].

    Reward 1 a step. Environment ``i`` terminates after ``end + i`` steps and is truncated after ``limit``; the last
    element of the observation says that it terminated. Actions move nothing.

    Args:
        box: low and high of the two actions.
        dtype: of observations and rewards.

    Attributes:
        bad: {(environment, step of the world): what}: ``"obs"`` and ``"reward"`` return nan once, ``"diverged"`` is
            what adapters make of a world that broke down: last observation, reward 0, truncated, a new episode.
        actions: (B, 2) physical actions of every step, and ``seen``: the observation that was current at that step.
    """

    def __init__(
        self, num_envs: int = 3, seed: int = 0, limit: int = 5, end: int = 100, dtype: torch.dtype = torch.float32,
        box: tuple[tuple[float, ...], tuple[float, ...]] = ((-1.0, -1.0), (1.0, 1.0)),
    ) -> None:  # fmt: skip
        self.num_envs, self.limit, self.device = num_envs, limit, torch.device("cpu")
        self.ends, self.dtype, self.bad = end + torch.arange(num_envs), dtype, {}
        self.spec = EnvSpec(
            task="toy/ledger", observation={"proprio": ArraySpec((5,))}, control_hz=10.0, episode_steps=limit,
            action=ArraySpec((2,), names=("x", "y"), low=box[0], high=box[1]),
        )  # fmt: skip
        self.actions: list[Tensor] = []
        self.seen: list[Tensor] = []
        self.reset(seed)

    def reset(self, seed: int) -> Mapping[str, Tensor]:
        self.generator = torch.Generator().manual_seed(seed)
        self.age = torch.zeros(self.num_envs, dtype=torch.int64)
        self.episode, self.count = self.age.clone(), 0
        self.start = torch.rand(self.num_envs, generator=self.generator)
        self.current = self._rows(torch.zeros(self.num_envs))
        return {"proprio": self.current.clone()}

    def _rows(self, over: Tensor) -> Tensor:
        names = torch.arange(self.num_envs)
        return torch.stack([names, self.episode, self.age, self.start, over], -1).to(self.dtype)

    def step(self, action: Tensor) -> TimeStep:
        self.actions.append(action.clone())
        self.seen.append(self.current.clone())
        faults = {what: self._where(what) for what in ("obs", "reward", "diverged")}
        before, self.age, self.count = self.current, self.age + 1, self.count + 1
        terminated = (self.age >= self.ends) & ~faults["diverged"]
        truncated = ((self.age >= self.limit) & ~terminated) | faults["diverged"]
        successor = torch.where(faults["diverged"].unsqueeze(-1), before, self._rows(terminated.float()))
        reward = torch.where(faults["diverged"], 0.0, torch.ones(self.num_envs, dtype=self.dtype))
        done = terminated | truncated
        self.episode, self.age = self.episode + done, torch.where(done, 0, self.age)
        self.start = torch.where(done, torch.rand(self.num_envs, generator=self.generator), self.start)
        self.current = torch.where(done.unsqueeze(-1), self._rows(torch.zeros(self.num_envs)), successor)
        metrics = {"success": terminated.float(), "diverged": faults["diverged"].float(), "reward/one": reward.float()}
        obs, next_obs = self.current.clone(), successor.clone()
        next_obs[faults["obs"]] = torch.nan
        obs[faults["obs"] & ~done] = torch.nan
        return TimeStep({"proprio": obs}, {"proprio": next_obs}, reward.masked_fill(faults["reward"], torch.nan),
                        terminated, truncated, metrics)  # fmt: skip

    def _where(self, what: str) -> Tensor:
        return torch.tensor([self.bad.get((i, self.count)) == what for i in range(self.num_envs)])

    def render(self, ids: Sequence[int], camera: str) -> Tensor:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        names = ("age", "episode", "start", "current")
        return {**{n: getattr(self, n).clone() for n in names}, "count": self.count, "rng": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        for name in ("age", "episode", "start", "current"):
            setattr(self, name, state[name].clone())
        self.count = state["count"]
        self.generator.set_state(state["rng"])
        return {"proprio": self.current.clone()}

    def close(self) -> None:
        pass
