"""Objects of the bucket in Postgres: what is stored with a task that names them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.payloads import payload_bound
from penstock.tasks import Enqueued, NewTask
from penstock.wire import reference_of

if TYPE_CHECKING:
    from penstock.store import Session


async def enqueue_sealed(session: Session, tasks: Sequence[NewTask]) -> list[Enqueued]:
    """Insert tasks with their payloads sealed, and note the objects that they name, all or none."""
    vault = session.vault
    sealed = [replace(task, payload=vault.seal(task.payload, payload_bound(task.action))) for task in tasks]
    offered = [task.offered for task in tasks if task.offered is not None]
    if not offered and all(reference_of(task.payload) is None for task in sealed):
        return await session.insert(sealed)
    async with session.savepoint():
        enqueued = await session.insert(sealed)
        await adopt(session, ((task.payload, one.id) for task, one in zip(sealed, enqueued, strict=True)))
        await doom(session, offered)
    return enqueued


async def adopt(session: Session, stored: Iterable[tuple[str, int]]) -> None:
    """Note of (text as it is stored, task) pairs the objects that they name."""
    found = [(reference.name, task_id) for text, task_id in stored if (reference := reference_of(text)) is not None]
    if found:
        await session.fetch("adopt_objects", [name for name, _ in found], [task_id for _, task_id in found])


async def doom(session: Session, texts: Iterable[str]) -> None:
    """Have the objects that these texts name deleted, for nobody needs them any more."""
    names = [reference.name for text in texts if (reference := reference_of(text)) is not None]
    if names:
        await session.fetch("doom_objects", names)
