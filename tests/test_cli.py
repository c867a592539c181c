"""Every verb from the command line: help, composition, and one clear message for a user's mistake."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from distill.cli import VERBS, main, usage
from sims.verbs import Verb, _fields, compose, config_dir

ROOT = Path(__file__).resolve().parent.parent
PLAIN = ("list", "doctor", "dataset", "sweep")  # verbs without a hydra config
HYDRA = [v for v in VERBS if v not in PLAIN]


def verb(name: str) -> Verb:
    return importlib.import_module(VERBS[name][0]).VERB


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "distill.cli", *args], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def mistake(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Runs a command line that must fail like a user's mistake; returns the message."""
    assert main(list(args)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err + captured.out
    return captured.err


def test_usage_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.strip() == usage().strip()
    assert all(name in usage() for name in VERBS)


def test_installed_console_script_and_module_agree() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("robot-distillery 0.")


@pytest.mark.parametrize("name", VERBS)
def test_help_fits_the_terminal_and_names_every_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"distillery {name}" in text
    assert max(len(line) for line in text.splitlines()) <= 100
    if name in HYDRA:
        v = verb(name)
        for option, _, _, meaning in _fields(v.schema):
            assert option in text
            assert meaning or option in v.groups, f"option {option} of {name} has no explanation"
        flat = " ".join(text.replace("\\\n", " ").split())
        assert all(" ".join(example.split()) in flat for example in v.examples)
        assert v.examples


@pytest.mark.parametrize("name", HYDRA)
def test_examples_compose(name: str) -> None:
    """An example of the help that does not even compose is worse than none."""
    import shlex

    for example in verb(name).examples:
        words = shlex.split(example, comments=True)
        if words[0] == "distillery":  # it may show the verb that comes next
            compose(verb(words[1]), words[2:])
        else:
            assert words[:3] == ["python", "-m", VERBS[name][0]]
            compose(verb(name), words[3:])


@pytest.mark.parametrize("name", HYDRA)
def test_every_option_of_every_group_composes(name: str) -> None:
    v = verb(name)
    required = {"evaluate": ["policy=scripted"], "film": ["specialists.all=scripted"], "distill": ["rounds=0"]}
    for group in v.groups:
        for file in (config_dir() / group).glob("*.yaml"):
            config = compose(v, [f"{group}={file.stem}", *required.get(name, [])])
            assert isinstance(getattr(config, group), tuple(v.groups[group].values())), file.name


@pytest.mark.parametrize("prefix", ["", "+"])
def test_mistyped_option_names_the_closest(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """hydra's own advice for ``algo.lrr=1`` is ``+algo.lrr=1``, which would train with the default learning rate."""
    assert "'algo.lr'" in mistake(capsys, "train", f"{prefix}algo.lrr=1")


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("trian",), ("unknown verb 'trian'", "train")),
        (("train", "algo=sacc"), ("unknown algo 'sacc'", "'sac'", "dsact")),
        (("train", "env=tabletop/lft", "out={tmp}/x"), ("tabletop/lft", "tabletop/lift")),
        (("train", "seed=abc"), ("seed", "abc")),
        (("train", "steps"), ("option=value",)),
        (("train", "algo.tau=2"), ("algo.tau", "2")),
        (("deploy", "policy={tmp}/none", "sentence=reach the marker"), ("none",)),
        (("deploy", "robot=so1000"), ("unknown robot 'so1000'", "so101")),
        (("deploy", "policy={tmp}"), ("nothing to do",)),
        (("evaluate", "policy={tmp}/none", "out={tmp}/e.json"), ("none",)),
        (("evaluate", "policy=scripted", "axes=[sen]"), ("unknown axis 'sen'", "'seen'")),
        (("distill", "dataset={tmp}/none", "rounds=0", "out={tmp}/g"), ("none",)),
        (("collect", "out={tmp}/d"), ("specialist",)),
        (("collect", "specialists.reach={tmp}/none", "out={tmp}/d"), ("none",)),
        (("report", "run={tmp}/none"), ("none", "no such directory")),
        (("pipeline", "chain=quikstart"), ("unknown chain 'quikstart'", "'quickstart'")),
        (("list", "robts"), ("unknown kind 'robts'", "robot")),
    ],
    ids=lambda v: " ".join(v)[:60],
)
def test_mistakes(
    args: tuple[str, ...], parts: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = mistake(capsys, *(a.format(tmp=tmp_path) for a in args))
    for part in parts:
        assert part in message
    assert [p.name for p in tmp_path.iterdir()] in ([], ["x"])


def test_list_shows_worlds_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("tabletop/lift", "dsact", "clip", "so101_virtual", "brax/ant"))


def test_doctor_passes_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0, capsys.readouterr().out


def test_a_reader_that_leaves_early_is_no_error() -> None:
    """``distillery train --help | head -1``."""
    command = f"{sys.executable} -m distill.cli train --help | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == ""
