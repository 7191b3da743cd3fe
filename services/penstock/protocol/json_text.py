"""JSON as text: size, depth, escapes that Postgres or SQS cannot store; any value as JSON, by msgspec or pydantic."""

import json
import re
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import msgspec

from penstock.protocol.errors import InvalidParams, ParseError, TooLarge

ABSENT = msgspec.Raw(b"")  # a member that a message does not have
MAX_DEPTH = 100  # of a payload; common JSON parsers stop at 128 or 512 levels, and every worker must be able to read it

_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_MARKS = bytes(byte for byte in range(256) if byte not in b'[{]}"')
_CHUNK = 1024 * 1024

_decode_raw = msgspec.json.Decoder(msgspec.Raw).decode
_decode_any = msgspec.json.Decoder().decode


def no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


# By the standard library, which is slower: a number beyond a double is infinite. Python converts 4300 digits at most.
_decode_large = json.JSONDecoder(
    parse_int=lambda text: int(text) if len(text) <= 4300 else float(text), parse_constant=no_constant
).decode
# Every escape of JSON text in order, so that text after an escaped backslash is not mistaken for one.
# Group 1: what jsonb cannot store, NUL and half a surrogate pair.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u0000|u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
_NOT_IN_SQS = re.compile("[\ufffe\uffff]")


def text_of(body: bytes | str) -> str:
    """The body as text, without a byte order mark. Raises ParseError unless it is UTF-8."""
    if isinstance(body, bytes):
        try:
            body = body.decode("utf-8")
        except UnicodeDecodeError as exc:
            raise ParseError(f"Parse error: not UTF-8 at byte {exc.start}") from None
    return body.removeprefix("\ufeff")


def body_bytes(body: str) -> bytes:
    """A body as it came. A byte that is not UTF-8, which RabbitMQ and Kafka take, is half a surrogate pair in it."""
    try:
        return body.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # other halves
        return body.encode("utf-8", "surrogatepass")


def utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def entry_text(entry: str | msgspec.Raw) -> str:
    return entry if isinstance(entry, str) else bytes(entry).decode("utf-8")


def short_reason(exc: Exception) -> str:
    return str(exc)[:200]


def holds_unstorable(text: str) -> bool:
    return "\\u" in text and any(match[1] for match in _ESCAPE.finditer(text))


def replace_unstorable(text: str) -> str:
    """JSON text with each escape of NUL or half a surrogate pair replaced by U+FFFD."""
    if "\\u" not in text:
        return text
    return _ESCAPE.sub(lambda match: "\\ufffd" if match[1] else match[0], text)


def escape_for_sqs(body: str) -> str:
    """JSON text with U+FFFE and U+FFFF escaped, the only characters of JSON that SQS refuses."""
    if body.isascii():
        return body
    return _NOT_IN_SQS.sub(lambda match: f"\\u{ord(match[0]):04x}", body)


def decode_any(raw: bytes | str) -> Any:
    """JSON as Python values, a number beyond a double as infinity. Raises ValueError, RecursionError."""
    try:
        return _decode_any(raw)
    except msgspec.ValidationError:  # it is JSON, and only its numbers are too large
        return _decode_large(raw if isinstance(raw, str) else bytes(raw).decode())


def refuse_depth(text: str) -> None:
    """Raise RecursionError where Python before 3.14 does; newer ones decode as deep as their stack is large."""
    if sys.version_info >= (3, 14) and is_deeper(text, 900):
        raise RecursionError("nested too deeply")


def is_deeper(raw: str, depth: int = MAX_DEPTH) -> bool:
    return raw.count("{") + raw.count("[") > depth and json_depth(raw) > depth


def check_payload(raw: str, field: str = "payload", limit: int = sys.maxsize) -> None:
    """Check that JSON text can be stored, sent and read by any worker, without its values. limit: in bytes of UTF-8.
    Raises InvalidParams, TooLarge."""
    check_json(raw, field, limit)
    first = raw.lstrip()[0]
    if first not in "{[":
        raise InvalidParams(field, f"must be an object or an array, not {_KINDS.get(first, 'a number')}")


def check_json(raw: str, field: str, limit: int) -> None:
    """As ``check_payload``, for any kind of value."""
    if (size := utf8_size(raw)) > limit:
        raise TooLarge(field, size, limit)
    try:
        _decode_raw(raw)
    except RecursionError:
        raise InvalidParams(field, f"is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as exc:
        if holds_unstorable(raw):
            raise InvalidParams(field, "holds half a surrogate pair, which is no character") from None
        raise InvalidParams(field, f"is not valid JSON: {short_reason(exc)}") from None
    if holds_unstorable(raw):
        raise InvalidParams(field, "holds \\u0000 or half a surrogate pair, which Postgres cannot store as text")
    if is_deeper(raw):
        raise InvalidParams(field, f"is nested deeper than {MAX_DEPTH} levels")


_KINDS = {"n": "null", "t": "a boolean", "f": "a boolean", '"': "a string"}


def json_depth(raw: str) -> int:
    # Without escaped quotes, strings are between pairs of quotes; all other characters but brackets are removed.
    text = raw.encode("utf-8", "surrogatepass").replace(rb"\\", b"").replace(rb"\"", b"")
    marks = text.translate(_STEPS, _NO_MARKS)
    deepest = depth = inside = 0
    for start in range(0, len(marks), _CHUNK):
        pieces = marks[start : start + _CHUNK].split(b'"')
        steps = array("b", b"".join(pieces[inside::2]))
        deepest = max(deepest, max(accumulate(steps, initial=depth)))
        depth += sum(steps)
        inside ^= (len(pieces) - 1) & 1
    return deepest


def foreign(value: Any) -> Any:
    """msgspec's ``enc_hook``: a value of another type, such as a pydantic model, as builtins. Raises TypeError."""
    kind = type(value)
    # msgspec encodes these itself, except as a key.
    if value is None or kind is bool:
        return json.dumps(value)
    if kind is msgspec.Raw:
        return decode_any(value)
    if isinstance(value, dict | list | tuple | set | frozenset):
        raise TypeError(f"a dict with a {kind.__name__} as a key is not JSON-serialisable")
    if isinstance(value, Mapping):
        return to_builtins(dict(value), foreign)
    if not isinstance(value, Iterator):  # an iterator could be read only once
        from pydantic_core import PydanticSerializationError, to_jsonable_python  # loaded when first needed

        try:
            return to_jsonable_python(value, by_alias=True, fallback=msgspec.to_builtins)
        except (PydanticSerializationError, TypeError):
            pass
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not JSON-serialisable")


def _in_clear(value: Any) -> Any:
    """As ``foreign``; raises TypeError for a secret of pydantic, which would be asterisks."""
    plain = foreign(value)
    if '"**********"' in json.dumps(plain):  # as which pydantic writes a SecretStr and the like
        kind = type(value).__qualname__
        raise TypeError(f"{kind} holds a secret, which would be asterisks: give its get_secret_value()")
    return plain


def to_builtins(value: Any, hook: Callable[[Any], Any] = _in_clear) -> Any:
    """The value as dicts with text keys, lists, text and numbers. hook: ``foreign`` for what may have asterisks instead
    of a secret. Raises TypeError."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=hook)


def dumps(value: Any, hook: Callable[[Any], Any] = _in_clear) -> str:
    """The value as JSON in ASCII; hook as of ``to_builtins``. Raises ValueError, TypeError."""
    convert = partial(to_builtins, hook=hook)
    try:
        return json.dumps(value, default=convert, allow_nan=False, separators=(",", ":"))
    except TypeError:
        # A key that is no text, such as a UUID; any other problem is raised again.
        return json.dumps(convert(value), allow_nan=False, separators=(",", ":"))
