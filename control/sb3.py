"""Our environments as a Stable-Baselines3 ``VecEnv``, so that its algorithms and wrappers run on them unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sims.features import features_of
from sims.types import VecEnv as OurVecEnv


class SB3VecEnv(VecEnv):
    """A batch of our worlds.

    Observations are the world's flat features (B, F) float32, actions physical units within the spec's bounds. The true
    last observation of an episode is ``infos[i]["terminal_observation"]``; a time limit is ``TimeLimit.truncated``.

    Args:
        env: e.g. ``sims.registry.make("tabletop/reach", 64)``.
        seed: of the first reset, unless :meth:`seed` gives another; each later reset takes the next one.
    """

    def __init__(self, env: OurVecEnv, seed: int = 0) -> None:
        self.env, self._seed = env, seed
        self.features = features_of(env.spec.features)
        size = self.features(env.reset(seed)).shape[-1]
        seen = gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)
        low, high = (np.asarray(b, np.float32) for b in (env.spec.action.low, env.spec.action.high))
        super().__init__(env.num_envs, seen, gym.spaces.Box(low, high, dtype=np.float32))

    def reset(self) -> np.ndarray:
        if self._seeds[0] is not None:
            self._seed = int(self._seeds[0])
        obs = self.env.reset(self._seed)
        self._seed += self.num_envs
        self._reset_seeds()
        self._reset_options()
        return self._flat(obs)

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = torch.as_tensor(np.asarray(actions, np.float32))

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        step = self.env.step(self._actions.to(self.env.device))
        obs = self._flat(step.obs)
        done = (step.terminated | step.truncated).cpu().numpy()
        metrics = {k: v.cpu().numpy() for k, v in step.metrics.items()}
        infos: list[dict[str, Any]] = [{k: float(v[i]) for k, v in metrics.items()} for i in range(self.num_envs)]
        if done.any():
            last, truncated = self._flat(step.next_obs), step.truncated.cpu().numpy()
            success = metrics.get("success", np.zeros(self.num_envs)) > 0.5
            for i in np.flatnonzero(done):
                infos[i]["terminal_observation"] = last[i]
                infos[i]["TimeLimit.truncated"], infos[i]["is_success"] = bool(truncated[i]), bool(success[i])
        return obs, step.reward.cpu().numpy(), done, infos

    def _flat(self, obs: Any) -> np.ndarray:
        return self.features(obs).cpu().numpy()

    def close(self) -> None:
        self.env.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self.env, attr_name, None) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Sets it on the batch: one world of a batch has no attributes of its own."""
        setattr(self.env, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        result = getattr(self.env, method_name)(*args, **kwargs)
        return [result for _ in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: Any = None) -> list[bool]:
        return [False for _ in self._get_indices(indices)]

    def get_images(self) -> Sequence[np.ndarray | None]:
        return list(self.env.render(range(self.num_envs), "front").cpu().numpy())


def dump_normalizer(env: VecNormalize, path: str | Path) -> None:
    """Write the statistics of a ``VecNormalize`` as arrays, which ``distillery convert normalizer=`` reads.

    Its own file is a pickle, which is never loaded here: call this in the process that trained.
    """
    assert isinstance(env.obs_rms.mean, np.ndarray), "only flat observations have one set of statistics"
    np.savez(path, mean=env.obs_rms.mean, var=env.obs_rms.var, epsilon=env.epsilon, clip=env.clip_obs)
