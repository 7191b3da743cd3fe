"""Settings of the connection to Kafka, for whatever reads from it or publishes to it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr, field_validator

from penstock.protocol.errors import SettingsError
from penstock.settings.values import PREFIX, Group, Names, empty_is_unset, readable_file


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
