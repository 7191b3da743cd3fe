"""All settings as one object: declared here, in the order of docs/configuration.md, and read from their sources."""

import ipaddress
import json
import os
import re
import shlex
import ssl
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import urlencode, urlsplit

import pydantic
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, SecretStr

from penstock.protocol.api_key import ApiKey, Permission, parse_entries, parse_entry
from penstock.protocol.errors import SettingsError
from penstock.protocol.message_attributes import PACK_MAX_TASKS, check_worker_name
from penstock.protocol.output import OutputMode
from penstock.protocol.retry import Backoff
from penstock.protocol.schema import is_ambiguous
from penstock.protocol.spelling import did_you_mean, nearest
from penstock.protocol.webhook_signatures import signing_key
from penstock.settings.address_policy import AddressPolicy
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX, BrokerUrl, parse_broker_url
from penstock.settings.payload_texts import parse_bucket_url, read_key
from penstock.settings.values import DAY, HTTP, PREFIX, is_loopback, masked, named_url, query_of

T = TypeVar("T")
LONGEST_SEALED_BYTES = 700_000  # of a text: encrypted and in base64 it still fits a message
_VERIFYING = ("verify-ca", "verify-full")
_SSL_PARAMETERS = (
    ("sslmode", "database_ssl_mode"),
    ("sslrootcert", "database_ssl_root_cert"),
    ("sslcert", "database_ssl_cert"),
    ("sslkey", "database_ssl_key"),
)
_PASSWORDS = ("database_password_file", "database_password_command", "database_iam")
_PAIRS = (
    ("database_ssl_cert", "database_ssl_key"),
    ("kafka_ssl_certificate_file", "kafka_ssl_key_file"),
    ("http_tls_cert", "http_tls_key"),
    ("scheduler0_auth_username", "scheduler0_auth_password"),
)
_SECRET_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
_LOAD_BALANCER_ARN = re.compile(r"arn:aws[\w-]*:elasticloadbalancing:[a-z0-9-]+:\d{12}:loadbalancer/app/[\w/-]+")


def checked(check: Callable[[Any], object]) -> AfterValidator:
    """For a text, a secret or several: the check raises ValueError, which names no secret."""

    def validate(value: Any) -> Any:
        check(value.get_secret_value() if isinstance(value, SecretStr) else value)
        return value

    return AfterValidator(validate)


def must(holds: Callable[[Any], object], problem: str) -> AfterValidator:
    """As `checked`, by a test that holds for what is valid. problem: of what is not."""

    def check(value: Any) -> None:
        if not holds(value):
            raise ValueError(problem)

    return checked(check)


def _split_commas(value: Any) -> Any:
    """``one, two`` as a tuple; other values stay unchanged."""
    if isinstance(value, str):
        return tuple(entry.strip() for entry in value.split(",") if entry.strip())
    return value


def _from_json(value: Any) -> Any:
    """The object that a variable's text holds; other values stay unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError("must be JSON") from None  # the text may hold a secret


def _readable_file(path: str) -> None:
    if not (os.path.isfile(path) and os.access(path, os.R_OK)):
        raise ValueError(f"{path} is no file that can be read")


def _database_url(url: str) -> None:
    """Raises ValueError for what the driver would refuse with a text that may hold a part of the password."""
    if not url.startswith(("postgresql://", "postgres://")):
        raise ValueError("must begin with postgresql://")
    try:
        parts = urlsplit(url)
        for server in parts.netloc.rpartition("@")[2].split(","):
            _ = urlsplit(f"//{server}").port  # raises ValueError
        torn = "@" in parts.path + parts.fragment
    except ValueError:
        torn = True
    if torn:
        raise ValueError(
            "must be postgresql://user:password@host:port/name, the characters : / ? # [ ] @ and % of a password "
            "written as %3A %2F %3F %23 %5B %5D %40 %25"
        )


def _schema_name(name: str) -> None:
    if not re.fullmatch(r"(?!pg_|public$|information_schema$)[a-z][a-z0-9_]{0,30}", name):
        raise ValueError("must be up to 31 lower-case letters, digits and _, and no schema of Postgres's own")
    if is_ambiguous(name):
        raise ValueError("must not be a function or a channel of Penstock, such as penstock_work")


def _named_secrets(entries: tuple[SecretStr, ...]) -> None:
    for position, entry in enumerate(entries, 1):
        name, _, secret = entry.get_secret_value().partition(":")
        if not _SECRET_NAME.fullmatch(name) or not secret:
            raise ValueError(f"entry {position} is not name:secret, the name of letters, digits, - and _")
        signing_key(secret)


def _named_host(entry: str) -> None:
    name, _, host = entry.partition(":")
    if not _SECRET_NAME.fullmatch(name) or not host or "/" in host:
        raise ValueError(f"{entry!r} is not name:host, such as billing:api.example.com")


def _by_name(entries: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The values of ``name:value`` entries."""
    found: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        name, _, value = entry.partition(":")
        found[name] = (*found.get(name, ()), value)
    return found


def _network(entry: str) -> None:
    try:
        ipaddress.ip_network(entry)
    except ValueError as exc:
        raise ValueError(f"{entry!r} is not a network such as 10.1.0.0/16: {exc}") from None


# Types of settings

OrUnset = Annotated[T | None, BeforeValidator(lambda value: None if value == "" else value)]
Listed = Annotated[tuple[T, ...], BeforeValidator(_split_commas)]
Table = Annotated[dict[str, T], BeforeValidator(_from_json)]
Names = Listed[str]
Secrets = Listed[SecretStr]
Seconds = Annotated[float, Field(ge=0)]
PositiveSeconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Name = Annotated[str, Field(min_length=1)]
HttpUrl = Annotated[
    str,
    must(lambda url: url.startswith(HTTP), "must begin with http:// or https://"),
    must(lambda url: "@" not in url, "must hold no user and no password, for it is shown in logs"),
]
ReadableFile = Annotated[str, checked(_readable_file)]
DatabaseUrl = Annotated[
    SecretStr,
    checked(_database_url),
    pydantic.PlainSerializer(lambda url: masked(url.get_secret_value()), when_used="json"),
]
_ACCESS_KEY = must(lambda key: all(key.partition(":")), "must be ID:SECRET of an AWS access key")
_RABBITMQ_URL = must(lambda url: parse_broker_url(url).kind == "amqp", "must begin with amqp:// or amqps://")
_LOAD_BALANCER = must(
    _LOAD_BALANCER_ARN.fullmatch, "must be arn:aws:elasticloadbalancing:REGION:ACCOUNT:loadbalancer/app/NAME/ID"
)
_TRACE_URL = must(
    lambda url: "{trace_id}" in url and url.startswith(HTTP),
    "must be a URL such as https://jaeger/trace/{trace_id}, with {trace_id} in it",
)


class NamedStatement(pydantic.BaseModel):
    """One statement and where it runs."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    dsn: DatabaseUrl
    """Postgres, `postgresql://user:password@host:port/name`."""
    statement: Name
    """One SQL statement, its parameters written as $1, $2 and so on."""
    timeout_seconds: Annotated[PositiveSeconds, Field(le=3600)] = 30
    """The server stops it after this."""
    max_rows: Annotated[int, Field(ge=0, le=100_000)] = 100
    """Of its rows, so many are kept as the result."""
    with_tenant: bool = False
    """The tenant that the scheduler says the task is for, or null, is $1, or $2 behind the task's id; the payload's
    parameters follow."""
    with_task_id: bool = False
    """$1 is the task's id, the same over its attempts; the payload's parameters follow."""


class Settings(pydantic.BaseModel):
    """All settings of all processes; frozen. Read them with :func:`load_settings`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    # Postgres

    database_url: OrUnset[DatabaseUrl] = None
    """Postgres that stores the tasks, `postgresql://user:password@host:port/name`, directly or through a pooler; of
    several hosts (`host:port,host:port`) the one that takes writes is used; workers need none."""
    database_schema: Annotated[str, checked(_schema_name)] = "penstock"
    """Schema of Penstock's tables; two installations in one database have a schema each."""
    database_pool_size: Annotated[int, Field(ge=2, le=200)] = 8
    """Maximum number of connections of one process, of each of the five in `penstock run`. A scheduler, a supervisor
    and an api that waits for results listen on one or two more."""
    database_pooler: OrUnset[Literal["transaction", "session"]] = None
    """Mode of a pooler before Postgres, `transaction` or `session`; unset finds a pooler, and whether it keeps prepared
    statements, and works as in transaction mode, which suits both."""
    database_listen_url: OrUnset[DatabaseUrl] = None
    """Postgres itself, past a pooler in transaction mode, for one connection of each process that listens for wake-ups;
    unset: through such a pooler, processes poll."""
    database_read_url: OrUnset[DatabaseUrl] = None
    """A streaming replica, from which the api answers lists, counts, the overview and long polls while it is young
    enough; several replicas may share a name."""
    database_read_max_age_seconds: Annotated[float, Field(ge=2, le=3600)] = 10
    """With an older replica, the api reads from the primary."""
    statement_timeout_seconds: PositiveSeconds = 30
    """Postgres cancels a statement that runs longer, and it is tried again."""

    database_password_file: OrUnset[ReadableFile] = None
    """File that holds the password alone, read for each new connection, so that it may be replaced."""
    database_password_command: OrUnset[Annotated[str, must(shlex.split, "must name a program")]] = None
    """Command that prints the password within 10 s, run without a shell for each new connection; it is no secret."""
    database_iam: bool = False
    """Connect to RDS with IAM tokens, signed for each new connection with the AWS credentials of the process."""
    database_ssl_mode: OrUnset[Literal["disable", "allow", "prefer", "require", "verify-ca", "verify-full"]] = None
    """TLS to Postgres, as libpq's sslmode; `verify-full` is safe on any network, unset uses TLS if the server offers it
    and checks no certificate."""
    database_ssl_root_cert: OrUnset[ReadableFile] = None
    """File of the authorities that the server's certificate is checked against; unset: the system's."""
    database_ssl_cert: OrUnset[ReadableFile] = None
    """Client certificate, if the server requires one; read for each new connection."""
    database_ssl_key: OrUnset[ReadableFile] = None
    """Its key, without a passphrase."""

    @property
    def require_database_url(self) -> str:
        """The database URL in clear. Raises SettingsError when there is none."""
        url = self._with_parameters(self.database_url)
        if url is None:
            raise SettingsError(
                f"{PREFIX}DATABASE_URL is not set: set it to postgresql://user:password@host:5432/name, "
                "or run `penstock up`, which brings a Postgres of its own"
            )
        return url

    @property
    def listen_url(self) -> str | None:
        """The URL to listen at, in clear; None for that of the database."""
        return self._with_parameters(self.database_listen_url)

    @property
    def read_url(self) -> str | None:
        """The URL of the replica, in clear; of several hosts one that is a replica."""
        return self._with_parameters(self.database_read_url, of_several_hosts="prefer-standby")

    def _with_parameters(self, secret: SecretStr | None, of_several_hosts: str | None = None) -> str | None:
        if secret is None:
            return None
        url = secret.get_secret_value()
        given = query_of(url)
        wanted = self._ssl_parameters()
        if of_several_hosts is not None and "," in urlsplit(url).netloc:
            wanted["target_session_attrs"] = of_several_hosts
        more = urlencode({name: value for name, value in wanted.items() if name not in given})
        if not more:
            return url
        bare, sign, fragment = url.partition("#")
        return f"{bare}{'&' if '?' in bare else '?'}{more}{sign}{fragment}"

    def _ssl_parameters(self) -> dict[str, str]:
        """The settings of TLS as parameters of a URL, where every part of Penstock, Alembic included, finds them."""
        given = {name: getattr(self, field) for name, field in _SSL_PARAMETERS}
        if given["sslrootcert"] is None and self.database_ssl_mode in _VERIFYING:
            given["sslrootcert"] = ssl.get_default_verify_paths().cafile  # not the driver's ~/.postgresql/root.crt
        return {name: value for name, value in given.items() if value is not None}

    def _database_problems(self) -> Iterator[str]:
        if self.database_url is None:
            return
        given = query_of(self.database_url.get_secret_value())
        for name, field in _SSL_PARAMETERS:
            wanted = getattr(self, field)
            if wanted is not None and given.get(name, wanted) != wanted:
                yield f"database_url says {name} too, and otherwise than {field}: keep one of them"
        if self.database_ssl_mode in _VERIFYING and "sslrootcert" not in self._ssl_parameters() | given:
            yield f"database_ssl_mode {self.database_ssl_mode} needs database_ssl_root_cert on this system"
        mode = given.get("sslmode", self.database_ssl_mode or "prefer")
        if self.database_ssl_cert is not None and mode == "disable":
            yield "database_ssl_cert is not looked at with the mode disable: set database_ssl_mode to verify-full"
        passwords = [name for name in _PASSWORDS if getattr(self, name)]
        secrets = (self.database_url, self.database_listen_url, self.database_read_url)
        urls = [secret.get_secret_value() for secret in secrets if secret is not None]
        if passwords and any(urlsplit(url).password or "password" in query_of(url) for url in urls):
            passwords.append("the password of a URL")
        if len(passwords) > 1:
            yield f"{' and '.join(passwords)} give a password each: keep one of them"
        if self.database_iam and mode in ("disable", "allow", "prefer"):
            yield f"database_iam needs TLS, and the mode is {mode}: set database_ssl_mode to verify-full"
        if self.database_ssl_root_cert is not None and mode in ("disable", "allow", "prefer"):
            yield f"database_ssl_root_cert is not looked at with the mode {mode}: set database_ssl_mode to verify-full"

    # Queues

    transport_url: OrUnset[Annotated[SecretStr, checked(parse_broker_url)]] = None
    """Transport between the processes: `sqs://`, also the meaning of unset, `amqp://user:password@host:port/vhost` (or
    `amqps://`) for RabbitMQ, or `kafka://host:port,host:port`."""
    sqs_endpoint_url: OrUnset[HttpUrl] = None
    """SQS endpoint; unset means AWS."""
    sqs_access_key: OrUnset[Annotated[SecretStr, _ACCESS_KEY]] = None
    """An AWS access key for SQS alone, as `ID:SECRET`; unset means the SDK's own chain. The embedded SQS of `penstock
    up` accepts the key that `penstock env` prints."""
    sqs_client: Literal["direct", "sdk"] = "direct"
    """`direct` makes the calls that tasks need (receive, send, delete, extend) without the layers of the AWS SDK, at a
    fifth of its CPU; `sdk` makes all by it, as is always done through an HTTP proxy."""
    aws_region: OrUnset[str] = None
    """AWS region; unset means the SDK's own chain."""
    inbound_queue: Name = "penstock-inbound"
    """Name or URL: producers to submitter."""
    outbound_queue: Name = "penstock-outbound"
    """Name or URL: scheduler to workers."""
    results_queue: Name = "penstock-results"
    """Name or URL: workers to resulter."""
    inbound_methods: Names = ("enqueue", "submit:*", "workflow.create", "task.complete", "task.fail")
    """Comma-separated methods that are accepted from the inbound queue, `*` standing for anything; others are stored as
    rejected messages."""
    results_bare_ids: bool = False
    """Also accept results of sqs-scheduler's workers, a bare task id with `attempt`, which every sender to the results
    queue can forge."""
    receive_wait_seconds: Annotated[int, Field(ge=0, le=20)] = 20
    """Long poll of a receive; a longer one makes fewer empty calls, and a stop does not wait for it."""
    visibility_timeout_seconds: Annotated[int, Field(ge=3, le=43200)] = 60
    """A received message reappears after this long unless deleted or extended."""
    billed_call_wait_seconds: Annotated[Seconds, Field(le=60)] = 1
    """On SQS, deletes and reports of progress, which no caller waits for, wait up to this long to share a call, at most
    a tenth of the visibility timeout; a process that is killed leaves up to nine finished messages to be delivered
    again. 0: at once."""
    hop_wait_seconds: Annotated[Seconds, Field(le=60)] = 0.025
    """On SQS, the time between two sends of a scheduler, or of a worker's results, grows with their rate up to this, so
    that about a dozen tasks share the calls of a hop: milliseconds for money. 0: each is sent at once."""
    amqp_consumer_timeout_seconds: Annotated[float, Field(ge=10)] = 1800
    """The broker's consumer_timeout: a message held for nearly as long is deleted, and from then on the heartbeats of
    its tasks replace it."""
    kafka_partitions: Annotated[Count, Field(le=10_000)] = 12
    """Partitions of topics that are created for queues; at most this many workers take tasks from one."""
    kafka_replication: Annotated[int, Field(ge=-1, le=100)] = -1
    """Copies of topics that are created for queues; -1 leaves it to the brokers."""

    @property
    def transport(self) -> BrokerUrl:
        """What carries the work, taken apart."""
        return parse_broker_url(self.transport_url.get_secret_value() if self.transport_url else "sqs://")

    def is_own_queue(self, name: str) -> bool:
        """Whether a queue or topic is one of the pipeline's: the three, with those of their dead letters, and those of
        routes that are named as the outbound queue with a dash behind it."""
        names = [each.rsplit("/", 1)[-1] for each in (self.inbound_queue, self.outbound_queue, self.results_queue)]
        own = {each + suffix for each in names for suffix in ("", DEAD_LETTER_SUFFIX)}
        return name in own or name.startswith(f"{names[1]}-")

    # Kafka

    kafka_brokers: OrUnset[str] = None
    """Kafka's bootstrap brokers, `host:port,host:port`; unset: no Kafka."""
    kafka_security_protocol: Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"] = "plaintext"
    """Protocol to the brokers; `sasl_ssl` and `ssl` are safe on any network."""
    kafka_sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    """SASL mechanism for the user and the password."""
    kafka_sasl_username: OrUnset[str] = None
    """The user, for `sasl_plaintext` and `sasl_ssl`."""
    kafka_sasl_password: OrUnset[SecretStr] = None
    """The password of that user."""
    kafka_ssl_ca_file: OrUnset[ReadableFile] = None
    """File of the authorities that the brokers' certificates are checked against; unset: the system's."""
    kafka_ssl_certificate_file: OrUnset[ReadableFile] = None
    """Client certificate, if the brokers require one."""
    kafka_ssl_key_file: OrUnset[ReadableFile] = None
    """Its key."""
    kafka_ssl_key_password: OrUnset[SecretStr] = None
    """Password of that file."""
    kafka_compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "none"
    """Compression of published records; their readers must support it."""
    kafka_publish_topics: Names = ()
    """Comma-separated topics (`orders,mail.*`) that `kafka.publish` and schedules may publish to; unset: all but
    Kafka's own and the pipeline's."""
    kafka_delivery_timeout_seconds: Annotated[float, Field(ge=1, le=3600)] = 30
    """A record that the brokers have not accepted by then counts as not published."""
    kafka_session_timeout_seconds: Annotated[float, Field(ge=1, le=1800)] = 45
    """Partitions of a dead process are assigned to others after this."""

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
    api_keys: Annotated[Secrets, checked(lambda given: parse_entries(one.get_secret_value() for one in given))] = ()
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
    dashboard_processes: Listed[Annotated[str, checked(named_url), AfterValidator(lambda url: url.rstrip("/"))]] = ()
    """Comma-separated base URLs of /readyz of processes, such as workers, whose state the dashboard shows;
    `http://host:9464`, or `worker-1=http://host:9464` to name one."""
    dashboard_alb_arn: OrUnset[Annotated[str, _LOAD_BALANCER]] = None
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
    trace_url: OrUnset[Annotated[str, _TRACE_URL]] = None
    """The dashboard's link to a trace, `{trace_id}` standing for its id; unset: no link."""

    # Limits on input

    payload_limit_bytes: Annotated[int, Field(ge=2, le=900_000)] = 262144
    """Maximum payload of a task as JSON, UTF-8 bytes."""
    result_limit_bytes: Annotated[int, Field(ge=2, le=900_000)] = 262144
    """Maximum result of a task as JSON, UTF-8 bytes."""
    request_limit_bytes: Annotated[int, Field(ge=1024)] = 16 * 1024 * 1024
    """Maximum body of one HTTP request."""
    batch_limit: Count = 10000
    """Maximum number of requests in one JSON-RPC batch of a caller."""

    check_payloads: bool = False
    """Refuse tasks, at the api and from the inbound queue, whose payload does not fit the parameters that workers
    announce for their action."""
    snooze_limit: Count = 1000
    """Times that handlers may put one task off without spending an attempt; then it has failed."""
    unknown_action_seconds: PositiveSeconds = DAY
    """How long a task waits for a worker that runs its action, once a worker without it has received it."""
    steps_limit: Count = 1000
    """Maximum number of durable steps of a task, sleeps and events included."""
    steps_limit_bytes: Annotated[int, Field(ge=1024, le=900_000)] = 262144
    """Maximum size of a task's journal: the results of its durable steps as JSON, which travel with its payload in one
    message, UTF-8 bytes."""

    output_limit_bytes: Annotated[int, Field(ge=1024, le=16 * 1024 * 1024)] = 65_536
    """Maximum output of one attempt; what is above is dropped and counted. A task keeps that of its newest attempts, up
    to ten times as much."""

    # Large and encrypted payloads

    payload_bucket: OrUnset[Annotated[str, checked(parse_bucket_url)]] = None
    """Payloads and results over the threshold are stored as objects here, `s3://bucket/prefix`; unset: everything stays
    in Postgres and the queues."""
    payload_s3_endpoint_url: OrUnset[str] = None
    """Endpoint of that bucket; unset means AWS."""
    payload_threshold_bytes: Annotated[int, Field(ge=1024, le=LONGEST_SEALED_BYTES)] = 131_072
    """Larger payloads and results become objects; JSON, UTF-8 bytes."""
    payload_max_bytes: Annotated[int, Field(ge=1024, le=1024**3)] = 64 * 1024 * 1024
    """Maximum size of a payload or result that becomes an object."""
    payload_sweep_seconds: Seconds = 3600
    """Interval at which each object is checked for a task that still references it."""
    payload_orphan_seconds: Annotated[float, Field(ge=DAY)] = 45 * DAY
    """Unreferenced objects are deleted after this; longer than messages, dead letters and rejected messages are
    kept."""
    payload_keys: Listed[Annotated[SecretStr, checked(read_key)]] = ()
    """Comma-separated keys of `penstock payload-key`: payloads, results and errors are encrypted with the first, and
    decrypted with any; none: they are stored unencrypted."""
    payload_bind_tenants: bool = True
    """An encrypted payload of a tenant can be decrypted for tasks of that tenant only; false while workers run that do
    not know the tenant, of an earlier version or in other languages."""

    @property
    def packed_limit(self) -> int:
        """Entries in a body of the outbound or the results queue, which schedulers and workers pack."""
        return max(self.batch_limit, 10_000)  # above what they pack into one message

    @property
    def largest_payload_bytes(self) -> int:
        """The limit of a payload that may become an object, that of any where there is no bucket."""
        return self.payload_limit_bytes if self.payload_bucket is None else self.payload_max_bytes

    @property
    def largest_result_bytes(self) -> int:
        """Of a result, likewise."""
        return self.result_limit_bytes if self.payload_bucket is None else self.payload_max_bytes

    @property
    def largest_result_setting(self) -> str:
        """The name of that limit."""
        return "PENSTOCK_RESULT_LIMIT_BYTES" if self.payload_bucket is None else "PENSTOCK_PAYLOAD_MAX_BYTES"

    @property
    def largest_request_bytes(self) -> int:
        """The limit of a request's body: one payload of the greatest size has room in it."""
        if self.payload_bucket is None:
            return self.request_limit_bytes
        return max(self.request_limit_bytes, self.payload_max_bytes + 65_536)  # for what surrounds a payload

    # Deliveries

    deliveries: Names = ()
    """Comma-separated built-in actions that workers run, such as `http.request`; none by default, because each acts in
    the network on behalf of every caller that may enqueue."""
    http_allow: Listed[Annotated[str, checked(lambda entry: AddressPolicy([entry]))]] = ()
    """Comma-separated networks, addresses and hosts (`10.1.0.0/16,billing.internal,*.svc.local`) that `http.request`
    may reach although they are not public."""
    http_timeout_seconds: Annotated[PositiveSeconds, Field(le=3600)] = 30
    """Time for one HTTP request, including redirects and the answer, unless its task sets one."""
    http_response_limit_bytes: Annotated[int, Field(ge=0, le=900_000)] = 65536
    """Maximum part of an answer's body that is kept as the task's result."""
    http_signing_secrets: Annotated[Secrets, checked(_named_secrets)] = ()
    """Comma-separated `name:secret` with which `http.request` signs, for tasks that give the name; a name with two
    secrets signs with both."""
    http_signing_hosts: Listed[Annotated[str, checked(_named_host)]] = ()
    """Comma-separated `name:host` (`billing:api.example.com,billing:*.example.org`): a secret listed here signs
    requests to these hosts only, an unlisted one to all hosts."""
    http_ca_file: OrUnset[ReadableFile] = None
    """File of authorities, in addition to the system's, that HTTPS servers' certificates are checked against."""
    http_max_connections: Count = 200
    """Maximum number of HTTP connections of one worker, to all hosts together."""

    sqs_send_queues: Names = ()
    """Comma-separated names or URLs of queues that `sqs.send` may send to."""
    amqp_publish_url: OrUnset[Annotated[SecretStr, _RABBITMQ_URL]] = None
    """RabbitMQ that `amqp.publish` publishes to, `amqp://user:password@host:port/vhost`."""
    sql_statements: Table[NamedStatement] = Field({})
    """Statements that `sql.execute` may run, by name, as JSON or a table of penstock.toml: dsn, statement, and
    optionally timeout_seconds, max_rows, with_task_id, with_tenant."""

    @property
    def signing_hosts(self) -> dict[str, tuple[str, ...]]:
        """Patterns of hosts that the secrets of ``http_signing_secrets`` sign for, by name; others sign for any."""
        hosts = _by_name(self.http_signing_hosts)
        return {name: tuple(map(str.lower, of_name)) for name, of_name in hosts.items()}

    @property
    def signing_secrets(self) -> dict[str, tuple[str, ...]]:
        return _by_name(entry.get_secret_value() for entry in self.http_signing_secrets)

    # Schedules of older schedulers

    clockwork_api: bool = False
    """Serve clockwork's `POST` and `DELETE /schedule` on the api's port."""
    clockwork_port: OrUnset[Port] = None
    """Serve them on this port as well; clockwork's was 5000. Unset: no second port."""
    clockwork_networks: Listed[Annotated[str, checked(_network)]] = ()
    """Comma-separated networks (`10.1.0.0/16`) whose clients need no API key for these endpoints; clockwork's own
    clients send none."""
    clockwork_same_key: Literal["keep", "reject"] = "keep"
    """What happens to a schedule whose clientId and scheduleKey exist with other contents: `keep` stores it beside the
    first, as clockwork does, `reject` refuses it."""
    clockwork_create_topic: Name = "schedule-create"
    """Topic that `penstock clockwork-source` reads schedules from."""
    clockwork_group: Name = "clockwork-consumers"
    """Consumer group of `penstock clockwork-source`."""
    kafka_source_json_topics: Names = ()
    """Comma-separated topics of JSON schedules that `penstock kafka-source` reads."""
    kafka_source_avro_topics: Names = ()
    """Comma-separated topics of Avro schedules that it reads."""
    kafka_source_group: Name = "com.sky.kafka.scheduler"
    """Consumer group of `penstock kafka-source`."""
    kafka_source_on_undecodable: Literal["cancel", "keep"] = "cancel"
    """What a record that cannot be read does to the delayed record under its key."""

    # scheduler0's API

    scheduler0: bool = False
    """The api also serves scheduler0's API, under /v1 and /api/v1, to clients with its credentials (`penstock
    credential create`)."""
    scheduler0_auth_username: OrUnset[str] = None
    """User of its peer mode (`x-peer: cmd` with Basic); unset: peer mode is off."""
    scheduler0_auth_password: OrUnset[SecretStr] = None
    """Password of that user."""
    scheduler0_readable_secrets: bool = False
    """Store secrets of new credentials in clear, so that they can be read again, as scheduler0 does."""
    scheduler0_retry_max: Annotated[int, Field(ge=0, le=999)] = 5
    """How often a failed callback is tried again; for new jobs."""
    scheduler0_retry_delay_seconds: OrUnset[Annotated[Seconds, Field(le=86_400)]] = None
    """Delay before each retry; unset: as PENSTOCK_RETRY_BASE_SECONDS and the related settings say."""
    scheduler0_timeout_seconds: Annotated[PositiveSeconds, Field(le=3600)] = 30
    """Time for one callback, including redirects and the answer."""
    scheduler0_payload_limit_bytes: Annotated[int, Field(ge=1024, le=100_000_000)] = 2_000_000
    """Maximum body of one callback; larger sets of jobs are sent in several."""
    scheduler0_any_status: bool = False
    """Accept any HTTP status of a callback as success, as scheduler0 does; otherwise only 2xx."""

    # Chaos

    chaos_postgres: Share = 0
    """Chance that a statement is refused before it runs."""
    chaos_commit: Share = 0
    """Chance that the reply is lost after a commit."""
    chaos_send: Share = 0
    """Chance that a send fails, wholly or in part; half of the failed messages were sent all the same."""
    chaos_receive: Share = 0
    """Chance that a receive fails, or that its reply is lost with the messages in it."""
    chaos_delete: Share = 0
    """Chance that a delete fails, wholly or in part."""
    chaos_extend: Share = 0
    """Chance that an extension or a release fails, wholly or in part."""
    chaos_duplicate: Share = 0
    """Chance that a call's messages are sent twice, or delivered twice."""
    chaos_handler: Share = 0
    """Chance that a handler raises, before or after its work."""
    chaos_delay_seconds: Annotated[Seconds, Field(le=60)] = 0
    """Each statement and each call to SQS waits a random time up to this."""
    chaos_seed: OrUnset[int] = None
    """The same seed gives the same faults in each process; unset: new ones at each start."""

    def _problems(self) -> Iterator[str]:
        yield from self._database_problems()
        scheme = self.transport.scheme
        for name in ("inbound_queue", "outbound_queue", "results_queue"):
            value = getattr(self, name)
            if scheme != "sqs" and "://" in value:
                yield f"{name} {value} is a URL of SQS, and transport_url begins with {scheme}://: name the queue"
        protocol = self.kafka_security_protocol
        if protocol.startswith("sasl") and (self.kafka_sasl_username is None or self.kafka_sasl_password is None):
            yield f"kafka_security_protocol {protocol} needs kafka_sasl_username and kafka_sasl_password"
        if not protocol.startswith("sasl") and self.kafka_sasl_password is not None:
            yield f"kafka_sasl_password is not sent with {protocol}: set kafka_security_protocol to sasl_ssl"
        files = (self.kafka_ssl_ca_file, self.kafka_ssl_certificate_file, self.kafka_ssl_key_file)
        if not protocol.endswith("ssl") and any(files):
            yield f"kafka_ssl_* is not looked at with {protocol}: set kafka_security_protocol to ssl"
        if self.retry_cap_seconds < self.retry_base_seconds:
            yield "retry_cap_seconds must be at least retry_base_seconds"
        if self.stale_after_seconds <= self.heartbeat_seconds:
            yield "stale_after_seconds must be above heartbeat_seconds, or live tasks would be run twice"
        if not is_loopback(self.http_host) and not self.needs_keys:
            first = f"set {PREFIX}API_KEYS first, or {PREFIX}API_REQUIRE_KEYS=true"
            yield f"http_host {self.http_host} is not loopback: {first}"
        if self.dashboard_alb_arn is not None and not self.needs_keys:
            yield f"dashboard_alb_arn needs {PREFIX}API_REQUIRE_KEYS=true: without keys every caller may do everything"
        if self.dashboard_alb_arn is not None and not self.dashboard_alb_groups:
            yield "dashboard_alb_arn needs dashboard_alb_groups, without which it admits no user"
        if self.api_rate_burst is not None and self.api_rate_limit is None:
            yield "api_rate_burst needs api_rate_limit"
        for name in ("payload_limit_bytes", "result_limit_bytes"):
            if self.payload_keys and getattr(self, name) > LONGEST_SEALED_BYTES:
                yield f"{name} may be at most {LONGEST_SEALED_BYTES} with payload_keys, for what is encrypted is longer"
        if self.payload_bucket is not None and self.payload_max_bytes < self.payload_threshold_bytes:
            yield "payload_max_bytes must be at least payload_threshold_bytes"
        for one, other in _PAIRS:
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                yield f"{one} and {other} go together"

    @pydantic.model_validator(mode="after")
    def _fit_together(self) -> Self:
        """Reports all errors at once."""
        problems = [*self._problems()]
        if problems:
            raise ValueError("; ".join(problems))
        return self


def toml_path() -> Path:
    return Path(os.environ.get(PREFIX + "CONFIG") or "penstock.toml")


def _file() -> dict[str, Any]:
    """The values of the TOML file; keys are the settings' names without the prefix. Raises SettingsError."""
    path = toml_path()
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if os.environ.get(PREFIX + "CONFIG"):
            raise SettingsError(f"{PREFIX}CONFIG points to {path}, which does not exist") from None
        return {}
    except OSError as exc:
        raise SettingsError(f"{path} cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise SettingsError(f"{path} is not valid TOML: {exc}") from exc


def _environment() -> dict[str, str]:
    """The values of the variables, whose names may be in any case, without the line end that one from a file has."""
    given = {name.upper(): value.rstrip("\r\n") for name, value in os.environ.items()}
    return {name: given[key] for name in Settings.model_fields if (key := PREFIX + name.upper()) in given}


def load_settings(**overrides: Any) -> Settings:
    """Arguments, then the environment, then penstock.toml, then defaults.

    Raises SettingsError listing all mistakes, with no secret's value in the text.
    """
    try:
        return Settings(**{**_file(), **_environment(), **overrides})
    except pydantic.ValidationError as exc:
        lines = []
        for error in exc.errors(include_input=False, include_url=False, include_context=False):
            name = str(error["loc"][0]) if error["loc"] else ""
            message = error["msg"].removeprefix("Value error, ")
            if error["type"] == "extra_forbidden":
                message = f"is no setting{did_you_mean(name, Settings.model_fields)}"
            within = ".".join(part for part in error["loc"][1:] if isinstance(part, str))
            lines.append(f"{PREFIX}{name.upper()}: {within and within + ': '}{message}" if name else message)
        raise SettingsError("settings are wrong:\n  " + "\n  ".join(dict.fromkeys(lines))) from None


def sources_of(settings: Settings) -> dict[str, str]:
    """Where each value comes from: "environment", the path of the file, or "default"."""
    found = dict.fromkeys(type(settings).model_fields, "default") | dict.fromkeys(_file(), str(toml_path()))
    return found | dict.fromkeys(_environment(), "environment")


def misspelt_variables(environ: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """``PENSTOCK_*`` variables that are no setting but look like one: pairs of (seen, meant)."""
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    known |= {PREFIX + name for name in ("CONFIG", "UP_DATABASE_URL", "UP_TRANSPORT_URL")}  # read by the command line
    unknown = [name for name in environ if name.upper().startswith(PREFIX) and name.upper() not in known]
    near = {name: nearest(name.upper(), known, cutoff=0.85) for name in unknown}
    return [(seen, meant) for seen, meant in near.items() if meant is not None]
