"""The generalist: an MLP steered by a sentence through FiLM, predicting a chunk of joint targets at once.

FiLM (Perez et al., 1709.07871): every hidden layer is scaled and shifted by the sentence. Chunks (Zhao et al.,
2304.13705) are H future joint targets *relative to the target commanded now*, which did better than steps or absolute
targets in trials; of these, a few are executed before the policy looks again.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sims.features import FEATURES

FEATURE_CLIP = 8.0  # standard deviations; what lies beyond was never seen
NEAR = 5.0  # features hold 10 x distance in m: tanh(5 f) resolves the last 2 cm, which decide a press or a grasp


class FilmMLP(nn.Module):
    """(B, F) normalised features, (B, E) sentence vector -> (B, H, A) normalised targets."""

    def __init__(self, features: int, embedding: int, chunk: int, actions: int, width: int, depth: int, language: int):
        super().__init__()
        self.chunk, self.actions = chunk, actions
        sizes = [features] + [width] * depth
        self.language = nn.Sequential(nn.Linear(embedding, language), nn.GELU())
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.films = nn.ModuleList(nn.Linear(language, 2 * width) for _ in range(depth))
        self.head = nn.Linear(width, chunk * actions)

    def forward(self, features: Tensor, embedding: Tensor) -> Tensor:
        words = self.language(embedding * embedding.shape[-1] ** 0.5)  # unit vectors to unit variance
        x = features
        for hidden, norm, film in zip(self.hidden, self.norms, self.films):
            scale, shift = film(words).chunk(2, dim=-1)  # (B, W) each
            x = torch.relu(norm(hidden(x)) * (1 + scale) + shift)
        return self.head(x).unflatten(-1, (self.chunk, self.actions))  # (B, H, A)


class Generalist(nn.Module):
    """Observation groups and a sentence vector -> (B, H, A) joint targets relative to the commanded one (rad).

    Features and scaling are part of the module, so that the exported graph takes what a robot measures.

    Args:
        mlp: the network, of 2 F inputs.
        features: name in ``sims.features.FEATURES``.
        scaling: ``mean``, ``std`` (F,) of the features; ``centre``, ``reach`` (half range) (H, A) of the targets.
    """

    mean: Tensor
    std: Tensor
    centre: Tensor
    reach: Tensor

    def __init__(self, mlp: FilmMLP, features: str, scaling: Mapping[str, Tensor]):
        super().__init__()
        self.mlp, self.features = mlp, features
        for name in ("mean", "std", "centre", "reach"):
            self.register_buffer(name, scaling[name].clone())

    def normalise(self, features: Tensor) -> Tensor:
        """(B, F) raw features -> (B, 2 F): normalised, and once more magnified around zero."""
        whole = ((features - self.mean) / self.std).clamp(-FEATURE_CLIP, FEATURE_CLIP)
        return torch.cat([whole, torch.tanh(NEAR * features)], dim=-1)

    def forward(self, obs: Mapping[str, Tensor]) -> Tensor:
        groups = {"proprio": obs["proprio"], "objects": obs["objects"]}
        features = self.normalise(FEATURES[self.features](groups))  # (B, F)
        return self.centre + self.reach * self.mlp(features, obs["embedding"])


def fit_scaling(features: Tensor, chunks: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """Scaling from data: mean and deviation of (N, F) features, 1 % and 99 % quantiles of (N, H, A) targets.

    ``valid`` (N, H) marks targets inside their episode.
    """
    low, high = [], []
    for k in range(chunks.shape[1]):
        rows = chunks[valid[:, k], k]
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:100_000]]
        bounds = torch.quantile(rows, torch.tensor([0.01, 0.99]), dim=0)
        low.append(bounds[0])
        high.append(bounds[1])
    lows, highs = torch.stack(low), torch.stack(high)  # (H, A)
    return {
        "mean": features.mean(0),
        "std": features.std(0).clamp_min(1e-2),
        "centre": (lows + highs) / 2,
        "reach": ((highs - lows) / 2).clamp_min(1e-3),  # 1 mrad: below a servo's resolution
    }


def chunk_targets(actions: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """(T, A) steps of one episode -> (T, H, A) targets relative to the one commanded at each step, (T, H) valid.

    Entry ``[t, k]`` is the sum of the steps t to t+k; past the end of the episode it stays, and is not valid.
    """
    length = len(actions)
    total = torch.cat([torch.zeros_like(actions[:1]), actions.cumsum(0)])  # (T + 1, A)
    ends = torch.arange(length)[:, None] + torch.arange(1, chunk + 1)  # (T, H)
    return total[ends.clamp(max=length)] - total[:length, None], ends <= length


def corrected_targets(targets: Tensor, actions: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Like :func:`chunk_targets` where another policy drove: the target it commanded at t+k plus the teacher's step.

    Args:
        targets: (T, A) targets commanded before each step (rad).
        actions: (T, A) the teacher's steps at the states visited.
    """
    length = len(actions)
    at = torch.arange(length)[:, None] + torch.arange(chunk)  # (T, H)
    wanted = targets + actions  # (T, A) where the teacher would have the target after step t
    return wanted[at.clamp(max=length - 1)] - targets[:, None], at < length


class ChunkActor:
    """Executes chunks over a batch of worlds, each on its own clock.

    Args:
        policy: obs groups with ``embedding`` -> (B, H, A) targets relative to the commanded one.
        execute: targets followed before looking again.
        limits: (A,) largest step (rad).
    """

    def __init__(self, policy: Any, execute: int, limits: Tensor):
        self.policy, self.execute, self.limits = policy, execute, limits
        self.age: Tensor | None = None

    def restart(self, rows: Tensor) -> None:
        """Forget the plans of worlds where ``rows`` (B,) is True."""
        if self.age is not None:
            self.age[rows] = self.execute

    def __call__(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Obs groups (B, ...) -> (B, A) change of the joint targets for the next step (rad)."""
        target = commanded(obs["proprio"])
        if self.age is None:
            self.age = torch.full((len(target),), self.execute)
            self.plan = torch.zeros(0)
        stale = self.age >= self.execute
        if stale.any():
            fresh = target[:, None] + self.policy(obs)  # (B, H, A)
            self.plan = fresh if len(self.plan) == 0 else torch.where(stale[:, None, None], fresh, self.plan)
            self.age[stale] = 0
        step = self.plan[torch.arange(len(target)), self.age] - target
        self.age += 1
        return step.clamp(-self.limits, self.limits)


def commanded(proprio: Tensor) -> Tensor:
    """(B, 6) joint targets commanded now: proprio holds q, velocity and target minus q."""
    return proprio[:, 0:6] + proprio[:, 12:18]


def count_weights(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
