"""The environment's own settings: what a field that was not given becomes (``configs/settings/*.yaml``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from sims.errors import unknown_choice
from sims.verbs import config_dir


def settings_of(env: str, learner: str) -> dict[str, Any]:
    """Settings of ``env`` for ``learner``: those of any world, then of the family, then of the task.

    Returns:
        Fields of ``TrainConfig``; ``algo`` holds those of the learner's config.
    """
    family, _, name = env.partition("/")
    merged: dict[str, Any] = {"algo": {}}
    layers = [("default", "*"), (family, "*"), (family, _task(name))]
    for file, key in layers:
        layer = _read(file).get(key, {})
        for part in (layer, layer.get(learner, {})):
            merged["algo"] |= part.get("algo", {})
            merged |= {k: v for k, v in part.items() if k not in _SECTIONS}
    return merged


_SECTIONS = ("algo", "sac", "dsact", "ppo")


def fill(config: Any, settings: Mapping[str, Any]) -> Any:
    """A copy of a dataclass in which fields that are None have the value that ``settings`` has for them."""
    names = {f.name for f in dataclasses.fields(config)}
    missing = {k: v for k, v in settings.items() if k in names and getattr(config, k) is None}
    return dataclasses.replace(config, **missing)


def _task(name: str) -> str:
    """``lift_red`` -> ``lift``, ``Pendulum-v1`` -> ``Pendulum``; brax names have underscores of their own."""
    return name if name in _read("brax") else name.split("-v")[0].split("_")[0]


@lru_cache
def _read(file: str) -> dict[str, Any]:
    import yaml

    path = config_dir() / "settings" / f"{file}.yaml"
    content = yaml.safe_load(path.read_text()) if path.exists() else {}
    for where, layer in _layers(content, path.name):
        _check(where, layer)
    return content


def _layers(content: Mapping[str, Any], file: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key, layer in content.items():
        yield f"{file}: {key}", layer
        for learner in _SECTIONS[1:]:
            if learner in layer:
                yield f"{file}: {key}.{learner}", layer[learner]


def _check(where: str, layer: Mapping[str, Any]) -> None:
    """A misspelt field would otherwise be left out without a word."""
    from control.config import ALGOS, TrainConfig

    known = {f.name for f in dataclasses.fields(TrainConfig)} | set(_SECTIONS)
    known_algo = {f.name for schema in ALGOS.values() for f in dataclasses.fields(schema)}
    for names, allowed in ((layer, known), (layer.get("algo", {}), known_algo)):
        for name in names:
            if name not in allowed:
                raise unknown_choice("setting", name, sorted(allowed), where)
