"""Configs of the reward models and of ``fit``. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

FORMS = ("gated", "cosine", "projection", "softmax")
SHIPPED = "shipped"


@dataclass
class EnvReward:
    """The task's own reward: nothing is replaced."""

    kind: str = field(default="env", metadata={"help": "do not change: selects the task's own reward"})


@dataclass
class ClipReward:
    """A CLIP model that scores frames against the instruction."""

    kind: str = field(default="clip", metadata={"help": "do not change: selects the CLIP reward"})
    instruction: str = field(
        default="", metadata={"help": "the sentence to reward; empty takes the training instruction"}
    )
    model: str = field(
        default=SHIPPED,
        metadata={"help": "'shipped', 'local-dir:<folder>', 'hf-hub:<owner>/<name>' or an open_clip model name"},
    )
    pretrained: str = field(default="", metadata={"help": "weights tag or file, only with an open_clip model name"})
    form: str = field(default="gated", metadata={"help": f"how cosines become a reward: {', '.join(FORMS)}"})
    cameras: list[str] = field(
        default_factory=lambda: ["front", "side"], metadata={"help": "views; tiled if the model takes a tile"}
    )
    image_size: int = field(default=64, metadata={"help": "side in pixels of the frames that the world renders"})
    negatives: list[str] = field(
        default_factory=list,
        metadata={"help": "sentences the goal competes with; empty asks the model's own grammar"},
    )
    baseline: str = field(default="", metadata={"help": "neutral sentence of the goal-baseline projection"})
    alpha: float = field(default=0.5, metadata={"help": "projection strength, 0 (none) to 1 (only along the line)"})
    dense_scale: float = field(default=0.5, metadata={"help": "weight of the calibrated cosine, about 0 to 1 a step"})
    gate_scale: float = field(default=1.0, metadata={"help": "reward per step while the success gate is open"})
    temperature: float = field(default=0.0, metadata={"help": "softmax temperature; 0 takes the model's own"})
    threshold: float = field(default=0.0, metadata={"help": "success threshold; 0 takes the model's calibration"})
    stride: int = field(default=1, metadata={"help": "score every k-th step of a segment and hold in between"})
    batch_size: int = field(default=32, metadata={"help": "frames scored at once; the last batch may be smaller"})
    device: str = field(default="cpu", metadata={"help": "torch device of the model"})

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"reward.form='{self.form}' is none of {', '.join(FORMS)}")
        if not 0.0 <= self.alpha <= 1.0:
            raise ValueError(f"reward.alpha={self.alpha} is outside 0..1")
        if self.stride < 1 or self.batch_size < 1:
            raise ValueError(f"reward.stride={self.stride} and reward.batch_size={self.batch_size} must be at least 1")
        if self.form == "projection" and not self.baseline:
            raise ValueError("reward.form='projection' needs reward.baseline, a neutral sentence")
        if not self.cameras:
            raise ValueError("reward.cameras is empty: name at least one camera")


REWARDS: dict[str, type] = {"env": EnvReward, "clip": ClipReward, "clip_hub": ClipReward}


@dataclass
class FitConfig:
    """Everything that determines a fitted small CLIP."""

    out: str = field(default="runs/fit", metadata={"help": "folder of the model, its card and the progress rows"})
    frames: int = field(default=10000, metadata={"help": "training frames rendered (two views each)"})
    eval_frames: int = field(default=1200, metadata={"help": "frames of held-out episodes and looks for the card"})
    episode: int = field(default=3, metadata={"help": "frames that share one layout, one look and one scripted motion"})
    steps: int = field(default=600, metadata={"help": "gradient steps; the only bound of training"})
    colour_steps: int = field(default=240, metadata={"help": "steps that first teach the names of colours to pixels"})
    batch_size: int = field(default=128, metadata={"help": "frames per step"})
    learning_rate: float = field(default=1.5e-3, metadata={"help": "peak of AdamW's rate (cosine after a warm-up)"})
    weight_decay: float = field(default=0.05, metadata={"help": "on matrices only"})
    warmup: int = field(default=60, metadata={"help": "steps of linear warm-up"})
    rank_weight: float = field(default=1.0, metadata={"help": "weight of the pairwise rank loss on progress"})
    teacher_weight: float = field(
        default=0.5, metadata={"help": "weight of the hints: fingertip, kind, colour and light per object"}
    )
    seed: int = field(default=0, metadata={"help": "seed of frames, weights and batches"})
    cache: str = field(default="", metadata={"help": "folder of rendered frames; empty keeps them below out"})
    log_every: int = field(default=20, metadata={"help": "steps between two progress rows"})
    threads: int = field(default=1, metadata={"help": "torch threads; results repeat exactly for the same number"})

    def __post_init__(self) -> None:
        small = {k: getattr(self, k) for k in ("frames", "eval_frames", "episode", "steps", "batch_size", "log_every")}
        for name, value in small.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.warmup >= self.steps:
            raise ValueError(f"warmup={self.warmup} must be smaller than steps={self.steps}")
