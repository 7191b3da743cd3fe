"""Objects of the bucket in Postgres: what is stored with a task that names them, and whose workers may read them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Protocol

from penstock.db.session import Session
from penstock.protocol.sealed import reference_of


class RunsStatements(Protocol):
    """What runs a statement of that name, as a session does."""

    async def fetch(self, name: str, /, *args: Any) -> object: ...


async def reference_objects(session: RunsStatements, stored: Iterable[tuple[str, int]]) -> None:
    """Note of (text as it is stored, task) pairs the objects that they name."""
    found = [(reference.name, task_id) for text, task_id in stored if (reference := reference_of(text)) is not None]
    if found:
        await session.fetch("reference_objects", [name for name, _ in found], [task_id for _, task_id in found])


async def delete_objects_later(session: RunsStatements, texts: Iterable[str]) -> None:
    """Have the objects that these texts name deleted, for nobody needs them any more."""
    names = [reference.name for text in texts if (reference := reference_of(text)) is not None]
    if names:
        await session.fetch("delete_objects_later", names)


async def queues_of_kinds(
    session: Session, kinds: Collection[tuple[str, str | None]]
) -> dict[tuple[str, str | None], str | None]:
    """To which queue tasks of each (action, labels as JSON text) would go now; None: the outbound queue."""
    rows = await session.fetch("find_routes", [action for action, _ in kinds], [labels for _, labels in kinds])
    return {kind: row["queue"] for kind, row in zip(kinds, rows, strict=True)}


async def queues_of_tasks(session: Session, task_ids: Collection[int]) -> dict[int, str]:
    """To which queue waiting tasks would go now, without those of the outbound queue."""
    if not task_ids:
        return {}
    return {row["id"]: row["queue"] for row in await session.fetch("find_queues", list(task_ids))}
