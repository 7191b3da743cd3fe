"""Settings of processes: all of them, the scheduler, workers, the supervisor, attempts, HTTP, chaos."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import NoDecode

from penstock.protocol.api_key import ApiKey, check_plain_lengths, parse_entries
from penstock.protocol.retry import Backoff
from penstock.protocol.worker_names import check_worker_name
from penstock.settings.values import DAY, PREFIX, Group, Names, Secrets, empty_is_unset, http_url, named_url


class ProcessSettings(Group):
    """The sections Running and Traces of docs/configuration.md."""

    concurrency: int = Field(
        2, ge=1, le=256, description="Concurrent receive loops of one process, unless `--loops` is given."
    )
    grace_seconds: float = Field(25, ge=0, description="Time to finish and hand back work after SIGTERM.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level that is logged.")
    log_failure_details: bool = Field(
        True,
        description="Log a failed attempt with the error's message and traceback, which may hold parts of a "
        "payload; false: only its type, as always where payloads are encrypted.",
    )
    log_format: Literal["logfmt", "json"] = Field("logfmt", description="Format of log lines.")

    traces: bool = Field(
        False,
        description="Make OpenTelemetry spans, and pass trace contexts on; `OTEL_*` configures the export. Needs "
        "`penstock[otel]`.",
    )
    trace_url: str | None = Field(
        None, description="The dashboard's link to a trace, `{trace_id}` standing for its id; unset: no link."
    )

    _unset_traces = field_validator("trace_url", mode="before")(empty_is_unset)

    @field_validator("trace_url")
    @classmethod
    def _names_trace(cls, value: str | None) -> str | None:
        if value is not None and ("{trace_id}" not in value or not value.startswith(("http://", "https://"))):
            raise ValueError("must be a URL such as https://jaeger/trace/{trace_id}, with {trace_id} in it")
        return value


class SchedulerSettings(Group):
    """The section Scheduler of docs/configuration.md."""

    in_flight_seconds: float = Field(
        1,
        gt=0,
        le=600,
        description="The window of claimed, unsettled tasks is the number settled in this time, plus the running "
        "ones; the rest wait in Postgres by priority.",
    )
    in_flight_floor: int = Field(1000, ge=1, description="Smallest window.")
    in_flight_limit: int = Field(100_000, ge=1, description="Largest window.")
    claim_batch_size: int = Field(2000, ge=1, le=10000, description="Maximum number of tasks claimed by one statement.")
    pack_max_tasks: int = Field(500, ge=1, le=1000, description="Maximum number of tasks in one outbound message.")
    pack_seconds: float = Field(
        1, gt=0, description="Maximum work in one outbound message, by the run times that workers report."
    )
    fair_queues: bool = Field(
        True,
        description="On SQS, a message holds tasks of one tenant and carries its name as MessageGroupId, so that "
        "SQS keeps a tenant with many messages from delaying others; false: tasks are packed regardless of their "
        "tenant.",
    )
    poll_seconds: float = Field(0.2, gt=0, le=60, description="Interval of looks for due tasks when no wake-up comes.")
    priority_ageing_seconds: float = Field(
        0,
        ge=0,
        description="Tasks that higher priorities have kept waiting for this long get a tenth of each claim; 0: "
        "priorities are strict.",
    )


class WorkerSettings(Group):
    """The section Worker of docs/configuration.md."""

    worker_concurrency: int = Field(100, ge=1, description="Tasks that one worker process runs at once.")
    worker_name: str | None = Field(
        None, description="Name of this worker in what is shown of its tasks; unset: `host:pid`."
    )
    worker_threads: int = Field(16, ge=1, description="Threads for handlers that are plain functions.")
    task_timeout_seconds: float = Field(
        900, gt=0, description="Maximum run time of one attempt, unless the task or its action sets one."
    )

    bad_params_attempts: int | None = Field(
        3,
        ge=1,
        description="Attempts of a task whose parameters do not fit its handler, unless its action sets a "
        "number; unset: as many as for any other error.",
    )
    unknown_action_attempts: int | None = Field(
        None,
        ge=1,
        description="Attempts of a task for which a worker has no handler, such as during a deploy; unset: as "
        "many as for any other error.",
    )

    control_url: str | None = Field(
        None,
        description="The api, which workers ask for cancelled tasks; unset: handlers do not learn of a cancellation.",
    )
    control_api_key: SecretStr | None = Field(
        None, description="The API key for control_url; it needs `worker` or `read`."
    )

    result_compress_bytes: int | None = Field(
        65_536,
        ge=1024,
        description="Results over this size are sent compressed if that makes them smaller; unset: never.",
    )

    wait_timeout_seconds: float = Field(
        7 * DAY,
        gt=0,
        le=100 * 366 * DAY,
        description="How long a task waits for its event, unless its handler sets a time.",
    )

    _unset_worker = field_validator(
        "bad_params_attempts",
        "unknown_action_attempts",
        "control_url",
        "control_api_key",
        "worker_name",
        "result_compress_bytes",
        mode="before",
    )(empty_is_unset)
    _http_of_worker = field_validator("control_url")(http_url)

    @field_validator("worker_name")
    @classmethod
    def _worker_name(cls, value: str | None) -> str | None:
        return None if value is None else check_worker_name(value)


class SupervisorSettings(Group):
    """The section Supervisor of docs/configuration.md."""

    supervisor_interval_seconds: float = Field(5, gt=0, description="Pause between two rounds of upkeep.")
    retention_success_seconds: float = Field(7 * DAY, ge=0, description="Retention of SUCCESS records.")
    retention_critical_error_seconds: float = Field(30 * DAY, ge=0, description="Retention of CRITICAL_ERROR records.")
    retention_cancelled_seconds: float = Field(7 * DAY, ge=0, description="Retention of CANCELLED records.")
    retention_schedule_runs_seconds: float = Field(
        7 * DAY, ge=0, description="Retention of the runs of schedules and of imports."
    )
    schedule_batch_size: int = Field(
        4000, ge=1, le=20_000, description="Maximum number of schedules fired in one transaction."
    )
    schedule_grace_seconds: float = Field(
        60,
        ge=0,
        le=86_400,
        description="A fire no later than this is on time; a later one is missed, and the policy for missed "
        "fires applies.",
    )
    retention_rejected_seconds: float = Field(30 * DAY, ge=0, description="Retention of rejected messages.")
    payload_retention_seconds: float | None = Field(
        None, ge=0, description="Retention of payloads of settled tasks; unset keeps them with the record."
    )
    result_retention_seconds: float | None = Field(
        None, ge=0, description="Retention of results; unset keeps them with the record."
    )
    retention_waits_seconds: float = Field(
        DAY, ge=0, description="Retention of answers that came before their task waits, and of answered tokens."
    )
    retention_jobs_seconds: float = Field(7 * DAY, ge=0, description="Retention of bulk jobs that have ended.")
    retention_audit_seconds: float = Field(90 * DAY, ge=0, description="Retention of the audit log.")
    retention_receipts_seconds: float = Field(
        5 * DAY,
        ge=0,
        description="Retention of the receipts of inbound messages, which make a redelivery harmless; longer "
        "than the inbound queue keeps messages.",
    )

    _unset_retention = field_validator("payload_retention_seconds", "result_retention_seconds", mode="before")(
        empty_is_unset
    )


class AttemptSettings(Group):
    """The section Attempts of docs/configuration.md."""

    max_attempts: int = Field(
        10, ge=1, le=1000, description="Attempts before CRITICAL_ERROR, for tasks that set no number of their own."
    )
    retry_base_seconds: float = Field(5, gt=0, description="Delay after the first failed attempt.")
    retry_factor: float = Field(2, ge=1, description="Growth of the delay from one attempt to the next.")
    retry_cap_seconds: float = Field(3600, gt=0, description="Longest delay.")
    retry_jitter: float = Field(0.2, ge=0, le=1, description="Share of each delay that is random, 0 to 1.")
    spawn_actions: Names = Field(
        (),
        description="Comma-separated actions (`mail.*`) that any task may spawn; others only if they have the "
        "same route as the task that spawns them.",
    )
    heartbeat_seconds: float = Field(
        20, gt=0, description="Interval of the heartbeats that a worker sends for a task that runs longer than this."
    )
    cancel_poll_seconds: float = Field(
        5, gt=0, description="A worker asks this often whether longer running tasks are still its own, see control_url."
    )
    ordering_on_critical_error: Literal["release", "hold"] = Field(
        "release",
        description="What a task in CRITICAL_ERROR does to its ordering key: `release` lets the next task run, "
        "`hold` keeps all tasks behind it waiting until it is retried or an operator releases the key.",
    )
    stale_after_seconds: float = Field(
        120,
        gt=0,
        description="A task without a heartbeat for this long, plus the time that one may be in transit, is "
        "tried again.",
    )
    unsent_after_seconds: float = Field(
        90,
        gt=0,
        description="A claim whose sending was never confirmed (the scheduler died) is released after this; "
        "a send may take two thirds of it.",
    )
    untaken_after_seconds: float = Field(
        6 * 3600,
        gt=0,
        description="A task without any heartbeat for this long is sent again even if its queue is busy.",
    )

    @property
    def backoff(self) -> Backoff:
        return Backoff(self.retry_base_seconds, self.retry_factor, self.retry_cap_seconds, self.retry_jitter)

    @property
    def holds_ordering_keys(self) -> bool:
        """Whether a task in CRITICAL_ERROR holds its ordering key."""
        return self.ordering_on_critical_error == "hold"

    def _attempt_problems(self) -> list[str]:
        problems = []
        if self.retry_cap_seconds < self.retry_base_seconds:
            problems.append("retry_cap_seconds must be at least retry_base_seconds")
        if self.stale_after_seconds <= self.heartbeat_seconds:
            problems.append("stale_after_seconds must be above heartbeat_seconds, or live tasks would be run twice")
        return problems


def is_loopback(host: str) -> bool:
    """Whether an address or name means this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class HttpSettings(Group):
    """The section HTTP of docs/configuration.md."""

    http_host: str = Field(
        "127.0.0.1", description="Address of the api; an address other than loopback requires API keys."
    )
    http_port: int = Field(8080, ge=0, le=65535, description="Port of the api; 0 takes a free one.")
    api_keys: Secrets = Field(
        (),
        description="Comma-separated keys of 16 characters or more with all permissions, or entries "
        "`name:permissions:sha256` that hold only a key's digest, followed by `:tenant:actions` to bind one; "
        "none = loopback only.",
    )
    api_require_keys: bool = Field(
        False, description="Require a key even if none is set here: those created by `penstock keys create`."
    )
    api_rate_limit: float | None = Field(
        None,
        gt=0,
        description="Requests (entries of batches) per second for each key, or address; unset means no limit.",
    )
    api_rate_burst: int | None = Field(
        None, ge=1, description="Requests that may come at once; unset means those of one second."
    )
    http_connections: int = Field(
        500,
        ge=1,
        description="Maximum number of connections of one api process; one more closes an idle one, or is "
        "answered with 503.",
    )
    http_bytes_in_flight: int = Field(
        64 * 1024 * 1024,
        ge=1024 * 1024,
        description="Maximum bytes of bodies and answers that one api process holds at once, without the first "
        "16 KiB of each request; more are answered with 503. One request of the largest size and its answer "
        "always fit.",
    )
    result_waits_limit: int = Field(
        20_000,
        ge=1,
        description="Maximum number of tasks that one api process waits for at once, over all calls of `result`.",
    )
    request_timeout_seconds: float = Field(
        30, gt=0, le=3600, description="A request must have arrived within this; its first line and headers in 10 s."
    )
    dashboard: bool = Field(True, description="The api serves the dashboard at `/`, beside `/rpc`.")
    dashboard_session_seconds: float = Field(
        12 * 3600, ge=60, le=30 * DAY, description="Lifetime of a dashboard session that was opened with an API key."
    )
    dashboard_processes: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Comma-separated base URLs of /readyz of processes, such as workers, whose state the "
        "dashboard shows; `http://host:9464`, or `worker-1=http://host:9464` to name one.",
    )
    api_url: str | None = Field(
        None, description="The api's URL for commands such as `penstock task show` and for `Client()`."
    )
    api_key: SecretStr | None = Field(None, description="The API key that they send.")
    metrics_host: str = Field("127.0.0.1", description="Address of /metrics, /healthz and /readyz.")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Their port; unset means 9464 or, if that is in use, a free one; 0 a free one.",
    )

    _unset_http = field_validator(
        "api_url", "api_key", "api_rate_limit", "api_rate_burst", "metrics_port", mode="before"
    )(empty_is_unset)
    _http_of_api = field_validator("api_url")(http_url)

    @field_validator("api_keys")
    @classmethod
    def _entries_can_be_read(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        entries = [entry.get_secret_value() for entry in value]
        parse_entries(entries)
        check_plain_lengths(entries)
        return value

    @field_validator("dashboard_processes", mode="before")
    @classmethod
    def _split_processes(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(url.strip().rstrip("/") for url in value.split(",") if url.strip())
        return value

    @field_validator("dashboard_processes")
    @classmethod
    def _are_http(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            named_url(entry)
        return value

    @property
    def needs_keys(self) -> bool:
        """Whether the api asks for a key."""
        return bool(self.api_keys) or self.api_require_keys

    @property
    def known_keys(self) -> tuple[ApiKey, ...]:
        """The keys of ``api_keys``."""
        return parse_entries(entry.get_secret_value() for entry in self.api_keys)

    def _http_problems(self) -> list[str]:
        problems = []
        if not is_loopback(self.http_host) and not self.needs_keys:
            problems.append(
                f"http_host {self.http_host} is not loopback: set {PREFIX}API_KEYS first, "
                f"or {PREFIX}API_REQUIRE_KEYS=true"
            )
        if self.api_rate_burst is not None and self.api_rate_limit is None:
            problems.append("api_rate_burst needs api_rate_limit")
        return problems


class ChaosSettings(Group):
    """The section Chaos of docs/configuration.md."""

    chaos_postgres: float = Field(0, ge=0, le=1, description="Chance that a statement is refused before it runs.")
    chaos_commit: float = Field(0, ge=0, le=1, description="Chance that the reply is lost after a commit.")
    chaos_send: float = Field(
        0,
        ge=0,
        le=1,
        description="Chance that a send fails, wholly or in part; half of the failed messages were sent all the same.",
    )
    chaos_receive: float = Field(
        0, ge=0, le=1, description="Chance that a receive fails, or that its reply is lost with the messages in it."
    )
    chaos_delete: float = Field(0, ge=0, le=1, description="Chance that a delete fails, wholly or in part.")
    chaos_extend: float = Field(
        0, ge=0, le=1, description="Chance that an extension or a release fails, wholly or in part."
    )
    chaos_duplicate: float = Field(
        0, ge=0, le=1, description="Chance that a call's messages are sent twice, or delivered twice."
    )
    chaos_handler: float = Field(0, ge=0, le=1, description="Chance that a handler raises, before or after its work.")
    chaos_delay_seconds: float = Field(
        0, ge=0, le=60, description="Each statement and each call to SQS waits a random time up to this."
    )
    chaos_seed: int | None = Field(
        None, description="The same seed gives the same faults in each process; unset: new ones at each start."
    )
