"""Speed of PPO on many tabletop worlds beside Stable-Baselines3's: the update, and the whole iteration."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO as Theirs
from stable_baselines3.common.vec_env import DummyVecEnv

from control.benchmark_learning import iterate
from control.benchmark_machine import Contestants, alternate, pinned, timed
from control.config import PPOConfig, TrainConfig, resolve
from control.on_policy import OnPolicyLoop
from control.ppo import PPO
from control.rollout import Rollout
from control.sb3 import SB3VecEnv
from sims.features import FEATURES
from sims.registry import make

ENV = "tabletop/reach"
# Stable-Baselines3's defaults but for the minibatch, which is made to fit a rollout of 64 worlds
SHAPE: dict[str, Any] = {"batch_size": 256, "n_epochs": 10, "gamma": 0.99, "learning_rate": 3e-4}
WIDTH = 64


class OneWorld(gym.Env):
    """One tabletop world as a Gymnasium environment, for the serial vector of Stable-Baselines3."""

    def __init__(self, seed: int) -> None:
        self.env, self.start = make(ENV, 1, seed=seed), seed
        self.features = FEATURES[self.env.spec.features]
        size = self.features(self.env.reset(seed)).shape[-1]
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)
        low, high = (np.asarray(b, np.float32) for b in (self.env.spec.action.low, self.env.spec.action.high))
        self.action_space = gym.spaces.Box(low, high, dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.start += 1
        return self._flat(self.env.reset(self.start if seed is None else seed)), {}

    def step(self, action: Any) -> Any:
        step = self.env.step(torch.as_tensor(action).unsqueeze(0))
        return self._flat(step.next_obs), float(step.reward), bool(step.terminated), bool(step.truncated), {}

    def _flat(self, obs: Any) -> np.ndarray:
        return self.features(obs)[0].numpy()


def ppo_speed(blocks: int, num_envs: int, rollout: int, say: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """``update``: 10 epochs over a rollout; ``whole``: rollout and update. Milliseconds per iteration."""
    steps = num_envs * rollout
    size = {"num_envs": num_envs, "rollout_steps": rollout, "minibatch": SHAPE["batch_size"], "width": WIDTH}
    say(f"PPO: {num_envs} worlds of {ENV}, rollout of {rollout}, networks {WIDTH}x{WIDTH}")
    with pinned(), tempfile.TemporaryDirectory() as folder:
        own = {"n_steps": rollout, "seed": 0, "device": "cpu", **SHAPE}
        through = Theirs("MlpPolicy", SB3VecEnv(make(ENV, num_envs)), **own)
        serial = Theirs("MlpPolicy", DummyVecEnv([_one_world(i) for i in range(num_envs)]), **own)
        loop = _loop(num_envs, rollout, Path(folder))
        through.learn(steps)
        data = loop.rollout(*loop.collect())
        update: Contestants = {"SB3 PPO": timed(through.train), "PPO": timed(lambda: loop.learner.update(data))}
        update["PPO, autograd"] = _autograd(loop.learner, data)

        def learn(model: Theirs) -> Callable[[], float]:
            return timed(lambda: model.learn(steps, reset_num_timesteps=False))

        whole: Contestants = {
            "SB3 PPO, serial worlds": learn(serial), "SB3 PPO, our batch of worlds": learn(through),
            "PPO": timed(lambda: iterate(loop)),
        }  # fmt: skip
        result = {"update": size | alternate(update, blocks, say)}
        say("  and the whole iteration")
        result["whole"] = size | alternate(whole, blocks, say)
        loop.env.close()
        return result


def _one_world(seed: int) -> Callable[[], gym.Env]:
    return lambda: OneWorld(seed)


def _algo(rollout: int, update: str = "fused") -> PPOConfig:
    return PPOConfig(gamma=SHAPE["gamma"], lr=SHAPE["learning_rate"], width=WIDTH, rollout_steps=rollout,
                     minibatch_size=SHAPE["batch_size"], epochs=SHAPE["n_epochs"], normalize=False,
                     normalize_reward=False, update=update)  # fmt: skip


def _loop(num_envs: int, rollout: int, folder: Path) -> OnPolicyLoop:
    cfg = TrainConfig(env=ENV, num_envs=num_envs, algo=_algo(rollout), steps=10**9, eval_every=0, log_every=10**9)
    env = make(ENV, num_envs)
    return OnPolicyLoop(resolve(cfg), env, env, FEATURES[env.spec.features], folder)


def _autograd(fused: PPO, data: Rollout) -> Callable[[], float]:
    learner = PPO(data.obs.shape[-1], fused.act_dim, _algo(data.obs.shape[0], "autograd"))
    return timed(lambda: learner.update(data))
