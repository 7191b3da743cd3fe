"""Raw parameters, by name or by position, to the struct of their method."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from penstock.commands.params import PARAMS
from penstock.errors import InvalidParams

_decoders: dict[type, msgspec.json.Decoder[Any]] = {kind: msgspec.json.Decoder(kind) for kind in PARAMS.values()}
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_FIELD = re.compile(r" - at `\$\.?(.*)`$")
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
        return _decoders[kind].decode(raw)
    except msgspec.ValidationError as exc:
        raise _mistake(str(exc), names) from None
    except (ValueError, RecursionError) as exc:
        raise InvalidParams("params", f"cannot be read: {str(exc)[:200]}") from None


def _mistake(text: str, names: Iterable[str]) -> InvalidParams:
    quoted = _QUOTED.findall(text)
    if "unknown field" in text and quoted:
        near = difflib.get_close_matches(quoted[0], names, n=1)
        return InvalidParams(quoted[0][:100], "is unknown" + (f"; did you mean {near[0]}?" if near else ""))
    if "missing required field" in text and quoted:
        return InvalidParams(quoted[0], "is missing")
    at = _FIELD.search(text)
    return InvalidParams((at[1] if at else "") or "params", f"is wrong: {_FIELD.sub('', text)}")
