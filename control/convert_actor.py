"""The actor of a Stable-Baselines3 model, rebuilt from its weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from control.convert import KINDS
from sims.errors import UserError, unknown_choice
from sims.features import feature_dim

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU, "tanh": nn.Tanh, "elu": nn.ELU, "gelu": nn.GELU, "silu": nn.SiLU, "leakyrelu": nn.LeakyReLU,
}  # fmt: skip
BATCH_RENORM_EPSILON = 1e-3  # sb3-contrib's


class Converted(nn.Module):
    """Observation groups -> physical action (B, 1, A)."""

    def __init__(self, features: Callable[[Mapping[str, Tensor]], Tensor], actor: nn.Module) -> None:
        super().__init__()
        self.features, self.actor = features, actor

    def forward(self, obs: Mapping[str, Tensor]) -> Tensor:
        return self.actor(self.features(obs)).unsqueeze(1)


def build_actor(
    kind: str, weights: dict[str, Any], data: dict[str, Any], activation: str, normalizer: dict[str, Any] | None,
    spec: Any, where: str,
) -> nn.Module:  # fmt: skip
    """Torch module: flat features (B, F) -> physical action (B, A), as ``model.predict(deterministic=True)``."""
    _, prefixes, default = next(entry for entry in KINDS.values() if entry[0] == kind)
    activation = (activation or _activation_of(data) or default).lower()
    if activation not in ACTIVATIONS:
        raise unknown_choice("activation", activation, ACTIVATIONS, where)
    layers: list[nn.Module] = [] if normalizer is None else [_Affine(normalizer)]
    names = [key[: -len(".weight")] for key in weights if key.endswith(".weight") and key.startswith(prefixes)]
    names += [key[: -len(".ra_mean")] for key in weights if key.endswith(".ra_mean") and key.startswith(prefixes)]
    if not names:
        raise UserError(
            f"{where}: no weights under {' or '.join(prefixes)}; only MlpPolicy over flat boxes is supported."
        )
    names.sort(
        key=lambda name: (prefixes.index(next(p for p in prefixes if name.startswith(p.rstrip(".")))), _number(name))
    )
    for name in names:
        if f"{name}.ra_mean" in weights:
            layers.append(_BatchRenorm(*(weights[f"{name}.{part}"] for part in ("ra_mean", "ra_var", "scale", "bias"))))
            continue
        layers += [_linear(weights[f"{name}.weight"], weights[f"{name}.bias"]), ACTIVATIONS[activation]()]
    layers.pop()  # the head has no hidden activation
    low, high = (torch.tensor(b, dtype=torch.float32) for b in (spec.action.low, spec.action.high))
    first = next(layer for layer in layers if isinstance(layer, nn.Linear))
    last = [layer for layer in layers if isinstance(layer, nn.Linear)][-1]
    _check_shapes(first.in_features, last.out_features, spec, data, where)
    layers.append(_Clip(low, high) if kind == "PPO" else _Squash(low, high))
    return nn.Sequential(*layers)


def _number(name: str) -> int:
    tail = name.rsplit(".", 1)[-1]
    return int(tail) if tail.isdigit() else 0


def _activation_of(data: dict[str, Any]) -> str:
    """The class named in the readable text of ``policy_kwargs``, lower case; empty where it names none."""
    text = str(data.get("policy_kwargs", {}).get("activation_fn", ""))
    found = re.search(r"activation\.(\w+)", text)
    return found.group(1).lower() if found else ""


def _check_shapes(inputs: int, outputs: int, spec: Any, data: dict[str, Any], where: str) -> None:
    want = feature_dim(spec), spec.action.shape[0]
    if (inputs, outputs) != want:
        raise UserError(f"{where} takes {inputs} numbers and gives {outputs}; {spec.task} has {want[0]} and {want[1]}. "
                        "Give the world that it was trained in.")  # fmt: skip
    for bound in ("low", "high"):
        text = str(data.get("action_space", {}).get(bound, ""))
        numbers = [float(x) for x in re.findall(r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf)", text)]
        ours = list(getattr(spec.action, bound))
        if numbers and "..." not in text and not _close(numbers, ours):
            raise UserError(f"{where}: its action space has {bound}={numbers}, {spec.task} has {ours}. "
                            "Give the world that it was trained in.")  # fmt: skip


def _close(a: list[float], b: list[float]) -> bool:
    return len(a) == len(b) and all(abs(x - y) <= 1e-5 * max(1.0, abs(y)) for x, y in zip(a, b))


def _linear(weight: Any, bias: Any) -> nn.Module:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer


class _Squash(nn.Module):
    """tanh, then from the unit box to the bounds."""

    low: Tensor
    high: Tensor

    def __init__(self, low: Tensor, high: Tensor) -> None:
        super().__init__()
        self.register_buffer("low", low)
        self.register_buffer("high", high)

    def forward(self, x: Tensor) -> Tensor:
        return self.low + 0.5 * (x.tanh() + 1) * (self.high - self.low)


class _Clip(_Squash):
    """PPO acts in physical units and clips."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(x, self.low), self.high)


class _BatchRenorm(nn.Module):
    """Batch renormalisation as it acts: running statistics, then gain and offset."""

    mean: Tensor
    deviation: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, mean: Tensor, variance: Tensor, scale: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", (variance + BATCH_RENORM_EPSILON).sqrt())
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * ((x - self.mean) / self.deviation) + self.bias


class _Affine(nn.Module):
    """The observation statistics of ``VecNormalize``."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, statistics: Mapping[str, Any]) -> None:
        super().__init__()
        mean, var = (torch.as_tensor(statistics[k], dtype=torch.float64) for k in ("mean", "var"))
        self.register_buffer("mean", mean.float())
        self.register_buffer("deviation", (var + float(statistics["epsilon"])).sqrt().float())
        self.clip = float(statistics["clip"])

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) / self.deviation).clamp(-self.clip, self.clip)
