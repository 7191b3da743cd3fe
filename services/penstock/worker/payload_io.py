"""Opens payloads before a handler sees them; stores and encrypts results before they are sent."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from penstock.payloads.codec import PayloadCodec, aad_of, payload_aad
from penstock.payloads.records import encrypt_error
from penstock.protocol.errors import PayloadLost, PayloadUnavailable
from penstock.protocol.journal import add_entries, decode_entries
from penstock.protocol.reports import add_trace, decode_response, encode_result, trace_of
from penstock.protocol.requests import ClaimId
from penstock.protocol.sealed import MARK, SEALED_ENCODING, escape_plain
from penstock.runtime.logs import log
from penstock.runtime.periodic import Pauses
from penstock.worker.attempt import Attempt
from penstock.worker.responses import Refusal, failure_answer

_QUOTE = ord('"')
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0


def needs_opening(params: Any) -> bool:
    """Whether a task's raw parameters are an encrypted or offloaded payload."""
    return type(params) is msgspec.Raw and len(params) > 0 and memoryview(params)[0] == _QUOTE


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
        problem = f"{what} cannot be had now: {exc}"
        raise Refusal("PayloadUnavailable", problem, data={"not_begun": True}) from None
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
    pauses = Pauses(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
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
    """The response, encrypted where that is on, with the steps that the attempt has reported. Raises nothing."""
    if codec.encrypts:
        try:
            answer = _encrypted(codec, attempt.claim, answer)
        except Exception as exc:  # without an answer, its message and its slot would stay taken
            problem = f"the worker could not encrypt the answer: {type(exc).__name__}"
            log.error("answer_not_encrypted", **attempt.log_fields(), reason=type(exc).__name__)
            answer = failure_answer(attempt.claim_id, attempt.handler, Refusal("AnswerNotEncrypted", problem))[0]
    # Once more with the outcome, which may be recorded before the reports are: queues do not keep order.
    return add_entries(answer, attempt.entries) if attempt.entries else answer


def _encrypted(codec: PayloadCodec, claim: ClaimId, answer: str) -> str:
    """The response with its result, spawned tasks or error encrypted."""
    decoded = decode_response(answer)
    if decoded.method is not None:
        return answer
    error = bytes(decoded.error).decode()
    if error:
        sealed = f'{{"jsonrpc":"2.0","error":{encrypt_error(codec, claim.task_id, error)},"id":"{decoded.id}"}}'
    else:
        result, spawn = bytes(decoded.result).decode(), bytes(decoded.spawn).decode()
        if decoded.encoding is None:
            result = codec.encode(escape_plain(result), aad_of("result", claim.task_id))
        spawned = spawn and codec.encode(spawn, aad_of("spawn", claim.task_id))
        sealed = encode_result(str(decoded.id), result, spawned, encoding=SEALED_ENCODING)
    trace = trace_of(decoded)
    return sealed if trace is None else add_trace(sealed, trace)
