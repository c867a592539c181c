"""Shared by the robot tests: an emulated bus, a fake driver, and a policy artefact built from a linear graph."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from control.policy import document_digest
from real_robot.config import RobotSpec, load_robot
from real_robot.drivers.feetech import FeetechDriver
from real_robot.drivers.feetech_bus import BusError
from real_robot.emulators.process import EmulatorProcess
from real_robot.safety import SafetyGate
from real_robot.types import JointState
from sims.tabletop_env import TABLETOP
from sims.worlds.robots import SO101
from sims.worlds.variants import VARIANTS

HOME = SO101.column("home")


@dataclass
class Bench:
    """One emulated bus with a driver that is not connected yet, and the gate that owns it."""

    emulator: EmulatorProcess
    spec: RobotSpec
    driver: FeetechDriver
    gate: SafetyGate
    clock: Any

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        return self.emulator.control.request(op, **fields)

    def wait(self, seconds: float = 0.01) -> None:
        self.clock.sleep_until(self.clock.now_ns() + round(seconds * 1e9))

    def hold_ticks(self, target: np.ndarray, ticks: int) -> list[str]:
        """Submit one target for some servo periods; outcomes."""
        outcomes = []
        for _ in range(ticks):
            outcomes.append(self.gate.submit(target).outcome)
            self.wait()
            self.gate.observe()
        return outcomes

    def fired(self) -> int:
        return sum(f["fired"] for f in self.ask("stats")["faults"])


@contextlib.contextmanager
def bench(world: str = "servos", dry_run: bool = False, connect: bool = True, **changes: Any) -> Iterator[Bench]:
    """A lock-step bench; ``changes`` replace fields of the robot file."""
    with EmulatorProcess("so101_virtual", world=world) as emulator:
        timeouts = {"reply_timeout_s": 0.05, "read_budget_s": 0.2}
        spec = load_robot("so101_virtual", port=emulator.port, **{**timeouts, **changes})
        driver = FeetechDriver(spec, dry_run=dry_run)
        driver.clock = emulator.clock(lambda: driver.bus.tx_bytes)
        gate = SafetyGate(driver, driver.clock)
        if connect:
            gate.connect()
        try:
            yield Bench(emulator, spec, driver, gate, driver.clock)
        finally:
            gate.shutdown()


class FakeClock:
    """Time moves only when told."""

    def __init__(self) -> None:
        self.now = 0

    def now_ns(self) -> int:
        return self.now

    def sleep_until(self, deadline_ns: int) -> None:
        self.now = max(self.now, deadline_ns)


class FakeDriver:
    """Joints that are where they were last sent. ``log`` keeps the calls; ``broken`` names calls that fail."""

    def __init__(self, **changes: Any) -> None:
        self.spec = replace(load_robot("so101_virtual"), **changes)
        self.position = self.spec.array("home")
        self.sent: list[np.ndarray] = []
        self.log: list[str] = []
        self.broken: set[str] = set()
        self.faults: dict[str, str] = {}
        self.clock = FakeClock()

    def _call(self, name: str) -> None:
        self.log.append(name)
        if name in self.broken:
            raise BusError(f"{name} failed")

    def connect(self) -> None:
        self._call("connect")

    def read(self) -> JointState:
        self._call("read")
        return JointState(self.clock.now_ns(), self.position.copy(), np.zeros(6), dict(self.faults))

    def write(self, target: np.ndarray) -> np.ndarray:
        self._call("write")
        self.position = target.copy()
        self.sent.append(target.copy())
        return target

    def enable(self) -> None:
        self._call("enable")

    def stop(self) -> None:
        self._call("stop")

    def disconnect(self) -> None:
        self._call("disconnect")


def fake_gate(**changes: Any) -> tuple[SafetyGate, FakeDriver]:
    """An engaged gate over a fake driver."""
    driver = FakeDriver(**changes)
    gate = SafetyGate(driver, driver.clock)
    gate.engage()
    driver.sent.clear()
    return gate, driver


def write_artefact(
    folder: Path, weight: np.ndarray | None = None, bias: np.ndarray | None = None, **changes: Any
) -> Path:
    """A policy ``action = weight @ proprio + bias`` as a complete artefact. ``changes`` edit its spec.

    weight: (6, 30), default zero. bias: (6,) rad per step, default zero.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    w = np.zeros((30, 6), np.float32) if weight is None else weight.T.astype(np.float32)
    b = np.zeros(6, np.float32) if bias is None else bias.astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["proprio", "w"], ["x"]),
        helper.make_node("Add", ["x", "b"], ["y"]),
        helper.make_node("Unsqueeze", ["y", "axis"], ["action"]),
    ]
    constants = [numpy_helper.from_array(a, n) for a, n in ((w, "w"), (b, "b"), (np.array([1]), "axis"))]
    inputs = [helper.make_tensor_value_info("proprio", TensorProto.FLOAT, ["batch", 30])]
    outputs = [helper.make_tensor_value_info("action", TensorProto.FLOAT, ["batch", 1, 6])]
    graph = helper.make_graph(nodes, "linear", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(folder / "policy.onnx"))
    proprio = np.random.default_rng(0).normal(size=(4, 30)).astype(np.float32)
    save_file({"w": w, "b": b}, folder / "weights.safetensors")
    save_file({"input/proprio": proprio, "output": (proprio @ w + b)[:, None]}, folder / "golden.safetensors")
    env = TABLETOP.spec("tabletop", list(VARIANTS), ("reach the marker",), 50).to_json()
    env["action"].update(changes.pop("action", {}))
    env.update(changes.pop("env", {}))
    document = {
        "env": env,
        "action_meaning": "joint_position_delta",
        "chunk": 1,
        "execute": 1,
        "inputs": ["proprio"],
        "language": None,
        "extra": {},
        **changes,
    }
    names = ("policy.onnx", "weights.safetensors", "golden.safetensors")
    document["sha256"] = {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in names}
    sign(folder, document)
    return folder


def sign(folder: Path, document: dict[str, Any]) -> None:
    """Write spec.json with its checksum."""
    (folder / "spec.json").write_text(json.dumps({**document, "digest": document_digest(document)}))


def go_to(pose: np.ndarray) -> dict[str, np.ndarray]:
    """Weights of a policy that steers every joint to ``pose``: action = 0.5 (pose - target), target = q + lead."""
    weight = np.zeros((6, 30))
    weight[:, 0:6] = weight[:, 12:18] = -0.5 * np.eye(6)
    return {"weight": weight, "bias": 0.5 * pose}
