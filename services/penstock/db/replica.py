"""Reads from a replica while it is young enough, and from the primary otherwise (decisions/053).

Each second the position of the primary's log is noted, and a replica is as young as the newest of these positions that
it has replayed: so its age does not grow while nothing is written, and no clocks of two machines are compared.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic
from typing import TypeVar

import asyncpg

from penstock.db.pool import Store, open_store
from penstock.db.session import Session
from penstock.protocol.errors import Unavailable
from penstock.runtime import metrics
from penstock.runtime.budget import in_hand
from penstock.runtime.logs import log
from penstock.settings.model import Settings

Answer = TypeVar("Answer")

_CHECK_SECONDS = 1.0
_ANSWER_SECONDS = 2.0


class Replica:
    """The store of a replica. ``run`` (a side task) checks it; until then, and after an error, it is not asked."""

    def __init__(self, store: Store, primary: Store, max_age_seconds: float) -> None:
        self._store = store
        self._primary = primary
        self._max_age_seconds = max_age_seconds
        self._positions: deque[tuple[float, int]] = deque()
        self.is_used = False
        self._refusal: str | None = None

    async def run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await self.note_position()
                    async with self.session():
                        pass  # it is reached, and young enough
            except Exception as exc:  # whatever it is, the primary answers
                self._leave(str(exc) or "no answer")
            else:
                if not self.is_used:
                    log.info("replica_used")
                self.is_used, self._refusal = True, None
            await asyncio.sleep(_CHECK_SECONDS)

    async def note_position(self) -> float:
        """Note how far the primary has come; the instant whose commits that covers. Raises Unavailable."""
        at = monotonic()  # all that was committed before is in the log
        with _reporting("the primary"):
            self._positions.append((at, await self._primary.value("read_log_position")))
        while at - self._positions[0][0] > self._max_age_seconds:
            self._positions.popleft()
        return at

    @asynccontextmanager
    async def dated_session(self) -> AsyncIterator[tuple[Session, float]]:
        """A session of one server, and the instant, of the monotonic clock, whose commits it shows at least.

        Raises Unavailable for a server that cannot be reached, is no replica, or does not report its position.
        """
        async with self._store.transaction() as session:  # one server throughout, also where replicas share a name
            with _reporting("the server of PENSTOCK_DATABASE_READ_URL"):
                replayed = await session.value("read_replayed_position")
            if replayed is None:
                raise Unavailable("PENSTOCK_DATABASE_READ_URL leads to a server that is no replica")
            yield session, next((at for at, come in reversed(self._positions) if come <= replayed), float("-inf"))

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """A session that is young enough, or Unavailable; counts the age of the answer in hand."""
        async with self.dated_session() as (session, as_of):
            age = monotonic() - as_of
            if age > self._max_age_seconds:
                raise Unavailable(f"the replica is more than {self._max_age_seconds:g} s old")
            in_hand().aged(age)
            metrics.REPLICA_AGE_SECONDS.set(age)
            yield session

    async def read(self, work: Callable[[], Awaitable[Answer]], otherwise: Callable[[], Awaitable[Answer]]) -> Answer:
        """What ``work`` reads in sessions of this replica; if that cannot be, what the other reads in the primary's."""
        if self.is_used:
            try:
                return await work()
            except Unavailable as exc:
                self._leave(str(exc))
        return await otherwise()

    def _leave(self, reason: str) -> None:
        """Ask the primary until the next check."""
        self.is_used = False
        metrics.REPLICA_AGE_SECONDS.set(math.inf)
        if reason != self._refusal:
            log.warning("replica_not_used", reason=reason)
        self._refusal = reason

    async def close(self) -> None:
        await self._store.close()


@contextmanager
def _reporting(who: str) -> Iterator[None]:
    try:
        yield
    except (asyncpg.FeatureNotSupportedError, asyncpg.UndefinedFunctionError) as exc:
        raise Unavailable(f"{who} does not report its position in the log: {exc}") from exc


def open_replica(settings: Settings, primary: Store) -> Replica | None:
    """The replica of PENSTOCK_DATABASE_READ_URL, if there is one."""
    if (url := settings.read_url) is None:
        return None
    store = open_store(settings, "penstock-api", url=url, codec=primary.codec)
    return Replica(store, primary, settings.database_read_max_age_seconds)
