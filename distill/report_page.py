"""The page: rendered from the summary alone, so that no figure on it is missing from ``summary.json``."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from importlib import resources
from typing import Any

from distill.report_card import reward_section
from distill.report_html import Html, duration, el, fig, join, percent, short
from distill.report_parts import not_run, section
from distill.report_robot import deployment_section, provenance_section, stage_section
from distill.report_sections import generalist_section, specialist_section

Summary = Mapping[str, Any]
Film = tuple[bytes, bytes]  # MP4 file, JPEG file

# what the page may load: nothing but what it carries itself
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; media-src data:"
ICONS = {  # one stroke each, in a box of 34 x 34
    "Simulation": "M4 9l13-6 13 6v15l-13 7-13-7zM4 9l13 7 13-7M17 16v15",
    "Specialists": "M4 5v24h26M4 28c6 0 6-8 11-10s5-11 15-12",
    "Dataset": "M5 8c0-6 24-6 24 0v18c0 6-24 6-24 0zM5 8c0 6 24 6 24 0M5 17c0 6 24 6 24 0",
    "Generalist": "M4 6h7l7 11 7 0M4 17h21M4 28h7l7-11M21 12l5 5-5 5",
    "Robot": "M6 30h14M13 30v-7M13 23l-6-9 9-9M16 5l9 5M25 10l-1 6M25 10l5 4",
}
NAVIGATION = {
    "chain": "Chain",
    "films": "Films",
    "deployment": "Deployment",
    "generalist": "Generalist",
    "specialists": "Specialists",
    "reward": "Reward model",
    "stages": "Time",
    "provenance": "Provenance",
}


def render(summary: Summary, films: Mapping[str, Film]) -> str:
    """The whole HTML file.

    Args:
        summary: what :func:`distill.report_summary.summarise` returns, with ``videos`` and ``wall_s``.
        films: file name of each embedded video -> its MP4 and the JPEG to show before it plays.
    """
    body = [
        header(summary),
        _navigation(),
        el("div", section("chain", "The chain", None, chain(summary))),
        _film_section(summary, films),
        deployment_section(summary),
        generalist_section(summary),
        specialist_section(summary),
        reward_section(summary),
        stage_section(summary),
        provenance_section(summary),
        el("footer", "Every figure on this page stands in summary.json beside it. Robot Distillery."),
    ]
    head = [
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("link", rel="icon", href="data:,"),
        el("title", f"{summary['run']}: robot distillery report"),
        el("style", Html(_template("report.css"))),
    ]
    script = el("script", Html(_template("report.js")))
    return "<!doctype html>\n" + el("html", el("head", head), el("body", el("main", body), script), lang="en")


def _template(name: str) -> str:
    return (resources.files("distill") / "templates" / name).read_text(encoding="utf-8")


def header(summary: Summary) -> Html:
    """What was trained, and did it work: the headline, a sentence, and the targets one by one."""
    return el(
        "header",
        el("p", "Robot Distillery run ", summary["run"], cls="eyebrow"),
        el("h1", headline(summary)),
        el("p", _lede(summary), cls="lede"),
        el("ul", [_check(row) for row in summary["targets"]], cls="checks"),
        cls="top",
    )


def headline(summary: Summary) -> Html:
    """The furthest stage that was reached, in one line."""
    deployed = (summary["deployment"] or {}).get("success")
    if deployed:
        return join([fig(deployed["successes"]), " of ", fig(deployed["episodes"]), " sentences obeyed by one policy"])
    axes = {row["axis"]: row["all"] for row in (summary["generalist"] or {}).get("axes", []) if row["all"]}
    for axis, words in (("unseen_phrasing", "unseen phrasings"), ("seen", "known sentences")):
        if axis in axes:
            return join(["One policy, ", percent(axes[axis]["rate"]), f" of {words} obeyed"])
    trained = [row for row in summary["specialists"] if row["success"]]
    if trained:
        worst = min(row["success"]["rate"] for row in trained)
        return join([_plural(len(trained), "specialist"), ", weakest at ", percent(worst), " success"])
    return Html("Nothing has been measured yet")


def _lede(summary: Summary) -> list[Any]:
    counts = summary["totals"]
    parts: list[Any] = []
    if counts["specialists"]:
        parts += [_plural(counts["specialists"], "specialist"), " learned in simulation"]
        if counts["from_sentence"]:
            parts += [", ", fig(counts["from_sentence"]), " of them from a sentence alone"]
    generalist, robot = summary["generalist"], summary["deployment"]
    if generalist:
        size = generalist["parameters"]
        parts += [", then distilled into one generalist" if parts else "One generalist"]
        parts += [" of ", fig(size, short(size)), " weights"] if size else []
    if robot:
        parts += [" and deployed on ", el("span", robot["robot"] or "the robot")]
    parts += [". "] if parts else []
    met, judged = counts["targets_met"], counts["targets_judged"]
    if judged:
        parts += [fig(met), " of ", fig(judged), " targets met"]
        parts += [" in ", duration(summary["wall_s"])] if summary["wall_s"] else []
        parts += [", ", fig(counts["targets_open"]), " not measured"] if counts["targets_open"] else []
        parts += ["."]
    return parts or ["This run has no results so far; parts appear here as their stages finish."]


def _plural(count: int, noun: str) -> Html:
    return join([fig(count), f" {noun}" if count == 1 else f" {noun}s"])


def _check(row: Mapping[str, Any]) -> Html:
    state = {True: "yes", False: "no", None: "wait"}[row["met"]]
    if "at_least" in row:
        goal, value = join(["at least ", percent(row["at_least"])]), percent(row["value"])
    else:
        goal, value = join(["at most ", fig(row["at_most"])]), fig(row["value"])
    words = {"yes": "met", "no": "missed", "wait": "not run"}[state]
    result = el("b", value) if row["met"] is not None else el("span", "not run", cls="none")
    name = el("span", row["name"], el("span", goal, cls="goal"))
    return el("li", el("span", cls=f"mark {state}", role="img", aria_label=words), name, result)


def _navigation() -> Html:
    return el("nav", el("div", [el("a", name, href=f"#{key}") for key, name in NAVIGATION.items()]), aria_label="Parts")


def chain(summary: Summary) -> Html:
    """From simulation to the robot in five steps, each with its most telling number."""
    counts, data = summary["totals"], summary["dataset"] or {}
    generalist, obeyed = summary["generalist"] or {}, (summary["deployment"] or {}).get("success")
    seen = next((axis["all"] for axis in generalist.get("axes", []) if axis["axis"] == "seen"), None)
    size, steps, episodes = generalist.get("parameters"), counts["env_steps"], data.get("total_episodes")
    frames, rate, trained = data.get("total_frames"), counts["steps_per_s"], counts["specialists"]
    taught = [
        "rewarded by the task",
        " or by a sentence" if counts["from_sentence"] else None,
        ", helped by demonstrations",
    ]
    links = [
        _link("Simulation", steps and fig(steps, short(steps)), "environment steps"),
        _link("Specialists", trained and fig(trained), taught),
        _link("Dataset", episodes and fig(episodes), "successful episodes"),
        _link("Generalist", percent(seen["rate"]) if seen else None, "of known sentences obeyed"),
        _link("Robot", percent(obeyed["rate"]) if obeyed else None, "of sentences obeyed through the safety gate"),
    ]
    more = [
        rate and [fig(rate, short(rate)), " a second while learning"],
        None,
        frames and [fig(frames, short(frames)), " frames"],
        size and [fig(size, short(size)), " weights"],
        obeyed and [fig(obeyed["successes"]), " of ", fig(obeyed["episodes"])],
    ]
    steps_html = [el("li", link, extra and el("p", extra), cls=cls) for (link, cls), extra in zip(links, more)]
    return el("ol", steps_html, cls="chain panel")


def _link(name: str, figure: Html | None, meaning: Any) -> tuple[list[Html], str | None]:
    """Content and class of one step of the chain."""
    path = el("path", d=ICONS[name])
    text = el("p", meaning if figure else "not run")
    icon = el("svg", path, viewBox="0 0 34 34", aria_hidden="true")
    return [icon, el("h3", name), el("div", figure or "–", cls="big"), text], None if figure else "idle"


def _film_section(summary: Summary, films: Mapping[str, Film]) -> Html:
    rows = summary["videos"]
    if not rows:
        return not_run("films", "Films", "No episode of this run was filmed.")
    note = "Whole episodes, unedited, at the speed of the robot."
    return section("films", "Films", note, el("div", [_film(row, films) for row in rows], cls="films"))


def _film(row: Mapping[str, Any], films: Mapping[str, Film]) -> Html:
    name, said = row["title"], row["sentence"]
    state, outcome = {True: ("yes", "success"), False: ("no", "failure"), None: ("wait", "outcome not recorded")}[
        row["success"]
    ]
    mark = el("span", cls=f"mark {state}", role="img", aria_label=outcome)
    title = el("span", said or name, cls="said" if said else None)
    return el("figure", _picture(row, films), el("figcaption", title, el("small", mark, name if said else outcome)))


def _picture(row: Mapping[str, Any], films: Mapping[str, Film]) -> Html:
    if row["file"] not in films:
        return el("div", "not embedded: ", row["file"], cls="gone")
    movie, still = films[row["file"]]
    return el(
        "video",
        src=_data_uri("video/mp4", movie),
        poster=_data_uri("image/jpeg", still),
        controls=True,
        muted=True,
        loop=True,
        playsinline=True,
        preload="metadata",
        aria_label=row["sentence"] or row["title"],
    )


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"
