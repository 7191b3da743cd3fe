"""Delayed records in Postgres: put, replaced, cancelled, held, and fired in order by one at a time."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from typing import Any

import pytest

from penstock.compat import delayed_records
from penstock.compat.delayed_records import (
    KEY_WAIT_SECONDS,
    ROUND_BYTES,
    DelayedRecord,
    instant_of,
    key_of,
    ordering_key_of,
)
from penstock.db.notify import DELAYED_RECORDS, Listener, Notifier
from penstock.db.pool import Store
from penstock.db.statements import SQL
from penstock.protocol.checks import read_key
from penstock.runtime import metrics

SOURCE = "kafka:t"
PAST_MS = 1_000_000


def schedule(key: str, due_ms: int = PAST_MS, *, ordering_key: str = "o", **more: Any) -> DelayedRecord:
    record = json.dumps({"topic": "out", "value": more.pop("value", key)})
    return DelayedRecord(SOURCE, key.encode(), instant_of(due_ms), ordering_key, record, **more)


def soon_ms(seconds: float) -> int:
    return round((time.time() + seconds) * 1000)


async def put(store: Store, *wanted: DelayedRecord, replaces: bool = True) -> None:
    async with store.transaction() as session:
        await delayed_records.put(session, wanted, replaces=replaces)


def changes() -> Counter[str]:
    """Changes so far, by outcome."""
    outcomes = ("stored", "replaced", "known")
    return Counter({name: int(metrics.DELAYED_RECORD_CHANGES.labels(SOURCE, name)._value.get()) for name in outcomes})


async def fire(store: Store) -> int | None:
    async with store.transaction() as session:
        return await delayed_records.publish_due(session)


async def tasks(sql: Any) -> list[tuple[str, str, list[str]]]:
    """Live tasks in the order of their ids: state, ordering key, values of their records."""
    rows = await sql.fetch("select state::text, ordering_key, payload from penstock.task order by id")
    return [
        (row["state"], row["ordering_key"], [one["value"] for one in json.loads(row["payload"])["records"]])
        for row in rows
    ]


async def test_what_is_due_of_a_key_is_one_task_in_the_order_of_time_and_then_of_arrival(
    store: Store, sql: Any
) -> None:
    await put(store, schedule("c", PAST_MS + 2), schedule("b", PAST_MS + 1), schedule("x", ordering_key="other"))
    await put(store, schedule("a", PAST_MS), schedule("b2", PAST_MS + 1))
    assert await fire(store) == 5
    assert sorted(await tasks(sql)) == [
        ("SCHEDULED", "o", ["a", "b", "b2", "c"]),
        ("SCHEDULED", "other", ["x"]),
    ]
    assert await sql.fetchval("select count(*) from penstock.armed") == 0
    assert await fire(store) == 0


async def test_what_is_not_due_or_held_or_called_off_is_not_fired(store: Store, sql: Any) -> None:
    await put(
        store, schedule("later", soon_ms(60)), schedule("held", held=True, partition=3), schedule("gone"),
    )  # fmt: skip
    async with store.transaction() as session:
        assert await delayed_records.cancel(session, SOURCE, [b"gone", b"never"]) == {b"gone"}
    assert await fire(store) == 0
    async with store.transaction() as session:
        assert await session.value("release_held_records", SOURCE, 2, 100) == 0
        assert await session.value("release_held_records", SOURCE, 3, 100) == 1
    assert await fire(store) == 1
    assert [values for _, _, values in await tasks(sql)] == [["held"]]


async def test_a_schedule_is_replaced_or_known(store: Store, sql: Any) -> None:
    before = changes()
    await put(store, schedule("a", soon_ms(60), value="old"))
    assert changes() - before == {"stored": 1}
    await put(store, schedule("b"), schedule("a", value="new"))
    assert changes() - before == {"stored": 2, "replaced": 1}
    await put(store, schedule("a", value="other"), replaces=False)
    assert changes() - before == {"stored": 2, "replaced": 1, "known": 1}
    await put(store, schedule("a", value="other", variant=b"2"), replaces=False)
    assert changes() - before == {"stored": 3, "replaced": 1, "known": 1}
    assert await fire(store) == 3
    assert [values for _, _, values in await tasks(sql)] == [["b", "new", "other"]]


async def test_what_comes_due_behind_a_live_task_of_its_key_waits_for_it_and_then_goes_together(
    store: Store, sql: Any
) -> None:
    await put(store, schedule("first"))
    assert await fire(store) == 1
    await put(store, schedule("second", soon_ms(-0.05)), schedule("free", soon_ms(-0.05), ordering_key="p"))
    assert await fire(store) == 1  # the one whose key is free
    await put(store, schedule("third", soon_ms(-0.05)))
    assert await fire(store) == 0
    await sql.execute("delete from penstock.ordering_head where key = 'o'")  # as if the first had settled
    assert await fire(store) == 2
    assert [values for _, key, values in await tasks(sql) if key == "o"] == [["first"], ["second", "third"]]


async def test_what_has_waited_too_long_for_its_key_gets_in_line_behind_it(store: Store, sql: Any) -> None:
    await put(store, schedule("first"))
    assert await fire(store) == 1
    late_ms = soon_ms(-KEY_WAIT_SECONDS - 1)
    await put(store, schedule("third", late_ms + 1), schedule("second", late_ms), schedule("fourth", soon_ms(-0.05)))
    assert await fire(store) == 2
    assert await tasks(sql) == [("SCHEDULED", "o", ["first"]), ("WAITING", "o", ["second", "third"])]


async def test_a_last_record_goes_with_its_own_task(store: Store, sql: Any) -> None:
    await put(store, schedule("a"), schedule("b", PAST_MS + 1, last='{"topic":"t","value":null}'), schedule("c", 2))
    await fire(store)
    payloads = [json.loads(row[0]) for row in await sql.fetch("select payload from penstock.task order by id")]
    assert [([one["value"] for one in payload["records"]], payload.get("then")) for payload in payloads] == [
        (["c", "a"], None), (["b"], [{"topic": "t", "value": None}]),
    ]  # fmt: skip


async def test_many_of_one_key_are_cut_into_tasks_that_keep_the_order(store: Store, sql: Any) -> None:
    await put(store, *(schedule(f"{n:04}", PAST_MS + n, value=f"{n:04}") for n in range(450)))
    assert await fire(store) == 450
    found = [values for _, _, values in await tasks(sql)]
    assert [value for values in found for value in values] == [f"{n:04}" for n in range(450)]
    assert [len(values) for values in found] == [200, 200, 50]


async def test_a_round_takes_so_many_bytes(store: Store, sql: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delayed_records, "ROUND_BYTES", 100_000)
    await put(store, *(schedule(f"{n}", PAST_MS + n, ordering_key=f"{n}", value=f"{n}" * 40_000) for n in range(5)))
    await put(store, schedule("x", PAST_MS - 1, ordering_key="x", last='"' + "x" * 200_000 + '"'))
    assert [await fire(store) for _ in range(4)] == [1, 3, 2, 0]
    assert [values[0][:1] for _, _, values in await tasks(sql)] == ["x", "0", "1", "2", "3", "4"]


async def test_one_fires_at_a_time(store: Store) -> None:
    await put(store, schedule("a"))
    async with store.transaction() as first:
        assert await delayed_records.publish_due(first) == 1
        assert await fire(store) is None


async def test_a_round_that_dies_before_its_commit_fires_nothing_twice(store: Store, sql: Any) -> None:
    await put(store, schedule("a"))
    with pytest.raises(RuntimeError):
        async with store.transaction() as session:
            assert await delayed_records.publish_due(session) == 1
            raise RuntimeError
    assert await tasks(sql) == []
    assert await fire(store) == 1
    assert len(await tasks(sql)) == 1


async def test_one_that_postgres_refuses_is_stopped_and_harms_no_other(store: Store, sql: Any) -> None:
    await put(
        store,
        schedule("a"),
        DelayedRecord(SOURCE, b"bad", instant_of(PAST_MS), "p", "no json"),
        schedule("c", ordering_key="q"),
    )
    assert await fire(store) == 3
    assert sorted(values for _, _, values in await tasks(sql)) == [["a"], ["c"]]
    assert await sql.fetchval("select held from penstock.armed") is True


@pytest.mark.parametrize("is_analyzed", [False, True], ids=["fresh", "analyzed"])
async def test_a_claim_reads_what_it_takes_and_neither_the_rest_of_what_is_due_nor_the_future(
    sql: Any, is_analyzed: bool
) -> None:
    await sql.execute("set jit = off")
    await sql.execute("set enable_seqscan = off")  # as every connection of ours
    await sql.execute(
        "insert into penstock.armed (source, key, due_at, ordering_key, record) select 's', n::text::bytea,"
        " now() + (n - 20000) * interval '1 s', 'k' || n % 100, '{}' from generate_series(1, 40000) n"
    )
    if is_analyzed:
        await sql.execute("analyze penstock.armed")
    lines = await sql.fetch(
        "explain (analyze, timing off) " + SQL["claim_due_records"], 500, KEY_WAIT_SECONDS, ROUND_BYTES
    )
    plan = "\n".join(line[0] for line in lines)
    assert "Index Scan using armed_due" in plan
    assert "Sort" not in plan, plan
    assert [int(found) for found in re.findall(r"armed_due.*rows=(\d+)(?:\.\d+)? loops=1\)", plan)] == [500], plan


async def test_the_supervisor_fires_at_the_time_though_nobody_asks(store: Store, sql: Any) -> None:
    listener = Listener(store)
    notifier = Notifier(store, DELAYED_RECORDS)
    firing = delayed_records.side_tasks(store, Notifier(store), listener)
    running = [asyncio.create_task(part()) for part in (listener.run, notifier.run, firing["delayed records"])]
    due_ms = soon_ms(1.5)
    await put(store, schedule("a", due_ms))
    notifier.wake()
    async with asyncio.timeout(60):
        while not await sql.fetchval("select count(*) from penstock.task"):
            await asyncio.sleep(0.01)
    created = await sql.fetchval("select extract(epoch from created_at)::float8 from penstock.task")
    assert created * 1000 >= due_ms
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def test_keys_fit_into_an_index_and_times_into_a_column() -> None:
    assert key_of(b"x" * 1000) == b"x" * 1000
    assert len(key_of(b"x" * 5000)) == 39
    assert key_of(b"x" * 5000) != key_of(b"x" * 5001)
    assert ordering_key_of("kafka:t", "a") == "kafka:t:a"
    assert "\0" not in ordering_key_of("kafka:t", "a\0")
    assert len(ordering_key_of("kafka:t", "a" * 600)) < 100
    for given in ("a\nb", "a\x1fb", "a\0", "\N{GRINNING FACE}" * 480):
        key = read_key(ordering_key_of("clockwork", given), "key")
        assert key is not None
        assert key.startswith("clockwork#")
    assert instant_of(-5).year == 1970
    assert instant_of(2**63 - 1).year == 9999
    assert instant_of(1_500).microsecond == 500_000
