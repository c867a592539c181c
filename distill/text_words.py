"""Plain English words for the sentence gate: what may stand in a command besides its verb and its object.

A robot must not guess: a sentence with a word that is in no list here and in no vocabulary of the policy is refused.
"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FUNCTION_WORDS = _words(
    """
    a able about above again ahead already also am an and are arm as ask at be become becomes been begin
    being belong belongs bit by can careful carefully claw come comes coming command completely could do
    does doing done effector end end-effector ended ends execute fast favor favour find finds finger fingers
    fingertip firm for fully gentle get gets getting give gives go goes going gone got gripper had hand has
    have having he hello help here hey hi how hurry i i'd i'll i'm if's immediately in inside instruct into
    is it it's its itself jaw jaws job just keep keeps kind kindly let let's lets lie lies like little made
    make makes making manipulator may maybe me might mind must my neatly need needed needs next's notice now
    of ok okay on one ones onto operate order ought our over perform please pressure quick quickly quite
    ready really remain required rest rests robot shall she should sir sit sits slow small so soft softly
    some stand stands start stay stays supposed sure task tell thank thanks that the them then there these
    they this those through till time tip to too tool toward towards tries try turn until up upon us use
    used uses using very want wanted wants we where which who whole will wish with work would would've you
    you'd your your's yourself
    """
)

PLACE_WORDS = _words(
    """
    above-table across against air airborne along area away bench center centimeters centimetres centre
    circular close closer color colored colour coloured contact desk directly everything's exactly few
    firmly flat from ground height high higher location mark marked marking mid-air midair middle near off
    out point position precisely right round side sky spot spotted straight surface table tabletop tightly
    top upward upwards way workspace
    """
)

# task -> verbs beyond those of the world's own vocabulary
SYNONYMS: dict[str, frozenset[str]] = {
    "reach": _words(
        """
        approach move bring put place navigate guide direct align travel head extend stretch hold hover
        glide slide sweep aim proceed get poke contact drive swing lower rest
        """
    ),
    "press": _words(
        """
        depress poke smack slap thump bump prod nudge compress bash give apply work trigger engage hold
        jab punch strike actuate touch use squeeze
        """
    ),
    "move": _words(
        """
        carry haul convey deliver reposition tow tug get set lay drop deposit transfer guide pass ferry
        scoot sweep escort steer hand grip grab grasp lift shove nudge pick position fetch park rest
        lead send
        """
    ),
    "lift": _words(
        """
        heave boost hike erect get bring collect fetch clutch seize snatch scoop pull grip hoist
        levitate suspend carry move pluck uplift
        """
    ),
}
# verbs that carry no task by themselves, so they neither confirm nor contradict one
LIGHT_VERBS = _words(
    """
    bring get go hold line move place position put rest take use
    """
)

EXTRA_OBJECT_WORDS = {
    "target": "marker",
    "goal": "marker",
    "circle": "marker",
    "dot": "marker",
    "disk": "marker",
    "destination": "marker",
    "brick": "cube",
    "cubes": "cube",
    "blocks": "cube",
    "buttons": "button",
    "pushbutton": "button",
    "markers": "marker",
}

NEGATIONS = _words(
    """
    abort alone anything aren't avoid avoids barely but can't cancel cannot cant didn't doesn't doesnt don't
    dont except forbidden forget halt hardly ignore instead isn't isnt least leave leaving mustn't mustnt
    neither never no none nor not nothing other prevent quit rarely rather refrain refuse seldom shouldn't
    shouldnt skip stop than undo unless untouched without won't wont wouldn't
    """
)

CONDITIONS = _words(
    """
    after all although another because before both each either every first forever if last opposite or other
    repeatedly same second second's third though three thrice times twice two when whenever whether while
    """
)

QUESTIONS = _words(
    """
    are did does has have how is was were what when where which who whom whose why
    """
)

# relation words that turn a sentence into another job; by task
CONTRARY: dict[str, frozenset[str]] = {
    "reach": _words(
        """
        around away behind below beneath beside from leave left off past release under
        """
    ),
    "press": _words(
        """
        away behind beneath beside from left lift next off pull release under unpress up
        """
    ),
    "move": _words(
        """
        around away behind below beneath beside between beyond close closer from left near next off past
        side throw under
        """
    ),
    "lift": _words(
        """
        behind below beneath beside between down drop flat inside into lay lower release under
        """
    ),
}

_ENDINGS = (("ing", ""), ("ing", "e"), ("ed", ""), ("ed", "e"), ("d", ""), ("es", ""), ("s", ""), ("ting", ""),
            ("ping", ""), ("ped", ""), ("bing", ""), ("bed", ""), ("ging", ""), ("ged", ""))  # fmt: skip


def stems(word: str) -> list[str]:
    """The word and what it may be an inflection of: ``lifted`` -> lifted, lift, lifte."""
    cut = [word[: -len(end)] + new for end, new in _ENDINGS if word.endswith(end) and len(word) > len(end) + 1]
    return [word, *cut]


def is_adverb(word: str) -> bool:
    """``gently`` and its kind say how, not what."""
    return len(word) > 4 and word.endswith("ly") and word not in NEGATIONS
