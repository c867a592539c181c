"""Checks of what an environment declares and returns: interface, spec, shapes, rewards, ends and limits.

The docstring of a check says what is checked, and what it returns says what was found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sims.check_probe import LIMIT, Fault, Probe, Skip, demand, done_of
from sims.features import FEATURES, feature_dim
from sims.types import ArraySpec, EnvSpec, VecEnv

METHODS = ("reset", "step", "render", "state_dict", "load_state_dict", "close")
GROUPS = ("proprio", "objects", "goal", "privileged", "instruction", "pixels/<camera>")


def interface(probe: Probe) -> str:
    """it is made with (num_envs, seed) and has spec, num_envs, device and the methods of VecEnv"""
    env = probe.env
    missing = [n for n in ("spec", "num_envs", "device") if not hasattr(env, n)]
    missing += [n + "()" for n in METHODS if not callable(getattr(env, n, None))]
    demand(not missing, f"{type(env).__name__} lacks {', '.join(missing)}",
            "add them; their docstrings in sims/types.py say what they take and give")  # fmt: skip
    demand(isinstance(env.spec, EnvSpec), f"spec is a {type(env.spec).__name__}", "make it a sims.types.EnvSpec")
    demand(env.num_envs == probe.num_envs, f"asked for {probe.num_envs} worlds, num_envs is {env.num_envs}",
            "make as many worlds as num_envs asks for")  # fmt: skip
    return f"{type(env).__name__} with {env.num_envs} worlds on {env.device}"


def spec(probe: Probe) -> str:
    """the spec names its groups, has finite action bounds, a rate and a limit, and survives JSON"""
    spec = probe.env.spec
    act = spec.action
    size = int(np.prod(act.shape))
    bounds = np.array([act.low, act.high], dtype=float)
    demand(len(act.shape) == 1 and bounds.shape == (2, size),
            f"action of shape {act.shape} with {len(act.low)} lower and {len(act.high)} upper bounds",
            "give action the shape (A,) and a lower and an upper bound for each element")  # fmt: skip
    demand(np.isfinite(bounds).all() and (bounds[0] < bounds[1]).all(), f"action bounds {act.low} .. {act.high}",
            "give each element the finite bounds that the machine has, low < high")  # fmt: skip
    demand(not act.names or len(act.names) == size, f"{len(act.names)} names for {size} actions", "name each or none")
    demand(spec.control_hz > 0 and spec.episode_steps > 0,
            f"control_hz={spec.control_hz}, episode_steps={spec.episode_steps}", "both must be above 0")  # fmt: skip
    demand(spec.observation, "no observation group", f"name at least one of {', '.join(GROUPS)}")
    demand(spec.features in FEATURES, f"features='{spec.features}'", f"choose from {', '.join(FEATURES)}")
    for group, array in spec.observation.items():
        _group(group, array, spec)
    demand(EnvSpec.from_json(spec.to_json()) == spec, "from_json(to_json()) is another spec", "use tuples and numbers")
    try:
        inputs = feature_dim(spec)
    except Exception as error:
        raise Fault(f"features='{spec.features}' fails on the groups: {error}",
                    "choose 'concat', which takes any groups") from error  # fmt: skip
    return f"groups {', '.join(spec.observation)}; {size} actions at {spec.control_hz:g} Hz; {inputs} features"


def _group(group: str, array: ArraySpec, spec: EnvSpec) -> None:
    if group.startswith("pixels/"):
        demand(array.dtype == "uint8" and len(array.shape) == 3 and array.shape[2] == 3,
                f"{group} is {array.dtype} {array.shape}", "make it uint8 (H, W, 3)")  # fmt: skip
    elif group == "instruction":
        demand(array.dtype == "int64" and array.shape == () and spec.instructions,
                f"instruction is {array.dtype} {array.shape}, with {len(spec.instructions)} sentences",
                "make it int64 () and list the sentences in spec.instructions")  # fmt: skip
    else:
        demand(array.dtype == "float32", f"{group} is {array.dtype}", "make it float32")


def observation(probe: Probe) -> str:
    """reset and step return every group of the spec with its shape and type, on the device, finite"""
    env = probe.env
    rows = [("reset()", env.reset(1))]
    for step in probe.roll(env, 2):
        rows += [("step().obs", step.obs), ("step().next_obs", step.next_obs)]
    for where, obs in rows:
        demand(set(obs) == set(env.spec.observation), f"{where} has the groups {sorted(obs)}",
                f"return the groups of the spec: {sorted(env.spec.observation)}")  # fmt: skip
        for group, array in env.spec.observation.items():
            want = (env.num_envs, *array.shape)
            _tensor(f"{where}['{group}']", obs[group], want, f"torch.{array.dtype}", env)
        if "instruction" in obs:
            index = obs["instruction"]
            known = ((index >= 0) & (index < len(env.spec.instructions))).all()
            demand(known, f"{where}: instruction {index.tolist()}", f"keep below {len(env.spec.instructions)}")
    return f"{len(env.spec.observation)} group(s) as in the spec"


def _tensor(where: str, value: Any, shape: tuple[int, ...], dtype: str, env: VecEnv) -> None:
    demand(isinstance(value, Tensor), f"{where} is a {type(value).__name__}", "return torch tensors")
    found = f"{where} is {value.dtype} {tuple(value.shape)} on {value.device}"
    right = tuple(value.shape) == shape and str(value.dtype) == dtype and value.device.type == env.device.type
    demand(right, found, f"return {dtype} {shape} on {env.device}")
    demand(not value.is_floating_point() or value.isfinite().all(), f"{where} has a number that is not finite",
            "reset such a world, mark it in metrics['diverged'], return its last good observation")  # fmt: skip


def outcome(probe: Probe) -> str:
    """reward is float32, flags are bool, never both flags at once; metrics are rows of numbers with 'success'"""
    env = probe.env
    env.reset(1)
    names: set[str] = set()
    for step in probe.roll(env):
        shape = (env.num_envs,)
        _tensor("reward", step.reward, shape, "torch.float32", env)
        _tensor("terminated", step.terminated, shape, "torch.bool", env)
        _tensor("truncated", step.truncated, shape, "torch.bool", env)
        demand(not (step.terminated & step.truncated).any(), "a world was terminated and truncated in one step",
                "an episode that ends in the step of its limit is terminated, and not truncated")  # fmt: skip
        for name, value in step.metrics.items():
            _tensor(f"metrics['{name}']", value, shape, "torch.float32", env)
        names |= set(step.metrics)
    demand("success" in names, f"metrics are {sorted(names) or 'empty'}",
            "add metrics['success'], float32 0 or 1; all 0 where the world knows no success")  # fmt: skip
    return f"metrics {', '.join(sorted(names))}"


def rewards(probe: Probe) -> str:
    """the terms in metrics['reward/<term>'] add up to the reward"""
    env = probe.env
    env.reset(2)
    worst, names = 0.0, {}
    for step in probe.roll(env):
        terms = {k: v for k, v in step.metrics.items() if k.startswith("reward/") and k != "reward/true"}
        names.update(terms)
        if terms:
            total = torch.stack(list(terms.values())).sum(0)
            worst = max(worst, float(((total - step.reward) / (1 + step.reward.abs())).abs().max()))
    if not names:
        raise Skip("no reward/<term> in metrics; a reward of several terms is easier to tune when each is there")
    demand(worst < 1e-4, f"{', '.join(names)} differ from the reward by {worst:.2g} of it",
            "report every term of the sum, under reward/<term>, and nothing else there")  # fmt: skip
    return f"{', '.join(names)} add up"


def successor(probe: Probe) -> str:
    """next_obs is where the action led, obs what to act on next: they differ only where an episode ended"""
    env = probe.env
    env.reset(3)
    ends = 0
    for step in probe.roll(env, _rounds(probe)):
        done = done_of(step)
        for group in env.spec.observation:
            alike = (step.obs[group] == step.next_obs[group]).view(env.num_envs, -1).all(1)
            demand(alike[~done].all(), f"obs['{group}'] and next_obs['{group}'] differ in the middle of an episode",
                    "return the same values in both where no episode ended")  # fmt: skip
        moved = [(step.obs[g] != step.next_obs[g]).view(env.num_envs, -1).any(1) for g in _measured(env)]
        if moved and done.any():
            demand(torch.stack(moved).any(0)[done].all(), "at the end of an episode obs is the same as next_obs",
                   "reset in the same step: obs begins the new episode, next_obs ends the old one")  # fmt: skip
        ends += int(done.sum())
    if not ends:
        raise Skip(f"no episode ended within {_rounds(probe)} steps; let the environment take time_limit=")
    return f"{ends} ends, each with its true successor"


def horizon(probe: Probe) -> str:
    """a limit cuts episodes off and changes nothing before, the last successor included"""
    env = probe.env
    if not probe.limited:
        raise Skip("it takes no time_limit=")
    long = probe.open(time_limit=3 * LIMIT)
    pairs = [(dict(env.reset(3)), dict(long.reset(3)))]
    running = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    for a, b in zip(probe.roll(env, LIMIT), probe.roll(long, LIMIT)):
        seen = [{"reward": s.reward, "terminated": s.terminated, **s.next_obs} for s in (a, b)]
        pairs.append(tuple({k: v[running].clone() for k, v in row.items()} for row in seen))  # type: ignore[arg-type]
        running &= ~done_of(a) & ~done_of(b)
    for step, (short, other) in enumerate(pairs):
        wrong = probe.differing(short, other)
        demand(not wrong, f"with limits of {LIMIT} and {3 * LIMIT} actions, step {step} differs in {', '.join(wrong)}",
               "return the state that the action led to as next_obs, before the reset")  # fmt: skip
    return f"{LIMIT} steps, the same with a limit of {LIMIT} and of {3 * LIMIT}"


def _measured(env: VecEnv) -> list[str]:
    return [g for g in env.spec.observation if g not in ("instruction", "goal") and not g.startswith("pixels/")]


def _rounds(probe: Probe) -> int:
    """Steps in which every episode ends at least once, where that is not too many."""
    return max(probe.steps, min(probe.env.spec.episode_steps + 1, 10 * probe.steps))


def limit(probe: Probe) -> str:
    """truncated comes after spec.episode_steps actions, counted per episode, and never before"""
    env = probe.env
    env.reset(3)
    age, limits, limit = torch.zeros(env.num_envs, device=env.device), 0, env.spec.episode_steps
    if probe.limited:
        demand(limit == LIMIT, f"made with time_limit={LIMIT}, spec.episode_steps is {limit}",
                "let time_limit set spec.episode_steps")  # fmt: skip
    for step in probe.roll(env, _rounds(probe)):
        age += 1
        broken = step.metrics.get("diverged", torch.zeros_like(step.reward)) > 0
        early = step.truncated & ~broken & (age < limit)
        demand(not (probe.limited and early.any()),  # else each task may have a limit of its own
                f"truncated after {age[early].tolist()} actions, the limit is {limit}",
                "count the actions of each world since its own last reset")  # fmt: skip
        demand(done_of(step)[age >= limit].all(), f"no end after {limit} actions",
                "truncate at spec.episode_steps actions")  # fmt: skip
        age[done_of(step)] = 0
        limits += int(step.truncated.sum())
    if not limits:
        raise Skip(f"no episode came to its limit of {limit} actions within {_rounds(probe)} steps")
    return f"{limits} limits of {limit} actions"
