"""Load and run a policy artefact with numpy and ONNX Runtime. A leaf: no torch.

An artefact is a folder: ``policy.onnx`` (graph with weights), ``weights.safetensors`` (the same weights by name, to
train on), ``spec.json`` (what goes in and out, checksums), ``golden.safetensors`` (inputs with the outputs that the
trained module gave). Loading checks the checksums and replays the golden inputs, so a policy that would act
differently on this machine is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sims.errors import UserError
from sims.types import EnvSpec

FILES = ("policy.onnx", "weights.safetensors", "golden.safetensors")
GOLDEN_TOLERANCE = 1e-4  # of the action's half range, absolute in its units where that is larger than 1


@dataclass(frozen=True)
class PolicySpec:
    """What ``spec.json`` holds.

    Attributes:
        env: the world the policy was trained in.
        action_meaning: ``"joint_position_delta"`` (rad per step, added to the commanded target),
            ``"joint_position_chunk_relative_to_target"`` (rad, H targets relative to the one commanded now) or
            ``"native"``.
        chunk: H, actions predicted per call; ``execute``: how many of them are meant to be executed.
        inputs: names of the observation groups that the graph takes.
        language: how text enters (None: it does not).
        extra: anything else, e.g. training figures and hashes.
    """

    env: EnvSpec
    action_meaning: str
    chunk: int
    execute: int
    inputs: tuple[str, ...]
    language: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class Policy:
    """A loaded artefact. Make one with :func:`load_policy`."""

    def __init__(self, path: Path, spec: PolicySpec, session: Any) -> None:
        self.path, self.spec, self._session = path, spec, session
        self._dtypes = {group: _DTYPES[node.type] for group, node in zip(spec.inputs, session.get_inputs())}

    def __call__(self, obs: Mapping[str, np.ndarray], state: Any = None) -> tuple[np.ndarray, Any]:
        """Obs groups (B, ...) -> actions (B, H, A) in physical units, and the state to pass to the next call.

        Raises:
            UserError: an input group is missing or has the wrong shape.
        """
        feed = {}
        for group, node in zip(self.spec.inputs, self._session.get_inputs()):
            if group not in obs:
                raise UserError(
                    f"policy {self.path} needs the observation group '{group}'; got {', '.join(sorted(obs))}."
                )
            array = np.asarray(obs[group], dtype=self._dtypes[group])
            want = tuple(node.shape[1:])
            if array.shape[1:] != want:
                raise UserError(f"policy {self.path}: group '{group}' has shape {array.shape}, needs (B, {want}).")
            feed[node.name] = array
        return self._session.run(None, feed)[0], state


_DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(uint8)": np.uint8}


def load_policy(path: str | Path) -> Policy:
    """Load an artefact and replay its golden inputs.

    Raises:
        UserError: a file is missing, altered or unreadable, or the golden outputs differ by more than 1e-4.
    """
    folder = Path(path)
    document = _read_document(folder)
    _check_files(folder, document)
    try:
        spec = _spec(document)
        policy = Policy(folder, spec, _session(folder / "policy.onnx"))
        golden = _load_golden(folder)
        actions, _ = policy({group: golden[f"input/{group}"] for group in spec.inputs})
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"damaged policy {folder}: {error}. Export it again.") from error
    worst = _worst(actions, golden["output"])
    if not worst <= GOLDEN_TOLERANCE:
        raise UserError(
            f"policy {folder} does not reproduce its golden vectors: actions differ by {worst:.2e} "
            f"(allowed {GOLDEN_TOLERANCE:.0e}). "
            "The weights were altered or this runtime computes differently; export it again."
        )
    return policy


def _read_document(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise UserError(f"no policy at {folder}: the folder does not exist. Train one, or give the path of one.")
    try:
        return json.loads((folder / "spec.json").read_text())
    except FileNotFoundError:
        raise UserError(f"{folder} is not a policy: spec.json is missing. Give the folder that holds it.") from None
    except ValueError as error:
        raise UserError(f"damaged policy {folder}: spec.json is not JSON ({error}). Export it again.") from error


def _check_files(folder: Path, document: Mapping[str, Any]) -> None:
    if document_digest(document) != document.get("digest"):
        raise UserError(f"damaged policy {folder}: the checksum of spec.json differs. Export it again.")
    for name in FILES:
        file = folder / name
        if not file.is_file():
            raise UserError(f"damaged policy {folder}: {name} is missing. Export it again.")
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        want = document.get("sha256", {}).get(name)
        if found != want:
            raise UserError(
                f"damaged policy {folder}: {name} has checksum {found[:12]}, spec.json says {str(want)[:12]}. "
                "Export it again."
            )


def document_digest(document: Mapping[str, Any]) -> str:
    """Checksum of everything in ``spec.json`` but the checksum itself: limits and joint names move a robot."""
    content = {k: v for k, v in document.items() if k != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _spec(document: Mapping[str, Any]) -> PolicySpec:
    fields = {k: v for k, v in document.items() if k not in ("sha256", "format", "digest")}
    fields["env"] = EnvSpec.from_json(fields["env"])
    fields["inputs"] = tuple(fields["inputs"])
    return PolicySpec(**fields)


def _session(file: Path) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _load_golden(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "golden.safetensors")


def _worst(actions: np.ndarray, golden: np.ndarray) -> float:
    """Largest difference; nan and a wrong shape count as infinite."""
    if actions.shape != golden.shape or not np.isfinite(actions).all():
        return float("inf")
    return float(np.abs(actions - golden).max())
