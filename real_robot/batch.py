"""Execute many sentences with one policy on one robot, one row of results each; a second call resumes."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from control.policy import Policy, load_policy
from distill.text_gate import Grounding, Language, ground, load_language, make_language
from real_robot.contract import JointMap, check_contract, language_group
from real_robot.loop import EpisodeLog, PolicyPlayer, run_episode, travel
from real_robot.results import Request, ResultBook, key_of
from real_robot.safety import FAULT
from real_robot.session import Session
from sims.errors import UserError
from sims.worlds import language
from sims.worlds.variants import EPISODE_STEPS, SLOTS, VARIANTS

Guard = Callable[[Callable[[str], None]], Any]
DEFAULT_STEPS = 100


def draw_requests(count: int, seed: int, realtime: bool = False) -> list[Request]:
    """``count`` held-out sentences, every job equally often (up to one), order and layouts drawn by seed."""
    rng = np.random.default_rng([seed, 7])
    names = list(VARIANTS)
    jobs = [names[i % len(names)] for i in range(count)]
    requests = []
    for index, place in enumerate(rng.permutation(count)):
        known = language.sentences(jobs[place], "heldout")
        requests.append(Request(index, str(rng.choice(known)), int(rng.integers(2**31)), jobs[place], realtime))
    return requests


def run_sentences(
    policy: str | Path,
    sentences: Sequence[str],
    seeds: Sequence[int],
    lockstep: bool = True,
    variants: Sequence[str] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Rows of :func:`run_requests` for sentences with one layout seed each."""
    jobs = variants or [""] * len(sentences)
    requests = [Request(i, s, seed, v, not lockstep) for i, (s, seed, v) in enumerate(zip(sentences, seeds, jobs))]
    return run_requests(policy, requests, **options)


def run_requests(
    policy: str | Path,
    requests: Sequence[Request],
    *,
    out: Path,
    robot: str = "so101_virtual",
    port: str = "",
    tracker: str = "",
    live: bool = True,
    split: str = "heldout",
    steps: int = 0,
    estop_file: Path | None = None,
    guard: Guard | None = None,
    strict: bool = False,
) -> list[dict[str, Any]]:
    """Execute the requests that ``out/results.jsonl`` does not hold yet; returns all rows in order.

    Policy, contract and every sentence are checked before the robot is touched. After a fault of a real arm, or an
    emergency stop, the rest is left undone: the rows so far come back, and the same call goes on later.

    Args:
        policy: folder of an artefact. out: gets results.jsonl, trajectories/*.npz, metrics.jsonl and deploy.json.
        live: False = dry run. split: start ranges of the virtual table. steps: 0 = time limit of the task.
        guard: context manager that may stop the robot, given ``gate.estop``.
        strict: a refused sentence raises instead of becoming a row that counts as a failure.

    Raises:
        UserError: unusable policy, contract mismatch, port trouble, or (strict) a refused sentence.
    """
    loaded = load_policy(policy)
    session = {"port": port, "tracker": tracker, "live": live, "estop_file": estop_file}
    joints = check_contract(loaded.spec, Session(robot, **session).spec)
    understood = _understand(loaded, requests, strict)
    book = ResultBook(out, _identity(loaded, robot, live, split, steps))
    done = book.load(requests)
    for realtime in (False, True):
        todo = [r for r in requests if r.realtime == realtime and key_of(r) not in done]
        for request in [r for r in todo if isinstance(understood[r.sentence], UserError)]:
            book.add(request, _refused(request, str(understood[request.sentence]), robot), {})
        todo = [r for r in todo if not isinstance(understood[r.sentence], UserError)]
        if not todo:
            continue
        with Session(robot, lockstep=not realtime, **session) as opened, _guarded(guard, opened):
            for request in todo:
                if opened.gate.state == FAULT:
                    break
                run = Run(opened, loaded, joints, split, steps, request, understood[request.sentence])  # type: ignore[arg-type]
                book.add(request, *run.execute())
                if opened.virtual and not opened.gate.estopped:
                    opened.gate.reset()  # the table is set anew; a real arm waits for a person
    return book.finish(requests)


def _guarded(guard: Guard | None, session: Session) -> Any:
    return guard(session.gate.estop) if guard is not None else contextlib.nullcontext()


def _understand(policy: Policy, requests: Sequence[Request], strict: bool) -> dict[str, Grounding | UserError]:
    """Sentence -> grounding, or why it is refused."""
    spec = policy.spec
    known: Language = load_language(policy.path) if spec.language else make_language(list(VARIANTS))
    found: dict[str, Grounding | UserError] = {}
    for sentence in dict.fromkeys(r.sentence for r in requests):
        try:
            found[sentence] = ground(sentence, known)
            _check_job(policy, found[sentence].variant)  # type: ignore[union-attr]
        except UserError as error:
            if strict:
                raise
            found[sentence] = error
    return found


def _check_job(policy: Policy, variant: str) -> None:
    """A specialist takes no sentence: it does its one task on the object it is told."""
    task = policy.spec.env.task.removeprefix("tabletop/")
    if policy.spec.language is None and task not in ("tabletop", variant, VARIANTS[variant].task):
        raise UserError(f"policy {policy.path} was trained for '{task}' and cannot do '{variant}'.")


class Run:
    """One sentence on an open robot."""

    def __init__(
        self,
        session: Session,
        policy: Policy,
        joints: JointMap,
        split: str,
        steps: int,
        request: Request,
        meaning: Grounding,
    ) -> None:
        self.session, self.policy, self.joints, self.split = session, policy, joints, split
        self.request, self.meaning = request, meaning
        self.variant = request.variant or meaning.variant
        self.steps = steps or EPISODE_STEPS.get(VARIANTS[self.variant].task, DEFAULT_STEPS)

    def execute(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """(row of results, arrays of the trajectory)."""
        session, gate = self.session, self.session.gate
        started = time.monotonic()
        if session.emulator is not None:
            session.reset_world(seed=self.request.seed, split=self.split, variant=self.variant)
        before, counted = session.device_stats(), dict(gate.counters)
        verdict, world = {}, {}
        gate.engage()
        player = PolicyPlayer(self.policy, self.joints, session.spec, self._inputs())
        with _no_garbage_collection(self.request.realtime):
            log = run_episode(gate, session.sensors, player, session.clock, self.steps)
        if session.emulator is not None:
            verdict, world = (session.emulator.control.request(op) for op in ("judge", "trajectory"))
        elif session.live and gate.state != FAULT:
            travel(gate, session.clock, session.spec.array("home"))
        gate.release()
        gate_counts = {k: v - counted.get(k, 0) for k, v in gate.counters.items() if v != counted.get(k, 0)}
        row = self._row(log, verdict, gate_counts, _difference(before, session.device_stats()))
        row["wall_s"] = round(time.monotonic() - started, 3)
        return row, {**log.arrays(), **{k: np.array(v, dtype=np.float32) for k, v in world.items()}}

    def _inputs(self) -> dict[str, np.ndarray]:
        goal = np.zeros(len(SLOTS), dtype=np.float32)
        goal[VARIANTS[self.meaning.variant].slot] = 1.0
        inputs = {"goal": goal}
        if group := language_group(self.policy.spec) if self.policy.spec.language else "":
            inputs[group] = self.meaning.embedding
        return inputs

    def _row(
        self, log: EpisodeLog, verdict: dict[str, Any], gate: dict[str, int], device: dict[str, int]
    ) -> dict[str, Any]:
        session = self.session
        return {
            **_head(self.request, session.spec.name),
            "variant": self.variant,
            "understood": self.meaning.variant,
            "success": bool(verdict["success"]) if verdict else None,
            "refused": None,
            "steps": verdict.get("first") or log.steps if verdict else log.steps,
            "executed_steps": log.steps,
            "ended": log.ended,
            "live": session.live,
            "gate": gate,
            "violations": device.get("limits_violated", 0),
            "device": device,
            "overruns": log.timing.overruns,
            "skipped": log.timing.skipped,
            "lateness_us": log.timing.summary() if self.request.realtime else {},
        }


def _head(request: Request, robot: str) -> dict[str, Any]:
    return {
        "index": request.index,
        "sentence": request.sentence,
        "seed": request.seed,
        "variant": request.variant or None,
        "realtime": request.realtime,
        "robot": robot,
    }


def _refused(request: Request, reason: str, robot: str) -> dict[str, Any]:
    """A refused sentence counts as not done; nothing moved."""
    row = _head(request, robot)
    row |= {"success": False, "refused": reason, "steps": None, "executed_steps": 0, "ended": "refused"}
    return row | {"gate": {}, "violations": 0, "overruns": 0, "lateness_us": {}, "wall_s": 0.0}


def _difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    names = ("goals", "out_of_range", "too_fast", "limits_violated", "write_instructions", "skipped_steps")
    return {n: after[n] - before[n] for n in names if n in after}


@contextlib.contextmanager
def _no_garbage_collection(active: bool) -> Iterator[None]:
    """A collection in the middle of a servo period is a late command."""
    if not active:
        yield
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _identity(policy: Policy, robot: str, live: bool, split: str, steps: int) -> str:
    """What a stored row must have been made with to count."""
    digest = hashlib.sha256((policy.path / "spec.json").read_bytes()).hexdigest()
    return hashlib.sha256(json.dumps([digest, robot, live, split, steps]).encode()).hexdigest()[:16]
