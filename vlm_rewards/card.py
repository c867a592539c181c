"""The report card of a small CLIP: ranking quality per concept on held-out episodes, and the calibration of rewards."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from typing import Any

import mujoco
import numpy as np
import torch

from sims.worlds.tabletop import CAMERAS, XML
from vlm_rewards import captions, metrics
from vlm_rewards.captions import Concept
from vlm_rewards.clip import Clip
from vlm_rewards.frames import Frames
from vlm_rewards.heads import softmax_probability
from vlm_rewards.states import MIX

PRESSES = {"press": 0.8, "reach": 0.1, "random": 0.1}
# held-out seeds: new layouts, looks and colours; "unseen" sets show the pair that training never did
EVAL_SETS: dict[str, dict[str, Any]] = {
    "seen": {"seed": 90001},
    "seen_cubes": {"seed": 90004, "mix": {"lift": 0.5, "move": 0.5}},  # rare in the training mix
    "unseen": {"seed": 90002, "unseen": True, "mix": PRESSES},
    "unseen_plain": {"seed": 90003, "unseen": True, "plain": True, "mix": PRESSES},
}
CUBE_FAMILIES = ("lift", "move")  # graded and calibrated on "seen_cubes"
NEAR = 0.04  # m: a fingertip this close without success is a near miss
FALSE_POSITIVES = 0.005  # share of failures that the success gate may let through
LOW_PROGRESS = 0.25
PHRASINGS = 6  # sentences per concept that the card reads; the worst counts as ``worst_phrasing``


def grade(clip: Clip, tests: dict[str, Frames]) -> dict[str, Any]:
    """Card of a model: ``sets`` (set -> family -> means, with ``concepts`` inside), ``calibration`` per family."""
    card: dict[str, Any] = {"sets": {}, "supervision": _supervision()}
    embedded = {name: _embed(clip, frames) for name, frames in tests.items()}
    for name, frames in tests.items():
        goals = [c for c in captions.concepts(True) if c.positive and c.family in captions.GOALS]
        if name.startswith("unseen"):
            goals = [Concept("press", True, captions.UNSEEN[1], captions.UNSEEN[0])]
        rows = [row for c in goals if (row := grade_concept(clip, embedded[name], frames, c))]
        wanted = [f for f in captions.GOALS if (f in CUBE_FAMILIES) == (name == "seen_cubes")]
        families = {f: [r for r in rows if r["family"] == f] for f in wanted}
        card["sets"][name] = {f: _mean(rows) | {"concepts": rows} for f, rows in families.items() if rows}
    card["calibration"] = {}
    for family in captions.GOALS:
        name = "seen_cubes" if family in CUBE_FAMILIES else "seen"
        card["calibration"][family] = calibrate(clip, embedded[name], tests[name], family)
    for name in tests:
        if name != "seen" and "press" in card["sets"][name]:  # a very small set may hold no pressed button
            card["sets"][name]["press"]["gate"] = _gate(clip, embedded[name], tests[name], card["calibration"]["press"])
    return card


def _supervision() -> dict[str, Any]:
    """The model card: what the frames were, what the captions were made from, what was left out."""
    return {
        "renderer": f"mujoco {mujoco.__version__}, 64x64, cameras {', '.join(CAMERAS)}",
        "scene_sha256": hashlib.sha256(XML.read_bytes()).hexdigest(),
        "versions": {"torch": torch.__version__, "open_clip_torch": version("open_clip_torch")},
        "frames": "rendered tabletop scenes, states written directly; kinds of episodes and shares: " + str(MIX),
        "captions": "truth of state predicates of these scenes, and positions of fingertip and objects",
        "never_shown": " ".join(captions.UNSEEN),
    }


def _embed(clip: Clip, frames: Frames, size: int = 256) -> torch.Tensor:
    pixels = torch.from_numpy(frames.pixels)
    return torch.cat([clip.embed_frames(pixels[i : i + size]) for i in range(0, len(pixels), size)])


def grade_concept(clip: Clip, x: torch.Tensor, frames: Frames, concept: Concept) -> dict[str, Any] | None:
    """Figures of one goal concept over the frames that contain its object; None with fewer than 5 of either class.

    Borderline frames count for Spearman only.
    """
    progress = captions.progress(frames.facts, [concept])[:, 0]
    truth = captions.truth(frames.facts, [concept])[:, 0]
    here = ~np.isnan(progress)
    judged = here & (truth >= 0)
    label = truth == 1
    if min((judged & label).sum(), (judged & ~label).sum()) < 5:
        return None
    sentences = [_command(concept), *captions.phrasings(concept)][: PHRASINGS + 1]
    scores = (x @ clip.embed_text(sentences).T).numpy()
    distance = captions.pick(frames.facts.distance(), frames.facts, concept.kind, concept.colour, np.nan)
    score = scores[:, 0]
    threshold = metrics.threshold_at_recall(score[judged], label[judged])
    areas = [metrics.auroc(s[judged], label[judged]) for s in scores.T]
    return {
        "family": concept.family,
        "object": captions.subject(concept.kind, concept.colour),
        "sentence": sentences[0],
        "frames": int(judged.sum()),
        "positives": int((judged & label).sum()),
        "auroc": areas[0],
        "worst_phrasing": min(areas),
        "fpr95": metrics.false_positive_rate(score, judged & ~label, threshold),
        "near_miss": metrics.false_positive_rate(score, judged & ~label & (distance < NEAR), threshold),
        "spearman": metrics.spearman(score[here], progress[here]),
    }


def _command(concept: Concept) -> str:
    """The plain command, e.g. ``"press the yellow button"``."""
    own = set(captions.phrasings(concept))
    noun = captions.subject(concept.kind, concept.colour)
    tries = (f"{concept.family} {noun}", f"{concept.family} {noun} to the marker")
    return next(s for s in tries if s in own)


def _mean(rows: list[dict[str, Any]]) -> dict[str, float]:
    keys = ("auroc", "worst_phrasing", "fpr95", "near_miss", "spearman")
    known = {k: [r[k] for r in rows if not np.isnan(r[k])] for k in keys}
    return {k: float(np.mean(v)) if v else float("nan") for k, v in known.items()}


def probabilities(clip: Clip, x: torch.Tensor, concept: Concept) -> tuple[np.ndarray, np.ndarray]:
    """(N,) cosine with the command, and (N,) softmax probability against the concept's negatives."""
    cosine = x @ clip.embed_text([_command(concept)])[0]
    against = x @ clip.embed_text(captions.negatives(concept)).T
    return cosine.numpy(), softmax_probability(cosine, against, clip.temperature).numpy()


def calibrate(clip: Clip, x: torch.Tensor, frames: Frames, family: str) -> dict[str, float]:
    """Frozen numbers for rewards of a family, pooled over the colours that training did show.

    ``low``: median cosine of frames with little progress; ``high``: median of successes; ``threshold``: the
    probability that all but FALSE_POSITIVES of the failures stay below (a conformal bound), at least 0.5.
    """
    low, high, failures = [], [], []
    for concept in (c for c in captions.concepts() if c.positive and c.family == family):
        progress = captions.progress(frames.facts, [concept])[:, 0]
        truth = captions.truth(frames.facts, [concept])[:, 0]
        here = ~np.isnan(progress)
        cosine, probability = probabilities(clip, x, concept)
        low.append(cosine[here & (progress < LOW_PROGRESS)])
        high.append(cosine[here & (truth == 1)])
        failures.append(probability[here & (truth == 0)])
    bottom, top = (float(np.median(pool)) if len(pool := np.concatenate(x)) else 0.0 for x in (low, high))
    bound = float(np.quantile(np.concatenate(failures), 1.0 - FALSE_POSITIVES))
    return {
        "low": bottom,
        "high": max(top, bottom + 0.05),
        "threshold": float(np.clip(bound, 0.5, 0.99)),
        "temperature": clip.temperature,
    }


def _gate(clip: Clip, x: torch.Tensor, frames: Frames, numbers: dict[str, float]) -> dict[str, float]:
    """How the calibrated success gate does on the pair it never saw: recall, and false positives where it matters."""
    concept = Concept("press", True, captions.UNSEEN[1], captions.UNSEEN[0])
    truth = captions.truth(frames.facts, [concept])[:, 0]
    cosine, probability = probabilities(clip, x, concept)
    opened = probability >= numbers["threshold"]
    distance = captions.pick(frames.facts.distance(), frames.facts, concept.kind, concept.colour, np.nan)
    other = (frames.facts.depth.max(1) > 0.005) & (truth == 0)
    dense = (cosine - numbers["low"]) / (numbers["high"] - numbers["low"])
    groups = {
        "recall": truth == 1,
        "false_positives": truth == 0,
        "false_near": (truth == 0) & (distance < NEAR),
        "false_other_button": other,
    }
    out = {name: float(opened[mask].mean()) if mask.any() else float("nan") for name, mask in groups.items()}
    return out | {f"dense_{name}": float(np.median(dense[mask])) for name, mask in groups.items() if mask.any()}
