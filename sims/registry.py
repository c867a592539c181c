"""Every environment by name: ``make(name, num_envs, seed, **options)``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from sims.errors import UserError, unknown_choice
from sims.own_world import build, is_own
from sims.types import VecEnv
from sims.worlds.variants import EPISODE_STEPS, VARIANTS, variants_of


def _tabletop(name: str, num_envs: int, seed: int, options: dict[str, Any]) -> VecEnv:
    from sims.tabletop_env import TabletopEnv
    from sims.task_env import TaskEnv

    check_options(f"tabletop/{name}" if name else "tabletop", TaskEnv.__init__, options)
    jobs = {"": tuple(VARIANTS), **{t: variants_of(t) for t in EPISODE_STEPS}, **{v: (v,) for v in VARIANTS}}
    if name not in jobs:
        raise unknown_choice("task", f"tabletop/{name}", TABLETOP)
    variants = options.pop("variants", None) or jobs[name]
    return TabletopEnv(variants, num_envs, seed, task=f"tabletop/{name}" if name else "tabletop", **options)


def _gym(name: str, num_envs: int, seed: int, options: dict[str, Any]) -> VecEnv:
    from sims.gym_env import GymVecEnv

    check_options(f"gym/{name}", GymVecEnv.__init__, options)
    return GymVecEnv(name, num_envs, seed, **options)


def _brax(name: str, num_envs: int, seed: int, options: dict[str, Any]) -> VecEnv:
    from sims.brax_env import BraxVecEnv

    check_options(f"brax/{name}", BraxVecEnv.__init__, options)
    return BraxVecEnv(name, num_envs, seed, **options)


FAMILIES: dict[str, Callable[[str, int, int, dict[str, Any]], VecEnv]] = {
    "tabletop": _tabletop,
    "gym": _gym,
    "brax": _brax,
}
TABLETOP = ("tabletop", *(f"tabletop/{name}" for name in dict.fromkeys([*EPISODE_STEPS, *VARIANTS])))
BRAX = ("brax/ant", "brax/halfcheetah", "brax/hopper", "brax/inverted_pendulum", "brax/reacher", "brax/walker2d")


def make(name: str, num_envs: int, seed: int = 0, **options: Any) -> VecEnv:
    """Build a batch of worlds.

    Args:
        name: ``tabletop``, ``tabletop/<task or job>``, ``gym/<Gymnasium id>``, ``brax/<environment>``, or
            ``module:attribute`` of a world of your own (:mod:`sims.own_world`).
        num_envs: batch size B.
        seed: seed of all random streams.
        options: keyword arguments of the family's environment class.

    Raises:
        UserError: unknown name or option, listing the known ones and the closest.
    """
    if is_own(name):
        return build(name, num_envs, seed, dict(options))
    family, _, rest = name.partition("/")
    if family not in FAMILIES:
        raise unknown_choice("environment", name, list_envs())
    if num_envs < 1:
        raise UserError(f"num_envs of {name} must be at least 1, got {num_envs}")
    limit = options.get("time_limit")
    if limit is not None and limit < 1:
        raise UserError(f"time_limit={limit} of {name}: must be at least 1 action.")
    return FAMILIES[family](rest, num_envs, seed, dict(options))


def list_envs() -> tuple[str, ...]:
    """Names to show a user; ``gym/<id>`` stands for every Gymnasium environment with Box spaces."""
    return (*TABLETOP, *BRAX, "gym/Pendulum-v1", "gym/HalfCheetah-v5")


def has_option(name: str, option: str) -> bool:
    """Whether the environments of that name take an option that only worlds of ours have, such as ``privileged``."""
    from sims.task_env import TaskEnv

    ours = is_own(name) or name.partition("/")[0] == "tabletop"
    return ours and option in inspect.signature(TaskEnv.__init__).parameters


def check_options(name: str, init: Callable[..., Any], options: dict[str, Any]) -> None:
    """Raises UserError for an option that ``init`` does not take."""
    known = [
        p for p in inspect.signature(init).parameters if p not in ("self", "name", "num_envs", "seed", "task", "world")
    ]
    for option in options:
        if option not in known:
            raise unknown_choice("option", option, known, where=name)
