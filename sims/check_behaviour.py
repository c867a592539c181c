"""Checks of how an environment behaves: seeds, company, clipping, bad actions, saved state, returned memory, pictures.

The docstring of a check says what is checked, and what it returns says what was found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sims.check_probe import Probe, Skip, demand, done_of, flat
from sims.errors import UserError
from sims.types import VecEnv


def seed(probe: Probe) -> str:
    """the same seed gives the same episodes to the last bit, another seed gives others"""
    env = probe.env
    runs = []
    for number in (7, 7, 8):
        first = env.reset(number)
        runs.append([dict(first), *map(flat, probe.roll(env))])
    for step, (a, b) in enumerate(zip(runs[0], runs[1])):
        wrong = probe.differing(a, b)
        demand(not wrong, f"two runs from reset(7) differ at step {step} in {', '.join(wrong)}",
               "draw random numbers from a generator seeded in reset(), and reset all of the state there")  # fmt: skip
    demand(probe.differing(runs[0][0], runs[2][0]), "reset(7) and reset(8) give the same observations",
           "draw the starts from the seed; a world without random starts teaches one path only")  # fmt: skip
    return f"{len(runs[0]) - 1} steps, the same twice"


def variety(probe: Probe) -> str:
    """worlds of one batch start differently, and so do the episodes of one world"""
    env = probe.env
    starts = [{g: env.reset(3)[g] for g in env.spec.observation}]
    alike = all(torch.equal(row[0], row[1]) for row in starts[0].values())
    demand(not alike, "worlds 0 and 1 start alike", "draw the start of world i from the stream (seed, i)")
    rows = [_row(starts[0], 0)]
    for step in probe.roll(env, 10 * probe.steps if probe.limited else probe.steps):
        if bool(done_of(step)[0]):
            rows.append(_row(step.obs, 0))
        if len(rows) > 3:
            break
    if len(rows) == 1:
        raise Skip("world 0 did not end an episode")
    different = len({tuple(r.tolist()) for r in rows})
    demand(different == len(rows), f"of {len(rows)} episodes of world 0 only {different} start differently",
           "go on in the random stream at an automatic reset instead of seeding it again")  # fmt: skip
    return f"{len(rows)} different starts of world 0"


def _row(obs: Mapping[str, Tensor], i: int) -> Tensor:
    return torch.cat([value[i].flatten().double() for name, value in obs.items() if not name.startswith("pixels/")])


def company(probe: Probe) -> str:
    """world 0 is the same alone as among others, whatever was run before"""
    env, alone = probe.env, probe.open(1, seed=9)
    env.reset(5)
    probe.roll(env, 3, seed=5)
    pairs = [(dict(env.reset(8)), dict(alone.reset(8)))]
    pairs += [(flat(a), flat(b)) for a, b in zip(probe.roll(env), probe.roll(alone))]
    for step, (many, one) in enumerate(pairs):  # a term of a reward may be that of another world's task
        wrong = probe.differing({k: v[:1] for k, v in many.items() if k in one}, one)
        demand(not wrong, f"world 0 of {env.num_envs} and of 1 differ at step {step} in {', '.join(wrong)}",
               "give world i a random stream of its own, seeded from (seed, i)")  # fmt: skip
    return f"{len(pairs) - 1} steps"


def clipping(probe: Probe) -> str:
    """actions beyond the bounds do what the bounds do"""
    env = probe.env
    for name in ("low", "high"):
        edge = torch.tensor(getattr(env.spec.action, name), dtype=torch.float32, device=env.device)
        beyond = edge + edge.sign() * 50 * (1 + edge.abs())
        env.reset(2)
        at = flat(env.step(edge.repeat(env.num_envs, 1)))
        env.reset(2)
        wrong = probe.differing(at, flat(env.step(beyond.repeat(env.num_envs, 1))))
        demand(not wrong, f"an action beyond '{name}' differs from one at it in {', '.join(wrong)}",
               "clip actions to spec.action.low and .high in step()")  # fmt: skip
    return "the same at and beyond both bounds"


def bad_action(probe: Probe) -> str:
    """an action that is not a number restarts its own world, counted as diverged, and no other notices"""
    env, bad = probe.env, 1
    plain = probe.actions(env, 8, seed=3)
    spoilt = plain.clone()
    spoilt[2, bad] = math.nan
    env.reset(6)
    wanted = [env.step(action) for action in plain]
    env.reset(6)
    got = [env.step(action) for action in spoilt]
    hit = got[2]
    for name, value in [*flat(hit).items(), *flat(got[3]).items()]:
        demand(not value.is_floating_point() or value.isfinite().all(), f"{name} is not finite afterwards",
               "return the last good observation as next_obs and reward 0, and reset that world")  # fmt: skip
    demand(hit.truncated[bad] and not hit.terminated[bad], "its world went on, or counts as terminated",
           "reset it and report truncated; it must not count as an outcome of the task")  # fmt: skip
    found = hit.metrics.get("diverged")
    demand(found is not None and found[bad] == 1 and hit.reward[bad] == 0,
           f"metrics['diverged'] is {None if found is None else found.tolist()}, its reward {float(hit.reward[bad]):g}",
           "report metrics['diverged'] = 1 and reward 0, so that learners leave the step out")  # fmt: skip
    others = [i for i in range(env.num_envs) if i != bad]
    for a, b in zip(wanted, got):
        wrong = probe.differing({k: v[others] for k, v in flat(a).items()}, {k: v[others] for k, v in flat(b).items()})
        demand(not wrong, f"the other worlds changed in {', '.join(wrong)}", "keep worlds apart, random streams too")
    return "its world restarted, the others unchanged"


def state(probe: Probe) -> str:
    """state_dict() goes on to the last bit in another environment, and holds plain data"""
    env = probe.env
    env.reset(5)
    probe.roll(env, 3)
    saved = env.state_dict()
    strange = [f"{path} ({type(value).__name__})" for path, value in _leaves(saved) if not isinstance(value, _PLAIN)]
    demand(not strange, f"it holds {', '.join(strange)}", "keep tensors, arrays, numbers, strings, dicts and lists")
    before = repr(saved)
    wanted = [flat(s) for s in probe.roll(env, seed=1)]
    demand(repr(saved) == before, "what was saved changed while the environment went on", "copy what is saved")
    other = probe.open(seed=99)
    obs = other.load_state_dict(saved)
    demand(set(obs) == set(env.spec.observation), f"load_state_dict() returned {sorted(obs)}",
           "return the observation that was current")  # fmt: skip
    for step, (a, b) in enumerate(zip(wanted, probe.roll(other, seed=1))):
        wrong = probe.differing(a, flat(b))
        demand(not wrong, f"{step + 1} steps later they differ in {', '.join(wrong)}",
               "save all that the future depends on: positions, speeds, clocks, random streams")  # fmt: skip
    return f"{len(wanted)} steps, the same from a saved state"


_PLAIN = (Tensor, np.ndarray, np.generic, bool, int, float, str, bytes, type(None))


def _leaves(node: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(node, Mapping):
        return [leaf for key, value in node.items() for leaf in _leaves(value, f"{path}/{key}")]
    if isinstance(node, (list, tuple)):
        return [leaf for key, value in enumerate(node) for leaf in _leaves(value, f"{path}/{key}")]
    return [(path or "/", node)]


def memory(probe: Probe) -> str:
    """what was returned is never written again"""
    env = probe.env
    first = env.reset(3)
    kept = [(dict(first), {k: v.clone() for k, v in first.items()})]
    for step in probe.roll(env):
        kept.append((flat(step), {k: v.clone() for k, v in flat(step).items()}))
    changed = {name for now, then in kept for name, value in now.items() if probe.gap(value, then[name]) > 0}
    demand(not changed, f"{', '.join(sorted(changed))} changed after it was returned",
           "return copies; replay and rollouts keep what they were given")  # fmt: skip
    return f"{len(kept)} steps kept their values"


def picture(probe: Probe) -> str:
    """render() draws the worlds asked for, uint8 (N, H, W, 3), and something is to be seen"""
    env = probe.env
    camera = cameras_of(env)[0]
    env.reset(1)
    try:
        frames = env.render([0, 2], camera)
    except UserError:
        frames = _drawable(probe).render([0, 2], camera)
    found = f"{frames.dtype} {tuple(frames.shape)}" if isinstance(frames, Tensor) else type(frames).__name__
    demand(isinstance(frames, Tensor) and frames.dtype == torch.uint8 and frames.ndim == 4
           and frames.shape[0] == 2 and frames.shape[3] == 3,
           f"render([0, 2]) gave {found}", "return a uint8 tensor (N, H, W, 3)")  # fmt: skip
    spread = float(frames.float().std())
    demand(spread > 1, f"a picture of one colour (spread {spread:.2g} of 255)", "look at the camera and the light")
    return f"{found} from camera '{camera or 'default'}'"


def _drawable(probe: Probe) -> VecEnv:
    """One made with ``render=True``, which some take to prepare for pictures."""
    try:
        env = probe.open(render=True)
        env.render([0], cameras_of(env)[0])
    except Exception as error:
        if isinstance(error, (TypeError, UserError, ImportError)) or type(error).__name__ == "DependencyNotInstalled":
            raise Skip(str(error)) from error
        raise
    return env


def cameras_of(env: VecEnv) -> tuple[str, ...]:
    """Names that ``env.render`` takes; ``""`` where the environment has one camera without a name."""
    named = getattr(getattr(env, "world", None), "cameras", ()) or getattr(env, "cameras", ())
    drawn = tuple(g.removeprefix("pixels/") for g in env.spec.observation if g.startswith("pixels/"))
    return tuple(named) or drawn or ("",)
