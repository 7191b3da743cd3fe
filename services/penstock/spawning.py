"""Tasks that come with a result: they are made when, and only if, the result is accepted under its claim.

Those of a step become its children, made by whoever moves its workflow on; those of a plain task are plain tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock import metrics
from penstock.commands import step_task
from penstock.errors import TooLarge
from penstock.payloads import spawn_bound
from penstock.settings import Settings
from penstock.store import Pair, Session
from penstock.tasks import NewTask
from penstock.tracecontext import TraceContext
from penstock.wire import utf8_size
from penstock.workflows import read_children


@dataclass(frozen=True, slots=True)
class Spawner:
    """What a result brings along: the JSON text as it came, and the tasks that it means."""

    text: str
    tasks: list[NewTask]


def read_spawner(text: str, settings: Settings, trace: TraceContext | None = None) -> Spawner:
    """Check what comes with a result, of an attempt of that trace. Raises InvalidParams, TooLarge."""
    size = utf8_size(text)
    if size > settings.result_limit_bytes:
        raise TooLarge("spawn", size, settings.result_limit_bytes)
    children = read_children(text, lambda child: step_task(child, settings))
    tasks = [step_task(child, settings) for child in children]
    if trace is not None:
        tasks = [replace(task, trace=trace.text) for task in tasks]
    return Spawner(text, tasks)


class Parent(NamedTuple):
    """A task whose result brings tasks along. workflow: None for one that is no step."""

    workflow: int | None
    tenant: str | None


async def hold_spawners(session: Session, spawners: Mapping[Pair, Spawner]) -> dict[Pair, Parent]:
    """Lock the tasks whose claim still holds."""
    rows = await session.fetch("hold_spawners", [pair[0] for pair in spawners], [pair[1] for pair in spawners])
    return {(row["id"], row["claim"]): Parent(row["workflow"], row["tenant"]) for row in rows}


async def spawn_children(session: Session, spawners: Mapping[Pair, Spawner], held: Mapping[Pair, Parent]) -> None:
    """Make the tasks of results that were accepted in this transaction; they are for their parent's tenant."""
    told = {pair: parent.workflow for pair, parent in held.items() if parent.workflow is not None}
    if told:
        await session.fetch(
            "attach_children", list(told.values()), [pair[0] for pair in told], [pair[1] for pair in told],
            [session.vault.seal(spawners[pair].text, spawn_bound(pair[0])) for pair in told],
        )  # fmt: skip
    plain = [
        replace(task, tenant=parent.tenant)
        for pair, parent in held.items()
        if pair not in told
        for task in spawners[pair].tasks
    ]
    await session.enqueue(plain)
    for task in plain:
        metrics.ENQUEUED.labels(task.action, "spawn").inc()
