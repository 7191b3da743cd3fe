"""API keys that are bound to a tenant: which methods they may call, and that they meet no other tenant's tasks there.

A method is closed to them until it is named here, and whoever sent a request is known to whatever carries it out; so
what looks up a record asks ``sees`` before it shows or changes it. Another tenant's record is answered as one that
there is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.db.session import Session
from penstock.methods.table import METHODS, PARAMS
from penstock.protocol.caller import bound_to, check_actions, narrow_tenant, own_tenant, seen
from penstock.protocol.errors import AccessDenied, TaskNotFound
from penstock.protocol.method import Scope
from penstock.tasks.commands import AnswerWait, Enqueue, ListTasks, Stats
from penstock.tasks.params import SUBMIT_PREFIX

_OWN = (
    "enqueue", "status", "result", "cancel", "retry", "reschedule", "list", "stats",
    "task.complete", "task.fail",
)  # fmt: skip
_CLOSED = (
    "rejected.list", "rejected.show", "rejected.retry", "rejected.purge",
    "dlq.stats", "dlq.list", "dlq.show", "dlq.replay", "dlq.purge",
    "keys.create", "keys.list", "keys.revoke", "audit.list",
)  # fmt: skip
SCOPES: Mapping[str, Scope] = (
    dict.fromkeys(_OWN, Scope.OWN)
    | dict.fromkeys(_CLOSED, Scope.CLOSED)
    | {"rpc.discover": Scope.OPEN}
    | {name: method.scope for name, method in METHODS.items()}
)
"""By method."""


def scope_of(method: str) -> Scope:
    """What a method is to a key that is bound to a tenant."""
    return Scope.OWN if method.startswith(SUBMIT_PREFIX) else SCOPES.get(method, Scope.CLOSED)


def check_scope(method: str, tenant: str | None) -> None:
    """Raises AccessDenied where a key of the tenant may not call the method; others than there are, too, pass."""
    if tenant is not None and method in PARAMS and scope_of(method) is Scope.CLOSED:
        raise AccessDenied(
            403,
            f"Not permitted: this API key is bound to the tenant {tenant!r}, and {method} concerns the whole "
            "installation: use a key that is bound to none",
            {"tenant": tenant},
        )


def narrowed(method: str, command: Any) -> Any:
    """The command limited to the caller's tenant. Raises InvalidParams, and AccessDenied for an action that the
    caller's key may not enqueue."""
    if method in METHODS:
        return METHODS[method].narrow(command)
    match command:
        case Enqueue(task):
            check_actions({task.action})
            return Enqueue(replace(task, tenant=own_tenant(task.tenant)))
        case ListTasks() | Stats() | AnswerWait():
            return narrow_tenant(command)
    return command


async def check_task(session: Session, task_id: int) -> None:
    """Raises TaskNotFound for another tenant's task. A task's tenant never changes, so a look is enough."""
    if bound_to() is not None and not seen(await session.fetch("read_states", [task_id])):
        raise TaskNotFound(task_id)
