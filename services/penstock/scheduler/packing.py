"""Pack claimed tasks into messages by number, bytes and run time: long ones travel alone, short ones by the hundred."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add

from penstock.brokers.base import Limits, Outgoing
from penstock.protocol import message_attributes
from penstock.protocol.fence import Fence
from penstock.protocol.json_text import escape_for_sqs, utf8_size
from penstock.protocol.requests import encode_call, join_batch, pack
from penstock.protocol.task import Claimed
from penstock.runtime import metrics
from penstock.settings.model import Settings

_SPREAD = 10  # messages that a claim is cut into, unless they would be too large
_SECONDS_UNKNOWN = 0.1  # the run time of an action that no worker has reported yet
# The time limit, a pack id, and a tenant of all, whose 128 characters are up to 6 bytes each as JSON.
_ATTRIBUTES_BYTES = 1024 + message_attributes.PACK_ID_MAX_BYTES
_UNSIGNED = Fence()


@dataclass(frozen=True, slots=True)
class PackedMessage:
    message: Outgoing
    tasks: Sequence[Claimed]


def pack_messages(
    tasks: Sequence[Claimed], run_seconds: Mapping[str, float], settings: Settings, limits: Limits, fence: Fence
) -> list[PackedMessage]:
    """Pack claimed tasks into messages of a queue, in the order of the claim.

    A small claim travels one task a message, so that idle workers share it; a larger one in about ``_SPREAD``, which
    are one call to SQS. Tasks of different time limits travel apart, because the limit is the message's attribute; a
    suspect travels alone, so that a crash of its worker affects no other task. In fair queues so do the tasks of each
    tenant, in messages of its group. run_seconds: mean run time by action. fence: makes their claim ids.
    """
    by_tenant = settings.fair_queues and limits.fair_groups
    groups: dict[tuple[float | None, str | None, int | None], list[Claimed]] = defaultdict(list)
    for task in tasks:
        groups[task.timeout_seconds, task.tenant if by_tenant else None, task.id if task.suspect else None].append(task)
    max_items = min(settings.pack_max_tasks, max(1, -(-len(tasks) // _SPREAD)))
    messages: list[PackedMessage] = []
    for (_, tenant, _), members in groups.items():
        calls = [call_of(task, fence) for task in members]
        sizes = [utf8_size(call) for call in calls]
        # Attributes of single tasks; one tenant for all is counted in _ATTRIBUTES_BYTES.
        beside = any(task.trace is not None or (task.tenant is not None and not by_tenant) for task in members)
        if beside:
            added = [_bytes_beside(task) for task in members]
            sizes = list(map(add, sizes, added))
        slices = pack(
            sizes, [run_seconds.get(task.action, _SECONDS_UNKNOWN) for task in members],
            max_bytes=limits.max_message_bytes - _ATTRIBUTES_BYTES, max_items=max_items,
            max_weight=settings.pack_seconds,
        )  # fmt: skip
        if beside:  # nearly always there is room in the attributes
            most = message_attributes.TRACES_MAX_BYTES
            slices = (
                (start + first, start + last)
                for start, end in slices
                for first, last in pack(added[start:end], max_bytes=most, max_items=max_items)
            )
        for start, end in slices:
            part = members[start:end]
            attributes = _attributes(part) | _pack_id(part, fence)
            messages.append(PackedMessage(Outgoing(join_batch(calls[start:end]), attributes, tenant), part))
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


def _attributes(tasks: Sequence[Claimed]) -> dict[str, str]:
    first, attributes = tasks[0], dict[str, str]()
    if first.timeout_seconds is not None:
        attributes[message_attributes.TIMEOUT_ATTRIBUTE] = repr(first.timeout_seconds)
    if first.suspect:
        attributes[message_attributes.SUSPECT_ATTRIBUTE] = "1"
    if any(task.trace is not None for task in tasks):
        attributes |= message_attributes.encode_traces((task.id, task.trace) for task in tasks)
    if any(task.tenant is not None for task in tasks):
        attributes |= message_attributes.encode_tenants((task.id, task.tenant) for task in tasks)
    return attributes


def _pack_id(tasks: Sequence[Claimed], fence: Fence) -> dict[str, str]:
    """The attribute with the name of all, by which a worker reports a result that they share; of a few, nothing."""
    if len(tasks) < message_attributes.PACK_FROM:
        return {}
    plain = message_attributes.name_pack(tasks[0].claim, [task.id for task in tasks])
    return {} if plain is None else {message_attributes.PACK_ATTRIBUTE: fence.sign(plain)}


def _bytes_beside(task: Claimed) -> int:
    size = 0 if task.trace is None else len(task.trace) + message_attributes.TRACE_ENTRY_BYTES
    return size if task.tenant is None else size + message_attributes.tenant_bytes(task.tenant)
