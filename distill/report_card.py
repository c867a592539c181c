"""The section on the reward model: its report card, however deep it is nested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from distill.report_html import Html, el, fig
from distill.report_parts import Row, facts, not_run, pairs, section, table, value, words

FOLD = 6  # rows
NAMES = ("object", "name", "variant", "sentence")  # what tells the rows of a list apart
SETS = {"seen": "AUROC, new scenes", "unseen": "AUROC, object and task never shown"}
TERMS = {"auroc": "AUROC", "fpr95": "FPR at recall target", "near_miss": "near misses passed"}


Leaf = tuple[tuple[str, ...], dict[str, Any]]  # path and numbers


def reward_section(summary: Row) -> Html:
    """The reward model's report card."""
    card = summary["reward_model"]
    if not card:
        return not_run("reward", "Reward model", "No reward model was fitted or graded in this run.")
    note = (
        "How well the model's reading of pictures agrees with the true state of scenes that it never saw. AUROC is the "
        "chance that a success ranks above a failure; Spearman compares its score with true progress."
    )
    headline = [(SETS[name], fig(area), False) for name, area in (summary["reward_auroc"] or {}).items()]
    return section("reward", "Reward model", note, facts(headline) if headline else None, card_blocks(card))


def card_blocks(card: Row) -> list[Html]:
    """Numbers as large figures, nested mappings and lists of rows as tables, texts as pairs."""
    plain = {k: v for k, v in card.items() if isinstance(v, (int, float))}
    texts = {k: v for k, v in card.items() if isinstance(v, str)}
    blocks = [facts([(term(key), value(entry), False) for key, entry in plain.items()])] if plain else []
    for key, entry in card.items():
        block = _block(entry)
        if block:
            blocks += [el("h3", words(key).capitalize()), block]
    return blocks + ([el("h3", "Notes"), pairs(texts)] if texts else [])


def _block(entry: Any) -> Html | None:
    if isinstance(entry, Mapping) and entry:
        nested = any(isinstance(child, (Mapping, list)) for child in entry.values())
        return _grid(list(flatten(entry))) if nested else pairs(entry)
    if isinstance(entry, list) and entry:
        return _grid(list(flatten(entry))) if isinstance(entry[0], Mapping) else el("p", value(entry), cls="small")
    return None


def flatten(node: Any, path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """(path, numbers) of every mapping below ``node`` that holds numbers; items of a list are told apart by a name."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            if isinstance(item, Mapping):
                label = next((str(item[key]) for key in NAMES if key in item), str(index))
                yield from flatten(item, (*path, label))
        return
    numbers = {k: v for k, v in node.items() if v is None or isinstance(v, (int, float))}
    if numbers:
        yield path, numbers
    for key, child in node.items():
        if isinstance(child, Mapping):
            yield from flatten(child, (*path, words(str(key))))
        elif isinstance(child, list):
            yield from flatten(child, path)


def _grid(rows: list[Leaf]) -> Html:
    """One table for the rows that share columns with the first, and so on for the rest."""
    if not rows:
        return Html()
    related = [row for row in rows if row[1].keys() & rows[0][1].keys()]
    rest = [row for row in rows if not row[1].keys() & rows[0][1].keys()]
    return el("div", _folded(related), _grid(rest) if rest else None, cls="dense stack")


def _folded(rows: list[Leaf]) -> list[Html]:
    """Means in the open; where many single rows stand below them, those are folded away."""
    means = [row for row in rows if len(row[0]) <= 2]
    single = [row for row in rows if len(row[0]) > 2]
    if not means or len(single) <= FOLD:
        return [_table(rows)]
    return [_table(means), el("details", el("summary", f"Every object: {len(single)} rows"), _table(single))]


def _table(rows: list[Leaf]) -> Html:
    columns = list(dict.fromkeys(key for _, numbers in rows for key in numbers))
    head = [el("th"), *(el("th", term(name), cls="n") for name in columns)]
    body = [el("tr", _label(path), [el("td", value(row.get(c)), cls="n") for c in columns]) for path, row in rows]
    return table(head, body)


def _label(path: tuple[str, ...]) -> Html:
    """The last part of a path, indented by its depth, after its parents in grey."""
    parents = [el("span", f"{part}, ", cls="none") for part in path[:-1]]
    return el("td", parents, el("span", path[-1] if path else ""))


def term(name: str) -> str:
    return TERMS.get(name, words(name))
