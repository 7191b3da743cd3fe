"""Responses: what a handler returned or raised, as the JSON-RPC response that goes to the results queue. Pure.

Whatever a handler does has a response, in characters that SQS accepts and of bounded size, and making it raises nothing
unforeseen: a task without a response would run again and again.
"""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import msgspec

from penstock.protocol.compression import pack_result
from penstock.protocol.errors import HANDLER_ERROR, METHOD_NOT_FOUND, TASK_TIMEOUT, TOO_LARGE
from penstock.protocol.json_text import MAX_DEPTH, escape_for_sqs
from penstock.protocol.jsonable import foreign, to_builtins
from penstock.protocol.reports import encode_error, encode_packed_result, encode_result, encode_wait
from penstock.protocol.requests import Invalid, Request, parse_claim_id
from penstock.protocol.task import BUILT_IN_ACTIONS
from penstock.worker.handlers.actions import Handler, Registry
from penstock.worker.handlers.outcomes import Fail, Retry, Wait

TEXT_LIMIT_BYTES = 2048  # of a message, as JSON
TRACEBACK_LIMIT_BYTES = 8192  # of a traceback, as JSON; its end is kept
_ACTION_SHOWN_CHARS = 200

_encode = msgspec.json.Encoder(enc_hook=foreign).encode
_decode = msgspec.json.Decoder().decode

Error = tuple[int, str, dict[str, Any]]  # code, message and data


class Refusal(Exception):
    """The worker itself rejects an attempt, such as for parameters that do not fit.

    attempts: of the task, at most; None leaves it to the action and the task.
    """

    is_final = False

    def __init__(
        self, kind: str, text: str, *, code: int = HANDLER_ERROR, data: Mapping[str, Any] | None = None,
        attempts: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(text)
        self.attempts = attempts
        self.kind = kind
        self.code = code
        self.data = data or {}


class Unfit(Refusal):
    """A handler returned what cannot be a result. It has done its work, and would return the same: no more attempts."""

    is_final = True


class Problem(NamedTuple):
    """What is wrong with an attempt, for the log. is_asked: the handler asked for a retry."""

    kind: str
    message: str
    traceback: str | None = None
    is_asked: bool = False


def answer_of(
    claim_id: str,
    handler: Handler,
    result: Any,
    *,
    limit_bytes: int,
    compress_bytes: int | None = None,
    spawned: Sequence[str] = (),
) -> str:
    """The response of a handler that returned: a result, packed where it is over ``compress_bytes``, or a wait.

    spawned: tasks that come with it, as JSON text. Raises Refusal.
    """
    if type(result) is Wait:
        return _wait_answer(claim_id, handler, result, spawned)
    if spawned:
        size = sum(map(len, spawned)) + len(spawned) + 1  # it is ASCII
        if size > limit_bytes:
            raise _too_large("TooManyChildren", "the spawned tasks are", size, limit_bytes)
    if result is None:
        return encode_result(claim_id, "null", spawned)
    text = _encoded(result)
    size = len(text) if text.isascii() else len(text.encode())
    if size > limit_bytes:
        raise _too_large("BadResult", "the result is", size, limit_bytes)
    if compress_bytes is not None and size > compress_bytes:
        packed = pack_result(text)
        if len(packed) < size:
            return encode_packed_result(claim_id, packed, spawned)
    return encode_result(claim_id, text, spawned)


def _wait_answer(claim_id: str, handler: Handler, wait: Wait, spawned: Sequence[str]) -> str:
    if spawned:
        raise Unfit("BadResult", "ctx.spawn() goes with a result, and a task that waits has none: do one of the two")
    if parse_claim_id(claim_id) != wait.attempt:
        raise Unfit("BadResult", "the wait was made by the context of another attempt; return your own ctx.wait()")
    return encode_wait(claim_id, wait.token, timeout=wait.timeout, on_timeout=wait.on_timeout, hints=_hints(handler))


def _too_large(kind: str, what: str, size: int, limit_bytes: int) -> Unfit:
    text = f"{what} {size} bytes; the limit is {limit_bytes} (PENSTOCK_RESULT_LIMIT_BYTES)"
    return Unfit(kind, text, code=TOO_LARGE, data={"size": size, "limit": limit_bytes})


def _encoded(result: Any) -> str:
    """A result as JSON text. Raises Unfit."""
    try:
        encoded = _encode(result)
    except RecursionError:
        raise Unfit("BadResult", "the result holds itself, or is nested too deeply") from None
    except UnicodeEncodeError:
        raise Unfit("BadResult", "the result holds half a surrogate pair, no character") from None
    except Exception as exc:
        problem = f"the handler returned {type(result).__name__}, which is not JSON-serialisable: {text_of(exc)}"
        raise Unfit("BadResult", problem) from None
    # msgspec silently writes null for them.
    if b"null" in encoded and _holds_no_number(to_builtins(result)):
        raise Unfit("BadResult", "the result holds NaN or Infinity, which JSON cannot")
    if encoded.count(b"{") + encoded.count(b"[") > MAX_DEPTH and _depth(_decode(encoded)) > MAX_DEPTH:
        raise Unfit("BadResult", f"the result is nested deeper than {MAX_DEPTH} levels")
    text = encoded.decode()
    return text if text.isascii() else escape_for_sqs(text)  # here, where it still counts towards the limit


def _holds_no_number(value: Any) -> bool:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, float):
            if not math.isfinite(item):
                return True
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            stack.extend(item)
    return False


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
    return depth


def one_for_each(returned: Any, tasks: int) -> Sequence[Any]:
    """What a batched handler returned, one item per task. Raises Unfit for anything else."""
    if not isinstance(returned, list | tuple):
        problem = f"a batched handler returns a list with one answer for each task, not a {type(returned).__name__}"
    elif len(returned) != tasks:
        problem = f"the handler returned {len(returned)} answers to {tasks} tasks: it is unknown which is whose"
    else:
        return returned
    raise Unfit("BadBatch", problem)


def failure_answer(
    claim_id: str, handler: Handler, exc: BaseException, errors: dict[int, Error] | None = None
) -> tuple[str, Problem]:
    """The response to an exception, and what is wrong.

    errors: of the same call, which hold the traceback of an exception of several tasks once.
    """
    if isinstance(exc, Refusal):
        message = text_of(exc)
        data = {key: cut(value) if isinstance(value, str) else value for key, value in exc.data.items()}
        if exc.is_final:
            data["final"] = True
        hints = _hints(handler)
        if exc.attempts is not None:
            hints["max_attempts"] = min(exc.attempts, hints.get("max_attempts", exc.attempts))
        text = encode_error(claim_id, exc.code, message, {"type": exc.kind, "message": message, **data, **hints})
        return text, Problem(exc.kind, message)
    error = errors.get(id(exc)) if errors else None  # the exceptions of a call live as long as it
    is_first = error is None
    if error is None:
        error = _error_of(handler, exc)
        if errors is not None:
            errors[id(exc)] = error
    shown = error[2].get("traceback") if is_first else None
    problem = Problem(type(exc).__name__, error[2]["message"], shown, isinstance(exc, Retry))
    return encode_error(claim_id, *error), problem


def _error_of(handler: Handler, exc: BaseException) -> Error:
    kind = cut(type(exc).__name__, 200)
    message = text_of(exc)
    data = {"type": kind, "message": message, **_hints(handler)}
    if isinstance(exc, Retry):
        data["retry_after"] = exc.delay
    elif isinstance(exc, Fail):
        data["final"] = True
    if not isinstance(exc, Retry | Fail) or exc.__cause__ is not None:
        data["traceback"] = traceback_of(exc)
    return HANDLER_ERROR, cut(f"{kind}: {message}"), data


def timeout_answer(
    claim_id: str, handler: Handler, *, ran_seconds: float, limit_seconds: float, where: str | None = None
) -> tuple[str, Problem]:
    """The response of a task that was stopped, and what is wrong. ``where``: the stack at which it was stopped."""
    message = f"stopped after {ran_seconds:.3g} s; one attempt may run {limit_seconds:g} s"
    data = {"type": "TaskTimeout", "message": message, "limit_seconds": limit_seconds, **_hints(handler)}
    text = encode_error(claim_id, TASK_TIMEOUT, message, {**data, "traceback": where})
    return text, Problem("TaskTimeout", message, where)


def unknown_action_answer(
    claim_id: str, action: str, registry: Registry, attempts: int | None = None
) -> tuple[str, Problem]:
    """The response for an action without a handler, and what is wrong. attempts: of the task, at most."""
    shown = cut(action[:_ACTION_SHOWN_CHARS])
    near = registry.nearest(action[:_ACTION_SHOWN_CHARS])
    message = f"this worker has no handler for action {shown!r}"
    if action in BUILT_IN_ACTIONS:
        message += "; it is built in, and run by workers whose PENSTOCK_DELIVERIES names it"
    elif near:
        message += f"; the nearest it has is {near!r}"
    data: dict[str, Any] = {"type": "UnknownAction", "message": message, "nearest": near}
    if attempts is not None:
        data["max_attempts"] = attempts
    return encode_error(claim_id, METHOD_NOT_FOUND, message, data), Problem("UnknownAction", message)


def no_task_answer(entry: Request | Invalid, reason: str) -> str:
    """The response to an entry that names no task: its id is null, by JSON-RPC; the resulter stores it as rejected."""
    if isinstance(entry, Invalid):
        shown, code = entry.text, entry.error.code
    else:
        shown, code = f"{entry.method} {bytes(entry.params).decode()} id {bytes(entry.id).decode() or 'none'}", -32600
    error = {
        "code": code,
        "message": cut(f"outbound entry names no task: {reason}"),
        "data": {"entry": cut(shown, TRACEBACK_LIMIT_BYTES)},
    }
    return json.dumps({"jsonrpc": "2.0", "error": error, "id": None}, separators=(",", ":"))


class _Params(msgspec.Struct):
    id: str


class _Identified(msgspec.Struct):
    """Of a response, or of a wait's notification."""

    id: str = ""
    error: msgspec.Raw = msgspec.Raw(b"")
    params: _Params | None = None


_decode_id = msgspec.json.Decoder(_Identified).decode


def refused_answer(answer: str, size: int) -> str:
    """The response instead of one that the results queue does not accept."""
    message = f"the answer is {size} bytes, more than the results queue is set to take (its MaximumMessageSize)"
    named = _decode_id(answer)
    final = not bytes(named.error)  # the handler has done its work
    data = {"type": "BadResult", "message": message, "size": size, "final": final}
    claim_id = named.id if named.params is None else named.params.id
    return encode_error(claim_id, TOO_LARGE, message, data)


def _hints(handler: Handler) -> dict[str, Any]:
    """What the action's registration says about retries."""
    hints: dict[str, Any] = {}
    if handler.max_attempts is not None:
        hints["max_attempts"] = handler.max_attempts
    if handler.backoff is not None:
        hints["backoff"] = asdict(handler.backoff)
    return hints


def text_of(exc: BaseException) -> str:
    """An exception's text, bounded, even when the exception fails to give it."""
    try:
        return cut(str(exc))
    except BaseException as broken:
        return f"<{type(exc).__name__}, whose text is not available: {type(broken).__name__}>"


def traceback_of(exc: BaseException) -> str:
    """An exception's traceback without the worker's own frames, its end where it is long."""
    try:
        inner = exc.__traceback__
        while inner is not None and inner.tb_frame.f_globals.get("__package__") == __package__:
            inner = inner.tb_next
        lines = traceback.TracebackException(type(exc), exc, inner).format()
        return cut("".join(lines), TRACEBACK_LIMIT_BYTES, keep_end=True)
    except BaseException as broken:
        return f"<no traceback: {type(broken).__name__}>"


def cut(text: str, limit_bytes: int = TEXT_LIMIT_BYTES, *, keep_end: bool = False) -> str:
    """The longest beginning, or end, of a text that is at most so many bytes as JSON in ASCII."""

    def part(chars: int) -> str:
        return str(text[len(text) - chars :] if keep_end else text[:chars])

    low, high = 0, min(len(text), limit_bytes)
    if len(json.dumps(part(high))) <= limit_bytes:
        return part(high)
    while low < high:
        middle = (low + high + 1) // 2
        if len(json.dumps(part(middle))) <= limit_bytes:
            low = middle
        else:
            high = middle - 1
    return part(low)
