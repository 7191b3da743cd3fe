"""Attempts that do not count: snoozes, rate limits that hold an action or a key, workers without the handler."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock.brokers.sqs import SqsQueue
from penstock.db.pool import Store
from penstock.payloads.codec import PayloadCodec
from penstock.payloads.records import encrypt_error
from penstock.protocol.answers import Cause
from penstock.protocol.errors import RateLimited
from penstock.protocol.reports import encode_error
from penstock.protocol.task import Failure, NewTask
from penstock.results.apply import ApplySummary
from penstock.scheduler.process import Scheduler
from penstock.settings.model import Settings, load_settings
from penstock.settings.payload_texts import new_key
from penstock.supervisor.limits import LimitUpkeep
from penstock.supervisor.retention import Retention
from penstock.tasks import settle
from penstock.worker.handlers.actions import Registry
from penstock.worker.handlers.context import Context
from penstock.worker.handlers.outcomes import Snooze
from penstock.worker.handlers.steps import Step
from penstock.worker.responses import Refusal, failure_answer, unknown_action
from tests.integration.limits.test_explain import why
from tests.integration.limits.test_limits import Outbound, enqueue, limit, open_none
from tests.integration.rules import list_actions, read_action
from tests.integration.test_steps import Line
from tests.integration.test_waits import World

Row = Any


class Pump:
    """A scheduler whose sent claims the test answers."""

    def __init__(self, store: Store, outbound: SqsQueue, settings: Settings) -> None:
        self.store, self.settings = store, settings
        self.sent = Outbound(outbound)
        self.scheduler = Scheduler(store=store, outbound=self.sent, settings=settings, open_queue=open_none)  # type: ignore[arg-type]
        self.world = World(store, settings)
        self.upkeep = LimitUpkeep(store=store, outbound=outbound, open_queue=open_none)

    async def send(self) -> list[tuple[int, int]]:
        """What one look of the scheduler sends."""
        before = len(self.sent.pairs)
        while await self.scheduler.run_once():
            pass
        return self.sent.pairs[before:]

    async def answer(self, pair: tuple[int, int], exc: BaseException, **settings: Any) -> ApplySummary:
        text, _ = failure_answer(f"{pair[0]}:{pair[1]}", None, exc)
        return await self.world.report(text, **settings)

    async def sql(self, text: str, *given: Any) -> list[Row]:
        async with self.store.session() as session:
            return await session._connection.fetch(text, *given)

    async def task(self, task_id: int) -> Row:
        (row,) = await self.sql("select * from penstock.task where id = $1", task_id)
        return row

    async def due(self, *ids: int) -> None:
        await self.sql("update penstock.task set run_at = now() where id = any($1::bigint[])", list(ids))

    async def failed(self, task_id: int) -> Any:
        ((text,),) = await self.sql(
            "select failures -> -1 -> 'error' from penstock.task_history where id = $1 and state = 'CRITICAL_ERROR'",
            task_id,
        )
        return json.loads(text)


@pytest.fixture
def pump(store: Store, outbound: SqsQueue, settings: Settings) -> Pump:
    return Pump(store, outbound, settings)


async def test_a_snooze_spends_no_attempt_and_is_counted_up_to_a_limit(pump: Pump) -> None:
    (task_id,) = await enqueue(pump.store, NewTask("poll", max_attempts=1))
    for snoozes in range(1, 4):
        (pair,) = await pump.send()
        assert (await pump.answer(pair, Snooze(300, "not ready"), snooze_limit=3)).postponed == 1
        row = await pump.task(task_id)
        assert (row["state"], row["attempts"], row["failures"]) == ("SCHEDULED", 0, None)
        assert timedelta(seconds=280) < row["run_at"] - datetime.now(UTC) <= timedelta(seconds=300)
        assert json.loads(row["progress"])["note"].endswith(": Snooze: not ready")
        assert [*map(tuple, await pump.sql("select snoozes, unknown_since from penstock.postponed"))] == [
            (snoozes, None)
        ]
        assert await pump.send() == []
        await pump.due(task_id)
    (pair,) = await pump.send()
    assert (await pump.answer(pair, Snooze(timedelta(minutes=5)), snooze_limit=3)).failed == 1
    error = await pump.failed(task_id)
    assert error["data"]["type"] == "PutOffTooOften"
    assert error["message"].startswith("its handler put it off 3 times, the limit (PENSTOCK_SNOOZE_LIMIT): Snooze")


async def test_a_report_of_an_older_claim_puts_nothing_off_and_holds_nothing(pump: Pump) -> None:
    (task_id,) = await enqueue(pump.store, NewTask("poll"))
    (old,) = await pump.send()
    await pump.answer(old, Snooze(0))
    ((_, claim),) = await pump.send()
    for late in (Snooze(60), RateLimited(60), unknown_action("poll", Registry())):
        assert (await pump.answer(old, late)).stale == 1
    row = await pump.task(task_id)
    assert (row["state"], row["claim"], row["attempts"]) == ("ACQUIRED", claim, 1)
    async with pump.store.session() as session:
        assert await list_actions(session) == []


async def test_a_rate_limit_holds_its_action_for_everyone_and_nothing_else(pump: Pump) -> None:
    first, second, other = await enqueue(
        pump.store, NewTask("call"), NewTask("call", delay_seconds=60), NewTask("mail", delay_seconds=60)
    )
    (pair,) = await pump.send()
    assert (await pump.answer(pair, RateLimited(retry_after=600))).postponed == 1
    await pump.due(first, second, other)
    assert [task_id for task_id, _ in await pump.send()] == [other]
    found = await why(pump.store, second)
    assert found.cause is Cause.LIMIT
    assert found.reason.startswith("A handler met a rate limit, which holds action call for 10 min")
    async with pump.store.session() as session:
        (shown,) = await list_actions(session)
        assert (shown.action, shown.paused, shown.held_until is not None) == ("call", False, True)
    await pump.upkeep.run_once()
    assert await pump.send() == []
    # The time is over.
    await pump.sql("update penstock.action set held_until = now()")
    await pump.sql("update penstock.gate set next_at = now()")
    assert sorted(task_id for task_id, _ in await pump.send()) == [first, second]
    await pump.upkeep.run_once()
    async with pump.store.session() as session:
        assert await list_actions(session) == []


async def test_a_change_of_its_limits_ends_what_holds_an_action(pump: Pump) -> None:
    ids = await enqueue(pump.store, NewTask("call"), NewTask("call", delay_seconds=60, limit_key="a"))
    (pair,) = await pump.send()
    await pump.answer(pair, RateLimited(timedelta(minutes=10)))
    await pump.due(*ids)
    assert await pump.send() == []
    await limit(pump.store, "call", paused=False)
    assert len(await pump.send()) == 2
    async with pump.store.session() as session:
        assert (await read_action(session, "call")).held_until is None


@pytest.mark.parametrize("key", ["acme", True])
async def test_a_rate_limit_of_a_key_holds_that_key_alone(pump: Pump, key: str | bool) -> None:
    later = {"delay_seconds": 60.0}
    first, same, another, none = await enqueue(
        pump.store, NewTask("call", limit_key="acme"), NewTask("call", limit_key="acme", **later),
        NewTask("call", limit_key="beta", **later), NewTask("call", **later),
    )  # fmt: skip
    (pair,) = await pump.send()
    await pump.answer(pair, RateLimited(600, key=key))  # type: ignore[arg-type]
    await pump.due(first, same, another, none)
    assert sorted(task_id for task_id, _ in await pump.send()) == [another, none]
    assert "limit key acme of action call" in (await why(pump.store, same)).reason
    await pump.upkeep.run_once()
    assert await pump.send() == []
    await pump.sql("update penstock.gate set held_until = now(), next_at = now()")
    assert sorted(task_id for task_id, _ in await pump.send()) == [first, same]


async def test_a_task_without_a_key_holds_none(pump: Pump) -> None:
    _, second = await enqueue(pump.store, NewTask("call"), NewTask("call", delay_seconds=60))
    (pair,) = await pump.send()
    assert (await pump.answer(pair, RateLimited(600, key=True))).postponed == 1
    await pump.due(second)
    assert [task_id for task_id, _ in await pump.send()] == [second]


async def test_limits_change_while_handlers_hold_actions(pump: Pump) -> None:
    """Neither deadlocks: both lock limits before tasks."""
    await enqueue(pump.store, *(NewTask(f"call{n % 5}", limit_key=f"k{n % 3}") for n in range(60)))
    pairs = await pump.send()
    texts = [failure_answer(f"{a}:{b}", None, RateLimited(30, key=a % 2 == 0 or None))[0] for a, b in pairs]
    changes = [limit(pump.store, f"call{n % 5}", max_in_flight=1000 + n) for n in range(20)]
    reports = [pump.world.report(*texts[n::6]) for n in range(6)]
    summaries = await asyncio.gather(*changes, *reports)
    assert sum(one.postponed for one in summaries if isinstance(one, ApplySummary)) == 60


async def test_an_unknown_action_spends_no_attempt_until_its_time_is_over(pump: Pump) -> None:
    (task_id,) = await enqueue(pump.store, NewTask("resize", max_attempts=1))
    (pair,) = await pump.send()
    assert (await pump.answer(pair, unknown_action("resize", Registry()))).postponed == 1
    row = await pump.task(task_id)
    assert (row["state"], row["attempts"]) == ("SCHEDULED", 0)
    found = await why(pump.store, task_id)
    assert found.cause is Cause.UNKNOWN_ACTION
    assert found.reason.startswith("No worker runs resize; none was ever seen. It waits since ")
    # After an hour it is tried every half of that, and it is not sent in between.
    await pump.sql("update penstock.postponed set unknown_since = now() - interval '1 hour'")
    await pump.due(task_id)
    (pair,) = await pump.send()
    await pump.answer(pair, unknown_action("resize", Registry()))
    row = await pump.task(task_id)
    assert timedelta(minutes=23) < row["run_at"] - datetime.now(UTC) < timedelta(minutes=37)
    await pump.sql("update penstock.postponed set unknown_since = now() - interval '25 hours'")
    await pump.due(task_id)
    (pair,) = await pump.send()
    assert (await pump.answer(pair, unknown_action("resize", Registry()))).failed == 1
    error = await pump.failed(task_id)
    assert error["data"]["type"] == "UnknownAction"
    assert "no worker ran its action within 86400 s (PENSTOCK_UNKNOWN_ACTION_SECONDS)" in error["message"]


@pytest.mark.parametrize("ends", ["no payload", "lost with others"])
async def test_a_worker_that_has_the_action_ends_the_time_without_one(pump: Pump, ends: str) -> None:
    (task_id,) = await enqueue(pump.store, NewTask("resize", max_attempts=1))
    (pair,) = await pump.send()
    await pump.answer(pair, unknown_action("resize", Registry()))
    await pump.sql("update penstock.postponed set unknown_since = now() - interval '25 hours'")
    await pump.due(task_id)
    (pair,) = await pump.send()
    if ends == "no payload":
        away = Refusal("PayloadUnavailable", "S3 is unavailable", data={"not_begun": True})
        assert (await pump.answer(pair, away)).postponed == 1
    else:
        async with pump.store.transaction() as session:
            await settle.refund(session, [Failure(*pair, '{"code":1,"message":"lost"}', None)])
    await pump.due(task_id)
    (pair,) = await pump.send()
    assert (await pump.answer(pair, unknown_action("resize", Registry()))).postponed == 1


async def test_what_is_noted_of_a_task_goes_with_its_record_and_starts_again_with_a_retry(
    pump: Pump, settings: Settings
) -> None:
    kept, gone = await enqueue(pump.store, NewTask("poll"), NewTask("poll"))
    for pair in await pump.send():
        await pump.answer(pair, Snooze(0))
    await pump.sql("delete from penstock.task where id = $1", gone)
    await Retention(store=pump.store, settings=settings)._delete_gone("journal")
    assert [row["task_id"] for row in await pump.sql("select task_id from penstock.postponed")] == [kept]
    (pair,) = await pump.send()
    await pump.world.report(encode_error(f"{pair[0]}:{pair[1]}", -32000, "no", {"final": True}))
    async with pump.store.transaction() as session:
        await session.fetch("restart_tasks", [kept])
    assert await pump.sql("select task_id from penstock.postponed") == []


async def test_a_step_that_puts_its_task_off_is_not_tried_again_in_the_attempt(
    store: Store, outbound: SqsQueue, results: SqsQueue, settings: Settings
) -> None:
    line, ran = Line(store, outbound, results, settings), list[str]()

    async def busy() -> None:
        ran.append("busy")
        raise RateLimited(30) if len(ran) > 1 else Snooze(5)

    async def order(ctx: Context) -> str:
        await ctx.step(Step("ask", retries=5), busy)
        return "done"

    (task_id,) = await line.enqueue(NewTask("order"))
    for snoozes in (1, 2):
        await line.attempt(order)
        async with store.session() as session:
            (row,) = await session.fetch("show_tasks", [task_id], True, 1)
            assert row["snoozes"] == snoozes
    assert ran == ["busy", "busy"]  # neither try was repeated within its attempt


async def test_the_reason_of_a_snooze_is_encrypted_where_payloads_are(settings: Settings) -> None:
    codec = PayloadCodec(load_settings(**settings.model_dump() | {"payload_keys": new_key()}))
    text, _ = failure_answer("1:1", None, RateLimited(30, key="acme", reason="account 7"))
    sealed = encrypt_error(codec, 1, json.dumps(json.loads(text)["error"]))
    data = json.loads(sealed)["data"]
    assert (data["snooze"], data["retry_after"], data["hold"], data["hold_key"]) == (True, 30, "key", "acme")
    assert "account 7" not in sealed
