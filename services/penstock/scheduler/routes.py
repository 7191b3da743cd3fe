"""Routes: queues with a window of their own, and diverting due tasks to them while nothing is claimed."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from penstock.brokers.base import Queue
from penstock.db.pool import Store
from penstock.protocol.errors import Refused, Unavailable
from penstock.protocol.task import BEGINNING, Position, Stretch
from penstock.runtime.logs import log
from penstock.scheduler.sending import Sender
from penstock.scheduler.window import ClaimWindow
from penstock.settings.model import Settings
from penstock.tasks import claim

_PAUSE_SECONDS = 2.0  # after nothing could be sent by a route
_EMPTY_SECONDS = 0.25  # after there was nothing to send, unless something is put aside meanwhile
_LEVELS = 1000  # priorities that a round of the diverter looks through
_LOOK_PAUSE_SECONDS = 0.05  # between two of its looks
_ROUND_PAUSE_SECONDS = 1.0


@dataclass(slots=True)
class _Route:
    queue_name: str
    queue: Queue
    window: ClaimWindow
    rest_until: float = float("-inf")
    empty_until: float = float("-inf")
    is_asked: bool = False  # something was put aside since the last claim began


@dataclass(kw_only=True)
class Routes:
    """The known routes, by name."""

    store: Store
    outbound: Queue
    open_queue: Callable[[str, str], Queue]  # of a name, or URL, and a label
    window_of: Callable[[str], ClaimWindow]
    put_aside: Callable[[int], None]  # called with how many tasks a claim diverted
    known: dict[str, _Route] = field(init=False, default_factory=dict)

    def set(self, routes: Sequence[tuple[str, str]]) -> None:
        """Replace the routes, given as (name, queue)."""
        before, self.known = self.known, {}
        for name, queue_name in routes:
            route = before.get(name)
            if route is None or route.queue_name != queue_name:
                route = _Route(queue_name, self.open_queue(queue_name, f"outbound:{name}"), self.window_of(name))
                log.info("route_known", route=name, queue=queue_name)
            self.known[name] = route

    def queue_of(self, route: str | None) -> Queue:
        """The queue of a route; the outbound queue for none or a deleted one."""
        return self.outbound if route not in self.known else self.known[route].queue

    def full_for_seconds(self) -> list[float]:
        """Of each route that rests or whose window is full: for how long it is, or is not looked at."""
        now = monotonic()
        full = [route for route in self.known.values() if route.window.is_full or route.rest_until > now]
        return [max(one.window.full_for_seconds(now), max(one.rest_until, one.empty_until) - now) for one in full]

    def look_again(self) -> None:
        """Look at every route at the next pass: tasks were diverted."""
        for route in self.known.values():
            route.empty_until, route.is_asked = float("-inf"), True

    async def run_once(self, sender: Sender) -> int:
        """Send by each route what fits its window; returns how many tasks were sent, or diverted to a gate.

        Not 0 either where more was put aside meanwhile: another pass may have found no room beside this one's claim.
        """
        went = 0
        for name, route in list(self.known.items()):
            if monotonic() >= max(route.rest_until, route.empty_until):
                try:
                    went += await self._send_by(name, route, sender)
                except Refused as exc:
                    log.error("route_refused", route=name, reason=str(exc), retry_in_seconds=_PAUSE_SECONDS)
                    route.rest_until = monotonic() + _PAUSE_SECONDS
        return went

    async def _send_by(self, name: str, route: _Route, sender: Sender) -> int:
        async with route.window.reserve() as limit:
            if not limit:
                return 0
            route.is_asked = False
            batch, diverted = await claim.claim_by_route(self.store, limit, name)
            self.put_aside(diverted)
            if batch is None:
                if not diverted and not route.is_asked:
                    route.empty_until = monotonic() + _EMPTY_SECONDS
                return diverted + route.is_asked
            route.window.note_claim(batch.tasks)
        try:
            return diverted + await sender.send_batch(batch)
        except Unavailable as exc:
            # Other routes must not wait for this one.
            log.warning("route_rests", route=name, queue=route.queue_name, reason=str(exc), seconds=_PAUSE_SECONDS)
            route.rest_until = monotonic() + _PAUSE_SECONDS
            return diverted


@dataclass
class Diverter:
    """Diverts due tasks to their route or limit gate while the window of the outbound queue is full.

    A claim diverts such tasks as it meets them. Without claims, they would wait behind unrelated ones; so the due tasks
    are scanned from the front, batch by batch, until there is room again.
    """

    store: Store
    settings: Settings
    _looking: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _levels: list[int] = field(init=False, default_factory=list)
    _after: Position = field(init=False, default=BEGINNING)
    _next_at: float = field(init=False, default=float("-inf"))

    async def run_once(self, spared: Sequence[str]) -> int:
        """Continue where the last look ended, unless it is too soon; returns how many tasks were diverted.

        spared: limited actions whose own tasks fill the window, so that the others of them may wait behind these.
        """
        if self._looking.locked() or monotonic() < self._next_at:
            return 0
        async with self._looking:
            at_once = self.settings.claim_batch_size
            if not self._levels:
                self._levels, self._after = await claim.read_priorities(self.store, _LEVELS), BEGINNING
            diverted = 0
            if self._levels:
                level, after = self._levels[0], self._after
                try:
                    looked, diverted, last = await claim.put_aside(self.store, at_once, level, after, spared)
                except Refused as exc:
                    stretch = Stretch(level, level, after)
                    return await claim.give_up_unclaimable(self.store, self.settings, exc, at_once, [stretch])
                if looked < at_once or last is None:
                    del self._levels[0]
                    last = BEGINNING
                self._after = last
            self._next_at = monotonic() + (_LOOK_PAUSE_SECONDS if self._levels else _ROUND_PAUSE_SECONDS)
            return diverted
