"""Many worlds of one MuJoCo model on MuJoCo Warp: on CUDA, or on the CPU for tests.

Torch tensors and Warp arrays share memory. As in :mod:`sims.engines.mujoco` every world is kept one substep ahead of
what is observed: the last substep of a control step computes the sensors of the state it starts from, and that state is
observed. Nothing is read back by the host in a step; on CUDA a control step is one graph. **Everything on CUDA is
unrun**: it was written without such a device.

Other than on C threads: float32; a contact buffer of fixed size, whose overflow fails the world; a world is judged
after every substep, not once per control step; no ``noslip`` iterations, so a grasp creeps (measured by
``tests/benchmarks/sim_speed.py``). On CUDA sums are formed in no fixed order, so runs repeat to rounding, not bit for
bit. Kernels are compiled at first use and cached in Warp's kernel cache (half a minute for the tabletop on one core).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import mujoco
import numpy as np
import torch
from torch import Tensor

from sims.engines.fields import check_fields
from sims.engines.mujoco import MAX_SPEED
from sims.errors import UserError

try:
    import mujoco_warp as mjw
    import warp as wp
except ImportError as error:
    raise UserError("engine=warp needs MuJoCo Warp: pip install 'robot-distillery[warp]'") from error

_INPUTS = ("ctrl", "xfrc_applied", "mocap_pos", "mocap_quat")
_STATE = ("qpos", "qvel", "act", "time", "qacc_warmstart", *_INPUTS)  # decides the future of a world
# what a substep writes and later ones read
_WRITTEN = ("qpos", "qvel", "act", "time", "qacc_warmstart", "overflow", "sensordata")
# constants that MuJoCo derives from masses, inertias and the reference pose
_DERIVED = (
    "body_subtreemass",
    "body_invweight0",
    "dof_invweight0",
    "tendon_invweight0",
    "tendon_length0",
    "actuator_acc0",
    "eq_data",
)
# these are derived with them, from the first world's values, and no physics reads them
_LOOKS = ("cam_pos0", "cam_poscom0", "cam_mat0", "light_pos0", "light_poscom0", "light_dir0")
# contacts that a shape may have at once: a face on each of two others; per type of geometry
_CONTACTS = {mujoco.mjtGeom.mjGEOM_SPHERE: 2, mujoco.mjtGeom.mjGEOM_CAPSULE: 4, mujoco.mjtGeom.mjGEOM_ELLIPSOID: 2}
_FACES = 8
# an overflow of these loses contacts; EPA's horizon only makes the normal of one less exact
_LOST = 0xFF
_told: set[str] = set()


@wp.kernel
def _judge(
    start: wp.array2d(dtype=float),  # pyright: ignore[reportInvalidTypeForm]
    limit: float,
    lost: int,
    qpos: wp.array2d(dtype=float),  # pyright: ignore[reportInvalidTypeForm]
    qvel: wp.array2d(dtype=float),  # pyright: ignore[reportInvalidTypeForm]
    act: wp.array2d(dtype=float),  # pyright: ignore[reportInvalidTypeForm]
    warmstart: wp.array2d(dtype=float),  # pyright: ignore[reportInvalidTypeForm]
    overflow: wp.array(dtype=int),  # pyright: ignore[reportInvalidTypeForm]
    failed: wp.array(dtype=wp.bool),  # pyright: ignore[reportInvalidTypeForm]
):
    """Mark a world that is not finite, too fast or short of contacts, and stop it where nothing can spread from it."""
    world = wp.tid()
    good = bool((overflow[world] & lost) == 0)
    for i in range(qpos.shape[1]):
        good = good and wp.isfinite(qpos[world, i])
    for i in range(qvel.shape[1]):
        good = good and qvel[world, i] < limit and -qvel[world, i] < limit  # both false for a NaN
        good = good and wp.isfinite(warmstart[world, i])
    for i in range(act.shape[1]):
        good = good and wp.isfinite(act[world, i])
    if not good:
        failed[world] = True
        for i in range(qpos.shape[1]):
            qpos[world, i] = start[0, i]
        for i in range(qvel.shape[1]):
            qvel[world, i] = 0.0
            warmstart[world, i] = 0.0
        for i in range(act.shape[1]):
            act[world, i] = 0.0


class _Program:
    """A fixed sequence of kernels: launched one by one on the CPU; on CUDA captured once and replayed as one graph."""

    def __init__(self, device: torch.device, launch: Callable[[], None]):
        self._device, self._launch = device, launch
        self._runs = 0
        self._graph: Any = None

    def __call__(self) -> None:
        """On CUDA the first run loads the kernels, the second captures; replays follow torch's current stream."""
        with wp.ScopedDevice(wp.device_from_torch(self._device)):
            if self._device.type == "cpu" or self._runs == 0:
                self._runs = 1
                self._launch()
                return
            if self._graph is None:
                with wp.ScopedCapture() as capture:
                    self._launch()
                self._graph = capture.graph
            stream = wp.stream_from_torch(torch.cuda.current_stream(self._device))
            wp.capture_launch(self._graph, stream=stream)


class WarpEngine:
    """See :class:`sims.engines.Engine`. float32 on ``device``.

    Args:
        contacts: contacts per world that fit the buffers, on average over the worlds; default from the shapes that
            move.  rows: constraint rows that fit in each world.
    """

    dtype = torch.float32

    def __init__(
        self,
        model: mujoco.MjModel,
        num_worlds: int,
        substeps: int,
        device: str = "cpu",
        *,
        contacts: int | None = None,
        rows: int | None = None,
    ):
        self.model, self.num_worlds, self.substeps = model, num_worlds, substeps
        self.device = _device(device)
        # else the loading of every kernel is printed, and on a machine without CUDA that there is none
        wp.config.log_level = wp.LOG_ERROR if self.device.type == "cpu" else wp.LOG_WARNING
        wp.init()
        able = supported(model)
        most, most_rows = buffer_sizes(model)
        self.contacts, self.rows = contacts or most, rows or most_rows
        with wp.ScopedDevice(wp.device_from_torch(self.device)), warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            self._model, self._data = self._build(able)
            self._failed = wp.zeros(num_worlds, dtype=wp.bool)
            self._seen = wp.zeros_like(self._data.qpos), wp.zeros_like(self._data.qvel)
            self._start = wp.array(model.qpos0[None], dtype=float)
        for note in found:
            _tell(f"MuJoCo Warp on this model: {note.message}")
        self._model.opt.warn_overflow = False  # seen on the device, by _judge
        self._view()

    def _build(self, model: mujoco.MjModel) -> tuple[Any, Any]:
        try:
            data = mjw.make_data(model, nworld=self.num_worlds, nconmax=self.contacts, njmax=self.rows)
            return mjw.put_model(model), data
        except NotImplementedError as error:
            raise UserError(f"engine=warp cannot run this model: {error} Use engine=mujoco.") from error

    def _view(self) -> None:
        names = dict.fromkeys((*_STATE, *_WRITTEN))
        self._t: dict[str, Tensor] = {name: wp.to_torch(getattr(self._data, name)) for name in names}
        self._t["failed"] = wp.to_torch(self._failed)
        self.sensors = self._t["sensordata"]
        self._qpos, self._qvel = (wp.to_torch(x) for x in self._seen)
        self._compile()

    def _compile(self) -> None:
        self._advance = _Program(self.device, self._control_step)
        self._look_ahead = _Program(self.device, self._substep)

    @property
    def qpos(self) -> Tensor:
        return self._qpos

    @property
    def qvel(self) -> Tensor:
        return self._qvel

    @property
    def mocap_pos(self) -> Tensor:
        return self._t["mocap_pos"].flatten(1)

    def reset(self, ids: Tensor, qpos: Tensor, mocap_pos: Tensor, control: Tensor) -> None:
        """Physics has no mask: all worlds make the substep ahead, and those that were not asked for are put back."""
        ids, t = torch.as_tensor(ids, device=self.device), self._t
        self._report_overflow(ids)
        kept = {name: t[name].clone() for name in (*_WRITTEN, "failed")}
        for name in (*_STATE, "overflow", "failed"):
            t[name][ids] = 0
        t["qpos"][ids] = qpos.to(self._qpos)
        t["ctrl"][ids] = control.to(self._qpos)
        t["mocap_pos"][ids] = mocap_pos.to(self._qpos).reshape(len(ids), -1, 3)
        t["mocap_quat"][ids] = torch.tensor([1.0, 0.0, 0.0, 0.0], device=self.device)  # no rotation
        self._qpos[ids], self._qvel[ids] = t["qpos"][ids], 0.0
        self._look_ahead()
        self._put_back(t, kept, ids)

    def _put_back(self, now: Mapping[str, Tensor], before: Mapping[str, Tensor], ids: Tensor) -> None:
        """Restore the rows of all worlds but ``ids``."""
        fresh = torch.zeros(self.num_worlds, dtype=torch.bool, device=self.device)
        fresh[ids] = True
        for name, old in before.items():
            now[name].copy_(torch.where(fresh.reshape(-1, *[1] * (old.ndim - 1)), now[name], old))

    def _report_overflow(self, ids: Tensor) -> None:
        lost = self._t["overflow"][ids]
        if len(lost) and bool(lost.any()):
            _tell(
                f"MuJoCo Warp: more contacts than its buffers hold ({self.contacts} contacts a world on average, "
                f"{self.rows} constraint rows in each); the world was counted as failed. Give the engine "
                f"larger contacts= and rows=."
            )

    def step(self, control: Tensor) -> Tensor:
        t = self._t
        t["ctrl"].copy_(control)
        self._advance()
        failed = t["failed"] | ~torch.isfinite(self.sensors).all(1)
        for seen in (self._qpos, self._qvel, self.sensors):
            seen.masked_fill_(failed[:, None], 0.0)
        t["failed"].zero_()
        return failed

    def _control_step(self) -> None:
        for k in range(self.substeps):
            if k == self.substeps - 1:
                wp.copy(self._seen[0], self._data.qpos)
                wp.copy(self._seen[1], self._data.qvel)
            self._substep()

    def _substep(self) -> None:
        d = self._data
        mjw.step(self._model, d)
        inputs = [self._start, MAX_SPEED, _LOST, d.qpos, d.qvel, d.act, d.qacc_warmstart, d.overflow, self._failed]
        wp.launch(_judge, dim=self.num_worlds, inputs=inputs)

    def set_fields(self, ids: Tensor, fields: Mapping[str, Tensor]) -> None:
        ids = torch.as_tensor(ids, device=self.device)
        derive = check_fields(self.model, len(ids), fields)
        for name, values in fields.items():
            own = self._own(self._model, name)
            own[ids] = torch.as_tensor(values).to(own).reshape(len(ids), *own.shape[1:])
        if derive:
            self._derive(ids)

    def _own(self, home: Any, name: str) -> Tensor:
        """The field with a row for every world. The first time it is copied for them and the graphs are dropped."""
        array = getattr(home, name)
        if array.shape[0] != self.num_worlds:
            with wp.ScopedDevice(wp.device_from_torch(self.device)):
                rows = np.repeat(array.numpy(), self.num_worlds, axis=0)
                array = wp.array(rows, dtype=array.dtype, shape=(self.num_worlds, *array.shape[1:]))
            setattr(home, name, array)
            self._compile()
        return wp.to_torch(array)

    def _derive(self, ids: Tensor) -> None:
        """Derive the constants of worlds ``ids`` anew; the others keep theirs bit for bit."""
        model, data = self._model, self._data
        now = {name: self._own(model, name) for name in _DERIVED}
        now["meaninertia"] = self._own(model.stat, "meaninertia")
        looks = {name: wp.to_torch(getattr(model, name)) for name in _LOOKS}
        before, looked = ({k: v.clone() for k, v in part.items()} for part in (now, looks))
        with wp.ScopedDevice(wp.device_from_torch(self.device)):
            mjw.set_const_fixed(model, data)
            mjw.set_const_0(model, data, restore=False)
        self._put_back(now, before, ids)
        for name, values in looked.items():
            looks[name].copy_(values)

    def push(self, wrench: Tensor) -> None:
        self._t["xfrc_applied"].copy_(wrench)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of everything that decides the future, but for :meth:`set_fields`, which its caller draws again."""
        return {name: x.cpu().numpy().copy() for name, x in self._stored().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, x in self._stored().items():
            x.copy_(torch.as_tensor(np.asarray(state[name])))

    def _stored(self) -> dict[str, Tensor]:
        return {**self._t, "seen_qpos": self._qpos, "seen_qvel": self._qvel}

    def close(self) -> None:
        """Nothing is held but memory."""


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"engine=warp on device={name}: no such device is here. Use device=cpu, or engine=mujoco.")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"engine=warp runs on cpu and cuda, not on device={name}.")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def buffer_sizes(model: mujoco.MjModel) -> tuple[int, int]:
    """(contacts, constraint rows) of one world that leave room: every shape that moves lies on two others at once."""
    moves = np.asarray(model.body_weldid)[model.geom_bodyid] > 0
    touches = (np.asarray(model.geom_contype) | np.asarray(model.geom_conaffinity)) != 0
    contacts = np.array([_CONTACTS.get(int(kind), _FACES) for kind in model.geom_type]) * (moves & touches)
    dims = np.maximum(model.geom_condim, 1)
    pyramid = model.opt.cone == mujoco.mjtCone.mjCONE_PYRAMIDAL
    per_contact = np.where(dims == 1, 1, 2 * (dims - 1)) if pyramid else dims
    limits = int(np.sum(model.jnt_limited)) + int(np.sum(model.tendon_limited))
    fixed = int(np.sum(model.dof_frictionloss > 0)) + limits + 6 * model.neq + model.nv
    return max(int(contacts.sum()), 16), int((contacts * per_contact).sum()) + fixed


def supported(model: mujoco.MjModel) -> mujoco.MjModel:
    """The model without what MuJoCo Warp cannot do and can do without; says so once."""
    if model.opt.noslip_iterations == 0:
        return model
    _tell("MuJoCo Warp has no noslip iterations: what is grasped creeps in the hand (millimetres in seconds).")
    model = copy.copy(model)
    model.opt.noslip_iterations = 0
    return model


def _tell(text: str) -> None:
    if text not in _told:
        _told.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)
