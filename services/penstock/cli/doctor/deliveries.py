"""Checks of built-in actions: whether a worker with these settings starts, and what it lets through."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from penstock.cli.doctor.findings import Finding
from penstock.compat.actions import MODULES
from penstock.protocol.errors import SettingsError
from penstock.settings.broker_urls import parse_broker_url
from penstock.settings.model import Settings
from penstock.worker.deliveries.registry import Deliveries
from penstock.worker.handlers.actions import Registry


def examine_deliveries(settings: Settings) -> Iterator[Finding]:
    """No finding without built-in actions. Connects to nothing."""
    if not settings.deliveries:
        return
    try:
        Deliveries(settings, Registry(), MODULES)
    except SettingsError as exc:
        yield Finding("error", "deliveries", str(exc), "correct the setting: no worker starts with it")
        return
    problems = [*_too_wide(settings), *_own_queues(settings), *_shared_brokers(settings)]
    yield from problems
    if not problems:
        yield Finding("ok", "deliveries", ", ".join(settings.deliveries))


def _too_wide(settings: Settings) -> Iterator[Finding]:
    everything = [entry for entry in settings.http_allow if _is_everything(entry)]
    if everything:
        yield Finding(
            "warning", "deliveries",
            f"PENSTOCK_HTTP_ALLOW has {everything[0]}: anyone who may enqueue reaches every address of a worker, a "
            "cloud's metadata service included",
            "name only the networks or hosts that are needed",
        )  # fmt: skip


def _is_everything(entry: str) -> bool:
    try:
        return ipaddress.ip_network(entry).prefixlen == 0
    except ValueError:
        return False


def _own_queues(settings: Settings) -> Iterator[Finding]:
    for queue in settings.sqs_send_queues:
        if settings.is_own_queue(queue.rsplit("/", 1)[-1]):
            yield Finding(
                "warning", "deliveries",
                f"PENSTOCK_SQS_SEND_QUEUES has {queue}, Penstock's own: anyone who may enqueue could settle tasks, or "
                "have them run without a record",
                "remove it from the setting",
            )  # fmt: skip


def _shared_brokers(settings: Settings) -> Iterator[Finding]:
    transport = settings.transport
    if (
        "kafka.publish" in settings.deliveries
        and transport.kind == "kafka"
        and not settings.kafka_publish_topics
        and {*transport.hosts} & {host.strip() for host in (settings.kafka_brokers or "").split(",")}
    ):
        yield Finding(
            "warning", "deliveries",
            f"kafka.publish writes to the brokers that carry the work, {transport.shown}: a right to enqueue reaches "
            "every topic that the worker's user may write, those of routes with names of their own among them",
            "name the topics that are needed in PENSTOCK_KAFKA_PUBLISH_TOPICS",
        )  # fmt: skip
    url = settings.amqp_publish_url
    if "amqp.publish" in settings.deliveries and url is not None and transport.kind == "amqp":
        published = parse_broker_url(url.get_secret_value())
        if (published.hosts, published.path) == (transport.hosts, transport.path):
            yield Finding(
                "warning", "deliveries",
                f"amqp.publish writes to the virtual host that carries the work, {transport.shown}: a right to enqueue "
                "reaches queues of routes whose names do not begin as the outbound queue's",
                "use a virtual host of its own for PENSTOCK_AMQP_PUBLISH_URL",
            )  # fmt: skip
