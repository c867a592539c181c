"""What an environment needs to know of a scene, its robot and its jobs. Numpy only; tasks bring torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mujoco
import numpy as np

from sims.errors import UserError, unknown_choice
from sims.types import ArraySpec, EnvSpec
from sims.worlds.robots import ACTION_KINDS, Arm, action_range


class Start(Protocol):
    """The start of one episode: what :attr:`World.sample_start` draws."""

    @property
    def q(self) -> np.ndarray:
        """(J,) joint angles, rad; the targets start there."""
        ...

    @property
    def qpos(self) -> np.ndarray:
        """(nq,) generalised position."""
        ...

    @property
    def mocap(self) -> np.ndarray:
        """(3 nmocap,) m, positions of the mocap bodies in model order."""
        ...


class Job(Protocol):
    """One job: a task applied to the object in one slot."""

    @property
    def task(self) -> str: ...

    @property
    def slot(self) -> int: ...


@dataclass(frozen=True)
class Group:
    """One observation group made from named sensors.

    Attributes:
        names: of its elements.
        measure: ``measure(sensors, noise)`` -> (B, n) float32; ``noise`` (B, n_noise) standard normal, or None.
        noise: n_noise, standard normal draws per step that ``measure`` takes; 0: none.
    """

    names: tuple[str, ...]
    measure: Callable[[Mapping[str, Any], Any], Any]
    noise: int = 0


@dataclass(frozen=True)
class World:
    """A scene, its robot and the jobs to be done in it.

    Attributes:
        name: family name, such as ``tabletop``.
        arm: joints in the order of the model's first actuators.
        load_model: a fresh ``MjModel`` with a sensor ``q/<joint>`` and ``velocity/<joint>`` per joint of the arm, first
            in this order, and whatever sensors tasks and groups read.
        jobs: name -> job; ``tasks``: name -> :class:`sims.tasks.base.Task`.
        episode_steps: time limit of each task, actions.
        slots: names of the objects that a job can be about; the group ``goal`` is one-hot over them.
        sample_start: ``sample_start(rng, split)`` draws a :class:`Start`, the same for every job.
        scene: ``scene(sensors, slots)`` -> what tasks read, with ``rows(index)`` to take some of the worlds.
        sentences: ``sentences(job, phrasings)`` -> what a person might say, at least one.
        points: ``points(sensors)`` -> (B, n) of the hand, the last part of ``proprio``; ``point_names`` name them.
        objects: what a tracker on the robot reports, one step late; ``truth``: what only a simulator knows.
        features: names in ``sims.features.FEATURES`` for the jobs of one task, and of several.
        action_kind: one of ``joint_position_delta``, ``joint_position``, ``torque``.
        splits: names of the ranges of starts.  control_hz: actions per second.  substeps: physics steps per action.
        hold_steps: a job succeeds when its condition held for so many steps.
    """

    name: str
    arm: Arm
    load_model: Callable[[], mujoco.MjModel]
    jobs: Mapping[str, Any]
    tasks: Mapping[str, Any]
    episode_steps: Mapping[str, int]
    slots: tuple[str, ...]
    sample_start: Callable[[np.random.Generator, str], Start]
    scene: Callable[[Mapping[str, Any], Any], Any]
    sentences: Callable[[str, str], tuple[str, ...]]
    objects: Group
    truth: Group
    point_names: tuple[str, ...] = ()
    points: Callable[[Mapping[str, Any]], Any] | None = None
    features: tuple[str, str] = ("concat", "concat")
    action_kind: str = "joint_position_delta"
    splits: tuple[str, ...] = ("train",)
    control_hz: float = 20.0
    substeps: int = 10
    hold_steps: int = 5
    cameras: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.action_kind not in ACTION_KINDS:
            raise unknown_choice("action_kind", self.action_kind, ACTION_KINDS, where=f"world {self.name}")
        for name, job in self.jobs.items():
            if job.task not in self.tasks:
                raise unknown_choice("task", job.task, self.tasks, where=f"job {name} of world {self.name}")

    @property
    def proprio_names(self) -> tuple[str, ...]:
        parts = [f"{part}/{n}" for part in ("q", "velocity", "lead") for n in self.arm.names]
        return (*parts, *self.point_names)

    def spec(
        self, task: str, jobs: Sequence[str], instructions: tuple[str, ...], episode_steps: int,
        cameras: Sequence[str] = (), image_size: int = 64, features: str | None = None, privileged: bool = False,
    ) -> EnvSpec:  # fmt: skip
        """What a policy must know of an environment with these jobs, sentences and cameras."""
        groups = {"proprio": self.proprio_names, "objects": self.objects.names, "goal": self.slots}
        if privileged:
            groups["privileged"] = self.truth.names
        observation = {name: ArraySpec((len(names),), names=names) for name, names in groups.items()}
        observation["instruction"] = ArraySpec((), dtype="int64")
        observation |= {f"pixels/{c}": ArraySpec((image_size, image_size, 3), dtype="uint8") for c in cameras}
        low, high, unit = action_range(self.arm, self.action_kind)
        bounds: dict[str, Any] = {"low": tuple(low.tolist()), "high": tuple(high.tolist())}
        return EnvSpec(
            task=task,
            observation=observation,
            action=ArraySpec((len(low),), names=self.arm.names, unit=unit, **bounds),
            control_hz=float(self.control_hz),
            episode_steps=episode_steps,
            action_kind=self.action_kind,
            instructions=instructions,
            has_success=True,
            features=features or self.features[len({self.jobs[name].task for name in jobs}) > 1],
        )


PHRASINGS = ("train", "heldout")


def check_names(world: World, jobs: Sequence[str], split: str, phrasings: str, pixels: Sequence[str]) -> None:
    """Raises UserError for a name that is in no registry."""
    checks = [("variant", jobs, world.jobs), ("split", [split], world.splits), ("phrasings", [phrasings], PHRASINGS)]
    for kind, found, known in [*checks, ("camera", pixels, world.cameras)]:
        for name in found:
            if name not in known:
                raise unknown_choice(kind, name, known)
    if not jobs:
        raise UserError(f"variants is empty; choose from {', '.join(world.jobs)}")


def sensor_slices(model: mujoco.MjModel) -> dict[str, slice]:
    """Sensor name -> columns of ``sensordata``."""
    start, dim = model.sensor_adr, model.sensor_dim
    return {model.sensor(i).name: slice(int(start[i]), int(start[i] + dim[i])) for i in range(model.nsensor)}


def read_sensors(data: Any, slices: Mapping[str, slice]) -> dict[str, Any]:
    """Views of (..., S) sensor data by name, each (..., d); numpy or torch."""
    return {name: data[..., columns] for name, columns in slices.items()}
