"""Learning curves of our learners beside Stable-Baselines3's SAC: same networks, rates, budget and start states.

One text file per run, written when the run is complete: a suite that was interrupted goes on with the missing ones.
"""

from __future__ import annotations

import json
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from control.config import DSACTConfig, OffPolicyConfig, SACConfig, TrainConfig
from control.evaluate import evaluate
from control.log import write_text
from control.off_policy import OffPolicyLoop
from sims.features import FEATURES
from sims.registry import make

POINTS = 10  # evaluations per run, equally spaced
EPISODES = 10  # of each
FINAL_EPISODES = 20
EVAL_SEED = 1_000_003  # the same start states for every learner and seed
# Stable-Baselines3's defaults, given to every learner alike; the width is set by the suite
COMMON: dict[str, Any] = {
    "lr": 3e-4, "lr_alpha": 3e-4, "gamma": 0.99, "tau": 0.005, "alpha": 1.0, "batch_size": 256, "depth": 2,
    "activation": "relu", "warmup_steps": 100, "critic_layer_norm": False, "actor_average": 1.0,
    "log_std_min": -20.0, "log_std_max": 2.0,
}  # fmt: skip
LEARNERS = ("dsact", "sac", "sb3_sac")


@dataclass(frozen=True)
class Run:
    """One training: which world, learner, reward scale (training only), width of the networks, budget and seed."""

    env: str
    learner: str
    steps: int
    seed: int
    scale: float = 1.0
    width: int = 256
    precision: str = "float32"

    def file(self, root: Path) -> Path:
        scale = "" if self.scale == 1 else f"_scale{self.scale:g}"
        precision = "" if self.precision == "float32" else f"_{self.precision}"
        return (
            root / self.env.replace("/", "_") / f"{self.learner}{scale}{precision}_w{self.width}_seed{self.seed}.json"
        )


def suite(width: int = 256) -> Iterator[Run]:
    """InvertedDoublePendulum-v5 and Hopper-v5; learners interleaved by seed, so that a part is already a comparison."""
    pendulum, hopper = "gym/InvertedDoublePendulum-v5", "gym/Hopper-v5"
    for seed in range(5):
        for learner in LEARNERS:
            yield Run(pendulum, learner, 20_000, seed, width=width)
        if seed < 3:
            for learner in LEARNERS:
                yield Run(hopper, learner, 50_000, seed, width=width)
        for scale in (0.1, 10.0):
            for learner in ("dsact", "sac"):
                yield Run(pendulum, learner, 20_000, seed, scale, width)


def run_suite(runs: list[Run], root: Path, say: Callable[[str], None] = print) -> None:
    """Train what has no file yet."""
    for index, run in enumerate(runs):
        file = run.file(root)
        if file.exists():
            continue
        say(f"[{index + 1}/{len(runs)}] {file.stem} on {run.env}")
        train_one(run, file)


def train_one(run: Run, file: Path) -> dict[str, Any]:
    """Train, evaluate on the way and at the end on the true reward, write the file."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    eval_env = make(run.env, EPISODES, seed=run.seed + 1)
    started = time.monotonic()
    learn = _learn_sb3 if run.learner.startswith("sb3") else _learn_ours
    curve: list[dict[str, Any]] = []

    def note(step: int, act: Callable[..., Any]) -> None:
        result = evaluate(eval_env, act, EPISODES, EVAL_SEED)
        curve.append({"step": step, "return": round(result.mean_return, 2)})

    act, figures = learn(run, note)
    wall = time.monotonic() - started
    final = evaluate(eval_env, act, FINAL_EPISODES, EVAL_SEED + 1)
    eval_env.close()
    record = {
        **asdict(run), "final_return": round(final.mean_return, 2), "final_episodes": FINAL_EPISODES,
        "eval_episodes": EPISODES, "curve": curve, "wall_s": round(wall, 1), **figures, "machine": machine(),
    }  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(record, indent=1) + "\n")
    return record


def _learn_ours(run: Run, note: Callable[[int, Callable[..., Any]], None]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The product's own loop; the scale enters as a reward model would."""
    cfg = TrainConfig(
        env=run.env, num_envs=1, algo=algo_of(run), steps=run.steps, utd=1.0, eval_every=0, stop_success=0.0, demos=0,
        log_every=run.steps // POINTS, checkpoint_seconds=1e9, seed=run.seed,
    )  # fmt: skip
    env = make(run.env, 1, seed=run.seed)
    score = None if run.scale == 1 else lambda segment: run.scale * segment.reward
    with tempfile.TemporaryDirectory() as folder:
        loop = OffPolicyLoop(cfg, env, env, FEATURES[env.spec.features], Path(folder), score)
        for point in range(1, POINTS + 1):
            while loop.step < run.steps * point // POINTS:
                loop.store(loop.collect())
                loop.learn()
            note(loop.step, loop.act_greedily)
    env.close()
    settings = {k: v for k, v in asdict(cfg.algo).items() if k != "name"}
    return loop.act_greedily, {"updates": loop.learner.updates, "settings": settings}


def algo_of(run: Run) -> OffPolicyConfig:
    """DSAC-T with the budget of SAC: its rates and warm-up, and its own delay of two."""
    if run.learner == "dsact":
        return DSACTConfig(**COMMON, width=run.width, policy_delay=2, precision=run.precision)
    return SACConfig(**COMMON, width=run.width, policy_delay=1, precision=run.precision)


def _learn_sb3(run: Run, note: Callable[[int, Callable[..., Any]], None]) -> tuple[Callable[..., Any], dict[str, Any]]:
    import gymnasium as gym
    from stable_baselines3 import SAC

    env = gym.make(run.env.partition("/")[2])
    model = SAC(
        "MlpPolicy", env, seed=run.seed, learning_starts=COMMON["warmup_steps"], learning_rate=COMMON["lr"],
        gamma=COMMON["gamma"], tau=COMMON["tau"], batch_size=COMMON["batch_size"], ent_coef="auto",
        policy_kwargs={"net_arch": [run.width] * COMMON["depth"]}, device="cpu",
    )  # fmt: skip

    def act(obs: Any) -> torch.Tensor:
        return torch.from_numpy(model.predict(obs["proprio"].numpy(), deterministic=True)[0])

    for point in range(1, POINTS + 1):
        target = run.steps * point // POINTS
        model.learn(target - model.num_timesteps, reset_num_timesteps=False)
        note(model.num_timesteps, act)
    env.close()
    return act, {
        "updates": model._n_updates,
        "settings": "stable_baselines3.SAC defaults but learning_starts and width",
    }


def machine() -> dict[str, Any]:
    """What a figure depends on."""
    packages = ("torch", "mujoco", "gymnasium", "stable-baselines3", "robot-distillery")
    model = next(
        (line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine()
    )
    return {"cpu": model, "threads": torch.get_num_threads(), **{p: metadata.version(p) for p in packages}}


def _cpuinfo() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.exists() else []
