"""API keys that are bound to a tenant: which methods they may call, and that they meet no other tenant's tasks there.

A method is closed to them until it is named here, and whoever sent a request is known to whatever carries it out; so
what looks up a record asks ``sees`` before it shows or changes it. Another tenant's record is answered as one that
there is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

import msgspec

from penstock.db.session import Session
from penstock.limits.tenant_model import GetTenant
from penstock.methods.table import PARAMS
from penstock.protocol.api_key import may_enqueue
from penstock.protocol.caller import actions_of_caller, bound_to, seen
from penstock.protocol.errors import AccessDenied, InvalidParams, TaskNotFound
from penstock.schedules.model import CreateSchedule, ImportSchedules, ListSchedules, UpdateSchedule
from penstock.tasks.commands import AnswerWait, Enqueue, ListTasks, PreviewBulk, StartBulk, Stats
from penstock.tasks.params import SUBMIT_PREFIX
from penstock.workflows.commands import (
    CancelWorkflow,
    CreateWorkflow,
    GetWorkflow,
    ListWorkflows,
    NewStep,
    RetryWorkflow,
    WhichWorkflow,
)


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


def narrowed(command: Any) -> Any:
    """The command limited to the caller's tenant. Raises InvalidParams, and AccessDenied for an action that the
    caller's key may not enqueue."""
    bound = bound_to()
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
    if bound_to() is not None and not seen(await session.fetch("read_states", [task_id])):
        raise TaskNotFound(task_id)


def _check_actions(command: Any, bound: str | None) -> None:
    """Raises AccessDenied."""
    patterns = actions_of_caller()
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


def _own(given: str | None, bound: str) -> str:
    if given is not None and given != bound:
        raise InvalidParams("tenant", f"must be {bound!r}, to which this API key is bound, not {given!r}")
    return bound


def _of_key(which: WhichWorkflow, bound: str) -> WhichWorkflow:
    return which if which.key is None else replace(which, tenant=_own(which.tenant, bound))
