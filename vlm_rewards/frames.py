"""Pictures for ``fit``: states with random looks and colours, and facts read from the state. numpy and MuJoCo."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np

from sims.rendering import SceneRenderer, sample_look
from sims.worlds.kinematics import matrix_of
from sims.worlds.tabletop import CAMERAS, SLOTS, XML, load_model, sample_layout
from vlm_rewards.captions import COLOURS, SLOT_KIND, UNSEEN, Facts
from vlm_rewards.states import GHOST, MIX, draw_states

VERSION = 6  # of the frames; part of the cache key
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
            for qpos, facts in draw_states(rng, layout, kinds[kind], number):
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
