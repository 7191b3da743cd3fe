"""API keys as their holders meet them: made in a real Postgres, shown to a real api over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from penstock.api import keys as api_keys
from penstock.api.keys import CreateKey, Key, KeysListParams, active_keys, create_key, list_keys, revoke_key
from penstock.api.process import Api
from penstock.api.table import METHODS
from penstock.db.pool import Store
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.api_key import Permission, implied
from penstock.settings.model import Settings
from tests.integration.apis import captured_log, running
from tests.integration.doors import postgres_away

GOOD = {"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "a"}, "id": 1}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"api_require_keys": True})


async def make(store: Store, name: str, *permissions: Permission, expires_in: float | None = None) -> tuple[int, str]:
    """A new key: its id and its secret."""
    async with store.session() as session:
        made = await create_key(session, CreateKey(name, permissions, expires_in))
    assert made is not None
    return made.id, made.key


async def records(store: Store, *, revoked: bool = True) -> dict[str, Key]:
    page = KeysListParams(1000, revoked=revoked)
    async with store.session() as session:
        return {record.name: record for record in await list_keys(session, page)}


class Holder:
    """A caller with a key."""

    def __init__(self, http: httpx.AsyncClient, key: str) -> None:
        self._http = http
        self._headers = {"Authorization": f"Bearer {key}"}

    async def post(self, body: Any) -> httpx.Response:
        return await self._http.post("/rpc", json=body, headers=self._headers)

    async def ask(self, method: str, params: Any = None) -> Any:
        request = {"jsonrpc": "2.0", "method": method, "id": 1} | ({} if params is None else {"params": params})
        return (await self.post(request)).json()

    async def status(self) -> int:
        return (await self.post({"jsonrpc": "2.0", "method": "rpc.discover", "id": 1})).status_code


async def until(condition: Callable[[], Coroutine[Any, Any, object]], seconds: float = 10) -> float:
    """How long it took for the condition to be true."""
    started = time.monotonic()
    while not await condition():
        assert time.monotonic() - started < seconds, f"not within {seconds} s"
        await asyncio.sleep(0.05)
    return time.monotonic() - started


def client(api: Api) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=api.url, timeout=30)


# Permissions


@pytest.mark.parametrize("permission", Permission)
async def test_key_may_call_what_its_permission_allows_and_is_told_so_for_all_else(
    store: Store, settings: Settings, permission: Permission
) -> None:
    _, secret = await make(store, "k", permission)
    async with running(store, settings) as api, client(api) as http:
        holder = Holder(http, secret)
        for method, needed in (
            {name: method.permission for name, method in METHODS.items()} | {"submit:a": Permission.ENQUEUE}
        ).items():
            response = await holder.post({"jsonrpc": "2.0", "method": method, "params": [], "id": 1})
            answer = response.json()
            if needed in implied([permission]):
                assert answer.get("error", {}).get("code") != -32003, method
                assert response.status_code == 200, method
                continue
            assert response.status_code == 403, method
            assert answer == {
                "jsonrpc": "2.0", "id": 1,
                "error": {"code": -32003, "message": f"Not permitted: this API key may not {needed}",
                          "data": {"needs": needed}},
            }  # fmt: skip


async def test_entries_of_a_batch_are_permitted_one_by_one(
    store: Store, settings: Settings, task_of: Callable[[int], Any]
) -> None:
    _, secret = await make(store, "feeder", Permission.ENQUEUE)
    async with running(store, settings) as api, client(api) as http:
        holder = Holder(http, secret)
        added = (await holder.post(GOOD)).json()["result"]["id"]
        batch = [
            GOOD | {"id": "one"},
            {"jsonrpc": "2.0", "method": "cancel", "params": {"id": added}, "id": "two"},
            {"jsonrpc": "2.0", "method": "cancel", "params": {"id": added}},
            {"jsonrpc": "2.0", "method": "no.such", "id": "three"},
            {"jsonrpc": "2.0", "method": "submit:b", "id": "four"},
        ]
        response = await holder.post(batch)
    assert response.status_code == 200
    answers = {answer["id"]: answer for answer in response.json()}
    assert set(answers) == {"one", "two", "three", "four"}
    assert answers["two"]["error"]["code"] == -32003
    assert answers["three"]["error"]["code"] == -32601
    assert "result" in answers["one"]
    assert "result" in answers["four"]
    assert (await task_of(added))["state"] == "SCHEDULED"


async def test_notification_that_is_not_permitted_is_no_silent_success(store: Store, settings: Settings) -> None:
    _, secret = await make(store, "reader", Permission.READ)
    async with running(store, settings) as api, client(api) as http:
        holder = Holder(http, secret)
        response = await holder.post({"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "a"}})
        assert (response.status_code, response.content) == (403, b"")
        assert (await holder.ask("list"))["result"]["tasks"] == []


# The life of a key


async def test_revoked_key_stops_within_ten_seconds(store: Store, settings: Settings) -> None:
    """At the real pace; revoked behind the api's back, as the command line does."""
    key_id, secret = await make(store, "leaked", Permission.ADMIN)
    async with running(store, settings) as api, client(api) as http:
        holder = Holder(http, secret)
        assert await holder.status() == 200
        async with store.session() as session:
            assert await revoke_key(session, key_id) is not None

        async def refused() -> bool:
            return await holder.status() == 401

        await until(refused, seconds=10)
    assert api_keys.REFRESH_SECONDS + api_keys.BELIEVED_SECONDS <= 10


async def test_a_request_that_waits_for_a_result_gets_none_once_its_key_is_revoked(
    store: Store, settings: Settings
) -> None:
    _, root = await make(store, "root", Permission.ADMIN)
    key_id, secret = await make(store, "leaked", Permission.READ)
    async with running(store, settings) as api, client(api) as http:
        admin, holder = Holder(http, root), Holder(http, secret)
        task_id = (await admin.ask("enqueue", {"action": "a", "delay": 3600}))["result"]["id"]
        wait = {"jsonrpc": "2.0", "method": "result", "params": {"id": task_id, "timeout": 20}, "id": 1}
        waiting = asyncio.create_task(holder.post(wait))
        await asyncio.sleep(0.5)
        await admin.ask("keys.revoke", {"id": key_id})
        await admin.ask("cancel", {"id": task_id})
        answer = await waiting
    assert answer.status_code == 401
    assert "result" not in answer.json()


async def test_key_made_elsewhere_is_accepted_within_seconds_and_until_it_expires(
    store: Store, settings: Settings, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "REFRESH_SECONDS", 0.05)
    async with running(store, settings) as api, client(api) as http:
        key_id, secret = await make(store, "new", Permission.READ, expires_in=3600)
        holder = Holder(http, secret)

        async def accepted() -> bool:
            return await holder.status() == 200

        async def refused() -> bool:
            return await holder.status() == 401

        await until(accepted)
        await sql.execute("update penstock.api_key set expires_at = now() where id = $1", key_id)
        await until(refused)
        await sql.execute("update penstock.api_key set expires_at = null where id = $1", key_id)
        await until(accepted)


async def test_keys_of_settings_and_of_postgres_are_accepted_beside_each_other(
    store: Store, settings: Settings
) -> None:
    _, kept = await make(store, "kept", Permission.READ)
    entry = f"ci:enqueue:{hashlib.sha256(b'by-digest').hexdigest()}"
    settings = settings.model_copy(
        update={"api_keys": (SecretStr("plain"), SecretStr(entry)), "api_require_keys": False}
    )
    async with running(store, settings) as api, client(api) as http:
        assert "result" in await Holder(http, kept).ask("stats")
        assert "result" in await Holder(http, "plain").ask("keys.list")
        assert "result" in await Holder(http, "by-digest").ask("enqueue", {"action": "a"})
        assert (await Holder(http, "by-digest").ask("stats"))["error"]["code"] == -32003
        for wrong in (entry, entry.rpartition(":")[2], "kept", "ci"):
            assert await Holder(http, wrong).status() == 401


async def test_use_is_noted_once_a_minute_and_not_by_the_request(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "REFRESH_SECONDS", 0.05)
    _, used = await make(store, "used", Permission.READ)
    _, spare = await make(store, "unused", Permission.READ)
    async with running(store, settings) as api, client(api) as http:
        assert await Holder(http, used).status() == 200

        async def noted() -> bool:
            return (await records(store))["used"].last_used_at is not None

        await until(noted)
        first = (await records(store))["used"].last_used_at
        for _ in range(20):
            assert await Holder(http, used).status() == 200
            await asyncio.sleep(0.02)
        assert (await records(store))["used"].last_used_at == first
        assert (await records(store))["unused"].last_used_at is None
    assert spare != used


async def test_a_use_that_cannot_be_noted_keeps_no_key_out(
    store: Store, settings: Settings, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "REFRESH_SECONDS", 0.05)
    monkeypatch.setattr(api_keys, "BELIEVED_SECONDS", 3.0)
    key_id, secret = await make(store, "used", Permission.READ)
    async with running(store, settings) as api, client(api) as http, sql.transaction():
        await sql.execute("select from penstock.api_key where id = $1 for update", key_id)
        holder, ends_at = Holder(http, secret), time.monotonic() + 6
        while time.monotonic() < ends_at:
            assert await holder.status() == 200
            await asyncio.sleep(0.02)


async def test_postgres_holds_no_secret(store: Store, sql: Any) -> None:
    _, secret = await make(store, "k", Permission.ADMIN)
    row = dict(await sql.fetchrow("select * from penstock.api_key"))
    assert row["hash"] == hashlib.sha256(secret.encode()).digest()
    assert secret.startswith(row["prefix"])
    assert secret not in json.dumps(row, default=str)
    assert len(secret) - len(row["prefix"]) > 30


async def test_name_is_free_again_after_its_key_is_revoked(store: Store) -> None:
    first, _ = await make(store, "ci", Permission.READ)
    async with store.session() as session:
        assert await create_key(session, CreateKey("ci", [Permission.READ])) is None
        revoked = await revoke_key(session, None, "ci")
        assert revoked is not None
        assert revoked.id == first
        again = await revoke_key(session, first)
        assert again is not None
        assert again.revoked_at == revoked.revoked_at
        assert await revoke_key(session, None, "ci") is None
        assert await revoke_key(session, 4711) is None
        assert await active_keys(session) == []
    second, _ = await make(store, "ci", Permission.READ)
    assert second != first
    assert set(await records(store, revoked=False)) == {"ci"}


# Over RPC


async def test_admin_makes_lists_and_revokes_keys_which_count_at_once(store: Store, settings: Settings) -> None:
    _, secret = await make(store, "root", Permission.ADMIN)
    async with running(store, settings) as api, client(api) as http:
        admin = Holder(http, secret)
        made = (await admin.ask("keys.create", {"name": "ci", "permissions": ["enqueue"], "expires_in": 60}))["result"]
        assert (made["name"], made["permissions"], made["revoked_at"]) == ("ci", ["enqueue"], None)
        assert made["expires_at"] > made["created_at"]
        assert made["key"].startswith(made["prefix"])
        holder = Holder(http, made["key"])
        assert "result" in await holder.ask("enqueue", {"action": "a"})
        for method, params in (
            ("keys.list", None), ("keys.revoke", {"id": made["id"]}),
            ("keys.create", {"name": "x", "permissions": ["admin"]}),
        ):  # fmt: skip
            assert (await holder.ask(method, params))["error"]["code"] == -32003, method
        page = (await admin.ask("keys.list", {"limit": 1}))["result"]
        assert page["keys"] == [{name: value for name, value in made.items() if name != "key"}]
        rest = (await admin.ask("keys.list", {"limit": 1, "cursor": page["cursor"]}))["result"]
        assert [key["name"] for key in rest["keys"]] == ["root"]
        gone = (await admin.ask("keys.revoke", {"id": made["id"]}))["result"]
        assert gone["revoked_at"] is not None
        assert await holder.status() == 401
        assert [key["name"] for key in (await admin.ask("keys.list"))["result"]["keys"]] == ["root"]
        both = (await admin.ask("keys.list", {"revoked": True}))["result"]["keys"]
        assert [key["name"] for key in both] == ["ci", "root"]


@pytest.mark.parametrize(
    ("method", "params", "code", "field"),
    [
        ("keys.create", {"name": "root", "permissions": ["read"]}, -32602, "name"),
        ("keys.create", {"name": " ", "permissions": ["read"]}, -32602, "name"),
        ("keys.create", {"name": "x", "permissions": []}, -32602, "permissions"),
        ("keys.create", {"name": "x", "permissions": ["root"]}, -32602, "permissions[0]"),
        ("keys.create", {"name": "x", "permissions": ["read"], "expires_in": 0}, -32602, "expires_in"),
        ("keys.create", {"name": "x"}, -32602, "permissions"),
        ("keys.revoke", {"id": 4711}, -32006, None),
        ("keys.list", {"limit": 0}, -32602, "limit"),
    ],
)
async def test_bad_params_of_key_methods_get_a_clear_error(
    store: Store, settings: Settings, method: str, params: Any, code: int, field: str | None
) -> None:
    _, secret = await make(store, "root", Permission.ADMIN)
    async with running(store, settings) as api, client(api) as http:
        error = (await Holder(http, secret).ask(method, params))["error"]
    assert error["code"] == code
    if field is not None:
        assert error["data"]["field"] == field
    assert set(await records(store)) == {"root"}


# Postgres away


async def test_keys_of_postgres_are_not_believed_for_long_without_postgres(
    store: Store,
    settings: Settings,
    postgres: EmbeddedPostgres,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether a key was revoked is unknown then: such a request is put off, not taken for one without a key."""
    monkeypatch.setattr(api_keys, "REFRESH_SECONDS", 0.05)
    monkeypatch.setattr(api_keys, "BELIEVED_SECONDS", 0.5)
    logged = captured_log(monkeypatch)
    _, secret = await make(store, "kept", Permission.READ)
    settings = settings.model_copy(update={"api_keys": (SecretStr("fixed"),)})
    async with running(store, settings) as api, client(api) as http:
        holder, fixed = Holder(http, secret), Holder(http, "fixed")

        async def put_off() -> bool:
            return await holder.status() == 503

        async def accepted() -> bool:
            return await holder.status() == 200

        await until(accepted, seconds=30)  # keys are read every 0.05 s, which a busy machine may not manage in 0.5
        async with postgres_away(postgres, database_url):
            await until(put_off)
            assert await fixed.status() == 200
            assert (await http.get("/scaling", headers={"X-API-Key": secret})).status_code == 503
            error = (await holder.post(GOOD)).json()["error"]
            assert error["message"] == "Temporarily unavailable, try again"
        await until(accepted, seconds=30)
    assert error["data"]["ref"] in [line.get("ref") for line in logged]


async def test_api_that_needs_keys_waits_for_postgres_before_it_listens(
    store: Store, settings: Settings, postgres: EmbeddedPostgres, database_url: str
) -> None:
    _, secret = await make(store, "k", Permission.READ)
    api = Api(store=store, settings=settings)
    async with postgres_away(postgres, database_url):
        with pytest.raises(Exception, match="unavailable"):
            await api.open()
        assert not api.listening.is_set()
    await api.close()
    async with running(store, settings) as api, client(api) as http:
        assert await Holder(http, secret).status() == 200


# Rates


async def test_caller_over_its_rate_is_told_when_to_come_again_and_harms_no_other(
    store: Store, settings: Settings
) -> None:
    _, greedy = await make(store, "greedy", Permission.ADMIN)
    _, modest = await make(store, "modest", Permission.ADMIN)
    settings = settings.model_copy(update={"api_rate_limit": 0.5, "api_rate_burst": 10})
    async with running(store, settings) as api, client(api) as http:
        first = await Holder(http, greedy).post([GOOD | {"id": n} for n in range(10)])
        assert [answer["result"]["state"] for answer in first.json()] == ["SCHEDULED"] * 10
        over = await Holder(http, greedy).post(GOOD)
        assert over.status_code == 429
        assert 1 <= int(over.headers["retry-after"]) <= 2
        error = over.json()["error"]
        assert (error["code"], over.json()["id"]) == (-32029, None)
        assert 0 < error["data"]["retry_after"] <= 2
        file = await http.get("/tasks/1/payload", headers={"X-API-Key": greedy})
        assert file.status_code == 429
        assert 1 <= int(file.headers["retry-after"]) <= 2
        assert (await Holder(http, modest).post(GOOD)).status_code == 200
        assert len((await Holder(http, modest).ask("list"))["result"]["tasks"]) == 11


async def test_rate_counts_entries_and_a_batch_over_it_is_refused_whole(store: Store, settings: Settings) -> None:
    settings = settings.model_copy(update={"api_require_keys": False, "api_rate_limit": 0.01, "api_rate_burst": 10})
    async with running(store, settings) as api, client(api) as http:
        headers = {"Content-Type": "application/json"}
        assert (await http.post("/rpc", json=[GOOD] * 4)).status_code == 200
        assert (await http.post("/rpc", content=b"no JSON", headers=headers)).status_code == 200
        assert (await http.post("/rpc", json=[GOOD] * 6)).status_code == 429
        assert (await http.post("/rpc", json=[GOOD, 5, 5, 5, 5])).status_code == 200
        assert (await http.post("/rpc", json=GOOD)).status_code == 429
    async with store.session() as session:
        assert (await session.fetch("count_live"))[0]["count"] == 5
