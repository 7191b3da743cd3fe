"""Dead-letter queues as an operator meets them: through the api, over a real SQS endpoint and a real Postgres."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from penstock.api import dead_letters as holding
from penstock.api.dead_letters import instant_of
from penstock.brokers.base import MAX_RECEIVES, ORIGINAL_ID_ATTRIBUTE, Depth, Message, Outgoing
from penstock.brokers.sqs import LIMITS, SqsQueue, SqsTransport
from penstock.db.pool import Store
from penstock.protocol.journal import Entry, encode_entry, encode_step
from penstock.protocol.message_attributes import TIMEOUT_ATTRIBUTE, WORKER_ATTRIBUTE
from penstock.protocol.output import encode_output
from penstock.protocol.reports import (
    encode_error,
    encode_notification,
    encode_progress,
    encode_result,
    encode_shared_result,
)
from penstock.protocol.requests import encode_call, join_batch
from penstock.protocol.task import Claimed, Failure, NewTask, State
from penstock.resulter import Resulter
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings
from penstock.submitter import Submitter
from penstock.tasks import claim, enqueue, settle
from tests.claims import claim_id, pack_id
from tests.integration.apis import JSON, running
from tests.integration.doors import put, rejected, request, sample, sqs_proxy, take

DAY = 86_400
TaskOf = Callable[[int], Any]
Call = Callable[..., Awaitable[Any]]


@pytest.fixture
async def call(store: Store, settings: Settings) -> AsyncIterator[Call]:
    """Call a method of a running api for its result, or its error."""
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, timeout=30, headers=JSON) as http:

        async def post(method: str, **params: Any) -> Any:
            answer = (await http.post("/rpc", content=request(method, params, id=1))).json()
            return answer["result"] if "result" in answer else answer["error"]

        yield post


@pytest.fixture
def dead(transport: SqsTransport, settings: Settings) -> dict[str, SqsQueue]:
    """The three dead-letter queues."""
    return {
        label: transport.queue(f"{name}{DEAD_LETTER_SUFFIX}", label=label + DEAD_LETTER_SUFFIX)
        for label, name in (
            ("inbound", settings.inbound_queue),
            ("outbound", settings.outbound_queue),
            ("results", settings.results_queue),
        )
    }


@pytest.fixture
def submitter(store: Store, inbound: SqsQueue, settings: Settings) -> Submitter:
    return Submitter(store=store, inbound=inbound, settings=settings)


async def die(queue: SqsQueue, body: str, attributes: dict[str, str] | None = None) -> str:
    """Send a message and receive it until the queue gives it up; returns its id."""
    report = await queue.send([Outgoing(body, attributes or {})])
    assert report.failed == [], report.reason
    for _ in range(MAX_RECEIVES):
        (message,) = await queue.receive(wait_seconds=0, visibility_seconds=30)
        await queue.release([message])
    assert await queue.receive(wait_seconds=0, visibility_seconds=30) == []
    return message.id


async def claimed(store: Store, *tasks: NewTask) -> list[Claimed]:
    async with store.transaction() as session:
        await enqueue.enqueue(session, tasks)
        dispatch = await claim.claim(session, 1000)
        assert dispatch is not None
        await claim.confirm(session, dispatch.id)
    return dispatch.tasks


async def count(store: Store) -> int:
    """Live tasks."""
    async with store.session() as session:
        return sum(row["count"] for row in await session.fetch("count_live"))


def outbound_body(*tasks: Claimed) -> str:
    return join_batch([encode_call(task.id, task.claim, task.action, task.payload) for task in tasks])


def claim_ids(messages: list[Message]) -> list[str]:
    """The ids of all requests or responses in these messages."""
    bodies = [json.loads(message.body) for message in messages]
    return sorted(entry["id"] for body in bodies for entry in (body if isinstance(body, list) else [body]))


# Looking


async def test_the_three_queues_are_counted_and_one_that_is_missing_hides_no_other(
    call: Call, dead: dict[str, SqsQueue], transport: SqsTransport
) -> None:
    await put(dead["outbound"], "1", "2", "3")
    await dead["outbound"].receive(wait_seconds=0, visibility_seconds=30)
    client = await transport.client()
    await client.delete_queue(QueueUrl=await dead["results"].url())
    assert await call("dlq.stats") == {
        "queues": [
            {"queue": "inbound", "messages": 0, "held": 0},
            {"queue": "outbound", "messages": 3, "held": 3},
            {"queue": "results", "messages": None, "held": None},
        ]
    }


async def test_a_look_tells_what_is_inside_and_moves_nothing(
    call: Call, dead: dict[str, SqsQueue], outbound: SqsQueue, store: Store
) -> None:
    tasks = await claimed(store, NewTask("a"), NewTask("b"), NewTask("c"))
    async with store.transaction() as session:
        await claim.release(session, [(tasks[0].id, tasks[0].claim)])
    body = outbound_body(*tasks)
    message_id = await die(outbound, body)
    for _ in range(2):
        page = await call("dlq.list", queue="outbound")
        (shown,) = page["messages"]
        assert (page["seen"], page["total"], page["held"]) == (1, 1, 0)
        assert (shown["id"], shown["bytes"], shown["entries"]) == (message_id, len(body), 3)
        assert shown["first"] == [f"{task.action} {task.id}:{task.claim}" for task in tasks]
        assert (shown["current"], shown["stale"], shown["accepted"], shown["problem"]) == (2, 1, None, None)
        assert shown["sent_at"].endswith("Z")
    (depth,) = [queue for queue in (await call("dlq.stats"))["queues"] if queue["queue"] == "outbound"]
    assert (depth["messages"], depth["held"]) == (1, 0)
    assert [message.body for message in await take(dead["outbound"])] == [body]


async def test_a_look_is_no_longer_than_asked_for_and_says_how_many_there_are(
    call: Call, dead: dict[str, SqsQueue]
) -> None:
    await put(dead["results"], *(encode_result(f"{n}:1", "1") for n in range(25)))
    page = await call("dlq.list", queue="results", limit=12)
    assert len(page["messages"]) == 12
    assert len({message["id"] for message in page["messages"]}) == 12
    assert page["seen"] >= 12
    assert page["total"] == 25
    assert (await dead["results"].depth()).visible == 25


async def test_two_operators_see_different_messages_and_harm_each_other_in_nothing(
    call: Call, dead: dict[str, SqsQueue]
) -> None:
    await put(dead["results"], *(encode_result(f"{n}:1", "1") for n in range(15)))
    held = await dead["results"].receive(wait_seconds=0, visibility_seconds=30)
    page = await call("dlq.list", queue="results")
    assert {message["id"] for message in page["messages"]}.isdisjoint({message.id for message in held})
    assert (page["seen"], page["total"], page["held"]) == (5, 15, 10)
    both = await asyncio.gather(*(call("dlq.purge", queue="results", limit=1000) for _ in range(2)))
    assert sum(answer["purged"] for answer in both) == 5
    await dead["results"].release(held)
    assert len(await take(dead["results"])) == 10


async def test_what_a_dead_operator_held_comes_back(
    call: Call, dead: dict[str, SqsQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(dead["results"], "1")
    monkeypatch.setattr(holding, "LEASE_SECONDS", 1)
    hold = holding.LeasedMessages(dead["results"], 1, 0)
    assert len(await hold.take()) == 1  # and never given back, as by a process that was killed
    (message,) = await dead["results"].receive(wait_seconds=20, visibility_seconds=30)
    assert message.body == "1"


@pytest.mark.parametrize(
    ("queue", "body", "words"),
    [
        ("inbound", "{ no json", "Parse error"),
        ("inbound", '{"jsonrpc":"2.0","method":"status","params":{"id":1}}', "only answers"),
        ("inbound", '[{"jsonrpc":"2.0","method":"enqueue","params":{}}]', "action is missing"),
        ("inbound", "[]", "empty batch"),
        ("outbound", '{"jsonrpc":"2.0","method":"a","params":{},"id":7}', "<task id>:<claim>"),
        ("outbound", '{"jsonrpc":"2.0","method":"a","params":{}}', "<task id>:<claim>"),
        ("outbound", "7", "Invalid Request"),
        ("results", '{"jsonrpc":"2.0","id":"1:1"}', "neither result nor error"),
    ],
)
async def test_a_message_of_no_use_is_shown_with_what_is_wrong(
    call: Call, dead: dict[str, SqsQueue], queue: str, body: str, words: str
) -> None:
    await put(dead[queue], body)
    (shown,) = (await call("dlq.list", queue=queue))["messages"]
    assert words in shown["problem"]
    detail = await call("dlq.show", queue=queue, id=shown["id"])
    assert detail["body"] == body
    assert words in detail["problem"]


@pytest.mark.parametrize(("sent_at", "shown"), [(1.7e12, None), (-1.0, None), (1.7e9, "2023-11-14T22:13:20.000000Z")])
def test_the_senders_time_may_be_none_that_a_calendar_has(sent_at: float, shown: str | None) -> None:
    assert instant_of(sent_at) == shown


async def test_each_kind_of_report_is_shown_and_hides_no_other(call: Call, dead: dict[str, SqsQueue]) -> None:
    entry = encode_entry(Entry(name="charge", position=0, result=msgspec.Raw(b"1")))
    reports = {
        "result 1:1": encode_result("1:1", "null"), "error 1:1": encode_error("1:1", 1, "x", {}),
        "progress 1:1": encode_progress("1:1", 5), "wait 1:1": encode_notification("wait", id="1:1", token="t"),
        "step 1:1": encode_step("1:1", entry), "suspend 1:1": encode_notification("suspend", id="1:1", seconds=1),
        "output 1:1": encode_output("1:1", 1, "[]", 0), "announce": encode_notification("announce", action="a"),
        "run_times": encode_notification("run_times", actions={"a": (1, 0.5)}),
    }  # fmt: skip
    for body in reports.values():
        assert (await dead["results"].send([Outgoing(body, {WORKER_ATTRIBUTE: "host:1"})])).failed == []
    shown = (await call("dlq.list", queue="results"))["messages"]
    assert sorted(message["first"][0] for message in shown) == sorted(reports)
    assert [message["problem"] for message in shown] == [None] * len(reports)


async def test_show_tells_of_each_entry_what_its_task_is_now(
    call: Call, outbound: SqsQueue, store: Store, dead: dict[str, SqsQueue]
) -> None:
    tasks = await claimed(store, *(NewTask(action) for action in "abcd"))
    async with store.transaction() as session:
        await settle.finish(session, {(tasks[0].id, tasks[0].claim): "1"})
        await settle.fail(session, [Failure(tasks[1].id, tasks[1].claim, '{"code":1,"message":"x"}', 60.0)])
    gone = encode_call(999_999, 1, "e", "{}")
    message_id = await die(outbound, f"[{outbound_body(*tasks)[1:-1]},{gone}]", {TIMEOUT_ATTRIBUTE: "1.5"})
    shown = await call("dlq.show", queue="outbound", id=message_id)
    assert shown["attributes"] == {TIMEOUT_ATTRIBUTE: "1.5"}
    assert [(entry["what"], entry["state"], entry["current"]) for entry in shown["contents"]] == [
        ("a", "SUCCESS", False), ("b", "ERROR", False), ("c", "ACQUIRED", True), ("d", "ACQUIRED", True),
        ("e", None, False),
    ]  # fmt: skip
    assert [entry["claim"] for entry in shown["contents"]] == [*(task.claim for task in tasks), 1]
    assert len(await take(dead["outbound"])) == 1


@pytest.mark.parametrize("held", [8, 1, 0])
async def test_a_shared_result_is_current_while_its_claim_holds_one_of_its_tasks(
    call: Call, results: SqsQueue, store: Store, held: int
) -> None:
    tasks = await claimed(store, *(NewTask("a") for _ in range(8)))
    async with store.transaction() as session:
        await claim.release(session, [(task.id, task.claim) for task in tasks[held:]])
    name = pack_id(tasks[0].claim, [task.id for task in tasks])
    message_id = await die(results, encode_shared_result(name, range(8), '"done"'))
    (listed,) = (await call("dlq.list", queue="results"))["messages"]
    assert (listed["current"], listed["stale"]) == (min(held, 1), 1 - min(held, 1))
    assert listed["first"] == ["shared_result"]
    (shown,) = (await call("dlq.show", queue="results", id=message_id))["contents"]
    assert (shown["task_id"], shown["claim"], shown["current"]) == (None, tasks[0].claim, held > 0)


async def test_show_of_an_inbound_message_tells_the_tasks_that_its_keys_have_now(
    call: Call, inbound: SqsQueue, store: Store
) -> None:
    async with store.transaction() as session:
        (known,) = await enqueue.enqueue(session, [NewTask("export", unique_key="23")])
    body = [
        json.loads(request("submit:export", {"objectID": 23})), json.loads(request("submit:export", {"objectID": 24})),
        json.loads(request("cancel", {"id": known.id})), json.loads(request("enqueue", {"action": "plain"})),
    ]  # fmt: skip
    message_id = await die(inbound, json.dumps(body))
    shown = await call("dlq.show", queue="inbound", id=message_id)
    assert shown["accepted"] is False
    assert [(entry["what"], entry["task_id"], entry["state"]) for entry in shown["contents"]] == [
        ("export", known.id, "SCHEDULED"), ("export", None, None), ("cancel", known.id, "SCHEDULED"),
        ("plain", None, None),
    ]  # fmt: skip


async def test_a_message_that_is_not_there_is_said_with_how_far_was_looked(
    call: Call, dead: dict[str, SqsQueue]
) -> None:
    await put(dead["inbound"], "1", "2")
    error = await call("dlq.show", queue="inbound", id="no-such-id")
    assert (error["code"], error["data"]) == (-32005, {"id": "no-such-id"})
    assert "2 of about 2 were looked at" in error["message"]


# Replay: inbound


async def test_a_replayed_inbound_message_adds_its_tasks_once_however_often_it_is_replayed(
    call: Call, inbound: SqsQueue, dead: dict[str, SqsQueue], submitter: Submitter, store: Store
) -> None:
    body = request("enqueue", {"action": "a"})
    message_id = await die(inbound, body, {"mine": "kept"})
    answer = await call("dlq.replay", queue="inbound", limit=10)
    assert (answer["replayed"], answer["dropped"], answer["entries"], answer["left"]) == (1, 0, 1, [])
    (message,) = await inbound.receive(wait_seconds=0, visibility_seconds=30)
    assert message.id != message_id
    assert message.attributes == {"mine": "kept", ORIGINAL_ID_ATTRIBUTE: message_id}
    # Killed between the sending and the deletion, a replay leaves a second copy behind.
    assert (await dead["inbound"].send([Outgoing(message.body, message.attributes)])).failed == []
    await inbound.release([message])
    assert await submitter.run_once() == 1
    assert await count(store) == 1
    (shown,) = (await call("dlq.list", queue="inbound"))["messages"]
    assert shown["accepted"] is True
    answer = await call("dlq.replay", queue="inbound", limit=10)
    assert (answer["replayed"], answer["dropped"]) == (0, 1)
    await put(inbound)
    assert await submitter.run_once() == 0
    assert await count(store) == 1


async def test_two_copies_of_a_replayed_message_in_the_queue_add_its_tasks_once(
    inbound: SqsQueue, submitter: Submitter, store: Store
) -> None:
    copies = [Outgoing(request("enqueue", {"action": "a"}), {ORIGINAL_ID_ATTRIBUTE: "the-first-id"})] * 2
    assert (await inbound.send(copies)).failed == []
    assert await submitter.run_once() == 2
    assert (await inbound.send(copies[:1])).failed == []
    assert await submitter.run_once() == 1
    assert await count(store) == 1


@pytest.mark.parametrize("forged", ["x" * 101, "a b", "\u00e9", "x" * 20_000])
async def test_an_original_id_that_cannot_be_one_is_not_believed(
    inbound: SqsQueue, submitter: Submitter, store: Store, forged: str
) -> None:
    copies = [Outgoing(request("enqueue", {"action": "a"}), {ORIGINAL_ID_ATTRIBUTE: forged})] * 2
    assert (await inbound.send(copies)).failed == []
    assert await submitter.run_once() == 2
    assert await count(store) == 2


async def test_a_message_that_was_accepted_and_never_deleted_is_dropped(
    call: Call, inbound: SqsQueue, dead: dict[str, SqsQueue], submitter: Submitter, store: Store
) -> None:
    await put(inbound, request("enqueue", {"action": "a"}))
    for _ in range(MAX_RECEIVES):
        messages = await inbound.receive(wait_seconds=0, visibility_seconds=30)
        await submitter.commit(messages)
        await inbound.release(messages)
    assert await inbound.receive(wait_seconds=0, visibility_seconds=30) == []
    assert (await dead["inbound"].depth()).visible == 1
    answer = await call("dlq.replay", queue="inbound", limit=10)
    assert (answer["replayed"], answer["dropped"]) == (0, 1)
    assert (await dead["inbound"].depth()).total == 0
    assert await count(store) == 1


async def test_a_message_older_than_receipts_is_sent_only_by_force(
    store: Store, settings: Settings, inbound: SqsQueue, dead: dict[str, SqsQueue]
) -> None:
    settings = settings.model_copy(update={"retention_receipts_seconds": 0.0})
    message_id = await die(inbound, request("enqueue", {"action": "a"}))
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, timeout=30, headers=JSON) as http:

        async def result(method: str, **params: Any) -> Any:
            return (await http.post("/rpc", content=request(method, params, id=1))).json()["result"]

        (shown,) = (await result("dlq.list", queue="inbound"))["messages"]
        assert shown["accepted"] is None
        answer = await result("dlq.replay", queue="inbound", limit=10)
        assert (answer["replayed"], answer["dropped"]) == (0, 0)
        assert [(left["id"], "force" in left["reason"]) for left in answer["left"]] == [(message_id, True)]
        assert (await dead["inbound"].depth()).visible == 1
        answer = await result("dlq.replay", queue="inbound", ids=[message_id], force=True)
        assert (answer["replayed"], answer["left"]) == (1, [])
    assert len(await take(inbound)) == 1


def full_of(*entries: str) -> str:
    """A message as large as any can be, with an entry that is none."""
    room = LIMITS.max_message_bytes - len(join_batch([*entries, '""']))
    body = join_batch([*entries, json.dumps("z" * room)])
    assert len(body) == LIMITS.max_message_bytes
    return body


@asynccontextmanager
async def counting_attributes(store: Store, settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """An api whose queues count the attributes of a message, as those of AWS and not the embedded ones."""
    assert settings.sqs_endpoint_url is not None
    with sqs_proxy(settings.sqs_endpoint_url) as proxy:

        def as_aws(operation: str, body: dict[str, Any], forward: Any) -> tuple[int, dict[str, Any]]:
            if operation == "SendMessageBatch" and len(json.dumps(body["Entries"])) > LIMITS.max_message_bytes:
                return 400, {"__type": "com.amazonaws.sqs#BatchRequestTooLong", "message": "too long"}
            return forward(body)

        proxy.hook = as_aws
        through = settings.model_copy(update={"sqs_endpoint_url": proxy.url})
        async with (
            running(store, through) as api,
            httpx.AsyncClient(base_url=api.url, timeout=30, headers=JSON) as http,
        ):
            yield http


async def test_a_message_too_full_to_carry_its_id_is_accepted_on_the_spot_and_once(
    dead: dict[str, SqsQueue], inbound: SqsQueue, store: Store, settings: Settings
) -> None:
    body = full_of(*(request("enqueue", {"action": "a", "payload": {"x": "y" * 150_000}}) for _ in range(6)))
    await put(dead["inbound"], body)
    async with counting_attributes(store, settings) as http:
        for expected in ({"replayed": 1, "dropped": 0}, {"replayed": 0, "dropped": 1}):
            (message,) = await take(dead["inbound"])
            copy = Outgoing(body, {ORIGINAL_ID_ATTRIBUTE: message.original_id})
            await dead["inbound"].release([message])
            answer = await http.post("/rpc", content=request("dlq.replay", {"queue": "inbound", "limit": 9}, id=1))
            result = answer.json()["result"]
            assert {name: result[name] for name in expected} == expected, result
            assert (await inbound.depth()).total == (await dead["inbound"].depth()).total == 0
            assert await count(store) == 6
            assert (await dead["inbound"].send([copy])).failed == []
    ((source, _, reason),) = await rejected(store)
    assert (source, "Invalid Request" in reason) == ("inbound", True)


async def test_a_full_message_whose_key_is_held_keeps_no_other_from_its_replay(
    dead: dict[str, SqsQueue], inbound: SqsQueue, store: Store, settings: Settings, sql: Any
) -> None:
    await put(dead["inbound"], full_of(request("enqueue", {"action": "a", "unique_key": "x"})), request("submit:b", {}))
    async with counting_attributes(store, settings) as http, sql.transaction():
        await sql.execute("select penstock_enqueue('a', '{}', unique_key => 'x')")
        answer = await http.post("/rpc", content=request("dlq.replay", {"queue": "inbound", "limit": 9}, id=1))
        result = answer.json()["result"]
        assert result["replayed"] == 1
        (left,) = result["left"]
        assert "holds a lock" in left["reason"]
    assert ((await dead["inbound"].depth()).total, (await inbound.depth()).total) == (1, 1)


# Replay: outbound


async def test_what_still_has_its_claim_is_sent_again_one_by_one_and_the_rest_is_dropped(
    call: Call, outbound: SqsQueue, dead: dict[str, SqsQueue], store: Store
) -> None:
    tasks = await claimed(store, *(NewTask("a") for _ in range(15)))
    async with store.transaction() as session:
        await settle.finish(session, {(tasks[0].id, tasks[0].claim): "1"})
        await settle.cancel(session, [tasks[1].id])
        await claim.release(session, [(tasks[2].id, tasks[2].claim)])
        again = await claim.claim(session, 1)  # the task has a newer claim now
    assert again is not None
    await die(outbound, outbound_body(*tasks), {TIMEOUT_ATTRIBUTE: "1.5"})
    answer = await call("dlq.replay", queue="outbound", limit=10)
    assert (answer["replayed"], answer["dropped"], answer["entries"], answer["stale"]) == (1, 0, 12, 3)
    messages = await take(outbound)
    assert len(messages) == 12
    assert claim_ids(messages) == sorted(f"{task.id}:{task.claim}" for task in tasks[3:])
    assert {json.dumps(dict(message.attributes)) for message in messages} == {'{"timeout_seconds": "1.5"}'}
    assert (await dead["outbound"].depth()).total == 0


@pytest.mark.parametrize("params", ['"penstock+sealed:0123456789abcdef:AAAA"', '{"a":1}'])
async def test_a_message_with_an_encrypted_payload_is_sent_again_as_any_other(
    call: Call, outbound: SqsQueue, dead: dict[str, SqsQueue], store: Store, params: str
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    await die(outbound, encode_call(task.id, task.claim, task.action, params))
    answer = await call("dlq.replay", queue="outbound", limit=10)
    assert (answer["replayed"], answer["entries"], answer["stale"]) == (1, 1, 0)
    (message,) = await take(outbound)
    assert json.loads(message.body)["params"] == json.loads(params)
    assert (await dead["outbound"].depth()).total == 0


async def test_a_message_whose_tasks_all_have_moved_on_is_dropped_and_nothing_is_sent(
    call: Call, outbound: SqsQueue, dead: dict[str, SqsQueue], store: Store
) -> None:
    tasks = await claimed(store, NewTask("a"), NewTask("a"))
    await die(outbound, outbound_body(*tasks))
    async with store.transaction() as session:
        await settle.fail(session, [Failure(task.id, task.claim, '{"code":1,"message":"x"}', None) for task in tasks])
    answer = await call("dlq.replay", queue="outbound", limit=10)
    assert (answer["replayed"], answer["dropped"], answer["entries"], answer["stale"]) == (0, 1, 0, 2)
    assert (await outbound.depth()).total == (await dead["outbound"].depth()).total == 0


async def test_an_outbound_message_of_no_use_stays_and_says_so(call: Call, dead: dict[str, SqsQueue]) -> None:
    await put(dead["outbound"], "{ no json", '{"jsonrpc":"2.0","method":"a","id":1}')
    answer = await call("dlq.replay", queue="outbound", limit=10)
    assert (answer["replayed"], answer["dropped"], len(answer["left"])) == (0, 0, 2)
    assert all("purge" in left["reason"] for left in answer["left"])
    assert (await dead["outbound"].depth()).visible == 2


# Replay: results


async def test_a_replayed_result_settles_its_task_and_one_of_an_old_claim_does_nothing(
    call: Call, results: SqsQueue, store: Store, settings: Settings, task_of: TaskOf
) -> None:
    tasks = await claimed(store, NewTask("a"), NewTask("a"))
    async with store.transaction() as session:
        await claim.release(session, [(tasks[1].id, tasks[1].claim)])
    bodies = [encode_result(claim_id(task.id, task.claim), '"late"') for task in tasks]
    by_attempt = '{"jsonrpc":"2.0","result":{"attempt":1},"id":999}'
    await die(results, f"[{','.join([*bodies, by_attempt])}]")
    (shown,) = (await call("dlq.list", queue="results"))["messages"]
    assert (shown["current"], shown["stale"]) == (1, 2)
    answer = await call("dlq.replay", queue="results", limit=10)
    assert (answer["replayed"], answer["entries"]) == (1, 3)
    resulter = Resulter(store=store, results=results, settings=settings)
    assert await resulter.run_once() == 1
    assert [(await task_of(task.id))["state"] for task in tasks] == [State.SUCCESS, State.SCHEDULED]
    await put(results, *bodies)
    await resulter.run_once()
    assert [(await task_of(task.id))["state"] for task in tasks] == [State.SUCCESS, State.SCHEDULED]


# Replay and purge: what and how much


async def test_named_messages_are_replayed_wherever_they_are_and_unknown_ones_named(
    call: Call, dead: dict[str, SqsQueue], results: SqsQueue
) -> None:
    await put(dead["results"], *(encode_result(f"{n}:1", "1") for n in range(25)))
    messages = await take(dead["results"])
    await dead["results"].release(messages)
    chosen = [messages[3].id, messages[24].id]
    answer = await call("dlq.replay", queue="results", ids=[*chosen, "no-such-id", chosen[0]])
    assert (answer["replayed"], answer["unknown"]) == (2, ["no-such-id"])
    assert claim_ids(await take(results)) == ["24:1", "3:1"]
    assert await dead["results"].depth() == Depth(visible=23, in_flight=0, delayed=0)


async def test_a_limit_is_kept_and_what_must_stay_does_not_count(call: Call, dead: dict[str, SqsQueue]) -> None:
    stays = ["{ no json"] * 12
    gone = [encode_call(900_000 + n, 1, "a", "{}") for n in range(12)]
    await put(dead["outbound"], *stays, *gone)
    answer = await call("dlq.replay", queue="outbound", limit=7)
    assert answer["dropped"] == 7
    assert (await dead["outbound"].depth()).visible == 17
    answer = await call("dlq.replay", queue="outbound", limit=100)
    assert (answer["dropped"], len(answer["left"])) == (5, 12)


async def test_purged_messages_are_gone_and_others_stay(call: Call, dead: dict[str, SqsQueue]) -> None:
    await put(dead["inbound"], *(str(n) for n in range(25)))
    messages = await take(dead["inbound"])
    await dead["inbound"].release(messages)
    chosen = [messages[0].id, messages[24].id]
    assert await call("dlq.purge", queue="inbound", ids=[*chosen, "no-such-id"]) == {
        "purged": 2, "unknown": ["no-such-id"], "seen": 25, "total": 25,
    }  # fmt: skip
    answer = await call("dlq.purge", queue="inbound", limit=13)
    assert answer["purged"] == 13
    assert (await dead["inbound"].depth()).visible == 10
    assert (await call("dlq.purge", queue="inbound", limit=1000))["purged"] == 10
    assert (await dead["inbound"].depth()).total == 0


# Away


async def test_a_message_that_could_not_be_sent_stays_where_it_is(
    call: Call, store: Store, settings: Settings, dead: dict[str, SqsQueue], results: SqsQueue
) -> None:
    await put(dead["results"], encode_result("1:1", "1"), encode_result("2:1", "1"))
    assert settings.sqs_endpoint_url is not None
    with sqs_proxy(settings.sqs_endpoint_url) as proxy:

        def refuse_sending(operation: str, body: dict[str, Any], forward: Any) -> tuple[int, dict[str, Any]]:
            if operation == "SendMessageBatch":
                return 503, {"__type": "ServiceUnavailable", "message": "a secret of the queue"}
            return forward(body)

        proxy.hook = refuse_sending
        through = settings.model_copy(update={"sqs_endpoint_url": proxy.url})
        async with (
            running(store, through) as api,
            httpx.AsyncClient(base_url=api.url, timeout=30, headers=JSON) as http,
        ):
            answer = await http.post("/rpc", content=request("dlq.replay", {"queue": "results", "limit": 9}, id=1))
    assert "secret" not in answer.text
    result = answer.json()["result"]
    assert (result["replayed"], len(result["left"])) == (0, 2)
    assert (await dead["results"].depth()).visible == 2
    assert (await results.depth()).total == 0


async def test_what_was_sent_and_could_not_be_deleted_is_said_and_may_be_replayed_again(
    store: Store, settings: Settings, dead: dict[str, SqsQueue], results: SqsQueue
) -> None:
    await put(dead["results"], encode_result("1:1", "1"))
    assert settings.sqs_endpoint_url is not None
    with sqs_proxy(settings.sqs_endpoint_url) as proxy:

        def refuse_deleting(operation: str, body: dict[str, Any], forward: Any) -> tuple[int, dict[str, Any]]:
            if operation == "DeleteMessageBatch":
                return 503, {"__type": "ServiceUnavailable", "message": "busy"}
            return forward(body)

        proxy.hook = refuse_deleting
        through = settings.model_copy(update={"sqs_endpoint_url": proxy.url})
        async with (
            running(store, through) as api,
            httpx.AsyncClient(base_url=api.url, timeout=30, headers=JSON) as http,
        ):
            answer = await http.post("/rpc", content=request("dlq.replay", {"queue": "results", "limit": 9}, id=1))
    (left,) = answer.json()["result"]["left"]
    assert "could not be deleted" in left["reason"]
    assert (await dead["results"].depth()).visible == (await results.depth()).visible == 1


async def test_an_api_without_sqs_answers_clearly_and_serves_everything_else(store: Store, settings: Settings) -> None:
    nowhere = settings.model_copy(update={"sqs_endpoint_url": "http://127.0.0.1:1"})
    async with running(store, nowhere) as api, httpx.AsyncClient(base_url=api.url, timeout=30, headers=JSON) as http:
        for method, params in (("dlq.list", {"queue": "inbound"}), ("dlq.purge", {"queue": "inbound", "limit": 1})):
            error = (await http.post("/rpc", content=request(method, params, id=1))).json()["error"]
            assert error["code"] == -32010
            assert error["data"]["queue"] == "inbound-dlq"
            assert "127.0.0.1" not in json.dumps(error)
        counted = (await http.post("/rpc", content=request("dlq.stats", {}, id=1))).json()["result"]["queues"]
        assert [queue["messages"] for queue in counted] == [None, None, None]
        added = (await http.post("/rpc", content=request("enqueue", {"action": "a"}, id=1))).json()["result"]
        assert added["state"] == "SCHEDULED"


async def test_a_replay_is_counted_like_every_use_of_a_queue(call: Call, dead: dict[str, SqsQueue]) -> None:
    before = sample("penstock_messages_total", queue="results-dlq", direction="deleted")
    await put(dead["results"], encode_result("1:1", "1"))
    await call("dlq.replay", queue="results", limit=1)
    assert sample("penstock_messages_total", queue="results-dlq", direction="deleted") == before + 1
