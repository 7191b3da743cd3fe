"""Waiting for results: a thread polls for its one task, an event loop shares polls of up to a thousand tasks."""

from __future__ import annotations

import asyncio
import math
import operator
from collections.abc import Awaitable, Callable, Mapping
from time import monotonic, sleep
from typing import Any

from penstock.client.exchanges import Exchange, calling
from penstock.protocol.checks import read_id
from penstock.protocol.errors import PenstockError, RateLimited, ResultTimeout, TaskNotFound, TooManyWaits, Unavailable
from penstock.runtime.periodic import Pauses

POLL_TASKS = 1000  # of one long poll
POLL_SECONDS = 20.0  # of one long poll; load balancers close what is silent for 60
_GATHER_SECONDS = 0.01
_LONGEST_GATHER_SECONDS = 0.16
_ANSWER_SECONDS = 0.3  # an api gathers answers for a tenth of a second

Outcome = dict[str, Any]


def settled(outcome: Mapping[str, Any]) -> bool:
    """Whether an answer of ``result`` is final; one that is not says how to ask again."""
    return "again" not in outcome


class PollPauses:
    """Pauses between polls that fail. outage_seconds: after a longer outage of the api its error is raised.

    is_reached: the api has answered the client before; else its first error is raised.
    """

    def __init__(self, outage_seconds: float, *, is_reached: bool) -> None:
        self._outage_seconds = outage_seconds
        self._answered_at = monotonic() if is_reached else None
        self._pauses = Pauses(first_seconds=0.2, longest_seconds=2.0)

    def answered(self) -> None:
        """Record an answer of the api."""
        self._answered_at = monotonic()
        self._pauses.reset()

    def seconds_after(self, exc: PenstockError) -> float:
        """Return the seconds until the next try; raises the error if there is none."""
        if isinstance(exc, RateLimited | TooManyWaits):
            return float(exc.data["retry_after"])
        if not isinstance(exc, Unavailable) or self._answered_at is None:
            raise exc  # the URL of an api that has never answered may be wrong
        if monotonic() - self._answered_at > self._outage_seconds + POLL_SECONDS:
            raise exc
        return self._pauses.next_seconds()


class Results:
    """Outcomes of tasks, one long poll after the other. call_seconds: the timeout of a call."""

    def __init__(self, run: Callable[[Exchange[Any]], Any], call_seconds: float) -> None:
        self._run = run
        self._call_seconds = call_seconds
        self.is_reached = False

    def outcome(self, task_id: int, timeout: float | None) -> Outcome:
        """Wait until a task has settled. Raises ResultTimeout, and what a call raises."""
        deadline = math.inf if timeout is None else monotonic() + timeout
        pauses = PollPauses(self._call_seconds, is_reached=self.is_reached)
        while True:
            wait_seconds = round(max(0.0, min(POLL_SECONDS, deadline - monotonic())), 3)
            try:
                params = {"id": task_id, "timeout": wait_seconds}
                outcome: Outcome = self._run(calling("result", params, extra_seconds=wait_seconds))
            except PenstockError as exc:
                pause = pauses.seconds_after(exc)
                if monotonic() + pause > deadline:
                    raise
                sleep(pause)
                continue
            pauses.answered()
            if settled(outcome):
                return outcome
            if timeout is not None and monotonic() >= deadline:
                raise ResultTimeout(task_id, outcome["state"], timeout)

    def close(self) -> None:
        """A poll ends with its caller."""


class AsyncResults:
    """Outcomes of tasks, awaited by the thousand over one long poll. Used within one event loop."""

    def __init__(self, run: Callable[[Exchange[Any]], Awaitable[Any]], call_seconds: float) -> None:
        self._run = run
        self._call_seconds = call_seconds
        self.is_reached = False
        self.polls: list[_SharedPoll] = []

    async def outcome(self, task_id: int | str, timeout: float | None) -> Outcome:
        """Wait until a task has settled. Raises ResultTimeout, and what a call raises."""
        # A wrong id would fail the poll, and with it the waits of others.
        task_id = read_id(task_id if isinstance(task_id, str) else operator.index(task_id), "id")
        poll = next((poll for poll in self.polls if poll.takes(task_id)), None)
        if poll is None:
            pauses = PollPauses(self._call_seconds, is_reached=self.is_reached)
            poll = _SharedPoll(self._run, pauses, ended=self.polls.remove)
            self.polls.append(poll)
        try:
            async with asyncio.timeout(timeout):
                return await poll.wait(task_id)
        except TimeoutError:
            if timeout is None:
                raise
        # Asked once more, so that a timeout of 0 answers too.
        outcome: Outcome = await self._run(calling("result", {"id": task_id, "timeout": 0}))
        if settled(outcome):
            return outcome
        raise ResultTimeout(task_id, outcome["state"], timeout)

    async def close(self) -> None:
        """Cancel every wait."""
        polls, self.polls = self.polls, []
        for poll in polls:
            await poll.close()


class _SharedPoll:
    """One long poll after the other, for up to a thousand tasks.

    A task that is added during a poll interrupts it, and the next poll asks for all; tasks that are added in quick
    succession are gathered, the longer the more there are, and a poll right after another has time for its answer.
    ended: called when no one waits any more.
    """

    def __init__(
        self,
        run: Callable[[Exchange[Any]], Awaitable[Any]],
        pauses: PollPauses,
        *,
        ended: Callable[[_SharedPoll], None],
    ) -> None:
        self._run = run
        self._ended = ended
        self._pauses = pauses
        self._is_crowded = False  # the api takes no more waits: what has settled is asked for without one
        self._waiting: dict[int, set[asyncio.Future[Outcome]]] = {}
        self._added = asyncio.Event()
        self._closed = False
        self._task = asyncio.get_running_loop().create_task(self._poll(), name="results")

    def takes(self, task_id: int) -> bool:
        return not self._closed and (task_id in self._waiting or len(self._waiting) < POLL_TASKS)

    async def wait(self, task_id: int) -> Outcome:
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        if task_id not in self._waiting:
            self._added.set()
        self._waiting.setdefault(task_id, set()).add(future)
        try:
            return await future
        finally:
            futures = self._waiting.get(task_id, set())
            futures.discard(future)
            if not futures and self._waiting.pop(task_id, None) is not None and not self._waiting:
                self._added.set()  # ends the poll under way

    async def close(self) -> None:
        self._closed = True
        self._task.cancel()
        await asyncio.wait((self._task,))
        for futures in self._waiting.values():
            for future in futures:
                future.cancel()

    async def _poll(self) -> None:
        gather_seconds = 0.0
        try:
            while self._waiting:
                await asyncio.sleep(gather_seconds)
                if not self._waiting:
                    break
                self._added.clear()
                answered = await self._ask_once(_ANSWER_SECONDS if gather_seconds else 0.0)
                # A caller that adds tasks one at a time is given time to add more.
                gather_seconds = (
                    0.0 if answered else min(_LONGEST_GATHER_SECONDS, max(_GATHER_SECONDS, 2 * gather_seconds))
                )
        except Exception as exc:  # not an answer of a Penstock api: no caller may wait for ever
            self._fail(exc)
        finally:
            if not self._closed:
                self._closed = True
                self._ended(self)

    async def _ask_once(self, least_seconds: float) -> bool:
        """Ask for all tasks; returns False when a new task interrupted it, after so many seconds at the earliest."""
        params = {"ids": [*self._waiting], "timeout": 0 if self._is_crowded else POLL_SECONDS, "wait": "any"}
        asking = asyncio.ensure_future(self._run(calling("result", params, extra_seconds=POLL_SECONDS)))
        adding = asyncio.ensure_future(self._added.wait())
        try:
            await asyncio.wait((asking,), timeout=least_seconds)
            await asyncio.wait((asking, adding), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return False
            outcomes = asking.result()
        except PenstockError as exc:
            self._is_crowded = isinstance(exc, TooManyWaits)
            try:
                await asyncio.sleep(self._pauses.seconds_after(exc))
            except PenstockError:
                self._fail(exc)
            return True
        finally:
            for task in (asking, adding):
                task.cancel()
            await asyncio.wait((asking, adding))
        self._pauses.answered()
        self._is_crowded = False
        for outcome in outcomes:
            if outcome["state"] is None:
                self._settle(outcome["id"], TaskNotFound(outcome["id"]))
            elif settled(outcome):
                self._settle(outcome["id"], outcome)
        return True

    def _settle(self, task_id: int, outcome: Outcome | Exception) -> None:
        for future in self._waiting.pop(task_id, ()):
            if future.done():
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _fail(self, exc: Exception) -> None:
        for task_id in [*self._waiting]:
            self._settle(task_id, exc)
