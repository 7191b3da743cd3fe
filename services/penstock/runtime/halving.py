"""A batch that fails because of one entry, halved down to that entry, so that its neighbours are stored."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from penstock.protocol.errors import Locked, PenstockError, Refused, TooSlow

SPOILING = (Refused, Locked, TooSlow)
"""Errors of a batch that one entry may cause; after any other the whole batch is tried again."""

Item = TypeVar("Item")
Done = TypeVar("Done")


async def in_halves(
    items: Sequence[Item],
    work: Callable[[Sequence[Item], bool], Awaitable[Done]],
    alone: Callable[[Item, PenstockError], Awaitable[Done]],
    left: Callable[[Sequence[Item], PenstockError], Awaitable[Done]] | None = None,
    *,
    errors: tuple[type[PenstockError], ...] = SPOILING,
) -> list[Done]:
    """Work on all items at once; where that fails, on each half, in order, down to the items that fail alone.

    work: stores a part, all or nothing. Its second argument is true once a lock or a statement has timed out:
    it passes that on to ``Store.transaction`` or ``Session.savepoint``, which then wait shortly. alone: handles
    an item that fails alone. left: handles parts that failed whole, or were not tried, after too many timeouts; None:
    ``alone`` does.
    errors: those that one item may cause; any other is raised, and the parts stored before stay stored.
    Returns the outcomes of the parts, in the order of the items.
    """
    done: list[Done] = []
    parts = [items] if items else []
    hurried, waits = False, 60  # behind locks in one batch, each of them a short one
    while parts and waits > 0:
        part = parts.pop()
        try:
            done.append(await work(part, hurried))
            continue
        except errors as exc:
            error = exc
        if not isinstance(error, Refused):
            hurried = True
            waits -= 1 if isinstance(error, Locked) else 4  # which a timed-out statement counts as
        if len(part) == 1:
            done.append(await alone(part[0], error))
        else:
            middle = len(part) // 2
            parts += [part[middle:], part[:middle]]
    is_held = bool(parts) and isinstance(error, Locked)
    for rest in reversed(parts):
        if is_held:  # what is behind many that one key holds may be free
            try:
                done.append(await work(rest, True))
                continue
            except errors as exc:
                is_held = not isinstance(exc, TooSlow)
        if left is None:
            done += [await alone(item, error) for item in rest]
        else:
            done.append(await left(rest, error))
    return done
