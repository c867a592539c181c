"""Checkpoints: a folder of ``tensors.safetensors`` and ``state.json``, replaced as a whole, never unpickled."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from sims.errors import UserError


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write ``state`` (nested dicts and lists of tensors, arrays, numbers, strings, None) to the folder ``path``.

    The folder appears complete or not at all: it is written beside and renamed; a previous one is kept under
    ``<path>.old`` for the moment in which neither name is there.
    """
    fresh, old = _beside(path, ".new"), _beside(path, ".old")
    shutil.rmtree(fresh, ignore_errors=True)
    if not path.is_dir() and old.is_dir():  # killed between the two renames: the old one is the last good one
        os.rename(old, path)
    fresh.mkdir(parents=True)
    tensors: dict[str, Tensor] = {}
    tree = _pack(state, tensors)
    data = save(tensors)
    document = {"sha256": hashlib.sha256(data).hexdigest(), "state_sha256": _digest(tree), "state": tree}
    append_durably(fresh / "tensors.safetensors", 0, data)
    append_durably(fresh / "state.json", 0, json.dumps(document).encode())
    fsync(fresh)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.rename(path, old)
    os.rename(fresh, path)
    fsync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def append_durably(file: Path, at: int, data: Any) -> None:
    """Make ``file`` its first ``at`` bytes followed by ``data``, and wait until it is on the disk.

    Raises:
        OSError: not all could be written, saying how much that was; the bytes before ``at`` stay.
    """
    view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
    try:
        with file.open("r+b" if at else "wb", buffering=0) as stream:
            if at:
                stream.truncate(at)
                stream.seek(at)
            left = view
            while left:
                left = left[stream.write(left) :]
            os.fsync(stream.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            os.truncate(file, at)  # makes room again
        size = view.nbytes / 2**20
        raise OSError(error.errno, f"{error.strerror}, writing {size:.2f} MiB", str(file)) from error


FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def explained_writes(path: Path, only: tuple[int, ...] = ()) -> Iterator[None]:
    """Turns a disk that cannot take what a run writes into one message; what was written before stays.

    Args:
        path: checkpoint of the run.
        only: the errors of the system to explain, such as :data:`FULL_DISK`; default all.

    Raises:
        UserError: naming the place, the reason and the space left.
    """
    try:
        yield
    except UserError:  # explained already
        raise
    except Exception as error:
        # libraries report a full disk with errors of their own
        known = isinstance(error, OSError) and (not only or error.errno in only)
        if not known and os.strerror(errno.ENOSPC) not in str(error):
            raise
        shutil.rmtree(_beside(path, ".new"), ignore_errors=True)
        where = next(p for p in (path.parent, *path.parent.parents) if p.exists())
        free = shutil.disk_usage(where).free / 2**20
        kept = (
            "The last checkpoint is intact: make room and repeat the command to resume."
            if has_checkpoint(path)
            else "There is no earlier checkpoint: make room and start again."
        )
        raise UserError(f"cannot write to {path.parent}: {error} ({free:.2f} MiB free there). {kept}") from error


def has_checkpoint(path: Path) -> bool:
    return path.is_dir() or _beside(path, ".old").is_dir()


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a folder written by :func:`save_checkpoint`.

    Raises:
        UserError: nothing there, a file missing, or contents that do not agree with their checksum.
    """
    folder = path if path.is_dir() else _beside(path, ".old")
    if not folder.is_dir():
        raise UserError(f"no checkpoint at {path}. Give the folder of a run that has one, or start a new run.")
    try:
        document = json.loads((folder / "state.json").read_text())
        file = folder / "tensors.safetensors"
        if sha256(file) != document["sha256"]:
            raise ValueError("checksum of tensors.safetensors differs from state.json")
        if _digest(document["state"]) != document["state_sha256"]:
            raise ValueError("checksum of state.json differs")
        return _unpack(document["state"], load_file(file))
    except Exception as error:
        raise UserError(
            f"damaged checkpoint {folder}: {error}. "
            "Restore the folder from a copy, or delete it to start this run again."
        ) from error


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest(tree: Any) -> str:
    return hashlib.sha256(json.dumps(tree).encode()).hexdigest()


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def fsync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _pack(node: Any, tensors: dict[str, Tensor]) -> Any:
    """JSON tree in which tensors and arrays are references into ``tensors``."""
    if isinstance(node, Mapping):
        return {"dict": [[key, _pack(value, tensors)] for key, value in node.items()]}
    if isinstance(node, (list, tuple)):
        return {"list": [_pack(value, tensors) for value in node]}
    if isinstance(node, (np.ndarray, np.generic)):
        kind, node = "array", torch.from_numpy(np.array(node))
    elif isinstance(node, Tensor):
        kind = "tensor"
    elif node is None or isinstance(node, (bool, int, float, str)):
        return {"value": node}
    else:
        raise TypeError(f"cannot checkpoint a {type(node).__name__}: {node!r:.80}")
    name = str(len(tensors))
    tensors[name] = node.detach().cpu().contiguous().clone()
    return {kind: name}


def _unpack(node: dict[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    ((kind, content),) = node.items()
    if kind == "dict":
        return {key: _unpack(value, tensors) for key, value in content}
    if kind == "list":
        return [_unpack(value, tensors) for value in content]
    if kind == "array":
        return tensors[content].numpy()
    return tensors[content] if kind == "tensor" else content
