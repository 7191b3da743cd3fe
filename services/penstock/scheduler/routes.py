"""Routes: tasks that go to queues of their own, each with a window of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from penstock.brokers.base import Queue
from penstock.db.pool import Store
from penstock.protocol.errors import Refused, Unavailable
from penstock.runtime.logs import get_logger
from penstock.scheduler.claim_window import ClaimWindow, Throughput
from penstock.scheduler.sending import Sender
from penstock.settings.model import Settings
from penstock.tasks import claim

_PAUSE_SECONDS = 2.0  # after nothing could be sent by a route
_EMPTY_SECONDS = 0.25  # after there was nothing to send, unless something is put aside meanwhile

log = get_logger()


@dataclass(slots=True)
class _Route:
    queue_name: str
    queue: Queue
    window: ClaimWindow
    rest_until: float = field(default=float("-inf"))
    empty_until: float = field(default=float("-inf"))


class Routes:
    """The known routes.

    open_queue: makes a queue of a name, or URL, and a label. put_aside: called with how many tasks a claim diverted.
    """

    def __init__(
        self,
        *,
        store: Store,
        settings: Settings,
        throughput: Throughput,
        outbound: Queue,
        open_queue: Callable[[str, str], Queue],
        put_aside: Callable[[int], None],
    ) -> None:
        self._store = store
        self._settings = settings
        self._throughput = throughput
        self._outbound = outbound
        self._open_queue = open_queue
        self._put_aside = put_aside
        self._routes: dict[str, _Route] = {}

    def set(self, routes: Sequence[tuple[str, str]]) -> None:
        """Replace the routes, given as (name, queue)."""
        before = self._routes
        self._routes = {}
        for name, queue_name in routes:
            known = before.get(name)
            if known is None or known.queue_name != queue_name:
                queue = self._open_queue(queue_name, f"outbound:{name}")
                window = ClaimWindow(
                    store=self._store, settings=self._settings, throughput=self._throughput, route=name
                )
                known = _Route(queue_name, queue, window)
                log.info("route_known", route=name, queue=queue_name)
            self._routes[name] = known

    def knows(self, route: str | None) -> bool:
        """Whether the queue of a route, or of none, is known here."""
        return route is None or route in self._routes

    def queue_of(self, route: str | None) -> Queue:
        """The queue of a route; the outbound queue for none or a deleted one."""
        return self._outbound if route not in self._routes else self._routes[route].queue

    def look_again(self) -> None:
        """Look at every route at the next pass: tasks were diverted."""
        for route in self._routes.values():
            route.empty_until = float("-inf")

    async def run_once(self, sender: Sender) -> int:
        """Send by each route what fits its window; returns how many tasks were sent, or diverted to a gate."""
        went = 0
        for name, route in list(self._routes.items()):
            if monotonic() >= max(route.rest_until, route.empty_until):
                try:
                    went += await self._send_by(name, route, sender)
                except Refused as exc:
                    log.error("route_refused", route=name, reason=str(exc), retry_in_seconds=_PAUSE_SECONDS)
                    route.rest_until = monotonic() + _PAUSE_SECONDS
        return went

    async def _send_by(self, name: str, route: _Route, sender: Sender) -> int:
        async with route.window.reserved() as limit:
            if not limit:
                return 0
            async with self._store.session() as session:
                batch, diverted = await claim.claim_by_route(session, limit, name)
            self._put_aside(diverted)
            if batch is None:
                if not diverted:
                    route.empty_until = monotonic() + _EMPTY_SECONDS
                return diverted
            route.window.claimed(batch.tasks)
        try:
            return diverted + await sender.send_batch(batch)
        except Unavailable as exc:
            # Other routes must not wait for this one.
            log.warning("route_rests", route=name, queue=route.queue_name, reason=str(exc), seconds=_PAUSE_SECONDS)
            route.rest_until = monotonic() + _PAUSE_SECONDS
            return diverted
