"""Limits, pauses and routes, as schedulers keep them, over a real Postgres and real queues."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from penstock.brokers.base import Message, Queue, SendReport
from penstock.brokers.opening import create_queues
from penstock.brokers.sqs import SqsQueue, SqsTransport
from penstock.db.pool import Store
from penstock.limits import reported
from penstock.limits.model import UNLIMITED, RouteSetParams
from penstock.methods.table import read_command
from penstock.protocol.answers import Action
from penstock.protocol.errors import Unavailable
from penstock.protocol.requests import parse_claim_id
from penstock.protocol.task import BEGINNING, NewTask
from penstock.scheduler.process import Scheduler
from penstock.settings.model import Settings
from penstock.supervisor import limits
from penstock.supervisor.limits import LimitUpkeep
from penstock.supervisor.repair import Repair
from penstock.tasks import claim as claims
from penstock.tasks import enqueue as enqueuing
from penstock.tasks import settle as settling
from tests.integration.doors import take
from tests.integration.rules import (
    delete_route,
    delete_tenant,
    list_actions,
    list_routes,
    read_action,
    set_limits,
    set_route,
    set_tenant,
)

TaskOf = Callable[[int], Any]


class Outbound:
    """A queue that keeps what is sent into it, for tests that send much."""

    def __init__(self, queue: SqsQueue) -> None:
        self.label = queue.label
        self.limits = queue.limits
        self._queue = queue
        self.pairs: list[tuple[int, int]] = []
        self.actions: list[str] = []

    async def send(self, messages: Sequence[Any]) -> Any:
        for message in messages:
            body = json.loads(message.body)
            for call in body if isinstance(body, list) else [body]:
                claim_id = parse_claim_id(call["id"])
                assert claim_id is not None
                self.pairs.append((claim_id.task_id, claim_id.claim))
                self.actions.append(call["method"])
        return await self._queue.send([])

    async def depth(self) -> Any:
        return await self._queue.depth()


@pytest.fixture
def sent(outbound: SqsQueue) -> Outbound:
    return Outbound(outbound)


def few_at_once(settings: Settings) -> Settings:
    return settings.model_copy(update={"in_flight_floor": 10, "in_flight_limit": 10, "claim_batch_size": 20})


def open_none(name: str, label: str) -> Queue:
    raise AssertionError(f"no test here asks for {name!r}")


@pytest.fixture
def scheduler(store: Store, sent: Outbound, settings: Settings) -> Scheduler:
    return Scheduler(store=store, outbound=sent, settings=settings, open_queue=open_none)  # type: ignore[arg-type]


async def enqueue(store: Store, *tasks: NewTask) -> list[int]:
    async with store.transaction() as session:
        return [answer.id for answer in await enqueuing.enqueue(session, tasks)]


def limits_of(record: Action) -> dict[str, Any]:
    """The limits that an action has."""
    return {name: value for name, without in UNLIMITED.items() if (value := getattr(record, name)) != without}


async def limit(store: Store, action: str, **change: Any) -> None:
    async with store.transaction() as session:
        await set_limits(session, action, change)


async def give_keys(store: Store, ids: Sequence[int], keys: Sequence[str]) -> None:
    async with store.session() as session:
        await session._connection.execute(
            "update penstock.task t set limit_key = k.key from unnest($1::bigint[], $2::text[]) k (id, key)"
            " where t.id = k.id", ids, keys,
        )  # fmt: skip


async def label(store: Store, ids: Sequence[int], labels: dict[str, str]) -> None:
    async with store.session() as session:
        await session._connection.execute(
            "update penstock.task set labels = $2::jsonb where id = any($1::bigint[])", ids, json.dumps(labels)
        )


async def finish(store: Store, sent: Outbound, count: int) -> None:
    """Have so many of the tasks that were sent succeed."""
    pairs, sent.pairs = sent.pairs[:count], sent.pairs[count:]
    async with store.transaction() as session:
        await settling.finish(session, dict.fromkeys(pairs, "{}"))


async def settle(store: Store, ids: Sequence[int]) -> None:
    async with store.transaction() as session:
        rows = await session.fetch("read_tasks", list(ids))
        await settling.finish(session, {(row["id"], row["claim"]): "{}" for row in rows})


async def run_until_idle(scheduler: Scheduler, *, rounds: int = 50) -> None:
    for _ in range(rounds):
        if not await scheduler.run_once():
            return
    raise AssertionError(f"the scheduler still finds work after {rounds} passes")


async def run_once_there_is_room(scheduler: Scheduler) -> None:
    """A window that was counted as full is not counted again at once: the slower the count, the later."""
    async with asyncio.timeout(60):
        while not await scheduler.run_once():
            await asyncio.sleep(0.02)
    await run_until_idle(scheduler)


async def held(store: Store, action: str) -> int:
    async with store.session() as session:
        return int(
            await session._connection.fetchval(
                "select count(*) from penstock.task where state = 'ACQUIRED' and action = $1", action
            )
        )


async def gates(store: Store) -> list[str]:
    async with store.session() as session:
        return [row[0] for row in await session._connection.fetch("select name from penstock.gate order by 1")]


# In flight


async def test_no_more_of_an_action_are_in_flight_than_its_limit(
    scheduler: Scheduler, store: Store, sent: Outbound
) -> None:
    await limit(store, "slow", max_in_flight=3)
    await enqueue(store, *(NewTask("slow") for _ in range(10)), *(NewTask("free") for _ in range(5)))
    await run_until_idle(scheduler)
    assert Counter(sent.actions) == {"slow": 3, "free": 5}
    await finish(store, sent, 8)  # all that went
    await asyncio.sleep(0.1)
    await run_until_idle(scheduler)
    assert Counter(sent.actions) == {"slow": 6, "free": 5}


async def test_a_limit_set_over_a_backlog_holds_from_then_on_and_counts_what_is_in_flight(
    scheduler: Scheduler, store: Store, sent: Outbound, settings: Settings
) -> None:
    few = settings.model_copy(update={"claim_batch_size": 4})
    scheduler = Scheduler(store=store, outbound=sent, settings=few, open_queue=open_none)  # type: ignore[arg-type]
    await enqueue(store, *(NewTask("slow") for _ in range(30)))
    assert await scheduler.run_once() == 4
    await limit(store, "slow", max_in_flight=5)
    await run_until_idle(scheduler)
    assert len(sent.pairs) == 5
    await limit(store, "slow", max_in_flight=None)
    await asyncio.sleep(0.1)
    await run_until_idle(scheduler)
    assert len(sent.pairs) == 30
    async with store.session() as session:
        assert await list_actions(session) == []


@pytest.fixture
def diverted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tasks each claim by rules has diverted."""
    counts: list[int] = []
    claim_by_rules = claims.claim_by_rules

    async def counting(*args: Any, **more: Any) -> Any:
        batch, count = await claim_by_rules(*args, **more)
        counts.append(count)
        return batch, count

    monkeypatch.setattr(claims, "claim_by_rules", counting)
    return counts


async def test_tasks_within_a_limit_are_claimed_at_once_after_the_first(
    scheduler: Scheduler, store: Store, sent: Outbound, diverted: list[int]
) -> None:
    await limit(store, "a", max_in_flight=8)
    await enqueue(store, NewTask("a"))
    await run_until_idle(scheduler)
    assert sum(diverted) == 1
    diverted.clear()
    ids = await enqueue(store, *(NewTask("a", priority=number % 2) for number in range(10)))
    await scheduler.run_once()
    first = [ids[number] for number in (1, 3, 5, 7, 9, 0, 2)]  # the seven that the limit leaves, highest priority first
    assert [task_id for task_id, _ in sent.pairs[1:]] == first
    assert diverted == [3]
    await run_until_idle(scheduler)
    assert await in_flight(store) == {"a": 8}


async def test_tasks_within_a_rate_are_claimed_at_once_and_use_it_up(
    scheduler: Scheduler, store: Store, sent: Outbound, diverted: list[int]
) -> None:
    await limit(store, "a", rate=0.001, burst=5)
    await enqueue(store, NewTask("a"))
    await run_until_idle(scheduler)
    diverted.clear()
    await enqueue(store, *(NewTask("a") for _ in range(3)))
    await run_until_idle(scheduler)
    assert len(sent.pairs) == 4
    assert not any(diverted)
    await enqueue(store, *(NewTask("a") for _ in range(3)))
    await run_until_idle(scheduler)
    assert len(sent.pairs) == 5
    assert sum(diverted) == 2


async def test_tasks_that_wait_at_a_gate_go_before_younger_ones(
    scheduler: Scheduler, store: Store, sent: Outbound
) -> None:
    await limit(store, "a", max_in_flight=2)
    old = await enqueue(store, *(NewTask("a") for _ in range(4)))
    await run_until_idle(scheduler)
    young = await enqueue(store, NewTask("a"), NewTask("a"))
    assert [task_id for task_id, _ in sent.pairs] == old[:2]
    for expected in (old[2:], young):
        await finish(store, sent, 2)
        async with asyncio.timeout(60):
            while len(sent.pairs) < 2:
                await scheduler.run_once()
        assert [task_id for task_id, _ in sent.pairs] == expected


@pytest.mark.parametrize(
    "change", [{"paused": True}, {"key_max_in_flight": 1}, {"max_in_flight": 1}], ids=["pause", "limit by key", "limit"]
)
async def test_a_changed_rule_holds_for_tasks_that_were_claimed_at_once_before(
    scheduler: Scheduler, store: Store, sent: Outbound, change: dict[str, Any]
) -> None:
    await limit(store, "a", max_in_flight=100)
    await enqueue(store, NewTask("a"))
    await run_until_idle(scheduler)
    await limit(store, "a", **change)
    ids = await enqueue(store, *(NewTask("a") for _ in range(4)))
    await give_keys(store, ids, ["k"] * 4)
    await run_until_idle(scheduler)
    assert len(sent.pairs) == (2 if "key_max_in_flight" in change else 1)


async def test_a_limited_tenant_is_limited_also_in_an_action_whose_tasks_are_claimed_at_once(
    scheduler: Scheduler, store: Store, sent: Outbound
) -> None:
    await limit(store, "a", max_in_flight=100)
    async with store.transaction() as session:
        await set_tenant(session, "acme", {"max_in_flight": 1})
    await enqueue(store, NewTask("a"))
    await run_until_idle(scheduler)
    await enqueue(store, *(NewTask("a", tenant=tenant) for tenant in ("acme", "acme", "other", "other")))
    await run_until_idle(scheduler)
    assert len(sent.pairs) == 1 + 1 + 2


async def test_a_window_full_of_a_limited_action_leaves_its_other_tasks_where_they_are(
    store: Store, sent: Outbound, settings: Settings, diverted: list[int], sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.scheduler.routes._LOOK_PAUSE_SECONDS", 0)
    monkeypatch.setattr("penstock.scheduler.routes._ROUND_PAUSE_SECONDS", 0)
    small = settings.model_copy(update={"in_flight_floor": 3, "in_flight_limit": 3, "claim_batch_size": 3})
    scheduler = Scheduler(store=store, outbound=sent, settings=small, open_queue=open_none)  # type: ignore[arg-type]
    await limit(store, "a", max_in_flight=100)
    await limit(store, "narrow", max_in_flight=1)
    await enqueue(store, NewTask("a"))
    await run_until_idle(scheduler)
    await finish(store, sent, 1)
    await enqueue(store, *(NewTask("a") for _ in range(6)), NewTask("narrow"))
    async with asyncio.timeout(60):
        while await in_flight(store) != {"a": 3, "narrow": 1}:
            await scheduler.run_once()
    assert await sql.fetchval("select count(*) from penstock.task where state = 'SCHEDULED' and gate is null") == 3


async def test_keys_are_limited_each_by_itself_and_one_key_holds_back_no_other(
    scheduler: Scheduler, store: Store, sent: Outbound
) -> None:
    await limit(store, "mail", key_max_in_flight=2)
    ids = await enqueue(store, *(NewTask("mail", priority=n % 3) for n in range(30)))
    keys = ["big"] * 24 + ["small"] * 3 + ["other"] * 3
    await give_keys(store, ids, keys)
    await run_until_idle(scheduler)
    of = dict(zip(ids, keys, strict=True))
    assert Counter(of[task_id] for task_id, _ in sent.pairs) == {"big": 2, "small": 2, "other": 2}
    # Within a key, by priority and then by age.
    assert [task_id for task_id, _ in sent.pairs if of[task_id] == "big"] == [ids[2], ids[5]]


async def test_a_limit_by_key_holds_no_task_that_has_no_key(
    scheduler: Scheduler, store: Store, sent: Outbound, task_of: TaskOf
) -> None:
    await limit(store, "mail", key_max_in_flight=1, key_rate=0.01)
    plain = await enqueue(store, *(NewTask("mail") for _ in range(5)), *(NewTask("mail", tenant="a") for _ in range(5)))
    keyed = await enqueue(store, *(NewTask("mail", limit_key="k") for _ in range(3)))
    await run_until_idle(scheduler)
    assert sorted(task_id for task_id, _ in sent.pairs) == [*plain, keyed[0]]
    assert [(await task_of(task_id))["state"] for task_id in keyed] == ["ACQUIRED", "SCHEDULED", "SCHEDULED"]


async def test_what_was_under_way_when_a_limit_was_set_is_adopted_in_a_few_rounds(
    store: Store, outbound: SqsQueue, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_LOOKED_AT", 2)
    await enqueue(store, *[NewTask("a")] * 3, NewTask("free"), NewTask("b", tenant="t"))
    async with store.transaction() as session:
        assert await claims.claim(session, 5) is not None
    async with store.transaction() as session:
        await set_limits(session, "a", {"max_in_flight": 1})
        await set_tenant(session, "t", {"max_in_flight": 1})
    await sql.execute("update penstock.task set gate = null")  # as if the claim had not been visible by then
    duty = LimitUpkeep(store=store, outbound=outbound, open_queue=open_none)
    gates = "select array_agg(gate order by id) from penstock.task"
    found = []
    for _ in range(3):
        await duty.run_once()
        found.append(await sql.fetchval(gates))
    tenant_gate = found[-1][-1]
    assert found == [
        ["a", "a", None, None, None], ["a", "a", "a", None, None], ["a", "a", "a", None, tenant_gate],
    ]  # fmt: skip
    assert tenant_gate is not None
    await sql.execute("update penstock.task set gate = null where id = (select min(id) from penstock.task)")
    await duty.run_once()
    assert await sql.fetchval(gates) == found[-1], "after the last it begins with the oldest"


def wide(characters: int) -> str:
    """Text of three bytes a character, which no index can compress."""
    return "".join(chr(code) for code in random.Random(characters).choices(range(0x4E00, 0x9FFF), k=characters))


@pytest.mark.parametrize("whose", ["action", "tenant"])
async def test_the_longest_names_pass_a_gate_and_hold_nobody_up(
    whose: str, scheduler: Scheduler, store: Store, sent: Outbound, outbound: SqsQueue, settings: Settings, sql: Any
) -> None:
    action, tenant, key = wide(200), wide(128), wide(500)
    params = {"action": action, "tenant": tenant, "limit_key": key, "unique_key": key, "ordering_key": key}
    task = read_command("enqueue", json.dumps(params).encode(), settings)
    assert isinstance(task, NewTask)
    async with store.transaction() as session:
        if whose == "action":
            await set_limits(session, action, {"key_max_in_flight": 1})
        else:
            await set_tenant(session, "*", {"max_in_flight": 1})
    long = await enqueue(store, task, NewTask(action, tenant=tenant, limit_key=key + "x"))
    plain = await enqueue(store, *(NewTask("plain") for _ in range(5)))
    await run_until_idle(scheduler)
    # Two keys that differ in their last character are two gates, where the limit is one for each key.
    went = sorted(task_id for task_id, _ in sent.pairs)
    assert went in ([long + plain] if whose == "action" else [[one, *plain] for one in long])
    gate_of = "select id, gate from penstock.task where state = 'ACQUIRED' order by id"
    by_claim = await sql.fetch(gate_of)
    await sql.execute("update penstock.task set gate = null where state = 'ACQUIRED'")
    await LimitUpkeep(store=store, outbound=outbound, open_queue=open_none).run_once()  # adopts what is in flight
    assert await sql.fetch(gate_of) == by_claim


async def refuse(sql: Any, condition: str) -> None:
    """Have Postgres refuse each row of a live task that does not fulfil the condition."""
    await sql.execute(f"alter table penstock.task add constraint refuses check ({condition})")


@pytest.mark.parametrize("window", ["open", "full"])
async def test_a_task_whose_claim_is_refused_fails_permanently_and_stands_in_nobodys_way(
    window: str, scheduler: Scheduler, store: Store, sent: Outbound, settings: Settings, sql: Any, task_of: TaskOf
) -> None:
    if window == "full":
        none = settings.model_copy(update={"in_flight_floor": 1, "in_flight_limit": 1})
        scheduler = Scheduler(store=store, outbound=sent, settings=none, open_queue=open_none)  # type: ignore[arg-type]
        await enqueue(store, NewTask("plain"))
        await run_until_idle(scheduler)
        sent.actions.clear()
    for action in ("refused", "limited"):
        await limit(store, action, max_in_flight=2)
    await refuse(sql, "gate is null or action <> 'refused'")
    tasks = [NewTask("refused" if n in (3, 11) else "limited" if n % 2 else "plain") for n in range(20)]
    ids = await enqueue(store, *tasks)
    await run_until_idle(scheduler)
    assert Counter(sent.actions) == {"limited": 2} | ({"plain": 10} if window == "open" else {})
    for task_id in (ids[3], ids[11]):
        task = await task_of(task_id)
        assert (task["state"], task["attempts"]) == ("CRITICAL_ERROR", 1)
        (failure,) = json.loads(task["failures"])
        assert failure["error"]["data"]["type"] == "Unclaimable"
        assert 'violates check constraint "refuses"' in failure["error"]["data"]["message"]
    assert await sql.fetchval("select count(*) from penstock.dispatch") == 0


async def test_a_claim_that_is_refused_at_one_gate_or_route_holds_up_no_other(
    store: Store, outbound: SqsQueue, transport: SqsTransport, settings: Settings, sql: Any
) -> None:
    scheduler = Scheduler(
        store=store, outbound=outbound, settings=settings,
        open_queue=lambda name, label: transport.queue(name, label=label),
    )  # fmt: skip
    await refuse(sql, "state <> 'ACQUIRED' or action not like 'refused%'")
    for action in ("refused-limited", "limited"):
        await limit(store, action, max_in_flight=2)
    name = f"{settings.outbound_queue}-video"
    async with queue_named(settings, transport, name) as video:
        await route(store, "a", name, "refused-routed")
        await route(store, "b", name, "routed")
        ids = await enqueue(store, *map(NewTask, ("refused-limited", "refused-routed", "limited", "routed")))
        await run_until_idle(scheduler)
        assert ids_of(await take(outbound)) == [ids[2]]
        assert ids_of(await take(video)) == [ids[3]]


async def test_a_limit_of_the_action_and_one_by_key_hold_together_and_keys_share_evenly(
    scheduler: Scheduler, store: Store, sent: Outbound
) -> None:
    await limit(store, "mail", max_in_flight=6, key_max_in_flight=4)
    ids = await enqueue(store, *(NewTask("mail") for _ in range(60)))
    keys = [f"k{n % 3}" for n in range(60)]
    await give_keys(store, ids, keys)
    await run_until_idle(scheduler)
    of = dict(zip(ids, keys, strict=True))
    assert Counter(of[task_id] for task_id, _ in sent.pairs) == {"k0": 2, "k1": 2, "k2": 2}


async def test_a_task_in_retry_goes_through_its_gate_again(
    scheduler: Scheduler, store: Store, sent: Outbound, task_of: TaskOf
) -> None:
    from penstock.protocol.task import Failure

    await limit(store, "slow", max_in_flight=1)
    (task_id,) = await enqueue(store, NewTask("slow"))
    await run_until_idle(scheduler)
    ((_, claim),) = sent.pairs
    async with store.transaction() as session:
        await settling.fail(session, [Failure(task_id, claim, "{}", 0.05)])
    deadline = time.monotonic() + 20
    while len(sent.pairs) < 2 and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        await scheduler.run_once()
    assert [pair[0] for pair in sent.pairs] == [task_id, task_id]
    assert (await task_of(task_id))["attempts"] == 2


async def test_gates_at_which_nothing_stands_are_taken_away(scheduler: Scheduler, store: Store, sent: Outbound) -> None:
    await limit(store, "slow", max_in_flight=2)
    await enqueue(store, *(NewTask("slow") for _ in range(3)))
    await run_until_idle(scheduler)
    assert await gates(store) == ["slow"]
    await finish(store, sent, 2)
    await asyncio.sleep(0.1)
    await run_until_idle(scheduler)
    assert len(sent.pairs) == 1
    assert await gates(store) == []


async def test_what_a_claim_took_while_its_limit_was_being_set_is_counted_after_the_next_round_of_upkeep(
    store: Store, sent: Outbound, settings: Settings, outbound: SqsQueue
) -> None:
    await enqueue(store, *(NewTask("slow") for _ in range(6)))
    async with store.session() as session:
        late = await claims.claim(session, 2)
    assert late is not None
    await limit(store, "slow", max_in_flight=3)
    async with store.session() as session:  # as a claim that began before leaves it
        await session._connection.execute("update penstock.task set gate = null")
    await LimitUpkeep(store=store, outbound=outbound, open_queue=open_none).run_once()
    await run_until_idle(
        Scheduler(store=store, outbound=sent, settings=settings, open_queue=open_none)  # type: ignore[arg-type]
    )
    assert len(sent.pairs) == 1


# Rates


async def test_a_rate_lets_its_burst_go_and_then_so_many_a_second(
    scheduler: Scheduler, store: Store, sent: Outbound
) -> None:
    await limit(store, "mail", rate=20.0, burst=5)
    await enqueue(store, *(NewTask("mail") for _ in range(100)))
    started = time.monotonic()
    await run_until_idle(scheduler)
    first = len(sent.pairs)
    assert first >= 5
    while len(sent.pairs) < min(first + 20, 100):  # on a busy machine, the first are most of them already
        await asyncio.sleep(0.02)
        await scheduler.run_once()
        assert len(sent.pairs) <= 5 + 20 * (time.monotonic() - started) + 1


@pytest.mark.parametrize("change", [{"rate": 1000.0, "burst": 10}, {"rate": None}], ids=["raised", "removed"])
async def test_a_changed_rate_holds_at_once_though_the_old_one_is_used_up(
    scheduler: Scheduler, store: Store, sent: Outbound, change: dict[str, Any]
) -> None:
    await limit(store, "mail", rate=1 / 3600)
    await enqueue(store, *(NewTask("mail") for _ in range(3)))
    await run_until_idle(scheduler)
    assert len(sent.pairs) == 1
    await limit(store, "mail", **change)
    await asyncio.sleep(0.1)
    await run_until_idle(scheduler)
    assert len(sent.pairs) == 3


@pytest.mark.parametrize("whose", ["action", "key", "tenant"])
async def test_a_rate_goes_on_after_the_clock_of_the_database_was_set_back(
    scheduler: Scheduler, store: Store, sent: Outbound, whose: str
) -> None:
    if whose == "tenant":
        async with store.transaction() as session:
            await set_tenant(session, "acme", {"rate": 20.0, "burst": 1})
    else:
        await limit(
            store, "mail", **({"rate": 20.0, "burst": 1} if whose == "action" else {"key_rate": 20.0, "key_burst": 1})
        )
    await enqueue(store, *(NewTask("mail", limit_key="k", tenant="acme") for _ in range(2)))
    async with asyncio.timeout(20):
        while len(sent.pairs) < 2:
            await scheduler.run_once()
    async with store.transaction() as session:
        await session._connection.execute(
            "update penstock.action set tokens = 0, refilled_at = now() + interval '1 hour' where tokens is not null;"
            "update penstock.gate set tokens = 0, refilled_at = now() + interval '1 hour' where tokens is not null;"
            "update penstock.tenant_pace set tokens = 0, refilled_at = now() + interval '1 hour'"
        )
    await enqueue(store, *(NewTask("mail", limit_key="k", tenant="acme") for _ in range(2)))
    async with asyncio.timeout(20):
        while len(sent.pairs) < 4:
            await scheduler.run_once()


@pytest.mark.parametrize("whose", ["action", "action at once", "refused", "key", "tenant"])
async def test_a_start_that_could_not_be_sent_is_given_back_to_the_rate(
    scheduler: Scheduler, store: Store, sent: Outbound, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    async def send_none(messages: Sequence[Any]) -> SendReport:
        places = range(len(messages))
        return SendReport(list(places), "away", frozenset(places if whose == "refused" else ()))

    monkeypatch.setattr("penstock.scheduler.gates._PAUSE_SECONDS", 0.0)
    rate = {"rate": 1 / 3600, "burst": 2}
    if whose == "tenant":
        async with store.transaction() as session:
            await set_tenant(session, "acme", rate)
    else:
        await limit(store, "mail", **{f"key_{name}" if whose == "key" else name: value for name, value in rate.items()})
    if whose == "action at once":
        await enqueue(store, NewTask("mail"))
        await run_until_idle(scheduler)
    await enqueue(store, *(NewTask("mail", limit_key="k", tenant="acme") for _ in range(3)))
    with monkeypatch.context() as away:
        away.setattr(sent, "send", send_none)
        for _ in range(6):
            with suppress(Unavailable):
                await scheduler.run_once()
    if whose == "refused":
        await enqueue(store, *(NewTask("mail") for _ in range(3)))
    async with asyncio.timeout(20):
        while len(sent.pairs) < 2:
            with suppress(Unavailable):
                await scheduler.run_once()
    for _ in range(5):
        await scheduler.run_once()
    assert len(sent.pairs) == 2


@pytest.mark.parametrize("whose", ["key", "tenant"])
async def test_a_rate_of_one_in_many_thousand_years_holds_up_no_other_task(
    scheduler: Scheduler, store: Store, outbound: SqsQueue, sent: Outbound, whose: str
) -> None:
    if whose == "tenant":
        async with store.transaction() as session:
            await set_tenant(session, "slow", {"rate": 1e-14})
            await set_tenant(session, "acme", {"max_in_flight": 5})
    else:
        await limit(store, "mail", key_rate=1e-14)
        await enqueue(store, NewTask("mail", limit_key="once"))
    await enqueue(store, *(NewTask("mail", limit_key="k", tenant="slow") for _ in range(3)))
    await run_until_idle(scheduler)
    await enqueue(store, NewTask("mail", limit_key="k", tenant="acme"))
    await run_until_idle(scheduler)
    assert len(sent.pairs) == (2 if whose == "tenant" else 3)
    async with store.transaction() as session:
        await session._connection.execute("delete from penstock.gate")  # as once nothing stands at it any more
    await LimitUpkeep(store=store, outbound=outbound, open_queue=lambda _name, _label: outbound).run_once()


async def test_a_rate_by_key_is_each_keys_own(scheduler: Scheduler, store: Store, sent: Outbound) -> None:
    await limit(store, "mail", key_rate=0.01, key_burst=2)
    ids = await enqueue(store, *(NewTask("mail") for _ in range(12)))
    keys = ["a"] * 9 + ["b"] * 3
    await give_keys(store, ids, keys)
    await run_until_idle(scheduler)
    of = dict(zip(ids, keys, strict=True))
    assert Counter(of[task_id] for task_id, _ in sent.pairs) == {"a": 2, "b": 2}
    # What was spent is remembered when nothing stands at the gate any more.
    await finish(store, sent, 4)
    async with store.transaction() as session:
        await settling.cancel(session, ids)
    again = await enqueue(store, NewTask("mail"))
    await give_keys(store, again, ["a"])
    await asyncio.sleep(0.1)
    await run_until_idle(scheduler)
    assert sent.pairs == []


# Pauses


async def test_a_paused_action_takes_tasks_and_sends_none_until_it_is_resumed(
    scheduler: Scheduler, store: Store, sent: Outbound
) -> None:
    await limit(store, "mail", paused=True)
    await enqueue(store, *(NewTask("mail") for _ in range(5)), NewTask("other"))
    await run_until_idle(scheduler)
    assert sent.actions == ["other"]
    await enqueue(store, NewTask("mail"))
    await run_until_idle(scheduler)
    assert sent.actions == ["other"]
    async with store.session() as session:
        assert limits_of(await read_action(session, "mail")) == {"paused": True}
    await limit(store, "mail", paused=False)
    await run_until_idle(scheduler)
    assert Counter(sent.actions) == {"mail": 6, "other": 1}


async def test_a_backlog_that_was_paused_goes_by_priority_and_window_as_before(
    store: Store, sent: Outbound, settings: Settings
) -> None:
    scheduler = Scheduler(store=store, outbound=sent, settings=few_at_once(settings), open_queue=open_none)  # type: ignore[arg-type]
    await limit(store, "mail", paused=True)
    await enqueue(store, *(NewTask("mail") for _ in range(100)))
    await run_until_idle(scheduler)
    assert sent.pairs == []
    await limit(store, "mail", paused=False)
    await enqueue(store, NewTask("urgent", priority=1))
    await run_until_idle(scheduler)
    assert sent.actions == ["urgent", *["mail"] * 9]
    assert await gates(store) == []


async def test_a_backlog_goes_by_priority_and_window_while_one_of_its_limit_keys_is_held(
    store: Store, sent: Outbound, settings: Settings, sql: Any
) -> None:
    scheduler = Scheduler(store=store, outbound=sent, settings=few_at_once(settings), open_queue=open_none)  # type: ignore[arg-type]
    await enqueue(store, NewTask("mail", limit_key="a"))
    await run_until_idle(scheduler)
    async with store.transaction() as session:
        await reported.hold(session, [reported.Hold(*sent.pairs[0], 600.0, None, whole=False)])
    held = await enqueue(store, *(NewTask("mail", limit_key="a") for _ in range(5)))
    await enqueue(store, *(NewTask("mail", limit_key="b") for _ in range(100)))
    await run_until_idle(scheduler)
    assert len(sent.pairs) == 10
    assert not {task_id for task_id, _ in sent.pairs} & set(held)
    assert await sql.fetchval("select count(*) from penstock.task where state = 'SCHEDULED' and gate is not null") == 5
    await finish(store, sent, 10)
    await sql.execute("update penstock.gate set held_until = now(), next_at = now()")
    async with asyncio.timeout(60):
        while not sent.pairs:
            await scheduler.run_once()
            await asyncio.sleep(0.02)
    assert [task_id for task_id, _ in sent.pairs][:5] == held


async def test_a_pause_keeps_the_limits_that_there_are(store: Store) -> None:
    await limit(store, "mail", max_in_flight=7, rate=2.5)
    await limit(store, "mail", paused=True)
    await limit(store, "mail", rate=None)
    async with store.session() as session:
        (record,) = await list_actions(session)
    assert limits_of(record) == {"paused": True, "max_in_flight": 7}


# Many schedulers


async def test_schedulers_at_once_never_pass_a_limit(store: Store, sent: Outbound, settings: Settings) -> None:
    await limit(store, "slow", max_in_flight=7, key_max_in_flight=2)
    ids = await enqueue(store, *(NewTask("slow") for _ in range(200)))
    keys = [f"k{n % 9}" for n in range(200)]
    await give_keys(store, ids, keys)
    of = dict(zip(ids, keys, strict=True))
    schedulers = [
        Scheduler(store=store, outbound=sent, settings=settings, open_queue=open_none)  # type: ignore[arg-type]
        for _ in range(4)
    ]
    done: list[tuple[int, int]] = []
    deadline = time.monotonic() + 60
    while len(done) < 200 and time.monotonic() < deadline:
        await asyncio.gather(*(scheduler.run_once() for scheduler in schedulers))
        async with store.session() as session:
            rows = await session._connection.fetch(
                "select id, claim from penstock.task where state = 'ACQUIRED' and action = 'slow'"
            )
        by_key = Counter(of[row["id"]] for row in rows)
        assert len(rows) <= 7
        assert not by_key or max(by_key.values()) <= 2
        some = [(row["id"], row["claim"]) for row in rows][:5]
        async with store.transaction() as session:
            await settling.finish(session, dict.fromkeys(some, "{}"))
        done += some
    assert sorted(task_id for task_id, _ in done) == ids
    assert len(set(sent.pairs)) == len(sent.pairs) == 200


# Routes


@asynccontextmanager
async def queue_named(settings: Settings, transport: SqsTransport, name: str) -> AsyncIterator[SqsQueue]:
    await create_queues(settings.model_copy(update={"outbound_queue": name}))
    yield transport.queue(name, label=name)


def ids_of(messages: Sequence[Message]) -> list[int]:
    found = []
    for message in messages:
        body = json.loads(message.body)
        found += [int(call["id"].split(":")[0]) for call in (body if isinstance(body, list) else [body])]
    return sorted(found)


@pytest.fixture
def routed(store: Store, outbound: SqsQueue, transport: SqsTransport, settings: Settings) -> Scheduler:
    return Scheduler(
        store=store, outbound=outbound, settings=settings,
        open_queue=lambda name, label: transport.queue(name, label=label),
    )  # fmt: skip


async def route(store: Store, name: str, queue: str, *actions: str, position: int = 0, **labels: str) -> None:
    async with store.transaction() as session:
        await set_route(session, RouteSetParams(name, queue, actions, labels, position))


async def test_tasks_go_to_the_queue_of_the_first_route_that_fits(
    routed: Scheduler, store: Store, outbound: SqsQueue, transport: SqsTransport, settings: Settings
) -> None:
    name = f"{settings.outbound_queue}-video"
    async with queue_named(settings, transport, name) as video, queue_named(settings, transport, name + "-eu") as eu:
        await route(store, "video", name, "video.*", "cut_100%")
        await route(store, "eu", name + "-eu", "video.*", position=-1, region="eu")
        plain = await enqueue(store, NewTask("mail"), NewTask("videos"), NewTask("cutX1005"))
        going = await enqueue(store, NewTask("video.cut"), NewTask("video."), NewTask("cut_100%"))
        special = await enqueue(store, NewTask("video.cut"))
        await label(store, special, {"region": "eu", "x": "y"})
        await label(store, plain, {"region": "eu"})
        await run_until_idle(routed)
        assert ids_of(await take(outbound)) == plain
        assert ids_of(await take(video)) == going
        assert ids_of(await take(eu)) == special
        async with store.session() as session:
            listed = await list_routes(session)
        assert [(found.name, found.actions, found.labels, found.in_flight) for found in listed] == [
            ("eu", ["video.*"], {"region": "eu"}, 1),
            ("video", ["video.*", "cut_100%"], {}, 3),
        ]


def three_at_once(store: Store, outbound: SqsQueue, transport: SqsTransport, settings: Settings) -> Scheduler:
    """A scheduler with a window of three tasks for each queue."""
    small = settings.model_copy(update={"in_flight_floor": 3, "in_flight_limit": 3})
    return Scheduler(
        store=store, outbound=outbound, settings=small,
        open_queue=lambda name, label: transport.queue(name, label=label),
    )  # fmt: skip


async def test_a_route_has_a_window_of_its_own(
    store: Store, outbound: SqsQueue, transport: SqsTransport, settings: Settings
) -> None:
    scheduler = three_at_once(store, outbound, transport, settings)
    name = f"{settings.outbound_queue}-video"
    async with queue_named(settings, transport, name) as video:
        await route(store, "video", name, "video")
        await enqueue(store, *(NewTask("video") for _ in range(9)), *(NewTask("mail") for _ in range(9)))
        for _ in range(8):
            await scheduler.run_once()
        assert len(ids_of(await take(outbound))) == 3
        assert len(ids_of(await take(video))) == 3


async def test_a_full_outbound_queue_holds_back_neither_routes_nor_limited_actions(
    store: Store, outbound: SqsQueue, transport: SqsTransport, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.scheduler.routes._LOOK_PAUSE_SECONDS", 0)
    monkeypatch.setattr("penstock.scheduler.routes._ROUND_PAUSE_SECONDS", 0)
    scheduler = three_at_once(store, outbound, transport, settings.model_copy(update={"claim_batch_size": 3}))
    name = f"{settings.outbound_queue}-video"
    async with queue_named(settings, transport, name) as video:
        await route(store, "video", name, "video")
        await limit(store, "narrow", max_in_flight=1)
        await enqueue(store, *(NewTask("mail", priority=1) for _ in range(20)))
        await scheduler.run_once()
        assert await in_flight(store) == {"mail": 3}
        await enqueue(store, *(NewTask("mail") for _ in range(20)), NewTask("video"), NewTask("narrow"))
        async with asyncio.timeout(60):
            while await in_flight(store) != {"mail": 3, "video": 1, "narrow": 1}:
                await scheduler.run_once()
        assert len(ids_of(await take(video))) == 1


async def test_a_full_window_has_tasks_put_aside_around_one_that_another_transaction_holds(
    store: Store, sql: Any
) -> None:
    async with store.transaction() as session:
        await set_route(session, RouteSetParams("video", "elsewhere", ["video"], {}))
    ids = await enqueue(store, *(NewTask("video") for _ in range(5)))
    async with sql.transaction():  # as of a program that replaces the task
        await sql.execute("update penstock.task set updated_at = now() where id = $1", ids[2])
        async with store.session() as session:
            looked, diverted, _ = await claims.put_aside(session, 100, 0, BEGINNING)
    assert (looked, diverted) == (5, 4)
    async with store.session() as session:
        assert (await claims.put_aside(session, 100, 0, BEGINNING))[:2] == (1, 1)


async def in_flight(store: Store) -> dict[str, int]:
    """How many tasks of each action are in flight."""
    async with store.session() as session:
        rows = await session.fetch("count_live")
    return {row["action"]: row["count"] for row in rows if row["state"] == "ACQUIRED"}


async def test_a_route_whose_queue_is_missing_holds_back_no_other_task_and_loses_none(
    routed: Scheduler, store: Store, outbound: SqsQueue, task_of: TaskOf
) -> None:
    await route(store, "video", "no-such-queue", "video")
    (stuck,) = await enqueue(store, NewTask("video"))
    (other,) = await enqueue(store, NewTask("mail"))
    await run_until_idle(routed)
    assert ids_of(await take(outbound)) == [other]
    task = await task_of(stuck)
    assert (task["state"], task["attempts"]) == ("SCHEDULED", 0)


async def test_a_scheduler_waits_while_a_route_rests_whose_window_is_full_of_what_could_not_be_sent(
    store: Store, outbound: SqsQueue, transport: SqsTransport, settings: Settings
) -> None:
    scheduler = three_at_once(store, outbound, transport, settings)
    await route(store, "video", "no-such-queue", "video")
    await enqueue(store, *(NewTask("video") for _ in range(9)))
    for _ in range(3):
        await scheduler.run_once()
    assert scheduler._routes.known["video"].window.is_full
    (seconds,) = scheduler._routes.full_for_seconds()
    assert seconds > 1


async def test_a_route_that_rests_is_looked_at_again_before_the_next_poll(
    store: Store, outbound: SqsQueue, transport: SqsTransport, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.scheduler.routes._PAUSE_SECONDS", 5.0)
    scheduler = Scheduler(
        store=store, outbound=outbound, settings=settings.model_copy(update={"poll_seconds": 60.0}),
        open_queue=lambda name, label: transport.queue(name, label=label),
    )  # fmt: skip
    name = f"{settings.outbound_queue}-video"
    await route(store, "video", name, "video")
    (task_id,) = await enqueue(store, NewTask("video"))
    await run_until_idle(scheduler)
    async with queue_named(settings, transport, name) as video, asyncio.timeout(40):
        while not await scheduler.run_once():
            await scheduler.wait_for_work()
        assert ids_of(await take(video)) == [task_id]


async def test_what_is_put_aside_while_another_pass_claims_for_its_route_is_looked_for_at_once(
    store: Store, outbound: SqsQueue, transport: SqsTransport, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = three_at_once(store, outbound, transport, settings)
    name = f"{settings.outbound_queue}-video"
    found_nothing, go_on = asyncio.Event(), asyncio.Event()

    async def claim_slowly(*given: Any) -> Any:
        found = await claim_by_route(*given)
        found_nothing.set()
        await go_on.wait()
        return found

    claim_by_route = claims.claim_by_route
    monkeypatch.setattr(claims, "claim_by_route", claim_slowly)
    async with queue_named(settings, transport, name) as video:
        await route(store, "video", name, "video")
        one = asyncio.create_task(scheduler.run_once())
        await found_nothing.wait()
        (task_id,) = await enqueue(store, NewTask("video"))
        assert [await scheduler.run_once() for _ in range(2)] == [1, 0]  # put aside, and no room in the route
        go_on.set()
        assert await one, "it looks again"
        await scheduler.run_once()
        assert ids_of(await take(video)) == [task_id]


async def test_what_is_put_aside_while_another_pass_looks_at_the_gates_is_looked_for_at_once(
    scheduler: Scheduler, store: Store, sent: Outbound, monkeypatch: pytest.MonkeyPatch
) -> None:
    await limit(store, "held", paused=True)
    await limit(store, "mail", max_in_flight=5)
    await enqueue(store, NewTask("held"))
    await run_until_idle(scheduler)
    fetch = store.fetch
    looked, go_on = asyncio.Event(), asyncio.Event()

    async def fetch_slowly(name: str, *given: Any) -> Any:
        rows = await fetch(name, *given)
        if name == "find_open_gates":
            looked.set()
            await go_on.wait()
        return rows

    monkeypatch.setattr(store, "fetch", fetch_slowly)
    one = asyncio.create_task(scheduler.run_once())
    await looked.wait()
    await enqueue(store, NewTask("mail"))
    assert await scheduler.run_once() == 1
    assert scheduler._gates.idle_seconds() > 0, "another pass is at it"
    monkeypatch.undo()
    go_on.set()
    assert await one, "it looks again"
    await run_until_idle(scheduler)
    assert sent.actions == ["mail"]


async def test_what_waits_for_a_deleted_route_goes_by_the_other_rules(
    store: Store, outbound: SqsQueue, transport: SqsTransport, settings: Settings
) -> None:
    full = settings.model_copy(update={"in_flight_floor": 1, "in_flight_limit": 1})

    def open_queue(name: str, label: str) -> Queue:
        return transport.queue(name, label=label)

    scheduler = Scheduler(store=store, outbound=outbound, settings=full, open_queue=open_queue)
    upkeep = LimitUpkeep(store=store, outbound=outbound, open_queue=open_queue)
    name = f"{settings.outbound_queue}-video"
    async with queue_named(settings, transport, name):
        await route(store, "video", name, "video")
        ids = await enqueue(store, *(NewTask("video") for _ in range(3)))
        for _ in range(4):
            await scheduler.run_once()
        assert await upkeep.run_once() == 0
        assert set(upkeep.queues) == {"outbound:video"}
        assert upkeep.queue_of("video") is not upkeep.queue_of(None) is outbound
        async with store.transaction() as session:
            assert await delete_route(session, "video")
            assert not await delete_route(session, "video")
        assert await upkeep.run_once() == 2
        assert upkeep.queue_of("video") is None
        await run_until_idle(Scheduler(store=store, outbound=outbound, settings=settings, open_queue=open_none))
        assert ids_of(await take(outbound)) == ids[1:]


async def test_a_silent_task_of_a_route_waits_while_the_routes_own_queue_holds_anything(
    routed: Scheduler, store: Store, outbound: SqsQueue, results: SqsQueue, transport: SqsTransport,
    settings: Settings, task_of: TaskOf,
) -> None:  # fmt: skip
    name = f"{settings.outbound_queue}-video"
    async with queue_named(settings, transport, name) as video:
        await route(store, "video", name, "video")
        (task_id,) = await enqueue(store, NewTask("video"))
        await run_until_idle(routed)
        upkeep = LimitUpkeep(
            store=store, outbound=outbound, open_queue=lambda name, label: transport.queue(name, label=label)
        )
        await upkeep.run_once()
        impatient = settings.model_copy(update={"stale_after_seconds": 0.0})
        repair = Repair(store=store, queue_of=upkeep.queue_of, results=results, settings=impatient, empty_seconds=0)
        for _ in range(3):
            assert await repair.run_once() == 0  # the outbound queue is empty, but that is not where it went
        await video.delete(await take(video))
        assert [await repair.run_once() for _ in range(2)] == [0, 1]
        assert (await task_of(task_id))["state"] == "ERROR"


async def test_limits_hold_for_what_goes_by_a_route(
    routed: Scheduler, store: Store, outbound: SqsQueue, transport: SqsTransport, settings: Settings
) -> None:
    name = f"{settings.outbound_queue}-video"
    async with queue_named(settings, transport, name) as video:
        await route(store, "video", name, "video")
        await limit(store, "video", max_in_flight=2)
        ids = await enqueue(store, *(NewTask("video") for _ in range(5)))
        await run_until_idle(routed)
        assert ids_of(await take(video)) == ids[:2]
        assert await take(outbound) == []


@pytest.mark.parametrize("whose", ["action", "tenant", "every tenant"])
async def test_a_pause_or_limit_holds_for_the_backlog_of_a_route_that_is_older(
    whose: str, store: Store, transport: SqsTransport, outbound: SqsQueue, settings: Settings, sql: Any
) -> None:
    name = f"{settings.outbound_queue}-video"
    few = settings.model_copy(update={"in_flight_floor": 3, "claim_batch_size": 3, "in_flight_limit": 3})
    scheduler = Scheduler(
        store=store, outbound=outbound, settings=few,
        open_queue=lambda name, label: transport.queue(name, label=label),
    )  # fmt: skip
    async with queue_named(settings, transport, name) as video:
        await route(store, "video", name, "*")
        ids = await enqueue(store, *(NewTask("video", tenant="acme") for _ in range(8)))
        ids += await enqueue(store, NewTask("audio", tenant="globex"))
        await run_until_idle(scheduler)
        assert ids_of(await take(video)) == ids[:3]
        assert (
            await sql.fetchval("select count(*) from penstock.task where state = 'SCHEDULED' and route = 'video'") == 6
        )
        async with store.transaction() as session:
            match whose:
                case "action":
                    await set_limits(session, "video", {"paused": True})
                case "tenant":
                    await set_tenant(session, "acme", {"paused": True})
                case "every tenant":
                    await set_tenant(session, "*", {"max_in_flight": 3})
        await settle(store, ids[:1])
        await run_once_there_is_room(scheduler)
        assert ids_of(await take(video)) == (ids[3:4] if whose == "every tenant" else []) + ids[-1:]
        async with store.transaction() as session:
            match whose:
                case "action":
                    await set_limits(session, "video", {"paused": False})
                case "tenant":
                    await set_tenant(session, "acme", {"paused": False})
                case "every tenant":
                    await delete_tenant(session, "*")
        went: list[int] = []
        rest = ids[4:-1] if whose == "every tenant" else ids[3:-1]
        while len(went) < len(rest):  # by the window again, three at a time
            await settle(store, ids)
            await run_once_there_is_room(scheduler)
            went += ids_of(await take(video))
            assert sum((await in_flight(store)).values()) <= 3
        assert went == rest


async def test_what_waits_at_a_gate_goes_by_the_routes_of_the_moment_at_which_it_goes(
    routed: Scheduler, store: Store, outbound: SqsQueue, transport: SqsTransport, settings: Settings
) -> None:
    name = f"{settings.outbound_queue}-video"
    async with queue_named(settings, transport, name) as video:
        await limit(store, "video", paused=True)
        (task_id,) = await enqueue(store, NewTask("video"))
        await run_until_idle(routed)
        await route(store, "video", name, "video")
        await limit(store, "video", paused=False)
        await run_until_idle(routed)
        assert ids_of(await take(video)) == [task_id]
        assert await take(outbound) == []


# Ageing


async def test_low_priorities_starve_without_ageing_and_get_their_tenth_with_it(
    store: Store, sent: Outbound, settings: Settings
) -> None:
    small = settings.model_copy(update={"claim_batch_size": 20})
    ids = await enqueue(store, *(NewTask("low", priority=-5) for _ in range(5)))
    await enqueue(store, *(NewTask("high", priority=5) for _ in range(400)))
    strict = Scheduler(store=store, outbound=sent, settings=small, open_queue=open_none)  # type: ignore[arg-type]
    for _ in range(5):
        assert await strict.run_once() == 20
    assert "low" not in sent.actions
    async with store.session() as session:
        await session._connection.execute(
            "update penstock.task set run_at = now() - interval '1 minute' where id = any($1::bigint[])", ids[:3]
        )
    sent.actions.clear()
    ageing = small.model_copy(update={"priority_ageing_seconds": 30.0})
    fair = Scheduler(store=store, outbound=sent, settings=ageing, open_queue=open_none)  # type: ignore[arg-type]
    while sent.actions.count("high") < 100:
        assert await fair.run_once()
    assert sent.actions.count("low") == 3  # those that have waited too long, not those that came lately
    first_hundred = sent.actions[:25]
    assert first_hundred.count("low") <= 4


async def test_ageing_finds_what_waits_too_long_also_where_rules_apply(
    store: Store, sent: Outbound, settings: Settings
) -> None:
    await limit(store, "another", paused=True)
    ageing = settings.model_copy(update={"claim_batch_size": 10, "priority_ageing_seconds": 30.0})
    scheduler = Scheduler(store=store, outbound=sent, settings=ageing, open_queue=open_none)  # type: ignore[arg-type]
    ids = await enqueue(store, NewTask("low"))
    await enqueue(store, *(NewTask("high", priority=5) for _ in range(100)))
    async with store.session() as session:
        await session._connection.execute(
            "update penstock.task set run_at = now() - interval '1 minute' where id = any($1::bigint[])", ids
        )
    for _ in range(3):
        await scheduler.run_once()
    assert "low" in sent.actions


# To the moment


async def test_a_due_task_is_claimed_at_its_time_though_the_poll_is_far_away(
    store: Store, sent: Outbound, settings: Settings
) -> None:
    patient = settings.model_copy(update={"poll_seconds": 30.0})
    scheduler = Scheduler(store=store, outbound=sent, settings=patient, open_queue=open_none)  # type: ignore[arg-type]
    await enqueue(store, NewTask("a", delay_seconds=0.5), NewTask("b", delay_seconds=1.0, priority=-3))
    started = time.monotonic()
    while len(sent.pairs) < 2:
        if not await scheduler.run_once():
            await asyncio.wait_for(scheduler.wait_for_work(), 20)
    assert time.monotonic() - started < 20
    async with store.session() as session:
        late = await session._connection.fetchval("select max(claimed_at - run_at) from penstock.task")
        early = await session._connection.fetchval("select min(claimed_at - run_at) from penstock.task")
    assert early.total_seconds() >= 0
    assert late.total_seconds() < 5
