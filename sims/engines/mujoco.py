"""Many worlds of one MuJoCo model on C threads (``mujoco.rollout``).

A rollout's sensors belong to the state *before* its last substep. So every world is kept one substep ahead of what is
observed: ``state`` and ``sensors`` describe the same instant, and a new target takes effect one substep (5 ms) later,
as it does on a bus. That costs no extra physics.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import mujoco
import numpy as np
import torch
from mujoco import rollout
from torch import Tensor

from sims.engines.fields import check_fields

_CONTROL = mujoco.mjtState.mjSTATE_CTRL | mujoco.mjtState.mjSTATE_MOCAP_POS | mujoco.mjtState.mjSTATE_MOCAP_QUAT
_PUSH = mujoco.mjtState.mjSTATE_XFRC_APPLIED  # between the controls and the mocap poses in MuJoCo's order
_FULL = mujoco.mjtState.mjSTATE_FULLPHYSICS
MAX_SPEED = 100.0  # m/s or rad/s: nothing on a table moves so fast; faster means the solver failed


class MujocoEngine:
    """See :class:`sims.engines.Engine`. float64 on the CPU; tensors share memory with the arrays of the rollout.

    Attributes:
        state: (B, 1 + nq + nv + na) numpy, observed time, positions and velocities.
    """

    device, dtype = torch.device("cpu"), torch.float64

    def __init__(self, model: mujoco.MjModel, num_worlds: int, substeps: int, threads: int = 1):
        self.model, self.num_worlds, self.substeps = model, num_worlds, substeps
        self._models = [model] * num_worlds  # the same object until a world gets values of its own
        pool = threads if threads > 1 else 0  # 0: on the calling thread
        self._pool = rollout.Rollout(nthread=pool)
        self._data = [mujoco.MjData(model) for _ in range(max(1, pool))]
        self.state = np.zeros((num_worlds, mujoco.mj_stateSize(model, _FULL)))
        self._ahead = np.zeros_like(self.state)
        self._sensors = np.zeros((num_worlds, model.nsensordata))
        self.sensors = torch.from_numpy(self._sensors)
        self._pushed = False
        self._lay_out(np.zeros((num_worlds, mujoco.mj_stateSize(model, _CONTROL))))

    def _lay_out(self, control: np.ndarray) -> None:
        """Make ``control`` (B, C) the input of every world: controls, wrenches once there are any, mocap poses."""
        self._spec = _CONTROL | _PUSH if self._pushed else _CONTROL
        self._control = control
        self._mocap = torch.from_numpy(control)[:, -7 * self.model.nmocap :][:, : 3 * self.model.nmocap]
        self._buffers = self._allocate(self.num_worlds, self.substeps)

    def _allocate(self, worlds: int, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        control = np.zeros((worlds, steps, self._control.shape[1]))
        state = np.zeros((worlds, steps, self.state.shape[1]))
        return control, state, np.zeros((worlds, steps, self._sensors.shape[1]))

    @property
    def qpos(self) -> Tensor:
        return torch.from_numpy(self.state[:, 1 : 1 + self.model.nq])

    @property
    def qvel(self) -> Tensor:
        return torch.from_numpy(self.state[:, 1 + self.model.nq : 1 + self.model.nq + self.model.nv])

    @property
    def mocap_pos(self) -> Tensor:
        return self._mocap

    def reset(self, ids: Tensor, qpos: Tensor, mocap_pos: Tensor, control: Tensor) -> None:
        model, rows = self.model, np.asarray(ids)
        start = np.zeros((len(rows), self.state.shape[1]))
        start[:, 1 : 1 + model.nq] = qpos
        own = np.zeros((len(rows), self._control.shape[1]))
        own[:, : model.nu] = control
        if model.nmocap:
            poses = own[:, -7 * model.nmocap :]
            poses[:, : 3 * model.nmocap] = mocap_pos
            poses[:, 3 * model.nmocap :: 4] = 1.0  # no rotation
        self._control[rows] = own
        buffers = self._allocate(len(rows), 1)
        self._roll([self._models[i] for i in rows], start, own, buffers)
        self.state[rows], self._ahead[rows], self._sensors[rows] = start, buffers[1][:, 0], buffers[2][:, 0]

    def step(self, control: Tensor) -> Tensor:
        self._control[:, : self.model.nu] = control
        expected = self.state[:, 0] + self.substeps * self.model.opt.timestep
        _, states, sensors = self._buffers
        self._roll(self._models, self._ahead, self._control, self._buffers)
        self.state[:] = states[:, -2] if self.substeps > 1 else self._ahead
        self._ahead[:], self._sensors[:] = states[:, -1], sensors[:, -1]
        # a rollout that meets a non-finite state resets the world silently, which shows in its clock
        late = np.abs(self.state[:, 0] - expected) > 0.5 * self.model.opt.timestep
        speed = np.abs(self.state[:, 1 + self.model.nq : 1 + self.model.nq + self.model.nv]).max(axis=1, initial=0.0)
        wild = ~(np.abs(self._ahead).max(axis=1) < np.inf) | ~(speed < MAX_SPEED)
        diverged = late | wild | ~np.isfinite(self._sensors).all(axis=1)
        if diverged.any():
            for array in (self.state, self._ahead, self._sensors):
                array[diverged] = 0.0
        return torch.from_numpy(diverged)

    def set_fields(self, ids: Tensor, fields: Mapping[str, Tensor]) -> None:
        """A world with values of its own has a copy of the model; others share the nominal one."""
        derive = check_fields(self.model, len(ids), fields)
        for row, i in enumerate(np.asarray(ids)):
            if self._models[i] is self.model:
                self._models[i] = copy.copy(self.model)
            for name, values in fields.items():
                getattr(self._models[i], name)[:] = np.asarray(values[row])
            if derive:
                mujoco.mj_setConst(self._models[i], self._data[0])

    def push(self, wrench: Tensor) -> None:
        nu, size = self.model.nu, 6 * self.model.nbody
        if not self._pushed:
            self._pushed = True
            blank = np.zeros((self.num_worlds, size))
            self._lay_out(np.concatenate([self._control[:, :nu], blank, self._control[:, nu:]], axis=1))
        self._control[:, nu : nu + size] = wrench.flatten(1)

    def _roll(self, models: list[Any], start: np.ndarray, control: np.ndarray, buffers: tuple[np.ndarray, ...]) -> None:
        controls, states, sensors = buffers
        controls[:] = control[:, None]
        self._pool.rollout(
            models,
            self._data,
            start,
            controls,
            control_spec=int(self._spec),
            skip_checks=True,
            nstep=controls.shape[1],
            state=states,
            sensordata=sensors,
        )

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of everything that decides the future, but for :meth:`set_fields`, which its caller draws again."""
        return {
            "state": self.state.copy(),
            "ahead": self._ahead.copy(),
            "sensors": self._sensors.copy(),
            "control": self._control.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        control = np.array(state["control"])
        if control.shape != self._control.shape:  # it was saved with wrenches
            self.push(torch.zeros(self.num_worlds, self.model.nbody, 6))
        self.state[:], self._ahead[:] = state["state"], state["ahead"]
        self._sensors[:], self._control[:] = state["sensors"], control

    def close(self) -> None:
        self._pool.close()
