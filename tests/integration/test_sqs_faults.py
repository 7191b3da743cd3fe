"""SQS refuses, forgets, repeats, reorders, comes late: nothing is lost, recorded twice or acknowledged too early."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.brokers.base import Depth, Message, Outgoing
from penstock.brokers.opening import create_queues
from penstock.brokers.sqs import SqsQueue, SqsTransport
from penstock.db.pool import Store
from penstock.protocol.errors import Unavailable
from penstock.protocol.reports import encode_error, encode_progress, encode_result
from penstock.protocol.requests import encode_call, parse_claim_id
from penstock.protocol.task import Claimed, NewTask
from penstock.resulter import Resulter
from penstock.scheduler.process import Scheduler
from penstock.settings.model import Settings, load_settings
from penstock.submitter import Submitter
from penstock.supervisor.repair import Repair
from penstock.tasks import claim as claims
from penstock.tasks import enqueue
from penstock.worker.handlers.actions import Registry, action
from penstock.worker.handlers.context import Context
from penstock.worker.process import Worker
from tests.claims import claim_id
from tests.integration.doors import (
    Cut,
    Forward,
    Hook,
    SqsProxy,
    no_routes,
    put,
    rejected,
    request,
    sample,
    sqs_proxy,
    take,
)

TaskOf = Callable[[int], Any]
Reply = tuple[int, dict[str, Any]]
EMPTY = Depth(0, 0, 0)
PATIENCE_SECONDS = 30


def error(status: int, code: str) -> Hook:
    return lambda operation, body, forward: (status, {"__type": f"com.amazonaws.sqs#{code}", "message": "no"})


def cut(operation: str, body: dict[str, Any], forward: Forward) -> Reply:
    raise Cut


def lost_reply(operation: str, body: dict[str, Any], forward: Forward) -> Reply:
    forward(body)
    raise Cut


def answered_by_somebody_else(operation: str, body: dict[str, Any], forward: Forward) -> Reply:
    return 200, {"hello": "this is no SQS"}


AWAY: dict[str, Hook] = {
    "ThrottlingException": error(400, "ThrottlingException"),
    "RequestThrottled": error(403, "RequestThrottled"),
    "OverLimit": error(403, "OverLimit"),
    "InternalFailure": error(500, "InternalFailure"),
    "ServiceUnavailable": error(503, "ServiceUnavailable"),
    "AccessDenied": error(403, "AccessDeniedException"),
    "RequestTimeTooSkewed": error(403, "RequestTimeTooSkewed"),
    "SignatureDoesNotMatch": error(403, "SignatureDoesNotMatch"),
    "KMS is throttled": error(400, "KmsThrottled"),
    "connection reset": cut,
}


class Rig:
    """The processes, each with its queues behind the proxy, and the same queues without it."""

    def __init__(self, store: Store, settings: Settings, near: SqsTransport, far: SqsTransport) -> None:
        names = {
            "inbound": settings.inbound_queue, "outbound": settings.outbound_queue, "results": settings.results_queue
        }  # fmt: skip
        self.store = store
        self.settings = settings
        self.inbound, self.outbound, self.results = (near.queue(name, label=label) for label, name in names.items())
        self.far = {label: far.queue(name, label=label) for label, name in names.items()}
        self.submitter = Submitter(store=store, inbound=self.far["inbound"], settings=settings)
        self.scheduler = Scheduler(open_queue=no_routes, store=store, outbound=self.far["outbound"], settings=settings)
        self.resulter = Resulter(store=store, results=self.far["results"], settings=settings)

    async def reach(self) -> None:
        """Look the queues up, so that a test's faults meet its own calls."""
        for queue in self.far.values():
            await queue.url()

    async def claimed(self, *tasks: NewTask) -> list[Claimed]:
        async with self.store.transaction() as session:
            await enqueue.enqueue(session, tasks)
            dispatch = await claims.claim(session, 1000)
            assert dispatch is not None
            await claims.confirm(session, dispatch.id)
        return sorted(dispatch.tasks, key=lambda task: task.id)

    async def counts(self) -> dict[str, int]:
        async with self.store.session() as session:
            page = (await session.fetch("list_tasks", 2**62, 10_000, 10_000, None, 0, *[None] * 4))[0]
            rows = await session.fetch("read_tasks", page["ids"])
        found: dict[str, int] = {}
        for row in rows:
            found[row["state"]] = found.get(row["state"], 0) + 1
        return found


@pytest.fixture
def proxy(sqs_url: str) -> Iterator[SqsProxy]:
    with sqs_proxy(sqs_url) as proxy:
        yield proxy


@pytest.fixture
async def rig(store: Store, settings: Settings, transport: SqsTransport, proxy: SqsProxy) -> AsyncIterator[Rig]:
    far = SqsTransport(load_settings(sqs_endpoint_url=proxy.url, aws_region="us-east-1"))
    rig = Rig(store, settings, transport, far)
    await rig.reach()
    yield rig
    await far.close()


@asynccontextmanager
async def weather(proxy: SqsProxy, hook: Hook) -> AsyncIterator[None]:
    proxy.hook = hook
    try:
        yield
    finally:
        proxy.hook = None


def only(operation: str, hook: Hook, *, times: int = 10**9) -> Hook:
    """The hook for so many calls of one operation; all others pass."""
    left = [times]

    def chosen(name: str, body: dict[str, Any], forward: Forward) -> Reply:
        if name != operation or left[0] <= 0:
            return forward(body)
        left[0] -= 1
        return hook(name, body, forward)

    return chosen


def failing(*positions: int) -> Hook:
    """Of a batch call the entries at these positions fail for the queue's reasons, time and again."""

    def hook(operation: str, body: dict[str, Any], forward: Forward) -> Reply:
        guilty = [entry for entry in body["Entries"] if int(entry["Id"]) in positions]
        others = [entry for entry in body["Entries"] if entry not in guilty]
        status, reply = forward(body | {"Entries": others}) if others else (200, {})
        reply.setdefault("Failed", []).extend(
            {"Id": entry["Id"], "Code": "InternalError", "SenderFault": False} for entry in guilty
        )
        return status, reply

    return hook


def claim_of(call: dict[str, Any]) -> tuple[int, int]:
    claim = parse_claim_id(call["id"])
    assert claim is not None
    return claim.task_id, claim.claim


def claims_of(messages: Sequence[Message]) -> list[tuple[int, int]]:
    bodies = [json.loads(message.body) for message in messages]
    return sorted(claim_of(call) for body in bodies for call in (body if isinstance(body, list) else [body]))


def result(task: Claimed, value: str = "1") -> str:
    return encode_result(claim_id(task.id, task.claim), value)


async def eventually(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await condition():
            await asyncio.sleep(0.01)


# Away: each kind of refusal, each process


async def test_submitter_and_resulter_wait_for_a_queue_that_refuses(rig: Rig, proxy: SqsProxy) -> None:
    tasks = await rig.claimed(*(NewTask("a") for _ in AWAY))
    for done, (task, (kind, hook)) in enumerate(zip(tasks, AWAY.items(), strict=True)):
        await put(rig.inbound, request("submit:b", {"n": done}))
        await put(rig.results, result(task))
        async with weather(proxy, hook):
            for service in (rig.submitter, rig.resulter):
                with pytest.raises(Unavailable, match="SQS is unavailable"):
                    await service.run_once()
        assert await rig.submitter.run_once() == 1, kind
        assert await rig.resulter.run_once() == 1, kind
        assert await rig.counts() == {
            "SUCCESS": done + 1, "SCHEDULED": done + 1, **({"ACQUIRED": left} if (left := len(AWAY) - done - 1) else {})
        }  # fmt: skip
    assert [await rig.inbound.depth(), await rig.results.depth()] == [EMPTY, EMPTY]


async def test_a_delete_that_is_refused_brings_the_message_again_and_nothing_twice(rig: Rig, proxy: SqsProxy) -> None:
    (task,) = await rig.claimed(NewTask("a"))
    await put(rig.inbound, request("submit:b", {"n": 1}))
    await put(rig.results, result(task))
    before = sample("penstock_stale_results_total")
    async with weather(proxy, only("DeleteMessageBatch", error(503, "ServiceUnavailable"))):
        assert await rig.submitter.run_once() == 1
        assert await rig.resulter.run_once() == 1
    expected = {"SUCCESS": 1, "SCHEDULED": 1}
    assert await rig.counts() == expected
    for queue in (rig.inbound, rig.results):
        assert (await queue.depth()).total == 1
    await expire(rig, proxy)
    assert await rig.submitter.run_once() == 1
    assert await rig.resulter.run_once() == 1
    assert await rig.counts() == expected
    assert sample("penstock_stale_results_total") == before + 1
    assert [await rig.inbound.depth(), await rig.results.depth()] == [EMPTY, EMPTY]


async def expire(rig: Rig, proxy: SqsProxy) -> None:
    """Every leased message comes back, as after the visibility timeout."""
    # Long-poll replies are seen by no test, so the receipts are read out of what the processes tried to delete.
    receipts = {entry["ReceiptHandle"] for entries in proxy.entries("DeleteMessageBatch") for entry in entries}
    for queue in (rig.inbound, rig.outbound, rig.results):
        await queue.release([Message("", receipt, "", 1, None, {}) for receipt in receipts])


async def test_a_scheduler_that_cannot_send_gives_back_what_it_claimed(
    rig: Rig, proxy: SqsProxy, task_of: TaskOf
) -> None:
    for kind, hook in AWAY.items():
        async with rig.store.transaction() as session:
            (answer,) = await enqueue.enqueue(session, [NewTask("a")])
        async with weather(proxy, hook):
            with pytest.raises(Unavailable, match="nothing could be sent"):
                await rig.scheduler.run_once()
        row = await task_of(answer.id)
        assert (row["state"], row["attempts"]) == ("SCHEDULED", 0), kind
        assert await rig.outbound.depth() == EMPTY
        assert await rig.scheduler.run_once() == 1
        row = await task_of(answer.id)
        messages = await take(rig.outbound)
        assert claims_of(messages) == [(answer.id, row["claim"])], kind
        await rig.outbound.delete(messages)


async def test_a_queue_that_never_answers_costs_a_call_its_time_and_no_more(
    store: Store, settings: Settings, proxy: SqsProxy, inbound: SqsQueue
) -> None:
    far = SqsTransport(load_settings(sqs_endpoint_url=proxy.url, aws_region="us-east-1"), answer_seconds=0.5)
    ended = threading.Event()

    def silent(operation: str, body: dict[str, Any], forward: Forward) -> Reply:
        ended.wait(PATIENCE_SECONDS)
        raise Cut

    try:
        submitter = Submitter(
            store=store, inbound=far.queue(settings.inbound_queue, label="inbound"), settings=settings
        )
        await submitter.open()
        await put(inbound, request("submit:a", {"n": 1}))
        async with weather(proxy, silent):
            async with asyncio.timeout(PATIENCE_SECONDS):
                with pytest.raises(Unavailable, match="imeout"):
                    await submitter.run_once()
        ended.set()
        assert await submitter.run_once() == 1
        assert await inbound.depth() == EMPTY
    finally:
        ended.set()
        await far.close()


async def test_a_send_ends_well_before_its_claims_are_given_back(
    rig: Rig, proxy: SqsProxy, settings: Settings, task_of: TaskOf, sql: Any
) -> None:
    ended = threading.Event()

    def silent(operation: str, body: dict[str, Any], forward: Forward) -> Reply:
        ended.wait(PATIENCE_SECONDS)
        raise Cut

    async with rig.store.transaction() as session:
        (answer,) = await enqueue.enqueue(session, [NewTask("a")])
    hurried = settings.model_copy(update={"unsent_after_seconds": 1.5})
    scheduler = Scheduler(store=rig.store, outbound=rig.far["outbound"], settings=hurried, open_queue=no_routes)
    try:
        async with weather(proxy, only("SendMessageBatch", silent)):
            async with asyncio.timeout(PATIENCE_SECONDS):
                with pytest.raises(Unavailable, match="in time"):
                    await scheduler.run_once()
    finally:
        ended.set()
    row = await task_of(answer.id)
    assert (row["state"], row["attempts"]) == ("SCHEDULED", 0)
    assert await sql.fetchval("select count(*) from penstock.dispatch") == 0


def refusing(message: str) -> Hook:
    """Of a batch call, entries with a group are refused, and all others pass."""

    def hook(operation: str, body: dict[str, Any], forward: Forward) -> Reply:
        grouped = [entry for entry in body["Entries"] if "MessageGroupId" in entry]
        others = [entry for entry in body["Entries"] if entry not in grouped]
        status, reply = forward(body | {"Entries": others}) if others else (200, {})
        reply.setdefault("Failed", []).extend(
            {"Id": entry["Id"], "Code": "InvalidParameterValue", "SenderFault": True, "Message": message}
            for entry in grouped
        )
        return status, reply

    return hook


async def test_a_queue_that_takes_no_groups_is_sent_messages_without(rig: Rig, proxy: SqsProxy) -> None:
    async with rig.store.transaction() as session:
        ids = [
            a.id
            for a in await enqueue.enqueue(
                session, [NewTask("a", tenant="acme"), NewTask("a"), NewTask("a", tenant="b")]
            )
        ]
    reason = (
        "Value acme for parameter MessageGroupId is invalid. Reason: The request include parameter that is not valid"
    )
    async with weather(proxy, only("SendMessageBatch", refusing(reason))):
        assert await rig.scheduler.run_once() == 3
        assert sorted(pair[0] for pair in claims_of(await take(rig.outbound))) == ids
        async with rig.store.transaction() as session:
            await enqueue.enqueue(session, [NewTask("a", tenant="acme")])
        before = len(proxy.entries("SendMessageBatch"))
        assert await rig.scheduler.run_once() == 1
        assert len(proxy.entries("SendMessageBatch")) == before + 1  # without a second try


async def test_what_is_no_fault_of_a_message_fails_no_task(rig: Rig, proxy: SqsProxy, task_of: TaskOf) -> None:
    async with rig.store.transaction() as session:
        (answer,) = await enqueue.enqueue(session, [NewTask("a", tenant="acme")])
    async with weather(proxy, only("SendMessageBatch", refusing("The value of an attribute is wrong"))):
        with pytest.raises(Unavailable, match="InvalidParameterValue"):
            await rig.scheduler.run_once()
    row = await task_of(answer.id)
    assert (row["state"], row["attempts"]) == ("SCHEDULED", 0)


async def test_an_answer_that_is_not_of_sqs_is_taken_for_nothing_done(
    rig: Rig, proxy: SqsProxy, task_of: TaskOf
) -> None:
    """A proxy or a load balancer may say 200 in the place of SQS."""
    async with rig.store.transaction() as session:
        (answer,) = await enqueue.enqueue(session, [NewTask("a")])
    async with weather(proxy, answered_by_somebody_else):
        with pytest.raises(Unavailable, match="nothing could be sent"):
            await rig.scheduler.run_once()
        with pytest.raises(Unavailable, match="not of SQS"):
            await rig.far["outbound"].depth()
        message = Message("1", "receipt", "", 1, None, {})
        assert await rig.far["inbound"].delete([message]) == [message]
    assert (await task_of(answer.id))["state"] == "SCHEDULED"
    assert await rig.scheduler.run_once() == 1


# In parts


async def test_of_a_send_that_fails_in_part_only_that_part_is_given_back(
    rig: Rig, proxy: SqsProxy, settings: Settings, task_of: TaskOf
) -> None:
    single = settings.model_copy(update={"pack_max_tasks": 1})
    scheduler = Scheduler(open_queue=no_routes, store=rig.store, outbound=rig.far["outbound"], settings=single)
    async with rig.store.transaction() as session:
        ids = [answer.id for answer in await enqueue.enqueue(session, [NewTask("a") for _ in range(8)])]
    async with weather(proxy, only("SendMessageBatch", failing(1, 4))):
        assert await scheduler.run_once() == 6
    states = [(await task_of(task_id))["state"] for task_id in ids]
    assert (states.count("ACQUIRED"), states.count("SCHEDULED")) == (6, 2)
    assert await scheduler.run_once() == 2
    sent = claims_of(await take(rig.outbound))
    assert [task_id for task_id, _ in sent] == ids
    assert [(await task_of(task_id))["attempts"] for task_id in ids] == [1] * 8


async def test_of_a_delete_that_fails_in_part_only_that_part_comes_again(rig: Rig, proxy: SqsProxy) -> None:
    await put(rig.inbound, *(request("submit:a", {"n": n}) for n in range(6)))
    async with weather(proxy, only("DeleteMessageBatch", failing(0, 3))):
        assert await rig.submitter.run_once() == 6
    assert (await rig.inbound.depth()).in_flight == 2
    await expire(rig, proxy)
    assert await rig.submitter.run_once() == 2
    assert await rig.counts() == {"SCHEDULED": 6}
    assert await rig.inbound.depth() == EMPTY


# Lost replies: it was done, and the caller did not learn it


async def test_a_send_whose_reply_is_lost_runs_twice_and_counts_once(
    rig: Rig, proxy: SqsProxy, task_of: TaskOf
) -> None:
    async with rig.store.transaction() as session:
        (answer,) = await enqueue.enqueue(session, [NewTask("a")])
    async with weather(proxy, only("SendMessageBatch", lost_reply)):
        with pytest.raises(Unavailable):
            await rig.scheduler.run_once()
    assert (await task_of(answer.id))["state"] == "SCHEDULED"
    assert await rig.scheduler.run_once() == 1
    *old, new = claims_of(await take(rig.outbound))
    assert old
    assert all(claim < new[1] for _, claim in old)
    await put(rig.results, *(encode_result(claim_id(task, claim), '"old"') for task, claim in old))
    await put(rig.results, encode_result(claim_id(new[0], new[1]), '"new"'))
    while await rig.resulter.run_once():
        pass
    row = await task_of(answer.id)
    assert (row["state"], row["result"], row["attempts"]) == ("SUCCESS", '"new"', 1)
    assert await rig.counts() == {"SUCCESS": 1}


@pytest.mark.parametrize("operation", ["ReceiveMessage", "DeleteMessageBatch"])
async def test_a_reply_that_submitter_and_resulter_never_see_loses_nothing(
    rig: Rig, proxy: SqsProxy, transport: SqsTransport, operation: str
) -> None:
    (task,) = await rig.claimed(NewTask("a"))
    await put(rig.inbound, request("submit:b", {"n": 1}))
    await put(rig.results, result(task))
    seen: list[tuple[str, str]] = []

    def lost(name: str, body: dict[str, Any], forward: Forward) -> Reply:
        _, reply = forward(body)
        seen.extend((body["QueueUrl"], message["ReceiptHandle"]) for message in reply.get("Messages", ()))
        raise Cut

    async with weather(proxy, only(operation, lost)):
        for service in (rig.submitter, rig.resulter):
            if operation == "ReceiveMessage":
                with pytest.raises(Unavailable):
                    await service.run_once()
            else:
                assert await service.run_once() == 1
    # The SDK tries a lost call once more, so the lost receive may have been either.
    for url, receipt in seen:
        await transport.queue(url, label="inbound").release([Message("", receipt, "", 1, None, {})])
    for service in (rig.submitter, rig.resulter):
        assert await service.run_once() == (operation == "ReceiveMessage")
    assert await rig.counts() == {"SUCCESS": 1, "SCHEDULED": 1}
    assert [await rig.inbound.depth(), await rig.results.depth()] == [EMPTY, EMPTY]


# Twice, in another order, late


async def test_messages_that_are_there_twice_are_recorded_once(rig: Rig, task_of: TaskOf) -> None:
    """SQS may store a message twice; the copies have the same id."""
    done, failed = await rig.claimed(NewTask("a"), NewTask("a"))
    await put(rig.inbound, request("submit:b", {"n": 1}))
    (message,) = await rig.inbound.receive(wait_seconds=0, visibility_seconds=30)
    await asyncio.gather(*(rig.submitter.commit([message]) for _ in range(3)))
    await rig.submitter.commit([message, message])
    both = [result(done), encode_error(claim_id(failed.id, failed.claim), 1, "boom", {"retry_after": 3600.0})]
    await put(rig.results, *both, *both, f"[{','.join(both)}]")
    while await rig.resulter.run_once():
        pass
    assert await rig.counts() == {"SUCCESS": 1, "ERROR": 1, "SCHEDULED": 1}
    row = await task_of(failed.id)
    assert (row["attempts"], len(json.loads(row["failures"]))) == (1, 1)


async def test_results_in_any_order_count_by_their_claim(rig: Rig, task_of: TaskOf) -> None:
    (old,) = await rig.claimed(NewTask("a"))
    async with rig.store.session() as session:
        await claims.release(session, [(old.id, old.claim)])
        dispatch = await claims.claim(session, 1)
    assert dispatch is not None
    (new,) = dispatch.tasks
    late_sign = encode_progress(claim_id(new.id, new.claim), 10, "late")
    for body in (
        result(new, '"new"'),
        late_sign,
        result(old, '"old"'),
        encode_error(claim_id(old.id, old.claim), 1, "x", {}),
    ):
        await put(rig.results, body)
        assert await rig.resulter.run_once() == 1
    row = await task_of(old.id)
    assert (row["state"], row["result"], row["failures"]) == ("SUCCESS", '"new"', None)
    assert await rejected(rig.store) == []


async def test_an_outbound_message_that_comes_hours_late_changes_nothing(
    rig: Rig, settings: Settings, task_of: TaskOf
) -> None:
    """It was given up as never taken, sent again, done, and then the first one turns up at a worker."""
    async with rig.store.transaction() as session:
        (answer,) = await enqueue.enqueue(session, [NewTask("echo", '{"text": "new"}')])
    assert await rig.scheduler.run_once() == 1
    (late,) = await take(rig.outbound)
    await rig.outbound.delete([late])
    async with rig.store.session() as session:
        await claims.release(session, claims_of([late]))
    assert await rig.scheduler.run_once() == 1
    worker = worker_of(rig, settings)
    async with running(worker):
        await run_until(worker, rig.resulter, lambda: state_is(task_of, answer.id, "SUCCESS"))
        first = await task_of(answer.id)
        before = sample("penstock_stale_results_total")
        await put(rig.outbound, late.body)

        async def noticed() -> bool:
            return sample("penstock_stale_results_total") > before

        await run_until(worker, rig.resulter, noticed)
    assert dict(await task_of(answer.id)) == dict(first)
    assert [await rig.outbound.depth(), await rig.results.depth()] == [EMPTY, EMPTY]


async def test_messages_whose_receipts_have_expired_are_stored_once(rig: Rig, settings: Settings) -> None:
    """The submitter stood still between commit and delete; meanwhile another got the message."""
    await put(rig.inbound, request("submit:a", {"n": 1}))
    messages = await rig.inbound.receive(wait_seconds=0, visibility_seconds=1)
    await rig.submitter.commit(messages)
    await rig.inbound.release(messages)
    other = Submitter(store=rig.store, inbound=rig.inbound, settings=settings)
    assert await other.run_once() == 1
    await rig.inbound.delete(messages)
    assert await rig.counts() == {"SCHEDULED": 1}
    assert await rig.inbound.depth() == EMPTY


# The worker


def registry() -> Registry:
    registry = Registry()

    @action("echo", registry=registry)
    async def echo(ctx: Context, text: str) -> str:
        return text

    return registry


def worker_of(rig: Rig, settings: Settings, *, registry: Registry | None = None, **changes: Any) -> Worker:
    return Worker(
        outbound=rig.far["outbound"],
        results=rig.far["results"],
        settings=settings.model_copy(update=changes),
        registry=registry or globals()["registry"](),
    )


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[Worker]:
    """The worker's side tasks run, none of them ends."""
    sides = [asyncio.ensure_future(run()) for run in worker.side_tasks().values()]
    try:
        yield worker
        assert not [task for task in sides if task.done()]
    finally:
        for task in sides:
            task.cancel()
        await asyncio.gather(*sides, return_exceptions=True)
        await worker.close()


async def run_until(worker: Worker, resulter: Resulter, condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await condition():
            await worker.run_once()
            await resulter.run_once()
            await asyncio.sleep(0.01)


async def state_is(task_of: TaskOf, task_id: int, state: str) -> bool:
    return bool((await task_of(task_id))["state"] == state)


async def send(rig: Rig, *texts: str) -> list[Claimed]:
    """Claimed tasks of the action echo, each in a message of its own."""
    tasks = await rig.claimed(*(NewTask("echo", json.dumps({"text": text})) for text in texts))
    calls = [
        encode_call(task.id, task.claim, task.action, task.payload, claim_id=claim_id(task.id, task.claim))
        for task in tasks
    ]
    report = await rig.outbound.send([Outgoing(call) for call in calls])
    assert report.failed == []
    return tasks


async def test_a_worker_keeps_its_answers_until_the_results_queue_takes_them(
    rig: Rig, proxy: SqsProxy, settings: Settings
) -> None:
    worker = worker_of(rig, settings)
    loop = asyncio.get_running_loop()
    async with running(worker):
        for done, (kind, hook) in enumerate(AWAY.items()):
            await send(rig, kind)
            refused = asyncio.Event()

            def noted(operation: str, body: dict[str, Any], forward: Forward, hook: Hook = hook,
                      refused: asyncio.Event = refused) -> Reply:  # fmt: skip
                loop.call_soon_threadsafe(refused.set)
                return hook(operation, body, forward)

            async with weather(proxy, only("SendMessageBatch", noted)):
                assert await worker.run_once() == 1
                await asyncio.wait_for(refused.wait(), PATIENCE_SECONDS)
                assert (await rig.outbound.depth()).in_flight == 1, kind
                assert await rig.results.depth() == EMPTY, kind
            await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
            assert await rig.outbound.depth() == EMPTY
            assert await rig.resulter.run_once() == 1
            assert await rig.counts() == {"SUCCESS": done + 1}


async def test_a_worker_comes_back_to_an_outbound_queue_that_refused(
    rig: Rig, proxy: SqsProxy, settings: Settings
) -> None:
    worker = worker_of(rig, settings)
    async with running(worker):
        for kind, hook in AWAY.items():
            await send(rig, kind)
            async with weather(proxy, hook):
                with pytest.raises(Unavailable, match="SQS is unavailable"):
                    await worker.run_once()
            assert await worker.run_once() == 1, kind
            await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
            assert await rig.outbound.depth() == EMPTY


async def test_answers_that_were_sent_in_part_all_arrive_and_count_once(
    rig: Rig, proxy: SqsProxy, settings: Settings, task_of: TaskOf
) -> None:
    tasks = await send(rig, *"abcdef")
    worker = worker_of(rig, settings)
    async with running(worker), weather(proxy, only("SendMessageBatch", lost_reply, times=3)):
        while await worker.run_once():
            pass
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
    assert await rig.outbound.depth() == EMPTY
    before = sample("penstock_stale_results_total")
    while await rig.resulter.run_once():
        pass
    assert await rig.counts() == {"SUCCESS": 6}
    assert [json.loads((await task_of(task.id))["result"]) for task in tasks] == list("abcdef")
    assert sample("penstock_stale_results_total") > before


async def test_a_worker_whose_delete_fails_in_part_tries_that_part_again(
    rig: Rig, proxy: SqsProxy, settings: Settings
) -> None:
    await send(rig, *"abcdef")
    worker = worker_of(rig, settings)
    async with running(worker), weather(proxy, only("DeleteMessageBatch", failing(0, 2), times=2)):
        while await worker.run_once():
            pass
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
    assert await rig.outbound.depth() == EMPTY


@pytest.mark.parametrize(
    "hook", [error(503, "ServiceUnavailable"), failing(0), lost_reply], ids=["503", "part", "lost"]
)
async def test_a_hold_that_could_not_be_extended_once_is_extended_by_the_next_try(
    rig: Rig, proxy: SqsProxy, settings: Settings, hook: Hook
) -> None:
    let_go = asyncio.Event()
    runs = []
    slow = Registry()

    @action("echo", registry=slow)
    async def echo(ctx: Context, text: str) -> str:
        runs.append(ctx.redelivered)
        await let_go.wait()
        return text

    await send(rig, "x")
    worker = worker_of(rig, settings, registry=slow, visibility_timeout_seconds=3)
    # One call of ours is two of the SDK's where it sees no reply, or of the queue's where an entry failed.
    async with running(worker), weather(proxy, only("ChangeMessageVisibilityBatch", hook, times=2)):
        assert await worker.run_once() == 1

        async def extended() -> bool:
            return len(proxy.entries("ChangeMessageVisibilityBatch")) >= 4

        await eventually(extended)
        assert await rig.outbound.depth() == Depth(visible=0, in_flight=1, delayed=0)
        let_go.set()
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
    assert runs == [False]
    assert await rig.outbound.depth() == EMPTY


async def test_messages_that_wait_to_be_deleted_are_deleted_when_the_process_stops(
    rig: Rig, proxy: SqsProxy, settings: Settings
) -> None:
    waiting = settings.model_copy(update={"billed_call_wait_seconds": 60.0, "visibility_timeout_seconds": 600})
    worker = worker_of(rig, waiting)
    await send(rig, *"abc")
    async with running(worker):
        while await worker.run_once():
            pass
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
    assert await rig.outbound.depth() == EMPTY
    resulter = Resulter(store=rig.store, results=rig.far["results"], settings=waiting)
    deleting = asyncio.create_task(resulter.side_tasks()["delete messages"]())
    proxy.calls.clear()
    while await resulter.run_once():
        pass
    assert await rig.counts() == {"SUCCESS": 3}
    await resulter.drain(PATIENCE_SECONDS)
    assert await rig.results.depth() == EMPTY
    assert len(proxy.entries("DeleteMessageBatch")) < len([1 for name, _ in proxy.calls if name == "ReceiveMessage"])
    deleting.cancel()


# Queues and credentials that change


async def test_queues_deleted_and_made_anew_are_used_again_and_no_task_is_lost(
    rig: Rig, transport: SqsTransport, settings: Settings, task_of: TaskOf
) -> None:
    (task,) = await rig.claimed(NewTask("a"))
    async with rig.store.transaction() as session:
        (waiting,) = await enqueue.enqueue(session, [NewTask("b")])
    client = await transport.client()
    for queue in (rig.inbound, rig.outbound, rig.results):
        await client.delete_queue(QueueUrl=await queue.url())
    for service in (rig.submitter, rig.resulter):
        with pytest.raises(Unavailable, match="does not exist"):
            await service.run_once()
    with pytest.raises(Unavailable, match="does not exist"):
        await rig.scheduler.run_once()
    assert (await task_of(waiting.id))["state"] == "SCHEDULED"
    await create_queues(settings)
    assert await rig.scheduler.run_once() == 1
    await put(rig.inbound, request("submit:c", {"n": 1}))
    assert await rig.submitter.run_once() == 1
    # Its message went with the queue; no worker ever reported it, so two looks at an empty queue show it.
    sent = await take(rig.outbound)
    await rig.outbound.delete(sent)
    stale = settings.model_copy(update={"stale_after_seconds": 0.0})
    repair = Repair(
        store=rig.store, queue_of=lambda _: rig.outbound, results=rig.results, settings=stale, empty_seconds=0
    )
    await repair.run_once()
    await repair.run_once()
    row = await task_of(task.id)
    assert (row["state"], row["attempts"]) == ("ERROR", 1)


async def test_expired_credentials_are_replaced_by_fresh_ones_without_a_restart(
    rig: Rig, proxy: SqsProxy, settings: Settings, monkeypatch: pytest.MonkeyPatch, task_of: TaskOf
) -> None:
    """Another program renews what the SDK reads, as a tool does that writes ~/.aws/credentials."""
    monkeypatch.setattr("penstock.runtime.aws._RENEW_SECONDS", 0.0)
    (task,) = await rig.claimed(NewTask("a"))
    await put(rig.inbound, request("submit:b", {"n": 1}))
    await put(rig.results, result(task))
    proxy.keys = {"fresh"}
    for service in (rig.submitter, rig.resulter):
        with pytest.raises(Unavailable, match="ExpiredToken"):
            await service.run_once()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "fresh")
    for service in (rig.submitter, rig.resulter):
        for _ in range(3):
            try:
                assert await service.run_once() == 1
                break
            except Unavailable:
                continue
        else:
            raise AssertionError(f"{service.name} never took the fresh credentials")
    assert await rig.scheduler.run_once() == 1
    assert await rig.counts() == {"SUCCESS": 1, "ACQUIRED": 1}
    assert [await rig.inbound.depth(), await rig.results.depth()] == [EMPTY, EMPTY]
