"""Tasks that come with a result: they are made when, and only if, the result is accepted under its claim.

Those of a step become its children, made by whoever moves its workflow on; those of a plain task are plain tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock import metrics
from penstock.commands import step_task
from penstock.errors import TooLarge
from penstock.payloads import spawn_bound
from penstock.settings import Settings
from penstock.store import Pair, Session
from penstock.tasks import NewTask
from penstock.wire import utf8_size
from penstock.workflows import read_children


@dataclass(frozen=True, slots=True)
class Spawner:
    """What a result brings along: the JSON text as it came, and the tasks that it means."""

    text: str
    tasks: list[NewTask]


def read_spawner(text: str, settings: Settings) -> Spawner:
    """Check what comes with a result. Raises InvalidParams, TooLarge."""
    size = utf8_size(text)
    if size > settings.result_limit_bytes:
        raise TooLarge("spawn", size, settings.result_limit_bytes)
    children = read_children(text, lambda child: step_task(child, settings))
    return Spawner(text, [step_task(child, settings) for child in children])


async def hold_spawners(session: Session, spawners: Mapping[Pair, Spawner]) -> dict[Pair, int | None]:
    """Lock the tasks whose claim still holds; returns the workflow of each, None for a plain task."""
    rows = await session.fetch("hold_spawners", [pair[0] for pair in spawners], [pair[1] for pair in spawners])
    return {(row["id"], row["claim"]): row["workflow"] for row in rows}


async def spawn_children(session: Session, spawners: Mapping[Pair, Spawner], held: Mapping[Pair, int | None]) -> None:
    """Make the tasks of results that were accepted in this transaction."""
    told = {pair: workflow for pair, workflow in held.items() if workflow is not None}
    if told:
        await session.fetch(
            "attach_children", list(told.values()), [pair[0] for pair in told], [pair[1] for pair in told],
            [session.vault.seal(spawners[pair].text, spawn_bound(pair[0])) for pair in told],
        )  # fmt: skip
    plain = [task for pair in held if pair not in told for task in spawners[pair].tasks]
    await session.enqueue(plain)
    for task in plain:
        metrics.ENQUEUED.labels(task.action, "spawn").inc()
