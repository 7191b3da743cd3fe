"""Armed schedules: armed, replaced, called off, and made tasks of kafka.publish when they are due.

A schedule is known by its source and its key. When it is due it becomes a record of a task, with others of its ordering
key that are due by then, in the order of their times and of their arrival. One supervisor fires at a time, and a key
goes one task at a time, so records of a key are published in that order whatever is killed meanwhile.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from penstock.db.session import Session
from penstock.protocol.errors import PenstockError, Refused
from penstock.protocol.json_text import utf8_size
from penstock.protocol.task import KEY_MAX_CHARS, MAX_ATTEMPTS_LIMIT, NewTask
from penstock.runtime import metrics
from penstock.runtime.halving import in_halves
from penstock.runtime.logs import get_logger
from penstock.tasks import enqueue

ACTION = "kafka.publish"
FIRED_AT_ONCE = 2000
# One that is due waits so long for its key to be free, to go with others of the key; each task costs the key a way
# through both queues, however many records it holds. Not for ever, for whatever waits so is looked at in each round.
PATIENCE_SECONDS = 10.0
_RECORDS_TOGETHER = 200
_BYTES_TOGETHER = 65_536
_KEY_MAX_BYTES = 1000  # an entry of an index holds 2700
_LAST_MS = 253_402_300_799_000  # 9999-12-31T23:59:59Z

log = get_logger()


@dataclass(frozen=True, slots=True)
class Armed:
    """A schedule to arm.

    key: within its source, as :func:`key_of` makes it. variant: tells apart those that one key may have several of.
    due_ms: epoch milliseconds. record, last: JSON texts of records of kafka.publish, the second published when the
    first has arrived. partition: of the topic that it was read from. held: that one has not been read to its end.
    """

    source: str
    key: bytes
    due_ms: int
    ordering_key: str
    record: str
    last: str | None = None
    variant: bytes = b""
    partition: int | None = None
    held: bool = False


def key_of(given: bytes) -> bytes:
    """A key that an index can hold: as it is, or a digest of one that is long."""
    return given if len(given) <= _KEY_MAX_BYTES else b"sha256:" + hashlib.sha256(given).digest()


def ordering_key_of(prefix: str, given: str) -> str:
    """An ordering key of tasks; a digest stands for one that is long, or that Postgres cannot hold."""
    key = f"{prefix}:{given}"
    if len(key) <= KEY_MAX_CHARS and "\0" not in key:
        return key
    return f"{prefix}#{hashlib.sha256(given.encode('utf-8', 'surrogatepass')).hexdigest()}"


def instant_of(epoch_ms: int) -> datetime:
    """As an instant; what lies before 1970 or behind the year 9999 as the nearest that does not."""
    milliseconds = min(max(epoch_ms, 0), _LAST_MS)
    return datetime.fromtimestamp(milliseconds // 1000, UTC).replace(microsecond=milliseconds % 1000 * 1000)


async def arm(session: Session, wanted: Sequence[Armed], *, replaces: bool) -> list[bool | None]:
    """Arm these, no key and variant twice; for each whether it is new, or has replaced one, or None: it was known."""
    if not wanted:
        return []
    await session.plan_for(len(wanted))
    rows = await session.fetch(
        "arm_schedules", [a.source for a in wanted], [a.key for a in wanted], [a.variant for a in wanted],
        [instant_of(a.due_ms) for a in wanted], [a.partition for a in wanted], [a.held for a in wanted],
        [a.ordering_key for a in wanted], [a.record for a in wanted], [a.last for a in wanted], replaces,
    )  # fmt: skip
    fresh: list[bool | None] = [None] * len(wanted)
    for row in rows:
        fresh[row["place"] - 1] = row["fresh"]
    counts = Counter(
        (one.source, "known" if new is None else "armed" if new else "replaced")
        for one, new in zip(wanted, fresh, strict=True)
    )
    _count(counts)
    return fresh


async def disarm(session: Session, source: str, keys: Sequence[bytes]) -> set[bytes]:
    """Call off whatever these keys have armed; returns the keys that had something. What is a task by now stays one."""
    if not keys:
        return set()
    await session.plan_for(len(keys))
    gone = [row["key"] for row in await session.fetch("disarm_schedules", source, list(keys))]
    if gone:
        _count({(source, "cancelled"): len(gone)})
    return set(gone)


async def fire_armed(session: Session, *, limit: int = FIRED_AT_ONCE) -> int | None:
    """Make tasks of up to so many that are due, inside a transaction; None while somebody else does."""
    if not await session.value("lock_firing"):
        return None
    return await _fire(session, await session.fetch("claim_armed", limit, PATIENCE_SECONDS))


async def _fire(session: Session, rows: Sequence[Any]) -> int:
    """One whose values Postgres refuses is stopped; those whose ordering key another transaction holds wait; neither
    harms another. Returns how many were dealt with."""
    locked: set[str] = set()  # of these keys nothing more goes, or it would pass what came before it

    async def fire(part: Sequence[Any], hurried: bool) -> int:
        free = [row for row in part if row["ordering_key"] not in locked] if locked else part
        async with session.savepoint(hurried=hurried):
            await _fire_all(session, free)
        return len(free)

    async def stop(row: Any, error: PenstockError) -> int:
        if isinstance(error, Refused):
            await session.fetch("stop_armed", row["id"])
            log.error("armed_stopped", id=row["id"], source=row["source"], reason=str(error))
            return 1
        return await leave([row], error)

    async def leave(part: Sequence[Any], error: PenstockError) -> int:
        locked.update(row["ordering_key"] for row in part)
        log.warning("armed_put_off", schedules=len(part), first=part[0]["id"], reason=str(error))
        return 0

    return sum(await in_halves(rows, fire, stop, leave))


async def _fire_all(session: Session, rows: Sequence[Any]) -> None:
    tasks = list(_tasks_of(rows))
    await enqueue.enqueue(session, tasks)
    await session.fetch("delete_armed", [row["id"] for row in rows])
    metrics.ENQUEUED.labels(ACTION, "armed").inc(len(tasks))
    metrics.ARMED_LATENESS_SECONDS.observe_many([row["late_seconds"] for row in rows])
    _count(Counter((row["source"], "fired") for row in rows))


def _tasks_of(rows: Iterable[Any]) -> Iterable[NewTask]:
    """Those of one ordering key together, as far as they fit, but never behind a last record: in the rows' order."""
    open_tasks: dict[str, tuple[list[str], int]] = {}
    for row in rows:
        key, record, last = row["ordering_key"], row["record"], row["last"]
        size = utf8_size(record)
        records, together = open_tasks.get(key, ([], 0))
        if records and (last is not None or len(records) >= _RECORDS_TOGETHER or together + size > _BYTES_TOGETHER):
            yield _task(key, records)
            records, together = [], 0
        if last is not None:
            open_tasks.pop(key, None)
            yield _task(key, [record], last)
        else:
            open_tasks[key] = ([*records, record] if records else [record], together + size)
    for key, (records, _) in open_tasks.items():
        yield _task(key, records)


def _task(ordering_key: str, records: Sequence[str], last: str | None = None) -> NewTask:
    """No run_at: in the order of what is due, an instant that has passed stands behind where claims have got to."""
    then = "" if last is None else f',"then":[{last}]'
    payload = f'{{"records":[{",".join(records)}]{then}}}'
    return NewTask(ACTION, payload, ordering_key=ordering_key, max_attempts=MAX_ATTEMPTS_LIMIT)


def _count(counts: Any) -> None:
    for (source, outcome), count in counts.items():
        metrics.ARMED_CHANGES.labels(source, outcome).inc(count)
