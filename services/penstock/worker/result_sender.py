"""Sends responses and heartbeats to the results queue, several in a message; keeps each until it is sent."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from time import monotonic

import msgspec

from penstock.brokers.base import Outgoing, Queue, SendReport
from penstock.protocol.compression import PACKED_PER_MESSAGE, PACKED_PREFIX
from penstock.protocol.errors import TOO_LARGE, Unavailable
from penstock.protocol.json_text import utf8_size
from penstock.protocol.message_attributes import WORKER_ATTRIBUTE
from penstock.protocol.reports import SHARED_RESULT_BYTES, encode_notification, encode_progress, encode_shared_result
from penstock.protocol.requests import join_batch, pack
from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.runtime.periodic import Linger, Pace, Pauses
from penstock.settings.model import Settings
from penstock.worker.leases import Lease
from penstock.worker.responses import Unfit, refused_answer

MAX_TASKS = 1000  # whose reports are in one message
_SHARED_FROM = 4  # equal results of a message's tasks from which they are sent as one
_SMALLEST_MESSAGE_BYTES = 1024  # that a queue can be set to
_ATTRIBUTES_BYTES = 256  # that a message takes beside its body, whatever the broker
_RUN_TIMES_SECONDS = 0.25  # between two notifications of run times
_MAX_ACTIONS = 1000  # in one of them
_PAUSE_SECONDS = 0.1, 10.0  # the first and the longest one, after which unsent entries are sent again


class Entry(msgspec.Struct, frozen=True):
    """What is sent.

    lease: of the message, for a response. about: the claim id, for a heartbeat; the future of a step's report.
    result: of a response that holds nothing else, as JSON text, if it may be shared; place: of its task in the
    message. members: the responses instead of which a shared result is sent.
    """

    text: str
    lease: Lease | None = None
    about: str | asyncio.Future[None] | None = None
    result: str | None = None
    place: int = 0
    members: tuple[Entry, ...] = ()

    @property
    def tasks(self) -> int:
        """How many it is a response of; at least 1."""
        return len(self.members) or 1


class Timings:
    """Run times of handlers, for the metrics and for the scheduler, which packs messages by them; adding is cheap."""

    def __init__(self) -> None:
        self._new: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        self._exemplars: defaultdict[tuple[str, str], list[tuple[float, str]]] = defaultdict(list)
        self._unsent: dict[str, tuple[int, float]] = {}
        self._sent_at = float("-inf")

    def add(self, action: str, outcome: str, seconds: float, trace_id: str | None = None) -> None:
        """Add the run time of an attempt. outcome: ok, error or timeout. trace_id: of a recorded trace."""
        self._new[action, outcome].append(seconds)
        if trace_id is not None:
            self._exemplars[action, outcome].append((seconds, trace_id))

    def unsent(self) -> str | None:
        """The notification of unsent run times, which enter the metrics; None without any, or if the last is recent."""
        new, self._new = self._new, defaultdict(list)
        exemplars, self._exemplars = self._exemplars, defaultdict(list)
        for (action, outcome), seconds in new.items():
            metrics.RUN_SECONDS.labels(action, outcome).observe_many(seconds, exemplars[action, outcome])
            count, total = self._unsent.get(action, (0, 0.0))
            self._unsent[action] = count + len(seconds), total + sum(seconds)
        now = monotonic()
        if not self._unsent or now - self._sent_at < _RUN_TIMES_SECONDS:
            return None
        self._sent_at = now
        sent = dict(list(self._unsent.items())[:_MAX_ACTIONS])
        for action in sent:
            del self._unsent[action]
        return encode_notification("run_times", actions=sent)


class ResultSender:
    """Sends at once under little load, in growing batches under much; each response's lease goes to ``sent``."""

    def __init__(self, queue: Queue, settings: Settings, *, sent: Callable[[Lease], None], timings: Timings) -> None:
        self._queue = queue
        self._attributes = {WORKER_ATTRIBUTE: settings.worker_name or name_of_process()}
        self._sent = sent
        self._timings = timings
        self._linger = Linger(MAX_TASKS, longest_seconds=0.05)
        # Where calls are billed, sends keep a distance, and progress waits for responses to go with.
        is_billed = queue.limits.bills_calls
        self._pace = Pace(settings.hop_wait_seconds if is_billed else 0.0)
        progress_seconds = min(settings.billed_call_wait_seconds, settings.heartbeat_seconds / 4)
        self._progress_seconds = progress_seconds if is_billed else 0.0
        self._answers: list[Entry] = []
        self._in_call: list[Entry] = []
        self._progress: dict[str, str] = {}
        self._progress_due: asyncio.TimerHandle | None = None
        self._hurry = False
        self._max_bytes = queue.limits.max_message_bytes - _ATTRIBUTES_BYTES
        self._added = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def answer(self, entry: Entry) -> None:
        self._answers.append(entry)
        if not self._added.is_set():
            self._added.set()
            self._empty.clear()

    async def step(self, text: str) -> None:
        """Send the report of a finished step; returns once it is in the queue. Raises Refusal."""
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.answer(Entry(text, None, sent))
        await sent

    def output(self, text: str) -> None:
        """Send a part of a task's output with the next responses, or soon."""
        self._answers.append(Entry(text))
        self._send_soon()

    def progress(self, claim_id: str, percent: float | None = None, note: str | None = None) -> None:
        """Send the newest report of a task; a bare heartbeat replaces no unsent report."""
        if claim_id not in self._progress or not (percent is None and note is None):
            self._progress[claim_id] = encode_progress(claim_id, percent, note)
        self._send_soon()

    def _send_soon(self) -> None:
        self._empty.clear()
        if self._hurry or not self._progress_seconds:
            self._added.set()
        elif self._progress_due is None:
            self._progress_due = asyncio.get_running_loop().call_later(self._progress_seconds, self._added.set)

    async def wait_empty(self) -> None:
        """Send everything without further batching delay, and wait until it is in the queue."""
        self._hurry = True
        if self._progress or self._answers:
            self._added.set()
        try:
            await self._empty.wait()
        finally:
            self._hurry = False

    async def run(self) -> None:
        """Send entries as they come; a side task."""
        pauses = Pauses(*_PAUSE_SECONDS)
        while True:
            await self._added.wait()
            wait_seconds = max(self._linger.seconds(len(self._answers)), self._pace.turn_seconds())
            if wait_seconds and not self._hurry:
                await asyncio.sleep(wait_seconds)
            self._added.clear()
            self._in_call, self._answers = self._answers, []  # in this order, for a thread that reads them
            self._linger.record(len(self._in_call))
            self._pace.record(len(self._in_call))
            self._in_call = entries = share_results(self._in_call)
            progress, self._progress = self._progress, {}
            if self._progress_due is not None:
                self._progress_due.cancel()
                self._progress_due = None
            entries += [Entry(text, None, claim_id) for claim_id, text in progress.items()]
            run_times = self._timings.unsent()
            if run_times is not None:
                entries.append(Entry(run_times))
            failed, reason = await self._send(entries)
            self._in_call = []
            if len(failed) < len(entries):
                pauses.reset()
            if failed:
                self._answers[:0] = [entry for entry in failed if not isinstance(entry.about, str)]
                unsent = {entry.about: entry.text for entry in failed if isinstance(entry.about, str)}
                self._progress = unsent | self._progress
                self._added.set()
                await self._pause(pauses, len(failed), reason)
            elif not (self._added.is_set() or self._progress or self._answers):
                self._empty.set()

    def unsent(self) -> list[Entry]:
        """The responses that no call has sent for certain; from any thread."""
        entries = dict.fromkeys([*self._answers.copy(), *self._in_call.copy()])
        return [entry for entry in entries if entry.lease is not None]

    async def send_now(self, given: Iterable[Entry]) -> None:
        """Send entries ahead of the unsent ones; retries until the queue has accepted all."""
        entries = [*given]
        pauses = Pauses(*_PAUSE_SECONDS)
        while entries:
            entries, reason = await self._send(entries)
            await self._pause(pauses, len(entries), reason)

    async def _send(self, entries: list[Entry]) -> tuple[list[Entry], str | None]:
        """Send once; returns the unsent entries and the reason, or None where they can be sent at once, split."""
        sizes = [utf8_size(entry.text) for entry in entries]
        # The resulter limits what it decompresses of one message, and settles its tasks at once.
        weights = [
            MAX_TASKS / PACKED_PER_MESSAGE if entry.text.startswith(PACKED_PREFIX) else float(entry.tasks)
            for entry in entries
        ]
        slices = list(pack(sizes, weights, max_bytes=self._max_bytes, max_items=MAX_TASKS, max_weight=MAX_TASKS))
        messages = [
            Outgoing(join_batch([entry.text for entry in entries[start:end]]), self._attributes)
            for start, end in slices
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
                observe(sum(entry.tasks for entry in entries[start:end]))
                for entry in entries[start:end]:
                    if entry.lease is not None:
                        for _ in range(entry.tasks):
                            self._sent(entry.lease)
                    elif isinstance(entry.about, asyncio.Future) and not entry.about.done():
                        entry.about.set_result(None)
            elif position not in report.refused:
                failed += entries[start:end]
                is_away = True
            elif end - start > 1:
                # The queue accepts less than the broker could: send smaller messages from now on, unless one entry is
                # larger than these, which then is alone.
                smaller = max(_SMALLEST_MESSAGE_BYTES, sum(sizes[start:end]) // 2, *sizes[start:end])
                self._max_bytes = min(self._max_bytes, smaller)
                is_away = is_away or smaller >= sum(sizes[start:end])  # it is not for its size
                failed += entries[start:end]
            else:
                failed += self._replace(entries[start], sizes[start], report.reason)
                is_away = is_away or sizes[start] <= _SMALLEST_MESSAGE_BYTES
        return failed, report.reason if is_away else None

    def _replace(self, entry: Entry, size: int, reason: str | None) -> list[Entry]:
        """What to send instead of an entry that the queue rejects even alone; a heartbeat is dropped."""
        if entry.members:
            return [Entry(member.text, member.lease) for member in entry.members]
        log.error("entry_refused_by_queue", queue=self._queue.label, bytes=size, reason=reason)
        if isinstance(entry.about, asyncio.Future) and not entry.about.done():
            problem = f"the report of the step is {size} bytes, more than the results queue takes: {reason}"
            entry.about.set_exception(Unfit("BadResult", problem, code=TOO_LARGE))
        if entry.lease is None:
            return []
        text = refused_answer(entry.text, size) if size > _SMALLEST_MESSAGE_BYTES else entry.text
        return [Entry(text, entry.lease)]

    @staticmethod
    async def _pause(pauses: Pauses, entries: int, reason: str | None) -> None:
        """Wait before unsent entries are sent again, unless there is none or they can be sent at once."""
        if entries and reason is not None:
            if pauses.is_reported:
                log.warning("results_not_sent", entries=entries, failures=pauses.failures + 1, reason=reason)
            await asyncio.sleep(pauses.next_seconds())


def share_results(entries: Sequence[Entry]) -> list[Entry]:
    """The entries, with equal results of a message's tasks as one."""
    equal: defaultdict[tuple[Lease | None, str], list[Entry]] = defaultdict(list)
    sent: list[Entry] = []
    for entry in entries:
        if entry.result is None:
            sent.append(entry)
        else:
            equal[entry.lease, entry.result].append(entry)
    for (lease, result), members in equal.items():
        pack_id = None if lease is None or utf8_size(result) > SHARED_RESULT_BYTES else lease.pack_id
        if pack_id is None or len(members) < _SHARED_FROM:
            sent += members
        else:
            text = encode_shared_result(pack_id, sorted([member.place for member in members]), result)
            sent.append(Entry(text, lease, members=tuple(members)))
    return sent


def name_of_process() -> str:
    """Default name of a worker: ``host:pid``, limited to 80 characters of the host's name, in printable ASCII."""
    host = "".join(char for char in socket.gethostname() if "!" <= char <= "~")
    return f"{host[:80] or 'localhost'}:{os.getpid()}"
