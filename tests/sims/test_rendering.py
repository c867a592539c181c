"""Pictures: what is where, the lit button, looks that can be undone."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sims.errors import UserError
from sims.rendering import SceneRenderer, sample_look
from sims.worlds import tabletop

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def renderer():
    renderer = SceneRenderer(tabletop.load_model(), size=96)
    yield renderer
    renderer.close()


@pytest.fixture(scope="module")
def layout():
    return tabletop.sample_layout(np.random.default_rng(3))


def share(frame, channel):
    """Share of pixels in which one channel clearly leads."""
    rest = np.delete(frame.astype(int), channel, axis=2).max(axis=2)
    return float((frame[..., channel].astype(int) > rest + 60).mean())


@pytest.mark.parametrize("camera", tabletop.CAMERAS)
def test_both_cubes_are_seen(renderer, layout, camera):
    frame = renderer.render_state(layout.qpos, layout.mocap, (camera,))[0]
    assert frame.shape == (96, 96, 3)
    assert frame.dtype == np.uint8
    assert 0.002 < share(frame, 0) < 0.05
    assert 0.002 < share(frame, 2) < 0.05
    assert 40 < frame.mean() < 200


def test_only_a_pressed_button_lights_up(renderer, layout):
    frames = []
    for travel in (0.0, -0.0045, -0.0055):
        qpos = layout.qpos
        qpos[-2] = travel
        frames.append(renderer.render_state(qpos, layout.mocap, ("front",))[0])
    bright = [int(((f[..., 1] > 200) & (f[..., 0] < 160)).sum()) for f in frames]
    assert bright[0] == bright[1] == 0
    assert bright[2] > 20


def test_a_look_changes_the_picture_and_can_be_undone(renderer, layout):
    plain = renderer.render_state(layout.qpos, layout.mocap)
    renderer.set_look(sample_look(np.random.default_rng(0)))
    changed = renderer.render_state(layout.qpos, layout.mocap)
    renderer.set_look(None)
    again = renderer.render_state(layout.qpos, layout.mocap)
    for a, b, c in zip(plain, changed, again):
        assert np.abs(a.astype(int) - b).mean() > 3
        assert np.array_equal(a, c)


def test_colours_keep_their_names(renderer, layout):
    rng = np.random.default_rng(1)
    for _ in range(20):
        colours = sample_look(rng).colours
        assert colours["red_cube"].argmax() == 0
        assert colours["blue_cube"].argmax() == 2
        assert colours["green_button"].argmax() == 1
        assert colours["yellow_button"][2] < 0.3 < colours["yellow_button"][:2].min()


def test_two_renderers_do_not_disturb_each_other(renderer, layout):
    alone = renderer.render_state(layout.qpos, layout.mocap, ("side",))[0]
    other = SceneRenderer(tabletop.load_model(), ("front",), size=(32, 48))
    assert other.render_state(layout.qpos, layout.mocap)[0].shape == (32, 48, 3)
    assert np.array_equal(renderer.render_state(layout.qpos, layout.mocap, ("side",))[0], alone)
    other.close()
    other.close()


def test_unknown_camera(renderer):
    with pytest.raises(UserError, match="unknown camera 'top'"):
        SceneRenderer(tabletop.load_model(), ("top",))


def test_libraries_that_clash_with_the_driver_can_be_imported_after_a_picture():
    """torchvision, first imported after Mesa's driver was loaded, brought the process down without a word."""
    code = (
        "from sims.rendering import SceneRenderer; from sims.worlds.tabletop import load_model;"
        "SceneRenderer(load_model(), ('front',), 16); import torchvision, open_clip"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
