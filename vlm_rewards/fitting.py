"""What ``fit`` does: train the small CLIP on rendered frames with captions from state predicates, and grade it.

Supervision: predicates of scenes with other colours. The pair ``captions.UNSEEN`` is in no frame and no caption.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from vlm_rewards import captions, losses
from vlm_rewards.card import EVAL_SETS, grade
from vlm_rewards.clip import build_model, wrap
from vlm_rewards.config import FitConfig
from vlm_rewards.frames import Frames, cached_frames
from vlm_rewards.small_clip import Trunk, WordTokenizer, bind, model_config
from vlm_rewards.teacher import Teacher, trunk_of

GOAL_FAMILIES = captions.GOALS
TEMPERATURE_START = 0.05
COLOUR_BATCH = 32  # frames
COLOUR_RATE = 0.03  # of Adam; the pixel network is tiny


@dataclass(frozen=True)
class Targets:
    """What is true of N training frames.

    Attributes:
        truth: (N, C) int8, see captions.truth. progress: (N, G) float32 of the goal concepts.
        goals: G columns of ``truth``. families: name -> columns of ``progress``.
        rivals: family -> (N, S) column of ``progress`` for the object in each slot of the family, -1 for the pair that
            has no sentence: the same frame under two sentences.
    """

    truth: Tensor
    progress: Tensor
    goals: list[int]
    families: dict[str, list[int]]
    rivals: dict[str, Tensor]


def make_targets(frames: Frames) -> Targets:
    """Evaluate the grammar on the facts of the frames."""
    concepts = captions.concepts()
    goals = [i for i, c in enumerate(concepts) if c.positive and c.family in GOAL_FAMILIES]
    wanted = [concepts[i] for i in goals]
    families = {f: [j for j, c in enumerate(wanted) if c.family == f] for f in GOAL_FAMILIES}
    column = {(c.family, c.kind, c.colour): j for j, c in enumerate(wanted)}
    rivals = {}
    for family in GOAL_FAMILIES:
        slots = [s for s, k in enumerate(captions.SLOT_KIND) if k in captions.FAMILIES[family]]
        rows = []
        for s in slots:
            table = [column.get((family, captions.SLOT_KIND[s], c), -1) for c in captions.COLOURS]
            rows.append(np.array(table)[frames.facts.colour[:, s]])
        rivals[family] = torch.from_numpy(np.stack(rows, axis=1))
    return Targets(
        truth=torch.from_numpy(captions.truth(frames.facts, concepts)),
        progress=torch.from_numpy(captions.progress(frames.facts, wanted)),
        goals=goals,
        families=families,
        rivals=rivals,
    )


def sampling_weights(targets: Targets) -> np.ndarray:
    """(N,) probabilities: half uniform, half balanced over the goal concepts, whose successes are rare."""
    positive = (targets.truth[:, targets.goals] == 1).double()
    balanced = (positive / positive.sum(0).clamp(min=1)).sum(1).numpy()
    total = balanced.sum()
    uniform = np.full(len(balanced), 1.0 / len(balanced))
    mixed = 0.5 * uniform + 0.5 * (balanced / total if total > 0 else uniform)
    return mixed / mixed.sum()


def to_input(pixels: Tensor) -> Tensor:
    """(N, 64, 128, 3) uint8 -> (N, 3, 64, 128) in -1..1."""
    return pixels.permute(0, 3, 1, 2).float().div(127.5).sub(1.0)


def augment(pixels: Tensor, rng: np.random.Generator) -> Tensor:
    """(N, 64, 128, 3) uint8 -> (N, 3, 64, 128) in -1..1 with random brightness. Hue, sides and places stay."""
    x = 0.5 * to_input(pixels) + 0.5
    gain, bias = (torch.from_numpy(rng.normal(m, s, (len(x), 1, 1, 1))).float() for m, s in ((1, 0.12), (0, 0.02)))
    return (x * gain + bias).clamp(0, 1).sub(0.5).div(0.5).contiguous(memory_format=torch.channels_last)


def batch_loss(cosine: Tensor, scale: Tensor, targets: Targets, rows: Tensor, rank_weight: float) -> dict[str, Tensor]:
    """Contrastive loss, rank over frames (same sentence) and rank over sentences (same frame)."""
    progress = targets.progress[rows]
    goal = cosine[:, targets.goals]
    parts = {"contrast": losses.contrastive(scale * cosine, targets.truth[rows])}
    frames, sentences = [], []
    for family, columns in targets.families.items():
        frames.append(losses.rank(goal[:, columns], progress[:, columns]))
        column = targets.rivals[family][rows]
        known = column.clamp(min=0)
        told = torch.where(column >= 0, progress.gather(1, known), torch.nan)
        own = goal.gather(1, known)
        sentences.append(losses.rank_pairs(own, own.roll(1, 1), told, told.roll(1, 1)))
    parts["rank"], parts["rank_sentences"] = torch.stack(frames).mean(), torch.stack(sentences).mean()
    parts["loss"] = parts["contrast"] + rank_weight * (parts["rank"] + parts["rank_sentences"])
    return parts


class Sentences:
    """The concepts' sentences: concepts that differ in colour only share a template and its phrasings."""

    def __init__(self) -> None:
        templates: dict[tuple, int] = {}
        self.ids: list[Tensor] = []
        owner = []
        for concept in captions.concepts():
            key = (concept.family, concept.positive, concept.kind, bool(concept.colour))
            if key not in templates:
                templates[key] = len(self.ids)
                self.ids.append(tokenizer()(captions.phrasings(concept)))
            owner.append(templates[key])
        self.owner = torch.tensor(owner)  # (C,)
        self.slots = torch.tensor([captions.COLOURS.index(c.colour) if c.colour else -1 for c in captions.concepts()])

    def embed(self, model: Any, rng: np.random.Generator) -> Tensor:
        """(C, embed), not normalised: one random phrasing per template, bound to each colour."""
        ids = torch.stack([options[rng.integers(len(options))] for options in self.ids])
        return bind(model.encode_text(ids)[self.owner], self.slots)


def tokenizer() -> WordTokenizer:
    """The tokenizer of the grammar."""
    return WordTokenizer(captions.vocabulary(), captions.COLOURS)


def train_colours(trunk: Trunk, teacher: Teacher, pixels: Tensor, cfg: FitConfig, rng: np.random.Generator) -> Tensor:
    """Teach the names of colours to single pixels, then freeze them. Returns the (N, V, S, G*G) logits of all frames.

    First and alone: a network that saw objects at the same time would learn which colours they never wear.
    """
    optimiser = torch.optim.Adam(trunk.colour.parameters())
    for step in range(cfg.colour_steps):
        for group in optimiser.param_groups:
            group["lr"] = COLOUR_RATE * min(1.0, (step + 1) / 20) * (1.0 - step / cfg.colour_steps)
        rows = torch.from_numpy(rng.choice(len(pixels), COLOUR_BATCH))
        loss = teacher.colour_loss(trunk.colours(augment(pixels[rows], rng)), rows)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    trunk.colour.requires_grad_(False)
    with torch.no_grad():
        return torch.cat([trunk.colours(to_input(p)).half() for p in pixels.split(COLOUR_BATCH)])


def train_model(cfg: FitConfig, frames: Frames, progress_row: Any = None) -> Any:
    """Train from scratch for ``cfg.steps`` steps; the same config and threads give the same weights.

    Returns:
        the open_clip model in eval mode.
    """
    torch.manual_seed(cfg.seed)
    rng = np.random.default_rng([cfg.seed, 1])
    model: Any = build_model(model_config()).to(memory_format=torch.channels_last)
    torch.nn.init.constant_(model.logit_scale, -np.log(TEMPERATURE_START))
    targets, sentences = make_targets(frames), Sentences()
    chances, pixels = sampling_weights(targets), torch.from_numpy(frames.pixels)
    trunk = trunk_of(model)
    teacher = Teacher(frames)
    colours = train_colours(trunk, teacher, pixels, cfg, rng)
    optimiser = _optimiser(model, cfg)
    start = time.time()
    for step in range(cfg.steps):
        _set_rate(optimiser, cfg, step)
        rows = torch.from_numpy(rng.choice(len(frames), cfg.batch_size, p=chances))
        image, seen = trunk.embed(augment(pixels[rows], rng), colours[rows].float())
        image = F.normalize(image, dim=-1)
        text = F.normalize(sentences.embed(model, rng), dim=-1)
        parts = batch_loss(image @ text.T, model.logit_scale.exp(), targets, rows, cfg.rank_weight)
        hints = teacher.losses(seen, rows)
        parts["loss"] = parts["loss"] + cfg.teacher_weight * torch.stack(list(hints.values())).sum()
        parts |= hints
        optimiser.zero_grad()
        parts["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=float(np.log(100.0)))
        if progress_row and (step % cfg.log_every == 0 or step == cfg.steps - 1):
            row = {k: round(float(v.detach()), 5) for k, v in parts.items()}
            progress_row(step + 1, (step + 1) / (time.time() - start), row)
    return model.eval()


def _optimiser(model: Any, cfg: FitConfig) -> torch.optim.Optimizer:
    """AdamW with decay on matrices only; the logit scale moves ten times faster."""
    named = [(n, p) for n, p in model.named_parameters() if n != "logit_scale" and p.requires_grad]
    groups = [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": cfg.weight_decay, "factor": 1.0},
        {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0, "factor": 1.0},
        {"params": [model.logit_scale], "weight_decay": 0.0, "factor": 10.0},
    ]
    return torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=(0.9, 0.98))


def _set_rate(optimiser: torch.optim.Optimizer, cfg: FitConfig, step: int) -> None:
    warm = min(1.0, (step + 1) / max(cfg.warmup, 1))
    rate = cfg.learning_rate * warm * 0.5 * (1.0 + np.cos(np.pi * step / cfg.steps))
    for group in optimiser.param_groups:
        group["lr"] = rate * group["factor"]


def save_model(model: Any, folder: Path, card: dict[str, Any]) -> None:
    """Write an open_clip ``local-dir`` (weights stored as fp16), vocabulary and card; the folder is replaced whole."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    state = {k: _compact(v) for k, v in model.state_dict().items()}
    save_file(state, temporary / "open_clip_model.safetensors")
    (temporary / "open_clip_model.safetensors").chmod(0o644)  # safetensors makes it private; packages are shared
    (temporary / "open_clip_config.json").write_text(json.dumps(model_config(), indent=1) + "\n")
    tokenizer().save(temporary)
    (temporary / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(temporary, folder)


def _compact(value: Tensor) -> Tensor:
    return value.half().contiguous() if value.is_floating_point() else value.contiguous()


def round_weights(model: Any) -> None:
    """Round the weights in place to what :func:`save_model` stores, so that the card grades the shipped numbers."""
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.copy_(value.half())


def fit(cfg: FitConfig) -> Path:
    """Render, train, grade, save. Returns ``<out>/model``, a folder for ``reward.model=local-dir:<out>/model``.

    A finished folder of the same config is reused.
    """
    out, folder = Path(cfg.out), Path(cfg.out) / "model"
    out.mkdir(parents=True, exist_ok=True)
    settings = {k: v for k, v in asdict(cfg).items() if k not in ("out", "cache", "log_every")}
    if _finished(folder, settings):
        print(f"{folder} is finished; nothing to do")
        return folder
    torch.set_num_threads(cfg.threads)
    cache = Path(cfg.cache) if cfg.cache else out / "frames"
    begun, log = time.time(), out / "metrics.jsonl"
    log.unlink(missing_ok=True)

    def row(step: int, rate: float, losses_: dict[str, float]) -> None:
        data = {"stage": "fit", "step": step, "total": cfg.steps, "steps_per_s": round(rate, 3), "time": time.time()}
        with log.open("a") as stream:
            stream.write(json.dumps(data | losses_) + "\n")

    frames = cached_frames(cache, count=cfg.frames, seed=cfg.seed + 1, episode=cfg.episode)
    tests = {
        name: cached_frames(cache, count=cfg.eval_frames, episode=cfg.episode, **options)  # type: ignore[arg-type]
        for name, options in EVAL_SETS.items()
    }
    rendered = time.time()
    model = train_model(cfg, frames, row)
    round_weights(model)
    trained = time.time()
    clip = wrap(model, tokenizer())
    card = grade(clip, tests)
    card["fit"] = settings | {"render_s": round(rendered - begun, 1), "train_s": round(trained - rendered, 1)}
    save_model(model, folder, card)
    print(summary(card))
    return folder


def _finished(folder: Path, settings: dict[str, Any]) -> bool:
    try:
        done = json.loads((folder / "card.json").read_text())["fit"]
    except (OSError, ValueError, KeyError):
        return False
    return {k: done.get(k) for k in settings} == settings


def summary(card: dict[str, Any]) -> str:
    """One line per concept family and set."""
    lines = [f"{'set':<14}{'concepts':<12}{'AUROC':>8}{'FPR95':>8}{'near':>8}{'Spearman':>10}"]
    for name, families in card["sets"].items():
        for family, row in families.items():
            numbers = [row[k] for k in ("auroc", "fpr95", "near_miss", "spearman")]
            lines.append(f"{name:<14}{family:<12}" + "".join(f"{x:>{w}.3f}" for x, w in zip(numbers, (8, 8, 8, 10))))
    return "\n".join(lines)
