"""API keys that are bound to a tenant, shown to a real api: they meet no other tenant's tasks, by any method."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from penstock.api.keys import CreateKey, active_keys, create_key
from penstock.api.table import METHODS, method_of
from penstock.cli.app import app
from penstock.db import context
from penstock.db.pool import Store
from penstock.protocol import answers
from penstock.protocol.api_key import Permission
from penstock.protocol.method import Scope
from penstock.protocol.method import method as declare
from penstock.protocol.reports import decode_reports, encode_notification, make_token
from penstock.protocol.task import NewTask
from penstock.results.apply import apply_reports
from penstock.settings.model import Settings
from penstock.supervisor.bulk_jobs import BulkJobs
from penstock.tasks import claim, enqueue, settle
from tests.integration.apis import running

SECRET = "ours-and-nobody-elses"  # stands in all names and keys that are another tenant's or of no tenant
HIDDEN = "what-nobody-else-may-read"  # stands in payloads, labels, results and reasons


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"api_require_keys": True})


class Holder:
    def __init__(self, http: httpx.AsyncClient, key: str) -> None:
        self._http = http
        self.key = key
        self._headers = {"Authorization": f"Bearer {key}"}

    async def post(self, body: Any) -> httpx.Response:
        return await self._http.post("/rpc", json=body, headers=self._headers)

    async def ask(self, method: str, **params: Any) -> Any:
        answer = (await self.post({"jsonrpc": "2.0", "method": method, "params": params, "id": 1})).json()
        return answer.get("result", answer.get("error"))

    async def get(self, path: str) -> httpx.Response:
        return await self._http.get(path, headers=self._headers)


class Stand:
    """An api, its all-powerful key and two that are bound."""

    def __init__(self, http: httpx.AsyncClient, keys: dict[str, str]) -> None:
        self.http = http
        self.admin = Holder(http, keys["admin"])
        self.acme = Holder(http, keys["acme"])
        self.other = Holder(http, keys["other"])


@pytest.fixture
async def stand(store: Store, settings: Settings) -> AsyncIterator[Stand]:
    keys = {}
    async with store.session() as session:
        for name, tenant in (("admin", None), ("acme", "acme"), ("other", "other")):
            made = await create_key(session, CreateKey(name, [Permission.ADMIN], tenant=tenant))
            assert made is not None
            keys[name] = made.key
        assert {key.name: key.tenant for key in await active_keys(session)} == {
            "admin": None, "acme": "acme", "other": "other",
        }  # fmt: skip
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, timeout=60) as http:
        yield Stand(http, keys)


def test_every_method_has_decided_what_it_is_to_a_bound_key() -> None:
    with pytest.raises(TypeError, match="scope"):
        declare("made.up", permission=Permission.READ)  # type: ignore[call-arg]
    submit = method_of("submit:a")
    assert submit is not None
    assert submit.scope is Scope.OWN
    assert method_of("made.up") is None


def test_the_page_tells_what_each_method_is_to_a_bound_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tenants.md").read_text("utf-8")
    rows: dict[str, set[str]] = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 2 and cells[1] in ("its tenant's", "open", "refused"):
            rows.setdefault(cells[1], set()).update(name.strip("` ") for name in cells[0].split(","))
    words = {Scope.OWN: "its tenant's", Scope.OPEN: "open", Scope.CLOSED: "refused"}
    assert rows == {
        word: {name for name, method in METHODS.items() if method.scope is this}
        | ({"submit:<action>"} if this is Scope.OWN else set())
        for this, word in words.items()
    }


async def test_a_payload_and_a_result_as_files_are_their_tenants(store: Store, stand: Stand) -> None:
    ids = {}
    for holder, name in ((stand.acme, "acme"), (stand.other, "other"), (stand.admin, "nobody")):
        ids[name] = (await holder.ask("enqueue", action="a", payload={"of": name, "text": HIDDEN}))["id"]
    async with store.transaction() as session:
        dispatch = await claim.claim(session, 10)
        assert dispatch is not None
        await settle.finish(session, {(task.id, task.claim): f'"{HIDDEN}"' for task in dispatch.tasks})
    for what in ("payload", "result"):
        for name, task_id in ids.items():
            found = await stand.acme.get(f"/tasks/{task_id}/{what}")
            assert found.status_code == (200 if name == "acme" else 404), (what, name)
            assert (HIDDEN in found.text) is (name == "acme")
            assert (await stand.admin.get(f"/tasks/{task_id}/{what}")).status_code == 200


async def test_a_closed_method_is_refused_with_the_reason(stand: Stand) -> None:
    for method in METHODS:
        response = await stand.acme.post({"jsonrpc": "2.0", "method": method, "params": [], "id": 1})
        answer = response.json()
        if METHODS[method].scope is Scope.CLOSED:
            assert response.status_code == 403, method
            assert answer["error"]["code"] == -32003
            assert "bound to the tenant 'acme'" in answer["error"]["message"]
            assert method in answer["error"]["message"]
        else:
            assert answer.get("error", {}).get("code") != -32003, method
    unknown = (await stand.acme.post({"jsonrpc": "2.0", "method": "made.up", "id": 1})).json()
    assert unknown["error"]["code"] == -32601


async def test_doors_that_know_no_tenants_are_shut(stand: Stand) -> None:
    answer = await stand.acme.get("/scaling")
    assert answer.status_code == 403
    assert "bound to the tenant 'acme'" in answer.json()["error"]["message"]
    assert (await stand.admin.get("/scaling")).status_code == 200


async def test_a_permission_still_counts(store: Store, settings: Settings) -> None:
    async with store.session() as session:
        made = await create_key(session, CreateKey("reader", [Permission.READ], tenant="acme"))
    assert made is not None
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, timeout=60) as http:
        reader = Holder(http, made.key)
        assert (await reader.ask("enqueue", action="a"))["data"] == {"needs": "enqueue"}
        assert (await reader.ask("list"))["tasks"] == []


async def test_what_a_bound_key_adds_is_its_tenants(stand: Stand, sql: Any) -> None:
    ids = [
        (await stand.acme.ask("enqueue", action="a"))["id"],
        (await stand.acme.ask("enqueue", action="a", tenant="acme"))["id"],
        (await stand.acme.ask("submit:a", objectID=23))["id"],
    ]
    batch = [{"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "a"}, "id": n} for n in range(3)]
    ids += [answer["result"]["id"] for answer in (await stand.acme.post(batch)).json()]
    refused = await stand.acme.ask("enqueue", action="a", tenant="other")
    assert refused["code"] == -32602
    assert "must be 'acme', to which this API key is bound, not 'other'" in refused["message"]
    rows = await sql.fetch("select distinct tenant from penstock.task where id = any($1::bigint[])", ids)
    assert [row[0] for row in rows] == ["acme"]
    assert await sql.fetchval("select count(*) from penstock.task") == len(ids)


async def test_batches_of_two_keys_at_once_are_kept_apart(stand: Stand, sql: Any) -> None:
    def batch(tenant: str) -> list[Any]:
        return [
            {"jsonrpc": "2.0", "method": "enqueue", "params": {"action": tenant, "unique_key": str(n)}, "id": n}
            for n in range(100)
        ]

    await asyncio.gather(
        *(holder.post(batch(name)) for _ in range(5) for name, holder in (("acme", stand.acme), ("other", stand.other)))
    )
    rows = await sql.fetch("select action, tenant, count(*) from penstock.task group by 1, 2 order by 1")
    assert [tuple(row) for row in rows] == [("acme", "acme", 100), ("other", "other", 100)]


async def test_a_unique_key_of_another_is_not_seen_or_replaced(stand: Stand) -> None:
    theirs = (await stand.other.ask("enqueue", action="a", unique_key="k", payload={"s": SECRET}, delay=3600))["id"]
    nobodys = (await stand.admin.ask("enqueue", action="a", unique_key="k", payload={"s": SECRET}, delay=3600))["id"]
    for params in ({}, {"on_duplicate": "replace", "unique": "live"}, {"on_duplicate": "error", "unique": "live"}):
        answer = await stand.acme.ask("enqueue", action="a", unique_key="k", payload={"mine": 1}, **params)
        assert answer.get("id", answer.get("data", {}).get("id")) not in (theirs, nobodys)
    for holder, task in ((stand.other, theirs), (stand.admin, nobodys)):
        assert (await holder.ask("status", id=task, detail=True))["payload"] == {"s": SECRET}
    shown = await stand.acme.ask("list", key="k")
    assert [task["tenant"] for task in shown["tasks"]] == ["acme"]


async def _furnish(stand: Stand, store: Store) -> dict[str, Any]:
    """Tasks, workflows, schedules and jobs that are not acme's, in many states, each with SECRET in it."""
    made: dict[str, Any] = {"tasks": [], "workflows": [], "schedules": [], "jobs": []}
    for holder, name in ((stand.other, "other"), (stand.admin, "nobody")):
        for state in ("SCHEDULED", "CANCELLED", "WAITING", "later"):
            options = {"delay": 3600} if state == "later" else {}
            answer = await holder.ask(
                "enqueue", action=f"{SECRET}-{state}", payload={"s": HIDDEN}, unique_key=f"{SECRET}-{state}",
                ordering_key=f"{SECRET}-{name}", labels={"l": SECRET, "h": HIDDEN}, limit_key=HIDDEN, **options,
            )  # fmt: skip
            made["tasks"].append(answer["id"])
            if state == "CANCELLED":
                await holder.ask("cancel", id=answer["id"], reason=HIDDEN)
        flow = await holder.ask(
            "workflow.create",
            steps=[{"name": SECRET, "action": SECRET, "payload": {"h": HIDDEN}}],
            name=HIDDEN,
            key=SECRET,
        )
        made["workflows"].append(flow["id"])
        schedule = await holder.ask(
            "schedule.create", name=f"{SECRET}-{name}", expression="@daily", action=SECRET, payload={"h": HIDDEN}
        )
        made["schedules"].append(schedule["name"])
        job = await holder.ask("bulk.cancel", action=f"{SECRET}-none")
        made["jobs"].append(job["job"])
    # Tasks that have run, with a result and with a failure.
    async with store.transaction() as session:
        await enqueue.enqueue(session, [NewTask(SECRET, tenant=tenant) for tenant in ("other", None)])
    async with store.session() as session:
        dispatch = await claim.claim(session, 100)
    assert dispatch is not None
    async with store.transaction() as session:
        await settle.finish(session, {(task.id, task.claim): json.dumps({"r": HIDDEN}) for task in dispatch.tasks[:2]})
    made["tasks"] += [task.id for task in dispatch.tasks if task.id not in made["tasks"]]
    return made


async def test_no_method_shows_or_changes_what_is_anothers(stand: Stand, store: Store, sql: Any) -> None:
    mine = (await stand.acme.ask("enqueue", action="mine", delay=3600))["id"]
    made = await _furnish(stand, store)
    before = await _everything(sql)
    calls: list[tuple[str, dict[str, Any]]] = []
    for task in made["tasks"]:
        calls += [
            ("status", {"id": task}), ("status", {"id": task, "detail": True}), ("task.explain", {"id": task}),
            ("result", {"id": task, "timeout": 0}),
            ("cancel", {"id": task}), ("retry", {"id": task}), ("reschedule", {"id": task, "delay": 1}),
        ]  # fmt: skip
    for ids in (made["tasks"], [*made["tasks"], mine]):
        calls += [("status", {"ids": ids, "detail": True})]
        calls += [("result", {"ids": ids, "timeout": 0.1, "wait": wait}) for wait in ("all", "any")]
    states = ("SCHEDULED", "ACQUIRED", "WAITING", "ERROR", "SUCCESS", "CRITICAL_ERROR", "CANCELLED")
    for state in (None, *states):
        shared = {} if state is None else {"state": state}
        calls += [("list", shared), ("list", shared | {"labels": {"l": SECRET}})]
        for name in ("SCHEDULED", "CANCELLED", "WAITING", "later"):
            calls += [("list", shared | {"key": f"{SECRET}-{name}"}), ("list", shared | {"action": f"{SECRET}-{name}"})]
        calls += [("list", shared | {"key": f"other\x1f{SECRET}"}), ("list", shared | {"tenant": "other"})]
    for which in (*({"id": flow} for flow in made["workflows"]), {"key": SECRET}, {"key": SECRET, "tenant": "other"}):
        calls += [(f"workflow.{verb}", which) for verb in ("status", "cancel", "retry")]
    calls += [("workflow.list", {}), ("workflow.list", {"tenant": "other"})]
    calls += [("schedule.list", {}), ("schedule.list", {"tenant": "other"})]
    for name in made["schedules"]:
        calls += [
            (f"schedule.{verb}", {"name": name}) for verb in ("get", "pause", "resume", "run_now", "runs", "delete")
        ]
        calls += [("schedule.update", {"name": name, "action": "b"})]
        calls += [("schedule.create", {"name": name, "expression": "@hourly", "action": "b", "replace": True})]
    calls += [(f"task.{verb}", {"token": make_token(made["tasks"][0], 1), **more})
              for verb, more in (("complete", {}), ("fail", {"error": "e"}))]  # fmt: skip
    for job in made["jobs"]:
        calls += [("job.get", {"id": job}), ("job.cancel", {"id": job})]
    calls += [("stats", {}), ("stats", {"tenant": "other"})]
    calls += [("job.list", {}), ("tenant.get", {"tenant": "other"}), ("tenant.get", {"tenant": "*"})]
    for verb in ("cancel", "retry", "delete", "reschedule"):
        more = {"delay": 1} if verb == "reschedule" else {}
        calls += [
            (f"bulk.{verb}", {"all": True, "dry_run": True, **more}),
            (f"bulk.{verb}", {"tenant": "other", **more}),
            (f"bulk.{verb}", {"labels": {"l": SECRET}, **more}),
            (f"bulk.{verb}", {"ids_from": min(made["tasks"]), "ids_to": max(made["tasks"]), **more}),
        ]
    asked = {method for method, _ in calls}
    assert asked | {"enqueue", "workflow.create"} == {
        name for name, method in METHODS.items() if method.scope is Scope.OWN
    }
    for method, params in calls:
        answer = json.dumps(await stand.acme.ask(method, **params))
        assert HIDDEN not in answer, (method, params, answer)
        if SECRET not in json.dumps(params):  # an error names what it was given
            assert SECRET not in answer, (method, params, answer)
        if method in ("status", "result", "list") and "tasks" in answer:
            assert all(f'"id": {task},' not in answer for task in made["tasks"]), (method, params, answer)
    async with store.session() as session:
        rows = await session.fetch("list_jobs", None, 100, "acme")
    assert rows, "the bulk operations of acme were made, and are about its tasks alone"
    jobs = BulkJobs(store=store, changed=lambda: None)
    while await jobs.run_once():
        pass
    after = await _everything(sql)
    for table in before:
        assert after[table] == before[table], table


async def _everything(sql: Any) -> dict[str, Any]:
    """All that is not acme's, as text."""
    tables = {
        "task": "select t::text from penstock.task t where tenant is distinct from 'acme' order by id",
        "task_history": "select t::text from penstock.task_history t where tenant is distinct from 'acme' order by id",
        "workflow": "select t::text from penstock.workflow t where tenant is distinct from 'acme' order by id",
        "schedule": "select t::text from penstock.schedule t where tenant is distinct from 'acme' order by id",
        "runs": "select t::text from penstock.schedule_run t order by 1",
    }
    return {name: [row[0] for row in await sql.fetch(query)] for name, query in tables.items()}


async def test_what_is_anothers_is_answered_as_what_there_is_not(stand: Stand) -> None:
    theirs = (await stand.other.ask("enqueue", action="a", delay=3600))["id"]
    mine = (await stand.acme.ask("enqueue", action="a", delay=3600))["id"]
    for method, more in (("status", {}), ("result", {"timeout": 30}), ("cancel", {}), ("retry", {})):
        hidden, none = [await stand.acme.ask(method, id=task, **more) for task in (theirs, 10**9)]
        assert hidden["code"] == none["code"] == -32004
        assert hidden["message"].replace(str(theirs), "N") == none["message"].replace(str(10**9), "N")
    assert (await stand.acme.ask("status", ids=[theirs, mine, 10**9]))[0::2] == [None, None]
    results = await stand.acme.ask("result", ids=[theirs, mine, 10**9], timeout=0)
    assert [(one["id"], one["state"]) for one in results] == [(theirs, None), (mine, "SCHEDULED"), (10**9, None)]


async def test_a_bound_key_does_all_with_what_is_its_own(stand: Stand, store: Store) -> None:
    task = (await stand.acme.ask("enqueue", action="a", delay=3600, ordering_key="o", unique_key="u"))["id"]
    detail = await stand.acme.ask("status", id=task, detail=True)
    assert (detail["tenant"], detail["ordering_key"], detail["unique_key"]) == ("acme", "o", "u")
    assert (await stand.acme.ask("reschedule", id=task, delay=7200))["id"] == task
    assert (await stand.acme.ask("cancel", id=task))["state"] == "CANCELLED"
    assert (await stand.acme.ask("result", ids=[task], timeout=5))[0]["state"] == "CANCELLED"
    assert (await stand.acme.ask("retry", id=task))["state"] == "SCHEDULED"
    assert [one["id"] for one in (await stand.acme.ask("list", key="o"))["tasks"]] == [task]
    flow = await stand.acme.ask("workflow.create", steps=[{"name": "s", "action": "a"}], key="k")
    assert (await stand.acme.ask("workflow.status", key="k"))["id"] == flow["id"]
    assert (await stand.admin.ask("workflow.status", key="k", tenant="acme"))["id"] == flow["id"]
    assert (await stand.admin.ask("workflow.status", key="k"))["code"] == -32022
    assert [one["tenant"] for one in (await stand.acme.ask("workflow.list"))["workflows"]] == ["acme"]
    made = await stand.acme.ask("schedule.create", name="n", expression="@daily", action="a")
    assert made["tenant"] == "acme"
    assert (await stand.acme.ask("schedule.create", name="n", expression="@hourly", action="a", replace=True))[
        "id"
    ] == made["id"]
    assert (await stand.acme.ask("schedule.update", name="n", tenant="other"))["code"] == -32602
    run = await stand.acme.ask("schedule.run_now", name="n")
    assert (await stand.acme.ask("status", id=run["task_id"]))["tenant"] == "acme"
    assert len((await stand.acme.ask("schedule.runs", name="n"))["runs"]) == 1
    job = (await stand.acme.ask("bulk.cancel", all=True))["job"]
    jobs = BulkJobs(store=store, changed=lambda: None)
    while await jobs.run_once():
        pass
    assert (await stand.acme.ask("job.get", id=job))["state"] == "DONE"
    assert [one["id"] for one in (await stand.acme.ask("job.list"))["jobs"]] == [job]
    assert (await stand.acme.ask("tenant.get", tenant="acme"))["tenant"] == "acme"
    assert [one["state"] for one in (await stand.acme.ask("list", state="SCHEDULED"))["tasks"]] == []


async def test_two_tenants_use_one_name_of_a_schedule_and_never_meet(stand: Stand, sql: Any) -> None:
    payload = {"of": "{{schedule}}"}
    made = {}
    for holder, who in ((stand.acme, "acme"), (stand.other, "other"), (stand.admin, None)):
        shown = await holder.ask("schedule.create", name="n", expression="@daily", action=f"of-{who}", payload=payload)
        assert (shown["name"], shown["tenant"]) == ("n", who)
        made[who] = shown["id"]
    taken = await stand.acme.ask("schedule.create", name="n", expression="@daily", action="a")
    assert "'n' is a schedule's name already" in taken["message"]
    for holder, who in ((stand.acme, "acme"), (stand.other, "other")):
        again = await holder.ask("schedule.create", name="n", expression="@hourly", action="a", replace=True,
                                 payload=payload)  # fmt: skip
        assert again["id"] == made[who]
        assert (await holder.ask("schedule.update", name="n", priority=3))["name"] == "n"
        assert (await holder.ask("schedule.get", name="n"))["id"] == made[who]
        assert [(one["id"], one["name"]) for one in (await holder.ask("schedule.list"))["schedules"]] == [
            (made[who], "n")
        ]
        run = await holder.ask("schedule.run_now", name="n")
        assert (await holder.ask("status", id=run["task_id"], detail=True))["payload"] == {"of": "n"}
        assert [one["task_id"] for one in (await holder.ask("schedule.runs", name="n"))["runs"]] == [run["task_id"]]
        for verb in ("pause", "resume"):
            assert (await holder.ask(f"schedule.{verb}", name="n"))["id"] == made[who]
    listed = {one["id"]: one["name"] for one in (await stand.admin.ask("schedule.list"))["schedules"]}
    assert listed == {made["acme"]: "acme\x1fn", made["other"]: "other\x1fn", made[None]: "n"}
    whole = await stand.admin.ask("schedule.get", name="other\x1fn")
    assert (whole["id"], whole["name"]) == (made["other"], "other\x1fn")
    assert (await stand.admin.ask("schedule.update", name="other\x1fn", tenant="acme"))["code"] == -32602
    assert (await stand.admin.ask("schedule.update", name="other\x1fn", priority=4))["priority"] == 4
    hidden = await stand.acme.ask("schedule.get", name="other\x1fn")
    assert hidden["code"] == (await stand.acme.ask("schedule.get", name="none"))["code"]
    assert await stand.other.ask("schedule.delete", name="n") == {"id": made["other"], "name": "n", "deleted": True}
    gone = await stand.other.ask("schedule.get", name="n")
    assert (gone["code"], "\x1f" in json.dumps(gone)) == (-32020, False)
    assert [row[0] for row in await sql.fetch("select action from penstock.schedule order by 1")] == ["a", "of-None"]


async def test_a_schedule_that_was_made_for_a_tenant_is_found_by_its_name(stand: Stand) -> None:
    """As those are that a tenant's key made under an earlier version."""
    made = await stand.admin.ask("schedule.create", name="n", expression="@daily", action="a", tenant="acme")
    assert (await stand.acme.ask("schedule.get", name="n"))["id"] == made["id"]
    assert (await stand.acme.ask("schedule.pause", name="n"))["id"] == made["id"]
    assert "already" in (await stand.acme.ask("schedule.create", name="n", expression="@daily", action="a"))["message"]
    replaced = await stand.acme.ask("schedule.create", name="n", expression="@hourly", action="a", replace=True)
    assert replaced["id"] == made["id"]
    assert (await stand.other.ask("schedule.get", name="n"))["code"] == -32020
    own = await stand.other.ask("schedule.create", name="n", expression="@daily", action="a", replace=True)
    assert own["id"] != made["id"]
    assert (await stand.admin.ask("schedule.get", name="n"))["id"] == made["id"]


async def test_names_of_jobs_are_refused_to_every_caller(stand: Stand) -> None:
    for holder in (stand.acme, stand.admin):
        refused = await holder.ask("schedule.create", name="scheduler0:7", expression="@daily", action="a")
        assert (refused["code"], refused["data"]["field"]) == (-32602, "name")
        assert "is for jobs of scheduler0's API" in refused["message"]


async def _waiting(store: Store, settings: Settings, tenant: str | None, token: str | None) -> tuple[int, str]:
    """A task of the tenant that waits for a token; None for one that is made for it."""
    async with store.transaction() as session:
        (task,) = await enqueue.enqueue(session, [NewTask("waits", tenant=tenant)])
    async with store.transaction() as session:
        dispatch = await claim.claim(session, 1)
        assert dispatch is not None
        (claimed,) = dispatch.tasks
        token = make_token(claimed.id, claimed.claim) if token is None else token
        report = encode_notification("wait", id=f"{claimed.id}:{claimed.claim}", token=token, timeout=3600)
        applied = await apply_reports(session, decode_reports(report, batch_limit=10), settings)
    assert (claimed.id, applied.waiting) == (task.id, 1)
    return task.id, token


async def test_two_tenants_wait_for_one_token_and_never_meet(stand: Stand, store: Store, settings: Settings) -> None:
    acme, _ = await _waiting(store, settings, "acme", "order")
    other, _ = await _waiting(store, settings, "other", "order")
    nobodys, _ = await _waiting(store, settings, None, "order")
    for holder, task in ((stand.acme, acme), (stand.admin, other), (stand.admin, nobodys)):
        assert (await holder.ask("status", id=task, detail=True))["waits_for"]["token"] == "order"
    assert (await stand.acme.ask("task.complete", token="order", tenant="other"))["code"] == -32602
    assert (await stand.acme.ask("task.complete", token="order", result="a"))["id"] == acme
    assert (await stand.admin.ask("status", id=other))["state"] == "WAITING"
    assert (await stand.admin.ask("task.complete", token="order", tenant="other", result="o"))["id"] == other
    assert (await stand.admin.ask("task.fail", token="order", error="no", final=True))["id"] == nobodys
    assert [(await stand.admin.ask("result", id=task, timeout=0))["result"] for task in (acme, other)] == ["a", "o"]
    kept = await stand.acme.ask("task.complete", token="early", result="a")
    assert kept == {"id": None, "state": None, "kept": True, "duplicate": False}
    late, _ = await _waiting(store, settings, "other", "early")
    assert (await stand.admin.ask("status", id=late))["state"] == "WAITING"


async def test_a_token_of_another_tenants_task_is_answered_as_that_of_none(
    stand: Stand, store: Store, settings: Settings
) -> None:
    theirs, token = await _waiting(store, settings, "other", None)
    assert (await stand.acme.ask("task.complete", token=token, result=1))["code"] == -32004
    assert (await stand.other.ask("task.complete", token=token, result=2))["id"] == theirs
    second, token = await _waiting(store, settings, "other", None)
    assert (await stand.admin.ask("task.complete", token=token, result=3))["id"] == second


async def test_an_admin_sees_and_filters_by_tenant(stand: Stand) -> None:
    for holder in (stand.acme, stand.other, stand.admin):
        await holder.ask("enqueue", action="a", unique_key="u")
    assert len((await stand.admin.ask("list"))["tasks"]) == 3
    assert [task["tenant"] for task in (await stand.admin.ask("list", tenant="other"))["tasks"]] == ["other"]
    assert len((await stand.admin.ask("list", key="u"))["tasks"]) == 3
    assert len((await stand.admin.ask("list", key="u", tenant="acme"))["tasks"]) == 1
    assert (await stand.admin.ask("bulk.cancel", tenant="acme", dry_run=True))["count"] == 1


async def test_counts_are_of_the_tenant_alone_whoever_asks(
    stand: Stand, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for holder in (stand.acme, stand.other, stand.admin):
        for action, delay in (("a", 0), ("b", 0), ("b", 3600)):
            await holder.ask("enqueue", action=action, delay=delay)
    async with store.transaction() as session:
        dispatch = await claim.claim(session, 100)
        assert dispatch is not None
        await settle.finish(session, {(task.id, task.claim): "1" for task in dispatch.tasks if task.action == "a"})
    zeros = dict.fromkeys(("WAITING", "ERROR", "CRITICAL_ERROR", "CANCELLED"), 0)
    counted = {
        "tenant": "acme", "states": zeros | {"SCHEDULED": 1, "ACQUIRED": 1, "SUCCESS": 1},
        "actions": {"a": {"SUCCESS": 1}, "b": {"SCHEDULED": 1, "ACQUIRED": 1}}, "at_least": [],
    }  # fmt: skip
    assert await stand.acme.ask("stats") == counted
    assert await stand.acme.ask("stats", tenant="acme") == counted
    assert await stand.admin.ask("stats", tenant="acme") == counted
    assert (await stand.acme.ask("stats", tenant="other"))["code"] == -32602
    assert (await stand.admin.ask("stats"))["states"]["SUCCESS"] == 3
    assert (await stand.admin.ask("stats", tenant="nobody-yet"))["actions"] == {}
    shell = ["top", "--once", "--api-url", str(stand.http.base_url)]
    for key, said in ((stand.acme.key, "bound to the tenant 'acme'"), (stand.admin.key, "states")):
        done = await asyncio.to_thread(CliRunner().invoke, app, [*shell, "--json"], env={"PENSTOCK_API_KEY": key})
        assert said in done.output + str(done.exception)
    # Where there are more than one look counts, the answer is a lower bound.
    monkeypatch.setattr(answers, "TENANT_LOOKED_AT", 2)
    await asyncio.sleep(context.KEPT_SECONDS)
    few = await stand.admin.ask("stats", tenant="acme")
    assert few["at_least"] == ["WAITING", "SCHEDULED", "ACQUIRED", "ERROR", "SUCCESS"]
    assert few["actions"] == {}


async def test_rules_of_tenants_are_set_shown_and_taken_back_at_run_time(stand: Stand) -> None:
    everybody = await stand.admin.ask("tenant.set", tenant="*", max_in_flight=5, rate=120, per="minute")
    assert (everybody["tenant"], everybody["max_in_flight"], everybody["rate"], everybody["own"]) == ("*", 5, 2.0, True)
    assert (await stand.admin.ask("tenant.get", tenant="acme"))["max_in_flight"] == 5
    assert (await stand.acme.ask("tenant.get", tenant="acme"))["max_in_flight"] == 5
    assert (await stand.admin.ask("tenant.pause", tenant="acme"))["paused"] is True
    listed = await stand.admin.ask("tenant.list")
    assert [(one["tenant"], one["paused"], one["own"]) for one in listed["tenants"]] == [
        ("*", False, True),
        ("acme", True, False),
    ]
    page = await stand.admin.ask("tenant.list", limit=1)
    assert [one["tenant"] for one in (await stand.admin.ask("tenant.list", cursor=page["cursor"]))["tenants"]] == [
        "acme"
    ]
    assert (await stand.admin.ask("tenant.pause", tenant="*"))["code"] == -32602
    for wrong in ({}, {"max_in_flight": 0}, {"rate": 0}, {"burst": -1}, {"rate": 10**9}):
        assert (await stand.admin.ask("tenant.set", tenant="acme", **wrong))["code"] == -32602, wrong
    for tenant in ("", "x" * 129, "a\0b"):
        assert (await stand.admin.ask("tenant.set", tenant=tenant, burst=1))["code"] == -32602
    await stand.admin.ask("tenant.delete", tenant="acme")
    await stand.admin.ask("tenant.delete", tenant="*")
    assert (await stand.admin.ask("tenant.list"))["tenants"] == []
    assert (await stand.admin.ask("tenant.delete", tenant="*"))["code"] == -32602


async def test_a_key_is_limited_to_actions(stand: Stand, sql: Any) -> None:
    async def holder(**limits: Any) -> Holder:
        given = {"name": f"k{len(limits)}{limits}"[:100], "permissions": ["admin"], **limits}
        return Holder(stand.http, (await stand.admin.ask("keys.create", **given))["key"])

    mail = await holder(actions=["mail.*"])
    step, schedule = {"name": "a", "action": "mail.a"}, {"expression": "* * * * *", "action": "mail.a"}
    assert "id" in await mail.ask("enqueue", action="mail.send")
    assert "id" in await mail.ask("submit:mail.send")
    assert "id" in await mail.ask("workflow.create", steps=[step])
    assert (await mail.ask("schedule.create", name="s", **schedule))["name"] == "s"
    await stand.admin.ask("schedule.create", name="o", expression="0 0 1 1 *", action="other")
    undoing = {"name": "b", "action": "mail.b", "after": ["a"], "on_failure": {"compensate": "refund"}}
    assert "key" in await mail.ask("keys.create", name="narrower", permissions=["enqueue"], actions=["mail.a*"])
    refused = [
        await mail.ask("enqueue", action="http.request"),
        await mail.ask("workflow.create", steps=[step, undoing]),
        await mail.ask("schedule.update", name="o", payload={"to": "all"}),
        await mail.ask("keys.create", name="all", permissions=["enqueue"]),
        await mail.ask("keys.create", name="wider", permissions=["enqueue"], actions=["mail.a", "m*"]),
        await mail.ask("submit:mailer"),
        await mail.ask("workflow.create", steps=[step, {"name": "b", "action": "sql.execute"}]),
        await mail.ask("workflow.create", steps=[{**step, "compensate": "http.request"}]),
        await mail.ask("workflow.create", steps=[{"name": "m", "over": [1], "action": "http.request"}]),
        await mail.ask("schedule.create", name="t", **schedule | {"action": "other"}),
        await mail.ask("schedule.update", name="s", action="other"),
        await mail.ask("schedule.create_many", schedules=[{"name": "u", **schedule}]),
        *[await mail.ask(f"schedule.{verb}", name="o") for verb in ("run_now", "pause", "resume", "delete")],
        await mail.ask("schedule.update", name="o", action="mail.a"),
        await mail.ask("schedule.create", name="o", **schedule, replace=True),
    ]
    assert [answer.get("code") for answer in refused] == [-32003] * 18, refused
    for verb in ("pause", "resume", "delete"):
        assert (await mail.ask(f"schedule.{verb}", name="s"))["name"] == "s"
    assert "may not enqueue 'http.request'; it may enqueue mail.* alone" in refused[0]["message"]
    batch = [{"jsonrpc": "2.0", "method": "enqueue", "params": {"action": a}, "id": a} for a in ("mail.b", "other")]
    answers = {answer["id"]: answer for answer in (await mail.post(batch)).json()}
    assert "result" in answers["mail.b"]
    assert answers["other"]["error"]["code"] == -32003
    # Without patterns, a key of a tenant may enqueue no built-in action.
    assert (await stand.acme.ask("enqueue", action="http.request"))["code"] == -32003
    assert "id" in await stand.acme.ask("enqueue", action="http")
    assert "id" in await (await holder(tenant="acme", actions=["http.request"])).ask("enqueue", action="http.request")
    actions = {row["action"] for row in await sql.fetch("select distinct action from penstock.task")}
    assert actions == {"mail.send", "mail.a", "mail.b", "http", "http.request"}
    shown = {key["name"]: key["actions"] for key in (await stand.admin.ask("keys.list"))["keys"]}
    assert ["mail.*"] in shown.values()
    assert (await stand.admin.ask("keys.create", name="w", permissions=["read"], actions=["a*b"]))["code"] == -32602


async def test_permissions_of_workers_and_autoscalers_allow_nothing_else(stand: Stand) -> None:
    for permission, may in (("worker", "/rpc"), ("scaling", "/scaling")):
        made = await stand.admin.ask("keys.create", name=permission, permissions=[permission])
        key = Holder(stand.http, made["key"])
        assert ("lost" in await key.ask("claims.check", claims=["1:1"])) is (may == "/rpc")
        assert ((await key.get("/scaling")).status_code == 200) is (may == "/scaling")
        for method in ("list", "status", "rejected.list", "enqueue", "keys.list"):
            assert (await key.ask(method))["code"] == -32003, method


async def test_keys_are_made_with_a_tenant_over_rpc_and_shown_with_it(stand: Stand) -> None:
    made = await stand.admin.ask("keys.create", name="k", permissions=["read"], tenant="acme")
    assert made["tenant"] == "acme"
    assert {key["name"]: key["tenant"] for key in (await stand.admin.ask("keys.list"))["keys"]}["k"] == "acme"
    holder = Holder(stand.http, made["key"])
    assert (await holder.ask("dlq.stats"))["code"] == -32003
    assert (await stand.admin.ask("keys.create", name="j", permissions=["read"], tenant="*"))["code"] == -32602
