"""CUDA graphs: an update is recorded once and replayed, so that a small network is not bound by kernel launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from control.types import Transition

WARM_UP = 3  # calls before recording: libraries choose their kernels and allocate on the first ones


class Graphed:
    """``run(batch, flag) -> metrics``, replayed from a graph on CUDA, called as it is elsewhere.

    Args:
        run: static shapes, no host synchronisation, state changed in place.
        owner: has ``state_dict``, ``load_state_dict`` and ``generator``; warming up must leave no trace in it.
        enabled: False runs ``run`` itself on every device.
    """

    def __init__(
        self, run: Callable[[Transition, bool], dict[str, Tensor]], owner: Any, device: torch.device | str,
        enabled: bool,
    ) -> None:  # fmt: skip
        self.run, self.owner = run, owner
        self.enabled = enabled and torch.device(device).type == "cuda"
        self.graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Transition, dict[str, Tensor]]] = {}

    def __call__(self, batch: Transition, flag: bool) -> Mapping[str, Tensor]:
        if not self.enabled:
            return self.run(batch, flag)
        key = (batch.obs.shape[0], flag)
        if key not in self.graphs:
            self.graphs[key] = self._record(batch, flag)
        graph, static, metrics = self.graphs[key]
        for item in fields(Transition):
            getattr(static, item.name).copy_(getattr(batch, item.name))
        graph.replay()
        return metrics

    def _record(self, batch: Transition, flag: bool) -> Any:
        static = Transition(*[getattr(batch, item.name).clone() for item in fields(Transition)])
        before = self.owner.state_dict()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.run(static, flag)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.owner.generator)
        with torch.cuda.graph(graph):
            metrics = self.run(static, flag)
        self.owner.load_state_dict(before)
        return graph, static, metrics
