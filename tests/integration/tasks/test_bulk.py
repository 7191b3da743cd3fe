"""Bulk operations as jobs, over some thousands of rows of both tables of a real Postgres."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock.db.context import within
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.db.statements import SQL
from penstock.methods.inbound import accept_inbound, read_inbound
from penstock.methods.table import METHODS, read_command
from penstock.protocol import answers
from penstock.protocol.answers import Job, JobError, JobState
from penstock.protocol.errors import TooSlow, Unavailable
from penstock.protocol.task import Failure, NewTask, State
from penstock.runtime.periodic import repeat
from penstock.settings.model import Settings
from penstock.supervisor import bulk_jobs
from penstock.supervisor.bulk_jobs import BulkJobs
from penstock.supervisor.retention import Retention
from penstock.tasks import bulk, claim, enqueue, ordering, settle
from penstock.tasks.bulk import BatchResult, create_job, end_job, preview, read_job, take_job
from tests.integration.doors import request, sample
from tests.transitions import TRANSITIONS

FINAL = {"SUCCESS", "CRITICAL_ERROR", "CANCELLED"}
ERROR = '{"code":-32000,"message":"boom"}'


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches so small that some thousands of rows are many of them."""
    monkeypatch.setattr(bulk, "LOOKED_AT", 700)
    monkeypatch.setattr(bulk, "PICKED", 150)


@pytest.fixture
def jobs(store: Store) -> BulkJobs:
    return BulkJobs(store=store, changed=lambda: None)


async def start(store: Store, method: str, settings: Settings, **params: Any) -> Job:
    command = read_command(method, json.dumps(params).encode(), settings)
    async with store.transaction() as session:
        started = await METHODS[method].carry_out(within(session, settings), command)
        return await read_job(session, started.job)


async def look(store: Store, job: Job) -> Job:
    async with store.session() as session:
        return await read_job(session, job.id)


async def finish(store: Store, jobs: BulkJobs, job: Job) -> Job:
    """Move on until the job has ended."""
    for _ in range(2000):
        job = await look(store, job)
        if job.state is not JobState.RUNNING:
            return job
        await jobs.run_once()
    raise AssertionError(f"the job does not end: {job}")


async def populate(store: Store) -> None:
    """2900 tasks of two actions in every state, live and settled, some with keys, some with labels."""
    async with store.transaction() as session:
        await enqueue.enqueue(session, [NewTask("mail.send", max_attempts=1) for _ in range(300)])
        await enqueue.enqueue(session, [NewTask("mail.send") for _ in range(600)])
        dispatch = await claim.claim(session, 900)
        assert dispatch is not None
        pairs = [(task.id, task.claim) for task in dispatch.tasks]
        await settle.fail(session, [Failure(*pair, ERROR, None) for pair in pairs[:300]])
        await settle.finish(session, dict.fromkeys(pairs[300:600], "1"))
        await settle.fail(session, [Failure(*pair, ERROR, 3600) for pair in pairs[600:800]])
        enqueued = await enqueue.enqueue(
            session, [NewTask("mail.drop", unique_key=f"u{n}", delay_seconds=900) for n in range(1000)]
        )
        await settle.cancel(session, [task.id for task in enqueued[:400]])
        await enqueue.enqueue(
            session, [NewTask("report", ordering_key=f"o{n % 100}", delay_seconds=900) for n in range(1000)]
        )
        await session._connection.execute(
            "update penstock.task set labels = jsonb_build_object('tenant', 't' || id % 4, 'eu', 'yes') "
            "where id % 2 = 0"
        )
        await session._connection.execute(
            "update penstock.task_history set labels = jsonb_build_object('tenant', 't' || id % 4)"
        )


async def states(sql: Any) -> dict[int, str]:
    rows = await sql.fetch(
        "select id, state::text from penstock.task union all select id, state::text from penstock.task_history"
    )
    assert len({row["id"] for row in rows}) == len(rows), "a task is in both tables"
    return dict(map(tuple, rows))


async def expect_tally_agrees(store: Store, sql: Any) -> None:
    """What `stats` counts is what is there."""
    async with store.session() as session:
        counted = {tuple(row) for row in await session.fetch("count_settled", "other")}
    there = await sql.fetch("select action, state::text, count(*) from penstock.task_history group by 1, 2")
    assert counted == set(map(tuple, there))


async def expect_order_holds(sql: Any) -> None:
    """Of each ordering key with live tasks, the oldest stands at its head, and it alone does not wait."""
    rows = await sql.fetch(
        "select t.ordering_key, min(t.id) as first, count(*) filter (where t.state <> 'WAITING') as running, "
        "max(h.task_id) as head from penstock.task t left join penstock.ordering_head h on h.key = t.ordering_key "
        "where t.ordering_key is not null group by 1"
    )
    assert all(row["running"] == 1 and row["head"] is not None for row in rows)
    heads = await sql.fetchval("select count(*) from penstock.ordering_head")
    assert heads == len(rows)


def expect_legal(before: dict[int, str], after: dict[int, str], steps: int = 1) -> None:
    """Every change is a chain of so many legal transitions, or the deletion of a settled record."""
    for task_id, was in before.items():
        now = after.get(task_id)
        if now is None:
            assert was in FINAL
            continue
        reached = {State(was)}
        for _ in range(steps):
            reached |= {to for since, to in TRANSITIONS if since in reached}
        assert State(now) in reached, (task_id, was, now)


# Each operation


async def test_cancel_takes_every_live_task_of_the_filter_and_no_other(
    store: Store, sql: Any, settings: Settings, jobs: BulkJobs, small: None
) -> None:
    await populate(store)
    before = await states(sql)
    live = Counter(state for state in before.values() if state not in FINAL)
    job = await finish(store, jobs, await start(store, "bulk.cancel", settings, all=True))
    after = await states(sql)
    assert (job.state, job.changed, job.refused) == (JobState.DONE, sum(live.values()), 0)
    assert (job.total, job.total_is_exact, job.seen) == (job.changed, True, job.changed)
    assert set(after.values()) <= FINAL
    assert {task_id for task_id in before if before[task_id] != after[task_id]} == {
        task_id for task_id, state in before.items() if state not in FINAL
    }
    expect_legal(before, after, steps=2)
    await expect_order_holds(sql)
    await expect_tally_agrees(store, sql)


async def test_cancel_of_some_of_a_key_lets_the_others_go_on(
    store: Store, sql: Any, settings: Settings, jobs: BulkJobs, small: None
) -> None:
    await populate(store)
    first = await sql.fetchval("select min(id) from penstock.task where action = 'report'")
    job = await start(store, "bulk.cancel", settings, action="rep*", ids_from=first, ids_to=first + 449)
    job = await finish(store, jobs, job)
    assert job.changed == 450
    assert await sql.fetchval("select count(*) from penstock.task where action = 'report'") == 550
    await expect_order_holds(sql)


@pytest.mark.parametrize(
    ("params", "where"),
    [
        ({"action": "mail.send"}, "action = 'mail.send'"),
        ({"action": "mail.*"}, "action like 'mail.%'"),
        ({"action": "*.d*"}, "action = 'mail.drop'"),
        ({"action": "mail_send"}, "false"),
        ({"action": "mail"}, "false"),
        ({"states": ["WAITING", "ERROR"]}, "state in ('WAITING', 'ERROR')"),
        ({"labels": {"tenant": "t2"}}, "id % 4 = 2"),
        ({"labels": {"tenant": "t2", "eu": "yes"}, "action": "report"}, "id % 4 = 2 and action = 'report'"),
        ({"labels": {"tenant": "t2", "eu": "no"}}, "false"),
        ({"older_than": 3000}, "id % 3 = 0"),
        ({"newer_than": 3000}, "id % 3 <> 0"),
        ({"older_than": 3000, "newer_than": 4000, "states": ["SCHEDULED"]}, "id % 3 = 0 and state = 'SCHEDULED'"),
        ({"ids_from": 700, "ids_to": 1500}, "id between 700 and 1500"),
    ],
)
async def test_a_filter_means_what_it_says(
    store: Store, sql: Any, settings: Settings, jobs: BulkJobs, params: dict[str, Any], where: str
) -> None:
    await populate(store)
    await sql.execute("update penstock.task set created_at = now() - interval '1 hour' where id % 3 = 0")
    expected = {row[0] for row in await sql.fetch(f"select id from penstock.task where {where}")}
    before = await states(sql)
    told = await dry_run(store, "bulk.cancel", settings, **params)
    assert (told.count, told.exact, told.sample) == (len(expected), True, sorted(expected)[:10])
    job = await finish(store, jobs, await start(store, "bulk.cancel", settings, **params))
    after = await states(sql)
    assert {task_id for task_id in before if after[task_id] == "CANCELLED" != before[task_id]} == expected
    assert (job.changed, job.total) == (len(expected), len(expected))


async def test_retry_starts_failed_and_cancelled_tasks_anew(
    store: Store, sql: Any, settings: Settings, jobs: BulkJobs, small: None
) -> None:
    await populate(store)
    before = await states(sql)
    job = await finish(store, jobs, await start(store, "bulk.retry", settings, all=True))
    after = await states(sql)
    again = {task_id for task_id, state in before.items() if state in ("CRITICAL_ERROR", "CANCELLED")}
    assert (job.state, job.changed, len(again)) == (JobState.DONE, 700, 700)
    assert {task_id for task_id in before if before[task_id] != after[task_id]} == again
    expect_legal(before, after)
    assert {after[task_id] for task_id in again} == {"SCHEDULED"}
    attempts = await sql.fetchval("select max(attempts) from penstock.task where id = any($1::bigint[])", list(again))
    assert attempts == 0
    await expect_tally_agrees(store, sql)


async def test_what_a_retry_cannot_restart_is_counted_and_each_told_its_reason(
    store: Store, sql: Any, settings: Settings, jobs: BulkJobs
) -> None:
    await populate(store)
    await sql.execute(
        "update penstock.task_history set payload_gone = true where state = 'CRITICAL_ERROR' and id % 2 = 1"
    )
    of_workflow, keyed = await sql.fetchrow(
        "select min(id), min(id) + 2 from penstock.task_history where state = 'CRITICAL_ERROR' and id % 2 = 0"
    )
    await sql.execute("update penstock.task_history set workflow = 7 where id = $1", of_workflow)
    await sql.execute("update penstock.task_history set unique_key = 'k' where id = $1", keyed)
    await sql.execute(
        "insert into penstock.unique_key (action, key, task_id, taken_at)"
        " select action, 'k', 4711, now() from penstock.task_history where id = $1",
        keyed,
    )
    job = await finish(store, jobs, await start(store, "bulk.retry", settings, states=["CRITICAL_ERROR"]))
    assert (job.changed, job.refused, len(job.errors)) == (148, 152, 20)
    told = {error.id or 0: error.reason for error in job.errors}
    assert "its payload is gone" in told[1]
    assert told[of_workflow].endswith("it is a step of workflow 7: use workflow.retry")
    assert told[keyed].endswith("it cannot be retried, as task 4711 now has its unique key")
    assert all(reason.startswith(f"Task {task_id} is CRITICAL_ERROR") for task_id, reason in told.items())


async def test_delete_removes_records_with_their_keys_and_counts(
    store: Store, sql: Any, settings: Settings, jobs: BulkJobs, small: None
) -> None:
    await populate(store)
    before = await states(sql)
    job = await finish(store, jobs, await start(store, "bulk.delete", settings, states=["SUCCESS", "CANCELLED"]))
    after = await states(sql)
    assert job.changed == 700
    assert before.keys() - after.keys() == {i for i, state in before.items() if state in ("SUCCESS", "CANCELLED")}
    expect_legal(before, after)
    await expect_tally_agrees(store, sql)
    async with store.transaction() as session:
        again = await enqueue.enqueue(session, [NewTask("mail.drop", unique_key=f"u{n}") for n in (0, 399, 400, 999)])
    assert [task.duplicate for task in again] == [False, False, True, True]


async def test_reschedule_spreads_evenly_and_leaves_states_and_others_alone(
    store: Store, sql: Any, settings: Settings, jobs: BulkJobs, small: None
) -> None:
    await populate(store)
    before = await states(sql)
    begin = datetime(2040, 1, 1, tzinfo=UTC)
    job = await start(store, "bulk.reschedule", settings, action="report", run_at=begin.isoformat(), spread=1000)
    job = await finish(store, jobs, job)
    rows = await sql.fetch("select run_at, priority from penstock.task where action = 'report'")
    assert job.changed == len(rows) == 1000
    tenths = Counter(int((row["run_at"] - begin).total_seconds() // 100) for row in rows)
    assert sorted(tenths) == list(range(10))
    assert all(abs(count - 100) <= 3 for count in tenths.values()), tenths
    assert {row["priority"] for row in rows} == {0}
    assert await sql.fetchval("select max(run_at) from penstock.task where action <> 'report'") < begin
    assert await states(sql) == before


async def test_reschedule_by_delay_counts_from_the_job_and_sets_the_priority(
    store: Store, sql: Any, settings: Settings, jobs: BulkJobs, small: None
) -> None:
    await populate(store)
    job = await start(store, "bulk.reschedule", settings, action="mail.drop", delay=50, priority=7)
    job = await finish(store, jobs, job)
    rows = await sql.fetch("select distinct run_at, priority from penstock.task where action = 'mail.drop'")
    assert [tuple(row) for row in rows] == [(datetime.fromisoformat(job.created_at) + timedelta(seconds=50), 7)]


async def test_priority_alone_leaves_the_time(store: Store, sql: Any, settings: Settings, jobs: BulkJobs) -> None:
    await populate(store)
    before = await sql.fetch("select id, run_at from penstock.task order by id")
    job = await finish(store, jobs, await start(store, "bulk.reschedule", settings, all=True, priority=-3))
    assert await sql.fetch("select id, run_at from penstock.task order by id") == before
    changed = await sql.fetch("select priority, state = 'ACQUIRED' as taken, count(*) from penstock.task group by 1, 2")
    assert {(row[0], row[1]): row[2] for row in changed} == {(-3, False): job.changed, (0, True): 100}


# The set of tasks


async def test_tasks_added_later_are_not_touched(store: Store, sql: Any, settings: Settings, jobs: BulkJobs) -> None:
    await populate(store)
    job = await start(store, "bulk.cancel", settings, all=True)
    async with store.transaction() as session:
        later = [task.id for task in await enqueue.enqueue(session, [NewTask("late") for _ in range(50)])]
    await finish(store, jobs, job)
    assert [row[0] for row in await sql.fetch("select id from penstock.task order by id")] == later


async def dry_run(store: Store, method: str, settings: Settings, **params: Any) -> answers.BulkPreview:
    command = read_command(method, json.dumps(params | {"dry_run": True}).encode(), settings)
    async with store.transaction() as session:
        return await preview(session, command)


async def test_a_dry_run_changes_nothing_and_makes_no_job(store: Store, sql: Any, settings: Settings) -> None:
    await populate(store)

    async def everything() -> list[Any]:
        tables = ("task", "task_history", "unique_key", "ordering_head", "tally", "job")
        return [await sql.fetch(f"select t::text from penstock.{table} t order by 1") for table in tables]

    before = await everything()
    for method, count in (("bulk.cancel", 1900), ("bulk.retry", 700), ("bulk.delete", 1000)):
        assert (await dry_run(store, method, settings, all=True)).count == count
    assert (await dry_run(store, "bulk.reschedule", settings, all=True, delay=1)).count == 1800
    assert await everything() == before


async def test_counting_is_bounded_and_then_estimated(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await populate(store)
    monkeypatch.setattr(bulk, "COUNTED", 200)
    told = await dry_run(store, "bulk.cancel", settings, action="mail.drop", ids_from=1301)
    assert (told.count, told.exact) == (200, False)
    assert told.estimate == pytest.approx(1600, rel=0.01)  # as if all that follow were like the first


# Interrupted, shared, in the way


async def test_an_estimate_knows_of_no_tasks_where_ids_were_passed_over(
    store: Store, sql: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "COUNTED", 500)
    async with store.transaction() as session:
        await enqueue.enqueue(session, [NewTask("a") for _ in range(800)])
    await sql.execute(
        "select setval('penstock.task_id_seq', 2000000000)"
    )  # as behind a restore, or a bound of partitions
    async with store.transaction() as session:
        await enqueue.enqueue(session, [NewTask("a") for _ in range(200)])
    await sql.execute("analyze penstock.task")
    command = read_command("bulk.cancel", b'{"all":true,"dry_run":true}', settings)
    async with store.transaction() as session:
        seen = await preview(session, command)
    assert (seen.count, seen.exact, seen.estimate) == (500, False, 1000)


async def test_a_batch_that_dies_before_its_commit_is_done_again_and_nothing_twice(
    store: Store, sql: Any, settings: Settings, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    await populate(store)
    before = await states(sql)
    job = await start(store, "bulk.cancel", settings, all=True)
    done = 0

    class Killed(BaseException):
        pass

    async def dying(session: Session, job: Any, *, parts: int) -> BatchResult:
        nonlocal done
        done += 1
        step = await bulk.run_batch(session, job, parts=parts)
        if done % 3 == 0:
            raise Killed  # after the work, before the cursor
        return step

    monkeypatch.setattr(bulk_jobs, "run_batch", dying)
    for _ in range(100):
        instance = BulkJobs(store=store, changed=lambda: None)
        try:
            while await instance.run_once():
                pass
        except Killed:
            continue
        break
    job = await look(store, job)
    live = [state for state in before.values() if state not in FINAL]
    assert done > 12
    assert (job.state, job.changed, job.seen) == (JobState.DONE, len(live), len(live))
    await expect_tally_agrees(store, sql)
    await expect_order_holds(sql)


async def test_several_supervisors_do_every_task_once(store: Store, sql: Any, settings: Settings, small: None) -> None:
    await populate(store)
    made = [
        await start(store, "bulk.cancel", settings, action="mail.*"),
        await start(store, "bulk.reschedule", settings, action="report", delay=5, spread=10),
        await start(store, "bulk.delete", settings, states=["SUCCESS"]),
    ]
    before = await states(sql)
    expected = [await sql.fetchval("select count(*) from penstock.task where action like 'mail.%'"), 1000, 300]

    async def supervise() -> None:
        instance = BulkJobs(store=store, changed=lambda: None)
        while [job for job in made if (await look(store, job)).state is JobState.RUNNING]:
            await instance.run_once()

    await asyncio.gather(*(supervise() for _ in range(4)))
    ended = [await look(store, job) for job in made]
    assert [job.changed for job in ended] == expected
    assert [job.refused for job in ended] == [0, 0, 0]
    cancelled = await sql.fetchval("select sum(count) from penstock.tally where event = 'CANCELLED' and count > 0")
    assert cancelled == 400 + expected[0]
    expect_legal(before, await states(sql))
    await expect_tally_agrees(store, sql)


async def test_claims_and_results_beside_a_cancel_lose_nothing(
    store: Store, sql: Any, settings: Settings, jobs: BulkJobs, small: None
) -> None:
    async with store.transaction() as session:
        await enqueue.enqueue(
            session, [NewTask("a", ordering_key=f"k{n % 40}" if n % 2 else None) for n in range(3000)]
        )
    job = await start(store, "bulk.cancel", settings, all=True)
    finished = 0

    async def work() -> None:
        nonlocal finished
        while (await look(store, job)).state is JobState.RUNNING:
            async with store.session() as session:
                dispatch = await claim.claim(session, 40)
            if dispatch is None:
                await asyncio.sleep(0.01)
                continue
            async with store.transaction() as session:
                finished += await settle.finish(session, {(task.id, task.claim): "1" for task in dispatch.tasks})

    worker = asyncio.create_task(work())
    ended = await finish(store, jobs, job)
    await worker
    assert (ended.state, ended.refused) == (JobState.DONE, 0)
    counts = Counter((await states(sql)).values())
    assert counts == {"CANCELLED": ended.changed, "SUCCESS": finished}
    assert sum(counts.values()) == 3000
    await sql.execute("update penstock.turn set ends_at = now()")  # of tasks that were cancelled in their turn
    async with store.transaction() as session:
        await ordering.promote_overdue(session, 1000)
    assert await sql.fetchval("select count(*) from penstock.turn") == 0
    await expect_order_holds(sql)
    await expect_tally_agrees(store, sql)


async def test_a_record_that_somebody_holds_is_waited_for_without_a_lock_and_then_passed_over(
    store: Store, sql: Any, settings: Settings, jobs: BulkJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "HELD_TRIES", 4)
    monkeypatch.setattr(bulk, "HELD_REST_SECONDS", 0.001)
    async with store.transaction() as session:
        ids = [task.id for task in await enqueue.enqueue(session, [NewTask("a", delay_seconds=60) for _ in range(10)])]
    job = await start(store, "bulk.cancel", settings, all=True)
    async with sql.transaction():
        await sql.fetch("select id from penstock.task where id = $1 for update", ids[4])
        for _ in range(3):
            await jobs.run_once()
        held = await look(store, job)
        assert (held.changed, held.state) == (4, JobState.RUNNING)
        assert await sql.fetchval("select (cursor -> 'after')::bigint from penstock.job") == ids[4] - 1
        ended = await finish(store, jobs, job)
    assert (ended.changed, ended.refused) == (9, 1)
    assert ended.errors == [JobError(id=ids[4], reason="another transaction held it, or a key of it, for too long")]
    assert (await states(sql))[ids[4]] == "SCHEDULED"


async def test_large_tasks_make_small_batches(
    store: Store, settings: Settings, jobs: BulkJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "PICKED_BYTES", 5000)
    async with store.transaction() as session:
        text = "".join(str(n * 7919) for n in range(300))
        await enqueue.enqueue(session, [NewTask("a", json.dumps({"t": text})) for _ in range(30)])
    job = await start(store, "bulk.cancel", settings, all=True)
    await jobs.run_once()  # counts
    await jobs.run_once()
    assert 1 <= (await look(store, job)).changed <= 8
    assert (await finish(store, jobs, job)).changed == 30


@pytest.mark.parametrize("name", ["find_live_matches", "count_live_matches"])
async def test_a_batch_reads_no_more_than_it_looks_at_whatever_the_statistics_say(sql: Any, name: str) -> None:
    """As of a table that was empty a moment ago, everything that is left would be fetched and sorted for each batch."""
    await sql.execute("vacuum analyze penstock.task")
    await sql.execute(
        "insert into penstock.task (state, action, payload, priority, run_at, max_attempts, created_at, updated_at) "
        "select 'SCHEDULED', 'a', '{}', 0, now(), 10, now(), now() from generate_series(1, 5000)"
    )
    bounds = (100, 4900, 300, *((50, 10**6) if name == "find_live_matches" else ()))
    arguments = (*bounds, "a%", ["SCHEDULED"], None, datetime(2100, 1, 1, tzinfo=UTC), None, None)
    async with sql.transaction():
        await sql.execute("set local enable_seqscan = off")  # as every connection of ours
        await sql.fetch(SQL["plan_jobs"])
        text = f"explain (analyze, format json) {SQL[name]}"
        (plan,) = json.loads(await sql.fetchval(text, *arguments))

    def scans(node: dict[str, Any]) -> list[dict[str, Any]]:
        inner = [found for child in node.get("Plans", ()) for found in scans(child)]
        return [node, *inner] if node.get("Relation Name", "").startswith("task") else inner

    found = scans(plan["Plan"])
    assert all(scan["Index Name"].endswith("_pkey") for scan in found)
    assert 300 <= sum(scan["Actual Rows"] for scan in found) < 300 + len(found)  # a merge holds the next of each


async def test_no_batch_of_a_job_reads_more_than_it_looks_at(
    store: Store, sql: Any, settings: Settings, jobs: BulkJobs, small: None
) -> None:
    await sql.execute("vacuum analyze penstock.task")  # while it is empty
    async with store.transaction() as session:
        await enqueue.enqueue(session, [NewTask("a")] * 5000 + [NewTask("b")])
    await start(store, "bulk.cancel", settings, action="b")
    await jobs.run_once()  # counts
    fetched = "select sum(idx_tup_fetch) from pg_stat_xact_user_tables where relname ~ '^task(_from.*)?$'"
    async with store.transaction() as session:
        row = await take_job(session, without=[])
        assert row is not None
        before = await session._connection.fetchval(fetched)
        assert (await bulk.run_batch(session, row)).seen == 150
        read = await session._connection.fetchval(fetched) - before
    assert 150 <= read < 200  # a merge of partitions holds the next of each


# Jobs


async def test_a_cancelled_job_stops_where_it_is(store: Store, settings: Settings, jobs: BulkJobs, small: None) -> None:
    await populate(store)
    job = await start(store, "bulk.cancel", settings, all=True)
    for _ in range(4):
        assert await jobs.run_once()
    async with store.transaction() as session:
        assert await end_job(session, job.id, JobState.CANCELLED)
        assert not await end_job(session, job.id, JobState.CANCELLED)
    assert not await jobs.run_once()
    stopped = await look(store, job)
    assert (stopped.state, stopped.changed) == (JobState.CANCELLED, 450)
    assert stopped.finished_at is not None


def fails(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let the batches of bulk.retry fail."""

    async def run_batch(session: Session, job: Any, *, parts: int) -> BatchResult:
        if job["kind"] == "bulk.retry":
            raise error
        return await bulk.run_batch(session, job, parts=parts)

    monkeypatch.setattr(bulk_jobs, "run_batch", run_batch)


async def test_a_job_that_raises_fails_loudly_and_harms_no_other(
    store: Store, settings: Settings, jobs: BulkJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(monkeypatch, RuntimeError("no such luck"))
    bad = await start(store, "bulk.retry", settings, all=True)
    async with store.transaction() as session:
        unknown = await create_job(session, "of a newer version", b"{}")
    good = await start(store, "bulk.cancel", settings, all=True)
    assert (await finish(store, jobs, good)).state is JobState.DONE
    failed = await look(store, bad)
    assert (failed.state, failed.errors) == (
        JobState.FAILED,
        [JobError(id=None, reason="RuntimeError: no such luck")],
    )
    assert (await look(store, unknown)).state is JobState.RUNNING


async def test_a_job_that_cannot_go_on_for_now_leaves_the_turn_to_the_others(
    store: Store, settings: Settings, jobs: BulkJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(monkeypatch, Unavailable("not now"))
    stuck = await start(store, "bulk.retry", settings, all=True)
    good = await start(store, "bulk.cancel", settings, all=True)
    with pytest.raises(Unavailable):
        await jobs.run_once()
    assert (await finish(store, jobs, good)).state is JobState.DONE
    assert (await look(store, stuck)).state is JobState.RUNNING


async def test_a_batch_that_takes_too_long_is_made_smaller(
    store: Store, settings: Settings, jobs: BulkJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel = settle.cancel
    tried: list[int] = []

    async def cancel_few(session: Session, ids: Sequence[int], reason: str | None = None) -> set[int]:
        tried.append(len(ids))
        if len(ids) > 30:
            raise TooSlow("canceling statement due to statement timeout")
        return await cancel(session, ids, reason)

    monkeypatch.setattr(settle, "cancel", cancel_few)
    monkeypatch.setattr(bulk, "PICKED", 100)
    monkeypatch.setattr(bulk_jobs, "_FAILED_REST_SECONDS", 0.0)
    async with store.transaction() as session:
        await enqueue.enqueue(session, [NewTask("a", delay_seconds=60)] * 120)
    job = await start(store, "bulk.cancel", settings, all=True)
    while (job := await look(store, job)).state is JobState.RUNNING:
        with suppress(TooSlow):
            await jobs.run_once()
    assert job.changed == 120
    assert tried[:4] == [100, 50, 25, 50], "it grows again after a batch that was quick"


async def test_the_runner_does_a_job_by_itself_and_promptly(store: Store, sql: Any, settings: Settings) -> None:
    changed: list[int] = []
    await populate(store)
    running = asyncio.create_task(
        repeat("bulk jobs", BulkJobs(store=store, changed=lambda: changed.append(1)).work_then_rest)
    )
    job = await start(store, "bulk.retry", settings, all=True)
    async with asyncio.timeout(20):
        while (await look(store, job)).state is JobState.RUNNING or not changed:  # it says so behind its commit
            await asyncio.sleep(0.02)
    running.cancel()
    assert (await look(store, job)).changed == 700


async def test_jobs_that_ended_are_cleaned_after_their_retention(store: Store, sql: Any, settings: Settings) -> None:
    async with store.transaction() as session:
        ids = [(await create_job(session, "count", b"{}")).id for _ in range(4)]
        for job_id in ids[:3]:
            await end_job(session, job_id, JobState.CANCELLED)
    await sql.execute("update penstock.job set finished_at = now() - interval '8 days' where id = any($1)", ids[:2])
    before = sample("penstock_cleaned_total", kind="job")
    await Retention(store=store, settings=settings).run_once()
    assert [row[0] for row in await sql.fetch("select id from penstock.job order by id")] == ids[2:]
    assert sample("penstock_cleaned_total", kind="job") - before == 2


# Through the inbound queue


async def test_the_inbound_queue_makes_and_stops_jobs_and_refuses_what_only_answers(
    store: Store, settings: Settings
) -> None:
    read: Callable[..., Awaitable[Any]] = accept_inbound
    async with store.transaction() as session:
        first = read_inbound(request("bulk.cancel", {"action": "a*"}), settings)
        await read(session, first, settings, source="inbound")
    async with store.transaction() as session:
        job = await read_job(session, 1)
        assert (job.kind, job.state, job.params["action"]) == ("bulk.cancel", JobState.RUNNING, "a*")
        body = f"[{request('job.cancel', {'id': 1})},{request('job.cancel', {'id': 7})}]"
        both = read_inbound(body, settings)
        await read(session, both, settings, source="inbound")
        assert [reason for _, reason in both.refused] == ["No such job: 7"]
        assert (await read_job(session, 1)).state is JobState.CANCELLED
    for method, params in (("bulk.cancel", {"all": True, "dry_run": True}), ("job.get", {"id": 1}), ("job.list", {})):
        refused = read_inbound(request(method, params), settings).refused
        assert [reason for _, reason in refused] == [
            f"{method} only answers, and a queue has no way back: ask over HTTP"
        ]
