"""Requests that wait for tasks, and long polls for results: however many wait, one watch looks for all of them."""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from time import monotonic
from typing import Any

from starlette.requests import Request

from penstock.db.notify import CHANNEL, Listener
from penstock.db.pool import Store
from penstock.db.replica import Replica
from penstock.db.session import OpenSession, Session
from penstock.payloads.records import shown_rows
from penstock.protocol.api_key import bound_to, seen
from penstock.protocol.errors import Overloaded, TaskNotFound, TooManyWaits, Unavailable
from penstock.protocol.json_text import utf8_size
from penstock.runtime import budget, metrics
from penstock.runtime.batcher import Batcher
from penstock.runtime.logs import log
from penstock.runtime.periodic import is_set_within
from penstock.settings.model import Settings
from penstock.tasks import views
from penstock.tasks.params import ResultParams

_LOOK_SECONDS = 1.0
_FOLLOWING_SECONDS = 0.1
_SHORTEST_REST_SECONDS = 0.01
_LONGEST_REST_SECONDS = 1.0
_REST_SHARE = 9.0
_IDLE_SECONDS = 60.0  # the connection that hears wake-ups is kept so long after the last request that waited
_SHARE_OF_ONE = 0.5  # of the requests that may wait, for one caller, so that it leaves some to the others
_LINGER_SECONDS = 0.02
_LINGER_SECONDS_OF_MANY = 0.1
_MANY = 100
_CALLS_PER_LOOK = 50  # of those that have just come; each may ask for a thousand tasks

HAS_WAITED = "penstock.has_waited"  # in the scope of a request whose answer was put off
request_in_hand: ContextVar[Request | None] = ContextVar("request", default=None)


class Watch:
    """Looks at each wake-up, and at least once a second (decision 016).

    look: at all that is waited for; it raises Unavailable. is_needed: whether any request waits. begun: set
    by each one that does. channels: of wake-ups. follows: the looks are at a replica, which may show what has woken
    them a moment later.
    """

    def __init__(
        self, store: Store, look: Callable[[], Awaitable[object]], is_needed: Callable[[], bool],
        channels: Sequence[str] = (CHANNEL,), *, follows: bool = False,
    ) -> None:  # fmt: skip
        self._listener = Listener(store, *channels, hold="hold_results_lock")  # so that resulters wake it
        self._look = look
        self._is_needed = is_needed
        self._follows = follows
        self.begun = asyncio.Event()

    async def run(self) -> None:
        """A side task. It is connected while a request waits."""
        while True:
            await self.begun.wait()
            listening = asyncio.create_task(self._listener.run(), name="listen")
            try:
                await self._watch()
            finally:
                listening.cancel()
                await asyncio.wait((listening,))

    async def _watch(self) -> None:
        used_at = monotonic()
        woken = False
        while monotonic() - used_at < _IDLE_SECONDS:
            seconds = _FOLLOWING_SECONDS if woken and self._follows else _LOOK_SECONDS
            woken = await is_set_within(self._listener.event, seconds)
            self._listener.event.clear()
            if not self._is_needed():
                continue
            started = monotonic()
            try:
                await self._look()
            except Unavailable as exc:
                log.debug("not_looked", reason=str(exc))  # the next look may find it back
            used_at = monotonic()
            rest = _REST_SHARE * (used_at - started)
            await asyncio.sleep(min(_LONGEST_REST_SECONDS, max(_SHORTEST_REST_SECONDS, rest)))
        if not self._is_needed():
            self.begun.clear()


async def _wait_gone(request: Request | None) -> None:
    """Until its connection is closed; for ever for None."""
    if request is None:
        await asyncio.Event().wait()
        return
    request.scope[HAS_WAITED] = True
    while (await request.receive())["type"] != "http.disconnect":
        pass


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request that waits for tasks. ``ready``: enough of them has settled, or it waits no longer.

    any: one of them is enough. began: when it came; a replica that may lack what was committed before is not asked for
    it. refused: the process has no room for more.
    """

    missing: set[int]
    any: bool
    began: float = field(default_factory=monotonic)
    found: dict[int, Any] = field(default_factory=dict)
    size: int = 0
    load: budget.Load = field(default_factory=budget.in_hand)
    refused: Overloaded | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, row: Any) -> None:
        self.missing.discard(row["id"])
        size = _bytes_of(row)
        try:
            self.load.hold(size)
        except Overloaded as exc:
            self.refused = exc
        else:
            self.found[row["id"]] = row
            self.size += size
        if self.any or not self.missing or self.is_full:
            self.ready.set()

    @property
    def is_full(self) -> bool:
        """Whether its answer has room for no more results; the other tasks are left to its next call."""
        return self.refused is not None or self.size >= budget.ANSWER_BYTES


def _bytes_of(row: Any) -> int:
    return utf8_size(row["result"] or "") + utf8_size(row["error"] or "")


class LongPolls:
    """The method ``result``. Half of the connections may wait, so that other requests find one."""

    def __init__(self, store: Store, session: OpenSession, settings: Settings, replica: Replica | None = None) -> None:
        self._session = session
        self._replica = replica
        self._codec = store.codec
        self._tasks_limit = settings.result_waits_limit  # of (waiting request, task) pairs
        self._requests_limit = max(1, settings.http_connections // 2)
        self._waiting: dict[int, set[_Waiter]] = {}
        self._waits = 0
        self._of_callers: Counter[str | None] = Counter()
        self._stopped = False
        self._first_looks: Batcher[Sequence[int], None] = Batcher(self._look, max_items=_CALLS_PER_LOOK)
        self._watch = Watch(store, self._look_again, lambda: bool(self._waiting), follows=replica is not None)
        self.run = self._watch.run
        metrics.RESULT_WAITS.set_function(lambda: self._waits)

    async def answer(self, commands: Sequence[ResultParams]) -> Sequence[Any]:
        """Carry out what one body asks for: an outcome each. A client that hangs up waits no longer.

        Tasks that the caller may not see are answered as unknown ones; a task's tenant never changes, so a look before
        the wait is enough.
        """
        hidden: set[int] = set()
        if bound_to() is not None:
            ids = {task_id for command in commands for task_id in command.task_ids}
            async with self._session() as session:
                hidden = ids - {row["id"] for row in seen(await session.fetch("read_states", list(ids)))}
        caller = budget.in_hand().caller
        waits = any(command.timeout > 0 for command in commands)
        limit = self._full(caller) if waits else 0
        self._of_callers[caller] += waits
        answering = asyncio.gather(*(self._one(command, hidden, limit) for command in commands), return_exceptions=True)
        hanging_up = asyncio.ensure_future(_wait_gone(request_in_hand.get() if waits else None))
        try:
            await asyncio.wait((answering, hanging_up), return_when=asyncio.FIRST_COMPLETED)
            return answering.result() if answering.done() else [None] * len(commands)
        finally:
            self._of_callers[caller] -= waits
            self._of_callers += Counter()  # without those that have none
            for task in (answering, hanging_up):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await answering

    def _full(self, caller: str | None) -> int:
        """The limit that is reached for a caller, 0 for none. None: callers are not distinguished."""
        if self._of_callers.total() >= self._requests_limit:
            return self._requests_limit
        of_one = math.ceil(self._requests_limit * _SHARE_OF_ONE)
        return of_one if caller is not None and self._of_callers[caller] >= of_one else 0

    def stop(self) -> None:
        """Wait no more: every request is answered with what has settled."""
        self._stopped = True
        for waiter in chain.from_iterable(self._waiting.values()):
            waiter.ready.set()

    async def _one(self, command: ResultParams, hidden: set[int], limit: int) -> Any:
        """limit: of waiting requests, 0 where it is not reached."""
        if command.timeout and limit:
            raise TooManyWaits("requests", limit)
        waiter = _Waiter(set(command.task_ids), command.wait == "any")
        for task_id in waiter.missing & hidden:  # these are found at once, as unknown ones are
            waiter.take({"id": task_id, "state": None, "result": None, "error": None})
        ids = frozenset(waiter.missing)
        if command.timeout and self._waits + len(ids) > self._tasks_limit:
            raise TooManyWaits("tasks", self._tasks_limit)
        for task_id in ids:
            self._waiting.setdefault(task_id, set()).add(waiter)
        self._waits += len(ids)
        self._watch.begun.set()
        try:
            await self._first_looks.submit([*ids])
            if command.timeout and not self._stopped:
                await is_set_within(waiter.ready, command.timeout)
                # More may settle within a moment, and each answer costs a call.
                if waiter.ready.is_set() and waiter.missing and not waiter.is_full and not self._stopped:
                    await asyncio.sleep(_LINGER_SECONDS_OF_MANY if len(waiter.missing) >= _MANY else _LINGER_SECONDS)
            if self._replica is not None and command.timeout and not waiter.ready.is_set():
                await self._first_looks.submit([*waiter.missing])  # for what the replica does not show yet
        finally:
            self._waits -= len(ids)
            for task_id in waiter.missing:
                self._waiting[task_id].discard(waiter)
                if not self._waiting[task_id]:
                    del self._waiting[task_id]
        if waiter.refused is not None:
            waiter.load.hold(-waiter.size)
            raise waiter.refused
        return await self._outcome(command, waiter)

    async def _look(self, groups: Sequence[Sequence[int]]) -> list[Exception | None]:
        """Hand each of these tasks that has settled, or is unknown, to the requests that wait. Raises Unavailable."""
        ids = {task_id for group in groups for task_id in group}
        while ids:
            async with self._session() as session:
                ids = await self._hand_over(session, ids)
        return [None] * len(groups)

    async def _look_again(self) -> None:
        """As ``_look`` for all that wait; those that the replica must know are looked for there."""
        ids = set(self._waiting)
        if self._replica is not None:
            looked = partial(self._look_in_replica, self._replica, ids)
            ids = await self._replica.read(looked, lambda: asyncio.sleep(0, ids))  # else all are left
        await self._look([[*ids]])

    async def _look_in_replica(self, replica: Replica, ids: set[int]) -> set[int]:
        """The tasks that are left to the primary: a request that waits for them came after what the replica shows."""
        async with replica.dated_session() as (session, as_of):
            known = {one for one in ids if all(waiter.began <= as_of for waiter in self._waiting.get(one, ()))}
            looked_for = known
            while looked_for:
                looked_for = await self._hand_over(session, looked_for)
        return ids - known

    async def _hand_over(self, session: Session, ids: set[int]) -> set[int]:
        """One look; the tasks to look for in another, for there was no room for their outcomes."""
        rows = await session.fetch("read_settled", [*ids], budget.ANSWER_BYTES)
        for row in rows:
            waiters = self._waiting.get(row["id"], set())
            for waiter in [waiter for waiter in waiters if not waiter.is_full]:
                waiter.take(row)
                waiters.discard(waiter)
            if not waiters:
                self._waiting.pop(row["id"], None)
        if sum(map(_bytes_of, rows)) < budget.ANSWER_BYTES:
            return set()
        ids = ids - {row["id"] for row in rows}
        return {one for one in ids if any(not waiter.is_full for waiter in self._waiting.get(one, ()))}

    async def _outcome(self, command: ResultParams, waiter: _Waiter) -> Any:
        some_of_any = command.wait == "any" and waiter.found
        ids = [task_id for task_id in command.task_ids if task_id in waiter.found or not some_of_any]
        states: dict[int, str] = {}
        if waiter.missing and not some_of_any:
            async with self._session() as session:
                rows = await session.fetch("read_states", [*waiter.missing])
            states = {row["id"]: row["state"] for row in rows}
        settled = await shown_rows(self._codec, list(waiter.found.values()), room_bytes=budget.ANSWER_BYTES)
        found = {row["id"]: row for row in settled}
        load = budget.in_hand()
        load.hold(-waiter.size)  # from here on as part of the answer
        outcomes = [
            views.outcome(row)
            if (row := found.get(task_id)) is not None and load.answer(_bytes_of(row))
            else views.unsettled(task_id, states.get(task_id) if row is None else row["state"])
            for task_id in ids
        ]
        if command.ids is not None:
            return outcomes
        if outcomes[0].state is None:
            raise TaskNotFound(outcomes[0].id)
        return outcomes[0]
