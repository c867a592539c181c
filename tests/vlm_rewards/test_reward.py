from types import SimpleNamespace

import pytest
import torch

from sims.errors import UserError
from vlm_rewards import build_reward, captions, card, metrics
from vlm_rewards.captions import Concept
from vlm_rewards.clip import WEIGHTS, load_clip
from vlm_rewards.config import ClipReward, EnvReward
from vlm_rewards.frames import render_frames

SENTENCE = "press the yellow button"


@pytest.fixture(scope="module")
def model():
    return build_reward(ClipReward(batch_size=7), SENTENCE)


def segment(steps, envs, size=64):
    shape = (steps, envs, size, size, 3)
    generator = torch.Generator().manual_seed(steps)
    pixels = {
        f"pixels/{c}": torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for c in ("front", "side")
    }
    return SimpleNamespace(next_obs=pixels)


def test_env_reward_builds_to_nothing():
    assert build_reward(EnvReward()) is None


@pytest.mark.parametrize(("steps", "envs"), [(1, 1), (3, 5), (4, 2)])
def test_ragged_batches_give_the_same_rewards(model, steps, envs):
    data = segment(steps, envs)
    rewards = model.score(data)
    assert rewards.shape == (steps, envs)
    assert rewards.dtype == torch.float32
    assert not rewards.requires_grad
    whole = build_reward(ClipReward(batch_size=1000), SENTENCE).score(data)
    assert torch.allclose(rewards, whole, atol=1e-5)
    assert ((rewards >= 0) & (rewards <= 1.5)).all()


def test_views_are_tiled_front_then_side(model):
    data = segment(1, 1)
    swapped = SimpleNamespace(
        next_obs={"pixels/front": data.next_obs["pixels/side"], "pixels/side": data.next_obs["pixels/front"]}
    )
    own, other = (model.embed([d.next_obs[f"pixels/{c}"][0] for c in model.cameras]) for d in (data, swapped))
    assert not torch.allclose(own, other, atol=1e-3)


def test_stride_holds_between(model):
    data = segment(5, 2)
    every = model.score(data)
    held = build_reward(ClipReward(stride=2), SENTENCE).score(data)
    assert torch.allclose(held, every[[0, 0, 2, 2, 4]], atol=1e-5)


def test_missing_camera_is_named(model):
    with pytest.raises(UserError, match="camera\\(s\\) side"):
        model.score(SimpleNamespace(next_obs={"pixels/front": torch.zeros(1, 1, 64, 64, 3, dtype=torch.uint8)}))


@pytest.mark.parametrize(
    ("change", "sentence", "message"),
    [
        ({}, "", "needs a sentence"),
        ({}, "press the crimson button", "crimson"),
        ({}, "the button yellow press", "not in the grammar"),
        ({"cameras": ["front"]}, SENTENCE, "2 tiled views"),
        ({"negatives": ["fold the towel"]}, SENTENCE, "fold"),
    ],
)
def test_mistakes_are_explained(change, sentence, message):
    with pytest.raises(UserError, match=message):
        build_reward(ClipReward(**change), sentence)


@pytest.mark.parametrize(
    "change", [{"form": "sum"}, {"alpha": 2.0}, {"stride": 0}, {"form": "projection"}, {"cameras": []}]
)
def test_bad_options_are_refused(change):
    with pytest.raises(ValueError, match=r"reward\."):
        ClipReward(**change)


def test_forms():
    data = segment(2, 2)
    cosine = build_reward(ClipReward(form="cosine"), SENTENCE).score(data)
    still = build_reward(ClipReward(form="projection", baseline="there is a red cube", alpha=0.0), SENTENCE).score(data)
    assert torch.allclose(cosine, still, atol=1e-5)  # alpha 0 is the cosine
    binary = build_reward(ClipReward(form="softmax"), SENTENCE).score(data)
    assert set(binary.flatten().tolist()) <= {0.0, 1.0}
    dense = build_reward(ClipReward(gate_scale=0.0), SENTENCE).score(data)
    both = build_reward(ClipReward(), SENTENCE).score(data)
    assert torch.allclose(both, dense + binary, atol=1e-5)


# --- the weights that ship --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fresh():
    """Frames of the pair that fit never showed; seeds that neither fit nor its card used."""
    return render_frames(360, seed=777, unseen=True, mix=card.PRESSES)


def test_shipped_weights_are_small_and_carry_their_card():
    size = sum(p.stat().st_size for p in WEIGHTS.iterdir())
    assert size < 5e6
    clip = load_clip("shipped")
    assert 0.5e6 < sum(p.numel() for p in clip.model.parameters()) < 1.5e6
    assert clip.card["supervision"]["never_shown"] == "yellow button"
    for name in ("unseen", "unseen_plain"):
        row = clip.card["sets"][name]["press"]
        assert row["auroc"] >= 0.95
        assert row["spearman"] >= 0.7
    for family in captions.GOALS:
        numbers = clip.card["calibration"][family]
        assert numbers["low"] < numbers["high"]
        assert 0.5 <= numbers["threshold"] < 1


def test_shipped_weights_know_a_pair_they_never_saw(model, fresh):
    goal = Concept("press", True, "button", "yellow")
    truth = captions.truth(fresh.facts, [goal])[:, 0]
    progress = captions.progress(fresh.facts, [goal])[:, 0]
    pixels = torch.from_numpy(fresh.pixels)
    x = model.embed([pixels[:, :, :64], pixels[:, :, 64:]])
    score, reward = (x @ model.goal).numpy(), model.reward(x).numpy()
    assert (truth == 1).sum() >= 20
    assert metrics.auroc(score[truth >= 0], truth[truth >= 0] == 1) >= 0.95
    assert metrics.spearman(score, progress) >= 0.7
    assert (reward[truth == 1] >= 1.0).mean() >= 0.8  # the gate opens
    assert (reward[truth == 0] >= 1.0).mean() <= 0.05
    other = (truth == 0) & (fresh.facts.depth.max(1) > 0.005)  # the other button is down
    assert other.sum() >= 10
    assert (reward[other] >= 1.0).mean() <= 0.1
