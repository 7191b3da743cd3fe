"""Pack claimed tasks into messages by number, bytes and run time: long ones travel alone, short ones by the hundred."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.brokers.base import Outgoing
from penstock.protocol import message_attributes
from penstock.protocol.batching import join_batch, pack
from penstock.protocol.fence import Fence
from penstock.protocol.json_text import escape_for_sqs, utf8_size
from penstock.protocol.pack_id import PACK_FROM, PACK_ID_MAX_BYTES, name_pack
from penstock.protocol.requests import encode_call
from penstock.protocol.task import Claimed
from penstock.runtime import metrics

_SPREAD = 10  # messages that a claim is cut into, unless they would be too large
_SECONDS_UNKNOWN = 0.1  # the run time of an action that no worker has reported yet
# The time limit, a pack id, and a tenant of all, whose 128 characters are up to 6 bytes each as JSON.
_ATTRIBUTES_BYTES = 1024 + PACK_ID_MAX_BYTES
_UNSIGNED = Fence()


@dataclass(frozen=True, slots=True)
class PackedMessage:
    message: Outgoing
    tasks: Sequence[Claimed]


def pack_messages(
    tasks: Sequence[Claimed],
    run_seconds: Mapping[str, float],
    *,
    max_tasks: int,
    max_bytes: int,
    max_seconds: float,
    by_tenant: bool = False,
    fence: Fence = _UNSIGNED,
) -> list[PackedMessage]:
    """Pack claimed tasks into messages, in the order of the claim.

    A small claim travels one task a message, so that idle workers share it; a larger one in about ``_SPREAD``, which
    are one call to SQS. Tasks of different time limits travel apart, because the limit is the message's attribute; a
    suspect travels alone, so that a crash of its worker affects no other task. by_tenant: so do the tasks of each
    tenant, in messages of its group. run_seconds: mean run time by action. fence: makes their claim ids.
    """
    groups: dict[tuple[float | None, str | None, int | None], list[Claimed]] = defaultdict(list)
    for task in tasks:
        groups[task.timeout_seconds, task.tenant if by_tenant else None, task.id if task.suspect else None].append(task)
    max_items = min(max_tasks, max(1, -(-len(tasks) // _SPREAD)))
    messages: list[PackedMessage] = []
    for (_, tenant, _), members in groups.items():
        calls = [call_of(task, fence) for task in members]
        sizes = [utf8_size(call) for call in calls]
        # Attributes of single tasks; one tenant for all is counted in _ATTRIBUTES_BYTES.
        beside = any(task.trace is not None or (task.tenant is not None and not by_tenant) for task in members)
        if beside:
            sizes = [size + _bytes_beside(task) for size, task in zip(sizes, members, strict=True)]
        slices = pack(
            sizes, [run_seconds.get(task.action, _SECONDS_UNKNOWN) for task in members],
            max_bytes=max_bytes - _ATTRIBUTES_BYTES, max_items=max_items, max_weight=max_seconds,
        )  # fmt: skip
        if beside:
            slices = (part for start, end in slices for part in _cut_for_attributes(members, start, end))
        attributes = _attributes(members[:1])
        for start, end in slices:
            part = members[start:end]
            if beside:
                attributes = _attributes(part)
            sent = {**attributes, **_pack_id(part, fence)} if len(part) >= PACK_FROM else attributes
            messages.append(PackedMessage(Outgoing(join_batch(calls[start:end]), sent, tenant), part))
    metrics.BATCH_SIZE.labels("outbound_message").observe_many([len(packed.tasks) for packed in messages])
    return messages


def call_of(task: Claimed, fence: Fence) -> str:
    # Escaped before it is measured: what SQS does not take as a character grows from 3 bytes to 6.
    claim_id = fence.name(task.id, task.claim)
    return escape_for_sqs(
        encode_call(task.id, task.claim, task.action, task.payload, claim_id=claim_id, journal=task.journal)
    )


def message_of(tasks: Sequence[Claimed], group: str | None = None, fence: Fence = _UNSIGNED) -> PackedMessage:
    """Tasks of one time limit and one group in one message; a suspect alone."""
    return PackedMessage(
        Outgoing(join_batch([call_of(task, fence) for task in tasks]), _attributes(tasks), group), tasks
    )


def _attributes(tasks: Sequence[Claimed]) -> Mapping[str, str]:
    first = tasks[0]
    attributes = (
        {} if first.timeout_seconds is None else {message_attributes.TIMEOUT_ATTRIBUTE: repr(first.timeout_seconds)}
    )
    if first.suspect:
        attributes[message_attributes.SUSPECT_ATTRIBUTE] = "1"
    if any(task.trace is not None for task in tasks):
        attributes |= message_attributes.encode_traces((task.id, task.trace) for task in tasks)
    if any(task.tenant is not None for task in tasks):
        attributes |= message_attributes.encode_tenants((task.id, task.tenant) for task in tasks)
    return attributes


def _pack_id(tasks: Sequence[Claimed], fence: Fence) -> Mapping[str, str]:
    """The attribute with the name of all, by which a worker reports a result that they share."""
    plain = name_pack(tasks[0].claim, [task.id for task in tasks])
    return {} if plain is None else {message_attributes.PACK_ATTRIBUTE: fence.sign(plain)}


def _bytes_beside(task: Claimed) -> int:
    size = 0 if task.trace is None else len(task.trace) + message_attributes.TRACE_ENTRY_BYTES
    return size if task.tenant is None else size + message_attributes.tenant_bytes(task.tenant)


def _cut_for_attributes(tasks: Sequence[Claimed], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut a slice into parts whose traces and tenants fit into the attributes; nearly always there is one."""
    used = 0
    for place in range(start, end):
        size = _bytes_beside(tasks[place])
        if used + size > message_attributes.TRACES_MAX_BYTES and place > start:
            yield start, place
            start, used = place, 0
        used += size
    yield start, end
