"""Pack ids: all tasks of one outbound message under one name, ``pack:<claim>:<task ids>``, for a shared result.

Task ids, and places in a message, are written as ranges in their order: ``17-101,140``.
"""

from collections.abc import Sequence
from itertools import pairwise

from penstock.protocol.requests import INT8_MAX

PACK_MAX_TASKS = 1000
PACK_FROM = 8  # tasks of a message from which it has a pack id
PACK_ID_MAX_BYTES = 2048  # with its token; task ids with more gaps have none
_TOKEN_BYTES = 64
_PREFIX = "pack"
_DIGITS = 19


def name_pack(claim: int, task_ids: Sequence[int]) -> str | None:
    """The pack id without its token; None where it would be too long."""
    text = f"{_PREFIX}:{claim}:{ranges_of(task_ids)}"
    return text if len(text) <= PACK_ID_MAX_BYTES - _TOKEN_BYTES else None


def parse_pack_id(text: str) -> tuple[int, Sequence[int]]:
    """Claim and task ids, with or without a token. Raises ValueError."""
    prefix, claim, ranges, token = (*text.split(":", 3), "", "", "", "")[:4]
    is_right = prefix == _PREFIX and _is_number(claim) and int(claim) <= INT8_MAX
    if not is_right or not (token.isalnum() or text.count(":") == 2):
        raise ValueError(f"{text[:100]!r} is not pack:<claim>:<task ids>:<token>")
    return int(claim), parse_ranges(ranges)


def ranges_of(numbers: Sequence[int]) -> str:
    """Numbers in their order, those that follow each other as one range."""
    first, count = numbers[0], len(numbers)
    if numbers[-1] == first + count - 1 and [*numbers] == [*range(first, first + count)]:
        return _range(first, numbers[-1])
    starts = [0, *(place for place, (left, right) in enumerate(pairwise(numbers), 1) if right != left + 1), count]
    return ",".join(_range(numbers[start], numbers[end - 1]) for start, end in pairwise(starts))


def parse_ranges(text: str) -> Sequence[int]:
    """The numbers. Raises ValueError."""
    found: list[int] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        if not _is_number(low) or (dash and not _is_number(high)):
            raise ValueError(f"{part[:100]!r} is no number or range of numbers")
        first, last = int(low), int(high or low)
        if last < first or last > INT8_MAX or len(found) + last - first >= PACK_MAX_TASKS:
            raise ValueError(f"{text[:100]!r} is not at most {PACK_MAX_TASKS} numbers in ranges such as 17-101,140")
        found += range(first, last + 1)
    return found


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) <= _DIGITS
