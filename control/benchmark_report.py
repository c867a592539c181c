"""The page of all figures, made from the result files alone: tables, intervals, verdicts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from control.benchmark_statistics import (
    MARGIN,
    bootstrap,
    difference,
    iqm,
    spread,
    spread_interval,
    verdict,
)

Row = Mapping[str, Any]
Runs = dict[tuple[str, str], dict[int, Row]]  # (env, group) -> seed -> record

# file, own, reference, how many times as fast as the reference it should be
TARGETS = (
    ("update_w256", "SAC", "SB3 SAC", 1.7),
    ("update_w256", "SAC", "SBX SAC", 1.1),
    ("update_w256", "SAC", "matrix products alone", 0.75),
    ("update_w256", "SAC, bfloat16", "SB3 SAC", 2.5),
    ("update_w128", "SAC", "SB3 SAC", 2.5),
    ("loop_w256", "SAC", "SB3 SAC", 1.6),
    ("ppo_update", "PPO", "SB3 PPO", 2.5),
)
SPEED = {  # file, less the width -> heading, unit, reference
    "update": ("One update of SAC, networks {0}x{0}", "ms an update", "SB3 SAC"),
    "loop": ("Whole loop of SAC (act, simulate, store, update), networks {0}x{0}", "ms a step", "SB3 SAC"),
    "ppo_update": ("One update of PPO: 10 epochs over a rollout of 64 worlds", "ms an update", "SB3 PPO"),
    "ppo_whole": ("Whole iteration of PPO: rollout and update", "ms an iteration", "SB3 PPO, serial worlds"),
    "processes": ("Two learners on two cores, networks {0}x{0}", "ms an update in sum", "one learner, two threads"),
}
FLOOR = "matrix products alone"  # of one update: what no implementation of it in float32 gets below
FAST = " at rate 1e-3"
NAMES = {
    "dsact": "DSAC-T",
    "dsact_delay2": "DSAC-T with its delay of 2",
    "dsact_fast": f"DSAC-T{FAST}",
    "sac": "SAC",
    "sac_fast": f"SAC{FAST}",
    "sb3_sac": "SB3 SAC",
    "ppo": "PPO",
}


def page(root: Path) -> str:
    """Markdown of everything that ``root`` holds."""
    parts = [INTRODUCTION, *speed_sections(root), *learning_sections(root)]
    return "\n\n".join(parts) + "\n"


INTRODUCTION = """# Benchmarks

Written by `distillery benchmark report=true` from the files below `tests/benchmarks/results`; nothing here is typed by
hand. `distillery benchmark` measures speed on your machine in a few minutes, `suite=gym`, `suite=precision` and
`suite=brax` train for an hour or more and go on where they were interrupted. Intervals are bootstrapped, 95 %."""


# ---- speed


def speed_sections(root: Path) -> Iterator[str]:
    """What was aimed at, then one table per file."""
    files = sorted(
        (root / "speed").glob("*.json"),
        key=lambda file: (list(SPEED).index(_suite(file.stem)[0]), -_suite(file.stem)[1]),
    )
    found = {file.stem: json.loads(file.read_text()) for file in files}
    if not found:
        return
    yield "## Speed\n\n" + _how(found)
    yield targets_table(found)
    for name, result in found.items():
        yield f"### {_described(name)[0]}\n\n{speed_table(name, result)}"


def _how(found: Mapping[str, Row]) -> str:
    machines = sorted({_machine(result["machine"]) for result in found.values()})
    return ("Contestants take turns in one process, on one thread pinned to one core; a block counts the processor's "
            "time, a ratio is the median of the blocks' own ratios. Learners draw their batches from replay. "
            "`matrix products alone` is every matrix product of one update, written into buffers, and nothing else.\n\n"
            + "\n".join(f"* {machine}" for machine in machines))  # fmt: skip


def _machine(found: Row) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in found.items() if k not in ("cpu", "cores", "threads"))
    return f"{found['cpu']}, {found.get('cores', '?')} cores, {found['threads']} thread(s); {versions}"


def targets_table(found: Mapping[str, Row]) -> str:
    lines = ["| measured | times as fast | aim | | matrix products alone |", "|---|---|---|---|---|"]
    for name, own, reference, aim in TARGETS:
        if name not in found:
            continue
        blocks = found[name]["blocks_ms"]
        what = f"{_described(name)[0]}: {own} beside {reference}"
        if reference not in blocks:
            lines.append(f"| {what} | {_absent(reference)} | {aim} | | |")
            continue
        middle, interval = ratio(blocks, own, reference)
        outcome = "met" if middle >= aim else "missed"
        bound = f"{ratio(blocks, FLOOR, reference)[0]:.2f}" if _bounds(blocks, own, reference) else ""
        lines.append(f"| {what} | {middle:.2f} {_span(interval, '.2f')} | {aim} | {outcome} | {bound} |")
    return "\n".join(lines)


def _bounds(blocks: Row, own: str, reference: str) -> bool:
    """Whether the products are a bound of this row: they were measured in float32."""
    return FLOOR in blocks and reference != FLOOR and "bfloat16" not in own


def speed_table(name: str, result: Row) -> str:
    """One line per contestant."""
    _, unit, reference = _described(name)
    blocks = result["blocks_ms"]
    count = len(next(iter(blocks.values())))
    lines = [f"| | {unit}, median of {count} | times as fast as {reference} |", "|---|---|---|"]
    for own, times in blocks.items():
        middle, interval = ratio(blocks, own, reference)
        lines.append(f"| {own} | {np.median(times):.3f} | {middle:.2f} {_span(interval, '.2f')} |")
    if name.startswith(("update", "loop")) and "SBX SAC" not in blocks:
        lines.append(f"| SBX SAC | {_absent('SBX SAC')} | |")
    return "\n".join(lines)


def _described(name: str) -> tuple[str, str, str]:
    """Heading, unit and reference of a file: ``update_w256`` is the suite ``update`` with networks of width 256."""
    suite, width = _suite(name)
    heading, unit, reference = SPEED[suite]
    return heading.format(width), unit, reference


def _suite(name: str) -> tuple[str, int]:
    """``loop_w256`` -> (``loop``, 256), ``ppo_whole`` -> (``ppo_whole``, 0)."""
    suite, _, width = name.rpartition("_w")
    return (suite, int(width)) if width.isdigit() else (name, 0)


def _absent(contestant: str) -> str:
    return "not installed: pip install sbx-rl" if contestant.startswith("SBX") else "not measured"


def ratio(blocks: Mapping[str, Sequence[float]], own: str, reference: str) -> tuple[float, tuple[float, float]]:
    """How many times as fast ``own`` is: median over blocks of reference / own, and its interval."""
    ratios = [r / o for o, r in zip(blocks[own], blocks[reference])]
    return float(np.median(ratios)), bootstrap(ratios, np.median)


# ---- learning


def read_runs(root: Path) -> Runs:
    """Every finished training below ``root/learning``."""
    runs: Runs = {}
    for file in sorted((root / "learning").glob("*/*.json")):
        record = json.loads(file.read_text())
        group = file.stem.rpartition("_seed")[0]
        runs.setdefault((record["env"], group), {})[record["seed"]] = record
    return runs


def learning_sections(root: Path) -> Iterator[str]:
    runs = read_runs(root)
    gym = {k: v for k, v in runs.items() if k[0].startswith("gym/") and "bfloat16" not in k[1]}
    if gym:
        yield GYM
        for env in _envs(gym):
            yield f"### {env.partition('/')[2]}\n\n{learning_table(gym, env)}\n\n{comparisons(gym, env)}"
    if any("bfloat16" in group for _, group in runs):
        yield PRECISION + "\n\n" + precision_table(runs)
    brax = {k: v for k, v in runs.items() if k[0].startswith("brax/")}
    for env in _envs(brax):
        yield f"{BRAX}\n\n### {env.partition('/')[2]}\n\n{learning_table(brax, env)}"


GYM = f"""## Learning

Our learners through the product's own loop, Stable-Baselines3's SAC through its own; everything that both have is set
to the defaults of Stable-Baselines3 (one environment, one update a step, batch 256, 100 steps of warm-up, the width in
the table), for DSAC-T as well. In its paper DSAC-T moves actor and targets in every second update; that is half of
SAC's budget and has a line of its own. The reward scale holds in training only. 10 evaluations of 10 episodes on the
way, from the same starts for all; the final return is the mean of 20 further episodes of the last, greedy policy on the
true reward. A difference is called *not inferior* when its whole interval lies above minus {MARGIN:.0%} of the
reference, *inferior* when all of it lies below, else *undecided*.

![Learning curves](benchmarks_gym.svg)"""

PRECISION = f"""## Reduced precision

`algo.precision=bfloat16` beside `float32`, seed by seed (the same weights and starts); success in brackets where
the world has one. *Not inferior* as above, with {MARGIN:.0%} of the float32 mean."""

BRAX = """## Brax

With the world's own settings (`configs/settings/brax.yaml`). Episodes have 1000 steps of reward 1; Gymnasium calls its
version of this world solved at 950."""


def _envs(runs: Iterable[tuple[str, str]]) -> list[str]:
    return sorted({env for env, _ in runs}, key=lambda env: "Hopper" in env)


def learning_table(runs: Runs, env: str) -> str:
    """One line per group, every seed shown."""
    lines = ["| | final return of every seed | mean [95 %] | median | IQM | mean of the way |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for (_, group), seeds in _of(runs, env):
        final, way = finals(seeds), ways(seeds)
        each = " / ".join(f"{x:.0f}" for x in final)
        lines.append(f"| {label(group)} | {each} | {np.mean(final):.0f} {_span(bootstrap(final), '.0f')} "
                     f"| {np.median(final):.0f} | {iqm(final):.0f} | {np.mean(way):.0f} |")  # fmt: skip
    return "\n".join(lines)


def finals(seeds: Mapping[int, Row]) -> list[float]:
    return [seeds[seed]["final_return"] for seed in sorted(seeds)]


def ways(seeds: Mapping[int, Row]) -> list[float]:
    """Mean return of the evaluations on the way, one per seed: says how fast, and is less noisy than the end."""
    return [float(np.mean([row["return"] for row in seeds[seed]["curve"]])) for seed in sorted(seeds)]


def comparisons(runs: Runs, env: str) -> str:
    """Verdicts: SAC beside Stable-Baselines3's, DSAC-T beside SAC, and what the reward scale does to each."""
    lines = []
    by_name = {label(group): seeds for (_, group), seeds in _of(runs, env)}
    for own, reference in (("SAC", "SB3 SAC"), ("DSAC-T", "SAC"), ("DSAC-T", "SB3 SAC"),
                           (f"DSAC-T{FAST}", f"SAC{FAST}")):  # fmt: skip
        for first, seeds in by_name.items():
            second = by_name.get(first.replace(own, reference, 1))
            if first.startswith(f"{own}, w") and second:
                lines += [_comparison(f"{own} beside {reference}", seeds, second)]
    for own in ("DSAC-T", "SAC", f"DSAC-T{FAST}", f"SAC{FAST}"):
        groups = [seeds for name, seeds in by_name.items() if name.startswith(f"{own},")]
        if len(groups) > 2:
            lines += [_scales(own, [finals(seeds) for seeds in groups])]
    return "\n".join(lines)


def _comparison(what: str, own: Mapping[int, Row], reference: Mapping[int, Row]) -> str:
    parts = []
    for name, figure in (("final return", finals), ("mean of the way", ways)):
        a, b = figure(own), figure(reference)
        base = abs(float(np.mean(b)))
        interval = difference(a, b)
        gap = (np.mean(a) - np.mean(b)) / base
        span = _span((interval[0] / base, interval[1] / base), "+z.0%")
        parts.append(f"{name} {gap:+z.0%} {span}, *{verdict(interval, MARGIN * base)}*")
    return f"* {what}: " + "; ".join(parts)


def _scales(learner: str, groups: list[list[float]]) -> str:
    gap, interval = spread(groups), spread_interval(groups)
    within = "within" if gap <= MARGIN else "not within"
    return (f"* {learner} at reward scales 0.1, 1 and 10: the lowest mean lies {gap:.0%} "
            f"{_span(interval, '.0%')} below the highest, {within} {MARGIN:.0%}")  # fmt: skip


def precision_table(runs: Runs) -> str:
    """One line per world and learner, and one for all of them together."""
    lines = [
        "| | float32, every seed | bfloat16, every seed | final return | mean of the way |",
        "|---|---|---|---|---|",
    ]
    pooled: dict[Callable[..., list[float]], list[float]] = {finals: [], ways: []}
    for (env, group), low in sorted(runs.items()):
        full = runs.get((env, group.replace("_bfloat16", "")), {})
        seeds = sorted(low.keys() & full.keys())
        if "bfloat16" not in group or not seeds:
            continue
        low, full = {s: low[s] for s in seeds}, {s: full[s] for s in seeds}
        changes = {figure: _relative(figure(low), figure(full)) for figure in pooled}
        for figure, values in changes.items():
            pooled[figure] += values
        cells = [" / ".join(map(_ended, part.values())) for part in (full, low)] + [
            _paired(x) for x in changes.values()
        ]
        name = label(group).replace(", bfloat16", "")
        lines.append(f"| {env.partition('/')[2]}, {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "| all pairs | | | " + " | ".join(_paired(values) for values in pooled.values()) + " |"])


def _ended(record: Row) -> str:
    success = f" ({record['final_success']:.0%})" if "final_success" in record else ""
    return f"{record['final_return']:.4g}{success}"


def _relative(own: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Differences point by point, as shares of the reference's mean."""
    return (np.subtract(own, reference) / abs(np.mean(reference))).tolist()


def _paired(changes: list[float]) -> str:
    interval = bootstrap(changes)
    return f"{np.mean(changes):+z.1%} {_span(interval, '+z.1%')}, *{verdict(interval, MARGIN)}*"


def _of(runs: Runs, env: str) -> list[tuple[tuple[str, str], dict[int, Row]]]:
    """Groups of one world: learners in one order, reward scales from low to high."""

    def order(item: tuple[tuple[str, str], dict[int, Row]]) -> tuple[int, float]:
        record = next(iter(item[1].values()))
        return list(NAMES).index(record["learner"]), record["scale"]

    return sorted(((k, v) for k, v in runs.items() if k[0] == env), key=order)


def label(group: str) -> str:
    """``sac_scale10_w128`` -> ``SAC, reward x 10, width 128``."""
    learner = next(name for name in sorted(NAMES, key=len, reverse=True) if group.startswith(name))
    words = {"scale": "reward x ", "w": "width "}
    parts = [part for part in group.removeprefix(learner).split("_") if part]
    for index, part in enumerate(parts):
        for prefix, word in words.items():
            if part.startswith(prefix) and part[len(prefix) :][:1].isdigit():
                parts[index] = word + part[len(prefix) :]
    return ", ".join([NAMES[learner], *parts])


def _span(interval: tuple[float, float], form: str) -> str:
    return f"[{interval[0]:{form}}, {interval[1]:{form}}]"
