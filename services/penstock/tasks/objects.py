"""Objects of the bucket: which task names them, and whose workers may read them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from penstock.db.session import Session
from penstock.protocol.sealed import reference_of


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


async def queues_of_kinds(
    session: Session, kinds: Collection[tuple[str, str | None]]
) -> dict[tuple[str, str | None], str | None]:
    """The queue to which tasks of each (action, labels as JSON text) would go now; None: the outbound queue."""
    rows = await session.fetch("find_routes", [action for action, _ in kinds], [labels for _, labels in kinds])
    return {kind: row["queue"] for kind, row in zip(kinds, rows, strict=True)}


async def queues_of_tasks(session: Session, task_ids: Collection[int]) -> dict[int, str]:
    """The queue to which waiting tasks would go now, without those of the outbound queue."""
    if not task_ids:
        return {}
    return {row["id"]: row["queue"] for row in await session.fetch("find_queues", list(task_ids))}
