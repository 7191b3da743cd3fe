"""What is RabbitMQ's alone: rights, queues that others made, connections that are lost, the doctor's look."""

from __future__ import annotations

import asyncio
import secrets
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import aiormq
import pytest

from penstock.brokers.base import Outgoing, Queue, QueueMissing, Transport
from penstock.brokers.opening import create_queues, open_transport
from penstock.cli.doctor.checks import examine_queues
from penstock.cli.doctor.findings import Finding, Report
from penstock.protocol.errors import Unavailable
from penstock.settings.model import Settings, load_settings
from tests.rabbitmq import RabbitMq

PATIENCE_SECONDS = 60.0
_THEN = 1_700_000_000
_THEN_US = struct.pack(">Q", _THEN * 1_000_000)


@pytest.fixture
def settings(rabbitmq: RabbitMq) -> Settings:
    prefix = f"t-{secrets.token_hex(4)}"
    names = {f"{label}_queue": f"{prefix}-{label}" for label in ("inbound", "outbound", "results")}
    return load_settings(transport_url=rabbitmq.url, **names)


@pytest.fixture
async def opened() -> AsyncIterator[Callable[[Settings], Transport]]:
    transports: list[Transport] = []

    def open_one(settings: Settings) -> Transport:
        transports.append(open_transport(settings))
        return transports[-1]

    yield open_one
    for transport in transports:
        await transport.close()


@pytest.fixture
async def admin(rabbitmq: RabbitMq) -> AsyncIterator[Any]:
    connection = await aiormq.connect(rabbitmq.url)
    yield connection
    await connection.close()


async def take_one(queue: Queue) -> str:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            messages = await queue.receive(wait_seconds=1, visibility_seconds=30)
            if messages:
                assert await queue.delete(messages) == []
                return messages[0].body


async def test_who_may_not_make_queues_uses_those_that_are_there(
    rabbitmq: RabbitMq, settings: Settings, opened: Callable[[Settings], Transport]
) -> None:
    user = f"u{secrets.token_hex(4)}"
    rabbitmq.ctl("add_user", user, "s3cr3t")
    rabbitmq.ctl("set_permissions", user, "^$", ".*", ".*")
    limited = settings.model_copy(
        update={"transport_url": type(settings.transport_url)(rabbitmq.url.replace("guest:guest", f"{user}:s3cr3t"))}
    )
    queue = opened(limited).queue(settings.outbound_queue, label="outbound")
    with pytest.raises(QueueMissing, match=r"does not exist.*create-queues") as told:
        await queue.depth()
    assert "s3cr3t" not in str(told.value)
    assert (await queue.send([Outgoing("1")])).failed == [0]
    await create_queues(settings)
    assert (await queue.send([Outgoing("1")])).failed == []
    assert await take_one(queue) == "1"


async def test_a_wrong_password_is_said_plainly_and_not_shown(
    rabbitmq: RabbitMq, opened: Callable[[Settings], Transport]
) -> None:
    wrong = load_settings(transport_url=rabbitmq.url.replace("guest:guest", "guest:s3cr3t"))
    with pytest.raises(Unavailable, match="refuses the user, the password") as told:
        await opened(wrong).queue("q", label="q").depth()
    assert "s3cr3t" not in str(told.value)


async def test_a_queue_that_others_made_otherwise_is_used_as_it_is(
    settings: Settings, opened: Callable[[Settings], Transport], admin: Any
) -> None:
    channel = await admin.channel()
    await channel.queue_declare(settings.outbound_queue, durable=True)  # a classic one
    queue = opened(settings).queue(settings.outbound_queue, label="outbound")
    assert (await queue.send([Outgoing("1")])).failed == []
    assert await take_one(queue) == "1"
    await channel.queue_delete(settings.outbound_queue)


async def test_a_queue_that_is_deleted_is_made_anew(
    settings: Settings, opened: Callable[[Settings], Transport], admin: Any
) -> None:
    queue = opened(settings).queue(settings.outbound_queue, label="outbound")
    assert (await queue.send([Outgoing("1")])).failed == []
    assert await take_one(queue) == "1"
    await (await admin.channel()).queue_delete(settings.outbound_queue)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await queue.send([Outgoing("2")])).failed:
            await asyncio.sleep(0.05)
        while True:
            try:
                assert await take_one(queue) == "2"
                break
            except Unavailable:
                await asyncio.sleep(0.05)


async def test_a_connection_that_is_lost_is_made_anew_and_what_it_held_comes_again(
    rabbitmq: RabbitMq, settings: Settings, opened: Callable[[Settings], Transport]
) -> None:
    queue = opened(settings).queue(settings.outbound_queue, label="outbound")
    assert (await queue.send([Outgoing("1")])).failed == []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (held := await queue.receive(wait_seconds=1, visibility_seconds=30)):
            pass
        await asyncio.to_thread(rabbitmq.ctl, "close_all_connections", "a test")
        while not await queue.extend(held, 30):
            await asyncio.sleep(0.05)  # the loss has not been heard of yet
        assert await queue.delete(held) == held
        again: list[Any] = []
        while not again:
            try:
                again = await queue.receive(wait_seconds=1, visibility_seconds=30)
            except Unavailable:
                await asyncio.sleep(0.05)
    assert [(message.id, message.receive_count) for message in again] == [(held[0].id, 2)]
    assert await queue.delete(again) == []


async def test_a_message_that_is_too_large_for_the_broker_is_refused_alone_and_what_went_is_not_sent_again(
    rabbitmq: RabbitMq, settings: Settings, opened: Callable[[Settings], Transport]
) -> None:
    queue = opened(settings).queue(settings.outbound_queue, label="outbound")
    bodies = [str(n) for n in range(10)] + ["x" * 4_000_000] + [str(n) for n in range(10, 20)]
    with rabbitmq.messages_of(1_000_000):
        report = await queue.send([Outgoing(body) for body in bodies])
    assert report.refused == {10}
    left = [bodies[at] for at in report.failed if at not in report.refused]
    async with asyncio.timeout(PATIENCE_SECONDS):
        while left:
            left = [left[at] for at in (await queue.send([Outgoing(body) for body in left])).failed]
            await asyncio.sleep(0.05)
    came: Counter[str] = Counter()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(came) < 20 or (await queue.depth()).visible:
            messages = await queue.receive(wait_seconds=1, visibility_seconds=30)
            came.update(message.body for message in messages)
            await queue.delete(messages)
    assert [came[body] for at, body in enumerate(bodies) if at not in report.failed] == [1] * (21 - len(report.failed))


async def test_a_message_of_others_is_taken_as_it_is(
    settings: Settings, opened: Callable[[Settings], Transport], admin: Any
) -> None:
    await create_queues(settings)
    channel = await admin.channel()
    send = channel.basic_publish
    basic = aiormq.spec.Basic.Properties
    await send(b'"plain"', routing_key=settings.inbound_queue, properties=basic(message_id="mine", headers={"n": 1}))
    await send(b"\xff\xfe", routing_key=settings.inbound_queue, properties=basic(message_id="no/id"))
    queue = opened(settings).queue(settings.inbound_queue, label="inbound")
    messages: list[Any] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(messages) < 2:
            messages += await queue.receive(wait_seconds=1, visibility_seconds=30)
    plain, broken = messages
    assert (plain.id, plain.body, plain.attributes, plain.sent_at) == ("mine", '"plain"', {}, None)
    assert broken.id != "no/id"
    with pytest.raises(UnicodeEncodeError):
        broken.body.encode()  # so that it is not taken for text
    assert await queue.delete(messages) == []


class Odd(aiormq.spec.Basic.Properties):
    """Properties that our library neither writes nor reads: text in Latin-1, and a time in microseconds."""

    def marshal(self) -> bytes:
        return super().marshal().replace(b"M?nchen", b"M\xfcnchen").replace(struct.pack(">Q", _THEN), _THEN_US)


async def test_a_message_whose_properties_cannot_be_read_ends_no_connection(
    settings: Settings, opened: Callable[[Settings], Transport], admin: Any
) -> None:
    """Its neighbours would be delivered again and again with it, and be dead letters that cannot be looked at."""
    await create_queues(settings)
    channel = await admin.channel()
    then = datetime.fromtimestamp(_THEN, UTC)
    for number, properties in enumerate(
        [
            Odd(message_id="first"), Odd(headers={"a": "b"}, message_id="M?nchen"),
            Odd(message_id="timed", timestamp=then), Odd(headers={"M?nchen": 1}), Odd(message_id="last"),
        ]
    ):  # fmt: skip
        await channel.basic_publish(b"%d" % number, routing_key=settings.inbound_queue, properties=properties)
    queue = opened(settings).queue(settings.inbound_queue, label="inbound")
    messages: list[Any] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(messages) < 5:
            messages += await queue.receive(wait_seconds=1, visibility_seconds=30)
    assert [message.body for message in messages] == ["0", "1", "2", "3", "4"]
    assert {message.receive_count for message in messages} == {1}
    first, latin, timed, _, last = messages
    assert (first.id, timed.id, last.id) == ("first", "timed", "last")
    assert (latin.attributes, timed.sent_at) == ({"a": "b"}, None)
    assert await queue.delete(messages) == []


async def found_by_doctor(settings: Settings) -> dict[str, Finding]:
    report = Report()
    await examine_queues(settings, report)
    return {finding.what: finding for finding in report.findings}


async def test_the_doctor_looks_without_making_anything(
    settings: Settings, opened: Callable[[Settings], Transport]
) -> None:
    for _ in range(2):
        found = await found_by_doctor(settings)
        assert found["broker"].level == "ok"
        assert "RabbitMQ 3" in found["broker"].seen
        assert {found[f"{label} queue"].level for label in ("inbound", "outbound", "results")} == {"note"}
        assert "create-queues" in found["inbound queue"].fix
    await create_queues(settings)
    dead = opened(settings).queue(settings.results_queue + "-dlq", label="dead")
    assert (await dead.send([Outgoing("1")])).failed == []
    found = await found_by_doctor(settings)
    assert found["results dead letters"].level == "note"
    assert "penstock dlq list results" in found["results dead letters"].fix
    assert {finding.level for what, finding in found.items() if what != "results dead letters"} == {"ok"}
    away = await found_by_doctor(load_settings(transport_url="amqp://u:s3cr3t@127.0.0.1:1/"))
    assert away["broker"].level == "error"
    assert "s3cr3t" not in str(away)
