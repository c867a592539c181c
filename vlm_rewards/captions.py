"""The grammar of ``fit``: sentences, and from the state of a frame which of them are true.

A concept is (family, polarity, kind, colour) with several phrasings. Every skeleton exists in both polarities and
with all subjects, because a skeleton that is only ever false becomes the negative itself. One pair never occurs,
``UNSEEN``: the model has to compose it from what it saw of the colour and of the object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from sims.errors import UserError
from sims.worlds import predicates
from sims.worlds.language import TRAIN_SKELETONS

COLOURS = ("red", "orange", "yellow", "lime", "green", "cyan", "blue", "purple", "pink", "white")
UNSEEN = ("yellow", "button")
KINDS = ("marker", "cube", "button")
SLOT_KIND = ("marker", "cube", "cube", "button", "button")  # kind of each slot of sims.worlds.variants.SLOTS

# family -> kinds it speaks of
FAMILIES = {
    "press": ("button",),
    "lift": ("cube",),
    "move": ("cube",),
    "reach": KINDS,
    "near": KINDS,
    "exist": KINDS,
}
GOALS = ("press", "lift", "move", "reach")  # families with a progress

# {t} is "the yellow cube"; a pair of lists is (words when it holds, words when it does not)
_STATE: dict[str, tuple[tuple[str, str], ...]] = {
    "press": (("pressed", "released"), ("down", "up"), ("lit", "dark"), ("on", "off")),
    "lift": (("lifted", "lowered"), ("raised", "resting"), ("in the air", "on the table")),
    "move": (("at the marker", "away from the marker"), ("on the marker", "off the marker")),
    "near": (("near the gripper", "far from the gripper"), ("close to the gripper", "away from the gripper")),
    "reach": (("at the fingertip", "away from the fingertip"), ("touched", "free")),
}
_COMMANDS: dict[str, tuple[str, ...]] = {
    **{k: tuple(s.replace("the {c} ", "{t} ") for s in v) for k, v in TRAIN_SKELETONS.items() if k != "reach"},
    "reach": ("reach {t}", "go to {t}", "touch {t}", "point at {t}", "bring the gripper to {t}", "reach for {t}"),
    "near": ("approach {t}", "move near {t}"),
    "exist": (),
}
_ARTICLES = {"{t} block": "block", "{t} cube": "cube", "{t} button": "button", "{t} one of the buttons": "button"}


@dataclass(frozen=True)
class Concept:
    """A meaning: ``family`` holds (``positive``) or does not, for the object of this ``kind`` and ``colour``.

    ``colour`` is empty for the marker of the uncoloured sentences.
    """

    family: str
    positive: bool
    kind: str
    colour: str

    @property
    def seen(self) -> bool:
        """Whether frames and captions of ``fit`` may contain it."""
        return (self.colour, self.kind) != UNSEEN


def subject(kind: str, colour: str) -> str:
    """``"the yellow cube"``."""
    return f"the {colour} {kind}" if colour else f"the {kind}"


@cache
def phrasings(concept: Concept) -> tuple[str, ...]:
    """All sentences of a concept: states, denied opposites, and commands (a command names the state it asks for)."""
    noun = subject(concept.kind, concept.colour)
    out: list[str] = []
    for pair in _STATE.get(concept.family, ()):
        word, opposite = pair if concept.positive else pair[::-1]
        out += [f"{noun} is {word}", f"{noun} is not {opposite}", f"now {noun} is {word}"]
    for command in _COMMANDS[concept.family]:
        sentence = _fill(command, concept.kind, concept.colour)
        out.append(sentence if concept.positive else f"do not {sentence}")
    if concept.family == "reach" and not concept.colour:
        out += [s if concept.positive else f"do not {s}" for s in TRAIN_SKELETONS["reach"]]
    if concept.family == "exist":
        thing = noun.removeprefix("the ")
        out += [f"there is a {thing}", f"a {thing} is there"] if concept.positive else []
    return tuple(dict.fromkeys(out))


def _fill(command: str, kind: str, colour: str) -> str:
    if "{c}" in command:
        return command.format(c=colour)
    if "{t} " in command:
        for shape in _ARTICLES:
            command = command.replace(shape, shape.replace("{t}", f"the {colour}".rstrip()))
    return command.replace("{t}", subject(kind, colour))


@cache
def concepts(include_unseen: bool = False) -> tuple[Concept, ...]:
    """Every concept, in a fixed order. ``exist`` has no negative: an absent object is said by nothing at all."""
    out = []
    for family, kinds in FAMILIES.items():
        for kind in kinds:
            for colour in (*COLOURS, *([""] if kind == "marker" and family in ("reach", "near") else [])):
                for positive in (True, False) if family != "exist" else (True,):
                    concept = Concept(family, positive, kind, colour)
                    out += [concept] if include_unseen or concept.seen else []
    return tuple(out)


@cache
def vocabulary() -> tuple[str, ...]:
    """Every word of every sentence except the colours, sorted."""
    words = {word for c in concepts() for s in phrasings(c) for word in s.replace(",", " ").split()}
    return tuple(sorted(words - set(COLOURS)))


@cache
def _index() -> dict[str, Concept]:
    return {s: c for c in reversed(concepts(include_unseen=True)) for s in phrasings(c)}


def concept_of(sentence: str) -> Concept:
    """The concept that a sentence of the grammar expresses; also of the pair that ``fit`` never shows.

    Raises:
        UserError: the sentence is not in the grammar.
    """
    found = _index().get(" ".join(sentence.lower().replace(",", " ").replace(".", " ").split()))
    if found is None:
        raise UserError(
            f"the sentence '{sentence}' is not in the grammar of the small CLIP, so its negatives are unknown. "
            "Give reward.negatives, or use a sentence such as 'press the yellow button'."
        )
    return found


def negatives(concept: Concept) -> tuple[str, ...]:
    """Sentences that are false whenever ``concept`` holds: its denials, and the same state of other colours."""
    denied = Concept(concept.family, not concept.positive, concept.kind, concept.colour)
    rivals = [Concept(concept.family, concept.positive, concept.kind, c) for c in COLOURS if c != concept.colour]
    own = phrasings(denied)
    return (*own[: 4 if len(own) > 4 else None], *(phrasings(r)[0] for r in rivals if concept.colour))


# --- truth -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """What is known of N frames.

    Attributes:
        colour: (N, 5) index into COLOURS of the object in each slot.
        tip: (N, 3) fingertip, m. pos: (N, 5, 3) objects (buttons: top centre of the cap), m.
        depth: (N, 2) how far each button's cap is pushed down, m.
    """

    colour: np.ndarray
    tip: np.ndarray
    pos: np.ndarray
    depth: np.ndarray

    def distance(self) -> np.ndarray:
        """(N, 5) fingertip to each object; to the point above it for the marker."""
        target = self.pos.copy()
        target[:, 0, 2] += predicates.HOVER
        return np.linalg.norm(self.tip[:, None] - target, axis=-1)


def degree(family: str, facts: Facts) -> tuple[np.ndarray, np.ndarray]:
    """Per slot: (N, 5) progress in 0..1, and (N, 5) truth of the positive concept: 1, 0, or -1 for borderline."""
    d = facts.distance()
    if family == "press":
        depth = np.zeros_like(d)
        depth[:, 3:] = facts.depth
        progress = 0.5 * _near(d, 6) + 0.25 * _near(d, 25) + 0.25 * np.clip(depth / 0.006, 0, 1)
        return progress, _band(depth, 0.003, predicates.PRESS_DEPTH)
    if family == "reach":
        return 0.5 * _near(d, 6) + 0.5 * _near(d, 25), _band(-d, -0.035, -0.018)
    if family == "near":
        return _near(d, 6), _band(-d, -0.09, -0.055)
    rise = predicates.rise(facts.pos)
    if family == "lift":
        progress = 0.3 * _near(d, 8) + 0.7 * np.clip(rise / predicates.LIFT_HEIGHT, 0, 1)
        return progress, _band(rise, 0.045, predicates.LIFT_HEIGHT * 0.95)
    away = predicates.move_distance(facts.pos, facts.pos[:, :1])
    down = rise < predicates.MOVE_RISE
    truth = np.where(down, _band(-away, -0.045, -predicates.MOVE_TOLERANCE), np.where(away > 0.045, 0, -1))
    return 0.25 * _near(d, 8) + 0.75 * _near(away, 7), truth


def _near(d: np.ndarray, rate: float) -> np.ndarray:
    return 1.0 - np.tanh(rate * d)


def _band(x: np.ndarray, low: float, high: float) -> np.ndarray:
    """1 above ``high``, 0 below ``low``, -1 between."""
    return np.where(x > high, 1, np.where(x < low, 0, -1))


def pick(per_slot: np.ndarray, facts: Facts, kind: str, colour: str, absent: float) -> np.ndarray:
    """(N, 5) -> (N,): the value of the slot that holds this object, ``absent`` where no slot does."""
    out = np.full(len(per_slot), absent, dtype=np.float32)
    for slot, slot_kind in enumerate(SLOT_KIND):
        if slot_kind == kind:
            here = facts.colour[:, slot] == COLOURS.index(colour) if colour else np.ones(len(out), bool)
            out[here] = per_slot[here, slot]
    return out


def truth(facts: Facts, which: Sequence[Concept]) -> np.ndarray:
    """(N, C) int8: 1 true, 0 false (also: no such object), -1 borderline, to be left out."""
    cached = {f: degree(f, facts)[1] for f in FAMILIES if f != "exist"}
    cached["exist"] = np.ones_like(facts.colour, dtype=np.int64)
    columns = []
    for c in which:
        value = cached[c.family]
        value = value if c.positive else np.where(value < 0, -1, 1 - value)
        columns.append(pick(value, facts, c.kind, c.colour, 0))
    return np.stack(columns, axis=1).astype(np.int8)


def progress(facts: Facts, which: Sequence[Concept]) -> np.ndarray:
    """(N, G) float32 progress towards positive goal concepts, NaN where the object is absent."""
    cached = {f: degree(f, facts)[0] for f in GOALS}
    return np.stack([pick(cached[c.family], facts, c.kind, c.colour, np.nan) for c in which], axis=1)
