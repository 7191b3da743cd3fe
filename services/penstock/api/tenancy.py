"""API keys that are bound to a tenant: which methods they may call, and that they meet no other tenant's tasks there.

A method is closed to them until it is named here, and whoever sent a request is known to whatever carries it out; so
what looks up a record asks ``sees`` before it shows or changes it. Another tenant's record is answered as one that
there is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from enum import StrEnum
from typing import Any

import msgspec

from penstock.commands import (
    PARAMS,
    SUBMIT_PREFIX,
    AnswerWait,
    Enqueue,
    ListTasks,
    PreviewBulk,
    StartBulk,
    Stats,
)
from penstock.errors import AccessDenied, InvalidParams, ScheduleNotFound, TaskNotFound, WorkflowNotFound
from penstock.keys import may_enqueue
from penstock.schedules import CreateSchedule, ImportSchedules, ListSchedules, UpdateSchedule
from penstock.store import Session
from penstock.tenant_rules import GetTenant
from penstock.tenants import kept_key, own_key
from penstock.workflows import (
    CancelWorkflow,
    CreateWorkflow,
    GetWorkflow,
    ListWorkflows,
    NewStep,
    RetryWorkflow,
    WhichWorkflow,
)
from penstock.workflowstore import read_workflow


class Reach(StrEnum):
    """What a method is to a key that is bound to a tenant."""

    OPEN = "open"  # it shows and changes nothing of anybody
    OWN = "own"  # its tenant's tasks, schedules, workflows and jobs, no others
    CLOSED = "closed"  # it concerns the whole installation, or nobody can tell whom


_OWN = (
    "enqueue", "status", "result", "cancel", "retry", "reschedule", "list", "stats",
    "bulk.cancel", "bulk.retry", "bulk.delete", "bulk.reschedule", "job.get", "job.list", "job.cancel",
    "workflow.create", "workflow.status", "workflow.list", "workflow.cancel", "workflow.retry",
    "schedule.create", "schedule.update", "schedule.get", "schedule.list", "schedule.delete", "schedule.pause",
    "schedule.resume", "schedule.run_now", "schedule.runs",
    "task.complete", "task.fail", "tenant.get",
)  # fmt: skip
_CLOSED = (
    "rejected.list", "rejected.show", "rejected.retry", "rejected.purge",
    "dlq.stats", "dlq.list", "dlq.show", "dlq.replay", "dlq.purge",
    "keys.create", "keys.list", "keys.revoke", "audit.list",
    "action.set", "action.get", "action.list", "action.pause", "action.resume",
    "route.set", "route.list", "route.delete",
    "tenant.set", "tenant.list", "tenant.delete", "tenant.pause", "tenant.resume",
    "ordering.list", "ordering.release", "claims.check",
    # The supervisor writes an import later, entry by entry, for nobody's key.
    "schedule.create_many", "schedule.import_status",
)  # fmt: skip
REACH: Mapping[str, Reach] = (
    dict.fromkeys(_OWN, Reach.OWN) | dict.fromkeys(_CLOSED, Reach.CLOSED) | {"rpc.discover": Reach.OPEN}
)
"""By method. One that is new stands nowhere here, and is closed, until somebody decides."""

_tenant: ContextVar[str | None] = ContextVar("tenant", default=None)
_patterns: ContextVar[tuple[str, ...] | None] = ContextVar("patterns", default=None)


def reach_of(method: str) -> Reach:
    """What a method is to a key that is bound to a tenant."""
    return Reach.OWN if method.startswith(SUBMIT_PREFIX) else REACH.get(method, Reach.CLOSED)


def check_reach(method: str, tenant: str | None) -> None:
    """Raises AccessDenied where a key of the tenant may not call the method; others than there are, too, pass."""
    if tenant is not None and method in PARAMS and reach_of(method) is Reach.CLOSED:
        raise AccessDenied(
            403,
            f"Not permitted: this API key is bound to the tenant {tenant!r}, and {method} concerns the whole "
            "installation: use a key that is bound to none",
            {"tenant": tenant},
        )


def bind(tenant: str | None, actions: tuple[str, ...] | None = None) -> None:
    """Remember what the key of the request in hand is limited to, for all that is done for it.

    tenant: to which it is bound. actions: patterns of those that it may enqueue.
    """
    _tenant.set(tenant)
    _patterns.set(actions)


def bound_to() -> str | None:
    """The tenant that whoever sent the request in hand is bound to; None for one who is bound to none."""
    return _tenant.get()


def sees(tenant: str | None) -> bool:
    """Whether whoever sent the request in hand may see what is of this tenant."""
    bound = _tenant.get()
    return bound is None or tenant == bound


def seen(rows: Iterable[Any]) -> list[Any]:
    """Of rows with a tenant, those that whoever sent the request in hand may see."""
    return [row for row in rows if sees(row["tenant"])]


def narrowed(command: Any) -> Any:
    """The command limited to the caller's tenant. Raises InvalidParams, and AccessDenied for an action that the
    caller's key may not enqueue."""
    bound = _tenant.get()
    _check_actions(command, bound)
    if bound is None:
        return command
    match command:
        case Enqueue(task):
            return Enqueue(replace(task, tenant=_own(task.tenant, bound)))
        case ListTasks() | ListSchedules() | ListWorkflows() | CreateWorkflow() | GetTenant() | Stats() | AnswerWait():
            return replace(command, tenant=_own(command.tenant, bound))
        case StartBulk(operation, work) | PreviewBulk(operation, work):
            select = msgspec.structs.replace(work.select, tenant=_own(work.select.tenant, bound))
            return type(command)(operation, msgspec.structs.replace(work, select=select))
        case GetWorkflow(which) | CancelWorkflow(which) | RetryWorkflow(which):
            return replace(command, which=_of_key(which, bound))
        case CreateSchedule(schedule, _):
            return replace(command, schedule=replace(schedule, tenant=_own(schedule.tenant, bound)))
        case UpdateSchedule(given=given) if "tenant" in given:
            raise InvalidParams("tenant", "of a schedule is not changed by a key that is bound to one")
    return command


async def check_task(session: Session, task_id: int) -> None:
    """Raises TaskNotFound for another tenant's task. A task's tenant never changes, so a look is enough."""
    if _tenant.get() is not None and not seen(await session.fetch("read_states", [task_id])):
        raise TaskNotFound(task_id)


async def check_workflow(session: Session, which: WhichWorkflow) -> None:
    """Raises WorkflowNotFound for another tenant's workflow."""
    if _tenant.get() is not None and not sees((await read_workflow(session, which)).tenant):
        raise WorkflowNotFound(which.id if which.key is None else which.key)  # type: ignore[arg-type]


async def schedule_of_caller(session: Session, name: str, *, lock: bool = False) -> str:
    """The name that a schedule is kept by which the caller calls so; ``lock``: hold its rows, for a change.

    Raises ScheduleNotFound where the caller's tenant has none.
    """
    bound = _tenant.get()
    if bound is None:
        return name
    found = await _kept_name(session, bound, name, lock=lock)
    if found is None:
        raise ScheduleNotFound(name)
    return found


async def new_schedule_of_caller(session: Session, command: CreateSchedule) -> CreateSchedule:
    """The command with the name that the schedule is to be kept by: a tenant's stand behind the tenant's name."""
    bound = _tenant.get()
    if bound is None:
        return command
    name = command.schedule.name
    kept = await _kept_name(session, bound, name, lock=True) or kept_key(bound, name)
    return replace(command, schedule=replace(command.schedule, name=kept))


def shown_name(kept: str) -> str:
    """A schedule's name as the caller knows it."""
    return kept if _tenant.get() is None else own_key(kept)


async def _kept_name(session: Session, bound: str, name: str, *, lock: bool) -> str | None:
    """What a tenant's key made comes first; then what a key that is bound to none made for the tenant."""
    names = [kept_key(bound, name), name]
    rows = await session.fetch("lock_schedules_of" if lock else "find_schedules_of", names, bound)
    found = {row["name"] for row in rows}
    return next((kept for kept in names if kept in found), None)


def _check_actions(command: Any, bound: str | None) -> None:
    """Raises AccessDenied."""
    patterns = _patterns.get()
    if bound is None and patterns is None:
        return
    match command:
        case Enqueue(task):
            actions = {task.action}
        case CreateWorkflow(steps=steps):
            actions = {name for step in steps for name in (step.action, step.undo, _of_template(step)) if name}
        case CreateSchedule(schedule, _):
            actions = {schedule.action}
        case UpdateSchedule(given=given) if "action" in given:
            actions = {msgspec.json.decode(given["action"])}
        case ImportSchedules() if patterns is not None:
            raise AccessDenied(403, "Not permitted: this API key is limited to actions: create schedules one by one")
        case _:
            return
    refused = sorted(action for action in actions if not may_enqueue(action, patterns, bound))
    if refused:
        may = "no built-in action" if patterns is None else ", ".join(patterns) + " alone"
        raise AccessDenied(
            403, f"Not permitted: this API key may not enqueue {refused[0]!r}; it may enqueue {may}",
            {"actions": refused[:10]},
        )  # fmt: skip


def _of_template(step: NewStep) -> str | None:
    """The action of a map step's children."""
    return None if step.options.template is None else step.options.template.action


def tenant_of_job(params: Mapping[str, Any]) -> str | None:
    """For whom a bulk job is, by its parameters."""
    found: str | None = params.get("select", {}).get("tenant")
    return found


def _own(given: str | None, bound: str) -> str:
    if given is not None and given != bound:
        raise InvalidParams("tenant", f"must be {bound!r}, to which this API key is bound, not {given!r}")
    return bound


def _of_key(which: WhichWorkflow, bound: str) -> WhichWorkflow:
    return which if which.key is None else replace(which, tenant=_own(which.tenant, bound))
