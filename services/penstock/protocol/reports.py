"""Reports: the results, errors, waits, heartbeats, output and run times that workers send, and how they are encoded."""

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec

from penstock.protocol import json_text
from penstock.protocol.checks import CONTROL
from penstock.protocol.compression import UNPACKED_BODY_BYTES, Unpackable, unpack_result
from penstock.protocol.errors import HANDLER_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND, RpcError
from penstock.protocol.fence import Fence
from penstock.protocol.journal import Entry, StepPlace, check_step_name, decode_entries, decode_entry
from penstock.protocol.json_text import ABSENT, decode_any, entry_text, replace_unstorable, short_reason, text_of
from penstock.protocol.message_attributes import WORKER_NAME_MAX_CHARS, parse_pack_id, parse_ranges, ranges_of
from penstock.protocol.output import decode_part
from penstock.protocol.requests import INT8_MAX, ClaimId, given, parse_claim_id, split_body
from penstock.protocol.sealed import SEALED_ENCODING, Reference, decode_sealed, escape_plain, is_encrypted
from penstock.protocol.task import ACTION_MAX_CHARS, TOKEN_MAX_CHARS
from penstock.protocol.tenant import stored_key
from penstock.protocol.trace_context import TraceContext, parse

PROGRESS_NOTE_CHARS = 1000  # a longer note is cut
_ENCRYPTED_TIMES = 17  # as long is one at most when it is encrypted: escapes of JSON, then base64
SCHEMA_MAX_CHARS = 16_384  # a longer JSON Schema is not kept
SHARED_RESULT_BYTES = 1024  # a result of many tasks takes its space in Postgres for each
LONGEST_WAIT_SECONDS = 100 * 366 * 86_400.0  # for an outside event

# In one notification, so that sums of many stay within the database's numbers.
_Runs = Annotated[int, msgspec.Meta(ge=0, le=10**9)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]

_MADE_TOKEN = re.compile(r"wait:([0-9]{1,19}:[0-9]{1,19}):[A-Za-z0-9_-]{22}")


class BackoffHint(msgspec.Struct, frozen=True):
    base_seconds: float
    factor: float
    cap_seconds: float
    jitter: float = 0.2


class Hints(msgspec.Struct, frozen=True):
    """Members of an error's ``data`` that steer the retry; invalid ones are ignored. retry_after: seconds until then.

    final: no more attempts. max_attempts: lowers the task's own cap. backoff: the action's own policy. not_begun: the
    payload was unavailable, so the handler was not called and the attempt does not count. snooze: it does not count
    either, for the handler asks to run later. hold: "action" or "key", of which no task is sent until then; hold_key:
    which key, None for the task's own. unknown_action: the worker has no handler.
    """

    retry_after: float | None = None
    final: bool = False
    max_attempts: int | None = None
    backoff: BackoffHint | None = None
    not_begun: bool = False
    snooze: bool = False
    hold: str | None = None
    hold_key: str | None = None
    unknown_action: bool = False

    @property
    def spends_none(self) -> bool:
        """Whether the attempt is given back."""
        return not self.final and (self.not_begun or self.snooze or self.unknown_action)


class WaitPolicy(Hints, frozen=True):
    """How a failure of a wait is retried. step: the event of a durable step, whose task goes on in its handler."""

    step: StepPlace | None = None


class Succeeded(msgspec.Struct, frozen=True, gc=False):
    """A result as JSON text. claim: None for a legacy result id, whose ``attempt`` must match the current one instead.

    spawn: JSON text of the spawned tasks, or empty. trace: of the attempt, if it was sent. worker: its name, if known.
    steps: those that the attempt has reported before.
    """

    task_id: int
    claim: int | None
    attempt: int | None
    result: str
    spawn: str = ""
    trace: TraceContext | None = None
    worker: str | None = None
    steps: Sequence[Entry] = ()


class SharedResult(msgspec.Struct, frozen=True, gc=False):
    """One result of several tasks of a claim, which is all that their attempts report."""

    task_ids: Sequence[int]
    claim: int
    result: str
    worker: str | None = None

    def each(self) -> list[Succeeded]:
        return [Succeeded(task_id, self.claim, None, self.result, worker=self.worker) for task_id in self.task_ids]


class Failed(msgspec.Struct, frozen=True, gc=False):
    """An error as JSON text; the rest as of ``Succeeded``."""

    task_id: int
    claim: int | None
    attempt: int | None
    error: str
    hints: Hints
    trace: TraceContext | None = None
    worker: str | None = None
    steps: Sequence[Entry] = ()


class _OfClaim(msgspec.Struct, frozen=True, gc=False):
    task_id: int
    claim: int


class Progress(_OfClaim, frozen=True, gc=False):
    """A heartbeat. detail: JSON text of percent and note; None without both."""

    detail: str | None
    worker: str | None = None


class Waiting(_OfClaim, frozen=True, gc=False):
    """A task waits for an event. timeout: seconds; None: the setting. policy: of a failure, ``final`` of a timeout."""

    token: str
    timeout: float | None
    policy: WaitPolicy
    worker: str | None = None
    steps: Sequence[Entry] = ()


class Stepped(_OfClaim, frozen=True, gc=False):
    """A finished durable step."""

    entry: Entry
    worker: str | None = None


class Suspended(_OfClaim, frozen=True, gc=False):
    """A task goes on later: after ``seconds`` or at ``until``. is_redelivered: earlier steps may be on their way."""

    seconds: float = 0.0
    until: datetime | None = None
    is_redelivered: bool = False
    worker: str | None = None
    steps: Sequence[Entry] = ()


class Output(_OfClaim, frozen=True, gc=False):
    """Log lines and chunks of an attempt, as JSON text or sealed; number and dropped as of ``OutputPart``."""

    number: int
    entries: str
    dropped: int
    worker: str | None = None


class RunTimes(msgspec.Struct, frozen=True):
    """By action, how many attempts have ended, and the sum of their seconds."""

    actions: dict[Annotated[str, msgspec.Meta(max_length=ACTION_MAX_CHARS)], tuple[_Runs, _Seconds]]


class Announced(msgspec.Struct, frozen=True):
    """A worker runs an action. params, result: JSON Schemas as JSON text, or None."""

    action: str
    worker: str
    version: str | None = None
    description: str | None = None
    params: str | None = None
    result: str | None = None


class Unreadable(msgspec.Struct, frozen=True, gc=False):
    """An entry that identifies no task. is_foreign: no key known here made its claim id."""

    text: str
    reason: str
    is_foreign: bool = False


Outcome = Succeeded | Failed | Waiting | Suspended
"""How an attempt has ended."""
Report = Outcome | SharedResult | Stepped | Progress | Output | RunTimes | Announced | Unreadable

NO_HINTS = Hints()


class Response(msgspec.Struct, frozen=True, gc=False):
    jsonrpc: str = "2.0"  # may be missing: a result is worth more than its version
    id: int | str | None = None
    result: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT
    encoding: str | None = None
    method: str | None = None
    params: msgspec.Raw = ABSENT
    spawn: msgspec.Raw = ABSENT
    traceparent: msgspec.Raw = ABSENT
    tracestate: msgspec.Raw = ABSENT
    steps: msgspec.Raw = ABSENT


class _Error(msgspec.Struct, frozen=True):
    code: int | str
    message: str
    data: msgspec.Raw = ABSENT


class _LegacyAttempt(msgspec.Struct, frozen=True):
    attempt: int | str | None = None


class _ClaimParams(msgspec.Struct, frozen=True):
    id: str


class _SharedParams(msgspec.Struct, frozen=True):
    pack: str
    places: str
    result: msgspec.Raw


class _ProgressParams(_ClaimParams, frozen=True):
    percent: float | None = None
    note: str | None = None


class _WaitParams(msgspec.Struct, frozen=True):
    token: str
    timeout: float | None = None
    on_timeout: Literal["retry", "fail"] = "retry"
    max_attempts: int | None = None
    backoff: BackoffHint | None = None
    step: StepPlace | None = None

    def __post_init__(self) -> None:
        check_token(self.token)
        if self.timeout is not None:
            check_wait_seconds(self.timeout)
        if self.step is not None:
            check_step_name(self.step.name)


class _SuspendParams(_ClaimParams, frozen=True):
    seconds: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_WAIT_SECONDS)] = 0.0
    until: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    redelivered: bool = False

    def __post_init__(self) -> None:
        latest = datetime.now(UTC).timestamp() + LONGEST_WAIT_SECONDS
        if self.until is not None and self.until.timestamp() > latest:
            raise ValueError(f"{self.until.isoformat()} is too far away")


class _AnnounceParams(msgspec.Struct, frozen=True):
    action: str
    worker: str | None = None
    version: str | None = None
    description: str | None = None
    params: msgspec.Raw = ABSENT
    result: msgspec.Raw = ABSENT


decode_response = msgspec.json.Decoder(Response).decode
_decode_responses = msgspec.json.Decoder(list[Response]).decode
_decode_error = msgspec.json.Decoder(_Error).decode


class _EntryError(Exception):
    def __init__(self, reason: str, *, is_foreign: bool = False) -> None:
        super().__init__(reason)
        self.is_foreign = is_foreign


def decode_reports(body: bytes | str, **how: Any) -> list[Report]:
    """As ``read_reports``, without the entries."""
    return [report for report, _ in read_reports(body, **how)]


def read_reports(
    body: bytes | str,
    *,
    batch_limit: int,
    worker: str | None = None,
    fence: Fence | None = None,
    bare_ids: bool = False,
) -> Iterable[tuple[Report, str | msgspec.Raw]]:
    """Decode a body of the results queue, responses and notifications, single or batch; each with its entry.

    Raises nothing.
    worker: the sender. fence: the claim ids that are accepted; None: all. bare_ids: accept legacy result ids, a bare
    task id with ``attempt``, which no fence protects.
    """
    try:
        text = replace_unstorable(text_of(body))
        is_batch, entries = split_body(text, batch_limit=batch_limit)
    except RpcError as exc:
        text = body if isinstance(body, str) else body.decode("utf-8", "backslashreplace")
        return [(Unreadable(text, exc.message), text)]
    responses: Sequence[Response | None] = [None] * len(entries)
    if is_batch and isinstance(entries[0], msgspec.Raw):
        with suppress(ValueError, RecursionError):  # at least one entry is no response: they are decoded one by one
            responses = _decode_responses(text)
    decoder = _Decoder(worker, fence, bare_ids)
    return zip(map(decoder.decode, entries, responses), entries, strict=True)


def decode_report(entry: str | msgspec.Raw, *, bare_ids: bool = False, worker: str | None = None) -> Report:
    """Decode one entry, as ``decode_reports``."""
    return _Decoder(worker, None, bare_ids).decode(entry)


@dataclass(slots=True)
class _Decoder:
    worker: str | None
    fence: Fence | None
    bare_ids: bool
    room: int = UNPACKED_BODY_BYTES  # bytes that the results of one message may still unpack to

    def decode(self, entry: str | msgspec.Raw, response: Response | None = None) -> Report:
        try:
            if response is None:
                if isinstance(entry, str):
                    json_text.refuse_depth(entry)
                response = decode_response(entry)
            match response.method:
                case None:
                    return self._outcome(response)
                case "progress":
                    return self._progress(response.params)
                case "shared_result":
                    return self._shared(msgspec.json.decode(response.params, type=_SharedParams))
                case "wait" | "suspend":
                    return self._put_off(response)
                case "step":
                    claim_id = self._claim_of(msgspec.json.decode(response.params, type=_ClaimParams).id)
                    return Stepped(*claim_id, self._stored(decode_entry(response.params)), self.worker)
                case "output":
                    part, text = decode_part(response.params)
                    return Output(*self._claim_of(part.id), part.number, text, part.dropped, self.worker)
                case "run_times":
                    return msgspec.json.decode(response.params, type=RunTimes)
                case "announce":
                    return self._announced(msgspec.json.decode(response.params, type=_AnnounceParams))
            known = "shared_result, progress, wait, step, suspend, output, run_times and announce are known"
            raise _EntryError(f"unknown notification {response.method!r}; {known}")
        except _EntryError as exc:
            return Unreadable(entry_text(entry), str(exc), exc.is_foreign)
        except (ValueError, RecursionError, Unpackable) as exc:
            return Unreadable(entry_text(entry), f"not a JSON-RPC response: {short_reason(exc)}")

    def _outcome(self, response: Response) -> Succeeded | Failed:
        result, error = bytes(response.result), bytes(response.error)
        if error == b"null" and result:
            error = b""  # as in JSON-RPC 1.0: both members, one of them null
        if result == b"null" and error:
            result = b""
        if bool(result) == bool(error):
            raise _EntryError("holds both result and error" if result else "holds neither result nor error")
        if response.id is None:
            raise _EntryError("holds no id")
        whose = self._whose(response.id, result or error)
        trace = trace_of(response) if bytes(response.traceparent) else None
        if error:
            decoded = _decode_error(error)
            text = error.decode() if isinstance(decoded.code, int) else _with_number(error, decoded.code)
            return Failed(*whose, text, _hints(decoded), trace, self.worker, self._steps(response))
        try:
            encoding = response.encoding
            text = escape_plain(result.decode()) if encoding is None else self._decoded(result, encoding)
        except (ValueError, Unpackable) as exc:
            # The worker has answered and will not answer again, so the attempt has failed.
            code = exc.code if isinstance(exc, Unpackable) else HANDLER_ERROR
            fault = error_text(code, str(exc), type="BadEncoding")
            return Failed(*whose, fault, NO_HINTS, None, self.worker, self._steps(response))
        spawn, steps = bytes(response.spawn), self._steps(response)
        return Succeeded(*whose, text, "" if spawn == b"null" else spawn.decode(), trace, self.worker, steps)

    def _shared(self, params: _SharedParams) -> SharedResult:
        self._check_fence(params.pack)
        result = bytes(params.result)
        if len(result) > SHARED_RESULT_BYTES:
            raise _EntryError(f"a shared result has at most {SHARED_RESULT_BYTES} bytes, not {len(result)}")
        claim, task_ids = parse_pack_id(params.pack)
        places = parse_ranges(params.places)
        if max(places) >= len(task_ids) or len(set(places)) < len(places):
            raise _EntryError(f"its places are not some of the {len(task_ids)} tasks of the pack")
        if len(places) < len(task_ids):
            task_ids = [task_ids[place] for place in places]
        return SharedResult(task_ids, claim, escape_plain(result.decode()), self.worker)

    def _claim_of(self, name: str) -> ClaimId:
        claim_id = parse_claim_id(name)
        if claim_id is None:
            raise _EntryError(f"{name[:100]!r} is not <task id>:<claim>")
        self._check_fence(name)
        return claim_id

    def _check_fence(self, name: str) -> None:
        problem = None if self.fence is None else self.fence.problem(name)
        if problem is not None:
            raise _EntryError(problem, is_foreign=True)

    def _whose(self, given: int | str, raw: bytes) -> tuple[int, int | None, int | None]:
        """Task and claim, or for a result whose id is a bare task id, task and attempt."""
        claim_id = parse_claim_id(given) if isinstance(given, str) else None
        name = str(given)
        if claim_id is not None:
            self._check_fence(name)
            return claim_id.task_id, claim_id.claim, None
        if not re.fullmatch("[0-9]{1,19}", name) or int(name) > INT8_MAX:
            raise _EntryError(f"id {name[:100]!r} is not <task id>:<claim>")
        if not self.bare_ids:
            raise _EntryError(f"id {name} is a bare task id, taken with PENSTOCK_RESULTS_BARE_IDS=true alone")
        attempt: int | str | None = None
        with suppress(ValueError):  # a number, or text of one, inside result, error or the error's data
            attempt = msgspec.json.decode(raw, type=_LegacyAttempt).attempt
            if attempt is None:
                attempt = msgspec.json.decode(bytes(_decode_error(raw).data) or b"{}", type=_LegacyAttempt).attempt
            if attempt is not None and int(attempt) >= 0:
                return int(name), None, int(attempt)
        raise _EntryError(f"bare id {int(name)} needs an attempt inside result or error")

    def _decoded(self, result: bytes, encoding: str) -> str:
        """A packed or sealed result as it is stored. Raises ValueError, Unpackable."""
        if encoding != SEALED_ENCODING:
            text = unpack_result(result, encoding, self.room)
            self.room -= json_text.utf8_size(text)
            return escape_plain(replace_unstorable(text))
        sealed = decode_sealed(result.decode())
        if isinstance(sealed, Reference) and sealed.is_offered:
            raise ValueError("a result is no object that was offered")
        return result.decode()

    def _progress(self, raw: msgspec.Raw) -> Progress:
        params = msgspec.json.decode(raw, type=_ProgressParams)
        claim_id = self._claim_of(params.id)
        note = params.note
        if note:
            note = note[: PROGRESS_NOTE_CHARS * (_ENCRYPTED_TIMES if is_encrypted(f'"{note}') else 1)]
        is_bare = params.percent is None and note is None
        detail = None if is_bare else msgspec.json.encode({"percent": params.percent, "note": note}).decode()
        return Progress(*claim_id, detail, self.worker)

    def _announced(self, given: _AnnounceParams) -> Announced:
        worker = self.worker or given.worker
        if not worker or len(worker) > WORKER_NAME_MAX_CHARS or not 1 <= len(given.action) <= ACTION_MAX_CHARS:
            raise _EntryError("an announcement needs an action, and the worker, also as the message's attribute")
        schemas = [bytes(schema).decode() for schema in (given.params, given.result)]
        kept = [schema if schema.startswith("{") and len(schema) <= SCHEMA_MAX_CHARS else None for schema in schemas]
        version, description = (text and text[:PROGRESS_NOTE_CHARS] for text in (given.version, given.description))
        return Announced(given.action, worker, version, description, *kept)

    def _steps(self, response: Response) -> Sequence[Entry]:
        return tuple(map(self._stored, decode_entries(response.steps)))

    def _stored(self, entry: Entry) -> Entry:
        """The entry with its result or error as it is stored. Raises ValueError."""
        if entry.encoding is None:
            text = escape_plain(entry.value)
        else:
            text = self._decoded(bytes(entry.error or entry.result), entry.encoding)
        return entry.with_value(text, None)

    def _put_off(self, response: Response) -> Waiting | Suspended | Failed:
        """One that makes no sense is a failed attempt: its worker has ended it and will not report again."""
        claim_id = self._claim_of(msgspec.json.decode(response.params, type=_ClaimParams).id)
        kind: type[_WaitParams | _SuspendParams] = _WaitParams if response.method == "wait" else _SuspendParams
        try:
            params = msgspec.json.decode(response.params, type=kind)
        except ValueError as exc:
            problem = f"the worker's {response.method} makes no sense: {short_reason(exc)}"
            error = error_text(INVALID_PARAMS, problem, type=f"Bad{str(response.method).title()}", message=problem)
            return Failed(*claim_id, None, error, NO_HINTS, None, self.worker)
        steps = self._steps(response)
        if isinstance(params, _SuspendParams):
            return Suspended(*claim_id, params.seconds, params.until, params.redelivered, self.worker, steps)
        policy = WaitPolicy(None, params.on_timeout == "fail", params.max_attempts, params.backoff, step=params.step)
        return Waiting(*claim_id, params.token, params.timeout, policy, self.worker, steps)


def check_token(token: object) -> str:
    """A token that a task can wait for. Raises ValueError."""
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


def make_token(task_id: int, claim: int) -> str:
    """A token of one attempt with 128 random bits, in characters that need no escape in a URL."""
    return f"wait:{task_id}:{claim}:{secrets.token_urlsafe(16)}"


def claim_of_token(token: str) -> ClaimId | None:
    """The attempt of a token; None for one that a handler chose."""
    match = _MADE_TOKEN.fullmatch(token)
    return None if match is None else parse_claim_id(match[1])


def stored_token(token: str, tenant: str | None) -> str:
    """A token as it is stored: one that a handler chose is prefixed with the tenant of its task."""
    return token if claim_of_token(token) is not None else stored_key(tenant, token)


def digest_of_answer(answer: str) -> bytes:
    """SHA-256 of an answer, regardless of the order of members and white space."""
    try:
        text = json.dumps(json.loads(f"{{{answer}}}"), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):  # such as a number of 5,000 digits, which is compared as text
        text = answer
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _with_number(error: bytes, code: str) -> str:
    """An error of sqs-scheduler's workers, whose codes are text, with a number as its code."""
    members = msgspec.json.decode(error, type=dict[str, msgspec.Raw])
    number = code if re.fullmatch("-?(?:0|[1-9][0-9]{0,8})", code) else str(HANDLER_ERROR)
    members["code"] = msgspec.Raw(number.encode())
    return msgspec.json.encode(members).decode()


def _hints(error: _Error) -> Hints:
    hints = NO_HINTS
    with suppress(ValueError):
        hints = msgspec.json.decode(error.data, type=Hints)
    # What any JSON-RPC server answers to a method that it does not have.
    return msgspec.structs.replace(hints, unknown_action=True) if error.code == METHOD_NOT_FOUND else hints


def trace_of(response: Response) -> TraceContext | None:
    """The attempt's context; an invalid one is ignored, since a result is worth more than its trace."""
    try:
        state = decode_any(response.tracestate) if bytes(response.tracestate) else None
        return parse(decode_any(response.traceparent), state)
    except (ValueError, RecursionError):
        return None


_RESULT_HEAD = '{"jsonrpc":"2.0","result":'
_SPAWN_MEMBER = ',"spawn":'


def encode_result(claim_id: str, result: str, spawn: Sequence[str] | str = (), *, encoding: str | None = None) -> str:
    """The response of a success. result: JSON text, or as ``encoding`` says. spawn: texts of tasks, or all sealed."""
    if not (spawn or encoding):
        return f'{_RESULT_HEAD}{result},"id":"{claim_id}"}}'
    encoded = f',"encoding":"{encoding}"' if encoding else ""
    children = spawn if isinstance(spawn, str) else f"[{','.join(spawn)}]"
    spawned = f"{_SPAWN_MEMBER}{children}" if spawn else ""
    return f'{{"jsonrpc":"2.0"{encoded},"result":{result}{spawned},"id":"{claim_id}"}}'


def sole_result(answer: str, claim_id: str) -> str | None:
    """The result of a response of ``encode_result``, as JSON text; None where anything else is, or may be, in it."""
    # The text of spawned tasks may stand in a result as well, which then travels alone.
    if answer.startswith(_RESULT_HEAD) and answer.endswith(claim_id, 0, -2) and _SPAWN_MEMBER not in answer:
        return answer[len(_RESULT_HEAD) : -len(claim_id) - len(',"id":""}')]
    return None


def encode_shared_result(pack_id: str, places: Sequence[int], result: str) -> str:
    """The notification of one result of several tasks. places: of these in their message, ascending."""
    params = f'{{"pack":"{pack_id}","places":"{ranges_of(places)}","result":{result}}}'
    return f'{{"jsonrpc":"2.0","method":"shared_result","params":{params}}}'


def error_text(code: int, message: str, /, **data: Any) -> str:
    """The error of an attempt as JSON text. data: type, message, traceback and hints; what is None is left out."""
    # A file name in an exception may hold half a surrogate pair, with which no decoder takes the response.
    return replace_unstorable(_dump({"code": code, "message": message, "data": given(**data)}))


def encode_error(claim_id: str, code: int, message: str, data: Mapping[str, Any]) -> str:
    """The response of a failure; data as of ``error_text``."""
    return f'{{"jsonrpc":"2.0","error":{error_text(code, message, **data)},"id":"{claim_id}"}}'


def encode_progress(claim_id: str, percent: float | None = None, note: str | None = None) -> str:
    """Without percent and note, a heartbeat."""
    return encode_notification("progress", id=claim_id, percent=percent, note=note)


def add_trace(answer: str, trace: TraceContext) -> str:
    """A response or a wait's notification with the context of its attempt."""
    return f"{answer[:-1]},{msgspec.json.encode(trace.headers).decode()[1:]}"


def encode_notification(method: str, /, **params: Any) -> str:
    """A notification of the worker's; what is None is left out."""
    return f'{{"jsonrpc":"2.0","method":"{method}","params":{_dump(given(**params))}}}'


def _dump(value: Any) -> str:
    # ASCII escapes let any str of Python pass, lone surrogates included.
    return json.dumps(value, separators=(",", ":"), default=str, allow_nan=False)
