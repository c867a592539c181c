"""The same arithmetic on numpy arrays and torch tensors: a robot computer has numpy only, a GPU torch only."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def library(x: Any) -> Any:
    """The module whose functions take ``x``: numpy or torch. Both have concatenate, stack, cos, where, clip, ..."""
    return np if isinstance(x, np.ndarray) else sys.modules["torch"]


def like(values: Any, x: Any) -> Any:
    """``values`` as an array of the library, type and device of ``x``."""
    if isinstance(x, np.ndarray):
        return np.asarray(values, dtype=x.dtype)
    if hasattr(values, "to"):
        return values.to(x.device, x.dtype)
    return sys.modules["torch"].tensor(np.array(values), dtype=x.dtype, device=x.device)
