"""The verb ``doctor``: what works on this machine, and what to do about what does not."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata

PACKAGES = (
    "torch", "mujoco", "gymnasium", "stable-baselines3", "open_clip_torch", "brax", "hydra-core", "onnxruntime",
    "pyarrow", "av",
)  # fmt: skip


def _versions() -> str:
    missing = [p for p in PACKAGES if importlib.util.find_spec(_import_name(p)) is None]
    if missing:
        raise RuntimeError(f"missing: {', '.join(missing)}; run: pip install robot-distillery")
    return ", ".join(f"{p} {metadata.version(p)}" for p in PACKAGES)


def _import_name(package: str) -> str:
    return {"stable-baselines3": "stable_baselines3", "open_clip_torch": "open_clip", "hydra-core": "hydra"}.get(
        package, package
    )


def _control_is_ours() -> str:
    import control.types

    if "robot-distillery" not in metadata.packages_distributions().get("control", ["robot-distillery"]):
        raise RuntimeError("the module 'control' belongs to python-control; use a separate virtual environment")
    return str(control.types.__file__)


def _devices() -> str:
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no CUDA device (CPU is the default)"
    return f"{os.cpu_count()} CPU cores, {gpu}"


def _rendering() -> str:
    from sims.registry import make

    env = make("tabletop/reach", 1)
    env.reset(0)
    env.render([0], "front")
    start = time.perf_counter()
    for _ in range(20):
        env.render([0], "front")
    rate = 20 / (time.perf_counter() - start)
    env.close()
    return f"{rate:.0f} frames/s with MUJOCO_GL={os.environ.get('MUJOCO_GL', 'default')}"


def _encoder() -> str:
    from distill.text import embed

    return f"sentence encoder gives {embed(['press the green button']).shape[-1]} numbers a sentence"


def _serial() -> str:
    from serial.tools import list_ports

    ports = [p.device for p in list_ports.comports()]
    return ", ".join(ports) if ports else "no serial port found (the virtual robot needs none)"


CHECKS: dict[str, Callable[[], str]] = {
    "packages": _versions,
    "import name": _control_is_ours,
    "devices": _devices,
    "rendering": _rendering,
    "language": _encoder,
    "serial": _serial,
}


def main(argv: list[str] | None = None) -> int:
    """Run every check; exit status 1 when one fails."""
    args = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(args):
        print("distillery doctor - checks versions, devices, rendering, the sentence encoder and serial ports")
        return 0
    failed = 0
    for name, check in CHECKS.items():
        try:
            print(f"ok    {name:<12} {check()}")
        except Exception as error:  # each check reports its own failure and the next one still runs
            failed += 1
            print(f"FAIL  {name:<12} {type(error).__name__}: {error}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
