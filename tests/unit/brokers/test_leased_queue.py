"""What the queues of RabbitMQ and Kafka share: reports of sends, and a reader that is opened again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.brokers.base import Message, Outgoing, SendReport, Unsent
from penstock.brokers.leases import LeasedQueue, LeasingTransport, Reader
from penstock.brokers.sqs import LIMITS
from penstock.protocol.errors import Unavailable


class FakeReader(Reader[str]):
    async def receive(self, wait_seconds: float, visibility_seconds: float) -> list[Message]:
        self.lease("r", "m", visibility_seconds)
        return [Message("m", "r", "{}", 1, None, {})]

    async def settle(self, messages: Sequence[str], *, delete: bool) -> bool:
        assert delete  # no lease ends by time
        return True

    async def close(self) -> None:
        self.drop_all_leases()


class FakeTransport(LeasingTransport):
    broker, sending, header_bytes = "fake", "send", 6

    def __init__(self) -> None:
        super().__init__(replace(LIMITS, max_message_bytes=10))
        self.opened: list[FakeReader] = []
        self.failures = 0

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> list[Unsent | None]:
        return [("not now", False) if message.body == "later" else None for message in messages]

    async def open_reader(self, name: str) -> FakeReader:
        if self.failures:
            self.failures -= 1
            raise Unavailable("the channel was lost while it was opened")
        self.opened.append(FakeReader())
        return self.opened[-1]

    async def count_ready(self, name: str) -> int:
        return 0


async def receive(queue: LeasedQueue) -> list[Message]:
    return await queue.receive(wait_seconds=0, visibility_seconds=30)


async def test_a_report_names_what_was_not_sent_and_what_never_will_be() -> None:
    messages = [Outgoing(body) for body in ("sent", "x" * 11, "later", "sent too")]
    report = await FakeTransport().queue("q", label="fake").send(messages)
    assert report == SendReport([1, 2], "a message of 11 bytes is over the limit of 10", frozenset({1}))


async def test_headers_count_towards_a_messages_size() -> None:
    report = (
        await FakeTransport().queue("q", label="fake").send([Outgoing("ab", {"n": "v"}), Outgoing("abc", {"n": "v"})])
    )
    assert report.failed == [1]


async def test_a_reader_that_could_not_be_opened_is_opened_by_the_next_receive() -> None:
    transport = FakeTransport()
    transport.failures = 1
    queue = transport.queue("q", label="fake")
    with pytest.raises(Unavailable):
        await receive(queue)
    (message,) = await receive(queue)
    assert await queue.delete([message]) == []
    assert await queue.delete([message]) == [message]  # its lease has ended
    await queue.close()


async def test_leases_of_a_closed_reader_have_ended_and_another_one_is_opened() -> None:
    transport = FakeTransport()
    queue = transport.queue("q", label="fake")
    (message,) = await receive(queue)
    assert await queue.extend([message], 30) == []
    transport.opened[0].closed = "the connection was lost"
    await transport.opened[0].close()
    assert await queue.extend([message], 30) == [message]
    await receive(queue)
    assert len(transport.opened) == 2
    await queue.close()
    assert await queue.extend([message], 30) == [message]
