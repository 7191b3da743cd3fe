"""The method ``result`` for a key that is bound to a tenant: others' tasks are neither waited for nor told of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.db.session import Session
from penstock.protocol.caller import seen
from penstock.protocol.errors import RpcError, TaskNotFound
from penstock.tasks import views
from penstock.tasks.commands import AwaitResults


@dataclass(frozen=True, slots=True)
class Hidden:
    """Commands as they came, and as they are carried out: about the tasks alone that the caller may see."""

    asked: Sequence[AwaitResults | RpcError]
    commands: Sequence[AwaitResults | RpcError]

    def shown(self, outcomes: Sequence[Any]) -> list[Any]:
        """The outcomes, with those of hidden tasks in their places, as of tasks that there are not."""
        return [_shown(*three) for three in zip(self.asked, self.commands, outcomes, strict=True)]


async def hide_others(session: Session, commands: Sequence[AwaitResults | RpcError]) -> Hidden:
    """Leave out what the caller may not see. A task's tenant never changes, so a look before the wait is enough."""
    ids = {task_id for command in commands if isinstance(command, AwaitResults) for task_id in command.ids}
    own = {row["id"] for row in seen(await session.fetch("read_states", list(ids)))}
    return Hidden(commands, [_about(command, own) for command in commands])


def _about(command: AwaitResults | RpcError, own: set[int]) -> AwaitResults | RpcError:
    if not isinstance(command, AwaitResults):
        return command
    ids = [task_id for task_id in command.ids if task_id in own]
    if not ids and not command.many:
        return TaskNotFound(command.ids[0])
    if not ids or (command.any_will_do and len(ids) < len(command.ids)):
        # One that there is not is an answer at once, as to whoever sees all tasks.
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
