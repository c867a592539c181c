"""Conformance of every registered environment to ``VecEnv``, and what only the tabletop promises."""

import numpy as np
import pytest
import torch

from sims import registry
from sims.engines.mujoco import MujocoEngine
from sims.errors import UserError
from sims.features import FEATURES, feature_dim
from sims.registry import make
from sims.types import EnvSpec
from sims.worlds import kinematics, predicates, tabletop
from sims.worlds.variants import HOLD_STEPS, SLOTS, VARIANTS

NAMES = [*registry.TABLETOP, "gym/Pendulum-v1"]
OPTIONS = {"time_limit": 5}


def random_actions(env, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    low, high = torch.tensor(env.spec.action.low), torch.tensor(env.spec.action.high)
    for _ in range(steps):
        yield low + (high - low) * torch.rand((env.num_envs, len(low)), generator=generator)


def roll(env, steps, seed=0):
    return [env.step(action) for action in random_actions(env, steps, seed)]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def flat(step):
    extra = {"reward": step.reward, "terminated": step.terminated, "truncated": step.truncated}
    return {**{f"obs/{k}": v for k, v in step.obs.items()}, **step.metrics, **extra}


@pytest.fixture(params=NAMES)
def env(request):
    env = make(request.param, 3, seed=4, **OPTIONS)
    yield env
    env.close()


def test_observations_and_actions_follow_the_spec(env):
    obs = env.reset(1)
    for seen in (obs, roll(env, 1)[0].next_obs):
        assert set(seen) == set(env.spec.observation)
        for name, array in env.spec.observation.items():
            assert tuple(seen[name].shape) == (env.num_envs, *array.shape)
            assert str(seen[name].dtype) == f"torch.{array.dtype}"
    assert all(np.isfinite([*env.spec.action.low, *env.spec.action.high]))
    assert EnvSpec.from_json(env.spec.to_json()) == env.spec
    assert feature_dim(env.spec) == FEATURES[env.spec.features](obs).shape[1]


def test_a_seed_reproduces_everything(env):
    runs = []
    for seed in (7, 7, 8):
        first = env.reset(seed)
        runs.append((first, roll(env, 8)))
    assert same(runs[0][0], runs[1][0])
    assert all(same(flat(a), flat(b)) for a, b in zip(runs[0][1], runs[1][1]))
    assert not same(runs[0][0], runs[2][0])


def test_the_true_successor_survives_the_time_limit(env):
    long = make(env.spec.task, env.num_envs, seed=4, time_limit=50)
    assert same(env.reset(3), long.reset(3))
    short_steps, long_steps = roll(env, 5), roll(long, 5)
    last = short_steps[-1]
    assert last.truncated.all()
    assert not last.terminated.any()
    assert not any(s.truncated.any() for s in short_steps[:-1])
    assert same(last.next_obs, long_steps[-1].next_obs)  # where the world went without a limit
    assert not torch.equal(last.obs["proprio"], last.next_obs["proprio"])
    assert same(short_steps[1].obs, short_steps[1].next_obs)
    long.close()


def test_state_goes_on_bit_exactly(env):
    env.reset(5)
    roll(env, 7)
    state = env.state_dict()
    wanted = roll(env, 9, seed=1)
    other = make(env.spec.task, env.num_envs, seed=99, **OPTIONS)
    obs = other.load_state_dict(state)
    got = roll(other, 9, seed=1)
    assert set(obs) == set(env.spec.observation)
    assert all(same(flat(a), flat(b)) for a, b in zip(wanted, got))
    other.close()


def test_actions_beyond_the_bounds_are_clipped(env):
    env.reset(2)
    state, high = env.state_dict(), torch.tensor(env.spec.action.high)
    at_limit = env.step(high.repeat(env.num_envs, 1))
    env.load_state_dict(state)
    assert same(at_limit.next_obs, env.step(50 * high.repeat(env.num_envs, 1)).next_obs)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tabletop/lfit", {}, "unknown task 'tabletop/lfit'.*Did you mean 'tabletop/lift'"),
        ("tabeltop", {}, "unknown environment.*Did you mean 'tabletop'"),
        ("tabletop/lift", {"thread": 2}, "unknown option 'thread' in tabletop/lift.*Did you mean 'threads'"),
        ("tabletop", {"variants": ["lift_green"]}, "unknown variant"),
        ("tabletop", {"split": "test"}, "unknown split"),
        ("tabletop", {"pixels": ["top"]}, "unknown camera"),
        ("gym/HalfCheeta-v5", {}, "Did you mean 'HalfCheetah-v"),
        ("gym/CartPole-v1", {}, "Discrete action space"),
        ("brax/rabbit", {}, "unknown brax environment"),
    ],
)
def test_mistakes_name_the_choices(name, options, message):
    with pytest.raises(UserError, match=message):
        make(name, 2, **options)


def test_infinite_action_bounds_are_refused():
    import gymnasium as gym

    class Unbounded(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (2,))
        action_space = gym.spaces.Box(-np.inf, np.inf, (1,))

    gym.register("Unbounded-v0", Unbounded)
    with pytest.raises(UserError, match="without finite bounds"):
        make("gym/Unbounded-v0", 1)


def test_gym_tells_an_end_from_a_time_limit():
    import gymnasium as gym

    class Ends(gym.Env):
        """Ends at step 3 when the action is positive; counts in float64."""

        observation_space = gym.spaces.Box(-10, 10, (1,), dtype=np.float64)
        action_space = gym.spaces.Box(-1, 1, (1,), dtype=np.float64)

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return np.zeros(1), {}

        def step(self, action):
            self.t += 1
            return np.array([self.t], float), float(self.t), bool(self.t == 3 and action[0] > 0), False, {}

    gym.register("Ends-v0", Ends)
    env = make("gym/Ends-v0", 2, time_limit=4)
    steps = [env.step(torch.tensor([[1.0], [-1.0]])) for _ in range(4)]
    assert steps[2].terminated.tolist() == [True, False]
    assert steps[2].next_obs["proprio"][:, 0].tolist() == [3, 3]
    assert steps[2].obs["proprio"][:, 0].tolist() == [0, 3]
    assert steps[3].truncated.tolist() == [False, True]
    assert steps[3].reward.tolist() == [1, 4]


# -- the tabletop alone ---------------------------------------------------------------------------------------------


def test_sensors_belong_to_the_positions_and_agree_with_mj_forward():
    import mujoco

    env = make("tabletop/lift", 3, seed=0)
    roll(env, 10)
    assert env.diverged == 0
    engine, data = env._engine, mujoco.MjData(env._model)
    slices = tabletop.sensor_slices(env._model)
    for i in range(3):
        data.qpos[:], data.qvel[:] = engine.qpos[i], engine.qvel[i]
        data.mocap_pos[:] = engine.mocap_pos[i].reshape(3, 3)
        data.ctrl[:] = env._target[i]
        mujoco.mj_forward(env._model, data)
        moving = [s for name, s in slices.items() if not name.startswith("touch")]
        for s in moving:
            assert engine.sensors[i, s] == pytest.approx(data.sensordata[s], abs=1e-9)
    env.close()


def test_threads_do_not_change_the_physics():
    one, two = make("tabletop/move", 5, seed=1), make("tabletop/move", 5, seed=1, threads=2)
    assert all(same(flat(a), flat(b)) for a, b in zip(roll(one, 6), roll(two, 6)))


def test_proprio_is_what_the_encoders_give():
    env = make("tabletop/reach", 4, seed=0)
    step = roll(env, 6)[-1]
    proprio = step.obs["proprio"].numpy()
    again = kinematics.proprio(proprio[:, :6], proprio[:, 6:12], proprio[:, :6] + proprio[:, 12:18])
    assert proprio == pytest.approx(again, abs=2e-6)


def test_the_tracker_is_one_step_late():
    env = make("tabletop/lift_red", 2, seed=0)
    truth = [env._engine.sensors[:, env._slices["red_cube/pos"]].clone()]
    seen = [env.reset(0)["objects"]]
    env._engine._ahead[:, 1 + env._model.nq + 6] = 1.0  # push the red cube along x at 1 m/s
    for _ in range(4):
        seen.append(env.step(torch.zeros(2, 6)).next_obs["objects"])
        truth.append(env._engine.sensors[:, env._slices["red_cube/pos"]].clone())
    moved = [np.abs(t - truth[0]).max() for t in truth]
    assert moved[1] > 0.02
    for late in range(1, 4):
        assert seen[late + 1][:, 3:6].numpy() == pytest.approx(truth[late], abs=0.005)
    assert seen[1][:, 3:6].numpy() == pytest.approx(truth[0], abs=0.005)


def test_a_broken_world_is_reset_and_leaks_nothing():
    env = make("tabletop/lift", 3, seed=0)
    before = roll(env, 3)[-1].obs
    env._engine._ahead[1, 5] = np.nan  # a joint position
    env._engine._ahead[2, 1 + env._model.nq + 8] = 1e9  # a cube at the speed of light
    step = env.step(torch.zeros(3, 6))
    assert step.truncated.tolist() == [False, True, True]
    assert step.metrics["diverged"].tolist() == [0, 1, 1]
    assert step.reward[1:].tolist() == [0, 0]
    assert torch.equal(step.next_obs["proprio"][1:], before["proprio"][1:])
    assert env.diverged == 2
    bad_action = torch.zeros(3, 6)
    bad_action[0, 2] = float("nan")
    later = [env.step(bad_action), *roll(env, 3)]
    assert later[0].truncated.tolist() == [True, False, False]
    assert env.diverged == 3
    for s in [step, *later]:
        for value in flat(s).values():
            assert torch.isfinite(value.float()).all()


def test_engine_reports_worlds_that_mujoco_resets_silently():
    import mujoco

    model = mujoco.MjModel.from_xml_string(
        "<mujoco><worldbody><body><joint name='j' type='slide'/><geom size='.1' mass='1'/></body></worldbody>"
        "<actuator><motor joint='j'/></actuator><sensor><jointpos joint='j'/></sensor></mujoco>"
    )
    engine = MujocoEngine(model, 2, substeps=4)
    engine.reset(torch.arange(2), torch.zeros(2, 1), torch.zeros(2, 0), torch.zeros(2, 1))
    assert not engine.step(torch.tensor([[0.0], [1.0]])).any()
    assert engine.step(torch.tensor([[0.0], [1e300]], dtype=torch.float64)).tolist() == [False, True]


def test_success_needs_five_steps_in_a_row():
    env = make("tabletop/press_green", 1, seed=0)
    script = registry_script(env)
    obs, ok, held = env.reset(0), [], []
    for _ in range(40):
        step = env.step(script.act(obs))
        obs = step.obs
        ok.append(step.metrics["reward/success"].item())
        held.append(step.metrics["success"].item())
    first = ok.index(1.0)
    assert held[: first + HOLD_STEPS - 1] == [0.0] * (first + HOLD_STEPS - 1)
    assert held[first + HOLD_STEPS - 1] == 1.0


def registry_script(env):
    from sims.tasks import TASKS

    return TASKS[env.task_names[0]].demonstrator(env)


def test_reward_is_the_sum_of_its_terms_and_matches_by_hand():
    env = make("tabletop/reach", 2, seed=0)
    step = env.step(torch.tensor(env.spec.action.high).repeat(2, 1))
    terms = {k: v for k, v in step.metrics.items() if k.startswith("reward/")}
    assert step.reward.numpy() == pytest.approx(sum(v.numpy() for v in terms.values()), abs=1e-6)
    assert terms["reward/effort"].tolist() == pytest.approx([-0.06, -0.06])  # six unit actions, 0.01 each
    tip, marker = (env._sensors[k] for k in ("tip/pos", "marker/pos"))
    d = predicates.reach_distance(tip, marker)
    assert terms["reward/near"].numpy() == pytest.approx(0.5 - 0.5 * np.tanh(6 * d.numpy()), abs=1e-6)


def test_jobs_share_starts_and_can_be_swapped():
    red, blue = (make("tabletop", 3, seed=2, variants=[v]) for v in ("move_red", "lift_blue"))
    assert torch.equal(red.reset(2)["objects"], blue.reset(2)["objects"])
    both = make("tabletop", 3, seed=2, fixed_variants=["move_red", "reach", "press_yellow"])
    obs = both.reset(2)
    assert torch.equal(obs["objects"], red.reset(2)["objects"])
    assert obs["goal"].argmax(1).tolist() == [SLOTS.index(s) for s in ("red_cube", "marker", "yellow_button")]
    swapped = both.set_variants(["lift_blue"] * 3)
    assert swapped["goal"].argmax(1).tolist() == [2, 2, 2]
    assert torch.equal(swapped["proprio"], obs["proprio"])
    assert all("blue" in both.spec.instructions[i] for i in swapped["instruction"])
    assert both.set_instruction([0, 1, 2])["instruction"].tolist() == [0, 1, 2]
    with pytest.raises(UserError, match="unknown variant"):
        both.set_variants(["lift_bleu"] * 3)


def test_instructions_name_the_job():
    env = make("tabletop", 64, seed=0, phrasings="heldout")
    obs = env.reset(0)
    for job, i in zip(env.variant_ids, obs["instruction"]):
        name, sentence = env.variants[job], env.spec.instructions[i]
        colour = VARIANTS[name].goal.split("_")[0]
        assert (colour in sentence.split()) or name == "reach"
    assert set(env.variant_ids.tolist()) == set(range(len(VARIANTS)))


def test_pixels_show_the_true_successor():
    env = make("tabletop/press", 2, seed=0, pixels=("front", "side"), image_size=32, time_limit=2)
    first = env.reset(0)
    steps = roll(env, 2)
    for camera in ("front", "side"):
        name = f"pixels/{camera}"
        assert steps[0].next_obs[name].shape == (2, 32, 32, 3)
        assert steps[1].truncated.all()
        assert not torch.equal(steps[1].next_obs[name], steps[1].obs[name])
        assert torch.equal(env.render([0, 1], camera), steps[1].obs[name])
        assert (steps[1].next_obs[name].float() - first[name].float()).abs().mean() < 60
    env.close()


def test_brax_keeps_ends_limits_and_successors_apart():
    env = make("brax/inverted_pendulum", 4, seed=0, backend="spring", time_limit=12)
    ends = limits = 0
    for action in random_actions(env, 40):
        step = env.step(action)
        done = step.terminated | step.truncated
        assert not (step.terminated & step.truncated).any()
        moved = (step.obs["proprio"] != step.next_obs["proprio"]).any(1)
        assert torch.equal(moved, done)
        fallen = step.next_obs["proprio"][:, 1].abs() > 0.2  # brax ends an episode beyond 0.2 rad
        assert torch.equal(fallen, step.terminated)
        ends, limits = ends + int(step.terminated.sum()), limits + int(step.truncated.sum())
    assert ends
    assert limits
    state = env.state_dict()
    action = torch.full((4, 1), 0.3)
    wanted = env.step(action)
    env.step(action)
    env.load_state_dict(state)
    assert same(flat(env.step(action)), flat(wanted))


def test_frames_between_are_those_of_the_last_drawn_step_of_the_same_episode() -> None:
    every, second = (
        make("tabletop/reach", 2, seed=4, pixels=("front",), image_size=16, draw_every=n, time_limit=3) for n in (1, 2)
    )
    start = every.reset(4)["pixels/front"]
    assert torch.equal(second.reset(4)["pixels/front"], start)
    action = torch.full((2, 6), 0.1)
    drawn, held = [start], []
    for _ in range(5):  # steps 0, 2 and 4 draw; the episode ends with step 2
        drawn.append(every.step(action).next_obs["pixels/front"])
        held.append(second.step(action).next_obs["pixels/front"])
    assert torch.equal(held[0], drawn[1])
    assert torch.equal(held[1], drawn[1])
    assert not torch.equal(drawn[2], drawn[1])
    assert torch.equal(held[2], drawn[3])
    assert not torch.equal(held[3], drawn[3]), "the frame of an ended episode stood in a new one"
    assert torch.equal(held[4], drawn[5])


def test_the_privileged_group_is_the_truth_of_which_the_tracker_reports_a_noisy_past():
    plain, told = (make("tabletop", 8, seed=3, time_limit=6, privileged=p) for p in (False, True))
    assert told.spec.observation["privileged"].names[-4:] == (
        "touch/fixed", "touch/moving", "green_button/travel", "yellow_button/travel")  # fmt: skip
    truth, ended = told.reset(5)["privileged"], torch.zeros(8, dtype=torch.bool)
    plain.reset(5)
    for a, b in zip(roll(plain, 13), roll(told, 13), strict=True):
        assert same(flat(a), {k: v for k, v in flat(b).items() if k != "obs/privileged"})
        error = (b.next_obs["objects"] - truth[:, :25]).abs()
        assert error.max() < 0.35  # five deviations of four times an angle; of a position much less:
        assert error[:, :6].max() < 0.006
        ended = b.terminated | b.truncated
        truth = b.obs["privileged"]
        assert torch.equal(truth[~ended], b.next_obs["privileged"][~ended])
        assert truth.dtype == torch.float32
    assert (truth[:, 25:] == 0).all()  # just reset or far from everything
    plain.close()
    told.close()
