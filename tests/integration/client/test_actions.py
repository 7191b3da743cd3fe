"""Actions enqueued by calling them, run by a real worker, their results read as the annotated types."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, TypedDict
from uuid import UUID

import asyncpg
import msgspec
import psycopg
import pytest
from pydantic import BaseModel, Field

import penstock
from penstock import Action, Bound, Call, Context, Task, Unfinished, Wait, action
from penstock.brokers.sqs import SqsQueue
from penstock.client import default
from penstock.db.pool import Store
from penstock.protocol.errors import DuplicateTask, InvalidParams, SettingsError, UnexpectedResult
from penstock.settings.model import Settings
from penstock.worker.handlers.actions import Registry
from tests.integration.apis import running
from tests.integration.pipelines import pipeline

REGISTRY = Registry()
DAY = datetime(2030, 1, 31, 8, tzinfo=UTC)


class Colour(Enum):
    RED = "red"


class Size(BaseModel):
    width: int = Field(gt=0, alias="w")


@dataclass
class Image:
    id: UUID
    size: Size
    colours: list[Colour]


class Price(msgspec.Struct):
    amount: Decimal
    at: datetime


class Offer(TypedDict):
    price: Price
    until: datetime


@action(registry=REGISTRY)
async def order(ctx: Context, image: Image, price: Price, *, copies: int = 1) -> list[Image]:
    assert isinstance(price.amount, Decimal)
    return [image] * copies


@action(registry=REGISTRY)
async def offer(price: Price) -> Offer:
    return {"price": price, "until": price.at + timedelta(days=1)}


@action("double", registry=REGISTRY)
def double(n: int) -> int | Wait:
    return 2 * n


@action(batch=10, registry=REGISTRY)
async def total(calls: list[Call[Price]]) -> list[Decimal | Exception]:
    return [call.params.amount + 1 for call in calls]


@action(registry=REGISTRY)
def liar(ctx: Context) -> int:
    return "text"  # type: ignore[return-value]


IMAGE = Image(UUID(int=7), Size(w=3), [Colour.RED])
PRICE = Price(Decimal("1.50"), DAY)


@pytest.fixture(autouse=True)
def _no_client_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default, "_arguments", {})
    default.client.cache_clear()


async def test_arguments_and_results_keep_their_types(
    store: Store, settings: Settings, outbound: SqsQueue, results: SqsQueue
) -> None:
    async with pipeline(store, settings, outbound, results, REGISTRY):
        task = await order.enqueue(IMAGE, price=PRICE, copies=2)
        assert isinstance(task, Task)
        result = await task.result(timeout=60)
        assert result == [IMAGE, IMAGE]
        assert (type(result[0].size), result[0].colours) == (Size, [Colour.RED])
        offered = await (await offer.enqueue(PRICE)).result(timeout=60)
        assert offered == {"price": PRICE, "until": DAY + timedelta(days=1)}
        assert (await task.status())["state"] == "SUCCESS"
        assert await order.task(task.id).result() == result

        doubled = await double.enqueue_many([double.bind(1), {"n": 2}, double.with_options(priority=5).bind(n=3)])
        assert [await one.result(timeout=60) for one in doubled] == [2, 4, 6]
        assert (await doubled[2].status())["priority"] == 5
        assert await (await total.enqueue(PRICE)).result(timeout=60) == Decimal("2.50")

        lied = await liar.enqueue()
        with pytest.raises(UnexpectedResult, match=f"task {lied.id} is not of the annotated type: Expected `int`"):
            await lied.result(timeout=60)

        def blocking() -> None:
            task = double.enqueue_sync(21)
            assert task.result_sync(timeout=60) == 42
            assert task.status_sync()["payload"] == {"n": 21}
            assert [one.result_sync(timeout=60) for one in double.enqueue_many_sync([{"n": 4}])] == [8]

        await asyncio.to_thread(blocking)


async def test_options_go_with_each_task(store: Store, settings: Settings) -> None:
    async with running(store, settings) as api:
        penstock.connect(api.url)
        later = double.with_options(delay=timedelta(hours=1), labels={"of": "test"})
        task = await later.with_options(unique_key="one", on_duplicate="replace").enqueue(1)
        again = await later.with_options(unique_key="one").enqueue(2)
        assert (task.duplicate, again) == (False, Task(task.id, duplicate=True))
        assert again.replaced is None
        detail = await task.status()
        assert (detail["labels"], detail["payload"]) == ({"of": "test"}, {"n": 1})
        assert (await later.with_options(unique_key="one", on_duplicate="replace").enqueue(3)).replaced is True

        refused = later.with_options(unique_key="one", on_duplicate="error")
        with pytest.raises(DuplicateTask):
            await refused.enqueue(4)
        with pytest.raises(Unfinished, match="1 of 2 tasks were refused") as caught:
            await later.enqueue_many([{"n": 5}, refused.bind(6)])
        added, duplicate = caught.value.results
        assert added["state"] == "SCHEDULED"
        assert isinstance(duplicate, DuplicateTask)
        assert caught.value.unsent == [refused.bind(6)]

        assert (await task.cancel(reason="enough"))["state"] == "CANCELLED"
        with pytest.raises(penstock.ResultCancelled, match="enough"):
            await task.result()
        with pytest.raises(penstock.StateConflict):
            await asyncio.to_thread(task.cancel_sync)
        with pytest.raises(penstock.ResultTimeout):
            await asyncio.to_thread(double.task(added["id"]).result_sync, timeout=0)


async def test_a_task_is_there_if_its_transaction_commits(database_url: str, task_of: Callable[[int], Any]) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        task = await order.with_options(priority=3).enqueue_in(connection, IMAGE, PRICE)
        assert (await task_of(task.id))["priority"] == 3
        transaction = connection.transaction()
        await transaction.start()
        rolled_back = await double.enqueue_in(connection, n=1)
        await transaction.rollback()
        assert await task_of(rolled_back.id) is None
        first, second = await penstock.enqueue_many(connection, [double.bind(1), total.bind(PRICE)])
        assert (await task_of(second["id"]))["id"] == first["id"] + 1
    finally:
        await connection.close()

    def blocking() -> Task[int]:
        with psycopg.connect(database_url) as connection:
            return double.enqueue_in_sync(connection, 2)

    assert await task_of((await asyncio.to_thread(blocking)).id) is not None


def test_what_the_worker_would_refuse_is_refused_before_it_is_sent() -> None:
    with pytest.raises(InvalidParams, match=r"Invalid params: n is wrong: Expected `int`, got `str`"):
        double.enqueue_sync("1")  # type: ignore[arg-type]
    with pytest.raises(InvalidParams, match="url is no parameter of double"):
        double.enqueue_sync(1, url="u")  # type: ignore[call-arg]
    with pytest.raises(InvalidParams, match="n is missing"):
        double.enqueue_sync()  # type: ignore[call-arg]
    with pytest.raises(InvalidParams, match="Input should be greater than 0"):
        order.bind(Image(UUID(int=1), Size.model_construct(width=0), []), PRICE)
    with pytest.raises(TypeError, match="two values for n"):
        double.bind(1, n=2)  # type: ignore[misc]
    with pytest.raises(TypeError, match="no option is named 'priorty'; did you mean priority"):
        double.with_options(priorty=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="not JSON-serialisable"):
        order.bind(object(), PRICE)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="one argument, the params of a call"):
        total.bind(PRICE, PRICE)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="a call of 'order' is not one of 'double'"):
        double.enqueue_many_sync([order.bind(IMAGE, PRICE)])


def test_arguments_become_an_object_or_where_that_cannot_be_an_array() -> None:
    @action(registry=Registry())
    def by_position(a: int, b: int = 2, /) -> None: ...

    @action(registry=Registry())
    def any_number(*numbers: int, scale: int = 1) -> None: ...

    @action(registry=Registry())
    def anything(ctx: Any, n: int = 0, **more: Any) -> None: ...

    assert by_position.bind(1) == {"action": "by_position", "payload": [1]}
    assert anything.bind(1, x=DAY)["payload"] == {"n": 1, "x": "2030-01-31T08:00:00Z"}
    assert anything.bind()["payload"] == {}
    assert double.bind(1) == double.bind(n=1) == Bound({"action": "double", "payload": {"n": 1}})
    with pytest.raises(TypeError, match="by position alone, or by name alone"):
        by_position.bind(1, c=2)  # type: ignore[call-arg]


def test_a_call_can_be_spawned_or_be_a_step_of_a_workflow() -> None:
    ctx = Context(1, 1, "order")
    ctx.spawn(**double.with_options(priority=3).bind(4))
    assert json.loads(ctx.spawned[0]) == {"action": "double", "priority": 3, "payload": {"n": 4}}
    workflow = penstock.Workflow()
    workflow.step(**double.bind(4), name="four")
    (step,) = workflow.params()["steps"]
    assert (step["name"], step["action"], step["payload"]) == ("four", "double", {"n": 4})


def test_a_forked_process_makes_a_client_of_its_own() -> None:
    mine = default.client()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if default.client() is not mine else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert default.client() is mine


def test_an_action_is_called_and_found_as_its_function() -> None:
    assert double(4) == 8
    assert asyncio.run(order(Context(1, 1, "order"), IMAGE, PRICE))[0] is IMAGE
    assert (order.__name__, order.__module__, repr(order)) == ("order", __name__, "<action 'order'>")
    assert isinstance(order, Action)
    assert REGISTRY["order"].function is order.function

    other = action("other", registry=Registry())(double)
    assert (other.name, double.name, other(1)) == ("other", "double", 2)


def test_an_action_is_pickled_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(order)) is order


def test_a_result_whose_annotation_cannot_be_used_says_so_when_it_is_read() -> None:
    @action(registry=Registry())
    def hidden() -> OnlyForCheckers: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(SettingsError, match=r"the result of .*hidden cannot be checked.*OnlyForCheckers"):
        hidden.task(1)._read(1, None)


def test_each_event_loop_has_a_client_that_is_closed_with_it() -> None:
    penstock.connect("http://127.0.0.1:9")

    async def used() -> Any:
        client = await default.async_client()
        assert await default.async_client() is client
        return client

    first, second = asyncio.run(used()), asyncio.run(used())
    assert first is not second
    assert first._http.is_closed
    assert second._http.is_closed
    assert not default._by_loop
    assert (default.client() is default.client(), default.client().url) == (True, "http://127.0.0.1:9")


def test_the_environment_names_the_api_until_connect_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_URL", "http://from-the-environment:1")
    assert default.client().url == "http://from-the-environment:1"
    penstock.connect("http://named:2/rpc", api_key="key")
    assert default.client().url == "http://named:2"
    assert default.client()._http.headers["authorization"] == "Bearer key"
