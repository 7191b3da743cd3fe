"""Isolation: what may kill this worker runs with nothing beside it that would die too.

A message delivered for the third time was with two workers that did not finish it, and a suspect was silent before.
Almost all of them are harmless, so each has the worker to itself for a moment only: long enough for a task that kills
at once to die alone, too short for a long one to hold others back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from penstock.brokers.base import Message
from penstock.protocol.requests import SUSPECT_ATTRIBUTE
from penstock.runtime.logs import get_logger
from penstock.worker.attempt import Job
from penstock.worker.runner import Runner

_SUSPECT_DELIVERIES = 3
_ALONE_SECONDS = 1.0  # others are waited for so long, and then wait so long themselves

log = get_logger()


def is_suspect(message: Message) -> bool:
    """Whether workers may have died of this message."""
    return message.receive_count >= _SUSPECT_DELIVERIES or SUSPECT_ATTRIBUTE in message.attributes


class Isolation:
    """Passes jobs on to the runner, those of a suspect message when everything else is done.

    clear: waits until nothing runs and every answer so far is in the results queue.
    """

    def __init__(self, runner: Runner, *, clear: Callable[[], Awaitable[None]]) -> None:
        self._runner = runner
        self._clear = clear
        self._turn = asyncio.Lock()
        self._is_stopped = False

    def stop(self) -> None:
        """From now on nothing is passed on."""
        self._is_stopped = True

    async def add(self, jobs: Sequence[Job]) -> bool:
        """Start jobs beside others; False when it is too late for that."""
        async with self._turn:
            if self._is_stopped:
                return False
            self._runner.add(jobs)
            return True

    async def add_alone(self, jobs: Sequence[Job]) -> bool:
        """Start the jobs of one message when the others are done, and nothing beside them for a moment."""
        async with self._turn:
            await _within(_ALONE_SECONDS, self._clear())
            if self._is_stopped:
                return False
            message = jobs[0].held.message
            log.warning(
                "suspect_started_alone", message_id=message.id, tasks=len(jobs), deliveries=message.receive_count
            )
            self._runner.add(jobs, alone=True)
            await _within(_ALONE_SECONDS, self._clear())
            return True


async def _within(seconds: float, awaited: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(seconds):
            await awaited
    except TimeoutError:
        pass
