"""Actions that workers announce: who runs what, and tasks that wait for a worker with theirs."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pydantic
import pytest

from penstock.brokers.sqs import SqsQueue
from penstock.cli.doctor.database import examine_database
from penstock.cli.doctor.findings import Report
from penstock.client.async_client import AsyncClient
from penstock.client.client import Client
from penstock.db.pool import Store
from penstock.limits.reported import list_announced
from penstock.methods.inbound import check_fits
from penstock.protocol.answers import AnnouncedAction, Cause
from penstock.protocol.errors import RpcError
from penstock.protocol.reports import Announced, Unreadable, decode_report, encode_notification
from penstock.protocol.task import NewTask
from penstock.runtime import metrics
from penstock.settings.model import Settings
from penstock.submitter import Submitter
from penstock.supervisor.gauges import Gauges
from penstock.tasks import enqueue as enqueuing
from penstock.worker.announcing import announcements, schemas
from penstock.worker.handlers.actions import Registry, action
from penstock.worker.handlers.context import Call, Context
from penstock.worker.responses import unknown_action
from tests.integration.apis import running as serving
from tests.integration.doors import put, rejected, request
from tests.integration.limits.test_explain import why
from tests.integration.limits.test_limits import enqueue
from tests.integration.test_postponed import Pump
from tests.integration.test_resulter import drained
from tests.integration.test_steps import Line
from tests.integration.worker.test_worker import running

UNKNOWN = unknown_action("resize", Registry())


@dataclass
class Size:
    width: int
    height: int = 0


class Picture(pydantic.BaseModel):
    url: pydantic.HttpUrl
    sizes: list[Size]


class Query(msgspec.Struct):
    longest: float = float("inf")


class Done(msgspec.Struct):
    at: datetime


@pytest.fixture
def pump(store: Store, outbound: SqsQueue, settings: Settings) -> Pump:
    return Pump(store, outbound, settings)


def announcement(name: str = "resize", worker: str = "new:1", **more: Any) -> str:
    params = {"action": name, "worker": worker, **more}
    return json.dumps({"jsonrpc": "2.0", "method": "announce", "params": params})


async def announced(store: Store) -> dict[str, AnnouncedAction]:
    async with store.session() as session:
        return {one.action: one for one in await list_announced(session)}


async def give_back(pump: Pump, *ids: int) -> None:
    await pump.due(*ids)
    pairs = await pump.send()
    assert sorted(task_id for task_id, _ in pairs) == sorted(ids)
    for pair in pairs:
        assert (await pump.answer(pair, UNKNOWN)).postponed == 1


async def test_a_rolling_deploy_spends_no_attempt_and_the_task_runs_once_a_worker_announces_its_action(
    pump: Pump,
) -> None:
    ids = await enqueue(pump.store, NewTask("resize", max_attempts=1), NewTask("resize", max_attempts=1))
    await give_back(pump, *ids)
    await pump.sql("update penstock.postponed set unknown_since = now() - interval '2 hours'")
    await give_back(pump, *ids)
    for one in ids:
        assert (await pump.task(one))["run_at"] > datetime.now(UTC) + timedelta(minutes=40)
    await pump.upkeep.run_once()
    assert await pump.send() == []
    assert (await announced(pump.store))["resize"].waiting == 2
    await pump.world.report(announcement(version="2.0"))
    assert await pump.upkeep.run_once() == 2
    assert await pump.upkeep.run_once() == 0
    row = await pump.task(ids[0])
    assert (row["state"], row["attempts"], row["failures"]) == ("SCHEDULED", 0, None)
    first, second = await pump.send()
    # An old worker has the second again: it goes soon to another, and no announcement is needed for that.
    await pump.answer(second, UNKNOWN)
    row = await pump.task(second[0])
    assert timedelta(0) < row["run_at"] - datetime.now(UTC) < timedelta(seconds=73)
    assert "though others run it" in (await why(pump.store, second[0])).reason
    assert first[0] in ids


async def test_an_announcement_holds_for_a_while_and_its_next_one_begins_anew(pump: Pump) -> None:
    await pump.world.report(announcement(version="1", description="Makes it smaller.", params={"type": "object"}))
    await pump.world.report(announcement(worker="new:2", version="2"), announcement(worker="new:2", version="2"))
    (shown,) = (await announced(pump.store)).values()
    assert (shown.workers, shown.versions, shown.waiting) == (2, ["1", "2"], 0)
    await pump.sql(
        "update penstock.announced set since = since - interval '1 hour', seen_at = seen_at - interval '5 min'"
    )
    (shown,) = (await announced(pump.store)).values()
    assert (shown.workers, shown.versions) == (0, [])
    (task_id,) = await enqueue(pump.store, NewTask("resize"))
    await give_back(pump, task_id)
    assert (await why(pump.store, task_id)).reason.startswith("No worker runs resize; last seen 5 min ago.")
    await pump.sql("update penstock.task set run_at = now() + interval '1 hour'")
    await pump.world.report(announcement())  # the same worker, after a gap
    assert await pump.upkeep.run_once() == 1
    await pump.sql("update penstock.announced set seen_at = seen_at - interval '8 days'")
    await pump.upkeep.run_once()
    assert await pump.sql("select action from penstock.announced") == []


async def test_a_task_that_failed_meanwhile_keeps_its_backoff(pump: Pump) -> None:
    (task_id,) = await enqueue(pump.store, NewTask("resize"))
    await give_back(pump, task_id)
    await pump.due(task_id)
    ((_, claim),) = await pump.send()
    error = {"code": -32000, "message": "no", "data": {"retry_after": 600}}
    await pump.world.report(json.dumps({"jsonrpc": "2.0", "error": error, "id": f"{task_id}:{claim}"}))
    await pump.world.report(announcement())
    await pump.upkeep.run_once()
    assert (await pump.task(task_id))["run_at"] > datetime.now(UTC) + timedelta(minutes=9)
    assert "attempt 1 of 10 failed" in (await why(pump.store, task_id)).reason


async def sleep(pump: Pump, task_id: int, seconds: float) -> None:
    """A worker that has the action suspends the task."""
    await pump.due(task_id)
    ((_, claim),) = await pump.send()
    text = encode_notification("suspend", id=f"{task_id}:{claim}", seconds=seconds)
    assert (await pump.world.report(text)).suspended == 1


async def test_an_announcement_ends_no_sleep_of_a_task_that_was_given_back_before(pump: Pump) -> None:
    (task_id,) = await enqueue(pump.store, NewTask("resize"))
    await pump.world.report(announcement())
    await give_back(pump, task_id)
    await sleep(pump, task_id, 86_400)
    assert (await why(pump.store, task_id)).cause is Cause.NOT_DUE
    assert (await announced(pump.store))["resize"].waiting == 0
    await pump.world.report(announcement(worker="new:2"))
    assert await pump.upkeep.run_once() == 0
    assert (await pump.task(task_id))["run_at"] > datetime.now(UTC) + timedelta(hours=23)


async def test_the_wait_for_a_worker_starts_again_after_one_has_run_the_task_up_to_a_sleep(pump: Pump) -> None:
    (task_id,) = await enqueue(pump.store, NewTask("resize"))
    await give_back(pump, task_id)
    await pump.sql("update penstock.postponed set unknown_since = now() - interval '25 hours'")
    await sleep(pump, task_id, 0)
    await give_back(pump, task_id)


async def move(store: Store, way: str, task_id: int, seconds: float) -> None:
    later = NewTask("resize", unique_key="k", on_duplicate="replace", delay_seconds=seconds)
    async with store.transaction() as session:
        match way:
            case "reschedule":
                await session.fetch("reschedule_tasks", [task_id], None, seconds, None)
            case "bulk":
                await session.fetch("spread_tasks", [task_id], [seconds], datetime.now(UTC), None)
            case "replace":
                await enqueuing.enqueue(session, [later])


@pytest.mark.parametrize("way", ["reschedule", "bulk", "replace"])
async def test_a_time_that_a_task_was_given_after_its_return_outlasts_an_announcement(pump: Pump, way: str) -> None:
    (task_id,) = await enqueue(pump.store, NewTask("resize", unique_key="k"))
    await give_back(pump, task_id)
    await move(pump.store, way, task_id, 86_400)
    assert (await why(pump.store, task_id)).cause is Cause.NOT_DUE
    await pump.world.report(announcement())
    assert await pump.upkeep.run_once() == 0
    assert (await pump.task(task_id))["run_at"] > datetime.now(UTC) + timedelta(hours=23)


@pytest.mark.parametrize("way", ["reschedule", "bulk"])
async def test_the_wait_for_a_worker_starts_again_at_the_time_that_a_task_was_given(pump: Pump, way: str) -> None:
    (task_id,) = await enqueue(pump.store, NewTask("resize"))
    await give_back(pump, task_id)
    await pump.sql("update penstock.postponed set unknown_since = now() - interval '25 hours'")
    await move(pump.store, way, task_id, 0)
    await give_back(pump, task_id)


@pytest.mark.parametrize("way", ["reschedule", "bulk"])
async def test_a_task_with_another_priority_still_waits_for_a_worker(pump: Pump, way: str) -> None:
    (task_id,) = await enqueue(pump.store, NewTask("resize"))
    await give_back(pump, task_id)
    await pump.sql("update penstock.postponed set unknown_since = now() - interval '2 hours'")
    await give_back(pump, task_id)
    async with pump.store.transaction() as session:
        if way == "bulk":
            await session.fetch("spread_tasks", [task_id], [0.0], None, 5)
        else:
            await session.fetch("reschedule_tasks", [task_id], None, None, 5)
    assert (await why(pump.store, task_id)).cause is Cause.UNKNOWN_ACTION
    await pump.world.report(announcement())
    assert await pump.upkeep.run_once() == 1


async def test_an_announcement_waits_for_no_transaction_that_moves_tasks(pump: Pump) -> None:
    ids = await enqueue(pump.store, NewTask("resize"), NewTask("resize"))
    await give_back(pump, *ids)
    await pump.sql("update penstock.postponed set unknown_since = now() - interval '2 hours'")
    await give_back(pump, *ids)
    await pump.world.report(announcement())
    async with pump.store.transaction() as session:
        await session.fetch("reschedule_tasks", ids[:1], None, 86_400.0, None)
        async with asyncio.timeout(20):
            assert await pump.upkeep.run_once() == 1


async def test_a_worker_announces_its_actions_with_their_schemas(
    store: Store, outbound: SqsQueue, results: SqsQueue, settings: Settings
) -> None:
    line = Line(store, outbound, results, settings)

    async def order(ctx: Context, picture: Picture, size: Size, note: str = "") -> Done:
        """Makes it smaller.

        More.
        """
        return Done(datetime.now(UTC))

    worker = line.worker(order, announce_actions=True, worker_version="7.1", worker_name="w:1")
    async with running(worker):
        for _ in range(100):
            if await line.resulter.run_once():
                break
            await asyncio.sleep(0.05)
    await drained(line.resulter)
    (shown,) = (await announced(store)).values()
    assert (shown.action, shown.workers, shown.versions, shown.description) == (
        "order",
        1,
        ["7.1"],
        "Makes it smaller.",
    )
    params, result = json.loads(bytes(shown.params)), json.loads(bytes(shown.result))
    assert params["required"] == ["picture", "size"]
    assert params["additionalProperties"] is False
    assert params["properties"]["note"] == {"type": "string"}
    name = params["properties"]["size"]["$ref"].rpartition("/")[2]  # pydantic describes the type for Picture, too
    assert params["$defs"][name]["properties"]["width"] == {"type": "integer"}
    assert params["properties"]["picture"]["properties"]["url"]["format"] == "uri"
    assert result["$defs"]["Done"]["properties"]["at"]["type"] == "string"
    (seen,) = await store.fetch("list_announced", 200.0, 10, 10)
    assert seen["workers"] == 1


def test_every_kind_of_handler_can_be_announced() -> None:
    registry = Registry()
    action("plain", registry=registry)(lambda ctx: None)
    action("many", registry=registry)(lambda ctx, *parts: None)

    @action("together", batch=5, registry=registry)
    def together(calls: list[Call[Size]]) -> list[int]:
        return []

    @action("open", registry=registry)
    def open_(ctx: Context, kind: complex | None = None, **rest: Any) -> object:
        return None

    texts = [text.replace('"action"', '"worker":"w:1","action"') for text in announcements(registry, None)]
    told = {one.action: one for one in map(decode_report, texts) if isinstance(one, Announced)}
    assert json.loads(told["plain"].params or "")["properties"] == {}
    assert told["many"].params is None
    assert json.loads(told["together"].params or "")["$ref"] == "#/$defs/Size"
    assert json.loads(told["together"].result or "") == {"type": "integer"}
    assert json.loads(told["open"].params or "")["additionalProperties"] is True
    assert told["open"].result is None


@pytest.mark.parametrize("more", [{"worker": ""}, {"worker": "x" * 101}, {"name": ""}, {"name": "x" * 201}])
def test_an_announcement_that_names_no_worker_or_action_is_unreadable(more: dict[str, str]) -> None:
    assert isinstance(decode_report(announcement(**more)), Unreadable)


def test_a_schema_that_is_none_or_too_long_is_left_out() -> None:
    for schema in (7, [], "x", {"description": "x" * 20_000}):
        report = decode_report(announcement(params=schema))
        assert isinstance(report, Announced)
        assert report.params is None


def test_a_default_that_json_cannot_hold_spoils_no_announcement() -> None:
    registry = Registry()

    @action("search", registry=registry)
    async def search(ctx: Context, query: Query) -> None: ...

    (text,) = announcements(registry, None)
    assert isinstance(decode_report(text, worker="w:1"), Announced)


def test_two_types_of_one_name_do_not_stand_for_each_other() -> None:
    registry = Registry()
    first, second = msgspec.defstruct("Item", [("a", int)]), msgspec.defstruct("Item", [("b", int)])

    def both(one: Any, other: Any) -> None: ...

    both.__annotations__ |= {"one": first, "other": second}
    action("both", registry=registry)(both)
    params = json.dumps(schemas(registry["both"])[0])
    check_fits({"both": [params]}, "both", '{"one":{"a":1},"other":{"b":2}}')


FITS = {"url": "u", "width": 3}
MISFITS = {
    "payload.width must be integer, and is of type string": FITS | {"width": "secret"},
    "payload.url is missing": {"width": 3},
    "payload.secret is no parameter": FITS | {"secret": 1},
    "payload.copies[1] must be integer, and is of type null": FITS | {"copies": [1, None]},
}


async def test_payloads_are_checked_against_what_workers_announce_now(
    pump: Pump, settings: Settings, store: Store, inbound: SqsQueue
) -> None:
    registry = Registry()

    @action("resize", registry=registry)
    def resize(url: str, width: int, copies: list[int] | None = None) -> None: ...

    def newer(url: str, height: int) -> None: ...

    schema = schemas(registry["resize"])[0]
    strict = settings.model_copy(update={"check_payloads": True})
    submitter = Submitter(store=store, inbound=inbound, settings=strict)
    async with serving(store, strict) as api, AsyncClient(api.url) as client:
        await client.enqueue("resize", {"anything": 1})  # before any announcement
        await pump.world.report(announcement(params=schema))
        await client.enqueue("resize", FITS)
        await client.enqueue("resize", ["u", "by position"])
        await client.enqueue("other", {"anything": 1})
        for problem, payload in MISFITS.items():
            with pytest.raises(RpcError) as refused:
                await client.enqueue("resize", payload)
            assert refused.value.message == f"Invalid params: {problem}, as workers announce the action 'resize'"
        await put(
            inbound, *(request("enqueue", {"action": "resize", "payload": one}) for one in (FITS, *MISFITS.values()))
        )
        while await submitter.run_once():
            pass
        kept = {reason: json.loads(body)["params"]["payload"] for _, body, reason in await rejected(store)}
        assert {
            reason.removeprefix("Invalid params: ").partition(", as workers")[0]: one for reason, one in kept.items()
        } == MISFITS
        action("resize", registry=(versions := Registry()))(newer)
        await pump.world.report(announcement(worker="newer:1", params=schemas(versions["resize"])[0]))
        await client.enqueue("resize", {"url": "u", "height": 3})  # a rolling deploy: both run
        await client.enqueue("resize", FITS)
        await pump.world.report(announcement(worker="broken:1", params={"$ref": "https://example.org/secret"}))
        await client.enqueue("resize", {"anything": 1})  # a schema that cannot be applied; none is fetched
    async with serving(store, settings) as api, AsyncClient(api.url) as client:
        assert await client.enqueue("resize", {})


async def test_client_metrics_and_doctor_say_who_runs_what_and_what_waits(
    pump: Pump, settings: Settings, store: Store
) -> None:
    await pump.world.report(announcement("mail", version="3"))
    (task_id,) = await enqueue(store, NewTask("resize"))
    await give_back(pump, task_id)
    gauges = Gauges(store=store, queues={}, dead_letters={})
    await gauges.run_once()
    values = {name: metrics.ACTION_WORKERS.labels(name)._value.get() for name in ("mail", "resize")}
    assert (values, metrics.ACTION_WAITING.labels("resize")._value.get()) == ({"mail": 1, "resize": 0}, 1)
    report = Report()
    await examine_database(settings, report)
    told = {(one.level, one.seen) for one in report.findings if one.what == "actions"}
    assert told == {
        ("ok", "workers announce 1"),
        ("warning", "no worker runs resize, which was never announced; 1 tasks wait for one"),
    }
    async with serving(store, settings) as api:

        def ask() -> list[tuple[str, int, int]]:
            with Client(api.url) as client:
                return [(one.action, one.workers, one.waiting) for one in client.announced_actions()]

        assert await asyncio.to_thread(ask) == [("mail", 1, 0), ("resize", 0, 1)]
