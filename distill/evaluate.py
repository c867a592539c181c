"""Verb ``evaluate``: how often a policy does what it is told, judged by the true predicate, one cell per job and axis.

Axes: ``seen`` and ``unseen_start`` ranges; ``unseen_phrasing`` (sentences written apart from those of training);
``swapped`` (the start states of ``seen``, each with the sentence of another job, judged on that job); ``switched`` (the
sentence changes while the first job is under way, judged on the second). Success must hold at the last step.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from control.evaluate import wilson
from control.policy import Policy, load_policy
from distill.config import SCRIPTED, EvaluateConfig
from distill.generalist import ChunkActor
from distill.teachers import Teachers, policy_folder
from distill.text import embed
from sims.errors import UserError
from sims.registry import make
from sims.verbs import Verb, run_verb
from sims.worlds.variants import EPISODE_STEPS, VARIANTS

Act = Callable[[Mapping[str, Tensor], Any], Tensor]  # obs, environment -> (B, A)


@dataclass(frozen=True)
class Outcome:
    """Of N episodes: ``success`` (N,) held at the last step, ``first`` (N,) steps until it was first true or -1."""

    success: np.ndarray
    first: np.ndarray
    job: np.ndarray

    def row(self, job: int) -> dict[str, Any]:
        """Figures of one job; cycle steps are means over successes, None without one."""
        mine = self.job == job
        won = self.success[mine]
        cycles = self.first[mine][won]
        low, high = wilson(int(won.sum()), int(mine.sum()))
        cycle = float(cycles.mean()) if len(cycles) else None
        return {"successes": int(won.sum()), "episodes": int(mine.sum()), "rate": float(won.mean()),
                "interval": [low, high], "cycle_steps": cycle}  # fmt: skip


class Actor:
    """A generalist that is told the sentences of the worlds; every call is for one more step of all worlds."""

    def __init__(self, policy: Policy, execute: int, encoder: str):
        self.policy, self.execute, self.encoder = policy, execute or policy.spec.execute, encoder
        self.chunks: ChunkActor | None = None
        self.words = torch.zeros(0)
        self.spoken: list[str] = []

    def restart(self) -> None:
        self.chunks = None

    def __call__(self, obs: Mapping[str, Tensor], env: Any) -> Tensor:
        said = [env.spec.instructions[i] for i in obs["instruction"].tolist()]
        if self.chunks is None:
            self.chunks = ChunkActor(self._predict, self.execute, torch.tensor(env.spec.action.high))
        if said != self.spoken:
            changed = torch.tensor([a != b for a, b in zip(said, self.spoken)] or [True] * len(said))
            self.chunks.restart(changed)  # a new sentence makes the running plan void
            self.spoken, self.words = said, torch.from_numpy(embed(said, self.encoder))
        return self.chunks({**obs, "embedding": self.words})

    def _predict(self, obs: Mapping[str, Tensor]) -> Tensor:
        chunk, _ = self.policy({k: obs[k].numpy() for k in self.policy.spec.inputs})
        return torch.from_numpy(np.asarray(chunk))


class TeacherActor:
    """Specialists or scripts, which see the goal instead of the sentence."""

    def __init__(self, paths: Mapping[str, str]):
        self.teachers = Teachers(paths)

    def restart(self) -> None:
        pass

    def __call__(self, obs: Mapping[str, Tensor], env: Any) -> Tensor:
        return self.teachers(obs, [env.variants[i] for i in env.variant_ids])


def run_episodes(
    env: Any, act: Any, seed: int, steps: np.ndarray, begin: np.ndarray | None = None,
    switch: tuple[int, np.ndarray] | None = None,
) -> Outcome:  # fmt: skip
    """One episode in every world from the starts of ``seed``.

    Args:
        steps: (B,) length of each world's episode, counted from the switch where there is one.
        begin: (B,) job of each world from the first step; default: as the environment has it.
        switch: the step at which, and the (B,) jobs to which, the sentence changes.
    """
    obs = env.reset(seed)
    act.restart()
    if begin is not None:
        obs = env.set_variants(begin)
    offset = switch[0] if switch else 0
    success = np.zeros(env.num_envs, bool)
    first = np.full(env.num_envs, -1)
    for step in range(int(steps.max()) + offset):
        if switch and step == offset:
            obs = env.set_variants(switch[1])
        result = env.step(act(obs, env))
        obs = result.obs
        now = result.metrics["success"].numpy() > 0.5
        age = step - offset
        if age < 0:
            continue
        running = age < steps
        first = np.where((first < 0) & now & running, age + 1, first)
        success = np.where(age == steps - 1, now, success)
    return Outcome(success, first, env.variant_ids.copy())


class Evaluation:
    """Cells of one policy, written to disk one by one.

    Args:
        cfg: settings.
        act: what drives the worlds.
        jobs: jobs measured.
    """

    def __init__(self, cfg: EvaluateConfig, act: Any, jobs: Sequence[str]):
        self.cfg, self.act, self.jobs = cfg, act, list(jobs)
        self.limits = np.asarray([EPISODE_STEPS[VARIANTS[j].task] for j in self.jobs])

    def axis(self, axis: str) -> list[dict[str, Any]]:
        """Every job's cell of one axis: its own starts first, so that axes are paired by start state."""
        outcomes = [self._batch(axis, job, batch) for job in range(len(self.jobs)) for batch in self._batches()]
        merged = Outcome(*(np.concatenate([getattr(o, k) for o in outcomes]) for k in ("success", "first", "job")))
        return [{"axis": axis, "variant": name, **merged.row(i)} for i, name in enumerate(self.jobs)]

    def _batches(self) -> list[tuple[int, int]]:
        """(seed, worlds) of each batch of one job's episodes."""
        sizes = [self.cfg.num_envs] * (self.cfg.episodes // self.cfg.num_envs)
        rest = self.cfg.episodes % self.cfg.num_envs
        return [(self.cfg.seed + i, n) for i, n in enumerate([*sizes, rest]) if n]

    def _batch(self, axis: str, job: int, batch: tuple[int, int]) -> Outcome:
        seed, worlds = batch
        seed += 1000 * list(VARIANTS).index(self.jobs[job])
        longest = int(self.limits.max()) + self.cfg.switch_step + 1
        env = make("tabletop", worlds, seed, variants=self.jobs, threads=self.cfg.threads, time_limit=longest,
                   fixed_variants=np.full(worlds, job), split="heldout" if axis == "unseen_start" else "train",
                   phrasings="heldout" if axis == "unseen_phrasing" else "train")  # fmt: skip
        try:
            others = other_jobs(job, len(self.jobs), worlds)
            steps = self.limits[others if axis in ("swapped", "switched") else np.full(worlds, job)]
            begin = others if axis == "swapped" else None
            switch = (self.cfg.switch_step, others) if axis == "switched" else None
            return run_episodes(env, self.act, seed, steps, begin, switch)
        finally:
            env.close()


def other_jobs(job: int, jobs: int, worlds: int) -> np.ndarray:
    """(W,) a job for each world that is not ``job``, every other one equally often."""
    others = np.asarray([j for j in range(jobs) if j != job] or [job])
    return others[np.arange(worlds) % len(others)]


def evaluate(cfg: EvaluateConfig) -> Path:
    """Measure every cell that ``cfg.out`` does not hold yet; returns the path of the JSON file."""
    out = Path(cfg.out)
    torch.set_num_threads(1)
    act, jobs, what = _open(cfg)
    document = _read(out, {"policy": what, "episodes": cfg.episodes, "seed": cfg.seed, "execute": cfg.execute,
                           "jobs": list(jobs)})  # fmt: skip
    evaluation = Evaluation(cfg, act, jobs)
    axes = [a for a in cfg.axes if len(jobs) > 1 or a not in ("swapped", "switched")]
    if isinstance(act, TeacherActor):
        axes = [a for a in axes if a in ("seen", "unseen_start")]  # the others are about sentences
    for number, axis in enumerate(axes):
        if any(cell["axis"] == axis for cell in document["cells"]):
            continue
        started = time.time()
        cells = evaluation.axis(axis)
        document["cells"] += cells
        _write(out, document)
        rate = sum(c["successes"] for c in cells) / sum(c["episodes"] for c in cells)
        row = {"stage": f"evaluate {axis}", "step": number + 1, "total": len(axes), "success": rate,
               "seconds": time.time() - started, "time": time.time()}  # fmt: skip
        with out.with_suffix(".metrics.jsonl").open("a") as handle:
            handle.write(json.dumps(row) + "\n")
        print(describe(cells), flush=True)
    return out


def _open(cfg: EvaluateConfig) -> tuple[Any, Sequence[str], Any]:
    """What acts, the jobs it knows (cut down to ``cfg.jobs``), and how to name it in the results."""
    paths = cfg.specialists.paths() or (dict.fromkeys(VARIANTS, SCRIPTED) if cfg.policy == SCRIPTED else {})
    if paths:
        jobs = [j for j in paths if not cfg.jobs or j in cfg.jobs]
        return TeacherActor(paths), _some(jobs, cfg, paths), paths
    policy = load_policy(policy_folder(cfg.policy))
    if policy.spec.language is None:
        raise UserError(f"{cfg.policy} is a specialist (it takes no sentences). Name its job: specialists.<job>=…")
    if cfg.execute > policy.spec.chunk:
        raise UserError(f"option 'execute' ({cfg.execute}) exceeds the policy's chunk ({policy.spec.chunk}).")
    known = list(dict.fromkeys(policy.spec.language["variants"]))
    jobs = [j for j in known if not cfg.jobs or j in cfg.jobs]
    return Actor(policy, cfg.execute, policy.spec.language["encoder"]), _some(jobs, cfg, known), cfg.policy


def _some(jobs: Sequence[str], cfg: EvaluateConfig, known: Any) -> Sequence[str]:
    missing = [j for j in cfg.jobs if j not in jobs]
    if missing or not jobs:
        raise UserError(f"this policy does not know job {missing[:1]}; it knows {', '.join(known)}.")
    return jobs


def _read(out: Path, head: dict[str, Any]) -> dict[str, Any]:
    """The document to go on with; a document of other settings is never overwritten."""
    if not out.exists():
        return {**head, "cells": []}
    try:
        found = json.loads(out.read_text())
        same = {k: found[k] for k in head} == head
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{out}: not an evaluation. Choose another 'out', or delete it.") from None
    if not same:
        raise UserError(f"{out}: holds an evaluation with other settings. Choose another 'out', or delete it.")
    return found


def _write(out: Path, document: Mapping[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=1))
    os.replace(temporary, out)


def describe(cells: Sequence[Mapping[str, Any]]) -> str:
    """One line per cell: axis, job, success with its interval, cycle time in steps."""
    lines = []
    for c in cells:
        cycle = "   - " if c["cycle_steps"] is None or math.isnan(c["cycle_steps"]) else f"{c['cycle_steps']:5.1f}"
        low, high = c["interval"]
        lines.append(f"{c['axis']:16}{c['variant']:14}{c['successes']:4d}/{c['episodes']:<4d}{c['rate']:6.2f}"
                     f"  [{low:.2f}, {high:.2f}]  {cycle} steps")  # fmt: skip
    return "\n".join(lines)


VERB = Verb(
    name="evaluate",
    schema=EvaluateConfig,
    run=evaluate,
    sentence="measure a policy per job: seen and unseen starts, unseen phrasings, swapped sentences, with intervals",
    examples=(
        "distillery evaluate policy=runs/generalist out=runs/evaluation.json",
        "distillery evaluate specialists.lift=runs/lift specialists.reach=runs/reach out=runs/teachers.json",
        "distillery evaluate policy=scripted axes=[seen] episodes=500 out=runs/demonstrator.json",
    ),
)


def main(argv: list[str] | None = None) -> int:
    return run_verb(VERB, argv)


if __name__ == "__main__":
    sys.exit(main())
