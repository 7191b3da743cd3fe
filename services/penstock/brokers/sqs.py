"""SQS: batch calls within its limits, partial failures by entry, every call counted.

Facts relied on (AWS, 2025): 10 entries and 1 MiB a call, sizes in UTF-8 bytes with attributes counted; a reply of
HTTP 200 may hold ``Failed`` entries, of which those with SenderFault never succeed; a missing list means empty.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import BotoCoreError, ClientError

from penstock.brokers.base import MAX_RECEIVES, Depth, Limits, Message, Outgoing, QueueMissing, SendReport, Unsent
from penstock.brokers.sqs_direct import CONNECT_SECONDS, OPERATIONS, USER_AGENT, open_direct
from penstock.protocol.errors import Unavailable
from penstock.protocol.json_text import escape_for_sqs, utf8_size
from penstock.protocol.requests import pack
from penstock.runtime import metrics
from penstock.runtime.aws import AwsClient
from penstock.runtime.logs import log
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings

LIMITS = Limits(
    max_message_bytes=1_048_576,  # and of the messages of one call together
    max_call_messages=10,
    max_extend_seconds=43_200,
    bills_calls=True,
    fair_groups=True,
)
_GROUP_ID = re.compile(r"[!-~]{1,128}")  # letters, digits and punctuation of ASCII, all of which SQS takes
_RETENTION_SECONDS = 4 * 86_400
_DEAD_LETTER_RETENTION_SECONDS = 14 * 86_400  # a dead letter keeps its first send time, so its queue must keep longer
_UNAVAILABLE = (BotoCoreError, ClientError, aiohttp.ClientError, OSError, TimeoutError)
# For a message's size or characters; one message may cause it for its whole call.
_REFUSALS = {"BatchRequestTooLong", "InvalidMessageContents", "InvalidParameterValue"}
_NO_GROUPS = re.compile(r"MessageGroupId|not valid for this queue type")  # in errors of endpoints without groups
_UNANSWERED = {"Code": "NoAnswer", "Message": "the answer does not name it"}


class SqsTransport:
    """One client of SQS, made when first used. answer_seconds: until a call fails, a long poll included."""

    limits = LIMITS

    def __init__(self, settings: Settings, *, answer_seconds: float = 30) -> None:
        self._settings = settings
        self._answer_seconds = answer_seconds
        self.client = AwsClient(self._make)

    def queue(self, name: str, *, label: str) -> SqsQueue:
        """The queue of that name or URL; it is looked up at the first call."""
        return SqsQueue(self, name, label)

    async def make_queues(self, names: Mapping[str, str]) -> dict[str, str]:
        """As :class:`penstock.brokers.base.Transport` says; existing queues get today's attributes."""
        urls = {}
        try:
            client = await self.client()
            for label, given in names.items():
                name = given.rsplit("/", 1)[-1]
                dead = (await client.create_queue(QueueName=name + DEAD_LETTER_SUFFIX))["QueueUrl"]
                retention = {"MessageRetentionPeriod": str(_DEAD_LETTER_RETENTION_SECONDS)}
                await client.set_queue_attributes(QueueUrl=dead, Attributes=retention)
                described = await client.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])
                redrive = {"deadLetterTargetArn": described["Attributes"]["QueueArn"], "maxReceiveCount": MAX_RECEIVES}
                url = urls[label] = (await client.create_queue(QueueName=name))["QueueUrl"]
                attributes = {
                    "RedrivePolicy": json.dumps(redrive),
                    "VisibilityTimeout": str(self._settings.visibility_timeout_seconds),
                    "ReceiveMessageWaitTimeSeconds": str(self._settings.receive_wait_seconds),
                    "MessageRetentionPeriod": str(_RETENTION_SECONDS),
                }
                await client.set_queue_attributes(QueueUrl=url, Attributes=attributes)
        except _UNAVAILABLE as exc:
            raise Unavailable(f"the queues could not be made: {exc}") from exc
        return urls

    async def greet(self) -> str:
        return f"SQS at {self._settings.sqs_endpoint_url or 'AWS'}"

    async def _make(self, stack: AsyncExitStack) -> Any:
        settings, session = self._settings, get_session()
        if settings.sqs_access_key is not None:
            session.set_credentials(*settings.sqs_access_key.get_secret_value().split(":", 1))
        config = AioConfig(
            connect_timeout=CONNECT_SECONDS,
            read_timeout=self._answer_seconds,
            max_pool_connections=64,
            user_agent=USER_AGENT,  # a constant; botocore builds its own in each call
            # These cost CPU in every call: tests check requests at a real endpoint, and SQS has own digests.
            parameter_validation=False,
            disable_request_compression=True,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            # Retries with pauses are the loops' business; these are for a dropped keep-alive connection.
            retries={"mode": "standard", "total_max_attempts": 2},
        )
        where = {"endpoint_url": settings.sqs_endpoint_url, "region_name": settings.aws_region}
        try:
            client = await stack.enter_async_context(session.create_client("sqs", config=config, **where))
            is_direct = settings.sqs_client == "direct"
            direct = await open_direct(session, client, self._answer_seconds) if is_direct else None
        except (BotoCoreError, ValueError) as exc:
            raise Unavailable(f"SQS cannot be used: {exc}") from exc
        if direct is not None:
            stack.callback(direct.connections.close)
            for operation in OPERATIONS:
                setattr(client, operation, partial(direct.call, operation))
        return client

    async def close(self) -> None:
        await self.client.close()


class SqsQueue:
    """One SQS queue; see :class:`penstock.brokers.base.Queue` for the contract."""

    limits = LIMITS

    def __init__(self, transport: SqsTransport, name: str, label: str) -> None:
        self.label = label
        self._transport = transport
        self._name = name
        self._url: str | None = name if "://" in name else None
        self._takes_groups = True

    async def url(self) -> str:
        if self._url is None:
            reply = await self._call("get_queue_url", QueueName=self._name)
            if "QueueUrl" not in reply:
                raise Unavailable(f"the answer to get_queue_url is not of SQS: {str(reply)[:200]}")
            self._url = reply["QueueUrl"]
        return self._url

    async def send(self, messages: Sequence[Outgoing]) -> SendReport:
        entries = []
        sizes = []
        for position, message in enumerate(messages):
            body = escape_for_sqs(message.body)
            entry: dict[str, Any] = {"Id": str(position), "MessageBody": body}
            if message.attributes:
                entry["MessageAttributes"] = {
                    key: {"DataType": "String", "StringValue": value} for key, value in message.attributes.items()
                }
            if message.group is not None and self._takes_groups:
                entry["MessageGroupId"] = group_id(message.group)
            entries.append(entry)
            sizes.append(utf8_size(body) + sum(utf8_size(k + v) + 6 for k, v in message.attributes.items()))
        unsent = await self._in_batches("send_message_batch", entries, sizes)
        ungrouped = [
            position
            for position, (reason, _) in unsent.items()
            if _NO_GROUPS.search(reason) and entries[position].pop("MessageGroupId", None)
        ]
        if ungrouped:
            # Standard queues take groups since 2025, and not every substitute of SQS does.
            if self._takes_groups:
                self._takes_groups = False
                log.warning("queue_takes_no_groups", queue=self.label, reason=unsent[ungrouped[0]][0])
            for position in ungrouped:
                del unsent[position]
            unsent |= await self._in_batches(
                "send_message_batch", [entries[position] for position in ungrouped], [sizes[p] for p in ungrouped]
            )
        metrics.MESSAGES.labels(self.label, "sent").inc(len(messages) - len(unsent))
        return SendReport.of(unsent)

    async def receive(self, *, wait_seconds: int, visibility_seconds: int) -> list[Message]:
        reply = await self._call(
            "receive_message",
            QueueUrl=await self.url(),
            MaxNumberOfMessages=LIMITS.max_call_messages,
            WaitTimeSeconds=wait_seconds,
            VisibilityTimeout=visibility_seconds,
            MessageSystemAttributeNames=["ApproximateReceiveCount", "SentTimestamp", "MessageGroupId", "SenderId"],
            MessageAttributeNames=["All"],
        )
        messages = [message_of(raw) for raw in reply.get("Messages", ())]
        size = sum(utf8_size(message.body) for message in messages)
        metrics.SQS_BILLED_UNITS.labels("receive_message", self.label).inc(_billed_units(size))
        metrics.MESSAGES.labels(self.label, "received").inc(len(messages))
        return messages

    async def delete(self, messages: Sequence[Message]) -> list[Message]:
        failed = await self._each("delete_message_batch", messages)
        metrics.MESSAGES.labels(self.label, "deleted").inc(len(messages) - len(failed))
        return failed

    async def extend(self, messages: Sequence[Message], seconds: int) -> list[Message]:
        return await self._each("change_message_visibility_batch", messages, VisibilityTimeout=seconds)

    async def release(self, messages: Sequence[Message]) -> None:
        failed = await self._each("change_message_visibility_batch", messages, VisibilityTimeout=0)
        metrics.MESSAGES.labels(self.label, "released").inc(len(messages) - len(failed))

    async def depth(self) -> Depth:
        names = [f"ApproximateNumberOfMessages{kind}" for kind in ("", "NotVisible", "Delayed")]
        attributes, _ = await self.describe(names)
        if any(name not in attributes for name in names):
            # Taken for empty, the queue would cost tasks their attempts.
            raise Unavailable(f"the answer to get_queue_attributes is not of SQS: {str(attributes)[:200]}")
        return Depth(*(int(attributes[name]) for name in names))

    async def describe(self, names: Sequence[str] = ("All",)) -> tuple[dict[str, str], datetime | None]:
        """Attributes by their names at SQS, and when it says that it answered. Raises Unavailable."""
        reply = await self._call("get_queue_attributes", QueueUrl=await self.url(), AttributeNames=names)
        metrics.SQS_BILLED_UNITS.labels("get_queue_attributes", self.label).inc()
        answered = reply.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        return dict(reply.get("Attributes", {})), None if answered is None else parsedate_to_datetime(answered)

    async def _each(self, operation: str, messages: Sequence[Message], **more: Any) -> list[Message]:
        entries = [{"Id": str(i), "ReceiptHandle": message.receipt, **more} for i, message in enumerate(messages)]
        failed = await self._in_batches(operation, entries, [0] * len(entries))
        return [messages[position] for position in sorted(failed)]

    async def _in_batches(self, operation: str, entries: list[dict[str, Any]], sizes: list[int]) -> dict[int, Unsent]:
        """Run a batch operation over any number of entries, whose ids are their positions; returns those that failed.
        Entries that fail for the queue's reasons get one more try. A call that fails whole fails its entries; one that
        is refused for its contents is repeated entry by entry, so that only the failing entry fails."""
        failed: dict[int, Unsent] = {}

        async def run(batch: list[dict[str, Any]], bytes_in_call: int, tries: int = 2) -> None:
            try:
                answers = await self.call_batch(operation, batch, bytes_in_call)
            except Unavailable as exc:
                code = code_of(exc.__cause__ or exc)
                if code in _REFUSALS and len(batch) > 1:  # with fewer messages in it, SQS may take the call
                    await _gather(run([entry], bytes_in_call, tries) for entry in batch)
                else:
                    failed.update({int(entry["Id"]): (str(exc), _is_final(code, str(exc))) for entry in batch})
                return
            again = []
            for entry, answer in zip(batch, answers, strict=True):
                if "Code" not in answer:
                    continue
                if answer.get("SenderFault") or tries <= 1:
                    is_final = _is_final(error_code(answer["Code"]), str(answer.get("Message")))
                    failed[int(entry["Id"])] = f"{answer['Code']}: {answer.get('Message', '')}", is_final
                else:
                    again.append(entry)
            if again:
                await run(again, bytes_in_call, tries - 1)

        slices = pack(sizes, max_bytes=LIMITS.max_message_bytes, max_items=LIMITS.max_call_messages)
        await _gather(run(entries[start:end], sum(sizes[start:end])) for start, end in slices)
        if failed:
            log.warning(
                "sqs_entries_failed", operation=operation, queue=self.label, failed=len(failed), of=len(entries),
                reason=next(iter(failed.values()))[0],
            )  # fmt: skip
        return failed

    async def call_batch(self, operation: str, entries: Sequence[dict[str, Any]], size: int) -> list[Mapping[str, Any]]:
        """One call, of so many bytes; returns what SQS says of each entry, with a ``Code`` of one that failed, and of
        one that it does not name: a proxy may answer 200 instead of SQS. Raises Unavailable."""
        reply = await self._call(operation, QueueUrl=await self.url(), Entries=entries)
        metrics.SQS_BILLED_UNITS.labels(operation, self.label).inc(_billed_units(size))
        said = {item["Id"]: {"Code": None, **item} for item in reply.get("Failed", ())}
        said |= {item["Id"]: item for item in reply.get("Successful", ())}
        answers: list[Mapping[str, Any]] = [said.get(entry["Id"], _UNANSWERED) for entry in entries]
        if any("Code" in answer for answer in answers):
            metrics.SQS_CALLS.labels(operation, self.label, "partial").inc()
        return answers

    async def _call(self, operation: str, **arguments: Any) -> Mapping[str, Any]:
        client: Any = None
        try:
            client = await self._transport.client()
            reply: Mapping[str, Any] = await getattr(client, operation)(**arguments)
        except _UNAVAILABLE as exc:
            metrics.SQS_CALLS.labels(operation, self.label, "failed").inc()
            code = code_of(exc)
            await self._transport.client.renew(client, code)
            if code in ("NonExistentQueue", "QueueDoesNotExist"):
                if "://" not in self._name:
                    self._url = None  # it may be made again, under another URL
                raise QueueMissing(
                    f"queue {self._name!r} does not exist: make it with terraform/, or for a local endpoint "
                    "with `penstock create-queues`"
                ) from exc
            what = "refuses" if code in _REFUSALS else "is unavailable or rejected"
            raise Unavailable(f"SQS {what} {operation}: {exc}") from exc
        metrics.SQS_CALLS.labels(operation, self.label, "ok").inc()
        return reply


def _is_final(code: str, message: str) -> bool:
    """Whether SQS will never take the message; InvalidParameterValue may be its size, or something else."""
    return code in _REFUSALS and (code != "InvalidParameterValue" or "shorter than" in message)


def error_code(code: str | None) -> str:
    """An error code without the prefix that one of the two SQS protocols puts before it."""
    return (code or "").removeprefix("AWS.SimpleQueueService.")


def code_of(exc: BaseException) -> str:
    """The error code of a failed call; the error's class if SQS did not answer."""
    if isinstance(exc, ClientError):
        return error_code(exc.response.get("Error", {}).get("Code"))
    return type(exc).__name__


def _billed_units(size: int) -> int:
    """Of a call with messages of so many bytes; each begun 64 KiB is one."""
    return max(1, -(-size // 65_536))


async def _gather(calls: Iterable[Awaitable[None]]) -> None:
    listed = list(calls)
    if len(listed) == 1:
        await listed[0]
    elif listed:
        await asyncio.gather(*listed)


def message_of(raw: Mapping[str, Any]) -> Message:
    """A message of ReceiveMessage's answer."""
    system = raw.get("Attributes", {})
    sent = system.get("SentTimestamp")
    return Message(
        id=raw["MessageId"],
        receipt=raw["ReceiptHandle"],
        body=raw["Body"],
        receive_count=int(system.get("ApproximateReceiveCount", 1)),
        sent_at=int(sent) / 1000 if sent else None,
        attributes={
            key: value["StringValue"]
            for key, value in raw.get("MessageAttributes", {}).items()
            if "StringValue" in value
        },
        group=system.get("MessageGroupId"),
        sender=system.get("SenderId"),
    )


def group_id(group: str) -> str:
    """The group's own name where SQS takes it, else SHA-256 of it; the id of an id is itself."""
    return group if _GROUP_ID.fullmatch(group) else hashlib.sha256(group.encode("utf-8", "surrogatepass")).hexdigest()
