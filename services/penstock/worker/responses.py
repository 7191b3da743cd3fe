"""Responses to what handlers return or raise. Making one raises nothing, or its task would run again and again."""

import json
import traceback
from bisect import bisect_right
from dataclasses import asdict
from typing import Any, NamedTuple

import msgspec

from penstock.protocol.compression import ENCODING, pack_result
from penstock.protocol.errors import HANDLER_ERROR, METHOD_NOT_FOUND, TASK_TIMEOUT, TOO_LARGE, RateLimited
from penstock.protocol.json_text import MAX_DEPTH, dumps, escape_for_sqs, foreign, is_deeper, replace_unstorable
from penstock.protocol.reports import decode_response, encode_error, encode_notification, encode_result, error_text
from penstock.protocol.requests import Invalid, Request, TaskRequest
from penstock.protocol.spelling import nearest
from penstock.protocol.task import BUILT_IN_ACTIONS
from penstock.settings.model import Settings
from penstock.worker.attempt import Attempt
from penstock.worker.handlers.actions import Handler, Registry
from penstock.worker.handlers.context import Wait
from penstock.worker.handlers.outcomes import ASKED, Fail, Retry, Snooze
from penstock.worker.handlers.steps import StepFailed, Suspend

TRACEBACK_LIMIT_BYTES = 8192  # of a traceback, as JSON; its end is kept
_ACTION_SHOWN_CHARS = 200
TIMEOUT_KIND = "TaskTimeout"

_encode = msgspec.json.Encoder(enc_hook=foreign).encode
_read = msgspec.json.Decoder(msgspec.Raw).decode

Error = tuple[int, str, dict[str, Any]]  # code, message and data


class Refusal(Exception):
    """The worker itself fails an attempt, such as for parameters that do not fit. data: of the error."""

    is_final = False

    def __init__(self, kind: str, text: str, *, code: int = HANDLER_ERROR, data: dict[str, Any] | None = None) -> None:
        super().__init__(text)
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


def answer_of(attempt: Attempt, result: Any, settings: Settings, *, compress_bytes: int | None = None) -> str:
    """The response to what a handler returned, packed over ``compress_bytes``; empty if settled. Raises Refusal."""
    if attempt.cancellation.is_settled:
        return ""
    claim_id, spawned = attempt.claim_id, attempt.spawned
    if type(result) is Wait:
        if spawned:
            problem = "ctx.spawn() goes with a result, and a task that waits has none: do one of the two"
            raise Unfit("BadResult", problem)
        if attempt.claim != result.attempt:
            raise Unfit("BadResult", "the wait was made by the context of another attempt; return your own ctx.wait()")
        about = {"token": result.token, "timeout": result.timeout, "on_timeout": result.on_timeout}
        return encode_notification("wait", id=claim_id, **about, **_hints(attempt.handler))
    if spawned:
        size = sum(map(len, spawned)) + len(spawned) + 1  # it is ASCII
        limit = settings.result_limit_bytes  # also with a bucket: they travel in the message
        if size > limit:
            raise too_large("TooManyChildren", "the spawned tasks are", size, limit, "PENSTOCK_RESULT_LIMIT_BYTES")
    if result is None:
        return encode_result(claim_id, "null", spawned)
    text = encoded_result(result)
    size = len(text) if text.isascii() else len(text.encode())
    limit = settings.largest_result_bytes
    if size > limit:
        raise too_large("BadResult", "the result is", size, limit, settings.largest_result_setting)
    if compress_bytes is not None and size > compress_bytes:
        packed = pack_result(text)
        if len(packed) < size:
            return encode_result(claim_id, f'"{packed}"', spawned, encoding=ENCODING)
    return encode_result(claim_id, text, spawned)


def suspension(claim_id: str, handler: Handler, why: Suspend) -> str:
    """The notification of a task that goes on later."""
    if why.token is None:
        until, redelivered = why.until and why.until.isoformat(), why.is_redelivered or None
        return encode_notification("suspend", id=claim_id, seconds=why.seconds, until=until, redelivered=redelivered)
    about = {"token": why.token, "timeout": why.timeout, "on_timeout": "retry"}
    step = why.place and msgspec.to_builtins(why.place)
    return encode_notification("wait", id=claim_id, **about, step=step, **_hints(handler))


def too_large(kind: str, what: str, size: int, limit_bytes: int, setting: str) -> Unfit:
    text = f"{what} {size} bytes; the limit is {limit_bytes} ({setting})"
    return Unfit(kind, text, code=TOO_LARGE, data={"size": size, "limit": limit_bytes})


def encoded_result(result: Any, of: str = "the handler") -> str:
    """A result as JSON text. of: what returned it. Raises Unfit."""
    try:
        encoded = _encode(result)
        text = replace_unstorable(encoded.decode())
        _read(encoded)  # what msgspec.Raw holds is written unchanged, and could spoil the message for other results
    except RecursionError:
        raise Unfit("BadResult", "the result holds itself, or is nested too deeply") from None
    except UnicodeEncodeError:
        raise Unfit("BadResult", "the result holds half a surrogate pair, no character") from None
    except Exception as exc:
        problem = f"{of} returned {type(result).__name__}, which is not JSON-serialisable: {text_of(exc)}"
        raise Unfit("BadResult", problem) from None
    if is_deeper(text):
        raise Unfit("BadResult", f"the result is nested deeper than {MAX_DEPTH} levels")
    if "null" in text:  # msgspec silently writes it for them
        try:
            dumps(result, foreign)
        except ValueError:
            raise Unfit("BadResult", "the result holds NaN or Infinity, which JSON cannot") from None
    return text if text.isascii() else escape_for_sqs(text)  # here, where it still counts towards the limit


def failure_answer(
    claim_id: str, handler: Handler | None, exc: BaseException, errors: dict[int, Error] | None = None
) -> tuple[str, Problem]:
    """The response to an exception, and what is wrong. errors: of the same call, to log each traceback once."""
    errors = {} if errors is None else errors
    is_first = id(exc) not in errors  # the exceptions of a call live as long as it
    try:
        if is_first:
            errors[id(exc)] = error_of(handler, exc)
        answer = encode_error(claim_id, *errors[id(exc)])
    except BaseException as broken:  # a subclass of Retry, say, that does not call its __init__
        errors[id(exc)] = error_of(handler, _unreadable(exc, broken))
        answer = encode_error(claim_id, *errors[id(exc)])
    data = errors[id(exc)][2]
    stack = data.get("traceback") if is_first else None
    return answer, Problem(data["type"], data["message"], stack, is_asked=issubclass(type(exc), ASKED))


def error_of(handler: Handler | None, exc: BaseException) -> Error:
    message, hints = text_of(exc), _hints(handler)
    if isinstance(exc, Refusal):
        final = {"final": True} if exc.is_final else {}
        return exc.code, message, {"type": exc.kind, "message": message, **hints, **exc.data, **final}
    kind = cut(type(exc).__name__, 200)
    data = {"type": kind, "message": message, **hints}
    if isinstance(exc, Retry):
        data["retry_after"] = exc.delay
    elif isinstance(exc, Snooze):
        data |= {"snooze": True, "retry_after": exc.delay}
    elif isinstance(exc, RateLimited):
        own = exc.key if isinstance(exc.key, str) else None
        held = {"hold": "action" if exc.key is None else "key", "hold_key": own}
        data |= {"snooze": True, "retry_after": exc.retry_after_seconds, **held}
    elif isinstance(exc, Fail | StepFailed):
        data["final"] = True  # a step that has failed finally is not run again, so further attempts fail as well
    if not isinstance(exc, (*ASKED, Fail)) or exc.__cause__ is not None:
        data["traceback"] = traceback_of(exc)
    return HANDLER_ERROR, cut(f"{kind}: {message}"), data


def legible(exc: BaseException) -> BaseException:
    """The exception; instead of one that fails when it is asked for its class, a Refusal."""
    try:
        isinstance(exc, Refusal)
    except BaseException as broken:
        return _unreadable(exc, broken)
    return exc


def _unreadable(exc: BaseException, broken: BaseException) -> Refusal:
    """Instead of an exception that lacks what its kind has. broken: what was raised when it was read."""
    kind = cut(type(exc).__name__, 200)
    problem = f"{kind} cannot be read: {type(broken).__name__}: {text_of(broken)}"
    return Refusal(kind, problem, data={"traceback": traceback_of(exc)})


def unknown_action(action: str, registry: Registry) -> Refusal:
    """The answer to a task without a handler."""
    near = nearest(action[:_ACTION_SHOWN_CHARS], registry)
    message = f"this worker has no handler for action {cut(action[:_ACTION_SHOWN_CHARS])!r}"
    if action in BUILT_IN_ACTIONS:
        message += "; it is built in, and run by workers whose PENSTOCK_DELIVERIES names it"
    elif near:
        message += f"; the nearest it has is {near!r}"
    return Refusal("UnknownAction", message, code=METHOD_NOT_FOUND, data={"nearest": near})


def timeout_of(ran_seconds: float, limit_seconds: float, where: str | None, **more: Any) -> Refusal:
    """The failure of an attempt at its time limit. where: the stack at which it was stopped."""
    message = f"stopped after {ran_seconds:.3g} s; one attempt may run {limit_seconds:g} s"
    data = {"limit_seconds": limit_seconds, "traceback": where, **more}
    return Refusal(TIMEOUT_KIND, message, code=TASK_TIMEOUT, data=data)


def no_task_answer(entry: TaskRequest | Request | Invalid) -> tuple[str, str]:
    """The response to an entry that names no task, for the resulter to store as rejected, and the reason."""
    if isinstance(entry, Invalid):
        shown, code, reason = entry.text, entry.error.code, entry.error.message
    else:
        id_ = json.dumps(entry.id) if isinstance(entry, TaskRequest) else bytes(entry.id).decode() or "none"
        shown, code = f"{entry.method} {bytes(entry.params).decode()} id {id_}", -32600
        reason = "its id is not <task id>:<claim>"
    problem = cut(f"outbound entry names no task: {reason}")
    error = error_text(code, problem, entry=cut(shown, TRACEBACK_LIMIT_BYTES))
    return f'{{"jsonrpc":"2.0","error":{error},"id":null}}', reason  # the id is null by JSON-RPC


def refused_answer(answer: str, size: int) -> str:
    """The response instead of one that the results queue does not accept."""
    message = f"the answer is {size} bytes, more than the results queue is set to take (its MaximumMessageSize)"
    decoded = decode_response(answer)
    final = not bytes(decoded.error)  # the handler has done its work
    claim_id = decoded.id if decoded.method is None else msgspec.json.decode(decoded.params)["id"]
    refusal = Refusal("BadResult", message, code=TOO_LARGE, data={"size": size, "final": final})
    return failure_answer(str(claim_id), None, refusal)[0]


def _hints(handler: Handler | None) -> dict[str, Any]:
    """What the action's registration says about retries."""
    if handler is None:
        return {}
    return {"max_attempts": handler.max_attempts, "backoff": handler.backoff and asdict(handler.backoff)}


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


def cut(text: str, limit_bytes: int = 2048, *, keep_end: bool = False) -> str:
    """The longest beginning, or end, of a text that is at most so many bytes as JSON in ASCII."""

    def part(chars: int) -> str:
        return str(text[len(text) - chars :] if keep_end else text[:chars])

    longest = min(len(text), limit_bytes)
    if len(json.dumps(part(longest))) > limit_bytes:
        chars = range(1, longest + 1)
        longest = bisect_right(chars, limit_bytes, key=lambda count: len(json.dumps(part(count))))
    return part(longest)
