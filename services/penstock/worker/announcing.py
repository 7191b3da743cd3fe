"""Announces which actions this worker runs, at start and every minute, through the results queue."""

import asyncio
import inspect
import json
import random
from collections.abc import Callable
from functools import partial
from importlib import metadata
from itertools import count
from typing import Any

import msgspec

from penstock.protocol.json_text import dumps
from penstock.protocol.reports import encode_notification
from penstock.protocol.task import ANNOUNCE_SECONDS
from penstock.worker.handlers.actions import Handler, Registry
from penstock.worker.handlers.lifespan import INJECTED
from penstock.worker.handlers.parameters import batch_params, is_checked_by_msgspec, resolve, result_type
from penstock.worker.result_sender import Entry, ResultSender

_DESCRIPTION_CHARS = 500
_ANY: dict[str, Any] = {}


async def announce(registry: Registry, sender: ResultSender, version: str | None) -> None:
    """A side task; handlers are read once, in a thread, for schemas take long to make."""
    texts = await asyncio.to_thread(announcements, registry, version)
    while texts:
        await sender.send_now(map(Entry, texts))
        await asyncio.sleep(ANNOUNCE_SECONDS * random.uniform(0.8, 1.2))


def announcements(registry: Registry, version: str | None) -> list[str]:
    """A notification for each action; the message's attribute names the worker."""
    texts = []
    for handler in registry.values():
        params, result = schemas(handler)
        text = (handler.function.__doc__ or "").strip().partition("\n\n")[0]
        description = " ".join(text.split())[:_DESCRIPTION_CHARS]
        about = {"version": version or _installed_version(handler), "description": description}
        known = {name: value for name, value in {**about, "params": params, "result": result}.items() if value}
        texts.append(encode_notification("announce", action=handler.name, **known))
    return texts


def _installed_version(handler: Handler) -> str | None:
    try:
        return metadata.version(getattr(handler.function, "__module__", "").partition(".")[0])
    except (metadata.PackageNotFoundError, ValueError):
        return None


def schemas(handler: Handler) -> tuple[dict[str, Any], dict[str, Any]]:
    """JSON Schemas of payload and result; empty for what is not annotated, or has no schema."""
    function, is_batched = handler.function, handler.batch is not None
    definitions: dict[str, Any] = {}
    if is_batched:
        params = _schema(partial(batch_params, handler.name, function), definitions)
    else:
        params = _of_call(function, definitions, skipped=int(handler.takes_context))
    whole = {**params, "$defs": definitions} if definitions else params
    definitions = {}
    result = _schema(partial(result_type, function, is_batched=is_batched), definitions, mode="serialization")
    return whole, {**result, "$defs": definitions} if definitions else result


def _of_call(function: Callable[..., Any], definitions: dict[str, Any], *, skipped: int) -> dict[str, Any]:
    parameters = [p for p in inspect.signature(function).parameters.values() if p.default is not INJECTED][skipped:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters):
        return _ANY  # it may be given as an array
    properties = {
        p.name: _ANY if p.annotation is p.empty else _schema(partial(resolve, p.annotation, function), definitions)
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
        dumps(made)  # raises for an infinite default, which JSON cannot hold
    except Exception:  # a type whose values can be checked, but not described
        return _ANY
    found = made.pop("$defs", {})
    for name in [name for name, one in found.items() if definitions.get(name, one) != one]:
        other = next(free for number in count(2) if (free := f"{name}-{number}") not in definitions)
        text = json.dumps([made, found]).replace(f'"#/$defs/{name}"', f'"#/$defs/{other}"')
        made, found = json.loads(text)  # else references to one type would lead to another of its name
        found[other] = found.pop(name)
    definitions |= found
    return made
