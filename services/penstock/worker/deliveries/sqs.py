"""sqs.send: one message into an SQS queue that the operator has named; bursts share calls."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.brokers.sqs import LIMITS, SqsTransport, code_of
from penstock.protocol.errors import Unavailable
from penstock.protocol.json_text import escape_for_sqs, utf8_size
from penstock.protocol.requests import given, pack
from penstock.settings.model import Settings
from penstock.settings.values import PREFIX
from penstock.worker.deliveries.errors import Base64, NotDelivered, Undeliverable, short_text
from penstock.worker.deliveries.registry import Deliveries
from penstock.worker.handlers.context import Call

ACTION = "sqs.send"
_CALLS_AT_ONCE = 8  # to one queue; of a FIFO queue one, for the sake of order
_FIFO = ".fifo"
_NOT_IN_SQS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")
# Another attempt would be refused too.
_REFUSALS = {
    "BatchRequestTooLong", "InvalidAttributeValue", "InvalidMessageContents", "InvalidParameterValue",
    "MissingParameter",
}  # fmt: skip

Outcome = dict[str, str] | Undeliverable | NotDelivered
AttributeName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$", max_length=256)]
Id = Annotated[str, Meta(pattern="^[!-~]{1,128}$")]  # of a group, and for deduplication


class SqsMessage(msgspec.Struct, forbid_unknown_fields=True):
    """The payload of one task; docs/deliveries.md describes each member."""

    queue: str
    body: str | None = None
    json: Any = msgspec.UNSET
    attributes: Annotated[dict[AttributeName, str | int | float | Base64], Meta(max_length=10)] = {}
    delay: Annotated[int, Meta(ge=0, le=900)] | None = None
    group_id: Id | None = None
    deduplication_id: Id | None = None


def add_to(deliveries: Deliveries) -> None:
    settings = deliveries.settings
    transport = SqsTransport(settings, answer_seconds=10)
    deliveries.at_close(transport.close)
    deliveries.action(ACTION, Sender(transport, settings).send, batch=200, linger=0.02, bad_params_attempts=1)


@dataclass(slots=True)
class _Entry:
    """A message ready to be sent. position: of its task in the batch. size: bytes, attributes included."""

    position: int
    queue: str
    group: str | None
    arguments: dict[str, Any]
    size: int


class Sender:
    def __init__(self, transport: SqsTransport, settings: Settings) -> None:
        queues = settings.sqs_send_queues
        self._allowed = {entry.rsplit("/", 1)[-1]: entry for entry in queues} | {entry: entry for entry in queues}
        # One label of metrics: there is no bound to the number of queues.
        self._queues = {entry: transport.queue(entry, label="delivery") for entry in queues}

    async def send(self, calls: list[Call[SqsMessage]]) -> list[Outcome]:
        """Send each task's message; its result is the ``message_id`` and ``sequence_number`` that SQS answers."""
        outcomes: list[Outcome] = [NotDelivered("it was not sent")] * len(calls)
        queues: dict[str, list[_Entry]] = {}
        for position, call in enumerate(calls):
            try:
                entry = self._entry(position, call.ctx.task_id, call.params)
            except Undeliverable as exc:
                outcomes[position] = exc
            else:
                queues.setdefault(entry.queue, []).append(entry)

        async def send_to(queue: str, entries: Sequence[_Entry]) -> None:
            await self._send_to(queue, entries, outcomes)
            for entry in entries:  # a queue that does not answer must not delay the others
                calls[entry.position].answer(outcomes[entry.position])

        await asyncio.gather(*(send_to(queue, entries) for queue, entries in queues.items()))
        return outcomes

    def _entry(self, position: int, task_id: int, sending: SqsMessage) -> _Entry:
        """Raises Undeliverable."""
        queue = self._allowed.get(sending.queue)
        if queue is None:
            raise Undeliverable(
                f"the queue {sending.queue[:300]!r} is not among those of {PREFIX}SQS_SEND_QUEUES; there an operator "
                "allows it, by name or URL"
            )
        is_fifo = queue.endswith(_FIFO)
        if is_fifo and sending.delay is not None:
            raise Undeliverable("a FIFO queue takes no delay of single messages: enqueue the task with a delay")
        if is_fifo and sending.group_id is None:
            raise Undeliverable(f"{sending.queue} is a FIFO queue: give group_id")
        if not is_fifo and sending.deduplication_id is not None:
            raise Undeliverable(f"deduplication_id is for FIFO queues, and {sending.queue} is none")
        body = _body(sending)
        attributes = {name: _attribute(name, value) for name, value in sending.attributes.items()}
        # The same in all attempts of a task: SQS drops the second of two within five minutes.
        own_id = f"penstock-{task_id}" if is_fifo else None
        arguments = given(
            Id=str(position), MessageBody=body, MessageAttributes=attributes or None, DelaySeconds=sending.delay,
            MessageGroupId=sending.group_id, MessageDeduplicationId=sending.deduplication_id or own_id,
        )  # fmt: skip
        size = utf8_size(body)
        for name, value in attributes.items():
            content = value.get("BinaryValue") or value["StringValue"].encode()
            size += utf8_size(name) + len(value["DataType"]) + len(content)
        if size > LIMITS.max_message_bytes:
            raise Undeliverable(f"the message is {size} bytes; SQS takes {LIMITS.max_message_bytes}")
        return _Entry(position, queue, sending.group_id, arguments, size)

    async def _send_to(self, queue: str, entries: Sequence[_Entry], outcomes: list[Outcome]) -> None:
        try:
            await self._queues[queue].url()
        except Unavailable as exc:
            reason = NotDelivered(f"the queue {queue} cannot be looked up: {short_text(exc.__cause__ or exc)}")
            for entry in entries:
                outcomes[entry.position] = reason
            return
        is_fifo = queue.endswith(_FIFO)
        room = asyncio.Semaphore(1 if is_fifo else _CALLS_AT_ONCE)
        held: set[str | None] = set()  # behind one that failed, another of its group would overtake it later

        async def deliver(batch: Sequence[_Entry]) -> None:
            for entry in batch:
                if entry.group in held:
                    outcomes[entry.position] = NotDelivered(f"an earlier message of group {entry.group!r} was not sent")
            going = [entry for entry in batch if entry.group not in held]
            if going and not await self._call(queue, going, outcomes):
                for entry in going:  # alone, so that only the failing one fails
                    await deliver([entry])
            if is_fifo:
                held.update(entry.group for entry in going if isinstance(outcomes[entry.position], NotDelivered))

        async def run(batch: Sequence[_Entry]) -> None:
            async with room:
                await deliver(batch)

        sizes = [entry.size for entry in entries]
        slices = pack(sizes, max_bytes=LIMITS.max_message_bytes, max_items=LIMITS.max_call_messages)
        await asyncio.gather(*(run(entries[start:end]) for start, end in slices))

    async def _call(self, queue: str, batch: Sequence[_Entry], outcomes: list[Outcome]) -> bool:
        """Send and note the outcomes; False, without any, where SQS refuses several messages for what one holds."""
        try:
            answers = await self._queues[queue].call_batch(
                "send_message_batch", [entry.arguments for entry in batch], sum(entry.size for entry in batch)
            )
        except Unavailable as exc:
            cause = exc.__cause__ or exc
            is_refused = code_of(cause) in _REFUSALS
            if is_refused and len(batch) > 1:
                return False
            kind = Undeliverable if is_refused else NotDelivered
            for entry in batch:
                outcomes[entry.position] = kind(f"SQS did not take the message for {queue}: {short_text(cause)}")
            return True
        for entry, answer in zip(batch, answers, strict=True):
            outcomes[entry.position] = _outcome(queue, answer)
        return True


def _outcome(queue: str, answer: Mapping[str, Any]) -> Outcome:
    if "Code" in answer:
        text = f"SQS did not take the message for {queue}: {answer['Code']}: {answer.get('Message', '')}"
        return Undeliverable(text) if answer.get("SenderFault") else NotDelivered(text)
    result = {"message_id": answer["MessageId"]}
    if "SequenceNumber" in answer:
        result["sequence_number"] = answer["SequenceNumber"]
    return result


def _body(sending: SqsMessage) -> str:
    """Raises Undeliverable."""
    if (sending.body is None) == (sending.json is msgspec.UNSET):
        raise Undeliverable("give one of body, a text, and json, any value")
    if sending.body is None:
        return escape_for_sqs(msgspec.json.encode(sending.json).decode())
    if not sending.body:
        raise Undeliverable("body is empty, which SQS does not take")
    if (wrong := _NOT_IN_SQS.search(sending.body)) is not None:
        raise Undeliverable(f"body holds {wrong[0]!r}, which SQS does not take: send it as json, or in base64")
    return sending.body


def _attribute(name: str, value: str | float | Base64) -> dict[str, Any]:
    """Raises Undeliverable."""
    if isinstance(value, int | float):
        return {"DataType": "Number", "StringValue": str(value)}
    if isinstance(value, Base64) and value.base64:
        return {"DataType": "Binary", "BinaryValue": value.base64}
    if isinstance(value, str) and value and not _NOT_IN_SQS.search(value):
        return {"DataType": "String", "StringValue": value}
    raise Undeliverable(f"the attribute {name} is empty, or holds what SQS does not take: leave it out, or give base64")
