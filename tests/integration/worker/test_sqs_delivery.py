"""sqs.send against a real SQS endpoint."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from penstock.brokers.sqs import SqsTransport
from penstock.db.pool import Store
from penstock.protocol.errors import InvalidParams
from penstock.protocol.json_text import decode_any
from penstock.settings.model import Settings, load_settings
from penstock.worker.deliveries.errors import NotDelivered, Undeliverable
from penstock.worker.deliveries.registry import Deliveries
from penstock.worker.deliveries.sqs import Sender, SqsMessage
from penstock.worker.handlers.actions import Registry
from penstock.worker.handlers.context import Call, Context
from tests.integration.doors import SqsProxy, sqs_proxy
from tests.integration.lines import running


class Ground:
    """Queues of this test, and what is in them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.transport = SqsTransport(load_settings(sqs_endpoint_url=url, aws_region="us-east-1"))
        self.others: list[SqsTransport] = []
        self.prefix = f"d-{secrets.token_hex(4)}"

    async def queue(self, name: str, **attributes: str) -> str:
        client = await self.transport.client()
        full = f"{self.prefix}-{name}"
        await client.create_queue(QueueName=full, Attributes=attributes)
        return full

    async def received(self, queue: str) -> list[dict[str, Any]]:
        client = await self.transport.client()
        url = (await client.get_queue_url(QueueName=queue))["QueueUrl"]
        found: list[dict[str, Any]] = []
        while True:
            reply = await client.receive_message(
                QueueUrl=url, MaxNumberOfMessages=10, MessageAttributeNames=["All"], AttributeNames=["All"]
            )
            messages = reply.get("Messages", [])
            if not messages:
                return found
            found += messages
            for message in messages:
                await client.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])

    def sender(self, *queues: str, url: str | None = None) -> Sender:
        transport = self.transport
        if url is not None:
            transport = SqsTransport(load_settings(sqs_endpoint_url=url, aws_region="us-east-1"))
            self.others.append(transport)
        return Sender(transport, load_settings(sqs_send_queues=queues))


@pytest.fixture
async def ground(sqs_url: str) -> AsyncIterator[Ground]:
    ground = Ground(sqs_url)
    yield ground
    for transport in (ground.transport, *ground.others):
        await transport.close()


def calls(*payloads: dict[str, Any], first_id: int = 1) -> list[Call[SqsMessage]]:
    """As a worker has them: through JSON, each with its task."""
    return [
        Call(Context(task_id, 1, "sqs.send"), msgspec.convert(payload, SqsMessage))
        for task_id, payload in enumerate(payloads, first_id)
    ]


async def test_a_message_arrives_as_it_was_given(ground: Ground) -> None:
    queue = await ground.queue("plain")
    (outcome, other) = await ground.sender(queue).send(
        calls(
            {"queue": queue, "body": "grüße", "attributes": {"kind": "a", "n": 5, "raw": {"base64": "AAH/"}}},
            {"queue": queue, "json": {"a": ["\uffff", 1]}},
        )
    )
    assert isinstance(outcome, dict)
    assert isinstance(other, dict)
    messages = {message["MessageId"]: message for message in await ground.received(queue)}
    assert messages[outcome["message_id"]]["Body"] == "grüße"
    attributes = messages[outcome["message_id"]]["MessageAttributes"]
    assert attributes["kind"]["StringValue"] == "a"
    assert (attributes["n"]["StringValue"], attributes["n"]["DataType"]) == ("5", "Number")
    assert base64.b64decode(attributes["raw"]["BinaryValue"]) == b"\x00\x01\xff"
    assert json.loads(messages[other["message_id"]]["Body"]) == {"a": ["\uffff", 1]}


async def test_a_burst_shares_calls_and_each_task_has_its_own_answer(ground: Ground) -> None:
    one, two = await ground.queue("one"), await ground.queue("two")
    with sqs_proxy(ground.url) as proxy:
        sender = ground.sender(one, two, url=proxy.url)
        payloads = [{"queue": one if n % 2 else two, "body": str(n)} for n in range(100)]
        outcomes = await sender.send(calls(*payloads))
        sends = [name for name, _ in proxy.calls if name == "SendMessageBatch"]
    assert len(sends) == 10
    ids = [outcome["message_id"] for outcome in outcomes if isinstance(outcome, dict)]
    assert len(set(ids)) == 100
    bodies = {message["MessageId"]: message["Body"] for queue in (one, two) for message in await ground.received(queue)}
    assert [bodies[message_id] for message_id in ids] == [str(n) for n in range(100)]


async def test_expired_credentials_are_replaced_by_fresh_ones(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.aws._RENEW_SECONDS", 0.0)
    queue = await ground.queue("renewed")
    with sqs_proxy(ground.url) as proxy:
        sender = ground.sender(queue, url=proxy.url)
        proxy.keys = {"fresh"}
        for _ in range(2):  # the look for the queue's URL, too, is refused
            (refused,) = await sender.send(calls({"queue": queue, "body": "late"}))
            assert "ExpiredToken" in str(refused)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "fresh")
        outcomes = [(await sender.send(calls({"queue": queue, "body": "late"})))[0] for _ in range(3)]
    assert any(isinstance(outcome, dict) for outcome in outcomes)
    assert {message["Body"] for message in await ground.received(queue)} == {"late"}


async def test_of_a_fifo_queue_the_order_stays_and_a_second_attempt_adds_nothing(ground: Ground) -> None:
    queue = await ground.queue("orders.fifo", FifoQueue="true")
    sender = ground.sender(queue)
    payloads = [{"queue": queue, "body": str(n), "group_id": "g"} for n in range(25)]
    first = await sender.send(calls(*payloads))
    again = await sender.send(calls(*payloads))
    assert all(isinstance(outcome, dict) for outcome in (*first, *again))
    messages = await ground.received(queue)
    assert [message["Body"] for message in messages] == [str(n) for n in range(25)]
    assert messages[0]["Attributes"]["MessageDeduplicationId"] == "penstock-1"


async def test_a_queue_may_be_named_by_its_url_or_by_its_name(ground: Ground) -> None:
    queue = await ground.queue("urls")
    client = await ground.transport.client()
    url = (await client.get_queue_url(QueueName=queue))["QueueUrl"]
    outcomes = await ground.sender(url).send(calls({"queue": url, "body": "1"}, {"queue": queue, "body": "2"}))
    assert all(isinstance(outcome, dict) for outcome in outcomes)
    assert {message["Body"] for message in await ground.received(queue)} == {"1", "2"}


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"queue": "penstock-outbound", "body": "a"}, r"'penstock-outbound' is not among those of PENSTOCK_SQS_SEND"),
        ({"body": "a", "json": 1}, "one of body"),
        ({}, "one of body"),
        ({"body": ""}, "empty"),
        ({"body": "a\x00b"}, r"holds '\\x00'"),
        ({"body": "x" * 1_048_577}, "1048577 bytes"),
        ({"body": "a", "attributes": {"x": ""}}, "attribute x is empty"),
        ({"body": "a", "attributes": {"x": {"base64": ""}}}, "attribute x is empty"),
        ({"body": "a", "attributes": {"x": "a\x00b"}}, "attribute x is empty, or holds"),
        ({"body": "a", "deduplication_id": "x"}, "is for FIFO queues"),
    ],
    ids=range(10),
)
async def test_a_message_that_cannot_be_sent_fails_for_good_and_harms_no_neighbour(
    ground: Ground, payload: dict[str, Any], message: str
) -> None:
    queue = await ground.queue("bad")
    good = {"queue": queue, "body": "good"}
    outcomes = await ground.sender(queue).send(calls(good, {"queue": queue, **payload}, good))
    with pytest.raises(Undeliverable, match=message):
        raise outcomes[1]  # type: ignore[misc]
    assert len(await ground.received(queue)) == 2


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"attributes": {"": "1"}}, "attributes"),
        ({"attributes": {"a..b": "1"}}, "attributes"),
        ({"attributes": {"a" * 257: "1"}}, "attributes"),
        ({"attributes": {"x": True}}, "attributes"),
        ({"attributes": {"x": {"base64": "*"}}}, "attributes"),
        ({"attributes": {str(n): "1" for n in range(11)}}, "attributes"),
        ({"delay": 901}, "delay"),
        ({"group_id": "g g"}, "group_id"),
        ({"deduplication_id": ""}, "deduplication_id"),
    ],
    ids=range(9),
)
async def test_a_message_that_does_not_fit_is_refused_at_once(ground: Ground, given: dict[str, Any], told: str) -> None:
    registry = Registry()
    deliveries = Deliveries(load_settings(deliveries="sqs.send", sqs_endpoint_url=ground.url), registry)
    action = registry.get("sqs.send")
    assert action is not None
    assert action.bad_params_attempts == 1
    with pytest.raises(InvalidParams, match=told):
        action.fit(json.dumps({"queue": "q", "body": "a", **given}).encode())
    await deliveries.close()


async def test_a_fifo_queue_asks_for_a_group_and_takes_no_delay(ground: Ground) -> None:
    queue = await ground.queue("strict.fifo", FifoQueue="true")
    outcomes = await ground.sender(queue).send(
        calls({"queue": queue, "body": "a"}, {"queue": queue, "body": "a", "group_id": "g", "delay": 1})
    )
    assert [str(outcome).partition(":")[0] for outcome in outcomes] == [
        f"{queue} is a FIFO queue", "a FIFO queue takes no delay of single messages",
    ]  # fmt: skip


async def test_a_queue_that_is_not_there_yet_and_an_endpoint_that_is_away_are_tried_again(ground: Ground) -> None:
    name = f"{ground.prefix}-later"
    sender = ground.sender(name)
    (outcome,) = await sender.send(calls({"queue": name, "body": "a"}))
    assert isinstance(outcome, NotDelivered)
    await ground.queue("later")
    (outcome,) = await sender.send(calls({"queue": name, "body": "a"}))
    assert isinstance(outcome, dict)
    (outcome,) = await ground.sender(name, url="http://127.0.0.1:1").send(calls({"queue": name, "body": "a"}))
    assert isinstance(outcome, NotDelivered)


async def test_of_a_call_that_failed_in_part_only_those_that_failed_are_tried_again(ground: Ground) -> None:
    queue = await ground.queue("partial")
    with sqs_proxy(ground.url) as proxy:
        fail_first_entry(proxy)
        outcomes = await ground.sender(queue, url=proxy.url).send(
            calls(*({"queue": queue, "body": str(n)} for n in range(3)))
        )
    assert isinstance(outcomes[0], NotDelivered)
    assert "ServiceUnavailable" in str(outcomes[0])
    assert all(isinstance(outcome, dict) for outcome in outcomes[1:])
    assert {message["Body"] for message in await ground.received(queue)} == {"1", "2"}


async def test_a_queue_that_does_not_answer_delays_no_outcome_of_another(ground: Ground) -> None:
    slow, quick = await ground.queue("slow"), await ground.queue("quick")
    may_answer = threading.Event()

    def hook(operation: str, request: dict[str, Any], forward: Any) -> tuple[int, dict[str, Any]]:
        if operation == "SendMessageBatch" and slow in request["QueueUrl"]:
            may_answer.wait(60)
        return forward(request)  # type: ignore[no-any-return]

    answered: asyncio.Queue[Any] = asyncio.Queue()
    late, early = calls({"queue": slow, "body": "a"}, {"queue": quick, "body": "b"})
    early._answer = answered.put_nowait
    with sqs_proxy(ground.url) as proxy:
        proxy.hook = hook
        sending = asyncio.create_task(ground.sender(slow, quick, url=proxy.url).send([late, early]))
        assert isinstance(await asyncio.wait_for(answered.get(), 30), dict)
        assert not sending.done()
        may_answer.set()
        assert [type(outcome) for outcome in await sending] == [dict, dict]


async def test_an_endpoint_that_takes_less_in_a_call_than_sqs_gets_one_message_in_each(ground: Ground) -> None:
    queue = await ground.queue("small")

    def hook(operation: str, request: dict[str, Any], forward: Any) -> tuple[int, dict[str, Any]]:
        size = sum(len(entry["MessageBody"]) for entry in request.get("Entries", ()))
        if size > 262_144:
            told = f"Batch requests cannot be longer than 262144 bytes. You have sent {size} bytes."
            return 400, {"__type": "com.amazonaws.sqs#BatchRequestTooLong", "message": told}
        return forward(request)  # type: ignore[no-any-return]

    with sqs_proxy(ground.url) as proxy:
        proxy.hook = hook
        outcomes = await ground.sender(queue, url=proxy.url).send(
            calls(*({"queue": queue, "body": "x" * size} for size in (200_000, 300_000, 100_000)))
        )
    assert [type(outcome) for outcome in outcomes] == [dict, Undeliverable, dict]
    assert "You have sent 300000" in str(outcomes[1])
    assert len(await ground.received(queue)) == 2


async def test_a_message_of_a_fifo_queue_that_failed_alone_is_overtaken_by_none_of_its_group(ground: Ground) -> None:
    queue = await ground.queue("refused.fifo", FifoQueue="true")

    def hook(operation: str, request: dict[str, Any], forward: Any) -> tuple[int, dict[str, Any]]:
        entries = request.get("Entries", ())
        if operation == "SendMessageBatch" and len(entries) > 1:
            return 400, {"__type": "com.amazonaws.sqs#InvalidParameterValue", "message": "one of them"}
        if operation == "SendMessageBatch" and entries[0]["MessageBody"] == "0":
            return 503, {"__type": "ServiceUnavailable", "message": "later"}
        return forward(request)  # type: ignore[no-any-return]

    with sqs_proxy(ground.url) as proxy:
        proxy.hook = hook
        outcomes = await ground.sender(queue, url=proxy.url).send(
            calls(*({"queue": queue, "body": str(n), "group_id": "g"} for n in range(3)))
        )
    assert all(isinstance(outcome, NotDelivered) for outcome in outcomes)
    assert await ground.received(queue) == []


def fail_first_entry(proxy: SqsProxy) -> None:
    def hook(operation: str, request: dict[str, Any], forward: Any) -> tuple[int, dict[str, Any]]:
        if operation != "SendMessageBatch":
            return forward(request)  # type: ignore[no-any-return]
        first, *rest = request["Entries"]
        status, reply = forward({**request, "Entries": rest})
        failed = {"Id": first["Id"], "SenderFault": False, "Code": "ServiceUnavailable", "Message": "later"}
        return status, {**reply, "Failed": [failed]}

    proxy.hook = hook


async def test_it_runs_as_a_task(store: Store, settings: Settings, ground: Ground) -> None:
    queue = await ground.queue("tasks")
    async with running(store, settings, deliveries=("sqs.send",), sqs_send_queues=(queue,)) as line:
        ids = await line.enqueue("sqs.send", *({"queue": queue, "body": str(n)} for n in range(30)))
        rows = [await line.until(task_id, "SUCCESS") for task_id in ids]
    assert len({row["result"]["message_id"] for row in rows}) == 30
    assert {message["Body"] for message in await ground.received(queue)} == {str(n) for n in range(30)}


def test_a_name_of_the_setting_is_not_taken_for_the_end_of_a_url_in_it() -> None:
    url = "https://sqs.eu-west-1.amazonaws.com/999/orders"
    settings = load_settings(sqs_endpoint_url=None, aws_region="us-east-1", sqs_send_queues=("orders", url))
    sender = Sender(SqsTransport(settings), settings)
    assert (sender._allowed["orders"], sender._allowed[url]) == ("orders", url)


async def test_a_number_beyond_a_double_is_sent_as_json(ground: Ground) -> None:
    queue = await ground.queue("numbers")
    payload = decode_any(f'{{"queue": "{queue}", "json": {{"x": 1e999}}}}')
    await ground.sender(queue).send(calls(payload))
    (message,) = await ground.received(queue)
    assert json.loads(message["Body"], parse_constant=pytest.fail) == {"x": None}
