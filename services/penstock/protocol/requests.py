"""Requests: decoding bodies and their entries, encoding the calls that workers receive, packing entries into bodies."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.protocol import json_text
from penstock.protocol.errors import InvalidRequest, ParseError, RpcError
from penstock.protocol.json_text import ABSENT, entry_text, replace_unstorable, short_reason, text_of
from penstock.protocol.sealed import MARK

_MARK = MARK.encode()


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """``params`` and ``id`` are raw JSON, empty if absent; without id it is a notification. steps: a task's journal."""

    jsonrpc: Literal["2.0"]
    method: str
    params: msgspec.Raw = ABSENT
    id: msgspec.Raw = ABSENT
    steps: msgspec.Raw = ABSENT


class TaskRequest(msgspec.Struct, frozen=True):
    """A task as a worker receives it: a request whose id is text."""

    jsonrpc: Literal["2.0"]
    method: str
    id: str
    params: msgspec.Raw = ABSENT
    steps: msgspec.Raw = ABSENT


class Invalid(msgspec.Struct, frozen=True):
    """An entry that is no request: the error to answer, its id or ``null``, its unchanged text."""

    error: RpcError
    id: bytes
    text: str


class Body(NamedTuple):
    is_batch: bool
    entries: list[Request | Invalid]


class _OnlyId(msgspec.Struct, frozen=True):
    id: msgspec.Raw = ABSENT


_decode_request = msgspec.json.Decoder(Request).decode
_decode_batch = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_requests = msgspec.json.Decoder(list[Request]).decode
_decode_task_requests = msgspec.json.Decoder(list[TaskRequest]).decode
_decode_strictly = json.JSONDecoder(parse_constant=json_text.no_constant).decode
_WHITESPACE = " \t\n\r"
_NO_ID = frozenset((b"{", b"[", b"t", b"f"))
_NO_PARAMS = frozenset(bytes((first,)) for first in b'"-0123456789ntf')
# A string that does not end is a match too, up to the end of the text. As a failed match it would be scanned again from
# each of its quotes: in quadratic time.
_STRUCTURE = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[][{},]', re.DOTALL)


def split_body(body: bytes | str, *, batch_limit: int) -> tuple[bool, list[str | msgspec.Raw]]:
    """Whether a body is a batch, and its undecoded entries. Raises ParseError; InvalidRequest: empty or too long."""
    text = text_of(body)
    if not text.lstrip(_WHITESPACE).startswith("["):
        return False, [text]
    try:
        json_text.refuse_depth(text)
        entries: list[str | msgspec.Raw] = [*_decode_batch(text)]
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        entries = [*_split_slowly(text)]
    if not entries:
        raise InvalidRequest("Invalid Request: an empty batch")
    if len(entries) > batch_limit:
        raise InvalidRequest(f"Invalid Request: a batch of {len(entries)}; the limit is {batch_limit}")
    return True, entries


def _split_slowly(text: str) -> list[str]:
    """Split by brackets and commas, so that an entry nested too deeply or with a lone surrogate fails alone."""
    entries = []
    depth, start, end = 0, 0, 0
    for match in _STRUCTURE.finditer(text):
        mark = match[0]
        if mark in "[{":
            depth += 1
            if depth == 1:
                start = match.end()
        elif mark in "]}":
            depth -= 1
        if depth == 0 or (mark == "," and depth == 1):
            entries.append(text[start : match.start()].strip(_WHITESPACE))
            start = end = match.end()
        if depth == 0:
            break
    if depth or mark != "]":
        raise ParseError("Parse error: the array does not end")
    if text[end:].strip(_WHITESPACE):
        raise ParseError(f"Parse error: more text after the array at character {end}")
    for entry in entries:
        try:
            _decode_strictly(entry)
        except RecursionError:
            continue  # decoding it alone says so
        except ValueError as exc:
            raise ParseError(f"Parse error: {short_reason(exc)}") from None
    return entries


def decode_body(body: bytes | str, *, batch_limit: int, may_be_sealed: bool = False) -> Body:
    """Requests, each Invalid for an entry that is none. Raises as ``split_body``. may_be_sealed: by the scheduler."""
    text = text_of(body)
    if text.startswith("["):
        with suppress(ValueError, RecursionError):
            json_text.refuse_depth(text)
            requests = _decode_requests(text)
            if 0 < len(requests) <= batch_limit and not any(_fault(one, may_be_sealed) for one in requests):
                return Body(True, [*requests])
    is_batch, parts = split_body(text, batch_limit=batch_limit)
    entries = [decode_request(part, may_be_sealed=may_be_sealed) for part in parts]
    if not is_batch and isinstance(entries[0], Invalid) and isinstance(entries[0].error, ParseError):
        raise entries[0].error
    return Body(is_batch, entries)


def decode_task_requests(body: str, *, batch_limit: int) -> Sequence[TaskRequest | Request | Invalid]:
    """The entries of an outbound message; one whose id is no text stays a request. Raises as ``split_body``."""
    if body.startswith("["):
        with suppress(ValueError, RecursionError):
            json_text.refuse_depth(body)
            requests = _decode_task_requests(body)
            are_plain = _NO_PARAMS.isdisjoint([bytes(one.params)[:1] for one in requests])
            if 0 < len(requests) <= batch_limit and are_plain:
                return requests
    return [*map(_task_request_of, decode_body(body, batch_limit=batch_limit, may_be_sealed=True).entries)]


def _task_request_of(entry: Request | Invalid) -> TaskRequest | Request | Invalid:
    if isinstance(entry, Invalid) or bytes(entry.id)[:1] != b'"':
        return entry
    return TaskRequest(entry.jsonrpc, entry.method, bytes(entry.id)[1:-1].decode(), entry.params, entry.steps)


def _fault(request: Request, may_be_sealed: bool) -> str | None:
    if bytes(request.id)[:1] in _NO_ID:
        return "id must be a string, a number or null"
    params = bytes(request.params)
    if params[:1] in _NO_PARAMS and not (may_be_sealed and params.startswith(_MARK)):
        return "params must be an object or an array"
    return None


def decode_request(entry: str | msgspec.Raw, *, may_be_sealed: bool = False) -> Request | Invalid:
    """Decode one entry. Raises nothing."""
    try:
        if isinstance(entry, str):  # else the batch has been looked at
            json_text.refuse_depth(entry)
        request = _decode_request(entry)
        if fault := _fault(request, may_be_sealed):
            raise msgspec.ValidationError(fault)
        return request
    except RecursionError:
        return Invalid(ParseError("Parse error: nested too deeply"), b"null", entry_text(entry))
    except msgspec.ValidationError as exc:
        return Invalid(InvalidRequest(f"Invalid Request: {short_reason(exc)}"), _salvage_id(entry), entry_text(entry))
    except ValueError as exc:
        text = entry_text(entry)
        if json_text.holds_unstorable(text):
            return Invalid(InvalidRequest("Invalid Request: holds half a surrogate pair"), _salvage_id(entry), text)
        return Invalid(ParseError(f"Parse error: {short_reason(exc)}"), b"null", text)


def _salvage_id(entry: str | msgspec.Raw) -> bytes:
    try:
        raw = bytes(msgspec.json.decode(replace_unstorable(entry_text(entry)), type=_OnlyId).id)
    except (ValueError, RecursionError):
        return b"null"
    return raw if raw and raw[:1] not in b"{[tf" else b"null"


@lru_cache(maxsize=4096)
def _call_head(action: str) -> str:
    return f'{{"jsonrpc":"2.0","method":{json.dumps(action)},"params":'


def encode_call(
    task_id: int, claim: int, action: str, payload: str, *, claim_id: str | None = None, journal: str | None = None
) -> str:
    """The outbound request of one claimed task. claim_id: with its token; None: without one."""
    steps = "" if journal is None else f',"steps":{journal}'
    return f'{_call_head(action)}{payload},"id":"{claim_id or f"{task_id}:{claim}"}"{steps}}}'


class ClaimId(NamedTuple):
    task_id: int
    claim: int


INT8_MAX = 2**63 - 1
TOKEN_MAX_CHARS = 64


def parse_claim_id(text: str) -> ClaimId | None:
    """Read ``42:7`` or ``42:7:token``; None if it is no claim id."""
    left, _, rest = text.partition(":")
    right, colon, token = rest.partition(":")
    if not (left.isdecimal() and right.isdecimal() and text.isascii()) or len(left) > 19 or len(right) > 19:
        return None
    if colon and not (token.isalnum() and len(token) <= TOKEN_MAX_CHARS):
        return None
    task_id, claim = int(left), int(right)
    if task_id > INT8_MAX or claim > INT8_MAX:
        return None
    return tuple.__new__(ClaimId, (task_id, claim))  # in half of the time of ClaimId(...), once for every task


def task_params(action: str, payload: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of ``enqueue``; options that are None are left out."""
    task = {"action": action} | ({} if payload is None else {"payload": payload})
    return prepared(task | given(**options))


def given(**params: Any) -> dict[str, Any]:
    """Return the parameters that are not None."""
    return {name: value for name, value in params.items() if value is not None}


def prepared(task: Mapping[str, Any]) -> dict[str, Any]:
    """The same with instants as text and times as seconds. Raises ValueError for an instant without a zone."""
    changed = dict(task)
    for name, value in task.items():
        if isinstance(value, datetime):
            if value.tzinfo is None:
                raise ValueError(f"{name} needs a zone: {value.isoformat()} is another instant in every one")
            changed[name] = value.isoformat()
        elif isinstance(value, timedelta):
            changed[name] = value.total_seconds()
    return changed


def join_batch(items: Sequence[str]) -> str:
    """A body of entries; a single one is not an array."""
    return items[0] if len(items) == 1 else f"[{','.join(items)}]"


def pack(
    sizes: Sequence[int],
    weights: Sequence[float] | None = None,
    *,
    max_bytes: int,
    max_items: int,
    max_weight: float = math.inf,
) -> Iterator[tuple[int, int]]:
    """Slices (start, end) of entries of these UTF-8 sizes, each a body within the limits; one too large is alone."""
    start, used, carried = 0, 1, 0.0  # one: two brackets, and the first entry has no comma before it
    for position, size in enumerate(sizes):
        weight = weights[position] if weights is not None else 0.0
        if position > start and (
            used + size + 1 > max_bytes or position - start >= max_items or carried + weight > max_weight
        ):
            yield start, position
            start, used, carried = position, 1, 0.0
        used += size + 1
        carried += weight
    if start < len(sizes):
        yield start, len(sizes)
