"""The generalist: arithmetic of chunks, learning a toy, export equal to torch, exact resume."""

import json
import shutil

import numpy as np
import pytest
import torch

from control.policy import load_policy
from distill.collect import Noise, collect
from distill.config import CollectConfig, DistillConfig, Specialists
from distill.dagger import share_worlds
from distill.dataset_check import validate
from distill.generalist import ChunkActor, FilmMLP, chunk_targets, commanded, corrected_targets, fit_scaling
from distill.samples import Sentences, _drop, _meaningful
from distill.text_gate import load_language, make_language
from distill.train import Trainer, distill
from sims.errors import UserError


def test_chunks_are_sums_of_steps_and_stop_at_the_end():
    # steps 1, 2, 4; chunk 2. From t=0: 1, 1+2. From t=1: 2, 2+4. From t=2: 4, then the episode is over.
    target, valid = chunk_targets(torch.tensor([[1.0], [2.0], [4.0]]), 2)
    assert target[..., 0].tolist() == [[1, 3], [2, 6], [4, 4]]
    assert valid.tolist() == [[True, True], [True, True], [True, False]]


def test_corrected_chunks_use_the_targets_that_were_commanded():
    # targets 10, 11, 15 were commanded, the teacher would have stepped 1, 2, 4 -> wanted 11, 13, 19
    target, valid = corrected_targets(torch.tensor([[10.0], [11.0], [15.0]]), torch.tensor([[1.0], [2.0], [4.0]]), 2)
    assert target[..., 0].tolist() == [[1, 3], [2, 8], [4, 4]]
    assert valid.tolist() == [[True, True], [True, True], [True, False]]


def test_both_kinds_of_chunk_agree_where_the_teacher_drove():
    actions = torch.randn(9, 6)
    targets = torch.cat([torch.zeros(1, 6), actions.cumsum(0)])[:-1] + 3
    (a, valid), (b, _) = chunk_targets(actions, 4), corrected_targets(targets, actions, 4)
    torch.testing.assert_close(a[valid], b[valid])


def proprio_at(target: torch.Tensor) -> torch.Tensor:
    """(B, 30) proprioception whose commanded target is ``target``: q = target - 0.1, lead 0.1."""
    out = torch.zeros(len(target), 30)
    out[:, 0:6], out[:, 12:18] = target - 0.1, 0.1
    return out


def test_chunk_actor_follows_its_plan_and_looks_again():
    calls = []

    def policy(obs):
        calls.append(commanded(obs["proprio"])[:, 0].tolist())
        return torch.tensor([0.1, 0.3, 0.6]).reshape(1, 3, 1).expand(2, 3, 6)

    actor = ChunkActor(policy, execute=2, limits=torch.full((6,), 0.25))
    target = torch.tensor([[0.0] * 6, [1.0] * 6])
    moved = []
    for step in range(3):
        if step == 1:
            actor.restart(torch.tensor([False, True]))
        delta = actor({"proprio": proprio_at(target)})
        target = target + delta
        moved.append(delta[:, 0].tolist())
    # world 0: +.1, then to .3 (+.2), then a new plan (+.1); world 1 is restarted after one step: +.1, +.1, +.2
    np.testing.assert_allclose(moved, [[0.1, 0.1], [0.2, 0.1], [0.1, 0.2]], atol=1e-6)
    assert len(calls) == 3  # at the start, at the restart of world 1, at the end of world 0's plan


def test_chunk_actor_limits_each_step():
    actor = ChunkActor(lambda obs: torch.full((1, 1, 6), 5.0), 1, torch.full((6,), 0.25))
    assert actor({"proprio": proprio_at(torch.zeros(1, 6))}).tolist() == [[0.25] * 6]


def test_scaling_ignores_what_lies_past_the_end():
    target = torch.zeros(1000, 2, 1)
    target[:, 0, 0] = torch.linspace(-1, 1, 1000)
    target[:, 1, 0] = torch.cat([torch.linspace(0, 4, 500), torch.full((500,), 99.0)])
    valid = torch.ones(1000, 2, dtype=torch.bool)
    valid[500:, 1] = False
    scaling = fit_scaling(torch.randn(1000, 3), target, valid)
    torch.testing.assert_close(scaling["centre"][:, 0], torch.tensor([0.0, 2.0]), atol=1e-4, rtol=0)
    torch.testing.assert_close(scaling["reach"][:, 0], torch.tensor([0.98, 1.96]), atol=1e-4, rtol=0)


def test_film_learns_that_the_sentence_decides():
    """A toy in which the same input needs opposite outputs under two sentences."""
    torch.manual_seed(0)
    mlp = FilmMLP(4, 8, 2, 3, width=32, depth=2, language=8)
    optimizer = torch.optim.AdamW(mlp.parameters(), 3e-3)
    words = torch.nn.functional.normalize(torch.randn(2, 8), dim=-1)
    for _ in range(400):
        x, which = torch.randn(128, 4), torch.randint(2, (128,))
        wanted = (x[:, :3] * (2 * which[:, None] - 1)).unsqueeze(1).expand(-1, 2, -1)
        loss = (mlp(x, words[which]) - wanted).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.12  # ignoring the sentence costs E|x| = 0.80


def test_worlds_go_where_it_fails():
    # weights .15, .15, 1.15 of 1.45: of the 27 worlds beyond one each, 2.8, 2.8 and 21.4
    counts = np.bincount(share_worlds(np.array([0.0, 0.0, 1.0]), 30))
    assert counts.sum() == 30
    assert counts.tolist() == [4, 4, 22]


def test_dropping_words_keeps_the_meaning():
    keep = _meaningful(make_language(["lift_red", "move_red"]))
    rng = np.random.default_rng(0)
    drawn = {_drop("can you bring the red cube to the marker", keep, 0.9, rng) for _ in range(50)}
    assert all({"bring", "red", "cube", "marker"} <= set(s.split()) for s in drawn)
    assert len(drawn) > 5


def test_sentences_belong_to_their_job():
    language = make_language(["lift_red", "press_green"])
    sentences = Sentences(language, ["lift_red", "press_green"], 0.3, 0.3, 0.5, seed=0)
    job = torch.tensor([0, 1] * 100)
    drawn = sentences.draw(job, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn.norm(dim=-1), torch.ones(200))
    nearest = (drawn @ torch.from_numpy(language.embeddings).T).argmax(-1)
    assert [language.jobs[i] for i in nearest] == ["lift_red", "press_green"] * 100


def test_noise_keeps_to_the_limits_and_to_its_worlds():
    noise = Noise(np.array([0.1, 0.2]), 0.0, np.array([False, True]), np.random.default_rng(0))
    executed = np.stack([noise(np.zeros((2, 2))) for _ in range(200)])
    assert (executed[:, 0] == 0).all()
    burst = (executed[:, 1] != 0).any(-1)
    assert 0.1 < burst.mean() < 0.5
    assert (np.abs(executed) <= [0.1 + 1e-6, 0.2 + 1e-6]).all()
    lengths = np.diff(np.flatnonzero(np.diff(np.concatenate([[0], burst, [0]]).astype(int))))[::2]
    assert lengths.min() >= 3


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "d"
    teachers = Specialists(reach="scripted", press_green="scripted")
    collect(CollectConfig(teachers, episodes=6, num_envs=4, out=str(out)))
    return out


def settings(dataset, out, **changes) -> DistillConfig:
    base = {"clone_steps": 30, "rounds": 1, "round_worlds": 6, "round_env_steps": 20, "round_updates": 20, "width": 32}
    return DistillConfig(str(dataset), Specialists(all="scripted"), batch_size=64, out=str(out), **{**base, **changes})


def test_collected_data_is_sound_and_successful(dataset):
    found = validate(dataset)
    assert len(found) == 12
    assert {row["job"] for row in found.rows} == {"reach", "press_green"}
    for row, episode in zip(found.rows, found):
        assert row["success"]
        assert episode.data["next.success"].any()
        assert row["length"] <= row["cycle_steps"] + 12
        assert "marker" in episode.task or "button" in episode.task or row["job"] == "reach"
    noisy = found.columns(["action", "executed.action"])
    assert 0.001 < np.abs(noisy["action"] - noisy["executed.action"]).mean() < 0.1


def test_collection_resumes_to_the_same_data(dataset, tmp_path, monkeypatch):
    from distill.dataset_writer import DatasetWriter

    teachers = Specialists(reach="scripted", press_green="scripted")
    cfg = CollectConfig(teachers, episodes=6, num_envs=4, out=str(tmp_path / "d"))
    add = DatasetWriter.add_episode

    def die_at_eight(self, episode):
        if self.num_episodes == 8:
            raise KeyboardInterrupt
        return add(self, episode)

    with monkeypatch.context() as patch:
        patch.setattr(DatasetWriter, "add_episode", die_at_eight)
        with pytest.raises(KeyboardInterrupt):
            collect(cfg)
    collect(cfg)
    whole, resumed = validate(dataset), validate(tmp_path / "d")
    for name in ("action", "observation.state", "index", "next.reward"):
        np.testing.assert_array_equal(whole.columns([name])[name], resumed.columns([name])[name])


def test_a_dataset_of_other_settings_is_left_alone(dataset):
    before = (dataset / "meta/info.json").read_bytes()
    with pytest.raises(UserError, match="other settings"):
        collect(CollectConfig(Specialists(reach="scripted"), episodes=6, num_envs=4, out=str(dataset)))
    assert (dataset / "meta/info.json").read_bytes() == before


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    return distill(settings(dataset, tmp_path_factory.mktemp("run") / "g"))


def test_artefact_equals_torch_and_carries_its_language(run, dataset, tmp_path):
    policy = load_policy(run / "policy")
    assert policy.spec.action_meaning == "joint_position_chunk_relative_to_target"
    assert (policy.spec.chunk, policy.spec.execute) == (8, 4)
    assert set(policy.spec.inputs) == {"proprio", "objects", "embedding"}
    language = load_language(run / "policy")
    assert set(language.jobs) == {"reach", "press_green"}
    torch.manual_seed(1)
    trainer = Trainer(settings(dataset, tmp_path))
    rows = trainer.real_obs[:50]
    obs = {"proprio": rows[:, :30], "objects": rows[:, 30:], "embedding": trainer.sentences.table[:50]}
    from safetensors.torch import load_file

    model = trainer.averaged()
    model.load_state_dict(load_file(run / "policy" / "weights.safetensors"))
    with torch.no_grad():
        wanted = model(obs).numpy()
    found, _ = policy({k: v.numpy() for k, v in obs.items()})
    assert found.shape == (50, 8, 6)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_a_finished_run_is_reused(run, dataset):
    before = (run / "policy" / "policy.onnx").stat().st_mtime_ns
    distill(settings(dataset, run))
    with pytest.raises(UserError, match=r"other settings: width \(32, now 64\)"):
        distill(settings(dataset, run, width=64))
    assert (run / "policy" / "policy.onnx").stat().st_mtime_ns == before


def test_a_killed_run_resumes_exactly(run, dataset, tmp_path, monkeypatch):
    cfg = settings(dataset, tmp_path / "g", checkpoint_seconds=0)
    update = Trainer.update

    def die(self):
        if self.step == 37:
            raise KeyboardInterrupt
        return update(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", die)
        with pytest.raises(KeyboardInterrupt):
            distill(cfg)
    out = distill(cfg)
    assert (out / "policy/weights.safetensors").read_bytes() == (run / "policy/weights.safetensors").read_bytes()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["stage"] == "dagger" for row in rows) == 1  # the round was not repeated


def test_errors_say_what_to_do(dataset, tmp_path):
    with pytest.raises(UserError, match=r"info\.json: not found"):
        distill(settings(tmp_path / "none", tmp_path / "g"))
    with pytest.raises(UserError, match="no specialist labels it"):
        distill(DistillConfig(str(dataset), Specialists(reach="scripted"), out=str(tmp_path / "g")))
    with pytest.raises(UserError, match="does not exist"):
        distill(DistillConfig(str(dataset), Specialists(all=str(tmp_path / "nowhere")), out=str(tmp_path / "g")))
    with pytest.raises(UserError, match="'execute' \\(9\\) cannot exceed 'chunk' \\(8\\)"):
        DistillConfig(rounds=0, execute=9)
    shutil.rmtree(tmp_path / "g", ignore_errors=True)
