"""Settings of features: payloads, built-in actions, the APIs and records of older schedulers."""

from __future__ import annotations

import ipaddress
import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from penstock.protocol.webhook_signatures import signing_key
from penstock.settings.address_policy import AddressPolicy
from penstock.settings.broker_urls import parse_broker_url
from penstock.settings.values import (
    DAY,
    Group,
    Names,
    Secrets,
    check_database_url,
    empty_is_unset,
    parse_bucket_url,
    read_key,
    readable_file,
)

LONGEST_SEALED_BYTES = 700_000  # of a text: encrypted and in base64 it still fits a message
_REQUEST_ROOM_BYTES = 65_536  # for what surrounds a payload
_PACKED_LIMIT = 10_000  # above what schedulers and workers pack into one message


class PayloadSettings(Group):
    """The sections Limits on input and Large and encrypted payloads of docs/configuration.md."""

    payload_limit_bytes: int = Field(
        262144, ge=2, le=900_000, description="Maximum payload of a task as JSON, UTF-8 bytes."
    )
    result_limit_bytes: int = Field(
        262144, ge=2, le=900_000, description="Maximum result of a task as JSON, UTF-8 bytes."
    )
    request_limit_bytes: int = Field(16 * 1024 * 1024, ge=1024, description="Maximum body of one HTTP request.")
    batch_limit: int = Field(10000, ge=1, description="Maximum number of requests in one JSON-RPC batch of a caller.")

    payload_bucket: str | None = Field(
        None,
        description="Payloads and results over the threshold are stored as objects here, `s3://bucket/prefix`; "
        "unset: everything stays in Postgres and the queues.",
    )
    payload_s3_endpoint_url: str | None = Field(None, description="Endpoint of that bucket; unset means AWS.")
    payload_threshold_bytes: int = Field(
        131_072,
        ge=1024,
        le=LONGEST_SEALED_BYTES,
        description="Larger payloads and results become objects; JSON, UTF-8 bytes.",
    )
    payload_max_bytes: int = Field(
        64 * 1024 * 1024, ge=1024, le=1024**3, description="Maximum size of a payload or result that becomes an object."
    )
    payload_sweep_seconds: float = Field(
        3600, ge=0, description="Interval at which each object is checked for a task that still references it."
    )
    payload_orphan_seconds: float = Field(
        45 * DAY,
        ge=DAY,
        description="Unreferenced objects are deleted after this; longer than messages, dead letters and "
        "rejected messages are kept.",
    )
    payload_keys: Secrets = Field(
        (),
        description="Comma-separated keys of `penstock payload-key`: payloads, results and errors are encrypted "
        "with the first, and decrypted with any; none: they are stored unencrypted.",
    )
    payload_bind_tenants: bool = Field(
        True,
        description="An encrypted payload of a tenant can be decrypted for tasks of that tenant only; false "
        "while workers run that do not know the tenant, of an earlier version or in other languages.",
    )

    _unset_payloads = field_validator("payload_bucket", "payload_s3_endpoint_url", mode="before")(empty_is_unset)

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
    def largest_request_bytes(self) -> int:
        """The limit of a request's body: one payload of the greatest size has room in it."""
        if self.payload_bucket is None:
            return self.request_limit_bytes
        return max(self.request_limit_bytes, self.payload_max_bytes + _REQUEST_ROOM_BYTES)

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


class NamedStatement(BaseModel):
    """One statement and where it runs."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    dsn: SecretStr = Field(description="Postgres, `postgresql://user:password@host:port/name`.")
    statement: str = Field(min_length=1, description="One SQL statement, its parameters written as $1, $2 and so on.")
    timeout_seconds: float = Field(30, gt=0, le=3600, description="The server stops it after this.")
    max_rows: int = Field(100, ge=0, le=100_000, description="Of its rows, so many are kept as the result.")
    with_tenant: bool = Field(
        False,
        description="The tenant that the scheduler says the task is for, or null, is $1, or $2 behind the task's id; "
        "the payload's parameters follow.",
    )
    with_task_id: bool = Field(
        False, description="$1 is the task's id, the same over its attempts; the payload's parameters follow."
    )


_SECRET_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


class DeliverySettings(Group):
    """The section Deliveries of docs/configuration.md."""

    deliveries: Names = Field(
        (),
        description="Comma-separated built-in actions that workers run, such as `http.request`; none by default, "
        "because each acts in the network on behalf of every caller that may enqueue.",
    )
    http_allow: Names = Field(
        (),
        description="Comma-separated networks, addresses and hosts (`10.1.0.0/16,billing.internal,*.svc.local`) "
        "that `http.request` may reach although they are not public.",
    )
    http_timeout_seconds: float = Field(
        30,
        gt=0,
        le=3600,
        description="Time for one HTTP request, including redirects and the answer, unless its task sets one.",
    )
    http_response_limit_bytes: int = Field(
        65536, ge=0, le=900_000, description="Maximum part of an answer's body that is kept as the task's result."
    )
    http_signing_secrets: Secrets = Field(
        (),
        description="Comma-separated `name:secret` with which `http.request` signs, for tasks that give the "
        "name; a name with two secrets signs with both.",
    )
    http_signing_hosts: Names = Field(
        (),
        description="Comma-separated `name:host` (`billing:api.example.com,billing:*.example.org`): a secret "
        "listed here signs requests to these hosts only, an unlisted one to all hosts.",
    )
    http_ca_file: str | None = Field(
        None,
        description="File of authorities, in addition to the system's, that HTTPS servers' certificates are "
        "checked against.",
    )
    http_max_connections: int = Field(
        200, ge=1, description="Maximum number of HTTP connections of one worker, to all hosts together."
    )

    sqs_send_queues: Names = Field(
        (), description="Comma-separated names or URLs of queues that `sqs.send` may send to."
    )
    amqp_publish_url: SecretStr | None = Field(
        None, description="RabbitMQ that `amqp.publish` publishes to, `amqp://user:password@host:port/vhost`."
    )
    sql_statements: dict[str, NamedStatement] = Field(
        {},
        description="Statements that `sql.execute` may run, by name, as JSON or a table of penstock.toml: dsn, "
        "statement, and optionally timeout_seconds, max_rows, with_task_id, with_tenant.",
    )

    _unset_deliveries = field_validator("http_ca_file", "amqp_publish_url", mode="before")(empty_is_unset)
    _readable_delivery_files = field_validator("http_ca_file")(readable_file)

    @field_validator("amqp_publish_url")
    @classmethod
    def _rabbitmq(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and parse_broker_url(value.get_secret_value()).kind != "amqp":
            raise ValueError("must begin with amqp:// or amqps://")
        return value

    @field_validator("http_allow")
    @classmethod
    def _networks_and_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        AddressPolicy(value)
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

    @field_validator("http_signing_hosts")
    @classmethod
    def _named_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            name, _, host = entry.partition(":")
            if not _SECRET_NAME.fullmatch(name) or not host or "/" in host:
                raise ValueError(f"{entry!r} is not name:host, such as billing:api.example.com")
        return value

    @property
    def signing_hosts(self) -> dict[str, tuple[str, ...]]:
        """Patterns of hosts that the secrets of ``http_signing_secrets`` sign for, by name; others sign for any."""
        found: dict[str, tuple[str, ...]] = {}
        for entry in self.http_signing_hosts:
            name, _, host = entry.partition(":")
            found[name] = (*found.get(name, ()), host.lower())
        return found

    @property
    def signing_secrets(self) -> dict[str, tuple[str, ...]]:
        """The secrets of ``http_signing_secrets`` in clear, by name."""
        found: dict[str, tuple[str, ...]] = {}
        for entry in self.http_signing_secrets:
            name, _, secret = entry.get_secret_value().partition(":")
            found[name] = (*found.get(name, ()), secret)
        return found


class OlderSchedulerSettings(Group):
    """The section Schedules of older schedulers of docs/configuration.md: clockwork and kafka-message-scheduler."""

    clockwork_api: bool = Field(False, description="Serve clockwork's `POST` and `DELETE /schedule` on the api's port.")
    clockwork_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Serve them on this port as well; clockwork's was 5000. Unset: no second port.",
    )
    clockwork_networks: Names = Field(
        (),
        description="Comma-separated networks (`10.1.0.0/16`) whose clients need no API key for these endpoints; "
        "clockwork's own clients send none.",
    )
    clockwork_same_key: Literal["keep", "reject"] = Field(
        "keep",
        description="What happens to a schedule whose clientId and scheduleKey exist with other contents: `keep` "
        "stores it beside the first, as clockwork does, `reject` refuses it.",
    )
    clockwork_create_topic: str = Field(
        "schedule-create", min_length=1, description="Topic that `penstock clockwork-source` reads schedules from."
    )
    clockwork_group: str = Field(
        "clockwork-consumers", min_length=1, description="Consumer group of `penstock clockwork-source`."
    )
    kafka_source_json_topics: Names = Field(
        (), description="Comma-separated topics of JSON schedules that `penstock kafka-source` reads."
    )
    kafka_source_avro_topics: Names = Field((), description="Comma-separated topics of Avro schedules that it reads.")
    kafka_source_group: str = Field(
        "com.sky.kafka.scheduler", min_length=1, description="Consumer group of `penstock kafka-source`."
    )
    kafka_source_on_undecodable: Literal["cancel", "keep"] = Field(
        "cancel", description="What a record that cannot be read does to the delayed record under its key."
    )

    @field_validator("clockwork_networks")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            try:
                ipaddress.ip_network(entry)
            except ValueError as exc:
                raise ValueError(f"{entry!r} is not a network such as 10.1.0.0/16: {exc}") from None
        return value

    _unset_older_schedulers = field_validator("clockwork_port", mode="before")(empty_is_unset)


class Scheduler0Settings(Group):
    """The section scheduler0's API of docs/configuration.md."""

    scheduler0: bool = Field(
        False,
        description="The api also serves scheduler0's API, under /v1 and /api/v1, to clients with its "
        "credentials (`penstock credential create`).",
    )
    scheduler0_auth_username: str | None = Field(
        None, description="User of its peer mode (`x-peer: cmd` with Basic); unset: peer mode is off."
    )
    scheduler0_auth_password: SecretStr | None = Field(None, description="Password of that user.")
    scheduler0_readable_secrets: bool = Field(
        False,
        description="Store secrets of new credentials in clear, so that they can be read again, as scheduler0 does.",
    )
    scheduler0_retry_max: int = Field(
        5, ge=0, le=999, description="How often a failed callback is tried again; for new jobs."
    )
    scheduler0_retry_delay_seconds: float | None = Field(
        None,
        ge=0,
        le=86_400,
        description="Delay before each retry; unset: as PENSTOCK_RETRY_BASE_SECONDS and the related settings say.",
    )
    scheduler0_timeout_seconds: float = Field(
        30, gt=0, le=3600, description="Time for one callback, including redirects and the answer."
    )
    scheduler0_payload_limit_bytes: int = Field(
        2_000_000,
        ge=1024,
        le=100_000_000,
        description="Maximum body of one callback; larger sets of jobs are sent in several.",
    )
    scheduler0_any_status: bool = Field(
        False, description="Accept any HTTP status of a callback as success, as scheduler0 does; otherwise only 2xx."
    )

    _unset_scheduler0 = field_validator(
        "scheduler0_auth_username", "scheduler0_auth_password", "scheduler0_retry_delay_seconds", mode="before"
    )(empty_is_unset)

    def _scheduler0_problems(self) -> list[str]:
        if (self.scheduler0_auth_username is None) != (self.scheduler0_auth_password is None):
            return ["scheduler0_auth_username and scheduler0_auth_password go together: set both, or neither"]
        return []
