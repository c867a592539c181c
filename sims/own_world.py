"""Worlds of a user's own, named ``module:attribute`` or ``file.py:attribute``, with ``/job`` behind it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from sims.errors import UserError, unknown_choice
from sims.types import VecEnv
from sims.worlds.base import World


def is_own(name: str) -> bool:
    """Whether an environment's name leads to a module instead of a family of the registry."""
    return ":" in name


def load(name: str) -> tuple[Any, str]:
    """``my_arm:WORLD/reach`` -> the object, and ``reach`` (empty: all jobs).

    Raises:
        UserError: no such module or attribute; what an import raises is shown with its place.
    """
    module, _, rest = name.partition(":")
    attribute, _, job = rest.partition("/")
    if not module or not attribute:
        raise UserError(f"environment {name!r}: name it as module:attribute or file.py:attribute, with /job behind it.")
    found = _import(module, name)
    if not hasattr(found, attribute):
        public = [n for n in vars(found) if not n.startswith("_")]
        raise unknown_choice("attribute", attribute, public, where=f"module {module}")
    return getattr(found, attribute), job


def _import(module: str, name: str) -> Any:
    file = Path(module if module.endswith(".py") else module.replace(".", "/") + ".py")
    try:
        if module.endswith(".py"):
            if not file.exists():
                raise UserError(f"environment {name!r}: there is no file {file.resolve()}.")
            return _from_file(file)
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise UserError(
                f"environment {name!r}: {module} needs the module {error.name!r}, which is missing."
            ) from error
        raise UserError(f"environment {name!r}: no module {module!r}; looked for {file} in {Path.cwd()}.") from error


def _from_file(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def build(name: str, num_envs: int, seed: int, options: dict[str, Any]) -> VecEnv:
    """The environment: of a :class:`World`, or what a factory ``(num_envs, seed, **options)`` returns."""
    from sims.registry import check_options
    from sims.task_env import TaskEnv

    found, job = load(name)
    if isinstance(found, World):
        check_options(name, TaskEnv.__init__, options)
        jobs = options.pop("variants", None) or jobs_of(found, job)
        return TaskEnv(found, jobs, num_envs, seed, task=name, **options)
    if job:
        raise UserError(f"environment {name!r}: only a World has jobs, and {type(found).__name__} is none.")
    if not callable(found):
        raise UserError(f"environment {name!r} is a {type(found).__name__}: give a World, or a factory "
                        "(num_envs, seed, **options) that returns a sims.types.VecEnv.")  # fmt: skip
    check_options(name, found, options)
    env: Any = found(num_envs=num_envs, seed=seed, **options)
    return env


def jobs_of(world: World, name: str) -> tuple[str, ...]:
    """Jobs of a task, one job, or all of them for an empty name."""
    of_task = tuple(job for job, what in world.jobs.items() if what.task == name)
    if name and name not in world.jobs and not of_task:
        raise unknown_choice("job", name, [*world.tasks, *world.jobs], where=f"world {world.name}")
    return (name,) if name in world.jobs else of_task or tuple(world.jobs)
