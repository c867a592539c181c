"""The environments' own settings."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from control import settings
from control.config import ALGOS, PPOConfig, SACConfig, TrainConfig, resolve
from control.settings import settings_of
from sims.errors import UserError
from sims.registry import list_envs
from vlm_rewards.config import ClipReward

MAY_BE_NONE = {"target_entropy", "target_kl", "clip_value"}


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("env", [*list_envs(), "gym/Hopper-v5", "brax/unheard_of"])
def test_every_world_has_a_value_for_every_field_of_every_learner(env, algo):
    cfg = resolve(TrainConfig(env=env, algo=ALGOS[algo]()))
    unused = {"utd", "prior_share"} if algo == "ppo" else set()
    for config in (cfg, cfg.algo):
        for field in dataclasses.fields(config):
            assert field.name in MAY_BE_NONE | unused or getattr(config, field.name) is not None, field.name
    assert resolve(cfg) == cfg  # config.yaml of a run can be given again


# what the specialists of the README were trained with
SHIPPED = {
    "num_envs": 16, "utd": 0.125, "steps": 150_000, "stop_success": 0.97, "eval_every": 8_000, "eval_episodes": 48,
    "final_episodes": 100, "prior_share": 0.25, "log_every": 2_000, "checkpoint_seconds": 30.0, "threads": 1, "seed": 0,
    "env_options": {}, "device": "cpu",
}  # fmt: skip
SHIPPED_ALGO = {
    "lr": 1e-3, "tau": 0.01, "lr_alpha": 3e-4, "alpha": 0.05, "target_entropy": None, "actor_average": 0.005,
    "policy_delay": 2, "batch_size": 256, "n_step": 1, "warmup_steps": 1_000, "random_warmup": True, "width": 128,
    "buffer_size": 1_000_000, "depth": 2, "activation": "relu", "normalize": False, "critic_layer_norm": True,
    "log_std_min": -10.0, "log_std_max": 2.0, "privileged": False, "precision": "float32",
}  # fmt: skip
ONLY = {
    "sac": {"critics": 2, "target_critics": 2},
    "dsact": {"xi": 3.0, "tau_b": 0.005, "epsilon": 0.1, "omega": "paper"},
}
TASKS = {"reach": (0.95, 0), "press": (0.95, 0), "lift": (0.97, 32), "move": (0.98, 47)}  # discount, demonstrations


@pytest.mark.parametrize("algo", ["dsact", "sac"])
@pytest.mark.parametrize(
    "job", [*TASKS, "press_green", "press_yellow", "lift_red", "lift_blue", "move_red", "move_blue"]
)
def test_the_tabletop_jobs_keep_the_numbers_they_were_measured_with(job, algo):
    gamma, demos = TASKS[job.split("_")[0]]
    found = dataclasses.asdict(resolve(TrainConfig(env=f"tabletop/{job}", algo=ALGOS[algo]())))
    learner = found.pop("algo")
    for name in ("name", "update"):
        learner.pop(name)
    assert learner == SHIPPED_ALGO | ONLY[algo] | {"gamma": gamma}
    for name in ("env", "reward", "out", "tensorboard", "progress"):
        found.pop(name)
    assert found == SHIPPED | {"demos": demos}


def test_all_jobs_at_once_neither_stop_early_nor_get_demonstrations():
    cfg = resolve(TrainConfig(env="tabletop"))
    assert (cfg.stop_success, cfg.demos, cfg.algo.gamma, cfg.algo.lr, cfg.algo.tau) == (0.0, 0, 0.99, 3e-4, 0.005)


def test_a_sentence_reward_neither_stops_early_nor_gets_demonstrations():
    cfg = resolve(TrainConfig(env="tabletop/lift", reward=ClipReward()))
    assert (cfg.stop_success, cfg.demos, cfg.algo.gamma) == (0.0, 0, 0.97)


def test_gym_worlds_learn_as_in_the_papers():
    cfg = resolve(TrainConfig(env="gym/HalfCheetah-v5", algo=SACConfig()))
    a = cfg.algo
    assert (cfg.num_envs, cfg.utd, a.width, a.depth, a.alpha, a.critic_layer_norm) == (1, 1.0, 256, 2, 1.0, False)
    assert (cfg.steps, a.warmup_steps, a.batch_size, a.gamma, a.lr, a.tau) == (1_000_000, 1_000, 256, 0.99, 3e-4, 0.005)
    assert resolve(TrainConfig(env="gym/Pendulum-v1")).steps == 20_000
    ppo = resolve(TrainConfig(env="gym/HalfCheetah-v5", algo=PPOConfig()))
    assert ppo.num_envs * ppo.algo.rollout_steps == 2048


def test_what_a_user_gives_always_wins():
    cfg = resolve(
        TrainConfig(env="gym/Hopper-v5", algo=SACConfig(width=32, alpha=0.3, critic_layer_norm=True), utd=0.5)
    )
    assert (cfg.algo.width, cfg.algo.alpha, cfg.algo.critic_layer_norm, cfg.utd) == (32, 0.3, True, 0.5)
    assert resolve(TrainConfig(env="tabletop/reach", stop_success=0.0)).stop_success == 0.0
    kept = resolve(TrainConfig(env="tabletop/lift", demos=0, eval_every=0, steps=5, num_envs=3))
    assert (kept.demos, kept.eval_every, kept.steps, kept.num_envs) == (0, 0, 5, 3)


@pytest.mark.parametrize("option", [{"utd": 0.5}, {"demos": 4}, {"prior_share": 0.5}])
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
