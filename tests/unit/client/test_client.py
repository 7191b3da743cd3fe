"""What clients do on their own; tests/integration/client/test_client_calls.py has them talk to an api and a queue."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from datetime import datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import MappingProxyType, SimpleNamespace
from typing import Any, Self

import httpx
import pytest
from pydantic import SecretStr

from penstock.brokers.base import Outgoing, SendReport
from penstock.brokers.sqs import LIMITS
from penstock.client.async_client import AsyncClient
from penstock.client.client import Client
from penstock.client.exchanges import EventReader, Unfinished, answer_of, downloaded, enqueueing, error_of, request_text
from penstock.client.inbound import InboundClient
from penstock.client.results import AsyncResults
from penstock.payloads.codec import offered_aad
from penstock.protocol.errors import (
    InvalidParams,
    MethodNotFound,
    PayloadLost,
    PayloadUnavailable,
    RpcError,
    SettingsError,
    StateConflict,
    TaskNotFound,
    TooLarge,
    TooManyWaits,
    Unavailable,
)
from penstock.settings.model import load_settings
from penstock.settings.payload_texts import new_key


@pytest.fixture
def strange_server() -> Iterator[str]:
    """A web server that is no api; the path chooses what it answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = {
                "/html/rpc": (404, b"<h1>not here</h1>"),
                "/json/rpc": (200, b'"hello"'),
                "/away/rpc": (
                    503,
                    b'{"jsonrpc":"2.0","error":{"code":-32603,"message":"x","data":{"ref":"r1"}},"id":0}',
                ),
                "/proxy/rpc": (503, b"upstream is gone"),
            }[self.path]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            return None

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_client_finds_the_api_and_its_key_in_the_environment(
    kind: type[Client] | type[AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_API_URL", "https://penstock.example.org/rpc")
    monkeypatch.setenv("PENSTOCK_API_KEY", "k-env")
    found, given, without = kind(), kind("http://other.example.org", "k-given"), kind(api_key="")
    assert found.url == "https://penstock.example.org"
    assert given.url == "http://other.example.org"
    assert [client._http.headers.get("Authorization") for client in (found, given, without)] == [
        "Bearer k-env", "Bearer k-given", None,
    ]  # fmt: skip
    for name in ("PENSTOCK_API_URL", "PENSTOCK_API_KEY"):
        monkeypatch.delenv(name)
    assert kind().url == "http://127.0.0.1:8080"
    assert "Authorization" not in kind()._http.headers


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_what_is_from_a_file_is_read_without_its_newline_and_no_wrong_key_is_shown(
    kind: type[Client] | type[AsyncClient],
) -> None:
    assert kind(api_key=" k-given\n")._http.headers["Authorization"] == "Bearer k-given"
    assert kind("http://other.example.org/rpc\n").url == "http://other.example.org"
    for wrong in ("k-given\nk-older", "k-gïven"):
        with pytest.raises(SettingsError, match="the API key holds a line break") as raised:
            kind(api_key=wrong)
        assert "k-g" not in str(raised.value)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_the_user_and_password_of_a_url_are_sent_and_not_shown(
    kind: type[Client] | type[AsyncClient], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    client = kind("http://ann:p%40ss@127.0.0.1:1/base")
    assert client.url == "http://127.0.0.1:1/base"
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(503, text="away")

    client._http._transport = httpx.MockTransport(answer)
    with pytest.raises(Unavailable) as raised:
        await asking if inspect.isawaitable(asking := client.stats()) else asking
    assert seen[0].headers["Authorization"] == f"Basic {base64.b64encode(b'ann:p@ss').decode()}"
    assert str(seen[0].url) == "http://127.0.0.1:1/base/rpc"
    assert "p%40ss" not in f"{raised.value} {caplog.text}"
    with pytest.raises(SettingsError, match="%2F") as refused:
        kind("http://ann:pa/ss@127.0.0.1:1")
    assert "ss@" not in str(refused.value)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (-32601, MethodNotFound),
        (-32602, InvalidParams),
        (-32004, TaskNotFound),
        (-32009, StateConflict),
        (-32013, TooLarge),
        (-32603, RpcError),
        (4711, RpcError),
    ],
)
def test_error_of_a_known_code_has_its_class_and_keeps_code_message_and_data(code: int, kind: type[RpcError]) -> None:
    error = error_of({"code": code, "message": "why", "data": {"field": "x"}})
    assert type(error) is kind
    assert (error.code, error.message, error.data, str(error)) == (code, "why", {"field": "x"}, "why")


def test_codes_of_the_classes_stay_untouched_by_an_answer() -> None:
    error_of({"code": 4711, "message": "why"})
    assert RpcError.code == -32603


def test_unreachable_api_is_unavailable_and_its_url_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with Client(url) as client, pytest.raises(Unavailable, match=rf"{url} .*penstock up"):
            client.stats()


def test_api_that_does_not_answer_in_time_is_unavailable() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Client(url, timeout=0.05) as client, pytest.raises(Unavailable, match="did not answer in time"):
            client.stats()


@pytest.mark.parametrize("path", ["html", "json"])
def test_server_that_is_no_api_is_told_apart(strange_server: str, path: str) -> None:
    with Client(f"{strange_server}/{path}/rpc") as client, pytest.raises(Unavailable, match="check the URL"):
        client.stats()


def test_api_without_its_database_is_unavailable_with_the_reference(strange_server: str) -> None:
    with Client(f"{strange_server}/away") as client, pytest.raises(Unavailable, match="r1"):
        client.enqueue("a")
    with Client(f"{strange_server}/proxy") as client, pytest.raises(Unavailable, match="try again later"):
        client.enqueue("a")


@pytest.mark.parametrize("status", [200, 404, 410, 502, 503])
@pytest.mark.parametrize("content", [
    b'{"error":"Service Unavailable"}', b'{"error":["x"]}', b'{"error":null}', b'{"error":7}', b'{"error":{}}',
    b'{"jsonrpc":"2.0","error":"x","id":0}', b"{}", b'["x"]', b"[]", b"7", b"null", b"{", b"",
])  # fmt: skip
def test_an_answer_of_any_other_shape_is_none_of_an_api(status: int, content: bytes) -> None:
    with pytest.raises(Unavailable):
        answer_of("http://api.example.org", status, content)
    if status != 200 or content in (b"{", b""):
        with pytest.raises(PayloadLost if status == 410 else PayloadUnavailable):
            downloaded(status, content)


def test_payload_that_is_no_json_is_refused_before_it_is_sent() -> None:
    with Client("http://127.0.0.1:1") as client:
        with pytest.raises(ValueError, match="JSON compliant"):
            client.enqueue("a", {"x": float("nan")})
        with pytest.raises(TypeError, match=r"_thread\.lock is not JSON-serialisable"):
            client.enqueue("a", {"x": threading.Lock()})


def test_a_mapping_that_is_no_dict_is_an_object() -> None:
    params = {"labels": MappingProxyType({"team": "a"}), "payload": [MappingProxyType({3: Decimal("1.5")})]}
    sent = json.loads(request_text("enqueue", params, None))["params"]
    assert sent == {"labels": {"team": "a"}, "payload": [{"3": "1.5"}]}
    with pytest.raises(TypeError, match="holds a secret"):
        request_text("enqueue", {"payload": MappingProxyType({"key": SecretStr("s")})}, None)


def test_run_at_without_a_zone_is_refused_before_it_is_sent() -> None:
    with Client("http://127.0.0.1:1") as client, pytest.raises(ValueError, match="needs a zone"):
        client.enqueue("a", run_at=datetime(2030, 1, 1))


def test_nothing_to_send_needs_no_api() -> None:
    with Client("http://127.0.0.1:1") as client:
        assert client.batch([]) == []
        assert client.enqueue_many([]) == []


async def test_task_that_no_message_can_hold_is_refused_before_any_is_sent() -> None:
    async with InboundClient("http://127.0.0.1:1/queue", endpoint_url="http://127.0.0.1:1") as client:
        with pytest.raises(TooLarge, match="1048576"):
            await client.enqueue_many([{"action": "a"}, {"action": "a", "payload": ["x" * 2**20]}])


async def test_unsent_tasks_are_sent_again_with_their_payloads_although_they_are_encrypted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.client.inbound._FIRST_PAUSE_SECONDS", 0.001)
    bodies: list[str] = []
    refused = SendReport([0], "not now")

    async def send(messages: Sequence[Outgoing]) -> SendReport:
        bodies.extend(message.body for message in messages)
        return refused

    settings = load_settings(payload_keys=new_key())
    async with InboundClient("http://127.0.0.1:1/queue", "http://127.0.0.1:1", payloads=settings) as client:
        monkeypatch.setattr(client, "_queue", SimpleNamespace(limits=LIMITS, send=send))
        with pytest.raises(Unfinished) as caught:
            await client.enqueue("a", {"n": 1})
        refused = SendReport([], None)
        assert await client.enqueue_many(caught.value.unsent) == 1
        params = json.loads(bodies[-1])["params"]
        sealed = json.dumps(params["sealed_payload"])
        assert json.loads(client._codec.decode_inline(sealed, offered_aad("a", None))) == {"n": 1}
    assert params.keys() == {"action", "sealed_payload"}
    assert caught.value.unsent == [{"action": "a", "payload": {"n": 1}}]


async def test_a_task_that_send_adds_is_encrypted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[str] = []

    async def send(messages: Sequence[Outgoing]) -> SendReport:
        bodies.extend(message.body for message in messages)
        return SendReport([], None)

    settings = load_settings(payload_keys=new_key())
    async with InboundClient("http://127.0.0.1:1/queue", "http://127.0.0.1:1", payloads=settings) as client:
        monkeypatch.setattr(client, "_queue", SimpleNamespace(limits=LIMITS, send=send))
        await client.send("enqueue", {"action": "a", "payload": {"n": 1}})
        params = json.loads(bodies[-1])["params"]
        assert params.keys() == {"action", "sealed_payload"}
        sealed = json.dumps(params["sealed_payload"])
        assert json.loads(client._codec.decode_inline(sealed, offered_aad("a", None))) == {"n": 1}


def test_client_loads_no_database_driver() -> None:
    code = (
        "import sys, penstock.client.client; "
        "print([m for m in ('asyncpg', 'sqlalchemy', 'aiobotocore') if m in sys.modules])"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []


def test_tasks_that_an_api_without_its_database_did_not_take_are_unsent() -> None:
    exchange = enqueueing([{"action": "a"}, {"action": "b"}])
    next(exchange)
    away = {"code": -32603, "message": "Temporarily unavailable, try again", "data": {"ref": "r"}}
    good = {"id": 1, "state": "SCHEDULED", "duplicate": False}
    with pytest.raises(Unfinished, match="1 of 2 tasks were not accepted: Temporarily") as caught:
        exchange.send([{"jsonrpc": "2.0", "id": 0, "result": good}, {"jsonrpc": "2.0", "id": 1, "error": away}])
    assert (caught.value.unsent, caught.value.results[0]) == ([{"action": "b"}], good)


def test_tasks_that_the_api_cannot_read_are_refused_alone() -> None:
    exchange = enqueueing([{"action": "deep"}, {"action": "a"}, {"action": "deep"}])
    next(exchange)
    deep = {"code": -32700, "message": "Parse error: nested too deeply"}  # so that their ids are not read either
    good = {"id": 1, "state": "SCHEDULED", "duplicate": False}
    answers = [{"id": None, "error": deep}, {"id": 1, "result": good}, {"id": None, "error": deep}]
    with pytest.raises(StopIteration) as end:
        exchange.send(answers)
    first, second, third = end.value.value
    assert (first.code, second, third.code) == (-32700, good, -32700)


async def test_results_come_while_tasks_are_awaited_one_after_the_other() -> None:
    async def answer(exchange: Any) -> Any:
        body, _ = next(exchange)
        await asyncio.sleep(0.05)  # as an api that gathers answers
        found = [{"id": n, "state": "SUCCESS", "result": n, "error": None} for n in json.loads(body)["params"]["ids"]]
        with pytest.raises(StopIteration) as end:
            exchange.send({"jsonrpc": "2.0", "id": 0, "result": found})
        return end.value.value

    results, awaiting = AsyncResults(answer, 30), []
    for n in range(1, 101):
        awaiting.append(asyncio.ensure_future(results.outcome(n, None)))
        await asyncio.sleep(0.01)
    assert awaiting[0].done()
    await asyncio.gather(*awaiting)


async def test_an_api_that_takes_no_more_waits_is_asked_for_what_has_settled() -> None:
    timeouts = []

    async def answer(exchange: Any) -> Any:
        body, _ = next(exchange)
        params = json.loads(body)["params"]
        timeouts.append(params["timeout"])
        if params["timeout"]:
            raise TooManyWaits("tasks", 1)
        found = [{"id": n, "state": "SUCCESS", "result": n, "error": None} for n in params["ids"]]
        with pytest.raises(StopIteration) as end:
            exchange.send({"jsonrpc": "2.0", "id": 0, "result": found})
        return end.value.value

    results = AsyncResults(answer, 30)
    async with asyncio.timeout(20):
        assert (await results.outcome(1, None))["result"] == 1
    assert timeouts[-1] == 0


class Scripted:
    """An api whose answers to calls are given; None closes the connection. A stream of a task never says anything."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(asyncio.IncompleteReadError):
            while (head := await reader.readuntil(b"\r\n\r\n")).startswith(b"POST"):
                length = re.search(rb"(?i)content-length: (\d+)", head)
                assert length is not None
                await reader.readexactly(int(length[1]))
                answer = self.answers.pop(0)
                if answer is None:
                    return
                body = json.dumps({"jsonrpc": "2.0", "id": 0, "result": answer}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await reader.read()


async def test_as_many_tasks_as_one_likes_are_followed_beside_a_call() -> None:
    async with Scripted({"x": 1}) as api, AsyncClient(api.url, timeout=2) as client:
        following = [asyncio.ensure_future(client.download(n, "result")) for n in range(101)]
        await asyncio.sleep(0.1)
        assert await client.call("x") == {"x": 1}
        for one in following:
            one.cancel()
        await asyncio.gather(*following, return_exceptions=True)


async def test_a_wait_outlasts_a_restart_of_the_api_in_its_first_poll() -> None:
    accepted = {"id": 1, "state": "SCHEDULED", "duplicate": False}
    done = {"id": 1, "state": "SUCCESS", "result": 7, "error": None}
    async with Scripted(accepted, None, [done]) as api, AsyncClient(api.url) as client:
        task = await client.enqueue("a")
        assert await client.result(task["id"]) == 7


def test_an_event_whose_stream_breaks_off_within_it_is_asked_for_again() -> None:
    reader = EventReader()

    def read(*lines: str) -> list[tuple[str, Any] | None]:
        with reader.enduring("http://api", 60):
            return [event for line in lines if (event := reader.read(line)) is not None]

    whole = ["event: log", "id: 1-1", 'data: "one"', ""]
    assert read("retry: 2000", "", *whole, "event: log", "id: 1-2", 'data: "two"') == [("log", "one")]
    assert reader.headers == {"Last-Event-ID": "1-1"}
    assert read("", "event: state", 'data: "ACQUIRED"', "") == [("state", "ACQUIRED")]
    assert reader.headers == {"Last-Event-ID": "1-1"}
    assert read("event: log", "id: 1-2", 'data: "two"', "") == [("log", "two")]
    assert reader.headers == {"Last-Event-ID": "1-2"}
