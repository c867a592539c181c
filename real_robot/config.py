"""What a robot is: joints, limits, rates. Plain dataclasses read from `real_robot/robots/*.yaml`. Torch-free.

Every number of a robot file carries its unit in the field below. Unknown or missing fields, reversed limits, duplicate
names or ids are refused with a `UserError` that names the file and the joint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from sims.errors import UserError, unknown_choice

ROBOT_DIR = Path(__file__).parent / "robots"
TICKS_PER_TURN = 4096  # STS3215 magnetic encoder, 12 bit


@dataclass
class JointSpec:
    """One joint. Position in rad = sign * (ticks - zero_ticks) / ticks_per_rad."""

    name: str
    id: int
    low: float = field(metadata={"help": "lowest commanded position, rad"})
    high: float = field(metadata={"help": "highest commanded position, rad"})
    velocity: float = field(metadata={"help": "largest speed of the commanded position, rad/s"})
    acceleration: float = field(metadata={"help": "largest change of that speed, rad/s^2"})
    home: float = field(metadata={"help": "rest position, rad"})
    sign: int = 1
    zero_ticks: int = field(default=TICKS_PER_TURN // 2, metadata={"help": "encoder reading at 0 rad"})
    ticks_per_rad: float = TICKS_PER_TURN / (2 * math.pi)

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise UserError(f"joint '{self.name}': low {self.low} must be below high {self.high}.")
        if not self.low <= self.home <= self.high:
            raise UserError(f"joint '{self.name}': home {self.home} lies outside [{self.low}, {self.high}].")
        if self.sign not in (-1, 1) or not 0 <= self.id <= 253:
            raise UserError(f"joint '{self.name}': sign must be 1 or -1 and id 0..253, found {self.sign}, {self.id}.")
        if min(self.velocity, self.acceleration, self.ticks_per_rad) <= 0:
            raise UserError(f"joint '{self.name}': velocity, acceleration, ticks_per_rad must be positive.")


@dataclass
class RobotSpec:
    """A robot in the order of its joints; arrays derived from it are (J,) float64."""

    name: str
    driver: str
    joints: tuple[JointSpec, ...]
    port: str = ""
    emulator: str = field(default="", metadata={"help": "emulator module to start instead of real hardware"})
    kinematics: str = field(
        default="so101", metadata={"help": "arm in sims.worlds.robots that gives forward kinematics"}
    )
    baudrate: int = 1_000_000
    model_number: int = field(default=777, metadata={"help": "what every motor must report; STS3215 = 777"})
    servo_hz: float = field(default=100.0, metadata={"help": "commands sent per second"})
    policy_hz: float = field(default=20.0, metadata={"help": "actions per second"})
    ramp_fraction: float = field(default=1.0, metadata={"help": "part of the action period in which a target is met"})
    joint_max_age_s: float = field(default=0.05, metadata={"help": "older joint measurements are not acted on"})
    sensor_max_age_s: float = field(default=0.25, metadata={"help": "older tracker measurements are not acted on"})
    bad_actions_to_fault: int = 3
    bad_reads_to_fault: int = 5
    measured_tolerance: float = field(default=0.1, metadata={"help": "rad a measurement may leave the limits by"})
    retries: int = field(default=2, metadata={"help": "repeats of a request that got no valid answer"})
    reply_timeout_s: float = field(default=0.004, metadata={"help": "wait for one answer"})
    read_budget_s: float = field(default=0.008, metadata={"help": "all of one read, retries included"})
    device_acceleration: int = field(default=0, metadata={"help": "register 41, 100 ticks/s^2; 0 = unlimited"})
    device_velocity: int = field(default=0, metadata={"help": "register 46, ticks/s; 0 = unlimited"})
    workspace: tuple[float, ...] = field(
        default=(), metadata={"help": "box for the fingertip, m: x y z lowest, x y z highest; empty = no box"}
    )
    tracker: str = field(default="", metadata={"help": "Unix socket of an object tracker; emulators bring their own"})
    ramp_speed: float = field(default=0.5, metadata={"help": "speed of travel to home or a start pose, rad/s"})

    def __post_init__(self) -> None:
        self.joints = tuple(self.joints)
        self.workspace = tuple(self.workspace)
        if self.workspace and (
            len(self.workspace) != 6 or any(a >= b for a, b in zip(self.workspace, self.workspace[3:]))
        ):
            raise UserError(
                f"robot '{self.name}': workspace needs x y z lowest, x y z highest, found {self.workspace}."
            )
        for what, values in (("name", self.names), ("id", self.ids)):
            if len(set(values)) != len(values):
                raise UserError(f"robot '{self.name}': duplicate joint {what} in {list(values)}.")
        ratio = self.servo_hz / self.policy_hz
        if ratio < 1 or abs(ratio - round(ratio)) > 1e-9:
            raise UserError(
                f"robot '{self.name}': servo_hz {self.servo_hz} must be a multiple of policy_hz {self.policy_hz}."
            )
        if not 0 < self.ramp_fraction <= 1:
            raise UserError(f"robot '{self.name}': ramp_fraction {self.ramp_fraction} must lie in (0, 1].")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(j.name for j in self.joints)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(j.id for j in self.joints)

    @property
    def ticks_per_action(self) -> int:
        """Servo commands per policy action."""
        return round(self.servo_hz / self.policy_hz)

    def array(self, attribute: str) -> np.ndarray:
        """(J,) float64 of a joint field, e.g. ``array("low")``."""
        return np.array([getattr(j, attribute) for j in self.joints], dtype=np.float64)

    def to_ticks(self, position: np.ndarray) -> np.ndarray:
        """(J,) rad -> (J,) int64 encoder ticks, rounded to the nearest tick *inside* the limits."""
        low, high = self.tick_limits()
        raw = self.array("zero_ticks") + self.array("sign") * np.asarray(position) * self.array("ticks_per_rad")
        nearest = np.rint(raw)
        inside = np.clip(nearest, low, high)  # half a tick of rounding must not leave the range
        return np.where(np.abs(raw - inside) < 1.0, inside, nearest).astype(np.int64)

    def to_rad(self, ticks: np.ndarray) -> np.ndarray:
        """(J,) ticks -> (J,) rad."""
        return self.array("sign") * (np.asarray(ticks) - self.array("zero_ticks")) / self.array("ticks_per_rad")

    def tick_limits(self) -> tuple[np.ndarray, np.ndarray]:
        """(J,) int64 lowest and highest tick whose angle lies within the limits."""
        ends = [
            self.array("zero_ticks") + self.array("sign") * self.array(e) * self.array("ticks_per_rad")
            for e in ("low", "high")
        ]
        return np.ceil(np.minimum(*ends)).astype(np.int64), np.floor(np.maximum(*ends)).astype(np.int64)


def robot_names() -> list[str]:
    """Names of the robot files that ship with the package."""
    return sorted(p.stem for p in ROBOT_DIR.glob("*.yaml"))


def load_robot(name_or_path: str, **changes: Any) -> RobotSpec:
    """Read a robot file by shipped name or by path; ``changes`` replace top-level fields (``port=...``).

    A file may name another one in ``extends`` and then only lists what differs; ``joints`` are merged by name.
    Raises UserError for an unknown robot, an unreadable file or a wrong field.
    """
    spec = _build(_read(name_or_path), str(name_or_path))
    unknown = set(changes) - {f.name for f in fields(RobotSpec)}
    if unknown:
        raise unknown_choice("robot field", sorted(unknown)[0], [f.name for f in fields(RobotSpec)])
    return replace(spec, **changes)


def _read(name_or_path: str) -> dict[str, Any]:
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        path = ROBOT_DIR / f"{name_or_path}.yaml"
        if not path.is_file():
            raise unknown_choice("robot", str(name_or_path), robot_names(), where=str(ROBOT_DIR))
    try:
        data = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"robot file {path} does not exist. Give a path or one of: {', '.join(robot_names())}."
        ) from None
    except yaml.YAMLError as error:
        raise UserError(f"robot file {path} is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"robot file {path} must hold a mapping, found {type(data).__name__}.")
    base = data.pop("extends", None)
    return _merge(_read(base), data) if base else data


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**base, **over}
    changed = {j["name"]: j for j in over.get("joints", [])}
    merged["joints"] = [{**j, **changed.get(j["name"], {})} for j in base.get("joints", [])]
    return merged


def _build(data: Mapping[str, Any], where: str) -> RobotSpec:
    joints = data.get("joints")
    if not isinstance(joints, list) or not joints or not all(isinstance(j, dict) for j in joints):
        raise UserError(f"robot file {where}: 'joints' must be a list of mappings with at least one joint.")
    built = tuple(_checked(JointSpec, j, f"{where}, joint '{j.get('name', '?')}'") for j in joints)
    return _checked(RobotSpec, {**data, "joints": built}, where)


def _checked(cls: type, data: Mapping[str, Any], where: str) -> Any:
    known = {f.name: f for f in fields(cls)}
    for key in data:
        if key not in known:
            raise unknown_choice("field", str(key), known, where=f"robot file {where}")
    missing = [n for n, f in known.items() if f.default is MISSING and n not in data]
    if missing:
        raise UserError(f"robot file {where}: missing {', '.join(missing)}.")
    for key, value in data.items():
        wanted = known[key].type
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if (wanted in ("float", "int") and not (number and math.isfinite(value))) or (
            wanted == "str" and not isinstance(value, str)
        ):
            raise UserError(f"robot file {where}: '{key}' must be a {wanted}, found {value!r}.")
    return cls(**data)
