"""Gauges of the backlog, its oldest task and the queues."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from time import monotonic

from prometheus_client import Gauge

from penstock.brokers.base import Queue
from penstock.db.pool import Store
from penstock.limits.reported import list_announced
from penstock.limits.scaling import read_route_loads
from penstock.protocol.errors import Unavailable
from penstock.protocol.task import State
from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX

_CHEAP_SECONDS = 0.05
_REST, _LONGEST_REST_SECONDS = 20, 30.0  # counting that takes longer is followed by so many times the excess without


@dataclass
class _Rises:
    """Detects when a count has risen. Counts of SQS are approximate, so a fall counts at the second look."""

    _mark: int = 0
    _last: int = 0

    def has_risen(self, count: int) -> bool:
        risen = count > self._mark
        self._mark = count if risen else min(self._mark, max(count, self._last))
        self._last = count
        return risen


@dataclass(kw_only=True)
class Gauges:
    """One round sets every gauge; a queue that does not answer affects no other."""

    store: Store
    queues: Mapping[str, Queue]
    dead_letters: Mapping[str, Queue]  # by label; one that cannot be read is left out, each rise is logged
    by_route: Callable[[], Mapping[str, Queue]] = dict  # the queues of routes now
    _rest_until: float = field(init=False, default=float("-inf"))
    _depths: set[tuple[str, str]] = field(init=False, default_factory=set)  # the labels of the queues' gauge
    _shown: dict[Gauge, set[str]] = field(init=False, default_factory=dict)  # the names of each gauge
    _rises: defaultdict[str, _Rises] = field(init=False, default_factory=lambda: defaultdict(_Rises))

    def __post_init__(self) -> None:
        # An alert on the first event needs the series before it: what it looks at is the increase.
        for outcome in ("FIRED", "SKIPPED", "MISSED"):
            metrics.SCHEDULE_RUNS.labels(outcome)
        for reason in ("unsent", "untaken", "suspect"):
            metrics.RELEASED.labels(reason)

    async def run_once(self) -> None:
        away: Unavailable | None = None
        if (started := monotonic()) >= self._rest_until:
            try:
                await self._look_at_tasks()
            except Unavailable as exc:  # Postgres is, or the count takes too long; the queues may answer
                away = exc
            ended = monotonic()
            self._rest_until = ended + min(_LONGEST_REST_SECONDS, _REST * max(0.0, ended - started - _CHEAP_SECONDS))
        queues = {**self.queues, **self.by_route(), **self.dead_letters}
        for shown in [shown for shown in self._depths if shown[0] not in queues]:
            metrics.QUEUE_DEPTH.remove(*shown)  # of a deleted route: an alert would go on
            self._depths.remove(shown)
        for label, queue in queues.items():
            try:
                depth = await queue.depth()
            except Unavailable as exc:
                if label in self.queues:
                    away = exc
                else:
                    log.debug("queue_unread", queue=label, reason=str(exc))
                continue
            for kind, count in asdict(depth).items():
                if count is not None:
                    metrics.QUEUE_DEPTH.labels(label, kind).set(count)
                    self._depths.add((label, kind))
            if label in self.dead_letters and self._rises[label].has_risen(depth.total):
                dead = label.removesuffix(DEAD_LETTER_SUFFIX)
                log.warning("dead_letters_rose", queue=label, messages=depth.total, next=f"penstock dlq list {dead}")
        if away is not None:
            raise away

    async def _look_at_tasks(self) -> None:
        """Count live and due tasks: expensive at millions, and over dead rows."""
        async with self.store.session() as session:
            live: Counter[str] = Counter()
            for row in await session.fetch("count_live"):
                live[row["state"]] += row["count"]
            lag = (await session.fetch("read_lag"))[0]
            rejected = await session.value("count_rejected")
            loads = await read_route_loads(session)
            announced = await list_announced(session)
        for state in State:
            if not state.final:
                metrics.BACKLOG.labels(state.value).set(live[state.value])
        metrics.DUE.set(lag["due"])
        metrics.OLDEST_DUE_SECONDS.set(max(0.0, lag["oldest_seconds"]))
        metrics.REJECTED_KEPT.set(rejected)
        self._show(metrics.SCALING_WAITING, {load.name: load.waiting for load in loads})
        self._show(metrics.SCALING_IN_FLIGHT, {load.name: load.in_flight for load in loads})
        self._show(metrics.SCALING_OLDEST_SECONDS, {load.name: load.oldest_seconds for load in loads})
        self._show(metrics.SCALING_SLOTS, {load.name: load.slots() for load in loads})
        self._show(metrics.ACTION_WORKERS, {action.action: action.workers for action in announced})
        self._show(metrics.ACTION_WAITING, {action.action: action.waiting for action in announced})

    def _show(self, gauge: Gauge, figures: Mapping[str, float]) -> None:
        """Set a gauge by name, and for these names alone: a deleted route would keep its workers running."""
        for name, figure in figures.items():
            gauge.labels(name).set(figure)
        for name in self._shown.get(gauge, set()) - figures.keys():
            gauge.remove(name)
        self._shown[gauge] = set(figures)
