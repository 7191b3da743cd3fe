"""Outbox: answers and signs of life on their way to the results queue, packed; nothing is dropped until it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from penstock.brokers.base import Outgoing, Queue, SendReport
from penstock.protocol.batching import join_batch, pack
from penstock.protocol.compression import PACKED_PER_MESSAGE, PACKED_PREFIX
from penstock.protocol.errors import Unavailable
from penstock.protocol.json_text import utf8_size
from penstock.protocol.worker_names import WORKER_ATTRIBUTE
from penstock.runtime import metrics
from penstock.runtime.backoff import Pauses
from penstock.runtime.logs import get_logger
from penstock.worker.leases import Held
from penstock.worker.linger import Linger
from penstock.worker.responses import refused_answer

MAX_ENTRIES = 1000  # in one message
_SMALLEST_MESSAGE_BYTES = 1024  # that a queue can be set to
_ATTRIBUTES_BYTES = 256  # that a message takes beside its body, whatever the broker
_LONGEST_LINGER_SECONDS = 0.05
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 10.0

log = get_logger()

# Text; the message its task came in, for an answer; the claim id, for a sign of life.
Entry = tuple[str, Held | None, str | None]


class Outbox:
    """Entries go at once when little is to do; what comes meanwhile forms the next send, and the more comes, the longer
    a send waits for more.

    sent: called with the message of every answer that has reached the queue. tell: asked at each send for a
    notification to go with it, None for none. worker: the name that every message goes out with.
    """

    def __init__(
        self, queue: Queue, *, sent: Callable[[Held], None], tell: Callable[[], str | None], worker: str
    ) -> None:
        self._queue = queue
        self._attributes = {WORKER_ATTRIBUTE: worker}
        self._sent = sent
        self._tell = tell
        self._linger = Linger(MAX_ENTRIES, longest_seconds=_LONGEST_LINGER_SECONDS)
        self._answers: list[Entry] = []
        self._signs: dict[str, str] = {}
        self._hurry = False
        self._max_bytes = queue.limits.max_message_bytes - _ATTRIBUTES_BYTES
        self._added = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def answer(self, text: str, held: Held | None) -> None:
        """Send a response; ``held`` is the message its task came in."""
        self._answers.append((text, held, None))
        if not self._added.is_set():
            self._added.set()
            self._empty.clear()

    def sign(self, claim_id: str, text: str, *, replace: bool) -> None:
        """Send a progress notification; of several for one task that wait, the newest goes.

        replace: False for a bare heartbeat, which an unsent report already says.
        """
        if replace or claim_id not in self._signs:
            self._signs[claim_id] = text
        self._added.set()
        self._empty.clear()

    async def wait_empty(self) -> None:
        """Until everything added so far is in the queue, without further waits for company."""
        self._hurry = True
        try:
            await self._empty.wait()
        finally:
            self._hurry = False

    async def run(self) -> None:
        """The sending; a side task."""
        pauses = Pauses(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        while True:
            await self._added.wait()
            wait_seconds = self._linger.seconds(len(self._answers))
            if wait_seconds and not self._hurry:
                await asyncio.sleep(wait_seconds)
            entries = self._take()
            self._linger.saw(len(entries))
            failed, reason = await self._send(entries)
            if not failed:
                pauses.reset()
                if not self._added.is_set():
                    self._empty.set()
                continue
            self._take_back(failed)
            if len(failed) < len(entries):
                pauses.reset()
            if reason is not None:
                await self._pause(pauses, len(failed), reason)

    def _take(self) -> list[Entry]:
        self._added.clear()
        entries, self._answers = self._answers, []
        signs, self._signs = self._signs, {}
        entries += [(text, None, claim_id) for claim_id, text in signs.items()]
        told = self._tell()
        if told is not None:
            entries.append((told, None, None))
        return entries

    async def send_now(self, texts: Iterable[str]) -> None:
        """Send entries ahead of what waits; returns when the queue has them all, however long it is away."""
        entries: list[Entry] = [(text, None, None) for text in texts]
        pauses = Pauses(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        while entries:
            entries, reason = await self._send(entries)
            if entries and reason is not None:
                await self._pause(pauses, len(entries), reason)

    def _take_back(self, failed: list[Entry]) -> None:
        self._answers[:0] = [entry for entry in failed if entry[2] is None]
        for text, _, claim_id in failed:
            if claim_id is not None:
                self._signs.setdefault(claim_id, text)
        self._added.set()

    async def _send(self, entries: list[Entry]) -> tuple[list[Entry], str | None]:
        """Send once; returns the entries that did not go, and why, or None when they may go at once in another form."""
        sizes = [utf8_size(entry[0]) for entry in entries]
        # A resulter unpacks so much of one message and no more.
        weights = [float(entry[0].startswith(PACKED_PREFIX)) for entry in entries]
        slices = list(
            pack(sizes, weights, max_bytes=self._max_bytes, max_items=MAX_ENTRIES, max_weight=PACKED_PER_MESSAGE)
        )
        messages = [
            Outgoing(join_batch([entry[0] for entry in entries[start:end]]), self._attributes) for start, end in slices
        ]
        try:
            report = await self._queue.send(messages)
        except Unavailable as exc:
            report = SendReport(list(range(len(messages))), str(exc) or "unavailable")
        unsent = set(report.failed)
        failed: list[Entry] = []
        is_away = False
        observe = metrics.BATCH_SIZE.labels("results_message").observe
        for position, (start, end) in enumerate(slices):
            if position not in unsent:
                observe(end - start)
                for _, held, _ in entries[start:end]:
                    if held is not None:
                        self._sent(held)
            elif position not in report.refused:
                failed += entries[start:end]
                is_away = True
            elif end - start > 1:
                # The queue is set to take less than the broker could; from now on messages are smaller.
                smaller = min(self._max_bytes, sum(sizes[start:end])) // 2
                self._max_bytes = max(smaller, _SMALLEST_MESSAGE_BYTES)
                failed += entries[start:end]
            else:
                failed += self._replace(entries[start], sizes[start], report.reason)
                is_away = is_away or sizes[start] <= _SMALLEST_MESSAGE_BYTES
        return failed, report.reason if is_away else None

    def _replace(self, entry: Entry, size: int, reason: str | None) -> list[Entry]:
        """What to send in place of an entry that the queue refuses even alone: an answer is owed, a sign is not."""
        text, held, claim_id = entry
        log.error("entry_refused_by_queue", queue=self._queue.label, bytes=size, reason=reason)
        if held is None:
            return []
        if size > _SMALLEST_MESSAGE_BYTES:
            text = refused_answer(text, size)
        return [(text, held, claim_id)]

    @staticmethod
    async def _pause(pauses: Pauses, entries: int, reason: str) -> None:
        if pauses.is_reported:
            log.warning("results_not_sent", entries=entries, failures=pauses.failures + 1, reason=reason)
        await asyncio.sleep(pauses.next_seconds())
