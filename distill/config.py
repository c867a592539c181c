"""Settings of the verbs collect, distill and evaluate. Torch-free: the command line reads it first."""

from __future__ import annotations

from dataclasses import dataclass, field

from sims.errors import UserError, unknown_choice
from sims.worlds.variants import VARIANTS

AXES = ("seen", "unseen_start", "unseen_phrasing", "swapped", "switched")
SCRIPTED = "scripted"  # stands for the world's scripted demonstrators wherever a policy folder is expected


def _at_least(config: object, minimum: float, *names: str) -> None:
    for name in names:
        if getattr(config, name) < minimum:
            raise UserError(f"option '{name}' must be at least {minimum}, found {getattr(config, name)}.")


def _share(config: object, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(config, name) <= 1:
            raise UserError(f"option '{name}' is a share between 0 and 1, found {getattr(config, name)}.")


def _path(what: str) -> str:
    return field(default="", metadata={"help": f"run or policy folder for {what}, or 'scripted'"})


@dataclass
class Specialists:
    """Whose actions teach which job. A job's own entry wins over its task's, a task's over ``all``."""

    all: str = _path("every job")
    reach: str = _path("reach")
    press: str = _path("press, both colours")
    move: str = _path("move, both colours")
    lift: str = _path("lift, both colours")
    press_green: str = _path("this job alone")
    press_yellow: str = _path("this job alone")
    move_red: str = _path("this job alone")
    move_blue: str = _path("this job alone")
    lift_red: str = _path("this job alone")
    lift_blue: str = _path("this job alone")

    def paths(self) -> dict[str, str]:
        """job -> path in the world's order, jobs without a path left out."""
        found = {v: getattr(self, v) or getattr(self, job.task) or self.all for v, job in VARIANTS.items()}
        return {v: path for v, path in found.items() if path}

    def required(self) -> dict[str, str]:
        """:meth:`paths`, or UserError when there is none."""
        if not self.paths():
            raise UserError("no specialist given. Example: specialists.reach=runs/reach specialists.lift=runs/lift")
        return self.paths()


@dataclass
class CollectConfig:
    """Roll specialists out and keep what succeeded."""

    specialists: Specialists = field(default_factory=Specialists)
    episodes: int = field(default=150, metadata={"help": "successful episodes per job"})
    num_envs: int = field(default=32, metadata={"help": "worlds that step together"})
    noise: float = field(
        default=0.15, metadata={"help": "sd of the injected action noise, share of the largest action"}
    )
    bursts: float = field(default=0.5, metadata={"help": "share of episodes with bursts of random actions"})
    tail_steps: int = field(default=12, metadata={"help": "steps kept after success"})
    attempts: int = field(default=12, metadata={"help": "give up on a job after episodes x this / 10 tries"})
    split: str = field(default="train", metadata={"help": "start ranges: train or heldout"})
    seed: int = field(default=0, metadata={"help": "seed of starts and noise"})
    threads: int = field(default=1, metadata={"help": "physics threads"})
    out: str = field(default="runs/dataset", metadata={"help": "folder of the dataset; an unfinished one is resumed"})

    def __post_init__(self) -> None:
        _at_least(self, 1, "episodes", "num_envs", "threads")
        _at_least(self, 10, "attempts")
        _at_least(self, 0, "noise", "tail_steps")
        _share(self, "bursts")


@dataclass
class DistillConfig:
    """Train the generalist: behaviour cloning, then rounds of DAgger."""

    dataset: str = field(default="runs/dataset", metadata={"help": "LeRobot v3.0 dataset made by collect"})
    specialists: Specialists = field(default_factory=Specialists)
    width: int = field(default=256, metadata={"help": "units per hidden layer"})
    depth: int = field(default=3, metadata={"help": "hidden layers"})
    language_width: int = field(default=96, metadata={"help": "units that a sentence is squeezed into"})
    chunk: int = field(default=8, metadata={"help": "future targets predicted at once"})
    execute: int = field(default=4, metadata={"help": "of these, executed before looking again"})
    batch_size: int = field(default=512, metadata={"help": "samples per update"})
    lr: float = field(default=1e-3, metadata={"help": "learning rate (AdamW), falling to a tenth on a cosine"})
    weight_decay: float = field(default=1e-4, metadata={"help": "of AdamW"})
    ema: float = field(default=0.998, metadata={"help": "decay of the averaged weights, which are the ones exported"})
    clone_steps: int = field(default=1500, metadata={"help": "updates on the dataset alone"})
    rounds: int = field(default=10, metadata={"help": "DAgger rounds; 0: a pure clone"})
    round_worlds: int = field(default=96, metadata={"help": "worlds of a DAgger round"})
    round_env_steps: int = field(default=100, metadata={"help": "steps of every world in a round"})
    round_updates: int = field(default=900, metadata={"help": "updates after each round"})
    on_policy: float = field(default=0.5, metadata={"help": "share of samples from states that DAgger visited"})
    takeover: float = field(default=0.3, metadata={"help": "share of DAgger time in which the specialist drives"})
    switch: float = field(default=0.35, metadata={"help": "share of DAgger episodes whose sentence changes midway"})
    word_dropout: float = field(
        default=0.3, metadata={"help": "chance that a word that carries no meaning is left out"}
    )
    embedding_noise: float = field(default=0.3, metadata={"help": "length of the random vector added to a sentence's"})
    mix_sentences: float = field(default=0.5, metadata={"help": "share of samples that blend two sentences of one job"})
    snap: bool = field(default=False, metadata={"help": "act on the nearest known sentence instead of the one said"})
    encoder: str = field(default="all-MiniLM-L6-v2", metadata={"help": "sentence encoder: name or folder"})
    seed: int = field(default=0, metadata={"help": "seed of everything"})
    threads: int = field(default=1, metadata={"help": "torch and physics threads"})
    checkpoint_seconds: float = field(default=20.0, metadata={"help": "seconds between checkpoints"})
    log_every: int = field(default=100, metadata={"help": "updates between rows of metrics.jsonl"})
    out: str = field(default="runs/generalist", metadata={"help": "folder of the run; an unfinished one is resumed"})

    def __post_init__(self) -> None:
        _at_least(self, 1, "width", "depth", "language_width", "chunk", "execute", "batch_size", "threads", "log_every",
                  "round_worlds", "round_env_steps", "clone_steps")  # fmt: skip
        _at_least(self, 0, "rounds", "round_updates", "lr", "embedding_noise")
        _share(self, "ema", "takeover", "switch", "on_policy", "word_dropout", "mix_sentences")
        if self.execute > self.chunk:
            raise UserError(f"option 'execute' ({self.execute}) cannot exceed 'chunk' ({self.chunk}).")
        if self.rounds and not self.specialists.paths():
            raise UserError("DAgger needs option 'specialists' for its labels; or set rounds=0 for a pure clone.")


@dataclass
class EvaluateConfig:
    """Measure a policy on the true success."""

    policy: str = field(
        default="", metadata={"help": "run or policy folder, or 'scripted'; a generalist or a specialist"}
    )
    specialists: Specialists = field(default_factory=Specialists)
    jobs: list[str] = field(default_factory=list, metadata={"help": "jobs to measure; empty: all the policy knows"})
    axes: list[str] = field(
        default_factory=lambda: list(AXES), metadata={"help": "what to vary, of: " + ", ".join(AXES)}
    )
    episodes: int = field(default=100, metadata={"help": "episodes per job and axis"})
    num_envs: int = field(default=100, metadata={"help": "worlds that step together"})
    execute: int = field(default=0, metadata={"help": "actions executed per look; 0: what the policy says"})
    switch_step: int = field(default=12, metadata={"help": "step at which the sentence changes on axis 'switched'"})
    seed: int = field(default=1_000_000, metadata={"help": "seed of the starts; far from those of training"})
    threads: int = field(default=1, metadata={"help": "physics threads"})
    out: str = field(default="runs/evaluation.json", metadata={"help": "JSON file; finished cells of it are kept"})

    def __post_init__(self) -> None:
        _at_least(self, 1, "episodes", "num_envs", "threads", "switch_step")
        for axis in self.axes:
            if axis not in AXES:
                raise unknown_choice("axis", axis, AXES, "option 'axes'")
        for job in self.jobs:
            if job not in VARIANTS:
                raise unknown_choice("job", job, VARIANTS, "option 'jobs'")
        if bool(self.policy) == bool(self.specialists.paths()):
            raise UserError("give either 'policy' (a folder or 'scripted') or 'specialists.<job>' (a row each).")


@dataclass
class DatasetConfig:
    """Look at a dataset."""

    root: str = field(default="runs/dataset", metadata={"help": "folder of a LeRobot v3.0 dataset"})
    do: str = field(default="validate", metadata={"help": "validate, info (describe) or recover (finish)"})

    def __post_init__(self) -> None:
        if self.do not in ("validate", "info", "recover"):
            raise unknown_choice("action", self.do, ("validate", "info", "recover"), "option 'do'")
