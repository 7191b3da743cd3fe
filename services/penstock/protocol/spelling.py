"""Hints about misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST_CHARS = (
    60  # of what is compared: difflib's time grows with its square, and the name may be megabytes of a body
)


def nearest(given: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name most like the given one; None where none is like it."""
    near = difflib.get_close_matches(given[:_LONGEST_CHARS], known, n=1, cutoff=cutoff)
    return near[0] if near else None


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A clause for the end of a message, empty where no known name is like the given one."""
    near = nearest(given, known)
    return "" if near is None else f"; did you mean {near}?"
