"""Settings of what Penstock connects to: Postgres, the queues, Kafka."""

from __future__ import annotations

import ssl
from typing import Literal
from urllib.parse import urlencode

from pydantic import Field, SecretStr, field_validator

from penstock.protocol.errors import SettingsError
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX, BrokerUrl, parse_broker_url
from penstock.settings.values import (
    PREFIX,
    Group,
    Names,
    check_database_url,
    empty_is_unset,
    http_url,
    query_of,
    readable_file,
)

_VERIFYING = ("verify-ca", "verify-full")


class DatabaseSettings(Group):
    """The section Postgres of docs/configuration.md."""

    database_url: SecretStr | None = Field(
        None,
        description="Postgres that stores the tasks, `postgresql://user:password@host:port/name`, directly or "
        "through a pooler in session mode; workers need none.",
    )
    database_pool_size: int = Field(8, ge=2, le=200, description="Maximum number of connections of one process.")
    statement_timeout_seconds: float = Field(
        30, gt=0, description="Postgres cancels a statement that runs longer, and it is tried again."
    )

    database_ssl_mode: Literal["disable", "allow", "prefer", "require", "verify-ca", "verify-full"] | None = Field(
        None,
        description="TLS to Postgres, as libpq's sslmode; `verify-full` is safe on any network, unset uses TLS "
        "if the server offers it and checks no certificate.",
    )
    database_ssl_root_cert: str | None = Field(
        None,
        description="File of the authorities that the server's certificate is checked against; unset: the system's.",
    )

    _unset_database = field_validator("database_url", "database_ssl_mode", "database_ssl_root_cert", mode="before")(
        empty_is_unset
    )
    _readable_database_files = field_validator("database_ssl_root_cert")(readable_file)

    @field_validator("database_url")
    @classmethod
    def _postgres_scheme(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            check_database_url(value.get_secret_value())
        return value

    @property
    def require_database_url(self) -> str:
        """The database URL in clear. Raises SettingsError when there is none."""
        if self.database_url is None:
            raise SettingsError(
                f"{PREFIX}DATABASE_URL is not set: set it to postgresql://user:password@host:5432/name, "
                "or run `penstock up`, which brings a Postgres of its own"
            )
        url = self.database_url.get_secret_value()
        given = query_of(url)
        more = {name: value for name, value in self._ssl_parameters().items() if name not in given}
        if not more:
            return url
        bare, _, fragment = url.partition("#")
        return f"{bare}{'&' if '?' in bare else '?'}{urlencode(more)}" + (f"#{fragment}" if fragment else "")

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

    def _database_problems(self) -> list[str]:
        if self.database_url is None:
            return []
        given = query_of(self.database_url.get_secret_value())
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


class QueueSettings(Group):
    """The section Queues of docs/configuration.md."""

    transport_url: SecretStr | None = Field(
        None,
        description="Transport between the processes: `sqs://`, also the meaning of unset, "
        "`amqp://user:password@host:port/vhost` (or `amqps://`) for RabbitMQ, or `kafka://host:port,host:port`.",
    )
    sqs_endpoint_url: str | None = Field(None, description="SQS endpoint; unset means AWS.")
    sqs_access_key: SecretStr | None = Field(
        None,
        description="An AWS access key for SQS alone, as `ID:SECRET`; unset means the SDK's own chain. The "
        "embedded SQS of `penstock up` accepts the key that `penstock env` prints.",
    )
    aws_region: str | None = Field(None, description="AWS region; unset means the SDK's own chain.")
    inbound_queue: str = Field("penstock-inbound", min_length=1, description="Name or URL: producers to submitter.")
    outbound_queue: str = Field("penstock-outbound", min_length=1, description="Name or URL: scheduler to workers.")
    results_queue: str = Field("penstock-results", min_length=1, description="Name or URL: workers to resulter.")
    inbound_methods: Names = Field(
        ("enqueue", "submit:*", "workflow.create", "task.complete", "task.fail"),
        description="Comma-separated methods that are accepted from the inbound queue, `*` standing for "
        "anything; others are stored as rejected messages.",
    )
    results_bare_ids: bool = Field(
        False,
        description="Also accept results of sqs-scheduler's workers, a bare task id with `attempt`, which every "
        "sender to the results queue can forge.",
    )
    receive_wait_seconds: int = Field(
        20,
        ge=0,
        le=20,
        description="Long poll of a receive; a shorter one stops sooner, a longer one makes fewer empty calls.",
    )
    visibility_timeout_seconds: int = Field(
        60, ge=3, le=43200, description="A received message reappears after this long unless deleted or extended."
    )
    amqp_consumer_timeout_seconds: float = Field(
        1800,
        ge=10,
        description="The broker's consumer_timeout: a message held for nearly as long is deleted, and from then "
        "on the heartbeats of its tasks replace it.",
    )
    kafka_partitions: int = Field(
        12,
        ge=1,
        le=10_000,
        description="Partitions of topics that are created for queues; at most this many workers take tasks from one.",
    )
    kafka_replication: int = Field(
        -1, ge=-1, le=100, description="Copies of topics that are created for queues; -1 leaves it to the brokers."
    )

    _unset_queues = field_validator(
        "transport_url", "sqs_endpoint_url", "sqs_access_key", "aws_region", mode="before"
    )(empty_is_unset)  # fmt: skip
    _http_of_queues = field_validator("sqs_endpoint_url")(http_url)

    @field_validator("transport_url")
    @classmethod
    def _known_broker(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            parse_broker_url(value.get_secret_value())
        return value

    @field_validator("sqs_access_key")
    @classmethod
    def _id_and_secret(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not all(value.get_secret_value().partition(":")):
            raise ValueError("must be ID:SECRET of an AWS access key")
        return value

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

    def _queue_problems(self) -> list[str]:
        kind = self.transport.kind
        names = {name: getattr(self, name) for name in ("inbound_queue", "outbound_queue", "results_queue")}
        return [
            f"{name} {value} is a URL of SQS, and transport_url begins with {self.transport.scheme}://: name the queue"
            for name, value in names.items()
            if kind != "sqs" and "://" in value
        ]


class KafkaSettings(Group):
    """The section Kafka of docs/configuration.md."""

    kafka_brokers: str | None = Field(
        None, description="Kafka's bootstrap brokers, `host:port,host:port`; unset: no Kafka."
    )
    kafka_security_protocol: Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"] = Field(
        "plaintext", description="Protocol to the brokers; `sasl_ssl` and `ssl` are safe on any network."
    )
    kafka_sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        "SCRAM-SHA-512", description="SASL mechanism for the user and the password."
    )
    kafka_sasl_username: str | None = Field(None, description="The user, for `sasl_plaintext` and `sasl_ssl`.")
    kafka_sasl_password: SecretStr | None = Field(None, description="The password of that user.")
    kafka_ssl_ca_file: str | None = Field(
        None,
        description="File of the authorities that the brokers' certificates are checked against; unset: the system's.",
    )
    kafka_ssl_certificate_file: str | None = Field(None, description="Client certificate, if the brokers require one.")
    kafka_ssl_key_file: str | None = Field(None, description="Its key.")
    kafka_ssl_key_password: SecretStr | None = Field(None, description="Password of that file.")
    kafka_compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = Field(
        "none", description="Compression of published records; their readers must support it."
    )
    kafka_publish_topics: Names = Field(
        (),
        description="Comma-separated topics (`orders,mail.*`) that `kafka.publish` and schedules may publish to; "
        "unset: all but Kafka's own and the pipeline's.",
    )
    kafka_delivery_timeout_seconds: float = Field(
        30, ge=1, le=3600, description="A record that the brokers have not accepted by then counts as not published."
    )
    kafka_session_timeout_seconds: float = Field(
        45, ge=1, le=1800, description="Partitions of a dead process are assigned to others after this."
    )

    _unset_kafka = field_validator(
        "kafka_brokers", "kafka_sasl_username", "kafka_sasl_password", "kafka_ssl_ca_file",
        "kafka_ssl_certificate_file", "kafka_ssl_key_file", "kafka_ssl_key_password", mode="before",
    )(empty_is_unset)  # fmt: skip
    _readable_kafka_files = field_validator("kafka_ssl_ca_file", "kafka_ssl_certificate_file", "kafka_ssl_key_file")(
        readable_file
    )

    @property
    def require_kafka_brokers(self) -> str:
        """The brokers. Raises SettingsError when there are none."""
        if self.kafka_brokers is None:
            raise SettingsError(f"{PREFIX}KAFKA_BROKERS is not set: set it to host:port of one broker, or of several")
        return self.kafka_brokers

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
