"""The chain as a graph: every stage is a command line that its verb accepts, and the README shows what was measured."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from distill import pipeline
from distill.pipeline import SPECIALISTS, PipelineConfig, gather_for_report, pool
from sims.errors import UserError
from sims.verbs import compose
from sims.worlds.variants import VARIANTS

ROOT = Path(__file__).resolve().parents[2]


def chain(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    shipped = tmp_path / "shipped"
    (shipped / "generalist").mkdir(parents=True)
    (shipped / "generalist" / "spec.json").write_text("{}")
    monkeypatch.setattr(pipeline, "SHIPPED", shipped)
    return pipeline.CHAINS[name](PipelineConfig(run=str(tmp_path / "run"), chain=name))


@pytest.mark.parametrize("name", pipeline.CHAINS)
def test_every_stage_is_a_command_that_its_verb_accepts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stage in chain(name, tmp_path, monkeypatch):
        verb = importlib.import_module(stage.argv[0]).VERB
        assert isinstance(compose(verb, list(stage.argv[1:])), verb.schema)


@pytest.mark.parametrize("name", pipeline.CHAINS)
def test_needs_name_earlier_stages(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    for stage in chain(name, tmp_path, monkeypatch):
        assert set(stage.needs) <= seen, stage.name
        assert stage.name not in seen
        seen.add(stage.name)
    assert "report" in seen


def test_every_job_has_one_specialist_and_one_learns_from_its_sentence() -> None:
    served = [job for _, jobs, _ in SPECIALISTS.values() for job in jobs]
    assert sorted(served) == sorted(VARIANTS)
    spoken = [name for name, (options, _, _) in SPECIALISTS.items() if "reward=clip" in options]
    assert spoken == ["press_yellow"]
    options = SPECIALISTS["press_yellow"][0]
    assert not any(o.startswith(("demos=", "stop_success=")) for o in options), "both are chosen by the true success"


def test_pool_weighs_cycle_times_by_successes() -> None:
    cells = [
        {"successes": 3, "episodes": 4, "cycle_steps": 10.0},
        {"successes": 1, "episodes": 4, "cycle_steps": 30.0},
        {"successes": 0, "episodes": 4, "cycle_steps": None},
    ]
    # (3 * 10 + 1 * 30) / 4 = 15
    assert pool(cells) == {"successes": 4, "episodes": 12, "cycle_steps": 15.0}


def test_baselines_are_gathered_per_specialist(tmp_path: Path) -> None:
    def cell(variant: str, won: int) -> dict[str, Any]:
        return {"axis": "seen", "variant": variant, "successes": won, "episodes": 10, "cycle_steps": 20.0}

    folder = tmp_path / "baselines"
    folder.mkdir()
    cells = [cell("lift_red", 8), cell("lift_blue", 6), {**cell("lift_blue", 0), "axis": "unseen_start"}]
    (folder / "demonstrator.json").write_text(json.dumps({"cells": cells}))
    gather_for_report(tmp_path)
    rows = json.loads((tmp_path / "baselines.json").read_text())
    assert rows == {"lift": {"demonstrator": {"successes": 14, "episodes": 20, "cycle_steps": 20.0}}}


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(UserError, match="workers=0"):
        PipelineConfig(workers=0)
    with pytest.raises(UserError, match="realtime=-1"):
        PipelineConfig(realtime=-1)


def benchmark() -> Any:
    path = ROOT / "tests" / "benchmarks" / "quickstart.py"
    spec = importlib.util.spec_from_file_location("quickstart_benchmark", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_shows_exactly_the_measured_table() -> None:
    module = benchmark()
    runs = json.loads(module.RESULTS.read_text())
    assert len({run["seed"] for run in runs}) >= 3
    text = (ROOT / "README.md").read_text()
    assert text.split(module.BEGIN)[1].split(module.END)[0].strip() == module.table(runs).strip()


def test_wilson_of_a_known_case() -> None:
    # 8 of 10: centre (0.8 + 0.19207) / 1.38415 = 0.71674, half width 0.22670
    low, high = benchmark().wilson(8, 10)
    assert low == pytest.approx(0.4902, abs=2e-4)
    assert high == pytest.approx(0.9433, abs=2e-4)
