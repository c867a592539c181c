"""Videos of episodes: H.264 in MP4 that any browser plays, and a still picture to show before it plays."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sims.errors import UserError, unknown_choice

if TYPE_CHECKING:
    from torch import Tensor

# encoder -> options; in order of preference, all of them play in Chromium and Firefox out of an MP4 container
CODECS: dict[str, dict[str, str]] = {
    "libx264": {"crf": "24", "preset": "veryfast", "tune": "animation"},
    "libopenh264": {},
    "libvpx-vp9": {"crf": "34", "b": "0", "deadline": "realtime", "cpu-used": "6"},
}


def write_mp4(frames: np.ndarray, path: Path, fps: float) -> Path:
    """Encode frames as an MP4 file, atomically.

    Args:
        frames: (T, H, W, 3) uint8 RGB with T >= 1; an odd last row or column is dropped (4:2:0 needs even sides).
        path: file to write.
        fps: frames per second.

    Raises:
        UserError: frames of another shape or type, or no usable encoder.
    """
    import av

    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not len(frames):
        raise UserError(f"video {path}: expected frames (T, H, W, 3) uint8, found {frames.shape} {frames.dtype}.")
    frames = frames[:, : frames.shape[1] // 2 * 2, : frames.shape[2] // 2 * 2]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    codec = encoder()
    rate = Fraction(fps).limit_denominator(1000)
    with av.open(str(temporary), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream: Any = container.add_stream(codec, rate=rate, options=CODECS[codec])
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
        stream.codec_context.thread_count = 1
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode(None))
    os.replace(temporary, path)
    return path


def encoder() -> str:
    """Name of the first encoder in :data:`CODECS` that this installation of PyAV has."""
    from av.codec import codecs_available

    for name in CODECS:
        if name in codecs_available:
            return name
    raise UserError(
        f"no video encoder: PyAV has none of {', '.join(CODECS)}. Reinstall it: pip install --force-reinstall av"
    )


def poster(path: Path, at: float = 0.6) -> bytes:
    """A JPEG of the frame at the fraction ``at`` of a video.

    Raises:
        UserError: the file is not a video.
    """
    import av

    try:
        with av.open(str(path)) as container:
            frames = list(container.decode(video=0))
    except (av.FFmpegError, IndexError) as error:
        raise UserError(f"damaged video {path}: {error}. Delete it, or repeat the stage that recorded it.") from error
    if not frames:
        raise UserError(f"damaged video {path}: no frames. Delete it, or repeat the stage that recorded it.")
    return jpeg(frames[min(int(at * len(frames)), len(frames) - 1)].to_ndarray(format="rgb24"))


def jpeg(image: np.ndarray) -> bytes:
    """(H, W, 3) uint8 as a JPEG file."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mjpeg") as container:
        stream: Any = container.add_stream("mjpeg", rate=1, options={"qmin": "4", "qmax": "4"})
        stream.height, stream.width, stream.pix_fmt = image.shape[0], image.shape[1], "yuvj420p"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")))
        container.mux(stream.encode(None))
    return buffer.getvalue()


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
    camera: str = "front",
    seed: int = 0,
    hold_frames: int = 10,
) -> Recording:
    """Film the first world of a tabletop environment for one episode.

    Args:
        env: ``sims.registry.make("tabletop", num_envs=1, ...)``; frames have the size that it renders.
        act: observation -> (B, A) action.
        variant: what to do, e.g. ``"press_green"``; as the environment draws it where None.
        camera: ``"front"`` or ``"side"``.
        hold_frames: how many times the last frame is repeated, so that a looping video rests on the outcome.

    Raises:
        UserError: unknown variant.
    """
    if variant is not None:
        names = list(env.variants)
        if variant not in names:
            raise unknown_choice("variant", variant, names, "record_episode")
        env.set_variants(np.full(env.num_envs, names.index(variant)))
    obs = env.reset(seed)
    sentence = env.spec.instructions[int(obs["instruction"][0])] if "instruction" in obs else ""
    frames, success = [], False
    for _ in range(env.spec.episode_steps):
        frames.append(env.render([0], camera)[0])
        step = env.step(act(obs))
        obs, success = step.obs, bool(step.metrics["success"][0] > 0.5)
        if bool(step.terminated[0]) or bool(step.truncated[0]):
            break
    frames += [frames[-1]] * hold_frames
    stacked = np.stack([np.asarray(frame) for frame in frames])  # (T, H, W, 3)
    return Recording(stacked, env.spec.control_hz, sentence, success)


def save_recording(recording: Recording, path: Path, title: str, **details: Any) -> Path:
    """Write ``path`` (.mp4) and the .json beside it that carries its caption, as the report reads them."""
    write_mp4(recording.frames, path, recording.fps)
    caption = {"title": title, "sentence": recording.sentence, "success": recording.success, **details}
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(caption, indent=2))
    os.replace(temporary, path.with_suffix(".json"))
    return path
