"""Video files: H.264 in MP4 that any browser plays, a caption beside it, a still picture to show before it plays."""

from __future__ import annotations

import io
import json
import os
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sims.errors import UserError

if TYPE_CHECKING:
    from distill.report_film import Recording

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


def save_recording(recording: Recording, path: Path, title: str, **details: Any) -> Path:
    """Write ``path`` (.mp4) and the .json beside it that carries its caption, as the report reads them."""
    write_mp4(recording.frames, path, recording.fps)
    caption = {"title": title, "sentence": recording.sentence, "success": recording.success, **details}
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(caption, indent=2))
    os.replace(temporary, path.with_suffix(".json"))
    return path
