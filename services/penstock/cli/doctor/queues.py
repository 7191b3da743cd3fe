"""Checks of the queues: of SQS the existence, permissions, attributes and dead letters, else what a broker shows."""

import json
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from penstock.brokers.base import MAX_RECEIVES, Queue, QueueMissing
from penstock.brokers.opening import open_transport, queue_names
from penstock.brokers.sqs import LIMITS, SqsTransport
from penstock.cli.doctor.findings import Problem, Report
from penstock.protocol.errors import SettingsError, Unavailable
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings

_MAKE = "create it with terraform/, or `penstock create-queues` at a local endpoint"
_POLICY = "let this role call sqs:GetQueueAttributes and what the policies in terraform/ list for its process"


async def examine_queues(settings: Settings, report: Report) -> None:
    """The three queues and their dead-letter queues."""
    labels = defaultdict(list)
    for label, name in queue_names(settings).items():
        labels[name.rsplit("/", 1)[-1]].append(label)
    for name, shared in labels.items():
        if len(shared) > 1:
            report(
                "error", "queue names", f"{' and '.join(shared)} are both {name}: each would take the other's messages",
                "let PENSTOCK_INBOUND_QUEUE, PENSTOCK_OUTBOUND_QUEUE and PENSTOCK_RESULTS_QUEUE name three queues",
            )  # fmt: skip
    if settings.transport.kind == "sqs":
        await examine_sqs(settings, report)
    else:
        await _examine_broker(settings, report)


async def _examine_broker(settings: Settings, report: Report) -> None:
    """What brokers other than SQS show; their limits and redrives are declared when queues are created."""
    sends = "sqs.send" in settings.deliveries
    used = {"sqs_endpoint_url": sends, "aws_region": sends or settings.payload_bucket or settings.database_iam}
    for name, is_used in used.items():
        if getattr(settings, name) and not is_used:
            seen = f"PENSTOCK_{name.upper()} is set, and PENSTOCK_TRANSPORT_URL is {settings.transport.shown}"
            report("note", "settings", seen, "unset one of them: there is no SQS here")
    try:
        transport = open_transport(settings, makes_queues=False)
    except SettingsError as exc:
        report("error", "broker", str(exc), "install it wherever a process of Penstock runs")
        return
    try:
        report("ok", "broker", await transport.greet())
        for label, name in queue_names(settings).items():
            queue = transport.queue(name, label=label)
            count = await _count(queue, f"{label} queue", report)
            if count is not None:
                counted = "" if queue.limits.counts_held else "; those that are held are not counted"
                report("ok", f"{label} queue", f"there, {count} messages{counted}")
            what, name = f"{label} dead letters", name + DEAD_LETTER_SUFFIX
            count = await _count(transport.queue(name, label=label + DEAD_LETTER_SUFFIX), what, report)
            if count is not None:
                well = f"{name}, after {transport.limits.max_receives} deliveries, none there"
                report.judge(what, well, _dead(count, name, label))
    except Unavailable as exc:
        report("error", "broker", str(exc), "check PENSTOCK_TRANSPORT_URL, and whether the broker runs")
    finally:
        await transport.close()


async def _count(queue: Queue, what: str, report: Report) -> int | None:
    """How many messages there are; None if they cannot be counted, which is reported."""
    try:
        return (await queue.depth()).total
    except QueueMissing as exc:
        report("note", what, str(exc), "start a process, which creates it, or run `penstock create-queues`")
    except Unavailable as exc:
        report("error", what, str(exc), "let the user of PENSTOCK_TRANSPORT_URL read, write and configure it")
    return None


async def examine_sqs(settings: Settings, report: Report) -> None:
    """The three queues and their dead-letter queues."""
    transport = SqsTransport(settings)
    clock = None
    try:
        for label, name in queue_names(settings).items():
            try:
                attributes, skew = await _look(transport, name)
            except Unavailable as exc:
                if "does not exist" in str(exc):
                    fix = f"{_MAKE}, or correct PENSTOCK_{label.upper()}_QUEUE"
                elif "AccessDenied" in str(exc):
                    fix = _POLICY
                else:
                    fix = "check PENSTOCK_SQS_ENDPOINT_URL, PENSTOCK_AWS_REGION and the AWS credentials"
                report("error", f"{label} queue", str(exc), fix)
                continue
            clock = skew if clock is None else clock
            _examine_queue(label, attributes, settings.retention_receipts_seconds, report)
            known = name.rsplit("/", 1)[-1] + DEAD_LETTER_SUFFIX
            await _examine_dead_letters(transport, label, known, attributes, report)
    finally:
        await transport.close()
    if clock is not None:
        report.clock("queue clock", clock, "AWS refuses calls that are signed minutes off")


async def _look(transport: SqsTransport, name: str) -> tuple[dict[str, str], float | None]:
    """A queue's attributes, and by how many seconds the clock of SQS is ahead. Raises Unavailable."""
    attributes, answered = await transport.queue(name, label=name).describe()
    # What it says is cut to whole seconds.
    return attributes, None if answered is None else answered.timestamp() + 0.5 - time.time()


def _examine_queue(label: str, attributes: Mapping[str, str], receipts_seconds: float, report: Report) -> None:
    packed, kept = LIMITS.max_message_bytes, int(attributes.get("MessageRetentionPeriod", 0))
    limit, delay = int(attributes.get("MaximumMessageSize", packed)), int(attributes.get("DelaySeconds", 0))
    report.judge(
        f"{label} queue", f"there, {attributes.get('ApproximateNumberOfMessages', '0')} messages visible",
        (attributes.get("FifoQueue") == "true", "error", "it is a FIFO queue, whose messages need a group",
         "create a standard queue"),
        (limit < packed, "warning", f"it takes messages up to {limit:,} bytes; Penstock packs up to {packed:,}",
         "raise its MaximumMessageSize"),
        (delay > 0, "warning", f"it holds every message back for {delay} s",
         "set its DelaySeconds to 0: Penstock keeps tasks that are not due in Postgres"),
        (label == "inbound" and kept > receipts_seconds, "warning",
         f"it keeps messages for {kept / 86_400:g} days, and receipts are kept for {receipts_seconds / 86_400:g}: a "
         "message that is delivered again behind that adds its tasks a second time",
         "lower its MessageRetentionPeriod, or raise PENSTOCK_RETENTION_RECEIPTS_SECONDS above it"),
    )  # fmt: skip


async def _examine_dead_letters(
    transport: SqsTransport, label: str, known: str, attributes: Mapping[str, str], report: Report
) -> None:
    """known: the name of the dead-letter queue by which the supervisor and the api look for it."""
    what = f"{label} dead letters"
    policy: Any = json.loads(attributes.get("RedrivePolicy") or "{}")
    if not policy:
        report(
            "error", what, "the queue has no dead-letter queue: an unprocessable message is redelivered forever",
            f"set its RedrivePolicy with maxReceiveCount {MAX_RECEIVES}; terraform/ does",
        )  # fmt: skip
        return
    receives = int(policy.get("maxReceiveCount", 0))
    name = str(policy.get("deadLetterTargetArn", "")).rsplit(":", 1)[-1]
    try:
        dead, _ = await _look(transport, name)
    except Unavailable as exc:
        report("error", what, str(exc), f"{_MAKE}, or correct the queue's RedrivePolicy")
        return
    kept, kept_there = (int(a.get("MessageRetentionPeriod", 345_600)) for a in (attributes, dead))
    report.judge(
        what, f"{name}, after {receives} deliveries, none there",
        (receives < 3, "warning", f"a message goes there after {receives} deliveries: two restarts of workers suffice",
         f"set maxReceiveCount to {MAX_RECEIVES}"),
        (name != known, "warning", f"they go to {name}, and `penstock dlq` and the metrics look at {known}",
         f"let the queue's RedrivePolicy name a queue called {known}"),
        (kept_there < kept, "warning",
         f"{name} keeps messages for {kept_there / 86_400:g} days, its queue {kept / 86_400:g}: a dead letter keeps "
         "its first send time, and may be gone at once", "let the dead-letter queue keep them longer, best 14 days"),
        _dead(int(dead.get("ApproximateNumberOfMessages", 0)), name, label),
    )  # fmt: skip


def _dead(count: int, name: str, label: str) -> Problem:
    return count > 0, "note", f"{count} in {name}", f"look at them: `penstock dlq list {label}`"
