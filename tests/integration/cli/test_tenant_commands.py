"""Tenants from a shell and from Python, against a running api."""

from __future__ import annotations

import asyncio
import json

from typer.testing import CliRunner

from penstock import AsyncClient, Client
from penstock.cli.app import app
from penstock.db.pool import Store
from penstock.protocol.task import Failure, NewTask
from penstock.settings.model import Settings
from penstock.tasks import claim, enqueue, settle
from tests.integration.apis import running


def run(url: str, *arguments: str, fails: bool = False) -> str:
    done = CliRunner().invoke(app, [*arguments, "--api-url", url])
    assert (done.exit_code != 0) == fails, done.output
    return str(done.exception) if fails and not done.output else done.output


async def test_tasks_workflows_and_schedules_are_given_a_tenant_and_found_by_it(
    store: Store, settings: Settings
) -> None:
    def use(url: str) -> None:
        one = json.loads(run(url, "enqueue", "a", "--tenant", "acme", "--delay", "3600", "--json"))["id"]
        two = json.loads(run(url, "enqueue", "a", "--delay", "3600", "--json"))["id"]
        assert json.loads(run(url, "task", "show", str(one), "--json"))["tenant"] == "acme"
        assert "tenant" not in json.loads(run(url, "task", "show", str(two), "--json"))
        assert [task["id"] for task in json.loads(run(url, "tasks", "--tenant", "acme", "--json"))["tasks"]] == [one]
        assert "acme" in run(url, "tasks")
        assert "tenant" not in run(url, "tasks", "--action", "none")
        assert "stands for every tenant" in run(url, "enqueue", "a", "--tenant", "*", fails=True)
        counted = json.loads(run(url, "tasks", "cancel", "--tenant", "acme", "--dry-run", "--json"))
        assert counted["count"] == 1
        assert json.loads(run(url, "stats", "--tenant", "acme", "--json"))["actions"] == {"a": {"SCHEDULED": 1}}
        assert "rates" not in run(url, "stats", "--tenant", "acme")
        assert json.loads(run(url, "stats", "--json"))["states"]["SCHEDULED"] == 2
        run(url, "schedules", "create", "n", "@daily", "a", "--tenant", "acme")
        assert json.loads(run(url, "schedules", "show", "n", "--json"))["tenant"] == "acme"
        assert len(json.loads(run(url, "schedules", "--tenant", "acme", "--json"))["schedules"]) == 1
        assert json.loads(run(url, "schedules", "--tenant", "other", "--json"))["schedules"] == []
        flow = json.loads(run(url, "workflows", "create", '[{"action": "a"}]', "--tenant", "acme", "--json"))
        assert json.loads(run(url, "workflows", "show", str(flow["id"]), "--json"))["tenant"] == "acme"
        assert len(json.loads(run(url, "workflows", "--tenant", "acme", "--json"))["workflows"]) == 1
        assert json.loads(run(url, "workflows", "--tenant", "other", "--json"))["workflows"] == []

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)


def find_by_key(url: str) -> None:
    """From a shell: a key of two tenants and of no tenant is that of three workflows."""
    made = {}
    for tenant in ("acme", "other", None):
        whose = () if tenant is None else ("--tenant", tenant)
        made[tenant] = json.loads(run(url, "workflows", "create", '[{"action": "a"}]', "--key", "k", *whose, "--json"))
    for tenant, flow in made.items():
        whose = () if tenant is None else ("--tenant", tenant)
        found = json.loads(run(url, "workflows", "show", "--key", "k", *whose, "--json"))
        assert (found["id"], found["tenant"]) == (flow["id"], tenant)
    acme = made["acme"]["id"]
    assert "acme" in run(url, "workflows", "show", "--key", "k", "--tenant", "acme")
    assert f"workflow {acme} is CANCELLED" in run(url, "workflows", "cancel", "--key", "k", "--tenant", "acme")
    assert f"workflow {acme} is RUNNING" in run(url, "workflows", "retry", "--key", "k", "--tenant", "acme")
    for tenant in ("other", None):
        assert json.loads(run(url, "workflows", "show", str(made[tenant]["id"]), "--json"))["state"] == "RUNNING"
    assert "goes with key" in run(url, "workflows", "show", "1", "--tenant", "acme", fails=True)


async def test_a_key_that_is_a_tenants_own_is_looked_up_with_the_tenant(store: Store, settings: Settings) -> None:
    def use(url: str) -> None:
        find_by_key(url)
        with Client(url) as client:
            acme, nobodys = client.workflows.status(key="k", tenant="acme"), client.workflows.status(key="k")
            assert (acme["tenant"], nobodys["tenant"]) == ("acme", None)
            assert client.workflows.cancel(key="k", tenant="acme", reason="no")["id"] == acme["id"]
            assert client.workflows.retry(key="k", tenant="acme")["restarted"] == 1
            assert [one["id"] for one in client.workflows.list(tenant="acme")["workflows"]] == [acme["id"]]
            released = client.ordering_release("o", tenant="acme")
            assert (released["key"], released["released"]) == ("o", True)
            assert client.ordering_release("o", tenant="acme")["released"] is False

    async with store.transaction() as session:
        await enqueue.enqueue(session, [NewTask("a", ordering_key="o", tenant=tenant) for tenant in ("acme", None)])
        batch = await claim.claim(session, 100)
        assert batch is not None
        failures = [Failure(task.id, task.claim, '{"code": 1}', None) for task in batch.tasks]
        await settle.fail(session, failures, hold_keys=True)
    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)
        async with AsyncClient(api.url) as client:
            acme = await client.workflows.status(key="k", tenant="acme")
            assert (await client.workflows.cancel(key="k", tenant="acme"))["id"] == acme["id"]
            assert (await client.workflows.retry(key="k", tenant="acme"))["id"] == acme["id"]
            assert len((await client.workflows.list(tenant="other"))["workflows"]) == 1
            assert (await client.ordering_release("o", tenant="acme"))["released"] is False
            assert (await client.ordering_release("o"))["released"] is True


async def test_rules_of_tenants_from_a_shell(store: Store, settings: Settings) -> None:
    def use(url: str) -> None:
        assert run(url, "tenants") == "No limited or paused tenants.\n"
        run(url, "tenants", "set", "*", "--max-in-flight", "5")
        own = json.loads(run(url, "tenants", "set", "acme", "--rate", "60", "--per", "minute", "--json"))
        assert (own["rate"], own["max_in_flight"], own["own"]) == (1.0, None, True)
        assert json.loads(run(url, "tenants", "show", "other", "--json"))["max_in_flight"] == 5
        assert json.loads(run(url, "tenants", "pause", "other", "--json"))["paused"] is True
        listed = run(url, "tenants").splitlines()
        assert [line.split()[0] for line in listed[1:]] == ["*", "acme", "other"]
        assert json.loads(run(url, "tenants", "resume", "other", "--json"))["paused"] is False
        assert json.loads(run(url, "tenants", "set", "acme", "--none", "all", "--json"))["rate"] is None
        run(url, "tenants", "delete", "acme")
        run(url, "tenants", "delete", "*")
        assert json.loads(run(url, "tenants", "--json")) == {"tenants": [], "cursor": None}
        assert "has no rule of its own" in run(url, "tenants", "delete", "acme", fails=True)
        assert "exclude each other" in run(url, "tenants", "set", "a", "--rate", "1", "--none", "rate", fails=True)
        assert "name a limit" in run(url, "tenants", "set", "a", fails=True)

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)


async def test_a_key_is_bound_from_a_shell(store: Store, settings: Settings, database_url: str) -> None:
    def use() -> None:
        options = ["--permission", "read", "--database-url", database_url, "--json"]
        made = CliRunner().invoke(app, ["keys", "create", "k", "--tenant", "acme", *options])
        assert made.exit_code == 0, made.output
        assert json.loads(made.stdout)["tenant"] == "acme"
        listed = CliRunner().invoke(app, ["keys", "list", "--database-url", database_url])
        assert "acme" in listed.stdout
        wrong = CliRunner().invoke(app, ["keys", "create", "j", "--tenant", "*", *options])
        assert wrong.exit_code == 2
        assert "stands for every tenant" in " ".join(wrong.output.replace("│", " ").split())

    await asyncio.to_thread(use)


async def test_the_clients_speak_of_tenants(store: Store, settings: Settings) -> None:
    def use(url: str) -> None:
        with Client(url) as client:
            task = client.enqueue("a", {}, tenant="acme", delay=3600)
            assert client.status(task["id"])["tenant"] == "acme"
            assert [one["id"] for one in client.list(tenant="acme")["tasks"]] == [task["id"]]
            assert client.stats(tenant="acme")["states"]["SCHEDULED"] == 1
            assert client.set_tenant_limits("acme", max_in_flight=2)["max_in_flight"] == 2
            assert client.schedules.create("n", "@daily", "a", tenant="acme")["tenant"] == "acme"
            assert len(client.workflows.create(chain=[{"action": "a"}], tenant="acme")) == 3

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)
        async with AsyncClient(api.url) as client:
            task = await client.enqueue("a", {}, tenant="acme", delay=3600)
            assert task["id"] in [one["id"] for one in (await client.list(tenant="acme"))["tasks"]]
            assert (await client.stats(tenant="other"))["actions"] == {}
            assert (await client.set_tenant_limits("acme", rate=2))["rate"] == 2.0
