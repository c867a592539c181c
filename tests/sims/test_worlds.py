"""Geometry, layouts, sensors and predicates of the tabletop, against numbers worked by hand and against MuJoCo."""

import mujoco
import numpy as np
import pytest
import torch

from sims.errors import UserError
from sims.worlds import kinematics, predicates, tabletop, tracker
from sims.worlds.robots import SO101, next_target
from sims.worlds.variants import VARIANTS


@pytest.fixture(scope="module")
def model():
    return tabletop.load_model()


def sensors_of(model, data):
    return {k: v[None].copy() for k, v in tabletop.read_sensors(data.sensordata, tabletop.sensor_slices(model)).items()}


def test_scene_is_the_published_arm(model):
    # so101_new_calib.xml: upper arm 116 mm between lift and elbow axis, forearm 135 mm to the wrist axis
    pose = kinematics.forward(np.zeros((1, 6)))
    axes = pose.origins[0]
    assert np.linalg.norm(axes[2] - axes[1]) == pytest.approx(np.hypot(0.11257, 0.028), abs=1e-6)
    assert np.linalg.norm(axes[3] - axes[2]) == pytest.approx(np.hypot(0.1349, 0.0052), abs=1e-6)
    # the lift axis stands 116.6 mm above the table and 69.2 mm in front of the origin
    assert axes[1, [0, 2]] == pytest.approx([0.069235, 0.1166], abs=1e-6)
    assert [model.joint(i).name for i in range(6)] == list(SO101.names)
    assert model.jnt_range[:6] == pytest.approx(np.stack([SO101.column("low"), SO101.column("high")], 1))
    assert model.actuator_gainprm[:, 0] == pytest.approx(SO101.column("kp"))
    assert model.dof_damping[:6] == pytest.approx(SO101.column("damping"))
    assert model.actuator_forcerange[:, 1] == pytest.approx(SO101.column("max_torque"))
    assert model.opt.timestep == tabletop.TIMESTEP
    assert pytest.approx(1.0) == tabletop.TIMESTEP * tabletop.SUBSTEPS * tabletop.CONTROL_HZ


def test_kinematics_equal_mujoco_sensors(model):
    data, rng = mujoco.MjData(model), np.random.default_rng(3)
    for _ in range(20):
        data.qpos[:6] = rng.uniform(SO101.column("low"), SO101.column("high"))
        mujoco.mj_forward(model, data)
        named, pose = sensors_of(model, data), kinematics.forward(data.qpos[None, :6])
        for sensor, value in (("tip/pos", pose.tip), ("grasp/pos", pose.grasp), ("jaw_tip/pos", pose.jaw_tip)):
            assert value == pytest.approx(named[sensor], abs=1e-9), sensor
        assert pose.approach == pytest.approx(-named["hand/z"], abs=1e-9)
        assert pose.closing == pytest.approx(named["hand/x"], abs=1e-9)
        assert pose.axes[0] == pytest.approx(data.xaxis[:6], abs=1e-9)


def test_straight_arm_by_hand():
    # pan 90 degrees turns the hand from +x to -y (the pan axis points down) at the same radius
    q = np.array([[0, -0.6, 0.55, 1.55, 0, 0.6], [np.pi / 2, -0.6, 0.55, 1.55, 0, 0.6]])
    tip = kinematics.forward(q).tip - np.array([SO101.links[0].position[0], 0, 0])
    assert tip[1] == pytest.approx([tip[0, 1], -tip[0, 0], tip[0, 2]], abs=1e-9)
    # lift + elbow + wrist flex = 1.5 rad below the horizon: approach is (cos 1.5, 0, -sin 1.5)
    assert kinematics.forward(q[:1]).approach[0] == pytest.approx([np.cos(1.5), 0, -np.sin(1.5)], abs=1e-4)


def test_proprio_layout():
    q, v, target = (np.full((1, 6), x) for x in (0.1, 0.2, 0.35))
    row = kinematics.proprio(q, v, target)
    assert row.shape == (1, 30)
    assert row.dtype == np.float32
    assert len(kinematics.PROPRIO_NAMES) == 30
    assert row[0, [0, 6, 12]] == pytest.approx([0.1, 0.2, 0.25])


@pytest.mark.parametrize(
    ("target", "q", "action", "wanted"),
    [
        (0.0, 0.0, 0.05, 0.05),  # plain
        (0.0, 0.0, 9.0, 0.1),  # clipped to 0.1 rad a step
        (0.2, 0.0, 0.1, 0.25),  # at most 0.25 rad ahead of the joint
        (1.9, 1.9, 0.1, 1.91986),  # range of the pan joint
    ],
)
def test_next_target_by_hand(target, q, action, wanted):
    out = next_target(SO101, np.full((1, 6), target), np.full((1, 6), q), np.full((1, 6), action))
    assert out[0, 0] == pytest.approx(wanted)


@pytest.mark.parametrize("split", tabletop.SPLITS)
def test_layouts_keep_their_rules(split):
    rng = np.random.default_rng(0)
    inner = tabletop.OBJECT_RANGES["train"]
    sides = set()
    for _ in range(200):
        layout = tabletop.sample_layout(rng, split)
        points = np.stack([layout.marker[:2], layout.red_cube[:2], layout.blue_cube[:2]])
        offset = points - tabletop.PAN_AXIS
        radius, angle = np.linalg.norm(offset, axis=1), np.abs(np.arctan2(offset[:, 1], offset[:, 0]))
        inside = (radius >= inner.radius[0]) & (radius <= inner.radius[1]) & (angle <= inner.angle[1])
        assert inside.all() if split == "train" else not inside.any()
        assert np.linalg.norm(points[1] - points[2]) > 0.05
        for cube in (1, 2):
            assert 0.06 < np.linalg.norm(points[cube] - points[0]) < 0.20
        assert layout.green_button[1] * layout.yellow_button[1] < 0
        sides.add(np.sign(layout.green_button[1]))
    assert sides == {-1.0, 1.0}


def test_layout_is_free_of_contact_and_at_rest(model):
    data = mujoco.MjData(model)
    layout = tabletop.sample_layout(np.random.default_rng(1))
    tabletop.apply_layout(model, data, layout)
    arm = {model.geom(i).id for i in range(model.ngeom) if 0 < model.geom_bodyid[i] <= 8}
    assert not any(c.dist < 0 and (c.geom1 in arm or c.geom2 in arm) for c in data.contact)
    start = data.qpos[6:20].copy()
    for _ in range(100):
        mujoco.mj_step(model, data)
    assert data.qpos[6:20] == pytest.approx(start, abs=5e-4)


def test_unknown_split_names_the_known_ones():
    with pytest.raises(UserError, match=r"unknown split 'trian'.*Did you mean 'train'"):
        tabletop.sample_layout(np.random.default_rng(0), "trian")


def test_predicates_agree_between_numpy_and_torch():
    rng, truths = np.random.default_rng(0), {name: set() for name in VARIANTS}
    for _ in range(300):
        scale = 10 ** rng.uniform(-3, -0.5)
        named = {f"{o}/{f}": rng.normal(size=(4, 3)) * scale for o in ("red_cube", "blue_cube") for f in ("pos", "vel")}
        named |= {"tip/pos": rng.normal(size=(4, 3)) * scale, "marker/pos": np.zeros((4, 3))}
        named |= {f"{b}/travel": -rng.random((4, 1)) * 0.008 for b in ("green_button", "yellow_button")}
        for variant in VARIANTS:
            mine = predicates.holds(variant, named)
            theirs = predicates.holds(variant, {k: torch.from_numpy(v) for k, v in named.items()})
            assert np.array_equal(mine, theirs.numpy())
            truths[variant] |= set(mine.tolist())
    assert all(seen == {True, False} for seen in truths.values())


def test_predicates_by_hand():
    marker = np.zeros((1, 3))
    assert predicates.reach_ok(np.array([[0.0, 0.014, 0.008]]), marker).all()
    assert not predicates.reach_ok(np.array([[0.0, 0.0, 0.0235]]), marker).any()  # 15.5 mm above the hover point
    assert predicates.press_ok(np.array([-0.0051])).all()
    assert not predicates.press_ok(np.array([-0.0049])).any()
    still, cube = np.zeros((1, 3)), np.array([[0.019, 0.0, 0.015]])
    assert predicates.move_ok(cube, still, marker).all()
    assert not predicates.move_ok(cube, np.array([[0.06, 0.0, 0.0]]), marker).any()  # still sliding
    assert not predicates.move_ok(cube + np.array([0.0, 0.0, 0.011]), still, marker).any()  # held above the marker
    assert predicates.lift_ok(np.array([[0.0, 0.0, 0.0951]])).all()
    assert not predicates.lift_ok(np.array([[0.0, 0.0, 0.0949]])).any()


def test_yaw_does_not_care_which_face_is_up():
    def quat(axis, angle):
        out = np.zeros(4)
        mujoco.mju_axisAngle2Quat(out, np.asarray(axis, float), angle)
        return out

    turn = quat([0, 0, 1], 0.3)
    for face in ([1, 0, 0], [0, 1, 0], [0, 0, 1]):
        for quarter in range(4):
            both = np.zeros(4)
            mujoco.mju_mulQuat(both, turn, quat(face, quarter * np.pi / 2))
            off = (tracker.yaw_of(both) - 0.3 + np.pi / 4) % (np.pi / 2) - np.pi / 4
            assert off == pytest.approx(0.0, abs=1e-9)


def test_tracker_columns_and_noise(model):
    data = mujoco.MjData(model)
    layout = tabletop.sample_layout(np.random.default_rng(2))
    tabletop.apply_layout(model, data, layout)
    named = sensors_of(model, data)
    row = dict(zip(tracker.OBJECTS_NAMES, tracker.measure(named)[0]))
    assert len(row) == tracker.OBJECTS_DIM
    assert row["red_cube/x"] == pytest.approx(layout.red_cube[0], abs=1e-6)
    assert row["yellow_button/z"] == pytest.approx(0.036, abs=1e-6)
    yaw = 2 * np.arctan2(layout.blue_cube[6], layout.blue_cube[3])
    assert row["blue_cube/sin4yaw"] == pytest.approx(np.sin(4 * yaw), abs=1e-5)
    many = {k: np.repeat(v, 4000, axis=0) for k, v in named.items()}
    noisy = tracker.measure(many, np.random.default_rng(0).standard_normal((4000, tracker.NOISE_DIM)))
    spread = dict(zip(tracker.OBJECTS_NAMES, noisy.std(axis=0)))
    assert spread["marker/x"] == pytest.approx(0.001, rel=0.1)
    assert spread["red_cube/velocity_y"] == pytest.approx(0.01, rel=0.1)
    angle = np.arctan2(noisy[:, 10], noisy[:, 9]) / 4
    shifted = (angle - np.median(angle) + np.pi / 4) % (np.pi / 2) - np.pi / 4
    assert shifted.std() == pytest.approx(np.deg2rad(1.0), rel=0.1)
