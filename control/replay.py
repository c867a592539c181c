"""A ring of one-step transitions; n-step returns are formed when a batch is drawn.

One packed row per transition, ``[obs F | action A | reward | terminated | truncated | next_obs F]``, so that a batch is
one gather. Time runs along the first axis and environments along the second: (capacity, B, W).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from control.types import Transition


class Replay:
    """Ring of ``capacity`` time steps for ``num_envs`` environments.

    Stores features (F,) and unit-box actions (A,). A transition keeps its true successor, so nothing is ever read
    across an episode boundary.
    """

    def __init__(
        self, capacity: int, num_envs: int, obs_dim: int, act_dim: int, device: torch.device | str = "cpu"
    ) -> None:
        self.capacity, self.num_envs = max(1, capacity), num_envs
        self.obs_dim, self.act_dim = obs_dim, act_dim
        width = 2 * obs_dim + act_dim + 3
        self.rows = torch.empty(self.capacity, num_envs, width, device=device)  # pages are touched when written
        self.pos = 0  # next time index to write
        self.filled = 0  # time steps held
        self.total = 0  # time steps ever added
        self.excluded = 0  # transitions left out because they were not finite

    def __len__(self) -> int:
        return self.filled * self.num_envs

    def add(
        self, obs: Tensor, action: Tensor, reward: Tensor, terminated: Tensor, truncated: Tensor, next_obs: Tensor
    ) -> None:
        """Append (T, B, ...) in time order: features, unit actions, rewards, flags, true successors."""
        flags = [x.unsqueeze(-1).to(obs.dtype) for x in (reward, terminated, truncated)]
        rows = torch.cat([obs, action, *flags, next_obs], dim=-1)  # (T, B, W)
        for row in rows.split(self.capacity):
            index = (self.pos + torch.arange(row.shape[0], device=row.device)) % self.capacity
            self.rows[index] = row.to(self.rows)
            self.pos = (self.pos + row.shape[0]) % self.capacity
            self.filled = min(self.filled + row.shape[0], self.capacity)
        self.total += rows.shape[0]
        self._exclude_non_finite(rows.shape[0])

    def sample(self, n: int, gamma: float, n_step: int, generator: torch.Generator) -> Transition:
        """Draw ``n`` transitions uniformly, each summed over up to ``n_step`` rewards."""
        index = torch.randint(len(self), (n,), generator=generator, device=self.rows.device)
        return self.gather(index, gamma, n_step)

    def gather(self, index: Tensor, gamma: float, n_step: int) -> Transition:
        """Transitions that start at flat ages ``index`` (0 = oldest step of environment 0, then environment 1, ...).

        The sum runs over k <= n_step rewards and stops early at a termination, a truncation, or the write pointer;
        ``discount = gamma^k (1 - terminated)`` and ``next_obs`` is the successor of the last step summed.
        """
        first = self._rows(index)
        f, a = self.obs_dim, self.act_dim
        reward, terminated, truncated = first[:, f + a], first[:, f + a + 1], first[:, f + a + 2]
        discount = torch.full_like(reward, gamma)
        next_obs = first[:, f + a + 3 :]
        if n_step > 1:
            reward, discount = reward.clone(), discount.clone()
        for k in range(1, n_step):
            age = index + k * self.num_envs
            go_on = (terminated + truncated == 0) & (age < len(self))
            row = self._rows(age.clamp(max=len(self) - 1))
            reward = reward + go_on * discount * row[:, f + a]
            discount = torch.where(go_on, discount * gamma, discount)
            next_obs = torch.where(go_on.unsqueeze(-1), row[:, f + a + 3 :], next_obs)
            # a window that stopped keeps a set flag, so it never goes on again
            terminated = torch.where(go_on, row[:, f + a + 1], terminated)
            truncated = torch.where(go_on, row[:, f + a + 2], torch.maximum(truncated, 1 - terminated))
        return Transition(first[:, :f], first[:, f : f + a], reward, discount * (1 - terminated), next_obs)

    def _rows(self, age: Tensor) -> Tensor:
        """(N,) ages -> (N, W)."""
        oldest = (self.pos - self.filled) * self.num_envs
        size = self.capacity * self.num_envs
        return self.rows.view(size, -1).index_select(0, (age + oldest) % size)

    def _exclude_non_finite(self, steps: int) -> None:
        """Replace rows with a non-finite number by a finite row of the same block, and cut n-step windows around it."""
        index = (self.pos - min(steps, self.capacity) + torch.arange(min(steps, self.capacity))) % self.capacity
        block = self.rows[index.to(self.rows.device)]  # (T, B, W)
        good = torch.isfinite(block).all(-1)
        if good.all():
            return
        if not good.any():
            raise FloatingPointError("every environment returned non-finite observations or rewards")
        bad_t, bad_b = torch.nonzero(~good, as_tuple=True)
        block[bad_t, bad_b] = block[good][0]
        cut = self.obs_dim + self.act_dim + 2
        block[bad_t, bad_b, cut] = 1.0
        self.rows[index.to(self.rows.device)] = block
        self.rows[(index[bad_t.cpu()] - 1) % self.capacity, bad_b, cut] = 1.0
        self.excluded += bad_t.numel()

    def slice(self, start: int, end: int) -> Tensor:
        """(end - start, B, W) rows of absolute time steps, counted from the first ever added and still held."""
        ages = torch.arange(start, end, device=self.rows.device) - (self.total - self.filled)
        return self.rows[(self.pos - self.filled + ages) % self.capacity]

    def fill(self, rows: Tensor, total: int) -> None:
        """Replace the content by (T, B, W) rows, the newest of ``total`` ever added."""
        self.filled, self.total = rows.shape[0], total
        self.pos = self.filled % self.capacity
        self.rows[: self.filled] = rows.to(self.rows)

    def state_dict(self) -> dict[str, Any]:
        """Rows in time order, oldest first: only what is filled. A long run is kept by ``replay_store`` instead."""
        return {"rows": self.slice(self.total - self.filled, self.total), "excluded": self.excluded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.fill(state["rows"], state["rows"].shape[0])
        self.excluded = state["excluded"]


def sample_mixed(
    online: Replay, prior: Replay | None, share: float, n: int, gamma: float, n_step: int, generator: torch.Generator
) -> Transition:
    """A batch of ``n`` with ``share`` of it from prior data (RLPD: Ball et al., arXiv 2302.02948)."""
    m = round(n * share) if prior is not None and len(prior) else 0
    parts = [online.sample(n - m, gamma, n_step, generator)]
    if m and prior is not None:
        parts.append(prior.sample(m, gamma, n_step, generator))
    if len(parts) == 1:
        return parts[0]
    return Transition(*[torch.cat([getattr(p, k) for p in parts]) for k in Transition.__dataclass_fields__])
