"""Pictures for ``fit``: states written directly, random looks and colours, facts from the state. numpy and MuJoCo."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np

from sims.rendering import SceneRenderer, sample_look
from sims.worlds.kinematics import forward, matrix_of
from sims.worlds.robots import SO101
from sims.worlds.tabletop import CAMERAS, CUBE_REST, SLOTS, XML, Layout, load_model, sample_layout
from vlm_rewards.captions import COLOURS, SLOT_KIND, UNSEEN, Facts

VERSION = 6  # of the frames; part of the cache key
CAP_TOP, CAP_RADIUS, TRAVEL = 0.036, 0.016, 0.008  # m, of a button at rest
GHOST = 0.05  # share of press frames whose cap is down without a finger: the light decides, not the hand
AUTHORED = 0.35  # share of episodes in the authored light, greys and cameras (colours stay random)

# hue (turns) and saturation in which a colour keeps its name; value depends on the thing that wears it (a lit cap adds
# its own light of 0.9 times its colour: a higher value would clip and turn lime and orange into yellow)
PALETTE: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "red": ((-0.03, 0.02), (0.75, 1.0)),
    "orange": ((0.05, 0.09), (0.8, 1.0)),
    "yellow": ((0.125, 0.17), (0.75, 1.0)),
    "lime": ((0.205, 0.255), (0.7, 1.0)),
    "green": ((0.29, 0.40), (0.7, 1.0)),
    "cyan": ((0.46, 0.53), (0.6, 1.0)),
    "blue": ((0.58, 0.68), (0.7, 1.0)),
    "purple": ((0.74, 0.83), (0.6, 1.0)),
    "pink": ((0.88, 0.94), (0.5, 0.9)),
    "white": ((0.0, 1.0), (0.0, 0.08)),
}
VALUE = {"cube": (0.25, 1.0), "marker": (0.25, 1.0), "button": (0.22, 0.58), "lit": (0.6, 0.72)}
# what an episode shows, and how often
MIX = {"press": 0.44, "reach": 0.16, "lift": 0.13, "move": 0.13, "random": 0.14}


@dataclass(frozen=True)
class Frames:
    """N tiled frames with their facts.

    Attributes:
        pixels: (N, 64, 128, 3) uint8, front view left, side view right.
        facts: see captions.Facts.
        episode: (N,) int; frames of one episode share layout, look and colours.
        kind: (N,) index into MIX.
        where: (N, 2, 6, 2) image position (right, down; 0..1 inside the frame) in each view of the fingertip and the
            five slots; hidden things have one too.
    """

    pixels: np.ndarray
    facts: Facts
    episode: np.ndarray
    kind: np.ndarray
    where: np.ndarray

    def __len__(self) -> int:
        return len(self.pixels)


@dataclass
class _Plan:
    """One frame before the arm is solved: where the tool should go, and what sits where."""

    target: np.ndarray
    sine: float  # of the tool's pitch; -1 points straight down
    roll: float
    grip: float
    use_grasp: bool
    held: int  # slot of a held cube, -1 for none
    noise: float  # rad, added to the joints afterwards
    ghost: int  # slot of a button that is down by itself, -1 for none


def draw_colours(rng: np.random.Generator, force_unseen: bool = False) -> np.ndarray:
    """(5,) colour index per slot; distinct within a kind. The unseen pair occurs only where it is asked for."""
    out = np.empty(len(SLOTS), dtype=np.int64)
    for kind in ("marker", "cube", "button"):
        slots = [i for i, k in enumerate(SLOT_KIND) if k == kind]
        allowed = [i for i, c in enumerate(COLOURS) if (c, kind) != UNSEEN]
        out[slots] = rng.choice(allowed, len(slots), replace=False)
    if force_unseen:
        slot = rng.choice([i for i, k in enumerate(SLOT_KIND) if k == UNSEEN[1]])
        out[slot] = COLOURS.index(UNSEEN[0])
    return out


def colour_rgb(rng: np.random.Generator, colour: str, wearer: str) -> np.ndarray:
    """(3,) rgb in 0..1 of a colour word on a ``cube``, ``marker``, dark ``button`` or ``lit`` cap."""
    hue, saturation = (rng.uniform(*r) for r in PALETTE[colour])
    value = rng.uniform(*VALUE[wearer])
    saturation *= 0.85 if wearer == "lit" else 1.0
    k = (np.array([5.0, 3.0, 1.0]) + 6.0 * hue) % 6.0
    return value - value * saturation * np.clip(np.minimum(k, 4.0 - k), 0.0, 1.0)


def slot_colours(rng: np.random.Generator, colours: np.ndarray) -> dict[str, np.ndarray]:
    """Material name -> rgb for the colours of the five slots, caps dark and lit."""
    out = {}
    for slot, colour in zip(SLOTS, colours, strict=True):
        kind = slot.split("_")[-1]
        out[slot] = colour_rgb(rng, COLOURS[colour], kind)
        if kind == "button":
            out[f"{slot}_lit"] = colour_rgb(rng, COLOURS[colour], "lit")
    return out


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


def _loose(rng: np.random.Generator, target: np.ndarray, **changes: float) -> _Plan:
    plan = _Plan(
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


def _press(rng: np.random.Generator, layout: Layout, time: np.ndarray) -> list[_Plan]:
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


def _reach(rng: np.random.Generator, layout: Layout, time: np.ndarray) -> list[_Plan]:
    """Towards the marker or a cube, ending on it or beside it."""
    slot = int(rng.integers(0, 3))
    goal = _above(getattr(layout, SLOTS[slot])[:3], 0.008 if slot == 0 else 0.012)
    miss = 0.0 if rng.random() < 0.6 else rng.uniform(0.02, 0.06)
    side = rng.uniform(-np.pi, np.pi)
    end = goal + miss * np.array([np.cos(side), np.sin(side), 0.0])
    return [_loose(rng, end + _offset(rng, 0.002, 0.004 + 0.25 * (1 - t) ** 2)) for t in time]


def _lift(rng: np.random.Generator, layout: Layout, time: np.ndarray) -> list[_Plan]:
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


def _move(rng: np.random.Generator, layout: Layout, time: np.ndarray) -> list[_Plan]:
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


def _random(rng: np.random.Generator, layout: Layout, time: np.ndarray) -> list[_Plan]:
    """Arm anywhere, with much joint noise; now and then a button is down by itself."""
    plans = []
    for _ in time:
        spot = np.array([rng.uniform(0.05, 0.34), rng.uniform(-0.3, 0.3), rng.uniform(0.0, 0.25)])
        ghost = int(rng.integers(3, 5)) if rng.random() < 0.1 else -1
        plans.append(_loose(rng, spot, sine=rng.uniform(-1, 0.3), noise=rng.uniform(0, 0.5), ghost=ghost))
    return plans


SCRIPTS: dict[str, Callable[[np.random.Generator, Layout, np.ndarray], list[_Plan]]] = {
    "press": _press,
    "reach": _reach,
    "lift": _lift,
    "move": _move,
    "random": _random,
}


def _solve(plans: list[_Plan], rng: np.random.Generator) -> np.ndarray:
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


def _depth(layout: Layout, points: np.ndarray, plan: _Plan, rng: np.random.Generator) -> np.ndarray:
    """(2,) how far each cap is down: pushed by one of the (P, 3) fingertips, or by itself."""
    out = np.zeros(2)
    for i, name in enumerate(SLOTS[3:]):
        base = getattr(layout, name)
        over = np.linalg.norm(points[:, :2] - base[:2], axis=-1) < CAP_RADIUS
        out[i] = np.clip(CAP_TOP - points[over, 2], 0, TRAVEL).max(initial=0.0)
        if plan.ghost == 3 + i:
            out[i] = max(out[i], rng.uniform(0.0055, TRAVEL))
    return out


def _place_held(layout: Layout, plan: _Plan, pose_grasp: np.ndarray, closing: np.ndarray) -> dict[int, np.ndarray]:
    """Slot -> (7,) cube pose; a held cube sits at the grasp point and never below the table."""
    cubes = {1: layout.red_cube.copy(), 2: layout.blue_cube.copy()}
    if plan.held > 0:
        yaw = np.arctan2(closing[1], closing[0])
        z = max(pose_grasp[2], CUBE_REST)
        cubes[plan.held] = np.array([*pose_grasp[:2], z, np.cos(yaw / 2), 0, 0, np.sin(yaw / 2)])
    return cubes


def render_frames(
    count: int,
    seed: int,
    episode: int = 3,
    unseen: bool = False,
    plain: bool = False,
    mix: dict[str, float] | None = None,
) -> Frames:
    """Draw ``count`` frames in episodes.

    Args:
        seed: of layouts, looks, colours and motions.
        unseen: one button of every scene wears the pair that training must not show.
        plain: the authored look in every episode, only object colours differ.
        mix: shares of the episode kinds, default MIX.
    """
    rng = np.random.default_rng(seed)
    shares = mix or MIX
    kinds = list(MIX)
    renderer = SceneRenderer(load_model(), CAMERAS, 64)
    pixels = np.empty((count, 64, 128, 3), dtype=np.uint8)
    rows: list[tuple[np.ndarray, ...]] = []
    probability = np.array([shares.get(k, 0.0) for k in kinds])
    try:
        for start in range(0, count, episode):
            kind = int(rng.choice(len(kinds), p=probability / probability.sum()))
            number = min(episode, count - start)
            colours = draw_colours(rng, unseen)
            look = sample_look(rng)
            if plain or rng.random() < AUTHORED:
                look = type(look)()
            look.colours.update(slot_colours(rng, colours))
            renderer.set_look(look)
            layout = sample_layout(rng, "heldout" if rng.random() < 0.3 else "train")
            cameras = [_Projection.of(renderer.model, c) for c in CAMERAS]
            for qpos, facts in _episode(rng, layout, kinds[kind], number):
                pixels[len(rows)] = np.concatenate(renderer.render_state(qpos, layout.mocap), axis=1)
                where = np.stack([c.project(np.concatenate([facts[0][None], facts[1]])) for c in cameras])
                rows.append((colours, *facts, np.array(start // episode), np.array(kind), where))
    finally:
        renderer.close()
    colour, tip, pos, depth, number, kind, where = (np.stack(column) for column in zip(*rows, strict=True))
    return Frames(pixels, Facts(colour, tip, pos, depth), number, kind, where)


@dataclass(frozen=True)
class _Projection:
    """Pinhole of a camera that is fixed to the world."""

    position: np.ndarray
    rotation: np.ndarray  # columns: right, up, backwards
    focal: float  # in frame heights

    @classmethod
    def of(cls, model: mujoco.MjModel, camera: str) -> _Projection:
        i = model.camera(camera).id
        focal = 0.5 / np.tan(np.deg2rad(model.cam_fovy[i]) / 2)
        return cls(model.cam_pos[i].copy(), matrix_of(model.cam_quat[i]), float(focal))

    def project(self, points: np.ndarray) -> np.ndarray:
        """(P, 3) m -> (P, 2) right and down, 0..1 inside the frame."""
        x, y, back = ((points - self.position) @ self.rotation).T
        return np.stack([0.5 - self.focal * x / back, 0.5 + self.focal * y / back], axis=-1)


def _episode(rng: np.random.Generator, layout: Layout, kind: str, count: int) -> list[tuple[np.ndarray, tuple]]:
    """(qpos, (tip, positions of the five slots, depths)) per frame."""
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


# --- cache -----------------------------------------------------------------------------------------------------------

_FIELDS = ("colour", "tip", "pos", "depth")
_ROWS = ("episode", "kind", "where")


def cached_frames(folder: Path, **arguments: object) -> Frames:
    """:func:`render_frames`, kept in ``folder`` under a hash of the arguments, palette and version."""
    scene = hashlib.sha256(XML.read_bytes()).hexdigest()
    key = json.dumps([VERSION, scene, arguments, PALETTE, VALUE, MIX, COLOURS, AUTHORED, GHOST], sort_keys=True)
    path = folder / f"frames-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
    if not path.exists():
        frames = render_frames(**arguments)  # type: ignore[arg-type]
        save_frames(frames, path)
        return frames
    return load_frames(path)


def save_frames(frames: Frames, path: Path) -> None:
    """Write one npz, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp.npz")
    arrays = {n: getattr(frames.facts, n) for n in _FIELDS}
    np.savez(temporary, pixels=frames.pixels, **{n: getattr(frames, n) for n in _ROWS}, **arrays)
    os.replace(temporary, path)


def load_frames(path: Path) -> Frames:
    """Read what :func:`save_frames` wrote; pickled content is refused by numpy."""
    with np.load(path, allow_pickle=False) as data:
        facts = Facts(**{n: data[n] for n in _FIELDS})
        return Frames(data["pixels"], facts, **{n: data[n] for n in _ROWS})
