"""Does an environment keep the contract of :class:`sims.types.VecEnv`? Verdicts on registered ones and on yours.

Each check rolls a few random actions and looks at one promise. They look from outside, through the interface alone, so
they say the same of any simulator; what only a simulator's own state can show is tested beside its adapter.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sims import check_behaviour as behaviour
from sims import check_rules as rules
from sims.check_probe import LIMIT, Build, Fault, Probe, Skip
from sims.errors import UserError, unknown_choice


@dataclass(frozen=True)
class Verdict:
    """Outcome of one check.

    Attributes:
        check: its name in :data:`CHECKS`.
        status: ``"pass"``, ``"FAIL"``, or ``"skip"`` where the environment gave nothing to look at.
        checked: what was checked.  found: what was found.  advice: what to do; empty for a pass.
    """

    check: str
    status: str
    checked: str
    found: str
    advice: str = ""

    def __str__(self) -> str:
        lines = [f"{self.status}  {self.check:<12} {self.checked}", f"{'':19}found: {self.found}"]
        return "\n".join(lines + [f"{'':19}do: {self.advice}"] * bool(self.advice))


CHECKS: dict[str, Callable[[Probe], str]] = {
    "interface": rules.interface,
    "spec": rules.spec,
    "observation": rules.observation,
    "outcome": rules.outcome,
    "rewards": rules.rewards,
    "successor": rules.successor,
    "limit": rules.limit,
    "horizon": rules.horizon,
    "seed": behaviour.seed,
    "variety": behaviour.variety,
    "company": behaviour.company,
    "clipping": behaviour.clipping,
    "bad action": behaviour.bad_action,
    "state": behaviour.state,
    "memory": behaviour.memory,
    "picture": behaviour.picture,
}


def check_env(
    build: Build | str, checks: Iterable[str] = tuple(CHECKS), *, steps: int = 4 * LIMIT, tolerance: float = 0.0
) -> list[Verdict]:
    """Run checks on an environment.

    Args:
        build: ``build(num_envs, seed, **options)`` makes one, or a name in the registry. Where it takes the option
            ``time_limit``, episodes of six actions are made with it, so that ends are seen soon.
        checks: names in :data:`CHECKS`. All after a failed ``interface`` are left out: they would say the same.
        steps: actions per check.
        tolerance: largest difference between two runs that should be the same; 0: to the last bit.

    Raises:
        UserError: an unknown check, or an unknown name of an environment.
    """
    names = tuple(checks)
    for name in names:
        if name not in CHECKS:
            raise unknown_choice("check", name, CHECKS)
    if isinstance(build, str):
        from sims.registry import make

        build = functools.partial(make, build)
    probe = Probe(build, steps, tolerance)
    verdicts: list[Verdict] = []
    try:
        for name in ("interface", *(n for n in names if n != "interface")):
            verdicts.append(run_check(name, probe))
            if name == "interface" and verdicts[0].status == "FAIL":
                break
    finally:
        probe.close()
    return [v for v in verdicts if v.check in names or v.status == "FAIL"]


def run_check(name: str, probe: Probe) -> Verdict:
    """One check on an environment that is open already."""
    check = CHECKS[name]
    what = " ".join((check.__doc__ or "").split())
    try:
        return Verdict(name, "pass", what, check(probe))
    except Skip as skip:
        return Verdict(name, "skip", what, str(skip))
    except Fault as fault:
        return Verdict(name, "FAIL", what, fault.found, fault.advice)
    except UserError as error:
        return Verdict(name, "FAIL", what, str(error), "see the message")
    except Exception as error:  # the environment's own; each check reports its own and the next one still runs
        return Verdict(name, "FAIL", what, f"{type(error).__name__}: {error}", f"look at {_place(error)}")


def _place(error: Exception) -> str:
    """Where an exception came from: file, line and function."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}, in {frame.name}"


def require(verdicts: Iterable[Verdict]) -> None:
    """For tests: raise AssertionError with every failed verdict."""
    failed = [str(v) for v in verdicts if v.status == "FAIL"]
    assert not failed, "\n" + "\n".join(failed)
