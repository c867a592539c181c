"""The run's numbers: three files that agree, also after a resume; what a person sees."""

from __future__ import annotations

import csv
import io

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from control.evaluate import wilson
from control.log import MetricLog, read_rows
from control.progress import Progress, describe
from control.train import main


def events(folder) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def table(path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open()))


def test_three_files_hold_the_same_numbers_also_after_a_resume(tmp_path):
    log = MetricLog(tmp_path / "metrics.jsonl", "train", 9, tensorboard=True)
    log.truncate_after(0)
    for step in (1, 2, 3):
        log.write({"step": step, "q": step * 0.5})
    log.write({"step": 3, "eval/return": float("nan"), "note": "a, b"})
    log.close()
    again = MetricLog(tmp_path / "metrics.jsonl", "train", 9, tensorboard=True)
    again.truncate_after(2)  # the checkpoint was written at 2
    again.write({"step": 3, "q": 7.0})
    again.close()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["q"]) for row in rows] == [(1, 0.5), (2, 1.0), (3, 7.0)]
    assert [(r["step"], r["q"]) for r in table(tmp_path / "metrics.csv")] == [("1", "0.5"), ("2", "1.0"), ("3", "7.0")]
    assert events(tmp_path / "tensorboard")["q"] == [(1, 0.5), (2, 1.0), (3, 7.0)]


def test_a_new_column_keeps_the_rows_before_it(tmp_path):
    log = MetricLog(tmp_path / "metrics.jsonl", "train", 9)
    log.write({"step": 1, "q": 1.0})
    log.write({"step": 2, "q": 2.0, "alpha": 0.1, "note": 'say "hi", then go'})
    log.write({"step": 3})
    first, second, third = table(tmp_path / "metrics.csv")
    assert (first["alpha"], second["alpha"], third["q"]) == ("", "0.1", "")
    assert second["note"] == 'say "hi", then go'


def test_the_command_line_shows_progress_and_intervals(tmp_path, capsys):
    args = ["env=gym/Pendulum-v1", "algo=sac", "algo.width=8", "algo.warmup_steps=32", "steps=400", "log_every=100",
            "eval_every=200", "eval_episodes=4", "final_episodes=2", "+env_options.time_limit=20"]  # fmt: skip
    assert main([*args, f"out={tmp_path / 'run'}"]) == 0
    text = capsys.readouterr().out
    assert "step 200 / 400" in text
    assert "steps/s" in text
    assert "evaluation: return" in text
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "eval/success" in row]
    assert rows
    for row in rows:
        assert row["eval/return_error"] > 0
        low, high = wilson(0, 4)
        assert (row["eval/success_low"], row["eval/success_high"]) == (round(low, 6), round(high, 6))
    assert {"q", "alpha", "eval/return"} <= events(tmp_path / "run" / "tensorboard").keys()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_keeps_evaluations_and_replaces_rows():
    stream = Terminal()
    progress = Progress(100, stream)
    progress.show({"step": 10, "steps_per_s": 5.0, "return": -1.0})
    progress.show({"step": 20, "steps_per_s": 5.0})
    progress.show(
        {"step": 20, "eval/success": 0.5, "eval/return": 1.0, "eval/success_low": 0.3, "eval/success_high": 0.7}
    )
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().rstrip().endswith("success 50 % [30, 70]")
    assert describe({"step": 10, "steps_per_s": 5.0}, 100) == "step 10 / 100  5 steps/s  0:18 left"
