"""Workflows by every way: the page's examples, the command line, the Python client, the queues."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from penstock import Client, Workflow
from penstock.brokers.base import Queue
from penstock.db.notify import Notifier
from penstock.db.pool import Store
from penstock.methods.inbound import accept_inbound, read_inbound
from penstock.protocol.reports import decode_reports
from penstock.protocol.task import NewTask
from penstock.resulter import Resulter
from penstock.results.apply import apply_reports
from penstock.scheduler.process import Scheduler
from penstock.settings.model import Settings
from penstock.supervisor.retention import Retention
from penstock.tasks import claim, enqueue
from penstock.worker.handlers.actions import Registry, action
from penstock.worker.handlers.context import Context
from penstock.worker.process import Worker
from penstock.workflows.advancer import WorkflowAdvancer
from tests.integration.apis import JSON, running
from tests.integration.cli.test_task_commands import run
from tests.integration.doors import no_routes, request
from tests.integration.lives import Broken, Lives, Spawned
from tests.integration.test_protocol_page import same

PAGE = (Path(__file__).parents[3] / "docs" / "workflows.md").read_text("utf-8")


async def test_every_example_of_the_workflows_page_is_true(store: Store, settings: Settings) -> None:
    lives = Lives(store, settings)
    asked = 0
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:
        for text in re.findall(r"^```json http\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
            for sent, answer in re.findall(r"^--> (.*?)^<-- (.*?)(?=^-->|\Z)", text, re.MULTILINE | re.DOTALL):
                actual = (await http.post("/rpc", content=sent)).json()
                assert same(json.loads(answer), actual), f"{sent} is answered {json.dumps(actual)}"
                asked += 1
        (inbound,) = re.findall(r"^```json inbound\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
        read = read_inbound(inbound, settings)
        async with store.transaction() as session:
            await accept_inbound(session, read, settings, source="inbound")
        assert read.refused == []
        assert (await lives.look(5)).state == "CANCELLED"
        (program,) = [
            code for code in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) if "Client" in code
        ]
        told: list[Any] = []
        code = program.replace("http://127.0.0.1:8080", api.url)
        using = asyncio.create_task(asyncio.to_thread(exec, code, {"print": lambda *words: told.append(words)}))
        while not using.done():
            await lives.live(lambda action, payload: ["a"])
            await asyncio.sleep(0.02)
        await using
        assert told == [("SUCCESS", {"SUCCESS": 5})]
    assert asked == 10


async def test_the_answer_of_the_page_makes_its_child(store: Store, settings: Settings, sql: Any) -> None:
    (answer,) = re.findall(r"^```json results\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    async with store.transaction() as session:
        (parent,) = await enqueue.enqueue(session, [NewTask("scan", "{}")])
    async with store.session() as session:
        batch = await claim.claim(session, 1)
    assert batch is not None
    told = answer.replace("42:7", f"{parent.id}:{batch.tasks[0].claim}")
    async with store.transaction() as session:
        applied = await apply_reports(session, decode_reports(told, batch_limit=1), settings)
    assert applied.succeeded == 1
    (child,) = await sql.fetch("select action, payload::text as payload, state::text as state from penstock.task")
    assert dict(child) == {"action": "index", "payload": '{"file": "a"}', "state": "SCHEDULED"}


async def test_workflows_over_the_command_line_and_the_client(store: Store, settings: Settings) -> None:
    def use(url: str) -> None:
        chain = '[{"action": "a"}, [{"action": "b"}, {"action": "c"}], {"action": "d"}]'
        assert run(url, "workflows", "create", chain, "--key", "k", "--name", "nightly") == "workflow 1 is RUNNING\n"
        again = run(url, "workflows", "create", chain, "--key", "k", "--name", "nightly")
        assert again == "workflow 1 is RUNNING (already existed)\n"
        shown = run(url, "workflows", "show", "--key", "k")
        assert "nightly" in shown
        assert "more: add --cursor" in run(url, "workflows", "show", "1", "--limit", "1")
        assert re.search(r"a  SCHEDULED  task 1\n.*b  WAITING", shown)
        assert "also after b" in shown
        assert run(url, "workflows", "cancel", "1", "--reason", "no").endswith("workflow 1 is CANCELLED\n")
        assert "CANCELLED" in run(url, "workflows", "--state", "CANCELLED")
        assert run(url, "workflows", "retry", "1").endswith("workflow 1 is RUNNING, 4 steps run again\n")
        assert json.loads(run(url, "workflows", "show", "1", "--json"))["open"] == 4
        assert "definition is not JSON" in run(url, "workflows", "create", "[", fails=True)
        assert "chian is unknown" in run(url, "workflows", "create", '{"chian": []}', fails=True)
        with Client(url) as client:
            flow = Workflow("built")
            first, second = flow.step("a"), flow.step("a")
            flow.chain([first, second], [flow.step("b"), flow.step("c")], flow.map("d", over=[1, 2]))
            made = client.workflows.create(flow)
            found = client.workflows.status(made["id"])
            after = {step["name"]: step.get("after", []) for step in found["tree"]}
            assert after == {
                "a": [], "a-2": [], "b": ["join"], "c": ["join"], "d": ["b", "c"], "join": ["a", "a-2"],
            }  # fmt: skip
            assert client.workflows.list(limit=1)["workflows"][0]["id"] == made["id"]

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)


async def test_a_workflow_of_the_inbound_queue_that_is_wrong_is_kept_with_its_reason(
    store: Store, settings: Settings
) -> None:
    good = request("workflow.create", {"chain": [{"action": "a"}], "key": "k"})
    other = request("workflow.create", {"chain": [{"action": "b"}], "key": "k"})
    bad = request("workflow.create", {"steps": [{"action": "a", "after": ["z"]}]})
    read = read_inbound(f"[{good},{other},{bad}]", settings)
    async with store.transaction() as session:
        await accept_inbound(session, read, settings, source="inbound")
    assert [reason for _, reason in read.refused] == [
        "Invalid params: steps[0].after of 'a' names 'z', and there is no such step",
        "Workflow 1 has the key 'k' and another definition: give this one a key of its own",
    ]
    assert (await Lives(store, settings).counts(1)) == {"SCHEDULED": 1}


async def test_a_handler_spawns_children_over_the_queues(
    store: Store, settings: Settings, outbound: Queue, results: Queue
) -> None:
    registry = Registry()
    seen: list[Any] = []

    @action("scan", registry=registry)
    async def scan(ctx: Context) -> str:
        for number in range(3):
            ctx.spawn("child", {"number": number}, name=f"n{number}", priority=2)
        with pytest.raises(ValueError, match="takes no 'unique_key'"):
            ctx.spawn("child", unique_key="u")
        return "scanned"

    @action("child", registry=registry)
    def child(ctx: Context, number: int) -> int:
        return number * 10

    @action("end", registry=registry)
    async def end(ctx: Context, found: dict[str, Any]) -> None:
        seen.append(found)

    lives = Lives(store, settings)
    flow = await lives.create(chain=[{"action": "scan"}, {"action": "end", "results_as": "found"}])
    scheduler = Scheduler(store=store, outbound=outbound, settings=settings, open_queue=no_routes)
    worker = Worker(outbound=outbound, results=results, settings=settings, registry=registry)
    resulter = Resulter(store=store, results=results, settings=settings)
    advancing = WorkflowAdvancer(store=store, notifier=Notifier(store), settings=settings)
    await worker.open()
    tasks = [asyncio.create_task(side()) for side in worker.side_tasks().values()]
    try:
        for _ in range(500):
            await scheduler.run_once()
            await worker.run_once()
            await resulter.run_once()
            await advancing.run_once()
            if (await lives.look(flow)).finished_at is not None:
                break
    finally:
        for task in tasks:
            task.cancel()
        await worker.close()
    assert seen == [{"scan": "scanned", "scan/n0": 0, "scan/n1": 10, "scan/n2": 20}]
    assert (await lives.look(flow)).state == "SUCCESS"


async def test_a_workflow_is_removed_when_its_tasks_may_be(store: Store, settings: Settings, sql: Any) -> None:
    lives = Lives(store, settings)
    old, young = [await lives.create(chain=[{"action": "a"}, {"action": "b"}], key=key) for key in ("old", "young")]
    await lives.create(chain=[{"action": "later", "delay": 3600}])
    await lives.live()
    await sql.execute("update penstock.workflow set finished_at = now() - interval '31 days' where id = $1", old)
    retention = Retention(store=store, settings=settings)
    assert [await retention.run_once(), await retention.run_once()] == [1, 0]
    left = {row["workflow_id"] for row in await sql.fetch("select workflow_id from penstock.workflow_step")}
    assert old not in left
    assert young in left
    assert len(left) == 2
    assert await sql.fetchval("select count(*) from penstock.workflow_edge where workflow_id = $1", old) == 0
    assert not (await lives.ask("workflow.create", key="old", chain=[{"action": "other"}])).duplicate


async def test_a_workflow_that_cannot_be_moved_on_holds_up_no_other(store: Store, settings: Settings, sql: Any) -> None:
    lives = Lives(store, settings)
    flows = [await lives.create(chain=[{"action": "a"}, {"action": "b"}]) for _ in range(3)]
    # What no statement of ours would write.
    await sql.execute("update penstock.workflow_step set options = '[]' where workflow_id = $1", flows[1])
    await lives.work(await lives.claim(), lambda *_: None)
    advancing = WorkflowAdvancer(store=store, notifier=Notifier(store), settings=settings)
    failed = 0
    for _ in range(6):
        try:
            await advancing.run_once()
        except msgspec.ValidationError:
            failed += 1
    assert failed >= 2
    states = [(await lives.steps(flow))["b"].state for flow in flows]
    assert states == ["SCHEDULED", "WAITING", "SCHEDULED"]


async def test_schedulers_are_woken_for_a_task_that_a_cancelled_step_of_its_ordering_key_lets_go(
    store: Store, settings: Settings, sql: Any
) -> None:
    lives = Lives(store, settings)
    later = {"name": "b", "action": "b", "ordering_key": "k", "delay": 3600}
    await lives.create(steps=[{"name": "a", "action": "a"}, later])
    async with store.transaction() as session:
        (behind,) = await enqueue.enqueue(session, [NewTask("plain", ordering_key="k")])

    def handler(action: str, payload: Any) -> Any:
        raise Broken

    await lives.work(await lives.claim(), handler)
    notifier = Notifier(store)
    assert await WorkflowAdvancer(store=store, notifier=notifier, settings=settings).run_once()
    assert await sql.fetchval("select state::text from penstock.task where id = $1", behind.id) == "SCHEDULED"
    assert notifier._woken.is_set()


async def test_children_that_are_over_this_process_s_limit_fail_the_step(store: Store, settings: Settings) -> None:
    lives = Lives(store, settings)
    flow = await lives.create(chain=[{"action": "scan"}, {"action": "end"}])

    def handler(action: str, payload: Any) -> Any:
        raise Spawned(None, [{"action": "child", "payload": {"text": "x" * 200}}])

    await lives.work(await lives.claim(), handler)
    lives.settings = settings.model_copy(update={"payload_limit_bytes": 100})
    await lives.advance()
    record = await lives.look(flow)
    assert (record.state, record.reason) == ("FAILED", "step scan is CRITICAL_ERROR")
