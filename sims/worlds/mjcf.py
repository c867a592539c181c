"""A robot of your own from its MJCF: the joints as an :class:`Arm`, and the sensors that an environment reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import mujoco
import numpy as np

from sims.errors import UserError, unknown_choice
from sims.worlds.robots import Arm, Joint

_FRAMES = {"body": mujoco.mjtObj.mjOBJ_XBODY, "site": mujoco.mjtObj.mjOBJ_SITE, "geom": mujoco.mjtObj.mjOBJ_GEOM}
_PARTS = {
    "pos": mujoco.mjtSensor.mjSENS_FRAMEPOS, "quat": mujoco.mjtSensor.mjSENS_FRAMEQUAT,
    "vel": mujoco.mjtSensor.mjSENS_FRAMELINVEL,
}  # fmt: skip


def actuated_joints(model: mujoco.MjModel) -> tuple[str, ...]:
    """Names of the hinges and slides that the actuators move, in the order of the actuators.

    Raises:
        UserError: an actuator moves something else, or a joint has two.
    """
    names = []
    for i in range(model.nu):
        joint = int(model.actuator_trnid[i, 0])
        kind = model.jnt_type[joint] if model.actuator_trntype[i] == mujoco.mjtTrn.mjTRN_JOINT else None
        if kind not in (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE):
            raise UserError(
                f"actuator {i} ({model.actuator(i).name!r}) moves no hinge or slide; only those are driven."
            )
        names.append(model.joint(joint).name)
    if len(set(names)) < len(names) or "" in names:
        raise UserError(f"every actuated joint needs a name and one actuator, found {names}.")
    return tuple(names)


def arm_of(
    model: mujoco.MjModel, name: str = "arm", home: Mapping[str, float] | None = None, max_delta: float = 0.1,
    lead: float = 0.25,
) -> Arm:  # fmt: skip
    """The actuated joints of a model as an arm: ranges, gains and damping are those of the model.

    Args:
        home: joint -> angle (rad) at the start of an episode; others: the model's own ``qpos0``.
        max_delta: rad, largest change of a target in one action of kind ``joint_position_delta``.
        lead: rad, how far a target may run ahead of the measured angle.

    Raises:
        UserError: a joint has no range, or ``home`` names no joint or leaves its range.
    """
    joints, home = actuated_joints(model), dict(home or {})
    for key in home:
        if key not in joints:
            raise unknown_choice("joint", key, joints, where="home")
    return Arm(
        name=name,
        joints=tuple(_joint(model, i, j, home.get(j), max_delta) for i, j in enumerate(joints)),
        lead=(lead,) * len(joints),
    )


def _joint(model: mujoco.MjModel, actuator: int, name: str, home: float | None, max_delta: float) -> Joint:
    joint = model.joint(name)
    if not joint.limited[0]:
        raise UserError(f"joint {name} has no range: give it range= in the MJCF, so that targets have limits.")
    low, high = (float(x) for x in joint.range)
    start = float(model.qpos0[joint.qposadr[0]]) if home is None else home
    if not low <= start <= high:
        raise UserError(f"joint {name} starts at {start} rad, outside its range {low} to {high}: set home.")
    torque = _torque(model, actuator)
    damping = float(model.dof_damping[joint.dofadr[0]])
    return Joint(name, low, high, start, max_delta, kp=float(model.actuator_gainprm[actuator, 0]), damping=damping,
                 max_torque=torque)  # fmt: skip


def _torque(model: mujoco.MjModel, actuator: int) -> float:
    """What the actuator's control or force is limited to; infinite where nothing limits it."""
    if model.actuator_biastype[actuator] == mujoco.mjtBias.mjBIAS_NONE and model.actuator_ctrllimited[actuator]:
        return float(np.abs(model.actuator_ctrlrange[actuator]).max())
    if model.actuator_forcelimited[actuator]:
        return float(np.abs(model.actuator_forcerange[actuator]).max())
    return float("inf")


def with_sensors(
    xml: str | Path | mujoco.MjSpec, frames: Mapping[str, tuple[str, str, Sequence[str]]] | None = None
) -> mujoco.MjModel:
    """The model of an MJCF with the sensors that an environment reads.

    Args:
        xml: a path, or a spec to which things were added; its own sensors are kept, behind the new ones.
        frames: sensor prefix -> (``body``, ``site`` or ``geom``, its name, parts out of ``pos``, ``quat``, ``vel``);
            ``{"tip": ("site", "tip", ("pos",))}`` makes the sensor ``tip/pos``.

    Raises:
        UserError: an object or a part is not there.
    """
    spec = xml if isinstance(xml, mujoco.MjSpec) else mujoco.MjSpec.from_file(str(xml))
    joints = actuated_joints(spec.compile())
    own = list(spec.sensors)
    if own:
        raise UserError(f"the MJCF brings {len(own)} sensors of its own; name what tasks read in frames= instead.")
    kinds = {"q": mujoco.mjtSensor.mjSENS_JOINTPOS, "velocity": mujoco.mjtSensor.mjSENS_JOINTVEL}
    for part, kind in kinds.items():
        for joint in joints:
            spec.add_sensor(name=f"{part}/{joint}", type=kind, objtype=mujoco.mjtObj.mjOBJ_JOINT, objname=joint)
    for prefix, (kind, name, parts) in (frames or {}).items():
        _add_frame(spec, prefix, kind, name, parts)
    return spec.compile()


def _add_frame(spec: mujoco.MjSpec, prefix: str, kind: str, name: str, parts: Sequence[str]) -> None:
    if kind not in _FRAMES:
        raise unknown_choice("kind of object", kind, _FRAMES, where=f"frames[{prefix!r}]")
    known = [o.name for o in {"body": spec.bodies, "site": spec.sites, "geom": spec.geoms}[kind] if o.name]
    if name not in known:
        raise unknown_choice(kind, name, known, where=f"frames[{prefix!r}]")
    for part in parts:
        if part not in _PARTS:
            raise unknown_choice("part", part, _PARTS, where=f"frames[{prefix!r}]")
        spec.add_sensor(name=f"{prefix}/{part}", type=_PARTS[part], objtype=_FRAMES[kind], objname=name)
