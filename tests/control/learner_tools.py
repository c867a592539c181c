"""Any learner of the registry on any toy world, through the loop that trains it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from toy_worlds import Ledger

from control.config import ALGOS, PPOConfig, TrainConfig, resolve
from control.off_policy import OffPolicyLoop
from control.on_policy import OnPolicyLoop
from sims.features import FEATURES

LEARNERS = tuple(ALGOS)
# small networks and short rollouts; each learner takes the fields that it has
SMALL: dict[str, Any] = {
    "gamma": 0.5, "lr": 1e-3, "width": 16, "normalize": False, "batch_size": 32, "warmup_steps": 24, "alpha": 0.1,
    "tau": 0.05, "critic_layer_norm": False, "rollout_steps": 8, "minibatch_size": 16, "epochs": 2,
    "normalize_reward": False,
}  # fmt: skip


def algo_of(name: str, **changes: Any) -> Any:
    """Settings of a learner; a field that it does not have is left out."""
    known = {f.name for f in dataclasses.fields(ALGOS[name])}
    return ALGOS[name](**{k: v for k, v in {**SMALL, **changes}.items() if k in known})


def loop_of(name: str, out: Path, world: Any = None, features: Any = None, run: dict[str, Any] | None = None,
            **algo: Any) -> Any:  # fmt: skip
    """A loop on ``world`` (default: a Ledger of 3 environments); ``run`` holds fields of ``TrainConfig``."""
    base: dict[str, Any] = {"steps": 240, "eval_every": 0, "log_every": 48, "checkpoint_seconds": 1e9, "seed": 0}
    base |= {"utd": 0.5} if ALGOS[name] is not PPOConfig else {}
    cfg = resolve(TrainConfig(env="toy/world", algo=algo_of(name, **algo), **{**base, **(run or {})}))
    world = Ledger(seed=cfg.seed) if world is None else world
    other = type(world)(world.num_envs, 77)
    kind = OnPolicyLoop if isinstance(cfg.algo, PPOConfig) else OffPolicyLoop
    return kind(cfg, world, other, features or FEATURES["concat"], out)


def iterate(loop: Any, times: int = 1) -> None:
    """Collect and learn."""
    for _ in range(times):
        if isinstance(loop, OnPolicyLoop):
            loop.learn(*loop.collect())
        else:
            loop.store(loop.collect())
            loop.learn()


@dataclass
class Experience:
    """What a learner was given to learn from, (N, ...) in time order: N = steps without those left out."""

    obs: torch.Tensor
    action: torch.Tensor
    reward: torch.Tensor
    discount: torch.Tensor
    next_obs: torch.Tensor


def experience(loop: Any, iterations: int) -> Experience:
    """Iterate and return everything that was learned from; actions in the unit box."""
    gamma = loop.learner.cfg.gamma
    if not isinstance(loop, OnPolicyLoop):
        iterate(loop, iterations)
        batch = loop.replay.gather(torch.arange(len(loop.replay)), gamma, 1)
        return Experience(*(getattr(batch, f.name) for f in dataclasses.fields(Experience)))
    parts: list[Experience] = []
    learn = loop.learner.update

    def update(rollout: Any) -> Any:
        good = rollout.valid
        discount = gamma * (~rollout.terminated).float()
        rows = (rollout.obs, rollout.action.clamp(-1, 1), rollout.reward, discount, rollout.next_obs)
        parts.append(Experience(*(x[good] for x in rows)))
        return learn(rollout)

    loop.learner.update = update
    iterate(loop, iterations)
    return Experience(*(torch.cat([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(Experience)))


def weights_of(loop: Any) -> dict[str, torch.Tensor]:
    """Every floating-point tensor of the learner's state."""
    found: dict[str, torch.Tensor] = {}

    def walk(node: Any, where: str) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                walk(value, f"{where}.{key}")
        elif torch.is_tensor(node) and node.is_floating_point():
            found[where] = node.clone()

    walk(loop.learner.state_dict(), "")
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Equal bit for bit; nan equals nan."""
    return a.keys() == b.keys() and all(torch.equal(a[k].nan_to_num(7e7), b[k].nan_to_num(7e7)) for k in a)
