"""docs/traps.md says which test looks for which kind of fault: every test that it names exists, every report is there."""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from pathlib import Path

from control.benchmark_report import learning_sections, read_runs

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "traps.md").read_text()
ROWS = [line for line in TABLE.splitlines() if line.startswith("| ") and not line.startswith("| kind")]
# numbers of the reports that were collected, by repository
REPORTS = {
    "DLR-RM/stable-baselines3": (284, 934, 1145, 675, 1572), "google-deepmind/mujoco_playground": (305, 267, 240, 86, 153, 112),
    "leggedrobotics/rsl_rl": (151, 20, 43, 33, 124), "vwxyzjn/cleanrl": (198, 448, 499, 534, 196),
    "Farama-Foundation/PettingZoo": (1126,), "Farama-Foundation/Gymnasium": (1103, 214, 526, 572), "openai/gym": (1541,),
    "younggyoseo/FastTD3": (6, 7, 10, 24), "isaac-sim/IsaacLab": (5080, 3836, 2636, 1362, 4369),
    "hill-a/stable-baselines": (573,), "mujocolab/mjlab": (291, 765, 399, 520, 224, 38, 631, 663),
    "meta-pytorch/LeanRL": (19,), "DAVIAN-Robotics/SimbaV2": (8,), "Denys88/rl_games": (356,), "Toni-SM/skrl": (208,),
    "google-deepmind/mujoco": (1607,), "Intelligent-Driving-Laboratory/GOPS": (34,),
}  # fmt: skip


def test_every_row_names_tests_that_exist():
    assert len(ROWS) >= 30
    for row in ROWS:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
        assert named, row
        for file, name in named:
            assert name in _tests_of(file), f"{file} has no {name}"


def test_every_report_is_in_a_row():
    known = {f"{repository}#{number}" for repository, numbers in REPORTS.items() for number in numbers}
    found = {match for row in ROWS for match in re.findall(r"[\w.-]+/[\w.-]+#\d+", row)}
    assert found == known


def test_every_trap_test_is_in_a_row():
    """A test of a kind that nobody can find by its kind is half lost."""
    general = {"test_every_learner_of_the_registry_is_covered", "test_every_family_is_looked_at",
               "test_networks_and_noise_draw_from_different_streams_of_the_seed",
               "test_a_dict_of_boxes_is_trained_on_and_exported", "test_a_limit_below_one_action_is_refused"}  # fmt: skip
    for file in (
        *(ROOT / "tests" / "control").glob("test_traps_*.py"),
        *(ROOT / "tests" / "sims").glob("test_traps_*.py"),
    ):
        if file.name != Path(__file__).name:
            for name in _tests_of(str(file.relative_to(ROOT))) - general:
                assert f"::{name}`" in TABLE, f"{file.name}: {name}"


def _tests_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


# -- versions of worlds in comparisons ------------------------------------------------------------------------------


def _record(root: Path, env: str, seed: int, value: float) -> None:
    record = {
        "env": env, "learner": "sac", "steps": 10, "seed": seed, "scale": 1.0, "width": 8, "precision": "float32",
        "final_return": value, "curve": [{"step": 10, "return": value}], "wall_s": 60.0, "machine": {},
    }  # fmt: skip
    file = root / "learning" / env.replace("/", "_") / f"sac_w8_seed{seed}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record))


def test_results_of_two_versions_of_a_world_never_share_a_table(tmp_path):
    for seed in range(2):
        _record(tmp_path, "gym/Hopper-v4", seed, 111.0)
        _record(tmp_path, "gym/Hopper-v5", seed, 555.0)
    assert {env for env, _ in read_runs(tmp_path)} == {"gym/Hopper-v4", "gym/Hopper-v5"}
    sections = {
        version: s for s in learning_sections(tmp_path) for version in ("v4", "v5") if f"### Hopper-{version}" in s
    }
    assert "111" in sections["v4"]
    assert "555" not in sections["v4"]
    assert "555" in sections["v5"]
    assert "111" not in sections["v5"]


def test_results_of_one_world_come_from_one_simulator():
    versions = defaultdict(set)
    for (env, _), seeds in read_runs(ROOT / "tests" / "benchmarks" / "results").items():
        for record in seeds.values():
            versions[env].add(tuple(record["machine"].get(name) for name in ("gymnasium", "mujoco", "brax")))
    assert all(len(found) == 1 for found in versions.values()), dict(versions)
