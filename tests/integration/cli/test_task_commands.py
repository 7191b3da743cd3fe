"""`penstock enqueue`, `reschedule`, `ordering` and the like, against a running api."""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from typer.testing import CliRunner

from penstock.brokers.sqs import SqsQueue
from penstock.cli.app import app
from penstock.client.client import Client
from penstock.db.pool import Store
from penstock.protocol.task import Failure, NewTask
from penstock.settings.model import Settings
from penstock.submitter import Submitter
from penstock.tasks import claim, enqueue, settle
from tests.integration.apis import running
from tests.integration.doors import put, rejected, request


def run(url: str, *arguments: str, fails: bool = False) -> str:
    done = CliRunner().invoke(app, [*arguments, "--api-url", url])
    assert (done.exit_code != 0) == fails, done.output
    return str(done.exception) if fails and not done.output else done.output


async def test_a_tasks_options_go_over_the_command_line(store: Store, settings: Settings) -> None:
    def use(url: str) -> None:
        options = ("--label", "tenant=acme", "--label", "note=a=b", "--expires-in", "60", "--limit-key", "l")
        first = json.loads(run(url, "enqueue", "a", "--unique-key", "k", *options, "--json"))
        task: dict[str, Any] = json.loads(run(url, "task", "show", str(first["id"]), "--detail", "--json"))
        assert (task["labels"], task["limit_key"]) == ({"tenant": "acme", "note": "a=b"}, "l")
        assert task["expires_at"] > task["created_at"]
        again = run(url, "enqueue", "a", "--unique-key", "k", "--unique", "live", "--on-duplicate", "replace")
        assert again == f"task {first['id']} SCHEDULED (replaced)\n"
        window = run(url, "enqueue", "a", "--unique-key", "k", "--unique", "3600", "--expires-at", "4102444800000")
        assert window == f"task {first['id']} SCHEDULED (already existed)\n"
        assert "has this unique key" in run(
            url, "enqueue", "a", "--unique-key", "k", "--on-duplicate", "error", fails=True
        )
        assert "is not NAME=TEXT" in run(url, "enqueue", "a", "--label", "tenant", fails=True)
        moved = run(url, "task", "reschedule", str(first["id"]), "--run-at", "4102444800000", "--priority", "3")
        assert moved == f"task {first['id']} SCHEDULED\n"
        shown = json.loads(run(url, "task", "show", str(first["id"]), "--json"))
        assert (shown["run_at"], shown["priority"]) == ("2100-01-01T00:00:00.000000Z", 3)
        run(url, "task", "cancel", str(first["id"]), "--reason", "no longer wanted")
        assert "no longer wanted" in run(url, "task", "show", str(first["id"]))
        made = run(url, "enqueue", "b", '{"n": 7}', "--delay", "1h30m", "--timeout", "2m", "--json")
        second = str(json.loads(made)["id"])
        shown = run(url, "task", second).splitlines()
        assert "payload" in [line.split()[0] for line in shown]
        assert '{"n": 7}' in " ".join(shown)
        assert json.loads(run(url, "task", second, "--detail", "--json"))["timeout"] == 120
        assert "'5x' is not a duration" in run(url, "enqueue", "b", "--delay", "5x", fails=True)
        wrong = CliRunner().invoke(app, ["enqueue", "b", "--priority", "99999", "--api-url", url])
        assert (wrong.exit_code, "Error" in wrong.output, "-32602" in wrong.output) == (2, True, False)
        limits = json.loads(run(url, "actions", "set", "b", "--rate", "10/m", "--key-rate", "1/s", "--json"))
        assert (round(limits["rate"], 6), limits["key_rate"]) == (round(10 / 60, 6), 1)

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)


async def test_what_a_handler_raised_is_no_command_to_the_terminal(store: Store, settings: Settings) -> None:
    escape = "\x1b]52;c;Y3VybCBldmls\x07\x1b[2J"
    async with store.session() as session:
        (task,) = await enqueue.enqueue(session, [NewTask("a", max_attempts=1)])
    async with store.transaction() as session:
        batch = await claim.claim(session, 1)
        assert batch is not None
        await claim.confirm(session, batch.id)
        error = {"code": -32000, "message": f"boom {escape}", "data": {"traceback": f"Traceback {escape}\n  line 2"}}
        await settle.fail(session, [Failure(task.id, batch.id, json.dumps(error), None)])

    def use(url: str) -> None:
        told = (
            run(url, "task", "show", str(task.id)),
            run(url, "task", "show", str(task.id), "--detail", "--json"),
            run(url, "tasks", "--state", "critical_error"),
            run(url, "task", "result", str(task.id), fails=True),
            run(url, "task", "show", str(task.id), "--follow", fails=True),
            run(url, "task", "show", str(task.id), "999", fails=True),
            run(url, "task", "show", str(task.id), "999", "--json", fails=True),
        )
        for text in told:
            assert "boom" in text
            assert not set(text) & {"\x1b", "\x07"}
        assert "\nTraceback \\x1b]52;" in told[0]
        assert "\n  line 2" in told[0]

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)


async def test_tasks_are_found_by_every_filter_that_the_api_has(store: Store, settings: Settings) -> None:
    def use(url: str) -> None:
        def ids(*options: str) -> list[int]:
            return [task["id"] for task in json.loads(run(url, "tasks", *options, "--json"))["tasks"]]

        run(url, "enqueue", "a", "--label", "tenant=acme", "--label", "kind=x", "--unique-key", "k")
        run(url, "enqueue", "a", "--label", "tenant=acme", "--ordering-key", "k")
        run(url, "enqueue", "b")
        assert ids() == [3, 2, 1]
        assert ids("--label", "tenant=acme") == [2, 1]
        assert ids("--label", "tenant=acme", "--label", "kind=x") == [1]
        assert ids("--key", "k") == [2, 1]
        assert ids("--action", "a", "--state", "scheduled", "--key", "k", "--limit", "1") == [2]
        second = json.loads(run(url, "task", "show", "2", "--json"))["created_at"]
        assert ids("--since", second) == [3, 2]
        assert ids("--until", second) == [1]
        assert ids("--since", "0", "--until", "4102444800000") == [3, 2, 1]
        assert ids("--text", "{}") == [3, 2, 1]
        assert ids("--text", "nowhere") == []
        assert run(url, "tasks", "--key", "none") == "No tasks.\n"
        assert "is not NAME=TEXT" in run(url, "tasks", "--label", "tenant", fails=True)
        assert "until must be later than since" in run(url, "tasks", "--since", "2", "--until", "1", fails=True)

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)


async def test_a_group_alone_lists_and_says_where_there_is_none(store: Store, settings: Settings) -> None:
    def use(url: str) -> None:
        for group in (
            "tasks",
            "jobs",
            "workflows",
            "schedules",
            "actions",
            "routes",
            "tenants",
            "ordering",
            "rejected",
        ):
            assert re.fullmatch(r"No [a-z ]+\.\n", run(url, group)), group
        run(url, "actions", "pause", "a")
        assert "paused" in run(url, "actions").splitlines()[1].split()

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)


async def test_held_ordering_keys_are_listed_and_let_go(store: Store, settings: Settings) -> None:
    def use(url: str) -> None:
        ids = [json.loads(run(url, "enqueue", "a", "--ordering-key", "o", "--json"))["id"] for _ in range(2)]
        assert run(url, "ordering") == "No held ordering keys.\n"
        asyncio.run(fail())
        listed = run(url, "ordering")
        assert "o" in listed.splitlines()[1].split()
        assert str(ids[0]) in listed.splitlines()[1].split()
        assert run(url, "ordering", "release", "o") == f"released; task {ids[1]} may run\n"
        assert run(url, "ordering", "release", "o") == "the key is not held\n"
        assert json.loads(run(url, "ordering", "--json")) == {"keys": [], "cursor": None}

    async def fail() -> None:
        other = Store(settings.require_database_url)
        async with other.transaction() as session:
            batch = await claim.claim(session, 1)
            assert batch is not None
            error = '{"code":1,"message":"boom"}'
            await settle.fail(session, [Failure(t.id, t.claim, error, None) for t in batch.tasks], hold_keys=True)
        await other.close()

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)


async def test_rejected_messages_are_listed_shown_read_again_and_purged(
    store: Store, settings: Settings, inbound: SqsQueue
) -> None:
    await put(inbound, "no json", request("submitt:export", {"objectID": 1}))
    submitter = Submitter(store=store, inbound=inbound, settings=settings)
    while len(await rejected(store)) < 2:
        await submitter.run_once()

    async with store.transaction() as session:
        await enqueue.insert_rejected(session, "kafka-source", [(b"{", "no schedule")])

    def use(url: str) -> None:
        (record,) = json.loads(run(url, "rejected", "--source", "kafka-source", "--json"))["rejected"]
        assert record["source"] == "kafka-source"
        assert run(url, "rejected", "purge", str(record["id"])).splitlines()[-1] == "purged  1"
        first, second = json.loads(run(url, "rejected", "--json"))["rejected"]
        listed = run(url, "rejected", "--source", "inbound").splitlines()
        assert [line.split()[0] for line in listed] == ["id", str(first["id"]), str(second["id"])]
        junk, typo = sorted((first, second), key=lambda message: message["body"] != "no json")
        assert run(url, "rejected", "show", str(junk["id"])).endswith("\n\nno json\n")
        assert "still_rejected" in run(url, "rejected", "retry", str(typo["id"]), fails=True)
        assert "name the ids, or --all" in run(url, "rejected", "purge", fails=True)
        # What the api logs, here in the same process, may come before.
        assert run(url, "rejected", "purge", str(junk["id"])).splitlines()[-1] == "purged  1"
        assert run(url, "rejected", "purge", "--all").splitlines()[-1] == "purged  1"
        assert run(url, "rejected") == "No rejected messages.\n"

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)


async def test_a_traced_task_is_shown_with_its_trace(store: Store, settings: Settings) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    async with store.session() as session:
        traced, plain = await enqueue.enqueue(session, [NewTask("a"), NewTask("a")])
        await session.fetch("note_traces", [traced.id], [f"00-{trace_id}-00f067aa0ba902b7-01"])
    async with running(store, settings) as api:
        for detail in ((), ("--detail",)):
            assert trace_id in await asyncio.to_thread(run, api.url, "task", "show", str(traced.id), *detail)
            assert "trace_id" not in await asyncio.to_thread(run, api.url, "task", "show", str(plain.id), *detail)


async def test_failures_of_a_task_are_told_readably_and_while_it_is_waited_for(
    store: Store, settings: Settings
) -> None:
    told = {"type": "ValueError", "message": "no luck", "traceback": "Traceback:\n  deep\nValueError: no luck"}
    error = json.dumps({"code": -32000, "message": "no luck", "data": told})

    async def fail_one() -> None:
        other = Store(settings.require_database_url)
        async with other.transaction() as session:
            batch = await claim.claim(session, 1)
            assert batch is not None
            await settle.fail(session, [Failure(t.id, t.claim, error, 60.0) for t in batch.tasks], hold_keys=False)
        await other.close()

    def use(url: str) -> None:
        run(url, "enqueue", "a", "--max-attempts", "5")
        asyncio.run(fail_one())
        plain = run(url, "task", "1")
        assert plain.count("no luck") == 2, "once in the line, once at the end of the traceback"
        assert "error  ValueError: no luck" in " ".join(plain.split(" "))
        assert "attempt 1 of 5 failed" not in plain
        detail = run(url, "task", "1", "--detail")
        assert "attempt 1 of 5 failed: ValueError: no luck" in detail
        assert "{" not in detail.split("attempt 1 of 5")[1]
        client = Client(url)
        for options, code in ((["--wait-timeout", "3s"], 4), (["--fail-fast"], 3)):
            call = ["enqueue", "a", "--max-attempts", "5", "--wait", *options, "--api-url", url]
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(CliRunner().invoke, app, call)
                while not client.list(state="SCHEDULED")["tasks"]:  # not by the command: it has this one's output
                    assert not waiting.done()
                asyncio.run(fail_one())
                waited = waiting.result(60)
            assert (waited.exit_code, waited.stdout) == (code, ""), waited.output
            assert "attempt 1 of 5 failed: ValueError: no luck" in waited.stderr
            assert ("retrying at" in waited.stderr, "  deep" in waited.stderr) == (code == 4, code == 3)

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)
