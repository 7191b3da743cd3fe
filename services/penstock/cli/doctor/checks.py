"""Checks of the live settings, Postgres, queues and api. They change nothing; one that fails hides no other."""

import contextlib
import ipaddress
import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import UTC, datetime
from traceback import extract_tb
from typing import Any

from penstock.api.dashboard.overview import ProcessProbe
from penstock.brokers.base import MAX_RECEIVES, Queue, QueueMissing
from penstock.brokers.opening import open_transport, queue_names
from penstock.brokers.sqs import LIMITS, SqsTransport
from penstock.cli.doctor.database import examine_database, examine_stored
from penstock.cli.doctor.findings import Problem, Report
from penstock.client.async_client import AsyncClient
from penstock.compat.actions import MODULES
from penstock.payloads.bucket import folder_of, new_name
from penstock.payloads.codec import PayloadCodec
from penstock.protocol import errors
from penstock.runtime.health import SATURATED
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX, parse_broker_url
from penstock.settings.model import Settings, misspelt_variables
from penstock.settings.payload_texts import fingerprint, read_key
from penstock.worker.deliveries.registry import Deliveries
from penstock.worker.handlers.actions import Registry

_MAKE = "create it with terraform/, or `penstock create-queues` at a local endpoint"
_QUEUE_POLICY = "let this role call sqs:GetQueueAttributes and what the policies in terraform/ list for its process"


async def examine(settings: Settings, report: Report, *, invariants: bool = False) -> None:
    """Check everything, one part after the other. invariants: what is stored too."""
    parts: list[Callable[[Settings, Report], Awaitable[None] | None]] = [
        _examine_settings, examine_deliveries, examine_payloads, examine_database, examine_queues, _examine_api,
        _examine_processes,
    ]  # fmt: skip
    for examine_part in (*parts, examine_stored) if invariants else parts:
        try:
            if (examining := examine_part(settings, report)) is not None:
                await examining
        except Exception as exc:
            what, place = examine_part.__name__.rpartition("_")[2], extract_tb(exc.__traceback__)[-1]
            # The text of a foreign exception may hold a secret.
            raised = f"{type(exc).__name__} in line {place.lineno} of {place.filename}"
            seen = str(exc) if isinstance(exc, errors.PenstockError) else raised
            report("error", what, f"could not be examined: {seen}", "unless that says what to do, report it as a bug")


def _examine_settings(settings: Settings, report: Report) -> None:
    """Settings that are valid individually."""
    misspelt = misspelt_variables()
    for seen, meant in misspelt:
        report("warning", "settings", f"{seen} is not a setting and is ignored", f"did you mean {meant}?")
    timeout, heartbeat = settings.visibility_timeout_seconds, settings.heartbeat_seconds
    if timeout < 2 * heartbeat and timeout < 30:
        report(
            "note", "settings", f"a message is redelivered {timeout} s after the worker that holds it stalls",
            "raise PENSTOCK_VISIBILITY_TIMEOUT_SECONDS on busy machines; the default is 60",
        )  # fmt: skip
    if settings.stale_after_seconds < 3 * heartbeat:
        report(
            "warning", "settings",
            f"a task is given up {settings.stale_after_seconds:g} s after its last heartbeat, and workers send one "
            f"every {heartbeat:g} s: a late or lost heartbeat costs an attempt",
            "set PENSTOCK_STALE_AFTER_SECONDS to at least three times PENSTOCK_HEARTBEAT_SECONDS",
        )  # fmt: skip
    elif not misspelt:
        report("ok", "settings", "valid")


def examine_deliveries(settings: Settings, report: Report) -> None:
    """Built-in actions, if any: whether a worker starts, and what a right to enqueue should not reach. No I/O."""
    if not settings.deliveries:
        return
    try:
        Deliveries(settings, Registry(), MODULES)
    except errors.SettingsError as exc:
        report("error", "deliveries", str(exc), "correct the setting: no worker starts with it")
        return
    problems: Iterator[Problem] = ((True, "warning", seen, fix) for seen, fix in _problems(settings))
    report.judge("deliveries", ", ".join(settings.deliveries), *problems)


def _problems(settings: Settings) -> Iterator[tuple[str, str]]:
    """What is seen, each with its fix."""
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


async def examine_payloads(settings: Settings, report: Report) -> None:
    """No finding if neither is set. Writes nothing to the bucket, so the right to write is not checked."""
    try:
        codec = PayloadCodec(settings)
    except errors.SettingsError as exc:
        report("error", "payloads", str(exc), "install it where any of the processes runs")
        return
    if settings.payload_keys:
        ids = [fingerprint(read_key(key.get_secret_value())) for key in settings.payload_keys]
        others = f", {len(ids) - 1} more only decrypt" if len(ids) > 1 else ""
        report("ok", "payload keys", f"{ids[0]} encrypts{others}")
    if (bucket := codec.bucket) is None:
        return
    folder = folder_of(settings.outbound_queue)
    try:
        await bucket.list(folder, datetime.now(UTC).date(), "")
        await bucket.get(new_name(folder), 0)
    except errors.PayloadLost:
        report("ok", "payload bucket", f"{bucket.url} answers")  # as expected for an unknown object
    except errors.PayloadUnavailable as exc:
        if "NoSuchBucket" in str(exc):
            fix = "create the bucket, or correct PENSTOCK_PAYLOAD_BUCKET"
        elif exc.is_refusal:
            fix = "let this role call s3:PutObject, s3:GetObject and s3:DeleteObject below the prefix, "
            fix += "and s3:ListBucket on the bucket"
        else:
            fix = "check PENSTOCK_PAYLOAD_S3_ENDPOINT_URL, PENSTOCK_AWS_REGION and the AWS credentials"
        report("error", "payload bucket", str(exc), fix)
    else:
        report("error", "payload bucket", f"{bucket.url} has an object under a name chosen just now", "look at it")
    finally:
        await codec.close()


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
    except errors.SettingsError as exc:
        report("error", "broker", str(exc), "install it wherever a process of Penstock runs")
        return
    try:
        report("ok", "broker", await transport.greet())
        for label, name in queue_names(settings).items():
            queue = transport.queue(name, label=label)
            if (count := await _count(queue, f"{label} queue", report)) is not None:
                counted = "" if queue.limits.counts_held else "; those that are held are not counted"
                report("ok", f"{label} queue", f"there, {count} messages{counted}")
            what, name = f"{label} dead letters", name + DEAD_LETTER_SUFFIX
            queue = transport.queue(name, label=label + DEAD_LETTER_SUFFIX)
            if (count := await _count(queue, what, report)) is not None:
                well = f"{name}, after {transport.limits.max_receives} deliveries, none there"
                report.judge(what, well, _dead(count, name, label))
    except errors.Unavailable as exc:
        report("error", "broker", str(exc), "check PENSTOCK_TRANSPORT_URL, and whether the broker runs")
    finally:
        await transport.close()


async def _count(queue: Queue, what: str, report: Report) -> int | None:
    """How many messages there are; None if they cannot be counted, which is reported."""
    try:
        return (await queue.depth()).total
    except QueueMissing as exc:
        report("note", what, str(exc), "start a process, which creates it, or run `penstock create-queues`")
    except errors.Unavailable as exc:
        report("error", what, str(exc), "let the user of PENSTOCK_TRANSPORT_URL read, write and configure it")
    return None


async def examine_sqs(settings: Settings, report: Report) -> None:
    """The three queues and their dead-letter queues."""
    transport = SqsTransport(settings)
    clock = None
    try:
        for label, name in queue_names(settings).items():
            try:
                attributes, answered = await transport.queue(name, label=name).describe()
            except errors.Unavailable as exc:
                if "does not exist" in str(exc):
                    fix = f"{_MAKE}, or correct PENSTOCK_{label.upper()}_QUEUE"
                elif "AccessDenied" in str(exc):
                    fix = _QUEUE_POLICY
                else:
                    fix = "check PENSTOCK_SQS_ENDPOINT_URL, PENSTOCK_AWS_REGION and the AWS credentials"
                report("error", f"{label} queue", str(exc), fix)
                continue
            if clock is None and answered is not None:  # which is cut to whole seconds
                clock = answered.timestamp() + 0.5 - time.time()
            _examine_queue(label, attributes, settings.retention_receipts_seconds, report)
            known = name.rsplit("/", 1)[-1] + DEAD_LETTER_SUFFIX
            await _examine_dead_letters(transport, label, known, attributes, report)
    finally:
        await transport.close()
    if clock is not None:
        report.clock("queue clock", clock, "AWS refuses calls that are signed minutes off")


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
        dead, _ = await transport.queue(name, label=name).describe()
    except errors.Unavailable as exc:
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


async def _examine_processes(settings: Settings, report: Report) -> None:
    """What the processes that the dashboard shows say of themselves; no finding if none is set."""
    probe = ProcessProbe(settings.dashboard_processes)
    await probe.probe()
    for process in probe.latest():
        seen = f"{process.name}: {process.text}"
        report.judge(
            "processes", f"{process.name} is ready",
            (not process.ready, "warning", seen, "start it, or correct PENSTOCK_DASHBOARD_PROCESSES"),
            (process.text.startswith(SATURATED), "warning", seen, "raise PENSTOCK_WORKER_THREADS, "
             "PENSTOCK_WORKER_PROCESSES or PENSTOCK_WORKER_CONCURRENCY, run more workers, or find handlers that block "
             "by penstock_loop_lag_seconds"),
        )  # fmt: skip


async def _examine_api(settings: Settings, report: Report) -> None:
    """Whether the api answers at the URL that clients use, and accepts their key."""
    scheme = "http" if settings.http_tls_cert is None else "https"
    url = (settings.api_url or f"{scheme}://127.0.0.1:{settings.http_port}").rstrip("/").removesuffix("/rpc")
    key = settings.api_key
    try:
        async with AsyncClient(url, api_key=key.get_secret_value() if key else None, timeout=5.0) as client:
            await client.call("list", {"limit": 1})
    except errors.Unavailable as exc:
        report("warning", "api", str(exc), "start `penstock api`, or set PENSTOCK_API_URL to its URL")
    except errors.RpcError as exc:
        fix = "set PENSTOCK_API_KEY to a key that may read; `penstock keys create` creates one"
        report("warning", "api", f"{url} answers: {exc.message}", fix)
    else:
        report("ok", "api", f"{url} answers")
