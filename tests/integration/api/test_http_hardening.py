"""The api against clients that are slow, endless, lying or a misled browser; over plain sockets."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from penstock.api import server as http_server
from penstock.api.process import Api
from penstock.db.pool import Store
from penstock.protocol.task import NewTask
from penstock.runtime import metrics
from penstock.settings.model import Settings
from penstock.tasks import claim, enqueue, settle
from tests.integration.apis import JSON, running

GOOD = json.dumps({"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "a"}, "id": 1}).encode()
HEAD = b"POST /rpc HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture
async def api(store: Store, settings: Settings) -> AsyncIterator[Api]:
    async with running(store, settings) as api:
        yield api


class Wire:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """The next answer: status, headers, body."""
        async with asyncio.timeout(20):
            status, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
            body = await self.reader.readexactly(int(headers.get("content-length", "0")))
            return int(status.split()[1]), headers, body

    async def rest(self) -> bytes:
        """What comes until the other side closes."""
        async with asyncio.timeout(20):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    async def ask(self, body: bytes = GOOD) -> int:
        await self.send(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        return (await self.answer())[0]


@asynccontextmanager
async def wire(api: Api) -> AsyncIterator[Wire]:
    parts = urlsplit(api.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


async def tasks(store: Store) -> int:
    async with store.session() as session:
        return sum(row["count"] for row in await session.fetch("count_live"))


def refused(reason: str) -> float:
    return metrics.REGISTRY.get_sample_value("penstock_refused_total", {"reason": reason}) or 0.0


# What a browser can be made to send


@pytest.mark.parametrize(
    "content_type",
    ["application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain", "text/plain;charset=UTF-8",
     "text/json", "application/jsonx", "", None],
)  # fmt: skip
async def test_what_a_page_may_send_without_asking_adds_no_task(
    api: Api, store: Store, content_type: str | None
) -> None:
    """A form's post or a fetch without preflight can say nothing but these; both go out with the user's network."""
    before = refused("media_type")
    headers = {} if content_type is None else {"Content-Type": content_type}
    async with httpx.AsyncClient(base_url=api.url) as http:
        response = await http.post("/rpc", content=GOOD, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (415, -32600)
    assert "application/json" in response.json()["error"]["message"]
    assert await tasks(store) == 0
    assert refused("media_type") == before + 1


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/json; charset=utf-8", "Application/JSON", "application/json-rpc"],
)
async def test_json_by_any_of_its_names_is_taken(api: Api, content_type: str) -> None:
    async with httpx.AsyncClient(base_url=api.url) as http:
        response = await http.post("/rpc", content=GOOD, headers={"Content-Type": content_type})
    assert response.json()["result"]["state"] == "SCHEDULED"


async def test_compressed_body_is_refused_unread(api: Api) -> None:
    async with httpx.AsyncClient(base_url=api.url) as http:
        response = await http.post("/rpc", content=b"\x1f\x8b", headers=JSON | {"Content-Encoding": "gzip"})
    assert response.status_code == 415


async def test_a_browser_that_asks_first_is_not_given_leave(api: Api) -> None:
    preflight = {
        "Origin": "https://evil.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    async with httpx.AsyncClient(base_url=api.url) as http:
        answers = [
            await http.options("/rpc", headers=preflight),
            await http.post("/rpc", content=GOOD, headers=JSON | {"Origin": "https://evil.example"}),
            await http.post("/rpc", content=GOOD, headers=JSON),
        ]
    assert [answer.status_code for answer in answers] == [405, 403, 200]
    for answer in answers:
        assert not [name for name in answer.headers if name.startswith("access-control-")]


async def test_every_answer_carries_the_headers_that_keep_it_an_answer(api: Api) -> None:
    async with httpx.AsyncClient(base_url=api.url) as http:
        answers = [
            await http.post("/rpc", content=GOOD, headers=JSON),
            await http.get("/"),
            await http.get("/nothing"),
            await http.get("/rpc"),
            await http.post("/rpc", content=GOOD),
            await http.get("/", headers={"Host": "evil.example"}),
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 404, 405, 415, 403]
    for answer in answers:
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "server" not in answer.headers


async def test_bytes_that_are_no_request_get_400_with_the_same_headers(api: Api) -> None:
    async with wire(api) as line:
        await line.send(b"\x16\x03\x01\x02\x00\x01\x00 this is TLS, or nothing at all\r\n\r\n")
        status, headers, _ = await line.answer()
        assert (status, headers["x-content-type-options"], "server" in headers) == (400, "nosniff", False)
        assert await line.rest() == b""


# Bodies that lie


async def test_body_shorter_than_declared_is_given_up_after_a_while(store: Store, settings: Settings) -> None:
    settings = settings.model_copy(update={"request_timeout_seconds": 0.3})
    before = refused("time")
    async with running(store, settings) as api, wire(api) as line:
        await line.send(HEAD + b"Content-Length: 5000\r\n\r\n" + GOOD)
        status, headers, body = await line.answer()
        assert (status, headers["connection"]) == (408, "close")
        assert "did not arrive within 0.3 s" in json.loads(body)["error"]["message"]
        assert await line.rest() == b""
    assert refused("time") == before + 1
    assert await tasks(store) == 0


async def test_body_that_trickles_in_is_given_up_however_lively(store: Store, settings: Settings) -> None:
    settings = settings.model_copy(update={"request_timeout_seconds": 0.3})
    async with running(store, settings) as api, wire(api) as line:
        await line.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")

        async def trickle() -> None:
            while True:
                await line.send(b"1\r\n \r\n")
                await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        status, _, _ = await line.answer()
        trickling.cancel()
        await asyncio.gather(trickling, return_exceptions=True)
    assert status == 408


async def test_a_form_that_is_late_is_given_up_as_any_other_body(store: Store, settings: Settings) -> None:
    settings = settings.model_copy(update={"request_timeout_seconds": 0.3})
    head = b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-www-form-urlencoded\r\n"
    async with running(store, settings) as api, wire(api) as line:
        await line.send(head + b"Content-Length: 500\r\n\r\nkey=")
        status, _, body = await line.answer()
    assert status == 408
    assert "did not arrive within 0.3 s" in body.decode()


async def test_body_longer_than_declared_is_no_second_request(api: Api, store: Store) -> None:
    async with wire(api) as line:
        await line.send(HEAD + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD + b'{"smuggled": true}\r\n\r\n')
        assert (await line.answer())[0] == 400
        assert await line.rest() == b""
    assert await tasks(store) <= 1


@pytest.mark.parametrize(
    "lengths",
    [b"Content-Length: 5\r\nContent-Length: 6\r\n", b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
     b"Content-Length: -1\r\n", b"Content-Length: 5x\r\n", b"Transfer-Encoding: chunked, gzip\r\n",
     b"Content-Length : 5\r\n", b" folded: 1\r\n"],
)  # fmt: skip
async def test_head_that_two_servers_could_read_differently_is_refused(api: Api, store: Store, lengths: bytes) -> None:
    """Between a proxy and this server, such a request could carry another one past the proxy's eyes."""
    async with wire(api) as line:
        await line.send(HEAD + lengths + b"\r\n" + GOOD)
        assert (await line.answer())[0] == 400
        assert await line.rest() == b""
    assert await tasks(store) == 0


async def test_rest_of_a_body_that_was_refused_is_let_pass_up_to_a_limit(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing at once would take the answer from a client that is still sending."""
    settings = settings.model_copy(update={"request_limit_bytes": 16_384})
    async with running(store, settings) as api:
        async with wire(api) as line:
            await line.send(HEAD + b"Content-Length: 1000000\r\n\r\n")
            assert (await line.answer())[0] == 413
            await line.send(b" " * 1_000_000)
            assert await line.ask() == 200
        async with wire(api) as line:
            await line.send(HEAD + b"Content-Length: 100000000\r\n\r\n")
            assert (await line.answer())[0] == 413
            with pytest.raises(ConnectionError):
                for _ in range(100):
                    await line.send(b" " * 1_000_000)
        async with wire(api) as line:
            await line.send(HEAD + b"Content-Length: 100000000000000000000000\r\n\r\n")
            assert (await line.answer())[0] == 400
        monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.2)
        async with wire(api) as line:
            await line.send(HEAD + b"Content-Length: 1000000\r\n\r\n")
            assert (await line.answer())[0] == 413
            await line.send(b" ")
            assert await line.rest() == b""


async def test_endless_chunks_without_content_are_cut_off(store: Store, settings: Settings) -> None:
    """Trailers, and the sizes of chunks, are no part of the body that is counted."""
    settings = settings.model_copy(update={"request_limit_bytes": 16_384})
    before = refused("head")
    async with running(store, settings) as api, wire(api) as line:
        await line.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n")
        with pytest.raises(ConnectionError):
            for number in range(100_000):
                await line.send(b"X-Trailer-%d: %s\r\n" % (number, b"x" * 1000))
    assert refused("head") == before + 1


# Heads


async def test_connection_that_says_nothing_is_closed(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.2)
    async with wire(api) as line:
        assert await line.rest() == b""


async def test_head_that_trickles_in_is_given_up(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.3)
    before = refused("time")
    async with wire(api) as line:
        await line.send(HEAD)

        async def trickle() -> None:
            while True:
                await line.send(b"X-Slow: 1\r\n")
                await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        assert await line.rest() == b""
        trickling.cancel()
        await asyncio.gather(trickling, return_exceptions=True)
    assert refused("time") == before + 1


async def test_second_head_of_a_connection_has_no_more_time_than_the_first(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with wire(api) as line:
        assert await line.ask() == 200
        monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.2)
        await line.send(b"POST /rpc HT")
        assert await line.rest() == b""


async def test_idle_connection_outlives_the_time_for_a_head(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.1)
    async with wire(api) as line:
        assert await line.ask() == 200
        await asyncio.sleep(0.4)  # the point is that nothing happens meanwhile
        assert await line.ask() == 200


@pytest.mark.parametrize("shape", ["one header", "many headers", "the path"])
async def test_head_over_the_limit_is_refused(api: Api, shape: str) -> None:
    before = refused("head")
    async with wire(api) as line:
        start = {
            "one header": HEAD + b"X-Long: " + b"x" * 100_000,
            "many headers": HEAD + b"X-Many: 1\r\n" * 10_000,
            "the path": b"GET /" + b"x" * 100_000,
        }[shape]
        await line.send(start)
        assert (await line.answer())[0] == 431
        assert await line.rest() == b""
    assert refused("head") == before + 1


async def test_large_body_in_many_pieces_is_no_large_head(api: Api, store: Store) -> None:
    batch = b"[" + b",".join([GOOD] * 5000) + b"]"
    async with wire(api) as line:
        for _ in range(2):
            await line.send(HEAD + b"Content-Length: %d\r\n\r\n" % len(batch))
            for start in range(0, len(batch), 10_000):
                await line.send(batch[start : start + 10_000])
            status, _, body = await line.answer()
            assert (status, len(json.loads(body))) == (200, 5000)
    assert await tasks(store) == 10_000


@pytest.mark.parametrize("upgrade", [b"Upgrade: h2c\r\n", b"upgrade:h2c\r\n"])
async def test_a_client_that_offers_http_2_is_answered_over_http_1(api: Api, upgrade: bytes) -> None:
    """As Java's HttpClient does with each request that is not over TLS, and `curl --http2`."""
    head = HEAD + b"Connection: Upgrade, HTTP2-Settings\r\n" + upgrade + b"HTTP2-Settings: AAMAAABk\r\n"
    async with wire(api) as one:
        for number in range(1, 4):
            await one.send(head + b"Content-Length: %d\r\n\r\n" % len(GOOD) + (GOOD if number < 3 else b""))
            if number == 3:
                await asyncio.sleep(0.1)
                await one.send(GOOD)
            status, _, body = await one.answer()
            assert (status, json.loads(body)["result"]["id"]) == (200, number)


async def test_requests_sent_ahead_are_all_answered(api: Api) -> None:
    async with wire(api) as line:
        request = HEAD + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD
        await line.send(request * 5)
        assert [(await line.answer())[0] for _ in range(5)] == [200] * 5


# Connections


async def test_connection_over_the_limit_is_told_so_and_the_others_are_served(store: Store, settings: Settings) -> None:
    settings = settings.model_copy(update={"http_connections": 3})
    before = refused("connections")
    async with running(store, settings) as api:
        async with wire(api) as one, wire(api) as two, wire(api) as three:
            for line in (one, two, three):  # none is idle: each is in the midst of a body
                await line.send(HEAD + b"Content-Length: %d\r\n\r\n" % len(GOOD))
            async with wire(api) as four:
                assert await four.ask() == 503
                assert await four.rest() == b""
            for line in (one, two, three):
                await line.send(GOOD)
                assert (await line.answer())[0] == 200
        async with asyncio.timeout(10):
            while True:
                async with wire(api) as again:
                    if await again.ask() == 200:
                        break
    assert refused("connections") > before


async def test_idle_connections_of_strangers_make_room_before_callers(store: Store, settings: Settings) -> None:
    """Holding all connections open keeps none from a caller; what is in a request is never closed for another."""
    settings = settings.model_copy(update={"http_connections": 3})
    async with running(store, settings) as api, wire(api) as caller, wire(api) as stranger, wire(api) as other:
        assert await caller.ask() == 200
        for line in (stranger, other):  # later than the caller, so the caller was quiet longest
            await line.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await line.answer())[0] == 200
        async with wire(api) as newest:
            assert await newest.ask() == 200
            assert await stranger.rest() == b""
            assert await caller.ask() == 200


# Memory


async def test_bodies_beyond_the_budget_are_told_to_come_again_and_small_ones_are_served(api: Api) -> None:
    api._budget._limit_bytes = 100_000
    before = refused("memory")
    async with wire(api) as one, wire(api) as two:
        await one.send(HEAD + b"Content-Length: 100000\r\n\r\n" + b" " * 99_000)
        async with asyncio.timeout(20):
            while api._budget.held_bytes < 99_000 - 16 * 1024:
                await asyncio.sleep(0.01)
        await two.send(HEAD + b"Content-Length: 50000\r\n\r\n" + b" " * 50_000)
        status, headers, body = await two.answer()
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body)["error"]["code"] == -32026
        async with wire(api) as small:
            assert await small.ask() == 200
        await one.send(b" " * 1000)
        assert (await one.answer())[0] == 200
        assert api._budget.held_bytes == 0
        async with wire(api) as three:
            assert await three.ask(GOOD + b" " * 50_000) == 200
    assert refused("memory") == before + 1


@pytest.mark.parametrize("method", ["status", "result", "list", "rpc.discover"])
async def test_no_batch_has_an_answer_that_grows_with_its_entries(
    api: Api, store: Store, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr("penstock.runtime.budget.ANSWER_BYTES", 20_000)
    async with store.session() as session:
        (task,) = await enqueue.enqueue(session, [NewTask("a")])
    async with store.transaction() as session:
        dispatch = await claim.claim(session, 1)
        assert dispatch is not None
        await settle.finish(session, {(task.id, dispatch.id): json.dumps("x" * 5000)})
    params = {"status": {"ids": [task.id], "detail": True}, "result": {"ids": [task.id], "timeout": 0}}.get(method, {})
    entries = [{"jsonrpc": "2.0", "method": method, "params": params, "id": n} for n in range(300)]
    async with httpx.AsyncClient(base_url=api.url, timeout=60) as http:
        response = await http.post("/rpc", json=entries)
        again = await http.post("/rpc", json=entries[:1])
    assert len(response.json()) == 300
    longest = len(again.content)
    assert longest > 5000
    assert len(response.content) < 20_000 + 9 * longest + 300 * 700
    assert ("x" * 5000 in again.text) == (method != "rpc.discover")
    assert api._budget.held_bytes == 0


async def test_a_body_asks_for_so_many_tasks_and_no_more(api: Api) -> None:
    entries = [
        {"jsonrpc": "2.0", "method": method, "params": {"ids": list(range(1, 1001))}, "id": n}
        for n, method in enumerate(["status", "result"] * 6)
    ]
    async with httpx.AsyncClient(base_url=api.url, timeout=60) as http:
        answers = (await http.post("/rpc", json=entries)).json()
    refusals = [answer["error"] for answer in answers if "error" in answer]
    assert [error["data"]["field"] for error in refusals] == ["ids", "ids"]
    assert len(answers) == 12


async def test_results_of_a_request_that_still_waits_count_as_memory(api: Api, store: Store) -> None:
    async with store.session() as session:
        ids = [task.id for task in await enqueue.enqueue(session, [NewTask("a")] * 2)]
    async with store.transaction() as session:
        dispatch = await claim.claim(session, 1)
        assert dispatch is not None
        await settle.finish(session, {(dispatch.tasks[0].id, dispatch.id): json.dumps("x" * 100_000)})
    body = {"jsonrpc": "2.0", "method": "result", "params": {"ids": ids, "timeout": 30}, "id": 1}
    async with httpx.AsyncClient(base_url=api.url, timeout=60) as http:
        waiting = asyncio.create_task(http.post("/rpc", json=body))
        async with asyncio.timeout(10):
            while api._budget.held_bytes < 100_000 - 16 * 1024:
                await asyncio.sleep(0.01)
        api._budget._limit_bytes = api._budget.held_bytes + 10_000
        other = {**body, "params": {"ids": ids, "timeout": 1}}
        assert (await http.post("/rpc", json=other)).json()["error"]["code"] == -32026
        waiting.cancel()


async def test_a_list_has_as_many_results_as_there_is_room_for_and_reads_no_payload(
    api: Api, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.budget.ANSWER_BYTES", 10_000)
    async with store.session() as session:
        ids = [task.id for task in await enqueue.enqueue(session, [NewTask("a", json.dumps({"p": "p" * 9000}))] * 5)]
    async with store.transaction() as session:
        dispatch = await claim.claim(session, 5)
        assert dispatch is not None
        await settle.finish(session, {(task_id, dispatch.id): json.dumps("x" * 6000) for task_id in ids})
        rows = await session.fetch("show_tasks", ids, False, 10_000)
    assert {row["payload"] for row in rows} == {None}
    async with httpx.AsyncClient(base_url=api.url, timeout=60) as http:
        for method, params in (("list", {}), ("status", {"ids": ids[::-1]})):
            body = {"jsonrpc": "2.0", "method": method, "params": params, "id": 1}
            result = (await http.post("/rpc", json=body)).json()["result"]
            shown = result["tasks"] if method == "list" else result
            assert [task["id"] for task in shown] == ids[::-1]
            assert [task["result"] is not None for task in shown] == [True, True, False, False, False]
            assert {task.get("result_unread") for task in shown[2:]} == {"the answer is full: ask for this task alone"}
        body = {"jsonrpc": "2.0", "method": "status", "params": {"ids": ids, "detail": True}, "id": 1}
        shown = (await http.post("/rpc", json=body)).json()["result"]
        assert [task["payload"] is not None for task in shown] == [False, False, False, False, True]
        assert shown[0]["payload_unread"] == "the answer is full: ask for this task alone"


@pytest.mark.parametrize("path", ["/tasks/%s/payload", "/tasks/%s/result"])
@pytest.mark.parametrize("number", ["9" * 5000, "9" * 40, "x", "1e5"])
async def test_a_number_of_no_task_has_no_file(api: Api, path: str, number: str) -> None:
    async with httpx.AsyncClient(base_url=api.url) as http:
        assert (await http.get(path % number)).status_code == 404


async def test_client_that_reads_no_answers_is_cut_off(api: Api, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "STALLED_SECONDS", 0.3)
    discover = json.dumps({"jsonrpc": "2.0", "method": "rpc.discover", "id": 1}).encode()
    batch = b"[" + b",".join([discover] * 2000) + b"]"
    connections = api._servers["http"]._server.server_state.connections
    async with wire(api) as line:
        line.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await line.send(HEAD + b"Content-Length: %d\r\n\r\n" % len(batch) + batch)
        async with asyncio.timeout(20):
            while not connections:
                await asyncio.sleep(0.01)
            while connections:
                await asyncio.sleep(0.05)
    async with wire(api) as other:
        assert await other.ask() == 200


async def test_client_that_reads_slowly_gets_its_whole_answer(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "STALLED_SECONDS", 0.8)
    monkeypatch.setattr(http_server, "SLOWEST_BYTES", 1)
    discover = json.dumps({"jsonrpc": "2.0", "method": "rpc.discover", "id": 1}).encode()
    batch = b"[" + b",".join([discover] * 2000) + b"]"
    parts, sock = urlsplit(api.url), socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
    reader, writer = await asyncio.open_connection(sock=sock)
    writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(batch) + batch)
    async with asyncio.timeout(60):
        found = re.search(rb"content-length: (\d+)", await reader.readuntil(b"\r\n\r\n"))
        assert found is not None
        left = int(found[1])
        while left:
            piece = await reader.read(65536)
            assert piece, f"cut off with {left} bytes left"
            left -= len(piece)
            await asyncio.sleep(0.02)
    writer.close()


async def test_a_connection_that_reads_the_scaling_figures_is_no_strangers(store: Store, settings: Settings) -> None:
    settings = settings.model_copy(update={"http_connections": 2})
    async with running(store, settings) as api, wire(api) as scaler, wire(api) as stranger:
        for line, path in ((scaler, b"/scaling"), (stranger, b"/")):
            await line.send(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await line.answer())[0] == 200
        async with wire(api) as newest:
            assert await newest.ask() == 200
            assert await stranger.rest() == b""
            assert await scaler.ask() == 200
