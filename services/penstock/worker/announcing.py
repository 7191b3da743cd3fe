"""Announces which actions this worker runs, at start and every minute, through the results queue."""

import asyncio
import inspect
import json
import random
from collections.abc import Callable
from contextlib import suppress
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
        about = {"version": version, "description": " ".join(text.split())[:500], "params": params, "result": result}
        if not version:
            with suppress(metadata.PackageNotFoundError, ValueError):
                about["version"] = metadata.version(getattr(handler.function, "__module__", "").partition(".")[0])
        known = {name: value for name, value in about.items() if value}
        texts.append(encode_notification("announce", action=handler.name, **known))
    return texts


def schemas(handler: Handler) -> tuple[dict[str, Any], dict[str, Any]]:
    """JSON Schemas of payload and result; empty for what is not annotated, or has no schema."""
    function, is_batched = handler.function, handler.batch is not None
    result = _schema(partial(result_type, function, is_batched=is_batched), mode="serialization")
    if is_batched:
        return _schema(partial(batch_params, handler.name, function)), result
    parameters = [p for p in inspect.signature(function).parameters.values() if p.default is not INJECTED]
    parameters = parameters[int(handler.takes_context) :]
    if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters):
        return {}, result  # it may be given as an array
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    properties, definitions = dict[str, Any](), dict[str, Any]()
    for p in named:
        annotation = Any if p.annotation is p.empty else p.annotation
        properties[p.name] = _lifted(_schema(partial(resolve, annotation, function)), definitions)
    required = [p.name for p in named if p.default is p.empty]
    is_open = len(named) < len(parameters)
    params = {"type": "object", "properties": properties, "required": required, "additionalProperties": is_open}
    return {**params, "$defs": definitions} if definitions else params, result


def _schema(find: Callable[[], Any], *, mode: Any = "validation") -> dict[str, Any]:
    """The schema of a type; empty where there is none."""
    try:
        wanted = find()
        if wanted is Any:
            return {}
        if is_checked_by_msgspec(wanted):
            made = msgspec.json.schema(wanted)
        else:
            from pydantic import TypeAdapter  # loaded by now, for a handler with its types

            made = TypeAdapter(wanted).json_schema(mode=mode)
        dumps(made)  # raises for an infinite default, which JSON cannot hold
    except Exception:  # a type whose values can be checked, but not described
        return {}
    return made


def _lifted(made: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """A schema without its definitions, which are added to those."""
    found = made.pop("$defs", {})
    for name in [name for name, one in found.items() if definitions.get(name, one) != one]:
        other = next(free for number in count(2) if (free := f"{name}-{number}") not in definitions)
        text = json.dumps([made, found]).replace(f'"#/$defs/{name}"', f'"#/$defs/{other}"')
        made, found = json.loads(text)  # else references to one type would lead to another of its name
        found[other] = found.pop(name)
    definitions |= found
    return made
