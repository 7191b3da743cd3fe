from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.api.audit import Audited
from penstock.brokers.base import MAX_RECEIVES, Depth
from penstock.brokers.sqs import SqsQueue
from penstock.db.pool import Store
from penstock.local.postgres import EmbeddedPostgres
from penstock.payloads.codec import PayloadCodec
from penstock.protocol.errors import Unavailable
from penstock.protocol.record import view_of
from penstock.protocol.task import NewTask, State
from penstock.settings.model import Settings, load_settings
from penstock.settings.payload_texts import new_key
from penstock.submitter import Submitter
from penstock.tasks import enqueue, settle
from tests.integration.doors import postgres_away, put, rejected, request, sample
from tests.integration.lives import Lives
from tests.integration.rules import list_routes

TaskOf = Callable[[int], Any]
EMPTY = Depth(0, 0, 0)


@pytest.fixture
def submitter(store: Store, inbound: SqsQueue, settings: Settings) -> Submitter:
    return Submitter(store=store, inbound=inbound, settings=settings)


async def tasks(store: Store) -> list[dict[str, Any]]:
    """Every task there is, by id."""
    async with store.session() as session:
        page = (await session.fetch("list_tasks", 2**62, 10_000, 10_000, None, 0, *[None] * 4))[0]
        rows = await session.fetch("read_tasks", page["ids"])
    return sorted((dict(row) for row in rows), key=lambda row: row["id"])


async def drained(submitter: Submitter) -> int:
    """Passes until the queue gives nothing; returns how many messages came."""
    total = 0
    while came := await submitter.run_once():
        total += came
    return total


# What is accepted


async def test_the_older_request_becomes_a_task_and_its_message_goes(
    submitter: Submitter, inbound: SqsQueue, store: Store
) -> None:
    await put(inbound, '{"jsonrpc":"2.0","method":"submit:export","params":{"objectID":23}}')
    before = sample("penstock_enqueued_total", action="export", source="inbound")
    assert await submitter.run_once() == 1
    (task,) = await tasks(store)
    assert (task["action"], task["state"], task["unique_key"]) == ("export", "SCHEDULED", "23")
    assert json.loads(task["payload"]) == {"objectID": 23}
    assert await inbound.depth() == EMPTY
    assert sample("penstock_enqueued_total", action="export", source="inbound") == before + 1
    assert await submitter.run_once() == 0


async def test_every_parameter_of_enqueue_reaches_the_task(
    submitter: Submitter, inbound: SqsQueue, store: Store
) -> None:
    params = {
        "action": "mail", "payload": {"to": "é"}, "run_at": "2031-02-03T04:05:06+01:00", "priority": -7,
        "unique_key": "u", "ordering_key": "o", "max_attempts": 3, "timeout": 1.5,
    }  # fmt: skip
    await put(inbound, request("enqueue", params, id=1))
    await submitter.run_once()
    (task,) = await tasks(store)
    assert json.loads(task["payload"]) == {"to": "é"}
    assert task["run_at"].isoformat() == "2031-02-03T03:05:06+00:00"
    assert (task["priority"], task["unique_key"], task["ordering_key"]) == (-7, "u", "o")
    assert (task["max_attempts"], task["timeout_seconds"]) == (3, 1.5)


async def test_a_payload_is_kept_as_the_text_that_came(submitter: Submitter, inbound: SqsQueue, store: Store) -> None:
    payload = '{"big": 123456789012345678901234567890, "b":1.10,  "a":[1E5]}'
    await put(inbound, f'{{"jsonrpc":"2.0","method":"submit:a","params":{payload}}}')
    await submitter.run_once()
    assert [task["payload"] for task in await tasks(store)] == [payload]


async def test_many_messages_with_many_tasks_are_stored_in_one_pass(
    submitter: Submitter, inbound: SqsQueue, store: Store
) -> None:
    bodies = [f"[{','.join(request('submit:a', {'n': m * 50 + n}) for n in range(50))}]" for m in range(10)]
    await put(inbound, *bodies)
    assert await submitter.run_once() == 10
    assert sorted(json.loads(task["payload"])["n"] for task in await tasks(store)) == list(range(500))
    assert await inbound.depth() == EMPTY


async def test_one_object_sent_twice_is_one_task(submitter: Submitter, inbound: SqsQueue, store: Store) -> None:
    await put(inbound, request("submit:a", {"objectID": 5}), request("submit:a", {"objectID": "5"}))
    before = sample("penstock_duplicates_total", action="a")
    assert await drained(submitter) == 2
    assert len(await tasks(store)) == 1
    assert sample("penstock_duplicates_total", action="a") == before + 1
    assert await rejected(store) == []


# Exactly once into Postgres


async def test_a_redelivered_message_adds_nothing(submitter: Submitter, inbound: SqsQueue, store: Store) -> None:
    """The submitter dies between its commit and its delete: the same message comes again."""
    await put(inbound, request("submit:a", {"n": 1}), "not json")
    messages = await inbound.receive(wait_seconds=0, visibility_seconds=30)
    await submitter.commit(messages)
    await inbound.release(messages)
    assert await submitter.run_once() == 2
    assert len(await tasks(store)) == 1
    assert len(await rejected(store)) == 1
    assert await inbound.depth() == EMPTY


async def test_two_submitters_with_the_same_messages_store_them_once(
    store: Store, inbound: SqsQueue, settings: Settings
) -> None:
    await put(inbound, *(request("submit:a", {"n": n}) for n in range(10)))
    messages = await inbound.receive(wait_seconds=0, visibility_seconds=30)
    submitters = [Submitter(store=store, inbound=inbound, settings=settings) for _ in range(4)]
    await asyncio.gather(*(s.commit(messages if n % 2 else messages[::-1]) for n, s in enumerate(submitters)))
    assert len(await tasks(store)) == 10


async def test_nothing_is_lost_or_used_up_while_postgres_is_away(
    submitter: Submitter, inbound: SqsQueue, store: Store, postgres: EmbeddedPostgres, database_url: str
) -> None:
    await submitter.open()
    await put(inbound, request("submit:a", {"n": 1}))
    async with postgres_away(postgres, database_url):
        for _ in range(3 * MAX_RECEIVES):  # each receive brings a message nearer to the dead-letter queue
            with pytest.raises(Unavailable):
                await submitter.run_once()
        assert await inbound.depth() == Depth(visible=1, in_flight=0, delayed=0)
    assert await submitter.run_once() == 1
    assert len(await tasks(store)) == 1


async def test_a_message_whose_payload_cannot_be_stored_is_put_off_for_the_longest_lease_of_the_queue_at_most(
    application_url: str, settings: Settings, inbound: SqsQueue
) -> None:
    bucket = {"payload_bucket": "s3://none", "payload_s3_endpoint_url": "http://127.0.0.1:1"}
    away = load_settings(**settings.model_dump() | bucket | {"payload_threshold_bytes": 1024})
    inbound.limits = replace(inbound.limits, max_extend_seconds=1)
    await put(inbound, request("submit:a", {"text": "x" * 2000}))
    async with Store(application_url, codec=PayloadCodec(away)) as store:
        assert await Submitter(store=store, inbound=inbound, settings=away).run_once() == 1
    (again,) = await inbound.receive(wait_seconds=10, visibility_seconds=30)
    assert again.receive_count == 2


async def test_a_change_that_needs_a_result_which_cannot_be_read_holds_up_no_neighbour(
    application_url: str, settings: Settings, inbound: SqsQueue, store: Store
) -> None:
    locked = load_settings(**settings.model_dump() | {"payload_keys": new_key()})
    inbound.limits = replace(inbound.limits, max_extend_seconds=1)
    async with Store(application_url, codec=PayloadCodec(locked)) as sealing:
        lives = Lives(sealing, locked)
        steps = [{"action": "a"}, {"action": "b", "after": ["a"], "results_as": "given"}]
        workflow = await lives.create(steps=steps)
        await lives.work(await lives.claim(), lambda action, payload: 1)
        await lives.advance()
        await lives.ask("workflow.cancel", id=workflow)
    await put(inbound, request("workflow.retry", {"id": workflow}), request("submit:c", {"n": 1}))
    without_key = Submitter(store=store, inbound=inbound, settings=settings)
    assert await drained(without_key) == 2
    assert [task["action"] for task in await tasks(store) if task["state"] == "SCHEDULED"] == ["c"]
    (again,) = await inbound.receive(wait_seconds=10, visibility_seconds=30)
    assert again.receive_count == 2


async def test_a_missing_queue_keeps_the_submitter_from_opening(
    store: Store, settings: Settings, transport: Any
) -> None:
    missing = transport.queue("no-such-queue", label="inbound")
    with pytest.raises(Unavailable, match="no-such-queue"):
        await Submitter(store=store, inbound=missing, settings=settings).open()


# What is refused


DEEP = "[" * 10_000 + "]" * 10_000
LONE = '{"jsonrpc":"2.0","method":"submit:a","params":{"t":"\\ud800"}}'
REFUSED = {
    "not json": ("{nope", "Parse error"),
    "empty batch": ("[]", "empty batch"),
    "a number": ("7", "Invalid Request"),
    "no version": ('{"method":"submit:a"}', "jsonrpc"),
    "NUL in payload": (request("submit:a", {"t": "\0"}), r"\u0000"),
    "lone surrogate": (LONE, "surrogate"),
    "NaN": ('{"jsonrpc":"2.0","method":"submit:a","params":{"n":NaN}}', "Parse error"),
    "infinity": ('{"jsonrpc":"2.0","method":"submit:a","params":{"n":-Infinity}}', "Parse error"),
    "objectID beyond a double": ('{"jsonrpc":"2.0","method":"submit:a","params":{"objectID":1e400}}', "objectID must"),
    "deep nesting": (f'{{"jsonrpc":"2.0","method":"submit:a","params":{DEEP}}}', "nested"),
    "nesting above what workers read": (request("submit:a", json.loads("[" * 101 + "]" * 101)), "nested"),
    "50,000 requests": ("[" + ",".join(["{}"] * 50_000) + "]", "50000"),
    "unknown method": (request("enqeue", {"action": "a"}), "did you mean enqueue?"),
    "missing action": (request("enqueue", {}), "action is missing"),
    "unknown parameter": (request("enqueue", {"action": "a", "prioriti": 1}), "did you mean priority?"),
    "mistyped parameter": (request("enqueue", {"action": 7}), "action is wrong"),
    "scalar params": (request("submit:a", 7), "params must be an object or an array"),
    "empty action": (request("enqueue", {"action": ""}), "action is empty"),
    "empty submit": (request("submit:", {}), "action is empty"),
    "action of 10 kB": (request("enqueue", {"action": "a" * 10_000}), "10000 characters"),
    "control character in action": (request("enqueue", {"action": "a\tb"}), "control character"),
    "payload is a scalar": (request("enqueue", {"action": "a", "payload": 7}), "object or an array"),
    "payload over the limit": (request("submit:a", {"t": "x" * 300_000}), "limit is 262144"),
    "run_at in year 275760": (request("enqueue", {"action": "a", "run_at": 8_640_000_000_000_000}), "run_at"),
    "run_at tomorrow": (request("enqueue", {"action": "a", "run_at": "tomorrow"}), "RFC 3339"),
    "run_at without zone": (request("enqueue", {"action": "a", "run_at": "2030-01-01T00:00:00"}), "zone"),
    "negative delay": (request("enqueue", {"action": "a", "delay": -1}), "delay must be"),
    "delay and run_at": (request("enqueue", {"action": "a", "delay": 1, "run_at": 0}), "exclude each other"),
    "priority out of range": (request("enqueue", {"action": "a", "priority": 32768}), "priority must be"),
    "priority beyond 64 bits": (request("enqueue", {"action": "a", "priority": 2**70}), "priority"),
    "no attempts": (request("enqueue", {"action": "a", "max_attempts": 0}), "max_attempts must be"),
    "timeout of 0": (request("enqueue", {"action": "a", "timeout": 0}), "timeout must be"),
    "empty key": (request("enqueue", {"action": "a", "unique_key": ""}), "unique_key must have"),
    "objectID is a list": (request("submit:a", {"objectID": [1]}), "objectID must be"),
    "status": (request("status", {"id": 1}, id=1), "only answers"),
    "list": (request("list", {}, id=1), "only answers"),
    "unknown task": (request("cancel", {"id": 987_654}), "No such task: 987654"),
    "mistyped id": (request("cancel", {"id": "4x"}), "id must be a task's number"),
    "id beyond 64 bits": (request("retry", {"id": 2**64}), "id"),
}


async def test_bad_input_is_kept_with_its_reason_and_harms_no_neighbour(
    submitter: Submitter, inbound: SqsQueue, store: Store
) -> None:
    before = sample("penstock_rejected_total", source="inbound")
    await put(
        inbound, *(text for name, (body, _) in REFUSED.items() for text in (body, request("submit:good", [name])))
    )
    assert await drained(submitter) == 2 * len(REFUSED)
    kept = [(body, why) for source, body, why in await rejected(store) if source == "inbound"]
    assert len(kept) == len(REFUSED)
    for name, (body, reason) in REFUSED.items():
        whys = [why for seen, why in kept if seen == body or _same_json(seen, body)]
        assert any(reason in why for why in whys), f"{name}: {whys}"
        assert all(len(why) < 600 for why in whys), name
    assert sorted(json.loads(task["payload"])[0] for task in await tasks(store)) == sorted(REFUSED)
    assert await inbound.depth() == EMPTY
    assert sample("penstock_rejected_total", source="inbound") == before + len(REFUSED)


def _same_json(one: str, other: str) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except (ValueError, RecursionError):
        return False


async def test_bad_entries_are_refused_singly_and_the_good_ones_beside_them_stored(
    submitter: Submitter, inbound: SqsQueue, store: Store
) -> None:
    # What is no JSON spoils its batch: where the next entry begins is unknown.
    alone = {"not json", "empty batch", "50,000 requests", "NaN", "infinity", "deep nesting"}
    names = [name for name in REFUSED if name not in alone]
    entries = [part for name in names for part in (REFUSED[name][0], request("submit:good", {"of": name}))]
    await put(inbound, f"[{','.join(entries)}]")
    assert await drained(submitter) == 1
    assert [json.loads(task["payload"])["of"] for task in await tasks(store)] == names
    # Changes are carried out after the tasks are stored, so their refusals come last.
    reasons = [why for _, _, why in await rejected(store)]
    assert len(reasons) == len(names)
    for name in names:
        assert any(REFUSED[name][1] in why for why in reasons), name


async def test_values_that_only_postgres_refuses_spoil_neither_batch_nor_neighbours(
    submitter: Submitter, inbound: SqsQueue, store: Store, sql: Any
) -> None:
    await sql.execute("alter table penstock.task add constraint no_refused check (action <> 'refused')")
    refused = request("enqueue", {"action": "refused"})
    batch = f"[{request('submit:a', {'n': 1})},{refused},{request('submit:a', {'n': 2})}]"
    await put(inbound, request("submit:a", {"n": 0}), batch, request("submit:a", {"n": 3}))
    assert await drained(submitter) == 3
    assert sorted(json.loads(task["payload"])["n"] for task in await tasks(store)) == [0, 1, 2, 3]
    ((_, kept, why),) = await rejected(store)
    assert json.loads(kept) == json.loads(refused)
    assert "Postgres rejected" in why
    assert await inbound.depth() == EMPTY


# Cancel and retry through the queue


async def test_cancel_and_retry_work_through_the_queue(
    submitter: Submitter, inbound: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    async with store.transaction() as session:
        first, second = [answer.id for answer in await enqueue.enqueue(session, [NewTask("a"), NewTask("a")])]
        await settle.cancel(session, [second])
    await put(inbound, f"[{request('cancel', {'id': first})},{request('retry', {'id': str(second)}, id=9)}]")
    await submitter.run_once()
    assert (await task_of(first))["state"] == State.CANCELLED
    assert (await task_of(second))["state"] == State.SCHEDULED
    assert await rejected(store) == []


async def test_a_change_that_the_tasks_state_forbids_is_refused_and_its_neighbour_done(
    submitter: Submitter, inbound: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    async with store.transaction() as session:
        live, cancelled = [answer.id for answer in await enqueue.enqueue(session, [NewTask("a"), NewTask("a")])]
        await settle.cancel(session, [cancelled])
    bad = [request("cancel", {"id": cancelled}), request("retry", {"id": live})]
    await put(inbound, f"[{bad[0]},{bad[1]},{request('cancel', {'id': live})}]")
    await submitter.run_once()
    kept = await rejected(store)
    assert [json.loads(body) for _, body, _ in kept] == [json.loads(body) for body in bad]
    assert [why for _, _, why in kept] == [
        f"Task {cancelled} is CANCELLED; it cannot be cancelled",
        f"Task {live} is SCHEDULED; it cannot be retried",
    ]
    assert (await task_of(live))["state"] == State.CANCELLED


# Beyond enqueue


async def test_what_changes_more_than_the_senders_own_is_refused_unless_the_setting_takes_it(
    store: Store, inbound: SqsQueue, settings: Settings
) -> None:
    narrow = settings.model_copy(update={"inbound_methods": Settings.model_fields["inbound_methods"].default})
    async with store.transaction() as session:
        (made,) = await enqueue.enqueue(session, [NewTask("a")])
    asked = [
        request("route.set", {"name": "theft", "queue": "elsewhere"}), request("tenant.pause", {"tenant": "globex"}),
        request("action.pause", {"action": "a"}), request("cancel", {"id": made.id}),
    ]  # fmt: skip
    await put(inbound, f"[{','.join([*asked, request('enqueue', {'action': 'b'})])}]")
    assert await drained(Submitter(store=store, inbound=inbound, settings=narrow)) == 1
    assert [(task["action"], task["state"]) for task in await tasks(store)] == [("a", "SCHEDULED"), ("b", "SCHEDULED")]
    async with store.session() as session:
        assert await list_routes(session) == []
        assert await session.fetch("list_audit", None, 10) == []
    kept = await rejected(store)
    assert [json.loads(body)["method"] for _, body, _ in kept] == [json.loads(one)["method"] for one in asked]
    assert all("PENSTOCK_INBOUND_METHODS" in reason for _, _, reason in kept)


async def test_what_the_setting_takes_beyond_enqueue_is_noted_with_its_sender_and_outcome(
    submitter: Submitter, store: Store, inbound: SqsQueue
) -> None:
    asked = [
        request("route.set", {"name": "r", "queue": "q"}), request("cancel", {"id": 987_654}),
        request("task.complete", {"token": "t", "result": 1}), request("enqueue", {"action": "b"}),
    ]  # fmt: skip
    await put(inbound, f"[{','.join(asked)}]")
    (message,) = await inbound.receive(wait_seconds=0, visibility_seconds=0)
    assert await drained(submitter) == 1
    async with store.session() as session:
        rows = await session.fetch("list_audit", None, 10)
    cancelled, routed = (view_of(Audited, row) for row in rows)
    assert (routed.method, routed.door, routed.outcome) == ("route.set", "inbound", "ok")
    assert json.loads(routed.params) == {"name": "r", "queue": "q"}
    assert (cancelled.method, cancelled.door, cancelled.outcome) == ("cancel", "inbound", "No such task: 987654")
    assert routed.who == cancelled.who == (message.sender or "")
    assert message.sender
