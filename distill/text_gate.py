"""Which job does a sentence ask for, and does any job cover it? Decided before anything moves. Torch-free.

Distance to known sentences alone lets negations, unknown colours and unknown pairs of verb and object through (cosine
.8 to .95), so words are checked first and the distance last.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from distill.text import DEFAULT_ENCODER, embed
from distill.text_words import (
    CONDITIONS,
    CONTRARY,
    EXTRA_OBJECT_WORDS,
    FUNCTION_WORDS,
    LIGHT_VERBS,
    NEGATIONS,
    PLACE_WORDS,  # fmt: skip
    QUESTIONS,
    SYNONYMS,
    is_adverb,
    stems,
)
from sims.errors import UserError

LANGUAGE_FILE = "language.safetensors"
MIN_COSINE = 0.5  # to the nearest known sentence of the same job; stops 93 % of nonsense in trials
NEAREST = 3  # known sentences that a refusal lists


@dataclass(frozen=True)
class Language:
    """What a policy understands.

    Attributes:
        encoder: name of the sentence encoder.
        sentences: N known sentences.  jobs: the job (variant) of each.
        embeddings: (N, D) float32 unit vectors.
        vocabulary: word lists as in ``sims.worlds.language``; ``variants`` maps a job to task, kind and colour.
        min_cosine: a sentence farther from every known sentence of its job is refused.
        snap: act on the nearest known sentence's embedding instead of the sentence's own.
    """

    encoder: str
    sentences: tuple[str, ...]
    jobs: tuple[str, ...]
    embeddings: np.ndarray
    vocabulary: Mapping[str, Any]
    min_cosine: float = MIN_COSINE
    snap: bool = False
    table: dict[str, int] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not len(self.sentences) == len(self.jobs) == len(self.embeddings):
            raise UserError(f"language: {len(self.sentences)} sentences, {len(self.jobs)} jobs and "
                            f"{len(self.embeddings)} embeddings differ in number.")  # fmt: skip
        self.table.update({normalise(s): i for i, s in enumerate(self.sentences)})

    def to_json(self) -> dict[str, Any]:
        """For ``spec.json``; the embeddings go to ``language.safetensors`` beside it."""
        return {"encoder": self.encoder, "sentences": list(self.sentences), "variants": list(self.jobs),
                "vocabulary": dict(self.vocabulary), "min_cosine": self.min_cosine, "snap": self.snap,
                "embeddings": LANGUAGE_FILE}  # fmt: skip


@dataclass(frozen=True)
class Grounding:
    """An understood sentence: what was said, the (D,) vector the policy takes, the job it stands for, and how sure."""

    sentence: str
    embedding: np.ndarray
    variant: str
    nearest: str
    cosine: float


def make_language(variants: Sequence[str], encoder: str = DEFAULT_ENCODER, snap: bool = False) -> Language:
    """The tabletop's language for these jobs: its training sentences, their embeddings and its vocabulary."""
    from sims.worlds import language as words
    from sims.worlds.variants import VARIANTS

    pairs = [(s, v) for v in variants for s in words.sentences(v, "train")]
    sentences = tuple(s for s, _ in pairs)
    jobs = {v: {"task": VARIANTS[v].task, "kind": VARIANTS[v].goal.split("_")[-1], "colour": words.colour_of(v)}
            for v in variants}  # fmt: skip
    vocabulary = {
        "variants": jobs,
        "colours": list(words.COLOURS),
        "other_colours": list(words.OTHER_COLOURS),
        "negations": list(words.NEGATIONS),
        "objects": dict(words.OBJECT_WORDS),
        "object_colours": {k: list(v) for k, v in words.OBJECT_COLOURS.items()},
        "other_objects": list(words.OTHER_OBJECTS),
        "verbs": {k: list(v) for k, v in words.TASK_VERBS.items()},
        "other_verbs": list(words.OTHER_VERBS),
    }
    return Language(encoder, sentences, tuple(v for _, v in pairs), embed(sentences, encoder), vocabulary, snap=snap)


def save_language(language: Language, folder: Path) -> dict[str, Any]:
    """Write the embeddings into an artefact's folder; returns the dict that ``spec.json`` keeps under ``language``."""
    from safetensors.numpy import save_file

    temporary = folder / (LANGUAGE_FILE + ".tmp")
    save_file({"embeddings": np.ascontiguousarray(language.embeddings)}, temporary)
    os.replace(temporary, folder / LANGUAGE_FILE)
    return language.to_json()


def load_language(folder: str | Path) -> Language:
    """The language of the policy artefact in ``folder``.

    Raises:
        UserError: the artefact is missing or damaged, or its policy takes no sentences.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    folder = Path(folder)
    try:
        data = json.loads((folder / "spec.json").read_text()).get("language")
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / 'spec.json'}: not readable ({error}). Is this a policy artefact?") from None
    if not data:
        raise UserError(f"{folder}: this policy takes no sentences; only a generalist does.")
    try:
        embeddings = load_file(folder / data["embeddings"])["embeddings"]
    except (OSError, KeyError, SafetensorError) as error:
        raise UserError(f"{folder / LANGUAGE_FILE}: missing or damaged ({error}). Distil the policy again.") from None
    return Language(data["encoder"], tuple(data["sentences"]), tuple(data["variants"]), embeddings, data["vocabulary"],
                    data["min_cosine"], data["snap"])  # fmt: skip


def normalise(sentence: str) -> str:
    """Lower case, straight apostrophes, no punctuation, single blanks."""
    text = sentence.lower().replace("’", "'")
    return " ".join(re.sub(r"[^a-z0-9'\-]+", " ", text).split())


def ground(sentence: str, language: Language) -> Grounding:
    """Understand a sentence, or refuse it.

    Raises:
        UserError: nonsense, a negation, an unknown colour, object, word or pair of verb and object, several jobs in
            one sentence; the message says which, and lists the nearest known sentences.
    """
    words = normalise(sentence)
    known = language.table.get(words)
    if known is not None:  # needs no encoder: a robot without one still obeys what it knows
        return Grounding(sentence, language.embeddings[known], language.jobs[known], language.sentences[known], 1.0)
    reason, variant = _parse(words, language.vocabulary)
    vector = embed([words or " "], language.encoder)[0]
    cosines = language.embeddings @ vector  # (N,)
    if reason:
        raise _refusal(sentence, reason, language, cosines)
    mine = np.asarray([job == variant for job in language.jobs])
    best = int(np.argmax(np.where(mine, cosines, -1)))
    if cosines[best] < language.min_cosine:
        reason = f"too far from every known sentence (cosine {cosines[best]:.2f}, needs {language.min_cosine:.2f})"
        raise _refusal(sentence, reason, language, cosines)
    vector = language.embeddings[best] if language.snap else vector
    return Grounding(sentence, vector, variant, language.sentences[best], float(cosines[best]))


def _refusal(sentence: str, reason: str, language: Language, cosines: np.ndarray) -> UserError:
    nearest = [language.sentences[i] for i in np.argsort(-cosines)[:NEAREST]]
    listed = "; ".join(f'"{s}"' for s in nearest)
    return UserError(f'sentence "{sentence}" refused: {reason}. Nearest known sentences: {listed}.')


def _parse(text: str, vocabulary: Mapping[str, Any]) -> tuple[str, str]:
    """(reason to refuse, "") or ("", job)."""
    text = re.sub(r"\b(can|could|would|will) (you|we|i)\b|\b(as )?you can\b", "you", text)
    tokens = re.sub(r"\ball the way\b", "", text).split()
    reason = _forbidden(tokens, vocabulary) or _unknown(tokens, vocabulary)
    if reason:
        return reason, ""
    kinds = _kinds(tokens, vocabulary)
    kinds = kinds or _implied_kind(tokens, vocabulary)
    if not kinds or len(tokens) < 2:
        return "it names no object of this scene" if not kinds else "it names an object but nothing to do with it", ""
    goal = _goal(set(kinds.values()))
    if goal is None:
        return f"it names {' and '.join(sorted(set(kinds.values())))}, which no job combines", ""
    kind, task = goal
    reason, colour = _colour(tokens, kinds, kind, vocabulary)
    reason = reason or _wrong_verb(tokens, task, kind, vocabulary) or _contrary(tokens, task)
    if reason:
        return reason, ""
    for name, job in vocabulary["variants"].items():
        if (job["task"], job["kind"], job["colour"]) == (task, kind, colour):
            return "", name
    return f"this policy has not learned to {task} the {colour} {kind}".replace("  ", " "), ""


def _forbidden(tokens: Sequence[str], vocabulary: Mapping[str, Any]) -> str:
    """A word that must stop the robot, whatever else the sentence says."""
    verbs = {v for words in vocabulary["verbs"].values() for v in words}
    if not tokens:
        return "it is empty"
    if tokens[0] in QUESTIONS and "you" not in tokens[:3]:
        return f"it is a question or a statement ('{tokens[0]} ...'), not a command"
    phrases = [n for n in vocabulary["negations"] if " " in n and f" {n} " in f" {' '.join(tokens)} "]
    for word in tokens:
        if word in NEGATIONS or word in vocabulary["negations"] or word.endswith("n't") or phrases:
            return f"it contains a negation ('{phrases[0] if phrases else word}')"
        if word in vocabulary["other_colours"]:
            return f"no object here is {word}"
        if word in vocabulary["other_objects"] and word not in verbs:
            return f"there is no {word} in this scene"
        if word in CONDITIONS:
            return f"'{word}' asks for a condition, a choice or a sequence, and a command here is one job"
        if set(stems(word)) & set(vocabulary["other_verbs"]) and not _lexicon(vocabulary) & {word}:
            return f"to {word} is no job of this robot"
    return ""


def _lexicon(vocabulary: Mapping[str, Any]) -> set[str]:
    """Every word a command may contain."""
    verbs = [*vocabulary["verbs"].values(), *SYNONYMS.values()]
    objects = {*vocabulary["objects"], *EXTRA_OBJECT_WORDS}
    return {v for words in verbs for v in words} | objects | set(vocabulary["colours"]) | FUNCTION_WORDS | PLACE_WORDS


def _unknown(tokens: Sequence[str], vocabulary: Mapping[str, Any]) -> str:
    lexicon = _lexicon(vocabulary) | {w for words in CONTRARY.values() for w in words}
    for word in tokens:
        if not is_adverb(word) and not any(stem in lexicon for stem in stems(word)):
            close = difflib.get_close_matches(word, lexicon, n=1, cutoff=0.75)
            hint = f", did you mean '{close[0]}'?" if close else ""
            return f"unknown word '{word}'{hint}"
    return ""


def _kinds(tokens: Sequence[str], vocabulary: Mapping[str, Any]) -> dict[int, str]:
    """Position of a noun -> kind of object. 'place' and 'target' before a determiner are verbs."""
    names = {**EXTRA_OBJECT_WORDS, **vocabulary["objects"]}
    determiners = {"the", "a", "an", "that", "this", "it", *vocabulary["colours"]}
    verbs = {v for words in vocabulary["verbs"].values() for v in words}
    found = {}
    for i, word in enumerate(tokens):
        follower = tokens[i + 1] if i + 1 < len(tokens) else ""
        if word in names and not (word in verbs and follower in determiners):
            found[i] = names[word]
    return found


def _implied_kind(tokens: Sequence[str], vocabulary: Mapping[str, Any]) -> dict[int, str]:
    """'press yellow': one colour that one kind of object has, after a verb."""
    said = [i for i, w in enumerate(tokens) if w in vocabulary["colours"]]
    verbs = {v for words in vocabulary["verbs"].values() for v in words}
    if len(said) != 1 or not verbs & set(tokens[: said[0]]):
        return {}
    owners = [k for k, colours in vocabulary["object_colours"].items() if tokens[said[0]] in colours]
    return {said[0]: owners[0]} if len(owners) == 1 else {}


def _goal(kinds: set[str]) -> tuple[str, str] | None:
    """(kind of the goal, task) that a set of named kinds stands for."""
    table = {("marker",): ("marker", "reach"), ("button",): ("button", "press"), ("cube",): ("cube", "lift"),
             ("cube", "marker"): ("cube", "move")}  # fmt: skip
    return table.get(tuple(sorted(kinds)))


def _colour(
    tokens: Sequence[str], kinds: Mapping[int, str], kind: str, vocabulary: Mapping[str, Any]
) -> tuple[str, str]:
    """(reason, "") or ("", colour of the goal). A colour belongs to the noun right after it, else to the one before."""
    said: dict[str, set[str]] = {}
    for i, word in enumerate(tokens):
        if word in vocabulary["colours"]:
            before = [p for p in kinds if p < i]
            owner = kinds.get(i + 1) or (kinds[max(before)] if before else kind)
            said.setdefault(owner, set()).add(word)
    for owner, colours in said.items():
        missing = sorted(colours - set(vocabulary["object_colours"].get(owner, ())))
        if missing:
            return f"there is no {missing[0]} {owner} in this scene", ""
    colours = said.get(kind, set())
    choices = vocabulary["object_colours"].get(kind, ())
    if len(colours) > 1:
        return f"it names two {kind}s ({' and '.join(sorted(colours))})", ""
    if choices and not colours:
        return f"it does not say which {kind}: {' or '.join(choices)}", ""
    return "", next(iter(colours), "")


def _wrong_verb(tokens: Sequence[str], task: str, kind: str, vocabulary: Mapping[str, Any]) -> str:
    """The verbs that are there must include one that this task knows."""
    tasks: dict[str, set[str]] = {t: {*vocabulary["verbs"][t], *SYNONYMS[t]} for t in vocabulary["verbs"]}
    everything = {v for words in tasks.values() for v in words}
    nouns = {*vocabulary["objects"], *EXTRA_OBJECT_WORDS} - {"place", "target"}
    said = [next((s for s in stems(w) if s in everything), "") for w in tokens if w not in nouns]
    verbs = [v for v in said if v]
    if task == "press" and re.search(r"\b(go|goes) down\b", " ".join(tokens)):
        return ""
    heavy = [v for v in verbs if v not in LIGHT_VERBS] or verbs
    if task == "move" and all(v in LIGHT_VERBS for v in heavy):  # "the red cube goes on the marker"
        return ""
    if heavy and not any(v in tasks[task] for v in heavy):
        return f"'{heavy[0]}' and '{kind}' do not go together here"
    return ""


# turns of phrase whose words would otherwise be read as another direction
_HARMLESS = {
    "reach": r"\bdown (on|onto|to|at)\b",
    "press": r"\bpick (\w+ )*up\b|\b(go|goes) down\b",
    "move": r"\bpick (\w+ )*up\b|\bdown (on|onto|to|at)\b",
    "lift": r"\binto the (air|sky)\b",
}
_SURFACE = r"\b(off|from|away from|up from|off of) (the|its|this) (table|tabletop|desk|surface|ground|bench)\b"

_ONTO_CUBE = r"\b(to|onto|on|at|over|into|with|by) (the|a|that) (\w+ )?(cube|block|brick)\b"


def _contrary(tokens: Sequence[str], task: str) -> str:
    text = re.sub(_HARMLESS[task], "", " ".join(tokens))
    text = re.sub(_SURFACE, "", text) if task in ("lift", "move") else text
    for word in text.split():
        if word in CONTRARY[task]:
            return f"'{word}' makes it another job than '{task}'"
    if task == "move" and re.search(
        r"\b(to|onto|on|at|over|into|with|by) (the|a|that) (\w+ )?(cube|block|brick)\b", text
    ):
        return "a cube is not a place to move something to"
    return ""
