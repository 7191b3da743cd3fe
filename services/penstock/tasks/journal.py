"""The journals of tasks in Postgres."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import asyncpg

from penstock.db.session import Session, columns_of
from penstock.payloads.codec import PayloadCodec, aad_of
from penstock.protocol import answers
from penstock.protocol.errors import PayloadLost, PayloadUnavailable
from penstock.protocol.journal import StepKey, StepPlace, carried, decode_entry
from penstock.protocol.record import view_of
from penstock.protocol.reports import Stepped
from penstock.protocol.sealed import reference_of
from penstock.protocol.views import raw
from penstock.tasks import views
from penstock.tasks.enqueue import reference_objects

Owned = TypeVar("Owned", bound=tuple[int, Any])


async def record(session: Session, steps: Sequence[Stepped], *, most: int, most_bytes: int) -> set[tuple[int, StepKey]]:
    """Add finished steps to the journals of live tasks; returns those without room, or with another task's object. A
    step of an older claim is kept too, as it has run; the newest claim's counts where there are two."""
    newest: dict[tuple[int, StepKey], Stepped] = {}
    for step in sorted(steps, key=attrgetter("claim"), reverse=True):
        newest.setdefault((step.task_id, step.entry.key), step)
    stolen = await name_others_objects(session, {key: step.entry.value for key, step in newest.items()})
    # In the order of the index, so that no two resulters deadlock.
    given = [newest[key] for key in sorted(newest) if key not in stolen]
    entries = [step.entry for step in given]
    texts = [carried(e.with_value(session.codec.encode(e.value, aad_of("step", s.task_id, *e.key)), None))
             for s, e in zip(given, entries, strict=True)]  # fmt: skip
    rows = await session.fetch(
        "record_entries", *columns_of(given, "task_id", "claim"),
        *columns_of(entries, "name", "repetition", "position"), texts,
        *columns_of(entries, "has_failed", "at", "seconds", "tries"), *columns_of(given, "worker"), most, most_bytes,
    )  # fmt: skip
    await reference_objects(session, ((step.entry.value, step.task_id) for step in given))
    return stolen | {(row["task_id"], (row["name"], row["repetition"])) for row in rows}


async def name_others_objects(session: Session, stored: Mapping[Owned, str]) -> set[Owned]:
    """Those of the texts, by task id and what else identifies them, that name an object of another task."""
    names = {key: reference.name for key, text in stored.items() if (reference := reference_of(text)) is not None}
    if not names:
        return set()
    owners = {tuple(row) for row in await session.fetch("find_owners", list(names.values()))}
    owned = {name for name, _ in owners}
    return {key for key, name in names.items() if name in owned and (name, key[0]) not in owners}


async def rewind(session: Session, task_id: int, label: str) -> list[str]:
    """Delete the step of that label, such as ``charge#2``, and all later ones; returns the labels that there were."""
    rows = await session.fetch("read_journals", [task_id], 0)
    places = [StepPlace(name=row["name"], repetition=row["repetition"]) for row in rows]
    for place in places:
        if place.label == label:
            await session.fetch("rewind_journal", task_id, *place.key)
    return [place.label for place in places]


def shown(codec: PayloadCodec, row: asyncpg.Record) -> answers.FinishedStep:
    """A row of the statement ``read_journals`` for display."""
    text = unread = None
    if row["entry"] is None:
        unread = views.FULL
    else:
        entry = decode_entry(row["entry"])
        try:
            text = codec.decode_inline(entry.value, aad_of("step", row["task_id"], *entry.key))
        except (PayloadUnavailable, PayloadLost) as exc:
            unread = str(exc)
    members = ("error", "result") if row["failed"] else ("result", "error")
    return view_of(answers.FinishedStep, row, **dict(zip(members, (raw(text), None), strict=True)), unread=unread)
