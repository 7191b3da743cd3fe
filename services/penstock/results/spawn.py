"""Tasks that come with a result: they are made when, and only if, the result is accepted under its claim.

Those of a step become its children, made when its workflow advances; those of a plain task are plain tasks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from asyncpg import Record
from msgspec.structs import replace

from penstock.db.session import Pair, Session, columns
from penstock.payloads.codec import aad_of
from penstock.protocol.errors import InvalidParams, TooLarge
from penstock.protocol.json_text import utf8_size
from penstock.protocol.task import NewTask
from penstock.protocol.trace_context import TraceContext
from penstock.settings.model import Settings
from penstock.tasks import enqueue
from penstock.workflows.definition import fallback_of, policy_of, read_children


@dataclass(frozen=True, slots=True)
class Spawner:
    """What a result brings along: the JSON text as it came, the tasks that it means, and what would undo them."""

    text: str
    tasks: list[NewTask]
    compensations: Sequence[str] = ()

    def tasks_of(self, tenant: str | None) -> list[NewTask]:
        """The tasks, which are for their parent's tenant."""
        return [replace(task, tenant=tenant) for task in self.tasks]


def read_spawner(text: str, settings: Settings, trace: TraceContext | None = None) -> Spawner:
    """Check what comes with a result, of an attempt of that trace. Raises InvalidParams, TooLarge."""
    size = utf8_size(text)
    if size > settings.result_limit_bytes:
        raise TooLarge("spawn", size, settings.result_limit_bytes)
    children = read_children(text, settings)
    tasks = [task if trace is None else replace(task, trace=trace.text) for _, task in children]
    undoing = {action for child, _ in children for action in (child.compensate, fallback_of(policy_of(child)[0]))}
    return Spawner(text, tasks, sorted(action for action in undoing if action))


async def refuse_strays(
    session: Session, spawners: Mapping[Pair, Spawner], held: Mapping[Pair, Record], allowed: Sequence[str]
) -> dict[Pair, InvalidParams]:
    """Which results bring along a task that goes by another route than their own, and of no allowed action.

    A worker that serves one route alone would otherwise have anything run by the others. allowed: patterns with *.
    """
    kinds: set[enqueue.Kind] = set()
    wanted: dict[Pair, list[enqueue.Kind]] = {}
    for pair, parent in held.items():
        spawner = spawners[pair]
        found: list[enqueue.Kind] = [(task.action, task.labels) for task in spawner.tasks]
        found += [(action, None) for action in spawner.compensations]
        wanted[pair] = [kind for kind in found if not any(fnmatchcase(kind[0], pattern) for pattern in allowed)]
        kinds |= {(parent["action"], parent["labels"]), *wanted[pair]}
    routes = {kind: row["route"] for kind, row in (await enqueue.routes_of_kinds(session, kinds)).items()}
    refused: dict[Pair, InvalidParams] = {}
    for pair, parent in held.items():
        own = routes[parent["action"], parent["labels"]]
        stray = next((kind for kind in wanted[pair] if routes[kind] != own), None)
        if stray is not None:
            by = ["no route" if route is None else f"the route {route}" for route in (routes[stray], own)]
            reason = f"holds {stray[0]!r}, which goes by {by[0]}, and {parent['action']!r} by {by[1]}"
            hint = "PENSTOCK_SPAWN_ACTIONS names actions that any task may spawn"
            refused[pair] = InvalidParams("spawn", f"{reason}: {hint}")
    return refused


async def spawn_children(session: Session, spawners: Mapping[Pair, Spawner], held: Mapping[Pair, Record]) -> None:
    """Make the tasks of results that were accepted in this transaction."""
    steps = {pair: row["workflow"] for pair, row in held.items() if row["workflow"] is not None}
    if steps:
        await session.fetch(
            "attach_children", list(steps.values()), *columns(steps),
            [session.codec.encode(spawners[pair].text, aad_of("spawn", pair[0])) for pair in steps],
        )  # fmt: skip
    plain = [
        task for pair, parent in held.items() if pair not in steps for task in spawners[pair].tasks_of(parent["tenant"])
    ]
    await enqueue.enqueue(session, plain, source="spawn")
