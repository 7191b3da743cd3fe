"""Bulk operations as users meet them: over HTTP, by the Python client and from a shell, with a supervisor at work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from typer.testing import CliRunner

from penstock.api.keys import CreateKey, create_key
from penstock.cli.app import app
from penstock.client.client import Client
from penstock.client.exchanges import Unfinished
from penstock.db.pool import Store
from penstock.protocol.api_key import Permission
from penstock.protocol.errors import InvalidParams, JobNotFound, RateLimited, RpcError, Unavailable
from penstock.protocol.task import NewTask
from penstock.runtime.periodic import repeat
from penstock.settings.model import Settings
from penstock.supervisor.bulk_jobs import BulkJobs
from penstock.tasks import enqueue
from tests.integration.apis import running


@asynccontextmanager
async def stack(store: Store, settings: Settings, *, working: bool = True) -> AsyncIterator[str]:
    """The url of an api, with 60 tasks, and by default the jobs of a supervisor."""
    async with store.session() as session:
        await enqueue.enqueue(session, [NewTask("mail", delay_seconds=600) for _ in range(40)])
        await enqueue.enqueue(session, [NewTask("report", delay_seconds=600) for _ in range(20)])
    async with running(store, settings) as api:
        moving = (
            asyncio.create_task(repeat("bulk jobs", BulkJobs(store=store, changed=lambda: None).work_then_rest))
            if working
            else None
        )
        try:
            yield api.url
        finally:
            if moving is not None:
                moving.cancel()


async def test_the_client_starts_watches_and_awaits_jobs(store: Store, settings: Settings) -> None:
    seen: list[dict[str, Any]] = []

    def use(url: str) -> None:
        with Client(url) as client:
            assert client.bulk_cancel(action="ma*", dry_run=True) == {
                "count": 40, "exact": True, "estimate": 40, "sample": list(range(1, 11)),
            }  # fmt: skip
            job = client.wait_job(client.bulk_cancel(action="ma*")["job"], timeout=20, progress=seen.append)
            assert (job["state"], job["total"], job["total_is_exact"]) == ("DONE", 40, True)
            assert (job["changed"], job["refused"], job["errors"]) == (40, 0, [])
            assert (job["params"]["top"], job["seen"]) == (60, 60)
            assert job["rate"] > 0
            assert seen[-1] == job == client.job(job["id"])
            again = client.wait_job(client.bulk_retry(states=["CANCELLED"])["job"], timeout=20)
            assert again["changed"] == 40
            moved = client.bulk_reschedule(all=True, delay=5, spread=60, priority=3)
            assert client.wait_job(moved["job"], timeout=20)["changed"] == 60
            assert {task["priority"] for task in client.list()["tasks"]} == {3}
            client.wait_job(client.bulk_cancel(all=True)["job"], timeout=20)
            assert client.wait_job(client.bulk_delete(action="report")["job"], timeout=20)["changed"] == 20
            assert client.stats()["states"]["CANCELLED"] == 40
            page = client.jobs(limit=3)
            assert [job["kind"] for job in page["jobs"]] == ["bulk.delete", "bulk.cancel", "bulk.reschedule"]
            assert [job["id"] for job in client.jobs(cursor=page["cursor"])["jobs"]] == [2, 1]
            assert client.jobs(limit=1, cursor="1") == {"jobs": [], "cursor": None}
            with pytest.raises(JobNotFound):
                client.job(4711)
            with pytest.raises(JobNotFound):
                client.cancel_job(4711)
            with pytest.raises(InvalidParams, match=r"give at least one filter \(action, .*\) or set all=true"):
                client.bulk_delete()
            assert client.cancel_job(page["jobs"][0]["id"])["state"] == "DONE"  # it has ended, and stays so

    async with stack(store, settings) as url:
        await asyncio.to_thread(use, url)


async def test_a_job_can_be_stopped_and_waiting_has_an_end(store: Store, settings: Settings) -> None:
    def use(url: str) -> None:
        with Client(url) as client:
            job = client.bulk_cancel(all=True)["job"]
            with pytest.raises(Unfinished, match=f"job {job} still runs") as unfinished:
                client.wait_job(job, timeout=0.05, interval=0.01)
            assert unfinished.value.results[0]["state"] == "RUNNING"
            assert unfinished.value.results[0]["total"] is None
            stopped = client.cancel_job(job)
            assert (stopped["state"], stopped["changed"]) == ("CANCELLED", 0)
            assert stopped["finished_at"] is not None
            assert client.wait_job(job)["state"] == "CANCELLED"

    async with stack(store, settings, working=False) as url:
        await asyncio.to_thread(use, url)


async def test_only_admins_change_many_tasks_and_readers_see_the_jobs(store: Store, settings: Settings) -> None:
    settings = settings.model_copy(update={"api_require_keys": True})
    secrets = {}
    async with store.session() as session:
        for permission in Permission:
            made = await create_key(session, CreateKey(permission, [permission]))
            assert made is not None
            secrets[permission] = made.key

    def refused(url: str, permission: Permission, method: str, params: Any) -> bool:
        with Client(url, api_key=secrets[permission]) as client:
            (answer,) = client.batch([(method, params)])
        return isinstance(answer, RpcError) and answer.code == -32003

    def use(url: str) -> None:
        changing: list[tuple[str, Any]] = [
            ("bulk.cancel", {"all": True}), ("bulk.retry", {"all": True}), ("bulk.delete", {"all": True}),
            ("bulk.cancel", {"all": True, "dry_run": True}), ("bulk.reschedule", {"all": True, "delay": 1}),
            ("job.cancel", {"id": 1}),
        ]  # fmt: skip
        for method, params in changing:
            assert refused(url, Permission.ENQUEUE, method, params)
            assert refused(url, Permission.READ, method, params)
            assert not refused(url, Permission.ADMIN, method, params)
        for method, params in (("job.get", {"id": 1}), ("job.list", {})):
            assert refused(url, Permission.ENQUEUE, method, params)
            assert not refused(url, Permission.READ, method, params)

    async with stack(store, settings, working=False) as url:
        await asyncio.to_thread(use, url)


# The command line


Run = Callable[..., Any]


def command(url: str) -> Run:
    def run(*arguments: str, answer: str | None = None) -> Any:
        return CliRunner().invoke(app, [*arguments, "--api-url", url], input=answer)

    return run


async def test_the_command_does_each_operation_and_shows_its_job(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The runner of commands takes standard output, on which the processes of this test would log as well.
    for module in ("penstock.supervisor.bulk_jobs", "penstock.tasks.bulk_methods"):
        monkeypatch.setattr(f"{module}.log", structlog.wrap_logger(None, processors=[structlog.testing.LogCapture()]))

    def use(url: str) -> None:
        run = command(url)
        told = run("tasks", "cancel", "--action", "mail", "--dry-run")
        assert (told.exit_code, told.stdout) == (0, "40 tasks\nthe first: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10\n")
        done = run("tasks", "cancel", "--action", "mail", "--state", "scheduled", "--from-id", "1", "--to-id", "39",
                   "--older-than", "0", "--newer-than", "3600", "--yes", "--json")  # fmt: skip
        assert done.exit_code == 0, done.output
        job = json.loads(done.stdout)
        assert (job["state"], job["changed"]) == ("DONE", 39)
        assert run("tasks", "retry", "--all", "--yes").exit_code == 0
        moved = run("tasks", "reschedule", "--all", "--run-at", "2040-01-01T00:00:00Z", "--spread", "9", "--yes")
        assert "changed      60" in moved.stdout
        run("tasks", "cancel", "--action", "report", "--yes")
        assert "changed      20" in run("tasks", "delete", "--state", "CANCELLED", "--yes").stdout
        later = run("tasks", "reschedule", "--all", "--priority", "5", "--no-wait", "--yes")
        assert later.stdout == "job 6: see `penstock jobs show 6`\n"
        listed = run("jobs", "--limit", "2")
        assert [line.split()[:2] for line in listed.stdout.splitlines()[1:]] == [
            ["6", "bulk.reschedule"],
            ["5", "bulk.delete"],
        ]
        shown = run("jobs", "show", "5")
        assert "state        DONE" in shown.stdout
        assert run("jobs", "cancel", "5").exit_code == 0

    async with stack(store, settings) as url:
        await asyncio.to_thread(use, url)


async def test_the_command_waits_through_a_restart_of_the_api(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    troubles: list[Exception] = [RateLimited(0.1), Unavailable("cannot be reached")]
    step = Client._step

    def step_through_troubles(client: Client, body: str | None, seconds: float) -> Any:
        if troubles and "job.get" in (body or ""):
            raise troubles.pop()
        return step(client, body, seconds)

    monkeypatch.setattr(Client, "_step", step_through_troubles)
    async with stack(store, settings) as url:
        done = await asyncio.to_thread(command(url), "tasks", "cancel", "--action", "mail", "--yes")
    assert (done.exit_code, troubles, done.stderr.count("cannot be reached; still trying")) == (0, [], 1)


async def test_the_command_asks_before_it_changes_anything_and_names_the_number(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def use(url: str) -> None:
        run = command(url)
        alone = run("tasks", "cancel", "--action", "report")
        assert alone.exit_code == 2
        said = " ".join(alone.output.replace("│", " ").split())
        assert "refusing to cancel 20 tasks without confirmation: stdin is not a terminal. Pass --yes." in said
        monkeypatch.setattr("penstock.cli.common.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
        declined = run("tasks", "cancel", "--action", "report", answer="n\n")
        assert declined.exit_code == 1
        assert "Cancel 20 tasks? [y/N]" in declined.output
        with Client(url) as client:
            assert client.jobs()["jobs"] == []
        assert run("tasks", "cancel", "--action", "report", answer="y\n").exit_code == 0
        with Client(url) as client:
            assert client.stats()["states"]["CANCELLED"] == 20

    async with stack(store, settings) as url:
        await asyncio.to_thread(use, url)


async def test_the_command_tells_what_is_wrong_with_a_filter(store: Store, settings: Settings) -> None:
    def use(url: str) -> None:
        run = command(url)
        assert "'tenant' is not NAME=TEXT" in run("tasks", "cancel", "--label", "tenant").output
        for arguments, said in (
            (["tasks", "cancel"], "give at least one filter (--action, --state"),
            (["tasks", "retry", "--state", "error"], "states[0] is ERROR; bulk.retry is about CRITICAL_ERROR"),
            (["tasks", "retry", "--state", "LOST"], "'LOST' is not a state: give one of WAITING, SCHEDULED, ACQUIRED"),
            (["tasks", "--state", "LOST"], "'LOST' is not a state: give one of WAITING, SCHEDULED, ACQUIRED"),
        ):
            failed = run(*arguments)
            assert failed.exit_code == 2
            assert said in " ".join(failed.output.replace("│", " ").split())
        missing = run("jobs", "9")
        assert str(missing.exception) == "No such job: 9"

    async with stack(store, settings, working=False) as url:
        await asyncio.to_thread(use, url)
