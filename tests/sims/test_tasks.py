"""Scripts solve their tasks; features are what they claim and export to ONNX."""

import numpy as np
import pytest
import torch

from sims.features import FEATURES, _Hand, feature_dim, tabletop_goal
from sims.registry import make
from sims.tasks import TASKS
from sims.tasks.scripted import MixedScript
from sims.worlds.variants import EPISODE_STEPS, VARIANTS


@pytest.mark.parametrize(("split", "least"), [("train", 0.9), ("heldout", 0.8)])
def test_scripts_solve_every_job(split, least):
    jobs = [name for name in VARIANTS for _ in range(12)]
    env = make("tabletop", len(jobs), seed=11, fixed_variants=jobs, split=split)
    obs, script = env.reset(11), MixedScript(env)
    done = np.zeros(len(jobs))
    for t in range(max(EPISODE_STEPS.values())):
        limits = env._limits[env.variant_ids] - 1
        step = env.step(script.act(obs))
        obs = step.obs
        done = np.where(limits == t, step.metrics["success"].numpy(), done)
    rates = {name: done[[j == name for j in jobs]].mean() for name in VARIANTS}
    assert min(rates.values()) >= least, rates
    assert env.diverged == 0


def test_every_task_is_complete():
    for name, task in TASKS.items():
        assert task.name == name
        assert task.variants
        assert all(VARIANTS[v].task == name for v in task.variants)
        env = make(f"tabletop/{name}", 3, seed=0)
        action = task.demonstrator(env).act(env.reset(0))
        assert action.shape == (3, 6)
        assert action.dtype == torch.float32
        assert (action.abs() <= torch.tensor(env.spec.action.high) + 1e-6).all()


def test_the_moving_fingertip_follows_from_proprio():
    env = make("tabletop/lift", 8, seed=0)
    for _ in range(5):
        obs = env.step(torch.randn(8, 6) * 0.1).next_obs
    assert _Hand(obs["proprio"]).jaw_tip.numpy() == pytest.approx(env._sensors["jaw_tip/pos"], abs=1e-5)


def test_a_colour_is_only_a_slot_to_the_specialist():
    # swapping the cubes' slots and the goal must not change what the specialist sees
    env = make("tabletop/lift_red", 4, seed=0)
    obs = env.reset(0)
    objects, goal = obs["objects"].clone(), torch.zeros_like(obs["goal"])
    objects[:, 3:11], objects[:, 11:19] = obs["objects"][:, 11:19], obs["objects"][:, 3:11]
    goal[:, 2] = 1.0
    assert torch.equal(tabletop_goal(obs), tabletop_goal({**obs, "objects": objects, "goal": goal}))


@pytest.mark.parametrize("name", FEATURES)
def test_features_are_finite_even_on_zeros_and_export(name, tmp_path):
    env = make("tabletop", 3, seed=0)
    obs = {k: v for k, v in env.reset(0).items() if k != "instruction"}
    out = FEATURES[name](obs)
    assert out.shape == (3, feature_dim(env.spec, name))
    assert torch.isfinite(FEATURES[name]({k: torch.zeros_like(v) for k, v in obs.items()})).all()
    assert out.abs().max() < 30

    ort = pytest.importorskip("onnxruntime")

    class Module(torch.nn.Module):
        def forward(self, proprio, objects, goal):
            return FEATURES[name]({"proprio": proprio, "objects": objects, "goal": goal})

    path, args = tmp_path / "f.onnx", tuple(obs[k] for k in ("proprio", "objects", "goal"))
    torch.onnx.export(Module(), args, path, input_names=["proprio", "objects", "goal"], dynamo=False)
    session = ort.InferenceSession(path)
    feed = {i.name: obs[i.name].numpy() for i in session.get_inputs()}
    assert session.run(None, feed)[0] == pytest.approx(out.numpy(), abs=1e-5)
