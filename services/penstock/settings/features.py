"""Settings of features: the sections Limits on input to Chaos of docs/configuration.md."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from penstock.protocol.webhook_signatures import signing_key
from penstock.settings.address_policy import AddressPolicy
from penstock.settings.broker_urls import parse_broker_url
from penstock.settings.payload_texts import parse_bucket_url, read_key
from penstock.settings.values import (
    DAY,
    Count,
    DatabaseUrl,
    Group,
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
)

LONGEST_SEALED_BYTES = 700_000  # of a text: encrypted and in base64 it still fits a message
_REQUEST_ROOM_BYTES = 65_536  # for what surrounds a payload
_PACKED_LIMIT = 10_000  # above what schedulers and workers pack into one message


class NamedStatement(BaseModel):
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


_SECRET_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


def _rabbitmq_url(url: str) -> None:
    if parse_broker_url(url).kind != "amqp":
        raise ValueError("must begin with amqp:// or amqps://")


def _host_or_network(entry: str) -> None:
    AddressPolicy([entry])


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


class FeatureSettings(Group):
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
        return max(self.batch_limit, _PACKED_LIMIT)

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
        return max(self.request_limit_bytes, self.payload_max_bytes + _REQUEST_ROOM_BYTES)

    # Deliveries

    deliveries: Names = ()
    """Comma-separated built-in actions that workers run, such as `http.request`; none by default, because each acts in
    the network on behalf of every caller that may enqueue."""
    http_allow: Listed[Annotated[str, checked(_host_or_network)]] = ()
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
    amqp_publish_url: OrUnset[Annotated[SecretStr, checked(_rabbitmq_url)]] = None
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

    def _feature_problems(self) -> Iterator[str]:
        for name in ("payload_limit_bytes", "result_limit_bytes"):
            if self.payload_keys and getattr(self, name) > LONGEST_SEALED_BYTES:
                yield f"{name} may be at most {LONGEST_SEALED_BYTES} with payload_keys, for what is encrypted is longer"
        if self.payload_bucket is not None and self.payload_max_bytes < self.payload_threshold_bytes:
            yield "payload_max_bytes must be at least payload_threshold_bytes"
