"""JSON Schemas of a handler's parameters and result, for the announcement of its action."""

import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.worker.handlers.lifespan import INJECTED
from penstock.worker.handlers.parameters import batch_params, is_checked_by_msgspec, resolve, result_type

_ANY: dict[str, Any] = {}


def schemas(
    action: str, function: Callable[..., Any], *, is_batched: bool, takes_context: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the payload and of the result; empty for what is not annotated, or has no schema."""
    definitions: dict[str, Any] = {}
    if is_batched:
        params = _schema(lambda: batch_params(action, function), definitions)
    else:
        params = _of_call(function, definitions, skipped=int(takes_context))
    whole = {**params, "$defs": definitions} if definitions else params
    definitions = {}
    result = _schema(lambda: result_type(function, is_batched=is_batched), definitions, mode="serialization")
    return whole, {**result, "$defs": definitions} if definitions else result


def _of_call(function: Callable[..., Any], definitions: dict[str, Any], *, skipped: int) -> dict[str, Any]:
    parameters = [p for p in inspect.signature(function).parameters.values() if p.default is not INJECTED][skipped:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters):
        return _ANY  # it may be given as an array
    properties = {
        p.name: _ANY
        if p.annotation is p.empty
        else _schema(lambda wanted=p.annotation: resolve(wanted, function), definitions)  # type: ignore[misc]
        for p in named
    }
    required = [p.name for p in named if p.default is p.empty]
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": is_open}


def _schema(find: Callable[[], Any], definitions: dict[str, Any], *, mode: Any = "validation") -> dict[str, Any]:
    """The schema of a type, its definitions added to those; empty where there is none."""
    try:
        wanted = find()
        if wanted is Any:
            return _ANY
        if is_checked_by_msgspec(wanted):
            made = msgspec.json.schema(wanted)
        else:
            from pydantic import TypeAdapter  # loaded by now, for a handler with its types

            made = TypeAdapter(wanted).json_schema(mode=mode)
    except Exception:  # a type whose values can be checked, but not described
        return _ANY
    definitions |= made.pop("$defs", {})
    return made
