"""Import directions of docs/architecture.md, enforced on the syntax tree of every file."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("control", "sims", "vlm_rewards", "distill", "real_robot")
# modules that anyone may import, that import no sibling package, and that never import torch at import time
LEAVES = ("sims.types", "sims.errors", "sims.verbs", "sims.worlds", "control.policy", "distill.dataset", "distill.text")
# the composition roots may import everything
ROOTS = ("distill.cli", "distill.pipeline", "distill.inventory", "distill.doctor")
# package -> packages it may import beside itself and the leaves
MAY_IMPORT = {
    "sims": (),
    "vlm_rewards": ("sims",),
    "control": ("sims", "vlm_rewards"),
    "distill": ("control", "sims", "vlm_rewards"),
    "real_robot": (),
}
# external library -> prefixes of the modules that are its one home
HOMES = {
    "jax": ("sims.brax_env",),
    "sbx": ("control.benchmark",),
    "brax": ("sims.brax_env",),
    "warp": ("sims.engines.warp",),
    "mujoco_warp": ("sims.engines.warp",),
    "open_clip": ("vlm_rewards.clip",),
    "stable_baselines3": ("control.sb3", "control.benchmark"),
    "hydra": ("sims.verbs",),
    "omegaconf": ("sims.verbs",),
    "serial": ("real_robot.drivers.feetech", "distill.doctor"),
    "onnxruntime": ("control.policy",),
    "pyarrow": ("distill.dataset",),
    "av": ("distill.report_video",),
}
TORCH_FREE = ("real_robot", *LEAVES)


def modules() -> list[tuple[str, Path]]:
    files = [p for package in OURS for p in sorted((ROOT / package).rglob("*.py"))]
    return [(".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), p) for p in files]


def imports(path: Path, module: str) -> list[tuple[int, str, bool]]:
    """(line, imported module, runs at import time) of every import that is not only for type checkers."""
    found: list[tuple[int, str, bool]] = []

    def walk(node: ast.AST, top: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend((node.lineno, alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.extend((node.lineno, f"{node.module}.{alias.name}", top) for alias in node.names)
        inner = top and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            walk(child, inner)

    walk(ast.parse(path.read_text()), True)
    return found


def below(name: str, prefixes: tuple[str, ...]) -> bool:
    """``distill.dataset_writer`` counts as part of the leaf ``distill.dataset``."""
    return any(name == p or name.startswith((p + ".", p + "_")) for p in prefixes)


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda v: v if isinstance(v, str) else "")
def test_import_directions(module: str, path: Path) -> None:
    package, faults = module.split(".")[0], []
    for line, name, top in imports(path, module):
        head = name.split(".")[0]
        at = f"{path.relative_to(ROOT)}:{line} imports {name}"
        if head in OURS and head != package and not below(module, ROOTS):
            leaf = below(name, LEAVES)
            if below(module, LEAVES) and not leaf:
                faults.append(f"{at}: a leaf imports no sibling")
            elif (
                not leaf
                and head not in MAY_IMPORT[package]
                and not (package == "control" and below(name, ("vlm_rewards",)))
            ):
                faults.append(f"{at}: {package} may not import {head}")
        if head in HOMES and not below(module, HOMES[head]):
            faults.append(f"{at}: {head} has its one home in {HOMES[head]}")
        if head == "torch" and top and (below(module, TORCH_FREE) or module.endswith(".config")):
            faults.append(f"{at}: this module must not import torch at import time")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "name", ["real_robot.deploy", "control.policy", "distill.text", "distill.dataset", "sims.worlds.tabletop"]
)
def test_torch_stays_out(name: str) -> None:
    """The robot computer has no torch: importing these must not bring it in through any path."""
    code = f"import {name}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_control_is_ours() -> None:
    """python-control has the same import name."""
    import control

    assert Path(control.__file__ or "").resolve().parent == ROOT / "control"
