"""Settings of processes: the sections Attempts to Traces of docs/configuration.md."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr

from penstock.protocol.api_key import ApiKey, Permission, parse_entries, parse_entry
from penstock.protocol.message_attributes import check_worker_name
from penstock.protocol.output import OutputMode
from penstock.protocol.pack_id import PACK_MAX_TASKS
from penstock.protocol.retry import Backoff
from penstock.settings.values import (
    DAY,
    PREFIX,
    Count,
    Group,
    HttpUrl,
    Listed,
    Name,
    Names,
    OrUnset,
    Port,
    PositiveSeconds,
    ReadableFile,
    Seconds,
    Secrets,
    Share,
    Table,
    checked,
    named_url,
)


def _trace_url(url: str) -> None:
    if "{trace_id}" not in url or not url.startswith(("http://", "https://")):
        raise ValueError("must be a URL such as https://jaeger/trace/{trace_id}, with {trace_id} in it")


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Whether an address or name means this machine only."""
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def _readable_entries(entries: tuple[SecretStr, ...]) -> None:
    parse_entries(entry.get_secret_value() for entry in entries)


def _load_balancer(arn: str) -> None:
    if re.fullmatch(r"arn:aws[\w-]*:elasticloadbalancing:[a-z0-9-]+:\d{12}:loadbalancer/app/[\w/-]+", arn) is None:
        raise ValueError("must be arn:aws:elasticloadbalancing:REGION:ACCOUNT:loadbalancer/app/NAME/ID")


def _process_url(entry: str) -> str:
    named_url(entry)
    return entry.rstrip("/")


class ProcessSettings(Group):
    # Attempts

    max_attempts: Annotated[Count, Field(le=1000)] = 10
    """Attempts before CRITICAL_ERROR, for tasks that set no number of their own."""
    retry_base_seconds: PositiveSeconds = 5
    """Delay after the first failed attempt."""
    retry_factor: Annotated[float, Field(ge=1)] = 2
    """Growth of the delay from one attempt to the next."""
    retry_cap_seconds: PositiveSeconds = 3600
    """Longest delay."""
    retry_jitter: Share = 0.2
    """Share of each delay that is random, 0 to 1."""
    wait_timeout_seconds: Annotated[PositiveSeconds, Field(le=100 * 366 * DAY)] = 7 * DAY
    """How long a task waits for its event, unless its handler sets a time; read by the resulters."""
    spawn_actions: Names = ()
    """Comma-separated actions (`mail.*`) that any task may spawn; others only if they have the same route as the task
    that spawns them."""
    heartbeat_seconds: PositiveSeconds = 20
    """Interval of the heartbeats that a worker sends for a task that runs longer than this."""
    cancel_poll_seconds: PositiveSeconds = 5
    """A worker asks this often whether longer running tasks are still its own, see control_url."""
    ordering_on_critical_error: Literal["release", "hold"] = "release"
    """What a task in CRITICAL_ERROR does to its ordering key: `release` lets the next task run, `hold` keeps all tasks
    behind it waiting until it is retried or an operator releases the key."""
    stale_after_seconds: PositiveSeconds = 120
    """A task without a heartbeat for this long, plus the time that one may be in transit, is tried again."""
    unsent_after_seconds: PositiveSeconds = 90
    """A claim whose sending was never confirmed (the scheduler died) is released after this; a send may take two thirds
    of it."""
    untaken_after_seconds: PositiveSeconds = 6 * 3600
    """A task without any heartbeat for this long is sent again even if its queue is busy."""

    @property
    def backoff(self) -> Backoff:
        return Backoff(self.retry_base_seconds, self.retry_factor, self.retry_cap_seconds, self.retry_jitter)

    @property
    def holds_ordering_keys(self) -> bool:
        """Whether a task in CRITICAL_ERROR holds its ordering key."""
        return self.ordering_on_critical_error == "hold"

    # Scheduler

    in_flight_seconds: Annotated[PositiveSeconds, Field(le=600)] = 0.75
    """The window of claimed, unsettled tasks is the number settled in this time, plus the running ones; the rest wait
    in Postgres by priority."""
    in_flight_floor: Count = 1000
    """Smallest window."""
    in_flight_limit: Count = 100_000
    """Largest window."""
    claim_batch_size: Annotated[Count, Field(le=10000)] = 2000
    """Maximum number of tasks claimed by one statement."""
    pack_max_tasks: Annotated[Count, Field(le=PACK_MAX_TASKS)] = 500
    """Maximum number of tasks in one outbound message."""
    pack_seconds: PositiveSeconds = 1
    """Maximum work in one outbound message, by the run times that workers report."""
    fair_queues: bool = True
    """On SQS, a message holds tasks of one tenant and carries its name as MessageGroupId, so that SQS keeps a tenant
    with many messages from delaying others; false: tasks are packed regardless of their tenant."""
    poll_seconds: Annotated[PositiveSeconds, Field(le=60)] = 0.2
    """Interval of looks for due tasks when no wake-up comes."""
    priority_ageing_seconds: Seconds = 0
    """Tasks that higher priorities have kept waiting for this long get a tenth of each claim; 0: priorities are
    strict."""

    # Worker

    worker_concurrency: Count = 100
    """Tasks that one worker process runs at once."""
    worker_name: OrUnset[Annotated[str, checked(check_worker_name)]] = None
    """Name of this worker in what is shown of its tasks; unset: `host:pid`."""
    worker_threads: Count = 16
    """Threads for handlers that are plain functions."""
    worker_processes: OrUnset[Count] = None
    """Child processes for handlers with `process=True`, if there are any; unset: one for each CPU."""
    process_recycle_after: OrUnset[Count] = None
    """Calls after which a child process is replaced; unset: never."""
    process_max_memory_bytes: OrUnset[Annotated[int, Field(ge=64 * 1024 * 1024)]] = None
    """A child process with more memory than this finishes its task and is replaced; at twice as much, its allocations
    fail. Unset: no limit."""
    task_output: OutputMode = "off"
    """What of the output of tasks is kept: `off`, `chunks` that handlers emit, `logs` too, or `prints` too, unless an
    action sets it."""
    task_timeout_seconds: PositiveSeconds = 900
    """Maximum run time of one attempt, unless the task or its action sets one."""

    bad_params_attempts: OrUnset[Count] = 3
    """Attempts of a task whose parameters do not fit its handler, unless its action sets a number; unset: as many as
    for any other error."""

    announce_actions: bool = True
    """Whether the worker announces its actions, with the schemas of their parameters, at start and every minute."""
    worker_version: OrUnset[str] = None
    """Version in the announcements; unset: that of the installed package of each handler, if it has one."""

    control_url: OrUnset[HttpUrl] = None
    """The api, which workers ask for cancelled tasks; unset: handlers do not learn of a cancellation."""
    control_api_key: OrUnset[SecretStr] = None
    """The API key for control_url; it needs `worker` or `read`."""

    result_compress_bytes: OrUnset[Annotated[int, Field(ge=1024)]] = 65_536
    """Results over this size are sent compressed if that makes them smaller; unset: never."""

    # Supervisor

    supervisor_interval_seconds: PositiveSeconds = 5
    """Pause between two rounds of upkeep."""
    retention_success_seconds: Seconds = 7 * DAY
    """Retention of SUCCESS records."""
    retention_critical_error_seconds: Seconds = 30 * DAY
    """Retention of CRITICAL_ERROR records."""
    retention_cancelled_seconds: Seconds = 7 * DAY
    """Retention of CANCELLED records."""
    retention_schedule_runs_seconds: Seconds = 7 * DAY
    """Retention of the runs of schedules and of imports."""
    schedule_batch_size: Annotated[Count, Field(le=20_000)] = 4000
    """Maximum number of schedules fired in one transaction."""
    schedule_grace_seconds: Annotated[Seconds, Field(le=86_400)] = 60
    """A fire no later than this is on time; a later one is missed, and the policy for missed fires applies."""
    retention_rejected_seconds: Seconds = 30 * DAY
    """Retention of rejected messages."""
    payload_retention_seconds: OrUnset[Seconds] = None
    """Retention of payloads of settled tasks; unset keeps them with the record."""
    result_retention_seconds: OrUnset[Seconds] = None
    """Retention of results; unset keeps them with the record."""
    retention_waits_seconds: Seconds = DAY
    """Retention of answers that came before their task waits, and of answered tokens."""
    retention_jobs_seconds: Seconds = 7 * DAY
    """Retention of bulk jobs that have ended."""
    retention_audit_seconds: Seconds = 90 * DAY
    """Retention of the audit log."""
    retention_receipts_seconds: Seconds = 5 * DAY
    """Retention of the receipts of inbound messages, which make a redelivery harmless; longer than the inbound queue
    keeps messages."""

    # HTTP

    http_host: str = "127.0.0.1"
    """Address of the api; an address other than loopback requires API keys."""
    http_port: Port = 8080
    """Port of the api; 0 takes a free one."""
    http_tls_cert: OrUnset[ReadableFile] = None
    """File of the api's certificate, with its chain, for TLS on its ports; a replaced file is shown within 10 s; unset:
    plain HTTP."""
    http_tls_key: OrUnset[ReadableFile] = None
    """File of its key, without a passphrase."""
    api_keys: Annotated[Secrets, checked(_readable_entries)] = ()
    """Comma-separated keys of 16 characters or more with all permissions, or entries `name:permissions:sha256` that
    hold only a key's digest, followed by `:tenant:actions` to bind one; none = loopback only."""
    api_require_keys: bool = False
    """Require a key even if none is set here: those created by `penstock keys create`."""
    api_rate_limit: OrUnset[Annotated[float, Field(gt=0)]] = None
    """Requests (entries of batches) per second for each key, or address; unset means no limit."""
    api_rate_burst: OrUnset[Count] = None
    """Requests that may come at once; unset means those of one second."""
    http_connections: Count = 500
    """Maximum number of connections of one api process; one more closes an idle one, or is answered with 503."""
    http_bytes_in_flight: Annotated[int, Field(ge=1024 * 1024)] = 64 * 1024 * 1024
    """Maximum bytes of bodies and answers that one api process holds at once, without the first 16 KiB of each request;
    more are answered with 503. One request of the largest size and its answer always fit."""
    result_waits_limit: Count = 20_000
    """Maximum number of tasks that one api process waits for at once, over all calls of `result`."""
    request_timeout_seconds: Annotated[PositiveSeconds, Field(le=3600)] = 30
    """A request must have arrived within this; its first line and headers in 10 s."""
    dashboard: bool = True
    """The api serves the dashboard at `/`, beside `/rpc`."""
    mcp: bool = True
    """The api serves its methods as tools of the Model Context Protocol at `/mcp`."""
    dashboard_session_seconds: Annotated[float, Field(ge=60, le=30 * DAY)] = 12 * 3600
    """Lifetime of a dashboard session that was opened with an API key."""
    dashboard_processes: Listed[Annotated[str, AfterValidator(_process_url)]] = ()
    """Comma-separated base URLs of /readyz of processes, such as workers, whose state the dashboard shows;
    `http://host:9464`, or `worker-1=http://host:9464` to name one."""
    dashboard_alb_arn: OrUnset[Annotated[str, checked(_load_balancer)]] = None
    """ARN of the Application Load Balancer whose header `x-amzn-oidc-data` signs users in to the dashboard; unset: the
    header is ignored. Needs `penstock[encryption]` and API keys for programs."""
    dashboard_alb_groups: Table[Permission] = Field({})
    """JSON object of the permission of each group of users that it signs in, `{"ops": "admin", "dev": "read"}`; users
    without any of them are refused."""
    dashboard_alb_groups_claim: Name = "groups"
    """The claim of its header that has the user's groups."""
    dashboard_alb_client: OrUnset[str] = None
    """Client id of the identity provider that its header must name; unset: any client of that load balancer."""
    dashboard_alb_keys_url: OrUnset[HttpUrl] = None
    """Base URL of its public keys; unset: that of AWS for the region of the ARN. Partitions other than `aws`, such as
    GovCloud, have another."""
    api_url: OrUnset[HttpUrl] = None
    """The api's URL for commands such as `penstock task show` and for `Client()`."""
    api_key: OrUnset[SecretStr] = None
    """The API key that they send."""
    metrics_host: str = "127.0.0.1"
    """Address of /metrics, /healthz and /readyz."""
    metrics_port: OrUnset[Port] = None
    """Their port; unset means 9464 or, if that is in use, a free one; 0 a free one."""

    @property
    def needs_keys(self) -> bool:
        return bool(self.api_keys) or self.api_require_keys

    @property
    def known_keys(self) -> tuple[ApiKey, ...]:
        return tuple(parse_entry(entry.get_secret_value(), place) for place, entry in enumerate(self.api_keys, 1))

    # Running

    concurrency: Annotated[Count, Field(le=256)] = 2
    """Concurrent receive loops of one process, unless `--loops` is given."""
    grace_seconds: Seconds = 25
    """Time to finish and hand back work after SIGTERM."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    log_failure_details: bool = True
    """Log a failed attempt with the error's message and traceback, which may hold parts of a payload; false: only its
    type, as always where payloads are encrypted."""
    log_format: Literal["logfmt", "json"] = "logfmt"
    """Format of log lines."""

    # Traces

    traces: bool = False
    """Make OpenTelemetry spans, and pass trace contexts on; `OTEL_*` configures the export. Needs `penstock[otel]`."""
    trace_url: OrUnset[Annotated[str, checked(_trace_url)]] = None
    """The dashboard's link to a trace, `{trace_id}` standing for its id; unset: no link."""

    def _process_problems(self) -> Iterator[str]:
        if self.retry_cap_seconds < self.retry_base_seconds:
            yield "retry_cap_seconds must be at least retry_base_seconds"
        if self.stale_after_seconds <= self.heartbeat_seconds:
            yield "stale_after_seconds must be above heartbeat_seconds, or live tasks would be run twice"
        if not is_loopback(self.http_host) and not self.needs_keys:
            yield (
                f"http_host {self.http_host} is not loopback: set {PREFIX}API_KEYS first, "
                f"or {PREFIX}API_REQUIRE_KEYS=true"
            )
        if self.dashboard_alb_arn is not None and not self.needs_keys:
            yield f"dashboard_alb_arn needs {PREFIX}API_REQUIRE_KEYS=true: without keys every caller may do everything"
        if self.dashboard_alb_arn is not None and not self.dashboard_alb_groups:
            yield "dashboard_alb_arn needs dashboard_alb_groups, without which it admits no user"
        if self.api_rate_burst is not None and self.api_rate_limit is None:
            yield "api_rate_burst needs api_rate_limit"
