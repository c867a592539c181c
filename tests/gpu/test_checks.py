"""The script for a CUDA machine, run where there is none; and what it must find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

os.environ["DEVICE"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parent))
import checks  # it reads DEVICE now and never again
from host_reads import HostRead, no_host_reads

del os.environ["DEVICE"]


def test_the_script_passes_on_a_cpu(tmp_path):
    """All but Brax, which compiles for half a minute and has tests of its own."""
    start = time.monotonic()
    command = [str(Path(checks.__file__).with_name("run.sh")), str(tmp_path), "brax"]
    env = {**os.environ, "PYTHON": sys.executable, "DEVICE": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["failed"] == []
    assert summary["checks"] == len(checks.CHECKS) - 1
    assert "CPU twin only" in summary["device"]
    saved = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["check"] for row in saved["rows"]] == [name for name in checks.CHECKS if name != "brax"]
    assert time.monotonic() - start < 120  # 15 s on an idle core


def test_a_failed_check_is_named_and_fails_the_script(monkeypatch, capsys):
    wrong = {"differs": lambda: checks.near(1e-3, 1e-5), "holds": lambda: checks.near(1e-6, 1e-5)}
    monkeypatch.setattr(checks, "CHECKS", wrong)
    assert checks.main("") == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["ok"] for row in rows[:2]] == [False, True]
    assert rows[-1]["failed"] == ["differs"]


def test_a_wrong_gradient_is_found(monkeypatch):
    """What the comparison with autograd is there for."""
    from control import sac

    monkeypatch.setattr(sac._Passes, "actor_gradient", lambda self, obs, n: self.learner.actor_gradient(obs * 1.01, n))
    assert not checks.run_check("fused equals autograd, sac")["ok"]
    monkeypatch.undo()
    assert checks.run_check("fused equals autograd, sac")["ok"]


X, MASK = torch.arange(4.0), torch.tensor([True, False, True, False])


@pytest.mark.parametrize(
    "read",
    [lambda: X[0].item(), lambda: float(X[0]), lambda: bool(MASK.any()), lambda: X.tolist(), lambda: X.cpu(),
     lambda: X.numpy(), lambda: X[MASK], lambda: MASK.nonzero(), lambda: X.clone().__setitem__(MASK, torch.ones(2)),
     lambda: torch.masked_select(X, MASK), lambda: torch.equal(X, X)],
    ids=["item", "float", "bool", "tolist", "cpu", "numpy", "mask", "nonzero", "set mask", "masked_select", "equal"],
)  # fmt: skip
def test_every_way_to_read_the_device_is_found(read):
    read()
    with pytest.raises(HostRead, match=r"test_checks\.py:\d+"), no_host_reads("cpu"):
        read()
    read()  # and nothing is left behind


def test_work_on_the_device_is_no_read():
    with no_host_reads("cpu"):
        y = torch.where(MASK, X, 0.0).clamp(max=2).sum().view(1)
        X.index_select(0, torch.arange(2)).add_(y)
        X.clone()[MASK] = 0.0


def test_a_loop_that_reads_is_found(monkeypatch):
    true = checks.Drift.step

    def step(self, action):
        if action.sum() > 1e9:
            raise AssertionError
        return true(self, action)

    monkeypatch.setattr(checks.Drift, "step", step)
    row = checks.run_check("reads nothing back, sac")
    assert not row["ok"]
    assert "HostRead" in row["error"]
