"""Faults that public bug reports found in other adapters, looked for in every family of worlds.

docs/traps.md says which report belongs to which test.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sims.errors import UserError
from sims.registry import FAMILIES, make

# one of every family and of every kind of simulator; brax's own take ten seconds each to compile and are in test_envs
WORLDS = ("tabletop", "tabletop/lift", "gym/Pendulum-v1", "gym/InvertedDoublePendulum-v5", "gym/HalfCheetah-v5",
          "brax/toy")  # fmt: skip
LIMIT = 6


@pytest.fixture(scope="module", autouse=True)
def toy_of_brax():
    """A plane that turns: an environment of brax without its physics, so that what is tested is the adapter."""
    envs = pytest.importorskip("brax.envs")
    import jax
    from jax import numpy as jnp

    class Toy(envs.Env):
        observation_size, action_size, dt, backend = 2, 1, 0.05, "generalized"

        def __init__(self, backend="generalized"):
            pass

        def reset(self, rng):
            x = jax.random.uniform(rng, (2,), minval=-1, maxval=1)
            return envs.State({"x": x}, x, jnp.zeros(()), jnp.zeros(()))

        def step(self, state, action):
            turn = jnp.array([[0.6, -0.8], [0.8, 0.6]])
            x = jnp.dot(turn, state.pipeline_state["x"]) + 0.3 * action
            return state.replace(pipeline_state={"x": x}, obs=x, reward=-x[0], done=(jnp.abs(x[0]) > 1.2).astype(float))

    envs.register_environment("toy", Toy)
    yield
    envs._envs.pop("toy")


def world_of(name, num_envs=3, seed=4, **options):
    return make(name, num_envs, seed=seed, **{"time_limit": LIMIT, **options})


def actions_of(env, steps, seed=0):
    """(steps, B, A) in the bounds; those of environment i do not depend on how many there are."""
    low, high = torch.tensor(env.spec.action.low), torch.tensor(env.spec.action.high)
    rows = [
        torch.rand((steps, len(low)), generator=torch.Generator().manual_seed(100 * seed + i))
        for i in range(env.num_envs)
    ]
    return low + (high - low) * torch.stack(rows, 1)


def roll(env, steps, seed=0):
    return [env.step(action) for action in actions_of(env, steps, seed)]


@pytest.fixture(params=WORLDS)
def env(request):
    env = world_of(request.param)
    yield env
    env.close()


def test_every_family_is_looked_at():
    assert {name.partition("/")[0] for name in WORLDS} == set(FAMILIES)


def test_each_step_gives_the_true_successor_and_what_to_act_on_next(env):
    """The kinds: final observation lost, replaced by the reset's, or acted on; a reset row in between."""
    before, resets = env.reset(3), 0
    for step in roll(env, 4 * LIMIT):
        done = step.terminated | step.truncated
        assert not (step.terminated & step.truncated).any()
        for group in env.spec.observation:
            same = (step.obs[group] == step.next_obs[group]).view(env.num_envs, -1).all(1)
            assert same[~done].all(), group
        moved = (step.next_obs["proprio"] != before["proprio"]).any(1)
        assert moved.all()  # no action is swallowed by a reset
        changed = (step.obs["proprio"] != step.next_obs["proprio"]).any(1)
        assert torch.equal(changed, done)
        resets += int(done.sum())
        before = step.obs
    assert resets >= 4 * env.num_envs


def test_a_limit_counts_the_actions_of_each_episode_and_is_no_end(env):
    env.reset(3)
    age, limits = torch.zeros(env.num_envs), 0
    for step in roll(env, 4 * LIMIT):
        age += 1
        assert torch.equal(step.truncated, (age == LIMIT) & ~step.terminated)
        age[step.terminated | step.truncated] = 0
        limits += int(step.truncated.sum())
    assert limits >= env.num_envs
    # an end is one without a limit too: of a first episode, the same is terminated at the same step
    unlimited = world_of(env.spec.task, time_limit=500)
    env.reset(3)
    unlimited.reset(3)
    first = torch.ones(env.num_envs, dtype=torch.bool)
    for a, b in zip(roll(env, LIMIT), roll(unlimited, LIMIT)):
        assert torch.equal(a.terminated[first], b.terminated[first])
        first &= ~b.terminated
    unlimited.close()


def test_what_was_returned_is_never_written_again(env):
    """The kind: a buffer that the next step reuses, so that stored observations change behind one's back."""
    kept = [(env.reset(3), 0.0)]
    kept[0] = (kept[0][0], {k: v.clone() for k, v in kept[0][0].items()})
    for step in roll(env, 2 * LIMIT):
        tensors = {**{f"o/{k}": v for k, v in step.obs.items()}, **{f"n/{k}": v for k, v in step.next_obs.items()},
                   "reward": step.reward, "t": step.terminated, "u": step.truncated, **step.metrics}  # fmt: skip
        kept.append((tensors, {k: v.clone() for k, v in tensors.items()}))
    for tensors, copies in kept:
        for key, value in tensors.items():
            assert torch.equal(value, copies[key]), key


def test_numbers_are_float32_and_flags_are_bool(env):
    step = roll(env, 1)[0]
    assert step.reward.dtype == torch.float32
    assert step.terminated.dtype == step.truncated.dtype == torch.bool
    assert all(
        x.shape == (env.num_envs,) for x in (step.reward, step.terminated, step.truncated, *step.metrics.values())
    )


def test_an_environment_is_the_same_in_any_company(env, request):
    """Environment i draws from the stream (seed, i), whatever the size of the batch and whatever was run before."""
    name = request.node.callspec.params["env"]
    alone = world_of(name, 1, seed=9)
    roll(env, 3, seed=5)
    near = 1e-6 if name.startswith("brax") else 0  # another batch size is compiled to another order of sums
    assert torch.allclose(env.reset(8)["proprio"][:1], alone.reset(8)["proprio"], atol=near)
    for a, b in zip(roll(env, 2 * LIMIT + 1), roll(alone, 2 * LIMIT + 1)):
        assert torch.allclose(a.next_obs["proprio"][:1], b.next_obs["proprio"], atol=near)
        assert torch.equal(a.truncated[:1], b.truncated)
    first = env.reset(8)["proprio"]
    assert not torch.equal(first[0], first[1])
    alone.close()


def test_episodes_of_one_environment_differ(env):
    env.reset(3)
    starts = [step.obs["proprio"][0] for step in roll(env, 4 * LIMIT) if (step.terminated | step.truncated)[0]]
    assert len(starts) >= 4
    assert len({tuple(s.tolist()) for s in starts}) == len(starts)


def test_a_bad_action_restarts_its_environment_and_no_other(env):
    env.reset(3)
    roll(env, 2)
    state = env.state_dict()
    good = actions_of(env, 1, seed=7)[0]
    bad = good.clone()
    bad[1] = math.nan
    step = env.step(bad)
    _check_restart(env, step, 1)
    after = roll(env, 3, seed=8)
    env.load_state_dict(state)
    others = [0, 2]
    for a, b in zip([step, *after], [env.step(good), *roll(env, 3, seed=8)]):
        assert torch.equal(a.next_obs["proprio"][others], b.next_obs["proprio"][others])
        assert torch.isfinite(a.obs["proprio"]).all()


def break_tabletop(env, i):
    env._engine._ahead[i, 5] = np.nan


def break_gym(env, i):
    inner = env._envs[i].unwrapped
    if hasattr(inner, "data"):
        inner.data.qpos[0] = np.nan  # MuJoCo puts such a world back to its start, in silence
    else:
        inner.state = np.array([np.nan, 0.0])


def break_brax(env, i):
    state, *rest = env._carry
    env._carry = (state.replace(pipeline_state={"x": state.pipeline_state["x"].at[i].set(np.nan)}), *rest)


BREAK = {"tabletop": break_tabletop, "gym": break_gym, "brax": break_brax}


def test_a_world_that_breaks_down_is_reset_reported_and_leaks_nothing(env):
    env.reset(3)
    before = roll(env, 2)[-1].obs["proprio"]
    BREAK[env.spec.task.partition("/")[0]](env, 1)
    step = roll(env, 1, seed=7)[0]
    _check_restart(env, step, 1)
    assert torch.equal(step.next_obs["proprio"][1], before[1])  # the last good one, for a state that is none
    for later in roll(env, 2 * LIMIT, seed=8):
        assert later.metrics["diverged"].sum() == 0
        assert torch.isfinite(later.next_obs["proprio"]).all()
        assert torch.isfinite(later.reward).all()


def _check_restart(env, step, i):
    """Environment ``i`` was reset: no reward, no bootstrap worth learning from, marked so that loops leave it out."""
    marks = [float(j == i) for j in range(env.num_envs)]
    assert step.metrics["diverged"].tolist() == marks
    assert step.truncated.tolist() == [bool(m) for m in marks]
    assert not step.terminated.any()
    assert step.reward[i] == 0
    assert env.diverged == 1
    assert all(
        torch.isfinite(x[i]).all() for x in (*step.obs.values(), *step.next_obs.values()) if x.is_floating_point()
    )
    assert not torch.equal(step.obs["proprio"][i], step.next_obs["proprio"][i])


@pytest.mark.parametrize("limit", [0, -1])
@pytest.mark.parametrize("name", WORLDS)
def test_a_limit_below_one_action_is_refused(name, limit):
    with pytest.raises(UserError, match=f"time_limit={limit}"):
        world_of(name, time_limit=limit)


@pytest.mark.parametrize("name", ["tabletop", "gym/HalfCheetah-v5"])
def test_the_model_of_the_physics_is_the_same_after_many_resets(name):
    """The kind: a reset that scales masses in place, so that they drift from episode to episode."""
    env = world_of(name, 2)
    model = env._model if name == "tabletop" else env._envs[0].unwrapped.model
    fields = ("body_mass", "body_inertia", "geom_friction", "geom_size", "dof_damping", "actuator_gainprm")
    before = {f: np.array(getattr(model, f)).copy() for f in fields}
    gravity = model.opt.gravity.copy()
    for seed in range(3):
        env.reset(seed)
        roll(env, 2 * LIMIT)
    assert all(np.array_equal(v, getattr(model, f)) for f, v in before.items())
    assert np.array_equal(gravity, model.opt.gravity)
    env.close()


def test_brax_multiplies_in_full_float32():
    """The kind: TF32 by default on a GPU, with which published results were not reached."""
    jax = pytest.importorskip("jax")
    env = world_of("brax/toy")
    text = str(jax.make_jaxpr(env._step)(env._carry, np.zeros((3, 1), np.float32)))
    products = text.split("dot_general[")[1:]
    assert products
    assert all("HIGHEST" in product.split("]\n")[0][:400] for product in products)
