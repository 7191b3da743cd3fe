"""amqp.publish against a real RabbitMQ."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

import aiormq
import msgspec
import pytest

from penstock.brokers.rabbitmq.connection import Link, Links
from penstock.protocol.errors import InvalidParams, SettingsError
from penstock.settings.model import load_settings
from penstock.worker.deliveries.amqp import AmqpMessage, Publisher
from penstock.worker.deliveries.errors import NotDelivered, Undeliverable
from penstock.worker.deliveries.registry import Deliveries
from penstock.worker.handlers.actions import Registry
from penstock.worker.handlers.context import Call, Context
from tests.integration.doors import sample
from tests.rabbitmq import RabbitMq

QUEUE = "x" + secrets.token_hex(4)


@pytest.fixture
async def channel(rabbitmq: RabbitMq) -> AsyncIterator[Any]:
    """A client that is not ours, with a queue bound to an exchange of its own."""
    connection = await aiormq.connect(rabbitmq.url)
    channel = await connection.channel()
    await channel.exchange_declare(f"{QUEUE}-exchange", exchange_type="topic")
    await channel.queue_declare(QUEUE)
    await channel.queue_bind(QUEUE, f"{QUEUE}-exchange", "created.*")
    yield channel
    await channel.queue_delete(QUEUE)
    await channel.exchange_delete(f"{QUEUE}-exchange")
    await connection.close()


@pytest.fixture
async def publisher(rabbitmq: RabbitMq) -> AsyncIterator[Publisher]:
    links = Links(rabbitmq.url, setting="PENSTOCK_AMQP_PUBLISH_URL", heartbeat_seconds=30)
    yield Publisher(links, load_settings(amqp_publish_url=rabbitmq.url))
    await links.close()


def calls(*payloads: dict[str, Any]) -> list[Call[AmqpMessage]]:
    """As a worker has them: through JSON, each with its task."""
    return [
        Call(Context(task_id, 1, "amqp.publish"), msgspec.convert(payload, AmqpMessage))
        for task_id, payload in enumerate(payloads, 1)
    ]


async def test_a_message_arrives_as_it_was_told(channel: Any, publisher: Publisher) -> None:
    exchange = f"{QUEUE}-exchange"
    outcomes = await publisher.publish(
        calls(
            {"exchange": exchange, "routing_key": "created.eu", "json": {"é": [1]}, "headers": {"n": 1.5, "b": True}},
            {"routing_key": QUEUE, "body": "tëxt", "message_id": "mine", "persistent": False},
            {"routing_key": QUEUE, "base64": "AP8=", "headers": {"raw": {"base64": "AAE="}}, "content_type": "x/y"},
        )
    )
    assert outcomes == [{"message_id": "penstock-1"}, {"message_id": "mine"}, {"message_id": "penstock-3"}]
    came = [await channel.basic_get(QUEUE, no_ack=True) for _ in range(3)]
    found = {message.header.properties.message_id: message for message in came}
    first, second, third = (found[name] for name in ("penstock-1", "mine", "penstock-3"))
    assert json.loads(first.body) == {"é": [1]}
    assert first.header.properties.headers == {"n": 1.5, "b": True}
    assert (first.header.properties.delivery_mode, first.header.properties.content_type) == (2, "application/json")
    assert (second.body.decode(), second.header.properties.delivery_mode) == ("tëxt", 1)
    assert (third.body, third.header.properties.content_type) == (b"\x00\xff", "x/y")
    assert bytes(third.header.properties.headers["raw"]) == b"\x00\x01"


async def test_what_no_queue_takes_is_tried_again_and_what_cannot_be_is_final(
    channel: Any, publisher: Publisher
) -> None:
    good = {"routing_key": QUEUE, "body": "good"}
    nowhere, unbound, unwanted, *wrong = await publisher.publish(
        calls(
            {"exchange": "there-is-none", "routing_key": "x", "body": "1"},
            {"exchange": f"{QUEUE}-exchange", "routing_key": "deleted.eu", "body": "2"},
            {"exchange": f"{QUEUE}-exchange", "routing_key": "deleted.eu", "body": "3", "mandatory": False},
            {"routing_key": QUEUE},
            {"routing_key": QUEUE, "body": "x", "json": 1},
            {"routing_key": "k" * 256, "body": "x"},
            {"routing_key": "nul\0", "body": "x"},
            {"routing_key": QUEUE, "body": "x", "headers": {"nul": "\0"}},
            {"routing_key": QUEUE, "body": "x", "headers": {"k" * 129: 1}},
            {"routing_key": "penstock-results", "body": "x"},
            {"routing_key": "penstock-outbound-dlq", "body": "x"},
            {"routing_key": "penstock-outbound-mail", "body": "x"},
            {"routing_key": QUEUE, "body": "x", "headers": {"CC": "text"}},
            {"routing_key": QUEUE, "body": "x", "headers": {"BCC": "text"}},
            good,
        )
    )
    assert isinstance(nowhere, NotDelivered)
    assert "there-is-none" in str(nowhere)
    assert isinstance(unbound, NotDelivered)
    assert "deleted.eu" in str(unbound)
    assert unwanted == {"message_id": "penstock-3"}
    assert wrong.pop() == {"message_id": "penstock-15"}
    assert {type(outcome) for outcome in wrong} == {Undeliverable}
    assert (await channel.basic_get(QUEUE, no_ack=True)).body == b"good"


async def test_messages_with_one_id_keep_their_own_outcomes(channel: Any, publisher: Publisher) -> None:
    same = {"body": "x", "message_id": "event-1"}
    dropped, *others = await publisher.publish(
        calls({"routing_key": f"{QUEUE}-none", **same}, *[{"routing_key": QUEUE, **same}] * 5)
    )
    assert isinstance(dropped, NotDelivered)
    assert f"{QUEUE}-none" in str(dropped)
    assert others == [{"message_id": "event-1"}] * 5
    assert [(await channel.basic_get(QUEUE, no_ack=True)).body for _ in range(6)] == [b"x"] * 5 + [b""]


async def test_a_queue_that_confirms_nothing_does_not_delay_the_outcomes_of_the_others(
    channel: Any, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, may_end = Link.publish, asyncio.Event()

    async def slow(link: Link, name: str, *given: Any, **more: Any) -> Any:
        if name == "stuck":
            await may_end.wait()
        return await publish(link, name, *given, **more)

    monkeypatch.setattr(Link, "publish", slow)
    answered: asyncio.Queue[Any] = asyncio.Queue()
    stuck, good = calls({"routing_key": "stuck", "body": "x"}, {"routing_key": QUEUE, "body": "x"})
    good._answer = answered.put_nowait
    publishing = asyncio.create_task(publisher.publish([stuck, good]))
    assert await asyncio.wait_for(answered.get(), 30) == {"message_id": "penstock-2"}
    assert not publishing.done()
    may_end.set()
    assert [type(outcome) for outcome in await publishing] == [NotDelivered, dict]


async def test_a_message_that_is_too_large_is_final_and_its_neighbours_are_tried_again(
    rabbitmq: RabbitMq, channel: Any, publisher: Publisher
) -> None:
    """The broker closes the channel on which all of them are under way."""
    small: list[dict[str, Any]] = [{"routing_key": QUEUE, "body": str(n)} for n in range(100)]
    with rabbitmq.messages_of(50_000):
        large, *neighbours = await publisher.publish(calls({"routing_key": QUEUE, "body": "x" * 50_001}, *small))
        assert isinstance(large, Undeliverable)
        assert "too large: RabbitMQ takes messages of up to 50000 bytes, not of 50001" in str(large)
        assert NotDelivered in {type(outcome) for outcome in neighbours} <= {NotDelivered, dict}
        async with asyncio.timeout(60):
            while {type(outcome) for outcome in await publisher.publish(calls(*small))} != {dict}:
                await asyncio.sleep(0.05)  # the loss of the connection has not been heard of yet


async def test_headers_that_do_not_fit_in_one_frame_are_final_and_harm_no_neighbour(
    channel: Any, publisher: Publisher
) -> None:
    """The broker would close the connection, on which all others are under way."""
    small: list[dict[str, Any]] = [{"routing_key": QUEUE, "body": str(n)} for n in range(20)]
    wide = {"routing_key": QUEUE, "body": "x", "message_id": "m", "content_type": "t", "headers": {"h": "x" * 140_000}}
    refused, *neighbours = await publisher.publish(calls(wide, *small))
    assert isinstance(refused, Undeliverable)
    assert "RabbitMQ takes headers in one frame of up to 131072 bytes, not of 140038" in str(refused)
    assert neighbours == [{"message_id": f"penstock-{number}"} for number in range(2, 22)]
    room = 131_072 - 38
    fits, too_wide = await publisher.publish(calls(*[wide | {"headers": {"h": "x" * n}} for n in (room, room + 1)]))
    assert (fits, type(too_wide)) == ({"message_id": "m"}, Undeliverable)


async def test_a_broker_that_is_away_is_tried_again_and_shows_no_password() -> None:
    links = Links("amqp://u:s3cr3t@127.0.0.1:1/", setting="X", heartbeat_seconds=30)
    (outcome,) = await Publisher(links, load_settings()).publish(calls({"routing_key": "q", "body": "x"}))
    assert isinstance(outcome, NotDelivered)
    assert "127.0.0.1:1" in str(outcome)
    assert "s3cr3t" not in str(outcome)


@pytest.mark.parametrize(
    ("given", "told"),
    [({"base64": "no base64"}, "base64"), ({"body": "x", "headers": {"list": [1]}}, "headers"),
     ({"body": "x", "headers": {"large": 2**63}}, "headers"),
     ({"body": "x", "headers": {"large": 3.5e38}}, "headers"),
     ({"body": "x", "exchange": "orders(eu)"}, "exchange"), ({"body": "x", "exchange": "orders\n"}, "exchange"),
     ({"body": "x", "exchange": "x" * 128}, "exchange"),
     ({"body": "x", "headers": {"h": {"base64": 1}}}, "headers")],
    ids=["base64", "list", "large", "double", "exchange", "line", "long", "bytes"],
)  # fmt: skip
async def test_a_message_that_does_not_fit_is_refused_at_once(given: dict[str, Any], told: str) -> None:
    registry = Registry()
    settings = load_settings(deliveries=("amqp.publish",), amqp_publish_url="amqp://u:p@127.0.0.1:1/")
    deliveries = Deliveries(settings, registry)
    action = registry["amqp.publish"]
    assert action.bad_params_attempts == 1
    with pytest.raises(InvalidParams, match=told):
        action.fit(json.dumps({"routing_key": QUEUE, **given}).encode())
    action.fit(json.dumps({"routing_key": QUEUE, "body": "x", "headers": {"least": -(2**63), "none": None}}).encode())
    await deliveries.close()


async def test_connects_of_deliveries_are_counted_apart_from_those_of_the_pipeline() -> None:
    registry = Registry()
    deliveries = Deliveries(
        load_settings(deliveries=("amqp.publish",), amqp_publish_url="amqp://u:p@127.0.0.1:1/"), registry
    )
    labels = {"transport": "amqp", "operation": "connect", "outcome": "failed"}
    before = {queue: sample("penstock_transport_calls_total", **labels, queue=queue) for queue in ("", "delivery")}
    (outcome,) = await registry["amqp.publish"].function(calls({"routing_key": "q", "body": "x"}))
    assert isinstance(outcome, NotDelivered)
    assert sample("penstock_transport_calls_total", **labels, queue="delivery") == before["delivery"] + 1
    assert sample("penstock_transport_calls_total", **labels, queue="") == before[""]
    await deliveries.close()


def test_it_needs_a_url_that_an_operator_has_set() -> None:
    with pytest.raises(SettingsError, match="PENSTOCK_AMQP_PUBLISH_URL is not set"):
        Deliveries(load_settings(deliveries=("amqp.publish",)), Registry())
    with pytest.raises(SettingsError, match=r"must begin with amqp://"):
        load_settings(amqp_publish_url="kafka://x")
