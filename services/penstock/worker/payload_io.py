"""Opens payloads before a handler sees them; stores and encrypts results, of steps too, before they are sent."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

import msgspec

from penstock.payloads.codec import PayloadCodec, aad_of, payload_aad
from penstock.payloads.records import encrypt_error
from penstock.protocol.errors import TOO_LARGE, PayloadLost, PayloadUnavailable
from penstock.protocol.journal import Entry, StepPlace, add_entries, decode_entries, encode_entry
from penstock.protocol.json_text import utf8_size
from penstock.protocol.reports import add_trace, decode_response, encode_result, error_text
from penstock.protocol.requests import ClaimId
from penstock.protocol.sealed import MARK, SEALED_ENCODING, escape_plain
from penstock.runtime.logs import log
from penstock.runtime.periodic import Pauses
from penstock.settings.model import Settings
from penstock.worker.attempt import Attempt
from penstock.worker.handlers.context import TaskCancelled
from penstock.worker.handlers.steps import StepPort, Suspend, Trial
from penstock.worker.responses import Refusal, Unfit, encoded_result, error_of, failure_answer, too_large

_FIRST_PAUSE_SECONDS = 0.5


def needs_opening(params: Any) -> bool:
    """Whether a task's raw parameters are an encrypted or offloaded payload, a JSON string."""
    return type(params) is msgspec.Raw and len(params) > 0 and memoryview(params)[0] == b'"'[0]


async def open_attempt(codec: PayloadCodec, attempt: Attempt) -> None:
    """Replace what is encrypted or offloaded, parameters and results in the journal, by the values themselves.

    Raises Refusal: one is lost, or unavailable now.
    """
    if needs_opening(attempt.params):
        with _needed(attempt, "its payload"):
            aad = payload_aad(attempt.handler.name, attempt.tenant)
            attempt.params = msgspec.Raw((await codec.load(bytes(attempt.params).decode(), aad)).encode())
    if MARK in attempt.journal:
        entries, task_id = decode_entries(attempt.journal), attempt.claim.task_id
        with _needed(attempt, "the result of a step"):
            values = await asyncio.gather(*(codec.load(e.value, aad_of("step", task_id, *e.key)) for e in entries))
        opened = [entry.with_value(value, None) for entry, value in zip(entries, values, strict=True)]
        attempt.journal = msgspec.json.encode(opened).decode()


@contextmanager
def _needed(attempt: Attempt, what: str) -> Iterator[None]:
    """Raises Refusal where a payload that the attempt cannot begin without is lost, or unavailable now."""
    try:
        yield
    except PayloadUnavailable as exc:
        log.warning("payload_unavailable", **attempt.log_fields(), reason=str(exc))
        raise Refusal("PayloadUnavailable", f"{what} cannot be had now: {exc}", data={"not_begun": True}) from None
    except PayloadLost as exc:
        raise Refusal("PayloadLost", f"{what} cannot be had: {exc}") from None


async def store_result(codec: PayloadCodec, claim: ClaimId, answer: str) -> str:
    """Offload a large result; returns the response. Retries while the bucket is unavailable. Raises Refusal."""
    decoded = decode_response(answer)
    result = bytes(decoded.result).decode()
    if not result or not codec.is_large(result):
        return answer
    kept = await kept_object(codec, claim, result, aad_of("result", claim.task_id))
    return encode_result(str(decoded.id), kept, bytes(decoded.spawn).decode(), encoding=SEALED_ENCODING)


async def kept_object(codec: PayloadCodec, claim: ClaimId, result: str, aad: str) -> str:
    """Encode a result, a large one as an object. Retries while the bucket is unavailable. Raises Refusal."""
    pauses = Pauses(_FIRST_PAUSE_SECONDS, longest_seconds=30.0)
    while True:
        try:
            return await codec.store(result, aad)
        except PayloadUnavailable as exc:
            if exc.is_refusal:
                raise Refusal("ResultNotKept", f"the result of {len(result)} characters was not kept: {exc}") from None
            if pauses.is_reported:
                log.warning("result_not_kept", task_id=claim.task_id, failures=pauses.failures + 1, reason=str(exc))
            await asyncio.sleep(pauses.next_seconds())


def final_answer(codec: PayloadCodec, attempt: Attempt, answer: str) -> str:
    """The response, encrypted where that is on, with the trace and the steps of the attempt. Raises nothing."""
    if codec.encrypts:
        try:
            answer = _encrypted(codec, attempt.claim, answer)
        except Exception as exc:  # without an answer, its message and its slot would stay taken
            problem = f"the worker could not encrypt the answer: {type(exc).__name__}"
            log.error("answer_not_encrypted", **attempt.log_fields(), reason=type(exc).__name__)
            answer = failure_answer(attempt.claim_id, attempt.handler, Refusal("AnswerNotEncrypted", problem))[0]
    if attempt.trace is not None:
        answer = add_trace(answer, attempt.trace)
    # Once more with the outcome, which may be recorded before the reports are: queues do not keep order.
    entries = attempt.reported if attempt.sleep is None else [*attempt.reported, attempt.sleep]
    return add_entries(answer, entries) if entries else answer


def _encrypted(codec: PayloadCodec, claim: ClaimId, answer: str) -> str:
    """The response with its result, spawned tasks or error encrypted."""
    decoded = decode_response(answer)
    if decoded.method is not None:
        return answer
    error = bytes(decoded.error).decode()
    if error:
        return f'{{"jsonrpc":"2.0","error":{encrypt_error(codec, claim.task_id, error)},"id":"{decoded.id}"}}'
    result, spawn = bytes(decoded.result).decode(), bytes(decoded.spawn).decode()
    if decoded.encoding is None:
        result = codec.encode(escape_plain(result), aad_of("result", claim.task_id))
    spawned = spawn and codec.encode(spawn, aad_of("spawn", claim.task_id))
    return encode_result(str(decoded.id), result, spawned, encoding=SEALED_ENCODING)


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
            raise RuntimeError("ctx.step_sync() would hold up the worker for ever: await ctx.step() in a coroutine")

    def begin(self, steps: int) -> None:
        attempt, limit = self.attempt, self.settings.steps_limit
        if attempt.handler.batch is not None:
            raise RuntimeError("durable steps need a handler of single tasks; this one is batched")
        if attempt.answered or attempt.is_lost:  # a thread goes on behind its time limit
            raise TaskCancelled("the task's claim has ended: another attempt goes on with it")
        # Another worker may have the message now, or have had it: what is begun here only now could run twice.
        if not attempt.lease.is_unbroken() or (attempt.is_redelivered and not attempt.reported):
            raise Suspend(is_redelivered=True)
        if steps >= limit:
            text = f"the task has {steps} durable steps; the limit is {limit} (PENSTOCK_STEPS_LIMIT)"
            raise Unfit("TooManySteps", text, code=TOO_LARGE)

    def record(self, place: StepPlace, trial: Trial) -> Future[Entry]:
        # Encoded by the caller, in a thread where the handler runs in one.
        if trial.error is None:
            text = encoded_result(trial.result, "the step")
        else:
            code, message, data = error_of(None, trial.error)
            text = error_text(code, message, **data)
        seconds, has_failed = round(monotonic() - trial.began, 6), trial.error is not None
        entry = Entry.of(place, text, is_error=has_failed, at=trial.at, seconds=seconds, tries=trial.tries)
        return asyncio.run_coroutine_threadsafe(self.keep(entry), self.loop)

    async def keep(self, entry: Entry) -> Entry:
        """Report a finished step; returns it once the report is sent. Raises Refusal, Suspend."""
        attempt, codec, settings = self.attempt, self.codec, self.settings
        text = entry.value
        size, limit = utf8_size(text), settings.largest_result_bytes
        if size > limit:
            what = f"the result of step {entry.label!r} is"
            raise too_large("BadResult", what, size, limit, settings.largest_result_setting)
        sent = entry
        if codec.is_on:
            aad = aad_of("step", attempt.claim.task_id, *entry.key)
            sealed = await kept_object(codec, attempt.claim, escape_plain(text), aad)
            sent = entry.with_value(sealed, SEALED_ENCODING)
        report = encode_entry(sent)
        journal_bytes = attempt.journal_bytes + sum(map(utf8_size, attempt.reported)) + utf8_size(report)
        if journal_bytes > settings.steps_limit_bytes:
            what, setting = "the results of the task's steps are", "PENSTOCK_STEPS_LIMIT_BYTES"
            raise too_large("JournalTooLarge", what, journal_bytes, settings.steps_limit_bytes, setting)
        attempt.reported = (*attempt.reported, report)
        await self.send(attempt, report)
        if not attempt.lease.is_unbroken():
            raise Suspend(is_redelivered=True)  # the report may come too late for the attempt that follows
        return entry
