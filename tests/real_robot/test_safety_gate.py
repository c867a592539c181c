"""The gate on a fake driver: order of the limiters, rejection, latching, shutdown. Numbers worked by hand."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from robot_tools import HOME, FakeDriver, fake_gate

from real_robot.safety import ACTIVE, FAULT, IDLE, SafetyGate
from real_robot.session import tip_box
from real_robot.shutdown import Interrupted, guarded
from sims.errors import UserError
from sims.worlds.kinematics import forward


@pytest.mark.parametrize(
    "bad",
    [
        np.full(6, np.nan),
        np.array([0, 0, np.inf, 0, 0, 0]),
        np.array([0, 0, 0, 0, 0, -np.inf]),
        np.zeros(5),
        np.zeros(7),
        np.zeros((1, 6)),
        np.array(0.0),
        np.array([0, 0, 1e30, 0, 0, 0]),
        np.array(["a"] * 6),
        np.array([None] * 6),
    ],
)
def test_malformed_targets_are_rejected_whole(bad) -> None:
    gate, driver = fake_gate()
    before = gate.command.copy()
    decision = gate.submit(bad)
    assert decision.outcome == "rejected"
    assert decision.reason
    np.testing.assert_array_equal(decision.command, before)
    assert driver.sent == []
    assert gate.counters["rejected"] == 1


def test_several_bad_actions_in_a_row_are_a_fault_and_good_ones_reset_the_count() -> None:
    gate, driver = fake_gate(bad_actions_to_fault=3)
    bad = np.full(6, np.nan)
    for target in (bad, bad, HOME, bad, bad):
        gate.submit(target)
    assert gate.state == ACTIVE
    assert gate.submit(bad).outcome == "fault"
    assert gate.state == FAULT
    sent = len(driver.sent)
    assert gate.submit(HOME).outcome == "fault"  # latched
    assert len(driver.sent) == sent == 1


def test_wrong_joint_names_are_rejected() -> None:
    gate, driver = fake_gate()
    names = list(gate.spec.names)
    assert gate.submit(HOME, names=names).outcome == "sent"
    names[0], names[1] = names[1], names[0]
    assert gate.submit(HOME, names=names).outcome == "rejected"
    assert len(driver.sent) == 1


def test_speed_limit_refers_to_what_was_sent_not_to_the_measurement() -> None:
    """4 rad/s at 100 Hz = 0.04 rad per period. The joint itself never moves, the command still advances."""
    gate, driver = fake_gate()
    stuck = driver.position.copy()
    far = HOME + np.array([1, 0, 0, 0, 0, 0])
    for expected in (0.04, 0.08, 0.12):
        decision = gate.submit(far)
        driver.position = stuck.copy()
        gate.observe()
        assert decision.command[0] == pytest.approx(expected)
        assert decision.limited == ("velocity",)


def test_acceleration_limit_by_hand() -> None:
    """50 rad/s^2 * 0.01 s = 0.5 rad/s more per period: steps of 0.005, 0.010, 0.015 rad."""
    gate, _ = fake_gate()
    gate.max_acceleration = np.full(6, 50.0)
    positions = [gate.submit(HOME + np.array([1, 0, 0, 0, 0, 0])).command[0] for _ in range(3)]
    np.testing.assert_allclose(np.diff([0.0, *positions]), [0.005, 0.010, 0.015], atol=1e-12)


def test_limited_braking_does_not_overshoot() -> None:
    gate, _ = fake_gate()
    gate.max_acceleration = np.full(6, 50.0)
    goal = HOME + np.array([0.5, 0, 0, 0, 0, 0])
    track = np.array([gate.submit(goal).command[0] for _ in range(200)])
    assert track[-1] == pytest.approx(0.5, abs=1e-6)
    assert track.max() <= 0.5 + 1e-3


def test_hard_limits_come_last() -> None:
    """Whatever an earlier limiter makes of it, the command ends inside the range (the target lies 10 rad beyond)."""
    gate, driver = fake_gate()
    for sign, bound in ((1, gate.high), (-1, gate.low)):
        for _ in range(200):
            decision = gate.submit(HOME + sign * 10)
        assert "limits" in decision.limited
        np.testing.assert_allclose(decision.command, bound)
    assert all((gate.low <= s).all() and (s <= gate.high).all() for s in driver.sent)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(allow_nan=True, allow_infinity=True, allow_subnormal=False), min_size=6, max_size=6),
        max_size=25,
    )
)
def test_no_stream_of_actions_breaks_a_limit(stream) -> None:
    gate, driver = fake_gate(bad_actions_to_fault=10**6)
    previous = gate.command.copy()
    for target in stream:
        gate.submit(np.array(target))
    for sent in driver.sent:
        assert np.isfinite(sent).all()
        assert (sent >= gate.low).all()
        assert (sent <= gate.high).all()
        assert (np.abs(sent - previous) <= gate.max_speed * gate.dt + 1e-9).all()
        previous = sent


def test_workspace_box_rejects() -> None:
    spec = FakeDriver().spec
    tip = forward(HOME[None]).tip[0]
    box = (*(tip - 0.02), *(tip + 0.02))
    driver = FakeDriver(workspace=box)
    gate = SafetyGate(driver, driver.clock, workspace=tip_box(driver.spec))
    gate.engage()
    assert gate.submit(HOME).outcome == "sent"
    outcomes = [gate.submit(HOME + np.array([0.03 * i, 0, 0, 0, 0, 0])) for i in range(1, 20)]
    assert outcomes[0].outcome == "sent"
    rejected = [d for d in outcomes if d.outcome == "rejected"]
    assert rejected
    assert "outside the workspace" in rejected[0].reason
    assert np.abs(forward(driver.sent[-1][None]).tip[0] - tip).max() <= 0.02
    assert tip_box(spec) is None


def test_stale_and_frozen_sources() -> None:
    gate, driver = fake_gate(bad_reads_to_fault=3)
    driver.clock.now = 1_000_000_000
    assert gate.fresh("eye", 990_000_000, 0.05)
    driver.clock.now += 10_000_000
    assert not gate.fresh("eye", 990_000_000, 0.05)  # young enough, but the stamp stands still
    assert gate.fresh("eye", 1_000_000_000, 0.05)
    driver.clock.now += 100_000_000
    for _ in range(3):
        assert not gate.fresh("eye", 1_000_000_001, 0.05)  # 0.11 s old
    assert gate.state == FAULT
    assert "eye" in gate.reason


def test_reports_of_the_motor_and_impossible_measurements_are_faults() -> None:
    gate, driver = fake_gate()
    driver.faults = {"elbow_flex": "overload"}
    gate.observe()
    assert gate.reason == "motor reports elbow_flex: overload"
    gate, driver = fake_gate()
    driver.position = HOME + np.array([5, 0, 0, 0, 0, 0])
    gate.observe()
    assert "shoulder_pan" in gate.reason


def test_failed_reads_hold_then_fault() -> None:
    gate, driver = fake_gate(bad_reads_to_fault=3)
    driver.broken.add("read")
    assert [gate.observe(), gate.observe()] == [None, None]
    assert gate.state == ACTIVE
    assert gate.submit(HOME + 0.01).outcome == "held"  # blind, so it does not move
    assert driver.sent == []
    driver.broken.clear()
    gate.observe()
    assert gate.submit(HOME + 0.01).outcome == "sent"
    driver.broken.add("read")
    for _ in range(3):
        gate.observe()
    assert gate.state == FAULT


def test_emergency_stop_latches_until_reset_and_a_new_start() -> None:
    gate, driver = fake_gate()
    gate.submit(HOME)
    gate.estop("key")
    sent = len(driver.sent)
    assert gate.submit(HOME + 0.01).outcome == "fault"
    with pytest.raises(UserError, match="reset it first"):
        gate.engage()
    gate.reset()
    assert gate.state == IDLE
    assert gate.submit(HOME + 0.01).outcome == "held"  # still no torque
    assert len(driver.sent) == sent
    driver.position = HOME - 0.3  # moved by hand meanwhile
    np.testing.assert_allclose(gate.engage(), HOME - 0.3)
    first = gate.submit(HOME).command
    assert (np.abs(first - (HOME - 0.3)) <= gate.max_speed * gate.dt + 1e-9).all()


def test_emergency_stop_file(tmp_path) -> None:
    driver = FakeDriver()
    file = tmp_path / "stop"
    gate = SafetyGate(driver, driver.clock, estop_file=file)
    gate.engage()
    gate.observe()
    assert gate.state == ACTIVE
    file.touch()
    gate.observe()
    assert gate.state == FAULT
    assert gate.estopped
    with pytest.raises(UserError, match="still exists"):
        gate.reset()
    file.unlink()
    gate.reset()


def test_emergency_stop_key() -> None:
    """Through a real pseudo-terminal; other keys do nothing, and the terminal is restored."""
    import pty
    import termios

    from real_robot.estop import stop_key

    gate, _ = fake_gate()
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    with stop_key(gate.estop, slave) as reading:
        assert reading
        os.write(master, b"x")
        time.sleep(0.05)
        assert gate.state == ACTIVE
        os.write(master, b" ")
        deadline = time.monotonic() + 2
        while gate.state == ACTIVE and time.monotonic() < deadline:
            time.sleep(0.005)
    assert gate.reason == "emergency stop key"
    assert termios.tcgetattr(slave) == before
    os.close(master)
    os.close(slave)


def test_keys_are_not_read_where_there_is_no_terminal(tmp_path) -> None:
    from real_robot.estop import stop_key

    with (tmp_path / "file").open("w") as file, stop_key(lambda _: None, file.fileno()) as reading:
        assert not reading


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_shut_down_and_handlers_are_restored(number) -> None:
    gate, driver = fake_gate()
    before = signal.getsignal(number)

    def body() -> None:
        with guarded(gate):
            os.kill(os.getpid(), number)
            time.sleep(2)

    with pytest.raises(Interrupted, match=signal.Signals(number).name):
        body()
    assert driver.log[-2:] == ["stop", "disconnect"]
    assert gate.state == FAULT
    assert signal.getsignal(number) is before


def test_exceptions_shut_down_even_if_the_bus_is_broken() -> None:
    gate, driver = fake_gate()
    driver.broken |= {"disconnect", "read"}
    with pytest.raises(ZeroDivisionError), guarded(gate):
        _ = 1 / 0
    assert driver.log[-2:] == ["stop", "disconnect"]


def test_a_second_signal_does_not_interrupt_the_shutdown() -> None:
    gate, driver = fake_gate()

    def slow_stop() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        driver.log.append("stopped")

    driver.stop = slow_stop  # type: ignore[method-assign]
    with pytest.raises(RuntimeError), guarded(gate):
        raise RuntimeError
    assert driver.log[-2:] == ["stopped", "disconnect"]
