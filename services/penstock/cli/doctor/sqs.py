"""Checks of SQS queues: existence, permissions, attributes and dead-letter queues."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from penstock.brokers.base import MAX_RECEIVES
from penstock.brokers.opening import queue_names
from penstock.brokers.sqs import LIMITS, SqsTransport
from penstock.cli.doctor.findings import Finding, clock_finding
from penstock.protocol.errors import Unavailable
from penstock.settings.model import Settings

_MAKE = "create it with terraform/, or `penstock create-queues` at a local endpoint"


async def examine_sqs(settings: Settings) -> AsyncIterator[Finding]:
    """Findings about the three queues and their dead-letter queues."""
    names = queue_names(settings)
    transport = SqsTransport.of(settings)
    clock = None
    try:
        for label, name in names.items():
            try:
                attributes, skew = await _look(transport, name)
            except Unavailable as exc:
                yield Finding("error", f"{label} queue", str(exc), _fix_of(str(exc), label))
                continue
            clock = skew if clock is None else clock
            for finding in _of_queue(label, attributes):
                yield finding
            async for finding in _of_dead_letters(transport, label, attributes):
                yield finding
    finally:
        await transport.close()
    if clock is not None:
        yield clock_finding("queue clock", clock, "AWS refuses calls that are signed minutes off")


async def _look(transport: SqsTransport, name: str) -> tuple[dict[str, str], float | None]:
    """A queue's attributes, and by how many seconds the clock of SQS is ahead. Raises Unavailable."""
    attributes, answered = await transport.queue(name, label=name).describe()
    # What it says is cut to whole seconds.
    return attributes, None if answered is None else answered.timestamp() + 0.5 - time.time()


def _fix_of(error: str, label: str) -> str:
    if "does not exist" in error:
        return f"{_MAKE}, or correct PENSTOCK_{label.upper()}_QUEUE"
    if "AccessDenied" in error:
        return "let this role call sqs:GetQueueAttributes and what the policies in terraform/ list for its process"
    return "check PENSTOCK_SQS_ENDPOINT_URL, PENSTOCK_AWS_REGION and the AWS credentials"


def _of_queue(label: str, attributes: Mapping[str, str]) -> list[Finding]:
    what = f"{label} queue"
    findings = []
    if attributes.get("FifoQueue") == "true":
        findings.append(
            Finding("error", what, "it is a FIFO queue, whose messages need a group", "create a standard queue")
        )
    limit = int(attributes.get("MaximumMessageSize", LIMITS.max_message_bytes))
    if limit < LIMITS.max_message_bytes:
        findings.append(
            Finding(
                "warning", what, f"it takes messages up to {limit:,} bytes; Penstock packs up to "
                f"{LIMITS.max_message_bytes:,}", "raise its MaximumMessageSize",
            )
        )  # fmt: skip
    if int(attributes.get("DelaySeconds", 0)):
        findings.append(
            Finding(
                "warning", what, f"it holds every message back for {attributes['DelaySeconds']} s",
                "set its DelaySeconds to 0: Penstock keeps tasks that are not due in Postgres",
            )
        )  # fmt: skip
    if not findings:
        waiting = attributes.get("ApproximateNumberOfMessages", "0")
        findings.append(Finding("ok", what, f"there, {waiting} messages visible"))
    return findings


async def _of_dead_letters(
    transport: SqsTransport, label: str, attributes: Mapping[str, str]
) -> AsyncIterator[Finding]:
    what = f"{label} dead letters"
    policy: Any = json.loads(attributes.get("RedrivePolicy") or "{}")
    if not policy:
        yield Finding(
            "error", what, "the queue has no dead-letter queue: an unprocessable message is redelivered forever",
            f"set its RedrivePolicy with maxReceiveCount {MAX_RECEIVES}; terraform/ does",
        )  # fmt: skip
        return
    receives = int(policy.get("maxReceiveCount", 0))
    if receives < 3:
        yield Finding(
            "warning", what, f"a message goes there after {receives} deliveries: two restarts of workers suffice",
            f"set maxReceiveCount to {MAX_RECEIVES}",
        )  # fmt: skip
    name = str(policy.get("deadLetterTargetArn", "")).rsplit(":", 1)[-1]
    try:
        dead, _ = await _look(transport, name)
    except Unavailable as exc:
        yield Finding("error", what, str(exc), f"{_MAKE}, or correct the queue's RedrivePolicy")
        return
    kept, kept_there = (int(a.get("MessageRetentionPeriod", 345_600)) for a in (attributes, dead))
    if kept_there < kept:
        yield Finding(
            "warning", what, f"{name} keeps messages for {kept_there / 86_400:g} days, its queue {kept / 86_400:g}: "
            "a dead letter keeps its first send time, and may be gone at once",
            "let the dead-letter queue keep them longer, best 14 days",
        )  # fmt: skip
    count = int(dead.get("ApproximateNumberOfMessages", 0))
    if count:
        yield Finding("note", what, f"{count} in {name}", f"look at them: `penstock dlq list {label}`")
    elif receives >= 3 and kept_there >= kept:
        yield Finding("ok", what, f"{name}, after {receives} deliveries, none there")
