"""Watermark: how far behind the results are that resulters record.

A task's sign of life may wait in the results queue, or in the hands of a resulter, while its worker is well. So each
resulter notes once a second how old the oldest result is that it holds or has recorded lately, and the supervisor takes
a task for silent only when it was silent for longer than that. Counts of the queue cannot tell: they are approximate,
some brokers leave out what receivers hold, and a queue that is busy is never seen empty.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from penstock.brokers.base import Message
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.runtime.periodic import repeat

_NOTE_SECONDS = 1.0


class ReadingNote:
    """What one resulter notes.

    hold_seconds: for how long a receiver keeps messages from others. What was read within that counts, for others of
    its time may be with another resulter, or wait here to be tried again.
    """

    def __init__(self, store: Store, *, hold_seconds: float) -> None:
        self._store = store
        self._hold_seconds = hold_seconds
        self._name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._in_hand: list[Sequence[Message]] = []
        self._read: deque[tuple[float, float | None]] = deque()  # until when in hand, and when the oldest was sent
        self._was_interrupted = True

    @contextmanager
    def recording(self, messages: Sequence[Message]) -> Iterator[None]:
        """While the block runs, the messages are in hand."""
        self._in_hand.append(messages)
        try:
            yield
        finally:
            self._in_hand.remove(messages)
            self._read.append((monotonic(), _oldest(messages)))

    def interrupted(self) -> None:
        """Nothing could be read, or not be recorded: nobody knows what waits."""
        self._was_interrupted = True

    async def run(self) -> None:
        """Until it is cancelled."""
        await repeat("watermark", self.note)

    async def note(self) -> float:
        """Write it down; returns the seconds until it should be done again."""
        now = monotonic()
        while self._read and self._read[0][0] < now - self._hold_seconds:
            self._read.popleft()
        # What is not in hand any more does not grow older: it was so far behind at that time.
        times = [None if sent_at is None else sent_at + now - at for at, sent_at in self._read]
        times += map(_oldest, self._in_hand)
        told = [sent_at for sent_at in times if sent_at is not None]
        interrupted, self._was_interrupted = self._was_interrupted, False
        try:
            async with self._store.session() as session:
                await session.fetch(
                    "note_resulter", self._name, min(told, default=None), len(told) == len(times), not interrupted
                )
        except BaseException:
            self._was_interrupted = True
            raise
        return _NOTE_SECONDS

    async def forget(self) -> None:
        """It reads nothing from now on, and holds nothing."""
        async with self._store.session() as session:
            await session.fetch("forget_resulter", self._name)


@dataclass(frozen=True, slots=True)
class Watermark:
    """What resulters have noted together.

    known: any of them has. is_established: they have read long enough to know the lag. lag_seconds: how far behind they
    are. tells: the queue tells when results were sent.
    """

    known: bool
    is_established: bool
    lag_seconds: float
    tells: bool


async def read_watermark(session: Session, hold_seconds: float) -> Watermark:
    """hold_seconds: for how long a resulter that died keeps its messages from others."""
    (row,) = await session.fetch("read_watermark", hold_seconds)
    return Watermark(*row)


def _oldest(messages: Sequence[Message]) -> float | None:
    """When the oldest was sent, None where one of them does not tell."""
    times = [message.sent_at for message in messages if message.sent_at is not None]
    return min(times) if len(times) == len(messages) else None
