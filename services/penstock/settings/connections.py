"""Settings of what Penstock connects to: the sections Postgres, Queues and Kafka of docs/configuration.md."""

import re
import shlex
import ssl
from collections.abc import Iterator
from typing import Annotated, Literal
from urllib.parse import urlencode, urlsplit

from pydantic import Field, SecretStr

from penstock.protocol.errors import SettingsError
from penstock.protocol.schema import is_ambiguous
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX, BrokerUrl, parse_broker_url
from penstock.settings.values import (
    PREFIX,
    Count,
    DatabaseUrl,
    Group,
    HttpUrl,
    Name,
    Names,
    OrUnset,
    PositiveSeconds,
    ReadableFile,
    Seconds,
    checked,
    query_of,
)

_SCHEMAS_OF_POSTGRES = ("public", "information_schema")
_VERIFYING = ("verify-ca", "verify-full")
_SSL_PARAMETERS = (
    ("sslmode", "database_ssl_mode"),
    ("sslrootcert", "database_ssl_root_cert"),
    ("sslcert", "database_ssl_cert"),
    ("sslkey", "database_ssl_key"),
)
_PASSWORDS = ("database_password_file", "database_password_command", "database_iam")


def _command(text: str) -> None:
    if not shlex.split(text):
        raise ValueError("must name a program")


def _schema_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,30}", name) or name.startswith("pg_") or name in _SCHEMAS_OF_POSTGRES:
        raise ValueError("must be up to 31 lower-case letters, digits and _, and no schema of Postgres's own")
    if is_ambiguous(name):
        raise ValueError("must not be a function or a channel of Penstock, such as penstock_work")


def _id_and_secret(key: str) -> None:
    if not all(key.partition(":")):
        raise ValueError("must be ID:SECRET of an AWS access key")


class ConnectionSettings(Group):
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
    database_password_command: OrUnset[Annotated[str, checked(_command)]] = None
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
        if self.database_url is None:
            raise SettingsError(
                f"{PREFIX}DATABASE_URL is not set: set it to postgresql://user:password@host:5432/name, "
                "or run `penstock up`, which brings a Postgres of its own"
            )
        return self._with_parameters(self.database_url.get_secret_value())

    @property
    def listen_url(self) -> str | None:
        """The URL to listen at, in clear; None for that of the database."""
        if self.database_listen_url is None:
            return None
        return self._with_parameters(self.database_listen_url.get_secret_value())

    @property
    def read_url(self) -> str | None:
        """The URL of the replica, in clear; of several hosts one that is a replica."""
        if self.database_read_url is None:
            return None
        url = self.database_read_url.get_secret_value()
        return self._with_parameters(url, target_session_attrs="prefer-standby" if "," in urlsplit(url).netloc else "")

    def _with_parameters(self, url: str, **others: str) -> str:
        given = query_of(url)
        wanted = self._ssl_parameters() | {name: value for name, value in others.items() if value}
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
        yield from self._password_problems(mode)
        if self.database_ssl_root_cert is not None and mode in ("disable", "allow", "prefer"):
            yield f"database_ssl_root_cert is not looked at with the mode {mode}: set database_ssl_mode to verify-full"

    def _password_problems(self, ssl_mode: str) -> Iterator[str]:
        given = [name for name in _PASSWORDS if getattr(self, name)]
        urls = [
            url.get_secret_value()
            for url in (self.database_url, self.database_listen_url, self.database_read_url)
            if url is not None
        ]
        if given and any(urlsplit(url).password or "password" in query_of(url) for url in urls):
            given.append("the password of a URL")
        if len(given) > 1:
            yield f"{' and '.join(given)} give a password each: keep one of them"
        if self.database_iam and ssl_mode in ("disable", "allow", "prefer"):
            yield f"database_iam needs TLS, and the mode is {ssl_mode}: set database_ssl_mode to verify-full"

    # Queues

    transport_url: OrUnset[Annotated[SecretStr, checked(parse_broker_url)]] = None
    """Transport between the processes: `sqs://`, also the meaning of unset, `amqp://user:password@host:port/vhost` (or
    `amqps://`) for RabbitMQ, or `kafka://host:port,host:port`."""
    sqs_endpoint_url: OrUnset[HttpUrl] = None
    """SQS endpoint; unset means AWS."""
    sqs_access_key: OrUnset[Annotated[SecretStr, checked(_id_and_secret)]] = None
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

    @property
    def require_kafka_brokers(self) -> str:
        """The brokers. Raises SettingsError when there are none."""
        if self.kafka_brokers is None:
            raise SettingsError(f"{PREFIX}KAFKA_BROKERS is not set: set it to host:port of one broker, or of several")
        return self.kafka_brokers

    def _connection_problems(self) -> Iterator[str]:
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
