"""Reports: what workers send back, results, errors and signs of life, and how they are encoded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import structs

from penstock.protocol.checks import CONTROL
from penstock.protocol.compression import PACKED_PREFIX, Room, Unpackable, unpack_result
from penstock.protocol.errors import HANDLER_ERROR, INVALID_PARAMS, RpcError
from penstock.protocol.fence import Fence
from penstock.protocol.json_text import entry_text, replace_unstorable, short_reason, text_of
from penstock.protocol.requests import INT8_MAX, parse_claim_id, split_body
from penstock.protocol.sealed import SEALED_ENCODING, Reference, decode_sealed, escape_plain, is_sealed
from penstock.protocol.task import ACTION_MAX_CHARS, TOKEN_MAX_CHARS
from penstock.protocol.trace_context import TraceContext, parse

PROGRESS_NOTE_CHARS = 1000  # a longer note is cut

LONGEST_WAIT_SECONDS = 100 * 366 * 86_400.0  # for an outside event

# In one notification; what is summed up over many stays within the database's numbers.
_MOST_RUNS, _MOST_SECONDS = 10**9, 1e12

_EMPTY = msgspec.Raw(b"")
_CODE = re.compile(r"-?(?:0|[1-9][0-9]{0,8})")
_BARE_ID = re.compile(r"[0-9]{1,19}")


class Succeeded(msgspec.Struct, frozen=True, gc=False):
    """A result. ``claim`` is None in the older convention, where ``attempt`` must match the current one instead.

    spawn: JSON text of the tasks that come with it, empty for none. trace: of the attempt, where it tells.
    worker: which one tells it, as in other reports.
    """

    task_id: int
    claim: int | None
    attempt: int | None
    result: str
    spawn: str = ""
    trace: TraceContext | None = None
    worker: str | None = None


class Failed(msgspec.Struct, frozen=True, gc=False):
    """An error result; ``error`` is its JSON text, the rest are the hints found in its ``data``."""

    task_id: int
    claim: int | None
    attempt: int | None
    error: str
    hints: Hints
    trace: TraceContext | None = None
    worker: str | None = None


class Progress(msgspec.Struct, frozen=True, gc=False):
    """A sign of life: ``detail`` is JSON text of percent and note, or None for a bare heartbeat."""

    task_id: int
    claim: int
    detail: str | None
    worker: str | None = None


class Waiting(msgspec.Struct, frozen=True, gc=False):
    """A handler has ended and its task waits for an outside event, by token.

    timeout: seconds, None for the settings' own. policy: how a failure of the wait is retried, ``final`` counting for
    one that is not answered in time alone.
    """

    task_id: int
    claim: int
    token: str
    timeout: float | None
    policy: Hints
    worker: str | None = None


class Unreadable(msgspec.Struct, frozen=True, gc=False):
    """An entry that says nothing about any task, and why. is_foreign: no key known here made its claim id."""

    text: str
    reason: str
    is_foreign: bool = False


class RunTimes(msgspec.Struct, frozen=True):
    """What a worker tells of run times: by action, how many attempts have ended, and their seconds added up."""

    actions: dict[str, tuple[int, float]]


Report = Succeeded | Failed | Waiting | Progress | RunTimes | Unreadable


class Hints(msgspec.Struct, frozen=True):
    """What a worker may add to an error's ``data`` to steer the retry; wrong values are ignored.

    retry_after: seconds until the next attempt. final: no more attempts. max_attempts: lowers the task's own cap.
    backoff: the action's own policy. not_begun: the handler was not called, for its payload could not be had: the
    attempt does not count.
    """

    retry_after: float | None = None
    final: bool = False
    max_attempts: int | None = None
    backoff: BackoffHint | None = None
    not_begun: bool = False


class BackoffHint(msgspec.Struct, frozen=True):
    base_seconds: float
    factor: float
    cap_seconds: float
    jitter: float = 0.2


NO_HINTS = Hints()


class _Response(msgspec.Struct, frozen=True):
    jsonrpc: str = "2.0"  # not insisted on: a result is too dear to lose over it
    id: msgspec.Raw = _EMPTY
    result: msgspec.Raw = _EMPTY
    error: msgspec.Raw = _EMPTY
    encoding: str | None = None
    method: str | None = None
    params: msgspec.Raw = _EMPTY
    spawn: msgspec.Raw = _EMPTY
    traceparent: msgspec.Raw = _EMPTY
    tracestate: msgspec.Raw = _EMPTY


class _Error(msgspec.Struct, frozen=True):
    code: int | str
    message: str
    data: msgspec.Raw = _EMPTY
    attempt: int | str | None = None


class _WithAttempt(msgspec.Struct, frozen=True):
    attempt: int | str | None = None


class _ProgressParams(msgspec.Struct, frozen=True):
    id: str
    percent: float | None = None
    note: str | None = None


class _WaitParams(msgspec.Struct, frozen=True):
    token: str
    timeout: float | None = None
    on_timeout: Literal["retry", "fail"] = "retry"
    max_attempts: int | None = None
    backoff: BackoffHint | None = None


class _OfClaim(msgspec.Struct, frozen=True):
    id: str


class _Answer(msgspec.Struct, frozen=True, gc=False):
    """As _Response, in the form that nearly all have."""

    id: str | None = None
    result: msgspec.Raw = _EMPTY
    error: msgspec.Raw = _EMPTY
    encoding: str | None = None
    method: str | None = None
    spawn: msgspec.Raw = _EMPTY
    traceparent: msgspec.Raw = _EMPTY


_decode_response = msgspec.json.Decoder(_Response).decode
_decode_answers = msgspec.json.Decoder(list[_Answer]).decode
_decode_run_times = msgspec.json.Decoder(RunTimes).decode
_decode_error = msgspec.json.Decoder(_Error).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_hints = msgspec.json.Decoder(Hints).decode
_decode_attempt = msgspec.json.Decoder(_WithAttempt).decode
_decode_progress = msgspec.json.Decoder(_ProgressParams).decode
_decode_id = msgspec.json.Decoder(int | str).decode
_decode_wait = msgspec.json.Decoder(_WaitParams).decode
_decode_any = msgspec.json.Decoder().decode
_decode_claim = msgspec.json.Decoder(_OfClaim).decode


def decode_reports(
    body: bytes | str,
    *,
    batch_limit: int,
    worker: str | None = None,
    fence: Fence | None = None,
    bare_ids: bool = False,
) -> list[Report]:
    """Decode a body of the results queue: responses and notifications, single or batch; raises nothing.

    worker: which one sent it, see ``worker_of``. fence: which claim ids are taken, None for all. bare_ids: take the
    older convention, a bare task id with ``attempt``, which no fence protects.
    """
    try:
        text = replace_unstorable(text_of(body))
        is_batch, entries = split_body(text, batch_limit=batch_limit)
    except RpcError as exc:
        shown = body if isinstance(body, str) else body.decode("utf-8", "backslashreplace")
        return [Unreadable(shown, exc.message)]
    answers = _decode_at_once(text) if is_batch else None
    room = Room()
    if answers is None:
        return [_told_by(worker, decode_report(entry, room, fence, bare_ids)) for entry in entries]
    return [
        _plain(answer, worker, fence) or _told_by(worker, decode_report(entry, room, fence, bare_ids))
        for answer, entry in zip(answers, entries, strict=True)
    ]


def _told_by(worker: str | None, report: Report) -> Report:
    if worker is None or isinstance(report, RunTimes | Unreadable):
        return report
    return structs.replace(report, worker=worker)


def _decode_at_once(text: str) -> list[_Answer] | None:
    """All entries of a batch, or None when one is of another form."""
    try:
        return _decode_answers(text)
    except (ValueError, RecursionError):
        return None


def _plain(answer: _Answer, worker: str | None, fence: Fence | None) -> Succeeded | None:
    """The report of a plain success; None where a closer look is needed."""
    result = bytes(answer.result)
    is_other = (
        answer.method is not None or answer.encoding is not None or bytes(answer.spawn) or bytes(answer.traceparent)
    )
    if not result or is_other or answer.id is None or bytes(answer.error):
        return None
    claim_id = parse_claim_id(answer.id)
    if claim_id is None or (fence is not None and fence.problem(answer.id) is not None):
        return None
    return Succeeded(claim_id.task_id, claim_id.claim, None, escape_plain(result.decode()), "", None, worker)


def decode_report(
    entry: str | msgspec.Raw, room: Room | None = None, fence: Fence | None = None, bare_ids: bool = False
) -> Report:
    """Decode one entry. room: for what is unpacked of its body, None for one of its own; else as ``decode_reports``."""
    try:
        response = _decode_response(entry)
        if response.method is not None:
            return _notification(response, entry, fence)
        return _outcome(response, entry, room or Room(), fence, bare_ids)
    except (ValueError, RecursionError) as exc:
        return Unreadable(entry_text(entry), f"not a JSON-RPC response: {short_reason(exc)}")


def _foreign(name: str, entry: str | msgspec.Raw, fence: Fence | None) -> Unreadable | None:
    """The entry of a claim id that the fence does not let through."""
    problem = None if fence is None else fence.problem(name)
    return None if problem is None else Unreadable(entry_text(entry), problem, is_foreign=True)


def _notification(response: _Response, entry: str | msgspec.Raw, fence: Fence | None) -> Report:
    if response.method == "run_times":
        return _run_times(response, entry)
    if response.method == "wait":
        return _wait(response, entry, fence)
    if response.method != "progress":
        return Unreadable(
            entry_text(entry), f"unknown notification {response.method!r}; progress, wait and run_times are known"
        )
    params = _decode_progress(response.params)
    claim_id = parse_claim_id(params.id)
    if claim_id is None:
        return Unreadable(entry_text(entry), f"{params.id!r} is not <task id>:<claim>")
    foreign = _foreign(params.id, entry, fence)
    if foreign is not None:
        return foreign
    note = params.note
    if note and len(note) > PROGRESS_NOTE_CHARS and not is_sealed(f'"{note}'):
        note = note[:PROGRESS_NOTE_CHARS]
    detail = {"percent": params.percent, "note": note}
    empty = params.percent is None and params.note is None
    return Progress(*claim_id, None if empty else msgspec.json.encode(detail).decode())


def _wait(response: _Response, entry: str | msgspec.Raw, fence: Fence | None) -> Report:
    """A wait that makes no sense is a failed attempt: its worker has ended it and will say no more."""
    name = _decode_claim(response.params).id
    claim_id = parse_claim_id(name)
    if claim_id is None:
        return Unreadable(entry_text(entry), f"{name[:100]!r} is not <task id>:<claim>")
    foreign = _foreign(name, entry, fence)
    if foreign is not None:
        return foreign
    try:
        params = _decode_wait(response.params)
        check_token(params.token)
        if params.timeout is not None:
            check_wait_seconds(params.timeout)
    except ValueError as exc:
        problem = f"the worker's wait makes no sense: {short_reason(exc)}"
        error = {"code": INVALID_PARAMS, "message": problem, "data": {"type": "BadWait", "message": problem}}
        return Failed(*claim_id, None, json.dumps(error), NO_HINTS)
    policy = Hints(None, params.on_timeout == "fail", params.max_attempts, params.backoff)
    return Waiting(*claim_id, params.token, params.timeout, policy)


def check_token(token: object) -> str:
    """A token as something that a task can wait for. Raises ValueError."""
    if not isinstance(token, str) or not 1 <= len(token) <= TOKEN_MAX_CHARS:
        shown = f"{len(token)} characters" if isinstance(token, str) else f"a {type(token).__name__}"
        raise ValueError(f"a token is text of 1 to {TOKEN_MAX_CHARS} characters, not {shown}")
    if CONTROL.search(token):
        raise ValueError("a token holds no control character and no half of a surrogate pair")
    return token


def check_wait_seconds(seconds: object) -> float:
    """A time that a task can wait. Raises ValueError."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds <= LONGEST_WAIT_SECONDS:  # type: ignore[operator]
        raise ValueError(f"a wait lasts above 0 and at most {LONGEST_WAIT_SECONDS:.0f} seconds, not {seconds!r}")
    return float(seconds)  # type: ignore[arg-type]


def _run_times(response: _Response, entry: str | msgspec.Raw) -> Report:
    told = _decode_run_times(response.params)
    for action, (count, seconds) in told.actions.items():
        if not (len(action) <= ACTION_MAX_CHARS and 0 <= count <= _MOST_RUNS and 0 <= seconds <= _MOST_SECONDS):
            return Unreadable(entry_text(entry), f"run times of {action[:100]!r} make no sense: {count}, {seconds} s")
    return told


def _outcome(response: _Response, entry: str | msgspec.Raw, room: Room, fence: Fence | None, bare_ids: bool) -> Report:
    result, error = bytes(response.result), bytes(response.error)
    if error == b"null" and result:
        error = b""  # the habit of JSON-RPC 1.0: both members, one of them null
    if result == b"null" and error:
        result = b""
    if result and error:
        return Unreadable(entry_text(entry), "holds both result and error")
    if not result and not error:
        return Unreadable(entry_text(entry), "holds neither result nor error")
    if not bytes(response.id):
        return Unreadable(entry_text(entry), "holds no id")
    seen = _decode_id(response.id)
    claim_id = parse_claim_id(seen) if isinstance(seen, str) else None
    task_id, claim, attempt = claim_id.task_id if claim_id else 0, claim_id.claim if claim_id else None, None
    if claim_id is None:
        if not _BARE_ID.fullmatch(str(seen)) or int(seen) > INT8_MAX:
            return Unreadable(entry_text(entry), f"id {str(seen)[:100]!r} is not <task id>:<claim>")
        if not bare_ids:
            reason = f"id {seen} is a bare task id, taken with PENSTOCK_RESULTS_BARE_IDS=true alone"
            return Unreadable(entry_text(entry), reason)
        task_id = int(seen)
        attempt = _attempt_in(result or error)
        if attempt is None:
            return Unreadable(entry_text(entry), f"bare id {task_id} needs an attempt inside result or error")
    else:
        foreign = _foreign(str(seen), entry, fence)
        if foreign is not None:
            return foreign
    if result and response.encoding == SEALED_ENCODING:
        return _sealed(response, Succeeded(task_id, claim, attempt, result.decode(), _spawned(response)))
    if result and response.encoding is not None:
        try:
            text = replace_unstorable(unpack_result(result, response.encoding, room))
        except Unpackable as exc:
            # The worker has answered and will not answer again, so this is what came of the attempt.
            told = json.dumps({"code": exc.code, "message": str(exc), "data": {"type": "BadEncoding"}})
            return Failed(task_id, claim, attempt, told, NO_HINTS)
        return Succeeded(task_id, claim, attempt, escape_plain(text), _spawned(response), _trace(response))
    if result:
        return Succeeded(task_id, claim, attempt, escape_plain(result.decode()), _spawned(response), _trace(response))
    decoded = _decode_error(error)
    text = error.decode() if isinstance(decoded.code, int) else _with_number(error, decoded.code)
    return Failed(task_id, claim, attempt, text, _hints(decoded), _trace(response))


def _with_number(error: bytes, code: str) -> str:
    """An error of sqs-scheduler's workers, whose codes are text, with a number as its code."""
    members = _decode_members(error)
    members["code"] = msgspec.Raw(code.encode() if _CODE.fullmatch(code) else str(HANDLER_ERROR).encode())
    return msgspec.json.encode(members).decode()


def _sealed(response: _Response, report: Succeeded) -> Report:
    """What a worker has sealed itself; its attempt has failed where that makes no sense."""
    try:
        found = decode_sealed(report.result)
        if isinstance(found, Reference) and found.is_offered:
            raise ValueError("a result is no object that was offered")
    except ValueError as exc:
        told = json.dumps({"code": HANDLER_ERROR, "message": str(exc), "data": {"type": "BadEncoding"}})
        return Failed(report.task_id, report.claim, report.attempt, told, NO_HINTS)
    return report


def _spawned(response: _Response) -> str:
    spawn = bytes(response.spawn)
    return "" if spawn == b"null" else spawn.decode()


def _trace(response: _Response) -> TraceContext | None:
    """The attempt's context; what is none is passed over, for a result is too dear to lose over it."""
    if not bytes(response.traceparent):
        return None
    try:
        state = _decode_any(response.tracestate) if bytes(response.tracestate) else None
        return parse(_decode_any(response.traceparent), state)
    except (ValueError, RecursionError):
        return None


def add_trace(answer: str, trace: TraceContext) -> str:
    """A response, or a wait's notification, with the context of the attempt that it comes from."""
    return f"{answer[:-1]},{msgspec.json.encode(trace.headers).decode()[1:]}"


def _attempt_in(raw: bytes) -> int | None:
    """The older convention's attempt: a number, or a string of one, inside result, error or the error's data."""
    try:
        attempt = _decode_attempt(raw).attempt
        if attempt is None:
            attempt = _decode_attempt(bytes(_decode_error(raw).data) or b"{}").attempt
        return None if attempt is None or int(attempt) < 0 else int(attempt)
    except ValueError:
        return None


def _hints(error: _Error) -> Hints:
    data = bytes(error.data)
    if not data.startswith(b"{"):
        return NO_HINTS
    try:
        return _decode_hints(data)
    except ValueError:
        return NO_HINTS


def encode_result(claim_id: str, result: str, spawn: Sequence[str] = ()) -> str:
    """The response of one task that succeeded; ``result`` is JSON text, ``spawn`` that of tasks which come with it."""
    if spawn:
        return f'{{"jsonrpc":"2.0","result":{result},"spawn":[{",".join(spawn)}],"id":"{claim_id}"}}'
    return f'{{"jsonrpc":"2.0","result":{result},"id":"{claim_id}"}}'


def encode_packed_result(claim_id: str, packed: str, spawn: Sequence[str] = ()) -> str:
    """The same with a result that was packed by ``pack_result``."""
    spawned = f',"spawn":[{",".join(spawn)}]' if spawn else ""
    return f'{PACKED_PREFIX},"result":"{packed}"{spawned},"id":"{claim_id}"}}'


def encode_sealed_result(claim_id: str, sealed: str, spawn: str = "") -> str:
    """The same with a result that was sealed; ``spawn`` is sealed too, or empty."""
    spawned = f',"spawn":{spawn}' if spawn else ""
    return f'{{"jsonrpc":"2.0","encoding":"{SEALED_ENCODING}","result":{sealed}{spawned},"id":"{claim_id}"}}'


def encode_error(claim_id: str, code: int, message: str, data: dict[str, Any]) -> str:
    """The response of one task that failed; ``data`` holds type, message, traceback and hints."""
    error = {"code": code, "message": message, "data": {k: v for k, v in data.items() if v is not None}}
    return f'{{"jsonrpc":"2.0","error":{_dump(error)},"id":"{claim_id}"}}'


def encode_progress(claim_id: str, percent: float | None = None, note: str | None = None) -> str:
    """A progress notification; without percent and note it is a heartbeat."""
    params = {"id": claim_id, "percent": percent, "note": note}
    given = {key: value for key, value in params.items() if value is not None}
    return f'{{"jsonrpc":"2.0","method":"progress","params":{_dump(given)}}}'


def encode_wait(
    claim_id: str,
    token: str,
    *,
    timeout: float | None,
    on_timeout: str = "retry",
    hints: Mapping[str, Any] | None = None,
) -> str:
    """The notification of one task that waits from now on; ``hints``: max_attempts and backoff of its action."""
    params = {"id": claim_id, "token": token, "timeout": timeout, "on_timeout": on_timeout, **(hints or {})}
    given = {key: value for key, value in params.items() if value is not None}
    return f'{{"jsonrpc":"2.0","method":"wait","params":{_dump(given)}}}'


def encode_run_times(actions: Mapping[str, tuple[int, float]]) -> str:
    """A notification of run times; see RunTimes."""
    return f'{{"jsonrpc":"2.0","method":"run_times","params":{{"actions":{_dump(actions)}}}}}'


def _dump(value: Any) -> str:
    # ASCII escapes let any str of Python pass, lone surrogates included.
    return json.dumps(value, separators=(",", ":"), default=str)
