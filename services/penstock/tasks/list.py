"""Tasks as `status` and `list` show them."""

import asyncio
import re
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec

from penstock.db.context import Context
from penstock.payloads.records import shown_rows
from penstock.protocol.api_key import seen
from penstock.protocol.checks import read_cursors, read_instant
from penstock.protocol.errors import InvalidParams, TaskNotFound
from penstock.protocol.tenant import stored_key
from penstock.runtime.budget import in_hand
from penstock.tasks import journal, views
from penstock.tasks.params import ListParams, StatusParams

SCAN_TASKS = 20_000  # that one page of a filtered list looks at; a rare action must not read the whole history
TEXT_TASKS = 2000  # whose payload and errors one page looks for a text in, each of which may be large
TEXT_SECONDS = 5.0  # that this may take
_WILDCARD, _ESCAPED = re.compile(r"[%_\\]"), r"\\\g<0>"
_NO_CURSOR = 2**63 - 1


async def show_tasks(
    context: Context, commands: Sequence[StatusParams]
) -> list[views.Task | list[views.Task | None] | TaskNotFound]:
    """An outcome for each command; the tasks of all are read together."""
    rows: dict[bool, dict[int, Any]] = {}
    for detail in (False, True):
        ids = {task_id for command in commands if command.detail == detail for task_id in command.task_ids}
        if ids:
            rows[detail] = await _read_shown(context, list(ids), detail=detail)
    outcomes: list[views.Task | list[views.Task | None] | TaskNotFound] = []
    for command in commands:
        asked = command.task_ids
        shown = [_shown(rows[command.detail].get(one), command.detail) for one in asked]
        outcomes.append(shown if command.ids is not None else shown[0] or TaskNotFound(asked[0]))
    return outcomes


async def _read_shown(context: Context, ids: Sequence[int], *, detail: bool) -> dict[int, Any]:
    """Rows of tasks that the caller may see, decoded, with their steps."""
    load = in_hand()
    room = load.room_bytes
    async with context.session() as session:
        rows: Sequence[Any] = seen(await session.fetch("show_tasks", ids, detail, room))
        entries = await session.fetch("read_journals", [row["id"] for row in rows], room) if detail and rows else []
        codec = session.codec
    load.hold(sum(len(entry["entry"] or "") for entry in entries))
    load.hold(sum(map(views.task_bytes, rows)))
    shown = {row["id"]: row for row in await shown_rows(codec, rows, room_bytes=room)}
    for task_id, own in groupby(entries, key=itemgetter("task_id")):
        shown[task_id] = {**shown[task_id], "steps": [journal.shown(codec, one) for one in own]}
    return shown


def _shown(row: Any, detail: bool) -> views.Task | None:
    """A task as it is answered; its large values only while the answer has room, as a body may name it often."""
    if row is None:
        return None
    if not row["is_cut"] and not in_hand().answer(views.task_bytes(row)):
        row = {**row, "is_cut": True, "payload": None, "result": None, "failures": None, "error": None}
    return views.task_detail(row) if detail else views.task(row)


async def list_tasks(context: Context, given: ListParams) -> views.TaskPage:
    """A page, newest first. With a filter that no index serves, a bounded stretch of ids is looked at.

    A key is looked up in the indexes first, however old the tasks are that hold it or wait for it, unless a text is
    sought too. Raises InvalidParams, also if the search for a text takes too long.
    """
    since, until = read_instant(given.since, "since"), read_instant(given.until, "until")
    if since is not None and until is not None and until <= since:
        raise InvalidParams("until", f"must be later than since, {since.isoformat()}, not {until.isoformat()}")
    before, *ahead = read_cursors(given.cursor) or [_NO_CURSOR]
    labels = msgspec.json.encode(given.labels).decode("utf-8") if given.labels else None
    filters = given.action, labels, given.key, since, until, given.tenant, given.text
    is_served = all(one is None for one in filters) and (given.state is None or given.state.final)
    covered = SCAN_TASKS if given.text is None else TEXT_TASKS
    scan = given.limit if is_served else max(given.limit, covered)
    first, load = 0, in_hand()
    async with context.session() as session:
        if until is not None:
            before = min(before, await session.value("find_first_id", until))
        if since is not None:
            first = await session.value("find_first_id", since)
        sought = given.action, first, labels, given.key, given.tenant, _patterns(given.text)
        statement, of_state = "list_tasks", list[str]()
        if given.state is not None:
            statement = "list_settled_tasks" if given.state.final else "list_live_tasks"
            of_state = [given.state]
        try:
            async with asyncio.timeout(None if given.text is None else TEXT_SECONDS):
                (page,) = await session.fetch(statement, before, given.limit, scan, *sought, *of_state)
        except TimeoutError:
            raise InvalidParams(
                "text",
                f"was looked for in {scan:,} tasks for {TEXT_SECONDS:g} s: name an action, a state or a time too",
            ) from None
        ids: list[int] = page["ids"]
        asked = [*set(ids).difference(ahead)]
        if given.key is not None and given.cursor is None and given.text is None:
            kept = stored_key(given.tenant, given.key)
            found = {row["id"] for row in await session.fetch("find_by_key", kept, given.limit)}.difference(ids)
            # What has no room on the page stands on a later one, for it is among those that were not looked at yet.
            room = given.limit - len(ids)
            late = await session.fetch("keep_fitting", before, list(found), room, *sought, given.state)
            ahead = [row["id"] for row in late]
            asked += ahead
        rows: Sequence[Any] = await session.fetch("show_tasks", asked, False, load.room_bytes) if asked else []
        load.hold(sum(map(views.task_bytes, rows)))
        rows = await shown_rows(session.codec, rows, room_bytes=0)
    tasks = [views.task(row) for row in sorted(rows, key=itemgetter("id"), reverse=True)]
    # The next page begins behind the last task of a full page, else behind the last one looked at. Its cursor names the
    # tasks behind that which were shown already.
    last = page["last"]
    end = ids[-1] if len(ids) >= given.limit else last
    if page["count"] < scan and end == last:
        return views.TaskPage(tasks, None)
    return views.TaskPage(tasks, "-".join(map(str, (end, *(one for one in ahead if one < end)))))


def _patterns(text: str | None) -> list[str] | None:
    """A text as patterns of ``ilike``: unchanged for a piece of JSON, and escaped for the inside of a string."""
    if text is None:
        return None
    inside = msgspec.json.encode(text).decode("utf-8")[1:-1]
    return [f"%{_WILDCARD.sub(_ESCAPED, one)}%" for one in (text, inside)]
