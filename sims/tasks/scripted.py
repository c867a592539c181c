"""Closed-loop scripts that solve the tasks from what a policy sees: ``proprio``, ``objects`` and ``goal``.

No phase is remembered: each step decides from the present observation, so a script recovers from a lost grasp and can
take over from any state. Motion is damped least squares on fingertip or grasp point, pitch and closing direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sims.worlds.kinematics import Pose, forward
from sims.worlds.predicates import CUBE_REST, HOVER
from sims.worlds.robots import SO101

LOOK_AHEAD = 0.05  # s: steer from where the servos will be, against overshoot
TRACKER_DELAY = 0.05  # s
GAIN = 0.5  # share of the remaining way per step
STRIDE = 0.05  # m: farthest point aimed at in one step
POSITION_WEIGHT = 10.0  # 1 rad weighs as much as 10 cm
DAMPING = 0.08
CAP_TOP = 0.036  # m above the table
OPEN, CLOSED = 0.6, -0.1  # rad of the gripper joint
DOWN = np.pi / 2  # pitch of fingers that point straight down

_LIMIT = SO101.column("max_delta")


class Seen(NamedTuple):
    """An observation taken apart; (B, n) numpy float64."""

    q: np.ndarray
    velocity: np.ndarray
    lead: np.ndarray
    pose: Pose
    marker: np.ndarray
    goal: np.ndarray
    yaw: np.ndarray


class Aim(NamedTuple):
    """Where the hand should be: ``point`` (B, 3) m of ``pose.tip`` or ``pose.grasp``, pitch and yaw errors (B,) rad."""

    point: np.ndarray
    at: np.ndarray
    pitch: np.ndarray
    yaw_error: np.ndarray
    pitch_weight: float = 0.3
    yaw_weight: float = 0.5


def look(obs: Mapping[str, Any]) -> Seen:
    """Take the groups of a tabletop observation apart (torch or numpy)."""
    proprio, objects, goal = (np.asarray(obs[k], dtype=np.float64) for k in ("proprio", "objects", "goal"))
    q, velocity, lead = proprio[:, 0:6], proprio[:, 6:12], proprio[:, 12:18]
    points = np.stack([objects[:, i : i + 3] for i in (0, 3, 11, 19, 22)], axis=1)  # (B, slot, 3)
    motion = objects[:, 6:11] * goal[:, 1:2] + objects[:, 14:19] * goal[:, 2:3]
    return Seen(
        q=q,
        velocity=velocity,
        lead=lead,
        pose=forward(q + LOOK_AHEAD * velocity),
        marker=objects[:, 0:3],
        goal=(points * goal[:, :, None]).sum(axis=1) + TRACKER_DELAY * motion[:, 0:3],
        yaw=np.arctan2(motion[:, 4], motion[:, 3]) / 4,
    )


def steer(seen: Seen, aim: Aim) -> np.ndarray:
    """(B, 5) change of the arm's targets (rad) towards the aim."""
    pose, count = seen.pose, len(seen.q)
    arms = aim.at[:, None, :] - pose.origins[:, :5]
    jacobian = np.zeros((count, 5, 5))
    jacobian[:, :3] = POSITION_WEIGHT * np.cross(pose.axes[:, :5], arms).transpose(0, 2, 1)
    jacobian[:, 3, 1:4] = aim.pitch_weight
    jacobian[:, 4, 0], jacobian[:, 4, 4] = -aim.yaw_weight, aim.yaw_weight
    way = aim.point - aim.at
    length = np.linalg.norm(way, axis=-1, keepdims=True)
    error = np.empty((count, 5))
    error[:, :3] = POSITION_WEIGHT * way * np.minimum(1.0, STRIDE / np.maximum(length, 1e-9))
    error[:, 3] = aim.pitch_weight * (aim.pitch - pitch_of(seen))
    error[:, 4] = aim.yaw_weight * np.clip(aim.yaw_error, -0.5, 0.5)
    square = jacobian @ jacobian.transpose(0, 2, 1) + DAMPING**2 * np.eye(5)
    step = (jacobian.transpose(0, 2, 1) @ np.linalg.solve(square, error[..., None]))[..., 0]
    return GAIN * step


def pitch_of(seen: Seen) -> np.ndarray:
    """(B,) rad below the horizon of the fingers: the lift, elbow and wrist axes are parallel."""
    return (seen.q + LOOK_AHEAD * seen.velocity)[:, 1:4].sum(axis=1)


def roll_home(seen: Seen) -> np.ndarray:
    """Yaw error that turns the wrist back to zero."""
    return -seen.q[:, 4]


def align(seen: Seen) -> np.ndarray:
    """(B,) rad to the nearest closing direction square to the cube's faces."""
    closing = np.arctan2(seen.pose.closing[:, 1], seen.pose.closing[:, 0])
    quarter = np.pi / 2
    return (seen.yaw - closing + quarter / 2) % quarter - quarter / 2


class Script:
    """Base: turns an observation into actions in physical units."""

    def __init__(self, env: Any = None):
        del env  # every script reads observations only

    def plan(self, seen: Seen) -> tuple[Aim, np.ndarray]:
        """The aim and the wanted gripper angle (B,)."""
        raise NotImplementedError

    def act(self, obs: Mapping[str, Any]) -> Tensor:
        """Observation of B worlds -> (B, 6) float32 actions (rad per step)."""
        seen = look(obs)
        aim, jaw = self.plan(seen)
        change = np.empty((len(seen.q), 6))
        change[:, :5] = steer(seen, aim)
        change[:, 5] = jaw - (seen.q + seen.lead)[:, 5]
        return torch.from_numpy(np.clip(change, -_LIMIT, _LIMIT).astype(np.float32))


class ReachScript(Script):
    """Fingertip to just above the marker, from above."""

    def plan(self, seen: Seen) -> tuple[Aim, np.ndarray]:
        away = np.linalg.norm((seen.goal - seen.pose.tip)[:, :2], axis=-1)
        point = seen.goal.copy()
        point[:, 2] = HOVER + np.clip(0.6 * (away - 0.01), 0.0, 0.04)
        aim = Aim(point, seen.pose.tip, np.full(len(point), DOWN - 0.1), roll_home(seen))
        return aim, np.full(len(point), OPEN)


class PressScript(Script):
    """Fingertip above the cap, then through it."""

    def plan(self, seen: Seen) -> tuple[Aim, np.ndarray]:
        away = np.linalg.norm((seen.goal - seen.pose.tip)[:, :2], axis=-1)
        point = seen.goal.copy()
        point[:, 2] = CAP_TOP + np.where(away > 0.012, 0.03, -0.015)
        aim = Aim(point, seen.pose.tip, np.full(len(point), DOWN - 0.1), roll_home(seen))
        return aim, np.full(len(point), OPEN)


class GraspScript(Script):
    """Grasp the cube; what happens then is up to ``carry``."""

    hover = 0.045  # m of the grasp point above the cube while it is being aligned
    clearance = 0.004  # m between the fixed jaw and the cube on the way down

    def carry(self, seen: Seen) -> np.ndarray:
        """(B, 3) where the grasp point should go while the cube is held."""
        raise NotImplementedError

    carry_pitch = DOWN - 0.15

    def plan(self, seen: Seen) -> tuple[Aim, np.ndarray]:
        hand, cube, jaw = seen.pose.grasp, seen.goal, seen.q[:, 5]
        offset, error = hand - cube, align(seen)
        open_aim = cube - self.clearance * seen.pose.closing
        beside = np.linalg.norm((hand - open_aim)[:, :2], axis=-1)
        close_by = np.linalg.norm(offset, axis=-1)
        held = (close_by < 0.03) & (jaw < 0.36) & (seen.lead[:, 5] < -0.1) & (np.abs(seen.velocity[:, 5]) < 0.4)
        closing = held | ((beside < 0.014) & (np.abs(offset[:, 2]) < 0.010)) | ((close_by < 0.022) & (jaw < 0.45))
        descend = closing | ((beside < 0.012) & (np.abs(error) < 0.12))
        point = np.where(closing[:, None], cube, open_aim)
        point[:, 2] = np.where(descend, cube[:, 2] - 0.001, cube[:, 2] + self.hover)
        point = np.where(held[:, None], self.carry(seen), point)
        pitch = np.where(held, self.carry_pitch, DOWN - 0.12)
        aim = Aim(point, hand, pitch, np.where(closing, 0.0, error))
        return aim, np.where(closing, CLOSED - 0.4, OPEN)


class LiftScript(GraspScript):
    """Grasp and raise; the fingers must tilt, since they cannot point straight down above 10 cm."""

    carry_pitch = np.deg2rad(70)

    def carry(self, seen: Seen) -> np.ndarray:
        point = seen.pose.grasp.copy()
        point[:, 2] = CUBE_REST + 0.10
        return point


class MoveScript(GraspScript):
    """Grasp and drag, pressed lightly on the table."""

    def carry(self, seen: Seen) -> np.ndarray:
        way = seen.marker - seen.goal
        length = np.linalg.norm(way[:, :2], axis=-1, keepdims=True)
        # the tracker is a step late: slow down near the marker and let go of the last millimetres
        point = seen.pose.grasp + way * np.where(length < 0.006, 0.0, np.minimum(0.5, 0.03 / (length + 1e-9)))
        point[:, 2] = CUBE_REST + 0.003
        return point


SCRIPTS: dict[str, type[Script]] = {
    "reach": ReachScript,
    "press": PressScript,
    "move": MoveScript,
    "lift": LiftScript,
}


class MixedScript:
    """Scripts for an environment whose worlds do different jobs; asks the environment which."""

    def __init__(self, env: Any):
        self._env = env
        self._scripts = {task: script() for task, script in SCRIPTS.items()}

    def act(self, obs: Mapping[str, Any]) -> Tensor:
        """Observation of B worlds -> (B, 6) float32 actions (rad per step)."""
        tasks = self._env.task_names
        action = torch.zeros((len(tasks), 6))
        for task, script in self._scripts.items():
            rows = torch.tensor([i for i, name in enumerate(tasks) if name == task])
            if len(rows):
                action[rows] = script.act({k: obs[k][rows] for k in ("proprio", "objects", "goal")})
        return action
