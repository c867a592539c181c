"""The random choices of an episode, each a function of (seed, world, episode) alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sims.worlds.base import Start, World


class Episode(NamedTuple):
    """``variant``, ``phrase``: uniform in [0, 1), which job and sentence; ``noise``: of the tracker, per step."""

    variant: float
    phrase: float
    layout: Start
    noise: np.ndarray


class Starts:
    """Draws episodes of some jobs of a world.

    Args:
        split, phrasings: names of the range of starts and of the list of sentences.
        noise_shape: (steps + 1, draws per step) of the tracker's noise.

    Attributes:
        sentences: of all jobs, in their order; what ``instruction`` indexes.
    """

    def __init__(
        self, world: World, variants: Sequence[str], split: str, phrasings: str, noise_shape: tuple[int, int]
    ) -> None:
        self.world, self.split, self.noise_shape = world, split, noise_shape
        blocks = [world.sentences(name, phrasings) for name in variants]
        self.sentences = tuple(sentence for block in blocks for sentence in block)
        self._counts = [len(block) for block in blocks]
        self._first = np.cumsum([0, *self._counts])

    def draw(self, seed: int, world: int, episode: int) -> Episode:
        rng = np.random.default_rng([seed, world, episode])
        variant, phrase = rng.random(), rng.random()
        layout = self.world.sample_start(rng, self.split)
        return Episode(variant, phrase, layout, rng.standard_normal(self.noise_shape, dtype=np.float32))

    def sentence(self, variant: int, draw: float) -> int:
        """Index into ``sentences`` of the phrasing that ``draw`` in [0, 1) picks for a job."""
        return int(self._first[variant] + int(draw * self._counts[variant]))
