"""The lean calls to SQS: a signature that is botocore's, and HTTP as servers may speak it."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import botocore.auth
import pytest
import trustme
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials, ReadOnlyCredentials
from botocore.exceptions import (
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    ReadTimeoutError,
)
from botocore.exceptions import SSLError as TlsError

from penstock.brokers.sqs import SqsTransport
from penstock.brokers.sqs_direct import Connections, DirectCalls, Signer
from penstock.protocol.errors import Unavailable
from penstock.settings.model import load_settings

NOW = datetime(2026, 2, 28, 23, 59, 58, tzinfo=UTC)
PATIENCE_SECONDS = 30
KEY = ReadOnlyCredentials("AKIA1", "secret/+=", None)

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


# Signature


def headers_of(head: str) -> dict[str, str]:
    lines = head.split("\r\n")[1:]
    return {name: value for name, _, value in (line.partition(": ") for line in lines if line)}


@pytest.mark.parametrize("token", [None, "a/token+of=a/role"])
@pytest.mark.parametrize(
    "url",
    [
        "https://sqs.eu-central-1.amazonaws.com/",
        "http://127.0.0.1:4566/",
        "http://[::1]:4566/",
        "https://example.org:443/behind/a path/./of%20its/../own",
        "http://user@LOCALHOST:80/",
    ],
)
def test_a_signature_is_the_one_of_botocore(monkeypatch: pytest.MonkeyPatch, url: str, token: str | None) -> None:
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: NOW)
    body = '{"QueueUrl":"q","é":"\U0001f600"}'.encode()
    signer = Signer(url, "eu-central-1", "sqs")
    for secret in ("first/+=", "second", "first/+="):  # a key of a day is kept
        head = signer.sign("ReceiveMessage", body, ReadOnlyCredentials("AKIA1", secret, token), NOW.timestamp())
        sent = headers_of(head)
        wanted = AWSRequest(
            "POST", url, data=body,
            headers={name: sent[name] for name in ("Content-Type", "x-amz-target", "x-amzn-query-mode")},
        )  # fmt: skip
        SigV4Auth(Credentials("AKIA1", secret, token), "sqs", "eu-central-1").add_auth(wanted)
        assert sent["Authorization"] == wanted.headers["Authorization"]
        assert sent["x-amz-date"] == wanted.headers["X-Amz-Date"]
        assert sent.get("x-amz-security-token") == token
        assert sent["x-amz-target"] == "AmazonSQS.ReceiveMessage"


# HTTP


@asynccontextmanager
async def serving(serve: Serve, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    scheme = "https" if context else "http"
    try:
        yield f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    finally:
        server.close()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))


def answering(answer: bytes, requests: list[bytes], *, piece: int = 1 << 20, at_most: int = 1 << 20) -> Serve:
    """Answers so many requests of a connection, each in pieces of so many bytes, and closes it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(at_most):
            requests.append(await read_request(reader))
            for at in range(0, len(answer), piece):
                writer.write(answer[at : at + piece])
                await writer.drain()
                await asyncio.sleep(0)

    return serve


def calls_to(
    url: str, *, answer_seconds: float = PATIENCE_SECONDS, context: ssl.SSLContext | None = None
) -> DirectCalls:
    connections = Connections(url, context, answer_seconds, connect_seconds=PATIENCE_SECONDS)
    return DirectCalls(connections, Signer(url, "us-east-1", "sqs"), known_key)


async def known_key() -> ReadOnlyCredentials:
    return KEY


def answer_of(body: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join((b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *headers, b"", body))


CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'4;name=value\r\n{"a"\r\n6\r\n:"\xc3\xa9"}\r\n0\r\nTrailer: x\r\n\r\n'
)
ANSWERS = {
    "with a length": answer_of('{"a":"é"}'.encode()),
    "in chunks": CHUNKED,
    "after an interim answer": b"HTTP/1.1 100 Continue\r\n\r\n" + answer_of('{"a":"é"}'.encode()),
    "with a half surrogate pair beside": answer_of(b'{"a":"\\u00e9","b":"\\ud800"}'),
}


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize("kind", ANSWERS)
async def test_an_answer_is_read_however_it_comes_and_the_connection_is_used_again(kind: str, piece: int) -> None:
    requests: list[bytes] = []
    connections = 0
    serve = answering(ANSWERS[kind], requests, piece=piece)

    async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await serve(reader, writer)

    async with serving(counted) as url:
        calls = calls_to(url)
        for n in range(3):
            assert (await calls.call("receive_message", QueueUrl="q", N=n))["a"] == "é"
        calls.connections.close()
    assert requests == [b'{"QueueUrl":"q","N":%d}' % n for n in range(3)]
    assert connections == 1


@pytest.mark.parametrize(
    "answer",
    [b'HTTP/1.1 200 OK\r\n\r\n{"a":1}', b'HTTP/1.0 200 OK\r\nContent-Length: 7\r\n\r\n{"a":1}',
     answer_of(b'{"a":1}', b"Connection: close"), answer_of(b'{"a":1}') + b"more", 2 * answer_of(b'{"a":1}')],
    ids=["by the end of the connection", "of HTTP/1.0", "said to be the last", "with more behind", "twice"],
)  # fmt: skip
async def test_a_last_answer_of_a_connection_is_read_and_the_next_call_opens_another(answer: bytes) -> None:
    requests: list[bytes] = []
    async with serving(answering(answer, requests, at_most=1)) as url:
        calls = calls_to(url)
        for _ in range(2):
            assert await calls.call("receive_message") == {"a": 1}
    assert len(requests) == 2


async def test_a_connection_that_was_closed_while_idle_costs_no_call() -> None:
    requests: list[bytes] = []
    async with serving(answering(answer_of(b"{}"), requests, at_most=1)) as url:
        calls = calls_to(url)
        for _ in range(5):
            await asyncio.gather(*(calls.call("receive_message") for _ in range(3)))
        calls.connections.close()
    assert len(requests) == 15


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (b"", ConnectionClosedError, "closed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", ConnectionClosedError, "closed"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", HTTPClientError, "not HTTP"),
        (answer_of(b"<html>hello</html>"), HTTPClientError, "not of SQS"),
        (answer_of(b"[1]"), HTTPClientError, "not of SQS"),
    ],
    ids=["no answer", "half an answer", "no HTTP", "a page", "a list"],
)
async def test_what_is_no_answer_is_an_error_of_the_sdk(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, error: type[Exception], text: str
) -> None:
    monkeypatch.setattr("penstock.brokers.sqs_direct._LONGEST_PAUSE_SECONDS", 0.001)
    requests: list[bytes] = []
    async with serving(answering(answer, requests, at_most=1)) as url:
        with pytest.raises(error, match=text):
            await calls_to(url).call("receive_message")


async def test_no_answer_in_time_is_tried_once_more_and_closes_both_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.brokers.sqs_direct._LONGEST_PAUSE_SECONDS", 0.001)
    ended: list[bytes] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        ended.append(await reader.read())

    async with serving(silent) as url:
        with pytest.raises(ReadTimeoutError):
            await calls_to(url, answer_seconds=0.05).call("receive_message")
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(ended) < 2:
                await asyncio.sleep(0.01)


async def test_a_call_that_is_cancelled_leaves_at_once() -> None:
    """So that an endpoint sees it, and keeps the messages for others."""
    asked, ended = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        asked.set()
        await reader.read()
        ended.set()

    async with serving(silent) as url:
        call = asyncio.create_task(calls_to(url).call("receive_message"))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asked.wait()
            call.cancel()
            await ended.wait()
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_an_endpoint_that_is_away_or_takes_no_connection_is_an_error_of_the_sdk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.brokers.sqs_direct._LONGEST_PAUSE_SECONDS", 0.001)
    with pytest.raises(EndpointConnectionError):
        await calls_to("http://127.0.0.1:1/").call("receive_message")

    async def never(*_: Any, **__: Any) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never)
    connections = Connections("http://127.0.0.1:1/", None, connect_seconds=0.01, answer_seconds=1)
    with pytest.raises(ConnectTimeoutError):
        await connections.exchange("", b"")


async def test_a_connection_is_opened_while_all_threads_of_the_loop_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are by look-ups of names whose servers do not answer; and an address that takes none is passed over."""
    look_up = socket.getaddrinfo

    def two(host: str, port: int, *where: Any, **how: Any) -> list[Any]:
        if host != "sqs.test":
            return look_up(host, port, *where, **how)
        return [found for address in ("127.0.0.2", "127.0.0.1") for found in look_up(address, port, *where, **how)]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    may_end = threading.Event()
    requests: list[bytes] = []
    busy = [asyncio.create_task(asyncio.to_thread(may_end.wait, 2 * PATIENCE_SECONDS)) for _ in range(40)]
    try:
        async with serving(answering(answer_of(b"{}"), requests)) as url:
            connections = Connections(url.replace("127.0.0.1", "sqs.test"), None, PATIENCE_SECONDS)
            calls = DirectCalls(connections, Signer(url, "us-east-1", "sqs"), known_key)
            assert await calls.call("receive_message") == {}
    finally:
        may_end.set()
        await asyncio.gather(*busy)


# TLS and proxies, set as for the SDK


@pytest.fixture
def authority(monkeypatch: pytest.MonkeyPatch) -> trustme.CA:
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    return trustme.CA()


@pytest.mark.parametrize("variable", ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", None])
async def test_a_certificate_is_checked_against_the_authorities_of_the_sdk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, authority: trustme.CA, variable: str | None
) -> None:
    monkeypatch.setattr("penstock.brokers.sqs_direct._LONGEST_PAUSE_SECONDS", 0.001)
    bundle = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(bundle)
    if variable:
        monkeypatch.setenv(variable, str(bundle))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    requests: list[bytes] = []
    async with serving(answering(answer_of(b"{}"), requests), context) as url:
        transport = SqsTransport(load_settings(sqs_endpoint_url=url, aws_region="us-east-1", sqs_access_key="a:b"))
        queue = transport.queue(f"{url}q", label="q")
        if variable:
            assert await queue.receive(wait_seconds=0, visibility_seconds=1) == []
            assert len(requests) == 1
        else:
            with pytest.raises(Unavailable, match="certificate verify failed") as raised:
                await queue.receive(wait_seconds=0, visibility_seconds=1)
            assert isinstance(raised.value.__cause__, TlsError)
            assert requests == []
        await transport.close()


async def test_behind_a_proxy_the_sdk_makes_all_calls(monkeypatch: pytest.MonkeyPatch, authority: trustme.CA) -> None:
    requests: list[bytes] = []
    async with serving(answering(answer_of(b"{}"), requests)) as url:
        monkeypatch.setenv("HTTP_PROXY", url)
        for endpoint, count in (("http://sqs.example", 1), ("http://other.example", 2)):
            settings = load_settings(sqs_endpoint_url=endpoint, aws_region="us-east-1", sqs_access_key="a:b")
            transport = SqsTransport(settings)
            client = await transport.client()
            assert "receive_message" not in vars(client)
            queue = transport.queue(f"{endpoint}/q", label="q")
            assert await queue.receive(wait_seconds=0, visibility_seconds=1) == []
            await transport.close()
            assert len(requests) == count
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        transport = SqsTransport(load_settings(sqs_endpoint_url=url, aws_region="us-east-1", sqs_access_key="a:b"))
        client = await transport.client()
        assert "receive_message" in vars(client)
        assert "get_queue_url" not in vars(client)
        await transport.close()
