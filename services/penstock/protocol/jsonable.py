"""Payloads and results as JSON: by msgspec, or by pydantic for types that msgspec does not know."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec


def foreign(value: Any) -> Any:
    """msgspec's ``enc_hook``: a value of another type, such as a pydantic model, as builtins. Raises TypeError."""
    kind = type(value)
    if isinstance(value, dict | list | tuple | set | frozenset):  # msgspec encodes them itself, except as a key
        raise TypeError(f"a dict with a {kind.__name__} as a key is not JSON-serialisable")
    if not isinstance(value, Iterator):  # an iterator could be read only once
        from pydantic_core import PydanticSerializationError, to_jsonable_python  # loaded when first needed

        try:
            return to_jsonable_python(value, by_alias=True, fallback=msgspec.to_builtins)
        except (PydanticSerializationError, TypeError):
            pass
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not JSON-serialisable")


def to_builtins(value: Any) -> Any:
    """The value as dicts with text keys, lists, text and numbers. Raises TypeError."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=foreign)


def dumps(value: Any) -> str:
    """The value as JSON in ASCII. Raises ValueError, TypeError."""
    try:
        return json.dumps(value, default=to_builtins, allow_nan=False, separators=(",", ":"))
    except TypeError:
        # A key that is no text, such as a UUID; any other problem is raised again.
        return json.dumps(to_builtins(value), allow_nan=False, separators=(",", ":"))
