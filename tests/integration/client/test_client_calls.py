"""Clients against a real api and a real queue."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel, SecretStr

from penstock.brokers.opening import create_queues
from penstock.brokers.sqs import SqsQueue, SqsTransport
from penstock.client.async_client import AsyncClient
from penstock.client.client import Client
from penstock.client.exchanges import Unfinished
from penstock.client.inbound import MESSAGE_TASKS, InboundClient, SyncInboundClient
from penstock.db.pool import Store
from penstock.methods.inbound import read_inbound
from penstock.protocol.errors import (
    DuplicateTask,
    InvalidParams,
    MethodNotFound,
    RateLimited,
    RpcError,
    StateConflict,
    TaskNotFound,
    TooLarge,
)
from penstock.settings.model import Settings
from tests.integration.apis import running


async def test_client_calls_every_method(store: Store, settings: Settings) -> None:
    def use(url: str) -> None:
        with Client(url + "/") as client:
            run_at = datetime(2040, 1, 2, tzinfo=UTC)
            first = client.enqueue("mail", {"to": "a@b", "big": 10**30}, run_at=run_at, unique_key="k", priority=None)
            assert (first["state"], first["duplicate"]) == ("SCHEDULED", False)
            assert client.enqueue("mail", unique_key="k")["duplicate"]
            task = client.status(first.id, detail=True)
            assert task.payload == task["payload"] == {"to": "a@b", "big": 10**30}
            assert task["run_at"] == "2040-01-02T00:00:00.000000Z"
            assert client.status([first["id"], 999])[1] is None
            assert client.cancel(first["id"]) == {"id": first["id"], "state": "CANCELLED"}
            assert [task["id"] for task in client.list(state="CANCELLED")["tasks"]] == [first["id"]]
            assert client.retry(first["id"])["state"] == "SCHEDULED"
            assert client.stats()["states"]["SCHEDULED"] == 1
            assert client.call("status", [first["id"]])["id"] == first["id"]

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)


async def test_clients_find_tasks_by_every_filter_that_the_api_has(store: Store, settings: Settings) -> None:
    far = datetime(2100, 1, 1, tzinfo=UTC)
    asked: list[tuple[dict[str, Any], list[int]]] = [
        ({"labels": {"tenant": "acme"}}, [2, 1]),
        ({"key": "k", "state": "SCHEDULED"}, [1]),
        ({"since": "2020-01-01T00:00:00Z", "until": far, "action": "a"}, [2, 1]),
        ({"since": far}, []),
        ({"until": 1}, []),
    ]

    def use(url: str) -> None:
        with Client(url) as client:
            client.enqueue("a", labels={"tenant": "acme"}, unique_key="k")
            client.enqueue("a", labels={"tenant": "acme"})
            client.enqueue("b")
            assert [[task["id"] for task in client.list(**given)["tasks"]] for given, _ in asked] == [
                ids for _, ids in asked
            ]

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)
        async with AsyncClient(api.url) as client:
            for given, ids in asked:
                assert [task["id"] for task in (await client.list(**given))["tasks"]] == ids


async def test_client_gives_labels_expiry_and_scopes_and_moves_and_lets_go(store: Store, settings: Settings) -> None:
    def use(url: str) -> None:
        with Client(url) as client:
            expires_at = datetime(2040, 1, 2, tzinfo=UTC)
            first = client.enqueue("a", unique_key="k", labels={"tenant": "acme"}, expires_at=expires_at, limit_key="l")
            task = client.status(first["id"], detail=True)
            assert (task["labels"], task["limit_key"]) == ({"tenant": "acme"}, "l")
            assert task["expires_at"] == "2040-01-02T00:00:00.000000Z"
            again = client.enqueue("a", [2], unique_key="k", unique="live", on_duplicate="replace")
            assert again == {"id": first["id"], "state": "SCHEDULED", "duplicate": True, "replaced": True}
            with pytest.raises(DuplicateTask) as duplicate:
                client.enqueue("a", unique_key="k", on_duplicate="error")
            assert duplicate.value.data == {"id": first["id"], "state": "SCHEDULED"}
            moved = client.reschedule(first["id"], run_at=expires_at, priority=3)
            assert moved == {"id": first["id"], "state": "SCHEDULED"}
            task = client.status(first["id"])
            assert (task["run_at"], task["priority"]) == ("2040-01-02T00:00:00.000000Z", 3)
            client.cancel(first["id"], reason="no longer wanted")
            assert client.status(first["id"])["reason"] == "no longer wanted"
            second = client.enqueue("a", unique_key="k", unique="live")
            with pytest.raises(StateConflict) as taken:
                client.retry(first["id"])
            assert taken.value.data["holder"] == second["id"]
            assert client.ordering_list() == {"keys": [], "cursor": None}
            assert client.ordering_release("o") == {"key": "o", "released": False, "next": None}
            with pytest.raises(ValueError, match="expires_at needs a zone"):
                client.enqueue("a", expires_at=datetime(2040, 1, 2))

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)


class Order(BaseModel):
    id: UUID
    price: Decimal


async def test_models_and_times_are_written_as_json_by_every_client(
    store: Store, settings: Settings, inbound: SqsQueue
) -> None:
    order, told = Order(id=UUID(int=7), price=Decimal("9.90")), {"id": str(UUID(int=7)), "price": "9.90"}
    hour = timedelta(hours=1)

    def use(url: str) -> None:
        with Client(url) as client:
            task = client.status(client.enqueue("a", order, expires_in=hour, delay=hour)["id"], detail=True)
            assert task["payload"] == told
            assert task["run_at"] > task["created_at"]
            client.schedules.create("nightly", "@every 1h", "a", {"orders": {order.id: order}}, jitter=hour / 60)
            schedule = client.schedules.get("nightly")
            assert (schedule["payload"], schedule["jitter"]) == ({"orders": {told["id"]: told}}, 60)

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)
        async with AsyncClient(api.url) as client:
            task = (await client.enqueue("a", [order, {hour}], timeout=hour))["id"]
            assert (await client.status(task, detail=True))["payload"] == [told, ["PT3600S"]]
    async with InboundClient(settings.inbound_queue, settings.sqs_endpoint_url, settings.aws_region) as client:
        await client.enqueue("a", order, delay=hour)
    (message,) = await inbound.receive(wait_seconds=5, visibility_seconds=60)
    (sent,) = read_inbound(message.body, settings).tasks
    assert (json.loads(sent.payload), sent.delay_seconds) == (told, 3600)


async def test_errors_of_the_api_are_raised_by_their_kind(store: Store, settings: Settings) -> None:
    def use(url: str) -> None:
        with Client(url) as client:
            with pytest.raises(TaskNotFound) as unknown:
                client.status(4711)
            assert unknown.value.data == {"id": 4711}
            with pytest.raises(InvalidParams) as wrong:
                client.enqueue("a", prioriti=1)
            assert wrong.value.data["field"] == "prioriti"
            with pytest.raises(MethodNotFound):
                client.call("huh")
            with pytest.raises(StateConflict):
                client.retry(client.enqueue("a")["id"])
            with pytest.raises(TooLarge):
                client.enqueue("a", ["x" * 300_000])

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)


async def test_key_is_sent_and_a_wrong_one_is_an_error(store: Store, settings: Settings) -> None:
    def use(url: str) -> None:
        with Client(url, api_key="right") as client:
            client.enqueue("a")
        with Client(url, api_key="wrong") as client, pytest.raises(RpcError) as denied:
            client.enqueue("a")
        assert denied.value.code == -32003

    settings = settings.model_copy(update={"api_keys": (SecretStr("right"),)})
    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)


async def test_rate_that_runs_out_in_between_tells_what_is_left(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.client.exchanges.BATCH_TASKS", 10)
    settings = settings.model_copy(update={"api_rate_limit": 0.01, "api_rate_burst": 25})

    def use(url: str) -> None:
        with Client(url) as client:
            with pytest.raises(Unfinished, match="15 of 35 tasks were not accepted: Too many requests") as caught:
                client.enqueue_many({"action": "a"} for _ in range(35))
            assert (len(caught.value.results), len(caught.value.unsent)) == (20, 15)
            client.enqueue_many({"action": "a"} for _ in range(5))
            with pytest.raises(RateLimited) as limited:
                client.enqueue("a")
            assert limited.value.data["retry_after"] > 1

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)


async def test_batch_returns_results_and_errors_in_the_order_of_the_calls(store: Store, settings: Settings) -> None:
    async with running(store, settings) as api:
        with Client(api.url) as client:
            calls: list[tuple[str, Any]] = [
                ("enqueue", {"action": "a"}),
                ("status", {"id": 999}),
                ("enqueue", ["b"]),
                ("stats", None),
            ]
            answers = await asyncio.to_thread(client.batch, calls)
    assert answers[0]["state"] == answers[2]["state"] == "SCHEDULED"
    assert isinstance(answers[1], TaskNotFound)
    assert "states" in answers[3]


async def test_many_tasks_are_cut_to_what_the_api_takes(store: Store, settings: Settings) -> None:
    """A lower batch limit than the client's own; one bad task fails alone."""
    settings = settings.model_copy(update={"batch_limit": 70, "request_limit_bytes": 20_000})
    tasks = [{"action": "n", "payload": {"n": n}} for n in range(500)]
    tasks[7] = {"action": ""}
    tasks[300] = {"action": "n", "payload": ["x" * 30_000]}
    async with running(store, settings) as api:
        with Client(api.url) as client:
            answers = await asyncio.to_thread(client.enqueue_many, iter(tasks))
            ids = [answer["id"] for answer in answers if isinstance(answer, dict)]
            shown = await asyncio.to_thread(client.status, ids, detail=True)
    assert [n for n, answer in enumerate(answers) if not isinstance(answer, dict)] == [7, 300]
    assert isinstance(answers[7], InvalidParams)
    assert isinstance(answers[300], TooLarge)
    assert [task["payload"]["n"] for task in shown] == [n for n in range(500) if n not in (7, 300)]


async def test_api_that_goes_away_leaves_the_tasks_that_are_left(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.client.exchanges.BATCH_TASKS", 10)
    async with running(store, settings) as api:
        client = Client(api.url)
        first = await asyncio.to_thread(client.enqueue_many, [{"action": "a"}] * 25)
        assert len(first) == 25
    with pytest.raises(Unfinished, match="25 of 25 tasks were not accepted") as unfinished:
        await asyncio.to_thread(client.enqueue_many, [{"action": "a"}] * 25)
    assert unfinished.value.results == []
    assert len(unfinished.value.unsent) == 25
    client.close()


async def test_inbound_client_packs_tasks_that_the_submitter_can_read(settings: Settings, inbound: SqsQueue) -> None:
    async with InboundClient(settings.inbound_queue, settings.sqs_endpoint_url, settings.aws_region) as client:
        await client.enqueue("one", {"text": "é\ud83d\ude00\uffff".encode("utf-16", "surrogatepass").decode("utf-16")})
        sent = await client.enqueue_many(
            {"action": "n", "payload": {"n": n}, "priority": 3} for n in range(MESSAGE_TASKS * 12 + 1)
        )
    assert sent == MESSAGE_TASKS * 12 + 1
    bodies: list[str] = []
    while messages := await inbound.receive(wait_seconds=1, visibility_seconds=60):
        bodies += [message.body for message in messages]
    assert len(bodies) == 1 + 13
    read = [read_inbound(body, settings) for body in bodies]
    assert not [refused for part in read for refused in part.refused]
    tasks = [task for part in read for task in part.tasks]
    assert [json.loads(task.payload)["text"] for task in tasks if task.action == "one"] == ["é😀\uffff"]
    numbered = sorted(json.loads(task.payload)["n"] for task in tasks if task.action == "n")
    assert numbered == list(range(MESSAGE_TASKS * 12 + 1))
    assert {task.priority for task in tasks if task.action == "n"} == {3}


def test_the_blocking_inbound_client_sends_what_the_other_sends(settings: Settings) -> None:
    def send(client: SyncInboundClient) -> None:
        client.enqueue("one", {"n": 1}, delay=timedelta(minutes=1))

    with SyncInboundClient(settings.inbound_queue, settings.sqs_endpoint_url, settings.aws_region) as client:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(send, [client] * 4))
        assert client.enqueue_many([{"action": "two"}, {"action": "two"}]) == 2
        client.schedules.pause("nightly")
        client.workflows.cancel(key="k")
        client.complete("token", {"a": 1})
        client.fail("token", "no", retry_after=timedelta(seconds=5))
        with pytest.raises(TooLarge):
            client.enqueue("large", {"text": "x" * 1_100_000})
    client.close()  # once more
    with (
        SyncInboundClient(
            settings.inbound_queue + "-missing", settings.sqs_endpoint_url, settings.aws_region
        ) as client,
        pytest.raises(Unfinished) as unfinished,
    ):
        client.enqueue("lost")
    assert unfinished.value.unsent == [{"action": "lost"}]

    async def received() -> list[Any]:
        transport = SqsTransport(settings)
        queue = transport.queue(settings.inbound_queue, label="inbound")
        bodies: list[Any] = []
        while messages := await queue.receive(wait_seconds=1, visibility_seconds=60):
            bodies += [json.loads(message.body) for message in messages]
        await transport.close()
        return [request for body in bodies for request in (body if isinstance(body, list) else [body])]

    requests = asyncio.run(received())
    assert sorted(request["method"] for request in requests) == sorted(
        [*["enqueue"] * 6, "schedule.pause", "workflow.cancel", "task.complete", "task.fail"]
    )
    by_method = {request["method"]: request["params"] for request in requests}
    assert by_method["task.fail"] == {"token": "token", "retry_after": 5.0, "error": "no", "final": False}
    assert by_method["schedule.pause"] == {"name": "nightly"}
    assert [r["params"]["delay"] for r in requests if r["params"].get("action") == "one"] == [60.0] * 4


async def test_tasks_for_a_missing_queue_are_handed_back_and_sent_once_it_is_there(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.client.inbound._FIRST_PAUSE_SECONDS", 0.001)
    later = settings.model_copy(update={"inbound_queue": settings.inbound_queue + "-later"})
    tasks = [{"action": "a", "payload": [n]} for n in range(MESSAGE_TASKS + 5)]
    async with InboundClient(later.inbound_queue, settings.sqs_endpoint_url, settings.aws_region) as client:
        with pytest.raises(Unfinished, match="does not exist") as unfinished:
            await client.enqueue_many(tasks)
        assert unfinished.value.unsent == tasks
        await create_queues(later)
        assert await client.enqueue_many(unfinished.value.unsent) == len(tasks)
