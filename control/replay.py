"""A ring of one-step transitions; n-step returns are formed when a batch is drawn.

One packed row per transition, ``[obs F | action A | reward | terminated | truncated | next_obs F]``, so that a batch is
one gather. Time runs along the first axis and environments along the second: (capacity, B, W). A row never changes once
it is written, so saved rows stay true. Nothing here asks the host for a number.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from control.types import Transition

STAND_IN = 2.0  # in the column ``truncated``: no n-step window goes on into this row, nor beyond it


class Replay:
    """Ring of ``capacity`` time steps for ``num_envs`` environments.

    Stores features (F,) and unit-box actions (A,). A transition keeps its true successor, so nothing is ever read
    across an episode boundary.

    Attributes:
        total: time steps ever added; step ``t`` lies in slot ``t % capacity``.
        filled: time steps held, the newest of them.
    """

    def __init__(
        self, capacity: int, num_envs: int, obs_dim: int, act_dim: int, device: torch.device | str = "cpu"
    ) -> None:
        self.capacity, self.num_envs = max(1, capacity), num_envs
        self.obs_dim, self.act_dim = obs_dim, act_dim
        width = 2 * obs_dim + act_dim + 3
        self.rows = torch.empty(self.capacity, num_envs, width, device=device)  # pages are touched when written
        self.total, self.filled = 0, 0

    def __len__(self) -> int:
        return self.filled * self.num_envs

    def add(
        self, obs: Tensor, action: Tensor, reward: Tensor, terminated: Tensor, truncated: Tensor, next_obs: Tensor
    ) -> Tensor:
        """Append (T, B, ...) in time order: features, unit actions, rewards, flags, true successors.

        Returns:
            (T, B) bool, False where a number was not finite: a finite row stands in for such a one.
        """
        flags = [x.unsqueeze(-1).to(obs.dtype) for x in (reward, terminated, truncated)]
        rows = torch.cat([obs, action, *flags, next_obs], dim=-1).to(self.rows)  # (T, B, W)
        good = torch.isfinite(rows).all(-1)  # (T, B)
        rows = torch.where(good.unsqueeze(-1), rows, self._stand_in(rows, good))
        self.total += max(0, rows.shape[0] - self.capacity)  # these would be overwritten at once
        self._write(rows[-self.capacity :])
        return good

    def _stand_in(self, rows: Tensor, good: Tensor) -> Tensor:
        """(1, W) the first finite row of a block; without one, the row before it."""
        width = rows.shape[-1]
        first = good.flatten().int().argmax().view(1)
        before = self.rows[(self.total - 1) % self.capacity, :1] if self.filled else rows.new_zeros(1, width)
        row = torch.where(good.any(), rows.view(-1, width).index_select(0, first), before)
        row[:, self.obs_dim + self.act_dim + 2] = STAND_IN
        return row

    def _write(self, rows: Tensor) -> None:
        at = self.total % self.capacity
        head = rows[: self.capacity - at]
        self.rows[at : at + head.shape[0]] = head
        self.rows[: rows.shape[0] - head.shape[0]] = rows[head.shape[0] :]
        self.total += rows.shape[0]
        self.filled = min(self.filled + rows.shape[0], self.capacity)

    def sample(self, n: int, gamma: float, n_step: int, generator: torch.Generator) -> Transition:
        """Draw ``n`` transitions uniformly, each summed over up to ``n_step`` rewards."""
        index = torch.randint(len(self), (n,), generator=generator, device=self.rows.device)
        return self.gather(index, gamma, n_step)

    def gather(self, index: Tensor, gamma: float, n_step: int) -> Transition:
        """Transitions that start at flat ages ``index`` (0 = oldest step of environment 0, then environment 1, ...).

        The sum runs over k <= n_step rewards and stops early at a termination, a truncation, or the write pointer;
        ``discount = gamma^k (1 - terminated)`` and ``next_obs`` is the successor of the last step summed.
        """
        f, a = self.obs_dim, self.act_dim
        rows = self.rows.view(self.capacity * self.num_envs, -1)
        if n_step == 1:
            batch = rows.index_select(0, self._slots(index))
            reward, next_obs = batch[:, f + a], batch[:, f + a + 3 :]
            return Transition(batch[:, :f], batch[:, f : f + a], reward, gamma * (1 - batch[:, f + a + 1]), next_obs)
        age = torch.arange(n_step, device=index.device).unsqueeze(1) * self.num_envs + index  # (n, N)
        batch = rows.index_select(0, self._slots(age.clamp(max=len(self) - 1)).flatten())  # (n N, W)
        reward, terminated, truncated = batch[:, f + a : f + a + 3].T.reshape(3, n_step, -1)  # (n, N) each
        going = self._going(age, terminated, truncated)
        powers = gamma ** torch.arange(n_step + 1, device=index.device)
        k = going.sum(0)  # (N,) 1 to n
        last = (k - 1) * len(index) + torch.arange(len(index), device=index.device)
        next_obs = batch[:, f + a + 3 :].index_select(0, last)
        discount = powers[k] * (1 - terminated.flatten()[last])
        first = batch[: len(index)]
        total = (reward * going * powers[:-1, None]).sum(0)
        return Transition(first[:, :f], first[:, f : f + a], total, discount, next_obs)

    def _going(self, age: Tensor, terminated: Tensor, truncated: Tensor) -> Tensor:
        """(n, N) 1 for the steps that a window sums, 0 from the first one that it may not go on into."""
        enter = (age < len(self)) & (truncated != STAND_IN)
        enter[1:] &= terminated[:-1] + truncated[:-1] == 0
        enter[0] = True
        return enter.int().cumprod(0)

    def _slots(self, ages: Tensor) -> Tensor:
        """Flat ages -> flat places in ``rows``."""
        if self.total == self.filled:  # nothing was overwritten yet
            return ages
        return (ages + (self.total - self.filled) * self.num_envs) % (self.capacity * self.num_envs)

    def slice(self, start: int, end: int) -> Tensor:
        """(end - start, B, W) rows of the time steps ``start`` to ``end`` of ``total``, which must still be held."""
        first, length = start % self.capacity, end - start
        head = self.rows[first : first + length]
        return torch.cat([head, self.rows[: length - head.shape[0]]])

    def fill(self, blocks: Iterable[tuple[int, Tensor]], total: int, filled: int) -> None:
        """Replace the content by the newest ``filled`` of ``total`` time steps.

        Args:
            blocks: (first time step, (T, B, W) rows), in order, which together hold these steps or more.
        """
        oldest = total - min(filled, self.capacity)
        self.total, self.filled = oldest, 0
        for start, rows in blocks:
            self._write(rows[max(0, self.total - start) :].to(self.rows))
        assert self.total == total, f"{self.total} time steps restored of {total}"


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
