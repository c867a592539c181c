"""Verb ``collect``: specialists act with noise, what succeeded is kept with their clean actions, as a dataset.

Noise with clean labels follows DART (Laskey et al., 1703.09327), filtering by success RLDG (Xu et al., 2412.09858).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from distill.config import CollectConfig
from distill.dataset import INFO, Episode, feature_name, rollout_features
from distill.dataset_writer import DatasetWriter
from sims.errors import UserError
from sims.verbs import Verb, run_verb

BURST_CHANCE = 0.06  # per step, in an episode with bursts
BURST_STEPS = (3, 8)  # length of a burst, half-open
RECORDED = ("proprio", "objects", "goal")


class Noise:
    """What is added to the clean actions of B worlds: Gaussian everywhere, in some worlds bursts of one random action.

    Args:
        scale: (A,) largest action.  sd: of the Gaussian, in shares of it.
        bursty: (B,) bool, worlds with bursts.
    """

    def __init__(self, scale: np.ndarray, sd: float, bursty: np.ndarray, rng: np.random.Generator):
        self.scale, self.sd, self.bursty, self.rng = scale, sd, bursty, rng
        self.left = np.zeros(len(bursty), int)  # steps of the running burst
        self.held = np.zeros((len(bursty), len(scale)))  # its action

    def __call__(self, clean: np.ndarray) -> np.ndarray:
        """(B, A) clean actions -> (B, A) actions to execute."""
        starts = self.bursty & (self.left == 0) & (self.rng.random(len(clean)) < BURST_CHANCE)
        self.left[starts] = self.rng.integers(*BURST_STEPS, starts.sum())
        self.held[starts] = self.rng.uniform(-1, 1, (starts.sum(), clean.shape[1])) * self.scale
        gaussian = clean + self.sd * self.scale * self.rng.standard_normal(clean.shape)
        executed = np.where((self.left > 0)[:, None], self.held, gaussian)
        self.left = np.maximum(self.left - 1, 0)
        return np.clip(executed, -self.scale, self.scale).astype(np.float32)


def collect(cfg: CollectConfig) -> Path:
    """Fill the dataset at ``cfg.out`` with ``cfg.episodes`` successes per job; resumes, and reuses a finished one."""
    paths = cfg.specialists.required()
    root = Path(cfg.out)
    if _finished(root, cfg, paths):
        return root
    import torch

    from distill.teachers import Teachers
    from sims.registry import make

    torch.set_num_threads(1)
    teachers = Teachers(paths)
    first = make("tabletop", 1, cfg.seed, variants=list(paths))
    meta = {"distillery": {"config": _settings(cfg, paths)}}
    writer = DatasetWriter(root, rollout_features(first.spec), first.spec.control_hz, "so101", meta)
    first.close()
    started = time.time()
    with writer:
        for job in paths:
            _collect_job(cfg, job, teachers, writer, started, len(paths) * cfg.episodes)
    _log(root, {"stage": "collect", "step": writer.num_episodes, "total": writer.num_episodes, "time": time.time()})
    return root


def _collect_job(
    cfg: CollectConfig, job: str, teachers: Any, writer: DatasetWriter, started: float, total: int
) -> None:
    """Rounds of ``num_envs`` episodes; a round that was cut off is repeated and its committed episodes skipped."""
    from sims.registry import make

    mine = [e for e in writer.extras if e["job"] == job]
    number = max((e["round"] for e in mine), default=0)
    skip = sum(e["round"] == number for e in mine)
    tries, kept = number * cfg.num_envs, len(mine)
    env = make("tabletop", cfg.num_envs, cfg.seed, variants=[job], split=cfg.split, threads=cfg.threads)
    while kept < cfg.episodes:
        if tries > cfg.episodes * cfg.attempts and tries > 10 * max(1, kept):
            raise UserError(f"the specialist of '{job}' succeeded in {kept} of {tries} noisy episodes; {cfg.episodes} "
                            f"are wanted. Train it further, or lower 'noise' ({cfg.noise}) or 'episodes'.")  # fmt: skip
        for index, episode in enumerate(_round(cfg, job, number, env, teachers)):
            if index >= skip and kept < cfg.episodes:
                writer.add_episode(episode)
                kept += 1
        tries, number, skip = tries + cfg.num_envs, number + 1, 0
        rate = writer.num_frames / max(1e-9, time.time() - started)
        _log(writer.root, {"stage": "collect", "job": job, "step": writer.num_episodes, "total": total,
                           "steps_per_s": rate, "success": kept / max(1, tries), "time": time.time()})  # fmt: skip
    env.close()


def _round(cfg: CollectConfig, job: str, number: int, env: Any, teachers: Any) -> Iterator[Episode]:
    """One episode in every world; yields the successful ones, cut ``tail_steps`` after success."""
    import torch

    seed = int(np.random.default_rng([cfg.seed, number, sum(map(ord, job))]).integers(2**31))
    rng = np.random.default_rng(seed)
    scale = np.asarray(env.spec.action.high, np.float64)
    noise = Noise(scale, cfg.noise, rng.random(env.num_envs) < cfg.bursts, rng)
    obs = env.reset(seed)
    sentences = [env.spec.instructions[i] for i in obs["instruction"].tolist()]
    rows: list[dict[str, np.ndarray]] = []
    first = np.full(env.num_envs, -1)
    for step in range(env.spec.episode_steps):
        clean = teachers(obs, [job] * env.num_envs).numpy()
        executed = noise(clean)
        result = env.step(torch.from_numpy(executed))
        success = result.metrics["success"].numpy() > 0.5
        first = np.where((first < 0) & success, step, first)
        rows.append({**{k: obs[k].numpy() for k in RECORDED}, "action": clean, "executed.action": executed,
                     "next.reward": result.reward.numpy(), "next.success": success})  # fmt: skip
        obs = result.obs
        if ((first >= 0) & (step >= first + cfg.tail_steps)).all():
            break
    for world in np.flatnonzero(first >= 0):
        length = min(len(rows), int(first[world]) + 1 + cfg.tail_steps)
        data = {_column(k): np.stack([row[k][world] for row in rows[:length]]) for k in rows[0]}
        data["next.done"] = np.arange(length) == length - 1
        extra = {
            "success": True, "job": job, "specialist": teachers.paths[job], "env_seed": seed, "world": int(world),
            "round": number, "cycle_steps": int(first[world]) + 1, "bursts": bool(noise.bursty[world]),
        }  # fmt: skip
        yield Episode(data, sentences[world], extra)


def _column(name: str) -> str:
    return feature_name(name) if name in RECORDED else name


def _settings(cfg: CollectConfig, paths: dict[str, str]) -> dict[str, Any]:
    return {**{k: v for k, v in vars(cfg).items() if k not in ("specialists", "out", "threads")}, "specialists": paths}


def _finished(root: Path, cfg: CollectConfig, paths: dict[str, str]) -> bool:
    """A finished dataset made with the same settings is reused; one made with others is never touched."""
    if not (root / INFO).exists():
        return False
    found = json.loads((root / INFO).read_text()).get("distillery", {}).get("config")
    if found != _settings(cfg, paths):
        raise UserError(f"{root} holds a dataset made with other settings ({found}). Choose another 'out'.")
    return True


def _log(root: Path, row: dict[str, Any]) -> None:
    with (root / "metrics.jsonl").open("a") as handle:
        handle.write(json.dumps(row) + "\n")


VERB = Verb(
    name="collect",
    schema=CollectConfig,
    run=collect,
    sentence="roll specialists out with noise, keep what succeeds with their clean actions, as a LeRobot v3.0 dataset",
    examples=(
        "distillery collect specialists.reach=runs/reach specialists.lift=runs/lift out=runs/dataset",
        "distillery collect specialists.all=scripted episodes=20 noise=0 bursts=0 out=/tmp/demonstrations",
        "distillery collect specialists.lift=runs/lift/policy noise=0.2 bursts=0 episodes=500 out=runs/lift_data",
    ),
)


def main(argv: list[str] | None = None) -> int:
    return run_verb(VERB, argv)


if __name__ == "__main__":
    sys.exit(main())
