"""The clock and the ways out of a training run, the same for every loop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from control.checkpoint import has_checkpoint, load_checkpoint
from control.config import ResolvedConfig
from control.episodes import Watch
from control.evaluate import Act, EvalResult
from sims.errors import UserError


class Loop(Protocol):
    """What :func:`drive` needs of a loop."""

    cfg: ResolvedConfig
    watch: Watch
    checkpoint_path: Path
    learner: Any
    metrics: Mapping[str, Tensor]

    def advance(self) -> None:
        """Collect once and learn from it."""
        ...

    def act_greedily(self, obs: Mapping[str, Tensor]) -> Tensor: ...

    def save(self) -> None: ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`save` wrote."""
        ...


def drive(loop: Loop) -> EvalResult | None:
    """Resume, then advance, log, evaluate and save until the run is done; returns the last evaluation on the way.

    Raises:
        KeyboardInterrupt: interrupted, after a checkpoint was written; says where it stopped.
        UserError: a checkpoint that cannot be read, or none can be written; nothing left to learn from.
    """
    _resume(loop)
    with Interruptible() as stop:
        try:
            result = _until_done(loop, stop)
        except Stopped:
            loop.save()
            raise KeyboardInterrupt(
                f"interrupted at step {loop.watch.step:,} of {loop.cfg.steps:,}, saved in {loop.checkpoint_path}; "
                "the same command resumes"
            ) from None
    loop.save()
    return result


def _until_done(loop: Loop, stop: Interruptible) -> EvalResult | None:
    watch = loop.watch
    started, saved = time.monotonic() - watch.wall, time.monotonic()
    act = stop.checked(loop.act_greedily)
    result = watch.evaluate_if_due(loop.learner.updates, act)  # an interrupt may have cut it short
    while not watch.done:
        loop.advance()
        watch.wall = time.monotonic() - started
        watch.log_if_due(loop.learner.updates, loop.metrics)
        result = watch.evaluate_if_due(loop.learner.updates, act) or result
        stop.check()
        if time.monotonic() - saved > loop.cfg.checkpoint_seconds:
            loop.save()
            saved = time.monotonic()
    watch.wall = time.monotonic() - started
    return result


def _resume(loop: Loop) -> None:
    if has_checkpoint(loop.checkpoint_path):
        loop.restore(_read_state(loop.checkpoint_path))
    loop.watch.log.truncate_after(loop.watch.step)


def _read_state(path: Path) -> dict[str, Any]:
    state = load_checkpoint(path)
    if "exclusions" not in state.get("watch", {}):
        raise UserError(f"{path} was written by an earlier version and cannot go on. Delete {path.parent}, or finish "
                        "the run with the version that began it.")  # fmt: skip
    return state


class Stopped(BaseException):
    """Asked to end. Nothing between the loop and :func:`drive` may take it for an error of its own."""


class Interruptible:
    """Ctrl-C, SIGTERM and SIGHUP wait until a checkpoint can be written: for the end of an iteration, or within an
    evaluation, which is made again. A second signal acts at once.
    """

    def __init__(self) -> None:
        self.asked = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Interruptible:
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGINT", "SIGTERM", "SIGHUP"):
                if hasattr(signal, name):
                    number = getattr(signal, name)
                    self.before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def check(self) -> None:
        if self.asked:
            raise Stopped

    def checked(self, act: Act) -> Act:
        """``act`` that ends an evaluation when asked to."""

        def checked(obs: Mapping[str, Tensor]) -> Tensor:
            self.check()
            return act(obs)

        return checked

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
