"""Robot files: shipped ones agree with the simulated arm, units are right, mistakes are named."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import yaml

from real_robot.config import ROBOT_DIR, load_robot, robot_names
from sims.errors import UserError
from sims.worlds.robots import SO101


@pytest.mark.parametrize("name", robot_names())
def test_shipped_robots_agree_with_the_simulated_arm(name: str) -> None:
    spec = load_robot(name)
    assert spec.names == SO101.names
    for field in ("low", "high", "home"):
        np.testing.assert_allclose(spec.array(field), SO101.column(field), err_msg=field)
    assert (spec.array("velocity") <= SO101.column("max_speed")).all()
    assert (spec.array("velocity") >= SO101.column("max_delta") * spec.policy_hz).all()


def test_ticks_by_hand() -> None:
    """2048 + 0.5 * 4096 / (2 pi) = 2048 + 325.949 = 2373.949 -> 2374 -> back 326 / 651.899 = 0.50008 rad."""
    spec = load_robot("so101")
    pose = np.array([0.5, 0, 0, 0, 0, 0])
    assert spec.to_ticks(pose).tolist() == [2374, 2048, 2048, 2048, 2048, 2048]
    assert spec.to_rad(spec.to_ticks(pose))[0] == pytest.approx(326 * 2 * math.pi / 4096)


def test_sign_and_zero_by_hand(tmp_path) -> None:
    """sign -1, zero 1000: 0.5 rad -> 1000 - 325.949 = 674.05 -> 674."""
    path = tmp_path / "mine.yaml"
    path.write_text("extends: so101\nname: mine\njoints: [{name: elbow_flex, sign: -1, zero_ticks: 1000}]\n")
    spec = load_robot(str(path))
    assert spec.to_ticks(np.array([0, 0, 0.5, 0, 0, 0]))[2] == 674
    assert spec.to_rad(np.array([2048, 2048, 674, 2048, 2048, 2048]))[2] == pytest.approx(0.5, abs=1e-3)
    assert spec.names == SO101.names  # merging by name keeps order and the other joints


def test_the_ends_of_the_range_round_inwards() -> None:
    spec = load_robot("so101")
    low, high = spec.tick_limits()
    for end, ticks in ((spec.array("low"), low), (spec.array("high"), high)):
        assert (spec.to_ticks(end) == ticks).all()
    assert (spec.to_rad(low) >= spec.array("low")).all()
    assert (spec.to_rad(high) <= spec.array("high")).all()


def _broken(change) -> str:
    data = yaml.safe_load((ROBOT_DIR / "so101.yaml").read_text())
    change(data)
    return yaml.safe_dump(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["joints"][0].update(low=2.0), "shoulder_pan.*low 2.0 must be below"),
        (lambda d: d["joints"][0].update(home=3.0), "home 3.0 lies outside"),
        (lambda d: d["joints"][1].update(id=1), "duplicate joint id"),
        (lambda d: d["joints"][1].update(velocity=float("nan")), "'velocity' must be a float, found nan"),
        (lambda d: d["joints"][1].update(velocity=-1.0), "must be positive"),
        (lambda d: d["joints"][1].update(velocty=1.0), "unknown field 'velocty'.*Did you mean 'velocity'"),
        (lambda d: d["joints"][1].pop("low"), "missing low"),
        (lambda d: d.update(servo_hz=50, policy_hz=20), "multiple of policy_hz"),
        (lambda d: d.update(workspace=[0, 0, 0, 1, 1, -1]), "workspace needs"),
        (lambda d: d.update(joints="six"), "'joints' must be a list"),
    ],
)
def test_mistakes_in_a_robot_file_are_named(tmp_path, change, message) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(_broken(change))
    with pytest.raises(UserError, match=message):
        load_robot(str(path))


def test_unknown_robot_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"unknown robot 'so100'.*Did you mean 'so101'"):
        load_robot("so100")


def test_no_module_of_the_robot_imports_torch() -> None:
    """Run a dry deployment's imports and the emulator's in a fresh process."""
    code = (
        "import sys, pkgutil, importlib, real_robot\n"
        "names = [m.name for m in pkgutil.walk_packages(real_robot.__path__, 'real_robot.')]\n"
        "assert len(names) > 15, names\n"
        "[importlib.import_module(n) for n in names]\n"
        "heavy = {'torch', 'jax', 'open_clip', 'serial'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
