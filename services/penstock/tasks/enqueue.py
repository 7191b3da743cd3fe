"""Store new tasks, receipts and rejected messages; note which objects of the bucket tasks name."""

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

import asyncpg
from msgspec.structs import replace

from penstock.db.session import Session, columns_of
from penstock.payloads.codec import payload_aad
from penstock.protocol.answers import Accepted
from penstock.protocol.json_text import body_bytes
from penstock.protocol.record import view_of
from penstock.protocol.sealed import reference_of
from penstock.protocol.task import NewTask, State
from penstock.runtime import metrics
from penstock.runtime.tracing import active

Kind = tuple[str, str | None]  # of tasks: their action, and their labels as JSON text

# Members of NewTask, in the order of the statements' parameters.
_PLAIN = ("action", "payload", "run_at", "delay_seconds", "priority", "max_attempts", "timeout_seconds")
_KEYED = ("unique_key", "ordering_key", "labels", "expires_at", "expires_in_seconds", "limit_key")
_DEADLOCK_TRIES = 3
_RETRY_PAUSE_SECONDS = 0.1  # at most: two that wait for each other give up at the same moment, and would meet again


async def enqueue(session: Session, tasks: Sequence[NewTask], *, source: str | None = None) -> list[Accepted]:
    """Insert tasks with their payloads encoded, all or none; the answers are in the order of ``tasks``. source: where
    metrics say that they come from; None: they are counted elsewhere."""
    if not tasks:
        return []
    spans = active.active()
    if spans is None:
        enqueued = await _enqueue(session, tasks)
    else:
        enqueued = await spans.enqueuing(tasks, partial(_enqueue, session))
    if source is not None:
        count_enqueued(tasks, enqueued, source)
    return enqueued


def count_enqueued(tasks: Iterable[NewTask], enqueued: Iterable[Accepted], source: str) -> None:
    """Count accepted tasks and duplicates in the metrics."""
    counts = Counter((task.action, answer["duplicate"]) for task, answer in zip(tasks, enqueued, strict=True))
    for (action, is_duplicate), count in counts.items():
        if is_duplicate:
            metrics.DUPLICATES.labels(action).inc(count)
        else:
            metrics.ENQUEUED.labels(action, source).inc(count)


async def _enqueue(session: Session, tasks: Sequence[NewTask]) -> list[Accepted]:
    if not session.codec.is_on:
        return await insert(session, tasks)
    sealed = [replace(t, payload=session.codec.encode(t.payload, payload_aad(t.action, t.tenant))) for t in tasks]
    if all(t.offered is None and reference_of(t.payload) is None for t in sealed):
        return await insert(session, sealed)
    async with session.savepoint():
        enqueued = await insert(session, sealed)
        await reference_objects(session, ((t.payload, one.id) for t, one in zip(sealed, enqueued, strict=True)))
        # What a refused task names may be offered again, as by a retry of its rejected message.
        taken = [t for t, one in zip(tasks, enqueued, strict=True) if not (one.duplicate and t.on_duplicate == "error")]
        await delete_objects_later(session, [t.offered for t in taken if t.offered is not None])
    return enqueued


async def insert(session: Session, tasks: Sequence[NewTask]) -> list[Accepted]:
    """As ``enqueue``, of tasks whose payloads are encoded already."""
    metrics.BATCH_SIZE.labels("enqueue").observe(len(tasks))
    if all(t.is_plain for t in tasks):
        if active.active() is None:
            rows = await session.fetch("enqueue_plain_tasks", *columns_of(tasks, *_PLAIN))
        else:
            rows = await session.fetch("enqueue_traced_tasks", *columns_of(tasks, *_PLAIN, "trace"))
        return [Accepted(id=row[0], state=State.SCHEDULED, duplicate=False) for row in rows]
    return await _insert_in_parts(session, _cut_at_other_scopes(tasks))


async def enqueue_and_notify(session: Session, task: NewTask, channel: str, payload: str) -> Accepted | None:
    """Insert a task without keys, and wake those who listen by the same commit; None if it cannot carry that."""
    if not task.is_plain or session.codec.is_on or active.active() is not None:
        return None
    try:
        rows = await session.fetch("enqueue_task_and_notify", *columns_of([task], *_PLAIN), channel, payload)
    except asyncpg.ProgramLimitExceededError:  # a full queue of notifications must not keep a task out
        return None
    metrics.BATCH_SIZE.labels("enqueue").observe(1)
    return Accepted(id=rows[0][0], state=State.SCHEDULED, duplicate=False)


async def _insert_in_parts(session: Session, parts: Sequence[Sequence[NewTask]]) -> list[Accepted]:
    tasks = [task for part in parts for task in part]
    tries = _DEADLOCK_TRIES
    while True:
        tries -= 1
        try:
            async with session._connection.transaction():
                await session.plan_for(len(tasks))
                enqueued = [answer for part in parts for answer in await _enqueue_keyed(session, part)]
                made = () if active.active() is None else zip(tasks, enqueued, strict=True)
                traces = {one.id: task.trace for task, one in made if task.trace and not one.duplicate}
                if traces:
                    await session.fetch("note_traces", list(traces), list(traces.values()))
                return enqueued
        except (asyncpg.DeadlockDetectedError, asyncpg.LockNotAvailableError) as exc:
            # Each statement takes its keys in sorted order, but several together do not, and the transaction may hold
            # others already. The wait for a lock ends before Postgres looks for a deadlock.
            is_held = isinstance(exc, asyncpg.LockNotAvailableError) and len(parts) == 1
            if not tries or is_held:
                raise
        await asyncio.sleep(random.uniform(0, _RETRY_PAUSE_SECONDS))


async def _enqueue_keyed(session: Session, tasks: Sequence[NewTask]) -> list[Accepted]:
    rows = await session.fetch(
        "enqueue_keyed_tasks",
        *columns_of(tasks, *_PLAIN, *_KEYED),
        [t.unique == "live" for t in tasks],
        [None if isinstance(t.unique, str) else t.unique for t in tasks],
        [t.tenant for t in tasks],
    )
    states = {row["id"]: row["state"] for row in rows if row["state"] is not None}
    pairs = zip(rows, tasks, strict=True)
    replacing = [(row["id"], task) for row, task in pairs if task.on_duplicate == "replace" and not row["fresh"]]
    replaced: dict[int, str] = {}
    while replacing:  # each task once a turn: what one leaves stays as the one before has asked
        first = dict(reversed(replacing))
        replaced |= await _replace(session, first)
        replacing = [(task_id, task) for task_id, task in replacing if first[task_id] is not task]
    states |= replaced
    earlier = {row["id"] for row in rows if not row["fresh"]} - states.keys()
    if earlier:
        states |= {row["id"]: row["state"] for row in await session.fetch("read_states", list(earlier))}
    # A first task deleted between the two statements must have succeeded.
    return [
        view_of(
            Accepted,
            row,
            state=State(states.get(row["id"], State.SUCCESS)),
            duplicate=not row["fresh"],
            replaced=not row["fresh"] and row["id"] in replaced if task.on_duplicate == "replace" else None,
        )
        for row, task in zip(rows, tasks, strict=True)
    ]


async def _replace(session: Session, tasks: Mapping[int, NewTask]) -> dict[int, str]:
    given = columns_of(tasks.values(), "payload", "run_at", "delay_seconds")
    priorities = [t.priority if t.replaces_priority else None for t in tasks.values()]
    expiries = columns_of(tasks.values(), "expires_at", "expires_in_seconds")
    rows = await session.fetch("replace_tasks", list(tasks), *given, priorities, *expiries)
    return {row["id"]: row["state"] for row in rows}


async def record_receipts(session: Session, message_ids: Sequence[str]) -> set[str]:
    """Record inbound messages as accepted; returns the new ones."""
    return {row[0] for row in await session.fetch("record_receipts", list(message_ids))}


async def insert_rejected(session: Session, source: str, bodies: Sequence[tuple[str | bytes, str]]) -> None:
    """Store rejected messages, as (body, reason) pairs."""
    if bodies:
        texts = [b if isinstance(b, bytes) else body_bytes(b) for b, _ in bodies]
        reasons = [reason.replace("\0", "\ufffd") for _, reason in bodies]
        await session.fetch("insert_rejected", [source] * len(bodies), texts, reasons)
        metrics.REJECTED.labels(source).inc(len(bodies))


def _cut_at_other_scopes(tasks: Sequence[NewTask]) -> list[Sequence[NewTask]]:
    """Cut tasks into consecutive parts, where those of a unique key differ in ``unique``: their answers may differ.

    Within a part the first task of a key decides for all. So most batches are one statement, which takes all keys in
    the one order that every transaction uses.
    """
    parts: list[Sequence[NewTask]] = []
    scopes: dict[tuple[str, str | None, str], str | float] = {}
    start = 0
    for place, task in enumerate(tasks):
        if task.unique_key is None:
            continue
        key = task.action, task.tenant, task.unique_key
        if scopes.get(key, task.unique) != task.unique:
            parts.append(tasks[start:place])
            scopes, start = {}, place
        scopes[key] = task.unique
    return [*parts, tasks[start:]]


async def reference_objects(session: Session, stored: Iterable[tuple[str, int]]) -> None:
    """Note the objects named by (stored text, task id) pairs as theirs."""
    found = [(reference.name, task_id) for text, task_id in stored if (reference := reference_of(text)) is not None]
    if found:
        await session.fetch("reference_objects", [name for name, _ in found], [task_id for _, task_id in found])


async def delete_objects_later(session: Session, texts: Iterable[str]) -> None:
    """Schedule the objects that these texts name for deletion."""
    names = [reference.name for text in texts if (reference := reference_of(text)) is not None]
    if names:
        await session.fetch("delete_objects_later", names)


async def routes_of_kinds(session: Session, kinds: Collection[Kind]) -> dict[Kind, asyncpg.Record]:
    """The route by which tasks of each kind would go now, and its queue; nulls: the outbound queue."""
    rows = await session.fetch("find_routes", [action for action, _ in kinds], [labels for _, labels in kinds])
    return dict(zip(kinds, rows, strict=True))
