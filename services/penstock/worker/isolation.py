"""Isolation: tasks that may crash the worker start alone.

Suspects are messages delivered for the third time and tasks that stopped heartbeating before. Almost all are harmless,
so each runs alone for a moment only: long enough for a task that crashes at once, too short to delay others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from penstock.brokers.base import Message
from penstock.protocol.requests import SUSPECT_ATTRIBUTE
from penstock.runtime.logs import get_logger
from penstock.worker.attempt import Attempt
from penstock.worker.runner import Runner

_SUSPECT_DELIVERIES = 3
_ALONE_SECONDS = 1.0  # others are waited for so long, and then wait so long themselves

log = get_logger()


def is_suspect(message: Message) -> bool:
    """Whether this message may have crashed workers."""
    return message.receive_count >= _SUSPECT_DELIVERIES or SUSPECT_ATTRIBUTE in message.attributes


class Isolation:
    """Passes attempts to the runner; those of a suspect message once all others have ended.

    clear: waits until nothing runs and every response is in the results queue.
    """

    def __init__(self, runner: Runner, *, clear: Callable[[], Awaitable[None]]) -> None:
        self._runner = runner
        self._clear = clear
        self._turn = asyncio.Lock()
        self._is_stopped = False

    def stop(self) -> None:
        """Pass on no more attempts."""
        self._is_stopped = True

    async def add(self, attempts: Sequence[Attempt]) -> bool:
        """Start attempts beside others; False once stopped."""
        async with self._turn:
            if self._is_stopped:
                return False
            self._runner.add(attempts)
            return True

    async def add_alone(self, attempts: Sequence[Attempt]) -> bool:
        """Start the attempts of one message when all others have ended, alone for a moment; False once stopped."""
        async with self._turn:
            await _within(_ALONE_SECONDS, self._clear())
            if self._is_stopped:
                return False
            message = attempts[0].lease.message
            log.warning(
                "suspect_started_alone", message_id=message.id, tasks=len(attempts), deliveries=message.receive_count
            )
            self._runner.add(attempts, alone=True)
            await _within(_ALONE_SECONDS, self._clear())
            return True


async def _within(seconds: float, awaited: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(seconds):
            await awaited
    except TimeoutError:
        pass
