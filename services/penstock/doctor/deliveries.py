"""The look at built-in actions: whether a worker with these settings would start, and what it would let through."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from penstock.deliveries import Deliveries
from penstock.doctor.findings import Finding
from penstock.errors import SettingsError
from penstock.handlers import Registry
from penstock.settings import Settings
from penstock.transports import DEAD_LETTER_SUFFIX


def examine_deliveries(settings: Settings) -> Iterator[Finding]:
    """Nothing where none is on; nothing is connected to."""
    if not settings.deliveries:
        return
    try:
        Deliveries(settings, Registry())
    except SettingsError as exc:
        yield Finding("error", "deliveries", str(exc), "correct the setting: no worker starts with it as it is")
        return
    problems = [*_too_wide(settings), *_own_queues(settings)]
    yield from problems
    if not problems:
        yield Finding("ok", "deliveries", ", ".join(settings.deliveries))


def _too_wide(settings: Settings) -> Iterator[Finding]:
    everything = [entry for entry in settings.http_allow if _is_everything(entry)]
    if everything:
        yield Finding(
            "warning", "deliveries",
            f"PENSTOCK_HTTP_ALLOW has {everything[0]}: whoever may enqueue reaches every address that a worker does, a "
            "cloud's metadata service included",
            "name the networks or hosts that are meant",
        )  # fmt: skip


def _is_everything(entry: str) -> bool:
    try:
        return ipaddress.ip_network(entry).prefixlen == 0
    except ValueError:
        return False


def _own_queues(settings: Settings) -> Iterator[Finding]:
    own = {
        name.rsplit("/", 1)[-1] + suffix
        for name in (settings.inbound_queue, settings.outbound_queue, settings.results_queue)
        for suffix in ("", DEAD_LETTER_SUFFIX)
    }
    for queue in settings.sqs_send_queues:
        if queue.rsplit("/", 1)[-1] in own:
            yield Finding(
                "warning", "deliveries",
                f"PENSTOCK_SQS_SEND_QUEUES has {queue}, Penstock's own: whoever may enqueue could settle tasks, or "
                "have them run without a record",
                "take it out of the setting",
            )  # fmt: skip
