"""Long polls of the embedded SQS: they end when a message comes, and one whose caller has left takes nothing."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from typing import Any

import pytest
from ministack.services import sqs

from penstock.local.sqs_server import SqsApp

RECEIVE, SEND = b"AmazonSQS.ReceiveMessage", b"AmazonSQS.SendMessage"


class Endpoint:
    """The part of ministack that a long poll meets: an ASGI app with one queue, which pauses between two looks.

    seconds: of a pause; looks: so many were made.
    """

    def __init__(self, seconds: float = 1000.0) -> None:
        self.app = SqsApp(self)
        self.messages: list[str] = []
        self.looks = 0
        self._seconds = seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        text = b""
        while True:
            event = await receive()
            text += event["body"]
            if not event.get("more_body"):
                break
        body = json.loads(text)
        answer: dict[str, Any] = {}
        if dict(scope["headers"])[b"x-amz-target"] == RECEIVE:
            deadline = time.monotonic() + body["WaitTimeSeconds"]
            while True:
                self.looks += 1
                if self.messages:
                    answer = {"Messages": [{"Body": self.messages.pop(0)}]}
                if answer or time.monotonic() >= deadline:
                    break
                await self.app.until_sent(min(self._seconds, deadline - time.monotonic()))
        else:
            self.messages.append(body["MessageBody"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


async def call(app: SqsApp, target: bytes, *, left: asyncio.Event | None = None, **body: Any) -> Any:
    """What the app answers, None for no answer. ``left``: set when the caller has left."""
    text = json.dumps(body).encode()
    headers = [(b"x-amz-target", target), (b"content-length", str(len(text)).encode())]
    events = [{"type": "http.request", "body": text[3:]}, {"type": "http.request", "body": text[:3], "more_body": True}]
    parts: list[bytes] = []

    async def receive() -> Any:
        if events:
            return events.pop()
        await (left or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(part: Any) -> None:
        parts.append(part.get("body", b""))

    await app({"type": "http", "method": "POST", "headers": headers}, receive, send)
    return json.loads(b"".join(parts)) if parts else None


async def until_waiting(endpoint: Endpoint, polls: int) -> None:
    while endpoint.looks < polls:
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)


async def test_a_long_poll_ends_with_the_message_that_is_sent_meanwhile() -> None:
    endpoint = Endpoint()
    poll = asyncio.create_task(call(endpoint.app, RECEIVE, WaitTimeSeconds=20))
    await until_waiting(endpoint, 1)
    assert not poll.done()
    await call(endpoint.app, SEND, MessageBody="hello")
    assert await asyncio.wait_for(poll, 10) == {"Messages": [{"Body": "hello"}]}
    assert endpoint.looks == 2


async def test_one_message_ends_one_of_two_long_polls() -> None:
    endpoint = Endpoint()
    polls = [asyncio.create_task(call(endpoint.app, RECEIVE, WaitTimeSeconds=20)) for _ in range(2)]
    await until_waiting(endpoint, 2)
    for text in ("first", "second"):
        await call(endpoint.app, SEND, MessageBody=text)
    answers = await asyncio.wait_for(asyncio.gather(*polls), 10)
    assert sorted(answer["Messages"][0]["Body"] for answer in answers) == ["first", "second"]


async def test_a_message_that_becomes_visible_by_time_is_found() -> None:
    endpoint = Endpoint(seconds=0.01)
    poll = asyncio.create_task(call(endpoint.app, RECEIVE, WaitTimeSeconds=20))
    await until_waiting(endpoint, 1)
    endpoint.messages.append("visible again")
    assert await asyncio.wait_for(poll, 10) == {"Messages": [{"Body": "visible again"}]}


async def test_a_long_poll_without_a_message_ends_empty_after_its_time() -> None:
    assert await asyncio.wait_for(call(Endpoint().app, RECEIVE, WaitTimeSeconds=0.05), 10) == {}


async def test_a_long_poll_whose_caller_has_left_takes_no_message() -> None:
    endpoint = Endpoint()
    left = asyncio.Event()
    poll = asyncio.create_task(call(endpoint.app, RECEIVE, left=left, WaitTimeSeconds=20))
    await until_waiting(endpoint, 1)
    left.set()
    assert await asyncio.wait_for(poll, 10) is None
    await call(endpoint.app, SEND, MessageBody="for others")
    assert await call(endpoint.app, RECEIVE, WaitTimeSeconds=20) == {"Messages": [{"Body": "for others"}]}


async def test_an_error_of_the_endpoint_is_raised() -> None:
    endpoint = Endpoint()
    with pytest.raises(KeyError, match="WaitTimeSeconds"):
        await call(endpoint.app, RECEIVE)


def test_the_pause_of_the_release_that_is_fetched_can_be_replaced() -> None:
    assert set(re.findall(r"\basyncio\.(\w+)", inspect.getsource(sqs))) == {"iscoroutine", "sleep"}
