import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torchvision import transforms

from sims.errors import UserError
from vlm_rewards import captions, clip, fitting, small_clip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A randomly initialised small CLIP on disk."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("clip") / "model"
    model = clip.build_model(small_clip.model_config())
    fitting.round_weights(model)
    fitting.save_model(model, path, {})
    return path


@pytest.fixture(scope="module")
def loaded(folder):
    return clip.load_clip(f"local-dir:{folder}")


def frames(n=3, height=64, width=128):
    """Smooth random pictures; on white noise PIL's rounding between its two passes shows."""
    coarse = torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(n))
    fine = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")
    return fine.mul(255).round().byte().permute(0, 2, 3, 1).contiguous()


def test_local_dir_round_trip_is_bit_equal(folder, loaded, tmp_path):
    stored = load_file(folder / "open_clip_model.safetensors")
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value.float(), stored[name].float()), name
    fitting.save_model(loaded.model, tmp_path / "again", {})
    again = clip.load_clip(f"local-dir:{tmp_path / 'again'}")
    assert torch.equal(again.embed_frames(frames()), loaded.embed_frames(frames()))
    assert torch.equal(again.embed_text(["press the red button"]), loaded.embed_text(["press the red button"]))


def test_model_is_in_eval_mode_and_scores_do_not_depend_on_the_batch(loaded):
    assert not any(m.training for m in loaded.model.modules())
    x = frames(5)
    together = loaded.embed_frames(x)
    alone = torch.cat([loaded.embed_frames(f[None]) for f in x])
    assert torch.allclose(together, alone, atol=1e-5)
    loaded.model.train()
    assert not torch.allclose(loaded.embed_frames(x), together, atol=1e-3)  # what train mode would have done
    loaded.model.eval()


@pytest.mark.parametrize("shape", [(64, 128), (96, 120), (200, 300)])
def test_preprocessing_equals_the_pil_path_when_squashing(loaded, shape):
    x = frames(2, *shape)
    pil = transforms.Compose(
        [
            transforms.Resize((64, 128), transforms.InterpolationMode.BICUBIC),
            transforms.ToTensor(),
            transforms.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )
    expected = torch.stack([pil(Image.fromarray(f.numpy())) for f in x])
    assert (loaded.preprocess(x) - expected).abs().max() <= 2 * 2 / 255 + 1e-6  # 2 grey levels; std 0.5 doubles them


@pytest.mark.parametrize("shape", [(100, 100), (96, 120), (130, 70)])
def test_preprocessing_equals_the_pil_path_with_shortest_side_and_crop(shape):
    x = frames(2, *shape)
    pil = transforms.Compose([transforms.Resize(56, transforms.InterpolationMode.BICUBIC), transforms.CenterCrop(56)])
    expected = np.stack([np.asarray(pil(Image.fromarray(f.numpy()))) for f in x])
    ours = clip.resize(x.permute(0, 3, 1, 2), (56, 56), "shortest", "bicubic").permute(0, 2, 3, 1).numpy()
    assert np.abs(ours.astype(int) - expected.astype(int)).max() <= 2


@pytest.mark.parametrize("bad", [frames().float(), frames().permute(0, 3, 1, 2), frames()[0]])
def test_wrong_dtype_or_layout_is_refused(loaded, bad):
    with pytest.raises(UserError, match="uint8 RGB"):
        loaded.preprocess(bad)


def test_unknown_word_is_refused_and_named(loaded):
    with pytest.raises(UserError, match="word 'crimson'"):
        loaded.embed_text(["press the crimson button"])
    with pytest.raises(UserError, match="words; give 1 to"):
        loaded.embed_text(["the " * 30])


def test_tokens_end_with_the_highest_id():
    tokens = fitting.tokenizer()(["press the red button", "there is a blue cube"])
    assert tokens.shape == (2, small_clip.CONTEXT)
    assert tokens.max(1).values.tolist() == [small_clip.VOCABULARY - 1] * 2
    assert tokens.argmax(1).tolist() == [4, 5]  # after the words; open_clip pools there


def test_colours_share_an_id_and_fill_their_slot():
    words = fitting.tokenizer()
    sentences = ["press the red button", "press the yellow button", "reach the marker"]
    ids = words(sentences)
    assert torch.equal(ids[0], ids[1])
    slots = words.slots(sentences)
    assert slots.tolist() == [captions.COLOURS.index("red"), captions.COLOURS.index("yellow"), -1]
    text = torch.arange(3 * small_clip.EMBED).reshape(3, -1).float() + 1
    bound = small_clip.bind(text, slots).unflatten(1, (small_clip.SLOTS, small_clip.BLOCK))
    assert torch.equal(bound[1, slots[1]], text[1, : small_clip.BLOCK])
    assert (bound[1].abs().sum(1) > 0).sum() == 1
    assert torch.equal(bound[2], text[2, : small_clip.BLOCK].expand(small_clip.SLOTS, -1))
    with pytest.raises(UserError, match="2 colours"):
        words.slots(["move the red cube to the blue marker"])


def test_missing_weights_are_refused(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "open_clip_model.safetensors").unlink()
    with pytest.raises(UserError, match="no weights in"):
        clip.load_clip(f"local-dir:{broken}")
    with pytest.raises(UserError, match=r"open_clip_config\.json is missing"):
        clip.load_clip(f"local-dir:{tmp_path / 'nowhere'}")
    with pytest.raises(UserError, match="has no weights"):
        clip.load_clip("ViT-B-32")


def test_damaged_files_are_refused(folder, tmp_path):
    for name in ("open_clip_model.safetensors", "vocab.json", "open_clip_config.json"):
        broken = tmp_path / name
        shutil.copytree(folder, broken)
        path = broken / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(UserError):
            clip.load_clip(f"local-dir:{broken}")


def test_unknown_open_clip_name_is_refused():
    with pytest.raises(UserError, match="does not load"):
        clip.load_clip("ViT-B-33", "openai")


def test_a_plain_square_clip_loads_too(tmp_path):
    """Not only ours: a tiny native ViT from a local folder, with open_clip's own tokenizer."""
    vision = {"image_size": 32, "layers": 1, "width": 64, "head_width": 32, "patch_size": 16}
    text = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
    config = {
        "model_cfg": {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text},
        "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3},
    }
    fitting.save_model(clip.build_model(config), tmp_path / "vit", {})
    (tmp_path / "vit" / "open_clip_config.json").write_text(json.dumps(config))
    (tmp_path / "vit" / "vocab.json").unlink()
    model = clip.load_clip(f"local-dir:{tmp_path / 'vit'}")
    assert model.size == (32, 32)
    assert model.embed_text(["a robot that folds a crimson towel"]).shape == (1, 16)
    assert model.embed_frames(frames(2, 48, 40)).shape == (2, 16)
