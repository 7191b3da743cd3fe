"""The Model Context Protocol at /mcp, asked by hand and by the official SDK's client, over a real api and Postgres."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

from penstock.api.keys import CreateKey, create_key
from penstock.api.mcp import EARLIER, SHOWN_CHARS, VERSION
from penstock.api.process import Api
from penstock.db.pool import Store
from penstock.protocol.api_key import Permission
from penstock.protocol.task import NewTask
from penstock.settings.model import Settings
from penstock.tasks import enqueue
from tests.integration.apis import running

META = {
    "io.modelcontextprotocol/protocolVersion": VERSION,
    "io.modelcontextprotocol/clientCapabilities": {},
}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"api_require_keys": True})


@pytest.fixture
async def api(store: Store, settings: Settings) -> AsyncIterator[Api]:
    async with running(store, settings) as api:
        yield api


class Agent:
    """A client of /mcp with a key, that speaks the version before the last, without a library."""

    def __init__(self, api: Api, key: str = "") -> None:
        self.api = api
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def post(self, message: Any, **headers: Any) -> httpx.Response:
        all_headers = {"MCP-Protocol-Version": EARLIER[0]} | self.headers | headers
        async with httpx.AsyncClient(base_url=self.api.url, timeout=30) as http:
            if isinstance(message, bytes):
                return await http.post(
                    "/mcp", content=message, headers=all_headers | {"Content-Type": "application/json"}
                )
            return await http.post("/mcp", json=message, headers=all_headers)

    async def ask(self, method: str, **params: Any) -> Any:
        answer = await self.post({"jsonrpc": "2.0", "id": 7, "method": method, "params": params})
        assert answer.status_code == 200, answer.text
        assert answer.json()["id"] == 7
        return answer.json()

    async def tools(self) -> dict[str, Any]:
        return {tool["name"]: tool for tool in (await self.ask("tools/list"))["result"]["tools"]}

    async def call(self, tool: str, **arguments: Any) -> Any:
        """The answer of a tool that succeeds."""
        result = (await self.ask("tools/call", name=tool, arguments=arguments))["result"]
        assert not result["isError"], result
        return json.loads(result["content"][0]["text"])

    async def refused(self, tool: str, **arguments: Any) -> str:
        """The text of a tool that fails."""
        result = (await self.ask("tools/call", name=tool, arguments=arguments))["result"]
        assert result["isError"], result
        text: str = result["content"][0]["text"]
        return text


@pytest.fixture
async def agent_of(api: Api, store: Store, settings: Settings) -> Callable[..., Any]:
    async def make(*permissions: Permission, **limits: Any) -> Agent:
        async with store.session() as session:
            made = await create_key(session, CreateKey(f"agent {secrets.token_hex(4)}", permissions, **limits))
        assert made is not None
        assert api._key_cache is not None
        await api._key_cache.refresh()
        return Agent(api, made.key)

    return make


@pytest.fixture
async def admin(agent_of: Any) -> Agent:
    agent: Agent = await agent_of(Permission.ADMIN)
    return agent


async def added(store: Store, *tasks: NewTask) -> list[int]:
    async with store.session() as session:
        return [made.id for made in await enqueue.enqueue(session, tasks)]


@pytest.fixture
async def task(store: Store) -> int:
    (task_id,) = await added(store, NewTask("a"))
    return task_id


async def audited(agent: Agent) -> list[tuple[str, str, str]]:
    await agent.api._methods.audit.drain()
    return [(one["door"], one["method"], one["outcome"]) for one in (await agent.call("audit_list"))["audit"]]


# The protocol


@asynccontextmanager
async def official(agent: Agent, mode: str) -> AsyncIterator[Client]:
    async with (
        create_mcp_http_client(agent.headers) as http,
        Client(streamable_http_client(f"{agent.api.url}/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


@pytest.mark.parametrize(("mode", "version"), [("auto", VERSION), (VERSION, VERSION), ("legacy", EARLIER[0])])
async def test_the_official_client_lists_and_calls_tools(admin: Agent, task: int, mode: str, version: str) -> None:
    async with official(admin, mode) as client:
        assert client.protocol_version == version
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        shown = await client.call_tool("status", {"id": task})
        looked = await client.call_tool("cancel", {"id": task})
        done = await client.call_tool("cancel", {"id": task, "confirm": said(looked)["confirm"]})
        wrong = await client.call_tool("status", {"id": "x"})
    assert tools["status"].annotations is not None
    assert tools["status"].annotations.read_only_hint
    assert said(shown)["state"] == "SCHEDULED"
    assert said(done) == {"id": task, "state": "CANCELLED"}
    assert wrong.is_error


def said(result: Any) -> Any:
    return json.loads(result.content[0].text)


@pytest.mark.parametrize(
    ("asked", "answered"),
    [*((one, one) for one in EARLIER), ("2024-11-05", EARLIER[0]), (VERSION, EARLIER[0]), ("2999-01-01", EARLIER[0])],
)
async def test_a_handshake_agrees_on_a_version_that_has_one(admin: Agent, asked: str, answered: str) -> None:
    result = (await admin.ask("initialize", protocolVersion=asked, capabilities={}, clientInfo={}))["result"]
    assert result["protocolVersion"] == answered
    assert result["serverInfo"]["name"] == "penstock"
    assert result["capabilities"] == {"tools": {}}
    done = await admin.post({"jsonrpc": "2.0", "method": "notifications/initialized"})
    assert (done.status_code, done.content) == (202, b"")
    assert (await admin.ask("ping"))["result"] == {}


def modern(method: str, meta: Any = META, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": "m", "method": method, "params": {"_meta": meta, **params}}


def heads(method: str, name: str | None = None, version: str = VERSION) -> dict[str, Any]:
    return {"MCP-Protocol-Version": version, "Mcp-Method": method} | ({} if name is None else {"Mcp-Name": name})


async def test_a_request_without_a_handshake_is_answered_by_what_it_declares(admin: Agent) -> None:
    found = (await admin.post(modern("server/discover"), **heads("server/discover"))).json()["result"]
    assert found["supportedVersions"] == [VERSION, *EARLIER]
    assert found["resultType"] == "complete"
    assert found["_meta"]["io.modelcontextprotocol/serverInfo"]["name"] == "penstock"
    listed = (await admin.post(modern("tools/list"), **heads("tools/list"))).json()["result"]
    assert listed["cacheScope"] == "private"
    for name in ("stats", "=?base64?c3RhdHM=?="):
        called = await admin.post(modern("tools/call", name="stats"), **heads("tools/call", name))
        assert not called.json()["result"]["isError"]


@pytest.mark.parametrize(
    ("message", "headers", "status", "code"),
    [
        (modern("tools/list"), heads("tools/list", version="2999-01-01"), 400, -32020),
        (
            modern("tools/list", META | {next(iter(META)): "2999-01-01"}),
            heads("tools/list", version="2999-01-01"),
            400,
            -32022,
        ),
        (modern("tools/list", {}), heads("tools/list", version="1900-01-01"), 400, -32022),
        (modern("tools/list", {}), heads("tools/list"), 400, -32602),
        (modern("tools/list", {next(iter(META)): VERSION}), heads("tools/list"), 400, -32602),
        (modern("tools/list"), heads("tools/call"), 400, -32020),
        (modern("tools/call", name="stats"), heads("tools/call"), 400, -32020),
        (modern("tools/call", name="stats"), heads("tools/call", "list"), 400, -32020),
        (modern("tools/call", name="stats"), heads("tools/call", "=?base64?!?="), 400, -32020),
        (
            modern("tools/call", name="stats"),
            heads("tools/call") | {"Mcp-Name": "=?base64?é?=".encode("latin-1")},
            400,
            -32020,
        ),
        (modern("ping"), heads("ping"), 404, -32601),
        (modern("resources/list"), heads("resources/list"), 404, -32601),
        ({"jsonrpc": "2.0", "id": 1, "method": "server/discover"}, {}, 200, -32601),
        ({"jsonrpc": "2.0", "id": None, "method": "ping"}, {}, 400, -32600),
        ([{"jsonrpc": "2.0", "id": 1, "method": "ping"}], {}, 400, -32600),
        ([], {}, 400, -32600),
        ({"jsonrpc": "2.0", "id": 1, "result": {}}, {}, 400, -32600),
        ({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"arguments": []}}, {}, 400, -32602),
        ({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "statsx"}}, {}, 200, -32602),
        (b"{", {}, 400, -32700),
        (b"\xff", {}, 400, -32700),
    ],
)
async def test_what_is_no_proper_message_gets_an_error_of_the_protocol(
    admin: Agent, message: Any, headers: dict[str, Any], status: int, code: int
) -> None:
    answer = await admin.post(message, **headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    if code == -32022:
        assert answer.json()["error"]["data"]["supported"] == [VERSION, *EARLIER]


async def test_a_request_without_its_version_is_refused_with_the_versions(admin: Agent) -> None:
    async with httpx.AsyncClient(base_url=admin.api.url, headers=admin.headers) as http:
        answer = await http.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
        assert answer.status_code == 400
        assert VERSION in answer.json()["error"]["message"]
        for method in ("GET", "DELETE"):
            assert (await http.request(method, "/mcp")).status_code == 405


async def test_junk_of_any_form_is_refused_and_the_next_message_is_served(admin: Agent) -> None:
    for body in (b"", b"null", b"[" * 5000, b'{"a":' * 5000, b'"x"', b"9" * 5000, b'{"jsonrpc":"2.0","id":1}'):
        answer = await admin.post(body)
        assert answer.status_code == 400, body[:20]
        assert "error" in answer.json()
    assert (await admin.ask("ping"))["result"] == {}


async def test_a_body_over_the_limit_is_refused(store: Store, settings: Settings) -> None:
    async with running(
        store, settings.model_copy(update={"api_require_keys": False, "request_limit_bytes": 16_384})
    ) as api:
        assert (await Agent(api).post(b" " * 65_536)).status_code == 413


async def test_pages_of_other_origins_are_refused_also_with_a_key(admin: Agent) -> None:
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    assert (await admin.post(ping, Origin="https://evil.example")).status_code == 403
    assert (await admin.post(ping, Origin=admin.api.url)).status_code == 200


async def test_no_key_is_no_entry(api: Api) -> None:
    answer = await Agent(api).post({"jsonrpc": "2.0", "id": 1, "method": "ping"})
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"


async def test_without_keys_it_serves_this_machine_alone_and_none_where_it_is_off(
    store: Store, settings: Settings, task: int
) -> None:
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    open_settings = settings.model_copy(update={"api_require_keys": False})
    async with running(store, open_settings) as api:
        agent = Agent(api)
        confirm = (await agent.call("cancel", id=task))["confirm"]
        assert (await agent.call("cancel", id=task, confirm=confirm))["state"] == "CANCELLED"
        assert (await agent.post(ping, Host="evil.example")).status_code == 403
    async with running(store, open_settings.model_copy(update={"mcp": False})) as api:
        assert (await Agent(api).post(ping)).status_code == 404


async def test_a_caller_over_its_rate_is_told_when_to_come_again(store: Store, settings: Settings) -> None:
    limited = settings.model_copy(update={"api_require_keys": False, "api_rate_limit": 0.01, "api_rate_burst": 3})
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    async with running(store, limited) as api:
        answers = [await Agent(api).post(ping) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    assert "Retry-After" in answers[-1].headers
    assert answers[-1].json()["error"]["code"] == -32603  # ours, -32029, is one that the specification reserves


# What a key may


async def test_a_read_key_gets_tools_that_only_read(agent_of: Any, task: int) -> None:
    reader = await agent_of(Permission.READ)
    tools = await reader.tools()
    assert {"status", "list", "stats", "task_explain"} <= set(tools)
    assert all(tool["annotations"]["readOnlyHint"] for tool in tools.values())
    assert "may not admin" in await reader.refused("cancel", id=task)
    assert "may not admin" in await reader.refused("bulk_delete", all=True)
    assert "may not enqueue" in await reader.refused("enqueue", action="a")
    assert (await reader.call("status", id=task))["state"] == "SCHEDULED"


async def test_a_key_that_enqueues_gets_no_more_than_that(agent_of: Any) -> None:
    feeder = await agent_of(Permission.ENQUEUE, actions=("mail.*",))
    tools = await feeder.tools()
    assert set(tools) == {"enqueue", "workflow_create"}
    assert "mail.*" in tools["enqueue"]["description"]
    assert (await feeder.call("enqueue", action="mail.send", payload={"to": "a"}))["id"]
    assert "may enqueue mail.* alone" in await feeder.refused("enqueue", action="pay")


async def test_a_key_of_a_tenant_sees_and_changes_what_is_its_own(agent_of: Any, store: Store) -> None:
    ours, theirs = await added(store, NewTask("a", tenant="acme"), NewTask("a", tenant="other"))
    acme = await agent_of(Permission.ADMIN, tenant="acme")
    tools = await acme.tools()
    assert "cancel" in tools
    assert not {"action_pause", "dlq_purge", "audit_list", "tenant_list"} & set(tools)
    assert [one["id"] for one in (await acme.call("list"))["tasks"]] == [ours]
    assert f"No such task: {theirs}" in await acme.refused("cancel", id=theirs)
    assert "bound to the tenant" in await acme.refused("action_pause", action="a")
    assert (await acme.call("bulk_cancel", all=True))["about"]["count"] == 1
    assert "must be 'acme'" in await acme.refused("bulk_cancel", action="a", tenant="other")


# Changes


async def test_a_change_is_made_by_the_second_call_and_recorded(admin: Agent, task: int) -> None:
    first = await admin.call("cancel", id=task, reason="no use")
    assert first["changed"] is False
    assert first["about"]["state"] == "SCHEDULED"
    assert (await admin.call("status", id=task))["state"] == "SCHEDULED"
    assert await audited(admin) == []
    done = await admin.call("cancel", reason="no use", id=task, confirm=first["confirm"])
    assert done == {"id": task, "state": "CANCELLED"}
    assert await audited(admin) == [("mcp", "cancel", "ok")]


async def test_a_confirmation_is_for_the_same_key_tool_arguments_and_some_minutes(
    admin: Agent, agent_of: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await added(store, NewTask("a"), NewTask("a"))
    confirm = (await admin.call("cancel", id=one))["confirm"]
    other = await agent_of(Permission.ADMIN)
    assert "another key" in await other.refused("cancel", id=one, confirm=confirm)
    assert "other arguments" in await admin.refused("cancel", id=two, confirm=confirm)
    assert "other arguments" in await admin.refused("cancel", id=one, reason="r", confirm=confirm)
    assert "other arguments" in await admin.refused("reschedule", id=one, delay=5, confirm=confirm)
    until, count, signature = confirm.split(".")
    for forged in (
        f"{int(until) + 9}.{count}.{signature}",
        f"{until}.9.{signature}",
        "",
        "x",
        f"{until}.{count}.é",
        True,
    ):
        assert "confirm" in await admin.refused("cancel", id=one, confirm=forged)
    monkeypatch.setattr("penstock.api.mcp.time.time", lambda: float(until) + 1)
    assert "older than 300 s" in await admin.refused("cancel", id=one, confirm=confirm)
    monkeypatch.undo()
    assert (await admin.call("status", id=one))["state"] == "SCHEDULED"
    assert (await admin.call("cancel", id=one, confirm=confirm))["state"] == "CANCELLED"


async def test_another_api_process_takes_the_confirmation(
    admin: Agent, task: int, store: Store, settings: Settings
) -> None:
    confirm = (await admin.call("cancel", id=task))["confirm"]
    async with running(store, settings) as second:
        agent = Agent(second)
        agent.headers = admin.headers
        assert (await agent.call("cancel", id=task, confirm=confirm))["state"] == "CANCELLED"


async def test_a_bulk_change_needs_its_dry_run_and_as_many_tasks_as_that_counted(admin: Agent, store: Store) -> None:
    await added(store, *[NewTask("a")] * 5)
    first = await admin.call("bulk_cancel", action="a")
    assert first["about"]["count"] == 5
    assert "job" not in first
    again = await admin.call("bulk_cancel", action="a", confirm=first["confirm"], dry_run=True)
    assert again["changed"] is False
    await added(store, *[NewTask("a")] * 5)
    assert "is of 5 tasks, and 10 match now" in await admin.refused("bulk_cancel", action="a", confirm=first["confirm"])
    assert (await admin.call("job_list"))["jobs"] == []
    second = await admin.call("bulk_cancel", action="a", dry_run=False)
    assert (await admin.call("bulk_cancel", action="a", confirm=second["confirm"]))["job"]
    assert await audited(admin) == [("mcp", "bulk.cancel", "ok")]


async def test_each_kind_of_change_shows_what_it_is_about(admin: Agent) -> None:
    made = {"name": "s", "expression": "@daily", "action": "a"}
    first = await admin.call("schedule_create", **made)
    assert first["about"] is None
    await admin.call("schedule_create", **made, confirm=first["confirm"])
    assert (await admin.call("schedule_delete", name="s"))["about"]["expression"] == "@daily"
    assert (await admin.call("action_pause", action="a"))["about"]["action"] == "a"
    assert (await admin.call("tenant_pause", tenant="t"))["about"]["tenant"] == "t"
    assert (await admin.call("route_set", name="r", queue="q", actions=["a"]))["about"] == {"routes": []}
    assert (await admin.call("rejected_purge", limit=5))["about"]["rejected"] == []
    assert (await admin.call("dlq_purge", queue="results", limit=5))["about"]["messages"] == []
    assert (await admin.call("ordering_release", key="k"))["about"]["keys"] == []
    assert (await admin.call("rejected_purge", ids=[1]))["about"] is None
    for tool, arguments in (
        ("cancel", {"id": 99}), ("job_cancel", {"id": 99}), ("workflow_cancel", {"id": 99}),
        ("schedule_pause", {"name": "x"}),
    ):  # fmt: skip
        assert "No such" in await admin.refused(tool, **arguments)


async def test_a_wrong_argument_is_an_error_that_the_model_can_read(admin: Agent) -> None:
    assert "Invalid params: idd is unknown; did you mean id?" in await admin.refused("status", idd=1)
    assert "Invalid params: id is missing" in await admin.refused("cancel")
    assert "all is missing" in await admin.refused("bulk_delete")
    error = (await admin.ask("tools/call", name="cancle", arguments={}))["error"]
    assert "did you mean cancel?" in error["message"]


async def test_a_long_answer_is_cut_and_says_so(admin: Agent, store: Store) -> None:
    await added(store, *[NewTask("a")] * 300)
    result = (await admin.ask("tools/call", name="list", arguments={"limit": 300}))["result"]
    assert not result["isError"], result
    whole, note = (part["text"] for part in result["content"])
    assert len(whole) == SHOWN_CHARS
    assert note.startswith(f"Cut: {SHOWN_CHARS} of ")
    assert len((await admin.call("list", limit=5))["tasks"]) == 5


async def test_a_wait_for_a_result_ends_with_its_time(admin: Agent, task: int) -> None:
    assert (await admin.call("result", id=task, timeout=0.1))["state"] == "SCHEDULED"
