"""Why a task does not run: one sentence for each cause, over a real Postgres and a real scheduler."""

from __future__ import annotations

import asyncio

import pytest

from penstock.brokers.base import Queue
from penstock.brokers.sqs import SqsQueue
from penstock.client.client import Client
from penstock.db.pool import Store
from penstock.limits import reported
from penstock.limits.explain import explain
from penstock.limits.reported import Hold
from penstock.protocol.answers import Cause, Explanation
from penstock.protocol.errors import TaskNotFound
from penstock.protocol.reports import decode_reports, encode_notification
from penstock.protocol.task import Failure, NewTask
from penstock.results.apply import apply_reports
from penstock.scheduler.process import Scheduler
from penstock.settings.model import Settings
from penstock.tasks import settle as settling
from tests.integration.apis import running
from tests.integration.limits.test_limits import Outbound, enqueue
from tests.integration.rules import set_limits, set_tenant

ALIVE = '{"percent":null,"note":null}'


def open_none(name: str, label: str) -> Queue:
    raise AssertionError(f"no test here asks for {name!r}")


@pytest.fixture
def sent(outbound: SqsQueue) -> Outbound:
    return Outbound(outbound)


@pytest.fixture
def scheduler(store: Store, sent: Outbound, settings: Settings) -> Scheduler:
    return Scheduler(store=store, outbound=sent, settings=settings, open_queue=open_none)  # type: ignore[arg-type]


async def why(store: Store, task_id: int) -> Explanation:
    async with store.session() as session:
        return await explain(session, task_id)


async def age(store: Store, task_id: int, column: str) -> None:
    async with store.session() as session:
        await session._connection.execute(
            f"update penstock.task set {column} = {column} - interval '1 min' where id = $1", task_id
        )


async def test_a_task_that_is_not_due_says_when_it_is_and_after_which_failure(
    store: Store, scheduler: Scheduler, sent: Outbound
) -> None:
    (later,) = await enqueue(store, NewTask("mail", delay_seconds=7200))
    found = await why(store, later)
    assert (found.cause, found.reason[:16]) == (Cause.NOT_DUE, "Not due for 2 h:")
    (failed,) = await enqueue(store, NewTask("mail"))
    assert await scheduler.run_once() == 1
    async with store.transaction() as session:
        await settling.fail(session, [Failure(*sent.pairs[0], '{"code":1,"message":"no"}', delay_seconds=3600)])
    found = await why(store, failed)
    assert found.cause is Cause.NOT_DUE
    assert "attempt 1 of 10 failed; it runs at 2" in found.reason


async def test_a_paused_action_and_a_paused_tenant_are_named_with_what_resumes_them(store: Store) -> None:
    of_action, of_tenant = await enqueue(store, NewTask("mail"), NewTask("send", tenant="acme"))
    async with store.transaction() as session:
        await set_limits(session, "mail", {"paused": True})
        await set_tenant(session, "acme", {"paused": True})
    assert (await why(store, of_action)).reason == "Action mail is paused (`penstock actions resume mail`)."
    assert (await why(store, of_tenant)).reason == "Tenant acme is paused (`penstock tenants resume acme`)."


async def test_a_limit_that_is_reached_is_named_with_its_figures(store: Store, scheduler: Scheduler) -> None:
    async with store.transaction() as session:
        await set_limits(session, "mail", {"max_in_flight": 2})
        await set_limits(session, "slow", {"rate": 0.01, "burst": 1})
    mails = await enqueue(store, *(NewTask("mail") for _ in range(3)))
    slow = await enqueue(store, *(NewTask("slow") for _ in range(2)))
    for _ in range(3):
        await scheduler.run_once()
    assert (await why(store, mails[2])).reason == "Action mail is limited to 2 tasks in flight, and 2 are."
    found = await why(store, slow[1])
    assert found.cause is Cause.LIMIT
    assert found.reason == "Waits behind other tasks of limited action slow (action slow to 0.01 a second)."


async def test_a_task_at_a_gate_that_limits_nothing_any_more_is_in_line(store: Store, scheduler: Scheduler) -> None:
    async with store.transaction() as session:
        await set_limits(session, "mail", {"paused": True})
    (waiting,) = await enqueue(store, NewTask("mail"))
    assert await scheduler.run_once()
    async with store.transaction() as session:
        await set_limits(session, "mail", {"paused": False})
    assert (await why(store, waiting)).reason.endswith("; a scheduler claims it next.")


async def test_a_limit_by_key_is_none_of_a_task_without_a_key(store: Store, scheduler: Scheduler) -> None:
    async with store.transaction() as session:
        await set_limits(session, "mail", {"key_max_in_flight": 1})
    await enqueue(store, *(NewTask("mail") for _ in range(3)))
    assert await scheduler.run_once()
    (waiting,) = await enqueue(store, NewTask("mail"))
    assert (await why(store, waiting)).cause is not Cause.LIMIT


async def test_a_task_behind_another_of_its_ordering_key_names_it_also_when_that_holds_the_key(
    store: Store, scheduler: Scheduler, sent: Outbound
) -> None:
    first, second = await enqueue(store, *(NewTask("mail", ordering_key="k", max_attempts=1) for _ in range(2)))
    found = await why(store, second)
    assert (found.cause, found.task) == (Cause.ORDERING_KEY, first)
    assert found.reason == f"Task {first} of ordering key k goes first; it is scheduled."
    assert await scheduler.run_once() == 1
    async with store.transaction() as session:
        failure = Failure(*sent.pairs[0], '{"code":1,"message":"no"}', delay_seconds=None)
        await settling.fail(session, [failure], hold_keys=True)
    held = await why(store, second)
    assert held.task == first
    assert held.reason.startswith(f"Task {first} failed and holds ordering key k: retry it")
    assert (await why(store, first)).reason.startswith("Settled as failed ")


async def test_a_task_further_behind_names_the_one_that_goes_first_now(
    store: Store, scheduler: Scheduler, sent: Outbound
) -> None:
    _, second, third, fourth = await enqueue(store, *(NewTask("mail", ordering_key="k") for _ in range(4)))
    assert await scheduler.run_once() == 1
    async with store.transaction() as session:
        await settling.finish(session, dict.fromkeys(sent.pairs, "null"))
    found = await why(store, third)
    assert (found.task, found.task_state) == (second, "SCHEDULED")
    assert found.reason == f"Task {second} of ordering key k goes first; it is scheduled."
    assert await scheduler.run_once() == 1
    assert (await why(store, fourth)).reason == f"Task {second} of ordering key k goes first; it is acquired."


async def test_a_hold_of_a_whole_action_is_told_as_one_to_a_task_with_a_limit_key(
    store: Store, scheduler: Scheduler, sent: Outbound
) -> None:
    await enqueue(store, NewTask("mail"))
    assert await scheduler.run_once() == 1
    async with store.transaction() as session:
        await reported.hold(session, [Hold(*sent.pairs[0], 60, None, True)])
    (keyed,) = await enqueue(store, NewTask("mail", limit_key="c"))
    assert "which holds action mail for" in (await why(store, keyed)).reason


async def test_a_task_in_line_says_how_many_go_first_and_that_no_scheduler_takes_them(store: Store) -> None:
    ids = await enqueue(store, *(NewTask("mail") for _ in range(3)), NewTask("mail", priority=5))
    assert (await why(store, ids[3])).reason.endswith("; a scheduler claims it next.")
    found = await why(store, ids[2])
    assert found.cause is Cause.BACKLOG
    assert "; 3 due tasks go first, and 0 are in flight" in found.reason
    await age(store, ids[3], "run_at")
    # As one that a task of its ordering key has kept waiting until now.
    assert (await why(store, ids[3])).reason.endswith("; a scheduler claims it next.")
    await age(store, ids[3], "updated_at")
    late = await why(store, ids[3])
    assert late.cause is Cause.NO_SCHEDULER
    assert late.reason.startswith("Due since 1 min, and nothing is in flight: check that a scheduler runs")


async def test_a_task_that_has_expired_says_so_also_behind_another_of_its_ordering_key(
    store: Store, scheduler: Scheduler
) -> None:
    late, _, behind = ids = await enqueue(
        store,
        NewTask("mail", expires_in_seconds=3600),
        *(NewTask("mail", ordering_key="k", expires_in_seconds=3600) for _ in range(2)),
    )
    assert (await why(store, late)).cause is Cause.BACKLOG
    assert (await why(store, behind)).cause is Cause.ORDERING_KEY
    async with store.session() as session:
        await session._connection.execute(
            "update penstock.task set expires_at = now() - interval '1 min' where id = any($1)", ids
        )
    assert await scheduler.run_once() == 0
    for task_id in ids:
        found = await why(store, task_id)
        assert (found.cause, found.reason, found.task) == (
            "expired", "Expired 1 min ago, so it is not started any more; the supervisor cancels it.", None,
        )  # fmt: skip


async def test_a_claimed_task_is_followed_from_the_scheduler_to_its_worker(
    store: Store, scheduler: Scheduler, sent: Outbound
) -> None:
    (sending,) = await enqueue(store, NewTask("mail"))
    assert [await scheduler.run_once() for _ in range(2)] == [1, 0]  # the next claim confirms the sending
    found = await why(store, sending)
    assert found.cause is Cause.SENT
    assert found.reason.endswith(" ago; no worker has reported on it yet.")
    await age(store, sending, "claimed_at")
    found = await why(store, sending)
    assert found.reason == (
        "Sent to the outbound queue 1 min ago; no worker has reported on it yet: check that workers receive from the "
        "outbound queue."
    )
    async with store.transaction() as session:
        await settling.note_heartbeats(session, {sent.pairs[0]: ALIVE})
    running_now = await why(store, sending)
    assert running_now.cause is Cause.RUNNING
    assert running_now.reason.startswith("Runs since 1 min; last heartbeat ")


@pytest.mark.parametrize("tenant", [None, "acme"])
async def test_a_suspended_task_names_its_token(
    store: Store, scheduler: Scheduler, sent: Outbound, settings: Settings, tenant: str | None
) -> None:
    (task,) = await enqueue(store, NewTask("ask", tenant=tenant))
    assert await scheduler.run_once() == 1
    text = encode_notification("wait", id="{}:{}".format(*sent.pairs[0]), token="order-7", timeout=60)
    async with store.transaction() as session:
        await apply_reports(session, decode_reports(text, batch_limit=10, bare_ids=True), settings)
    found = await why(store, task)
    assert found.cause is Cause.EVENT
    assert found.reason.startswith("Waits for the event of token order-7, until 2")


async def test_a_workflow_step_names_the_steps_before_it_and_an_unknown_task_is_refused(
    store: Store, settings: Settings
) -> None:
    def talk(url: str) -> None:
        with Client(url) as client:
            steps = [{"name": "load", "action": "a"}, {"name": "save", "action": "b", "after": ["load"]}]
            flow = client.call("workflow.create", {"steps": steps})["id"]
            task = client.call("list", {"action": "b"})["tasks"][0]["id"]
            found = client.explain(task)
            assert (found.cause, found.workflow, found.task) == ("steps", flow, None)
            assert found.reason == f"Waits for earlier steps of workflow {flow}: load."
            with pytest.raises(TaskNotFound):
                client.explain(987654)

    async with running(store, settings) as api:
        await asyncio.to_thread(talk, api.url)
