"""Learning curves of our learners beside Stable-Baselines3's SAC: same networks, rates, budget and start states.

One text file per run, written when the run is complete: a suite that was interrupted goes on with the missing ones.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from control.benchmark_machine import machine
from control.config import ALGOS, AlgoConfig, DSACTConfig, PPOConfig, ResolvedConfig, SACConfig, TrainConfig, resolve
from control.evaluate import EvalResult, evaluate
from control.log import write_text
from control.off_policy import OffPolicyLoop
from control.on_policy import OnPolicyLoop
from sims.errors import UserError
from sims.features import FEATURES
from sims.registry import make
from sims.types import VecEnv

POINTS = 10  # evaluations per run, equally spaced
EPISODES = 10  # of each
FINAL_EPISODES = 20
EVAL_SEED = 1_000_003  # the same start states for every learner and seed
# Stable-Baselines3's defaults, given to every learner alike; the width is set by the suite
COMMON: dict[str, Any] = {
    "lr": 3e-4, "lr_alpha": 3e-4, "gamma": 0.99, "tau": 0.005, "alpha": 1.0, "batch_size": 256, "depth": 2,
    "activation": "relu", "warmup_steps": 100, "critic_layer_norm": False, "actor_average": 1.0, "policy_delay": 1,
    "log_std_min": -20.0, "log_std_max": 2.0,
}  # fmt: skip
LEARNERS = ("dsact", "sac", "sb3_sac")
# At 3e-4 no learner climbs to values of 9,300 (reward x 10) within 20,000 steps: Adam moves a weight by at most its
# rate a step, whatever the loss. The reward scale is therefore studied at this rate, too, for both learners alike.
FAST_RATE = 1e-3
PENDULUM, HOPPER = "gym/InvertedDoublePendulum-v5", "gym/Hopper-v5"
SCALES = (0.1, 1.0, 10.0)
WIDTH = 128  # of the networks of suite gym

Note = Callable[[int, Callable[..., Any]], None]


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        scale: factor on the reward, in training only.
        width: units per hidden layer; None: the world's own, like every other setting then.
    """

    env: str
    learner: str
    steps: int
    seed: int
    scale: float = 1.0
    width: int | None = None
    precision: str = "float32"

    @property
    def group(self) -> str:
        """What the seeds have in common."""
        scale = "" if self.scale == 1 else f"_scale{self.scale:g}"
        precision = "" if self.precision == "float32" else f"_{self.precision}"
        return f"{self.learner}{scale}{precision}" + (f"_w{self.width}" if self.width else "")

    def file(self, root: Path) -> Path:
        return root / self.env.replace("/", "_") / f"{self.group}_seed{self.seed}.json"


def gym_suite(width: int = WIDTH) -> Iterator[Run]:
    """InvertedDoublePendulum-v5 and Hopper-v5; learners interleaved by seed, so that a part is already a comparison."""
    for seed in range(5):
        for learner in LEARNERS:
            yield Run(PENDULUM, learner, 20_000, seed, width=width)
        if seed < 3:
            for learner in LEARNERS:
                yield Run(HOPPER, learner, 50_000, seed, width=width)
    for seed in range(5):
        for scale in SCALES:
            for learner in ("dsact_fast", "sac_fast"):
                yield Run(PENDULUM, learner, 20_000, seed, scale, width)
    for seed in range(5):
        for scale in (0.1, 10.0):
            for learner in ("dsact", "sac"):
                yield Run(PENDULUM, learner, 20_000, seed, scale, width)


def precision_suite(width: int = WIDTH) -> Iterator[Run]:
    """float32 beside bfloat16; the float32 runs of the pendulum are those of suite gym."""
    for seed in range(5):
        for learner in ("sac", "dsact"):
            for precision in ("float32", "bfloat16"):
                yield Run(PENDULUM, learner, 20_000, seed, width=width, precision=precision)
                yield Run("tabletop/reach", learner, 32_000, seed, precision=precision)


def brax_suite() -> Iterator[Run]:
    """One world of Brax by an on-policy and an off-policy learner, with the world's own settings."""
    for seed in range(3):
        yield Run("brax/inverted_pendulum", "ppo", 200_000, seed)
        yield Run("brax/inverted_pendulum", "dsact", 400_000, seed)


def run_suite(runs: list[Run], root: Path, jobs: int = 1, say: Callable[[str], None] = print) -> None:
    """Train what has no file yet, ``jobs`` at a time, each in one thread.

    Raises:
        UserError: a file of another budget is in the way.
    """
    missing = [run for run in runs if not _is_done(run, run.file(root))]
    say(f"{len(runs) - len(missing)} of {len(runs)} runs are there")
    if jobs == 1:
        for run in missing:
            say(_report(run, train_one(run, run.file(root))))
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context)
    try:
        futures = [(run, pool.submit(train_one, run, run.file(root))) for run in missing]
        for run, future in futures:
            say(_report(run, future.result()))
    finally:
        pool.shutdown(cancel_futures=True)


def _report(run: Run, record: Mapping[str, Any]) -> str:
    return f"  {run.env} {run.group} seed {run.seed}: return {record['final_return']:.1f}, {record['wall_s']:.0f} s"


def _is_done(run: Run, file: Path) -> bool:
    if not file.exists():
        return False
    found = json.loads(file.read_text())
    for name, value in asdict(run).items():
        if found.get(name) != value:
            raise UserError(f"{file} holds a run with {name}={found.get(name)}, this suite asks for {value}. "
                            "Choose another out=, or delete that file.")  # fmt: skip
    return True


def train_one(run: Run, file: Path) -> dict[str, Any]:
    """Train, evaluate on the way and at the end on the true reward, write the file."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    eval_env = make(run.env, EPISODES, seed=run.seed + 1)
    started = time.monotonic()
    learn = _learn_sb3 if run.learner.startswith("sb3") else _learn_ours
    curve: list[dict[str, Any]] = []

    def note(step: int, act: Callable[..., Any]) -> None:
        curve.append({"step": step, **_figures(eval_env, evaluate(eval_env, act, EPISODES, EVAL_SEED))})

    act, figures = learn(run, note)
    wall = time.monotonic() - started
    final = _figures(eval_env, evaluate(eval_env, act, FINAL_EPISODES, EVAL_SEED + 1))
    eval_env.close()
    record = {
        **asdict(run), **{f"final_{k}": v for k, v in final.items()}, "final_episodes": FINAL_EPISODES,
        "eval_episodes": EPISODES, "curve": curve, "wall_s": round(wall, 1), **figures, "machine": machine(),
    }  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(record, indent=1) + "\n")
    return record


def _figures(env: VecEnv, result: EvalResult) -> dict[str, float]:
    success = {"success": result.success} if env.spec.has_success else {}  # the others have none
    return {"return": round(result.mean_return, 2), **success}


def train_config(run: Run) -> ResolvedConfig:
    """The settings of one of our learners: those of Stable-Baselines3 in a Gymnasium world, else the world's own."""
    free: dict[str, Any] = {"seed": run.seed, "eval_every": 0, "stop_success": 0.0, "log_every": run.steps}
    if run.env.startswith("gym/"):
        cfg = TrainConfig(env=run.env, num_envs=1, algo=algo_of(run), steps=run.steps, utd=1.0, demos=0, **free)
        return resolve(cfg)
    own: dict[str, Any] = {"precision": run.precision} | ({} if run.width is None else {"width": run.width})
    return resolve(TrainConfig(env=run.env, algo=ALGOS[run.learner](**own), steps=run.steps, **free))


def algo_of(run: Run) -> AlgoConfig:
    """DSAC-T with the budget of SAC: its rates, its warm-up, and as many steps of the actor and the targets."""
    schema = DSACTConfig if run.learner.startswith("dsact") else SACConfig
    rates = {"lr": FAST_RATE, "lr_alpha": FAST_RATE} if run.learner.endswith("_fast") else {}
    return schema(**{**COMMON, **rates}, width=run.width, precision=run.precision)


def _learn_ours(run: Run, note: Note) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The product's own loop; the scale enters as a reward model would."""
    cfg = train_config(run)
    env = make(run.env, cfg.num_envs or 1, seed=run.seed)
    score = None if run.scale == 1 else lambda segment: run.scale * segment.reward
    with tempfile.TemporaryDirectory() as folder:
        kind = OnPolicyLoop if isinstance(cfg.algo, PPOConfig) else OffPolicyLoop
        loop = kind(cfg, env, env, FEATURES[env.spec.features], Path(folder), score)
        for point in range(1, POINTS + 1):
            while loop.step < run.steps * point // POINTS:
                iterate(loop)
            note(loop.step, loop.act_greedily)
    env.close()
    settings = {"num_envs": cfg.num_envs, **{k: v for k, v in asdict(cfg.algo).items() if k != "name"}}
    return loop.act_greedily, {"updates": loop.learner.updates, "settings": settings}


def iterate(loop: OffPolicyLoop | OnPolicyLoop) -> None:
    """One turn of a loop: act, store, learn."""
    if isinstance(loop, OnPolicyLoop):
        loop.learn(*loop.collect())
    else:
        loop.store(loop.collect())
        loop.learn()


def _learn_sb3(run: Run, note: Note) -> tuple[Callable[..., Any], dict[str, Any]]:
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
    settings = "the defaults of stable_baselines3.SAC, but the width"
    return act, {"updates": model._n_updates, "settings": settings}
