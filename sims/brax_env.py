"""Brax environments as a :class:`sims.types.VecEnv`; jax is imported here and nowhere else in the package.

The whole batch steps in one compiled function on jax's default device. Where that is a GPU that torch sees, too,
nothing crosses to the host (unrun on CUDA).
Matrix products are float32 in full: jax's default on a GPU is TF32, which is known to change what physics does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sims.errors import UserError, unknown_choice
from sims.types import ArraySpec, EnvSpec, TimeStep


class BraxVecEnv:
    """B copies of ``brax.envs.get_environment(name)``; the observation is the group ``proprio``, float32.

    Args:
        name: brax environment, e.g. ``"reacher"``.
        num_envs, seed: batch size; copy ``i`` draws its starts from the stream ``(seed, i)``.
        time_limit: actions per episode.  backend: brax physics (``generalized``, ``spring``, ``positional``, ``mjx``).

    Raises:
        UserError: brax is not installed, or the name is unknown.
    """

    def __init__(
        self, name: str, num_envs: int, seed: int = 0, *, time_limit: int = 1000, backend: str = "generalized"
    ):
        self._jax, env = _load(name, backend)
        self.num_envs = num_envs
        backend, on_gpu = self._jax.default_backend(), torch.cuda.is_available()
        self.device = torch.device("cuda" if backend == "gpu" and on_gpu else "cpu")
        self._shares = backend == "cpu" or self.device.type == "cuda"  # memory with torch
        self._diverged = torch.zeros((), dtype=torch.int64, device=self.device)
        size = int(env.action_size)
        self.spec = EnvSpec(
            task=f"brax/{name}",
            observation={"proprio": ArraySpec((int(env.observation_size),))},
            action=ArraySpec((size,), low=(-1.0,) * size, high=(1.0,) * size),
            control_hz=float(1.0 / env.dt),
            episode_steps=time_limit,
        )
        self._env = env
        self._reset, self._step = _compile(self._jax, env, time_limit)
        self.reset(seed)

    def reset(self, seed: int) -> dict[str, Tensor]:
        """New episodes everywhere. Returns ``obs``."""
        jax = self._jax
        root = jax.random.PRNGKey(seed)
        keys = jax.vmap(lambda i: jax.random.fold_in(root, i))(np.arange(self.num_envs))
        self._carry = self._settled(self._reset(keys))
        return self._groups(self._carry[0].obs)

    def step(self, action: Tensor) -> TimeStep:
        """One step of every copy with (B, A) actions, clipped to [-1, 1]."""
        wanted = action.detach().to(self.device, torch.float32).clamp(-1.0, 1.0).contiguous()
        self._carry, values = self._step(self._carry, self._array(wanted))
        out = {name: self._tensor(value) for name, value in values.items()}
        self._diverged = self._diverged + out["diverged"].sum()
        reward = out["reward"].float()
        return TimeStep(
            obs=self._groups(self._carry[0].obs),
            next_obs={"proprio": out["successor"].float()},
            reward=reward,
            terminated=out["terminated"],
            truncated=out["truncated"],
            metrics={
                "reward/env": reward.clone(),
                "diverged": out["diverged"].float(),
                "success": torch.zeros_like(reward),
            },
        )

    @property
    def diverged(self) -> int:
        """Worlds reset because a number in them was not finite."""
        return int(self._diverged)

    def _groups(self, rows: Any) -> dict[str, Tensor]:
        return {"proprio": self._tensor(rows).float()}

    def _settled(self, carry: Any) -> Any:
        """Bound to the device, as actions from torch are and all that follows: else the second step compiles anew."""
        return self._jax.device_put(carry, self._jax.devices()[0]) if self._shares else carry

    def _tensor(self, array: Any) -> Tensor:
        """A copy: jax's own arrays must never change."""
        return torch.from_dlpack(array).clone() if self._shares else torch.from_numpy(np.array(array))

    def _array(self, tensor: Tensor) -> Any:
        return self._jax.dlpack.from_dlpack(tensor) if self._shares else tensor.numpy()

    def render(self, ids: Sequence[int], camera: str = "") -> Tensor:
        """(N, H, W, 3) uint8 of the named copies."""
        from brax.io import image

        states = self._carry[0].pipeline_state
        frames = []
        for i in ids:
            one = self._jax.tree_util.tree_map(lambda x, i=i: x[i], states)
            frames.append(image.render_array(self._env.sys, one, 240, 320, camera or None))
        return torch.from_numpy(np.stack(frames))

    def state_dict(self) -> dict[str, Any]:
        """The leaves of the simulator's state, as numpy arrays in tree order."""
        leaves = self._jax.tree_util.tree_leaves(self._carry)
        return {"diverged": self.diverged, "leaves": [np.array(x) for x in leaves]}

    def load_state_dict(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Restore; returns the ``obs`` that was current."""
        tree = self._jax.tree_util
        leaves, shape = tree.tree_flatten(self._carry)
        saved = [np.asarray(x) for x in state["leaves"]]
        if [x.shape for x in saved] != [np.shape(x) for x in leaves]:
            raise UserError(f"the saved state does not fit {self.num_envs} worlds of {self.spec.task}")
        new = [self._jax.numpy.asarray(x, dtype=old.dtype) for x, old in zip(saved, leaves)]
        self._carry = self._settled(tree.tree_unflatten(shape, new))
        self._diverged = torch.tensor(int(state["diverged"]), device=self.device)
        return self._groups(self._carry[0].obs)

    def close(self) -> None:
        """Nothing to free."""


@functools.lru_cache  # brax environments hold no state; a second batch of the same world compiles nothing
def _load(name: str, backend: str) -> tuple[Any, Any]:
    try:
        import jax
        from brax import envs
    except ImportError as error:
        raise UserError(
            f"brax/{name} needs brax and jax, which are not installed: pip install brax ({error})"
        ) from error
    known = envs._envs
    if name not in known:
        raise unknown_choice("brax environment", name, known)
    backends = ("generalized", "spring", "positional", "mjx")
    if backend not in backends:
        raise unknown_choice("brax backend", backend, backends)
    return jax, envs.get_environment(name, backend=backend)


@functools.lru_cache
def _compile(jax: Any, env: Any, time_limit: int) -> tuple[Any, Any]:
    """Jitted ``reset(keys) -> carry`` and ``step(carry, action) -> carry, out``; carry = (state, keys, steps)."""
    jnp = jax.numpy

    def settled(tree: Any) -> Any:  # weak types differ between reset and step and would compile everything twice
        return jax.tree_util.tree_map(lambda x: jnp.asarray(x, dtype=x.dtype), tree)

    def fresh(keys: Any) -> tuple[Any, Any]:
        pairs = jax.vmap(jax.random.split)(keys)  # (B, 2, 2)
        return jax.vmap(env.reset)(pairs[:, 0]), pairs[:, 1]

    def reset(keys: Any) -> Any:
        state, keys = fresh(keys)
        return settled((state, keys, jnp.zeros(len(keys), jnp.int32)))

    def step(carry: Any, action: Any) -> Any:
        before, keys, steps = carry
        sound = jnp.isfinite(action).all(-1)  # a world given a bad action restarts, and the others do not notice
        action = jnp.where(sound[:, None], action, 0.0)
        state, steps = jax.vmap(env.step)(before, action), steps + 1
        broken = ~(jnp.isfinite(state.obs).all(-1) & jnp.isfinite(state.reward) & sound)
        terminated = (state.done > 0) & ~broken
        truncated = ((steps >= time_limit) & ~terminated) | broken
        done = terminated | truncated
        out = {
            # the last good observation stands in for a state that is none
            "successor": jnp.where(broken[:, None], before.obs, state.obs),
            "reward": jnp.where(broken, 0.0, state.reward),
            "terminated": terminated,
            "truncated": truncated,
            "diverged": broken,
        }

        def restart(_: Any) -> Any:
            new, fresh_keys = fresh(keys)
            pick = lambda a, b: jnp.where(done.reshape(-1, *[1] * (a.ndim - 1)), a, b)  # noqa: E731
            return jax.tree_util.tree_map(pick, new, state), pick(fresh_keys, keys)

        state, keys = jax.lax.cond(done.any(), restart, lambda _: (state, keys), None)
        return settled((state, keys, jnp.where(done, 0, steps))), out

    def exact(function: Any) -> Any:
        def traced(*args: Any) -> Any:
            with jax.default_matmul_precision("highest"):
                return function(*args)

        return jax.jit(traced)

    return exact(reset), exact(step)
