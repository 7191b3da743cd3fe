"""Gauges: how much waits, how long the oldest has waited, how deep the queues are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from penstock import metrics
from penstock.errors import Unavailable
from penstock.logs import get_logger
from penstock.store import Store
from penstock.tasks import State
from penstock.transports import Queue

log = get_logger()


class Gauges:
    """One round sets every gauge; a queue that does not answer keeps the others from nothing.

    dead_letters: the dead-letter queues by label; one that is missing or may not be read is left out.
    """

    def __init__(self, *, store: Store, queues: Mapping[str, Queue], dead_letters: Mapping[str, Queue]) -> None:
        self._store = store
        self._queues = queues
        self._dead_letters = dead_letters

    async def run_once(self) -> int:
        """Returns 0: looking changes nothing."""
        async with self._store.session() as session:
            live: Counter[str] = Counter()
            for row in await session.fetch("count_live"):
                live[row["state"]] += row["count"]
            lag = (await session.fetch("read_lag"))[0]
            rejected = await session.value("count_rejected")
        for state in State:
            if not state.final:
                metrics.BACKLOG.labels(state.value).set(live[state.value])
        metrics.DUE.set(lag["due"])
        metrics.OLDEST_DUE_SECONDS.set(max(0.0, lag["oldest_seconds"]))
        metrics.REJECTED_KEPT.set(rejected)
        away: Unavailable | None = None
        for label, queue in (*self._queues.items(), *self._dead_letters.items()):
            try:
                depth = await queue.depth()
            except Unavailable as exc:
                if label in self._queues:
                    away = exc
                else:
                    log.debug("dead_letters_unread", queue=label, reason=str(exc))
                continue
            metrics.QUEUE_DEPTH.labels(label, "visible").set(depth.visible)
            metrics.QUEUE_DEPTH.labels(label, "in_flight").set(depth.in_flight)
            metrics.QUEUE_DEPTH.labels(label, "delayed").set(depth.delayed)
        if away is not None:
            raise away
        return 0
