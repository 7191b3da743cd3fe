"""Packing: many entries in one body, within the bytes and the number that a message may hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def join_batch(items: Sequence[str]) -> str:
    """One body of several entries; a single one travels bare."""
    return items[0] if len(items) == 1 else f"[{','.join(items)}]"


def pack(sizes: Sequence[int], *, max_bytes: int, max_items: int) -> Iterator[tuple[int, int]]:
    """Cut entries of these UTF-8 sizes into bodies: (start, end) slices, in order.

    Each body with its brackets and commas stays within ``max_bytes`` and ``max_items``; an entry that is larger
    than a body may be stands alone, and the sender finds out.
    """
    start, used = 0, 2
    for position, size in enumerate(sizes):
        if position > start and (used + size + 1 > max_bytes or position - start >= max_items):
            yield start, position
            start, used = position, 2
        used += size + 1
    if start < len(sizes):
        yield start, len(sizes)
