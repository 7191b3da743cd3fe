"""Hints about misspelt names."""

import difflib
from collections.abc import Iterable

_LONGEST_CHARS = 60  # difflib's time is quadratic, and the name may be megabytes long


def nearest(given: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The most similar known name; None if none is similar."""
    near = difflib.get_close_matches(given[:_LONGEST_CHARS], known, n=1, cutoff=cutoff)
    return near[0] if near else None


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A clause to append to a message; empty if no known name is similar."""
    near = nearest(given, known)
    return "" if near is None else f"; did you mean {near}?"
