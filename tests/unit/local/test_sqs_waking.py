"""Long polls of the embedded SQS: they end when a message comes, and one whose caller has left takes nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from penstock.local import sqs_server
from penstock.local.sqs_server import SqsApp

RECEIVE, SEND = b"AmazonSQS.ReceiveMessage", b"AmazonSQS.SendMessage"


class Endpoint:
    """The part of an SQS endpoint that a long poll meets: an ASGI app with one queue, which never waits itself."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.waits: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        text = b""
        while True:
            event = await receive()
            text += event["body"]
            if not event.get("more_body"):
                break
        body = json.loads(text)
        headers = dict(scope["headers"])
        assert int(headers[b"content-length"]) == len(json.dumps(body))
        answer: dict[str, Any] = {}
        if headers[b"x-amz-target"] == RECEIVE:
            self.waits.append(body.get("WaitTimeSeconds"))
            if self.messages:
                answer = {"Messages": [{"Body": self.messages.pop(0)}]}
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


@pytest.fixture
def never_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a message that is sent can end a long poll."""
    monkeypatch.setattr(sqs_server, "_LOOK_SECONDS", 1000.0)


async def until_waiting(endpoint: Endpoint, polls: int) -> None:
    while len(endpoint.waits) < polls:
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)


async def test_a_long_poll_ends_with_the_message_that_is_sent_meanwhile(never_looks: None) -> None:
    endpoint = Endpoint()
    app = SqsApp(endpoint)
    poll = asyncio.create_task(call(app, RECEIVE, WaitTimeSeconds=20))
    await until_waiting(endpoint, 1)
    assert not poll.done()
    await call(app, SEND, MessageBody="hello")
    assert await asyncio.wait_for(poll, 10) == {"Messages": [{"Body": "hello"}]}
    assert endpoint.waits == [0, 0], "the endpoint itself is never asked to wait"


async def test_one_message_ends_one_of_two_long_polls(never_looks: None) -> None:
    endpoint = Endpoint()
    app = SqsApp(endpoint)
    polls = [asyncio.create_task(call(app, RECEIVE, WaitTimeSeconds=20)) for _ in range(2)]
    await until_waiting(endpoint, 2)
    for text in ("first", "second"):
        await call(app, SEND, MessageBody=text)
    answers = await asyncio.wait_for(asyncio.gather(*polls), 10)
    assert sorted(answer["Messages"][0]["Body"] for answer in answers) == ["first", "second"]


async def test_a_message_that_becomes_visible_by_time_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqs_server, "_LOOK_SECONDS", 0.01)
    endpoint = Endpoint()
    poll = asyncio.create_task(call(SqsApp(endpoint), RECEIVE, WaitTimeSeconds=20))
    await until_waiting(endpoint, 1)
    endpoint.messages.append("visible again")
    assert await asyncio.wait_for(poll, 10) == {"Messages": [{"Body": "visible again"}]}


async def test_a_long_poll_without_a_message_ends_empty_after_its_time() -> None:
    assert await asyncio.wait_for(call(SqsApp(Endpoint()), RECEIVE, WaitTimeSeconds=0.05), 10) == {}


async def test_a_long_poll_whose_caller_has_left_takes_no_message(never_looks: None) -> None:
    endpoint = Endpoint()
    app = SqsApp(endpoint)
    left = asyncio.Event()
    poll = asyncio.create_task(call(app, RECEIVE, left=left, WaitTimeSeconds=20))
    await until_waiting(endpoint, 1)
    left.set()
    assert await asyncio.wait_for(poll, 10) is None
    await call(app, SEND, MessageBody="for others")
    assert await call(app, RECEIVE, WaitTimeSeconds=20) == {"Messages": [{"Body": "for others"}]}


@pytest.mark.parametrize("asked", [{}, {"WaitTimeSeconds": 0}, {"WaitTimeSeconds": 21}, {"WaitTimeSeconds": -1}])
async def test_a_receive_without_a_lawful_wait_is_passed_on_as_it_came(asked: dict[str, int]) -> None:
    endpoint = Endpoint()
    assert await call(SqsApp(endpoint), RECEIVE, **asked) == {}
    assert endpoint.waits == [asked.get("WaitTimeSeconds")]
