"""The commands and the code of the documentation work as they are printed."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from distill.cli import VERBS
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


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_every_piece_of_python_runs(page, code, tmp_path):
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        assert target.startswith("http") or (ROOT / page).parent.joinpath(target).exists(), target
