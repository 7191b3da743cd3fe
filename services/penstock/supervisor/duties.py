"""What duties of the supervisor share: one that fails stops no other, and one of bounded batches."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from functools import partial

from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.protocol.errors import PenstockError, Unavailable
from penstock.protocol.task import EXPIRED
from penstock.results.methods import give_up_overdue
from penstock.runtime import metrics
from penstock.runtime.halving import in_halves
from penstock.runtime.logs import log
from penstock.runtime.periodic import in_batches
from penstock.settings.model import Settings
from penstock.tasks import settle

_BATCH = 500
_BATCHES_PER_ROUND = 20
_LOGGED_EVERY = 10


async def in_transactions(
    store: Store, work: Callable[[Session, int], Awaitable[int]], batch: int, event: str, unit: str = "tasks"
) -> int:
    """One round of bounded batches, each one transaction; returns their total. event, unit: of its log line."""

    async def run() -> int:
        async with store.transaction() as session:
            return await work(session, batch)

    total = await in_batches(run, full=batch, most=_BATCHES_PER_ROUND)
    if total:
        log.info(event, **{unit: total})
    return total


async def expire(store: Store) -> int:
    """Cancel tasks past their ``expires_at``, which no claim takes any more; a running one if it fails."""
    return await in_transactions(store, expire_some, _BATCH, "tasks_expired")


async def expire_some(session: Session, limit: int, *, now: datetime | None = None) -> int:
    """Cancel up to ``limit`` tasks that were not started in time, inside a transaction; returns how many."""

    async def cancel(ids: Sequence[int], hurried: bool) -> int:
        async with session.savepoint(hurried=hurried):
            return len(await settle.cancel(session, ids, EXPIRED))

    async def leave(task_id: int, error: PenstockError) -> int:  # for the next round
        log.warning("expired_task_left", task_id=task_id, reason=str(error))
        return 0

    ids = [row["id"] for row in await session.fetch("find_expired", limit, now)]
    return sum(await in_halves(ids, cancel, leave))


async def time_out_waits(store: Store, settings: Settings) -> int:
    """Fail attempts whose outside event did not come in time, by the database's clock."""
    give_up = partial(give_up_overdue, settings=settings)
    return await in_transactions(store, give_up, _BATCH, "waits_timed_out", "waits")


class DutyGuard:
    """Runs the duties of a round; a failure is logged, the first and every tenth in a row, and counted."""

    def __init__(self) -> None:
        self._in_a_row: Counter[str] = Counter()

    async def run(self, duties: Mapping[str, Callable[[], Awaitable[int | None]]]) -> AsyncIterator[tuple[str, int]]:
        """Run duties one by one; yields each that did not fail, and how much it changed, where it says.

        Raises Unavailable in the end when one failed: the first that was, or one that names the others.
        """
        failed: dict[str, Exception] = {}
        for duty, work in duties.items():
            try:
                changed = await work() or 0
            except Exception as exc:
                failed[duty] = exc
                self._in_a_row[duty] = failures = self._in_a_row[duty] + 1
                metrics.DUTIES_FAILED.labels(duty).inc()
                if failures % _LOGGED_EVERY == 1:
                    if isinstance(exc, Unavailable):
                        log.warning("duty_failed", duty=duty, reason=str(exc), failures=failures)
                    else:
                        log.exception("duty_failed", duty=duty, error=type(exc).__name__, failures=failures)
                continue
            del self._in_a_row[duty]
            yield duty, changed
        for error in failed.values():
            if isinstance(error, Unavailable):
                raise error
        if failed:
            kinds = ", ".join(f"{duty} ({type(error).__name__})" for duty, error in failed.items())
            raise Unavailable(f"upkeep failed: {kinds}; the log lines duty_failed have the tracebacks")
