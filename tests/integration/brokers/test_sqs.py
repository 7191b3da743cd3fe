from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from penstock.brokers.base import MAX_RECEIVES, Depth, Outgoing
from penstock.brokers.opening import create_queues
from penstock.brokers.sqs import LIMITS, SqsQueue, SqsTransport
from penstock.protocol.errors import Unavailable
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings, load_settings
from tests.integration.doors import Forward, SqsProxy, put, sample, sqs_proxy, take

MIB = 1_048_576


@pytest.fixture
def database_url() -> str:
    """No test here touches Postgres."""
    return "postgresql://nobody@127.0.0.1:1/none"


@pytest.fixture(params=["direct", "sdk"])
def settings(settings: Settings, request: pytest.FixtureRequest) -> Settings:
    """Every test here is made of both clients."""
    return settings.model_copy(update={"sqs_client": request.param})


@pytest.fixture
async def transport(settings: Settings) -> AsyncIterator[SqsTransport]:
    transport = transport_of(settings)
    yield transport
    await transport.close()


def transport_of(settings: Settings, *, endpoint_url: str | None = None) -> SqsTransport:
    update = {"sqs_endpoint_url": endpoint_url} if endpoint_url else {}
    return SqsTransport(settings.model_copy(update=update))


@pytest.fixture
def proxy(sqs_url: str) -> Iterator[SqsProxy]:
    with sqs_proxy(sqs_url) as proxy:
        yield proxy


@pytest.fixture
async def watched(settings: Settings, proxy: SqsProxy) -> AsyncIterator[SqsQueue]:
    """The outbound queue, reached through the proxy; its URL is known, so that only the calls of the test count."""
    transport = transport_of(settings, endpoint_url=proxy.url)
    queue = transport.queue(settings.outbound_queue, label="outbound")
    await queue.url()
    proxy.calls.clear()
    yield queue
    await transport.close()


def outgoing(*bodies: str) -> list[Outgoing]:
    return [Outgoing(body) for body in bodies]


# Limits of a call


async def test_any_number_of_messages_goes_in_calls_of_ten(watched: SqsQueue, proxy: SqsProxy) -> None:
    bodies = [json.dumps({"n": n}) for n in range(25)]
    report = await watched.send(outgoing(*bodies))
    assert (report.failed, report.reason, report.refused) == ([], None, frozenset())
    assert sorted(len(entries) for entries in proxy.entries("SendMessageBatch")) == [5, 10, 10]
    assert sorted(message.body for message in await take(watched)) == sorted(bodies)


async def test_a_call_stays_within_one_mebibyte_of_utf8(watched: SqsQueue, proxy: SqsProxy) -> None:
    bodies = [json.dumps(f"{n}" + "é" * 150_000, ensure_ascii=False) for n in range(8)]
    report = await watched.send([Outgoing(body, {"timeout_seconds": "30.0"}) for body in bodies])
    assert report.failed == []
    calls = proxy.entries("SendMessageBatch")
    sizes = [
        sum(len(e["MessageBody"].encode()) + len("timeout_seconds" + "30.0" + "String") for e in call) for call in calls
    ]
    assert max(sizes) <= MIB
    assert [len(call) for call in sorted(calls, key=lambda c: int(c[0]["Id"]))] == [3, 3, 2]
    assert {message.body for message in await take(watched)} == set(bodies)


async def test_a_message_of_exactly_the_limit_goes(outbound: SqsQueue) -> None:
    body = json.dumps("x" * (LIMITS.max_message_bytes - 2))
    await put(outbound, body, "{}")
    assert {message.body for message in await take(outbound)} == {body, "{}"}


async def test_nothing_to_do_makes_no_call(watched: SqsQueue, proxy: SqsProxy) -> None:
    assert (await watched.send([])).failed == []
    assert await watched.delete([]) == []
    assert await watched.extend([], 10) == []
    await watched.release([])
    assert proxy.calls == []


# Partial failures


async def test_an_oversize_message_fails_alone_and_for_good(outbound: SqsQueue) -> None:
    before = sample("penstock_messages_total", queue="outbound", direction="sent")
    report = await outbound.send(outgoing('"a"', json.dumps("x" * MIB), '"b"'))
    assert (report.failed, report.refused) == ([1], frozenset({1}))
    assert report.reason is not None
    assert "1048576" in report.reason
    assert {message.body for message in await take(outbound)} == {'"a"', '"b"'}
    assert sample("penstock_messages_total", queue="outbound", direction="sent") == before + 2


async def test_characters_that_sqs_refuses_fail_their_message_alone(outbound: SqsQueue) -> None:
    report = await outbound.send(outgoing('"a"', '"\x01"', '"b"'))
    assert (report.failed, report.refused) == ([1], frozenset({1}))
    assert report.reason is not None
    assert "InvalidMessageContents" in report.reason
    assert {message.body for message in await take(outbound)} == {'"a"', '"b"'}


async def test_characters_that_json_allows_and_sqs_does_not_arrive_as_they_were(outbound: SqsQueue) -> None:
    text = "\ufffe \uffff é \U0001f600 \\uffff"
    await put(outbound, json.dumps(text, ensure_ascii=False))
    (message,) = await take(outbound)
    assert json.loads(message.body) == text


def failing(ids: set[str], *, times: int, **fault: Any) -> Any:
    """A hook: so many times, entries of these ids fail with ``fault`` and never reach the queue."""
    left = [times]

    def hook(operation: str, request: dict[str, Any], forward: Forward) -> tuple[int, dict[str, Any]]:
        if not operation.endswith("Batch"):
            return forward(request)
        guilty = [entry for entry in request["Entries"] if entry["Id"] in ids] if left[0] else []
        others = [entry for entry in request["Entries"] if entry not in guilty]
        status, reply = forward(request | {"Entries": others}) if others else (200, {})
        if guilty:
            left[0] -= 1
            reply.setdefault("Failed", []).extend({"Id": entry["Id"], **fault} for entry in guilty)
        return status, reply

    return hook


async def test_an_entry_that_fails_for_the_queues_reasons_is_tried_once_more(
    watched: SqsQueue, proxy: SqsProxy
) -> None:
    proxy.hook = failing({"1", "3"}, times=1, Code="InternalError", SenderFault=False)
    assert (await watched.send(outgoing(*"01234"))).failed == []
    assert [[e["Id"] for e in call] for call in proxy.entries("SendMessageBatch")] == [list("01234"), ["1", "3"]]
    assert sorted(message.body for message in await take(watched)) == list("01234")


async def test_an_entry_that_keeps_failing_is_reported_but_may_go_later(watched: SqsQueue, proxy: SqsProxy) -> None:
    before = sample("penstock_sqs_calls_total", operation="send_message_batch", queue="outbound", outcome="partial")
    proxy.hook = failing({"2"}, times=99, Code="InternalError", Message="sorry", SenderFault=False)
    report = await watched.send(outgoing(*"01234"))
    assert (report.failed, report.refused, report.reason) == ([2], frozenset(), "InternalError: sorry")
    assert len(proxy.entries("SendMessageBatch")) == 2
    after = sample("penstock_sqs_calls_total", operation="send_message_batch", queue="outbound", outcome="partial")
    assert after == before + 2


async def test_an_entry_at_fault_itself_is_not_tried_again(watched: SqsQueue, proxy: SqsProxy) -> None:
    proxy.hook = failing({"2"}, times=99, Code="AccessDenied", SenderFault=True)
    report = await watched.send(outgoing(*"01234"))
    assert (report.failed, report.refused) == ([2], frozenset())
    assert len(proxy.entries("SendMessageBatch")) == 1


async def test_a_call_that_fails_whole_fails_its_entries_and_no_others(watched: SqsQueue, proxy: SqsProxy) -> None:
    def hook(operation: str, request: dict[str, Any], forward: Forward) -> tuple[int, dict[str, Any]]:
        if any(entry["Id"] == "12" for entry in request.get("Entries", ())):
            return 503, {"__type": "ServiceUnavailable", "message": "busy"}
        return forward(request)

    proxy.hook = hook
    report = await watched.send(outgoing(*(str(n) for n in range(25))))
    assert (report.failed, report.refused) == (list(range(10, 20)), frozenset())
    assert report.reason is not None
    assert "busy" in report.reason
    assert len(await take(watched)) == 15


async def test_a_call_refused_for_what_it_holds_is_repeated_message_by_message(
    watched: SqsQueue, proxy: SqsProxy
) -> None:
    def hook(operation: str, request: dict[str, Any], forward: Forward) -> tuple[int, dict[str, Any]]:
        if any(entry["MessageBody"] == '"bad"' for entry in request.get("Entries", ())):
            return 400, {"__type": "com.amazonaws.sqs#BatchRequestTooLong", "message": "too long"}
        return forward(request)

    proxy.hook = hook
    report = await watched.send(outgoing('"a"', '"bad"', '"b"'))
    assert (report.failed, report.refused) == ([1], frozenset({1}))
    assert {message.body for message in await take(watched)} == {'"a"', '"b"'}


async def test_a_queue_with_a_smaller_limit_of_its_own_refuses_what_is_above(
    settings: Settings, transport: SqsTransport, outbound: SqsQueue
) -> None:
    client = await transport.client()
    await client.set_queue_attributes(QueueUrl=await outbound.url(), Attributes={"MaximumMessageSize": "1024"})
    report = await outbound.send(outgoing('"a"', json.dumps("x" * 1024)))
    assert (report.failed, report.refused) == ([1], frozenset({1}))


# Receive, delete, extend, release, depth


async def test_a_received_message_is_hidden_and_comes_again_with_a_new_receipt(outbound: SqsQueue) -> None:
    report = await outbound.send([Outgoing('"a"', {"timeout_seconds": "1.5", "k": "v"})])
    assert report.failed == []
    (first,) = await outbound.receive(wait_seconds=0, visibility_seconds=30)
    assert await outbound.receive(wait_seconds=0, visibility_seconds=30) == []
    await outbound.release([first])
    (again,) = await outbound.receive(wait_seconds=0, visibility_seconds=30)
    assert (first.id, first.body, first.attributes) == (again.id, '"a"', {"timeout_seconds": "1.5", "k": "v"})
    assert first.receipt != again.receipt
    assert (first.receive_count, again.receive_count) == (1, 2)
    assert first.sent_at is not None
    assert first.sent_at == again.sent_at


async def test_a_receive_brings_ten_at_the_most(outbound: SqsQueue) -> None:
    await put(outbound, *(str(n) for n in range(12)))
    assert len(await outbound.receive(wait_seconds=0, visibility_seconds=30)) == 10
    assert len(await outbound.receive(wait_seconds=0, visibility_seconds=30)) == 2


async def test_a_long_poll_gets_what_is_sent_meanwhile(outbound: SqsQueue) -> None:
    waiting = asyncio.create_task(outbound.receive(wait_seconds=20, visibility_seconds=30))
    await put(outbound, '"late"')
    assert [message.body for message in await waiting] == ['"late"']


async def test_deleted_messages_never_come_again(outbound: SqsQueue) -> None:
    await put(outbound, *(str(n) for n in range(23)))
    assert await outbound.delete(await take(outbound)) == []
    assert await outbound.depth() == Depth(0, 0, 0)


async def test_deleting_with_an_old_receipt_fails_for_that_message_alone(outbound: SqsQueue) -> None:
    await put(outbound, '"a"', '"b"')
    old = await take(outbound)
    await outbound.release([message for message in old if message.body == '"a"'])
    (new,) = await take(outbound)
    assert await outbound.delete(old) == [message for message in old if message.body == '"a"']
    assert await outbound.depth() == Depth(0, 1, 0)
    assert await outbound.delete([new]) == []


async def test_an_extended_message_stays_hidden_while_another_comes_again(outbound: SqsQueue) -> None:
    await put(outbound, '"held"', '"released"')
    messages = {message.body: message for message in await take(outbound, visibility_seconds=1)}
    assert await outbound.extend([messages['"held"']], 60) == []
    again = await outbound.receive(wait_seconds=20, visibility_seconds=30)
    assert [message.body for message in again] == ['"released"']
    assert await outbound.depth() == Depth(0, 2, 0)


async def test_extending_a_message_that_is_gone_tells_that_the_hold_is_lost(outbound: SqsQueue) -> None:
    await put(outbound, *(str(n) for n in range(12)))
    messages = await take(outbound)
    await outbound.delete(messages[3:5])
    assert await outbound.extend(messages, 60) == messages[3:5]


async def test_depth_tells_visible_from_held(outbound: SqsQueue) -> None:
    await put(outbound, *(str(n) for n in range(13)))
    await outbound.receive(wait_seconds=0, visibility_seconds=30)
    depth = await outbound.depth()
    assert depth == Depth(visible=3, in_flight=10, delayed=0)
    assert depth.total == 13


# Errors


def refusing(status: int, reply: Any, calls: list[str]) -> Any:
    def hook(operation: str, request: dict[str, Any], forward: Forward) -> tuple[int, Any]:
        calls.append(operation)
        return status, reply

    return hook


@pytest.mark.parametrize(
    ("status", "reply", "code", "calls"),
    [
        (400, {"__type": "com.amazonaws.sqs#QueueDoesNotExist", "message": "gone"}, "QueueDoesNotExist", 1),
        (400, {"__type": "com.amazonaws.sqs#InvalidMessageContents", "Message": "x"}, "InvalidMessageContents", 1),
        (400, {"__type": "ThrottlingException", "message": "slow"}, "ThrottlingException", 2),
        (403, {"__type": "com.amazonaws.sqs#RequestThrottled", "message": "slow"}, "RequestThrottled", 2),
        (403, {"__type": "RequestTimeTooSkewed", "message": "now is not then"}, "RequestTimeTooSkewed", 1),
        (403, {"__type": "SignatureDoesNotMatch", "message": "no"}, "SignatureDoesNotMatch", 1),
        (307, {"message": "elsewhere"}, "307", 1),
        (500, {"__type": "InternalFailure", "message": "sorry"}, "InternalFailure", 2),
        (503, {}, "503", 2),
    ],
)
async def test_errors_are_named_and_tried_again_as_by_the_sdk(
    settings: Settings, watched: SqsQueue, proxy: SqsProxy, monkeypatch: pytest.MonkeyPatch,
    status: int, reply: dict[str, str], code: str, calls: int,
) -> None:  # fmt: skip
    monkeypatch.setattr("penstock.brokers.sqs_direct._LONGEST_PAUSE_SECONDS", 0.001)
    made: list[str] = []
    proxy.hook = refusing(status, reply, made)
    transport = transport_of(settings, endpoint_url=proxy.url)
    try:
        client = await transport.client()
        with pytest.raises(ClientError) as raised:
            await client.receive_message(QueueUrl="http://127.0.0.1/q")
    finally:
        await transport.close()
    assert made == ["ReceiveMessage"] * calls
    assert raised.value.response["Error"]["Code"] == code
    message = reply.get("message") or reply.get("Message") or ""
    assert str(raised.value).startswith(f"An error occurred ({code}) when calling the ReceiveMessage operation")
    assert str(raised.value).endswith(f": {message}")


async def test_neither_client_shows_its_secrets(
    watched: SqsQueue, proxy: SqsProxy, monkeypatch: pytest.MonkeyPatch, settings: Settings,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-show-this")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "nor-this-token")
    proxy.hook = refusing(403, {"__type": "SignatureDoesNotMatch", "message": "no"}, [])
    transport = transport_of(settings, endpoint_url=proxy.url)
    caplog.set_level("DEBUG", "penstock")
    try:
        with pytest.raises(Unavailable) as raised:
            await transport.queue("http://127.0.0.1/q", label="q").receive(wait_seconds=0, visibility_seconds=1)
    finally:
        await transport.close()
    shown = f"{raised.value!r} {raised.value.__cause__!r} {caplog.text}"
    assert "SignatureDoesNotMatch" in shown
    assert "do-not-show-this" not in shown
    assert "nor-this-token" not in shown


# Queue or endpoint away


async def test_a_missing_queue_names_itself_and_the_next_step_and_is_found_once_it_exists(
    settings: Settings, transport: SqsTransport
) -> None:
    name = f"{settings.outbound_queue}-later"
    queue = transport.queue(name, label="outbound")
    with pytest.raises(Unavailable, match=f"'{name}' does not exist.*terraform.*create-queues"):
        await queue.depth()
    report = await queue.send(outgoing("1"))
    assert (report.failed, report.refused) == ([0], frozenset())
    await (await transport.client()).create_queue(QueueName=name)
    await put(queue, "1")
    assert (await queue.depth()).visible == 1


async def test_a_queue_that_is_deleted_and_made_anew_is_found_again(
    transport: SqsTransport, outbound: SqsQueue
) -> None:
    client = await transport.client()
    url = await outbound.url()
    await client.delete_queue(QueueUrl=url)
    with pytest.raises(Unavailable, match="does not exist"):
        await outbound.receive(wait_seconds=0, visibility_seconds=30)
    await client.create_queue(QueueName=url.rsplit("/", 1)[1])
    await put(outbound, "1")


async def test_a_queue_may_be_given_by_its_url(transport: SqsTransport, outbound: SqsQueue) -> None:
    await put(transport.queue(await outbound.url(), label="outbound"), "1")
    assert [message.body for message in await take(outbound)] == ["1"]


async def test_an_endpoint_that_is_away_is_unavailable_and_loses_nothing(
    settings: Settings, outbound: SqsQueue
) -> None:
    await put(outbound, "1")
    held = await take(outbound)
    before = sample("penstock_sqs_calls_total", operation="receive_message", queue="away", outcome="failed")
    transport = transport_of(settings, endpoint_url="http://127.0.0.1:1")
    away = transport.queue("http://127.0.0.1:1/000000000000/q", label="away")
    try:
        for call in (away.depth(), away.receive(wait_seconds=0, visibility_seconds=30)):
            with pytest.raises(Unavailable, match="SQS is unavailable"):
                await call
        report = await away.send(outgoing("1", "2"))
        assert (report.failed, report.refused) == ([0, 1], frozenset())
        assert await away.delete(held) == held
        assert await away.extend(held, 10) == held
        await away.release(held)
    finally:
        await transport.close()
    after = sample("penstock_sqs_calls_total", operation="receive_message", queue="away", outcome="failed")
    assert after == before + 1


async def test_missing_credentials_are_said_plainly(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    transport = transport_of(settings)
    try:
        with pytest.raises(Unavailable, match="credentials"):
            await transport.queue(settings.outbound_queue, label="outbound").depth()
    finally:
        await transport.close()


async def test_credentials_that_come_later_are_found(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("penstock.runtime.aws._RENEW_SECONDS", 0.0)
    monkeypatch.setenv("HOME", str(tmp_path))
    transport = transport_of(settings)
    queue = transport.queue(settings.outbound_queue, label="outbound")
    try:
        with monkeypatch.context() as without:
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                without.delenv(name)
            with pytest.raises(Unavailable, match="credentials"):
                await queue.depth()
        assert (await queue.depth()).visible == 0
    finally:
        await transport.close()


async def test_a_missing_region_is_said_plainly(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    transport = SqsTransport(load_settings(sqs_client=settings.sqs_client))
    try:
        with pytest.raises(Unavailable, match="region"):
            await transport.queue(settings.outbound_queue, label="outbound").depth()
    finally:
        await transport.close()


# Making the queues, counting the bill


async def test_queues_made_twice_keep_what_they_hold_and_have_dead_letter_queues(
    settings: Settings, transport: SqsTransport, inbound: SqsQueue
) -> None:
    await put(inbound, '"kept"')
    urls = await create_queues(settings)
    assert set(urls) == {"inbound", "outbound", "results"}
    client = await transport.client()
    for url in urls.values():
        attributes = (await client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"]))["Attributes"]
        policy = json.loads(attributes["RedrivePolicy"])
        assert int(policy["maxReceiveCount"]) == MAX_RECEIVES
        assert policy["deadLetterTargetArn"] == attributes["QueueArn"] + DEAD_LETTER_SUFFIX
        assert attributes["VisibilityTimeout"] == str(settings.visibility_timeout_seconds)
        dead = await client.get_queue_attributes(QueueUrl=url + DEAD_LETTER_SUFFIX, AttributeNames=["All"])
        assert int(dead["Attributes"]["MessageRetentionPeriod"]) > int(attributes["MessageRetentionPeriod"])
    assert [message.body for message in await take(inbound)] == ['"kept"']


async def test_a_message_received_too_often_goes_to_the_dead_letter_queue(
    settings: Settings, transport: SqsTransport, inbound: SqsQueue
) -> None:
    await put(inbound, '"poison"')
    for _ in range(MAX_RECEIVES):
        (message,) = await inbound.receive(wait_seconds=0, visibility_seconds=30)
        await inbound.release([message])
    assert await inbound.receive(wait_seconds=0, visibility_seconds=30) == []
    dead = transport.queue(settings.inbound_queue + DEAD_LETTER_SUFFIX, label="inbound-dlq")
    assert [message.body for message in await take(dead)] == ['"poison"']


async def test_the_bill_counts_each_started_64_kibibytes(outbound: SqsQueue) -> None:
    labels = {"operation": "send_message_batch", "queue": "outbound"}
    before = sample("penstock_sqs_billed_units_total", **labels)
    await put(outbound, *(json.dumps("x" * 10_000) for _ in range(10)))
    assert sample("penstock_sqs_billed_units_total", **labels) == before + 2
    await put(outbound, "1")
    assert sample("penstock_sqs_billed_units_total", **labels) == before + 3
