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
