"""The methods about tasks, ordering keys and claims."""

import asyncio
import re
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from penstock.db.context import Context, ServingContext
from penstock.db.session import Session
from penstock.payloads.records import shown_rows
from penstock.protocol import answers, checks, errors
from penstock.protocol.answers import HeldKeys, ReleasedKey
from penstock.protocol.api_key import Permission, bound_to, check_actions, narrow_tenant, own_tenant, seen
from penstock.protocol.errors import InvalidParams, RpcError, StateConflict, TaskNotFound
from penstock.protocol.method import Scope, method
from penstock.protocol.record import Record, view_of
from penstock.protocol.requests import ClaimId, parse_claim_id
from penstock.protocol.task import FINAL_STATES, OTHER_ACTIONS, NewTask, State
from penstock.protocol.tenant import stored_key
from penstock.protocol.views import about
from penstock.runtime.budget import in_hand
from penstock.tasks import journal, ordering, params, settle, views
from penstock.tasks import reschedule as rescheduling

SCAN_TASKS = 20_000  # that one page of a filtered list looks at; a rare action must not read the whole history
TEXT_TASKS = 2000  # whose payload and errors one page looks for a text in, each of which may be large
TEXT_SECONDS = 5.0  # that this may take
_WILDCARD, _ESCAPED = re.compile(r"[%_\\]"), r"\\\g<0>"
_NO_CURSOR = 2**63 - 1

_look = partial(method, permission=Permission.READ, scope=Scope.OWN)
_change = partial(
    method, permission=Permission.ADMIN, scope=Scope.OWN, errors=(TaskNotFound, StateConflict), by_queue=True
)


def _narrow_new_task(task: NewTask) -> NewTask:
    check_actions({task.action})
    tenant = own_tenant(task.tenant)
    return task if tenant == task.tenant else replace(task, tenant=tenant)


@method(
    "enqueue", permission=Permission.ENQUEUE, scope=Scope.OWN, errors=(errors.TooLarge, errors.DuplicateTask),
    read=params.new_task, narrow=_narrow_new_task, by_queue=True, together=True,
)  # fmt: skip
async def enqueue(context: ServingContext, tasks: Sequence[NewTask]) -> Sequence[answers.Accepted | RpcError]:
    """Add a task; it is stored when the answer comes."""
    return await context.enqueue(tasks)


def _within_limit(command: Any) -> Any:
    """Raises InvalidParams for one that names more tasks than its body may."""
    in_hand().ask(len(command.task_ids))
    return command


Shown = answers.Task | answers.TaskDetail | list[answers.Task | answers.TaskDetail | None] | RpcError


@_look("status", errors=(TaskNotFound,), narrow=_within_limit, together=True)
async def status(context: ServingContext, commands: Sequence[params.StatusParams]) -> Sequence[Shown]:
    """Show one task, or several in the order of `ids`, with null for an unknown id."""
    rows: dict[bool, dict[int, Any]] = {}
    for detail in (False, True):
        ids = {task_id for command in commands if command.detail == detail for task_id in command.task_ids}
        if ids:
            rows[detail] = await _read_shown(context, list(ids), detail=detail)
    outcomes: list[Shown] = []
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


def _shown(row: Any, detail: bool) -> answers.Task | None:
    """A task as it is answered; its large values only while the answer has room, as a body may name it often."""
    if row is None:
        return None
    if not row["is_cut"] and not in_hand().answer(views.task_bytes(row)):
        row = {**row, "is_cut": True, "payload": None, "result": None, "failures": None, "error": None}
    return views.task_detail(row) if detail else views.task(row)


@_look("result", errors=(TaskNotFound, errors.TooManyWaits), narrow=_within_limit, together=True)
async def result(
    context: ServingContext, commands: Sequence[params.ResultParams]
) -> Sequence[answers.Outcome | list[answers.Outcome] | RpcError]:
    """Wait until one or several tasks have settled and return their outcome, or their state when the time is up."""
    return await context.await_results(commands)


@_change("cancel", wakes=True)
async def cancel(session: Session, given: params.CancelParams) -> answers.Changed:
    """Cancel a task that has not settled; a later result is ignored, and its handler is asked to stop."""
    task_id = int(given.id)
    await check_own_task(session, task_id)
    if not await settle.cancel(session, [task_id], given.reason):
        raise await rescheduling.why_unchanged(session, task_id, "cancelled")
    return answers.Changed(id=task_id, state=State.CANCELLED)


@_change("retry", wakes=True, savepoint=True)
async def retry(session: Session, given: params.RetryParams) -> answers.Changed:
    """Re-run a failed (CRITICAL_ERROR) or CANCELLED task with a fresh attempt counter, and its failed durable steps."""
    task_id = int(given.id)
    await check_own_task(session, task_id)
    known = [] if given.from_step is None else await journal.rewind(session, task_id, given.from_step)
    states = await rescheduling.restart(session, [task_id])
    if not states:
        raise await rescheduling.why_unchanged(session, task_id, "retried")
    if given.from_step is not None:
        if given.from_step not in known:
            shown = f"it has {', '.join(known[:20])}" if known else "it has none"
            raise InvalidParams("from_step", f"names no durable step of task {task_id}: {shown}")
        await session.fetch("raise_journal_floor", task_id)
    return answers.Changed(id=task_id, state=states[task_id])


@_change("reschedule", wakes=True)
async def reschedule(session: Session, given: params.RescheduleParams) -> answers.Changed:
    """Move a waiting or retrying task (WAITING, SCHEDULED, ERROR) to another time or priority."""
    task_id, run_at = int(given.id), checks.read_instant(given.run_at)
    await check_own_task(session, task_id)
    rows = await session.fetch("reschedule_tasks", [task_id], run_at, given.delay, given.priority)
    states = {row["id"]: State(row["state"]) for row in rows}
    if not states:
        raise await rescheduling.why_unchanged(session, task_id, "rescheduled")
    return answers.Changed(id=task_id, state=states[task_id])


async def check_own_task(session: Session, task_id: int) -> None:
    """Raises TaskNotFound for another tenant's task. A task's tenant never changes, so a look is enough."""
    if bound_to() is not None and not seen(await session.fetch("read_states", [task_id])):
        raise TaskNotFound(task_id)


@_look("list", narrow=narrow_tenant, by_replica=True)
async def list_(context: Context, given: params.ListParams) -> answers.TaskPage:
    """List tasks, newest first. With a filter, one call searches a bounded number of tasks; pass the cursor to search
    older ones."""
    since, until = checks.read_instant(given.since, "since"), checks.read_instant(given.until, "until")
    if since is not None and until is not None and until <= since:
        raise InvalidParams("until", f"must be later than since, {since.isoformat()}, not {until.isoformat()}")
    before, *ahead = checks.read_cursors(given.cursor) or [_NO_CURSOR]
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
            why = f"was looked for in {scan:,} tasks for {TEXT_SECONDS:g} s: name an action, a state or a time too"
            raise InvalidParams("text", why) from None
        ids: list[int] = page["ids"]
        asked = [*set(ids).difference(ahead)]
        # A key is looked up in the indexes first, however old the tasks are that hold it or wait for it.
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
        return answers.TaskPage(tasks=tasks, cursor=None)
    return answers.TaskPage(tasks=tasks, cursor="-".join(map(str, (end, *(one for one in ahead if one < end)))))


def _patterns(text: str | None) -> list[str] | None:
    """A text as patterns of ``ilike``: unchanged for a piece of JSON, and escaped for the inside of a string."""
    if text is None:
        return None
    inside = msgspec.json.encode(text).decode("utf-8")[1:-1]
    return [f"%{_WILDCARD.sub(_ESCAPED, one)}%" for one in (text, inside)]


@_look("stats", narrow=narrow_tenant, by_replica=True)
async def count(context: ServingContext, given: params.StatsParams) -> answers.Statistics | answers.TenantStatistics:
    """Count tasks by state and action, with rates over the last minute and lag, at most a second old."""
    found: answers.Statistics | answers.TenantStatistics
    if given.tenant is None:
        found = await context.recent.get("stats", "", partial(_count_all, context))
    else:
        found = await context.recent.get("stats of tenants", given.tenant, partial(_count_of, context, given.tenant))
    return found


async def _count_all(context: Context) -> answers.Statistics:
    async with context.session() as session:
        counts = await session.fetch("count_live") + await session.fetch("count_settled", OTHER_ACTIONS)
        (rates,) = await session.fetch("read_rates")
        (row,) = await session.fetch("read_lag")
    lag = answers.Lag(due=row["due"], oldest_due_seconds=round(max(0.0, row["oldest_seconds"]), 3))
    states, actions = views.counted(counts)
    return answers.Statistics(states=states, actions=actions, rates=view_of(answers.Rates, rates), lag=lag)


async def _count_of(context: Context, tenant: str) -> answers.TenantStatistics:
    # Neither an index nor a tally goes by tenant, so a bounded number of the newest records of each kind is looked at.
    live, most = [state for state in State if not state.final], answers.TENANT_LOOKED_AT
    async with context.session() as session:
        looked = [(live, await session.fetch("count_live_of_tenant", tenant, most))]
        for state in FINAL_STATES:
            looked += [([state], await session.fetch("count_settled_of_tenant", tenant, most, state))]
    found = [row for _, rows in looked for row in rows if row["action"] is not None]
    full = [states for states, rows in looked if sum(row["count"] for row in rows) >= most]
    at_least: list[answers.StateName] = [state for state in State if any(state in states for states in full)]
    states, actions = views.counted(found)
    return answers.TenantStatistics(tenant=tenant, states=states, actions=actions, at_least=at_least)


# Ordering keys and claims


@method("ordering.list", permission=Permission.READ, scope=Scope.CLOSED)
async def list_held_keys(session: Session, page: params.OrderingListParams) -> HeldKeys:
    """List ordering keys that a failed task (CRITICAL_ERROR) holds, by key."""
    keys = await ordering.list_held_keys(session, page.limit, page.cursor)
    cursor = stored_key(keys[-1].tenant, keys[-1].key) if len(keys) == page.limit else None
    return HeldKeys(keys=keys, cursor=cursor)


@method("ordering.release", permission=Permission.ADMIN, scope=Scope.CLOSED, wakes=True)
async def release_key(session: Session, given: params.OrderingReleaseParams) -> ReleasedKey:
    """Release a held ordering key: the next task of the key may run."""
    key = stored_key(given.tenant, given.key)
    released = await ordering.release_keys(session, [key])
    return ReleasedKey(key=given.key, released=key in released, next=released.get(key))


class CheckedClaims(Record):
    lost: Annotated[
        list[str], about("Claims that no longer hold their task: it was cancelled, settled, or claimed again.")
    ]


def _read_claims(given: params.ClaimsCheckParams) -> dict[str, ClaimId]:
    """Claims by the ids that were given, with a token or without one."""
    if not 1 <= len(given.claims) <= checks.MAX_IDS:
        raise InvalidParams("claims", f"must hold 1 to {checks.MAX_IDS} claims, not {len(given.claims)}")
    claims = {}
    for position, text in enumerate(given.claims):
        claim = parse_claim_id(text)
        if claim is None:
            raise InvalidParams(f"claims[{position}]", f"must be <task id>:<claim>, not {text[:60]!r}")
        claims[text] = claim
    return claims


@method("claims.check", permission=Permission.WORKER, scope=Scope.CLOSED, read=_read_claims)
async def check_claims(session: Session, claims: dict[str, ClaimId]) -> CheckedClaims:
    """Return which of a worker's claims no longer hold their task."""
    held = await settle.read_attempts(session, claims.values())
    return CheckedClaims(lost=[text for text, claim in claims.items() if claim not in held])
