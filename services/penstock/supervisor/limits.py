"""Upkeep of limits and routes: queues of routes, tasks of deleted routes, counts that limits missed."""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache

from penstock.brokers.base import Queue
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.protocol.task import ANNOUNCED_SECONDS
from penstock.supervisor.duties import in_transactions

_BATCH = 1000
_ANNOUNCED_KEPT_SECONDS = 7 * 86_400.0
_LOOKED_AT = 20_000  # tasks in flight


class LimitUpkeep:
    """One round reads the routes and repairs what a change of limits or routes has left."""

    def __init__(self, *, store: Store, outbound: Queue, open_queue: Callable[[str, str], Queue]) -> None:
        self._store = store
        self._outbound = outbound
        self._open_queue = cache(open_queue)
        self._routes: dict[str, Queue] = {}
        self._adopted_upto: tuple[datetime | None, int | None] = None, None

    @property
    def queues(self) -> Mapping[str, Queue]:
        """The queues of routes, by label."""
        return {queue.label: queue for queue in self._routes.values()}

    def queue_of(self, route: str | None) -> Queue | None:
        """The queue of a route, the outbound queue for none; None for a deleted route."""
        return self._outbound if route is None else self._routes.get(route)

    async def run_once(self) -> int:
        """Returns how many tasks of deleted routes, or of actions that are announced now, may run."""
        (found,) = await self._store.fetch("read_rules")
        self._routes = {
            name: self._open_queue(queue_name, f"outbound:{name}") for name, queue_name in json.loads(found["routes"])
        }
        if found["limits"]:
            looked = await self._store.fetch("adopt_next_in_flight", *self._adopted_upto, _LOOKED_AT)
            self._adopted_upto = (looked[0]["claimed_at"], looked[0]["id"]) if looked else (None, None)
            await self._store.fetch("forget_tenant_paces")
            await self._store.fetch("forget_holds")
        returned = await in_transactions(self._store, _return_strays, _BATCH, "strays_returned")
        await self._store.fetch("forget_announced", _ANNOUNCED_KEPT_SECONDS)
        released = await in_transactions(self._store, _release_announced, _BATCH, "announced_released")
        return returned + released


async def _return_strays(session: Session, limit: int) -> int:
    return len(await session.fetch("return_strays", limit))


async def _release_announced(session: Session, limit: int) -> int:
    """Tasks whose action is announced since a worker gave them back."""
    return len(await session.fetch("release_announced", limit, ANNOUNCED_SECONDS))
