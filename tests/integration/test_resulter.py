from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.api.rejected import retry_rejected
from penstock.brokers.base import MAX_RECEIVES, Depth
from penstock.brokers.sqs import SqsQueue
from penstock.cli.app import app
from penstock.db.pool import Store
from penstock.limits.model import RouteSetParams
from penstock.local.postgres import EmbeddedPostgres
from penstock.payloads.codec import PayloadCodec
from penstock.protocol.errors import HANDLER_ERROR, TOO_LARGE, Locked, Unavailable
from penstock.protocol.reports import (
    NO_HINTS,
    BackoffHint,
    Hints,
    encode_error,
    encode_notification,
    encode_progress,
    encode_result,
    encode_shared_result,
)
from penstock.protocol.requests import join_batch
from penstock.protocol.retry import Backoff
from penstock.protocol.sealed import SEALED_ENCODING, Reference, Sealed, encode_reference, encode_sealed
from penstock.protocol.task import Claimed, NewTask
from penstock.resulter import Resulter
from penstock.results.apply import ERROR_LIMIT_BYTES, delay_after
from penstock.settings.model import Settings, load_settings
from penstock.settings.payload_texts import new_key
from penstock.tasks import claim as claims
from penstock.tasks import enqueue, settle
from tests.claims import claim_id, pack_id
from tests.integration.doors import postgres_away, put, rejected, sample
from tests.integration.rules import set_route

TaskOf = Callable[[int], Any]
EMPTY = Depth(0, 0, 0)


@pytest.fixture
def resulter(store: Store, results: SqsQueue, settings: Settings) -> Resulter:
    return Resulter(store=store, results=results, settings=settings)


async def claim(store: Store, limit: int = 100, *, now: datetime | None = None) -> list[Claimed]:
    async with store.session() as session:
        dispatch = await claims.claim(session, limit, now=now)
        assert dispatch is not None
        await claims.confirm(session, dispatch.id)
    return dispatch.tasks


async def claimed(store: Store, *tasks: NewTask) -> list[Claimed]:
    """New tasks, claimed; in the order in which they were given."""
    async with store.transaction() as session:
        await enqueue.enqueue(session, tasks)
    return sorted(await claim(store), key=lambda task: task.id)


def name(task: Claimed) -> str:
    return claim_id(task.id, task.claim)


def error(task: Claimed, message: str = "boom", **data: Any) -> str:
    return encode_error(name(task), HANDLER_ERROR, message, {"type": "ValueError", **data})


async def drained(resulter: Resulter) -> int:
    total = 0
    while came := await resulter.run_once():
        total += came
    return total


async def report(resulter: Resulter, results: SqsQueue, *bodies: str) -> None:
    """Put bodies into the results queue and have all of them recorded and deleted."""
    await put(results, *bodies)
    assert await drained(resulter) == len(bodies)
    assert await results.depth() == EMPTY


async def states(task_of: TaskOf, tasks: Sequence[Claimed]) -> list[str]:
    return [(await task_of(task.id))["state"] for task in tasks]


# Run times


async def test_run_times_are_added_up_for_the_scheduler_beside_the_results(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    await report(
        resulter,
        results,
        join_batch(
            [encode_result(name(task), "1"), encode_notification("run_times", actions={"a": (2, 0.5), "b": (1, 4.0)})]
        ),
        encode_notification("run_times", actions={"a": (2, 1.5)}),
    )
    assert (await task_of(task.id))["state"] == "SUCCESS"
    async with store.session() as session:
        rows = await session.fetch("read_throughput", 60)
        assert sorted((row["action"], row["ended"], row["timed"], row["seconds"]) for row in rows) == [
            ("a", 1, 4, 2.0), ("b", 0, 1, 4.0),
        ]  # fmt: skip


async def test_run_times_that_make_no_sense_are_kept_as_rejected_and_harm_nobody(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    times: list[tuple[int, float]] = [(-1, 2.0), (2**63 - 1, 1.0), (1, 1e308)]
    junk = [encode_notification("run_times", actions={"a": one}) for one in times]
    await report(resulter, results, join_batch([*junk, encode_result(name(task), "1")]))
    assert (await task_of(task.id))["state"] == "SUCCESS"
    assert [body for _, body, _ in await rejected(store)] == junk
    async with store.session() as session:
        (row,) = await session.fetch("read_throughput", 60)
        assert (row["action"], row["ended"], row["timed"], row["seconds"]) == ("a", 1, 0, 0.0)


async def test_what_postgres_cannot_store_is_replaced_in_the_name_of_a_timed_action(
    resulter: Resulter, results: SqsQueue, store: Store
) -> None:
    await report(
        resulter, results, encode_notification("run_times", actions={"a\0b": (1, 1.0), "half \ud800": (1, 1.0)})
    )
    async with store.session() as session:
        assert {row["action"] for row in await session.fetch("read_throughput", 60)} == {"a\ufffdb", "half \ufffd"}


# Success


async def test_a_result_settles_its_task_with_the_text_that_came(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    before = sample("penstock_transitions_total", action="a", state="SUCCESS")
    await report(resulter, results, encode_result(name(task), '{"n": 1e400, "t":"é\\u0041"}'))
    row = await task_of(task.id)
    assert (row["state"], row["result"], row["attempts"]) == ("SUCCESS", '{"n": 1e400, "t":"é\\u0041"}', 1)
    assert sample("penstock_transitions_total", action="a", state="SUCCESS") == before + 1


@pytest.mark.parametrize("result", ["null", "false", "0", '""', "[]"])
async def test_an_empty_result_is_a_result(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf, result: str
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    await report(resulter, results, encode_result(name(task), result))
    row = await task_of(task.id)
    assert (row["state"], row["result"]) == ("SUCCESS", result)


async def test_what_postgres_cannot_hold_as_text_is_replaced_not_lost(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    good, bad = await claimed(store, NewTask("a"), NewTask("a"))
    await report(
        resulter, results, encode_result(name(good), r'"\u0000 \ud800"'), error(bad, "nul \0 and half \udc00 pair")
    )
    assert (await task_of(good.id))["result"] == r'"\ufffd \ufffd"'
    assert json.loads((await task_of(bad.id))["error"])["message"] == "nul \ufffd and half \ufffd pair"


async def test_a_mixed_batch_settles_each_task_by_its_own(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    tasks = await claimed(store, *(NewTask("a", max_attempts=1 if n == 2 else 10) for n in range(5)))
    done, failed, given_up, alive, silent = tasks
    entries = [
        encode_result(name(done), "1"),
        '{"jsonrpc":"2.0","result":1,"id":"nobody"}',
        error(failed),
        error(given_up),
        encode_progress(name(alive), 40, "well on the way"),
        encode_result(claim_id(silent.id, silent.claim + 1), "1"),
        encode_result(claim_id(999_999, 1), "1"),
    ]
    stale = sample("penstock_stale_results_total")
    await report(resulter, results, f"[{','.join(entries)}]", "not json")
    assert await states(task_of, tasks) == ["SUCCESS", "ERROR", "CRITICAL_ERROR", "ACQUIRED", "ACQUIRED"]
    assert [source for source, _, _ in await rejected(store)] == ["results", "results"]
    assert sample("penstock_stale_results_total") == stale + 2


async def test_progress_is_shown_and_counts_as_a_sign_of_life(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    shown, quiet = await claimed(store, NewTask("a"), NewTask("a"))
    await report(resulter, results, encode_progress(name(shown), 12.5, "half é"))
    assert json.loads((await task_of(shown.id))["progress"]) == {"percent": 12.5, "note": "half é"}
    await report(resulter, results, encode_progress(name(shown)))  # a bare heartbeat leaves it
    assert json.loads((await task_of(shown.id))["progress"]) == {"percent": 12.5, "note": "half é"}
    async with store.session() as session:
        later = datetime.now(UTC) + timedelta(seconds=61)
        rows = await session.fetch("find_stale", 60, 10, later, None, None)
        stale = {row["id"]: row["taken"] for row in rows}
    assert stale == {shown.id: True, quiet.id: False}


async def test_progress_of_an_older_claim_changes_nothing(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    (old,) = await claimed(store, NewTask("a"))
    async with store.session() as session:
        await claims.release(session, [(old.id, old.claim)])
    (new,) = await claim(store)
    await report(resulter, results, f"[{encode_progress(name(new), 2)},{encode_progress(name(old), 99)}]")
    assert json.loads((await task_of(old.id))["progress"])["percent"] == 2


# Failure


async def test_a_failed_task_waits_longer_after_each_attempt_and_is_given_up_after_exactly_ten(
    store: Store, results: SqsQueue, settings: Settings, task_of: TaskOf
) -> None:
    resulter = Resulter(
        store=store,
        results=results,
        settings=settings.model_copy(update={"retry_base_seconds": 5.0, "retry_cap_seconds": 3600.0}),
    )
    (task,) = await claimed(store, NewTask("a"))
    delays = []
    for attempt in range(1, 11):
        await report(resulter, results, error(task, f"failure {attempt}"))
        row = await task_of(task.id)
        assert row["attempts"] == attempt
        if attempt < 10:
            assert row["state"] == "ERROR"
            delays.append((row["run_at"] - row["updated_at"]).total_seconds())
            (task,) = await claim(store, now=row["run_at"] + timedelta(seconds=1))
    assert row["state"] == "CRITICAL_ERROR"
    assert delays == sorted(delays)
    for attempt, delay in enumerate(delays, 1):
        nominal = 5.0 * 2 ** (attempt - 1)
        assert 0.8 * nominal - 0.001 <= delay <= nominal + 0.001
    failures = json.loads(row["failures"])
    assert [(f["attempt"], f["error"]["message"]) for f in failures] == [(n, f"failure {n}") for n in range(1, 11)]
    async with store.session() as session:
        assert await claims.claim(session, 10, now=datetime.now(UTC) + timedelta(days=365)) is None


async def test_the_whole_error_is_recorded(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    await report(resulter, results, error(task, "boom", traceback="Traceback ...", more={"a": [1]}))
    assert json.loads((await task_of(task.id))["error"]) == {
        "code": HANDLER_ERROR,
        "message": "boom",
        "data": {"type": "ValueError", "traceback": "Traceback ...", "more": {"a": [1]}},
    }


@pytest.mark.parametrize("filler", ["x" * 100_000, "9" * 100_000], ids=["text", "a number"])
async def test_an_error_above_the_limit_keeps_its_code_and_message(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf, filler: str
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    value = filler if filler.isdigit() else json.dumps(filler)
    body = f'{{"code":-32000,"message":"boom","data":{{"n":{value}}}}}'
    await report(resulter, results, f'{{"jsonrpc":"2.0","error":{body},"id":"{name(task)}"}}')
    row = await task_of(task.id)
    kept = json.loads(row["error"])
    assert (row["state"], kept["code"], kept["message"]) == ("ERROR", -32000, "boom")
    assert kept["data"] == {"truncated_from": len(body)}
    assert len(row["error"]) < ERROR_LIMIT_BYTES


async def test_hints_in_an_error_steer_the_retry(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    names = ("final", "capped", "later", "own policy", "nonsense")
    final, capped, later, own, nonsense = tasks = await claimed(store, *(NewTask(name) for name in names))
    policy = {"base_seconds": 100.0, "factor": 3.0, "cap_seconds": 1000.0, "jitter": 0.0}
    await report(
        resulter,
        results,
        error(final, final=True),
        error(capped, max_attempts=1),
        error(later, retry_after=77.0),
        error(own, backoff=policy),
        error(nonsense, retry_after=-1, max_attempts=0, backoff=policy | {"factor": 0.1}),
    )
    assert await states(task_of, tasks) == ["CRITICAL_ERROR", "CRITICAL_ERROR", "ERROR", "ERROR", "ERROR"]
    waits = []
    for task in (later, own, nonsense):
        row = await task_of(task.id)
        waits.append((row["run_at"] - row["updated_at"]).total_seconds())
    assert waits[:2] == [77.0, 100.0]
    assert waits[2] <= 0.05  # the setting's own


@pytest.mark.parametrize(
    ("attempt", "max_attempts", "hints", "expected"),
    [
        (9, 10, NO_HINTS, 256.0 * 5),
        (10, 10, NO_HINTS, None),
        (11, 10, NO_HINTS, None),
        (1, 1, Hints(retry_after=3.0), None),
        (3, 10, Hints(max_attempts=3), None),
        (2, 10, Hints(max_attempts=3), 10.0),
        (2, 2, Hints(max_attempts=99), None),
        (1, 10, Hints(final=True, retry_after=3.0), None),
        (1, 10, Hints(retry_after=0.0), 0.0),
        (1, 10, Hints(retry_after=1e300), 5.0),
        (3, 10, Hints(backoff=BackoffHint(1.0, 10.0, 50.0, 0.0)), 50.0),
        (1, 10, Hints(backoff=BackoffHint(0.0, 10.0, 50.0, 0.0)), 5.0),
    ],
)
def test_the_delay_after_an_attempt(attempt: int, max_attempts: int, hints: Hints, expected: float | None) -> None:
    assert delay_after(attempt, max_attempts, hints, Backoff(5.0, 2.0, 3600.0, 0.0)) == expected


async def test_a_result_above_the_limit_ends_its_task_and_names_the_limit(
    store: Store, results: SqsQueue, settings: Settings, task_of: TaskOf
) -> None:
    resulter = Resulter(store=store, results=results, settings=settings.model_copy(update={"result_limit_bytes": 100}))
    fits, above = await claimed(store, NewTask("a"), NewTask("a"))
    await report(
        resulter,
        results,
        encode_result(name(fits), json.dumps("x" * 98)),
        encode_result(name(above), json.dumps("é" * 50, ensure_ascii=False)),
    )
    assert await states(task_of, [fits, above]) == ["SUCCESS", "CRITICAL_ERROR"]
    recorded = json.loads((await task_of(above.id))["error"])
    assert recorded["code"] == TOO_LARGE
    assert "102 bytes; the limit is 100" in recorded["message"]


# The fence


async def test_a_result_that_comes_again_is_a_no_op(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    body = encode_result(name(task), '"first"')
    await report(resulter, results, body)
    await report(resulter, results, body, encode_result(name(task), '"second"'), error(task))
    row = await task_of(task.id)
    assert (row["state"], row["result"], row["failures"]) == ("SUCCESS", '"first"', None)
    assert await rejected(store) == []


async def test_a_result_and_an_error_of_one_claim_at_once_are_one_outcome(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    await report(
        resulter, results, f"[{encode_result(name(task), '1')},{error(task)},{encode_result(name(task), '2')}]"
    )
    row = await task_of(task.id)
    assert (row["state"], row["result"]) == ("SUCCESS", "1")


@pytest.mark.parametrize("order", [0, 1])
async def test_of_two_claims_in_one_batch_only_the_newest_counts(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf, order: int
) -> None:
    (old,) = await claimed(store, NewTask("a"))
    async with store.session() as session:
        await claims.release(session, [(old.id, old.claim)])
    (new,) = await claim(store)
    entries = [encode_result(name(old), '"old"'), encode_result(name(new), '"new"')]
    await report(resulter, results, f"[{','.join(entries[::-1] if order else entries)}]")
    row = await task_of(old.id)
    assert (row["state"], row["result"]) == ("SUCCESS", '"new"')


async def test_a_late_result_after_repair_is_ignored(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    (old,) = await claimed(store, NewTask("a"))
    await report(resulter, results, error(old, retry_after=0.0))
    (new,) = await claim(store)
    await report(resulter, results, encode_result(name(old), '"late"'))
    assert (await task_of(old.id))["state"] == "ACQUIRED"
    await report(resulter, results, encode_result(name(new), '"right"'))
    assert (await task_of(old.id))["result"] == '"right"'


async def test_results_of_cancelled_and_unknown_tasks_are_ignored(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    async with store.transaction() as session:
        await settle.cancel(session, [task.id])
    before = sample("penstock_stale_results_total")
    await report(resulter, results, encode_result(name(task), "1"), encode_result(claim_id(2**63 - 1, 1), "1"))
    assert (await task_of(task.id))["state"] == "CANCELLED"
    assert sample("penstock_stale_results_total") == before + 2
    assert await rejected(store) == []


# The older convention: a bare task id, the attempt inside


@pytest.fixture
def older(store: Store, results: SqsQueue, settings: Settings) -> Resulter:
    return Resulter(store=store, results=results, settings=settings.model_copy(update={"results_bare_ids": True}))


@pytest.mark.parametrize(
    "body",
    [
        '{{"jsonrpc":"2.0","result":{{"attempt":1,"x":1}},"id":{id}}}',
        '{{"jsonrpc":"2.0","result":{{"attempt":"1"}},"id":"{id}"}}',
        '{{"id":"{id}","result":{{"attempt":1}},"error":null}}',
    ],
)
async def test_a_result_in_the_older_convention_matches_the_current_attempt(
    older: Resulter, results: SqsQueue, store: Store, task_of: TaskOf, body: str
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    await report(older, results, body.format(id=task.id))
    assert (await task_of(task.id))["state"] == "SUCCESS"


@pytest.mark.parametrize("place", ['"attempt":1', '"data":{"attempt":"1"}'])
async def test_an_error_in_the_older_convention_matches_the_current_attempt(
    older: Resulter, results: SqsQueue, store: Store, task_of: TaskOf, place: str
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    await report(older, results, f'{{"jsonrpc":"2.0","error":{{"code":1,"message":"x",{place}}},"id":{task.id}}}')
    assert (await task_of(task.id))["state"] == "ERROR"


@pytest.mark.parametrize("order", [1, -1])
async def test_an_older_attempt_beside_the_current_one_is_ignored(
    older: Resulter, results: SqsQueue, store: Store, task_of: TaskOf, order: int
) -> None:
    (old,) = await claimed(store, NewTask("a"))
    await report(older, results, error(old, retry_after=0.0))
    await claim(store)
    entries = [f'{{"jsonrpc":"2.0","result":{{"attempt":{n}}},"id":{old.id}}}' for n in (1, 2, 3, -5, 2**70)]
    await report(older, results, f"[{','.join(entries[::order])}]")
    row = await task_of(old.id)
    assert (row["state"], json.loads(row["result"])) == ("SUCCESS", {"attempt": 2})


# What was made up


def shared(tasks: Sequence[Claimed], *, places: Sequence[int] | None = None, result: str = "null") -> str:
    """A shared result of the tasks at these places, of tasks of one claim in one message; of all without places."""
    name_of_all = pack_id(tasks[0].claim, [task.id for task in tasks])
    return encode_shared_result(name_of_all, range(len(tasks)) if places is None else places, result)


async def test_a_shared_result_settles_each_of_its_tasks(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    tasks = await claimed(store, *(NewTask("a") for _ in range(10)))
    entries = [
        shared(tasks, places=[0, 1, 2, 5, 6, 7], result='{"n": 1}'),
        encode_notification("run_times", actions={"a": (7, 0.5)}),
        error(tasks[3]),
        shared(tasks, places=[8, 9]),
    ]
    before = sample("penstock_transitions_total", action="a", state="SUCCESS")
    await report(resulter, results, join_batch(entries))
    rows = [await task_of(task.id) for task in tasks]
    ended = ["SUCCESS"] * 3 + ["ERROR", "ACQUIRED"] + ["SUCCESS"] * 5
    assert [row["state"] for row in rows] == ended
    assert [row["result"] for row in rows if row["state"] == "SUCCESS"] == ['{"n": 1}'] * 6 + ["null"] * 2
    assert sample("penstock_transitions_total", action="a", state="SUCCESS") == before + 8
    assert await rejected(store) == []


async def test_a_shared_result_counts_for_those_tasks_alone_that_its_claim_still_holds(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    tasks = await claimed(store, *(NewTask("a") for _ in range(10)))
    async with store.transaction() as session:
        await settle.cancel(session, [tasks[0].id])
        await claims.release(session, [(tasks[1].id, tasks[1].claim)])
    (again,) = await claim(store)
    stale = sample("penstock_stale_results_total")
    entries = [shared(tasks), encode_result(name(tasks[5]), "1"), encode_result(name(again), "2"), shared(tasks)]
    await report(resulter, results, join_batch(entries), shared(tasks, places=[2]))
    assert await states(task_of, tasks) == ["CANCELLED"] + ["SUCCESS"] * 9
    assert [(await task_of(task.id))["result"] for task in tasks[1:3]] == ["2", "null"]
    assert sample("penstock_stale_results_total") == stale + 10 + 3 + 1
    assert await rejected(store) == []


async def test_one_task_of_a_shared_result_that_postgres_refuses_or_another_locks_harms_no_other(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf, sql: Any
) -> None:
    tasks = await claimed(store, *(NewTask("a") for _ in range(10)))
    await sql.execute("""
        create function public.refuse_one() returns trigger language plpgsql as $$
        begin
          if old.id = tg_argv[0]::bigint then raise exception 'not this one' using errcode = '22023'; end if;
          return old;
        end $$""")
    await sql.execute(
        "create trigger refuse_one before delete on penstock.task for each row"
        f" execute function public.refuse_one({tasks[2].id})"
    )
    async with store.transaction() as session:
        await session.fetch("hold_live_tasks", [tasks[7].id], ["ACQUIRED"])
        await put(results, shared(tasks))
        with pytest.raises(Locked):
            await resulter.run_once()
        assert await states(task_of, [*tasks[:2], *tasks[3:7], *tasks[8:]]) == ["SUCCESS"] * 8
    deadline = time.monotonic() + 30
    while (await task_of(tasks[7].id))["state"] != "SUCCESS":
        assert time.monotonic() < deadline
        await resulter.run_once()
    assert (await task_of(tasks[2].id))["state"] == "ERROR"
    ((_, body, reason),) = await rejected(store)
    assert json.loads(body) == {"jsonrpc": "2.0", "result": None, "id": name(tasks[2])}
    assert "not this one" in reason


async def test_a_locked_task_of_a_shared_result_is_not_forgotten_by_an_outage_behind_it(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = await claimed(store, *(NewTask("a") for _ in range(4)))
    (last,) = await claimed(store, NewTask("b"))
    record = resulter._record

    async def lose_the_last(part: Sequence[Any], *, hurried: bool) -> None:
        if [getattr(one, "task_id", None) for one in part] == [last.id]:
            monkeypatch.setattr(resulter, "_record", record)
            raise Unavailable("Postgres went away")
        await record(part, hurried=hurried)

    monkeypatch.setattr(resulter, "_record", lose_the_last)
    async with store.transaction() as session:
        await session.fetch("hold_live_tasks", [tasks[1].id], ["ACQUIRED"])
        await put(results, join_batch([shared(tasks), encode_result(name(last), "1")]))
        with pytest.raises(Unavailable, match="went away"):
            await resulter.run_once()
    for _ in range(2):
        await resulter.run_once()
    assert await states(task_of, [*tasks, last]) == ["SUCCESS"] * 5


async def test_a_shared_result_is_encrypted_for_each_task(
    store: Store, results: SqsQueue, settings: Settings, task_of: TaskOf
) -> None:
    keyed = load_settings(**settings.model_dump() | {"payload_keys": new_key()})
    encrypting = Store(settings.require_database_url, codec=PayloadCodec(keyed))
    tasks = await claimed(store, *(NewTask("a") for _ in range(8)))
    await put(results, shared(tasks, result='"secret"'))
    try:
        assert await Resulter(store=encrypting, results=results, settings=keyed).run_once() == 1
    finally:
        await encrypting.close()
    rows = [await task_of(task.id) for task in tasks]
    assert {row["state"] for row in rows} == {"SUCCESS"}
    assert len({row["result"] for row in rows}) == 8
    assert not any("secret" in row["result"] for row in rows)


async def test_nothing_but_the_id_that_was_sent_out_settles_a_task(
    resulter: Resulter, results: SqsQueue, store: Store, sql: Any, task_of: TaskOf
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    plain = f"{task.id}:{task.claim}"
    wrong = claim_id(task.id, task.claim + 1).rpartition(":")[2]
    spawn = '"spawn":[{"action":"http.request","payload":{"url":"http://169.254.169.254/"}}]'
    forged = [
        encode_shared_result(f"pack:{task.claim}:{task.id}", [0], "1"),
        f'{{"jsonrpc":"2.0","result":{{"attempt":1}},{spawn},"id":{task.id}}}',
        *(f'{{"jsonrpc":"2.0","result":1,{spawn},"id":"{made_up}"}}' for made_up in (plain, f"{plain}:{wrong}")),
        encode_error(plain, HANDLER_ERROR, "x", {"final": True}),
        encode_progress(plain, 99, "forged"),
        encode_notification("wait", id=plain, token="t", timeout=3600),
    ]
    await report(resulter, results, *forged)
    rows = await sql.fetch("select state::text, heartbeat_at, progress from penstock.task where id = $1", task.id)
    assert [tuple(row) for row in rows] == [("ACQUIRED", None, None)]
    assert sorted(body for _, body, _ in await rejected(store)) == sorted(forged)
    async with store.session() as session:
        assert await claims.claim(session, 10) is None
    await report(resulter, results, encode_result(name(task), "1"))
    assert (await task_of(task.id))["state"] == "SUCCESS"


async def test_what_was_made_up_is_refused_when_it_is_replayed_too(
    resulter: Resulter, results: SqsQueue, store: Store, settings: Settings, task_of: TaskOf
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    await report(resulter, results, encode_result(f"{task.id}:{task.claim}", "1"))
    async with store.session() as session:
        (kept,) = await session.fetch("list_rejected_page", None, 10, None, 10**9)
    replayed = await retry_rejected(store, [kept["id"]], settings)
    assert (replayed.retried, len(replayed.still_rejected)) == (0, 1)
    assert (await task_of(task.id))["state"] == "ACQUIRED"


async def test_a_new_key_counts_at_once_and_the_one_before_for_as_long_as_it_was_given(
    resulter: Resulter, results: SqsQueue, store: Store, settings: Settings, task_of: TaskOf
) -> None:
    tasks = await claimed(store, NewTask("a"), NewTask("a"), NewTask("a"))
    await report(resulter, results, encode_result(name(tasks[0]), "1"))
    async with store.session() as session:
        assert await session.value("change_claim_key", b"another key of claim ids in here", 3600.0) == 1
    scheduler = Store(settings.require_database_url)
    try:
        signed = (await scheduler.read_fence()).name(tasks[1].id, tasks[1].claim)
    finally:
        await scheduler.close()
    assert signed != name(tasks[1])
    await report(resulter, results, encode_result(signed, "1"), encode_result(name(tasks[2]), "1"))
    assert await states(task_of, tasks) == ["SUCCESS"] * 3
    async with store.session() as session:
        assert await session.value("change_claim_key", b"the key after the others leaked!", 0.0) == 2
    await store.read_fence(older_than_seconds=0)
    (late,) = await claimed(store, NewTask("a"))
    await report(resulter, results, encode_result(name(late), "1"))
    assert (await task_of(late.id))["state"] == "ACQUIRED"


def test_the_command_makes_a_key_and_says_how_long_the_older_ones_count(
    database_url: str, postgres: EmbeddedPostgres
) -> None:
    database = database_url.rsplit("/", 1)[1].partition("?")[0]
    ask = "select count(*) || ' ' || count(*) filter (where accepted_until is null) from penstock.claim_key"
    made = CliRunner().invoke(app, ["claim-key", "--json", "--database-url", database_url])
    assert (made.exit_code, json.loads(made.stdout)) == (0, {"older": 1, "accepted_seconds": 14 * 86_400.0})
    assert postgres.fetch_value(ask, database=database) == "2 1"
    command = ["claim-key", "--accept-older-days", "0", "--database-url", database_url]
    assert "2 older keys are accepted for 0 days" in CliRunner().invoke(app, command).stdout
    accepted = "select count(*) from penstock.claim_key where accepted_until is null or accepted_until > now()"
    assert postgres.fetch_value(accepted, database=database) == 1


# What a worker has sealed


def kept_as_object(task: Claimed, size: int, name: str = f"20260101/{'a' * 32}") -> str:
    reference = encode_reference(Reference(name, None, size, "b" * 64))
    return encode_result(claim_id(task.id, task.claim), reference, encoding=SEALED_ENCODING)


async def test_a_sealed_result_is_measured_here_and_not_by_its_worker(
    results: SqsQueue, store: Store, settings: Settings, task_of: TaskOf
) -> None:
    limits = {"result_limit_bytes": 1000, "payload_max_bytes": 5000, "payload_bucket": "s3://bucket"}
    resulter = Resulter(store=store, results=results, settings=settings.model_copy(update=limits))
    fits, huge, sealed_fits, sealed_large = await claimed(store, *(NewTask("a") for _ in range(4)))
    sealed = {
        task: encode_result(name(task), encode_sealed(Sealed("0" * 16, "A" * length)), encoding=SEALED_ENCODING)
        for task, length in ((sealed_fits, 1300), (sealed_large, 2000))
    }
    bodies = kept_as_object(fits, 5000), kept_as_object(huge, 10**12 - 1, f"20260101/{'c' * 32}")
    await report(resulter, results, *bodies, *sealed.values())
    assert await states(task_of, [fits, sealed_fits]) == ["SUCCESS"] * 2
    assert await states(task_of, [huge, sealed_large]) == ["CRITICAL_ERROR"] * 2
    for task, shown in ((huge, "999999999999 bytes"), (sealed_large, "bytes; the limit is 1533")):
        (failure,) = json.loads((await task_of(task.id))["failures"])
        assert failure["error"]["code"] == TOO_LARGE
        assert shown in failure["error"]["message"]


async def test_a_result_that_names_the_object_of_another_task_is_a_failed_attempt(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    victim, thief, own = await claimed(store, *(NewTask("a") for _ in range(3)))
    await report(resulter, results, kept_as_object(victim, 10))
    await report(resulter, results, kept_as_object(thief, 10), kept_as_object(own, 10, f"20260101/{'d' * 32}"))
    assert await states(task_of, [victim, thief, own]) == ["SUCCESS", "ERROR", "SUCCESS"]
    (failure,) = json.loads((await task_of(thief.id))["failures"])
    assert "object of another task" in failure["error"]["message"]


# What comes with a result


ROUTES = [
    RouteSetParams("sandbox", "q-sandbox", ["sandbox.*"], {}),
    RouteSetParams("eu", "q-eu", ["*"], {"region": "eu"}, position=1),
]


@pytest.mark.parametrize(
    ("spawned", "spawn_actions", "stray"),
    [
        ([{"action": "sandbox.b"}], (), None),
        ([{"action": "mail"}], (), "mail"),
        ([{"action": "sandbox.b"}, {"action": "http.request"}], (), "http.request"),
        ([{"action": "sandbox.b", "compensate": "http.request"}], (), "http.request"),
        ([{"action": "mail"}], ("m*",), None),
        ([{"action": "mail", "labels": {"region": "eu"}}], ("http.*",), "mail"),
    ],
)
async def test_a_task_spawns_what_goes_by_its_own_route_and_what_the_setting_allows(
    results: SqsQueue, store: Store, settings: Settings, task_of: TaskOf,
    spawned: list[dict[str, Any]], spawn_actions: tuple[str, ...], stray: str | None,
) -> None:  # fmt: skip
    (task,) = await claimed(store, NewTask("sandbox.a"))
    async with store.transaction() as session:
        for route in ROUTES:
            await set_route(session, route)
    resulter = Resulter(
        store=store, results=results, settings=settings.model_copy(update={"spawn_actions": spawn_actions})
    )
    await report(resulter, results, encode_result(name(task), "1", [json.dumps(one) for one in spawned]))
    row = await task_of(task.id)
    if stray is None:
        assert row["state"] == "SUCCESS"
        return
    assert row["state"] == "CRITICAL_ERROR"  # its next attempt would spawn the same
    (failure,) = json.loads(row["failures"])
    assert failure["error"]["data"]["type"] == "BadChildren"
    assert repr(stray) in failure["error"]["message"]
    assert "PENSTOCK_SPAWN_ACTIONS" in failure["error"]["message"]


async def test_without_routes_a_task_spawns_any_action(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    await report(resulter, results, encode_result(name(task), "1", ['{"action":"b"}', '{"action":"c"}']))
    assert sorted(spawned.action for spawned in await claim(store)) == ["b", "c"]


# What is refused


REFUSED = {
    "not json": ("{nope", "not a JSON-RPC response"),
    "no json array": ("[{},", "Parse error"),
    "empty batch": ("[]", "empty batch"),
    "a number": ("7", "not a JSON-RPC response"),
    "deep nesting": (f'{{"jsonrpc":"2.0","result":{"[" * 10_000 + "]" * 10_000},"id":"%s"}}', "recursion"),
    "50,000 entries": ("[" + ",".join(["{}"] * 50_000) + "]", "50000"),
    "both": ('{"jsonrpc":"2.0","result":1,"error":{"code":1,"message":"x"},"id":"%s"}', "both result and error"),
    "neither": ('{"jsonrpc":"2.0","id":"%s"}', "neither result nor error"),
    "no id": ('{"jsonrpc":"2.0","result":1}', "no id"),
    "id null": ('{"jsonrpc":"2.0","result":1,"id":null}', "holds no id"),
    "strange id": ('{"jsonrpc":"2.0","result":1,"id":"abc"}', "'abc' is not <task id>:<claim>"),
    "id beyond 64 bits": ('{"jsonrpc":"2.0","result":1,"id":"99999999999999999999:1"}', "is not <task id>:<claim>"),
    "bare id": ('{"jsonrpc":"2.0","result":{"attempt":1},"id":"7"}', "PENSTOCK_RESULTS_BARE_IDS=true"),
    "error is text": ('{"jsonrpc":"2.0","error":"boom","id":"%s"}', "not a JSON-RPC response"),
    "error without message": ('{"jsonrpc":"2.0","error":{"code":1},"id":"%s"}', "message"),
    "a request": ('{"jsonrpc":"2.0","method":"enqueue","params":{},"id":1}', "run_times and announce are known"),
    "progress without id": ('{"jsonrpc":"2.0","method":"progress","params":{"percent":4}}', "id"),
    "progress of a strange id": ('{"jsonrpc":"2.0","method":"progress","params":{"id":"7"}}', "is not <task id>"),
    "NaN": ('{"jsonrpc":"2.0","result":NaN,"id":"%s"}', "not a JSON-RPC response"),
    "a token that is not ASCII": (encode_shared_result("pack:1:1:é", [0], "null"), "the token of id pack:1:1 is of no"),
}  # fmt: skip


async def test_unreadable_results_are_kept_with_their_reason_and_harm_no_neighbour(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    guilty, *good = await claimed(store, *(NewTask("a") for _ in range(len(REFUSED) + 1)))
    bodies = {what: body % name(guilty) if "%s" in body else body for what, (body, _) in REFUSED.items()}
    pairs = zip(bodies.values(), good, strict=True)
    await report(resulter, results, *(text for body, task in pairs for text in (body, encode_result(name(task), "1"))))
    assert set(await states(task_of, good)) == {"SUCCESS"}
    assert (await task_of(guilty.id))["state"] == "ACQUIRED"
    kept = {body: reason for source, body, reason in await rejected(store) if source == "results"}
    assert len(kept) == len(REFUSED)
    for what, body in bodies.items():
        assert REFUSED[what][1] in kept[body], what
        assert len(kept[body]) < 600


async def test_an_error_that_postgres_cannot_hold_is_a_failed_attempt_and_kept_as_it_came(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    """1e400000 is JSON, but beyond the numbers of jsonb."""
    guilty, *good = await claimed(store, *(NewTask("a") for _ in range(8)))
    body = f'{{"id": "{name(guilty)}", "error": {{"code": 1, "message": "x", "data": {{"n": 1e400000}}}}, "more": 1}}'
    entries = [body, *(encode_result(name(task), "1") for task in good)]
    await report(resulter, results, f"[{','.join(entries)}]", encode_progress(name(guilty), 3))
    assert set(await states(task_of, good)) == {"SUCCESS"}
    row = await task_of(guilty.id)
    assert row["state"] == "ERROR"
    assert "cannot be stored" in json.loads(row["error"])["message"]
    ((source, kept, why),) = await rejected(store)
    assert (source, kept) == ("results", body)
    assert "Postgres rejected" in why


# Exactly once into Postgres


async def test_nothing_is_lost_or_used_up_while_postgres_is_away(
    resulter: Resulter,
    results: SqsQueue,
    store: Store,
    task_of: TaskOf,
    postgres: EmbeddedPostgres,
    database_url: str,
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    await put(results, encode_result(name(task), "1"))
    async with postgres_away(postgres, database_url):
        for _ in range(3 * MAX_RECEIVES):  # each receive brings a message nearer to the dead-letter queue
            with pytest.raises(Unavailable):
                await resulter.run_once()
        assert await results.depth() == Depth(visible=1, in_flight=0, delayed=0)
    assert await resulter.run_once() == 1
    assert (await task_of(task.id))["state"] == "SUCCESS"


async def test_what_was_stored_of_a_message_is_not_stored_again_when_the_rest_has_to_wait(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf, sql: Any
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    await sql.execute("create sequence public.calls")
    await sql.execute("""
        create function public.fail_thrice() returns trigger language plpgsql as $$
        begin
          case nextval('public.calls')
            when 1 then raise exception 'one entry is refused' using errcode = '22023';
            when 2 then raise exception 'the disk is full' using errcode = '53100';
            when 3 then raise exception 'the disk is full' using errcode = '53100';
            else return old;
          end case;
        end $$""")
    await sql.execute(
        "create trigger fail_thrice before delete on penstock.task for each row execute function public.fail_thrice()"
    )
    await put(results, "8", f"[7,{encode_result(name(task), '1')}]")
    for _ in range(2):
        with pytest.raises(Unavailable, match="disk is full"):
            await resulter.run_once()
    assert await resulter.run_once() == 2
    assert sorted(body for _, body, _ in await rejected(store)) == ["7", "8"]
    assert (await task_of(task.id))["state"] == "SUCCESS"
    assert await results.depth() == EMPTY


async def test_a_batch_of_ten_thousand_heartbeats_is_taken(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    beats = [encode_progress(f"{n + 1_000_000}:1") for n in range(9_999)]
    await report(resulter, results, f"[{','.join([*beats, encode_progress(name(task), 7)])}]")
    assert json.loads((await task_of(task.id))["progress"])["percent"] == 7


async def test_a_message_that_workers_packed_is_read_whatever_callers_may_send_in_one_batch(
    store: Store, results: SqsQueue, settings: Settings, sql: Any
) -> None:
    async with store.transaction() as session:
        await enqueue.enqueue(session, [NewTask("a") for _ in range(500)])
    bodies = [encode_result(name(task), "1") for task in await claim(store, 500)]
    await put(results, f"[{','.join(bodies)}]")
    few = settings.model_copy(update={"batch_limit": 100})
    assert await Resulter(store=store, results=results, settings=few).run_once() == 1
    assert await sql.fetchval("select count(*) from penstock.task_success") == 500
    assert await rejected(store) == []


# The watermark, by which the supervisor judges silence


async def noted(sql: Any) -> Any:
    rows = await sql.fetch("select lag, since, noted_at from penstock.resulter")
    return rows[0] if rows else None


async def test_a_resulter_notes_how_far_behind_it_is(
    store: Store, results: SqsQueue, settings: Settings, sql: Any
) -> None:
    resulter = Resulter(
        store=store, results=results, settings=settings.model_copy(update={"visibility_timeout_seconds": 2})
    )
    note = resulter._note
    assert await resulter.run_once() == 0
    await note.note()
    assert (await noted(sql))["lag"] == 0
    (task,) = await claimed(store, NewTask("a"))
    await put(results, encode_result(name(task), "1"))
    await asyncio.sleep(1.2)
    assert await resulter.run_once() == 1
    await note.note()
    behind = (await noted(sql))["lag"]
    assert behind >= 1
    await note.note()
    assert (await noted(sql))["lag"] == pytest.approx(behind, abs=0.2)  # it was as far behind then, and is no further
    await asyncio.sleep(2)
    await note.note()
    assert (await noted(sql))["lag"] == 0
    await resulter.drain(1)
    assert await noted(sql) is None


async def test_what_a_resulter_holds_grows_older(resulter: Resulter, results: SqsQueue, sql: Any) -> None:
    await put(results, '"x"')
    messages = await results.receive(wait_seconds=0, visibility_seconds=30)
    resulter._in_work.append(messages)
    await asyncio.sleep(1.1)
    await resulter._note.note()
    assert (await noted(sql))["lag"] >= 1
    resulter._in_work[:] = [[replace(message, sent_at=None) for message in messages]]
    await resulter._note.note()
    assert (await noted(sql))["lag"] is None


async def test_a_resulter_that_could_not_read_or_record_begins_again(
    resulter: Resulter, store: Store, postgres: EmbeddedPostgres, results: SqsQueue, sql: Any
) -> None:
    note = resulter._note
    await note.note()
    first = await noted(sql)
    await note.note()
    assert (await noted(sql))["since"] == first["since"]
    await sql.execute("update penstock.resulter set noted_at = now() - interval '11 seconds'")  # it stood still
    await note.note()
    stood = await noted(sql)
    assert stood["since"] > first["since"]
    (task,) = await claimed(store, NewTask("a"))
    await put(results, encode_result(name(task), "1"))
    await sql.execute("alter table penstock.task_history rename to elsewhere")  # nothing can be recorded
    with pytest.raises(Unavailable):
        await resulter.run_once()
    await sql.execute("alter table penstock.elsewhere rename to task_history")
    await note.note()
    assert (await noted(sql))["since"] > stood["since"]
    assert await resulter.run_once() == 1
