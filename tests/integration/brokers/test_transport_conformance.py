"""What every transport has to do, SQS, RabbitMQ and Kafka alike; what they declare says where they may differ."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import pytest

from penstock.brokers.base import Message, Outgoing, Queue, Transport
from penstock.brokers.opening import create_queues, open_transport
from penstock.protocol.errors import Unavailable
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings, load_settings
from tests.brokers import KINDS, broker_settings

PATIENCE_SECONDS = 60.0


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def settings(kind: str, request: pytest.FixtureRequest) -> Settings:
    prefix = f"t-{secrets.token_hex(4)}"
    return load_settings(
        **broker_settings(kind, request, prefix),
        receive_wait_seconds=1,
        visibility_timeout_seconds=30,
    )


@pytest.fixture
async def open_another(settings: Settings) -> AsyncIterator[Callable[[], Transport]]:
    """Opens a transport, as another process would; all are closed in the end."""
    async with AsyncExitStack() as stack:

        def open_one() -> Transport:
            transport = open_transport(settings)
            stack.push_async_callback(transport.close)
            return transport

        yield open_one


@pytest.fixture
async def transport(settings: Settings, open_another: Callable[[], Transport]) -> Transport:
    await create_queues(settings)
    return open_another()


@pytest.fixture
def queue(transport: Transport, settings: Settings) -> Queue:
    return transport.queue(settings.outbound_queue, label="outbound")


@pytest.fixture
def dead(transport: Transport, settings: Settings) -> Queue:
    name = settings.outbound_queue + DEAD_LETTER_SUFFIX
    return transport.queue(name, label=f"outbound{DEAD_LETTER_SUFFIX}")


@contextmanager
def patience(what: str) -> Iterator[Callable[[], None]]:
    """A check that fails the test once what is waited for has not come for a minute."""
    deadline = time.monotonic() + PATIENCE_SECONDS

    def check() -> None:
        assert time.monotonic() < deadline, f"{what} did not come within {PATIENCE_SECONDS:g} s"

    yield check


async def until(what: str, look: Callable[[], Awaitable[Any]]) -> Any:
    with patience(what) as check:
        while not (found := await look()):
            check()
            await asyncio.sleep(0.05)
        return found


async def put(queue: Queue, *bodies: str, **attributes: str) -> None:
    report = await queue.send([Outgoing(body, attributes) for body in bodies])
    assert (report.failed, report.reason, report.refused) == ([], None, frozenset())


async def take(queue: Queue, count: int, *, visibility_seconds: int = 30) -> list[Message]:
    """So many messages, by as many receives as it needs."""
    messages: list[Message] = []
    with patience(f"{count} messages") as check:
        while len(messages) < count:
            check()
            messages += await queue.receive(wait_seconds=1, visibility_seconds=visibility_seconds)
    assert len(messages) == count, [message.body for message in messages]
    return messages


async def nothing_comes(queue: Queue) -> None:
    assert await queue.receive(wait_seconds=1, visibility_seconds=30) == []
    assert await queue.receive(wait_seconds=0, visibility_seconds=30) == []


# Sending and receiving


async def test_what_is_sent_arrives_as_it_was(queue: Queue) -> None:
    text = json.dumps("é \U0001f600 \\uffff \ufffe", ensure_ascii=False)
    await put(queue, text, timeout_seconds="1.5", name="vélo")
    (message,) = await take(queue, 1)
    assert json.loads(message.body) == json.loads(text)
    assert message.attributes == {"timeout_seconds": "1.5", "name": "vélo"}
    assert (message.receive_count, message.original_id) == (1, message.id)
    assert message.sent_at is not None
    assert abs(message.sent_at - time.time()) < 600


async def test_any_number_of_messages_goes_and_no_receive_brings_more_than_a_call_may(queue: Queue) -> None:
    bodies = [str(n) for n in range(25)]
    await put(queue, *bodies)
    messages: list[Message] = []
    with patience("all messages") as check:
        while len(messages) < len(bodies):
            check()
            some = await queue.receive(wait_seconds=1, visibility_seconds=30)
            assert len(some) <= queue.limits.max_call_messages
            messages += some
    assert sorted(message.body for message in messages) == sorted(bodies)
    assert len({message.id for message in messages}) == len({message.receipt for message in messages}) == len(bodies)


async def test_nothing_to_do_is_no_trouble(queue: Queue) -> None:
    assert (await queue.send([])).failed == []
    assert await queue.delete([]) == []
    assert await queue.extend([], 10) == []
    await queue.release([])


async def test_a_message_of_the_limit_goes_and_a_larger_one_is_refused_alone(queue: Queue) -> None:
    most = queue.limits.max_message_bytes
    largest = json.dumps("x" * (most - 2))
    report = await queue.send([Outgoing('"a"'), Outgoing(largest + " "), Outgoing(largest), Outgoing('"b"')])
    assert (report.failed, report.refused) == ([1], frozenset({1}))
    assert report.reason
    assert {message.body for message in await take(queue, 3)} == {'"a"', '"b"', largest}


async def test_a_wait_gets_what_is_sent_meanwhile(queue: Queue) -> None:
    async def listen() -> list[Message]:
        while True:
            messages = await queue.receive(wait_seconds=20, visibility_seconds=30)
            if messages:
                return messages

    waiting = asyncio.create_task(listen())
    await asyncio.sleep(0.2)
    await put(queue, '"late"')
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert [message.body for message in await waiting] == ['"late"']


async def test_a_receive_that_is_cut_off_loses_nothing(queue: Queue) -> None:
    await put(queue, '"held"')
    held = await take(queue, 1)
    waiting = asyncio.create_task(queue.receive(wait_seconds=20, visibility_seconds=30))
    await asyncio.sleep(0.3)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await put(queue, '"next"')
    assert [message.body for message in await take(queue, 1, visibility_seconds=5)] == ['"next"']
    assert await queue.delete(held) == []


async def test_messages_are_shared_out_to_several_receivers(
    kind: str, queue: Queue, open_another: Callable[[], Transport], settings: Settings
) -> None:
    other = open_another().queue(settings.outbound_queue, label="outbound")
    bodies = {str(n) for n in range(60)}
    came: list[str] = []

    async def work(mine: Queue) -> None:
        with patience("all messages") as check:
            while set(came) != bodies:
                check()
                messages = await mine.receive(wait_seconds=1, visibility_seconds=30)
                came.extend(message.body for message in messages)
                stale = await mine.delete(messages)
                # Partitions that are handed over between a receive and its delete are delivered once more.
                assert stale == [] or kind == "kafka"

    await put(queue, *sorted(bodies))
    await asyncio.gather(work(queue), work(other))
    assert len(came) == len(bodies) or kind == "kafka"


# Holding


async def test_deleted_messages_never_come_again(queue: Queue) -> None:
    await put(queue, *(str(n) for n in range(13)))
    messages = await take(queue, 13)
    assert await queue.extend(messages, 2) == []
    assert await queue.delete(messages) == []
    await asyncio.sleep(2.5)  # past the time after which what is not deleted comes again
    await nothing_comes(queue)

    async def is_empty() -> bool:
        return (await queue.depth()).total == 0

    await until("an empty queue", is_empty)


async def test_a_held_message_is_nobody_elses(
    queue: Queue, open_another: Callable[[], Transport], settings: Settings
) -> None:
    await put(queue, '"a"')
    held = await take(queue, 1)
    await nothing_comes(queue)
    assert await queue.extend(held, 30) == []
    assert await queue.delete(held) == []


async def test_a_released_message_comes_again_at_once_with_a_new_receipt(queue: Queue) -> None:
    await put(queue, '"a"', k="v")
    (first,) = await take(queue, 1)
    await queue.release([first])
    (again,) = await take(queue, 1)
    assert (again.id, again.body, again.attributes) == (first.id, '"a"', {"k": "v"})
    assert (first.receive_count, again.receive_count) == (1, 2)
    assert again.receipt != first.receipt
    assert again.sent_at == first.sent_at
    assert await queue.delete([again]) == []


async def test_a_message_that_is_neither_deleted_nor_extended_comes_again(queue: Queue) -> None:
    await put(queue, '"held"', '"released"')
    messages = {message.body: message for message in await take(queue, 2, visibility_seconds=60)}
    assert (
        await queue.extend([messages['"released"']], 1) == []
    )  # by no receive, which a busy machine may be slow to see
    (again,) = await take(queue, 1)
    assert again.body == '"released"'
    assert again.receive_count >= 2  # one more where it came just as a receive ended, see Message
    await nothing_comes(queue)
    assert await queue.delete([messages['"held"'], again]) == []


async def test_an_old_receipt_is_of_no_use_and_says_so(queue: Queue) -> None:
    await put(queue, '"a"', '"b"')
    old = await take(queue, 2)
    released = [message for message in old if message.body == '"a"']
    await queue.release(released)
    (new,) = await take(queue, 1)
    assert await queue.delete(old) == released
    assert await queue.delete([new]) == []
    assert await queue.extend(old, 10) == old


async def test_what_a_receiver_held_that_is_gone_comes_again(
    queue: Queue, open_another: Callable[[], Transport], settings: Settings
) -> None:
    await put(queue, *(str(n) for n in range(4)))
    doomed = open_another()
    mine = doomed.queue(settings.outbound_queue, label="outbound")
    held = await take(mine, 4)
    assert await mine.delete(held[:1]) == []
    await doomed.close()
    if queue.limits.outlives_connection:  # until its time is up
        assert await queue.receive(wait_seconds=1, visibility_seconds=30) == []
        assert await queue.delete(held[1:]) == []
        return
    again = await take(queue, 3)
    assert {message.body for message in again} == {message.body for message in held[1:]}
    assert all(message.receive_count >= 2 for message in again)
    assert {message.id for message in again} == {message.id for message in held[1:]}
    assert await queue.delete(again) == []


# Dead letters


async def test_after_its_last_delivery_a_message_is_a_dead_letter(queue: Queue, dead: Queue) -> None:
    await put(queue, '"poison"', k="v")
    counts, ids = [], set()
    for _ in range(queue.limits.max_receives):
        (message,) = await take(queue, 1)
        counts.append(message.receive_count)
        ids.add(message.id)
        await queue.release([message])
    assert counts == list(range(1, queue.limits.max_receives + 1))

    async def found() -> list[Message]:
        assert await queue.receive(wait_seconds=0, visibility_seconds=30) == []
        return await dead.receive(wait_seconds=1, visibility_seconds=30)

    (letter,) = await until("the dead letter", found)
    assert (letter.body, letter.attributes) == ('"poison"', {"k": "v"})
    assert {letter.id} == ids


async def test_dead_letters_can_be_looked_at_again_and_again_and_taken_one_by_one(dead: Queue) -> None:
    await put(dead, *(str(n) for n in range(4)))
    for _ in range(dead.limits.max_receives + 1):
        await dead.release(await take(dead, 4))
    messages = await take(dead, 4)
    assert await dead.delete([message for message in messages if message.body in ("0", "2")]) == []
    await dead.release([message for message in messages if message.body in ("1", "3")])
    left = await take(dead, 2)
    assert {message.body for message in left} == {"1", "3"}
    assert {message.id for message in left} < {message.id for message in messages}
    await nothing_comes(dead)


# Depth, and what is not there


async def test_depth_counts_what_waits(queue: Queue) -> None:
    await put(queue, *(str(n) for n in range(13)))

    async def counted() -> bool:
        return (await queue.depth()).total == 13

    await until("13 messages", counted)
    held = await take(queue, 13)
    depth = await queue.depth()
    assert depth.total == (13 if queue.limits.counts_held else 0)
    assert (depth.in_flight is None) or queue.limits.counts_held
    assert await queue.delete(held) == []


async def test_a_queue_that_nobody_made_is_made_or_named(
    kind: str, settings: Settings, open_another: Callable[[], Transport], request: pytest.FixtureRequest
) -> None:
    name = f"{settings.outbound_queue}-more"
    if kind == "kafka":  # which has no controller here; test_kafka.py is about what one makes
        for topic in (name, name + DEAD_LETTER_SUFFIX):
            request.getfixturevalue("kafka").make(topic)
    queue = open_another().queue(name, label="more")
    if queue.limits.makes_queues:
        await put(queue, "1")
        assert [message.body for message in await take(queue, 1)] == ["1"]
        return
    with pytest.raises(Unavailable, match=f"'{name}' does not exist"):
        await queue.depth()
    assert (await queue.send([Outgoing("1")])).failed == [0]


async def test_a_broker_that_is_away_is_unavailable_and_loses_nothing(kind: str, settings: Settings) -> None:
    away = {
        "sqs": {"sqs_endpoint_url": "http://127.0.0.1:1"},
        "amqp": {"transport_url": "amqp://guest:s3cr3t-word@127.0.0.1:1/"},
        "kafka": {"transport_url": "kafka://127.0.0.1:1", "kafka_delivery_timeout_seconds": 1},
    }[kind]
    transport = open_transport(load_settings(aws_region="us-east-1", **away))
    queue = transport.queue("away", label="away")
    try:
        with pytest.raises(Unavailable) as told:
            await queue.depth()
        assert "s3cr3t-word" not in str(told.value)
        report = await queue.send([Outgoing("1"), Outgoing("2")])
        assert (report.failed, report.refused) == ([0, 1], frozenset())
        assert report.reason
        assert "s3cr3t-word" not in report.reason
        await queue.release([])
    finally:
        await transport.close()


async def test_the_broker_tells_what_it_is(kind: str, transport: Transport) -> None:
    word = {"sqs": "SQS", "amqp": "RabbitMQ 3", "kafka": "Kafka"}[kind]
    assert word in await transport.greet()


async def test_a_group_is_told_where_the_queue_is_fair_and_left_out_elsewhere(queue: Queue) -> None:
    report = await queue.send([Outgoing('"mine"', {}, "acme"), Outgoing('"nobodys"')])
    assert report.failed == []
    groups = {message.body: message.group for message in await take(queue, 2)}
    assert groups == {'"mine"': "acme" if queue.limits.fair_groups else None, '"nobodys"': None}
