"""Sentences for every job, and the words that a sentence gate knows. Plain data.

Training sentences come from a grammar in which every skeleton exists in every colour, so that no skeleton predicts a
colour. The held-out sentences were written on their own; no held-out skeleton occurs in the grammar.
"""

from __future__ import annotations

from sims.worlds.variants import VARIANTS

TRAIN_SKELETONS: dict[str, tuple[str, ...]] = {
    "reach": (
        "reach the marker", "go to the marker", "move to the marker", "touch the marker", "point at the marker",
        "bring the gripper to the marker", "move the hand to the marker", "put the fingertip on the marker",
        "please reach the marker", "reach for the target spot", "go to the target spot", "touch the round spot",
        "move your finger to the spot on the table", "can you go to the marker", "hover over the marker",
        "reach to the disc",
    ),
    "press": (
        "press the {c} button", "push the {c} button", "push down the {c} button", "press down on the {c} button",
        "hit the {c} button", "please press the {c} button", "press the button that is {c}",
        "go and push the {c} button", "activate the {c} button", "click the {c} button",
        "can you press the {c} button", "i want you to press the {c} button", "press and hold the {c} button",
        "push the {c} one of the buttons", "switch on the {c} button", "tap the {c} button",
    ),
    "move": (
        "move the {c} cube to the marker", "drag the {c} cube to the marker", "slide the {c} cube onto the marker",
        "bring the {c} block to the marker", "take the {c} cube to the marker", "put the {c} cube on the marker",
        "place the {c} block on the marker", "pull the {c} cube over to the marker",
        "get the {c} block onto the marker", "please move the {c} cube to the marker",
        "move the {c} block to the target spot", "put the {c} cube onto the disc",
        "can you bring the {c} cube to the marker", "drag the {c} block over to the spot",
        "move the cube that is {c} to the marker", "push the {c} cube to the marker",
    ),
    "lift": (
        "lift the {c} cube", "pick up the {c} cube", "raise the {c} cube", "lift up the {c} block",
        "pick the {c} block up", "lift the {c} cube off the table", "hold the {c} cube up in the air",
        "grab the {c} cube and lift it", "please lift the {c} cube", "grasp the {c} block and raise it",
        "can you pick up the {c} cube", "take the {c} cube up", "lift the cube that is {c}",
        "raise the {c} block above the table", "pick up the {c} block from the table",
        "grab the {c} block and hold it up",
    ),
}  # fmt: skip

HELDOUT_SKELETONS: dict[str, tuple[str, ...]] = {
    "reach": (
        "get the tip of the arm to where the marker is", "steer the gripper toward the marked place",
        "your finger should end up right above the marker", "line the fingertip up with the marker",
        "let the arm come over to the marker", "position the gripper at the marker",
    ),
    "press": (
        "give the {c} button a push", "make the {c} button go down", "the {c} button should be pressed now",
        "would you kindly push the button coloured {c}", "use your finger to press in the {c} button",
        "find the {c} button and press it",
    ),
    "move": (
        "the {c} cube belongs on the marker, take it there", "shift the {c} cube until it sits on the marker",
        "could you relocate the {c} block to where the marker is", "transport the {c} cube over to the marker",
        "make the {c} block end up on top of the marker", "i need the {c} cube placed at the marker",
    ),
    "lift": (
        "get the {c} cube up off the tabletop", "elevate the {c} block",
        "i would like the {c} cube to be lifted into the air", "the {c} block should be raised high",
        "could you take hold of the {c} cube and bring it upward", "hoist the {c} cube",
    ),
}  # fmt: skip

# What the gate of ``distill.text`` checks before anything moves.
COLOURS = ("red", "blue", "green", "yellow")
OTHER_COLOURS = (
    "orange", "purple", "violet", "pink", "black", "white", "brown", "grey", "gray", "cyan", "magenta", "turquoise",
    "golden", "gold", "silver", "beige", "teal", "crimson", "scarlet", "navy", "lime", "maroon", "olive", "indigo",
)  # fmt: skip
NEGATIONS = (
    "not", "no", "never", "don't", "dont", "do not", "avoid", "without", "except", "stop", "refrain", "cannot", "can't",
    "shouldn't", "won't", "nothing", "neither", "instead", "unless", "leave",
)  # fmt: skip
# word -> kind of object; a kind has the colours of its slots
OBJECT_WORDS = {
    "marker": "marker", "spot": "marker", "disc": "marker", "target": "marker", "place": "marker", "cube": "cube",
    "block": "cube", "button": "button", "buttons": "button",
}  # fmt: skip
OBJECT_COLOURS: dict[str, tuple[str, ...]] = {
    "marker": (),
    "cube": ("red", "blue"),
    "button": ("green", "yellow"),
}
OTHER_OBJECTS = (
    "ball", "sphere", "cup", "mug", "bowl", "plate", "drawer", "door", "bottle", "pen", "pencil", "book", "box",
    "lever", "knob", "handle", "switch", "peg", "socket", "banana", "apple", "spoon", "fork", "knife", "cylinder",
    "triangle", "pyramid", "ring", "cloth", "towel", "phone", "key", "coin", "can", "lid", "tray", "toy", "screw",
)  # fmt: skip
TASK_VERBS: dict[str, tuple[str, ...]] = {
    "reach": ("reach", "touch", "point", "hover", "go", "steer", "position", "line"),
    "press": ("press", "push", "hit", "activate", "click", "tap", "switch"),
    "move": (
        "move",
        "drag",
        "slide",
        "bring",
        "put",
        "place",
        "pull",
        "shift",
        "relocate",
        "transport",
        "push",
        "take",
    ),
    "lift": ("lift", "pick", "raise", "hold", "grab", "grasp", "elevate", "hoist", "take"),
}
OTHER_VERBS = (
    "open", "close", "throw", "kick", "drop", "rotate", "turn", "spin", "stack", "insert", "pour", "wipe", "cut",
    "break", "eat", "drink", "dance", "sing", "write", "read", "fold", "shake", "roll", "paint", "wash", "clean",
    "sort", "balance",
)  # fmt: skip


def colour_of(variant: str) -> str:
    """``"red"`` for ``"lift_red"``; empty for a job without a colour."""
    goal = VARIANTS[variant].goal
    return goal.split("_")[0] if "_" in goal else ""


def skeletons(variant: str, phrasings: str = "train") -> tuple[str, ...]:
    """Sentences of a job with ``{c}`` where the colour goes. ``phrasings``: ``"train"`` or ``"heldout"``."""
    table = {"train": TRAIN_SKELETONS, "heldout": HELDOUT_SKELETONS}[phrasings]
    return table[VARIANTS[variant].task]


def sentences(variant: str, phrasings: str = "train") -> tuple[str, ...]:
    """All sentences of a job, in a fixed order."""
    colour = colour_of(variant)
    return tuple(s.format(c=colour) for s in skeletons(variant, phrasings))
