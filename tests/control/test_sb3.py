"""Stable-Baselines3 both ways: our worlds under its algorithms, its models as our artefacts."""

from __future__ import annotations

import io
import json
import pickle
import zipfile

import gymnasium as gym
import numpy as np
import pytest
import torch
from sb3_contrib import TQC, CrossQ
from stable_baselines3 import PPO, SAC, TD3
from stable_baselines3.common.vec_env import DummyVecEnv, VecCheckNan, VecMonitor, VecNormalize
from toy_worlds import Point

from control.convert import ConvertConfig, convert, main
from control.policy import load_policy
from control.sb3 import SB3VecEnv, dump_normalizer
from sims.errors import UserError
from sims.registry import make


class Crooked(gym.Env):
    """Asymmetric float32 action box, float64 observations of an odd scale."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gym.spaces.Box(np.array([-2, -0.5], np.float32), np.array([1, 3], np.float32))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.normal(3, 2, 3), {}

    def step(self, action):
        assert self.action_space.contains(np.asarray(action, np.float32))
        return self.np_random.normal(3, 2, 3), float(action[0]), False, False, {}


@pytest.fixture(scope="module", autouse=True)
def crooked():
    gym.register("Crooked-v0", entry_point=Crooked, max_episode_steps=20)
    yield
    gym.registry.pop("Crooked-v0")


def small(net_arch=(24, 16), **policy):
    """Anew for every model: the library writes into the dictionary it is given."""
    return {"learning_starts": 10, "buffer_size": 500, "policy_kwargs": {"net_arch": list(net_arch), **policy}}


MODELS = {
    "SAC": lambda env: SAC("MlpPolicy", env, **small()),
    "TD3": lambda env: TD3("MlpPolicy", env, **small()),
    "TQC": lambda env: TQC("MlpPolicy", env, **small()),
    "CrossQ": lambda env: CrossQ("MlpPolicy", env, **small()),
    "PPO": lambda env: PPO("MlpPolicy", env, n_steps=32, batch_size=16),
    "SAC-tanh": lambda env: SAC("MlpPolicy", env, **small((8, 8, 8), activation_fn=torch.nn.Tanh)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_acts_the_same_to_1e_6(name, tmp_path):
    torch.manual_seed(0)
    model = MODELS[name](gym.make("Crooked-v0"))
    model.learn(64)
    model.save(tmp_path / "model.zip")
    path = convert(ConvertConfig(model=str(tmp_path / "model.zip"), env="gym/Crooked-v0", out=str(tmp_path / "run")))
    policy = load_policy(path)
    obs = np.random.default_rng(0).normal(3, 4, (64, 3))
    want, _ = model.predict(obs, deterministic=True)
    got, _ = policy({"proprio": obs.astype(np.float32)})
    assert np.abs(got[:, 0] - want).max() < 1e-6
    assert np.ptp(want, axis=0).min() > 1e-3  # the equality is of actions that differ
    assert policy.spec.extra["converted"]["algorithm"] == name.split("-")[0]


def test_observation_statistics_travel_as_arrays(tmp_path):
    env = VecNormalize(DummyVecEnv([lambda: gym.make("Crooked-v0")]))
    model = PPO("MlpPolicy", env, n_steps=64, batch_size=16)
    model.learn(128)
    model.save(tmp_path / "model.zip")
    dump_normalizer(env, tmp_path / "statistics.npz")
    cfg = ConvertConfig(model=str(tmp_path / "model.zip"), env="gym/Crooked-v0", out=str(tmp_path / "run"),
                        normalizer=str(tmp_path / "statistics.npz"))  # fmt: skip
    policy = load_policy(convert(cfg))
    obs = np.random.default_rng(0).normal(3, 4, (32, 3))
    want, _ = model.predict(env.normalize_obs(obs), deterministic=True)
    assert np.abs(policy({"proprio": obs.astype(np.float32)})[0][:, 0] - want).max() < 1e-5
    cfg.normalizer = "vecnormalize.pkl"
    with pytest.raises(UserError, match="dump_normalizer"):
        convert(cfg)


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_nothing_in_a_zip_is_ever_unpickled(tmp_path):
    import base64

    model = SAC("MlpPolicy", gym.make("Crooked-v0"), **small())
    model.save(tmp_path / "good.zip")
    trap = tmp_path / "executed"
    with zipfile.ZipFile(tmp_path / "good.zip") as good:
        members = {name: good.read(name) for name in good.namelist()}
    data = json.loads(members["data"])
    for value in data.values():
        if isinstance(value, dict) and ":serialized:" in value:
            value[":serialized:"] = base64.b64encode(pickle.dumps(Bomb(trap))).decode()
    rewrite(tmp_path / "data.zip", members | {"data": json.dumps(data).encode()})
    convert(ConvertConfig(model=str(tmp_path / "data.zip"), env="gym/Crooked-v0", out=str(tmp_path / "a")))
    stream = io.BytesIO()
    torch.save({"actor": Bomb(trap)}, stream)
    rewrite(tmp_path / "weights.zip", members | {"policy.pth": stream.getvalue()})
    with pytest.raises(UserError, match="not loaded"):
        convert(ConvertConfig(model=str(tmp_path / "weights.zip"), env="gym/Crooked-v0", out=str(tmp_path / "b")))
    assert not trap.exists()


def rewrite(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def test_refusals_are_one_clear_message(tmp_path, capsys):
    SAC("MlpPolicy", gym.make("Crooked-v0"), use_sde=True, **small()).save(tmp_path / "sde.zip")
    SAC("MlpPolicy", gym.make("Crooked-v0"), **small()).save(tmp_path / "good.zip")
    (tmp_path / "no.zip").write_text("no zip")
    for args, message in (
        (["model=absent.zip", "env=gym/Crooked-v0"], "no model at absent.zip"),
        (["env=gym/Crooked-v0"], "option model is missing"),
        ([f"model={tmp_path}/no.zip", "env=gym/Crooked-v0"], "not a model of Stable-Baselines3"),
        ([f"model={tmp_path}/sde.zip", "env=gym/Crooked-v0"], "gSDE"),
        ([f"model={tmp_path}/good.zip", "env=gym/Pendulum-v1"], "takes 3 numbers and gives 2"),
        ([f"model={tmp_path}/good.zip", "env=gym/Crooked-v0", "activation=relo"], "relu"),
    ):
        assert main([*args, f"out={tmp_path}/x"]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_an_action_space_of_another_world_is_refused(tmp_path):
    SAC("MlpPolicy", gym.make("Crooked-v0"), **small()).save(tmp_path / "good.zip")

    class Wider(Crooked):
        action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    gym.register("Wider-v0", entry_point=Wider)
    try:
        with pytest.raises(UserError, match="action space has low"):
            convert(ConvertConfig(model=str(tmp_path / "good.zip"), env="gym/Wider-v0", out=str(tmp_path / "x")))
    finally:
        gym.registry.pop("Wider-v0")


@pytest.mark.parametrize("name", ["tabletop/reach", "gym/Pendulum-v1"])
def test_our_worlds_pass_the_wrappers_of_stable_baselines3(name):
    env = VecCheckNan(VecMonitor(VecNormalize(SB3VecEnv(make(name, 3)))), raise_exception=True)
    obs = env.reset()
    assert obs.dtype == np.float32
    assert env.observation_space.contains(obs[0])
    rng = np.random.default_rng(0)
    seen = 0
    for _ in range(210):
        low, high = env.action_space.low, env.action_space.high
        obs, reward, done, infos = env.step(rng.uniform(low, high, (3, len(low))).astype(np.float32))
        assert reward.shape == done.shape == (3,)
        for i in np.flatnonzero(done):
            seen += 1
            assert infos[i]["TimeLimit.truncated"]
            assert infos[i]["episode"]["l"] > 1
            assert not np.allclose(infos[i]["terminal_observation"], obs[i])
    assert seen >= 3
    assert env.env_is_wrapped(gym.Wrapper) == [False] * 3
    assert len(env.get_attr("spec")) == 3
    env.close()


def test_the_terminal_observation_is_the_true_successor():
    ours, theirs = Point(2, limit=3), SB3VecEnv(Point(2, limit=3), seed=0)
    ours.reset(0)
    theirs.reset()
    for _ in range(3):
        action = np.full((2, 2), 0.1, np.float32)
        step = ours.step(torch.from_numpy(action))
        obs, _, done, infos = theirs.step(action)
    assert done.all()
    assert np.allclose(infos[0]["terminal_observation"], step.next_obs["proprio"][0])
    assert np.allclose(obs, step.obs["proprio"])
    assert infos[1]["TimeLimit.truncated"]


def test_seeds_make_the_starts():
    env = SB3VecEnv(Point(2))
    env.seed(5)
    first = env.reset()
    again = env.reset()
    env.seed(5)
    assert np.array_equal(first, env.reset())
    assert not np.array_equal(first, again)


def test_its_ppo_learns_on_our_world():
    torch.manual_seed(0)
    env = VecMonitor(SB3VecEnv(Point(16)))
    model = PPO("MlpPolicy", env, n_steps=32, batch_size=64, gamma=0.9, learning_rate=1e-3, seed=0, device="cpu")
    model.learn(512)
    before = np.mean([e["r"] for e in model.ep_info_buffer])
    model.learn(12_000, reset_num_timesteps=False)
    after = np.mean([e["r"] for e in model.ep_info_buffer])
    assert after > before / 2  # returns are negative distances
