"""Training samples of the generalist in memory, and the sentences that go with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distill.dataset import Dataset, feature_name
from distill.generalist import chunk_targets
from distill.text import embed
from distill.text_gate import Language, normalise
from sims.errors import UserError
from sims.features import FEATURES

DROPPED_COPIES = 4  # variations of every known sentence with words left out


@dataclass
class Samples:
    """N states with what the teacher would do: raw features (N, F), job index (N,), targets (N, H, A), valid (N, H)."""

    features: Tensor
    job: Tensor
    target: Tensor
    valid: Tensor

    def __len__(self) -> int:
        return len(self.features)

    @staticmethod
    def join(parts: Sequence[Samples]) -> Samples:
        columns = zip(*((p.features, p.job, p.target, p.valid) for p in parts))
        return Samples(*(torch.cat(column) for column in columns))


def load_samples(path: str | Path, features: str, jobs: Sequence[str], chunk: int) -> tuple[Samples, Tensor]:
    """Samples of a whole dataset, and real observations ``proprio`` and ``objects`` side by side (n, 30 + 25).

    Raises:
        UserError: the dataset is missing or damaged, or has a job that ``jobs`` does not name.
    """
    dataset = Dataset(path)
    names = [feature_name("proprio"), feature_name("objects"), "action"]
    data = {k: torch.tensor(v) for k, v in dataset.columns(names).items()}
    unknown = sorted({row.get("job") for row in dataset.rows} - set(jobs), key=str)
    if unknown:
        raise UserError(f"{path}: has episodes of job {unknown[0]!r}, but the jobs to learn are {', '.join(jobs)}.")
    bounds = dataset.episode_bounds()
    index = [jobs.index(row["job"]) for row in dataset.rows]
    job = torch.repeat_interleave(torch.tensor(index), torch.from_numpy(bounds[:, 1] - bounds[:, 0]))
    pairs = [chunk_targets(data["action"][a:b], chunk) for a, b in bounds]
    flat = featurise(features, {"proprio": data[names[0]], "objects": data[names[1]]})
    samples = Samples(flat, job, torch.cat([t for t, _ in pairs]), torch.cat([v for _, v in pairs]))
    return samples, torch.cat([data[names[0]], data[names[1]]], dim=1)


def featurise(name: str, obs: Mapping[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return FEATURES[name](obs)


class Sentences:
    """Draws a sentence vector for a job: known sentences, with words left out, blended, and with noise.

    Args:
        language: what the policy will understand.
        jobs: job names; ``job`` tensors index into them.
        dropout: chance that a word without meaning for the job is left out.
        noise: length of the random vector added.  mix: share that blends two sentences of one job.
    """

    def __init__(self, language: Language, jobs: Sequence[str], dropout: float, noise: float, mix: float, seed: int):
        rng = np.random.default_rng([seed, 77])
        self.noise, self.mix = noise, mix
        keep = _meaningful(language)
        pools = []
        for job in jobs:
            known = [s for s, j in zip(language.sentences, language.jobs) if j == job]
            dropped = [_drop(s, keep, dropout, rng) for s in known for _ in range(DROPPED_COPIES)] if dropout else []
            pools.append(sorted({*known, *dropped}))
        self.first = torch.tensor([0, *np.cumsum([len(p) for p in pools])])
        self.table = torch.from_numpy(embed([s for pool in pools for s in pool], language.encoder))
        self.snap = language.snap

    def draw(self, job: Tensor, generator: torch.Generator, clean: bool = False) -> Tensor:
        """(N,) job indices -> (N, E) unit vectors."""
        one = self._pick(job, generator)
        if clean:
            return one
        weight = torch.rand(len(job), 1, generator=generator)
        weight = torch.where(torch.rand(len(job), 1, generator=generator) < self.mix, weight, 1.0)
        mixed = weight * one + (1 - weight) * self._pick(job, generator)
        noise = torch.randn(mixed.shape, generator=generator) * (self.noise / mixed.shape[-1] ** 0.5)
        return torch.nn.functional.normalize(mixed + noise, dim=-1)

    def _pick(self, job: Tensor, generator: torch.Generator) -> Tensor:
        count = self.first[job + 1] - self.first[job]
        at = (torch.rand(len(job), generator=generator) * count).long()
        return self.table[self.first[job] + at]


def _meaningful(language: Language) -> set[str]:
    """Words that must stay, because without them a sentence could mean another job."""
    vocabulary = language.vocabulary
    verbs = {v for words in vocabulary["verbs"].values() for v in words}
    return verbs | set(vocabulary["objects"]) | set(vocabulary["colours"]) | {"up", "down", "air", "off", "above"}


def _drop(sentence: str, keep: set[str], chance: float, rng: np.random.Generator) -> str:
    words = normalise(sentence).split()
    return " ".join(w for w in words if w in keep or rng.random() >= chance)
