"""Speed of SAC and DSAC-T beside what a user would pick instead, in one process on one pinned thread.

Every function returns the milliseconds of every block; ``benchmark_report`` makes ratios of them.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from control.benchmark_learning import COMMON, iterate
from control.benchmark_machine import Contestants, alternate, machine, pinned, timed
from control.config import DSACTConfig, SACConfig, TrainConfig, resolve
from control.dsact import DSACT
from control.off_policy import OffPolicyLoop
from control.replay import Replay
from control.sac import SAC
from sims.features import FEATURES
from sims.registry import make

OBS, ACT, BATCH = 17, 6, 256  # HalfCheetah-v5
ENV = "HalfCheetah-v5"
ROWS = 4_000  # transitions in the replay of an update
Say = Callable[[str], None]


def update_speed(width: int, blocks: int, repeats: int, say: Say) -> dict[str, Any]:
    """One gradient step: batch drawn, both critics, actor, alpha and targets; milliseconds per update."""
    say(f"update: networks {width}x{width}, batch {BATCH}, dimensions of {ENV}, {repeats} updates a block")
    with pinned():
        contestants = {"SB3 SAC": _sb3_sac(width, repeats), **_ours(width, repeats)}
        contestants["matrix products alone"] = timed(floor(width), repeats)
        contestants |= _sbx_updates(width, repeats, say)
        return {"width": width, "batch": BATCH, "repeats": repeats} | alternate(contestants, blocks, say)


def _ours(width: int, repeats: int) -> Contestants:
    algo: dict[str, Any] = {**COMMON, "width": width}
    delayed = {**algo, "policy_delay": 2}
    replay, generator = _replay(), torch.Generator().manual_seed(0)
    learners: dict[str, SAC | DSACT] = {
        "SAC": SAC(OBS, ACT, SACConfig(**algo)),
        "SAC, autograd": SAC(OBS, ACT, SACConfig(**algo, update="autograd")),
        "SAC, bfloat16": SAC(OBS, ACT, SACConfig(**algo, precision="bfloat16")),
        "DSAC-T": DSACT(OBS, ACT, DSACTConfig(**algo)),
        "DSAC-T, its own delay of 2": DSACT(OBS, ACT, DSACTConfig(**delayed)),
    }

    def update(learner: SAC | DSACT) -> Callable[[], object]:
        return lambda: learner.update(replay.sample(BATCH, 0.99, 1, generator))

    return {name: timed(update(learner), repeats) for name, learner in learners.items()}


def _replay() -> Replay:
    replay, g = Replay(ROWS, 1, OBS, ACT), torch.Generator().manual_seed(1)
    obs = torch.randn(ROWS, 1, OBS, generator=g)
    action = torch.rand(ROWS, 1, ACT, generator=g) * 2 - 1
    never = torch.zeros(ROWS, 1)
    replay.add(obs, action, torch.randn(ROWS, 1, generator=g), never, never, obs + 0.1)
    return replay


def _sb3_sac(width: int, repeats: int) -> Callable[[], float]:
    model = _sb3(width, ROWS)
    return timed(lambda: model.train(repeats, BATCH), units=repeats)


def _sb3(width: int, rows: int) -> Any:
    """Its SAC with a few steps behind it: data, a logger, a first few updates."""
    import gymnasium as gym
    from stable_baselines3 import SAC as Theirs

    net = {"net_arch": [width, width]}
    model = Theirs("MlpPolicy", gym.make(ENV), buffer_size=rows, seed=0, device="cpu", policy_kwargs=net)
    model.learn(300)
    return model


def _sbx_updates(width: int, repeats: int, say: Say) -> Contestants:
    """One compiled call of ``repeats`` updates, its fastest way, and one call each, as its loop does by default."""
    model = _sbx(width, ROWS, say)
    if model is None:
        return {}

    def train(updates: int) -> None:
        model.train(updates, BATCH)
        np.asarray(model.policy.actor_state.step)  # wait until it is done

    return {
        "SBX SAC": timed(lambda: train(repeats), units=repeats),
        "SBX SAC, one call an update": timed(lambda: train(1), repeats),
    }


def _sbx(width: int, rows: int, say: Say) -> Any:
    """Its SAC with a few steps behind it; None where it is not installed."""
    # with one core to run on, which XLA asks for when jax is imported, it keeps to one thread
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    try:
        from sbx import SAC as Theirs  # pyright: ignore[reportMissingImports]
    except ImportError:
        say("  SBX: not installed (pip install sbx-rl)")
        return None
    import gymnasium as gym

    net = {"net_arch": [width, width]}
    model = Theirs("MlpPolicy", gym.make(ENV), buffer_size=rows, seed=0, policy_kwargs=net)
    model.learn(300)
    return model


def floor(width: int) -> Callable[[], None]:
    """Every matrix product of one SAC update into buffers of its own, and nothing else.

    Products with one column count as matrix-vector products, which are faster; outer products are left out.
    """
    h, n, out, f = width, BATCH, 2 * ACT, OBS + ACT
    actor = [((n, OBS), (OBS, h)), ((n, h), (h, h)), ((n, h), (h, out))]
    critic = [((2, n, f), (2, f, h)), ((2, n, h), (2, h, h)), ((n, h), (h,)), ((n, h), (h,))]
    # of the critics' loss: gradients of the last, the middle and the first weights, and of the layer between
    critic_back = [((h, n), (n,)), ((h, n), (n,)), ((2, h, n), (2, n, h)), ((2, n, h), (2, h, h)),
                   ((2, f, n), (2, n, h))]  # fmt: skip
    through_critic = [((2, n, h), (2, h, h)), ((2, n, h), (2, h, ACT))]  # of the actor's loss, down to the action
    actor_back = [((h, n), (n, out)), ((n, out), (out, h)), ((h, n), (n, h)), ((n, h), (h, h)), ((OBS, n), (n, h))]
    # the actor runs at the successors and at the states; critics for the target, for their loss and for the actor's
    shapes = 2 * actor + 3 * critic + critic_back + through_critic + actor_back
    arrays = {shape: torch.randn(*shape) for pair in shapes for shape in pair}  # few, so that they stay in the cache
    pairs = [(arrays[a], arrays[b]) for a, b in shapes]
    targets = {product.shape: product for product in (torch.matmul(a, b) for a, b in pairs)}
    work = [(torch.mv if b.dim() == 1 else torch.matmul, a, b, targets[torch.matmul(a, b).shape]) for a, b in pairs]

    def products() -> None:
        for product, a, b, target in work:
            product(a, b, out=target)

    return products


def loop_speed(width: int, blocks: int, steps: int, say: Say) -> dict[str, Any]:
    """Act, simulate, store, one update: milliseconds per environment step."""
    say(f"whole loop: {ENV}, one environment, one update a step, networks {width}x{width}, {steps} steps a block")
    with pinned(), tempfile.TemporaryDirectory() as folder:
        own = {
            "SAC": _loop(SACConfig(**COMMON, width=width), Path(folder) / "sac"),
            "DSAC-T": _loop(DSACTConfig(**COMMON, width=width), Path(folder) / "dsact"),
        }
        others = {"SB3 SAC": _sb3(width, 100_000), "SBX SAC": _sbx(width, 100_000, say)}

        def theirs(model: Any) -> Callable[[], float]:
            return timed(lambda: model.learn(steps, reset_num_timesteps=False), units=steps)

        def ours(loop: OffPolicyLoop) -> Callable[[], float]:
            def run() -> None:
                end = loop.step + steps
                while loop.step < end:
                    iterate(loop)

            return timed(run, units=steps)

        contestants = {name: theirs(model) for name, model in others.items() if model is not None}
        contestants |= {name: ours(loop) for name, loop in own.items()}
        return {"width": width, "batch": BATCH, "steps": steps} | alternate(contestants, blocks, say)


def _loop(algo: SACConfig | DSACTConfig, folder: Path) -> OffPolicyLoop:
    """Past its warm-up. ``steps`` a block must be a multiple of the loop's segment of 8."""
    cfg = resolve(TrainConfig(env=f"gym/{ENV}", algo=algo, steps=100_000, eval_every=0, log_every=10**9))
    env = make(cfg.env, 1)
    loop = OffPolicyLoop(cfg, env, env, FEATURES[env.spec.features], folder)
    while loop.step < 304:
        iterate(loop)
    return loop


def processes_speed(width: int, blocks: int, repeats: int, say: Say) -> dict[str, Any]:
    """Two learners of one thread each beside one learner of two threads: milliseconds per update, all in sum."""
    say(f"processes: two one-thread learners, and one on two threads, networks {width}x{width}")
    context = multiprocessing.get_context("spawn")
    times: dict[str, list[float]] = {"one learner, two threads": [], "two learners, one thread each": []}
    with context.Pool(2) as pool:
        for block in range(blocks):
            (one,) = pool.starmap(_updates_per_ms, [(2, width, repeats)])
            two = sum(pool.starmap(_updates_per_ms, [(1, width, repeats)] * 2, chunksize=1))
            for name, rate in zip(times, (one, two)):
                times[name].append(round(1 / rate, 5))
            say(f"  block {block + 1}/{blocks}: {1 / one:.3f} ms and {1 / two:.3f} ms an update")
    return {"width": width, "batch": BATCH, "repeats": repeats, "blocks_ms": times,
            "machine": machine() | {"threads": "1 or 2"}}  # fmt: skip


def _updates_per_ms(threads: int, width: int, repeats: int) -> float:
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    learner = SAC(OBS, ACT, SACConfig(**COMMON, width=width))
    replay, generator = _replay(), torch.Generator().manual_seed(0)

    def update() -> dict[str, Tensor]:
        return learner.update(replay.sample(BATCH, 0.99, 1, generator))

    timed(update, 10)()
    return 1 / timed(update, repeats, clock=time.perf_counter)()  # of two threads the processor's time would be the sum
