"""Scripts for an environment whose worlds do different jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Mixed:
    """Asks the environment which world does what, and each task's script for its worlds.

    Args:
        env: has ``task_names``, one per world, and a spec.
        scripts: task -> something with ``act(obs) -> (B, A)``.
    """

    def __init__(self, env: Any, scripts: Mapping[str, Any]) -> None:
        self._env, self._scripts = env, dict(scripts)

    def act(self, obs: Mapping[str, Any]) -> Tensor:
        """Observation of B worlds -> (B, A) float32 actions."""
        tasks = self._env.task_names
        action = torch.zeros((len(tasks), *self._env.spec.action.shape))
        for task, script in self._scripts.items():
            rows = torch.tensor([i for i, name in enumerate(tasks) if name == task])
            if len(rows):
                action[rows] = script.act({name: value[rows] for name, value in obs.items()})
        return action
