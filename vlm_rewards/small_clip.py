"""The small CLIP: a convolutional trunk over two tiled 64x64 views and a word-level vocabulary.

Importing this module registers the trunk with timm, so that open_clip itself builds and loads the model from a
``local-dir:`` folder. Its form is made for composition: places are described relative to the fingertip, with weights
shared over places and colours, so that a colour met on cubes carries over to a button. A dense layer over all places
learned the training layouts by heart instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.models import register_model
from torch import Tensor, nn

from sims.errors import UserError, unknown_choice

TRUNK = "simclip_cnn3_64x128"
VIEW = 64  # side of one view, pixels
VIEWS = 2  # tiled left to right
BLOCK = 32  # numbers that describe the things of one colour
CONTEXT = 20  # tokens of a sentence with its end token
VOCABULARY = 160  # ids; the end token is the last one because open_clip pools at the highest id
KEYPOINTS = 2  # taught: fingertip, marker
SLOTS = 10  # colour words
EMBED = SLOTS * BLOCK
CLASSES, NOTHING = 5, 4  # marker, cube, dark button, lit button, nothing
GRID = 16  # positions per side where the relational head looks
REACHES = (0.06, 0.15, 0.35)  # widths of the windows around a keypoint, in units of half a view


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, batch norm first. (N, C, H, W) -> (N, C, H, W)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(torch.relu(self.norm1(x)))
        return x + self.conv2(torch.relu(self.norm2(hidden)))


class RelationalHead(nn.Module):
    """What stands where, seen from soft-argmax keypoints: per place a function of features and offsets to them.

    Soft-argmax keypoints: Levine et al. 2016 (arXiv 1504.00702).
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.keypoints = nn.Conv2d(channels, KEYPOINTS, 1)
        self.local = nn.Conv2d(channels, width, 1)
        self.relative = nn.Conv2d(KEYPOINTS * (2 + len(REACHES)), width, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.mix = nn.Conv2d(width, width, 1, bias=False)
        line = (torch.arange(GRID) + 0.5) * (2.0 / GRID) - 1.0
        rows, columns = torch.meshgrid(line, line, indexing="ij")
        self.register_buffer("grid", torch.stack([columns, rows]).flatten(1), persistent=False)  # (2, G*G)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(N, C, G, G) -> (N, width, G*G), and the (N, K, G*G) logits of where the keypoints are."""
        grid = self.get_buffer("grid")
        logits = self.keypoints(x).flatten(2)
        centre = logits.softmax(-1) @ grid.T  # (N, K, 2)
        offset = grid - centre[..., None]  # (N, K, 2, G*G)
        squared = offset.square().sum(2)  # (N, K, G*G)
        windows = [torch.exp(-squared / (2 * reach**2)) for reach in REACHES]
        relative = torch.cat([offset.flatten(1, 2), *windows], dim=1).unflatten(2, (GRID, GRID))
        hidden = torch.relu(self.norm1(self.local(x) + self.relative(relative)))
        return torch.relu(self.norm2(self.mix(hidden))).flatten(2), logits


class PixelColours(nn.Module):
    """Colour word per place, from single pixels alone: without a neighbourhood it cannot know what wears the colour.

    Read from the deep features instead, yellow buttons were called orange or lime, because only those were buttons.
    """

    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.pixel = nn.Sequential(nn.Conv2d(5, hidden, 1), nn.ReLU(), nn.Conv2d(hidden, SLOTS + 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(M, 3, 64, 64) in -1..1 -> (M, SLOTS, G*G) logits, the mean over a place weighted by a learned salience."""
        rgb = 0.5 * x + 0.5
        top, bottom = rgb.amax(1, keepdim=True), rgb.amin(1, keepdim=True)
        inputs = torch.cat([rgb / (top + 0.05), top, (top - bottom) / (top + 0.05)], dim=1)
        logits, salience = self.pixel(inputs).split([SLOTS, 1], dim=1)
        weight = salience.clamp(-6, 6).exp()
        total, mass = (nn.functional.avg_pool2d(v, 6, stride=4, padding=1) for v in (weight * logits, weight))
        return (total / mass).flatten(2)


class Hints(NamedTuple):
    """Logits that ``fit`` may teach: keypoints (N, V, K, G*G), colours (N, V, 10, G*G), kinds (N, V, 5, G*G)."""

    keypoints: Tensor
    colours: Tensor
    kinds: Tensor


class Trunk(nn.Module):
    """Frames (N, 3, 64, 128), two views side by side -> (N, embed), not normalised. The views share convolutions.

    One slot per colour word gathers what is known of the things of that colour in both views; the same small network
    describes every slot, and the image's embedding is the row of these descriptions. What was learned on green buttons
    therefore holds for yellow ones. Sentences are embedded to match, see :func:`bind`.
    """

    def __init__(self, embed: int = EMBED, wide: int = 32, narrow: int = 64, width: int = 64) -> None:
        super().__init__()
        if embed % SLOTS:
            raise ValueError(f"embed_dim={embed} is not a multiple of the {SLOTS} colour slots")
        block = embed // SLOTS
        self.stem = nn.Conv2d(3, wide, 6, stride=4, padding=1)
        self.view = nn.Parameter(0.02 * torch.randn(VIEWS, wide, GRID, GRID))
        self.fine = nn.Sequential(ResidualBlock(wide), ResidualBlock(wide))
        self.down = nn.Conv2d(wide, narrow, 2, stride=2)
        self.coarse = nn.Sequential(ResidualBlock(narrow), ResidualBlock(narrow))
        channels = wide + narrow
        self.heads = nn.ModuleList(RelationalHead(channels, width) for _ in range(VIEWS))
        self.colour, self.kind = PixelColours(), nn.Conv2d(channels, CLASSES, 1)
        self.direct = nn.Linear(VIEWS * width, block)
        self.describe = nn.Sequential(nn.Linear(VIEWS * width, 512), nn.ReLU(), nn.Linear(512, block, bias=False))

    def features(self, views: Tensor) -> Tensor:
        """(N*V, 3, 64, 64) -> (N, V, C, G, G): what is where, per view."""
        n = len(views) // VIEWS
        fine = self.fine(self.stem(views) + self.view.repeat(n, 1, 1, 1))  # (N*V, wide, 16, 16)
        coarse = self.coarse(self.down(fine))  # (N*V, narrow, 8, 8)
        up = nn.functional.interpolate(coarse, scale_factor=2.0, mode="nearest")
        return torch.cat([fine, up], dim=1).unflatten(0, (n, VIEWS))

    def colours(self, x: Tensor) -> Tensor:
        """(N, 3, 64, 128) -> (N, V, S, G*G) logits."""
        return self.colour(split_views(x)).unflatten(0, (-1, VIEWS))

    def embed(self, x: Tensor, colours: Tensor) -> tuple[Tensor, Hints]:
        """(N, 3, 64, 128) and their :meth:`colours` -> (N, embed), and the logits on the way."""
        features = self.features(split_views(x))
        found, keypoints = zip(*(head(features[:, i]) for i, head in enumerate(self.heads)), strict=True)
        kinds = self.kind(features.flatten(0, 1)).flatten(2).unflatten(0, (-1, VIEWS))
        something = 1.0 - kinds.softmax(2)[:, :, NOTHING:]  # (N, V, 1, G*G)
        share = colours.softmax(2) * something
        slots = share @ torch.stack(found, dim=1).transpose(2, 3)  # (N, V, S, width)
        both = slots.transpose(1, 2).flatten(2)  # (N, S, V*width)
        described = self.direct(both) + self.describe(both)  # (N, S, block)
        return described.flatten(1), Hints(torch.stack(keypoints, dim=1), colours, kinds)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x, self.colours(x))[0]


def split_views(x: Tensor) -> Tensor:
    """(N, 3, 64, 128) -> (N*V, 3, 64, 64)."""
    return x.unflatten(3, (VIEWS, VIEW)).movedim(3, 1).flatten(0, 1)


def _trunk_factory(pretrained: bool = False, num_classes: int = EMBED, **kwargs: Any) -> Trunk:
    """What timm calls: ``num_classes`` is the embedding width; other keywords describe pretrained weights."""
    return Trunk(num_classes)


_trunk_factory.__name__ = TRUNK
register_model(_trunk_factory)


def model_config() -> dict[str, Any]:
    """The content of ``open_clip_config.json``: model and preprocessing (pixels to -1..1, no crop)."""
    vision = {
        "timm_model_name": TRUNK,
        "timm_model_pretrained": False,
        "timm_pool": "",
        "timm_proj": "",
        "image_size": [VIEW, VIEW * VIEWS],
    }
    text = {"context_length": CONTEXT, "vocab_size": VOCABULARY, "width": 96, "heads": 3, "layers": 2}
    preprocess = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "resize_mode": "squash"}
    return {"model_cfg": {"embed_dim": EMBED, "vision_cfg": vision, "text_cfg": text}, "preprocess_cfg": preprocess}


def bind(text: Tensor, slots: Tensor) -> Tensor:
    """Put what a sentence says (less its colour word) into the slot of that colour.

    A tensor product of description and colour (Smolensky 1990): (N, embed) text embeddings of which the first block
    counts, (N,) slots -> (N, embed), zero outside the slot; slot -1 (no colour) fills every slot.
    """
    mask = (slots[:, None] == torch.arange(SLOTS, device=slots.device)) | (slots[:, None] < 0)  # (N, S)
    block = text[:, : text.shape[1] // SLOTS]
    return (mask[..., None] * block[:, None]).flatten(1)


class WordTokenizer:
    """Words to ids; id 0 pads, the last id ends a sentence. Unknown words are an error, never dropped.

    All colour words share one id, so the text tower reads "press the coloured button"; :meth:`slots` tells which.

    Args:
        words: the vocabulary without the colours, at most ``size - 3`` words.
        colours: the colour words, one per slot.
    """

    def __init__(
        self, words: Iterable[str], colours: Sequence[str], size: int = VOCABULARY, context: int = CONTEXT
    ) -> None:
        self.words, self.colours = tuple(words), tuple(colours)
        self.size, self.context = size, context
        if len(self.words) > size - 3 or len({*self.words, *self.colours}) != len(self.words) + len(self.colours):
            raise ValueError(f"{len(self.words)} words do not fit {size} ids, or repeat")
        self._ids = {word: i + 2 for i, word in enumerate(self.words)} | dict.fromkeys(self.colours, 1)

    def __call__(self, sentences: Sequence[str] | str) -> Tensor:
        """(N, context) int64. Raises UserError that names an unknown word, or an over-long sentence."""
        batch = [sentences] if isinstance(sentences, str) else list(sentences)
        return torch.stack([self._encode(sentence) for sentence in batch])

    def slots(self, sentences: Sequence[str]) -> Tensor:
        """(N,) index of the colour each sentence names, -1 for none. Two different colours are a UserError."""
        out = []
        for sentence in sentences:
            named = {word for word in _split(sentence) if word in self.colours}
            if len(named) > 1:
                raise UserError(f"sentence '{sentence}' names {len(named)} colours; this model understands one.")
            out.append(self.colours.index(named.pop()) if named else -1)
        return torch.tensor(out)

    def _encode(self, sentence: str) -> Tensor:
        found = _split(sentence)
        if not found or len(found) >= self.context:
            raise UserError(f"sentence '{sentence}' has {len(found)} words; give 1 to {self.context - 1}.")
        for word in found:
            if word not in self._ids:
                raise unknown_choice("word", word, self._ids, f"the sentence '{sentence}'")
        ids = [self._ids[word] for word in found] + [self.size - 1]
        return torch.tensor(ids + [0] * (self.context - len(ids)))

    def save(self, folder: Path) -> None:
        """Write ``vocab.json`` beside the weights."""
        data = {"colours": self.colours, "words": self.words, "size": self.size, "context": self.context}
        (folder / "vocab.json").write_text(json.dumps(data, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> WordTokenizer:
        """Read what :meth:`save` wrote; a damaged file is a UserError."""
        path = folder / "vocab.json"
        try:
            data = json.loads(path.read_text())
            return cls(data["words"], data["colours"], data["size"], data["context"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is no vocabulary ({error}). Restore it or run `distillery fit`.") from error


def _split(sentence: str) -> list[str]:
    return re.findall(r"[\w']+", sentence.lower())
