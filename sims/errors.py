"""The one exception for a user's mistake. Verbs print it as a single message and exit with status 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake the user can correct: says what failed, where, what was found, and what to do."""


def unknown_choice(kind: str, found: str, known: Iterable[str], where: str = "") -> UserError:
    """Error for a name that is in no registry; lists the choices and the closest one.

    Args:
        kind: what the name stands for, e.g. ``"task"``.
        found: the name as given.
        known: the valid names.
        where: where the name was read (an option, a file), may be empty.
    """
    names = sorted(known)
    close = difflib.get_close_matches(found, names, n=1, cutoff=0.5)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    place = f" in {where}" if where else ""
    return UserError(f"unknown {kind} '{found}'{place}.{hint} Known: {', '.join(names)}.")
