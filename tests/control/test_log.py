"""The run's numbers: three files that agree, also after a resume; what a person sees."""

from __future__ import annotations

import csv
import io
import os
import re
import subprocess
import sys
import time

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from control.evaluate import EvalResult, student, wilson
from control.log import MetricLog, read_rows
from control.progress import Progress, clock, evaluation
from control.train import main


def events(folder) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def table(path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open()))


@pytest.mark.parametrize("checkpoint", [0, 2])
def test_three_files_hold_the_same_numbers_also_after_a_kill(checkpoint, tmp_path):
    """The first process is killed after step 3, while it writes; the second goes on from the checkpoint."""
    log = MetricLog(tmp_path / "metrics.jsonl", "train", 9, tensorboard=True)
    log.truncate_after(0)
    for step in (1, 2, 3):
        log.write({"step": step, "q": step * 0.5})
    log.write({"step": 3, "eval/return": float("nan"), "note": "a, b"})
    for file in (tmp_path / "metrics.jsonl", next((tmp_path / "tensorboard").iterdir())):
        file.write_bytes(file.read_bytes()[:-7])
    again = MetricLog(tmp_path / "metrics.jsonl", "train", 9, tensorboard=True)
    again.truncate_after(checkpoint)
    for step in range(checkpoint + 1, 4):
        again.write({"step": step, "q": step * 2.0})
    again.close()
    want = [(step, step * (0.5 if step <= checkpoint else 2.0)) for step in (1, 2, 3)]
    assert [(row["step"], row["q"]) for row in read_rows(tmp_path / "metrics.jsonl")] == want
    assert [(int(r["step"]), float(r["q"])) for r in table(tmp_path / "metrics.csv")] == want
    assert events(tmp_path / "tensorboard")["q"] == want


def test_a_new_column_keeps_the_rows_before_it(tmp_path):
    log = MetricLog(tmp_path / "metrics.jsonl", "train", 9)
    log.write({"step": 1, "q": 1.0})
    log.write({"step": 2, "q": 2.0, "alpha": 0.1, "note": 'say "hi", then go'})
    log.write({"step": 3})
    first, second, third = table(tmp_path / "metrics.csv")
    assert list(first) == ["stage", "total", "step", "q", "alpha", "note"]
    assert (first["alpha"], second["alpha"], third["q"]) == ("", "0.1", "")
    assert second["note"] == 'say "hi", then go'


def test_event_files_cost_little_and_import_no_tensorflow(tmp_path):
    """A package called tensorflow lies in wait: torch.utils.tensorboard would import it."""
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('imported tensorflow')")
    code = """
import sys, time
from pathlib import Path
from control.log import MetricLog
log = MetricLog(Path("run/metrics.jsonl"), "train", 9, tensorboard=True)
log.truncate_after(0)
log.write({"step": 0})
start = time.perf_counter()
for step in range(100):
    log.write({"step": step, **{f"value/{i}": 0.5 for i in range(20)}})
log.close()
print((time.perf_counter() - start) / 100)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.02  # 0.12 ms; a row is written every few seconds
    assert len(events(tmp_path / "run" / "tensorboard")["value/3"]) == 100


def test_intervals_of_a_mean_return():
    """Mean 10, standard error 2, 4 episodes: t(3) = 3.182, so 10 -+ 6.365."""
    result = EvalResult(4, 2, 2, 10.0, 5.0, return_error=2.0)
    low, high = result.return_interval or (0.0, 0.0)
    assert (low, high) == pytest.approx((3.635, 16.365), abs=0.03)
    row = result.row()
    assert (row["eval/return_low"], row["eval/return_high"]) == (low, high)
    assert (row["eval/success_low"], row["eval/success_high"]) == wilson(2, 4)
    assert EvalResult(1, 0, 0, 10.0, 5.0).row()["eval/return_low"] is None
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 19: 2.093, 99: 1.984}  # any book of tables
    assert {n: student(n) for n in table} == pytest.approx(table, rel=0.003)


SHORT = ["env=gym/Pendulum-v1", "algo=sac", "algo.width=8", "algo.warmup_steps=32", "steps=400", "log_every=100",
         "eval_every=200", "eval_episodes=4", "final_episodes=3", "env_options.time_limit=20"]  # fmt: skip


def test_the_command_line_shows_evaluations_with_intervals(tmp_path, capsys):
    assert main([*SHORT, f"out={tmp_path / 'run'}"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"step 200 / 400  evaluation: return -\d+\S* \[-\d+\S*, -?\d+\S*\]\n", text)
    assert re.search(r"last evaluation: return -\d+\S* \[", text)
    assert "success" not in text  # this world has none
    assert str(tmp_path / "run") in text.replace("\n", "")
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "eval/success" in row]
    assert [row["step"] for row in rows] == [200, 400]
    low, high = wilson(0, 4)
    for row in rows:
        assert row["eval/return_low"] < row["eval/return"] < row["eval/return_high"]
        assert (row["eval/success_low"], row["eval/success_high"]) == (round(low, 6), round(high, 6))
    assert {"q", "alpha", "eval/return"} <= events(tmp_path / "run" / "tensorboard").keys()
    assert main([*SHORT, f"out={tmp_path / 'run'}"]) == 0
    assert "finished" in capsys.readouterr().out


def test_it_can_be_quiet(tmp_path, capsys):
    assert main([*SHORT, f"out={tmp_path / 'run'}", "progress=false", "tensorboard=false"]) == 0
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "run" / "tensorboard").exists()


class Run:
    step, last_eval = 0, 0


def display(terminal: bool, world: str = "tabletop/reach sac") -> tuple[Progress, Run, io.StringIO]:
    run, stream = Run(), io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=200, color_system=None, highlight=False)
    return Progress(world, 1000, 400, run, console, "tabletop" in world), run, stream


ROW = {"step": 500, "updates": 60, "return": -1.25, "success": 0.5, "excluded": 3}
EVALUATED = {"step": 400, "eval/success": 0.5, "eval/success_low": 0.3, "eval/success_high": 0.7, "eval/return": 1.0,
             "eval/return_low": 0.5, "eval/return_high": 1.5}  # fmt: skip


def test_a_terminal_shows_where_the_run_is_and_keeps_evaluations(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress, run, stream = display(terminal=True)
    progress.tick()
    run.step, run.last_eval = 500, 400
    progress.show(EVALUATED)
    progress.show(ROW)
    now[0] += 10.0
    progress.tick()
    shown = stream.getvalue()
    for part in ("tabletop/reach sac", "500 / 1,000", "50 steps/s", "0:10 left", "60 updates", "return -1.25",
                 "success 50 %", "3 rows excluded", "last evaluation: return 1 [0.5, 1.5]  success 50 % [30, 70]",
                 "evaluation within 300 steps"):  # fmt: skip
        assert part in shown, part
    before = len(shown)
    now[0] += 0.01
    progress.tick()
    assert len(stream.getvalue()) == before  # not four times a second
    progress.close()
    assert stream.getvalue().count("step 400 / 1,000  evaluation: return 1 [0.5, 1.5]  success 50 % [30, 70]") == 1


def test_a_log_file_gets_a_line_now_and_then(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress, run, stream = display(terminal=False)
    progress.tick()
    run.step = 500
    for _ in range(30):
        now[0] += 1.0
        progress.tick()
        progress.show(ROW)
    lines = stream.getvalue().splitlines()
    assert 2 <= len(lines) <= 4
    assert all(line.startswith("step 500 / 1,000  ") and "\r" not in line for line in lines)


def test_a_world_without_success_shows_none():
    progress, _, stream = display(terminal=False, world="gym/Pendulum-v1 sac")
    progress.show(EVALUATED | {"eval/success": 0.0})
    assert "success" not in stream.getvalue()
    progress.show(EVALUATED)  # it has one after all
    assert "success 50 %" in stream.getvalue()
    assert evaluation(EVALUATED | {"eval/return_low": None}, False) == "return 1"


def test_clock():
    assert [clock(s) for s in (9.9, 75, 3671)] == ["0:09", "1:15", "1:01:11"]
