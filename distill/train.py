"""Verb ``distill``: behaviour cloning on a dataset, then rounds of DAgger, into one generalist that obeys sentences."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from control.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint
from control.export import export_policy
from distill.config import DistillConfig
from distill.dagger import dagger_round
from distill.dataset import INFO, read_json
from distill.generalist import FilmMLP, Generalist, count_weights, fit_scaling
from distill.samples import Samples, Sentences, load_samples
from distill.teachers import Teachers
from distill.text_gate import make_language, save_language
from sims.errors import UserError
from sims.registry import make
from sims.verbs import Verb, run_verb, save_config
from sims.worlds.variants import VARIANTS

FEATURES = "tabletop_all"
FINAL_LR = 0.1  # of the first
GOLDEN_ROWS = 8
SAMPLES_PER_SENTENCE = 8


class Trainer:
    """State of a distillation: network, averaged weights, optimiser, samples, random streams."""

    def __init__(self, cfg: DistillConfig):
        self.cfg, self.out = cfg, Path(cfg.out)
        recorded = read_json(Path(cfg.dataset) / INFO).get("distillery", {}).get("config", {})
        known = recorded.get("specialists") or cfg.specialists.paths()
        self.jobs = [v for v in VARIANTS if v in known]
        self.language = make_language(self.jobs, cfg.encoder, cfg.snap)
        words = (cfg.word_dropout, cfg.embedding_noise, cfg.mix_sentences)
        self.sentences = Sentences(self.language, self.jobs, *words, seed=cfg.seed)
        first, self.real_obs = load_samples(cfg.dataset, FEATURES, self.jobs, cfg.chunk)
        self.parts: list[Samples] = [first]
        torch.manual_seed(cfg.seed)
        scaling = fit_scaling(first.features, first.target, first.valid)
        actions, embedding = first.target.shape[-1], self.sentences.table.shape[-1]
        inputs = 2 * first.features.shape[-1]
        mlp = FilmMLP(inputs, embedding, cfg.chunk, actions, cfg.width, cfg.depth, cfg.language_width)
        self.model = Generalist(mlp, FEATURES, scaling)
        self.average = {k: v.clone() for k, v in mlp.state_dict().items()}
        self.optimizer = torch.optim.AdamW(mlp.parameters(), cfg.lr, weight_decay=cfg.weight_decay, fused=True)
        self.generator = torch.Generator().manual_seed(cfg.seed)
        self.failure = np.full(len(self.jobs), 0.5)
        self.step = 0
        self._pool_parts()

    @property
    def total(self) -> int:
        return self.cfg.clone_steps + self.cfg.rounds * self.cfg.round_updates

    @property
    def rounds_done(self) -> int:
        return len(self.parts) - 1

    def rounds_due(self) -> int:
        """DAgger rounds that should lie behind step ``self.step``."""
        if self.step < self.cfg.clone_steps or not self.cfg.rounds:
            return 0
        done = (self.step - self.cfg.clone_steps) // max(1, self.cfg.round_updates)
        return min(self.cfg.rounds, done + 1)

    def _pool_parts(self) -> None:
        """All samples, normalised once, with the rows of each job."""
        pool = Samples.join(self.parts)
        self.inputs = self.model.normalise(pool.features)
        self.targets = (pool.target - self.model.centre) / self.model.reach
        self.job, self.valid = pool.job, pool.valid.float()
        visited = torch.arange(len(pool)) >= len(self.parts[0])  # states of DAgger
        classes = pool.job + len(self.jobs) * visited
        self.by_class = torch.argsort(classes, stable=True)
        self.counts = torch.bincount(classes, minlength=2 * len(self.jobs))

    def draw(self) -> tuple[Tensor, ...]:
        """U sentences with R samples each: inputs (U, R, F), sentences (U, 1, E), targets (U, R, H, A), valid.

        Jobs that fail more are drawn more often. Sharing a sentence among a few samples halves the work of FiLM.
        """
        count = max(1, self.cfg.batch_size // SAMPLES_PER_SENTENCE)
        share = self.cfg.on_policy if len(self.parts) > 1 else 0.0
        weight = torch.tensor([1 + 2 * f for f in self.failure])
        weight = torch.cat([weight * (1 - share), weight * share]) * (self.counts > 0)
        drawn = torch.multinomial(weight, count, True, generator=self.generator)  # (U,) job + jobs * visited
        uniform = torch.rand(count, SAMPLES_PER_SENTENCE, generator=self.generator, dtype=torch.float64)
        at = (uniform * self.counts[drawn, None]).long() + (self.counts.cumsum(0) - self.counts)[drawn, None]  # (U, R)
        job = drawn % len(self.jobs)
        index = self.by_class[at]
        words = self.sentences.draw(job, self.generator).unsqueeze(1)
        return self.inputs[index], words, self.targets[index], self.valid[index]

    def update(self) -> Tensor:
        """One step of masked L1 regression; returns the loss."""
        cfg, mlp = self.cfg, self.model.mlp
        inputs, words, targets, valid = self.draw()
        error = (mlp(inputs, words) - targets).abs().mean(-1)  # (U, R, H)
        loss = (error * valid).sum() / valid.sum()
        share = 0.5 * (1 + math.cos(math.pi * self.step / self.total))
        for group in self.optimizer.param_groups:
            group["lr"] = cfg.lr * (FINAL_LR + (1 - FINAL_LR) * share)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        decay = min(cfg.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.values()), list(mlp.state_dict().values()), 1 - decay)
        self.step += 1
        return loss.detach()

    def averaged(self) -> Generalist:
        """A copy of the model with the averaged weights."""
        model = copy.deepcopy(self.model)
        model.mlp.load_state_dict(self.average)
        return model.eval()

    def improve(self, teachers: Teachers) -> dict[str, float]:
        """One DAgger round: new samples, new failure rates."""
        seed = int(np.random.default_rng([self.cfg.seed, 1 + self.rounds_done]).integers(2**31))
        with torch.no_grad():
            found = dagger_round(self.cfg, self.averaged(), teachers, self.sentences, self.jobs, FEATURES,
                                 self.failure, seed)  # fmt: skip
        rate = (found.successes + 1) / (found.episodes + 2)  # a job with few episodes stays near one half
        self.failure = 0.5 * self.failure + 0.5 * (1 - rate)  # few episodes a round: average over rounds
        self.parts.append(found.samples)
        self._pool_parts()
        row = {f"success/{job}": float(s / n) for job, s, n in zip(self.jobs, found.successes, found.episodes) if n}
        return {**row, "success": float(found.successes.sum() / max(1, found.episodes.sum())),
                "return": found.total_return, "samples": len(self.job)}  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Everything from which training goes on exactly."""
        return {
            "step": self.step,
            "failure": self.failure.tolist(),
            "model": self.model.mlp.state_dict(),
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "rounds": [vars(part) for part in self.parts[1:]],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state`."""
        self.step, self.failure = int(state["step"]), np.asarray(state["failure"])
        self.model.mlp.load_state_dict(state["model"])
        self.average = dict(state["average"])
        slots = {int(k): v for k, v in state["optimizer"]["state"].items()}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": slots, "param_groups": groups})
        self.generator.set_state(state["generator"])
        self.parts[1:] = [Samples(**part) for part in state["rounds"]]
        self._pool_parts()


def distill(cfg: DistillConfig) -> Path:
    """Train, or resume, or reuse the generalist at ``cfg.out``; returns the folder of the run."""
    out = Path(cfg.out)
    _check_settings(cfg, out)
    if (out / "result.json").exists():
        return out
    torch.set_num_threads(cfg.threads)
    trainer = Trainer(cfg)
    teachers = Teachers({j: p for j, p in cfg.specialists.paths().items() if j in trainer.jobs}) if cfg.rounds else None
    if teachers and (missing := [j for j in trainer.jobs if j not in teachers.paths]):
        name = missing[0]
        raise UserError(
            f"{cfg.dataset} has job '{name}', but no specialist labels it. Give specialists.{name}=<folder>"
        )
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "settings.json", _settings(cfg))
    if has_checkpoint(out / "checkpoint"):
        trainer.restore(load_checkpoint(out / "checkpoint"))
    save_config(cfg, out / "config.yaml")
    _loop(trainer, teachers)
    path = export(trainer, out / "policy")
    weights = count_weights(trainer.model.mlp)
    result = {"steps": trainer.step, "weights": weights, "samples": len(trainer.job), "policy": str(path),
              "failure": dict(zip(trainer.jobs, trainer.failure.tolist()))}  # fmt: skip
    _write_json(out / "result.json", result)
    shutil.rmtree(out / "checkpoint", ignore_errors=True)
    return out


def _settings(cfg: DistillConfig) -> dict[str, Any]:
    """The options that decide the result."""
    free = ("out", "threads", "checkpoint_seconds", "log_every", "specialists")
    return {**{k: v for k, v in vars(cfg).items() if k not in free}, "specialists": cfg.specialists.paths()}


def _check_settings(cfg: DistillConfig, out: Path) -> None:
    """A run of other settings is neither resumed nor passed off as this one."""
    if not (out / "settings.json").exists():
        return
    old, new = read_json(out / "settings.json"), _settings(cfg)
    differ = [f"{k} ({old.get(k)!r}, now {v!r})" for k, v in new.items() if old.get(k) != v]
    if differ:
        raise UserError(f"{out} holds a run with other settings: {', '.join(differ)}. Choose another 'out'.")


def _loop(trainer: Trainer, teachers: Teachers | None) -> None:
    cfg, out = trainer.cfg, trainer.out
    saved = started = time.time()
    first, losses = trainer.step, []
    while trainer.step < trainer.total:
        if teachers and trainer.rounds_done < trainer.rounds_due():
            row = trainer.improve(teachers)
            _log(out, {"stage": "dagger", "step": trainer.step, "total": trainer.total, **row, "time": time.time()})
            saved = 0.0  # a round is dear: keep it
        losses.append(trainer.update())
        if trainer.step % cfg.log_every == 0 or trainer.step == trainer.total:
            rate = (trainer.step - first) / (time.time() - started)
            _log(out, {"stage": "distill", "step": trainer.step, "total": trainer.total, "steps_per_s": rate,
                       "loss": float(torch.stack(losses).mean()), "time": time.time()})  # fmt: skip
            losses = []
        if time.time() - saved > cfg.checkpoint_seconds:
            save_checkpoint(out / "checkpoint", trainer.state())
            saved = time.time()


def export(trainer: Trainer, path: Path) -> Path:
    """Write the averaged model as an artefact with its language; replaces ``path`` only when complete."""
    cfg = trainer.cfg
    env = make("tabletop", 1, cfg.seed, variants=trainer.jobs)
    spec = env.spec
    env.close()
    rows = trainer.real_obs[:: max(1, len(trainer.real_obs) // GOLDEN_ROWS)][:GOLDEN_ROWS]
    split = spec.observation["proprio"].shape[0]
    words = trainer.sentences.table[torch.arange(len(rows)) % len(trainer.sentences.table)]
    example = {"proprio": rows[:, :split], "objects": rows[:, split:], "embedding": words}
    extra = {"parameters": count_weights(trainer.model.mlp), "jobs": trainer.jobs, "steps": trainer.step}
    building = path.with_name(path.name + ".building")
    export_policy(trainer.averaged(), spec, example, building,
                  action_meaning="joint_position_chunk_relative_to_target", chunk=cfg.chunk, execute=cfg.execute,
                  language=trainer.language.to_json(), extra=extra)  # fmt: skip
    save_language(trainer.language, building)
    shutil.rmtree(path, ignore_errors=True)
    os.replace(building, path)
    return path


def _log(out: Path, row: dict[str, Any]) -> None:
    with (out / "metrics.jsonl").open("a") as handle:
        handle.write(json.dumps(row) + "\n")


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(data, indent=1))
    os.replace(temporary, path)


VERB = Verb(
    name="distill",
    schema=DistillConfig,
    run=distill,
    sentence="distil a dataset and the specialists behind it into one generalist that obeys sentences",
    examples=(
        "distillery distill dataset=runs/dataset specialists.reach=runs/reach specialists.lift=runs/lift",
        "distillery distill dataset=runs/demos rounds=0 out=runs/clone          # a pure clone",
        "distillery distill dataset=runs/dataset specialists.all=scripted rounds=8 width=512 threads=2",
    ),
)


def main(argv: list[str] | None = None) -> int:
    return run_verb(VERB, argv)


if __name__ == "__main__":
    sys.exit(main())
