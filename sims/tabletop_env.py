"""The tabletop as a batch of environments: any mix of jobs, one sentence per world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sims.engines.mujoco import MujocoEngine
from sims.errors import UserError, unknown_choice
from sims.reward_terms import effort
from sims.tabletop_spec import check_names, make_spec
from sims.tasks import TASKS, scene_of
from sims.types import TimeStep
from sims.worlds import language, tracker
from sims.worlds.robots import SO101, next_target
from sims.worlds.tabletop import (
    CAMERAS,
    SUBSTEPS,
    Layout,
    load_model,
    read_sensors,
    sample_layout,
    sensor_slices,
)
from sims.worlds.variants import EPISODE_STEPS, HOLD_STEPS, SLOTS, VARIANTS


class Start(NamedTuple):
    """All random choices of one episode, a function of (seed, world, episode) alone."""

    variant: float
    phrase: float
    layout: Layout
    noise: np.ndarray


class TabletopEnv:
    """B worlds on C threads; see :class:`sims.types.VecEnv` for the contract.

    Args:
        variants: jobs that episodes are drawn from, names in ``VARIANTS``.
        num_envs, seed: batch size B; seed of the streams.
        task: name written into the spec.
        split: ``"train"`` or ``"heldout"`` start ranges.  phrasings: the same for sentences.
        fixed_variants: (B,) job of each world, names or indices into ``variants``; default: drawn at every reset.
        pixels: cameras to draw into the observation, ``image_size`` pixels square. Only every
            ``draw_every``-th step draws, from the first on; between, the last frames of the episode stand.
        threads: physics threads.  time_limit: actions per episode, default that of the task.
        features: name in ``FEATURES`` for the spec; default the specialist's for one task, else the generalist's.
        privileged: observe the group ``privileged`` too: the true state, for critics.

    Attributes:
        variant_ids: (B,) int64 numpy, index into ``variants`` of the current job.
        layouts: the B current starts.  diverged: number of worlds reset because the physics failed.
    """

    def __init__(
        self,
        variants: Sequence[str],
        num_envs: int,
        seed: int = 0,
        *,
        task: str = "tabletop",
        split: str = "train",
        phrasings: str = "train",
        fixed_variants: Sequence[str] | Sequence[int] | np.ndarray | None = None,
        pixels: Sequence[str] = (),
        image_size: int = 64,
        draw_every: int = 1,
        threads: int = 1,
        time_limit: int | None = None,
        features: str | None = None,
        privileged: bool = False,
    ):
        check_names(variants, split, phrasings, pixels)
        self.variants = tuple(variants)
        self.num_envs, self.device = num_envs, torch.device("cpu")
        self._split, self._cameras, self._image_size, self._privileged = split, tuple(pixels), image_size, privileged
        if draw_every < 1:
            raise UserError(f"draw_every={draw_every}: must be at least 1.")
        self._draw_every, self._ticks = draw_every, 0
        self._jobs = [VARIANTS[name] for name in self.variants]
        self._fixed = None if fixed_variants is None else self._indices(fixed_variants)
        self._limits = np.array([time_limit or EPISODE_STEPS[job.task] for job in self._jobs])
        self._sentences = [language.sentences(name, phrasings) for name in self.variants]
        self._first = np.cumsum([0] + [len(s) for s in self._sentences])
        names = tuple(s for block in self._sentences for s in block)
        limit = int(self._limits.max())
        self.spec = make_spec(task, self.variants, names, limit, self._cameras, image_size, features, privileged)
        self._model = load_model()
        self._slices = sensor_slices(self._model)
        self._engine = MujocoEngine(self._model, num_envs, SUBSTEPS, threads)
        self._sensors = read_sensors(self._engine.sensors, self._slices)  # views that follow every step
        self._renderer: Any = None
        self._render_size = 0
        self.diverged = 0
        self.reset(seed)

    # -- episodes ---------------------------------------------------------------------------------------------------

    def reset(self, seed: int) -> dict[str, Tensor]:
        """New episodes everywhere; world ``i`` draws from the stream ``(seed, i)``. Returns ``obs``."""
        count = self.num_envs
        self._seed, self._episode = int(seed), np.full(count, -1)
        self.variant_ids, self._instruction = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._steps, self._hold = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._target = np.zeros((count, len(SO101.joints)))
        self._noise = np.zeros((count, int(self._limits.max()) + 1, tracker.NOISE_DIM), np.float32)
        self._tracked = np.zeros((count, tracker.OBJECTS_DIM), np.float32)
        self.layouts: list[Layout] = [None] * count  # type: ignore[list-item]
        self._begin(np.arange(count))
        self._obs: dict[str, Tensor] = {}  # its frames are drawn anew
        self._ticks = -2  # the reset is tick -1, the first step is tick 0 and draws
        self._obs = self._observe()
        return dict(self._obs)

    def draw_start(self, world: int, episode: int) -> Start:
        """The start of an episode, whatever happened before it."""
        rng = np.random.default_rng([self._seed, world, episode])
        variant, phrase = rng.random(), rng.random()
        layout = sample_layout(rng, self._split)
        return Start(variant, phrase, layout, rng.standard_normal(self._noise.shape[1:], dtype=np.float32))

    def _begin(self, ids: np.ndarray) -> None:
        """Start the next episode of worlds ``ids``."""
        self._episode[ids] += 1
        for i in ids:
            start = self._restore_start(int(i))
            self.variant_ids[i] = int(start.variant * len(self.variants)) if self._fixed is None else self._fixed[i]
            self._instruction[i] = self._sentence(int(self.variant_ids[i]), start.phrase)
        layouts = [self.layouts[i] for i in ids]
        self._target[ids] = [layout.q for layout in layouts]
        mocap = np.array([layout.mocap for layout in layouts])
        self._engine.reset(ids, np.array([layout.qpos for layout in layouts]), mocap, self._target[ids])
        self._steps[ids], self._hold[ids] = 0, 0
        sensors = read_sensors(self._engine.sensors[ids], self._slices)
        self._tracked[ids] = tracker.measure(sensors, self._noise[ids, 0])
        self._retarget()

    def _restore_start(self, world: int) -> Start:
        start = self.draw_start(world, int(self._episode[world]))
        self.layouts[world], self._noise[world] = start.layout, start.noise
        return start

    def _sentence(self, variant: int, draw: float) -> int:
        return int(self._first[variant] + int(draw * len(self._sentences[variant])))

    def _retarget(self) -> None:
        """Recompute what follows from ``variant_ids``."""
        self._slots = np.array([job.slot for job in self._jobs])[self.variant_ids]
        self._goal = torch.from_numpy(np.eye(len(SLOTS), dtype=np.float32)[self._slots])
        self._words = torch.from_numpy(self._instruction.copy())
        names = np.array([job.task for job in self._jobs])[self.variant_ids]
        self._rows = {str(name): np.flatnonzero(names == name) for name in np.unique(names)}
        self.task_names = tuple(names.tolist())

    def set_variants(self, ids: Sequence[int] | Sequence[str] | np.ndarray) -> dict[str, Tensor]:
        """Change the job (and sentence) of every world for the rest of this episode; same state. Returns ``obs``."""
        ids = self._indices(ids)
        changed = np.flatnonzero(ids != self.variant_ids)
        self.variant_ids = ids
        for i in changed:
            phrase = self.draw_start(int(i), int(self._episode[i])).phrase
            self._instruction[i] = self._sentence(int(ids[i]), phrase)
        self._hold[changed] = 0
        return self._refresh()

    def set_instruction(self, ids: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        """Swap only the sentence, (B,) indices into ``spec.instructions``; the job judged stays. Returns ``obs``."""
        ids = np.asarray(ids, dtype=np.int64)
        if ids.shape != (self.num_envs,) or ids.min() < 0 or ids.max() >= len(self.spec.instructions):
            raise UserError(f"set_instruction needs {self.num_envs} indices below {len(self.spec.instructions)}: {ids}")
        self._instruction = ids.copy()
        return self._refresh()

    def _refresh(self) -> dict[str, Tensor]:
        self._retarget()
        self._obs = {**self._obs, "goal": self._goal, "instruction": self._words}
        return dict(self._obs)

    def _indices(self, ids: Any) -> np.ndarray:
        """(B,) int64 indices into ``variants`` from names or indices."""
        known = list(self.variants)
        for name in ids:
            if isinstance(name, str) and name not in known:
                raise unknown_choice("variant", name, known)
        out = np.array([known.index(i) if isinstance(i, str) else int(i) for i in ids], dtype=np.int64)
        if out.shape != (self.num_envs,) or out.min() < 0 or out.max() >= len(known):
            raise UserError(f"need one of {len(known)} variants for each of {self.num_envs} worlds, got {list(ids)}")
        return out

    # -- stepping ---------------------------------------------------------------------------------------------------

    def step(self, action: Tensor) -> TimeStep:
        """One control step with (B, 6) changes of the joint targets (rad), clipped to the spec's bounds."""
        wanted = action.detach().cpu().numpy().astype(np.float64)
        broken = ~np.isfinite(wanted).all(axis=1)
        wanted[broken] = 0.0
        limit = SO101.column("max_delta")
        wanted = np.clip(wanted, -limit, limit)
        self._target = next_target(SO101, self._target, self._engine.qpos[:, : len(limit)], wanted)
        broken |= self._engine.step(self._target)
        self._steps += 1
        reward, metrics = self._judge(wanted / limit, ~broken)
        next_obs = self._observe(broken)
        done = broken | (self._steps >= self._limits[self.variant_ids])
        self.diverged += int(broken.sum())
        obs = self._restart(np.flatnonzero(done), next_obs)
        self._obs = obs
        return TimeStep(
            obs=dict(obs),
            next_obs=next_obs,
            reward=reward,
            terminated=torch.zeros(self.num_envs, dtype=torch.bool),
            truncated=torch.from_numpy(done),
            metrics=metrics,
        )

    def _judge(self, unit_action: np.ndarray, valid: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        """Reward and metrics of the state reached; all zero in worlds that are not ``valid``."""
        scene = scene_of(self._sensors, self._slots)
        ok = np.zeros(self.num_envs, dtype=bool)
        values = {"effort": effort(unit_action)}
        for name, rows in self._rows.items():
            part = scene if len(rows) == self.num_envs else scene.rows(rows)
            ok[rows] = TASKS[name].ok(part)
            for term, value in TASKS[name].terms(part).items():
                values.setdefault(term, np.zeros(self.num_envs))[rows] = value
        ok &= valid
        self._hold = np.where(ok, self._hold + 1, 0)
        values["success"] = ok.astype(np.float64)
        reward = np.where(valid, sum(values.values()), 0.0).astype(np.float32)
        metrics = {f"reward/{k}": np.where(valid, v, 0.0).astype(np.float32) for k, v in values.items()}
        metrics["success"] = (self._hold >= HOLD_STEPS).astype(np.float32)
        metrics["diverged"] = (~valid).astype(np.float32)
        return torch.from_numpy(reward), {k: torch.from_numpy(v) for k, v in metrics.items()}

    def _observe(self, broken: np.ndarray | None = None) -> dict[str, Tensor]:
        """Observation of the present state; the tracker delivers the previous step's measurement."""
        proprio = self._proprio(slice(None))
        objects = self._tracked
        noise = self._noise[np.arange(self.num_envs), self._steps]
        self._tracked = tracker.measure(self._sensors, noise)
        if broken is not None and broken.any():  # the last good observation stands in for a state that is none
            proprio[broken] = self._obs["proprio"].numpy()[broken]
            objects = np.where(broken[:, None], self._obs["objects"].numpy(), objects)
        obs = {"proprio": torch.from_numpy(proprio), "objects": torch.from_numpy(objects)}
        obs |= {"goal": self._goal, "instruction": self._words}
        return obs | self._truth(slice(None)) | self._look()

    def _proprio(self, rows: np.ndarray | slice) -> np.ndarray:
        """(N, 30) float32, as ``kinematics.proprio`` would compute it from the encoders."""
        data, named = self._engine.sensors[rows], self._sensors
        q, velocity, lead = data[:, 0:6], data[:, 6:12], self._target[rows] - data[:, 0:6]
        points = [named["tip/pos"][rows], named["grasp/pos"][rows], -named["hand/z"][rows], named["hand/x"][rows]]
        return np.concatenate([q, velocity, lead, *points], axis=1).astype(np.float32)

    def _truth(self, rows: np.ndarray | slice) -> dict[str, Tensor]:
        """The group ``privileged``, where it was asked for."""
        return {"privileged": torch.from_numpy(tracker.truth(self._sensors, rows))} if self._privileged else {}

    def _restart(self, ids: np.ndarray, next_obs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Begin new episodes in ``ids``; returns what to act on next."""
        if not len(ids):
            return next_obs
        self._begin(ids)
        rows = torch.from_numpy(ids)
        fresh = {"proprio": torch.from_numpy(self._proprio(ids)), "objects": torch.from_numpy(self._tracked[ids])}
        fresh |= self._truth(ids) | self._draw(ids)
        obs = {"goal": self._goal, "instruction": self._words}
        for name, rows_new in fresh.items():
            obs[name] = next_obs[name].clone()
            obs[name][rows] = rows_new
        return {name: obs[name] for name in next_obs}

    # -- pictures ---------------------------------------------------------------------------------------------------

    def _look(self) -> dict[str, Tensor]:
        """Frames of all worlds, or the last ones where this step does not draw."""
        self._ticks += 1
        groups = [f"pixels/{c}" for c in self._cameras]
        if self._ticks % self._draw_every and all(g in self._obs for g in groups):
            return {g: self._obs[g] for g in groups}
        return self._draw(np.arange(self.num_envs))

    def _draw(self, ids: np.ndarray) -> dict[str, Tensor]:
        return {f"pixels/{c}": self.render(ids, c) for c in self._cameras}

    def render(self, ids: Sequence[int] | np.ndarray, camera: str, size: int | None = None) -> Tensor:
        """(N, H, W, 3) uint8 of worlds ``ids``; ``size`` pixels square, default ``image_size``."""
        renderer = self._open_renderer(size or self._image_size)
        engine = self._engine
        frames = [renderer.render_state(engine.qpos[i], engine.mocap_pos[i], (camera,))[0] for i in ids]
        return torch.from_numpy(np.stack(frames))

    def _open_renderer(self, size: int) -> Any:
        if self._renderer is None or self._render_size != size:
            from sims.rendering import SceneRenderer

            if self._renderer is not None:
                self._renderer.close()
            self._renderer, self._render_size = SceneRenderer(self._model, CAMERAS, size), size
        return self._renderer

    # -- persistence ------------------------------------------------------------------------------------------------

    _ARRAYS = ("variant_ids", "_instruction", "_episode", "_steps", "_hold", "_target", "_tracked")

    def state_dict(self) -> dict[str, Any]:
        """Arrays and numbers from which :meth:`load_state_dict` goes on bit-exactly."""
        return {
            "seed": self._seed,
            "diverged": self.diverged,
            "ticks": self._ticks,
            "engine": self._engine.state_dict(),
            "obs": {name: value.clone() for name, value in self._obs.items()},
            **{name.strip("_"): getattr(self, name).copy() for name in self._ARRAYS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Restore; returns the ``obs`` that was current. Worlds must be as many as were saved."""
        if len(state["steps"]) != self.num_envs:
            raise UserError(f"the saved state has {len(state['steps'])} worlds, this environment {self.num_envs}")
        self._seed, self.diverged = int(state["seed"]), int(state["diverged"])
        self._ticks = int(state["ticks"])
        self._engine.load_state_dict(state["engine"])
        for name in self._ARRAYS:
            setattr(self, name, np.array(state[name.strip("_")]))
        for world in range(self.num_envs):
            self._restore_start(world)
        self._retarget()
        self._obs = {name: torch.as_tensor(value).clone() for name, value in state["obs"].items()}
        return dict(self._obs)

    def close(self) -> None:
        """Free threads and the graphics context."""
        self._engine.close()
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
