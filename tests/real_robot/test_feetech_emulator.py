"""The emulated bus satisfies the vendor's own SDK, and behaves as the firmware does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from robot_tools import HOME, bench

from real_robot.config import load_robot
from real_robot.drivers import feetech_wire as wire
from real_robot.emulators.process import EmulatorProcess
from real_robot.emulators.servos import ServoBank

sdk = pytest.importorskip("scservo_sdk")
OVERLOAD = 0x20


@pytest.fixture(scope="module")
def vendor():
    with EmulatorProcess("so101_virtual", world="servos") as emulator:
        port = sdk.PortHandler(emulator.port)
        assert port.openPort()
        yield emulator, port, sdk.PacketHandler(0)
        port.closePort()


def test_vendor_sdk_pings_reads_and_writes(vendor) -> None:
    emulator, port, handler = vendor
    for motor in range(1, 7):
        assert handler.ping(port, motor) == (777, sdk.COMM_SUCCESS, 0)
    # home of joint 2: 2048 - 0.6 * 651.899 = 1656.86 -> 1657
    assert handler.read2ByteTxRx(port, 2, 56) == (1657, sdk.COMM_SUCCESS, 0)
    assert handler.write2ByteTxRx(port, 1, 42, 2200) == (sdk.COMM_SUCCESS, 0)
    assert handler.read2ByteTxRx(port, 1, 42)[0] == 2200
    assert handler.read1ByteTxRx(port, 1, 40)[0] == 1  # the goal write switched torque on
    emulator.control.request("tick", ns=1_000_000_000)
    assert abs(handler.read2ByteTxRx(port, 1, 56)[0] - 2200) <= 1
    assert handler.write1ByteTxRx(port, 1, 40, 0) == (sdk.COMM_SUCCESS, 0)
    assert emulator.control.request("truth")["torque"] == [False] * 6


def test_vendor_sdk_sync_read_and_sync_write(vendor) -> None:
    emulator, port, handler = vendor
    writer = sdk.GroupSyncWrite(port, handler, 42, 2)
    goals = {1: 2000, 2: 1700, 3: 2400, 4: 3000, 5: 2100, 6: 2500}
    for motor, goal in goals.items():
        assert writer.addParam(motor, [goal & 0xFF, goal >> 8])
    assert writer.txPacket() == sdk.COMM_SUCCESS
    assert handler.read2ByteTxRx(port, 6, 42)[0] == 2500  # an answer means the frame before it was handled
    emulator.control.request("tick", ns=1_000_000_000)
    reader = sdk.GroupSyncRead(port, handler, 56, 4)
    for motor in goals:
        assert reader.addParam(motor)
    assert reader.txRxPacket() == sdk.COMM_SUCCESS
    for motor, goal in goals.items():
        assert abs(reader.getData(motor, 56, 2) - goal) <= 1
        assert reader.getData(motor, 58, 2) & 0x7FFF <= 1


def test_vendor_sdk_registered_write_and_action(vendor) -> None:
    _, port, handler = vendor
    before = handler.read2ByteTxRx(port, 3, 42)[0]
    assert handler.regWriteTxRx(port, 3, 42, 2, [0x34, 0x08]) == (sdk.COMM_SUCCESS, 0)
    assert handler.read2ByteTxRx(port, 3, 42)[0] == before  # waits for the action
    assert handler.action(port, sdk.BROADCAST_ID) == sdk.COMM_SUCCESS
    assert handler.read2ByteTxRx(port, 3, 42)[0] == 0x0834


def test_vendor_sdk_sees_wire_faults_as_such(vendor) -> None:
    emulator, port, handler = vendor
    expected = {"drop": sdk.COMM_RX_TIMEOUT, "corrupt": sdk.COMM_RX_CORRUPT, "truncate": sdk.COMM_RX_CORRUPT}
    for kind, result in expected.items():
        emulator.control.request("faults", plan=[{"kind": kind, "id": 4, "count": 1}])
        assert handler.read2ByteTxRx(port, 4, 56)[1] == result, kind
        assert emulator.control.request("stats")["faults"][0]["fired"] == 1
        assert handler.read2ByteTxRx(port, 4, 56)[1] == sdk.COMM_SUCCESS
        port.ser.reset_input_buffer()
    emulator.control.request("faults", plan=[{"kind": "overload", "id": 4}])
    assert handler.read2ByteTxRx(port, 4, 56)[2] == OVERLOAD
    emulator.control.request("faults", plan=[])


def _bank() -> ServoBank:
    bank = ServoBank(load_robot("so101_virtual"))
    bank.measure(HOME, np.zeros(6))
    return bank


def _write(bank: ServoBank, motor: int, address: int, data: bytes, now: float = 0.0) -> list[bytes]:
    return bank.handle(wire.Parser().feed(wire.write_frame(motor, address, data))[0], now)


def test_a_goal_outside_the_range_is_clamped_and_counted() -> None:
    """Pan range: 2048 +- 1.91986 * 651.899 = 2048 +- 1251.55 -> [797, 3299]."""
    bank = _bank()
    _write(bank, 1, 42, wire.word(4000))
    assert bank.servos[1].get(wire.GOAL_POSITION) == 3299
    assert bank.servos[1].torque
    assert bank.monitor.out_of_range == 1


def test_speed_of_goals_is_judged_from_the_goals_before() -> None:
    """Limit 4 rad/s = 2607.6 ticks/s = 26.08 ticks in 10 ms, + 2 of rounding: 28 passes, 30 does not."""
    bank = _bank()
    _write(bank, 1, 42, wire.word(2048), 0.0)
    _write(bank, 1, 42, wire.word(2048 + 28), 0.01)
    assert bank.monitor.too_fast == 0
    _write(bank, 1, 42, wire.word(2048 + 58), 0.02)
    assert bank.monitor.too_fast == 1


def test_read_only_registers_and_locked_eeprom() -> None:
    bank = _bank()
    servo = bank.servos[1]
    _write(bank, 1, 56, wire.word(99))
    assert servo.get(wire.PRESENT_POSITION) == 2048
    _write(bank, 1, 9, wire.word(1000))  # locked: works until the power goes
    assert servo.get(wire.MIN_POSITION) == 1000
    servo.power_cycle()
    assert servo.get(wire.MIN_POSITION) == 797
    _write(bank, 1, 55, b"\x00")
    _write(bank, 1, 9, wire.word(1000))
    servo.power_cycle()
    assert servo.get(wire.MIN_POSITION) == 1000


def test_broadcast_and_unknown_motors_are_not_answered() -> None:
    bank = _bank()
    for motor in (wire.BROADCAST, 77):
        assert bank.handle(wire.Status(motor, wire.PING, b""), 0.0) == []
    assert bank.handle(wire.Status(1, wire.PING, b""), 0.0) == [wire.frame(1, 0)]


def test_tabletop_world_moves_and_goes_limp() -> None:
    """Through the wire: the arm holds at home with torque, and sags without."""
    with bench(world="tabletop") as b:
        b.ask("reset", seed=3, variant="reach")
        start = b.gate.engage()
        b.hold_ticks(start, 50)
        held = np.array(b.ask("truth")["position"])
        assert np.abs(held - start).max() < 0.06
        b.gate.release()
        b.wait(0.5)
        sagged = np.array(b.ask("truth")["position"])
        assert np.abs(sagged - held).max() > 0.1


def test_tracker_is_one_control_step_late_and_noisy() -> None:
    with bench(world="tabletop") as b:
        layout = b.ask("reset", seed=3, variant="reach")["layout"]
        first = b.ask("objects")
        assert first["stamp_ns"] == b.ask("stats")["now_ns"] - 50_000_000
        error = np.array(first["objects"][:3]) - layout["marker"]
        assert 0 < np.abs(error).max() < 0.006  # sigma 1 mm
        again = b.ask("objects")["objects"]
        assert again != first["objects"]
        b.wait(0.05)
        assert b.ask("objects")["stamp_ns"] == first["stamp_ns"] + 50_000_000


def test_the_same_seed_gives_the_same_table() -> None:
    with bench(world="tabletop") as b:
        a, other, same = (b.ask("reset", seed=s, split="heldout")["layout"] for s in (1, 2, 1))
        assert a == same != other


def test_the_judge_wants_the_condition_held() -> None:
    """The tip is put on the marker: success only after 5 control steps of 50 ms."""
    from sims.worlds.kinematics import forward

    with bench(world="tabletop") as b:
        layout = b.ask("reset", seed=3)["layout"]
        layout["q"] = HOME.tolist()
        layout["marker"] = (forward(HOME[None]).tip[0] - [0, 0, 0.008]).tolist()
        b.ask("reset", seed=3, layout=layout, variant="reach")
        start = b.gate.engage()
        b.hold_ticks(start, 20)
        assert b.ask("judge") == {"variant": "reach", "success": False, "first": None, "steps": 4}
        b.hold_ticks(start, 5)
        assert b.ask("judge") == {"variant": "reach", "success": True, "first": 5, "steps": 5}
        rows = b.ask("trajectory")
        assert np.array(rows["qpos"]).shape == (6, 22)
        assert np.array(rows["mocap"]).shape == (6, 9)


def test_the_emulator_ends_with_its_parent() -> None:
    import os
    import signal
    import subprocess
    import sys
    import time

    code = (
        "from real_robot.emulators.process import EmulatorProcess; import time\n"
        "print(EmulatorProcess('so101_virtual', world='servos').pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())  # type: ignore[union-attr]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the emulator outlived its parent")
