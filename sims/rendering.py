"""Offscreen pictures of the tabletop at hundreds of frames a second on a CPU, and random looks.

Draws through EGL on Linux unless ``MUJOCO_GL`` names another library.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import importlib
import os
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mujoco
import numpy as np

from sims.errors import UserError, unknown_choice
from sims.worlds.predicates import PRESS_DEPTH
from sims.worlds.tabletop import BUTTONS, CAMERAS

SLOW_FLAGS = (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION, mujoco.mjtRndFlag.mjRND_HAZE)


def _load_before_gl() -> None:
    """Import torchvision, where it is installed, before the first graphics context.

    Imported after Mesa's software driver it crashes the process (seen with torchvision 0.29.1 and Mesa 22.3); the other
    order works. open_clip imports it, so a reward model built after a picture was drawn would be the victim.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("torchvision")


class SceneRenderer:
    """Draws states of one model. Holds its own copy of the model, so looks never touch the physics.

    Args:
        model: the tabletop, from ``tabletop.load_model()``.
        cameras: names of cameras of the model that will be asked for.
        size: side of the square frame in pixels, or (height, width).

    Raises:
        UserError: an unknown camera, or no way to draw offscreen on this machine.
    """

    def __init__(self, model: mujoco.MjModel, cameras: Sequence[str] = CAMERAS, size: int | tuple[int, int] = 64):
        known = [model.camera(i).name for i in range(model.ncam)]
        for name in cameras:
            if name not in known:
                raise unknown_choice("camera", name, known)
        self.model = copy.copy(model)
        self.cameras = tuple(cameras)
        self.height, self.width = (size, size) if isinstance(size, int) else size
        self._default = _Look.of(model)
        self._data = mujoco.MjData(self.model)
        self._caps = [_Cap.of(self.model, name) for name in BUTTONS]
        self._camera_ids = {name: self.model.camera(name).id for name in self.cameras}
        self._open()
        _OPEN.add(self)

    def _open(self) -> None:
        # the offscreen buffer and the shadow map are fixed when the context is made
        vis = self.model.vis
        vis.quality.shadowsize, vis.quality.offsamples = 0, 0
        vis.global_.offwidth, vis.global_.offheight = self.width, self.height
        _load_before_gl()
        try:
            self._gl = _gl_context(self.width, self.height)
            self._gl.make_current()
            self._context = mujoco.MjrContext(self.model, mujoco.mjtFontScale.mjFONTSCALE_100)
        except Exception as error:
            raise UserError(
                f"cannot draw offscreen with MUJOCO_GL={os.environ.get('MUJOCO_GL', 'egl')}: {error}. "
                "Install libegl1 (or libosmesa6 and set MUJOCO_GL=osmesa)."
            ) from error
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene = mujoco.MjvScene(self.model, maxgeom=200)
        for flag in SLOW_FLAGS:
            self._scene.flags[flag] = 0
        self._option, self._view = mujoco.MjvOption(), mujoco.MjvCamera()
        self._view.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._rect = mujoco.MjrRect(0, 0, self.width, self.height)

    def render(self, data: mujoco.MjData, camera: str) -> np.ndarray:
        """(H, W, 3) uint8 of ``data``, whose kinematics must be current (after ``mj_forward`` or ``mj_step``)."""
        if camera not in self.cameras:
            raise unknown_choice("camera", camera, self.cameras)
        for cap in self._caps:
            cap.show(self.model, data.qpos)
        self._view.fixedcamid = self._camera_ids[camera]
        self._gl.make_current()
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self.model, data, self._option, None, self._view, everything, self._scene)
        mujoco.mjr_render(self._rect, self._scene, self._context)
        frame = np.empty((self.height, self.width, 3), dtype=np.uint8)
        mujoco.mjr_readPixels(frame, None, self._rect, self._context)
        return frame[::-1].copy()  # OpenGL counts rows from the bottom

    def render_state(self, qpos: np.ndarray, mocap_pos: np.ndarray, cameras: Sequence[str] = ()) -> list[np.ndarray]:
        """One (H, W, 3) uint8 frame per camera (default: all) of a (22,) ``qpos`` and (9,) or (3, 3) ``mocap_pos``."""
        data = self._data
        data.qpos[:] = qpos
        data.mocap_pos[:] = np.reshape(mocap_pos, (-1, 3))
        mujoco.mj_kinematics(self.model, data)
        mujoco.mj_comPos(self.model, data)
        mujoco.mj_camlight(self.model, data)
        return [self.render(data, camera) for camera in cameras or self.cameras]

    def set_look(self, look: Look | None) -> None:
        """Recolour, relight and move the cameras; None restores the authored look."""
        self._default.apply(self.model)
        if look is not None:
            look.apply(self.model)

    def close(self) -> None:
        """Free the graphics context; safe to call twice. Happens by itself at the latest when Python exits."""
        if self in _OPEN:
            _OPEN.discard(self)
            self._gl.make_current()
            self._context.free()
            self._gl.free()


_OPEN: weakref.WeakSet[SceneRenderer] = weakref.WeakSet()


def _close_all() -> None:
    for renderer in list(_OPEN):
        renderer.close()


def _gl_context(width: int, height: int) -> Any:
    """The user's choice of ``MUJOCO_GL``, else EGL on Linux, whether or not MuJoCo was imported before."""
    if sys.platform == "linux" and os.environ.get("MUJOCO_GL", "egl").lower() == "egl":
        from mujoco.egl import GLContext

        context = GLContext(width, height)
        # must run before the library's own exit function, so it is registered after that
        atexit.unregister(_close_all)
        atexit.register(_close_all)
        return context
    from mujoco import gl_context

    if gl_context.GLContext is None:
        raise RuntimeError("MuJoCo found no OpenGL library")
    return gl_context.GLContext(width, height)


@dataclass
class _Cap:
    """Lights a button, cap and housing, while it is pressed; light is for the eye only, physics does not know it.

    The housing lights up too because the finger that presses hides the cap.
    """

    geoms: tuple[int, int]  # cap, housing
    dark: tuple[int, int]  # their materials
    lit: int
    qpos: int

    @classmethod
    def of(cls, model: mujoco.MjModel, button: str) -> _Cap:
        geoms = (model.geom(button.replace("_button", "_cap")).id, model.geom(button.replace("_button", "_base")).id)
        dark = (model.material(button).id, model.material("button_base").id)
        return cls(geoms, dark, model.material(f"{button}_lit").id, int(model.jnt_qposadr[model.joint(button).id]))

    def show(self, model: mujoco.MjModel, qpos: np.ndarray) -> None:
        pressed = -qpos[self.qpos] > PRESS_DEPTH
        for geom, dark in zip(self.geoms, self.dark):
            model.geom_matid[geom] = self.lit if pressed else dark


@dataclass
class Look:
    """A random look: colour per material, light and small shifts of the cameras.

    Attributes:
        colours: material name -> (3,) rgb in 0..1.
        light: (3,) diffuse of the key light; ``light_dir``: (3,) its direction; ``ambient``, ``head``: scalars 0..1.
        camera_shift: camera name -> (3,) m; ``camera_turn``: camera name -> (3,) rotation vector, rad.
    """

    colours: dict[str, np.ndarray] = field(default_factory=dict)
    light: np.ndarray | None = None
    light_dir: np.ndarray | None = None
    ambient: float | None = None
    head: float | None = None
    camera_shift: dict[str, np.ndarray] = field(default_factory=dict)
    camera_turn: dict[str, np.ndarray] = field(default_factory=dict)

    def apply(self, model: mujoco.MjModel) -> None:
        for name, rgb in self.colours.items():
            model.mat_rgba[model.material(name).id, :3] = rgb
        if self.light is not None:
            model.light_diffuse[0] = self.light
        if self.light_dir is not None:
            model.light_dir[0] = self.light_dir
        if self.ambient is not None:
            model.vis.headlight.ambient[:] = self.ambient
        if self.head is not None:
            model.vis.headlight.diffuse[:] = self.head
        for name, shift in self.camera_shift.items():
            model.cam_pos[model.camera(name).id] += shift
        for name, turn in self.camera_turn.items():
            _turn_camera(model.cam_quat[model.camera(name).id], turn)


def _turn_camera(quaternion: np.ndarray, turn: np.ndarray) -> None:
    angle = float(np.linalg.norm(turn))
    extra, result = np.zeros(4), np.zeros(4)
    mujoco.mju_axisAngle2Quat(extra, turn / max(angle, 1e-9), angle)
    mujoco.mju_mulQuat(result, quaternion, extra)
    quaternion[:] = result


@dataclass
class _Look:
    """The authored look, to go back to."""

    rgba: np.ndarray
    light: np.ndarray
    direction: np.ndarray
    cam_pos: np.ndarray
    cam_quat: np.ndarray
    ambient: np.ndarray
    head: np.ndarray

    @classmethod
    def of(cls, model: mujoco.MjModel) -> _Look:
        head = model.vis.headlight
        arrays = (model.mat_rgba, model.light_diffuse, model.light_dir, model.cam_pos, model.cam_quat)
        return cls(*(a.copy() for a in arrays), ambient=head.ambient.copy(), head=head.diffuse.copy())

    def apply(self, model: mujoco.MjModel) -> None:
        model.mat_rgba[:], model.light_diffuse[:], model.light_dir[:] = self.rgba, self.light, self.direction
        model.cam_pos[:], model.cam_quat[:] = self.cam_pos, self.cam_quat
        model.vis.headlight.ambient[:], model.vis.headlight.diffuse[:] = self.ambient, self.head


# hue (turns), saturation and value ranges in which a thing keeps the name of its colour
HUES: dict[str, tuple[tuple[float, float], tuple[float, float], tuple[float, float]]] = {
    "red_cube": ((-0.03, 0.03), (0.75, 1.0), (0.6, 1.0)),
    "blue_cube": ((0.58, 0.68), (0.7, 1.0), (0.6, 1.0)),
    "marker": ((0.76, 0.86), (0.6, 1.0), (0.5, 0.9)),
    "green_button": ((0.29, 0.40), (0.7, 1.0), (0.20, 0.45)),
    "yellow_button": ((0.13, 0.17), (0.8, 1.0), (0.35, 0.55)),
    "green_button_lit": ((0.29, 0.40), (0.6, 0.9), (0.9, 1.0)),
    "yellow_button_lit": ((0.13, 0.17), (0.6, 0.9), (0.9, 1.0)),
}
GREYS = {"table": (0.35, 0.8), "arm": (0.35, 0.95), "jaw": (0.3, 0.9), "motor": (0.05, 0.25), "floor": (0.15, 0.5)}


def _rgb(hue: float, saturation: float, value: float) -> np.ndarray:
    k = (np.array([5.0, 3.0, 1.0]) + 6.0 * hue) % 6.0
    return value - value * saturation * np.clip(np.minimum(k, 4.0 - k), 0.0, 1.0)


def sample_look(rng: np.random.Generator, strength: float = 1.0) -> Look:
    """Draw colours, light and camera shifts (at strength 1 up to 3 cm and 3 degrees per axis)."""
    colours = {name: _rgb(*(rng.uniform(*r) for r in ranges)) for name, ranges in HUES.items()}
    for name, (low, high) in GREYS.items():
        tint = 1.0 + 0.12 * strength * rng.uniform(-1.0, 1.0, 3)
        colours[name] = np.clip(rng.uniform(low, high) * tint, 0.0, 1.0)
    turn = np.deg2rad(3.0) * strength
    return Look(
        colours=colours,
        light=np.full(3, rng.uniform(0.25, 0.55)),
        light_dir=np.array([rng.uniform(-0.6, 0.6), rng.uniform(-0.6, 0.6), -1.0]),
        ambient=float(rng.uniform(0.18, 0.32)),
        head=float(rng.uniform(0.15, 0.35)),
        camera_shift={c: rng.uniform(-0.03, 0.03, 3) * strength for c in CAMERAS},
        camera_turn={c: rng.uniform(-turn, turn, 3) for c in CAMERAS},
    )
