"""Checks of the queues, whichever broker carries them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping

from penstock.brokers.base import Queue, QueueMissing, Transport
from penstock.brokers.opening import open_transport, queue_names
from penstock.cli.doctor.findings import Finding
from penstock.protocol.errors import SettingsError, Unavailable
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings


async def examine_queues(settings: Settings) -> AsyncIterator[Finding]:
    """Findings about the three queues and their dead-letter queues."""
    for finding in _named_twice(queue_names(settings)):
        yield finding
    if settings.transport.kind == "sqs":
        from penstock.cli.doctor.sqs import examine_sqs

        found = examine_sqs(settings)
    else:
        found = _examine_broker(settings)
    async for finding in found:
        yield finding


async def _examine_broker(settings: Settings) -> AsyncIterator[Finding]:
    """What brokers other than SQS show; their limits and redrives are declared when queues are created."""
    for name in ("sqs_endpoint_url", "aws_region"):
        if getattr(settings, name):
            yield Finding(
                "note", "settings",
                f"PENSTOCK_{name.upper()} is set, and PENSTOCK_TRANSPORT_URL is {settings.transport.shown}",
                "unset one of them: there is no SQS here",
            )  # fmt: skip
    try:
        transport = open_transport(settings, makes_queues=False)
    except SettingsError as exc:
        yield Finding("error", "broker", str(exc), "install it wherever a process of Penstock runs")
        return
    try:
        try:
            yield Finding("ok", "broker", await transport.greet())
        except Unavailable as exc:
            yield Finding("error", "broker", str(exc), "check PENSTOCK_TRANSPORT_URL, and whether the broker runs")
            return
        for label, name in queue_names(settings).items():
            yield await _of_queue(transport.queue(name, label=label), f"{label} queue")
            yield await _of_dead_letters(transport, label, name)
    finally:
        await transport.close()


async def _of_queue(queue: Queue, what: str) -> Finding:
    found, count = await _count(queue, what)
    counted = "" if queue.limits.counts_held else "; those that are held are not counted"
    return found or Finding("ok", what, f"there, {count} messages{counted}")


async def _count(queue: Queue, what: str) -> tuple[Finding | None, int]:
    """How many messages there are, or what is wrong."""
    fix = "let the user of PENSTOCK_TRANSPORT_URL read, write and configure it"
    try:
        return None, (await queue.depth()).total
    except QueueMissing as exc:
        fix = "start a process, which creates it, or run `penstock create-queues`"
        return Finding("note", what, str(exc), fix), 0
    except Unavailable as exc:
        return Finding("error", what, str(exc), fix), 0


async def _of_dead_letters(transport: Transport, label: str, name: str) -> Finding:
    what = f"{label} dead letters"
    dead = transport.queue(name + DEAD_LETTER_SUFFIX, label=label + DEAD_LETTER_SUFFIX)
    found, count = await _count(dead, what)
    if found is not None:
        return found
    seen = name + DEAD_LETTER_SUFFIX
    if count:
        return Finding("note", what, f"{count} in {seen}", f"look at them: `penstock dlq list {label}`")
    return Finding("ok", what, f"{seen}, after {transport.limits.max_receives} deliveries, none there")


def _named_twice(names: Mapping[str, str]) -> list[Finding]:
    labels = defaultdict(list)
    for label, name in names.items():
        labels[name.rsplit("/", 1)[-1]].append(label)
    return [
        Finding(
            "error", "queue names", f"{' and '.join(shared)} are both {name}: each would take the other's messages",
            "let PENSTOCK_INBOUND_QUEUE, PENSTOCK_OUTBOUND_QUEUE and PENSTOCK_RESULTS_QUEUE name three queues",
        )
        for name, shared in labels.items()
        if len(shared) > 1
    ]  # fmt: skip
