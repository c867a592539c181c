"""The checks of run.sh. Each returns figures or raises; all run even when one fails."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "control"))
from toy_worlds import Point, proprio

from control.config import DSACTConfig, PPOConfig, SACConfig, TrainConfig
from control.dsact import DSACT
from control.off_policy import OffPolicyLoop
from control.on_policy import OnPolicyLoop
from control.sac import SAC
from control.types import Transition

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEARNERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sac": (SAC, SACConfig), "dsact": (DSACT, DSACTConfig),
}  # fmt: skip


def batch(n: int, f: int = 48, a: int = 12) -> Transition:
    g = torch.Generator().manual_seed(n)
    obs, action = torch.randn(n, f, generator=g), torch.rand(n, a, generator=g) * 2 - 1
    rows = (obs, action, torch.randn(n, generator=g), torch.full((n,), 0.97), obs + 0.1)
    return Transition(*(x.to(DEVICE) for x in rows))


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def fused_equals_autograd(name: str) -> dict[str, Any]:
    """Graphs draw their noise as eager calls do, so the two stay together."""
    make, config = LEARNERS[name]
    cfg = config(width=64, lr=1e-3, gamma=0.9)
    ours = make(48, 12, cfg, DEVICE)
    oracle = make(48, 12, dataclasses.replace(cfg, update="autograd"), DEVICE)
    data = batch(256)
    for _ in range(10):
        ours.update(data)
        oracle.update(data)
    worst = max(float((getattr(ours, k) - getattr(oracle, k)).abs().max()) for k in ("theta_actor", "theta_critic"))
    assert worst < (1e-4 if DEVICE == "cuda" else 1e-5), f"differs by {worst}"
    return {"worst_difference": worst}


def updates_per_second(name: str) -> dict[str, Any]:
    make, config = LEARNERS[name]
    sizes = (256, 2048, 8192, 32768) if DEVICE == "cuda" else (256,)
    figures = {}
    for update in ("fused", "autograd"):
        for n in sizes:
            learner, data = make(48, 12, config(width=256, update=update), DEVICE), batch(n)
            repeats = 200 if DEVICE == "cuda" else 10
            for _ in range(4):
                learner.update(data)
            wait()
            start = time.perf_counter()
            for _ in range(repeats):
                learner.update(data)
            wait()
            figures[f"{update}/{n}"] = round(repeats / (time.perf_counter() - start), 1)
    return figures


def resumed_graph_is_exact(name: str) -> dict[str, Any]:
    """A captured update reads its state in place: loading a state must reach the graph."""
    make, config = LEARNERS[name]
    cfg, data = config(width=32, gamma=0.9), batch(64)
    first, second = make(48, 12, cfg, DEVICE), make(48, 12, cfg, DEVICE, seed=5)
    for _ in range(4):
        first.update(data)
        second.update(data)
    second.load_state_dict(first.state_dict())
    for _ in range(4):
        first.update(data)
        second.update(data)
    assert torch.equal(first.theta_critic, second.theta_critic)
    return {}


def loop_runs(name: str) -> dict[str, Any]:
    """The whole loop, learner and replay on the device."""
    algo: Any = {
        "sac": SACConfig(width=64, gamma=0.9, batch_size=256, warmup_steps=256),
        "dsact": DSACTConfig(width=64, gamma=0.9, batch_size=256, warmup_steps=256),
        "ppo": PPOConfig(width=64, gamma=0.9, rollout_steps=16, minibatch_size=256),
    }[name]
    cfg = TrainConfig(env="toy/point", num_envs=64, algo=algo, steps=8192, utd=0.0625, eval_every=0, stop_success=0.0,
                      demos=0, device=DEVICE)  # fmt: skip
    kind: Any = OnPolicyLoop if name == "ppo" else OffPolicyLoop
    with tempfile.TemporaryDirectory() as folder:
        loop = kind(cfg, Point(64), Point(64, 77), proprio, Path(folder))
        start = time.perf_counter()
        loop.run()
        wait()
        return {"steps_per_s": round(loop.step / (time.perf_counter() - start)), "updates": loop.learner.updates}


def brax_steps() -> dict[str, Any]:
    from sims.registry import make

    n = 2048 if DEVICE == "cuda" else 16
    env = make("brax/inverted_pendulum", n)
    env.reset(0)
    action = torch.zeros(n, env.spec.action.shape[0])
    env.step(action)
    start = time.perf_counter()
    for _ in range(20):
        env.step(action)
    return {"num_envs": n, "steps_per_s": round(20 * n / (time.perf_counter() - start))}


def warp_present() -> dict[str, Any]:
    import importlib.util

    return {
        "mujoco_warp": importlib.util.find_spec("mujoco_warp") is not None,
        "checked": "no engine of ours uses it yet",
    }


CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"fused equals autograd, {n}": lambda n=n: fused_equals_autograd(n) for n in LEARNERS},
    **{f"resumed graph is exact, {n}": lambda n=n: resumed_graph_is_exact(n) for n in LEARNERS},
    **{f"updates per second, {n}": lambda n=n: updates_per_second(n) for n in LEARNERS},
    **{f"loop, {n}": lambda n=n: loop_runs(n) for n in ("sac", "dsact", "ppo")},
    "brax": brax_steps,
    "warp": warp_present,
}


def main(folder: str) -> int:
    name = torch.cuda.get_device_name(0) if DEVICE == "cuda" else "no CUDA device: CPU twin only"
    rows: list[dict[str, Any]] = [{"device": name, "torch": torch.__version__}]
    print(json.dumps(rows[0]), flush=True)
    for check, run in CHECKS.items():
        start = time.perf_counter()
        try:
            row = {"check": check, "ok": True, **run()}
        except Exception as error:
            traceback.print_exc()
            row = {"check": check, "ok": False, "error": f"{type(error).__name__}: {error}"[:400]}
        rows.append(row | {"seconds": round(time.perf_counter() - start, 2)})
        print(json.dumps(rows[-1]), flush=True)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "gpu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0 if all(row.get("ok", True) for row in rows) else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
