"""Tenants: carried by tasks all their life, sent to queues, held to limits, over a real Postgres and real queues."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from moto.server import ThreadedMotoServer

from penstock import AsyncClient
from penstock.api.dispatch import Methods
from penstock.brokers.base import Outgoing, Queue
from penstock.brokers.sqs import SqsQueue, SqsTransport, group_id
from penstock.db.notify import Notifier
from penstock.db.pool import Store
from penstock.methods.inbound import accept_inbound, read_inbound
from penstock.protocol.requests import parse_claim_id
from penstock.protocol.task import NewTask, State
from penstock.results.spawn import Spawner, spawn_children
from penstock.scheduler.process import Scheduler
from penstock.schedules.firing import fire_due
from penstock.settings.model import Settings, load_settings
from penstock.supervisor.limits import LimitUpkeep
from penstock.tasks import claim as claims
from penstock.tasks import enqueue as enqueuing
from penstock.tasks import reschedule, settle
from penstock.tasks.transactional import enqueue_many
from penstock.workflows.advancer import advance_workflows
from tests.integration.apis import running
from tests.integration.doors import take
from tests.integration.lives import carry_out
from tests.integration.rules import delete_tenant, read_tenant_limits, set_limits, set_tenant
from tests.integration.schedule_changes import change_schedule


class Outbound:
    """A queue that keeps what is sent into it."""

    def __init__(self, queue: SqsQueue) -> None:
        self.label = queue.label
        self.limits = queue.limits
        self._queue = queue
        self.pairs: list[tuple[int, int]] = []
        self.messages: list[Outgoing] = []

    async def send(self, messages: Sequence[Outgoing]) -> Any:
        for message in messages:
            self.messages.append(message)
            body = json.loads(message.body)
            for call in body if isinstance(body, list) else [body]:
                claim = parse_claim_id(call["id"])
                assert claim is not None
                self.pairs.append((claim.task_id, claim.claim))
        return await self._queue.send([])

    async def depth(self) -> Any:
        return await self._queue.depth()


def open_none(name: str, label: str) -> Queue:
    raise AssertionError(f"no test here asks for {name!r}")


@pytest.fixture
def sent(outbound: SqsQueue) -> Outbound:
    return Outbound(outbound)


def scheduler_of(store: Store, outbound: Any, settings: Settings) -> Scheduler:
    return Scheduler(store=store, outbound=outbound, settings=settings, open_queue=open_none)


async def enqueue(store: Store, *tasks: NewTask) -> list[int]:
    async with store.transaction() as session:
        return [answer.id for answer in await enqueuing.enqueue(session, tasks)]


async def change(store: Store, carry_out: Callable[..., Awaitable[None]], *args: Any, **more: Any) -> None:
    async with store.transaction() as session:
        await carry_out(session, *args, **more)


async def tenants_of(sql: Any, ids: Sequence[int]) -> Counter[str | None]:
    rows = await sql.fetch("select tenant from penstock.task where id = any($1::bigint[])", list(ids))
    return Counter(row[0] for row in rows)


async def drain(schedulers: Sequence[Scheduler], sent: Outbound, sql: Any, *, until: int) -> None:
    """Pass after pass until so many were sent; tasks that wait for a rate or a lock are looked at again."""
    async with asyncio.timeout(60):
        while len(sent.pairs) < until:
            await asyncio.gather(*(scheduler.run_once() for scheduler in schedulers))
            await asyncio.sleep(0.01)


async def settle_passes(scheduler: Scheduler, sent: Outbound) -> None:
    """Passes until nothing more has gone for a while of passes."""
    quiet = 0
    while quiet < 8:
        before = len(sent.pairs)
        await scheduler.run_once()
        quiet = quiet + 1 if len(sent.pairs) == before else 0
        await asyncio.sleep(0.06)  # a used-up limit is looked at every 50 ms


# Carried


async def test_a_tenant_stays_with_a_task_all_its_life(store: Store, task_of: Any) -> None:
    (task,) = await enqueue(store, NewTask("a", tenant="acme", unique_key="k", ordering_key="o"))
    assert ((await task_of(task))["tenant"], (await task_of(task))["state"]) == ("acme", "SCHEDULED")
    async with store.transaction() as session:
        await settle.cancel(session, [task])
    assert ((await task_of(task))["tenant"], (await task_of(task))["state"]) == ("acme", "CANCELLED")
    async with store.transaction() as session:
        await reschedule.restart(session, [task])
    assert (await task_of(task))["tenant"] == "acme"
    async with store.session() as session:
        batch = await claims.claim(session, 10)
    assert batch is not None
    assert [claimed.tenant for claimed in batch.tasks] == ["acme"]
    async with store.transaction() as session:
        await settle.finish(session, {(task, batch.id): "1"})
    assert ((await task_of(task))["tenant"], (await task_of(task))["state"]) == ("acme", "SUCCESS")


async def test_a_plain_task_has_none(store: Store, task_of: Any) -> None:
    (task,) = await enqueue(store, NewTask("a"))
    assert (await task_of(task))["tenant"] is None


async def test_keys_of_tenants_never_meet(store: Store, task_of: Any) -> None:
    tasks = [NewTask("a", tenant=tenant, unique_key="k", ordering_key="o") for tenant in (None, "one", "two")]
    first = await enqueue(store, *tasks)
    assert len(set(first)) == 3
    assert await enqueue(store, *tasks) == first
    assert [(await task_of(task))["state"] for task in first] == ["SCHEDULED"] * 3
    replacing = NewTask("a", '{"new":1}', tenant="two", unique_key="k", unique="live", on_duplicate="replace")
    assert await enqueue(store, replacing) == first[2:]
    assert [json.loads((await task_of(task))["payload"]) for task in first] == [{}, {}, {"new": 1}]
    (behind,) = await enqueue(store, NewTask("b", tenant="one", ordering_key="o"))
    assert (await task_of(behind))["state"] == State.WAITING
    async with store.transaction() as session:
        await settle.cancel(session, first[:1])  # that of no tenant
    assert (await task_of(behind))["state"] == State.WAITING
    async with store.transaction() as session:
        await settle.cancel(session, first[1:2])
    assert (await task_of(behind))["state"] == State.SCHEDULED


async def test_every_door_takes_a_tenant(store: Store, sql: Any, settings: Settings) -> None:
    body = json.dumps(
        [{"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "a", "tenant": "acme"}}] * 2
        + [{"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "a", "tenant": "*"}}]
    )
    inbound = read_inbound(body, settings)
    assert len(inbound.refused) == 1
    assert "stands for every tenant" in inbound.refused[0][1]
    async with store.transaction() as session:
        added = [one.id for one in await accept_inbound(session, inbound, settings, source="inbound")]
    answers = await enqueue_many(
        sql, [{"action": "a", "tenant": "acme", "unique_key": "k"}, {"action": "a", "unique_key": "k"}],
        settings=settings,
    )  # fmt: skip
    added += [answer["id"] for answer in answers]
    assert await tenants_of(sql, added) == {"acme": 3, None: 1}
    rows = await sql.fetch(
        "select * from penstock_enqueue_many($1::text)",
        '[{"action": "a", "tenant": "acme", "unique_key": "k"}, {"action": "a", "tenant": "other", "unique_key": "k"}]',
    )
    assert rows[0]["id"] == answers[0]["id"]
    assert [row["duplicate"] for row in rows] == [True, False]
    for wrong in ('""', '"*"', '"a\\u001fb"', "7", json.dumps("x" * 129)):
        with pytest.raises(Exception, match="Invalid params: tenant"):
            await sql.fetch("select * from penstock_enqueue_many($1::text)", f'[{{"action": "a", "tenant": {wrong}}}]')


async def test_a_workflow_and_all_that_it_makes_are_for_its_tenant(store: Store, sql: Any, settings: Settings) -> None:
    steps = [
        {"action": "a", "name": "one", "ordering_key": "o"},
        {"name": "m", "action": "b", "over": [1, 2], "after": ["one"]},
    ]
    given = {"steps": steps, "tenant": "acme", "key": "k"}
    async with store.transaction() as session:
        flow = await carry_out(session, settings, "workflow.create", **given)
        other = {"steps": [{"action": "c", "name": "c"}], "tenant": "other", "key": "k"}
        theirs = await carry_out(session, settings, "workflow.create", **other)
        again = await carry_out(session, settings, "workflow.create", **given)
    assert theirs.id != flow.id
    assert (again.id, again.duplicate) == (flow.id, True)
    rows = await sql.fetch("select tenant, ordering_key from penstock.task where workflow = $1", flow.id)
    assert [tuple(row) for row in rows] == [("acme", "acme\x1fo")]
    async with store.session() as session:
        batch = await claims.claim(session, 1)
    assert batch is not None
    async with store.transaction() as session:
        await settle.finish(session, {(batch.tasks[0].id, batch.id): "null"})
        again = await carry_out(session, settings, "workflow.cancel", key="k", tenant="other")
        assert again.id == theirs.id
    async with store.transaction() as session:
        await advance_workflows(session, [flow.id], settings)
    rows = await sql.fetch("select distinct tenant, action from penstock.task where workflow = $1", flow.id)
    assert [tuple(row) for row in rows] == [("acme", "b")]


async def test_what_a_plain_task_spawns_is_for_its_tenant(store: Store, sql: Any) -> None:
    await enqueue(store, NewTask("a", tenant="acme"))
    async with store.session() as session:
        batch = await claims.claim(session, 1)
    assert batch is not None
    pair = batch.tasks[0].id, batch.id
    async with store.transaction() as session:
        spawners = {pair: Spawner("[]", [NewTask("child")])}
        (row,) = await session.fetch("hold_spawners", [pair[0]], [pair[1]])
        await spawn_children(session, spawners, {pair: row})
    assert [row[0] for row in await sql.fetch("select tenant from penstock.task where action = 'child'")] == ["acme"]


async def test_the_tasks_of_a_schedule_are_for_its_tenant(store: Store, sql: Any, settings: Settings) -> None:
    raw = b'{"name":"n","expression":"@daily","action":"a","tenant":"acme","ordering_key":"o"}'
    async with store.transaction() as session:
        made = await change_schedule(session, "schedule.create", raw, settings)
        assert made.tenant == "acme"
        await change_schedule(session, "schedule.run_now", b'{"name":"n"}', settings)
    await sql.execute(
        "update penstock.schedule_clock set next_at = now() - interval '1s', due_at = now() - interval '1s'"
    )
    async with store.transaction() as session:
        assert (await fire_due(session, settings)).tasks == 1
    rows = await sql.fetch("select tenant, ordering_key from penstock.task")
    assert [tuple(row) for row in rows] == [("acme", "acme\x1fo")] * 2
    async with store.transaction() as session:
        changed = await change_schedule(session, "schedule.update", b'{"name":"n","tenant":null}', settings)
    assert changed.tenant is None


# Given to the queue


async def test_a_message_is_of_one_tenant_and_tells_the_queue_whose(
    store: Store, outbound: SqsQueue, settings: Settings
) -> None:
    given = {None: 30, "acme": 40, "Größe & Co": 30}
    await enqueue(store, *(NewTask("a", tenant=tenant) for tenant, count in given.items() for _ in range(count)))
    await scheduler_of(store, outbound, settings).run_once()
    groups: Counter[str | None] = Counter()
    left = 100
    while left:
        messages = await outbound.receive(wait_seconds=10, visibility_seconds=60)
        assert messages, f"{left} tasks did not come"
        for message in messages:
            body = json.loads(message.body)
            count = len(body) if isinstance(body, list) else 1
            groups[message.group] += count
            left -= count
        await outbound.delete(messages)
    assert groups.pop(None) == 30
    assert groups.pop("acme") == 40
    ((digest, count),) = groups.items()
    assert (len(digest or ""), count) == (64, 30)


async def test_a_setting_packs_tasks_whoever_they_are_for(store: Store, sent: Outbound, settings: Settings) -> None:
    await enqueue(store, *(NewTask("a", tenant=f"t{number}") for number in range(100)))
    off = settings.model_copy(update={"fair_queues": False})
    await scheduler_of(store, sent, off).run_once()
    assert {message.group for message in sent.messages} == {None}
    assert len(sent.messages) == 10


async def test_a_queue_that_is_not_fair_is_told_no_group(store: Store, sent: Outbound, settings: Settings) -> None:
    sent.limits = replace(sent.limits, fair_groups=False)
    await enqueue(store, *(NewTask("a", tenant=f"t{number}") for number in range(100)))
    await scheduler_of(store, sent, settings).run_once()
    assert {message.group for message in sent.messages} == {None}
    assert len(sent.messages) == 10


async def test_a_dead_letter_that_is_sent_again_keeps_its_group(
    store: Store, transport: Any, outbound: SqsQueue, settings: Settings
) -> None:
    await enqueue(store, NewTask("a", tenant="acme"), NewTask("a", tenant="acme"))
    async with store.session() as session:
        batch = await claims.claim(session, 2)
    assert batch is not None
    calls = [{"jsonrpc": "2.0", "method": "a", "params": {}, "id": f"{task.id}:{task.claim}"} for task in batch.tasks]
    dead = transport.queue(f"{settings.outbound_queue}-dlq", label="outbound-dlq")
    report = await dead.send([Outgoing(json.dumps(calls), {}, "acme")])
    assert report.failed == []
    methods = Methods(
        store, Notifier(store), settings, queues={"outbound": outbound}, dead_letters={"outbound-dlq": dead}
    )
    replayed = await methods.call("dlq.replay", {"queue": "outbound", "limit": 10})
    assert replayed.replayed == 1
    got = [*await take(outbound), *await take(outbound)]
    assert [message.group for message in got] == ["acme", "acme"]


# Held to limits


async def test_a_tenant_is_held_to_its_tasks_in_flight_over_all_actions_and_others_are_not(
    store: Store, sent: Outbound, sql: Any, settings: Settings
) -> None:
    await change(store, set_tenant, "acme", {"max_in_flight": 3})
    flood = await enqueue(store, *(NewTask(f"a{n % 4}", tenant="acme") for n in range(200)))
    others = await enqueue(store, *(NewTask("a0", tenant=tenant) for tenant in ("b", "c", None) for _ in range(5)))
    scheduler = scheduler_of(store, sent, settings)
    await settle_passes(scheduler, sent)
    went = {task for task, _ in sent.pairs}
    assert len(went & set(flood)) == 3
    assert went >= set(others)
    mine = [pair for pair in sent.pairs if pair[0] in flood]
    async with store.transaction() as session:
        await settle.finish(session, dict.fromkeys(mine[:2], "1"))
    await settle_passes(scheduler, sent)
    assert len({task for task, _ in sent.pairs} & set(flood)) == 5


async def test_schedulers_at_once_never_pass_a_tenants_limit(
    store: Store, sent: Outbound, sql: Any, settings: Settings
) -> None:
    await change(store, set_tenant, "*", {"max_in_flight": 4})
    await enqueue(
        store, *(NewTask(f"a{n % 3}", tenant=tenant) for n in range(20) for tenant in ("one", "two"))
    )  # fmt: skip
    schedulers = [scheduler_of(store, sent, settings) for _ in range(3)]
    done: set[tuple[int, int]] = set()
    async with asyncio.timeout(60):
        while len(done) < 40:
            await asyncio.gather(*(scheduler.run_once() for scheduler in schedulers))
            rows = await sql.fetch(
                "select tenant, count(*) from penstock.task where state = 'ACQUIRED' group by tenant"
            )
            assert all(count <= 4 for _, count in rows), rows
            fresh = [pair for pair in sent.pairs if pair not in done][:3]
            async with store.transaction() as session:
                await settle.finish(session, dict.fromkeys(fresh, "1"))
            done.update(fresh)
            await asyncio.sleep(0.01)


async def test_what_sql_enqueues_for_a_tenant_is_held_to_its_limits_and_found_by_it(
    store: Store, sent: Outbound, sql: Any, settings: Settings
) -> None:
    await change(store, set_tenant, "acme", {"max_in_flight": 2})
    await sql.execute(
        "select penstock_enqueue('a', tenant => 'acme'), penstock_enqueue('a') from generate_series(1, 5)"
    )
    await sql.execute(
        "select penstock_enqueue('a', tenant => t, unique_key => 'k') from unnest('{acme,other}'::text[]) t"
    )
    await settle_passes(scheduler_of(store, sent, settings), sent)
    went = await tenants_of(sql, [task for task, _ in sent.pairs])
    assert went == {"acme": 2, "other": 1, None: 5}
    async with store.session() as session:
        record = await read_tenant_limits(session, "acme")
    assert (record.waiting, record.in_flight) == (4, 2)
    async with running(store, settings) as api, AsyncClient(api.url) as client:
        assert len((await client.list(tenant="acme"))["tasks"]) == 6
        (found,) = (await client.list(tenant="other", key="k"))["tasks"]
        assert found["tenant"] == "other"


async def test_the_default_holds_for_every_tenant_but_those_with_limits_of_their_own(
    store: Store, sent: Outbound, settings: Settings
) -> None:
    await change(store, set_tenant, "*", {"max_in_flight": 2})
    await change(store, set_tenant, "big", {"max_in_flight": 5})
    await change(store, set_tenant, "free", {"max_in_flight": None})
    names = ("small", "big", "free", None)
    ids = {name: await enqueue(store, *(NewTask("a", tenant=name) for _ in range(10))) for name in names}
    await settle_passes(scheduler_of(store, sent, settings), sent)
    went = {task for task, _ in sent.pairs}
    assert {name: len(went & set(ids[name])) for name in names} == {"small": 2, "big": 5, "free": 10, None: 10}


async def test_a_rate_lets_its_burst_go_for_all_actions_together(
    store: Store, sent: Outbound, settings: Settings
) -> None:
    await change(store, set_tenant, "acme", {"rate": 1 / 3600, "burst": 4})
    await enqueue(store, *(NewTask(f"a{n % 3}", tenant="acme") for n in range(30)))
    await settle_passes(scheduler_of(store, sent, settings), sent)
    assert len(sent.pairs) == 4


async def test_a_limit_of_an_action_and_one_of_a_tenant_hold_together_and_tenants_share_evenly(
    store: Store, sent: Outbound, sql: Any, settings: Settings
) -> None:
    async with store.transaction() as session:
        await set_limits(session, "a", {"max_in_flight": 10})
    await change(store, set_tenant, "tight", {"max_in_flight": 1})
    flood = await enqueue(store, *(NewTask("a", tenant="flood", limit_key=f"k{n}") for n in range(40)))
    tight = await enqueue(store, *(NewTask("a", tenant="tight") for _ in range(40)))
    quiet = await enqueue(store, *(NewTask("a", tenant="quiet") for _ in range(40)))
    await settle_passes(scheduler_of(store, sent, settings), sent)
    went = {task for task, _ in sent.pairs}
    assert len(went) == 10
    assert len(went & set(tight)) == 1
    assert (len(went & set(flood)), len(went & set(quiet))) in {(4, 5), (5, 4)}


async def test_actions_take_turns_where_their_tenant_may_have_fewer_in_flight_than_there_are(
    store: Store, sent: Outbound, sql: Any, settings: Settings
) -> None:
    await change(store, set_tenant, "acme", {"max_in_flight": 1})
    first = await enqueue(store, *(NewTask("first", tenant="acme") for _ in range(30)))
    await enqueue(store, *(NewTask("second", tenant="acme") for _ in range(30)))
    schedulers = [scheduler_of(store, sent, settings)]
    for count in range(1, 31):
        await drain(schedulers, sent, sql, until=count)
        async with store.transaction() as session:
            await settle.finish(session, {sent.pairs[-1]: "{}"})
    assert 0 < len({task_id for task_id, _ in sent.pairs} & set(first)) < 30


async def test_a_paused_tenants_tasks_are_taken_and_wait_until_it_is_resumed(
    store: Store, sent: Outbound, settings: Settings
) -> None:
    await change(store, set_tenant, "acme", {"paused": True})
    paused = await enqueue(store, *(NewTask("a", tenant="acme") for _ in range(5)))
    await enqueue(store, NewTask("a", tenant="other"), NewTask("a"))
    scheduler = scheduler_of(store, sent, settings)
    await settle_passes(scheduler, sent)
    assert len(sent.pairs) == 2
    async with store.session() as session:
        record = await read_tenant_limits(session, "acme")
        assert (record.paused, record.waiting, record.in_flight, record.own) == (True, 5, 0, False)
    await change(store, set_tenant, "acme", {"paused": False})
    await drain([scheduler], sent, None, until=7)
    assert {task for task, _ in sent.pairs} >= set(paused)
    async with store.session() as session:
        (rules,) = await session.fetch("read_rules")
        assert rules["limits"] is False, "a pause that is over leaves no rule behind"


async def test_a_pause_keeps_the_limits_and_deleting_a_rule_brings_the_default_back(store: Store) -> None:
    await change(store, set_tenant, "*", {"max_in_flight": 2})
    await change(store, set_tenant, "acme", {"rate": 5.0, "burst": 2})
    await change(store, set_tenant, "acme", {"paused": True})
    await change(store, set_tenant, "acme", {"paused": False})
    async with store.session() as session:
        record = await read_tenant_limits(session, "acme")
    assert (record.rate, record.burst, record.max_in_flight, record.own) == (5.0, 2, None, True)
    await change(store, delete_tenant, "acme")
    async with store.session() as session:
        record = await read_tenant_limits(session, "acme")
    assert (record.rate, record.max_in_flight, record.own) == (None, 2, False)
    with pytest.raises(Exception, match="has no rule of its own: 'acme'"):
        await change(store, delete_tenant, "acme")


async def test_what_is_in_flight_when_a_tenant_becomes_limited_counts(
    store: Store, sent: Outbound, settings: Settings
) -> None:
    await enqueue(store, *(NewTask("a", tenant="acme") for _ in range(3)))
    scheduler = scheduler_of(store, sent, settings)
    await settle_passes(scheduler, sent)
    assert len(sent.pairs) == 3
    await change(store, set_tenant, "acme", {"max_in_flight": 4})
    await enqueue(store, *(NewTask("a", tenant="acme") for _ in range(3)))
    await settle_passes(scheduler, sent)
    assert len(sent.pairs) == 4


async def test_the_supervisor_forgets_what_a_rate_left_once_it_is_full(
    store: Store, sent: Outbound, outbound: SqsQueue, sql: Any, settings: Settings
) -> None:
    await change(store, set_tenant, "acme", {"rate": 1000.0})
    await enqueue(store, NewTask("a", tenant="acme"))
    await drain([scheduler_of(store, sent, settings)], sent, sql, until=1)
    await sql.execute("delete from penstock.gate")
    await sql.execute("update penstock.tenant_pace set refilled_at = now() - interval '1 hour'")
    rules = LimitUpkeep(store=store, outbound=outbound, open_queue=open_none)
    await rules.run_once()
    assert await sql.fetchval("select count(*) from penstock.tenant_pace") == 0


async def test_where_no_rule_is_a_plain_claim_is_all(store: Store, sent: Outbound, settings: Settings) -> None:
    await enqueue(store, *(NewTask("a", tenant="acme") for _ in range(3)), NewTask("a"))
    async with store.session() as session:
        batch = await claims.claim(session, 10)
    assert batch is not None
    assert len(batch.tasks) == 4


async def test_another_endpoint_takes_groups_on_a_standard_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        transport = SqsTransport(load_settings(sqs_endpoint_url=f"http://{host}:{port}", aws_region="us-east-1"))
        await transport.make_queues({"outbound": "fair"})
        queue = transport.queue("fair", label="outbound")
        assert (await queue.send([Outgoing("1", {}, "acme"), Outgoing("2", {}, "é"), Outgoing("3")])).failed == []
        groups: dict[str, str | None] = {}
        async with asyncio.timeout(60):
            while len(groups) < 3:
                received = await queue.receive(wait_seconds=1, visibility_seconds=60)
                groups |= {message.body: message.group for message in received}
        assert groups == {"1": "acme", "2": group_id("é"), "3": None}
        await transport.close()
    finally:
        server.stop()
