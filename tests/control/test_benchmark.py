"""The benchmark: verdicts by hand, tiny runs of every suite, and a page that equals the files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from control import benchmark_learning as learning
from control import benchmark_report as report
from control import benchmark_speed as speed
from control.benchmark import BenchmarkConfig, benchmark, write_page
from control.benchmark_learning import Run, run_suite, train_one
from control.benchmark_machine import alternate, pinned, timed
from control.benchmark_statistics import bootstrap, difference, iqm, spread, verdict
from sims.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "benchmarks" / "results"


def quiet(text: str) -> None:
    pass


# ---- arithmetic


def test_iqm_leaves_out_the_outer_quarters() -> None:
    assert iqm([100, 1, 2, 3, -50]) == 2  # -50 and 100 go, (1 + 2 + 3) / 3
    assert iqm([1, 2, 6]) == 3  # a quarter of three points is none


def test_bootstrap_of_two_points_by_hand() -> None:
    """Two draws of {0, 1}: means 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4, so 2.5 % lies at 0 and 97.5 % at 1."""
    assert bootstrap([0.0, 1.0]) == (0.0, 1.0)
    assert bootstrap([3.0, 3.0, 3.0]) == (3.0, 3.0)


def test_bootstrap_covers_the_mean_as_often_as_it_says() -> None:
    """For 20 normal points the percentile interval covers the true mean in about 93 % of samples."""
    rng = np.random.default_rng(1)
    covered = [low <= 5 <= high for low, high in (bootstrap(rng.normal(5, 2, 20).tolist()) for _ in range(200))]
    assert 0.87 < np.mean(covered) < 0.98


def test_pairing_removes_what_the_seeds_have_in_common() -> None:
    reference = [10.0, 200.0, 3000.0]  # mean 1070
    own = [x + 107 for x in reference]
    assert report._paired(report._relative(own, reference)) == "+10.0% [+10.0%, +10.0%], *not inferior*"
    low, high = difference(own, reference)
    assert low < -900 < 900 < high


def test_spread_is_one_minus_lowest_over_highest() -> None:
    assert spread([[8.0, 10.0], [10.0], [6.0]]) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("interval", "word"),
    [
        ((-1.4, 9.0), "not inferior"),
        ((-1.6, 9.0), "undecided"),
        ((-9.0, -1.6), "inferior"),
        ((-9.0, -1.4), "undecided"),
    ],
)
def test_verdict(interval: tuple[float, float], word: str) -> None:
    assert verdict(interval, 1.5) == word


def test_ratio_is_taken_block_by_block() -> None:
    """The second block was slow for both: 20/10, 60/30, 30/10 -> median 2."""
    middle, (low, high) = report.ratio({"own": [10, 30, 10], "theirs": [20, 60, 30]}, "own", "theirs")
    assert (middle, low, high) == (2, 2, 3)


# ---- how speed is measured


def test_contestants_take_turns_and_the_first_block_does_not_count() -> None:
    order: list[str] = []

    def contestant(name: str, ms: float) -> Any:
        return lambda: (order.append(name), ms)[1]

    result = alternate({"a": contestant("a", 1.0), "b": contestant("b", 2.0)}, 3, quiet)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert result["blocks_ms"] == {"a": [1.0] * 3, "b": [2.0] * 3}


def test_timed_counts_units() -> None:
    clock = iter([10.0, 13.0]).__next__
    calls: list[int] = []
    assert timed(lambda: calls.append(1), calls=2, units=5, clock=clock)() == pytest.approx(300)  # 3 s / 10, in ms
    assert len(calls) == 2


def test_pinned_is_undone() -> None:
    import os

    before = (os.sched_getaffinity(0), torch.get_num_threads())
    with pinned():
        assert len(os.sched_getaffinity(0)) == torch.get_num_threads() == 1
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before


def test_floor_counts_the_products_of_an_update() -> None:
    """FLOPs by hand, N = 256, H = 32, F = 17 + 6, A = 6, outer products left out."""
    from torch.utils.flop_counter import FlopCounterMode

    n, h, f, a, o = 256, 32, 23, 6, 17
    critic = 2 * (f * h + h * h)  # of both, but for their last layer of one column (counted as mv, which is no matmul)
    actor = o * h + h * h + h * 2 * a
    back = 2 * (2 * h * h + f * h)
    through = 2 * (h * h + h * a)
    actor_back = 2 * (h * 2 * a) + 2 * h * h + o * h
    work = speed.floor(h)
    with FlopCounterMode(display=False) as counter:
        work()
    assert counter.get_total_flops() == 2 * n * (2 * actor + 3 * critic + back + through + actor_back)


# ---- learning runs

TINY = {"steps": 160, "width": 8}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("EPISODES", 2), ("FINAL_EPISODES", 2), ("POINTS", 2)):
        monkeypatch.setattr(learning, name, value)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("learner", ["sb3_sac", "sac", "dsact"])
def test_a_run_has_its_curve_its_budget_and_true_returns(learner: str, tmp_path: Path) -> None:
    run = Run(learning.PENDULUM, learner, **TINY, seed=3, scale=1 if learner == "sb3_sac" else 10.0)
    record = train_one(run, run.file(tmp_path))
    assert json.loads(run.file(tmp_path).read_text()) == record
    assert [row["step"] for row in record["curve"]] == [80, 160]
    assert record["updates"] == 60  # 160 steps, of which 100 warm up
    assert 0 < record["final_return"] < 1000  # a scaled evaluation would show ten times a random policy's 60
    assert record["machine"]["threads"] == 1


@pytest.mark.usefixtures("short")
def test_scale_reaches_the_learner_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[float, torch.Tensor] = {}

    def note(step: int, act: Any) -> None:
        pass

    for scale in (1.0, 10.0):
        loops: list[Any] = []
        original = learning.iterate
        monkeypatch.setattr(learning, "iterate", lambda loop, to=loops, do=original: (to.append(loop), do(loop)))
        learning._learn_ours(Run(learning.PENDULUM, "sac", 40, 0, scale, 8), note)
        monkeypatch.setattr(learning, "iterate", original)
        index = torch.arange(40)  # one environment: every transition once
        seen[scale] = loops[0].replay.gather(index, 0.99, 1).reward
    torch.testing.assert_close(seen[10.0], 10 * seen[1.0])


def test_learners_have_one_budget() -> None:
    sac, dsact = (learning.algo_of(Run(learning.PENDULUM, name, 1, 0, width=64)) for name in ("sac", "dsact"))
    shared = {k for k in vars(sac) if k != "name"} & {k for k in vars(dsact) if k != "name"}
    assert {k: getattr(sac, k) for k in shared} == {k: getattr(dsact, k) for k in shared}


@pytest.mark.usefixtures("short")
def test_an_interrupted_suite_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [Run(learning.PENDULUM, "sac", **TINY, seed=seed) for seed in range(3)]
    trained: list[int] = []
    original = learning.train_one

    def interrupted(run: Run, file: Path) -> dict[str, Any]:
        if run.seed == 1 and len(trained) == 1:
            file.parent.mkdir(parents=True, exist_ok=True)
            (file.parent / (file.name + ".tmp")).write_text("{")  # killed while it wrote
            raise KeyboardInterrupt
        trained.append(run.seed)
        return original(run, file)

    monkeypatch.setattr(learning, "train_one", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_suite(runs, tmp_path, say=quiet)
    first = runs[0].file(tmp_path).read_bytes()
    monkeypatch.setattr(learning, "train_one", lambda run, file: (trained.append(run.seed), original(run, file))[1])
    run_suite(runs, tmp_path, say=quiet)
    assert trained == [0, 1, 2]
    assert runs[0].file(tmp_path).read_bytes() == first


@pytest.mark.slow
def test_runs_side_by_side_equal_those_in_turn(tmp_path: Path) -> None:
    runs = [Run(learning.PENDULUM, "dsact", 120, seed, width=8) for seed in range(2)]
    for jobs in (1, 2):
        run_suite(runs, tmp_path / str(jobs), jobs, quiet)
    for run in runs:
        one, two = (json.loads(run.file(tmp_path / jobs).read_text()) for jobs in "12")
        assert {k: v for k, v in one.items() if k != "wall_s"} == {k: v for k, v in two.items() if k != "wall_s"}


@pytest.mark.slow
def test_processes_suite(tmp_path: Path) -> None:
    benchmark(BenchmarkConfig(suite="processes", width=8, blocks=1, repeats=2, out=str(tmp_path)))
    blocks = json.loads((tmp_path / "speed" / "processes_w8.json").read_text())["blocks_ms"]
    assert all(len(times) == 1 and times[0] > 0 for times in blocks.values())


def test_a_run_of_another_budget_is_not_taken_for_this_one(tmp_path: Path) -> None:
    run = Run(learning.PENDULUM, "sac", 100, 0)
    run.file(tmp_path).parent.mkdir()
    run.file(tmp_path).write_text(json.dumps(vars(run) | {"steps": 50}))
    with pytest.raises(UserError, match=r"steps=50, this suite asks for 100"):
        run_suite([run], tmp_path, say=quiet)


@pytest.mark.usefixtures("short")
def test_our_own_worlds_run_with_their_own_settings(tmp_path: Path) -> None:
    run = Run("tabletop/reach", "sac", 16 * 8 * 2, 0, precision="bfloat16")
    record = train_one(run, run.file(tmp_path))
    assert record["settings"]["precision"] == "bfloat16"
    assert record["settings"]["gamma"] == 0.95
    assert "final_success" in record
    assert learning.train_config(Run("brax/inverted_pendulum", "ppo", 1, 0)).algo.rollout_steps == 32


def test_suites_say_what_they_compare() -> None:
    gym, precision = list(learning.gym_suite()), list(learning.precision_suite())
    assert len({run.file(Path()) for run in gym}) == len(gym)
    seeds = {env: {run.seed for run in gym if run.env == env} for env in (learning.PENDULUM, learning.HOPPER)}
    assert seeds == {learning.PENDULUM: set(range(5)), learning.HOPPER: set(range(3))}
    for learner in ("sac", "dsact"):
        assert {run.scale for run in gym if run.learner == learner and run.env == learning.PENDULUM} == {0.1, 1, 10}
    for run in precision:  # every bfloat16 run has its float32 twin
        if run.precision == "bfloat16":
            assert any(vars(other) == vars(run) | {"precision": "float32"} for other in precision)
    assert len({run.env for run in precision}) == 2
    assert len({run.seed for run in precision}) == 5


# ---- the verb


def test_update_suite_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from control.benchmark import main

    monkeypatch.setitem(sys.modules, "sbx", None)  # as where it is not installed
    assert main(["suite=update", "width=8", "blocks=2", "repeats=2", f"out={tmp_path}"]) == 0
    blocks = json.loads((tmp_path / "speed" / "update_w8.json").read_text())["blocks_ms"]
    assert {"SB3 SAC", "SAC", "SAC, autograd", "SAC, bfloat16", "DSAC-T", "matrix products alone"} <= blocks.keys()
    assert all(len(times) == 2 and min(times) > 0 for times in blocks.values())
    assert "SBX SAC | not installed: pip install sbx-rl" in capsys.readouterr().out


@pytest.mark.slow
def test_sbx_trains_in_its_block() -> None:
    pytest.importorskip("sbx")
    contestants = speed._sbx_updates(8, 2, quiet)
    assert len(contestants) == 2
    assert all(block() > 0 for block in contestants.values())


def test_loop_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sbx", None)
    benchmark(BenchmarkConfig(suite="loop", width=8, blocks=1, repeats=1, out=str(tmp_path)))
    blocks = json.loads((tmp_path / "speed" / "loop_w8.json").read_text())["blocks_ms"]
    assert blocks.keys() == {"SB3 SAC", "SAC", "DSAC-T"}


def test_ppo_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    from control import benchmark_ppo

    original = benchmark_ppo.ppo_speed
    monkeypatch.setattr(benchmark_ppo, "ppo_speed", lambda blocks, envs, steps, say: original(blocks, 4, 64, say))
    benchmark(BenchmarkConfig(suite="ppo", blocks=1, out=str(tmp_path)))
    update, whole = (json.loads((tmp_path / "speed" / f"ppo_{part}.json").read_text()) for part in ("update", "whole"))
    assert update["blocks_ms"].keys() == {"SB3 PPO", "PPO", "PPO, autograd"}
    assert len(whole["blocks_ms"]) == 3
    assert "Whole iteration of PPO" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"suite": "gmy"}, "Did you mean 'gym'"),
        ({"blocks": 0}, "blocks=0"),
        ({"suite": "gym", "steps": 5}, "Give another out="),
    ],
)
def test_mistakes(options: dict[str, Any], part: str) -> None:
    with pytest.raises(UserError, match=part):
        BenchmarkConfig(**options)


def test_nothing_to_report_and_no_such_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no results below"):
        benchmark(BenchmarkConfig(report=True, out=str(tmp_path)))
    with pytest.raises(UserError, match="unknown run 'hoper'"):
        benchmark(BenchmarkConfig(suite="gym", only="hoper", out=str(tmp_path)))


# ---- the page


def example(root: Path) -> None:
    """SAC 100, Stable-Baselines3 90, DSAC-T half of it; bfloat16 loses 1 %; one speed file."""
    for learner, middle in (("sac", 100), ("sb3_sac", 90), ("dsact", 50)):
        for scale in (1,) if learner == "sb3_sac" else (0.1, 1, 10):
            for precision in ("float32", "bfloat16") if learner == "sac" and scale == 1 else ("float32",):
                for seed in range(3):
                    value = (middle + seed) * (0.99 if precision == "bfloat16" else 1)
                    value *= 0.5 if learner == "sac" and scale == 10 else 1
                    run = Run(learning.PENDULUM, learner, 20, seed, float(scale), 8, precision)
                    file = run.file(root / "learning")
                    file.parent.mkdir(parents=True, exist_ok=True)
                    curve = [{"step": 10, "return": value / 2}, {"step": 20, "return": value}]
                    figures = {"curve": curve, "wall_s": 60.0, "final_return": value, "machine": {}}
                    file.write_text(json.dumps(vars(run) | figures))
    (root / "speed").mkdir()
    blocks = {"SB3 SAC": [20.0] * 3, "SAC": [10.0] * 3, "SAC, bfloat16": [9.0] * 3, "matrix products alone": [7.0] * 3}
    result = {"blocks_ms": blocks, "machine": {"cpu": "test", "threads": 1}}
    (root / "speed" / "update_w256.json").write_text(json.dumps(result))


def test_page_says_what_the_files_say(tmp_path: Path) -> None:
    example(tmp_path)
    write_page(BenchmarkConfig(out=str(tmp_path)), tmp_path)
    text = (tmp_path / "benchmarks.md").read_text()
    assert "SAC beside SB3 SAC | 2.00 [2.00, 2.00] | 1.7 | met" in text
    assert "SAC beside matrix products alone | 0.70 [0.70, 0.70] | 0.75 | missed" in text
    assert "not installed: pip install sbx-rl" in text
    assert "SAC beside SB3 SAC: final return +11%" in text
    assert "DSAC-T beside SAC: final return -50% [-51%, -48%], *inferior*" in text
    assert "DSAC-T at reward scales 0.1, 1 and 10: the lowest mean lies 0%" in text
    assert (
        "SAC at reward scales 0.1, 1 and 10: the lowest mean lies 50% [50%, 51%] below the highest, not within" in text
    )
    assert "-1.0% [-1.0%, -1.0%], *not inferior*" in text
    assert "| SAC, reward x 10, width 8 | 50 / 50 / 51 |" in text
    plot = (tmp_path / "benchmarks_gym.svg").read_text()
    assert plot.count("<circle") == 3 * 6 + 3  # every seed of every learner and scale


def test_plot_is_well_formed(tmp_path: Path) -> None:
    from xml.etree import ElementTree

    example(tmp_path)
    write_page(BenchmarkConfig(out=str(tmp_path)), tmp_path)
    ElementTree.parse(tmp_path / "benchmarks_gym.svg")


def test_docs_equal_the_files() -> None:
    assert (ROOT / "docs" / "benchmarks.md").read_text() == report.page(RESULTS), (
        "run: distillery benchmark suite=gym report=true"
    )
