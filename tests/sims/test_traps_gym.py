"""The Gymnasium adapter: spaces of every shape, limits of every origin, both of Gymnasium's ways to reset by itself.

docs/traps.md says which public report belongs to which test.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from sims.errors import UserError
from sims.features import FEATURES, feature_dim
from sims.registry import make

f32 = np.float32
ONE = Box(-1, 1, (1,), f32)


class Probe(gym.Env):
    """Observes [step, sum of the actions]; terminates at step 3 when the action is positive; keeps what it was given."""

    observation_space: Any = Box(-np.inf, np.inf, (2,), np.float64)
    action_space: Any = ONE
    given: ClassVar[list[Any]] = []
    seeds: ClassVar[list[int]] = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.t, self.sum = 0, 0.0
        return self.look(), {}

    def look(self) -> Any:
        return np.array([self.t, self.sum])

    def step(self, action):
        self.given.append(action)
        self.t, self.sum = self.t + 1, self.sum + float(np.sum(action))
        return self.look(), float(self.t), bool(self.t == 3 and np.sum(action) > 0), False, {}


@pytest.fixture
def register():
    """Register a class under a name for one test; returns the name."""
    names: list[str] = []

    def add(kind: type[gym.Env], **changes: Any) -> str:
        names.append(f"Trap{len(names)}-v0")
        wrapped = {k: changes.pop(k) for k in ("max_episode_steps", "additional_wrappers") if k in changes}
        gym.register(
            names[-1], entry_point=type(kind.__name__, (kind,), {"given": [], "seeds": [], **changes}), **wrapped
        )
        return f"gym/{names[-1]}"

    yield add
    for name in names:
        gym.registry.pop(name)


# -- actions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "space",
    [
        Box(-2, 2, (), f32),
        Box(np.array([[-2, -1, 0], [0, 1, 2]], f32), np.array([[-1, 0, 3], [9, 2, 2.5]], f32)),
        Box(-0.1, 0.1, (2,), np.float64),  # 0.1 in float32 is above 0.1 in float64
        Box(np.array([-2, 0.5], f32), np.array([1, 0.75], f32)),
        Box(-1, 1, (2,), np.float16),
    ],
    ids=["scalar", "matrix", "float64", "asymmetric", "float16"],
)
def test_a_world_is_given_actions_of_its_own_space(register, space):
    env = make(register(Probe, action_space=space), 2)
    size = int(np.prod(space.shape))
    assert env.spec.action.shape == (size,)
    low, high = torch.tensor(env.spec.action.low), torch.tensor(env.spec.action.high)
    ends = (low, high, (low + high) / 2, low - 100, high + 100)
    for action in ends:
        env.step(action.float().repeat(2, 1))
    given = env._envs[0].unwrapped.given
    assert len(given) == 2 * len(ends)
    for action in given:
        assert space.contains(action if space.shape else np.asarray(action, space.dtype))
    assert np.allclose(given[0], space.low)
    assert np.allclose(given[2], space.high)
    assert np.array_equal(given[6], space.low)  # clipped
    assert np.array_equal(given[8], space.high)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (Box(-np.inf, np.inf, (2,)), "without finite bounds.*TransformAction"),
        (Box(0, np.inf, (2,)), "without finite bounds"),
        (Box(np.array([-1, -np.inf], f32), np.array([1, 1], f32)), "without finite bounds"),
        (Box(-3e38, 3e38, (1,)), "without finite bounds"),
        (Box(-1e12, 1e12, (1,), np.float64), "without finite bounds"),
        (Box(np.array([-1, 2], f32), np.array([1, 2], f32)), "empty action range.*TransformAction"),
        (Box(-1, 1, (0,)), "empty action range"),
        (Box(0, 255, (2,), np.uint8), "uint8 Box action space.*TransformAction"),
        (Box(-5, 5, (2,), np.int64), "int64 Box action space"),
        (Discrete(3), "Discrete action space"),
        (MultiDiscrete([2, 3]), "MultiDiscrete action space"),
        (MultiBinary(3), "MultiBinary action space"),
        (Dict({"a": ONE}), "Dict action space"),
    ],
    ids=str,
)
def test_actions_that_are_no_box_of_real_numbers_are_refused_with_advice(register, space, message):
    with pytest.raises(UserError, match=message):
        make(register(Probe, action_space=space), 1)


# -- observations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (2, 3), (4,)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.uint8, np.int64])
def test_observations_of_any_shape_and_type_become_float32_once(register, shape, dtype):
    value = (np.arange(int(np.prod(shape))) + 200).reshape(shape).astype(dtype)
    space = Box(0, 255, shape, dtype)
    env = make(register(Probe, observation_space=space, look=lambda self: value), 2)
    obs = env.reset(0)["proprio"]
    assert obs.dtype == torch.float32
    assert obs.tolist() == [value.ravel().tolist()] * 2
    assert env.spec.observation["proprio"].shape == (value.size,)


def test_a_dict_of_boxes_becomes_groups_and_privileged_ones_stay_from_the_policy(register):
    space = Dict({"arm": Box(-9, 9, (2,), np.float64), "goal": Box(-9, 9, (2, 2)), "privileged": Box(-9, 9, (3,))})

    def look(self):
        return {"privileged": np.full(3, 7.0), "goal": np.full((2, 2), 5.0), "arm": np.array([self.t, self.sum])}

    env = make(register(Probe, observation_space=space, look=look), 3, time_limit=4)
    assert {k: v.shape for k, v in env.spec.observation.items()} == {"arm": (2,), "goal": (4,), "privileged": (3,)}
    obs = env.reset(0)
    for t in range(1, 9):
        step = env.step(torch.full((3, 1), -0.5))
        age = (t - 1) % 4 + 1
        assert step.next_obs["arm"].tolist() == [[age, -0.5 * age]] * 3
        assert step.obs["arm"][0, 0] == age % 4
        assert (step.obs["goal"] == 5).all()
        assert (step.obs["privileged"] == 7).all()
        assert step.truncated.all() == (age == 4)
    features = FEATURES[env.spec.features]
    assert features(obs).shape == (3, 6)
    assert feature_dim(env.spec) == 6
    env.step(torch.full((3, 1), -0.5))
    state, wanted = env.state_dict(), env.step(torch.zeros(3, 1))
    env.load_state_dict(state)
    again = env.step(torch.zeros(3, 1))
    assert all(torch.equal(wanted.next_obs[k], again.next_obs[k]) for k in again.next_obs)


def test_a_dict_of_boxes_is_trained_on_and_exported(register, tmp_path):
    from control.config import SACConfig, TrainConfig
    from control.policy import load_policy
    from control.train import train

    space = Dict({"arm": Box(-9, 9, (2,), np.float64), "goal": Box(-9, 9, (2,)), "privileged": Box(-9, 9, (3,))})
    look = lambda self: {"privileged": np.ones(3), "goal": np.zeros(2), "arm": np.array([self.t, self.sum])}  # noqa: E731
    name = register(Probe, observation_space=space, look=look)
    algo = SACConfig(width=8, batch_size=16, warmup_steps=16)
    train(TrainConfig(env=name, algo=algo, steps=48, eval_every=0, final_episodes=2, env_options={"time_limit": 5},
                      out=str(tmp_path / "run")))  # fmt: skip
    policy = load_policy(tmp_path / "run" / "policy")
    assert sorted(policy.spec.inputs) == ["arm", "goal"]


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (Discrete(3), "Discrete observation space.*FlattenObservation"),
        (Tuple([ONE, ONE]), "Tuple observation space"),
        (Dict({"a": Dict({"b": ONE})}), "Dict observation space 'a'"),
        (Dict({"a": ONE, "b": Discrete(2)}), "Discrete observation space 'b'"),
        (Dict({"instruction": ONE}), "Box observation space 'instruction'.*names other than"),
        (Dict({"pixels/top": ONE}), "pixels/top"),
    ],
    ids=str,
)
def test_other_observations_are_refused_with_advice(register, space, message):
    with pytest.raises(UserError, match=message):
        make(register(Probe, observation_space=space), 1)


# -- limits and resets ----------------------------------------------------------------------------------------------


def run(env, actions):
    """Transitions of environment 0: (obs, reward, next_obs, terminated, truncated)."""
    obs, rows = env.reset(0)["proprio"], []
    for a in actions:
        step = env.step(torch.full((env.num_envs, 1), float(a)))
        rows.append((obs[0].tolist(), step.reward[0].item(), step.next_obs["proprio"][0].tolist(),
                     step.terminated[0].item(), step.truncated[0].item()))  # fmt: skip
        obs = step.obs["proprio"]
    return rows


@pytest.mark.parametrize(
    ("registered", "options", "limit"),
    [
        ({"max_episode_steps": 4}, {}, 4),
        ({"max_episode_steps": 4}, {"time_limit": 6}, 6),
        ({"max_episode_steps": 6}, {"time_limit": 4}, 4),
        ({}, {"time_limit": 5}, 5),
        ({}, {}, 1000),  # none of its own: an evaluation would never end
    ],
)
def test_a_limit_of_any_origin_is_a_truncation_at_that_step(register, registered, options, limit):
    env = make(register(Probe, **registered), 2, **options)
    assert env.spec.episode_steps == limit
    rows = run(env, [-0.01] * (2 * limit))
    ends = [i + 1 for i, row in enumerate(rows) if row[4]]
    assert ends == [limit, 2 * limit]
    assert not any(row[3] for row in rows)
    assert rows[limit - 1][2][0] == limit
    assert rows[limit][0] == [0, 0]


def test_a_limit_inside_the_world_and_an_end_at_the_limit(register):
    class Inner(Probe):
        def step(self, action):
            obs, reward, terminated, _, info = super().step(action)
            return obs, reward, terminated, self.t >= 3, info

    env = make(register(Inner), 1, time_limit=50)
    assert [row[3:] for row in run(env, [-1, -1, -1])][-1] == (False, True)
    assert [row[3:] for row in run(env, [1, 1, 1])][-1] == (True, False)  # both at once: an end


ACTIONS = [0.5, -0.5, 1.0, -1.0, -1.0, -1.0, -1.0, 0.25, 0.25, -0.25, 0.5, 1.0, 1.0, 1.0, -1.0, 1.0]


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_transitions_are_those_of_gymnasiums_vector_env_without_its_reset_rows(register, mode):
    """The kinds: a NEXT_STEP reset row taken for a transition; the final observation not looked up."""
    name = register(Probe, max_episode_steps=4)
    ours = run(make(name, 2), ACTIONS)
    theirs = gym.make_vec(name.partition("/")[2], num_envs=2, vectorization_mode="sync",
                          vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode[mode]})  # fmt: skip
    obs, _ = theirs.reset(seed=0)
    queue, rows, resetting = list(ACTIONS), [], False
    while queue:
        action = 0.0 if resetting else queue.pop(0)
        new, reward, terminated, truncated, info = theirs.step(np.full((2, 1), action, f32))
        if not resetting:
            done = terminated[0] or truncated[0]
            last = info["final_obs"][0] if done and mode == "SAME_STEP" else new[0]
            rows.append((obs[0].tolist(), reward[0], last.tolist(), bool(terminated[0]), bool(truncated[0])))
        resetting = mode == "NEXT_STEP" and not resetting and bool(terminated[0] or truncated[0])
        obs = new
    assert rows == [(o, r, n, t, u and not t) for o, r, n, t, u in ours]
    assert sum(row[3] for row in ours) >= 2
    assert sum(row[4] for row in ours) >= 2


def test_a_world_that_resets_itself_gives_no_row_of_its_reset(register):
    plain = run(make(register(Probe, max_episode_steps=4), 1), ACTIONS)
    wrapper = gym.envs.registration.WrapperSpec("Autoreset", "gymnasium.wrappers:Autoreset", {})
    itself = make(register(Probe, max_episode_steps=4, additional_wrappers=(wrapper,)), 1)
    assert run(itself, ACTIONS) == plain


def test_every_episode_of_every_copy_has_its_own_seed(register):
    env = make(register(Probe), 3, seed=5, time_limit=2)
    env._envs[0].unwrapped.seeds.clear()
    env.reset(5)
    for _ in range(8):
        env.step(torch.zeros(3, 1))
    seeds = env._envs[0].unwrapped.seeds
    assert len(seeds) == 3 * 5
    assert len(set(seeds)) == len(seeds)
    assert None not in seeds


# -- numbers that are none ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("obs", "reward"),
    [(np.nan, 1.0), (np.inf, 1.0), (1e300, 1.0), (1.0, np.nan), (1.0, -np.inf), (1.0, 1e300)],
    ids=["obs-nan", "obs-inf", "obs-beyond-float32", "reward-nan", "reward-inf", "reward-beyond-float32"],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_a_number_that_float32_cannot_hold_restarts_its_copy(register, obs, reward):
    class Bad(Probe):
        def step(self, action):
            row, value, *rest = super().step(action)
            return (np.array([obs, 0.0]), reward, *rest) if action[0] > 0.5 else (row, value, *rest)

    env = make(register(Bad), 2)
    env.step(torch.zeros(2, 1))
    step = env.step(torch.tensor([[1.0], [0.0]]))
    assert step.metrics["diverged"].tolist() == [1, 0]
    assert step.truncated.tolist() == [True, False]
    assert step.terminated.tolist() == [False, False]
    assert step.reward.tolist() == [0, 2]
    assert step.next_obs["proprio"].tolist() == [[1, 0], [2, 0]]
    assert step.obs["proprio"].tolist() == [[0, 0], [2, 0]]
    assert env.diverged == 1


def test_a_bad_start_is_drawn_again_and_endless_ones_are_an_error(register):
    class Sometimes(Probe):
        every: ClassVar[int] = 2

        def reset(self, *, seed=None, options=None):
            obs, info = super().reset(seed=seed, options=options)
            return (np.full(2, np.nan), info) if len(self.seeds) % self.every else (obs, info)

    env = make(register(Sometimes), 1, time_limit=2)
    steps = [env.step(torch.zeros(1, 1)) for _ in range(6)]
    assert all(torch.isfinite(s.obs["proprio"]).all() for s in steps)
    assert env.diverged >= 3
    state = env.state_dict()
    assert torch.equal(env.load_state_dict(state)["proprio"], steps[-1].obs["proprio"])
    with pytest.raises(UserError, match="5 resets in a row"):
        make(register(Sometimes, every=10**9), 1)


# -- versions -------------------------------------------------------------------------------------------------------


def test_a_world_without_its_version_is_refused_and_versions_are_different_worlds():
    """The kind: returns of v2, v3 and v5 compared, which differ in rewards and observations."""
    with pytest.raises(UserError, match="HalfCheetah-v"):
        make("gym/HalfCheetah", 1)
    specs = [make(f"gym/Ant-v{v}", 1).spec for v in (4, 5)]
    assert specs[0].task == "gym/Ant-v4"
    assert specs[1].task == "gym/Ant-v5"
    assert specs[0].observation != specs[1].observation
