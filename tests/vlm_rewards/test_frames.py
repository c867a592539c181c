from itertools import pairwise

import numpy as np
import pytest

from sims.worlds.kinematics import forward
from vlm_rewards import captions, frames, states
from vlm_rewards.captions import COLOURS, UNSEEN

YELLOW = COLOURS.index(UNSEEN[0])


@pytest.fixture(scope="module")
def drawn():
    return frames.render_frames(150, seed=5)


def test_the_unseen_pair_is_in_no_frame(drawn):
    rng = np.random.default_rng(0)
    colours = np.stack([frames.draw_colours(rng) for _ in range(500)])
    assert not (colours[:, 3:] == YELLOW).any()
    assert (colours[:, :3] == YELLOW).any(axis=0).all()  # but on cubes and the marker it is
    assert (colours[:, 1] != colours[:, 2]).all()
    assert (colours[:, 3] != colours[:, 4]).all()
    assert not (drawn.facts.colour[:, 3:] == YELLOW).any()
    forced = np.stack([frames.draw_colours(rng, force_unseen=True) for _ in range(50)])
    assert ((forced[:, 3:] == YELLOW).sum(1) == 1).all()


def test_colours_of_the_palette_do_not_overlap():
    for name in COLOURS:
        assert name in frames.PALETTE
    hues = sorted(h for n, (h, _) in frames.PALETTE.items() if n != "white")
    assert all(a[1] < b[0] for a, b in pairwise(hues))


def test_lit_caps_keep_their_hue():
    """0.9 x emission plus about half diffuse must not clip, or lime and orange turn yellow."""
    rng = np.random.default_rng(0)
    for name in ("orange", "lime"):
        shown = 1.4 * np.stack([frames.colour_rgb(rng, name, "lit") for _ in range(20)])
        assert shown.max() <= 1.02


def test_episodes_are_diverse_and_bounded(drawn):
    assert drawn.pixels.shape == (150, 64, 128, 3)
    assert drawn.pixels.std() > 20
    assert (drawn.facts.tip[:, 2] > -0.002).all()
    assert ((drawn.facts.depth >= 0) & (drawn.facts.depth <= 0.008)).all()
    assert (drawn.facts.depth.max(1) > 0.005).mean() > 0.05
    assert (drawn.facts.distance().min(1) < 0.02).mean() > 0.2


def test_arm_reaches_its_targets():
    target = np.array([[0.2, 0.05, 0.04], [0.15, -0.15, 0.06]])
    q = states.solve_arm(target, np.full(2, -0.95), np.zeros(2), np.full(2, 0.3), np.array([False, True]))
    pose = forward(q)
    assert np.linalg.norm(pose.tip[0] - target[0]) < 0.003
    assert np.linalg.norm(pose.grasp[1] - target[1]) < 0.003


def test_projection_finds_a_lit_cap():
    """The brightest spot that appears when a cap lights up lies where the projection says."""
    one = frames.render_frames(60, seed=3, plain=True, mix={"press": 1})
    lit = np.flatnonzero(one.facts.depth.max(1) > 0.005)
    hits = 0
    for i in lit:
        slot = 1 + 3 + int(one.facts.depth[i].argmax())
        right, down = one.where[i, 0, slot]
        x, y = int(right * 64), int(down * 64)
        hits += one.pixels[i, max(y - 3, 0) : y + 4, max(x - 3, 0) : x + 4].max() > 150
    assert len(lit) > 3
    assert hits >= 0.6 * len(lit)  # the hand hides some


def test_same_seed_same_frames_and_cache_round_trip(tmp_path):
    a = frames.cached_frames(tmp_path, count=9, seed=7)
    b = frames.cached_frames(tmp_path, count=9, seed=7)
    c = frames.render_frames(9, seed=7)
    assert (a.pixels == b.pixels).all()
    assert (a.pixels == c.pixels).all()
    assert (b.facts.pos == c.facts.pos).all()
    assert len(list(tmp_path.iterdir())) == 1
    frames.cached_frames(tmp_path, count=9, seed=8)
    assert len(list(tmp_path.iterdir())) == 2


def test_concepts_occur():
    drawn = frames.render_frames(600, seed=6, mix=dict.fromkeys(states.MIX, 1.0))
    concepts = [c for c in captions.concepts() if c.positive]
    truth = captions.truth(drawn.facts, concepts)
    for family in captions.FAMILIES:
        columns = [i for i, c in enumerate(concepts) if c.family == family]
        assert (truth[:, columns] == 1).any(), family
