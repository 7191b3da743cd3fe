"""The brokers that the same tests run against."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from tests.kafka import MockKafka

KINDS = ("sqs", "amqp", "kafka")
_LABELS = ("inbound", "outbound", "results")


def broker_settings(kind: str, request: pytest.FixtureRequest, prefix: str) -> dict[str, Any]:
    """Settings that name the broker of this kind, and queues whose names begin with the prefix."""
    names = {f"{label}_queue": f"{prefix}-{label}" for label in _LABELS}
    if kind == "sqs":
        return names | {"sqs_endpoint_url": request.getfixturevalue("sqs_url"), "aws_region": "us-east-1"}
    if kind == "amqp":
        return names | {"transport_url": request.getfixturevalue("rabbitmq").url}
    kafka: MockKafka = request.getfixturevalue("kafka")
    for name in names.values():
        for topic in (name, name + DEAD_LETTER_SUFFIX):
            kafka.make(topic)
    return names | {"transport_url": f"kafka://{kafka.brokers}", "kafka_session_timeout_seconds": 6}
