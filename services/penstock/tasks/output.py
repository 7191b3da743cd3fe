"""The output of tasks in Postgres: parts as workers report them, kept as long as the record of their task."""

from collections.abc import Sequence
from typing import Any

from penstock.db.session import Session
from penstock.payloads.codec import aad_of
from penstock.protocol.errors import PayloadLost, PayloadUnavailable
from penstock.protocol.json_text import utf8_size
from penstock.protocol.output import Seen, Shown, decode_entries
from penstock.protocol.reports import Output

_OF_TASK = 10  # times the limit of one attempt
_SEALED = 2  # times its bytes: what is encrypted, and the escapes of JSON, take more than the worker counted


async def record(session: Session, given: Sequence[Output], *, limit_bytes: int) -> int:
    """Store parts, also of older claims than the current one; returns how many are new."""
    encode = session.codec.encode
    parts = {(one.task_id, one.claim, one.number): one for one in given}
    rows = [
        (*key, encode(one.entries, aad_of("output", one.task_id)), one.dropped, one.worker)
        for key, one in sorted(parts.items())  # so that no two resulters deadlock
    ]
    ((stored, full),) = await session.fetch("record_output", *map(list, zip(*rows, strict=True)), limit_bytes * _SEALED)
    if full:
        await session.fetch("trim_output", full, limit_bytes * _SEALED * _OF_TASK)
    return int(stored)


async def read(session: Session, task_id: int, seen: Seen, *, room_bytes: int) -> tuple[list[Shown], bool]:
    """The parts of a task that its reader does not have, oldest first, and whether more have no room."""
    ranges = [[one[place] for one in seen.ranges] for place in range(3)]
    rows = await session.fetch("read_output", task_id, *ranges, room_bytes)
    return _shown(session, task_id, rows), sum(utf8_size(row["entries"]) for row in rows) >= room_bytes


async def read_newest(session: Session, task_id: int, *, room_bytes: int) -> list[Shown]:
    """The newest parts of a task, the oldest of them first."""
    return _shown(session, task_id, await session.fetch("read_newest_output", task_id, room_bytes))


def _shown(session: Session, task_id: int, rows: Sequence[Any]) -> list[Shown]:
    shown = []
    for row in rows:
        unread = None
        try:
            entries = decode_entries(session.codec.decode_inline(row["entries"], aad_of("output", task_id)))
        except (PayloadUnavailable, PayloadLost, ValueError) as exc:
            entries, unread = [], str(exc)
        shown.append(Shown(row["claim"], row["number"], entries, row["dropped"], unread))
    return shown
