"""Does this policy fit this robot? Checked before torque; joints are matched by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from real_robot.config import RobotSpec
from sims.errors import UserError, unknown_choice
from sims.worlds.robots import SO101, Arm

if TYPE_CHECKING:
    from control.policy import PolicySpec

DELTA, CHUNK = "joint_position_delta", "joint_position_chunk_relative_to_target"
ARMS = {"so101": SO101}


def arm_of(robot: RobotSpec) -> Arm:
    """Kinematics named in the robot file."""
    if robot.kinematics not in ARMS:
        raise unknown_choice("kinematics", robot.kinematics, ARMS, where=f"robot '{robot.name}'")
    return ARMS[robot.kinematics]


class JointMap:
    """Reorders joint vectors between a policy and a robot file by name.

    Raises UserError unless both name the same joints.
    """

    def __init__(self, policy_names: tuple[str, ...], robot: RobotSpec) -> None:
        if sorted(policy_names) != sorted(robot.names):
            raise UserError(
                f"the policy's joints do not match robot '{robot.name}': policy {', '.join(policy_names) or 'none'}; "
                f"robot {', '.join(robot.names)}. Use a policy trained for this robot."
            )
        self._to_robot = np.array([policy_names.index(n) for n in robot.names])
        self._to_policy = np.array([robot.names.index(n) for n in policy_names])

    def to_robot(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(values)[self._to_robot]

    def to_policy(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(values)[self._to_policy]


def check_contract(spec: PolicySpec, robot: RobotSpec) -> JointMap:
    """Refuse a policy that would misread or mis-drive this robot; returns how joints map.

    Checks joint names, units, meaning, rate, speed of the actions and the observation groups it needs.
    """
    arm, action = arm_of(robot), spec.env.action
    joints = JointMap(action.names, robot)
    if action.names != arm.names:
        raise UserError(
            f"the policy orders its joints {', '.join(action.names)}; the observations of arm '{arm.name}' are ordered "
            f"{', '.join(arm.names)}. Export the policy again from the world '{arm.name}'."
        )
    for what, found, wanted in (
        ("action unit", action.unit, ("rad",)),
        ("action meaning", spec.action_meaning, (DELTA, CHUNK)),
        ("control rate (Hz)", spec.env.control_hz, (robot.policy_hz,)),
    ):
        if found not in wanted:
            raise UserError(f"policy and robot '{robot.name}' differ in {what}: policy {found}, robot {wanted}.")
    _check_speed(np.array(action.low), np.array(action.high), joints, robot)
    _check_inputs(spec, robot)
    return joints


def _check_speed(low: np.ndarray, high: np.ndarray, joints: JointMap, robot: RobotSpec) -> None:
    if low.shape != (len(robot.joints),) or low.shape != high.shape:
        raise UserError(f"the policy gives no action bounds for the {len(robot.joints)} joints; export it again.")
    speed = joints.to_robot(np.maximum(-low, high)) * robot.policy_hz
    fast = speed > robot.array("velocity") * (1 + 1e-6)
    if fast.any():
        names = ", ".join(f"{n} {s:.2f} rad/s" for n, s, bad in zip(robot.names, speed, fast) if bad)
        raise UserError(
            f"the policy may move faster than robot '{robot.name}' allows: {names}. Retrain with smaller steps."
        )


def _check_inputs(spec: PolicySpec, robot: RobotSpec) -> None:
    have = {"proprio", "goal"} | ({"objects"} if robot.emulator or robot.tracker else set())
    if spec.language is not None:
        have |= {language_group(spec)}
    missing = [g for g in spec.inputs if g not in have]
    if missing:
        raise UserError(
            f"the policy needs {', '.join(missing)}, which robot '{robot.name}' does not measure (it has "
            f"{', '.join(sorted(have))}). For 'objects' set 'tracker' in the robot file."
        )


def language_group(spec: PolicySpec) -> str:
    """Name of the input that takes the sentence embedding."""
    named = (spec.language or {}).get("group")
    known = {"proprio", "objects", "goal"}
    return str(named) if named else next((g for g in spec.inputs if g not in known and not g.startswith("pixels/")), "")
