"""Trace contexts of the tasks in an outbound message, as attributes of it.

They are not in the body: a worker is any JSON-RPC server, and a strict one refuses unknown members of a request. A
context that all tasks of a message share is in the standard attributes; otherwise ``traces`` has those of each task.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from penstock.protocol.trace_context import TRACEPARENT, TraceContext, of_headers, of_text, parse

TRACES_ATTRIBUTE = "traces"
TRACES_MAX_BYTES = 32_768  # of the attribute; RabbitMQ sends all headers of a message in one frame
TRACE_ENTRY_BYTES = 120  # that an entry adds at most to its own text


class CarriedTrace(NamedTuple):
    """The context of a task's enqueue, and that of its previous attempt."""

    context: TraceContext
    former: TraceContext | None = None


class _Entry(msgspec.Struct, omit_defaults=True):
    traceparent: str
    tasks: list[int]
    tracestate: str | None = None
    link: str | None = None


_decode = msgspec.json.Decoder(list[_Entry]).decode


def read_carried(text: str | None) -> CarriedTrace | None:
    """text: a context, and on a second line the traceparent of the previous attempt."""
    if text is None:
        return None
    first, _, former = text.partition("\n")
    context = of_text(first)
    return None if context is None else CarriedTrace(context, parse(former) if former else None)


def encode_traces(tasks: Iterable[tuple[int, str | None]]) -> dict[str, str]:
    """Attributes of a message with these tasks, given as (id, text of ``read_carried``)."""
    groups: defaultdict[str | None, list[int]] = defaultdict(list)
    for task_id, text in tasks:
        groups[text].append(task_id)
    read = {text: read_carried(text) for text in groups}
    carried = [one for one in read.values() if one is not None]
    if not carried:
        return {}
    shared = {one.context for one in carried}
    is_shared = len(shared) == 1 and len(carried) == len(read)
    attributes = shared.pop().headers if is_shared else {}
    if not is_shared or any(one.former is not None for one in carried):
        entries = [
            _Entry(
                one.context.traceparent,
                groups[text],
                one.context.state or None,
                None if one.former is None else one.former.traceparent,
            )
            for text, one in read.items()
            if one is not None
        ]
        attributes[TRACES_ATTRIBUTE] = msgspec.json.encode(entries).decode()
    return attributes


def decode_traces(attributes: Mapping[str, str], tasks: Iterable[int]) -> dict[int, CarriedTrace]:
    """Traces by task; invalid ones are left out."""
    if TRACES_ATTRIBUTE in attributes:
        try:
            entries = _decode(attributes[TRACES_ATTRIBUTE])
        except (ValueError, RecursionError):
            entries = []
        found: dict[int, CarriedTrace] = {}
        for entry in entries:
            context = parse(entry.traceparent, entry.tracestate)
            if context is not None:
                found |= dict.fromkeys(entry.tasks, CarriedTrace(context, parse(entry.link)))
        return found
    if TRACEPARENT not in attributes:
        return {}
    context = of_headers(attributes)
    return {} if context is None else dict.fromkeys(tasks, CarriedTrace(context))
