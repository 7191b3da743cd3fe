"""`penstock kafka-source` and `penstock clockwork-source`, which also read the variables of the tools they replace."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import typer

from penstock.cli.processes import LogLevelOption, run
from penstock.protocol.errors import SettingsError

_LEVELS = {"warn": "warning", "trace": "debug", "off": "error", "fatal": "error"}
_STORES = ("KEYSTORE_LOCATION", "TRUSTSTORE_LOCATION")


# The variable of kafka-message-scheduler or clockwork -> our setting, and how to convert its value.
Older = Mapping[str, tuple[str, Callable[[str], Any]]]
KAFKA_MESSAGE_SCHEDULER: Older = {
    "KAFKA_BROKERS": ("kafka_brokers", str),
    "SCHEDULE_TOPICS": ("kafka_source_avro_topics", str),
    "JSON_SCHEDULE_TOPICS": ("kafka_source_json_topics", str),
    "CONSUMER_GROUP_ID": ("kafka_source_group", str),
    "SECURITY_PROTOCOL": ("kafka_security_protocol", str.lower),
    "OTEL_EXPORTER_PROMETHEUS_PORT": ("metrics_port", str),
    "KMS_LOGGING_LEVEL": ("log_level", lambda text: _LEVELS.get(text.lower(), text.lower())),
}
CLOCKWORK: Older = {
    "KAFKA_BROKERS": ("kafka_brokers", str),
    "KAFKA_CONSUMER_GROUP": ("clockwork_group", "{}-consumers".format),
    "SCHEDULE_CREATE_KAFKA_TOPIC": ("clockwork_create_topic", str),
}


def older_settings(names: Older, environ: Mapping[str, str]) -> dict[str, Any]:
    """Settings from the older variables, unless our own set them. Raises SettingsError for Java key stores."""
    from penstock.settings.values import PREFIX  # here, since pydantic doubles the time of --help

    if environ.get("SECURITY_PROTOCOL", "").lower().endswith("ssl") and PREFIX + "KAFKA_SSL_CA_FILE" not in environ:
        for name in _STORES:
            if environ.get(name):
                raise SettingsError(
                    f"{name} names a Java key store, which librdkafka cannot read: export it as PEM (`keytool "
                    f"-exportcert -rfc`, `openssl pkcs12`) and set {PREFIX}KAFKA_SSL_CA_FILE, and for a client "
                    f"certificate {PREFIX}KAFKA_SSL_CERTIFICATE_FILE and {PREFIX}KAFKA_SSL_KEY_FILE"
                )
    return {
        setting: convert(environ[name])
        for name, (setting, convert) in names.items()
        if environ.get(name) and PREFIX + setting.upper() not in environ
    }


def add_to(app: typer.Typer) -> None:
    app.command("kafka-source", rich_help_panel="Processes")(kafka_source)
    app.command("clockwork-source", rich_help_panel="Processes")(clockwork_source)


def kafka_source(log_level: LogLevelOption = None) -> None:
    """Read the schedule topics of kafka-message-scheduler and keep the records until they are due.

    Reads its environment variables too: docs/moving-from-kafka-message-scheduler.md.
    """
    run("kafka-source", log_level, **older_settings(KAFKA_MESSAGE_SCHEDULER, os.environ))


def clockwork_source(log_level: LogLevelOption = None) -> None:
    """Read schedules from clockwork's create topic and keep them until they are due.

    Reads its environment variables too: docs/moving-from-clockwork.md.
    """
    run("clockwork-source", log_level, **older_settings(CLOCKWORK, os.environ))
