"""The method `list`: pages of tasks, newest first, by every filter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec

from penstock.db.session import Session
from penstock.payloads.codec import PayloadCodec
from penstock.payloads.records import shown_rows
from penstock.protocol.task import FINAL_STATES
from penstock.protocol.tenant import kept_key
from penstock.runtime.budget import in_hand
from penstock.tasks import views
from penstock.tasks.commands import ListTasks

SCAN_TASKS = 20_000  # that one page of a filtered list looks at; a rare action must not read the whole history
_NO_CURSOR = 2**63 - 1


class TaskLists:
    """Lists tasks. session: opens one."""

    def __init__(self, session: Callable[[], AbstractAsyncContextManager[Session]], codec: PayloadCodec) -> None:
        self._session = session
        self._codec = codec

    async def list(self, command: ListTasks) -> views.TaskPage:
        """A page, newest first. With a filter that no index serves, a bounded stretch of ids is looked at."""
        if command.is_search:
            return await self._search(command)
        before = _NO_CURSOR if command.before is None else command.before
        served = command.action is None and (command.state is None or command.state in FINAL_STATES)
        scan = command.limit if served else max(command.limit, SCAN_TASKS)
        arguments = [before, command.limit, scan, command.action]
        async with self._session() as session:
            if command.state is None:
                seen = await session.fetch("list_tasks", *arguments)
            elif command.state in FINAL_STATES:
                seen = await session.fetch("list_settled_tasks", *arguments, command.state)
            else:
                seen = await session.fetch("list_live_tasks", *arguments, command.state)
            ids: list[int] = seen[0]["ids"]
            rows = await self._read(session, ids)
        tasks = sorted((views.task(row) for row in rows), key=lambda task: task.id, reverse=True)
        return views.TaskPage(tasks, _cursor(ids, command.limit, seen[0]["last"], seen[0]["count"], scan))

    async def _search(self, command: ListTasks) -> views.TaskPage:
        """The same by labels, key and time of creation; a key is looked up in the indexes first, however old it is."""
        labels = None if command.labels is None else msgspec.json.encode(command.labels).decode("utf-8")
        before = _NO_CURSOR if command.before is None else command.before
        first, extra = 0, list[int]()
        async with self._session() as session:
            if command.until is not None:
                before = min(before, await session.value("find_first_id", command.until))
            if command.since is not None:
                first = await session.value("find_first_id", command.since)
            arguments = [before, command.limit, SCAN_TASKS, command.action, first, labels, command.key, command.tenant]
            if command.state is None:
                seen = await session.fetch("search_tasks", *arguments)
            elif command.state in FINAL_STATES:
                seen = await session.fetch("search_settled_tasks", *arguments, command.state)
            else:
                seen = await session.fetch("search_live_tasks", *arguments, command.state)
            ids: list[int] = seen[0]["ids"]
            if command.key is not None and command.before is None:
                kept = kept_key(command.tenant, command.key)
                found = {row["id"] for row in await session.fetch("find_by_key", kept, command.limit)}
                extra = sorted(found - set(ids), reverse=True)
            rows = await self._read(session, ids + extra)
        found_late = [row for row in rows if row["id"] in extra and _fits(row, command)]
        found_late.sort(key=lambda row: row["id"], reverse=True)
        # What has no room on the page stands on a later one, for it is among those that were not looked at yet.
        shown = [row for row in rows if row["id"] not in extra] + found_late[: command.limit - len(ids)]
        tasks = sorted(map(views.task, shown), key=lambda task: task.id, reverse=True)
        return views.TaskPage(tasks, _cursor(ids, command.limit, seen[0]["last"], seen[0]["count"], SCAN_TASKS))

    async def _read(self, session: Session, ids: Sequence[int]) -> Sequence[Any]:
        """Rows of tasks, with as many bytes of results and errors as the answer has room for."""
        load = in_hand()
        rows = await session.fetch("show_tasks", ids, False, load.room_bytes) if ids else []
        load.hold(sum(map(views.task_bytes, rows)))
        return await shown_rows(self._codec, rows, room_bytes=0)


def _fits(row: Any, command: ListTasks) -> bool:
    """Whether a task that was found by its key fits the rest of a search."""
    labels = msgspec.json.decode(row["labels"] or "{}")
    return (
        (command.state is None or row["state"] == command.state)
        and (command.action is None or row["action"] == command.action)
        and (command.tenant is None or row["tenant"] == command.tenant)
        and all(labels.get(name) == value for name, value in (command.labels or {}).items())
        and (command.since is None or row["created_at"] >= command.since)
        and (command.until is None or row["created_at"] < command.until)
    )


def _cursor(ids: Sequence[int], limit: int, last: int | None, seen: int, scan: int) -> str | None:
    """Where the next page begins: behind the last task of a full page, else behind the last one looked at."""
    if len(ids) >= limit:
        at_end = seen < scan and ids[-1] == last
        return None if at_end else str(ids[-1])
    return str(last) if seen >= scan else None
