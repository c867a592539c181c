"""Device side of a Feetech bus, as its own process: `python -m real_robot.emulators.feetech --robot so101_virtual`.

A pseudo-terminal speaks the wire protocol in front of one simulated world. A Unix socket beside it serves the object
tracker and a control channel (JSON lines): reset, tick (lock-step time), judge, stats, faults. Time is either real or
advances only by `tick`; in lock step a tick first waits for all bytes that the host says it has sent, because a
pseudo-terminal delivers them asynchronously.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import selectors
import signal
import sys
import tempfile
import time
import tty
from pathlib import Path
from typing import Any

from real_robot.config import RobotSpec, load_robot
from real_robot.drivers import feetech_wire as wire
from real_robot.emulators import faults as fault_plan
from real_robot.emulators.channel import ChannelServer
from real_robot.emulators.servos import ServoBank
from real_robot.emulators.world import TIMESTEP_NS, ServoWorld, World
from sims.errors import UserError, unknown_choice

REALTIME_SLACK_S = 0.03  # goals bunch up by scheduling; counted speeds allow for this much
MAX_CATCH_UP = 20  # physics steps done at once after a stall; the rest is skipped
BARRIER_S = 10.0


def _tabletop(spec: RobotSpec) -> World:
    from real_robot.emulators.tabletop import TabletopRobot

    return TabletopRobot(spec)


WORLDS = {"servos": ServoWorld, "tabletop": _tabletop}


class Emulator:
    """One bus of servos, one world, one pseudo-terminal, one control socket, one thread.

    Attributes:
        port: path of the pseudo-terminal a driver opens. socket_path: control channel.
    """

    def __init__(self, spec: RobotSpec, world: World, socket_path: Path, lockstep: bool = True) -> None:
        self.spec, self.world = spec, world
        self.bank = ServoBank(spec, 0.0 if lockstep else REALTIME_SLACK_S)
        self.parser = wire.Parser()
        self.faults: list[fault_plan.Fault] = []
        self.late: list[tuple[float, bytes]] = []
        self.frozen: dict[str, Any] | None = None
        self.rx_bytes = self.skipped_steps = 0
        self.lockstep, self.running = lockstep, True
        self.now_ns = time.monotonic_ns()
        self.selector = selectors.DefaultSelector()
        self._master, self._slave = pty.openpty()
        tty.setraw(self._slave)
        os.set_blocking(self._master, False)
        self.port = os.ttyname(self._slave)
        self.selector.register(self._master, selectors.EVENT_READ, self._read_wire)
        self.channel = ChannelServer(socket_path, self.selector, self.handle)
        self._measure()

    # -- wire ---------------------------------------------------------------------------------------------------------

    def _read_wire(self) -> None:
        try:
            data = os.read(self._master, 4096)
        except OSError:  # BlockingIOError: nothing there yet
            return
        self.rx_bytes += len(data)
        for packet in self.parser.feed(data):
            replies = [fault_plan.damage(self.faults, r) for r in self.bank.handle(packet, self.now_ns * 1e-9)]
            self._send(b"".join(r for r, delay in replies if not delay))
            self.late += [(time.monotonic() + delay, r) for r, delay in replies if delay]

    def _send(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._master, data) :]
            except BlockingIOError:
                time.sleep(0.0005)

    def _send_late(self) -> float | None:
        """Deliver answers whose delay has passed; seconds until the next one."""
        now = time.monotonic()
        for _, reply in [item for item in self.late if item[0] <= now]:
            self._send(reply)
        self.late = [item for item in self.late if item[0] > now]
        return min(due for due, _ in self.late) - now if self.late else None

    # -- time ---------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Advance physics by one timestep with the goals now in the registers."""
        self._motor_faults()
        goal, torque = self.bank.goals()
        self.world.step(goal, torque)
        self.now_ns += TIMESTEP_NS
        self._measure()

    def _measure(self) -> None:
        stuck = {f.id for f in self.faults if f.kind == "stuck" and f.fired}
        kept = {i: bytes(self.bank.servos[i].table[56:60]) for i in stuck if i in self.bank.servos}
        self.bank.measure(*self.world.joints())
        for motor, data in kept.items():
            self.bank.servos[motor].table[56:60] = data
        for fault in self.faults:
            if fault.kind == "garbage_position" and fault.fired:
                self.bank.servos[fault.id].set(wire.PRESENT_POSITION, 0xFFFF)

    def _motor_faults(self) -> None:
        for fault in self.faults:
            servo = self.bank.servos.get(fault.id)
            if fault.kind not in fault_plan.MOTOR_FAULTS or servo is None or not fault.hits(fault.id):
                continue
            if fault.kind == "dead":
                servo.dead = True
            elif fault.kind == "overload":
                servo.error |= 0x20
            elif fault.kind == "wrong_model":
                servo.set(wire.MODEL_NUMBER, 1234)

    def _catch_up(self) -> float:
        """Real time: step until the world has caught up with the clock; seconds until the next step is due."""
        behind = (time.monotonic_ns() - self.now_ns) // TIMESTEP_NS
        for _ in range(min(behind, MAX_CATCH_UP)):
            self.step()
        if behind > MAX_CATCH_UP:
            self.skipped_steps += behind - MAX_CATCH_UP
            self.now_ns += (behind - MAX_CATCH_UP) * TIMESTEP_NS
        return max(0.0, (self.now_ns + TIMESTEP_NS - time.monotonic_ns()) * 1e-9)

    # -- control channel ----------------------------------------------------------------------------------------------

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one request of the control channel; errors become the answer's ``error``."""
        name = request.get("op")
        operation = getattr(self, f"_op_{name}", None)
        if operation is None:
            raise unknown_choice("operation", str(name), [n[4:] for n in dir(self) if n.startswith("_op_")])
        return operation(request)

    def _op_tick(self, request: dict[str, Any]) -> dict[str, Any]:
        if not self.lockstep:
            raise UserError("tick needs lock-step time; this emulator runs in real time.")
        self._barrier(request.get("after_bytes", 0))
        for _ in range(max(1, round(request["ns"] / TIMESTEP_NS))):
            self.step()
        return {"now_ns": self.now_ns}

    def _barrier(self, expected: int) -> None:
        deadline = time.monotonic() + BARRIER_S
        while self.rx_bytes < expected:
            if time.monotonic() > deadline:
                raise UserError(f"the host sent {expected} bytes, {self.rx_bytes} arrived in {BARRIER_S} s.")
            self._read_wire()

    def _op_reset(self, request: dict[str, Any]) -> dict[str, Any]:
        """New layout, joints at the start pose, torque off."""
        for servo in self.bank.servos.values():
            servo.set(wire.TORQUE_ENABLE, 0)
        self.bank.monitor.last.clear()
        answer = self.world.reset(request)
        self._measure()
        return {"now_ns": self.now_ns, **answer}

    def _op_objects(self, _: dict[str, Any]) -> dict[str, Any]:
        age_ns, values = self.world.objects()
        fresh = {"stamp_ns": self.now_ns - age_ns, "objects": [float(v) for v in values]}
        for fault in self.faults:
            if fault.kind == "freeze_tracker" and fault.hits(0):
                return self.frozen or fresh
        self.frozen = fresh
        return fresh

    def _op_judge(self, _: dict[str, Any]) -> dict[str, Any]:
        return self.world.judge()

    def _op_truth(self, _: dict[str, Any]) -> dict[str, Any]:
        goal, torque = self.bank.goals()
        return {"goal": goal.tolist(), "torque": torque.tolist(), "now_ns": self.now_ns, **self.world.truth()}

    def _op_trajectory(self, _: dict[str, Any]) -> dict[str, Any]:
        return self.world.trajectory()

    def _op_faults(self, request: dict[str, Any]) -> dict[str, Any]:
        """Install a plan (replaces the old one, mends motors)."""
        self.faults = fault_plan.parse(request["plan"])
        for servo in self.bank.servos.values():
            servo.dead, servo.error = False, 0
            servo.set(wire.MODEL_NUMBER, self.spec.model_number)
        self._motor_faults()  # a motor may be bad from the start
        return {"installed": len(self.faults)}

    def _op_stats(self, _: dict[str, Any]) -> dict[str, Any]:
        monitor = self.bank.monitor
        return {
            "now_ns": self.now_ns,
            "rx_bytes": self.rx_bytes,
            "read_instructions": self.bank.instructions["read"],
            "write_instructions": self.bank.instructions["write"],
            "goals": monitor.goals,
            "out_of_range": monitor.out_of_range,
            "too_fast": monitor.too_fast,
            "limits_violated": monitor.out_of_range + monitor.too_fast,
            "worst_speed_ratio": monitor.worst_speed,
            "stray_bytes": self.parser.stray_bytes,
            "skipped_steps": self.skipped_steps,
            "faults": [{"kind": f.kind, "id": f.id, "fired": f.fired} for f in self.faults],
        }

    def _op_quit(self, _: dict[str, Any]) -> dict[str, Any]:
        self.running = False
        return {}

    # -- life ---------------------------------------------------------------------------------------------------------

    def watch(self, descriptor: int) -> None:
        """End when ``descriptor`` (a pipe to the parent) is closed, so that no emulator outlives its user."""

        def ended() -> None:
            self.running = bool(os.read(descriptor, 4096))

        self.selector.register(descriptor, selectors.EVENT_READ, ended)

    def run(self) -> None:
        """Serve until asked to quit."""
        try:
            while self.running:
                waits = [w for w in (self._send_late(), None if self.lockstep else self._catch_up()) if w is not None]
                for key, _ in self.selector.select(max(0.0, min(waits)) if waits else None):
                    key.data()
        finally:
            self.channel.close()
            os.close(self._master)
            os.close(self._slave)


def main(argv: list[str] | None = None) -> int:
    """Start one emulator; prints one JSON line with ``port`` and ``socket`` once it is ready."""
    parser = argparse.ArgumentParser(prog="python -m real_robot.emulators.feetech", description=__doc__)
    parser.add_argument("--robot", default="so101_virtual", help="robot file: name or path")
    parser.add_argument("--world", default="tabletop", help=f"one of {', '.join(WORLDS)}")
    parser.add_argument("--socket", default="", help="path of the control socket (default: a new temporary one)")
    parser.add_argument("--lockstep", action="store_true", help="time advances only by 'tick' requests")
    parser.add_argument("--faults", default="[]", help='fault plan as JSON, e.g. [{"kind": "drop", "id": 3}]')
    parser.add_argument("--parent-pipe", action="store_true", help="end when standard input is closed")
    args = parser.parse_args(argv)
    try:
        if args.world not in WORLDS:
            raise unknown_choice("world", args.world, WORLDS)
        spec = load_robot(args.robot)
        path = Path(args.socket or Path(tempfile.mkdtemp(prefix="robot-")) / "control.sock")
        emulator = Emulator(spec, WORLDS[args.world](spec), path, args.lockstep)
        emulator.handle({"op": "faults", "plan": json.loads(args.faults)})
    except (UserError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.parent_pipe:
        emulator.watch(sys.stdin.fileno())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the host, which still needs the device
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: setattr(emulator, "running", False))
    print(json.dumps({"port": emulator.port, "socket": str(path)}), flush=True)
    emulator.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
