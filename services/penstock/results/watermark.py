"""How far behind the results are that resulters record. See docs/decisions/004-three-kinds-of-silence.md, point 5.

Each resulter notes once a second how old the oldest result is that it holds or has recorded lately. A task is silent
only after more time than that, plus the time for which a dead resulter keeps its messages.
"""

import math
import os
import secrets
import socket
from collections import deque
from collections.abc import Sequence
from time import monotonic

from penstock.brokers.base import Message, Queue
from penstock.db.pool import Store

_NOTE_SECONDS = 1.0


class ReadingNote:
    """The note of one resulter. in_hand: messages that it records now. hold_seconds: for how long others get none."""

    def __init__(self, store: Store, in_hand: Sequence[Sequence[Message]], *, hold_seconds: float) -> None:
        self._store = store
        self._hold_seconds = hold_seconds
        self._name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._in_hand = in_hand
        self._read: deque[tuple[float, float | None]] = deque()  # until when in hand, and when the oldest was sent
        self._was_interrupted = True

    def recorded(self, messages: Sequence[Message]) -> None:
        """These are not in hand any more."""
        self._read.append((monotonic(), _oldest(messages)))

    def interrupted(self) -> None:
        """Reading or recording failed: the backlog is unknown."""
        self._was_interrupted = True

    async def note(self) -> float:
        """Write the note; returns the seconds until the next one."""
        now = monotonic()
        # What was read lately counts: another resulter may hold results of that age.
        while self._read and self._read[0][0] < now - self._hold_seconds:
            self._read.popleft()
        # A result that is no longer in hand does not grow older.
        times = [None if sent_at is None else sent_at + now - at for at, sent_at in self._read]
        times += map(_oldest, self._in_hand)
        known = [sent_at for sent_at in times if sent_at is not None]
        interrupted, self._was_interrupted = self._was_interrupted, False
        try:
            oldest, are_all_known = min(known, default=None), len(known) == len(times)
            await self._store.fetch("note_resulter", self._name, oldest, are_all_known, not interrupted)
        except BaseException:
            self._was_interrupted = True
            raise
        return _NOTE_SECONDS

    async def forget(self) -> None:
        """Delete the note: this resulter has stopped reading."""
        await self._store.fetch("forget_resulter", self._name)


async def seconds_on_the_way(store: Store, results: Queue, hold_seconds: float) -> float:
    """How long a report may take to be recorded; infinite while unknown. hold_seconds: as of ``ReadingNote``."""
    ((known, is_established, lag_seconds, has_times),) = await store.fetch("read_watermark", hold_seconds)
    if (known and not is_established) or (not (known and has_times) and (await results.depth()).total):
        return math.inf
    return float(lag_seconds + hold_seconds) if known else 0.0


def _oldest(messages: Sequence[Message]) -> float | None:
    """When the oldest was sent; None if unknown of any."""
    times = [message.sent_at for message in messages if message.sent_at is not None]
    return min(times) if len(times) == len(messages) else None
