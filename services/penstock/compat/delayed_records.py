"""Delayed records for Kafka: stored, replaced, cancelled, and published by tasks of kafka.publish when they are due.

A task publishes the due records of one ordering key by due time and arrival. One supervisor publishes at a time, and an
ordering key has one task at a time, so records of a key keep their order even if processes are killed.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from penstock.db.notify import DELAYED_RECORDS, Listener, Notifier
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.protocol.checks import read_name
from penstock.protocol.errors import InvalidParams, PenstockError, Refused
from penstock.protocol.json_text import utf8_size
from penstock.protocol.requests import pack
from penstock.protocol.task import KEY_MAX_CHARS, MAX_ATTEMPTS_LIMIT, NewTask
from penstock.runtime import metrics
from penstock.runtime.halving import in_halves
from penstock.runtime.logs import log
from penstock.runtime.loop import SideTask
from penstock.runtime.periodic import is_set_within, repeat
from penstock.tasks import enqueue

ACTION = "kafka.publish"
MAX_AT_ONCE = 2000
ROUND_BYTES = 16 * 1024 * 1024  # of records, which are in memory several times
# A due record waits so long for the live task of its ordering key, to share the next task with others of the key: each
# task passes both queues, however many records it has. Limited, because every round scans the waiting records.
KEY_WAIT_SECONDS = 10.0
_RECORDS_TOGETHER = 200
_BYTES_TOGETHER = 65_536
_KEY_MAX_BYTES = 1000  # an entry of an index holds 2700
_LAST_MS = 253_402_300_799_000  # 9999-12-31T23:59:59Z
LOOK_SECONDS = 1.0
_HELD_SECONDS = 0.05  # while another supervisor publishes
_GATHER_SECONDS = 0.02  # records due within it are published together; also the pause before a busy key is read again
_REST = 2  # the pause after a round that published nothing is so many times its duration
_COUNT_SECONDS = 60.0
_COUNT_REST = 50


class DelayedRecord(NamedTuple):
    """A delayed record to store; its fields are the columns of put_delayed_records."""

    source: str
    key: bytes  # unique in its source, from :func:`key_of`
    due_at: datetime
    ordering_key: str
    record: str  # JSON of a record for kafka.publish
    last: str | None = None  # JSON of another one, published after it
    variant: bytes = b""  # distinguishes several records of one key
    partition: int | None = None  # of the topic it was read from
    held: bool = False  # that partition has not been read to its end


def key_of(given: bytes) -> bytes:
    """The key, or the digest of one too long for an index."""
    return given if len(given) <= _KEY_MAX_BYTES else b"sha256:" + hashlib.sha256(given).digest()


def ordering_key_of(prefix: str, given: str) -> str:
    """The ordering key of the tasks; a digest if it is too long or holds what no key may hold."""
    with suppress(InvalidParams):
        return read_name(f"{prefix}:{given}", "ordering_key", KEY_MAX_CHARS)
    return f"{prefix}#{hashlib.sha256(given.encode('utf-8', 'surrogatepass')).hexdigest()}"


def instant_of(epoch_ms: int) -> datetime:
    """The instant, limited to the years 1970 to 9999."""
    milliseconds = min(max(epoch_ms, 0), _LAST_MS)
    return datetime.fromtimestamp(milliseconds // 1000, UTC).replace(microsecond=milliseconds % 1000 * 1000)


async def put(session: Session, wanted: Sequence[DelayedRecord], *, replaces: bool) -> None:
    """Store records with distinct keys and variants. replaces: what is stored of the same ones."""
    if not wanted:
        return
    await session.plan_for(len(wanted))
    columns = map(list, zip(*wanted, strict=True))
    is_new = {row["place"]: row["fresh"] for row in await session.fetch("put_delayed_records", *columns, replaces)}
    outcomes = {True: "stored", False: "replaced", None: "known"}
    _count(Counter((one.source, outcomes[is_new.get(place)]) for place, one in enumerate(wanted, 1)))


async def cancel(session: Session, source: str, keys: Sequence[bytes]) -> set[bytes]:
    """Cancel the records of these keys; returns the keys that had any. Records already in a task are published."""
    if not keys:
        return set()
    await session.plan_for(len(keys))
    cancelled = [row["key"] for row in await session.fetch("cancel_delayed_records", source, list(keys))]
    _count(Counter((source, "cancelled") for _ in cancelled))
    return set(cancelled)


async def publish_due(session: Session) -> int | None:
    """Enqueue tasks for due records, inside a transaction; returns how many, or None while another supervisor does.

    Stops records that Postgres rejects, which count too, and postpones ordering keys that other transactions lock.
    """
    if not await session.value("lock_publishing"):
        return None
    rows = await session.fetch("claim_due_records", MAX_AT_ONCE, KEY_WAIT_SECONDS, ROUND_BYTES)
    locked: set[str] = set()  # ordering keys without further records in this round, which would overtake earlier ones

    async def publish(part: Sequence[Any], hurried: bool) -> int:
        free = [row for row in part if row["ordering_key"] not in locked]
        async with session.savepoint(hurried=hurried):
            await enqueue.enqueue(session, list(_tasks_of(free)), source="delayed_record")
            await session.fetch("delete_delayed_records", [row["id"] for row in free])
        metrics.DELAYED_RECORD_LATENESS_SECONDS.observe_many([row["late_seconds"] for row in free])
        _count(Counter((row["source"], "published") for row in free))
        return len(free)

    async def give_up(part: Sequence[Any], error: PenstockError) -> int:
        first = part[0]
        if isinstance(error, Refused):  # of this one alone
            await session.fetch("stop_delayed_record", first["id"])
            log.error("delayed_record_stopped", id=first["id"], source=first["source"], reason=str(error))
            return 1
        locked.update(row["ordering_key"] for row in part)
        log.warning("delayed_records_postponed", records=len(part), first=first["id"], reason=str(error))
        return 0

    return sum(await in_halves(rows, publish, lambda row, error: give_up([row], error), give_up))


def _tasks_of(rows: Iterable[Any]) -> Iterable[NewTask]:
    """Records of one ordering key share a task within its limits, in the rows' order; one with a ``last`` is alone."""
    by_key: dict[str, list[Any]] = {}
    for row in rows:
        by_key.setdefault(row["ordering_key"], []).append(row)
    for key, of_key in by_key.items():
        sizes = [utf8_size(row["record"]) for row in of_key]
        weights = [1 if row["last"] is None else _RECORDS_TOGETHER for row in of_key]
        for start, end in pack(
            sizes, weights, max_bytes=_BYTES_TOGETHER, max_items=_RECORDS_TOGETHER, max_weight=_RECORDS_TOGETHER
        ):
            records, last = ",".join(row["record"] for row in of_key[start:end]), of_key[start]["last"]
            payload = f'{{"records":[{records}]}}' if last is None else f'{{"records":[{records}],"then":[{last}]}}'
            # Without run_at: a past one sorts before the position that claims have reached.
            yield NewTask(ACTION, payload, ordering_key=key, max_attempts=MAX_ATTEMPTS_LIMIT)


def _count(changes: Counter[tuple[str, str]]) -> None:
    for (source, outcome), count in changes.items():
        metrics.DELAYED_RECORD_CHANGES.labels(source, outcome).inc(count)


def side_tasks(store: Store, notifier: Notifier, listener: Listener) -> Mapping[str, SideTask]:
    """What publishes due records and counts all. listener: wakes it when a record that is due soon was stored."""
    woken = listener.also(DELAYED_RECORDS)
    counted: set[str] = set()  # sources

    async def publish_or_wait() -> float:
        """Wait until a record is due, or publish in one transaction; returns the pause in seconds."""
        woken.clear()
        wait: float | None = await store.value("read_delayed_record_wait")
        if wait is None or wait > 0:
            await is_set_within(woken, LOOK_SECONDS if wait is None else min(LOOK_SECONDS, wait))
            return 0
        started = monotonic()
        async with store.transaction() as session:
            published = await publish_due(session)
        seconds = monotonic() - started
        if published is None:
            return _HELD_SECONDS
        if not published:
            return max(_GATHER_SECONDS, _REST * seconds)
        notifier.wake()
        log.debug("delayed_records_published", records=published, seconds=round(seconds, 4))
        return 0 if published >= MAX_AT_ONCE else _GATHER_SECONDS

    async def count() -> float:
        """Set the gauge; returns the pause in seconds, which is long: counting reads every record."""
        started = monotonic()
        counts = {row["source"]: row["count"] for row in await store.fetch("count_delayed_records")}
        counted.update(counts)
        for source in counted:
            metrics.DELAYED_RECORDS.labels(source).set(counts.get(source, 0))
        return max(_COUNT_SECONDS, _COUNT_REST * (monotonic() - started))

    return {
        "delayed records": partial(repeat, "delayed records", publish_or_wait),
        "count delayed records": partial(repeat, "count delayed records", count),
    }
