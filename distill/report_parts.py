"""Building blocks of the page that several sections share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distill.report_html import Html, duration, el, fig, join, percent, percent_text
from distill.report_plots import interval

Row = Mapping[str, Any]
Fact = tuple[str, Any, bool]  # meaning, figure, is it bad


def section(key: str, title: str, note: Any, *content: Any) -> Html:
    """A part of the page under its heading, with a sentence on what it shows."""
    return el("section", el("h2", title), note and el("p", note, cls="note"), *content, id=key)


def not_run(key: str, title: str, why: str) -> Html:
    return section(key, title, None, el("div", el("b", "Not run. "), why, cls="not-run"))


def bare_table(head: list[Any], rows: list[Html]) -> Html:
    return el("table", el("thead", el("tr", head)), el("tbody", rows))


def table(head: list[Any], rows: list[Html]) -> Html:
    """A table in a frame that scrolls sideways on its own where the screen is narrow."""
    return el("div", bare_table(head, rows), cls="panel scroll")


def heads(*words: str, numeric: tuple[str, ...] = ()) -> list[Html]:
    return [el("th", word, cls="n" if word in numeric else None) for word in words]


def facts(rows: list[Fact]) -> Html:
    """Large figures side by side."""
    cells = [el("div", el("dt", name), el("dd", value, cls="bad" if bad else None)) for name, value, bad in rows]
    return el("div", el("dl", cells, cls="facts"), cls="panel clip")


def span(success: Row) -> Html:
    """The interval in words, rounded to whole percent."""
    low, high = percent_text(success["low"], 0), percent_text(success["high"], 0)
    return join([fig(success["low"], low.split("\u202f")[0]), "–", fig(success["high"], high)])


def ratio(success: Row) -> Html:
    return join([fig(success["successes"]), "\u2009/\u2009", fig(success["episodes"])])


def score(success: Row | None, target: float | None = None, cls: str = "score") -> Html:
    """A cell with a rate, its interval drawn and written, and the cycle time."""
    if not success:
        return el("td", el("span", "not run", cls="none"), cls=cls)
    cycle = success["cycle_s"] is not None and el("span", duration(success["cycle_s"]), " to success", cls="sub")
    counted = el("span", ratio(success), ", ", span(success), cls="sub")
    return el(
        "td", el("span", percent(success["rate"]), cls="rate"), interval(dict(success), target), counted, cycle, cls=cls
    )


def words(key: str) -> str:
    """A name from a file as a person writes it."""
    return key.replace("_", " ").replace("/", " / ")


def value(item: Any) -> Any:
    """Anything that JSON holds, for a table cell."""
    if item is None:
        return "–"
    if isinstance(item, bool):
        return "yes" if item else "no"
    if isinstance(item, (int, float)):
        return fig(item)
    if isinstance(item, list):
        return join(part for i, entry in enumerate(item) for part in ([", "] if i else []) + [value(entry)])
    if isinstance(item, Mapping):
        return join(el("div", words(str(key)), ": ", value(entry)) for key, entry in item.items())
    return str(item)


def pairs(mapping: Row) -> Html:
    rows = [(el("dt", words(str(key))), el("dd", value(entry))) for key, entry in mapping.items()]
    return el("dl", rows, cls="pairs panel")
