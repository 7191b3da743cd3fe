"""Claims, and members of records, as statements take them."""

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

Pair = tuple[int, int]  # (task id, claim)


def columns(pairs: Iterable[Pair]) -> tuple[list[int], list[int]]:
    listed = list(pairs)
    return [pair[0] for pair in listed], [pair[1] for pair in listed]


def columns_of(items: Iterable[Any], *names: str) -> list[list[Any]]:
    """An array of each of these members."""
    listed = list(items)
    return [list(map(attrgetter(name), listed)) for name in names]
