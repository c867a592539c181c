"""Successful scripted episodes as prior data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from control.episodes import segment_of
from control.export import action_scale
from control.types import Segment
from sims.errors import UserError
from sims.types import TimeStep, VecEnv

MAX_ROUNDS_WITHOUT_SUCCESS = 3


def collect_demonstrations(
    env: VecEnv, act: Callable[[Mapping[str, Tensor]], Tensor], episodes: int, seed: int
) -> list[Segment]:
    """Run ``act`` (obs -> (B, A) physical actions) and keep ``episodes`` episodes that end in success.

    Returns:
        One (T, 1) segment per episode, actions in the unit box.

    Raises:
        UserError: three rounds of all environments without one success.
    """
    centre, half_range = action_scale(env.spec, env.device)
    kept: list[Segment] = []
    rounds = 0
    while len(kept) < episodes:
        found = _one_round(env, act, seed + rounds)
        kept += [replace(s, action=((s.action - centre) / half_range).clamp(-1, 1)) for s in found]
        rounds += 1
        if not kept and rounds >= MAX_ROUNDS_WITHOUT_SUCCESS:
            raise UserError(f"{env.spec.task}: the demonstrator had no success in {rounds * env.num_envs} episodes.")
    return kept[:episodes]


def _one_round(env: VecEnv, act: Callable[[Mapping[str, Tensor]], Tensor], seed: int) -> list[Segment]:
    """The first episode of every environment, successful ones only."""
    current = env.reset(seed)
    obs: list[Mapping[str, Tensor]] = []
    actions: list[Tensor] = []
    steps: list[TimeStep] = []
    ended = torch.zeros(env.num_envs, dtype=torch.bool)
    ends = torch.zeros(env.num_envs, dtype=torch.int64)
    success = torch.zeros(env.num_envs, dtype=torch.bool)
    while not ended.all():
        action = act(current)
        step = env.step(action)
        obs.append(current)
        actions.append(action)
        steps.append(step)
        done = (step.terminated | step.truncated).cpu() & ~ended
        ends[done] = len(steps)
        success |= done & (step.metrics["success"].cpu() > 0.5)
        ended |= done
        current = step.obs
    block = segment_of(obs, actions, steps)
    return [_episode(block, i, int(ends[i])) for i in torch.nonzero(success).flatten().tolist()]


def _episode(block: Segment, env: int, length: int) -> Segment:
    def cut(x: Tensor) -> Tensor:
        return x[:length, env : env + 1]

    def cut_all(groups: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {k: cut(v) for k, v in groups.items()}

    return Segment(
        cut_all(block.obs), cut(block.action), cut(block.reward), cut(block.terminated), cut(block.truncated),
        cut_all(block.next_obs), cut_all(block.metrics),
    )  # fmt: skip
