"""scheduler0's API over real HTTP, held to the contract of its servers and clients."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import httpx
import msgspec
import pytest
from pydantic import SecretStr

from penstock.compat.scheduler0 import store as scheduler0store
from penstock.compat.scheduler0.http import records as http_records
from penstock.compat.scheduler0.http.records import AsyncTasks, Progress
from penstock.compat.scheduler0.jobs import ACTION
from penstock.db.notify import Notifier
from penstock.db.pool import Store
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.api_key import digest_of
from penstock.protocol.task import NewTask
from penstock.schedules.firing import Imports, ScheduleFiring
from penstock.schedules.store import start_import
from penstock.settings.model import Settings
from penstock.supervisor.retention import Retention
from penstock.tasks import enqueue, settle
from tests.integration.apis import RunningApi, running
from tests.integration.doors import postgres_away

ZERO = "0001-01-01T00:00:00Z"
UNSET = {"startDate": ZERO, "endDate": ZERO, "lastExecutionDate": ZERO}


@dataclass
class Door:
    """A client with a credential, under a prefix of the api; the settings that it runs with."""

    client: httpx.AsyncClient
    store: Store
    settings: Settings
    api: RunningApi

    def stop(self) -> None:
        """What a signal does to the api."""
        self.api.stop()

    async def call(self, method: str, path: str, body: Any = None, **more: Any) -> httpx.Response:
        if body is not None:
            more["json"] = body
        return await self.client.request(method, path, **more)

    async def data(self, method: str, path: str, body: Any = None, status: int = 200, **more: Any) -> Any:
        """What the envelope of a success carries."""
        response = await self.call(method, path, body, **more)
        assert response.status_code == status, response.text
        told = response.json()
        assert told["success"] is True
        assert told.keys() == {"data", "success"}
        return told["data"]

    async def problem(self, status: int, method: str, path: str, body: Any = None, **more: Any) -> Any:
        response = await self.call(method, path, body, **more)
        assert response.status_code == status, response.text
        told = response.json()
        assert told["success"] is False
        assert told.keys() == {"data", "success"}
        return told["data"]

    async def project(self, name: str = "p") -> int:
        made = await self.data("POST", "/projects", {"name": name, "description": "d"}, 201)
        return int(made["id"])

    def imports(self) -> Imports:
        return Imports(store=self.store, settings=self.settings)

    async def jobs(self, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
        """Make jobs, and have the supervisor make their schedules; returns them as the async task answers them."""
        response = await self.call("POST", "/jobs", list(jobs))
        assert response.status_code == 202, response.text
        while await self.imports().run_once():
            pass
        task = await self.data("GET", response.headers["location"])
        assert task["state"] == 2, task
        found: list[dict[str, Any]] = json.loads(task["output"])
        return found


def job(project: int, **more: Any) -> dict[str, Any]:
    return {
        "projectId": project, "spec": "@every 1m", "timezone": "America/New_York", "executionType": "http",
        "callbackUrl": "http://127.0.0.1:9/callback", "data": '{"a":1}',
    } | more  # fmt: skip


@asynccontextmanager
async def opened(store: Store, settings: Settings, prefix: str = "/v1", **changes: Any) -> AsyncIterator[Door]:
    settings = settings.model_copy(update={"scheduler0": True} | changes)
    async with store.session() as session:
        made = await scheduler0store.create_credential(session, readable=False)
    headers = {"x-api-key": made.api_key, "x-secret-key": made.api_secret}
    async with (
        running(store, settings) as api,
        httpx.AsyncClient(base_url=api.url + prefix, headers=headers, timeout=60) as client,
    ):
        yield Door(client, store, settings, api)


@pytest.fixture
async def door(store: Store, settings: Settings) -> AsyncIterator[Door]:
    async with opened(store, settings) as door:
        yield door


# Who may come in


@pytest.mark.parametrize("prefix", ["/v1", "/api/v1"])
@pytest.mark.parametrize("header", ["x-secret-key", "X-API-Secret"])
async def test_both_prefixes_and_both_headers_of_the_secret_lead_in(
    store: Store, settings: Settings, prefix: str, header: str
) -> None:
    async with opened(store, settings, prefix) as door:
        secret = door.client.headers.pop("x-secret-key")
        page = await door.data("GET", "/credentials?limit=10&offset=0", headers={header: secret, "X-Account-ID": "7"})
        assert [one["apiKey"] for one in page["credentials"]] == [door.client.headers["x-api-key"]]


async def test_without_a_credential_only_the_health_is_told(door: Door) -> None:
    key, secret = door.client.headers.pop("x-api-key"), door.client.headers.pop("x-secret-key")
    wrong: list[dict[str, str]] = [
        {}, {"x-api-key": key}, {"x-secret-key": secret}, {"x-api-key": key, "x-secret-key": "0" * 64},
        {"x-api-key": "x", "x-secret-key": secret},
        {"x-api-key": key, "x-secret-key": digest_of(secret.encode()).hex()},
        {"x-peer": "cmd", "Authorization": "Basic Og=="}, {"x-api-key": "k" * 5000, "x-secret-key": secret},
    ]  # fmt: skip
    paths = ["/projects?limit=1&offset=0", "/jobs", "/credentials", "/async-tasks/1", "/executions"]
    for headers in wrong:
        for path in paths[:1] if headers else paths:
            assert await door.problem(401, "GET", path, headers=headers) == "unauthorized requests"
    health = await door.data("GET", "/healthcheck")
    assert health.keys() == {"leaderAddress", "leaderId", "raftStats"}
    assert all(isinstance(value, str) for value in health["raftStats"].values())


async def test_peer_mode_makes_the_first_credential(store: Store, settings: Settings) -> None:
    peer = {"scheduler0_auth_username": "admin", "scheduler0_auth_password": SecretStr("pass:word")}
    async with opened(store, settings, **peer) as door:
        for name in ("x-api-key", "x-secret-key"):
            del door.client.headers[name]
        basic = "Basic " + base64.b64encode(b"admin:pass:word").decode()
        for kind in ("cmd", "peer"):
            made = await door.data(
                "POST", "/credentials", {}, 201, headers={"x-peer": kind, "Authorization": basic}
            )  # fmt: skip
            assert len(made["apiSecret"]) == 64
        for headers in (
            {"x-peer": "other", "Authorization": basic}, {"Authorization": basic}, {"x-peer": "cmd"},
            {"x-peer": "cmd", "Authorization": "Basic " + base64.b64encode(b"admin:wrong").decode()},
            {"x-peer": "cmd", "Authorization": "Basic \u00e4"},
        ):  # fmt: skip
            raw = {name: value.encode("latin-1") for name, value in headers.items()}
            assert await door.problem(401, "POST", "/credentials", {}, headers=raw) == "unauthorized requests"


async def test_it_is_not_there_unless_a_setting_asks(store: Store, settings: Settings) -> None:
    async with opened(store, settings, scheduler0=False) as door:
        assert (await door.call("GET", "/healthcheck")).status_code == 404


async def test_every_answer_has_its_headers(door: Door) -> None:
    for path, status in (("/healthcheck", 200), ("/projects", 400), ("/nothing", 404), ("/projects/999", 404)):
        response = await door.call("GET", path)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == "*"
        assert response.headers.get_list("x-frame-options") == ["DENY"]
        assert response.headers["content-type"] == "application/json"
    gone = await door.call("DELETE", "/projects/999")
    assert (gone.status_code, gone.content) == (204, b"")
    assert gone.headers["access-control-allow-origin"] == "*"
    assert await door.problem(405, "PATCH", "/projects") == "Method Not Allowed"


async def test_a_rate_holds_for_a_credential(store: Store, settings: Settings) -> None:
    async with opened(store, settings, api_rate_limit=0.001, api_rate_burst=2) as door:
        for _ in range(2):
            await door.data("GET", "/projects?limit=1&offset=0")
        await door.problem(429, "GET", "/projects?limit=1&offset=0")


async def test_what_is_changed_is_noted_with_the_credential_and_without_data(door: Door, sql: Any) -> None:
    project = await door.project("mine")
    (made,) = await door.jobs(job(project, data='{"x": "hidden"}', callbackUrl="http://127.0.0.1:9/?token=hidden"))
    await door.call("PUT", f"/jobs/{made['id']}", {"data": '{"x": "hidden"}', "executionType": "http"})
    await door.problem(400, "DELETE", f"/projects/{project}")
    assert (await door.call("DELETE", f"/jobs/{made['id']}")).status_code == 204
    credential = await door.data("POST", "/credentials", {}, 201)
    change = {"archived": True, "apiKey": credential["apiKey"], "apiSecret": credential["apiSecret"]}
    await door.data("PUT", f"/credentials/{credential['id']}", change)
    await door.data("POST", "/start-jobs", status=202)
    await door.problem(404, "GET", "/jobs/999")
    await door.problem(401, "POST", "/projects", {}, headers={"x-secret-key": "wrong"})
    query = "select who, door, address, method, params, outcome from penstock.audit order by id"
    while any(row["outcome"] is None for row in await sql.fetch(query)):
        await asyncio.sleep(0.02)
    rows = await sql.fetch(query)
    number = await sql.fetchval("select min(id) from penstock.scheduler0_credential")
    assert {(row["who"], row["door"], row["address"]) for row in rows} == {
        (f"scheduler0:{number}", "scheduler0", "127.0.0.1")
    }
    assert [(row["method"], row["outcome"]) for row in rows] == [
        ("POST /projects", "ok"), ("POST /jobs", "ok"), ("PUT /jobs/{id}", "ok"),
        ("DELETE /projects/{id}", "cannot delete project with jobs"), ("DELETE /jobs/{id}", "ok"),
        ("POST /credentials", "ok"), ("PUT /credentials/{id}", "ok"),
    ]  # fmt: skip
    shown = [json.loads(row["params"]) for row in rows]
    assert shown[0]["name"] == "mine"
    assert (shown[2]["id"], shown[2]["executionType"]) == (str(made["id"]), "http")
    assert (shown[6]["id"], shown[6]["archived"]) == (str(credential["id"]), True)
    told = str(shown)
    assert "hidden" not in told
    assert credential["apiSecret"] not in told
    assert credential["apiKey"] not in told


async def test_nothing_is_changed_that_cannot_be_noted(door: Door, sql: Any) -> None:
    await sql.execute("alter table penstock.audit rename to audit_away")
    assert (await door.call("POST", "/projects", {"name": "p", "description": "d"})).status_code >= 500
    await sql.execute("alter table penstock.audit_away rename to audit")
    assert await sql.fetchval("select count(*) from penstock.scheduler0_project") == 0


# Credentials


async def test_a_secret_is_told_once_and_kept_as_a_digest(door: Door, sql: Any) -> None:
    made = await door.data("POST", "/credentials", {}, 201)
    assert made.keys() == {"id", "apiKey", "apiSecret", "dateCreated"}  # archived is false, so it is left out
    assert int(made["apiKey"], 16)
    assert int(made["apiSecret"], 16)
    again = await door.data("GET", f"/credentials/{made['id']}")
    assert again == {name: value for name, value in made.items() if name != "apiSecret"}
    row = await sql.fetchrow("select * from penstock.scheduler0_credential where id = $1", made["id"])
    assert row["secret"] is None
    assert row["secret_hash"] == digest_of(made["apiSecret"].encode())
    page = await door.data("GET", "/credentials?limit=1&offset=0")
    assert (page["total"], page["limit"], page["credentials"]) == (2, 1, [again])  # newest first
    assert "offset" not in page
    assert await door.data("GET", "/credentials?limit=5&offset=9") == {"total": 2, "offset": 9, "limit": 5}


async def test_a_setting_keeps_secrets_readable(store: Store, settings: Settings) -> None:
    async with opened(store, settings, scheduler0_readable_secrets=True) as door:
        made = await door.data("POST", "/credentials", {"archived": True}, 201)
        assert await door.data("GET", f"/credentials/{made['id']}") == made
        keys = {name: made[name] for name in ("apiKey", "apiSecret")}
        assert (await door.data("PUT", f"/credentials/{made['id']}", keys | {"archived": True}))["archived"] is True
        without = {"apiKey": made["apiKey"], "archived": False}
        await door.problem(200, "PUT", f"/credentials/{made['id']}", without)


async def test_an_archived_credential_is_refused_at_once_and_may_come_back(door: Door) -> None:
    made = await door.data("POST", "/credentials", {}, 201)
    own = {"x-api-key": made["apiKey"], "x-secret-key": made["apiSecret"]}
    await door.data("GET", "/projects?limit=1&offset=0", headers=own)
    path, keys = f"/credentials/{made['id']}", {name: made[name] for name in ("apiKey", "apiSecret")}
    assert (await door.data("PUT", path, keys | {"archived": True}))["archived"] is True
    await door.problem(401, "GET", "/projects?limit=1&offset=0", headers=own)
    # What was read can be sent back, though it has no secret.
    seen = await door.data("GET", path)
    assert "archived" not in await door.data("PUT", path, seen | {"archived": False})
    await door.data("GET", "/projects?limit=1&offset=0", headers=own)
    assert (await door.call("POST", f"{path}/archive", {"archivedBy": "me"})).status_code == 204
    await door.problem(401, "GET", "/projects?limit=1&offset=0", headers=own)
    for body in (keys | {"apiKey": "other"}, keys | {"apiSecret": "other"}, {"archived": True}):
        assert "only archived changes" in await door.problem(200, "PUT", path, body)
    assert await door.problem(200, "PUT", "/credentials/999", keys) == "message: credential not found, code: 404"
    for _ in range(2):
        assert (await door.call("DELETE", path)).status_code == 204
    assert await door.problem(400, "GET", path) == "message: credential not found, code: 404"


async def test_what_is_no_credential_is_told(door: Door, sql: Any) -> None:
    assert await door.problem(400, "POST", "/credentials", content=b"") == "request body required"
    await door.problem(422, "POST", "/credentials", content=b"{")
    await door.problem(422, "POST", "/credentials", [])
    for method in ("GET", "PUT", "DELETE"):
        text = await door.problem(400, method, "/credentials/x", {} if method == "PUT" else None)
        assert text == 'strconv.Atoi: parsing "x": invalid syntax'


async def test_no_credentials_at_all_is_not_found(store: Store, settings: Settings, sql: Any) -> None:
    peer = {"scheduler0_auth_username": "u", "scheduler0_auth_password": SecretStr("p")}
    async with opened(store, settings, **peer) as door:
        await sql.execute("delete from penstock.scheduler0_credential")
        del door.client.headers["x-api-key"]
        door.client.headers["x-peer"] = "cmd"
        door.client.auth = ("u", "p")
        assert await door.problem(404, "GET", "/credentials?limit=1&offset=0") == "there no credentials"


# Paging


@pytest.mark.parametrize("path", ["/credentials?", "/projects?", "/jobs?projectId=1&", "/executions?"])
async def test_limit_and_offset_must_be_given_the_limit_first(door: Door, path: str) -> None:
    assert await door.problem(400, "GET", path) == "limit is not provided"
    assert await door.problem(400, "GET", f"{path}offset=0") == "limit is not provided"
    assert await door.problem(400, "GET", f"{path}limit=1") == "offset is not provided"
    assert await door.problem(400, "GET", f"{path}limit=x&offset=0") == 'strconv.Atoi: parsing "x": invalid syntax'
    assert "negative" in await door.problem(400, "GET", f"{path}limit=-1&offset=0")
    assert "out of range" in await door.problem(400, "GET", f"{path}limit=1&offset={10**20}")


# Projects


async def test_projects_live_and_die(door: Door) -> None:
    made = await door.data("POST", "/projects", {"name": "one", "description": "first"}, 201)
    assert made.keys() == {"id", "name", "description", "dateCreated"}
    path = f"/projects/{made['id']}"
    assert await door.data("GET", path) == made
    changed = await door.data("PUT", path, {"name": "uno"})
    assert changed == made | {"name": "uno"}
    await door.project("two")
    taken = await door.problem(400, "PUT", path, {"name": "two"})
    assert taken == "another project exists with the same name two"
    assert await door.problem(400, "PUT", path, {"description": "x"}) == "project name is required"
    assert "NUL" in await door.problem(400, "PUT", path, {"name": "a\0"})
    assert "the limit is 500" in await door.problem(400, "PUT", path, {"name": "a" * 501})
    assert await door.problem(404, "PUT", "/projects/999", {"name": "x"}) == "project does not exist"
    assert await door.problem(404, "GET", "/projects/999") == "project does not exist"
    page = await door.data("GET", "/projects?limit=10&offset=0")
    assert [one["name"] for one in page["projects"]] == ["uno", "two"]
    assert page["total"] == 2
    await door.jobs(job(made["id"]))
    assert await door.problem(400, "DELETE", path) == "cannot delete project with jobs"
    (found,) = (await door.data("GET", f"/jobs?projectId={made['id']}&limit=1&offset=0"))["jobs"]
    assert (await door.call("DELETE", f"/jobs/{found['id']}")).status_code == 204
    for _ in range(2):
        assert (await door.call("DELETE", path)).status_code == 204
    for method in ("GET", "PUT", "DELETE"):
        await door.problem(400, method, "/projects/1x", {"name": "n"} if method == "PUT" else None)


async def test_a_project_that_is_not_made_is_told_in_a_form_of_its_own(door: Door) -> None:
    await door.project("one")
    for body in ({"name": "x"}, {"description": "x"}, {}, {"name": "one", "description": "x"}, {"name": None}):
        told = await door.problem(400, "POST", "/projects", body)
        assert told.keys() == {"Message", "Type"}
        assert told["Type"] == 400
    assert await door.problem(400, "POST", "/projects", content=b"") == "request body required"
    await door.problem(400, "POST", "/projects", content=b"nonsense")
    await door.problem(400, "POST", "/projects", {"name": 5})
    await door.problem(400, "POST", "/projects", {"name": "a\0b", "description": "x"})


async def test_no_projects_are_a_page_without_a_list(door: Door) -> None:
    assert await door.data("GET", "/projects?limit=10&offset=0") == {"limit": 10}


# Jobs


async def test_jobs_are_made_by_an_async_task(door: Door) -> None:
    project = await door.project()
    sent = [job(project), job(project, spec="0 30 2 * * *", data="", executionType="cloud", callbackUrl="")]
    response = await door.call("POST", "/jobs", sent)
    assert response.status_code == 202
    ((task_id,), location) = response.json()["data"], response.headers["location"]
    assert location.startswith("/async-tasks/")
    assert "warning" not in response.headers

    waiting = asyncio.create_task(door.data("GET", location))  # held until something changes
    while await door.imports().run_once():
        pass
    task = await asyncio.wait_for(waiting, 60)
    if task["state"] != 2:
        assert task["output"] == ""
        task = await door.data("GET", location)
    assert task.keys() == {"id", "requestId", "input", "output", "service", "state", "dateCreated"}
    assert (task["id"], task["state"], task["service"]) == (task_id, 2, "create_job")
    assert location.endswith(task["requestId"])
    assert json.loads(task["input"]) == sent
    assert await door.data("GET", f"/async-tasks/{task_id}") == task  # by its number too

    first, second = json.loads(task["output"])
    assert first == sent[0] | UNSET | {"id": first["id"], "dateCreated": first["dateCreated"]}
    assert second["id"] == first["id"] + 1
    assert "data" not in second
    assert "callbackUrl" not in second
    assert await door.data("GET", f"/jobs/{first['id']}") == first
    page = await door.data("GET", f"/jobs?projectId={project}&limit=10&offset=0")
    assert page == {"total": 2, "limit": 10, "jobs": [first, second]}


async def test_an_async_task_that_is_at_work_is_told_at_its_change_and_one_that_failed_at_once(
    door: Door, sql: Any
) -> None:
    project = await door.project()
    location = (await door.call("POST", "/jobs", [job(project)] * 501)).headers["location"]
    waiting = asyncio.create_task(door.data("GET", location))
    assert await door.imports().run_once() == 500
    task = await asyncio.wait_for(waiting, 60)
    assert (task["state"], task["output"]) == (1, "")
    assert await door.imports().run_once() == 1
    assert (await door.data("GET", location))["state"] == 2

    # What the checks cannot foresee: a schedule of that name is there already.
    first = await sql.fetchval("select max(id) + 1 from penstock.scheduler0_job")
    await sql.execute(
        """insert into penstock.schedule (name, expression, timezone, action, payload)
           select 'scheduler0:' || n, '@hourly', 'UTC', 'a', '{}' from generate_series($1::bigint, $1 + 100) n""",
        first,
    )
    location = (await door.call("POST", "/jobs", [job(project)])).headers["location"]
    assert await door.imports().run_once() == 1
    task = await door.data("GET", location)
    assert task["state"] == 3
    told = json.loads(task["output"])
    assert told.keys() == {"Message", "Type"}
    assert re.search("scheduler0:[0-9]+: name .* is a schedule's name already", told["Message"]), told
    for unknown in ("999999", "nothing", "%00"):
        text = await door.problem(404, "GET", f"/async-tasks/{unknown}")
        assert text == "message: task doesn't exist, code: 404"


async def test_whoever_waits_for_an_async_task_is_answered_when_the_api_stops(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = asyncio.Event()
    look = AsyncTasks._look

    async def seen(self: AsyncTasks, request_id: str) -> Progress:
        progress = await look(self, request_id)
        looked.set()
        return progress

    monkeypatch.setattr(AsyncTasks, "_look", seen)
    async with opened(store, settings) as door:
        location = (await door.call("POST", "/jobs", [job(await door.project())])).headers["location"]
        waiting = asyncio.create_task(door.data("GET", location))
        await asyncio.wait_for(looked.wait(), 60)
        door.stop()
        task = await asyncio.wait_for(waiting, 60)
    assert (task["state"], task["output"]) == (0, "")


async def test_the_first_check_that_fails_refuses_all(door: Door, sql: Any) -> None:
    project = await door.project()
    good, far = job(project), job(999)
    bad_spec, bad_zone = job(project, spec="* * * * * 7"), job(project, timezone="Local")
    wrong = [
        ([far, bad_zone, bad_spec], "job spec is not valid * * * * * 7"),
        ([far, bad_zone], "job timezone is not valid, provided timezone is Local"),
        ([job(project, timezone="")], "job timezone is not valid, provided timezone is "),
        ([job(project, timezone="Mars/One")], "job timezone is not valid, provided timezone is Mars/One"),
        ([good, far], "project does not exist, provided projectId is 999"),
        ([job(project, spec="")], "job spec is not valid "),
        ([job(project, spec="0 0 0 30 2 *")], "job spec is not valid 0 0 0 30 2 *"),
    ]  # fmt: skip
    for jobs, text in wrong:
        assert await door.problem(400, "POST", "/jobs", jobs) == text
    for url in (
        "ftp://x",
        "",
        "http://",
        "http://x:port/",
        "http://[::1/",
        "http://a b/",
        "http://u:p@x/",
        "http://" + "x" * 9000,
    ):
        assert "callbackUrl" in await door.problem(400, "POST", "/jobs", [job(project, callbackUrl=url)])
    assert "NUL" in await door.problem(400, "POST", "/jobs", [job(project, data="a\0b")])
    assert "too large" in await door.problem(400, "POST", "/jobs", [job(project, data="x" * 300_000)])
    for content in (b"{", b'{"spec": 1}', b"[1]", b'[{"projectId": "1"}]', b'[{"startDate": "x"}]', b"\xff", b"null"):
        assert "cannot be read" in await door.problem(422, "POST", "/jobs", content=content)
    for unknown in (b'"note": "\xff"', b'"\xff": 1'):  # the body is kept as text
        content = json.dumps([good]).encode()[:-2] + b", " + unknown + b"}]"
        assert "cannot be read" in await door.problem(422, "POST", "/jobs", content=content)
    await door.problem(422, "POST", "/jobs", good)
    assert await door.problem(400, "POST", "/jobs", content=b" ") == "request body required"
    assert await door.data("POST", "/jobs", [], 202) is None
    assert await sql.fetchval("select count(*) from penstock.scheduler0_job") == 0
    assert await sql.fetchval("select count(*) from penstock.schedule_import") == 0


async def test_fields_without_effect_are_kept_or_passed_over(door: Door) -> None:
    project = await door.project()
    (made,) = await door.jobs(
        job(
            project, id=77, executionId="abc", lastExecutionDate="2020-01-01T00:00:00Z", timezoneOffset=-5,
            startDate="2031-01-02T03:04:05+01:00", endDate=ZERO, executorId=4, retryMax=9, createdBy="me",
            spec="0 * * * * *",
        )
    )  # fmt: skip
    assert "executionId" not in made
    assert made["lastExecutionDate"] == ZERO
    assert (made["startDate"], made["endDate"], made["timezoneOffset"]) == ("2031-01-02T02:04:05Z", ZERO, -5)
    found = await door.data("GET", f"/jobs/{made['id']}")
    assert found == made


async def test_a_spec_of_five_fields_is_taken_and_warned_of(door: Door, sql: Any) -> None:
    project = await door.project()
    response = await door.call("POST", "/jobs", [job(project, spec="0 9 * * *"), job(project)])
    assert response.status_code == 202
    assert "seconds" in response.headers["warning"]
    while await door.imports().run_once():
        pass
    next_at = await sql.fetchval(
        "select min(next_at) from penstock.schedule_clock where extract(minute from next_at) = 9"
    )
    assert next_at is not None
    assert next_at.second == 0


async def test_jobs_are_listed_by_project_in_the_order_of_their_making(door: Door) -> None:
    project, other = await door.project("a"), await door.project("b")
    made = await door.jobs(*(job(project, data=str(n)) for n in range(5)), job(other))
    path = f"/jobs?projectId={project}"
    page = await door.data("GET", f"{path}&limit=2&offset=1")
    assert page == {"total": 5, "offset": 1, "limit": 2, "jobs": made[1:3]}
    assert await door.data("GET", f"{path}&limit=2&offset=50") == {"total": 5, "offset": 5, "limit": 2}
    assert await door.data("GET", "/jobs?projectId=99&limit=2&offset=0") == {"limit": 2}
    assert await door.problem(400, "GET", "/jobs?limit=1&offset=0") == "projectId is not provided"
    assert await door.problem(400, "GET", "/jobs") == "projectId is not provided"
    await door.problem(400, "GET", "/jobs?projectId=x&limit=1&offset=0")


async def test_a_jobs_data_goes_to_no_schedule_that_another_caller_made(door: Door, sql: Any) -> None:
    project = await door.project()
    (made,) = await door.jobs(job(project))
    name = f"scheduler0:{made['id']}"
    following = f"scheduler0:{made['id'] + 1}"
    await sql.execute("delete from penstock.schedule")
    entries = [
        msgspec.Raw(msgspec.json.encode({"name": wanted, "expression": "@yearly", "action": "theirs"}))
        for wanted in (name, following, "scheduler0:x", "scheduler0:٧", "free")
    ]
    async with door.store.transaction() as session:
        await start_import(session, entries, replaces=True)
    assert await door.imports().run_once() == 5
    assert [row[0] for row in await sql.fetch("select name from penstock.schedule")] == ["free"]
    (second,) = await door.jobs(job(project))
    assert f"scheduler0:{second['id']}" == following
    assert await sql.fetchval("select action from penstock.schedule where name = $1", following) == ACTION


async def test_what_may_change_of_a_job_changes_and_an_empty_text_leaves_it(door: Door, sql: Any) -> None:
    project = await door.project()
    (made,) = await door.jobs(job(project))
    path = f"/jobs/{made['id']}"
    changed = await door.data(
        "PUT", path,
        {"data": "new {{run}}", "callbackUrl": "", "spec": "@hourly", "timezone": "UTC", "endDate": ZERO},
    )  # fmt: skip
    assert changed == made | {"data": "new {{run}}"}
    moved = await door.data("PUT", path, {"callbackUrl": "https://example.org/x"})
    assert moved == changed | {"callbackUrl": "https://example.org/x"}
    row = await sql.fetchrow(
        "select payload, paused, expression from penstock.schedule where name = $1", f"scheduler0:{made['id']}"
    )
    payload = json.loads(row["payload"])
    assert (payload["url"], payload["job"]["data"]) == ("https://example.org/x", "new {{run}}")
    assert (row["paused"], row["expression"]) == (False, "@robfig @every 1m")

    async def paused() -> bool:
        return bool(
            await sql.fetchval("select paused from penstock.schedule where name = $1", f"scheduler0:{made['id']}")
        )

    assert (await door.data("PUT", path, {"executionType": "cloud"}))["executionType"] == "cloud"
    assert await paused()  # kept, and never run
    await door.data("PUT", path, {"executionType": "http"})
    assert not await paused()
    await door.problem(400, "PUT", path, {"callbackUrl": "nowhere"})
    assert await door.problem(404, "PUT", "/jobs/999", {"data": "x"}) == "job cannot be found"
    assert await door.problem(400, "PUT", path, content=b"") == "request body required"
    await door.problem(400, "PUT", path, [])
    await door.problem(400, "PUT", path, content=b'{"data": ')
    await door.data("PUT", path, {"callback_url": "https://example.org/snake"})
    assert await door.data("PUT", path, {"callbackUrl": "https://example.org/x", "callback_url": "ignored"})
    assert (await door.data("GET", path))["callbackUrl"] == "https://example.org/x"


async def test_a_deleted_job_is_fired_no_more(door: Door, sql: Any) -> None:
    (made,) = await door.jobs(job(await door.project()))
    assert (await door.call("DELETE", f"/jobs/{made['id']}")).status_code == 204
    for method in ("GET", "DELETE"):
        assert await door.problem(404, method, f"/jobs/{made['id']}") == "job cannot be found"
        await door.problem(400, method, "/jobs/x")
    assert await sql.fetchval("select count(*) from penstock.schedule") == 0
    assert await sql.fetchval("select count(*) from penstock.schedule_clock") == 0


async def test_a_job_whose_schedule_is_still_being_made_cannot_be_lost_to_it(door: Door, sql: Any) -> None:
    project = await door.project()
    response = await door.call("POST", "/jobs", [job(project)] * 501)
    (found,) = (await door.data("GET", f"/jobs?projectId={project}&limit=1&offset=500"))["jobs"]
    await door.imports().run_once()  # its schedule is in the part that is left
    for method, body in (("DELETE", None), ("PUT", {"data": "later"})):
        assert "still being made" in await door.problem(503, method, f"/jobs/{found['id']}", body)
    await door.imports().run_once()
    assert (await door.data("GET", response.headers["location"]))["state"] == 2
    assert (await door.data("PUT", f"/jobs/{found['id']}", {"data": "later"}))["data"] == "later"
    assert (await door.call("DELETE", f"/jobs/{found['id']}")).status_code == 204
    assert await sql.fetchval("select count(*) from penstock.schedule") == 500


async def test_a_job_is_changed_and_deleted_while_a_round_of_fires_is_stored(door: Door, store: Store) -> None:
    (made,) = await door.jobs(job(await door.project()))
    for method, body, status in (("PUT", {"data": "later"}, 200), ("DELETE", None, 204)):
        async with store.transaction() as session:
            clocks = await session._connection.fetch("select from penstock.schedule_clock for update")
            assert len(clocks) == 1
            changing = asyncio.create_task(door.call(method, f"/jobs/{made['id']}", body))
            await asyncio.sleep(1)
            assert not changing.done()
        assert (await changing).status_code == status


async def test_members_of_a_job_may_be_written_in_snake_case(door: Door) -> None:
    project = await door.project()
    given = {
        "project_id": project, "spec": "@every 1m", "callback_url": "https://example.org/snake", "timezone": "UTC",
        "start_date": "2030-01-01T00:00:00Z", "timezone_offset": 60, "execution_type": "http",
    }  # fmt: skip
    (made,) = await door.jobs(given)
    assert made["projectId"] == project
    assert made["callbackUrl"] == "https://example.org/snake"
    assert (made["startDate"], made["timezoneOffset"]) == ("2030-01-01T00:00:00Z", 60)
    both = job(project) | {"project_id": 999_999, "callback_url": "https://example.org/other"}
    (made,) = await door.jobs(both)
    assert (made["projectId"], made["callbackUrl"]) == (project, job(project)["callbackUrl"])


async def test_runs_missed_in_downtime_are_skipped(door: Door, store: Store, settings: Settings, sql: Any) -> None:
    project = await door.project()
    await door.jobs(job(project, spec="@every 2s"), job(project, spec="@every 25m"))
    await sql.execute("update penstock.schedule_clock set next_at = next_at - interval '2 hours', "
                      "due_at = due_at - interval '2 hours'")  # fmt: skip
    await ScheduleFiring(store=store, notifier=Notifier(store), settings=settings).run_once()
    ran = dict(await sql.fetch("select payload::json #>> '{job,spec}', count(*) from penstock.task group by 1"))
    assert ran.keys() <= {"@every 2s"}
    assert ran.get("@every 2s", 0) <= 1
    assert await sql.fetchval("select min(next_at) > clock_timestamp() from penstock.schedule_clock")


async def test_all_jobs_of_one_call_tick_together(door: Door, sql: Any) -> None:
    project = await door.project()
    await door.jobs(*[job(project)] * 600)
    rows = await sql.fetch(
        """select distinct c.next_at, j.created_at from penstock.schedule_clock c
           join penstock.schedule s on s.id = c.schedule_id
           join penstock.scheduler0_job j on s.name = 'scheduler0:' || j.id"""
    )
    ((next_at, created_at),) = rows  # though they were written in two transactions
    assert next_at == created_at.replace(microsecond=0) + timedelta(minutes=1)


async def test_fifty_thousand_jobs_are_taken_in_one_call_and_paged_through(door: Door) -> None:
    project = await door.project()
    response = await door.call("POST", "/jobs", [job(project, data=str(n)) for n in range(50_000)])
    assert response.status_code == 202, response.text[:500]
    page = await door.data("GET", f"/jobs?projectId={project}&limit=10&offset=49990")
    assert page["total"] == 50_000
    assert [one["data"] for one in page["jobs"]] == [str(n) for n in range(49_990, 50_000)]
    whole = await door.data("GET", f"/jobs?projectId={project}&limit=60000&offset=0")
    assert (whole["limit"], len(whole["jobs"])) == (50_000, 50_000)
    told = await door.problem(400, "POST", "/jobs", [job(project)] * 50_001)
    assert told == "50001 jobs are too many for one request, which takes 50000"


# The rest


async def test_what_concerns_a_node_is_accepted(door: Door) -> None:
    for path in ("/start-jobs", "/stop-jobs"):
        assert await door.data("POST", path, status=202) is None
        await door.problem(401, "POST", path, headers={"x-secret-key": "wrong"})
    assert (await door.data("GET", "/peer-handshake"))["leaderId"] == "1"
    assert await door.data("GET", "/execution-logs", status=202) is None


async def test_executions_are_runs_with_what_came_of_them(door: Door, sql: Any) -> None:
    project, other = await door.project("a"), await door.project("b")
    first, _, _ = await door.jobs(job(project), job(project), job(other))
    # A schedule of another owner, whose name is like a job's.
    await sql.execute(
        """with made as (insert into penstock.schedule (name, expression, timezone, action, payload)
           values ('scheduler0:x', '@yearly', 'UTC', 'scheduler0.callback', '{}') returning id)
           insert into penstock.schedule_clock (schedule_id, next_at, due_at) select id, now(), now() from made"""
    )
    firing = ScheduleFiring(store=door.store, notifier=Notifier(door.store), settings=door.settings)
    now = await sql.fetchval("select date_trunc('second', now())")
    for instant in (now - timedelta(seconds=2), now):
        await sql.execute("update penstock.schedule_clock set next_at = $1, due_at = $1", instant)
        assert (await firing.run_once()).tasks == 4
    assert (await door.data("GET", "/executions?limit=10&offset=0"))["total"] == 6
    page = await door.data(
        "GET", f"/executions?jobId={first['id']}&limit=1&offset=0", headers={"X-Account-ID": "12"}
    )  # fmt: skip
    (run,) = page["executions"]
    assert (page["total"], page["offset"], page["limit"]) == (2, 0, 1)
    assert run.keys() == {
        "id", "accountId", "uniqueId", "state", "nodeId", "jobId", "lastExecutionDatetime", "nextExecutionDatetime",
        "jobQueueVersion", "executionVersion", "dateCreated", "dateModified",
    }  # fmt: skip
    assert (run["jobId"], run["state"], run["accountId"], run["dateModified"]) == (first["id"], 0, 12, None)
    assert len(run["uniqueId"]) >= 200
    assert run["lastExecutionDatetime"] < run["nextExecutionDatetime"]
    (older,) = (await door.data("GET", f"/executions?jobId={first['id']}&limit=1&offset=1"))["executions"]
    assert older["executionVersion"] < run["executionVersion"]
    assert older["uniqueId"] != run["uniqueId"]
    assert (await door.data("GET", f"/jobs/{first['id']}"))["lastExecutionDate"] == run["lastExecutionDatetime"]

    async def total(**query: Any) -> int:
        params = {"limit": 10, "offset": 0} | query
        return int((await door.data("GET", "/executions", params=params))["total"])

    assert [await total(projectId=one) for one in (project, other, 999)] == [4, 2, 0]
    assert [await total(state=one) for one in ("scheduled", "success", "failed")] == [6, 0, 0]
    async with door.store.transaction() as session:
        await settle.cancel(session, [run["id"]])
    assert [await total(state=one) for one in ("scheduled", "success", "failed")] == [5, 0, 1]
    (failed,) = (await door.data("GET", "/executions?state=failed&limit=10&offset=0"))["executions"]
    assert (failed["id"], failed["state"]) == (run["id"], 2)
    assert failed["dateModified"] is not None
    assert await total(startDate="2031-01-01T00:00:00Z") == 0
    assert await total(endDate="2031-01-01T00:00:00Z", startDate="2020-01-01T00:00:00Z") == 6
    for query in ("state=done", "startDate=yesterday", "startDate=2020-01-01", "jobId=x"):
        await door.problem(400, "GET", f"/executions?limit=1&offset=0&{query}")


async def test_other_requests_go_on_while_thousands_of_executions_are_listed(
    door: Door, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await door.jobs(job(await door.project()))
    async with door.store.transaction() as session:
        (task,) = await enqueue.enqueue(session, [NewTask(ACTION)])
    await sql.execute(
        "insert into penstock.schedule_run (schedule_id, scheduled_at, outcome, task_id)"
        " select id, now() - n * interval '1 s', 'FIRED', $1 from penstock.schedule, generate_series(1, 500) n",
        task.id,
    )
    turns = 0
    seen: set[int] = set()
    execution = http_records._execution

    def noting(row: Any) -> dict[str, Any]:
        seen.add(turns)
        return execution(row)

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    monkeypatch.setattr(http_records, "_execution", noting)
    taking = asyncio.create_task(take_turns())
    page = await door.data("GET", "/executions?limit=1000&offset=0")
    taking.cancel()
    assert len(page["executions"]) == 500
    assert len(seen) >= 5


async def test_a_body_that_is_too_large_is_told(store: Store, settings: Settings) -> None:
    async with opened(store, settings, request_limit_bytes=2048) as door:
        await door.problem(413, "POST", "/projects", {"name": "n" * 3000, "description": "d"})


async def test_while_postgres_is_away_no_request_is_taken(
    door: Door, postgres: EmbeddedPostgres, database_url: str
) -> None:
    async with postgres_away(postgres, database_url):
        for method, path in (("GET", "/healthcheck"), ("POST", "/projects")):
            assert await door.problem(503, method, path) == "peer cannot accept requests"
    assert await door.data("GET", "/projects?limit=1&offset=0") == {"limit": 1}


async def test_requests_and_their_imports_are_removed_in_time(door: Door, sql: Any) -> None:
    await door.jobs(job(await door.project()))
    left = (await door.call("POST", "/jobs", [job(1)])).headers["location"]  # its schedule is not made yet
    retention = Retention(
        store=door.store, settings=door.settings.model_copy(update={"retention_schedule_runs_seconds": 0.0})
    )
    await retention.run_once()
    kept = await sql.fetchval("select array_agg(request_id) from penstock.scheduler0_request")
    assert [f"/async-tasks/{name}" for name in kept] == [left]
    assert await sql.fetchval("select count(*) from penstock.scheduler0_job") == 2
