"""The sections on learning: the generalist and the specialists."""

from __future__ import annotations

from distill.report_html import Html, duration, el, fig, percent, short
from distill.report_parts import Row, bare_table, facts, heads, not_run, score, section, table, words
from distill.report_plots import learning_curve
from distill.report_summary import TARGETS

AXIS_WORDS = {
    "seen": ("Seen", "training phrasings and start range"),
    "unseen_start": ("Unseen starts", "objects where they never were in training"),
    "unseen_phrasing": ("Unseen phrasings", "sentences written separately from the training ones"),
    "swapped": ("Sentence swapped", "same start, another sentence; judged on the new one"),
    "switched": ("Sentence switched", "another sentence in the middle of the motion; judged on the new one"),
}
AXIS_TARGETS = {axis: f"generalist_{axis}" for axis in AXIS_WORDS}


def specialist_section(summary: Row) -> Html:
    """Learning curve of each specialist, and the table against its demonstrator and a pure clone."""
    rows = summary["specialists"]
    if not rows:
        return not_run("specialists", "Specialists", "No specialist was trained in this run.")
    note = [
        "Each learned one skill in simulation. The final evaluation runs the deterministic policy on fresh starts and ",
        "counts success at the last step; intervals are Wilson, at ",
        percent(summary["confidence"]),
        ".",
    ]
    curves = [_curve(row, words(row["task"])) for row in rows if row["curve"]]
    head = heads("Skill", "Specialist", "Demonstrator", "Pure clone", "Training")
    plots = [el("div", curves, cls="curves"), _legend()] if curves else None
    return section("specialists", "Specialists", note, plots, table(head, [_specialist(row) for row in rows]))


def _curve(row: Row, title: str) -> Html:
    steps = row["curve"]["step"][-1]
    caption = el("figcaption", title, el("small", fig(steps, short(steps)), " steps"))
    return el("figure", caption, learning_curve(row["curve"], dict(row)), cls="panel")


def _legend() -> Html:
    marks = {
        "": "success in training, %",
        "l-second": "return the learner saw",
        "l-base": "demonstrator",
        "l-dot": "final evaluation with its interval",
    }
    return el("div", [el("span", el("i", cls=cls), meaning) for cls, meaning in marks.items()], cls="legend")


def _specialist(row: Row) -> Html:
    target = TARGETS["specialist_from_sentence" if row["from_sentence"] else "specialist"]
    if row["from_sentence"]:
        said = el("span", row["instruction"], cls="said") if row["instruction"] else "its sentence"
        reward = ["rewarded only by ", said]
    else:
        reward = ["reward: ", row["reward"]]
    steps, seconds = row["steps"], row["seconds"]
    training = [
        row["algorithm"] or "–",
        el("span", fig(row["demonstrations"]), " demonstrations", cls="sub") if row["demonstrations"] else None,
        steps and el("span", fig(steps, short(steps)), " steps", cls="sub"),
        seconds and el("span", duration(seconds), cls="sub"),
    ]
    baselines = [score(row[kind], None, "score muted") for kind in ("demonstrator", "clone")]
    name = el("td", words(row["task"]), el("span", reward, cls="sub"), cls="name")
    return el("tr", name, score(row["success"], target, "score all"), baselines, el("td", training))


def generalist_section(summary: Row) -> Html:
    """Success of the one policy along every axis of generalisation, per task and in all."""
    generalist = summary["generalist"]
    if not generalist:
        return not_run("generalist", "Generalist", "No generalist was distilled in this run.")
    note = (
        "One policy for all skills: it reads the joints, the tracked objects and the sentence, and nothing else tells "
        "it what to do. The tick on a track is the target."
    )
    content = [_axes(generalist), _variants(generalist), _training(generalist)]
    return section("generalist", "Generalist", note, content)


def _axes(generalist: Row) -> Html:
    if not generalist["cells"]:
        return el("div", el("b", "Not run. "), "This policy has not been evaluated.", cls="not-run")
    tasks = generalist["tasks"]
    rows = [_axis(axis, tasks) for axis in generalist["axes"]]
    return table(heads("Asked under", "All tasks", *(words(task) for task in tasks)), rows)


def _axis(axis: Row, tasks: list[str]) -> Html:
    name, meaning = AXIS_WORDS.get(axis["axis"], (words(axis["axis"]), ""))
    target = TARGETS.get(AXIS_TARGETS.get(axis["axis"], ""))
    cells = [score(axis["tasks"].get(task), target) for task in tasks]
    label = el("td", name, el("span", meaning, cls="sub"), cls="name")
    return el("tr", label, score(axis["all"], target, "score all"), cells)


def _variants(generalist: Row) -> Html | None:
    """The same, unfolded: one row for each variant."""
    axes = [axis["axis"] for axis in generalist["axes"] if axis["all"]]
    if not axes:
        return None
    by_key = {(cell["variant"], cell["axis"]): cell["success"] for cell in generalist["cells"]}
    names = list(dict.fromkeys(cell["variant"] for cell in generalist["cells"]))
    rows = [
        el("tr", el("td", words(name), cls="name"), [score(by_key.get((name, axis))) for axis in axes])
        for name in names
    ]
    head = heads("Variant", *(AXIS_WORDS.get(axis, (words(axis),))[0] for axis in axes))
    inner = el("div", bare_table(head, rows), cls="scroll")
    return el("details", el("summary", "By colour and object"), inner, cls="panel below")


def _training(generalist: Row) -> Html | None:
    size, stored = generalist["parameters"], generalist["weights_bytes"]
    known = [
        ("Weights", size and fig(size, short(size)), False),
        ("Stored size", stored and fig(stored, f"{short(stored)}B"), False),
        ("Actions predicted at once", generalist["chunk"] and fig(generalist["chunk"]), False),
        ("of which executed", generalist["execute"] and fig(generalist["execute"]), False),
        ("Sentence encoder", generalist["encoder"], False),
    ]
    known = [row for row in known if row[1]]
    curve = generalist["curve"] and _curve({"curve": generalist["curve"]}, "Distillation")
    if not curve and not known:
        return None
    return el("div", curve, facts(known) if known else None, cls="beside below" if curve else "below")
