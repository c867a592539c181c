"""The commands and the code of the documentation work as they are printed."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from distill.cli import VERBS, main
from sims.verbs import compose

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("docs/training.md", "docs/stable_baselines3.md")


def blocks(language: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        found += [(page, body) for body in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]
    return found


COMMANDS = [(page, line) for page, body in blocks("sh") for line in body.splitlines() if line.strip()]


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_every_command_composes(page, command):
    words = shlex.split(command)
    assert words[0] == "distillery"
    assert words[1] in VERBS
    if words[1] == "sweep":  # ranges are the sweeper's business; what is left is a training
        words = ["distillery", "train", *(w for w in words[2:] if "interval" not in w and not w.startswith("hydra."))]
    compose(importlib.import_module(VERBS[words[1]][0]).VERB, words[2:])


# a training of a moment, whatever the command says of its size
BRIEF = {"steps": "96", "num_envs": "2", "eval_every": "0", "final_episodes": "1", "algo.width": "8", "device": "cpu"}
OFF_POLICY = {"algo.batch_size": "16", "algo.warmup_steps": "32", "utd": "0.1"}
ON_POLICY = {"algo.rollout_steps": "16", "algo.minibatch_size": "16"}
TRAININGS = [
    c for _, c in COMMANDS if c.startswith("distillery train") and "env=brax" not in c
]  # that compiles for long


@pytest.mark.parametrize("command", TRAININGS)
def test_every_training_runs(command, tmp_path):
    given = dict(word.split("=", 1) for word in shlex.split(command)[2:])
    on_policy = "ppo" in given.get("algo", "") + given.get("experiment", "")
    own = ON_POLICY if on_policy else OFF_POLICY
    demos = {"demos": "1"} if given.get("env", "").endswith(("/lift", "/move")) else {}
    args = {**given, **BRIEF, **own, **demos, "out": str(tmp_path / "run"), "progress": "false"}
    assert main(["train", *(f"{k}={v}" for k, v in args.items())]) == 0
    assert (tmp_path / "run" / "policy" / "spec.json").exists()


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_every_piece_of_python_runs(page, code, tmp_path):
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        assert target.startswith("http") or (ROOT / page).parent.joinpath(target).exists(), target
