"""Faults injected at the wire. Each test checks that the fault fired and what the device side saw."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from robot_tools import HOME, bench

from real_robot.config import load_robot
from real_robot.contract import JointMap
from real_robot.drivers.feetech import FeetechDriver
from real_robot.emulators.process import EmulatorProcess
from real_robot.loop import PolicyPlayer, run_episode, travel
from real_robot.safety import ACTIVE, FAULT, SafetyGate
from sims.errors import UserError

GOAL = HOME + np.array([0.3, 0.1, -0.1, -0.1, 0.2, 0.1])


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "drop", "id": 3, "every": 3},
        {"kind": "drop", "id": 0, "every": 10},
        {"kind": "corrupt", "id": 2, "every": 3},
        {"kind": "truncate", "id": 6, "every": 3},
        {"kind": "stray", "id": 0},
        {"kind": "wrong_id", "id": 4, "every": 3},
        {"kind": "duplicate", "id": 1},
        {"kind": "delay", "id": 5, "every": 3, "ms": 3},
    ],
    ids=lambda f: f"{f['kind']}-{f['id']}",
)
def test_passing_trouble_on_the_wire_is_ridden_out(fault) -> None:
    """Retries within the budget: the arm still arrives, no read fails, nothing leaves the limits."""
    with bench(reply_timeout_s=0.03, read_budget_s=1.0) as b:
        b.ask("faults", plan=[fault])
        b.gate.engage()
        outcomes = b.hold_ticks(GOAL, 60)
        assert b.fired() > 5
        assert set(outcomes) == {"sent"}
        assert b.gate.counters["bad_reads"] == 0
        assert np.abs(np.array(b.ask("truth")["position"]) - GOAL).max() < 0.01
        assert b.ask("stats")["limits_violated"] == 0


def test_an_answer_under_another_motors_id_is_not_believed() -> None:
    """Motor 4 answers as motor 5, whose own answer follows: neither joint may show the other's angle."""
    with bench(reply_timeout_s=0.03, read_budget_s=1.0) as b:
        b.gate.engage()
        b.ask("faults", plan=[{"kind": "wrong_id", "id": 4, "every": 2}])
        for _ in range(10):
            state = b.gate.observe()
            assert state is not None
            np.testing.assert_allclose(state.position, HOME, atol=0.002)
        assert b.fired() >= 5


@pytest.mark.parametrize("kind", ["dead", "drop", "corrupt", "truncate", "garbage_position"])
def test_a_motor_lost_while_moving_is_a_fault_and_the_arm_stops(kind) -> None:
    """Held at the first failed read, a fault after bad_reads_to_fault; the healthy motors keep their last goal."""
    with bench(reply_timeout_s=0.004, read_budget_s=0.02) as b:
        b.gate.engage()
        b.hold_ticks(HOME + 0.02, 5)
        b.ask("faults", plan=[{"kind": kind, "id": 3}])
        outcomes = b.hold_ticks(GOAL, 12)
        assert b.fired() > 0
        assert b.gate.state == FAULT
        assert "elbow_flex" in b.gate.reason
        assert ("no encoder value" in b.gate.reason) == (kind == "garbage_position")
        assert outcomes.count("sent") <= 1  # blind from the first failed read on
        assert outcomes.index("fault") <= b.spec.bad_reads_to_fault
        held = np.array(b.ask("truth")["goal"])
        b.hold_ticks(GOAL, 10)
        np.testing.assert_array_equal(b.ask("truth")["goal"], held)  # never travels
        healthy = np.arange(6) != 2
        np.testing.assert_allclose(b.gate.command[healthy], held[healthy], atol=1e-3)


def test_overload_is_surfaced_and_shutdown_still_reaches_every_motor() -> None:
    with bench() as b:
        b.gate.engage()
        b.ask("faults", plan=[{"kind": "overload", "id": 3}])
        b.wait()
        b.gate.observe()
        assert b.fired() > 0
        assert b.gate.reason == "motor reports elbow_flex: overload"
        b.gate.shutdown()
        assert b.ask("truth")["torque"] == [False] * 6
        assert all(v.startswith("off") for v in b.driver.stop_report.values())


def test_shutdown_reaches_the_others_when_one_is_dead_in_bounded_time() -> None:
    with bench() as b:
        b.gate.engage()
        b.ask("faults", plan=[{"kind": "dead", "id": 3}])
        b.wait()
        assert b.fired() > 0
        start = time.monotonic()
        b.gate.shutdown()
        assert time.monotonic() - start < 0.5
        torque = b.ask("truth")["torque"]
        assert torque == [False] * 6
        assert b.driver.stop_report["elbow_flex"].startswith("not confirmed")
        assert sum(v == "off" for v in b.driver.stop_report.values()) == 5


def test_stop_survives_answers_that_all_get_lost() -> None:
    """The broadcast reaches every motor even if no confirmation comes back; 6 * 3 * 20 ms = 0.36 s at most."""
    with bench() as b:
        b.gate.engage()
        b.ask("faults", plan=[{"kind": "drop", "id": 0}])
        start = time.monotonic()
        b.gate.shutdown()
        assert time.monotonic() - start < 1.0
        assert b.fired() > 0
        assert b.ask("truth")["torque"] == [False] * 6


def test_enabling_torque_moves_nothing_even_after_the_arm_was_moved_by_hand() -> None:
    """Goals left over from before lie 0.3 rad away; they must not be followed."""
    with bench() as b:
        b.gate.engage()
        b.hold_ticks(GOAL, 60)
        b.gate.release()
        b.ask("reset", position=HOME.tolist())
        b.gate.engage()
        for _ in range(20):
            b.wait()
        assert np.abs(np.array(b.ask("truth")["position"]) - HOME).max() < 0.002
        assert b.ask("truth")["torque"] == [True] * 6


def test_a_joint_outside_its_range_is_not_enabled() -> None:
    with bench() as b:
        b.ask("reset", position=(HOME + np.array([2.2, 0, 0, 0, 0, 0])).tolist())
        with pytest.raises(UserError, match=r"shoulder_pan at 2\.\d+ rad.*by hand"):
            b.gate.engage()
        assert b.ask("truth")["torque"] == [False] * 6


def test_the_driver_refuses_goals_that_a_gate_would_never_send() -> None:
    with bench() as b:
        b.gate.engage()
        sent = b.ask("stats")["goals"]
        for bad in (HOME + 9, np.full(6, np.nan), np.zeros(5)):
            with pytest.raises(ValueError, match="goal"):
                b.driver.write(bad)
        assert b.ask("stats")["goals"] == sent


def test_dry_run_writes_not_one_byte_to_a_motor() -> None:
    with bench(dry_run=True) as b:
        before = b.ask("stats")
        start = np.array(b.ask("truth")["position"])
        b.gate.engage()
        outcomes = b.hold_ticks(GOAL, 20)
        assert set(outcomes) == {"sent"}  # the same path, up to the wire
        after = b.ask("stats")
        assert after["write_instructions"] == before["write_instructions"] == 0
        assert after["goals"] == 0
        assert after["rx_bytes"] == b.driver.bus.tx_bytes  # everything the host counts, the device got
        assert after["read_instructions"] > before["read_instructions"]
        assert b.driver.bus.suppressed_frames > 20
        np.testing.assert_array_equal(b.ask("truth")["position"], start)
        assert b.ask("truth")["torque"] == [False] * 6


class _Policy:
    """Delta policy towards a pose."""

    def __init__(self, goal: np.ndarray) -> None:
        self.goal = goal
        self.spec = SimpleNamespace(execute=1, action_meaning="joint_position_delta")

    def __call__(self, obs, state):
        lead, q = obs["proprio"][:, 12:18], obs["proprio"][:, 0:6]
        return (0.5 * (self.goal - q - lead))[:, None], state


def _episode(b, sensors, steps=40, goal=GOAL):
    player = PolicyPlayer(_Policy(goal), JointMap(b.spec.names, b.spec), b.spec, {})
    return run_episode(b.gate, sensors, player, b.clock, steps)


def test_a_frozen_tracker_stops_the_policy() -> None:
    from real_robot.sensors.tracker import SocketTracker

    with bench(world="tabletop") as b:
        tracker = SocketTracker(b.emulator.socket)
        tracker.connect()
        b.ask("reset", seed=1)
        b.gate.engage()
        b.ask("faults", plan=[{"kind": "freeze_tracker", "after": 8}])
        log = _episode(b, [tracker])
        assert b.fired() > 0
        assert log.ended.startswith("fault: sensor 0 (objects) is frozen")
        assert len(log.measured) == 8  # no action after the last fresh reading
        assert log.steps == 8 + b.spec.bad_reads_to_fault
        held = b.ask("truth")["goal"]
        np.testing.assert_allclose(b.gate.command, held, atol=1e-3)
        tracker.disconnect()


def test_a_tracker_that_dies_is_a_fault() -> None:
    from real_robot.emulators.channel import ChannelError

    class Dead:
        def read(self):
            raise ChannelError("gone")

    with bench() as b:
        b.gate.engage()
        assert _episode(b, [Dead()]).ended == "fault: sensor lost: gone"


def test_travel_is_slow_and_arrives() -> None:
    with bench() as b:
        b.gate.engage()
        start = b.clock.now_ns()
        assert travel(b.gate, b.clock, HOME + np.array([0.25, 0, 0, 0, 0, 0]))
        assert (b.clock.now_ns() - start) * 1e-9 == pytest.approx(0.5, abs=0.02)  # 0.25 rad at 0.5 rad/s
        assert b.gate.state == ACTIVE
        assert b.ask("stats")["limits_violated"] == 0


def test_a_stuck_encoder_does_not_let_the_command_run_away() -> None:
    """The policy wants +0.6 rad; a joint that seems to stand still is led by at most 0.25 rad."""
    with bench() as b:
        b.gate.engage()
        b.ask("faults", plan=[{"kind": "stuck", "id": 1}])
        b.wait()
        _episode(b, [], 30, HOME + np.array([0.6, 0, 0, 0, 0, 0]))
        assert b.fired() > 0
        assert b.gate.command[0] == pytest.approx(0.25, abs=0.01)
        assert b.ask("stats")["limits_violated"] == 0


def test_the_cable_is_pulled() -> None:
    """The device vanishes while the arm is driven: a fault, and a shutdown that ends although nobody answers."""
    with EmulatorProcess("so101_virtual", world="servos", lockstep=False) as emulator:
        driver = FeetechDriver(load_robot("so101_virtual", port=emulator.port))
        gate = SafetyGate(driver, driver.clock)
        gate.connect()
        home = gate.engage()
        assert gate.submit(home).outcome == "sent"
        emulator.close()
        start = time.monotonic()
        for _ in range(gate.spec.bad_reads_to_fault):
            gate.submit(home)
            gate.observe()
        assert gate.state == FAULT
        gate.shutdown()
        assert time.monotonic() - start < 2.0
        assert all(driver.stop_report[n].startswith("not confirmed") for n in gate.spec.names)
        assert not driver.bus.is_open


# -- connecting -------------------------------------------------------------------------------------------------------


def test_a_port_that_does_not_exist() -> None:
    driver = FeetechDriver(load_robot("so101", port="/dev/ttyNOPE7"))
    with pytest.raises(UserError, match=r"'/dev/ttyNOPE7' does not exist.*robot\.port"):
        driver.connect()


def test_a_robot_without_a_port() -> None:
    with pytest.raises(UserError, match="no serial port"):
        FeetechDriver(load_robot("so101", port="")).connect()


def test_a_port_in_use_names_the_holder() -> None:
    import os

    with bench() as b:
        other = FeetechDriver(b.spec)
        with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
            other.connect()
        b.gate.engage()
        assert b.hold_ticks(HOME, 3) == ["sent"] * 3  # the first owner is not disturbed


def test_a_port_held_by_a_program_without_our_lock_file() -> None:
    import fcntl
    import os

    with EmulatorProcess("so101_virtual", world="servos") as emulator:
        fd = os.open(emulator.port, os.O_RDWR | os.O_NOCTTY)
        fcntl.flock(fd, fcntl.LOCK_EX)  # what pyserial's exclusive=True does
        with pytest.raises(UserError, match="in use"):
            FeetechDriver(load_robot("so101_virtual", port=emulator.port)).connect()
        os.close(fd)


def test_a_file_that_is_no_serial_port(tmp_path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, match="cannot be opened"):
        FeetechDriver(load_robot("so101", port=str(file))).connect()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"kind": "dead", "id": 3}, r"no answer on .* from elbow_flex \(id 3\)"),
        ({"kind": "wrong_model", "id": 5}, r"wrist_roll \(id 5\) reports model 1234, expected 777|expected 777"),
    ],
)
def test_a_dead_or_wrong_motor_is_named_and_nothing_was_written(fault, message) -> None:
    with bench(connect=False, retries=0) as b:
        b.ask("faults", plan=[fault])
        with pytest.raises(UserError, match=message):
            b.gate.connect()
        assert b.fired() > 0
        assert b.ask("stats")["write_instructions"] == 0
        assert not b.driver.bus.is_open


def test_a_motor_with_a_narrower_range_is_refused(tmp_path) -> None:
    """The firmware would clamp silently: file [-1.9, 1.9] rad against a motor calibrated to [-1, 1]."""
    narrow = tmp_path / "narrow.yaml"
    narrow.write_text("extends: so101_virtual\njoints: [{name: shoulder_pan, low: -1.0, high: 1.0}]\n")
    with EmulatorProcess(str(narrow), world="servos") as emulator:
        driver = FeetechDriver(load_robot("so101_virtual", port=emulator.port))
        with pytest.raises(UserError, match=r"shoulder_pan.*accepts ticks \[1397, 2699\].*Calibrate"):
            driver.connect()


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_to_the_whole_program_switches_every_motor_off(number) -> None:
    """A separate program drives an emulator that outlives it; the device side says what it left behind."""
    code = (
        "import sys, numpy as np\n"
        "sys.path.insert(0, 'tests/real_robot')\n"
        "from real_robot.config import load_robot\n"
        "from real_robot.clock import MonotonicClock\n"
        "from real_robot.drivers.feetech import FeetechDriver\n"
        "from real_robot.safety import SafetyGate\n"
        "from real_robot.shutdown import guarded\n"
        "driver = FeetechDriver(load_robot('so101_virtual', port=sys.argv[1]))\n"
        "gate = SafetyGate(driver, MonotonicClock())\n"
        "with guarded(gate):\n"
        "    gate.connect(); home = gate.engage(); print('moving', flush=True)\n"
        "    while True: gate.submit(home); gate.clock.sleep_until(gate.clock.now_ns() + 10_000_000)\n"
    )
    with EmulatorProcess("so101_virtual", world="servos", lockstep=False) as emulator:
        program = subprocess.Popen([sys.executable, "-c", code, emulator.port], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # fmt: skip
        assert program.stdout is not None
        assert program.stdout.readline() == "moving\n"
        assert emulator.control.request("truth")["torque"] == [True] * 6
        start = time.monotonic()
        program.send_signal(getattr(__import__("signal"), number))
        program.wait(timeout=5)
        assert time.monotonic() - start < 2
        assert emulator.control.request("truth")["torque"] == [False] * 6
        program.stdout.close()


def test_a_joint_at_its_stop_reads_a_tick_beyond_and_is_still_enabled() -> None:
    """1.65806 rad is 2048 + 1080.89 ticks: the encoder says 3129, the highest allowed goal is 3128."""
    with bench() as b:
        position = HOME.copy()
        position[3] = b.spec.array("high")[3]
        b.ask("reset", position=position.tolist())
        b.gate.engage()
        assert b.ask("truth")["torque"] == [True] * 6
        assert b.hold_ticks(b.gate.command, 3) == ["sent"] * 3
        assert b.ask("stats")["limits_violated"] == 0
