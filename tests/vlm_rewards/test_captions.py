import re
from collections import defaultdict

import numpy as np
import pytest

from sims.errors import UserError
from sims.worlds.language import sentences
from vlm_rewards import captions
from vlm_rewards.captions import COLOURS, Concept, Facts

SEEN = [(c, s) for c in captions.concepts() for s in captions.phrasings(c)]


def test_the_unseen_pair_is_in_no_caption():
    colour, kind = captions.UNSEEN
    assert not [s for _, s in SEEN if colour in s.split() and re.search(rf"\b{kind}s?\b", s)]
    # while the word alone is well known
    assert sum(colour in s.split() for _, s in SEEN) > 50
    assert sum(kind in s.split() for _, s in SEEN) > 50


def _skeleton(sentence):
    return re.sub(rf"\b({'|'.join(COLOURS)})\b", "{c}", sentence)


def test_every_skeleton_has_every_colour():
    colours = defaultdict(set)
    for concept, sentence in SEEN:
        if concept.colour:
            colours[_skeleton(sentence), concept.kind].add(concept.colour)
    for (skeleton, kind), found in colours.items():
        assert found == {c for c in COLOURS if (c, kind) != captions.UNSEEN}, skeleton


def test_every_word_occurs_in_both_polarities():
    by_polarity = {True: set(), False: set()}
    for concept, sentence in SEEN:
        if concept.family != "exist":
            by_polarity[concept.positive] |= set(sentence.split())
    # "do" only marks a denied command; "not" occurs on both sides (not released / not pressed)
    assert by_polarity[True] ^ by_polarity[False] <= {"do"}


def test_no_sentence_means_two_things():
    meaning = defaultdict(set)
    for concept in captions.concepts(include_unseen=True):
        for sentence in captions.phrasings(concept):
            meaning[sentence].add(concept)
    assert not {s: m for s, m in meaning.items() if len(m) > 1}


@pytest.mark.parametrize("variant", ["press_yellow", "press_green", "lift_red", "move_blue", "reach"])
def test_training_sentences_of_the_jobs_are_in_the_grammar(variant):
    for sentence in sentences(variant):
        concept = captions.concept_of(sentence)
        assert concept.positive
        assert variant.startswith(concept.family)


def test_sentence_outside_the_grammar_is_refused():
    with pytest.raises(UserError, match="fold the red towel"):
        captions.concept_of("fold the red towel")


def test_negatives_are_false_when_the_goal_holds():
    facts = _facts(depth=(0.0, 0.007), colours=(0, 1, 2, 3, 4))
    goal = Concept("press", True, "button", COLOURS[4])
    assert captions.truth(facts, [goal])[0, 0] == 1
    against = [captions.concept_of(s) for s in captions.negatives(goal)]
    assert len(against) >= len(COLOURS)
    assert not captions.truth(facts, against).any()


def _facts(depth=(0.0, 0.0), colours=(0, 1, 2, 3, 4), tip=(0.2, 0.2, 0.2), cube=(0.1, 0.1, 0.015)):
    pos = np.array([[[0.2, 0, 0], cube, [0.2, -0.1, 0.015], [0.15, 0.2, 0.036], [0.15, -0.2, 0.036]]])
    pos[0, 3:, 2] -= depth
    return Facts(np.array([colours]), np.array([tip]), pos, np.array([depth]))


def test_truth_by_hand():
    red, other = COLOURS[3], COLOURS[4]
    press = [Concept("press", p, "button", c) for c in (red, other) for p in (True, False)]
    assert captions.truth(_facts(depth=(0.006, 0.0)), press).tolist() == [[1, 0, 0, 1]]
    assert captions.truth(_facts(depth=(0.004, 0.0)), press[:2]).tolist() == [[-1, -1]]  # neither up nor down
    absent = Concept("press", False, "button", COLOURS[9])
    assert captions.truth(_facts(), [absent]).tolist() == [[0]]  # no such button: nothing is said of it
    lift = [Concept("lift", p, "cube", COLOURS[1]) for p in (True, False)]
    assert captions.truth(_facts(cube=(0.1, 0.1, 0.115)), lift).tolist() == [[1, 0]]
    assert captions.truth(_facts(cube=(0.1, 0.1, 0.015)), lift).tolist() == [[0, 1]]
    move = [Concept("move", p, "cube", COLOURS[1]) for p in (True, False)]
    assert captions.truth(_facts(cube=(0.21, 0.01, 0.015)), move).tolist() == [[1, 0]]  # 14 mm from the marker
    assert captions.truth(_facts(cube=(0.21, 0.01, 0.115)), move).tolist() == [[-1, -1]]  # above it, not on it


def test_press_progress_by_hand():
    goal = [Concept("press", True, "button", COLOURS[3]), Concept("press", True, "button", COLOURS[9])]
    done = captions.progress(_facts(depth=(0.006, 0.0), tip=(0.15, 0.2, 0.030)), goal)
    assert done[0, 0] == pytest.approx(1.0)  # at the cap, 6 mm down
    assert np.isnan(done[0, 1])  # no such button
    far = captions.progress(_facts(tip=(0.15, 0.2, 0.136)), goal[:1])[0, 0]
    assert far == pytest.approx(0.5 * (1 - np.tanh(0.6)) + 0.25 * (1 - np.tanh(2.5)), abs=1e-6)
