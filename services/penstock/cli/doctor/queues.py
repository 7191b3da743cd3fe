"""Checks of the queues, whichever broker carries them."""

from collections import defaultdict

from penstock.brokers.base import Queue, QueueMissing
from penstock.brokers.opening import open_transport, queue_names
from penstock.cli.doctor.findings import Report
from penstock.protocol.errors import SettingsError, Unavailable
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings


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
        from penstock.cli.doctor.sqs import examine_sqs

        await examine_sqs(settings, report)
    else:
        await _examine_broker(settings, report)


async def _examine_broker(settings: Settings, report: Report) -> None:
    """What brokers other than SQS show; their limits and redrives are declared when queues are created."""
    for name in ("sqs_endpoint_url", "aws_region"):
        if getattr(settings, name):
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
            if count:
                report("note", what, f"{count} in {name}", f"look at them: `penstock dlq list {label}`")
            elif count == 0:
                report("ok", what, f"{name}, after {transport.limits.max_receives} deliveries, none there")
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
