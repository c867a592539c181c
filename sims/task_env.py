"""A world as a batch of environments: any mix of its jobs, one sentence per world, on any physics engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sims.demonstrators import Mixed
from sims.engines import make_engine
from sims.errors import UserError, unknown_choice
from sims.pictures import Pictures
from sims.reward_terms import effort
from sims.starts import Episode, Starts
from sims.types import TimeStep
from sims.worlds.arrays import like
from sims.worlds.base import World, check_names, read_sensors, sensor_slices
from sims.worlds.robots import action_range, next_target, within_reach


class TaskEnv:
    """B worlds; see :class:`sims.types.VecEnv` for the contract.

    Args:
        world: scene, robot and jobs.
        variants: jobs that episodes are drawn from, names in ``world.jobs``.
        num_envs, seed: batch size B; seed of the streams.
        task: name written into the spec.
        split: name of the range of starts, ``"train"`` or ``"heldout"``.  phrasings: the same for sentences.
        fixed_variants: (B,) job of each world, names or indices into ``variants``; default: drawn at every reset.
        pixels: cameras to draw into the observation, ``image_size`` pixels square. Only every
            ``draw_every``-th step draws, from the first on; between, the last frames of the episode stand.
        engine: ``"mujoco"`` (C threads) or ``"warp"`` (MuJoCo Warp on ``device``).  threads: physics threads.
        time_limit: actions per episode, default that of the task.
        features: name in ``FEATURES`` for the spec; default the specialist's for one task, else the generalist's.
        privileged: observe the group ``privileged`` too: the true state, for critics.

    Attributes:
        variant_ids: (B,) int64 numpy, index into ``variants`` of the current job.
        layouts: the B current starts.  diverged: number of worlds reset because the physics failed.
    """

    def __init__(
        self,
        world: World,
        variants: Sequence[str],
        num_envs: int,
        seed: int = 0,
        *,
        task: str,
        split: str = "train",
        phrasings: str = "train",
        fixed_variants: Sequence[str] | Sequence[int] | np.ndarray | None = None,
        pixels: Sequence[str] = (),
        image_size: int = 64,
        draw_every: int = 1,
        engine: str = "mujoco",
        device: str = "cpu",
        threads: int = 1,
        time_limit: int | None = None,
        features: str | None = None,
        privileged: bool = False,
    ):
        check_names(world, variants, split, phrasings, pixels)
        self.world, self.variants, self.num_envs = world, tuple(variants), num_envs
        self._privileged = privileged
        self._jobs = [world.jobs[name] for name in self.variants]
        self._fixed = None if fixed_variants is None else self._indices(fixed_variants)
        self._limits = np.array([time_limit or world.episode_steps[job.task] for job in self._jobs])
        longest = int(self._limits.max())
        self._starts = Starts(world, self.variants, split, phrasings, (longest + 1, world.objects.noise))
        options = (tuple(pixels), image_size, features, privileged)
        self.spec = world.spec(task, self.variants, self._starts.sentences, longest, *options)
        self._model = world.load_model()
        self._pictures = Pictures(self._model, world.cameras, tuple(pixels), image_size, draw_every)
        self._engine = make_engine(engine, self._model, num_envs, world.substeps, threads, device)
        self.device, self._dtype = self._engine.device, self._engine.dtype
        self._slices = sensor_slices(self._model)
        self._sensors = read_sensors(self._engine.sensors, self._slices)  # views that follow every step
        self._joints = len(world.arm.joints)
        low, high, _ = action_range(world.arm, world.action_kind)
        self._low, self._high = (torch.tensor(x.copy(), dtype=self._dtype, device=self.device) for x in (low, high))
        self.diverged = 0
        self.reset(seed)

    # -- episodes ---------------------------------------------------------------------------------------------------

    def reset(self, seed: int) -> dict[str, Tensor]:
        """New episodes everywhere; world ``i`` draws from the stream ``(seed, i)``. Returns ``obs``."""
        count, objects = self.num_envs, self.world.objects
        self._seed, self._episode = int(seed), np.full(count, -1)
        self.variant_ids, self._instruction = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._steps, self._hold = (torch.zeros(count, dtype=torch.int64, device=self.device) for _ in range(2))
        self._target = self._zeros(self._joints)
        self._noise = self._zeros(*self._starts.noise_shape).float()
        self._tracked = self._zeros(len(objects.names)).float()
        self.layouts: list[Any] = [None] * count
        self._begin(np.arange(count))
        self._pictures.restart()
        self._obs: dict[str, Tensor] = {}
        self._obs = self._observe()
        return dict(self._obs)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(self.num_envs, *shape, dtype=self._dtype, device=self.device)

    def _tensor(self, values: Any) -> Tensor:
        return torch.as_tensor(np.asarray(values), dtype=self._dtype, device=self.device)

    def draw_start(self, world: int, episode: int) -> Episode:
        """The start of an episode, whatever happened before it."""
        return self._starts.draw(self._seed, world, episode)

    def _begin(self, ids: np.ndarray) -> None:
        """Start the next episode of worlds ``ids``."""
        self._episode[ids] += 1
        for i in ids:
            start = self._restore_start(int(i))
            self.variant_ids[i] = int(start.variant * len(self.variants)) if self._fixed is None else self._fixed[i]
            self._instruction[i] = self._starts.sentence(int(self.variant_ids[i]), start.phrase)
        layouts, rows = [self.layouts[i] for i in ids], torch.as_tensor(ids, device=self.device)
        target = self._tensor([layout.q for layout in layouts])
        self._target[rows] = target
        qpos, mocap = ([getattr(layout, name) for layout in layouts] for name in ("qpos", "mocap"))
        self._engine.reset(rows, self._tensor(qpos), self._tensor(mocap), self._at_rest(target))
        self._steps[rows], self._hold[rows] = 0, 0
        sensors = read_sensors(self._engine.sensors[rows], self._slices)
        self._tracked[rows] = self.world.objects.measure(sensors, self._noise[rows, 0])
        self._retarget()

    def _at_rest(self, target: Tensor) -> Tensor:
        return torch.zeros_like(target) if self.world.action_kind == "torque" else target

    def _restore_start(self, world: int) -> Episode:
        start = self.draw_start(world, int(self._episode[world]))
        self.layouts[world], self._noise[world] = start.layout, torch.from_numpy(start.noise)
        return start

    def _retarget(self) -> None:
        """Recompute what follows from ``variant_ids``."""
        slots = np.array([job.slot for job in self._jobs])[self.variant_ids]
        self._slots = torch.as_tensor(slots, device=self.device)
        self._goal = torch.from_numpy(np.eye(len(self.world.slots), dtype=np.float32)[slots]).to(self.device)
        self._words = torch.as_tensor(self._instruction.copy(), device=self.device)
        self._limit = torch.as_tensor(self._limits[self.variant_ids], device=self.device)
        names = np.array([job.task for job in self._jobs])[self.variant_ids]
        rows = {str(name): np.flatnonzero(names == name) for name in np.unique(names)}
        self._rows = {name: torch.as_tensor(ids, device=self.device) for name, ids in rows.items()}
        self.task_names = tuple(names.tolist())

    def set_variants(self, ids: Sequence[int] | Sequence[str] | np.ndarray) -> dict[str, Tensor]:
        """Change the job (and sentence) of every world for the rest of this episode; same state. Returns ``obs``."""
        ids = self._indices(ids)
        changed = np.flatnonzero(ids != self.variant_ids)
        self.variant_ids = ids
        for i in changed:
            phrase = self.draw_start(int(i), int(self._episode[i])).phrase
            self._instruction[i] = self._starts.sentence(int(ids[i]), phrase)
        self._hold[torch.as_tensor(changed, device=self.device)] = 0
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

    def demonstrator(self) -> Any:
        """Something with ``act(obs) -> (B, A)`` that does the jobs; None where a task has no script."""
        makers = {name: self.world.tasks[name].demonstrator for name in sorted({job.task for job in self._jobs})}
        if None in makers.values():
            return None
        scripts = {name: maker(self) for name, maker in makers.items()}
        return next(iter(scripts.values())) if len(scripts) == 1 else Mixed(self, scripts)

    # -- stepping ---------------------------------------------------------------------------------------------------

    def step(self, action: Tensor) -> TimeStep:
        """One control step with (B, A) actions in the units of the spec, clipped to its bounds."""
        wanted = action.detach().to(self.device, self._dtype)
        broken = ~torch.isfinite(wanted).all(1)
        wanted = torch.where(broken[:, None], 0.0, wanted).clip(self._low, self._high)
        self._aim(wanted)
        broken = broken | self._engine.step(self._control(wanted))
        self._steps += 1
        reward, metrics = self._judge(self._unit(wanted), ~broken)
        next_obs = self._observe(broken)
        done = broken | (self._steps >= self._limit)
        self.diverged += int(broken.sum())
        obs = self._restart(done.nonzero()[:, 0].cpu().numpy(), next_obs)
        self._obs = obs
        return TimeStep(
            obs=dict(obs),
            next_obs=next_obs,
            reward=reward,
            terminated=torch.zeros(self.num_envs, dtype=torch.bool, device=self.device),
            truncated=done,
            metrics=metrics,
        )

    def _aim(self, wanted: Tensor) -> None:
        """Move the joint targets by (B, A) actions; a torque leaves the target where the joint is."""
        arm, kind, q = self.world.arm, self.world.action_kind, self._engine.sensors[:, : self._joints]
        if kind == "joint_position_delta":
            self._target = next_target(arm, self._target, q, wanted)
        elif kind == "joint_position":
            self._target = within_reach(arm, wanted, q)
        else:
            self._target = q.clone()

    def _control(self, wanted: Tensor) -> Tensor:
        """What the model's actuators get: torques, or the targets."""
        return wanted if self.world.action_kind == "torque" else self._target

    def _unit(self, wanted: Tensor) -> Tensor:
        """(B, A) actions in the unit box, for the penalty on effort; none for absolute targets."""
        if self.world.action_kind == "joint_position":
            return torch.zeros_like(wanted)
        return wanted / self._high

    def _judge(self, unit_action: Tensor, valid: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Reward and metrics of the state reached; all zero in worlds that are not ``valid``."""
        scene = self.world.scene(self._sensors, self._slots)
        ok = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        values = {"effort": effort(unit_action)}
        for name, rows in self._rows.items():
            task, part = self.world.tasks[name], scene if len(self._rows) == 1 else scene.rows(rows)
            ok[rows] = task.ok(part)
            for term, value in task.terms(part).items():
                values.setdefault(term, self._zeros())[rows] = value.to(self._dtype)
        ok &= valid
        self._hold = torch.where(ok, self._hold + 1, 0)
        values["success"] = ok.to(self._dtype)
        table = torch.where(valid, torch.stack(list(values.values())), 0.0).float()  # (terms, B)
        metrics = {f"reward/{name}": row for name, row in zip(values, table)}
        metrics["success"] = (self._hold >= self.world.hold_steps).float()
        metrics["diverged"] = (~valid).float()
        return table.sum(0), metrics

    def _observe(self, broken: Tensor | None = None) -> dict[str, Tensor]:
        """Observation of the present state; the tracker delivers the previous step's measurement."""
        proprio = self._proprio(slice(None))
        objects, rows = self._tracked, torch.arange(self.num_envs, device=self.device)
        self._tracked = self.world.objects.measure(self._sensors, self._noise[rows, self._steps])
        if broken is not None:  # the last good observation stands in for a state that is none
            proprio = torch.where(broken[:, None], self._obs["proprio"], proprio)
            objects = torch.where(broken[:, None], self._obs["objects"], objects)
        obs = {"proprio": proprio, "objects": objects, "goal": self._goal, "instruction": self._words}
        return obs | self._truth(slice(None)) | self._look()

    def _proprio(self, rows: Any) -> Tensor:
        """(N, P) float32: angles, speeds, target - angle, and points of the hand, as encoders would give them."""
        data, n = self._engine.sensors[rows], self._joints
        q = data[:, :n]
        parts = [q, data[:, n : 2 * n], self._target[rows] - q]
        if self.world.points is not None:
            parts.append(self.world.points(read_sensors(data, self._slices)))
        return torch.cat(parts, 1).float()

    def _truth(self, rows: Any) -> dict[str, Tensor]:
        """The group ``privileged``, where it was asked for."""
        if not self._privileged:
            return {}
        return {"privileged": self.world.truth.measure(read_sensors(self._engine.sensors[rows], self._slices), None)}

    def _restart(self, ids: np.ndarray, next_obs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Begin new episodes in ``ids``; returns what to act on next."""
        if not len(ids):
            return next_obs
        self._begin(ids)
        rows = torch.as_tensor(ids, device=self.device)
        fresh = {"proprio": self._proprio(rows), "objects": self._tracked[rows]}
        fresh |= self._truth(rows) | {f"pixels/{c}": self._draw(ids, c) for c in self._pictures.observed}
        obs = {"goal": self._goal, "instruction": self._words}
        for name, rows_new in fresh.items():
            obs[name] = next_obs[name].clone()
            obs[name][rows] = rows_new
        return {name: obs[name] for name in next_obs}

    # -- pictures ---------------------------------------------------------------------------------------------------

    def _look(self) -> dict[str, Tensor]:
        """Frames of all worlds, or the last ones where this step does not draw."""
        return self._pictures.look(self._obs, lambda camera: self._draw(np.arange(self.num_envs), camera))

    def _draw(self, ids: np.ndarray, camera: str) -> Tensor:
        return self.render(ids, camera).to(self.device)

    def render(self, ids: Sequence[int] | np.ndarray, camera: str, size: int | None = None) -> Tensor:
        """(N, H, W, 3) uint8 of worlds ``ids``; ``size`` pixels square, default ``image_size``."""
        rows = torch.as_tensor(np.asarray(ids), device=self.device)
        qpos, mocap = (x[rows].cpu().numpy() for x in (self._engine.qpos, self._engine.mocap_pos))
        return torch.from_numpy(self._pictures.draw(qpos, mocap, camera, size))

    # -- persistence ------------------------------------------------------------------------------------------------

    _ARRAYS = ("variant_ids", "_instruction", "_episode")
    _TENSORS = ("_steps", "_hold", "_target", "_tracked")

    def state_dict(self) -> dict[str, Any]:
        """Arrays and numbers from which :meth:`load_state_dict` goes on bit-exactly."""
        return {
            "seed": self._seed,
            "diverged": self.diverged,
            "ticks": self._pictures.ticks,
            "engine": self._engine.state_dict(),
            "obs": {name: value.clone() for name, value in self._obs.items()},
            **{name.strip("_"): getattr(self, name).copy() for name in self._ARRAYS},
            **{name.strip("_"): getattr(self, name).clone() for name in self._TENSORS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Restore; returns the ``obs`` that was current. Worlds must be as many as were saved."""
        if len(state["steps"]) != self.num_envs:
            raise UserError(f"the saved state has {len(state['steps'])} worlds, this environment {self.num_envs}")
        self._seed, self.diverged = int(state["seed"]), int(state["diverged"])
        self._pictures.ticks = int(state["ticks"])
        self._engine.load_state_dict(state["engine"])
        for name in self._ARRAYS:
            setattr(self, name, np.array(state[name.strip("_")]))
        for name in self._TENSORS:
            setattr(self, name, like(torch.as_tensor(state[name.strip("_")]), getattr(self, name)).clone())
        for world in range(self.num_envs):
            self._restore_start(world)
        self._retarget()
        self._obs = {name: torch.as_tensor(value).to(self.device).clone() for name, value in state["obs"].items()}
        return dict(self._obs)

    def close(self) -> None:
        """Free threads and the graphics context."""
        self._engine.close()
        self._pictures.close()
