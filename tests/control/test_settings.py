"""The environments' own settings."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from control import settings
from control.config import ALGOS, DSACTConfig, PPOConfig, SACConfig, TrainConfig, resolve
from control.settings import settings_of
from sims.errors import UserError
from sims.registry import list_envs

MAY_BE_NONE = {"target_entropy", "target_kl", "clip_value"}


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("env", [*list_envs(), "gym/Hopper-v5", "brax/unheard_of"])
def test_every_world_has_a_value_for_every_field_of_every_learner(env, algo):
    cfg = resolve(TrainConfig(env=env, algo=ALGOS[algo]()))
    for config in (cfg, cfg.algo):
        for field in dataclasses.fields(config):
            assert field.name in MAY_BE_NONE or getattr(config, field.name) is not None, field.name


@pytest.mark.parametrize(
    ("job", "gamma", "demos"),
    [("reach", 0.95, 0), ("press_green", 0.95, 0), ("press_yellow", 0.95, 0), ("lift", 0.97, 32), ("lift_red", 0.97, 32),
     ("move_blue", 0.98, 47)],
)  # fmt: skip
def test_the_tabletop_jobs_keep_the_numbers_they_were_measured_with(job, gamma, demos):
    for algo in (DSACTConfig, SACConfig):
        cfg = resolve(TrainConfig(env=f"tabletop/{job}", algo=algo()))
        a = cfg.algo
        assert (a.gamma, cfg.demos, a.lr, a.tau, a.alpha, a.width) == (gamma, demos, 1e-3, 0.01, 0.05, 128)
        assert (cfg.num_envs, cfg.utd, cfg.stop_success, a.critic_layer_norm) == (16, 0.125, 0.97, True)


def test_gym_worlds_learn_as_in_the_papers():
    cfg = resolve(TrainConfig(env="gym/HalfCheetah-v5", algo=SACConfig()))
    assert (cfg.num_envs, cfg.utd, cfg.algo.width, cfg.algo.alpha, cfg.algo.critic_layer_norm) == (
        1,
        1.0,
        256,
        1.0,
        False,
    )
    ppo = resolve(TrainConfig(env="gym/HalfCheetah-v5", algo=PPOConfig()))
    assert ppo.num_envs * ppo.algo.rollout_steps == 2048


def test_what_a_user_gives_always_wins():
    cfg = resolve(
        TrainConfig(env="gym/Hopper-v5", algo=SACConfig(width=32, alpha=0.3, critic_layer_norm=True), utd=0.5)
    )
    assert (cfg.algo.width, cfg.algo.alpha, cfg.algo.critic_layer_norm, cfg.utd) == (32, 0.3, True, 0.5)
    assert resolve(TrainConfig(env="tabletop/reach", stop_success=0.0)).stop_success == 0.0


@pytest.mark.parametrize("option", [{"utd": 0.5}, {"demos": 4}])
def test_ppo_refuses_what_it_would_ignore(option):
    with pytest.raises(UserError, match=f"option {next(iter(option))}=.*PPO"):
        resolve(TrainConfig(algo=PPOConfig(), **option))


def test_a_misspelt_setting_is_refused(monkeypatch, tmp_path):
    folder = tmp_path / "settings"
    folder.mkdir()
    (folder / "gym.yaml").write_text("'*':\n  ppo:\n    algo: {minibatch: 3}\n")
    monkeypatch.setattr(settings, "config_dir", lambda: tmp_path)
    settings._read.cache_clear()
    with pytest.raises(UserError, match=r"gym.yaml: \*.ppo.*minibatch_size"):
        settings_of("gym/Hopper-v5", "ppo")
    settings._read.cache_clear()


def test_training_from_python_does_not_import_hydra(tmp_path):
    code = f"""
import sys
from control.config import SACConfig, TrainConfig
from control.train import train
train(TrainConfig(env="gym/Pendulum-v1", algo=SACConfig(width=16, warmup_steps=50), steps=100, final_episodes=1, eval_every=0, out={str(tmp_path / "run")!r}))
assert "hydra" not in sys.modules, "hydra was imported"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
