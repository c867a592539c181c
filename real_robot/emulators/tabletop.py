"""The tabletop world behind the servo bank: MuJoCo physics, an object tracker with latency, and the judge."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import mujoco
import numpy as np

from real_robot.config import RobotSpec
from real_robot.emulators.world import TIMESTEP_NS
from sims.errors import UserError, unknown_choice
from sims.worlds import tabletop, tracker
from sims.worlds.predicates import holds
from sims.worlds.variants import HOLD_STEPS, VARIANTS

STEPS_PER_CONTROL = tabletop.SUBSTEPS  # 50 ms: how often the judge looks and a trajectory row is kept
LATENCY_STEPS = tabletop.SUBSTEPS  # the tracker reports what was one control step ago, as in training
MAX_ROWS = 2000


class TabletopRobot:
    """One arm at a table. Joints are matched to the scene by name; an unknown joint is refused."""

    def __init__(self, spec: RobotSpec) -> None:
        if round(tabletop.TIMESTEP * 1e9) != TIMESTEP_NS:
            raise UserError(f"the tabletop steps {tabletop.TIMESTEP} s, the emulator {TIMESTEP_NS} ns.")
        self.model = tabletop.load_model()
        self.data = mujoco.MjData(self.model)
        self.slices = tabletop.sensor_slices(self.model)
        known = [self.model.actuator(i).name for i in range(self.model.nu)]
        for name in spec.names:
            if name not in known:
                raise unknown_choice("joint", name, known, where=f"robot '{spec.name}'")
        self.actuators = np.array([known.index(n) for n in spec.names])
        joints = self.model.actuator_trnid[self.actuators, 0]
        self.qpos, self.qvel = self.model.jnt_qposadr[joints], self.model.jnt_dofadr[joints]
        self.gain, self.bias = self.model.actuator_gainprm.copy(), self.model.actuator_biasprm.copy()
        self.low, self.high = self.model.actuator_ctrlrange[self.actuators].T
        self.powered: np.ndarray | None = None
        self.reset({})

    def reset(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """New layout by ``seed`` and ``split`` (or ``layout``: name -> numbers); ``variant``: the job judged."""
        variant = options.get("variant")
        if variant is not None and variant not in VARIANTS:
            raise unknown_choice("variant", str(variant), VARIANTS)
        seed = int(options.get("seed", 0))
        if "layout" in options:
            layout = tabletop.Layout(**{k: np.array(v, dtype=np.float64) for k, v in options["layout"].items()})
        else:
            layout = tabletop.sample_layout(np.random.default_rng(seed), options.get("split", "train"))
        tabletop.apply_layout(self.model, self.data, layout)
        self.rng = np.random.default_rng([seed, 1])
        self.variant, self.steps, self.streak, self.first = variant, 0, 0, None
        self.history: deque[np.ndarray] = deque(
            [self.data.sensordata.copy()] * (LATENCY_STEPS + 1), maxlen=LATENCY_STEPS + 1
        )
        self.rows: list[list[float]] = []
        self._keep_row()
        return {"layout": {k: np.asarray(v).tolist() for k, v in vars(layout).items()}}

    def step(self, goal: np.ndarray, torque: np.ndarray) -> None:
        if self.powered is None or (torque != self.powered).any():
            self._power(torque)
        self.data.ctrl[self.actuators] = np.clip(goal, self.low, self.high)
        mujoco.mj_step(self.model, self.data)
        self.steps += 1
        self.history.append(self.data.sensordata.copy())
        if self.steps % STEPS_PER_CONTROL == 0:
            self._look()

    def _power(self, torque: np.ndarray) -> None:
        """A motor without torque exerts none; its gears still damp the joint."""
        on = np.ones(self.model.nu)
        on[self.actuators] = torque
        self.model.actuator_gainprm[:] = self.gain * on[:, None]
        self.model.actuator_biasprm[:] = self.bias * on[:, None]
        self.powered = torque.copy()

    def _look(self) -> None:
        self._keep_row()
        if self.variant is None:
            return
        mujoco.mj_forward(self.model, self.data)  # sensors of a step belong to the state before it
        ok = bool(holds(self.variant, tabletop.read_sensors(self.data.sensordata, self.slices)))
        self.streak = self.streak + 1 if ok else 0
        if self.streak >= HOLD_STEPS and self.first is None:
            self.first = self.steps // STEPS_PER_CONTROL

    def _keep_row(self) -> None:
        if len(self.rows) < MAX_ROWS:
            self.rows.append([*self.data.qpos.tolist(), *self.data.mocap_pos.ravel().tolist()])

    def joints(self) -> tuple[np.ndarray, np.ndarray]:
        return self.data.qpos[self.qpos].copy(), self.data.qvel[self.qvel].copy()

    def objects(self) -> tuple[int, np.ndarray]:
        """Age (ns) and the 25 noisy numbers of `sims.worlds.tracker`, one control step old."""
        sensors = tabletop.read_sensors(self.history[0][None], self.slices)  # at rest before the reset
        noise = self.rng.standard_normal((1, tracker.NOISE_DIM))
        return LATENCY_STEPS * TIMESTEP_NS, tracker.measure(sensors, noise)[0]

    def judge(self) -> dict[str, Any]:
        """``success``: the condition holds now and has for HOLD_STEPS control steps; ``first``: first such step."""
        return {
            "variant": self.variant,
            "success": self.streak >= HOLD_STEPS,
            "first": self.first,
            "steps": self.steps // STEPS_PER_CONTROL,
        }

    def truth(self) -> dict[str, Any]:
        position, velocity = self.joints()
        return {"position": position.tolist(), "velocity": velocity.tolist(), "time_ns": self.steps * TIMESTEP_NS}

    def trajectory(self) -> dict[str, Any]:
        """``qpos`` rows (nq) and ``mocap`` rows (9) every 50 ms since the reset, the first at the start."""
        nq = self.model.nq
        return {"qpos": [r[:nq] for r in self.rows], "mocap": [r[nq:] for r in self.rows]}
