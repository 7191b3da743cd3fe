"""Durable steps on the worker's side: whether one may begin, and its report, which is sent before it ends."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic, time

from penstock.payloads.codec import PayloadCodec, aad_of
from penstock.protocol.errors import TOO_LARGE
from penstock.protocol.journal import Entry, StepPlace, encode_entry
from penstock.protocol.json_text import utf8_size
from penstock.protocol.sealed import SEALED_ENCODING, escape_plain
from penstock.settings.model import Settings
from penstock.worker.attempt import Attempt
from penstock.worker.handlers.context import TaskCancelled
from penstock.worker.handlers.steps import StepPort, Suspend, Trial
from penstock.worker.payload_io import kept_object
from penstock.worker.responses import Unfit, encoded_error, encoded_result, too_large


@dataclass(slots=True, eq=False)  # frozen takes four times as long to make, once an attempt
class AttemptSteps(StepPort):
    """Reports the steps of one attempt. send: done once an entry is in the results queue; raises Refusal."""

    settings: Settings
    codec: PayloadCodec
    send: Callable[[Attempt, str], Awaitable[None]]
    loop: asyncio.AbstractEventLoop
    attempt: Attempt

    def check_blocking(self) -> None:
        if asyncio._get_running_loop() is self.loop:
            raise RuntimeError(
                "ctx.step_sync() would hold up the worker for ever here: await ctx.step() in a coroutine"
            )

    def begin(self, steps: int) -> None:
        attempt, limit = self.attempt, self.settings.steps_limit
        if attempt.handler.batch is not None:
            raise RuntimeError("durable steps need a handler of single tasks; this one is batched")
        if attempt.answered or attempt.is_lost:  # a thread goes on behind its time limit
            raise TaskCancelled("the task's claim has ended: another attempt goes on with it")
        # Another worker may have the message now, or have had it: what is begun here only now could run twice.
        if not attempt.lease.is_unbroken() or (attempt.lease.message.receive_count > 1 and not attempt.reported):
            raise Suspend(is_redelivered=True)
        if steps >= limit:
            text = f"the task has {steps} durable steps; the limit is {limit} (PENSTOCK_STEPS_LIMIT)"
            raise Unfit("TooManySteps", text, code=TOO_LARGE)

    def record(self, place: StepPlace, trial: Trial) -> Future[Entry]:
        error = trial.error
        # Encoded by the caller, in a thread where the handler runs in one.
        text = encoded_result(trial.result, "the step") if error is None else encoded_error(error)
        seconds = round(monotonic() - trial.began, 6)
        entry = Entry.of(place, text, is_error=error is not None, at=trial.at, seconds=seconds, tries=trial.tries)
        return asyncio.run_coroutine_threadsafe(self.keep(entry), self.loop)

    async def keep(self, entry: Entry) -> Entry:
        """Report a finished step; returns it once the report is sent. Raises Refusal, Suspend."""
        attempt, codec, settings = self.attempt, self.codec, self.settings
        text = entry.value
        size, limit = utf8_size(text), settings.largest_result_bytes
        if size > limit:
            what = f"the result of step {entry.label!r} is"
            raise too_large("BadResult", what, size, limit, settings.largest_result_setting)
        if codec.is_on:
            aad = aad_of("step", attempt.claim.task_id, *entry.key)
            sealed = await kept_object(codec, attempt.claim, escape_plain(text), aad)
            report = encode_entry(entry.with_value(sealed, SEALED_ENCODING))
        else:
            report = encode_entry(entry)
        journal_bytes = attempt.journal_bytes + sum(map(utf8_size, attempt.reported)) + utf8_size(report)
        if journal_bytes > settings.steps_limit_bytes:
            what, setting = "the results of the task's steps are", "PENSTOCK_STEPS_LIMIT_BYTES"
            raise too_large("JournalTooLarge", what, journal_bytes, settings.steps_limit_bytes, setting)
        attempt.reported = (*attempt.reported, report)
        await self.send(attempt, report)
        if not attempt.lease.is_unbroken():
            raise Suspend(is_redelivered=True)  # the report may come too late for the attempt that follows
        return entry


def sleep_entry(why: Suspend) -> str | None:
    """The entry of a sleep, which goes with the report that its task is suspended; None for another suspension."""
    place = why.place
    if place is None or why.token is not None:
        return None
    return encode_entry(Entry.of(place, "null", at=time(), seconds=why.seconds))
