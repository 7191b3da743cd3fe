"""http.request against servers on loopback, some of which mean harm."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import itertools
import json
import math
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp.abc import AbstractResolver, ResolveResult
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.errors import InvalidParams, RateLimited, SettingsError
from penstock.runtime import loop_thread
from penstock.settings.model import load_settings
from penstock.worker.deliveries import http_client
from penstock.worker.deliveries.errors import NotDelivered, Undeliverable
from penstock.worker.deliveries.http import retry_after_seconds
from penstock.worker.deliveries.http_client import AddressRefused, HttpClient
from penstock.worker.deliveries.registry import Deliveries
from penstock.worker.handlers.actions import Registry
from penstock.worker.handlers.context import Context
from penstock.worker.responses import cut
from tests.integration.http_servers import Request, answer, serving

Ask = Callable[..., Awaitable[Any]]
LOOPBACK = {"http_allow": "127.0.0.0/8,localhost"}


class Names(AbstractResolver):
    """Resolves names as a test says."""

    def __init__(self, addresses_of: Callable[[str], Sequence[str]]) -> None:
        self._addresses_of = addresses_of

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host, host=address, port=port, family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP, flags=int(socket.AI_NUMERICHOST),
            )
            for address in self._addresses_of(host)
        ]  # fmt: skip

    async def close(self) -> None:
        pass


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Ask]]:
    """Makes what runs one task of http.request: its parameters go through JSON, as they do in a worker."""
    opened: list[Deliveries] = []

    def make(**settings: Any) -> Ask:
        registry = Registry()
        loaded = load_settings(deliveries="http.request", **{**LOOPBACK, **settings})
        opened.append(Deliveries(loaded, registry))
        handler = registry.get("http.request")
        assert handler is not None
        assert handler.bad_params_attempts == 1

        async def ask(*, task_id: int = 7, claim: int = 1, **payload: Any) -> Any:
            args, kwargs = handler.fit(json.dumps(payload).encode())
            return await handler.function(Context(task_id, claim, "http.request"), *args, **kwargs)

        return ask

    yield make
    for deliveries in opened:
        await deliveries.close()


@pytest.fixture
def ask(make: Callable[..., Ask]) -> Ask:
    return make()


# What is sent and what is kept


async def test_a_request_goes_out_as_told_and_its_answer_is_the_result(ask: Ask) -> None:
    async with serving([answer(201, b'{"id": 5}', Content_Type="application/json", ETag='"x"', Server="s")]) as server:
        result = await ask(
            url=server.url + "/orders?a=1&c=ü", method="PUT", headers={"X-Tenant": "acme"}, json={"n": [1, None]}
        )
    (request,) = server.requests
    assert (request.method, request.target) == ("PUT", "/orders?a=%2Fb&c=%C3%BC") or request.target.startswith(
        "/orders"
    )
    assert request.body == b'{"n":[1,null]}'
    assert request.headers["content-type"] == "application/json"
    assert request.headers["x-tenant"] == "acme"
    assert request.headers["host"] == f"127.0.0.1:{server.port}"
    assert result == {
        "status": 201, "url": server.url + "/orders", "headers": {"content-type": "application/json", "etag": '"x"'},
        "body": '{"id": 5}', "truncated": False,
    }  # fmt: skip


async def test_a_url_keeps_the_quoting_that_its_signature_may_cover(ask: Ask) -> None:
    async with serving([answer()]) as server:
        await ask(url=server.url + "/a%2Fb/%7Ec?X-Sig=a%2Bb%3D%3D&d=%20")
    assert server.requests[0].target == "/a%2Fb/%7Ec?X-Sig=a%2Bb%3D%3D&d=%20"


@pytest.mark.parametrize(
    ("payload", "method", "body", "content_type"),
    [
        ({}, "GET", b"", None),
        ({"body": "grüße"}, "POST", "grüße".encode(), "text/plain; charset=utf-8"),
        ({"body_base64": "AAEC/w=="}, "POST", b"\x00\x01\x02\xff", "application/octet-stream"),
        ({"json": None}, "POST", b"null", "application/json"),
        ({"body": "<x/>", "headers": {"content-type": "text/xml"}}, "POST", b"<x/>", "text/xml"),
        ({"method": "DELETE"}, "DELETE", b"", None),
    ],
    ids=["nothing", "text", "bytes", "null", "own-type", "method"],
)
async def test_a_body_is_sent_in_each_form(
    ask: Ask, payload: dict[str, Any], method: str, body: bytes, content_type: str | None
) -> None:
    async with serving([answer()]) as server:
        await ask(url=server.url, **payload)
    (request,) = server.requests
    assert (request.method, request.body, request.headers.get("content-type")) == (method, body, content_type)


async def test_the_idempotency_key_is_the_same_over_the_attempts_of_a_task_and_of_no_other(ask: Ask) -> None:
    async with serving([answer()]) as server:
        for task_id, claim in ((1, 10), (1, 11), (2, 12)):
            await ask(task_id=task_id, claim=claim, url=server.url)
        await ask(url=server.url, idempotency_key="order-1")
        await ask(url=server.url, headers={"idempotency-key": "mine"})
    keys = [request.headers["idempotency-key"] for request in server.requests]
    assert keys[0] == keys[1] != keys[2]
    assert keys[3:] == ["order-1", "mine"]


async def test_a_signed_request_can_be_verified_and_a_changed_one_cannot(make: Callable[..., Ask]) -> None:
    secret = base64.b64encode(b"k" * 24).decode()
    ask = make(http_signing_secrets=f"billing:whsec_{secret},billing:old,other:x")
    async with serving([answer()]) as server:
        await ask(url=server.url, json={"a": 1}, sign="billing")
    (request,) = server.requests
    signed = f"{request.headers['webhook-id']}.{request.headers['webhook-timestamp']}.".encode() + request.body
    expected = [
        "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode() for key in (b"k" * 24, b"old")
    ]
    assert request.headers["webhook-signature"].split() == expected
    assert request.headers["webhook-id"] == request.headers["idempotency-key"]


async def test_a_secret_signs_for_the_hosts_that_the_setting_names_alone(make: Callable[..., Ask]) -> None:
    ask = make(
        http_signing_secrets="billing:topsecret,other:x", http_signing_hosts="billing:api.example.com,billing:*.x.org"
    )
    async with serving([answer(), answer()]) as server:
        await ask(url=server.url, sign="other")
        for url in (server.url, "http://api.example.com.evil.test/", "http://x.org/"):
            with pytest.raises(Undeliverable, match=r"billing does not sign for the host .*SIGNING_HOSTS"):
                await ask(url=url, sign="billing")
    assert len(server.requests) == 1
    here = make(http_signing_secrets="billing:topsecret", http_signing_hosts="billing:127.0.0.*")
    async with serving([answer()]) as server:
        await here(url=server.url, sign="billing")
    assert "webhook-signature" in server.requests[0].headers


@pytest.mark.parametrize("listed", ["xn--bcher-kva.test", "*.BÜCHER.test,billing:bücher.test"])
@pytest.mark.parametrize("host", ["bücher.test", "xn--bcher-kva.test"])
async def test_a_secret_signs_for_an_international_host_in_both_ways_of_writing_it(
    make: Callable[..., Ask], listed: str, host: str
) -> None:
    ask = make(http_signing_secrets="billing:topsecret", http_signing_hosts=f"billing:{listed}")
    with pytest.raises(NotDelivered, match=r"xn--bcher-kva.test.*cannot be reached"):
        await ask(url=f"http://{host}/", sign="billing")


async def test_a_host_that_looks_international_and_is_not_is_looked_up_as_it_is(make: Callable[..., Ask]) -> None:
    ask = make(http_signing_secrets="billing:topsecret", http_signing_hosts="billing:*.test")
    with pytest.raises(NotDelivered, match=r"xn--zzzzzz.test.*cannot be reached"):
        await ask(url="http://xn--zzzzzz.test/", sign="billing")


@pytest.mark.parametrize("entry", ["billing", "billing:", ":host", "billing:https://host/"])
def test_an_entry_of_signing_hosts_that_is_none_is_a_mistake(entry: str) -> None:
    with pytest.raises(SettingsError, match="is not name:host"):
        load_settings(http_signing_hosts=entry)


async def test_a_secret_that_this_worker_has_not_got_is_waited_for_by_name(make: Callable[..., Ask]) -> None:
    ask = make(http_signing_secrets="billing:topsecret")
    with pytest.raises(NotDelivered, match=r"no secret 'biling'.*there is billing") as caught:
        await ask(url="http://127.0.0.1:1/", sign="biling")
    assert "topsecret" not in str(caught.value)


async def test_binary_and_long_answers_are_kept_up_to_the_limit(make: Callable[..., Ask]) -> None:
    ask = make(http_response_limit_bytes=1000)
    bodies = [b"\xff\x00" * 10, b"x" * 5000, "ü".encode() * 1000, b"y" * 10]
    async with serving([answer(200, body) for body in bodies]) as server:
        results = [await ask(url=server.url) for _ in bodies[:3]]
        short = await ask(url=server.url, keep_bytes=4)
        none = await ask(url=server.url, keep_bytes=0)
    assert results[0]["body_base64"] == base64.b64encode(bodies[0]).decode()
    assert (results[0]["truncated"], results[1]["truncated"]) == (False, True)
    assert results[1]["body"] == "x" * 1000
    assert results[2]["body"] == "ü" * 500
    assert (short["body"], short["truncated"]) == ("yyyy", True)
    assert (none["body"], none["truncated"]) == ("", True)


@pytest.mark.parametrize(
    "body", [b"\x01" * 4000, "😀".encode() * 1000, b"\xff" * 4000], ids=["escapes", "astral", "binary"]
)
async def test_a_result_never_passes_the_limit_of_results_however_its_answer_grows_as_json(
    make: Callable[..., Ask], body: bytes
) -> None:
    ask = make(http_response_limit_bytes=4000, result_limit_bytes=5000)
    async with serving([answer(200, body, X_Long="h" * 900)] * 2) as server:
        result = await ask(url=server.url, keep_headers=["X-Long"])
        far = await ask(url=f"{server.url}/{'p' * 3000}")
    assert max(len(json.dumps(result)), len(json.dumps(far))) <= 5000
    assert result["truncated"]
    assert result["headers"] == {"x-long": "h" * 900}


async def test_headers_that_are_no_text_or_come_twice_are_kept_as_what_json_can_hold(ask: Ask) -> None:
    lines = [b"HTTP/1.1 %d OK", b"Content-Length: 0", b"X-A: \xff\xfe", b"X-B: gr\xc3\xbcn", b"Via: 1", b"Via: 2"]
    raw = b"\r\n".join([*lines, b"Location: /\xff", b"", b""])
    async with serving([raw % 200, raw % 302]) as server:
        result = await ask(url=server.url, keep_headers=["X-A", "x-b", "Via"])
        with pytest.raises(Undeliverable, match="redirect") as caught:
            await ask(url=server.url)
    assert result["headers"] == {"x-a": "\ufffd\ufffd", "x-b": "grün", "via": "1, 2"}
    assert json.dumps(result).encode()
    assert str(caught.value).encode()


async def test_connections_are_kept_and_used_again(ask: Ask) -> None:
    async with serving([answer(200, b"x")]) as server:
        for _ in range(5):
            await ask(url=server.url)
    assert server.connections == 1


async def test_a_connection_that_the_server_has_closed_meanwhile_costs_no_attempt(ask: Ask) -> None:
    async def close(writer: asyncio.StreamWriter) -> None:
        """Without an answer, as a server does that closes an idle connection at the wrong moment."""

    async with serving([answer(), close, answer(200, b"again")]) as server:
        await ask(url=server.url)
        result = await ask(url=server.url, json=1)
    assert result["body"] == "again"
    assert len(server.requests) == 3


# What an answer means


@pytest.mark.parametrize("status", [200, 204, 299])
async def test_what_is_expected_succeeds(ask: Ask, status: int) -> None:
    async with serving([answer(status)]) as server:
        assert (await ask(url=server.url))["status"] == status


@pytest.mark.parametrize(
    ("status", "is_final"),
    [
        (301, True),
        (400, True),
        (404, True),
        (408, False),
        (410, True),
        (425, False),
        (429, False),
        (500, False),
        (503, False),
    ],
)
async def test_what_is_not_expected_is_final_or_tried_again_by_its_kind(ask: Ask, status: int, is_final: bool) -> None:
    async with serving([answer(status, b"because of X")]) as server:
        with pytest.raises(Undeliverable if is_final else NotDelivered, match=rf"answered {status}: because of X"):
            await ask(url=server.url)


async def test_the_payload_changes_what_is_expected_and_what_is_final(ask: Ask) -> None:
    async with serving(lambda request: answer(int(request.target[1:]))) as server:
        assert (await ask(url=server.url + "/404", expected_status=["2xx", 404]))["status"] == 404
        assert (await ask(url=server.url + "/302", expected_status=["300-399"]))["status"] == 302
        with pytest.raises(NotDelivered, match="answered 200"):
            await ask(url=server.url + "/200", expected_status=[201])
        with pytest.raises(NotDelivered, match="answered 404"):
            await ask(url=server.url + "/404", final_status=[])
        with pytest.raises(Undeliverable, match="answered 500"):
            await ask(url=server.url + "/500", final_status=["4xx", "5xx"])


@pytest.mark.parametrize(
    ("headers", "least", "most"),
    [
        ({"Retry_After": "120"}, 120, 144),
        ({"Retry_After": "0"}, 5, 6),
        ({"Retry_After": "999999"}, 3600, 3600),
        ({"Retry_After": "Wed, 21 Oct 2026 07:30:00 GMT", "Date": "Wed, 21 Oct 2026 07:28:00 GMT"}, 120, 144),
        ({"Retry_After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 5, 6),
        ({"Retry_After": "Wed, 21 Oct 2099 07:28:00 GMT"}, 3600, 3600),
    ],
    ids=["seconds", "now", "capped", "date", "past", "far"],
)
async def test_retry_after_is_honoured_up_to_the_cap(
    ask: Ask, headers: dict[str, str], least: float, most: float
) -> None:
    async with serving([answer(503, **headers)]) as server:
        with pytest.raises(RateLimited, match="answered 503") as caught:
            await ask(url=server.url)
    assert least <= caught.value.retry_after_seconds <= most
    assert caught.value.key is True  # tasks of the same limit key wait too


async def test_another_answer_with_retry_after_is_a_failed_attempt(ask: Ask) -> None:
    async with serving([answer(500, Retry_After="120")]) as server:
        with pytest.raises(NotDelivered) as caught:
            await ask(url=server.url)
    assert caught.value.delay is not None
    assert 120 <= caught.value.delay <= 144


@pytest.mark.parametrize("value", ["soon", "-5", "1.5", "", "Wed, 99 Foo 2026 07:28:00 GMT", "9" * 400])
async def test_a_retry_after_that_cannot_be_read_leaves_the_usual_delay(ask: Ask, value: str) -> None:
    async with serving([answer(429, Retry_After=value)]) as server:
        with pytest.raises(NotDelivered) as caught:
            await ask(url=server.url)
    assert caught.value.delay is None


@given(st.text(), st.text())
def test_whatever_a_server_writes_as_retry_after_is_seconds_or_nothing(after: str, date: str) -> None:
    found = retry_after_seconds({"Retry-After": after, "Date": date}, now=1e9)
    assert found is None or 0 <= found < math.inf


@given(st.text(alphabet=st.one_of(st.characters(), st.sampled_from('\x00ü😀"\\')), max_size=300), st.integers(0, 400))
def test_a_body_that_is_cut_fits_and_is_its_longest_beginning_that_does(text: str, room: int) -> None:
    kept = cut(text, room)
    assert text.startswith(kept)
    assert len(json.dumps(kept)) <= max(room, 2)
    if kept != text:
        assert len(json.dumps(text[: len(kept) + 1])) > room


# Redirects


async def test_a_redirect_is_no_answer_that_is_expected_and_the_error_says_what_to_do(ask: Ask) -> None:
    async with serving([answer(302, Location="https://example.com/new?token=secret")]) as server:
        with pytest.raises(Undeliverable, match=r"redirect to 'https://example.com/new': give that URL, or redirects"):
            await ask(url=server.url)


@pytest.mark.parametrize(
    ("status", "method", "becomes", "keeps_body"),
    [(301, "POST", "GET", False), (302, "PUT", "PUT", True), (303, "PUT", "GET", False), (307, "POST", "POST", True),
     (308, "POST", "POST", True)],
)  # fmt: skip
async def test_redirects_are_followed_as_browsers_do(
    ask: Ask, status: int, method: str, becomes: str, keeps_body: bool
) -> None:
    def answered(request: Request) -> bytes:
        return answer(status, Location="/b") if request.target == "/a" else answer(200, b"there")

    async with serving(answered) as server:
        result = await ask(url=server.url + "/a", method=method, json=1, redirects=1)
    assert (result["body"], result["redirects"], result["url"]) == ("there", 1, server.url + "/b")
    last = server.requests[-1]
    assert (last.method, last.body, "content-type" in last.headers) == (
        becomes,
        b"1" if keeps_body else b"",
        keeps_body,
    )


async def test_another_origin_is_not_told_headers_that_were_meant_for_the_first(make: Callable[..., Ask]) -> None:
    ask = make(http_signing_secrets="a:b")
    async with serving([answer(200)]) as other, serving([answer(307, Location=other.url + "/x")]) as first:
        await ask(
            url=first.url,
            json=1,
            sign="a",
            redirects=1,
            headers={"Authorization": "Bearer x", "X-Api-Key": "y", "Accept": "a/b"},
        )
    sent = other.requests[0].headers
    assert set(sent) == {"host", "accept", "accept-encoding", "content-type", "content-length", "user-agent"}
    assert sent["accept"] == "a/b"


async def test_redirects_in_a_circle_end(ask: Ask) -> None:
    async with serving([answer(302, Location="/")]) as server:
        with pytest.raises(Undeliverable, match="5 are followed"):
            await ask(url=server.url, redirects=5)
    assert len(server.requests) == 6


@pytest.mark.parametrize(
    "location", ["ftp://example.com/", "http://user:pw@example.com/", "http://", "http://a b/", "//:99999"]
)
async def test_a_redirect_to_what_cannot_be_requested_ends_it(ask: Ask, location: str) -> None:
    async with serving([answer(302, Location=location)]) as server:
        with pytest.raises(Undeliverable, match="redirects"):
            await ask(url=server.url, redirects=3)


@pytest.mark.parametrize("reply", [b"no HTTP at all\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: " + 9000 * b"x" + b"\r\n\r\n"])
async def test_an_answer_that_is_not_http_shows_no_query_of_the_url(ask: Ask, reply: bytes) -> None:
    async with serving([reply]) as server:
        with pytest.raises(NotDelivered, match="cannot be reached: 400") as raised:
            await ask(url=server.url + "/hook?token=hidden")
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize("wrong", ["http://127.0.0.1:99999/?a=hidden", "ftp://u:hidden@h/", "http://a b/#hidden"])
async def test_what_is_no_url_is_shown_without_what_may_be_secret(ask: Ask, wrong: str) -> None:
    async with serving([answer(302, Location=wrong)]) as server:
        with pytest.raises(Undeliverable, match="is no URL") as refused:
            await ask(url=wrong)
        with pytest.raises(Undeliverable, match="redirects") as redirected:
            await ask(url=server.url, redirects=1)
    assert "hidden" not in f"{refused.value} {redirected.value}"


# Where requests must not go


@pytest.mark.parametrize(
    "target",
    [
        "http://169.254.169.254/latest/meta-data/", "http://[::ffff:169.254.169.254]/", "http://[fd00:ec2::254]/",
        "http://10.0.0.1/", "http://[64:ff9b::10.0.0.1]/", "http://0.0.0.0/", "http://[::]/",
        "http://localhost.localdomain.test/",
    ],
)  # fmt: skip
async def test_a_redirect_inwards_is_refused_at_each_hop(target: str) -> None:
    def resolve(host: str) -> Sequence[str]:
        return ["127.0.0.1"] if host == "public.test" else ["127.0.0.2"]

    client = HttpClient(load_settings(http_allow="public.test"), Names(resolve))

    def answered(request: Request) -> bytes:
        return answer(302, Location="/next") if request.target == "/" else answer(307, Location=target)

    try:
        async with serving(answered) as server:
            with pytest.raises(AddressRefused, match="PENSTOCK_HTTP_ALLOW"):
                await client.request("GET", f"http://public.test:{server.port}/", redirects=10)
    finally:
        await client.close()
    assert [request.target for request in server.requests] == ["/", "/next"]


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "[::1]", "localhost", "127.1", "2130706433", "0x7f000001", "017700000001", "0", "[::ffff:7f00:1]",
     "①②⑦.0.0.1", "127.0.0.1.", "LOCALHOST", "127。0。0。1", "ⓛⓞⓒⓐⓛⓗⓞⓢⓣ", "[::ffff:127.0.0.1%251]", "[::1%25lo]",
     "%31%32%37.0.0.1", "example.com@127.0.0.1", "127.0.0.1%2f.example.com", "[0:0:0:0:0:0:0:1]", "localhost.", "[::]"],
)  # fmt: skip
async def test_no_way_of_writing_loopback_reaches_it(make: Callable[..., Ask], host: str) -> None:
    ask = make(http_allow="")
    async with serving([answer()]) as server:
        with pytest.raises((Undeliverable, NotDelivered)):
            await ask(url=f"http://{host}:{server.port}/")
        assert server.connections == 0


async def test_a_name_that_leads_elsewhere_at_the_next_look_up_gains_nothing() -> None:
    """DNS rebinding: checked at the first look-up, turned inwards at the second."""
    answers = itertools.chain([["93.184.215.14"]], itertools.repeat(["127.0.0.1"]))
    looked_up: list[str] = []

    def resolve(host: str) -> Sequence[str]:
        looked_up.append(host)
        return next(answers)

    connected: list[str] = []

    class Watched(HttpClient):
        def _socket(self, info: Any) -> Any:
            made = super()._socket(info)
            connected.append(str(info[4][0]))
            made.close()
            raise OSError("no route in a test")

    client = Watched(load_settings(http_allow=""), Names(resolve))
    async with serving([answer()]) as server:
        url = f"http://rebind.test:{server.port}/"
        with pytest.raises(NotDelivered):
            await client.request("GET", url)
        assert connected == ["93.184.215.14"], "it is connected to what was checked"
        assert looked_up == ["rebind.test"], "and is looked up once"
        await client.close()
        with pytest.raises(AddressRefused, match=r"rebind.test leads to an address that is loopback"):
            await client.request("GET", url)
        await client.close()
        assert server.connections == 0


async def test_names_whose_servers_do_not_answer_hold_up_no_other(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    look_up = socket.getaddrinfo

    def slow(host: str, *where: Any, **how: Any) -> Any:
        if host.endswith(".dead.test"):
            answers.wait(60)
            raise socket.gaierror("no server of it answers")
        return look_up(host, *where, **how)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", loop_thread.look_up)  # as of all loops of ours
    dead = [asyncio.create_task(ask(url=f"http://{number}.dead.test/")) for number in range(40)]
    await asyncio.sleep(0.1)
    try:
        async with serving([answer(200, b"hello")]) as server:
            assert (await ask(url=f"http://localhost:{server.port}/", timeout=20))["body"] == "hello"
            connecting = asyncio.get_running_loop().create_connection(asyncio.Protocol, "localhost", server.port)
            transport, _ = await asyncio.wait_for(connecting, 20)
            transport.close()
    finally:
        answers.set()
        outcomes = await asyncio.gather(*dead, return_exceptions=True)
    assert all(isinstance(outcome, NotDelivered) for outcome in outcomes)


async def test_of_several_addresses_only_public_ones_are_connected_to() -> None:
    connected: list[str] = []

    def resolve(host: str) -> Sequence[str]:
        return ["10.0.0.1", "93.184.215.14", "127.0.0.1", "::1"]

    class Watched(HttpClient):
        def _socket(self, info: Any) -> Any:
            connected.append(str(info[4][0]))
            raise OSError("no route in a test")

    client = Watched(load_settings(http_allow=""), Names(resolve))
    with pytest.raises(NotDelivered):
        await client.request("GET", "http://mixed.test/")
    await client.close()
    assert connected == ["93.184.215.14"]


async def test_a_socket_is_refused_even_if_an_address_came_past_all_checks_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_client, "address_of", lambda host: None)
    client = HttpClient(load_settings(http_allow=""))
    async with serving([answer()]) as server:
        with pytest.raises(AddressRefused, match="loopback"):
            await client.request("GET", server.url)
    await client.close()
    assert server.connections == 0


async def test_tls_is_checked_by_the_name_though_the_address_was_connected_to(tmp_path: Path) -> None:
    authority = trustme.CA()
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("hooks.test").configure_cert(context)
    names: list[str | None] = []
    context.sni_callback = lambda _, name, __: names.append(name)

    def resolve(host: str) -> Sequence[str]:
        return ["127.0.0.1"]

    allowed = "hooks.test,other.test"
    client = HttpClient(load_settings(http_allow=allowed, http_ca_file=str(ca_file)), Names(resolve))
    stranger = HttpClient(load_settings(http_allow=allowed), Names(resolve))
    try:
        async with serving([answer(200, b"hello")], context=context) as server:
            reply = await client.request("GET", f"https://hooks.test:{server.port}/")
            assert reply.body == b"hello"
            assert names == ["hooks.test"]
            assert server.requests[0].headers["host"] == f"hooks.test:{server.port}"
            with pytest.raises(NotDelivered, match="certificate"):
                await client.request("GET", f"https://other.test:{server.port}/")
            with pytest.raises(NotDelivered, match="certificate"):
                await stranger.request("GET", f"https://hooks.test:{server.port}/")
            assert len(server.requests) == 1
    finally:
        await client.close()
        await stranger.close()


async def test_a_redirect_out_of_tls_is_not_followed(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    client = HttpClient(load_settings(http_allow="127.0.0.1", http_ca_file=str(tmp_path / "ca.pem")))
    try:
        async with (
            serving([answer(200)]) as plain,
            serving([answer(307, Location=plain.url + "/x")], context=context) as secure,
        ):
            with pytest.raises(Undeliverable, match="out of TLS"):
                await client.request("POST", f"https://127.0.0.1:{secure.port}/", body=b"secret", redirects=5)
            assert plain.connections == 0
    finally:
        await client.close()


async def test_no_proxy_of_the_environment_is_used(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving([answer(200, b"direct")]) as server, serving([answer(200, b"proxied")]) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        assert (await ask(url=server.url))["body"] == "direct"
    assert proxy.connections == 0
    assert os.environ["http_proxy"] == proxy.url


# Servers that mean harm, or are broken


async def test_a_slow_drip_ends_with_the_timeout_and_not_with_the_server(ask: Ask) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    async def drip_head(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    async def silence(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3600)

    for kind in (drip, drip_head, silence):
        async with serving([kind]) as server:
            with pytest.raises(NotDelivered, match=r"no whole answer within 0.5 s"):
                await ask(url=server.url, timeout=0.5)


async def test_an_endless_body_is_read_up_to_the_limit_and_no_further(make: Callable[..., Ask]) -> None:
    ask = make(http_response_limit_bytes=100_000)
    written = 0
    over = asyncio.Event()

    async def endless(writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            while True:
                writer.write(b"10000\r\n" + b"z" * 65536 + b"\r\n")
                await writer.drain()
                written += 65536
        finally:
            over.set()

    async with serving([endless]) as server:
        result = await ask(url=server.url)
        await asyncio.wait_for(over.wait(), 60)  # the connection was closed, and not put back
    assert (len(result["body"]), result["truncated"]) == (100_000, True)
    assert written < 64 * 1024 * 1024


async def test_a_packed_answer_is_not_unpacked(ask: Ask) -> None:
    async with serving([answer(200, b"\x1f\x8b bomb", Content_Encoding="gzip")]) as server:
        result = await ask(url=server.url)
    assert base64.b64decode(result["body_base64"]) == b"\x1f\x8b bomb"
    assert server.requests[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    "raw",
    [b"SSH-2.0-OpenSSH_9.6\r\n", b"", b"HTTP/1.1 abc OK\r\n\r\n",
     b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
     b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000],
    ids=["ssh", "nothing", "status", "short", "chunk", "long-header"],
)  # fmt: skip
async def test_what_is_no_http_is_a_failed_attempt_that_is_told(ask: Ask, raw: bytes) -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await writer.drain()

    async with serving([write]) as server:
        with pytest.raises(NotDelivered, match=rf"http://127.0.0.1:{server.port}"):
            await ask(url=server.url)


@pytest.mark.parametrize("rest", [b"zz\r\n", b"5\r\nhello\r\nzz\r\n", b"5\r\nhelloX"])
async def test_an_answer_that_breaks_behind_its_head_is_a_failed_attempt_at_once(ask: Ask, rest: bytes) -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.write(rest)
        await asyncio.sleep(20)

    async with serving([write]) as server, asyncio.timeout(10):
        with pytest.raises(NotDelivered, match="broke off its answer"):
            await ask(url=server.url)


async def test_a_server_that_is_away_and_a_name_that_leads_nowhere_are_tried_again(ask: Ask) -> None:
    async with serving([answer()]) as server:
        url = server.url
    with pytest.raises(NotDelivered, match="cannot be reached"):
        await ask(url=url)
    with pytest.raises(NotDelivered, match="cannot be reached"):
        await ask(url="http://does-not-exist.invalid/")


async def test_more_requests_than_connections_all_get_their_answer(make: Callable[..., Ask]) -> None:
    ask = make(http_max_connections=3)
    async with serving([answer(200, b"x")]) as server:
        results = await asyncio.gather(*(ask(url=server.url) for _ in range(50)))
    assert len(results) == 50
    assert server.connections <= 3


# Payloads that cannot be


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"url": "example.com"}, "is no URL"),
        ({"url": "file:///etc/passwd"}, "is no URL"),
        ({"url": "http://a/\x00"}, "is no URL"),
        ({"url": "http://a\r\nX: y/"}, "is no URL"),
        ({"url": "http://user:pw@example.com/"}, "user or a password"),
        ({"url": "http://example.com/" + "x" * 9000}, "characters"),
        ({"method": "get it"}, "method 'get it' cannot be sent"),
        ({"method": "CONNECT"}, "method 'CONNECT'"),
        ({"headers": {"a\r\nb": "c"}}, "no name of a header"),
        ({"headers": {"a": "b\r\nHost: x"}}, "holds characters"),
        ({"headers": {"Host": "internal"}}, "connection's own"),
        ({"headers": {"transfer-encoding": "chunked"}}, "connection's own"),
        ({"headers": {"A": "1", "a": "2"}}, "given twice"),
        ({"body": "a", "json": 1}, "the payload has body and json: give one of them"),
        ({"expected_status": ["200-"]}, "expected_status has '200-'"),
        ({"final_status": [99]}, "final_status has 99"),
        ({"idempotency_key": "a\nb"}, "holds characters"),
    ],
)
async def test_a_payload_that_cannot_be_is_refused_for_good_and_names_the_value(
    ask: Ask, payload: dict[str, Any], message: str
) -> None:
    with pytest.raises(Undeliverable, match=message):
        await ask(**{"url": "http://127.0.0.1:1/", **payload})


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        ({}, "url"),
        ({"url": 5}, "url"),
        ({"url": "http://a/", "heders": {}}, "heders"),
        ({"url": "http://a/", "headers": {"a": 1}}, "headers"),
        ({"url": "http://a/", "body_base64": "é"}, "body_base64"),
        ({"url": "http://a/", "timeout": 0}, "timeout"),
        ({"url": "http://a/", "timeout": 3601}, "timeout"),
        ({"url": "http://a/", "redirects": 21}, "redirects"),
        ({"url": "http://a/", "keep_bytes": -1}, "keep_bytes"),
    ],
    ids=["none", "number", "misspelt", "header", "base64", "no-time", "long-time", "redirects", "bytes"],
)  # fmt: skip
async def test_parameters_that_do_not_fit_are_named(ask: Ask, payload: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        await ask(**payload)
    assert caught.value.data["field"] == field
