"""Stages as processes: order, reuse, failure, interruption and kill -9, on real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distill.display import Display, time_left
from distill.scheduler import Job, Stage, exclusive, last_row, run_stages
from sims.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


class Silent:
    def update(self, jobs: dict[str, Job]) -> None: ...


@pytest.fixture(autouse=True)
def _modules_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # where `python -m stage_<name>` looks


def stage(folder: Path, name: str, code: str, needs: tuple[str, ...] = (), seconds: float = 1.0) -> Stage:
    """A stage that runs ``code`` in Python; ``touch()`` in it makes the product."""
    module = folder / f"stage_{name}.py"
    module.write_text(
        f"import pathlib, time, sys\ntouch = lambda: pathlib.Path({str(folder / name)!r}).touch()\n{code}\n"
    )
    return Stage(name, (f"stage_{name}",), folder / name, needs, None, seconds)


def test_needs_come_first_and_longest_of_the_ready_starts(tmp_path: Path) -> None:
    log = tmp_path / "order"
    code = f"open({str(log)!r}, 'a').write(sys.argv[0][-4]); touch()"
    stages = [stage(tmp_path, "c", code, ("a", "b")), stage(tmp_path, "a", code), stage(tmp_path, "b", code, seconds=9)]
    jobs = run_stages(stages, tmp_path, 1, Silent())
    assert log.read_text() == "bac"
    assert {j.state for j in jobs.values()} == {"done"}


def test_finished_stages_are_reused_until_their_command_changes(tmp_path: Path) -> None:
    count = tmp_path / "count"
    code = f"open({str(count)!r}, 'a').write('x'); touch()"
    first = stage(tmp_path, "a", code)
    run_stages([first], tmp_path, 1, Silent())
    assert run_stages([first], tmp_path, 1, Silent())["a"].state == "reused"
    assert count.read_text() == "x"
    changed = Stage("a", (*first.argv, "seed=1"), first.product)
    assert run_stages([changed], tmp_path, 1, Silent())["a"].state == "done"
    assert count.read_text() == "xx"


def test_a_product_that_an_unfinished_stage_left_does_not_count(tmp_path: Path) -> None:
    half = stage(tmp_path, "a", "touch(); sys.exit(1)")
    with pytest.raises(UserError):
        run_stages([half], tmp_path, 1, Silent())
    with pytest.raises(UserError):  # runs again, fails again
        run_stages([half], tmp_path, 1, Silent())


def test_failure_names_the_stage_and_its_last_words_and_starts_nothing_more(tmp_path: Path) -> None:
    stages = [
        stage(tmp_path, "bad", "print('the cable is loose'); sys.exit(2)"),
        stage(tmp_path, "later", "touch()", ("bad",)),
    ]
    with pytest.raises(UserError, match=r"(?s)stage bad failed.*the cable is loose"):
        run_stages(stages, tmp_path, 2, Silent())
    assert not (tmp_path / "later").exists()


def test_success_without_product_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="stage a failed"):
        run_stages([stage(tmp_path, "a", "pass")], tmp_path, 1, Silent())


PARENT = """
import sys, pathlib
sys.path.insert(0, {root!r})
from distill.scheduler import Stage, run_stages
class Silent:
    def update(self, jobs): pass
folder = pathlib.Path({folder!r})
try:
    run_stages([Stage("a", ("stage_a",), folder / "a")], folder, 1, Silent())
except KeyboardInterrupt:
    sys.exit(130)
"""


def start_parent(folder: Path, code: str) -> tuple[subprocess.Popen[bytes], int]:
    """A scheduler in its own process with one running stage; returns it and the stage's process id."""
    stage(folder, "a", f"import os\npathlib.Path({str(folder / 'pid')!r}).write_text(str(os.getpid()))\n{code}")
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(root=str(ROOT), folder=str(folder))])
    pid_file = folder / "pid"
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline, "the stage never started"
        time.sleep(0.05)
    return parent, int(pid_file.read_text())


def ended(pid: int) -> bool:
    """Whether a process is gone (or a zombie that only waits to be collected)."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def wait_ended(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not ended(pid):
        time.sleep(0.05)
    return ended(pid)


def test_interrupt_lets_the_stage_save(tmp_path: Path) -> None:
    saves = (
        f"try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    open({str(tmp_path / 'saved')!r}, 'w').write('yes')"
    )
    parent, pid = start_parent(tmp_path, saves)
    parent.send_signal(signal.SIGINT)
    assert parent.wait(30) == 130
    assert (tmp_path / "saved").read_text() == "yes"
    assert ended(pid)
    assert json.loads((tmp_path / "stages.json").read_text())[0]["status"] == "stopped"


def test_kill_9_takes_the_stages_along(tmp_path: Path) -> None:
    parent, pid = start_parent(tmp_path, "time.sleep(60)")
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert wait_ended(pid), "an orphan would go on writing into the run"


def test_two_pipelines_cannot_share_a_folder(tmp_path: Path) -> None:
    with exclusive(tmp_path), pytest.raises(UserError, match="in use by another pipeline"), exclusive(tmp_path):
        pass
    with exclusive(tmp_path):  # free again
        pass


def test_damaged_history_is_named(tmp_path: Path) -> None:
    (tmp_path / "stages.json").write_text("{")
    with pytest.raises(UserError, match=r"stages.json is damaged"):
        run_stages([], tmp_path, 1, Silent())


def test_last_row_skips_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert last_row(path) == {"step": 2}
    assert last_row(tmp_path / "none") == {}


def test_time_left_is_the_longer_of_chain_and_shared_work(tmp_path: Path) -> None:
    def job(name: str, seconds: float, *needs: str) -> tuple[str, Job]:
        return name, Job(Stage(name, (), tmp_path / name, needs, None, seconds))

    # chain a -> b: 30 s; all work on two workers: (10 + 20 + 10) / 2 = 20 s
    assert time_left(dict([job("a", 10), job("b", 20, "a"), job("c", 10)]), 2) == 30
    # four equal ones on two workers: 80 / 2
    assert time_left(dict([job(n, 20) for n in "abcd"]), 2) == 40


def test_display_prints_plain_lines_when_it_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = tmp_path / "m.jsonl"
    metrics.write_text('{"step": 5, "total": 10, "steps_per_s": 321, "return": 1.5, "success": 0.5}\n')
    running = Job(Stage("a", (), tmp_path / "a", (), metrics, 10), "running")
    with Display(1) as display:
        display.update({"a": running})
    out = capsys.readouterr().out
    assert "a: running" in out
    assert "50% 321 steps/s return 1.5 success 50%" in out
