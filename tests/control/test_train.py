"""The verb: one short run end to end, reuse, refusals, configs."""

import dataclasses
import json
import shutil

import pytest
import torch

from control import train as train_module
from control.config import ALGOS, DSACTConfig, SACConfig, TrainConfig, dsact_paper, resolve
from control.policy import load_policy
from control.train import VERB, main, train
from sims.errors import UserError
from sims.verbs import compose, config_dir
from vlm_rewards.config import ClipReward

SHORT = ["num_envs=4", "steps=640", "eval_every=320", "eval_episodes=4", "final_episodes=4", "algo.warmup_steps=128",
         "algo.batch_size=32", "algo.width=16", "utd=0.05"]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run started from Python without hydra, and the command line that means the same."""
    out = tmp_path_factory.mktemp("run") / "lift"
    algo = DSACTConfig(warmup_steps=128, batch_size=32, width=16)
    cfg = TrainConfig(env="tabletop/lift", algo=algo, demos=2, out=str(out), num_envs=4, steps=640, eval_every=320,
                      eval_episodes=4, final_episodes=4, utd=0.05)  # fmt: skip
    before = dataclasses.asdict(cfg)
    assert train(cfg) == out
    assert dataclasses.asdict(cfg) == before
    return out, ["env=tabletop/lift", "algo=dsact", "demos=2", f"out={out}", *SHORT]


def test_a_run_leaves_its_files_and_a_policy_that_acts(finished):
    out, _ = finished
    metrics, state = {"metrics.jsonl", "metrics.csv", "tensorboard"}, {"checkpoint", "replay", "prior"}
    assert {p.name for p in out.iterdir()} == {"config.yaml", *metrics, *state, "policy", "result.json"}
    result = json.loads((out / "result.json").read_text())
    assert (result["episodes"], result["demos"], result["algo"]) == (4, 2, "dsact")
    policy = load_policy(out / "policy")
    assert policy.spec.action_meaning == "joint_position_delta"
    assert policy.spec.inputs == ("proprio", "objects", "goal")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert any("eval/success" in row for row in rows)


def test_a_finished_run_is_reused_and_other_settings_are_refused(finished, capsys, monkeypatch):
    out, args = finished
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    monkeypatch.setattr(train_module, "_build_loop", lambda *a: pytest.fail("trained again"))
    assert main(args) == 0
    assert main([*args, "seed=5"]) == 2
    assert "holds a run with seed=0" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["env=tabletop/fly"], "unknown task"),
        (["env=tabeltop/reach"], "tabletop"),
        (["algo=ppox"], "Known: dsact"),
        (["algo.lrr=1"], "Did you mean 'algo.lr'?"),
        (["+algo.lrr=1"], "Did you mean 'algo.lr'?"),
        (["algo.gamma=1.5"], "algo.gamma=1.5"),
        (["steps=0"], "steps=0"),
        (["reward=clip", "stop_success=0.9"], "must not see"),
        (["env=tabletop/reach", "+env_options.nope=1"], "nope"),
    ],
)
def test_mistakes_exit_with_2_and_one_message(args, message, tmp_path, capsys):
    assert main([f"out={tmp_path}/x", *args]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_damaged_checkpoint_is_reported_and_left(finished, tmp_path, capsys):
    out = shutil.copytree(finished[0], tmp_path / "x")
    (out / "result.json").unlink()
    file = out / "checkpoint" / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert main([*finished[1], f"out={out}"]) == 2
    assert "damaged checkpoint" in capsys.readouterr().err
    assert (out / "policy" / "spec.json").exists()


def test_tasks_own_settings_are_filled_in_on_a_copy():
    cfg = TrainConfig(env="tabletop/move_red")
    full = resolve(cfg)
    assert (full.algo.gamma, full.demos, full.stop_success) == (0.98, 47, 0.97)
    assert cfg.algo.gamma is None
    assert resolve(TrainConfig(env="gym/Pendulum-v1")).algo.gamma == 0.99
    sentence = resolve(TrainConfig(env="tabletop/lift", reward=ClipReward()))
    assert (sentence.demos, sentence.stop_success) == (0, 0.0)
    kept = resolve(TrainConfig(env="tabletop/lift", demos=3, algo=SACConfig(gamma=0.5)))
    assert (kept.demos, kept.algo.gamma) == (3, 0.5)


def test_demonstrations_need_a_demonstrator(tmp_path):
    cfg = TrainConfig(env="toy/point", demos=3, out=str(tmp_path))
    with pytest.raises(UserError, match="no scripted demonstrator"):
        train_module._demonstrations(resolve(cfg), None)


@pytest.mark.parametrize("option", sorted(p.stem for p in (config_dir() / "algo").glob("*.yaml")))
def test_every_algo_option_composes(option):
    cfg = compose(VERB, [f"algo={option}"])
    assert cfg.algo.name in ALGOS
    if option == "dsact_paper":
        assert cfg.algo == dsact_paper()


def test_tabletop_run_with_demonstrations_resumes_bit_for_bit(tmp_path):
    algo = DSACTConfig(warmup_steps=64, batch_size=32, width=16)
    cfg = resolve(TrainConfig(env="tabletop/lift", algo=algo, demos=2, num_envs=4, steps=640, utd=0.1, eval_every=256,
                              eval_episodes=4))  # fmt: skip
    whole = train_module._build_loop(cfg, tmp_path / "whole")
    whole.run()
    half = train_module._build_loop(dataclasses.replace(cfg, steps=384), tmp_path / "half")
    half.run()
    half.env.close()
    resumed = train_module._build_loop(cfg, tmp_path / "half")
    assert resumed.prior is None  # it comes from the checkpoint, not from new demonstrations
    resumed.run()
    for name in ("theta_actor", "theta_critic", "log_alpha", "sigma_square"):
        assert torch.equal(getattr(resumed.learner, name), getattr(whole.learner, name)), name
    assert torch.equal(resumed.prior.rows, whole.prior.rows)


def test_privileged_critics_on_the_tabletop_leave_a_policy_that_needs_no_privilege(tmp_path):
    algo = SACConfig(warmup_steps=64, batch_size=32, width=16, privileged=True)
    cfg = TrainConfig(env="tabletop/reach", algo=algo, num_envs=4, steps=160, utd=0.1, eval_every=0, final_episodes=4,
                      out=str(tmp_path / "run"), demos=1)  # fmt: skip
    loop = train_module._build_loop(resolve(cfg), tmp_path / "loop")
    assert loop.replay.obs_dim - loop.learner.actor_dim == 29
    assert loop.prior.obs_dim == loop.replay.obs_dim
    policy = load_policy(train(cfg) / "policy")
    assert "privileged" not in policy.spec.env.observation
    assert policy.spec.inputs == ("proprio", "objects", "goal")
    assert main(["env=gym/Pendulum-v1", "algo=sac", "algo.privileged=true", f"out={tmp_path}/no"]) == 2
