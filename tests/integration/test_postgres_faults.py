"""Postgres refuses, dies, forgets to answer: nothing is acknowledged before its time, nothing is lost or done twice."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import httpx
import psutil
import pytest

from penstock.brokers.base import MAX_RECEIVES, Depth
from penstock.brokers.sqs import SqsQueue, SqsTransport
from penstock.db.migrate import upgrade
from penstock.db.pool import Store
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.errors import TooSlow, Unavailable
from penstock.protocol.reports import encode_error, encode_result
from penstock.protocol.requests import parse_claim_id
from penstock.protocol.task import Claimed, NewTask
from penstock.resulter import Resulter
from penstock.scheduler.process import Scheduler
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings
from penstock.submitter import Submitter
from penstock.supervisor.process import Supervisor
from penstock.supervisor.repair import Repair
from penstock.tasks import claim as claims
from penstock.tasks import enqueue as enqueuing
from penstock.tasks import settle
from tests import postgres_versions
from tests.claims import claim_id, use_known_key
from tests.integration.apis import running
from tests.integration.doors import no_routes, put, rejected, request, sample, take
from tests.integration.faulty_postgres import PostgresProxy, Refusals, postgres_proxy

TaskOf = Callable[[int], Any]
EMPTY = Depth(0, 0, 0)

PASSING = {
    "25006": "read-only, in a failover",
    "25P03": "idle in a transaction for too long",
    "40001": "serialization failure",
    "40P01": "deadlock",
    "42501": "a right is missing",
    "53100": "disk full",
    "53200": "out of memory",
    "53300": "too many connections",
    "53400": "a limit of the configuration",
    "55P03": "lock timeout",
    "57014": "statement timeout",
    "57P01": "shut down by the administrator",
    "57P02": "crash of another backend",
    "57P03": "starting up",
    "58030": "input/output error",
    "XX000": "internal error",
}
PLACES = ("statement", "commit")
REFUSALS = {"22003": "out of range", "23514": "check violated", "54000": "a limit of the program"}


@pytest.fixture
async def refusals(sql: Any) -> Refusals:
    refusals = Refusals(sql)
    await refusals.install()
    return refusals


@pytest.fixture
def submitter(store: Store, inbound: SqsQueue, settings: Settings) -> Submitter:
    return Submitter(store=store, inbound=inbound, settings=settings)


@pytest.fixture
def resulter(store: Store, results: SqsQueue, settings: Settings) -> Resulter:
    return Resulter(store=store, results=results, settings=settings)


@pytest.fixture
def scheduler(store: Store, outbound: SqsQueue, settings: Settings) -> Scheduler:
    return Scheduler(open_queue=no_routes, store=store, outbound=outbound, settings=settings)


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[PostgresProxy]:
    async with postgres_proxy(database_url) as proxy:
        yield proxy


@pytest.fixture
async def proxied(proxy: PostgresProxy) -> AsyncIterator[Store]:
    """A store that reaches Postgres through the proxy, by one connection."""
    store = Store(proxy.url, pool_size=1, application_name="penstock-proxied")
    yield store
    await store.close()


async def enqueue(store: Store, *tasks: NewTask) -> list[int]:
    async with store.transaction() as session:
        return [answer.id for answer in await enqueuing.enqueue(session, tasks)]


async def claimed(store: Store, *tasks: NewTask) -> list[Claimed]:
    await enqueue(store, *tasks)
    async with store.session() as session:
        batch = await claims.claim(session, 1000)
        assert batch is not None
        await claims.confirm(session, batch.id)
    return sorted(batch.tasks, key=lambda task: task.id)


async def count(sql: Any, state: str | None = None) -> int:
    """Tasks of all, or of one state, live and settled."""
    live = await sql.fetchval("select count(*) from penstock.task where $1::text is null or state::text = $1", state)
    kept = sum(
        [
            await sql.fetchval(f"select count(*) from penstock.task_{name.lower()}")
            for name in ("SUCCESS", "CRITICAL_ERROR", "CANCELLED")
            if state in (None, name)
        ]
    )
    return int(live + kept)


async def refused_often(service: Submitter | Resulter, times: int = 3) -> None:
    for _ in range(times):
        with pytest.raises(Unavailable):
            await service.run_once()


def dead_letters(transport: SqsTransport, name: str) -> SqsQueue:
    return transport.queue(name + DEAD_LETTER_SUFFIX, label="dead")


def claims_of(messages: Sequence[Any]) -> list[tuple[int, int]]:
    entries = [json.loads(message.body) for message in messages]
    calls = [call for entry in entries for call in (entry if isinstance(entry, list) else [entry])]
    found = [parse_claim_id(call["id"]) for call in calls]
    return [(claim.task_id, claim.claim) for claim in found if claim is not None]


# What Postgres says, process by process


@pytest.mark.parametrize("place", PLACES)
async def test_a_submitter_acknowledges_nothing_that_postgres_did_not_commit(
    submitter: Submitter, inbound: SqsQueue, refusals: Refusals, sql: Any, store: Store, place: str
) -> None:
    for done, code in enumerate(PASSING):
        await put(inbound, request("submit:a", {"code": code}))
        async with refusals.during(code, place):
            await refused_often(submitter)
        assert await count(sql) == done, PASSING[code]
        assert (await inbound.depth()).total == 1, PASSING[code]
        assert await submitter.run_once() == 1
        assert await count(sql) == done + 1, PASSING[code]
        assert await inbound.depth() == EMPTY
    assert await rejected(store) == []


@pytest.mark.parametrize("place", PLACES)
async def test_a_resulter_acknowledges_nothing_that_postgres_did_not_commit(
    resulter: Resulter, results: SqsQueue, refusals: Refusals, store: Store, task_of: TaskOf, place: str
) -> None:
    tasks = await claimed(store, *(NewTask("a") for _ in PASSING))
    for n, (task, code) in enumerate(zip(tasks, PASSING, strict=True)):
        name = claim_id(task.id, task.claim)
        await put(results, encode_result(name, "1") if n % 2 else encode_error(name, 1, "boom", {}))
        async with refusals.during(code, place):
            await refused_often(resulter)
        assert (await task_of(task.id))["state"] == "ACQUIRED", PASSING[code]
        assert (await results.depth()).total == 1, PASSING[code]
        assert await resulter.run_once() == 1
        row = await task_of(task.id)
        assert (row["state"], row["attempts"]) == ("SUCCESS" if n % 2 else "ERROR", 1), PASSING[code]
        assert await results.depth() == EMPTY
    assert await rejected(store) == []


@pytest.mark.parametrize("place", PLACES)
async def test_a_scheduler_sends_nothing_that_it_could_not_claim(
    scheduler: Scheduler, store: Store, outbound: SqsQueue, refusals: Refusals, task_of: TaskOf, place: str
) -> None:
    for code, meaning in PASSING.items():
        (task_id,) = await enqueue(store, NewTask("a"))
        async with refusals.during(code, place):
            with pytest.raises(Unavailable):
                await scheduler.run_once()
        assert await outbound.depth() == EMPTY, meaning
        assert await scheduler.run_once() == 1
        row = await task_of(task_id)
        assert (row["state"], row["attempts"]) == ("ACQUIRED", 1)
        messages = await take(outbound)
        assert claims_of(messages) == [(task_id, row["claim"])], meaning
        await outbound.delete(messages)


async def test_a_dispatch_that_could_not_be_confirmed_is_sent_anew_and_only_the_newest_result_counts(
    scheduler: Scheduler, resulter: Resulter, outbound: SqsQueue, results: SqsQueue, store: Store, settings: Settings,
    refusals: Refusals, task_of: TaskOf,
) -> None:  # fmt: skip
    (task_id,) = await enqueue(store, NewTask("a"))
    async with refusals.during("53100", "commit", table="dispatch"):
        # The claim writes a batch too; only its confirmation is to fail.
        await refusals.end()
        batch, _ = await scheduler._claim()
        assert batch is not None
        await refusals.begin("53100", "commit", table="dispatch")
        assert await scheduler._sender.send_batch(batch) == 1
        for _ in range(2):
            with pytest.raises(Unavailable):
                await scheduler._sender.confirm()
    eager = settings.model_copy(update={"unsent_after_seconds": 0.0})
    assert (
        await Repair(
            store=store, queue_of=lambda _: outbound, results=results, settings=eager, empty_seconds=0
        ).run_once()
        == 1
    )
    assert await scheduler.run_once() == 1
    first, second = sorted(claims_of(await take(outbound)))
    assert first[0] == second[0] == task_id
    await put(results, encode_result(claim_id(first[0], first[1]), '"first"'))
    assert await resulter.run_once() == 1
    assert (await task_of(task_id))["state"] == "ACQUIRED"
    await put(results, encode_result(claim_id(second[0], second[1]), '"second"'))
    assert await resulter.run_once() == 1
    row = await task_of(task_id)
    assert (row["state"], row["result"], row["attempts"]) == ("SUCCESS", '"second"', 1)


@pytest.mark.parametrize("place", PLACES)
async def test_a_supervisor_whose_repair_is_refused_repairs_once_when_it_may(
    store: Store, inbound: SqsQueue, outbound: SqsQueue, results: SqsQueue, settings: Settings, refusals: Refusals,
    sql: Any, task_of: TaskOf, place: str,
) -> None:  # fmt: skip
    (task,) = await claimed(store, NewTask("a"))
    async with store.session() as session:
        await settle.note_heartbeats(session, {(task.id, task.claim): None})
    past = "- '1 day'::interval"
    await sql.execute(f"update penstock.task set claimed_at = claimed_at {past}, heartbeat_at = heartbeat_at {past}")
    queues = {"inbound": inbound, "outbound": outbound, "results": results}
    supervisor = Supervisor(open_queue=no_routes, store=store, queues=queues, settings=settings)
    for code, meaning in PASSING.items():
        async with refusals.during(code, place):
            with pytest.raises(Unavailable):
                await supervisor.run_once()
        row = await task_of(task.id)
        assert (row["state"], row["failures"]) == ("ACQUIRED", None), meaning
    await supervisor.run_once()
    await supervisor.run_once()
    row = await task_of(task.id)
    assert (row["state"], row["attempts"], len(json.loads(row["failures"]))) == ("ERROR", 1, 1)


@pytest.mark.parametrize("place", PLACES)
async def test_an_api_gives_no_id_for_what_postgres_did_not_commit(
    store: Store, settings: Settings, refusals: Refusals, sql: Any, place: str
) -> None:
    call = {"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "a"}, "id": 1}
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, timeout=60) as http:
        for done, code in enumerate(PASSING):
            async with refusals.during(code, place):
                reply = await http.post("/rpc", json=call)
            assert reply.status_code == 503, PASSING[code]
            answer = reply.json()
            assert "result" not in answer
            assert answer["error"]["message"] == "Temporarily unavailable, try again"
            assert "made to fail" not in reply.text
            assert await count(sql) == done
            reply = await http.post("/rpc", json=call)
            assert (reply.status_code, reply.json()["result"]["duplicate"]) == (200, False)
            assert await count(sql) == done + 1


async def test_messages_are_not_used_up_while_postgres_answers_but_takes_no_writes(
    submitter: Submitter, resulter: Resulter, inbound: SqsQueue, results: SqsQueue, store: Store, settings: Settings,
    transport: SqsTransport, refusals: Refusals, task_of: TaskOf, sql: Any,
) -> None:  # fmt: skip
    """After MAX_RECEIVES deliveries without a delete a message would go to the dead-letter queue."""
    (task,) = await claimed(store, NewTask("a"))
    await put(inbound, request("submit:b", {"n": 1}))
    await put(results, encode_result(claim_id(task.id, task.claim), "1"))
    async with refusals.during("53100", "commit"):
        await refused_often(submitter, 3 * MAX_RECEIVES)
        await refused_often(resulter, 3 * MAX_RECEIVES)
    for name in (settings.inbound_queue, settings.results_queue):
        assert await dead_letters(transport, name).depth() == EMPTY
    assert await submitter.run_once() == 1
    assert await resulter.run_once() == 1
    assert (await task_of(task.id))["state"] == "SUCCESS"
    assert await count(sql) == 2


async def test_messages_kept_for_a_refusing_postgres_are_given_back_at_the_stop(
    submitter: Submitter, inbound: SqsQueue, refusals: Refusals
) -> None:
    await put(inbound, request("submit:a", {"n": 1}))
    async with refusals.during("53100", "commit"):
        await refused_often(submitter)
        assert await inbound.depth() == Depth(visible=0, in_flight=1, delayed=0)
        await submitter.drain(5)
    assert await inbound.depth() == Depth(visible=1, in_flight=0, delayed=0)


async def test_messages_that_ask_too_much_of_a_statement_are_counted_by_the_queue_and_set_aside(
    submitter: Submitter, inbound: SqsQueue, settings: Settings, transport: SqsTransport, refusals: Refusals
) -> None:
    await put(inbound, request("submit:a", {"n": 1}))
    async with refusals.during("57014", "statement"):
        for _ in range(MAX_RECEIVES):
            with pytest.raises(TooSlow):
                await submitter.run_once()
        assert await submitter.run_once() == 0
    assert (await dead_letters(transport, settings.inbound_queue).depth()).visible == 1


async def test_a_read_only_failover_is_waited_for(
    submitter: Submitter, scheduler: Scheduler, inbound: SqsQueue, outbound: SqsQueue, postgres: EmbeddedPostgres,
    database_url: str, settings: Settings, transport: SqsTransport,
) -> None:  # fmt: skip
    name = urlsplit(database_url).path.removeprefix("/")

    await submitter.open()
    await put(inbound, request("submit:a", {"n": 1}))
    postgres.execute(f'alter database "{name}" set default_transaction_read_only to on')
    postgres.execute(f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'")
    await refused_often(submitter, 3 * MAX_RECEIVES)
    with pytest.raises(Unavailable):
        await scheduler.run_once()
    # A session keeps what it began with, so those made meanwhile are of no use from now on.
    postgres.execute(f'alter database "{name}" set default_transaction_read_only to off')
    assert await until_it_works(submitter) == 1
    assert await until_it_works(scheduler) == 1
    assert len(claims_of(await take(outbound))) == 1
    assert await inbound.depth() == EMPTY
    assert await dead_letters(transport, settings.inbound_queue).depth() == EMPTY


async def until_it_works(service: Submitter | Resulter | Scheduler) -> int:
    """Passes until one does something; connections of the pool that have died cost at most one pass each."""
    for _ in range(20):
        try:
            return await service.run_once()
        except Unavailable:
            continue
    raise AssertionError("it did not come back within 20 passes")


# One value is refused, not all


@pytest.mark.parametrize("place", PLACES)
async def test_a_request_that_postgres_refuses_spoils_no_neighbour(
    submitter: Submitter, inbound: SqsQueue, refusals: Refusals, store: Store, sql: Any, place: str
) -> None:
    guilty = request("submit:guilty", {"n": 0})
    good = [request("submit:good", {"n": n}) for n in range(4)]
    for done, code in enumerate(REFUSALS):
        await put(inbound, good[0], f"[{good[1]},{good[2]}]", guilty, good[3])
        async with refusals.during(code, place, action="guilty"):
            assert await submitter.run_once() == 4
        assert await count(sql, "SCHEDULED") == 4 * (done + 1), REFUSALS[code]
        assert await inbound.depth() == EMPTY
        *before, (_, body, reason) = await rejected(store)
        assert len(before) == done
        assert json.loads(body)["method"] == "submit:guilty"
        assert "Postgres rejected" in reason


@pytest.mark.parametrize("place", PLACES)
async def test_a_result_that_postgres_refuses_spoils_no_neighbour(
    resulter: Resulter, results: SqsQueue, refusals: Refusals, store: Store, sql: Any, task_of: TaskOf, place: str
) -> None:  # fmt: skip
    """Here Postgres refuses every change of the failing task, its failure too."""
    for done, code in enumerate(REFUSALS):
        guilty, *good = await claimed(store, NewTask("guilty"), *(NewTask("good") for _ in range(4)))
        names = [claim_id(task.id, task.claim) for task in (good[0], guilty, *good[1:])]
        await put(results, f"[{','.join(encode_result(name, '1') for name in names[:3])}]")
        await put(results, *(encode_result(name, "1") for name in names[3:]))
        async with refusals.during(code, place, action="guilty"):
            assert await resulter.run_once() == 3
        assert {(await task_of(task.id))["state"] for task in good} == {"SUCCESS"}, REFUSALS[code]
        assert (await task_of(guilty.id))["state"] == "ACQUIRED"
        assert await results.depth() == EMPTY
        *before, (_, body, reason) = await rejected(store)
        assert len(before) == done
        assert json.loads(body)["id"] == claim_id(guilty.id, guilty.claim)
        assert "Postgres rejected" in reason


# Connections and servers that die


@pytest.mark.parametrize("place", PLACES)
async def test_a_connection_that_dies_inside_the_transaction_takes_nothing_with_it(
    submitter: Submitter, resulter: Resulter, scheduler: Scheduler, inbound: SqsQueue, outbound: SqsQueue,
    results: SqsQueue, store: Store, refusals: Refusals, sql: Any, task_of: TaskOf, place: str,
) -> None:  # fmt: skip
    (task,) = await claimed(store, NewTask("a"))
    await put(inbound, request("submit:b", {"n": 1}))
    await put(results, encode_result(claim_id(task.id, task.claim), "1"))
    async with refusals.during("kill", place):
        await refused_often(submitter)
        await refused_often(resulter)
    assert (await task_of(task.id))["state"] == "ACQUIRED"
    assert await until_it_works(submitter) == 1
    assert await until_it_works(resulter) == 1
    assert (await task_of(task.id))["state"] == "SUCCESS"
    async with refusals.during("kill", place):
        with pytest.raises(Unavailable):
            await scheduler.run_once()
    assert await outbound.depth() == EMPTY
    assert await until_it_works(scheduler) == 1
    assert len(claims_of(await take(outbound))) == 1
    assert await count(sql) == 2
    assert [await inbound.depth(), await results.depth()] == [EMPTY, EMPTY]


async def test_connections_killed_between_passes_cost_no_message(
    submitter: Submitter, inbound: SqsQueue, store: Store, sql: Any
) -> None:
    for n in range(5):
        await put(inbound, request("submit:a", {"n": n}))
        await sql.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'penstock-test'"
        )
        assert await until_it_works(submitter) == 1
        assert await count(sql) == n + 1
    assert await inbound.depth() == EMPTY


async def test_a_transaction_in_which_the_process_stood_still_for_too_long_is_unavailable(
    store: Store, sql: Any
) -> None:
    with pytest.raises(Unavailable):
        async with store.transaction() as session:
            await enqueuing.enqueue(session, [NewTask("a")])
            await session._connection.execute("set idle_in_transaction_session_timeout = 20")
            async with asyncio.timeout(30):
                while await sql.fetchval("select count(*) from pg_stat_activity where state = 'idle in transaction'"):
                    await asyncio.sleep(0.01)
            await enqueuing.enqueue(session, [NewTask("a")])
    assert await count(sql) == 0
    assert len(await enqueue(store, NewTask("a"))) == 1


async def test_a_table_that_a_migration_changes_under_a_running_process_costs_one_pass(store: Store, sql: Any) -> None:
    one = Store(store.database_url, pool_size=1)
    try:
        async with one.transaction() as session:
            await session.fetch("list_rejected_page", None, 10, None, 10**9)
        await sql.execute("alter table penstock.rejected alter column reason type varchar")
        with pytest.raises(Unavailable):
            async with one.transaction() as session:
                await session.fetch("list_rejected_page", None, 10, None, 10**9)
        async with one.transaction() as session:
            assert await session.fetch("list_rejected_page", None, 10, None, 10**9) == []
    finally:
        await one.close()


@pytest.fixture(scope="module")
def server(module_data_path: Path) -> Iterator[EmbeddedPostgres]:
    """A server of this module alone, which it may kill."""
    options = {"fsync": "off", "full_page_writes": "off", "max_connections": "12", "shared_buffers": "16MB"}
    server = postgres_versions.server(module_data_path / "postgres", options=options)
    server.start()
    server.create_database("own")
    upgrade(server.dsn("own"))
    use_known_key(server, "own")
    yield server
    server.stop()


@asynccontextmanager
async def server_down(server: EmbeddedPostgres, how: str) -> AsyncIterator[None]:
    """Inside the block the server is stopped in order, or killed; afterwards it is up again."""
    if how == "stop":
        await asyncio.to_thread(server.stop)
    else:
        assert server.pid is not None
        postmaster = psutil.Process(server.pid)
        family = [postmaster, *postmaster.children(recursive=True)]
        postmaster.send_signal(signal.SIGKILL)
        await asyncio.to_thread(psutil.wait_procs, family, 30)
        await asyncio.to_thread(server.stop)
    try:
        yield
    finally:
        await server.start_async()


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_every_process_outlives_a_restart_of_the_server(
    server: EmbeddedPostgres, inbound: SqsQueue, outbound: SqsQueue, results: SqsQueue, settings: Settings, how: str
) -> None:
    stores = [Store(server.dsn("own"), pool_size=2, acquire_timeout_seconds=10) for _ in range(5)]
    queues = {"inbound": inbound, "outbound": outbound, "results": results}
    submitter = Submitter(store=stores[0], inbound=inbound, settings=settings)
    scheduler = Scheduler(open_queue=no_routes, store=stores[1], outbound=outbound, settings=settings)
    resulter = Resulter(store=stores[2], results=results, settings=settings)
    supervisor = Supervisor(open_queue=no_routes, store=stores[3], queues=queues, settings=settings)
    call = {"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "a"}, "id": 1}
    try:
        await put(inbound, request("submit:a", {"n": 1}))
        assert await submitter.run_once() == 1
        assert await scheduler.run_once() == 1
        ((task_id, claim),) = claims_of(messages := await take(outbound))
        await outbound.delete(messages)
        await supervisor.run_once()
        async with running(stores[4], settings) as api, httpx.AsyncClient(base_url=api.url, timeout=60) as http:
            accepted = (await http.post("/rpc", json=call)).json()["result"]["id"]
            await put(inbound, request("submit:a", {"n": 2}))
            await put(results, encode_result(claim_id(task_id, claim), "1"))
            async with server_down(server, how):
                for service in (submitter, scheduler, resulter, supervisor):
                    for _ in range(2):
                        with pytest.raises(Unavailable):
                            await service.run_once()
                reply = await http.post("/rpc", json=call)
                assert (reply.status_code, "result" in reply.json()) == (503, False)
            assert await until_it_works(submitter) == 1
            assert await until_it_works(resulter) == 1
            await supervisor.run_once()
            again = (await http.post("/rpc", json=call)).json()["result"]["id"]
        assert await until_it_works(scheduler) == 3
        messages = await take(outbound)
        sent = {task for task, _ in claims_of(messages)}
        await outbound.delete(messages)
        assert len(sent) == 3
        assert {accepted, again} < sent
        async with stores[0].transaction() as session:
            assert [row["state"] for row in await session.fetch("read_tasks", [task_id])] == ["SUCCESS"]
            await settle.cancel(session, list(sent))
        assert [await inbound.depth(), await results.depth()] == [EMPTY, EMPTY]
    finally:
        for store in stores:
            await store.close()


async def test_too_many_connections_are_waited_for(
    server: EmbeddedPostgres, inbound: SqsQueue, settings: Settings
) -> None:
    store = Store(server.dsn("own"), pool_size=2, acquire_timeout_seconds=10)
    submitter = Submitter(store=store, inbound=inbound, settings=settings)
    hogs: list[Any] = []
    try:
        await put(inbound, request("submit:hogged", {"n": 1}))
        with pytest.raises(asyncpg.TooManyConnectionsError):
            while True:
                hogs.append(await asyncpg.connect(server.dsn("own")))
        with pytest.raises(Unavailable, match="TooManyConnections"):
            await submitter.open()
        await refused_often(submitter)
        for hog in hogs:
            await hog.close()
        assert await until_it_works(submitter) == 1
        assert await inbound.depth() == EMPTY
    finally:
        for hog in hogs:
            hog.terminate()
        await store.close()


# A pool without a free connection


async def test_a_pool_without_a_free_connection_says_so_and_hangs_nobody(
    database_url: str, inbound: SqsQueue, settings: Settings, sql: Any
) -> None:
    store = Store(database_url, pool_size=2, acquire_timeout_seconds=0.2)
    submitter = Submitter(store=store, inbound=inbound, settings=settings)
    await put(inbound, request("submit:a", {"n": 1}))
    try:
        async with asyncio.timeout(30), store.session(), store.session():
            with pytest.raises(Unavailable, match=r"all 2 connections.*PENSTOCK_DATABASE_POOL_SIZE"):
                await submitter.run_once()
        assert await until_it_works(submitter) == 1
        assert await count(sql) == 1
    finally:
        await store.close()


async def test_a_pass_that_is_cut_off_inside_its_transaction_leaves_a_usable_connection(
    database_url: str, sql: Any
) -> None:
    store = Store(database_url, pool_size=1, acquire_timeout_seconds=5)
    inside = asyncio.Event()

    async def stuck() -> None:
        async with store.transaction() as session:
            await enqueuing.enqueue(session, [NewTask("a")])
            inside.set()
            await session._connection.execute("select pg_sleep(60)")

    try:
        task = asyncio.create_task(stuck())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(await enqueue(store, NewTask("b"))) == 1
        assert await count(sql) == 1
    finally:
        await store.close()


# The reply to a commit is lost


async def test_a_commit_whose_reply_is_lost_adds_no_task_twice(
    proxy: PostgresProxy, proxied: Store, inbound: SqsQueue, settings: Settings, sql: Any
) -> None:
    submitter = Submitter(store=proxied, inbound=inbound, settings=settings)
    await put(inbound, f"[{request('submit:a', {'n': 1})},{request('submit:a', {'n': 2})}]")
    proxy.lose = "commit"
    with pytest.raises(Unavailable):
        await submitter.run_once()
    assert proxy.lost == 1
    assert await count(sql) == 2
    assert (await inbound.depth()).total == 1
    assert await until_it_works(submitter) == 1
    assert await count(sql) == 2
    assert await inbound.depth() == EMPTY


async def test_a_commit_whose_reply_is_lost_records_no_result_twice(
    proxy: PostgresProxy, proxied: Store, results: SqsQueue, settings: Settings, store: Store, sql: Any, task_of: TaskOf
) -> None:
    resulter = Resulter(store=proxied, results=results, settings=settings)
    done, failed = await claimed(store, NewTask("a"), NewTask("a"))
    await put(results, f"[{encode_result(claim_id(done.id, done.claim), '1')},"
                       f"{encode_error(claim_id(failed.id, failed.claim), 1, 'boom', {})}]")  # fmt: skip
    before = sample("penstock_stale_results_total")
    proxy.lose = "commit"
    with pytest.raises(Unavailable):
        await resulter.run_once()
    assert proxy.lost == 1
    assert await until_it_works(resulter) == 1
    assert (await task_of(done.id))["state"] == "SUCCESS"
    row = await task_of(failed.id)
    assert (row["state"], row["attempts"], len(json.loads(row["failures"]))) == ("ERROR", 1, 1)
    assert await count(sql) == 2
    assert sample("penstock_stale_results_total") == before + 2
    assert await results.depth() == EMPTY


async def test_a_claim_whose_reply_is_lost_is_given_back_with_its_attempt(
    proxy: PostgresProxy, proxied: Store, outbound: SqsQueue, results: SqsQueue, settings: Settings, store: Store,
    task_of: TaskOf,
) -> None:  # fmt: skip
    scheduler = Scheduler(open_queue=no_routes, store=proxied, outbound=outbound, settings=settings)
    await enqueue(store, NewTask("first"))
    assert await until_it_works(scheduler) == 1  # prepares the statement, by whose text the proxy knows it
    await outbound.delete(await take(outbound))
    (task_id,) = await enqueue(store, NewTask("a"))
    proxy.lose = "insert into penstock.dispatch"
    with pytest.raises(Unavailable):
        await scheduler.run_once()
    assert proxy.lost == 1
    row = await task_of(task_id)
    assert (row["state"], row["attempts"]) == ("ACQUIRED", 1)
    assert await outbound.depth() == EMPTY
    eager = settings.model_copy(update={"unsent_after_seconds": 0.0})
    assert (
        await Repair(
            store=store, queue_of=lambda _: outbound, results=results, settings=eager, empty_seconds=0
        ).run_once()
        == 1
    )
    assert await until_it_works(scheduler) == 1
    row = await task_of(task_id)
    assert (row["state"], row["attempts"]) == ("ACQUIRED", 1)
    assert claims_of(await take(outbound)) == [(task_id, row["claim"])]


async def test_an_enqueue_whose_reply_is_lost_is_told_as_a_failure_and_its_key_finds_the_task(
    proxy: PostgresProxy, proxied: Store, settings: Settings, sql: Any
) -> None:
    params = {"action": "a", "unique_key": "k"}
    call = {"jsonrpc": "2.0", "method": "enqueue", "params": params, "id": 1}
    async with running(proxied, settings) as api, httpx.AsyncClient(base_url=api.url, timeout=60) as http:
        proxy.lose = "commit"
        reply = await http.post("/rpc", json=call)
        assert proxy.lost == 1
        assert (reply.status_code, "result" in reply.json()) == (503, False)
        again = (await http.post("/rpc", json=call)).json()["result"]
        assert again["duplicate"] is True
        assert again["id"] == await sql.fetchval("select id from penstock.task")
    assert await count(sql) == 1
