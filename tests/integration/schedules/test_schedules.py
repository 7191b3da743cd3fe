"""Schedules against a real Postgres: made, changed and fired by the functions that the api and the supervisor call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from time import thread_time
from typing import Any

import msgspec
import pytest

from penstock.brokers.base import Queue
from penstock.db.context import within
from penstock.db.notify import Notifier
from penstock.db.pool import Store
from penstock.db.statements import SQL
from penstock.methods.table import read_command
from penstock.protocol.answers import ScheduleRun
from penstock.protocol.errors import InvalidParams, ScheduleNotFound
from penstock.protocol.task import NewTask
from penstock.protocol.views import timestamp
from penstock.runtime.loop import Loop
from penstock.runtime.periodic import repeat
from penstock.schedules import firing as fires
from penstock.schedules.firing import Imports, ScheduleFiring
from penstock.schedules.methods import create_many, list_runs
from penstock.schedules.methods import get as get_schedule
from penstock.schedules.model import ScheduleName, ScheduleRecord, ScheduleRunsParams
from penstock.schedules.policy import FEW_COUNTED
from penstock.schedules.store import read_schedule
from penstock.settings.model import Settings, load_settings
from penstock.supervisor.process import Supervisor
from penstock.supervisor.retention import Retention
from penstock.tasks import claim, enqueue, settle
from tests.integration.doors import no_routes
from tests.integration.schedule_changes import change_schedule

Change = Callable[..., Awaitable[Any]]


@pytest.fixture
def limits(database_url: str) -> Settings:
    """Settings without queues."""
    return load_settings(database_url=database_url)


@pytest.fixture
def do(store: Store, limits: Settings) -> Change:
    """Carry out a method in a transaction: ``await do("schedule.create", name="n", ...)``."""

    async def run(method: str, **params: Any) -> Any:
        async with store.transaction() as session:
            return await change_schedule(session, method, json.dumps(params).encode(), limits)

    return run


@pytest.fixture
def firing(store: Store, limits: Settings) -> ScheduleFiring:
    return ScheduleFiring(store=store, notifier=Notifier(store), settings=limits)


async def make(do: Change, name: str = "n", **params: Any) -> ScheduleRecord:
    given: dict[str, Any] = {"name": name, "expression": "@hourly", "action": "a"} | params
    record: ScheduleRecord = await do("schedule.create", **given)
    return record


async def runs_of(store: Store, name: str = "n", limit: int = 1000) -> list[ScheduleRun]:
    async with store.session() as session:
        page = await list_runs.carry_out(within(session, load_settings()), ScheduleRunsParams(name, limit))
        runs: list[ScheduleRun] = page.runs
        return runs


def lateness(run: ScheduleRun) -> timedelta:
    return datetime.fromisoformat(run.fired_at) - datetime.fromisoformat(run.scheduled_at)


async def get(store: Store, name: str = "n") -> ScheduleRecord:
    async with store.session() as session:
        return await read_schedule(session, name)


async def set_clock(sql: Any, next_at: datetime, *, name: str | None = "n", due_at: datetime | None = None) -> None:
    """Put a schedule's clock, or all, to an instant as if nothing had been fired since."""
    await sql.execute(
        "update penstock.schedule_clock set next_at = $1, due_at = $2, last_at = null where $3::text is null"
        " or schedule_id = (select id from penstock.schedule where name = $3)",
        next_at, due_at or next_at, name,
    )  # fmt: skip


async def clock_of(sql: Any) -> datetime:
    now: datetime = await sql.fetchval("select clock_timestamp()")
    return now


async def hour_ago(sql: Any, hours: int = 1) -> datetime:
    """A full hour in the past."""
    return (await clock_of(sql)).replace(minute=0, second=0, microsecond=0) - timedelta(hours=hours - 1)


async def tasks_of(sql: Any) -> list[Any]:
    return list(await sql.fetch("select * from penstock.task order by id"))


async def finish_all(store: Store) -> None:
    async with store.transaction() as session:
        batch = await claim.claim(session, 1000)
        assert batch is not None
        await settle.finish(session, {(task.id, task.claim): "null" for task in batch.tasks})


async def fire_all(firing: ScheduleFiring) -> int:
    """Rounds until nothing is due; returns how many tasks."""
    total = 0
    while (fired := await firing.run_once()).schedules:
        total += fired.tasks
    return total


# Made and changed


async def test_a_new_schedule_waits_for_its_next_instant(do: Change, sql: Any) -> None:
    record = await make(do, expression="*/5 * * * *", labels={"team": "a"}, payload={"n": 1.5})
    now = await clock_of(sql)
    assert record.next_at is not None
    assert now - timedelta(seconds=5) < record.next_at <= now + timedelta(minutes=5)
    assert record.next_at.minute % 5 == 0
    assert record.due_at == record.next_at
    assert (record.labels, record.payload) == ({"team": "a"}, '{"n": 1.5}')


async def test_a_name_is_taken_once_unless_it_is_to_be_replaced(do: Change, store: Store) -> None:
    first = await make(do, payload={"v": 1})
    with pytest.raises(InvalidParams, match="'n' is a schedule's name already: pass replace"):
        await make(do, payload={"v": 2})
    second = await make(do, payload={"v": 2}, replace=True)
    assert second.id == first.id
    assert second.next_at == first.next_at
    assert (await get(store)).payload == '{"v": 2}'


async def test_replacing_a_schedule_by_itself_loses_no_fire_that_is_due(
    do: Change, firing: ScheduleFiring, sql: Any
) -> None:
    await make(do)
    due = await hour_ago(sql)
    await set_clock(sql, due)
    record = await make(do, payload={"new": True}, replace=True)
    assert record.next_at == due
    assert await fire_all(firing) == 1


async def test_an_update_changes_what_it_names_and_nothing_else(do: Change, store: Store) -> None:
    before = await make(do, payload=[1, 2], priority=3, labels={"a": "b"}, jitter=5)
    after = await do("schedule.update", name="n", priority=4)
    assert after.priority == 4
    assert (after.next_at, after.due_at, after.id) == (before.next_at, before.due_at, before.id)
    assert after.payload == "[1, 2]"
    assert after.labels == {"a": "b"}


async def test_every_counts_from_the_making_of_the_schedule(do: Change) -> None:
    record = await make(do, expression="@every 100s")
    first = record.created_at.replace(microsecond=0)
    assert record.next_at == first + timedelta(seconds=100)
    rule = record.rule(record.created_at)
    assert rule.next_after(record.next_at).at == first + timedelta(seconds=200)
    begun = await make(do, name="m", expression="@every 100s", start_at="2040-01-01T00:00:00.5Z")
    assert begun.next_at == datetime(2040, 1, 1, 0, 0, 1, tzinfo=UTC)


async def test_every_is_fired_at_even_distances(do: Change, store: Store, firing: ScheduleFiring, sql: Any) -> None:
    record = await make(do, expression="@every 100s", missed="all")
    for minutes in range(2):
        await sql.execute("update penstock.schedule set created_at = created_at - interval '100 seconds'")
        await set_clock(sql, record.created_at.replace(microsecond=0) - timedelta(seconds=100 * minutes))
        await firing.run_once()
        assert (await get(store)).next_at == record.created_at.replace(microsecond=0) + timedelta(seconds=100)
        await sql.execute("truncate penstock.schedule_run")


async def test_an_update_of_the_expression_changes_the_next_fire(do: Change, sql: Any) -> None:
    await make(do, expression="@yearly")
    record = await do("schedule.update", name="n", expression="* * * * * *")
    assert record.next_at - await clock_of(sql) <= timedelta(seconds=1)
    moved = await do("schedule.update", name="n", start_at="2100-01-01T00:00:00Z")
    assert moved.next_at == datetime(2100, 1, 1, tzinfo=UTC)
    cleared = await do("schedule.update", name="n", start_at=None)
    assert cleared.next_at < moved.next_at


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"expression": "0 0 30 2 *"}, "expression"),
        ({"timezone": "Mars/Olympus"}, "timezone"),
        ({"priority": 99999}, "priority"),
        ({"end_at": "2001-01-01T00:00:00Z"}, "end_at"),
        ({"max_missed": 0}, "max_missed"),
        ({"payload": 5}, "payload"),
    ],
)
async def test_an_update_that_is_wrong_names_the_field_and_changes_nothing(
    do: Change, store: Store, given: dict[str, Any], field: str
) -> None:
    before = await make(do)
    with pytest.raises(InvalidParams) as caught:
        await do("schedule.update", name="n", **given)
    assert caught.value.data["field"] == field
    assert await get(store) == before


async def test_a_schedule_that_would_never_fire_is_refused(do: Change) -> None:
    with pytest.raises(InvalidParams) as caught:
        await make(do, expression="@yearly", end_at=2000000000000, start_at=1999999999000)
    assert caught.value.data["field"] == "end_at"
    assert "'@yearly'" in caught.value.data["problem"]


@pytest.mark.parametrize("method", ["update", "delete", "pause", "resume", "run_now"])
async def test_a_schedule_that_is_not_there_is_not_found(do: Change, method: str) -> None:
    more = {"priority": 1} if method == "update" else {}
    with pytest.raises(ScheduleNotFound, match="No such schedule: gone"):
        await do(f"schedule.{method}", name="gone", **more)


async def test_a_deleted_schedule_fires_no_more_and_frees_its_name(
    do: Change, firing: ScheduleFiring, sql: Any
) -> None:
    first = await make(do)
    await set_clock(sql, await hour_ago(sql))
    await do("schedule.delete", name="n")
    assert await fire_all(firing) == 0
    assert await sql.fetchval("select count(*) from penstock.schedule_clock") == 0
    assert (await make(do)).id != first.id


# Fired


async def test_a_fire_makes_a_task_as_enqueue_would_and_moves_the_clock(
    do: Change, store: Store, firing: ScheduleFiring, sql: Any
) -> None:
    record = await make(
        do, action="export", payload={"a": 1.50}, priority=7, max_attempts=3, timeout=9.5, ordering_key="k"
    )
    due = await hour_ago(sql)
    await set_clock(sql, due)
    fired = await firing.run_once()
    assert (fired.schedules, fired.tasks, fired.missed) == (1, 1, 0)
    (task,) = await tasks_of(sql)
    assert (task["action"], task["priority"], task["max_attempts"]) == ("export", 7, 3)
    assert (task["timeout_seconds"], task["ordering_key"], task["payload"]) == (9.5, "k", '{"a": 1.5}')
    (run,) = await runs_of(store)
    assert (run.scheduled_at, run.outcome, run.task_id) == (timestamp(due), "SCHEDULED", task["id"])
    after = await get(store)
    assert after.next_at == due + timedelta(hours=1) == record.next_at
    assert (after.last_at, after.last_task_id) == (due, task["id"])
    assert (await firing.run_once()).schedules == 0


async def test_the_run_tells_what_became_of_the_task(
    do: Change, store: Store, firing: ScheduleFiring, sql: Any
) -> None:
    await make(do)
    await set_clock(sql, await hour_ago(sql))
    await fire_all(firing)
    await finish_all(store)
    assert [run.outcome for run in await runs_of(store)] == ["SUCCESS"]
    await sql.execute("delete from penstock.task_history")
    (run,) = await runs_of(store)
    assert run.outcome == "CLEANED"


async def test_templates_are_filled_in_inside_string_values_alone(
    do: Change, store: Store, firing: ScheduleFiring, sql: Any
) -> None:
    name = 'back\\slash "quote" {{run}} é'
    payload = {"at": "{{scheduled_time}}", "{{schedule}}": ["<{{ schedule }}>", "{{run}}"], "other": "{{else}} {{"}
    record = await make(do, name=name, payload=payload)
    due = await hour_ago(sql)
    await set_clock(sql, due, name=None)
    await fire_all(firing)
    (task,) = await tasks_of(sql)
    text = due.isoformat(timespec="microseconds").replace("+00:00", "Z")
    assert json.loads(task["payload"]) == {
        "at": text, "{{schedule}}": [f"<{name}>", f"{record.id}:{text}"], "other": "{{else}} {{",
    }  # fmt: skip


async def test_many_supervisors_at_once_fire_each_instant_once(
    do: Change, store: Store, limits: Settings, sql: Any
) -> None:
    await make(do, name="seed")
    await sql.execute(
        "insert into penstock.schedule (name, expression, timezone, action, payload)"
        " select 's' || n, '0 * * * *', 'UTC', 'a', '{}' from generate_series(1, 999) n"
    )
    await sql.execute(
        "insert into penstock.schedule_clock (schedule_id) select id from penstock.schedule where name <> 'seed'"
    )
    due = await hour_ago(sql, 2)
    await set_clock(sql, due, name=None)
    small = load_settings(database_url=limits.require_database_url, schedule_batch_size=37)
    several = [ScheduleFiring(store=store, notifier=Notifier(store), settings=small) for _ in range(4)]
    counts = await asyncio.gather(*map(fire_all, several))
    # Two instants have passed of each: one is missed and not made up for, since the other is on time or newer.
    runs = await sql.fetch("select outcome, count(*), sum(instants) from penstock.schedule_run group by 1 order by 1")
    fired = {row["outcome"]: row["count"] for row in runs}
    assert fired["FIRED"] == sum(counts) == 1000
    assert sum(row["sum"] for row in runs) == 2000
    assert await sql.fetchval("select count(*) from penstock.task") == 1000
    assert sum(1 for count in counts if count) > 1


async def test_a_supervisor_that_dies_in_the_middle_leaves_the_fire_to_the_next(
    do: Change, store: Store, firing: ScheduleFiring, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make(do)
    due = await hour_ago(sql)
    await set_clock(sql, due)

    async def die(*_: Any) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("penstock.schedules.firing._store", die)
        with pytest.raises(RuntimeError, match="killed"):
            await firing.run_once()
    assert await tasks_of(sql) == []
    assert (await get(store)).next_at == due
    assert await fire_all(firing) == 1


async def test_one_whose_values_postgres_refuses_is_stopped_and_harms_no_other(
    do: Change, store: Store, firing: ScheduleFiring, sql: Any
) -> None:
    bad = await make(do, name="bad")
    for number in range(5):
        await make(do, name=f"n{number}")
    due = await hour_ago(sql)
    await set_clock(sql, due, name=None)
    await sql.execute(  # as nothing of ours would: the instant has been run already
        "insert into penstock.schedule_run (schedule_id, scheduled_at, outcome, task_id) values ($1, $2, 'FIRED', 1)",
        bad.id, due,
    )  # fmt: skip
    assert await fire_all(firing) == 5
    stopped = await get(store, "bad")
    assert stopped.next_at is None
    assert stopped.problem is not None
    assert "schedule_run_pkey" in stopped.problem
    resumed = await do("schedule.resume", name="bad")
    assert resumed.next_at == due + timedelta(hours=1)
    assert resumed.problem is None


async def test_a_zone_that_is_known_no_more_stops_its_schedule_alone(
    do: Change, store: Store, firing: ScheduleFiring, sql: Any
) -> None:
    await make(do, name="lost")
    await make(do)
    await sql.execute("update penstock.schedule set timezone = 'Mars/Olympus' where name = 'lost'")
    await set_clock(sql, await hour_ago(sql), name=None)
    assert await fire_all(firing) == 1
    assert "'Mars/Olympus' is no IANA zone" in str((await get(store, "lost")).problem)
    with pytest.raises(InvalidParams, match="timezone 'Mars/Olympus' is no IANA zone"):
        await do("schedule.resume", name="lost")
    paused = await do("schedule.pause", name="lost")
    assert (paused.paused, paused.problem) == (True, None)


async def test_it_ends_after_its_last_instant(do: Change, store: Store, firing: ScheduleFiring, sql: Any) -> None:
    record = await make(do)
    assert record.next_at is not None
    await do("schedule.update", name="n", end_at=record.next_at.isoformat())
    await sql.execute("update penstock.schedule set end_at = $1", await hour_ago(sql))
    await set_clock(sql, await hour_ago(sql))
    assert await fire_all(firing) == 1
    assert (await get(store)).next_at is None


async def test_jitter_delays_each_fire_by_the_same_for_the_same_instant(do: Change, store: Store) -> None:
    delays = set()
    for number in range(20):
        record = await make(do, name=f"n{number}", jitter=600)
        assert record.next_at is not None
        assert record.due_at is not None
        assert timedelta() <= record.due_at - record.next_at <= timedelta(seconds=600)
        delays.add(record.due_at - record.next_at)
        again = await do("schedule.update", name=f"n{number}", start_at="2001-01-01T00:00:00Z")
        assert (again.next_at, again.due_at) == (record.next_at, record.due_at)
    assert len(delays) > 15


async def test_what_is_not_due_for_its_jitter_is_not_fired(do: Change, firing: ScheduleFiring, sql: Any) -> None:
    await make(do, jitter=7200)
    now = await clock_of(sql)
    await set_clock(sql, await hour_ago(sql), due_at=now + timedelta(seconds=60))
    assert await fire_all(firing) == 0
    await set_clock(sql, await hour_ago(sql), due_at=now)
    assert await fire_all(firing) == 1


# Missed


@pytest.mark.parametrize(
    ("policy", "more", "fired", "lost"),
    [
        ("skip", {}, [], (5, -5, -1)),
        ("one", {}, [-1], (4, -5, -2)),
        ("all", {}, [-5, -4, -3, -2, -1], None),
        ("all", {"max_missed": 2}, [-2, -1], (3, -5, -3)),
        ("all", {"max_lateness": 7 * 86_400 + 3600 * 2.999}, [-2, -1], (3, -5, -3)),
        ("one", {"max_lateness": 60}, [], (5, -5, -1)),
    ],
)
async def test_what_becomes_of_instants_that_were_missed(
    do: Change, store: Store, firing: ScheduleFiring, sql: Any, policy: str, more: dict[str, Any], fired: list[int],
    lost: tuple[int, int, int] | None,
) -> None:  # fmt: skip
    """Five hours of a day one week ago, the schedule having ended since: none of them is on time."""
    base = (await clock_of(sql)).replace(minute=0, second=0, microsecond=0) - timedelta(days=7)
    await make(do, missed=policy, **more)
    await sql.execute("update penstock.schedule set end_at = $1", base - timedelta(hours=1))
    await set_clock(sql, base - timedelta(hours=5))
    await fire_all(firing)
    runs = await runs_of(store)
    assert sorted(run.scheduled_at for run in runs if run.outcome == "SCHEDULED") == [
        timestamp(base + timedelta(hours=n)) for n in fired
    ]
    missed = [
        (run.instants, run.since or run.scheduled_at, run.scheduled_at) for run in runs if run.outcome == "MISSED"
    ]
    if lost is None:
        assert missed == []
    else:
        instants, *ends = lost
        assert missed == [(instants, *(timestamp(base + timedelta(hours=end)) for end in ends))]
    assert len(await tasks_of(sql)) == len(fired)
    assert (await get(store)).next_at is None


async def test_what_is_within_the_grace_is_on_time_whatever_the_policy(
    do: Change, store: Store, firing: ScheduleFiring, sql: Any
) -> None:
    await make(do, expression="* * * * * *", missed="skip")
    first = (await clock_of(sql)).replace(microsecond=0) - timedelta(seconds=20)
    await set_clock(sql, first)
    assert await fire_all(firing) >= 20
    runs = await runs_of(store)
    assert {run.outcome for run in runs} == {"SCHEDULED"}
    assert runs[-1].scheduled_at == timestamp(first)


async def test_a_long_outage_of_many_instants_is_one_row(
    do: Change, store: Store, firing: ScheduleFiring, sql: Any
) -> None:
    await make(do, expression="* * * * * *")
    start = (await clock_of(sql)).replace(microsecond=0) - timedelta(days=30)
    await set_clock(sql, start)
    await firing.run_once()
    missed = [run for run in await runs_of(store) if run.outcome == "MISSED"]
    assert len(missed) == 1
    assert missed[0].since == timestamp(start)
    assert FEW_COUNTED - 100 < missed[0].instants < FEW_COUNTED  # and the rest was on time


async def test_a_backlog_that_takes_long_to_decide_on_goes_over_rounds_and_lets_the_process_breathe(
    do: Change, firing: ScheduleFiring, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is due every second and days behind, a walk of ten thousand instants, with an expression of its own."""
    monkeypatch.setattr(fires, "DECIDING_SECONDS", 0.2)
    names = [f"s{n}" for n in range(40)]
    for n, name in enumerate(names):
        await make(do, name, expression=f"* * * * * {n // 7}-6,{n % 7}", missed="all", max_missed=1)
    await set_clock(sql, await hour_ago(sql, 24 * 9), name=None)
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            began = thread_time()
            await asyncio.sleep(0)
            longest = max(longest, thread_time() - began)

    watching = asyncio.create_task(watch())
    first = await firing.run_once()
    assert 0 < first.schedules < len(names)
    assert first.schedules + await fire_all(firing) >= len(names)
    watching.cancel()
    assert longest < 1  # of processor time; all of them take several
    assert await sql.fetchval("select count(distinct schedule_id) from penstock.schedule_run") == len(names)


async def test_a_round_takes_so_many_bytes_of_payloads(
    do: Change, firing: ScheduleFiring, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fires, "ROUND_BYTES", 100_000)
    payload = {"text": "x" * 40_000}
    await make(do, "behind", payload=payload, missed="all")
    for n in range(5):
        await make(do, f"n{n}", payload=payload)
    await set_clock(sql, await hour_ago(sql), name=None)
    await set_clock(sql, await hour_ago(sql, 9), name="behind")
    assert (await firing.run_once()).tasks == 3
    assert 3 + await fire_all(firing) == 9 + 5
    outcomes = await sql.fetch("select outcome, count(*) from penstock.schedule_run group by outcome")
    assert [tuple(row) for row in outcomes] == [("FIRED", 14)]


# Overlap


async def test_a_fire_is_skipped_while_the_task_before_is_not_settled(
    do: Change, store: Store, firing: ScheduleFiring, sql: Any
) -> None:
    await make(do, overlap="skip")
    base = await hour_ago(sql, 10)
    outcomes = []
    for hours in range(4):
        due = base + timedelta(hours=hours)
        await sql.execute("update penstock.schedule set end_at = $1", due)
        await set_clock(sql, due)
        await fire_all(firing)
        outcomes.append(next(run.outcome for run in await runs_of(store)))
        if hours == 2:
            await finish_all(store)
    assert outcomes == ["SCHEDULED", "SKIPPED", "SKIPPED", "SCHEDULED"]
    assert len(await tasks_of(sql)) == 1


async def test_of_several_instants_made_up_for_at_once_one_is_run_when_they_must_not_overlap(
    do: Change, store: Store, firing: ScheduleFiring, sql: Any
) -> None:
    await make(do, overlap="skip", missed="all")
    await set_clock(sql, await hour_ago(sql, 4))
    await firing.run_once()
    assert sorted(run.outcome for run in await runs_of(store)) == ["SCHEDULED", "SKIPPED", "SKIPPED", "SKIPPED"]


async def test_fires_that_queue_run_one_after_the_other(do: Change, firing: ScheduleFiring, sql: Any) -> None:
    record = await make(do, overlap="queue", missed="all")
    await set_clock(sql, await hour_ago(sql, 3))
    await fire_all(firing)
    tasks = await tasks_of(sql)
    assert [task["state"] for task in tasks] == ["SCHEDULED", "WAITING", "WAITING"]
    assert {task["ordering_key"] for task in tasks} == {f"schedule:{record.id}"}


async def test_fires_may_overlap_unless_told_otherwise(do: Change, firing: ScheduleFiring, sql: Any) -> None:
    await make(do, missed="all")
    await set_clock(sql, await hour_ago(sql, 3))
    await fire_all(firing)
    assert [task["state"] for task in await tasks_of(sql)] == ["SCHEDULED"] * 3


# Paused, and run by hand


async def test_a_pause_is_not_made_up_for(do: Change, store: Store, firing: ScheduleFiring, sql: Any) -> None:
    await make(do, missed="all")
    await set_clock(sql, await hour_ago(sql, 3))
    paused = await do("schedule.pause", name="n")
    assert paused.next_at is None
    assert await fire_all(firing) == 0
    assert await do("schedule.pause", name="n") == paused
    resumed = await do("schedule.resume", name="n")
    assert resumed.next_at > await clock_of(sql)
    assert await do("schedule.resume", name="n") == resumed
    assert await fire_all(firing) == 0


async def test_the_instants_to_come_of_a_paused_one_go_by_the_clock_of_the_database(
    do: Change, store: Store, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ahead(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Ahead:
            return super().now(tz) + timedelta(days=1)

    monkeypatch.setattr("penstock.schedules.methods.datetime", Ahead)
    await make(do, paused=True)
    async with store.session() as session:
        shown = await get_schedule.carry_out(within(session, load_settings()), ScheduleName("n"))
    assert datetime.fromisoformat(shown.upcoming[0]) - await clock_of(sql) <= timedelta(hours=1)


async def test_a_pause_outlives_the_making_anew_of_the_schedule(do: Change) -> None:
    await make(do)
    await do("schedule.pause", name="n")
    again = await make(do, priority=5, replace=True)
    assert (again.paused, again.next_at, again.priority) == (True, None, 5)
    resumed = await make(do, paused=False, replace=True)
    assert resumed.paused is False
    assert resumed.next_at is not None


async def test_run_now_is_a_run_beside_the_clock(do: Change, store: Store, firing: ScheduleFiring, sql: Any) -> None:
    record = await make(do, payload={"run": "{{run}}"}, paused=True)
    first = await do("schedule.run_now", name="n")
    second = await do("schedule.run_now", name="n")
    assert (first.outcome, first.manual) == ("SCHEDULED", True)
    assert [task["id"] for task in await tasks_of(sql)] == [first.task_id, second.task_id]
    assert json.loads((await tasks_of(sql))[0]["payload"])["run"].startswith(f"{record.id}:")
    assert [run.scheduled_at for run in await runs_of(store)] == [second.scheduled_at, first.scheduled_at]
    assert (await get(store)).last_task_id == second.task_id
    assert (await get(store)).next_at is None


async def test_run_now_heeds_overlap(do: Change, sql: Any) -> None:
    await make(do, overlap="skip")
    assert (await do("schedule.run_now", name="n")).outcome == "SCHEDULED"
    skipped = await do("schedule.run_now", name="n")
    assert (skipped.outcome, skipped.task_id) == ("SKIPPED", None)
    assert len(await tasks_of(sql)) == 1


async def test_run_now_takes_the_settings_number_of_attempts(store: Store, do: Change, sql: Any) -> None:
    await make(do)
    few = load_settings(max_attempts=2)
    async with store.transaction() as session:
        await change_schedule(session, "schedule.run_now", b'["n"]', few)
    assert [task["max_attempts"] for task in await tasks_of(sql)] == [2]


# The loop


async def test_a_supervisor_fires_to_the_second_and_sees_a_new_schedule_within_one(
    do: Change, store: Store, settings: Settings, outbound: Queue, results: Queue, inbound: Queue, sql: Any
) -> None:
    queues = {"inbound": inbound, "outbound": outbound, "results": results}
    supervisor = Supervisor(open_queue=no_routes, store=store, queues=queues, settings=settings)
    loop = Loop(supervisor, passes=1, grace_seconds=5)
    running = asyncio.create_task(loop.run())
    try:
        await asyncio.sleep(0.3)
        await make(do, expression="* * * * * *")
        until = asyncio.get_running_loop().time() + 20
        # The first may be as late as the loop's look; a busy machine has so many seconds for one that is on time.
        while len(runs := await runs_of(store)) < 4 or min(map(lateness, runs[:-1])) > timedelta(seconds=0.1):
            assert asyncio.get_running_loop().time() < until
            await asyncio.sleep(0.1)
    finally:
        loop.stop()
        assert await running == 0
    instants = [datetime.fromisoformat(run.scheduled_at) for run in reversed(runs)]
    assert [later - earlier for earlier, later in pairwise(instants)] == [timedelta(seconds=1)] * (len(instants) - 1)
    assert {run.outcome for run in runs} == {"SCHEDULED"}


async def test_the_loop_works_off_a_backlog_of_many_batches(
    do: Change, store: Store, limits: Settings, sql: Any
) -> None:
    for number in range(100):
        await make(do, name=f"n{number}")
    await set_clock(sql, await hour_ago(sql), name=None)
    small = load_settings(database_url=limits.require_database_url, schedule_batch_size=7)
    running = asyncio.create_task(
        repeat("schedules", ScheduleFiring(store=store, notifier=Notifier(store), settings=small).fire_or_wait)
    )
    try:
        until = asyncio.get_running_loop().time() + 30
        while await sql.fetchval("select count(*) from penstock.schedule_run") < 100:
            assert asyncio.get_running_loop().time() < until
            await asyncio.sleep(0.05)
    finally:
        running.cancel()
    assert len(await tasks_of(sql)) == 100
    assert await sql.fetchval("select count(distinct schedule_id) from penstock.schedule_run") == 100


async def test_the_loop_finds_a_clock_that_was_set_to_an_instant_before_what_its_looks_begin_with(
    do: Change, store: Store, limits: Settings, sql: Any
) -> None:
    await make(do)
    running = asyncio.create_task(
        repeat("schedules", ScheduleFiring(store=store, notifier=Notifier(store), settings=limits).fire_or_wait)
    )
    try:
        for fires in (1, 2):
            await set_clock(sql, await hour_ago(sql, hours=fires))
            async with asyncio.timeout(30):
                while len({task["id"] for task in await tasks_of(sql)}) < fires:
                    await asyncio.sleep(0.01)
            await sql.execute("delete from penstock.schedule_run")
    finally:
        running.cancel()


# Imports


async def start(store: Store, limits: Settings, entries: list[Any], replace: bool = False) -> int:
    params = msgspec.json.encode({"schedules": entries, "replace": replace})
    async with store.transaction() as session:
        command = read_command("schedule.create_many", params, limits)
        started = await create_many.carry_out(within(session, limits), command)
    assert started.total == len(entries)
    import_id: int = started.id
    return import_id


async def test_an_import_writes_what_is_right_and_tells_what_is_not(
    store: Store, limits: Settings, do: Change, sql: Any
) -> None:
    await make(do, name="s7")
    entries: list[Any] = [{"name": f"s{n}", "expression": "0 * * * *", "action": "a"} for n in range(1200)]
    entries[3] = {"name": "bad", "expression": "61 * * * *", "action": "a"}
    entries[600] = "nonsense"
    entries[601] = {"name": "s1", "expression": "@daily", "action": "a"}
    entries[1100] = {"name": "x", "expression": "@daily", "action": "a", "replace": True}
    import_id = await start(store, limits, entries)
    imports = Imports(store=store, settings=limits)
    assert [await imports.run_once() for _ in range(4)] == [500, 500, 200, 0]
    async with store.session() as session:
        (row,) = await session.fetch("read_import", import_id)
    assert (row["total"], row["seen"], row["created"], row["replaced"], row["refused"]) == (1200, 1200, 1195, 0, 5)
    assert row["finished_at"] is not None
    errors = json.loads(row["errors"])
    assert [(error["index"], error["name"], error["field"]) for error in errors] == [
        (3, "bad", "expression"), (7, "s7", "name"), (600, None, "params"), (601, "s1", "name"), (1100, "x", "replace"),
    ]  # fmt: skip
    assert "minute '61'" in errors[0]["problem"]
    assert await sql.fetchval("select count(*) from penstock.schedule_clock where next_at is not null") == 1196


async def test_an_entry_that_postgres_cannot_show_holds_up_no_import(store: Store, limits: Settings, sql: Any) -> None:
    bad = [
        msgspec.Raw(rb'{"name":"a\u0000","expression":"@daily","action":"a"}'),
        msgspec.Raw(b'{"name":1e999,"expression":"@daily","action":"a"}'),
        msgspec.Raw(b'{"name":"n","expression":"@daily","action":"a","max_missed":1' + b"0" * 400 + b"}"),
    ]
    import_id = await start(store, limits, [*bad, {"name": "good", "expression": "@daily", "action": "a"}])
    assert await Imports(store=store, settings=limits).run_once() == 4
    async with store.session() as session:
        (row,) = await session.fetch("read_import", import_id)
    assert (row["created"], row["refused"], len(json.loads(row["errors"]))) == (1, 3, 3)


async def test_fires_go_on_while_an_import_is_read_that_is_wrong_throughout(store: Store, limits: Settings) -> None:
    """Fifty years are searched for each date that never comes."""
    entry = {"name": "x", "expression": "0 0 LW * */6", "action": "a"}
    await start(store, limits, [entry] * 100)
    importing = asyncio.create_task(Imports(store=store, settings=limits).run_once())
    longest = 0.0
    while not importing.done():
        began = thread_time()
        await asyncio.sleep(0)
        longest = max(longest, thread_time() - began)
    assert await importing == 100
    assert longest < 0.5  # of processor time; all of them take seconds


async def test_an_import_that_replaces_is_the_same_twice(store: Store, limits: Settings, sql: Any) -> None:
    entries = [{"name": f"s{n}", "expression": "0 * * * *", "action": "a"} for n in range(10)]
    imports = Imports(store=store, settings=limits)
    for created, replaced in ((10, 0), (0, 10)):
        import_id = await start(store, limits, entries, replace=True)
        await imports.run_once()
        async with store.session() as session:
            (row,) = await session.fetch("read_import", import_id)
        assert (row["created"], row["replaced"], row["refused"]) == (created, replaced, 0)
    assert await sql.fetchval("select count(*) from penstock.schedule") == 10


async def test_two_supervisors_share_imports_and_do_nothing_twice(store: Store, limits: Settings, sql: Any) -> None:
    for letter in "ab":
        await start(
            store, limits, [{"name": f"{letter}{n}", "expression": "@daily", "action": "a"} for n in range(2000)]
        )

    async def work() -> None:
        imports = Imports(store=store, settings=limits)
        while await sql_left():
            await imports.run_once()

    async def sql_left() -> int:
        async with store.session() as session:
            return sum([1 for n in (1, 2) if (await session.fetch("read_import", n))[0]["finished_at"] is None])

    await asyncio.gather(work(), work(), work())
    assert await sql.fetchval("select count(*) from penstock.schedule") == 4000
    rows = await sql.fetch("select created, refused from penstock.schedule_import")
    assert [tuple(row) for row in rows] == [(2000, 0)] * 2
    assert await sql.fetchval("select count(*) from penstock.schedule_import_part") == 0


# Retention


async def test_old_runs_and_imports_are_removed_and_young_ones_stay(
    do: Change, store: Store, limits: Settings, sql: Any
) -> None:
    await make(do)
    for _ in range(3):
        await do("schedule.run_now", name="n")
    await start(store, limits, [{"name": "i", "expression": "@daily", "action": "a"}])
    await Imports(store=store, settings=limits).run_once()
    retention = Retention(store=store, settings=limits)
    assert await retention.run_once() == 0
    await sql.execute("update penstock.schedule_run set fired_at = now() - interval '8 days' where ctid in"
                      " (select ctid from penstock.schedule_run order by scheduled_at limit 2)")  # fmt: skip
    await sql.execute("update penstock.schedule_import set finished_at = now() - interval '8 days'")
    assert await retention.run_once() == 3
    assert len(await runs_of(store)) == 1


async def test_due_schedules_are_found_by_their_index(store: Store, do: Change, sql: Any) -> None:
    await make(do)
    await sql.execute("set enable_seqscan = off")
    for name in ("claim_due_schedules", "read_wait"):
        plan = await sql.fetch("explain " + SQL[name].replace("$1", "10").replace("$2", "10"))
        assert "schedule_clock_due" in "\n".join(row[0] for row in plan), name


async def test_a_live_task_is_the_newest_one_of_the_schedule(
    store: Store, do: Change, firing: ScheduleFiring, sql: Any
) -> None:
    """A task that another caller enqueued for the same action does not count as the schedule's own."""
    await make(do, overlap="skip")
    async with store.session() as session:
        await enqueue.enqueue(session, [NewTask("a")])
    await set_clock(sql, await hour_ago(sql))
    assert await fire_all(firing) == 1
