"""confluent-kafka: imported late, configured from the settings, its errors worded."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from penstock.protocol.errors import SettingsError, Unavailable, needing
from penstock.settings.model import Settings

ANSWER_SECONDS = 10.0

# No later attempt succeeds with these. All other errors may pass: brokers down, leaders that move, topics that are
# being made, rights that are being given.
BATCH_REFUSALS = ("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE")  # of a broker: of all records of a batch together
REFUSALS = ("INVALID_MSG", "INVALID_RECORD", "TOPIC_EXCEPTION", *BATCH_REFUSALS)

LOGGER = logging.getLogger("librdkafka")  # of every client; at warning and above it reaches our log

T = TypeVar("T")


def confluent() -> Any:
    """The module confluent_kafka. Raises SettingsError where it is not installed."""
    with needing("Kafka", "kafka"):
        import confluent_kafka.admin
    return confluent_kafka


def client_config(settings: Settings) -> dict[str, Any]:
    """The options of every client, secrets included: never show them. Raises SettingsError."""
    if settings.kafka_brokers is None:
        raise SettingsError("PENSTOCK_KAFKA_BROKERS is not set: set it to host:port of one broker, or of several")
    sasl, key = settings.kafka_sasl_password, settings.kafka_ssl_key_password
    config = {
        "bootstrap.servers": settings.kafka_brokers,
        "client.id": "penstock",
        "security.protocol": settings.kafka_security_protocol,
        "sasl.mechanism": settings.kafka_sasl_mechanism if sasl else None,
        "sasl.username": settings.kafka_sasl_username if sasl else None,
        "sasl.password": sasl and sasl.get_secret_value(),
        "ssl.ca.location": settings.kafka_ssl_ca_file,
        "ssl.certificate.location": settings.kafka_ssl_certificate_file,
        "ssl.key.location": settings.kafka_ssl_key_file,
        "ssl.key.password": key and key.get_secret_value(),
    }
    return {option: value for option, value in config.items() if value is not None}


def producer_config(settings: Settings) -> dict[str, Any]:
    """Idempotent, acknowledged by all replicas in sync, in order; keys go to the partitions that Java gives them."""
    return client_config(settings) | {
        "enable.idempotence": True,
        "acks": "all",
        "compression.type": settings.kafka_compression,
        "delivery.timeout.ms": round(settings.kafka_delivery_timeout_seconds * 1000),
        "partitioner": "murmur2_random",
    }


def consumer_config(settings: Settings, group_id: str) -> dict[str, Any]:
    """From the earliest record where the group has no position, committed by hand, partitions moved one by one."""
    session_ms = round(settings.kafka_session_timeout_seconds * 1000)
    return client_config(settings) | {
        "group.id": group_id,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "earliest",
        "partition.assignment.strategy": "cooperative-sticky",
        "session.timeout.ms": session_ms,
        "heartbeat.interval.ms": min(3000, session_ms // 10),
    }


def open_client(kind: str, config: Mapping[str, Any]) -> Any:
    """A Producer or a Consumer. Raises SettingsError for options that librdkafka refuses."""
    module = confluent()
    try:
        return getattr(module, kind)(dict(config), logger=LOGGER)
    except (module.KafkaException, ValueError, TypeError) as exc:
        raise SettingsError(f"Kafka cannot be used as the settings PENSTOCK_KAFKA_* say: {error_text(exc)}") from exc


async def ask(question: Callable[[], T], failure: str) -> T:
    """Call the library in a thread. failure: begins the error's text. Raises Unavailable."""
    try:
        return await asyncio.to_thread(question)
    except confluent().KafkaException as exc:
        raise Unavailable(f"{failure}: {error_text(exc)}") from exc


def committed_offsets(consumer: Any, topic: str) -> dict[int, int]:
    """The group's offset in each partition, below 0 for none. Blocks."""
    found = consumer.list_topics(topic, timeout=ANSWER_SECONDS).topics[topic]
    if found.error is not None:
        raise confluent().KafkaException(found.error)
    asked = [confluent().TopicPartition(topic, number) for number in found.partitions]
    return {at.partition: at.offset for at in consumer.committed(asked, timeout=ANSWER_SECONDS)}


def unread_ranges(consumer: Any, topic: str) -> dict[int, tuple[int, int]]:
    """Of each partition, the first offset that the group has not committed, and the end. Blocks."""
    ranges = {}
    for number, offset in committed_offsets(consumer, topic).items():
        low, high = consumer.get_watermark_offsets(confluent().TopicPartition(topic, number), timeout=ANSWER_SECONDS)
        ranges[number] = max(low, offset), high
    return ranges


def error_text(error: Any) -> str:
    """An error of the library in words, with its name in the library's documentation."""
    if isinstance(error, BaseException):
        error = error.args[0] if error.args else error
    name, text = getattr(error, "name", None), getattr(error, "str", None)
    return f"{text()} ({name()})" if callable(name) and callable(text) else str(error)
