"""Packing: several entries in one body, limited in bytes, number and weight."""

import math
from collections.abc import Iterator, Sequence


def join_batch(items: Sequence[str]) -> str:
    """A body of entries; a single one is not an array."""
    return items[0] if len(items) == 1 else f"[{','.join(items)}]"


def pack(
    sizes: Sequence[int],
    weights: Sequence[float] | None = None,
    *,
    max_bytes: int,
    max_items: int,
    max_weight: float = math.inf,
) -> Iterator[tuple[int, int]]:
    """Slices (start, end) of entries of these UTF-8 sizes, each a body within the limits; one too large is alone."""
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
