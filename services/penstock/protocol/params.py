"""Raw parameters, by name or by position, to the struct of their method."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec

from penstock.protocol.errors import InvalidParams
from penstock.protocol.spelling import did_you_mean

_decoder = cache(msgspec.json.Decoder)
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_PLACE = " - at `$"
_SHOWN_CHARS = 200  # of a message of msgspec, which quotes the caller's text
_QUOTED = re.compile(r"`([^`]*)`")


def decode(kind: type[msgspec.Struct], raw: bytes) -> Any:
    names = kind.__struct_fields__
    try:
        if raw.startswith(b"["):
            given = _decode_list(raw)
            if len(given) > len(names):
                raise InvalidParams("params", f"has {len(given)} positions; at most {len(names)}: {', '.join(names)}")
            pairs = (b'"%s":%s' % (n.encode(), bytes(v)) for n, v in zip(names, given, strict=False))
            raw = b"{" + b",".join(pairs) + b"}"
        return _decoder(kind).decode(raw)
    except msgspec.ValidationError as exc:
        raise _mistake(str(exc), names) from None
    except (ValueError, RecursionError) as exc:
        raise InvalidParams("params", f"cannot be read: {str(exc)[:_SHOWN_CHARS]}") from None


def _mistake(text: str, names: Iterable[str]) -> InvalidParams:
    quoted = _QUOTED.findall(text)
    if "unknown field" in text and quoted:
        return InvalidParams(quoted[0][:100], f"is unknown{did_you_mean(quoted[0], names)}")
    if "missing required field" in text and quoted:
        return InvalidParams(quoted[0], "is missing")
    said, _, at = text.rpartition(_PLACE) if _PLACE in text else (text, "", "")
    return InvalidParams(at.removeprefix(".").removesuffix("`") or "params", f"is wrong: {said[:_SHOWN_CHARS]}")
