"""A few functions that write HTML with escaping by construction: a plain ``str`` is text, only ``Html`` is markup."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

_VOID = {"meta", "br", "img", "link", "source"}


class Html(str):
    """Finished markup; everything else that reaches :func:`el` is escaped."""


Child = Any  # Html, str, number, None, or an iterable of those


def el(tag: str, *children: Child, **attributes: Any) -> Html:
    """One element. ``cls`` stands for ``class``, ``_`` in names for ``-``; None and False attributes are left out."""
    parts = []
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        key = "class" if name == "cls" else name.rstrip("_").replace("_", "-")
        parts.append(f" {key}" if value is True else f' {key}="{html.escape(str(value))}"')
    opening = f"<{tag}{''.join(parts)}>"
    return Html(opening if tag in _VOID else f"{opening}{join(children)}</{tag}>")


def join(children: Iterable[Child]) -> Html:
    """Markup of several children, one after the other."""
    return Html("".join(_render(child) for child in children))


def _render(child: Child) -> str:
    if child is None or child is False:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str):
        return html.escape(child)
    if isinstance(child, Iterable):
        return join(child)
    return html.escape(str(child))


def fig(value: float | int | None, text: str | None = None, **attributes: Any) -> Html:
    """A figure: ``value`` as ``summary.json`` holds it, ``text`` as a person reads it; a dash where there is none."""
    if value is None:
        return el("span", "–", cls="none")
    return el("data", text if text is not None else grouped(value), value=repr(value), **attributes)


def percent(rate: float | None, digits: int = 1) -> Html:
    """A fraction as a percentage, without a decimal that says nothing."""
    return fig(rate, None if rate is None else percent_text(rate, digits))


def percent_text(rate: float, digits: int = 1) -> str:
    text = f"{100 * rate:.{digits}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + "\u202f%"


def grouped(value: float | int) -> str:
    """A number with thin spaces between thousands; about four significant digits for fractions."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}".replace(",", "\u2009")
    return f"{value:,.1f}".replace(",", "\u2009") if abs(value) >= 100 else f"{value:.3g}"


def short(value: float | int) -> str:
    """A count in at most four characters and a unit: 1.2 M, 340 k."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}\u202f{unit}"
    return grouped(value)


def duration_text(seconds: float) -> str:
    """Seconds for a person: 850 ms, 4.2 s, 3 min 05 s, 2 h 10 min."""
    if seconds < 1:
        return f"{1000 * seconds:.0f}\u202fms"
    if seconds < 60:
        return f"{seconds:.1f}\u202fs"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}\u202fmin {rest:02d}\u202fs"
    return f"{minutes // 60}\u202fh {minutes % 60:02d}\u202fmin"


def duration(seconds: float | None) -> Html:
    return fig(seconds, None if seconds is None else duration_text(seconds))


def micros(us: float | None) -> Html:
    """Microseconds for a person: 85 µs, 1.24 ms."""
    if us is None:
        return fig(None)
    return fig(us, f"{us:.0f}\u202fµs" if us < 1000 else f"{us / 1000:.3g}\u202fms")
