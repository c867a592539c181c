"""Speed of the tabletop: whole environment steps against bare ``mj_step`` on the same threads, and frames a second.

    python -m tests.benchmarks.sim_speed [--worlds 64] [--threads 1] [--seconds 3]

Physics and environment run in alternated blocks; the ratio is the median over blocks, so a busy machine hurts both.
Writes ``tests/benchmarks/results/sim_speed.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mujoco
import numpy as np
import torch

from sims.registry import make
from sims.rendering import SceneRenderer
from sims.tabletop_env import TabletopEnv
from sims.worlds.tabletop import SUBSTEPS, apply_layout, load_model, sample_layout

RESULT = Path(__file__).parent / "results" / "sim_speed.json"


class Bare:
    """The same worlds with nothing but ``mj_step``, from the same states and driven by the same targets."""

    def __init__(self, worlds: int, threads: int):
        self.model = load_model()
        self.datas = [mujoco.MjData(self.model) for _ in range(worlds)]
        for i, data in enumerate(self.datas):
            apply_layout(self.model, data, sample_layout(np.random.default_rng(i)))
        self.turn = 0
        self.pool, self.threads = ThreadPoolExecutor(threads), threads

    def follow(self, env: TabletopEnv) -> None:
        for i, data in enumerate(self.datas):
            data.qpos[:], data.qvel[:] = env._engine.qpos[i].numpy(), env._engine.qvel[i].numpy()
            data.mocap_pos[:] = env._engine.mocap_pos[i].numpy().reshape(3, 3)

    def step(self, targets: list[np.ndarray]) -> None:
        self.turn += 1
        for data, target in zip(self.datas, targets[self.turn % len(targets)]):
            data.ctrl[:] = target
        if self.threads == 1:
            self._run(self.datas)
        else:
            list(self.pool.map(self._run, [self.datas[k :: self.threads] for k in range(self.threads)]))

    def _run(self, datas: list[mujoco.MjData]) -> None:
        for data in datas:
            mujoco.mj_step(self.model, data, SUBSTEPS)


def _block(run, seconds: float) -> float:
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        run()
        count += 1
    return count / (time.perf_counter() - start)


def simulation(task: str, worlds: int, threads: int, seconds: float, blocks: int = 7) -> dict[str, float]:
    """Control steps per second of the environment and of bare physics, and their ratio."""
    env, bare = make(task, worlds, seed=0, threads=threads), Bare(worlds, threads)
    assert isinstance(env, TabletopEnv)
    high = torch.tensor(env.spec.action.high)
    draw = torch.Generator().manual_seed(0)
    rates = []
    targets: list[np.ndarray] = []

    def env_step() -> None:
        env.step((2 * torch.rand((worlds, 6), generator=draw) - 1) * high)
        targets.append(env._target.numpy())

    for _ in range(blocks):
        bare.follow(env)
        targets.clear()
        fast = _block(env_step, seconds / blocks)
        rates.append((fast, _block(lambda: bare.step(targets), seconds / blocks)))
    env.close()
    env_rate, bare_rate = np.median(rates, axis=0) * worlds
    ratio = float(np.median([a / b for a, b in rates]))
    return {"env_steps_per_s": float(env_rate), "bare_steps_per_s": float(bare_rate), "ratio": ratio}


def _frames(task: tuple[int, float]) -> float:
    size, seconds = task
    renderer = SceneRenderer(load_model(), ("front",), size)
    layouts = [sample_layout(np.random.default_rng(i)) for i in range(32)]
    turn = iter(range(10**9))

    def one() -> None:
        layout = layouts[next(turn) % 32]
        renderer.render_state(layout.qpos, layout.mocap)

    one()
    rate = _block(one, seconds)
    renderer.close()
    return rate


def rendering(size: int, processes: int, seconds: float) -> float:
    """Frames per second of ``processes`` renderers side by side."""
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return float(sum(pool.map(_frames, [(size, seconds)] * processes)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the tabletop")
    parser.add_argument("--worlds", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "load": os.getloadavg()[0]},
        "versions": {"mujoco": mujoco.__version__, "numpy": np.__version__, "torch": torch.__version__},
        "worlds": args.worlds,
        "threads": args.threads,
        "simulation": {
            t: simulation(t, args.worlds, args.threads, args.seconds) for t in ("tabletop/lift", "tabletop")
        },
        "simulation_16_worlds": simulation("tabletop/lift", 16, args.threads, args.seconds),
        "frames_per_s": {str(s): rendering(s, 2, args.seconds / 2) for s in (64, 128)},
    }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    partial = RESULT.with_suffix(".tmp")
    partial.write_text(json.dumps(result, indent=2) + "\n")
    os.replace(partial, RESULT)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
