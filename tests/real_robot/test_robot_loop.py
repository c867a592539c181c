"""Deadlines, chunks, joint mapping: the loop on a fake driver and a fake clock."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from robot_tools import HOME, FakeClock, FakeDriver, fake_gate

from real_robot.clock import LockstepClock
from real_robot.contract import CHUNK, DELTA, JointMap, check_contract
from real_robot.loop import Deadlines, PolicyPlayer, Timing, run_episode
from real_robot.safety import FAULT, SafetyGate
from real_robot.types import SensorReading
from sims.errors import UserError
from sims.tabletop_env import TABLETOP
from sims.worlds.robots import SO101
from sims.worlds.variants import VARIANTS


class Scripted:
    """Returns prepared (H, 6) chunks one after the other; keeps what it was shown."""

    def __init__(self, chunks, meaning=DELTA, execute=1) -> None:
        self.chunks, self.seen = [np.asarray(c, dtype=float) for c in chunks], []
        self.spec = SimpleNamespace(execute=execute, action_meaning=meaning)

    def __call__(self, obs, state):
        self.seen.append(obs)
        chunk = self.chunks.pop(0) if len(self.chunks) > 1 else self.chunks[0]
        return chunk[None], state


def _player(policy, robot) -> PolicyPlayer:
    return PolicyPlayer(policy, JointMap(SO101.names, robot), robot, {"goal": np.arange(5.0)})


class FreshSensor:
    def __init__(self, clock) -> None:
        self.clock = clock

    def read(self) -> SensorReading:
        return SensorReading(self.clock.now_ns(), {"objects": np.zeros(25, dtype=np.float32)})


# -- deadlines --------------------------------------------------------------------------------------------------------


def test_deadlines_do_not_drift() -> None:
    """Work of 3 ms in a period of 10 ms: the k-th tick ends at exactly 10 k ms."""
    clock, timing = FakeClock(), Timing()
    deadlines = Deadlines(clock, 10_000_000, timing)
    for k in range(1, 6):
        clock.now += 3_000_000
        deadlines.wait()
        assert clock.now == 10_000_000 * k
    assert timing.overruns == timing.skipped == 0
    assert timing.summary()["max"] == 0.0


def test_missed_deadlines_are_skipped_not_made_up_for() -> None:
    """34 ms of work: deadlines 10, 20 and 30 ms are gone; 30 is handled 4 ms late, the next is 40 ms, not sooner."""
    clock, timing = FakeClock(), Timing()
    deadlines = Deadlines(clock, 10_000_000, timing)
    clock.now = 34_000_000
    deadlines.wait()
    assert clock.now == 34_000_000
    assert (timing.overruns, timing.skipped) == (1, 2)
    assert timing.lateness_us == [4000.0]
    deadlines.wait()
    assert clock.now == 40_000_000


def test_lockstep_clock_advances_the_simulation() -> None:
    asked = []
    clock = LockstepClock(lambda ns: asked.append(ns) or 7 + sum(asked), start_ns=7)
    clock.sleep_until(7 + 10)
    clock.sleep_until(7 + 5)  # in the past: nothing to simulate
    assert asked == [10]
    assert clock.now_ns() == 17


# -- actions ----------------------------------------------------------------------------------------------------------


def test_one_action_is_interpolated_over_the_servo_ticks() -> None:
    """Delta 0.05 rad, ramp over the whole period of 5 ticks: 0.01 rad each."""
    gate, driver = fake_gate(ramp_fraction=1.0)
    policy = Scripted([[[0.05, 0, 0, 0, 0, 0]]])
    run_episode(gate, [], _player(policy, gate.spec), driver.clock, 1)
    np.testing.assert_allclose([s[0] for s in driver.sent], [0.01, 0.02, 0.03, 0.04, 0.05], atol=1e-12)
    assert driver.clock.now == 50_000_000


def test_a_chunk_is_played_for_execute_steps_relative_to_the_target_at_its_start() -> None:
    """Chunk rows are targets relative to the one commanded when it was predicted; the third row is never used."""
    gate, driver = fake_gate(ramp_fraction=0.2)
    rows = np.zeros((3, 6))
    rows[:, 0] = [0.02, 0.03, 9.0]
    policy = Scripted([rows, rows], CHUNK, execute=2)
    log = run_episode(gate, [], _player(policy, gate.spec), driver.clock, 4)
    np.testing.assert_allclose([t[0] for t in log.target], [0.02, 0.03, 0.05, 0.06], atol=1e-12)
    assert len(policy.seen) == 2


def test_the_policy_sees_what_it_was_trained_on() -> None:
    gate, driver = fake_gate()
    policy = Scripted([np.zeros((1, 6))])
    run_episode(gate, [FreshSensor(driver.clock)], _player(policy, gate.spec), driver.clock, 1)
    obs = policy.seen[0]
    assert obs["proprio"].shape == (1, 30)
    np.testing.assert_allclose(obs["proprio"][0, :6], HOME, atol=1e-6)
    np.testing.assert_allclose(obs["proprio"][0, 12:18], 0, atol=1e-6)
    assert obs["objects"].shape == (1, 25)
    assert obs["goal"].tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    "bad", [np.full((1, 6), np.nan), np.zeros((1, 5)), np.full((1, 6), np.inf), np.zeros((1, 6, 1))]
)
def test_bad_actions_hold_and_then_fault_and_nothing_is_sent(bad) -> None:
    """One rejection per action, not per servo tick: three actions to the fault."""
    gate, driver = fake_gate(bad_actions_to_fault=3)
    log = run_episode(gate, [], _player(Scripted([bad]), gate.spec), driver.clock, 20)
    assert driver.sent == []
    assert gate.state == FAULT
    assert log.steps == 3
    assert gate.counters["rejected"] == 3
    assert log.ended.startswith("fault: 3 bad actions in a row")


def test_one_bad_action_costs_one_action() -> None:
    gate, driver = fake_gate()
    good = np.full((1, 6), 0.01)
    policy = Scripted([good, np.full((1, 6), np.nan), good, good])
    log = run_episode(gate, [], _player(policy, gate.spec), driver.clock, 4)
    assert log.ended == "time limit"
    np.testing.assert_allclose(gate.command, HOME + 0.03, atol=1e-9)
    np.testing.assert_allclose(log.target[2], HOME + 0.02, atol=1e-9)  # goes on from what was commanded


def test_a_target_that_could_not_be_read_for_is_offered_again() -> None:
    """A read that fails after the second tick costs one tick; the action is still completed."""
    gate, driver = fake_gate(ramp_fraction=1.0)
    reads = {"n": 0}
    read = driver.read

    def flaky():
        reads["n"] += 1
        driver.broken = {"read"} if reads["n"] == 3 else set()
        return read()

    driver.read = flaky  # type: ignore[method-assign]
    run_episode(gate, [], _player(Scripted([[[0.05, 0, 0, 0, 0, 0]]]), gate.spec), driver.clock, 1)
    assert gate.counters["held"] == 1
    assert gate.command[0] == pytest.approx(0.05)


def test_joints_in_another_order_are_mapped_by_name() -> None:
    """The robot file lists the joints backwards: the policy still moves the pan joint."""
    driver = FakeDriver()
    driver.spec = replace(driver.spec, joints=tuple(reversed(driver.spec.joints)))
    driver.position = HOME[::-1].copy()
    gate = SafetyGate(driver, driver.clock)
    gate.engage()
    policy = Scripted([[[0.03, 0, 0, 0, 0, 0]]])
    run_episode(gate, [], _player(policy, driver.spec), driver.clock, 1)
    np.testing.assert_allclose(gate.command - HOME[::-1], [0, 0, 0, 0, 0, 0.03], atol=1e-9)
    np.testing.assert_allclose(policy.seen[0]["proprio"][0, :6], HOME, atol=1e-6)


# -- contract ---------------------------------------------------------------------------------------------------------


def _spec(**changes):
    env = TABLETOP.spec("tabletop", list(VARIANTS), ("reach the marker",), 50)
    action = replace(env.action, **changes.pop("action", {}))
    fields = {"action_meaning": DELTA, "inputs": ("proprio", "objects"), "language": None, **changes}
    hz = fields.pop("control_hz", env.control_hz)
    return SimpleNamespace(env=replace(env, action=action, control_hz=hz), **fields)


def test_a_fitting_policy_passes() -> None:
    assert check_contract(_spec(), FakeDriver().spec).to_robot(np.arange(6)).tolist() == [0, 1, 2, 3, 4, 5]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action": {"names": ("base", *SO101.names[1:])}}, r"joints do not match.*policy base, .*robot shoulder_pan"),
        ({"action": {"names": ()}}, "joints do not match.*policy none"),
        ({"action": {"names": SO101.names[::-1]}}, "orders its joints gripper"),
        ({"action": {"unit": "deg"}}, "action unit: policy deg"),
        ({"action_meaning": "native"}, "action meaning: policy native"),
        ({"control_hz": 30.0}, r"control rate \(Hz\): policy 30.0"),
        ({"action": {"low": (-0.5,) * 6}}, r"faster than robot .*shoulder_pan 10.00 rad/s"),
        ({"action": {"low": (), "high": ()}}, "no action bounds"),
        ({"inputs": ("proprio", "pixels/front")}, "needs pixels/front"),
    ],
)
def test_mismatches_are_refused(changes, message) -> None:
    with pytest.raises(UserError, match=message):
        check_contract(_spec(**changes), FakeDriver().spec)  # type: ignore[arg-type]


def test_objects_need_a_tracker() -> None:
    with pytest.raises(UserError, match=r"needs objects.*'tracker'"):
        check_contract(_spec(), replace(FakeDriver().spec, emulator=""))  # type: ignore[arg-type]
