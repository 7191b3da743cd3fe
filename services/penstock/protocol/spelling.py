"""Hints about misspelt names."""

import difflib
from collections.abc import Iterable


def nearest(given: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The most similar known name; None if none is similar."""
    # Of the name's beginning alone: difflib's time is quadratic, and the name may be megabytes long.
    near = difflib.get_close_matches(given[:60], known, n=1, cutoff=cutoff)
    return near[0] if near else None


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A clause to append to a message; empty if no known name is similar."""
    near = nearest(given, known)
    return "" if near is None else f"; did you mean {near}?"
