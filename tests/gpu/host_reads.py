"""Finds code that makes the host wait for the device. On CUDA the driver's own check raises at the place; on a CPU, where
nothing waits, every operation that would wait on CUDA is found instead, so that the check itself is tested there."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "repeat_interleave")
METHODS = ("tolist", "cpu", "numpy")  # these read a CPU tensor without an operation


class HostRead(AssertionError):
    """The host reads a tensor of the device."""


@contextlib.contextmanager
def no_host_reads(device: str) -> Iterator[None]:
    """Raises :class:`HostRead` (on CUDA: RuntimeError) where the host would wait for the device."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    before = {name: getattr(torch.Tensor, name) for name in METHODS}
    try:
        for name, method in before.items():
            setattr(torch.Tensor, name, _refused(name, method))
        with _Watch():
            yield
    finally:
        for name, method in before.items():
            setattr(torch.Tensor, name, method)


def _refused(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise HostRead(f"Tensor.{name} at {_place()}")

    return refuse


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS or _indexes_by_mask(name, args):
            raise HostRead(f"{name} at {_place()}")
        return func(*args, **(kwargs or {}))


def _indexes_by_mask(name: str, args: Any) -> bool:
    """``x[mask]`` and ``x[mask] = y`` count the mask on the host first; a single number for ``y`` does not."""
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    mask = any(index is not None and index.dtype == torch.bool for index in args[1])
    return mask and (name == "index" or args[2].numel() > 1)


def _place() -> str:
    """The last line of ours, outside of this file and of a virtual environment that lies in the project's folder."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and not path.is_relative_to(sys.prefix) and frame.filename != __file__:
            return f"{path.relative_to(ROOT)}:{frame.lineno}"
    return "?"
