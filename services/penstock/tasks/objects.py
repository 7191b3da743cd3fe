"""Objects of the bucket in Postgres: what is stored with a task that names them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

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
