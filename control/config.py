"""Settings of training. Torch-free: the command line reads it before anything heavy is imported."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from control.settings import fill, settings_of
from sims.errors import UserError
from vlm_rewards.config import EnvReward


@dataclass
class AlgoConfig:
    """What every learner shares. ``None``: the environment's own value (``configs/settings``)."""

    name: str = field(default="", metadata={"help": "which learner"})
    gamma: float | None = field(default=None, metadata={"help": "discount per step; null: the task's own, else 0.99"})
    lr: float | None = field(default=None, metadata={"help": "Adam's rate, actor and critics; null: task's, else 3e-4"})
    width: int | None = field(default=None, metadata={"help": "units per hidden layer; null: the task's, else 128"})
    depth: int = field(default=2, metadata={"help": "hidden layers"})
    activation: str = field(default="relu", metadata={"help": "relu, gelu or tanh"})
    normalize: bool = field(default=False, metadata={"help": "running normalisation of the features"})
    update: str = field(
        default="fused", metadata={"help": "fused: backward by hand, CUDA graph on CUDA; autograd: its plain twin"}
    )
    precision: str = field(
        default="float32", metadata={"help": "of the matrix products: float32, or bfloat16 (faster, less exact)"}
    )

    def __post_init__(self) -> None:
        _require("algo.gamma", self.gamma, self.gamma is None or 0 <= self.gamma <= 1, "between 0 and 1")
        _require("algo.lr", self.lr, self.lr is None or self.lr > 0, "above 0")
        _require("algo.width", self.width, self.width is None or self.width >= 1, "at least 1")
        _require("algo.depth", self.depth, self.depth >= 1, "at least 1")
        _require("algo.activation", self.activation, self.activation in ("relu", "gelu", "tanh"), "relu, gelu or tanh")
        _require("algo.update", self.update, self.update in ("fused", "autograd"), "fused or autograd")
        known = ("float32", "bfloat16")
        _require("algo.precision", self.precision, self.precision in known, "float32 or bfloat16")


@dataclass
class OffPolicyConfig(AlgoConfig):
    """What SAC and DSAC-T share. The defaults are those of the tabletop trials (``budget``)."""

    tau: float | None = field(
        default=None, metadata={"help": "share of new weights in the targets; null: task's, else 0.005"}
    )
    lr_alpha: float = field(default=3e-4, metadata={"help": "learning rate of log alpha (Adam)"})
    alpha: float | None = field(default=None, metadata={"help": "initial entropy weight; null: the task's, else 0.05"})
    target_entropy: float | None = field(default=None, metadata={"help": "nats in the unit box; null: minus |A|"})
    actor_average: float = field(
        default=0.005,
        metadata={"help": "share of the actor's new weights in the averaged actor that acts greedily; 1: off"},
    )
    policy_delay: int = field(default=2, metadata={"help": "critic steps per actor and alpha step"})
    batch_size: int = field(default=256, metadata={"help": "transitions per update"})
    n_step: int = field(default=1, metadata={"help": "rewards summed before the bootstrap"})
    warmup_steps: int = field(default=1_000, metadata={"help": "environment steps before the first update"})
    random_warmup: bool = field(default=True, metadata={"help": "warm up with uniform actions, else with the policy"})
    buffer_size: int = field(default=1_000_000, metadata={"help": "transitions kept in replay"})
    critic_layer_norm: bool | None = field(
        default=None, metadata={"help": "LayerNorm in the critics (RLPD needs it); null: the task's, else true"}
    )
    log_std_min: float = field(default=-10.0, metadata={"help": "lower clamp of the policy's log standard deviation"})
    log_std_max: float = field(default=2.0, metadata={"help": "upper clamp of the policy's log standard deviation"})
    privileged: bool = field(default=False, metadata={"help": "critics also see the group privileged; the actor not"})

    def __post_init__(self) -> None:
        super().__post_init__()
        _require("algo.tau", self.tau, self.tau is None or 0 < self.tau <= 1, "in (0, 1]")
        _require("algo.actor_average", self.actor_average, 0 < self.actor_average <= 1, "in (0, 1]")
        _require("algo.alpha", self.alpha, self.alpha is None or self.alpha > 0, "above 0")
        for name in ("policy_delay", "batch_size", "n_step", "buffer_size"):
            _require(f"algo.{name}", getattr(self, name), getattr(self, name) >= 1, "at least 1")
        _require("algo.log_std_min", self.log_std_min, self.log_std_min < self.log_std_max, "below algo.log_std_max")


@dataclass
class SACConfig(OffPolicyConfig):
    """Soft actor-critic (Haarnoja et al., arXiv 1812.05905)."""

    name: str = field(default="sac", metadata={"help": "fixed: sac"})
    critics: int = field(default=2, metadata={"help": "size of the critic ensemble (10 in RLPD)"})
    target_critics: int = field(
        default=2, metadata={"help": "critics drawn at random for each target, of which the least counts"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _require("algo.critics", self.critics, self.critics >= 1, "at least 1")
        good = 1 <= self.target_critics <= self.critics
        _require("algo.target_critics", self.target_critics, good, f"between 1 and algo.critics={self.critics}")


@dataclass
class DSACTConfig(OffPolicyConfig):
    """DSAC-T (Duan et al., arXiv 2310.05858)."""

    name: str = field(default="dsact", metadata={"help": "fixed: dsact"})
    xi: float = field(default=3.0, metadata={"help": "clipping bound in standard deviations"})
    tau_b: float = field(default=0.005, metadata={"help": "rate of the running E[sigma] and E[sigma^2]"})
    epsilon: float = field(default=0.1, metadata={"help": "added to sigma^2, sigma^3 and omega"})
    omega: str = field(
        default="paper", metadata={"help": "gradient scale: paper: average E[sigma^2]; code: (average E[sigma])^2"}
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        _require("algo.omega", self.omega, self.omega in ("paper", "code"), "paper or code")


def dsact_paper() -> DSACTConfig:
    """The published settings (arXiv 2310.05858 and its code): slow, for comparison with the paper."""
    return DSACTConfig(
        gamma=0.99, tau=0.005, lr=1e-4, lr_alpha=3e-4, alpha=math.e, actor_average=1.0, batch_size=256,
        warmup_steps=10_000, random_warmup=False, width=256, depth=3, activation="gelu", critic_layer_norm=False,
        log_std_min=-20.0, log_std_max=0.5,
    )  # fmt: skip


@dataclass
class PPOConfig(AlgoConfig):
    """PPO (Schulman et al., arXiv 1707.06347)."""

    name: str = field(default="ppo", metadata={"help": "fixed: ppo"})
    activation: str = field(default="tanh", metadata={"help": "relu, gelu or tanh"})
    normalize: bool = field(default=True, metadata={"help": "running normalisation of the features"})
    rollout_steps: int | None = field(default=None, metadata={"help": "vector steps per update; null: the task's own"})
    epochs: int = field(default=10, metadata={"help": "passes over a rollout"})
    minibatch_size: int | None = field(default=None, metadata={"help": "rows per gradient step; null: the task's own"})
    gae_lambda: float = field(default=0.95, metadata={"help": "lambda of the advantages"})
    clip: float = field(default=0.2, metadata={"help": "the ratio is clipped to 1 +- clip"})
    clip_value: float | None = field(default=None, metadata={"help": "keeps values within this of the old; null: off"})
    value_weight: float = field(default=1.0, metadata={"help": "weight of half the squared error of the value"})
    entropy: float = field(default=0.0, metadata={"help": "weight of the entropy bonus"})
    max_grad_norm: float = field(default=0.5, metadata={"help": "norm to which the whole gradient is clipped"})
    target_kl: float | None = field(default=None, metadata={"help": "stop the passes above 1.5 times this; null: off"})
    log_std: float = field(default=0.0, metadata={"help": "initial log standard deviation in the unit box"})
    normalize_reward: bool = field(default=True, metadata={"help": "divide rewards by the deviation of the return"})
    lr_final: float = field(default=1.0, metadata={"help": "share of lr left at the end of the run; 1: constant"})

    def __post_init__(self) -> None:
        super().__post_init__()
        _require("algo.lr_final", self.lr_final, 0 <= self.lr_final <= 1, "between 0 and 1")
        for name in ("rollout_steps", "epochs", "minibatch_size"):
            value = getattr(self, name)
            _require(f"algo.{name}", value, value is None or value >= 1, "at least 1")
        _require("algo.gae_lambda", self.gae_lambda, 0 <= self.gae_lambda <= 1, "between 0 and 1")
        for name in ("clip", "max_grad_norm", "clip_value", "target_kl"):
            value = getattr(self, name)
            _require(f"algo.{name}", value, value is None or value > 0, "above 0")


ALGOS: dict[str, type[AlgoConfig]] = {"sac": SACConfig, "dsact": DSACTConfig, "ppo": PPOConfig}


@dataclass
class TrainConfig:
    """One specialist: a world, a learner, a reward, a budget."""

    env: str = field(default="tabletop/reach", metadata={"help": "tabletop/<task>, gym/<id> or brax/<name>"})
    env_options: dict[str, Any] = field(default_factory=dict, metadata={"help": "options of sims.registry.make"})
    num_envs: int | None = field(default=None, metadata={"help": "environments that step together; null: the world's"})
    algo: Any = field(default=None, metadata={"help": "group: the learner; None from Python: DSAC-T"})
    reward: Any = field(default=None, metadata={"help": "group: the reward; None from Python: the task's own"})
    steps: int | None = field(
        default=None, metadata={"help": "environment steps, all environments together; null: the world's"}
    )
    utd: float | None = field(default=None, metadata={"help": "updates per environment step; null: the world's own"})
    stop_success: float | None = field(
        default=None,
        metadata={"help": "stop at this success in two evaluations running; 0: never; null: 0.97 on the task's reward"},
    )
    eval_every: int | None = field(
        default=None,
        metadata={"help": "environment steps between evaluations, half near the stop; 0: none; null: the world's"},
    )
    eval_episodes: int | None = field(default=None, metadata={"help": "episodes of an evaluation; null: the world's"})
    final_episodes: int | None = field(
        default=None, metadata={"help": "episodes of the last evaluation, on fresh starts; null: the world's"}
    )
    demos: int | None = field(default=None, metadata={"help": "scripted successes as prior data; null: the task's own"})
    prior_share: float | None = field(
        default=None, metadata={"help": "share of prior data in a batch (0.5 in RLPD); null: 0.25"}
    )
    log_every: int = field(default=2_000, metadata={"help": "environment steps between rows of metrics.jsonl"})
    checkpoint_seconds: float = field(default=30.0, metadata={"help": "seconds between checkpoints"})
    tensorboard: bool = field(default=True, metadata={"help": "event files in <out>/tensorboard"})
    progress: bool = field(default=False, metadata={"help": "show on the terminal how far it is"})
    seed: int = field(default=0, metadata={"help": "seed of everything"})
    threads: int = field(default=1, metadata={"help": "torch and simulator threads; more were slower on busy machines"})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda"})
    out: str = field(default="runs/train", metadata={"help": "folder of the run; an unfinished one is resumed"})

    def __post_init__(self) -> None:
        # groups have no default in the schema: hydra could not replace it by another option
        self.algo = DSACTConfig() if self.algo is None else self.algo
        self.reward = EnvReward() if self.reward is None else self.reward
        for name in ("num_envs", "steps", "threads", "log_every", "final_episodes", "eval_episodes"):
            value = getattr(self, name)
            _require(name, value, value is None or value >= 1, "at least 1")
        _require("utd", self.utd, self.utd is None or self.utd > 0, "above 0")
        for name in ("eval_every", "demos"):
            value = getattr(self, name)
            _require(name, value, value is None or value >= 0, "0 or more")
        share = self.prior_share
        _require("prior_share", share, share is None or 0 <= share < 1, "in [0, 1)")
        # from 1_000_003 on seeds belong to evaluations, whose starts a run must not have trained on
        _require("seed", self.seed, 0 <= self.seed < 1_000_000, "between 0 and 999999")
        stop = self.stop_success
        _require("stop_success", stop, stop is None or 0 <= stop <= 1, "between 0 and 1")


@dataclass(kw_only=True)
class ResolvedConfig(TrainConfig):
    """What a loop takes: :func:`resolve` has put the world's own value where none was given."""

    num_envs: int = field()
    steps: int = field()
    utd: Any = field()  # a float; None with PPO, which has no use for it
    stop_success: float = field()
    eval_every: int = field()
    eval_episodes: int = field()
    final_episodes: int = field()
    demos: int = field()
    prior_share: Any = field()  # the same


OFF_POLICY = ("utd", "demos", "prior_share")


def with_defaults(algo: AlgoConfig) -> Any:
    """A copy of a learner's settings in which what was not given is that of any world."""
    return fill(algo, settings_of("", algo.name)["algo"])


def resolve(cfg: TrainConfig) -> ResolvedConfig:
    """A copy of ``cfg`` in which every ``None`` that means "the world's own" has its value; ``cfg`` stays as it is.

    Raises:
        UserError: an option that this learner or this reward would ignore.
    """
    settings = settings_of(cfg.env, cfg.algo.name)
    if not isinstance(cfg.reward, EnvReward):
        if cfg.stop_success:
            raise UserError(f"stop_success={cfg.stop_success} with a sentence reward would stop on the true success, "
                            "which this learner must not see. Leave stop_success out and set steps.")  # fmt: skip
        # demonstrations are chosen by the true success, which a sentence-rewarded learner must not see
        settings |= {"demos": 0, "stop_success": 0.0}
    if isinstance(cfg.algo, PPOConfig):
        for name in OFF_POLICY:
            if getattr(cfg, name):
                raise UserError(f"option {name}={getattr(cfg, name)}: PPO learns from its own rollouts alone. "
                                f"Leave {name} out, or choose algo=dsact or algo=sac.")  # fmt: skip
            settings.pop(name, None)
        settings["demos"] = 0
    return ResolvedConfig(**vars(fill(dataclasses.replace(cfg, algo=fill(cfg.algo, settings["algo"])), settings)))


def _require(name: str, value: object, good: bool, rule: str) -> None:
    if not good:
        raise UserError(f"option {name}={value}: must be {rule}.")
