"""API keys that are bound to a tenant: which methods they may call, and for which tasks they may await results.

What looks up a record asks ``sees`` before it shows or changes it. Another tenant's record is answered as unknown.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from penstock.api.table import method_of
from penstock.db.session import Session
from penstock.protocol.caller import bound_to, seen
from penstock.protocol.errors import AccessDenied, RpcError, TaskNotFound
from penstock.protocol.method import Scope
from penstock.tasks import views
from penstock.tasks.methods import AwaitResults


def check_scope(method: str, tenant: str | None) -> None:
    """Raises AccessDenied where a key of the tenant may not call the method; unknown ones pass."""
    found = method_of(method)
    if tenant is not None and found is not None and found.scope is Scope.CLOSED:
        raise AccessDenied(
            403,
            f"Not permitted: this API key is bound to the tenant {tenant!r}, and {method} concerns the whole "
            "installation: use a key that is bound to none",
            {"tenant": tenant},
        )


async def await_own(
    await_results: Callable[[Sequence[AwaitResults | RpcError]], Awaitable[Sequence[Any]]],
    open_session: Callable[[], AbstractAsyncContextManager[Session]],
    commands: Sequence[AwaitResults | RpcError],
) -> Sequence[Any]:
    """Wait for results of the tasks that the caller may see; all others are answered as unknown ones.

    A task's tenant never changes, so a look before the wait is enough.
    """
    if bound_to() is None:
        return await await_results(commands)
    ids = {task_id for command in commands if isinstance(command, AwaitResults) for task_id in command.ids}
    async with open_session() as session:
        own = {row["id"] for row in seen(await session.fetch("read_states", list(ids)))}
    narrowed = [_about(command, own) for command in commands]
    outcomes = await await_results(narrowed)
    return [_shown(*three) for three in zip(commands, narrowed, outcomes, strict=True)]


def _about(command: AwaitResults | RpcError, own: set[int]) -> AwaitResults | RpcError:
    if not isinstance(command, AwaitResults):
        return command
    ids = [task_id for task_id in command.ids if task_id in own]
    if not ids and not command.many:
        return TaskNotFound(command.ids[0])
    if not ids or (command.any_will_do and len(ids) < len(command.ids)):
        # An unknown task is an answer at once, as for a caller who sees all tasks.
        return replace(command, ids=ids, timeout_seconds=0)
    return replace(command, ids=ids)


def _shown(asked: AwaitResults | RpcError, carried_out: AwaitResults | RpcError, outcome: Any) -> Any:
    if not isinstance(asked, AwaitResults) or not asked.many or isinstance(outcome, BaseException) or outcome is None:
        return outcome
    found = {one.id: one for one in outcome}
    own = set(carried_out.ids) if isinstance(carried_out, AwaitResults) else set()
    return [
        found[task_id] if task_id in found else views.unsettled(task_id, None)
        for task_id in asked.ids
        if task_id in found or task_id not in own
    ]
