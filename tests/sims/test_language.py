"""Sentences: coverage of colours, separation of training and held-out phrasings."""

import itertools

import pytest

from sims.worlds import language
from sims.worlds.variants import VARIANTS, variants_of


@pytest.mark.parametrize("variant", VARIANTS)
def test_enough_phrasings_and_no_template_shared(variant):
    train, heldout = (language.skeletons(variant, p) for p in ("train", "heldout"))
    assert len(set(train)) == len(train) >= 12
    assert len(set(heldout)) == len(heldout) >= 6
    assert not set(train) & set(heldout)
    assert not set(language.sentences(variant, "train")) & set(language.sentences(variant, "heldout"))


@pytest.mark.parametrize("phrasings", ["train", "heldout"])
def test_every_skeleton_has_every_colour(phrasings):
    for task in ("press", "move", "lift"):
        jobs = variants_of(task)
        by_job = [[s.replace(language.colour_of(j), "{c}") for s in language.sentences(j, phrasings)] for j in jobs]
        assert all(x == by_job[0] for x in by_job)
        assert all("{c}" in s for s in by_job[0])


def test_a_sentence_means_one_job():
    for phrasings in ("train", "heldout"):
        for a, b in itertools.combinations(VARIANTS, 2):
            assert not set(language.sentences(a, phrasings)) & set(language.sentences(b, phrasings)), (a, b)


def test_vocabulary_covers_the_sentences_and_refuses_only_others():
    for variant, job in VARIANTS.items():
        for sentence in language.sentences(variant) + language.sentences(variant, "heldout"):
            words = sentence.replace(",", "").split()
            assert not set(words) & set(language.NEGATIONS), sentence
            assert not set(words) & set(language.OTHER_COLOURS), sentence
            assert not set(words) & set(language.OTHER_VERBS), sentence
            kinds = {language.OBJECT_WORDS[w] for w in words if w in language.OBJECT_WORDS}
            assert kinds, sentence
            colour = language.colour_of(variant)
            assert {w for w in words if w in language.COLOURS} == ({colour} if colour else set()), sentence
            if job.task != "reach":
                assert colour in language.OBJECT_COLOURS[job.goal.split("_")[1]]
