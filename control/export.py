"""Write a policy artefact (see :mod:`control.policy`) from a torch module."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from torch import Tensor, nn

from control.checkpoint import sha256
from control.policy import FILES, Policy, document_digest, load_policy
from sims.errors import UserError
from sims.types import EnvSpec


class ActorModule(nn.Module):
    """Observation groups -> deterministic action (B, 1, A) in physical units: features, normaliser, actor, bounds."""

    centre: Tensor
    half_range: Tensor

    def __init__(self, features: Callable[[Mapping[str, Tensor]], Tensor], learner: Any, spec: EnvSpec) -> None:
        super().__init__()
        self.features, self.actor = features, learner.export()
        centre, half = action_scale(spec)
        self.register_buffer("centre", centre)
        self.register_buffer("half_range", half)

    def forward(self, obs: Mapping[str, Tensor]) -> Tensor:
        return (self.centre + self.half_range * self.actor(self.features(obs))).unsqueeze(1)


def action_scale(spec: EnvSpec, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Centre and half range (A,) of the action bounds; physical action = centre + half_range * unit action.

    Raises:
        UserError: a bound is missing, infinite, or leaves no range.
    """
    (dim,) = spec.action.shape
    low, high = (torch.tensor(b, dtype=torch.float32, device=device) for b in (spec.action.low, spec.action.high))
    if low.numel() != dim or high.numel() != dim or not torch.isfinite(high - low).all():
        raise UserError(
            f"{spec.task}: actions need finite bounds, found low={spec.action.low} high={spec.action.high}. "
            "Wrap the environment with finite action bounds."
        )
    if not (low < high).all() or dim == 0:
        raise UserError(f"{spec.task}: empty action range, low={spec.action.low} high={spec.action.high}.")
    return (low + high) / 2, (high - low) / 2


def export_policy(
    module: nn.Module,
    spec: EnvSpec,
    example_obs: Mapping[str, Tensor],
    path: Path,
    *,
    action_meaning: str | None = None,
    chunk: int = 1,
    execute: int = 1,
    language: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Write ``module`` (obs groups dict -> (B, H, A) physical units) as an artefact folder, atomically.

    Args:
        example_obs: (B, ...) per group, B >= 2, real observations: they become the golden inputs. Groups that the
            module does not use are dropped from the artefact's inputs.
        action_meaning: see :class:`control.policy.PolicySpec`; default ``spec.action_kind``.
    """
    path = Path(path)
    fresh = path.with_name(path.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    module = copy.deepcopy(module).eval().cpu()  # the caller's goes on in its own mode, on its own device
    obs = {k: v.detach().cpu()[:16].contiguous() for k, v in example_obs.items()}
    with torch.no_grad():
        output = module(obs)
    inputs = _write_graph(module, obs, fresh / "policy.onnx")
    golden = {f"input/{k}": obs[k].numpy() for k in inputs}
    save_arrays({**golden, "output": np.ascontiguousarray(output.numpy())}, fresh / "golden.safetensors")
    save_file(
        {k: v.detach().clone().contiguous() for k, v in module.state_dict().items()}, fresh / "weights.safetensors"
    )
    document = {
        "format": 1, "env": spec.to_json(), "action_meaning": action_meaning or spec.action_kind, "chunk": chunk,
        "execute": execute, "inputs": inputs, "language": language, "extra": extra or {},
        "sha256": {name: sha256(fresh / name) for name in FILES},
    }  # fmt: skip
    document = json.loads(json.dumps(document, default=_plain))
    document["digest"] = document_digest(document)
    (fresh / "spec.json").write_text(json.dumps(document, indent=1))
    _check_batch_axis(load_policy(fresh), {k: golden[f"input/{k}"] for k in inputs}, output.numpy())
    _swap(fresh, path)
    return path


def _check_batch_axis(policy: Policy, inputs: Mapping[str, np.ndarray], output: np.ndarray) -> None:
    """A traced graph may have frozen the example's batch size; one row must give the row's action."""
    single, _ = policy({k: v[:1] for k, v in inputs.items()})
    if single.shape != output[:1].shape or np.abs(single - output[:1]).max() > 1e-4:
        raise ValueError("the exported graph depends on the batch size of the example; make the module free of it")


class _Positional(nn.Module):
    def __init__(self, module: nn.Module, groups: list[str]) -> None:
        super().__init__()
        self.module, self.groups = module, groups

    def forward(self, *arrays: Tensor) -> Tensor:
        return self.module(dict(zip(self.groups, arrays)))


def _write_graph(module: nn.Module, obs: Mapping[str, Tensor], file: Path) -> list[str]:
    """Export and return the groups that the graph takes, in its order."""
    groups = [group for group in obs if _depends(module, obs, group)]
    write_onnx(_Positional(module, groups), tuple(obs[g] for g in groups), groups, file)
    return groups


def write_onnx(module: nn.Module, args: tuple[Tensor, ...], names: list[str], file: Path) -> None:
    """ONNX graph with a free batch axis, by the tracing exporter: 0.3 s where the ``dynamo`` one takes 10 s."""
    axes = {name: {0: "batch"} for name in [*names, "action"]}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, args, str(file), input_names=names, output_names=["action"], dynamic_axes=axes, dynamo=False
        )


class _Recorder(dict):
    """A dict that remembers which keys were read."""

    def __init__(self, obs: Mapping[str, Tensor]) -> None:
        super().__init__(obs)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Tensor:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def items(self) -> Any:
        self.read.update(self)
        return super().items()

    def values(self) -> Any:
        self.read.update(self)
        return super().values()


def _depends(module: nn.Module, obs: Mapping[str, Tensor], group: str) -> bool:
    recorder = _Recorder(obs)
    with torch.no_grad():
        module(recorder)
    return group in recorder.read


def _swap(fresh: Path, path: Path) -> None:
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.rename(path, old)
    os.rename(fresh, path)
    shutil.rmtree(old, ignore_errors=True)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value.item() if hasattr(value, "item") else str(value)
