"""Gauges of the backlog, its oldest task and the queues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

from penstock.brokers.base import Queue
from penstock.db.pool import Store
from penstock.limits.scaling import RouteLoad, read_route_loads
from penstock.protocol.errors import Unavailable
from penstock.protocol.task import State
from penstock.runtime import metrics
from penstock.runtime.logs import get_logger
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX

_CHEAP_SECONDS = 0.05
_REST = 50  # counting that takes longer is followed by so many times the excess without
_OF_ROUTES = (
    metrics.SCALING_WAITING, metrics.SCALING_IN_FLIGHT, metrics.SCALING_OLDEST_SECONDS, metrics.SCALING_SLOTS,
)  # fmt: skip

log = get_logger()


class _Rises:
    """Detects when a count has risen. Counts of SQS are approximate, so a fall counts at the second look."""

    def __init__(self) -> None:
        self._mark = 0
        self._last = 0

    def has_risen(self, count: int) -> bool:
        risen = count > self._mark
        self._mark = count if risen else min(self._mark, max(count, self._last))
        self._last = count
        return risen


class Gauges:
    """One round sets every gauge; a queue that does not answer affects no other.

    dead_letters: the dead-letter queues by label; one that cannot be read is left out, each rise is logged. by_route:
    the queues of routes now.
    """

    def __init__(
        self,
        *,
        store: Store,
        queues: Mapping[str, Queue],
        dead_letters: Mapping[str, Queue],
        by_route: Callable[[], Mapping[str, Queue]] = dict,
    ) -> None:
        self._store = store
        self._queues = queues
        self._by_route = by_route
        self._dead_letters = dead_letters
        self._rest_until = float("-inf")
        self._shown: set[str] = set()
        self._rises = {label: _Rises() for label in dead_letters}

    async def run_once(self) -> int:
        """Returns 0: nothing changes."""
        if monotonic() >= self._rest_until:
            await self._look_at_tasks()
        away: Unavailable | None = None
        for label, queue in (*self._queues.items(), *self._by_route().items(), *self._dead_letters.items()):
            try:
                depth = await queue.depth()
            except Unavailable as exc:
                if label in self._queues:
                    away = exc
                else:
                    log.debug("queue_unread", queue=label, reason=str(exc))
                continue
            metrics.QUEUE_DEPTH.labels(label, "visible").set(depth.visible)
            if depth.in_flight is not None:
                metrics.QUEUE_DEPTH.labels(label, "in_flight").set(depth.in_flight)
            metrics.QUEUE_DEPTH.labels(label, "delayed").set(depth.delayed)
            if label in self._rises and self._rises[label].has_risen(depth.total):
                log.warning(
                    "dead_letters_rose", queue=label, messages=depth.total,
                    next=f"penstock dlq list {label.removesuffix(DEAD_LETTER_SUFFIX)}",
                )  # fmt: skip
        if away is not None:
            raise away
        return 0

    async def _look_at_tasks(self) -> None:
        """Count live and due tasks: expensive at millions, and over dead rows."""
        started = monotonic()
        async with self._store.session() as session:
            live: Counter[str] = Counter()
            for row in await session.fetch("count_live"):
                live[row["state"]] += row["count"]
            lag = (await session.fetch("read_lag"))[0]
            rejected = await session.value("count_rejected")
            loads = await read_route_loads(session)
        ended = monotonic()
        self._rest_until = ended + _REST * max(0.0, ended - started - _CHEAP_SECONDS)
        for state in State:
            if not state.final:
                metrics.BACKLOG.labels(state.value).set(live[state.value])
        metrics.DUE.set(lag["due"])
        metrics.OLDEST_DUE_SECONDS.set(max(0.0, lag["oldest_seconds"]))
        metrics.REJECTED_KEPT.set(rejected)
        self._show_loads(loads)

    def _show_loads(self, loads: Sequence[RouteLoad]) -> None:
        """Set the figures of routes and remove deleted ones, which would keep their workers running."""
        for load in loads:
            metrics.SCALING_WAITING.labels(load.name).set(load.waiting)
            metrics.SCALING_IN_FLIGHT.labels(load.name).set(load.in_flight)
            metrics.SCALING_OLDEST_SECONDS.labels(load.name).set(load.oldest_seconds)
            metrics.SCALING_SLOTS.labels(load.name).set(load.slots())
        shown = {load.name for load in loads}
        for name in self._shown - shown:
            for gauge in _OF_ROUTES:
                gauge.remove(name)
        self._shown = shown
