"""Checks of built-in actions: whether a worker with these settings starts, and what it lets through."""

import contextlib
import ipaddress
from collections.abc import Iterator

from penstock.cli.doctor.findings import Report
from penstock.compat.actions import MODULES
from penstock.protocol.errors import SettingsError
from penstock.settings.broker_urls import parse_broker_url
from penstock.settings.model import Settings
from penstock.worker.deliveries.registry import Deliveries
from penstock.worker.handlers.actions import Registry


def examine_deliveries(settings: Settings, report: Report) -> None:
    """No finding without built-in actions. Connects to nothing."""
    if not settings.deliveries:
        return
    try:
        Deliveries(settings, Registry(), MODULES)
    except SettingsError as exc:
        report("error", "deliveries", str(exc), "correct the setting: no worker starts with it")
        return
    problems = [*_problems(settings)]
    for seen, fix in problems:
        report("warning", "deliveries", seen, fix)
    if not problems:
        report("ok", "deliveries", ", ".join(settings.deliveries))


def _problems(settings: Settings) -> Iterator[tuple[str, str]]:
    """What a right to enqueue reaches and should not, each with its fix."""
    for entry in settings.http_allow:
        with contextlib.suppress(ValueError):  # a host
            if ipaddress.ip_network(entry).prefixlen == 0:
                yield (
                    f"PENSTOCK_HTTP_ALLOW has {entry}: anyone who may enqueue reaches every address of a worker, a "
                    "cloud's metadata service included",
                    "name only the networks or hosts that are needed",
                )
    for queue in settings.sqs_send_queues:
        if settings.is_own_queue(queue.rsplit("/", 1)[-1]):
            yield (
                f"PENSTOCK_SQS_SEND_QUEUES has {queue}, Penstock's own: anyone who may enqueue could settle tasks, or "
                "have them run without a record",
                "remove it from the setting",
            )
    transport = settings.transport
    kafka_hosts = {host.strip() for host in (settings.kafka_brokers or "").split(",")}
    publishes_anywhere = "kafka.publish" in settings.deliveries and not settings.kafka_publish_topics
    if publishes_anywhere and transport.kind == "kafka" and {*transport.hosts} & kafka_hosts:
        yield (
            f"kafka.publish writes to the brokers that carry the work, {transport.shown}: a right to enqueue reaches "
            "every topic that the worker's user may write, those of routes with names of their own among them",
            "name the topics that are needed in PENSTOCK_KAFKA_PUBLISH_TOPICS",
        )
    url = settings.amqp_publish_url
    if "amqp.publish" in settings.deliveries and url is not None and transport.kind == "amqp":
        published = parse_broker_url(url.get_secret_value())
        if (published.hosts, published.path) == (transport.hosts, transport.path):
            yield (
                f"amqp.publish writes to the virtual host that carries the work, {transport.shown}: a right to enqueue "
                "reaches queues of routes whose names do not begin as the outbound queue's",
                "use a virtual host of its own for PENSTOCK_AMQP_PUBLISH_URL",
            )
