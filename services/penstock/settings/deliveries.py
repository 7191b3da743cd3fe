"""Settings of built-in actions that workers run, see docs/deliveries.md."""

from __future__ import annotations

import re

from pydantic import Field, SecretStr, field_validator

from penstock.protocol.webhook_signatures import signing_key
from penstock.settings.address_policy import Guard
from penstock.settings.broker_urls import parse_broker_url
from penstock.settings.database_urls import check_database_url
from penstock.settings.named_statements import NamedStatement
from penstock.settings.values import Group, Names, Secrets, empty_is_unset, readable_file

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
