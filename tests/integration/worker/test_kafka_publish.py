"""kafka.publish as a worker runs it, against librdkafka's mock cluster."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.brokers.kafka.messages import topic_problem
from penstock.protocol.errors import InvalidParams, SettingsError
from penstock.settings.model import load_settings
from penstock.worker.deliveries.errors import NotDelivered, Undeliverable
from penstock.worker.deliveries.registry import Deliveries
from penstock.worker.handlers.actions import Registry
from penstock.worker.handlers.context import Context
from penstock.worker.responses import encoded_result
from tests.kafka import MockKafka

_PRODUCE, _MSG_SIZE_TOO_LARGE = 0, 10  # a request and an error of the protocol


@pytest.fixture
async def publish(kafka: MockKafka) -> AsyncIterator[Any]:
    """Runs the handler with parameters as a task's payload has them."""
    registry = Registry()
    deliveries = Deliveries(load_settings(kafka_brokers=kafka.brokers, deliveries="kafka.publish"), registry)
    action = registry["kafka.publish"]
    assert action.bad_params_attempts == 1

    async def run(**params: Any) -> Any:
        args, kwargs = action.fit(json.dumps(params).encode())
        return await action.function(Context(1, 1, "kafka.publish"), *args, **kwargs)

    yield run
    await deliveries.close()


@pytest.mark.parametrize(
    ("given", "key", "value", "headers"),
    [
        ({"value": "text é"}, None, "text é".encode(), None),
        ({"key": "k", "value": ""}, b"k", b"", None),
        ({"key_base64": "/wA=", "value_base64": "AP8="}, b"\xff\x00", b"\x00\xff", None),
        ({"key": "k", "value": None}, b"k", None, None),
        ({"json": {"a": [1, None]}}, None, b'{"a":[1,null]}', None),
        ({"json": None}, None, b"null", None),
        (
            {"value": "v", "headers": {"a": "é"}, "headers_base64": {"b": "/w=="}},
            None, b"v", [("a", "é".encode()), ("b", b"\xff")],
        ),
    ],
    ids=["text", "empty", "bytes", "tombstone", "json", "json-null", "headers"],
)  # fmt: skip
async def test_a_record_is_published_as_it_was_given_and_its_place_is_the_result(
    kafka: MockKafka, publish: Any, given: dict[str, Any], key: Any, value: Any, headers: Any
) -> None:
    topic = kafka.topic()
    answer = await publish(topic=topic, partition=2, **given)
    assert answer == {"topic": topic, "partition": 2, "offset": 0}
    (record,) = kafka.read(topic, count=1)
    assert (record.key(), record.value(), record.headers()) == (key, value, headers)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "either a topic, or records"),
        ({"topic": "t", "records": []}, "either a topic, or records"),
        ({"records": [{"topic": "t", "value": "a"}], "key": "k"}, "beside records"),
        ({"records": [], "json": None}, "beside records"),
        ({"topic": "t"}, "this one has none.*a tombstone is"),
        ({"topic": "t", "value": "a", "json": 1}, "this one has value and json"),
        ({"topic": "t", "value": "a", "key": "a", "key_base64": "aw=="}, "key and key_base64"),
        ({"topic": "t", "value": "a", "headers": {"h": ""}, "headers_base64": {"h": ""}}, "header 'h'"),
        ({"topic": "t t", "value": "a"}, "'t t' is no name of a topic"),
        ({"topic": "..", "value": "a"}, "is no name of a topic"),
        ({"topic": "__consumer_offsets", "value": "a"}, "one of Kafka's own"),
        ({"records": [], "then": [{"topic": "", "value": "a"}]}, "'' is no name of a topic"),
        *[
            (given, "is Penstock's own")
            for name in ("penstock-inbound", "penstock-results", "penstock-results-dlq", "penstock-outbound-mail")
            for given in ({"topic": name, "value": "a"}, {"records": [], "then": [{"topic": name, "value": "a"}]})
        ],
    ],
)
async def test_what_cannot_be_published_is_given_up_at_once_and_told(
    publish: Any, given: dict[str, Any], told: str
) -> None:
    with pytest.raises(Undeliverable, match=told):
        await publish(**given)


@pytest.mark.parametrize(
    "given",
    [{"topic": 1}, {"topic": "t", "value": 1}, {"topic": "t", "value_base64": "?"}, {"topic": "t", "partition": -1},
     {"topic": "t", "value": "a", "due_at": 10**400}, {"records": [{"topic": "t", "value": "a", "due_at": 10**400}]},
     {"records": [{"topic": "t", "vlaue": "a"}]}, {"topic": "t", "valeu": "a"}, {"topic": "t", "headers": {"a": None}}],
    ids=["topic", "value", "base64", "partition", "due", "due-record", "member", "parameter", "header"],
)  # fmt: skip
async def test_parameters_of_a_wrong_kind_are_refused(publish: Any, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidParams):
        await publish(**given)


async def test_records_of_a_task_keep_their_order_and_the_last_ones_wait_for_the_others(
    kafka: MockKafka, publish: Any
) -> None:
    topic, last = kafka.topic(), kafka.topic("last")
    records = [{"topic": topic, "key": "k", "value": str(n)} for n in range(100)]
    answer = await publish(records=records, then=[{"topic": last, "value": None}])
    assert [one["topic"] for one in answer["records"]] == [topic] * 100 + [last]
    assert [record.value() for record in kafka.read(topic, count=100)] == [b"%d" % n for n in range(100)]
    with pytest.raises(Undeliverable):
        await publish(records=[{"topic": topic, "value": "x" * 2_000_000}], then=[{"topic": last, "value": "never"}])
    assert [record.value() for record in kafka.read(last, count=1)] == [None]


async def test_places_that_have_no_room_in_the_result_are_left_out(kafka: MockKafka) -> None:
    """The task must not fail for them: its records are published."""
    topic, registry = kafka.topic(), Registry()
    settings = load_settings(kafka_brokers=kafka.brokers, deliveries="kafka.publish", result_limit_bytes=3000)
    deliveries = Deliveries(settings, registry)
    action = registry.get("kafka.publish")
    assert action is not None
    args, kwargs = action.fit(json.dumps({"records": [{"topic": topic, "value": ""}] * 200}).encode())
    answer = await action.function(Context(1, 1, "kafka.publish"), *args, **kwargs)
    assert answer["truncated"]
    assert 2000 < len(encoded_result(answer)) <= 3000
    assert len(kafka.read(topic, count=200)) == 200
    await deliveries.close()


async def test_one_that_is_too_large_is_named_and_the_others_are_published(kafka: MockKafka, publish: Any) -> None:
    topic = kafka.topic()
    large = {"topic": topic, "value": "x" * 2_000_000}
    with pytest.raises(Undeliverable, match=rf"1 of 2 records .*{topic}, 2000000 bytes: .*MSG_SIZE_TOO_LARGE"):
        await publish(records=[{"topic": topic, "value": "a"}, large])
    assert len(kafka.read(topic, count=1)) == 1


async def test_a_batch_that_is_over_the_limit_of_its_topic_is_published_record_by_record(
    kafka: MockKafka, publish: Any
) -> None:
    topic = kafka.topic(partitions=1)
    await publish(topic=topic, value="first")
    kafka.fail_next(_PRODUCE, _MSG_SIZE_TOO_LARGE)
    records = [{"topic": topic, "value": str(n)} for n in range(5)]
    answer, other = await asyncio.gather(publish(records=records), publish(topic=topic, value="other"))
    offsets = [place["offset"] for place in answer["records"]]
    assert offsets == sorted({*offsets} - {other["offset"]})
    kafka.fail_next(_PRODUCE, _MSG_SIZE_TOO_LARGE, _MSG_SIZE_TOO_LARGE)
    with pytest.raises(Undeliverable, match=r"1 of 1 records.*MSG_SIZE_TOO_LARGE"):
        await publish(topic=topic, value="large")


async def test_a_burst_of_tasks_shares_the_producer(kafka: MockKafka, publish: Any) -> None:
    topic = kafka.topic()
    answers = await asyncio.gather(*(publish(topic=topic, value=str(n)) for n in range(2000)))
    assert len({(one["partition"], one["offset"]) for one in answers}) == 2000


@pytest.mark.parametrize(
    "more", [[], [{"topic": "t", "value": "x" * 2_000_000}]], ids=["alone", "beside-a-refused-one"]
)
async def test_brokers_that_are_away_fail_the_attempt_and_not_the_task(more: list[dict[str, Any]]) -> None:
    registry = Registry()
    settings = load_settings(kafka_brokers="127.0.0.1:1", deliveries="kafka.publish", kafka_delivery_timeout_seconds=1)
    deliveries = Deliveries(settings, registry)
    action = registry.get("kafka.publish")
    assert action is not None
    given, count = [{"topic": "t", "value": "a"}, *more], 1 + len(more)
    args, kwargs = action.fit(json.dumps({"records": given}).encode())
    with pytest.raises(NotDelivered, match=f"{count} of {count} records were not published.* 1 bytes"):
        await action.function(Context(1, 1, "kafka.publish"), *args, **kwargs)
    await deliveries.close()


def test_a_worker_without_brokers_or_library_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="PENSTOCK_KAFKA_BROKERS is not set"):
        Deliveries(load_settings(deliveries="kafka.publish"), Registry())
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(SettingsError, match=r"pip install 'penstock\[kafka\]'"):
        Deliveries(load_settings(deliveries="kafka.publish", kafka_brokers="x:1"), Registry())


async def test_a_worker_connects_before_its_first_task() -> None:
    connected = asyncio.Event()

    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    deliveries = Deliveries(load_settings(deliveries="kafka.publish", kafka_brokers=f"127.0.0.1:{port}"), Registry())
    deliveries.open()
    try:
        await asyncio.wait_for(connected.wait(), 10)
    finally:
        await deliveries.close()
        server.close()


def test_only_topics_of_the_setting_are_published_to_where_it_is_set() -> None:
    settings = load_settings(kafka_publish_topics="orders,mail.*", results_queue="orders")
    assert topic_problem("mail.sent", settings) is None
    assert "PENSTOCK_KAFKA_PUBLISH_TOPICS" in (topic_problem("payments", settings) or "")
    assert "Penstock's own" in (topic_problem("orders", settings) or "")
