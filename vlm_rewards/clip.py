"""CLIP models through open_clip, from a local folder or a hub name. The only file that imports open_clip.

Pitfalls this file closes: open_clip returns models in train mode, only warns when weights are missing, hands out a
tokenizer that does not belong to a custom vocabulary, and its own preprocessing takes PIL images one by one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F

from sims.errors import UserError
from vlm_rewards import small_clip  # noqa: F401  registers the trunk before open_clip looks for it
from vlm_rewards.config import SHIPPED
from vlm_rewards.small_clip import WordTokenizer, bind

WEIGHTS = Path(__file__).parent / "weights" / "small_clip"
LOCAL = "local-dir:"


@dataclass
class Clip:
    """A loaded model with everything needed to embed frames and sentences.

    Attributes:
        model: the open_clip model, in eval mode.
        tokenize: sentences -> (N, L) ids of *this* model.
        size: (height, width) of its input.
        mean, std: (3,) of its normalisation.
        folder: where it was loaded from, None for a hub model.
        card: content of ``card.json`` beside the weights, ``{}`` if there is none.
    """

    model: nn.Module
    tokenize: Callable[[Sequence[str]], Tensor]
    size: tuple[int, int]
    mean: Tensor
    std: Tensor
    resize_mode: str
    interpolation: str
    folder: Path | None
    card: dict[str, Any]

    @torch.no_grad()
    def embed_text(self, sentences: Sequence[str]) -> Tensor:
        """(N, D) unit rows."""
        encode: Any = self.model.encode_text
        device = next(self.model.parameters()).device
        text = encode(self.tokenize(list(sentences)).to(device)).float()
        if isinstance(self.tokenize, WordTokenizer):
            text = bind(text, self.tokenize.slots(sentences).to(device))
        return F.normalize(text, dim=-1)

    @torch.no_grad()
    def embed_frames(self, frames: Tensor) -> Tensor:
        """(N, H, W, 3) uint8 -> (N, D) unit rows."""
        encode: Any = self.model.encode_image
        device = next(self.model.parameters()).device
        images = self.preprocess(frames.to(device)).contiguous(memory_format=torch.channels_last)
        return F.normalize(encode(images).float(), dim=-1)

    def preprocess(self, frames: Tensor) -> Tensor:
        """(N, H, W, 3) uint8 -> (N, 3, h, w) float, the same numbers as open_clip's PIL transform gives.

        Raises:
            UserError: another dtype or layout, which would be silently mis-scaled.
        """
        if frames.dtype != torch.uint8 or frames.ndim != 4 or frames.shape[-1] != 3:
            raise UserError(f"frames must be (N, H, W, 3) uint8 RGB, found {tuple(frames.shape)} {frames.dtype}.")
        images = frames.permute(0, 3, 1, 2)  # (N, 3, H, W)
        if tuple(images.shape[-2:]) != self.size:
            images = resize(images, self.size, self.resize_mode, self.interpolation)
        mean, std = (x.to(images.device).view(3, 1, 1) for x in (self.mean, self.std))
        return (images.float() / 255.0 - mean) / std

    @property
    def temperature(self) -> float:
        """Softmax temperature the model was trained with: 1 / exp(logit_scale)."""
        scale: Any = self.model.logit_scale
        return float(1.0 / scale.detach().exp())


def resize(images: Tensor, size: tuple[int, int], mode: str, interpolation: str) -> Tensor:
    """(N, 3, H, W) uint8 -> (N, 3, h, w) uint8: squash, or shortest side and centre crop. Antialiased like PIL.

    Rounding back to uint8 is part of the PIL path, so it is part of this one.
    """
    target = size
    if mode != "squash":
        if mode != "shortest":
            raise UserError(f"preprocessing resize_mode='{mode}' is not supported; known: shortest, squash.")
        scale = max(size[0] / images.shape[2], size[1] / images.shape[3])
        target = (max(size[0], int(images.shape[2] * scale)), max(size[1], int(images.shape[3] * scale)))
    out = F.interpolate(images, size=target, mode=interpolation, antialias=True, align_corners=False)
    top, left = (round((t - s) / 2.0) for t, s in zip(target, size, strict=True))
    return out[..., top : top + size[0], left : left + size[1]]


def load_clip(name: str, pretrained: str = "", device: str = "cpu") -> Clip:
    """Load a model for scoring.

    Args:
        name: ``"shipped"``, ``"local-dir:<folder>"``, ``"hf-hub:<owner>/<name>"`` or an open_clip model name.
        pretrained: weights tag or file; only with an open_clip model name.

    Raises:
        UserError: no such folder or model, damaged or missing weights (open_clip itself only warns).
    """
    name = f"{LOCAL}{WEIGHTS}" if name == SHIPPED else name
    folder = Path(name[len(LOCAL) :]).expanduser() if name.startswith(LOCAL) else None
    if folder is None and ":" not in name and not pretrained:
        raise UserError(f"model '{name}' has no weights: give reward.pretrained (a tag or a file).")
    if folder is not None:
        _check_folder(folder)
        name = f"{LOCAL}{folder}"
    try:
        model: Any = open_clip.create_model(name, pretrained or None, device=device, require_pretrained=True)
    except (RuntimeError, ValueError, OSError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"CLIP model '{name}' does not load: {_first_line(error)}") from error
    own = folder is not None and (folder / "vocab.json").exists()
    tokenize = WordTokenizer.load(folder) if own and folder else open_clip.get_tokenizer(name)
    # channels last is the faster layout for convolutions on a CPU, and changes nothing else
    return wrap(model.eval().to(memory_format=torch.channels_last), tokenize, folder)


def wrap(model: Any, tokenize: Any, folder: Path | None = None) -> Clip:
    """Put a model (in the mode the caller wants) together with its tokenizer and preprocessing."""
    settings = model.visual.preprocess_cfg
    size = model.visual.image_size
    size = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    mean, std = (torch.tensor(settings[k]) for k in ("mean", "std"))
    card = _read_card(folder)
    return Clip(model, tokenize, size, mean, std, settings["resize_mode"], settings["interpolation"], folder, card)


def build_model(config: dict[str, Any]) -> nn.Module:
    """A fresh, randomly initialised open_clip model (train mode) from the content of ``open_clip_config.json``."""
    model: Any = open_clip.CLIP(**config["model_cfg"])
    model.visual.preprocess_cfg = dict(config["preprocess_cfg"])
    return model


def _check_folder(folder: Path) -> None:
    if not (folder / "open_clip_config.json").is_file():
        raise UserError(f"no CLIP model in {folder}: open_clip_config.json is missing. `distillery fit` makes one.")
    if not any(folder.glob("open_clip_*model*.safetensors")) and not any(folder.glob("open_clip_*.bin")):
        raise UserError(f"no weights in {folder}: expected open_clip_model.safetensors. `distillery fit` makes them.")


def _read_card(folder: Path | None) -> dict[str, Any]:
    path = folder / "card.json" if folder else None
    if path is None or not path.exists():
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}). Restore the folder or run `distillery fit`.") from error


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
