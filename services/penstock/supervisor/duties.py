"""What duties of the supervisor share: one that fails stops no other, and one of bounded batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.protocol.errors import Unavailable
from penstock.results.wait_answers import give_up_overdue
from penstock.runtime import metrics
from penstock.runtime.logs import get_logger
from penstock.runtime.periodic import in_batches
from penstock.settings.model import Settings
from penstock.tasks import stale

_BATCH = 500
_BATCHES_PER_ROUND = 20
_LOGGED_EVERY = 10

log = get_logger()


class Duty(Protocol):
    """One kind of upkeep; ``run_once`` does one bounded round and returns how much it changed."""

    async def run_once(self) -> int: ...


class BatchedDuty:
    """A duty of bounded batches, each one transaction. event, unit: of the log line that has the total."""

    def __init__(self, store: Store, work: Callable[[Session, int], Awaitable[int]], *, event: str, unit: str) -> None:
        self._store = store
        self._work = work
        self._event = event
        self._unit = unit

    async def run_once(self) -> int:
        total = await in_batches(self._batch, full=_BATCH, most=_BATCHES_PER_ROUND)
        if total:
            log.info(self._event, **{self._unit: total})
        return total

    async def _batch(self) -> int:
        async with self._store.transaction() as session:
            return await self._work(session, _BATCH)


def expiry(store: Store) -> Duty:
    """Cancels tasks that were not started by their ``expires_at``; from that instant on no claim takes them.

    A running task finishes; if it fails, or its claim is released, it is cancelled then.
    """
    return BatchedDuty(store, stale.expire, event="tasks_expired", unit="tasks")


def wait_timeouts(store: Store, settings: Settings) -> Duty:
    """Fails attempts whose outside event did not come in time, by the database's clock."""

    async def give_up(session: Session, limit: int) -> int:
        return await give_up_overdue(session, limit, settings)

    return BatchedDuty(store, give_up, event="waits_timed_out", unit="waits")


class DutyGuard:
    """Runs the duties of a round one by one; a failure is logged, the first and every tenth in a row, and counted."""

    def __init__(self) -> None:
        self._in_a_row: Counter[str] = Counter()
        self._failed: dict[str, Exception] = {}

    async def run(self, duty: str, work: Callable[[], Awaitable[int]]) -> int:
        """Returns what ``work`` returns, or 0 when it fails."""
        try:
            changed = await work()
        except Exception as exc:
            self._failed[duty] = exc
            self._in_a_row[duty] += 1
            metrics.DUTIES_FAILED.labels(duty).inc()
            failures = self._in_a_row[duty]
            if failures % _LOGGED_EVERY == 1:
                if isinstance(exc, Unavailable):
                    log.warning("duty_failed", duty=duty, reason=str(exc), failures=failures)
                else:
                    log.exception("duty_failed", duty=duty, error=type(exc).__name__, failures=failures)
            return 0
        del self._in_a_row[duty]
        return changed

    def end_round(self) -> None:
        """Raises Unavailable when a duty of the round failed: the first that was, or one that names the others."""
        failed, self._failed = self._failed, {}
        for exc in failed.values():
            if isinstance(exc, Unavailable):
                raise exc
        if failed:
            kinds = ", ".join(f"{duty} ({type(exc).__name__})" for duty, exc in failed.items())
            raise Unavailable(f"upkeep failed: {kinds}; the log lines duty_failed have the tracebacks")
