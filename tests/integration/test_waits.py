"""Tasks that wait for an outside event, through every process that has to do with them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from penstock.api.access import Caller
from penstock.brokers.sqs import SqsQueue
from penstock.client.client import Client
from penstock.client.inbound import InboundClient
from penstock.db.context import within
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.methods.table import METHODS, read_command
from penstock.protocol.api_key import Permission
from penstock.protocol.errors import AccessDenied, AnsweredAlready, RpcError, StateConflict, TaskNotFound
from penstock.protocol.reports import decode_reports, encode_notification, encode_result, make_token
from penstock.protocol.requests import join_batch
from penstock.protocol.task import Claimed, Failure, NewTask, State
from penstock.resulter import Resulter
from penstock.results.apply import ApplySummary, apply_reports
from penstock.results.methods import give_up_overdue
from penstock.scheduler.process import Scheduler
from penstock.settings.model import Settings
from penstock.submitter import Submitter
from penstock.supervisor.duties import expire_some, time_out_waits
from penstock.tasks import claim as claims
from penstock.tasks import enqueue as enqueuing
from penstock.tasks import settle
from tests.integration.apis import JSON, running
from tests.integration.cli.test_task_commands import run
from tests.integration.doors import put, rejected
from tests.integration.limits.test_limits import Outbound, enqueue, held, limit, run_until_idle, scheduler, sent
from tests.integration.test_resulter import claim, claimed, drained, error, name

TaskOf = Callable[[int], Any]
IN_A_YEAR = datetime.now(UTC) + timedelta(days=365)


__all__ = ["scheduler", "sent"]  # fixtures


class World:
    """The processes' parts by hand: reports as the resulter records them, answers as the api does."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self.store = store
        self.settings = settings

    async def report(self, *texts: str, **changes: Any) -> ApplySummary:
        async with self.store.transaction() as session:
            reports = decode_reports(join_batch(texts), batch_limit=10_000)
            return await apply_reports(session, reports, self.settings.model_copy(update=changes))

    async def wait(self, task: Claimed, token: str, timeout: float | None = 3600, **more: Any) -> ApplySummary:
        return await self.report(encode_notification("wait", id=name(task), token=token, timeout=timeout, **more))

    async def waiting(self, *tasks: NewTask, token: str = "t") -> Claimed:
        """The first of new tasks waits."""
        first, *_ = await claimed(self.store, *tasks)
        assert (await self.wait(first, token)).waiting == 1
        return first

    async def change(self, session: Session, method: str, **params: Any) -> Any:
        """Carry out a method in an open transaction."""
        command = read_command(method, json.dumps(params).encode(), self.settings)
        return await METHODS[method].carry_out(within(session, self.settings), command)

    async def answer(self, method: str = "complete", token: str = "t", **params: Any) -> tuple[Any, ...]:
        """(id, state, kept, duplicate)"""
        async with self.store.transaction() as session:
            answered = await self.change(session, f"task.{method}", token=token, **params)
        return answered.id, answered.state, answered.kept, answered.duplicate

    async def refused(self, method: str = "complete", token: str = "t", **params: Any) -> RpcError:
        with pytest.raises(RpcError) as caught:
            await self.answer(method, token, **params)
        return caught.value

    async def give_up(self, now: datetime = IN_A_YEAR) -> int:
        async with self.store.transaction() as session:
            return await give_up_overdue(session, 100, self.settings, now=now)


@pytest.fixture
def world(store: Store, settings: Settings) -> World:
    return World(store, settings)


async def rows(sql: Any) -> list[tuple[str, bool, bool]]:
    """(token, does a task wait for it, is an answer kept for it)"""
    found = await sql.fetch("select token, deadline is not null, answer is not null from penstock.wait order by token")
    return [tuple(row) for row in found]


# Waiting


async def test_a_task_that_waits_takes_no_room_and_is_settled_by_its_event(
    world: World, task_of: TaskOf, sql: Any
) -> None:
    task = await world.waiting(NewTask("a"))
    async with world.store.session() as session:
        assert (await claims.count_in_flight(session, 10)).tasks == 0
        assert await session.fetch("find_stale", 0, 10, IN_A_YEAR, None, None) == []
    seen = await task_of(task.id)
    assert (seen["state"], seen["attempts"], seen["claim"]) == ("WAITING", 1, task.claim)
    assert await world.answer(result={"by": "Ann"}) == (task.id, "SUCCESS", False, False)
    seen = await task_of(task.id)
    assert (seen["state"], json.loads(seen["result"]), seen["attempts"]) == ("SUCCESS", {"by": "Ann"}, 1)
    assert await sql.fetchval("select claimed_at is not null from penstock.task_history")
    assert await rows(sql) == [("t", False, False)]


async def test_no_limit_in_flight_counts_a_task_that_waits(
    world: World, sql: Any, scheduler: Scheduler, sent: Outbound
) -> None:
    await limit(world.store, "a", max_in_flight=1)
    first, _ = await enqueue(world.store, NewTask("a"), NewTask("a"))
    await run_until_idle(scheduler)
    assert await held(world.store, "a") == 1
    claim_ = await sql.fetchval("select claim from penstock.task where id = $1", first)
    await world.report(encode_notification("wait", id=f"{first}:{claim_}", token="t", timeout=60))
    for _ in range(500):
        await run_until_idle(scheduler)
        if await held(world.store, "a"):
            break
        await asyncio.sleep(0.01)
    assert await sql.fetch("select state::text from penstock.task order by id") == [("WAITING",), ("ACQUIRED",)]


async def test_a_failed_event_is_a_failed_attempt_retried_as_the_action_says(world: World, task_of: TaskOf) -> None:
    (task,) = await claimed(world.store, NewTask("a"))
    backoff = {"base_seconds": 1000.0, "factor": 1.0, "cap_seconds": 1000.0, "jitter": 0.0}
    await world.wait(task, "t", max_attempts=2, backoff=backoff)
    assert await world.answer("fail", error="no") == (task.id, "ERROR", False, False)
    seen = await task_of(task.id)
    assert json.loads(seen["error"]) == {"code": -32000, "message": "no"}
    assert 900 < (seen["run_at"] - seen["updated_at"]).total_seconds() <= 1001
    (again,) = await claim(world.store, now=IN_A_YEAR)
    await world.wait(again, "t", max_attempts=2)
    assert await world.answer("fail", error="no again") == (task.id, "CRITICAL_ERROR", False, False)


async def test_a_failed_event_may_be_the_last_or_say_when_to_try_again(world: World, task_of: TaskOf) -> None:
    one = await world.waiting(NewTask("a"), token="one")
    two = await world.waiting(NewTask("a"), token="two")
    assert await world.answer("fail", "one", error="no", final=True) == (one.id, "CRITICAL_ERROR", False, False)
    assert await world.answer("fail", "two", error="later", retry_after=500) == (two.id, "ERROR", False, False)
    seen = await task_of(two.id)
    assert 499 < (seen["run_at"] - seen["updated_at"]).total_seconds() < 501


async def test_the_reports_of_a_wait_are_fenced_by_their_claim(world: World, task_of: TaskOf) -> None:
    (old,) = await claimed(world.store, NewTask("a"))
    await world.report(error(old, retry_after=0))
    (new,) = await claim(world.store)
    assert (await world.wait(old, "old")).stale == 1
    assert (await task_of(new.id))["state"] == "ACQUIRED"
    assert (await world.wait(new, "new")).waiting == 1
    again = await world.wait(new, "new")
    assert (again.waiting, again.stale) == (0, 1)
    assert (await task_of(new.id))["state"] == "WAITING"


async def test_a_duplicate_of_a_wait_does_not_prolong_it(world: World, sql: Any) -> None:
    (task,) = await claimed(world.store, NewTask("a"))
    await world.wait(task, "t", 60)
    before = await sql.fetchval("select deadline from penstock.wait")
    await world.wait(task, "t", 9999)
    assert await sql.fetchval("select deadline from penstock.wait") == before


@pytest.mark.parametrize("together", [True, False])
async def test_a_result_after_the_wait_of_its_claim_is_stale(world: World, task_of: TaskOf, together: bool) -> None:
    (task,) = await claimed(world.store, NewTask("a"))
    texts = encode_notification("wait", id=name(task), token="t", timeout=60), encode_result(name(task), "1")
    if together:
        applied = await world.report(*texts)
        assert (applied.waiting, applied.succeeded, applied.stale) == (1, 0, 1)
    else:
        await world.report(texts[0])
        assert (await world.report(texts[1])).stale == 1
    assert (await task_of(task.id))["state"] == "WAITING"


async def test_a_wait_that_makes_no_sense_is_a_failed_attempt_of_its_task_alone(world: World, task_of: TaskOf) -> None:
    tasks = await claimed(world.store, *[NewTask("a")] * 5)
    bad = [
        {"token": ""},
        {"token": "t", "timeout": 0},
        {"token": "t", "timeout": "x"},
        {"token": "a\1b"},
        {"token": "t"},
    ]
    texts = [
        json.dumps({"jsonrpc": "2.0", "method": "wait", "params": {"id": name(task), **given}})
        for task, given in zip(tasks, bad, strict=True)
    ]
    applied = await world.report(*texts, '{"jsonrpc":"2.0","method":"wait","params":{"id":"x","token":"t"}}')
    assert (applied.waiting, applied.failed, len(applied.unreadable)) == (1, 4, 1)
    shown = await task_of(tasks[0].id)
    assert json.loads(shown["error"])["data"]["type"] == "BadWait"
    assert (await task_of(tasks[4].id))["state"] == "WAITING"


# Tokens


async def test_a_token_that_another_task_waits_for_is_refused_until_that_wait_is_over(
    world: World, task_of: TaskOf
) -> None:
    one, two = await claimed(world.store, NewTask("a"), NewTask("a"))
    applied = await world.report(
        *(encode_notification("wait", id=name(task), token="t", timeout=60) for task in (one, two))
    )
    assert (applied.waiting, applied.failed) == (1, 1)
    refusal = json.loads((await task_of(two.id))["error"])
    assert (refusal["data"]["type"], refusal["data"]["holder"]) == ("TokenTaken", one.id)
    await world.answer()
    (again,) = await claim(world.store, now=IN_A_YEAR)
    assert (await world.wait(again, "t")).waiting == 1
    assert await world.answer(result=2) == (two.id, "SUCCESS", False, False)


async def test_either_token_settles_a_task_whose_message_was_delivered_twice(world: World, sql: Any) -> None:
    (task,) = await claimed(world.store, NewTask("a"))
    await world.wait(task, "first run")
    assert (await world.wait(task, "second run")).waiting == 1
    assert await world.answer(token="second run", result=2) == (task.id, "SUCCESS", False, False)
    assert (await world.refused(token="first run", result=1)).data == {"id": task.id, "state": "SUCCESS"}
    assert not any(active for _, active, _ in await rows(sql))


async def test_both_tokens_count_when_their_reports_come_together(world: World, sql: Any) -> None:
    (task,) = await claimed(world.store, NewTask("a"))
    tokens = "first run", "second run", "first run"
    waits = [encode_notification("wait", id=name(task), token=token, timeout=60) for token in tokens]
    applied = await world.report(*waits)
    assert (applied.waiting, applied.stale) == (1, 1)
    assert await rows(sql) == [("first run", True, False), ("second run", True, False)]
    assert await world.answer(token="second run", result=2) == (task.id, "SUCCESS", False, False)
    assert (await world.refused(token="first run", result=1)).data == {"id": task.id, "state": "SUCCESS"}
    assert not any(active for _, active, _ in await rows(sql))


@pytest.mark.parametrize("token", ["first run", "second run"])
@pytest.mark.parametrize("waits_before", [False, True])
async def test_an_event_kept_for_one_of_two_tokens_settles_the_task(
    world: World, sql: Any, token: str, waits_before: bool
) -> None:
    (task,) = await claimed(world.store, NewTask("a"))
    if waits_before:
        await world.wait(task, "second run" if token == "first run" else "first run")
    assert await world.answer(token=token, result=2) == (None, None, True, False)
    waits = [encode_notification("wait", id=name(task), token=f"{one} run", timeout=60) for one in ("first", "second")]
    applied = await world.report(*waits)
    assert (applied.waiting, applied.succeeded, applied.stale) == (0, 1, 0)
    assert await world.answer(token=token, result=2) == (task.id, "SUCCESS", False, True)
    assert await rows(sql) == [("first run", False, False), ("second run", False, False)]


async def test_an_event_for_the_token_of_a_second_run_is_kept_while_its_task_waits_for_that_of_the_first(
    world: World, task_of: TaskOf
) -> None:
    (task,) = await claimed(world.store, NewTask("a"))
    first, second = (make_token(task.id, task.claim) for _ in range(2))
    await world.wait(task, first)
    assert await world.answer(token=second, result=2) == (None, None, True, False)
    assert (await world.wait(task, second)).succeeded == 1
    assert json.loads((await task_of(task.id))["result"]) == 2


async def test_a_token_made_for_one_attempt_answers_no_other(world: World, task_of: TaskOf) -> None:
    (task,) = await claimed(world.store, NewTask("a"))
    old = make_token(task.id, task.claim)
    await world.wait(task, old)
    assert await world.give_up() == 1
    assert isinstance(await world.refused(token=old), StateConflict)
    (again,) = await claim(world.store, now=IN_A_YEAR)
    await world.wait(again, make_token(again.id, again.claim))
    assert isinstance(await world.refused(token=old), StateConflict)
    assert isinstance(await world.refused(token=make_token(task.id, task.claim)), StateConflict)
    assert isinstance(await world.refused(token=make_token(10**9, 1)), TaskNotFound)
    assert (await task_of(task.id))["state"] == "WAITING"


async def test_a_token_of_ones_own_answers_the_next_attempt_too(world: World) -> None:
    task = await world.waiting(NewTask("a"))
    assert await world.give_up() == 1
    assert await world.answer(result=1) == (None, None, True, False)
    (again,) = await claim(world.store, now=IN_A_YEAR)
    assert (await world.wait(again, "t")).succeeded == 1
    assert await world.answer(result=1) == (task.id, "SUCCESS", False, True)


# Early, late and repeated events


@pytest.mark.parametrize("method", ["complete", "fail"])
async def test_an_event_that_comes_first_is_kept_and_settles_the_task_when_it_waits(
    world: World, task_of: TaskOf, sql: Any, method: str
) -> None:
    (task,) = await claimed(world.store, NewTask("a"))
    token = make_token(task.id, task.claim)
    params: dict[str, Any] = {"result": [1.50]} if method == "complete" else {"error": "no", "final": True}
    assert await world.answer(method, token, **params) == (None, None, True, False)
    assert await world.answer(method, token, **params) == (None, None, True, True)
    assert isinstance(await world.refused("complete", token, result="other"), AnsweredAlready)
    assert await rows(sql) == [(token, False, True)]
    applied = await world.wait(task, token)
    assert (applied.settled, applied.waiting) == (1, 0)
    state = (await task_of(task.id))["state"]
    assert state == ("SUCCESS" if method == "complete" else "CRITICAL_ERROR")
    assert await world.answer(method, token, **params) == (task.id, state, False, True)
    assert await rows(sql) == [(token, False, False)]


async def test_a_failure_that_comes_first_is_retried_as_the_action_says(world: World) -> None:
    (task,) = await claimed(world.store, NewTask("a"))
    await world.answer("fail", error="no")
    assert (await world.wait(task, "t", max_attempts=1)).failed == 1
    assert (await world.answer("fail", error="no"))[1] == "CRITICAL_ERROR"


async def test_an_answer_is_not_spent_on_a_claim_that_is_lost_at_that_moment(
    world: World, sql: Any, task_of: TaskOf
) -> None:
    """Between the look at the claim and the lock of its row the task is repaired: the next attempt has the answer."""
    (task,) = await claimed(world.store, NewTask("a"))
    await world.answer(result="kept")
    async with world.store.transaction() as other:  # holds the task's row
        await settle.fail(other, [Failure(task.id, task.claim, '{"code":1,"message":"silent"}', 0.0)])
        waiting = asyncio.create_task(world.wait(task, "t"))
        await wait_until_blocked(sql)
    assert (await waiting).settled == 0
    assert await rows(sql) == [("t", False, True)]
    (again,) = await claim(world.store)
    assert (await world.wait(again, "t")).succeeded == 1


async def wait_until_blocked(sql: Any) -> None:
    for _ in range(3000):
        if await sql.fetchval("select count(*) from pg_locks where not granted"):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("no session waits for a lock")


async def test_an_event_that_comes_again_is_known_and_another_one_is_refused(world: World) -> None:
    task = await world.waiting(NewTask("a"))
    await world.answer(result={"a": 1, "b": 2})
    assert await world.answer(result={"b": 2, "a": 1}) == (task.id, "SUCCESS", False, True)
    for refusal in (await world.refused(result=3), await world.refused("fail", error="x")):
        assert isinstance(refusal, AnsweredAlready)
        assert refusal.data == {"id": task.id, "state": "SUCCESS"}


async def test_an_event_after_a_cancel_is_refused_and_after_the_record_is_gone_too(world: World, sql: Any) -> None:
    task = await world.waiting(NewTask("a"))
    async with world.store.transaction() as session:
        await world.change(session, "cancel", id=task.id)
    assert await rows(sql) == [("t", False, False)]
    refusal = await world.refused()
    assert refusal.message == f"Task {task.id} is CANCELLED; it cannot be answered"
    await sql.execute("delete from penstock.task_history")
    assert isinstance(await world.refused(), TaskNotFound)


async def test_an_event_that_meets_its_wait_is_never_lost(world: World, task_of: TaskOf, sql: Any) -> None:
    """At the same moment, over and over: whichever is first, the task has its answer."""
    tasks = await claimed(world.store, *[NewTask("a")] * 40)
    settled = 0
    for task in tasks:
        token = make_token(task.id, task.claim)
        _, _, answered = await asyncio.gather(  # the report comes twice, as SQS may have it
            world.wait(task, token), world.wait(task, token), world.answer(token=token, result=task.id)
        )
        settled += not answered[2]
        seen = await task_of(task.id)
        assert (seen["state"], json.loads(seen["result"])) == ("SUCCESS", task.id)
    assert not any(active or kept for _, active, kept in await rows(sql))


async def test_of_many_events_at_once_the_first_counts(world: World, task_of: TaskOf) -> None:
    task = await world.waiting(NewTask("a"))

    async def one(n: int) -> Any:
        try:
            return await world.answer(result=n)
        except AnsweredAlready as exc:
            return exc

    answers = await asyncio.gather(*(one(n) for n in range(8)))
    assert sum(not isinstance(answer, Exception) for answer in answers) == 1
    winner = next(n for n, answer in enumerate(answers) if not isinstance(answer, Exception))
    assert json.loads((await task_of(task.id))["result"]) == winner


async def test_a_wait_that_dies_before_its_commit_has_not_been_and_nor_has_an_answer(
    world: World, task_of: TaskOf, sql: Any
) -> None:
    (task,) = await claimed(world.store, NewTask("a"))

    class Killed(BaseException):
        pass

    with pytest.raises(Killed):
        async with world.store.transaction() as session:
            reports = decode_reports(encode_notification("wait", id=name(task), token="t", timeout=60), batch_limit=10)
            assert (await apply_reports(session, reports, world.settings)).waiting == 1
            raise Killed
    assert (await task_of(task.id))["state"] == "ACQUIRED"
    assert (await world.wait(task, "t")).waiting == 1
    with pytest.raises(Killed):
        async with world.store.transaction() as session:
            await world.change(session, "task.complete", token="t")
            raise Killed
    assert (await task_of(task.id))["state"] == "WAITING"
    assert await world.answer() == (task.id, "SUCCESS", False, False)


# Time


async def test_a_wait_that_nobody_answers_is_a_failed_attempt_or_the_last_as_told(
    world: World, task_of: TaskOf, sql: Any
) -> None:
    retry, fail, later = await claimed(world.store, *[NewTask("a")] * 3)
    await world.wait(retry, "retry", 10)
    await world.wait(fail, "fail", 10, on_timeout="fail")
    await world.wait(later, "later", 10**9)
    assert await time_out_waits(world.store, world.settings) == 0
    await sql.execute("update penstock.wait set deadline = deadline - interval '11 seconds'")
    assert await time_out_waits(world.store, world.settings) == 2
    seen = [await task_of(task.id) for task in (retry, fail, later)]
    assert [row["state"] for row in seen] == ["ERROR", "CRITICAL_ERROR", "WAITING"]
    assert json.loads(seen[0]["error"])["data"]["type"] == "WaitTimeout"
    assert await time_out_waits(world.store, world.settings) == 0
    assert isinstance(await world.refused(token="fail"), StateConflict)


async def test_a_wait_without_a_time_has_that_of_the_settings(world: World, sql: Any) -> None:
    (task,) = await claimed(world.store, NewTask("a"))
    await world.report(encode_notification("wait", id=name(task), token="t", timeout=None), wait_timeout_seconds=77)
    seconds = await sql.fetchval("select extract(epoch from deadline - updated_at) from penstock.wait")
    assert seconds == 77


async def test_many_supervisors_end_each_wait_once(world: World, sql: Any) -> None:
    tasks = await claimed(world.store, *[NewTask("a", max_attempts=1)] * 60)
    await world.report(*(encode_notification("wait", id=name(task), token=name(task), timeout=1) for task in tasks))

    async def some() -> int:
        async with world.store.transaction() as session:
            return await give_up_overdue(session, 7, world.settings, now=IN_A_YEAR)

    ended = 0
    while part := sum(await asyncio.gather(*(some() for _ in range(4)))):
        ended += part
    assert ended == 60
    assert await sql.fetchval("select count(*) from penstock.task_critical_error") == 60


async def test_what_is_over_is_forgotten_after_its_time_and_what_waits_is_not(world: World, sql: Any) -> None:
    await world.waiting(NewTask("a"), token="waits")
    await world.waiting(NewTask("a"), token="over")
    await world.answer(token="over")
    await world.answer(token="kept")
    async with world.store.session() as session:
        assert await session.value("delete_ended_waits", 60, 10, None) == 0
        assert await session.value("delete_ended_waits", 60, 1, IN_A_YEAR) == 1
        assert await session.value("delete_ended_waits", 60, 10, IN_A_YEAR) == 1
    assert await rows(sql) == [("waits", True, False)]


# What else there is in the life of a task


async def test_its_ordering_key_stays_held_while_a_task_waits(world: World, task_of: TaskOf) -> None:
    task = await world.waiting(NewTask("a", ordering_key="k"), NewTask("a", ordering_key="k"))
    async with world.store.transaction() as session:
        (last,) = await enqueuing.enqueue(session, [NewTask("a", ordering_key="k")])
        await settle.cancel(session, [last.id])  # settles, but is not the one that the others wait for
        assert await claims.claim(session, 10, now=IN_A_YEAR) is None
    assert (await task_of(task.id))["state"] == "WAITING"
    await world.answer()
    assert [(await task_of(task.id + n))["state"] for n in (1, 2)] == ["SCHEDULED", "CANCELLED"]


async def test_a_cancel_of_a_task_that_waits_lets_its_successor_go(world: World, task_of: TaskOf) -> None:
    task = await world.waiting(NewTask("a", ordering_key="k"), NewTask("a", ordering_key="k"))
    async with world.store.transaction() as session:
        await world.change(session, "cancel", id=task.id)
    assert [(await task_of(task.id + n))["state"] for n in (0, 1)] == ["CANCELLED", "SCHEDULED"]
    async with world.store.transaction() as session:  # a new life behind its key waits for no event
        assert (await world.change(session, "retry", id=task.id)).state is State.WAITING
    assert isinstance(await world.refused(token=make_token(task.id, task.claim)), StateConflict)
    assert (await task_of(task.id))["state"] == "WAITING"


async def test_a_task_that_waits_has_begun_so_it_neither_expires_nor_moves_nor_is_replaced(
    world: World, task_of: TaskOf
) -> None:
    new = NewTask("a", unique_key="u", expires_in_seconds=60)
    task = await world.waiting(new)
    async with world.store.transaction() as session:
        assert await expire_some(session, 10, now=IN_A_YEAR) == 0
        with pytest.raises(StateConflict):
            await world.change(session, "reschedule", id=task.id, delay=0)
        assert await session.fetch("spread_tasks", [task.id], [0.0], None, 5) == []
        again = NewTask("a", '{"n":2}', unique_key="u", on_duplicate="replace")
        (answer,) = await enqueuing.enqueue(session, [again])
    assert (answer.id, answer.replaced) == (task.id, False)
    assert (await task_of(task.id))["payload"] == "{}"
    await world.answer("fail", error="no")
    async with world.store.transaction() as session:  # as one that failed while it ran
        assert await expire_some(session, 10, now=IN_A_YEAR) == 1


async def test_a_plan_of_overdue_and_of_old_waits_goes_by_an_index(world: World, sql: Any) -> None:
    from penstock.db.statements import SQL

    for statement, arguments in (("find_overdue_waits", "10, null"), ("delete_ended_waits", "60, 10, null")):
        kinds = "bigint, timestamptz" if statement.startswith("find") else "float8, bigint, timestamptz"
        await sql.execute("set enable_seqscan = off")
        await sql.execute(f"prepare {statement} ({kinds}) as {SQL[statement]}")
        plan = "\n".join(row[0] for row in await sql.fetch(f"explain execute {statement} ({arguments})"))
        assert ("wait_deadline" if "overdue" in statement else "wait_ended") in plan, plan


# Over HTTP and the queue


async def test_resulter_puts_to_wait_and_submitter_answers(
    store: Store, settings: Settings, results: SqsQueue, inbound: SqsQueue, task_of: TaskOf
) -> None:
    one, two = await claimed(store, NewTask("a"), NewTask("a"))
    resulter = Resulter(store=store, results=results, settings=settings)
    await put(
        results,
        join_batch([encode_notification("wait", id=name(task), token=name(task), timeout=60) for task in (one, two)]),
    )
    await drained(resulter)
    body = [
        {"jsonrpc": "2.0", "method": "task.complete", "params": {"token": name(one), "result": 1}},
        {"jsonrpc": "2.0", "method": "task.complete", "params": {"token": name(one), "result": 2}},
        {"jsonrpc": "2.0", "method": "task.fail", "params": {"token": name(two), "error": "no", "final": True}},
    ]
    await put(inbound, json.dumps(body))
    submitter = Submitter(store=store, inbound=inbound, settings=settings)
    while await submitter.run_once():
        pass
    assert [(await task_of(task.id))["state"] for task in (one, two)] == ["SUCCESS", "CRITICAL_ERROR"]
    ((_, text, reason),) = await rejected(store)
    assert "has a different answer" in reason
    assert json.loads(text)["params"]["result"] == 2


async def test_api_shows_what_a_task_waits_for_and_answers_for_it(
    store: Store, settings: Settings, world: World
) -> None:
    task = await world.waiting(NewTask("a"), token="wait for me")
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:

        async def call(method: str, **params: Any) -> Any:
            body = {"jsonrpc": "2.0", "method": method, "params": params, "id": 1}
            return (await http.post("/rpc", json=body)).json()

        shown = (await call("status", id=task.id, detail=True))["result"]
        assert (shown["state"], shown["attempts"], shown["waits_for"]["token"]) == ("WAITING", 1, "wait for me")
        answer = {"id": task.id, "state": "SUCCESS", "kept": False, "duplicate": False}
        assert (await call("task.complete", token="wait for me", result=[1]))["result"] == answer
        assert (await call("task.complete", token="wait for me", result=[1]))["result"] == answer | {"duplicate": True}
        assert (await call("task.complete", token="wait for me", result=[2]))["error"]["code"] == -32009
        shown = (await call("status", id=task.id, detail=True))["result"]
        assert "waits_for" not in shown
        assert shown["result"] == [1]


async def test_the_commands_and_the_client_answer(store: Store, settings: Settings, world: World) -> None:
    tasks = [await world.waiting(NewTask("a"), token=f"t{n}") for n in range(4)]

    def say(url: str, *words: str) -> str:
        """The last line; the api's log stands before it."""
        return run(url, "task", *words).splitlines()[-1]

    def use(url: str) -> None:
        settled = f"task {tasks[0].id} SUCCESS"
        assert say(url, "complete", "t0", '{"a":1}') == settled
        assert say(url, "complete", "t0", '{"a":1}') == f"{settled} (already answered)"
        assert say(url, "complete", "early") == "kept until a task waits for it"
        assert say(url, "complete", "early") == "kept until a task waits for it (already kept)"
        assert say(url, "fail", "t1", "no", "--final") == f"task {tasks[1].id} failed"
        assert "has a different answer" in run(url, "task", "complete", "t1", fails=True)
        assert "not JSON" in run(url, "task", "complete", "t1", "{", fails=True)
        with Client(url) as client:
            assert client.complete("t2", [1]) == {
                "id": tasks[2].id, "state": "SUCCESS", "kept": False, "duplicate": False
            }  # fmt: skip
            failed = client.fail("t3", {"message": "no", "data": {"why": 1}}, retry_after=500)
            assert (failed["id"], failed["state"]) == (tasks[3].id, "ERROR")
            assert client.status(tasks[3].id)["error"]["data"] == {"why": 1, "retry_after": 500.0}
            with pytest.raises(StateConflict):
                client.complete("t2")

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)


async def test_the_inbound_client_answers(
    store: Store, settings: Settings, world: World, task_of: TaskOf, inbound: SqsQueue
) -> None:
    one = await world.waiting(NewTask("a"), token="one")
    two = await world.waiting(NewTask("a"), token="two")
    async with InboundClient(settings.inbound_queue, settings.sqs_endpoint_url, settings.aws_region) as client:
        await client.complete("one", "done")
        await client.fail("two", "no", final=True)
    submitter = Submitter(store=store, inbound=inbound, settings=settings)
    while (await inbound.depth()).total:
        await submitter.run_once()
    assert [(await task_of(task.id))["state"] for task in (one, two)] == ["SUCCESS", "CRITICAL_ERROR"]


@pytest.mark.parametrize("permission", ["read", "enqueue"])
async def test_a_key_that_may_enqueue_may_answer(permission: str) -> None:
    caller = Caller("k", frozenset([Permission(permission)]), None)
    for method in ("task.complete", "task.fail"):
        if permission == "enqueue":
            caller.check_method(method)
        else:
            with pytest.raises(AccessDenied):
                caller.check_method(method)
