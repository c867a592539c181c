"""Policy artefacts and checkpoints: same actions as torch, and damage is found and named."""

import json
import shutil
import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.numpy import load_file, save_file
from toy_worlds import Point, proprio

from control.checkpoint import load_checkpoint, save_checkpoint, sha256
from control.config import ALGOS
from control.dsact import DSACT
from control.export import ActorModule, action_scale, export_policy
from control.policy import document_digest, load_policy
from control.sac import SAC
from sims.errors import UserError
from sims.types import ArraySpec, EnvSpec


def _learner(name="dsact"):
    cfg = ALGOS[name](gamma=0.9, width=16, normalize=True)
    learner = {"sac": SAC, "dsact": DSACT}[name](2, 2, cfg, seed=4)
    learner.normalizer.update(torch.randn(50, 2) * 3 + 1)
    return learner


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("artefact") / "policy"
    env, learner = Point(6), _learner()
    obs = {**env.reset(0), "unused": torch.zeros(6, 3)}
    return export_policy(ActorModule(proprio, learner, env.spec), env.spec, obs, path, extra={"note": 1}), learner


@pytest.fixture
def policy_dir(exported, tmp_path):
    return shutil.copytree(exported[0], tmp_path / "policy")


def test_artefact_acts_like_the_learner_for_any_batch(exported):
    path, learner = exported
    policy = load_policy(path)
    centre, half = action_scale(policy.spec.env)
    for batch in (1, 5, 40):
        obs = torch.randn(batch, 2) * 3
        want = centre + half * learner.act(obs, explore=False)
        actions, state = policy({"proprio": obs.numpy()})
        assert actions.shape == (batch, 1, 2)
        assert state is None
        assert np.abs(actions[:, 0] - want.numpy()).max() < 1e-6


def test_module_that_freezes_its_batch_size_is_refused(tmp_path):
    class Frozen(torch.nn.Module):
        def forward(self, obs):
            return obs["proprio"][:, None] + torch.zeros(int(obs["proprio"].shape[0]), 1, 1)

    with pytest.raises(Exception, match="batch"):
        export_policy(Frozen(), Point().spec, Point(6).reset(0), tmp_path / "p")


def test_spec_round_trips_and_lists_only_the_used_inputs(exported):
    spec = load_policy(exported[0]).spec
    assert spec.inputs == ("proprio",)
    assert spec.env == Point().spec
    assert (spec.action_meaning, spec.chunk, spec.execute, spec.language) == ("native", 1, 1, None)
    assert spec.extra == {"note": 1}


@pytest.mark.parametrize("name", ["policy.onnx", "weights.safetensors", "golden.safetensors", "spec.json"])
def test_missing_file_is_named(policy_dir, name):
    (policy_dir / name).unlink()
    with pytest.raises(UserError, match=name):
        load_policy(policy_dir)


@pytest.mark.parametrize("name", ["policy.onnx", "weights.safetensors", "golden.safetensors", "spec.json"])
def test_flipped_byte_is_found(policy_dir, name):
    data = bytearray((policy_dir / name).read_bytes())
    data[len(data) // 2] ^= 0xFF
    (policy_dir / name).write_bytes(bytes(data))
    with pytest.raises(UserError, match=r"damaged policy|golden"):
        load_policy(policy_dir)


def test_changed_limit_in_the_spec_is_found(policy_dir):
    text = (policy_dir / "spec.json").read_text()
    (policy_dir / "spec.json").write_text(text.replace("0.3", "3.3"))
    with pytest.raises(UserError, match=r"checksum of spec\.json"):
        load_policy(policy_dir)


def test_altered_weights_are_refused_by_the_golden_vectors_even_with_matching_checksums(policy_dir):
    graph = onnx.load(policy_dir / "policy.onnx")
    tensor = max(graph.graph.initializer, key=lambda t: numpy_helper.to_array(t).size)
    changed = numpy_helper.from_array(numpy_helper.to_array(tensor) * 1.01, tensor.name)
    tensor.CopyFrom(changed)
    onnx.save(graph, policy_dir / "policy.onnx")
    _sign(policy_dir)
    with pytest.raises(UserError, match="golden vectors"):
        load_policy(policy_dir)


def test_nan_in_golden_output_is_refused(policy_dir):
    golden = load_file(policy_dir / "golden.safetensors")
    golden["output"] = golden["output"] * np.nan
    save_file(golden, policy_dir / "golden.safetensors")
    _sign(policy_dir)
    with pytest.raises(UserError, match="golden vectors"):
        load_policy(policy_dir)


def _sign(folder):
    document = json.loads((folder / "spec.json").read_text())
    document["sha256"] = {name: sha256(folder / name) for name in document["sha256"]}
    document["digest"] = document_digest(document)
    (folder / "spec.json").write_text(json.dumps(document))


def test_missing_folder_and_wrong_observation_are_explained(exported, tmp_path):
    with pytest.raises(UserError, match="no policy at"):
        load_policy(tmp_path / "nowhere")
    policy = load_policy(exported[0])
    with pytest.raises(UserError, match="needs the observation group 'proprio'"):
        policy({"objects": np.zeros((1, 2))})
    with pytest.raises(UserError, match="shape"):
        policy({"proprio": np.zeros((1, 3))})


def test_policy_is_torch_free(exported):
    code = f"import sys; from control.policy import load_policy; load_policy({str(exported[0])!r}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [((), (), "finite"), ((-1.0, -np.inf), (1.0, 1.0), "finite"), ((-1.0, 1.0), (1.0, 1.0), "empty")],
)
def test_bounds_that_cannot_scale_an_action_are_refused(low, high, message):
    spec = EnvSpec("toy", {}, ArraySpec((2,), low=low, high=high), 10.0, 5)
    with pytest.raises(UserError, match=message):
        action_scale(spec)


STATE = {
    "a": torch.arange(6).view(2, 3), "b": {"c": [1, 2.5, None, "x", True], "d": np.arange(3, dtype=np.uint64)},
    "big": 2**100, 5: "integer key", "empty": torch.empty(0, 3), "half": torch.ones(2, dtype=torch.bfloat16),
}  # fmt: skip


def test_checkpoint_round_trip(tmp_path):
    save_checkpoint(tmp_path / "c", STATE)
    save_checkpoint(tmp_path / "c", STATE)  # replacing works
    back = load_checkpoint(tmp_path / "c")
    assert list(back) == list(STATE)
    assert torch.equal(back["a"], STATE["a"])
    assert back["b"]["c"] == STATE["b"]["c"]
    assert back["b"]["d"].dtype == np.uint64
    assert (back["big"], back[5], back["half"].dtype) == (2**100, "integer key", torch.bfloat16)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_checkpoint_survives_a_kill_between_the_two_renames(tmp_path):
    save_checkpoint(tmp_path / "c", {"n": 1})
    (tmp_path / "c").rename(tmp_path / "c.old")
    assert load_checkpoint(tmp_path / "c") == {"n": 1}
    save_checkpoint(tmp_path / "c", {"n": 2})
    assert load_checkpoint(tmp_path / "c") == {"n": 2}


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors"])
@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
def test_damaged_checkpoint_is_a_user_error(tmp_path, name, how):
    save_checkpoint(tmp_path / "c", STATE)
    file = tmp_path / "c" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x01
    file.unlink() if how == "missing" else file.write_bytes(
        bytes(data[: len(data) // 2]) if how == "truncated" else bytes(data)
    )
    with pytest.raises(UserError, match="damaged checkpoint"):
        load_checkpoint(tmp_path / "c")


def test_failed_save_keeps_the_last_checkpoint(tmp_path):
    save_checkpoint(tmp_path / "c", {"n": 1})
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path / "c", {"n": object()})
    assert load_checkpoint(tmp_path / "c") == {"n": 1}
