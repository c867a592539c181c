"""Many worlds of one MuJoCo model on C threads (``mujoco.rollout``).

A rollout's sensors belong to the state *before* its last substep. So every world is kept one substep ahead of what is
observed: ``state`` and ``sensors`` describe the same instant, and a new target takes effect one substep (5 ms) later,
as it does on a bus. That costs no extra physics.
"""

from __future__ import annotations

import mujoco
import numpy as np
from mujoco import rollout

_CONTROL = mujoco.mjtState.mjSTATE_CTRL | mujoco.mjtState.mjSTATE_MOCAP_POS | mujoco.mjtState.mjSTATE_MOCAP_QUAT
_FULL = mujoco.mjtState.mjSTATE_FULLPHYSICS
MAX_SPEED = 100.0  # m/s or rad/s: nothing on a table moves so fast; faster means the solver failed


class MujocoEngine:
    """B worlds that step together.

    Attributes:
        state: (B, 1 + nq + nv) observed time, positions and velocities.
        sensors: (B, S) sensor data of the same instant.
        qpos, qvel: (B, nq), (B, nv) views of ``state``.
    """

    def __init__(self, model: mujoco.MjModel, num_worlds: int, substeps: int, threads: int = 1):
        self.model, self.num_worlds, self.substeps = model, num_worlds, substeps
        pool = threads if threads > 1 else 0  # 0: on the calling thread
        self._pool = rollout.Rollout(nthread=pool)
        self._data = [mujoco.MjData(model) for _ in range(max(1, pool))]
        nstate, ncontrol = mujoco.mj_stateSize(model, _FULL), mujoco.mj_stateSize(model, _CONTROL)
        self.state = np.zeros((num_worlds, nstate))
        self.sensors = np.zeros((num_worlds, model.nsensordata))
        self._ahead = np.zeros((num_worlds, nstate))
        self._control = np.zeros((num_worlds, ncontrol))
        self._buffers = self._allocate(num_worlds, substeps)

    def _allocate(self, worlds: int, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        control = np.zeros((worlds, steps, self._control.shape[1]))
        state = np.zeros((worlds, steps, self.state.shape[1]))
        return control, state, np.zeros((worlds, steps, self.sensors.shape[1]))

    @property
    def qpos(self) -> np.ndarray:
        return self.state[:, 1 : 1 + self.model.nq]

    @property
    def qvel(self) -> np.ndarray:
        return self.state[:, 1 + self.model.nq : 1 + self.model.nq + self.model.nv]

    @property
    def mocap_pos(self) -> np.ndarray:
        """(B, 3 * nmocap)"""
        nu = self.model.nu
        return self._control[:, nu : nu + 3 * self.model.nmocap]

    def reset(self, ids: np.ndarray, qpos: np.ndarray, mocap_pos: np.ndarray, target: np.ndarray) -> None:
        """Put worlds ``ids`` (N,) at rest in (N, nq) ``qpos`` with (N, 3 * nmocap) mocap positions."""
        model, count = self.model, len(ids)
        start = np.zeros((count, self.state.shape[1]))
        start[:, 1 : 1 + model.nq] = qpos
        quats = np.tile([1.0, 0.0, 0.0, 0.0], (count, model.nmocap))
        self._control[ids] = np.concatenate([target, mocap_pos, quats], axis=1)
        buffers = self._allocate(count, 1)
        self._roll(start, self._control[ids], buffers)
        self.state[ids], self._ahead[ids], self.sensors[ids] = start, buffers[1][:, 0], buffers[2][:, 0]

    def step(self, target: np.ndarray) -> np.ndarray:
        """Advance all worlds by one control step towards (B, nu) targets; returns (B,) bool, True where it diverged.

        A diverged world holds finite but meaningless numbers and must be reset.
        """
        self._control[:, : self.model.nu] = target
        expected = self.state[:, 0] + self.substeps * self.model.opt.timestep
        _, states, sensors = self._buffers
        self._roll(self._ahead, self._control, self._buffers)
        self.state[:] = states[:, -2] if self.substeps > 1 else self._ahead
        self._ahead[:], self.sensors[:] = states[:, -1], sensors[:, -1]
        # a rollout that meets a non-finite state resets the world silently, which shows in its clock
        late = np.abs(self.state[:, 0] - expected) > 0.5 * self.model.opt.timestep
        wild = ~(np.abs(self._ahead).max(axis=1) < np.inf) | ~(np.abs(self.qvel).max(axis=1) < MAX_SPEED)
        diverged = late | wild | ~np.isfinite(self.sensors).all(axis=1)
        if diverged.any():
            for array in (self.state, self._ahead, self.sensors):
                array[diverged] = 0.0
        return diverged

    def _roll(self, start: np.ndarray, control: np.ndarray, buffers: tuple[np.ndarray, ...]) -> None:
        controls, states, sensors = buffers
        controls[:] = control[:, None]
        self._pool.rollout(
            [self.model] * len(controls),
            self._data,
            start,
            controls,
            control_spec=int(_CONTROL),
            skip_checks=True,
            nstep=controls.shape[1],
            state=states,
            sensordata=sensors,
        )

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of everything that decides the future."""
        return {
            "state": self.state.copy(),
            "ahead": self._ahead.copy(),
            "sensors": self.sensors.copy(),
            "control": self._control.copy(),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self.state[:], self._ahead[:] = state["state"], state["ahead"]
        self.sensors[:], self._control[:] = state["sensors"], state["control"]

    def close(self) -> None:
        self._pool.close()
