"""clockwork's API as its clients meet it: real HTTP, and what is put into Postgres."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from penstock.api.keys import CreateKey, create_key
from penstock.api.process import Api
from penstock.compat import delayed_records
from penstock.compat.clockwork.http import Clockwork
from penstock.compat.scheduler0.http.routes import Scheduler0
from penstock.db.pool import Store
from penstock.protocol.api_key import Permission
from penstock.protocol.errors import SettingsError
from penstock.settings.model import Settings, load_settings
from tests.integration.apis import JSON, running
from tests.ipv6 import has_ipv6

FUTURE_MS = 4_000_000_000_000
GOOD = {
    "clientId": "c", "scheduleKey": "k", "orderingKey": "o", "taskData": '{"a": 1}', "delivery": {"topic": "out"},
    "scheduleTime": FUTURE_MS,
}  # fmt: skip


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.fixture
def clockwork_settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"clockwork_api": True, "clockwork_port": 0})


@pytest.fixture
async def api(store: Store, clockwork_settings: Settings) -> AsyncIterator[Api]:
    async with running(store, clockwork_settings) as api:
        yield api


@pytest.fixture
async def http(api: Api) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=api.added_urls["clockwork"]) as http:
        yield http


async def create(http: httpx.AsyncClient, body: Any = GOOD, **headers: str) -> tuple[int, str]:
    content = body if isinstance(body, bytes) else json.dumps(body)
    response = await http.post("/schedule", content=content, headers=JSON | headers)
    return response.status_code, response.text


async def cancel(http: httpx.AsyncClient, client: Any = "c", key: Any = "k", **headers: str) -> tuple[int, str]:
    body = json.dumps({"clientId": client, "scheduleKey": key})
    response = await http.request("DELETE", "/schedule", content=body, headers=JSON | headers)
    return response.status_code, response.text


async def armed(sql: Any) -> list[Any]:
    return [json.loads(row[0]) for row in await sql.fetch("select record from penstock.armed order by id")]


async def test_a_schedule_is_armed_before_it_is_answered_and_its_ordering_key_is_the_answer(
    http: httpx.AsyncClient, sql: Any
) -> None:
    response = await http.post("/schedule", json=GOOD | {"unknown": 1})
    assert (response.status_code, response.text) == (200, "o")
    assert response.headers["content-type"].startswith("text/plain")
    assert await armed(sql) == [{"topic": "out", "key": "o", "value": '{"a": 1}', "due_at": FUTURE_MS}]


async def test_without_a_time_it_is_due_at_once(http: httpx.AsyncClient, store: Store, sql: Any) -> None:
    assert await create(http, without("scheduleTime")) == (200, "o")
    async with store.transaction() as session:
        assert await delayed_records.publish_due(session) == 1
    (task,) = await sql.fetch("select action, ordering_key, payload, max_attempts from penstock.task")
    assert (task["action"], task["ordering_key"], task["max_attempts"]) == ("kafka.publish", "clockwork:o", 1000)
    assert json.loads(task["payload"])["records"][0]["key"] == "o"
    assert await cancel(http) == (400, "Illegal argument provided")  # fired already


@pytest.mark.parametrize(
    "body",
    [without("clientId"), without("scheduleKey"), without("orderingKey"), without("taskData"), without("delivery"),
     GOOD | {"clientId": ""}, GOOD | {"scheduleKey": None}, GOOD | {"taskData": {"a": 1}}, GOOD | {"taskData": [1]},
     GOOD | {"delivery": {}}, GOOD | {"delivery": {"topic": ""}}, GOOD | {"scheduleTime": "soon"},
     GOOD | {"scheduleTime": 2**70}, GOOD | {"scheduleTime": None}, [GOOD], b"{", b"", b"\xff",
     b'{"clientId": "\\ud800"}', b"[" * 100_000],
    ids=["client", "key", "ordering-key", "data", "delivery", "empty", "null", "data-object", "data-array", "no-topic",
         "empty-topic", "time-text", "time-large", "time-null", "array", "torn", "nothing", "no-utf8", "half-pair",
         "deep"],
)  # fmt: skip
async def test_a_body_that_is_no_request_is_400_with_nothing_in_it(
    http: httpx.AsyncClient, sql: Any, body: Any
) -> None:
    assert await create(http, body) == (400, "")
    assert await armed(sql) == []


@pytest.mark.parametrize(
    "more",
    [{"delivery": {"topic": "no topic"}}, {"delivery": {"topic": "__consumer_offsets"}}, {"taskData": "x" * 300_000}],
    ids=["topic", "own-topic", "size"],
)
async def test_what_cannot_be_delivered_is_an_illegal_argument(
    http: httpx.AsyncClient, sql: Any, more: dict[str, Any]
) -> None:
    assert await create(http, GOOD | more) == (400, "Illegal argument provided")
    assert await armed(sql) == []


async def test_a_cancel_right_after_finds_its_schedule_and_a_second_one_does_not(
    http: httpx.AsyncClient, sql: Any
) -> None:
    for number in range(20):
        assert await create(http, GOOD | {"scheduleKey": str(number)}) == (200, "o")
        assert await cancel(http, key=str(number)) == (200, str(number))
    assert await cancel(http, key="0") == (400, "Illegal argument provided")
    assert await cancel(http, key="never") == (400, "Illegal argument provided")
    assert await cancel(http, key="") == (400, "")
    assert await cancel(http, client=1) == (400, "")
    assert await armed(sql) == []


async def test_pairs_that_read_alike_when_joined_are_two(http: httpx.AsyncClient, sql: Any) -> None:
    await create(http, GOOD | {"clientId": "a-b", "scheduleKey": "c"})
    await create(http, GOOD | {"clientId": "a", "scheduleKey": "b-c"})
    assert await cancel(http, "a-b", "c") == (200, "c")
    assert len(await armed(sql)) == 1
    assert await cancel(http, "a", "b-c") == (200, "b-c")


async def test_the_same_again_is_one_and_with_other_contents_it_is_two_that_a_cancel_takes_together(
    http: httpx.AsyncClient, sql: Any
) -> None:
    for body in (GOOD, GOOD, GOOD | {"scheduleTime": FUTURE_MS + 1}):
        assert await create(http, body) == (200, "o")
    assert len(await armed(sql)) == 2
    assert await cancel(http) == (200, "k")
    assert await armed(sql) == []


async def test_other_contents_are_rejected_where_the_setting_says_so(
    store: Store, clockwork_settings: Settings, sql: Any
) -> None:
    settings = clockwork_settings.model_copy(update={"clockwork_same_key": "reject"})
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url) as http:
        assert await create(http) == (200, "o")
        assert await create(http) == (200, "o")
        assert await create(http, GOOD | {"scheduleTime": 1}) == (400, "Illegal argument provided")
        assert await cancel(http) == (200, "k")
        assert await create(http, GOOD | {"scheduleTime": FUTURE_MS + 1}) == (200, "o")
    assert len(await armed(sql)) == 1


async def test_a_repeat_of_any_stored_schedule_is_dropped_where_others_are_rejected(
    store: Store, clockwork_settings: Settings, sql: Any
) -> None:
    kept = [GOOD | {"scheduleTime": FUTURE_MS + number} for number in range(3)]
    async with running(store, clockwork_settings) as api, httpx.AsyncClient(base_url=api.url) as http:
        for body in kept:
            assert await create(http, body) == (200, "o")
    settings = clockwork_settings.model_copy(update={"clockwork_same_key": "reject"})
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url) as http:
        assert [await create(http, body) for body in kept] == [(200, "o")] * 3
        assert (await create(http, GOOD | {"scheduleTime": 1}))[0] == 400
    assert len(await armed(sql)) == 3


@pytest.mark.parametrize(
    "text", ["nul \0 in it", "\uffff \ufffe é 😀 \u2028", "\x01"], ids=["nul", "unicode", "control"]
)
async def test_any_text_is_delivered_as_it_came(http: httpx.AsyncClient, store: Store, sql: Any, text: str) -> None:
    body = GOOD | {"orderingKey": text, "taskData": text, "clientId": text, "scheduleKey": text, "scheduleTime": 1}
    assert await create(http, body) == (200, text)
    async with store.transaction() as session:
        assert await delayed_records.publish_due(session) == 1
    payload = await sql.fetchval("select payload::text from penstock.task")
    from penstock.worker.deliveries.kafka import RecordParams, record_of

    (record,) = msgspec_records(payload, RecordParams)
    published = record_of(record, load_settings())
    assert published.value == published.key == text.encode()


def msgspec_records(payload: str, kind: Any) -> Any:
    import msgspec

    return msgspec.convert(json.loads(payload)["records"], list[kind])


async def test_other_methods_and_media_types_are_refused(http: httpx.AsyncClient) -> None:
    assert (await http.get("/schedule")).status_code == 405
    assert (await http.put("/schedule", json=GOOD)).status_code == 405
    assert (await http.post("/schedule", content="a=1")).status_code == 415
    assert (await http.post("/schedule", data={"a": "1"})).status_code == 415
    assert (await http.post("/rpc", json={})).status_code == 404  # the port is clockwork's alone


async def test_without_keys_it_is_for_this_machine_and_no_page_of_another_origin(http: httpx.AsyncClient) -> None:
    assert (await create(http, Host="evil.example"))[0] == 403
    assert (await create(http, Origin="http://evil.example"))[0] == 403


async def test_with_keys_it_asks_for_one_that_may_enqueue(store: Store, clockwork_settings: Settings) -> None:
    digests = {name: hashlib.sha256(name.encode() * 10).hexdigest() for name in ("enqueue", "read")}
    keys = tuple(SecretStr(f"{name}:{name}:{digest}") for name, digest in digests.items())
    settings = clockwork_settings.model_copy(update={"api_keys": keys})
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url) as http:
        assert (await create(http))[0] == 401
        assert (await create(http, **{"X-API-Key": "read" * 10}))[0] == 403
        assert await create(http, **{"X-API-Key": "enqueue" * 10}) == (200, "o")


async def test_a_key_for_other_actions_makes_and_cancels_no_record(store: Store, clockwork_settings: Settings) -> None:
    async with store.session() as session:
        made = await create_key(session, CreateKey("mail", [Permission.ENQUEUE], actions=["mail.*"]))
        kafka = await create_key(session, CreateKey("kafka", [Permission.ENQUEUE], actions=["kafka.publish"]))
    assert made is not None
    assert kafka is not None
    settings = clockwork_settings.model_copy(update={"api_require_keys": True})
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url) as http:
        assert (await create(http, **{"X-API-Key": made.key}))[0] == 403
        assert await create(http, **{"X-API-Key": kafka.key}) == (200, "o")
        assert (await cancel(http, **{"X-API-Key": made.key}))[0] == 403
        assert await cancel(http, **{"X-API-Key": kafka.key}) == (200, "k")


async def test_clients_of_an_allowed_network_need_no_key(store: Store, clockwork_settings: Settings) -> None:
    given = {"api_keys": (SecretStr("key"),), "clockwork_networks": ("10.0.0.0/8", "127.0.0.0/8")}
    settings = clockwork_settings.model_copy(update=given)
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url) as http:
        assert await create(http) == (200, "o")
        assert await cancel(http) == (200, "k")
        assert (await create(http, Origin="http://evil.example"))[0] == 401  # a page in a browser of that network
        assert (await http.post("/rpc", json={"jsonrpc": "2.0", "method": "stats", "id": 1})).status_code == 401
    elsewhere = clockwork_settings.model_copy(update=given | {"clockwork_networks": ("10.0.0.0/8",)})
    async with running(store, elsewhere) as api, httpx.AsyncClient(base_url=api.url) as http:
        assert (await create(http))[0] == 401


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_a_network_of_ipv4_counts_on_a_socket_for_both_kinds_of_address(
    store: Store, clockwork_settings: Settings
) -> None:
    given = {"api_keys": (SecretStr("key"),), "clockwork_networks": ("127.0.0.0/8",), "http_host": "::"}
    async with running(store, clockwork_settings.model_copy(update=given)) as api:
        port = httpx.URL(api.url).port
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            assert await create(http) == (200, "o")
        async with httpx.AsyncClient(base_url=f"http://[::1]:{port}") as http:
            assert (await create(http))[0] == 401


async def test_nobody_serves_it_unless_asked(store: Store, settings: Settings) -> None:
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url) as http:
        assert (await create(http))[0] == 404
        assert not api.added_urls


async def test_what_went_wrong_on_our_side_is_400_too(
    http: httpx.AsyncClient, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from penstock.protocol.errors import Unavailable

    def away(*_: Any) -> Any:
        raise Unavailable("as if Postgres were unavailable")

    monkeypatch.setattr(store, "transaction", away)
    assert await create(http) == (400, "Unknown exception")
    assert await cancel(http) == (400, "Unknown exception")
    failed = [record for record in caplog.records if "clockwork_failed" in record.getMessage()]
    assert [(record.levelname, "as if Postgres" in record.getMessage()) for record in failed] == [("WARNING", True)] * 2
    assert "Traceback" not in caplog.text


async def test_a_port_that_is_taken_is_told_by_its_setting(store: Store, clockwork_settings: Settings) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        api = Api(
            store=store,
            settings=clockwork_settings.model_copy(update={"clockwork_port": port}),
            additions=[Scheduler0, Clockwork],
        )
        with pytest.raises(SettingsError, match=f"{port} .*set PENSTOCK_CLOCKWORK_PORT to a free port"):
            await api.open()
        await api.close()
