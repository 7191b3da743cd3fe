"""Values as JSON: what msgspec writes, and what pydantic writes where msgspec does not know a type.

Payloads and results go through here, so that a value which may be enqueued may be returned too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec


def foreign(value: Any) -> Any:
    """A value that msgspec cannot write, such as a pydantic model, in builtins; for use as its ``enc_hook``.

    Raises TypeError naming the type.
    """
    kind = type(value)
    if isinstance(value, dict | list | tuple | set | frozenset):  # in the body of a value, msgspec writes them
        raise TypeError(f"a dict with a {kind.__name__} as a key is not JSON-serialisable")
    if not isinstance(value, Iterator):  # it could be read once only
        from pydantic_core import PydanticSerializationError, to_jsonable_python  # not before it is needed

        try:
            return to_jsonable_python(value, by_alias=True, fallback=msgspec.to_builtins)
        except (PydanticSerializationError, TypeError):
            pass
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not JSON-serialisable")


def to_builtins(value: Any) -> Any:
    """The value in dicts with text for keys, lists, text and numbers. Raises TypeError."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=foreign)


def dumps(value: Any) -> str:
    """The value as JSON in ASCII. Raises ValueError or TypeError saying what JSON cannot hold."""
    try:
        return json.dumps(value, default=to_builtins, allow_nan=False, separators=(",", ":"))
    except TypeError:
        # A key that is no text, such as a UUID; if it is not that, the same is said again.
        return json.dumps(to_builtins(value), allow_nan=False, separators=(",", ":"))
