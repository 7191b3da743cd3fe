"""Attributes of messages. A strict JSON-RPC server as worker refuses unknown members in a body, so these are beside it.

A trace context that all tasks of a message share is in the standard attributes; otherwise ``traces`` has those of each.
A pack id, ``pack:<claim>:<task ids>``, names all tasks of an outbound message, for a shared result. Task ids, and
places in a message, are written as ranges in their order: ``17-101,140``.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from penstock.protocol.requests import INT8_MAX, TOKEN_MAX_CHARS
from penstock.protocol.trace_context import TraceContext, of_headers, of_text, parse

# Of an outbound message
TIMEOUT_ATTRIBUTE = "timeout_seconds"  # run time limit of each of its tasks
SUSPECT_ATTRIBUTE = "suspect"  # a worker stopped heartbeating while running its task
TENANT_ATTRIBUTE = "tenant"  # of one whose tasks all are of this tenant
TENANTS_ATTRIBUTE = "tenants"  # of one with several tenants: ids of tasks by tenant, as JSON
PACK_ATTRIBUTE = "pack"  # pack id of a message with many tasks
PACK_MAX_TASKS = 1000
PACK_FROM = 8  # tasks of a message from which it has a pack id
PACK_ID_MAX_BYTES = 2048  # with its token; task ids with more gaps have none
TRACES_ATTRIBUTE = "traces"
TRACES_MAX_BYTES = 32_768  # of the attribute; RabbitMQ sends all headers of a message in one frame
TRACE_ENTRY_BYTES = 120  # that an entry adds at most to its own text
# Of a results message
WORKER_ATTRIBUTE = "worker"
WORKER_NAME_MAX_CHARS = 100
_WORKER_NAME = re.compile(rf"[!-~]([ -~]{{0,{WORKER_NAME_MAX_CHARS - 2}}}[!-~])?")


class CarriedTrace(NamedTuple):
    """The context of a task's enqueue, and that of its previous attempt."""

    context: TraceContext
    former: TraceContext | None = None


class _TraceEntry(msgspec.Struct, omit_defaults=True):
    traceparent: str
    tasks: list[int]
    tracestate: str | None = None
    link: str | None = None


_decode_ids = msgspec.json.Decoder(dict[str, list[int]]).decode
_decode_entries = msgspec.json.Decoder(list[_TraceEntry]).decode


def tenant_bytes(tenant: str) -> int:
    """The most bytes that a task of this tenant adds to the attributes."""
    return len(json.dumps(tenant)) + 26  # of a task without the name


def encode_tenants(tenants: Iterable[tuple[int, str | None]]) -> dict[str, str]:
    """Attributes with the tenants of these tasks, given as (id, tenant)."""
    ids: dict[str | None, list[int]] = defaultdict(list)
    for task_id, tenant in tenants:
        ids[tenant].append(task_id)
    if len(ids) == 1:
        (only,) = ids
        return {} if only is None else {TENANT_ATTRIBUTE: json.dumps(only)}
    ids.pop(None, None)
    return {TENANTS_ATTRIBUTE: json.dumps(ids, separators=(",", ":"))}


def decode_tenants(attributes: Mapping[str, str], task_ids: Iterable[int]) -> dict[int, str]:
    """Tenants by task. Raises ValueError for invalid attributes."""
    if TENANT_ATTRIBUTE in attributes:
        return dict.fromkeys(task_ids, msgspec.json.decode(attributes[TENANT_ATTRIBUTE], type=str))
    if TENANTS_ATTRIBUTE not in attributes:
        return {}
    return {task_id: tenant for tenant, ids in _decode_ids(attributes[TENANTS_ATTRIBUTE]).items() for task_id in ids}


def read_carried(text: str | None) -> CarriedTrace | None:
    """text: a context, and on a second line the traceparent of the previous attempt."""
    first, _, former = (text or "").partition("\n")
    context = of_text(first)
    return None if context is None else CarriedTrace(context, parse(former))


def encode_traces(tasks: Iterable[tuple[int, str | None]]) -> dict[str, str]:
    """Attributes of a message with these tasks, given as (id, text of ``read_carried``)."""
    groups: defaultdict[str | None, list[int]] = defaultdict(list)
    for task_id, text in tasks:
        groups[text].append(task_id)
    carried = {text: one for text in groups if (one := read_carried(text)) is not None}
    if not carried:
        return {}
    shared = {context for context, _ in carried.values()}
    is_shared = len(shared) == 1 and len(carried) == len(groups)
    attributes = shared.pop().headers if is_shared else {}
    if not is_shared or any(former is not None for _, former in carried.values()):
        entries = [
            _TraceEntry(context.traceparent, groups[text], context.state or None, former and former.traceparent)
            for text, (context, former) in carried.items()
        ]
        attributes[TRACES_ATTRIBUTE] = msgspec.json.encode(entries).decode()
    return attributes


def decode_traces(attributes: Mapping[str, str], tasks: Iterable[int]) -> dict[int, CarriedTrace]:
    """Traces by task; invalid ones are left out."""
    if TRACES_ATTRIBUTE not in attributes:
        context = of_headers(attributes)
        return {} if context is None else dict.fromkeys(tasks, CarriedTrace(context))
    try:
        entries = _decode_entries(attributes[TRACES_ATTRIBUTE])
    except (ValueError, RecursionError):
        return {}
    found: dict[int, CarriedTrace] = {}
    for entry in entries:
        context = parse(entry.traceparent, entry.tracestate)
        if context is not None:
            found |= dict.fromkeys(entry.tasks, CarriedTrace(context, parse(entry.link)))
    return found


def check_worker_name(name: str) -> str:
    """Raises ValueError."""
    if not _WORKER_NAME.fullmatch(name):
        form = f"1 to {WORKER_NAME_MAX_CHARS} printable ASCII characters, no space at either end"
        raise ValueError(f"a worker's name is {form}; this is {name[:120]!r}")
    return name


def worker_of(attributes: Mapping[str, str]) -> str | None:
    """The worker of a results message; None if the name is missing or invalid."""
    name = attributes.get(WORKER_ATTRIBUTE)
    return name if name is not None and _WORKER_NAME.fullmatch(name) else None


def name_pack(claim: int, task_ids: Sequence[int]) -> str | None:
    """The pack id without its token; None where it would be too long."""
    text = f"pack:{claim}:{ranges_of(task_ids)}"
    return text if len(text) <= PACK_ID_MAX_BYTES - TOKEN_MAX_CHARS else None


def parse_pack_id(text: str) -> tuple[int, Sequence[int]]:
    """Claim and task ids, with or without a token. Raises ValueError."""
    prefix, claim, ranges, token = (*text.split(":", 3), "", "", "", "")[:4]
    is_right = prefix == "pack" and _is_number(claim) and int(claim) <= INT8_MAX
    if not is_right or not (token.isalnum() or text.count(":") == 2):
        raise ValueError(f"{text[:100]!r} is not pack:<claim>:<task ids>:<token>")
    return int(claim), parse_ranges(ranges)


def ranges_of(numbers: Sequence[int]) -> str:
    """Numbers in their order, those that follow each other as one range."""
    first, count = numbers[0], len(numbers)
    if numbers[-1] == first + count - 1 and [*numbers] == [*range(first, first + count)]:
        return _range(first, numbers[-1])
    starts = [0, *(place for place, (left, right) in enumerate(pairwise(numbers), 1) if right != left + 1), count]
    return ",".join(_range(numbers[start], numbers[end - 1]) for start, end in pairwise(starts))


def parse_ranges(text: str) -> Sequence[int]:
    """The numbers. Raises ValueError."""
    found: list[int] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        if not _is_number(low) or (dash and not _is_number(high)):
            raise ValueError(f"{part[:100]!r} is no number or range of numbers")
        first, last = int(low), int(high or low)
        if last < first or last > INT8_MAX or len(found) + last - first >= PACK_MAX_TASKS:
            raise ValueError(f"{text[:100]!r} is not at most {PACK_MAX_TASKS} numbers in ranges such as 17-101,140")
        found += range(first, last + 1)
    return found


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) <= 19
