"""States for the frames of ``fit``, written directly: random layouts, scripted motions, near misses and junk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sims.worlds.kinematics import forward
from sims.worlds.robots import SO101
from sims.worlds.tabletop import CUBE_REST, SLOTS, Layout

CAP_TOP, CAP_RADIUS, TRAVEL = 0.036, 0.016, 0.008  # m, of a button at rest
GHOST = 0.05  # share of press frames whose cap is down without a finger: the light decides, not the hand
# what an episode shows, and how often
MIX = {"press": 0.44, "reach": 0.16, "lift": 0.13, "move": 0.13, "random": 0.14}


@dataclass
class Plan:
    """One frame before the arm is solved: where the tool should go, and what sits where."""

    target: np.ndarray
    sine: float  # of the tool's pitch; -1 points straight down
    roll: float
    grip: float
    use_grasp: bool
    held: int  # slot of a held cube, -1 for none
    noise: float  # rad, added to the joints afterwards
    ghost: int  # slot of a button that is down by itself, -1 for none


def solve_arm(
    target: np.ndarray, sine: np.ndarray, roll: np.ndarray, grip: np.ndarray, grasp: np.ndarray
) -> np.ndarray:
    """(N, 6) joint angles that bring the fingertip (or, where ``grasp``, the grasp point) to (N, 3) targets.

    Damped least squares on pan, lift, elbow and wrist; the tool's pitch is the fourth residual. Out of reach is
    approached as far as it goes: facts are read from the solution, not from the target.
    """
    q = np.tile(SO101.column("home"), (len(target), 1))
    q[:, 0] = -np.arctan2(target[:, 1], target[:, 0] - SO101.links[0].position[0])
    q[:, 4], q[:, 5] = roll, grip
    low, high = SO101.column("low"), SO101.column("high")
    for _ in range(30):
        pose = forward(q)
        point = np.where(grasp[:, None], pose.grasp, pose.tip)
        arms = point[:, None] - pose.origins[:, :4]
        turn = np.cross(pose.axes[:, :4], pose.approach[:, None])[..., 2:]
        jacobian = np.concatenate([np.cross(pose.axes[:, :4], arms), 0.1 * turn], -1)  # (N, 4 joints, 4 residuals)
        residual = np.concatenate([target - point, 0.1 * (sine - pose.approach[:, 2])[:, None]], -1)
        normal = jacobian @ jacobian.transpose(0, 2, 1) + 1e-4 * np.eye(4)
        step = np.linalg.solve(normal, (jacobian @ residual[..., None]))[..., 0]
        q[:, :4] = np.clip(q[:, :4] + np.clip(step, -0.3, 0.3), low[:4], high[:4])
    return q


def _offset(rng: np.random.Generator, near: float, far: float) -> np.ndarray:
    """A point of the upper half space, its distance log-uniform (m)."""
    direction = rng.normal(size=3)
    direction[2] = abs(direction[2])
    return direction / np.linalg.norm(direction) * np.exp(rng.uniform(np.log(near), np.log(far)))


def _above(point: np.ndarray, height: float) -> np.ndarray:
    return point + np.array([0.0, 0.0, height])


def _loose(rng: np.random.Generator, target: np.ndarray, **changes: float) -> Plan:
    plan = Plan(
        target=target,
        sine=-np.sin(np.deg2rad(rng.uniform(50, 90))),
        roll=rng.normal(0, 0.8),
        grip=rng.uniform(-0.1, 1.3),
        use_grasp=False,
        held=-1,
        noise=0.0,
        ghost=-1,
    )
    for name, value in changes.items():
        setattr(plan, name, value)
    return plan


def _press(rng: np.random.Generator, layout: Layout, time: np.ndarray) -> list[Plan]:
    """Towards a button: pressing it, hovering, touching it lightly, or landing beside it."""
    slot = int(rng.integers(3, 5))
    top = _above(getattr(layout, SLOTS[slot]), CAP_TOP)
    style = rng.choice(["press", "hover", "beside", "cloud"], p=[0.5, 0.12, 0.16, 0.22])
    plans = []
    for t in time:
        if style == "cloud" or t < 0.35:
            plan = _loose(rng, top + _offset(rng, 0.004, 0.25))
        elif style == "press":
            inside = rng.uniform(-0.7, 0.7, 2) * CAP_RADIUS
            down = rng.uniform(0.65, 1.05) if rng.random() < 0.6 else rng.uniform(-0.2, 0.65)
            plan = _loose(rng, top + np.array([*inside, -TRAVEL * down]))
        elif style == "hover":
            plan = _loose(rng, top + np.array([*rng.uniform(-0.015, 0.015, 2), rng.uniform(0.001, 0.04)]))
        else:
            angle, radius = rng.uniform(-np.pi, np.pi), rng.uniform(0.021, 0.05)
            place = np.array([radius * np.cos(angle), radius * np.sin(angle), rng.uniform(-0.03, 0.01)])
            plan = _loose(rng, top + place)
        plan.ghost = int(rng.integers(3, 5)) if rng.random() < GHOST else -1
        plans.append(plan)
    return plans


def _reach(rng: np.random.Generator, layout: Layout, time: np.ndarray) -> list[Plan]:
    """Towards the marker or a cube, ending on it or beside it."""
    slot = int(rng.integers(0, 3))
    goal = _above(getattr(layout, SLOTS[slot])[:3], 0.008 if slot == 0 else 0.012)
    miss = 0.0 if rng.random() < 0.6 else rng.uniform(0.02, 0.06)
    side = rng.uniform(-np.pi, np.pi)
    end = goal + miss * np.array([np.cos(side), np.sin(side), 0.0])
    return [_loose(rng, end + _offset(rng, 0.002, 0.004 + 0.25 * (1 - t) ** 2)) for t in time]


def _lift(rng: np.random.Generator, layout: Layout, time: np.ndarray) -> list[Plan]:
    """A cube rises in the hand, part of the way or all; or the hand rises without it."""
    slot = int(rng.integers(1, 3))
    start = getattr(layout, SLOTS[slot])[:3]
    top = rng.uniform(0.085, 0.13) if rng.random() < 0.6 else rng.uniform(0.01, 0.07)
    held = slot if rng.random() < 0.75 else -1
    plans = []
    for t in time:
        rise = top * np.clip((t - 0.3) / 0.5, 0, 1)
        lean = np.sin(np.deg2rad(np.interp(rise, [0, 0.12], [84, 66]) + rng.uniform(-4, 4)))
        place = start + np.array([*rng.normal(0, 0.003, 2), rise]) + (_offset(rng, 0.005, 0.15) if t < 0.25 else 0.0)
        grip = 0.25 if held > 0 and t >= 0.25 else rng.uniform(0.0, 0.9)
        plans.append(_loose(rng, place, sine=-lean, grip=grip, use_grasp=True, held=held if t >= 0.25 else -1))
    return plans


def _move(rng: np.random.Generator, layout: Layout, time: np.ndarray) -> list[Plan]:
    """A cube is dragged to the marker, to a place beside it, or the hand goes there without it."""
    slot = int(rng.integers(1, 3))
    start, marker = getattr(layout, SLOTS[slot])[:3], _above(layout.marker, CUBE_REST)
    miss = rng.uniform(0, 0.012) if rng.random() < 0.6 else rng.uniform(0.035, 0.07)
    side = rng.uniform(-np.pi, np.pi)
    end = marker + miss * np.array([np.cos(side), np.sin(side), 0.0])
    held = slot if rng.random() < 0.85 else -1
    plans = []
    for t in time:
        share = np.clip((t - 0.2) / 0.5, 0, 1)
        place = start + share * (end - start)
        plans.append(_loose(rng, place, sine=-0.99, grip=0.25, use_grasp=True, held=held if t >= 0.2 else -1))
    return plans


def _random(rng: np.random.Generator, layout: Layout, time: np.ndarray) -> list[Plan]:
    """Arm anywhere, with much joint noise; now and then a button is down by itself."""
    plans = []
    for _ in time:
        spot = np.array([rng.uniform(0.05, 0.34), rng.uniform(-0.3, 0.3), rng.uniform(0.0, 0.25)])
        ghost = int(rng.integers(3, 5)) if rng.random() < 0.1 else -1
        plans.append(_loose(rng, spot, sine=rng.uniform(-1, 0.3), noise=rng.uniform(0, 0.5), ghost=ghost))
    return plans


SCRIPTS: dict[str, Callable[[np.random.Generator, Layout, np.ndarray], list[Plan]]] = {
    "press": _press,
    "reach": _reach,
    "lift": _lift,
    "move": _move,
    "random": _random,
}


def _solve(plans: list[Plan], rng: np.random.Generator) -> np.ndarray:
    """(N, 6) joint angles, the hand kept above the table."""
    columns = [[getattr(p, n) for p in plans] for n in ("target", "sine", "roll", "grip", "use_grasp")]
    target, sine, roll, grip, grasp = (np.array(c) for c in columns)
    noise = np.array([p.noise for p in plans])[:, None] * rng.normal(size=(len(plans), 6))
    low, high = SO101.column("low"), SO101.column("high")
    q = np.clip(solve_arm(target, sine, roll, grip, grasp) + noise, low, high)
    for _ in range(3):  # lift whatever went through the table
        pose = forward(q)
        lowest = np.minimum(np.minimum(pose.tip[:, 2], pose.jaw_tip[:, 2]), 1.0)
        sunk = np.flatnonzero(lowest < 0.001)
        if not len(sunk):
            break
        lifted = np.where(grasp[:, None], pose.grasp, pose.tip)[sunk]
        lifted[:, 2] += 0.004 - lowest[sunk]
        q[sunk] = solve_arm(lifted, sine[sunk], roll[sunk], grip[sunk], grasp[sunk])
    pose = forward(q)
    q[np.minimum(pose.tip[:, 2], pose.jaw_tip[:, 2]) < 0.0] = SO101.column("home")
    return q


def _depth(layout: Layout, points: np.ndarray, plan: Plan, rng: np.random.Generator) -> np.ndarray:
    """(2,) how far each cap is down: pushed by one of the (P, 3) fingertips, or by itself."""
    out = np.zeros(2)
    for i, name in enumerate(SLOTS[3:]):
        base = getattr(layout, name)
        over = np.linalg.norm(points[:, :2] - base[:2], axis=-1) < CAP_RADIUS
        out[i] = np.clip(CAP_TOP - points[over, 2], 0, TRAVEL).max(initial=0.0)
        if plan.ghost == 3 + i:
            out[i] = max(out[i], rng.uniform(0.0055, TRAVEL))
    return out


def _place_held(layout: Layout, plan: Plan, pose_grasp: np.ndarray, closing: np.ndarray) -> dict[int, np.ndarray]:
    """Slot -> (7,) cube pose; a held cube sits at the grasp point and never below the table."""
    cubes = {1: layout.red_cube.copy(), 2: layout.blue_cube.copy()}
    if plan.held > 0:
        yaw = np.arctan2(closing[1], closing[0])
        z = max(pose_grasp[2], CUBE_REST)
        cubes[plan.held] = np.array([*pose_grasp[:2], z, np.cos(yaw / 2), 0, 0, np.sin(yaw / 2)])
    return cubes


def draw_states(rng: np.random.Generator, layout: Layout, kind: str, count: int) -> list[tuple[np.ndarray, tuple]]:
    """One episode of a kind in MIX: (qpos, (tip, positions of the five slots, depths)) per frame."""
    plans = SCRIPTS[kind](rng, layout, np.sort(rng.uniform(0, 1, count)))
    q = _solve(plans, rng)
    pose = forward(q)
    out = []
    for i, plan in enumerate(plans):
        cubes = _place_held(layout, plan, pose.grasp[i], pose.closing[i])
        depth = _depth(layout, np.stack([pose.tip[i], pose.jaw_tip[i]]), plan, rng)
        caps = np.stack([layout.green_button, layout.yellow_button])
        caps[:, 2] += CAP_TOP - depth
        pos = np.concatenate([layout.marker[None], cubes[1][None, :3], cubes[2][None, :3], caps])
        qpos = np.concatenate([q[i], cubes[1], cubes[2], -depth])
        out.append((qpos, (pose.tip[i], pos, depth)))
    return out
