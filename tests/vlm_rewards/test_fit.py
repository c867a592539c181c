import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from sims.errors import UserError
from sims.verbs import compose
from vlm_rewards import captions, fitting, teacher
from vlm_rewards.config import FitConfig
from vlm_rewards.fit import VERB
from vlm_rewards.frames import render_frames
from vlm_rewards.small_clip import Hints


def tiny(out, **changes):
    options = {
        "frames": 60,
        "eval_frames": 60,
        "steps": 4,
        "colour_steps": 3,
        "warmup": 1,
        "batch_size": 12,
        "log_every": 2,
    } | changes
    return FitConfig(out=str(out), **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("fit")
    return fitting.fit(tiny(out / "a", cache=str(out / "cache"))), out


def test_fit_writes_model_card_and_progress(run):
    folder, out = run
    names = {p.name for p in folder.iterdir()}
    assert names == {"open_clip_model.safetensors", "open_clip_config.json", "vocab.json", "card.json"}
    rows = [json.loads(line) for line in (out / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [1, 3, 4]
    assert {"stage", "total", "steps_per_s", "loss", "contrast", "rank", "spots", "kind"} <= rows[0].keys()
    card = json.loads((folder / "card.json").read_text())
    assert {"seen", "seen_cubes", "unseen", "unseen_plain"} == card["sets"].keys()


def test_fit_is_deterministic_and_depends_on_its_seed(run):
    out = run[1]
    frames = render_frames(60, seed=1)
    torch.set_num_threads(1)
    a, b, c = (fitting.train_model(tiny(out, seed=s), frames).state_dict() for s in (0, 0, 1))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not all(torch.equal(a[k], c[k]) for k in a)


def test_finished_folder_is_reused_and_other_settings_are_not(run, capsys):
    folder, out = run
    before = (folder / "card.json").stat().st_mtime_ns
    fitting.fit(tiny(out / "a", cache=str(out / "cache")))
    assert (folder / "card.json").stat().st_mtime_ns == before
    assert "nothing to do" in capsys.readouterr().out
    fitting.fit(tiny(out / "a", cache=str(out / "cache"), steps=3))
    assert (folder / "card.json").stat().st_mtime_ns != before


def test_targets_line_up():
    frames = render_frames(30, seed=2)
    targets = fitting.make_targets(frames)
    wanted = [captions.concepts()[i] for i in targets.goals]
    assert targets.progress.shape == (30, len(wanted))
    for family, columns in targets.rivals.items():
        row, slot = 4, 0
        concept = wanted[int(columns[row, slot])]
        first = captions.SLOT_KIND.index(captions.FAMILIES[family][0])
        assert concept.family == family
        assert captions.COLOURS.index(concept.colour) == frames.facts.colour[row, first]
    chances = fitting.sampling_weights(targets)
    assert chances.sum() == pytest.approx(1.0)
    assert (chances > 0).all()


def test_augmentation_keeps_hue_sides_and_range():
    red_left = np.zeros((16, 64, 128, 3), dtype=np.uint8)
    red_left[:, :, :64, 0] = 128
    x = fitting.augment(torch.from_numpy(red_left), np.random.default_rng(0)) * 0.5 + 0.5
    assert x.shape == (16, 3, 64, 128)
    assert (x >= 0).all()
    assert (x <= 1).all()
    gap = x[:, 0, :, :64].mean((1, 2)) - x[:, 0, :, 64:].mean((1, 2))
    assert (gap > 0.2).all()
    assert (x[:, 1] - x[:, 2]).abs().max() < 1e-6


def test_teacher_reads_the_right_place():
    """The gradient of the colour loss touches only the places where objects are."""
    drawn = render_frames(3, seed=4, plain=True)
    logits = [torch.zeros(3, 2, n, 256, requires_grad=True) for n in (2, 10, 5)]
    hints = teacher.Teacher(drawn)
    parts = hints.losses(Hints(*logits), torch.arange(3))
    parts["colour"] = hints.colour_loss(logits[1], torch.arange(3))
    assert [parts[k].item() for k in ("spots", "colour", "kind", "nothing")] == pytest.approx(
        np.log([256, 10, 5, 5]).tolist(), abs=1e-4
    )  # uniform logits
    parts["colour"].backward()
    touched = logits[1].grad.abs().sum(2)  # (3, 2, 256)
    for i in range(3):
        for view in range(2):
            inside = [(r, d) for r, d in drawn.where[i, view, 1:] if 0 <= r < 1 and 0 <= d < 1]
            assert set(touched[i, view].nonzero().flatten().tolist()) == {
                int(d * 16) * 16 + int(r * 16) for r, d in inside
            }


@pytest.mark.parametrize("bad", [["stepss=3"], ["+stepss=3"], ["steps=0"], ["warmup=9999"], ["steps=many"]])
def test_bad_options_are_refused(bad):
    with pytest.raises(UserError):
        compose(VERB, bad)


def test_help_names_every_option():
    out = subprocess.run(
        [sys.executable, "-m", "vlm_rewards.fit", "--help"], capture_output=True, text=True, check=True
    )
    assert "rank_weight" in out.stdout
    assert "examples" in out.stdout


def test_config_is_torch_free():
    code = "import sys, vlm_rewards, vlm_rewards.config, vlm_rewards.fit; assert 'torch' not in sys.modules and 'open_clip' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
