"""Specialists as functions of the state: which action would the teacher of this job take here?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from control.policy import Policy, load_policy
from distill.config import SCRIPTED
from sims.errors import UserError
from sims.worlds.variants import SLOTS, VARIANTS


def policy_folder(path: str) -> Path:
    """The artefact in a run folder or the folder itself."""
    folder = Path(path)
    inner = folder / "policy"
    return inner if inner.is_dir() and not (folder / "spec.json").exists() else folder


class Teachers:
    """The clean (mean) action of the specialist of each world's job.

    Args:
        paths: job -> policy folder or run folder or ``"scripted"``. Jobs with the same path share one policy.

    Raises:
        UserError: a policy is missing or damaged, or acts in another way than the tabletop.
    """

    def __init__(self, paths: Mapping[str, str]):
        self.paths = dict(paths)
        self._acts = {path: _load(path, job) for job, path in self.paths.items()}

    def __call__(self, obs: Mapping[str, Tensor], jobs: Sequence[str]) -> Tensor:
        """Obs groups (B, ...), the job of each world -> (B, A) actions in physical units."""
        names = np.asarray(jobs)
        action: Tensor | None = None
        for job in dict.fromkeys(jobs):
            rows = torch.from_numpy(np.flatnonzero(names == job))
            part = {k: obs[k][rows] for k in ("proprio", "objects")}
            part["goal"] = goal_of(job).expand(len(rows), -1)
            act = self._acts[self.paths[job]]
            found = act(part, job) if isinstance(act, _Scripts) else _mean_action(act, part)
            action = torch.zeros(len(names), found.shape[-1]) if action is None else action
            action[rows] = found
        assert action is not None
        return action


def goal_of(job: str) -> Tensor:
    """(1, slots) one-hot of the job's object."""
    goal = torch.zeros(1, len(SLOTS))
    goal[0, VARIANTS[job].slot] = 1
    return goal


class _Scripts:
    """The world's scripted demonstrators, one per task; they keep no state, so any state can be labelled."""

    def __init__(self) -> None:
        from sims.tasks.scripted import SCRIPTS

        self.scripts = {task: script() for task, script in SCRIPTS.items()}

    def __call__(self, obs: Mapping[str, Tensor], job: str) -> Tensor:
        return self.scripts[VARIANTS[job].task].act(obs)


def _load(path: str, job: str) -> Any:
    if path == SCRIPTED:
        return _Scripts()
    policy = load_policy(policy_folder(path))
    if policy.spec.chunk != 1 or policy.spec.action_meaning != "joint_position_delta":
        found = f"{policy.spec.action_meaning} in chunks of {policy.spec.chunk}"
        raise UserError(f"{path}: the specialist of '{job}' gives {found}; needed is one joint_position_delta.")
    return policy


def _mean_action(policy: Policy, obs: Mapping[str, Tensor]) -> Tensor:
    actions, _ = policy({k: obs[k].numpy() for k in policy.spec.inputs})
    return torch.from_numpy(np.asarray(actions)[:, 0])  # (B, A)
