"""Packing: many entries in one body, within the bytes, the number and the work that a message may hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence


def join_batch(items: Sequence[str]) -> str:
    """One body of several entries; a single one travels bare."""
    return items[0] if len(items) == 1 else f"[{','.join(items)}]"


def pack(
    sizes: Sequence[int],
    weights: Sequence[float] | None = None,
    *,
    max_bytes: int,
    max_items: int,
    max_weight: float = math.inf,
) -> Iterator[tuple[int, int]]:
    """Cut entries of these UTF-8 sizes into bodies: (start, end) slices, in order.

    Each body with its brackets and commas stays within ``max_bytes`` and ``max_items``, and the weights of its entries
    together within ``max_weight``; an entry that is larger or heavier than a body may be stands alone, and of one that
    is too large the sender finds out.
    """
    start, used, carried = 0, 1, 0.0  # one: two brackets, and the first entry has no comma before it
    for position, size in enumerate(sizes):
        weight = weights[position] if weights is not None else 0.0
        if position > start and (
            used + size + 1 > max_bytes or position - start >= max_items or carried + weight > max_weight
        ):
            yield start, position
            start, used, carried = position, 1, 0.0
        used += size + 1
        carried += weight
    if start < len(sizes):
        yield start, len(sizes)
