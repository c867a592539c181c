"""Films of the tabletop: a three-quarter view with shadows, drawn at twice the size and averaged down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np

from sims.rendering import SceneRenderer
from sims.worlds.tabletop import load_model

if TYPE_CHECKING:
    from torch import Tensor

SIZE = (240, 320)  # px, height and width of a film
OVERSAMPLING = 2  # drawn pixels per film pixel and side; there is no hardware antialiasing to rely on
SHADOW_PIXELS = 1024  # side of the shadow map; twice as much takes twice as long and looks the same
EYE, TARGET, FIELD_OF_VIEW = (0.76, -0.52, 0.50), (0.20, 0.0, 0.045), 33.0  # m, m, degrees
LAMP, LAMP_DIRECTION = (0.2, -0.25, 0.9), (0.1, 0.3, -1.0)
FLOOR, TABLE = (0.86, 0.87, 0.88, 1.0), (0.80, 0.77, 0.72, 1.0)


class FilmRenderer(SceneRenderer):
    """Slower and prettier than what policies see: about 20 ms a frame on one core without a GPU."""

    def __init__(self, size: tuple[int, int] = SIZE) -> None:
        height, width = size
        super().__init__(_film_set(), ("side",), (OVERSAMPLING * height, OVERSAMPLING * width))

    def _open(self) -> None:
        super()._open()
        # the shadow map is made with the context, and the fast renderer makes one without
        self._context.free()
        self.model.vis.quality.shadowsize = SHADOW_PIXELS
        self._context = mujoco.MjrContext(self.model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 1

    def film(self, qpos: np.ndarray, mocap_pos: np.ndarray) -> np.ndarray:
        """Frames of a trajectory.

        Args:
            qpos: (T, 22) positions of the tabletop.
            mocap_pos: (T, 9) or (9,) positions of marker, green and yellow button (m).

        Returns:
            (T, H, W, 3) uint8.
        """
        places = np.broadcast_to(mocap_pos, (len(qpos), 9))
        return np.stack([self._frame(state, place) for state, place in zip(qpos, places)])

    def _frame(self, qpos: np.ndarray, mocap_pos: np.ndarray) -> np.ndarray:
        large = self.render_state(qpos, mocap_pos)[0].astype(np.float32)
        n, (height, width, _) = OVERSAMPLING, large.shape
        blocks = large.reshape(height // n, n, width // n, n, 3)  # (H, n, W, n, 3)
        return blocks.mean(axis=(1, 3)).round().astype(np.uint8)


def _film_set() -> mujoco.MjModel:
    """The tabletop in brighter light, its side camera moved to the three-quarter view."""
    model = load_model()
    camera = model.camera("side").id
    model.cam_pos[camera], model.cam_fovy[camera] = EYE, FIELD_OF_VIEW
    model.cam_quat[camera] = _look_at(np.array(EYE), np.array(TARGET))
    model.vis.headlight.ambient[:], model.vis.headlight.diffuse[:] = 0.38, 0.32
    model.light_pos[0], model.light_dir[0] = LAMP, LAMP_DIRECTION
    model.light_diffuse[0], model.light_castshadow[0] = 0.5, True
    model.mat_rgba[model.material("floor").id], model.mat_rgba[model.material("table").id] = FLOOR, TABLE
    return model


def _look_at(eye: np.ndarray, target: np.ndarray) -> np.ndarray:
    """(4,) quaternion of a camera at ``eye`` that sees ``target`` in its middle, upright; it looks along its -z."""
    z = (eye - target) / np.linalg.norm(eye - target)
    x = np.cross([0.0, 0.0, 1.0], z)
    x /= np.linalg.norm(x)
    quaternion = np.zeros(4)
    mujoco.mju_mat2Quat(quaternion, np.stack([x, np.cross(z, x), z], axis=1).ravel())
    return quaternion


@dataclass(frozen=True)
class Recording:
    """One filmed episode: ``frames`` (T, H, W, 3) uint8 at ``fps``, its sentence, and success at the last step."""

    frames: np.ndarray
    fps: float
    sentence: str
    success: bool


def record_episode(
    env: Any,
    act: Callable[[Mapping[str, Tensor]], Tensor],
    variant: str | None = None,
    seed: int = 0,
    renderer: FilmRenderer | None = None,
    hold_s: float = 0.6,
) -> Recording:
    """Film world 0 of a tabletop environment for one episode.

    Args:
        env: ``sims.registry.make("tabletop", num_envs=1, ...)``; it is reset with ``seed``.
        act: observation groups -> (B, A) action.
        variant: what to do, e.g. ``"press_green"``; as the environment draws it where None.
        renderer: to share between films; opened and closed here where None.
        hold_s: how long the last frame stays, so that a looping film rests on the outcome.

    Raises:
        UserError: unknown variant, or no way to draw on this machine.
    """
    obs = env.reset(seed)
    if variant is not None:
        obs = env.set_variants([variant] * env.num_envs)
    sentence, mocap = env.spec.instructions[int(obs["instruction"][0])], env.layouts[0].mocap
    states, success = [env.layouts[0].qpos], False
    for _ in range(env.spec.episode_steps):
        step = env.step(act(obs))
        obs, success = step.obs, bool(step.metrics["success"][0] > 0.5)
        if bool(step.truncated[0]) or bool(step.terminated[0]):
            break  # the world has been reset: its last state is gone
        states.append(env.state_dict()["engine"]["state"][0, 1 : 1 + len(states[0])])
    frames = film(np.stack(states), mocap, env.spec.control_hz, renderer, hold_s)
    return Recording(frames, env.spec.control_hz, sentence, success)


def film(
    qpos: np.ndarray, mocap_pos: np.ndarray, fps: float, renderer: FilmRenderer | None = None, hold_s: float = 0.6
) -> np.ndarray:
    """(T, H, W, 3) uint8 frames of a trajectory as in :meth:`FilmRenderer.film`, resting ``hold_s`` on the last."""
    own = renderer or FilmRenderer()
    try:
        frames = own.film(np.asarray(qpos, dtype=np.float64), np.asarray(mocap_pos, dtype=np.float64))
    finally:
        if renderer is None:
            own.close()
    return np.concatenate([frames, np.repeat(frames[-1:], round(hold_s * fps), axis=0)])
