"""The verb end to end on the emulated arm: sentences in, results out; refusals touch nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from robot_tools import HOME, FeetechDriver, go_to, load_robot, sign, write_artefact

from control.policy import Policy, load_policy
from real_robot.batch import draw_requests, run_requests, run_sentences
from real_robot.contract import JointMap
from real_robot.deploy import main
from real_robot.loop import PolicyPlayer, run_episode
from real_robot.session import Session
from sims.errors import UserError
from sims.worlds.kinematics import forward
from sims.worlds.robots import SO101
from sims.worlds.variants import EPISODE_STEPS, VARIANTS

POSE = HOME + np.array([0.4, 0.2, -0.1, 0.0, 0.3, 0.0])


@pytest.fixture(scope="module")
def artefact(tmp_path_factory) -> Path:
    """A policy that takes the arm to POSE whatever it is told."""
    return write_artefact(tmp_path_factory.mktemp("policy") / "policy", **go_to(POSE))


def test_sentences_are_executed_judged_recorded_and_resumed(artefact, tmp_path) -> None:
    sentences = ["reach the marker", "press the green button", "do not lift the red cube"]
    rows = run_sentences(artefact, sentences, [1, 2, 3], out=tmp_path, steps=20)
    assert [r["understood"] for r in rows[:2]] == ["reach", "press_green"]
    assert [r["success"] for r in rows] == [False] * 3
    assert "negation" in rows[2]["refused"]
    for row in rows[:2]:
        assert row["executed_steps"] == 20
        assert row["violations"] == 0
        assert row["gate"]["sent"] == 100
        assert row["device"]["goals"] == 6 * (100 + 1)  # 20 actions of 5 ticks, and goal := present, on 6 motors
        arrays = np.load(tmp_path / row["trajectory"], allow_pickle=False)
        assert arrays["qpos"].shape == (21, 22)
        assert arrays["measured"].shape == (20, 6)
        assert np.abs(arrays["measured"][-1] - POSE).max() < 0.06
    stored = (tmp_path / "results.jsonl").read_text()
    assert len(stored.splitlines()) == 3
    again = run_sentences(artefact, sentences, [1, 2, 3], out=tmp_path, steps=20)
    assert again == rows
    assert (tmp_path / "results.jsonl").read_text() == stored
    summary = json.loads((tmp_path / "deploy.json").read_text())
    assert summary["sentences"] == 3
    assert summary["refused"] == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_batch_cut_off_by_kill_resumes_with_the_missing_rows(artefact, tmp_path) -> None:
    run = lambda n: run_sentences(artefact, ["reach the marker"] * n, list(range(n)), out=tmp_path, steps=4)  # noqa: E731
    first = run(2)
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"index": 2, "senten')
    rows = run(3)
    assert rows[:2] == first
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1, 2]


def test_lock_step_is_reproducible(artefact, tmp_path) -> None:
    rows = [run_sentences(artefact, ["reach the marker"], [5], out=tmp_path / n, steps=30) for n in "ab"]
    a, b = (np.load(tmp_path / n / r[0]["trajectory"]) for n, r in zip("ab", rows))
    for name in ("measured", "command", "objects", "qpos"):
        np.testing.assert_array_equal(a[name], b[name])


def test_success_is_judged_by_the_emulator_through_the_wire() -> None:
    """The marker is put where POSE takes the fingertip; a policy that goes there succeeds, one that stays does not."""
    from types import SimpleNamespace

    def policy_to(pose):
        def act(obs, state):
            target = obs["proprio"][:, 0:6] + obs["proprio"][:, 12:18]
            return (0.5 * (pose - target))[:, None], state

        act.spec = SimpleNamespace(execute=1, action_meaning="joint_position_delta")
        return act

    with Session("so101_virtual", lockstep=True, live=True) as session:
        layout = session.reset_world(seed=3)["layout"]
        layout["q"] = HOME.tolist()
        session.reset_world(layout=layout, seed=3)
        session.gate.engage()
        joints = JointMap(SO101.names, session.spec)
        player = PolicyPlayer(policy_to(POSE), joints, session.spec, {})
        run_episode(session.gate, session.sensors, player, session.clock, 40)
        settled = np.array(session.emulator.control.request("truth")["position"])  # type: ignore[union-attr]
        layout["marker"] = (forward(settled[None]).tip[0] - [0, 0, 0.008]).tolist()
        verdicts = []
        for pose in (POSE, HOME):
            session.reset_world(layout=layout, seed=3, variant="reach")
            session.gate.engage()
            player = PolicyPlayer(policy_to(pose), joints, session.spec, {})
            run_episode(session.gate, session.sensors, player, session.clock, 40)
            verdicts.append(session.emulator.control.request("judge"))  # type: ignore[union-attr]
        assert [v["success"] for v in verdicts] == [True, False]
        assert session.device_stats()["limits_violated"] == 0


def test_real_time_reports_lateness(artefact, tmp_path) -> None:
    row = run_sentences(artefact, ["reach the marker"], [1], lockstep=False, out=tmp_path, steps=20)[0]
    assert row["realtime"]
    assert row["lateness_us"]["count"] == 100
    assert row["lateness_us"]["p99"] >= row["lateness_us"]["p50"] > 0
    assert row["violations"] == 0
    assert row["wall_s"] >= 1.0  # 20 actions at 20 Hz


def test_drawn_sentences_cover_every_job_and_are_held_out() -> None:
    from sims.worlds.language import sentences

    requests = draw_requests(50, 0)
    counts = [sum(r.variant == v for r in requests) for v in VARIANTS]
    assert max(counts) - min(counts) <= 1
    assert all(r.sentence in sentences(r.variant, "heldout") for r in requests)
    assert all(r.sentence not in sentences(r.variant, "train") for r in requests)
    assert requests == draw_requests(50, 0) != draw_requests(50, 1)
    assert len({r.seed for r in requests}) == 50
    assert max(EPISODE_STEPS.values()) == 100


@pytest.mark.parametrize("stopped", [False, True])
def test_a_fault_costs_one_sentence_and_an_emergency_stop_the_rest(artefact, tmp_path, monkeypatch, stopped) -> None:
    """The policy answers with nan: a fault each time. The virtual arm goes on with the next sentence, unless stopped."""
    loaded = load_policy(artefact)
    monkeypatch.setattr(Policy, "__call__", lambda self, obs, state=None: (np.full((1, 1, 6), np.nan), state))
    monkeypatch.setattr("real_robot.batch.load_policy", lambda path: loaded)
    file = tmp_path / "stop"
    if stopped:
        file.touch()
    rows = run_sentences(artefact, ["reach the marker"] * 2, [1, 2], out=tmp_path / "out", steps=20, estop_file=file)
    assert len(rows) == (1 if stopped else 2)
    assert all(r["ended"].startswith("fault: emergency stop file" if stopped else "fault: 3 bad actions") for r in rows)
    assert all(r["gate"].get("sent", 0) == 0 for r in rows)
    assert (tmp_path / "out" / "deploy.json").exists() is not stopped


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_moves_only_when_live(artefact, tmp_path, capsys) -> None:
    args = [f"policy={artefact}", "sentence=reach the marker", "time=lockstep", "steps=10"]
    assert main([*args, f"out={tmp_path / 'dry'}"]) == 0
    assert "dry run: no motor was written to" in capsys.readouterr().out
    dry = json.loads((tmp_path / "dry" / "results.jsonl").read_text())
    assert dry["device"]["write_instructions"] == dry["device"]["goals"] == 0
    assert dry["gate"]["sent"] == 50  # the whole path up to the wire
    assert main([*args, f"out={tmp_path / 'live'}", "live=true"]) == 0
    live = json.loads((tmp_path / "live" / "results.jsonl").read_text())
    assert live["device"]["goals"] == 6 * 51


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        ("do not press the green button", ["negation", "Nearest known sentences"]),
        ("press the purple button", ["purple", "Nearest known sentences"]),
        ("lift the banana", ["banana", "Nearest known sentences"]),
        ("colourless green ideas sleep furiously", ["refused", "Nearest known sentences"]),
    ],
)
def test_sentences_no_job_covers_are_refused_before_anything_starts(
    artefact, tmp_path, capsys, monkeypatch, sentence, words
):
    monkeypatch.setattr("real_robot.session.EmulatorProcess", None)  # starting one would raise
    code = main([f"policy={artefact}", f"sentence={sentence}", "live=true", f"out={tmp_path / 'out'}"])
    message = capsys.readouterr().err
    assert code == 2
    assert message.startswith("error: ")
    assert all(w in message for w in words), message
    assert not (tmp_path / "out").exists()


def _without(name):
    return lambda folder: (folder / name).unlink()


def _flip(folder):
    data = bytearray((folder / "policy.onnx").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (folder / "policy.onnx").write_bytes(data)


def _edit(**action):
    def change(folder):
        spec = json.loads((folder / "spec.json").read_text())
        spec["env"]["action"].update(action)
        sign(folder, spec)

    return change


@pytest.mark.parametrize(
    ("damage", "extra", "message"),
    [
        (None, ["policy=/nowhere"], "no policy at /nowhere"),
        (_without("spec.json"), [], "spec.json is missing"),
        (_without("weights.safetensors"), [], "weights.safetensors is missing"),
        (_flip, [], "policy.onnx has checksum"),
        (_edit(names=["base", *SO101.names[1:]]), [], "joints do not match robot 'so101_virtual'"),
        (_edit(names=list(SO101.names[::-1])), [], "orders its joints"),
        (_edit(unit="deg"), [], "action unit"),
        (None, ["robot=so102"], "Did you mean 'so101"),
        (None, ["robot.file=so102"], "Did you mean 'so101'"),
        (None, ["robot=so101", "robot.port=/dev/ttyNOPE7", "robot.tracker=/nowhere"], "/nowhere"),
        (None, ["robot=so101", "robot.port=/dev/ttyNOPE7"], "'/dev/ttyNOPE7' does not exist"),
        (None, ["robot=so101", "time=lockstep"], "real hardware"),
        (None, ["time=fast"], "unknown time 'fast'"),
        (None, ["stpes=3"], "Did you mean 'steps'"),
        (None, ["+stpes=3"], "Did you mean 'steps'"),
        (None, ["steps=-1"], "must not be negative"),
        (None, ["sentence="], "nothing to do"),
    ],
)
def test_mistakes_exit_with_one_message_and_leave_results_alone(tmp_path, capsys, damage, extra, message) -> None:
    folder = write_artefact(tmp_path / "policy")
    out = tmp_path / "out"
    out.mkdir()
    (out / "results.jsonl").write_text('{"mine": 1}\n')
    if damage:
        damage(folder)
    code = main([f"policy={folder}", "sentence=reach the marker", "live=true", f"out={out}", *extra])
    printed = capsys.readouterr()
    assert code == 2
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert "Traceback" not in printed.err
    assert (out / "results.jsonl").read_text() == '{"mine": 1}\n'


def test_a_busy_port_is_refused(artefact, tmp_path) -> None:
    from real_robot.emulators.process import EmulatorProcess

    with EmulatorProcess("so101_virtual", world="servos") as emulator:
        owner = FeetechDriver(load_robot("so101_virtual", port=emulator.port))
        owner.connect()
        arm = {"robot": "so101", "port": emulator.port}
        try:
            with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
                run_requests(artefact, draw_requests(1, 0, realtime=True), out=tmp_path, **arm)
        finally:
            owner.disconnect()


def test_a_specialist_refuses_another_job(tmp_path) -> None:
    folder = write_artefact(tmp_path / "policy", env={"task": "tabletop/press_green"})
    with pytest.raises(UserError, match="trained for 'press_green' and cannot do 'reach'"):
        run_sentences(folder, ["reach the marker"], [1], out=tmp_path / "out", strict=True)


def test_deploying_never_imports_torch(artefact, tmp_path) -> None:
    """A whole live run on the emulator in a fresh process."""
    code = (
        "import sys; from real_robot.deploy import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "heavy = {'torch', 'jax', 'open_clip', 'gymnasium'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    args = [
        f"policy={artefact}",
        "sentence=reach the marker",
        "time=lockstep",
        "steps=3",
        "live=true",
        f"out={tmp_path}",
    ]
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
