"""LISTEN/NOTIFY wake-ups when there is work. Polling finds it anyway; a lost wake-up costs one poll interval.

A NOTIFY is sent from a statement of its own, at most once in ``_DEBOUNCE_SECONDS`` per process. Inside a writing
transaction it would hold a lock of the whole cluster, so only the insert of a task alone carries one (decisions/077).
"""

import asyncio
import math
from functools import partial
from time import monotonic
from typing import Any

from penstock.db.pool import Store
from penstock.db.statements import SQL
from penstock.protocol.errors import PenstockError, Unavailable
from penstock.runtime.logs import log
from penstock.runtime.periodic import is_set_within

CHANNEL = "penstock_work"  # tasks have come, or results that a caller waits for
WORKFLOWS = "penstock_workflows"  # tasks of workflows have settled
OUTPUT = "penstock_output"  # running tasks have given out log lines or chunks
DELAYED_RECORDS = "penstock_armed"  # a delayed record is due soon
DUE = "due"  # what a wake-up says of tasks that have come: none of them is for later
_DEBOUNCE_SECONDS = 0.01
_CARRYING_SHARE = 0.1  # of its time that a process may spend in commits that carry a wake-up
_WATCHDOG_SECONDS = 15.0
_RECONNECT_SECONDS = 2.0


class Notifier:
    """Sends wake-ups: ``wake`` marks, ``run`` (a side task) sends, also to workflows whose tasks the store settled."""

    def __init__(self, store: Store, channel: str = CHANNEL) -> None:
        self._store = store
        self._channel = channel
        self._woken = asyncio.Event()
        self._are_due = True
        self._sent_at = self._carried_at = -math.inf
        self._carrying_seconds = 0.0  # that a commit with a wake-up took lately

    def may_carry(self) -> bool:
        """Whether an insert may carry a wake-up now: no other is due, and its lock is held for little of the time."""
        now = monotonic()
        return (
            not self._woken.is_set()
            and now - self._sent_at >= _DEBOUNCE_SECONDS
            and now - self._carried_at >= self._carrying_seconds / _CARRYING_SHARE
        )

    def carried(self, seconds: float) -> None:
        """An insert that took so long has carried a wake-up."""
        self._sent_at = self._carried_at = monotonic()
        self._carrying_seconds += (seconds - self._carrying_seconds) / 4

    def wake(self, *, due: bool = False) -> None:
        """due: the tasks that have come are due now, and nothing else has changed."""
        self._are_due &= due
        self._woken.set()

    async def run(self) -> None:
        is_refused = False
        while True:
            await self._woken.wait()
            self._woken.clear()
            payload = DUE if self._are_due else ""
            self._are_due = True
            self._sent_at = monotonic()
            try:
                if self._store.settled_steps and self._channel == CHANNEL:
                    self._store.settled_steps = False
                    await self._store.fetch("notify_work", WORKFLOWS, "")
                await self._store.fetch("notify_work", self._channel, payload)
            except Unavailable as exc:
                log.debug("notify_failed", reason=str(exc))  # the schedulers poll
            except PenstockError as exc:  # such as a full queue of notifications, which an operator has to empty
                if not is_refused:
                    log.warning("notify_failed", reason=str(exc))
                is_refused = True
            else:
                is_refused = False
            await asyncio.sleep(_DEBOUNCE_SECONDS)


class Listener:
    """Receives wake-ups: each sets ``event``. Run ``run`` as a side task; it reconnects automatically.

    A pooler passes none on, so none is received there, unless the store has a listen_url. later: a wake-up may have
    been for tasks that are not due yet; the owner clears it. hold: a statement that each new connection runs first.
    """

    def __init__(self, store: Store, *channels: str, hold: str | None = None) -> None:
        self._store = store
        self._hold = hold
        self.event = asyncio.Event()
        self._events = dict.fromkeys(channels or (CHANNEL,), self.event)
        self.later = True

    def also(self, channel: str) -> asyncio.Event:
        """Set by each wake-up of another channel, over the same connection; asked for before ``run``."""
        return self._events.setdefault(channel, asyncio.Event())

    async def run(self) -> None:
        while True:
            connection: Any = None
            lost = asyncio.Event()
            try:
                connection = await self._store.connect()
                if connection is None:
                    await lost.wait()  # for ever: all that wait for wake-ups also poll
                connection.add_termination_listener(lambda _, lost=lost: lost.set())
                if self._hold is not None:
                    await connection.execute(SQL[self._hold])
                for channel, event in self._events.items():
                    await connection.add_listener(channel, partial(self._hear, event))
                    self._hear(event)  # a wake-up may have come while no one listened
                while not await is_set_within(lost, _WATCHDOG_SECONDS):
                    # A half-open socket stays silent; a query must be answered. Wake-ups come from the primary alone.
                    if await connection.fetchval("show transaction_read_only", timeout=5) == "on":
                        raise Unavailable("its server takes no writes any more")
                log.warning("listen_lost", reason="the connection was closed")
            except Exception as exc:
                text = f"{type(exc).__name__}: {exc}"
                if isinstance(exc, (Unavailable, OSError, TimeoutError)):
                    text = str(exc) or type(exc).__name__
                log.warning("listen_lost", reason=text)
            finally:
                if connection is not None:
                    connection.terminate()
            await asyncio.sleep(_RECONNECT_SECONDS)

    def _hear(self, event: asyncio.Event, *said: Any) -> None:
        self.later |= said[-1:] != (DUE,)
        event.set()
