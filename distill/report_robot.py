"""The sections on what came of it: the deployment, the time it took, where it comes from."""

from __future__ import annotations

from collections.abc import Mapping

from distill.report_html import Html, duration, el, fig, micros
from distill.report_parts import Fact, Row, bare_table, facts, heads, not_run, pairs, ratio, section, span, words
from distill.report_plots import timeline


def deployment_section(summary: Row) -> Html:
    """Outcome of every deployed sentence, what the safety gate did, how punctual the servo loop was."""
    robot = summary["deployment"]
    if not robot:
        return not_run("deployment", "Deployment", "No sentence was given to a robot in this run.")
    note = (
        "Sentences drawn by seed, objects moved, every command through the safety gate and the robot's own wire "
        "protocol. Success is judged outside the policy. Each square is one sentence."
    )
    rows = robot["sentences"]
    strip = el("div", [_square(row) for row in rows], cls="strip", role="img", aria_label="outcome of each sentence")
    live = any(row["realtime"] for row in rows) and el("p", "Outlined squares ran in real time.", cls="small")
    safety = [el("h3", "Safety"), facts(_safety(robot)), el("h3", "Timing"), facts(_timing(robot)), _timing_note(robot)]
    return section("deployment", "Deployment", note, facts(_outcomes(robot)), strip, live, _sentences(robot), safety)


def _outcomes(robot: Row) -> list[Fact]:
    names = {"success": "Sentences obeyed", "realtime": "Obeyed in real time"}
    rows: list[Fact] = [(name, ratio(robot[key]), False) for key, name in names.items() if robot[key]]
    whole = robot["success"]
    if whole:
        rows += [("Wilson interval", span(whole), False), ("Mean time to success", duration(whole["cycle_s"]), False)]
    return rows


def _safety(robot: Row) -> list[Fact]:
    violations = robot["violations"]
    rows: list[Fact] = [("Commands outside limits, seen by the device", fig(violations), bool(violations))]
    rows += [(f"Gate: {words(name)}", fig(count), False) for name, count in robot["gate"].items()]
    return rows + [(f"Device: {words(name)}", fig(count), False) for name, count in robot["device"].items()]


def _timing(robot: Row) -> list[Fact]:
    late, overruns = robot["lateness_us"] or {}, robot["overruns"]
    return [
        ("Servo lateness, median", micros(late.get("p50")), False),
        ("ninety-ninth percentile", micros(late.get("p99")), False),
        ("largest", micros(late.get("max")), False),
        ("Overruns", fig(overruns), bool(overruns)),
        ("Servo periods skipped", fig(robot["skipped"]), bool(robot["skipped"])),
    ]


def _timing_note(robot: Row) -> Html | None:
    late = robot["lateness_us"]
    if not late:
        return None
    kind = " real-time sentences" if late["realtime"] else " sentences, none of them in real time"
    meaning = ": the median of their medians, the worst of their ninety-ninth percentiles, the largest of all."
    text = "Lateness of servo ticks against absolute deadlines over "
    return el("p", text, fig(late["sentences"]), kind, meaning, cls="small")


def _square(row: Row) -> Html:
    outcome, mark = _state(row)
    return el("i", cls=f"{mark} live" if row["realtime"] else mark, title=f"{row['sentence']} ({outcome})")


def _state(row: Row) -> tuple[str, str]:
    """Outcome in a word, and the class of its mark; a dry run is not judged."""
    if row["refused"]:
        return "refused", "no"
    return {True: ("obeyed", "yes"), False: ("failed", "no"), None: ("not judged", "wait")}[row["success"]]


def _sentences(robot: Row) -> Html:
    """Every sentence with its outcome."""
    names = ("", "Sentence", "Task", "Outcome", "Clock", "Time", "Gate acted", "Violations")
    rows = [_sentence(row) for row in robot["sentences"]]
    inner = el("div", bare_table(heads(*names, numeric=names[5:]), rows), cls="scroll tall")
    title = el("summary", "Every sentence: ", fig(robot["runs"]), " runs")
    return el("details", title, inner, cls="panel dense below", open=True)


def _sentence(row: Row) -> Html:
    outcome, mark = _state(row)
    reason = row["refused"] and el("span", str(row["refused"]), cls="sub")
    numbers = (duration(row["seconds"]), fig(row["gate_acted"]), fig(row["violations"]))
    return el(
        "tr",
        el("td", fig(row["index"]), cls="n none"),
        el("td", el("span", row["sentence"], cls="said"), reason),
        el("td", words(str(row["variant"] or "–"))),
        el("td", el("span", cls=f"mark {mark}"), " ", outcome),
        el("td", "real time" if row["realtime"] else "lock-step"),
        [el("td", number, cls="n") for number in numbers],
        cls=mark,
    )


def stage_section(summary: Row) -> Html:
    """Wall time of each stage on one clock."""
    stages = summary["stages"]
    if not stages:
        return not_run("stages", "Time", "No stage recorded its time.")
    note = summary["wall_s"] and ["From the first stage to the last: ", duration(summary["wall_s"]), "."]
    return section("stages", "Time", note, el("div", timeline(stages), cls="panel"))


def provenance_section(summary: Row) -> Html:
    """Versions, machine, seeds: what it takes to repeat the run."""
    origin, data = summary["provenance"] or {}, summary["dataset"]
    plain = {key: entry for key, entry in origin.items() if not isinstance(entry, Mapping)}
    groups = {key: entry for key, entry in origin.items() if isinstance(entry, Mapping)}
    groups = {**({"run": plain} if plain else {}), **groups, "dataset": data}
    blocks = [el("div", el("h3", words(key).capitalize()), pairs(rows)) for key, rows in groups.items() if rows]
    if not blocks:
        return not_run("provenance", "Provenance", "The run recorded neither versions nor machine nor seeds.")
    return section("provenance", "Provenance", "What it takes to repeat this run.", el("div", blocks, cls="two"))
