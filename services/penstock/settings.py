"""Every setting: typed, with unit, default and meaning; checked as a whole before the first connection.

Precedence, written once: arguments, then ``PENSTOCK_*`` environment variables, then ``penstock.toml`` in the
current folder (or the file named by ``PENSTOCK_CONFIG``), then the defaults below. AWS credentials are not
settings: they come from the SDK's own chain.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import ssl
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, urlencode, urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings import SettingsError as _UnreadableValue

from penstock.addresses import Guard
from penstock.brokers import BrokerUrl, parse_broker_url
from penstock.errors import SettingsError
from penstock.keys import ApiKey, parse_entries
from penstock.named_sql import NamedStatement
from penstock.named_urls import named_url
from penstock.payload_settings import LONGEST_SEALED_BYTES, parse_bucket_url, read_key
from penstock.retry import Backoff
from penstock.signatures import signing_key

DAY = 86400
PREFIX = "PENSTOCK_"
CONFIG_FILE = "penstock.toml"
_SECRET_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
_REQUEST_ROOM_BYTES = 65_536  # for what surrounds a payload
_VERIFYING = ("verify-ca", "verify-full")


class Settings(BaseSettings):
    """All settings of all processes; frozen. Build it with :func:`load_settings`, which words mistakes for people."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        extra="forbid",
        validate_default=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )

    # Postgres
    database_url: SecretStr | None = Field(
        None, description="Postgres to keep tasks in, `postgresql://user:password@host:port/name`; workers need none."
    )
    database_pool_size: int = Field(8, ge=2, le=200, description="Connections that one process opens at the most.")
    statement_timeout_seconds: float = Field(
        30, gt=0, description="A statement that runs longer is cancelled by Postgres and tried again."
    )

    database_ssl_mode: Literal["disable", "allow", "prefer", "require", "verify-ca", "verify-full"] | None = Field(
        None,
        description="TLS to Postgres, as libpq's sslmode; `verify-full` is safe on any network, unset takes TLS where "
        "the server has it and checks no certificate.",
    )
    database_ssl_root_cert: str | None = Field(
        None, description="File of the authorities that the server's certificate is checked by; unset: the system's."
    )

    # Queues
    transport_url: SecretStr | None = Field(
        None,
        description="What carries the work: `sqs://`, which unset means too, `amqp://user:password@host:port/vhost` "
        "(or `amqps://`) for RabbitMQ, or `kafka://host:port,host:port`.",
    )
    sqs_endpoint_url: str | None = Field(None, description="SQS endpoint; unset means AWS.")
    aws_region: str | None = Field(None, description="AWS region; unset means the SDK's own chain.")
    inbound_queue: str = Field("penstock-inbound", min_length=1, description="Name or URL: producers to submitter.")
    outbound_queue: str = Field("penstock-outbound", min_length=1, description="Name or URL: scheduler to workers.")
    results_queue: str = Field("penstock-results", min_length=1, description="Name or URL: workers to resulter.")
    receive_wait_seconds: int = Field(
        20, ge=0, le=20, description="Long poll of a receive; shorter stops sooner, longer costs fewer empty calls."
    )
    visibility_timeout_seconds: int = Field(
        60, ge=3, le=43200, description="A received message reappears after this long unless deleted or extended."
    )
    amqp_consumer_timeout_seconds: float = Field(
        1800,
        ge=10,
        description="As RabbitMQ's consumer_timeout is set: a message held for nearly as long is deleted, and the "
        "signs of life of its tasks stand in for it.",
    )
    kafka_partitions: int = Field(
        12, ge=1, le=10_000, description="Of topics that are made for queues: no more workers take tasks from one."
    )
    kafka_replication: int = Field(
        -1, ge=-1, le=100, description="Copies of topics that are made for queues; -1 leaves it to the brokers."
    )

    # Kafka
    kafka_brokers: str | None = Field(
        None, description="Kafka's brokers to begin with, `host:port,host:port`; unset: no Kafka."
    )
    kafka_security_protocol: Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"] = Field(
        "plaintext", description="How brokers are talked to; `sasl_ssl` and `ssl` are safe on any network."
    )
    kafka_sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        "SCRAM-SHA-512", description="How the user and the password are shown to the brokers."
    )
    kafka_sasl_username: str | None = Field(None, description="The user, for `sasl_plaintext` and `sasl_ssl`.")
    kafka_sasl_password: SecretStr | None = Field(None, description="The password, likewise.")
    kafka_ssl_ca_file: str | None = Field(
        None, description="File of the authorities that the brokers' certificates are checked by; unset: the system's."
    )
    kafka_ssl_certificate_file: str | None = Field(None, description="Our own certificate, where brokers ask for one.")
    kafka_ssl_key_file: str | None = Field(None, description="Its key.")
    kafka_ssl_key_password: SecretStr | None = Field(None, description="The password of that file.")
    kafka_compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = Field(
        "none", description="How records that are published are compressed; whoever reads them must know it."
    )
    kafka_delivery_timeout_seconds: float = Field(
        30, ge=1, le=3600, description="A record that the brokers have not taken by then counts as not published."
    )
    kafka_session_timeout_seconds: float = Field(
        45, ge=1, le=1800, description="Partitions of a process that died are given to others after this."
    )

    # Schedules of older schedulers, see moving-from-clockwork.md and moving-from-kafka-message-scheduler.md
    clockwork_api: bool = Field(False, description="Serve clockwork's `POST` and `DELETE /schedule` on the api's port.")
    clockwork_port: int | None = Field(
        None, ge=0, le=65535, description="Serve them on this port as well; clockwork's was 5000. Unset: no such port."
    )
    clockwork_same_key: Literal["keep", "reject"] = Field(
        "keep",
        description="What comes of a schedule whose clientId and scheduleKey are armed with other contents: it is kept "
        "beside them, as clockwork does, or rejected.",
    )
    clockwork_create_topic: str = Field(
        "schedule-create", min_length=1, description="Topic that `penstock clockwork-source` reads schedules from."
    )
    clockwork_group: str = Field("clockwork-consumers", min_length=1, description="Its consumer group.")
    kafka_source_json_topics: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Comma-separated topics of JSON schedules that `penstock kafka-source` reads."
    )
    kafka_source_avro_topics: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Likewise, of schedules in Avro."
    )
    kafka_source_group: str = Field(
        "com.sky.kafka.scheduler", min_length=1, description="Consumer group of `penstock kafka-source`."
    )
    kafka_source_on_undecodable: Literal["cancel", "keep"] = Field(
        "cancel", description="What a record that cannot be read does to the schedule that is armed under its key."
    )

    # Attempts
    max_attempts: int = Field(
        10, ge=1, le=1000, description="Attempts before CRITICAL_ERROR, for tasks that name no number of their own."
    )
    retry_base_seconds: float = Field(5, gt=0, description="Delay after the first failed attempt.")
    retry_factor: float = Field(2, ge=1, description="Growth of the delay from one attempt to the next.")
    retry_cap_seconds: float = Field(3600, gt=0, description="No delay is longer.")
    retry_jitter: float = Field(0.2, ge=0, le=1, description="Share of each delay that is random, 0 to 1.")
    heartbeat_seconds: float = Field(
        20, gt=0, description="A worker reports a task that runs longer, again after each such interval."
    )
    cancel_poll_seconds: float = Field(
        5, gt=0, description="A worker asks this often whether tasks that run longer still hold, see control_url."
    )
    ordering_on_critical_error: Literal["release", "hold"] = Field(
        "release",
        description="What a task in CRITICAL_ERROR does to its ordering key: the next one goes, or all behind it wait "
        "until it is retried or an operator lets go.",
    )
    stale_after_seconds: float = Field(
        120, gt=0, description="A task with no sign of life from its worker for this long is tried again."
    )
    unsent_after_seconds: float = Field(
        30, gt=0, description="A claim whose sending was never confirmed (the scheduler died) is released after this."
    )
    untaken_after_seconds: float = Field(
        6 * 3600, gt=0, description="A sent task that no worker reported while its queue stayed busy is sent again."
    )

    # Scheduler
    in_flight_seconds: float = Field(
        1,
        gt=0,
        le=600,
        description="Tasks claimed and not yet settled are as many as are settled in this time, and those that run; "
        "the rest wait in Postgres by priority.",
    )
    in_flight_floor: int = Field(1000, ge=1, description="They may always be this many.")
    in_flight_limit: int = Field(100_000, ge=1, description="They are never more.")
    claim_batch_size: int = Field(2000, ge=1, le=10000, description="Tasks claimed by one statement at the most.")
    pack_max_tasks: int = Field(500, ge=1, le=1000, description="Tasks in one outbound message at the most.")
    pack_seconds: float = Field(
        1, gt=0, description="Work in one outbound message at the most, by the run times that workers report."
    )
    fair_queues: bool = Field(
        True,
        description="On SQS, messages hold tasks of one tenant alone and carry its name as their MessageGroupId, by "
        "which SQS keeps a tenant with many messages from delaying others; false: tasks are packed whoever they are "
        "for.",
    )
    poll_seconds: float = Field(0.2, gt=0, le=60, description="Look for due tasks this often even when not woken.")
    priority_ageing_seconds: float = Field(
        0,
        ge=0,
        description="Tasks that higher priorities have kept waiting for this long get a tenth of what is claimed; "
        "0: priorities are kept to the letter.",
    )

    # Worker
    worker_concurrency: int = Field(100, ge=1, description="Tasks that one worker process runs at once.")
    worker_name: str | None = Field(
        None, description="What a worker is called in what is shown of the tasks it ran; unset: `host:pid`."
    )
    worker_threads: int = Field(16, ge=1, description="Threads for handlers that are plain functions.")
    task_timeout_seconds: float = Field(
        900, gt=0, description="Run time of one attempt, unless the task or its action says otherwise."
    )

    control_url: str | None = Field(
        None,
        description="The api, asked by workers which of their tasks were cancelled; unset: handlers are not told.",
    )
    control_api_key: SecretStr | None = Field(None, description="The key that workers send there; it needs `read`.")

    result_compress_bytes: int | None = Field(
        65_536, ge=1024, description="Results over this travel compressed, where that makes them smaller; unset: none."
    )

    wait_timeout_seconds: float = Field(
        7 * DAY, gt=0, le=100 * 366 * DAY, description="A task waits so long for its event, unless its handler says."
    )

    # Deliveries
    deliveries: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Comma-separated built-in actions that workers run, such as `http.request`; each acts in the "
        "network for whoever may enqueue, so none is on by itself.",
    )
    http_allow: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Comma-separated networks, addresses and hosts (`10.1.0.0/16,billing.internal,*.svc.local`) that "
        "`http.request` may reach though they are not public.",
    )
    http_timeout_seconds: float = Field(
        30, gt=0, le=3600, description="Time for one HTTP request, redirects and answer included, unless its task says."
    )
    http_response_limit_bytes: int = Field(
        65536, ge=0, le=900_000, description="Of an answer's body so much is kept as the task's result at the most."
    )
    http_signing_secrets: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (),
        description="Comma-separated `name:secret` that tasks of `http.request` name to have requests signed; a name "
        "that stands twice signs with both.",
    )
    http_ca_file: str | None = Field(
        None, description="File of authorities, beside the system's, that HTTPS servers' certificates are checked by."
    )
    http_max_connections: int = Field(
        200, ge=1, description="HTTP connections that one worker has open at once, to all hosts together."
    )

    sqs_send_queues: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Comma-separated names or URLs of queues that `sqs.send` may send to."
    )
    amqp_publish_url: SecretStr | None = Field(
        None, description="RabbitMQ that `amqp.publish` publishes to, `amqp://user:password@host:port/vhost`."
    )
    sql_statements: dict[str, NamedStatement] = Field(
        {},
        description="Statements that `sql.execute` may run, by name, as JSON or a table of penstock.toml: dsn, "
        "statement, and if need be timeout_seconds, max_rows, with_task_id.",
    )

    # scheduler0's API
    scheduler0: bool = Field(
        False,
        description="The api serves scheduler0's API too, under /v1 and /api/v1, to those who have its credentials "
        "(`penstock credential create`).",
    )
    scheduler0_auth_username: str | None = Field(
        None, description="User of its peer mode (`x-peer: cmd` with Basic); unset: there is no such mode."
    )
    scheduler0_auth_password: SecretStr | None = Field(None, description="Password of that user.")
    scheduler0_readable_secrets: bool = Field(
        False,
        description="Keep secrets of credentials made from now on in clear, to be read again, as scheduler0 does.",
    )
    scheduler0_retry_max: int = Field(
        5, ge=0, le=999, description="A callback that fails is tried again so often; for jobs made from now on."
    )
    scheduler0_retry_delay_seconds: float | None = Field(
        None,
        ge=0,
        le=86_400,
        description="Each time after this; unset: as PENSTOCK_RETRY_BASE_SECONDS and the like say.",
    )
    scheduler0_timeout_seconds: float = Field(
        30, gt=0, le=3600, description="Time for one callback, redirects and answer included."
    )
    scheduler0_payload_limit_bytes: int = Field(
        2_000_000,
        ge=1024,
        le=100_000_000,
        description="Body of one callback; jobs that come to more are sent in several.",
    )
    scheduler0_any_status: bool = Field(
        False, description="Take any HTTP status of a callback as success, as scheduler0 does; else 2xx alone."
    )

    # Supervisor
    supervisor_interval_seconds: float = Field(5, gt=0, description="Pause between two rounds of upkeep.")
    retention_success_seconds: float = Field(7 * DAY, ge=0, description="SUCCESS records are kept this long.")
    retention_critical_error_seconds: float = Field(30 * DAY, ge=0, description="CRITICAL_ERROR records, likewise.")
    retention_cancelled_seconds: float = Field(7 * DAY, ge=0, description="CANCELLED records, likewise.")
    retention_schedule_runs_seconds: float = Field(
        7 * DAY, ge=0, description="What became of each fire of a schedule, and of each import, is kept this long."
    )
    schedule_batch_size: int = Field(
        4000, ge=1, le=20_000, description="Schedules fired in one transaction at the most."
    )
    schedule_grace_seconds: float = Field(
        60, ge=0, le=86_400, description="A fire no later than this is on time; the policy for missed ones begins here."
    )
    retention_rejected_seconds: float = Field(30 * DAY, ge=0, description="Rejected messages, likewise.")
    payload_retention_seconds: float | None = Field(
        None, ge=0, description="Payloads of settled tasks are emptied after this; unset keeps them with the record."
    )
    result_retention_seconds: float | None = Field(None, ge=0, description="Results, likewise.")
    retention_waits_seconds: float = Field(
        DAY, ge=0, description="Answers that came before their task waits, and tokens that were answered, likewise."
    )
    retention_jobs_seconds: float = Field(7 * DAY, ge=0, description="Bulk jobs that have ended, likewise.")
    retention_audit_seconds: float = Field(
        90 * DAY, ge=0, description="The record of who changed what by hand, likewise."
    )
    retention_receipts_seconds: float = Field(
        5 * DAY,
        ge=0,
        description="Receipts of inbound messages, which make a redelivery harmless; keep them longer "
        "than the inbound queue keeps messages.",
    )

    # Limits on input
    payload_limit_bytes: int = Field(262144, ge=2, le=900_000, description="A task's payload as JSON, UTF-8 bytes.")
    result_limit_bytes: int = Field(262144, ge=2, le=900_000, description="A task's result as JSON, UTF-8 bytes.")
    request_limit_bytes: int = Field(16 * 1024 * 1024, ge=1024, description="Body of one HTTP request.")
    batch_limit: int = Field(10000, ge=1, description="Requests in one JSON-RPC batch.")

    # Large payloads, and payloads at rest, see payloads.md
    payload_bucket: str | None = Field(
        None,
        description="Payloads and results over the threshold are kept as objects here, `s3://bucket/prefix`; unset: "
        "everything stays in Postgres and the queues.",
    )
    payload_s3_endpoint_url: str | None = Field(None, description="Endpoint of that bucket; unset means AWS.")
    payload_threshold_bytes: int = Field(
        131_072, ge=1024, le=LONGEST_SEALED_BYTES, description="What is larger becomes an object; JSON, UTF-8 bytes."
    )
    payload_max_bytes: int = Field(
        64 * 1024 * 1024, ge=1024, le=1024**3, description="A payload, or a result, that may become an object."
    )
    payload_sweep_seconds: float = Field(
        3600, ge=0, description="An object is looked at after this, again and again, whether its task still needs it."
    )
    payload_orphan_seconds: float = Field(
        45 * DAY,
        ge=DAY,
        description="Objects of which no task ever came are deleted after this; longer than messages, dead letters and "
        "rejected messages are kept.",
    )
    payload_keys: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (),
        description="Comma-separated keys of `penstock payload-key`: payloads, results and errors are encrypted with "
        "the first, and decrypted with any; none: they are kept as they are.",
    )

    # HTTP
    http_host: str = Field("127.0.0.1", description="Address of the api; other than loopback needs API keys.")
    http_port: int = Field(8080, ge=0, le=65535, description="Port of the api; 0 takes a free one.")
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (),
        description="Comma-separated keys that may do all, or entries `name:permissions:sha256` of keys that are not "
        "shown here, `:tenant` behind it to bind one; none = loopback only.",
    )
    api_require_keys: bool = Field(
        False, description="Ask for a key even if none is set here: those made by `penstock keys create`."
    )
    api_rate_limit: float | None = Field(
        None, gt=0, description="Requests (entries of batches) a second and key, or address; unset means any number."
    )
    api_rate_burst: int | None = Field(
        None, ge=1, description="Requests that may come at once; unset means those of one second."
    )
    http_connections: int = Field(500, ge=1, description="Connections of one api process; more are answered with 503.")
    result_waits_limit: int = Field(
        20_000, ge=1, description="Tasks that one api process waits for at once, over all calls of `result`."
    )
    request_timeout_seconds: float = Field(
        30, gt=0, le=3600, description="A request must have arrived within this; its first line and headers in 10 s."
    )
    dashboard: bool = Field(True, description="The api serves the dashboard at `/`, beside `/rpc`.")
    dashboard_session_seconds: float = Field(
        12 * 3600, ge=60, le=30 * DAY, description="Who signs in to the dashboard by an API key stays so this long."
    )
    dashboard_processes: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Comma-separated base URLs of /readyz of processes, such as workers, that the dashboard asks "
        "whether they are alive; `http://host:9464`, or `worker-1=http://host:9464` to have them named.",
    )
    api_url: str | None = Field(None, description="Where commands such as `penstock task show` find the api.")
    api_key: SecretStr | None = Field(None, description="The key such commands send.")
    metrics_host: str = Field("127.0.0.1", description="Address of /metrics, /healthz and /readyz.")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="Their port; unset means 9464 or, if that is taken, a free one; 0 a free one."
    )

    # Running
    concurrency: int = Field(2, ge=1, le=256, description="Loops inside one process, unless `--concurrency` says so.")
    grace_seconds: float = Field(25, ge=0, description="Time to finish and hand back work after SIGTERM.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level that is logged.")
    log_format: Literal["logfmt", "json"] = Field("logfmt", description="Form of a log line.")

    # Traces
    traces: bool = Field(
        False,
        description="Make OpenTelemetry spans, and pass trace contexts on; `OTEL_*` says where they go. Needs "
        "`penstock[otel]`.",
    )
    trace_url: str | None = Field(
        None, description="Link to a trace for the dashboard, `{trace_id}` standing for its id; unset: no link."
    )

    # Chaos: faults on purpose, for tests of what is built on Penstock
    chaos_postgres: float = Field(0, ge=0, le=1, description="Chance that a statement is refused before it runs.")
    chaos_commit: float = Field(0, ge=0, le=1, description="Chance that the reply is lost after a commit.")
    chaos_send: float = Field(
        0,
        ge=0,
        le=1,
        description="Chance that a send fails, whole or in part; half of what fails was sent all the same.",
    )
    chaos_receive: float = Field(
        0, ge=0, le=1, description="Chance that a receive fails, or that its reply is lost with the messages in it."
    )
    chaos_delete: float = Field(0, ge=0, le=1, description="Chance that a delete fails, whole or in part.")
    chaos_extend: float = Field(
        0, ge=0, le=1, description="Chance that an extension or a giving back fails, whole or in part."
    )
    chaos_duplicate: float = Field(
        0, ge=0, le=1, description="Chance that a call's messages are sent twice, or delivered twice."
    )
    chaos_handler: float = Field(
        0, ge=0, le=1, description="Chance that a handler raises, before its work or after it."
    )
    chaos_delay_seconds: float = Field(
        0, ge=0, le=60, description="Each statement and each call to SQS waits a random time up to this."
    )
    chaos_seed: int | None = Field(
        None, description="The same seed draws the same faults in each process; unset draws anew."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, then the environment, then penstock.toml; no .env file and no secrets folder."""
        return init_settings, env_settings, TomlFile(settings_cls)

    @field_validator(
        "api_keys", "deliveries", "http_allow", "http_signing_secrets", "sqs_send_queues", "kafka_source_json_topics",
        "kafka_source_avro_topics", "payload_keys", mode="before",
    )  # fmt: skip
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(entry.strip() for entry in value.split(",") if entry.strip())
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

    @field_validator(
        "database_url", "database_ssl_mode", "database_ssl_root_cert", "sqs_endpoint_url", "aws_region", "api_url",
        "api_key", "api_rate_limit", "api_rate_burst", "metrics_port", "control_url", "control_api_key",
        "worker_name",
        "payload_retention_seconds", "result_retention_seconds", "result_compress_bytes", "http_ca_file",
        "amqp_publish_url", "transport_url", "payload_bucket", "payload_s3_endpoint_url",
        "scheduler0_auth_username", "scheduler0_auth_password", "scheduler0_retry_delay_seconds",
        "kafka_brokers", "kafka_sasl_username", "kafka_sasl_password", "kafka_ssl_ca_file",
        "kafka_ssl_certificate_file", "kafka_ssl_key_file", "kafka_ssl_key_password",
        "clockwork_port", "trace_url", mode="before",
    )  # fmt: skip
    @classmethod
    def _empty_is_unset(cls, value: Any) -> Any:
        return None if value == "" else value

    @field_validator("trace_url")
    @classmethod
    def _names_trace(cls, value: str | None) -> str | None:
        if value is not None and ("{trace_id}" not in value or not value.startswith(("http://", "https://"))):
            raise ValueError("must be a URL such as https://jaeger/trace/{trace_id}, with {trace_id} in it")
        return value

    @field_validator("payload_bucket")
    @classmethod
    def _bucket_url(cls, value: str | None) -> str | None:
        if value is not None:
            parse_bucket_url(value)
        return value

    @field_validator("payload_keys")
    @classmethod
    def _keys_of_payloads(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for entry in value:
            read_key(entry.get_secret_value())
        return value

    @field_validator("worker_name")
    @classmethod
    def _worker_name(cls, value: str | None) -> str | None:
        from penstock.wire import check_worker_name

        return None if value is None else check_worker_name(value)

    @field_validator("transport_url")
    @classmethod
    def _known_broker(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            parse_broker_url(value.get_secret_value())
        return value

    @field_validator("amqp_publish_url")
    @classmethod
    def _rabbitmq(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and parse_broker_url(value.get_secret_value()).kind != "amqp":
            raise ValueError("must begin with amqp:// or amqps://")
        return value

    @field_validator("database_url")
    @classmethod
    def _postgres_scheme(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            check_database_url(value.get_secret_value())
        return value

    @field_validator(
        "database_ssl_root_cert", "http_ca_file", "kafka_ssl_ca_file", "kafka_ssl_certificate_file",
        "kafka_ssl_key_file",
    )  # fmt: skip
    @classmethod
    def _readable_file(cls, value: str | None) -> str | None:
        if value is not None and not (os.path.isfile(value) and os.access(value, os.R_OK)):
            raise ValueError(f"{value} is no file that can be read")
        return value

    @field_validator("api_keys")
    @classmethod
    def _entries_can_be_read(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        parse_entries(entry.get_secret_value() for entry in value)
        return value

    @field_validator("http_allow")
    @classmethod
    def _networks_and_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        Guard(value)
        return value

    @field_validator("sql_statements")
    @classmethod
    def _urls_of_statements(cls, value: dict[str, NamedStatement]) -> dict[str, NamedStatement]:
        for name, statement in value.items():
            try:
                check_database_url(statement.dsn.get_secret_value())
            except ValueError as exc:
                raise ValueError(f"{name}.dsn {exc}") from None
        return value

    @field_validator("http_signing_secrets")
    @classmethod
    def _named_secrets(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for position, entry in enumerate(value, 1):
            name, _, secret = entry.get_secret_value().partition(":")
            if not _SECRET_NAME.fullmatch(name) or not secret:
                raise ValueError(f"entry {position} is not name:secret, the name of letters, digits, - and _")
            signing_key(secret)
        return value

    @field_validator("sqs_endpoint_url", "api_url", "control_url")
    @classmethod
    def _http_scheme(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        if value is not None and "@" in value:
            raise ValueError("must hold no user and no password, for it is shown in logs")
        return value

    @model_validator(mode="after")
    def _fit_together(self) -> Settings:
        problems = []
        if self.retry_cap_seconds < self.retry_base_seconds:
            problems.append("retry_cap_seconds must be at least retry_base_seconds")
        if self.stale_after_seconds <= self.heartbeat_seconds:
            problems.append("stale_after_seconds must be above heartbeat_seconds, or live tasks would be run twice")
        if not is_loopback(self.http_host) and not self.needs_keys:
            problems.append(
                f"http_host {self.http_host} is not loopback: set {PREFIX}API_KEYS first, "
                f"or {PREFIX}API_REQUIRE_KEYS=true"
            )
        if self.api_rate_burst is not None and self.api_rate_limit is None:
            problems.append("api_rate_burst needs api_rate_limit")
        if (self.scheduler0_auth_username is None) != (self.scheduler0_auth_password is None):
            problems.append("scheduler0_auth_username and scheduler0_auth_password go together: set both, or neither")
        problems += self._payload_problems()
        problems += self._queue_problems() + self._ssl_problems() + self._kafka_problems()
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def backoff(self) -> Backoff:
        return Backoff(self.retry_base_seconds, self.retry_factor, self.retry_cap_seconds, self.retry_jitter)

    @property
    def largest_payload_bytes(self) -> int:
        """The limit of a payload that may become an object, that of any where there is no bucket."""
        return self.payload_limit_bytes if self.payload_bucket is None else self.payload_max_bytes

    @property
    def largest_result_bytes(self) -> int:
        """Of a result, likewise."""
        return self.result_limit_bytes if self.payload_bucket is None else self.payload_max_bytes

    @property
    def largest_request_bytes(self) -> int:
        """The limit of a request's body: one payload of the greatest size has room in it."""
        if self.payload_bucket is None:
            return self.request_limit_bytes
        return max(self.request_limit_bytes, self.payload_max_bytes + _REQUEST_ROOM_BYTES)

    @property
    def signing_secrets(self) -> dict[str, tuple[str, ...]]:
        """The secrets of ``http_signing_secrets`` in clear, by name."""
        found: dict[str, tuple[str, ...]] = {}
        for entry in self.http_signing_secrets:
            name, _, secret = entry.get_secret_value().partition(":")
            found[name] = (*found.get(name, ()), secret)
        return found

    @property
    def require_database_url(self) -> str:
        """The database URL in clear. Raises SettingsError when there is none."""
        if self.database_url is None:
            raise SettingsError(
                f"{PREFIX}DATABASE_URL is not set: set it to postgresql://user:password@host:5432/name, "
                "or run `penstock up`, which brings a Postgres of its own"
            )
        url = self.database_url.get_secret_value()
        given = _query_of(url)
        more = {name: value for name, value in self._ssl_parameters().items() if name not in given}
        if not more:
            return url
        bare, _, fragment = url.partition("#")
        return f"{bare}{'&' if '?' in bare else '?'}{urlencode(more)}" + (f"#{fragment}" if fragment else "")

    @property
    def transport(self) -> BrokerUrl:
        """What carries the work, taken apart."""
        return parse_broker_url(self.transport_url.get_secret_value() if self.transport_url else "sqs://")

    @property
    def require_kafka_brokers(self) -> str:
        """The brokers. Raises SettingsError when there are none."""
        if self.kafka_brokers is None:
            raise SettingsError(f"{PREFIX}KAFKA_BROKERS is not set: set it to host:port of one broker, or of several")
        return self.kafka_brokers

    @property
    def holds_ordering_keys(self) -> bool:
        """Whether a task in CRITICAL_ERROR holds its ordering key."""
        return self.ordering_on_critical_error == "hold"

    @property
    def needs_keys(self) -> bool:
        """Whether the api asks for a key."""
        return bool(self.api_keys) or self.api_require_keys

    @property
    def known_keys(self) -> tuple[ApiKey, ...]:
        """The keys of ``api_keys``."""
        return parse_entries(entry.get_secret_value() for entry in self.api_keys)

    def _ssl_parameters(self) -> dict[str, str]:
        """The settings of TLS as parameters of a URL, where every part of Penstock, Alembic included, finds them."""
        parameters: dict[str, str] = {}
        if self.database_ssl_mode is not None:
            parameters["sslmode"] = self.database_ssl_mode
        if self.database_ssl_root_cert is not None:
            parameters["sslrootcert"] = self.database_ssl_root_cert
        elif self.database_ssl_mode in _VERIFYING and (system := ssl.get_default_verify_paths().cafile) is not None:
            parameters["sslrootcert"] = system  # the driver would look for ~/.postgresql/root.crt alone
        return parameters

    def _ssl_problems(self) -> list[str]:
        if self.database_url is None:
            return []
        given = _query_of(self.database_url.get_secret_value())
        wanted = {"sslmode": self.database_ssl_mode, "sslrootcert": self.database_ssl_root_cert}
        problems = [
            f"database_url says {name} too, and otherwise than {setting}: keep one of them"
            for name, setting in (("sslmode", "database_ssl_mode"), ("sslrootcert", "database_ssl_root_cert"))
            if wanted[name] is not None and given.get(name, wanted[name]) != wanted[name]
        ]
        if self.database_ssl_mode in _VERIFYING and "sslrootcert" not in self._ssl_parameters() | given:
            problems.append(f"database_ssl_mode {self.database_ssl_mode} needs database_ssl_root_cert on this system")
        mode = given.get("sslmode", self.database_ssl_mode or "prefer")
        if self.database_ssl_root_cert is not None and mode in ("disable", "allow", "prefer"):
            problems.append(
                f"database_ssl_root_cert is not looked at with the mode {mode}: set database_ssl_mode to verify-full"
            )
        return problems

    def _payload_problems(self) -> list[str]:
        problems = []
        if self.payload_keys:
            problems = [
                f"{name} may be at most {LONGEST_SEALED_BYTES} with payload_keys, for what is encrypted is longer"
                for name in ("payload_limit_bytes", "result_limit_bytes")
                if getattr(self, name) > LONGEST_SEALED_BYTES
            ]
        if self.payload_bucket is not None and self.payload_max_bytes < self.payload_threshold_bytes:
            problems.append("payload_max_bytes must be at least payload_threshold_bytes")
        return problems

    def _queue_problems(self) -> list[str]:
        kind = self.transport.kind
        names = {name: getattr(self, name) for name in ("inbound_queue", "outbound_queue", "results_queue")}
        return [
            f"{name} {value} is a URL of SQS, and transport_url begins with {self.transport.scheme}://: name the queue"
            for name, value in names.items()
            if kind != "sqs" and "://" in value
        ]

    def _kafka_problems(self) -> list[str]:
        problems = []
        protocol = self.kafka_security_protocol
        if protocol.startswith("sasl") and (self.kafka_sasl_username is None or self.kafka_sasl_password is None):
            problems.append(f"kafka_security_protocol {protocol} needs kafka_sasl_username and kafka_sasl_password")
        if not protocol.startswith("sasl") and self.kafka_sasl_password is not None:
            problems.append(f"kafka_sasl_password is not sent with {protocol}: set kafka_security_protocol to sasl_ssl")
        files = (self.kafka_ssl_ca_file, self.kafka_ssl_certificate_file, self.kafka_ssl_key_file)
        if not protocol.endswith("ssl") and any(files):
            problems.append(f"kafka_ssl_* is not looked at with {protocol}: set kafka_security_protocol to ssl")
        if (self.kafka_ssl_certificate_file is None) != (self.kafka_ssl_key_file is None):
            problems.append("kafka_ssl_certificate_file and kafka_ssl_key_file go together")
        return problems


def toml_path() -> Path:
    """The file that is read, be it there or not."""
    return Path(os.environ.get(PREFIX + "CONFIG") or CONFIG_FILE)


class TomlFile(PydanticBaseSettingsSource):
    """penstock.toml; keys are the settings' names without the prefix."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError  # abstract upstream; __call__ below reads the whole file at once

    def __call__(self) -> dict[str, Any]:
        path = toml_path()
        if not path.is_file():
            if os.environ.get(PREFIX + "CONFIG"):
                raise SettingsError(f"{PREFIX}CONFIG names {path}, which is no file: correct it, or unset it")
            return {}
        try:
            return tomllib.loads(path.read_text("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
            raise SettingsError(f"{path} is not valid TOML: {exc}") from exc


def check_database_url(url: str) -> None:
    """Raises ValueError for what the driver would refuse with a text that may hold a part of the password."""
    if not url.startswith(("postgresql://", "postgres://")):
        raise ValueError("must begin with postgresql://")
    try:
        parts = urlsplit(url)
        torn = "@" in parts.path + parts.fragment or any(not _is_port(part) for part in _ports_of(parts.netloc))
    except ValueError:
        torn = True
    if torn:
        raise ValueError(
            "must be postgresql://user:password@host:port/name, the characters : / ? # [ ] @ and % of a password "
            "written as %3A %2F %3F %23 %5B %5D %40 %25"
        )


def _ports_of(netloc: str) -> list[str]:
    """What stands behind the colon of each host of a URL; several are separated by commas."""
    hosts = netloc.rpartition("@")[2].split(",")
    return [host.rpartition(":")[2] for host in hosts if ":" in host.rpartition("]")[2]]


def _is_port(text: str) -> bool:
    return text == "" or (text.isascii() and text.isdigit() and int(text) < 65536)


def _query_of(url: str) -> dict[str, str]:
    return dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))


def is_loopback(host: str) -> bool:
    """Whether an address or name means this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def misspelt_variables(environ: dict[str, str] | os._Environ[str] = os.environ) -> list[tuple[str, str]]:
    """``PENSTOCK_*`` variables that are no setting but look like one: pairs of (seen, meant)."""
    known = {PREFIX + name.upper() for name in Settings.model_fields} | {PREFIX + "CONFIG"}
    pairs = []
    for name in environ:
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            if near:
                pairs.append((name, near[0]))
    return pairs


def load_settings(**overrides: Any) -> Settings:
    """Read and check every setting; raises SettingsError listing all mistakes, with no secret's value in the text."""
    try:
        return Settings(**overrides)
    except _UnreadableValue as exc:
        raise SettingsError(f"settings are wrong: {exc}; its value must be JSON") from None
    except ValidationError as exc:
        lines = []
        for error in exc.errors(include_input=False, include_url=False, include_context=False):
            name = str(error["loc"][0]) if error["loc"] else ""
            message = error["msg"].removeprefix("Value error, ")
            if error["type"] == "extra_forbidden":
                near = difflib.get_close_matches(name, Settings.model_fields, n=1)
                message = "is no setting" + (f"; did you mean {near[0]}?" if near else "")
            within = ".".join(str(part) for part in error["loc"][1:])
            lines.append(f"{PREFIX}{name.upper()}: {within and within + ': '}{message}" if name else message)
        raise SettingsError("settings are wrong:\n  " + "\n  ".join(lines)) from None
