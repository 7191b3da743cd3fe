"""Routes, as upkeep sees them: which queues they have, and tasks that wait for one that is no longer there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from penstock.logs import get_logger
from penstock.store import Store
from penstock.transports import Queue

_BATCH = 1000
_BATCHES_PER_ROUND = 20

log = get_logger()


class Routes:
    """The queues of the routes there are. open_queue: makes a queue of a name, or URL, and a label."""

    def __init__(self, *, store: Store, outbound: Queue, open_queue: Callable[[str, str], Queue]) -> None:
        self._store = store
        self._outbound = outbound
        self._open_queue = open_queue
        self._known: dict[str, tuple[str, Queue]] = {}

    @property
    def queues(self) -> Mapping[str, Queue]:
        """Their queues by label."""
        return {queue.label: queue for _, queue in self._known.values()}

    def queue_of(self, route: str | None) -> Queue | None:
        """The queue of a route, the outbound queue without one; None for a route that is gone."""
        if route is None:
            return self._outbound
        return self._known[route][1] if route in self._known else None

    async def run_once(self) -> int:
        """Read the routes, and have what waits for others go by the rules that there are; returns how many tasks."""
        async with self._store.session() as session:
            (found,) = await session.fetch("read_rules")
        before, self._known = self._known, {}
        for name, queue_name in json.loads(found["routes"]):
            known = before.get(name)
            if known is None or known[0] != queue_name:
                known = queue_name, self._open_queue(queue_name, f"outbound:{name}")
            self._known[name] = known
        returned = 0
        for _ in range(_BATCHES_PER_ROUND):
            async with self._store.session() as session:
                batch = len(await session.fetch("return_strays", _BATCH))
            returned += batch
            if batch < _BATCH:
                break
        if returned:
            log.info("strays_returned", tasks=returned)
        return returned
